"""Compaction as the job of a round, its runner in this process, and its report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from compactor.cleaner.worker_threads import WorkerThreads
from compactor.config.settings import CleanerSettings
from compactor.config.units import format_size
from compactor.constants import CompactorEpoch, Offset
from compactor.control import summary as skipped_ranges
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.state import PartitionState, RoundIntent, RoundStage
from compactor.control.summary import PartitionStateOrSummary, PartitionSummary
from compactor.errors import BadData, CompactorError, Fenced, Leased, OutOfBudget
from compactor.local.budget import DiskBudget
from compactor.local.staging import StagingFolder, rewrite_disk_bytes
from compactor.model.ids import RoundStatus, TopicPartition
from compactor.model.plan import ActiveProducer, CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.encode import BalanceDigestKey
from compactor.records.producers import ProducerStates
from compactor.round.drive import run_round
from compactor.round.mirroring import broker_log_start_offset
from compactor.round.pass_one import (
    CleanSegmentSelectionInputs,
    SurvivorScanResult,
    SurvivorScanSettings,
    remaining_size_bounds,
    scan_for_survivors,
)
from compactor.round.pass_two import LocalWorker, retention_rules_of_plan, versions_fingerprint
from compactor.round.plan import (
    PlanInputs,
    RoundAssessment,
    assess_round,
    draft_plan,
    expected_metadata_record_count,
    find_expired_segments,
    keyless_stats,
    plan_round,
    require_keyless_accepted,
)
from compactor.round.ports import (
    BloomFilterUsageStatistics,
    Job,
    Quarantined,
    RoundPostponedError,
    Run,
    Session,
    Stats,
    design_bloom_filter,
    expected_dirty_keys,
    filter_usage_of_run,
    filter_usage_of_runs,
)
from compactor.round.roles import RoundRange
from compactor.round.sources import (
    StagedSegmentReader,
    open_live_segment_reader,
    parse_end_snapshot,
    read_end_snapshot,
)
from compactor.tier.sidecars import SidecarStore

OPEN_ROUND_MAX_MS = 86_400_000
"""A round whose plan was announced longer ago is given up before its publication begins, where brokers expire segments: those in
COPY_SEGMENT_STARTED hold up the expiry of segments behind them.
"""

RoundStageCallback = Callable[[RoundStage, CompactionPlan], None]
RoundAssessmentFunction = Callable[[PartitionState, CleanerSettings, int], RoundAssessment[RemoteLogSegmentMetadata]]


@dataclass(frozen=True)
class RoundActionOnSegment:
    """A segment below the round's end. ``action``: ``rewritten`` or ``skipped``."""

    id: str
    action: str
    why: str


@dataclass(frozen=True)
class RoundReport:
    """Result of one round, as ``run`` prints it. Sizes are in bytes.

    first_dirty_offset, next_dirty_offset: cleaner offset before and after the round.
    bytes_written: size of the new segments, of which the store copied ``bytes_copied``.
    saved_bytes: below 0 if the partition has grown.
    useless_rate: share of the clean segments without a dirty key that was read because of a false positive.
    until_ms: for status waiting, the earliest time at which the round can start.
    segments_expired, bytes_expired: segments that retention removed before the round was planned.
    keyless_records: in the dirty range; refused, dropped or kept.
    """

    topic: str
    partition: int
    status: RoundStatus
    first_dirty_offset: int
    next_dirty_offset: int
    segments_in: int = 0
    segments_out: int = 0
    segments_skipped: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0
    records_read: int = 0
    records_kept: int = 0
    map_engine: str = "memory"
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    reason: str = ""
    segment: str = ""
    passes: int = 0
    saved_bytes: int = 0
    segments: tuple[RoundActionOnSegment, ...] = ()
    filters: BloomFilterUsageStatistics = field(default_factory=BloomFilterUsageStatistics)
    useless_rate: float = 0.0
    until_ms: int = 0
    log_start_offset: int = 0
    segments_expired: int = 0
    bytes_expired: int = 0
    incarnation: int = 1
    keyless_records: int = 0


