"""Pass 1: which records have a later record of the same key in the mapped range?

``find_survivors_backwards``: the first record seen of a key survives, so a set of key hashes is enough, and the answer for the dirty range
is a bitmap. ``find_bounded_survivors``: Kafka's own ascending map that stops when it
holds N keys (kafka-rules 2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bloom.filter import key_hash_tag, siphash128, siphash_key_halves
from compactor.cleaner.retention import (
    BatchRetentionDecisions,
    CleanedChunkCache,
    RetentionRules,
    TransactionVerdicts,
    clean_batches_of_chunk,
    decide_by_headers,
)
from compactor.cleaner.source import KeyTableRowsAndBatchCount, SecondReader, SourceSegment
from compactor.cleaner.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.config.units import format_size
from compactor.errors import OutOfBudget
from compactor.kernels.common import FirstRowByBatch, Flags, Hashes, HashKeyHalf, KeyHashHalf
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import high_product_word, prefetch
from compactor.model.plan import KeylessRecords
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.batches import NOT_CONTROL, Bytes, Int64s
from compactor.records.encode import FILTER
from compactor.records.rows import BatchChunk, Int32s, RecordRows, parse_records

# The offset map in memory, in two shapes: a set of keys for the scan backwards, Kafka's bounded table for ``--map-entries``.
#
# Scanned backwards, the first record seen of a key is the one that survives, so no offset need be stored: a set is enough. A key is 96 bits
# (bloom.filter), so 12 bytes an entry, filled between 0.61 and 0.8: at most 20 bytes a key however far the set has grown.
#
# The set grows *in place*. An entry's home is its hash scaled to the capacity, so entries lie in the order of their hashes but for small
# displacements, and a larger capacity only stretches that order: from the end to the front, every cluster moves to the right of all that is
# still to be moved. There is never a second table. The whole budget is asked for at once, but the system gives memory on first touch.
#
# The kernels take plain arrays, so that other kernels can call them.


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
KeySetState = npt.NDArray[np.int64]


@inline_kernel
def first_cell_to_probe(h1: KeyHashHalf, capacity: int) -> int:
    """A key's home: its hash scaled to the capacity."""
    return np.int64(high_product_word(h1, np.uint64(capacity)))


@inline_kernel
def find_key_cell(table: HashTable, capacity: int, tag: np.uint32, h1: KeyHashHalf) -> int:
    """The key's cell, or the bitwise complement of the empty one where it would be stored.
    :param capacity: number of homes.
    :param tag: 32 bits of the first half of the hash, never 0.
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
def put_key_if_absent(table: HashTable, state: KeySetState, h0: KeyHashHalf, h1: KeyHashHalf) -> int:
    """1 if the key was added, 0 if it was there, -1 if there is no space."""
    tag = key_hash_tag(h0)
    cell = find_key_cell(table, state[CAPACITY], tag, h1)
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
    return find_key_cell(table, state[CAPACITY], key_hash_tag(h0), h1) >= 0


@kernel
def put_keys_until_full(table: HashTable, state: KeySetState, hashes: Hashes, first_row: int, out_first_seen: npt.NDArray[np.bool_]) -> int:
    """Set ``out_first_seen`` where a key was absent. Return ``len(hashes)``, or the first row for which there is
    no space.
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
    rows = len(hashes)
    for row in range(rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * first_cell_to_probe(hashes[row + AHEAD, 1], state[CAPACITY]))
        out_flags[row] = is_key_in_table(table, state, hashes[row, 0], hashes[row, 1])


@kernel
def longest_filled_run(table: HashTable, cell_count: int) -> int:
    longest = 0
    size = 0
    for cell in range(cell_count):
        size = size + 1 if table[3 * cell] != 0 else 0
        longest = max(longest, size)
    return longest


