"""Decisions whether a round is due, and its plan. Pure functions over the folded state.

Source: Kafka's LogCleanerManager; docs/kafka-rules.md, section 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from math import ceil
from typing import Generic, NamedTuple, TypeVar

from typing_extensions import override

from checkpoint.lineage import merge_segment_lineages
from compactor.cleaner.disk_map import count_log_scans
from compactor.cleaner.rewrite import group_segments
from compactor.config.settings import CleanerSettings, SparkSettings
from compactor.config.units import count_noun, format_size
from compactor.constants import NEVER_MS, NO_COMPACTOR_EPOCH, CompactorEpoch, Offset, TimestampMs
from compactor.control.log_start import segments_removable_below
from compactor.control.state import PartitionState
from compactor.control.summary import PartitionStateOrSummary, PartitionSummary, SegmentMetadataOrSummary
from compactor.kernels.common import KEY_BYTES
from compactor.model.plan import (
    MAX32,
    ActiveProducer,
    CompactionPlan,
    CompactionTask,
    KeylessRecords,
    KeylessRecordsRefused,
    SegmentToRead,
    SkippedSegment,
)
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.ports import CleanSegmentVerdicts, Stats, estimate_record_count
from compactor.storage.schemes import GIB


def require_keyless_accepted(state: PartitionState, cleaner: CleanerSettings, end: int) -> None:
    """Raise KeylessRecordsRefused if the newest record for which an earlier round was refused is still in the dirty range, which ends
    before ``end``.
    """
    known = known_refused_keyless(state, cleaner, end)
    if known is not None:
        raise KeylessRecordsRefused(state.topic, known)


def known_refused_keyless(state: PartitionState | PartitionSummary, cleaner: CleanerSettings, end: int) -> KeylessRecords | None:
    """Return the count of an earlier round if the next one, over offsets below ``end``, will be refused."""
    keyless = state.quarantine.keyless if state.quarantine else None
    refused = cleaner.keyless_records == "refuse" and keyless is not None and state.first_dirty_offset <= keyless.last_offset < end
    return keyless if refused else None


def keyless_stats(keyless: KeylessRecords) -> Stats:
    return {"keyless_records": keyless.count, "records_dirty": keyless.records} if keyless.count else {}


# Dirty ratio: superseded records cost storage until a round removes them, and a round costs requests. The more is dirty when a round
# begins, the fewer rounds and the more storage. The choice goes by Kafka's rule: a round over a clean part of L bytes begins at D dirty
# bytes, reads both and leaves about L. Between rounds half of D is stored in vain on average, and what a round replaces stays for grace and
# undo window.


KAFKA_RATIO = 0.5
"""Kafka's default, which holds as long as nothing can be computed."""
CHOICES = tuple(step / 100 for step in range(60, 5, -5))
"""Ratios to choose from, 0.6 to 0.1. Of equally cheap ones the first is taken, which has the fewest rounds."""
MONTH_MS = 30 * 86_400_000


@dataclass(frozen=True)
class DirtyRatioThreshold:
    """Dirty ratio above which a round is due. ``why``: empty if a setting states it.

    saved_usd_month: in comparison with Kafka's default; None if the threshold was not chosen by cost.
    """

    ratio: float
    why: str = ""
    saved_usd_month: float | None = None

    @override
    def __str__(self) -> str:
        return f"{self.ratio:g}" + (" (auto)" if self.why else "")


