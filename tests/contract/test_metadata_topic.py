"""One suite for every MetadataTopic: the one in memory, and the one over confluent-kafka against a real broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient, MetadataTopic, PollResult, RawMetadataTopicRecord
from compactor.adapters.kafka_client import KafkaConnection
from compactor.errors import NotFound, Refused
from tests.simulation.memory_topic import MemoryMetadataTopic, MemoryTopicLog

PARTITIONS = 3
Opener = Callable[[], MetadataTopic]


@pytest.fixture(params=["memory", pytest.param("confluent", marks=pytest.mark.broker)])
def opened(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Readers and writers of one new topic of three partitions."""
    made: list[MetadataTopic] = []
    if request.param == "memory":
        log = MemoryTopicLog(PARTITIONS)

        def make() -> MetadataTopic:
            return MemoryMetadataTopic(log)
    else:
        cluster = request.getfixturevalue("broker")
        topic = f"metadata-{uuid.uuid4()}"
        create_topic(cluster.bootstrap, topic)

        def make() -> MetadataTopic:
            return ConfluentKafkaMetadataTopicClient(KafkaConnection(cluster.bootstrap), topic)

    def open_one() -> MetadataTopic:
        made.append(make())
        return made[-1]

    yield open_one
    for topic_client in made:
        topic_client.close()


def create_topic(bootstrap: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)


def all_of(topic: MetadataTopic, positions: dict[int, int], limit: int = 1000) -> tuple[list[RawMetadataTopicRecord], dict[int, int]]:
    """Read until every partition's end is reached."""
    topic.seek(positions)
    records: list[RawMetadataTopicRecord] = []
    reached: dict[int, int] = {}
    for _ in range(500):
        polled = topic.poll(limit, 1.0)
        assert isinstance(polled, PollResult)
        records += polled.records
        reached |= polled.reached
        if set(reached) == set(positions):
            return records, reached
    raise AssertionError(f"ends not reached: {reached}")


def read_on(topic: MetadataTopic) -> None:
    for _ in range(100):
        topic.poll(10, 1.0)


def test_it_says_which_topic_it_is(opened: Opener) -> None:
    one, two = opened().identity(), opened().identity()
    assert one == two
    assert (one.partitions, bool(one.cluster_id), bool(one.topic_id)) == (PARTITIONS, True, True)


def test_what_is_appended_is_read_in_order_without_a_key(opened: Opener) -> None:
    writer, reader = opened(), opened()
    for number in range(30):
        assert writer.append(number % PARTITIONS, f"value {number}".encode()) == number // PARTITIONS
    records, reached = all_of(reader, dict.fromkeys(range(PARTITIONS), 0))
    assert reached == dict.fromkeys(range(PARTITIONS), 10)
    for partition in range(PARTITIONS):
        mine = [record for record in records if record.partition == partition]
        assert mine == [RawMetadataTopicRecord(partition, n, None, f"value {n * PARTITIONS + partition}".encode()) for n in range(10)]


def test_bounds_follow_the_log(opened: Opener) -> None:
    writer, other = opened(), opened()
    assert set(other.bounds().values()) == {(0, 0)}
    writer.append(1, b"one")
    writer.append(1, b"two")
    assert dict(other.bounds()) == {0: (0, 0), 1: (0, 2), 2: (0, 0)}


def test_reading_begins_where_it_is_told_and_nowhere_else(opened: Opener) -> None:
    topic = opened()
    for partition in range(PARTITIONS):
        for number in range(4):
            topic.append(partition, bytes([partition, number]))
    records, reached = all_of(topic, {0: 2, 2: 4})
    assert [(record.partition, record.offset) for record in records] == [(0, 2), (0, 3)]
    assert reached == {0: 4, 2: 4}
    again, _ = all_of(topic, {2: 1}, limit=2)
    assert [(record.partition, record.offset) for record in again] == [(2, 1), (2, 2), (2, 3)]


def test_a_reader_at_the_end_sees_what_comes(opened: Opener) -> None:
    topic = opened()
    all_of(topic, dict.fromkeys(range(PARTITIONS), 0))
    assert topic.poll(10, 0.2).records == []
    topic.append(2, b"late")
    records: list[RawMetadataTopicRecord] = []
    for _ in range(100):
        records += topic.poll(10, 1.0).records
        if records:
            break
    assert records == [RawMetadataTopicRecord(2, 0, None, b"late")]


def test_an_offset_that_is_not_there_is_not_found(opened: Opener) -> None:
    topic = opened()
    topic.append(0, b"one")
    topic.seek({0: 40})
    with pytest.raises(NotFound):
        read_on(topic)


def test_a_partition_that_is_not_there_is_refused(opened: Opener) -> None:
    with pytest.raises(Refused, match="no (such )?partition|the partition does not exist"):
        opened().append(PARTITIONS + 4, b"lost")
