"""The offset map in memory, in two shapes: a set of keys for the scan backwards, Kafka's bounded table for ``--map-entries``.

Scanned backwards, the first record seen of a key is the one that survives, so no offset need be stored: a set is enough. A key is 96 bits
(bloom.siphash), so 12 bytes an entry, filled between 0.61 and 0.8: at most 20 bytes a key however far the set has grown.

The set grows *in place*. An entry's home is its hash scaled to the capacity, so entries lie in the order of their hashes but for small
displacements, and a larger capacity only stretches that order: from the end to the front, every cluster moves to the right of all that is
still to be moved. There is never a second table. The whole budget is asked for at once, but the system gives memory on first touch.

The kernels take plain arrays, so that other kernels can call them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bloom.siphash import key_hash_tag
from compactor.config.units import format_size
from compactor.errors import OutOfBudget
from compactor.kernels.common import Hashes
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import high_word_of_product, prefetch
from compactor.profiling import WorkStage, measure_stage

CAPACITY, ENTRIES, LIMIT, CELLS = range(4)
"""What the numbers in a set's ``state`` array are: homes, keys held, keys that may be held, cells (homes and room behind the last one)."""

ENTRY_BYTES = 12
MAX_LOAD = 0.8
GROWTH = 1.31
"""Load after growing: 0.8 / 1.31 = 0.61, so 19.7 bytes a key; in all its life a key is moved three times, at about 10 ns."""

SPACE = 64
"""Cells behind the last home. The last one always stays empty, so that every search ends without a test for the end."""

SMALLEST = 256
MIN_MAP_BYTES = (SMALLEST + SPACE) * ENTRY_BYTES
AHEAD = 24
"""Rows between asking for a cache line and using it."""

HashTable = npt.NDArray[np.uint32]
State = npt.NDArray[np.int64]


@inline_kernel
def home_cell(h1: np.uint64, capacity: int) -> int:
    """Return the cell of a hash table where the search for a key begins: its hash scaled to the capacity."""
    return np.int64(high_word_of_product(h1, np.uint64(capacity)))  # type: ignore[return-value]


@inline_kernel
def find_cell(table: HashTable, capacity: int, tag: np.uint32, h1: np.uint64) -> int:
    """Return the cell that holds the key, or the bitwise complement of the empty cell where it would be stored."""
    low = np.uint32(h1 & np.uint64(0xFFFFFFFF))
    high = np.uint32(h1 >> np.uint64(32))
    cell = home_cell(h1, capacity)
    while True:
        found = table[3 * cell]
        if found == 0:
            return ~cell
        if found == tag and table[3 * cell + 1] == low and table[3 * cell + 2] == high:
            return cell
        cell += 1


@inline_kernel
def put_key_if_absent(table: HashTable, state: State, h0: np.uint64, h1: np.uint64) -> int:
    """Add a key to a set. Return 1 if it was absent, 0 if it was there, -1 if it was absent and there is no space."""
    tag = key_hash_tag(h0)
    cell = find_cell(table, state[CAPACITY], tag, h1)
    if cell >= 0:
        return 0
    cell = ~cell
    if state[ENTRIES] >= state[LIMIT] or cell >= state[CELLS] - 1:
        return -1
    table[3 * cell] = tag
    table[3 * cell + 1] = np.uint32(h1 & np.uint64(0xFFFFFFFF))
    table[3 * cell + 2] = np.uint32(h1 >> np.uint64(32))
    state[ENTRIES] += 1
    return 1


@inline_kernel
def holds_key(table: HashTable, state: State, h0: np.uint64, h1: np.uint64) -> bool:
    """Return whether the set holds a key."""
    return find_cell(table, state[CAPACITY], key_hash_tag(h0), h1) >= 0


@kernel
def put_absent_keys(table: HashTable, state: State, hashes: Hashes, first_row: int, out_first_seen: npt.NDArray[np.bool_]) -> int:
    """Add keys in order, from row ``first_row`` on, and set ``out_first_seen`` where the key was absent. Return the number of rows, or the
    first row for which there is no space.
    """
    rows = len(hashes)
    capacity = state[CAPACITY]
    for row in range(first_row, rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * home_cell(hashes[row + AHEAD, 1], capacity))
        answer = put_key_if_absent(table, state, hashes[row, 0], hashes[row, 1])
        if answer < 0:
            return row
        out_first_seen[row] = answer == 1
    return rows


@kernel
def flag_held_keys(table: HashTable, state: State, hashes: Hashes, out_flags: npt.NDArray[np.bool_]) -> None:
    """Set ``out_flags[row]`` to whether the set holds the row's key."""
    rows = len(hashes)
    for row in range(rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * home_cell(hashes[row + AHEAD, 1], state[CAPACITY]))
        out_flags[row] = holds_key(table, state, hashes[row, 0], hashes[row, 1])