def dirty_ratio_threshold(
    cleaner: CleanerSettings,
    clean_segments: Sequence[SegmentMetadataOrSummary],
    dirty_segments: Sequence[SegmentMetadataOrSummary],
    bytes_saved_per_dirty_byte: float | None,
) -> DirtyRatioThreshold:
    """:param bytes_saved_per_dirty_byte: by the last round; None (unknown) is treated as 1."""
    if cleaner.min_cleanable_dirty_ratio != "auto":
        return DirtyRatioThreshold(cleaner.min_cleanable_dirty_ratio)
    costs = cleaner.segment_replacement_costs
    if costs is None or not costs.prices.stored_gib_month_usd:
        return DirtyRatioThreshold(KAFKA_RATIO, "storage costs nothing here")
    stamps = [stamp for segment in dirty_segments for stamp in (segment.first_timestamp_ms, segment.max_timestamp_ms) if stamp > 0]
    span_ms = max(stamps) - min(stamps) if stamps else 0
    if not clean_segments or span_ms <= 0:
        return DirtyRatioThreshold(
            KAFKA_RATIO, "nothing was cleaned yet" if not clean_segments else "the timestamps do not show how fast it grows"
        )
    live, written = (sum(segment.size_bytes for segment in some) for some in (clean_segments, dirty_segments))
    written_month = written / span_ms * MONTH_MS
    segment_bytes = live / len(clean_segments)
    in_vain = min(1.0, bytes_saved_per_dirty_byte) if bytes_saved_per_dirty_byte is not None else 1.0

    def monthly_cost_usd(dirty_ratio: float) -> float:
        dirty_bytes = live * dirty_ratio / (1 - dirty_ratio)
        rounds = written_month / dirty_bytes
        stored = in_vain * dirty_bytes / 2 + rounds * (live + dirty_bytes) * costs.replaced_ms / MONTH_MS
        requests = costs.prices.round_requests_usd(ceil((live + dirty_bytes) / segment_bytes), len(clean_segments))
        return stored / GIB * costs.prices.stored_gib_month_usd + rounds * requests

    ratio = min(CHOICES, key=monthly_cost_usd)
    turnovers = f"{written_month / live:.1f} times its clean size are written a month"
    return DirtyRatioThreshold(
        ratio,
        f"the cheapest, as {turnovers}",
        round(monthly_cost_usd(KAFKA_RATIO) - monthly_cost_usd(ratio), 6),
    )


# Retention: whole segments expire, from the first one on (Kafka's ``UnifiedLog.deleteRetentionMsBreachedSegments`` and
# ``deleteRetentionSizeBreachedSegments``): while a segment's largest timestamp is older than ``retention_ms``, then while at least
# ``retention_bytes`` would remain without it. A segment without timestamps has its modification time instead.


S = TypeVar("S", bound=SegmentMetadataOrSummary)


@dataclass(frozen=True)
class ExpiredSegments:
    """Segments that retention removes, never the newest, even if its records expire.

    log_start_offset: first offset that readers may read afterwards. It is unchanged if all removed segments were below it already.
    """

    log_start_offset: int
    segments: int
    bytes: int
    reason: str


def is_retention_enabled(cleaner: CleanerSettings) -> bool:
    """Return False, as Kafka does, under the cleanup policy "compact" alone."""
    return cleaner.cleanup_policy != "compact"


def find_expired_segments(state: PartitionStateOrSummary[S], cleaner: CleanerSettings, now_ms: int) -> ExpiredSegments | None:
    """Return None if none expires, or if brokers expire the segments.

    Segments that lie below the log start but could not be removed earlier are included, whatever the cleanup policy is.

    :param now_ms: the earlier of this machine's clock and the store's, so that a clock that is ahead deletes nothing.
    """
    if state.mirrored or not state.has_segments:
        return None
    readable = [segment for segment in state.live if segment.end_offset >= state.log_start]
    aged = _count_aged(readable, cleaner, now_ms)
    surplus = _count_surplus(readable[aged:], cleaner)
    count = aged + surplus
    offset = readable[count - 1].end_offset + 1 if count else state.log_start
    gone = segments_removable_below(state.live, offset)
    if offset == state.log_start and not gone:
        return None
    why = [f"{count_noun(aged, 'segment is', 'segments are')} older than retention_ms"] if aged else []
    why += [f"{surplus} {'exceeds' if surplus == 1 else 'exceed'} retention_bytes"] if surplus else []
    return ExpiredSegments(
        offset, len(gone), sum(segment.size_bytes for segment in gone), " and ".join(why) or "they lie below the log start"
    )


