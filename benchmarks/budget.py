"""Peak staged bytes and peak memory against the budgets: one round over the same log, with disk budgets from two segments upwards.

    python -m benchmarks.budget [--scale X] [--segments N] [--threads N] [--dir D]

Writes a log of 12 segments (16 MiB each by default; --scale changes that) whose keys repeat, and cleans it from its first offset in a
process of its own for each pair of budgets. ``staged`` is what the process reports, ``seen`` the most that a look at its spool found (in
blocks, without a pause); neither may exceed the budget. ``RSS`` is the peak of the process, with the pages of files that it has mapped;
``idle`` is the same for a round that finds nothing to do. Where the disk budget is small, segments are fetched more than once (``read``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from tests.support.watching import Watch

NAME = TopicPartition("orders", 0)
NOW_MS = 1_900_000_000_000
SEGMENT_BYTES, VALUE_BYTES = 16 << 20, 200
COLUMNS = ("disk budget", "in segments", "engine", "map budget", "staged", "seen", "map", "RSS", "read")


def write_config(tier: Path, **cleaner: object) -> Path:
    file = tier.with_suffix(".toml")
    threads = cleaner.pop("threads", 1)
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in cleaner.items())
    file.write_text(
        f'[tier]\nurl = "{tier.as_uri()}"\nstate_dir = "{tier.with_suffix(".state")}"\n[cleaner]\n{settings}\n'
        f"[daemon]\nthreads = {threads}\n"
    )
    return file


def run(config: Path) -> tuple[dict[str, Any], int, float]:
    """(the row of `run`, peak RSS in bytes, CPU seconds)."""
    words = [sys.executable, "-m", "compactor", "run", "--force", "--now", str(NOW_MS), "--config", str(config), "--output", "json"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        process = subprocess.Popen(words, stdout=out, stderr=told)
        peak = 0
        while True:  # the kernel's own maximum of a child begins with what its parent had
            peak = max(peak, resident(process.pid))
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        told.seek(0)
        if process.returncode:
            raise SystemExit(f"run failed: {told.read().decode()}")
        (row,) = json.loads(out.read())["partitions"]
    return row, peak, used.ru_utime + used.ru_stime


def resident(pid: int) -> int:
    """The most memory that a process had so far, in bytes; 0 once it has ended."""
    found = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else 0


def mib(size: float) -> str:
    return f"{size / (1 << 20):.1f}"


def measure(folder: Path, scale: float, segments: int, threads: int) -> None:
    per_segment = max(100, round(SEGMENT_BYTES * scale / (VALUE_BYTES + 30) / 100) * 100)
    dice = np.random.default_rng(1)
    keys = per_segment * segments // 2
    write_log(folder / "log", (dice.integers(0, keys, per_segment) for _ in range(segments)), value_bytes=VALUE_BYTES)
    size = max(path.stat().st_size for path in (folder / "log").glob("*.log"))
    tier = folder / "base"
    opened = open_tier(load_settings(str(write_config(tier)), {}))
    import_directory(opened, folder / "log", NAME, opened.settings.cleaner.cleaner_policy())
    warm = folder / "warm"
    shutil.copytree(tier, warm, copy_function=os.link)
    run(write_config(warm, segment_bytes=size + size // 4, disk_budget_bytes=100 * size))
    _, idle, _ = run(write_config(warm, segment_bytes=size + size // 4, disk_budget_bytes=100 * size))
    print(f"{segments} segments of {mib(size)} MiB, {per_segment * segments:,} records, {threads} threads; idle RSS {mib(idle)} MiB")
    rows = []
    small = per_segment * segments * 5  # of what one key after the other might need, a quarter
    for times, map_budget in (*((times, 64 << 20) for times in (2.1, 2.5, 3, 4, 6, 40)), (2.5, small), (6, small)):
        budget = int(times * size)
        copy = folder / "tried"
        shutil.copytree(tier, copy, copy_function=os.link)
        config = write_config(
            copy, segment_bytes=size + size // 4, disk_budget_bytes=budget, map_budget_bytes=map_budget, threads=threads
        )  # fmt: skip
        with Watch(copy.with_suffix(".state") / "spool") as seen:
            row, rss, _ = run(config)
        rows.append((
            mib(budget), f"{times:g}", row["map_engine"], mib(map_budget), mib(row["peak_disk_bytes"]), mib(seen.most),
            mib(row["peak_map_bytes"]), mib(rss), mib(row["bytes_read"]),
        ))  # fmt: skip
        if max(row["peak_disk_bytes"], seen.most) > budget:
            raise SystemExit("the disk budget was exceeded")
        shutil.rmtree(copy)
        shutil.rmtree(copy.with_suffix(".state"), ignore_errors=True)
    report_table(BenchmarkTable("budget", COLUMNS, rows, compared=COLUMNS[3:], label_columns=3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the segments: 1 is 16 MiB")
    parser.add_argument("--segments", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="where the tiers are made (default: a temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="budget-", dir=args.dir) as folder:
        measure(Path(folder), args.scale, args.segments, args.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
