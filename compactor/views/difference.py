"""Two points in the life of a partition, and what changed between them.

A control log keeps its recent records only; older ones are folded into a snapshot. Run history reaches further back, with
the cleaner offsets before and after each run, so that an old run can still be compared by its offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from checkpoint.offsets import CleanerOffset
from compactor.control.logs import PartitionLog
from compactor.control.records import Record
from compactor.control.state import PartitionState, Run
from compactor.errors import UsageError
from compactor.model.segment import RemoteLogSegmentMetadata

MILLISECONDS_FROM = 10**11
"""A whole number from here on is a time (March 1973 and later), below it a slot: no log has so many."""


@dataclass(frozen=True)
class Point:
    """``at_ms``: its writer's clock, None where that slot is gone. ``state`` None: only the cleaner offsets are still known."""

    slot: int
    at_ms: int | None
    cleaner_offsets: tuple[CleanerOffset, ...]
    state: PartitionState | None


@dataclass(frozen=True)
class OffsetChange:
    """``before`` or ``after`` is None where the epoch has no entry at that point."""

    leader_epoch: int
    before: int | None
    after: int | None


@dataclass(frozen=True)
class SegmentChange:
    """``change``: added or removed, as readers see it."""

    change: str
    id: str
    start_offset: int
    end_offset: int
    bytes: int


@dataclass(frozen=True)
class Difference:
    """``segments``, ``leader`` and ``fenced`` are None where the slots of the earlier point are gone."""

    cleaner_offsets: tuple[OffsetChange, ...]
    segments: tuple[SegmentChange, ...] | None
    leader: tuple[str, str] | None
    fenced: int | None


class Past:
    """What one control log still says of its past. Reads the log once."""

    def __init__(self, log: PartitionLog) -> None:
        self._base, self._steps = log.history()

    @property
    def now(self) -> Point:
        return self._at(len(self._steps) - 1)

    @property
    def records(self) -> Sequence[Record[Any]]:
        """Oldest first."""
        return [record for record, _ in self._steps]

    def point(self, text: str) -> Point:
        """A slot, a time (milliseconds since 1970, or ISO 8601) or the moment after a run. Raises UsageError."""
        if text.isascii() and text.isdigit():
            number = int(text)
            return self._at_time(number) if number >= MILLISECONDS_FROM else self._at_slot(number)
        run = self.now.state.run(text) if self.now.state else None
        if run is not None:
            return self._after(run)
        moment = _parse_time(text)
        if moment is None:
            raise UsageError(
                f"{text!r} is no slot, time or run of {self._base.name}",
                hint=f"Write a slot, milliseconds, a time like 2026-01-31T12:00:00Z, or a run that `runs list {self._base.name}` shows",
            )
        return self._at_time(moment)

    def around(self, run_id: str) -> tuple[Point, Point] | None:
        """Before and after one run; None where the text names no run."""
        run = self.now.state.run(run_id) if self.now.state else None
        if run is None:
            return None
        slot = (run.published_slot or run.slot) - 1
        known = self._base.slot <= slot
        before = self._at_slot(slot) if known else Point(slot, None, run.vector_before, None)
        return before, self._after(run)

    def _after(self, run: Run) -> Point:
        slot = run.published_slot or run.slot
        if slot >= self._base.slot:
            return self._at_slot(slot)
        return Point(slot, None, run.vector if run.published_slot else run.vector_before, None)

    def _at_slot(self, slot: int) -> Point:
        if not self._base.slot <= slot <= self._base.slot + len(self._steps):
            raise UsageError(
                f"slot {slot} of {self._base.name} is not in its control log",
                hint=f"It holds slots {self._base.slot} to {self._base.slot + len(self._steps)}; older ones are folded into a snapshot",
            )
        return self._at(slot - self._base.slot - 1)

    def _at_time(self, at_ms: int) -> Point:
        found = [number for number, (record, _) in enumerate(self._steps) if record.at_ms <= at_ms]
        if not found and self._base.slot > 0:
            first = self._steps[0][0].at_ms if self._steps else None
            since = f"its records begin at {iso(first)}" if first is not None else "it holds no records, only a snapshot"
            raise UsageError(f"the control log of {self._base.name} does not reach back to {iso(at_ms)}", hint=f"In it {since}")
        return self._at(found[-1] if found else -1)

    def _at(self, step: int) -> Point:
        if step < 0:
            return Point(self._base.slot, None, self._base.vector, self._base)
        record, state = self._steps[step]
        return Point(state.slot, record.at_ms, state.vector, state)


def difference(before: Point, after: Point) -> Difference:
    """What changed from one point to the other. Pure."""
    old, new = before.state, after.state
    offsets = _offset_changes(before.cleaner_offsets, after.cleaner_offsets)
    if old is None or new is None:
        return Difference(offsets, None, None, None)
    seen = {entry.slot for entry in old.fenced}
    return Difference(
        cleaner_offsets=offsets,
        segments=_segment_changes(old.live, new.live),
        leader=(_leader(old), _leader(new)),
        fenced=sum(entry.slot not in seen for entry in new.fenced),
    )


def _offset_changes(before: Sequence[CleanerOffset], after: Sequence[CleanerOffset]) -> tuple[OffsetChange, ...]:
    old = {entry.leader_epoch: entry.offset for entry in before}
    new = {entry.leader_epoch: entry.offset for entry in after}
    return tuple(OffsetChange(epoch, old.get(epoch), new.get(epoch)) for epoch in sorted(old | new) if old.get(epoch) != new.get(epoch))


def _segment_changes(before: Sequence[RemoteLogSegmentMetadata], after: Sequence[RemoteLogSegmentMetadata]) -> tuple[SegmentChange, ...]:
    old, new = {segment.id for segment in before}, {segment.id for segment in after}
    changes = [SegmentChange("removed", s.id, s.start_offset, s.end_offset, s.size_bytes) for s in before if s.id not in new]
    changes += [SegmentChange("added", s.id, s.start_offset, s.end_offset, s.size_bytes) for s in after if s.id not in old]
    return tuple(sorted(changes, key=lambda change: (change.start_offset, change.change == "added")))


def _leader(state: PartitionState) -> str:
    leader = state.leader
    if leader is None or leader.released:
        return ""
    return f"{leader.holder} (epoch {leader.epoch})"


def _parse_time(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def iso(at_ms: int) -> str:
    """Milliseconds since 1970 for people: UTC, to the second; as they are where no calendar reaches (a retention may be "for ever")."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
