"""Choice of the source, tier or broker, of the next records of each assigned partition.

Reading moves from the tier to the broker at an offset: with read_uncommitted at the tier's end, with read_committed at the first offset of
    the oldest transaction that is open there, because the broker knows its outcome. If the broker has deleted that offset already, the tier
    is read again. Every step begins at the position (the offset after the last returned message), so that there is neither a gap nor a
    repeat.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Literal, get_args

from compactor.access.tier import Tier
from compactor.constants import EMPTY_TOPIC_ID, MAX_OFFSET, LeaderEpoch, TopicId
from compactor.errors import UsageError
from compactor.features.consumer.group import BrokerClient, LogStartAndEndOffset
from compactor.model.ids import TopicPartition
from compactor.read.outcomes import (
    ConsumedLogHistory,
    HistoryMismatchReason,
    LeaderEpochEnd,
    LogIdentity,
    consumed_history_before_position,
    find_log_mismatch,
    log_identity,
    topic_ids_differ,
)
from compactor.read.ranges import last_values, select_records_at_offsets
from compactor.read.reading import LogChanged, OffsetRangeReader, OffsetRangeToRead, ReadOptions, last_stable_offset, offset_for_time
from compactor.read.records import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    ConfluentMessage,
    HasTopicPartitionAndOffset,
    MessageLike,
    PartitionReadError,
    RecordBlock,
    TierMessage,
    copy_to_record_block,
    log_truncation_error,
    no_committed_offset_error,
    out_of_range_error,
    to_broker_messages,
)
from compactor.records.batches import Int64s

Mode = Literal["remote_only", "kafka_only", "remote_preferred", "kafka_preferred"]
"""Where records are read: from the tier only, from brokers only, or from both; then from the preferred one if both have an offset."""

MODES: Final[tuple[Mode, ...]] = get_args(Mode)

Source = Literal["tier", "broker", "none"]
"""What a partition's records come from. With ``none`` the partition waits, and then starts again."""

ReadSourceEvent = Literal["start", "tier_ended", "broker_deleted"]
"""Reason to decide anew.

start: the partition was assigned or sought, or its waiting time is over.
tier_ended: the tier holds no further record, or (with ``kafka_preferred``) the brokers hold the next one.
broker_deleted: the brokers' log begins above the position.
"""

NEXT_SOURCE: Final[dict[tuple[Mode, ReadSourceEvent], Source]] = {
    ("remote_only", "start"): "tier",
    ("remote_only", "tier_ended"): "none",
    ("remote_only", "broker_deleted"): "none",
    ("kafka_only", "start"): "broker",
    ("kafka_only", "tier_ended"): "broker",
    ("kafka_only", "broker_deleted"): "none",
    ("remote_preferred", "start"): "tier",
    ("remote_preferred", "tier_ended"): "broker",
    ("remote_preferred", "broker_deleted"): "tier",
    ("kafka_preferred", "start"): "broker",
    ("kafka_preferred", "tier_ended"): "broker",
    ("kafka_preferred", "broker_deleted"): "tier",
}

AssignmentStep = Literal["replace", "add", "remove"]
"""Change of an assignment: all of it (``assign``), or a part of it (a cooperative rebalance)."""


@dataclass(frozen=True)
class AssignmentChange:
    """Partitions to stop reading first, and to start reading then; one may be in both."""

    dropped: tuple[TopicPartition, ...]
    added: tuple[TopicPartition, ...]


def compute_assignment_change(
    assigned: Collection[TopicPartition], step: AssignmentStep, partitions: Collection[TopicPartition]
) -> AssignmentChange:
    if step == "replace":
        return AssignmentChange(tuple(assigned), tuple(partitions))
    if step == "add":
        return AssignmentChange((), tuple(name for name in partitions if name not in assigned))
    return AssignmentChange(tuple(name for name in partitions if name in assigned), ())