def next_expiry_ms(state: PartitionStateOrSummary[S], cleaner: CleanerSettings) -> int:
    """Return NEVER_MS if no segment ever exceeds ``retention_ms``."""
    if state.mirrored or not is_retention_enabled(cleaner) or cleaner.retention_ms < 0:
        return NEVER_MS
    first = next((segment for segment in state.live if segment.end_offset >= state.log_start), None)
    return NEVER_MS if first is None else min(NEVER_MS, retention_timestamp_ms(first) + cleaner.retention_ms + 1)


def retention_timestamp_ms(segment: SegmentMetadataOrSummary) -> int:
    """Return the largest timestamp, or the modification time if no record has one (Kafka's LogSegment)."""
    return segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.mtime_ms


def _count_aged(readable_segments: Sequence[S], cleaner: CleanerSettings, now_ms: int) -> int:
    if not is_retention_enabled(cleaner) or cleaner.retention_ms < 0:
        return 0
    young = (n for n, segment in enumerate(readable_segments) if now_ms - retention_timestamp_ms(segment) <= cleaner.retention_ms)
    return next(young, len(readable_segments))


def _count_surplus(readable_segments: Sequence[S], cleaner: CleanerSettings) -> int:
    if not is_retention_enabled(cleaner) or cleaner.retention_bytes < 0:
        return 0
    remaining = sum(segment.size_bytes for segment in readable_segments)
    for number, segment in enumerate(readable_segments):
        remaining -= segment.size_bytes
        if remaining < cleaner.retention_bytes:
            return number
    return len(readable_segments)


FEW_PASSES = 3
"""Number of passes over the keys up to which this process does the work, although it reads the dirty range as often."""


def spark_reason(cleaner: CleanerSettings, spark: SparkSettings, assessment: RoundAssessment[S]) -> str:
    """Return an empty reason if this process does the round. For ``map_engine = "auto"``."""
    if cleaner.map_engine != "auto" or not spark.uses_spark_cluster or not assessment.due:
        return ""
    size = sum(segment.size_bytes for segment in assessment.covered_segments)
    if 0 < spark.above_bytes < size:
        return f"its {format_size(size)} are more than [spark] above_bytes"
    budget = cleaner.disk_budget_bytes
    if not isinstance(budget, int):
        return ""
    largest = max((segment.size_bytes for segment in assessment.covered_segments), default=0)
    if 2 * largest > budget:
        return f"its largest segment of {format_size(largest)} and the output do not fit disk_budget_bytes"
    if sum(estimate_record_count(segment) for segment in assessment.dirty) * KEY_BYTES <= cleaner.map_budget_bytes:
        return ""
    passes = expected_scan_count(cleaner, assessment)
    return f"the keys would need {passes} passes" if passes > FEW_PASSES else ""


def expected_scan_count(cleaner: CleanerSettings, assessment: RoundAssessment[S]) -> int:
    """Return how often the partitioned engine reads the dirty range; 1 if the disk budget is ``auto``."""
    if not isinstance(cleaner.disk_budget_bytes, int):
        return 1
    rows, largest = (
        sum(estimate_record_count(s) for s in assessment.dirty),
        max((s.size_bytes for s in assessment.covered_segments), default=0),
    )
    return count_log_scans(rows, max(1, cleaner.disk_budget_bytes - largest))


MERGE_AT_LEAST = 8
"""Number of small clean neighbours from which a round merges them although nothing else requires reading them."""

MOST_SOURCES = 2
"""On broker-managed tiers: the sources of a group are together at most this many times as large as ``segment_bytes``.

A segment of which no record is left may always join a group.
"""

EXPIRY_MARGIN_MS = 3_600_000
"""On broker-managed tiers: segments that expire within this time, or within twice the time of the last round, are rewritten one to one."""

