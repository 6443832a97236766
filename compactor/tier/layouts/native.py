"""This program's own layout: every file of a segment is one object as it is on a broker's disk, ``orders-0/00000000000000000042-<id>.log``.

The digests that are known and the broker's modification time go along as the object's metadata (``sha256``, ``batches``, ``mtime-ms``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from compactor.errors import AlreadyExists, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.deleting import delete_keys
from compactor.storage.port import ObjectInfo, ObjectStore, Piece, RangeCopies
from compactor.tier.contents import damaged, stored_file
from compactor.tier.ports import ListedObject, SegmentRef

_OBJECT: Final = re.compile(rf"(\d{{20}})-([A-Za-z0-9_-]{{22}})\.({'|'.join(FILE_KINDS)})")
_FOLDER: Final = re.compile(r"([^/]+-\d+)/[^/]+")


_Write = Callable[[str, Mapping[str, str]], ObjectInfo]
"""(key, metadata) -> a new object. Raises AlreadyExists."""


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
        return self._create(name, segment, {kind: partial(self._write, content) for kind, content in contents.items()})

    @property
    def keeps_digests(self) -> bool:
        return True

    @property
    def copies(self) -> RangeCopies | None:
        return self._store.copies

    def version(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        key, recorded = self.where(name, segment, "log"), segment.file("log")
        info = self._store.head(key)
        told = _told(info)
        if not told.is_same(recorded):  # one without our digests is somebody else's
            raise damaged(key, told, recorded)
        return info.etag

    def compose(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, log: Sequence[Piece], contents: Mapping[str, Path | bytes]
    ) -> str:
        """The log first: where the store turns out not to copy, nothing is there yet."""
        beside = {kind: partial(self._write, content) for kind, content in contents.items()}
        return self._create(name, segment, {"log": lambda key, about: self._store.compose(key, log, about), **beside})

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
            if expected.has_digest and not self._found(info, expected).is_same(expected):
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

    def _create(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, writes: Mapping[str, _Write]) -> str:
        """An object for each file; what exists and is not the same is named, and nothing is written after it."""
        for kind, write in writes.items():
            key, file = self.where(name, segment, kind), segment.files[kind]
            about = {"sha256": file.sha256, "batches": file.batches, "mtime-ms": str(segment.mtime_ms)}
            try:
                write(key, {what: told for what, told in about.items() if told})
            except AlreadyExists:
                if not self._is_there(key, file):
                    return f"{key} exists already with other content"
        return ""

    def _write(self, content: Path | bytes, key: str, about: Mapping[str, str]) -> ObjectInfo:
        if isinstance(content, bytes):
            return self._store.create(key, content, about)
        return self._store.create_from_file(key, content, about)

    def _is_there(self, key: str, file: SegmentFile) -> bool:
        try:
            return self._found(self._store.head(key), file).is_same(file)
        except NotFound:
            return False

    def _found(self, info: ObjectInfo, expected: SegmentFile) -> SegmentFile:
        """What an object is by its own metadata, as the store has it from the upload; it is read where that has no digest to compare."""
        told = _told(info)
        if told.size != expected.size or told.is_comparable(expected):
            return told
        return stored_file(self._store, info.key, info.size, expected)


def _told(info: ObjectInfo) -> SegmentFile:
    return SegmentFile(size=info.size, sha256=info.metadata.get("sha256", ""), batches=info.metadata.get("batches", ""))
