"""The MetadataTopic port over confluent-kafka: one consumer for all partitions, one producer when something is appended."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from compactor.errors import Refused, Unavailable
from compactor.metadata_topic.codec import TOPIC, uuid_text
from compactor.metadata_topic.connection import AdminAnswers, ClientErrors, KafkaConnection, ask, load, made, mapped, unanswered
from compactor.metadata_topic.ports import Bounds, Polled, TopicIdentity, TopicRecord

_GROUP = "tiered-compactor"
"""librdkafka wants one; nothing is ever joined or committed."""
_QUEUE_KIB = 16 << 10
_POLL_S = 0.05
_ANSWER_S = 2.0
"""So long a leader is waited for at first."""
_ELECTION_S = 5.0
"""So long a partition that has just lost its leader, or whose leader has died, is waited for; one of which that was so before is not."""


class ConfluentMetadataTopic:
    """:param topic: another name than the brokers' default only in tests. For one thread at a time; connects on first use."""

    def __init__(self, connection: KafkaConnection, topic: str = TOPIC) -> None:
        self._connection = connection
        self._topic = topic
        self._listener = ClientErrors()
        self._consumer: Any = None
        self._admin: Any = None
        self._producer: Any = None
        self._partitions = 0
        self._led: dict[int, int] = {}
        self._silent: frozenset[int] = frozenset()
        self._writable: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return self._topic

    def identity(self) -> TopicIdentity:
        kafka = load()
        admin = self._administrator()
        timeout, wanted = self._connection.timeout_s, kafka.TopicCollection([self._topic])
        # First, as the client learns from it who answers for the cluster by now: broker and controller of its last look may be gone.
        cluster_id = self._listed(admin).cluster_id
        topics = self._ask(AdminAnswers(admin, lambda: admin.describe_topics(wanted, request_timeout=timeout), self._topic))
        described = topics[self._topic]
        self._partitions = len(described.partitions)
        self._led = {one.id: one.leader.id for one in described.partitions if one.leader is not None and one.leader.id >= 0}
        return TopicIdentity(cluster_id or "", uuid_text(raw_uuid(described.topic_id)), self._partitions)

    def bounds(self) -> Mapping[int, Bounds]:
        if not self._partitions:
            self.identity()
        began, seconds = time.monotonic(), _ANSWER_S
        found: dict[int, Bounds] = {}
        while True:
            found |= self._bounds([number for number in self._led if number not in found], seconds)
            silent = frozenset(range(self._partitions)) - found.keys()
            passed = time.monotonic() - began
            if found and (silent <= self._silent or passed >= _ELECTION_S):
                break
            if not self._led and passed >= _ELECTION_S:
                raise Unavailable(f"{self._topic}: no broker leads any of its partitions", hint="Try again")
            if passed >= self._connection.timeout_s:
                raise unanswered(self._connection, self._listener, self._topic)
            time.sleep(_POLL_S)
            self.identity()
            seconds *= 1.5  # it may be slow
        self._silent = silent
        return dict(sorted(found.items()))

    def seek(self, positions: Mapping[int, int]) -> None:
        kafka = load()
        consumer = self._reader()
        consumer.unassign()
        consumer.assign([kafka.TopicPartition(self._topic, number, offset) for number, offset in positions.items()])

    def poll(self, limit: int, timeout_s: float) -> Polled:
        kafka = load()
        consumer = self._reader()
        deadline = time.monotonic() + timeout_s
        records: list[TopicRecord] = []
        reached: dict[int, int] = {}
        while not records and not reached:
            for message in consumer.consume(limit, min(_POLL_S, timeout_s)):
                error = message.error()
                if error is None:
                    records.append(TopicRecord(message.partition(), message.offset(), message.key(), message.value()))
                elif error.code() == kafka.KafkaError._PARTITION_EOF:
                    reached[message.partition()] = message.offset()
                elif not _passing(error):
                    raise mapped(error, self._connection.bootstrap_servers, self._topic)
            refusal = self._listener.refusal(self._connection.bootstrap_servers, self._topic)
            if refusal is not None:
                raise refusal
            if time.monotonic() >= deadline:
                break
        if records or reached:
            self._listener.forget()
        return Polled(records, reached)

    def append(self, partition: int, value: bytes) -> int:
        kafka = load()
        producer = self._writer()
        what = f"append to {self._topic}-{partition}"
        if partition not in self._writable:
            raise Refused(f"{what}: there is no such partition")
        answers: list[tuple[Any, Any]] = []
        deadline = time.monotonic() + 2 * self._connection.timeout_s
        try:
            producer.produce(self._topic, value=value, partition=partition, on_delivery=lambda *answer: answers.append(answer))
            while not answers and time.monotonic() < deadline:
                producer.poll(_POLL_S)
                refusal = self._listener.refusal(self._connection.bootstrap_servers, what)
                if refusal is not None and not answers:
                    self._abandon()
                    raise refusal
        except kafka.KafkaException as raised:
            self._abandon()
            raise mapped(raised.args[0], self._connection.bootstrap_servers, what) from None
        if not answers:
            self._abandon()
            raise Unavailable(f"{what}: no answer", hint="The record may stand; read the topic to know")
        error, message = answers[0]
        if error is None:
            self._listener.forget()
            return int(message.offset())
        if error.fatal():
            self._abandon()
        heard = self._listener.last if error.name() == "_MSG_TIMED_OUT" else None
        found = mapped(heard or error, self._connection.bootstrap_servers, what)
        if isinstance(found, Unavailable):
            raise Unavailable(found.message, hint="The record may stand; read the topic to know")
        raise found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self._abandon()
        self._consumer = self._admin = None

    def _bounds(self, numbers: Collection[int], seconds: float) -> dict[int, Bounds]:
        """Of those whose leader answers in time: each is asked by itself, as one answer to several comes when the last of them has come."""
        kafka = load()
        admin = self._administrator()
        admin.poll(0)
        spec, isolation = kafka.admin.OffsetSpec, kafka.IsolationLevel.READ_UNCOMMITTED
        asked = []
        for leader in sorted({self._led[number] for number in numbers}):
            led = [kafka.TopicPartition(self._topic, number) for number in numbers if self._led[number] == leader]
            asked += [
                admin.list_offsets(dict.fromkeys(led, which), isolation_level=isolation, request_timeout=seconds)
                for which in (spec.earliest(), spec.latest())
            ]
        deadline = time.monotonic() + seconds
        answers: dict[int, list[int]] = {number: [] for number in numbers}
        for futures in asked:
            for where, future in futures.items():
                try:
                    offset = int(future.result(max(0.0, deadline - time.monotonic())).offset)
                    answers[where.partition] += [offset] if offset >= 0 else []  # librdkafka's own number where nobody has answered
                except kafka.KafkaException as raised:
                    said = mapped(raised.args[0], self._connection.bootstrap_servers, self._topic)
                    if not isinstance(said, Unavailable):
                        raise said from None
                except TimeoutError:
                    pass
        return {number: Bounds(*both) for number, both in answers.items() if len(both) == 2}

    def _listed(self, client: Any) -> Any:
        """The cluster, and this topic, as some broker knows them now."""
        return self._ask(lambda seconds: [client.poll(0), client.list_topics(self._topic, timeout=seconds)][1])

    def _ask(self, attempt: Any) -> Any:
        return ask(self._connection, self._listener, self._topic, attempt)

    def _administrator(self) -> Any:
        if self._admin is None:
            self._admin = made(lambda: load().admin.AdminClient(self._connection.settings(self._listener)))
        return self._admin

    def _reader(self) -> Any:
        if self._consumer is None:
            settings = self._connection.settings(
                self._listener,
                group_id=_GROUP,
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                isolation_level="read_uncommitted",
                auto_offset_reset="error",
                enable_partition_eof=True,
                fetch_wait_max_ms=100,
                queued_max_messages_kbytes=_QUEUE_KIB,
            )
            self._consumer = made(lambda: load().Consumer(settings))
        return self._consumer

    def _writer(self) -> Any:
        if self._producer is None:
            settings = self._connection.settings(
                self._listener, enable_idempotence=True, acks="all", linger_ms=0, message_timeout_ms=self._connection.delivery_timeout_ms
            )
            producer = made(lambda: load().Producer(settings))
            # A producer waits long for a topic that is not there; who asks first is told at once.
            found = self._listed(producer).topics[self._topic]
            if found.error is not None:
                raise mapped(found.error, self._connection.bootstrap_servers, f"append to {self._topic}")
            self._producer, self._writable = producer, frozenset(found.partitions)
        return self._producer

    def _abandon(self) -> None:
        """What it has not sent yet is not sent any more; what is on its way may arrive."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        with suppress(load().KafkaException):  # it may be beyond help
            producer.purge()
            producer.flush(0)


def raw_uuid(uuid: Any) -> bytes:
    """The 16 bytes of confluent-kafka's Uuid, whose own text is base64 of another alphabet than Kafka's."""
    return struct.pack(">qq", uuid.get_most_significant_bits(), uuid.get_least_significant_bits())


_PASSING = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "LEADER_NOT_AVAILABLE", "GROUP_AUTHORIZATION_FAILED")


def _passing(error: Any) -> bool:
    """What librdkafka tells and then mends by itself; it looks for the group's coordinator, too, whom nobody here needs."""
    return bool(error.retriable()) or error.name() in _PASSING
