"""The five compression codecs of record batches, in every framing that clients write (KIP-98; docs/kafka-rules.md 5.6).
Decompression accepts everything that Kafka's Java client accepts: gzip with several members, raw snappy and Xerial frames, lz4 frames with
or without checksums and content size (and with the invalid header checksum of message format v0), zstd with or without content size and in
several frames. Compression is at Kafka's default levels; lz4 in independent blocks of 64 KiB.
Decompressed size is limited everywhere: a decompression bomb raises an error before memory is allocated for it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, Final

import cramjam
import lz4
import lz4.block
import lz4.frame
import numpy as np
import xxhash
import zstandard
from zlib_ng import zlib_ng

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4
CODEC_NAMES: Final = ("none", "gzip", "snappy", "lz4", "zstd")

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
XERIAL_BLOCK: Final = 32 * 1024
_XERIAL_SIZE: Final = struct.Struct(">i")
_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
_LZ4_RATIO: Final = 256  # an lz4 byte never gives more than 255 bytes
LZ4_STORED: Final = 1 << 31
_LZ4_WORD: Final = struct.Struct("<I")
LZ4_HEADER_BYTES: Final = 7
_ZSTD_RATIO: Final = 12
_ZSTD_WINDOW_LOG_MAX: Final = 27  # zstd's own default for decoders: 128 MiB


def _lz4_frame_header(block_size_code: int) -> bytes:
    """Independent blocks, no checksums or content size, as Java clients and librdkafka write it."""
    descriptor = bytes([0x60, block_size_code << 4])
    return _LZ4_MAGIC + descriptor + bytes([(xxhash.xxh32_intdigest(descriptor) >> 8) & 0xFF])


LZ4_PLAIN: Final = {_lz4_frame_header(code): 1 << (8 + 2 * code) for code in (4, 5, 6, 7)}
LZ4_BLOCK: Final = 64 * 1024
LZ4_HEADER: Final = _lz4_frame_header(4)

_LARGE: Final = 1 << 22

Buffer = bytes | bytearray | memoryview


SizeOrSizes = Any
"""A number of bytes, or an array of such numbers."""


class CodecError(Exception):
    """Raised for bytes that cannot be decompressed, or decompress to more than allowed."""


class GrowingByteBuffer:
    """Reused byte array: new memory for every body costs more than decompression. Not thread-safe."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.array = np.empty(capacity, np.uint8)
        self._view = self.array.data
        self.size = 0

    def clear(self) -> None:
        self.size = 0

    def reserve_space(self, nbytes: int) -> memoryview:
        """A view after the content, valid until the next call. Bytes there are content once ``size`` is increased."""
        if self.size + nbytes > len(self.array):
            most = max(self.size + nbytes, 2 * len(self.array))
            # From there on numpy asks for large pages, which are cheaper to get; those that nothing is written to cost nothing.
            grown = np.empty(-most // _LARGE * -_LARGE if most > _LARGE // 8 else most, np.uint8)
            grown[: self.size] = self.array[: self.size]
            self.array = grown
            self._view = grown.data
        return self._view[self.size : self.size + nbytes]

    def append_bytes(self, data: Buffer) -> None:
        self.reserve_space(len(data))[:] = data
        self.size += len(data)


class _CompressionContextsOfThread(threading.local):
    """Contexts of one thread. Creating one costs more than a small batch, and threads cannot share them."""

    def __init__(self) -> None:
        self.zstd_compressor = zstandard.ZstdCompressor(level=3, write_content_size=False)
        self.zstd_decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _ZSTD_WINDOW_LOG_MAX)
        self.lz4_decompressor = lz4.frame.LZ4FrameDecompressor()


_contexts = _CompressionContextsOfThread()


def codec_library_versions() -> str:
    """Versions on which recompressed bytes depend (I7: equal plans give equal bytes)."""
    return f"gzip={zlib_ng.ZLIBNG_VERSION} lz4={lz4.library_version_string()} snappy={cramjam.__version__} zstd={zstandard.__version__}"


