"""Cache of pieces of segments: whole batches, a few megabytes, parsed and checked once. Memory first, then a budget on disk.

Segments never change under their ids, so that a piece stays valid. Methods of ``PieceCache`` belong to the event loop; threads wait for
store and disk.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from compactor.errors import BadData, StoreError
from compactor.read.outcomes import flag_damaged_batches, read_before_damage
from compactor.read.pieces import SegmentPiece, SegmentReader
from compactor.records.batches import Int64s

T = TypeVar("T")
PIECE_BYTES = 4 << 20
MOST_QUEUED = 16
"""Number of evicted pieces that wait for the disk: a disk that is slower than the store costs the cache, not the memory."""
KEPT_SEGMENTS = 10_000
"""Number of segments whose piece bounds stay in memory: about 100 bytes for each 4 MiB of them."""


class PieceKey(NamedTuple):
    """Place of a piece. Bounds from an offset index and from the batches may differ, so the size is part of it."""

    segment_id: str
    position: int
    size: int


@dataclass(frozen=True)
class Bounds:
    """Beginnings of the pieces of a segment.

    positions: byte positions, ascending; the first is 0.
    offsets: last offset of each piece's first batch; -1 for the first piece.
    is_scanned: taken from the batches, not from the offset index.
    """

    reader: SegmentReader
    positions: Int64s
    offsets: Int64s
    is_scanned: bool = False

    def find(self, offset: int) -> int:
        """Number of the first piece that can hold ``offset``. If not there, it is in the next one."""
        return int(self.offsets.searchsorted(offset, side="right")) - 1

    def key(self, number: int) -> PieceKey:
        return PieceKey(self.reader.metadata.id, int(self.positions[number]), self.size(number))

    def size(self, number: int) -> int:
        end = int(self.positions[number + 1]) if number + 1 < len(self.positions) else self.reader.metadata.size_bytes
        return end - int(self.positions[number])


@dataclass
class Piece:
    """Whole batches of a segment, with their CRCs checked.

    begins: offset of each batch, ascending.
    ends: byte position after each batch.
    damaged: numbers of batches with invalid CRC, ascending.
    damage: the error that ends the piece, if bytes after the last batch are not batches.
    outcomes: ``fetch.Outcomes``; None until committed records are read.
    """

    source: SegmentPiece
    data: memoryview
    begins: Int64s
    ends: Int64s
    damaged: Int64s
    damage: BadData | None = None
    outcomes: Any = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Memory, with the columns of batch headers."""
        return len(self.data) + sum(column.nbytes for column in (*self.source.source.table, self.begins, self.ends))


def load_bounds(reader: SegmentReader) -> Bounds:
    """From the offset index, or from the batches if it is missing or invalid.

    Raises SegmentGone, BadData, StoreError.
    """
    entries = reader.offset_entries()
    size = reader.metadata.size_bytes
    if len(entries) or size <= PIECE_BYTES:
        positions = entries["position"].astype(np.int64)
        at = np.searchsorted(positions, np.arange(PIECE_BYTES, size, PIECE_BYTES))
        cuts = np.unique(at[at < len(positions)])
        offsets = entries["offset"].astype(np.int64)[cuts] + reader.metadata.start_offset
        return Bounds(reader, np.concatenate(([0], positions[cuts])), np.concatenate(([-1], offsets)))
    return scan_bounds(reader)


def scan_bounds(reader: SegmentReader) -> Bounds:
    """By reading all batches. The last piece begins where a batch is damaged."""
    positions, offsets = [0], [-1]
    with suppress(BadData):  # the last piece says so when it is read
        for piece in reader.read_pieces(0, PIECE_BYTES):
            if piece.position:
                positions.append(piece.position)
                offsets.append(int(piece.source.table.last_offset[0]))
    return Bounds(reader, np.array(positions), np.array(offsets), is_scanned=True)


