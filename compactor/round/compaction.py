"""One round over one partition of an opened tier, on this machine: facts -> plan -> round -> report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from compactor.cleaner.passes.lanes import Lanes
from compactor.config import Cleaner
from compactor.control import left_alone
from compactor.control.logs import PartitionLog
from compactor.control.ordering import Stage
from compactor.control.ports import Lease, Ports
from compactor.control.savings import expected_of
from compactor.control.state import PartitionState
from compactor.control.summary import PartitionFacts, PartitionSummary
from compactor.errors import BadData, CompactorError, Fenced, Leased, OutOfBudget
from compactor.local.budget import Budget
from compactor.local.staging import group_room
from compactor.model.ids import TopicPartition
from compactor.model.plan import ActiveProducer, CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceKey
from compactor.records.producers import ProducerStates
from compactor.round.drive import RoundResult, run_round
from compactor.round.engines import Engine
from compactor.round.index import CleanInquiry, PassOneFound, PassOneSettings, run_pass_one, what_is_left
from compactor.round.plan import Assessment, RoundFacts, assess, draft, metadata_records, plan_round
from compactor.round.ports import Check, Postponed, Stats, WorkSession, WorkStats
from compactor.round.rewrite import LocalWorker, fingerprint, rules_of
from compactor.round.roles import RoundExtent
from compactor.round.skip import FilterRecord, filter_for, filter_record, filter_stats, keys_to_come, record_of
from compactor.round.sources import Reading, parsed_at_end, reading_of, snapshot_at_end
from compactor.tier.sidecars import Sidecars

OnStage = Callable[[Stage, CompactionPlan], None]
AssessWith = Callable[[PartitionState, Cleaner, int], Assessment[RemoteLogSegmentMetadata]]


@dataclass(frozen=True)
class SegmentDone:
    """``action``: rewritten or skipped."""

    id: str
    action: str
    why: str


@dataclass(frozen=True)
class RoundReport:
    """What ``run`` prints of one partition. Offsets, counts and bytes; ``bytes_read``: segment bytes fetched from the tier;
    ``bytes_written``: of new segments, of which the store has copied ``bytes_copied`` from others.

    ``saved_bytes``: by which the result is smaller than its sources; ``expected_saving_bytes``: what was expected of it before.
    ``segments``: what became of each segment below the round's end, and why; ``filters``: what Bloom filters did; ``useless_rate``: of the
    segments without a dirty key, the share that was read for a filter's wrong answer. ``until_ms``: when what waits may be tried again.
    """

    topic: str
    partition: int
    status: str
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
    expected_saving_bytes: int | None = None
    segments: tuple[SegmentDone, ...] = ()
    filters: FilterRecord = field(default_factory=FilterRecord)
    useless_rate: float = 0.0
    until_ms: int = 0


@dataclass(frozen=True)
class RoundContext:
    """What this process has for rounds over one partition. ``sidecars``: None where there are none to be used (``bloom = false``)."""

    ports: Ports
    lease: Lease
    cleaner: Cleaner
    hash_key: bytes
    sidecars: Sidecars | None
    threads: int
    state_dir: Path
    records_per_hour: int = 0


@dataclass(frozen=True)
class IndexedHere:
    """Pass 1 of this process, and what pass 2 goes on with."""

    found: PassOneFound
    lanes: Lanes
    reading: Reading


@dataclass(frozen=True)
class GatheredRound:
    """``facts`` for the plan. ``indexed``: pass 1, where this process does it; ``disk_bytes``: what each group must fit into, then."""

    facts: RoundFacts
    indexed: IndexedHere | None = None
    disk_bytes: int | None = None


class Round:
    """One round with what one process brings to it (RoundWork in round.ports), and what it cost. Used once."""

    def __init__(
        self,
        context: RoundContext,
        now_ms: int,
        *,
        assess_with: AssessWith = assess,
        on_stage: OnStage = lambda s, p: None,
        disk: Budget | None = None,
        engine: Engine | None = None,
    ) -> None:
        """``now_ms``: the cleaner's clock for a new plan; a resumed plan keeps its own. ``assess_with``: what is due, and up to where.

        ``disk``: the budget of all rounds of this process together (daemon); None: this round has ``disk_budget_bytes`` to itself.
        ``engine``: who does the work; None for this process.
        """
        self._context = context
        self._cleaner = context.cleaner
        self._now_ms = now_ms
        self._assess = assess_with
        self._disk = disk
        self._map_engine = engine.map_engine if engine else ""
        self._stats = WorkStats()
        self._remote = engine.worker_of(self._stats) if engine else None
        self.reached = on_stage

    def run(self, log: PartitionLog) -> RoundReport:
        """Raises Leased, Fenced, StoreError, OutOfBudget; bad data is a report with status quarantined."""
        due = True
        try:
            result = run_round(self._context.ports, log, self._context.lease, self)
            due = result.status == "waiting"
            return _report(result, self._stats)
        finally:
            if log.state.intent is None:  # else whoever goes on with it says the rest
                self._context.ports.publisher.forgo(log.state.name, due=due)

    def due(self, state: PartitionState) -> bool:
        return self._assess(state, self._cleaner, self._now_ms).due

    def resume_problem(self, plan: CompactionPlan) -> str:
        if plan.restores:
            return f"it takes run {plan.restores} back, which only `undo` goes on with"
        if plan.fingerprint != fingerprint():
            return f"it was made by {plan.fingerprint}, this process is {fingerprint()}"
        return "" if plan.policy == self._cleaner.policy() else "the settings have changed since it was made"

    @contextmanager
    def gathered(self, state: PartitionState, check: Check) -> Iterator[GatheredRound | None]:
        now_ms = self._remote.begun_ms(state, self._now_ms, partial(self._draft_at, state)) if self._remote is not None else self._now_ms
        assessment = self._assess(state, self._cleaner, now_ms)
        if not assessment.due:
            yield None
            return
        at_least = [s for s in assessment.segments if s in assessment.dirty or s.id in assessment.horizon_due]
        self._admit(state.name, 2 * (1 + len(at_least)))
        cleaner = self._cleaner
        layout = self._context.ports.layout
        snapshot = snapshot_at_end(layout, state)
        producers = live_producers(parsed_at_end(layout, state, snapshot), now_ms, cleaner.producer_id_expiration_ms)
        facts = RoundFacts(state, assessment, cleaner, now_ms, producers, fingerprint(), self._map_engine, snapshot=snapshot)
        if self._remote is not None:
            try:
                yield GatheredRound(replace(facts, clean=self._remote.scout(facts, check)))
            finally:
                self._remote.close()
            return
        disk = self._budget()
        if max(group_room([segment], cleaner.policy().index_interval_bytes) for segment in at_least) > disk.total:
            check_disk(draft(facts), state, disk.total)
        with self._lanes_and_reading(state, disk) as (lanes, reading):
            found = self._pass_one(facts, lanes, reading, check)
            known = replace(facts, map_engine=found.engine, clean=found.clean, left=what_is_left(found, state) if state.mirrored else {})
            yield GatheredRound(known, IndexedHere(found, lanes, reading), disk.total)

    def _draft_at(self, state: PartitionState, now_ms: int) -> CompactionPlan | None:
        """What would be planned if it were this late; None where nothing were due."""
        assessment = self._assess(state, self._cleaner, now_ms)
        if not assessment.due:
            return None
        return draft(RoundFacts(state, assessment, self._cleaner, now_ms, (), fingerprint(), self._map_engine))

    def plan(self, facts: GatheredRound, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan:
        plan = plan_round(facts.facts, leader_epoch, new_id)
        if facts.disk_bytes is not None:
            check_disk(plan, facts.facts.state, facts.disk_bytes)
        return plan

    def admit(self, plan: CompactionPlan) -> None:
        self._admit(TopicPartition(plan.topic, plan.partition), metadata_records(plan.tasks))

    def _admit(self, name: TopicPartition, records: int) -> None:
        per_hour = self._context.records_per_hour
        wait = self._context.ports.publisher.admit(name, records, per_hour)
        if wait is not None:
            alone = ", for an hour that has none: it is larger than that" if wait.records > per_hour else ""
            behind = f", behind {wait.ahead} that came before it" if wait.ahead else ""
            said = f"metadata_records_per_hour is {per_hour}: a round of about {wait.records} records has to wait{alone}{behind}"
            raise Postponed(said, wait.until_ms)

    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession, facts: GatheredRound | None
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        dirty, saving = expected_of(plan, session.state.live, session.state.runs)
        self._stats.expected = {"bytes_dirty": dirty} | ({} if saving is None else {"expected_saving_bytes": saving})
        why = {segment.id: segment.reason for segment in plan.skipped}
        self._stats.left_alone = left_alone.told(left_alone.ranges(session.state.live, why))
        if self._remote is not None:
            try:
                for outcome in self._remote(plan, tasks, session):
                    if isinstance(outcome, CompactionReceipt) and self._context.ports.brokers is not None:
                        session.check()  # executors tell readers nothing: only who leads does
                        self._context.ports.publisher.begin(TopicPartition(plan.topic, plan.partition), outcome.segment)
                    yield outcome
            finally:
                self._remote.close()
        elif facts is not None and facts.indexed is not None:
            yield from self._worked(plan, tasks, session, facts.indexed.lanes, facts.indexed.reading, facts.indexed.found)
        else:
            with self._lanes_and_reading(session.state, self._budget()) as (lanes, reading):
                yield from self._worked(plan, tasks, session, lanes, reading, None)

    def stats(self, plan: CompactionPlan, receipts: Sequence[CompactionReceipt]) -> Stats:
        return {
            "records_read": sum(r.records_read for r in receipts),
            "records_kept": sum(r.records_kept for r in receipts),
            "bytes_read": self._stats.bytes_fetched,
            **({"bytes_copied": self._stats.bytes_copied} if self._stats.bytes_copied else {}),
            "bytes_before": sum(r.bytes_read for r in receipts),
            "bytes_written": sum(r.bytes_written for r in receipts),
            "peak_disk_bytes": self._stats.peak_disk_bytes,
            "peak_map_bytes": self._stats.peak_map_bytes,
            "map_entries": self._stats.map_entries,
            "gate_keys": self._stats.gate_keys,
            "gate_disk_bytes": self._stats.gate_disk_bytes,
            "filter_bytes_written": self._stats.sidecar_bytes_written,
            **self._stats.filters,
            **self._stats.expected,
            **({left_alone.STAT: self._stats.left_alone} if self._stats.left_alone else {}),
        }

    @contextmanager
    def _lanes_and_reading(self, state: PartitionState, disk: Budget) -> Iterator[tuple[Lanes, Reading]]:
        context = self._context
        reading = reading_of(context.ports, self._cleaner, context.state_dir, state, disk, "round")
        try:
            with Lanes(context.threads) as lanes:
                yield lanes, reading
        finally:
            reading.staging.close()

    def _pass_one(self, facts: RoundFacts, lanes: Lanes, reading: Reading, check: Check) -> PassOneFound:
        """So that the plan can leave out what need not be read."""
        context, cleaner, assessment = self._context, self._cleaner, facts.assessment
        end = assessment.end if assessment.dirty else assessment.first_dirty
        settings = PassOneSettings(
            cleaner.map_engine, cleaner.map_budget_bytes, context.hash_key, lanes, cleaner.verify_before_publish, check
        )
        extent = RoundExtent(assessment.first_dirty, end, rules_of(draft(facts), BalanceKey(context.hash_key)))
        parts = None if cleaner.splice else frozenset[str]()
        return run_pass_one(reading, extent, settings, CleanInquiry(context.sidecars, filter_record(facts.state.runs), in_part=parts))

    def _worked(
        self,
        plan: CompactionPlan,
        tasks: Sequence[CompactionTask],
        session: WorkSession,
        lanes: Lanes,
        reading: Reading,
        found: PassOneFound | None,
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        context, cleaner, state = self._context, self._cleaner, session.state
        keys = found.survivors.keys if found else 0
        yield from LocalWorker(
            layout=context.ports.layout,
            publisher=context.ports.publisher,
            staging=reading.staging,
            hash_key=context.hash_key,
            map_budget_bytes=cleaner.map_budget_bytes,
            threads=context.threads,
            engine=plan.map_engine if plan.map_engine == "partitioned" else "auto",
            verify_before_publish=cleaner.verify_before_publish,
            sidecars=context.sidecars,
            filter_for=partial(filter_for, cleaner, filter_record(state.runs), keys_to_come(cleaner, state.runs, keys)),
            found=found,
            lanes=lanes,
            splices=cleaner.splice,
            stats=self._stats,
        )(plan, tasks, session)
        if found is not None:
            superseded = {state.live[n].id for n in found.survivors.met}
            self._stats.filters = filter_stats(found.clean, plan, state, superseded) | {"passes": found.passes}

    def _budget(self) -> Budget:
        if self._disk is None:
            self._disk = Budget(disk_budget(self._cleaner, self._context.state_dir))
        return self._disk


def check_disk(plan: CompactionPlan, state: PartitionState, disk_bytes: int) -> None:
    """Raises OutOfBudget before anything is announced where the largest group would not fit."""
    live = state.live_by_id()
    interval = plan.policy.index_interval_bytes
    need, group = max(
        (group_room([live[name] for name in task.sources], interval, most_bytes=task.most_bytes), task.group) for task in plan.tasks
    )
    if need > disk_bytes:
        raise OutOfBudget(
            f"group {group} of {state.name} needs {need} bytes of local disk, and the disk budget is {disk_bytes}",
            hint=f"Set disk_budget_bytes to at least {need}, or lower segment_bytes. Nothing was changed",
        )


def live_producers(at_end: ProducerStates, now_ms: int, expiration_ms: int) -> tuple[ActiveProducer, ...]:
    """Producers that a broker would still know: in a transaction, or seen within ``expiration_ms``."""
    entries = at_end.entries
    alive = entries[(entries["txn_first_offset"] >= 0) | (now_ms - entries["timestamp"] < expiration_ms)]
    return tuple(ActiveProducer(producer_id=int(e["producer_id"]), epoch=int(e["epoch"]), last_offset=int(e["last_offset"])) for e in alive)


def disk_budget(cleaner: Cleaner, folder: Path) -> int:
    """``disk_budget_bytes``. ``auto`` is the KIP's chunk rule, min(segment bytes, free / 3), for a source, an output and one to spare."""
    if cleaner.disk_budget_bytes != "auto":
        return cleaner.disk_budget_bytes
    folder.mkdir(parents=True, exist_ok=True)
    return 3 * min(cleaner.segment_bytes, shutil.disk_usage(folder).free // 3)


def _report(result: RoundResult, stats: WorkStats) -> RoundReport:
    state, plan = result.state, result.plan
    base = RoundReport(
        state.topic,
        state.partition,
        result.status,
        state.first_dirty_offset,
        state.first_dirty_offset,
        bytes_read=stats.bytes_fetched,
        bytes_copied=stats.bytes_copied,
        peak_disk_bytes=stats.peak_disk_bytes,
        peak_map_bytes=stats.peak_map_bytes,
        reason=result.reason or result.undone,
        segment=result.segment,
        until_ms=result.until_ms,
    )
    if plan is None or not result.receipts:
        return base
    filters = record_of(stats.filters | {"filter_bytes_written": stats.sidecar_bytes_written})
    cut = sum(receipt.segment.id not in state.published_by for receipt in result.receipts)
    stays = f"brokers had deleted what {cut} of {len(result.receipts)} groups replace: the cleaner offset stays, run again" if cut else ""
    return replace(
        base,
        first_dirty_offset=plan.first_dirty_offset,
        next_dirty_offset=state.first_dirty_offset if cut else plan.next_dirty_offset,
        reason=base.reason or stays,
        segments_in=len(plan.sources) + len(plan.skipped),
        segments_out=len(result.receipts) - cut,
        segments_skipped=len(plan.skipped),
        bytes_written=sum(r.bytes_written for r in result.receipts),
        saved_bytes=sum(r.bytes_read - r.bytes_written for r in result.receipts),
        expected_saving_bytes=stats.expected.get("expected_saving_bytes"),
        records_read=sum(r.records_read for r in result.receipts),
        records_kept=sum(r.records_kept for r in result.receipts),
        map_engine=plan.map_engine,
        passes=int(stats.filters.get("passes", 1)),
        segments=_segments_done(plan),
        filters=filters,
        useless_rate=filters.useless_rate,
    )


def _segments_done(plan: CompactionPlan) -> tuple[SegmentDone, ...]:
    why = {segment.id: segment.reason for segment in plan.read}
    done = [SegmentDone(name, "rewritten", why.get(name, "dirty")) for name in plan.sources]
    return (*done, *(SegmentDone(segment.id, "skipped", segment.reason) for segment in plan.skipped))


def nothing_to_do(cleaner: Cleaner, summary: PartitionSummary, now_ms: int, *, force: bool = False) -> RoundReport | None:
    """The report of a partition that needs no round, by a summary that the tier has just confirmed; None where a round may be due."""
    if summary.open_run or assess(summary, cleaner, now_ms, force=force).due:
        return None
    return RoundReport(summary.topic, summary.partition, "nothing_to_do", summary.first_dirty_offset, summary.first_dirty_offset)


def paused(known: PartitionFacts[Any], why: str) -> RoundReport:
    """The report of a partition over which somebody does not want rounds to be begun."""
    return RoundReport(known.topic, known.partition, "paused", known.first_dirty_offset, known.first_dirty_offset, reason=why)


def not_done(name: TopicPartition, error: CompactorError) -> RoundReport:
    """The report of a partition that could not be worked on (I9): the next run takes it up."""
    status = "leased" if isinstance(error, Leased) else "fenced" if isinstance(error, Fenced) else "quarantined"
    segment = error.segment if isinstance(error, BadData) else ""
    return RoundReport(name.topic, name.partition, status, 0, 0, reason=error.message, segment=segment)
