"""Publishers of tiers whose readers take no part: compactor-managed tiers, and tiers that are only read.

The publisher of broker-managed tiers is in ``compactor.brokers.publisher``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from typing_extensions import override

from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.ports import AnnouncedSegment, MetadataRecordRateLimitDelay, SegmentCount, SegmentRef


class ControlLogPublisher:
    """SegmentPublisher of compactor-managed tiers. Readers see exactly the segments that the control log names, so appending the record
    *round published* is all that publishing takes. Most methods do nothing.
    """

    max_late_metadata_delivery_ms: int = 0

    def check_publishing_allowed(self, partition: TopicPartition) -> None:
        """Permit every round: only this program decides what readers of the tier see."""

    def check_deletion_allowed(self) -> None:
        """Permit every deletion: readers see what the control log says."""

    def reserve_metadata_records(
        self, partition: TopicPartition, record_count: int, max_records_per_hour: int
    ) -> MetadataRecordRateLimitDelay | None:
        return None

    def release_reserved_metadata_records(self, partition: TopicPartition) -> None:
        """Do nothing, because this kind of tier has no rate limit."""

    def announce_segment(self, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """Do nothing, because the plan in the control log names the segment's id already."""

    def publish_replacements(
        self,
        partition: TopicPartition,
        replacements: Sequence[Replacement],
        record_begun: Callable[[], None],
        record_published: Callable[[Collection[str]], None],
        *,
        find_segments_expired_by_brokers: Callable[[Collection[str]], Collection[str]] = lambda sources: (),
        last_group_first: bool = False,
        is_begun_recorded: bool = False,
    ) -> None:
        """Call ``record_published``, which appends *round published* to the control log: by that all readers see the new segments."""
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
        """Do nothing, because the control log's record that closed the plan has withdrawn the segments already."""

    def record_finished_segment_deletion(self, partition: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """Do nothing, because a record of the control log follows, and readers need no other."""

    def find_segments_deleted_by_brokers(self, partition: TopicPartition, segment_ids: Collection[str]) -> frozenset[str]:
        return frozenset()

    def find_segments_unknown_to_control_log(
        self, partition: TopicPartition, recorded_ids: Collection[str]
    ) -> Sequence[AnnouncedSegment] | None:
        return None

    def withdraw_segments_unknown_to_control_log(
        self, partition: TopicPartition, live: Sequence[SegmentRef], recorded_ids: Collection[str]
    ) -> SegmentCount:
        return 0


class RefusingPublisherOfReadOnlyTier(ControlLogPublisher):
    """SegmentPublisher that refuses every change, for listed tiers and snapshots of a broker-managed tier."""

    @override
    def check_publishing_allowed(self, partition: TopicPartition, *args: Any, **options: Any) -> NoReturn:
        """Raise UsageError, because this tier is only read."""
        raise UsageError(
            f"{partition} was opened for reading only",
            hint="Nothing was changed. Listed tiers and snapshots of a broker-managed tier are only read",
        )

    announce_segment = publish_replacements = restore_segments = withdraw_segments = check_publishing_allowed
    record_finished_segment_deletion = withdraw_segments_unknown_to_control_log = check_publishing_allowed

    @override
    def find_segments_unknown_to_control_log(self, partition: TopicPartition, recorded_ids: Collection[str]) -> Sequence[AnnouncedSegment]:
        return ()
