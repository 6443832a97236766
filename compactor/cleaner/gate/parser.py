"""The gate's own parser of batch headers and records, independent of the cleaner's.

It shares libraries with the cleaner: codecs, CRC-32C, SipHash and the names of the header's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import crc32c as checksums
import numpy as np
import numpy.typing as npt

from bloom.filter import siphash128
from compactor.cleaner.disk_map import hash_range_of_word
from compactor.constants import MAX_OFFSET
from compactor.errors import OutOfBudget
from compactor.kernels.common import FirstRowByBatch, Hashes, HashKeyHalf, KeyHashHalf, ValueAndNextPosition
from compactor.kernels.crc import START, crc32c, extend, extend_word
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import high_product_word, prefetch, prefetch_read
from compactor.records import codecs
from compactor.records.batches import (
    ABORT,
    CODEC_MASK,
    COMMIT,
    CONTROL,
    EMPTIED,
    LOG_APPEND,
    MALFORMED,
    NOT_CONTROL,
    OTHER,
    PACKED,
    Bytes,
    Int64s,
)
from compactor.records.bulk import BatchUnreadableError, decompress_batch_bodies
from compactor.records.encode import reencode_as_java_utf8

# The gate's own key table: for every key of some range of the gate's hash, its last committed record in the dirty range.
#
# A *row* says of one record what the gate wants to know, and a cell of the table is the row of its key's last record. Three words: half of
# the key's hash (0 marks an empty cell), the record's offset, and 30 more bits of the hash with a mark for expired tombstones and the
# digest.
#
# A table holds the keys of one range of the hash: of all keys while they fit its memory, else of a range that fits (``halve_hash_range``).
#
# What must be left of a segment is described by a count and a sum: how many records, and the sum of a pseudo-random word for each record
# (``record_fingerprint``). DigestSumRows need no order, so that ranges of the keys can be checked one after the other, or on different
# machines.


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
    """Hash table of the last record of each key whose hash lies in one range, in at most ``budget_bytes``."""

    def __init__(self, budget_bytes: int, max_record_count: int) -> None:
        """The range first contains all keys. ``max_record_count`` is an upper bound of the records that will be put."""
        self._most = max(8, budget_bytes // GATE_ROW_BYTES)
        self._cells: LatestRecordCells = np.zeros(WORDS * self._cell_count_for_rows(max_record_count), np.uint64)
        self._state = np.zeros(5, np.int64)
        self._set_range(len(self._cells) // WORDS, 1, 0)

    @property
    def key_count(self) -> int:
        return int(self._state[TABLE_ENTRIES])

    @property
    def hash_range_count(self) -> int:
        return int(self._state[RANGES])

    def reset_to_hash_range(self, max_record_count: int, hash_range_count: int, range_number: int) -> None:
        """Ranges are equal and counted from 0."""
        cells = self._cell_count_for_rows(max_record_count)
        if WORDS * cells > len(self._cells):
            self._cells = np.zeros(
                WORDS * self._cell_count_for_rows(max_record_count + max_record_count // 8), np.uint64
            )  # the next range may be a little larger
        else:
            self._cells[: WORDS * cells] = 0
        self._set_range(cells, hash_range_count, range_number)

    def put_rows_until_full(self, rows: LatestRecordRows) -> int:
        """The highest offset of a key stays. Rows of other ranges are skipped. Return ``len(rows)``, or the first row for which there is no
        space.
        """
        return int(_put_latest_record_rows(self._cells, self._state, rows))

    def halve_hash_range(self, hash_value_to_keep: int) -> None:
        """Raises OutOfBudget if no range is small enough.
        :param hash_value_to_keep: one of 2^64 values, in the half that is kept.
        """
        ranges = 2 * self.hash_range_count
        if ranges > MAX_GATE_RANGES:
            raise OutOfBudget("more keys than the gate's memory holds share one hash", hint="Raise map_budget_bytes")
        self._state[RANGES], self._state[RANGE] = ranges, (hash_value_to_keep * ranges) >> 64
        _remove_outside_range(self._cells, self._state)

    def flag_keys_in_range(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        out = np.empty(len(hashes), np.bool_)
        _flag_in_range(self._state, hashes, out)
        return out

    def latest_offsets(self, hashes: Hashes) -> Int64s:
        """The last offset of each key, or ABSENT_KEY."""
        out = np.empty(len(hashes), np.int64)
        _find_latest_offsets(self._cells, self._state, hashes, out)
        return out

    def add_remaining_sums(self, segment_base_offsets: Int64s, out_sums: FingerprintSumsBySegment) -> None:
        """Add the table's records, without due tombstones, to the row of their segment.
        :param segment_base_offsets: segment i has the offsets [segment_base_offsets[i], segment_base_offsets[i + 1]).
        """
        _add_remaining_sums(self._cells, int(self._state[TABLE_CAPACITY]), segment_base_offsets, out_sums)

    def add_outside_sums(self, rows: LatestRecordRows, segment_base_offsets: Int64s, out_sums: FingerprintSumsBySegment) -> None:
        """Add the records outside the dirty range that must remain, because their key is not in the table.
        Rows of other ranges are skipped.
        """
        _add_outside_sums(self._cells, self._state, rows, segment_base_offsets, out_sums)

    def _cell_count_for_rows(self, row_count: int) -> int:
        return max(8, min(self._most, int(row_count / _LOAD) + 64))

    def _set_range(self, cell_count: int, hash_range_count: int, range_number: int) -> None:
        self._state[:] = 0, cell_count, int(cell_count * _LOAD), hash_range_count, range_number


def pack_latest_record_rows(hashes: Hashes, offsets: Int64s, digests: RecordDigests) -> LatestRecordRows:
    """In ``digests`` the flag DUE marks tombstones whose delete horizon has passed."""
    rows = np.empty((len(offsets), WORDS), np.uint64)
    _pack_latest_record_rows(hashes, offsets, digests, rows)
    return rows


def key_hashes_of_offsets(offsets: Int64s, k0: HashKeyHalf, k1: HashKeyHalf) -> Hashes:
    """Hashes, shape (n, 2), for records that are to count as the only ones of their keys. No two offsets have the same hash, and none that
    of a key but by chance.
    """
    words = offsets.astype(np.uint64)
    return np.column_stack((_mix_bijectively(words ^ k0), _mix_bijectively(words ^ k1)))


def _mix_bijectively(words: Words) -> Words:
    """Different words stay different (the last step of MurmurHash3)."""
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    words = (words ^ (words >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return words ^ (words >> np.uint64(33))


def record_fingerprints(offsets: Int64s, digests: RecordDigests) -> Fingerprints:
    out = np.empty(len(offsets), np.uint64)
    _compute_fingerprints(offsets, digests, out)
    return out


@inline_kernel
def record_fingerprint(offset: np.uint64, digest: np.uint64) -> np.uint64:
    """64 pseudo-random bits; a sum of them identifies a set of records."""
    word = offset * np.uint64(0x9E3779B97F4A7C15) + (digest & np.uint64(2**32 - 1)) * np.uint64(0xD6E8FEB86659FD93)
    word = (word ^ (word >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(32))


@inline_kernel
def find_segment_number(offset: np.uint64, segment_base_offsets: Int64s) -> int:
    """The last i with ``segment_base_offsets[i] <= offset``."""
    low, high = 0, len(segment_base_offsets) - 1
    while low + 1 < high:
        middle = (low + high) // 2
        if segment_base_offsets[middle] <= np.int64(offset):
            low = middle
        else:
            high = middle
    return low


@inline_kernel
def _cell_tag(h0: KeyHashHalf) -> np.uint64:
    return h0 if h0 != 0 else np.uint64(1)


@inline_kernel
def _further_key_bits(h1: KeyHashHalf) -> np.uint64:
    return (h1 & np.uint64(2**30 - 1)) << np.uint64(32)


@inline_kernel
def _find_cell(cells: LatestRecordCells, capacity: int, cell_tag: np.uint64, further_key_bits: np.uint64) -> int:
    cell = np.int64(high_product_word(cell_tag, np.uint64(capacity)))
    while cells[WORDS * cell] != 0:
        if cells[WORDS * cell] == cell_tag and (cells[WORDS * cell + 2] & _KEY_BITS) == further_key_bits:
            return cell
        cell = cell + 1 if cell + 1 < capacity else 0
    return ~cell


@inline_kernel
def _is_in_range(state: LatestRecordTableState, cell_tag: np.uint64) -> bool:
    return state[RANGES] == 1 or hash_range_of_word(cell_tag, state[RANGES]) == state[RANGE]


@inline_kernel
def _prefetch_cell_of_row(cells: LatestRecordCells, capacity: int, rows: LatestRecordRows, row: int) -> None:
    """Rows of other hash ranges are not excluded, because the branch costs more than it saves."""
    if row + _AHEAD < len(rows):
        prefetch(cells, WORDS * np.int64(high_product_word(_cell_tag(rows[row + _AHEAD, 0]), np.uint64(capacity))))


@kernel
def _pack_latest_record_rows(hashes: Hashes, offsets: Int64s, digests: RecordDigests, out_rows: LatestRecordRows) -> None:
    for row in range(len(offsets)):
        out_rows[row, 0] = _cell_tag(hashes[row, 0])
        out_rows[row, 1] = np.uint64(offsets[row])
        out_rows[row, 2] = digests[row] | _further_key_bits(hashes[row, 1])


@kernel
def _compute_fingerprints(offsets: Int64s, digests: RecordDigests, out_fingerprints: Fingerprints) -> None:
    for row in range(len(offsets)):
        out_fingerprints[row] = record_fingerprint(np.uint64(offsets[row]), digests[row])


@kernel
def _flag_in_range(state: LatestRecordTableState, hashes: Hashes, out_flags: npt.NDArray[np.bool_]) -> None:
    for row in range(len(hashes)):
        out_flags[row] = _is_in_range(state, _cell_tag(hashes[row, 0]))


@kernel
def _remove_outside_range(cells: LatestRecordCells, state: LatestRecordTableState) -> None:
    """Every key that stays moves to the first empty cell at or after its home, so that searches find it. The loop starts after an empty
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
        if _is_in_range(state, tag):
            cell = ~_find_cell(cells, capacity, tag, rest & _KEY_BITS)
            cells[WORDS * cell], cells[WORDS * cell + 1], cells[WORDS * cell + 2] = tag, offset, rest
            state[TABLE_ENTRIES] += 1


