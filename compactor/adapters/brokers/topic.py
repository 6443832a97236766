"""Port to the metadata topic, its client with confluent-kafka, and the token bucket for rounds' records."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from compactor.adapters.brokers.codec import TOPIC
from compactor.adapters.kafka_client import (
    ClientErrorRecorder,
    KafkaConnection,
    RetriedAdminRequest,
    create_kafka_client,
    load_confluent_kafka,
    no_answer_error,
    retry_until_answered,
    translate_kafka_error,
)
from compactor.constants import TopicId
from compactor.errors import Refused, Unavailable
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import uuid_text
from compactor.tier.ports import MetadataRecordRateLimitDelay


class RawMetadataTopicRecord(NamedTuple):
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class FirstAndEndOffsets(NamedTuple):
    """First existing offset and exclusive end of a metadata partition."""

    start: int
    end: int


@dataclass(frozen=True)
class TopicIdentity:
    """Identity that differs for another cluster and for a topic created again under one name."""

    cluster_id: str
    topic_id: TopicId
    partitions: int


@dataclass(frozen=True)
class PollResult:
    """Records, ascending in each partition. reached: next offset of each partition that was read to its end, also past control records."""

    records: Sequence[RawMetadataTopicRecord]
    reached: Mapping[int, int]


class MetadataTopic(Protocol):
    """Client for the metadata topic. Reads include records of aborted transactions, as brokers do; no offset is committed. All methods
    raise Unavailable (no broker, leader election) and Refused (TLS, SASL, authorization, no such topic).
    """

    @property
    def name(self) -> str: ...

    def identity(self) -> TopicIdentity:
        """Topic's identity, never cached."""

    def bounds(self) -> Mapping[int, FirstAndEndOffsets]:
        """Offsets by partition. Partitions without a leader are missing."""

    def seek(self, positions: Mapping[int, int]) -> None:
        """Set where later polls begin. They read these partitions only."""

    def poll(self, limit: int, timeout_s: float) -> PollResult:
        """Read at most ``limit`` records. Raises NotFound if an offset no longer exists."""

    def append(self, partition: int, value: bytes) -> int:
        """Append a record; return its offset once all in-sync replicas have it. After Unavailable it may be in the topic, at most once."""

    def close(self) -> None: ...


