"""``export TOPIC-PARTITION DIR``: the current readable view as a Kafka log directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument("partition", metavar="TOPIC-PARTITION")
    parser.add_argument("folder", metavar="DIR", type=Path, help="must not exist")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> None:
    from compactor.transfer.export import export_partition

    opened = tiers.opened(args)
    (name,) = opened.partitions([args.partition])
    with out.progress(f"exporting {name}", unit="bytes") as progress:
        report = export_partition(opened, name, args.folder, progress.advance, lambda size: progress.at(progress.title, size))
    row = (str(name), report.segments, size(report.bytes), report.start_offset, report.end_offset)
    out.result(tiers.plain(report), Table("", ("partition", "segments", "size", "start offset", "end offset"), [row]))
