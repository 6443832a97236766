"""Exclusive locks between processes of one machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Provide a ``with`` block during which an exclusive lock on a directory, or on a file that is created if necessary, is held. On file
    systems without locks the block runs without one.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path.is_dir() else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def is_locked(path: Path) -> bool:
    """Return whether another process may hold the lock on a directory or an existing file. True if the file system knows no locks."""
    file = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
