"""Command ``recompact``: compacts whole partitions from the log's start, as a Spark job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from compactor.access.tier import Tier
from compactor.cli import command_parser, tiers
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import count_noun
from compactor.errors import CompactorError, ExitCode
from compactor.features.spark.recompaction import (
    RecompactionCandidate,
    RecompactionListener,
    RecompactionResult,
    find_recompaction_candidates,
    recompact_partitions,
    recompaction_result_row,
    update_iceberg_tables,
)
from compactor.features.spark.session import StartedCluster, make_class_archive, require_supported_pyspark, start_cluster
from compactor.model.ids import RoundStatus

if TYPE_CHECKING:
    from compactor.round.ports import Costs


def recompact_command(args: argparse.Namespace, out: Output) -> ExitCode:
    if args.class_archive:
        with out.show_progress("making the archive"):
            archive = make_class_archive(command_parser.load_command_settings(args))
        facts = {"path": str(archive), "bytes": archive.stat().st_size}
        out.print_result({"class_archive": facts}, summary=f"{archive} has {format_size(archive.stat().st_size)}")
        return 0
    tier = tiers.open_configured_tier(args, writing_command="" if args.dry_run else "recompact")
    names = tiers.select_partitions(tier, args.partitions)
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=bool(args.partitions))
    min_benefit = 0 if args.force else args.min_benefit
    if args.dry_run:
        return _print_dry_run(
            find_recompaction_candidates(tier, names, command_parser.now_ms_from_arguments(args), min_benefit), out, outcomes
        )
    require_supported_pyspark()
    from compactor.features.spark.jobs import JobListener
    from compactor.round.ports import Costs

    cost = Costs()
    with ExitStack() as stack:
        with out.show_progress("starting Spark"):
            started = stack.enter_context(start_cluster(tier.settings, "tiered-compactor recompact"))
        if started.ui:
            out.print_note(f"Spark runs on {started.master}; its pages are at {started.ui}")
        with out.show_progress("re-compacting", tiers.sum_stored_bytes(tier, names, out), "bytes") as progress:
            count = 0

            def report_finished(finished: RecompactionResult) -> None:
                nonlocal count
                count += 1
                progress.advance(finished.bytes_before)
                _report_recompacted_partition(tier, finished, out, outcomes, f"{count} of {len(names)}")

            finished = recompact_partitions(
                tier,
                started.cluster,
                names,
                command_parser.now_ms_from_arguments(args),
                cost,
                RecompactionListener(JobListener(), report_finished),
                min_benefit,
            )
        with out.show_progress("writing Iceberg tables") if tier.settings.outputs.iceberg.topics else nullcontext():
            tables = update_iceberg_tables(tier, started.cluster, names, cost)
        spark = _spark_job_document(started, cost)  # as long as it runs
    for name, table in tables.items():
        if isinstance(table, CompactorError):
            outcomes.record_failure(f"the table of {name}", table)
        elif table.summary:
            out.print_note(f"{name}: {table.summary}")
    rows = [recompaction_result_row(one, tables.get(one.partition)) for one in finished]
    out.print_result({"partitions": rows, "spark": spark}, tiers.compaction_rounds_table(rows), summary=_spark_summary(started, cost))
    return outcomes.exit_code()


def _print_dry_run(candidates: Sequence[RecompactionCandidate], out: Output, outcomes: tiers.PartitionOutcomes) -> ExitCode:
    rows, cells = [], []
    for inspection in candidates:
        if inspection.error is not None:
            outcomes.record_failure(str(inspection.partition), inspection.error)
            continue
        outcomes.record_success()
        status = "left_alone" if inspection.is_skipped else "would_be_cleaned"
        reason = inspection.reason + (
            "" if inspection.is_skipped else f"; {count_noun(inspection.segments, 'segment')} from the log's start on"
        )
        facts = {"status": status, "reason": reason, "bytes": inspection.bytes}
        rows.append(tiers.partition_name_fields(inspection.partition) | facts)
        cells.append((str(inspection.partition), status, format_size(inspection.bytes), reason))
    todo = sum(row["status"] == "would_be_cleaned" for row in rows)
    table = Table("", ("partition", "status", "size", "why"), cells, below=1)
    out.print_result(
        {"partitions": rows}, table, summary=f"{todo} of {count_noun(len(candidates), 'partition')} would be cleaned; nothing was changed"
    )
    return outcomes.exit_code()


def _report_recompacted_partition(
    tier: Tier, finished: RecompactionResult, out: Output, outcomes: tiers.PartitionOutcomes, progress_text: str
) -> None:
    report = finished.report
    if finished.error is not None:
        outcomes.record_failure(str(finished.partition), finished.error)
    elif report is not None and report.status == RoundStatus.QUARANTINED:
        outcomes.record_quarantine(str(finished.partition), report.reason, report.keyless_records, is_repairable=tier.kind.owns_root)
    else:
        outcomes.record_success()
        if report is not None and report.status == RoundStatus.WAITING:
            out.print_note(f"{finished.partition}: {report.reason}")
        if report is not None and report.segments_out:
            out.print_note(
                f"{progress_text}: {finished.partition} {report.status}, {report.records_read:,} records -> {report.records_kept:,}"
            )
        elif finished.skip_reason:
            out.print_note(f"{progress_text}: {finished.partition} is skipped: {finished.skip_reason}")


def _spark_job_document(started: StartedCluster, cost: Costs) -> dict[str, object]:
    return {
        "master": started.master,
        "slots": started.cluster.task_slots,
        "startup_seconds": round(started.seconds, 3),
        "exchanged_rows": cost.rows,
        "exchanged_bytes": cost.exchanged_bytes,
        "peak_worker_bytes": cost.peak_memory_bytes,
        "worker_cpu_seconds": round(cost.cpu_seconds, 3),
    }


def _spark_summary(started: StartedCluster, cost: Costs) -> str:
    text = f"Spark on {started.master}: started in {started.seconds:.1f} s"
    return text + (f"; {cost.rows:,} keys exchanged, {cost.exchanged_bytes / cost.rows:.1f} bytes each" if cost.rows else "")
