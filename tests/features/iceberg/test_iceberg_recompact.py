"""Tables whose data files are written by Spark's executors hold the rows of tables that one process has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

import compactor.spark
from compactor.access.tier import Tier
from compactor.errors import BadData
from compactor.features.iceberg import output as iceberg
from compactor.features.iceberg.columns import DataFileWriteTask, write_slice_file
from compactor.features.iceberg.output import IcebergOutput
from compactor.features.iceberg.plan import ViewSlice
from compactor.features.iceberg.table import TopicTable
from compactor.features.spark import table_files
from compactor.features.spark.jobs import JobListener, SparkCluster
from compactor.features.spark.session import start_cluster
from compactor.features.spark.table_files import SparkTaskDataFileWriter
from compactor.local.budget import DiskBudget
from compactor.outputs import OutputReport
from compactor.read.reading import LogChanged
from compactor.round.ports import Costs
from tests.builders import LogBuilder
from tests.features.iceberg.test_iceberg import ORDERS, House, show_view_below
from tests.support.spark_tier import HereCluster, session_of


def update_on_cluster(house: House, cluster: Any) -> OutputReport:
    opened = house.opened()
    opened.identity.read_catalog()
    writer = SparkTaskDataFileWriter(cast(SparkCluster, cluster), Costs(), JobListener())
    return IcebergOutput(writer).update_output(opened, opened.latest_incarnation(ORDERS), DiskBudget(1 << 30))


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(tmp_path)
    made.cli.set(cleaner={"segment_bytes": 2000, "keyless_records": "drop"})
    for number in range(4):
        made.segment(*(f"k{key}=value {number} {key}" for key in range(number * 10, 60)), f"gone{number}=1", f"gone{number}=", "=no key")
    made.bring()
    made.cli.run()
    return made


def test_executors_write_the_rows_that_one_process_writes(house: House) -> None:
    assert update_on_cluster(house, HereCluster()).status == "written"
    house.check()
    assert len(house.files()) > 1
    assert house.entry().checked == 1.0
    house.cli.set(**{'outputs.iceberg.topics."orders"': {"table": "kafka.beside"}})
    house.update()
    by_one_process = house.table("kafka.beside").scan().to_arrow()
    assert house.scan().sort_by("offset") == by_one_process.sort_by("offset")
    house.cli.set(**{'outputs.iceberg.topics."orders"': {"table": "kafka.orders"}})
    house.segment("k5=changed", "gone0=again")
    house.bring()
    house.cli.run()
    before = house.files()
    assert update_on_cluster(house, HereCluster()).status == "written"
    house.check()
    assert house.files() & before, "only files of replaced segments are written"


@pytest.mark.parametrize("is_first", [True, False])
def test_executors_refuse_a_key_that_occurs_twice(house: House, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the written files, and between those and the files that stay."""
    if not is_first:
        update_on_cluster(house, HereCluster())
    house.segment("k59=of a later segment")
    house.bring()
    show_view_below(monkeypatch, house.log.next_offset)
    with pytest.raises(BadData, match="occurs twice"):
        update_on_cluster(house, HereCluster())
    assert (house.table().current_snapshot() is None) == is_first


def test_an_error_of_one_executor_keeps_the_files_of_the_others(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log changes once while the last file is written. All other files are used by the next attempt."""
    written: list[ViewSlice] = []

    def write_or_fail(opened: Tier, table: TopicTable, task: DataFileWriteTask, on_records: Any) -> Any:
        written.append(task.file.slice)
        if task.extent.last == house.log.next_offset - 1 and written.count(task.file.slice) == 1:
            raise LogChanged(task.extent, 3)
        return write_slice_file(opened, table, task, on_records)

    monkeypatch.setattr(table_files, "write_slice_file", write_or_fail)
    update_on_cluster(house, HereCluster())
    house.check()
    assert len(written) == len(set(written)) + 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("spark")
def test_recompact_builds_a_table_on_executors(house: House, tmp_path: Path) -> None:
    other = LogBuilder()
    other.put(*(f"k{key}=of the other partition" for key in range(40)))
    other.roll()
    other.put("last=1")
    other.roll()
    house.cli.do("import", other.write(tmp_path / "other"), "--topic", "orders", "--partition", 1)
    house.cli.set(spark={"master": "local[2]"})
    document = house.cli.do("recompact", "--force")
    assert [(row["partition"], row["table"]) for row in document["partitions"]] == [(0, "written"), (1, "written")]
    house.compare_with_latest()
    rows = house.scan().to_pylist()
    assert {row["partition"] for row in rows} == {0, 1}
    assert len([row for row in rows if row["partition"] == 1]) == 41
    house.cli.set(cleaner={"delete_retention_ms": 0})
    with start_cluster(house.opened().settings) as started:
        frame = compactor.spark.recompact(session_of(started.cluster), str(house.cli.config), topics="orders")
        assert [row["table"] for row in frame.collect()] == ["up_to_date"] * 2
    assert iceberg.read_table_status(house.opened(), ORDERS).status == "current"  # type: ignore[union-attr]
