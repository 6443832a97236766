"""Command ``run``: one round on each partition that is due; what a crash left is finished or undone."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.cli import command_parser, tiers
from compactor.cli.kernels import compile_numba_kernels
from compactor.cli.main import CommandProfile
from compactor.cli.output import Output, Progress
from compactor.control.leadership import current_lease
from compactor.control.logs import pause_reason
from compactor.control.state import RoundStage
from compactor.control.summary import PartitionSummary
from compactor.daemon.scheduling import DaemonAction, PartitionJob
from compactor.daemon.status import JobProgressRecorder
from compactor.errors import ExitCode
from compactor.local.budget import spool_folder
from compactor.model.ids import RoundStatus, TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.profiling import loading_cost
from compactor.round.compaction import failed_round_report, idle_report, paused_round_report
from compactor.service import ServiceEventLogger
from compactor.views.forecast import forecast_round
from compactor.views.overview import read_summaries


def run_compaction_rounds(args: argparse.Namespace, out: Output) -> ExitCode:
    with tiers.open_configured_tier(args, local_state=True, writing_command="run") as tier:
        names = tiers.select_partitions(tier, args.partitions)
        outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=bool(args.partitions))
        now = command_parser.now_ms_from_arguments(args)
        rows = {}
        held, expected = [], {}
        for summary in _read_present_summaries(tier, names, out):
            if summary.leader is not None and not summary.leader.released:
                held.append(summary.topic_partition)
            why = pause_reason(tier.catalog.state, summary.topic_partition)
            idle = (
                paused_round_report(summary, why)
                if why and not summary.open_run
                else idle_report(tier.cleaner_settings_for_topic(summary.topic), summary, now, force=args.force)
            )
            if idle is not None:
                rows[summary.topic_partition] = tiers.report_document(idle) | {"requests": 0, "seconds": 0.0}
                outcomes.record_success()
            else:
                forecast = forecast_round(tier, summary, None, now, force=args.force)
                expected[summary.topic_partition] = forecast.bytes_to_read + forecast.bytes_to_write
        work = [name for name in names if name not in rows]
        profile = CommandProfile(args)
        if work:
            rows |= _run_rounds(tier, work, expected, held, args, now, profile, out, outcomes)
    found = [rows[name] for name in names]
    usage = tier.counters.usage()
    store = {"requests": dict(usage.requests), "bytes_read": usage.bytes_read, "bytes_written": usage.bytes_written}
    out.print_result(
        {"partitions": found, "store": store, "startup": profile.startup_document(), "profile": profile.stage_costs_document()},
        tiers.compaction_rounds_table(found),
        *profile.stage_cost_tables(),
        summary=_pause_reasons_as_text(found),
    )
    return outcomes.exit_code()


def _read_present_summaries(tier: Tier, partitions: Sequence[TopicPartition], out: Output) -> list[PartitionSummary]:
    """Leave out partitions that cannot be read: their rounds will report the error."""
    with out.show_progress("looking", len(partitions), "partitions") as progress:
        looks = read_summaries(tier, partitions, max_age_ms=0, on_partition=progress.advance)
    return [inspection.summary for inspection in looks if inspection.summary is not None]


def _print_lease_holder(tier: Tier, partition: TopicPartition, out: Output) -> None:
    """A killed process cannot release its lease."""
    log = tier.open_partition_log(partition)
    log.refresh()
    lease = current_lease(tier.ports, log)
    left_ms = lease.expires_ms - tier.ports.control.clock_ms() if lease else 0
    if lease and left_ms > 0:
        out.print_note(f"{partition}: {lease.holder} holds the lease; waiting for its end, up to {-(-left_ms // 1000)} s")


def _run_rounds(
    tier: Tier,
    partitions: Sequence[TopicPartition],
    expected_bytes: Mapping[TopicPartition, int],
    partitions_led_elsewhere: Sequence[TopicPartition],
    args: argparse.Namespace,
    now_ms: int,
    profile: CommandProfile,
    out: Output,
    outcomes: tiers.PartitionOutcomes,
) -> dict[TopicPartition, dict[str, object]]:
    spool_folder(tier.state_dir)  # before anything is announced that could not be worked on
    if tier.runners is not None:
        for name in partitions:
            tier.runners(tier, name)  # a machine without Java lacks it for every partition
    rows = {}
    compile_numba_kernels(out, load_into_process=args.profile)
    total, done = sum(expected_bytes.values()), 0
    with (
        out.show_progress("cleaning", total or None, "bytes") as progress,
        tier.counters.report_transferred_bytes_to(progress.advance),
        profile.record_costs(),
    ):
        for number, name in enumerate(partitions, start=1):
            begin, before = time.monotonic() - loading_cost.wall, tier.counters.usage()
            reported = JobProgressRecorder(
                PartitionJob(name, DaemonAction.ROUND), None, now_ms, ServiceEventLogger(logging.getLogger(__name__))
            )
            progress.begin_part(f"{name} ({number} of {len(partitions)})", done)
            done += expected_bytes.get(name, 0)
            stages = _RoundStageDisplay(progress, reported)
            try:
                if name in partitions_led_elsewhere:
                    _print_lease_holder(tier, name, out)
                report = compact(tier, name, now_ms, force=args.force, on_stage=stages)
                if report.status == RoundStatus.QUARANTINED:
                    outcomes.record_quarantine(str(name), report.reason, report.keyless_records, is_repairable=tier.kind.owns_root)
                else:
                    if report.reason:  # why it waits, what was given up first, what brokers had deleted meanwhile
                        out.print_note(f"{name}: {report.reason}")
                    outcomes.record_success()
            except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
                report = failed_round_report(name, outcomes.record_failure(str(name), error))
            requests = tier.counters.usage().usage_since(before).total_requests
            seconds = max(0.0, time.monotonic() - loading_cost.wall - begin)
            rows[name] = tiers.report_document(report) | {"requests": requests, "seconds": round(seconds, 3)}
    return rows


def _pause_reasons_as_text(partition_rows: list[dict[str, object]]) -> str:
    return "\n".join(f"{tiers.partition_of_row(row)} is {row['reason']}" for row in partition_rows if row["status"] == RoundStatus.PAUSED)


class _RoundStageDisplay:
    def __init__(self, progress: Progress, reported: JobProgressRecorder) -> None:
        self._progress = progress
        self._label = progress.title
        self._reported = reported

    def __call__(self, stage: RoundStage, plan: CompactionPlan) -> None:
        self._progress.begin_part(f"{self._label}: {stage.value}")
        self._reported.record_round_stage(stage, plan)