@kernel
def longest_cluster_cells(table: HashTable, cell_count: int) -> int:
    """Return the number of cells in the longest run of filled cells."""
    longest = 0
    size = 0
    for cell in range(cell_count):
        size = size + 1 if table[3 * cell] != 0 else 0
        longest = max(longest, size)
    return longest


@kernel
def spread_table_to_capacity(table: HashTable, old_capacity: int, new_capacity: int, scratch: HashTable) -> None:
    """Move the entries of the first ``old_capacity`` cells to their places in a table of the larger ``new_capacity``.

    ``scratch`` must have the size of the longest cluster. An entry's new home is at or after its old one, hence after every entry that is
    still to be moved. No entry is further after the last home than before, so SPACE is enough again.
    """
    cell = old_capacity - 1
    while cell >= 0:
        # Plain loops over words: slices cost more than the handful of entries that a cluster has.
        words = 0
        while cell >= 0 and table[3 * cell] != 0:
            for i in range(3):
                scratch[words + i] = table[3 * cell + i]
                table[3 * cell + i] = 0
            words += 3
            cell -= 1
        for word in range(0, words, 3):
            home = home_cell(np.uint64(scratch[word + 1]) | (np.uint64(scratch[word + 2]) << np.uint64(32)), new_capacity)
            while table[3 * home] != 0:
                home += 1
            for i in range(3):
                table[3 * home + i] = scratch[word + i]
        cell -= 1


class KeySet:
    """A set of key hashes that takes at most ``budget_bytes``. One thread may write; any number may read while none writes."""

    def __init__(self, budget_bytes: int, *, expected_keys: int = 0) -> None:
        """Create an empty set.

        :param expected_keys: number of keys for which memory is allocated at once.
        :raises OutOfBudget: if the budget is less than LEAST_BYTES, or more memory than the system gives.
        """
        self._most_homes = budget_bytes // ENTRY_BYTES - SPACE
        if self._most_homes < SMALLEST:
            raise OutOfBudget(f"a map budget of {format_size(budget_bytes)} is too small", hint=f"Give at least {MIN_MAP_BYTES} bytes")
        try:
            self.table: HashTable = np.zeros(3 * (self._most_homes + SPACE), dtype=np.uint32)
        except MemoryError as error:
            raise OutOfBudget(f"this machine cannot give a map of {format_size(budget_bytes)}", hint="Lower map_budget_bytes") from error
        self.state: State = np.zeros(4, dtype=np.int64)
        self._resize(max(SMALLEST, int(expected_keys / MAX_LOAD) + 1))

    @property
    def key_count(self) -> int:
        """Return the number of keys in the set."""
        return int(self.state[ENTRIES])

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the set in bytes. It is the largest size so far, because a set never shrinks."""
        return int(self.state[CELLS]) * ENTRY_BYTES

    @measure_stage(WorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def insert_if_absent(self, hashes: Hashes, out_first_seen: npt.NDArray[np.bool_], first_row: int = 0) -> int:
        """Insert key hashes of shape (n, 2) in order, and set ``out_first_seen[row]`` where the key was absent. Return n, or the number of
        the first row for which the budget has no space; the rows before it are inserted.
        """
        while True:
            first_row = put_absent_keys(self.table, self.state, hashes, first_row, out_first_seen)
            if first_row == len(hashes) or not self.grow_within_budget():
                return first_row

    @measure_stage(WorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def flag_contained_keys(self, hashes: Hashes, out_flags: npt.NDArray[np.bool_]) -> None:
        """Set ``out_flags[row]`` to True where the row's key is in the set."""
        flag_held_keys(self.table, self.state, hashes, out_flags)

    def grow_within_budget(self) -> bool:
        """Enlarge the set, so that more keys fit. Return False if the budget is used up. ``table`` stays the same array."""
        capacity = min(int(self.state[CAPACITY] * GROWTH), self._most_homes)
        if capacity <= self.state[CAPACITY]:
            return False
        cells = int(self.state[CELLS])
        spread_table_to_capacity(self.table, cells, capacity, np.empty(3 * longest_cluster_cells(self.table, cells), dtype=np.uint32))
        self._resize(capacity)
        return True

    def iterate_key_hashes(self, max_rows: int = 1 << 16) -> Iterator[Hashes]:
        """Yield all keys as hashes of shape (n, 2), in chunks of ``max_rows`` rows.

        Hash bits that neither sets nor Bloom filters use are zero.
        """
        cells = self.table[: 3 * int(self.state[CELLS])].reshape(-1, 3)
        for begin in range(0, len(cells), max_rows):
            chunk = cells[begin : begin + max_rows].astype(np.uint64)
            chunk = chunk[chunk[:, 0] != 0]
            yield np.column_stack([chunk[:, 0], chunk[:, 1] | (chunk[:, 2] << np.uint64(32))])

    def _resize(self, capacity: int) -> None:
        capacity = min(capacity, self._most_homes)
        self.state[CAPACITY] = capacity
        self.state[LIMIT] = int(capacity * MAX_LOAD)
        self.state[CELLS] = capacity + SPACE