@kernel
def enlarge_table_in_place(table: HashTable, old_capacity: int, new_capacity: int, scratch: HashTable) -> None:
    """The last run of filled cells moves first: a home never moves towards the start.
    :param scratch: as many cells as the longest run of filled cells.
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
        """:raises OutOfBudget: if the budget is less than MIN_MAP_BYTES, or memory is short."""
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
        return int(self.state[ENTRIES])

    @property
    def peak_bytes(self) -> int:
        """The set never shrinks."""
        return int(self.state[CELLS]) * ENTRY_BYTES

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def insert_keys_until_full(self, hashes: Hashes, out_first_seen: npt.NDArray[np.bool_], first_row: int = 0) -> int:
        """Set ``out_first_seen`` where a key was absent; hashes have shape (n, 2). Return n, or the first row for which the budget has no
        space.
        """
        while True:
            first_row = put_keys_until_full(self.table, self.state, hashes, first_row, out_first_seen)
            if first_row == len(hashes) or not self.enlarge():
                return first_row

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def flag_contained_keys(self, hashes: Hashes, out_flags: npt.NDArray[np.bool_]) -> None:
        flag_keys_in_table(self.table, self.state, hashes, out_flags)

    def enlarge(self) -> bool:
        """Return False if the budget is used up. ``table`` stays the same array."""
        capacity = min(int(self.state[CAPACITY] * GROWTH), self._most_homes)
        if capacity <= self.state[CAPACITY]:
            return False
        cells = int(self.state[CELLS])
        enlarge_table_in_place(self.table, cells, capacity, np.empty(3 * longest_filled_run(self.table, cells), dtype=np.uint32))
        self._grow_table_to_capacity(capacity)
        return True

    def iterate_key_hashes(self, max_rows: int = 1 << 16) -> Iterator[Hashes]:
        """Chunks have shape (n, 2). Bits that neither sets nor Bloom filters use are zero."""
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
def find_bounded_cell(table: Hashes, cell_count: int, h0: KeyHashHalf, h1: KeyHashHalf) -> int:
    """Like ``find_key_cell``; ``h0`` is not 0."""
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
    return h0 if h0 != 0 else np.uint64(1)


@kernel
def put_rows_until_full(table: Hashes, state: KeySetState, hashes: Hashes, offsets: npt.NDArray[np.int64]) -> int:
    """Add keys in ascending order of offsets. Return the number of rows taken. As in Kafka, the first row that comes when the map is full
    ends the pass, even if its key is in the map.
    """
    cells = state[CELLS]
    for row in range(len(hashes)):
        if state[ENTRIES] >= state[LIMIT]:
            return row
        h0 = nonzero_hash_half(hashes[row, 0])
        cell = find_bounded_cell(table, cells, h0, hashes[row, 1])
        if cell < 0:
            cell = ~cell
            table[3 * cell] = h0
            table[3 * cell + 1] = hashes[row, 1]
            state[ENTRIES] += 1
        table[3 * cell + 2] = np.uint64(offsets[row])
    return len(hashes)


@kernel
def find_latest_offsets(table: Hashes, state: KeySetState, hashes: Hashes, out_offsets: npt.NDArray[np.int64]) -> None:
    """Absent keys get ABSENT."""
    cells = state[CELLS]
    rows = len(hashes)
    for row in range(rows):
        if row + AHEAD < rows:
            prefetch(table, 3 * first_cell_to_probe(hashes[row + AHEAD, 1], cells))
        cell = find_bounded_cell(table, cells, nonzero_hash_half(hashes[row, 0]), hashes[row, 1])
        out_offsets[row] = np.int64(table[3 * cell + 2]) if cell >= 0 else ABSENT


class BoundedOffsetMap:
    """Offset map with Kafka's limit (SkimpyOffsetMap), 32 bytes a key."""

    def __init__(self, max_keys: int, *, max_record_count: int) -> None:
        """:param max_record_count: upper bound.
        :raises OutOfBudget: if memory is short.
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
        return int(self.state[ENTRIES])

    @property
    def peak_bytes(self) -> int:
        return self.table.nbytes

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def put_rows_until_full(self, hashes: Hashes, offsets: npt.NDArray[np.int64]) -> int:
        """Offsets ascend. The map is full if fewer rows are taken than given."""
        return put_rows_until_full(self.table, self.state, hashes, offsets)

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, *_: hashes.nbytes)
    def find_latest_offsets(self, hashes: Hashes, out_offsets: npt.NDArray[np.int64]) -> None:
        find_latest_offsets(self.table, self.state, hashes, out_offsets)


_END = 2**63 - 1
FlagsAndWhetherTheyAreFinal = tuple[Flags, bool]
"""A flag per row, and whether no later part of the scan can change the flags."""
HashesAndRowNumbers = tuple[Hashes, Int64s]
"""Key hashes, and for each of them the number of its row."""


@dataclass(frozen=True, slots=True)
class SurvivorCountsByBatch:
    """Survivors of each batch of a segment.
    kept: their number, -1 if unknown.
    tombstones: whether some of them are tombstones.
    keyless: records without a key in the dirty range; ``kept`` counts them only if the rules keep them.
    """

    kept: Int32s
    tombstones: Flags
    keyless: Int32s


class SurvivorLookup(Protocol):
    @property
    def last_mapped_offset(self) -> int:
        """Records after this offset stay."""

    @property
    def key_count(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCountsByBatch | None:
        """Counts are -1 where records must be read; None if no count is known."""

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch) -> Flags:
        """Flag the rows whose key a later record within the mapped offsets has."""


@dataclass(frozen=True, slots=True)
class KeyScanParameters:
    """Parameters of pass 1, for the offsets [first_dirty, end).
    rules: if given, the backward scan cleans compressed chunks with known survivors at once, into ``finished``.
    """

    sources: Sequence[SourceSegment]
    verdicts: Sequence[TransactionVerdicts]
    first_dirty: int
    end: int
    hash_key: bytes
    inflate_limit: int
    finished: CleanedChunkCache
    rules: RetentionRules | None = None
    second_reader: SecondReader | None = None

    def dirty_segments(self) -> list[tuple[SourceSegment, Flags]]:
        dirty = [source for source in self.sources if source.end > self.first_dirty and source.base < self.end]
        return [(source, self.flag_dirty_batches(source)) for source in dirty]

    def flag_dirty_batches(self, source: SourceSegment) -> Flags:
        table = source.table
        return (table.control == NOT_CONTROL) & ~self.verdicts[source.ordinal].aborted & (table.last_offset >= self.first_dirty)

    def flag_clean_batches(self, source: SourceSegment) -> Flags:
        """Batches that may have records below the dirty range."""
        table = source.table
        return (table.control == NOT_CONTROL) & ~self.verdicts[source.ordinal].aborted & (table.base_offset < self.first_dirty)

    def hash_batch_range(
        self,
        buffers: ReusableJobBuffers,
        source: SourceSegment,
        first_batch: int,
        end_batch: int,
        wanted_batch_flags: Flags,
        *,
        is_backwards: bool,
        hashes_rows_below_dirty_range: bool = False,
    ) -> list[HashedChunkKeys]:
        """Hash the keys of the batches [first_batch, end_batch) into the thread's buffers; ``is_backwards``: chunks and rows descend.
        :param hashes_rows_below_dirty_range: instead of the rows that may enter the map.
        """
        low, high = (-1, self.first_dirty) if hashes_rows_below_dirty_range else (self.first_dirty, _END)
        found = []
        for chunk in source.read_chunks(
            first_batch, end_batch, wanted_batch_flags, self.inflate_limit, buffers.bodies, is_backwards=is_backwards
        ):
            rows, first_row = parse_records(source.table, chunk, buffers.rows, source.name)
            hashes, picked = _hash_keys_of_chunk(buffers, chunk, rows, low, high, self.hash_key, is_backwards)
            shown = self.second_reader is not None and is_backwards and not hashes_rows_below_dirty_range
            second_reader_rows = (
                self.second_reader.extract_key_rows(buffers, source, chunk) if self.second_reader is not None and shown else None
            )
            piece = HashedChunkKeys(
                chunk, first_row, hashes, picked, rows.offset, rows.key_length, rows.value_length, rows, second_reader_rows
            )
            found.append(piece if chunk.last - chunk.first == end_batch - first_batch else piece.copy_from_buffers())
        return found


@dataclass(frozen=True, slots=True)
class HashedChunkKeys:
    """Key hashes of a chunk, shape (n, 2).
    rows: None if the batches came in several chunks, because the next one overwrites these columns.
    """

    chunk: BatchChunk
    first_row: FirstRowByBatch
    hashes: Hashes
    picked: Int64s
    offset: Int64s
    key_length: Int32s
    value_length: Int32s
    rows: RecordRows | None
    second_reader_rows: KeyTableRowsAndBatchCount | None

    def copy_from_buffers(self) -> HashedChunkKeys:
        return replace(
            self,
            hashes=self.hashes.copy(),
            picked=self.picked.copy(),
            offset=self.offset.copy(),
            key_length=self.key_length.copy(),
            value_length=self.value_length.copy(),
            rows=None,
        )


class SegmentSurvivorBitmap:
    """Survivors of one dirty segment, with the position of each batch's first bit, or -1."""

    def __init__(self, batch_count: int) -> None:
        self.begin = np.full(batch_count, -1, np.int64)
        self.kept = np.full(batch_count, -1, np.int32)
        self.tombstones = np.zeros(batch_count, np.bool_)
        self.keyless = np.zeros(batch_count, np.int32)
        self.keyless_records = KeylessRecords()
        """Of the segment's records in the dirty range, those without a key."""
        self._parts: list[npt.NDArray[np.uint8]] = []
        self._size = 0
        self.packed: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        """The bits of all chunks, complete after ``finish``."""

    @measure_stage(SegmentWorkStage.DECIDE)
    def add_survivors_of_chunk(
        self,
        hashed: HashedChunkKeys,
        survives_flags: Flags,
        first_dirty_offset: int,
        source: SourceSegment,
        *,
        are_flags_final: bool,
        drops_keyless: bool = True,
    ) -> None:
        """:param are_flags_final: whether the flags will not change."""
        chunk, first_row = hashed.chunk, hashed.first_row
        some = slice(chunk.first, chunk.last)
        self.begin[some] = np.where(chunk.wanted, 8 * self._size + first_row[:-1], -1)
        # Only where the map speaks for every record of the batch; legacy batches are always written anew.
        whole = chunk.wanted & (source.table.base_offset[some] >= first_dirty_offset) & (source.table.magic[some] == 2) & are_flags_final
        _count_survivors_by_batch(
            first_row,
            survives_flags,
            hashed.offset,
            hashed.key_length,
            hashed.value_length,
            whole,
            first_dirty_offset,
            drops_keyless,
            self.kept[some],
            self.tombstones[some],
            self.keyless[some],
        )
        self.keyless_records = self.keyless_records.plus(
            count_keyless_rows(hashed.offset, hashed.key_length, first_dirty_offset, int(self.keyless[some].sum()))
        )
        self._parts.append(np.packbits(survives_flags))
        self._size += len(self._parts[-1])

    def join_chunks(self) -> None:
        if self._parts:
            self.packed = np.concatenate(self._parts)
        self._parts = []

    @measure_stage(SegmentWorkStage.DECIDE)
    def flag_chunk_superseded(self, chunk: BatchChunk, first_row: FirstRowByBatch) -> Flags:
        out = np.zeros(int(first_row[-1]), np.bool_)
        _unpack_superseded_flags(self.packed, self.begin[chunk.first : chunk.last], first_row, out)
        return out


