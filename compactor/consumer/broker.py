"""Port for the broker's part of a consumer: partitions are read from given offsets; offsets that the broker does not have are reported.

Conformance: tests/contract/test_broker_log.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from compactor.brokers.metadata_topic.codec import uuid_text
from compactor.brokers.metadata_topic.confluent_topic import uuid_to_bytes
from compactor.brokers.metadata_topic.connection import (
    ClientErrorRecorder,
    KafkaConnection,
    LazyKafkaAdminClient,
    load_confluent_kafka,
    retry_until_answered,
    store_error_from_kafka_error,
)
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.consumer.messages import ConfluentClient, ConfluentMessage, ConfluentPosition
from compactor.errors import NotFound, Refused, StoreError
from compactor.model.ids import TopicPartition

_GROUP = "tiered-consumer"
"""A group id, which librdkafka requires. No group is joined, and no offset is committed."""


_IGNORED_ERRORS = ("GROUP_AUTHORIZATION_FAILED", "UNKNOWN")
"""Errors to ignore: of the group coordinator, which librdkafka looks for and nobody needs, and of brokers that have just started."""


_TRUNCATION_TEXT = re.compile(r"truncation detected .*broker end offset is ([0-9]+)")
"""librdkafka reports the offset in the text of its error only."""


_RETRY_S = 0.002

T = TypeVar("T")


class LogStartAndEndOffset(NamedTuple):
    """First offset of a partition, and the offset that its next record gets (the end offset, exclusive), as a broker reports them to a
    consumer.
    """

    start: int
    end: int


@dataclass(frozen=True)
class FetchResult:
    """Result of fetching from a broker: messages, and the partitions that can no longer be read at their offsets. These partitions are not
    fetched any further.

    messages: ascending by offset within each partition.
    out_of_range: partitions whose offset the broker does not have.
    truncated: partitions whose log was truncated below the offset that was read, with the offset (exclusive) up to which the broker's log
        still holds the records that were read.
    compacted: partitions of a topic that brokers compact, whose messages leave out offsets between the first offset that was asked for and
        the end that the log had then; with the first such offset. Reported once, and only if the leader epoch of the record before was
        given. Control records leave out offsets, too.
    """

    messages: Sequence[ConfluentMessage] = ()
    out_of_range: Sequence[TopicPartition] = ()
    truncated: Mapping[TopicPartition, int] = field(default_factory=dict)
    compacted: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass
class _CollectedMessages:
    """Messages and unreadable partitions collected during one call of ``fetch_messages``."""

    messages: list[ConfluentMessage] = field(default_factory=list)
    out_of_range: list[TopicPartition] = field(default_factory=list)
    truncated: dict[TopicPartition, int] = field(default_factory=dict)
    compacted: dict[TopicPartition, int] = field(default_factory=dict)


class BrokerClient(Protocol):
    """Client that reads records and offsets of partitions from a broker, for use by one thread.

    Methods raise Unavailable if the broker fails temporarily, and Refused if it refuses the request; ``fetch_messages`` raises Refused
    only.
    """

    def start_reading_from(
        self, offsets: Mapping[TopicPartition, int], previous_epochs: Mapping[TopicPartition, int] | None = None
    ) -> None:
        """Start to read these partitions, each from its offset, in addition to those being read. A partition that is being read already
        continues at the given offset.

        :param previous_epochs: leader epoch of the record before the offset, where known; the broker's log is compared with it.
        """

    def stop_reading(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these partitions. Partitions that are not being read are ignored."""

    def fetch_messages(self, max_messages: int, timeout_s: float) -> FetchResult:
        """Return the messages that have arrived, at most ``max_messages`` of them. Waits up to ``timeout_s`` seconds for the first one."""

    def log_start_and_end_offset(self, partition: TopicPartition) -> LogStartAndEndOffset:
        """Return the partition's first offset, and the offset that its next record gets (the end offset, exclusive)."""

    def topic_id(self, partition: TopicPartition) -> TopicId:
        """Return the topic's id as Kafka prints it; empty for brokers before 2.8."""

    def offset_for_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the offset of the first record whose timestamp is ``timestamp_ms`` or later, or None if there is no such record."""

    def close(self) -> None: ...


class ConfluentBrokerClient:
    """BrokerClient over confluent-kafka (the extra ``kafka``), which is imported on first use. Messages are objects of confluent-kafka's
    class ``Message``.

    :param read_committed: use the isolation level read_committed; otherwise read_uncommitted.
    """

    def __init__(self, connection: KafkaConnection, *, read_committed: bool = True) -> None:
        self._connection = connection
        self._committed = read_committed
        self._listener = ClientErrorRecorder()
        self._admin = LazyKafkaAdminClient(connection)
        self._client: Any = None
        self._names: set[TopicPartition] = set()
        self._expected: dict[TopicPartition, range] = {}
        """The offsets that the log had when reading began, and that have not come yet."""
        self._compacted_topics: dict[str, bool] = {}

    def start_reading_from(
        self, offsets: Mapping[TopicPartition, int], previous_epochs: Mapping[TopicPartition, int] | None = None
    ) -> None:
        kafka, previous_epochs = load_confluent_kafka(), previous_epochs or {}
        self.stop_reading(offsets)
        if not offsets:
            return
        # librdkafka compares leader epochs where a partition is sought, not where it is assigned, and fetches meanwhile. Assigned at the
        # sought offset, a partition that a truncation has cut below it may be reported as out of range instead. (A logical offset such
        # as OFFSET_END is no way out: its answer may arrive after the seek, and then takes the place of the sought offset.)
        ends = {name: self.log_start_and_end_offset(name).end for name in previous_epochs.keys() & offsets.keys()}
        first = [kafka.TopicPartition(*name, ends.get(name, offset)) for name, offset in offsets.items()]
        self._expected |= {name: range(offsets[name], end) for name, end in ends.items()}
        self._open_client().incremental_assign(first)
        self._names |= set(offsets)
        self._seek_partitions_once_assigned(
            [kafka.TopicPartition(*name, offsets[name], leader_epoch=previous_epochs[name]) for name in offsets if name in previous_epochs]
        )

    def _seek_partitions_once_assigned(self, positions: Sequence[ConfluentPosition]) -> None:
        """Move the client to these positions, and wait until the client has accepted each: a seek is refused until the assignment takes
        effect. Positions carry leader epochs, with which the broker checks for truncation.
        """
        kafka, deadline = load_confluent_kafka(), time.monotonic() + self._connection.timeout_s
        for place in positions:
            while True:
                try:
                    self._open_client().seek(place)
                    break
                except kafka.KafkaException as error:
                    if error.args[0].name() != "_STATE" or time.monotonic() >= deadline:
                        raise store_error_from_kafka_error(
                            error.args[0], self._connection.bootstrap_servers, f"{place.topic}-{place.partition}"
                        ) from None
                time.sleep(_RETRY_S)  # the assignment is not in force yet

    def stop_reading(self, partitions: Iterable[TopicPartition]) -> None:
        kafka = load_confluent_kafka()
        known = self._names & set(partitions)
        if known:
            self._open_client().incremental_unassign([kafka.TopicPartition(*name) for name in known])
            self._names -= known
            self._expected = {name: left for name, left in self._expected.items() if name not in known}

    def fetch_messages(self, max_messages: int, timeout_s: float) -> FetchResult:
        found = _CollectedMessages()
        for message in self._open_client().consume(max_messages, timeout_s):
            error = message.error()
            if error is None:
                found.messages.append(message)
                self._note_left_out_offsets(message, found)
                continue
            reported = store_error_from_kafka_error(error, self._connection.bootstrap_servers, f"{message.topic()}-{message.partition()}")
            if isinstance(reported, NotFound):
                name = TopicPartition(message.topic(), message.partition())
                cut = _TRUNCATION_TEXT.search(error.str())
                if name in self._names and cut:
                    found.truncated[name] = int(cut[1])
                elif name in self._names:
                    found.out_of_range.append(name)
            elif isinstance(reported, Refused) and error.name() not in _IGNORED_ERRORS:
                raise reported
        self.stop_reading([*found.out_of_range, *found.truncated])
        refusal = self._listener.tls_or_login_error(self._connection.bootstrap_servers, "reading")
        if refusal is not None and not found.messages:
            raise refusal
        return FetchResult(found.messages, found.out_of_range, found.truncated, found.compacted)

    def _note_left_out_offsets(self, message: ConfluentMessage, found: _CollectedMessages) -> None:
        """Add a message's partition to ``found.compacted`` if the message leaves out expected offsets, and brokers compact its topic."""
        name, offset = TopicPartition(message.topic(), message.partition()), message.offset()
        expected = self._expected.get(name)
        if expected is None:
            return
        if offset > expected.start and self._is_compacted(name.topic):
            found.compacted[name] = expected.start
        if name in found.compacted or offset + 1 >= expected.stop:
            del self._expected[name]
        else:
            self._expected[name] = range(offset + 1, expected.stop)

    def _is_compacted(self, topic: str) -> bool:
        """Return whether brokers may compact a record as soon as its segment is sealed: ``cleanup.policy`` contains ``compact``, and
        ``min.compaction.lag.ms`` is 0. False if this user may not read the settings, or no broker answers.
        """
        if topic not in self._compacted_topics:
            kafka, seconds = load_confluent_kafka(), self._connection.timeout_s
            resource, client = kafka.admin.ConfigResource(kafka.admin.ResourceType.TOPIC, topic), self._admin.client
            try:
                described = self._admin.send_request(
                    f"settings of {topic}", lambda: client.describe_configs([resource], request_timeout=seconds)
                )
            except StoreError:
                return False
            (settings,) = described.values()
            policy, lag = settings["cleanup.policy"].value or "", settings["min.compaction.lag.ms"].value or "0"
            self._compacted_topics[topic] = "compact" in policy and int(lag) == 0
        return self._compacted_topics[topic]

    def log_start_and_end_offset(self, partition: TopicPartition) -> LogStartAndEndOffset:
        kafka = load_confluent_kafka()
        place = kafka.TopicPartition(*partition)
        consumer = self._open_client()
        return LogStartAndEndOffset(
            *self._retry_offset_request(partition, lambda seconds: consumer.get_watermark_offsets(place, timeout=seconds))
        )

    def topic_id(self, partition: TopicPartition) -> TopicId:
        wanted, client, seconds = load_confluent_kafka().TopicCollection([partition.topic]), self._admin.client, self._connection.timeout_s
        described = self._admin.send_request(f"describe {partition.topic}", lambda: client.describe_topics(wanted, request_timeout=seconds))
        raw = uuid_to_bytes(described[partition.topic].topic_id)
        return uuid_text(raw) if any(raw) else EMPTY_TOPIC_ID

    def offset_for_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        kafka = load_confluent_kafka()
        place = kafka.TopicPartition(*partition, timestamp_ms)
        consumer = self._open_client()
        (found,) = self._retry_offset_request(partition, lambda seconds: consumer.offsets_for_times([place], timeout=seconds))
        return None if found.offset < 0 else int(found.offset)

    def close(self) -> None:
        self._admin.close()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _retry_offset_request(self, partition: TopicPartition, send_request: Callable[[float], T]) -> T:
        """Call ``send_request`` with a timeout in seconds until it succeeds, for at most the connection's timeout, and return its result.

        Raises Unavailable, Refused or StoreError with a message that names the partition.
        """
        try:
            return retry_until_answered(self._connection, self._listener, f"offsets of {partition}", send_request)
        except NotFound as error:
            raise StoreError(error.message, hint=error.hint) from None

    def _open_client(self) -> ConfluentClient:
        """Return the confluent-kafka consumer, which belongs to no group. Create it if this is the first call."""
        if self._client is None:
            settings = self._connection.client_settings(
                self._listener,
                group_id=_GROUP,
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                auto_offset_reset="error",
                isolation_level="read_committed" if self._committed else "read_uncommitted",
            )
            self._client = load_confluent_kafka().Consumer(settings)
        return self._client