@kernel
def _put_latest_record_rows(cells: LatestRecordCells, state: LatestRecordTableState, rows: LatestRecordRows) -> int:
    capacity = state[TABLE_CAPACITY]
    for row in range(len(rows)):
        _prefetch_cell_of_row(cells, state[TABLE_CAPACITY], rows, row)
        if not _is_in_range(state, rows[row, 0]):
            continue
        cell = _find_cell(cells, capacity, rows[row, 0], rows[row, 2] & _KEY_BITS)
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
def _find_latest_offsets(cells: LatestRecordCells, state: LatestRecordTableState, hashes: Hashes, out_offsets: Int64s) -> None:
    for row in range(len(hashes)):
        _prefetch_cell_of_row(cells, state[TABLE_CAPACITY], hashes, row)
        tag = _cell_tag(hashes[row, 0])
        cell = _find_cell(cells, state[TABLE_CAPACITY], tag, _further_key_bits(hashes[row, 1])) if _is_in_range(state, tag) else -1
        out_offsets[row] = np.int64(cells[WORDS * cell + 1]) if cell >= 0 else ABSENT_KEY


@kernel
def _add_remaining_sums(cells: LatestRecordCells, capacity: int, segment_base_offsets: Int64s, out_sums: FingerprintSumsBySegment) -> None:
    for cell in range(capacity):
        if cells[WORDS * cell] != 0 and cells[WORDS * cell + 2] & DUE == 0:
            segment = find_segment_number(cells[WORDS * cell + 1], segment_base_offsets)
            out_sums[segment, 0] += np.uint64(1)
            out_sums[segment, 1] += record_fingerprint(cells[WORDS * cell + 1], cells[WORDS * cell + 2])


