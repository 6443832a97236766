"""The offset map on local disk, for rounds whose keys do not fit the map budget.
1. Rows of (key, ordinal), ``tag:4 hash:8 ordinal:4``, are written in the order of the scan, newest record first, to a HashRangeRowFile.
2. One range of the hash at a time is read back, again newest first, into a small KeyHashSet; the first row of a key survives. A range is
   chosen by the key's tag, the part of the hash that a KeyHashSet does not take its homes from.
A range whose keys exceed the budget is read several times, a part each time. If the disk share is too small for all rows, the scan is made
in several passes, each of which takes its part of the tags.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from typing_extensions import override

from bloom.filter import key_hash_tag
from compactor.cleaner.keys import (
    AHEAD,
    CAPACITY,
    MIN_MAP_BYTES,
    BackwardSurvivorScan,
    FlagsAndWhetherTheyAreFinal,
    HashedChunkKeys,
    HashTable,
    KeyHashSet,
    KeyScanParameters,
    KeySetState,
    SegmentSurvivorBitmap,
    first_cell_to_probe,
    is_key_in_table,
    put_key_if_absent,
)
from compactor.cleaner.source import SourceSegment
from compactor.cleaner.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.errors import CompactorError, OutOfBudget, StoreError
from compactor.kernels.common import KEY_BYTES, FirstAndEndBatch, FirstRowByBatch, Flags, Hashes
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import high_product_word, prefetch
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.batches import Int64s
from compactor.records.rows import BatchChunk, RecordRows

# ---- rows sorted by hash range in a file on local disk -------------------------------------------------------------------------
#     file:   block 0 [range 0 | range 1 | ..]  block 1 [range 0 | range 1 | ..]  ..
#
# A row is some words of one numpy type; the first word is from the hash of the key and chooses the range. Rows are sorted into ranges
# within blocks and keep their order within a range, so that one range after the other can be read back in the order in which it was
# written. Each piece, one range of one block, has a checksum. Rows belong to sections, which are read separately.


BLOCK_BYTES: Final = 16 << 20

NextRowAndOutRowCount = tuple[int, int]
"""Number of the next row to read, and the number of rows in the output."""


SpoolRows = npt.NDArray[Any]
"""Rows of one type, shape (n, words)."""


class DiskReservation(Protocol):
    """Grows before bytes are written and shrinks after they are deleted."""

    def reserve_bytes_on_disk(self, byte_count: int, /) -> None:
        """Raises OutOfBudget if the disk budget does not have the bytes."""

    def release_bytes_on_disk(self, byte_count: int, /) -> None: ...


class _UnlimitedDiskReservation:
    def reserve_bytes_on_disk(self, byte_count: int) -> None:
        pass

    def release_bytes_on_disk(self, byte_count: int) -> None:
        pass


NO_LIMIT: Final = _UnlimitedDiskReservation()
"""A reservation without a bound, for files outside the disk budget."""


@dataclass(frozen=True, slots=True)
class HashRangeSpan:
    count: int
    first: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.total or self.count)
        if not 0 <= self.first <= self.first + self.count <= self.total:
            raise ValueError(f"ranges {self.first} to {self.first + self.count} of {self.total}")

    @staticmethod
    def of_key_part(ranges_per_part: int, part_number: int, part_count: int) -> HashRangeSpan:
        return HashRangeSpan(ranges_per_part, part_number * ranges_per_part, part_count * ranges_per_part)


@dataclass(frozen=True, slots=True)
class _SortedRowBlock:
    """Block in a file. ``begins``: first row of each hash range, then the number of rows; ``crcs``: per range."""

    position: int
    begins: npt.NDArray[np.int64]
    crcs: tuple[int, ...]

    def range_row_count(self, range_number: int) -> int:
        return int(self.begins[range_number + 1] - self.begins[range_number])


class HashRangeRowFile:
    """File that sorts rows by hash range. Numbered sections are read range by range.
    :param words_per_row: at least three.
    """

    def __init__(
        self,
        path: Path,
        disk_reservation: DiskReservation,
        range_span: HashRangeSpan,
        words_per_row: int,
        dtype: type[np.generic],
        row_name_for_messages: str,
    ) -> None:
        self.ranges = range_span
        self.size = 0
        """Bytes in the file."""
        self._path, self._disk, self._content = path, disk_reservation, row_name_for_messages
        self._row_bytes = words_per_row * np.dtype(dtype).itemsize
        self._buffer: SpoolRows = np.empty((max(1, BLOCK_BYTES // self._row_bytes), words_per_row), dtype)
        self._sorted: SpoolRows | None = None
        self._fill = 0
        self._section = 0
        self._blocks: dict[int, list[_SortedRowBlock]] = {}
        self._reserved = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    @property
    def row_count(self) -> int:
        return self.size // self._row_bytes + self._fill

    def add_rows_to_section(self, section_number: int, rows: SpoolRows) -> None:
        """Rows of other hash ranges are skipped. Raises OutOfBudget if the disk budget, or the disk, is used up."""
        if section_number != self._section:
            self.write_buffered_rows()
            self._section = section_number
        row, ranges = 0, self.ranges
        while row < len(rows):
            if ranges.count == ranges.total:
                size = min(len(rows) - row, len(self._buffer) - self._fill)
                self._buffer[self._fill : self._fill + size] = rows[row : row + size]
                row, self._fill = row + size, self._fill + size
            else:
                row, self._fill = _copy_rows(rows, row, ranges.total, ranges.first, ranges.count, self._buffer, self._fill)
            if self._fill == len(self._buffer):
                self.write_buffered_rows()

    def count_range_rows(self, section_number: int, range_number: int) -> int:
        """Ranges count from the first one of the file."""
        self.write_buffered_rows()
        return sum(block.range_row_count(range_number) for block in self._blocks.get(section_number, ()))

    def read_range_rows(self, section_number: int, range_number: int) -> Iterator[SpoolRows]:
        """Yield rows in the order in which they were added, each array valid until the next one is requested. Raises StoreError if a
        checksum does not match.
        """
        self.write_buffered_rows()
        self._sorted = None
        for block in self._blocks.get(section_number, ()):
            if block.range_row_count(range_number):
                yield self._read_block_ranges(block, range_number, range_number + 1)

    def read_rows_of_section(self, section_number: int) -> Iterator[SpoolRows]:
        """Yield blocks, each valid until the next one is requested. Raises StoreError if a checksum does not match."""
        self.write_buffered_rows()
        for block in self._blocks.get(section_number, ()):
            yield self._read_block_ranges(block, 0, self.ranges.count)

    def write_buffered_rows(self) -> None:
        if not self._fill:
            return
        out = self._sorted if self._sorted is not None else np.empty_like(self._buffer)
        begins = sort_rows(self._buffer, self._fill, self.ranges.total, self.ranges.first, self.ranges.count, out)
        data, places = view_as_bytes(out[: self._fill]), (begins * self._row_bytes).tolist()
        crcs = tuple(crc32c(data[begin:end]) for begin, end in pairwise(places))
        self._blocks.setdefault(self._section, []).append(_SortedRowBlock(self.size, begins, crcs))
        self._reserve_and_append_bytes(data)
        self._sorted, self._fill = out, 0

    def close(self) -> None:
        """Remove the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._path.unlink(missing_ok=True)
            self._disk.release_bytes_on_disk(self._reserved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _reserve_and_append_bytes(self, data: memoryview) -> None:
        self._disk.reserve_bytes_on_disk(len(data))
        self._reserved += len(data)
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self.size + written)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            hint = "Free space there, or raise map_budget_bytes so that the keys stay in memory, and run it again; nothing was published"
            raise OutOfBudget(f"no space is left for {self._content} in {self._path}", hint=hint) from error
        self.size += len(data)

    def _read_block_ranges(self, block: _SortedRowBlock, first_range: int, end_range: int) -> SpoolRows:
        begin, end = int(block.begins[first_range]), int(block.begins[end_range])
        rows = self._buffer[: end - begin]
        data, done = view_as_bytes(rows), 0
        while done < len(data):
            size = os.preadv(self._descriptor, [data[done:]], block.position + begin * self._row_bytes + done)
            if size == 0:
                raise OSError(errno.EIO, "a file became shorter while it was in use", str(self._path))
            done += size
        places = ((block.begins[first_range : end_range + 1] - begin) * self._row_bytes).tolist()
        if any(crc32c(data[a:b]) != crc for (a, b), crc in zip(pairwise(places), block.crcs[first_range:end_range], strict=True)):
            raise StoreError(
                f"{self._content} in {self._path} have changed on the disk",
                hint="Nothing was published. Check the disk below state_dir (SPARK_LOCAL_DIRS on executors), then run it again",
            )
        return rows