@dataclass(frozen=True, slots=True)
class _SegmentScanState:
    """Scan of one segment; ``decisions`` is None if no chunk may be cleaned during the scan."""

    source: SourceSegment
    bits: SegmentSurvivorBitmap
    decisions: BatchRetentionDecisions | None


@dataclass(frozen=True, slots=True)
class _BatchRangeToHash:
    scanned: _SegmentScanState
    first: int
    last: int
    wanted: Flags


ChunkWithKnownSurvivors = tuple[_SegmentScanState, HashedChunkKeys, Flags]
"""Scan of a segment, one of its chunks, and a flag per row of the chunk: whether the record survives."""


class BackwardSurvivorScan:
    """Scan of a log from its end: an earlier record survives if the key set does not have its key."""

    def __init__(self, key_scan: KeyScanParameters, key_set: KeyHashSet) -> None:
        self._scan = key_scan
        self._set = key_set
        self._bits: dict[int, SegmentSurvivorBitmap] = {}

    @property
    def last_mapped_offset(self) -> int:
        return self._scan.end - 1

    @property
    def key_count(self) -> int:
        return self._set.key_count

    @property
    def peak_bytes(self) -> int:
        return self._set.peak_bytes

    def scan_dirty_segment_keys(
        self, source: SourceSegment, wanted_batch_flags: Flags, workers: WorkerThreads, *, cleans_chunks_while_reading: bool = True
    ) -> None:
        """Segments are passed in descending order. Raises BadData; OutOfBudget if the set is full."""
        self.scan_dirty_segments([(source, wanted_batch_flags)], workers, cleans_chunks_while_reading=cleans_chunks_while_reading)

    def scan_dirty_segments(
        self,
        segments_and_wanted_batches: Iterable[tuple[SourceSegment, Flags]],
        workers: WorkerThreads,
        *,
        cleans_chunks_while_reading: bool = True,
    ) -> None:
        """Segments come in descending order; workers begin the next one while the last chunks of one are processed."""
        key_scan = self._scan
        begun: list[_SegmentScanState] = []

        def batch_ranges_to_hash() -> Iterator[_BatchRangeToHash]:
            for source, wanted in segments_and_wanted_batches:
                begun.append(self._prepare_segment_scan(source, cleans_chunks_while_reading))
                for first, last in reversed(source.split_by_kind()):
                    if wanted[first:last].any():
                        yield _BatchRangeToHash(begun[-1], first, last, wanted[first:last])

        def hash_range(buffers: ReusableJobBuffers, range_to_hash: _BatchRangeToHash) -> tuple[_SegmentScanState, list[HashedChunkKeys]]:
            return range_to_hash.scanned, key_scan.hash_batch_range(
                buffers, range_to_hash.scanned.source, range_to_hash.first, range_to_hash.last, range_to_hash.wanted, is_backwards=True
            )

        def mark_survivors_of_range(
            scan_state_and_hashed_chunks: tuple[_SegmentScanState, list[HashedChunkKeys]],
        ) -> ChunkWithKnownSurvivors | None:
            scanned, pieces = scan_state_and_hashed_chunks
            marked = [(piece, *self._flag_newest_rows(piece)) for piece in pieces]
            for piece in pieces:
                if key_scan.second_reader is not None and piece.second_reader_rows is not None:
                    key_scan.second_reader.add_key_rows(scanned.source, piece.second_reader_rows)
            for piece, survives, final in marked:
                scanned.bits.add_survivors_of_chunk(
                    piece,
                    survives,
                    key_scan.first_dirty,
                    scanned.source,
                    are_flags_final=final,
                    drops_keyless=key_scan.rules is None or key_scan.rules.drops_keyless,
                )
            return (scanned, *marked[0][:2]) if len(marked) == 1 and marked[0][2] else None

        for _ in workers.run_ordered_jobs(hash_range, mark_survivors_of_range, self._clean_known_chunk, batch_ranges_to_hash()):
            pass
        for scanned in begun:
            scanned.bits.join_chunks()

    def _prepare_segment_scan(self, source: SourceSegment, cleans_chunks_while_reading: bool) -> _SegmentScanState:
        key_scan = self._scan
        if key_scan.second_reader is not None:
            key_scan.second_reader.begin_segment(source)
        bits = self._bits.setdefault(source.ordinal, SegmentSurvivorBitmap(len(source.table)))
        decisions = (
            decide_by_headers(source.table, key_scan.verdicts[source.ordinal], key_scan.rules, source.name)
            if key_scan.rules and cleans_chunks_while_reading
            else None
        )
        return _SegmentScanState(source, bits, decisions)

    def _clean_known_chunk(self, buffers: ReusableJobBuffers, decided: ChunkWithKnownSurvivors | None) -> None:
        """Clean a chunk while it is decompressed, unless its survivors are not known yet."""
        key_scan = self._scan
        if decided is None or key_scan.rules is None or decided[0].decisions is None or not key_scan.finished.has_cache_space_left:
            return
        scanned, piece, survives = decided
        source, decisions, chunk, rows = scanned.source, decided[0].decisions, piece.chunk, piece.rows
        some = slice(chunk.first, chunk.last)
        if rows is None or not source.table.codec_ids[some].any() or np.any(source.table.control[some] != NOT_CONTROL):
            return
        if np.any((decisions.action[some] == FILTER) != chunk.wanted):
            return
        if rows.offset.min(initial=key_scan.end) < key_scan.first_dirty:
            return  # older records are looked up when all keys are known
        clean = clean_batches_of_chunk(
            buffers, source, chunk, rows, piece.first_row, ~survives, decisions.decisions_of_batch_slice(some), key_scan.rules
        )
        key_scan.finished.store_chunk_within_budget(source, chunk, clean)

    def _flag_newest_rows(self, hashed: HashedChunkKeys) -> FlagsAndWhetherTheyAreFinal:
        """The second result tells whether the flags are final."""
        seen = np.empty(len(hashed.hashes), np.bool_)
        if self._set.insert_keys_until_full(hashed.hashes, seen) < len(seen):
            raise OutOfBudget(
                f"the offset map is full at {self._set.key_count} keys ({format_size(self._set.peak_bytes)})",
                hint='Raise map_budget_bytes, or let map_engine = "auto" choose an engine that needs less memory',
            )
        survives = np.zeros(int(hashed.first_row[-1]), np.bool_)
        survives[hashed.picked] = seen
        return survives, True

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCountsByBatch | None:
        bits = self._bits.get(source.ordinal)
        return None if bits is None else SurvivorCountsByBatch(bits.kept, bits.tombstones, bits.keyless)

    def count_keyless_records(self) -> KeylessRecords:
        """Records in the dirty segments scanned so far."""
        return reduce(KeylessRecords.plus, (bits.keyless_records for bits in self._bits.values()), KeylessRecords())

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch) -> Flags:
        bits = self._bits.get(source.ordinal)
        superseded = bits.flag_chunk_superseded(chunk, first_row) if bits is not None else np.zeros(len(rows), np.bool_)
        if source.base < self._scan.first_dirty:
            below = np.flatnonzero((rows.key_length >= 0) & (rows.offset < self._scan.first_dirty))
            if len(below):
                superseded[below] = self._flag_superseded_clean_rows(source, chunk, rows, first_row, below)
        return superseded

    def _flag_superseded_clean_rows(
        self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch, row_numbers: Int64s
    ) -> Flags:
        found = np.empty(len(row_numbers), np.bool_)
        self._set.flag_contained_keys(_hash_keys_of_rows(chunk, rows, row_numbers, self._scan.hash_key), found)
        return found


