"""Summary of a partition's state, small enough to keep for thousands of partitions at once.

A state holds every file of every segment; parsing 200,000 segments takes seconds. The segments of a summary are columns of numbers, which
become objects only when they are used.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

from pydantic import Field

from checkpoint.offsets import CleanerOffset
from compactor.constants import EMPTY_TOPIC_ID, HOUR_MS, TopicId
from compactor.control.records import BLOCKED_BY_STAT, NEXT_STEP_STAT
from compactor.control.state import CompactorLeader, GroupAwaitingDeletion, PartitionState, Quarantine, RunHistoryEntry
from compactor.model.ids import RunHistoryStatus, TopicPartition, partition_of_incarnation
from compactor.model.segment import RemoteLogSegmentMetadata, StrictFrozenModel

# Segments that a round skipped and why, as one line of the run history:
# 0-1199: its filter matches none of 812 keys; 4800-5999: nothing is due in it

SKIPPED_RANGES_STAT = "left_alone"
"""Name of the line in the run history's figures."""
MAX_SKIPPED_RANGES = 40
"""Number of ranges that are kept. The run history is read with every check of a partition."""


class SkippedSegmentRange(NamedTuple):
    """Neighbouring segments that a round skipped for the same reason. Offsets are inclusive."""

    start_offset: int
    end_offset: int
    why: str


def skipped_ranges(live_segments: Iterable[RemoteLogSegmentMetadata], reasons: Mapping[str, str]) -> list[SkippedSegmentRange]:
    found: list[SkippedSegmentRange] = []
    joins = False
    for segment in live_segments:
        reason = reasons.get(segment.id, "")
        if reason and joins and found[-1].why == reason:
            found[-1] = found[-1]._replace(end_offset=segment.end_offset)
        elif reason:
            found.append(SkippedSegmentRange(segment.start_offset, segment.end_offset, reason))
        joins = bool(reason)
    return found


def format_skipped_ranges(ranges: Iterable[SkippedSegmentRange]) -> str:
    """Return at most MAX_SKIPPED_RANGES ranges, the longest ones, ascending by offset."""
    kept = sorted(sorted(ranges, key=lambda one: one.start_offset - one.end_offset)[:MAX_SKIPPED_RANGES])
    return "; ".join(f"{one.start_offset}-{one.end_offset}: {one.why.replace(';', ',')}" for one in kept)


def parse_skipped_ranges(line: str) -> list[SkippedSegmentRange]:
    return [SkippedSegmentRange(int(low), int(high), why) for low, high, why in re.findall(r"(\d+)-(\d+): ([^;]*)", line)]


class SegmentSummary(NamedTuple):
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


SegmentMetadataOrSummary = RemoteLogSegmentMetadata | SegmentSummary
"""A segment with the figures that decisions need."""
S_co = TypeVar("S_co", bound=SegmentMetadataOrSummary, covariant=True)


