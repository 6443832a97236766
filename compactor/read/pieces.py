"""Reading remote segments in pieces: whole batches, a few megabytes at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from compactor.access.tier import Tier
from compactor.cleaner.source import SourceSegment, set_compressed_control_types
from compactor.constants import MAX_OFFSET
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound
from compactor.kernels.common import Flags
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import (
    ABORT,
    COMMIT,
    NOT_CONTROL,
    BatchTable,
    Bytes,
    cut_off_batch,
    parse_batch_headers,
    read_only_view,
)
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY
from compactor.tier.ports import ListedTier, OpenTransactionsAtSegmentEnd, SegmentLayout

T = TypeVar("T")

FETCH_BYTES: Final = 16 << 20
PositionAndSize = tuple[int, int]
"""Byte position in a segment's log, and a number of bytes."""
PieceLocation = tuple["SegmentReader", int]
"""Reader of a segment, and the byte position in its log at which a piece begins."""


@dataclass(frozen=True)
class SegmentPiece:
    """Consecutive whole batches of a segment in memory.
    position: byte position in the segment's log.
    damaged: per batch: whether its CRC does not match.
    """

    metadata: RemoteLogSegmentMetadata
    position: int
    source: SourceSegment
    damaged: Flags = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "damaged", np.zeros(len(self.source.table), np.bool_))

    @property
    def end_byte_position(self) -> int:
        return self.position + len(self.source.buf)

    @contextmanager
    def shift_damage_positions(self) -> Iterator[None]:
        """Add the piece's position to that of a BadData raised within the ``with`` block."""
        try:
            yield
        except BadData as error:
            raise _error_with_shifted_position(error, self.position) from None


