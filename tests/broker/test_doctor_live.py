"""`doctor` and `config check` on live brokers, with each fault made on purpose."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers.codec import encode_record
from compactor.adapters.brokers.follow import metadata_partition
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
from compactor.adapters.kafka_client import KafkaConnection
from compactor.constants import Offset
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord, RemoteLogSegmentMetadataUpdateRecord, TopicIdPartition
from compactor.model.segment import SegmentState
from compactor.upkeep.broker_doctor import LAST_TIERED_SETTING, MANY_METADATA_RECORDS, SLACK_MS
from tests.broker.test_compaction import BrokerTierCli, cli
from tests.broker.test_elections import readable_segments
from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_jars import VERSIONS
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import SILENT

__all__ = ["cli"]
TOPIC = "ailing"
STUCK = "stuck"
HOUR_MS = 3_600_000
TWO_HOURS_LATER = "import time, compactor.bootstrap as started\nstarted.wall_clock_ms = lambda: int(time.time() * 1000) + 7_200_000"
"""Runs in doctor's process: its clock is two hours ahead of the brokers'."""


def newest_segment(cluster: KafkaCluster) -> RemoteLogSegmentMetadataRecord:
    return max(readable_segments(cluster, TOPIC), key=lambda one: one.end_offset)


def append_metadata(cluster: KafkaCluster, partition: TopicIdPartition, value: bytes) -> None:
    """Append a record to the partition of the metadata topic that has a partition's segments."""
    topic = ConfluentKafkaMetadataTopicClient(KafkaConnection(cluster.bootstrap))
    try:
        topic.append(metadata_partition(partition.topic_id, 0, topic.identity().partitions), value)
    finally:
        topic.close()


def write_begun_copy(cluster: KafkaCluster, letter: bytes, start: int, end: int) -> None:
    """Write that a broker began a copy of these offsets long ago: a COPY_SEGMENT_STARTED record."""
    newest = newest_segment(cluster)
    begun = newest._replace(
        segment_id=bytes(15) + letter,
        start_offset=start,
        end_offset=end,
        leader_epochs=(EpochEntry(newest.leader_epochs[-1].epoch, Offset(start)),),
        event_timestamp_ms=int(time.time() * 1000) - SLACK_MS - 60_000,
        state=SegmentState.COPY_SEGMENT_STARTED,
    )
    append_metadata(cluster, begun.partition, encode_record(begun))


def forget_segments(cluster: KafkaCluster, admin: ClusterAdmin, topic: str) -> None:
    """Delete all records about a topic's segments from the metadata topic, as its retention may do. Running brokers still know them."""
    metadata_topic = ConfluentKafkaMetadataTopicClient(KafkaConnection(cluster.bootstrap))
    number = metadata_partition(readable_segments(cluster, topic)[0].partition.topic_id, 0, metadata_topic.identity().partitions)
    metadata_topic.close()
    admin.delete_records(METADATA_TOPIC, number, admin.offsets(METADATA_TOPIC, number).latest)


def write_state(cluster: KafkaCluster, segment: RemoteLogSegmentMetadataRecord, state: SegmentState) -> None:
    """Write that a segment has this state now."""
    now_ms = int(time.time() * 1000)
    update = RemoteLogSegmentMetadataUpdateRecord(segment.partition, segment.segment_id, segment.broker_id, now_ms, state)
    append_metadata(cluster, segment.partition, encode_record(update))


