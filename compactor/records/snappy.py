"""Snappy in kernels, without the GIL: Xerial's streams as Java writes them, and raw blocks (google/snappy, format_description.txt).

What is written has the bytes that cramjam gives (the crate ``snap``, which is google/snappy's algorithm). What is read is what every writer
makes: anything else, damage included, is left to ``codecs``. tests/unit/test_codecs_bulk.py holds both against each other.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.kernels.jit import kernel, leaf
from compactor.kernels.memory import (
    copy_8,
    copy_16,
    copy_bytes,
    count_zeros,
    get_8,
    get_16,
    get_32,
    load_i32,
    load_u64,
    put_8,
    put_16,
    store_i32,
)
from compactor.records import codecs
from compactor.records.batches import Bytes, Int64s

_WIDE: Final = 64
"""Copies are of whole registers: so many bytes behind what is read or written are touched, too."""

_HEADER: Final = np.frombuffer(codecs.XERIAL_HEADER, np.uint8)
_MAGIC: Final = np.uint64(int.from_bytes(codecs.XERIAL_HEADER[:8], "little"))
_BLOCK: Final = codecs.XERIAL_BLOCK
_MARGIN: Final = 15
_LEAST: Final = 17
_TABLE_BITS: Final = 14
_MULTIPLIER: Final = 0x1E35A7BD
_U32: Final = 0xFFFFFFFF
_WORD: Final = np.uint64(_U32)
_U8: Final = np.uint64(8)
_U16: Final = np.uint64(16)


# ---- reading ----------------------------------------------------------------------------------------------------------------


@leaf
def _inflate_block(buf: Bytes, at: int, end: int, out: Bytes, to: int, most: int) -> int:
    """Return where the block's content ends in ``out``, or -1 if it is corrupt or unusual, exceeds ``most``, or does not fit."""
    size = shift = 0
    byte = 128
    while byte >= 128 and at < end and shift < 35:
        byte = get_8(buf, at)
        size |= (byte & 127) << shift
        at += 1
        shift += 7
    begin, stop = to, to + size
    if byte >= 128 or stop > most or stop + _WIDE > out.size:
        return -1
    while at < end:
        tag = get_8(buf, at)
        kind = tag & 3
        length = (tag >> 2) + 1
        at += 1
        if kind == 0:
            if length > 60:
                extra = length - 60
                if extra > 2:
                    return -1
                length = (get_16(buf, at) & (0xFFFF >> 8 * (2 - extra))) + 1
                at += extra
            if length > end - at or length > stop - to:
                return -1
            if length <= 16:
                copy_16(out, to, buf, at)
            else:
                copy_bytes(out, to, buf, at, length)
            at += length
            to += length
            continue
        # Which of the two copies it is cannot be foretold: computed, not branched on.
        far = kind >> 1
        length = ((tag >> 2) & (7 + 56 * far)) + 4 - 3 * far
        offset = (get_16(buf, at) & (0xFF + 0xFF00 * far)) | ((tag >> 5 << 8) & (far - 1))
        at += 1 + far
        if kind == 3 or at > end or offset == 0 or offset > to - begin or length > stop - to:
            return -1
        # Some of what is copied may come of this very copy.
        of, done = to - offset, 0
        if offset >= 16:
            copy_16(out, to, out, of)
            copy_16(out, to + 16, out, of + 16)
            if length > 32:
                copy_16(out, to + 32, out, of + 32)
                copy_16(out, to + 48, out, of + 48)
        elif offset >= 8:
            while done < length:
                copy_8(out, to + done, out, of + done)
                done += 8
        else:
            while done < length:
                put_8(out, to + done, get_8(out, of + done))
                done += 1
        to += length
    return to if to == stop else -1


@leaf
def _inflate_body(buf: Bytes, at: int, end: int, out: Bytes, to: int, limit: int) -> int:
    """Return where the body's content ends in ``out``, or -1 if ``codecs`` must read it."""
    most = to + limit
    if end - at < 8 or end + _WIDE > buf.size:
        return -1
    if load_u64(buf, at) != _MAGIC:
        return _inflate_block(buf, at, end, out, to, most)
    at += _HEADER.size
    while to >= 0 and at + 4 <= end:
        size = np.int64(load_i32(buf, at))
        at += 4
        # A size as large as the magic's first word says that another stream begins: for others, too.
        to = _inflate_block(buf, at, at + size, out, to, most) if 0 < size <= end - at else np.int64(-1)
        at += size
    return to if at == end else -1


