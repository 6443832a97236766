"""Access to byte arrays in kernels: unaligned loads and stores, prefetches, varints, calls of C functions.
Nothing here checks bounds.
"""

from __future__ import annotations

import numpy as np

from compactor.kernels.common import Bytes, ValueAndNextPosition
from compactor.kernels.jit import Intrinsic, inline_kernel

get_8, get_16, put_8 = Intrinsic("get_8"), Intrinsic("get_16"), Intrinsic("put_8")
load_i64, load_i32, load_u32, load_i16 = Intrinsic("load_i64"), Intrinsic("load_i32"), Intrinsic("load_u32"), Intrinsic("load_i16")
store_i64, store_i32, store_i16 = Intrinsic("store_i64"), Intrinsic("store_i32"), Intrinsic("store_i16")

load_u64 = Intrinsic("load_u64")
"""``load_u64(bytes, position)``: the 8 bytes from there as a little-endian number, whatever the alignment."""

copy_bytes = Intrinsic("copy_bytes")
"""``copy_bytes(target, target_position, source, source_position, length)``: the ranges must not overlap."""

copy_8, copy_16 = Intrinsic("copy_8"), Intrinsic("copy_16")

element_address = Intrinsic("element_address")
"""``element_address(bytes, position)``: in memory; valid as long as the array exists."""

call_c_function = Intrinsic("call_c_function")
"""``call_c_function(address, *arguments)``: call a C function with at most six integers or addresses, each passed as 64 bits; only for
64-bit processors. The address is a run-time value, so that cached machine code stays valid if the library is loaded elsewhere."""

prefetch, prefetch_read = Intrinsic("prefetch"), Intrinsic("prefetch_read")
"""``prefetch(array, index)``: fetch the cache line of a one-dimensional array's element, which will soon be written, or only read."""

high_product_word = Intrinsic("high_product_word")
"""``high_product_word(a, b)``: upper 64 bits of an unsigned product: uniform from 0 to ``b`` - 1 if ``a`` is uniform."""


@inline_kernel
def read_varint(buf: Bytes, position: int, end: int) -> ValueAndNextPosition:
    """0 and -1 if the varint has more than ten bytes or does not end before ``end``."""
    if position < end and buf[position] < 128:
        byte = np.int64(buf[position])
        return (byte >> 1) ^ -(byte & 1), position + 1
    raw = np.uint64(0)
    shift = np.uint64(0)
    while position < end and shift < np.uint64(70):
        byte = buf[position]
        position += 1
        raw |= np.uint64(byte & 127) << shift
        if byte < 128:
            return np.int64(raw >> np.uint64(1)) ^ -np.int64(raw & np.uint64(1)), position
        shift += np.uint64(7)
    return np.int64(0), -1


@inline_kernel
def varint_size_bytes(value: int) -> int:
    raw = np.uint64((value << 1) ^ (value >> 63))
    size = 1
    while raw >= np.uint64(128):
        raw >>= np.uint64(7)
        size += 1
    return size


@inline_kernel
def write_varint(buf: Bytes, position: int, value: int) -> int:
    """Write the shortest zigzag varint; return the position after it."""
    raw = np.uint64((value << 1) ^ (value >> 63))
    while raw >= np.uint64(128):
        buf[position] = np.uint8((raw & np.uint64(127)) | np.uint64(128))
        raw >>= np.uint64(7)
        position += 1
    buf[position] = np.uint8(raw)
    return position + 1
