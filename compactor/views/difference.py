"""Differences between two points of a partition's history.

Run history reaches further back than the control log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from checkpoint.offsets import CleanerOffset
from compactor.config.times import format_iso_time
from compactor.control.logs import PartitionLog
from compactor.control.records import ControlRecord
from compactor.control.state import PartitionState, RunHistoryEntry
from compactor.errors import UsageError
from compactor.model.segment import RemoteLogSegmentMetadata

MILLISECONDS_FROM = 10**11
"""Whole numbers from here on are times in milliseconds (March 1973 and later); smaller ones are slots."""


@dataclass(frozen=True)
class PartitionHistoryPoint:
    """The state after one record of a control log.

    at_ms: by its writer's clock; None if the record was deleted.
    state: None if only the cleaner offsets are still known.
    """

    slot: int
    at_ms: int | None
    cleaner_offsets: tuple[CleanerOffset, ...]
    state: PartitionState | None


@dataclass(frozen=True)
class CleanerOffsetChange:
    """Cleaner offset of a compactor epoch; None: no entry at that moment."""

    leader_epoch: int
    before: int | None
    after: int | None


@dataclass(frozen=True)
class LiveSegmentChange:
    """Live segment that was ``added`` or ``removed``; its ``end_offset`` is inclusive."""

    change: str
    id: str
    start_offset: int
    end_offset: int
    bytes: int


@dataclass(frozen=True)
class PartitionHistoryDifference:
    """All but the offsets are None if the control records of a moment were deleted.

    leader: at both moments; empty if there was none.
    fenced: number of control records without effect that were added.
    """

    cleaner_offsets: tuple[CleanerOffsetChange, ...]
    segments: tuple[LiveSegmentChange, ...] | None
    leader: tuple[str, str] | None
    fenced: int | None


class ControlLogHistory:
    """History as far as the control log reaches, read once."""

    def __init__(self, log: PartitionLog) -> None:
        self._base, self._steps = log.read_history()

    @property
    def latest_point(self) -> PartitionHistoryPoint:
        return self._point_after_record(len(self._steps) - 1)

    @property
    def records(self) -> Sequence[ControlRecord[Any]]:
        """Oldest first."""
        return [record for record, _ in self._steps]

    def find_point(self, slot_time_or_run_id: str) -> PartitionHistoryPoint:
        """Raises UsageError if the moment is not in the history.

        :param slot_time_or_run_id: position of a record, time (milliseconds since 1970 or ISO 8601), or id of a run. A whole number from
            MILLISECONDS_FROM on is a time.
        """
        if slot_time_or_run_id.isascii() and slot_time_or_run_id.isdigit():
            number = int(slot_time_or_run_id)
            return self._point_at_time(number) if number >= MILLISECONDS_FROM else self._point_at_slot(number)
        run = self.latest_point.state.find_run(slot_time_or_run_id) if self.latest_point.state else None
        if run is not None:
            return self._point_after_run(run)
        moment = _parse_iso_time_ms(slot_time_or_run_id)
        if moment is None:
            raise UsageError(
                f"{slot_time_or_run_id!r} is not a valid slot, time or run of {self._base.topic_partition}",
                hint=f"Write a slot, milliseconds, a time like 2026-01-31T12:00:00Z, or a run that `runs list"
                f" {self._base.topic_partition}` shows",
            )
        return self._point_at_time(moment)

    def points_around_run(self, run_id: str) -> tuple[PartitionHistoryPoint, PartitionHistoryPoint] | None:
        """Just before and after a run. A moment whose control records were deleted has only its cleaner offsets."""
        run = self.latest_point.state.find_run(run_id) if self.latest_point.state else None
        if run is None:
            return None
        slot = (run.published_slot or run.slot) - 1
        known = self._base.slot <= slot
        before = self._point_at_slot(slot) if known else PartitionHistoryPoint(slot, None, run.vector_before, None)
        return before, self._point_after_run(run)

    def _point_after_run(self, run: RunHistoryEntry) -> PartitionHistoryPoint:
        """Only the cleaner offsets if the run's control record was deleted."""
        slot = run.published_slot or run.slot
        if slot >= self._base.slot:
            return self._point_at_slot(slot)
        return PartitionHistoryPoint(slot, None, run.vector if run.published_slot else run.vector_before, None)

    def _point_at_slot(self, slot: int) -> PartitionHistoryPoint:
        """Raises UsageError if the control log no longer has that record."""
        if not self._base.slot <= slot <= self._base.slot + len(self._steps):
            raise UsageError(
                f"slot {slot} of {self._base.topic_partition} is not in its control log",
                hint=f"It holds slots {self._base.slot} to {self._base.slot + len(self._steps)}; older ones are folded into a snapshot",
            )
        return self._point_after_record(slot - self._base.slot - 1)

    def _point_at_time(self, at_ms: int) -> PartitionHistoryPoint:
        """Raises UsageError if the control log does not reach back so far."""
        found = [number for number, (record, _) in enumerate(self._steps) if record.at_ms <= at_ms]
        if not found and self._base.slot > 0:
            first = self._steps[0][0].at_ms if self._steps else None
            since = f"its records begin at {format_iso_time(first)}" if first is not None else "it holds no records, only a snapshot"
            raise UsageError(
                f"the control log of {self._base.topic_partition} does not reach back to {format_iso_time(at_ms)}", hint=f"In it {since}"
            )
        return self._point_after_record(found[-1] if found else -1)

    def _point_after_record(self, record_index: int) -> PartitionHistoryPoint:
        """:param record_index: -1 for the moment before the first record."""
        if record_index < 0:
            return PartitionHistoryPoint(self._base.slot, None, self._base.vector, self._base)
        record, state = self._steps[record_index]
        return PartitionHistoryPoint(state.slot, record.at_ms, state.vector, state)


