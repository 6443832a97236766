"""Pages of daemon and agent. Pure, except for asking the service."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import ClassVar, Literal

from compactor import __version__
from compactor.config.settings import CleanerSettings
from compactor.config.times import format_clock_time
from compactor.config.units import count_noun, format_size
from compactor.constants import DAY_MS, NEVER_MS
from compactor.control.state import CompactorEpochAndEnding, RunHistoryEntry
from compactor.control.summary import LastRoundSummary, PartitionSummary
from compactor.daemon.metrics import daemon_metrics
from compactor.daemon.scheduling import (
    DaemonAction,
    Due,
    OutputSchedule,
    PartitionCondition,
    PartitionSchedule,
    partition_condition,
    planned_action,
)
from compactor.daemon.status import DaemonStatus, HourlyStorageFigures, PartitionDetails, RunningJobSnapshot
from compactor.errors import BlockedCause
from compactor.features.agent.plan import PartitionUploadState, UploadFailureReason, UploadLag, upload_lag
from compactor.features.agent.status import AgentStatus, agent_metrics
from compactor.model.ids import RoundStatus, TopicPartition
from compactor.service import ServiceStatus
from compactor.service_metrics import render_metrics
from compactor.views.forecast import NO_PRICES, PriceTable
from compactor.views.verdict import PartitionVerdict, VerdictKind
from compactor.web.console import ItemT, PartitionListColumn, PartitionListQuery, list_partitions_page, offset_axis
from compactor.web.documents import (
    STATE_WORDS,
    AgentTotals,
    CompactorEpochSpan,
    DaemonPartitionPageDocument,
    DaemonPartitionRow,
    DaemonTotals,
    EffectiveCleanerSettings,
    HourlyStorageBytes,
    Level,
    NextPartitionAction,
    PartitionNeedingAttention,
    PartitionOutputState,
    PartitionUploadDocument,
    PartitionUploadRow,
    PartitionVerdictEntry,
    RecentRound,
    RoundEntryWithCosts,
    RoundOutcome,
    RowT,
    RunningJobProgress,
    SegmentPendingUpload,
    ServiceStatusDocument,
    ServiceVerdict,
    TopicsDocument,
    TopicTotalsRow,
    TotalsT,
    WorkScanTimes,
)

RUNBOOK_FILE = "docs/operating.md"
"""The runbook, where ``runbook_url`` is not set."""
MOST_SHOWN = 20
"""Largest number of partitions under "needs attention"."""
ORDER = {condition: place for place, condition in enumerate(PartitionCondition)}
"""The list's default order: the most urgent first."""


def runbook_link(runbook_url: str, section: str) -> str:
    return f"{runbook_url or RUNBOOK_FILE}#{section}"


def service_status_document(
    document_class: type[ServiceStatusDocument[TotalsT, RowT]],
    kind: Literal["daemon", "agent"],
    status: ServiceStatus,
    partitions: Sequence[ItemT],
    columns: Mapping[str, PartitionListColumn[ItemT]],
    query: PartitionListQuery,
    make_row: Callable[[ItemT], RowT],
    *,
    totals: TotalsT,
    needs_attention: Sequence[PartitionNeedingAttention],
    running_jobs: Sequence[RunningJobProgress],
    due_partitions: int,
) -> ServiceStatusDocument[TotalsT, RowT]:
    """Document of a service's first page. ``totals.attention_partitions`` counts all of ``needs_attention``, of which some are shown."""
    counts = Counter(each.condition for each in partitions)
    return document_class(
        kind=kind,
        version=__version__,
        holder=status.holder,
        tier=status.tier,
        now_ms=status.now_ms,
        started_ms=status.started_ms,
        ready=status.ready,
        verdict=service_verdict(
            ready=status.ready,
            stopping=status.stopping,
            problem=status.problem,
            has_scanned=status.scans > 0,
            failing_partitions=totals.attention_partitions,
            running_jobs=len(running_jobs),
            due_partitions=due_partitions,
        ),
        looks=WorkScanTimes(count=status.scans, last_ms=status.scan_ms or None, interval_ms=status.interval_ms),
        totals=totals,
        needs_attention=tuple(needs_attention),
        at_work=tuple(running_jobs),
        conditions={chip.value: counts[chip] for chip in PartitionCondition},
        partitions=list_partitions_page(partitions, query, columns, make_row),
    )


