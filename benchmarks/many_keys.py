"""One round over very many keys: time per million keys, bytes per key and the memory of the process, for each engine of the offset map.

    python -m benchmarks.many_keys [--scale X] [--no-gate] [--dir D]

Writes one partition of 50 million keys (--scale 1; each key once, in an order of its own, 8-byte values; about 2 GB, and three times as
much disk is needed) and cleans it from its first offset, each time in a process of its own: ``memory``, ``partitioned`` with a tenth of
that memory, and ``partitioned`` with as little local disk as it takes several passes in. The map budget of ``memory`` is 36 bytes a key,
where the gate has its keys on the disk, that of the others a tenth; the results of all are compared. RSS is the peak of the process, with
the pages of the files that it has mapped: those go when somebody needs the memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.budget import NAME, line, mib, run, write_config
from benchmarks.logs import write_log
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.transfer.import_ import import_directory

KEYS, SEGMENT_RECORDS, VALUE_BYTES = 50_000_000, 1_000_000, 8


def shuffled(keys: int) -> Iterator[npt.NDArray[np.int64]]:
    """Every number below ``keys`` once, a segment at a time: a permutation that needs no memory."""
    step = 2_654_435_761
    while np.gcd(step, keys) != 1:
        step += 2
    for begin in range(0, keys, SEGMENT_RECORDS):
        yield np.arange(begin, min(begin + SEGMENT_RECORDS, keys), dtype=np.int64) * step % keys


def digests(tier: Path) -> dict[int, str]:
    state = open_tier(load_settings(str(tier.with_suffix(".toml")), {})).open_partition_log(NAME).refresh()
    return {segment.start_offset: segment.files["log"].sha256 for segment in state.live}


def measure(folder: Path, scale: float, gate: bool) -> None:
    keys = max(100_000, round(KEYS * scale / 100_000) * 100_000)
    write_log(folder / "log", shuffled(keys), value_bytes=VALUE_BYTES, per_batch=500)
    sizes = [path.stat().st_size for path in (folder / "log").glob("*.log")]
    tier = folder / "base"
    opened = open_tier(load_settings(str(write_config(tier)), {}))
    import_directory(opened, folder / "log", NAME, opened.settings.cleaner.cleaner_policy())
    shutil.rmtree(folder / "log")
    print(f"{keys:,} keys, one record each, {len(sizes)} segments, {mib(sum(sizes))} MiB; gate {'on' if gate else 'off'}\n")
    line("engine", "map budget", "passes", "s/M keys", "CPU s/M", "map B/key", "map MiB", "RSS MiB", "RSS B/key", "disk MiB", "gate %")
    expected: dict[int, str] = {}
    large, small = keys * 36 + (1 << 20), keys * 4 + (1 << 20)
    for engine, map_budget, disk in (
        ("memory", large, 3 * max(sizes) + (64 << 20)),
        ("partitioned", small, 3 * max(sizes) + keys * 48),
        ("partitioned", small, 3 * max(sizes) + keys * 17),
    ):
        copy = folder / "tried"
        shutil.copytree(tier, copy, copy_function=os.link)
        config = write_config(
            copy, segment_bytes=max(sizes) + 100_000, disk_budget_bytes=disk, map_budget_bytes=map_budget, map_engine=engine,
            verify_before_publish=gate, threads=2, bloom=False,
        )  # fmt: skip
        begin = time.perf_counter()
        row, rss, cpu = run(config)
        seconds, millions = time.perf_counter() - begin, keys / 1_000_000
        found = digests(copy)
        if expected and found != expected:
            raise SystemExit(f"{engine} wrote other segments than the engine before it")
        expected = found
        (last,) = open_tier(load_settings(str(config), {})).open_partition_log(NAME).refresh().runs[-1:]
        if row["records_kept"] != keys or (last.stats["gate_keys"] == keys) != (last.stats["gate_coverage"] == 1.0):
            raise SystemExit(f"{row['records_kept']} of {keys} records were kept, and the gate looked up {last.stats['gate_keys']}")
        line(
            engine, mib(map_budget), row["passes"], f"{seconds / millions:.2f}", f"{cpu / millions:.2f}",
            f"{row['peak_map_bytes'] / keys:.1f}", mib(row["peak_map_bytes"]), mib(rss), f"{rss / keys:.1f}", mib(row["peak_disk_bytes"]),
            f"{100 * float(last.stats['gate_coverage']):.0f}",
        )  # fmt: skip
        shutil.rmtree(copy)
        shutil.rmtree(copy.with_suffix(".state"), ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="1 is 50 million keys")
    parser.add_argument("--no-gate", action="store_true", help="verify_before_publish = false")
    parser.add_argument("--dir", type=Path, help="where the tiers are made (default: a temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-keys-", dir=args.dir) as folder:
        measure(Path(folder), args.scale, not args.no_gate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
