"""Comparison of stored and downloaded objects with expected content: by recorded digests, or byte by byte."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.errors import AlreadyExists, BadData, NotFound, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import FileLease, ObjectInfo, ObjectStore
from compactor.tier.ports import SegmentLayout, SegmentRef

# Brokers name objects by topic id, so that a topic which is deleted and created again has other names. Parsing is strict: names that
# do not match exactly are never guessed.


TopicIdOfPartition = Callable[[TopicPartition], TopicId]
"""Returns the id of a partition's topic, as Kafka's Uuid prints it."""

_UUID: Final = r"[A-Za-z0-9_-]{21}[AQgw]"  # 16 bytes: the last of 22 characters holds but two bits
_STEM: Final = re.compile(rf"([0-9]{{20}})-({_UUID})")


def is_topic_id(candidate: str) -> bool:
    """True for a text that Kafka's class Uuid prints."""
    return re.fullmatch(_UUID, candidate) is not None


@dataclass(frozen=True)
class TopicIdLookup:
    """TopicIdOfPartition that Spark executors can receive. by_topic: topic name -> topic id."""

    by_topic: Mapping[str, TopicId]

    def __call__(self, partition: TopicPartition) -> TopicId:
        """Raises UsageError if the id is unknown or invalid."""
        found = self.by_topic.get(partition.topic, EMPTY_TOPIC_ID)
        if not is_topic_id(found):
            what = f"{found!r} is not a valid id" if found else "no id is known"
            raise UsageError(f"{what} of topic {partition.topic}", hint="It comes from the brokers, or from a snapshot of their metadata")
        return found


class RecognizedLayout(NamedTuple):
    """Program that wrote the objects below a URL, and this program's settings for such a tier."""

    what: str
    hint: str


_FOREIGN: Final = (
    (
        re.compile(rf"(kafka-tiered-storage/)?[^/]+-[0-9]+-{_UUID}/{_STEM.pattern}\.[a-z_]+"),
        RecognizedLayout(
            "a broker-managed tier (LocalTieredStorage)",
            'Set kind = "kafka", layout = "kafka-local", url to the broker\'s rsm.config.dir and a control_url elsewhere, all under [tier]',
        ),
    ),
    (
        re.compile(rf".+-{_UUID}/[0-9]+/{_STEM.pattern}\.(log|indexes|rsm-manifest)"),
        RecognizedLayout(
            "a broker-managed tier (Aiven's plugin)",
            'Set kind = "kafka", layout = "aiven" and a control_url elsewhere, all under [tier]',
        ),
    ),
    (
        re.compile(r"([^/]+-[0-9]+/)?[0-9]{20}\.(log|index|timeindex)"),
        RecognizedLayout("a broker's log directory", "`import` copies segments from there; set url under [tier] to another location"),
    ),
)


def recognize_layout(keys: Iterable[str]) -> RecognizedLayout | None:
    """The brokers' layout that one of these object keys has, or None."""
    return next((who for key in keys for names, who in _FOREIGN if names.fullmatch(key)), None)


class SegmentObjectNameStem(NamedTuple):
    """Common beginning of the names of a segment's objects, such as ``00000000000000000042-<id>``."""

    start_offset: int
    segment_id: str

    @staticmethod
    def parse(name: str) -> SegmentObjectNameStem | None:
        """Returns None for a text that is no stem."""
        match = _STEM.fullmatch(name)
        return SegmentObjectNameStem(int(match[1]), match[2]) if match and int(match[1]) < 2**63 else None


