"""``run [TOPIC-PARTITION...]``: one round over what is due; also finishes or undoes what a crash left."""

from __future__ import annotations

import argparse
import time

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import CompactorError


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    tiers.now_argument(parser)
    parser.add_argument("--force", action="store_true", help="clean whatever is dirty, whatever the dirty ratio says")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.cleaner.warm import warm_up
    from compactor.pipeline.compaction import compact

    opened = tiers.opened(args)
    names = opened.partitions(args.partitions)
    outcomes = tiers.Outcomes(out, named=bool(args.partitions))
    found: list[dict[str, object]] = []
    with out.progress("compiling kernels (first time only)"):
        warm_up()
    with out.progress("cleaning", len(names), "partitions") as progress:
        for name in names:
            begin = time.monotonic()
            row: dict[str, object] = {"topic": name.topic, "partition": name.partition}
            try:
                report = compact(
                    opened, name, tiers.now_ms(args), force=args.force, on_stage=lambda stage, plan, n=name: progress.at(f"{n}: {stage.value}")
                )
                row = tiers.plain(report)
                if report.status == "quarantined":
                    outcomes.bad_data(str(name), report.reason)
                else:
                    outcomes.ok()
            except CompactorError as error:
                outcomes.failed(str(name), error)
                row |= {"status": _status(error), "reason": error.message}
            row["seconds"] = round(time.monotonic() - begin, 3)
            found.append(row)
            progress.advance()
    out.result({"partitions": found}, _table(found))
    return outcomes.exit_code()


def _status(error: CompactorError) -> str:
    from compactor.errors import Fenced, Leased

    if isinstance(error, Leased):
        return "leased"
    return "fenced" if isinstance(error, Fenced) else "failed"


def _table(found: list[dict[str, object]]) -> Table:
    columns = ("partition", "status", "segments", "records", "kept", "read", "written", "next dirty", "seconds")
    rows = []
    for row in found:
        segments = f"{row['segments_in']} -> {row['segments_out']}" if row.get("segments_out") else ""
        read, written = row.get("bytes_read"), row.get("bytes_written")
        rows.append(
            (
                f"{row['topic']}-{row['partition']}", row["status"], segments, row.get("records_read"), row.get("records_kept"),
                size(read) if isinstance(read, int) else "", size(written) if isinstance(written, int) else "",
                row.get("next_dirty_offset"), row["seconds"],
            )
        )  # fmt: skip
    return Table("", columns, rows)