MERGED = "it is merged with its small neighbours"
IDLE = "it is clean, and nothing is due in it"


@dataclass(frozen=True)
class RoundAssessment(Generic[S]):
    """Decision whether a round is due, with its segments.

    end: exclusive.
    dirty: segments with an offset at or above ``first_dirty``. clean: the others.
    horizon_due: ids of segments in which a delete horizon has passed.
    """

    due: bool
    reason: str
    first_dirty: int
    end: int
    dirty_ratio: float
    dirty: tuple[S, ...]
    clean: tuple[S, ...]
    horizon_due: tuple[str, ...]
    threshold: DirtyRatioThreshold

    @property
    def covered_segments(self) -> tuple[S, ...]:
        return self.clean + self.dirty

    @property
    def least_to_rewrite(self) -> tuple[S, ...]:
        """Segments that the round rewrites whatever pass 1 finds."""
        return tuple(segment for segment in self.clean if segment.id in self.horizon_due) + self.dirty


def assess_round(state: PartitionStateOrSummary[S], cleaner: CleanerSettings, now_ms: int, *, force: bool = False) -> RoundAssessment[S]:
    """Apply Kafka's eligibility rules, and delete horizons.

    :param force: treat a partition with any dirty segment as due.
    """
    first_dirty = state.first_dirty_offset
    if cleaner.cleanup_policy == "delete":
        return RoundAssessment(
            False, 'cleanup_policy is "delete"', first_dirty, first_dirty, 0.0, (), (), (), DirtyRatioThreshold(KAFKA_RATIO)
        )
    end, bound = _end_of_range(state, cleaner, now_ms, first_dirty)
    # Nobody reads a segment below the log start, which stays only as the newest one: it is not worth a rewrite.
    log_start = state.log_start
    below = [segment for segment in state.live if segment.start_offset < end and segment.end_offset >= log_start]
    dirty = tuple(segment for segment in below if segment.end_offset >= first_dirty)
    clean = tuple(segment for segment in below if segment.end_offset < first_dirty)
    total = sum(segment.size_bytes for segment in below)
    ratio = sum(segment.size_bytes for segment in dirty) / total if total else 0.0
    horizon_due = tuple(segment.id for segment in below if 0 <= segment.due_ms <= now_ms)
    threshold = dirty_ratio_threshold(cleaner, clean, dirty, state.saved_per_dirty_byte)
    found = RoundAssessment(False, "", first_dirty, end, ratio, dirty, clean, horizon_due, threshold)
    due, reason = _decide_due(found, cleaner, now_ms, bound, ignore_dirty_ratio=force)
    return replace(found, due=due, reason=reason)


def _end_of_range(state: PartitionStateOrSummary[S], cleaner: CleanerSettings, now_ms: int, first_dirty_offset: int) -> tuple[int, str]:
    """Return the end of a round's range (exclusive), and why it is not the log's end (empty: it is). It is a segment boundary and never
    below ``first_dirty_offset``.
    """
    end, why = state.end_offset + 1, ""
    if state.mirrored and state.has_segments:
        end, why = state.live[-1].start_offset, "the newest segment is the brokers'"
    if state.has_segments and state.live[-1].open_txn_offset >= 0:
        undecided = state.live[-1].open_txn_offset
        base = max((s.start_offset for s in state.live if s.start_offset <= undecided), default=state.start_offset)
        if base < end:
            end, why = base, f"a transaction is open since offset {undecided}"
    if cleaner.min_compaction_lag_ms > 0:
        for segment in state.live:
            stamp = segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.mtime_ms
            if segment.end_offset >= first_dirty_offset and segment.start_offset < end and stamp > now_ms - cleaner.min_compaction_lag_ms:
                end, why = segment.start_offset, "min_compaction_lag_ms has not passed"
                break
    return max(end, min(first_dirty_offset, state.end_offset + 1)), why


