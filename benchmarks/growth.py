"""Whether a record costs the same whatever the number of keys: one round over 1 to 30 million keys, with the gate and without it.

    python -m benchmarks.growth [--millions 1 3 10 30] [--map-budget-mib N] [--dir D]

Each key comes once, in an order of its own, in records of 60 bytes and segments of a million: the worst case for a map, as none is
superseded. The map budget is the default (512 MiB): with more keys first the gate looks up only some of them, and then the cleaner's rows
go to the disk. Each round is a process of its own. A round that finds nothing to do measures the start-up, which is taken off. About 200
bytes of disk a key.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.budget import NAME, run, write_config
from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory

SEGMENT_RECORDS, VALUE_BYTES, PER_BATCH = 1_000_000, 34, 500
MIB = 1 << 20
COLUMNS = (
    "million keys", "where the cleaner's keys are", "map, bytes a key", "CPU microseconds a record, without the gate", "with it", "ratio",
    "keys that the gate looked up", "memory of the process with the gate, bytes a key",
)  # fmt: skip


def shuffled(keys: int) -> Iterator[npt.NDArray[np.int64]]:
    """Every number below ``keys`` once, a segment at a time: a permutation that needs no memory."""
    step = 2_654_435_761
    while np.gcd(step, keys) != 1:
        step += 2
    for begin in range(0, keys, SEGMENT_RECORDS):
        yield np.arange(begin, min(begin + SEGMENT_RECORDS, keys), dtype=np.int64) * step % keys


class Round(NamedTuple):
    """CPU microseconds a record; bytes a key of the map and of the process; share of the keys that the gate looked up."""

    is_partitioned: bool
    cpu_us: float
    map_bytes: float
    resident_bytes: float
    gate_coverage: float


def measure(folder: Path, keys: int, map_budget_bytes: int) -> tuple[Round, Round]:
    """Return a round without the gate, and one with it."""
    write_log(folder / "log", shuffled(keys), value_bytes=VALUE_BYTES, per_batch=PER_BATCH)
    sizes = [path.stat().st_size for path in (folder / "log").glob("*.log")]
    found = []
    for gate in (False, True):
        tier = folder / f"tier-{gate}"
        config = write_config(
            tier, segment_bytes=max(sizes) + 100_000, disk_budget_bytes=3 * max(sizes) + keys * 60 + 64 * MIB,
            map_budget_bytes=map_budget_bytes, verify_before_publish=gate, bloom=False, threads=1,
        )  # fmt: skip
        opened = open_tier(load_settings(str(config), {}))
        import_directory(opened, folder / "log", NAME, opened.settings.cleaner.cleaner_policy())
        row, resident, cpu = run(config)
        (last,) = opened.open_partition_log(NAME).refresh().runs[-1:]
        if row["records_kept"] != keys or (last.stats["gate_keys"] == keys) != (last.stats["gate_coverage"] == 1.0):
            raise SystemExit(f"{row['records_kept']} of {keys} records were kept, and the gate looked up {last.stats['gate_keys']}")
        _, idle_bytes, idle_cpu = run(config)
        found.append(
            Round(
                row["map_engine"] == "partitioned", (cpu - idle_cpu) / keys * 1e6, row["peak_map_bytes"] / keys,
                (resident - idle_bytes) / keys, float(last.stats["gate_coverage"]),
            )
        )  # fmt: skip
        shutil.rmtree(tier)
        shutil.rmtree(tier.with_suffix(".state"), ignore_errors=True)
    shutil.rmtree(folder / "log")
    return found[0], found[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="*", default=[1, 3, 10, 30])
    parser.add_argument("--map-budget-mib", type=int, default=512, help="default 512; with less, keys go to the disk sooner")
    parser.add_argument("--dir", type=Path, help="where the logs are made (default: a temporary directory)")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="growth-", dir=args.dir) as folder:
        for millions in args.millions:
            plain, gated = measure(Path(folder), round(millions * 1e6), args.map_budget_mib * MIB)
            print(plain, gated, flush=True)
            rows.append((
                f"{millions:g}", "disk" if plain.is_partitioned else "memory", f"{plain.map_bytes:.1f}", f"{plain.cpu_us:.2f}",
                f"{gated.cpu_us:.2f}", f"{gated.cpu_us / plain.cpu_us:.2f}",
                f"{100 * gated.gate_coverage:.0f} %", f"{gated.resident_bytes:.0f}",
            ))  # fmt: skip
    report_table(BenchmarkTable("growth", COLUMNS, rows, compared=(COLUMNS[2], *COLUMNS[5:7])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
