"""Command ``clean``: cleans one Kafka log directory offline, as Kafka's own cleaner does."""

from __future__ import annotations

import argparse
import secrets
import time

from compactor.cleaner.offline import OfflineCleanOptions, OfflineCleanSummary, clean_log_directory
from compactor.cli import command_parser
from compactor.cli.kernels import compile_numba_kernels
from compactor.cli.main import CommandProfile
from compactor.cli.output import Output, Table, format_size
from compactor.profiling import loading_cost


def run_offline_cleaning(args: argparse.Namespace, out: Output) -> None:
    request = OfflineCleanOptions(
        now_ms=command_parser.now_ms_from_arguments(args),
        first_dirty_offset=args.first_dirty_offset,
        first_uncleanable_offset=args.first_uncleanable_offset,
        delete_retention_ms=args.delete_retention_ms,
        segment_bytes=args.segment_bytes,
        segment_index_bytes=args.segment_index_bytes,
        index_interval_bytes=args.index_interval_bytes,
        map_entries=args.map_entries,
        high_watermark=args.high_watermark,
        threads=args.threads,
        hash_key=secrets.token_bytes(16),
    )
    compile_numba_kernels(out, load_into_process=args.profile)
    marks: dict[str, tuple[float, float]] = {}
    profile = CommandProfile(args)
    with out.show_progress("cleaning") as progress, profile.record_costs():

        def record_phase_start(phase: str) -> None:
            marks[phase] = (time.perf_counter() - loading_cost.wall, time.process_time() - loading_cost.cpu)
            progress.begin_step(phase)

        summary = clean_log_directory(args.log_dir, args.out_dir, request, record_phase_start)
    out.print_result(
        _result_document(summary, marks, profile),
        _segments_table(summary),
        *profile.stage_cost_tables(),
        summary=_summary_line(summary),
    )


def _result_document(
    summary: OfflineCleanSummary, phase_start_wall_and_cpu_s: dict[str, tuple[float, float]], profile: CommandProfile
) -> dict[str, object]:
    begin, middle, end = phase_start_wall_and_cpu_s["index"], phase_start_wall_and_cpu_s["rewrite"], phase_start_wall_and_cpu_s["done"]
    return {
        "next_dirty_offset": summary.next_dirty_offset,
        "segments": [{"base": base, "bytes": written} for base, written in summary.segments],
        "records_read": summary.records_read,
        "records_kept": summary.records_kept,
        "bytes_read": summary.bytes_read,
        "bytes_written": summary.bytes_written,
        "seconds": {
            "index": round(middle[0] - begin[0], 6),
            "rewrite": round(end[0] - middle[0], 6),
            "total": round(end[0] - begin[0], 6),
            "cpu": round(end[1] - begin[1], 6),
        },
        "startup": profile.startup_document(),
        "map_entries": summary.map_entries,
        "map_bytes": summary.map_bytes,
        "profile": profile.stage_costs_document(),
    }


def _segments_table(summary: OfflineCleanSummary) -> Table:
    return Table("segments written", ("base offset", "size"), [(base, format_size(written)) for base, written in summary.segments])


def _summary_line(summary: OfflineCleanSummary) -> str:
    sizes = f"{format_size(summary.bytes_read)} -> {format_size(summary.bytes_written)}"
    records = f"{summary.records_kept:,} of {summary.records_read:,} records kept"
    return f"{records}, {sizes}; next dirty offset {summary.next_dirty_offset}"