def _decide_due(
    assessment: RoundAssessment[S], cleaner: CleanerSettings, now_ms: int, range_limit_reason: str, *, ignore_dirty_ratio: bool
) -> tuple[bool, str]:
    dirty, ratio = assessment.dirty, assessment.dirty_ratio
    late = [s for s in dirty if 0 < s.first_timestamp_ms < now_ms - cleaner.max_compaction_lag_ms]
    if dirty and ignore_dirty_ratio:
        return True, "forced"
    if dirty and ratio > assessment.threshold.ratio:
        return True, f"dirty ratio {ratio:.2f} is above {assessment.threshold}"
    if late:
        return True, "max_compaction_lag_ms has passed"
    if assessment.horizon_due:
        return True, f"a delete horizon has passed in {count_noun(len(assessment.horizon_due), 'segment')}"
    if dirty:
        return False, f"dirty ratio {ratio:.2f} is not above {assessment.threshold}"
    return False, range_limit_reason or "nothing is dirty"


class RemainingSizeBound(NamedTuple):
    """Upper bound on what remains of a segment after the round."""

    bytes: int
    records: int


@dataclass(frozen=True)
class PlanInputs:
    """Values from which a plan is made.

    producers: live at the log's end.
    fingerprint: as in ``CompactionPlan``.
    clean: clean segments that pass 1 allows to skip; by default none.
    left: bounds by segment id, for the sizes of groups; if empty, the segments' present sizes count.
    snapshot: the last segment's producer snapshot, as read.
    """

    state: PartitionState
    assessment: RoundAssessment[RemoteLogSegmentMetadata]
    cleaner: CleanerSettings
    now_ms: int
    producers: tuple[ActiveProducer, ...]
    fingerprint: str
    map_engine: str
    clean: CleanSegmentVerdicts = field(default_factory=CleanSegmentVerdicts)
    left: Mapping[str, RemainingSizeBound] = field(default_factory=dict)
    snapshot: bytes = b""


@dataclass(frozen=True)
class GroupMemberCandidate:
    """Segment whose sizes, in bytes, are those of its present files, or those of the records that remain after the round."""

    metadata: RemoteLogSegmentMetadata
    left: RemainingSizeBound | None = None
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
    def has_no_remaining_record(self) -> bool:
        return self.left is not None and self.left.records == 0


_AssessedPartition = RoundAssessment[RemoteLogSegmentMetadata]


def draft_plan(plan_inputs: PlanInputs) -> CompactionPlan:
    """Return the plan without ids and epoch."""
    return plan_round(plan_inputs, NO_COMPACTOR_EPOCH, lambda: "")


def plan_round(plan_inputs: PlanInputs, leader_epoch: CompactorEpoch, create_id: Callable[[], str]) -> CompactionPlan:
    """Executing the plan twice gives the same bytes (determinism, I7)."""
    state, found, clean, cleaner = plan_inputs.state, plan_inputs.assessment, plan_inputs.clean, plan_inputs.cleaner
    rules = (
        GroupingRules(
            cleaner,
            plan_inputs.left,
            _segments_beginning_leader_epoch(found.covered_segments) | _segments_after_expiring_ones(plan_inputs),
            large=True,
        )
        if state.mirrored
        else GroupingRules(cleaner)
    )
    groups, merged = _choose_groups_to_rewrite(found, clean, rules)
    sources = {segment.id for members in groups for segment in members}
    before = found.clean[-1] if found.clean else None
    if found.dirty and found.dirty[0].start_offset < found.first_dirty:
        before = found.dirty[0]
    cleaned = found.end if found.dirty else found.first_dirty
    return CompactionPlan(
        run_id=create_id(),
        topic=state.topic,
        partition=state.partition,
        incarnation=state.incarnation,
        leader_epoch=leader_epoch,
        now_ms=TimestampMs(plan_inputs.now_ms),
        first_dirty_offset=Offset(found.first_dirty),
        end_offset=Offset(found.end),
        next_dirty_offset=Offset(cleaned),
        high_watermark=state.end_offset + 1,
        # Tombstones of v0 and v1 have no horizon: they are removed by rounds over a dirty range, not by rounds for horizons alone.
        legacy_horizon_ms=before.mtime_ms - cleaner.delete_retention_ms if before and found.dirty else 0,
        vector=state.vector,
        policy=cleaner.cleaner_policy(),
        map_engine=plan_inputs.map_engine,
        fingerprint=plan_inputs.fingerprint,
        producers=plan_inputs.producers,
        tasks=tuple(_task_that_rewrites_group(number, members, plan_inputs, create_id()) for number, members in enumerate(groups)),
        skipped=tuple(SkippedSegment(id=s.id, reason=clean.skip.get(s.id, IDLE)) for s in found.clean if s.id not in sources),
        read=tuple(
            SegmentToRead(id=s.id, reason=MERGED if s.id in merged else clean.read.get(s.id, "it is clean, and its keys may be superseded"))
            for s in found.clean
            if s.id in sources
        ),
    )


