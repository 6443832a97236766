"""``resume PATTERN``: rounds may be begun again over what ``pause`` kept them from."""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument("pattern", metavar="PATTERN", help="as `pause` was given it")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> None:
    from compactor.control.pauses import matches, pause_of, resume

    opened = tiers.keeping(args)
    names = opened.partitions()
    resume(opened.catalog, args.pattern, opened.ports.holder)
    still = [str(name) for name in names if matches(args.pattern, name) and pause_of(opened.catalog.state, name)]
    summary = f"{args.pattern} is not paused any more"
    if still:
        summary += f"; {len(still)} of its partitions still are, by another pattern: {', '.join(still[:5])}"
    out.result({"pattern": args.pattern, "still_paused": still}, summary=summary)
