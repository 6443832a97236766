"""Compression and encryption of one chunk: zstd, then AES-256-GCM (CompressionChunkEnumeration, EncryptionChunkEnumeration).

A compressed chunk is a zstd frame that states its size; encrypted it is ``iv (12) || ciphertext || tag (16)``. An index file is a single
chunk and never compressed.
"""

from __future__ import annotations

from typing import Final, Protocol

import zstandard

from compactor.tier.layouts.aiven.chunk_index import InvalidAivenDataError

IV_BYTES: Final = 12
TAG_BYTES: Final = 16
ENCRYPTION_OVERHEAD: Final = IV_BYTES + TAG_BYTES


class ChunkCipher(Protocol):
    """Cipher that encrypts and decrypts chunks with AES-256-GCM under one segment's data key."""

    def encrypt(self, iv: bytes, plain: bytes) -> bytes:
        """Encrypt a chunk. Return the initialization vector, the ciphertext and the authentication tag, joined."""

    def decrypt(self, stored: bytes) -> bytes:
        """Decrypt a chunk and return its plain bytes. Raises InvalidAivenDataError if it is not authentic."""


def compress_chunk(chunk: bytes) -> bytes:
    """Compress a chunk to a zstd frame that states its size."""
    return zstandard.ZstdCompressor(write_content_size=True).compress(chunk)


def decode_chunk(stored: bytes, plain_bytes: int, cipher: ChunkCipher | None, *, is_compressed: bool) -> bytes:
    """Decrypt and decompress a chunk. Raises InvalidAivenDataError if the result does not have ``plain_bytes`` bytes."""
    data = cipher.decrypt(stored) if cipher else stored
    if is_compressed:
        data = _decompress_chunk(data, plain_bytes)
    if len(data) != plain_bytes:
        raise InvalidAivenDataError(f"a chunk holds {len(data)} bytes, {plain_bytes} were expected")
    return data


def _decompress_chunk(data: bytes, plain_bytes: int) -> bytes:
    """Decompress a chunk. Raises InvalidAivenDataError if the size stated in its zstd frame is not ``plain_bytes``."""
    try:
        # A frame that lies about its size would be a bomb.
        if zstandard.frame_content_size(data) != plain_bytes:
            raise InvalidAivenDataError(f"a compressed chunk does not hold {plain_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=plain_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidAivenDataError(f"a chunk cannot be decompressed: {error}") from None
