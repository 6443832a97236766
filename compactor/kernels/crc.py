"""CRC-32C for kernels: a batch at a time, without going back to Python between batches.

Where the processor has the instruction (x86-64 with SSE 4.2, 64-bit ARM) three streams run at once, which hides its latency; their
checksums are joined by a table that says what a checksum becomes after so many zero bytes. Elsewhere tables do the work.
"""

from __future__ import annotations

import functools
import platform
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic

from bloom.jit import kernel, leaf, load_u64
from compactor.kernels.memory import prefetch_read

Bytes = npt.NDArray[np.uint8]
Table = npt.NDArray[np.uint64]

_POLYNOMIAL: Final = 0x82F63B78
_LONG: Final = 4096  # bytes of each of the three streams
_SHORT: Final = 256


def _instruction() -> str:
    """Which instruction the compiler may use: "x86", "arm" or "" for none."""
    features = config.CPU_FEATURES  # what the environment allows numba comes before what the processor has
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    machine = platform.machine()
    if machine in ("x86_64", "AMD64") and "+sse4.2" in features.split(","):
        return "x86"
    if machine in ("aarch64", "arm64") and "+crc" in features.split(","):
        return "arm"
    return ""


INSTRUCTION: Final = _instruction()
_NAMES: Final = {("x86", 64): "llvm.x86.sse42.crc32.64.64", ("x86", 8): "llvm.x86.sse42.crc32.32.8",
                 ("arm", 64): "llvm.aarch64.crc32cx", ("arm", 8): "llvm.aarch64.crc32cb"}  # fmt: skip


def _step(bits: int) -> Any:
    """``step(crc, data)``: the checksum after eight more bytes, or after one."""

    def step(typing_context: Any, crc: Any, data: Any) -> Any:
        # x86 takes eight bytes into a 64-bit register; ARM takes one byte as a 32-bit number.
        state = ir.IntType(64 if (INSTRUCTION, bits) == ("x86", 64) else 32)
        operand = ir.IntType(32 if (INSTRUCTION, bits) == ("arm", 8) else bits)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(state, [state, operand]), _NAMES[INSTRUCTION, bits])
            before = args[0] if state.width == 64 else builder.trunc(args[0], state)
            taken = args[1] if operand.width == 64 else builder.trunc(args[1], operand)
            after = builder.call(function, [before, taken])
            return after if state.width == 64 else builder.zext(after, ir.IntType(64))

        return types.uint64(types.uint64, types.uint64), codegen

    return intrinsic(step)


def _after_zeros(count: int) -> Table:
    """What each byte of a checksum contributes after ``count`` zero bytes: shape (4, 256).

    Linear over bits, so that 2n zero bytes are n zero bytes applied to themselves (zlib's crc32_combine).
    """
    byte = np.arange(256, dtype=np.uint64)
    after = np.stack([byte << np.uint64(8 * place) for place in range(4)])
    shifted_out = byte
    for _ in range(8):
        shifted_out = (shifted_out >> np.uint64(1)) ^ (shifted_out & np.uint64(1)) * np.uint64(_POLYNOMIAL)
    squared = np.concatenate([shifted_out[np.newaxis], after[:3]])
    while count:
        if count & 1:
            after = _applied(squared, after)
        squared = _applied(squared, squared)
        count >>= 1
    return after


@functools.cache
def zeros_by_power() -> Table:
    """For ``after_zeros``: what each byte of a checksum contributes after 1, 2, 4, ... zero bytes, shape (32, 4, 256)."""
    tables = [_after_zeros(1)]
    while len(tables) < 32:
        tables.append(_applied(tables[-1], tables[-1]))
    return np.stack(tables)


def joined(first: int, second: int, size: int) -> int:
    """The checksum of bytes of which the first ones have the checksum ``first``, and the last ``size`` ones ``second``."""
    table = _after_zeros(size)
    for byte in range(4):
        second ^= int(table[byte, first >> 8 * byte & 255])
    return second


def _applied(table: Table, crcs: Table) -> Table:
    low = np.uint64(255)
    first, second, third, last = (table[place, crcs >> np.uint64(8 * place) & low] for place in range(4))
    applied: Table = first ^ second ^ third ^ last
    return applied