def set_alone(cluster: KafkaCluster, node: int, setting: str, value: str) -> None:
    """Give one broker another setting than the others."""
    with (cluster.directory / f"node-{node}" / "server.properties").open("a") as file:
        file.write(f"{setting}={value}\n")
    cluster.restart(node)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("version", "by_version"), [("3.9.2", {"size-retention"}), ("4.4.0", {"copy-lag", "last-tiered"})], ids=["oldest", "newest"]
)
def test_doctor_finds_each_fault_that_was_made_and_nothing_before(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], version: str, by_version: set[str]
) -> None:
    is_newest = version.startswith("4")
    with new_cluster(version, brokers=2 if is_newest else 1) as cluster, ClusterAdmin(cluster) as admin:
        if is_newest:
            set_alone(cluster, 2, LAST_TIERED_SETTING, "true")
        story = TopicStory(cluster, admin, TOPIC, first_ms=int(time.time() * 1000)).create().tell()
        story.tiered()
        ours = cli(cluster, TOPIC, publish={"orphan_age_ms": 0})
        healthy = ours.process("doctor", "--fail-on", "error")
        assert {(one["severity"], one["kind"]) for one in healthy["problems"]} == ({("warning", "last-tiered")} if is_newest else set())
        lag = {"remote.copy.lag.ms": "60000"} if is_newest else {}
        admin.set_config(TOPIC, {"retention.bytes": "1000000000", "local.retention.ms": "3600000", **lag})
        assert by_version <= {one["kind"] for one in ours.process("config", "check", code=5)["problems"]}

        def found_and_explained() -> set[str]:
            problems = ours.process("doctor", code=3)["problems"]
            assert all(one["means"] and one["todo"] for one in problems)
            assert all(one["bytes"] > 0 for one in problems if one["kind"] == "leaked")
            return {one["kind"] for one in problems}

        admin.set_config(METADATA_TOPIC, {"retention.bytes": "1000000000"})
        first = min(path for path in admin.tier_files(TOPIC) if path.suffix == ".log")
        (first.parent / first.name.replace(first.name[21:43], "AAAAAAAAAAAAAAAAAAAAAQ")).write_bytes(first.read_bytes())
        first.unlink()
        made = {"metadata-topic", "deleted-too-early", "leaked"} | by_version
        newest = newest_segment(cluster)
        write_begun_copy(cluster, b"a", newest.start_offset, newest.end_offset)
        assert found_and_explained() == made | {"copy-abandoned"}

        admin.set_config(TOPIC, {"local.retention.ms": "-2", "local.retention.bytes": "-2", "remote.log.copy.disable": "true"})
        story.later(HOUR_MS // 2)  # later than the control records, which have the broker's time; Kafka 4 refuses more than an hour
        story.plain()
        write_begun_copy(cluster, b"x", newest.end_offset + 1, newest.end_offset + 9)
        write_state(cluster, readable_segments(cluster, TOPIC)[1], SegmentState.DELETE_SEGMENT_STARTED)
        assert found_and_explained() == made | {"copy-hangs", "copy-disabled", "gap"}

        append_metadata(cluster, newest.partition, b"no record of a segment")
        assert found_and_explained() == {"metadata-topic", "unreadable-metadata"} | by_version


def segment_logs(admin: ClusterAdmin, topic: str) -> list[Path]:
    """Return the logs in the tier, ascending by base offset."""
    return sorted(path for path in admin.tier_files(topic) if path.suffix == ".log")


def break_deletion(log: Path) -> None:
    """Put a folder with a file in place of an object, so that the broker's plug-in fails to delete it."""
    log.unlink()
    log.mkdir()
    (log / "something").touch()


def write_many_metadata_records(cluster: KafkaCluster, count: int) -> None:
    """Write that a copy is finished again and again: brokers accept the record, and their next start reads all of them."""
    newest = newest_segment(cluster)
    again = RemoteLogSegmentMetadataUpdateRecord(
        newest.partition, newest.segment_id, newest.broker_id, newest.event_timestamp_ms, SegmentState.COPY_SEGMENT_FINISHED
    )
    topic = ConfluentKafkaMetadataTopicClient(KafkaConnection(cluster.bootstrap))
    number = metadata_partition(newest.partition.topic_id, 0, topic.identity().partitions)
    topic.close()
    producer = Producer({**cluster.client_settings(), "linger.ms": 50, "compression.type": "lz4"}, logger=SILENT)
    value = encode_record(again)
    for _ in range(count):
        while True:
            try:
                producer.produce(METADATA_TOPIC, value, partition=number)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_doctor_finds_what_brokers_leave_undone(new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]) -> None:
    long_ago = int(time.time() * 1000) - 3 * HOUR_MS
    with new_cluster(VERSIONS[0]) as cluster, ClusterAdmin(cluster) as admin:
        stories = {name: TopicStory(cluster, admin, name, first_ms=long_ago) for name in (TOPIC, STUCK)}
        for story in stories.values():  # without transactions: control records have the broker's time
            story.create({"segment.ms": "600000"}).plain()
            story.tiered()
        ours = cli(cluster, *stories)
        assert ours.process("doctor", "--fail-on", "warning")["problems"] == []  # though the open segments are three hours old

        def problems(before: str = "") -> dict[str, str]:
            told = ours.process("doctor", "--fail-on", "warning", code=None, before=before)["problems"]
            assert all(one["means"] and one["todo"] for one in told)
            return {one["kind"]: one["topic"] for one in told}

        admin.set_config(METADATA_TOPIC, {"max.message.bytes": "10"})  # brokers cannot announce a copy any more
        stories[STUCK].later(HOUR_MS)
        stories[STUCK].plain()
        wait_until(
            lambda: problems() == {"not-tiered": STUCK},
            "doctor to tell of segments that are not tiered",
            seconds=30,
            stand=lambda: str(problems()),
        )
        admin.set_config(METADATA_TOPIC, {"max.message.bytes": "1048588"})
        stories[STUCK].transactions()
        stories[STUCK].plain(count=200)
        stories[STUCK].tiered()
        [folder] = {path.parent for path in admin.tier_files(STUCK)}
        folder.rename(folder.with_name("away"))
        assert problems() == {"deleted-too-early": STUCK}  # a lookup by time does not ask for these segments: all are older
        folder.with_name("away").rename(folder)

        break_deletion(segment_logs(admin, TOPIC)[0])
        admin.set_config(TOPIC, {"retention.ms": str(HOUR_MS // 2), "segment.ms": "600000"})
        wait_until(lambda: "delete-hangs" in problems(TWO_HOURS_LATER), "doctor to tell of a deletion", seconds=120)
        assert problems(TWO_HOURS_LATER) == {"delete-hangs": TOPIC, "delete-overdue": TOPIC}

        write_many_metadata_records(cluster, MANY_METADATA_RECORDS)
        assert problems()["metadata-growth"] == ""

        [folder] = {path.parent for path in admin.tier_files(STUCK)}
        folder.rename(folder.with_name("away"))
        forget_segments(cluster, admin, STUCK)
        shutil.rmtree(ours.folder / "state")  # it remembers the deleted records, too
        assert problems()["time-lookup"] == STUCK