# ---- writing ----------------------------------------------------------------------------------------------------------------


def compress_body(codec: int, data: Buffer) -> bytes:
    """At Kafka's default level; ``codec`` is the low three bits of the attributes."""
    out = memoryview(bytearray(max_compressed_size(len(data))))
    return bytes(out[: compress_body_into(codec, memoryview(data), out)])


def max_compressed_size(size: SizeOrSizes) -> SizeOrSizes:
    """With any codec, of a number or an array."""
    return size + size // 6 + 64 * (size // XERIAL_BLOCK) + 128


def compress_body_into(codec: int, data: memoryview, out: memoryview) -> int:
    """Return the size, at most ``max_compressed_size(len(data))``. Raises CodecError for an unknown codec."""
    if codec == LZ4:
        return _compress_lz4(data, out)
    if codec == ZSTD:
        return _copy_uncompressed(_contexts.zstd_compressor.compress(data), out)
    if codec == SNAPPY:
        return _compress_snappy_xerial_stream(data, out)
    if codec == GZIP:
        # wbits 31 writes mtime 0: the same input gives the same bytes (I7).
        return _copy_uncompressed(zlib_ng.compress(data, level=6, wbits=31), out)
    if codec == NONE:
        return _copy_uncompressed(data, out)
    raise CodecError(f"unknown compression codec {codec}")


ZSTD_IN_BULK: Final = {"buffer_types", "multi_compress_to_buffer"} <= set(zstandard.backend_features)


def compress_zstd_bodies(data: memoryview, positions_and_sizes: bytes) -> Sequence[Buffer]:
    """Compress bodies in one call that releases the GIL.
    :param positions_and_sizes: per body, as 64-bit numbers; a size must not be 0.
    """
    made: Any = _contexts.zstd_compressor.multi_compress_to_buffer(zstandard.BufferWithSegments(data, positions_and_sizes))
    return list(made)


def _copy_uncompressed(data: Buffer, out: memoryview) -> int:
    out[: len(data)] = data
    return len(data)


def _compress_lz4(data: memoryview, out: memoryview) -> int:
    # Kafka's reader refuses linked blocks, so each is compressed by itself.
    out[:LZ4_HEADER_BYTES] = LZ4_HEADER
    at = LZ4_HEADER_BYTES
    for start in range(0, len(data), LZ4_BLOCK):
        block: Buffer = data[start : start + LZ4_BLOCK]
        packed = lz4.block.compress(block, store_size=False)
        word = len(packed)
        if word >= len(block):
            packed, word = block, len(block) | LZ4_STORED
        _LZ4_WORD.pack_into(out, at, word)
        at += 4
        out[at : at + len(packed)] = packed
        at += len(packed)
    _LZ4_WORD.pack_into(out, at, 0)
    return at + 4


def _compress_snappy_xerial_stream(data: memoryview, out: memoryview) -> int:
    compress_body, at = cramjam.snappy.compress_raw_into, len(XERIAL_HEADER)
    out[:at] = XERIAL_HEADER
    for start in range(0, len(data), XERIAL_BLOCK):
        size: int = compress_body(data[start : start + XERIAL_BLOCK], out[at + 4 :])
        _XERIAL_SIZE.pack_into(out, at, size)
        at += 4 + size
    return at


# ---- reading ----------------------------------------------------------------------------------------------------------------


def decompress_body_into(codec: int, data: memoryview, out: GrowingByteBuffer, max_decompressed_bytes: int, magic: int = 2) -> None:
    """After an error the caller must clear ``out``.
    :raises CodecError: if the body is corrupt, too large, or its codec is unknown.
    """
    try:
        if codec == LZ4:
            _decompress_lz4(data, out, max_decompressed_bytes, magic)
        elif codec == ZSTD:
            _decompress_zstd(data, out, max_decompressed_bytes)
        elif codec == SNAPPY:
            _decompress_snappy(data, out, max_decompressed_bytes)
        elif codec == GZIP:
            _decompress_gzip(data, out, max_decompressed_bytes)
        elif codec == NONE:
            out.append_bytes(data)
        else:
            raise CodecError(f"unknown compression codec {codec}")  # noqa: TRY301 - one way out
    except CodecError:
        raise
    except Exception as error:  # noqa: BLE001 - the libraries raise types of their own, some of them not exported
        raise CodecError(f"{CODEC_NAMES[codec]} data cannot be read: {error}") from None