@kernel
def _add_outside_sums(
    cells: LatestRecordCells,
    state: LatestRecordTableState,
    rows: LatestRecordRows,
    segment_base_offsets: Int64s,
    out_sums: FingerprintSumsBySegment,
) -> None:
    for row in range(len(rows)):
        _prefetch_cell_of_row(cells, state[TABLE_CAPACITY], rows, row)
        if not _is_in_range(state, rows[row, 0]):
            continue
        if _find_cell(cells, state[TABLE_CAPACITY], rows[row, 0], rows[row, 2] & _KEY_BITS) < 0:
            segment = find_segment_number(rows[row, 1], segment_base_offsets)
            out_sums[segment, 0] += np.uint64(1)
            out_sums[segment, 1] += record_fingerprint(rows[row, 1], rows[row, 2])


def allocate_zero_fingerprint_sums(segment_count: int) -> FingerprintSumsBySegment:
    return np.zeros((segment_count, 2), np.uint64)


HeaderFields = npt.NDArray[np.int64]
"""One column per batch; the rows, fields of a batch, are named below."""

(
    POSITION, SIZE, BASE, LAST, BASE_TIMESTAMP, MAX_TIMESTAMP, PRODUCER_ID, MAGIC, ATTRIBUTES, LEADER_EPOCH, PRODUCER_EPOCH, BASE_SEQUENCE,
    COUNT, CONTROL_KIND, COORDINATOR_EPOCH, STORED_CRC,
) = FIELDS = range(16)  # fmt: skip