def md5_prefix_bits(text: str, bits: int) -> str:
    """Binary digits of a text's MD5, which spread keys over a bucket's index."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    return f"{int.from_bytes(digest, 'big'):0128b}"[:bits]


def segment_object_name_stem(segment: SegmentRef) -> str:
    """For example ``00000000000000000042-<id>``."""
    return f"{segment.start_offset:020d}-{segment.id}"


FileContent = Path | bytes
"""The content of a file: a local path, or the bytes."""

READ_BYTES: Final = 8 << 20


def open_content(content: FileContent) -> BinaryIO:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def content_size_bytes(content: FileContent) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def read_chunks(content: FileContent, chunk_bytes: int = READ_BYTES) -> Iterator[bytes]:
    """The last chunk may be shorter."""
    with open_content(content) as file:
        while piece := file.read(chunk_bytes):
            yield piece


def content_sha256(content: FileContent) -> str:
    """Return hex digits."""
    digest = hashlib.sha256()
    for piece in read_chunks(content):
        digest.update(piece)
    return digest.hexdigest()


class FileStreamDigest:
    """Digest of bytes that arrive in pieces: a SHA-256 if one is recorded, else over the log's batch headers (``batches``)."""

    def __init__(self, recorded: SegmentFile) -> None:
        self._size = 0
        self._sha256 = hashlib.sha256() if recorded.sha256 else None
        self._batches = None
        if recorded.batches and not recorded.sha256:
            from compactor.records.batches import BatchHeaderDigestBuilder  # loads the compiler, which few commands need

            self._batches = BatchHeaderDigestBuilder()

    def update(self, data: bytes) -> None:
        self._size += len(data)
        if self._sha256 is not None:
            self._sha256.update(data)
        if self._batches is not None:
            self._batches.add_log_bytes(data)

    def size_and_digest(self) -> SegmentFile:
        """The digest is empty if none was recorded, or if the bytes should be a log of v2 batches and are not."""
        sha256 = self._sha256.hexdigest() if self._sha256 is not None else ""
        return SegmentFile(size=self._size, sha256=sha256, batches=self._batches.header_digest() if self._batches is not None else "")


def damaged_object_error(key: str, found: SegmentFile, recorded: SegmentFile) -> BadData:
    what = (
        f"it has {found.size} bytes, recorded are {recorded.size}"
        if found.size != recorded.size
        else "its digest is not the one that was recorded"
    )
    return BadData(
        f"the object was changed or damaged: {what}",
        segment=key,
        hint="Restore it from the store's versions or a backup; nothing was changed",
    )


def create_or_match(store: ObjectStore, key: str, content: FileContent, *, may_link: bool = False) -> bool:
    """Return True if the key has this content, new or before. No object metadata is written. Raises StoreError."""
    try:
        if isinstance(content, bytes):
            store.create(key, content)
        else:
            store.create_from_file(key, content, may_link=may_link)
    except AlreadyExists:
        return _object_has_content(store, key, content)
    return True


def digest_stored_file(store: ObjectStore, key: str, size: int, digest_kind_of: SegmentFile) -> SegmentFile:
    """Read ``size`` bytes of an object. Raises NotFound, StoreError."""
    digests = FileStreamDigest(digest_kind_of)
    for start in range(0, size, READ_BYTES):
        digests.update(store.get(key, start, min(READ_BYTES, size - start)))
    return digests.size_and_digest()


def metadata_digests(info: ObjectInfo) -> SegmentFile:
    return SegmentFile(size=info.size, sha256=info.metadata.get("sha256", ""), batches=info.metadata.get("batches", ""))


def object_digests(store: ObjectStore, info: ObjectInfo, expected: SegmentFile) -> SegmentFile:
    """From the metadata, or by reading the object if the metadata lacks the kind of digest that ``expected`` has."""
    stated = metadata_digests(info)
    if stated.size != expected.size or stated.is_comparable_with(expected):
        return stated
    return digest_stored_file(store, info.key, info.size, expected)


def stored_file_problem(store: ObjectStore, key: str, segment: RemoteLogSegmentMetadata, file_kind: str) -> str:
    """Reason why a file is not as recorded, or empty. Without a recorded digest only the size is compared."""
    recorded = segment.files.get(file_kind)
    size = recorded.size if recorded else segment.size_bytes if file_kind == "log" else -1
    try:
        info = store.head(key)
        if size not in (-1, info.size):
            return f"{store.url}/{key} has {info.size} bytes, recorded are {size}"
        if recorded and recorded.has_digest and not object_digests(store, info, recorded).has_same_content_as(recorded):
            return f"{store.url}/{key} has another digest than was recorded"
    except NotFound:
        return f"{store.url}/{key} is missing"
    return ""


