"""Compilation of kernels with numba, and the folder in which the machine code is cached.
numba does not notice a change in what a kernel imports from another file. Therefore the folder's name ends in a digest of all files that
kernels are compiled from, their path, the compiler versions, and the processor.
Import this module late, because numba takes half a second to load. Call a kernel with the same array types everywhere: two processes that
compile it for different types at the same moment may overwrite each other's cache entry.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba.extending import register_jitable

F = TypeVar("F", bound=Callable[..., Any])
FolderAndNamePrefix = tuple[Path, str]

COMPLETE: Final = "complete"
"""A file in the cache folder: the kernels that nearly every log needs are compiled and on disk."""

KEPT_FOLDERS: Final = 10
"""Cache folders of other versions that are not deleted, a few MB each; the least recently used are deleted."""

_LEAST_FREE_BYTES: Final = 64 << 20
_ALL_SOURCES: Final = ("kernels", "model", "records")
_OPTIONS: Final = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_NAMED_FOLDER: Final = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
_log = logging.getLogger(__name__)


def kernel(function: F) -> F:
    """The compiled function releases the GIL, does not check indexes, and divides by zero as numpy does."""
    folder = kernel_cache_folder()
    compiled: Any = numba.njit(cache=folder is not None, **_OPTIONS)(function)
    if folder is not None and not compiled.stats.cache_path.startswith(str(folder)):  # beside the source, where entries become stale
        compiled = numba.njit(**_OPTIONS)(function)
    result: F = compiled
    return result


def inline_kernel(function: F) -> F:
    """Called from Python, the function runs as Python code."""
    inlined: F = register_jitable(forceinline=True, **_OPTIONS)(function)
    return inlined


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
    config = numba.config
    machine = config.CPU_NAME or binding.get_host_cpu_name()
    features = config.CPU_FEATURES if config.CPU_FEATURES is not None else binding.get_host_cpu_features().flatten()
    about = [str(Path(__file__).parents[2]), sys.version, np.__version__, numba.__version__, llvmlite.__version__, machine, features]
    digest = hashlib.sha256("\n".join(about).encode())
    for path in kernel_source_files():
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


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


numba.config.CACHE_DIR = str(kernel_cache_folder() or "")
