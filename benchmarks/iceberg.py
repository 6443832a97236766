"""The Iceberg table of a topic beside the same changes by Spark's ``MERGE INTO``, and what lookups and scans of each cost.

    python -m benchmarks.iceberg [--records 2000000] [--value-bytes 200] [--dir D]        (needs Java and Maven)

A topic of so many keys, one record each, is cleaned and its table is built. Then 1 % of the keys change, three times: any keys, the same
keys again (as hot keys do), and keys that lie in one segment. After each change a round cleans the tier and the table follows. Spark makes
a table of the first snapshot and merges the same changes into it, copy on write. Both tables must hold the same at the end.

Bytes are the data files that a snapshot adds. CPU seconds are those of the process: Python's while the table is updated (the round, which
the tier needs anyway, is a column of its own), and those of a warm JVM while it merges. Lookups ask for one key, 5 times; the scan reads
all values. The same files are also written without Bloom filters, in the order of offsets and sorted by key.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.expressions import EqualTo
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.table import Table

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from benchmarks.restore import AnonymousMemory
from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.iceberg.output import IcebergOutput
from compactor.features.iceberg.table import PROPERTIES, SCHEMA
from compactor.features.imports.import_ import import_directory
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from tests.support.iceberg_spark import Executed, run_statements

NAME = TopicPartition("orders", 0)
NOW_MS = 1_900_000_000_000
SEGMENTS, CHANGED_SHARE, LOOKUPS, SORTED_GROUP = 20, 100, 5, 16_384

OURS, MERGED = "compacted.kafka.orders", "compacted.bench.merged"


@dataclass(frozen=True)
class Change:
    """One change of the topic. end_offset: of its records. round_bytes: of segments that the round wrote."""

    name: str
    snapshot_id: int
    first_offset: int
    end_offset: int
    round_cpu: float
    round_bytes: int
    table_cpu: float
    table_bytes: int


class House:
    """A tier in a directory, and the table of its topic."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder
        self.uri, self.warehouse = f"sqlite:///{folder}/catalog.db", (folder / "warehouse").as_uri()
        config = folder / "tier.toml"
        config.write_text(
            f'[tier]\nurl = "{(folder / "tier").as_uri()}"\nstate_dir = "{folder / "state"}"\n'
            f"[cleaner]\nsegment_bytes = {segment_bytes}\nmin_cleanable_dirty_ratio = 0.0\n"
            f'[outputs.iceberg]\nwarehouse = "{self.warehouse}"\ncatalog = {{ type = "sql", uri = "{self.uri}" }}\n'
            "[outputs.iceberg.topics.orders]\n"
        )
        self.tier: Tier = open_tier(load_settings(str(config), {}))
        self.end_offset = 0

    def catalog(self) -> Catalog:
        return load_catalog("compacted", type="sql", uri=self.uri, warehouse=self.warehouse)

    def table(self) -> Table:
        return self.catalog().load_table("kafka.orders")

    def change(self, name: str, log: Path, end_offset: int) -> Change:
        """Import a log directory, clean the tier and update the table."""
        import_directory(self.tier, log, NAME, self.tier.settings.cleaner.cleaner_policy())
        begin = time.process_time()
        report = compact(self.tier, NAME, NOW_MS, force=True)
        cleaned = time.process_time()
        memory = AnonymousMemory()
        with memory.watched():
            done = IcebergOutput().update_output(self.tier, NAME, DiskBudget(1 << 32))
        updated = time.process_time()
        if done.status != "written":
            raise SystemExit(f"the table was not written: {done}")
        snapshot = self.table().current_snapshot()
        if snapshot is None or snapshot.summary is None:
            raise SystemExit("the table has no snapshot")
        added = int(snapshot.summary.additional_properties["added-files-size"])
        first, self.end_offset = self.end_offset, end_offset
        print(f"{name}: {memory.peak_bytes / 1e6:.0f} MB of memory", flush=True)
        return Change(name, snapshot.snapshot_id, first, end_offset, cleaned - begin, report.bytes_written, updated - cleaned, added)