_MOST_BYTES: Final = 1 << 26
_CHUNK: Final = 1 << 21
KEYLESS_RECORD: Final = 1
NULL_VALUE: Final = 2
ODD_NAMES: Final = 4  # a header name that is not ASCII: Java may write other bytes for it
ODD_ATTRIBUTES: Final = 8  # unused bits, which only a copy keeps


HeaderParseResult = tuple[int, int, bool]
"""Number of parsed batches, byte position after the last one, and whether all headers were valid."""
ControlKindAndEpoch = tuple[int, int]
"""Kind of a control batch, and the coordinator epoch of its marker (-1 for none)."""


class UnreadableBatchesError(Exception):
    pass


class InflatedTooLargeError(Exception):
    """Raised if several batches together inflate to more bytes than may be held at once."""


@dataclass(frozen=True, slots=True)
class GateRecords:
    """One row per record.
    first_row: of each batch; one more entry than batches.
    hashes: shape (n, 2); zeros for a record without a key.
    digest: checksum of everything but the offset.
    """

    first_row: FirstRowByBatch
    offset: Int64s
    timestamp: Int64s
    hashes: npt.NDArray[np.uint64]
    digest: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint8]
    key_start: Int64s
    key_length: Int64s
    buf: Bytes

    def key_of_row(self, row: int) -> bytes | None:
        start, length = int(self.key_start[row]), int(self.key_length[row])
        return None if length < 0 else self.buf[start : start + length].tobytes()


# ---- headers ----------------------------------------------------------------------------------------------------------------


_BLOCK: Final = 1 << 15


def iterate_batch_header_blocks(buf: Bytes) -> Iterator[HeaderFields]:
    """Yield blocks of some thousand headers, each valid until the next one is requested. Raises UnreadableBatchesError."""
    headers, row = np.empty((len(FIELDS), _BLOCK), np.int64), np.empty(len(FIELDS), np.int64)
    at = 0
    while at < len(buf):
        count, at, fine = _parse_header_block(buf, at, headers, row)
        if not fine:
            raise UnreadableBatchesError(f"position {at}: a header that makes no sense")
        if not count:
            raise UnreadableBatchesError(f"position {at}: {len(buf) - at} bytes that are no whole batch")
        yield headers[:, :count]


def read_all_batch_headers(buf: Bytes) -> HeaderFields:
    """Raises UnreadableBatchesError."""
    return np.concatenate([np.empty((len(FIELDS), 0), np.int64), *(block.copy() for block in iterate_batch_header_blocks(buf))], axis=1)


def find_crc_mismatch(buf: Bytes, headers: HeaderFields) -> int:
    """The first v2 batch whose CRC does not match, or -1."""
    return int(_first_crc_mismatch(buf, np.ascontiguousarray(headers)))


@inline_kernel
def _read_big_endian(buf: Bytes, position: int, byte_count: int) -> int:
    value = np.int64(np.int8(buf[position]))
    for i in range(position + 1, position + byte_count):
        value = (value << 8) | np.int64(buf[i])
    return value


@inline_kernel
def parse_varint(buf: Bytes, position: int, end: int) -> ValueAndNextPosition:
    """The next position is beyond ``end`` if the number does not end before it."""
    if position < end and buf[position] < 128:
        low = np.int64(buf[position])
        return (low >> 1) ^ -(low & 1), position + 1
    value = np.uint64(0)
    shift = np.uint64(0)
    while position < end and shift < np.uint64(64):
        byte = np.uint64(buf[position])
        position += 1
        value |= (byte & np.uint64(127)) << shift
        shift += np.uint64(7)
        if byte < np.uint64(128):
            return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1)), position
    return np.int64(0), end + 1


