"""Ports for a consumer's brokers (BrokerClient) and its consumer group (GroupClient), and the membership in the group. A group's client
never reads a record.

Conformance: tests/contract/test_broker_log.py, tests/contract/test_group_client.py.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from compactor.adapters.brokers.topic import uuid_to_bytes
from compactor.adapters.kafka_client import (
    ClientErrorRecorder,
    KafkaConnection,
    LazyKafkaAdminClient,
    create_kafka_client,
    load_confluent_kafka,
    retry_until_answered,
    translate_kafka_error,
)
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.errors import NotFound, Refused, StoreError
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import uuid_text
from compactor.read.records import ConfluentClient, ConfluentError, ConfluentMessage, ConfluentPosition, Place

_GROUP = "tiered-consumer"
"""A group id, which librdkafka requires. No group is joined, and no offset is committed."""


_IGNORED_ERRORS = ("GROUP_AUTHORIZATION_FAILED", "UNKNOWN")
"""Errors to ignore: of the group coordinator, which librdkafka looks for and nobody needs, and of brokers that have just started."""


_TRUNCATION_TEXT = re.compile(r"truncation detected .*broker end offset is ([0-9]+)")
"""librdkafka reports the offset in the text of its error only."""


_RETRY_S = 0.002

T = TypeVar("T")


class LogStartAndEndOffset(NamedTuple):
    """Bounds of a partition; the end is exclusive."""

    start: int
    end: int


@dataclass(frozen=True)
class FetchResult:
    """Messages, ascending by offset within each partition, and partitions that can no longer be read at their offsets, which are not
    fetched any further.

    out_of_range: the broker does not have the offset.
    truncated: the log was truncated below the offset that was read; with the offset (exclusive) up to which it still holds what was read.
    compacted: brokers compact the topic; with the first offset that messages leave out between the requested offset and the end that the
        log had then. Reported once, and only if the leader epoch of the record before was given. Control records leave out offsets, too.
    """

    messages: Sequence[ConfluentMessage] = ()
    out_of_range: Sequence[TopicPartition] = ()
    truncated: Mapping[TopicPartition, int] = field(default_factory=dict)
    compacted: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass
class _CollectedMessages:
    messages: list[ConfluentMessage] = field(default_factory=list)
    out_of_range: list[TopicPartition] = field(default_factory=list)
    truncated: dict[TopicPartition, int] = field(default_factory=dict)
    compacted: dict[TopicPartition, int] = field(default_factory=dict)


class BrokerClient(Protocol):
    """For one thread. Methods raise Unavailable if the broker fails temporarily, and Refused if it refuses the request (``fetch_messages``
    raises Refused only).
    """

    def start_reading_from(
        self, offsets: Mapping[TopicPartition, int], previous_epochs: Mapping[TopicPartition, int] | None = None
    ) -> None:
        """Start to read these partitions, in addition to those being read; of the latter, a given one continues at its new offset.

        :param previous_epochs: leader epoch of the record before the offset, with which the broker's log is compared.
        """

    def stop_reading(self, partitions: Iterable[TopicPartition]) -> None: ...

    def fetch_messages(self, max_messages: int, timeout_s: float) -> FetchResult:
        """Waits up to ``timeout_s`` for the first message."""

    def offset_bounds(self, partition: TopicPartition) -> LogStartAndEndOffset: ...

    def topic_id(self, partition: TopicPartition) -> TopicId:
        """Id as Kafka prints it; empty for brokers before 2.8."""

    def offset_for_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """First record whose timestamp is ``timestamp_ms`` or later; None if there is none."""

    def close(self) -> None: ...


class ConfluentBrokerClient:
    """BrokerClient over confluent-kafka (the extra ``kafka``), which is imported on first use."""

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
        ends = {name: self.offset_bounds(name).end for name in previous_epochs.keys() & offsets.keys()}
        first = [kafka.TopicPartition(*name, ends.get(name, offset)) for name, offset in offsets.items()]
        self._expected |= {name: range(offsets[name], end) for name, end in ends.items()}
        self._open_client().incremental_assign(first)
        self._names |= set(offsets)
        self._seek_partitions_once_assigned(
            [kafka.TopicPartition(*name, offsets[name], leader_epoch=previous_epochs[name]) for name in offsets if name in previous_epochs]
        )

    def _seek_partitions_once_assigned(self, positions: Sequence[ConfluentPosition]) -> None:
        """Seek, and wait until the client has accepted each position: a seek is refused until the assignment takes effect."""
        kafka, deadline = load_confluent_kafka(), time.monotonic() + self._connection.timeout_s
        for place in positions:
            while True:
                try:
                    self._open_client().seek(place)
                    break
                except kafka.KafkaException as error:
                    if error.args[0].name() != "_STATE" or time.monotonic() >= deadline:
                        raise translate_kafka_error(
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
            reported = translate_kafka_error(error, self._connection.bootstrap_servers, f"{message.topic()}-{message.partition()}")
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
        """Return whether brokers may compact a record once its segment is sealed: ``cleanup.policy`` contains ``compact``,
        ``min.compaction.lag.ms`` is 0. False if the settings may not be read, or no broker answers.
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

    def offset_bounds(self, partition: TopicPartition) -> LogStartAndEndOffset:
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
        try:
            return retry_until_answered(self._connection, self._listener, f"offsets of {partition}", send_request)
        except NotFound as error:
            raise StoreError(error.message, hint=error.hint) from None

    def _open_client(self) -> ConfluentClient:
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


