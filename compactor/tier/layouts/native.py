"""This program's own layout: every file of a segment is one object as it is on a broker's disk, ``orders-0/00000000000000000042-<id>.log``.

SHA-256 and the broker's modification time go along as the object's metadata (``sha256``, ``mtime-ms``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from compactor.errors import AlreadyExists, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.deleting import delete_keys
from compactor.storage.port import ObjectStore
from compactor.tier.contents import stored_digest
from compactor.tier.ports import ListedObject, SegmentRef

_OBJECT: Final = re.compile(rf"(\d{{20}})-([A-Za-z0-9_-]{{22}})\.({'|'.join(FILE_KINDS)})")
_FOLDER: Final = re.compile(r"([^/]+-\d+)/[^/]+")


class NativeLayout:
    """SegmentLayout. Usable by as many threads as the store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def parts(self) -> frozenset[str]:
        return frozenset({"log"})

    def folder(self, name: TopicPartition) -> str:
        return f"{name}/"

    def where(self, name: TopicPartition, segment: SegmentRef, kind: str) -> str:
        return f"{name}/{segment.start_offset:020d}-{segment.id}.{kind}"

    def files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        return segment.files

    def read(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None) -> bytes:
        return self._store.get(self.where(name, segment, kind), start, length)

    def download(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> int:
        return self._store.download(self.where(name, segment, kind), path)

    def upload(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        for kind, content in contents.items():
            key, file = self.where(name, segment, kind), segment.files[kind]
            about = {"sha256": file.sha256, "mtime-ms": str(segment.mtime_ms)}
            try:
                if isinstance(content, bytes):
                    self._store.create(key, content, about)
                else:
                    self._store.create_from_file(key, content, about)
            except AlreadyExists:
                if not self._same(key, file):
                    return f"{key} exists already with other content"
        return ""

    def upload_room(self, log_bytes: int) -> int:
        return 0

    def custom_metadata(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        return ""

    def problem(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """The digest is taken from the object's metadata, as the store has it from the upload; an object without is read."""
        for kind, expected in segment.files.items():
            key = self.where(name, segment, kind)
            try:
                info = self._store.head(key)
            except NotFound:
                return f"{self.url}/{key} is missing"
            if info.size != expected.size:
                return f"{self.url}/{key} has {info.size} bytes, its receipt says {expected.size}"
            if expected.sha256 and (info.metadata.get("sha256") or stored_digest(self._store, key, info.size)) != expected.sha256:
                return f"{self.url}/{key} has another digest than its receipt says"
        return ""

    def delete(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        delete_keys(self._store, [self.where(name, segment, kind) for segment in segments for kind in FILE_KINDS])

    def list(self, name: TopicPartition) -> Iterator[ListedObject]:
        for info in self._store.list(f"{name}/"):
            match = _OBJECT.fullmatch(info.key.removeprefix(f"{name}/"))
            if match:
                yield ListedObject(info.key, info.size, info.modified_ms, match[2], int(match[1]), match[3])
            else:
                yield ListedObject(info.key, info.size, info.modified_ms)

    def partition_of(self, key: str) -> str:
        match = _FOLDER.fullmatch(key)
        return match[1] if match else ""

    def _same(self, key: str, file: SegmentFile) -> bool:
        try:
            info = self._store.head(key)
        except NotFound:
            return False
        return info.size == file.size and info.metadata.get("sha256") == file.sha256
