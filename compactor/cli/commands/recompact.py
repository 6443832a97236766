"""``recompact [TOPIC-PARTITION...]``: the Spark job for full re-compaction."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size

if TYPE_CHECKING:
    from compactor.spark.cluster.executor import Cost
    from compactor.spark.cluster.session import Started
    from compactor.spark.recompaction import Finished, Look


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    tiers.now_argument(parser)
    parser.add_argument(
        "--min-benefit", type=frame.whole(), metavar="BYTES", default=1,
        help="leave partitions alone whose round would gain less (default: 1, those that gain nothing)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="leave none alone")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing; without Spark")
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.spark.cluster.versions import check_pyspark
    from compactor.spark.recompaction import Listener, looks, recompact, row_of

    opened = tiers.opened(args, writes="" if args.dry_run else "recompact")
    names = opened.partitions(args.partitions)
    outcomes = tiers.PartitionOutcomes(out, named=bool(args.partitions))
    min_benefit = 0 if args.force else args.min_benefit
    if args.dry_run:
        return _dry_run(looks(opened, names, tiers.now_ms(args), min_benefit), out, outcomes)
    check_pyspark()
    from compactor.spark.cluster.executor import Cost
    from compactor.spark.cluster.jobs import JobWatch
    from compactor.spark.cluster.session import cluster

    cost = Cost()
    with ExitStack() as stack:
        with out.progress("starting Spark"):
            started = stack.enter_context(cluster(opened.settings, "tiered-compactor recompact"))
        if started.ui:
            out.note(f"Spark runs on {started.master}; its pages are at {started.ui}")
        with out.progress("re-compacting", len(names), "partitions") as progress:

            def done(finished: Finished) -> None:
                progress.advance()
                _tell(finished, out, outcomes, f"{progress.done} of {len(names)}")

            finished = recompact(opened, started.cluster, names, tiers.now_ms(args), cost, Listener(JobWatch(), done), min_benefit)
        spark = _spark(started, cost)  # as long as it runs
    rows = [row_of(one) for one in finished]
    out.result({"partitions": rows, "spark": spark}, _table(rows), summary=_summary(started, cost))
    return outcomes.exit_code()


def _dry_run(found: Sequence[Look], out: Output, outcomes: tiers.PartitionOutcomes) -> int:
    rows = []
    for look in found:
        if look.error is not None:
            outcomes.failed(str(look.name), look.error)
        else:
            outcomes.ok()
            status = "left_alone" if look.left else "would_be_cleaned"
            rows.append(
                {"topic": look.name.topic, "partition": look.name.partition, "status": status, "reason": look.left, "bytes": look.bytes}
            )
    cells = [(f"{row['topic']}-{row['partition']}", row["status"], size(int(str(row["bytes"]))), row["reason"]) for row in rows]
    todo = sum(row["status"] == "would_be_cleaned" for row in rows)
    table = Table("", ("partition", "status", "bytes", "why"), cells)
    out.result({"partitions": rows}, table, summary=f"{todo} of {len(found)} partitions would be cleaned; nothing was changed")
    return outcomes.exit_code()


def _tell(finished: Finished, out: Output, outcomes: tiers.PartitionOutcomes, count: str) -> None:
    """As soon as a partition is done with: who breaks the job off knows what is finished, and how far it has come."""
    report = finished.report
    if finished.error is not None:
        outcomes.failed(str(finished.name), finished.error)
    elif report is not None and report.status == "quarantined":
        outcomes.bad_data(str(finished.name), report.reason)
    else:
        outcomes.ok()
        if report is not None and report.status == "waiting":
            out.note(f"{finished.name}: {report.reason}")
        if report is not None and report.segments_out:
            out.note(f"{count}: {finished.name} {report.status}, {report.records_read:,} records -> {report.records_kept:,}")
        elif finished.left:
            out.note(f"{count}: {finished.name} is left alone: {finished.left}")


def _spark(started: Started, cost: Cost) -> dict[str, object]:
    return {
        "master": started.master,
        "slots": started.cluster.slots,
        "startup_seconds": round(started.seconds, 3),
        "exchanged_rows": cost.rows,
        "exchanged_bytes": cost.exchanged_bytes,
        "peak_worker_bytes": cost.peak_memory_bytes,
        "worker_cpu_seconds": round(cost.cpu_seconds, 3),
    }


def _summary(started: Started, cost: Cost) -> str:
    text = f"Spark on {started.master}: started in {started.seconds:.1f} s"
    return text + (f"; {cost.rows:,} keys exchanged, {cost.exchanged_bytes / cost.rows:.1f} bytes each" if cost.rows else "")


def _table(rows: list[dict[str, object]]) -> Table:
    columns = ("partition", "status", "engine", "segments", "records", "kept", "read", "written", "next dirty", "seconds")
    cells = []
    for row in rows:
        done = bool(row.get("segments_out"))
        read, written = row.get("bytes_read"), row.get("bytes_written")
        cells.append(
            (
                f"{row['topic']}-{row['partition']}", row["status"], row["map_engine"] if done else "",
                f"{row['segments_in']} -> {row['segments_out']}" if done else "", row.get("records_read"), row.get("records_kept"),
                size(read) if isinstance(read, int) else "", size(written) if isinstance(written, int) else "",
                row.get("next_dirty_offset"), row["seconds"],
            )
        )  # fmt: skip
    return Table("", columns, cells)