def count_keyless_rows(offset: Int64s, key_length: Int32s, first_offset: int, keyless_count: int | None = None) -> KeylessRecords:
    """Offsets ascend; ``keyless_count`` is the number, if known."""
    first = int(np.searchsorted(offset, first_offset)) if len(offset) and offset[0] < first_offset else 0
    records, last = len(offset) - first, -1
    if keyless_count != 0:
        keyless = np.flatnonzero(key_length[first:] < 0)
        keyless_count, last = len(keyless), int(offset[first:][keyless[-1]]) if len(keyless) else -1
    return KeylessRecords(count=keyless_count, records=records, last_offset=last)


def find_survivors_backwards(key_scan: KeyScanParameters, key_set: KeyHashSet, workers: WorkerThreads) -> BackwardSurvivorScan:
    """Raises BadData; OutOfBudget if the key set is full."""
    found = BackwardSurvivorScan(key_scan, key_set)
    found.scan_dirty_segments(reversed(key_scan.dirty_segments()), workers)
    return found


class BoundedMapSurvivors:
    def __init__(self, key_scan: KeyScanParameters, bounded_map: BoundedOffsetMap) -> None:
        self._scan = key_scan
        self._table = bounded_map
        self.last_mapped_offset = -1

    @property
    def key_count(self) -> int:
        return self._table.key_count

    @property
    def peak_bytes(self) -> int:
        return self._table.peak_bytes

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCountsByBatch | None:
        return None

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch) -> Flags:
        keyed = np.flatnonzero((rows.key_length >= 0) & (rows.offset <= self.last_mapped_offset))
        latest = np.empty(len(keyed), np.int64)
        self._table.find_latest_offsets(_hash_keys_of_rows(chunk, rows, keyed, self._scan.hash_key), latest)
        superseded = np.zeros(len(rows), np.bool_)
        superseded[keyed] = rows.offset[keyed] < latest
        return superseded

    def try_add_chunk(self, source: SourceSegment, hashed: HashedChunkKeys) -> bool:
        """False if the map is full."""
        offsets = hashed.offset[hashed.picked]
        taken = self._table.put_rows_until_full(hashed.hashes, offsets)
        chunk = hashed.chunk
        if taken == len(offsets):
            self._set_last_mapped_offset(int(source.table.last_offset[chunk.last - 1]))
            return True
        # Batches before the one that holds the first row without room were read completely.
        batch = int(np.searchsorted(hashed.first_row, hashed.picked[taken], side="right")) - 1
        if chunk.first + batch:
            self._set_last_mapped_offset(int(source.table.last_offset[chunk.first + batch - 1]))
        if taken and hashed.picked[taken - 1] >= hashed.first_row[batch]:
            self.last_mapped_offset = int(offsets[taken - 1])
        return False

    def _set_last_mapped_offset(self, last_offset: int) -> None:
        """The value can decrease, as in Kafka: an old v0/v1 wrapper can state an end offset below those of its records."""
        if last_offset >= self._scan.first_dirty:
            self.last_mapped_offset = last_offset

    def extend_to_segment_end(self, source: SourceSegment) -> None:
        """Cover the gap before the next segment, too (KAFKA-8764)."""
        self._set_last_mapped_offset(min(source.end, self._scan.end) - 1)


