"""Kafka's LocalTieredStorage: ``kafka-tiered-storage/<topic>-<partition>-<topic id>/<offset>-<segment id><suffix>``, one file each.

The store's root is the broker's ``rsm.config.dir``. A directory store stages what it writes beside ``kafka-tiered-storage``, on the
same file system, and links it in whole; and as no object has metadata here, nothing but Kafka's six kinds of files comes into the
broker's directories: LocalTieredStorage refuses to delete a partition's directory in which there is anything else.
(RemoteLogSegmentFileset, RemoteTopicPartitionDirectory)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from compactor.errors import NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.deleting import delete_keys
from compactor.storage.port import ObjectStore
from compactor.tier.contents import create, stored_problem
from compactor.tier.names import Stem, TopicIdOf, stem
from compactor.tier.ports import ListedObject, SegmentRef
from compactor.tier.whole import WrittenWhole

ROOT: Final = "kafka-tiered-storage"

_SUFFIXES: Final = {kind: kind.replace("-", "_") for kind in FILE_KINDS}
_KINDS: Final = {suffix: kind for kind, suffix in _SUFFIXES.items()}
_OPTIONAL: Final = frozenset({"txnindex"})


_FOLDER: Final = re.compile(rf"{ROOT}/(.+-\d+)-[A-Za-z0-9_-]{{22}}/[^/]+")


class KafkaLocalLayout(WrittenWhole):
    """SegmentLayout. Usable by as many threads as the store."""

    def __init__(self, store: ObjectStore, topic_id: TopicIdOf) -> None:
        self._store = store
        self._topic_id = topic_id

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(FILE_KINDS) - _OPTIONAL

    def folder(self, name: TopicPartition) -> str:
        return f"{ROOT}/{name}-{self._topic_id(name)}/"

    def where(self, name: TopicPartition, segment: SegmentRef, kind: str) -> str:
        return f"{self.folder(name)}{stem(segment)}.{_SUFFIXES[kind]}"

    def files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """Where a broker wrote them: as LIST has them, without digests. Raises NotFound where there is no log among them."""
        if segment.files:
            return segment.files
        found = {
            listed.kind: SegmentFile(size=listed.size)
            for listed in self._listed(name, f"{self.folder(name)}{stem(segment)}.")
            if listed.kind
        }
        if "log" not in found:
            raise NotFound(f"{self.url}/{self.where(name, segment, 'log')} does not exist")
        return {kind: found[kind] for kind in FILE_KINDS if kind in found}

    def read(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None) -> bytes:
        return self._store.get(self.where(name, segment, kind), start, length)

    def download(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> int:
        return self._store.download(self.where(name, segment, kind), path)

    def upload(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        for kind, content in contents.items():
            key = self.where(name, segment, kind)
            if not create(self._store, key, content):
                return f"{key} exists already with other content"
        return ""

    def upload_room(self, log_bytes: int) -> int:
        return 0

    def custom_metadata(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        return ""

    def problem(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """Files with a recorded digest are read. Where nothing is recorded, all that a broker cannot do without must be there."""
        for kind in segment.files or [kind for kind in FILE_KINDS if kind not in _OPTIONAL]:
            found = stored_problem(self._store, self.where(name, segment, kind), segment, kind)
            if found:
                return found
        return ""

    def delete(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        delete_keys(self._store, [self.where(name, segment, kind) for segment in segments for kind in FILE_KINDS])

    def list(self, name: TopicPartition) -> Iterator[ListedObject]:
        return self._listed(name, self.folder(name))

    def partition_of(self, key: str) -> str:
        match = _FOLDER.fullmatch(key)
        return match[1] if match else ""

    def _listed(self, name: TopicPartition, prefix: str) -> Iterator[ListedObject]:
        folder = self.folder(name)
        for info in self._store.list(prefix):
            first, _, suffix = info.key.removeprefix(folder).partition(".")
            parsed, kind = Stem.parse(first), _KINDS.get(suffix)
            if parsed and kind:
                yield ListedObject(info.key, info.size, info.modified_ms, parsed.segment_id, parsed.start_offset, kind)
            else:
                yield ListedObject(info.key, info.size, info.modified_ms)
