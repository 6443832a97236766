"""Local disk, within its budget: objects fetched from the tier and segments written for it (I10).

Space is reserved before the first byte is written. What is fetched stays, until somebody else needs the room.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compactor.errors import BadData, OutOfBudget
from compactor.model.segment import SegmentFile
from compactor.storage.port import ObjectStore



class Budget:
    """Bytes that may lie on the disk at once; ``peak`` is the most that ever were reserved."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.peak = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        with self._lock:
            if self.used + size > self.total:
                return False
            self.used += size
            self.peak = max(self.peak, self.used)
            return True

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


class Staging:
    """One round's folder under ``state_dir``; removed with everything in it when the round ends."""

    def __init__(self, folder: Path, store: ObjectStore, budget: Budget) -> None:
        self.folder = folder
        self._store = store
        self._budget = budget
        self._kept: OrderedDict[str, tuple[Path, int]] = OrderedDict()
        self._in_use: set[str] = set()
        self.bytes_fetched = 0
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    @contextmanager
    def fetched(self, key: str, file: SegmentFile) -> Iterator[Path]:
        """The object as a local file, checked against its recorded size and digest, while the block runs.

        Raises OutOfBudget, StoreError; BadData where the object is not what was recorded.
        """
        if key not in self._kept:
            self._reserve(file.size, key)
            path = self.folder / key.replace("/", "_")
            try:
                self._fetch(key, file, path)
            except BaseException:
                path.unlink(missing_ok=True)
                self._budget.give(file.size)
                raise
            self._kept[key] = (path, file.size)
        self._kept.move_to_end(key)
        self._in_use.add(key)
        try:
            yield self._kept[key][0]
        finally:
            self._in_use.discard(key)

    @contextmanager
    def reserved(self, size: int, what: str) -> Iterator[None]:
        """Room for ``size`` bytes that the block writes. Raises OutOfBudget."""
        self._reserve(size, what)
        try:
            yield
        finally:
            self._budget.give(size)

    @property
    def peak_bytes(self) -> int:
        return self._budget.peak

    def close(self) -> None:
        for _, size in self._kept.values():
            self._budget.give(size)
        self._kept.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _reserve(self, size: int, what: str) -> None:
        while not self._budget.take(size):
            victim = next((key for key in self._kept if key not in self._in_use), None)
            if victim is None:
                raise OutOfBudget(
                    f"{what} needs {size} bytes of local disk, and {self._budget.used} of {self._budget.total} are in use",
                    hint=f"Set disk_budget_bytes to at least {size + self._budget.used}, or lower segment_bytes",
                )
            path, held = self._kept.pop(victim)
            path.unlink(missing_ok=True)
            self._budget.give(held)

    def _fetch(self, key: str, file: SegmentFile, path: Path) -> None:
        size = self._store.download(key, path)
        self.bytes_fetched += size
        if size != file.size or digest(path) != file.sha256:
            raise BadData(
                f"the object has {size} bytes and another digest than the {file.size} bytes that were recorded",
                segment=key,
                hint="It was changed or damaged in the store. Restore it from the store's versions or a backup; nothing was changed",
            )


def digest(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
