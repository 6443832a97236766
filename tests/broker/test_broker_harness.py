"""The harness itself: what the brokers say of a topic is what the model says, over restarts, moved leaders and deletes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kafka.errors import KafkaError

from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin, ListedOffsets, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import FIRST_MS, TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, DraftRecord, TrafficFailed, Writer, WrittenPartition, consume

VERSIONS = ["4.4.0", pytest.param("3.9.2", marks=pytest.mark.slow_broker)]


def assert_as_told(story: TopicStory) -> None:
    for partition, model in story.partitions.items():
        assert consume(story.cluster, story.topic, partition) == model.uncommitted()
        assert consume(story.cluster, story.topic, partition, isolation=READ_COMMITTED) == model.committed()


def test_a_story_is_read_from_the_tier_as_it_was_written(told: TopicStory) -> None:
    assert_as_told(told)
    model = told.partitions[0]
    values = [record.value for record in model.uncommitted()]
    assert None in values
    assert model.aborted
    assert len(model.latest()) <= told.keys
    assert len(told.epochs) == 2
    assert {record.leader_epoch for record in consume(told.cluster, told.topic)} == told.epochs


def test_most_of_a_story_is_in_the_tier(told: TopicStory) -> None:
    offsets = told.admin.offsets(told.topic)
    assert offsets.earliest == 0
    assert offsets.latest_tiered + 1 == offsets.earliest_local == told.admin.active_base(told.topic)
    logs = [path for path in told.admin.tier_files(told.topic) if path.suffix == ".log"]
    assert len(logs) >= 8
    assert sum(path.stat().st_size for path in logs) > 7 * told.segment_bytes
    assert [path.suffix for path in told.admin.tier_files(told.topic)].count(".txnindex") > 0
    assert {path.parent.name[-22:] for path in logs} == {told.admin.topic_id(told.topic)}


def test_kafka_prints_what_it_wrote_of_the_tier(told: TopicStory) -> None:
    mine = [line for line in told.admin.metadata_events() if f"{told.admin.topic_id(told.topic)}:{told.topic}-0" in line]
    logs = [path for path in told.admin.tier_files(told.topic) if path.suffix == ".log"]
    assert len([line for line in mine if "state=COPY_SEGMENT_STARTED" in line]) == len(logs)  # none was cut short
    assert len([line for line in mine if "state=COPY_SEGMENT_FINISHED" in line]) == len(logs)


def test_offsets_are_found_by_timestamp(told: TopicStory) -> None:
    records = told.partitions[0].uncommitted()
    first_control = next(number for number, record in enumerate(records) if record.offset != number)
    for record in records[:: len(records) // 40]:
        found = told.admin.offset_by_timestamp(told.topic, 0, record.timestamp)
        at_or_after = next(each for each in records if each.timestamp >= record.timestamp)
        if at_or_after.offset < first_control:
            assert (found.offset, found.timestamp) == (at_or_after.offset, at_or_after.timestamp)
        else:  # the broker's clock, by which control records are stamped, is later than every record
            assert (found.offset, found.timestamp > records[-1].timestamp) == (first_control, True)
    assert told.admin.offset_by_timestamp(told.topic, 0, FIRST_MS - 1).offset == records[0].offset


def test_records_are_deleted_and_topics(broker: KafkaCluster, broker_admin: ClusterAdmin) -> None:
    story = TopicStory(broker, broker_admin, "deleted").create().tell()
    story.tiered()
    broker_admin.delete_records("deleted", 0, 500)
    assert broker_admin.offsets("deleted").earliest == 500
    left = story.partitions[0].from_offset(500)
    assert consume(broker, "deleted", start=500, isolation=READ_COMMITTED) == left.committed()
    with pytest.raises(TrafficFailed, match="from offset 0"):
        consume(broker, "deleted")
    wait_until(lambda: int(broker_admin.tier_files("deleted")[0].name[:20]) > 0, "the first segment to leave the tier")
    broker_admin.delete_topic("deleted")
    wait_until(lambda: not broker_admin.tier_files("deleted"), "the topic to leave the tier")


def test_an_open_transaction_ends_what_is_stable(broker: KafkaCluster, broker_admin: ClusterAdmin) -> None:
    broker_admin.create_topic("open")
    model = WrittenPartition()
    writer = Writer(broker, "open", model, transactional_id="open")
    with writer.transaction():
        writer.write([DraftRecord(b"a", b"1", FIRST_MS)])
    writer.begin()
    writer.write([DraftRecord(b"a", b"2", FIRST_MS)])
    Writer(broker, "open", model).write([DraftRecord(b"b", b"3", FIRST_MS)])
    assert consume(broker, "open", isolation=READ_COMMITTED) == model.committed()
    assert [record.value for record in model.committed()] == [b"1"]
    assert [record.value for record in consume(broker, "open")] == [b"1", b"2", b"3"]
    writer.end(commit=True)
    assert consume(broker, "open", isolation=READ_COMMITTED) == model.uncommitted()


def test_a_setting_of_a_topic_is_obeyed(broker: KafkaCluster, broker_admin: ClusterAdmin) -> None:
    story = TopicStory(broker, broker_admin, "kept").create({"local.retention.bytes": "-2"})
    story.tell()
    wait_until(lambda: broker_admin.offsets("kept").latest_tiered == broker_admin.active_base("kept") - 1, "kept to be tiered")
    assert broker_admin.offsets("kept").earliest_local == 0
    broker_admin.set_config("kept", {"local.retention.bytes": "1"})
    assert story.tiered()[0].earliest_local == broker_admin.active_base("kept")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_broker_is_restarted_and_killed(new_cluster: Callable[..., KafkaCluster], version: str) -> None:
    with new_cluster(version=version) as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "topic").create().tell()
        before = story.tiered()
        cluster.restart(kill=True)
        wait_until(lambda: admin.leadership("topic").leader == 1, "the topic to be led again")
        wait_until(lambda: admin.offsets("topic") == before[0], "the broker to know its tier again")  # LATEST_TIERED is -1 at first
        assert_as_told(story)
        story.tell(chapters=2, calm=False)
        story.tiered()
        assert_as_told(story)
        assert max(story.epochs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_leaders_move_between_two_brokers(new_cluster: Callable[..., KafkaCluster], version: str) -> None:
    with new_cluster(version=version, brokers=2) as cluster, ClusterAdmin(cluster) as admin:
        partitions = {0: WrittenPartition(), 1: WrittenPartition()}
        story = TopicStory(cluster, admin, "moved", partitions=partitions).create().tell(chapters=3)
        story.tiered()
        assert_as_told(story)
        assert story.epochs == {0, 1, 2}
        cluster.nodes[admin.leadership("moved").leader].kill()
        wait_until(
            lambda: len(admin.leadership("moved").in_sync) == 1 and admin.leadership("moved").leader in cluster.running, "another leader"
        )
        story.plain(0)
        assert_as_told(story)
        cluster.start()
        wait_until(lambda: len(admin.leadership("moved").in_sync) == 2, "the killed broker to be back in sync")
        assert_as_told(story)


@pytest.mark.parametrize("version", VERSIONS)
def test_users_may_do_what_acls_allow(new_cluster: Callable[..., KafkaCluster], version: str) -> None:
    with new_cluster(version=version, users={"reader": "secret", "nobody": "secret"}) as cluster, ClusterAdmin(cluster) as admin:
        admin.create_topic("guarded")
        model = WrittenPartition()
        Writer(cluster, "guarded", model).write([DraftRecord(b"key", b"value", FIRST_MS)])
        admin.allow("reader", ("TOPIC", "guarded", "READ"), ("TOPIC", METADATA_TOPIC, "READ"))
        reader = cluster.client_settings("reader")
        wait_until(lambda: consume_as(cluster, reader) == model.uncommitted(), "the rights to be known")
        with pytest.raises(TrafficFailed, match=r"[Aa]uthorization"):
            consume(cluster, "guarded", settings=cluster.client_settings("nobody"))
        with pytest.raises(TrafficFailed, match=r"_AUTHENTICATION"):
            consume(cluster, "guarded", settings=reader | {"sasl.password": "wrong"})


def consume_as(cluster: KafkaCluster, settings: dict[str, str]) -> object:
    try:
        return consume(cluster, "guarded", settings=settings)
    except TrafficFailed:
        return None


def test_what_is_not_there_is_said(broker: KafkaCluster, broker_admin: ClusterAdmin) -> None:
    with pytest.raises(KafkaError):
        broker_admin.offsets("nowhere")
    with pytest.raises(KafkaError):
        broker_admin.create_topic("bad", settings={"cleanup.policy": "compact"})
    broker_admin.create_topic("empty")
    assert broker_admin.offsets("empty") == ListedOffsets(earliest=0, latest=0, earliest_local=0, latest_tiered=-1)
    assert consume(broker, "empty") == []


def test_nothing_went_wrong_in_the_shared_broker(told: TopicStory) -> None:
    assert [line for line in told.cluster.errors() if "remote" in line.lower()] == []