@dataclass(frozen=True)
class RoundResourcesAndSettings:
    ports: EnvironmentPorts
    lease: LeaseDurations
    cleaner: CleanerSettings
    hash_key: bytes
    sidecars: SidecarStore | None
    threads: int
    state_dir: Path
    records_per_hour: int = 0


class Runner(Protocol):
    """Place where a compaction reads and rewrites segments: threads of this process (``LocalRunner``), or executors of Spark."""

    @property
    def map_engine(self) -> str:
        """Engine of the offset map, as plans record it."""

    @property
    def announces_segments(self) -> bool:
        """Return whether new segments are announced to the publisher before they are written. If not, the driver announces them then."""

    def plan_time_ms(self, state: PartitionState, now_ms: int, draft_at: Callable[[int], CompactionPlan | None]) -> int:
        """Return the time of an interrupted pass 1 for an equal plan, else ``now_ms``.

        :param draft_at: returns the plan that would be made at a time in milliseconds; None if no round would be due then.
        """

    def scan(self, facts: PlanInputs, session: Session) -> AbstractContextManager[PlanInputs]:
        """Run pass 1, and provide the facts with its findings. Inside the block ``work`` uses its result.

        :raises BadData: or StoreError, OutOfBudget, Fenced.
        """

    def require_fits(self, plan: CompactionPlan, state: PartitionState) -> None:
        """Raise OutOfBudget if the largest group of a plan does not fit the disk budget."""

    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, *, is_resumed: bool
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        """See ``Job.work``. ``is_resumed``: pass 1 was run by an earlier process, or must be repeated."""


