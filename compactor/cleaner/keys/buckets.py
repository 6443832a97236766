"""The offset map on local disk: for when the keys of one round do not fit the map budget.

Rows of (key, ordinal), 16 bytes each, are written in the order of the scan, newest record first, sorted into ranges of the key within
blocks of about a million. Afterwards one range at a time is read back, block by block and so again newest first, into a small KeySet; the
first row of a key survives. A range is chosen by the key's tag, the part of the hash that a KeySet does not take its homes from.

    file:   block 0 [range 0 | range 1 | ..]  block 1 [range 0 | range 1 | ..]  ..        row: tag:4 hash:8 ordinal:4

Nothing here can run out of memory: a range whose keys exceed the budget is read twice, half of it each time. Where the disk share is too
small for all the rows, the scan is made in several passes, each of which takes only its part of the tags.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel, leaf, prefetch
from bloom.siphash import tag_of
from compactor.cleaner.keys.keysets import AHEAD, CAPACITY, Hashes, KeySet, State, Table, holds, home_of, put
from compactor.cleaner.spool_file import Room, SpoolFile
from compactor.errors import OutOfBudget
from compactor.stages import WorkStage, measured

ROW_BYTES: Final = 16
BLOCK_ROWS: Final = 1 << 20
CACHE_BYTES: Final = 8 << 20
"""Ranges are made small enough for their sets to stay near the processor."""

MOST_RANGES: Final = 4096
KEY_BYTES: Final = 20
SEEN: Final = 2**32 - 1
"""The ordinal of keys whose newest record was answered before the buckets took over."""

Rows = npt.NDArray[np.uint32]
Ordinals = npt.NDArray[np.uint32]
Bitmap = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


def passes_needed(rows: int, disk_share_bytes: int, row_bytes: int = ROW_BYTES) -> int:
    """How often the log must be scanned so that one pass's rows fit the share, with a tenth of it for uneven parts."""
    return max(1, -(-rows * row_bytes * 11 // (max(1, disk_share_bytes) * 10)))


def keys_of(rows: Rows) -> Hashes:
    """As much of a key's hash as a row has, which is all that a set or a filter looks at."""
    words = rows.astype(np.uint64)
    return np.column_stack([words[:, 0], words[:, 1] | (words[:, 2] << np.uint64(32))])


class KeyBuckets:
    """Answers, for every record of a backwards scan, what a KeySet would have answered. Close it, or use it in a ``with``."""

    def __init__(self, path: Path, room: Room, *, map_budget_bytes: int, expected_rows: int, part: int = 0, parts: int = 1) -> None:
        """
        :param path: the file to write; it exists until ``close``.
        :param map_budget_bytes: for one range's set; OutOfBudget where KeySet would raise it.
        :param part, parts: take only this part of the keys; the bitmaps of all parts together are the answer.
        """
        if not 0 <= part < parts:
            raise ValueError(f"part {part} of {parts}")
        KeySet(map_budget_bytes)  # a budget that no set can live in is refused before the scan, not after it
        self._map_budget_bytes = map_budget_bytes
        expected_bytes = -(-expected_rows // parts) * KEY_BYTES
        self._ranges = min(MOST_RANGES, max(1, -(-expected_bytes // min(map_budget_bytes, CACHE_BYTES))))
        self._first_range, self._all_ranges = part * self._ranges, parts * self._ranges
        self._dirty: list[_Block] = []
        self._clean: list[_Block] = []
        self._section = self._dirty
        self._buffer: Rows = np.empty((BLOCK_ROWS, 4), dtype=np.uint32)
        self._sorted: Rows = np.empty((BLOCK_ROWS, 4), dtype=np.uint32)
        self._fill = 0
        hint = "Free space there, or raise map_budget_bytes so that they stay in memory, and run it again; nothing was published"
        self._file = SpoolFile(path, room, "the keys that are written to", hint)
        self._guess = 0
        self._most = -1
        self.entries = 0
        """Keys, known after ``finish``."""
        self.peak_bytes = 0
        """The largest set that ``finish`` needed."""

    @measured(WorkStage.MAP, lambda self, hashes, _: hashes.nbytes)
    def add(self, hashes: Hashes, ordinals: Ordinals) -> None:
        """Rows of shape (n, 2) of the dirty range, newest first over all calls; ordinals below SEEN.

        Raises OutOfBudget when the disk share is used up, or the disk is.
        """
        self._append(self._dirty, hashes, self._checked(ordinals))

    def add_seen(self, hashes: Hashes) -> None:
        """Keys whose newest record has been answered already: what a KeySet held when it was full. Before all calls of ``add``."""
        self._append(self._dirty, hashes, np.full(len(hashes), SEEN, dtype=np.uint32))

    @measured(WorkStage.MAP, lambda self, hashes, _: hashes.nbytes)
    def add_clean(self, hashes: Hashes, ordinals: Ordinals) -> None:
        """Rows below the dirty range, in any order: they survive where no row of ``add`` or ``add_seen`` has their key."""
        self._append(self._clean, hashes, self._checked(ordinals))

    @property
    def disk_bytes(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def takes(self, hashes: Hashes) -> Flags:
        """Which of these rows belong to this part of the keys."""
        answer = np.empty(len(hashes), dtype=np.bool_)
        in_part(hashes, self._all_ranges, self._first_range, self._ranges, answer)
        return answer

    def dirty_keys(self) -> Iterator[Hashes]:
        """What filters are asked about: the keys of the dirty range so far, repeated ones too, in chunks of at most BLOCK_ROWS."""
        self._flush()
        for block in self._dirty:
            yield keys_of(self._rows_at(block.position, int(block.begins[-1])))

    @measured(WorkStage.MAP)
    def finish(self, ordinals: int) -> Bitmap:
        """One bit for each ordinal below ``ordinals``, in the order of ``np.packbits``: 1 where that row was added and survives."""
        if self._most >= ordinals:
            raise ValueError(f"ordinal {self._most} was added, the bitmap is for {ordinals}")
        self._flush()
        self._sorted = np.empty((0, 4), dtype=np.uint32)
        bitmap = np.zeros((ordinals + 7) // 8, dtype=np.uint8)
        for bucket in range(self._ranges):
            self._answer(bucket, self._all_ranges, self._first_range + bucket, bitmap)
        return bitmap

    def close(self) -> None:
        """Removes the file and gives the reservation back. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _checked(self, ordinals: Ordinals) -> Ordinals:
        """The kernels do not look whether an ordinal lies inside the bitmap."""
        most = int(np.max(ordinals)) if len(ordinals) else -1
        if most >= SEEN:
            raise ValueError(f"an ordinal is at most {SEEN - 1}")
        self._most = max(self._most, most)
        return ordinals

    def _append(self, section: list[_Block], hashes: Hashes, ordinals: Ordinals) -> None:
        if section is not self._section:
            self._flush()
            self._section = section
        row = 0
        while row < len(hashes):
            row, self._fill = pack(hashes, ordinals, row, self._all_ranges, self._first_range, self._ranges, self._buffer, self._fill)
            if self._fill == BLOCK_ROWS:
                self._flush()

    def _flush(self) -> None:
        if not self._fill:
            return
        begins = scatter(self._buffer, self._fill, self._all_ranges, self._first_range, self._ranges, self._sorted)
        position = self._file.append(self._sorted[: self._fill].reshape(-1).view(np.uint8).data)
        self._section.append(_Block(position, begins))
        self._fill = 0

    def _answer(self, bucket: int, ranges: int, wanted: int, bitmap: Bitmap) -> None:
        """The rows of a bucket whose tag lies in range ``wanted`` of ``ranges``."""
        if ranges > 2**32:
            raise OutOfBudget("more keys than the map budget holds share one tag: the key hashes are not uniform")
        keys = KeySet(self._map_budget_bytes, expected_keys=self._guess)
        done = 0
        for rows in self._read(self._dirty, bucket):
            taken = survive_if_first(keys.table, keys.state, rows, 0, ranges, wanted, bitmap)
            while taken < len(rows) and keys.grow():
                taken = survive_if_first(keys.table, keys.state, rows, taken, ranges, wanted, bitmap)
            done += taken
            if taken < len(rows):
                # What has been answered so far was right and will be answered again.
                del keys
                pieces = max(2, -(-sum(block.rows(bucket) for block in self._dirty) // max(1, done)))
                for piece in range(pieces):
                    self._answer(bucket, ranges * pieces, wanted * pieces + piece, bitmap)
                return
        for rows in self._read(self._clean, bucket):
            survive_if_absent(keys.table, keys.state, rows, ranges, wanted, bitmap)
        self.entries += keys.entries
        self.peak_bytes = max(self.peak_bytes, keys.peak_bytes)
        self._guess = keys.entries + keys.entries // 20

    def _read(self, section: list[_Block], bucket: int) -> Iterator[Rows]:
        """A bucket's rows in the order in which they were added; each array is good until the next one is asked for."""
        for block in section:
            if block.rows(bucket):
                yield self._rows_at(block.position + int(block.begins[bucket]) * ROW_BYTES, block.rows(bucket))

    def _rows_at(self, position: int, count: int) -> Rows:
        """Rows of the file, in the buffer: nothing may be waiting there to be written."""
        rows = self._buffer[:count]
        self._file.fetch(rows.reshape(-1).view(np.uint8).data, position)
        return rows


@dataclass(frozen=True, slots=True)
class _Block:
    """Where a block lies in the file, and at which of its rows each bucket begins (one more entry: the number of rows)."""

    position: int
    begins: npt.NDArray[np.int64]

    def rows(self, bucket: int) -> int:
        return int(self.begins[bucket + 1] - self.begins[bucket])


# ---- kernels: plain arrays, rows of (tag, low word, high word, ordinal) -----------------------------------------------------


@leaf
def range_of(tag: np.uint32, ranges: int) -> int:
    return np.int64((np.uint64(tag) * np.uint64(ranges)) >> np.uint64(32))  # type: ignore[return-value]


@leaf
def second_half(rows: Rows, row: int) -> np.uint64:
    return np.uint64(rows[row, 1]) | (np.uint64(rows[row, 2]) << np.uint64(32))


@kernel
def pack(hashes: Hashes, ordinals: Ordinals, start: int, ranges: int, first: int, count: int, buffer: Rows, fill: int) -> tuple[int, int]:
    """Packs the rows from ``start`` on whose range is one of ``count`` from ``first``, behind the first ``fill`` of the buffer.

    Returns the first row that was not looked at, and how full the buffer is.
    """
    row = start
    while row < len(hashes) and fill < len(buffer):
        tag = tag_of(hashes[row, 0])
        place = range_of(tag, ranges)
        if first <= place < first + count:
            buffer[fill, 0] = tag
            buffer[fill, 1] = np.uint32(hashes[row, 1] & np.uint64(0xFFFFFFFF))
            buffer[fill, 2] = np.uint32(hashes[row, 1] >> np.uint64(32))
            buffer[fill, 3] = ordinals[row]
            fill += 1
        row += 1
    return row, fill


@kernel
def in_part(hashes: Hashes, ranges: int, first: int, count: int, answer: Flags) -> None:
    for row in range(len(hashes)):
        answer[row] = first <= range_of(tag_of(hashes[row, 0]), ranges) < first + count


@kernel
def scatter(rows: Rows, fill: int, ranges: int, first: int, count: int, out: Rows) -> npt.NDArray[np.int64]:
    """Sorts the first ``fill`` rows by range, those of one range in their old order; returns where each range begins, and ``fill``."""
    begins = np.zeros(count + 1, dtype=np.int64)
    for row in range(fill):
        begins[range_of(rows[row, 0], ranges) - first + 1] += 1
    for bucket in range(count):
        begins[bucket + 1] += begins[bucket]
    place = begins[:-1].copy()
    for row in range(fill):
        bucket = range_of(rows[row, 0], ranges) - first
        for word in range(4):
            out[place[bucket], word] = rows[row, word]
        place[bucket] += 1
    return begins


@kernel
def survive_if_first(table: Table, state: State, rows: Rows, start: int, ranges: int, wanted: int, bitmap: Bitmap) -> int:
    """Rows newest first: the bit of the first row of each key is set. Returns the row that the set has no room for, or their number."""
    for row in range(start, len(rows)):
        if row + AHEAD < len(rows):
            prefetch(table, 3 * home_of(second_half(rows, row + AHEAD), state[CAPACITY]))
        if range_of(rows[row, 0], ranges) == wanted:
            answer = put(table, state, np.uint64(rows[row, 0]), second_half(rows, row))
            if answer < 0:
                return row
            if answer == 1 and rows[row, 3] != SEEN:
                bitmap[rows[row, 3] >> 3] |= np.uint8(128 >> (rows[row, 3] & 7))
    return len(rows)


@kernel
def survive_if_absent(table: Table, state: State, rows: Rows, ranges: int, wanted: int, bitmap: Bitmap) -> None:
    for row in range(len(rows)):
        if row + AHEAD < len(rows):
            prefetch(table, 3 * home_of(second_half(rows, row + AHEAD), state[CAPACITY]))
        if range_of(rows[row, 0], ranges) == wanted and not holds(table, state, np.uint64(rows[row, 0]), second_half(rows, row)):
            bitmap[rows[row, 3] >> 3] |= np.uint8(128 >> (rows[row, 3] & 7))
