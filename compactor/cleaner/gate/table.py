"""The gate's own key table: for every key of the dirty range, its last committed record.

A cell is three words: half of the key's hash (0 marks an empty cell), the record's offset, and 30 more bits of the hash with the
record's digest and two marks. Where the budget is too small for all keys, only those stay whose hash ends in certain bits, one bit more
each time: the share of the keys that is then still checked exactly halves, and the caller's seed says which half.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel, leaf, multiply_high, prefetch
from compactor.records.batches import Int64s

CELL: Final = 3
CELL_BYTES: Final = 8 * CELL
DIGEST: Final = np.uint64(2**32 - 1)
DUE: Final = np.uint64(1 << 62)
"""In a digest: a tombstone whose horizon has passed. The key has no record any more."""

SEEN: Final = np.uint64(1 << 63)
UNKNOWN: Final = -2
ABSENT: Final = -1
_LOAD: Final = 0.7
_AHEAD: Final = 16

ENTRIES, CAPACITY, LIMIT, BITS, VALUE = range(5)

Words = npt.NDArray[np.uint64]


class KeyTable:
    """At most ``budget_bytes``, of which a third is only needed when the table narrows."""

    def __init__(self, budget_bytes: int, rows: int, seed: int, bits: int = 0) -> None:
        """``rows``: no more records than so many will be put. ``seed``: which keys stay where not all do; ``bits``: one of 2^bits does."""
        cells = max(8, min(budget_bytes // (CELL_BYTES * 3 // 2), int(rows / _LOAD) + 64))
        self._seed = seed
        self._cells: Words = np.zeros(CELL * cells, np.uint64)
        self._state = np.array([0, cells, int(cells * _LOAD), bits, seed & ((1 << bits) - 1)], np.int64)

    @property
    def keys(self) -> int:
        return int(self._state[ENTRIES])

    @property
    def bits(self) -> int:
        """The table speaks for one of 2^bits keys."""
        return int(self._state[BITS])

    @property
    def coverage(self) -> float:
        """The share of all keys that the table speaks for."""
        return float(2.0 ** -int(self._state[BITS]))

    def speaks(self, hashes: Words) -> npt.NDArray[np.bool_]:
        """Which keys the table speaks for."""
        tags = np.where(hashes[:, 0] != 0, hashes[:, 0], np.uint64(1))
        return np.asarray((tags & np.uint64((1 << int(self._state[BITS])) - 1)) == np.uint64(self._state[VALUE]))

    def put(self, hashes: Words, offsets: Int64s, digests: Words) -> None:
        """Records, their hashes of shape (n, 2), in any order: the highest offset of a key stays. ``digests`` may carry DUE."""
        start = 0
        while True:
            start = int(_put(self._cells, self._state, hashes, offsets, digests, start))
            if start == len(hashes):
                return
            self._narrow()

    def taken(self) -> Words:
        """The cells that have a key, one a row, as another table can put them."""
        cells = self._cells.reshape(-1, CELL)
        return cells[cells[:, 0] != 0]

    def latest(self, hashes: Words) -> Int64s:
        """The last offset of each key; ABSENT: not in the dirty range; UNKNOWN: the table does not speak for this key."""
        out = np.empty(len(hashes), np.int64)
        _latest(self._cells, self._state, hashes, out)
        return out

    def tick(self, hashes: Words, offsets: Int64s, digests: Words) -> tuple[int, int]:
        """Ticks off output records.

        Returns the first that is not its key's last record, unchanged and for the first time (or -1), and how many are.
        """
        wrong, ticked = _tick(self._cells, self._state, hashes, offsets, digests)
        return int(wrong), int(ticked)

    def entry(self, hashes: Words) -> tuple[int, int]:
        """(last offset or ABSENT, digest and marks) of the first of these keys."""
        cell = int(_find(self._cells, int(self._state[CAPACITY]), hashes[0, 0], hashes[0, 1]))
        return (int(self._cells[CELL * cell + 1]), int(self._cells[CELL * cell + 2])) if cell >= 0 else (ABSENT, 0)

    def live(self, bounds: Int64s) -> Int64s:
        """How many keys have their last record, not due, in each of the ranges [bounds[i], bounds[i + 1])."""
        return np.asarray(_live(self._cells, int(self._state[CAPACITY]), bounds), np.int64)

    def missing(self, begin: int, end: int) -> int:
        """The lowest offset in [begin, end) of a key's last record that is not due and was not ticked off, or -1."""
        return int(_missing(self._cells, int(self._state[CAPACITY]), begin, end))

    def _narrow(self) -> None:
        state = self._state
        state[VALUE] += (self._seed >> int(state[BITS]) & 1) << int(state[BITS])
        state[BITS] += 1
        cells = self._cells.reshape(-1, CELL)
        kept = cells[(cells[:, 0] != 0) & ((cells[:, 0] & np.uint64((1 << int(state[BITS])) - 1)) == np.uint64(state[VALUE]))]
        cells[:] = 0
        state[ENTRIES] = len(kept)
        _refill(self._cells, int(state[CAPACITY]), kept)