class SegmentReader:
    """Raises SegmentGone if an object is missing, BadData if its bytes are not valid batches."""

    def __init__(self, layout: SegmentLayout, partition: TopicPartition, metadata: RemoteLogSegmentMetadata, max_batch_bytes: int) -> None:
        self._layout = layout
        self._partition = partition
        self.metadata = metadata
        self._limit = max_batch_bytes
        self._offset_entries: npt.NDArray[Any] | None = None
        self.trusts_index = True
        """Whether reads begin where the offset index says. If not, they begin at the segment's beginning."""

    def is_segment_log_key(self, object_key: str) -> bool:
        return object_key == self._object_key_of_file("log")

    def ignore_offset_index(self) -> None:
        """Called when the offset index is damaged."""
        self._offset_entries = np.empty(0, OFFSET_ENTRY)

    def offset_entries(self) -> npt.NDArray[Any]:
        """No entries if the offset index is missing or not true."""
        try:
            return self._cached_offset_entries()
        except SegmentGone:
            return np.empty(0, OFFSET_ENTRY)

    def parse_piece(self, position: int, data: bytes) -> SegmentPiece:
        """Whole batches of ``data``, the log from ``position`` on. Raises BadData."""
        buf = read_only_view(np.frombuffer(data, np.uint8))
        return SegmentPiece(self.metadata, position, self._parse_batches(self._object_key_of_file("log"), buf))

    def offset_index_positions_after(self, position: int) -> list[int]:
        """Ascending; none if the index is missing."""
        known = self.offset_entries()["position"].astype(np.int64)
        after: list[int] = known[known > position].tolist()
        return after

    def read_pieces(self, position: int = 0, piece_bytes: int = FETCH_BYTES) -> Iterator[SegmentPiece]:
        """A batch begins at ``position``."""
        while position < self.metadata.size_bytes:
            piece = self.read_piece(position, piece_bytes)
            yield piece
            position = piece.end_byte_position

    def find_piece_end(self, position: int, piece_bytes: int = FETCH_BYTES) -> int | None:
        """The first batch of the offset index after these bytes, else the segment's end. None if the index is empty and the segment is
        longer.
        """
        if self.metadata.size_bytes - position <= piece_bytes:
            return self.metadata.size_bytes
        known = self._cached_offset_entries()["position"].astype(np.int64)
        at = int(np.searchsorted(known, position + piece_bytes))
        return int(known[at]) if at < len(known) else self.metadata.size_bytes if len(known) else None

    def byte_position_after_offset(self, offset: int) -> int:
        """A byte position after all batches with offsets up to ``offset``, by the offset index, or the segment's end."""
        entries = self.offset_entries()
        # An entry is of the last offset in its batch: the first one above may be of the batch that holds the offset.
        after = int(np.searchsorted(entries["offset"].astype(np.int64) + self.metadata.start_offset, offset, side="right")) + 1
        return int(entries["position"][after]) if after < len(entries) else self.metadata.size_bytes

    def piece_spans_backwards(self, piece_bytes: int = FETCH_BYTES) -> list[PositionAndSize]:
        """Pieces begin at batches of the offset index, the last piece first."""
        known = self._cached_offset_entries()["position"].astype(np.int64)
        size = self.metadata.size_bytes
        at = np.searchsorted(known, np.arange(piece_bytes, size, piece_bytes))
        cuts = np.unique(known[at[at < len(known)]]).tolist()
        return [(begin, end - begin) for begin, end in reversed(list(zip([0, *cuts], [*cuts, size], strict=True)))]

    def read_piece(self, position: int, piece_bytes: int = FETCH_BYTES) -> SegmentPiece:
        """Whole batches, at least one."""
        key = self._object_key_of_file("log")
        left = self.metadata.size_bytes - position
        length = min(piece_bytes, left)
        while True:
            buf = read_only_view(np.frombuffer(self._read_segment_file("log", position, length), np.uint8))
            if not len(buf):
                raise BadData(f"the object ends at byte {position}, {left} bytes early", segment=key, hint="It was changed. Run `verify`")
            whole, needed = cut_off_batch(buf)
            if whole or length >= left:
                break
            length = min(left, max(needed, length * 2))
        try:
            # If the rest of the segment holds no whole batch, the parser reports why.
            return SegmentPiece(self.metadata, position, self._parse_batches(key, buf[: whole or len(buf)]))
        except BadData as error:
            raise _error_with_shifted_position(error, position) from None

    def read_exact_piece(self, position: int, piece_bytes: int) -> SegmentPiece:
        """Raises BadData if no batch ends there: a batch's length field or the offset index is damaged."""
        piece = self.read_piece(position, piece_bytes)
        if piece.end_byte_position != position + piece_bytes:
            raise BadData(
                f"a batch does not end at or before byte {position + piece_bytes}, where another one or the end should be",
                segment=self._object_key_of_file("log"),
                position=piece.end_byte_position,
                hint="The log or its offset index was changed. Run `verify`",
            )
        return piece

    def floor_position(self, offset: int) -> int:
        """Byte position of a batch at or before the one containing ``offset``; 0 without an entry of the offset index."""
        if offset <= self.metadata.start_offset or not self.trusts_index:
            return 0
        entries = self._cached_offset_entries()
        after = int(np.searchsorted(entries["offset"].astype(np.int64) + self.metadata.start_offset, offset, side="right"))
        return int(entries["position"][after - 1]) if after else 0

    def min_offset_for_time(self, timestamp_ms: int) -> int:
        """An offset below which all records are older; without a matching entry of the time index, the first offset."""
        entries = self._read_index("timeindex", TIME_ENTRY)
        after = int(np.searchsorted(entries["timestamp"].astype(np.int64), timestamp_ms, side="left"))
        return self.metadata.start_offset + (int(entries["offset"][after - 1]) if after else 0)

    def _cached_offset_entries(self) -> npt.NDArray[Any]:
        if self._offset_entries is None:
            self._offset_entries = self._read_offset_entries()
        return self._offset_entries

    def _read_offset_entries(self) -> npt.NDArray[Any]:
        """No entries unless they ascend and lie within the segment."""
        entries = self._read_index("index", OFFSET_ENTRY)
        position, offset = entries["position"].astype(np.int64), entries["offset"].astype(np.int64)
        inside = (position > 0) & (position < self.metadata.size_bytes)
        sound = np.all(np.diff(position) > 0) and np.all(np.diff(offset) > 0) and np.all(inside)
        return entries if sound else entries[:0]

    def _read_index(self, index_kind: str, entry_type: np.dtype[Any]) -> npt.NDArray[Any]:
        """Raises SegmentGone if the object is missing, because the segment was replaced."""
        try:
            if index_kind not in self._layout.segment_files(self._partition, self.metadata):
                return np.empty(0, entry_type)
        except NotFound:
            raise SegmentGone(self._object_key_of_file("log"), self.metadata) from None
        data = self._read_segment_file(index_kind)
        return np.frombuffer(data[: len(data) // entry_type.itemsize * entry_type.itemsize], entry_type)

    def _read_segment_file(self, file_kind: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self._layout.read_file(self._partition, self.metadata, file_kind, start, length)
        except NotFound:
            raise SegmentGone(self._object_key_of_file(file_kind), self.metadata) from None

    def _object_key_of_file(self, file_kind: str) -> str:
        return self._layout.object_name(self._partition, self.metadata, file_kind)

    def _parse_batches(self, object_key: str, buf: Bytes) -> SourceSegment:
        base, stop = self.metadata.start_offset, self.metadata.end_offset + 1
        source = SourceSegment(0, object_key, base, stop, self.metadata.mtime_ms, buf, parse_batch_headers(buf, object_key, -1))
        set_compressed_control_types(source, self._limit)
        return source


class PiecePrefetcher:
    """Prefetcher of up to ``max_pieces`` pieces, by other threads."""

    def __init__(self, max_pieces: int) -> None:
        self._most = max_pieces
        self._pool = ThreadPoolExecutor(max_pieces, "fetch-ahead") if max_pieces else None
        self._fetches: dict[tuple[str, int], Future[SegmentPiece]] = {}

    def take_piece(self, reader: SegmentReader, position: int, piece_bytes: int) -> SegmentPiece:
        """Remove a piece from memory; one that is fetched now has about ``piece_bytes``. Raises the errors of SegmentReader."""
        fetch = self._fetches.pop((reader.metadata.id, position), None)
        return self._fetch_piece(reader, position, piece_bytes) if fetch is None else fetch.result()

    def peek_piece(self, reader: SegmentReader, position: int) -> SegmentPiece:
        """A prefetched piece stays in memory; one that is fetched now is not stored."""
        fetch = self._fetches.get((reader.metadata.id, position))
        return self._fetch_piece(reader, position) if fetch is None else fetch.result()

    def prefetch_pieces(self, positions: Iterable[PieceLocation]) -> None:
        """Fetch the first ``max_pieces`` of these pieces, and drop others."""
        if self._pool is None:
            return
        before, self._fetches = self._fetches, {}
        for reader, position in islice(positions, self._most):
            key = (reader.metadata.id, position)
            fetch = before.pop(key, None)
            self._fetches[key] = self._pool.submit(self._fetch_piece, reader, position) if fetch is None else fetch
        for left in before.values():
            left.cancel()

    def close(self) -> None:
        """Wait for running requests."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _fetch_piece(self, reader: SegmentReader, position: int, piece_bytes: int = FETCH_BYTES) -> SegmentPiece:
        cut = reader.find_piece_end(position, piece_bytes) if self._pool is not None else None
        return reader.read_piece(position, piece_bytes if cut is None else cut - position)


def larger_piece_bytes(piece_bytes: int) -> int:
    """Size of the piece after one of ``piece_bytes``, at most FETCH_BYTES."""
    return min(4 * piece_bytes, FETCH_BYTES)


def prefetch_results(fetches: Iterable[Callable[[], T]], max_in_advance: int) -> Iterator[T]:
    """Results are in order; other threads call up to ``max_in_advance`` fetches ahead."""
    if not max_in_advance:
        for fetch in fetches:
            yield fetch()
        return
    coming: deque[Future[T]] = deque()
    with ThreadPoolExecutor(max_in_advance, "prefetch") as pool:
        try:
            for fetch in fetches:
                coming.append(pool.submit(fetch))
                if len(coming) > max_in_advance:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for left in coming:
                left.cancel()


class SegmentGone(NotFound):
    """Raised if an object is missing: replaced or lost."""

    def __init__(self, object_key: str, metadata: RemoteLogSegmentMetadata) -> None:
        super().__init__(f"{object_key} is missing in the store")
        self.key = object_key
        self.metadata = metadata

    def to_bad_data_error(self) -> BadData:
        """The error to raise if the segment is still live."""
        return BadData("a live segment is missing in the store", segment=self.key, hint="Run `verify`")


def _error_with_shifted_position(error: BadData, shift_bytes: int) -> BadData:
    at = error.position + shift_bytes if error.position >= 0 else -1
    return BadData(error.cause, segment=error.segment, position=at, offset=error.offset, hint=error.hint)


# ---- transactions that are open at the end of a listed tier, whose metadata does not describe segments -------------------------


def listed_stable_offset(tier: Tier, listed: ListedTier, state: PartitionState) -> int:
    """Last stable offset in a listed tier, or the end offset (exclusive). Raises BadData, StoreError.
    Segments that were uploaded more than ``producer_id_expiration_ms`` before the newest one are not read: a transaction that began there
    counts as abandoned.
    """
    cleaner = tier.cleaner_settings_for_topic(state.topic)
    recent = _recently_uploaded(state.live, cleaner.producer_id_expiration_ms)
    if not recent:
        return state.end_offset + 1
    known = listed.transactions.get(state.topic_partition)
    place = -1 if known is None else next((at for at, segment in enumerate(recent) if known.belongs_to(segment)), -1)
    opened = dict(known.first_offsets) if known is not None and place >= 0 else {}
    for segment in recent[place + 1 :]:
        reader = SegmentReader(tier.ports.layout, state.topic_partition, segment, cleaner.max_decompressed_batch_bytes)
        try:
            for piece in reader.read_pieces():
                update_open_transactions(opened, piece.source.table, segment.end_offset)
        except SegmentGone:
            if segment is recent[-1]:
                raise
            opened.clear()  # it has expired meanwhile, and so has everything before it
    opened = {producer: offset for producer, offset in opened.items() if offset >= recent[0].start_offset}
    listed.transactions[state.topic_partition] = OpenTransactionsAtSegmentEnd(recent[-1].start_offset, recent[-1].size_bytes, opened)
    return min(opened.values(), default=state.end_offset + 1)


def _recently_uploaded(live_segments: Sequence[RemoteLogSegmentMetadata], within_ms: int) -> Sequence[RemoteLogSegmentMetadata]:
    if not live_segments:
        return ()
    begin = next(at for at, segment in enumerate(live_segments) if segment.mtime_ms >= live_segments[-1].mtime_ms - within_ms)
    return live_segments[begin:]


def update_open_transactions(first_offset_by_producer: dict[int, int], table: BatchTable, last_offset: int) -> None:
    """Update open transactions, by producer id, for the batches up to ``last_offset`` (inclusive)."""
    inside = (table.producer_id >= 0) & (table.last_offset <= last_offset)
    ends = ((table.control == ABORT) | (table.control == COMMIT)) & inside
    data = (table.control == NOT_CONTROL) & table.transactional_flags & inside
    at = np.flatnonzero(ends | data)
    producers, whose = np.unique(table.producer_id[at], return_inverse=True)
    places, is_end = np.arange(len(at)), ends[at]
    ended = np.full(len(producers), -1, np.int64)
    np.maximum.at(ended, whose[is_end], places[is_end])
    for index in np.flatnonzero(ended >= 0).tolist():
        first_offset_by_producer.pop(int(producers[index]), None)
    still = ~is_end & (places > ended[whose])
    begun = np.full(len(producers), MAX_OFFSET, np.int64)
    np.minimum.at(begun, whose[still], table.base_offset[at][still])
    for index in np.flatnonzero(begun < MAX_OFFSET).tolist():
        first_offset_by_producer.setdefault(int(producers[index]), int(begun[index]))
