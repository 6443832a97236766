"""A file on local disk that grows within a budget and goes when it is closed: rows of keys (keys.buckets), of the gate (gate.spool)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final, Protocol

from compactor.errors import OutOfBudget


class Room(Protocol):
    """The disk budget. ``reserve`` raises OutOfBudget; what it grants is given back by ``release``."""

    def reserve(self, nbytes: int) -> None: ...

    def release(self, nbytes: int) -> None: ...


class _NoLimit:
    def reserve(self, nbytes: int) -> None:
        pass

    def release(self, nbytes: int) -> None:
        pass


NO_LIMIT: Final = _NoLimit()


class SpoolFile:
    """:param path: exists until ``close``. :param what: is written to it, for messages; ``hint``: where the disk is full."""

    def __init__(self, path: Path, room: Room, what: str, hint: str) -> None:
        self.path = path
        self.size = 0
        self._room = room
        self._what, self._hint = what, hint
        self._reserved = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def append(self, data: memoryview) -> int:
        """Where it begins in the file. Raises OutOfBudget when the room is used up, or the disk is."""
        size, position, written = len(data), self.size, 0
        self._room.reserve(size)
        self._reserved += size
        try:
            while written < size:
                written += os.pwrite(self._descriptor, data[written:], position + written)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OutOfBudget(f"no space is left for {self._what} {self.path}", hint=self._hint) from error
        self.size += size
        return position

    def fetch(self, data: memoryview, position: int) -> None:
        """Fills ``data`` with what was written there."""
        got = 0
        while got < len(data):
            size = os.preadv(self._descriptor, [data[got:]], position + got)
            if size == 0:
                raise OSError(errno.EIO, "a file became shorter while it was in use", str(self.path))
            got += size

    def close(self) -> None:
        """Removes the file and gives its room back. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.path.unlink(missing_ok=True)
            self._room.release(self._reserved)
            self._reserved = 0
