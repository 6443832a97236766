"""A consumer that reads each partition from the tier, and from the broker where the tier ends, as one log.

Reading moves from the tier to the broker at an offset: with read_uncommitted at the tier's end, with read_committed at the first offset of
the oldest transaction that is open there, because the broker knows its outcome. If the broker has deleted that offset already
(OFFSET_OUT_OF_RANGE below its log start), the tier is read again. There is neither a gap nor a repeat, because every step begins at the
position: the offset after the last message that was returned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import TracebackType
from typing import Any, Final, Literal, Self

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.brokers.metadata_topic.connection import KafkaConnection, load_confluent_kafka
from compactor.config import settings as config
from compactor.consumer.broker import BrokerLog, ConfluentBroker, LogBounds
from compactor.consumer.feed import Ended, Failed, Item, TierFeed
from compactor.consumer.history import EpochEnd, LogIdentity, LogMismatch, ReadHistory, is_other_topic, position_history
from compactor.consumer.last_values import LastValues, latest
from compactor.consumer.messages import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    BrokerMessage,
    MessageLike,
    Place,
    PlaceLike,
    TierMessage,
    out_of_range_error,
    truncation_error,
)
from compactor.consumer.reading import offset_by_time
from compactor.errors import CompactorError, UsageError
from compactor.model.ids import TopicPartition
from compactor.views.checkpoints import read_only_tier

FOREVER_S: Final = 1e9
"""Timeout of a caller who gives none, in seconds."""
BROKER_SLICE_S: Final = 0.05
"""Longest wait for the broker while the tier is being read too, in seconds."""
BROKER_WAIT_S: Final = 0.5
"""Longest wait for the broker otherwise, in seconds, before the caller's timeout is checked again."""
MAX_FETCH: Final = 10_000
"""Largest number of messages that are taken from the broker's client at once."""


@dataclass(frozen=True)
class ConsumerOptions:
    """Options of a TieredConsumer.

    isolation: as in Kafka.
    view: with ``latest``, only the last record of each key of what the tier holds when reading begins, without tombstones, and every record
        from there on.
    threads: number of threads that read the tier in advance.
    queue_bytes: size of the records that they may hold.
    refresh_s: seconds after which a partition that could not be read is retried.
    offset_reset: where to begin if an offset is below all others, if none was given, or if the topic was created again; with ``error``, an
        error message is returned instead.
    topic_ids: topic name -> id of the topic to read, if it is not the latest one of this name. It is read from the tier alone.
    """

    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    view: Literal["all", "latest"] = "all"
    threads: int = 4
    queue_bytes: int = 64 << 20
    refresh_s: float = 1.0
    offset_reset: Literal["earliest", "latest", "error"] = "earliest"
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def committed(self) -> bool:
        """Return whether the isolation level is read_committed."""
        return self.isolation == "read_committed"


@dataclass
class _Assigned:
    """An assigned partition.

    position: offset after the last message that was returned.
    topic_id: id of the topic that was read; empty if unknown.
    epochs: leader epochs that were read, if ``log`` is None; the last one reaches to the position.
    log: the log of the tier that is being read.
    source: ``resting``: retried at ``wake_s``, in seconds of the monotonic clock.
    broker_start: the broker's first offset, if it is above the position; else -1.
    is_reported: whether an error was returned since the last record.
    is_view_done: whether the view ``latest`` was read.
    """

    name: TopicPartition
    position: int
    topic_id: str = ""
    epochs: tuple[EpochEnd, ...] = ()
    log: LogIdentity | None = None
    source: Literal["tier", "broker", "resting"] = "resting"
    wake_s: float = 0.0
    broker_start: int = -1
    is_reported: bool = False
    is_view_done: bool = False

    @property
    def read(self) -> ReadHistory:
        """Return the history of what was read up to the position."""
        if self.log is not None:
            return replace(self.log.history_below(self.position), topic_id=self.topic_id)
        epochs = (*self.epochs[:-1], EpochEnd(self.epochs[-1].epoch, self.position)) if self.epochs else ()
        return ReadHistory(self.topic_id, epochs, self.position)

    def note_log(self, log: LogIdentity | None) -> None:
        """Set the log of the tier from which the next records are read; None for the broker."""
        self.epochs = self.read.epochs
        if log is not None:
            self.topic_id = log.topic_id or self.topic_id
        self.log = log

    def note_record(self, offset: int, epoch: int | None) -> None:
        """Move the position after a broker's record that is being returned."""
        if epoch is not None and (not self.epochs or epoch > self.epochs[-1].epoch):
            self.epochs = (*self.read.epochs, EpochEnd(epoch, offset + 1))
        self.position, self.is_reported = offset + 1, False

    def go_to(self, read: ReadHistory) -> None:
        """Move the position to the end of another history."""
        self.position, self.topic_id, self.epochs, self.log = read.end, read.topic_id, read.epochs, None
        self.is_view_done, self.is_reported, self.broker_start = True, False, -1


