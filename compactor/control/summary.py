"""What listing, planning and scheduling need of a partition, small enough to be had for thousands of partitions at once.

A folded state holds every file of every segment: 200,000 segments take seconds to parse. A summary says the same about offsets,
sizes, times and what is open; its segments are columns of numbers, which become objects only where somebody looks at them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

from pydantic import Field

from checkpoint.offsets import CleanerOffset
from compactor.control.savings import SavingRates, learned
from compactor.control.state import Leader, PartitionState, Quarantine, Run, Waiting
from compactor.model.base import Value
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata


class SegmentFacts(Protocol):
    """What decisions need of a segment. RemoteLogSegmentMetadata has it, and so has its summary."""

    @property
    def id(self) -> str: ...
    @property
    def start_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def max_timestamp_ms(self) -> int: ...
    @property
    def mtime_ms(self) -> int: ...
    @property
    def first_timestamp_ms(self) -> int: ...
    @property
    def due_ms(self) -> int: ...
    @property
    def open_txn_offset(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    @property
    def timeindex_bytes(self) -> int: ...
    @property
    def file_count(self) -> int: ...


S_co = TypeVar("S_co", bound=SegmentFacts, covariant=True)


class PartitionFacts(Protocol[S_co]):
    """What decisions need of a partition: PartitionState, or its summary."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def live(self) -> Sequence[S_co]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def start_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def first_dirty_offset(self) -> int: ...
    @property
    def mirrored(self) -> bool: ...


class SegmentSummary(NamedTuple):
    """As RemoteLogSegmentMetadata has it; of the files what decisions need."""

    id: str
    start_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp_ms: int
    mtime_ms: int
    first_timestamp_ms: int
    due_ms: int
    open_txn_offset: int
    records: int
    index_bytes: int
    timeindex_bytes: int
    file_count: int


HOUR_MS = 3_600_000
HOURS = 25
_NUMBERS = SegmentSummary._fields[1:]
_HEAD = struct.Struct("<I")
Packed = bytes


class WaitingSummary(Value):
    """Segments that wait for grace: as state.Waiting, with their number and size in their place."""

    slot: int
    since_ms: int | None
    run_id: str
    undone: bool
    segments: int
    size_bytes: int
    grace_ms: int | None = None
    undo_window_ms: int | None = None


class ImportSummary(Value):
    slot: int
    since_ms: int | None


class LastRound(Value):
    """The latest round that has ended, as the log remembers it: state.Run, of its stats what people compare.

    Bytes and records, -1 where nobody wrote them down.
    """

    run_id: str
    status: str
    ended_ms: int
    bytes_before: int = -1
    bytes_after: int = -1
    records_read: int = -1
    records_kept: int = -1


class PartitionSummary(Value):
    """PartitionState, summarized. ``open_run``: the open intent's run, or nothing.

    ``rates``: what its rounds have saved (control.savings).
    ``freed``: bytes of segments that rounds replaced and that are gone by now, by the hour (ms) in which their round ended; HOURS of them.
    ``negative_timestamps``: records of its segments that have one.
    """

    topic: str
    partition: int
    slot: int
    segments: int
    bytes: int
    start_offset: int
    end_offset: int
    first_dirty_offset: int
    vector: tuple[CleanerOffset, ...]
    leader: Leader | None
    open_run: str
    quarantine: Quarantine | None
    waiting: tuple[WaitingSummary, ...]
    imports: tuple[ImportSummary, ...]
    retiring: int
    undone_slot: int
    negative_timestamps: int
    mirrored: bool = False
    last_round: LastRound | None = None
    rates: SavingRates = SavingRates()
    freed: tuple[tuple[int, int], ...] = ()
    columns: Packed = Field(default=b"", exclude=True, repr=False)

    @property
    def name(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @cached_property
    def live(self) -> tuple[SegmentSummary, ...]:
        return _segments(self.columns, self.segments)


def summarize(state: PartitionState) -> PartitionSummary:
    return PartitionSummary(
        topic=state.topic,
        partition=state.partition,
        slot=state.slot,
        segments=len(state.live),
        bytes=state.bytes,
        start_offset=state.start_offset,
        end_offset=state.end_offset,
        first_dirty_offset=state.first_dirty_offset,
        vector=state.vector,
        leader=state.leader,
        open_run=state.intent.plan.run_id if state.intent else "",
        quarantine=state.quarantine,
        waiting=tuple(_waiting(group) for group in state.waiting),
        imports=tuple(ImportSummary(slot=entry.slot, since_ms=entry.since_ms) for entry in state.registrations.values()),
        retiring=len(state.retiring),
        undone_slot=max((run.slot for run in state.runs if run.status == "undone"), default=0),
        rates=learned(state.runs),
        freed=_freed(state),
        mirrored=state.mirrored,
        last_round=_last_round(state.runs),
        negative_timestamps=sum(segment.negative_timestamps for segment in state.live),
        columns=_columns(state.live),
    )


def _last_round(runs: Sequence[Run]) -> LastRound | None:
    run = next((run for run in reversed(runs) if run.ended_ms >= 0), None)
    if run is None:
        return None
    names = {"bytes_before": "bytes_before", "bytes_written": "bytes_after", "records_read": "records_read", "records_kept": "records_kept"}
    known = {ours: int(run.stats[name]) for name, ours in names.items() if name in run.stats}
    return LastRound(run_id=run.run_id, status=run.status, ended_ms=run.ended_ms, **known)


def _freed(state: PartitionState) -> tuple[tuple[int, int], ...]:
    kept = {group.run_id for group in state.waiting}
    found: dict[int, int] = {}
    for run in state.runs:
        if run.stands and run.run_id not in kept:
            hour = run.ended_ms - run.ended_ms % HOUR_MS
            found[hour] = found.get(hour, 0) + int(run.stats.get("bytes_before", 0))
    return tuple(sorted(found.items())[-HOURS:])


def pack(summary: PartitionSummary) -> bytes:
    """For ``unpack`` on a machine of the same byte order."""
    head = summary.model_dump_json().encode()
    return _HEAD.pack(len(head)) + head + summary.columns


def unpack(data: bytes) -> PartitionSummary:
    """Raises ValueError (pydantic's included) or struct.error for what ``pack`` did not write."""
    (length,) = _HEAD.unpack_from(data)
    start = _HEAD.size
    summary = PartitionSummary.model_validate_json(data[start : start + length])
    return summary.model_copy(update={"columns": data[start + length :]})


def _waiting(group: Waiting) -> WaitingSummary:
    return WaitingSummary(
        slot=group.slot,
        since_ms=group.since_ms,
        run_id=group.run_id,
        undone=group.undone,
        grace_ms=group.grace_ms,
        undo_window_ms=group.undo_window_ms,
        segments=len(group.segments),
        size_bytes=sum(segment.size_bytes for segment in group.segments),
    )


def _columns(live: Sequence[RemoteLogSegmentMetadata]) -> bytes:
    """Column after column of 64-bit numbers, then the ids."""
    numbers = array("q", [getattr(segment, name) for name in _NUMBERS for segment in live])
    return numbers.tobytes() + "\n".join(segment.id for segment in live).encode()


def _segments(columns: bytes, count: int) -> tuple[SegmentSummary, ...]:
    if not count:
        return ()
    width = 8 * count
    ids = columns[len(_NUMBERS) * width :].decode().split("\n")
    values = memoryview(columns)
    numbers = [values[at : at + width].cast("q").tolist() for at in range(0, len(_NUMBERS) * width, width)]
    return tuple(map(SegmentSummary._make, zip(ids, *numbers, strict=True)))
