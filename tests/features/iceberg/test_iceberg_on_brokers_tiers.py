"""A table of a topic on a broker-managed tier: it follows rounds and the log start, and waits while its view is incomplete."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

from checkpoint.offsets import first_dirty_offset_in
from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.control.state import RoundStage
from compactor.errors import CompactorError, Unavailable
from compactor.features.iceberg.output import IcebergOutput, read_table_status
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import RemoteLogSegmentMetadataUpdateRecord, TopicIdPartition, uuid_bytes
from compactor.model.segment import SegmentState
from compactor.read.ranges import last_values
from compactor.upkeep.orphans import undo_by_copies
from tests.integration.test_undo_on_brokers_tiers import after
from tests.simulation.memory_topic import MemoryMetadataTopic
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import BROKER, MemoryBrokers

NAME = TopicPartition("orders", 0)


class BrokersTable:
    """A topic that brokers tier, and its table."""

    def __init__(self, folder: Path) -> None:
        self.catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": (folder / "warehouse").as_uri()}
        settings: dict[str, dict[str, Any]] = {
            "cleaner": {"min_cleanable_dirty_ratio": 0.0, "segment_bytes": 4_096},
            "publish": {"grace_ms": 0},
            "lease": {"ttl_ms": 300},
            "outputs.iceberg.catalog": self.catalog,
            "outputs.iceberg.topics.orders": {},
        }
        self.brokers = MemoryBrokers(folder / "brokers", settings)
        self.brokers.topic("orders")
        self.log = GrowingLog(*NAME, folder, random.Random(0))

    def write(self) -> None:
        self.brokers.tier(NAME, self.log.write_part(4))

    def clean(self, **options: Any) -> None:
        compact(self.brokers.opened(), NAME, int(time.time() * 1000), **options)

    @staticmethod
    def undo(opened: Tier, run_id: str) -> None:
        undo_by_copies(opened, opened.open_partition_log(NAME, caller_runs_round=True), run_id)

    def delete_segment(self, segment_id: str) -> None:
        """Brokers delete a segment."""
        where = TopicIdPartition(self.brokers.cluster.known[NAME.topic].topic_id, *NAME)
        for state in (SegmentState.DELETE_SEGMENT_STARTED, SegmentState.DELETE_SEGMENT_FINISHED):
            self.brokers.write(RemoteLogSegmentMetadataUpdateRecord(where, uuid_bytes(segment_id), BROKER, 6, state))

    def update(self) -> str:
        return IcebergOutput().update_output(self.brokers.opened(), NAME, DiskBudget(1 << 30)).status

    def rows(self) -> list[dict[str, Any]]:
        opened = load_catalog("compacted", **self.catalog)
        rows = opened.load_table("kafka.orders").scan(selected_fields=("key", "value", "offset")).to_arrow().to_pylist()
        opened.close()
        return sorted(rows, key=lambda row: row["offset"])

    def check(self) -> int:
        """Compare the table with the last values below the cleaner offset; return how many there are."""
        opened = self.brokers.opened()
        state = opened.open_partition_log(NAME).refresh()
        view = last_values(opened, NAME, last_offset=first_dirty_offset_in(state.vector) - 1)
        found = [row for batch in view.arrow("key", "value", "offset") for row in batch.to_pylist()]
        rows = self.rows()
        assert rows == sorted(found, key=lambda row: row["offset"])
        return len(rows)

    def check_waiting(self, rows: list[dict[str, Any]]) -> None:
        """The table stays at its snapshot and is shown as waiting, until a round completes."""
        assert self.update() == "behind"
        status = read_table_status(self.brokers.opened(), NAME)
        assert status is not None
        assert (status.status, status.snapshots, status.lag_ms > 0) == ("waiting", 1, True)
        assert self.rows() == rows
        self.write()
        self.clean()
        assert self.update() == "written"
        assert self.check() > 0
        assert self.rows() != rows


@pytest.fixture
def table(tmp_path: Path) -> BrokersTable:
    return BrokersTable(tmp_path)


def test_a_table_of_a_broker_managed_topic_holds_the_last_values(table: BrokersTable) -> None:
    size = 0
    for _ in range(3):
        table.write()
        table.clean()
        assert table.update() == "written"
        size = table.check()
    live = table.brokers.opened().open_partition_log(NAME).refresh().live
    table.brokers.expire(NAME, live[len(live) // 2].end_offset + 1)
    assert table.update() == "written"
    assert table.check() < size


def test_a_table_waits_after_a_round_that_brokers_cut_off(table: BrokersTable) -> None:
    table.write()
    table.clean()
    assert table.update() == "written"
    rows = table.rows()
    table.write()

    def delete_source(stage: RoundStage, plan: Any) -> None:
        if stage is RoundStage.PUBLISH_BEGUN:
            table.brokers.expire(NAME, plan.tasks[0].end_offset + 1, rises=False)

    table.clean(on_stage=delete_source)
    table.check_waiting(rows)


def test_a_table_waits_after_a_round_that_was_undone_in_part(table: BrokersTable) -> None:
    table.write()
    table.clean()
    assert table.update() == "written"
    rows = table.rows()
    table.write()
    table.clean()
    state = table.brokers.opened().open_partition_log(NAME).refresh()
    made = [segment.id for segment in state.live if segment.id in state.published_by]
    dying = MemoryMetadataTopic(table.brokers.log, fate=after(len(made)))
    with pytest.raises(Unavailable):
        table.undo(table.brokers.opened(appending=dying), state.published[-1])
    table.delete_segment(made[0])
    with pytest.raises(CompactorError, match="undone in part"):
        table.undo(table.brokers.opened(), state.published[-1])
    table.check_waiting(rows)
