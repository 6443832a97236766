"""What a key costs in each engine of the offset map: CPU nanoseconds a row, bytes a key, resident memory; beside them Python and numpy.

    python benchmarks/keysets.py                                      # 8 million rows of 4 million keys
    python benchmarks/keysets.py --rows 100000000 --keys 50000000 --only memory,memory-presized,partitioned

Every engine runs in a process of its own, on the same rows. Rows are made as they are needed and their making is not counted. The numbers
of surviving rows must agree.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compactor.kernels.common import Hashes

CHUNK = 1 << 19
MAP_BUDGET = 1_500_000_000


def rows_of(rows: int, keys: int) -> Iterator[tuple[int, Hashes]]:
    """(first row, hashes) in chunks: keys drawn at random, each with a hash of its own."""
    dice = np.random.default_rng(1)
    for begin in range(0, rows, CHUNK):
        ids = dice.integers(1, keys + 1, min(CHUNK, rows - begin)).astype(np.uint64)
        yield begin, np.column_stack([mixed(ids * np.uint64(2)), mixed(ids * np.uint64(2) + np.uint64(1))])


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Clock:
    """CPU time inside ``with`` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begin = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._begin


def memory(rows: int, keys: int, clock: Clock, expected: int = 0) -> tuple[int, int]:
    from compactor.cleaner.keys.key_set import KeyHashSet

    key_set, survivors = KeyHashSet(MAP_BUDGET, expected_key_count=expected), 0
    for _, hashes in rows_of(rows, keys):
        first = np.zeros(len(hashes), dtype=np.bool_)
        with clock:
            done = key_set.insert_keys_until_full(hashes, first)
        assert done == len(hashes), "the map budget is used up"
        survivors += int(np.count_nonzero(first))
    return survivors, key_set.peak_bytes


def memory_presized(rows: int, keys: int, clock: Clock) -> tuple[int, int]:
    return memory(rows, keys, clock, expected=int(keys * -np.expm1(-rows / keys)))


class NoLimit:
    def reserve_bytes(self, nbytes: int) -> None: ...

    def release_bytes(self, nbytes: int) -> None: ...


def partitioned(rows: int, keys: int, clock: Clock) -> tuple[int, int]:
    from compactor.cleaner.keys.disk_map import DiskOffsetMap

    with (
        tempfile.TemporaryDirectory() as directory,
        DiskOffsetMap(Path(directory) / "buckets", NoLimit(), map_budget_bytes=MAP_BUDGET, expected_row_count=rows) as engine,
    ):
        for begin, hashes in rows_of(rows, keys):
            ordinals = np.arange(begin, begin + len(hashes), dtype=np.uint32)
            with clock:
                engine.add_keys_of_dirty_rows(hashes, ordinals)
        with clock:
            bitmap = engine.survivor_bitmap(rows)
        return int(np.bitwise_count(bitmap).sum()), engine.peak_bytes


def bounded(rows: int, keys: int, clock: Clock) -> tuple[int, int]:
    from compactor.cleaner.keys.key_set import BoundedOffsetMap

    table = BoundedOffsetMap(keys, max_record_count=rows)
    for begin, hashes in rows_of(rows, keys):
        offsets = np.arange(begin, begin + len(hashes), dtype=np.int64)
        with clock:
            done = table.put_rows_until_full(hashes, offsets)
        if done < len(hashes):
            break
    return table.key_count, table.peak_bytes


def python_set(rows: int, keys: int, clock: Clock) -> tuple[int, int]:
    seen: set[bytes] = set()
    for _, hashes in rows_of(rows, keys):
        with clock:
            raw = hashes.tobytes()
            seen.update(raw[at : at + 16] for at in range(0, len(raw), 16))
    return len(seen), sys.getsizeof(seen) + len(seen) * sys.getsizeof(bytes(16))


def numpy_unique(rows: int, keys: int, clock: Clock) -> tuple[int, int]:
    everything = np.concatenate([hashes[:, 1] for _, hashes in rows_of(rows, keys)])
    with clock:
        _, first = np.unique(everything, return_index=True)
    return len(first), everything.nbytes


ENGINES: dict[str, Callable[[int, int, Clock], tuple[int, int]]] = {
    "memory": memory,
    "memory-presized": memory_presized,
    "partitioned": partitioned,
    "bounded": bounded,
    "python-set": python_set,
    "numpy-unique": numpy_unique,
}


def measure(name: str, rows: int, keys: int) -> None:
    """In the child: one engine, compiled beforehand, as one line of JSON."""
    ENGINES[name](1_000, 500, Clock())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock, begin = Clock(), time.perf_counter()
    survivors, nbytes = ENGINES[name](rows, keys, clock)
    wall = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu": clock.seconds, "survivors": survivors, "bytes": nbytes, "wall": wall, "peak": peak, "before": before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--keys", type=int, default=4_000_000)
    parser.add_argument("--only", default=",".join(ENGINES), help="engines, separated by commas")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        measure(given.child, given.rows, given.keys)
        return
    print(f"{given.rows:,} rows of {given.keys:,} possible keys; CPU time of one thread, map budget {MAP_BUDGET:,} bytes")
    print(f"{'engine':16} {'ns/row':>8} {'s/M keys':>9} {'bytes/key':>10} {'peak RSS MB':>12} {'keys':>12}")
    for name in given.only.split(","):
        command = [sys.executable, __file__, "--child", name, "--rows", str(given.rows), "--keys", str(given.keys)]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found = told["survivors"]
        print(
            f"{name:16} {told['cpu'] / given.rows * 1e9:8.1f} {told['cpu'] / found * 1e6:9.3f} {told['bytes'] / found:10.1f}"
            f" {told['peak'] / 1024:12,.0f} {found:12,}",
            flush=True,
        )


if __name__ == "__main__":
    main()
