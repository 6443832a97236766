"""Two partitions that the daemon cleans one after the other, and at the same time.

    python -m benchmarks.parallel_rounds [--mb 200] [--dir D]

Two logs of this size, whose keys all come twice, are imported into a tier in a directory and into one on versitygw. A daemon with one
thread and one with two clean copies of it. The CPU seconds are those of the daemon, without versitygw's, which needs the same two cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from benchmarks.partial_rewrite import on_disk, on_s3, opened
from compactor.access.tier import Tier
from compactor.daemon.daemon import Daemon
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition

NAMES = (TopicPartition("orders", 0), TopicPartition("orders", 1))
VALUE_BYTES, PER_BATCH, SEGMENTS = 1_000, 100, 8
RECORD_BYTES = VALUE_BYTES + 20
COLUMNS = ("store", "threads", "seconds", "CPU s", "times as fast as one thread")


def with_threads(url: str, folder: Path, threads: int) -> Tier:
    return opened(url, folder, f"[daemon]\nthreads = {threads}\n", local_state=True)


def clean_all(tier: Tier) -> tuple[float, float]:
    """Let a daemon clean what is due; return seconds and CPU seconds."""
    daemon = Daemon(tier, seed=1)
    wall, cpu = time.perf_counter(), time.process_time()
    while not all(tier.open_partition_log(name).refresh().runs for name in NAMES):
        daemon.scan()
        daemon.start_due_jobs()
        while daemon.status().running_jobs:
            daemon.process_ended_jobs(5)
            daemon.start_due_jobs()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=200, help="size of each log")
    parser.add_argument("--dir", type=Path, help="where the tiers are made (default: a temporary directory)")
    args = parser.parse_args()
    keys = args.mb * 1_000_000 // RECORD_BYTES // (2 * SEGMENTS * PER_BATCH) * SEGMENTS * PER_BATCH
    size = keys // (SEGMENTS // 2)
    rows = []
    for store, place in (("directory", on_disk), ("versitygw", on_s3)):
        with tempfile.TemporaryDirectory(prefix="parallel-", dir=args.dir) as scratch, place(Path(scratch)) as (url_of, copy):
            folder = Path(scratch)
            base = with_threads(url_of("base"), folder, 2)
            for name in NAMES:
                parts = [np.arange(start, start + size) for start in range(0, keys, size)] * 2
                write_log(folder / str(name), parts, value_bytes=VALUE_BYTES, per_batch=PER_BATCH)
                import_directory(base, folder / str(name), name, base.settings.cleaner.cleaner_policy())
            one_thread = 0.0
            for warm_up, threads in ((True, 2), (False, 1), (False, 2)):
                target = f"tier-{warm_up}-{threads}".lower()
                copy("base", target)
                seconds, cpu = clean_all(with_threads(url_of(target), folder, threads))
                copy("", target)
                one_thread = seconds if threads == 1 else one_thread
                if not warm_up:
                    rows.append((store, str(threads), f"{seconds:.1f}", f"{cpu:.1f}", f"{one_thread / seconds:.2f}"))
    report_table(BenchmarkTable("parallel_rounds", COLUMNS, rows, compared=COLUMNS[4:], label_columns=2))


if __name__ == "__main__":
    main()
