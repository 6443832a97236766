"""Remote segments read in pieces of whole batches: a few megabytes at a time, from any offset on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from compactor.cleaner.passes.source import SourceSegment, read_packed_markers
from compactor.errors import BadData, NotFound
from compactor.kernels.memory import load_i32
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.records.batches import FRAME, Bytes, read_only, scan_batches
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY
from compactor.tier.ports import SegmentLayout

PIECE_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Piece:
    """Whole batches of one segment, from byte ``position`` of it on."""

    metadata: RemoteLogSegmentMetadata
    position: int
    source: SourceSegment

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.position + len(self.source.buf)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Bad data inside is reported with its position in the segment."""
        try:
            yield
        except BadData as error:
            raise _moved(error, self.position) from None


class SegmentReader:
    """One remote segment. Raises Gone where an object of it is not there, BadData where its bytes are not batches."""

    def __init__(self, layout: SegmentLayout, partition: TopicPartition, metadata: RemoteLogSegmentMetadata, inflate_limit: int) -> None:
        self._layout = layout
        self._partition = partition
        self.metadata = metadata
        self._limit = inflate_limit
        self._found: Mapping[str, SegmentFile] | None = None
        self._known: npt.NDArray[Any] | None = None

    def pieces(self, position: int = 0, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
        """From ``position`` (of a batch) to the segment's end."""
        while position < self.metadata.size_bytes:
            piece = self.piece(position, piece_bytes)
            yield piece
            position = piece.end

    def cut_behind(self, position: int, piece_bytes: int = PIECE_BYTES) -> int | None:
        """Where a piece of about this size from ``position`` on ends: where the offset index has a batch begin; None where it has none."""
        if self.metadata.size_bytes - position <= piece_bytes:
            return self.metadata.size_bytes
        known = self._offset_index()["position"].astype(np.int64)
        at = int(np.searchsorted(known, position + piece_bytes))
        return int(known[at]) if at < len(known) else self.metadata.size_bytes if len(known) else None

    def position_behind(self, offset: int) -> int:
        """Before it lie all batches that hold offsets up to ``offset``; the segment's end where the index does not know better."""
        entries = self._offset_index()
        # An entry is of the last offset in its batch: the first one above may be of the batch that holds the offset.
        behind = int(np.searchsorted(entries["offset"].astype(np.int64) + self.metadata.start_offset, offset, side="right")) + 1
        return int(entries["position"][behind]) if behind < len(entries) else self.metadata.size_bytes

    def cuts_backwards(self, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
        """(position, bytes) of all its pieces, the last one first; cut where the offset index knows batches to begin."""
        known = self._offset_index()["position"].astype(np.int64)
        size = self.metadata.size_bytes
        at = np.searchsorted(known, np.arange(piece_bytes, size, piece_bytes))
        cuts = np.unique(known[at[at < len(known)]]).tolist()
        return [(begin, end - begin) for begin, end in reversed(list(zip([0, *cuts], [*cuts, size], strict=True)))]

    def piece(self, position: int, piece_bytes: int = PIECE_BYTES) -> Piece:
        """The whole batches within ``piece_bytes`` from ``position`` on, at least one."""
        key = self._where("log")
        left = self.metadata.size_bytes - position
        length = min(piece_bytes, left)
        while True:
            buf = read_only(np.frombuffer(self._get("log", position, length), np.uint8))
            if not len(buf):
                raise BadData(f"the object ends at byte {position}, {left} bytes early", segment=key, hint="It was changed. Run `verify`")
            whole, needed = whole_batches(buf)
            if whole or length >= left:
                break
            length = min(left, max(needed, length * 2))
        try:
            # Where no batch fits the rest of the segment, the parser says what is wrong with it.
            return Piece(self.metadata, position, self._source(key, buf[: whole or len(buf)]))
        except BadData as error:
            raise _moved(error, position) from None

    def position_of(self, offset: int) -> int:
        """Of a batch at or before the one that holds ``offset``: 0 where the index does not know better."""
        if offset <= self.metadata.start_offset:
            return 0
        entries = self._offset_index()
        behind = int(np.searchsorted(entries["offset"].astype(np.int64) + self.metadata.start_offset, offset, side="right"))
        return int(entries["position"][behind - 1]) if behind else 0

    def offset_before(self, timestamp_ms: int) -> int:
        """All records below this offset are older than ``timestamp_ms``, by the time index."""
        entries = self._index("timeindex", TIME_ENTRY)
        behind = int(np.searchsorted(entries["timestamp"].astype(np.int64), timestamp_ms, side="left"))
        return self.metadata.start_offset + (int(entries["offset"][behind - 1]) if behind else 0)

    def _offset_index(self) -> npt.NDArray[Any]:
        if self._known is None:
            self._known = self._sound_index()
        return self._known

    def _sound_index(self) -> npt.NDArray[Any]:
        entries = self._index("index", OFFSET_ENTRY)
        position, offset = entries["position"].astype(np.int64), entries["offset"].astype(np.int64)
        inside = (position > 0) & (position < self.metadata.size_bytes)
        sound = np.all(np.diff(position) > 0) and np.all(np.diff(offset) > 0) and np.all(inside)
        return entries if sound else entries[:0]

    def _index(self, kind: str, entry: np.dtype[Any]) -> npt.NDArray[Any]:
        """Empty where there is none: reading from the beginning is always right. A missing object is not: the segment was replaced."""
        try:
            if kind not in self._layout.files(self._partition, self.metadata):
                return np.empty(0, entry)
        except NotFound:
            raise Gone(self._where("log"), self.metadata) from None
        data = self._get(kind)
        return np.frombuffer(data[: len(data) // entry.itemsize * entry.itemsize], entry)

    def _files(self) -> Mapping[str, SegmentFile]:
        """Brokers' metadata does not say which there are; the layout does."""
        if not self.metadata.files and self._found is None:
            try:
                self._found = self._layout.files(self._partition, self.metadata)
            except NotFound:
                raise Gone(self._where("log"), self.metadata) from None
        return self.metadata.files or self._found or {}

    def _get(self, kind: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self._layout.read(self._partition, self.metadata, kind, start, length)
        except NotFound:
            raise Gone(self._where(kind), self.metadata) from None

    def _where(self, kind: str) -> str:
        return self._layout.where(self._partition, self.metadata, kind)

    def _source(self, key: str, buf: Bytes) -> SourceSegment:
        base, stop = self.metadata.start_offset, self.metadata.end_offset + 1
        source = SourceSegment(0, key, base, stop, self.metadata.mtime_ms, buf, scan_batches(buf, key, -1))
        read_packed_markers(source, self._limit)
        return source


class PiecesAhead:
    """Pieces in the order of the log: up to ``most`` are fetched by other threads before the reader comes to them; with 0 none is."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(most, "fetch-ahead") if most else None
        self._coming: dict[tuple[str, int], Future[Piece]] = {}

    def take(self, reader: SegmentReader, position: int) -> Piece:
        """The reader comes to this one. Raises as SegmentReader."""
        coming = self._coming.pop((reader.metadata.id, position), None)
        return self._fetched(reader, position) if coming is None else coming.result()

    def look(self, reader: SegmentReader, position: int) -> Piece:
        """The same for whoever looks ahead of the reader: it stays for the reader where it is coming anyway."""
        coming = self._coming.get((reader.metadata.id, position))
        return self._fetched(reader, position) if coming is None else coming.result()

    def want(self, places: Iterable[tuple[SegmentReader, int]]) -> None:
        """What the reader will come to next; what was wanted before and is not among it is forgotten."""
        if self._pool is None:
            return
        before, self._coming = self._coming, {}
        for reader, position in islice(places, self._most):
            key = (reader.metadata.id, position)
            coming = before.pop(key, None)
            self._coming[key] = self._pool.submit(self._fetched, reader, position) if coming is None else coming
        for left in before.values():
            left.cancel()

    def close(self) -> None:
        """What is being fetched is waited for."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _fetched(self, reader: SegmentReader, position: int) -> Piece:
        cut = reader.cut_behind(position) if self._pool is not None else None
        return reader.piece(position) if cut is None else reader.piece(position, cut - position)


class Gone(NotFound):
    """An object of a segment is not there: it was replaced meanwhile, or it is lost."""

    def __init__(self, key: str, metadata: RemoteLogSegmentMetadata) -> None:
        super().__init__(f"{key} is missing in the store")
        self.key = key
        self.metadata = metadata

    def lost(self) -> BadData:
        """What it comes to where a fresh fold still names the segment."""
        return BadData("a live segment is missing in the store", segment=self.key, hint="Run `verify`")


def _moved(error: BadData, by: int) -> BadData:
    at = error.position + by if error.position >= 0 else -1
    return BadData(error.cause, segment=error.segment, position=at, offset=error.offset, hint=error.hint)


@kernel
def whole_batches(buf: Bytes) -> tuple[int, int]:
    """(position behind the last whole batch, bytes that the batch there needs; 0 where not even its size is known)."""
    position = np.int64(0)
    while position + FRAME <= buf.size:
        size = np.int64(load_i32(buf, position + 8)) + FRAME
        if size < FRAME or position + size > buf.size:
            return position, max(size, np.int64(0))
        position += size
    return position, 0
