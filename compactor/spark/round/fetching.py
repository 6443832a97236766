"""The rows of hash ranges, as a range task fetches them from the bundles: a few requests ahead, and small ranges together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from compactor.spark.round.bundles import Neighbours
from compactor.storage.port import ObjectStore

AHEAD: Final = 4
"""Parts of bundles that are fetched while one is looked at: a request takes longer than its rows."""

TOGETHER_BYTES: Final = 64 << 20
"""Neighbouring ranges that have no more rows than this, of all bundles, are fetched together: one request a bundle."""

Directory = npt.NDArray[np.int64]
FetchedRows = npt.NDArray[Any]


class Bundle(Protocol):
    """Rows by range, in two sections, wherever they lie."""

    @property
    def row_bytes(self) -> int: ...

    def directory(self, store: ObjectStore, first: int, last: int) -> Directory:
        """For each of the ranges [first, last) and behind them, in the first two columns: at which row it begins in both sections."""

    def rows(self, store: ObjectStore, begin: int, end: int) -> FetchedRows: ...


@dataclass(frozen=True)
class RangeRows:
    """The rows of one range. ``directories``: by bundle, (dirty row, clean row, ..) where the range begins and where it ends.

    ``here``: by bundle and section, (first row, rows) of what was fetched together with other ranges.
    """

    store: ObjectStore
    bundles: Mapping[int, Bundle]
    directories: Mapping[int, Directory]
    here: Mapping[tuple[int, int], tuple[int, Future[FetchedRows]]]
    pool: ThreadPoolExecutor

    def dirty(self, order: Sequence[Neighbours]) -> Iterator[tuple[int, FetchedRows]]:
        """In the given order; a bundle is held from its first piece to its last."""
        order = [piece for piece in order if self._has(piece.place, 0)]
        last = {piece.place: number for number, piece in enumerate(order)}
        coming = self._fetched(list(dict.fromkeys(piece.place for piece in order)), 0)
        held: dict[int, FetchedRows] = {}
        for number, piece in enumerate(order):
            if piece.place not in held:
                held.update([next(coming)])
            rows = held[piece.place]
            low, high = np.searchsorted(rows[:, 3], (piece.first, piece.end))
            if low < high:
                yield piece.place, rows[low:high]
            if last[piece.place] == number:
                del held[piece.place]

    def section(self, places: Sequence[int], section: int) -> Iterator[tuple[int, FetchedRows]]:
        """In any order: 0 is dirty, 1 is clean."""
        return self._fetched([place for place in places if self._has(place, section)], section)

    def _has(self, place: int, section: int) -> bool:
        begin, end = self.directories[place][:, section]
        return bool(begin < end)

    def _fetched(self, places: Sequence[int], section: int) -> Iterator[tuple[int, FetchedRows]]:
        running: deque[tuple[int, Future[FetchedRows]]] = deque()
        for place in places:
            begin, end = (int(row) for row in self.directories[place][:, section])
            if (place, section) in self.here:
                first, rows = self.here[place, section]
                yield place, rows.result()[begin - first : end - first]
                continue
            running.append((place, self.pool.submit(self.bundles[place].rows, self.store, begin, end)))
            if len(running) > AHEAD:
                at, arrived = running.popleft()
                yield at, arrived.result()
        for at, arrived in running:
            yield at, arrived.result()


def ranges_of(store: ObjectStore, bundles: Mapping[int, Bundle], ranges: range) -> Iterator[tuple[int, RangeRows]]:
    """Neighbouring ranges, one after the other. Raises StoreError, BadData."""
    with ThreadPoolExecutor(AHEAD) as pool:
        found = pool.map(lambda bundle: bundle.directory(store, ranges.start, ranges.stop), bundles.values())
        directories = dict(zip(bundles, found, strict=True))
        for some in _together(ranges, directories, max((bundle.row_bytes for bundle in bundles.values()), default=0)):
            first, last = some.start - ranges.start, some.stop - ranges.start
            here = {}
            if len(some) > 1:
                for place, directory in directories.items():
                    for section in (0, 1):
                        begin, end = int(directory[first, section]), int(directory[last, section])
                        if begin < end:
                            here[place, section] = (begin, pool.submit(bundles[place].rows, store, begin, end))
            for number in some:
                at = number - ranges.start
                yield number, RangeRows(store, bundles, {place: each[at : at + 2] for place, each in directories.items()}, here, pool)


def _together(ranges: range, directories: Mapping[int, Directory], row_bytes: int) -> Iterator[range]:
    rows = sum((np.diff(directory[:, :2], axis=0).sum(axis=1) for directory in directories.values()), np.zeros(len(ranges), np.int64))
    begin, size = ranges.start, 0
    for number, more in zip(ranges, (rows * row_bytes).tolist(), strict=True):
        if number > begin and size + more > TOGETHER_BYTES:
            yield range(begin, number)
            begin, size = number, 0
        size += more
    if begin < ranges.stop:
        yield range(begin, ranges.stop)
