"""What hashing a key and asking a filter cost, in nanoseconds of CPU time a key; pybloom-live as it comes in the same run.

python benchmarks/filters.py                        # 1 million keys
python benchmarks/filters.py --keys 5000000 --probes 500000000      # and the false positives at 2e-9
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from pybloom_live import BloomFilter

from bloom.filter import KeyFilter
from bloom.sidecar import add_to_sketch, empty_sketch
from bloom.siphash import hash_keys, siphash_key_halves

SAMPLE = 20_000


def cost(work: Callable[[], object], keys: int, times: int = 3) -> float:
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best / keys * 1e9


def random_hashes(rows: int, seed: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**64, size=(rows, 2), dtype=np.uint64)


def hashing(keys: int) -> None:
    print(f"{'key bytes':>10} {'SipHash-2-4-128 ns':>20}")
    halves = siphash_key_halves(bytes(range(16)))
    for size in (8, 20, 36, 100):
        buf = np.random.default_rng(size).integers(0, 256, keys * size, dtype=np.uint8)
        starts, lengths = np.arange(keys, dtype=np.int64) * size, np.full(keys, size, dtype=np.int32)
        out = np.zeros((keys, 2), dtype=np.uint64)
        hash_keys(buf, starts[:1], lengths[:1], *halves, out)
        print(f"{size:10} {cost(lambda: hash_keys(buf, starts, lengths, *halves, out), keys):20.1f}")  # noqa: B023 - called at once


def filters(keys: int) -> None:
    mine, others = random_hashes(keys, 1), random_hashes(keys, 2)
    sample, other_sample = [row.tobytes() for row in mine[:SAMPLE]], [row.tobytes() for row in others[:SAMPLE]]
    print(f"\n{'rate':>8} {'bits/key':>9} {'add':>7} {'hit':>7} {'miss':>7} {'library: add':>14} {'hit':>6} {'miss':>6} {'file MB/s':>10}")
    for rate in (1e-2, 1e-6, 2e-9):
        KeyFilter(10, rate).add_hashes(mine[:1])
        KeyFilter(10, rate).flag_contained_hashes(mine[:1])
        ours = KeyFilter(keys, rate)
        add = cost(lambda: ours.add_hashes(mine), keys, times=1)  # noqa: B023
        hit, miss = (cost(lambda: ours.flag_contained_hashes(asked), keys) for asked in (mine, others))  # noqa: B023
        theirs = BloomFilter(keys, rate)
        add_plain = cost(lambda: [theirs.add(key) for key in sample], SAMPLE, times=1)  # noqa: B023
        hit_plain = cost(lambda: [key in theirs for key in sample], SAMPLE)  # noqa: B023
        miss_plain = cost(lambda: [key in theirs for key in other_sample], SAMPLE)  # noqa: B023
        begin, body = time.process_time(), io.BytesIO()
        ours.tofile(body)
        KeyFilter.fromfile(io.BytesIO(body.getbuffer()))
        speed = len(body.getbuffer()) / (time.process_time() - begin) / 1e6
        print(
            f"{rate:8.0e} {ours.num_bits / keys:9.1f} {add:7.1f} {hit:7.1f} {miss:7.1f}"
            f" {add_plain:14.0f} {hit_plain:6.0f} {miss_plain:6.0f} {speed:10.0f}"
        )
    add_to_sketch(empty_sketch(), mine[:1])
    print(f"\ncardinality sketch: {cost(lambda: add_to_sketch(empty_sketch(), mine), keys):.1f} ns a key")


def false_positives(keys: int, probes: int) -> None:
    key_filter, rate, found = KeyFilter(keys, 2e-9), 2e-9, 0
    key_filter.add_hashes(random_hashes(keys, 1))
    rounds = -(-probes // (1 << 20))
    for seed in range(rounds):
        found += int(np.count_nonzero(key_filter.flag_contained_hashes(random_hashes(1 << 20, seed + 10))))
    print(f"\nfalse positives at {rate:.0e}: {found} in {rounds << 20:,} probes, {(rounds << 20) * rate:.1f} expected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--probes", type=int, default=0, help="also count false positives at 2e-9 among so many probes")
    given = parser.parse_args()
    hashing(given.keys)
    filters(given.keys)
    if given.probes:
        false_positives(given.keys, given.probes)


if __name__ == "__main__":
    main()
