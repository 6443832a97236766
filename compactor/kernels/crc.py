"""CRC-32C for kernels.
Processors with the instruction (x86-64 with SSE 4.2, 64-bit ARM) work on three streams at once, which hides its latency. Other processors
use tables only.
"""

from __future__ import annotations

import functools
import platform
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from compactor.kernels.common import Bytes
from compactor.kernels.jit import Intrinsic, inline_kernel, kernel, processor_name_and_features
from compactor.kernels.memory import load_u64, prefetch_read

CrcTable = npt.NDArray[np.uint64]

_POLYNOMIAL: Final = 0x82F63B78
_LONG: Final = 4096  # bytes of each of the three streams
_SHORT: Final = 256


def _supported_crc32c_instruction() -> Literal["x86", "arm", ""]:
    """Family of the processor's CRC-32C instruction; empty if there is none or numba's settings forbid it."""
    features = processor_name_and_features()[1]
    machine = platform.machine()
    if machine in ("x86_64", "AMD64") and "+sse4.2" in features.split(","):
        return "x86"
    if machine in ("aarch64", "arm64") and "+crc" in features.split(","):
        return "arm"
    return ""


INSTRUCTION: Final = _supported_crc32c_instruction()


def _zero_bytes_table(byte_count: int) -> CrcTable:
    """Table that appends ``byte_count`` zero bytes to a state, shape (4, 256): the new state is the xor of one entry from each row, chosen
    by one byte of the old state.
    The table for 2n bytes is that for n bytes applied to itself (zlib's crc32_combine).
    """
    byte = np.arange(256, dtype=np.uint64)
    after = np.stack([byte << np.uint64(8 * place) for place in range(4)])
    shifted_out = byte
    for _ in range(8):
        shifted_out = (shifted_out >> np.uint64(1)) ^ (shifted_out & np.uint64(1)) * np.uint64(_POLYNOMIAL)
    squared = np.concatenate([shifted_out[np.newaxis], after[:3]])
    while byte_count:
        if byte_count & 1:
            after = _advance_crcs(squared, after)
        squared = _advance_crcs(squared, squared)
        byte_count >>= 1
    return after


@functools.cache
def zero_bytes_tables() -> CrcTable:
    """Tables for ``crc_after_zero_bytes``, shape (32, 4, 256): table i appends 2^i zero bytes."""
    tables = [_zero_bytes_table(1)]
    while len(tables) < 32:
        tables.append(_advance_crcs(tables[-1], tables[-1]))
    return np.stack(tables)


def combine_crc32c(first_crc: int, second_crc: int, second_size_bytes: int) -> int:
    """CRC-32C of two adjacent byte ranges together, from the CRC-32C of each."""
    table = _zero_bytes_table(second_size_bytes)
    for byte in range(4):
        second_crc ^= int(table[byte, first_crc >> 8 * byte & 255])
    return second_crc


def _advance_crcs(table: CrcTable, crcs: CrcTable) -> CrcTable:
    low = np.uint64(255)
    first, second, third, last = (table[place, crcs >> np.uint64(8 * place) & low] for place in range(4))
    applied: CrcTable = first ^ second ^ third ^ last
    return applied


@inline_kernel
def _advance_crc(table: CrcTable, crc: np.uint64) -> np.uint64:
    low = np.uint64(255)
    return (
        table[0, crc & low]
        ^ table[1, (crc >> np.uint64(8)) & low]
        ^ table[2, (crc >> np.uint64(16)) & low]
        ^ table[3, (crc >> np.uint64(24)) & low]
    )


@inline_kernel
def crc_after_zero_bytes(tables_by_power: CrcTable, crc: np.uint64, byte_count: int) -> np.uint64:
    """Advance the state ``crc`` by fewer than 2^32 zero bytes.
    The CRC of two adjacent ranges is that of the first, advanced by the second's size, xor that of the second.
    """
    power = 0
    while byte_count > 0:
        if byte_count & 1:
            crc = _advance_crc(tables_by_power[power], crc)
        byte_count >>= 1
        power += 1
    return crc


