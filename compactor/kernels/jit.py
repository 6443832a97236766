"""Kernels: functions that numba compiles, and the folder in which their machine code is cached.

1. ``kernel`` and ``intrinsics`` only take notes when a module is imported: numba takes half a second to load.
2. The first call of a kernel looks for machine code in the folder (``machine_code.py``), which needs llvmlite but not numba.
3. If there is none for these argument types, numba is loaded and compiles the kernel, or loads it from its own cache in that folder.

numba does not notice a change in what a kernel imports from another file. Therefore the folder's name ends in a digest of all files that
kernels are compiled from, their path, the compiler versions, and the processor. Call a kernel with the same array types everywhere: two
processes that compile it for different types at the same moment may overwrite each other's cache entry.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import llvmlite
import numpy as np
from llvmlite import binding

from compactor.kernels.machine_code import Routine, export_routines, load_routines
from compactor.profiling import loading_cost

F = TypeVar("F", bound=Callable[..., Any])
FolderAndNamePrefix = tuple[Path, str]

COMPLETE: Final = "complete"
"""A file in the cache folder: the kernels that nearly every log needs are compiled and on disk."""

KEPT_FOLDERS: Final = 10
"""Cache folders of other versions that are not deleted, a few MB each; the least recently used are deleted."""

_LEAST_FREE_BYTES: Final = 64 << 20
_DIGEST_DIGITS: Final = 32
_ALL_SOURCES: Final = ("kernels", "model", "records")
_OPTIONS: Final = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_NAMED_FOLDER: Final = os.environ.get("NUMBA_CACHE_DIR", "")
_log = logging.getLogger(__name__)
_lock: Final = threading.RLock()
_inline_functions: Final[list[Callable[..., Any]]] = []
_compiled_kernels: Final[list[Kernel]] = []


class Kernel:
    """A function that runs as machine code. It releases the GIL, does not check indexes, and divides by zero as numpy does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.name = f"{function.__module__}.{function.__qualname__}"
        self._function = function

    def __call__(self, *args: Any) -> Any:
        for routine in routines_on_disk().get(self.name, ()):
            words = routine.pack_arguments(args)
            if words is not None:
                return routine.call(words)
        compiled = self.dispatcher
        known, begun = len(compiled.overloads), loading_cost.begin()
        result = compiled(*args)
        if len(compiled.overloads) > known:
            loading_cost.add_since(begun)
        return result

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's function."""
        with _lock:
            numba, folder = load_numba(), kernel_cache_folder()
            compiled: Any = numba.njit(cache=folder is not None, **_OPTIONS)(self._function)
            if folder is not None and not compiled.stats.cache_path.startswith(
                str(folder)
            ):  # beside the source, where entries become stale
                compiled = numba.njit(**_OPTIONS)(self._function)
            _compiled_kernels.append(self)
            return compiled

    @property
    def _numba_type_(self) -> Any:  # what numba asks a global that a kernel calls
        return self.dispatcher._numba_type_