# ---- a consumer's part in its group ------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)


class OffsetWithLeaderEpoch(NamedTuple):
    """Offset of the next record, and leader epoch of the record before it."""

    offset: int
    leader_epoch: int | None = None


Offsets = Mapping[TopicPartition, OffsetWithLeaderEpoch]


@dataclass(frozen=True)
class AutoCommitOptions:
    """Rules for committing offsets without a call of ``commit``.

    auto_commit: commit stored offsets every ``interval_s`` seconds, on revocation and on ``close``.
    auto_store: store the offset after each returned record, when the consumer is called the next time.
    """

    auto_commit: bool = True
    interval_s: float = 5.0
    auto_store: bool = True


@dataclass
class OffsetCommitTracker:
    """Offsets of a group member's partitions: to commit (stored), sent to commit or committed before this member got the partition
    (requested), and known to be committed (confirmed).
    """

    stored: dict[TopicPartition, OffsetWithLeaderEpoch] = field(default_factory=dict)
    requested: dict[TopicPartition, OffsetWithLeaderEpoch] = field(default_factory=dict)
    confirmed: dict[TopicPartition, OffsetWithLeaderEpoch] = field(default_factory=dict)

    def assume_committed(self, offsets: Offsets) -> None:
        """Treat start offsets as committed, so that an offset is committed only after records were read."""
        self.remove_partitions(offsets)
        self.requested.update(offsets)
        self.confirmed.update(offsets)

    def remove_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        for name in list(partitions):
            for known in (self.stored, self.requested, self.confirmed):
                known.pop(name, None)

    def offsets_to_commit(self) -> Offsets:
        """Stored offsets for which no request was sent yet."""
        return {name: at for name, at in self.stored.items() if self.requested.get(name) != at}

    def offsets_without_confirmed_commit(self, partitions: Collection[TopicPartition]) -> Offsets:
        """A commit that was requested last and not confirmed may have taken effect: an offset before it must be committed again."""
        known = {name: at for name, at in self.confirmed.items() if self.requested.get(name) == at}
        return {name: at for name, at in self.stored.items() if name in partitions and known.get(name) != at}


@dataclass(frozen=True)
class RebalanceCallbacks:
    """Functions of the application. They receive the consumer and the positions of added or removed partitions."""

    on_assign: Callable[[Any, list[Place]], None] | None = None
    on_revoke: Callable[[Any, list[Place]], None] | None = None
    on_lost: Callable[[Any, list[Place]], None] | None = None


