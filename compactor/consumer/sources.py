"""Tier and broker as sources of the partitions that a consumer has been assigned: decides for each where its next records come from.

Reading moves from the tier to the broker at an offset: with read_uncommitted at the tier's end, with read_committed at the first offset of
the oldest transaction that is open there, because the broker knows its outcome. If the broker has deleted that offset already
(OFFSET_OUT_OF_RANGE below its log start), the tier is read again. There is neither a gap nor a repeat, because every step begins at the
position: the offset after the last message that was returned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Literal

from compactor.access.tier import Tier
from compactor.constants import EMPTY_TOPIC_ID, MAX_OFFSET, LeaderEpoch, TopicId
from compactor.consumer.assigned import AssignedPartition
from compactor.consumer.broker import BrokerClient, LogStartAndEndOffset
from compactor.consumer.feed import PartitionPrefetchEnd, PartitionPrefetchFailure, PrefetchedItem, TierPrefetcher
from compactor.consumer.history import (
    ConsumedLogHistory,
    HistoryMismatchReason,
    LeaderEpochEnd,
    are_topic_ids_known_to_differ,
    consumed_history_before_position,
)
from compactor.consumer.messages import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    ConfluentMessage,
    HasTopicPartitionAndOffset,
    MessageLike,
    PartitionReadError,
    TierMessage,
    log_truncation_error,
    no_committed_offset_error,
    offset_out_of_range_error,
    to_broker_messages,
)
from compactor.consumer.reading import offset_for_time
from compactor.consumer.serving import MODES, NEXT_SOURCE, Mode, ReadSourceEvent
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition

NEVER_S: Final = 1e9
"""A waiting time that does not end, in seconds."""
BROKER_SLICE_S: Final = 0.05
"""Longest wait for the broker while the tier is being read too, in seconds."""
BROKER_WAIT_S: Final = 0.5
"""Longest wait for the broker otherwise, in seconds, before the caller's timeout is checked again."""
MAX_FETCH: Final = 10_000
"""Largest number of messages that are taken from the broker's client at once."""


@dataclass(frozen=True)
class ConsumerOptions:
    """Options of a TieredConsumer.

    isolation: Kafka's isolation level.
    view: with ``latest``, the consumer first returns only the last record of each key that the tier holds when reading begins, without
        tombstones, and then every later record.
    threads: number of threads that read the tier in advance.
    queue_bytes: size in bytes of the records that these threads may hold in memory.
    refresh_s: seconds after which a partition that could not be read is retried.
    offset_reset: where to begin if the records at an offset no longer exist, if no offset was given, or if the topic was created again;
        with ``error``, an error message is returned instead.
    topic_ids: topic name -> id of the topic to read, if it is not the latest one of this name. Such a topic is read from the tier alone.
    mode: which of tier and broker is read. Without a broker, every mode means ``remote_only``.
    skip_damaged: skip offsets of the tier that cannot be read, with a warning in the log (``logging``). Otherwise reading ends there with
        an error. Not allowed with ``view`` latest, because an older value of a key would take the place of one that cannot be read.

    Raises UsageError if ``mode`` is unknown, or if ``view`` is ``latest`` together with ``skip_damaged`` or with a mode that does not read
    the tier first.
    """

    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    view: Literal["all", "latest"] = "all"
    threads: int = 4
    queue_bytes: int = 64 << 20
    refresh_s: float = 1.0
    offset_reset: Literal["earliest", "latest", "error"] = "earliest"
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    mode: Mode = "remote_preferred"
    skip_damaged: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"no mode {self.mode!r}", hint=f"One of {', '.join(MODES)}")
        if self.view == "latest" and self.mode not in ("remote_only", "remote_preferred"):
            raise UsageError(f"the view latest cannot be read with mode {self.mode}", hint="It is read from the tier: use remote_preferred")
        if self.view == "latest" and self.skip_damaged:
            raise UsageError("skip_damaged and the view latest exclude each other", hint="Read all records, or repair the tier first")

    @property
    def is_read_committed(self) -> bool:
        """Return whether the isolation level is read_committed."""
        return self.isolation == "read_committed"


