"""Iceberg tables of what brokers wrote for real clients, with transactions: the last values that `latest` and a consumer see."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyiceberg.catalog import load_catalog

from checkpoint.offsets import first_dirty_offset_in
from compactor.model.ids import TopicPartition
from compactor.read.ranges import last_values
from tests.golden_cases import Round, cleaner_round, client_rounds, names
from tests.support.iceberg_spark import read_by_spark
from tests.support.tier_cli import TierCli, visible

ORDERS = TopicPartition("orders", 0)

REFUSED = {"negative-times"}


@pytest.mark.parametrize("name", [name for name in names("clients") if name not in REFUSED])
def test_a_table_holds_what_a_consumer_of_a_clients_log_is_left_with(name: str, client_cases: Path, tmp_path: Path) -> None:
    compare_table(client_rounds(client_cases / name, "keep", tmp_path)[0], tmp_path)


@pytest.mark.parametrize("name", [name for name in names("cleaner") if name.startswith(("txn", "gaps-1", "legacy-1", "logappend-2"))])
def test_a_table_holds_what_a_consumer_of_a_brokers_log_is_left_with(name: str, cleaner_cases: Path, tmp_path: Path) -> None:
    compare_table(cleaner_round(cleaner_cases / name, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_reads_what_a_consumer_is_left_with(cleaner_cases: Path, tmp_path: Path) -> None:
    expected, queries = [], []
    for name in (name for name in names("cleaner") if name.startswith("txn")):
        (tmp_path / name).mkdir()
        table = name.replace("-", "_")
        rows = compare_table(cleaner_round(cleaner_cases / name, tmp_path / name), tmp_path, table)
        expected.append([f"{offset}|{key.hex()}|{value.hex()}".upper() for offset, key, value in rows])
        queries.append(f"SELECT concat_ws('|', offset, hex(key), hex(value)) FROM compacted.kafka.{table} ORDER BY offset")
    assert all(expected)
    assert read_by_spark(tmp_path / "catalog.db", (tmp_path / "warehouse").as_uri(), *queries) == expected


def compare_table(case: Round, folder: Path, table: str = "orders") -> list[tuple[int, bytes, bytes]]:
    """Import a log, run a round, and compare the table with two readers of other kinds. Return its offsets, keys and values."""
    properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": (folder / "warehouse").as_uri()}
    topic = {"table": f"kafka.{table}"}
    cleaner = {"keyless_records": "drop"}  # as Kafka does
    outputs = {"outputs.iceberg.catalog": properties, "outputs.iceberg.topics.orders": topic}
    cli = TierCli(folder / f"own-{table}", {"cleaner": cleaner, **outputs})
    cli.bring(case.log_dir)
    assert cli.run("--now", case.params["now"])["status"] == "cleaned"
    assert cli.do("outputs", "write")["partitions"][0]["status"] == "written"
    catalog = load_catalog("compacted", **properties)
    found = catalog.load_table(f"kafka.{table}").scan(selected_fields=("key", "value", "offset")).to_arrow().to_pylist()
    catalog.close()
    rows = sorted((row["offset"], row["key"], row["value"]) for row in found)

    opened = cli.open()
    end = first_dirty_offset_in(opened.open_partition_log(ORDERS).refresh().vector)
    consumed: dict[bytes, tuple[int, bytes | None]] = {}
    for offset, _, key, value, _ in visible(case.log_dir):
        if key is not None and offset < end:
            consumed[key] = (offset, value)
    assert rows == sorted((offset, key, value) for key, (offset, value) in consumed.items() if value is not None)

    view = last_values(opened, ORDERS, last_offset=end - 1)
    read = [row for batch in view.arrow("key", "value", "offset") for row in batch.to_pylist()]
    assert rows == sorted((row["offset"], row["key"], row["value"]) for row in read)
    return rows
