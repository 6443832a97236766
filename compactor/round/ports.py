"""Values and ports of a round, and its decisions by Bloom filters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

from bloom import sizing
from bloom.sidecar import Sidecar, estimate_union_keys
from bloom.sizing import TRIAL, FilterDesign, are_filters_worthwhile
from compactor.config.settings import CleanerSettings
from compactor.config.units import count_noun, format_size
from compactor.constants import CompactorEpoch
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState, RoundIntent, RoundStage, RoundStageTracker, RunHistoryEntry
from compactor.control.summary import SegmentMetadataOrSummary, sum_filter_stats
from compactor.errors import BadData, NotFound
from compactor.kernels.common import KEY_BYTES
from compactor.model.ids import RoundStatus
from compactor.model.plan import (
    CompactionFailure,
    CompactionPlan,
    CompactionReceipt,
    CompactionTask,
    KeylessRecords,
    KeylessRecordsRefused,
)
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.sidecars import SidecarHead

Stats = dict[str, int | float | str]
FactsT = TypeVar("FactsT")


class RoundPostponedError(Exception):
    """Raised if a round would exceed [publish] metadata_records_per_hour. No plan was announced.

    until_ms: by this machine's clock.
    """

    def __init__(self, reason: str, until_ms: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.until_ms = until_ms


class Undone(Exception):
    """Raised if the open plan cannot be published, or must not be. Nothing of it stays."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Quarantined(Exception):
    """Raised if a partition cannot be cleaned until a person has looked at it. An open plan is undone.

    segment: object key or id of the damaged segment; may be empty.
    """

    def __init__(self, reason: str, segment: str = "", keyless: KeylessRecords | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.segment = segment
        self.keyless = keyless

    @staticmethod
    def by_data(error: BadData | NotFound) -> Quarantined:
        if isinstance(error, NotFound):
            return Quarantined(f"missing object: {error.message}")
        return Quarantined(error.message, error.segment, error.keyless if isinstance(error, KeylessRecordsRefused) else None)

    @staticmethod
    def by_failure(failure: CompactionFailure) -> Quarantined:
        # The message of BadData already begins with its kind.
        named = failure.message.startswith(failure.kind)
        return Quarantined(failure.message if named else f"{failure.kind}: {failure.message}")


@dataclass
class Costs:
    """Resources that a round, or one of its tasks, used; sizes are in bytes.

    bytes_copied: within the store.
    rows: keys that tasks of Spark read; exchanged_bytes: passed between them through scratch objects and the shuffle.
    gate_keys: keys whose latest record the gate checked; gate_coverage: their share of all keys, 0.0 without a gate.
    sidecar_bytes: written.
    """

    bytes_fetched: int = 0
    bytes_copied: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    peak_memory_bytes: int = 0
    map_entries: int = 0
    rows: int = 0
    exchanged_bytes: int = 0
    gate_keys: int = 0
    gate_coverage: float = 0.0
    cpu_seconds: float = 0.0
    sidecar_bytes: int = 0

    def add(self, other: Costs) -> None:
        """For peaks and for ``gate_coverage``, keep the higher value."""
        for name, value in other.__dict__.items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name.startswith(("peak", "gate_coverage")) else mine + value)


@dataclass
class Run:
    """One round over one partition: how far it came, and what it cost.

    state: of the partition, when the round ended.
    plan, stages: once it was announced.
    receipts: of a published plan, also those of earlier attempts.
    reason: why the round waits or why the partition is quarantined; ``segment``: the one concerned.
    undone: why an open plan, of an earlier process or of this one, was undone; empty if none was.
    until_ms: for status waiting, the earliest time at which the round can start.
    expired: segments that retention removed before the round was planned.
    superseded: ids of segments in which the dirty range superseded a record.
    filters: what Bloom filters did, for run history.
    keyless: records of the dirty range without a key.
    bytes_dirty: size of the dirty segments that the round rewrites.
    left_alone: segments that the round skipped, and why, as text (``control.summary``).
    """

    state: PartitionState
    status: RoundStatus = RoundStatus.NOTHING_TO_DO
    plan: CompactionPlan | None = None
    stages: RoundStageTracker = field(default_factory=RoundStageTracker)
    receipts: tuple[CompactionReceipt, ...] = ()
    reason: str = ""
    segment: str = ""
    undone: str = ""
    until_ms: int = 0
    expired: tuple[RemoteLogSegmentMetadata, ...] = ()
    costs: Costs = field(default_factory=Costs)
    superseded: set[str] = field(default_factory=set)
    filters: Stats = field(default_factory=dict)
    keyless: KeylessRecords = field(default_factory=KeylessRecords)
    bytes_dirty: int = 0
    left_alone: str = ""


