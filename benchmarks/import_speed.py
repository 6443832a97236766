"""``import`` against reading, checksumming and writing the same bytes: ``python -m benchmarks.import_speed [--megabytes N] [--only NAME]``.

All write into a directory on the same disk, from files in the page cache. *Plain* does what any honest uploader has to: it reads each
segment, takes its SHA-256, writes it and syncs. *Checked* also verifies each batch's CRC-32C and decompresses it, with the same libraries:
for compressed data that is the floor for whoever promises that what came in can be read. Shown are the least of some rounds, one after the
other in this process, after one to warm up.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from compactor.records.batches import HEADER, memory_map_file, parse_batch_headers, verify_crcs_of_batches
from compactor.records.codecs import GZIP, LZ4, NONE, SNAPPY, ZSTD, GrowingByteBuffer, decompress_body_into
from compactor.records.encode import RecordToEncode as Row, encode_batch

SEGMENT_BYTES = 64 << 20
CHUNK = 1 << 20
LIMIT = 1 << 30
ORDERS = TopicPartition("orders", 0)
COLUMNS = ("records", "time: times a plain copy", "CPU: times a plain copy", "time: times a checked copy", "CPU: times a checked copy")


class Content(NamedTuple):
    """``random_bytes``: of each value; the rest of it are zeros. ``records``: of a batch."""

    codec: int
    value_bytes: int
    random_bytes: int
    records: int


CONTENTS = {
    "1 KB values, uncompressed": Content(NONE, 1024, 512, 16),
    "100 B values, uncompressed": Content(NONE, 100, 50, 160),
    "1 KB, lz4, 2:1": Content(LZ4, 1024, 512, 16),
    "1 KB, lz4, 12:1": Content(LZ4, 1024, 64, 64),
    "1 KB, snappy, 2:1": Content(SNAPPY, 1024, 512, 16),
    "1 KB, zstd, 2:1": Content(ZSTD, 1024, 512, 16),
    "1 KB, zstd, 12:1": Content(ZSTD, 1024, 64, 64),
    "1 KB, gzip, 2:1": Content(GZIP, 1024, 512, 16),
}


class Taken(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


def write_log(folder: Path, size: int, content: Content) -> None:
    """Write segments of equal batches, of so many bytes together."""
    chance = random.Random(1)
    folder.mkdir(parents=True)
    offset = total = 0
    while total < size:
        with (folder / f"{offset:020}.log").open("wb") as file:
            while file.tell() < min(SEGMENT_BYTES, size - total):
                values = [chance.randbytes(content.random_bytes).ljust(content.value_bytes, b"\0") for _ in range(content.records)]
                rows = [Row(offset + n, 1000 + n, b"key-%d" % ((offset + n) % 99_991), value, ()) for n, value in enumerate(values)]
                file.write(encode_batch(rows, codec=content.codec, base_offset=offset, last_offset=offset + content.records - 1))
                offset += content.records
            total += file.tell()


def plain(source: Path, target: Path) -> None:
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


def inflating(source: Path, target: Path) -> None:
    """The same, and every batch is checked and inflated."""
    buffer = GrowingByteBuffer()
    for path in sorted(source.glob("*.log")):
        data = memory_map_file(path)
        table = parse_batch_headers(data, path.name)
        verify_crcs_of_batches(data, table, 0, len(table), path.name)
        view = data.data
        for codec, position, size in zip(table.codec_ids.tolist(), table.position.tolist(), table.size.tolist(), strict=True):
            if codec:
                buffer.clear()
                decompress_body_into(codec, view[position + HEADER : position + size], buffer, LIMIT)
    plain(source, target)


def taken(work: Callable[[], object]) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def import_all(folder: Path, place: Path) -> None:
    place.mkdir()
    config = place / "config.toml"
    config.write_text(f'[tier]\nurl = "file://{place}/tier"\nstate_dir = "{place}/state"\n')
    tier = open_tier(load_settings(str(config)))
    import_directory(tier, folder, ORDERS, tier.settings.cleaner.cleaner_policy())


def compared(folder: Path, rounds: int) -> dict[str, Taken]:
    """The least wall clock and the least CPU of each way, apart; the first round warms up."""
    ways: dict[str, Callable[[Path], None]] = {
        "import": lambda place: import_all(folder / "orders-0", place),
        "plain": lambda place: plain(folder / "orders-0", place),
        "inflating": lambda place: inflating(folder / "orders-0", place),
    }
    seen: dict[str, list[Taken]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            place = folder / "place"
            found = taken(lambda way=way, place=place: way(place))
            shutil.rmtree(place)
            if number:
                seen[name].append(found)
    return {name: Taken(min(one.wall for one in all_), min(one.cpu for one in all_)) for name, all_ in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CONTENTS)
    options = parser.parse_args()
    rows = []
    for name, content in CONTENTS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            write_log(Path(scratch) / "orders-0", options.megabytes << 20, content)
            found = compared(Path(scratch), options.rounds)
        print(name, found, flush=True)
        ours, copied, inflated = found["import"], found["plain"], found["inflating"]
        ratios = (ours.wall / copied.wall, ours.cpu / copied.cpu, ours.wall / inflated.wall, ours.cpu / inflated.cpu)
        rows.append((name, *(f"{ratio:.1f}" for ratio in ratios)))
    report_table(BenchmarkTable("import_speed", COLUMNS, rows, compared=COLUMNS[1:]))


if __name__ == "__main__":
    main()
