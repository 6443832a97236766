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
from compactor.consumer.history import LogIdentity, LogMismatch, ReadHistory, find_mismatch, log_identity
from compactor.consumer.last_values import keep_offsets, latest
from compactor.consumer.messages import RecordBlock, copy_block
from compactor.consumer.reading import LogChanged, Reader, ReadOptions, ReadRange, last_stable_offset
from compactor.model.ids import TopicPartition
from compactor.records.batches import Int64s

TURN_BYTES = 64 << 20
"""Size of the blocks after which another partition gets a turn."""


@dataclass(eq=False)
class Turn:
    """State of one partition that a thread of TierFeed reads, a block of TURN_BYTES at a time (a turn).

    place: the incarnation that is read: the partition under one topic id, from the topic's creation to its deletion.
    offset: next offset to read.
    read: what was read before the partition was started.
    view_offsets: offsets of last records, to which reading is restricted below ``view_end``; None for all offsets.
    view_end: end of the view of last records, exclusive; -1 if the view is still to be made.
    log: the log that was read since the start; None before the first turn.
    until: offset at which reading ends, exclusive.
    """

    name: TopicPartition
    place: TopicPartition
    offset: int
    read: ReadHistory
    view_offsets: Int64s | None = None
    view_end: int = -1
    log: LogIdentity | None = None
    until: int = MAX_OFFSET


@dataclass(frozen=True)
class ReadBlock:
    """Records of a partition, as columns, with the identity of the log from which they were read."""

    name: TopicPartition
    block: RecordBlock
    log: LogIdentity


@dataclass(frozen=True)
class Ended:
    """Last item of a partition: the tier has no more records of it that may be read, or ``until`` is reached.

    offset: everything below was read. It is below ``end`` if a transaction is open at the tier's end, and below ``start`` if the tier has
        lost its beginning.
    start, end: first offset and end offset (exclusive) of the tier.
    log: the tier's log.
    mismatch: reason why this log does not continue what was read; None if it does.
    """

    name: TopicPartition
    offset: int
    start: int
    end: int
    log: LogIdentity
    mismatch: LogMismatch | None = None


@dataclass(frozen=True)
class Failed:
    """Last item of a partition that could not be read, with the error."""

    name: TopicPartition
    error: Exception


Item = ReadBlock | Ended | Failed