@kernel
def _parse_header_block(buf: Bytes, position: int, out_headers: HeaderFields, row: Int64s) -> HeaderParseResult:
    """The number of batches, the position after them, and False if an invalid header follows.
    :param row: memory for the fields of one header.
    """
    count = 0
    while count < out_headers.shape[1] and position + 26 <= buf.size:
        size = 12 + _read_big_endian(buf, position + 8, 4)
        magic = np.int64(buf[position + 16])
        if magic > 2 or size < (61 if magic == 2 else 26) or position + size > buf.size:
            break
        row[POSITION], row[SIZE], row[MAGIC] = position, size, magic
        row[CONTROL_KIND], row[COORDINATOR_EPOCH] = NOT_CONTROL, -1
        row[BASE] = _read_big_endian(buf, position, 8)
        if magic == 2:
            row[LEADER_EPOCH] = _read_big_endian(buf, position + 12, 4)
            row[STORED_CRC] = _read_big_endian(buf, position + 17, 4) & 0xFFFFFFFF
            row[ATTRIBUTES] = _read_big_endian(buf, position + 21, 2)
            row[LAST] = row[BASE] + _read_big_endian(buf, position + 23, 4)
            row[BASE_TIMESTAMP] = _read_big_endian(buf, position + 27, 8)
            row[MAX_TIMESTAMP] = _read_big_endian(buf, position + 35, 8)
            row[PRODUCER_ID] = _read_big_endian(buf, position + 43, 8)
            row[PRODUCER_EPOCH] = _read_big_endian(buf, position + 51, 2)
            row[BASE_SEQUENCE] = _read_big_endian(buf, position + 53, 4)
            row[COUNT] = _read_big_endian(buf, position + 57, 4)
            if row[ATTRIBUTES] & CONTROL:
                row[CONTROL_KIND], row[COORDINATOR_EPOCH] = _parse_marker(buf, row)
            if row[BASE] < 0 or row[LAST] < row[BASE] or row[COUNT] < 0:
                return count, position, False
        else:
            codec = np.int64(buf[position + 17]) & CODEC_MASK
            row[ATTRIBUTES] = codec | (np.int64(buf[position + 17]) & LOG_APPEND if magic == 1 else 0)
            row[STORED_CRC] = _read_big_endian(buf, position + 12, 4) & 0xFFFFFFFF
            row[LAST] = row[BASE]
            row[BASE] = -1 if codec else row[BASE]
            row[COUNT] = 0 if codec else 1
            row[BASE_TIMESTAMP] = row[MAX_TIMESTAMP] = _read_big_endian(buf, position + 18, 8) if magic == 1 else -1
            row[LEADER_EPOCH], row[PRODUCER_ID], row[PRODUCER_EPOCH], row[BASE_SEQUENCE] = -1, -1, -1, -1
        for field in range(row.size):
            out_headers[field, count] = row[field]
        count += 1
        position += size
    return count, position, True


@inline_kernel
def _parse_marker(buf: Bytes, header: Int64s) -> ControlKindAndEpoch:
    """ABORT, COMMIT, OTHER, EMPTIED, PACKED or MALFORMED, and the coordinator epoch or -1."""
    if header[ATTRIBUTES] & CODEC_MASK:
        return PACKED, -1
    if header[COUNT] == 0:
        return EMPTIED, -1
    end = header[POSITION] + header[SIZE]
    _, at = parse_varint(buf, header[POSITION] + 61, end)
    _, at = parse_varint(buf, at + 1, end)
    _, at = parse_varint(buf, at, end)
    length, at = parse_varint(buf, at, end)
    if length < 4 or length > end - at:
        return MALFORMED, -1
    kind = _read_big_endian(buf, at + 2, 2)
    if kind not in (ABORT, COMMIT):
        return OTHER, -1
    length, at = parse_varint(buf, at + length, end)
    return kind, _read_big_endian(buf, at + 2, 4) if length >= 6 and at + 6 <= end else -1


@kernel
def _first_crc_mismatch(buf: Bytes, headers: HeaderFields) -> int:
    for i in range(headers.shape[1]):
        begin = headers[POSITION, i]
        if headers[MAGIC, i] == 2 and crc32c(buf, begin + 21, begin + headers[SIZE, i]) != headers[STORED_CRC, i]:
            return i
    return -1