def changed_keys(base: npt.NDArray[np.int64]) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Yield the keys of each change. ``base``: the keys of each segment."""
    count = base.size // CHANGED_SHARE
    any_keys = np.random.default_rng(7).choice(base.size, count, replace=False)
    yield "any keys", any_keys
    yield "the same keys again", any_keys
    yield "keys of one segment", base[len(base) // 2, :count]


def time_statements(house: House, statements: Sequence[str]) -> list[Executed]:
    """Run SQL statements in one Spark, and return how long each took."""
    return run_statements(house.folder / "catalog.db", house.warehouse, *statements, threads=2, heap_mb=3072)


def merge_statement(table: str, snapshot_id: int, first_offset: int, end_offset: int) -> str:
    source = f"SELECT key, value, offset FROM {OURS} VERSION AS OF {snapshot_id} WHERE offset >= {first_offset} AND offset < {end_offset}"
    return (
        f"MERGE INTO {table} t USING ({source}) s ON t.key = s.key WHEN MATCHED THEN UPDATE SET t.value = s.value, t.offset = s.offset "
        "WHEN NOT MATCHED THEN INSERT *"
    )


def create_statement(table: str, snapshot_id: int, end_offset: int) -> str:
    properties = "'write.merge.mode'='copy-on-write', 'write.parquet.compression-codec'='zstd'"
    rows = f"SELECT key, value, offset FROM {OURS} VERSION AS OF {snapshot_id} WHERE offset < {end_offset}"
    return f"CREATE TABLE {table} USING iceberg TBLPROPERTIES ({properties}) AS {rows}"


def merge_by_spark(house: House, changes: Sequence[Change]) -> list[tuple[Executed, int]]:
    """Return for each change what its merge took, and the bytes of the data files that it wrote."""
    first, later = changes[0], changes[1:]
    small = "compacted.bench.small"
    statements = ["CREATE NAMESPACE IF NOT EXISTS compacted.bench", create_statement(small, first.snapshot_id, first.end_offset // 20)]
    statements += [merge_statement(small, later[0].snapshot_id, later[0].first_offset, later[0].end_offset)] * 3  # compiles
    statements.append(create_statement(MERGED, first.snapshot_id, first.end_offset))
    merges = []
    for change in later:
        merges.append(len(statements))
        statements.append(merge_statement(MERGED, change.snapshot_id, change.first_offset, change.end_offset))
        statements.append(f"SELECT summary['added-files-size'] FROM {MERGED}.snapshots ORDER BY committed_at DESC LIMIT 1")
    statements.append(f"SELECT count(*) FROM (SELECT key, value FROM {OURS} EXCEPT SELECT key, value FROM {MERGED})")
    statements.append(f"SELECT count(*) FROM {MERGED}")
    timed = time_statements(house, statements)
    if (timed[-2].values, timed[-1].values) != (["0"], [str(first.end_offset)]):
        raise SystemExit(f"the tables differ in {timed[-2].values[0]} rows, {timed[-1].values[0]} were merged")
    return [(timed[number], int(timed[number + 1].values[0])) for number in merges]


def write_variant(house: House, name: str, *, is_sorted: bool) -> None:
    """Write the table's files again, otherwise than the product does, and make a table of them."""
    table = house.catalog().create_table(f"bench.{name}", SCHEMA, properties=PROPERTIES)
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        for number, task in enumerate(house.table().scan().plan_files()):
            rows = pq.read_table(task.file.file_path.removeprefix("file://"), partitioning=None)
            rows = rows.sort_by("key") if is_sorted else rows
            path = house.folder / "variants" / f"{name}-{number}.parquet"
            path.parent.mkdir(exist_ok=True)
            size = SORTED_GROUP if is_sorted else 1 << 30
            pq.write_table(rows, path, compression="zstd", write_page_index=True, row_group_size=size)
            append.append_data_file(parquet_file_to_data_file(table.io, table.metadata, path.as_uri()))


def lookup_keys(records: int) -> list[bytes]:
    return [b"key-%012d" % number for number in np.random.default_rng(3).choice(records, LOOKUPS, replace=False)]


def time_python(work: Callable[[], Any]) -> Executed:
    begin, used = time.perf_counter(), time.process_time()
    answer = work()
    return Executed(time.perf_counter() - begin, time.process_time() - used, [str(answer)])


def count_rows(table: Table, key: bytes) -> int:
    return len(table.scan(row_filter=EqualTo("key", value=key)).to_arrow())


