"""What looking for work costs on a tier that brokers write: 1,000 partitions over one reader of the metadata topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from compactor.access.metadata import BrokerManagedTierMetadataSource
from compactor.access.tier import Tier
from compactor.adapters.brokers.cache import FoldedMetadataStore, FoldedPartitionMetadata
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.view import LiveBrokerMetadata, TopicStatus
from compactor.config.settings import CleanerSettings, DaemonSettings, Settings, TierSettings
from compactor.control.logs import open_catalog
from compactor.daemon.daemon import Daemon
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import TopicIdPartition
from compactor.storage.wrappers import RequestCounters, StoreUsage
from tests.metadata_events import finished
from tests.simulation.memory_topic import MemoryMetadataTopic, MemoryTopicLog
from tests.support.broker_metadata import MemoryCluster
from tests.support.kafka_publishing import TOPIC_ID, KeptNowhere
from tests.support.memory_brokers import RIGHT
from tests.support.memory_store import Clock, MemoryStore, ports_on

PARTITIONS = 1_000
INTERVAL = 15_000


class Brokers:
    """A tier of which nothing is due: ``min_cleanable_dirty_ratio`` is 1."""

    def __init__(self, folder: Path) -> None:
        self.clock, self.counters = Clock(), RequestCounters()
        self.log = MemoryTopicLog()
        self.reader = MemoryMetadataTopic(self.log)
        self.kept = FoldedMetadataStore(KeptNowhere())
        cluster = MemoryCluster({"orders": TopicStatus(TOPIC_ID, settings=RIGHT)})
        brokers = LiveBrokerMetadata(
            FoldingMetadataTopicReader(self.reader, self.kept, clock_ms=lambda: 0), cluster, ("orders",), "the metadata topic of tests"
        )
        metadata = BrokerManagedTierMetadataSource(brokers)
        ports = ports_on(MemoryStore(self.clock, self.counters), self.clock)
        ports = replace(ports, brokers=metadata.broker_view)
        settings = Settings(
            tier=TierSettings(kind="kafka", layout="kafka-local", url="file:///nowhere", state_dir=str(folder / "state")),
            cleaner=CleanerSettings(min_cleanable_dirty_ratio=1.0, disk_budget_bytes=1 << 20),
            daemon=DaemonSettings(interval_ms=INTERVAL),
        )
        self.tier = Tier(settings, ports, open_catalog(ports), self.counters, metadata=metadata)
        for number in range(PARTITIONS):
            self.grow(number, 0)
        self.tier.identity.read_or_create_catalog()

    def grow(self, partition: int, start: int) -> None:
        where = TopicIdPartition(TOPIC_ID, "orders", partition)
        self.log.write([each._replace(partition=where) for each in finished(partition * 100 + start, start, start + 9)])

    def pass_time(self, daemon: Daemon, scans: int) -> StoreUsage:
        before = self.counters.usage()
        for _ in range(scans):
            self.clock.now_ms += INTERVAL
            daemon.scan()
            assert daemon.start_due_jobs() == []
        return self.counters.usage().usage_since(before)


def test_an_idle_tier_costs_its_metadata_topics_ends_and_looks_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Brokers(tmp_path)
    daemon = Daemon(world.tier, seed=1)
    daemon.scan()
    assert daemon.status().ready
    assert len(daemon.status().schedules) == PARTITIONS
    loads: list[Sequence[TopicIdPartition]] = []
    load = world.kept.load_folded_partitions

    def counted(number: int, names: Sequence[TopicIdPartition]) -> list[FoldedPartitionMetadata | None]:
        loads.append(names)
        return load(number, names)

    monkeypatch.setattr(world.kept, "load_folded_partitions", counted)
    polls = world.reader.polls
    usage = world.pass_time(daemon, 24)  # a tenth of an hour
    assert set(usage.requests) == {"get"}
    assert usage.total_requests < 500
    assert world.reader.polls == polls  # there is nothing new in the topic, so nothing is read
    looked = len(loads)
    assert looked < 200  # of a partition that is looked at once in a while

    world.grow(7, 10)
    usage = world.pass_time(daemon, 1)
    [grown] = [schedule for schedule in daemon.status().schedules if schedule.partition == TopicPartition("orders", 7)]
    assert grown.due is not None
    assert grown.due.summary.end_offset == 19
    assert world.reader.polls == polls + 1
    assert len(loads) - looked < 30
    assert usage.total_requests < 40