# ---- records ----------------------------------------------------------------------------------------------------------------


class GateRecordParser:
    """Parser whose records are valid until the next call."""

    def __init__(self, k0: HashKeyHalf, k1: HashKeyHalf, inflate_limit: int) -> None:
        self.on_records: Callable[[HeaderFields, GateRecords], None] | None = None
        """Function that receives the headers and records of every ``parse_records_of_batches``; None for none."""
        self._key = (k0, k1)
        self._limit = inflate_limit
        self._bodies = codecs.GrowingByteBuffer()
        self._columns = _allocate_record_columns(1 << 14)

    def parse_records_of_batches(self, buf: Bytes, headers: HeaderFields) -> GateRecords:
        """Raises UnreadableBatchesError, and InflatedTooLargeError if several batches together inflate to too many bytes."""
        body = np.empty((2, headers.shape[1]), np.int64)
        if not np.any(headers[ATTRIBUTES] & CODEC_MASK):
            body[0] = headers[POSITION] + np.where(headers[MAGIC] == 2, 61, 0)
            body[1] = headers[POSITION] + headers[SIZE]
        else:
            self._inflate_bodies(buf, headers, body)
            buf = self._bodies.array[: self._bodies.size]
            buf.flags.writeable = False
        records = self.parse_inflated_bodies(buf, headers, body)
        if self.on_records is not None:
            self.on_records(headers, records)
        return records

    def parse_inflated_bodies(self, buf: Bytes, headers: HeaderFields, body_bounds: Int64s) -> GateRecords:
        """Inflated bodies lie at ``buf[body_bounds[0, i]:body_bounds[1, i]]``. Raises UnreadableBatchesError."""
        headers = np.ascontiguousarray(headers)
        counts = headers[COUNT].copy()
        _count_records_of_wrappers(buf, headers, body_bounds, counts)
        if np.any(counts * 7 > body_bounds[1] - body_bounds[0]):
            raise UnreadableBatchesError("a batch that claims more records than its bytes can hold")
        first_row = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        rows = int(first_row[-1])
        if rows > len(self._columns[0]):
            self._columns = _allocate_record_columns(max(rows, 2 * len(self._columns[0])))
        offset, timestamp, hashes, digest, flags, key_start, key_length = (column[:rows] for column in self._columns)
        batch = _parse_records_into_columns(
            buf, headers, body_bounds, first_row, *self._key, offset, timestamp, hashes, digest, flags, key_start, key_length
        )  # fmt: skip
        records = GateRecords(first_row, offset, timestamp, hashes, digest, flags, key_start, key_length, buf)
        if batch >= 0:
            raise UnreadableBatchesError(f"offset {headers[LAST, batch]}: records that cannot be read")
        for row in np.flatnonzero(records.flags & ODD_NAMES).tolist():
            records.digest[row] = _reencoded_digest(records, row)
        return records

    def _inflate_bodies(self, buf: Bytes, headers: HeaderFields, out_body_bounds: Int64s) -> None:
        """Set begin (first row) and end (second row, exclusive) of each body."""
        position, magic, codec = headers[POSITION], headers[MAGIC], (headers[ATTRIBUTES] & CODEC_MASK).astype(np.int16)
        # A wrapper has a header of its own, its null key and the length of its value before the value.
        start = position + np.where(magic == 2, 61, np.where(codec != 0, 26 + 8 * magic, 0))
        everything = np.ones(len(position), np.bool_)
        self._bodies.clear()
        try:
            ends = decompress_batch_bodies(
                buf, codec, start, position + headers[SIZE], everything, self._bodies, self._limit,
                _MOST_BYTES if len(position) > 1 else MAX_OFFSET, magic,
            )  # fmt: skip
        except BatchUnreadableError as error:
            raise UnreadableBatchesError(f"position {position[error.batch]}: {error}") from None
        if len(position) > 1 and self._bodies.size > _MOST_BYTES:
            raise InflatedTooLargeError
        out_body_bounds[0] = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        out_body_bounds[1] = ends


