"""``plan``: what `run` would do, per partition, and what it would cost."""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    tiers.now_argument(parser)
    parser.add_argument("--force", action="store_true", help="as `run --force` would")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> None:
    from compactor.pipeline.forecast import forecast

    opened = tiers.opened(args)
    found = [forecast(opened, name, tiers.now_ms(args), force=args.force) for name in opened.partitions(args.partitions)]
    rows = [
        (f"{f.topic}-{f.partition}", f.due, f.reason, f.dirty_ratio, len(f.segments), size(f.bytes_to_read), size(f.bytes_to_write), f.map_keys, f.cost_usd)
        for f in found
    ]
    columns = ("partition", "due", "reason", "dirty ratio", "segments", "to read", "to write, at most", "keys, at most", "USD")
    out.result({"partitions": [tiers.plain(f) for f in found]}, Table("", columns, rows))
