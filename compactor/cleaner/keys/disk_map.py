"""The offset map on local disk: for when the keys of one round do not fit the map budget.

Rows of (key, ordinal), 16 bytes each, are written in the order of the scan, newest record first, to a ``HashRangeRowFile``. Afterwards one
range of the hash at a time is read back, again newest first, into a small KeyHashSet; the first row of a key survives. A range is chosen by
the key's tag, the part of the hash that a KeyHashSet does not take its homes from.

    row:   tag:4  hash:8  ordinal:4

Memory is bounded: a range whose keys exceed the budget is read several times, a part of it each time. Where the disk share is too small for
all the rows, the scan is made in several passes, each of which takes only its part of the tags.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from bloom.siphash import nonzero_32_bit_tag_of_key_hash
from compactor.cleaner.keys.key_set import (
    AHEAD,
    CAPACITY,
    HashTable,
    KeyHashSet,
    KeySetState,
    first_cell_to_probe,
    is_key_in_table,
    put_key_if_absent,
)
from compactor.cleaner.row_spool import DiskReservation, HashRangeRowFile, HashRangeSpan, hash_range_number_of_row_first_word
from compactor.errors import OutOfBudget
from compactor.kernels.common import KEY_BYTES, Flags, Hashes, RowCount
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import prefetch
from compactor.profiling import SegmentWorkStage, measure_stage

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


def count_log_scans_to_fit_disk(row_count: int, available_disk_bytes: int) -> int:
    """Return how many scans of the log are needed so that the rows on disk fit ``available_disk_bytes``. Each scan takes an equal part of
    the keys. A tenth of these bytes stays free, because the parts do not have exactly the same size.
    """
    return max(1, -(-row_count * KEY_ROW_BYTES * 11 // (max(1, available_disk_bytes) * 10)))


def stored_key_hashes_of_rows(rows: KeyRows) -> Hashes:
    """Return the key hashes of the rows, shape (n, 2). Bits that rows do not store are zero; key sets and Bloom filters do not use them."""
    words = rows.astype(np.uint64)
    return np.column_stack([words[:, 0], words[:, 1] | (words[:, 2] << np.uint64(32))])


class DiskOffsetMap:
    """Offset map on local disk, for more keys than memory has space for. It finds the newest record of each key in the dirty range, and the
    records below that range whose key the range does not have. ``close`` removes its file. Can be used as a context manager.
    """

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
        """Create the map's file.

        :param path: path of the file, which exists until ``close``.
        :param map_budget_bytes: memory for the keys of one hash range.
        :param expected_row_count: estimated number of rows with a key; it sizes the hash ranges.
        :param key_part_number, key_part_count: the map takes only this part of the keys. A row survives if the bitmap of any part
            has its bit set.
        :raises OutOfBudget: if the map budget is less than the smallest hash table needs.
        """
        KeyHashSet(map_budget_bytes)  # a budget that no set can use is refused before the scan, not after it
        self._map_budget_bytes = map_budget_bytes
        expected_bytes = -(-expected_row_count // key_part_count) * KEY_BYTES
        count = min(MAX_DISK_RANGES, max(1, -(-expected_bytes // min(map_budget_bytes, CACHE_BYTES))))
        self._ranges = HashRangeSpan.hash_ranges_of_key_part(count, key_part_number, key_part_count)
        self._spool = HashRangeRowFile(path, disk_reservation, self._ranges, 4, np.uint32, "the keys of the offset map")
        self._guess = 0
        self._most = -1
        self.entries = 0
        """Number of keys, known after ``find_survivors``."""
        self.peak_bytes = 0
        """Memory in bytes of the largest key set that ``find_survivors`` needed."""

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, _: hashes.nbytes)
    def add_keys_of_dirty_rows(self, hashes: Hashes, ordinals: RowOrdinals) -> None:
        """Add rows of the dirty range, newest first over all calls. Raises OutOfBudget if the disk budget, or the disk, is used up.

        :param hashes: key hashes, shape (n, 2).
        :param ordinals: the rows' numbers, less than 2^32 - 1, under which ``survivor_bitmap`` reports them.
        """
        self._add_key_rows(DIRTY, hashes, self._require_ordinals_within_bitmap(ordinals))

    def add_keys_with_known_newest_record(self, hashes: Hashes) -> None:
        """Add keys whose newest records are known already, from a full KeyHashSet. Rows that are added later with such a key do not
        survive. Must be called before ``add_keys_of_dirty_rows``.
        """
        self._add_key_rows(DIRTY, hashes, np.full(len(hashes), SEEN, dtype=np.uint32))

    @measure_stage(SegmentWorkStage.MAP, lambda self, hashes, _: hashes.nbytes)
    def add_keys_of_clean_rows(self, hashes: Hashes, ordinals: RowOrdinals) -> None:
        """Add rows of offsets below the dirty range, in any order. Such a row survives unless a row of the dirty range has its key."""
        self._add_key_rows(CLEAN, hashes, self._require_ordinals_within_bitmap(ordinals))

    @property
    def bytes_written_to_map_file(self) -> int:
        """Return the number of bytes that the map has written to its file so far."""
        return self._spool.size

    def flag_keys_assigned_to_map(self, hashes: Hashes) -> Flags:
        """Return a flag per row: whether its key belongs to the part of the keys that this map holds."""
        answer = np.empty(len(hashes), dtype=np.bool_)
        _flag_keys_in_hash_ranges(hashes, self._ranges.total, self._ranges.first, self._ranges.count, answer)
        return answer

    def iterate_dirty_key_hashes(self) -> Iterator[Hashes]:
        """Yield, in chunks of shape (n, 2), the key hashes that were added from the dirty range so far. A hash may occur more than once.
        The caller looks them up in Bloom filters.
        """
        for rows in self._spool.read_rows_of_section(DIRTY):
            yield stored_key_hashes_of_rows(rows)

    @measure_stage(SegmentWorkStage.MAP)
    def survivor_bitmap(self, row_count: int) -> RowBitmap:
        """Return a bitmap with one bit for each row number (ordinal) below ``row_count``, in the bit order of ``np.packbits``: set if a
        row with that ordinal survives.
        """
        if self._most >= row_count:
            raise ValueError(f"ordinal {self._most} was added, the bitmap is for {row_count}")
        bitmap = np.zeros((row_count + 7) // 8, dtype=np.uint8)
        for bucket in range(self._ranges.count):
            self._mark_survivors_in_hash_range(bucket, self._ranges.total, self._ranges.first + bucket, bitmap)
        return bitmap

    def close(self) -> None:
        """Remove the file and release its reservation of disk space. A second call does nothing."""
        self._spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _require_ordinals_within_bitmap(self, ordinals: RowOrdinals) -> RowOrdinals:
        """Return the row numbers (ordinals) after checking that they lie within the bitmap, because compiled code does not check
        indexes.
        """
        most = int(np.max(ordinals)) if len(ordinals) else -1
        if most >= SEEN:
            raise ValueError(f"an ordinal is at most {SEEN - 1}")
        self._most = max(self._most, most)
        return ordinals

    def _add_key_rows(self, section_number: int, hashes: Hashes, ordinals: RowOrdinals) -> None:
        rows = np.empty((len(hashes), 4), np.uint32)
        _pack_key_rows(hashes, ordinals, rows)
        self._spool.add_rows_to_section(section_number, rows)

    def _mark_survivors_in_hash_range(self, range_number: int, subrange_count: int, subrange_number: int, out_bitmap: RowBitmap) -> None:
        """Set the bits of the surviving rows of one hash range of the file. Only rows in one part of that range are processed: part
        ``subrange_number``, counted from 0, of ``subrange_count`` equal parts.
        """
        if subrange_count > 2**32:
            raise OutOfBudget("more keys than the map budget holds share one tag: the key hashes are not uniform")
        keys = KeyHashSet(self._map_budget_bytes, expected_key_count=self._guess)
        done = 0
        for rows in self._spool.read_rows_of_section_and_hash_range(DIRTY, range_number):
            taken = mark_newest_row_of_each_key(keys.table, keys.state, rows, 0, subrange_count, subrange_number, out_bitmap)
            while taken < len(rows) and keys.enlarge_key_set_if_budget_allows():
                taken = mark_newest_row_of_each_key(keys.table, keys.state, rows, taken, subrange_count, subrange_number, out_bitmap)
            done += taken
            if taken < len(rows):
                # The bits set so far are valid; the smaller ranges set them once more.
                del keys
                pieces = max(2, -(-self._spool.count_rows_of_section_and_hash_range(DIRTY, range_number) // max(1, done)))
                for piece in range(pieces):
                    self._mark_survivors_in_hash_range(range_number, subrange_count * pieces, subrange_number * pieces + piece, out_bitmap)
                return
        for rows in self._spool.read_rows_of_section_and_hash_range(CLEAN, range_number):
            mark_rows_with_absent_keys(keys.table, keys.state, rows, subrange_count, subrange_number, out_bitmap)
        self.entries += keys.key_count
        self.peak_bytes = max(self.peak_bytes, keys.peak_bytes)
        self._guess = keys.key_count + keys.key_count // 20


# ---- kernels: plain arrays, rows of (tag, low word, high word, ordinal) -----------------------------------------------------


@inline_kernel
def second_key_hash_half_of_row(rows: KeyRows, row: int) -> np.uint64:
    """Return the second half of the key hash of a row."""
    return np.uint64(rows[row, 1]) | (np.uint64(rows[row, 2]) << np.uint64(32))


@kernel
def _pack_key_rows(hashes: Hashes, ordinals: RowOrdinals, out_rows: KeyRows) -> None:
    for row in range(len(hashes)):
        out_rows[row, 0] = nonzero_32_bit_tag_of_key_hash(hashes[row, 0])
        out_rows[row, 1] = np.uint32(hashes[row, 1] & np.uint64(0xFFFFFFFF))
        out_rows[row, 2] = np.uint32(hashes[row, 1] >> np.uint64(32))
        out_rows[row, 3] = ordinals[row]


@kernel
def _flag_keys_in_hash_ranges(hashes: Hashes, range_count: int, first_range: int, part_range_count: int, out_flags: Flags) -> None:
    for row in range(len(hashes)):
        out_flags[row] = (
            first_range
            <= hash_range_number_of_row_first_word(np.uint64(nonzero_32_bit_tag_of_key_hash(hashes[row, 0])), range_count)
            < first_range + part_range_count
        )


@kernel
def mark_newest_row_of_each_key(
    key_set_table: HashTable, state: KeySetState, rows: KeyRows, first_row: int, range_count: int, range_number: int, out_bitmap: RowBitmap
) -> RowCount:
    """Set the bit of the newest row of each key, which is its first one because rows come newest first, and add the keys to the key set.
    Return ``len(rows)``, or the number of the first row for which the key set has no space.

    :param first_row: row to begin with, when the call continues an earlier one.
    :param range_count, range_number: only rows in range ``range_number`` of ``range_count`` equal ranges of the key hash are processed.
    :param out_bitmap: a bit for each row number (ordinal).
    """
    for row in range(first_row, len(rows)):
        if row + AHEAD < len(rows):
            prefetch(key_set_table, 3 * first_cell_to_probe(second_key_hash_half_of_row(rows, row + AHEAD), state[CAPACITY]))
        if hash_range_number_of_row_first_word(np.uint64(rows[row, 0]), range_count) == range_number:
            answer = put_key_if_absent(key_set_table, state, np.uint64(rows[row, 0]), second_key_hash_half_of_row(rows, row))
            if answer < 0:
                return row
            if answer == 1 and rows[row, 3] != SEEN:
                out_bitmap[rows[row, 3] >> 3] |= np.uint8(128 >> (rows[row, 3] & 7))
    return len(rows)


@kernel
def mark_rows_with_absent_keys(
    key_set_table: HashTable, state: KeySetState, rows: KeyRows, range_count: int, range_number: int, out_bitmap: RowBitmap
) -> None:
    """Set the bits of the rows whose key is not in the key set.

    :param range_count, range_number: only rows in range ``range_number`` of ``range_count`` equal ranges of the key hash are processed.
    :param out_bitmap: a bit for each row number (ordinal).
    """
    for row in range(len(rows)):
        if row + AHEAD < len(rows):
            prefetch(key_set_table, 3 * first_cell_to_probe(second_key_hash_half_of_row(rows, row + AHEAD), state[CAPACITY]))
        if hash_range_number_of_row_first_word(np.uint64(rows[row, 0]), range_count) == range_number and not is_key_in_table(
            key_set_table, state, np.uint64(rows[row, 0]), second_key_hash_half_of_row(rows, row)
        ):
            out_bitmap[rows[row, 3] >> 3] |= np.uint8(128 >> (rows[row, 3] & 7))