@leaf
def _tag(h0: np.uint64) -> np.uint64:
    return h0 if h0 != 0 else np.uint64(1)


@leaf
def _extra(h1: np.uint64) -> np.uint64:
    return (h1 & np.uint64(2**30 - 1)) << np.uint64(32)


@leaf
def _find(cells: Words, capacity: int, h0: np.uint64, h1: np.uint64) -> int:
    """The key's cell, or the complement of the empty cell where it would go."""
    tag = _tag(h0)
    cell = np.int64(multiply_high(tag, np.uint64(capacity)))
    while cells[CELL * cell] != 0:
        if cells[CELL * cell] == tag and (cells[CELL * cell + 2] & np.uint64((2**30 - 1) << 32)) == _extra(h1):
            return cell
        cell = cell + 1 if cell + 1 < capacity else 0
    return ~cell


@leaf
def _speaks(state: Int64s, h0: np.uint64) -> bool:
    return (_tag(h0) & np.uint64((1 << state[BITS]) - 1)) == np.uint64(state[VALUE])


@leaf
def _ahead(cells: Words, capacity: int, hashes: Words, row: int) -> None:
    if row + _AHEAD < len(hashes):
        prefetch(cells, CELL * np.int64(multiply_high(_tag(hashes[row + _AHEAD, 0]), np.uint64(capacity))))


@kernel
def _put(cells: Words, state: Int64s, hashes: Words, offsets: Int64s, digests: Words, start: int) -> int:
    """The row that found no room, or the number of rows."""
    capacity = state[CAPACITY]
    for row in range(start, len(hashes)):
        _ahead(cells, capacity, hashes, row)
        if not _speaks(state, hashes[row, 0]):
            continue
        cell = _find(cells, capacity, hashes[row, 0], hashes[row, 1])
        if cell < 0:
            if state[ENTRIES] >= state[LIMIT]:
                return row
            state[ENTRIES] += 1
            cell = ~cell
            cells[CELL * cell] = _tag(hashes[row, 0])
        elif np.int64(cells[CELL * cell + 1]) >= offsets[row]:
            continue
        cells[CELL * cell + 1] = np.uint64(offsets[row])
        cells[CELL * cell + 2] = digests[row] | _extra(hashes[row, 1])
    return len(hashes)


@kernel
def _latest(cells: Words, state: Int64s, hashes: Words, out: Int64s) -> None:
    for row in range(len(hashes)):
        _ahead(cells, state[CAPACITY], hashes, row)
        cell = _find(cells, state[CAPACITY], hashes[row, 0], hashes[row, 1])
        out[row] = np.int64(cells[CELL * cell + 1]) if cell >= 0 else ABSENT
        if not _speaks(state, hashes[row, 0]):
            out[row] = UNKNOWN


@kernel
def _tick(cells: Words, state: Int64s, hashes: Words, offsets: Int64s, digests: Words) -> tuple[int, int]:
    ticked = 0
    for row in range(len(hashes)):
        _ahead(cells, state[CAPACITY], hashes, row)
        if not _speaks(state, hashes[row, 0]):
            continue
        cell = _find(cells, state[CAPACITY], hashes[row, 0], hashes[row, 1])
        if cell < 0 or np.int64(cells[CELL * cell + 1]) != offsets[row]:
            return row, ticked
        if cells[CELL * cell + 2] != digests[row] | _extra(hashes[row, 1]):
            return row, ticked  # changed, expired, or there already
        cells[CELL * cell + 2] |= SEEN
        ticked += 1
    return -1, ticked


@kernel
def _live(cells: Words, capacity: int, bounds: Int64s) -> Int64s:
    found = np.zeros(len(bounds) - 1, np.int64)
    for cell in range(capacity):
        if cells[CELL * cell] != 0 and cells[CELL * cell + 2] & DUE == 0:
            offset = np.int64(cells[CELL * cell + 1])
            low, high = 0, len(found)
            while low < high:
                middle = (low + high) // 2
                if bounds[middle + 1] <= offset:
                    low = middle + 1
                else:
                    high = middle
            if low < len(found) and bounds[low] <= offset:
                found[low] += 1
    return found


@kernel
def _missing(cells: Words, capacity: int, begin: int, end: int) -> int:
    lowest = np.int64(-1)
    for cell in range(capacity):
        if cells[CELL * cell] != 0 and cells[CELL * cell + 2] & (SEEN | DUE) == 0:
            offset = np.int64(cells[CELL * cell + 1])
            if begin <= offset < end and (lowest < 0 or offset < lowest):
                lowest = offset
    return lowest


@kernel
def _refill(cells: Words, capacity: int, kept: Words) -> None:
    for row in range(len(kept)):
        cell = np.int64(multiply_high(kept[row, 0], np.uint64(capacity)))
        while cells[CELL * cell] != 0:
            cell = cell + 1 if cell + 1 < capacity else 0
        for i in range(CELL):
            cells[CELL * cell + i] = kept[row, i]