def partition_command(verb: str, partition: TopicPartition, config_path: str) -> str:
    return f"tiered-compactor {verb} {partition}" + (f" --config {shlex.quote(config_path)}" if config_path else "")


def service_verdict(
    *, ready: bool, stopping: bool, problem: str, has_scanned: bool, failing_partitions: int, running_jobs: int, due_partitions: int
) -> ServiceVerdict:
    """Service's condition at a glance. ready: whether the latest scan for work succeeded. problem: why the service cannot work; may be
    empty.
    """
    level, text, detail = _verdict_parts(
        ready=ready, stopping=stopping, problem=problem, has_scanned=has_scanned, failing_partitions=failing_partitions
    )
    doing = [count_noun(running_jobs, "job") + " at work"] if running_jobs else []
    doing += [count_noun(due_partitions, "partition") + " due"] if due_partitions else []
    return ServiceVerdict(level=level, text=text, detail=detail or ", ".join(doing) or "No job runs, and no partition is due")


def _verdict_parts(*, ready: bool, stopping: bool, problem: str, has_scanned: bool, failing_partitions: int) -> tuple[Level, str, str]:
    if stopping:
        return "stopping", "Stopping", "The next start continues running jobs"
    if problem:
        return "down", "It cannot work", problem
    if not has_scanned or not ready:
        return "starting", "Starting", "The first scan of all partitions is running"
    if failing_partitions:
        return "attention", f"{count_noun(failing_partitions, 'partition')} {'needs' if failing_partitions == 1 else 'need'} you", ""
    return "ok", "All well", ""


def topics_document(status: DaemonStatus, cleaner_settings_for_topic: Callable[[str], CleanerSettings]) -> TopicsDocument:
    by_topic: dict[str, list[PartitionSchedule]] = defaultdict(list)
    for schedule in status.schedules:
        by_topic[schedule.partition.topic].append(schedule)
    rows = [_topic_row(topic, found, status, cleaner_settings_for_topic(topic)) for topic, found in by_topic.items()]
    rows.sort(key=lambda row: (-row.bytes, row.topic))
    return TopicsDocument(version=__version__, tier=status.tier, now_ms=status.now_ms, topics=tuple(rows))


def _topic_row(topic: str, schedules: Iterable[PartitionSchedule], status: DaemonStatus, cleaner: CleanerSettings) -> TopicTotalsRow:
    found = list(schedules)
    statuses = [schedule.due.summary for schedule in found if schedule.due is not None]
    rounds = [each.last_round for each in statuses if each.last_round is not None and each.last_round.bytes_after >= 0]
    return TopicTotalsRow(
        topic=topic,
        partitions=len(found),
        attention_partitions=sum(bool(schedule.blocked_reason) for schedule in found),
        due_partitions=sum(schedule.startable is not None for schedule in found),
        segments=sum(each.segments for each in statuses),
        bytes=sum(each.bytes for each in statuses),
        dirty_bytes=sum(schedule.due.dirty_bytes for schedule in found if schedule.due is not None),
        waiting_bytes=sum(each.waiting_bytes for each in statuses),
        saved_bytes=sum(max(0, each.bytes_before - each.bytes_after) for each in rounds),
        policy=EffectiveCleanerSettings(**{name: getattr(cleaner, name) for name in EffectiveCleanerSettings.model_fields}),
        week=hourly_storage_bytes(status.trend.topics.get(topic, ())),
    )


def hourly_storage_bytes(hours: Iterable[HourlyStorageFigures]) -> tuple[HourlyStorageBytes, ...]:
    return tuple(
        HourlyStorageBytes(hour_ms=each.hour_ms, stored_bytes=each.stored, dirty_bytes=each.dirty, reclaimed_bytes=each.reclaimed)
        for each in hours
    )


