"""Layouts that store each file as one object with exactly the file's bytes, as in compactor-managed tiers.
Such layouts derive from ``ComposableLogLayout`` if only this program writes the objects, and from ``OneObjectPerFileLayout`` if they must
look as another program writes them, without object metadata.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from typing_extensions import override

from compactor.config.settings import Settings
from compactor.errors import AlreadyExists, NotFound
from compactor.model.ids import INCARNATION_SUFFIX, TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import ComposeSource, CopyLimits, FileLease, ObjectInfo, ObjectStore
from compactor.tier.contents import (
    FileContent,
    TopicIdOfPartition,
    create_or_match,
    damaged_object_error,
    digest_stored_file,
    md5_prefix_bits,
    metadata_digests,
    object_digests,
    segment_object_name_stem,
    stored_file_problem,
)
from compactor.tier.ports import ListedObject, SegmentRef, WholeLogUploadLayout

_CreateObject = Callable[[str, Mapping[str, str]], ObjectInfo]
"""(key, metadata) -> a new object. Raises AlreadyExists."""


class ParsedFileName(NamedTuple):
    segment_id: str
    start_offset: int
    kind: str


class OneObjectPerFileLayout(WholeLogUploadLayout):
    """Layout without object metadata. Thread-safe if the store is.
    required_kinds: those without which a segment cannot be read.
    """

    kinds: ClassVar[Sequence[str]] = FILE_KINDS
    required_kinds: frozenset[str] = frozenset({"log"})

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @abstractmethod
    def partition_folder(self, partition: TopicPartition) -> str: ...

    @abstractmethod
    def file_name(self, segment: SegmentRef, file_kind: str) -> str:
        """Names of one segment's files differ only after the last dot."""

    @abstractmethod
    def parse_file_name(self, file: str) -> ParsedFileName | None:
        """Returns None for names that this layout does not make."""

    @abstractmethod
    def partition_in_key(self, key: str) -> str: ...

    @property
    def url(self) -> str:
        return self._store.url

    def object_name(self, partition: TopicPartition, segment: SegmentRef, file_kind: str) -> str:
        return self.partition_folder(partition) + self.file_name(segment, file_kind)

    def segment_files(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """If the metadata records none, a LIST request finds them, without digests. Raises NotFound if there is no log."""
        if segment.files:
            return segment.files
        log = self.object_name(partition, segment, "log")
        found = {
            one.kind: SegmentFile(size=one.size)
            for one in self._list_objects_with_prefix(partition, log.rpartition(".")[0] + ".")
            if one.kind
        }
        if "log" not in found:
            raise NotFound(f"{self.url}/{log} does not exist")
        return {kind: found[kind] for kind in self.kinds if kind in found}

    def read_file(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, start: int = 0, length: int | None = None
    ) -> bytes:
        return self._store.get(self.object_name(partition, segment, file_kind), start, length)

    def download_file(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> int:
        return self._store.download(self.object_name(partition, segment, file_kind), path)

    def lend_file(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> FileLease | None:
        return self._store.lend(self.object_name(partition, segment, file_kind), path)

    def upload_segment(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent], scratch: Path | None = None
    ) -> str:
        for kind, content in contents.items():
            key = self.object_name(partition, segment, kind)
            if not create_or_match(self._store, key, content, may_link=_lies_below(content, scratch)):
                return f"{key} exists already with other content"
        return ""

    def upload_scratch_disk_bytes(self, log_bytes: int) -> int:
        return 0

    def custom_metadata(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> str:
        return ""

    def stored_segment_problem(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        problems = (
            stored_file_problem(self._store, self.object_name(partition, segment, kind), segment, kind)
            for kind in self._expected_file_kinds(segment)
        )
        return next(filter(None, problems), "")

    def _expected_file_kinds(self, segment: RemoteLogSegmentMetadata) -> Collection[str]:
        return segment.files or self.required_kinds

    def delete_segments(self, partition: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        self._store.delete([self.object_name(partition, segment, kind) for segment in segments for kind in self.kinds])

    def list_objects(self, partition: TopicPartition) -> Iterator[ListedObject]:
        return self._list_objects_with_prefix(partition, self.partition_folder(partition))

    def _list_objects_with_prefix(self, partition: TopicPartition, prefix: str) -> Iterator[ListedObject]:
        folder = self.partition_folder(partition)
        for info in self._store.list(prefix):
            yield ListedObject(info.key, info.size, info.modified_ms, *(self.parse_file_name(info.key.removeprefix(folder)) or ()))


class ComposableLogLayout(OneObjectPerFileLayout):
    """Layout with object metadata: ``sha256`` and ``batches`` (digests) and ``mtime_ms`` (the broker's modification time). Therefore the
    store can compose a log of existing byte ranges, and the result can be checked without a download.
    """

    should_record_batch_digests = True

    @property
    @override
    def log_file_copy_limits(self) -> CopyLimits | None:
        return self._store.server_copy_limits

    @override
    def log_object_version(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        key, recorded = self.object_name(partition, segment, "log"), segment.recorded_size_and_digests("log")
        info = self._store.head(key)
        stated = metadata_digests(info)
        if not stated.has_same_content_as(recorded):  # one without our digests is somebody else's
            raise damaged_object_error(key, stated, recorded)
        return info.etag

    @override
    def upload_segment(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent], scratch: Path | None = None
    ) -> str:
        writes = {kind: partial(self._write_object, content, may_link=_lies_below(content, scratch)) for kind, content in contents.items()}
        return self._create_segment_objects(partition, segment, writes)

    @override
    def compose_segment(
        self,
        partition: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        log: Sequence[ComposeSource],
        contents: Mapping[str, FileContent],
    ) -> str:
        """The log is created first, so that nothing exists yet if the store turns out not to copy ranges."""
        beside = {kind: partial(self._write_object, content) for kind, content in contents.items()}
        return self._create_segment_objects(partition, segment, {"log": lambda key, about: self._store.compose(key, log, about), **beside})

    def _create_segment_objects(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, writes: Mapping[str, _CreateObject]
    ) -> str:
        """Message about an existing object with other content, or empty.
        :param writes: kind of file -> function (key, object metadata) that creates the object.
        """
        for kind, write in writes.items():
            key, file = self.object_name(partition, segment, kind), segment.files[kind]
            about = {"sha256": file.sha256, "batches": file.batches, "mtime_ms": str(segment.mtime_ms)}
            try:
                write(key, {field: value for field, value in about.items() if value})
            except AlreadyExists:
                if not self._is_existing_object_equal(key, file):
                    return f"{key} exists already with other content"
        return ""

    def _write_object(self, content: FileContent, key: str, object_metadata: Mapping[str, str], *, may_link: bool = False) -> ObjectInfo:
        if isinstance(content, bytes):
            return self._store.create(key, content, object_metadata)
        return self._store.create_from_file(key, content, object_metadata, may_link=may_link)

    def _is_existing_object_equal(self, key: str, file: SegmentFile) -> bool:
        """An object without SHA-256 in its metadata was composed by the store, and is read: the process that composed it may have died
        before it checked the copied bytes.
        """
        try:
            info = self._store.head(key)
            if info.size == file.size and not metadata_digests(info).sha256:
                return digest_stored_file(self._store, key, info.size, file).has_same_content_as(file)
            return object_digests(self._store, info, file).has_same_content_as(file)
        except NotFound:
            return False


def _lies_below(content: FileContent, folder: Path | None) -> bool:
    return folder is not None and isinstance(content, Path) and folder in content.parents


_OBJECT: Final = re.compile(rf"(\d{{20}})-([A-Za-z0-9_-]{{22}})\.({'|'.join(FILE_KINDS)})")
_FOLDER: Final = re.compile(rf"([^/]+-\d+(?:{INCARNATION_SUFFIX})?)/[^/]+")


class NativeLayout(ComposableLogLayout):
    """SegmentLayout of compactor-managed tiers: ``orders-0/00000000000000000042-<id>.log``; with entropy bits ``0110/orders-0/...``.
    entropy_bits: number of binary digits of a hash of the partition's name; 0 for none.
    """

    def __init__(self, store: ObjectStore, entropy_bits: int = 0) -> None:
        super().__init__(store)
        self._entropy_bits = entropy_bits

    @override
    def partition_folder(self, partition: TopicPartition) -> str:
        return f"{md5_prefix_bits(str(partition), self._entropy_bits)}/{partition}/" if self._entropy_bits else f"{partition}/"

    @override
    def file_name(self, segment: SegmentRef, file_kind: str) -> str:
        return f"{segment_object_name_stem(segment)}.{file_kind}"

    @override
    def parse_file_name(self, file: str) -> ParsedFileName | None:
        match = _OBJECT.fullmatch(file)
        return ParsedFileName(match[2], int(match[1]), match[3]) if match else None

    @override
    def partition_in_key(self, key: str) -> str:
        digits, _, rest = key.partition("/") if self._entropy_bits else ("", "", key)
        match = _FOLDER.fullmatch(rest)
        return match[1] if match and digits == md5_prefix_bits(match[1], self._entropy_bits) else ""


def open_layout(settings: Settings, store: ObjectStore, topic_id: TopicIdOfPartition) -> NativeLayout:
    return NativeLayout(store, settings.tier.key_entropy_bits)
