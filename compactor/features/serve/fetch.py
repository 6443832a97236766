"""Reading records for Fetch requests.

For one partition of a request:

1. The view decides whether the offset lies in the tier (``partitions.View.source``).
2. Pieces are taken from the offset on until the byte budget is full. The next ones are loaded in advance. A piece that is not in memory is
   waited for only if nothing was found yet.
3. Batches are cut before the first offset that may not be read, and before the first damaged one.
4. For read_committed, aborted transactions are found from control records, never from ``.txnindex``: tiers lose its entries.
5. If an object is gone, a round has replaced the segment: the control log is read again, and the offset is searched in the new view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from compactor.cleaner.retention import UNDECIDED
from compactor.errors import BadData, CompactorError, StoreError
from compactor.features.serve.partitions import Partitions, RecordSource, View
from compactor.features.serve.pieces import Bounds, Piece, PieceCache
from compactor.features.serve.protocol import ErrorCode
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.read.outcomes import UNKNOWN, TransactionOutcomeFinder
from compactor.read.pieces import FETCH_BYTES, PiecePrefetcher, SegmentGone, SegmentPiece, SegmentReader
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, Int64s

COPIED_BYTES = 64 << 10
"""Records of at most this size are copied: a reader that is slow to take them must not hold a piece of megabytes."""
_MAX_RETRIES = 5
"""Number of times that one read may find a segment replaced."""


class AbortedRun(NamedTuple):
    """Batches of one aborted transaction in a piece. first, last: batch numbers, inclusive.

    begins_before, ends_after: no marker of the producer stands before or after them in the piece, so that a run in the adjacent piece
        belongs to the same transaction.
    """

    producer_id: int
    first_offset: int
    first: int
    last: int
    begins_before: bool
    ends_after: bool


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of the transactions in a piece.

    ended: producers with a marker in the piece.
    undecidable: batches with unknown outcome, because a marker is damaged.
    is_final: no transaction in the piece is still open.
    """

    aborted: tuple[AbortedRun, ...]
    ended: frozenset[int]
    undecidable: Int64s
    is_final: bool


class Aborted(NamedTuple):
    """A producer's batches from ``first_offset`` up to its next marker are aborted."""

    producer_id: int
    first_offset: int


@dataclass
class Read:
    """Answer for one partition.

    chunks: whole batches, as views of cached bytes.
    is_loading: next records are being loaded, and were not waited for.
    """

    error: ErrorCode
    view: View | None
    chunks: list[memoryview]
    aborted: list[Aborted]
    size: int = 0
    is_loading: bool = False


class Damaged(Exception):
    """Raised if the batch at the wanted offset cannot be read."""


class _CachedPieces(PiecePrefetcher):
    """Cached pieces for ``TransactionOutcomeFinder``, which runs in a thread."""

    def __init__(
        self, cache: PieceCache, loop: asyncio.AbstractEventLoop, open_segment: Callable[[RemoteLogSegmentMetadata], SegmentReader]
    ) -> None:
        super().__init__(0)
        self._cache, self._loop, self._open_segment = cache, loop, open_segment

    @override
    def _fetch_piece(self, reader: SegmentReader, position: int, piece_bytes: int = FETCH_BYTES) -> SegmentPiece:
        found = asyncio.run_coroutine_threadsafe(self._find(reader, position), self._loop).result()
        return reader.read_piece(position, piece_bytes) if found is None else found

    async def _find(self, reader: SegmentReader, position: int) -> SegmentPiece | None:
        while True:
            bounds = await self._cache.bounds(reader.metadata.id, lambda: self._open_segment(reader.metadata))
            number = int(np.searchsorted(bounds.positions, position))
            if number == len(bounds.positions) or bounds.positions[number] != position:
                return None
            piece = await self._cache.piece(bounds, number)
            if piece is not None:
                if piece.damage is not None:
                    raise piece.damage
                return piece.source


