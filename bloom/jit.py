"""The only place where numba's options are chosen, and the two instructions that numba has no words for.

Import this late: numba costs half a second. Nothing is compiled at import; the first call compiles and the next process finds the code in
numba's cache (beside the source, else in the user's cache directory, else ``NUMBA_CACHE_DIR``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.ir as ir
import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """A compiled loop over arrays: releases the GIL, cached on disk, no bounds checks, division by zero as numpy has it."""
    return _compiled(function, forceinline=False)


def leaf(function: F) -> F:
    """A small function that every kernel which calls it takes in whole."""
    return _compiled(function, forceinline=True)


def _compiled(function: F, *, forceinline: bool) -> F:
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy", "forceinline": forceinline}
    try:
        dispatcher: F = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # No place for a cache can be written (a read-only installation and no home directory): compile in every process.
        dispatcher = numba.njit(**options)(function)
    return dispatcher


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic  # type: ignore[untyped-decorator]
def load_u64(typing_context: Any, array: Any, position: Any) -> Any:
    """``load_u64(bytes, position)``: the 8 bytes from there as a little-endian number, whatever the alignment. Unchecked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, signature.args[0], *args)
        word = builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()), align=1)
        return word

    if not (isinstance(array, types.Array) and array.dtype == types.uint8 and array.layout == "C"):
        return None
    return types.uint64(array, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """``prefetch(array, index)``: fetch the cache line of a one-dimensional array's element, to be written soon. Never faults."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, signature.args[0], *args), cgutils.voidptr_t)
        word = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word]), "llvm.prefetch.p0"
        )
        builder.call(function, [pointer, word(1), word(3), word(1)])
        return context.get_dummy_value()

    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"):
        return None
    return types.void(array, types.intp), codegen
