"""The only place where numba's options are chosen, and the two instructions that numba has no words for.

Import this late: numba costs half a second. Nothing is compiled at import; the first call compiles, and every later process finds the code
in the user's cache directory, wherever it is started from: an entry is named by what it was made of (``_KernelCache``).

Two rules for who writes kernels: name other kernels directly (``from bloom.siphash import siphash128``; an attribute of a module is not
followed when the cache asks whether code is stale), and call a kernel with the same dtypes everywhere, so that it is compiled once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import itertools
import linecache
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar

import llvmlite
import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.caching import NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import Environment, _rebuild_env, lookup_environment
from numba.core.registry import CPUDispatcher
from numba.core.runtime import _nrt_python
from numba.core.serialize import dumps
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

CACHED_ENTRIES: Final = 1000
"""How many compiled kernels of all versions are kept, some 30 KB each; the least recently used go."""


def kernel(function: F) -> F:
    """A compiled loop over arrays: releases the GIL, cached on disk, no bounds checks, division by zero as numpy has it."""
    compiled: F = _alone(function)
    return compiled


def leaf(function: F) -> F:
    """A small function that every kernel which calls it takes in whole. Compiled by itself when Python calls it."""
    compiled: F = _Leaf(function, {}, {**_OPTIONS, "forceinline": True, "no_cpython_wrapper": True}, _LeafCompiler)
    return compiled


_OPTIONS: Final = {"nopython": True, "nogil": True, "boundscheck": False, "error_model": "numpy", "no_cfunc_wrapper": True}


class _Kernel(CPUDispatcher):  # type: ignore[misc]
    def compile(self, sig: Any) -> Any:
        # A compiler makes many small objects and no garbage worth looking for: a sixth of its time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            # Without the timers of numba, which hear of every call of LLVM.
            with global_compiler_lock, self._compiling_counter:
                return self._compiled(sig)
        finally:
            if collecting:
                gc.enable()

    def _compiled(self, sig: Any) -> Any:
        known = self.overloads.get(sig)
        if known is not None:
            return known.entry_point
        result = self._cache.load_overload(sig, self.targetctx)
        if result is None:
            self._cache_misses[sig] += 1
            result = self._compiler.compile(sig, None)
            for each in result._find_referenced_environments():  # leaves' own, which are in no other library
                result.library.codegen.set_env(each.env_name, each)
            self._cache.save_overload(sig, result)
        else:
            self._cache_hits[sig] += 1
            self.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
        self.add_overload(result)
        return result.entry_point


def is_cached(kernel: Any, signature: tuple[Any, ...]) -> bool:
    """Whether calling this kernel with arguments of these types, numba's, would compile nothing in this process."""
    cache = kernel._cache
    return signature in kernel.overloads or (isinstance(cache, _KernelCache) and cache.has(signature, kernel.targetctx))


@functools.cache
def _alone(function: FunctionType) -> Any:
    made: Any = _Kernel(function, {}, _OPTIONS)
    place = cache_dir()
    if place is not None:  # where there is none every process compiles for itself
        made._cache = _KernelCache(function, place)
    return made


class _Leaf(_Kernel):
    """Compiled once for numbers, whether they are constants at the place of the call or not."""

    def compile(self, sig: Any) -> Any:
        return super().compile(tuple(map(types.unliteral, sig)))  # type: ignore[attr-defined]

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres

    def _compiled(self, sig: Any) -> Any:
        known = self.overloads.get(sig)
        if known is None:
            known = self._compiler.compile(sig, None)._replace(entry_point=object())  # by which callers find it
            self.targetctx.insert_user_function(known.entry_point, known.fndesc, [known.library])
            self.add_overload(known)
        return known.entry_point

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        return _alone(self.py_func)  # numba calls what it gets from here


class _LeafLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code that is only ever taken into other code: no machine code of its own."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _LeafCompiler(Compiler):  # type: ignore[misc]
    def __init__(self, typing_context: Any, target_context: Any, library: Any, args: Any, return_type: Any, flags: Any, kinds: Any) -> None:
        flags.no_compile = True
        library = _LeafLibrary(target_context.codegen(), "leaf")
        super().__init__(typing_context, target_context, library, args, return_type, flags, kinds)