def load_piece(bounds: Bounds, number: int, data: bytes | None = None) -> Piece:
    """Load ``data``, or read it from the store. Raises SegmentGone, StoreError; BadData if not even its first batch can be read."""
    reader, position, size = bounds.reader, int(bounds.positions[number]), bounds.size(number)
    damage: BadData | None = None
    try:
        source = reader.parse_piece(position, data) if data is not None else reader.read_exact_piece(position, size)
    except BadData as error:
        before = read_before_damage(reader, position, error)
        if before is None:
            raise
        source, damage = before, error
    table = source.source.table
    damaged = np.flatnonzero(flag_damaged_batches(source, np.ones(len(table), np.bool_)))
    # The header of a compressed v0/v1 wrapper has no base offset; it holds at least one record, its last.
    begins = np.where(table.base_offset < 0, table.last_offset, table.base_offset)
    return Piece(source, memoryview(source.source.buf.data), begins, table.position + table.size, damaged, damage)


class DiskBudgetFolder:
    """Files of pieces; the oldest go first. Used by one thread at a time."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self.budget = folder, budget
        self._sizes: OrderedDict[PieceKey, int] = OrderedDict()
        self.used = 0
        if budget:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("*.piece"):  # of a process before: which segments still live is not known
                left.unlink(missing_ok=True)

    def _path(self, key: PieceKey) -> Path:
        return self._folder / f"{key.segment_id}-{key.position}-{key.size}.piece"

    def read(self, key: PieceKey) -> bytes | None:
        """Bytes are checked like a store's."""
        if key not in self._sizes:
            return None
        self._sizes.move_to_end(key)
        try:
            data = self._path(key).read_bytes()
        except OSError:
            return None
        return data if len(data) == self._sizes[key] else None

    def write(self, key: PieceKey, data: memoryview) -> None:
        """Remove older pieces beyond the budget. A full disk only costs the cache."""
        if key in self._sizes or len(data) > self.budget:
            return
        while self.used + len(data) > self.budget:
            old, size = self._sizes.popitem(last=False)
            self._path(old).unlink(missing_ok=True)
            self.used -= size
        try:
            self._path(key).write_bytes(data)
        except OSError:
            self._path(key).unlink(missing_ok=True)
            return
        self._sizes[key] = len(data)
        self.used += len(data)


@dataclass
class CacheCounts:
    memory: int = 0
    disk: int = 0
    store: int = 0
    evicted: int = 0