def split_into_chunks(headers: HeaderFields, selected_flags: npt.NDArray[np.bool_]) -> Iterator[Int64s]:
    """Chunks are of bounded size, either all compressed or all uncompressed."""
    batches = np.flatnonzero(selected_flags)
    if not len(batches):
        return
    packed = (headers[ATTRIBUTES, batches] & CODEC_MASK != 0).astype(np.int8)
    chunk = np.cumsum(headers[SIZE, batches]) // _CHUNK
    cuts = np.flatnonzero((np.diff(packed) != 0) | (np.diff(chunk) != 0)) + 1
    yield from np.split(batches, cuts)


def _allocate_record_columns(record_count: int) -> tuple[npt.NDArray[Any], ...]:
    return (
        np.empty(record_count, np.int64), np.empty(record_count, np.int64), np.empty((record_count, 2), np.uint64),
        np.empty(record_count, np.uint64), np.empty(record_count, np.uint8), np.empty(record_count, np.int64),
        np.empty(record_count, np.int64),
    )  # fmt: skip


@kernel
def _count_records_of_wrappers(buf: Bytes, headers: HeaderFields, body_bounds: Int64s, out_counts: Int64s) -> None:
    """Messages in v0/v1 wrappers are counted, because a wrapper's header does not state their number."""
    for batch in range(out_counts.size):
        if headers[MAGIC, batch] < 2 and headers[ATTRIBUTES, batch] & CODEC_MASK:
            out_counts[batch] = 0
            at = body_bounds[0, batch]
            while at + 12 <= body_bounds[1, batch]:
                size = 12 + _read_big_endian(buf, at + 8, 4)
                if size < 26 or at + size > body_bounds[1, batch]:
                    break
                out_counts[batch] += 1
                at += size


@inline_kernel
def _extend_digest_by_field(digest_state: np.uint64, buf: Bytes, start: int, length: int) -> np.uint64:
    digest_state = extend_word(digest_state, np.uint64(length))
    return extend(digest_state, buf, start, start + length) if length > 0 else digest_state


@kernel
def _parse_records_into_columns(
    buf: Bytes, headers: HeaderFields, bounds: Int64s, first_row: FirstRowByBatch, k0: HashKeyHalf, k1: HashKeyHalf, offset: Int64s,
    timestamp: Int64s, hashes: npt.NDArray[np.uint64], digest: npt.NDArray[np.uint64], flags: npt.NDArray[np.uint8], key_start: Int64s,
    key_length: Int64s,
) -> int:  # fmt: skip
    """The first batch that cannot be parsed, or -1."""
    for batch in range(headers.shape[1]):
        at, limit = bounds[0, batch], bounds[1, batch]
        magic = headers[MAGIC, batch]
        appended = (headers[ATTRIBUTES, batch] & LOG_APPEND) != 0
        begin, end = first_row[batch], first_row[batch + 1]
        for row in range(begin, end):
            flags[row] = 0
            if magic == 2:
                start = at
                length, at = parse_varint(buf, at, limit)
                if at > limit or length < 1 or length > limit - at:
                    return batch
                stop = at + length
                prefetch_read(buf, stop + 2 * (stop - start))
                if buf[at] != 0:
                    flags[row] = ODD_ATTRIBUTES
                delta, at = parse_varint(buf, at + 1, stop)
                timestamp[row] = headers[MAX_TIMESTAMP, batch] if appended else headers[BASE_TIMESTAMP, batch] + delta
                delta, at = parse_varint(buf, at, stop)
                offset[row] = headers[BASE, batch] + delta
                klen, kstart = parse_varint(buf, at, stop)
                if klen > stop - kstart:
                    return batch
                vlen, vstart = parse_varint(buf, kstart + max(klen, 0), stop)
                if vlen > stop - vstart:
                    return batch
                names, at = parse_varint(buf, vstart + max(vlen, 0), stop)
                if at > stop or names < 0 or names > stop - at:
                    return batch
            else:
                # offset:8 size:4 crc:4 magic:1 attributes:1 [timestamp:8] keyLength:4 key valueLength:4 value
                stop = at + 12 + _read_big_endian(buf, at + 8, 4)
                inner = np.int64(buf[at + 16])
                if inner > 1 or stop - at < 26 + 8 * inner:
                    return batch
                offset[row] = _read_big_endian(buf, at, 8)
                timestamp[row] = (
                    headers[MAX_TIMESTAMP, batch] if appended else _read_big_endian(buf, at + 18, 8) if inner == 1 else np.int64(-1)
                )
                kstart = at + 22 + 8 * inner
                klen = _read_big_endian(buf, kstart - 4, 4)
                vstart = kstart + max(klen, 0) + 4
                if vstart > stop:
                    return batch
                vlen = _read_big_endian(buf, vstart - 4, 4)
                if vstart + max(vlen, 0) > stop:
                    return batch
                names = np.int64(0)
                at = stop
            key_start[row], key_length[row] = kstart, max(klen, -1)
            state = extend_word(START, np.uint64(timestamp[row]))
            state = _extend_digest_by_field(state, buf, kstart, max(klen, -1))
            state = _extend_digest_by_field(state, buf, vstart, max(vlen, -1))
            state = extend_word(state, np.uint64(names))
            for _ in range(names):
                length, start = parse_varint(buf, at, stop)
                if start > stop or length < 0 or length > stop - start:
                    return batch
                for i in range(start, start + length):
                    if buf[i] > 127:
                        flags[row] |= ODD_NAMES
                state = _extend_digest_by_field(state, buf, start, length)
                length, at = parse_varint(buf, start + length, stop)
                if at > stop or length > stop - at:
                    return batch
                state = _extend_digest_by_field(state, buf, at, max(length, -1))
                at += max(length, 0)
            if at != stop:
                return batch
            digest[row] = state
            if vlen < 0:
                flags[row] |= NULL_VALUE
            if klen < 0:
                flags[row] |= KEYLESS_RECORD
                hashes[row, 0] = hashes[row, 1] = np.uint64(0)
            else:
                hashes[row, 0], hashes[row, 1] = siphash128(buf, kstart, klen, k0, k1)
        if magic == 2 and at != limit:
            return batch
        if magic == 1 and headers[ATTRIBUTES, batch] & CODEC_MASK and end > begin and headers[LAST, batch] != 0:
            # Inner offsets are relative; the wrapper has the last one's absolute offset.
            shift = headers[LAST, batch] - offset[end - 1]
            for row in range(begin, end):
                offset[row] += shift
    return -1


