"""Records into a topic and out of it, through librdkafka, and the model that says what has to be there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from tests.support.kafka_broker import KafkaCluster

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
READ_UNCOMMITTED = "read_uncommitted"
READ_COMMITTED = "read_committed"

SILENT = logging.getLogger("tests.librdkafka")
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False

Headers = tuple[tuple[str, bytes | None], ...]


class TrafficFailed(Exception):
    """A record was not acknowledged, or a consumer got an error that does not pass."""


@dataclass(frozen=True)
class DraftRecord:
    """What a producer is given. Timestamps in milliseconds, chosen by the test."""

    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: Headers = ()


@dataclass(frozen=True)
class BrokerRecord:
    """What a consumer got, or what a producer was told that it will get. Leader epochs are no part of being equal."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    leader_epoch: int = field(default=-1, compare=False)


@dataclass
class WrittenPartition:
    """A model of one partition: every record that was acknowledged, and whether its transaction came to be."""

    records: dict[int, BrokerRecord] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)

    def uncommitted(self) -> list[BrokerRecord]:
        return [self.records[offset] for offset in sorted(self.records)]

    def committed(self) -> list[BrokerRecord]:
        """Up to the last stable offset, without what was aborted."""
        stable = min(self.open, default=1 << 63)
        return [record for record in self.uncommitted() if record.offset < stable and record.offset not in self.aborted]

    def latest(self) -> dict[bytes, BrokerRecord]:
        """Per key its last committed record, where that is no tombstone."""
        last = {record.key: record for record in self.committed() if record.key is not None}
        return {key: record for key, record in last.items() if record.value is not None}

    def forget_from(self, end: int) -> None:
        """An unclean election has discarded what was there."""
        self.records = {offset: record for offset, record in self.records.items() if offset < end}
        self.aborted = {offset for offset in self.aborted if offset < end}

    def from_offset(self, start: int) -> WrittenPartition:
        """What is left when the log starts there."""
        kept = {offset: record for offset, record in self.records.items() if offset >= start}
        return WrittenPartition(
            kept, {offset for offset in self.aborted if offset >= start}, {offset for offset in self.open if offset >= start}
        )


class Writer:
    """One producer on one partition; what is acknowledged goes into the model.

    ``transactional_id``: records are written inside ``transaction()`` only. Batches hold ``per_batch`` records or fewer.
    """

    def __init__(
        self,
        cluster: KafkaCluster,
        topic: str,
        model: WrittenPartition,
        *,
        partition: int = 0,
        codec: str = "none",
        transactional_id: str = "",
    ) -> None:
        settings: dict[str, Any] = {
            **cluster.client_settings(),
            "compression.type": codec,
            "enable.idempotence": True,
            "linger.ms": 200,  # batches are cut by flush
            "reconnect.backoff.max.ms": 500,
            "topic.metadata.refresh.interval.ms": 1000,
            "retry.backoff.ms": 50,
        }
        if transactional_id:
            settings |= {"transactional.id": transactional_id, "transaction.timeout.ms": 120_000}
        self._producer = Producer(settings, logger=SILENT)
        self._topic = topic
        self._partition = partition
        self._model = model
        self._in_transaction: list[int] | None = None
        if transactional_id:
            self._producer.init_transactions(60)

    def write(self, drafts: Iterable[DraftRecord], *, per_batch: int = 20) -> list[int]:
        """Returns their offsets, all acknowledged. Raises TrafficFailed."""
        offsets: list[int] = []
        failed: list[str] = []

        def told(draft: DraftRecord) -> Any:
            def acknowledged(error: KafkaError | None, message: Message) -> None:
                offset = message.offset()
                if error is not None or offset is None:
                    failed.append(str(error))
                    return
                offsets.append(offset)
                self._model.records[offset] = BrokerRecord(offset, draft.timestamp, draft.key, draft.value, draft.headers)
                if self._in_transaction is not None:
                    self._model.open.add(offset)
                    self._in_transaction.append(offset)

            return acknowledged

        for number, draft in enumerate(drafts):
            if number and number % per_batch == 0:
                self._producer.flush(60)
            self._producer.produce(
                self._topic,
                draft.value,
                draft.key,
                self._partition,
                on_delivery=told(draft),
                timestamp=draft.timestamp,
                headers=list(draft.headers) or None,
            )
        left = self._producer.flush(60)
        if failed or left:
            raise TrafficFailed(f"{self._topic}-{self._partition}: {failed[:1] or f'{left} records not acknowledged'}")
        return offsets

    @contextmanager
    def transaction(self, *, commit: bool = True) -> Iterator[None]:
        """Committed or aborted at the end of the block; after an error neither."""
        self.begin()
        yield
        self.end(commit=commit)

    def begin(self) -> None:
        self._producer.begin_transaction()
        self._in_transaction = []

    def end(self, *, commit: bool) -> None:
        mine = self._in_transaction or []
        if commit:
            self._producer.commit_transaction(60)
        else:
            self._producer.abort_transaction(60)
            self._model.aborted.update(mine)
        self._model.open.difference_update(mine)
        self._in_transaction = None