class Compaction(Job[PlanInputs]):
    """Compaction of one partition. An instance is used once."""

    def __init__(
        self,
        context: RoundResourcesAndSettings,
        now_ms: int,
        runner: Runner,
        *,
        assess_if_round_is_due: RoundAssessmentFunction = assess_round,
        on_stage: RoundStageCallback = lambda s, p: None,
        shares_budgets: bool = False,
    ) -> None:
        """Set up a round.

        :param now_ms: the cleaner's clock for a new plan; a resumed plan keeps its own.
        :param shares_budgets: whether other rounds run in this process at the same time.
        """
        self._context = context
        self._cleaner = context.cleaner
        self._now_ms = now_ms
        self._runner = runner
        self._assess = assess_if_round_is_due
        self._shares_budgets = shares_budgets
        self._on_stage = on_stage

    def run(self, log: PartitionLog) -> RoundReport:
        """Bad data does not raise: the status is then quarantined. Raises Leased, Fenced, StoreError or OutOfBudget."""
        waits = False
        try:
            run = run_round(self._context.ports, log, self._context.lease, self, shares_budgets=self._shares_budgets)
            waits = run.status == RoundStatus.WAITING
            return report_of(run)
        finally:
            if log.state.intent is None and not waits:  # an open intent still has records to write
                self._context.ports.publisher.release_reserved_metadata_records(log.state.topic_partition)

    @override
    def on_stage(self, stage: RoundStage, plan: CompactionPlan) -> None:
        self._on_stage(stage, plan)

    @override
    def is_due(self, state: PartitionState) -> bool:
        return self._assess(state, self._cleaner, self._now_ms).due or self.log_start(state) is not None

    @override
    def log_start(self, state: PartitionState) -> int | None:
        ports = self._context.ports
        now_ms = min(self._now_ms, ports.clock_ms())
        if find_expired_segments(state, self._cleaner, now_ms) is None:
            return None  # without a request: a directory is written to when it is asked for its clock
        expired = find_expired_segments(state, self._cleaner, min(now_ms, ports.control.clock_ms()))
        return expired.log_start_offset if expired else None

    @override
    def resumption_problem(self, intent: RoundIntent) -> str:
        plan = intent.plan
        if plan.restores:
            return f"it takes run {plan.restores} back, which only `undo` continues"
        if plan.fingerprint != versions_fingerprint():
            return f"it was planned by {plan.fingerprint}, this process is {versions_fingerprint()}"
        if plan.policy != self._cleaner.cleaner_policy():
            return "the settings have changed since it was planned"
        return self._too_old_problem(intent)

    def _too_old_problem(self, intent: RoundIntent) -> str:
        ports = self._context.ports
        # Brokers expire no segment behind an open round's new ones until these are published.
        if ports.brokers is None or self._cleaner.retention_ms < 0 or ports.clock_ms() - intent.at_ms <= OPEN_ROUND_MAX_MS:
            return ""
        done, tasks = len(intent.receipts), len(intent.plan.tasks)
        return f"it was open for more than a day, with {done} of {tasks} groups done, and brokers expire nothing after its new segments"

    @override
    @contextmanager
    def gather(self, session: Session) -> Iterator[PlanInputs | None]:
        state, cleaner, layout = session.state, self._cleaner, self._context.ports.layout
        now_ms = self._runner.plan_time_ms(state, self._now_ms, partial(self._draft_at, state))
        assessment = self._assess(state, cleaner, now_ms)
        if not assessment.due:
            yield None
            return
        require_keyless_accepted(state, cleaner, assessment.end)
        self._reserve_records(state.topic_partition, 2 * (1 + len(assessment.least_to_rewrite)))
        snapshot = read_end_snapshot(layout, state)
        producers = unexpired_producers(parse_end_snapshot(layout, state, snapshot), now_ms, cleaner.producer_id_expiration_ms)
        engine = self._runner.map_engine
        facts = PlanInputs(state, assessment, cleaner, now_ms, producers, versions_fingerprint(), engine, snapshot=snapshot)
        with self._runner.scan(facts, session) as scanned:
            yield scanned

    def _draft_at(self, state: PartitionState, now_ms: int) -> CompactionPlan | None:
        assessment = self._assess(state, self._cleaner, now_ms)
        if not assessment.due:
            return None
        return draft_plan(PlanInputs(state, assessment, self._cleaner, now_ms, (), versions_fingerprint(), self._runner.map_engine))

    @override
    def plan(self, facts: PlanInputs, leader_epoch: CompactorEpoch, new_id: Callable[[], str]) -> CompactionPlan:
        plan = plan_round(facts, leader_epoch, new_id)
        if log_start := broker_log_start_offset(self._context.ports, plan.topic_partition):
            plan = plan.model_copy(update={"broker_log_start": Offset(log_start)})
        self._runner.require_fits(plan, facts.state)
        self._reserve_records(plan.topic_partition, expected_metadata_record_count(plan.tasks))
        return plan

    def _reserve_records(self, partition: TopicPartition, record_count: int) -> None:
        per_hour = self._context.records_per_hour
        wait = self._context.ports.publisher.reserve_metadata_records(partition, record_count, per_hour)
        if wait is not None:
            alone = ", for an hour that has none: it is larger than that" if wait.records > per_hour else ""
            detail = f"metadata_records_per_hour is {per_hour}: a round of about {wait.records} records has to wait{alone}"
            raise RoundPostponedError(detail, wait.until_ms)

    @override
    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, facts: PlanInputs | None
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        sources, run = set(plan.source_segment_ids), session.run
        dirty = (one for one in session.state.live if one.id in sources and one.end_offset >= plan.first_dirty_offset)
        run.bytes_dirty = sum(segment.size_bytes for segment in dirty)
        why = {segment.id: segment.reason for segment in plan.skipped}
        run.left_alone = skipped_ranges.format_skipped_ranges(skipped_ranges.skipped_ranges(session.state.live, why))
        ports = self._context.ports
        for outcome in self._runner.work(plan, tasks, session, is_resumed=facts is None):
            if not self._runner.announces_segments and isinstance(outcome, CompactionReceipt) and ports.brokers is not None:
                session.check()  # executors never write metadata; only the leader does
                ports.publisher.announce_segment(plan.topic_partition, outcome.segment)
            yield outcome
            intent = session.state.intent
            if intent is not None and intent.pending_tasks and (problem := self._too_old_problem(intent)):
                raise Quarantined(f"overdue: {problem}")

    @override
    def stats(self, run: Run) -> Stats:
        costs = run.costs
        return {
            "records_read": sum(r.records_read for r in run.receipts),
            "records_kept": sum(r.records_kept for r in run.receipts),
            "bytes_read": costs.bytes_fetched,
            **({"bytes_copied": costs.bytes_copied} if costs.bytes_copied else {}),
            "bytes_before": sum(r.bytes_read for r in run.receipts),
            "bytes_written": sum(r.bytes_written for r in run.receipts),
            "peak_disk_bytes": costs.peak_disk_bytes,
            "peak_map_bytes": costs.peak_map_bytes,
            "map_entries": costs.map_entries,
            "gate_keys": costs.gate_keys,
            "gate_coverage": costs.gate_coverage,
            "filter_bytes_written": costs.sidecar_bytes,
            **run.filters,
            "bytes_dirty": run.bytes_dirty,
            **keyless_stats(run.keyless),
            **({skipped_ranges.SKIPPED_RANGES_STAT: run.left_alone} if run.left_alone else {}),
        }