class TierReader:
    """For the event loop.

    read_ahead: number of pieces that are loaded before a client asks for them.
    """

    def __init__(self, partitions: Partitions, cache: PieceCache, read_ahead: int) -> None:
        self._partitions = partitions
        self._cache = cache
        self._read_ahead = read_ahead
        # Threads that wait for loads must not be those that load.
        self._pool = ThreadPoolExecutor(4, "outcomes")
        self._is_closed = False
        self.replaced = 0
        self.damaged = 0

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    async def read(self, partition: TopicPartition, offset: int, max_bytes: int, *, committed: bool, at_least_one: bool) -> Read:
        """Batches from the one that holds ``offset`` on.


        :param at_least_one: return, and wait for, the first batch even if it is larger than ``max_bytes`` (KIP-74). If not, records are
            loaded in the background: partitions of a request must not wait one after the other.
        """
        view: View | None = None
        max_age_s: float | None = None
        try:
            for _ in range(_MAX_RETRIES):
                view = await self._partitions.view(partition, max_age_s)
                if view.source(offset, committed=committed) is RecordSource.OUT_OF_RANGE and max_age_s is None:
                    view = await self._partitions.view(partition, 0)
                try:
                    return await self._read_view(view, offset, max_bytes, committed=committed, at_least_one=at_least_one)
                except SegmentGone as gone:
                    self.replaced += 1
                    self._cache.forget(gone.metadata.id)
                    fresh = await self._partitions.view(partition, 0)
                    if any(segment.id == gone.metadata.id for segment in fresh.segments):
                        raise gone.to_bad_data_error() from None  # it is lost
                    max_age_s = None
            return Read(ErrorCode.KAFKA_STORAGE_ERROR, view, [], [])
        except (BadData, Damaged):
            self.damaged += 1
            return Read(ErrorCode.CORRUPT_MESSAGE, view, [], [])
        except CompactorError:  # the store does not answer now: clients ask again
            return Read(ErrorCode.KAFKA_STORAGE_ERROR, view, [], [])

    async def _read_view(self, view: View, offset: int, max_bytes: int, *, committed: bool, at_least_one: bool) -> Read:
        read = Read(ErrorCode.NONE, view, [], [])
        source = view.source(offset, committed=committed)
        if source is not RecordSource.TIER:
            read.error = ErrorCode.OFFSET_OUT_OF_RANGE if source is RecordSource.OUT_OF_RANGE else ErrorCode.NONE
            return read
        bound = view.bound(committed=committed)
        segments = view.segments_from(offset)
        open_runs: set[int] = set()
        for place, segment in enumerate(segments):
            may_wait = at_least_one and not read.chunks
            if segment.start_offset >= bound or (read.size >= max_bytes and not may_wait):
                break
            known = await self._bounds(view, segment) if may_wait else self._cache.known_bounds(segment.id)
            if known is None:
                self._begin_prefetch(view, segments[place:], max(self._read_ahead, 1), offset)
                read.is_loading = True
                return read
            bounds, number = known, known.find(offset)
            while number < len(bounds.positions) and offset <= segment.end_offset:
                may_wait = at_least_one and not read.chunks
                if read.size >= max_bytes and not may_wait:
                    return read
                if not may_wait and not self._cache.has(bounds, number):
                    self._cache.prefetch(bounds, number)
                    self._prefetch(view, segments[place:], bounds, number + 1)
                    read.is_loading = True
                    return read
                piece = await self._cache.piece(bounds, number)
                if piece is None:
                    bounds = await self._bounds(view, segment)
                    number = bounds.find(offset)
                    continue
                self._prefetch(view, segments[place:], bounds, number + 1)
                after = await self._take(view, segment, piece, offset, bound, max_bytes, read, open_runs, committed=committed,
                                         at_least_one=at_least_one)  # fmt: skip
                if after is None:
                    return read
                offset, number = after, number + 1
            offset = max(offset, segment.end_offset + 1)
        return read

    async def _take(
        self, view: View, segment: RemoteLogSegmentMetadata, piece: Piece, offset: int, bound: int, max_bytes: int, read: Read,
        open_runs: set[int], *, committed: bool, at_least_one: bool,
    ) -> int | None:  # fmt: skip
        """Return the offset after them; None if the answer is complete."""
        table = piece.source.source.table
        first = int(table.last_offset.searchsorted(offset))
        end = int(piece.begins.searchsorted(min(bound, segment.end_offset + 1)))
        unreadable = piece.damaged
        outcomes: Outcomes | None = None
        if committed and first < end and table.transactional_flags[first:end].any():
            outcomes = await self._outcomes(view, piece)
            unreadable = np.union1d(unreadable, outcomes.undecidable)
        if first >= len(table):
            if piece.damage is not None and not read.chunks:
                raise Damaged
            return None if piece.damage is not None else offset
        if first >= end:  # a hole ends the segment, or the readable part of the log
            return segment.end_offset + 1 if piece.begins[first] > segment.end_offset else None
        after = int(unreadable.searchsorted(first))
        readable = int(unreadable[after]) if after < len(unreadable) else len(table)
        begin = int(table.position[first])
        fits = int(piece.ends.searchsorted(begin + max_bytes - read.size, side="right"))
        last = min(end, readable, max(fits, first + 1 if at_least_one and not read.chunks else first))
        if last <= first:
            if first >= readable and not read.chunks:
                raise Damaged
            return None
        stop = int(piece.ends[last - 1])
        chunk = piece.data[begin:stop]
        read.chunks.append(memoryview(bytes(chunk)) if len(chunk) <= COPIED_BYTES else chunk)
        read.size += stop - begin
        if outcomes is not None:
            add_aborted(read.aborted, outcomes, first, last, open_runs)
        is_complete = last < len(table) or piece.damage is not None
        return None if is_complete else int(table.last_offset[last - 1]) + 1

    async def _bounds(self, view: View, segment: RemoteLogSegmentMetadata) -> Bounds:
        tier = self._partitions.tier
        limit = tier.settings.cleaner.max_decompressed_batch_bytes
        return await self._cache.bounds(segment.id, lambda: SegmentReader(tier.ports.layout, view.partition, segment, limit))

    def _prefetch(self, view: View, segments: Sequence[RemoteLogSegmentMetadata], bounds: Bounds, number: int) -> None:
        """Load this segment's pieces from ``number`` on, then the first ones of the next segments."""
        left, place, known = self._read_ahead, 0, bounds
        while left > 0:
            for ahead in range(number, min(number + left, len(known.positions))):
                self._cache.prefetch(known, ahead)
                left -= 1
            place += 1
            if place == len(segments):
                return
            found = self._cache.known_bounds(segments[place].id)
            if found is None:  # a task for each request would cost more than the request
                self._begin_prefetch(view, segments[place:], left, segments[place].start_offset)
                return
            known, number = found, 0

    def _begin_prefetch(self, view: View, segments: Sequence[RemoteLogSegmentMetadata], left: int, offset: int) -> None:
        task = asyncio.ensure_future(self._prefetch_segments(view, segments[:left], left, offset))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _prefetch_segments(self, view: View, segments: Sequence[RemoteLogSegmentMetadata], left: int, offset: int) -> None:
        for segment in segments:
            bounds = await self._bounds(view, segment)
            first = bounds.find(offset)
            for number in range(first, min(first + left, len(bounds.positions))):
                self._cache.prefetch(bounds, number)
                left -= 1
            if left <= 0:
                return

    async def _outcomes(self, view: View, piece: Piece) -> Outcomes:
        found: Outcomes | None = piece.outcomes
        if found is None:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._pool, self._find_outcomes, view, piece, loop)
            if found.is_final:
                piece.outcomes = found
        return found

    def _stop_if_closed(self) -> None:
        if self._is_closed:
            raise StoreError("the endpoint stops")

    def _find_outcomes(self, view: View, piece: Piece, loop: asyncio.AbstractEventLoop) -> Outcomes:
        """Markers after the piece are read where needed. Runs in a thread."""
        tier = self._partitions.tier
        limit = tier.settings.cleaner.max_decompressed_batch_bytes

        def list_segments_from(offset: int) -> Sequence[RemoteLogSegmentMetadata]:
            self._stop_if_closed()
            fresh = asyncio.run_coroutine_threadsafe(self._partitions.view(view.partition, 0), loop).result()
            if all(segment.id != piece.source.metadata.id for segment in fresh.segments):
                # A round has replaced it before its markers were looked for: later rounds may have removed them.
                raise SegmentGone(piece.source.source.name, piece.source.metadata)
            return fresh.segments_from(offset)

        def open_segment(metadata: RemoteLogSegmentMetadata) -> SegmentReader:
            self._stop_if_closed()
            return SegmentReader(tier.ports.layout, view.partition, metadata, limit)

        finder = TransactionOutcomeFinder(list_segments_from, open_segment, _CachedPieces(self._cache, loop, open_segment))
        return outcomes_of_batches(piece.source, finder.find_outcomes(piece.source))


