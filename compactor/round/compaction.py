"""One round over one partition of an opened tier, on this machine: facts -> plan -> round -> report."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from compactor.cleaner.passes.lanes import Lanes
from compactor.config import Cleaner
from compactor.control.logs import PartitionLog
from compactor.control.ordering import Stage
from compactor.control.ports import Lease, Ports
from compactor.control.state import PartitionState
from compactor.control.summary import PartitionSummary
from compactor.errors import BadData, CompactorError, Fenced, Leased, NotFound, OutOfBudget
from compactor.local.budget import Budget
from compactor.local.staging import group_room
from compactor.model.ids import TopicPartition
from compactor.model.plan import ActiveProducer, CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producers import parse_snapshot
from compactor.round.drive import RoundResult, RoundWork, run_round
from compactor.round.engines import Engine, Prospect
from compactor.round.index import Found, Means, Range, Scout
from compactor.round.plan import Assessment, RoundFacts, assess, plan_round
from compactor.round.ports import WorkSession, WorkStats
from compactor.round.rewrite import LocalWorker, fingerprint, rules_of
from compactor.round.skip import FilterRecord, Scouted, filter_for, filter_record, filter_stats, keys_to_come, record_of
from compactor.round.sources import Reading, reading_of
from compactor.tier.ports import SegmentLayout
from compactor.tier.recorded import content
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
    """What ``run`` prints of one partition. Offsets, counts and bytes; ``bytes_read``: segment bytes fetched from the tier.

    ``segments``: what became of each segment below the round's end, and why; ``filters``: what Bloom filters did; ``useless_rate``: of the
    segments without a dirty key, the share that was read for a filter's wrong answer.
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
    records_read: int = 0
    records_kept: int = 0
    map_engine: str = "memory"
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    reason: str = ""
    segment: str = ""
    passes: int = 0
    segments: tuple[SegmentDone, ...] = ()
    filters: FilterRecord = field(default_factory=FilterRecord)
    useless_rate: float = 0.0


@dataclass(frozen=True)
class Workshop:
    """What this process has for rounds over one partition. ``sidecars``: None where there are none to be used (``bloom = false``)."""

    ports: Ports
    lease: Lease
    cleaner: Cleaner
    hash_key: bytes
    sidecars: Sidecars | None
    threads: int
    state_dir: Path


@dataclass
class Bench:
    """Where a round is worked on in this process, from pass 1 to the last upload. ``run_id``: of the plan that ``found`` belongs to."""

    lanes: Lanes
    reading: Reading
    found: Found | None = None
    run_id: str = ""

    def close(self) -> None:
        self.lanes.close()
        self.reading.staging.close()