def queue_empty_ms(status: DaemonStatus, due_bytes: int) -> int | None:
    """Time when all due rounds will be done at this process's speed; None if nothing is due, or it has finished no round."""
    totals, key = status.totals, (DaemonAction.ROUND.value, RoundStatus.CLEANED.value)
    seconds = totals.durations[key].total if key in totals.durations else 0.0
    if not due_bytes or not seconds or not totals.round_bytes_read:
        return None
    at_once = max(1, sum(work.job.action is DaemonAction.ROUND for work in status.running_jobs))
    return status.now_ms + int(1000 * due_bytes * seconds / totals.round_bytes_read / at_once)


# The daemon's pages.


MOST_RECENT_ROUNDS = 8


@dataclass(frozen=True)
class _DaemonPartitionEntry:
    schedule: PartitionSchedule
    name: str
    condition: PartitionCondition
    now_ms: int

    @property
    def dirty_ratio(self) -> float:
        return self.schedule.due.dirty_ratio if self.schedule.due else -1.0

    @property
    def live_bytes(self) -> int:
        return self.schedule.due.summary.bytes if self.schedule.due else -1

    @property
    def last_round_ended_ms(self) -> int:
        last = self.schedule.due.summary.last_round if self.schedule.due else None
        return last.ended_ms if last is not None else -1


RUNBOOK_SECTIONS = {
    "quarantined": "when-a-partition-is-quarantined",
    "failing": "alert-tieredcompactorroundsfail",
    "unreadable": "alert-tieredcompactoruncleanablepartitions",
    "blocked": "when-a-partition-is-blocked",
}
"""Section of the runbook for each kind of block."""


PARTITION_COLUMNS: dict[str, PartitionListColumn[_DaemonPartitionEntry]] = {
    "state": PartitionListColumn(lambda seen: (ORDER[seen.condition], seen.schedule.partition)),
    "name": PartitionListColumn(lambda seen: (seen.schedule.partition,)),
    "dirty": PartitionListColumn(lambda seen: (seen.dirty_ratio, seen.schedule.partition), descending=True),
    "size": PartitionListColumn(lambda seen: (seen.live_bytes, seen.schedule.partition), descending=True),
    "round": PartitionListColumn(lambda seen: (seen.last_round_ended_ms, seen.schedule.partition), descending=True),
    "next": PartitionListColumn(lambda seen: (planned_action(seen.schedule, seen.now_ms).at_ms, seen.schedule.partition)),
}


