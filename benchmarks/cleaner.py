"""Our cleaner against Kafka's own, on the same segments in the same run: megabytes of segments per CPU second, how far that is from what
the bytes cost in any case, what a second thread gives beside what two processes reach, and what the gate costs.

    python -m benchmarks.cleaner                                     # all profiles (benchmarks.cleaner_logs), 200 MB of records each: hours
    python -m benchmarks.cleaner --profile 1k-none-10 --profile 1k-lz4-10

A profile is a size of values, a codec and so many records a batch; half of the records are superseded: nearly every batch is written
anew. CPU time is user and system time of all threads: of Kafka's cleaner (Cleaner.doClean, both passes) in a warm process, collector and
compiler included; of ours from the first byte read to the last output closed, kernels compiled before. Of several rounds the best counts.
The floor is what no cleaner can do without: each batch read, its CRC, its body inflated; then as many bytes as the result has deflated,
with their CRC, and written. By the same libraries, with nothing parsed, hashed or decided. (Where few batches change, copies of whole
batches may be cheaper than that.) Two processes clean the same log at once, each for itself: what memory and processors give at most.

Both results must have the same records and the same next dirty offset. Needs a JDK 17 and Maven, as `make conformance` does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from crc32c import crc32c as check_crc

from benchmarks.cleaner_logs import NOW_MS, PROFILES, Profile, write_log
from benchmarks.cleaner_plot import draw_cleaner_speed
from benchmarks.doc_tables import ROOT, WRITE_VARIABLE, BenchmarkTable, report_table
from compactor.cleaner.offline import OfflineCleanOptions, OfflineCleanSummary, clean_log_directory
from compactor.cleaner.precompile import precompile_kernels
from compactor.cleaner.source import open_source_segment
from compactor.records.batches import read_only_view
from compactor.records.bulk import compress_bodies_into
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD, GrowingByteBuffer, max_compressed_size
from tests.conformance.kafka import Kafka, Unavailable

TARGETS = {NONE: 3.0, LZ4: 2.5, SNAPPY: 2.5, ZSTD: 1.5, GZIP: 1.5}
KAFKA_KEYS = 4_000_000
WARM_SECONDS = 4.0
GATE_BYTES = 1 << 28


@dataclass(frozen=True)
class Cost:
    """Seconds."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Measured:
    """One profile: MB of segments (and millions of records) per CPU second, ratios, and how busy the machine was."""

    profile: str
    megabytes: int
    kafka: float
    ours: float
    records: float
    ratio: float
    target: float
    floor: float
    wall: float
    threads: float
    processes: float
    gate: float
    load: float


def clock(marks: list[tuple[float, float]]) -> Callable[[str], None]:
    return lambda phase: marks.append((time.process_time(), time.perf_counter()))


def best(costs: list[Cost]) -> Cost:
    return Cost(min(cost.cpu for cost in costs), min(cost.wall for cost in costs))


def ours(
    log_dir: Path, scratch: Path, first_dirty: int, *, threads: int = 1, gate: int = 0, rounds: int
) -> tuple[Cost, OfflineCleanSummary]:
    costs: list[Cost] = []
    while True:
        marks: list[tuple[float, float]] = []
        request = OfflineCleanOptions(now_ms=NOW_MS, first_dirty_offset=first_dirty, threads=threads, gate_budget_bytes=gate)
        summary = clean_log_directory(log_dir, scratch / "ours", request, clock(marks))
        shutil.rmtree(scratch / "ours")
        begin, end = marks[0], marks[-1]
        costs.append(Cost(end[0] - begin[0], end[1] - begin[1]))
        if len(costs) == rounds:
            return best(costs), summary


def kafkas(kafka: Kafka, log_dir: Path, scratch: Path, first_dirty: int, *, rounds: int) -> tuple[Cost, dict[str, Any]]:
    """The best of ``rounds`` behind as many as it takes to be warm with this profile."""
    costs: list[Cost] = []
    spent = 0.0
    while True:
        answer = kafka.clean(log_dir, scratch / "kafka", {"now_ms": NOW_MS, "first_dirty_offset": first_dirty, "map_entries": KAFKA_KEYS})
        shutil.rmtree(scratch / "kafka")
        costs.append(Cost(answer["cpu_seconds"], answer["seconds"]))
        spent += answer["cpu_seconds"]
        if spent > WARM_SECONDS and len(costs) > rounds:
            return best(costs[-rounds:]), answer


def floor(log_dir: Path, scratch: Path, kept: int, *, rounds: int) -> float:
    """CPU seconds of inflating and checking everything, and of deflating, checking and writing until ``kept`` bytes are written."""
    costs = []
    for _ in range(rounds):
        begin = time.process_time()
        left = kept
        with (scratch / "floor").open("wb") as target:
            for path in sorted(log_dir.glob("*.log")):
                left -= _moved(path, target, left)
        costs.append(time.process_time() - begin)
        (scratch / "floor").unlink()
    return min(costs)


