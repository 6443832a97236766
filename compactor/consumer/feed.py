"""The tier's side of a consumer: partitions are read by a few threads, ahead of whoever takes, and never more than a bounded bit ahead.

A thread reads one partition for a *turn* and then goes on with the next one that is due. What has been read waits as blocks in one
queue. Memory: ``queue_bytes`` of blocks, and for each thread one more block and the pieces of the segment that it is reading.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from compactor.bootstrap import Tier
from compactor.consumer.last_values import among, latest
from compactor.consumer.messages import RecordBlock, block_of
from compactor.consumer.reading import Extent, Reader, WantedRecords, first_offset, last_stable_offset
from compactor.errors import CompactorError
from compactor.model.ids import TopicPartition
from compactor.records.batches import Int64s

TURN_BYTES = 64 << 20
"""Of blocks: after so many it is another partition's turn."""


@dataclass(eq=False)
class Turn:
    """A partition that is being read, from ``offset`` on. Below ``until`` only the offsets in ``only`` are wanted."""

    name: TopicPartition
    offset: int
    only: Int64s | None = None
    until: int = -1


@dataclass(frozen=True)
class Ended:
    """The tier has no more of this partition than up to ``offset`` (exclusive).

    ``start`` and ``end`` (exclusive) are the tier's. ``offset`` is below ``end`` where a transaction is open at its end, and below
    ``start`` where the tier has lost its beginning.
    """

    name: TopicPartition
    offset: int
    start: int
    end: int


@dataclass(frozen=True)
class Failed:
    """It could not be read on at ``offset``."""

    name: TopicPartition
    error: Exception


Item = RecordBlock | Ended | Failed


class TierFeed:
    """``begin`` partitions, ``take`` what comes. Each partition ends with one Ended or Failed; then it may be begun again.

    :param latest_only: of what the tier has when a partition is begun, only the last records of keys (see LastValues).
    """

    def __init__(self, tier: Tier, *, committed: bool, latest_only: bool, threads: int, queue_bytes: int) -> None:
        self._tier = tier
        self._committed = committed
        self._latest_only = latest_only
        self._most_threads = threads
        self._queue_bytes = queue_bytes
        self._hash_key = b""
        self._changed = threading.Condition()
        self._turns: dict[TopicPartition, Turn] = {}
        self._due: deque[Turn] = deque()
        self._items: deque[Item] = deque()
        self._queued = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def busy(self) -> bool:
        """Whether anything is to come."""
        with self._changed:
            return bool(self._turns or self._items)

    def begin(self, name: TopicPartition, offset: int, *, from_now: bool = False) -> None:
        """What was to come of this partition before does not come any more.

        :param from_now: every record, also where ``latest_only`` is set: the consumer is past the view already.
        """
        self.stop(name)
        if self._latest_only and not self._hash_key:
            self._hash_key = self._tier.reading_key()
        turn = Turn(name, offset, until=offset if from_now or not self._latest_only else -1)
        with self._changed:
            self._turns[name] = turn
            self._due.append(turn)
            if len(self._threads) < min(self._most_threads, len(self._turns)):
                thread = threading.Thread(target=self._work, name=f"tier-feed-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def stop(self, name: TopicPartition) -> None:
        with self._changed:
            self._turns.pop(name, None)
            for item in [item for item in self._items if item.name == name]:
                self._items.remove(item)
                self._queued -= _size(item)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> Item | None:
        """The next thing that has come; None after the time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            item = self._items.popleft()
            self._queued -= _size(item)
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Ends the threads; a request that is under way is waited for."""
        with self._changed:
            self._closed = True
            self._turns.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._due and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                turn = self._due.popleft()
            try:
                item: Item | None = self._read(turn)
            except Exception as error:  # noqa: BLE001 - told to whoever takes
                item = Failed(turn.name, error)
            if item is not None:
                self._put(turn, item, last=True)

    def _read(self, turn: Turn) -> Item | None:
        """One turn. None: it was stopped, or it is not done and due again."""
        state = self._tier.open(turn.name).refresh()
        start, end = first_offset(self._tier, state), state.end_offset + 1
        bound = last_stable_offset(self._tier, state) if self._committed else end
        if turn.offset >= bound or turn.offset < start:
            return Ended(turn.name, turn.offset, start, end)
        if turn.until < 0:
            view = latest(self._tier, turn.name, first=turn.offset, last=bound - 1, committed=self._committed, hash_key=self._hash_key)
            turn.only = view.offsets()
            turn.until = bound
        if turn.only is not None and turn.offset < turn.until:
            bound = min(bound, turn.until)
        else:
            turn.only = None
        limit = self._tier.cleaner_for(turn.name.topic).max_decompressed_batch_bytes
        segments = tuple(segment for segment in state.live if segment.end_offset >= turn.offset)
        extent = Extent(turn.name, turn.offset, bound - 1, segments)
        read = 0
        for selection in Reader(self._tier, extent, WantedRecords(self._committed, limit, ahead=self._idle())).selections():
            mine = selection if turn.only is None else among(selection, turn.only)
            reached = int(selection.rows.offset[selection.picked[-1]]) + 1
            if len(mine):
                block = block_of(turn.name, mine)
                read += block.nbytes
                if not self._put(turn, block):
                    return None
            turn.offset = reached
            if read >= TURN_BYTES and self._due:
                self._again(turn)
                return None
        turn.offset = bound
        if turn.only is not None:
            self._again(turn)
            return None
        return Ended(turn.name, bound, start, end)

    def _idle(self) -> int:
        """Threads that no partition needs fetch ahead for those that are read."""
        with self._changed:
            return max(0, self._most_threads - len(self._turns)) // max(1, len(self._turns))

    def _again(self, turn: Turn) -> None:
        with self._changed:
            self._due.append(turn)
            self._changed.notify()

    def _put(self, turn: Turn, item: Item, *, last: bool = False) -> bool:
        """Waits for room. False where the partition was stopped."""
        size = _size(item)
        with self._changed:
            while self._turns.get(turn.name) is turn and self._queued and self._queued + size > self._queue_bytes:
                self._changed.wait()
            if self._turns.get(turn.name) is not turn:
                return False
            if last:
                del self._turns[turn.name]
            self._items.append(item)
            self._queued += size
            self._changed.notify_all()
            return True


def _size(item: Item) -> int:
    return item.nbytes if isinstance(item, RecordBlock) else 0


def reported(error: Exception) -> CompactorError:
    """What a caller is to see of what happened in a thread. Raises what is no error of this program."""
    if isinstance(error, CompactorError):
        return error
    raise error
