"""What the driver of a spread round holds, asks and hands out at a size that no machine here has: planned, and worked on by stand-ins.

    python -m benchmarks.spark_size [--segments N] [--segment-bytes N] [--records N] [--slots N] [--partitions N]

One partition (of 50,000 segments of 200 MB and 10^10 records, on 256 slots) is planned as `recompact` plans it; tasks answer at once with
what real ones would answer. Before that 100,000 small partitions are looked at and reported. Prints what came of it, and ends with an error
where a stated bound is not kept:

    driver        below 1 GB of memory, Spark's JVM aside
    requests      of the executors for keys and survivors at most 3 x (segments + bundles x (ranges + range tasks) + groups)
    closures      what a task of any step gets, below 1 MB
"""

from __future__ import annotations

import argparse
import pickle
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.cleaner.gate.parser import GATE_KEY_BYTES as GATE_KEY_BYTES, GATE_ROW_BYTES as GATE_ROW_BYTES
from compactor.config.settings import Settings, load_settings
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.features.spark.exchange import (
    PassOneResultOfSegment,
    PassOneResultOfSegmentBundle,
    StoredGateRows,
    StoredKeyRows,
    StoredSurvivorLocations,
)
from compactor.features.spark.jobs import JobListener, RoundJobRunner, RoundTaskSettings, SparkCluster, TaskOutcome
from compactor.features.spark.pass_one import COMBINED_FETCH_BYTES, SurvivorBundle, WrittenSurvivors
from compactor.features.spark.recompaction import (
    RecompactionCandidate,
    RecompactionResult,
    assess_full_round,
    recompaction_result_row,
)
from compactor.features.spark.rewrite import PassOneSegmentResults, SegmentGroupRewriteWork
from compactor.features.spark.worker import MAX_KEY_SET_BYTES, MAX_RANGES, RANGE_TASKS_PER_SLOT, HashRangeTask, locate_survivors
from compactor.model.ids import RoundStatus, TopicPartition
from compactor.model.plan import CompactionPlan, CompactionReceipt
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import BatchTable
from compactor.records.indexes import TXN_ENTRY
from compactor.round.compaction import RoundActionOnSegment, RoundReport
from compactor.round.pass_two import versions_fingerprint
from compactor.round.plan import PlanInputs, plan_round
from compactor.round.ports import Costs
from compactor.views.forecast import price_table_of_tier

MOST_DRIVER_BYTES = 1 << 30
MOST_CLOSURE_BYTES = 1 << 20
FILES = ("log", "index", "timeindex", "snapshot", "leader-epoch-checkpoint")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def state_of(segments: int, segment_bytes: int, records: int) -> PartitionState:
    each, epochs = records // segments, (EpochEntry(epoch=0, start_offset=0),)
    files = {kind: SegmentFile(size=segment_bytes if kind == "log" else 100_000, sha256="0" * 64) for kind in FILES}
    live = tuple(
        RemoteLogSegmentMetadata(
            id=f"segment-{number:014d}", start_offset=number * each, end_offset=(number + 1) * each - 1, size_bytes=segment_bytes,
            max_timestamp_ms=1_700_000_000_000 + number, mtime_ms=1_700_000_000_000, leader_epochs=epochs, files=dict(files), records=each,
        )
        for number in range(segments)
    )  # fmt: skip
    return PartitionState(topic="orders", partition=0, live=live)


@dataclass
class StandIn:
    """A cluster whose tasks answer at once. ``closures``: the largest task of each step."""

    task_slots: int
    task_slots_per_executor: int = 4
    closures: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)

    def rdd_of_items(self, items: Sequence[Any]) -> list[tuple[int, Any]]:
        return list(enumerate(items))

    def run_job(self, what: str, rdd: list[tuple[int, Any]], work: Any, count: int, **_: Any) -> Iterator[TaskOutcome]:
        step = what.partition(": ")[2].partition(",")[0]
        self.tasks[step] = self.tasks.get(step, 0) + count
        task = max(len(pickle.dumps(item)) for item in rdd) + len(pickle.dumps(work))
        self.closures[step] = max(self.closures.get(step, 0), task)
        for place, item in rdd:
            yield TaskOutcome(place, indexed(item) if step == "pass 1" else None, None, Costs())


