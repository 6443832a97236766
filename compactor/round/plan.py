"""Is a partition due, and what is to be done about it? Pure decisions over the folded state (LogCleanerManager; docs/kafka-rules.md 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import Generic, NamedTuple, TypeVar

from checkpoint.lineage import union
from compactor.cleaner.passes.grouping import group
from compactor.config import Cleaner
from compactor.control.state import PartitionState
from compactor.control.summary import PartitionFacts, SegmentFacts
from compactor.model.plan import ActiveProducer, CompactionPlan, CompactionTask, ReadSegment, SkippedSegment
from compactor.model.policy import MAX32
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.skip import CleanVerdicts

S = TypeVar("S", bound=SegmentFacts)

MERGE_AT_LEAST = 8
"""Clean neighbours that fit one segment and are merged although nothing else makes the round read them."""

MOST_SOURCES = 2
"""Of brokers' tiers, where groups go by what is left: their sources are at most so many times as large as a segment, but for empty ones."""

MERGED = "it is merged with its small neighbours"
IDLE = "it is clean, and nothing is due in it"


@dataclass(frozen=True)
class Assessment(Generic[S]):
    """What a look at one partition comes to. ``end`` is exclusive; ``horizon_due``: ids of segments in which something is due."""

    due: bool
    reason: str
    first_dirty: int
    end: int
    dirty_ratio: float
    dirty: tuple[S, ...]
    clean: tuple[S, ...]
    horizon_due: tuple[str, ...]

    @property
    def segments(self) -> tuple[S, ...]:
        """Live segments below the round's end."""
        return self.clean + self.dirty


def assess(state: PartitionFacts[S], cleaner: Cleaner, now_ms: int, *, force: bool = False) -> Assessment[S]:
    """Kafka's eligibility rules, and rounds that are due for delete horizons alone. ``force``: whatever the ratio says.

    ``state``: the folded state, or its summary.
    """
    first_dirty = state.first_dirty_offset
    end, bound = _range_end(state, cleaner, now_ms, first_dirty)
    below = [segment for segment in state.live if segment.start_offset < end]
    dirty = tuple(segment for segment in below if segment.end_offset >= first_dirty)
    clean = tuple(segment for segment in below if segment.end_offset < first_dirty)
    total = sum(segment.size_bytes for segment in below)
    ratio = sum(segment.size_bytes for segment in dirty) / total if total else 0.0
    horizon_due = tuple(segment.id for segment in below if 0 <= segment.due_ms <= now_ms)
    found = Assessment(False, "", first_dirty, end, ratio, dirty, clean, horizon_due)
    due, reason = _verdict(found, cleaner, now_ms, bound, force=force)
    return replace(found, due=due, reason=reason)


def _range_end(state: PartitionFacts[S], cleaner: Cleaner, now_ms: int, first_dirty: int) -> tuple[int, str]:
    """First offset that is not cleaned: always a segment boundary, never below ``first_dirty``; and why it is not the end."""
    end, why = state.end_offset + 1, ""
    if state.mirrored and state.live:
        end, why = state.live[-1].start_offset, "the newest segment is the brokers'"
    if state.live and state.live[-1].open_txn_offset >= 0:
        undecided = state.live[-1].open_txn_offset
        base = max((s.start_offset for s in state.live if s.start_offset <= undecided), default=state.start_offset)
        if base < end:
            end, why = base, f"a transaction is open since offset {undecided}"
    if cleaner.min_compaction_lag_ms > 0:
        for segment in state.live:
            stamp = segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.mtime_ms
            if segment.end_offset >= first_dirty and segment.start_offset < end and stamp > now_ms - cleaner.min_compaction_lag_ms:
                end, why = segment.start_offset, "min_compaction_lag_ms has not passed"
                break
    return max(end, min(first_dirty, state.end_offset + 1)), why


def _verdict(found: Assessment[S], cleaner: Cleaner, now_ms: int, bound: str, *, force: bool) -> tuple[bool, str]:
    """``bound``: why the round's end is not the tier's."""
    dirty, ratio = found.dirty, found.dirty_ratio
    late = [s for s in dirty if 0 < s.first_timestamp_ms < now_ms - cleaner.max_compaction_lag_ms]
    if dirty and force:
        return True, "forced"
    if dirty and ratio > cleaner.min_cleanable_dirty_ratio:
        return True, f"dirty ratio {ratio:.2f} is above {cleaner.min_cleanable_dirty_ratio:g}"
    if late:
        return True, "max_compaction_lag_ms has passed"
    if found.horizon_due:
        return True, f"a delete horizon has passed in {len(found.horizon_due)} segments"
    if dirty:
        return False, f"dirty ratio {ratio:.2f} is not above {cleaner.min_cleanable_dirty_ratio:g}"
    return False, bound or "nothing is dirty"