def view_as_bytes(rows: SpoolRows) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@inline_kernel
def hash_range_of_word(first_word: np.uint64, range_count: int) -> int:
    """A row's hash range, from the lower half of its first word, because hash tables take their cells from the upper half."""
    return np.int64(high_product_word((first_word << np.uint64(32)) | (first_word >> np.uint64(32)), np.uint64(range_count)))  # type: ignore[return-value]


@inline_kernel
def _copy_row(source_rows: SpoolRows, row: int, target_rows: SpoolRows, target_row: int) -> None:
    target_rows[target_row, 0], target_rows[target_row, 1], target_rows[target_row, 2] = (
        source_rows[row, 0],
        source_rows[row, 1],
        source_rows[row, 2],
    )
    for word in range(3, source_rows.shape[1]):
        target_rows[target_row, word] = source_rows[row, word]


@kernel
def _copy_rows(
    rows: SpoolRows, first_row: int, range_count: int, first_range: int, copied_range_count: int, out_rows: SpoolRows, out_row_count: int
) -> NextRowAndOutRowCount:
    """Append rows until ``out_rows`` is full; return the next row to read, and the number of rows in ``out_rows``."""
    row = first_row
    while row < len(rows) and out_row_count < len(out_rows):
        if first_range <= hash_range_of_word(np.uint64(rows[row, 0]), range_count) < first_range + copied_range_count:
            _copy_row(rows, row, out_rows, out_row_count)
            out_row_count += 1
        row += 1
    return row, out_row_count


