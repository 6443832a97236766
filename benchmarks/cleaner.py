"""Our cleaner against Kafka's own, on the same segments in the same run: megabytes of segments per CPU second, and what the gate costs.

    python -m benchmarks.cleaner                                   # ten profiles, 64 MB of records each, about four minutes
    python -m benchmarks.cleaner --megabytes 256 --profile 1k-none --profile 1k-lz4

A profile is a size of values and a codec; half of the records are superseded, so that nearly every batch is written anew. CPU time is user
and system time of all threads: of Kafka's cleaner (Cleaner.doClean, both passes) in a warm process, its collector and compiler included; of
ours from the first byte read to the last output closed, kernels compiled before. Of several rounds the best counts.
Both results must have the same records and the same next dirty offset. Needs a JDK 17 and Maven, as `make conformance` does.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compactor.cleaner.offline import CleanRequest, CleanSummary, clean_directory
from compactor.cleaner.warm import warm_up
from compactor.records.build import Row, batch
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD
from tests.conformance.kafka import Kafka, Unavailable

CODECS = {"none": NONE, "lz4": LZ4, "snappy": SNAPPY, "zstd": ZSTD, "gzip": GZIP}
TARGETS = {"none": 3.0, "lz4": 2.0, "snappy": 2.0, "zstd": 1.5, "gzip": 1.5}
VALUES = {"1k": 1024, "100b": 100}
PROFILES = [f"{size}-{codec}" for size in VALUES for codec in CODECS]
BATCH_BYTES = 16_384
SEGMENT_BYTES = 32 << 20
NOW_MS = 1_700_000_000_000
KAFKA_KEYS = 4_000_000
WARM_SECONDS = 4.0
GATE_BYTES = 1 << 28


@dataclass(frozen=True)
class Cost:
    """Seconds."""

    cpu: float
    wall: float


def write_log(folder: Path, size: int, codec: int, total_bytes: int) -> tuple[int, int]:
    """(records, bytes of segments): JSON-like values, keys drawn from half as many as there are records."""
    dice = random.Random(1)
    folder.mkdir()
    words = [dice.randbytes(dice.randrange(2, 5)).hex() for _ in range(400)]
    records, per_batch = total_bytes // (size + 30), max(1, BATCH_BYTES // (size + 30))
    segment: list[bytes] = []
    base = written = 0
    for first in range(0, records, per_batch):
        rows = [
            Row(offset, NOW_MS - records + offset, b"customer-%010d" % dice.randrange(records // 2), _value(dice, words, size))
            for offset in range(first, min(first + per_batch, records))
        ]
        segment.append(batch(rows, codec=codec))
        written += len(segment[-1])
        if written >= SEGMENT_BYTES or first + per_batch >= records:
            (folder / f"{base:020}.log").write_bytes(b"".join(segment))
            segment, written, base = [], 0, first + per_batch
    return records, sum(path.stat().st_size for path in folder.glob("*.log"))


def _value(dice: random.Random, words: list[str], size: int) -> bytes:
    text = f'{{"id":{dice.randrange(10**9)}'
    while len(text) < size:
        text += f',"{dice.choice(words)}":"{dice.choice(words)}{dice.randrange(1000)}"'
    return text[:size].encode()


def clock(marks: list[tuple[float, float]]) -> Callable[[str], None]:
    return lambda phase: marks.append((time.process_time(), time.perf_counter()))


def best(costs: list[Cost]) -> Cost:
    return Cost(min(cost.cpu for cost in costs), min(cost.wall for cost in costs))


def ours(log_dir: Path, scratch: Path, *, threads: int = 1, gate: int = 0, rounds: int) -> tuple[Cost, CleanSummary]:
    costs: list[Cost] = []
    while True:
        marks: list[tuple[float, float]] = []
        request = CleanRequest(now_ms=NOW_MS, threads=threads, gate_budget_bytes=gate)
        summary = clean_directory(log_dir, scratch / "ours", request, clock(marks))
        shutil.rmtree(scratch / "ours")
        begin, end = marks[0], marks[-1]
        costs.append(Cost(end[0] - begin[0], end[1] - begin[1]))
        if len(costs) == rounds:
            return best(costs), summary


def kafkas(kafka: Kafka, log_dir: Path, scratch: Path, *, rounds: int) -> tuple[Cost, dict[str, Any]]:
    """The best of ``rounds`` behind as many as it takes to be warm with this profile."""
    costs: list[Cost] = []
    spent = 0.0
    while True:
        answer = kafka.clean(log_dir, scratch / "kafka", {"now_ms": NOW_MS, "map_entries": KAFKA_KEYS})
        shutil.rmtree(scratch / "kafka")
        costs.append(Cost(answer["cpu_seconds"], answer["seconds"]))
        spent += answer["cpu_seconds"]
        if spent > WARM_SECONDS and len(costs) > rounds:
            return best(costs[-rounds:]), answer


def rows(kafka: Kafka, profiles: list[str], megabytes: int, rounds: int, scratch: Path) -> Iterator[dict[str, Any]]:
    for profile in profiles:
        size, codec = profile.split("-")
        log_dir = scratch / profile
        records, stored = write_log(log_dir, VALUES[size], CODECS[codec], megabytes << 20)
        theirs, answer = kafkas(kafka, log_dir, scratch, rounds=rounds)
        one, summary = ours(log_dir, scratch, rounds=rounds)
        same = (answer["records_kept"], answer["next_dirty_offset"]) == (summary.records_kept, summary.next_dirty_offset)
        if not same:
            raise SystemExit(f"{profile}: {answer} is not what we made of it: {summary}")
        two, _ = ours(log_dir, scratch, threads=2, rounds=rounds)
        gated, _ = ours(log_dir, scratch, gate=GATE_BYTES, rounds=rounds)
        shutil.rmtree(log_dir)
        yield {
            "profile": profile, "kafka": stored / 1e6 / theirs.cpu, "ours": stored / 1e6 / one.cpu, "records": records / 1e6 / one.cpu,
            "ratio": theirs.cpu / one.cpu, "target": TARGETS[codec], "wall": theirs.wall / one.wall, "threads": one.wall / two.wall,
            "gate": (gated.cpu - one.cpu) / gated.cpu,
        }  # fmt: skip


def compile_seconds() -> float:
    """The first process on a machine: every kernel is compiled."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as cache:
        begin = time.perf_counter()
        compile_all = [sys.executable, "-c", "from compactor.cleaner.warm import warm_up; warm_up()"]
        subprocess.run(compile_all, env={**os.environ, "NUMBA_CACHE_DIR": cache}, check=True)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, action="append", help="may be given several times; default: all")
    parser.add_argument("--megabytes", type=int, default=64, help="records of each profile, before compression")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--no-compile", action="store_true", help="leave out how long the first compilation takes")
    asked = parser.parse_args()
    try:
        with Kafka() as kafka, tempfile.TemporaryDirectory(prefix="benchmark-") as name:
            warm_up()
            print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; MB of segments per CPU second")
            print("profile        Kafka     ours  Mrec/s   ratio (target)   wall  2 threads  gate's share", flush=True)
            for row in rows(kafka, asked.profile or PROFILES, asked.megabytes, asked.rounds, Path(name)):
                print(
                    f"{row['profile']:12} {row['kafka']:7.1f}  {row['ours']:7.1f}  {row['records']:6.2f}   {row['ratio']:5.2f}"
                    f"  ({row['target']:.1f})    {row['wall']:5.2f}      {row['threads']:5.2f}        {row['gate']:6.1%}",
                    flush=True,
                )
    except Unavailable as missing:
        raise SystemExit(str(missing)) from None
    if not asked.no_compile:
        print(f"first compilation of all kernels: {compile_seconds():.1f} s")


if __name__ == "__main__":
    main()