# ---- the cache ----------------------------------------------------------------------------------------------------------------


@functools.cache
def cache_dir() -> Path | None:
    """``NUMBA_CACHE_DIR``, else the first that can be written of the user's cache directory and one of this user's among temporary files.

    The one that was named need only be readable: an image brings its kernels along on a disk that nobody writes.
    """
    if numba.config.CACHE_DIR:
        named = Path(numba.config.CACHE_DIR)
        with contextlib.suppress(OSError):
            named.mkdir(0o700, parents=True, exist_ok=True)
        return named if os.access(named, os.R_OK | os.X_OK) else None
    temporary = Path(tempfile.gettempdir()) / f"tiered-compactor-{os.getuid()}"
    for place in _places(temporary):
        try:
            place.mkdir(0o700, parents=True, exist_ok=True)
            status = place.stat()
            # What lies here is run: among everybody's temporary files it must be ours alone.
            if place == temporary and (place.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o022):
                continue
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        return place
    return None


def _places(temporary: Path) -> Iterator[Path]:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(RuntimeError):  # nobody knows the home directory
        yield Path(home).expanduser() / "tiered-compactor" / "kernels"
    yield temporary


class _KernelCache(NullCache):  # type: ignore[misc]
    """One file for each compiled signature, named by a digest of all that decides upon the code: no path, no time, no index.

    Two first processes at once write the same file, each whole. A torn or foreign file costs a compilation.
    """

    def __init__(self, function: FunctionType, place: Path) -> None:
        self._function = function
        self._place = place
        self._enabled = True

    @property
    def cache_path(self) -> str:
        return str(self._place)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def has(self, sig: Any, target_context: Any) -> bool:
        return self._enabled and bool(_stamp(self._function)) and self._path(sig, target_context.codegen()).exists()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        if not (self._enabled and _stamp(self._function)):
            return None
        path = self._path(sig, target_context.codegen())
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            return None
        with contextlib.suppress(OSError):  # others' entries are not ours to keep
            os.utime(path)
        _name_runtime()
        return _loaded(target_context, *_Unpickler(io.BytesIO(content[32:])).load())

    def save_overload(self, sig: Any, data: Any) -> None:
        if not (self._enabled and _stamp(self._function)) or data.library.has_dynamic_globals:
            return
        content: bytes = dumps((_defined(data.library._get_module_for_linking()), data._reduce()))
        path = self._path(sig, data.codegen)
        try:
            with tempfile.NamedTemporaryFile(dir=self._place, prefix="new-", delete=False) as file:
                try:
                    file.write(hashlib.sha256(content).digest() + content)
                    file.flush()
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise
            _clear_out(self._place)
        except OSError:  # no space, no permission
            self.disable()

    def _path(self, sig: Any, codegen: Any) -> Path:
        made_of = "\n".join([_stamp(self._function), str(sig), *map(str, codegen.magic_tuple())])
        return self._place / f"{self._function.__qualname__}.{hashlib.sha256(made_of.encode()).hexdigest()[:40]}.kernel"


