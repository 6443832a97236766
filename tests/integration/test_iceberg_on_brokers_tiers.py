"""A table of a topic on a broker-managed tier: it follows rounds, and the log start that brokers raise."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from pyiceberg.catalog import load_catalog

from checkpoint.offsets import clean_end_offset
from compactor.access.rounds import compact
from compactor.consumer.last_values import latest
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.outputs.iceberg import IcebergOutput
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import MemoryBrokers

NAME = TopicPartition("orders", 0)


def test_a_table_of_a_broker_managed_topic_holds_the_last_values(tmp_path: Path) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": (tmp_path / "warehouse").as_uri()}
    settings: dict[str, dict[str, Any]] = {
        "cleaner": {"min_cleanable_dirty_ratio": 0.0, "segment_bytes": 4_096},
        "outputs.iceberg.catalog": catalog,
        "outputs.iceberg.topics.orders": {},
    }
    brokers = MemoryBrokers(tmp_path / "brokers", settings)
    brokers.topic("orders")
    log = GrowingLog(*NAME, tmp_path, random.Random(0))

    def table_matches() -> int:
        """Compare the table with the last values below the cleaner offset; return how many there are."""
        opened = brokers.opened()
        state = opened.open(NAME).refresh()
        view = latest(opened, NAME, last=clean_end_offset(state.vector) - 1)
        found = [row for batch in view.arrow("key", "value", "offset") for row in batch.to_pylist()]
        opened_catalog = load_catalog("compacted", **catalog)
        rows = opened_catalog.load_table("kafka.orders").scan(selected_fields=("key", "value", "offset")).to_arrow().to_pylist()
        opened_catalog.close()
        assert sorted(rows, key=lambda row: row["offset"]) == sorted(found, key=lambda row: row["offset"])
        return len(rows)

    sizes = []
    for _ in range(3):
        brokers.tier(NAME, log.write_part(4))
        compact(brokers.opened(), NAME, int(time.time() * 1000))
        assert IcebergOutput().update_output(brokers.opened(), NAME, Budget(1 << 30)).status == "written"
        sizes.append(table_matches())
    live = brokers.opened().open(NAME).refresh().live
    brokers.expire(NAME, live[len(live) // 2].end_offset + 1)
    assert IcebergOutput().update_output(brokers.opened(), NAME, Budget(1 << 30)).status == "written"
    assert table_matches() < sizes[-1]
