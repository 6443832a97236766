"""``pause PATTERN``: no compactor begins a round over what it matches, until ``resume``."""

from __future__ import annotations

import argparse
import re

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument(
        "pattern",
        metavar="PATTERN",
        nargs="?",
        help="a topic, a TOPIC-PARTITION or a whole regular expression (none: lists what is paused)",
    )
    parser.add_argument("--reason", default="", help="why, for those who wonder later")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> None:
    from compactor.control.pauses import matches, pause
    from compactor.views.difference import iso

    opened = tiers.viewed(args) if args.pattern is None else tiers.keeping(args)
    names = opened.partitions()
    if args.pattern is not None:
        anew = pause(opened.catalog, args.pattern, opened.ports.holder, args.reason)
        if not anew:
            out.note(f"{args.pattern} was paused already")
        if not any(matches(args.pattern, name) for name in names):
            plain = re.escape(args.pattern) == args.pattern
            out.note(f"note: {args.pattern} matches no partition of the tier yet" + ("" if plain else "; it is a whole regular expression"))
    paused = opened.catalog.state.paused if args.pattern is not None else opened.identity().paused
    rows = [
        (pattern, sum(matches(pattern, name) for name in names), one.by, iso(one.at_ms), one.reason)
        for pattern, one in sorted(paused.items())
    ]
    fields = ("pattern", "partitions", "by", "since", "reason")
    document = {"paused": [dict(zip(fields, row, strict=True)) for row in rows]}
    out.result(document, *([Table("", fields, rows)] if rows else []), summary="" if rows else "Nothing is paused")
