"""``runs list [TOPIC-PARTITION...]`` and ``runs show RUN``: what ran, by whom, how much, and how it ended."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import CompactorError

SHORT = 8
"""Characters of a run's id in tables: enough to name it."""

if TYPE_CHECKING:
    from compactor.views.history import RunReport


def add_arguments(parser: frame.Parser) -> None:
    listing = parser.subcommand("list", "the rounds that are remembered, oldest first")
    tiers.partitions_argument(listing)
    listing.runs(show_list)
    show = parser.subcommand("show", "one round")
    show.add_argument("run_id", metavar="RUN", help="as `runs list` prints it, or its first characters")
    show.runs(show_run)


def show_list(args: argparse.Namespace, out: Output) -> int:
    from compactor.views.difference import iso
    from compactor.views.history import runs_of

    opened = tiers.viewed(args)
    names = opened.partitions(args.partitions)
    outcomes = tiers.PartitionOutcomes(out, named=bool(args.partitions))
    found: list[RunReport] = []
    with out.progress("reading", len(names), "partitions") as progress:
        for name, log in zip(names, opened.read_logs(names, progress.advance), strict=True):
            if isinstance(log, CompactorError):
                outcomes.failed(str(name), log)
            else:
                found += runs_of(log.state)
                outcomes.ok()
    found.sort(key=lambda run: run.started_ms)
    rows = [
        (f"{r.topic}-{r.partition}", r.run_id[:SHORT], iso(r.started_ms), _seconds(r), r.status, r.holder, r.leader_epoch, _range(r),
         f"{r.segments_in} -> {r.segments_out}" if r.segments_out else "", _bytes(r, "bytes_read"), _bytes(r, "bytes_written"), r.reason)
        for r in found
    ]  # fmt: skip
    columns = ("partition", "run", "began", "seconds", "status", "by", "epoch", "offsets", "segments", "read", "written", "reason")
    out.result({"runs": [tiers.plain(run) for run in found]}, Table("", columns, rows))
    return outcomes.exit_code()


def show_run(args: argparse.Namespace, out: Output) -> None:
    from compactor.views.difference import iso
    from compactor.views.history import find_run, runs_of, undo_problem

    opened = tiers.viewed(args)
    names = opened.partitions()
    with out.progress("looking for it", len(names), "partitions") as progress:
        state, run_id = find_run(opened, args.run_id, names, progress.advance)
    run = next(run for run in runs_of(state) if run.run_id == run_id)
    undoing = undo_problem(state, run.run_id)
    offsets = [
        " ".join(f"{e.leader_epoch}:{e.offset}" for e in vector) or "none" for vector in (run.cleaner_offsets_before, run.cleaner_offsets)
    ]
    rows: list[tuple[str, object]] = [
        ("partition", f"{run.topic}-{run.partition}"),
        ("status", run.status),
        ("reason", f"{run.reason} {run.segment}".strip()),
        ("began", f"{iso(run.started_ms)} by {run.holder}, in slot {run.slot}"),
        ("ended", iso(run.ended_ms) if run.ended_ms is not None else ""),
        ("published", f"in slot {run.published_slot} by epoch {run.leader_epoch}" if run.published_slot else ""),
        ("offsets", _range(run)),
        ("cleaner offsets", f"{offsets[0]} -> {offsets[1]}" if run.published_slot else ""),
        ("segments", f"{run.segments_in} -> {run.segments_out}" if run.segments_out else ""),
        ("saved", _saved(run)),
        *((name.replace("_", " "), _stat(name, value)) for name, value in run.stats.items()),
        *_balance(run),
        ("undo", f"no: {undoing}" if undoing else f"tiered-compactor undo {run.run_id}"),
    ]
    out.result(tiers.plain(run), Table(f"run {run.run_id}", ("", ""), [row for row in rows if row[1] != ""]))


def _balance(run: RunReport) -> list[tuple[str, object]]:
    """Both equations, with the beginning of each sum."""
    if run.balance is None:
        return []
    b = run.balance
    batches = [f"{b.left} left", f"{b.opened} opened", *(f"{gone} {reason}" for reason, gone in b.dropped.items())]
    records = [f"{b.written} written", *(f"{gone} {reason}" for reason, gone in b.records_dropped.items())]
    return [
        ("balance of batches", f"{b.sources} = {' + '.join(batches)}"),
        ("balance of records", f"{b.records} = {' + '.join(records)}"),
        ("balance", b.problem() or "it adds up"),
        ("readers had after it", f"{run.content} batches" if run.content else ""),
    ]


def _range(run: RunReport) -> str:
    if run.first_dirty_offset is None:
        return ""
    return f"{run.first_dirty_offset} -> {run.next_dirty_offset if run.next_dirty_offset is not None else '?'}"


def _seconds(run: RunReport) -> float | None:
    return None if run.ended_ms is None else round((run.ended_ms - run.started_ms) / 1000, 1)


def _bytes(run: RunReport, name: str) -> str:
    value = run.stats.get(name)
    return size(value) if isinstance(value, int) else ""


def _saved(run: RunReport) -> str:
    """What the round saved, beside what was expected of it."""
    if not run.published_slot or "bytes_before" not in run.stats:
        return ""
    saved, expected = int(run.stats["bytes_before"]) - int(run.stats["bytes_written"]), run.stats.get("expected_saving_bytes")
    return size(saved) + ("" if expected is None else f", {size(int(expected))} were expected")


def _stat(name: str, value: float | str) -> str:
    return size(value) if "bytes" in name and isinstance(value, int) else str(value)
