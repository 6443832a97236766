"""Reads the rows of hash ranges from bundles in the store, with prefetching. Small neighbouring ranges are fetched in one request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from compactor.spark.round.bundles import RowNumberRange
from compactor.storage.port import ObjectStore

PREFETCHED_BUNDLES: Final = 4
"""Number of bundles fetched ahead, because a request takes longer than processing its rows."""

COMBINED_FETCH_BYTES: Final = 64 << 20
"""Neighbouring ranges are fetched together, with one request per bundle, up to this many bytes of rows."""

FirstRowNumbersOfHashRanges = npt.NDArray[np.int64]
FetchedRows = npt.NDArray[Any]
BundleIndexAndRows = tuple[int, FetchedRows]


class StoredHashRangeRows(Protocol):
    """An object in the store that holds the rows of some segments by range of the key's hash, in two sections (0: rows at offsets in the
    dirty range, 1: all other rows).
    """

    @property
    def row_bytes(self) -> int:
        """Return the size of one row in bytes."""

    def read_first_row_numbers_of_hash_ranges(self, store: ObjectStore, first_range: int, end_range: int) -> FirstRowNumbersOfHashRanges:
        """Read the row numbers at which the hash ranges from ``first_range`` to ``end_range`` (exclusive) begin, as an array with a line
        per range and one for the end of the last range. Column 0 is the dirty section, column 1 the clean one.
        """

    def read_stored_rows_by_row_number(self, store: ObjectStore, first_row: int, end_row: int) -> FetchedRows:
        """Read the rows with numbers from ``first_row`` to ``end_row`` (exclusive)."""


@dataclass(frozen=True)
class HashRangeRows:
    """Rows of one hash range from all bundles (each holds the rows of some neighbouring segments).

    directories: for each bundle, the row numbers where the range begins and where it ends in each section.
    prefetched: by (bundle, section): the number of the first fetched row, and the rows, which were fetched together with those of other
        ranges.
    """

    store: ObjectStore
    bundles: Mapping[int, StoredHashRangeRows]
    directories: Mapping[int, FirstRowNumbersOfHashRanges]
    prefetched: Mapping[tuple[int, int], tuple[int, Future[FetchedRows]]]
    pool: ThreadPoolExecutor

    def read_dirty_rows(self, row_ranges: Sequence[RowNumberRange]) -> Iterator[BundleIndexAndRows]:
        """Yield (bundle index, rows) of the dirty section, in the order of ``row_ranges``. A bundle stays in memory from the first of its
        rows to the last.
        """
        row_ranges = [piece for piece in row_ranges if self._has_rows_in_section_of_bundle(piece.place, 0)]
        last = {piece.place: number for number, piece in enumerate(row_ranges)}
        coming = self._fetch_section_rows_of_bundles(list(dict.fromkeys(piece.place for piece in row_ranges)), 0)
        held: dict[int, FetchedRows] = {}
        for number, piece in enumerate(row_ranges):
            if piece.place not in held:
                held.update([next(coming)])
            rows = held[piece.place]
            low, high = np.searchsorted(rows[:, 3], (piece.first, piece.end))
            if low < high:
                yield piece.place, rows[low:high]
            if last[piece.place] == number:
                del held[piece.place]

    def read_rows_of_dirty_or_clean_section(self, bundles: Sequence[int], section: int) -> Iterator[BundleIndexAndRows]:
        """Yield (bundle index, rows) of one section (0: dirty, 1: clean), one bundle after the other."""
        return self._fetch_section_rows_of_bundles(
            [place for place in bundles if self._has_rows_in_section_of_bundle(place, section)], section
        )

    def _has_rows_in_section_of_bundle(self, bundle: int, section: int) -> bool:
        """Return whether the range has rows in this section of the bundle."""
        begin, end = self.directories[bundle][:, section]
        return bool(begin < end)

    def _fetch_section_rows_of_bundles(self, bundles: Sequence[int], section: int) -> Iterator[BundleIndexAndRows]:
        """Yield (bundle index, rows) of one section in the order of ``bundles``, fetching a few bundles ahead."""
        running: deque[tuple[int, Future[FetchedRows]]] = deque()
        for place in bundles:
            begin, end = (int(row) for row in self.directories[place][:, section])
            if (place, section) in self.prefetched:
                first, rows = self.prefetched[place, section]
                yield place, rows.result()[begin - first : end - first]
                continue
            running.append((place, self.pool.submit(self.bundles[place].read_stored_rows_by_row_number, self.store, begin, end)))
            if len(running) > PREFETCHED_BUNDLES:
                at, arrived = running.popleft()
                yield at, arrived.result()
        for at, arrived in running:
            yield at, arrived.result()


def read_hash_ranges(store: ObjectStore, bundles: Mapping[int, StoredHashRangeRows], ranges: range) -> Iterator[tuple[int, HashRangeRows]]:
    """Yield (range number, rows) for neighbouring hash ranges, in order. Raises StoreError if a bundle cannot be fetched, BadData if it
    is damaged.
    """
    with ThreadPoolExecutor(PREFETCHED_BUNDLES) as pool:
        found = pool.map(lambda bundle: bundle.read_first_row_numbers_of_hash_ranges(store, ranges.start, ranges.stop), bundles.values())
        directories = dict(zip(bundles, found, strict=True))
        for some in _group_ranges_for_fetching(ranges, directories, max((bundle.row_bytes for bundle in bundles.values()), default=0)):
            first, last = some.start - ranges.start, some.stop - ranges.start
            prefetched = {}
            if len(some) > 1:
                for place, directory in directories.items():
                    for section in (0, 1):
                        begin, end = int(directory[first, section]), int(directory[last, section])
                        if begin < end:
                            prefetched[place, section] = (
                                begin,
                                pool.submit(bundles[place].read_stored_rows_by_row_number, store, begin, end),
                            )
            for number in some:
                at = number - ranges.start
                yield (
                    number,
                    HashRangeRows(
                        store, bundles, {place: directory[at : at + 2] for place, directory in directories.items()}, prefetched, pool
                    ),
                )


def _group_ranges_for_fetching(ranges: range, directories: Mapping[int, FirstRowNumbersOfHashRanges], row_bytes: int) -> Iterator[range]:
    """Group neighbouring ranges so that each group has at most COMBINED_FETCH_BYTES of rows."""
    rows = sum((np.diff(directory[:, :2], axis=0).sum(axis=1) for directory in directories.values()), np.zeros(len(ranges), np.int64))
    begin, size = ranges.start, 0
    for number, more in zip(ranges, (rows * row_bytes).tolist(), strict=True):
        if number > begin and size + more > COMBINED_FETCH_BYTES:
            yield range(begin, number)
            begin, size = number, 0
        size += more
    if begin < ranges.stop:
        yield range(begin, ranges.stop)