class PartitionStateOrSummary(Protocol[S_co]):
    """Properties that scheduling needs; PartitionState describes them."""

    @property
    def topic_partition(self) -> TopicPartition: ...

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def live(self) -> Sequence[S_co]:
        """Ascending by offset."""

    @property
    def has_segments(self) -> bool: ...

    @property
    def bytes(self) -> int: ...

    @property
    def start_offset(self) -> int: ...

    @property
    def log_start(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def first_dirty_offset(self) -> int: ...

    @property
    def saved_per_dirty_byte(self) -> float | None: ...

    @property
    def last_round_ms(self) -> int: ...

    @property
    def mirrored(self) -> bool: ...


HOURS = 25
FILTER_STATS = frozenset({"filter_asked", "filter_skipped", "filter_useless", "filter_bytes_read", "filter_bytes_written", "bytes_skipped"})
"""Figures of the run history that tell what Bloom filters cost and saved."""
_NUMBERS = SegmentSummary._fields[1:]
_HEAD = struct.Struct("<I")
Packed = bytes


class GroupAwaitingDeletionSummary(StrictFrozenModel):
    slot: int
    since_ms: int | None
    run_id: str
    undone: bool
    segments: int
    size_bytes: int
    grace_ms: int | None = None
    undo_window_ms: int | None = None


class ImportSummary(StrictFrozenModel):
    slot: int
    since_ms: int | None


class LastRoundSummary(StrictFrozenModel):
    """The latest ended round. Numbers are -1 if not recorded."""

    run_id: str
    status: str
    ended_ms: int
    bytes_before: int = -1
    bytes_after: int = -1
    records_read: int = -1
    records_kept: int = -1


class PartitionSummary(StrictFrozenModel):
    """Summary of a PartitionState. Fields with the same name have the same meaning.

    quarantined_since_ms: end of the first of the partition's uninterrupted failed rounds, in milliseconds; 0 if it is not quarantined.
    quarantine_cause, quarantine_next_step: of the latest failed round; empty if not recorded, as for damaged data.
    undone_slot: of the latest undone plan; 0 if unknown.
    freed: (start of an hour in milliseconds, bytes) for the last HOURS hours: the sizes of deleted segments whose round ended then.
    negative_timestamps: records with one other than -1.
    filter_stats: sums over the run history of the figures about Bloom filters, by their names there.
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
    leader: CompactorLeader | None
    open_run: str
    quarantine: Quarantine | None
    quarantined_since_ms: int = Field(default=0, exclude_if=lambda value: not value)
    quarantine_cause: str = Field(default="", exclude_if=lambda value: not value)
    quarantine_next_step: str = Field(default="", exclude_if=lambda value: not value)
    waiting: tuple[GroupAwaitingDeletionSummary, ...]
    imports: tuple[ImportSummary, ...]
    retiring: int
    undone_slot: int
    negative_timestamps: int
    mirrored: bool = False
    incarnation: int = 1
    topic_id: TopicId = EMPTY_TOPIC_ID
    log_start_offset: int | None = None
    last_round: LastRoundSummary | None = None
    saved_per_dirty_byte: float | None = None
    last_round_ms: int = 0
    freed: tuple[tuple[int, int], ...] = ()
    filter_stats: dict[str, int] = Field(default_factory=dict)
    columns: Packed = Field(default=b"", exclude=True, repr=False)

    @property
    def topic_partition(self) -> TopicPartition:
        return partition_of_incarnation(self.topic, self.partition, self.incarnation)

    @property
    def has_segments(self) -> bool:
        return self.segments > 0

    @property
    def log_start(self) -> int:
        return max(self.start_offset, self.log_start_offset or 0)

    @property
    def current_leader(self) -> CompactorLeader | None:
        return self.leader if self.leader is not None and not self.leader.released else None

    @property
    def waiting_bytes(self) -> int:
        return sum(group.size_bytes for group in self.waiting)

    @property
    def has_open_transaction(self) -> bool:
        return self.has_segments and _last_number(self.columns, self.segments, "open_txn_offset") >= 0

    @cached_property
    def live(self) -> tuple[SegmentSummary, ...]:
        return _decode_segment_columns(self.columns, self.segments)


def summarize_state(state: PartitionState) -> PartitionSummary:
    quarantined = state.latest_quarantined_run
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
        quarantined_since_ms=_quarantined_since_ms(state),
        quarantine_cause=str(quarantined.stats.get(BLOCKED_BY_STAT, "")) if quarantined else "",
        quarantine_next_step=str(quarantined.stats.get(NEXT_STEP_STAT, "")) if quarantined else "",
        waiting=tuple(_summarize_waiting_group(group) for group in state.waiting),
        imports=tuple(ImportSummary(slot=entry.slot, since_ms=entry.since_ms) for entry in state.registrations.values()),
        retiring=len(state.retiring),
        undone_slot=max((run.slot for run in state.runs if run.status == RunHistoryStatus.UNDONE), default=0),
        saved_per_dirty_byte=state.saved_per_dirty_byte,
        last_round_ms=state.last_round_ms,
        freed=_freed_bytes_by_hour(state),
        filter_stats=sum_filter_stats(state.runs),
        mirrored=state.mirrored,
        incarnation=state.incarnation,
        topic_id=state.topic_id,
        log_start_offset=state.log_start_offset,
        last_round=_summarize_last_round(state.runs),
        negative_timestamps=sum(segment.negative_timestamps for segment in state.live),
        columns=_encode_segment_columns(state.live),
    )


def _quarantined_since_ms(state: PartitionState) -> int:
    if state.quarantine is None:
        return 0
    failed = [run for run in state.runs if run.status == RunHistoryStatus.QUARANTINED][-state.quarantine.failures :]
    return min([state.quarantine.at_ms, *(max(run.started_ms, run.ended_ms) for run in failed)])


def _summarize_last_round(runs: Sequence[RunHistoryEntry]) -> LastRoundSummary | None:
    run = next((run for run in reversed(runs) if run.ended_ms >= 0), None)
    if run is None:
        return None
    names = {"bytes_before": "bytes_before", "bytes_written": "bytes_after", "records_read": "records_read", "records_kept": "records_kept"}
    known = {ours: int(run.stats[name]) for name, ours in names.items() if name in run.stats}
    return LastRoundSummary(run_id=run.run_id, status=run.status, ended_ms=run.ended_ms, **known)


def sum_filter_stats(runs: Iterable[RunHistoryEntry]) -> dict[str, int]:
    """Return ``PartitionSummary.filter_stats``."""
    sums: dict[str, int] = {}
    for run in runs:
        for name, value in run.stats.items():
            if name in FILTER_STATS:
                sums[name] = sums.get(name, 0) + int(value)
    return sums


def _freed_bytes_by_hour(state: PartitionState) -> tuple[tuple[int, int], ...]:
    """Return ``PartitionSummary.freed``."""
    kept = {group.run_id for group in state.waiting}
    found: dict[int, int] = {}
    for run in state.runs:
        if run.is_still_published and run.run_id not in kept:
            hour = run.ended_ms - run.ended_ms % HOUR_MS
            found[hour] = found.get(hour, 0) + int(run.stats.get("bytes_before", 0))
    return tuple(sorted(found.items())[-HOURS:])


def encode_summary(summary: PartitionSummary) -> bytes:
    """Only a machine with the same byte order can decode it."""
    head = summary.model_dump_json().encode()
    return _HEAD.pack(len(head)) + head + summary.columns


def decode_summary(data: bytes) -> PartitionSummary:
    """Raises ValueError (pydantic's included) or struct.error for bytes that ``encode_summary`` did not make."""
    (length,) = _HEAD.unpack_from(data)
    start = _HEAD.size
    summary = PartitionSummary.model_validate_json(data[start : start + length])
    return summary.model_copy(update={"columns": data[start + length :]})


def _summarize_waiting_group(group: GroupAwaitingDeletion) -> GroupAwaitingDeletionSummary:
    return GroupAwaitingDeletionSummary(
        slot=group.slot,
        since_ms=group.since_ms,
        run_id=group.run_id,
        undone=group.undone,
        grace_ms=group.grace_ms,
        undo_window_ms=group.undo_window_ms,
        segments=len(group.segments),
        size_bytes=sum(segment.size_bytes for segment in group.segments),
    )


def _encode_segment_columns(live_segments: Sequence[RemoteLogSegmentMetadata]) -> bytes:
    numbers = array("q", [getattr(segment, name) for name in _NUMBERS for segment in live_segments])
    return numbers.tobytes() + "\n".join(segment.id for segment in live_segments).encode()


def _last_number(columns: bytes, segment_count: int, name: str) -> int:
    """Return the number of the last segment, without decoding the others."""
    (number,) = struct.unpack_from("=q", columns, 8 * ((_NUMBERS.index(name) + 1) * segment_count - 1))
    return int(number)


def _decode_segment_columns(columns: bytes, segment_count: int) -> tuple[SegmentSummary, ...]:
    if not segment_count:
        return ()
    width = 8 * segment_count
    ids = columns[len(_NUMBERS) * width :].decode().split("\n")
    values = memoryview(columns)
    numbers = [values[at : at + width].cast("q").tolist() for at in range(0, len(_NUMBERS) * width, width)]
    return tuple(map(SegmentSummary._make, zip(ids, *numbers, strict=True)))