def consume(
    cluster: KafkaCluster,
    topic: str,
    partition: int = 0,
    *,
    isolation: str = READ_UNCOMMITTED,
    start: int = 0,
    limit: int | None = None,
    settings: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> list[BrokerRecord]:
    """What a consumer gets from ``start`` to the end (for read_committed: the last stable offset), at most ``limit`` records.

    ``start`` below the log's start is an error, not a jump. Raises TrafficFailed.
    """
    with reader(cluster, isolation=isolation, settings=settings) as consumer:
        return read_from(consumer, topic, partition, start=start, limit=limit, seconds=seconds)


@contextmanager
def reader(cluster: KafkaCluster, *, isolation: str = READ_UNCOMMITTED, settings: Mapping[str, str] | None = None) -> Iterator[Consumer]:
    """A consumer without a group, for any number of ``read_from``."""
    consumer = Consumer(
        {
            **(settings or cluster.client_settings()),
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": isolation,
            "fetch.wait.max.ms": 100,
            "fetch.error.backoff.ms": 50,
            "reconnect.backoff.max.ms": 500,
            "error_cb": _refused,
        },
        logger=SILENT,
    )
    try:
        yield consumer
    finally:
        consumer.close()


def _refused(error: KafkaError) -> None:
    """librdkafka tells it here only, and tries for ever."""
    if error.code() == KafkaError._AUTHENTICATION:
        raise TrafficFailed(str(error))


# A broker that has just started answers so for what is in the tier, until it has read the metadata; a leader that moved, too.
# And librdkafka looks for the coordinator of a group that nobody uses.
_PASSING = {
    KafkaError.UNKNOWN, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN, KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.FENCED_LEADER_EPOCH, KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
}  # fmt: skip


def read_from(
    consumer: Consumer, topic: str, partition: int, *, start: int, limit: int | None = None, seconds: float = 60.0
) -> list[BrokerRecord]:
    """As ``consume``, with a consumer that is there already."""
    found: list[BrokerRecord] = []
    consumer.assign([TopicPartition(topic, partition, start)])
    quiet, allowed = 0.0, False
    while limit is None or len(found) < limit:
        messages = consumer.consume(500 if limit is None else min(500, limit - len(found)), 0.5)
        if not messages and not allowed:
            allowed = _allowed(consumer, topic)
        quiet = 0.0 if messages else quiet + 0.5
        if quiet > seconds:
            raise TrafficFailed(f"{topic}-{partition}: nothing came for {seconds:.0f} s after {len(found)} records from offset {start}")
        for message in messages:
            error = message.error()
            if error is None:
                found.append(_record(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                return found
            elif error.code() in _PASSING:
                quiet += 0.05
            else:
                raise TrafficFailed(f"{topic}-{partition} from offset {start}: {error}")
    return found[:limit]


def _allowed(consumer: Consumer, topic: str) -> bool:
    """Or raises TrafficFailed: a consumer that is not allowed to see a topic that it was assigned hears nothing at all."""
    error = consumer.list_topics(topic, 10).topics[topic].error
    if error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise TrafficFailed(f"{topic}: {error}")
    return True


def _record(message: Message) -> BrokerRecord:
    offset = message.offset()
    epoch = message.leader_epoch()
    headers: Any = message.headers() or []
    return BrokerRecord(
        -1 if offset is None else offset,
        message.timestamp()[1],
        message.key(),
        message.value(),
        tuple((name, value) for name, value in headers),
        -1 if epoch is None else epoch,
    )