class TieredConsumer:
    """Consumer with the methods of confluent_kafka.Consumer, for use by one thread.

    Partitions are assigned; no group is joined, and no offset is committed.

    :param broker: read where the tier ends, and closed with the consumer. None to read the tier alone, as it grows.
    """

    def __init__(self, tier: Tier, broker: BrokerLog | None = None, options: ConsumerOptions | None = None) -> None:
        self._tier = tier
        self._broker = broker
        self._options = options or ConsumerOptions()
        self._feed = TierFeed(
            tier,
            committed=self._options.committed,
            latest_only=self._options.view == "latest",
            threads=self._options.threads,
            queue_bytes=self._options.queue_bytes,
        )
        self._assigned: dict[TopicPartition, _Assigned] = {}
        self._block: tuple[TopicPartition, Iterator[TierMessage]] | None = None
        self._pending: deque[Any] = deque()
        self._lost: list[tuple[TopicPartition, int | None]] = []
        self._chosen: dict[TopicPartition, TopicPartition] = {}
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- assignment --------------------------------------------------------------------------------------------------------

    def assign(self, places: Iterable[PlaceLike]) -> None:
        """Read exactly these partitions, each from its offset, which may be OFFSET_BEGINNING or OFFSET_END.

        A place without an offset begins as ``offset_reset`` says. Raises UsageError if neither tier nor broker has a partition; StoreError.
        """
        wanted = {TopicPartition.of(place.topic, place.partition): place for place in places}
        self._check_open()
        if self._broker is None:
            self._tier.partitions([str(name) for name in wanted])
        assigned = {name: self._assigned_place(name, place) for name, place in wanted.items()}
        self.unassign()
        self._assigned = assigned
        self._resume_rested(time.monotonic())

    def unassign(self) -> None:
        """Stop reading all partitions."""
        for name in self._assigned:
            self._feed.stop_reading(name)
        if self._broker is not None and self._assigned:
            self._broker.stop_reading(self._assigned)
        self._assigned, self._block = {}, None
        self._pending.clear()

    def assignment(self) -> list[Place]:
        """Return the assigned partitions."""
        return [Place(*name) for name in self._assigned]

    def seek(self, place: PlaceLike) -> None:
        """Continue an assigned partition at another position."""
        at = self._assigned_at(place)
        restored = self._assigned_place(at.name, place)
        self._feed.stop_reading(at.name)
        if self._broker is not None:
            self._broker.stop_reading([at.name])
        if self._block is not None and self._block[0] == at.name:
            self._block = None
        self._pending = deque(m for m in self._pending if (m.topic(), m.partition()) != at.name)
        self._assigned[at.name] = restored
        self._resume_rested(time.monotonic())

    def position(self, places: Sequence[PlaceLike]) -> list[Place]:
        """Return the positions of assigned partitions, with leader epochs and topic ids."""
        return [Place(*at.name, at.position, at.read.last_epoch, at.topic_id) for at in map(self._assigned_at, places)]

    def offsets_for_times(self, places: Sequence[PlaceLike], timeout: float | None = None) -> list[Place]:
        """Return for each partition the offset of the first record with at least a timestamp, or OFFSET_END if there is none.

        :param places: their ``offset`` is the timestamp in milliseconds.
        :param timeout: ignored, and accepted as in confluent_kafka: the settings of tier and broker apply.
        """
        found = []
        for place in places:
            name = TopicPartition.of(place.topic, place.partition)
            offset = offset_by_time(self._tier, self._place(name), place.offset)
            if offset is None and self._broker is not None:
                offset = self._broker.offset_at(name, place.offset)
            found.append(Place(*name, OFFSET_END if offset is None else offset))
        return found

    def get_watermark_offsets(self, place: PlaceLike) -> tuple[int, int]:
        """Return the first offset that tier or broker has, and the end offset (exclusive)."""
        return self._bounds(TopicPartition.of(place.topic, place.partition))

    def latest(self, place: PlaceLike) -> LastValues:
        """Return the last values of a partition's keys, as the tier holds them now. Assign their ``next_place`` to continue from there."""
        return latest(self._tier, self._place(TopicPartition.of(place.topic, place.partition)), committed=self._options.committed)

    # ---- messages ----------------------------------------------------------------------------------------------------------

    def poll(self, timeout: float | None = None) -> MessageLike | None:
        """Return the next message, or None if none arrives within ``timeout`` seconds; None or a negative number waits for one.

        A message with an error says that a partition cannot be read at its position. After StoreError or BadData, ``poll`` may be called
        again and continues at the position.
        """
        found = self.consume(1, -1 if timeout is None else timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[MessageLike]:
        """Return up to ``num_messages`` messages, or fewer if no more arrive within ``timeout`` seconds. Raises as ``poll``."""
        self._check_open()
        deadline = time.monotonic() + (FOREVER_S if timeout < 0 else timeout)
        found: list[MessageLike] = []
        while True:
            self._return_messages(found, num_messages)
            left = deadline - time.monotonic()
            if len(found) >= num_messages or (left <= 0 and found):
                return found
            try:
                received = self._receive_items(max(0.0, left))
            except CompactorError:
                if found:  # the error is raised again by the next call
                    return found
                raise
            if not received and left <= 0:
                return found

    def close(self) -> None:
        """End the threads and close the broker."""
        if not self._closed:
            self._closed = True
            self._feed.close()
            if self._broker is not None:
                self._broker.close()

    def _return_messages(self, found: list[MessageLike], wanted: int) -> None:
        while self._pending and len(found) < wanted:
            message = self._pending.popleft()
            at = self._assigned.get(TopicPartition(message.topic() or "", message.partition() or 0))
            if message.error() is None and at is not None:
                offset = message.offset() or 0
                if at.source != "broker" or offset < at.position:
                    continue
                at.note_record(offset, message.leader_epoch())
                message = BrokerMessage(message, at.topic_id)
            found.append(message)
        if self._block is not None and len(found) < wanted:
            name, messages = self._block
            before = len(found)
            found.extend(islice(messages, wanted - before))
            if len(found) > before:
                self._assigned[name].position = (found[-1].offset() or 0) + 1
            if len(found) < wanted:
                self._block = None

    def _receive_items(self, wait_s: float) -> bool:
        """Accept what has arrived, after everything before it was returned. Return whether anything has."""
        now = time.monotonic()
        self._handle_lost()
        self._resume_rested(now)
        rest = min((at.wake_s - now for at in self._assigned.values() if at.source == "resting"), default=FOREVER_S)
        wait_s = max(0.0, min(wait_s, rest))
        if self._broker is None or not any(at.source == "broker" for at in self._assigned.values()):
            item = self._feed.next_item(wait_s)
            if item is not None:
                self._accept_item(item)
            return item is not None
        item = self._feed.next_item(0)
        if item is not None:
            self._accept_item(item)
        most = 0.0 if item is not None else BROKER_SLICE_S if self._feed.is_busy else BROKER_WAIT_S
        fetched = self._broker.fetch_messages(MAX_FETCH, min(wait_s, most))
        self._pending.extend(fetched.messages)
        self._lost += [*((name, None) for name in fetched.out_of_range), *fetched.truncated.items()]
        return item is not None or bool(fetched.messages) or bool(self._lost)

    def _accept_item(self, item: Item) -> None:
        at = self._assigned.get(item.name)
        if at is None or at.source != "tier":
            return
        if isinstance(item, Ended):
            self._schedule_retry(at)  # retried if the broker does not answer
            if item.mismatch is not None:
                self._continue_after_mismatch(at, item, item.mismatch)
            else:
                self._continue_after_tier(at, item)
        elif isinstance(item, Failed):
            self._schedule_retry(at)
            raise item.error
        else:
            self._block = (item.name, item.block.messages())
            at.note_log(item.log)
            at.is_reported = False

    # ---- tier and broker -----------------------------------------------------------------------------------------------

    def _resume_rested(self, now: float) -> None:
        """Read partitions from the tier again whose waiting time is over."""
        due = [at for at in self._assigned.values() if at.source == "resting" and at.wake_s <= now]
        if due and self._tier.kind.has_complete_log:
            self._tier.catalog.refresh()  # the topic may have been created again
        for at in due:
            at.source = "tier"
            self._feed.start_reading(at.name, self._place(at.name), at.read, skip_view=at.is_view_done)

    def _continue_after_tier(self, at: _Assigned, item: Ended) -> None:
        """Decide where to continue, because the tier has no more records at the position."""
        at.is_view_done = True
        if item.offset < item.start <= item.end and not self._broker_has(at):
            self._reset_below_start(at, item)
            return
        if item.offset >= item.start:
            at.note_log(item.log)
        at.position = max(at.position, item.offset)
        if at.position >= at.broker_start:
            self._hand_over(at)
        elif item.end <= at.position:
            self._report_out_of_range(at, f"the tier ends at {item.end}, and the broker begins at {at.broker_start}")

    def _hand_over(self, at: _Assigned) -> None:
        """Continue at the broker, if there is one and its topic is the same."""
        if self._broker is None or at.name.topic in self._options.topic_ids:
            return
        topic_id = self._broker.topic_id(at.name)
        if is_other_topic(at.topic_id, topic_id) and not self._reset_topic(at, "the broker", topic_id, self._broker.log_bounds(at.name)):
            return
        at.note_log(None)
        at.topic_id = topic_id or at.topic_id
        epoch = at.read.last_epoch
        self._broker.read_from({at.name: at.position}, {} if epoch is None else {at.name: epoch})
        at.broker_start, at.source = -1, "broker"

    def _continue_after_mismatch(self, at: _Assigned, item: Ended, found: LogMismatch) -> None:
        """Decide where to continue, because the tier's log is not the one that was read."""
        broker = self._broker
        if found.reason == "truncated":
            self._report_truncation(at, item.log.history_below(found.agreed_offset))
        elif found.reason == "topic" and (broker is None or broker.topic_id(at.name) != at.topic_id):
            self._reset_topic(at, "the tier", item.log.topic_id, LogBounds(item.start, item.end))
        elif broker is not None and at.position >= at.broker_start:
            self._hand_over(at)
        else:
            what = f"of topic id {item.log.topic_id}" if found.reason == "topic" else "one that a later leader has disowned"
            self._report_out_of_range(at, f"the tier's log is {what}, and no broker has the offset")

    def _report_truncation(self, at: _Assigned, agreed: ReadHistory) -> None:
        """Report that records which were read have been discarded, and return to where the logs agree unless ``offset_reset`` is error."""
        if not at.is_reported:
            at.is_reported = True
            text = f"{at.name} was truncated: the log holds what was read up to offset {agreed.end}, and the position is {at.position}"
            self._pending.append(TierMessage(*at.name, agreed.end, error=truncation_error(text), topic_id=at.topic_id))
        if self._options.offset_reset != "error":
            at.go_to(replace(agreed, topic_id=at.topic_id) if agreed.end < at.position else at.read)

    def _reset_topic(self, at: _Assigned, holder: str, topic_id: str, bounds: LogBounds) -> bool:
        """Report that the topic was created again, and return whether ``offset_reset`` lets reading begin in the new one."""
        self._report_out_of_range(at, f"it was read from topic id {at.topic_id}, and {holder} has topic id {topic_id}")
        reset = self._options.offset_reset
        if reset != "error":
            at.go_to(position_history(bounds.start if reset == "earliest" else bounds.end, None, topic_id))
        return reset != "error"

    def _place(self, name: TopicPartition) -> TopicPartition:
        """Return the incarnation of a partition that is read: the latest one that is known, or that of the chosen topic id."""
        topic_id = self._options.topic_ids.get(name.topic, "")
        if topic_id and name not in self._chosen:
            self._chosen[name] = self._tier.partition_of_topic(name, topic_id)
        return self._chosen.get(name) or self._tier.current(name)

    def _broker_has(self, at: _Assigned) -> bool:
        if self._broker is None:
            return False
        bounds = self._broker.log_bounds(at.name)
        return bounds.start <= at.position <= bounds.end

    def _reset_below_start(self, at: _Assigned, item: Ended) -> None:
        """Continue where ``offset_reset`` says, because neither tier nor broker have the position any more."""
        if self._options.offset_reset == "error":
            self._report_out_of_range(at, f"the tier begins at {item.start}")
        else:
            at.note_log(item.log)
            at.position = item.start if self._options.offset_reset == "earliest" else item.end
            at.source = "tier"
            self._feed.start_reading(at.name, self._place(at.name), at.read, skip_view=self._options.view == "all")

    def _handle_lost(self) -> None:
        """Handle partitions that the broker stopped reading, after all their messages were returned."""
        while self._lost and self._broker is not None:
            name, agreed = self._lost[-1]
            at = self._assigned.get(name)
            if at is not None and at.source == "broker":
                self._continue_after_broker(at, agreed, self._broker)
            self._lost.pop()

    def _continue_after_broker(self, at: _Assigned, agreed: int | None, broker: BrokerLog) -> None:
        """Decide where to continue, because the broker does not have the position.

        :param agreed: the broker's log was truncated and holds what was read up to this offset; None if it was not truncated.
        """
        topic_id, bounds = broker.topic_id(at.name), broker.log_bounds(at.name)
        self._schedule_retry(at)
        if is_other_topic(at.topic_id, topic_id):
            self._hand_over(at)
        elif agreed is not None:
            # A later epoch begins there: a tier without one holds the discarded records.
            later = tuple(EpochEnd(epoch + 1, agreed) for epoch, _ in at.read.epochs[-1:])
            self._report_truncation(at, ReadHistory(at.topic_id, at.read.below_offset(agreed).epochs + later, agreed))
        elif at.position < bounds.start:
            at.broker_start, at.source = bounds.start, "tier"
            self._feed.start_reading(at.name, self._place(at.name), at.read, skip_view=True)
        elif at.position > bounds.end:
            self._report_out_of_range(at, f"the broker's log ends at {bounds.end}: was it truncated?")
        else:
            at.epochs = ()  # the broker cannot tell where the epoch ends

    def _report_out_of_range(self, at: _Assigned, why: str) -> None:
        if not at.is_reported:
            at.is_reported = True
            text = f"offset {at.position} of {at.name} is not there: {why}"
            self._pending.append(TierMessage(*at.name, at.position, error=out_of_range_error(text), topic_id=at.topic_id))

    def _schedule_retry(self, at: _Assigned) -> None:
        at.source, at.wake_s = "resting", time.monotonic() + self._options.refresh_s

    def _bounds(self, name: TopicPartition) -> LogBounds:
        """Return the bounds of tier and broker together."""
        state = self._tier.open(self._place(name)).refresh()
        mine = LogBounds(self._tier.first_readable_offset(state), state.end_offset + 1)
        if self._broker is None:
            return mine
        its = self._broker.log_bounds(name)
        return LogBounds(min(mine.start, its.start), max(mine.end, its.end)) if state.has_segments else its

    def _assigned_place(self, name: TopicPartition, place: PlaceLike) -> _Assigned:
        """Return an assigned partition at a position. confluent_kafka.TopicPartition has no topic id."""
        offset = self._resolve_offset(name, place.offset)
        epoch = getattr(place, "leader_epoch", None) if offset == place.offset else None
        read = position_history(offset, epoch, getattr(place, "topic_id", ""))
        return _Assigned(name, offset, read.topic_id, read.epochs)

    def _resolve_offset(self, name: TopicPartition, offset: int) -> int:
        """Return the offset that a logical offset stands for. Raises UsageError if an offset is needed and none is given."""
        if offset >= 0:
            return offset
        reset = self._options.offset_reset
        if offset == OFFSET_BEGINNING or (offset != OFFSET_END and reset == "earliest"):
            return self._bounds(name).start
        if offset == OFFSET_END or reset == "latest":
            return self._bounds(name).end
        raise UsageError(f"no offset for {name}", hint=f"Give one, or OFFSET_BEGINNING; {OFFSET_INVALID} is none")

    def _assigned_at(self, place: PlaceLike) -> _Assigned:
        name = TopicPartition(place.topic, place.partition)
        if name not in self._assigned:
            raise UsageError(f"{name} is not assigned", hint="Call assign first")
        return self._assigned[name]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the consumer is closed")


def open_consumer(
    settings: str | None = None,
    *,
    bootstrap_servers: str = "",
    properties: Mapping[str, str] | None = None,
    options: ConsumerOptions | None = None,
) -> TieredConsumer:
    """Return a consumer of the tier that a configuration file describes. It cannot write to the tier.

    :param settings: the file; None to look for one where the commands do.
    :param bootstrap_servers: brokers to read where the tier ends; empty to read the tier alone.
    :param properties: properties of librdkafka (security.protocol, sasl.* ...).
    :raises UsageError: the configuration is invalid, or confluent-kafka is needed and not installed.
    """
    options = options or ConsumerOptions()
    tier = read_only_tier(open_tier(config.load_settings(settings)))
    if not bootstrap_servers:
        return TieredConsumer(tier, options=options)
    load_confluent_kafka()
    connection = KafkaConnection(bootstrap_servers, dict(properties or {}))
    return TieredConsumer(tier, ConfluentBroker(connection, committed=options.committed), options)
