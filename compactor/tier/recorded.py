"""Files of segments as they were recorded. A bit that flips on its way is no damage in the store: what arrives so is fetched once more.

Where no digest was recorded (objects that a broker wrote), the size is all that is compared.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.tier.ports import SegmentLayout


@dataclass(frozen=True)
class Arrived:
    """What came of a file in the end; ``sha256``: empty where none was recorded. ``travelled``: bytes of all attempts."""

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


def download(layout: SegmentLayout, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> Arrived:
    """One file of a segment as a local file. Raises NotFound, StoreError."""
    file = segment.file(kind)
    arrived = _downloaded(layout.download(name, segment, kind, path), path, file)
    if not arrived.is_recorded(file):
        arrived = _downloaded(arrived.travelled + layout.download(name, segment, kind, path), path, file)
    return arrived


def content(layout: SegmentLayout, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str) -> bytes:
    """A small file, in memory. Raises BadData where it is not what was recorded; NotFound, StoreError."""
    file = segment.file(kind)
    most = file.size + 1  # of a range the store says which it sends, so that a body that is cut off is noticed as such
    data = layout.read(name, segment, kind, 0, most)
    if not _of(data, file).is_recorded(file):
        data = layout.read(name, segment, kind, 0, most)
    _of(data, file).require(layout.where(name, segment, kind), file)
    return data


def _downloaded(travelled: int, path: Path, file: SegmentFile) -> Arrived:
    return Arrived(path.stat().st_size, digest(path) if file.sha256 else "", travelled)


def _of(data: bytes, file: SegmentFile) -> Arrived:
    return Arrived(len(data), hashlib.sha256(data).hexdigest() if file.sha256 else "", len(data))


def digest(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
