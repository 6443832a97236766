"""The records of a range of offsets, straight from the tier: what one task of the data source does, and one turn of a consumer.

Readers fold, then read; where an object has gone meanwhile they fold again and go on behind what they have handed out. A range is
therefore said in offsets, which compaction keeps, and never in bytes.

read_committed is what Kafka's consumer means by it: nothing of aborted transactions, and nothing at or above the last stable offset.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from bloom.siphash import key_halves, siphash128, tag_of
from compactor.bootstrap import Tier
from compactor.cleaner.keys.buckets import SEEN, KeyBuckets, range_of
from compactor.cleaner.keys.keysets import Hashes, KeySet
from compactor.consumer.gather import Selection
from compactor.consumer.open_transactions import first_open_offset
from compactor.consumer.outcomes import TransactionOutcomes
from compactor.consumer.pieces import Gone, Piece, PiecesAhead, SegmentReader
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

MOST_SPAN: Final = SEEN - 1
"""Offsets of an extent whose keys may go to the disk, where they have 32 bits."""

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
class Spill:
    """For keys that memory is too small for: the local disk has 16 bytes of each record, whose values are then read once more.

    :param records: at most so many; :param disk_bytes: of disk, 0: what there is.
    """

    records: int
    disk_bytes: int


@dataclass(frozen=True)
class Latest:
    """Of each key only its last record in the extent, and none where that is a tombstone; keys whose hash falls in one range of so many.

    ``hash_key``: where the caller has asked the tier for it already. ``spill``: for one range of one, and an extent of at most MOST_SPAN.
    """

    key_range: int
    key_ranges: int
    map_budget_bytes: int
    hash_key: bytes = b""
    spill: Spill | None = None


@dataclass(frozen=True)
class WantedRecords:
    """What is read of an extent. ``latest`` None: every record. ``ahead``: pieces of 16 MiB that are fetched in advance."""

    committed: bool
    inflate_limit: int
    latest: Latest | None = None
    ahead: int = 0


def first_offset(tier: Tier, state: PartitionState) -> int:
    """Where readers may begin: what brokers no longer serve may still stand in their tier."""
    return max(state.start_offset, tier.log_start(state.name))


def last_stable_offset(tier: Tier, state: PartitionState) -> int:
    """Exclusive: the first offset of the oldest transaction that is open at the tier's end, or the end.

    Brokers' metadata does not say it; there the producer snapshot of the last segment does, and in a tier that was only listed the batches
    do. Raises StoreError, BadData.
    """
    if not state.live:
        return state.end_offset + 1
    if tier.listed is not None:
        return first_open_offset(tier, tier.listed, state)
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

    def __init__(self, tier: Tier, extent: Extent, wanted: WantedRecords, folder: str | None = None) -> None:
        """``folder``: on the local disk, for what is spilled there; None: where temporary files go."""
        self._tier = tier
        self._folder = folder
        self._extent = extent
        self._wanted = wanted
        self._segments = extent.segments
        self._folded: frozenset[str] | None = None
        self._pieces = PiecesAhead(0 if wanted.latest else wanted.ahead)
        self._outcomes = TransactionOutcomes(self._behind, self._segment, self._pieces)
        self._scratch = _Scratch()

    def selections(self) -> Iterator[Selection]:
        """Parts of chunks with at least one row; each is valid until the next one is asked for. Raises BadData, StoreError, OutOfBudget."""
        latest = self._wanted.latest
        if latest is None:
            return self._all()
        return self._newest(latest) if latest.spill is None else self._newest_on_disk(latest, latest.spill)

    def _all(self) -> Iterator[Selection]:
        try:
            yield from self._forwards()
        finally:
            self._pieces.close()

    def _forwards(self) -> Iterator[Selection]:
        extent = self._extent
        first, folds = extent.first, 0
        readers: dict[str, SegmentReader] = {}
        while first <= extent.last:
            segments = [segment for segment in self._segments if segment.end_offset >= first and segment.start_offset <= extent.last]
            if not segments:
                return
            metadata = segments[0]
            readers = {segment.id: readers.get(segment.id) or self._segment(segment) for segment in segments}
            try:
                reader = readers[metadata.id]
                position = reader.position_of(first)
                last = min(extent.last, metadata.end_offset)  # beyond it another leader's segment is the one that is read
                while position < metadata.size_bytes and first <= last:
                    piece = self._outcomes.piece(reader, position)
                    self._pieces.want(self._places_behind(list(readers.values()), piece.end))
                    for selection in self._scratch.selections(piece, self._mine(piece, first, last), self._wanted.inflate_limit):
                        inside = _inside(selection.rows.offset, first, last)
                        if len(inside):
                            yield replace(selection, picked=inside)
                    first, folds = max(first, min(last, int(piece.source.table.last_offset[-1])) + 1), 0
                    position = piece.end
                first = max(first, metadata.end_offset + 1)
            except Gone as error:
                folds = self._fold_again(error, folds)

    def _places_behind(self, readers: Sequence[SegmentReader], position: int) -> Iterator[tuple[SegmentReader, int]]:
        """Where pieces begin from ``position`` of the first segment on, as far as that is known without reading."""
        for reader in readers:
            at: int | None = position
            inside = reader.metadata.end_offset <= self._extent.last
            end = reader.metadata.size_bytes if inside else reader.position_behind(self._extent.last)
            while at is not None and at < end:
                if not self._outcomes.holds(reader, at):
                    yield reader, at
                at = reader.cut_behind(at)
            position = 0

    def _newest(self, latest: Latest) -> Iterator[Selection]:
        """Read backwards, the first record seen of a key is its last one; a set of key hashes is all there is to remember."""
        keys, halves = KeySet(latest.map_budget_bytes), key_halves(latest.hash_key or self._tier.reading_key())
        for selection, last in self._all_backwards():
            picked = _first_seen(selection, self._extent.first, last, latest, keys, halves)
            if len(picked):
                yield replace(selection, picked=picked)

    def _newest_on_disk(self, latest: Latest, spill: Spill) -> Iterator[Selection]:
        """The same in two readings, whatever the number of keys: which offsets are the last of their keys, then these."""
        extent, halves = self._extent, key_halves(latest.hash_key or self._tier.reading_key())
        room = _SpillRoom(spill.disk_bytes)
        with tempfile.TemporaryDirectory(prefix="tiered-compactor-", dir=self._folder) as folder:
            path, budget = Path(folder, "keys"), latest.map_budget_bytes
            with KeyBuckets(path, room, map_budget_bytes=budget, expected_rows=spill.records) as buckets:
                for selection, last in self._all_backwards():
                    hashes, picked = _hashed(selection, extent.first, last, latest, halves)
                    buckets.add(hashes, (extent.last - selection.rows.offset[picked]).astype(np.uint32))
                bitmap = buckets.finish(extent.last - extent.first + 1)
        for selection in Reader(self._tier, extent, replace(self._wanted, latest=None)).selections():
            rows, picked = selection.rows, selection.picked
            back = extent.last - rows.offset[picked]
            is_last = (bitmap[back >> 3] >> (7 - (back & 7)).astype(np.uint8)) & 1 == 1
            found = picked[is_last & (rows.key_length[picked] >= 0) & (rows.value_length[picked] >= 0)]
            if len(found):
                yield replace(selection, picked=found)

    def _all_backwards(self) -> Iterator[tuple[Selection, int]]:
        """Everything, newest first, with the last offset that is still wanted: rows above it were handed out before."""
        extent = self._extent
        last, folds = extent.last, 0
        while last >= extent.first:
            segments = [segment for segment in reversed(self._segments) if segment.start_offset <= last]
            try:
                for piece in self._backwards([segment for segment in segments if segment.end_offset >= extent.first]):
                    mine = self._mine(piece, extent.first, last)
                    self._outcomes.passed_backwards(piece)
                    for selection in self._scratch.selections(piece, mine, self._wanted.inflate_limit, backwards=True):
                        yield selection, last
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
            if self._folded is not None and piece.metadata.id not in self._folded:
                # A round has replaced it before its markers were looked for: later rounds may have removed them.
                raise Gone(piece.source.name, piece.metadata)
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
        self._folded = frozenset(segment.id for segment in state.live)
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


def _hashed(selection: Selection, first: int, last: int, latest: Latest, halves: tuple[np.uint64, np.uint64]) -> tuple[Hashes, Int64s]:
    """Keys of the rows that have one, backwards, and which rows they are."""
    rows = selection.rows
    hashes, picked = np.empty((len(rows), 2), np.uint64), np.empty(len(rows), np.int64)
    count = _hash_backwards(
        selection.chunk.buf, rows.offset, rows.key_start, rows.key_length, first, last, *halves, latest.key_ranges, latest.key_range,
        hashes, picked,
    )  # fmt: skip
    return hashes[:count], picked[:count]


def _first_seen(selection: Selection, first: int, last: int, latest: Latest, keys: KeySet, halves: tuple[np.uint64, np.uint64]) -> Int64s:
    """The rows, ascending, whose key was not seen before and whose value is not null."""
    hashes, picked = _hashed(selection, first, last, latest, halves)
    seen = np.empty(len(hashes), np.bool_)
    if keys.insert_if_absent(hashes, seen) < len(hashes):
        raise OutOfBudget(
            f"view = latest: {keys.entries} keys fill the {latest.map_budget_bytes} bytes that one task may use for them",
            hint="Leave out keyRanges, or give it a higher number (each task then reads everything and keeps its share of the keys)",
        )
    found = picked[seen]
    return found[selection.rows.value_length[found] >= 0][::-1].copy()


class _SpillRoom:
    """The disk that one reading may use (cleaner.keys.buckets)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0

    def reserve(self, nbytes: int) -> None:
        self._used += nbytes
        if 0 < self._most < self._used:
            hint = f"Set disk_budget_bytes to more than {self._most}, or give keyRanges a number: each task then reads everything"
            raise OutOfBudget(f"view = latest: the keys need more than {self._most} bytes of local disk", hint=hint)

    def release(self, nbytes: int) -> None:
        self._used -= nbytes


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
