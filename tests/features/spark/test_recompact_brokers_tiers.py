"""Full re-compaction of tiers that brokers write: executors know no broker, the driver introduces what they made and publishes it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest

from compactor.adapters.brokers.codec import decode_record
from compactor.adapters.brokers.view import LiveBrokerMetadata
from compactor.control.state import PartitionState
from compactor.features.spark import jobs as executor
from compactor.features.spark.jobs import JobListener, SparkCluster
from compactor.features.spark.recompaction import RecompactionListener, RecompactionResult, recompact_partitions
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord
from compactor.round.ports import Costs
from compactor.upkeep.export import export_partition
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import MemoryBrokers
from tests.support.spark_tier import HereCluster

NAMES = [TopicPartition("orders", number) for number in range(2)]


def told(brokers: MemoryBrokers) -> list[RemoteLogSegmentMetadataRecord]:
    """What this program introduced."""
    records = [decode_record(record.value) for log in brokers.log.logs for record in log if record is not None]
    return [one for one in records if isinstance(one, RemoteLogSegmentMetadataRecord) and one.broker_id == COMPACTOR_BROKER_ID]


@pytest.mark.parametrize("engine", ["auto", "spark"])
def test_whole_logs_are_compacted_again_as_jobs(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cleaner: dict[str, Any] = {"map_engine": engine, "segment_bytes": 16_384}
    brokers = MemoryBrokers(tmp_path / "brokers", {"cleaner": cleaner, "publish": {"grace_ms": 0}, "spark": {"partitions": 2}})
    brokers.topic("orders", {"segment.bytes": "1000000"})
    logs = {name: GrowingLog(*name, tmp_path, random.Random(name.partition)) for name in NAMES}
    for name, log in logs.items():
        brokers.tier(name, log.write_part(4))
    executor.open_tier_on_executor.cache_clear()
    opened = brokers.opened()
    monkeypatch.setattr(LiveBrokerMetadata, "refresh", driver_alone(LiveBrokerMetadata.refresh))
    for _ in range(2):  # what was compacted is compacted again
        finished = jobs(opened)
        assert [(one.error, one.report.status if one.report else "") for one in finished] == [(None, "cleaned")] * 2
        for name in NAMES:
            state = opened.open_partition_log(name).refresh()
            assert (len(state.live), end_of_clean(state)) == (
                2,
                state.live[-1].start_offset,
            )  # one group, as the topic has it, and the newest
            out = tmp_path / f"{name}-{state.slot}"
            export_partition(opened, name, out)
            assert logs[name].wrong_in(out, clean=False) == []
    assert len(told(brokers)) == 4
    assert len(brokers.readers) == 1


def jobs(opened: Any) -> list[RecompactionResult]:
    done: list[RecompactionResult] = []
    return recompact_partitions(
        opened, cast(SparkCluster, HereCluster()), NAMES, 10_000_000_000_000, Costs(), RecompactionListener(JobListener(), done.append)
    )


def end_of_clean(state: PartitionState) -> int:
    return state.first_dirty_offset


def driver_alone(refresh: Any) -> Any:
    """An executor has a broker's address, and must not use it."""

    def asked(self: LiveBrokerMetadata, **how: float | None) -> None:
        assert self.source_name == "the metadata topic of tests"
        refresh(self, **how)

    return asked
