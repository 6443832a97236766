"""A consumer of the tier and the broker as one log, with the methods of confluent_kafka.Consumer.

A group is Kafka's own: its coordinator assigns partitions and keeps committed offsets, whatever serves the records (GroupClient).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

from compactor.access.tier import Tier
from compactor.adapters.kafka_client import KafkaConnection, load_confluent_kafka
from compactor.bootstrap import open_tier
from compactor.config import settings as config
from compactor.errors import CompactorError, UsageError
from compactor.features.consumer.group import (
    GROUP_PROPERTIES,
    AutoCommitOptions,
    BrokerClient,
    ConfluentBrokerClient,
    ConfluentGroupClient,
    GroupClient,
    GroupMembership,
    MembershipCallbacks,
    OffsetWithLeaderEpoch,
    RebalanceCallbacks,
)
from compactor.features.consumer.sources import (
    NEVER_S,
    AssignedPartition,
    AssignmentStep,
    ConsecutiveMessages,
    ConsumerOptions,
    TierAndBrokerReader,
    compute_assignment_change,
)
from compactor.model.ids import TopicPartition
from compactor.read.ranges import LastValueOfEachKey, last_values
from compactor.read.records import OFFSET_END, OFFSET_INVALID, HasTopicPartitionAndOffset, MessageLike, Place, to_broker_messages
from compactor.views.checkpoints import read_only_copy

ReadableOffsetBounds = tuple[int, int]
GROUP_POLL_S: Final = 0.1
"""Seconds after which rebalances and due commits are handled again, at the earliest."""
GROUP_WAIT_S: Final = 1.0
"""Longest time for which ``consume`` of a group's member waits for more messages when it has some, in seconds."""
NO_RUN: Final = ConsecutiveMessages(None, iter(()))