def find_bounded_survivors(key_scan: KeyScanParameters, bounded_map: BoundedOffsetMap, workers: WorkerThreads) -> BoundedMapSurvivors:
    """Read the dirty range in order until the map is full. Raises BadData."""
    found = BoundedMapSurvivors(key_scan, bounded_map)
    for source, wanted in key_scan.dirty_segments():
        # Chunks without a record that may enter count as read too, so they are not left out.
        jobs = [(source, first, last, wanted[first:last]) for first, last in source.split_by_kind()]
        for pieces in workers.run_jobs(lambda buffers, job: key_scan.hash_batch_range(buffers, *job, is_backwards=False), jobs):
            for piece in pieces:
                if not found.try_add_chunk(source, piece):
                    return found
        found.extend_to_segment_end(source)
    return found


@measure_stage(SegmentWorkStage.HASH, lambda buffers, chunk, rows, *_: int(np.maximum(rows.key_length, 0).sum()))
def _hash_keys_of_chunk(
    buffers: ReusableJobBuffers,
    chunk: BatchChunk,
    rows: RecordRows,
    first_offset: int,
    end_offset: int,
    hash_key: bytes,
    is_backwards: bool,
) -> HashesAndRowNumbers:
    hashes, picked = buffers.hashes.take_buffers(_count_rows_with_key(rows.offset, rows.key_length, first_offset, end_offset))
    _hash_key_range(
        chunk.buf,
        rows.offset,
        rows.key_start,
        rows.key_length,
        first_offset,
        end_offset,
        *siphash_key_halves(hash_key),
        is_backwards,
        hashes,
        picked,
    )
    return hashes, picked


