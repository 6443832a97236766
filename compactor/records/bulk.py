"""Compression and decompression of many batches at oncewithout the GIL; ``codecs`` gives the same bytes for one batch. Kernels call the lz4
package's library by the addresses of its functions. A kernel decompresses snappy bodies, because no package exports its library's
functions. ``codecs`` does the work where lz4 exports none (a build against another library may hide them), and for unusual bodies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import lz4.block
import numpy as np
import numpy.typing as npt

from compactor.kernels.common import NextBatchAndPosition
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import (
    call_c_function,
    copy_8,
    copy_16,
    copy_bytes,
    element_address,
    get_8,
    get_16,
    load_i32,
    load_u64,
    put_8,
)
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records import codecs
from compactor.records.batches import Bytes, Int64s
from compactor.records.codecs import LZ4, SNAPPY, ZSTD

# ---- snappy: Xerial streams as Java writes them, and raw blocks ---------------------------------------------------------------
# On small batches up to 2.6 times as fast as one call of cramjam for each body. Bodies that are corrupt or unusual are left to
# ``codecs``, which uses cramjam. Format: google/snappy, format_description.txt.

_WIDE: Final = 64
"""Bytes after the source and the target that copies may touch, because whole registers are copied."""

_XERIAL_HEADER: Final = np.frombuffer(codecs.XERIAL_HEADER, np.uint8)
_MAGIC: Final = np.uint64(int.from_bytes(codecs.XERIAL_HEADER[:8], "little"))


@inline_kernel
def _decompress_snappy_block(buf: Bytes, position: int, end: int, out: Bytes, out_position: int, max_out_position: int) -> int:
    """Position where the content ends, or -1 if the block is corrupt or left to the library, ends after ``max_out_position``, or does not
    fit.
    """
    size = shift = 0
    byte = 128
    while byte >= 128 and position < end and shift < 35:
        byte = get_8(buf, position)
        size |= (byte & 127) << shift
        position += 1
        shift += 7
    begin, stop = out_position, out_position + size
    if byte >= 128 or stop > max_out_position or stop + _WIDE > out.size:
        return -1
    while position < end:
        tag = get_8(buf, position)
        kind = tag & 3
        length = (tag >> 2) + 1
        position += 1
        if kind == 0:
            if length > 60:
                extra = length - 60
                if extra > 2:
                    return -1
                length = (get_16(buf, position) & (0xFFFF >> 8 * (2 - extra))) + 1
                position += extra
            if length > end - position or length > stop - out_position:
                return -1
            if length <= 16:
                copy_16(out, out_position, buf, position)
            else:
                copy_bytes(out, out_position, buf, position, length)
            position += length
            out_position += length
            continue
        # Which of the two copies it is cannot be foretold: computed, not branched on.
        far = kind >> 1
        length = ((tag >> 2) & (7 + 56 * far)) + 4 - 3 * far
        offset = (get_16(buf, position) & (0xFF + 0xFF00 * far)) | ((tag >> 5 << 8) & (far - 1))
        position += 1 + far
        if kind == 3 or position > end or offset == 0 or offset > out_position - begin or length > stop - out_position:
            return -1
        # Some of what is copied may come of this very copy.
        of, done = out_position - offset, 0
        if offset >= 16:
            copy_16(out, out_position, out, of)
            copy_16(out, out_position + 16, out, of + 16)
            if length > 32:
                copy_16(out, out_position + 32, out, of + 32)
                copy_16(out, out_position + 48, out, of + 48)
        elif offset >= 8:
            while done < length:
                copy_8(out, out_position + done, out, of + done)
                done += 8
        else:
            while done < length:
                put_8(out, out_position + done, get_8(out, of + done))
                done += 1
        out_position += length
    return out_position if out_position == stop else -1


@inline_kernel
def _decompress_snappy_body(buf: Bytes, position: int, end: int, out: Bytes, out_position: int, max_content_bytes: int) -> int:
    """Position where the content of a Xerial stream or raw block ends, or -1 if it is corrupt, too large or left to ``codecs``."""
    most = out_position + max_content_bytes
    if end - position < 8 or end + _WIDE > buf.size:
        return -1
    if load_u64(buf, position) != _MAGIC:
        return _decompress_snappy_block(buf, position, end, out, out_position, most)
    position += _XERIAL_HEADER.size
    while out_position >= 0 and position + 4 <= end:
        size = np.int64(load_i32(buf, position))
        position += 4
        # A size as large as the magic's first word says that another stream begins: for others, too.
        out_position = (
            _decompress_snappy_block(buf, position, position + size, out, out_position, most)
            if 0 < size <= end - position
            else np.int64(-1)
        )
        position += size
    return out_position if position == end else -1


# ---- lz4, and all codecs ------------------------------------------------------------------------------------------------------

Codecs = npt.NDArray[np.int16]

_FRAME_BYTES: Final = codecs.LZ4_HEADER_BYTES
_HEADER_BITS: Final = np.uint64((1 << 56) - 1)
_PLAIN: Final = np.array([int.from_bytes(header, "little") for header in codecs.LZ4_PLAIN], np.uint64)
_PLAIN_BLOCK: Final = np.array(list(codecs.LZ4_PLAIN.values()), np.int64)
_HEADER: Final = np.frombuffer(codecs.LZ4_HEADER, np.uint8)
_BLOCK: Final = codecs.LZ4_BLOCK
_STORED: Final = codecs.LZ4_STORED
_STREAM_BYTES: Final = (1 << 14) + 32  # LZ4_STREAM_MINSIZE


class BatchUnreadableError(Exception):
    """Raised for a body that cannot be decompressed, or decompresses to more bytes than allowed."""

    def __init__(self, batch_number: int, message: str) -> None:
        super().__init__(message)
        self.batch = batch_number


def _lz4_function_address(function_name: str) -> int:
    """Return 0 if the package does not export the function."""
    try:
        return ctypes.cast(getattr(ctypes.CDLL(lz4.block._block.__file__), function_name), ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


class Lz4FunctionAddresses:
    """Addresses of lz4's C functions; all are 0 unless all are exported. ``lz4.block.compress`` calls them, too, so both ways give the
    same bytes (determinism, I7).
    """

    def __init__(self, function_names: Sequence[str] = ("LZ4_decompress_safe", "LZ4_resetStream", "LZ4_compress_fast_continue")) -> None:
        found = [_lz4_function_address(name) for name in function_names]
        self.decompress, self.reset, self.compress = found if all(found) and ctypes.sizeof(ctypes.c_void_p) == 8 else (0, 0, 0)


lz4_library = Lz4FunctionAddresses()


def decompress_batch_bodies(
    buf: Bytes,
    codec: Codecs,
    start: Int64s,
    end: Int64s,
    wanted_flags: npt.NDArray[np.bool_],
    out: codecs.GrowingByteBuffer,
    max_body_bytes: int,
    max_total_bytes: int,
    magic: npt.NDArray[Any],
) -> Int64s:
    """Append the bodies ``buf[start:end]`` to ``out``, and return where each ends.
    Stops after the body with which ``out`` exceeds ``max_total_bytes``, so that the result may be shorter than ``wanted_flags``.
    :param max_body_bytes: most bytes of one body.
    :raises BatchUnreadableError: if a body is corrupt or too large. The caller must clear ``out`` then.
    """
    ends = np.empty(len(wanted_flags), np.int64)
    view = buf.data
    batch = 0
    while batch < len(wanted_flags):
        if codec[batch] in (LZ4, SNAPPY):
            batch, out.size = decompress_lz4_snappy(
                lz4_library.decompress,
                buf,
                codec,
                start,
                end,
                wanted_flags,
                batch,
                out.array,
                out.size,
                max_body_bytes,
                max_total_bytes,
                ends,
            )
        if batch < len(wanted_flags) and out.size <= max_total_bytes:
            if wanted_flags[batch]:
                try:
                    codecs.decompress_body_into(int(codec[batch]), view[start[batch] : end[batch]], out, max_body_bytes, int(magic[batch]))
                except codecs.CodecError as error:
                    raise BatchUnreadableError(batch, str(error)) from None
            ends[batch] = out.size
            batch += 1
        if out.size > max_total_bytes:
            break
    return ends[:batch]


@measure_stage(SegmentWorkStage.DEFLATE, lambda plain_bodies, codec, start, size, *_: int(size.sum()))
def compress_bodies_into(
    plain_bodies: Bytes, codec: Codecs, start: Int64s, size: Int64s, out: Bytes, out_start: Int64s, out_capacity: Int64s
) -> Int64s:
    """Return the compressed sizes of ``plain_bodies[start:start + size]``.
    :param out_start, out_capacity: as large as ``codecs.max_compressed_size``.
    """
    packed = np.empty(len(size), np.int64)
    kinds = np.unique(codec)
    if len(kinds) > 1:
        for some in (codec == kind for kind in kinds):
            packed[some] = compress_bodies_into(
                plain_bodies, codec[some], start[some], size[some], out, out_start[some], out_capacity[some]
            )
        return packed
    if lz4_library.compress and len(size) and np.all(codec == LZ4):
        _compress_lz4_bodies(
            lz4_library.reset, lz4_library.compress, np.empty(_STREAM_BYTES, np.uint8), plain_bodies, start, size, out, out_start, packed
        )
        return packed
    source, target = memoryview(plain_bodies), memoryview(out)
    if codecs.ZSTD_IN_BULK and len(size) and np.all(codec == ZSTD) and size.min() > 0:
        for body, made in enumerate(codecs.compress_zstd_bodies(source, np.column_stack((start, size)).tobytes())):
            packed[body] = len(made)
            target[out_start[body] : out_start[body] + len(made)] = memoryview(made)
        return packed
    bodies = zip(
        codec.tolist(), start.tolist(), (start + size).tolist(), out_start.tolist(), (out_start + out_capacity).tolist(), strict=True
    )
    compress: Any = codecs.compress_body_into
    packed[:] = [compress(kind, source[one:two], target[three:four]) for kind, one, two, three, four in bodies]
    return packed


@inline_kernel
def _read_little_endian_u32(buf: Bytes, position: int) -> int:
    return (
        np.int64(buf[position]) | np.int64(buf[position + 1]) << 8 | np.int64(buf[position + 2]) << 16 | np.int64(buf[position + 3]) << 24
    )


@inline_kernel
def _write_little_endian_u32(buf: Bytes, position: int, word: int) -> None:
    for i in range(4):
        buf[position + i] = (word >> 8 * i) & 255


@inline_kernel
def _decompress_lz4_frame(
    decompress_address: int, buf: Bytes, start: int, end: int, out: Bytes, out_position: int, max_content_bytes: int
) -> int:
    """Position where the content ends, or -1 if the frame has optional fields, is corrupt, or does not fit."""
    at = start + _FRAME_BYTES
    if at + 4 > end:
        return -1
    block = np.int64(0)
    for i in range(_PLAIN.size):
        if load_u64(buf, start) & _HEADER_BITS == _PLAIN[i]:
            block = _PLAIN_BLOCK[i]
    most = out_position + max_content_bytes
    while at + 4 <= end:
        word = _read_little_endian_u32(buf, at)
        size = word & (_STORED - 1)
        at += 4
        if word == 0 and block > 0:
            return out_position
        if size > block or size > end - at or block > out.size - out_position:
            return -1
        if word & _STORED:
            copy_bytes(out, out_position, buf, at, size)
            got = size
        else:
            got = call_c_function(decompress_address, element_address(buf, at), element_address(out, out_position), size, block)
        out_position += got
        if got < 0 or out_position > most:
            return -1
        at += size
    return -1


@kernel
def decompress_lz4_snappy(
    decompress_address: int, buf: Bytes, codec: Codecs, start: Int64s, end: Int64s, wanted_flags: npt.NDArray[np.bool_], first_batch: int,
    out: Bytes, out_position: int, max_body_bytes: int, max_total_bytes: int, out_ends: Int64s,
) -> NextBatchAndPosition:  # fmt: skip
    """Decompress the wanted lz4 and snappy bodies ``buf[start:end]`` from ``first_batch`` on, until one that ``codecs`` must decompress.
    Return its number (or that of all) and the position in ``out``.
    :param decompress_address: of LZ4_decompress_safe, or 0 if lz4 bodies are left to ``codecs``.
    :param max_total_bytes: after it no further body is begun.
    """
    while first_batch < wanted_flags.size and out_position <= max_total_bytes:
        if wanted_flags[first_batch]:
            after = np.int64(-1)
            if codec[first_batch] == SNAPPY:
                after = _decompress_snappy_body(buf, start[first_batch], end[first_batch], out, out_position, max_body_bytes)
            elif codec[first_batch] == LZ4 and decompress_address != 0:
                after = _decompress_lz4_frame(
                    decompress_address, buf, start[first_batch], end[first_batch], out, out_position, max_body_bytes
                )
            if after < 0:
                break
            out_position = after
        out_ends[first_batch] = out_position
        first_batch += 1
    return first_batch, out_position


@kernel
def _compress_lz4_bodies(
    reset_address: int,
    compress_address: int,
    lz4_state: Bytes,
    plain_bodies: Bytes,
    start: Int64s,
    size: Int64s,
    out: Bytes,
    out_start: Int64s,
    out_size: Int64s,
) -> None:
    """Blocks are independent.
    :param reset_address, compress_address: of LZ4_resetStream and LZ4_compress_fast_continue.
    """
    for body in range(size.size):
        at = out_start[body]
        for i in range(_HEADER.size):
            out[at + i] = _HEADER[i]
        at += _HEADER.size
        for begin in range(0, size[body], _BLOCK):
            length = min(_BLOCK, size[body] - begin)
            # As much room as the library asks for, so that it never has to look whether there is some.
            space = length + length // 255 + 16
            call_c_function(reset_address, element_address(lz4_state, 0))
            source, target = element_address(plain_bodies, start[body] + begin), element_address(out, at + 4)
            got = call_c_function(compress_address, element_address(lz4_state, 0), source, target, length, space, 1)
            if got <= 0 or got >= length:
                copy_bytes(out, at + 4, plain_bodies, start[body] + begin, length)
                _write_little_endian_u32(out, at, length | _STORED)
                got = length
            else:
                _write_little_endian_u32(out, at, got)
            at += 4 + got
        _write_little_endian_u32(out, at, 0)
        out_size[body] = at + 4 - out_start[body]