def outcomes_of_batches(piece: SegmentPiece, kinds: np.ndarray[tuple[int], np.dtype[np.int8]]) -> Outcomes:
    """By the outcome of each batch (ABORT, COMMIT, UNDECIDED, UNKNOWN)."""
    table = piece.source.table
    data = table.transactional_flags & (table.control == NOT_CONTROL)
    unknown = data & (kinds == UNKNOWN)
    aborted = data & (kinds == ABORT)
    runs: list[AbortedRun] = []
    marked: set[int] = set()
    open_runs: dict[int, AbortedRun] = {}
    if aborted.any():
        producers = np.unique(table.producer_id[aborted])
        markers = ((table.control == ABORT) | (table.control == COMMIT)) & np.isin(table.producer_id, producers)
        for batch in np.flatnonzero(aborted | markers).tolist():
            producer = int(table.producer_id[batch])
            if markers[batch]:
                marked.add(producer)
                if producer in open_runs:
                    runs.append(open_runs.pop(producer)._replace(ends_after=False))
            elif producer in open_runs:
                open_runs[producer] = open_runs[producer]._replace(last=batch)
            else:
                open_runs[producer] = AbortedRun(
                    producer, int(table.base_offset[batch]), batch, batch, begins_before=producer not in marked, ends_after=True
                )
    runs += open_runs.values()
    ended = np.unique(table.producer_id[(table.control == ABORT) | (table.control == COMMIT)])
    return Outcomes(
        aborted=tuple(sorted(runs, key=lambda run: run.first)),
        ended=frozenset(ended.tolist()),
        undecidable=np.flatnonzero(unknown),
        is_final=not (data & (kinds == UNDECIDED)).any() and not unknown.any(),
    )


def add_aborted(entries: list[Aborted], outcomes: Outcomes, first: int, end: int, open_runs: set[int]) -> None:
    """Add the aborted transactions of batches ``first`` to ``end`` (exclusive) of a piece.

    A transaction gets one entry in a response: librdkafka takes one off at each marker; a second would hide records that the producer
        committed later.

    :param open_runs: producers whose aborted transaction continues; updated.
    """
    was_open = frozenset(open_runs)
    open_runs -= outcomes.ended
    for run in outcomes.aborted:
        if run.first < end and run.last >= first:
            if not (run.begins_before and run.producer_id in was_open):
                entries.append(Aborted(run.producer_id, run.first_offset))
            if run.ends_after:
                open_runs.add(run.producer_id)
