"""``verify [TOPIC-PARTITION...]``: metadata against objects, indexes against logs, CRCs, gaps, overlaps, orphans."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table
from compactor.errors import BadData, UsageError

if TYPE_CHECKING:
    from compactor.bootstrap import Tier


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    parser.add_argument("--fast", action="store_true", help="a tier that brokers write: without reading segments")
    parser.add_argument("--deep", action="store_true", help="also add up what each segment holds, and compare it with what was recorded")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.verify_listed import verify_listed
    from compactor.upkeep.verify_tier import verify_catalog, verify_partition, verify_uploads

    opened = tiers.viewed(args)
    if opened.brokers is not None:
        return _run_brokers(opened, args, out)
    if args.fast:
        raise UsageError("--fast is for tiers that brokers write", hint="Leave it out: every live object is read")
    found = verify_catalog(opened) if opened.listed is None else []
    with out.progress("verifying", unit="bytes") as progress:
        for name in [] if found else opened.partitions(args.partitions):
            progress.at(f"verifying {name}")
            if opened.listed is None:
                found += verify_partition(opened, name, progress.advance, deep=args.deep)
            else:
                found += verify_listed(opened, name, progress.advance)
    found += verify_uploads(opened) if opened.listed is None else []
    ok = not any(problem.severity == "error" for problem in found)
    for problem in found:
        if problem.severity == "error":
            out.note(f"error: {problem.object or f'{problem.topic}-{problem.partition}'}: {problem.detail}")
    rows = [(p.kind, f"{p.topic}-{p.partition}", p.object, p.detail) for p in found if p.severity == "error"]
    tables = [Table("", ("problem", "partition", "object", "detail"), rows)] if rows else []
    notes = Counter((p.kind, f"{p.topic}-{p.partition}" if p.topic else "", p.detail) for p in found if p.severity != "error")
    tables += (
        [Table("", ("note", "partition", "how many", ""), [(*about[:2], count, about[2]) for about, count in notes.items()])]
        if notes
        else []
    )
    document = {"ok": ok, "problems": [tiers.plain(problem) for problem in found]}
    out.result(document, *tables, summary="all is well" if ok else f"{len(rows)} problems")
    return 0 if ok else BadData.exit_code


def _run_brokers(opened: Tier, args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.verify_brokers import verify_brokers_partition

    found = []
    with out.progress("verifying", unit="bytes") as progress:
        for name in opened.partitions(args.partitions):
            progress.at(f"verifying {name}")
            found += verify_brokers_partition(opened, name, fast=args.fast, on_bytes=progress.advance)
    errors = [one for one in found if one.severity == "error"]
    for one in errors:
        out.note(f"error: {one.object or f'{one.topic}-{one.partition}'}: {one.detail}: {one.means}")
    rows = [(one.severity, one.kind, f"{one.topic}-{one.partition}", one.object, one.detail, one.means, one.todo) for one in found]
    columns = ("severity", "problem", "partition", "object", "what was found", "what it means for consumers", "what to do")
    tables = [Table("", columns, rows)] if rows else []
    document = {"ok": not errors, "problems": [tiers.plain(one) for one in found]}
    summary = f"{len(errors)} errors, {len(found) - len(errors)} warnings and notes" if found else "all is well"
    out.result(document, *tables, summary=summary)
    return BadData.exit_code if errors else 0