@measure_stage(SegmentWorkStage.HASH, lambda chunk, rows, row_numbers, _: int(rows.key_length[row_numbers].sum()))
def _hash_keys_of_rows(chunk: BatchChunk, rows: RecordRows, row_numbers: Int64s, hash_key: bytes) -> Hashes:
    hashes = np.empty((len(row_numbers), 2), np.uint64)
    _hash_selected_keys(chunk.buf, row_numbers, rows.key_start, rows.key_length, *siphash_key_halves(hash_key), hashes)
    return hashes


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _count_rows_with_key(offset: Int64s, key_length: Int32s, first_offset: int, end_offset: int) -> int:
    """Offsets are in [first_offset, end_offset)."""
    count = 0
    for row in range(offset.size):
        if key_length[row] >= 0 and first_offset <= offset[row] < end_offset:
            count += 1
    return count


@kernel
def _hash_key_range(
    buf: Bytes,
    offset: Int64s,
    key_start: Int64s,
    key_length: Int32s,
    first_offset: int,
    end_offset: int,
    k0: HashKeyHalf,
    k1: HashKeyHalf,
    is_backwards: bool,
    out_hashes: Hashes,
    out_row_numbers: Int64s,
) -> None:
    at = out_row_numbers.size - 1 if is_backwards else 0
    step = -1 if is_backwards else 1
    for row in range(offset.size):
        if key_length[row] >= 0 and first_offset <= offset[row] < end_offset:
            out_hashes[at, 0], out_hashes[at, 1] = siphash128(buf, key_start[row], np.int64(key_length[row]), k0, k1)
            out_row_numbers[at] = row
            at += step


