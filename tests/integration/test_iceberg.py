"""Iceberg tables of topics: they hold the last values below the cleaner offset, whatever becomes of the tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from checkpoint.offsets import clean_end_offset
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.outputs.iceberg import IcebergOutput
from compactor.outputs.port import OutputReport
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli

ORDERS = TopicPartition("orders", 0)

Row = tuple[bytes, bytes, int]


class House:
    """A tier that is filled again and again, and the table of its topic in a SQL catalog."""

    def __init__(self, folder: Path, **publish: int) -> None:
        self.folder = folder
        self.log = LogBuilder()
        self.catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        self.warehouse = (folder / "warehouse").as_uri()
        settings = {"publish": {"grace_ms": 0, "undo_window_ms": 0} | publish, "cleaner": {"delete_retention_ms": 0}}
        self.cli = TierCli(folder / "own", settings)
        self.cli.set(**{"outputs.iceberg": {"warehouse": self.warehouse}, "outputs.iceberg.catalog": self.catalog})
        self.cli.set(**{'outputs.iceberg.topics."orders"': {}})

    def segment(self, *records: str) -> None:
        for record in records:
            self.log.put(record)
        self.log.roll()

    def bring(self) -> None:
        self.cli.bring(self.log.write(self.folder / "log", indexes=True, index_interval_bytes=100))

    def opened(self) -> Tier:
        return open_tier(load_settings(str(self.cli.config), {}))

    def update(self) -> OutputReport:
        opened = self.opened()
        opened.identity.read()
        return IcebergOutput().update_output(opened, ORDERS, Budget(1 << 30))

    def table(self) -> Table:
        catalog = load_catalog("compacted", **self.catalog, warehouse=self.warehouse)
        try:
            return catalog.load_table("kafka.orders")
        finally:
            catalog.close()

    def scan(self, snapshot_id: int | None = None) -> pa.Table:
        return self.table().scan(snapshot_id=snapshot_id).to_arrow()

    def rows(self, snapshot_id: int | None = None) -> list[Row]:
        found = self.scan(snapshot_id).to_pylist()
        return sorted((row["key"], row["value"], row["offset"]) for row in found)


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(tmp_path)
    made.segment("a=1", "b=1", "c=1")
    made.segment("a=2", "b=2")
    made.segment("d=1", "a=3", "e=1", "e=2")
    made.bring()
    return made


def test_a_table_holds_the_last_values_below_the_cleaner_offset(house: House) -> None:
    assert house.update().status == "empty"
    house.cli.run()
    report = house.update()
    assert report.status == "written", report
    print(report, house.rows(), house.table().current_snapshot())
    assert house.update().status == "up_to_date"