def _reencoded_digest(records: GateRecords, row: int) -> int:
    """Return the digest after a rewrite by Kafka's cleaner: Java replaces invalid UTF-8 in header names."""
    buf = records.buf
    key_end = int(records.key_start[row]) + max(int(records.key_length[row]), 0)
    end = len(buf)

    def parse_varint_at(position: int) -> ValueAndNextPosition:
        value, after = parse_varint(buf, position, end)
        return int(value), int(after)

    parts = [int(records.timestamp[row]).to_bytes(8, "little", signed=True), *_digest_field(records.key_of_row(row))]
    with np.errstate(over="ignore"):
        length, at = parse_varint_at(key_end)
        parts += _digest_field(None if length < 0 else buf[at : at + length].tobytes())
        names, at = parse_varint_at(at + max(length, 0))
        parts.append(names.to_bytes(8, "little", signed=True))
        for _ in range(names):
            length, at = parse_varint_at(at)
            parts += _digest_field(reencode_as_java_utf8(buf[at : at + length].tobytes()))
            length, at = parse_varint_at(at + length)
            parts += _digest_field(None if length < 0 else buf[at : at + length].tobytes())
            at += max(length, 0)
    return checksums.crc32c(b"".join(parts)) ^ int(START)


def _digest_field(key_or_value: bytes | None) -> tuple[bytes, bytes]:
    return (-1 if key_or_value is None else len(key_or_value)).to_bytes(8, "little", signed=True), key_or_value or b""


def sum_fingerprints_by_batch(records: GateRecords, counted_flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    """Number and fingerprint sum of each batch's flagged records, shape (batches, 2)."""
    sums = np.zeros((len(records.first_row) - 1, 2), np.uint64)
    _sum_fingerprints(records.first_row, records.offset, records.digest, counted_flags, sums)
    return sums


@kernel
def _sum_fingerprints(
    first_row: FirstRowByBatch,
    offset: Int64s,
    digest: npt.NDArray[np.uint64],
    counted_flags: npt.NDArray[np.bool_],
    out_sums: npt.NDArray[np.uint64],
) -> None:
    for batch in range(first_row.size - 1):
        for row in range(first_row[batch], first_row[batch + 1]):
            if counted_flags[row]:
                out_sums[batch, 0] += np.uint64(1)
                out_sums[batch, 1] += record_fingerprint(np.uint64(offset[row]), digest[row])
