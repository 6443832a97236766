"""What Bloom sidecars spare: 200 segments, of which 5 % share keys with the dirty tail, with and without filters.

    python -m benchmarks.skip [--scale X] [--dirty N ...] [--trials N] [--dir D]

The segments (1 MiB of 1,000 records by default; --scale changes their size) have keys of their own and are cleaned once. For each number
of dirty keys (1,000, 100,000 and 1,000,000) the filters are made anew for just so many, a tail of so many new keys is imported that also
brings one key of every 20th segment again, and the round over it is run on two copies of the tier, with `bloom` on and off. Bytes are what
was fetched and written of segments; ``sidecars`` what was fetched of sidecars. At the end each filter is asked about that many random
keys, some times over, for the measured rate of false positives (promised: 1 % of the segments that share no key).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.round.compaction import RoundReport
from compactor.upkeep.repair import rebuild_sidecars

NAME = TopicPartition("orders", 0)
NOW_MS = 1_900_000_000_000
SEGMENTS, RECORDS, VALUE_BYTES, TAIL_VALUE_BYTES = 200, 1_000, 1_000, 40
SHARING = 20
COLUMNS = (
    "dirty keys", "filters", "segment bytes read", "sidecar bytes read", "bytes written", "requests", "segments skipped", "useless reads"
)  # fmt: skip


def opened(tier: Path, segment_bytes: int, *, bloom: bool = True, design_keys: int = 0) -> Tier:
    config = tier.with_suffix(".toml")
    config.write_text(
        f'[tier]\nurl = "{tier.as_uri()}"\nstate_dir = "{tier.with_suffix(".state")}"\n'
        f"[cleaner]\nsegment_bytes = {segment_bytes}\nbloom = {str(bloom).lower()}\nbloom_design_keys = {design_keys}\n"
        f"min_cleanable_dirty_ratio = 0.0\ndisk_budget_bytes = {64 << 20}\n"
    )
    return open_tier(load_settings(str(config), {}))


def bring(tier: Tier, folder: Path, dirty: int, records: int, offset: int) -> None:
    """Import the tail: so many keys, one of them from every 20th segment."""
    shared = np.arange(0, SEGMENTS, SHARING) * records + 5
    fresh = 10**9 + np.arange(dirty - len(shared))
    keys = np.resize(np.concatenate((shared, fresh)), -(-dirty // 100) * 100)
    write_log(folder, np.split(keys, np.arange(100_000, len(keys), 100_000)), value_bytes=TAIL_VALUE_BYTES, first_offset=offset)
    import_directory(tier, folder, NAME, tier.settings.cleaner.cleaner_policy())


def measured(tier: Tier, dirty: int, trials: int) -> tuple[int, int]:
    """(filters asked, wrong answers) about random keys that are in no segment."""
    sidecars, dice = tier.open_sidecar_store(NAME), np.random.default_rng(dirty)
    asked = wrong = 0
    for segment in tier.open_partition_log(NAME).refresh().live:
        found = sidecars.load_sidecar(segment.id)
        if found is None or found.filter is None:
            continue
        for _ in range(trials):
            asked += 1
            wrong += bool(found.filter.flag_possible_keys(dice.integers(0, 2**64, (dirty, 2), np.uint64)).any())
    return asked, wrong


def reported(dirty: int, filters: str, report: RoundReport, requests: int) -> tuple[str, ...]:
    """The cells of a round: see ``COLUMNS``."""
    filtered = report.filters
    return (
        f"{dirty:,}", filters, f"{report.bytes_read / 1e6:.1f} MB", f"{filtered.bytes_read / 1e6:.1f} MB" if filtered.asked else "-",
        f"{report.bytes_written / 1e6:.1f} MB", f"{requests:,}", str(report.segments_skipped),
        f"{filtered.useless} of {filtered.asked}" if filtered.asked else "-",
    )  # fmt: skip


def run(folder: Path, scale: float, numbers: list[int], trials: int) -> None:
    records = max(100, round(RECORDS * scale / 100) * 100)
    base = np.arange(SEGMENTS * records).reshape(SEGMENTS, records)
    end = write_log(folder / "log", base, value_bytes=VALUE_BYTES)
    size = max(path.stat().st_size for path in (folder / "log").glob("*.log"))
    segment_bytes = size + size // 2
    tier = opened(folder / "base", segment_bytes)
    import_directory(tier, folder / "log", NAME, tier.settings.cleaner.cleaner_policy())
    first = compact(tier, NAME, NOW_MS, force=True)
    print(f"{first.segments_out} clean segments of {size:,} bytes; one in {SHARING} shares a key with the tail")
    rows = []
    for dirty in numbers:
        made = folder / f"for-{dirty}"
        shutil.copytree(folder / "base", made, copy_function=os.link)
        tier = opened(made, segment_bytes, design_keys=dirty)
        rebuild_sidecars(tier, NAME, DiskBudget(1 << 30), unusable_only=False)
        asked, wrong = measured(tier, dirty, trials if dirty < 500_000 else max(1, trials // 4))
        print(f"filters for {dirty:,} keys: {wrong} of {asked} answers were wrong, {100 * wrong / max(1, asked):.2f} %", flush=True)
        bring(tier, folder / f"tail-{dirty}", dirty, records, end)
        for filters in ("on", "off"):
            copy = folder / f"{filters}-{dirty}"
            shutil.copytree(made, copy, copy_function=os.link)
            tier = opened(copy, segment_bytes, bloom=filters == "on", design_keys=dirty)
            before = tier.counters.usage()
            report = compact(tier, NAME, NOW_MS, force=True)
            rows.append(reported(dirty, filters, report, tier.counters.usage().usage_since(before).total_requests))
            shutil.rmtree(copy)
        shutil.rmtree(made)
    report_table(BenchmarkTable("skip", COLUMNS, rows, compared=COLUMNS[2:7], label_columns=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the segments: 1 is 1 MiB")
    parser.add_argument("--dirty", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--trials", type=int, default=20, help="how often each filter is asked")
    parser.add_argument("--dir", type=Path, help="where the tiers are made (default: a temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skip-", dir=args.dir) as folder:
        run(Path(folder), args.scale, args.dirty, args.trials)
    return 0


if __name__ == "__main__":
    sys.exit(main())
