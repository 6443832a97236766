"""A few bytes kept back on the disk of a directory tier, so that control records can be written when it is full.

Without them nothing could be deleted from a full disk: what is about to be deleted has to be written down first.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

RESERVE_BYTES = 1 << 20
"""As many bytes as some thousand records take; more than `retire` writes before it frees some."""
SLICE_BYTES = RESERVE_BYTES // 16
"""What is given back at a time: enough for a record, little enough that others cannot take much of it."""


class Reserve:
    """File of 1 MiB that is given up when the disk is full, so that control records can still be written.

    Best effort: without the file a full disk refuses them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """Restore the file to its full size if the disk has space. Called after every write; makes one ``stat`` if nothing is missing."""
        with suppress(OSError):
            if not self._path.exists() or self._path.stat().st_size < RESERVE_BYTES:
                with open(self._path, "ab") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def spend(self) -> bool:
        """Give a sixteenth of the file back to the file system. Return False if nothing is left."""
        try:
            size = self._path.stat().st_size
            if size == 0:
                return False
            os.truncate(self._path, max(0, size - SLICE_BYTES))
        except OSError:
            return False
        return True