def _moved(path: Path, target: BinaryIO, most: int) -> int:
    """Bytes written of one segment, whole chunks until there are ``most``."""
    source = open_source_segment(0, path, int(path.stem), None, 0, -1, 1 << 30)
    table, bodies, slots, done = source.table, GrowingByteBuffer(), GrowingByteBuffer(), 0
    for first, last in source.split_by_kind():
        some = slice(first, last)
        for chunk in source.read_chunks(first, last, np.ones(last - first, np.bool_), 1 << 30, bodies):
            written = min(max(most - done, 0), int(table.size[some].sum()))
            if not written:
                continue
            packed = chunk.buf[int(table.position[first]) :] if not table.codec_ids[first] else chunk.buf
            if table.codec_ids[first]:
                size = chunk.body_end - chunk.body_start
                size = size[: max(1, len(size) * written // int(table.size[some].sum()))]
                bound = max_compressed_size(size)
                slots.reserve_space(int(bound.sum()))
                slot = np.cumsum(bound) - bound
                compress_bodies_into(
                    chunk.buf, table.codec_ids[some][: len(size)], chunk.body_start[: len(size)], size, slots.array, slot, bound
                )
                packed = read_only_view(slots.array)
            target.write(packed[:written].data)
            check_crc(packed[:written])
            done += written
    return done


def in_a_process(log_dir: Path, scratch: Path, first_dirty: int, rounds: int) -> float:
    """Seconds of the clock."""
    precompile_kernels()
    return ours(log_dir, scratch, first_dirty, rounds=rounds)[0].wall


def rows(
    kafka: Kafka, profiles: list[Profile], megabytes: int, rounds: int, scratch: Path, pool: ProcessPoolExecutor
) -> Iterator[Measured]:
    for profile in profiles:
        log_dir = scratch / profile.name
        log = write_log(log_dir, profile, megabytes << 20)
        theirs, answer = kafkas(kafka, log_dir, scratch, log.first_dirty, rounds=rounds)
        one, summary = ours(log_dir, scratch, log.first_dirty, rounds=rounds)
        if (answer["records_kept"], answer["next_dirty_offset"]) != (summary.records_kept, summary.next_dirty_offset):
            raise SystemExit(f"{profile.name}: {answer} is not what we made of it: {summary}")
        least = floor(log_dir, scratch, summary.bytes_written, rounds=rounds)
        two, _ = ours(log_dir, scratch, log.first_dirty, threads=2, rounds=rounds)
        beside = [pool.submit(in_a_process, log_dir, scratch / f"process-{n}", log.first_dirty, rounds) for n in range(2)]
        both = max(process.result() for process in beside)
        gated, _ = ours(log_dir, scratch, log.first_dirty, gate=GATE_BYTES, rounds=rounds)
        shutil.rmtree(log_dir)
        yield Measured(
            profile.name, round(log.bytes / 1e6), log.bytes / 1e6 / theirs.cpu, log.bytes / 1e6 / one.cpu, log.records / 1e6 / one.cpu,
            theirs.cpu / one.cpu, TARGETS[profile.codec], one.cpu / least, theirs.wall / one.wall, one.wall / two.wall, 2 * one.wall / both,
            (gated.cpu - one.cpu) / gated.cpu, os.getloadavg()[0],
        )  # fmt: skip


def compile_seconds() -> float:
    """The first process on a machine: every kernel is compiled."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as cache:
        begin = time.perf_counter()
        compile_all = [sys.executable, "-c", "from compactor.cleaner.precompile import precompile_kernels; precompile_kernels()"]
        subprocess.run(compile_all, env={**os.environ, "NUMBA_CACHE_DIR": cache}, check=True)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, action="append", help="may be given several times; default: all")
    parser.add_argument("--megabytes", type=int, default=200, help="records of each profile, before compression")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--no-compile", action="store_true", help="leave out how long the first compilation takes")
    asked = parser.parse_args()
    chosen = [PROFILES[name] for name in asked.profile or PROFILES]
    try:
        with (
            Kafka() as kafka,
            tempfile.TemporaryDirectory(prefix="benchmark-") as name,
            ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool,
        ):
            for number in range(2):
                (Path(name) / f"process-{number}").mkdir()
            precompile_kernels()
            print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; MB of segments per CPU second")
            print(
                "profile             Kafka     ours  Mrec/s   ratio (target)  of floor   wall  2 threads (processes)  gate's share",
                flush=True,
            )
            measured = []
            for row in rows(kafka, chosen, asked.megabytes, asked.rounds, Path(name), pool):
                print(
                    f"{row.profile:17} {row.kafka:7.1f}  {row.ours:7.1f}  {row.records:6.2f}   {row.ratio:5.2f}  ({row.target:.1f})"
                    f"      {row.floor:4.2f}    {row.wall:5.2f}      {row.threads:5.2f} ({row.processes:.2f})        {row.gate:6.1%}",
                    flush=True,
                )
                measured.append(row)
    except Unavailable as missing:
        raise SystemExit(str(missing)) from None
    if not asked.no_compile:
        print(f"first compilation of all kernels: {compile_seconds():.1f} s")
    report_table(documented(measured))
    if os.environ.get(WRITE_VARIABLE):
        (ROOT / "docs" / "speed.svg").write_text(draw_cleaner_speed(measured))


def documented(measured: list[Measured]) -> BenchmarkTable:
    """Return the rows that docs/benchmarks.md has: the usual batches, a database's changes, and nearly clean logs."""
    rows = [
        (
            PROFILES[row.profile].title, f"{row.kafka:,.0f}", f"{row.ours:,.0f}",
            *(f"{number:.1f}" for number in (row.ratio, row.floor, row.threads, row.processes)),
        )
        for row in measured if "a batch" not in PROFILES[row.profile].title
    ]  # fmt: skip
    columns = ("values, codec", "Kafka", "ours", "ratio", "of floor", "two threads", "two processes")
    return BenchmarkTable("cleaner", columns, rows, compared=("ratio", "of floor", "two threads", "two processes"))


if __name__ == "__main__":
    main()
