"""``wake TOPIC-PARTITION...``: the daemons take them up at their next scan, whatever the dirty ratio says."""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument("partitions", nargs="+", metavar="TOPIC-PARTITION")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> None:
    from compactor.control.pauses import pause_of, want

    opened = tiers.keeping(args)
    names = opened.partitions(args.partitions)
    for name in names:
        if why := pause_of(opened.catalog.state, name):
            out.note(f"note: {name} is {why}; it is taken up once that is over")
        want(opened.catalog, name, opened.ports.holder)
    told = f"{names[0]} is" if len(names) == 1 else f"{len(names)} partitions are"
    wait = f"within daemon.interval_ms ({opened.settings.daemon.interval_ms} ms)"
    out.result({"wanted": [str(name) for name in names]}, summary=f"{told} taken up by a daemon {wait}, if one runs")
