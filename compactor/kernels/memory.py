"""Access to byte arrays in kernels: unaligned loads and stores, prefetches, varints, calls of C functions.
Nothing here checks bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from compactor.kernels.common import Bytes, ValueAndNextPosition
from compactor.kernels.jit import inline_kernel

NumbaType = Any
"""Type of an argument, as numba has inferred it when it compiles a call."""
TypingContext = Any
CodegenContext = Any
LlvmBuilder = Any
LlvmValue = Any
NumbaSignature = Any
LlvmArguments = Any
IntrinsicDefinition = Any
"""Signature of an intrinsic and the function that emits its code; None if the argument types do not fit."""
NumbaIntrinsic = Any
"""Function that kernels can call and that emits LLVM code in place of the call."""


def _is_byte_array_type(array_type: NumbaType) -> bool:
    return isinstance(array_type, types.Array) and array_type.dtype == types.uint8 and array_type.layout == "C"


def _element_pointer(
    context: CodegenContext, builder: LlvmBuilder, array_type: NumbaType, array: LlvmValue, index: LlvmValue, bits: int = 8
) -> LlvmValue:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), ir.IntType(bits).as_pointer())


def _define_load_intrinsic(bits: int, result_type: NumbaType, *, is_big_endian: bool = True) -> NumbaIntrinsic:
    @intrinsic  # type: ignore[untyped-decorator]
    def load_number(typing_context: TypingContext, array: NumbaType, position: NumbaType) -> IntrinsicDefinition:
        def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
            value = builder.load(_element_pointer(context, builder, signature.args[0], args[0], args[1], bits), align=1)
            return builder.bswap(value) if is_big_endian else builder.zext(value, ir.IntType(64))

        return (result_type(array, types.intp), emit_intrinsic_code) if _is_byte_array_type(array) else None

    return load_number


def _define_store_intrinsic(bits: int, value_type: NumbaType, *, is_big_endian: bool = True) -> NumbaIntrinsic:
    @intrinsic  # type: ignore[untyped-decorator]
    def store_number(typing_context: TypingContext, array: NumbaType, position: NumbaType, value: NumbaType) -> IntrinsicDefinition:
        def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
            pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1], bits)
            builder.store(builder.bswap(args[2]) if is_big_endian else builder.trunc(args[2], ir.IntType(bits)), pointer, align=1)
            return context.get_dummy_value()

        return (types.void(array, types.intp, value_type), emit_intrinsic_code) if _is_byte_array_type(array) else None

    return store_number


get_8, get_16 = (_define_load_intrinsic(bits, types.int64, is_big_endian=False) for bits in (8, 16))
put_8 = _define_store_intrinsic(8, types.int64, is_big_endian=False)
load_i64 = _define_load_intrinsic(64, types.int64)
load_i32 = _define_load_intrinsic(32, types.int32)
load_u32 = _define_load_intrinsic(32, types.uint32)
load_i16 = _define_load_intrinsic(16, types.int16)
store_i64 = _define_store_intrinsic(64, types.int64)
store_i32 = _define_store_intrinsic(32, types.int32)
store_i16 = _define_store_intrinsic(16, types.int16)
load_u64 = _define_load_intrinsic(64, types.uint64, is_big_endian=False)
"""``load_u64(bytes, position)``: the 8 bytes from there as a little-endian number, whatever the alignment."""


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(
    typing_context: TypingContext,
    target: NumbaType,
    target_position: NumbaType,
    source: NumbaType,
    source_position: NumbaType,
    length: NumbaType,
) -> IntrinsicDefinition:
    """The ranges must not overlap."""

    def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
        to = _element_pointer(context, builder, signature.args[0], args[0], args[1])
        of = _element_pointer(context, builder, signature.args[2], args[2], args[3])
        cgutils.raw_memcpy(builder, to, of, args[4], 1)
        return context.get_dummy_value()

    if not (_is_byte_array_type(target) and _is_byte_array_type(source)):
        return None
    return types.void(target, types.intp, source, types.intp, types.intp), emit_intrinsic_code


def _define_copy_intrinsic(bits: int) -> NumbaIntrinsic:
    @intrinsic  # type: ignore[untyped-decorator]
    def copy_word(
        typing_context: TypingContext, target: NumbaType, target_position: NumbaType, source: NumbaType, source_position: NumbaType
    ) -> IntrinsicDefinition:
        def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
            to = _element_pointer(context, builder, signature.args[0], args[0], args[1], bits)
            of = _element_pointer(context, builder, signature.args[2], args[2], args[3], bits)
            builder.store(builder.load(of, align=1), to, align=1)
            return context.get_dummy_value()

        if not (_is_byte_array_type(target) and _is_byte_array_type(source)):
            return None
        return types.void(target, types.intp, source, types.intp), emit_intrinsic_code

    return copy_word


copy_8, copy_16 = _define_copy_intrinsic(64), _define_copy_intrinsic(128)


@intrinsic  # type: ignore[untyped-decorator]
def memory_address_of_element(typing_context: TypingContext, array: NumbaType, position: NumbaType) -> IntrinsicDefinition:
    """Valid as long as the array exists."""

    def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
        return builder.ptrtoint(_element_pointer(context, builder, signature.args[0], args[0], args[1]), ir.IntType(64))

    return (types.int64(array, types.intp), emit_intrinsic_code) if _is_byte_array_type(array) else None


@intrinsic  # type: ignore[untyped-decorator]
def call_c_function(typing_context: TypingContext, function_address: NumbaType, *arguments: NumbaType) -> IntrinsicDefinition:
    """Call a C function with at most six integers or addresses, each passed as 64 bits; only for 64-bit processors. The address is a
    run-time value, so that cached machine code stays valid if the library is loaded elsewhere.
    """

    def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
        word = ir.IntType(64)
        count = len(signature.args[1].types)
        kind = ir.FunctionType(ir.IntType(32), [word] * count)
        given = [builder.extract_value(args[1], i) for i in range(count)]
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), given), word)

    return types.int64(types.int64, types.containers.UniTuple(types.int64, len(arguments))), emit_intrinsic_code


def _define_prefetch_intrinsic(write_flag: int) -> NumbaIntrinsic:
    """:param write_flag: 1 if the element will be written."""

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch_element(typing_context: TypingContext, array: NumbaType, index: NumbaType) -> IntrinsicDefinition:
        def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            pointer = _element_pointer(context, builder, signature.args[0], args[0], args[1])
            builder.call(function, [pointer, word(write_flag), word(3), word(1)])  # 3: into every cache level, 1: data
            return context.get_dummy_value()

        return (types.void(array, types.intp), emit_intrinsic_code) if isinstance(array, types.Array) and array.layout == "C" else None

    return prefetch_element


prefetch, prefetch_read = _define_prefetch_intrinsic(1), _define_prefetch_intrinsic(0)
"""``prefetch(array, index)``: fetch the cache line of a one-dimensional array's element, which will soon be written, or only read."""


@intrinsic  # type: ignore[untyped-decorator]
def high_product_word(typing_context: TypingContext, factor_a: NumbaType, factor_b: NumbaType) -> IntrinsicDefinition:
    """Upper 64 bits of an unsigned product: uniform from 0 to ``factor_b`` - 1 if ``factor_a`` is uniform."""

    def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit_intrinsic_code


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
