"""Files of segments as they were recorded. A bit that flips on its way is no damage in the store: what arrives so is fetched once more.

Compared are SHA-256; of a log that was put together of copies, which has none, its batches, each by its CRC and all by the digest of their
headers; and where no digest was recorded (objects that a broker wrote) the size alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.tier.contents import Digests, damaged
from compactor.tier.ports import SegmentLayout


@dataclass(frozen=True)
class Arrived:
    """What came of a file in the end, with the digest that can be compared. ``travelled``: bytes of all attempts."""

    found: SegmentFile
    travelled: int

    @property
    def size(self) -> int:
        return self.found.size

    def is_recorded(self, file: SegmentFile) -> bool:
        return file.is_met_by(self.found)

    def require(self, key: str, file: SegmentFile) -> None:
        """Raises BadData where it is not what was recorded."""
        if not self.is_recorded(file):
            raise damaged(key, self.found, file)


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
    found = SegmentFile(size=path.stat().st_size, sha256=digest(path) if file.sha256 else "")
    if file.batches and not file.sha256:
        from compactor.records.headers import checked_digest  # loads the compiler, which few commands need

        found = SegmentFile(size=found.size, batches=checked_digest(path))
    return Arrived(found, travelled)


def _of(data: bytes, file: SegmentFile) -> Arrived:
    digests = Digests(file)
    digests.update(data)
    return Arrived(digests.found(), len(data))


def digest(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
