"""`doctor` and `config check` on live brokers, with each fault made on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from checkpoint.lineage import EpochEntry
from compactor.brokers.metadata_topic.codec import encode_record
from compactor.brokers.metadata_topic.confluent_topic import ConfluentMetadataTopic
from compactor.brokers.metadata_topic.connection import KafkaConnection
from compactor.brokers.metadata_topic.follow import metadata_partition
from compactor.model.segment import SegmentState
from compactor.upkeep.brokers.doctor import SLACK_MS
from tests.broker.test_compaction import BrokerTierCli, cli
from tests.broker.test_elections import readable_segments
from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory

__all__ = ["cli"]
TOPIC = "ailing"


def write_copy_that_hangs(cluster: KafkaCluster) -> None:
    """Write a COPY_SEGMENT_STARTED record of a broker for offsets after the tier's end, begun long ago."""
    newest = max(readable_segments(cluster, TOPIC), key=lambda one: one.end_offset)
    begun_ms = int(time.time() * 1000) - SLACK_MS - 60_000
    hangs = newest._replace(
        segment_id=bytes(15) + b"x",
        start_offset=newest.end_offset + 1,
        end_offset=newest.end_offset + 9,
        leader_epochs=(EpochEntry(newest.leader_epochs[-1].epoch, newest.end_offset + 1),),
        event_timestamp_ms=begun_ms,
        state=SegmentState.COPY_SEGMENT_STARTED,
    )
    topic = ConfluentMetadataTopic(KafkaConnection(cluster.bootstrap))
    try:
        topic.append(metadata_partition(hangs.partition.topic_id, 0, topic.identity().partitions), encode_record(hangs))
    finally:
        topic.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("version", "by_version"), [("3.9.2", {"size-retention"}), ("4.4.0", {"copy-lag", "last-tiered"})], ids=["oldest", "newest"]
)
def test_doctor_finds_each_fault_that_was_made_and_nothing_before(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], version: str, by_version: set[str]
) -> None:
    is_newest = version.startswith("4")
    settings = {"follower.fetch.last.tiered.offset.enable": "true"} if is_newest else {}
    with new_cluster(version, settings=settings) as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, TOPIC, first_ms=int(time.time() * 1000)).create().tell()
        story.tiered()
        ours = cli(cluster, TOPIC, publish={"orphan_age_ms": 0})
        healthy = ours.process("doctor", "--fail-on", "error")
        assert {(one["severity"], one["kind"]) for one in healthy["problems"]} == ({("note", "last-tiered")} if is_newest else set())
        lag = {"remote.copy.lag.ms": "60000"} if is_newest else {}
        admin.set_config(TOPIC, {"retention.bytes": "1000000000", "local.retention.ms": "3600000", **lag})
        assert by_version <= {one["kind"] for one in ours.process("config", "check")["problems"]}
        admin.set_config(METADATA_TOPIC, {"retention.bytes": "1000000000"})
        first = min(path for path in admin.tier_files(TOPIC) if path.suffix == ".log")
        (first.parent / first.name.replace(first.name[21:43], "AAAAAAAAAAAAAAAAAAAAAQ")).write_bytes(first.read_bytes())
        first.unlink()
        write_copy_that_hangs(cluster)
        found = ours.process("doctor", code=3)
        made = {"metadata-topic", "copy-hangs", "deleted-too-early", "leaked"} | by_version
        assert {one["kind"] for one in found["problems"]} == made
        assert all(one["means"] and one["todo"] for one in found["problems"])
        [leaked] = [one for one in found["problems"] if one["kind"] == "leaked"]
        assert leaked["bytes"] > 0
