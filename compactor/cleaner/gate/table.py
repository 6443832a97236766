"""The gate's own key table: for every key of some range of the gate's hash, its last committed record in the dirty range.

A *row* says of one record what the gate wants to know, and a cell of the table is the row of its key's last record. Three words: half of
the key's hash (0 marks an empty cell), the record's offset, and 30 more bits of the hash with a mark for expired tombstones and the digest.

What must be left of a segment is told by a number and a sum: how many records, and the sum of a word for each (``mark``), which hardly
anything else has. Sums need no order, so that ranges of the keys can be looked at one after the other, or far from each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel, leaf, multiply_high, prefetch
from compactor.records.batches import Int64s

WORDS: Final = 3
ROW_BYTES: Final = 8 * WORDS
DIGEST: Final = np.uint64(2**32 - 1)
DUE: Final = np.uint64(1 << 62)
"""In a digest: a tombstone whose horizon has passed. The key has no record any more."""

ABSENT: Final = -1
_LOAD: Final = 0.7
_AHEAD: Final = 16
_SOME: Final = 1 << 16
_KEY_BITS: Final = np.uint64((2**30 - 1) << 32)

KEY_BYTES: Final = 36
"""What a key takes in a table, with a little to spare."""

ENTRIES, CAPACITY, LIMIT = range(3)

Words = npt.NDArray[np.uint64]
Rows = Words
"""Shape (n, 3)."""

Sums = Words
"""Per segment: how many records must be left, and the sum of their marks. Shape (segments, 2)."""


class KeyTable:
    """At most ``budget_bytes``; touched only as far as it is filled."""

    def __init__(self, budget_bytes: int, rows: int) -> None:
        """``rows``: no more records than so many will be put."""
        self._most = max(8, budget_bytes // ROW_BYTES)
        self._cells: Words = np.zeros(WORDS * self._for(rows), np.uint64)
        self._state = np.zeros(3, np.int64)
        self._empty(len(self._cells) // WORDS)

    @property
    def keys(self) -> int:
        return int(self._state[ENTRIES])

    def clear(self, rows: int) -> None:
        """Empties it, for so many other records at most."""
        cells = self._for(rows)
        if WORDS * cells > len(self._cells):
            self._cells = np.zeros(WORDS * self._for(rows + rows // 8), np.uint64)  # the next one may be a little larger
        else:
            self._cells[: WORDS * cells] = 0
        self._empty(cells)

    def put(self, rows: Rows, ranges: int = 1, wanted: int = 0) -> int:
        """Records in any order: the highest offset of a key stays. Of ``ranges`` of the keys only the ``wanted`` one.

        Returns the row that there was no room for, or the number of rows.
        """
        return int(_put(self._cells, self._state, rows, ranges, wanted))

    def held(self) -> Iterator[Rows]:
        """The cells that have a key, some at a time."""
        cells = self._cells[: WORDS * int(self._state[CAPACITY])].reshape(-1, WORDS)
        for begin in range(0, len(cells), _SOME):
            some = cells[begin : begin + _SOME]
            yield some[some[:, 0] != 0]

    def latest(self, hashes: Words) -> Int64s:
        """The last offset of each key; ABSENT: not in the dirty range."""
        out = np.empty(len(hashes), np.int64)
        _latest(self._cells, self._state, hashes, out)
        return out

    def left(self, bounds: Int64s, sums: Sums) -> None:
        """Adds to ``sums`` what must be left in each of the segments [bounds[i], bounds[i + 1])."""
        _left(self._cells, int(self._state[CAPACITY]), bounds, sums)

    def left_below(self, rows: Rows, ranges: int, wanted: int, bounds: Int64s, sums: Sums) -> None:
        """The same of records that lie outside the dirty range and are left where it does not have their key."""
        _left_below(self._cells, self._state, rows, ranges, wanted, bounds, sums)

    def _for(self, rows: int) -> int:
        return max(8, min(self._most, int(rows / _LOAD) + 64))

    def _empty(self, cells: int) -> None:
        self._state[:] = 0, cells, int(cells * _LOAD)


def rows_of(hashes: Words, offsets: Int64s, digests: Words) -> Rows:
    """``hashes`` of shape (n, 2); ``digests`` may carry DUE."""
    rows = np.empty((len(offsets), WORDS), np.uint64)
    _pack(hashes, offsets, digests, rows)
    return rows


def marks_of(offsets: Int64s, digests: Words) -> Words:
    out = np.empty(len(offsets), np.uint64)
    _marks(offsets, digests, out)
    return out


@leaf
def mark(offset: np.uint64, digest: np.uint64) -> np.uint64:
    """64 bits for a record at its offset, mixed until sums of them say nothing of each other."""
    word = offset * np.uint64(0x9E3779B97F4A7C15) + (digest & np.uint64(2**32 - 1)) * np.uint64(0xD6E8FEB86659FD93)
    word = (word ^ (word >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(32))


@leaf
def range_of(tag: np.uint64, ranges: int) -> int:
    """By the bits from which cells do not take their homes."""
    return np.int64(multiply_high((tag << np.uint64(32)) | (tag >> np.uint64(32)), np.uint64(ranges)))


@leaf
def segment_of(offset: np.uint64, bounds: Int64s) -> int:
    """The last i with bounds[i] <= offset."""
    low, high = 0, len(bounds) - 1
    while low + 1 < high:
        middle = (low + high) // 2
        if bounds[middle] <= np.int64(offset):
            low = middle
        else:
            high = middle
    return low


@leaf
def _tag(h0: np.uint64) -> np.uint64:
    return h0 if h0 != 0 else np.uint64(1)


@leaf
def _extra(h1: np.uint64) -> np.uint64:
    return (h1 & np.uint64(2**30 - 1)) << np.uint64(32)


@leaf
def _find(cells: Words, capacity: int, tag: np.uint64, extra: np.uint64) -> int:
    """The key's cell, or the complement of the empty cell where it would go."""
    cell = np.int64(multiply_high(tag, np.uint64(capacity)))
    while cells[WORDS * cell] != 0:
        if cells[WORDS * cell] == tag and (cells[WORDS * cell + 2] & _KEY_BITS) == extra:
            return cell
        cell = cell + 1 if cell + 1 < capacity else 0
    return ~cell