class Round:
    """What one process brings to a round: work to do it with, and what it cost. Used once."""

    def __init__(
        self,
        shop: Workshop,
        now_ms: int,
        *,
        force: bool = False,
        on_stage: OnStage = lambda s, p: None,
        disk: Budget | None = None,
        engine: Engine | None = None,
        assess_with: AssessWith | None = None,
    ) -> None:
        """``disk``: the budget of all rounds of this process together (daemon); None: this round has ``disk_budget_bytes`` to itself.

        ``engine``: None for this process. ``assess_with``: another range than that of an ordinary round (recompact).
        """
        self._shop = shop
        self._cleaner = shop.cleaner
        self._force = force
        self._disk = disk
        self._map_engine = engine.map_engine if engine else ""
        self._assess_with = assess_with
        self._stats = WorkStats()
        self._remote = engine.worker_of(self._stats) if engine else None
        self._scouted = Scouted()
        self._bench: Bench | None = None
        self.work = RoundWork(
            now_ms=now_ms,
            due=self._due,
            prepare=self._prepare,
            planner=self._plan,
            worker=self._remote or self._worker,
            resumable=self._resume_problem,
            stats_of=self._run_stats,
            on_event=on_stage,
        )

    def run(self, log: PartitionLog) -> RoundReport:
        """Raises Leased, Fenced, StoreError, OutOfBudget; bad data is a report with status quarantined."""
        try:
            return _report(run_round(self._shop.ports, log, self._shop.lease, self.work), self._stats)
        finally:
            self._clear()

    def _assess(self, state: PartitionState) -> Assessment[RemoteLogSegmentMetadata]:
        if self._assess_with is not None:
            return self._assess_with(state, self._cleaner, self.work.now_ms)
        return assess(state, self._cleaner, self.work.now_ms, force=self._force)

    def _due(self, state: PartitionState) -> bool:
        return self._assess(state).due

    def _prepare(self, state: PartitionState, now_ms: int, check: Callable[[], object]) -> None:
        """Pass 1, so that the plan can leave out what need not be read."""
        self._clear()
        found = self._assess(state)
        if not found.due:
            return

        def drafted() -> CompactionPlan:
            return self._planned(state, found, RoundFacts(self._producers(state), fingerprint(), ""), -1, lambda: "")

        if self._remote is not None:
            self._scouted = self._remote.scout(Prospect(state, found, drafted, check))
            return
        draft = drafted()
        at_least = [segment for segment in found.segments if segment in found.dirty or segment.id in found.horizon_due]
        if max(group_room([segment], draft.policy.index_interval_bytes) for segment in at_least) > self._budget().total:
            self._check_disk(draft, state)
        bench = self._bench = self._new_bench(state)
        scout = Scout(
            bench.reading,
            Range(found.first_dirty, found.end if found.dirty else found.first_dirty, rules_of(draft)),
            Means(
                self._cleaner.map_engine,
                self._cleaner.map_budget_bytes,
                self._shop.hash_key,
                bench.lanes,
                self._cleaner.verify_before_publish,
                check,
            ),
            self._shop.sidecars,
            filter_record(state.runs),
        )
        bench.found = scout.run()
        self._scouted = bench.found.scouted

    def _plan(self, state: PartitionState, now_ms: int, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan | None:
        found = self._assess(state)
        if not found.due:
            return None
        clean = self._scouted
        facts = RoundFacts(self._producers(state), fingerprint(), self._map_engine, clean.skip, clean.read, clean.due)
        if self._remote is not None:
            return self._planned(state, found, facts, leader_epoch, new_id)
        if self._bench is None or self._bench.found is None:
            raise CompactorError("a round is planned before pass 1", hint="This is a bug; please report it")
        plan = self._planned(state, found, replace(facts, map_engine=self._bench.found.engine), leader_epoch, new_id)
        self._check_disk(plan, state)
        self._bench.run_id = plan.run_id
        return plan

    def _planned(
        self,
        state: PartitionState,
        found: Assessment[RemoteLogSegmentMetadata],
        facts: RoundFacts,
        leader_epoch: int,
        new_id: Callable[[], str],
    ) -> CompactionPlan:
        return plan_round(state, found, facts, self._cleaner, self.work.now_ms, leader_epoch, new_id)

    def _producers(self, state: PartitionState) -> tuple[ActiveProducer, ...]:
        return live_producers(self._shop.ports.layout, state, self.work.now_ms, self._cleaner.producer_id_expiration_ms)

    def _new_bench(self, state: PartitionState) -> Bench:
        reading = reading_of(self._shop.ports, self._cleaner, self._shop.state_dir, state, self._budget(), "round")
        return Bench(Lanes(self._shop.threads), reading)

    def _clear(self) -> None:
        if self._bench is not None:
            self._bench.close()
            self._bench = None
        if self._remote is not None:
            self._remote.close()

    def _budget(self) -> Budget:
        if self._disk is None:
            self._disk = Budget(disk_budget(self._cleaner, self._shop.state_dir))
        return self._disk

    def _check_disk(self, plan: CompactionPlan, state: PartitionState) -> None:
        """Raises OutOfBudget before anything is announced where the largest group would not fit."""
        live = state.live_by_id()
        interval = plan.policy.index_interval_bytes
        need, group = max((group_room([live[name] for name in task.sources], interval), task.group) for task in plan.tasks)
        if need > self._budget().total:
            raise OutOfBudget(
                f"group {group} of {state.name} needs {need} bytes of local disk, and the disk budget is {self._budget().total}",
                hint=f"Set disk_budget_bytes to at least {need}, or lower segment_bytes. Nothing was changed",
            )

    def _resume_problem(self, plan: CompactionPlan) -> str:
        """Why this process cannot go on with a plan that it finds open."""
        if plan.fingerprint != fingerprint():
            return f"it was made by {plan.fingerprint}, this process is {fingerprint()}"
        return "" if plan.policy == self._cleaner.policy() else "the settings have changed since it was made"

    def _worker(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        state = session.state
        if self._bench is None or self._bench.run_id != plan.run_id:
            self._clear()
            self._bench = self._new_bench(state)
        bench, cleaner = self._bench, self._cleaner
        keys = bench.found.survivors.keys if bench.found else 0
        try:
            yield from LocalWorker(
                layout=self._shop.ports.layout,
                publisher=self._shop.ports.publisher,
                staging=bench.reading.staging,
                hash_key=self._shop.hash_key,
                map_budget_bytes=cleaner.map_budget_bytes,
                threads=self._shop.threads,
                engine=plan.map_engine if plan.map_engine == "partitioned" else "auto",
                verify_before_publish=cleaner.verify_before_publish,
                sidecars=self._shop.sidecars,
                filter_for=partial(filter_for, cleaner, filter_record(state.runs), keys_to_come(cleaner, state.runs, keys)),
                found=bench.found,
                lanes=bench.lanes,
                stats=self._stats,
            )(plan, tasks, session)
            if bench.found is not None:
                superseded = {state.live[n].id for n in bench.found.survivors.met}
                self._stats.filters = filter_stats(bench.found.scouted, plan, state, superseded) | {"passes": bench.found.passes}
        finally:
            self._clear()

    def _run_stats(self, plan: CompactionPlan, receipts: Sequence[CompactionReceipt]) -> dict[str, int | float | str]:
        return {
            "records_read": sum(r.records_read for r in receipts),
            "records_kept": sum(r.records_kept for r in receipts),
            "bytes_read": self._stats.bytes_fetched,
            "bytes_before": sum(r.bytes_read for r in receipts),
            "bytes_written": sum(r.bytes_written for r in receipts),
            "peak_disk_bytes": self._stats.peak_disk_bytes,
            "peak_map_bytes": self._stats.peak_map_bytes,
            "map_entries": self._stats.map_entries,
            "gate_coverage": self._stats.gate_coverage,
            "filter_bytes_written": self._stats.sidecar_bytes_written,
            **self._stats.filters,
        }


def live_producers(layout: SegmentLayout, state: PartitionState, now_ms: int, expiration_ms: int) -> tuple[ActiveProducer, ...]:
    """Producers at the tier's end that a broker would still know: in a transaction, or seen within ``expiration_ms``.

    Raises BadData where the snapshot of the last segment is missing or cannot be read.
    """
    last = state.live[-1]
    if "snapshot" not in last.files:
        return ()
    key = layout.where(state.name, last, "snapshot")
    try:
        entries = parse_snapshot(content(layout, state.name, last, "snapshot"), key).entries
    except NotFound:
        raise BadData("a producer snapshot is missing in the store", segment=key, hint="Run `verify`; restore the object") from None
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
        peak_disk_bytes=stats.peak_disk_bytes,
        peak_map_bytes=stats.peak_map_bytes,
        reason=result.reason or result.undone,
        segment=result.segment,
    )
    if plan is None or not result.receipts:
        return base
    filters = record_of(stats.filters | {"filter_bytes_written": stats.sidecar_bytes_written})
    return replace(
        base,
        first_dirty_offset=plan.first_dirty_offset,
        next_dirty_offset=plan.next_dirty_offset,
        segments_in=len(plan.sources) + len(plan.skipped),
        segments_out=len(result.receipts),
        segments_skipped=len(plan.skipped),
        bytes_written=sum(r.bytes_written for r in result.receipts),
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


def not_done(name: TopicPartition, error: CompactorError) -> RoundReport:
    """The report of a partition that could not be worked on (I9): the next run takes it up."""
    status = "leased" if isinstance(error, Leased) else "fenced" if isinstance(error, Fenced) else "quarantined"
    segment = error.segment if isinstance(error, BadData) else ""
    return RoundReport(name.topic, name.partition, status, 0, 0, reason=error.message, segment=segment)