def _segments_beginning_leader_epoch(segments: Sequence[RemoteLogSegmentMetadata]) -> frozenset[int]:
    """Return the positions of the segments in which a leader epoch begins. Each of them must be the first segment of its group.

    Brokers look up each epoch separately. If an epoch began inside a group, readers would get that epoch's part of the new segment before
    the part that precedes it (docs/broker-protocol.md, section on ascending order).
    """
    epochs = [{entry.epoch for entry in segment.leader_epochs} for segment in segments]
    return frozenset(number for number, (before, own) in enumerate(pairwise(epochs), start=1) if own - before)


def _segments_after_expiring_ones(plan_inputs: PlanInputs) -> frozenset[int]:
    return frozenset(
        range(
            1,
            count_segments_expiring_soon(
                plan_inputs.state, plan_inputs.assessment.covered_segments, plan_inputs.cleaner, plan_inputs.now_ms
            )
            + 1,
        )
    )


def expiry_margin_ms(state: PartitionStateOrSummary[S]) -> int:
    """A segment that expires within this time is rewritten alone."""
    return max(EXPIRY_MARGIN_MS, 2 * state.last_round_ms)


def count_segments_expiring_soon(state: PartitionStateOrSummary[S], segments: Sequence[S], cleaner: CleanerSettings, now_ms: int) -> int:
    """Count the segments at the beginning that brokers will expire soon; each is rewritten alone.

    In a larger group, records would be kept until the group's last source expires, and some sources would be gone before the group is
    published.

    :param segments: ascending.
    """
    if not state.mirrored or cleaner.retention_ms < 0:
        return 0
    until_ms = now_ms + expiry_margin_ms(state) - cleaner.retention_ms
    return next((number for number, segment in enumerate(segments) if segment.max_timestamp_ms > until_ms), len(segments))


@dataclass(frozen=True)
class GroupingRules:
    """Rules by which neighbouring segments form a group.

    apart: positions of segments that must be the first of their group.
    large: whether segments that are due only for delete horizons are grouped, too (broker-managed tiers).
    """

    cleaner: CleanerSettings
    left: Mapping[str, RemainingSizeBound] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()
    large: bool = False

    def form_groups(self, segments: Sequence[RemoteLogSegmentMetadata], end_offset: int) -> list[list[GroupMemberCandidate]]:
        cleaner = self.cleaner
        members = [GroupMemberCandidate(segment, self.left.get(segment.id)) for segment in segments]
        return group_segments(members, cleaner.segment_bytes, cleaner.segment_index_bytes, end_offset, self._may_join_group)

    def _may_join_group(self, group: list[GroupMemberCandidate], segment: GroupMemberCandidate) -> bool:
        """To undo a round, all sources of a group are copied into one segment (round.restoring); this limits their total size. A segment of
        which no record remains always joins, because a group without any record must be avoided.
        """
        if segment.has_no_remaining_record or all(member.has_no_remaining_record for member in group):
            return True
        most = min(MOST_SOURCES * self.cleaner.segment_bytes, MAX32)
        return sum(member.metadata.size_bytes for member in group) + segment.metadata.size_bytes <= most