@dataclass(frozen=True)
class MembershipCallbacks:
    """Functions of a consumer that its GroupMembership calls. drop_queued_records: also stops reading the partitions."""

    consumer: Any
    positions: Callable[[], Offsets]
    drop_queued_records: Callable[[Collection[TopicPartition]], None]
    remove_partitions: Callable[[Collection[TopicPartition]], None]


class GroupMembership:
    """Membership of a consumer in a group. It commits the offsets of returned records before partitions are given up.

    added: assigned partitions for which the consumer must still determine where reading begins.
    """

    def __init__(self, client: GroupClient, options: AutoCommitOptions, hooks: MembershipCallbacks) -> None:
        self._client = client
        self._options = options
        self._hooks = hooks
        self._callbacks = RebalanceCallbacks()
        self._ledger = OffsetCommitTracker()
        self._next_commit_s = time.monotonic() + options.interval_s
        self.added: list[TopicPartition] = []

    # ---- the group -----------------------------------------------------------------------------------------------------------

    def subscribe(self, topics: Sequence[str], callbacks: RebalanceCallbacks) -> None:
        self._callbacks = callbacks
        self._client.subscribe(topics, self)

    def unsubscribe(self) -> None:
        self._client.unsubscribe()

    def poll_rebalances(self) -> Sequence[ErrorMessage]:
        errors = self._client.poll_rebalances()
        if self._options.auto_commit and time.monotonic() >= self._next_commit_s:
            self._next_commit_s = time.monotonic() + self._options.interval_s
            self._store_returned_offsets()
            self._request_commit(self._ledger.offsets_to_commit(), wait_for_answer=False)
        return errors

    def start_positions(self) -> list[Place]:
        """Committed offsets, or positions without an offset if the group has none."""
        committed = self._client.committed_offsets(self.added)
        return [Place(*name, *committed[name]) if name in committed else Place(*name) for name in self.added]

    def notify_assigned(self, places: list[Place]) -> None:
        if self._callbacks.on_assign is not None:
            self._callbacks.on_assign(self._hooks.consumer, places)

    def assume_committed(self, offsets: Offsets) -> None:
        self._ledger.assume_committed(offsets)

    def close(self) -> None:
        try:
            self._commit_before_revocation(self._hooks.positions())
        finally:
            self._client.close()

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.added += partitions

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            self._hooks.drop_queued_records(partitions)
            self._commit_before_revocation(partitions)
            if self._callbacks.on_revoke is not None:
                self._callbacks.on_revoke(self._hooks.consumer, self._positions_of_partitions(partitions))
        finally:
            self._remove_partitions(partitions)

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        try:
            self._hooks.drop_queued_records(partitions)
            callback = self._callbacks.on_lost or self._callbacks.on_revoke
            if callback is not None:
                callback(self._hooks.consumer, self._positions_of_partitions(partitions))
        finally:
            self._remove_partitions(partitions)

    def _positions_of_partitions(self, partitions: Sequence[TopicPartition]) -> list[Place]:
        at = self._hooks.positions()
        return [Place(*name, *at[name]) if name in at else Place(*name) for name in partitions]

    def _remove_partitions(self, partitions: Collection[TopicPartition]) -> None:
        self.added = [name for name in self.added if name not in partitions]
        self._ledger.remove_partitions(partitions)
        self._hooks.remove_partitions(partitions)

    # ---- offsets -------------------------------------------------------------------------------------------------------------

    def store_offsets(self, offsets: Offsets) -> None:
        self._ledger.stored.update(offsets)

    def commit(self, offsets: Offsets | None, *, wait: bool) -> Offsets:
        """Return the committed offsets. None: the stored ones that are not known to be committed. ``wait``: for the coordinator's answer.
        Raises Unavailable, Refused.
        """
        if offsets is None:
            self._store_returned_offsets()
            offsets = self._ledger.offsets_without_confirmed_commit(self._ledger.stored)
        self._request_commit(offsets, wait_for_answer=wait)
        return offsets

    def committed_offsets(self, partitions: Collection[TopicPartition]) -> Offsets:
        return self._client.committed_offsets(partitions)

    def _store_returned_offsets(self) -> None:
        if self._options.auto_store:
            # Where nothing was read yet there is nothing to store; after that, a position that was sought back to counts, too.
            known = self._ledger.confirmed | self._ledger.stored
            self._ledger.stored.update({name: at for name, at in self._hooks.positions().items() if known.get(name) != at})

    def _request_commit(self, offsets: Offsets, *, wait_for_answer: bool) -> None:
        if not offsets:
            return
        self._client.commit(offsets, wait=wait_for_answer)
        self._ledger.requested.update(offsets)
        if wait_for_answer:
            self._ledger.confirmed.update(offsets)

    def _commit_before_revocation(self, partitions: Collection[TopicPartition]) -> None:
        """Commit, if auto-commit is on. Errors are logged; the partitions' next reader then reads some records again."""
        if not self._options.auto_commit:
            return
        self._store_returned_offsets()
        try:
            self._request_commit(self._ledger.offsets_without_confirmed_commit(partitions), wait_for_answer=True)
        except StoreError as error:
            _log.warning("offsets of %d partitions were not committed before they were given up: %s", len(partitions), error)


