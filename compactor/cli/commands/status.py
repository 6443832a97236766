"""Command ``status``: the verdict of the daemon's first page, made from the tier alone."""

from __future__ import annotations

import argparse
import time

from compactor.cli import tiers
from compactor.cli.command_parser import WATCH_SECONDS
from compactor.cli.output import Output, Table, format_size
from compactor.config.times import format_until, format_utc_time
from compactor.config.units import count_noun, format_duration
from compactor.daemon.status import read_daemon_status
from compactor.errors import BadData, ExitCode, StoreError
from compactor.web.console import MOST_PER_PAGE, PartitionListQuery
from compactor.web.documents import DaemonPartitionRow, DaemonTotals, ServiceStatusDocument
from compactor.web.pages import DaemonPages

SHOWN_PARTITIONS = 15
"""Largest number of partitions in the table, so that it fits one screen. JSON has all of them."""
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def show_tier_status(args: argparse.Namespace, out: Output) -> ExitCode:
    tier = tiers.open_read_only(args)
    while True:
        try:
            with out.show_progress("reading the tier") as progress:
                found = read_daemon_status(tier, progress.advance)
        except StoreError as error:
            if not args.watch:
                raise
            out.print_note(f"error: {error}. It is tried again")
            time.sleep(WATCH_SECONDS)
            continue
        runbook = tier.settings.daemon.runbook_url
        pages = DaemonPages(lambda: found, lambda name: None, getattr(args, "config", ""), runbook_url=runbook)  # noqa: B023, called at once
        document = pages.status_page_document(PartitionListQuery(per_page=max(MOST_PER_PAGE, len(found.schedules))))
        if args.watch and out.terminal_width() is not None and out.mode == "table":
            out.write_chunks([CLEAR_SCREEN.encode()])
        watched = f"\n{format_utc_time(document.now_ms)}, again every {WATCH_SECONDS} s; Ctrl-C ends" if args.watch else ""
        out.print_result(
            document.model_dump(mode="json", exclude={"schema_version"}),
            _partition_status_table(document),
            summary=_tier_totals_text(document) + watched,
        )
        if not args.watch:
            return 0 if document.verdict.level == "ok" else BadData.exit_code
        time.sleep(WATCH_SECONDS)


def _partition_status_table(document: ServiceStatusDocument[DaemonTotals, DaemonPartitionRow]) -> Table:
    first_command = {each.partition: each.next_step or each.commands[0] for each in document.needs_attention if each.commands}
    since = {each.partition: each.since_ms for each in document.needs_attention}
    rows = []
    for row in document.partitions.rows[:SHOWN_PARTITIONS]:
        at_ms, failing_ms = row.next.at_ms, since.get(row.partition)
        is_held = row.verdict is not None and row.verdict.kind in ("blocked", "waiting")
        rows.append(
            (
                row.partition,
                row.state,
                format_size(row.bytes),
                format_size(row.verdict.waiting_bytes) if row.verdict is not None and row.verdict.waiting_bytes else "",
                "" if at_ms is None or row.next.action == "poll" else f"{row.next.action} {format_until(at_ms, document.now_ms)}",
                (f"for {format_duration(document.now_ms - failing_ms)}: " if failing_ms else "") + row.reason if is_held else "",
                first_command.get(row.partition, ""),
            )
        )
    columns = ("partition", "state", "size", "dirty", "next", "reason", "begin with")
    return Table(document.verdict.text, columns, rows, minor=("next",), below=2)


def _tier_totals_text(document: ServiceStatusDocument[DaemonTotals, DaemonPartitionRow]) -> str:
    totals, hidden = document.totals, document.partitions.matching - SHOWN_PARTITIONS
    lines = [f"and {count_noun(hidden, 'more partition')}; --output json has all"] if hidden > 0 else []
    dirty, waiting = format_size(totals.dirty_bytes), format_size(totals.waiting_bytes)
    live = f"{format_size(totals.stored_bytes - totals.waiting_bytes)} in {count_noun(totals.segments, 'segment')}"
    counts = f"{totals.due_partitions} due" + (f", {totals.attention_partitions} blocked" if totals.attention_partitions else "")
    held = f", {format_size(totals.blocked_bytes)} wait in blocked partitions" if totals.blocked_bytes else ""
    lines.append(f"{count_noun(totals.partitions, 'partition')}, {counts}; {live}, {dirty} dirty{held}")
    until = f", the first of it {format_until(totals.waiting_due_ms, document.now_ms)}" if totals.waiting_due_ms is not None else ""
    lines.append(f"{waiting} replaced, waiting for deletion{until}; {format_size(totals.reclaimed_24h_bytes)} reclaimed in 24 h")
    return "\n".join(lines)