@dataclass
class AssignedPartition:
    """Position of a partition that a consumer reads, and the source of its next records.

    position: offset after the last returned message.
    topic_id: of what was read; empty if unknown.
    epochs: leader epochs that were read, used only if ``log`` is None. The last one extends up to the position.
    log: the tier's log; None if the broker is read.
    source: ``none`` while the partition waits until ``wake_s`` (seconds of the monotonic clock).
    broker_start: the broker's first offset, if it is greater than the position; else -1.
    is_reported: an error was returned after the last record.
    """

    partition: TopicPartition
    position: int
    topic_id: TopicId = EMPTY_TOPIC_ID
    epochs: tuple[LeaderEpochEnd, ...] = ()
    log: LogIdentity | None = None
    source: Source = "none"
    wake_s: float = 0.0
    broker_start: int = -1
    is_handed_over: bool = False
    is_reported: bool = False
    is_view_done: bool = False

    @property
    def consumed_history(self) -> ConsumedLogHistory:
        """History up to the position, with which another log is compared before reading continues there."""
        if self.log is not None:
            return replace(self.log.consumed_history_below_offset(self.position), topic_id=self.topic_id)
        epochs = (*self.epochs[:-1], LeaderEpochEnd(self.epochs[-1].epoch, self.position)) if self.epochs else ()
        return ConsumedLogHistory(self.topic_id, epochs, self.position)

    def set_tier_log_identity(self, identity: LogIdentity | None) -> None:
        """Set the source of the next records; None for the broker."""
        self.epochs = self.consumed_history.epochs
        if identity is not None:
            self.topic_id = identity.topic_id or self.topic_id
        self.log = identity

    def advance_past_record(self, offset: int, epoch: LeaderEpoch | None) -> None:
        if epoch is not None and (not self.epochs or epoch > self.epochs[-1].epoch):
            self.epochs = (*self.consumed_history.epochs, LeaderEpochEnd(epoch, offset + 1))
        self.position, self.is_reported = offset + 1, False

    def move_to_history_end(self, history: ConsumedLogHistory) -> None:
        self.position, self.topic_id, self.epochs, self.log = history.end, history.topic_id, history.epochs, None
        self.is_view_done, self.is_reported, self.broker_start = True, False, -1


# ---- the tier's part: a few threads read partitions in advance, into one bounded queue of blocks ------------------------------
#
# A thread reads one partition for a *turn* and then continues with the next one that is due. Memory: ``queue_bytes`` of blocks, and for
# each thread one more block and the pieces of the segment that it is reading.


TURN_BYTES = 64 << 20
"""Size of the blocks after which another partition gets a turn."""


@dataclass(eq=False)
class PartitionPrefetchState:
    """Partition that a TierPrefetcher reads, TURN_BYTES at a time.

    incarnation: with the topic id that is read.
    consumed_history: before this reading.
    view_offsets: last records of all keys, the only ones read below ``view_end``; None for all offsets.
    view_end: exclusive; -1 if the last records are still to be found.
    """

    partition: TopicPartition
    incarnation: TopicPartition
    offset: int
    consumed_history: ConsumedLogHistory
    view_offsets: Int64s | None = None
    view_end: int = -1
    log: LogIdentity | None = None
    end_offset: int = MAX_OFFSET


@dataclass(frozen=True)
class PrefetchedRecords:
    partition: TopicPartition
    block: RecordBlock
    log: LogIdentity


@dataclass(frozen=True)
class PartitionPrefetchEnd:
    """Last item of a partition whose readable records, or those up to the requested end, were all read.

    offset: after the last one that was read; less than ``end`` if a transaction is open at the tier's end or an earlier end was requested,
        less than ``start`` if the tier has deleted the records at the position.
    end: of the tier, exclusive.
    mismatch: why the tier's log does not continue what was read.
    """

    partition: TopicPartition
    offset: int
    start: int
    end: int
    log: LogIdentity
    mismatch: HistoryMismatchReason | None = None


@dataclass(frozen=True)
class PartitionPrefetchFailure:
    partition: TopicPartition
    error: Exception


PrefetchedItem = PrefetchedRecords | PartitionPrefetchEnd | PartitionPrefetchFailure