@dataclass
class ConsecutiveMessages:
    """Consecutive messages of one partition from one source, or one message that reports an error.

    partition: state of the partition to which the messages belong. Its position advances as they are returned. None for an error.
    epoch: leader epoch of a broker's messages, the same for all of them; None if unknown, and for messages of the tier.
    """

    partition: AssignedPartition | None
    messages: Iterator[MessageLike]
    is_from_broker: bool = False
    epoch: LeaderEpoch | None = None

    @property
    def is_partition_still_read_from_source(self) -> bool:
        """Return whether the partition is still read from the source of these messages."""
        return self.partition is None or not self.is_from_broker or self.partition.source == "broker"


class TierAndBrokerReader:
    """Reader of assigned partitions, each from the tier or from the broker, whichever has its next records. For use by one thread.

    :param broker: closed with this object. None to read the tier alone.
    """

    def __init__(self, tier: Tier, broker: BrokerClient | None, options: ConsumerOptions) -> None:
        self.tier = tier
        self.options = options
        self.assigned: dict[TopicPartition, AssignedPartition] = {}
        self.ready: deque[ConsecutiveMessages] = deque()
        self._mode: Mode = "remote_only" if broker is None else options.mode
        self._client = broker
        self._broker = None if self._mode == "remote_only" else broker
        self._feed = TierPrefetcher(
            tier,
            read_committed=options.is_read_committed,
            skip_damaged=options.skip_damaged,
            latest_only=options.view == "latest",
            threads=options.threads,
            queue_bytes=options.queue_bytes,
        )
        self._lost: list[tuple[TopicPartition, int | None]] = []
        self._chosen: dict[TopicPartition, TopicPartition] = {}

    # ---- partitions ----------------------------------------------------------------------------------------------------------

    def require_partitions_in_tier_if_tier_only(self, partitions: Collection[TopicPartition]) -> None:
        """Raise UsageError if only the tier is read, and one of these partitions is not in the tier."""
        if self._broker is None:
            self.tier.list_partitions([str(name) for name in partitions])

    def start_reading(self, partitions: Iterable[AssignedPartition]) -> None:
        """Start to read these partitions, each from its position, in addition to those that are being read."""
        self.assigned.update((at.partition, at) for at in partitions)
        self._restart_waiting_partitions(time.monotonic())

    def drop_queued_records(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading partitions and drop their queued records. They stay assigned and keep their positions."""
        for name in partitions:
            self._feed.stop_reading(name)
            if name in self.assigned:
                self.assigned[name].source, self.assigned[name].wake_s = "none", NEVER_S
        if self._broker is not None and partitions:
            self._broker.stop_reading(partitions)
        self.ready = deque(run for run in self.ready if run.partition is None or run.partition.partition not in partitions)

    def remove_partitions(self, partitions: Collection[TopicPartition]) -> None:
        """Remove partitions that are no longer assigned, with their positions and queued records."""
        for name in partitions:
            self.assigned.pop(name, None)

    def assigned_partition_at_position(self, partition: TopicPartition, place: HasTopicPartitionAndOffset) -> AssignedPartition:
        """Return the state of a partition that is to be read from ``place``. Raises UsageError if ``place`` has no offset and
        ``offset_reset`` is ``error``.
        """
        offset = self._resolve_logical_offset(partition, place.offset)
        epoch = getattr(place, "leader_epoch", None) if offset == place.offset else None
        read = consumed_history_before_position(offset, epoch, getattr(place, "topic_id", ""))
        return AssignedPartition(partition, offset, read.topic_id, read.epochs)

    def assign_partition_or_queue_error(self, partition: TopicPartition, place: HasTopicPartitionAndOffset) -> AssignedPartition:
        """Return the state of a partition that is to be read from ``place``. If ``place`` has no offset and ``offset_reset`` is ``error``,
        queue a message that reports the error and return a state in which the partition waits without end.
        """
        try:
            return self.assigned_partition_at_position(partition, place)
        except UsageError as error:
            self._queue_partition_error_message(partition, OFFSET_INVALID, no_committed_offset_error(error.message))
            return AssignedPartition(partition, OFFSET_INVALID, wake_s=NEVER_S, is_reported=True)

    def partition_with_resolved_topic_id(self, partition: TopicPartition) -> TopicPartition:
        """Return the partition with the topic id under which it is read: the configured id, or that of the latest topic of this name."""
        topic_id = TopicId(self.options.topic_ids.get(partition.topic, ""))
        if topic_id and partition not in self._chosen:
            self._chosen[partition] = self.tier.incarnation_with_topic_id(partition, topic_id)
        return self._chosen.get(partition) or self.tier.latest_incarnation(partition)

    def readable_bounds_of_tier_and_broker(self, partition: TopicPartition) -> LogStartAndEndOffset:
        """Return the first offset that can be read, and the end offset (exclusive), of tier and broker together."""
        if self._broker is not None and self._mode == "kafka_only":
            return self._broker.log_start_and_end_offset(partition)
        state = self.tier.open_control_log_of_partition(self.partition_with_resolved_topic_id(partition)).refresh()
        mine = LogStartAndEndOffset(self.tier.first_readable_offset(state), state.end_offset + 1)
        if self._broker is None:
            return mine
        its = self._broker.log_start_and_end_offset(partition)
        return LogStartAndEndOffset(min(mine.start, its.start), max(mine.end, its.end)) if state.has_segments else its

    def offset_for_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the offset of the first record whose timestamp is ``timestamp_ms`` or later, or None if there is none."""
        offset = (
            None
            if self._mode == "kafka_only"
            else offset_for_time(self.tier, self.partition_with_resolved_topic_id(partition), timestamp_ms)
        )
        return self._broker.offset_for_time(partition, timestamp_ms) if offset is None and self._broker is not None else offset

    def close(self) -> None:
        """End the threads that read the tier, and close the broker's client."""
        self._feed.close()
        if self._client is not None:
            self._client.close()

    # ---- records -----------------------------------------------------------------------------------------------------------

    def receive_messages_into_ready_queue(self, wait_s: float) -> bool:
        """Move records that have arrived from tier and broker to the queue of ready messages, which must be empty. Waits up to ``wait_s``
        seconds. Return whether any have arrived.
        """
        now = time.monotonic()
        self._continue_partitions_broker_cannot_serve()
        self._restart_waiting_partitions(now)
        rest = min((at.wake_s - now for at in self.assigned.values() if at.source == "none"), default=NEVER_S)
        wait_s = max(0.0, min(wait_s, rest))
        if self._broker is None or not any(at.source == "broker" for at in self.assigned.values()):
            item = self._feed.next_prefetched_item(wait_s)
            if item is not None:
                self._queue_prefetched_item(item)
            return item is not None
        item = self._feed.next_prefetched_item(0)
        if item is not None:
            self._queue_prefetched_item(item)
        most = 0.0 if item is not None else BROKER_SLICE_S if self._feed.has_queued_items_or_active_reads else BROKER_WAIT_S
        fetched = self._broker.fetch_messages(MAX_FETCH, min(wait_s, most))
        for name, offset in fetched.compacted.items():
            self._report_deletes_missing_after_tier(name, offset)
        self._queue_broker_messages(fetched.messages)
        self._lost += [*((name, None) for name in fetched.out_of_range), *fetched.truncated.items()]
        return item is not None or bool(fetched.messages) or bool(self._lost)

    def _report_deletes_missing_after_tier(self, partition: TopicPartition, offset: int) -> None:
        """Queue an error if the broker has compacted what follows the tier's end: a key that was read from the tier may be deleted, or an
        aborted record committed, without a sign. With ``offset_reset`` ``error`` the position stays; else reading continues.

        :param offset: first offset that the broker left out.
        """
        at = self.assigned.get(partition)
        if at is None or not at.is_handed_over:
            return
        if not at.is_reported:
            text = (
                f"offset {offset} of {partition} is not there: brokers compact this topic, and have removed records that the tier lacks."
                " Keys that were read from the tier may be deleted. Import the whole log again, or read it with tier.mode kafka_preferred"
            )
            self._queue_partition_error_message(partition, offset, offset_out_of_range_error(text), at.topic_id)
            at.is_reported = True
        if self.options.offset_reset == "error" and self._broker is not None:
            self._broker.stop_reading([partition])
            self._schedule_partition_retry(at)
        at.is_handed_over = False

    def _queue_broker_messages(self, messages: Sequence[ConfluentMessage]) -> None:
        """Queue messages of a broker, except those before the partition's position and those of partitions that are no longer read from the
        broker.
        """
        for (topic, partition, epoch), group in groupby(messages, lambda found: (found.topic(), found.partition(), found.leader_epoch())):
            at = self.assigned.get(TopicPartition(topic, partition))
            if at is not None and at.source == "broker":
                mine = [message for message in group if message.offset() >= at.position]
                self.ready.append(ConsecutiveMessages(at, to_broker_messages(mine, at.topic_id), is_from_broker=True, epoch=epoch))

    def _queue_partition_error_message(
        self, partition: TopicPartition, offset: int, error: PartitionReadError, topic_id: TopicId = EMPTY_TOPIC_ID
    ) -> None:
        """Queue a message that reports an error of a partition at this offset."""
        self.ready.append(ConsecutiveMessages(None, iter((TierMessage(*partition, offset, error=error, topic_id=topic_id),))))

    def _queue_prefetched_item(self, item: PrefetchedItem) -> None:
        """Queue the records of an item from the tier; after a partition's last item, decide where to continue. Raises the error of a
        PartitionPrefetchFailure.
        """
        at = self.assigned.get(item.partition)
        if at is None or at.source != "tier":
            return
        if isinstance(item, PartitionPrefetchEnd):
            self._schedule_partition_retry(at)  # retried if the broker does not answer
            if item.mismatch is not None:
                self._continue_reading_after_log_mismatch(at, item, item.mismatch)
            else:
                self._continue_reading_after_tier_end(at, item)
        elif isinstance(item, PartitionPrefetchFailure):
            self._schedule_partition_retry(at)
            raise item.error
        else:
            self.ready.append(ConsecutiveMessages(at, item.block.messages()))
            at.set_tier_log_identity(item.log)

    # ---- tier and broker -----------------------------------------------------------------------------------------------------

    def _restart_waiting_partitions(self, now_s: float) -> None:
        """Start to read the partitions that wait after an error and whose ``wake_s`` has come.

        :param now_s: present time, in seconds of the monotonic clock.
        """
        due = [at for at in self.assigned.values() if at.source == "none" and at.wake_s <= now_s]
        if due and self.tier.kind.is_content_determined_by_control_logs and self._mode != "kafka_only":
            self.tier.catalog.refresh()  # the topic may have been created again
        for at in due:
            self._schedule_partition_retry(at)
            self._choose_source_and_continue_reading(at, "start")

    def _choose_source_and_continue_reading(self, partition: AssignedPartition, event: ReadSourceEvent) -> None:
        """Continue to read a partition from tier or broker.

        :param event: what has happened: ``start``, ``tier_ended`` or ``broker_deleted``. Together with the mode of the reader it
            decides on the source.
        """
        source = NEXT_SOURCE[self._mode, event]
        if source == "broker":
            self._continue_reading_at_broker(partition)
        elif source == "tier":
            partition.source = "tier"
            until = partition.broker_start if self._mode == "kafka_preferred" and partition.broker_start >= 0 else MAX_OFFSET
            self._feed.start_reading(
                partition.partition,
                self.partition_with_resolved_topic_id(partition.partition),
                partition.consumed_history,
                ignore_latest_only=partition.is_view_done,
                end_offset=until,
            )

    def _continue_reading_after_tier_end(self, partition: AssignedPartition, item: PartitionPrefetchEnd) -> None:
        """Decide where to continue after the tier's readable records were all read, or if the tier no longer has the position.

        :param item: end of the partition as the prefetcher found it.
        """
        partition.is_view_done = True
        if item.offset < item.start <= item.end and not self._does_broker_log_contain_position(partition):
            self._continue_when_position_is_below_log_start(partition, item)
            return
        if item.offset >= item.start:
            partition.set_tier_log_identity(item.log)
        partition.position = max(partition.position, item.offset)
        partition.is_handed_over = item.start <= partition.position <= item.end
        if partition.position >= partition.broker_start:
            self._choose_source_and_continue_reading(partition, "tier_ended")
        elif item.end <= partition.position:
            self._queue_out_of_range_error(partition, f"the tier ends at {item.end}, and the broker begins at {partition.broker_start}")

    def _continue_reading_at_broker(self, partition: AssignedPartition) -> None:
        """Continue to read a partition from the broker. If the topic was created again there, queue an error first, and continue in the new
        topic only if ``offset_reset`` allows it. Do nothing if there is no broker, or if the topic id to read is configured.
        """
        if self._broker is None or partition.partition.topic in self.options.topic_ids:
            return
        topic_id = self._broker.topic_id(partition.partition)
        if are_topic_ids_known_to_differ(partition.topic_id, topic_id) and not self._queue_topic_recreated_error_and_reset(
            partition, "the broker", topic_id, self._broker.log_start_and_end_offset(partition.partition)
        ):
            return
        partition.set_tier_log_identity(None)
        partition.topic_id = topic_id or partition.topic_id
        epoch = partition.consumed_history.last_read_leader_epoch
        self._broker.start_reading_from({partition.partition: partition.position}, {} if epoch is None else {partition.partition: epoch})
        partition.broker_start, partition.source = -1, "broker"

    def _continue_reading_after_log_mismatch(
        self, partition: AssignedPartition, item: PartitionPrefetchEnd, mismatch: HistoryMismatchReason
    ) -> None:
        """Decide where to continue after the tier's log was found not to continue the records that were read."""
        broker = self._broker
        if mismatch.reason == "truncated":
            self._queue_truncation_error(partition, item.log.consumed_history_below_offset(mismatch.agreed_offset))
        elif mismatch.reason == "topic" and (broker is None or broker.topic_id(partition.partition) != partition.topic_id):
            self._queue_topic_recreated_error_and_reset(
                partition, "the tier", item.log.topic_id, LogStartAndEndOffset(item.start, item.end)
            )
        elif broker is not None and partition.position >= partition.broker_start:
            self._continue_reading_at_broker(partition)
        else:
            what = f"of topic id {item.log.topic_id}" if mismatch.reason == "topic" else "one that a later leader has disowned"
            self._queue_out_of_range_error(partition, f"the tier's log is {what}, and no broker has the offset")

    def _queue_truncation_error(self, partition: AssignedPartition, agreed_history: ConsumedLogHistory) -> None:
        """Queue the error that the log was truncated below the position. Then move the position to the end of ``agreed_history``, the part
        of the records read that the log still holds, unless ``offset_reset`` is ``error``.
        """
        if not partition.is_reported:
            partition.is_reported = True
            text = (
                f"{partition.partition} was truncated: the log holds what was read up to offset {agreed_history.end}, "
                f"and the position is {partition.position}"
            )
            self._queue_partition_error_message(partition.partition, agreed_history.end, log_truncation_error(text), partition.topic_id)
        if self.options.offset_reset != "error":
            partition.move_position_to_end_of_history(
                replace(agreed_history, topic_id=partition.topic_id)
                if agreed_history.end < partition.position
                else partition.consumed_history
            )

    def _queue_topic_recreated_error_and_reset(
        self, partition: AssignedPartition, where_found: str, topic_id: TopicId, bounds: LogStartAndEndOffset
    ) -> bool:
        """Queue the error that the topic was created again, and move the position into the new topic as ``offset_reset`` says. Return
        False, and leave the position, if ``offset_reset`` is ``error``.

        :param where_found: "tier" or "broker" as text of the error.
        :param topic_id: id of the new topic.
        :param bounds: first offset and end offset of the new topic's partition.
        """
        self._queue_out_of_range_error(
            partition, f"it was read from topic id {partition.topic_id}, and {where_found} has topic id {topic_id}"
        )
        reset = self.options.offset_reset
        if reset != "error":
            partition.move_position_to_end_of_history(
                consumed_history_before_position(bounds.start if reset == "earliest" else bounds.end, None, topic_id)
            )
        return reset != "error"

    def _does_broker_log_contain_position(self, partition: AssignedPartition) -> bool:
        """Return whether the broker holds the partition's position."""
        if self._broker is None:
            return False
        bounds = self._broker.log_start_and_end_offset(partition.partition)
        return bounds.start <= partition.position <= bounds.end

    def _continue_when_position_is_below_log_start(self, partition: AssignedPartition, item: PartitionPrefetchEnd) -> None:
        """Continue at the tier's start or end, as ``offset_reset`` says, because neither tier nor broker has the records at the position
        any more. With ``error``, queue an error instead.
        """
        if self.options.offset_reset == "error":
            self._queue_out_of_range_error(partition, f"the tier begins at {item.start}")
        else:
            partition.set_tier_log_identity(item.log)
            partition.position = item.start if self.options.offset_reset == "earliest" else item.end
            partition.source = "tier"
            self._feed.start_reading(
                partition.partition,
                self.partition_with_resolved_topic_id(partition.partition),
                partition.consumed_history,
                ignore_latest_only=self.options.view == "all",
            )

    def _continue_partitions_broker_cannot_serve(self) -> None:
        """Decide where to continue for partitions that the broker can no longer serve. Called after all their messages were returned."""
        while self._lost and self._broker is not None:
            name, agreed = self._lost[-1]
            at = self.assigned.get(name)
            if at is not None and at.source == "broker":
                self._continue_when_broker_lacks_position(at, agreed, self._broker)
            self._lost.pop()

    def _continue_when_broker_lacks_position(
        self, partition: AssignedPartition, truncation_offset: int | None, broker: BrokerClient
    ) -> None:
        """Decide where to continue after the broker was found not to hold the position.

        :param truncation_offset: the broker's log was truncated and holds what was read up to this offset; None if it was not truncated.
        """
        topic_id, bounds = broker.topic_id(partition.partition), broker.log_start_and_end_offset(partition.partition)
        self._schedule_partition_retry(partition)
        if are_topic_ids_known_to_differ(partition.topic_id, topic_id):
            self._continue_reading_at_broker(partition)
        elif truncation_offset is not None:
            # A later epoch begins there: a tier without one holds the discarded records.
            later = tuple(LeaderEpochEnd(LeaderEpoch(epoch + 1), truncation_offset) for epoch, _ in partition.consumed_history.epochs[-1:])
            self._queue_truncation_error(
                partition,
                ConsumedLogHistory(
                    partition.topic_id,
                    partition.consumed_history.consumed_history_below_offset(truncation_offset).epochs + later,
                    truncation_offset,
                ),
            )
        elif self._mode == "kafka_only" and not bounds.start <= partition.position <= bounds.end:
            self._continue_reading_after_offset_reset(partition, bounds)
        elif partition.position < bounds.start:
            partition.broker_start, partition.is_view_done = bounds.start, True
            self._choose_source_and_continue_reading(partition, "broker_deleted")
        elif partition.position > bounds.end:
            self._queue_out_of_range_error(partition, f"the broker's log ends at {bounds.end}: was it truncated?")
        else:
            partition.epochs = ()  # the broker cannot tell where the epoch ends

    def _continue_reading_after_offset_reset(self, partition: AssignedPartition, bounds: LogStartAndEndOffset) -> None:
        """Continue at the start or end of the broker's log, as ``offset_reset`` says, because the broker does not have the position and the
        tier is not read. With ``error``, queue an error instead.

        :param bounds: first offset and end offset of the broker's log.
        """
        if self.options.offset_reset == "error":
            self._queue_out_of_range_error(partition, f"the broker's log begins at {bounds.start} and ends at {bounds.end}")
        else:
            partition.move_position_to_end_of_history(
                consumed_history_before_position(
                    bounds.start if self.options.offset_reset == "earliest" else bounds.end, None, partition.topic_id
                )
            )
            self._continue_reading_at_broker(partition)

    def _queue_out_of_range_error(self, partition: AssignedPartition, reason: str) -> None:
        """Queue the error that the partition's position does not exist, unless an error was reported already after its last record."""
        if not partition.is_reported:
            partition.is_reported = True
            text = f"offset {partition.position} of {partition.partition} is not there: {reason}"
            self._queue_partition_error_message(
                partition.partition, partition.position, offset_out_of_range_error(text), partition.topic_id
            )

    def _schedule_partition_retry(self, partition: AssignedPartition) -> None:
        """Let the partition be read again after ``refresh_s`` seconds."""
        partition.source, partition.wake_s = "none", time.monotonic() + self.options.refresh_s

    def _resolve_logical_offset(self, partition: TopicPartition, offset: int) -> int:
        """Return the offset that a logical offset, such as OFFSET_BEGINNING, stands for; other offsets are returned as they are. For
        OFFSET_INVALID (no offset), ``offset_reset`` decides; raises UsageError if that is ``error``.
        """
        if offset >= 0:
            return offset
        reset = self.options.offset_reset
        if offset == OFFSET_BEGINNING or (offset != OFFSET_END and reset == "earliest"):
            return self.readable_bounds_of_tier_and_broker(partition).start
        if offset == OFFSET_END or reset == "latest":
            return self.readable_bounds_of_tier_and_broker(partition).end
        raise UsageError(f"no offset for {partition}", hint=f"Give one, or OFFSET_BEGINNING; {OFFSET_INVALID} is none")