def indexed(items: Sequence[Any]) -> PassOneResultOfSegmentBundle:
    found, behind = [], 0
    for item in items:
        rows = item.metadata.records
        found.append(
            PassOneResultOfSegment(
                item.metadata.id,
                rows // 500,
                np.empty(0, np.int64),
                BatchTable.allocate_rows(0),
                np.empty(0, TXN_ENTRY),
                False,
                behind,
                rows,
                rows,
            )
        )
        behind += -(-rows // 8) * 8
    key = f"partitions/orders-0/scratch/run/1-keys-{items[0].metadata.id}"
    rows = sum(each.rows for each in found)
    gate = StoredGateRows(f"{key}-gate", rows * GATE_ROW_BYTES, 0, rows, 0)
    return PassOneResultOfSegmentBundle(tuple(found), StoredKeyRows(key, behind * 16, 0, behind, rows, 0), gate)


def gathered(item: SurvivorBundle) -> WrittenSurvivors:
    key = f"partitions/orders-0/scratch/run/1-survivors-{item.name}"
    parts = StoredSurvivorLocations({segment.indexed.id: (0, 1000, "0" * 64) for segment in item.segments})
    return WrittenSurvivors(ScratchObject(key=key, size=1000, sha256="0" * 64), parts, tuple(parts.parts))


def one_large(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    settings: Settings = load_settings(None, {"TIERED_COMPACTOR__TIER__URL": "file:///nowhere"})
    cleaner = settings.cleaner
    begin = time.process_time()
    state = state_of(args.segments, args.segment_bytes, args.records)
    facts = PlanInputs(
        state,
        assess_full_round(state, cleaner, 1_900_000_000_000),
        cleaner,
        1_900_000_000_000,
        (),
        versions_fingerprint(),
        "spark",
    )
    numbers = iter(range(10**9))
    plan = plan_round(facts, 1, lambda: f"new-{next(numbers)}")
    planned = time.process_time() - begin
    cluster, budget = StandIn(args.slots), cleaner.map_budget_bytes // 4
    sets = -(-args.records * GATE_KEY_BYTES // min(budget, MAX_KEY_SET_BYTES))
    ranges = min(MAX_RANGES, -(-sets // args.slots) * args.slots)
    lean = plan.model_copy(update={"tasks": (), "skipped": (), "read": ()})
    shared = RoundTaskSettings(
        settings, b"0" * 16, lean, "partitions/orders-0/scratch/run/1-", ranges, budget, 3 * cleaner.segment_bytes, True, None
    )
    steps = RoundJobRunner(cast(SparkCluster, cluster), cast(Any, None), shared, Costs(), JobListener(), lambda **_: None)
    index, ids = PassOneSegmentResults(state.live, {}), {segment.id for segment in state.live}
    index.read_segments(steps, ids, ids)
    exchange, beside = index.hash_range_input(ids), index.plan_survivor_bundles(ids)
    tasks = min(ranges, args.slots * RANGE_TASKS_PER_SLOT)
    answer = HashRangeTask(shared, exchange, {place: place for place in range(len(beside))}, index.gate_input(), len(beside))
    cluster.closures["offset map"] = max(len(pickle.dumps(answer)), *(len(pickle.dumps(item)) for item in beside))
    cluster.tasks["offset map"] = tasks + len(beside)
    stored: dict[str, Any] = {}
    for item in beside:
        found = gathered(item)
        stored |= locate_survivors(found.written.key, found.parts) if found.parts else {}
    by_id = state.live_segments_by_id()
    items = [
        SegmentGroupRewriteWork(t, tuple(by_id[name] for name in t.sources), tuple(stored[name] for name in t.sources), None)
        for t in plan.tasks
    ]
    for _ in steps.run_task_per_item("pass 2, groups rewritten", _nothing, items):
        pass
    driver = peak_bytes()
    keep("the driver's memory", driver, MOST_DRIVER_BYTES)
    closure = max(cluster.closures.values())
    keep("a task", closure, MOST_CLOSURE_BYTES)
    print("largest tasks:", cluster.closures, cluster.tasks, f"{len(exchange.bundles)} bundles, {ranges} ranges, {tasks} range tasks")
    return [
        ("memory of the driver, without the JVM", "1 GB", f"{driver / 1e6:.0f} MB"),
        *exchange_requests(args, plan, len(exchange.bundles), ranges, tasks),
        ("a task's closure and item", "1 MB", f"{closure / 1e3:.0f} KB"),
        ("CPU time of the driver", "", f"{time.process_time() - begin:.0f} s, {planned:.1f} s of it for the plan"),
    ]


def _nothing(shared: RoundTaskSettings, item: SegmentGroupRewriteWork, cost: Costs) -> CompactionReceipt | None:
    return None


def exchange_requests(args: argparse.Namespace, plan: CompactionPlan, bundles: int, ranges: int, tasks: int) -> list[tuple[str, str, str]]:
    """Return the table's rows about the exchange of keys. Every engine reads segments and writes results alike, so these are left out."""
    row_bytes, gate_bytes = args.records * 16, args.records * GATE_ROW_BYTES
    windows, judged = (
        ranges if size / ranges > COMBINED_FETCH_BYTES / 2 else max(tasks, -(-size // COMBINED_FETCH_BYTES))
        for size in (row_bytes, gate_bytes)
    )
    # Directories and rows of the cleaner and of the gate, tails, survivors, and what the gate says must be left.
    reads = bundles * (tasks + windows) + bundles * (tasks + judged) + bundles + args.segments + len(plan.tasks)
    writes = 3 * bundles + 1
    keep("requests", reads + writes, 3 * (args.segments + bundles * (ranges + tasks) + len(plan.tasks)))
    each = (row_bytes + gate_bytes) / (bundles * (windows + judged)) / 1e3
    price = price_table_of_tier("s3://bucket")
    exchange_usd, segments_usd = (
        price.requests_usd(reads, writes),
        price.requests_usd(args.segments * 12, len(plan.tasks) * 7),
    )
    return [
        (
            "requests for keys and survivors", "3 x (segments + bundles x (ranges + range tasks) + groups)",
            f"{(reads + writes) / 1e6:.1f} million of {each:.0f} KB",
        ),
        ("requests, if each segment and range had one", "", f"{args.segments * ranges / 1e6:.0f} million"),
        ("price of the requests", "", f"{exchange_usd:.2f} USD for the exchange, {segments_usd:.2f} USD for segments and results"),
    ]  # fmt: skip


def many_small(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    before = peak_bytes()
    surveys = [
        RecompactionCandidate(TopicPartition(f"topic-{number % 1000}", number // 1000), 1_000_000, 5_000, 4)
        for number in range(args.partitions)
    ]
    done = [RoundActionOnSegment(f"segment-{number}", "rewritten", "dirty") for number in range(4)]
    reports = (RoundReport(*survey.partition, RoundStatus.CLEANED, 0, 5_000, 4, 1, segments=tuple(done)) for survey in surveys)
    rows = [
        recompaction_result_row(RecompactionResult(survey.partition, report, None, 1.0, "", 4, survey.bytes), None)
        for survey, report in zip(surveys, reports, strict=True)
    ]
    each = (peak_bytes() - before) / args.partitions
    keep("the driver's memory", peak_bytes(), MOST_DRIVER_BYTES)
    return [(f"a small partition, one of {len(rows):,}, inspected and reported", "", f"{each / 1e3:.1f} KB")]


def keep(what: str, found: float, most: float) -> None:
    if found > most:
        raise SystemExit(f"{what}: {found:.0f}, and the bound is {most:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("segments", 50_000),
        ("segment-bytes", 200_000_000),
        ("records", 10**10),
        ("slots", 256),
        ("partitions", 100_000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    small = many_small(args)
    columns = ("", "bound", "measured")
    report_table(BenchmarkTable("spark_size", columns, one_large(args) + small, compared=columns[2:]))


if __name__ == "__main__":
    main()
