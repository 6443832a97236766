"""Big-endian loads and stores, varints, block copies and prefetches inside byte arrays, for kernels.

All of these are unchecked: the caller has compared positions with the end of the array before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from bloom.jit import leaf


def _is_bytes(array: Any) -> bool:
    return isinstance(array, types.Array) and array.dtype == types.uint8 and array.layout == "C"


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, bits: int) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.IntType(bits).as_pointer())


def _load(bits: int, result: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, array: Any, position: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _pointer(context, builder, signature.args[0], args[0], args[1], bits)
            return builder.bswap(builder.load(pointer, align=1))

        return (result(array, types.intp), codegen) if _is_bytes(array) else None

    return load


def _store(bits: int, kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing_context: Any, array: Any, position: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _pointer(context, builder, signature.args[0], args[0], args[1], bits)
            builder.store(builder.bswap(args[2]), pointer, align=1)
            return context.get_dummy_value()

        return (types.void(array, types.intp, kind), codegen) if _is_bytes(array) else None

    return store


def _load_plain(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, array: Any, position: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _pointer(context, builder, signature.args[0], args[0], args[1], bits)
            return builder.zext(builder.load(pointer, align=1), ir.IntType(64))

        return (types.int64(array, types.intp), codegen) if _is_bytes(array) else None

    return load


def _store_plain(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing_context: Any, array: Any, position: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _pointer(context, builder, signature.args[0], args[0], args[1], bits)
            builder.store(builder.trunc(args[2], ir.IntType(bits)), pointer, align=1)
            return context.get_dummy_value()

        return (types.void(array, types.intp, types.int64), codegen) if _is_bytes(array) else None

    return store


get_8, get_16, get_32 = _load_plain(8), _load_plain(16), _load_plain(32)
put_8, put_16 = _store_plain(8), _store_plain(16)
load_i64 = _load(64, types.int64)
load_i32 = _load(32, types.int32)
load_u32 = _load(32, types.uint32)
load_i16 = _load(16, types.int16)
store_i64 = _store(64, types.int64)
store_i32 = _store(32, types.int32)
store_i16 = _store(16, types.int16)


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing_context: Any, target: Any, target_position: Any, source: Any, source_position: Any, length: Any) -> Any:
    """memcpy: ``target[tp:tp + length] = source[sp:sp + length]``; the arrays must not overlap."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = _pointer(context, builder, signature.args[0], args[0], args[1], 8)
        of = _pointer(context, builder, signature.args[2], args[2], args[3], 8)
        cgutils.raw_memcpy(builder, to, of, args[4], 1)
        return context.get_dummy_value()

    if not (_is_bytes(target) and _is_bytes(source)):
        return None
    return types.void(target, types.intp, source, types.intp, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def count_zeros(typing_context: Any, word: Any) -> Any:
    """How many of the lowest bits are 0; ``word`` is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.int64(types.uint64), codegen


def _copy(bits: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def copy(typing_context: Any, target: Any, target_position: Any, source: Any, source_position: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to = _pointer(context, builder, signature.args[0], args[0], args[1], bits)
            of = _pointer(context, builder, signature.args[2], args[2], args[3], bits)
            builder.store(builder.load(of, align=1), to, align=1)
            return context.get_dummy_value()

        if not (_is_bytes(target) and _is_bytes(source)):
            return None
        return types.void(target, types.intp, source, types.intp), codegen

    return copy


copy_8, copy_16 = _copy(64), _copy(128)


@intrinsic  # type: ignore[untyped-decorator]
def address_of(typing_context: Any, array: Any, position: Any) -> Any:
    """Where ``array[position]`` lies, for as long as somebody holds the array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_pointer(context, builder, signature.args[0], args[0], args[1], 8), ir.IntType(64))

    return (types.int64(array, types.intp), codegen) if _is_bytes(array) else None


@intrinsic  # type: ignore[untyped-decorator]
def call_c(typing_context: Any, function: Any, *words: Any) -> Any:
    """Calls the C function at an address with integers and addresses, at most six, and returns its ``int``. For 64-bit processors.

    An address rather than a function: what is compiled stays good where the library lies elsewhere. Words are whole registers, of
    which a callee reads what it asks for.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        given = builder.extract_value
        count = len(signature.args[1].types)
        kind = ir.FunctionType(ir.IntType(32), [word] * count)
        result = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [given(args[1], i) for i in range(count)])
        return builder.sext(result, word)

    return types.int64(types.int64, types.containers.UniTuple(types.int64, len(words))), codegen


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_read(typing_context: Any, array: Any, position: Any) -> Any:
    """Fetches the cache line of ``array[position]``, which is soon to be read. Never faults, wherever that is."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], 8)
        builder.call(function, [pointer, word(0), word(3), word(1)])  # to read, keep in every cache level, data
        return context.get_dummy_value()

    return (types.void(array, types.intp), codegen) if _is_bytes(array) else None


@leaf
def read_varint(buf: Any, position: int, end: int) -> tuple[int, int]:
    """(value, next position) of a zigzag varint of at most ten bytes; next position -1 where it is longer or reaches ``end``."""
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


@leaf
def varint_size(value: int) -> int:
    """Bytes of the minimal zigzag varint of an int64."""
    raw = np.uint64((value << 1) ^ (value >> 63))
    size = 1
    while raw >= np.uint64(128):
        raw >>= np.uint64(7)
        size += 1
    return size


@leaf
def write_varint(buf: Any, position: int, value: int) -> int:
    """Writes the minimal zigzag varint and returns the next position."""
    raw = np.uint64((value << 1) ^ (value >> 63))
    while raw >= np.uint64(128):
        buf[position] = np.uint8((raw & np.uint64(127)) | np.uint64(128))
        raw >>= np.uint64(7)
        position += 1
    buf[position] = np.uint8(raw)
    return position + 1
