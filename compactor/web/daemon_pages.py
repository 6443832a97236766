"""A daemon's pages: turns its status into documents. Pure, except for asking the daemon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import ClassVar

from compactor import __version__
from compactor.config.settings import CleanerSettings
from compactor.constants import DAY_MS, NEVER_MS
from compactor.control.state import CompactorEpochAndEnding, RunHistoryEntry
from compactor.control.summary import LastRoundSummary
from compactor.daemon.metrics import daemon_metrics
from compactor.daemon.progress import RunningJobSnapshot
from compactor.daemon.scheduling import (
    OutputSchedule,
    PartitionCondition,
    PartitionSchedule,
    PartitionStatus,
    partition_condition,
    planned_action,
)
from compactor.daemon.status import DaemonStatus, PartitionDetails
from compactor.errors import BlockedCause
from compactor.model.ids import TopicPartition
from compactor.service.metrics import render_metrics
from compactor.views.prices import NO_PRICES, PriceTable
from compactor.views.time_formats import format_clock_time, format_size
from compactor.views.verdict import PartitionVerdict, VerdictKind
from compactor.web.axis import offset_axis
from compactor.web.documents import (
    STATE_WORDS,
    CompactorEpochSpan,
    DaemonPartitionPageDocument,
    DaemonPartitionRow,
    DaemonTotals,
    NextPartitionAction,
    PartitionNeedingAttention,
    PartitionOutputState,
    PartitionVerdictEntry,
    RecentRound,
    RoundEntryWithCosts,
    RoundOutcome,
    RunningJobProgress,
    ServiceStatusDocument,
    TopicsDocument,
)
from compactor.web.listing import PartitionListColumn, PartitionListQuery
from compactor.web.status_page import MOST_SHOWN, ORDER, format_partition_command_line, runbook_link, service_status_document
from compactor.web.topic_pages import hourly_storage_bytes, queue_empty_ms, topics_document

MOST_RECENT_ROUNDS = 8


@dataclass(frozen=True)
class _DaemonPartitionEntry:
    """Entry of the list of the tier's partitions, with the values by which the list is sorted and filtered."""

    schedule: PartitionSchedule
    name: str
    condition: PartitionCondition
    now_ms: int

    @property
    def dirty_ratio(self) -> float:
        """Return the dirty ratio; -1 if the partition was not polled yet."""
        return self.schedule.status.dirty_ratio if self.schedule.status else -1.0

    @property
    def live_bytes(self) -> int:
        """Return the bytes of live segments; -1 if the partition was not polled yet."""
        return self.schedule.status.bytes if self.schedule.status else -1

    @property
    def last_round_ended_ms(self) -> int:
        """Return when the latest round ended, in milliseconds; -1 if there was none."""
        seen = self.schedule.status
        return seen.last_round.ended_ms if seen is not None and seen.last_round is not None else -1


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
    """Source of the pages that a daemon serves.

    status: returns the daemon's present status.
    details: returns all that the daemon knows of one partition; None if the tier does not hold it.
    config: path of the daemon's configuration file, for the commands that pages show.
    prices: prices from which costs and savings are computed.
    runbook_url: address of the runbook, to which reasons are linked; empty for the one in the documentation.
    cleaner_settings_for_topic: returns the settings in force for a topic.
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
        """Return the daemon's status now."""
        return self.status()

    def metrics_text(self, *, with_kafka_names: bool) -> bytes:
        """Return the daemon's metrics in Prometheus' text format.

        :param with_kafka_names: whether to repeat metrics under the names that Kafka's LogCleaner gives them.
        """
        return render_metrics(daemon_metrics(self.status(), include_kafka_names=with_kafka_names))

    def status_page_document(self, query: PartitionListQuery) -> ServiceStatusDocument[DaemonTotals, DaemonPartitionRow]:
        """Return the document of the daemon's start page, whose list holds the partitions that ``query`` selects."""
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
        """Return the document of the page of topics."""
        return topics_document(self.status(), self.cleaner_settings_for_topic)

    def partition_document(self, partition: TopicPartition) -> DaemonPartitionPageDocument | None:
        """Return the document of one partition, or None if the tier does not hold it."""
        found = self.details(partition)
        if found is None:
            return None
        schedule, history, seen, output = found.schedule, found.history, found.schedule.status, found.schedule.output
        row = _daemon_partition_row(schedule, partition_condition(schedule, is_job_running=found.running_job is not None), found.now_ms)
        return DaemonPartitionPageDocument(
            version=__version__,
            now_ms=found.now_ms,
            row=row,
            output=_partition_output_state(output, seen) if output and seen and (output.content or output.problem) else None,
            attention=_failing_partition_entry(schedule, found.now_ms, self.config, self.runbook_url) if schedule.blocked_reason else None,
            at_work=_running_job_entry(found.running_job, found.now_ms) if found.running_job else None,
            axis=offset_axis(seen, found.segments, history) if seen is not None and seen.segments else None,
            leader_epoch=seen.leader_epoch if seen is not None and seen.leader_epoch >= 0 else None,
            fenced_appends=history.fenced if history else None,
            rounds=tuple(_round_entry_with_costs(run, self.prices) for run in reversed(history.runs)) if history else (),
            prices=str(self.prices) if self.prices.stored_gib_month_usd else "",
            compactor_epochs=tuple(_compactor_epoch_entry(entry) for entry in reversed(history.epochs)) if history else (),
            commands=tuple(
                format_partition_command_line(verb, partition, self.config)
                for verb in ("explain", "plan", "runs list", "checkpoints lineage", "verify")
            ),
        )