class Session:
    """A round, as its job and its runner see it. This one serves on executors, with the state that the driver has sent; the driver has its
    own (``round.drive``).
    """

    def __init__(self, run: Run, scratch_prefix: str) -> None:
        self.run = run
        self._scratch_prefix = scratch_prefix

    @property
    def state(self) -> PartitionState:
        """State in which the plan is the open intent."""
        return self.run.state

    @property
    def earlier_scan_results(self) -> tuple[ScratchObject, ...]:
        """Return those of an earlier attempt at the plan."""
        return ()

    def scratch_object_key(self, name: str) -> str:
        """The object is deleted after the run has ended."""
        return f"{self._scratch_prefix}{name}"

    def record_scan_results(self, objects: Sequence[ScratchObject]) -> None:
        """Record them for later attempts. The objects must exist. Raises Fenced."""

    def check(self, *, caller_only_waits: bool = False) -> None:
        """Raise Fenced if another process leads. A call counts as progress, without which the lease is not renewed, unless
        ``caller_only_waits`` is set.
        """

    def check_while_reading(self) -> None:
        """Run ``check``, but ask the control log once a second at most: nothing is written, and a segment may take milliseconds."""
        self.check()


class Job(ABC, Generic[FactsT]):
    """Purpose of a round: compaction, or the publication of other bytes in place of live segments, for which the defaults are."""

    def is_due(self, state: PartitionState) -> bool:
        """Asked before leadership is acquired, too."""
        return True

    def resumption_problem(self, intent: RoundIntent) -> str:
        """Return why an interrupted round of this job must be undone, for instance other settings or versions; empty: it is resumed."""
        return "no process resumed it"

    def log_start(self, state: PartitionState) -> int | None:
        """Return the log start by retention; None if nothing expires. Raises StoreError."""
        return None

    @abstractmethod
    def gather(self, session: Session) -> AbstractContextManager[FactsT | None]:
        """Provide what a plan is made from, under leadership; None if there is nothing to do.

        :raises BadData: or NotFound, GateFailed, StoreError, OutOfBudget, RoundPostponedError. No plan was announced yet.
        """

    @abstractmethod
    def plan(self, facts: FactsT, leader_epoch: CompactorEpoch, new_id: Callable[[], str]) -> CompactionPlan | None:
        """Return None if nothing is to be done. Raises OutOfBudget if a group does not fit the disk budget, RoundPostponedError if the rate
        limit on metadata records does not admit the plan now.
        """

    @abstractmethod
    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, facts: FactsT | None
    ) -> Iterable[CompactionReceipt | CompactionFailure]:
        """Yield one outcome per task, in any order. The driver stops at the first failure.

        Objects are created, never overwritten: an existing object with an equal digest means that the task is done, another digest is a
        failure. Raises StoreError or OutOfBudget if a retry may help; the plan then stays open, to be resumed.

        :param facts: None if an earlier process made the plan.
        """

    def stats(self, run: Run) -> Stats:
        """For run history."""
        return {"bytes_written": sum(receipt.bytes_written for receipt in run.receipts)}

    def on_stage(self, stage: RoundStage, plan: CompactionPlan) -> None:
        """An exception stops the round, which stays in that stage."""


class Withdrawal(Job[None]):
    """Job of a process that cannot do the work of an open round: the round is undone, or published if readers have begun to change over."""

    @override
    def gather(self, session: Session) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def plan(self, facts: None, leader_epoch: CompactorEpoch, new_id: Callable[[], str]) -> None:
        return None

    @override
    def work(self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, facts: None) -> tuple[()]:
        return ()

    @override
    def stats(self, run: Run) -> Stats:
        return {}


RECENT = 5
"""Number of recent rounds whose key counts predict those of the next rounds."""

DEFAULT_KEYS = 100_000
"""Number of keys that filters are designed for before any round has run."""


WRAPPED_BYTES = 50
"""Assumed size in bytes of a message in a compressed wrapper."""

WORTH_ASKING = 0.5
"""Largest false positive rate, for the round's number of keys, at which a filter is still fetched."""


