"""What the C library's allocator keeps of memory that was given back: little. For processes that run for weeks.

glibc gives each new thread a heap of its own, up to eight for a processor, and each keeps what its busiest hour has needed. A service
begins threads all the time (a job is one, a scan is many), so that every one of those heaps comes to hold that much.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

HEAPS = 2
_M_ARENA_MAX = -8


@cache
def _library() -> Any:
    """The process's own C library; None where there is none to ask."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


def few_heaps() -> bool:
    """Called before the first thread begins; whether the C library is one that can be told so (glibc)."""
    tell = getattr(_library(), "mallopt", None)
    return tell is not None and tell(_M_ARENA_MAX, HEAPS) == 1


def give_back() -> bool:
    """Pages on which nothing lies any more go back to the system: a few milliseconds. Whether there were any."""
    trim = getattr(_library(), "malloc_trim", None)
    return trim is not None and trim(0) == 1