def _choose_groups_to_rewrite(
    assessment: _AssessedPartition, clean_verdicts: CleanSegmentVerdicts, grouping_rules: GroupingRules
) -> tuple[list[list[RemoteLogSegmentMetadata]], set[str]]:
    """Return groups, ascending, and the ids of the clean segments that are in a group only because they are small."""
    groups: list[list[RemoteLogSegmentMetadata]] = []
    merged: set[str] = set()
    segments = assessment.covered_segments
    parts = list(accumulate(int(n in grouping_rules.apart) for n in range(len(segments))))
    if not assessment.dirty:
        # Nothing is dirty, so only the segments in which something is due are rewritten.
        due = [n for n, segment in enumerate(segments) if segment.id in assessment.horizon_due or segment.id in clean_verdicts.due]
        if not grouping_rules.large:
            return [[segments[n]] for n in due], set()
        for _, together in groupby(enumerate(due), lambda each: (each[1] - each[0], parts[each[1]])):
            members = [segments[n] for _, n in together]
            groups += [[member.metadata for member in one] for one in grouping_rules.form_groups(members, members[-1].end_offset + 1)]
        return groups, set()
    # A segment that is read in part forms its own group, because joining its neighbours would require reading the rest of it.
    for (skippable, _, _), run in groupby(
        range(len(segments)),
        lambda n: (segments[n].id in clean_verdicts.skip, parts[n], segments[n].id if segments[n].id in clean_verdicts.in_part else ""),
    ):
        numbers = list(run)
        end = segments[numbers[-1] + 1].start_offset if numbers[-1] + 1 < len(segments) else assessment.end
        for grouped in grouping_rules.form_groups([segments[n] for n in numbers], end):
            if skippable and not _is_worth_merging(grouped):
                continue
            groups.append([member.metadata for member in grouped])
            merged.update(member.metadata.id for member in grouped if skippable)
    return groups, merged


def _is_worth_merging(group: Sequence[GroupMemberCandidate]) -> bool:
    """Require at least MERGE_AT_LEAST clean neighbours, none with more than half of the bytes. So each merge of a record at least doubles
    the size of its segment.
    """
    return len(group) >= MERGE_AT_LEAST and 2 * max(member.size for member in group) <= sum(member.size for member in group)


def expected_metadata_record_count(tasks: Sequence[CompactionTask]) -> int:
    """Return an estimate: two for each new and replaced segment, and four for each marker where a leader epoch ends
    (docs/broker-protocol.md).
    """
    segments = sum(1 + len(task.sources) for task in tasks)
    ends = sum(len(task.leader_epochs) - 1 for task in tasks)
    ends += sum(one.leader_epochs[-1].epoch not in {entry.epoch for entry in two.leader_epochs} for one, two in pairwise(tasks))
    return 2 * segments + 4 * ends


def _task_that_rewrites_group(
    group_number: int, segments: Sequence[RemoteLogSegmentMetadata], plan_inputs: PlanInputs, new_segment_id: str
) -> CompactionTask:
    whole = sum(member.size_bytes for member in segments)
    most = sum(GroupMemberCandidate(member, plan_inputs.left.get(member.id)).size for member in segments)
    return CompactionTask(
        group=group_number,
        sources=tuple(member.id for member in segments),
        new_segment_id=new_segment_id,
        start_offset=segments[0].start_offset,
        end_offset=segments[-1].end_offset,
        leader_epochs=merge_segment_lineages([member.leader_epochs for member in segments]),
        mtime_ms=segments[-1].mtime_ms,
        most_bytes=most if most < whole else 0,
        in_part=len(segments) == 1 and segments[0].id in plan_inputs.clean.in_part,
    )