@dataclass(frozen=True)
class DaemonPages:
    """Pages of a daemon.

    config: path of the configuration file, for commands on pages.
    runbook_url: empty for the runbook in the documentation.
    """

    status: Callable[[], DaemonStatus]
    details: Callable[[TopicPartition], PartitionDetails | None]
    config: str = ""
    prices: PriceTable = NO_PRICES
    runbook_url: str = ""
    cleaner_settings_for_topic: Callable[[str], CleanerSettings] = field(default=lambda topic: CleanerSettings())
    template: ClassVar[str] = "daemon.html"
    partition_template: ClassVar[str] = "partition.html"
    looks_for: ClassVar[str] = "work"

    def health_status(self) -> DaemonStatus:
        return self.status()

    def metrics_text(self, *, with_kafka_names: bool) -> bytes:
        return render_metrics(daemon_metrics(self.status(), include_kafka_names=with_kafka_names))

    def status_page_document(self, query: PartitionListQuery) -> ServiceStatusDocument[DaemonTotals, DaemonPartitionRow]:
        status = self.status()
        working = {work.job.partition for work in status.running_jobs}
        seen = [
            _DaemonPartitionEntry(w, str(w.partition), partition_condition(w, is_job_running=w.partition in working), status.now_ms)
            for w in status.schedules
        ]
        failing_partitions = sorted(
            (each.schedule for each in seen if each.condition is PartitionCondition.ATTENTION),
            key=lambda w: (-(w.verdict.since_ms if w.verdict else 0), w.partition),
        )
        totals = _daemon_totals(status, len(failing_partitions))
        return service_status_document(
            ServiceStatusDocument[DaemonTotals, DaemonPartitionRow],
            "daemon",
            status,
            seen,
            PARTITION_COLUMNS,
            query,
            lambda each: _daemon_partition_row(each.schedule, each.condition, status.now_ms),
            totals=totals,
            needs_attention=[
                _failing_partition_entry(schedule, status.now_ms, self.config, self.runbook_url)
                for schedule in failing_partitions[:MOST_SHOWN]
            ],
            running_jobs=[_running_job_entry(work, status.now_ms) for work in sorted(status.running_jobs, key=lambda work: work.begun_ms)],
            due_partitions=totals.due_partitions,
        )

    def topics_document(self) -> TopicsDocument:
        return topics_document(self.status(), self.cleaner_settings_for_topic)

    def partition_document(self, partition: TopicPartition) -> DaemonPartitionPageDocument | None:
        found = self.details(partition)
        if found is None:
            return None
        schedule, history, due, output = found.schedule, found.history, found.schedule.due, found.schedule.output
        seen = due.summary if due else None
        row = _daemon_partition_row(schedule, partition_condition(schedule, is_job_running=found.running_job is not None), found.now_ms)
        return DaemonPartitionPageDocument(
            version=__version__,
            now_ms=found.now_ms,
            row=row,
            output=_partition_output_state(output, seen) if output and seen and (output.content or output.problem) else None,
            attention=_failing_partition_entry(schedule, found.now_ms, self.config, self.runbook_url) if schedule.blocked_reason else None,
            at_work=_running_job_entry(found.running_job, found.now_ms) if found.running_job else None,
            axis=offset_axis(due, found.segments, history) if due is not None and due.summary.segments else None,
            leader_epoch=seen.leader.epoch if seen is not None and seen.leader is not None else None,
            fenced_appends=history.fenced if history else None,
            rounds=tuple(_round_entry(run, self.prices) for run in reversed(history.runs)) if history else (),
            prices=str(self.prices) if self.prices.stored_gib_month_usd else "",
            compactor_epochs=tuple(_compactor_epoch_entry(entry) for entry in reversed(history.epochs)) if history else (),
            commands=tuple(
                partition_command(verb, partition, self.config)
                for verb in ("explain", "plan", "runs list", "checkpoints lineage", "verify")
            ),
        )


def _partition_output_state(output: OutputSchedule, status: PartitionSummary) -> PartitionOutputState:
    content = output.content
    lag = status.first_dirty_offset - content.end_offset if content else None
    return PartitionOutputState(
        end_offset=content.end_offset if content else None,
        lag_offsets=lag,
        lag_since_ms=status.last_round.ended_ms if lag and status.last_round else None,
        files=content.files if content else None,
        snapshots=content.snapshots if content else None,
        problem=output.problem or (content.waits_for if content else ""),
    )


def _daemon_totals(status: DaemonStatus, failing_partitions: int) -> DaemonTotals:
    judged = [schedule.due for schedule in status.schedules if schedule.due is not None]
    statuses = [each.summary for each in judged]
    due = [startable for schedule in status.schedules if (startable := schedule.startable) is not None]
    moments = [partition.retire_at_ms for partition in judged if partition.retire_at_ms < NEVER_MS]
    yesterday_ms = status.now_ms - DAY_MS
    return DaemonTotals(
        partitions=len(status.schedules),
        segments=sum(partition.segments for partition in statuses),
        stored_bytes=sum(partition.bytes + partition.waiting_bytes for partition in statuses),
        dirty_bytes=sum(partition.dirty_bytes for partition in judged),
        reclaimed_24h_bytes=sum(size for partition in judged for at_ms, size in partition.freed if yesterday_ms < at_ms <= status.now_ms),
        reclaimed_since_ms=yesterday_ms,
        waiting_bytes=sum(partition.waiting_bytes for partition in statuses),
        waiting_partitions=len(moments),
        waiting_due_ms=min(moments, default=None),
        blocked_bytes=sum(each.verdict.waiting_bytes for each in status.schedules_with_blocked_rounds if each.verdict is not None),
        due_partitions=len(due),
        due_bytes=(due_bytes := sum(partition.dirty_bytes for partition in due)),
        queue_empty_ms=queue_empty_ms(status, due_bytes),
        attention_partitions=failing_partitions,
        requests=status.usage.total_requests,
        disk_used_bytes=status.disk_used,
        disk_budget_bytes=status.disk_total,
        week=hourly_storage_bytes(status.trend.hours),
        recent_rounds=_recent_rounds(statuses),
    )