@leaf
def _ahead(cells: Words, capacity: int, rows: Rows, row: int) -> None:
    if row + _AHEAD < len(rows):
        prefetch(cells, WORDS * np.int64(multiply_high(_tag(rows[row + _AHEAD, 0]), np.uint64(capacity))))


@kernel
def _pack(hashes: Words, offsets: Int64s, digests: Words, rows: Rows) -> None:
    for row in range(len(offsets)):
        rows[row, 0] = _tag(hashes[row, 0])
        rows[row, 1] = np.uint64(offsets[row])
        rows[row, 2] = digests[row] | _extra(hashes[row, 1])


@kernel
def _marks(offsets: Int64s, digests: Words, out: Words) -> None:
    for row in range(len(offsets)):
        out[row] = mark(np.uint64(offsets[row]), digests[row])


@kernel
def _put(cells: Words, state: Int64s, rows: Rows, ranges: int, wanted: int) -> int:
    capacity = state[CAPACITY]
    for row in range(len(rows)):
        _ahead(cells, capacity, rows, row)
        if ranges > 1 and range_of(rows[row, 0], ranges) != wanted:
            continue
        cell = _find(cells, capacity, rows[row, 0], rows[row, 2] & _KEY_BITS)
        if cell < 0:
            if state[ENTRIES] >= state[LIMIT]:
                return row
            state[ENTRIES] += 1
            cell = ~cell
        elif np.int64(cells[WORDS * cell + 1]) >= np.int64(rows[row, 1]):
            continue
        for word in range(WORDS):
            cells[WORDS * cell + word] = rows[row, word]
    return len(rows)


@kernel
def _latest(cells: Words, state: Int64s, hashes: Words, out: Int64s) -> None:
    for row in range(len(hashes)):
        _ahead(cells, state[CAPACITY], hashes, row)
        cell = _find(cells, state[CAPACITY], _tag(hashes[row, 0]), _extra(hashes[row, 1]))
        out[row] = np.int64(cells[WORDS * cell + 1]) if cell >= 0 else ABSENT


@kernel
def _left(cells: Words, capacity: int, bounds: Int64s, sums: Sums) -> None:
    for cell in range(capacity):
        if cells[WORDS * cell] != 0 and cells[WORDS * cell + 2] & DUE == 0:
            segment = segment_of(cells[WORDS * cell + 1], bounds)
            sums[segment, 0] += np.uint64(1)
            sums[segment, 1] += mark(cells[WORDS * cell + 1], cells[WORDS * cell + 2])


@kernel
def _left_below(cells: Words, state: Int64s, rows: Rows, ranges: int, wanted: int, bounds: Int64s, sums: Sums) -> None:
    for row in range(len(rows)):
        _ahead(cells, state[CAPACITY], rows, row)
        if ranges > 1 and range_of(rows[row, 0], ranges) != wanted:
            continue
        if _find(cells, state[CAPACITY], rows[row, 0], rows[row, 2] & _KEY_BITS) < 0:
            segment = segment_of(rows[row, 1], bounds)
            sums[segment, 0] += np.uint64(1)
            sums[segment, 1] += mark(rows[row, 1], rows[row, 2])