GROUP_PROPERTIES: Final = frozenset(
    {
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "partition.assignment.strategy",
        "session.timeout.ms",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "coordinator.query.interval.ms",
    }
)
"""Properties of librdkafka that concern the membership only."""


COMMIT_RETRY_S: Final = 5.0
"""Seconds for which a commit is repeated while the client joins the group again."""
_REJOINING_ERRORS: Final = ("REBALANCE_IN_PROGRESS", "ILLEGAL_GENERATION", "STALE_MEMBER_EPOCH")
"""Errors of a commit while the client joins the group again, which a cooperative member does without giving up its partitions. The last one
is of the protocol of KIP-848.
"""
_RETRY_DELAY_S: Final = 0.02


ErrorMessage = Any
"""A message of confluent-kafka that reports an error of the group."""


class RebalanceListener(Protocol):
    """Called from ``GroupClient.poll_rebalances`` and ``GroupClient.close``."""

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None: ...

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Another member gets the partitions when this method returns; offsets may be committed until then."""

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Another member may hold the partitions already. Their offsets can no longer be committed."""


class GroupClient(Protocol):
    """For one thread. Methods raise Unavailable if the brokers fail temporarily, and Refused if they refuse a request."""

    def subscribe(self, topics: Sequence[str], listener: RebalanceListener) -> None:
        """A topic that begins with ``^`` is a regular expression."""

    def unsubscribe(self) -> None: ...

    def poll_rebalances(self) -> Sequence[ErrorMessage]:
        """Call the listener, whose exception is raised after the change took effect, and return the errors that have arrived. If it is
        called less often than ``max.poll.interval.ms``, the coordinator gives the partitions to others.
        """

    def commit(self, offsets: Mapping[TopicPartition, OffsetWithLeaderEpoch], *, wait: bool) -> None:
        """Wait with ``wait`` for the coordinator's answer, and raise its error; else only ``on_commit`` receives errors."""

    def committed_offsets(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
        """Partitions without a committed offset are missing."""

    def close(self) -> None: ...


class ConfluentGroupClient:
    """GroupClient over confluent-kafka. Its partitions are paused before they are assigned, so that the client never fetches them.

    :param properties: settings of librdkafka, and the callbacks ``on_commit`` and ``stats_cb``.
    """

    def __init__(self, connection: KafkaConnection, group_id: str, properties: Mapping[str, Any] | None = None) -> None:
        self._connection = connection
        properties = dict(properties or {})
        strategies = str(properties.get("partition.assignment.strategy", ""))
        self._is_incremental = "cooperative" in strategies or properties.get("group.protocol") == "consumer"
        self._errors = ClientErrorRecorder()
        self._raised: BaseException | None = None
        settings = connection.client_settings(
            self._errors, group_id=group_id, enable_auto_commit=False, enable_auto_offset_store=False, auto_offset_reset="error"
        )
        self._client = create_kafka_client(lambda: load_confluent_kafka().Consumer(settings | properties))

    def subscribe(self, topics: Sequence[str], listener: RebalanceListener) -> None:
        def on_assign(client: ConfluentClient, positions: list[ConfluentPosition]) -> None:
            self._assign_partitions_paused(positions)
            listener.on_partitions_assigned(_to_topic_partitions(positions))

        self._client.subscribe(
            list(topics),
            on_assign=on_assign,
            on_revoke=lambda _, places: self._report_revoked_partitions(places, listener.on_partitions_revoked),
            on_lost=lambda _, places: self._report_revoked_partitions(places, listener.on_partitions_lost),
        )

    def unsubscribe(self) -> None:
        self._client.unsubscribe()

    def poll_rebalances(self) -> Sequence[ErrorMessage]:
        message = self._client.poll(0)
        self._raise_pending_listener_error()
        refusal = self._errors.tls_or_login_error(self._connection.bootstrap_servers, "joining the group")
        if refusal is not None:
            raise refusal
        return [] if message is None else [message]

    def commit(self, offsets: Mapping[TopicPartition, OffsetWithLeaderEpoch], *, wait: bool) -> None:
        kafka = load_confluent_kafka()
        places = [
            kafka.TopicPartition(*name, at.offset, leader_epoch=-1 if at.leader_epoch is None else at.leader_epoch)
            for name, at in offsets.items()
        ]
        deadline = time.monotonic() + COMMIT_RETRY_S
        while (error := self._try_commit_positions(places, wait_for_answer=wait)) is not None:
            if error.name() not in _REJOINING_ERRORS or time.monotonic() >= deadline:
                raise translate_kafka_error(error, self._connection.bootstrap_servers, "committing offsets")
            time.sleep(_RETRY_DELAY_S)

    def committed_offsets(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
        kafka = load_confluent_kafka()
        places = [kafka.TopicPartition(*name) for name in partitions]

        def request_committed_offsets(timeout_s: float) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
            found = self._client.committed(places, timeout=timeout_s)
            for place in found:
                if place.error is not None:
                    raise kafka.KafkaException(place.error)
            return {
                TopicPartition(at.topic, at.partition): OffsetWithLeaderEpoch(at.offset, at.leader_epoch) for at in found if at.offset >= 0
            }

        return retry_until_answered(self._connection, self._errors, "committed offsets", request_committed_offsets) if places else {}

    def close(self) -> None:
        self._client.close()
        self._raise_pending_listener_error()

    def _assign_partitions_paused(self, positions: list[ConfluentPosition]) -> None:
        kafka, client = load_confluent_kafka(), self._client
        client.position(positions)  # the client pauses only partitions that it knows
        client.pause(positions)
        begin = [kafka.TopicPartition(place.topic, place.partition, 0) for place in positions]
        if self._is_incremental:
            client.incremental_assign(begin)
        else:
            client.assign(begin)

    def _report_revoked_partitions(
        self, positions: list[ConfluentPosition], listener_method: Callable[[Sequence[TopicPartition]], None]
    ) -> None:
        """Keep the listener's error for ``poll_rebalances``: the client must take the partitions away in any case."""
        try:
            listener_method(_to_topic_partitions(positions))
        except BaseException as error:  # noqa: BLE001 - raised by poll_rebalances
            self._raised = error

    def _raise_pending_listener_error(self) -> None:
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _try_commit_positions(self, positions: list[ConfluentPosition], *, wait_for_answer: bool) -> ConfluentError | None:
        try:
            done = self._client.commit(offsets=positions, asynchronous=not wait_for_answer)
        except load_confluent_kafka().KafkaException as error:
            return error.args[0]
        return next((place.error for place in done or () if place.error is not None), None)


def _to_topic_partitions(positions: Iterable[ConfluentPosition]) -> list[TopicPartition]:
    return [TopicPartition(place.topic, place.partition) for place in positions]
