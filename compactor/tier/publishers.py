"""Publishers of tiers whose readers take no part: compactor-managed tiers, and tiers that are only read.

The publisher of broker-managed tiers is in ``compactor.brokers.publisher``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.ports import Announced, SegmentRef, Wait


class ObjectLogPublisher:
    """SegmentPublisher whose readers fold the control log, so that its own records switch them."""

    late_ms: int = 0

    def check_publishing_allowed(self, name: TopicPartition) -> None:
        """Permit every round."""

    def reserve_metadata_records(self, name: TopicPartition, records: int, per_hour: int) -> Wait | None:
        return None

    def release_reservation(self, name: TopicPartition) -> None:
        """Do nothing."""

    def announce_segment(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """Do nothing: the announced plan names the id already."""

    def publish_replacements(
        self,
        name: TopicPartition,
        replacements: Sequence[Replacement],
        begun: Callable[[], None],
        record: Callable[[Collection[str]], None],
        *,
        expired: Callable[[Collection[str]], Collection[str]] = lambda sources: (),
        backwards: bool = False,
        resumed: bool = False,
    ) -> None:
        """Append *round published*, the one record that switches all readers."""
        record(())

    def restore_segments(
        self, name: TopicPartition, restored: Sequence[RemoteLogSegmentMetadata], gone: Sequence[SegmentRef], record: Callable[[], None]
    ) -> None:
        record()

    def withdraw_segments(self, name: TopicPartition, segments: Sequence[Announced], *, late: bool = False) -> None:
        """Do nothing: the record that closed the plan has withdrawn them already."""

    def record_deletion(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """Do nothing: the control log's own record follows."""

    def deleted_by_brokers(self, name: TopicPartition, wanted: Collection[str]) -> frozenset[str]:
        return frozenset()

    def find_strays(self, name: TopicPartition, known: Collection[str]) -> Sequence[Announced] | None:
        return None

    def cut_off_strays(self, name: TopicPartition, live: Sequence[SegmentRef], known: Collection[str]) -> int:
        return 0


class ReadOnlyPublisher(ObjectLogPublisher):
    """SegmentPublisher that refuses every change, for listed tiers and snapshots of a broker-managed tier."""

    def check_publishing_allowed(self, name: TopicPartition, *args: Any, **options: Any) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(
            f"{name} was opened for reading only",
            hint="Nothing was changed. Listed tiers and snapshots of a broker-managed tier are only read",
        )

    announce_segment = publish_replacements = restore_segments = withdraw_segments = check_publishing_allowed
    record_deletion = cut_off_strays = check_publishing_allowed

    def find_strays(self, name: TopicPartition, known: Collection[str]) -> Sequence[Announced]:
        return ()
