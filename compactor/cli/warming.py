"""Kernels are compiled when they are first used, once for an installation: said aloud where it takes time."""

from __future__ import annotations

import threading

from compactor.cli.output import Output

_QUIET_SECONDS = 2.0


def warm_up(out: Output, *, gate: bool = True) -> None:
    """Compiles all kernels, or loads them from the cache; ``gate``: those that only the equivalence gate needs, too."""
    from compactor.cleaner import warm

    said = threading.Timer(_QUIET_SECONDS, out.note, ["compiling kernels: a quarter of a minute, the first time only ..."])
    said.daemon = True
    said.start()
    try:
        warm.warm_up(gate=gate)
    finally:
        said.cancel()
