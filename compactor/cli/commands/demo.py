"""Command ``demo``: compacts a generated topic, from import to export."""

from __future__ import annotations

import argparse
import shlex
import tempfile
import time
from pathlib import Path

from compactor.cli import command_parser
from compactor.cli.kernels import compile_numba_kernels
from compactor.cli.output import Output, Table, format_size
from compactor.config.units import count_noun
from compactor.demo import Demo, DemoComparison, count_keys_with_value
from compactor.errors import BadData, CompactorError, ExitCode
from compactor.features.imports.import_ import ImportProgressCallbacks
from compactor.model.ids import RoundStatus


def run_demo(args: argparse.Namespace, out: Output) -> ExitCode:
    if args.dir is not None:
        return _run_in_folder(args, args.dir, out, is_folder_kept=True)
    with tempfile.TemporaryDirectory(prefix="tiered-compactor-demo-") as folder:
        return _run_in_folder(args, Path(folder), out, is_folder_kept=False)


def _run_in_folder(args: argparse.Namespace, folder: Path, out: Output, *, is_folder_kept: bool) -> ExitCode:
    begin = time.monotonic()
    now_ms = int(time.time() * 1000)
    demo = Demo(folder, now_ms, args.tier, command_parser.load_command_settings(args)) if args.tier else Demo(folder, now_ms)
    compile_numba_kernels(out, load_into_process=True)
    seconds = _run_steps(demo, out)
    compared = demo.compare_values()
    ok = not compared.differences
    keys = count_keys_with_value(compared.written)
    for difference in compared.differences[:5]:
        out.print_note(f"             {difference}")
    deleted = len(compared.written) - keys
    same = f"all {keys:,} keys have the last value that was written, and {deleted} deleted ones stay deleted"
    out.print_note(f"7. check     {same if ok else f'{len(compared.differences):,} keys read differently'}")
    document = {
        "ok": ok,
        "records_before": compared.before.records,
        "records_after": compared.after.records,
        "bytes_before": compared.before.bytes,
        "bytes_after": compared.after.bytes,
        "keys": keys,
        "segments_before": compared.before.segments,
        "segments_after": compared.after.segments,
        "round_seconds": round(seconds, 3),
        "seconds": round(time.monotonic() - begin, 3),
        "dir": str(demo.folder) if is_folder_kept else None,
    }
    gone = f"The tier stays at {args.tier}" if args.tier else "To keep the data: demo --dir DIRECTORY"
    out.print_result(document, _demo_comparison_table(compared), summary=_describe_locations(demo) if is_folder_kept else gone)
    return 0 if ok else CompactorError.exit_code


def _run_steps(demo: Demo, out: Output) -> float:
    with out.show_progress("making a topic", demo.shape.records, "records") as progress:
        demo.write_topic(progress.advance)
    out.print_note(
        f"1. make      {demo.shape.records:,} changes of a customers table, as a broker writes them: all codecs, deletes, transactions"
    )
    with out.show_progress("importing", unit="bytes") as progress:
        imported = demo.import_topic(ImportProgressCallbacks(progress.begin_step, progress.advance))
    offsets = f"offsets {imported.start_offset} to {imported.end_offset}"
    out.print_note(f"2. import    {count_noun(imported.segments, 'segment')}, {format_size(imported.bytes)}, {offsets}")
    plan = demo.forecast_round()
    reads = (
        f"{format_size(plan.bytes_to_read)} to read, {format_size(plan.bytes_to_write)} to write at most, {plan.map_keys:,} keys at most"
    )
    out.print_note(f"3. plan      {'due' if plan.due else 'not due'}: {plan.reason}; {reads}")
    begin = time.monotonic()
    with out.show_progress("cleaning") as progress:
        report = demo.compact_topic(lambda stage, plan: progress.begin_step(f"round: {stage.value}"))
    seconds = time.monotonic() - begin
    if report.status != RoundStatus.CLEANED:
        raise CompactorError(f"the round ended as {report.status}: {report.reason}", hint="This is a bug; please report it")
    out.print_note(
        f"4. run       {report.records_read:,} records read, {report.records_kept:,} kept, in {seconds:.1f} s; published in one step"
    )
    with out.show_progress("verifying", unit="bytes") as progress:
        problems = demo.verify_tier(progress.advance)
    for problem in problems:
        raise BadData(problem.detail, segment=problem.object, hint="This is a bug; please report it")
    out.print_note("5. verify    metadata, objects, checksums and indexes agree")
    with out.show_progress("exporting", unit="bytes") as progress:
        demo.export_topic(progress.advance)
    out.print_note("6. export    the compacted view, as a Kafka log directory")
    return seconds


def _demo_comparison_table(compared: DemoComparison) -> Table:
    before, after = compared.before, compared.after
    rows = [
        ("records", f"{before.records:,}", f"{after.records:,}", _format_percentage(after.records, before.records)),
        ("size", format_size(before.bytes), format_size(after.bytes), _format_percentage(after.bytes, before.bytes)),
        ("segments", compared.before.segments, compared.after.segments, ""),
        ("keys with a value", f"{count_keys_with_value(compared.written):,}", f"{count_keys_with_value(compared.found):,}", ""),
    ]
    return Table("", ("", "before", "after", ""), rows)


def _format_percentage(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _describe_locations(demo: Demo) -> str:
    command = f"tiered-compactor topics --config {shlex.quote(str(demo.config))}"
    return "\n".join(
        (
            f"{demo.log_dir}: the topic as the broker wrote it",
            f"{demo.exported}: the same, compacted",
            f"{demo.tier_place}: the tier. Look around: {command}",
        )
    )
