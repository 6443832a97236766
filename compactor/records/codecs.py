"""The five codecs of record batches, in every framing that clients write (KIP-98; spec section 5.6).

Reading takes everything Kafka's Java reader takes: gzip with several members, snappy raw or in Xerial frames, lz4 frames with
or without checksums and content size (and the wrong header checksum of magic 0), zstd with or without content size and in
several frames. Writing gives what that reader takes: Kafka's default levels, lz4 in independent 64 KiB blocks.

Output is bounded by ``limit`` bytes everywhere: a decompression bomb is an error, never an allocation.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import cramjam
import lz4.frame
import zstandard
from zlib_ng import zlib_ng

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4
NAMES: Final = ("none", "gzip", "snappy", "lz4", "zstd")

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK: Final = 32 * 1024
_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
_LZ4_RATIO: Final = 256  # an lz4 byte never gives more than 255 bytes
_ZSTD_WINDOW_LOG_MAX: Final = 27  # zstd's own default for decoders: 128 MiB

Buffer = bytes | bytearray | memoryview


class CodecError(Exception):
    """The compressed bytes cannot be read, or inflate beyond the limit."""


class _Local(threading.local):
    """zstd contexts cost more than a small batch; they may not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=3, write_content_size=False)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _ZSTD_WINDOW_LOG_MAX)


_local = _Local()


def fingerprint() -> str:
    """Names what decides the bytes of a recompressed batch (I7)."""
    versions = (zlib_ng.ZLIBNG_VERSION, cramjam.__version__, lz4.__version__, zstandard.__version__)
    return "gzip={} snappy={} lz4={} zstd={}".format(*versions)


# ---- writing ----------------------------------------------------------------------------------------------------------------


def compress(codec: int, data: Buffer) -> bytes:
    """Compresses the records of one batch at Kafka's default level. ``codec`` is the low three bits of the attributes."""
    if codec == NONE:
        return bytes(data)
    if codec == GZIP:
        # wbits 31 writes mtime 0: the same input gives the same bytes (I7).
        return zlib_ng.compress(data, level=6, wbits=31)
    if codec == SNAPPY:
        return _compress_xerial(memoryview(data))
    if codec == LZ4:
        # Kafka's reader refuses linked blocks.
        return lz4.frame.compress(data, block_size=lz4.frame.BLOCKSIZE_MAX64KB, block_linked=False, store_size=False)
    if codec == ZSTD:
        return _local.compressor.compress(data)
    raise CodecError(f"unknown compression codec {codec}")


def _compress_xerial(data: memoryview) -> bytes:
    parts = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK]))
        parts += [struct.pack(">i", len(block)), block]
    return b"".join(parts)


# ---- reading ----------------------------------------------------------------------------------------------------------------


def decompress(codec: int, data: memoryview, limit: int, magic: int = 2) -> Buffer:
    """Inflates the records of one batch. Raises CodecError, also where the output would exceed ``limit`` bytes.

    :param magic: of the batch; magic 0 wrote a wrong lz4 header checksum, which its readers do not check.
    """
    try:
        if codec == NONE:
            return data
        if codec == GZIP:
            return _gunzip(data, limit)
        if codec == SNAPPY:
            return _unsnappy(data, limit)
        if codec == LZ4:
            return _unlz4(data, limit, magic)
        if codec == ZSTD:
            return _unzstd(data, limit)
    except CodecError:
        raise
    except Exception as error:  # the libraries raise types of their own, some of them not exported
        raise CodecError(f"{NAMES[codec]} data cannot be read: {error}") from None
    raise CodecError(f"unknown compression codec {codec}")


def _too_large(codec: int, limit: int) -> CodecError:
    return CodecError(f"{NAMES[codec]} data inflates beyond {limit} bytes (max_decompressed_batch_bytes)")


def _gunzip(data: memoryview, limit: int) -> Buffer:
    parts: list[bytes] = []
    size = 0
    rest: Buffer = data
    while True:
        member = zlib_ng.decompressobj(31)
        part = member.decompress(rest, limit - size + 1)
        size += len(part)
        if size > limit:
            raise _too_large(GZIP, limit)
        if not member.eof:
            raise CodecError("gzip data ends early")
        parts.append(part)
        rest = member.unused_data
        # Java's GZIPInputStream ignores what follows a member and is not another one.
        if bytes(rest[:2]) != b"\x1f\x8b":
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _unsnappy(data: memoryview, limit: int) -> Buffer:
    if bytes(data[:8]) != _XERIAL_MAGIC:
        if len(data) == 0:
            raise CodecError("snappy data is empty")
        if cramjam.snappy.decompress_raw_len(data) > limit:
            raise _too_large(SNAPPY, limit)
        return memoryview(cramjam.snappy.decompress_raw(data))
    parts: list[memoryview] = []
    size = 0
    position = len(_XERIAL_HEADER)
    while position < len(data):
        if bytes(data[position : position + 8]) == _XERIAL_MAGIC:  # streams written one after the other
            position += len(_XERIAL_HEADER)
            continue
        if position + 4 > len(data):
            raise CodecError("snappy frame ends early")
        length = int.from_bytes(data[position : position + 4], "big")
        position += 4
        block = data[position : position + length]
        if length == 0 or len(block) != length:
            raise CodecError("snappy frame ends early")
        size += cramjam.snappy.decompress_raw_len(block)
        if size > limit:
            raise _too_large(SNAPPY, limit)
        parts.append(memoryview(cramjam.snappy.decompress_raw(block)))
        position += length
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unlz4(data: memoryview, limit: int, magic: int) -> Buffer:
    if bytes(data[:4]) != _LZ4_MAGIC or len(data) < 7:
        raise CodecError("lz4 data has no frame header")
    if not data[4] & 0x20:
        raise CodecError("lz4 frame has linked blocks, which Kafka does not read")
    source = data
    if magic == 0:
        source = _with_right_header_checksum(data)
    decoder = lz4.frame.LZ4FrameDecompressor()
    if len(data) * _LZ4_RATIO <= limit:
        out: bytes = decoder.decompress(source)
    else:
        out = decoder.decompress(source, limit + 1)
        if len(out) > limit:
            raise _too_large(LZ4, limit)
    if not decoder.eof:
        raise CodecError("lz4 frame ends early")
    return out


def _with_right_header_checksum(data: memoryview) -> memoryview:
    """Magic 0 took the checksum over the frame's magic as well (KAFKA-3160)."""
    import xxhash

    header = 6 + (8 if data[4] & 0x08 else 0)
    patched = bytearray(data)
    patched[header] = (xxhash.xxh32_intdigest(bytes(data[4:header])) >> 8) & 0xFF
    return memoryview(patched)


def _unzstd(data: memoryview, limit: int) -> Buffer:
    # Frames without a content size need the streaming reader; it also reads several frames, as Java does.
    reader = _local.decompressor.stream_reader(data, read_across_frames=True)
    size = min(limit + 1, max(4 * len(data), 1 << 16))
    first = reader.read(size)
    if len(first) < size:
        return first
    parts = [first]
    total = len(first)
    while total <= limit:
        part = reader.read(min(limit + 1 - total, 1 << 22))
        if not part:
            return b"".join(parts)
        parts.append(part)
        total += len(part)
    raise _too_large(ZSTD, limit)
