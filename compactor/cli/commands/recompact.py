"""``recompact [TOPIC-PARTITION...]``: the Spark job for full re-compaction."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING

from compactor.cli import frame, tiers
from compactor.cli.output import Output, Table, size
from compactor.errors import CompactorError, Fenced, Leased

if TYPE_CHECKING:
    from compactor.spark.cluster.executor import Cost
    from compactor.spark.cluster.session import Started
    from compactor.spark.recompact import Finished


def add_arguments(parser: frame.Parser) -> None:
    tiers.partitions_argument(parser)
    tiers.now_argument(parser)
    parser.runs(run)


def run(args: argparse.Namespace, out: Output) -> int:
    from compactor.spark.cluster.versions import check_pyspark

    opened = tiers.opened(args, writes="recompact")
    names = opened.partitions(args.partitions)
    check_pyspark()
    from compactor.spark.cluster.executor import Cost
    from compactor.spark.cluster.jobs import JobWatch
    from compactor.spark.cluster.session import cluster
    from compactor.spark.recompact import Listener, recompact

    outcomes = tiers.PartitionOutcomes(out, named=bool(args.partitions))
    cost = Cost()
    with ExitStack() as stack:
        with out.progress("starting Spark"):
            started = stack.enter_context(cluster(opened.settings, "tiered-compactor recompact"))
        if started.ui:
            out.note(f"Spark runs on {started.master}; its pages are at {started.ui}")
        with out.progress("re-compacting", unit="tasks") as progress:
            listener = Listener(JobWatch(progress.at, progress.advance), lambda finished: _tell(finished, out, outcomes))
            finished = recompact(opened, started.cluster, names, tiers.now_ms(args), cost, listener)
    rows = [_row(one) for one in finished]
    out.result({"partitions": rows, "spark": _spark(started, cost)}, _table(rows), summary=_summary(started, cost))
    return outcomes.exit_code()


def _tell(finished: Finished, out: Output, outcomes: tiers.PartitionOutcomes) -> None:
    """As soon as a partition is done with: who breaks the job off knows what is finished."""
    report = finished.report
    if finished.error is not None:
        outcomes.failed(str(finished.name), finished.error)
    elif report is not None and report.status == "quarantined":
        outcomes.bad_data(str(finished.name), report.reason)
    else:
        outcomes.ok()
        if report is not None and report.segments_out:
            out.note(f"{finished.name}: {report.status}, {report.records_read:,} records -> {report.records_kept:,}")


def _row(finished: Finished) -> dict[str, object]:
    row: dict[str, object] = {"topic": finished.name.topic, "partition": finished.name.partition}
    if finished.report is not None:
        row = tiers.plain(finished.report)
    elif finished.error is not None:
        row |= {"status": _status(finished.error), "reason": finished.error.message}
    return row | {"seconds": round(finished.seconds, 3)}


def _status(error: CompactorError) -> str:
    if isinstance(error, Leased):
        return "leased"
    return "fenced" if isinstance(error, Fenced) else "failed"


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
