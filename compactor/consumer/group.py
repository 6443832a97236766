"""Port for membership in a consumer group: which partitions this member holds, and the offsets that the group has committed.

Kafka's group coordinator decides. The member never reads a record through this port.

Conformance: tests/contract/test_group_client.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from compactor.brokers.metadata_topic.connection import (
    ClientErrorRecorder,
    KafkaConnection,
    create_kafka_client,
    load_confluent_kafka,
    retry_until_answered,
    store_error_from_kafka_error,
)
from compactor.consumer.messages import ConfluentClient, ConfluentError, ConfluentPosition
from compactor.model.ids import TopicPartition

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


class OffsetWithLeaderEpoch(NamedTuple):
    """A committed position of a consumer group: the offset of the next record, and the leader epoch of the record before it (None if the
    epoch is unknown).
    """

    offset: int
    leader_epoch: int | None = None


class RebalanceListener(Protocol):
    """Receiver of changes of the assignment. Its methods are called from ``GroupClient.poll_rebalances`` and ``GroupClient.close``."""

    def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Accept partitions that this member holds from now on."""

    def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Give up partitions. Another member gets them when this method returns; offsets may be committed until then."""

    def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Give up partitions that another member may hold already. Their offsets can no longer be committed."""


class GroupClient(Protocol):
    """Member of one consumer group, for use by one thread. Methods raise Unavailable if the brokers fail temporarily, and Refused if they
    refuse a request.
    """

    def subscribe(self, topics: Sequence[str], listener: RebalanceListener) -> None:
        """Join the group for these topics; a topic that begins with ``^`` is a regular expression."""

    def unsubscribe(self) -> None:
        """Leave the group."""

    def poll_rebalances(self) -> Sequence[ErrorMessage]:
        """Report changes of the assignment to the listener, and return the errors that have arrived.

        Call this method more often than ``max.poll.interval.ms``: otherwise the coordinator gives the partitions to others. An exception of
        the listener is raised after the change took effect.
        """

    def commit(self, offsets: Mapping[TopicPartition, OffsetWithLeaderEpoch], *, wait: bool) -> None:
        """Commit offsets to the group.

        :param wait: return when the coordinator has answered, and raise its error. Otherwise return at once; errors are reported only to
            the callback ``on_commit``.
        """

    def committed_offsets(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
        """Return the offsets that the group has committed, by partition. Partitions without a committed offset are missing in the
        result.
        """

    def close(self) -> None:
        """Give up all partitions, and leave the group."""


class ConfluentGroupClient:
    """GroupClient over confluent-kafka.

    All its partitions are paused before they are assigned, so that the client never fetches them. Records are read elsewhere.

    :param properties: settings of librdkafka for the membership, and the callbacks ``on_commit`` and ``stats_cb``.
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
            """Assign partitions as paused, and report them to the listener."""
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
                raise store_error_from_kafka_error(error, self._connection.bootstrap_servers, "committing offsets")
            time.sleep(_RETRY_DELAY_S)

    def committed_offsets(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
        kafka = load_confluent_kafka()
        places = [kafka.TopicPartition(*name) for name in partitions]

        def request_committed_offsets(timeout_s: float) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
            """Request the committed offsets from the coordinator, waiting at most ``timeout_s`` seconds for the answer."""
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
        """Assign partitions to the client, all of them paused, so that it never fetches their records."""
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
        """Call ``listener_method`` with the partitions that the group has revoked. An error of the listener is kept and raised by
        ``poll_rebalances``, because the client must take the partitions away in any case.
        """
        try:
            listener_method(_to_topic_partitions(positions))
        except BaseException as error:  # noqa: BLE001 - raised by poll_rebalances
            self._raised = error

    def _raise_pending_listener_error(self) -> None:
        """Raise the error of the listener that was kept during the last rebalance, if any."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _try_commit_positions(self, positions: list[ConfluentPosition], *, wait_for_answer: bool) -> ConfluentError | None:
        """Commit these positions without retrying. Return the first error (confluent_kafka.KafkaError), or None."""
        try:
            done = self._client.commit(offsets=positions, asynchronous=not wait_for_answer)
        except load_confluent_kafka().KafkaException as error:
            return error.args[0]
        return next((place.error for place in done or () if place.error is not None), None)


def _to_topic_partitions(positions: Iterable[ConfluentPosition]) -> list[TopicPartition]:
    """Return topic and partition of each position (confluent_kafka.TopicPartition)."""
    return [TopicPartition(place.topic, place.partition) for place in positions]