def _recent_rounds(statuses: Sequence[PartitionSummary]) -> tuple[RecentRound, ...]:
    found = [(seen.last_round.ended_ms, str(seen.topic_partition), seen.last_round) for seen in statuses if seen.last_round is not None]
    newest = nlargest(MOST_RECENT_ROUNDS, found, key=lambda each: each[:2])
    return tuple(RecentRound(partition=name, round=_round_outcome(last)) for _, name, last in newest)


def _failing_partition_entry(schedule: PartitionSchedule, now_ms: int, config_path: str, runbook_url: str) -> PartitionNeedingAttention:
    step, verdict = planned_action(schedule, now_ms), schedule.verdict
    if verdict is None:
        raise AssertionError("a partition without a verdict is not blocked")
    quarantine = schedule.due.summary.quarantine if schedule.due else None
    kind = _kind_of_block(schedule, verdict)
    failures = {"unreadable": schedule.poll_failures, "failing": schedule.failures}.get(kind, quarantine.failures if quarantine else 0)
    verbs = {"unreadable": ("verify", "explain"), "blocked": ("explain", "plan")}.get(kind, ("explain", "run"))
    return PartitionNeedingAttention(
        partition=str(schedule.partition),
        kind=kind,
        reason=verdict.reason,
        cause=verdict.cause,
        waiting_bytes=verdict.waiting_bytes,
        next_step=verdict.next_step,
        segment=quarantine.segment if quarantine is not None and kind == "quarantined" else "",
        since_ms=verdict.since_ms or None,
        failures=failures,
        next_try_ms=step.at_ms if step.at_ms < NEVER_MS else None,
        commands=tuple(partition_command(verb, schedule.partition, config_path) for verb in verbs),
        runbook=runbook_link(runbook_url, RUNBOOK_SECTIONS[kind]),
    )


def _kind_of_block(schedule: PartitionSchedule, verdict: PartitionVerdict) -> str:
    if schedule.suspended is not None:
        return "blocked"
    if schedule.unreadable:
        return "unreadable"
    if schedule.problem:
        return "failing"
    return "quarantined" if verdict.cause == BlockedCause.DAMAGE else "blocked"


def _running_job_entry(job: RunningJobSnapshot, now_ms: int) -> RunningJobProgress:
    return RunningJobProgress(
        partition=str(job.job.partition),
        action=job.job.action.value,
        phase=job.phase,
        run=job.run_id,
        begun_ms=job.begun_ms,
        elapsed_ms=max(0, now_ms - job.begun_ms),
        done=job.done if job.unit else None,
        total=job.total or None,
        unit=job.unit,
        share=round(job.share, 4) if job.total or job.phase == "close" else None,
        expected_end_ms=job.expected_end_ms or None,
    )


def _describe_partition_condition(condition: PartitionCondition, due: Due | None, verdict: PartitionVerdict | None, now_ms: int) -> str:
    """Text such as ``Clean, 33.8 MiB in grace until 18:51 UTC`` or ``Waiting until 18:51 UTC``."""
    if verdict is not None and verdict.kind is VerdictKind.WAITING and condition is not PartitionCondition.WORKING:
        return "Waiting" + (f" until {format_clock_time(verdict.until_ms, now_ms)}" if verdict.until_ms else "")
    if verdict is not None and verdict.is_blocked:
        return "Blocked"
    if condition is not PartitionCondition.WAITING or due is None or due.retire_at_ms >= NEVER_MS:
        return STATE_WORDS[condition.value]
    until = "in grace until " + format_clock_time(due.retire_at_ms, now_ms) if due.retire_at_ms > now_ms else "past its grace"
    return f"Clean, {format_size(due.summary.waiting_bytes)} {until}"


