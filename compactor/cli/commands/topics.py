"""``topics``: what the tier holds."""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> None:
    opened = tiers.opened(args)
    partitions = []
    for name in opened.partitions():
        state = opened.open(name).refresh()
        if state.live:
            partitions.append(
                {
                    "topic": name.topic,
                    "partition": name.partition,
                    "segments": len(state.live),
                    "bytes": state.bytes,
                    "start_offset": state.start_offset,
                    "end_offset": state.end_offset,
                }
            )
    rows = [(p["topic"], p["partition"], p["segments"], size(int(p["bytes"])), p["start_offset"], p["end_offset"]) for p in partitions]
    out.result({"partitions": partitions}, Table("", ("topic", "partition", "segments", "size", "start offset", "end offset"), rows))