@kernel
def _hash_selected_keys(
    buf: Bytes, row_numbers: Int64s, key_start: Int64s, key_length: Int32s, k0: HashKeyHalf, k1: HashKeyHalf, out_hashes: Hashes
) -> None:
    for i in range(row_numbers.size):
        row = row_numbers[i]
        out_hashes[i, 0], out_hashes[i, 1] = siphash128(buf, key_start[row], np.int64(key_length[row]), k0, k1)


@kernel
def _count_survivors_by_batch(
    first_row: FirstRowByBatch,
    survives_flags: Flags,
    offset: Int64s,
    key_length: Int32s,
    value_length: Int32s,
    complete_flags: Flags,
    first_dirty_offset: int,
    drops_keyless: bool,
    out_survivor_counts: Int32s,
    out_tombstone_flags: Flags,
    out_keyless_counts: Int32s,
) -> None:
    """Survivor counts are -1 for incomplete batches; records without a key count from ``first_dirty_offset`` on."""
    for batch in range(out_survivor_counts.size):
        count = 0
        keyless = 0
        null = False
        for row in range(first_row[batch], first_row[batch + 1]):
            if key_length[row] < 0:
                keyless += offset[row] >= first_dirty_offset
                continue
            count += survives_flags[row]
            null = null or (survives_flags[row] and value_length[row] < 0)
        out_survivor_counts[batch] = (count if drops_keyless else count + keyless) if complete_flags[batch] else -1
        out_tombstone_flags[batch] = null
        out_keyless_counts[batch] = keyless


@kernel
def _unpack_superseded_flags(
    packed_survivor_bits: npt.NDArray[np.uint8], first_bit_by_batch: Int64s, first_row: FirstRowByBatch, out_superseded_flags: Flags
) -> None:
    """Rows of batches without bits (-1) keep their flags."""
    for batch in range(first_bit_by_batch.size):
        if first_bit_by_batch[batch] >= 0:
            for row in range(first_row[batch], first_row[batch + 1]):
                bit = first_bit_by_batch[batch] + row - first_row[batch]
                out_superseded_flags[row] = ((packed_survivor_bits[bit >> 3] >> (7 - (bit & 7))) & 1) == 0