@kernel
def sort_rows(
    rows: SpoolRows, row_count: int, range_count: int, first_range: int, sorted_range_count: int, out_rows: SpoolRows
) -> npt.NDArray[np.int64]:
    """Sort rows by hash range, keeping their order within a range. Return each range's first row, and ``row_count`` at the end."""
    begins = np.zeros(sorted_range_count + 1, dtype=np.int64)
    for row in range(row_count):
        begins[hash_range_of_word(np.uint64(rows[row, 0]), range_count) - first_range + 1] += 1
    for number in range(sorted_range_count):
        begins[number + 1] += begins[number]
    place = begins[:-1].copy()
    for row in range(row_count):
        number = hash_range_of_word(np.uint64(rows[row, 0]), range_count) - first_range
        _copy_row(rows, row, out_rows, place[number])
        place[number] += 1
    return begins


KEY_ROW_BYTES: Final = 16
CACHE_BYTES: Final = 8 << 20
"""Ranges are made small enough for their sets to stay near the processor."""

MAX_DISK_RANGES: Final = 4096
SEEN: Final = 2**32 - 1
"""The ordinal of keys whose newest record was answered before the buckets took over."""

DIRTY, CLEAN = range(2)
"""Sections of the spool: the dirty range, and rows below it that are looked up."""

KeyRows = npt.NDArray[np.uint32]
RowOrdinals = npt.NDArray[np.uint32]
RowBitmap = npt.NDArray[np.uint8]


