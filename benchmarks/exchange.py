"""The exchange of a spread round against Spark's own shuffle: keys of bundles in, survivors out, the same bits either way.

    python -m benchmarks.exchange [--url s3://bucket/prefix --endpoint URL | --url DIRECTORY] [--rows N] [--cases 100x16,5000x1024] [--kill]

Rows stand in for what pass 1 finds in so many segments, in bundles as a round would make them of segments of 200 MB. Then

    store      each bundle is one object, sorted by range; range tasks read its directory and their part of it
    shuffle    each bundle hands one blob per range to Spark's shuffle, and nothing is written to the store

Answers go to the bundles' tasks through the shuffle in both. Prints seconds, CPU seconds of the whole process tree (JVM and Python workers,
without the store's server), requests, bytes that Spark's shuffle wrote, and what the driver has to know of it all. With ``--kill`` one of
two executors is killed when all bundles are made; the last column counts how often one was made, which is to read its segments.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compactor.cleaner.keys.disk_map import mark_newest_row_of_each_key
from compactor.cleaner.keys.key_set import KeyHashSet
from compactor.cleaner.row_spool import sort_rows_by_hash_range
from compactor.config.settings import Settings
from compactor.config.store_sections import S3Settings
from compactor.spark.round.bundles import RowNumberRange
from compactor.spark.round.exchange import ExchangeRows, StoredKeyRows, decode_ordinal_gaps, encode_surviving_row_numbers, pack_tail_arrays
from compactor.storage.counting import RequestCounters
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore

SEGMENTS_A_BUNDLE = 80
"""16 GiB of segments of 200 MB."""

SET_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    url: str
    endpoint: str
    name: str
    rows: int
    keys: int
    bundles: int
    ranges: int
    tasks: int
    marks: str

    def store(self, counters: RequestCounters | None = None) -> ObjectStore:
        return open_store(
            self.url,
            settings=Settings(s3=S3Settings(endpoint_url=self.endpoint, region="us-east-1")),
            counters=counters or RequestCounters(),
        )

    def made(self, bundle: int) -> tuple[np.ndarray[Any, Any], ExchangeRows]:
        """The rows of a bundle, sorted by range, and where each range begins; noted, so that it is known how often this was done."""
        Path(self.marks, f"{bundle}-{time.monotonic_ns()}").touch()
        count = self.rows // self.bundles
        hashes = np.random.default_rng(bundle).integers(0, self.keys, count).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        other = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        rows = np.empty((count, 4), np.uint32)
        rows[:, 0] = (hashes >> np.uint64(32)).astype(np.uint32)
        rows[:, 1] = other.astype(np.uint32)
        rows[:, 2] = (other >> np.uint64(32)).astype(np.uint32)
        rows[:, 3] = np.arange(count, dtype=np.uint32)
        out = np.empty_like(rows)
        return sort_rows_by_hash_range(rows, count, self.ranges, 0, self.ranges, out), out

    def runs(self) -> list[range]:
        return [range(self.ranges * task // self.tasks, self.ranges * (task + 1) // self.tasks) for task in range(self.tasks)]


def survivors(case: Case, number: int, newest_first: Iterable[tuple[int, ExchangeRows]]) -> Iterator[tuple[int, bytes]]:
    keys = KeyHashSet(SET_BYTES, expected_key_count=case.keys // case.ranges)
    for place, rows in newest_first:
        by_row, kept = rows.copy(), np.zeros(-(-len(rows) // 8), np.uint8)
        by_row[:, 3] = np.arange(len(rows), dtype=np.uint32)
        taken = mark_newest_row_of_each_key(keys.table, keys.state, by_row, 0, case.ranges, number, kept)
        while taken < len(rows) and keys.grow_within_budget():
            taken = mark_newest_row_of_each_key(keys.table, keys.state, by_row, taken, case.ranges, number, kept)
        yield place, encode_surviving_row_numbers(rows, kept)


def gathered(case: Case, answers: Iterable[bytes]) -> int:
    """How many records of a bundle survive."""
    bitmap = np.zeros(case.rows // case.bundles // 8 + 1, np.uint8)
    for answer in answers:
        if not decode_ordinal_gaps(np.frombuffer(answer, np.uint8), bitmap):
            raise SystemExit("an answer does not fit its bundle")
    return int(np.bitwise_count(bitmap).sum(dtype=np.int64))


def by_store(case: Case, context: Any) -> tuple[list[int], int, int]:
    """(survivors by bundle, requests, bytes that the driver hands to every range task)."""
    requests = context.accumulator(0)

    def write(bundle: int) -> StoredKeyRows:
        counters = RequestCounters()
        begins, rows = case.made(bundle)
        with tempfile.NamedTemporaryFile() as file:
            file.write(rows.data)
            file.write(np.column_stack((begins, np.full_like(begins, begins[-1]))).tobytes())
            file.write(pack_tail_arrays({}))
            file.flush()
            size = file.tell()
            case.store(counters).create_from_file(f"{case.name}/keys-{bundle}", Path(file.name), {})
        requests.add(_requests(counters))
        return StoredKeyRows(f"{case.name}/keys-{bundle}", size, case.ranges, len(rows), len(rows), 0)

    bundles = context.parallelize(range(case.bundles), case.bundles).map(write).collect()

    def answer(ranges: range) -> Iterator[tuple[int, bytes]]:
        from compactor.spark.round.range_rows import read_hash_ranges

        counters = RequestCounters()
        row_number_ranges = [RowNumberRange(place, 0, bundle.ordinals) for place, bundle in enumerate(bundles)]
        for number, rows in read_hash_ranges(case.store(counters), dict(enumerate(bundles)), ranges):
            yield from survivors(case, number, rows.read_dirty_rows(row_number_ranges))
        requests.add(_requests(counters))

    answers = context.parallelize(case.runs(), case.tasks).flatMap(answer).groupByKey(min(case.bundles, case.tasks))
    found = dict(answers.mapValues(lambda some: gathered(case, some)).collect())
    return [found[bundle] for bundle in range(case.bundles)], int(requests.value), len(pickle.dumps(bundles))


def by_shuffle(case: Case, context: Any) -> tuple[list[int], int, int]:
    task_of = {number: task for task, ranges in enumerate(case.runs()) for number in ranges}

    def blobs(bundle: int) -> Iterator[tuple[int, tuple[int, int, bytes]]]:
        begins, rows = case.made(bundle)
        for number in range(case.ranges):
            if begins[number] < begins[number + 1]:
                yield task_of[number], (number, bundle, rows[begins[number] : begins[number + 1]].tobytes())

    def answer(some: Iterable[tuple[int, tuple[int, int, bytes]]]) -> Iterator[tuple[int, bytes]]:
        waiting: dict[int, list[tuple[int, bytes]]] = {}
        for _, (number, bundle, blob) in some:
            waiting.setdefault(number, []).append((bundle, blob))
        for number in sorted(waiting):
            newest_first = ((bundle, np.frombuffer(blob, np.uint32).reshape(-1, 4)) for bundle, blob in sorted(waiting[number]))
            yield from survivors(case, number, newest_first)

    shuffled = context.parallelize(range(case.bundles), case.bundles).flatMap(blobs).partitionBy(case.tasks, lambda task: task)
    answers = shuffled.mapPartitions(answer).groupByKey(min(case.bundles, case.tasks))
    found = dict(answers.mapValues(lambda some: gathered(case, some)).collect())
    # A byte per block is what the driver's map statuses come to, once for each executor that asks.
    return [found[bundle] for bundle in range(case.bundles)], 0, case.bundles * case.tasks


def _requests(counters: RequestCounters) -> int:
    return counters.usage().total_requests


def below(root: int, *, ended: bool = True) -> dict[int, int]:
    """Clock ticks of a process and of all below it. ``ended``: of those with each that have ended and were waited for."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            children.setdefault(int(words[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(int(word) for word in words[11 : 15 if ended else 13])
    found, waiting = {}, [root]
    while waiting:
        pid = waiting.pop()
        found[pid] = ticks.get(pid, 0)
        waiting += children.get(pid, [])
    return found