ABSENT = -1


@inline_kernel
def find_bounded_cell(table: Hashes, cell_count: int, h0: np.uint64, h1: np.uint64) -> int:
    """Return the cell that holds the key, or the bitwise complement of the empty cell where it would be stored. ``h0`` is not 0."""
    cell = home_cell(h1, cell_count)
    while True:
        found = table[3 * cell]
        if found == 0:
            return ~cell
        if found == h0 and table[3 * cell + 1] == h1:
            return cell
        cell = cell + 1 if cell + 1 < cell_count else 0


@inline_kernel
def replace_zero_hash(h0: np.uint64) -> np.uint64:
    """Return a half of a key hash, with 0 replaced by another value, because 0 marks an empty cell."""
    return h0 if h0 != 0 else np.uint64(1)


@kernel
def put_rows_until_full(table: Hashes, state: State, hashes: Hashes, offsets: npt.NDArray[np.int64]) -> int:
    """Add keys in ascending order of their offsets, as Kafka's pass 1 does, keeping the latest offset of each key, until the map is full.
    Return the number of rows taken. As in Kafka, the first row after the table is full ends the pass, even if its key is in the table.
    """
    cells = state[CELLS]
    for row in range(len(hashes)):
        if state[ENTRIES] >= state[LIMIT]:
            return row
        h0 = replace_zero_hash(hashes[row, 0])
        cell = find_bounded_cell(table, cells, h0, hashes[row, 1])
        if cell < 0:
            cell = ~cell
            table[3 * cell] = h0
            table[3 * cell + 1] = hashes[row, 1]
            state[ENTRIES] += 1
        table[3 * cell + 2] = np.uint64(offsets[row])
    return len(hashes)


@kernel
def find_latest_offsets(table: Hashes, state: State, hashes: Hashes, out_offsets: npt.NDArray[np.int64]) -> None:
    """Set ``out_offsets[row]`` to the last offset that was put for the row's key, or to ABSENT."""
    cells = state[CELLS]
    rows = len(hashes)
    for row in range(rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * home_cell(hashes[row + AHEAD, 1], cells))
        cell = find_bounded_cell(table, cells, replace_zero_hash(hashes[row, 0]), hashes[row, 1])
        out_offsets[row] = np.int64(table[3 * cell + 2]) if cell >= 0 else ABSENT


class BoundedOffsetMap:
    """Kafka's offset map with space for ``max_keys`` keys (SkimpyOffsetMap: floor(slots * load factor)). It takes 32 bytes per key."""

    def __init__(self, max_keys: int, *, max_rows: int) -> None:
        """Create an empty map. ``max_rows``: upper bound of the rows that will be put, which limits the memory. Raises OutOfBudget."""
        cells = min(max_keys, max_rows) * 4 // 3 + 2
        try:
            self.table: Hashes = np.zeros(3 * cells, dtype=np.uint64)
        except MemoryError as error:
            raise OutOfBudget(f"this machine cannot give a map of {max_keys} entries", hint="Lower --map-entries") from error
        self.state: State = np.zeros(4, dtype=np.int64)
        self.state[[CAPACITY, CELLS]] = cells
        self.state[LIMIT] = max_keys

    @property
    def key_count(self) -> int:
        """Return the number of keys in the map."""
        return int(self.state[ENTRIES])

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the map in bytes."""
        return self.table.nbytes

    @measure_stage(WorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def put_rows_until_full(self, hashes: Hashes, offsets: npt.NDArray[np.int64]) -> int:
        """Add rows in ascending order of their offsets until the map is full, and return the number of rows taken. If it is less than the
        number given, the pass is over.
        """
        return put_rows_until_full(self.table, self.state, hashes, offsets)

    @measure_stage(WorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def find_latest_offsets(self, hashes: Hashes, out_offsets: npt.NDArray[np.int64]) -> None:
        """Set ``out_offsets[row]`` to the last offset that was put for the row's key, or to ABSENT."""
        find_latest_offsets(self.table, self.state, hashes, out_offsets)
