"""Objects as they were recorded. A bit that flips on its way is no damage in the store: what arrives otherwise is fetched once more."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from compactor.errors import BadData
from compactor.model.segment import SegmentFile
from compactor.storage.port import ObjectStore


@dataclass(frozen=True)
class Arrived:
    """What came of an object in the end; ``travelled``: bytes of all attempts."""

    size: int
    sha256: str
    travelled: int

    def is_recorded(self, file: SegmentFile) -> bool:
        return (self.size, self.sha256) == (file.size, file.sha256)

    def require(self, key: str, file: SegmentFile) -> None:
        """Raises BadData where it is not what was recorded."""
        if self.is_recorded(file):
            return
        what = (
            f"it has {self.size} bytes, recorded are {file.size}"
            if self.size != file.size
            else "its digest is not the one that was recorded"
        )
        raise BadData(
            f"the object was changed or damaged: {what}",
            segment=key,
            hint="Restore it from the store's versions or a backup; nothing was changed",
        )


def download(store: ObjectStore, key: str, path: Path, file: SegmentFile) -> Arrived:
    """The object as a local file. Raises NotFound, StoreError."""
    size = travelled = store.download(key, path)
    arrived = Arrived(size, digest(path), travelled)
    if not arrived.is_recorded(file):
        size = store.download(key, path)
        arrived = Arrived(size, digest(path), travelled + size)
    return arrived


def content(store: ObjectStore, key: str, file: SegmentFile) -> bytes:
    """A small object, in memory. Raises BadData where it is not what was recorded; NotFound, StoreError."""
    most = file.size + 1  # of a range the store says which it sends, so that a body that is cut off is noticed as such
    data = store.get(key, 0, most)
    if not _of(data).is_recorded(file):
        data = store.get(key, 0, most)
    _of(data).require(key, file)
    return data


def _of(data: bytes) -> Arrived:
    return Arrived(len(data), hashlib.sha256(data).hexdigest(), len(data))


def digest(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
