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

from bloom.siphash import nonzero_32_bit_tag_of_key_hash
from compactor.config.units import format_size
from compactor.errors import OutOfBudget
from compactor.kernels.common import CellOrComplementOfEmptyCell, Hashes, KeyHashHalf, RowCount
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import prefetch, upper_64_bits_of_product
from compactor.profiling import SegmentWorkStage, measure_stage

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
PutResult = int
"""1: the key was absent and is stored; 0: it was there; -1: it was absent and there is no space."""
KeySetState = npt.NDArray[np.int64]


@inline_kernel
def first_cell_to_probe(h1: KeyHashHalf, capacity: int) -> int:
    """Return the cell of a hash table where the search for a key begins: its hash scaled to the capacity."""
    return np.int64(upper_64_bits_of_product(h1, np.uint64(capacity)))  # type: ignore[return-value]


@inline_kernel
def find_key_cell_or_empty_cell_complement(table: HashTable, capacity: int, tag: np.uint32, h1: KeyHashHalf) -> CellOrComplementOfEmptyCell:
    """Return the cell that holds the key, or the bitwise complement of the empty cell where it would be stored.

    :param capacity: number of cells in which a search can begin.
    :param tag: 32 bits of the first half of the key's hash, never 0.
    :param h1: second half of the key's hash, which determines where the search begins.
    """
    low = np.uint32(h1 & np.uint64(0xFFFFFFFF))
    high = np.uint32(h1 >> np.uint64(32))
    cell = first_cell_to_probe(h1, capacity)
    while True:
        found = table[3 * cell]
        if found == 0:
            return ~cell
        if found == tag and table[3 * cell + 1] == low and table[3 * cell + 2] == high:
            return cell
        cell += 1


@inline_kernel
def put_key_if_absent(table: HashTable, state: KeySetState, h0: KeyHashHalf, h1: KeyHashHalf) -> PutResult:
    """Add a key to the set. Return 1 if it was added, 0 if the set has it already, -1 if there is no space for it."""
    tag = nonzero_32_bit_tag_of_key_hash(h0)
    cell = find_key_cell_or_empty_cell_complement(table, state[CAPACITY], tag, h1)
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
def is_key_in_table(table: HashTable, state: KeySetState, h0: KeyHashHalf, h1: KeyHashHalf) -> bool:
    """Return whether the set holds a key."""
    return find_key_cell_or_empty_cell_complement(table, state[CAPACITY], nonzero_32_bit_tag_of_key_hash(h0), h1) >= 0


@kernel
def put_keys_until_full(
    table: HashTable, state: KeySetState, hashes: Hashes, first_row: int, out_first_seen: npt.NDArray[np.bool_]
) -> RowCount:
    """Add keys in order, from row ``first_row`` on, and set ``out_first_seen[row]`` to whether the row's key was absent. Return
    ``len(hashes)``, or the number of the first row for which there is no space.
    """
    rows = len(hashes)
    capacity = state[CAPACITY]
    for row in range(first_row, rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * first_cell_to_probe(hashes[row + AHEAD, 1], capacity))
        answer = put_key_if_absent(table, state, hashes[row, 0], hashes[row, 1])
        if answer < 0:
            return row
        out_first_seen[row] = answer == 1
    return rows


@kernel
def flag_keys_in_table(table: HashTable, state: KeySetState, hashes: Hashes, out_flags: npt.NDArray[np.bool_]) -> None:
    """Set ``out_flags[row]`` to whether the set holds the row's key."""
    rows = len(hashes)
    for row in range(rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * first_cell_to_probe(hashes[row + AHEAD, 1], state[CAPACITY]))
        out_flags[row] = is_key_in_table(table, state, hashes[row, 0], hashes[row, 1])


@kernel
def longest_run_of_filled_cells(table: HashTable, cell_count: int) -> int:
    """Return the number of cells in the longest run of filled cells."""
    longest = 0
    size = 0
    for cell in range(cell_count):
        size = size + 1 if table[3 * cell] != 0 else 0
        longest = max(longest, size)
    return longest