_step64, _step8 = Intrinsic("step_crc_64"), Intrinsic("step_crc_8")
_AFTER_LONG: Final = _zero_bytes_table(_LONG)
_AFTER_SHORT: Final = _zero_bytes_table(_SHORT)
_AFTER: Final = np.stack([_zero_bytes_table(8 - i)[0] for i in range(8)])  # slicing by eight: byte i of a word has 8 - i bytes to go


@inline_kernel
def _extend_three_streams(buf: Bytes, start: int, stream_bytes: int, zero_bytes_table: CrcTable, crc: np.uint64) -> np.uint64:
    """Advance ``crc`` by 3 * ``stream_bytes`` bytes."""
    second = np.uint64(0)
    third = np.uint64(0)
    for line in range(start, start + stream_bytes, 64):
        # The processor prefetches a single stream well, three of them badly: half as fast again from memory.
        prefetch_read(buf, line + 3 * stream_bytes)
        prefetch_read(buf, line + 4 * stream_bytes)
        prefetch_read(buf, line + 5 * stream_bytes)
        for i in range(line, line + 64, 8):
            crc = _step64(crc, load_u64(buf, i))
            second = _step64(second, load_u64(buf, i + stream_bytes))
            third = _step64(third, load_u64(buf, i + 2 * stream_bytes))
    return _advance_crc(zero_bytes_table, _advance_crc(zero_bytes_table, crc) ^ second) ^ third


@inline_kernel
def _extend_word(crc: np.uint64, eight_bytes: np.uint64) -> np.uint64:
    return _step64(crc, eight_bytes)


@kernel
def _extend_crc_by_instruction(crc: np.uint64, buf: Bytes, start: int, end: int) -> np.uint64:
    at = start
    while end - at >= 3 * _LONG:
        crc = _extend_three_streams(buf, at, _LONG, _AFTER_LONG, crc)
        at += 3 * _LONG
    while end - at >= 3 * _SHORT:
        crc = _extend_three_streams(buf, at, _SHORT, _AFTER_SHORT, crc)
        at += 3 * _SHORT
    while end - at >= 8:
        crc = _step64(crc, load_u64(buf, at))
        at += 8
    while at < end:
        crc = _step8(crc, np.uint64(buf[at]))
        at += 1
    return crc


@inline_kernel
def extend_word_by_tables(crc: np.uint64, eight_bytes: np.uint64) -> np.uint64:
    eight_bytes ^= crc
    crc = np.uint64(0)
    for i in range(8):
        crc ^= _AFTER[i, (eight_bytes >> np.uint64(8 * i)) & np.uint64(255)]
    return crc


@kernel
def extend_crc_by_tables(crc: np.uint64, buf: Bytes, start: int, end: int) -> np.uint64:
    at = start
    while end - at >= 8:
        crc = extend_word_by_tables(crc, load_u64(buf, at))
        at += 8
    while at < end:
        crc = _AFTER[7, (crc ^ np.uint64(buf[at])) & np.uint64(255)] ^ (crc >> np.uint64(8))
        at += 1
    return crc


START: Final = np.uint64(0xFFFFFFFF)
"""The state before the first byte; what is stored is the state after the last one, inverted."""

extend = _extend_crc_by_instruction if INSTRUCTION else extend_crc_by_tables
"""``extend(state, buf, start, end)``: the state after ``buf[start:end]``. For kernels; bounds are the caller's business."""

extend_word = _extend_word if INSTRUCTION else extend_word_by_tables
"""``extend_word(state, word)``: the state after eight bytes, the lowest first."""


@inline_kernel
def crc32c(buf: Bytes, start: int, end: int) -> int:
    return np.int64(extend(START, buf, start, end) ^ START)