class PieceCache:
    """Pieces by segment and position. Requests for a piece that is being loaded wait for that load (single flight).

    pool: ``threads`` threads for loads. At most twice as many loads are begun in advance, so that requests do not wait long.
    """

    def __init__(self, memory_bytes: int, disk: DiskBudgetFolder, pool: ThreadPoolExecutor, threads: int) -> None:
        self._budget = memory_bytes
        self._disk = disk
        self._pool = pool
        self._disk_turn = ThreadPoolExecutor(1, "piece-disk")
        self._pieces: OrderedDict[PieceKey, Piece] = OrderedDict()
        self._bounds: OrderedDict[str, Bounds] = OrderedDict()
        self._loads: dict[object, asyncio.Future[Any]] = {}
        self._most_loads = 2 * threads
        self._queued = 0
        self.used = 0
        self.counts = CacheCounts()

    @property
    def disk_used(self) -> int:
        return self._disk.used

    def known_bounds(self, segment_id: str) -> Bounds | None:
        return self._bounds.get(segment_id)

    async def bounds(self, segment_id: str, reader: Callable[[], SegmentReader]) -> Bounds:
        found = self._bounds.get(segment_id)
        if found is None:
            found = await self._single_flight(segment_id, lambda: self._run(lambda: load_bounds(reader())))
            # A new reader does not hold the entries of the offset index, which are megabytes for a large segment.
            found = replace(found, reader=reader())
            self._bounds[segment_id] = found
            while len(self._bounds) > KEPT_SEGMENTS:
                self._bounds.popitem(last=False)
        return found

    async def piece(self, bounds: Bounds, number: int) -> Piece | None:
        """Raises the errors of ``load_piece``.

        None if the piece is damaged and its bounds came from the offset index: ``bounds`` returns new ones, from the batches.
        """
        if bounds.is_scanned:
            return await self._piece(bounds, number)
        try:
            found = await self._piece(bounds, number)
        except BadData:
            found = None
        if found is None or found.damage is not None:
            await self._rescan(bounds)
            return None
        return found

    async def _piece(self, bounds: Bounds, number: int) -> Piece:
        key = bounds.key(number)
        found = self._pieces.get(key)
        if found is not None:
            self._pieces.move_to_end(key)
            self.counts.memory += 1
            return found
        return await self._single_flight(key, lambda: self._load(bounds, number))

    def has(self, bounds: Bounds, number: int) -> bool:
        return bounds.key(number) in self._pieces

    def prefetch(self, bounds: Bounds, number: int) -> None:
        """Begin to load a piece, unless it is loaded or loading. Its errors wait for the next request."""
        key = bounds.key(number)
        if key not in self._pieces and key not in self._loads and len(self._loads) < self._most_loads:
            self._begin(key, self._load(bounds, number)).add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _rescan(self, bounds: Bounds) -> None:
        """Take the bounds from the batches: the offset index may be damaged. If the batches cannot be read to the end either, the index is
        right, and leads past the damage.
        """
        key = ("scan", bounds.reader.metadata.id)
        found = await self._single_flight(key, lambda: self._run(lambda: scan_bounds(bounds.reader)))
        try:
            is_whole = (await self._piece(found, len(found.positions) - 1)).damage is None
        except BadData:
            is_whole = False
        self._bounds[bounds.reader.metadata.id] = found if is_whole else replace(bounds, is_scanned=True)

    def forget(self, segment_id: str) -> None:
        self._bounds.pop(segment_id, None)

    async def _load(self, bounds: Bounds, number: int) -> Piece:
        key = bounds.key(number)
        # Many connections load many pieces at the same time: they take their place in the budget before, not after.
        self._reserve(key.size)
        try:
            piece = await self._load_from_disk(bounds, number) if self._disk.used else None
            if piece is not None:
                self.counts.disk += 1
            else:
                self.counts.store += 1
                piece = await self._run(lambda: load_piece(bounds, number))
        finally:
            self.used -= key.size
        self._pieces[key] = piece
        self._reserve(piece.nbytes)
        return piece

    def _reserve(self, size: int) -> None:
        """Count bytes as used, and evict the least recently used pieces beyond the budget, except the last."""
        self.used += size
        while self.used > self._budget and len(self._pieces) > 1:
            old, evicted = self._pieces.popitem(last=False)
            self.used -= evicted.nbytes
            self.counts.evicted += 1
            if evicted.damage is None and self._disk.budget and self._queued < MOST_QUEUED:
                self._queued += 1
                written = asyncio.ensure_future(self._run(partial(self._disk.write, old, evicted.data), self._disk_turn))
                written.add_done_callback(self._note_written)

    def _note_written(self, written: asyncio.Future[None]) -> None:
        self._queued -= 1

    async def _load_from_disk(self, bounds: Bounds, number: int) -> Piece | None:
        """Return None if the piece is missing or damaged: the store decides."""
        data = await self._run(lambda: self._disk.read(bounds.key(number)), self._disk_turn)
        if data is None:
            return None
        try:
            piece = await self._run(lambda: load_piece(bounds, number, data))
        except (BadData, StoreError):
            return None
        return piece if piece.damage is None and not len(piece.damaged) else None

    async def _single_flight(self, key: object, load: Callable[[], Awaitable[T]]) -> T:
        task = self._loads.get(key) or self._begin(key, load())
        # A client that goes away must not end the load that others wait for.
        found: T = await asyncio.shield(task)
        return found

    def _begin(self, key: object, load: Awaitable[T]) -> asyncio.Future[T]:
        task = asyncio.ensure_future(load)
        self._loads[key] = task
        task.add_done_callback(lambda _: self._loads.pop(key, None))
        return task

    def _run(self, work: Callable[[], T], pool: ThreadPoolExecutor | None = None) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(pool or self._pool, work)

    def close(self) -> None:
        self._disk_turn.shutdown(cancel_futures=True)