class LocalKeyValueStore(Protocol):
    """Local key-value store whose data may be lost at any time. Methods raise nothing."""

    @property
    def is_writable(self) -> bool: ...

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values, None for absent keys."""

    def entries_with_prefix(self, prefix: bytes) -> dict[bytes, bytes]:
        """Values by key, without the prefix."""

    def write(self, values: Mapping[bytes, bytes], deleted: Sequence[bytes] = ()) -> None:
        """Write and delete in one batch."""

    def delete_all_entries(self, reason: str) -> None: ...


# Token bucket for the records that rounds write: each broker folds every record, and reads all of them again at every start.
#
# 1. A round is admitted if its records fit ``[publish] metadata_records_per_hour``, with the records of the last hour and those that other
#    admitted rounds still have to write. The last hour is counted in the topic itself, which covers restarts and other processes.
# 2. A round larger than the cap is admitted when nothing else was written within the hour.
# 3. As long as a waiting round keeps asking, no later round is admitted, so that large rounds do not starve.


MINUTE_MS = 60_000
MINUTES_PER_HOUR = 60
"""Minutes."""
_HOUR_MS = MINUTES_PER_HOUR * MINUTE_MS
COUNTED_MINUTES = 2 * MINUTES_PER_HOUR
"""Minutes for which records stay counted."""
MAX_SILENCE_MS = 15 * MINUTE_MS
"""A waiting round that has not asked again for so long after its time holds up no other: its partition may be paused."""
MAX_WAITING_MS = 24 * _HOUR_MS
"""A silent round loses its place after this time."""

RecordCountsByMinute = tuple[tuple[int, int], ...]
"""(minute since 1970, records in it), ascending."""


def with_timestamps_added(counts: RecordCountsByMinute, timestamps_ms: Iterable[int], now_ms: int) -> RecordCountsByMinute:
    """Add timestamps, capped at ``now_ms``: they come from the writer's clock."""
    now = now_ms // MINUTE_MS
    found = Counter(dict(counts))
    found.update(min(stamp // MINUTE_MS, now) for stamp in timestamps_ms)
    return tuple(sorted((minute, count) for minute, count in found.items() if minute > now - COUNTED_MINUTES))


def counts_of_last_hour(by_minute: Mapping[int, int], now_ms: int) -> dict[int, int]:
    """Counts of the last hour by minute since 1970, ascending, and of the next hour, in case a clock was set back."""
    now = now_ms // MINUTE_MS
    return {minute: by_minute[minute] for minute in sorted(by_minute) if now - MINUTES_PER_HOUR < minute < now + MINUTES_PER_HOUR}


@dataclass(frozen=True)
class MetadataRecordReservation:
    """Records that a partition still has to write: those of the round with the beginnings of deletions, and those that report their ends.
    The reservation lapses an hour after ``counted_ms`` (the last change), because another process may have taken over.
    """

    round: int
    deletions: int
    counted_ms: int


@dataclass(frozen=True)
class RoundAwaitingAdmission:
    """Round that was not admitted yet. records: the most that it has asked for."""

    records: int
    retry_at_ms: int


@dataclass(frozen=True)
class MetadataTokenBucket:
    """Immutable token bucket of the records per hour: reservations of admitted rounds, and waiting rounds in order of arrival."""

    reserved: Mapping[TopicPartition, MetadataRecordReservation] = field(default_factory=dict)
    waiting: Mapping[TopicPartition, RoundAwaitingAdmission] = field(default_factory=dict)

    def after_admission(
        self, written_by_minute: Mapping[int, int], partition: TopicPartition, record_count: int, max_records_per_hour: int, now_ms: int
    ) -> tuple[MetadataTokenBucket, MetadataRecordRateLimitDelay | None]:
        """Admit a round (None), or determine until when and why it has to wait. An admitted round may ask for more."""
        reserved = {of: one for of, one in self.reserved.items() if now_ms < one.counted_ms + _HOUR_MS}
        waiting = {of: one for of, one in self.waiting.items() if now_ms < one.retry_at_ms + MAX_WAITING_MS}
        mine = reserved.get(partition, MetadataRecordReservation(0, 0, now_ms))
        wanted = max(record_count, waiting[partition].records) if partition in waiting else record_count
        used = counts_of_last_hour(written_by_minute, now_ms)
        others = sum(one.round + one.deletions for one in reserved.values()) - mine.round
        total = sum(used.values()) + others
        first = next((of for of, one in waiting.items() if of == partition or now_ms <= one.retry_at_ms + MAX_SILENCE_MS), partition)
        is_next = first == partition or mine.round > 0
        if is_next and (not total or total + wanted <= max_records_per_hour):
            waiting.pop(partition, None)
            return MetadataTokenBucket(reserved | {partition: replace(mine, round=wanted, counted_ms=now_ms)}, waiting), None
        until = _admission_time_ms(used, wanted, max_records_per_hour) if is_next else waiting[first].retry_at_ms
        waiting[partition] = RoundAwaitingAdmission(wanted, max(until, now_ms + MINUTE_MS))
        return MetadataTokenBucket(reserved, waiting)._keeping_deletions(partition), MetadataRecordRateLimitDelay(
            waiting[partition].retry_at_ms, wanted
        )

    def after_append(
        self, partition: TopicPartition, round_record_count: int, deletion_record_count: int, now_ms: int
    ) -> MetadataTokenBucket:
        return self._with_changed_reservation(partition, -round_record_count, -deletion_record_count, now_ms)

    def after_publication(self, partition: TopicPartition, deletion_record_count: int, now_ms: int) -> MetadataTokenBucket:
        """Release the round's reservation, and reserve the records that report the deletion of its sources."""
        known = self.reserved.get(partition)
        return self if known is None else self._with_changed_reservation(partition, -known.round, deletion_record_count, now_ms)

    def after_round_ended(self, partition: TopicPartition) -> MetadataTokenBucket:
        return replace(self, waiting={of: one for of, one in self.waiting.items() if of != partition})._keeping_deletions(partition)

    def _with_changed_reservation(
        self, partition: TopicPartition, records_change: int, deletions_change: int, now_ms: int
    ) -> MetadataTokenBucket:
        """A partition without a reservation gets none."""
        known = self.reserved.get(partition)
        if known is None:
            return self
        more = MetadataRecordReservation(max(0, known.round + records_change), max(0, known.deletions + deletions_change), now_ms)
        return replace(self, reserved={**self.reserved, partition: more})

    def _keeping_deletions(self, partition: TopicPartition) -> MetadataTokenBucket:
        left = {of: replace(one, round=0) if of == partition else one for of, one in self.reserved.items()}
        return replace(self, reserved={of: one for of, one in left.items() if one.round or one.deletions})


def _admission_time_ms(records_by_minute: Mapping[int, int], record_count: int, max_records_per_hour: int) -> int:
    """Time when the round fits the cap because older records have left the last hour; 0 if now."""
    left, at = sum(records_by_minute.values()), 0
    for minute, count in records_by_minute.items():
        if not left or left + record_count <= max_records_per_hour:
            break
        left -= count
        at = (minute + MINUTES_PER_HOUR) * MINUTE_MS
    return at


_CONSUMER_GROUP = "tiered-compactor"
"""librdkafka wants one; nothing is ever joined or committed."""
_MAX_QUEUED_KIB = 16 << 10
_POLL_TIMEOUT_S = 0.05
_FIRST_TIMEOUT_S = 2.0
"""So long a leader is waited for at first."""
_ELECTION_TIMEOUT_S = 5.0
"""So long a partition that has just lost its leader, or whose leader has died, is waited for; one of which that was so before is not."""


class ConfluentKafkaMetadataTopicClient:
    """MetadataTopic over confluent-kafka, for one thread at a time."""

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
            found |= self._fetch_bounds([number for number in self._leaders if number not in found], seconds)
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
                    raise translate_kafka_error(error, self._connection.bootstrap_servers, self._topic)
            refusal = self._listener.tls_or_login_error(self._connection.bootstrap_servers, self._topic)
            if refusal is not None:
                raise refusal
            if time.monotonic() >= deadline:
                break
        if records or reached:
            self._listener.clear_error()
        return PollResult(records, reached)

    def append(self, partition: int, value: bytes) -> int:
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
            raise translate_kafka_error(raised.args[0], self._connection.bootstrap_servers, what) from None
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
        found = translate_kafka_error(received or error, self._connection.bootstrap_servers, what)
        if isinstance(found, Unavailable):
            raise Unavailable(found.message, hint="The record may have been written; read the topic to find out")
        raise found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        self._drop_producer()
        self._consumer = self._admin = None

    def _fetch_bounds(self, partitions: Collection[int], timeout_s: float) -> dict[int, FirstAndEndOffsets]:
        # Each leader gets its own request, so that a slow one does not delay the others; partitions of leaders that do not answer in time
        # are left out.
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
                    detail = translate_kafka_error(raised.args[0], self._connection.bootstrap_servers, self._topic)
                    if not isinstance(detail, Unavailable):
                        raise detail from None
                except TimeoutError:
                    pass
        return {number: FirstAndEndOffsets(*both) for number, both in answers.items() if len(both) == 2}

    def _request_topic_metadata(self, client: Any) -> Any:
        return self._retry_request(lambda seconds: [client.poll(0), client.list_topics(self._topic, timeout=seconds)][1])

    def _retry_request(self, send_once: Any) -> Any:
        return retry_until_answered(self._connection, self._listener, self._topic, send_once)

    def _admin_client(self) -> Any:
        if self._admin is None:
            self._admin = create_kafka_client(
                lambda: load_confluent_kafka().admin.AdminClient(self._connection.client_settings(self._listener))
            )
        return self._admin

    def _open_consumer(self) -> Any:
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
        """Raises Refused if the topic does not exist."""
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
                raise translate_kafka_error(found.error, self._connection.bootstrap_servers, f"append to {self._topic}")
            self._producer, self._writable = producer, frozenset(found.partitions)
        return self._producer

    def _drop_producer(self) -> None:
        # Drop the producer and its unsent records. Records that were sent already may still arrive.
        producer, self._producer = self._producer, None
        if producer is None:
            return
        with suppress(load_confluent_kafka().KafkaException):  # it may be beyond help
            producer.purge()
            producer.flush(0)


def uuid_to_bytes(uuid: Any) -> bytes:
    """Convert confluent-kafka's Uuid. Its own text form uses another base64 alphabet than Kafka's."""
    return struct.pack(">qq", uuid.get_most_significant_bits(), uuid.get_least_significant_bits())


_TRANSIENT_ERRORS = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_RESOLVE", "LEADER_NOT_AVAILABLE", "GROUP_AUTHORIZATION_FAILED")


def _is_transient_error(error: Any) -> bool:
    # Return whether librdkafka recovers by itself, also from errors about the group coordinator, which is not used here.
    return bool(error.retriable()) or error.name() in _TRANSIENT_ERRORS
