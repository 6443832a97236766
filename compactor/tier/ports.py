"""The two ports of a tier: where the bytes of segments lie (SegmentLayout), and how readers are switched to them (SegmentPublisher).
A new kind of tier is a layout, a publisher and a row in ``tier/kinds.py``. Only layouts make object keys, and only publishers switch
readers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from typing_extensions import override

from compactor.errors import CannotCopy, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import ComposeSource, CopyLimits, FileLease


class SegmentRef(Protocol):
    """The part of a segment that names its objects."""

    @property
    def id(self) -> str:
        """22 characters of URL-safe base64."""

    @property
    def start_offset(self) -> int: ...


@dataclass(frozen=True)
class SegmentIdAndStartOffset:
    """Planned segment that was never uploaded completely."""

    id: str
    start_offset: int


@dataclass(frozen=True)
class ListedObject:
    """Object of a partition. ``segment_id`` and ``kind`` are empty if the layout does not make such names."""

    key: str
    size: int
    modified_ms: int
    segment_id: str = ""
    start_offset: int = -1
    kind: str = ""


class SegmentLayout(Protocol):
    """Port to a tier's segments, including chunking, compression and encryption.
    ``file_kind`` is one of model.segment.FILE_KINDS. Sizes and positions refer to the plain file, not to the stored object. All methods
    raise NotFound, Unavailable or Refused, and BadData if an object is not what was recorded.
    """

    @property
    def url(self) -> str:
        """For messages."""

    @property
    def required_kinds(self) -> frozenset[str]:
        """Kinds, as in ``list_objects``, without which a segment cannot be read."""

    def partition_folder(self, partition: TopicPartition) -> str:
        """Ends in a slash, so that partition 1 is not a prefix of partition 10."""

    def object_name(self, partition: TopicPartition, segment: SegmentRef, file_kind: str) -> str:
        """For messages and reports."""

    def segment_files(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> Mapping[str, SegmentFile]:
        """By kind. Makes a request if the metadata does not list them."""

    def read_file(
        self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, start: int = 0, length: int | None = None
    ) -> bytes:
        """Bytes [start, start + length); fewer only at the file's end. length: None for the rest."""

    def download_file(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> int:
        """Return the number of bytes transferred."""

    def lend_file(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, file_kind: str, path: Path) -> FileLease | None:
        """Lend a file as ``ObjectStore.lend`` does."""

    def upload_segment(
        self,
        partition: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        contents: Mapping[str, Path | bytes],
        scratch: Path | None = None,
    ) -> str:
        """Objects that exist with equal content stay as they are.
        :param scratch: folder of files to which nothing will write any more, so that they may become objects.
        Returns a message that names an existing object with other content, or empty. The task then fails (determinism, I7).
        """

    @property
    def should_record_batch_digests(self) -> bool:
        """The digest over batch headers is the only one that a composed log can have."""

    @property
    def log_file_copy_limits(self) -> CopyLimits | None:
        """Limits; None if logs can only be uploaded whole."""

    def log_object_version(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """ObjectInfo.etag. Raises BadData if it differs from what was recorded, as far as the store can tell without reading it."""

    def compose_segment(
        self,
        partition: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        log: Sequence[ComposeSource],
        contents: Mapping[str, Path | bytes],
    ) -> str:
        """Upload with a log that the store composes of copied ranges and new bytes.
        :param log: in order; copied ranges have the keys that ``object_name`` returns.
        :raises CannotCopy: before anything is created, if the store does not copy ranges.
        :raises NotFound: if a source is gone.
        :raises Unavailable: if a source has changed.
        """

    def upload_scratch_disk_bytes(self, log_bytes: int) -> int:
        """Local disk beside a log of this size."""

    def custom_metadata(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, Path | bytes]) -> str:
        """For brokers; base64, or empty."""

    def stored_segment_problem(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        """Read every object back; empty if all are as recorded."""

    def delete_segments(self, partition: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """Also objects of unfinished uploads; absent ones are ignored. ``control.ordering`` must allow it."""

    def list_objects(self, partition: TopicPartition) -> Iterator[ListedObject]:
        """Names that this layout does not make are included."""

    def partition_in_key(self, key: str) -> str:
        """Text ``topic-partition``, or empty."""


@dataclass(frozen=True)
class AnnouncedSegment:
    """Segment announced before readers can use it.
    end_offset: inclusive.
    cut_off_ms: time of DELETE_SEGMENT_STARTED by the writer's clock, or -1.
    """

    id: str
    start_offset: int
    end_offset: int
    leader_epochs: tuple[EpochEntry, ...]
    cut_off_ms: int = -1


class MetadataRecordRateLimitDelay(NamedTuple):
    """Delay of a round by the rate limit of metadata records.
    until_ms: when to ask again, by this machine's clock. records: that the round would write.
    """

    until_ms: int
    records: int


class SegmentPublisher(Protocol):
    """Port that switches readers to new segments: by a record of the control log on a compactor-managed tier, by records in
    ``__remote_log_metadata`` on a broker-managed tier. Every method can be repeated after a crash without a further effect. All raise
    Unavailable, Refused.
    """

    @property
    def max_delivery_delay_ms(self) -> int:
        """Time after a process's end in which its metadata records may reach readers; 0 if they cannot."""

    def check_publishing_allowed(self, partition: TopicPartition) -> None:
        """Raise Refused if the segments that readers see must not be replaced."""

    def check_deletion_allowed(self) -> None:
        """Raise Refused if readers may be using segments that this program takes for replaced."""

    def reserve_metadata_records(
        self, partition: TopicPartition, record_count: int, max_records_per_hour: int
    ) -> MetadataRecordRateLimitDelay | None:
        """May be called again with a more exact number.
        :param max_records_per_hour: of all partitions; 0 for no cap.
        """

    def release_reserved_metadata_records(self, partition: TopicPartition) -> None:
        """Release the records that a round, ended or no longer due, has not written."""

    def announce_segment(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """Called before the first object is uploaded (COPY_SEGMENT_STARTED). Its size and largest timestamp are
        final.
        """

    def publish_replacements(
        self,
        partition: TopicPartition,
        replacements: Sequence[Replacement],
        record_begun: Callable[[], None],
        record_published: Callable[[Collection[str]], None],
        *,
        select_expired: Callable[[Collection[str]], Collection[str]] = lambda sources: (),
        last_group_first: bool = False,
        is_begun_recorded: bool = False,
    ) -> None:
        """Switch readers to the replacements, then call ``record_published``.
        :param record_begun: appends *publish begun*. Called first if switching takes several steps; from then on the round must be
        completed.
        :param record_published: appends *round published*. Argument: ids of segments not published, as brokers had deleted their sources.
        :param select_expired: segment ids -> those that brokers have expired. If all sources of a group have expired, later groups are
        switched all the same.
        :param last_group_first: in descending order, because the round restores earlier values.
        :param is_begun_recorded: whether *publish begun* is in the log already.
        """

    def restore_segments(
        self,
        partition: TopicPartition,
        restored: Sequence[RemoteLogSegmentMetadata],
        withdrawn: Sequence[SegmentRef],
        record_undone: Callable[[], None],
    ) -> None:
        """Undo ``publish_replacements``: switch readers from ``withdrawn`` to ``restored``, then call ``record_undone``, which appends
        *round undone*.
        :raises UsageError: before any change, if readers cannot be switched back.
        """

    def withdraw_segments(
        self, partition: TopicPartition, segments: Sequence[AnnouncedSegment], *, include_unannounced: bool = False
    ) -> None:
        """Make sure that these segments are never published.
        :param include_unannounced: then announcements which arrive late have no effect.
        """

    def record_finished_segment_deletion(self, partition: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """Called after the objects were deleted (DELETE_SEGMENT_FINISHED)."""

    def find_deleted_segments(self, partition: TopicPartition, segment_ids: Collection[str]) -> frozenset[str]:
        """Segments that brokers have begun to delete or have deleted."""

    def find_unknown_segments(self, partition: TopicPartition, recorded_ids: Collection[str]) -> Sequence[AnnouncedSegment] | None:
        """Segments that a dead compactor announced to brokers; None if readers use the control log alone."""

    def withdraw_unknown_segments(self, partition: TopicPartition, live: Sequence[SegmentRef], recorded_ids: Collection[str]) -> int:
        """Return their number. Live segments that brokers stopped reading because of them
        are made readable again first.
        """


class WholeLogUploadLayout:
    """Layout whose logs the store cannot compose: no digests in the metadata, or no plain logs."""

    should_record_batch_digests = False

    @property
    def log_file_copy_limits(self) -> CopyLimits | None:
        return None

    def log_object_version(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> str:
        raise _cannot_compose_error()

    def compose_segment(
        self,
        partition: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        log: Sequence[ComposeSource],
        contents: Mapping[str, Path | bytes],
    ) -> str:
        raise _cannot_compose_error()


def _cannot_compose_error() -> CannotCopy:
    return CannotCopy("this tier's layout cannot compose logs of copied ranges", hint="This is a bug; please report it")


# ---- publishers of tiers whose readers take no part; that of broker-managed tiers is in ``compactor.adapters.brokers.publisher`` ----


class ControlLogPublisher:
    """SegmentPublisher of compactor-managed tiers. Appending *round published* is all."""

    max_delivery_delay_ms: int = 0

    def check_publishing_allowed(self, partition: TopicPartition) -> None: ...

    def check_deletion_allowed(self) -> None: ...

    def reserve_metadata_records(
        self, partition: TopicPartition, record_count: int, max_records_per_hour: int
    ) -> MetadataRecordRateLimitDelay | None:
        return None

    def release_reserved_metadata_records(self, partition: TopicPartition) -> None: ...

    def announce_segment(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> None: ...

    def publish_replacements(
        self,
        partition: TopicPartition,
        replacements: Sequence[Replacement],
        record_begun: Callable[[], None],
        record_published: Callable[[Collection[str]], None],
        *,
        select_expired: Callable[[Collection[str]], Collection[str]] = lambda sources: (),
        last_group_first: bool = False,
        is_begun_recorded: bool = False,
    ) -> None:
        record_published(())

    def restore_segments(
        self,
        partition: TopicPartition,
        restored: Sequence[RemoteLogSegmentMetadata],
        withdrawn: Sequence[SegmentRef],
        record_undone: Callable[[], None],
    ) -> None:
        record_undone()

    def withdraw_segments(
        self, partition: TopicPartition, segments: Sequence[AnnouncedSegment], *, include_unannounced: bool = False
    ) -> None:
        """The record that closed the plan has withdrawn them."""

    def record_finished_segment_deletion(self, partition: TopicPartition, segments: Sequence[SegmentRef]) -> None: ...

    def find_deleted_segments(self, partition: TopicPartition, segment_ids: Collection[str]) -> frozenset[str]:
        return frozenset()

    def find_unknown_segments(self, partition: TopicPartition, recorded_ids: Collection[str]) -> Sequence[AnnouncedSegment] | None:
        return None

    def withdraw_unknown_segments(self, partition: TopicPartition, live: Sequence[SegmentRef], recorded_ids: Collection[str]) -> int:
        return 0


class ReadOnlyPublisher(ControlLogPublisher):
    """Refuses every change, for listed tiers and snapshots of a broker-managed tier."""

    @override
    def check_publishing_allowed(self, partition: TopicPartition, *args: Any, **options: Any) -> NoReturn:
        raise UsageError(
            f"{partition} was opened for reading only",
            hint="Nothing was changed. Listed tiers and snapshots of a broker-managed tier are only read",
        )

    announce_segment = publish_replacements = restore_segments = withdraw_segments = check_publishing_allowed
    record_finished_segment_deletion = withdraw_unknown_segments = check_publishing_allowed

    @override
    def find_unknown_segments(self, partition: TopicPartition, recorded_ids: Collection[str]) -> Sequence[AnnouncedSegment]:
        return ()


@dataclass(frozen=True)
class OpenTransactionsAtSegmentEnd:
    """Producer id -> first offset of its transaction that is open at a segment's end."""

    base: int
    size: int
    first_offsets: Mapping[int, int]

    def belongs_to(self, segment: RemoteLogSegmentMetadata) -> bool:
        return (segment.start_offset, segment.size_bytes) == (self.base, self.size)


class ListedTier(Protocol):
    """Tier whose partitions and live segments are found by LIST requests."""

    transactions: dict[TopicPartition, OpenTransactionsAtSegmentEnd]

    def list_topic_partitions(self) -> list[TopicPartition]:
        """By topic and number. Raises StoreError."""

    def live_segments(self, partition: TopicPartition) -> tuple[RemoteLogSegmentMetadata, ...]:
        """Ascending. Raises StoreError, or BadData if the end of the newest cannot be read."""