def _object_has_content(store: ObjectStore, key: str, content: FileContent) -> bool:
    try:
        if store.head(key).size != content_size_bytes(content):
            return False
        at = 0
        for piece in read_chunks(content):
            if store.get(key, at, len(piece)) != piece:
                return False
            at += len(piece)
    except NotFound:
        return False
    return True


@dataclass(frozen=True)
class DownloadedFile:
    """Size and digest of a downloaded file. transferred: bytes received in all attempts."""

    found: SegmentFile
    transferred: int

    @property
    def size(self) -> int:
        return self.found.size

    def matches_recorded_content(self, file: SegmentFile) -> bool:
        """Compare digests, or sizes if no digest is recorded."""
        return file.matches_read_file(self.found)

    def require_match(self, key: str, file: SegmentFile) -> None:
        """Raise BadData if the bytes differ from ``file``; ``key`` is for the message."""
        if not self.matches_recorded_content(file):
            raise damaged_object_error(key, self.found, file)


def download_segment_file(
    layout: SegmentLayout, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path
) -> DownloadedFile:
    """Raises NotFound, StoreError, and BadData if the file differs from what was recorded."""
    file = segment.recorded_size_and_digests(file_kind)
    arrived = _digest_downloaded_file(layout.download_file(partition, segment, file_kind, path), path, file)
    if not arrived.matches_recorded_content(file):
        arrived = _digest_downloaded_file(arrived.transferred + layout.download_file(partition, segment, file_kind, path), path, file)
    return arrived


def lend_segment_file(
    layout: SegmentLayout, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path
) -> tuple[DownloadedFile, FileLease] | None:
    """Lend a file as ``ObjectStore.lend`` does, and describe it. Raises NotFound, StoreError."""
    lease = layout.lend_file(partition, segment, file_kind, path)
    if lease is None:
        return None
    try:
        return _digest_downloaded_file(path.stat().st_size, path, segment.recorded_size_and_digests(file_kind)), lease
    except BaseException:
        lease.close()
        raise


def matches_recorded_content(path: Path, recorded: SegmentFile) -> bool:
    """False also if no digest is recorded."""
    return (
        path.stat().st_size == recorded.size
        and recorded.has_digest
        and _digest_downloaded_file(0, path, recorded).matches_recorded_content(recorded)
    )


def read_verified_file(layout: SegmentLayout, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str) -> bytes:
    """Raises NotFound, StoreError, and BadData if the file differs from what was recorded."""
    file = segment.recorded_size_and_digests(file_kind)
    most = file.size + 1  # for a range the store states what it sends, so that a truncated body is noticed
    data = layout.read_file(partition, segment, file_kind, 0, most)
    if not _describe_downloaded_bytes(data, file).matches_recorded_content(file):
        data = layout.read_file(partition, segment, file_kind, 0, most)
    _describe_downloaded_bytes(data, file).require_match(layout.object_name(partition, segment, file_kind), file)
    return data


def _digest_downloaded_file(transferred: int, path: Path, file: SegmentFile) -> DownloadedFile:
    found = SegmentFile(size=path.stat().st_size, sha256=file_sha256(path) if file.sha256 else "")
    if file.batches and not file.sha256:
        from compactor.records.batches import verified_header_digest  # loads the compiler, which few commands need

        found = SegmentFile(size=found.size, batches=verified_header_digest(path))
    return DownloadedFile(found, transferred)


def _describe_downloaded_bytes(data: bytes, file: SegmentFile) -> DownloadedFile:
    digests = FileStreamDigest(file)
    digests.update(data)
    return DownloadedFile(digests.size_and_digest(), len(data))


def file_sha256(path: Path) -> str:
    """Return hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