class Left(NamedTuple):
    """What pass 1 leaves of a segment, at most."""

    bytes: int
    records: int


@dataclass(frozen=True)
class RoundFacts:
    """All that a plan is made of, gathered once. ``producers``: live ones at the tier's end; ``fingerprint``: see CompactionPlan.

    ``clean``: what pass 1 says of clean segments; as long as it says nothing, the plan leaves out nothing. ``left``: what
    is left of segments, by id, where pass 1 knows it and groups go by it. ``snapshot``: the last segment's producers, as they were read.
    """

    state: PartitionState
    assessment: Assessment[RemoteLogSegmentMetadata]
    cleaner: Cleaner
    now_ms: int
    producers: tuple[ActiveProducer, ...]
    fingerprint: str
    map_engine: str
    clean: CleanVerdicts = field(default_factory=CleanVerdicts)
    left: Mapping[str, Left] = field(default_factory=dict)
    snapshot: bytes = b""


@dataclass(frozen=True)
class Grouped:
    """A segment as grouping sees it: sizes of its input files in bytes, or as much of them as is ``left``."""

    metadata: RemoteLogSegmentMetadata
    left: Left | None = None
    base: int = field(init=False)
    size: int = field(init=False)
    index_bytes: int = field(init=False)
    timeindex_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        whole = self.metadata.size_bytes
        left = min(whole, self.left.bytes) if self.left else whole
        object.__setattr__(self, "base", self.metadata.start_offset)
        object.__setattr__(self, "size", left)
        object.__setattr__(self, "index_bytes", self.metadata.index_bytes * left // max(whole, 1))
        object.__setattr__(self, "timeindex_bytes", self.metadata.timeindex_bytes * left // max(whole, 1))

    @property
    def is_empty(self) -> bool:
        """Whether no record is left of it."""
        return self.left is not None and self.left.records == 0


_Assessed = Assessment[RemoteLogSegmentMetadata]


def draft(facts: RoundFacts) -> CompactionPlan:
    """The plan without ids, for whoever needs its rules before there is a plan."""
    return plan_round(facts, -1, lambda: "")


def plan_round(facts: RoundFacts, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan:
    """The round that the facts call for, complete: executing it twice gives the same bytes (I7)."""
    state, found, clean, cleaner = facts.state, facts.assessment, facts.clean, facts.cleaner
    rules = _Grouping(cleaner, facts.left, _epochs_begin(found.segments), large=True) if state.mirrored else _Grouping(cleaner)
    groups, merged = _groups(found, clean, rules)
    sources = {segment.id for members in groups for segment in members}
    before = found.clean[-1] if found.clean else None
    if found.dirty and found.dirty[0].start_offset < found.first_dirty:
        before = found.dirty[0]
    cleaned = found.end if found.dirty else found.first_dirty
    return CompactionPlan(
        run_id=new_id(),
        topic=state.topic,
        partition=state.partition,
        leader_epoch=leader_epoch,
        now_ms=facts.now_ms,
        first_dirty_offset=found.first_dirty,
        end_offset=found.end,
        next_dirty_offset=cleaned,
        high_watermark=state.end_offset + 1,
        # v0/v1 tombstones have no horizon: they go when a round visits everything, whatever segments are written for others' horizons.
        legacy_horizon_ms=before.mtime_ms - cleaner.delete_retention_ms if before and found.dirty else 0,
        vector=state.vector,
        policy=cleaner.policy(),
        map_engine=facts.map_engine,
        fingerprint=facts.fingerprint,
        producers=facts.producers,
        tasks=tuple(_task(number, members, facts, new_id()) for number, members in enumerate(groups)),
        skipped=tuple(SkippedSegment(id=s.id, reason=clean.skip.get(s.id, IDLE)) for s in found.clean if s.id not in sources),
        read=tuple(
            ReadSegment(id=s.id, reason=MERGED if s.id in merged else clean.read.get(s.id, "it is clean, and its keys may be superseded"))
            for s in found.clean
            if s.id in sources
        ),
    )


def _epochs_begin(segments: Sequence[RemoteLogSegmentMetadata]) -> frozenset[int]:
    """Ordinals of segments in which a leader epoch begins. Brokers look up each epoch for itself: such a segment begins a group, or the
    later epoch's part would be switched before what precedes it (docs/broker-protocol.md, *ascending*)."""
    epochs = [{entry.epoch for entry in segment.leader_epochs} for segment in segments]
    return frozenset(number for number, (before, own) in enumerate(pairwise(epochs), start=1) if own - before)


@dataclass(frozen=True)
class _Grouping:
    """``apart``: ordinals of segments with which a group begins. ``large``: groups go by what is ``left`` of their sources, so that
    none of them is empty if it need not be, and neighbours in which something is due go together: brokers keep files of each segment."""

    cleaner: Cleaner
    left: Mapping[str, Left] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()
    large: bool = False

    def of(self, segments: Sequence[RemoteLogSegmentMetadata], end: int) -> list[list[Grouped]]:
        """Neighbours, up to the offset ``end`` (exclusive)."""
        cleaner = self.cleaner
        members = [Grouped(segment, self.left.get(segment.id)) for segment in segments]
        return group(members, cleaner.segment_bytes, cleaner.segment_index_bytes, end, self._joins)

    def _joins(self, members: list[Grouped], other: Grouped) -> bool:
        """Whoever takes a round back needs one segment for all sources of a group (round.restoring); one without a record is worse."""
        if other.is_empty or all(member.is_empty for member in members):
            return True
        most = min(MOST_SOURCES * self.cleaner.segment_bytes, MAX32)
        return sum(member.metadata.size_bytes for member in members) + other.metadata.size_bytes <= most


def _groups(found: _Assessed, clean: CleanVerdicts, rules: _Grouping) -> tuple[list[list[RemoteLogSegmentMetadata]], set[str]]:
    """What becomes one segment, ascending; and the ids of those that only the rule for small neighbours brings in."""
    groups: list[list[RemoteLogSegmentMetadata]] = []
    merged: set[str] = set()
    segments = found.segments
    parts = list(accumulate(int(n in rules.apart) for n in range(len(segments))))
    if not found.dirty:
        # Nothing new: only the segments in which something is due are written anew.
        due = [n for n, segment in enumerate(segments) if segment.id in found.horizon_due or segment.id in clean.due]
        if not rules.large:
            return [[segments[n]] for n in due], set()
        for _, together in groupby(enumerate(due), lambda each: (each[1] - each[0], parts[each[1]])):
            members = [segments[n] for _, n in together]
            groups += [[member.metadata for member in one] for one in rules.of(members, members[-1].end_offset + 1)]
        return groups, set()
    # What is read in part becomes a segment of its own: its neighbours' bytes are no reason to read the rest of it.
    for (skippable, _, _), run in groupby(
        range(len(segments)), lambda n: (segments[n].id in clean.skip, parts[n], segments[n].id if segments[n].id in clean.in_part else "")
    ):
        numbers = list(run)
        end = segments[numbers[-1] + 1].start_offset if numbers[-1] + 1 < len(segments) else found.end
        for grouped in rules.of([segments[n] for n in numbers], end):
            if skippable and (clean.settled or not _worth_merging(grouped)):
                continue
            groups.append([member.metadata for member in grouped])
            merged.update(member.metadata.id for member in grouped if skippable)
    return groups, merged


def _worth_merging(members: Sequence[Grouped]) -> bool:
    """Clean neighbours that nothing else brings in are merged where they are many and none of them is most of the result.

    So a byte is rewritten by this rule at most once for each doubling of the segment that it lies in.
    """
    return len(members) >= MERGE_AT_LEAST and 2 * max(member.size for member in members) <= sum(member.size for member in members)


def metadata_records(tasks: Sequence[CompactionTask]) -> int:
    """About how many records a round over these says to brokers, until what it replaced is deleted: two of each segment, new and replaced,
    and four of each ceiling marker where a leader epoch ends (docs/broker-protocol.md)."""
    segments = sum(1 + len(task.sources) for task in tasks)
    ends = sum(len(task.leader_epochs) - 1 for task in tasks)
    ends += sum(one.leader_epochs[-1].epoch not in {entry.epoch for entry in two.leader_epochs} for one, two in pairwise(tasks))
    return 2 * segments + 4 * ends


def _task(number: int, members: Sequence[RemoteLogSegmentMetadata], facts: RoundFacts, new_segment_id: str) -> CompactionTask:
    whole = sum(member.size_bytes for member in members)
    most = sum(Grouped(member, facts.left.get(member.id)).size for member in members)
    return CompactionTask(
        group=number,
        sources=tuple(member.id for member in members),
        new_segment_id=new_segment_id,
        start_offset=members[0].start_offset,
        end_offset=members[-1].end_offset,
        leader_epochs=union([member.leader_epochs for member in members]),
        mtime_ms=members[-1].mtime_ms,
        most_bytes=most if most < whole else 0,
        in_part=len(members) == 1 and members[0].id in facts.clean.in_part,
    )
