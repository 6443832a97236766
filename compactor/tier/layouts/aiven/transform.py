"""What is done to the bytes of one chunk on the way: zstd, then AES-256-GCM (CompressionChunkEnumeration, EncryptionChunkEnumeration).

A chunk is a zstd frame of its own that says its size; encrypted it is ``iv (12) || ciphertext || tag (16)``. Index files are one
chunk each, never compressed.
"""

from __future__ import annotations

from typing import Final, Protocol

import zstandard

from compactor.tier.layouts.aiven.chunk_index import Misfit

IV_BYTES: Final = 12
TAG_BYTES: Final = 16
OVERHEAD: Final = IV_BYTES + TAG_BYTES


class ChunkCipher(Protocol):
    """AES-256-GCM under one segment's data key."""

    def encrypted(self, iv: bytes, plain: bytes) -> bytes:
        """``iv || ciphertext || tag``"""

    def decrypted(self, stored: bytes) -> bytes:
        """Raises Misfit."""


def compress(chunk: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=True).compress(chunk)


def restore(stored: bytes, size: int, cipher: ChunkCipher | None, *, compressed: bool) -> bytes:
    """The chunk as it was before. Raises Misfit where that is not ``size`` bytes."""
    data = cipher.decrypted(stored) if cipher else stored
    if compressed:
        data = _decompressed(data, size)
    if len(data) != size:
        raise Misfit(f"a chunk holds {len(data)} bytes, {size} were expected")
    return data


def _decompressed(data: bytes, size: int) -> bytes:
    try:
        # A frame that lies about its size would be a bomb.
        if zstandard.frame_content_size(data) != size:
            raise Misfit(f"a compressed chunk does not hold {size} bytes")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Misfit(f"a chunk cannot be decompressed: {error}") from None
