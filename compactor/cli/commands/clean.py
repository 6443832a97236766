"""Command ``clean LOG_DIR OUT_DIR``: cleans one Kafka log directory offline, with the results of Kafka's own cleaner. Uses no tier."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.kernels import compile_kernels
from compactor.cli.output import Output, Table, format_size
from compactor.cli.profile import PROFILE_OPTION, CommandProfile

if TYPE_CHECKING:
    from compactor.cleaner.offline import CleanSummary

_OFFSETS = (
    ("first-dirty-offset", "first offset that is not clean yet (default: the log's start)"),
    ("first-uncleanable-offset", "first offset to leave alone; inside a segment it moves down to its base (default: the log's end)"),
    ("high-watermark", "a batch that ends here keeps its header (default: the log's end)"),
)


def add_arguments(parser: frame.Parser) -> None:
    int32 = 2**31 - 1
    parser.set_command(
        run_clean,
        frame.argument(
            "log_dir", metavar="LOG_DIR", type=Path, help="holds <20 digits>.log and what belongs to them; all segments count as sealed"
        ),
        frame.argument("out_dir", metavar="OUT_DIR", type=Path, help="must not exist; gets the rewritten segments"),
        *(frame.argument(f"--{name}", type=frame.whole_number(), metavar="N", help=text) for name, text in _OFFSETS),
        tiers.CLOCK_OPTION,
        frame.argument("--delete-retention-ms", type=frame.whole_number(), metavar="N", default=86_400_000, help="default 86400000, a day"),
        frame.argument("--segment-bytes", type=frame.whole_number(14, int32), metavar="N", default=1 << 30, help="default 1073741824"),
        frame.argument("--segment-index-bytes", type=frame.whole_number(4, int32), metavar="N", default=10 << 20, help="default 10485760"),
        frame.argument("--index-interval-bytes", type=frame.whole_number(0, int32), metavar="N", default=4096, help="default 4096"),
        frame.argument(
            "--map-entries",
            type=frame.whole_number(1, 2**31),
            metavar="N",
            help="stop the map as Kafka does when it holds N keys (default: no limit)",
        ),
        frame.argument("--threads", type=frame.whole_number(1, 256), metavar="N", default=1, help="default 1"),
        PROFILE_OPTION,
    )


def run_clean(args: argparse.Namespace, out: Output) -> None:
    import secrets

    from compactor.cleaner.offline import CleanRequest, clean_directory

    request = CleanRequest(
        now_ms=tiers.cleaner_clock_ms(args),
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
    compile_kernels(out, load=args.profile)
    marks: dict[str, tuple[float, float]] = {}
    profile = CommandProfile(args)
    with out.progress("cleaning") as progress, profile.record_costs():

        def on_phase(phase: str) -> None:
            marks[phase] = (time.perf_counter(), time.process_time())
            progress.begin_step(phase)

        summary = clean_directory(args.log_dir, args.out_dir, request, on_phase)
    out.print_result(
        _clean_document(summary, marks, profile), _clean_table(summary), *profile.cost_tables(), summary=_clean_summary(summary)
    )


def _clean_document(summary: CleanSummary, marks: dict[str, tuple[float, float]], profile: CommandProfile) -> dict[str, object]:
    begin, middle, end = marks["index"], marks["rewrite"], marks["done"]
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
        "map_entries": summary.map_entries,
        "map_bytes": summary.map_bytes,
        "profile": profile.costs_document(),
    }


def _clean_table(summary: CleanSummary) -> Table:
    return Table("segments written", ("base offset", "size"), [(base, format_size(written)) for base, written in summary.segments])


def _clean_summary(summary: CleanSummary) -> str:
    sizes = f"{format_size(summary.bytes_read)} -> {format_size(summary.bytes_written)}"
    records = f"{summary.records_kept:,} of {summary.records_read:,} records kept"
    return f"{records}, {sizes}; next dirty offset {summary.next_dirty_offset}"
