"""Positions of a log's chunks within the stored object (FixedSizeChunkIndex, VariableSizeChunkIndex, ChunkSizesBinaryCodec).

``fixed``: all stored chunks but the last have the same length. ``variable``: the length of each chunk is listed in a binary codec.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

import zstandard

MAX_INT32: Final = 2**31 - 1
_MAX_CODEC_BYTES: Final = 10 << 20  # VariableSizeChunkIndex reads no more

StoredBytes = int
"""Size in bytes of stored data, after compression and encryption."""
StoredBytePosition = int


class InvalidAivenDataError(ValueError):
    """Raised if data that Aiven's plug-in stored is corrupt or inconsistent. Callers that know the object's key convert it to BadData."""


class StoredChunk(NamedTuple):
    """Position of a chunk (equal part of a log that is stored compressed or encrypted): ``size`` bytes of the log from ``start``, and
    ``stored_size`` bytes of the object from ``stored_start``.
    """

    start: int
    size: int
    stored_start: int
    stored_size: int


@dataclass(frozen=True)
class ChunkIndex:
    """Sizes of the chunks (equal parts) of one log, from which the position of each stored chunk follows.

    chunk_size, file_size: size in bytes of a chunk and of the log, before compression and encryption.
    lengths: stored sizes in bytes, one for each chunk. If ``fixed``, two: the size of every chunk but the last, and that of the last.
    """

    chunk_size: int
    file_size: int
    lengths: tuple[int, ...]
    fixed: bool

    def __post_init__(self) -> None:
        if not 0 < self.chunk_size <= MAX_INT32 or not 0 <= self.file_size <= MAX_INT32:
            raise InvalidAivenDataError(f"chunks of {self.chunk_size} bytes and a file of {self.file_size}")
        if not self.fixed and len(self.lengths) != self.chunk_count:
            raise InvalidAivenDataError(f"{len(self.lengths)} chunks are listed, {self.file_size} bytes have {self.chunk_count}")
        if any(not 0 <= length <= MAX_INT32 for length in self.lengths):
            raise InvalidAivenDataError("a chunk has an impossible length")

    @property
    def chunk_count(self) -> int:
        """Return the number of chunks."""
        return -(-self.file_size // self.chunk_size)

    @property
    def stored_size(self) -> StoredBytes:
        """Return the size in bytes of the log's object as stored, after compression and encryption."""
        return self._stored_chunk_start_byte(self.chunk_count)

    def stored_chunk(self, chunk_number: int) -> StoredChunk:
        """Return the position of chunk ``chunk_number``, counted from 0."""
        start = chunk_number * self.chunk_size
        last = chunk_number == self.chunk_count - 1
        size = self.file_size - start if last else self.chunk_size
        stored = self.lengths[1 if last else 0] if self.fixed else self.lengths[chunk_number]
        return StoredChunk(start, size, self._stored_chunk_start_byte(chunk_number), stored)

    def chunk_numbers_of_byte_range(self, start_byte: int, end_byte: int) -> range:
        """Return the numbers of the chunks that hold bytes [start_byte, end_byte) of the log. The range must not be empty."""
        return range(start_byte // self.chunk_size, -(-end_byte // self.chunk_size))

    def require_uncompressed_chunks(self, encryption_overhead_bytes: int) -> None:
        """Raise InvalidAivenDataError unless each chunk of the index is stored with its size plus the bytes that encryption adds."""
        full = self.chunk_size + encryption_overhead_bytes
        last = self.file_size - (self.chunk_count - 1) * self.chunk_size + encryption_overhead_bytes
        expected = (full, last) if self.fixed else (full,) * (self.chunk_count - 1) + (last,)
        if self.chunk_count and self.lengths != expected:
            raise InvalidAivenDataError("the lengths of chunks do not fit a log that is not compressed")

    def _stored_chunk_start_byte(self, chunk_number: int) -> StoredBytePosition:
        """Return the position in the stored object at which a chunk begins."""
        if not self.fixed:
            return self._chunk_starts[chunk_number]
        full, last = self.lengths
        return chunk_number * full if chunk_number < self.chunk_count or not chunk_number else (chunk_number - 1) * full + last

    @cached_property
    def _chunk_starts(self) -> tuple[StoredBytePosition, ...]:
        return tuple(accumulate(self.lengths, initial=0))

    def to_json(self) -> dict[str, Any]:
        """Return the chunk index as JSON fields, in the order in which Aiven's plug-in writes them."""
        common = {"originalChunkSize": self.chunk_size, "originalFileSize": self.file_size}
        if self.fixed:
            full, last = self.lengths
            return {"type": "fixed", **common, "transformedChunkSize": full, "finalTransformedChunkSize": last}
        packed = zstandard.ZstdCompressor(write_content_size=True).compress(encode_chunk_sizes(self.lengths))
        return {"type": "variable", **common, "transformedChunks": base64.b64encode(packed).decode()}


def chunk_index_of_uncompressed_log(chunk_size: int, file_size: int, encryption_overhead_bytes: int) -> ChunkIndex:
    """Return the chunk index of an uncompressed log. encryption_overhead_bytes: bytes that encryption adds to each chunk."""
    count = -(-file_size // chunk_size)
    last = file_size - (count - 1) * chunk_size if count else 0
    return ChunkIndex(chunk_size, file_size, (chunk_size + encryption_overhead_bytes, last + encryption_overhead_bytes), fixed=True)


def chunk_index_of_compressed_log(chunk_size: int, file_size: int, lengths: Sequence[int]) -> ChunkIndex:
    """Return the chunk index of a compressed log. lengths: stored length of each chunk."""
    return ChunkIndex(chunk_size, file_size, tuple(lengths), fixed=False)


def encode_chunk_sizes(values: Sequence[int]) -> bytes:
    """Encode chunk sizes in the plug-in's codec: every value but the last as difference from the smallest, in as few bytes as needed."""
    if len(values) < 2:
        return struct.pack(f">{1 + len(values)}i", len(values), *values)
    *most, last = values
    base = min(most)
    width = max(1, -(-max(value - base for value in most).bit_length() // 8))
    distances = b"".join((value - base).to_bytes(width, "big") for value in most)
    return struct.pack(">iib", len(values), base, width) + distances + struct.pack(">i", last)


def decode_chunk_sizes(data: bytes) -> tuple[int, ...]:
    """Decode a list of chunk sizes from the plug-in's codec. Raises InvalidAivenDataError if the bytes are not exactly one list."""
    try:
        (count,) = struct.unpack_from(">i", data)
        if count < 2:
            if count < 0 or len(data) != 4 + 4 * count:
                raise InvalidAivenDataError("the list of chunks has another length than it says")
            return struct.unpack_from(f">{count}i", data, 4)
        base, width = struct.unpack_from(">ib", data, 4)
        if not 1 <= width <= 4 or len(data) != 13 + (count - 1) * width:
            raise InvalidAivenDataError("the list of chunks has another length than it says")
        most = (base + int.from_bytes(data[at : at + width], "big") for at in range(9, 9 + (count - 1) * width, width))
        return (*most, *struct.unpack_from(">i", data, len(data) - 4))
    except struct.error:
        raise InvalidAivenDataError("the list of chunks is cut off") from None


def decode_transformed_chunks_field(encoded_lengths: str) -> tuple[int, ...]:
    """Decode Aiven's field ``transformedChunks``: base64 of a zstd frame that holds chunk sizes in the encoding of ``encode_chunk_sizes``.
    Raises InvalidAivenDataError.
    """
    packed = decode_strict_base64(encoded_lengths, "transformedChunks")
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= _MAX_CODEC_BYTES:
            raise InvalidAivenDataError("the list of chunks does not say its size, or is larger than the plug-in reads")
        unpacked = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidAivenDataError(f"the list of chunks cannot be decompressed: {error}") from None
    if len(unpacked) != size:
        raise InvalidAivenDataError("the list of chunks is cut off")
    return decode_chunk_sizes(unpacked)


def decode_strict_base64(encoded: str, field_name: str) -> bytes:
    """Decode standard, padded base64 without unused bits. Raises InvalidAivenDataError. field_name: field name for the message."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidAivenDataError(f"{field_name} is not base64") from None
    if base64.b64encode(data).decode() != encoded:
        raise InvalidAivenDataError(f"{field_name} is not base64 as it is written")
    return data
