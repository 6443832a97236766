"""Command ``verify [TOPIC-PARTITION...]``: checks metadata against objects, indexes against logs, CRCs, gaps, overlaps and orphans."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table
from compactor.errors import BadData, UsageError

if TYPE_CHECKING:
    from compactor.access.tier import Tier
    from compactor.upkeep.segment_check import SegmentProblem

Finding = TypeVar("Finding")


def add_arguments(parser: frame.Parser) -> None:
    parser.set_command(
        run_verify,
        tiers.PARTITIONS,
        frame.argument("--fast", action="store_true", help="a tier that brokers write: without reading segments"),
        frame.argument("--deep", action="store_true", help="also add up what each segment holds, and compare it with what was recorded"),
    )


def run_verify(args: argparse.Namespace, out: Output) -> int:
    from compactor.tier.kinds import MetadataSource

    opened = tiers.open_read_only(args)
    if args.fast and not opened.kind.is_broker_managed:
        raise UsageError("--fast is for tiers that brokers write", hint="Leave it out: every live object is read")
    checks = {
        MetadataSource.CONTROL_LOG: _verify_control_logs,
        MetadataSource.METADATA_TOPIC: _verify_brokers,
        MetadataSource.LISTING: _verify_listing,
    }
    return checks[opened.kind.metadata](opened, args, out)


def _verify_control_logs(opened: Tier, args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.verify_tier import verify_catalog, verify_partition, verify_uploads

    found = verify_catalog(opened)
    if not found:
        found = _verify_each(opened, args, out, partial(verify_partition, deep=args.deep))
    return _print_problems([*found, *verify_uploads(opened)], out)


def _verify_listing(opened: Tier, args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.verify_listed import verify_listed_partition

    return _print_problems(_verify_each(opened, args, out, verify_listed_partition), out)


def _verify_each(opened: Tier, args: argparse.Namespace, out: Output, verify: Callable[..., list[Finding]]) -> list[Finding]:
    """Verify one partition after the other. verify: (tier, partition, receives the number of bytes read) -> its problems."""
    found: list[Finding] = []
    with out.progress("verifying", unit="bytes") as progress:
        for name in opened.partitions(args.partitions):
            progress.begin_step(f"verifying {name}")
            found += verify(opened, name, progress.advance)
    return found


def _print_problems(found: Sequence[SegmentProblem], out: Output) -> int:
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
    document = {"ok": ok, "problems": [tiers.report_document(problem) for problem in found]}
    out.print_result(document, *tables, summary="all is well" if ok else f"{len(rows)} problems")
    return 0 if ok else BadData.exit_code


def _verify_brokers(opened: Tier, args: argparse.Namespace, out: Output) -> int:
    """Verify a broker-managed tier and print the findings."""
    from compactor.upkeep.brokers.verify import verify_broker_partition

    found = _verify_each(opened, args, out, lambda *one: verify_broker_partition(*one, fast=args.fast))
    errors = [one for one in found if one.severity == "error"]
    for one in errors:
        out.note(f"error: {one.object or f'{one.topic}-{one.partition}'}: {one.detail}: {one.means}")
    rows = [(one.severity, one.kind, f"{one.topic}-{one.partition}", one.object, one.detail, one.means, one.todo) for one in found]
    columns = ("severity", "problem", "partition", "object", "what was found", "what it means for consumers", "what to do")
    tables = [Table("", columns, rows)] if rows else []
    document = {"ok": not errors, "problems": [tiers.report_document(one) for one in found]}
    summary = f"{len(errors)} errors, {len(found) - len(errors)} warnings and notes" if found else "all is well"
    out.print_result(document, *tables, summary=summary)
    return BadData.exit_code if errors else 0