@leaf
def _shift(table: Table, crc: np.uint64) -> np.uint64:
    low = np.uint64(255)
    return (
        table[0, crc & low]
        ^ table[1, (crc >> np.uint64(8)) & low]
        ^ table[2, (crc >> np.uint64(16)) & low]
        ^ table[3, (crc >> np.uint64(24)) & low]
    )


@leaf
def after_zeros(powers: Table, crc: np.uint64, count: int) -> np.uint64:
    """The checksum after so many zero bytes, less than 2^32. ``joined``, for kernels, is this of the first one ^ the second one.

    :param powers: ``zeros_by_power()``.
    """
    power = 0
    while count > 0:
        if count & 1:
            crc = _shift(powers[power], crc)
        count >>= 1
        power += 1
    return crc


_step64 = _step(64)
_step8 = _step(8)
_AFTER_LONG: Final = _after_zeros(_LONG)
_AFTER_SHORT: Final = _after_zeros(_SHORT)
_AFTER: Final = np.stack([_after_zeros(8 - i)[0] for i in range(8)])  # slicing by eight: byte i of a word has 8 - i bytes to go


@leaf
def _three(buf: Bytes, at: int, size: int, table: Table, crc: np.uint64) -> np.uint64:
    """The checksum after 3 * ``size`` more bytes, in three streams."""
    second = np.uint64(0)
    third = np.uint64(0)
    for line in range(at, at + size, 64):
        # The processor prefetches a single stream well, three of them badly: half as fast again from memory.
        prefetch_read(buf, line + 3 * size)
        prefetch_read(buf, line + 4 * size)
        prefetch_read(buf, line + 5 * size)
        for i in range(line, line + 64, 8):
            crc = _step64(crc, load_u64(buf, i))
            second = _step64(second, load_u64(buf, i + size))
            third = _step64(third, load_u64(buf, i + 2 * size))
    return _shift(table, _shift(table, crc) ^ second) ^ third


@leaf
def _word_by_instruction(crc: np.uint64, word: np.uint64) -> np.uint64:
    return _step64(crc, word)


@kernel
def _bytes_by_instruction(crc: np.uint64, buf: Bytes, start: int, end: int) -> np.uint64:
    at = start
    while end - at >= 3 * _LONG:
        crc = _three(buf, at, _LONG, _AFTER_LONG, crc)
        at += 3 * _LONG
    while end - at >= 3 * _SHORT:
        crc = _three(buf, at, _SHORT, _AFTER_SHORT, crc)
        at += 3 * _SHORT
    while end - at >= 8:
        crc = _step64(crc, load_u64(buf, at))
        at += 8
    while at < end:
        crc = _step8(crc, np.uint64(buf[at]))
        at += 1
    return crc


@leaf
def word_by_tables(crc: np.uint64, word: np.uint64) -> np.uint64:
    """``extend_word`` without the instruction."""
    word ^= crc
    crc = np.uint64(0)
    for i in range(8):
        crc ^= _AFTER[i, (word >> np.uint64(8 * i)) & np.uint64(255)]
    return crc


@kernel
def bytes_by_tables(crc: np.uint64, buf: Bytes, start: int, end: int) -> np.uint64:
    """``extend`` without the instruction."""
    at = start
    while end - at >= 8:
        crc = word_by_tables(crc, load_u64(buf, at))
        at += 8
    while at < end:
        crc = _AFTER[7, (crc ^ np.uint64(buf[at])) & np.uint64(255)] ^ (crc >> np.uint64(8))
        at += 1
    return crc


START: Final = np.uint64(0xFFFFFFFF)
"""The state before the first byte; what is stored is the state after the last one, inverted."""

extend = _bytes_by_instruction if INSTRUCTION else bytes_by_tables
"""``extend(state, buf, start, end)``: the state after ``buf[start:end]``. For kernels; bounds are the caller's business."""

extend_word = _word_by_instruction if INSTRUCTION else word_by_tables
"""``extend_word(state, word)``: the state after eight bytes, the lowest first."""


@leaf
def crc32c(buf: Bytes, start: int, end: int) -> int:
    """Of ``buf[start:end]``."""
    return np.int64(extend(START, buf, start, end) ^ START)