class TierFeed:
    """Reads several partitions of a tier in threads of its own, and queues their records.

    The last item of each partition is Ended or Failed; then the partition can be started again.

    :param latest_only: read only the last record of each key of what the tier holds when a partition is started (see LastValues).
    """

    def __init__(
        self, tier: Tier, *, committed: bool, latest_only: bool, threads: int, queue_bytes: int, skip_damaged: bool = False
    ) -> None:
        self._tier = tier
        self._committed = committed
        self._skip_damaged = skip_damaged
        self._latest_only = latest_only
        self._max_threads = threads
        self._queue_bytes = queue_bytes
        self._hash_key = b""
        self._condition = threading.Condition()
        self._reads: dict[TopicPartition, Turn] = {}
        self._due_reads: deque[Turn] = deque()
        self._queue: deque[Item] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def is_busy(self) -> bool:
        """Return whether items are waiting or partitions are being read."""
        with self._condition:
            return bool(self._reads or self._queue)

    def start_reading(
        self, name: TopicPartition, place: TopicPartition, read: ReadHistory, *, skip_view: bool = False, until: int = MAX_OFFSET
    ) -> None:
        """Start to read a partition. Items of an earlier start are dropped.

        :param place: the incarnation to read, that is, the partition as it was under one topic id.
        :param read: what was read of it before; reading starts at its end.
        :param skip_view: read every record, even if ``latest_only`` is set.
        :param until: offset at which reading ends, exclusive.
        """
        self.stop_reading(name)
        if self._latest_only and not self._hash_key:
            self._hash_key = self._tier.identity.reading_key()
        turn = Turn(name, place, read.end, read, view_end=read.end if skip_view or not self._latest_only else -1, until=until)
        with self._condition:
            self._reads[name] = turn
            self._due_reads.append(turn)
            if len(self._threads) < min(self._max_threads, len(self._reads)):
                thread = threading.Thread(target=self._run_thread, name=f"tier-feed-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._condition.notify_all()

    def stop_reading(self, name: TopicPartition) -> None:
        """Stop reading a partition and drop its items."""
        with self._condition:
            self._reads.pop(name, None)
            for item in [item for item in self._queue if item.name == name]:
                self._queue.remove(item)
                self._queued_bytes -= _size(item)
            self._condition.notify_all()

    def next_item(self, timeout_s: float) -> Item | None:
        """Return the next item, or None if none arrives within the time."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not self._queue:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._condition.wait(left)
            item = self._queue.popleft()
            self._queued_bytes -= _size(item)
            self._condition.notify_all()
            return item

    def close(self) -> None:
        """Wait for requests that are being made, and end the reading threads."""
        with self._condition:
            self._closed = True
            self._reads.clear()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run_thread(self) -> None:
        while True:
            with self._condition:
                while not self._due_reads and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                turn = self._due_reads.popleft()
            try:
                item: Item | None = self._read_turn(turn)
            except LogChanged:
                self._requeue_turn(turn)  # the next turn compares what was read below its offset
                continue
            except Exception as error:  # noqa: BLE001 - returned by next_item
                item = Failed(turn.name, error)
            if item is not None:
                self._enqueue_item(turn, item, last=True)

    def _read_turn(self, turn: Turn) -> Item | None:
        """Read up to TURN_BYTES of a partition into the queue.

        Return the partition's last item, or None if it was stopped or is due again.
        """
        state = self._tier.open(turn.place).refresh()
        start, end = self._tier.first_readable_offset(state), state.end_offset + 1
        log = log_identity(self._tier, state)
        read_until = turn.offset if turn.view_offsets is None else turn.view_end
        mismatch = find_mismatch(turn.read if turn.log is None else turn.log.history_below(read_until), log)
        if mismatch is not None:
            return Ended(turn.name, turn.offset, start, end, log, mismatch)
        turn.log = log
        bound = min(last_stable_offset(self._tier, state) if self._committed else end, turn.until)
        if turn.offset >= bound or turn.offset < start:
            return Ended(turn.name, turn.offset, start, end, log)
        if turn.view_end < 0:
            view = latest(self._tier, turn.place, first=turn.offset, last=bound - 1, committed=self._committed, hash_key=self._hash_key)
            turn.view_offsets = view.offsets()
            turn.view_end = bound
        if turn.view_offsets is not None and turn.offset < turn.view_end:
            bound = min(bound, turn.view_end)
        else:
            turn.view_offsets = None
        limit = self._tier.cleaner_for(turn.name.topic).max_decompressed_batch_bytes
        segments = tuple(segment for segment in state.live if segment.end_offset >= turn.offset)
        extent = ReadRange(turn.place, turn.offset, bound - 1, segments, log)
        read = 0
        options = ReadOptions(self._committed, limit, ahead=self._idle_threads(), skip_damaged=self._skip_damaged)
        for selection in Reader(self._tier, extent, options).selections():
            mine = selection if turn.view_offsets is None else keep_offsets(selection, turn.view_offsets)
            reached = int(selection.rows.offset[selection.picked[-1]]) + 1
            if len(mine):
                block = copy_block(turn.name, mine, log.topic_id)
                read += block.nbytes
                if not self._enqueue_item(turn, ReadBlock(turn.name, block, log)):
                    return None
            turn.offset = reached
            if read >= TURN_BYTES and self._due_reads:
                self._requeue_turn(turn)
                return None
        turn.offset = bound
        if turn.view_offsets is not None:
            self._requeue_turn(turn)
            return None
        return Ended(turn.name, bound, start, end, log)

    def _idle_threads(self) -> int:
        """Return how many idle threads can prefetch for each partition that is being read."""
        with self._condition:
            return max(0, self._max_threads - len(self._reads)) // max(1, len(self._reads))

    def _requeue_turn(self, turn: Turn) -> None:
        with self._condition:
            self._due_reads.append(turn)
            self._condition.notify()

    def _enqueue_item(self, turn: Turn, item: Item, *, last: bool = False) -> bool:
        """Add an item to the queue, after waiting for space. Return False if the partition was stopped."""
        size = _size(item)
        with self._condition:
            while self._reads.get(turn.name) is turn and self._queued_bytes and self._queued_bytes + size > self._queue_bytes:
                self._condition.wait()
            if self._reads.get(turn.name) is not turn:
                return False
            if last:
                del self._reads[turn.name]
            self._queue.append(item)
            self._queued_bytes += size
            self._condition.notify_all()
            return True


def _size(item: Item) -> int:
    return item.block.nbytes if isinstance(item, ReadBlock) else 0