def _partition_output_state(output: OutputSchedule, status: PartitionStatus) -> PartitionOutputState:
    """Return the state of a partition's output, such as an Iceberg table.

    It contains the offset up to which the output is current, how many cleaned offsets it lacks, and the reason why it is not further.
    """
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
    """Return the totals of the daemon's first page."""
    statuses = [schedule.status for schedule in status.schedules if schedule.status is not None]
    due = [schedule.status_if_round_may_begin for schedule in status.schedules if schedule.status_if_round_may_begin is not None]
    moments = [partition.retire_at_ms for partition in statuses if partition.retire_at_ms < NEVER_MS]
    yesterday_ms = status.now_ms - DAY_MS
    return DaemonTotals(
        partitions=len(status.schedules),
        segments=sum(partition.segments for partition in statuses),
        stored_bytes=sum(partition.bytes + partition.waiting_bytes for partition in statuses),
        dirty_bytes=sum(partition.dirty_bytes for partition in statuses),
        reclaimed_24h_bytes=sum(size for partition in statuses for at_ms, size in partition.freed if yesterday_ms < at_ms <= status.now_ms),
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
        recent_rounds=_latest_round_of_each_partition(statuses),
    )


def _latest_round_of_each_partition(statuses: Sequence[PartitionStatus]) -> tuple[RecentRound, ...]:
    """Return the latest round of each partition, newest first, at most MOST_RECENT_ROUNDS."""
    found = [(seen.last_round.ended_ms, str(seen.partition), seen.last_round) for seen in statuses if seen.last_round is not None]
    newest = nlargest(MOST_RECENT_ROUNDS, found, key=lambda each: each[:2])
    return tuple(RecentRound(partition=name, round=_round_outcome(last)) for _, name, last in newest)


def _failing_partition_entry(schedule: PartitionSchedule, now_ms: int, config_path: str, runbook_url: str) -> PartitionNeedingAttention:
    """Return the entry of a blocked partition for the page's list of problems, with the first commands to run."""
    seen, step, verdict = schedule.status, planned_action(schedule, now_ms), schedule.verdict
    if verdict is None:
        raise AssertionError("a partition without a verdict is not blocked")
    kind = _kind_of_block(schedule, verdict)
    failures = {"unreadable": schedule.poll_failures, "failing": schedule.failures}.get(kind, seen.quarantine_failures if seen else 0)
    verbs = {"unreadable": ("verify", "explain"), "blocked": ("explain", "plan")}.get(kind, ("explain", "run"))
    return PartitionNeedingAttention(
        partition=str(schedule.partition),
        kind=kind,
        reason=verdict.reason,
        cause=verdict.cause,
        waiting_bytes=verdict.waiting_bytes,
        next_step=verdict.next_step,
        segment=seen.quarantine_segment if seen is not None and kind == "quarantined" else "",
        since_ms=verdict.since_ms or None,
        failures=failures,
        next_try_ms=step.at_ms if step.at_ms < NEVER_MS else None,
        commands=tuple(format_partition_command_line(verb, schedule.partition, config_path) for verb in verbs),
        runbook=runbook_link(runbook_url, RUNBOOK_SECTIONS[kind]),
    )


def _kind_of_block(schedule: PartitionSchedule, verdict: PartitionVerdict) -> str:
    """Return the kind of a block, as the page's list of problems names it."""
    if schedule.suspended is not None:
        return "blocked"
    if schedule.unreadable:
        return "unreadable"
    if schedule.problem:
        return "failing"
    return "quarantined" if verdict.cause == BlockedCause.DAMAGE else "blocked"


def _running_job_entry(job: RunningJobSnapshot, now_ms: int) -> RunningJobProgress:
    """Return the entry of a running job for the page's list of jobs, with its progress and expected end."""
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


