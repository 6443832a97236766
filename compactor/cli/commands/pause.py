"""Command ``pause PATTERN``: no compactor begins a round on the matching partitions until ``resume``."""

from __future__ import annotations

import argparse
import re

from compactor.cli import audit, frame, tiers
from compactor.cli.output import Output, Table
from compactor.views.words import iso_time


def add_arguments(parser: frame.Parser) -> None:
    parser.set_command(
        run_pause,
        frame.argument(
            "pattern",
            metavar="PATTERN",
            nargs="?",
            help="a topic, a TOPIC-PARTITION or a whole regular expression (none: lists what is paused)",
        ),
        audit.REASON_OPTION,
    )


def run_pause(args: argparse.Namespace, out: Output) -> None:
    from compactor.control.pauses import pattern_matches, pause_rounds

    opened = tiers.open_read_only(args) if args.pattern is None else tiers.open_for_control_writes(args)
    names = opened.partitions()
    if args.pattern is not None:
        with audit.recorded_action(args, opened.settings, out, "pause", [args.pattern]):
            anew = pause_rounds(opened.catalog, args.pattern, audit.operator_name(), args.reason)
        if not anew:
            out.note(f"{args.pattern} was paused already")
        if not any(pattern_matches(args.pattern, name) for name in names):
            plain = re.escape(args.pattern) == args.pattern
            out.note(f"note: {args.pattern} matches no partition of the tier yet" + ("" if plain else "; it is a whole regular expression"))
    paused = opened.catalog.state.paused if args.pattern is not None else opened.identity.read().paused
    rows = [
        (pattern, sum(pattern_matches(pattern, name) for name in names), one.by, iso_time(one.at_ms), one.reason)
        for pattern, one in sorted(paused.items())
    ]
    fields = ("pattern", "partitions", "by", "since", "reason")
    document = {"paused": [dict(zip(fields, row, strict=True)) for row in rows]}
    out.print_result(
        document, *([Table("", fields, rows, minor=("since",), below=1)] if rows else []), summary="" if rows else "Nothing is paused"
    )
