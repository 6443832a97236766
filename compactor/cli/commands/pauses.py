"""Commands ``pause``, ``resume`` and ``wake`` for rounds on matching partitions."""

from __future__ import annotations

import argparse
import re

from compactor.cli import tiers, tiers as audit
from compactor.cli.output import Output, Table
from compactor.config.times import format_iso_time
from compactor.config.units import format_duration
from compactor.control.logs import (
    pattern_matches,
    pause_reason,
    pause_rounds,
    request_round,
    resume_rounds,
)


def pause_command(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_read_only(args) if args.pattern is None else tiers.open_for_control_writes(args)
    names = tier.list_partitions()
    if args.pattern is not None:
        with audit.audited(args, tier.settings, out, "pause", [args.pattern]):
            anew = pause_rounds(tier.catalog, args.pattern, audit.operator_name(), args.reason)
        if not anew:
            out.print_note(f"{args.pattern} was paused already")
        if not any(pattern_matches(args.pattern, name) for name in names):
            plain = re.escape(args.pattern) == args.pattern
            out.print_note(
                f"note: {args.pattern} matches no partition of the tier yet" + ("" if plain else "; it is a whole regular expression")
            )
    paused = tier.catalog.state.paused if args.pattern is not None else tier.identity.read_catalog().paused
    rows = [
        (pattern, sum(pattern_matches(pattern, name) for name in names), one.by, format_iso_time(one.at_ms), one.reason)
        for pattern, one in sorted(paused.items())
    ]
    fields = ("pattern", "partitions", "by", "since", "reason")
    document = {"paused": [dict(zip(fields, row, strict=True)) for row in rows]}
    out.print_result(
        document, *([Table("", fields, rows, minor=("since",), below=1)] if rows else []), summary="" if rows else "Nothing is paused"
    )


def resume_command(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_for_control_writes(args)
    names = tier.list_partitions()
    with audit.audited(args, tier.settings, out, "resume", [args.pattern]):
        resume_rounds(tier.catalog, args.pattern, audit.operator_name())
    still = [str(name) for name in names if pattern_matches(args.pattern, name) and pause_reason(tier.catalog.state, name)]
    summary = f"{args.pattern} is not paused any more"
    if still:
        summary += f"; {len(still)} of its partitions still are, by another pattern: {', '.join(still[:5])}"
    out.print_result({"pattern": args.pattern, "still_paused": still}, summary=summary)


def wake_command(args: argparse.Namespace, out: Output) -> None:
    tier = tiers.open_for_control_writes(args)
    names = tiers.select_partitions(tier, args.partitions)
    with audit.audited(args, tier.settings, out, "wake", [*map(str, names)]):
        for name in names:
            if why := pause_reason(tier.catalog.state, name):
                out.print_note(f"note: {name} is {why}; it is taken up once that is over")
            request_round(tier.catalog, name, audit.operator_name())
    reported = f"{names[0]} is" if len(names) == 1 else f"{len(names)} partitions are"
    wait = f"within daemon.interval_ms ({format_duration(tier.settings.daemon.interval_ms)})"
    out.print_result({"wanted": [str(name) for name in names]}, summary=f"{reported} taken up by a daemon {wait}, if one runs")
