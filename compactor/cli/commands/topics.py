"""``topics``: what the tier holds."""

from __future__ import annotations

import argparse

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size


def add_arguments(parser: frame.Parser) -> None:
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    outcomes = tiers.Outcomes(out, named=False)
    with tiers.opened(args, local_state=True) as opened:
        found = [summary for summary in tiers.summaries(opened, opened.partitions(), out, outcomes) if summary.segments]
    fields = ("topic", "partition", "segments", "bytes", "start_offset", "end_offset")
    partitions = [{field: getattr(summary, field) for field in fields} for summary in found]
    rows = [(s.topic, s.partition, s.segments, size(s.bytes), s.start_offset, s.end_offset) for s in found]
    out.result({"partitions": partitions}, Table("", ("topic", "partition", "segments", "size", "start offset", "end offset"), rows))
    return outcomes.exit_code()