def _decompressed_too_large_error(codec: int, max_bytes: int) -> CodecError:
    return CodecError(f"{CODEC_NAMES[codec]} data inflates beyond {max_bytes} bytes (max_decompressed_batch_bytes)")


def _decompress_gzip(data: memoryview, out: GrowingByteBuffer, max_decompressed_bytes: int) -> None:
    size = 0
    rest: Buffer = data
    while True:
        member = zlib_ng.decompressobj(31)
        part = member.decompress(rest, max_decompressed_bytes - size + 1)
        size += len(part)
        if size > max_decompressed_bytes:
            raise _decompressed_too_large_error(GZIP, max_decompressed_bytes)
        if not member.eof:
            raise CodecError("gzip data ends early")
        out.append_bytes(part)
        rest = member.unused_data
        # Java's GZIPInputStream ignores what follows a member and is not another one.
        if bytes(rest[:2]) != b"\x1f\x8b":
            return


def _decompress_snappy(data: memoryview, out: GrowingByteBuffer, max_decompressed_bytes: int) -> None:
    if bytes(data[:8]) != _XERIAL_MAGIC:
        if len(data) == 0:
            raise CodecError("snappy data is empty")
        _decompress_snappy_block(data, out, max_decompressed_bytes, max_decompressed_bytes)
        return
    left = max_decompressed_bytes
    position = len(XERIAL_HEADER)
    while position < len(data):
        if bytes(data[position : position + 8]) == _XERIAL_MAGIC:  # streams written one after the other
            position += len(XERIAL_HEADER)
            continue
        if position + 4 > len(data):
            raise CodecError("snappy frame ends early")
        length = int.from_bytes(data[position : position + 4], "big")
        position += 4
        block = data[position : position + length]
        if length == 0 or len(block) != length:
            raise CodecError("snappy frame ends early")
        left -= _decompress_snappy_block(block, out, left, max_decompressed_bytes)
        position += length


def _decompress_snappy_block(block: memoryview, out: GrowingByteBuffer, max_block_bytes: int, max_bytes: int) -> int:
    """Raises CodecError if the size exceeds ``max_block_bytes``; ``max_bytes`` is for the message."""
    size: int = cramjam.snappy.decompress_raw_len(block)
    if size > max_block_bytes:
        raise _decompressed_too_large_error(SNAPPY, max_bytes)
    if cramjam.snappy.decompress_raw_into(block, out.reserve_space(size)) != size:
        raise CodecError("snappy block is shorter than it says")
    out.size += size
    return size


def _decompress_lz4(data: memoryview, out: GrowingByteBuffer, max_decompressed_bytes: int, magic: int) -> None:
    block_size = LZ4_PLAIN.get(bytes(data[:LZ4_HEADER_BYTES]))
    if block_size is None:
        out.append_bytes(_decompress_unusual_lz4(data, max_decompressed_bytes, magic))
        return
    most = out.size + max_decompressed_bytes
    begin, end = LZ4_HEADER_BYTES + 4, len(data)
    while begin <= end:
        (word,) = _LZ4_WORD.unpack_from(data, begin - 4)
        if word == 0:
            return
        stop = begin + (word & ~LZ4_STORED)
        if stop > end:
            break
        if stop - begin > block_size:
            raise CodecError("an lz4 block is larger than its frame allows")
        if word & LZ4_STORED:
            out.append_bytes(data[begin:stop])
        else:
            out.size += cramjam.lz4.decompress_block_into(data[begin:stop], out.reserve_space(block_size))
        if out.size > most:
            raise _decompressed_too_large_error(LZ4, max_decompressed_bytes)
        begin = stop + 4
    raise CodecError("lz4 frame ends early")


