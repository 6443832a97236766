"""Downloads of segment files, checked against what was recorded. A file that arrives damaged is fetched once more.

The check compares SHA-256. For a composed log, which has none, it compares every batch's CRC and the digest of all batch headers. For
objects that a broker wrote it compares only the size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.tier.contents import StreamDigest, damaged_object_error
from compactor.tier.ports import SegmentLayout


@dataclass(frozen=True)
class Download:
    """Result of a download: size and digest. transferred: bytes of all attempts."""

    found: SegmentFile
    transferred: int

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.found.size

    def is_recorded(self, file: SegmentFile) -> bool:
        """Return whether the downloaded bytes match what was recorded."""
        return file.is_matched_by(self.found)

    def require(self, key: str, file: SegmentFile) -> None:
        """Raise BadData if the downloaded bytes differ from what was recorded."""
        if not self.is_recorded(file):
            raise damaged_object_error(key, self.found, file)


def download_recorded(layout: SegmentLayout, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> Download:
    """Download one file of a segment into a new local file. Raises NotFound, StoreError."""
    file = segment.file(kind)
    arrived = _describe_download(layout.download(name, segment, kind, path), path, file)
    if not arrived.is_recorded(file):
        arrived = _describe_download(arrived.transferred + layout.download(name, segment, kind, path), path, file)
    return arrived


def read_recorded(layout: SegmentLayout, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str) -> bytes:
    """Return a small file of a segment. Raises BadData if it differs from what was recorded; NotFound, StoreError."""
    file = segment.file(kind)
    most = file.size + 1  # for a range the store states what it sends, so that a truncated body is noticed
    data = layout.read(name, segment, kind, 0, most)
    if not _describe_bytes(data, file).is_recorded(file):
        data = layout.read(name, segment, kind, 0, most)
    _describe_bytes(data, file).require(layout.where(name, segment, kind), file)
    return data


def _describe_download(transferred: int, path: Path, file: SegmentFile) -> Download:
    found = SegmentFile(size=path.stat().st_size, sha256=file_sha256(path) if file.sha256 else "")
    if file.batches and not file.sha256:
        from compactor.records.headers import checked_digest  # loads the compiler, which few commands need

        found = SegmentFile(size=found.size, batches=checked_digest(path))
    return Download(found, transferred)


def _describe_bytes(data: bytes, file: SegmentFile) -> Download:
    digests = StreamDigest(file)
    digests.update(data)
    return Download(digests.found(), len(data))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a local file as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