@kernel
def inflate(
    buf: Bytes, codec: npt.NDArray[np.int16], start: Int64s, end: Int64s, wanted: npt.NDArray[np.bool_], batch: int, out: Bytes, to: int,
    limit: int, most: int, ends: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Return the first batch from ``batch`` on that ``codecs`` must read, and the end of the content of ``out``."""
    while batch < wanted.size and to <= most:
        if wanted[batch]:
            after = _inflate_body(buf, start[batch], end[batch], out, to, limit) if codec[batch] == codecs.SNAPPY else np.int64(-1)
            if after < 0:
                break
            to = after
        ends[batch] = to
        batch += 1
    return batch, to


# ---- writing ----------------------------------------------------------------------------------------------------------------


@leaf
def _place(word: int, shift: int) -> int:
    """Return the position of a word's entry in the table, in bytes."""
    return ((word * _MULTIPLIER) & _U32) >> shift << 1


@leaf
def _put_literal(buf: Bytes, begin: int, end: int, out: Bytes, at: int) -> int:
    """Write a literal and return where it ends. A slot has room for the bytes that are written beyond that."""
    length = end - begin
    last = length - 1
    if last < 60:
        put_8(out, at, last << 2)
        at += 1
    elif last < 256:
        put_16(out, at, 60 << 2 | last << 8)
        at += 2
    else:
        put_8(out, at, 61 << 2)
        put_16(out, at + 1, last)
        at += 3
    if length <= 16 and begin + 16 <= buf.size:
        copy_16(out, at, buf, begin)
    else:
        copy_bytes(out, at, buf, begin, length)
    return at + length


@leaf
def _put_copy(out: Bytes, at: int, offset: int, length: int) -> int:
    while length > 64:
        most = 64 if length >= 68 else 60
        put_8(out, at, (most - 1) << 2 | 2)
        put_16(out, at + 1, offset)
        at += 3
        length -= most
    if length <= 11 and offset <= 2047:
        put_16(out, at, (offset >> 8) << 5 | (length - 4) << 2 | 1 | (offset & 255) << 8)
        return at + 2
    put_8(out, at, (length - 1) << 2 | 2)
    put_16(out, at + 1, offset)
    return at + 3


@leaf
def _matching(buf: Bytes, one: int, other: int, end: int) -> int:
    """Return how many bytes from ``one`` on equal those from ``other``, which is less than ``one``; ``one`` stays below ``end``."""
    begin = one
    while one + 8 <= end:
        difference = load_u64(buf, one) ^ load_u64(buf, other)
        if difference:
            return one - begin + (count_zeros(difference) >> 3)
        one += 8
        other += 8
    while one < end and get_8(buf, one) == get_8(buf, other):
        one += 1
        other += 1
    return one - begin


@leaf
def _deflate_block(buf: Bytes, begin: int, end: int, out: Bytes, at: int, table: Bytes) -> int:
    """Compress a block as google/snappy's CompressFragment does.

    :param table: 16 bits for each place, of which a short block uses few.
    """
    size = end - begin
    emitted = begin
    if size >= _LEAST:
        shift = 24
        while shift > 32 - _TABLE_BITS and 1 << 32 - shift < size:
            shift -= 1
        table[: 2 << 32 - shift] = 0
        limit = end - _MARGIN
        here = begin + 1
        place = _place(get_32(buf, here), shift)
        while True:
            skip = 32
            ahead = here
            candidate = -1
            while candidate < 0:
                here = ahead
                ahead += skip >> 5
                skip += skip >> 5
                if ahead > limit:
                    break
                earlier = begin + get_16(table, place)
                put_16(table, place, here - begin)
                place = _place(get_32(buf, ahead), shift)
                if get_32(buf, here) == get_32(buf, earlier):
                    candidate = earlier
            if candidate < 0:
                break
            at = _put_literal(buf, emitted, here, out, at)
            while candidate >= 0:
                length = 4 + _matching(buf, here + 4, candidate + 4, end)
                at = _put_copy(out, at, here - candidate, length)
                here += length
                emitted = here
                candidate = -1
                if here < limit:
                    word = load_u64(buf, here - 1)
                    put_16(table, _place(np.int64(word & _WORD), shift), here - 1 - begin)
                    follows = np.int64((word >> _U8) & _WORD)
                    place = _place(follows, shift)
                    earlier = begin + get_16(table, place)
                    put_16(table, place, here - begin)
                    if follows == get_32(buf, earlier):
                        candidate = earlier
                    else:
                        place = _place(np.int64((word >> _U16) & _WORD), shift)
            if here >= limit:
                break
            here += 1
    return _put_literal(buf, emitted, end, out, at) if emitted < end else at


@kernel
def deflate(plain: Bytes, start: Int64s, size: Int64s, out: Bytes, slot: Int64s, packed: Int64s) -> None:
    """Write each body ``plain[start : start + size]`` as a Xerial stream into its slot, and its compressed size into ``packed``."""
    table = np.empty(2 << _TABLE_BITS, np.uint8)
    for body in range(size.size):
        at = slot[body]
        for i in range(_HEADER.size):
            out[at + i] = _HEADER[i]
        at += _HEADER.size
        for begin in range(start[body], start[body] + size[body], _BLOCK):
            length = left = min(_BLOCK, start[body] + size[body] - begin)
            to = at + 4
            while left >= 128:
                put_8(out, to, left & 127 | 128)
                left >>= 7
                to += 1
            put_8(out, to, left)
            to = _deflate_block(plain, begin, begin + length, out, to + 1, table)
            store_i32(out, at, np.int32(to - at - 4))
            at = to
        packed[body] = at - slot[body]
