"""Command ``wake TOPIC-PARTITION...``: asks the daemons to run a round on these partitions at their next scan, whatever the dirty ratio
is.
"""

from __future__ import annotations

import argparse

from compactor.cli import audit, frame, tiers
from compactor.cli.output import Output
from compactor.views.words import format_duration


def add_arguments(parser: frame.Parser) -> None:
    parser.set_command(
        run_wake,
        frame.argument("partitions", nargs="+", metavar="TOPIC[-PARTITION]", help="partitions, topics or whole regular expressions"),
        audit.REASON_OPTION,
    )


def run_wake(args: argparse.Namespace, out: Output) -> None:
    from compactor.control.pauses import pause_reason, request_round

    opened = tiers.open_for_control_writes(args)
    names = tiers.select_partitions(opened, args.partitions)
    with audit.recorded_action(args, opened.settings, out, "wake", [*map(str, names)]):
        for name in names:
            if why := pause_reason(opened.catalog.state, name):
                out.note(f"note: {name} is {why}; it is taken up once that is over")
            request_round(opened.catalog, name, audit.operator_name())
    reported = f"{names[0]} is" if len(names) == 1 else f"{len(names)} partitions are"
    wait = f"within daemon.interval_ms ({format_duration(opened.settings.daemon.interval_ms)})"
    out.print_result({"wanted": [str(name) for name in names]}, summary=f"{reported} taken up by a daemon {wait}, if one runs")
