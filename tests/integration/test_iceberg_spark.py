"""Spark with Iceberg's own runtime reads from a table what pyiceberg reads and what a plain consumer of the log is left with.

The Spark is the newest that Iceberg supports, 4.1, fetched by Maven; the one that is installed may be newer.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.test_iceberg import House
from tests.support.kafka_jars import BrokerUnavailable, maven_jars

FOLDER = Path(__file__).parents[1] / "iceberg"
OPENED = ("lang", "lang.invoke", "lang.reflect", "io", "net", "nio", "util", "util.concurrent", "util.concurrent.atomic")
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
    try:
        jars = maven_jars("iceberg-1.12.0", FOLDER / "pom.xml")
    except BrokerUnavailable as error:
        pytest.skip(str(error))
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
    table = "compacted.kafka.orders"
    queries = (
        f"SELECT {COLUMNS} FROM {table} ORDER BY 1",
        f"SELECT {COLUMNS} FROM {table} VERSION AS OF {older.snapshot_id} ORDER BY 1",
        f"SELECT CAST(value AS STRING) FROM {table} WHERE key = CAST('a' AS BINARY)",
        f"SELECT CAST(count(*) AS STRING) FROM {table}.all_delete_files",
    )
    flags = [part for name in OPENED for part in ("--add-opens", f"java.base/java.{name}=ALL-UNNAMED")]
    flags += ["--add-opens", "java.base/sun.nio.ch=ALL-UNNAMED"]
    command = jars.command(str(FOLDER / "ReadTable.java"), *flags, heap_mb=768)
    asked = [*command, f"jdbc:sqlite:{tmp_path}/catalog.db", house.warehouse, *queries]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    now, before, one, deletes = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("rows"))
    assert now == rows(house)
    assert before == rows(house, older.snapshot_id)
    assert (one, deletes) == (["3"], ["0"])