@dataclass(frozen=True)
class BloomFilterUsageStatistics:
    """Segment reads that Bloom filters saved on a partition.

    useless: asked segments that were read because of a false positive.
    bytes_read: bytes of filters read and written.
    bytes_saved: bytes of segments that were not read.
    """

    asked: int = 0
    skipped: int = 0
    useless: int = 0
    bytes_read: int = 0
    bytes_saved: int = 0

    @property
    def are_bloom_filters_worthwhile(self) -> bool:
        """Return whether filters have saved more bytes than they cost; True as long as fewer than TRIAL filters were asked."""
        return are_filters_worthwhile(self.asked, self.bytes_read, self.bytes_saved)

    @property
    def idle_share(self) -> float:
        """Return a default if fewer than TRIAL filters were asked."""
        return (self.skipped + self.useless) / self.asked if self.asked >= TRIAL else sizing.SKIP_RATE

    @property
    def false_positive_rate(self) -> float:
        """Share of the asked segments without a dirty key."""
        idle = self.skipped + self.useless
        return self.useless / idle if idle else 0.0

    def saved_reads_text(self) -> str:
        return (
            f"of {count_noun(self.asked, 'filter')} asked, {self.skipped} saved a read, "
            f"{count_noun(self.useless, 'was a false positive', 'were false positives')} ({100 * self.false_positive_rate:.2g} %); "
            f"{format_size(self.bytes_read)} of filters were read, {format_size(self.bytes_saved)} of segments were not"
        )


def filter_usage_of_runs(runs: Iterable[RunHistoryEntry]) -> BloomFilterUsageStatistics:
    """Runs that the history no longer has are ignored, so that filters are tried again."""
    return filter_usage_of_run(sum_filter_stats(runs))


def filter_usage_of_run(run_stats: Mapping[str, int | float | str]) -> BloomFilterUsageStatistics:
    counts = {name: int(run_stats.get(f"filter_{name}", 0)) for name in ("asked", "skipped", "useless")}
    read = int(run_stats.get("filter_bytes_read", 0)) + int(run_stats.get("filter_bytes_written", 0))
    return BloomFilterUsageStatistics(**counts, bytes_read=read, bytes_saved=int(run_stats.get("bytes_skipped", 0)))


def expected_dirty_keys(cleaner: CleanerSettings, runs: Sequence[RunHistoryEntry], dirty_keys_of_this_round: int) -> int:
    """Return ``bloom_design_keys`` if it is set, else the largest number in this round and the latest ones."""
    if cleaner.bloom_design_keys:
        return cleaner.bloom_design_keys
    brought = [int(run.stats["map_entries"]) for run in runs if run.stats.get("map_entries")][-RECENT:]
    # Too high an estimate costs little: a filter grows with the logarithm of the number of keys.
    return max([dirty_keys_of_this_round, *brought]) or DEFAULT_KEYS


def design_bloom_filter(
    cleaner: CleanerSettings, filter_usage: BloomFilterUsageStatistics, lookups_per_round: int, record_count: int, segment_bytes: int
) -> FilterDesign | None:
    """Return None if filters are off or do not pay.

    :param record_count: records of the segment; after cleaning hardly a key occurs twice.
    """
    if not cleaner.bloom or not filter_usage.are_bloom_filters_worthwhile:
        return None
    return sizing.design_filter(
        record_count,
        lookups_per_round,
        segment_bytes,
        max(filter_usage.idle_share, 0.01),
        max_useless_read_rate=cleaner.bloom_false_positive_rate,
        max_bytes=cleaner.bloom_max_bytes or None,
    )


def choose_key_engine(engine_setting: str, key_count: int, map_budget_bytes: int) -> str:
    """Return the setting, or for ``auto`` memory if the keys fit the map budget, else partitioned."""
    if engine_setting != "auto":
        return engine_setting
    return "memory" if key_count * KEY_BYTES <= map_budget_bytes else "partitioned"


