"""Commands ``runs``: past rounds, who ran them and how they ended."""

from __future__ import annotations

import argparse

from compactor.cli import command_parser, tiers
from compactor.cli.output import Output, Table, format_size
from compactor.config.times import format_iso_time
from compactor.config.units import format_duration
from compactor.control.state import RunHistoryEntry
from compactor.errors import ExitCode, UsageError
from compactor.views.overview import run_document, search_run, undo_refusal

SHORT = 8
"""Characters of a run's id in tables. They suffice to name it."""


def list_compaction_runs(args: argparse.Namespace, out: Output) -> ExitCode:
    tier = tiers.open_read_only(args)
    names = tiers.select_partitions(tier, args.partitions)
    outcomes = tiers.PartitionOutcomes(out, is_selection_explicit=bool(args.partitions))
    found = [(log.state, run) for log in tiers.read_control_logs(tier, names, out, outcomes) for run in log.state.runs]
    found.sort(key=lambda one: one[1].started_ms)
    rows = [
        (
            str(state.topic_partition),
            run.run_id[:SHORT],
            run.status,
            format_iso_time(run.started_ms),
            format_duration(run.ended_ms - run.started_ms) if run.ended_ms >= 0 else "",
            f"{run.sources} -> {run.outputs}" if run.outputs else "",
            _format_byte_stat(run, "bytes_read"),
            _format_byte_stat(run, "bytes_written"),
            _format_offsets(run),
            run.holder,
            run.leader_epoch,
            run.reason,
        )
        for state, run in found
    ]
    columns = ("partition", "run", "status", "began", "took", "segments", "read", "written", "offsets", "by", "epoch", "reason")
    table = Table("", columns, rows, minor=("epoch", "by", "offsets", "segments", "took", "read", "written", "began"), below=1)
    out.print_result({"runs": [run_document(state, run) for state, run in found]}, table)
    return outcomes.exit_code()


def show_compaction_run(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_read_only(args)
    names = tier.list_partitions()
    with out.show_progress("looking for it", len(names), "partitions") as progress:
        found = search_run(tier, args.run_id, names, progress.advance)
    if found is None:
        raise UsageError(f"no partition remembers a run {args.run_id}", hint="`runs list` shows those that are remembered")
    state, run_id = found
    run = next(run for run in state.runs if run.run_id == run_id)
    undoing = undo_refusal(state, run.run_id)
    offsets = [tiers.format_cleaner_offsets(vector) for vector in (run.vector_before, run.vector)]
    rows: list[tuple[str, object]] = [
        ("partition", str(state.topic_partition)),
        ("status", run.status),
        ("reason", f"{run.reason} {run.segment}".strip()),
        ("began", f"{format_iso_time(run.started_ms)} by {run.holder}, in slot {run.slot}"),
        ("ended", format_iso_time(run.ended_ms) if run.ended_ms >= 0 else ""),
        ("published", f"in slot {run.published_slot} by epoch {run.leader_epoch}" if run.published_slot else ""),
        ("offsets", _format_offsets(run)),
        ("cleaner offsets", f"{offsets[0]} -> {offsets[1]}" if run.published_slot else ""),
        ("segments", f"{run.sources} -> {run.outputs}" if run.outputs else ""),
        ("saved", _format_saved_bytes(run)),
        *((name.replace("_", " "), _format_run_statistic(name, value)) for name, value in run.stats.items()),
        *_balance_rows(run),
        ("undo", f"no: {undoing}" if undoing else command_parser.command_line(args, f"undo {run.run_id}")),
    ]
    out.print_result(run_document(state, run), Table(f"run {run.run_id}", ("", ""), [row for row in rows if row[1] != ""]))


def _balance_rows(run: RunHistoryEntry) -> list[tuple[str, object]]:
    """Counts and digest sums which show that each batch and record of the sources was either kept or removed."""
    if run.balance is None:
        return []
    b = run.balance
    batches = [f"{b.left} left", f"{b.opened} opened", *(f"{gone} {reason}" for reason, gone in b.dropped.items())]
    records = [f"{b.written} written", *(f"{gone} {reason}" for reason, gone in b.records_dropped.items())]
    return [
        ("balance of batches", f"{b.sources} = {' + '.join(batches)}"),
        ("balance of records", f"{b.records} = {' + '.join(records)}"),
        ("balance", b.imbalance_problem() or "it adds up"),
        ("readers had after it", f"{run.content} batches" if run.content else ""),
    ]


def _format_offsets(run: RunHistoryEntry) -> str:
    """Text such as ``1000 -> 2500``, with ``?`` for an unknown offset after the run."""
    if run.first_dirty_offset < 0:
        return ""
    return f"{run.first_dirty_offset} -> {run.next_dirty_offset if run.next_dirty_offset >= 0 else '?'}"


def _format_byte_stat(run: RunHistoryEntry, name: str) -> str:
    value = run.stats.get(name)
    return format_size(value) if isinstance(value, int) else ""


def _format_saved_bytes(run: RunHistoryEntry) -> str:
    if not run.published_slot or "bytes_before" not in run.stats:
        return ""
    return format_size(int(run.stats["bytes_before"]) - int(run.stats["bytes_written"]))


def _format_run_statistic(name: str, value: float | str) -> str:
    return format_size(value) if "bytes" in name and isinstance(value, int) else str(value)
