"""``retire``: deletes what is due and sweeps orphans."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import CompactorError

if TYPE_CHECKING:
    from compactor.control.logs import PartitionLog

NOTED_TOGETHER = 100
"""Partitions whose control logs' ends are written down in one record of the tier-wide log."""


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument(
        "--now", type=frame.whole(), metavar="MS", help="stands in for the store's clock; ahead of it only with --force-now"
    )
    parser.add_argument("--force-now", action="store_true", help="let --now shorten grace, and sweep orphans whatever their age")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.retire import Clock, retire
    from compactor.upkeep.uploads import sweep_uploads

    clock = Clock(args.now, args.force_now)
    opened = tiers.opened(args, writes="retire")
    if args.now is not None and not args.force_now and args.now > opened.ports.clock_ms():
        out.note("note: --now lies ahead of the store's clock, which counts then: only --force-now shortens grace")
    outcomes = tiers.PartitionOutcomes(out, named=False)
    deleted: list[str] = []
    swept: list[str] = []
    waiting: list[str] = []
    freed = 0
    behind: list[PartitionLog] = []
    names = opened.partitions()
    with out.progress("retiring", len(names), "partitions") as progress:
        for name in names:
            progress.advance()
            try:
                # An open intent is resumed first, as `run` would.
                work = opened.round(name, opened.ports.clock_ms())
                log = opened.open(name, leads=True)
                report = retire(opened.ports, log, opened.lease, opened.retention, clock=clock, dry_run=args.dry_run, work=work)
            except Exception as error:  # noqa: BLE001 - the other partitions go on (I9)
                outcomes.failed(str(name), error)
                continue
            outcomes.ok()
            if not args.dry_run and log.state.slot > opened.floor(name):
                behind.append(log)
            if len(behind) >= NOTED_TOGETHER:
                opened.note_slots(behind)
                behind.clear()
            deleted += report.deleted
            swept += report.swept
            waiting += report.waiting
            freed += report.bytes
    if behind:
        opened.note_slots(behind)
    try:
        now = opened.ports.clock_ms()
        if args.now is not None:
            now = args.now if args.force_now else min(now, args.now)
        swept += sweep_uploads(opened, now, dry_run=args.dry_run)
    except CompactorError as error:
        outcomes.failed("unfinished uploads", error)
    would = "to be " if args.dry_run else ""
    groups = ((would + "deleted", deleted), (would + "swept", swept), ("waiting", waiting))
    rows = [(what, segment, count) for what, keys in groups for segment, count in _by_segment(keys).items()]
    tables = [Table("", ("", "segment", "objects"), rows)] if rows else []
    summary = f"{len(deleted)} objects {would}deleted, {len(swept)} {would}swept, {len(waiting)} wait for grace; {size(freed)}"
    out.result({"deleted": deleted, "swept": swept, "waiting": waiting, "bytes": freed}, *tables, summary=summary)
    return outcomes.exit_code()


def _by_segment(keys: list[str]) -> Counter[str]:
    """A segment's objects differ in their suffix."""
    return Counter(key.rpartition(".")[0] for key in keys)
