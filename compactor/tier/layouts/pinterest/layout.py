"""Pinterest's layout: three files a segment, named by their base offset alone, as they are on the broker's disk.

Producer snapshots, transaction indexes and leader epochs are not in it. There are no ids either: a segment's objects are found by its
first offset, so that nothing can be replaced under a reader, and nothing here overwrites anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from compactor.errors import NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.deleting import delete_keys
from compactor.storage.port import ObjectStore
from compactor.tier.contents import create, stored_problem
from compactor.tier.layouts.pinterest.keys import KINDS, METADATA, WATERMARK, PartitionKeys, id_of, parsed
from compactor.tier.ports import ListedObject, SegmentRef
from compactor.tier.whole import WrittenWhole


class PinterestLayout(WrittenWhole):
    """SegmentLayout. Usable by as many threads as the store."""

    def __init__(self, store: ObjectStore, keys: PartitionKeys) -> None:
        self._store = store
        self._keys = keys

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def parts(self) -> frozenset[str]:
        return frozenset({"log"})

    def folder(self, name: TopicPartition) -> str:
        return self._keys.folder(name)

    def where(self, name: TopicPartition, segment: SegmentRef, kind: str) -> str:
        return self._keys.file(name, segment.start_offset, kind)

    def files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """Raises NotFound where there is no log among them."""
        if segment.files:
            return segment.files
        prefix = self._keys.file(name, segment.start_offset, "")
        found = {item.kind: SegmentFile(size=item.size) for item in self._listed(name, prefix) if item.kind}
        if "log" not in found:
            raise NotFound(f"{self.url}/{self.where(name, segment, 'log')} does not exist")
        return {kind: found[kind] for kind in KINDS if kind in found}

    def read(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, start: int = 0, length: int | None = None) -> bytes:
        return self._store.get(self.where(name, segment, kind), start, length)

    def download(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, path: Path) -> int:
        return self._store.download(self.where(name, segment, kind), path)

    def upload(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        """In any order: consumers wait until a segment has three files."""
        for kind in contents:
            key = self.where(name, segment, kind)
            if not create(self._store, key, contents[kind]):
                return f"{key} exists already with other content"
        return ""

    def upload_room(self, log_bytes: int) -> int:
        return 0

    def custom_metadata(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        return ""

    def problem(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """All three must be there; those with a recorded digest are read."""
        for kind in KINDS:
            found = stored_problem(self._store, self.where(name, segment, kind), segment, kind)
            if found:
                return found
        return ""

    def delete(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        delete_keys(self._store, [self.where(name, segment, kind) for segment in segments for kind in KINDS])

    def list(self, name: TopicPartition) -> Iterator[ListedObject]:
        return self._listed(name, self._keys.folder(name))

    def partition_of(self, key: str) -> str:
        return str(self._keys.named(key) or "")

    def _listed(self, name: TopicPartition, prefix: str) -> Iterator[ListedObject]:
        folder = self._keys.folder(name)
        for info in self._store.list(prefix):
            file = info.key.removeprefix(folder)
            if found := parsed(file):
                yield ListedObject(info.key, info.size, info.modified_ms, id_of(found[0]), *found)
            elif file not in (METADATA, WATERMARK):
                yield ListedObject(info.key, info.size, info.modified_ms)