class TieredConsumer:
    """Consumer for one thread.

    :param broker: read where the tier ends, and closed with the consumer. None to read the tier alone, as it grows.
    :param group: closed with the consumer; None for a consumer without a group.
    """

    def __init__(
        self,
        tier: Tier,
        broker: BrokerClient | None = None,
        options: ConsumerOptions | None = None,
        group: GroupClient | None = None,
        commits: AutoCommitOptions | None = None,
    ) -> None:
        self._sources = TierAndBrokerReader(tier, broker, options or ConsumerOptions())
        self._run = NO_RUN
        self._messages: Iterator[MessageLike] = iter(())
        self._last: MessageLike | None = None
        self._group_due_s = math.inf
        self._membership: GroupMembership | None = None
        if group is not None:
            hooks = MembershipCallbacks(self, self._offsets_to_commit, self._drop_queued_messages, self._sources.remove_partitions)
            self._membership = GroupMembership(group, commits or AutoCommitOptions(), hooks)
            self._group_due_s = 0.0
        self._starts: dict[TopicPartition, HasTopicPartitionAndOffset] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- groups ------------------------------------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: Callable[[Any, list[Place]], None] | None = None,
        on_revoke: Callable[[Any, list[Place]], None] | None = None,
        on_lost: Callable[[Any, list[Place]], None] | None = None,
    ) -> None:
        """Read the partitions of these topics that the group assigns. Callbacks run inside ``poll``, ``consume`` and ``close``.

        :param topics: a name that begins with ``^`` is a regular expression.
        :param on_assign: receives the consumer and the places where added partitions begin; may call ``assign`` with other places.
        :param on_revoke: called before partitions are given up. Records that were returned are committed already if auto-commit is on.
        :param on_lost: called if the group has given the partitions to others already; ``on_revoke`` by default.
        :raises UsageError: the consumer has no group.
        """
        self._require_group().subscribe(topics, RebalanceCallbacks(on_assign, on_revoke, on_lost))

    def unsubscribe(self) -> None:
        """The next call of ``poll`` gives up its partitions."""
        self._require_group().unsubscribe()

    def commit(
        self, message: MessageLike | None = None, offsets: Sequence[HasTopicPartitionAndOffset] | None = None, asynchronous: bool = True
    ) -> list[Place] | None:
        """Commit offsets to the group: the offset after ``message``, or ``offsets``, or by default all stored offsets.

        :param asynchronous: do not wait for the answer, and return None.

        :raises UsageError: if the consumer has no group.
        :raises Unavailable: if the coordinator cannot be reached. :raises Refused: if it did not commit them.
        """
        group = self._require_group()
        chosen = None if message is None and offsets is None else _offsets_to_store(message, offsets)
        done = group.commit(chosen, wait=not asynchronous)
        return None if asynchronous else [Place(*name, *at) for name, at in done.items()]

    def committed(self, places: Sequence[HasTopicPartitionAndOffset], timeout: float | None = None) -> list[Place]:
        """Committed offsets with leader epochs; OFFSET_INVALID if there is none. ``timeout`` is ignored: the broker's settings apply."""
        names = [TopicPartition(place.topic, place.partition) for place in places]
        known = self._require_group().committed_offsets(names)
        return [Place(*name, *known.get(name, (OFFSET_INVALID, None))) for name in names]

    def store_offsets(self, message: MessageLike | None = None, offsets: Sequence[HasTopicPartitionAndOffset] | None = None) -> None:
        """Store offsets for the next commit: the offset after ``message``, or ``offsets``. Needed if ``enable.auto.offset.store`` is false.

        Raises UsageError if a partition is not assigned, or the consumer has no group.
        """
        stored = _offsets_to_store(message, offsets)
        for name in stored:
            self._require_assigned_partition(Place(*name))
        self._require_group().store_offsets(stored)

    def _poll_group(self, group: GroupMembership) -> None:
        """Handle rebalances and due commits. Every record that was returned is taken to be processed."""
        self._group_due_s = time.monotonic() + GROUP_POLL_S
        if errors := group.poll_rebalances():
            self._sources.ready.append(ConsecutiveMessages(None, to_broker_messages(errors, "")))
        if group.added:
            places = group.start_positions()
            self._starts = {place.topic_partition: place for place in places}
            try:
                group.notify_assigned(places)
                begun = [
                    self._sources.assign_or_queue_error(place.topic_partition, self._starts[place.topic_partition]) for place in places
                ]
            finally:
                self._starts = None
            group.added = []
            self._start_assignment("add", begun)

    def _start_assignment(self, step: AssignmentStep, partitions: Sequence[AssignedPartition]) -> None:
        """In a group, the positions count as committed already."""
        if self._membership is not None:
            self._membership.assume_committed({at.partition: _offset_to_commit(at) for at in partitions})
        self._change_assignment(step, {at.partition: at for at in partitions})

    def _offsets_to_commit(self) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
        self._advance_position()
        return {name: _offset_to_commit(at) for name, at in self._sources.assigned.items() if at.position >= 0}

    def _require_group(self) -> GroupMembership:
        self._require_consumer_not_closed()
        self._advance_position()
        if self._membership is None:
            raise UsageError("the consumer has no group", hint='Open it with "group.id" and "bootstrap.servers"')
        return self._membership

    # ---- assignment --------------------------------------------------------------------------------------------------------

    def assign(self, places: Iterable[HasTopicPartitionAndOffset]) -> None:
        """Read exactly these partitions, each from its offset, OFFSET_BEGINNING or OFFSET_END. A place without an offset begins as
        ``offset_reset`` says.

        Within the callback ``on_assign``, a call only changes where the added partitions begin. Raises UsageError if neither tier nor
        broker has a partition; StoreError.
        """
        wanted = {TopicPartition.create_validated(place.topic, place.partition): place for place in places}
        self._require_consumer_not_closed()
        if self._starts is not None:
            self._starts.update(wanted)
            return
        self._sources.require_partitions_readable(wanted)
        self._start_assignment("replace", [self._sources.assigned_partition_at_position(name, place) for name, place in wanted.items()])

    def unassign(self) -> None:
        self._change_assignment("replace", {})

    def assignment(self) -> list[Place]:
        return [Place(*name) for name in self._sources.assigned]

    def seek(self, place: HasTopicPartitionAndOffset) -> None:
        """Continue a partition elsewhere, and drop its queued records. Raises UsageError if it is not assigned."""
        restored = self._sources.assigned_partition_at_position(self._require_assigned_partition(place).partition, place)
        self._drop_queued_messages([restored.partition])
        self._sources.start_reading([restored])

    def position(self, places: Sequence[HasTopicPartitionAndOffset]) -> list[Place]:
        return [
            Place(*at.partition, at.position, at.consumed_history.last_read_leader_epoch, at.topic_id)
            for at in map(self._require_assigned_partition, places)
        ]

    def offsets_for_times(self, places: Sequence[HasTopicPartitionAndOffset], timeout: float | None = None) -> list[Place]:
        """For each partition, the first record with at least the timestamp, or OFFSET_END if there is none. ``timeout`` is ignored.

        :param places: their ``offset`` is the timestamp in milliseconds.
        """
        found = []
        for place in places:
            name = TopicPartition.create_validated(place.topic, place.partition)
            offset = self._sources.offset_for_time(name, place.offset)
            found.append(Place(*name, OFFSET_END if offset is None else offset))
        return found

    def get_watermark_offsets(self, place: HasTopicPartitionAndOffset) -> ReadableOffsetBounds:
        """First offset that tier or broker has, and the end offset (exclusive)."""
        return self._sources.readable_bounds(TopicPartition.create_validated(place.topic, place.partition))

    def latest(self, place: HasTopicPartitionAndOffset) -> LastValueOfEachKey:
        """Last record of each key, as the tier holds them now. To continue from there, assign the result's ``next_place``."""
        name = self._sources.resolve_partition(TopicPartition.create_validated(place.topic, place.partition))
        return last_values(self._sources.tier, name, read_committed=self._sources.options.is_read_committed)

    def _change_assignment(self, step: AssignmentStep, partitions: Mapping[TopicPartition, AssignedPartition]) -> None:
        change = compute_assignment_change(self._sources.assigned, step, partitions)
        self._drop_queued_messages(change.dropped)
        self._sources.remove_partitions(change.dropped)
        self._sources.start_reading([partitions[name] for name in change.added])

    def _drop_queued_messages(self, partitions: Collection[TopicPartition]) -> None:
        self._advance_position()
        if self._run.partition is not None and self._run.partition.partition in partitions:
            self._set_run(NO_RUN)
        self._sources.drop_queued_records(partitions)

    # ---- messages ----------------------------------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> MessageLike | None:
        """Return the next message, or None if none arrives within ``timeout`` seconds; None or a negative number waits without limit.

        A message with an error reports a partition that cannot be read at its position. After StoreError or BadData, the next call
        continues at the position.
        """
        if time.monotonic() < self._group_due_s:
            message = next(self._messages, None)
            if message is not None:
                self._last = message
                return message
        found = self.consume(1, -1 if timeout is None else timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[MessageLike]:
        """Return up to ``num_messages`` messages; fewer if no more arrive within ``timeout`` seconds; a negative number waits for all.

        In a group, it returns one second after the first message at the latest, so that rebalances are not delayed.
        """
        self._require_consumer_not_closed()
        deadline = time.monotonic() + (NEVER_S if timeout < 0 else timeout)
        found: list[MessageLike] = []
        while True:
            now = time.monotonic()
            if not found and now >= self._group_due_s and self._membership is not None:
                self._poll_group(self._membership)
            if self._move_ready_messages(found, num_messages) and self._membership is not None:
                deadline = min(deadline, now + GROUP_WAIT_S)
            left = deadline - now
            if len(found) >= num_messages or (left <= 0 and found):
                return found
            try:
                received = self._sources.receive_messages(max(0.0, left if found else min(left, self._group_due_s - now)))
            except CompactorError:
                if found:  # the error is raised again by the next call
                    return found
                raise
            if not received and left <= 0:
                return found

    def close(self) -> None:
        """If auto-commit is on, the offsets of returned records are committed first."""
        if self._closed:
            return
        try:
            if self._membership is not None:
                self._membership.close()
        finally:
            self._closed = True
            self._set_run(NO_RUN)
            self._sources.close()

    def _move_ready_messages(self, out_messages: list[MessageLike], max_messages: int) -> bool:
        before = len(out_messages)
        while len(out_messages) < max_messages:
            held = len(out_messages)
            out_messages.extend(islice(self._messages, max_messages - held))
            if len(out_messages) > held:
                self._last = out_messages[-1]
            elif self._sources.ready:
                self._set_run(self._sources.ready.popleft())
            else:
                self._advance_position()
                break
        return len(out_messages) > before

    def _set_run(self, messages: ConsecutiveMessages) -> None:
        """Messages of a source that is no longer read are dropped."""
        self._advance_position()
        self._run, self._messages = messages, messages.messages if messages.is_source_current else iter(())

    def _advance_position(self) -> None:
        last, self._last = self._last, None
        if last is not None and self._run.partition is not None:
            self._run.partition.advance_past_record(last.offset(), self._run.epoch)

    def _require_assigned_partition(self, place: HasTopicPartitionAndOffset) -> AssignedPartition:
        self._advance_position()
        name = TopicPartition(place.topic, place.partition)
        if name not in self._sources.assigned:
            raise UsageError(f"{name} is not assigned", hint="Call assign first")
        return self._sources.assigned[name]

    def _require_consumer_not_closed(self) -> None:
        if self._closed:
            raise UsageError("the consumer is closed")


def _offset_to_commit(partition: AssignedPartition) -> OffsetWithLeaderEpoch:
    return OffsetWithLeaderEpoch(partition.position, partition.consumed_history.last_read_leader_epoch)


def _offsets_to_store(
    message: MessageLike | None, offsets: Sequence[HasTopicPartitionAndOffset] | None
) -> dict[TopicPartition, OffsetWithLeaderEpoch]:
    if message is not None and offsets is None:
        return {TopicPartition(message.topic(), message.partition()): OffsetWithLeaderEpoch(message.offset() + 1, message.leader_epoch())}
    if offsets is None or message is not None:
        raise UsageError("one of message and offsets is needed")
    return {TopicPartition(at.topic, at.partition): OffsetWithLeaderEpoch(at.offset, getattr(at, "leader_epoch", None)) for at in offsets}


_RESETS: Final = {
    **dict.fromkeys(("earliest", "smallest", "beginning"), "earliest"),
    **dict.fromkeys(("latest", "largest", "end"), "latest"),
    **dict.fromkeys(("error", "none"), "error"),
}
_GROUP_CALLBACKS: Final = ("on_commit", "stats_cb")
_CONNECTION_CALLBACKS: Final = ("oauth_cb",)


@dataclass(frozen=True)
class ConsumerSettings:
    """A consumer's settings.

    tier_config: path of the tier's configuration file; None to search for it where the commands do.
    properties: of librdkafka for all connections.
    group_properties: further ones for the group, and callbacks.
    """

    tier_config: str | None = None
    bootstrap_servers: str = ""
    group_id: str = ""
    options: ConsumerOptions = field(default_factory=ConsumerOptions)
    commits: AutoCommitOptions = field(default_factory=AutoCommitOptions)
    properties: Mapping[str, Any] = field(default_factory=dict)
    group_properties: Mapping[str, Any] = field(default_factory=dict)


def parse_consumer_settings(properties: Mapping[str, Any]) -> ConsumerSettings:
    """Names and defaults are those of Kafka; names of this library begin with ``tier.``. Raises UsageError for a setting that is not known
    or not valid.
    """
    left = dict(properties)
    reset = str(left.pop("auto.offset.reset", "latest"))
    if reset not in _RESETS:
        raise UsageError(f"auto.offset.reset cannot be {reset!r}", hint="Use earliest, latest or error")
    isolation = str(left.pop("isolation.level", "read_committed"))
    view = str(left.pop("tier.view", "all"))
    for name, value, known in (
        ("isolation.level", isolation, ("read_committed", "read_uncommitted")),
        ("tier.view", view, ("all", "latest")),
    ):
        if value not in known:
            raise UsageError(f"{name} cannot be {value!r}", hint=f"Use {' or '.join(known)}")
    options = ConsumerOptions(
        isolation="read_committed" if isolation == "read_committed" else "read_uncommitted",
        view="latest" if view == "latest" else "all",
        threads=_pop_integer_setting(left, "tier.threads", 4),
        queue_bytes=_pop_integer_setting(left, "tier.queue.bytes", 64 << 20),
        refresh_s=_pop_integer_setting(left, "tier.refresh.ms", 1000) / 1000,
        offset_reset=_RESETS[reset],  # type: ignore[arg-type]
        mode=left.pop("tier.mode", "remote_preferred"),
        skip_damaged=_pop_bool_setting(left, "tier.skip.damaged", default=False),
    )
    commits = AutoCommitOptions(
        auto_commit=_pop_bool_setting(left, "enable.auto.commit", default=True),
        interval_s=_pop_integer_setting(left, "auto.commit.interval.ms", 5000) / 1000,
        auto_store=_pop_bool_setting(left, "enable.auto.offset.store", default=True),
    )
    tier_config, servers, group_id = left.pop("tier.config", None), left.pop("bootstrap.servers", ""), left.pop("group.id", "")
    of_group = {name: left.pop(name) for name in list(left) if name in GROUP_PROPERTIES or name in _GROUP_CALLBACKS}
    for name, value in left.items():
        if name.startswith("tier."):
            names = ("tier.config", "tier.mode", "tier.view", "tier.threads", "tier.queue.bytes", "tier.refresh.ms", "tier.skip.damaged")
            raise UsageError(f"there is no setting {name}", hint=f"Did you mean {(get_close_matches(name, names, 1, 0) or names)[0]}?")
        if callable(value) and name not in _CONNECTION_CALLBACKS:
            raise UsageError(f"{name} is not supported", hint="Errors are raised, or returned by poll as messages")
    return ConsumerSettings(tier_config, servers, group_id, options, commits, left, of_group)


def open_consumer(
    settings: str | Mapping[str, Any] | None = None,
    *,
    bootstrap_servers: str = "",
    properties: Mapping[str, str] | None = None,
    options: ConsumerOptions | None = None,
) -> TieredConsumer:
    """Open a consumer of the tier that a configuration file describes.

    :param settings: path of the configuration file; None to search for it where the commands do. Or a dictionary like confluent_kafka's,
        with the path under ``tier.config``; the other parameters are then not allowed.
    :param bootstrap_servers: brokers to read where the tier ends; empty to read the tier alone.
    :param properties: properties of librdkafka (security.protocol, sasl.* ...).
    :raises UsageError: the configuration is invalid, or confluent-kafka is needed and not installed.
    """
    if isinstance(settings, Mapping):
        if bootstrap_servers or properties or options:
            raise UsageError("settings are given twice", hint="A dictionary holds all of them")
        return _open_consumer_from_settings(parse_consumer_settings(settings))
    return _open_consumer_from_settings(
        ConsumerSettings(settings, bootstrap_servers, "", options or ConsumerOptions(), properties=properties or {})
    )


def _open_consumer_from_settings(settings: ConsumerSettings) -> TieredConsumer:
    options, servers = settings.options, settings.bootstrap_servers
    if settings.group_id and not servers:
        why = "a group needs brokers, even with tier.mode remote_only: its coordinator assigns partitions and keeps committed offsets"
        raise UsageError(why, hint="Set bootstrap.servers, or leave out group.id and use assign")
    if not servers and options.mode.startswith("kafka"):
        raise UsageError(f"tier.mode {options.mode} needs brokers", hint="Set bootstrap.servers")
    tier = read_only_copy(open_tier(config.load_settings(settings.tier_config)))
    if not servers:
        return TieredConsumer(tier, options=options)
    load_confluent_kafka()
    connection = KafkaConnection(servers, settings.properties)
    broker = None if options.mode == "remote_only" else ConfluentBrokerClient(connection, read_committed=options.is_read_committed)
    group = ConfluentGroupClient(connection, settings.group_id, settings.group_properties) if settings.group_id else None
    return TieredConsumer(tier, broker, options, group, settings.commits)


def _pop_integer_setting(remaining_settings: dict[str, Any], name: str, default: int) -> int:
    value = remaining_settings.pop(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} cannot be {value!r}", hint="Use a whole number") from None


def _pop_bool_setting(remaining_settings: dict[str, Any], name: str, *, default: bool) -> bool:
    value = str(remaining_settings.pop(name, default)).lower()
    if value not in ("true", "false"):
        raise UsageError(f"{name} cannot be {value!r}", hint="Use true or false")
    return value == "true"
