"""The gate's own key table: for every key of some range of the gate's hash, its last committed record in the dirty range.

A *row* says of one record what the gate wants to know, and a cell of the table is the row of its key's last record. Three words: half of
the key's hash (0 marks an empty cell), the record's offset, and 30 more bits of the hash with a mark for expired tombstones and the digest.

A table holds the keys of one range of the hash: of all keys while they fit its memory, else of a range that fits (``halve_hash_range``).

What must be left of a segment is described by a count and a sum: how many records, and the sum of a pseudo-random word for each record
(``record_fingerprint``). DigestSumRows need no order, so that ranges of the keys can be checked one after the other, or on different
machines.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.row_spool import hash_range_number_of_row_first_word
from compactor.errors import OutOfBudget
from compactor.kernels.common import CellOrComplementOfEmptyCell, Hashes, HashKeyHalf, KeyHashHalf, RowCount
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import prefetch, upper_64_bits_of_product
from compactor.records.batches import Int64s

WORDS: Final = 3
GATE_ROW_BYTES: Final = 8 * WORDS
DUE: Final = np.uint64(1 << 62)
"""In a digest: a tombstone whose horizon has passed. The key has no record any more."""

ABSENT_KEY: Final = -1
_LOAD: Final = 0.7
_AHEAD: Final = 16
_KEY_BITS: Final = np.uint64((2**30 - 1) << 32)

GATE_KEY_BYTES: Final = 36
"""What a key takes in a table, with a little to spare."""

TABLE_ENTRIES, TABLE_CAPACITY, TABLE_LIMIT, RANGES, RANGE = range(5)
"""Indexes into a table's ``state``: keys held, cells, most keys, number of ranges of the hash, number of the range that is held."""

MAX_GATE_RANGES: Final = 2**62

Words = npt.NDArray[np.uint64]
LatestRecordCells = Words
RecordDigests = Words
Fingerprints = Words
LatestRecordTableState = Int64s
"""Numbers that describe a table; ``TABLE_ENTRIES`` and the names beside it are their indexes."""
LatestRecordRows = Words
"""Shape (n, 3)."""

FingerprintSumsBySegment = Words
"""Per segment: how many records must be left, and the sum of their fingerprints. Shape (segments, 2)."""


