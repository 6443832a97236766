"""The tier's part of a consumer: a few threads read partitions in advance, into one bounded queue of blocks.

A thread reads one partition for a *turn* and then continues with the next one that is due. Memory: ``queue_bytes`` of blocks, and for each
thread one more block and the pieces of the segment that it is reading.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from compactor.access.tier import Tier
from compactor.constants import MAX_OFFSET
from compactor.consumer.history import ConsumedLogHistory, HistoryMismatchReason, LogIdentity, find_log_mismatch, log_identity
from compactor.consumer.last_values import last_value_of_each_key_in_partition, select_records_at_offsets
from compactor.consumer.messages import RecordBlock, copy_to_record_block
from compactor.consumer.reading import LogChanged, OffsetRangeReader, OffsetRangeToRead, ReadOptions, last_stable_offset
from compactor.model.ids import TopicPartition
from compactor.records.batches import Int64s

TURN_BYTES = 64 << 20
"""Size of the blocks after which another partition gets a turn."""


@dataclass(eq=False)
class PartitionPrefetchState:
    """Partition that the threads of a TierPrefetcher read, TURN_BYTES at a time, with the state of this reading.

    incarnation: the partition under the topic id that is read. Each topic id is one incarnation: a topic's life from creation to deletion.
    offset: next offset to read.
    consumed_history: topic id, leader epochs and end of the records that were read before this reading was started.
    view_offsets: offsets of the last records of all keys, to which reading is restricted below ``view_end``; None for all offsets.
    view_end: end of the offsets that ``view_offsets`` covers, exclusive; -1 if the last records are still to be found.
    log: identity of the log that was read since the start; None before the first records.
    end_offset: offset at which reading ends, exclusive.
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
    """Item of a TierPrefetcher: records of a partition that were read, as columns, with the identity of their log."""

    partition: TopicPartition
    block: RecordBlock
    log: LogIdentity


@dataclass(frozen=True)
class PartitionPrefetchEnd:
    """Last item that a TierPrefetcher queues for a partition after it has read all readable records, or those up to the requested end.

    offset: offset after the last one that was read. It is less than ``end`` if a transaction is open at the tier's end or an earlier end
        was requested, and less than ``start`` if the tier has deleted the records at the position.
    start, end: first offset and end offset (exclusive) of the tier.
    log: identity of the tier's log.
    mismatch: reason why this log does not continue the records that were read; None if it does.
    """

    partition: TopicPartition
    offset: int
    start: int
    end: int
    log: LogIdentity
    mismatch: HistoryMismatchReason | None = None


@dataclass(frozen=True)
class PartitionPrefetchFailure:
    """Last item that a TierPrefetcher queues for a partition that it could not read, with the error."""

    partition: TopicPartition
    error: Exception


PrefetchedItem = PrefetchedRecords | PartitionPrefetchEnd | PartitionPrefetchFailure


class TierPrefetcher:
    """Prefetcher that reads several partitions of a tier in its own threads, and queues their records. The last item of each partition is
    PartitionPrefetchEnd or PartitionPrefetchFailure; then the partition can be started again.

    :param latest_only: of the records that the tier holds when a partition is started, read only the last one of each key; read all later
        records.
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
    def has_queued_items_or_active_reads(self) -> bool:
        """Return whether items are waiting or partitions are being read."""
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

        :param partition_with_topic_id: the partition under the topic id to read.
        :param consumed_history: what was read of the partition before.
        :param ignore_latest_only: read every record, even if ``latest_only`` is set.
        :param end_offset: offset at which reading ends, exclusive.
        """
        self.stop_reading(partition)
        if self._latest_only and not self._hash_key:
            self._hash_key = self._tier.identity.hash_key_for_unstored_hashes()
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
        """Stop reading a partition and drop its items."""
        with self._condition:
            self._reads.pop(partition, None)
            for item in [item for item in self._queue if item.partition == partition]:
                self._queue.remove(item)
                self._queued_bytes -= _memory_bytes_of_item(item)
            self._condition.notify_all()

    def next_prefetched_item(self, timeout_s: float) -> PrefetchedItem | None:
        """Remove the next item from the queue and return it, or None if none arrives within ``timeout_s`` seconds."""
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
        """End the reading threads. Requests that they are making are completed first."""
        with self._condition:
            self._closed = True
            self._reads.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run_reading_thread(self) -> None:
        """Queue the records of partitions that wait for a thread, until the prefetcher is closed. Runs in each thread."""
        while True:
            with self._condition:
                while not self._due_reads and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                turn = self._due_reads.popleft()
            try:
                item: PrefetchedItem | None = self._queue_next_records_or_return_last_item(turn)
            except LogChanged:
                self._requeue_partition(turn)  # the next turn compares what was read below its offset
                continue
            except Exception as error:  # noqa: BLE001 - returned by next_prefetched_item
                item = PartitionPrefetchFailure(turn.partition, error)
            if item is not None:
                self._enqueue_item_unless_stopped(turn, item, is_last=True)

    def _queue_next_records_or_return_last_item(self, partition: PartitionPrefetchState) -> PrefetchedItem | None:
        """Read up to TURN_BYTES of a partition and queue the records. Return the item that ends the partition, which the caller queues;
        None if more is to be read later, or if reading was stopped.
        """
        state = self._tier.open_control_log_of_partition(partition.incarnation).refresh()
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
            view = last_value_of_each_key_in_partition(
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
        """Return how many idle threads can prefetch for each partition that is being read, rounded down."""
        with self._condition:
            return max(0, self._max_threads - len(self._reads)) // max(1, len(self._reads))

    def _requeue_partition(self, partition: PartitionPrefetchState) -> None:
        """Let a thread read this partition further, after those that wait already."""
        with self._condition:
            self._due_reads.append(partition)
            self._condition.notify()

    def _enqueue_item_unless_stopped(self, partition: PartitionPrefetchState, item: PrefetchedItem, *, is_last: bool = False) -> bool:
        """Add an item to the queue and return True; wait for space in the queue before. Return False, without adding it, if reading of the
        partition was stopped.

        :param is_last: whether the item ends the partition, so that it counts as no longer being read.
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
    """Return the bytes of memory that an item occupies in the queue; 0 for items without records."""
    return item.block.nbytes if isinstance(item, PrefetchedRecords) else 0
