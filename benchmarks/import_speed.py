"""``import`` against reading, checksumming and writing the same bytes: ``python -m benchmarks.import_speed [--megabytes N] [--codec C]``.

Both write into a directory on the same disk, from files in the page cache. The plain copy does what any honest uploader has to: it reads
each segment, takes its SHA-256, writes it and syncs. Shown are wall clock and CPU seconds of both, after one round to warm up.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from compactor.bootstrap import open_tier
from compactor.config import load
from compactor.model.ids import TopicPartition
from compactor.records.build import Row, batch
from compactor.records.codecs import LZ4, NONE, ZSTD
from compactor.transfer.import_ import import_directory

CODECS = {"none": NONE, "lz4": LZ4, "zstd": ZSTD}
SEGMENT_BYTES = 64 << 20
CHUNK = 1 << 20


def write_log(folder: Path, size: int, codec: int) -> int:
    """Segments of 16 KB batches with 1 KB values that can be compressed to half. Returns their bytes."""
    chance = random.Random(1)
    folder.mkdir(parents=True)
    offset = total = 0
    while total < size:
        with (folder / f"{offset:020}.log").open("wb") as file:
            while file.tell() < min(SEGMENT_BYTES, size):
                values = [chance.randbytes(512) + bytes(512) for _ in range(16)]
                rows = [Row(offset + n, 1000 + n, b"key-%d" % ((offset + n) % 99_991), values[n], ()) for n in range(16)]
                file.write(batch(rows, codec=codec, base_offset=offset, last_offset=offset + 15))
                offset += 16
            total += file.tell()
    return total


def plain_copy(source: Path, target: Path) -> None:
    """What nobody can leave out."""
    target.mkdir()
    for path in sorted(source.glob("*.log")):
        digest = hashlib.sha256()
        with path.open("rb") as file, (target / path.name).open("wb") as out:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())


def taken(work: Callable[[], object]) -> tuple[float, float]:
    """(wall clock, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--codec", choices=CODECS, default="none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_log(folder / "orders-0", options.megabytes << 20, CODECS[options.codec])
        for number in range(2):
            config = folder / f"{number}.toml"
            config.write_text(f'[tier]\nurl = "file://{folder}/tier-{number}"\nstate_dir = "{folder}/state-{number}"\n')
            tier = open_tier(load(str(config)))
            policy = tier.settings.cleaner.policy()
            ours = taken(
                lambda tier=tier, policy=policy: import_directory(  # type: ignore[misc]
                    tier, folder / "orders-0", TopicPartition("orders", 0), policy
                )
            )
            plain = taken(lambda number=number: plain_copy(folder / "orders-0", folder / f"copy-{number}"))  # type: ignore[misc]
        megabytes = size / (1 << 20)
        for name, (wall, cpu) in (("import", ours), ("plain copy", plain)):
            print(f"{name:10} {wall:6.2f} s, {megabytes / wall:6.0f} MB/s; {cpu:6.2f} CPU s, {megabytes / cpu:6.0f} MB per CPU s")
        print(f"ratio      {ours[0] / plain[0]:6.2f} wall clock, {ours[1] / plain[1]:6.2f} CPU")


if __name__ == "__main__":
    main()
