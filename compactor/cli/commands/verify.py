"""``verify [TOPIC-PARTITION...]``: metadata against objects, indexes against logs, CRCs, gaps, overlaps, orphans."""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.pipeline.verifying import Problem, verify_partition

    opened = tiers.opened(args)
    found: list[Problem] = []
    with out.progress("verifying", unit="bytes") as progress:
        for name in opened.partitions(args.partitions):
            progress.at(f"verifying {name}")
            limit = opened.settings.cleaner_for(name.topic).max_decompressed_batch_bytes
            found += verify_partition(opened, name, limit, progress.advance)
    ok = not any(problem.severity == "error" for problem in found)
    for problem in found:
        if problem.severity == "error":
            out.note(f"error: {problem.object}: {problem.detail}")
    rows = [(p.severity, p.kind, f"{p.topic}-{p.partition}", p.object, p.detail) for p in found]
    tables = [Table("", ("severity", "kind", "partition", "object", "detail"), rows)] if rows else []
    out.result({"ok": ok, "problems": [tiers.plain(problem) for problem in found]}, *tables, summary="all is well" if ok else "NOT ok")
    return 0 if ok else 3