def estimate_record_count(segment: SegmentMetadataOrSummary) -> int:
    # Compressed wrappers of v0 and v1 do not record how many messages they hold, and brokers record no number: the size decides then. A
    # segment has no more records than offsets.
    return segment.records or min(segment.size_bytes // WRAPPED_BYTES, segment.end_offset - segment.start_offset + 1)


def estimate_distinct_keys(sidecar_heads: Sequence[SidecarHead], record_counts: Sequence[int]) -> int:
    """Count one key per record of a segment without a sidecar."""
    known = [head.sidecar for head in sidecar_heads if head.sidecar is not None]
    rest = sum(count for head, count in zip(sidecar_heads, record_counts, strict=True) if head.sidecar is None)
    # Three standard errors (1.6 % each) are added to the estimate; there are never more keys than records.
    return min(sum(record_counts), int(estimate_union_keys(known) * 1.05) + rest)


@dataclass(frozen=True)
class SegmentReadDecisionFromSidecar:
    """Decision before the filter is asked.

    must: why the segment must be read; empty if it need not be.
    may: why the segment can be skipped. Never set together with ``must``.
    askable: whether the segment's filter can show that it has no dirty key.
    for_keys: whether ``must`` is set only because there is no usable filter.
    """

    sidecar: Sidecar | None = field(repr=False)
    must: str = ""
    may: str = ""
    askable: bool = False
    for_keys: bool = False


def delete_horizon_passed_reason(segment: SegmentMetadataOrSummary, now_ms: int) -> str:
    """Return an empty reason if no horizon has passed."""
    return "a delete horizon has passed" if 0 <= segment.due_ms <= now_ms else ""


def decide_by_sidecar(
    head: SidecarHead,
    due_reason: str,
    *,
    dirty_key_count: int,
    filter_usage: BloomFilterUsageStatistics,
    now_ms: int,
    drops_keyless: bool = True,
) -> SegmentReadDecisionFromSidecar:
    """Decide by the head alone.

    :param due_reason: why the segment must be read whatever its sidecar says; empty: none.
    :param dirty_key_count: or a bound on it.
    """
    sidecar = head.sidecar
    if sidecar is None:
        return SegmentReadDecisionFromSidecar(None, must=due_reason or head.problem)
    must = due_reason or sidecar.due.reason_to_read(now_ms, drops_keyless=drops_keyless)
    askable = sidecar.made_for is not None and sidecar.useless_read_probability(dirty_key_count) <= WORTH_ASKING
    if must or dirty_key_count == 0 or sidecar.distinct_keys == 0:
        return SegmentReadDecisionFromSidecar(
            sidecar, must, "" if must else "it has no key" if dirty_key_count else "nothing is due in it", askable and dirty_key_count > 0
        )
    if sidecar.made_for is None:
        return SegmentReadDecisionFromSidecar(sidecar, must="no filter pays for it", for_keys=True)
    if not filter_usage.are_bloom_filters_worthwhile:
        return SegmentReadDecisionFromSidecar(
            sidecar, must=f"filters do not pay on this partition and are off: {filter_usage.saved_reads_text()}", for_keys=True
        )
    if not askable:
        must = f"its filter is made for {sidecar.made_for.probes} keys, and this round brings up to {dirty_key_count}"
        return SegmentReadDecisionFromSidecar(sidecar, must=must, for_keys=True)
    return SegmentReadDecisionFromSidecar(sidecar, askable=True)


@dataclass(frozen=True)
class CleanSegmentVerdicts:
    """Decisions of pass 1, by segment id.

    read, skip: with the reason.
    due: segments that must be read because of outcomes of transactions, with the reason.
    asked: where only the Bloom filter could decide.
    in_part: segments of ``read`` of which reading a part is enough.
    """

    read: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    due: Mapping[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    sidecar_bytes: int = 0
    in_part: frozenset[str] = frozenset()


def build_clean_segment_verdicts(
    decisions: Mapping[str, SegmentReadDecisionFromSidecar],
    reasons_by_filter: Mapping[str, str],
    reasons_by_transactions: Mapping[str, str],
    *,
    asked_segments: Iterable[str],
    dirty_key_count: int,
    sidecar_bytes: int,
    partial_segments: Iterable[str] = (),
) -> CleanSegmentVerdicts:
    read = {
        name: decision.must or reasons_by_filter[name] for name, decision in decisions.items() if decision.must or name in reasons_by_filter
    }
    skip = {
        name: decision.may or f"its filter matches none of {dirty_key_count} keys"
        for name, decision in decisions.items()
        if name not in read
    }
    return CleanSegmentVerdicts(read, skip, reasons_by_transactions, frozenset(asked_segments), sidecar_bytes, frozenset(partial_segments))


def filter_stats(
    verdicts: CleanSegmentVerdicts, plan: CompactionPlan, state: PartitionState, superseded_segments: AbstractSet[str]
) -> Stats:
    """All groups of the round must be written.

    :param superseded_segments: ids of segments in which the dirty range superseded a record.
    """
    skipped = {segment.id for segment in plan.skipped} & verdicts.asked
    return {
        "filter_asked": len(verdicts.asked),
        "filter_skipped": len(skipped),
        # No record of it was superseded, so a false positive of its filter made the round read it.
        "filter_useless": len((verdicts.asked & verdicts.read.keys()) - superseded_segments),
        "filter_bytes_read": verdicts.sidecar_bytes,
        "bytes_skipped": sum(segment.size_bytes for segment in state.live if segment.id in skipped),
    }
