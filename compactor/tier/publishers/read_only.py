"""Publisher of tiers that are only read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.ports import Announced, SegmentRef, Wait


class ReadOnlyPublisher:
    """SegmentPublisher that refuses every change."""

    late_ms: int = 0

    def permit(self, name: TopicPartition) -> None:
        _refuse(name)

    def admit(self, name: TopicPartition, records: int, per_hour: int) -> Wait | None:
        return None

    def release(self, name: TopicPartition) -> None:
        """Do nothing."""

    def begin(self, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> None:
        _refuse(name)

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
        _refuse(name)

    def restore(
        self, name: TopicPartition, restored: Sequence[RemoteLogSegmentMetadata], gone: Sequence[SegmentRef], record: Callable[[], None]
    ) -> None:
        _refuse(name)

    def withdraw(self, name: TopicPartition, segments: Sequence[Announced], *, late: bool = False) -> None:
        _refuse(name)

    def deleted(self, name: TopicPartition, segments: Sequence[SegmentRef]) -> None:
        _refuse(name)

    def find_strays(self, name: TopicPartition, known: Collection[str]) -> Sequence[Announced] | None:
        return ()

    def cut_off(self, name: TopicPartition, live: Sequence[SegmentRef], known: Collection[str]) -> int:
        _refuse(name)


def _refuse(name: TopicPartition) -> NoReturn:
    raise UsageError(
        f"{name} was opened for reading only",
        hint="Nothing was changed. Listed tiers and snapshots of a broker-managed tier are only read",
    )
