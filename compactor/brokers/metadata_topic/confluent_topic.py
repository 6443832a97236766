"""MetadataTopic with confluent-kafka: one consumer for all partitions, and one producer that is created at the first append."""

from __future__ import annotations

import struct
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from compactor.brokers.metadata_topic.codec import TOPIC, uuid_text
from compactor.brokers.metadata_topic.connection import (
    ClientErrorRecorder,
    KafkaConnection,
    RetriedAdminRequest,
    create_kafka_client,
    load_confluent_kafka,
    no_answer_error,
    retry_until_answered,
    store_error_from_kafka_error,
)
from compactor.brokers.metadata_topic.ports import AppendedOffset, FirstAndEndOffsets, PollResult, RawMetadataTopicRecord, TopicIdentity
from compactor.errors import Refused, Unavailable

_CONSUMER_GROUP = "tiered-compactor"
"""librdkafka wants one; nothing is ever joined or committed."""
_MAX_QUEUED_KIB = 16 << 10
_POLL_TIMEOUT_S = 0.05
_FIRST_TIMEOUT_S = 2.0
"""So long a leader is waited for at first."""
_ELECTION_TIMEOUT_S = 5.0
"""So long a partition that has just lost its leader, or whose leader has died, is waited for; one of which that was so before is not."""