def _daemon_partition_row(schedule: PartitionSchedule, condition: PartitionCondition, now_ms: int) -> DaemonPartitionRow:
    due, step, verdict = schedule.due, planned_action(schedule, now_ms), schedule.verdict
    seen = due.summary if due else None
    return DaemonPartitionRow(
        partition=str(schedule.partition),
        condition=condition.value,
        state=_describe_partition_condition(condition, due, verdict, now_ms),
        reason=verdict.reason if verdict is not None else schedule.paused,
        segments=seen.segments if seen else None,
        bytes=seen.bytes if seen else None,
        start_offset=seen.start_offset if seen else None,
        end_offset=seen.end_offset if seen else None,
        cleaner_offsets=tuple((entry.leader_epoch, entry.offset) for entry in seen.vector) if seen else (),
        first_dirty_offset=seen.first_dirty_offset if seen else None,
        dirty_bytes=due.dirty_bytes if due else None,
        dirty_ratio=round(due.dirty_ratio, 6) if due else None,
        waiting_bytes=seen.waiting_bytes if seen else None,
        leader=seen.current_leader.holder if seen and seen.current_leader else "",
        last_round=_round_outcome(seen.last_round) if seen is not None and seen.last_round is not None else None,
        verdict=PartitionVerdictEntry(**verdict.document()) if verdict is not None else None,
        next=NextPartitionAction(action=step.action.value, at_ms=step.at_ms if step.at_ms < NEVER_MS else None, why=step.why),
    )


def _round_outcome(last: LastRoundSummary) -> RoundOutcome:
    return RoundOutcome(
        run=last.run_id,
        status=last.status,
        ended_ms=last.ended_ms,
        bytes_before=last.bytes_before if last.bytes_before >= 0 else None,
        bytes_after=last.bytes_after if last.bytes_after >= 0 else None,
    )


def _round_entry(run: RunHistoryEntry, prices: PriceTable) -> RoundEntryWithCosts:
    """Cost and saving are None if the store costs nothing, or sizes were not recorded."""

    def statistic(name: str) -> int | None:
        return int(run.stats[name]) if name in run.stats else None

    before, after = statistic("bytes_before"), statistic("bytes_written")
    billed = bool(prices.stored_gib_month_usd) and before is not None and after is not None
    return RoundEntryWithCosts(
        run=run.run_id,
        status=run.status,
        holder=run.holder,
        started_ms=run.started_ms,
        ended_ms=run.ended_ms if run.ended_ms >= 0 else None,
        first_dirty_offset=run.first_dirty_offset if run.first_dirty_offset >= 0 else None,
        next_dirty_offset=run.next_dirty_offset if run.next_dirty_offset >= 0 else None,
        segments_in=run.sources,
        segments_out=run.outputs,
        bytes_before=before,
        bytes_after=after,
        records_read=statistic("records_read"),
        records_kept=statistic("records_kept"),
        cost_bytes_read=statistic("bytes_read"),
        cost_bytes_written=statistic("bytes_written"),
        cost_ms=max(0, run.ended_ms - run.started_ms) if run.ended_ms >= 0 else None,
        cost_usd=prices.round_requests_usd(run.sources, run.outputs) if billed else None,
        saved_usd_month=prices.monthly_storage_usd((before or 0) - (after or 0)) if billed else None,
        reason=run.reason,
        segment=run.segment,
    )


def _compactor_epoch_entry(entry: CompactorEpochAndEnding) -> CompactorEpochSpan:
    ended_ms = entry.ended_ms if entry.ended_ms >= 0 else None
    return CompactorEpochSpan(epoch=entry.epoch, holder=entry.holder, since_ms=entry.at_ms, ended=entry.ended, ended_ms=ended_ms)