@dataclass(frozen=True)
class _LocalScan:
    found: SurvivorScanResult
    threads: WorkerThreads
    reader: StagedSegmentReader


class LocalRunner:
    """Threads of this process."""

    map_engine = ""
    announces_segments = True

    def __init__(self, context: RoundResourcesAndSettings, disk_budget: DiskBudget | None = None) -> None:
        """Parameter ``disk_budget``: shared by all rounds of this process; None for ``disk_budget_bytes``."""
        self._context = context
        self._given_disk = disk_budget
        self._scan: _LocalScan | None = None

    @cached_property
    def _disk(self) -> DiskBudget:
        return self._given_disk or DiskBudget(disk_budget_bytes(self._context.cleaner, self._context.state_dir))

    def plan_time_ms(self, state: PartitionState, now_ms: int, draft_at: Callable[[int], CompactionPlan | None]) -> int:
        return now_ms

    @contextmanager
    def scan(self, facts: PlanInputs, session: Session) -> Iterator[PlanInputs]:
        context, cleaner, assessment, state = self._context, self._context.cleaner, facts.assessment, facts.state
        interval = cleaner.cleaner_policy().index_interval_bytes
        if max(rewrite_disk_bytes([segment], interval) for segment in assessment.least_to_rewrite) > self._disk.total:
            require_plan_fits_disk(draft_plan(facts), state, self._disk.total)
        end = assessment.end if assessment.dirty else assessment.first_dirty
        rules = retention_rules_of_plan(draft_plan(facts), BalanceDigestKey(context.hash_key))
        selection = CleanSegmentSelectionInputs(
            context.sidecars, filter_usage_of_runs(state.runs), in_part=None if cleaner.splice else frozenset[str]()
        )
        with self._open_reader(state) as (threads, reader):
            settings = SurvivorScanSettings(
                cleaner.map_engine,
                cleaner.map_budget_bytes,
                context.hash_key,
                threads,
                cleaner.verify_before_publish,
                session.check_while_reading,
                refuses_keyless=cleaner.keyless_records == "refuse",
            )
            found = scan_for_survivors(reader, RoundRange(assessment.first_dirty, end, rules), settings, selection)
            self._scan = _LocalScan(found, threads, reader)
            try:
                left = remaining_size_bounds(found, state) if state.mirrored else {}
                yield replace(facts, map_engine=found.engine, clean=found.clean, left=left)
            finally:
                self._scan = None

    def require_fits(self, plan: CompactionPlan, state: PartitionState) -> None:
        require_plan_fits_disk(plan, state, self._disk.total)

    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, *, is_resumed: bool
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        scan = self._scan
        if scan is None or is_resumed:
            return self._work_anew(plan, tasks, session)
        worker = self._worker(plan, session.state, scan.reader.staging, scan.found.survivors.key_count)
        return worker.work(plan, tasks, session, scan.threads, scan.found)

    def _work_anew(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        with self._open_reader(session.state) as (threads, reader):
            yield from self._worker(plan, session.state, reader.staging, 0).work(plan, tasks, session, threads)

    def _worker(self, plan: CompactionPlan, state: PartitionState, staging: StagingFolder, dirty_keys: int) -> LocalWorker:
        context, cleaner = self._context, self._context.cleaner
        return LocalWorker(
            layout=context.ports.layout,
            publisher=context.ports.publisher,
            staging=staging,
            hash_key=context.hash_key,
            map_budget_bytes=cleaner.map_budget_bytes,
            engine=plan.map_engine if plan.map_engine == "partitioned" else "auto",
            verify_before_publish=cleaner.verify_before_publish,
            sidecars=context.sidecars,
            filter_for=partial(
                design_bloom_filter, cleaner, filter_usage_of_runs(state.runs), expected_dirty_keys(cleaner, state.runs, dirty_keys)
            ),
            splices=cleaner.splice,
        )

    @contextmanager
    def _open_reader(self, state: PartitionState) -> Iterator[tuple[WorkerThreads, StagedSegmentReader]]:
        context = self._context
        reader = open_live_segment_reader(context.ports, context.cleaner, context.state_dir, state, self._disk, "round")
        try:
            with WorkerThreads(context.threads) as threads:
                yield threads, reader
        finally:
            reader.staging.close()


def require_plan_fits_disk(plan: CompactionPlan, state: PartitionState, available_disk_bytes: int) -> None:
    """Raise OutOfBudget if the largest group of a plan does not fit."""
    live = state.live_segments_by_id()
    interval = plan.policy.index_interval_bytes
    need, group = max(
        (rewrite_disk_bytes([live[name] for name in task.sources], interval, max_output_bytes=task.most_bytes), task.group)
        for task in plan.tasks
    )
    if need > available_disk_bytes:
        raise OutOfBudget(
            f"group {group} of {state.topic_partition} needs {format_size(need)} of local disk,"
            f" and the disk budget is {format_size(available_disk_bytes)}",
            hint=f"Set disk_budget_bytes to at least {need}, or lower segment_bytes. Nothing was changed",
        )


def unexpired_producers(states_at_end: ProducerStates, now_ms: int, expiration_ms: int) -> tuple[ActiveProducer, ...]:
    """Return the producers in a transaction, or last seen less than ``expiration_ms`` ago."""
    entries = states_at_end.entries
    alive = entries[(entries["txn_first_offset"] >= 0) | (now_ms - entries["timestamp"] < expiration_ms)]
    return tuple(ActiveProducer(producer_id=int(e["producer_id"]), epoch=int(e["epoch"]), last_offset=int(e["last_offset"])) for e in alive)


def disk_budget_bytes(cleaner: CleanerSettings, folder: Path) -> int:
    """Return the setting; ``auto`` means three times min(segment bytes, free space / 3): room for one source, one output and one to spare.

    :param folder: created if absent.
    """
    if cleaner.disk_budget_bytes != "auto":
        return cleaner.disk_budget_bytes
    folder.mkdir(parents=True, exist_ok=True)
    return 3 * min(cleaner.segment_bytes, shutil.disk_usage(folder).free // 3)


def report_of(run: Run) -> RoundReport:
    state, plan, costs = run.state, run.plan, run.costs
    base = RoundReport(
        state.topic,
        state.partition,
        run.status,
        state.first_dirty_offset,
        state.first_dirty_offset,
        bytes_read=costs.bytes_fetched,
        bytes_copied=costs.bytes_copied,
        peak_disk_bytes=costs.peak_disk_bytes,
        peak_map_bytes=costs.peak_map_bytes,
        reason=run.reason or run.undone,
        segment=run.segment,
        until_ms=run.until_ms,
        log_start_offset=state.log_start,
        segments_expired=len(run.expired),
        bytes_expired=sum(segment.size_bytes for segment in run.expired),
        incarnation=state.incarnation,
        keyless_records=_refused_keyless_records(run) or run.keyless.count,
    )
    if plan is None or not run.receipts:
        return base
    filters = filter_usage_of_run(run.filters | {"filter_bytes_written": costs.sidecar_bytes})
    published = [receipt for receipt in run.receipts if receipt.segment.id in state.published_by]
    unpublished = len(run.receipts) - len(published)
    cut = unpublished if state.first_dirty_offset < plan.next_dirty_offset else 0  # the others have expired
    stays = f"brokers had deleted what {cut} of {len(run.receipts)} groups replace: the cleaner offset stays, run again" if cut else ""
    return replace(
        base,
        first_dirty_offset=plan.first_dirty_offset,
        next_dirty_offset=state.first_dirty_offset if cut else plan.next_dirty_offset,
        reason=base.reason or stays,
        segments_in=len(plan.source_segment_ids) + len(plan.skipped),
        segments_out=len(published),
        segments_skipped=len(plan.skipped),
        bytes_written=sum(r.bytes_written for r in run.receipts),
        saved_bytes=sum(r.bytes_read - r.bytes_written for r in published),
        records_read=sum(r.records_read for r in run.receipts),
        records_kept=sum(r.records_kept for r in run.receipts),
        map_engine=plan.map_engine,
        passes=int(run.filters.get("passes", 1)),
        segments=_round_actions_on_segments(plan),
        filters=filters,
        useless_rate=filters.false_positive_rate,
    )


def _refused_keyless_records(run: Run) -> int:
    why = run.state.quarantine if run.status == RoundStatus.QUARANTINED else None
    return why.keyless.count if why and why.keyless else 0


def _round_actions_on_segments(plan: CompactionPlan) -> tuple[RoundActionOnSegment, ...]:
    why = {segment.id: segment.reason for segment in plan.read}
    done = [RoundActionOnSegment(name, "rewritten", why.get(name, "dirty")) for name in plan.source_segment_ids]
    return (*done, *(RoundActionOnSegment(segment.id, "skipped", segment.reason) for segment in plan.skipped))


def idle_report(cleaner: CleanerSettings, summary: PartitionSummary, now_ms: int, *, force: bool = False) -> RoundReport | None:
    """Return None if a round may be due.

    :param summary: known to be current.
    """
    if summary.open_run or assess_round(summary, cleaner, now_ms, force=force).due or find_expired_segments(summary, cleaner, now_ms):
        return None
    return _report_without_round(summary, RoundStatus.NOTHING_TO_DO)


def paused_round_report(state: PartitionStateOrSummary[Any], reason: str) -> RoundReport:
    return replace(_report_without_round(state, RoundStatus.PAUSED), reason=reason)


def _report_without_round(state: PartitionStateOrSummary[Any], status: RoundStatus) -> RoundReport:
    name, first_dirty = state.topic_partition, state.first_dirty_offset
    return RoundReport(
        name.topic, name.partition, status, first_dirty, first_dirty, log_start_offset=state.log_start, incarnation=name.incarnation
    )


def failed_round_report(partition: TopicPartition, error: CompactorError) -> RoundReport:
    """Other partitions are not affected (isolation, I9)."""
    status = (
        RoundStatus.LEASED if isinstance(error, Leased) else RoundStatus.FENCED if isinstance(error, Fenced) else RoundStatus.QUARANTINED
    )
    segment = error.segment if isinstance(error, BadData) else ""
    return RoundReport(
        partition.topic, partition.partition, status, 0, 0, reason=error.message, segment=segment, incarnation=partition.incarnation
    )
