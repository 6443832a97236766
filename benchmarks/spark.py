"""The distributed map and rewrite on one core and on two, and the local engine on the same log.

    python -m benchmarks.spark [--records N] [--keys N] [--segments N] [--value-bytes N] [--times N] [--no-gate] [--dir D]

Writes one partition's log (4 million records by default, about 400 MB; three times as much disk is needed) and cleans it from its first
offset with each engine, each time in a fresh process over a tier of the same objects: `recompact` on local[1] and local[2], `run` with
one thread and with two; twice in turn, and the faster one counts. Each engine's row has the seconds of the round (Spark's start is a
column of its own), bytes exchanged per record in the store and the shuffle together, CPU seconds (of Spark's Python workers, without the
JVM; of the whole process where there is no Spark), and the most memory that one Python worker held. The results of all engines are
compared, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import logs
from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition

NAME = TopicPartition("orders", 0)
NOW_MS = 1_900_000_000_000
BATCH = 500
COLUMNS = (
    "engine", "seconds of the round", "start-up", "CPU seconds", "times those of `run`, one thread", "bytes exchanged per record",
    "largest Python worker",
)  # fmt: skip


def write_log(folder: Path, *, records: int, keys: int, segments: int, value_bytes: int, seed: int = 1) -> Path:
    """A log directory of v2 batches of 500 records whose keys are drawn evenly; nothing is compressed."""
    dice = np.random.default_rng(seed)
    batches, each = -(-records // BATCH), -(-records // segments // BATCH)
    drawn = (dice.integers(0, keys, BATCH * min(each, batches - begin)) for begin in range(0, batches, each))
    logs.write_log(folder, drawn, value_bytes=value_bytes, per_batch=BATCH)
    return folder


@dataclass(frozen=True)
class Bench:
    """``segment_bytes``: as large as the log's own segments, so that groups are rewritten beside each other."""

    folder: Path
    segment_bytes: int
    gate: bool

    def config(self, tier: Path, master: str = "local[2]", threads: int = 1) -> Path:
        file = tier.with_suffix(".toml")
        file.write_text(
            f'[tier]\nurl = "{tier.as_uri()}"\nstate_dir = "{tier.with_name("state")}"\n'
            f'[cleaner]\nmap_engine = "{"spark" if master else "auto"}"\nsegment_bytes = {self.segment_bytes}\n'
            f"verify_before_publish = {str(self.gate).lower()}\nmap_budget_bytes = {2 << 30}\n"
            f'[spark]\nmaster = "{master or "local[1]"}"\n[daemon]\nthreads = {threads}\n'
        )
        return file

    def bring(self, log_dir: Path) -> Path:
        tier = self.folder / "tier"
        opened = open_tier(load_settings(str(self.config(tier)), {}))
        import_directory(opened, log_dir, NAME, opened.settings.cleaner.cleaner_policy())
        return tier

    def timed(self, original: Path, command: str, *, master: str = "", threads: int = 1) -> tuple[dict[str, Any], dict[str, str]]:
        """(what the command says, digests of the segments that are left). Objects are never overwritten: links are copies enough."""
        tier = self.folder / "tried"
        shutil.copytree(original, tier, copy_function=os.link)
        try:
            words = [sys.executable, "-m", "compactor", command, "--now", str(NOW_MS), "--config", str(self.config(tier, master, threads))]
            words += ["--force"] if command == "run" else []
            done = subprocess.run([*words, "--output", "json"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{command} failed: {done.stderr}")
            state = open_tier(load_settings(str(self.config(tier)), {})).open_partition_log(NAME).refresh()
            return json.loads(done.stdout), {str(segment.start_offset): segment.files["log"].sha256 for segment in state.live}
        finally:
            shutil.rmtree(tier)
            shutil.rmtree(tier.with_name("state"), ignore_errors=True)


@dataclass(frozen=True)
class Measured:
    """One round. The CPU seconds are those of Spark's Python workers, or of the whole process without Spark."""

    seconds: float
    start_up_seconds: float
    cpu_seconds: float
    exchanged_per_record: float
    worker_bytes: int


def rounds(bench: Bench, original: Path, times: int) -> Iterator[tuple[str, Measured]]:
    """Yield each round as it ends, the engines in turn. Raises SystemExit if one wrote other segments than the first."""
    expected: dict[str, str] = {}
    for name, command, master, threads in times * (
        ("`run`, one thread", "run", "", 1),
        ("Spark, `local[1]`", "recompact", "local[1]", 1),
        ("Spark, `local[2]`", "recompact", "local[2]", 1),
        ("`run`, two threads", "run", "", 2),
    ):
        cpu_before = _cpu_of_children()
        document, digests = bench.timed(original, command, master=master, threads=threads)
        cpu = _cpu_of_children() - cpu_before
        if expected and digests != expected:
            raise SystemExit(f"{name} wrote other segments than the engine before it")
        expected = digests
        (row,) = document["partitions"]
        spark = document.get("spark", {})
        exchanged = spark["exchanged_bytes"] / row["records_read"] if spark else 0.0
        yield name, Measured(
            row["seconds"], spark.get("startup_seconds", 0.0), spark.get("worker_cpu_seconds", 0.0) or cpu, exchanged,
            spark.get("peak_worker_bytes", 0),
        )  # fmt: skip


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--keys", type=int, default=1_600_000)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--value-bytes", type=int, default=60)
    parser.add_argument("--times", type=int, default=2, help="each engine so often, in turn; the fastest of its times counts")
    parser.add_argument("--no-gate", action="store_true", help="without the equivalence gate")
    parser.add_argument("--dir", default=None, help="where the log and the tiers lie (default: the temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        began = time.perf_counter()
        sizes = {"records": args.records, "keys": args.keys, "segments": args.segments, "value_bytes": args.value_bytes}
        log_dir = write_log(Path(folder) / "log", **sizes)
        largest = max(file.stat().st_size for file in log_dir.iterdir())
        bench = Bench(Path(folder), largest, not args.no_gate)
        original = bench.bring(log_dir)
        shutil.rmtree(log_dir)
        print({**sizes, "cores": os.cpu_count(), "made in seconds": round(time.perf_counter() - began, 1)}, flush=True)
        warm_up(Path(folder) / "warm up")
        best: dict[str, Measured] = {}
        for engine, measured in rounds(bench, original, args.times):
            print(engine, measured, flush=True)
            best[engine] = min(measured, best.get(engine, measured), key=lambda one: one.seconds)
    plain = best["`run`, one thread"].cpu_seconds
    cells = [
        (
            engine, f"{one.seconds:.1f}", f"{one.start_up_seconds:.1f}" if one.worker_bytes else "-", f"{one.cpu_seconds:.1f}",
            f"{one.cpu_seconds / plain:.2f}", f"{one.exchanged_per_record:.1f}" if one.worker_bytes else "-",
            f"{one.worker_bytes / 1e9:.1f} GB" if one.worker_bytes else "-",
        )
        for engine, one in best.items()
    ]  # fmt: skip
    report_table(BenchmarkTable("spark", COLUMNS, cells, compared=COLUMNS[4:6]))


def warm_up(folder: Path) -> None:
    """Kernels are compiled once on a machine; that is not what is measured here."""
    bench = Bench(folder, 1 << 20, gate=True)
    tier = bench.bring(write_log(folder / "log", records=50_000, keys=1000, segments=4, value_bytes=60))
    for command, master in (("run", ""), ("recompact", "local[2]")):
        bench.timed(tier, command, master=master)


if __name__ == "__main__":
    main()
