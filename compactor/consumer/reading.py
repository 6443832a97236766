"""The records of a range of offsets, straight from the tier: what one task of the data source does, and one turn of a consumer.

Readers fold, then read; where an object has gone meanwhile they fold again and go on behind what they have handed out. A range is
therefore said in offsets, which compaction keeps, and never in bytes.

read_committed is what Kafka's consumer means by it: nothing of aborted transactions, and nothing at or above the last stable offset.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from bloom.siphash import key_halves, siphash128, tag_of
from compactor.bootstrap import Tier
from compactor.cleaner.keys.buckets import range_of
from compactor.cleaner.keys.keysets import Hashes, KeySet
from compactor.consumer.gather import Selection
from compactor.consumer.outcomes import TransactionOutcomes
from compactor.consumer.pieces import Gone, Piece, SegmentReader
from compactor.control.state import PartitionState
from compactor.errors import OutOfBudget
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import NOT_CONTROL, Bytes, Int64s
from compactor.records.codecs import ByteBuffer
from compactor.records.rows import Int32s, RowBuffers, parse
from compactor.round.mirroring import completed

Flags = npt.NDArray[np.bool_]
T = TypeVar("T")

FOLDS: Final = 5
"""How often a range is folded anew without getting a step further, before a missing object counts as damage."""


@dataclass(frozen=True)
class Extent:
    """Offsets first..last (inclusive) of one partition, and the segments that held them when the read was planned."""

    name: TopicPartition
    first: int
    last: int
    segments: tuple[RemoteLogSegmentMetadata, ...]


@dataclass(frozen=True)
class Latest:
    """Of each key only its last record in the extent, and none where that is a tombstone; keys whose hash falls in one range of so many.

    ``hash_key``: where the caller has asked the tier for it already.
    """

    key_range: int
    key_ranges: int
    map_budget_bytes: int
    hash_key: bytes = b""


@dataclass(frozen=True)
class WantedRecords:
    """What is read of an extent. ``latest`` None: every record. ``ahead``: pieces that are fetched in advance, for ``latest``."""

    committed: bool
    inflate_limit: int
    latest: Latest | None = None
    ahead: int = 0


def first_offset(tier: Tier, state: PartitionState) -> int:
    """Where readers may begin: what brokers no longer serve may still stand in their tier."""
    return max(state.start_offset, tier.log_start(state.name))


def last_stable_offset(tier: Tier, state: PartitionState) -> int:
    """Exclusive: the first offset of the oldest transaction that is open at the tier's end, or the end.

    Brokers' metadata does not say it; there the producer snapshot of the last segment does. Raises StoreError, BadData.
    """
    if not state.live:
        return state.end_offset + 1
    last = state.live[-1]
    if tier.brokers is not None and not last.files:
        last = completed(tier.ports.layout, state.name, last)
    return state.end_offset + 1 if last.open_txn_offset < 0 else last.open_txn_offset


def first_offset_at(
    tier: Tier, name: TopicPartition, live: Sequence[RemoteLogSegmentMetadata], timestamp_ms: int, limit: int
) -> int | None:
    """The first offset whose record is at least that young (Kafka: offsetsForTimes), by metadata, time index and a few batches."""
    scratch = _Scratch()
    for metadata in live:
        if metadata.max_timestamp_ms < timestamp_ms:
            continue
        reader = SegmentReader(tier.ports.layout, name, metadata, limit)
        for piece in reader.pieces(reader.position_of(reader.offset_before(timestamp_ms)), piece_bytes=1 << 20):
            table = piece.source.table
            late = (table.control == NOT_CONTROL) & ((table.max_timestamp >= timestamp_ms) | (table.magic < 2))
            for selection in scratch.selections(piece, late, limit):
                young = np.flatnonzero(selection.rows.timestamp >= timestamp_ms)
                if len(young):
                    return int(selection.rows.offset[young[0]])
    return None


def offset_at(tier: Tier, name: TopicPartition, timestamp_ms: int) -> int | None:
    """The same of what is live now. Raises BadData, StoreError."""
    limit = tier.cleaner_for(name.topic).max_decompressed_batch_bytes
    for _ in range(FOLDS):
        try:
            return first_offset_at(tier, name, tier.open(name).refresh().live, timestamp_ms, limit)
        except Gone:
            continue  # a segment was replaced while times were looked up in it
    return first_offset_at(tier, name, tier.open(name).refresh().live, timestamp_ms, limit)


class _Scratch:
    """Buffers that are used again for every chunk."""

    def __init__(self) -> None:
        self._rows = RowBuffers()
        self._bodies = ByteBuffer()

    def selections(self, piece: Piece, mine: Flags, limit: int, *, backwards: bool = False) -> Iterator[Selection]:
        """The parsed chunks of a piece that hold any of these batches, with all of their rows picked."""
        source = piece.source
        ranges = source.ranges()
        for first, last in reversed(ranges) if backwards else ranges:
            if not mine[first:last].any():
                continue
            with piece.located():
                for chunk in source.chunks(first, last, mine[first:last], limit, self._bodies, backwards=backwards):
                    rows, first_row = parse(source.table, chunk, self._rows, source.name)
                    yield Selection(source.table, chunk, rows, first_row, np.arange(len(rows)))


class Reader:
    """One task's reading. Not for two threads."""

    def __init__(self, tier: Tier, extent: Extent, wanted: WantedRecords) -> None:
        self._tier = tier
        self._extent = extent
        self._wanted = wanted
        self._segments = extent.segments
        self._outcomes = TransactionOutcomes(self._behind, self._segment)
        self._scratch = _Scratch()

    def selections(self) -> Iterator[Selection]:
        """Parts of chunks with at least one row; each is valid until the next one is asked for. Raises BadData, StoreError, OutOfBudget."""
        return self._all() if self._wanted.latest is None else self._newest(self._wanted.latest)

    def _all(self) -> Iterator[Selection]:
        extent = self._extent
        first, folds = extent.first, 0
        while first <= extent.last:
            metadata = next((segment for segment in self._segments if segment.end_offset >= first), None)
            if metadata is None or metadata.start_offset > extent.last:
                return
            try:
                reader = self._segment(metadata)
                position = reader.position_of(first)
                last = min(extent.last, metadata.end_offset)  # beyond it another leader's segment is the one that is read
                while position < metadata.size_bytes and first <= last:
                    piece = self._outcomes.piece(reader, position)
                    for selection in self._scratch.selections(piece, self._mine(piece, first, last), self._wanted.inflate_limit):
                        inside = _inside(selection.rows.offset, first, last)
                        if len(inside):
                            yield replace(selection, picked=inside)
                    first, folds = max(first, min(last, int(piece.source.table.last_offset[-1])) + 1), 0
                    position = piece.end
                first = max(first, metadata.end_offset + 1)
            except Gone as error:
                folds = self._fold_again(error, folds)

    def _newest(self, latest: Latest) -> Iterator[Selection]:
        """Read backwards, the first record seen of a key is its last one; a set of key hashes is all there is to remember."""
        extent = self._extent
        keys = KeySet(latest.map_budget_bytes)
        halves = key_halves(latest.hash_key or self._tier.reading_key())
        last, folds = extent.last, 0
        while last >= extent.first:
            segments = [segment for segment in reversed(self._segments) if segment.start_offset <= last]
            try:
                for piece in self._backwards([segment for segment in segments if segment.end_offset >= extent.first]):
                    mine = self._mine(piece, extent.first, last)
                    self._outcomes.passed_backwards(piece)
                    for selection in self._scratch.selections(piece, mine, self._wanted.inflate_limit, backwards=True):
                        picked = _first_seen(selection, extent.first, last, latest, keys, halves)
                        if len(picked):
                            yield replace(selection, picked=picked)
                    last, folds = min(last, int(piece.source.table.last_offset[0]) - 1), 0
                    if last < extent.first:
                        return
            except Gone as error:
                folds = self._fold_again(error, folds)
            else:
                return

    def _backwards(self, segments: Sequence[RemoteLogSegmentMetadata]) -> Iterator[Piece]:
        """The pieces of segments that are given newest first, the newest one first."""
        readers = map(self._segment, segments)
        fetches = (partial(reader.piece, *cut) for reader in readers for cut in reader.cuts_backwards())
        return ahead(fetches, self._wanted.ahead)

    def _mine(self, piece: Piece, first: int, last: int) -> Flags:
        table = piece.source.table
        # The base offset of a compressed v0/v1 wrapper is not known before it is inflated; it is -1 here.
        mine: Flags = (table.control == NOT_CONTROL) & (table.last_offset >= first) & (table.base_offset <= last)
        if self._wanted.committed and (table.is_transactional & mine).any():
            mine &= ~self._outcomes.aborted(piece)
        return mine

    def _fold_again(self, error: Gone, folds: int) -> int:
        self._segments = tuple(self._behind(self._extent.first))
        self._outcomes.fold_again()
        if folds >= FOLDS or any(segment.id == error.metadata.id for segment in self._segments):
            raise error.lost() from None
        return folds + 1

    def _segment(self, metadata: RemoteLogSegmentMetadata) -> SegmentReader:
        return SegmentReader(self._tier.ports.layout, self._extent.name, metadata, self._wanted.inflate_limit)

    def _behind(self, offset: int) -> Sequence[RemoteLogSegmentMetadata]:
        """Live segments that end at or above ``offset``, by a fresh fold."""
        state = self._tier.open(self._extent.name).refresh()
        return [segment for segment in state.live if segment.end_offset >= offset]