MOST_PENDING = 100
"""Largest number of waiting segments on a partition's page. The totals cover all of them."""
PASSING = frozenset(
    {
        UploadFailureReason.EPOCH,
        UploadFailureReason.BROKER,
        UploadFailureReason.FENCED,
        UploadFailureReason.STORE,
        UploadFailureReason.BUDGET,
    }
)
"""Failures that are not caused by the partition itself, so that no command about the partition helps."""


@dataclass(frozen=True)
class _LedPartition:
    upload_state: PartitionUploadState
    name: str
    condition: PartitionCondition
    lag: UploadLag


UPLOAD_COLUMNS: dict[str, PartitionListColumn[_LedPartition]] = {
    "state": PartitionListColumn(lambda led: (ORDER[led.condition], led.upload_state.partition)),
    "name": PartitionListColumn(lambda led: (led.upload_state.partition,)),
    "lag": PartitionListColumn(lambda led: (led.lag.bytes, led.upload_state.partition), descending=True),
    "age": PartitionListColumn(
        lambda led: (-led.lag.since_ms if led.lag.since_ms else -(2**63), led.upload_state.partition), descending=True
    ),
    "end": PartitionListColumn(lambda led: (led.upload_state.position or 0, led.upload_state.partition), descending=True),
}


@dataclass(frozen=True)
class AgentPages:
    status: Callable[[], AgentStatus]
    config: str = ""
    runbook_url: str = ""
    template: ClassVar[str] = "agent.html"
    partition_template: ClassVar[str] = "upload.html"
    looks_for: ClassVar[str] = "segments"

    def health_status(self) -> AgentStatus:
        return self.status()

    def metrics_text(self, *, with_kafka_names: bool) -> bytes:
        return render_metrics(agent_metrics(self.status()))

    def status_page_document(self, query: PartitionListQuery) -> ServiceStatusDocument[AgentTotals, PartitionUploadRow]:
        """Lists the partitions that this broker leads."""
        status = self.status()
        led = [_led_entry(upload_state, status) for upload_state in status.upload_states if upload_state.leads]
        failing_partitions = sorted(
            (each.upload_state for each in led if each.condition is PartitionCondition.ATTENTION),
            key=lambda w: (-w.troubled_ms, w.partition),
        )
        return service_status_document(
            ServiceStatusDocument[AgentTotals, PartitionUploadRow],
            "agent",
            status,
            led,
            UPLOAD_COLUMNS,
            query,
            lambda each: _partition_upload_row(each, status.now_ms),
            totals=_agent_totals(status, led, len(failing_partitions)),
            needs_attention=[
                _failing_upload_entry(upload_state, self.config, self.runbook_url) for upload_state in failing_partitions[:MOST_SHOWN]
            ],
            running_jobs=[
                _running_upload_entry(name, begun, status.now_ms)
                for name, begun in sorted(status.running.items(), key=lambda each: each[1])
            ],
            due_partitions=sum(each.condition is PartitionCondition.DUE for each in led),
        )

    def topics_document(self) -> None: ...

    def partition_document(self, partition: TopicPartition) -> PartitionUploadDocument | None:
        status = self.status()
        upload_state = next((upload_state for upload_state in status.upload_states if upload_state.partition == partition), None)
        if upload_state is None:
            return None
        pending = [
            SegmentPendingUpload(start_offset=f.base, end_offset=f.end - 1, bytes=f.size, sealed_ms=f.mtime_ms)
            for f in upload_state.segments_pending_upload
        ]
        begun = status.running.get(partition)
        return PartitionUploadDocument(
            version=__version__,
            now_ms=status.now_ms,
            row=_partition_upload_row(_led_entry(upload_state, status), status.now_ms),
            attention=_failing_upload_entry(upload_state, self.config, self.runbook_url) if upload_state.trouble is not None else None,
            at_work=None if begun is None else _running_upload_entry(partition, begun, status.now_ms),
            leads=upload_state.leads,
            directory=upload_state.seen.path,
            first_offset=upload_state.seen.first_base_offset if upload_state.seen.first_base_offset >= 0 else None,
            active_offset=upload_state.seen.active_base if upload_state.seen.active_base >= 0 else None,
            pending=tuple(pending[:MOST_PENDING]),
            checked_ms=upload_state.checked_ms or None,
            commands=tuple(partition_command(verb, partition, self.config) for verb in ("segments list", "verify", "explain")),
        )


