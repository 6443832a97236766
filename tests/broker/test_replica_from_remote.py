"""A broker with an empty disk builds a replica from remote storage: from compacted segments the same as from the brokers' own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkpoint.files import parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord
from compactor.records.producers import parse_producer_snapshot_file
from tests.broker.test_compaction import BrokerTierCli, assert_compacted, cli
from tests.broker.test_elections import leaves, readable_segments
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory

__all__ = ["cli"]
TOPIC = "rebuilt"
LOCAL_BYTES = 70_000
"""Some four segments, so that the segment before the leader's local log start is not the newest tiered one, and may be compacted."""


Producers = list[tuple[object, ...]]
"""Entries of a producer snapshot."""


@dataclass(frozen=True)
class Built:
    """What a replica has after it was built.

    local_start: the first offset of its local log.
    epochs: its leader-epoch-checkpoint.
    producers: its snapshot at ``local_start``. Kafka fetches the snapshot from remote storage, and then deletes the file, because an empty
        one with the same name was registered before (ProducerStateManager.truncateFullyAndReloadSnapshots): the list is empty.
    """

    local_start: int
    epochs: tuple[EpochEntry, ...]
    producers: Producers


def rebuild(cluster: KafkaCluster, node: int) -> Built:
    """Start the broker with an empty disk and wait until it is in sync."""
    with ClusterAdmin(cluster) as admin:
        wait_until(lambda: len(admin.leadership(TOPIC).in_sync) == 2, "both replicas to be in sync")
    process = cluster.nodes[node]
    process.stop()
    process.empty_disk()
    process.launch()
    process.wait_started()
    with ClusterAdmin(cluster) as admin:
        wait_until(lambda: len(admin.leadership(TOPIC).in_sync) == 2, "the empty broker to be in sync")
    folder = process.log_dir / f"{TOPIC}-0"
    start = min(int(path.stem) for path in folder.glob("*.log"))
    return Built(start, epochs_of(cluster, node), snapshot_of(cluster, node, start))


def epochs_of(cluster: KafkaCluster, node: int) -> tuple[EpochEntry, ...]:
    path = cluster.nodes[node].log_dir / f"{TOPIC}-0" / "leader-epoch-checkpoint"
    return parse_leader_epoch_checkpoint(path.read_text())


def snapshot_of(cluster: KafkaCluster, node: int, offset: int) -> Producers:
    return producers_in(cluster.nodes[node].log_dir / f"{TOPIC}-0" / f"{offset:020}.snapshot")


def producers_in(path: Path) -> Producers:
    return [tuple(entry) for entry in parse_producer_snapshot_file(path.read_bytes(), path.name).entries.tolist()]


def segment_before(cluster: KafkaCluster, offset: int) -> RemoteLogSegmentMetadataRecord:
    """Return the readable segment that ends just before ``offset``: the one from which a replica is built that begins there."""
    [found] = [one for one in readable_segments(cluster, TOPIC) if one.end_offset == offset - 1]
    return found


def remote_snapshot(cluster: KafkaCluster, segment: RemoteLogSegmentMetadataRecord) -> Producers:
    """Return the producer snapshot that the tier has of a segment, taken at the segment's end."""
    [path] = cluster.tier.glob(f"{TOPIC}-0-*/*-{segment.id}.snapshot")
    return producers_in(path)


@pytest.mark.slow_broker
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("version", "settings"),
    [("4.4.0", {}), ("4.4.0", {"follower.fetch.last.tiered.offset.enable": "true"}), ("3.9.2", {})],
    ids=["newest", "newest, KIP-1023", "oldest"],
)
def test_a_replica_built_from_compacted_segments_equals_one_built_from_the_brokers_own(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], version: str, settings: dict[str, str]
) -> None:
    with new_cluster(version, brokers=2, settings=settings) as cluster:
        with ClusterAdmin(cluster) as admin:
            now_ms = int(time.time() * 1000)  # brokers forget producers of long ago
            story = TopicStory(cluster, admin, TOPIC, first_ms=now_ms).create({"local.retention.bytes": str(LOCAL_BYTES)})
            story.tell(2, calm=False)
            if admin.leadership(TOPIC).leader != 1:
                admin.move_leader(TOPIC, 0, 1)
                story.plain()
            wait_until(lambda: admin.offsets(TOPIC).latest_tiered == admin.active_base(TOPIC) - 1, "the topic to be tiered")
            log_start = admin.offsets(TOPIC).earliest
        plain = rebuild(cluster, 2)
        ours = cli(cluster, TOPIC, cleaner={"segment_bytes": 40_000})
        [done] = ours.process("run")["partitions"]
        assert done["status"] == "cleaned", done
        assert ours.process("retire")["deleted"]
        built = rebuild(cluster, 2)
        takes_newest = bool(settings)  # KIP-1023: the newest tiered segment, which stays the brokers' own (R8)
        source = segment_before(cluster, built.local_start)
        assert (source.broker_id == COMPACTOR_BROKER_ID) != takes_newest
        assert built.epochs == plain.epochs == epochs_of(cluster, 1)
        assert built.producers == plain.producers
        assert remote_snapshot(cluster, source) == snapshot_of(cluster, 1, built.local_start) != []
        with ClusterAdmin(cluster) as admin:
            story.admin = admin
            admin.move_leader(TOPIC, 0, 2)
            assert admin.offsets(TOPIC).earliest == log_start
            clean_below = min(built.local_start, done["next_dirty_offset"])  # what is local is read as it was written
            assert_compacted(cluster, TOPIC, story.partitions[0], clean_below)
            story.forget_writers()  # without producer state the new leader may refuse the sequence numbers of earlier producers
            story.tell()
            leaves(admin, TOPIC)
        assert_compacted(cluster, TOPIC, story.partitions[0], done["next_dirty_offset"])