def count_log_scans(row_count: int, available_disk_bytes: int) -> int:
    """Number of scans, each for an equal part of the keys, with which the rows fit the disk. A tenth stays free, because the parts are not
    exactly equal.
    """
    return max(1, -(-row_count * KEY_ROW_BYTES * 11 // (max(1, available_disk_bytes) * 10)))


def stored_hashes(rows: KeyRows) -> Hashes:
    """Hashes have shape (n, 2). Bits that rows do not store, and that neither key sets nor Bloom filters use, are zero."""
    words = rows.astype(np.uint64)
    return np.column_stack([words[:, 0], words[:, 1] | (words[:, 2] << np.uint64(32))])


class DiskOffsetMap:
    """Offset map on local disk: the newest dirty record of each key, and older records of other keys."""

    def __init__(
        self,
        path: Path,
        disk_reservation: DiskReservation,
        *,
        map_budget_bytes: int,
        expected_row_count: int,
        key_part_number: int = 0,
        key_part_count: int = 1,
    ) -> None:
        """:param map_budget_bytes: memory for the keys of one hash range.
        :param key_part_number, key_part_count: the map takes only this part of the keys. A row survives if the bitmap of any part has its
        bit set.
        :raises OutOfBudget: if the map budget is less than the smallest hash table needs.
        """
        KeyHashSet(map_budget_bytes)  # a budget that no set can use is refused before the scan, not after it
        self._map_budget_bytes = map_budget_bytes
        expected_bytes = -(-expected_row_count // key_part_count) * KEY_BYTES
        count = min(MAX_DISK_RANGES, max(1, -(-expected_bytes // min(map_budget_bytes, CACHE_BYTES))))
        self._ranges = HashRangeSpan.of_key_part(count, key_part_number, key_part_count)
        self._spool = HashRangeRowFile(path, disk_reservation, self._ranges, 4, np.uint32, "the keys of the offset map")
        self._guess = 0
        self._most = -1
        self.entries = 0
        """Number of keys, known after ``find_survivors``."""
        self.peak_bytes = 0
        """Memory in bytes of the largest key set that ``find_survivors`` needed."""

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, _: hashes.nbytes)
    def add_dirty_rows(self, hashes: Hashes, ordinals: RowOrdinals) -> None:
        """Rows come newest first over all calls. Raises OutOfBudget if the disk budget, or the disk, is used up.
        :param hashes: shape (n, 2).
        :param ordinals: the rows' bits in ``survivor_bitmap``, less than 2^32 - 1.
        """
        self._add_key_rows(DIRTY, hashes, self._require_valid_ordinals(ordinals))

    def add_known_keys(self, hashes: Hashes) -> None:
        """Later rows of these keys do not survive. Must be called before ``add_dirty_rows``."""
        self._add_key_rows(DIRTY, hashes, np.full(len(hashes), SEEN, dtype=np.uint32))

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, _: hashes.nbytes)
    def add_clean_rows(self, hashes: Hashes, ordinals: RowOrdinals) -> None:
        """A row survives unless the dirty range has its key."""
        self._add_key_rows(CLEAN, hashes, self._require_valid_ordinals(ordinals))

    @property
    def written_bytes(self) -> int:
        return self._spool.size

    def flag_own_keys(self, hashes: Hashes) -> Flags:
        answer = np.empty(len(hashes), dtype=np.bool_)
        _flag_keys_in_ranges(hashes, self._ranges.total, self._ranges.first, self._ranges.count, answer)
        return answer

    def iterate_dirty_key_hashes(self) -> Iterator[Hashes]:
        """Yield hashes, shape (n, 2), with repetitions."""
        for rows in self._spool.read_rows_of_section(DIRTY):
            yield stored_hashes(rows)

    @measure_stage(SegmentWorkStage.MAP)
    def survivor_bitmap(self, row_count: int) -> RowBitmap:
        """Bitmap of ordinals below ``row_count``, in the bit order of ``np.packbits``: set if the row survives."""
        if self._most >= row_count:
            raise ValueError(f"ordinal {self._most} was added, the bitmap is for {row_count}")
        bitmap = np.zeros((row_count + 7) // 8, dtype=np.uint8)
        for bucket in range(self._ranges.count):
            self._mark_range_survivors(bucket, self._ranges.total, self._ranges.first + bucket, bitmap)
        return bitmap

    def close(self) -> None:
        """Remove the file. A second call does nothing."""
        self._spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _require_valid_ordinals(self, ordinals: RowOrdinals) -> RowOrdinals:
        """Compiled code does not check indexes."""
        most = int(np.max(ordinals)) if len(ordinals) else -1
        if most >= SEEN:
            raise ValueError(f"an ordinal is at most {SEEN - 1}")
        self._most = max(self._most, most)
        return ordinals

    def _add_key_rows(self, section_number: int, hashes: Hashes, ordinals: RowOrdinals) -> None:
        rows = np.empty((len(hashes), 4), np.uint32)
        _pack_key_rows(hashes, ordinals, rows)
        self._spool.add_rows_to_section(section_number, rows)

    def _mark_range_survivors(self, range_number: int, subrange_count: int, subrange_number: int, out_bitmap: RowBitmap) -> None:
        if subrange_count > 2**32:
            raise OutOfBudget("more keys than the map budget holds share one tag: the key hashes are not uniform")
        keys = KeyHashSet(self._map_budget_bytes, expected_key_count=self._guess)
        done = 0
        for rows in self._spool.read_range_rows(DIRTY, range_number):
            taken = mark_newest_rows(keys.table, keys.state, rows, 0, subrange_count, subrange_number, out_bitmap)
            while taken < len(rows) and keys.enlarge():
                taken = mark_newest_rows(keys.table, keys.state, rows, taken, subrange_count, subrange_number, out_bitmap)
            done += taken
            if taken < len(rows):
                # The bits set so far are valid; the smaller ranges set them once more.
                del keys
                pieces = max(2, -(-self._spool.count_range_rows(DIRTY, range_number) // max(1, done)))
                for piece in range(pieces):
                    self._mark_range_survivors(range_number, subrange_count * pieces, subrange_number * pieces + piece, out_bitmap)
                return
        for rows in self._spool.read_range_rows(CLEAN, range_number):
            mark_absent_rows(keys.table, keys.state, rows, subrange_count, subrange_number, out_bitmap)
        self.entries += keys.key_count
        self.peak_bytes = max(self.peak_bytes, keys.peak_bytes)
        self._guess = keys.key_count + keys.key_count // 20


# ---- kernels: plain arrays, rows of (tag, low word, high word, ordinal) -----------------------------------------------------


@inline_kernel
def second_hash_half(rows: KeyRows, row: int) -> np.uint64:
    return np.uint64(rows[row, 1]) | (np.uint64(rows[row, 2]) << np.uint64(32))


@kernel
def _pack_key_rows(hashes: Hashes, ordinals: RowOrdinals, out_rows: KeyRows) -> None:
    for row in range(len(hashes)):
        out_rows[row, 0] = key_hash_tag(hashes[row, 0])
        out_rows[row, 1] = np.uint32(hashes[row, 1] & np.uint64(0xFFFFFFFF))
        out_rows[row, 2] = np.uint32(hashes[row, 1] >> np.uint64(32))
        out_rows[row, 3] = ordinals[row]


@kernel
def _flag_keys_in_ranges(hashes: Hashes, range_count: int, first_range: int, part_range_count: int, out_flags: Flags) -> None:
    for row in range(len(hashes)):
        out_flags[row] = (
            first_range <= hash_range_of_word(np.uint64(key_hash_tag(hashes[row, 0])), range_count) < first_range + part_range_count
        )


@kernel
def mark_newest_rows(
    key_set_table: HashTable, state: KeySetState, rows: KeyRows, first_row: int, range_count: int, range_number: int, out_bitmap: RowBitmap
) -> int:
    """Set the bit of each key's first row, which is the newest. Return ``len(rows)``, or the first row for which the set has no space.
    :param range_count, range_number: only rows in this hash range.
    """
    for row in range(first_row, len(rows)):
        if row + AHEAD < len(rows):
            prefetch(key_set_table, 3 * first_cell_to_probe(second_hash_half(rows, row + AHEAD), state[CAPACITY]))
        if hash_range_of_word(np.uint64(rows[row, 0]), range_count) == range_number:
            answer = put_key_if_absent(key_set_table, state, np.uint64(rows[row, 0]), second_hash_half(rows, row))
            if answer < 0:
                return row
            if answer == 1 and rows[row, 3] != SEEN:
                out_bitmap[rows[row, 3] >> 3] |= np.uint8(128 >> (rows[row, 3] & 7))
    return len(rows)


@kernel
def mark_absent_rows(
    key_set_table: HashTable, state: KeySetState, rows: KeyRows, range_count: int, range_number: int, out_bitmap: RowBitmap
) -> None:
    for row in range(len(rows)):
        if row + AHEAD < len(rows):
            prefetch(key_set_table, 3 * first_cell_to_probe(second_hash_half(rows, row + AHEAD), state[CAPACITY]))
        if hash_range_of_word(np.uint64(rows[row, 0]), range_count) == range_number and not is_key_in_table(
            key_set_table, state, np.uint64(rows[row, 0]), second_hash_half(rows, row)
        ):
            out_bitmap[rows[row, 3] >> 3] |= np.uint8(128 >> (rows[row, 3] & 7))


# ---- pass 1 within bounded memory: a set of keys while they fit, rows on local disk from then on -------------------------------
# The answers are those of BackwardSurvivorScan, record by record. What the set has answered stays answered; its keys go to the disk before
# the rows that come after them. Rows below the dirty range are looked up in pass 1 too, because no set of all keys is left.
#
# The bits of all segments form one bitmap in the order of the scan, and the position of a row there is its ordinal on disk.


OpenDiskMapOfPart = Callable[[int, int], DiskOffsetMap]
"""(part, parts) -> an empty engine on disk."""


class KeyScanSpillingToDisk(BackwardSurvivorScan):
    """Backward scan for surviving records whose keys move to disk when they do not fit in memory. For each part of the keys:
    1. ``scan_dirty_segment_keys``, in descending order.
    2. ``iterate_dirty_key_hashes``, for Bloom filters.
    3. ``scan_clean_segment_keys`` of the segments with rows to look up, in any order.
    4. ``end_key_part``. The survivors are known after the last part.
    :param key_set: None to keep all keys on disk. Several parts require None.
    """

    def __init__(
        self, key_scan: KeyScanParameters, key_set: KeyHashSet | None, open_disk_map: OpenDiskMapOfPart, key_part_count: int = 1
    ) -> None:
        super().__init__(key_scan, key_set or KeyHashSet(MIN_MAP_BYTES))
        self._open = open_disk_map
        self._part, self._parts = 0, key_part_count
        self._map = open_disk_map(0, key_part_count) if key_set is None else None
        self._next = 0
        self._places: dict[int, int] = {}
        self._clean: dict[int, SegmentSurvivorBitmap] = {}
        self._clean_places: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
        self._entries = 0
        self._peak = 0
        self.segments_superseded: set[int] = set()
        """Ordinals of segments of which pass 2 has found a superseded record below the dirty range."""

    @property
    @override
    def key_count(self) -> int:
        return self._entries or self._set.key_count

    @property
    @override
    def peak_bytes(self) -> int:
        return max(self._peak, self._set.peak_bytes)

    @property
    def key_scan(self) -> KeyScanParameters:
        """The parameters after the first part have no gate, which has read all keys by then."""
        return self._scan

    @property
    def are_rows_on_disk(self) -> bool:
        """True if rows below the dirty range must be looked up during the scan."""
        return self._map is not None

    @property
    def has_spilled(self) -> bool:
        return self._map is not None or self._entries > 0

    @override
    def scan_dirty_segment_keys(
        self, source: SourceSegment, wanted_batch_flags: Flags, workers: WorkerThreads, *, cleans_chunks_while_reading: bool = True
    ) -> None:
        """Raises BadData, OutOfBudget, StoreError."""
        before = self._bits.pop(source.ordinal, None)
        self._places[source.ordinal] = self._next
        super().scan_dirty_segment_keys(source, wanted_batch_flags, workers, cleans_chunks_while_reading=cleans_chunks_while_reading)
        if before is not None:  # an earlier part of the keys has begun these bits, in the same places
            self._bits[source.ordinal] = before

    @override
    def _flag_newest_rows(self, hashed: HashedChunkKeys) -> FlagsAndWhetherTheyAreFinal:
        rows = int(hashed.first_row[-1])
        place = self._reserve_ordinals(rows)
        survives = np.zeros(rows, np.bool_)
        done = 0
        if self._map is None:
            seen = np.zeros(len(hashed.hashes), np.bool_)
            done = self._set.insert_keys_until_full(hashed.hashes, seen)
            survives[hashed.picked[:done]] = seen[:done]
            if done == len(hashed.hashes):
                return survives, True
            self._move_keys_to_disk()
        self._current_disk_map.add_dirty_rows(hashed.hashes[done:], (place + hashed.picked[done:]).astype(np.uint32))
        return survives, False

    def iterate_dirty_key_hashes(self) -> Iterator[Hashes]:
        """Yield hashes, shape (n, 2), of the current part, with repetitions."""
        return self._set.iterate_key_hashes() if self._map is None else self._map.iterate_dirty_key_hashes()

    def scan_clean_segment_keys(self, source: SourceSegment, wanted_batch_flags: Flags, workers: WorkerThreads) -> None:
        """Without a disk map nothing is read: pass 2 looks the rows up in memory. Raises BadData, OutOfBudget."""
        if self._map is None:
            return
        key_scan = self._scan
        bits = SegmentSurvivorBitmap(len(source.table))
        begins = self._next
        added: list[npt.NDArray[np.uint8]] = []

        def hash_range(buffers: ReusableJobBuffers, batch_range: FirstAndEndBatch) -> list[HashedChunkKeys]:
            first, last = batch_range
            return key_scan.hash_batch_range(
                buffers, source, first, last, wanted_batch_flags[first:last], is_backwards=False, hashes_rows_below_dirty_range=True
            )

        for pieces in workers.run_jobs(
            hash_range,
            [(first, last) for first, last in source.split_by_kind() if wanted_batch_flags[first:last].any()],
        ):
            for piece in pieces:
                rows = int(piece.first_row[-1])
                place = self._reserve_ordinals(rows)
                self._current_disk_map.add_clean_rows(piece.hashes, (place + piece.picked).astype(np.uint32))
                bits.add_survivors_of_chunk(piece, np.ones(rows, np.bool_), key_scan.first_dirty, source, are_flags_final=False)
                mine = np.zeros(rows, np.bool_)
                mine[piece.picked[self._current_disk_map.flag_own_keys(piece.hashes)]] = True
                added.append(np.packbits(mine))
        bits.join_chunks()
        self._clean.setdefault(source.ordinal, bits)
        self._clean_places[source.ordinal] = (begins, np.concatenate(added) if added else np.empty(0, np.uint8))

    def end_key_part(self) -> None:
        """Raises OutOfBudget, StoreError."""
        self._scan = replace(self._scan, second_reader=None)  # it has seen all keys
        if self._map is None:
            return
        with self._current_disk_map as disk_map:
            found = disk_map.survivor_bitmap(8 * self._next)
            self._entries += disk_map.entries
            self._peak = max(self._peak, disk_map.peak_bytes)
        for ordinal, place in self._places.items():
            packed = self._bits[ordinal].packed
            packed |= found[place : place + len(packed)]
        for ordinal, (place, mine) in self._clean_places.items():
            packed = self._clean[ordinal].packed
            packed &= ~(mine & ~found[place : place + len(mine)])
        self._next = 0
        self._clean_places = {}
        self._part += 1
        self._map = self._open(self._part, self._parts) if self._part < self._parts else None

    def close(self) -> None:
        """Remove the file that a failed scan leaves."""
        if self._map is not None:
            self._map.close()

    def free_key_set(self) -> None:
        self._entries, self._peak = self.key_count, self.peak_bytes
        self._set = KeyHashSet(MIN_MAP_BYTES)

    @override
    def _flag_superseded_clean_rows(
        self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch, row_numbers: Int64s
    ) -> Flags:
        if not self.has_spilled:
            found = super()._flag_superseded_clean_rows(source, chunk, rows, first_row, row_numbers)
        elif source.ordinal in self._clean:
            found = self._clean[source.ordinal].flag_chunk_superseded(chunk, first_row)[row_numbers]
        else:
            return np.zeros(len(row_numbers), np.bool_)  # nobody had a reason to look them up: its filter met no key
        if found.any():
            self.segments_superseded.add(source.ordinal)
        return found

    @property
    def _current_disk_map(self) -> DiskOffsetMap:
        if self._map is None:
            raise CompactorError("the disk is asked before it was needed", hint="This is a bug; please report it")
        return self._map

    def _reserve_ordinals(self, row_count: int) -> int:
        place = 8 * self._next
        self._next += (row_count + 7) // 8
        if 8 * self._next >= SEEN:
            raise OutOfBudget(
                f"one round over more than {SEEN - 1} records", hint="Clean a part of them first: raise min_compaction_lag_ms for one round"
            )
        return place

    def _move_keys_to_disk(self) -> None:
        self._map = self._open(0, 1)
        for keys in self._set.iterate_key_hashes():
            self._map.add_known_keys(keys)
        self._peak = self._set.peak_bytes
        self._set = KeyHashSet(MIN_MAP_BYTES)
