"""The only place where numba's options are chosen, and the two instructions that numba has no words for.

Import this late: numba costs half a second. Nothing is compiled at import; the first call compiles, and the next process finds the code in
numba's cache: beside the source, else in the user's cache directory (``NUMBA_CACHE_DIR`` comes before both).

Two rules for who writes kernels: name other kernels directly (``from bloom.siphash import siphash128``; an attribute of a module is not
followed when the cache asks whether code is stale), and call a kernel with the same dtypes everywhere, so that it is compiled once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """A compiled loop over arrays: releases the GIL, cached on disk, no bounds checks, division by zero as numpy has it."""
    return _compiled(function, forceinline=False)


def leaf(function: F) -> F:
    """A small function that every kernel which calls it takes in whole."""
    return _compiled(function, forceinline=True)


def _compiled(function: F, *, forceinline: bool) -> F:
    dispatcher: Any = numba.njit(nogil=True, boundscheck=False, error_model="numpy", forceinline=forceinline)(function)
    try:
        dispatcher._cache = _CodeCache(function)
    except RuntimeError:
        pass  # nowhere to write (a read-only installation and no home directory): every process compiles for itself
    compiled: F = dispatcher
    return compiled


class _CodeCache(FunctionCache):  # type: ignore[misc]
    """numba's cache, made safe where it is not: a full disk, a torn file, two first processes at once, a changed callee."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            result = super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - a torn or foreign file can make unpickling raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None
        # Two processes that save different signatures at once can leave an index that names the other one's code.
        return result if result is None or tuple(result.signature.args) == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:  # no space, no permission
            self.disable()

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # numba looks at a kernel's own source only; what it calls is compiled into it and may have changed alone.
        return super()._index_key(sig, codegen), _stamp(self._py_func)


@functools.cache
def _stamp(function: FunctionType) -> str:
    digest = hashlib.sha256()
    for path in sorted({callee.__code__.co_filename for callee in _reachable(function, set())}):
        digest.update(_source_digest(path))
    return digest.hexdigest()


def _reachable(function: FunctionType, seen: set[FunctionType]) -> Iterator[FunctionType]:
    seen.add(function)
    yield function
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        callee = getattr(value, "py_func", None) or getattr(value, "_defn", None)  # a kernel or an intrinsic
        if isinstance(callee, FunctionType) and callee not in seen:
            yield from _reachable(callee, seen)


@functools.cache
def _source_digest(path: str) -> bytes:
    try:
        with open(path, "rb") as source:
            return hashlib.sha256(source.read()).digest()
    except OSError:
        return b""  # inside a zip archive: numba's own stamp has to do


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _load_u64(typing_context: Any, array: Any, position: Any) -> Any:
    if not (isinstance(array, types.Array) and array.dtype == types.uint8 and array.layout == "C"):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _address(context, builder, signature.args[0], *args)
        return builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(array, types.intp), codegen


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    if not (isinstance(array, types.Array) and array.ndim == 1 and array.layout == "C"):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, signature.args[0], *args), cgutils.voidptr_t)
        word = ir.IntType(32)
        prefetch_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, prefetch_type, "llvm.prefetch.p0")
        builder.call(function, [pointer, word(1), word(3), word(1)])  # to write, keep in every cache level, data
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


def _multiply_high(typing_context: Any, a: Any, b: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


load_u64: Any = intrinsic(_load_u64)
"""``load_u64(bytes, position)``: the 8 bytes from there as a little-endian number, whatever the alignment. Not checked."""

prefetch: Any = intrinsic(_prefetch)
"""``prefetch(array, index)``: fetch the cache line of a one-dimensional array's element, which is soon to be used. Never faults."""

multiply_high: Any = intrinsic(_multiply_high)
"""``multiply_high(a, b)``: the upper half of the 128-bit product; with a uniform ``a`` it is a uniform number below ``b``."""