class ConfluentKafkaMetadataTopicClient:
    """Metadata topic client over confluent-kafka. Connects on first use; for one thread at a time.

    :param topic: topic name; differs from the default only in tests.
    """

    def __init__(self, connection: KafkaConnection, topic: str = TOPIC) -> None:
        self._connection = connection
        self._topic = topic
        self._listener = ClientErrorRecorder()
        self._consumer: Any = None
        self._admin: Any = None
        self._producer: Any = None
        self._partitions = 0
        self._leaders: dict[int, int] = {}
        self._silent: frozenset[int] = frozenset()
        self._writable: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return self._topic

    def identity(self) -> TopicIdentity:
        kafka = load_confluent_kafka()
        admin = self._admin_client()
        timeout, wanted = self._connection.timeout_s, kafka.TopicCollection([self._topic])
        # First, as the client learns from it who answers for the cluster by now: broker and controller of its last look may be gone.
        cluster_id = self._request_topic_metadata(admin).cluster_id
        topics = self._retry_request(
            RetriedAdminRequest(admin, lambda: admin.describe_topics(wanted, request_timeout=timeout), self._topic)
        )
        described = topics[self._topic]
        self._partitions = len(described.partitions)
        self._leaders = {one.id: one.leader.id for one in described.partitions if one.leader is not None and one.leader.id >= 0}
        return TopicIdentity(cluster_id or "", uuid_text(uuid_to_bytes(described.topic_id)), self._partitions)

    def bounds(self) -> Mapping[int, FirstAndEndOffsets]:
        if not self._partitions:
            self.identity()
        began, seconds = time.monotonic(), _FIRST_TIMEOUT_S
        found: dict[int, FirstAndEndOffsets] = {}
        while True:
            found |= self._fetch_first_and_end_offsets([number for number in self._leaders if number not in found], seconds)
            silent = frozenset(range(self._partitions)) - found.keys()
            passed = time.monotonic() - began
            if found and (silent <= self._silent or passed >= _ELECTION_TIMEOUT_S):
                break
            if not self._leaders and passed >= _ELECTION_TIMEOUT_S:
                raise Unavailable(f"{self._topic}: no broker leads any of its partitions", hint="Try again")
            if passed >= self._connection.timeout_s:
                raise no_answer_error(self._connection, self._listener, self._topic)
            time.sleep(_POLL_TIMEOUT_S)
            self.identity()
            seconds = min(seconds * 1.5, self._connection.timeout_s - passed + _POLL_TIMEOUT_S)  # it may be slow
        self._silent = silent
        return dict(sorted(found.items()))

    def seek(self, positions: Mapping[int, int]) -> None:
        kafka = load_confluent_kafka()
        consumer = self._open_consumer()
        consumer.unassign()
        consumer.assign([kafka.TopicPartition(self._topic, number, offset) for number, offset in positions.items()])

    def poll(self, limit: int, timeout_s: float) -> PollResult:
        kafka = load_confluent_kafka()
        consumer = self._open_consumer()
        deadline = time.monotonic() + timeout_s
        records: list[RawMetadataTopicRecord] = []
        reached: dict[int, int] = {}
        while not records and not reached:
            for message in consumer.consume(limit, min(_POLL_TIMEOUT_S, timeout_s)):
                error = message.error()
                if error is None:
                    records.append(RawMetadataTopicRecord(message.partition(), message.offset(), message.key(), message.value()))
                elif error.code() == kafka.KafkaError._PARTITION_EOF:
                    reached[message.partition()] = message.offset()
                elif not _is_transient_error(error):
                    raise store_error_from_kafka_error(error, self._connection.bootstrap_servers, self._topic)
            refusal = self._listener.tls_or_login_error(self._connection.bootstrap_servers, self._topic)
            if refusal is not None:
                raise refusal
            if time.monotonic() >= deadline:
                break
        if records or reached:
            self._listener.clear_error()
        return PollResult(records, reached)

    def append(self, partition: int, value: bytes) -> AppendedOffset:
        kafka = load_confluent_kafka()
        producer = self._open_producer()
        what = f"append to {self._topic}-{partition}"
        if partition not in self._writable:
            raise Refused(f"{what}: the partition does not exist")
        answers: list[tuple[Any, Any]] = []
        deadline = time.monotonic() + 2 * self._connection.timeout_s
        try:
            producer.produce(self._topic, value=value, partition=partition, on_delivery=lambda *answer: answers.append(answer))
            while not answers and time.monotonic() < deadline:
                producer.poll(_POLL_TIMEOUT_S)
                refusal = self._listener.tls_or_login_error(self._connection.bootstrap_servers, what)
                if refusal is not None and not answers:
                    self._drop_producer()
                    raise refusal
        except kafka.KafkaException as raised:
            self._drop_producer()
            raise store_error_from_kafka_error(raised.args[0], self._connection.bootstrap_servers, what) from None
        if not answers:
            self._drop_producer()
            raise Unavailable(f"{what}: no answer", hint="The record may have been written; read the topic to find out")
        error, message = answers[0]
        if error is None:
            self._listener.clear_error()
            return int(message.offset())
        if error.fatal():
            self._drop_producer()
        received = self._listener.most_severe_error if error.name() == "_MSG_TIMED_OUT" else None
        found = store_error_from_kafka_error(received or error, self._connection.bootstrap_servers, what)
        if isinstance(found, Unavailable):
            raise Unavailable(found.message, hint="The record may have been written; read the topic to find out")
        raise found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self._drop_producer()
        self._consumer = self._admin = None

    def _fetch_first_and_end_offsets(self, partitions: Collection[int], timeout_s: float) -> dict[int, FirstAndEndOffsets]:
        """Return first and end offset of each partition whose leader answers within ``timeout_s`` seconds. Each leader gets its own
        request, so that a slow one does not delay the others.
        """
        kafka = load_confluent_kafka()
        admin = self._admin_client()
        admin.poll(0)
        spec, isolation = kafka.admin.OffsetSpec, kafka.IsolationLevel.READ_UNCOMMITTED
        asked = []
        for leader in sorted({self._leaders[number] for number in partitions}):
            led = [kafka.TopicPartition(self._topic, number) for number in partitions if self._leaders[number] == leader]
            asked += [
                admin.list_offsets(dict.fromkeys(led, which), isolation_level=isolation, request_timeout=timeout_s)
                for which in (spec.earliest(), spec.latest())
            ]
        deadline = time.monotonic() + timeout_s
        answers: dict[int, list[int]] = {number: [] for number in partitions}
        for futures in asked:
            for where, future in futures.items():
                try:
                    offset = int(future.result(max(0.0, deadline - time.monotonic())).offset)
                    answers[where.partition] += [offset] if offset >= 0 else []  # librdkafka's own number where nobody has answered
                except kafka.KafkaException as raised:
                    detail = store_error_from_kafka_error(raised.args[0], self._connection.bootstrap_servers, self._topic)
                    if not isinstance(detail, Unavailable):
                        raise detail from None
                except TimeoutError:
                    pass
        return {number: FirstAndEndOffsets(*both) for number, both in answers.items() if len(both) == 2}

    def _request_topic_metadata(self, client: Any) -> Any:
        """Return the cluster's current metadata about this topic."""
        return self._retry_request(lambda seconds: [client.poll(0), client.list_topics(self._topic, timeout=seconds)][1])

    def _retry_request(self, send_once: Any) -> Any:
        """Call ``send_once`` until it returns, and return its result. Each call receives the seconds that the attempt may take. Raises
        Unavailable if all attempts take longer than the connection's ``timeout_s``.
        """
        return retry_until_answered(self._connection, self._listener, self._topic, send_once)

    def _admin_client(self) -> Any:
        """Return the admin client, created at the first call."""
        if self._admin is None:
            self._admin = create_kafka_client(
                lambda: load_confluent_kafka().admin.AdminClient(self._connection.client_settings(self._listener))
            )
        return self._admin

    def _open_consumer(self) -> Any:
        """Return the consumer, created at the first call."""
        if self._consumer is None:
            settings = self._connection.client_settings(
                self._listener,
                group_id=_CONSUMER_GROUP,
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                isolation_level="read_uncommitted",
                auto_offset_reset="error",
                enable_partition_eof=True,
                fetch_wait_max_ms=100,
                queued_max_messages_kbytes=_MAX_QUEUED_KIB,
            )
            self._consumer = create_kafka_client(lambda: load_confluent_kafka().Consumer(settings))
        return self._consumer

    def _open_producer(self) -> Any:
        """Return the producer, created at the first call. Raises Refused if the topic does not exist."""
        if self._producer is None:
            settings = self._connection.client_settings(
                self._listener,
                enable_idempotence=True,
                acks="all",
                linger_ms=0,
                message_timeout_ms=self._connection.producer_delivery_timeout_ms,
            )
            producer = create_kafka_client(lambda: load_confluent_kafka().Producer(settings))
            # A producer waits long for a topic that is not there; who asks first is told at once.
            found = self._request_topic_metadata(producer).topics[self._topic]
            if found.error is not None:
                raise store_error_from_kafka_error(found.error, self._connection.bootstrap_servers, f"append to {self._topic}")
            self._producer, self._writable = producer, frozenset(found.partitions)
        return self._producer

    def _drop_producer(self) -> None:
        """Drop the producer and its unsent records. Records that were sent already may still arrive."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        with suppress(load_confluent_kafka().KafkaException):  # it may be beyond help
            producer.purge()
            producer.flush(0)


def uuid_to_bytes(uuid: Any) -> bytes:
    """Convert confluent-kafka's Uuid to 16 bytes. Its own text form uses another base64 alphabet than Kafka's."""
    return struct.pack(">qq", uuid.get_most_significant_bits(), uuid.get_least_significant_bits())


_TRANSIENT_ERRORS = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "LEADER_NOT_AVAILABLE", "GROUP_AUTHORIZATION_FAILED")


def _is_transient_error(error: Any) -> bool:
    """Return whether librdkafka recovers from this error by itself. Includes errors about the group coordinator, which is not used here."""
    return bool(error.retriable()) or error.name() in _TRANSIENT_ERRORS