def ahead(fetches: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """What they give, in their order; up to ``most`` of them are made at once by other threads while one is being used."""
    if not most:
        for fetch in fetches:
            yield fetch()
        return
    coming: deque[Future[T]] = deque()
    with ThreadPoolExecutor(most, "fetch-ahead") as pool:
        try:
            for fetch in fetches:
                coming.append(pool.submit(fetch))
                if len(coming) > most:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for left in coming:
                left.cancel()


def _inside(offset: Int64s, first: int, last: int) -> Int64s:
    return np.flatnonzero((offset >= first) & (offset <= last))


def _first_seen(selection: Selection, first: int, last: int, latest: Latest, keys: KeySet, halves: tuple[np.uint64, np.uint64]) -> Int64s:
    """The rows, ascending, whose key was not seen before and whose value is not null."""
    rows = selection.rows
    hashes, picked = np.empty((len(rows), 2), np.uint64), np.empty(len(rows), np.int64)
    count = _hash_backwards(
        selection.chunk.buf, rows.offset, rows.key_start, rows.key_length, first, last, *halves, latest.key_ranges, latest.key_range,
        hashes, picked,
    )  # fmt: skip
    seen = np.empty(count, np.bool_)
    if keys.insert_if_absent(hashes[:count], seen) < count:
        raise OutOfBudget(
            f"view = latest: {keys.entries} keys fill the {latest.map_budget_bytes} bytes that one task may use for them",
            hint="Give the option keyRanges a higher number (each task then reads everything and keeps its share of the keys)",
        )
    found = picked[:count][seen]
    return found[rows.value_length[found] >= 0][::-1].copy()


@kernel
def _hash_backwards(
    buf: Bytes, offset: Int64s, key_start: Int64s, key_length: Int32s, first: int, last: int, k0: np.uint64, k1: np.uint64, ranges: int,
    wanted: int, hashes: Hashes, picked: Int64s,
) -> int:  # fmt: skip
    count = 0
    for row in range(offset.size - 1, -1, -1):
        if key_length[row] >= 0 and first <= offset[row] <= last:
            h0, h1 = siphash128(buf, key_start[row], key_length[row], k0, k1)
            if ranges == 1 or range_of(tag_of(h0), ranges) == wanted:
                hashes[count, 0], hashes[count, 1], picked[count] = h0, h1, row
                count += 1
    return count