class Intrinsic:
    """A function of ``compactor.kernels.intrinsics``, which is imported when numba compiles a call of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> Any:
        raise TypeError(f"{self.name} can only be called in a kernel")

    @property
    def _numba_type_(self) -> Any:
        from numba.core.registry import cpu_target

        from compactor.kernels import intrinsics

        return cpu_target.typing_context.resolve_value_type(getattr(intrinsics, f"emit_{self.name}"))


def kernel(function: F) -> F:
    """The compiled function releases the GIL, does not check indexes, and divides by zero as numpy does."""
    result: Any = Kernel(function)
    return result  # type: ignore[no-any-return]


def inline_kernel(function: F) -> F:
    """Called from Python, the function runs as Python code."""
    with _lock:
        if load_numba.cache_info().currsize:
            _register_inline(function)
        else:
            _inline_functions.append(function)
    return function


@functools.cache
def load_numba() -> Any:
    begun = loading_cost.begin()
    import numba
    from numba.core.registry import cpu_target

    importlib.import_module("compactor.kernels.intrinsics")
    cpu_target.typing_context.refresh()  # with these intrinsics
    numba.config.CACHE_DIR = str(kernel_cache_folder() or "")
    for function in _inline_functions:
        _register_inline(function)
    loading_cost.add_since(begun)
    return numba


def _register_inline(function: Callable[..., Any]) -> None:
    from numba.extending import register_jitable

    register_jitable(forceinline=True, **_OPTIONS)(function)


@functools.cache
def routines_on_disk() -> Mapping[str, list[Routine]]:
    """Machine code of kernels by their names."""
    begun = loading_cost.begin()
    folder = kernel_cache_folder()
    found = load_routines(folder, _digest_of_folder(folder)) if folder is not None else {}
    loading_cost.add_since(begun)
    return found


def forget_compiled_kernels() -> None:
    """Have numba compile each kernel again when it is next called: what numba has loaded from its cache cannot be exported."""
    with _lock:
        for kernel in _compiled_kernels:
            del kernel.dispatcher
        _compiled_kernels.clear()


def export_compiled_kernels(folder: Path) -> None:
    """Write the machine code of all kernels that numba has compiled in this process."""
    export_routines(folder, _digest_of_folder(folder), {kernel.name: kernel.dispatcher for kernel in _compiled_kernels})


def _digest_of_folder(folder: Path) -> str:
    return folder.name[-_DIGEST_DIGITS:]  # the name has a prefix among everybody's temporary files


@functools.cache
def kernel_cache_folder() -> Path | None:
    """The first writable folder of ``NUMBA_CACHE_DIR``, the user's cache directory and the directory for temporary files. None, so that
    each process compiles, if there is none or the sources are in an archive.
    A cache in a read-only folder, as in a container image, is copied to the writable one: numba uses a cache only where it can write.
    """
    if not Path(__file__).is_file():
        return None
    name, ready = f"kernels-{kernel_sources_digest()}", None
    for parent, prefix in _candidate_locations():
        folder = parent / (prefix + name)
        try:
            if not folder.exists() and not prefix:
                _delete_old_folders(parent)
            folder.mkdir(0o700, parents=True, exist_ok=True)
            # The content is executed. Among everybody's temporary files the folder must therefore be our own, not prepared by others.
            if folder.lstat().st_uid != os.getuid() or shutil.disk_usage(folder).free < _LEAST_FREE_BYTES:
                raise PermissionError(f"{folder} belongs to another user, or its disk is full")
            os.utime(folder)
            tempfile.TemporaryFile(dir=folder).close()
            if ready is not None and not any(folder.iterdir()):
                _copy_folder(ready, folder)
        except OSError as error:
            _log.debug("kernels are not cached in %s: %s", folder, error)
            ready = ready or (folder if not prefix and folder.is_dir() else None)
            continue
        return folder
    return None


def kernel_sources_digest() -> str:
    """32 hex digits of source code, path, versions and processor. numba caches per source path: without it, a second installation would
    find the folder complete and compile everything again.
    """
    compiler = importlib.util.find_spec("numba")
    versions = [Path(place, "_version.py").read_bytes() for place in (compiler.submodule_search_locations or [])] if compiler else []
    about = [
        str(Path(__file__).parents[2]),
        sys.version,
        np.__version__,
        llvmlite.__version__,
        *processor_name_and_features(),
        repr(versions),
    ]
    digest = hashlib.sha256("\n".join(about).encode())
    for path in kernel_source_files():
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:_DIGEST_DIGITS]


def processor_name_and_features() -> tuple[str, str]:
    """Return name and features of the processor that numba compiles for: those of the environment, else those of this machine."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name and name.lower() == "generic" else binding.get_host_cpu_features().flatten()
    return name or binding.get_host_cpu_name(), features


def kernel_source_files() -> list[Path]:
    """Files that contain kernels, and those from which kernels import constants."""
    root = Path(__file__).parents[2]
    files = sorted([*root.glob("bloom/*.py"), *root.glob("compactor/**/*.py")])
    names = ("compactor/constants.py", "compactor/read/outcomes.py", "bloom/sidecar.py")
    constants = {root / name for name in names}
    return [
        path for path in files if path in constants or path.parent.name in _ALL_SOURCES or b"compactor.kernels.jit" in path.read_bytes()
    ]


def _candidate_locations() -> Iterator[FolderAndNamePrefix]:
    """Yield (directory, prefix of the folder's name), the preferred one first."""
    if _NAMED_FOLDER:
        yield Path(_NAMED_FOLDER), ""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(cache) / "tiered-compactor", ""
    yield Path(tempfile.gettempdir()), f"tiered-compactor-{os.getuid()}-"


def _delete_old_folders(parent_folder: Path) -> None:
    """A process that uses a deleted folder compiles its kernels again."""
    for old in sorted(parent_folder.glob("kernels-*"), key=lambda path: path.stat().st_mtime)[:-KEPT_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)


def _copy_folder(source_folder: Path, target_folder: Path) -> None:
    """Other processes see either all of the copy or nothing."""
    with tempfile.TemporaryDirectory(dir=target_folder.parent) as scratch:
        shutil.copytree(source_folder, Path(scratch) / "copy").rename(target_folder)
