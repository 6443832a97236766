"""Without a broker: readers fold the control log, so that its own record is what switches them over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.ports import Announced, SegmentRef, Wait


class ObjectLogPublisher:
    """SegmentPublisher. Who reads knows nothing but the control log: there is nobody else to tell."""

    late_ms = 0

    def permit(self, name: TopicPartition) -> None:
        """Always."""

    def admit(self, name: TopicPartition, records: int, per_hour: int) -> Wait | None:
        return None

    def forgo(self, name: TopicPartition, *, due: bool) -> None:
        """Nothing is counted."""

    def begin(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        """The announced plan has named the id already."""

    def publish(
        self,
        name: TopicPartition,
        replacements: Sequence[Replacement],
        begun: Callable[[], None],
        record: Callable[[Collection[str]], None],
        *,
        backwards: bool = False,
        resumed: bool = False,
    ) -> None:
        """One record does it: there is nothing that could be begun and not done."""
        record(())

    def restore(
        self, name: TopicPartition, restored: Sequence[RemoteLogSegmentMetadata], gone: Sequence[SegmentRef], record: Callable[[], None]
    ) -> None:
        record()

    def withdraw(self, name: TopicPartition, segments: Sequence[Announced], *, late: bool = False) -> None:
        """The record that closed the plan has said it already."""

    def deleted(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        """The control log's own record follows."""

    def strays(self, name: TopicPartition, known: Collection[str]) -> Sequence[Announced] | None:
        return None

    def cut_off(self, name: TopicPartition, live: Sequence[SegmentRef], known: Collection[str]) -> int:
        return 0
