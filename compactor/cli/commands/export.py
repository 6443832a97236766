"""Command ``export TOPIC-PARTITION DIR``: writes a partition's current view as a Kafka log directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, format_size


def add_arguments(parser: frame.Parser) -> None:
    parser.set_command(
        run_export,
        tiers.PARTITION_ARGUMENT,
        tiers.TOPIC_ID_ARGUMENT,
        frame.argument("folder", metavar="DIR", type=Path, help="must not exist"),
    )


def run_export(args: argparse.Namespace, out: Output) -> None:
    from compactor.transfer.export import export_partition

    opened, name = tiers.open_partition(args, tiers.open_configured_tier)
    with out.progress(f"exporting {name}", unit="bytes") as progress:
        report = export_partition(opened, name, args.folder, progress.advance, lambda size: progress.begin_step(progress.title, size))
    row = (str(name), report.segments, format_size(report.bytes), report.start_offset, report.end_offset)
    out.print_result(tiers.report_document(report), Table("", ("partition", "segments", "size", "start offset", "end offset"), [row]))