def compare_history_points(before: PartitionHistoryPoint, after: PartitionHistoryPoint) -> PartitionHistoryDifference:
    old, new = before.state, after.state
    offsets = _cleaner_offset_changes(before.cleaner_offsets, after.cleaner_offsets)
    if old is None or new is None:
        return PartitionHistoryDifference(offsets, None, None, None)
    seen = {entry.slot for entry in old.fenced}
    return PartitionHistoryDifference(
        cleaner_offsets=offsets,
        segments=_live_segment_changes(old.live, new.live),
        leader=(_describe_leading_compactor(old), _describe_leading_compactor(new)),
        fenced=sum(entry.slot not in seen for entry in new.fenced),
    )


def _cleaner_offset_changes(before: Sequence[CleanerOffset], after: Sequence[CleanerOffset]) -> tuple[CleanerOffsetChange, ...]:
    old = {entry.leader_epoch: entry.offset for entry in before}
    new = {entry.leader_epoch: entry.offset for entry in after}
    return tuple(
        CleanerOffsetChange(epoch, old.get(epoch), new.get(epoch)) for epoch in sorted(old | new) if old.get(epoch) != new.get(epoch)
    )


def _live_segment_changes(
    before: Sequence[RemoteLogSegmentMetadata], after: Sequence[RemoteLogSegmentMetadata]
) -> tuple[LiveSegmentChange, ...]:
    old, new = {segment.id for segment in before}, {segment.id for segment in after}
    changes = [LiveSegmentChange("removed", s.id, s.start_offset, s.end_offset, s.size_bytes) for s in before if s.id not in new]
    changes += [LiveSegmentChange("added", s.id, s.start_offset, s.end_offset, s.size_bytes) for s in after if s.id not in old]
    return tuple(sorted(changes, key=lambda change: (change.start_offset, change.change == "added")))


def _describe_leading_compactor(state: PartitionState) -> str:
    """Empty if no compactor leads, or the leadership is released."""
    leader = state.leader
    if leader is None or leader.released:
        return ""
    return f"{leader.holder} (epoch {leader.epoch})"


def _parse_iso_time_ms(text: str) -> int | None:
    """Returns None for another text; times without a zone are UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
