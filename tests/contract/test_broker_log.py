"""One suite for every BrokerClient: the one in memory, and the one over confluent-kafka against a real broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from compactor.adapters.kafka_client import KafkaConnection
from compactor.features.consumer.group import BrokerClient, ConfluentBrokerClient, LogStartAndEndOffset
from compactor.model.ids import TopicPartition
from compactor.read.records import MessageLike
from tests.builders import LogBuilder, read
from tests.support.plain_broker import PlainBroker

if TYPE_CHECKING:
    from tests.support.kafka_admin import ClusterAdmin
    from tests.support.kafka_broker import KafkaCluster

FIRST_MS = 1_700_000_000_000
NAME = TopicPartition("orders", 0)


class Rig(Protocol):
    """A partition that can be written to. Values are numbered; the record of number n is n milliseconds younger than FIRST_MS."""

    name: TopicPartition

    @property
    def topic_id(self) -> str: ...

    def put(self, numbers: Sequence[int], *, committed: bool | None = None) -> None:
        """One batch; in a transaction of its own where ``committed`` says how it ended."""

    def delete_below(self, offset: int) -> None: ...

    def open(self, *, committed: bool) -> BrokerClient: ...


@dataclass
class MemoryRig:
    folder: Path
    name: TopicPartition = NAME
    log: LogBuilder = field(default_factory=LogBuilder)
    made: list[PlainBroker] = field(default_factory=list)
    start: int = 0
    topic_id: str = "AAAAAAAAAAAAAAAAAAAAAQ"

    def put(self, numbers: Sequence[int], *, committed: bool | None = None) -> None:
        times = [FIRST_MS + number for number in numbers]
        pairs, producer = [f"k={number}" for number in numbers], -1 if committed is None else 5
        self.log.put(*pairs, times=times, headers=[("h", b"v")], pid=producer, txn=committed is not None)
        if committed is not None:
            self.log.end(5, commit=committed)
        self.log.write(self.folder)
        self._tell()

    def delete_below(self, offset: int) -> None:
        self.start = offset
        self._tell()

    def open(self, *, committed: bool) -> BrokerClient:
        self.made.append(PlainBroker(self.name, committed=committed, id_of_topic=self.topic_id))
        self._tell()
        return self.made[-1]

    def _tell(self) -> None:
        for broker in self.made:
            broker.batches = [batch for batches in read(self.folder).values() for batch in batches]
            broker.start = self.start


class ConfluentRig:
    def __init__(self, cluster: KafkaCluster, admin: ClusterAdmin) -> None:
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        from tests.support.kafka_traffic import WrittenPartition

        self.name = TopicPartition(f"log-{uuid.uuid4()}", 0)
        self._cluster, self._admin, self._model = cluster, admin, WrittenPartition()
        creator = AdminClient({"bootstrap.servers": cluster.bootstrap})
        creator.create_topics([NewTopic(self.name.topic, 1, 1, config={"retention.ms": "-1"})])[self.name.topic].result(30)

    def put(self, numbers: Sequence[int], *, committed: bool | None = None) -> None:
        from tests.support.kafka_traffic import DraftRecord, Writer

        drafts = [DraftRecord(b"k", str(number).encode(), FIRST_MS + number, (("h", b"v"),)) for number in numbers]
        transactional_id = "" if committed is None else str(uuid.uuid4())
        writer = Writer(self._cluster, self.name.topic, self._model, transactional_id=transactional_id)
        if committed is None:
            writer.write(drafts)
        else:
            with writer.transaction(commit=committed):
                writer.write(drafts)

    @property
    def topic_id(self) -> str:
        told = (self._cluster.nodes[1].log_dir / str(self.name) / "partition.metadata").read_text()
        return told.split("topic_id: ")[1].strip()

    def delete_below(self, offset: int) -> None:
        self._admin.delete_records(*self.name, offset)

    def open(self, *, committed: bool) -> BrokerClient:
        return ConfluentBrokerClient(KafkaConnection(self._cluster.bootstrap), read_committed=committed)


@pytest.fixture(params=["memory", pytest.param("confluent", marks=pytest.mark.broker)])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    if request.param == "memory":
        return MemoryRig(tmp_path / "log")
    return ConfluentRig(request.getfixturevalue("broker"), request.getfixturevalue("broker_admin"))


@pytest.fixture(params=[True, False], ids=["read_committed", "read_uncommitted"])
def opened(request: pytest.FixtureRequest, rig: Rig) -> Iterator[tuple[Rig, BrokerClient, bool]]:
    """With ten records (0 to 9), an aborted transaction (10 to 12 and its marker at 13), and 14 behind it."""
    rig.put(range(10))
    rig.put(range(10, 13), committed=False)
    rig.put([14])
    log = rig.open(committed=request.param)
    yield rig, log, request.param
    log.close()


def fetched(log: BrokerClient, until: int, limit: int = 100) -> list[MessageLike]:
    """Return all messages up to the one with offset ``until``."""
    found: list[MessageLike] = []
    for _ in range(300):
        got = log.fetch_messages(limit, 0.2)
        assert len(got.messages) <= limit
        assert not got.out_of_range
        found += got.messages
        if found and found[-1].offset() == until:
            return found
    raise AssertionError(f"no record at {until}: {[message.offset() for message in found]}")


def out_of_range(log: BrokerClient) -> list[TopicPartition]:
    for _ in range(300):
        got = log.fetch_messages(10, 0.2)
        assert not got.messages
        if got.out_of_range:
            return list(got.out_of_range)
    raise AssertionError("the offset was not reported as out of range")


def assert_quiet(log: BrokerClient) -> None:
    for _ in range(5):
        got = log.fetch_messages(10, 0.1)
        assert (list(got.messages), list(got.out_of_range)) == ([], [])


def offsets(messages: Sequence[MessageLike]) -> list[Any]:
    return [message.offset() for message in messages]


def test_a_partition_is_read_in_order_from_an_offset(opened: tuple[Rig, BrokerClient, bool]) -> None:
    rig, log, committed = opened
    log.start_reading_from({rig.name: 3})
    found = fetched(log, 14, limit=4)
    assert offsets(found) == [*range(3, 10), *([] if committed else [10, 11, 12]), 14]
    first = found[0]
    assert first.error() is None
    assert (first.topic(), first.partition(), first.key(), first.value()) == (*rig.name, b"k", b"3")
    assert (first.headers(), first.timestamp(), first.leader_epoch()) == ([("h", b"v")], (1, FIRST_MS + 3), 0)
    assert log.offset_bounds(rig.name) == LogStartAndEndOffset(0, 15)
    rig.put([15, 16])
    assert offsets(fetched(log, 16)) == [15, 16]


def test_a_partition_can_continue_elsewhere_and_can_be_stopped(opened: tuple[Rig, BrokerClient, bool]) -> None:
    rig, log, _ = opened
    log.start_reading_from({rig.name: 0})
    assert offsets(fetched(log, 14))[:10] == [*range(10)]
    log.start_reading_from({rig.name: 8})
    assert offsets(fetched(log, 14))[:2] == [8, 9]
    log.stop_reading([rig.name, TopicPartition("others", 3)])
    rig.put([15])
    assert_quiet(log)
    log.start_reading_from({rig.name: 15})
    assert offsets(fetched(log, 15)) == [15]


def test_offsets_outside_the_log_are_reported(opened: tuple[Rig, BrokerClient, bool]) -> None:
    rig, log, _ = opened
    rig.delete_below(5)
    log.start_reading_from({rig.name: 2})
    assert out_of_range(log) == [rig.name]
    assert log.offset_bounds(rig.name) == LogStartAndEndOffset(5, 15)
    rig.put([15])
    assert_quiet(log)
    log.start_reading_from({rig.name: 40})
    assert out_of_range(log) == [rig.name]
    log.start_reading_from({rig.name: 5})
    assert offsets(fetched(log, 15))[0] == 5


def test_an_offset_after_the_end_of_its_leader_epoch_is_reported_as_truncation(opened: tuple[Rig, BrokerClient, bool]) -> None:
    rig, log, _ = opened
    log.start_reading_from({rig.name: 15}, {rig.name: 0})
    assert_quiet(log)
    log.start_reading_from({rig.name: 40}, {rig.name: 0})
    fetches = (log.fetch_messages(10, 0.2) for _ in range(300))
    got = next(found for found in fetches if found.messages or found.out_of_range or found.truncated)
    assert (list(got.messages), list(got.out_of_range), got.truncated) == ([], [], {rig.name: 15})
    rig.put([15])
    assert_quiet(log)


def test_the_topic_id_is_that_of_the_cluster(rig: Rig) -> None:
    rig.put([0])
    log = rig.open(committed=True)
    assert log.topic_id(rig.name) == rig.topic_id
    log.close()


def test_offsets_are_found_by_time(opened: tuple[Rig, BrokerClient, bool]) -> None:
    rig, log, _ = opened
    assert [log.offset_for_time(rig.name, FIRST_MS + after) for after in (-5, 0, 4, 12)] == [0, 0, 4, 12]
    assert log.offset_for_time(rig.name, 4 * FIRST_MS) is None