def read_tables(house: House, records: int, tables: dict[str, str]) -> list[tuple[str, ...]]:
    """Return rows of figures: megabytes, a lookup by Spark and by pyiceberg, a scan by Spark.

    :param tables: names in the catalog by their labels.
    """
    keys, statements = lookup_keys(records), []
    for name in tables.values():
        statements += [f"SELECT length(value) FROM compacted.{name} WHERE key = X'{key.hex()}'" for key in (*keys[:2], *keys)]
        statements += [f"SELECT count(*) || ' ' || sum(length(value)) FROM compacted.{name}"] * 2
    timed = iter(time_statements(house, [*statements[: len(keys) + 4], *statements])[len(keys) + 4 :])  # the first table also warms up
    found: list[tuple[str, ...]] = []
    for label, name in tables.items():
        by_spark = [next(timed) for _ in range(2 + len(keys))][2:]
        scan = [next(timed) for _ in range(2)][1]
        table = house.catalog().load_table(name)
        by_python = [time_python(partial(count_rows, table, key)) for key in keys]
        found_keys = [one.values == ["1"] for one in by_python] + [len(one.values) == 1 for one in by_spark]
        if not all(found_keys) or scan.values[0] != str(records):
            raise SystemExit(f"{label}: {found_keys}, {scan.values}")
        size = sum(task.file.file_size_in_bytes for task in table.scan().plan_files())
        cells = [
            f"{statistics.median(1000 * getattr(one, what) for one in some):.0f}"
            for some in (by_spark, by_python)
            for what in ("seconds", "cpu")
        ]
        found.append((label, f"{size / 1e6:.0f}", *cells, f"{scan.seconds:.1f}", f"{scan.cpu:.1f}"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    records = args.records // (SEGMENTS * 10_000) * SEGMENTS * 10_000
    with tempfile.TemporaryDirectory(prefix="iceberg-", dir=args.dir) as scratch:
        folder = Path(scratch)
        base = np.random.default_rng(5).permutation(records).reshape(SEGMENTS, -1)
        end = write_log(folder / "log-0", base, value_bytes=args.value_bytes, has_random_values=True)
        house = House(folder, max(path.stat().st_size for path in (folder / "log-0").glob("*.log")) + 1000)
        changes = [house.change("first build", folder / "log-0", end)]
        for number, (name, keys) in enumerate(changed_keys(base), 1):
            log = folder / f"log-{number}"
            end = write_log(log, [keys], value_bytes=args.value_bytes, first_offset=end, has_random_values=True)
            changes.append(house.change(name, log, end))
        for change in changes:
            print(change, flush=True)
        merged = merge_by_spark(house, changes)
        count = records // CHANGED_SHARE
        rows = [
            (
                change.name, f"{change.table_bytes / count:,.0f}", f"{size / count:,.0f}", f"{size / change.table_bytes:,.1f}",
                f"{change.round_bytes / count:,.0f}", f"{change.table_cpu:.1f}", f"{merge.cpu:.1f}", f"{change.round_cpu:.1f}",
            )
            for change, (merge, size) in zip(changes[1:], merged, strict=True)
        ]  # fmt: skip
        for name, is_sorted in (("plain", False), ("sorted", True)):
            written = time_python(partial(write_variant, house, name, is_sorted=is_sorted))
            print(f"{name} files: {written.cpu:.1f} CPU s to read and write", flush=True)
        names = {
            "the table": "kafka.orders", "merged by Spark": "bench.merged", "without Bloom filters": "bench.plain",
            "without, sorted by key": "bench.sorted",
        }  # fmt: skip
        read = read_tables(house, records, names)
    print(f"load {os.getloadavg()[0]:.1f}")
    print("table, MB, ms and CPU ms of a lookup by Spark, ms and CPU ms of one by pyiceberg, seconds and CPU seconds of a scan by Spark")
    for line in read:
        print(line)
    columns = (
        "1 % of the keys change", "table, bytes a row", "`MERGE INTO`, bytes a row", "times the table's", "segments, bytes a row",
        "table, CPU s", "`MERGE INTO`, CPU s", "round, CPU s",
    )  # fmt: skip
    report_table(BenchmarkTable("iceberg", columns, rows, compared=columns[1:5]))


if __name__ == "__main__":
    main()
