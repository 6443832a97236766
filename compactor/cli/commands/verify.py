"""``verify [TOPIC-PARTITION...]``: metadata against objects, indexes against logs, CRCs, gaps, overlaps, orphans."""

from __future__ import annotations

import argparse
from collections import Counter

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table
from compactor.errors import BadData


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.upkeep.verify_listed import verify_listed
    from compactor.upkeep.verify_tier import verify_catalog, verify_partition, verify_uploads

    opened = tiers.viewed(args)
    found = verify_catalog(opened) if opened.listed is None else []
    with out.progress("verifying", unit="bytes") as progress:
        for name in [] if found else opened.partitions(args.partitions):
            progress.at(f"verifying {name}")
            verify = verify_partition if opened.listed is None else verify_listed
            found += verify(opened, name, progress.advance)
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