def _led_entry(upload_state: PartitionUploadState, status: AgentStatus) -> _LedPartition:
    found = upload_lag(upload_state)
    return _LedPartition(
        upload_state,
        str(upload_state.partition),
        _upload_condition(upload_state, found, is_uploading=upload_state.partition in status.running),
        found,
    )


def _upload_condition(upload_state: PartitionUploadState, lag: UploadLag, *, is_uploading: bool) -> PartitionCondition:
    if upload_state.trouble is not None:
        return PartitionCondition.ATTENTION
    if is_uploading:
        return PartitionCondition.WORKING
    if upload_state.position is None:
        return PartitionCondition.UNSEEN
    return PartitionCondition.DUE if lag.segments else PartitionCondition.QUIET


def _agent_totals(status: AgentStatus, led: list[_LedPartition], failing_partitions: int) -> AgentTotals:
    moments = [each.lag.since_ms for each in led if each.lag.since_ms]
    return AgentTotals(
        partitions=len(status.upload_states),
        led=len(led),
        lag_segments=sum(each.lag.segments for each in led),
        lag_bytes=sum(each.lag.bytes for each in led),
        oldest_lag_ms=max(0, status.now_ms - min(moments)) if moments else None,
        uploaded_segments=status.tallies.segments,
        uploaded_bytes=status.tallies.bytes,
        attention_partitions=failing_partitions,
        requests=status.usage.total_requests,
    )


def _failing_upload_entry(upload_state: PartitionUploadState, config_path: str, runbook_url: str) -> PartitionNeedingAttention:
    """Show no command if the cause lies outside the partition."""
    trouble = upload_state.trouble
    return PartitionNeedingAttention(
        partition=str(upload_state.partition),
        kind=trouble.value if trouble else "",
        reason=upload_state.reason,
        segment="",
        since_ms=upload_state.troubled_ms or None,
        failures=upload_state.failures,
        next_try_ms=upload_state.retry_at_ms or None,
        commands=() if trouble in PASSING else (partition_command("checkpoints show", upload_state.partition, config_path),),
        runbook=runbook_link(runbook_url, "alert-tieredcompactoragentrefuses"),
    )


def _running_upload_entry(partition: TopicPartition, begun_ms: int, now_ms: int) -> RunningJobProgress:
    return RunningJobProgress(
        partition=str(partition),
        action="upload",
        phase="upload",
        run="",
        begun_ms=begun_ms,
        elapsed_ms=max(0, now_ms - begun_ms),
        done=None,
        total=None,
        unit="",
        share=None,
        expected_end_ms=None,
    )


def _partition_upload_row(led: _LedPartition, now_ms: int) -> PartitionUploadRow:
    upload_state, end = led.upload_state, led.upload_state.end
    why = "it failed before" if upload_state.trouble else "sealed segments" if led.lag.segments else "the tier has all sealed segments"
    return PartitionUploadRow(
        partition=led.name,
        condition=led.condition.value,
        reason=f"{upload_state.trouble.value}: {upload_state.reason}" if upload_state.trouble else "",
        leader_epoch=end.leader_epoch if end else None,
        tier_end_offset=None if upload_state.position is None else upload_state.position - 1,
        high_watermark=end.high_watermark if end else None,
        lag_segments=led.lag.segments,
        lag_bytes=led.lag.bytes,
        lag_since_ms=led.lag.since_ms or None,
        lag_staged_segments=led.lag.staged,
        lag_deadline_ms=led.lag.deadline_ms or None,
        next=NextPartitionAction(
            action="upload", at_ms=max(now_ms, upload_state.retry_at_ms) if led.lag.segments or upload_state.trouble else None, why=why
        ),
    )