class TierPrefetcher:
    """Reads several partitions in its own threads, and queues their records. After its last item, PartitionPrefetchEnd or
    PartitionPrefetchFailure, a partition can be started again.

    :param latest_only: of the records that the tier holds at the start, read only the last one of each key; read all later ones.
    """

    def __init__(
        self, tier: Tier, *, read_committed: bool, latest_only: bool, threads: int, queue_bytes: int, skip_damaged: bool = False
    ) -> None:
        self._tier = tier
        self._committed = read_committed
        self._skip_damaged = skip_damaged
        self._latest_only = latest_only
        self._max_threads = threads
        self._queue_bytes = queue_bytes
        self._hash_key = b""
        self._condition = threading.Condition()
        self._reads: dict[TopicPartition, PartitionPrefetchState] = {}
        self._due_reads: deque[PartitionPrefetchState] = deque()
        self._queue: deque[PrefetchedItem] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def has_work(self) -> bool:
        with self._condition:
            return bool(self._reads or self._queue)

    def start_reading(
        self,
        partition: TopicPartition,
        partition_with_topic_id: TopicPartition,
        consumed_history: ConsumedLogHistory,
        *,
        ignore_latest_only: bool = False,
        end_offset: int = MAX_OFFSET,
    ) -> None:
        """Start to read a partition from the end of ``consumed_history``. Items of an earlier start are dropped.


        :param end_offset: exclusive.
        """
        self.stop_reading(partition)
        if self._latest_only and not self._hash_key:
            self._hash_key = self._tier.identity.temporary_hash_key()
        turn = PartitionPrefetchState(
            partition,
            partition_with_topic_id,
            consumed_history.end,
            consumed_history,
            view_end=consumed_history.end if ignore_latest_only or not self._latest_only else -1,
            end_offset=end_offset,
        )
        with self._condition:
            self._reads[partition] = turn
            self._due_reads.append(turn)
            if len(self._threads) < min(self._max_threads, len(self._reads)):
                thread = threading.Thread(target=self._run_reading_thread, name=f"tier-feed-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify_all()

    def stop_reading(self, partition: TopicPartition) -> None:
        with self._condition:
            self._reads.pop(partition, None)
            for item in [item for item in self._queue if item.partition == partition]:
                self._queue.remove(item)
                self._queued_bytes -= _memory_bytes_of_item(item)
            self._condition.notify_all()

    def next_prefetched_item(self, timeout_s: float) -> PrefetchedItem | None:
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not self._queue:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._condition.wait(left)
            item = self._queue.popleft()
            self._queued_bytes -= _memory_bytes_of_item(item)
            self._condition.notify_all()
            return item

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._reads.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run_reading_thread(self) -> None:
        while True:
            with self._condition:
                while not self._due_reads and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                turn = self._due_reads.popleft()
            try:
                item: PrefetchedItem | None = self._prefetch_turn(turn)
            except LogChanged:
                self._requeue_partition(turn)  # the next turn compares what was read below its offset
                continue
            except Exception as error:  # noqa: BLE001 - returned by next_prefetched_item
                item = PartitionPrefetchFailure(turn.partition, error)
            if item is not None:
                self._enqueue_item_unless_stopped(turn, item, is_last=True)

    def _prefetch_turn(self, partition: PartitionPrefetchState) -> PrefetchedItem | None:
        """Queue up to TURN_BYTES of records. Return the last item, which the caller queues, or None if more is to be read later or reading
        was stopped.
        """
        state = self._tier.open_partition_log(partition.incarnation).refresh()
        start, end = self._tier.first_readable_offset(state), state.end_offset + 1
        log = log_identity(self._tier, state)
        read_until = partition.offset if partition.view_offsets is None else partition.view_end
        mismatch = find_log_mismatch(
            partition.consumed_history if partition.log is None else partition.log.consumed_history_below_offset(read_until), log
        )
        if mismatch is not None:
            return PartitionPrefetchEnd(partition.partition, partition.offset, start, end, log, mismatch)
        partition.log = log
        bound = min(last_stable_offset(self._tier, state) if self._committed else end, partition.end_offset)
        if partition.offset >= bound or partition.offset < start:
            return PartitionPrefetchEnd(partition.partition, partition.offset, start, end, log)
        if partition.view_end < 0:
            view = last_values(
                self._tier,
                partition.incarnation,
                first_offset=partition.offset,
                last_offset=bound - 1,
                read_committed=self._committed,
                hash_key=self._hash_key,
            )
            partition.view_offsets = view.offsets()
            partition.view_end = bound
        if partition.view_offsets is not None and partition.offset < partition.view_end:
            bound = min(bound, partition.view_end)
        else:
            partition.view_offsets = None
        limit = self._tier.cleaner_settings_for_topic(partition.partition.topic).max_decompressed_batch_bytes
        segments = tuple(segment for segment in state.live if segment.end_offset >= partition.offset)
        extent = OffsetRangeToRead(partition.incarnation, partition.offset, bound - 1, segments, log)
        read = 0
        options = ReadOptions(
            self._committed, limit, requests_in_advance=self._idle_threads_per_partition(), skip_damaged=self._skip_damaged
        )
        for selection in OffsetRangeReader(self._tier, extent, options).read_selected_records():
            mine = selection if partition.view_offsets is None else select_records_at_offsets(selection, partition.view_offsets)
            reached = int(selection.rows.offset[selection.picked[-1]]) + 1
            if len(mine):
                block = copy_to_record_block(partition.partition, mine, log.topic_id)
                read += block.nbytes
                if not self._enqueue_item_unless_stopped(partition, PrefetchedRecords(partition.partition, block, log)):
                    return None
            partition.offset = reached
            if read >= TURN_BYTES and self._due_reads:
                self._requeue_partition(partition)
                return None
        partition.offset = bound
        if partition.view_offsets is not None:
            self._requeue_partition(partition)
            return None
        return PartitionPrefetchEnd(partition.partition, bound, start, end, log)

    def _idle_threads_per_partition(self) -> int:
        """Rounded down."""
        with self._condition:
            return max(0, self._max_threads - len(self._reads)) // max(1, len(self._reads))

    def _requeue_partition(self, partition: PartitionPrefetchState) -> None:
        with self._condition:
            self._due_reads.append(partition)
            self._condition.notify()

    def _enqueue_item_unless_stopped(self, partition: PartitionPrefetchState, item: PrefetchedItem, *, is_last: bool = False) -> bool:
        """Wait for space and add an item. Return False, without adding it, if reading was stopped. After the last one, the partition is no
        longer being read.
        """
        size = _memory_bytes_of_item(item)
        with self._condition:
            while (
                self._reads.get(partition.partition) is partition and self._queued_bytes and self._queued_bytes + size > self._queue_bytes
            ):
                self._condition.wait()
            if self._reads.get(partition.partition) is not partition:
                return False
            if is_last:
                del self._reads[partition.partition]
            self._queue.append(item)
            self._queued_bytes += size
            self._condition.notify_all()
            return True


def _memory_bytes_of_item(item: PrefetchedItem) -> int:
    return item.block.nbytes if isinstance(item, PrefetchedRecords) else 0


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
    """Options.

    view: with ``latest``, first only the last record of each key that the tier holds when reading begins, without tombstones, then every
        later record.
    queue_bytes: prefetched records in memory.
    refresh_s: until a partition that could not be read is retried.
    offset_reset: where to begin if the records at an offset no longer exist, if no offset was given, or if the topic was created again;
        with ``error``, an error message is returned instead.
    topic_ids: topic name -> id of the topic to read, if not the latest one of this name; read from the tier alone.
    mode: without a broker, always ``remote_only``.
    skip_damaged: skip the tier's unreadable offsets with a warning (``logging``) instead of an error. Not with ``view`` latest, because an
        older value would take the place of one that cannot be read.

    Raises UsageError if ``mode`` is unknown, or does not read the tier first and ``view`` is ``latest``.
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
        return self.isolation == "read_committed"


@dataclass
class ConsecutiveMessages:
    """Consecutive messages of one partition from one source, or (without a partition) one message that reports an error.

    epoch: of all of a broker's messages; None if unknown, and for messages of the tier.
    """

    partition: AssignedPartition | None
    messages: Iterator[MessageLike]
    is_from_broker: bool = False
    epoch: LeaderEpoch | None = None

    @property
    def is_source_current(self) -> bool:
        return self.partition is None or not self.is_from_broker or self.partition.source == "broker"


class TierAndBrokerReader:
    """Reader of assigned partitions from tier and broker. For one thread.

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

    def require_partitions_readable(self, partitions: Collection[TopicPartition]) -> None:
        """Raise UsageError if only the tier is read, and a partition is not in the tier."""
        if self._broker is None:
            self.tier.list_partitions([str(name) for name in partitions])

    def start_reading(self, partitions: Iterable[AssignedPartition]) -> None:
        """In addition to those that are being read."""
        self.assigned.update((at.partition, at) for at in partitions)
        self._restart_waiting_partitions(time.monotonic())

    def drop_queued_records(self, partitions: Collection[TopicPartition]) -> None:
        """Stop reading partitions, which keep their positions."""
        for name in partitions:
            self._feed.stop_reading(name)
            if name in self.assigned:
                self.assigned[name].source, self.assigned[name].wake_s = "none", NEVER_S
        if self._broker is not None and partitions:
            self._broker.stop_reading(partitions)
        self.ready = deque(run for run in self.ready if run.partition is None or run.partition.partition not in partitions)

    def remove_partitions(self, partitions: Collection[TopicPartition]) -> None:
        for name in partitions:
            self.assigned.pop(name, None)

    def assigned_partition_at_position(self, partition: TopicPartition, place: HasTopicPartitionAndOffset) -> AssignedPartition:
        """Raises UsageError if ``place`` has no offset and ``offset_reset`` is ``error``."""
        offset = self._resolve_logical_offset(partition, place.offset)
        epoch = getattr(place, "leader_epoch", None) if offset == place.offset else None
        read = consumed_history_before_position(offset, epoch, getattr(place, "topic_id", ""))
        return AssignedPartition(partition, offset, read.topic_id, read.epochs)

    def assign_or_queue_error(self, partition: TopicPartition, place: HasTopicPartitionAndOffset) -> AssignedPartition:
        """Queue the error of ``assigned_partition_at_position``, if any, and return a state in which the partition waits without end."""
        try:
            return self.assigned_partition_at_position(partition, place)
        except UsageError as error:
            self._queue_partition_error_message(partition, OFFSET_INVALID, no_committed_offset_error(error.message))
            return AssignedPartition(partition, OFFSET_INVALID, wake_s=NEVER_S, is_reported=True)

    def resolve_partition(self, partition: TopicPartition) -> TopicPartition:
        topic_id = TopicId(self.options.topic_ids.get(partition.topic, ""))
        if topic_id and partition not in self._chosen:
            self._chosen[partition] = self.tier.incarnation_with_topic_id(partition, topic_id)
        return self._chosen.get(partition) or self.tier.latest_incarnation(partition)

    def readable_bounds(self, partition: TopicPartition) -> LogStartAndEndOffset:
        """Bounds of tier and broker together; the end is exclusive."""
        if self._broker is not None and self._mode == "kafka_only":
            return self._broker.offset_bounds(partition)
        state = self.tier.open_partition_log(self.resolve_partition(partition)).refresh()
        mine = LogStartAndEndOffset(self.tier.first_readable_offset(state), state.end_offset + 1)
        if self._broker is None:
            return mine
        its = self._broker.offset_bounds(partition)
        return LogStartAndEndOffset(min(mine.start, its.start), max(mine.end, its.end)) if state.has_segments else its

    def offset_for_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        offset = None if self._mode == "kafka_only" else offset_for_time(self.tier, self.resolve_partition(partition), timestamp_ms)
        return self._broker.offset_for_time(partition, timestamp_ms) if offset is None and self._broker is not None else offset

    def close(self) -> None:
        self._feed.close()
        if self._client is not None:
            self._client.close()

    # ---- records -----------------------------------------------------------------------------------------------------------

    def receive_messages(self, wait_s: float) -> bool:
        """Fill the queue of ready messages, which must be empty. Return whether any have arrived in time."""
        now = time.monotonic()
        self._continue_lost_partitions()
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
        most = 0.0 if item is not None else BROKER_SLICE_S if self._feed.has_work else BROKER_WAIT_S
        fetched = self._broker.fetch_messages(MAX_FETCH, min(wait_s, most))
        for name, offset in fetched.compacted.items():
            self._report_missing_deletes(name, offset)
        self._queue_broker_messages(fetched.messages)
        self._lost += [*((name, None) for name in fetched.out_of_range), *fetched.truncated.items()]
        return item is not None or bool(fetched.messages) or bool(self._lost)

    def _report_missing_deletes(self, partition: TopicPartition, offset: int) -> None:
        """Queue an error if the broker has compacted what follows the tier's end, from ``offset`` on: a key that was read from the tier may
        be deleted, or an aborted record committed, without a sign. With ``offset_reset`` ``error`` the position stays; else reading
        continues.
        """
        at = self.assigned.get(partition)
        if at is None or not at.is_handed_over:
            return
        if not at.is_reported:
            text = (
                f"offset {offset} of {partition} is not there: brokers compact this topic, and have removed records that the tier lacks."
                " Keys that were read from the tier may be deleted. Import the whole log again, or read it with tier.mode kafka_preferred"
            )
            self._queue_partition_error_message(partition, offset, out_of_range_error(text), at.topic_id)
            at.is_reported = True
        if self.options.offset_reset == "error" and self._broker is not None:
            self._broker.stop_reading([partition])
            self._schedule_partition_retry(at)
        at.is_handed_over = False

    def _queue_broker_messages(self, messages: Sequence[ConfluentMessage]) -> None:
        """Queue messages, except those before the position and those of partitions that are no longer read from the broker."""
        for (topic, partition, epoch), group in groupby(messages, lambda found: (found.topic(), found.partition(), found.leader_epoch())):
            at = self.assigned.get(TopicPartition(topic, partition))
            if at is not None and at.source == "broker":
                mine = [message for message in group if message.offset() >= at.position]
                self.ready.append(ConsecutiveMessages(at, to_broker_messages(mine, at.topic_id), is_from_broker=True, epoch=epoch))

    def _queue_partition_error_message(
        self, partition: TopicPartition, offset: int, error: PartitionReadError, topic_id: TopicId = EMPTY_TOPIC_ID
    ) -> None:
        self.ready.append(ConsecutiveMessages(None, iter((TierMessage(*partition, offset, error=error, topic_id=topic_id),))))

    def _queue_prefetched_item(self, item: PrefetchedItem) -> None:
        at = self.assigned.get(item.partition)
        if at is None or at.source != "tier":
            return
        if isinstance(item, PartitionPrefetchEnd):
            self._schedule_partition_retry(at)  # retried if the broker does not answer
            if item.mismatch is not None:
                self._continue_after_mismatch(at, item, item.mismatch)
            else:
                self._continue_after_tier(at, item)
        elif isinstance(item, PartitionPrefetchFailure):
            self._schedule_partition_retry(at)
            raise item.error
        else:
            self.ready.append(ConsecutiveMessages(at, item.block.messages()))
            at.set_tier_log_identity(item.log)

    # ---- tier and broker -----------------------------------------------------------------------------------------------------

    def _restart_waiting_partitions(self, now_s: float) -> None:
        due = [at for at in self.assigned.values() if at.source == "none" and at.wake_s <= now_s]
        if due and self.tier.kind.is_compactor_managed and self._mode != "kafka_only":
            self.tier.catalog.refresh()  # the topic may have been created again
        for at in due:
            self._schedule_partition_retry(at)
            self._continue_reading(at, "start")

    def _continue_reading(self, partition: AssignedPartition, event: ReadSourceEvent) -> None:
        source = NEXT_SOURCE[self._mode, event]
        if source == "broker":
            self._continue_reading_at_broker(partition)
        elif source == "tier":
            partition.source = "tier"
            until = partition.broker_start if self._mode == "kafka_preferred" and partition.broker_start >= 0 else MAX_OFFSET
            self._feed.start_reading(
                partition.partition,
                self.resolve_partition(partition.partition),
                partition.consumed_history,
                ignore_latest_only=partition.is_view_done,
                end_offset=until,
            )

    def _continue_after_tier(self, partition: AssignedPartition, item: PartitionPrefetchEnd) -> None:
        partition.is_view_done = True
        if item.offset < item.start <= item.end and not self._broker_has_position(partition):
            self._reset_at_tier(partition, item)
            return
        if item.offset >= item.start:
            partition.set_tier_log_identity(item.log)
        partition.position = max(partition.position, item.offset)
        partition.is_handed_over = item.start <= partition.position <= item.end
        if partition.position >= partition.broker_start:
            self._continue_reading(partition, "tier_ended")
        elif item.end <= partition.position:
            self._queue_range_error(partition, f"the tier ends at {item.end}, and the broker begins at {partition.broker_start}")

    def _continue_reading_at_broker(self, partition: AssignedPartition) -> None:
        """Continue at the broker, if there is one and no topic id is configured. If the topic was created again there, queue an error
        first, and continue in the new topic only if ``offset_reset`` allows it.
        """
        if self._broker is None or partition.partition.topic in self.options.topic_ids:
            return
        topic_id = self._broker.topic_id(partition.partition)
        if topic_ids_differ(partition.topic_id, topic_id) and not self._enter_recreated_topic(
            partition, "the broker", topic_id, self._broker.offset_bounds(partition.partition)
        ):
            return
        partition.set_tier_log_identity(None)
        partition.topic_id = topic_id or partition.topic_id
        epoch = partition.consumed_history.last_read_leader_epoch
        self._broker.start_reading_from({partition.partition: partition.position}, {} if epoch is None else {partition.partition: epoch})
        partition.broker_start, partition.source = -1, "broker"

    def _continue_after_mismatch(self, partition: AssignedPartition, item: PartitionPrefetchEnd, mismatch: HistoryMismatchReason) -> None:
        broker = self._broker
        if mismatch.reason == "truncated":
            self._queue_truncation_error(partition, item.log.consumed_history_below_offset(mismatch.agreed_offset))
        elif mismatch.reason == "topic" and (broker is None or broker.topic_id(partition.partition) != partition.topic_id):
            self._enter_recreated_topic(partition, "the tier", item.log.topic_id, LogStartAndEndOffset(item.start, item.end))
        elif broker is not None and partition.position >= partition.broker_start:
            self._continue_reading_at_broker(partition)
        else:
            what = f"of topic id {item.log.topic_id}" if mismatch.reason == "topic" else "one that a later leader has disowned"
            self._queue_range_error(partition, f"the tier's log is {what}, and no broker has the offset")

    def _queue_truncation_error(self, partition: AssignedPartition, agreed_history: ConsumedLogHistory) -> None:
        """Unless ``offset_reset`` is ``error``, continue after ``agreed_history``, which the log still holds."""
        if not partition.is_reported:
            partition.is_reported = True
            text = (
                f"{partition.partition} was truncated: the log holds what was read up to offset {agreed_history.end}, "
                f"and the position is {partition.position}"
            )
            self._queue_partition_error_message(partition.partition, agreed_history.end, log_truncation_error(text), partition.topic_id)
        if self.options.offset_reset != "error":
            partition.move_to_history_end(
                replace(agreed_history, topic_id=partition.topic_id)
                if agreed_history.end < partition.position
                else partition.consumed_history
            )

    def _enter_recreated_topic(
        self, partition: AssignedPartition, where_found: str, topic_id: TopicId, bounds: LogStartAndEndOffset
    ) -> bool:
        """Queue an error, and move the position into the new topic as ``offset_reset`` says. Return False, and leave the position, if that
        is ``error``.
        """
        self._queue_range_error(partition, f"it was read from topic id {partition.topic_id}, and {where_found} has topic id {topic_id}")
        reset = self.options.offset_reset
        if reset != "error":
            partition.move_to_history_end(
                consumed_history_before_position(bounds.start if reset == "earliest" else bounds.end, None, topic_id)
            )
        return reset != "error"

    def _broker_has_position(self, partition: AssignedPartition) -> bool:
        if self._broker is None:
            return False
        bounds = self._broker.offset_bounds(partition.partition)
        return bounds.start <= partition.position <= bounds.end

    def _reset_at_tier(self, partition: AssignedPartition, item: PartitionPrefetchEnd) -> None:
        """Continue at the tier's start or end, as ``offset_reset`` says, because the position is gone. With ``error``, queue an error
        instead.
        """
        if self.options.offset_reset == "error":
            self._queue_range_error(partition, f"the tier begins at {item.start}")
        else:
            partition.set_tier_log_identity(item.log)
            partition.position = item.start if self.options.offset_reset == "earliest" else item.end
            partition.source = "tier"
            self._feed.start_reading(
                partition.partition,
                self.resolve_partition(partition.partition),
                partition.consumed_history,
                ignore_latest_only=self.options.view == "all",
            )

    def _continue_lost_partitions(self) -> None:
        while self._lost and self._broker is not None:
            name, agreed = self._lost[-1]
            at = self.assigned.get(name)
            if at is not None and at.source == "broker":
                self._continue_lost_partition(at, agreed, self._broker)
            self._lost.pop()

    def _continue_lost_partition(self, partition: AssignedPartition, truncation_offset: int | None, broker: BrokerClient) -> None:
        """Decide where to go on. ``truncation_offset``: the truncated log holds what was read up to it; None if it was not truncated."""
        topic_id, bounds = broker.topic_id(partition.partition), broker.offset_bounds(partition.partition)
        self._schedule_partition_retry(partition)
        if topic_ids_differ(partition.topic_id, topic_id):
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
            self._reset_at_broker(partition, bounds)
        elif partition.position < bounds.start:
            partition.broker_start, partition.is_view_done = bounds.start, True
            self._continue_reading(partition, "broker_deleted")
        elif partition.position > bounds.end:
            self._queue_range_error(partition, f"the broker's log ends at {bounds.end}: was it truncated?")
        else:
            partition.epochs = ()  # the broker cannot tell where the epoch ends

    def _reset_at_broker(self, partition: AssignedPartition, bounds: LogStartAndEndOffset) -> None:
        """Continue at the broker's start or end, as ``offset_reset`` says. With ``error``, queue an error instead."""
        if self.options.offset_reset == "error":
            self._queue_range_error(partition, f"the broker's log begins at {bounds.start} and ends at {bounds.end}")
        else:
            partition.move_to_history_end(
                consumed_history_before_position(
                    bounds.start if self.options.offset_reset == "earliest" else bounds.end, None, partition.topic_id
                )
            )
            self._continue_reading_at_broker(partition)

    def _queue_range_error(self, partition: AssignedPartition, reason: str) -> None:
        """At most one error is queued after the last record."""
        if not partition.is_reported:
            partition.is_reported = True
            text = f"offset {partition.position} of {partition.partition} is not there: {reason}"
            self._queue_partition_error_message(partition.partition, partition.position, out_of_range_error(text), partition.topic_id)

    def _schedule_partition_retry(self, partition: AssignedPartition) -> None:
        partition.source, partition.wake_s = "none", time.monotonic() + self.options.refresh_s

    def _resolve_logical_offset(self, partition: TopicPartition, offset: int) -> int:
        """For OFFSET_INVALID (no offset), ``offset_reset`` decides; raises UsageError if that is ``error``."""
        if offset >= 0:
            return offset
        reset = self.options.offset_reset
        if offset == OFFSET_BEGINNING or (offset != OFFSET_END and reset == "earliest"):
            return self.readable_bounds(partition).start
        if offset == OFFSET_END or reset == "latest":
            return self.readable_bounds(partition).end
        raise UsageError(f"no offset for {partition}", hint=f"Give one, or OFFSET_BEGINNING; {OFFSET_INVALID} is none")
