"""``demo [--dir D]``: the main job on a directory tier, end to end, on data that it makes."""

from __future__ import annotations

import argparse
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from compactor.cli import frame
from compactor.cli.output import Output, Table, size
from compactor.cli.warming import warm_up
from compactor.errors import BadData, CompactorError

if TYPE_CHECKING:
    from compactor.service.demo import Comparison, Demo


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument("--dir", metavar="D", type=Path, help="keep everything there to look at (default: a temporary directory)")
    parser.add_argument(
        "--tier", metavar="URL", help="make the tier there, s3://bucket/prefix, reached as [s3] in the settings says; it stays"
    )
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    if args.dir is not None:
        return _show(args, args.dir, out, kept=True)
    with tempfile.TemporaryDirectory(prefix="tiered-compactor-demo-") as folder:
        return _show(args, Path(folder), out, kept=False)


def _show(args: argparse.Namespace, folder: Path, out: Output, *, kept: bool) -> int:
    from compactor.service.demo import Demo

    begin = time.monotonic()
    now_ms = int(time.time() * 1000)
    demo = Demo(folder, now_ms, args.tier, frame.settings(args).s3) if args.tier else Demo(folder, now_ms)
    warm_up(out, load=True)
    seconds = _work(demo, out)
    compared = demo.check()
    ok = not compared.differences
    keys = len(compared.before.live)
    for difference in compared.differences[:5]:
        out.note(f"             {difference}")
    deleted = len(compared.before.latest) - keys
    same = f"all {keys:,} keys read the same, and {deleted} deleted ones stay deleted, says a reader of its own"
    out.note(f"7. check     {same if ok else f'{len(compared.differences):,} keys read differently'}")
    document = {
        "ok": ok,
        "records_before": compared.before.records,
        "records_after": compared.after.records,
        "bytes_before": compared.before.size,
        "bytes_after": compared.after.size,
        "keys": keys,
        "segments_before": compared.segments_before,
        "segments_after": compared.segments_after,
        "round_seconds": round(seconds, 3),
        "seconds": round(time.monotonic() - begin, 3),
        "dir": str(demo.folder) if kept else None,
    }
    gone = f"The tier stays at {args.tier}" if args.tier else "Keep everything to look at it: demo --dir DIRECTORY"
    out.result(document, _table(compared), summary=_closing(demo) if kept else gone)
    return 0 if ok else CompactorError.exit_code


def _work(demo: Demo, out: Output) -> float:
    """Steps 1 to 6; returns the seconds of the round."""
    from compactor.transfer.import_ import ImportProgress

    with out.progress("making a topic", demo.shape.records, "records") as progress:
        demo.make(progress.advance)
    out.note(
        f"1. make      {demo.shape.records:,} changes of a customers table, as a broker writes them: all codecs, deletes, transactions"
    )
    with out.progress("importing", unit="bytes") as progress:
        imported = demo.import_topic(ImportProgress(progress.at, progress.advance))
    out.note(f"2. import    {imported.segments} segments, {size(imported.bytes)}, offsets {imported.start_offset} to {imported.end_offset}")
    plan = demo.plan()
    reads = f"{size(plan.bytes_to_read)} to read, {size(plan.bytes_to_write)} to write at most, {plan.map_keys:,} keys at most"
    out.note(f"3. plan      {'due' if plan.due else 'not due'}: {plan.reason}; {reads}")
    begin = time.monotonic()
    with out.progress("cleaning") as progress:
        report = demo.run(lambda stage, plan: progress.at(f"round: {stage.value}"))
    seconds = time.monotonic() - begin
    if report.status != "cleaned":
        raise CompactorError(f"the round ended as {report.status}: {report.reason}", hint="This is a bug; please report it")
    out.note(f"4. run       {report.records_read:,} records read, {report.records_kept:,} kept, in {seconds:.1f} s; published in one step")
    with out.progress("verifying", unit="bytes") as progress:
        problems = demo.verify(progress.advance)
    for problem in problems:
        raise BadData(problem.detail, segment=problem.object, hint="This is a bug; please report it")
    out.note("5. verify    metadata, objects, checksums and indexes agree")
    with out.progress("exporting", unit="bytes") as progress:
        demo.export(progress.advance)
    out.note("6. export    the compacted view, as a Kafka log directory")
    return seconds


def _table(compared: Comparison) -> Table:
    before, after = compared.before, compared.after
    rows = [
        ("records", f"{before.records:,}", f"{after.records:,}", _share(after.records, before.records)),
        ("size", size(before.size), size(after.size), _share(after.size, before.size)),
        ("segments", compared.segments_before, compared.segments_after, ""),
        ("keys with a value", f"{len(before.live):,}", f"{len(after.live):,}", ""),
    ]
    return Table("", ("", "before", "after", ""), rows)


def _share(after: int, before: int) -> str:
    return f"{100 * after / before:.1f} %"


def _closing(demo: Demo) -> str:
    command = f"tiered-compactor topics --config {shlex.quote(str(demo.config))}"
    return "\n".join(
        (
            f"{demo.log_dir}: the topic as the broker wrote it",
            f"{demo.exported}: the same, compacted",
            f"{demo.tier_place}: the tier. Look around: {command}",
        )
    )
