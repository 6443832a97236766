"""Kernels are compiled when they are first used, once for an installation: said aloud where it takes time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from compactor.cli.output import Output

_QUIET_SECONDS = 2.0
_PATIENCE_SECONDS = 60
_PROGRAM = "from compactor.cleaner import ahead; ahead.compile_kernels(ahead.BESIDE)"


def warm_up(out: Output, *, load: bool = False) -> None:
    """Sees to it that the cache holds all kernels. ``load``: and this process, which else loads those that it calls when it calls them."""
    said = threading.Timer(_QUIET_SECONDS, out.note, ["compiling kernels: some ten seconds, the first time only ..."])
    said.daemon = True
    said.start()
    try:
        compile_all(load=load)
    finally:
        said.cancel()


def compile_all(*, load: bool) -> None:
    """``warm_up`` without a word."""
    from compactor.cleaner import ahead

    compiled = ahead.all_cached(ahead.IN_STEP + ahead.BESIDE)
    if not compiled:
        with _second_process():
            ahead.compile_kernels(ahead.IN_STEP)
    if load or not compiled:
        from compactor.cleaner import warm

        warm.warm_up()


@contextmanager
def _second_process() -> Iterator[None]:
    """Compiles the other half into the cache meanwhile. Where it cannot, or dies, this process compiles that half when it is called for."""
    from bloom.jit import cache_dir

    beside = None
    if (os.cpu_count() or 1) > 1 and cache_dir() is not None and sys.executable:
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        with suppress(OSError):
            beside = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-P", "-c", _PROGRAM],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    try:
        yield
        if beside is not None:
            with suppress(subprocess.TimeoutExpired):
                beside.wait(_PATIENCE_SECONDS)
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()
