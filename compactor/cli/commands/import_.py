"""``import LOG_DIR --topic T --partition P``: the sealed segments of a Kafka log directory into the tier."""

from __future__ import annotations

import argparse
from pathlib import Path

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.cli.warming import warm_up


def add_arguments(parser: frame.Parser) -> None:
    parser.add_argument(
        "log_dir", metavar="LOG_DIR", type=Path, help="<20 digits>.log and what belongs to them; all segments count as sealed"
    )
    parser.add_argument("--topic", required=True, metavar="T")
    parser.add_argument("--partition", required=True, type=frame.whole(0, 2**31 - 1), metavar="P")
    parser.add_argument("--allow-gaps", action="store_true", help="a cleaner took away what is missing between segments")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> None:
    from compactor.model.ids import TopicPartition
    from compactor.transfer.import_ import ImportProgress, import_directory

    name = TopicPartition.of(args.topic, args.partition)
    opened = tiers.opened(args)
    policy = opened.settings.cleaner_for(name.topic).policy()
    warm_up(out, gate=False)
    with out.progress("importing", unit="bytes") as bar:
        progress = ImportProgress(lambda step, size: bar.at(f"{step} {name}", size), bar.advance)
        report = import_directory(opened, args.log_dir, name, policy, progress, gaps=args.allow_gaps)
    if report.repeated:
        out.note(f"{name}: this directory was imported before; nothing to do")
    document = {key: value for key, value in tiers.plain(report).items() if key != "repeated"}
    row = (str(name), report.segments, size(report.bytes), report.start_offset, report.end_offset)
    out.result(document, Table("", ("partition", "segments", "size", "start offset", "end offset"), [row]))