class LatestRecordTable:
    """Hash table of the gate (the independent check of a round). It holds the last record of each key whose hash lies in one range, and
    takes at most ``budget_bytes`` of memory.
    """

    def __init__(self, budget_bytes: int, max_record_count: int) -> None:
        """Create an empty table whose hash range contains all keys.

        :param budget_bytes: most bytes of memory.
        :param max_record_count: upper bound of the number of records that will be put.
        """
        self._most = max(8, budget_bytes // GATE_ROW_BYTES)
        self._cells: LatestRecordCells = np.zeros(WORDS * self._cell_count_for_rows(max_record_count), np.uint64)
        self._state = np.zeros(5, np.int64)
        self._set_cell_count_and_hash_range(len(self._cells) // WORDS, 1, 0)

    @property
    def key_count(self) -> int:
        """Return the number of keys in the table."""
        return int(self._state[TABLE_ENTRIES])

    @property
    def hash_range_count(self) -> int:
        """Return the number of ranges into which the hash is divided; the table holds the keys of one of them."""
        return int(self._state[RANGES])

    def reset_to_hash_range(self, max_record_count: int, hash_range_count: int, range_number: int) -> None:
        """Empty the table, and make it hold the keys of another hash range from now on.

        :param max_record_count: upper bound of the number of records that will be put.
        :param hash_range_count, range_number: the range is number ``range_number``, counted from 0, of ``hash_range_count`` equal ranges of
            the hash.
        """
        cells = self._cell_count_for_rows(max_record_count)
        if WORDS * cells > len(self._cells):
            self._cells = np.zeros(
                WORDS * self._cell_count_for_rows(max_record_count + max_record_count // 8), np.uint64
            )  # the next range may be a little larger
        else:
            self._cells[: WORDS * cells] = 0
        self._set_cell_count_and_hash_range(cells, hash_range_count, range_number)

    def put_rows_until_full(self, rows: LatestRecordRows) -> RowCount:
        """Add records in any order. Of several records with the same key, the one with the highest offset stays. Rows of other hash ranges
        are skipped. Return ``len(rows)``, or the number of the first row for which there is no space; the rows before it are added.
        """
        return int(_put_latest_record_rows(self._cells, self._state, rows))

    def halve_hash_range(self, hash_value_to_keep: int) -> None:
        """Halve the hash range that the table holds, and remove the keys outside it. Raises OutOfBudget if so many keys share one hash that
        no range is small enough.

        :param hash_value_to_keep: one of the 2^64 hash values; the half that contains it is kept.
        """
        ranges = 2 * self.hash_range_count
        if ranges > MAX_GATE_RANGES:
            raise OutOfBudget("more keys than the gate's memory holds share one hash", hint="Raise map_budget_bytes")
        self._state[RANGES], self._state[RANGE] = ranges, (hash_value_to_keep * ranges) >> 64
        _remove_keys_outside_table_hash_range(self._cells, self._state)

    def flag_keys_in_table_hash_range(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Return a flag per key: whether it belongs to the range that the table holds."""
        out = np.empty(len(hashes), np.bool_)
        _flag_hashes_in_table_range(self._state, hashes, out)
        return out

    def latest_offset_of_each_key(self, hashes: Hashes) -> Int64s:
        """Return the last offset of each key, or ABSENT_KEY where the table does not hold the key."""
        out = np.empty(len(hashes), np.int64)
        _find_latest_offset_of_each_key(self._cells, self._state, hashes, out)
        return out

    def add_fingerprint_sums_of_remaining_records(self, segment_base_offsets: Int64s, out_sums: FingerprintSumsBySegment) -> None:
        """Add the number and the sum of fingerprints of the table's records to the row of their segment in ``out_sums``. Left out are
        tombstones that are due for removal.

        :param segment_base_offsets: segment i has the offsets from ``segment_base_offsets[i]`` up to ``segment_base_offsets[i + 1]``
            (exclusive).
        """
        _add_fingerprint_sums_of_remaining_records(self._cells, int(self._state[TABLE_CAPACITY]), segment_base_offsets, out_sums)

    def add_expected_fingerprints_outside_dirty_range(
        self, rows: LatestRecordRows, segment_base_offsets: Int64s, out_sums: FingerprintSumsBySegment
    ) -> None:
        """Add the number and the sum of fingerprints of those given records that must remain to the row of their segment in ``out_sums``.
        These are the records whose key is not in the table. Records of other hash ranges are skipped.

        :param rows: records outside the dirty range.
        :param segment_base_offsets: segment i has the offsets from ``segment_base_offsets[i]`` up to ``segment_base_offsets[i + 1]``
            (exclusive).
        """
        _add_expected_sums_outside_dirty_range(self._cells, self._state, rows, segment_base_offsets, out_sums)

    def _cell_count_for_rows(self, row_count: int) -> int:
        """Return the number of cells for a table of ``row_count`` rows, or the most cells that the budget allows if that is less."""
        return max(8, min(self._most, int(row_count / _LOAD) + 64))

    def _set_cell_count_and_hash_range(self, cell_count: int, hash_range_count: int, range_number: int) -> None:
        self._state[:] = 0, cell_count, int(cell_count * _LOAD), hash_range_count, range_number


def pack_latest_record_rows(hashes: Hashes, offsets: Int64s, digests: RecordDigests) -> LatestRecordRows:
    """Return rows of the key table, packed from key hashes (shape (n, 2)), offsets and digests of records. In ``digests`` the flag DUE
    marks tombstones that are due for removal: their delete horizon has passed.
    """
    rows = np.empty((len(offsets), WORDS), np.uint64)
    _pack_latest_record_rows(hashes, offsets, digests, rows)
    return rows


def key_hashes_of_offsets(offsets: Int64s, k0: HashKeyHalf, k1: HashKeyHalf) -> Hashes:
    """Return key hashes, shape (n, 2), for records that are to count as the only ones of their keys. No two offsets have the same hash, and
    under the secret key ``k0``, ``k1`` none has the hash of a key but by chance.
    """
    words = offsets.astype(np.uint64)
    return np.column_stack((_mix_bijectively(words ^ k0), _mix_bijectively(words ^ k1)))


def _mix_bijectively(words: Words) -> Words:
    """Return pseudo-random words; different words stay different (the last step of MurmurHash3)."""
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def record_fingerprints(offsets: Int64s, digests: RecordDigests) -> Fingerprints:
    """Return the fingerprint of each record: 64 bits that depend on its offset and its content."""
    out = np.empty(len(offsets), np.uint64)
    _compute_fingerprints(offsets, digests, out)
    return out


@inline_kernel
def record_fingerprint(offset: np.uint64, digest: np.uint64) -> np.uint64:
    """Return 64 pseudo-random bits for a record and its offset. A sum of fingerprints identifies a set of records."""
    word = offset * np.uint64(0x9E3779B97F4A7C15) + (digest & np.uint64(2**32 - 1)) * np.uint64(0xD6E8FEB86659FD93)
    word = (word ^ (word >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(32))


@inline_kernel
def find_segment_number(offset: np.uint64, segment_base_offsets: Int64s) -> int:
    """Return the number of the segment that contains this offset: the last i with ``segment_base_offsets[i] <= offset``."""
    low, high = 0, len(segment_base_offsets) - 1
    while low + 1 < high:
        middle = (low + high) // 2
        if segment_base_offsets[middle] <= np.int64(offset):
            low = middle
        else:
            high = middle
    return low


@inline_kernel
def _nonzero_cell_tag_of_key_hash(h0: KeyHashHalf) -> np.uint64:
    """Return the half of a key hash that chooses the key's cell in the table, with 0 replaced by another value, because 0 marks an empty
    cell.
    """
    return h0 if h0 != 0 else np.uint64(1)


@inline_kernel
def _key_hash_bits_stored_in_row(h1: KeyHashHalf) -> np.uint64:
    """Return 30 further bits of a key's hash, as they are stored in a row's last word."""
    return (h1 & np.uint64(2**30 - 1)) << np.uint64(32)


@inline_kernel
def _find_key_cell_or_empty_cell_complement(
    cells: LatestRecordCells, capacity: int, cell_tag: np.uint64, further_key_bits: np.uint64
) -> CellOrComplementOfEmptyCell:
    """Return the cell of a key, or the bitwise complement of the empty cell where it would be stored.

    :param capacity: number of cells of the table.
    :param cell_tag: nonzero half of the key's hash, which determines where the search begins.
    :param further_key_bits: 30 bits of the other half, as ``_key_hash_bits_stored_in_row`` returns them.
    """
    cell = np.int64(upper_64_bits_of_product(cell_tag, np.uint64(capacity)))
    while cells[WORDS * cell] != 0:
        if cells[WORDS * cell] == cell_tag and (cells[WORDS * cell + 2] & _KEY_BITS) == further_key_bits:
            return cell
        cell = cell + 1 if cell + 1 < capacity else 0
    return ~cell


@inline_kernel
def _is_hash_in_table_range(state: LatestRecordTableState, cell_tag: np.uint64) -> bool:
    """Return whether a key belongs to the range that the table holds."""
    return state[RANGES] == 1 or hash_range_number_of_row_first_word(cell_tag, state[RANGES]) == state[RANGE]


@inline_kernel
def _prefetch_cell_of_row(cells: LatestRecordCells, capacity: int, rows: LatestRecordRows, row: int) -> None:
    """Load the table cell of a row that will be processed soon into the processor cache. Rows of other hash ranges are not excluded,
    because the branch would cost more than it saves.
    """
    if row + _AHEAD < len(rows):
        prefetch(
            cells, WORDS * np.int64(upper_64_bits_of_product(_nonzero_cell_tag_of_key_hash(rows[row + _AHEAD, 0]), np.uint64(capacity)))
        )


@kernel
def _pack_latest_record_rows(hashes: Hashes, offsets: Int64s, digests: RecordDigests, out_rows: LatestRecordRows) -> None:
    for row in range(len(offsets)):
        out_rows[row, 0] = _nonzero_cell_tag_of_key_hash(hashes[row, 0])
        out_rows[row, 1] = np.uint64(offsets[row])
        out_rows[row, 2] = digests[row] | _key_hash_bits_stored_in_row(hashes[row, 1])


@kernel
def _compute_fingerprints(offsets: Int64s, digests: RecordDigests, out_fingerprints: Fingerprints) -> None:
    for row in range(len(offsets)):
        out_fingerprints[row] = record_fingerprint(np.uint64(offsets[row]), digests[row])


@kernel
def _flag_hashes_in_table_range(state: LatestRecordTableState, hashes: Hashes, out_flags: npt.NDArray[np.bool_]) -> None:
    for row in range(len(hashes)):
        out_flags[row] = _is_hash_in_table_range(state, _nonzero_cell_tag_of_key_hash(hashes[row, 0]))


@kernel
def _remove_keys_outside_table_hash_range(cells: LatestRecordCells, state: LatestRecordTableState) -> None:
    """Remove, in place, the keys whose hash lies outside the range that the table holds. Every key that stays moves to the first empty
    cell at or after its home (the cell where a search for it begins), so that searches still find it. The loop starts after an empty
    cell, because no search passes one.
    """
    capacity, empty = state[TABLE_CAPACITY], 0
    while cells[WORDS * empty] != 0:
        empty += 1
    state[TABLE_ENTRIES] = 0
    for step in range(1, capacity):
        cell = empty + step if empty + step < capacity else empty + step - capacity
        tag, offset, rest = cells[WORDS * cell], cells[WORDS * cell + 1], cells[WORDS * cell + 2]
        if tag == 0:
            continue
        cells[WORDS * cell] = 0
        if _is_hash_in_table_range(state, tag):
            cell = ~_find_key_cell_or_empty_cell_complement(cells, capacity, tag, rest & _KEY_BITS)
            cells[WORDS * cell], cells[WORDS * cell + 1], cells[WORDS * cell + 2] = tag, offset, rest
            state[TABLE_ENTRIES] += 1


@kernel
def _put_latest_record_rows(cells: LatestRecordCells, state: LatestRecordTableState, rows: LatestRecordRows) -> RowCount:
    capacity = state[TABLE_CAPACITY]
    for row in range(len(rows)):
        _prefetch_cell_of_row(cells, state[TABLE_CAPACITY], rows, row)
        if not _is_hash_in_table_range(state, rows[row, 0]):
            continue
        cell = _find_key_cell_or_empty_cell_complement(cells, capacity, rows[row, 0], rows[row, 2] & _KEY_BITS)
        if cell < 0:
            if state[TABLE_ENTRIES] >= state[TABLE_LIMIT]:
                return row
            state[TABLE_ENTRIES] += 1
            cell = ~cell
        elif np.int64(cells[WORDS * cell + 1]) >= np.int64(rows[row, 1]):
            continue
        for word in range(WORDS):
            cells[WORDS * cell + word] = rows[row, word]
    return len(rows)


@kernel
def _find_latest_offset_of_each_key(cells: LatestRecordCells, state: LatestRecordTableState, hashes: Hashes, out_offsets: Int64s) -> None:
    for row in range(len(hashes)):
        _prefetch_cell_of_row(cells, state[TABLE_CAPACITY], hashes, row)
        tag = _nonzero_cell_tag_of_key_hash(hashes[row, 0])
        cell = (
            _find_key_cell_or_empty_cell_complement(cells, state[TABLE_CAPACITY], tag, _key_hash_bits_stored_in_row(hashes[row, 1]))
            if _is_hash_in_table_range(state, tag)
            else -1
        )
        out_offsets[row] = np.int64(cells[WORDS * cell + 1]) if cell >= 0 else ABSENT_KEY


@kernel
def _add_fingerprint_sums_of_remaining_records(
    cells: LatestRecordCells, capacity: int, segment_base_offsets: Int64s, out_sums: FingerprintSumsBySegment
) -> None:
    for cell in range(capacity):
        if cells[WORDS * cell] != 0 and cells[WORDS * cell + 2] & DUE == 0:
            segment = find_segment_number(cells[WORDS * cell + 1], segment_base_offsets)
            out_sums[segment, 0] += np.uint64(1)
            out_sums[segment, 1] += record_fingerprint(cells[WORDS * cell + 1], cells[WORDS * cell + 2])


@kernel
def _add_expected_sums_outside_dirty_range(
    cells: LatestRecordCells,
    state: LatestRecordTableState,
    rows: LatestRecordRows,
    segment_base_offsets: Int64s,
    out_sums: FingerprintSumsBySegment,
) -> None:
    for row in range(len(rows)):
        _prefetch_cell_of_row(cells, state[TABLE_CAPACITY], rows, row)
        if not _is_hash_in_table_range(state, rows[row, 0]):
            continue
        if _find_key_cell_or_empty_cell_complement(cells, state[TABLE_CAPACITY], rows[row, 0], rows[row, 2] & _KEY_BITS) < 0:
            segment = find_segment_number(rows[row, 1], segment_base_offsets)
            out_sums[segment, 0] += np.uint64(1)
            out_sums[segment, 1] += record_fingerprint(rows[row, 1], rows[row, 2])


def allocate_zero_fingerprint_sums(segment_count: int) -> FingerprintSumsBySegment:
    """Return an array for the record counts and fingerprint sums of ``segment_count`` segments, all zero."""
    return np.zeros((segment_count, 2), np.uint64)