def _decompress_unusual_lz4(data: memoryview, max_decompressed_bytes: int, magic: int) -> bytes:
    """Frames with checksums, with content size, or with the header checksum of message format v0."""
    if bytes(data[:4]) != _LZ4_MAGIC or len(data) < 7:
        raise CodecError("lz4 data has no frame header")
    if not data[4] & 0x20:
        raise CodecError("lz4 frame has linked blocks, which Kafka does not read")
    source = data
    if magic == 0:
        source = _fix_lz4_header_checksum(data)
    decoder = _contexts.lz4_decompressor
    decoder.reset()
    if len(data) * _LZ4_RATIO <= max_decompressed_bytes:
        out: bytes = decoder.decompress(source)
    else:
        out = decoder.decompress(source, max_decompressed_bytes + 1)
        if len(out) > max_decompressed_bytes:
            raise _decompressed_too_large_error(LZ4, max_decompressed_bytes)
    if not decoder.eof:
        raise CodecError("lz4 frame ends early")
    return out


def _fix_lz4_header_checksum(data: memoryview) -> memoryview:
    """In message format v0 clients computed the header checksum over the frame's magic number, too (KAFKA-3160)."""
    header = 6 + (8 if data[4] & 0x08 else 0)
    patched = bytearray(data)
    patched[header] = (xxhash.xxh32_intdigest(bytes(data[4:header])) >> 8) & 0xFF
    return memoryview(patched)


def _decompress_zstd(data: memoryview, out: GrowingByteBuffer, max_decompressed_bytes: int) -> None:
    # What clients write is one frame of unknown content size: where it is not too large, one call reads it.
    if len(data) > 8 and not data[4] & 0xE0 and _end_of_zstd_frame(data, 0) == len(data):
        most = min(max_decompressed_bytes, max(_ZSTD_RATIO * len(data), 1 << 16))
        try:
            out.append_bytes(_contexts.zstd_decompressor.decompress(data, max_output_size=most))
        except zstandard.ZstdError:
            pass  # who reads it in pieces says what is wrong, or that there is more
        else:
            return
    _decompress_zstd_stream(data, out, max_decompressed_bytes)


def _decompress_zstd_stream(data: memoryview, out: GrowingByteBuffer, max_decompressed_bytes: int) -> None:
    # Frames without a content size need the streaming reader; it also reads several frames, as Java does.
    reader = _contexts.zstd_decompressor.stream_reader(data, read_across_frames=True)
    left = max_decompressed_bytes
    guess = max(4 * len(data), 1 << 16)
    while True:
        reserved = out.reserve_space(min(left + 1, guess))
        size = reader.readinto(reserved)
        out.size += size
        left -= size
        if left < 0:
            raise _decompressed_too_large_error(ZSTD, max_decompressed_bytes)
        if size < len(reserved):
            break
        guess *= 2
    # The reader takes the end of its input for the end of the frame.
    if not _are_complete_zstd_frames(data):
        raise CodecError("zstd data ends early")


def _are_complete_zstd_frames(data: memoryview) -> bool:
    at = 0
    while 0 <= at < len(data):
        at = _end_of_zstd_frame(data, at)
    return at == len(data)


def _end_of_zstd_frame(data: memoryview, start: int) -> int:
    """Position after the frame, or -1 if it is incomplete (RFC 8878, section 3)."""
    end = len(data)
    if start + 8 > end:
        return -1
    if data[start] & 0xF0 == 0x50 and bytes(data[start + 1 : start + 4]) == b"\x2a\x4d\x18":  # a skippable frame
        return start + 8 + int.from_bytes(data[start + 4 : start + 8], "little")
    flags = data[start + 4]
    single = flags >> 5 & 1
    start += 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
    last = 0
    while not last:
        if start + 3 > end:
            return -1
        block = int.from_bytes(data[start : start + 3], "little")
        last = block & 1
        start += 3 + (1 if block >> 1 & 3 == 1 else block >> 3)
    return start + 4 * (flags >> 2 & 1)