def _describe_partition_condition(
    condition: PartitionCondition, status: PartitionStatus | None, verdict: PartitionVerdict | None, now_ms: int
) -> str:
    """Return a partition's condition for people. If replaced segments wait for deletion, it states their size and until when they are kept:
    ``Clean, 33.8 MiB in grace until 18:51 UTC``. If what is dirty may not be cleaned yet, it says until when: ``Waiting until 18:51 UTC``.
    """
    if verdict is not None and verdict.kind is VerdictKind.WAITING and condition is not PartitionCondition.WORKING:
        return "Waiting" + (f" until {format_clock_time(verdict.until_ms, now_ms)}" if verdict.until_ms else "")
    if verdict is not None and verdict.is_blocked:
        return "Blocked"
    if condition is not PartitionCondition.WAITING or status is None or status.retire_at_ms >= NEVER_MS:
        return STATE_WORDS[condition.value]
    until = "in grace until " + format_clock_time(status.retire_at_ms, now_ms) if status.retire_at_ms > now_ms else "past its grace"
    return f"Clean, {format_size(status.waiting_bytes)} {until}"


def _daemon_partition_row(schedule: PartitionSchedule, condition: PartitionCondition, now_ms: int) -> DaemonPartitionRow:
    """Return the row that the page's list has for a partition."""
    seen, step, verdict = schedule.status, planned_action(schedule, now_ms), schedule.verdict
    return DaemonPartitionRow(
        partition=str(schedule.partition),
        condition=condition.value,
        state=_describe_partition_condition(condition, seen, verdict, now_ms),
        reason=verdict.reason if verdict is not None else schedule.paused,
        segments=seen.segments if seen else None,
        bytes=seen.bytes if seen else None,
        start_offset=seen.start_offset if seen else None,
        end_offset=seen.end_offset if seen else None,
        cleaner_offsets=tuple((entry.leader_epoch, entry.offset) for entry in seen.cleaner_offsets) if seen else (),
        first_dirty_offset=seen.first_dirty_offset if seen else None,
        dirty_bytes=seen.dirty_bytes if seen else None,
        dirty_ratio=round(seen.dirty_ratio, 6) if seen else None,
        waiting_bytes=seen.waiting_bytes if seen else None,
        leader=seen.leader if seen else "",
        last_round=_round_outcome(seen.last_round) if seen is not None and seen.last_round is not None else None,
        verdict=PartitionVerdictEntry(**verdict.document()) if verdict is not None else None,
        next=NextPartitionAction(action=step.action.value, at_ms=step.at_ms if step.at_ms < NEVER_MS else None, why=step.why),
    )


def _round_outcome(last: LastRoundSummary) -> RoundOutcome:
    """Return the sizes and the status of a partition's latest round, as the list shows them."""
    return RoundOutcome(
        run=last.run_id,
        status=last.status,
        ended_ms=last.ended_ms,
        bytes_before=last.bytes_before if last.bytes_before >= 0 else None,
        bytes_after=last.bytes_after if last.bytes_after >= 0 else None,
    )


def _round_entry_with_costs(run: RunHistoryEntry, prices: PriceTable) -> RoundEntryWithCosts:
    """Return a round of the run history as the partition's page shows it.

    Its cost and its saving are computed from ``prices``; None if the store costs nothing, or the round's sizes were not recorded.
    """

    def run_statistic_or_none(name: str) -> int | None:
        return int(run.stats[name]) if name in run.stats else None

    before, after = run_statistic_or_none("bytes_before"), run_statistic_or_none("bytes_written")
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
        records_read=run_statistic_or_none("records_read"),
        records_kept=run_statistic_or_none("records_kept"),
        cost_bytes_read=run_statistic_or_none("bytes_read"),
        cost_bytes_written=run_statistic_or_none("bytes_written"),
        cost_ms=max(0, run.ended_ms - run.started_ms) if run.ended_ms >= 0 else None,
        cost_usd=prices.price_of_round_requests_usd(run.sources, run.outputs) if billed else None,
        saved_usd_month=prices.price_of_storage_usd_per_month((before or 0) - (after or 0)) if billed else None,
        reason=run.reason,
        segment=run.segment,
    )


def _compactor_epoch_entry(entry: CompactorEpochAndEnding) -> CompactorEpochSpan:
    """Return a compactor epoch (one process's period of leadership) as the partition's page shows it."""
    ended_ms = entry.ended_ms if entry.ended_ms >= 0 else None
    return CompactorEpochSpan(epoch=entry.epoch, holder=entry.holder, since_ms=entry.at_ms, ended=entry.ended, ended_ms=ended_ms)
