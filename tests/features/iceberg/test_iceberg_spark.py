"""Spark with Iceberg's own runtime reads from a table what pyiceberg reads and what a plain consumer of the log is left with."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from compactor.errors import BadData, UsageError
from tests.features.iceberg.test_iceberg import House, house_for_a_life, live_through
from tests.support.iceberg_spark import read_by_spark

TABLE = "compacted.kafka.orders"
COLUMNS = "concat_ws('|', hex(key), hex(value), partition, offset, unix_millis(timestamp), array_join(transform(headers, h -> h.key), ','))"


def rows(house: House, snapshot_id: int | None = None) -> list[str]:
    """Return the rows that pyiceberg reads, as COLUMNS makes them. pyiceberg returns an empty list for absent headers, Spark null."""
    found = []
    for row in house.scan(snapshot_id).to_pylist():
        headers = [] if not row["headers"] else [",".join(header["key"] for header in row["headers"])]
        numbers = (row["partition"], row["offset"], round(row["timestamp"].timestamp() * 1000))
        found.append("|".join([row["key"].hex().upper(), row["value"].hex().upper(), *map(str, numbers), *headers]))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_reads_the_rows_that_pyiceberg_reads(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.segment("a=1", "b=1", "c=1")
    house.log.put("t=aborted", pid=7, txn=True)
    house.log.abort(7)
    house.log.put("t=committed", pid=7, txn=True, headers=[("name", b"x")])
    house.log.commit(7)
    house.segment("a=2", "b=")
    house.bring()
    house.cli.run()
    house.update()
    older = house.table().current_snapshot()
    assert older is not None
    house.segment("a=3", "c", "d=1")
    house.bring()
    house.cli.run()
    house.update()
    house.check()
    queries = (
        f"SELECT {COLUMNS} FROM {TABLE} ORDER BY 1",
        f"SELECT {COLUMNS} FROM {TABLE} VERSION AS OF {older.snapshot_id} ORDER BY 1",
        f"SELECT CAST(value AS STRING) FROM {TABLE} WHERE key = CAST('a' AS BINARY)",
        f"SELECT CAST(count(*) AS STRING) FROM {TABLE}.all_delete_files",
    )
    now, before, one, deletes = read_by_spark(tmp_path / "catalog.db", house.warehouse, *queries)
    assert now == rows(house)
    assert before == rows(house, older.snapshot_id)
    assert (one, deletes) == (["3"], ["0"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_reads_every_snapshot_of_a_random_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = house_for_a_life(tmp_path)
    views = live_through(house, random.Random(4), monkeypatch)
    assert len(views) > 3
    text = "concat_ws('|', hex(key), hex(value), offset)"
    queries = [f"SELECT {text} FROM {TABLE} VERSION AS OF {snapshot} ORDER BY key" for snapshot in views]
    found = read_by_spark(tmp_path / "catalog.db", house.warehouse, *queries)
    expected = [[f"{key.hex()}|{value.hex()}|{offset}".upper() for key, value, offset in rows] for rows in views.values()]
    assert found == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_maintenance_by_spark_works_on_or_stops_updates(tmp_path: Path) -> None:
    """What only tidies up works on. What rewrites rows stops updates with an error that names a file, until the table is rolled back."""
    house = House(tmp_path)
    house.segment("a=1", "b=1", "c=1")
    house.bring()
    house.cli.run()
    own: dict[str, int] = {}
    for name in ("tidied", "rewritten", "merged", "hidden", "vectors"):
        house.cli.set(**{'outputs.iceberg.topics."orders"': {"table": f"kafka.{name}"}})
        house.update()
    house.advance("a=2", "d=1")
    for name in ("rewritten", "merged", "hidden", "vectors", "tidied"):
        house.cli.set(**{'outputs.iceberg.topics."orders"': {"table": f"kafka.{name}"}})
        house.update()
        own[name] = house.table(f"kafka.{name}").metadata.current_snapshot_id or 0
    orphan = next((tmp_path / "warehouse").rglob("tidied/data/**/*.parquet")).with_name(f"0.1.0.1.{'A' * 22}.{'0' * 32}.parquet")
    orphan.touch()
    for path in (tmp_path / "warehouse").rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    read_by_spark(
        tmp_path / "catalog.db", house.warehouse,
        "CALL compacted.system.rewrite_manifests('kafka.tidied')",
        "CALL compacted.system.expire_snapshots(table => 'kafka.tidied', older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1)",
        "CALL compacted.system.remove_orphan_files(table => 'kafka.tidied')",
        "CALL compacted.system.rewrite_data_files(table => 'kafka.rewritten', options => map('rewrite-all', 'true'))",
        "MERGE INTO compacted.kafka.merged t USING (SELECT CAST('a' AS BINARY) AS k) s ON t.key = s.k "
        "WHEN MATCHED THEN UPDATE SET t.value = CAST('x' AS BINARY)",
        "ALTER TABLE compacted.kafka.hidden SET TBLPROPERTIES('write.delete.mode'='merge-on-read')",
        "ALTER TABLE compacted.kafka.vectors SET TBLPROPERTIES('write.delete.mode'='merge-on-read', 'format-version'='3')",
        *(f"DELETE FROM compacted.kafka.{name} WHERE key = CAST('a' AS BINARY)" for name in ("hidden", "vectors")),
    )  # fmt: skip
    assert not orphan.exists()
    assert house.table("kafka.tidied").metadata.current_snapshot_id != own["tidied"]
    files = {task.file.file_path for task in house.table("kafka.tidied").scan().plan_files()}
    house.update()  # which commits the entries of partitions again: they have expired with the snapshots
    assert {task.file.file_path for task in house.table("kafka.tidied").scan().plan_files()} == files
    assert house.update().status == "up_to_date"
    house.segment("b=2")
    house.bring()
    house.cli.run()
    assert house.update().status == "written"
    assert house.table("kafka.tidied").scan().to_arrow().num_rows == len(house.expected())
    house.cli.set(**{'outputs.iceberg.topics."orders"': {"table": "kafka.vectors"}})
    with pytest.raises(UsageError, match="format-version 3"):
        house.update()
    for name, said in {"rewritten": "not written by this", "merged": "not written by this", "hidden": "deleted in it by another"}.items():
        house.cli.set(**{'outputs.iceberg.topics."orders"': {"table": f"kafka.{name}"}})
        with pytest.raises(BadData, match=f"{said} program"):
            house.update()
        house.table(f"kafka.{name}").manage_snapshots().rollback_to_snapshot(own[name]).commit()
        assert house.update().status == "written"
        found = house.table(f"kafka.{name}").scan().to_arrow().to_pylist()
        assert sorted((row["key"], row["value"], row["offset"]) for row in found) == house.expected()
