"""A cluster that changes while this program works: nothing is recorded or deleted under brokers that look elsewhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from checkpoint.lineage import EpochEntry
from compactor.access.rounds import compact
from compactor.adapters.brokers.cluster import ClusterProblem, UnsuitableCluster
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.kafka_client import NoSuchTopic
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import Refused
from compactor.model.ids import TopicPartition
from compactor.tier.ports import AnnouncedSegment
from compactor.upkeep.orphans import find_orphans, purge_orphans
from compactor.upkeep.retire import retire_partition
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import MemoryBrokers

NAME = TopicPartition("orders", 0)
NOW = 10_000_000_000_000
ELSEWHERE = ClusterProblem("metadata-manager", "broker 1 keeps its metadata by x.Other", "Go back")


@pytest.fixture
def brokers(tmp_path: Path) -> MemoryBrokers:
    """One partition that was compacted once; what was replaced may be deleted."""
    made = MemoryBrokers(
        tmp_path / "brokers",
        {
            "cleaner": {"segment_bytes": 12_000, "min_cleanable_dirty_ratio": 0.0},
            "publish": {"grace_ms": 0, "orphan_age_ms": 0},
            "lease": {"ttl_ms": 300},
        },
    )
    made.topic("orders")
    made.tier(NAME, GrowingLog(*NAME, tmp_path, random.Random(4)).write_part(8))
    assert compact(made.opened(), NAME, NOW).status == "cleaned"
    return made


def objects_and_record_counts(brokers: MemoryBrokers) -> tuple[set[Path], list[int]]:
    return {path for path in (brokers.folder / "objects").rglob("*") if path.is_file()}, [len(one) for one in brokers.log.logs]


def test_replaced_segments_and_orphans_stay_once_brokers_keep_their_metadata_elsewhere(brokers: MemoryBrokers) -> None:
    tier = brokers.opened()
    log = tier.open_partition_log(NAME, caller_runs_round=True)
    kept = next(path for path in (brokers.folder / "objects").rglob("*.log"))
    orphan = kept.with_name(kept.name.replace(kept.name[21:43], "AAAAAAAAAAAAAAAAAAAAAQ"))
    orphan.write_bytes(b"x")
    found = find_orphans(tier, [NAME])
    assert [one.bytes for one in found.orphans] == [1]
    brokers.cluster.problem = ELSEWHERE
    before = objects_and_record_counts(brokers)
    with pytest.raises(UnsuitableCluster, match=r"broker 1 keeps its metadata by x\.Other"):
        retire_partition(tier.ports, log, tier.lease, tier.retention)
    with pytest.raises(UnsuitableCluster, match=r"nothing is deleted under these brokers: broker 1 keeps its metadata by x\.Other"):
        purge_orphans(tier, found, tier.ports.data)
    assert [one.bytes for one in purge_orphans(tier, found, tier.ports.data, dry_run=True).deleted] == [1]
    dead = AnnouncedSegment("AAAAAAAAAAAAAAAAAAAAAg", 0, 9, (EpochEntry(LeaderEpoch(0), Offset(0)),), -1)
    with pytest.raises(UnsuitableCluster):
        tier.ports.publisher.withdraw_segments(NAME, [dead], include_unannounced=True)
    assert objects_and_record_counts(brokers) == before
    brokers.cluster.problem = None
    tier.broker_metadata.refresh(max_age_s=0.0)
    assert retire_partition(tier.ports, log, tier.lease, tier.retention).deleted
    assert [one.bytes for one in purge_orphans(brokers.opened(), found, tier.ports.data).deleted] == [1]


def test_a_missing_metadata_topic_names_the_other_metadata_manager(brokers: MemoryBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_topic(*_: object, **__: object) -> None:
        raise NoSuchTopic("__remote_log_metadata: the topic or partition does not exist", hint="Check the name")

    monkeypatch.setattr(FoldingMetadataTopicReader, "fold_to_end", no_topic)
    tier = brokers.opened()
    with pytest.raises(Refused, match="the topic or partition does not exist. Check the name"):
        tier.list_partitions()
    brokers.cluster.problem = ELSEWHERE
    with pytest.raises(Refused, match=r"broker 1 keeps its metadata by x\.Other\. Go back"):
        tier.list_partitions()


def test_a_new_segment_that_is_not_at_the_configured_place_stops_rounds_before_their_first_record(
    brokers: MemoryBrokers, tmp_path: Path
) -> None:
    """As if the plug-in's prefix, layout or encryption had changed."""
    known = objects_and_record_counts(brokers)[0]
    log = GrowingLog(*NAME, tmp_path / "more", random.Random(4))
    log.write_part(8)
    brokers.tier(NAME, log.write_part(3))
    [*new] = objects_and_record_counts(brokers)[0] - known
    elsewhere = [path.rename(path.with_name(f"{path.name}.away")) for path in new]
    records = objects_and_record_counts(brokers)[1]
    done = compact(brokers.opened(), NAME, NOW)
    assert done.status == "quarantined"
    assert objects_and_record_counts(brokers)[1] == records
    for path in elsewhere:
        path.rename(path.with_name(path.name.removesuffix(".away")))
    assert compact(brokers.opened(), NAME, NOW).status == "cleaned"
