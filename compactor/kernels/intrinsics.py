"""Code that numba emits in place of calls in kernels: unaligned loads and stores, prefetches, CRC-32C instructions, calls of C functions.
Imported when a kernel is compiled; ``compactor.kernels.memory`` and ``crc`` have the names that kernels use, without ``emit_``. Nothing
here checks bounds.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from compactor.kernels.crc import INSTRUCTION

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


emit_get_8, emit_get_16 = (_define_load_intrinsic(bits, types.int64, is_big_endian=False) for bits in (8, 16))
emit_put_8 = _define_store_intrinsic(8, types.int64, is_big_endian=False)
emit_load_i64 = _define_load_intrinsic(64, types.int64)
emit_load_i32 = _define_load_intrinsic(32, types.int32)
emit_load_u32 = _define_load_intrinsic(32, types.uint32)
emit_load_i16 = _define_load_intrinsic(16, types.int16)
emit_store_i64 = _define_store_intrinsic(64, types.int64)
emit_store_i32 = _define_store_intrinsic(32, types.int32)
emit_store_i16 = _define_store_intrinsic(16, types.int16)
emit_load_u64 = _define_load_intrinsic(64, types.uint64, is_big_endian=False)


@intrinsic  # type: ignore[untyped-decorator]
def emit_copy_bytes(
    typing_context: TypingContext,
    target: NumbaType,
    target_position: NumbaType,
    source: NumbaType,
    source_position: NumbaType,
    length: NumbaType,
) -> IntrinsicDefinition:
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


emit_copy_8, emit_copy_16 = _define_copy_intrinsic(64), _define_copy_intrinsic(128)


@intrinsic  # type: ignore[untyped-decorator]
def emit_element_address(typing_context: TypingContext, array: NumbaType, position: NumbaType) -> IntrinsicDefinition:
    def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
        return builder.ptrtoint(_element_pointer(context, builder, signature.args[0], args[0], args[1]), ir.IntType(64))

    return (types.int64(array, types.intp), emit_intrinsic_code) if _is_byte_array_type(array) else None


@intrinsic  # type: ignore[untyped-decorator]
def emit_call_c_function(typing_context: TypingContext, function_address: NumbaType, *arguments: NumbaType) -> IntrinsicDefinition:
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


emit_prefetch, emit_prefetch_read = _define_prefetch_intrinsic(1), _define_prefetch_intrinsic(0)


@intrinsic  # type: ignore[untyped-decorator]
def emit_high_product_word(typing_context: TypingContext, factor_a: NumbaType, factor_b: NumbaType) -> IntrinsicDefinition:
    def emit_intrinsic_code(context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments) -> LlvmValue:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit_intrinsic_code


_NAMES: Final = {("x86", 64): "llvm.x86.sse42.crc32.64.64", ("x86", 8): "llvm.x86.sse42.crc32.32.8",
                 ("arm", 64): "llvm.aarch64.crc32cx", ("arm", 8): "llvm.aarch64.crc32cb"}  # fmt: skip


def _define_crc32c_step_intrinsic(bits: int) -> NumbaIntrinsic:
    """A numba intrinsic: (crc, data) -> the state after ``bits`` (64 or 8) bits of data."""

    def advance_crc32c_state(typing_context: TypingContext, crc: NumbaType, data: NumbaType) -> IntrinsicDefinition:
        # x86 takes eight bytes into a 64-bit register; ARM takes one byte as a 32-bit number.
        state = ir.IntType(64 if (INSTRUCTION, bits) == ("x86", 64) else 32)
        operand = ir.IntType(32 if (INSTRUCTION, bits) == ("arm", 8) else bits)

        def emit_crc32c_instruction(
            context: CodegenContext, builder: LlvmBuilder, signature: NumbaSignature, args: LlvmArguments
        ) -> LlvmValue:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(state, [state, operand]), _NAMES[INSTRUCTION, bits])
            before = args[0] if state.width == 64 else builder.trunc(args[0], state)
            taken = args[1] if operand.width == 64 else builder.trunc(args[1], operand)
            after = builder.call(function, [before, taken])
            return after if state.width == 64 else builder.zext(after, ir.IntType(64))

        return types.uint64(types.uint64, types.uint64), emit_crc32c_instruction

    return intrinsic(advance_crc32c_state)


emit_step_crc_64, emit_step_crc_8 = _define_crc32c_step_intrinsic(64), _define_crc32c_step_intrinsic(8)
