"""The last record of every key of the dirty range, within the memory that the gate is given: what must be left of each segment.

Keys are in one table while it holds them. Where it does not, rows go to local disk, sorted by range of the gate's hash, and one range
after the other is looked at; where the disk has no room for all rows, the log is read once for each part of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np

from compactor.cleaner.gate.spool import BELOW, DIRTY, RowSpool
from compactor.cleaner.gate.table import KEY_BYTES, KeyTable, Rows, Sums, Words
from compactor.errors import CompactorError, OutOfBudget
from compactor.records.batches import Int64s

CACHE_BYTES: Final = 8 << 20
"""Ranges are made small enough for their tables to stay near the processor."""

MOST_RANGES: Final = 4096

OpenSpool = Callable[[int, int, int], RowSpool]
"""(ranges, part, parts) -> an empty spool. Raises OutOfBudget."""


def ranges_for(rows: int, budget_bytes: int) -> int:
    """Into how many ranges so many rows are sorted."""
    return min(MOST_RANGES, max(1, -(-rows * KEY_BYTES // max(1, min(budget_bytes, CACHE_BYTES)))))


class LastRecords:
    """Rows in, sums out.

    for each part:  put ...           the records of the dirty range, in any order
                    put_below ...     on disk only: those outside of it that may be left
                    finish            on disk only
    """

    def __init__(self, budget_bytes: int, rows: int, open_spool: OpenSpool, *, on_disk: bool = False, parts: int = 1) -> None:
        """
        :param budget_bytes: for the table.
        :param rows: of the dirty range, about.
        :param on_disk: from the first row on; else from the moment on when the table is full.
        """
        self._budget = budget_bytes
        self._rows = rows
        self._open = open_spool
        self._part, self._parts = 0, parts
        self._table = KeyTable(budget_bytes, 0 if on_disk else rows)
        self._spool = self._opened() if on_disk else None
        self._spilled = on_disk
        self._keys = 0
        self.disk_bytes = 0
        """The most that lay on the disk."""

    @property
    def on_disk(self) -> bool:
        """Whether rows are, or were, on the disk: then nothing can be looked up, and sums are told by ``finish``."""
        return self._spilled

    @property
    def more(self) -> bool:
        """Whether there is a part of the keys that has not been looked at."""
        return self._spool is not None

    @property
    def keys(self) -> int:
        return self._keys if self._spilled else self._table.keys

    def put(self, rows: Rows) -> None:
        """Raises OutOfBudget, OSError."""
        if self._spool is None:
            done = self._table.put(rows)
            if done == len(rows):
                return
            self._spill()
            rows = rows[done:]
        self._disk.add(DIRTY, rows)

    def put_below(self, rows: Rows) -> None:
        """Raises OutOfBudget, OSError."""
        self._disk.add(BELOW, rows)

    def finish(self, bounds: Int64s, sums: Sums) -> None:
        """Adds to ``sums`` what this part of the keys says must be left in the segments [bounds[i], bounds[i + 1]).

        Raises OutOfBudget, OSError; StoreError where the disk has lost something.
        """
        with self._disk as spool:
            for number in range(spool.ranges):
                self._keys += judge_range(_OfSpool(spool, number), self._table, spool.all_ranges, spool.first + number, bounds, sums)
            self.disk_bytes = max(self.disk_bytes, spool.disk_bytes)
        self._spool = None
        self._part += 1
        if self._part < self._parts:
            self._spool = self._opened()
        else:
            self._table = KeyTable(0, 0)  # its memory is somebody else's now

    def left(self, bounds: Int64s, sums: Sums) -> None:
        """As ``finish``, of the table."""
        self._table.left(bounds, sums)

    def latest(self, hashes: Words) -> Int64s:
        """The last offset of each key, of the table."""
        if self._spilled:
            raise CompactorError("the gate looks up keys that are on the disk", hint="This is a bug; please report it")
        return self._table.latest(hashes)

    def close(self) -> None:
        """Gives the disk back where ``finish`` was not reached."""
        if self._spool is not None:
            self._spool.close()

    def forget(self) -> None:
        """Nobody looks up a key any more."""
        self._table = KeyTable(0, 0)

    @property
    def _disk(self) -> RowSpool:
        if self._spool is None:
            raise CompactorError("the gate asks the disk before it was needed", hint="This is a bug; please report it")
        return self._spool

    def _opened(self) -> RowSpool:
        return self._open(ranges_for(-(-self._rows // self._parts), self._budget), self._part, self._parts)

    def _spill(self) -> None:
        self._rows = max(self._rows, 2 * self._table.keys)
        self._spool = self._opened()
        self._spilled = True
        for rows in self._table.held():
            self._spool.add(DIRTY, rows)


class RowsOfRange(Protocol):
    """The rows of one range, wherever they lie; they can be read again."""

    def rows(self, section: int) -> int:
        """How many."""

    def read(self, section: int) -> Iterator[Rows]: ...


class _OfSpool:
    def __init__(self, spool: RowSpool, number: int) -> None:
        self._spool = spool
        self._number = number

    def rows(self, section: int) -> int:
        return self._spool.rows(section, self._number)

    def read(self, section: int) -> Iterator[Rows]:
        return self._spool.read(section, self._number)


def judge_range(found: RowsOfRange, table: KeyTable, ranges: int, wanted: int, bounds: Int64s, sums: Sums) -> int:
    """Adds to ``sums`` what range ``wanted`` of ``ranges`` says must be left; returns its keys.

    A range whose keys the table does not hold is read again, a part of it each time.
    """
    if ranges > 2**62:
        raise OutOfBudget("more keys than the gate's memory holds share one hash", hint="Raise map_budget_bytes")
    rows, done = found.rows(DIRTY), 0
    table.clear(rows)
    for some in found.read(DIRTY):
        taken = table.put(some, ranges, wanted)
        done += taken
        if taken < len(some):
            pieces = max(2, -(-rows // max(1, done)))
            return sum(judge_range(found, table, ranges * pieces, wanted * pieces + n, bounds, sums) for n in range(pieces))
    table.left(bounds, sums)
    for some in found.read(BELOW):
        table.left_below(some, ranges, wanted, bounds, sums)
    return table.keys


def no_sums(segments: int) -> Sums:
    return np.zeros((segments, 2), np.uint64)