@kernel
def enlarge_table_in_place(table: HashTable, old_capacity: int, new_capacity: int, scratch: HashTable) -> None:
    """Move the entries of the first ``old_capacity`` cells to their places in a table of the larger ``new_capacity``. Runs of filled
    cells are moved from the last to the first. That needs no second table, because the place where the search for a key begins never
    moves towards the start.

    :param scratch: temporary array with as many cells as the longest run of filled cells.
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
            home = first_cell_to_probe(np.uint64(scratch[word + 1]) | (np.uint64(scratch[word + 2]) << np.uint64(32)), new_capacity)
            while table[3 * home] != 0:
                home += 1
            for i in range(3):
                table[3 * home + i] = scratch[word + i]
        cell -= 1


class KeyHashSet:
    """Set of key hashes that takes at most ``budget_bytes`` of memory. One thread may write; several may read while none writes."""

    def __init__(self, budget_bytes: int, *, expected_key_count: int = 0) -> None:
        """Create an empty set.

        :param expected_key_count: number of keys for which the set is sized at first.
        :raises OutOfBudget: if the budget is less than MIN_MAP_BYTES, or the system cannot provide so much memory.
        """
        self._most_homes = budget_bytes // ENTRY_BYTES - SPACE
        if self._most_homes < SMALLEST:
            raise OutOfBudget(f"a map budget of {format_size(budget_bytes)} is too small", hint=f"Give at least {MIN_MAP_BYTES} bytes")
        try:
            self.table: HashTable = np.zeros(3 * (self._most_homes + SPACE), dtype=np.uint32)
        except MemoryError as error:
            raise OutOfBudget(f"this machine cannot give a map of {format_size(budget_bytes)}", hint="Lower map_budget_bytes") from error
        self.state: KeySetState = np.zeros(4, dtype=np.int64)
        self._grow_table_to_capacity(max(SMALLEST, int(expected_key_count / MAX_LOAD) + 1))

    @property
    def key_count(self) -> int:
        """Return the number of keys in the set."""
        return int(self.state[ENTRIES])

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the set in bytes. It is the largest size so far, because a set never shrinks."""
        return int(self.state[CELLS]) * ENTRY_BYTES

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def insert_keys_until_full(self, hashes: Hashes, out_first_seen: npt.NDArray[np.bool_], first_row: int = 0) -> RowCount:
        """Insert key hashes of shape (n, 2) in order, and set ``out_first_seen[row]`` to whether the row's key was absent. Return n, or the
        number of the first row for which the budget has no space; the rows before it are inserted.
        """
        while True:
            first_row = put_keys_until_full(self.table, self.state, hashes, first_row, out_first_seen)
            if first_row == len(hashes) or not self.enlarge_key_set_if_budget_allows():
                return first_row

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def flag_contained_keys(self, hashes: Hashes, out_flags: npt.NDArray[np.bool_]) -> None:
        """Set ``out_flags[row]`` to whether the row's key is in the set."""
        flag_keys_in_table(self.table, self.state, hashes, out_flags)

    def enlarge_key_set_if_budget_allows(self) -> bool:
        """Enlarge the set, so that more keys fit. Return True, or False if the budget is used up. ``table`` stays the same array."""
        capacity = min(int(self.state[CAPACITY] * GROWTH), self._most_homes)
        if capacity <= self.state[CAPACITY]:
            return False
        cells = int(self.state[CELLS])
        enlarge_table_in_place(self.table, cells, capacity, np.empty(3 * longest_run_of_filled_cells(self.table, cells), dtype=np.uint32))
        self._grow_table_to_capacity(capacity)
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

    def _grow_table_to_capacity(self, capacity: int) -> None:
        capacity = min(capacity, self._most_homes)
        self.state[CAPACITY] = capacity
        self.state[LIMIT] = int(capacity * MAX_LOAD)
        self.state[CELLS] = capacity + SPACE


