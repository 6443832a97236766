"""Allocator settings for services that run for weeks, so that freed memory is returned to the operating system.

glibc gives each new thread a heap of its own, up to eight per processor, and each heap keeps the memory that it needed at its peak. A
service starts threads all the time (one per job, many per scan), so every heap would grow to the size of the largest job.
"""

from __future__ import annotations

import ctypes
from functools import cache

HEAPS = 2
_M_ARENA_MAX = -8


@cache
def _load_c_library() -> ctypes.CDLL | None:
    """Return the process's C library, or None if it cannot be called."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


def limit_malloc_heaps_if_glibc() -> bool:
    """Limit the number of malloc heaps of this process to two (HEAPS). Return False if the C library cannot do that; only glibc can. Must
    be called before the first thread starts.
    """
    tell = getattr(_load_c_library(), "mallopt", None)
    return tell is not None and tell(_M_ARENA_MAX, HEAPS) == 1


def return_free_memory_to_system() -> bool:
    """Give memory that this process has freed back to the operating system, which takes a few milliseconds. Return whether any was given
    back; always False if the C library is not glibc.
    """
    trim = getattr(_load_c_library(), "malloc_trim", None)
    return trim is not None and trim(0) == 1
