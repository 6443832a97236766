"""Command ``resume PATTERN``: ends a pause, so that rounds may begin again."""

from __future__ import annotations

import argparse

from compactor.cli import audit, frame, tiers
from compactor.cli.output import Output


def add_arguments(parser: frame.Parser) -> None:
    parser.set_command(run_resume, frame.argument("pattern", metavar="PATTERN", help="as `pause` was given it"), audit.REASON_OPTION)


def run_resume(args: argparse.Namespace, out: Output) -> None:
    from compactor.control.pauses import pattern_matches, pause_reason, resume_rounds

    opened = tiers.open_for_control_writes(args)
    names = opened.partitions()
    with audit.recorded_action(args, opened.settings, out, "resume", [args.pattern]):
        resume_rounds(opened.catalog, args.pattern, audit.operator_name())
    still = [str(name) for name in names if pattern_matches(args.pattern, name) and pause_reason(opened.catalog.state, name)]
    summary = f"{args.pattern} is not paused any more"
    if still:
        summary += f"; {len(still)} of its partitions still are, by another pattern: {', '.join(still[:5])}"
    out.print_result({"pattern": args.pattern, "still_paused": still}, summary=summary)