def cpu_seconds() -> float:
    return sum(below(os.getpid()).values()) / os.sysconf("SC_CLK_TCK")


def _killed_at(marks: Path, made: int) -> None:
    """Kills one executor of this program when so many bundles were made."""
    while len(list(marks.iterdir())) < made:
        time.sleep(0.05)
    time.sleep(1)
    for pid in below(os.getpid()):
        if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="")
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--cases", default="1x16,1x1024,100x16,100x1024,5000x16,5000x1024")
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args()
    from pyspark import SparkConf, SparkContext

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = (
        SparkConf()
        .setAppName("exchange")
        .set("spark.ui.enabled", "false")
        .set("spark.ui.showConsoleProgress", "false")
        .set("spark.python.unix.domain.socket.enabled", "true")
    )
    conf.setMaster("local-cluster[2,1,1024]" if args.kill else "local[2]")
    context = SparkContext(conf=conf)
    context.setLogLevel("ERROR")
    print(f"{args.rows} rows, {args.rows * 2 // 5} keys")
    print("| segments | bundles | ranges | by | s | CPU s | requests | shuffled MB | driver KB | bundles made |\n" + "|---" * 10 + "|")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "warm").mkdir()
        for how in (by_store, by_shuffle):  # whose figures nobody looks at
            how(
                Case(args.url or folder, args.endpoint, f"warm-{time.time_ns()}", 10_000, 4000, 4, 8, 4, str(Path(folder, "warm"))), context
            )
        for number, one in enumerate(args.cases.split(",")):
            segments, ranges = (int(part) for part in one.split("x"))
            bundles = max(min(segments, 4), segments // SEGMENTS_A_BUNDLE)
            results = []
            for how in (by_store, by_shuffle):
                marks = Path(folder, f"{number}-{how.__name__}")
                marks.mkdir()
                case = Case(
                    args.url or folder, args.endpoint, f"case-{number}-{time.time_ns()}", args.rows, args.rows * 2 // 5, bundles, ranges,
                    min(ranges, 12), str(marks),
                )  # fmt: skip
                if args.kill:
                    threading.Thread(target=_killed_at, args=(marks, bundles), daemon=True).start()
                begin, used = time.monotonic(), cpu_seconds()
                found, requests, known = how(case, context)
                seconds, used = time.monotonic() - begin, cpu_seconds() - used
                shuffled = args.rows * 16 / 1e6 if how is by_shuffle else 0
                results.append(found)
                print(
                    f"| {segments} | {bundles} | {ranges} | {how.__name__[3:]} | {seconds:.1f} | {used:.1f} | {requests} | {shuffled:.0f} |"
                    f" {known / 1e3:.1f} | {len(list(marks.iterdir()))} |",
                    flush=True,
                )
            if results[0] != results[1]:
                raise SystemExit("the two do not agree")
    context.stop()


if __name__ == "__main__":
    main()