ABSENT = -1


@inline_kernel
def find_key_cell_in_bounded_map(table: Hashes, cell_count: int, h0: KeyHashHalf, h1: KeyHashHalf) -> CellOrComplementOfEmptyCell:
    """Return the cell that holds the key, or the bitwise complement of the empty cell where it would be stored. ``h0`` is not 0."""
    cell = first_cell_to_probe(h1, cell_count)
    while True:
        found = table[3 * cell]
        if found == 0:
            return ~cell
        if found == h0 and table[3 * cell + 1] == h1:
            return cell
        cell = cell + 1 if cell + 1 < cell_count else 0


@inline_kernel
def nonzero_hash_half(h0: KeyHashHalf) -> np.uint64:
    """Return a half of a key hash, with 0 replaced by another value, because 0 marks an empty cell."""
    return h0 if h0 != 0 else np.uint64(1)


@kernel
def put_rows_until_full(table: Hashes, state: KeySetState, hashes: Hashes, offsets: npt.NDArray[np.int64]) -> RowCount:
    """Add keys in ascending order of their offsets, as Kafka's pass 1 does, keeping the latest offset of each key, until the map is full.
    Return the number of rows taken. As in Kafka, the first row that comes when the map is full ends the pass, even if its key is in the
    map.
    """
    cells = state[CELLS]
    for row in range(len(hashes)):
        if state[ENTRIES] >= state[LIMIT]:
            return row
        h0 = nonzero_hash_half(hashes[row, 0])
        cell = find_key_cell_in_bounded_map(table, cells, h0, hashes[row, 1])
        if cell < 0:
            cell = ~cell
            table[3 * cell] = h0
            table[3 * cell + 1] = hashes[row, 1]
            state[ENTRIES] += 1
        table[3 * cell + 2] = np.uint64(offsets[row])
    return len(hashes)


@kernel
def find_latest_offset_of_each_key(table: Hashes, state: KeySetState, hashes: Hashes, out_offsets: npt.NDArray[np.int64]) -> None:
    """Set ``out_offsets[row]`` to the last offset that was put for the row's key, or to ABSENT."""
    cells = state[CELLS]
    rows = len(hashes)
    for row in range(rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * first_cell_to_probe(hashes[row + AHEAD, 1], cells))
        cell = find_key_cell_in_bounded_map(table, cells, nonzero_hash_half(hashes[row, 0]), hashes[row, 1])
        out_offsets[row] = np.int64(table[3 * cell + 2]) if cell >= 0 else ABSENT


class BoundedOffsetMap:
    """Offset map with Kafka's limit (SkimpyOffsetMap): it is full with ``max_keys`` keys. It takes 32 bytes per key."""

    def __init__(self, max_keys: int, *, max_record_count: int) -> None:
        """Create an empty map.

        :param max_record_count: upper bound of the rows that will be put; memory is allocated for no more keys than that.
        :raises OutOfBudget: if the system cannot provide the memory.
        """
        cells = min(max_keys, max_record_count) * 4 // 3 + 2
        try:
            self.table: Hashes = np.zeros(3 * cells, dtype=np.uint64)
        except MemoryError as error:
            raise OutOfBudget(f"this machine cannot give a map of {max_keys} entries", hint="Lower --map-entries") from error
        self.state: KeySetState = np.zeros(4, dtype=np.int64)
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

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def put_rows_until_full(self, hashes: Hashes, offsets: npt.NDArray[np.int64]) -> RowCount:
        """Add rows in ascending order of their offsets until the map is full, and return the number of rows taken. If that is less than
        the number given, no more rows may be added.
        """
        return put_rows_until_full(self.table, self.state, hashes, offsets)

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def find_latest_offset_of_each_key(self, hashes: Hashes, out_offsets: npt.NDArray[np.int64]) -> None:
        """Set ``out_offsets[row]`` to the last offset that was put for the row's key, or to ABSENT."""
        find_latest_offset_of_each_key(self.table, self.state, hashes, out_offsets)