class _LoadedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Compiled code as it is run. What is inlined of it elsewhere is read only if somebody compiles: half of what loading would cost."""

    _shared_module: Any

    def __init__(self, codegen: Any, name: str, code: bytes, bitcode: bytes, defined: set[str]) -> None:
        super().__init__(codegen, name)
        self._bitcode = bitcode
        self.enable_object_caching()
        self._set_compiled_object(code)
        self._finalize_final_module()
        codegen._engine._defined_symbols |= defined

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = llvmlite.binding.parse_bitcode(self._bitcode)
        return self._shared_module


class _Unpickler(pickle.Unpickler):
    """Of what lies in a directory of ours. numba would import each module that something was compiled in from."""

    def find_class(self, module: str, name: str) -> Any:
        return _environment if (module, name) == (_rebuild_env.__module__, _rebuild_env.__name__) else super().find_class(module, name)


def _environment(module: str, constants: Any, name: str) -> Any:
    """What compiled code finds its constants in: exceptions and their messages. Globals are for code that is not compiled."""
    environment = lookup_environment(name)
    if environment is None:
        environment = Environment(vars(sys.modules[module]) if module in sys.modules else {"__name__": module})
        environment.consts[:] = constants
        environment.env_name = name
        Environment._memo[name] = environment
    return environment


def _loaded(target_context: Any, defined: set[str], reduced: tuple[Any, ...]) -> CompileResult:
    """``CompileResult._rebuild`` with a library that is read as far as needed. ``reduced``: what ``CompileResult._reduce`` gave."""
    (name, _, (code, bitcode)), fndesc, env, signature, objectmode, lifted, annotation, reload_init, referenced = reduced
    library = _LoadedLibrary(target_context.codegen(), name, code, bitcode, defined)
    for each in referenced:
        library.codegen.set_env(each.env_name, each)
    return CompileResult(
        target_context=target_context, typing_context=target_context.typing_context, library=library, environment=env,
        entry_point=target_context.get_executable(library, fndesc, env), fndesc=fndesc, type_annotation=annotation, signature=signature,
        objectmode=objectmode, lifted=lifted, typing_error=None, call_helper=None, metadata=None, reload_init=reload_init,
        referenced_envs=referenced,
    )  # fmt: skip


def _defined(module: Any) -> set[str]:
    """Names that a module of compiled code has for others."""
    return {each.name for group in (module.functions, module.global_variables) for each in group if not each.is_declaration}


@functools.cache
def _clear_out(place: Path) -> None:
    """Once in a process, when it has something to add."""
    found = sorted(((path.stat().st_mtime_ns, path) for path in place.iterdir() if path.suffix == ".kernel"), reverse=True)
    for _, path in found[CACHED_ENTRIES:]:
        path.unlink(missing_ok=True)


@functools.cache
def _name_runtime() -> None:
    """The functions of numba's runtime that compiled code calls. All else that numba makes ready is for compiling."""
    for name, address in _nrt_python.c_helpers.items():
        llvmlite.binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


@functools.cache
def _stamp(function: FunctionType) -> str:
    """A digest of the source of all that is compiled into this kernel, its constants and who compiles; empty where there is no source."""
    seen: set[Any] = set()
    constants = sorted(itertools.chain.from_iterable(map(_constants, _reachable(function, seen))))
    digests = sorted({_source_digest(each.__code__.co_filename, each.__module__) for each in (*seen, _reachable)})
    if "" in digests:
        return ""
    made_of = [function.__module__, function.__qualname__, sys.version, np.__version__, numba.__version__, llvmlite.__version__]
    return hashlib.sha256("\n".join([*made_of, *digests, *constants]).encode()).hexdigest()


def _reachable(function: FunctionType, seen: set[FunctionType]) -> Iterator[FunctionType]:
    seen.add(function)
    yield function
    for value in _named(function).values():
        callee = getattr(value, "py_func", None) or getattr(value, "_defn", None)  # a kernel or an intrinsic
        if isinstance(callee, FunctionType) and callee not in seen:
            yield from _reachable(callee, seen)


def _named(function: FunctionType) -> dict[str, Any]:
    """Globals that its code names."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    return {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _constants(function: FunctionType) -> Iterator[str]:
    """Numbers and arrays of other modules are compiled in as they are."""
    for name, value in _named(function).items():
        if isinstance(value, (bool, int, float, str, bytes, tuple, np.generic)):
            yield f"{function.__qualname__} {name} {value!r}"
        elif isinstance(value, np.ndarray):
            yield f"{function.__qualname__} {name} {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"


@functools.cache
def _source_digest(path: str, module: str) -> str:
    source = "".join(linecache.getlines(path, vars(sys.modules[module])))  # from archives of modules too
    return hashlib.sha256(source.encode()).hexdigest() if source else ""


# ---- instructions -------------------------------------------------------------------------------------------------------------


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
