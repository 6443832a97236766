"""Formats of the scratch objects through which executors exchange key rows and survivors. They never contain a key or a value.

    keys of a bundle         [range 0 | range 1 | ..] its dirty rows   [range 0 | ..] its clean rows   [directory]   [tail]
    row, 16 bytes            tag:4 hash:8 ordinal:4   (96 bits of a key's hash, see bloom.siphash)
    directory                for each range and for the end: the numbers of the first dirty row and the first clean row, 8 bytes each
    answer of one range      for one bundle: the gaps between the ordinals of its survivors, ascending, as varints
    survivors of a bundle    for each segment: a bitmap, the verdicts of its batches, and other facts that pass 2 needs   [tail]
    tail                     arrays that describe what precedes them, then their size and CRC

A *bundle* is a set of segments that one task reads, newest first. An *ordinal* numbers the records of a bundle backwards, from the
last record: it is the first ordinal of the segment (a multiple of 8) plus the number of later records in the segment. The rows of a
range are stored in scan order, so their ordinals ascend.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np
import numpy.typing as npt

from bloom.siphash import nonzero_32_bit_tag_of_key_hash, siphash128
from compactor.cleaner.keys.disk_map import KEY_ROW_BYTES, stored_key_hashes_of_rows
from compactor.cleaner.keys.survivors import SurvivorCountsByBatch
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import TransactionVerdicts
from compactor.cleaner.row_spool import HashRangeRowFile, view_as_bytes
from compactor.constants import ByteCount
from compactor.control.records import ScratchObject
from compactor.errors import AlreadyExists, BadData, NotFound, StoreError
from compactor.kernels.common import Flags, Hashes, HashKeyHalves, RowCount
from compactor.kernels.jit import kernel
from compactor.records.batches import NOT_CONTROL, Bytes, Int64s
from compactor.records.indexes import TXN_ENTRY
from compactor.records.rows import BatchChunk, Int32s, RecordRows
from compactor.storage.port import ObjectStore

Arrays = dict[str, npt.NDArray[Any]]

ExchangeRows = npt.NDArray[np.uint32]

BLOCK_ROWS: Final = 1 << 20
ROW_DIRECTORY_ENTRY_BYTES: Final = 16
MAX_GAP_BYTES: Final = 5
_TAIL_FOOTER: Final = struct.Struct("<QI")
_GONE_HINT: Final = "Run it again: missing data is read from the segments again"


@dataclass(frozen=True)
class StoredKeyRows:
    """Location of the stored key rows (key hash and row number of each record) of one bundle (neighbouring segments that one task has
    read).

    size: bytes of the object. ranges: number of hash ranges by which the rows are sorted.
    ordinals: upper bound (exclusive) of the row numbers, some of which have no row.
    dirty_rows, clean_rows: number of rows in the dirty section (offsets in the dirty range) and in the clean section (offsets below it).
    """

    key: str
    size: int
    ranges: int
    ordinals: int
    dirty_rows: int
    clean_rows: int

    row_bytes: ClassVar[int] = KEY_ROW_BYTES

    def read_first_row_numbers_of_hash_ranges(self, store: ObjectStore, first_range: int, end_range: int) -> npt.NDArray[np.int64]:
        """Read at which row numbers the hash ranges from ``first_range`` to ``end_range`` (exclusive) begin, as an array with a line per
        range and one for the end of the last range. Column 0 is the dirty section, column 1 the clean one. Raises BadData if the numbers
        are inconsistent.
        """
        position = (self.dirty_rows + self.clean_rows) * KEY_ROW_BYTES + first_range * ROW_DIRECTORY_ENTRY_BYTES
        found = np.frombuffer(
            self._read_exactly(store, position, (end_range - first_range + 1) * ROW_DIRECTORY_ENTRY_BYTES), np.int64
        ).reshape(-1, 2)
        if (np.diff(found, axis=0) < 0).any() or found[-1, 0] > self.dirty_rows or found[-1, 1] > self.dirty_rows + self.clean_rows:
            raise BadData("the directory of a scratch object is damaged", segment=self.key, hint="Run it again")
        return found

    def read_stored_rows_by_row_number(self, store: ObjectStore, first_row: int, end_row: int) -> ExchangeRows:
        """Read the rows from ``first_row`` to ``end_row`` (exclusive), each as (tag, low, high, ordinal): three parts of the key's
        hash, and the row's number.
        """
        return np.frombuffer(
            self._read_exactly(store, first_row * KEY_ROW_BYTES, (end_row - first_row) * KEY_ROW_BYTES), np.uint32
        ).reshape(-1, 4)

    def read_dirty_key_hashes(self, store: ObjectStore) -> Iterator[Hashes]:
        """Yield the key hashes of all dirty rows in blocks, including repeated ones."""
        for begin in range(0, self.dirty_rows, BLOCK_ROWS):
            yield stored_key_hashes_of_rows(self.read_stored_rows_by_row_number(store, begin, min(begin + BLOCK_ROWS, self.dirty_rows)))

    def read_stored_pass_one_results(self, store: ObjectStore) -> Arrays:
        """Read the pass 1 results of the bundle's segments, which are stored after its rows (compactor.spark.round.bundles)."""
        return read_arrays_at_object_end(store, self.key, self.size)

    def _read_exactly(self, store: ObjectStore, position: int, size: int) -> bytes:
        """Read ``size`` bytes. Raises BadData if the object is shorter."""
        data = read_scratch_bytes(store, self.key, position, size)
        if len(data) != size:
            raise BadData("a scratch object is shorter than when it was written", segment=self.key, hint="Run it again")
        return data


@dataclass(frozen=True)
class ScratchObjectPart:
    """A byte range of a scratch object, [position, position + size), with the SHA-256 of its content."""

    key: str
    position: int
    size: int
    sha256: str


def write_rows_by_section_and_hash_range(spool: HashRangeRowFile, file: BinaryIO) -> tuple[Int64s, npt.NDArray[np.uint32]]:
    """Append all collected rows to ``file``, section by section (dirty, then clean) and hash range by hash range.

    :return: the row number at which each range and the end begin in both sections, shape (ranges + 1, 2), and a CRC-32 of each range in
        both sections, shape (ranges, 2).
    """
    ranges, first = spool.ranges.count, 0
    begins, crcs = np.zeros((ranges + 1, 2), np.int64), np.zeros((ranges, 2), np.uint32)
    for section in range(2):
        for number in range(ranges):
            begins[number, section] = first
            crc = 0
            for rows in spool.read_rows_of_section_and_hash_range(section, number):
                file.write(view_as_bytes(rows))
                crc = zlib.crc32(view_as_bytes(rows), crc)
                first += len(rows)
            crcs[number, section] = crc
        begins[ranges, section] = first
    return begins, crcs


def pack_key_rows(
    chunk: BatchChunk,
    rows: RecordRows,
    first_row: Int64s,
    last_row_numbers: Int64s,
    key_halves: HashKeyHalves,
    first_offset: int,
    end_offset: int,
) -> ExchangeRows:
    """Return a key row (hash and row number) for each record of a chunk that has a key and an offset from ``first_offset`` to
    ``end_offset`` (exclusive), last record first.

    :param first_row: index in ``rows`` of each batch's first record, and the number of all.
    :param last_row_numbers: by batch, the row number of its last record; the records before it have the next higher numbers.
    :param key_halves: the two halves of the hash key.
    """
    out = np.empty((len(rows), 4), np.uint32)
    return out[
        : _write_key_rows_of_chunk(
            chunk.buf, rows.offset, rows.key_start, rows.key_length, first_row, last_row_numbers, *key_halves, first_offset, end_offset, out
        )
    ]


def flag_unaborted_data_batches(source: SourceSegment, aborted: Flags) -> Flags:
    """Return a flag for each batch: whether it holds data records and is not aborted. Only keys of such batches enter the offset map or are
    looked up in it.
    """
    wanted: Flags = (source.table.control == NOT_CONTROL) & ~aborted
    return wanted


def last_row_numbers_of_batches(row_counts: Int64s) -> Int64s:
    """Return the row number of each batch's last record. Rows are numbered backwards: the last record of the last batch has number 0.

    :param row_counts: number of rows in each batch.
    """
    return np.concatenate((np.cumsum(row_counts[::-1])[::-1][1:], np.zeros(min(1, len(row_counts)), np.int64)))


class StoredSurvivors:
    """Surviving records (cleaner.keys.survivors) of the segments of one group, read from scratch objects. A group is rewritten into one
    segment.
    """

    def __init__(self, latest_offset: int) -> None:
        self.last_offset_covered_by_map = latest_offset
        self.key_count = 0
        self.peak_bytes = 0
        self._segments: dict[int, tuple[Bytes, Int64s, SurvivorCountsByBatch]] = {}

    def add_survivors_of_segment(self, source: SourceSegment, verdicts: TransactionVerdicts, arrays: Arrays) -> None:
        """Add the stored survivors of one segment.

        :param arrays: the arrays that ``write_surviving_records_of_bundle`` stored for it. If they hold no bitmap, all records of the
            segment survive.
        """
        if "bitmap" not in arrays:
            return
        table = source.table
        wanted = flag_unaborted_data_batches(source, verdicts.aborted)
        counts = table.count.astype(np.int64) if not len(arrays["counts"]) else arrays["counts"].astype(np.int64)
        counts[~wanted] = 0
        begin = last_row_numbers_of_batches(counts)
        kept = np.full(len(table), -1, np.int32)
        known = wanted & (table.magic == 2)
        _count_survivors_of_batches(arrays["bitmap"], begin, counts, known, kept)
        begin[~wanted] = -1
        keyless = arrays["keyless"] if len(arrays["keyless"]) else np.zeros(len(table), np.int64)
        found = SurvivorCountsByBatch(kept, arrays["tombstones"].astype(np.bool_), keyless.astype(np.int32))
        self._segments[source.ordinal] = (arrays["bitmap"], begin, found)

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCountsByBatch | None:
        """Return the number of surviving records of each batch, or None if nothing in the segment is superseded."""
        stored = self._segments.get(source.ordinal)
        return stored[2] if stored else None

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: Int64s) -> Flags:
        """Return for each row of a chunk whether a newer record has its key."""
        out = np.zeros(len(rows), np.bool_)
        stored = self._segments.get(source.ordinal)
        if stored:
            _flag_superseded_rows(stored[0], stored[1][chunk.first : chunk.last], first_row, out)
        return out


def encode_transaction_verdicts(verdicts: TransactionVerdicts) -> Arrays:
    """Encode a segment's transaction verdicts as arrays for a scratch object: which batches are aborted, which may be discarded, which stay
    in the transaction index, and the entries of this index.
    """
    return {
        "aborted": np.packbits(verdicts.aborted),
        "discardable": np.packbits(verdicts.discardable),
        "indexed": np.packbits(verdicts.indexed),
        "txn_entries": np.frombuffer(verdicts.txn_entries.tobytes(), np.uint8),
    }


def decode_transaction_verdicts(arrays: Arrays, batch_count: int) -> TransactionVerdicts:
    """Restore a segment's transaction verdicts (which batches are aborted, which may be discarded) from the arrays of a scratch object.
    ``batch_count``: number of the segment's batches.
    """
    flags = {name: np.unpackbits(arrays[name], count=batch_count).astype(np.bool_) for name in ("aborted", "discardable", "indexed")}
    return TransactionVerdicts(**flags, txn_entries=np.frombuffer(arrays["txn_entries"].tobytes(), TXN_ENTRY))


def encode_surviving_row_numbers(rows: ExchangeRows, survival_bitmap: Bytes) -> bytes:
    """Encode the row numbers of surviving records.

    :param rows: rows with ascending numbers (``ordinal``).
    :param survival_bitmap: bitmap with one bit per row, set if the record survives.
    """
    chosen = rows[np.unpackbits(survival_bitmap, count=len(rows)).astype(np.bool_), 3]
    out = np.empty(MAX_GAP_BYTES * len(chosen), np.uint8)
    return out[: encode_row_number_gaps(chosen, out)].tobytes()


def pack_arrays(arrays: Arrays, *, skip_compression: bool = False) -> bytes:
    """Serialize arrays; equal arrays give equal bytes.

    :param skip_compression: do not compress, because the content would not shrink.
    """
    out = io.BytesIO()
    save: Any = np.savez if skip_compression else np.savez_compressed
    save(out, **arrays)
    return out.getvalue()


def unpack_arrays(data: bytes, object_key: str) -> Arrays:
    """Restore the arrays that ``pack_arrays`` serialized. Raises BadData if they cannot be read."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, KeyError, EOFError) as error:
        raise BadData(f"a scratch object cannot be read: {error}", segment=object_key, hint="Run it again") from error


def create_scratch_object_idempotently(store: ObjectStore, object_key: str, data: bytes | Path) -> ScratchObject:
    """Create a scratch object.

    If it exists with the same digest, a retried or speculative task has written it already, which is no error.

    :raises StoreError: if it exists with other content, which means that two executors produced different results.
    """
    if isinstance(data, Path):
        with data.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = os.path.getsize(data)
    else:
        sha256, size = hashlib.sha256(data).hexdigest(), len(data)
    try:
        if isinstance(data, Path):
            store.create_from_file(object_key, data, {"sha256": sha256})
        else:
            store.create(object_key, data, {"sha256": sha256})
    except AlreadyExists:
        try:
            info = store.head(object_key)
        except NotFound:
            raise StoreError(f"{store.url}/{object_key} went while it was written", hint="Run it again") from None
        if info.size != size or info.metadata.get("sha256") != sha256:
            raise StoreError(
                f"{store.url}/{object_key} exists already with other content",
                hint="Check that all executors have one version, and run it again",
            ) from None
    return ScratchObject(key=object_key, size=size, sha256=sha256)


def read_scratch_bytes(store: ObjectStore, object_key: str, position: int = 0, size: int | None = None) -> bytes:
    """Read ``size`` bytes of a scratch object from byte ``position`` on; all that follow if ``size`` is None. Raises StoreError, also if
    the object no longer exists: another compactor may have taken over and deleted it.
    """
    try:
        return store.get(object_key, position, size)
    except NotFound:
        raise StoreError(f"the scratch object {store.url}/{object_key} is gone", hint=_GONE_HINT) from None


def is_scratch_object_of_kind(kind: str, object_key: str) -> bool:
    """Return whether a scratch object is of this kind, judged by the last part of its key. The rest of the key is ignored, because it
    contains the topic, which may have any name.
    """
    return kind in object_key.rpartition("/")[2]


def read_scratch_arrays(store: ObjectStore, scratch: ScratchObject | ScratchObjectPart) -> Arrays:
    """Read the arrays of a scratch object or of a part of one. Raises BadData if its size or digest is not the recorded one."""
    position = scratch.position if isinstance(scratch, ScratchObjectPart) else 0
    data = read_scratch_bytes(store, scratch.key, position, scratch.size)
    if len(data) != scratch.size or hashlib.sha256(data).hexdigest() != scratch.sha256:
        raise BadData("a scratch object is not what was recorded", segment=scratch.key, hint="Run it again")
    return unpack_arrays(data, scratch.key)


def pack_arrays_for_object_end(arrays: Arrays) -> bytes:
    """Serialize arrays that describe an object, to be appended to it as its tail, where ``read_arrays_at_object_end`` finds them."""
    data = pack_arrays(arrays)
    return data + _TAIL_FOOTER.pack(len(data), zlib.crc32(data))


def read_arrays_at_object_end(store: ObjectStore, object_key: str, size: int) -> Arrays:
    """Read the arrays at the end (tail) of an object of ``size`` bytes.

    Raises BadData if they are damaged, StoreError if the object no longer exists.
    """
    end = read_scratch_bytes(store, object_key, max(0, size - _TAIL_FOOTER.size), _TAIL_FOOTER.size)
    length, crc = _TAIL_FOOTER.unpack(end) if len(end) == _TAIL_FOOTER.size else (size + 1, 0)
    data = read_scratch_bytes(store, object_key, size - _TAIL_FOOTER.size - length, length) if length + _TAIL_FOOTER.size <= size else b""
    if not data or zlib.crc32(data) != crc:
        raise BadData("the end of a scratch object is damaged", segment=object_key, hint="Run it again")
    return unpack_arrays(data, object_key)


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _write_key_rows_of_chunk(
    buf: Bytes, offset: Int64s, key_start: Int64s, key_length: Int32s, first_row: Int64s, last_row_numbers: Int64s, k0: np.uint64,
    k1: np.uint64, first_offset: int, end_offset: int, out: ExchangeRows,
) -> RowCount:  # fmt: skip
    """Write a key row to ``out`` for each record of a chunk that has a key and an offset in [first_offset, end_offset), from the last
    record to the first. Return the number of rows.

    :param offset, key_start, key_length: by record, its offset, and where its key lies in ``buf``; a negative length means no key.
    :param first_row: number of each batch's first record, and the number of all.
    :param last_row_numbers: by batch, the row number of its last record; the records before it have the next higher numbers.
    :param k0, k1: halves of the hash key.
    """
    count = 0
    for batch in range(last_row_numbers.size - 1, -1, -1):
        for row in range(first_row[batch + 1] - 1, first_row[batch] - 1, -1):
            if key_length[row] >= 0 and first_offset <= offset[row] < end_offset:
                h0, h1 = siphash128(buf, key_start[row], key_length[row], k0, k1)
                out[count, 0] = nonzero_32_bit_tag_of_key_hash(h0)
                out[count, 1] = np.uint32(h1 & np.uint64(0xFFFFFFFF))
                out[count, 2] = np.uint32(h1 >> np.uint64(32))
                out[count, 3] = np.uint32(last_row_numbers[batch] + first_row[batch + 1] - 1 - row)
                count += 1
    return count


@kernel
def encode_row_number_gaps(ordinals: npt.NDArray[np.uint32], out: Bytes) -> ByteCount:
    """Write ascending row numbers to ``out`` as varints: for each, how many numbers lie between it and the one before. Return the number of
    bytes written.
    """
    at = 0
    previous = np.int64(-1)
    for i in range(ordinals.size):
        gap = np.int64(ordinals[i]) - previous - 1
        previous = np.int64(ordinals[i])
        while gap >= 128:
            out[at] = (gap & 127) | 128
            gap >>= 7
            at += 1
        out[at] = gap
        at += 1
    return at


@kernel
def try_decode_row_number_gaps_to_bitmap(data: Bytes, bitmap: Bytes) -> bool:
    """Set the bit of each row number that ``encode_row_number_gaps`` wrote. Return False if a row number lies beyond the bitmap or the data
    is malformed.
    """
    place = np.int64(-1)
    gap = np.int64(0)
    shift = 0
    for i in range(data.size):
        gap |= np.int64(data[i] & 127) << shift
        shift += 7
        if data[i] < 128:
            place += gap + 1
            if place >= 8 * bitmap.size:
                return False
            bitmap[place >> 3] |= np.uint8(128 >> (place & 7))
            gap = np.int64(0)
            shift = 0
    return shift == 0


@kernel
def flag_tombstone_batches(first_row: Int64s, value_length: Int32s, out: Flags) -> None:
    """Set ``out`` for each batch of a chunk that contains a tombstone (a record without a value).

    :param first_row: number of each batch's first row, and the number of all rows.
    :param value_length: by row, length of the value in bytes; negative for a tombstone.
    """
    for batch in range(out.size):
        for row in range(first_row[batch], first_row[batch + 1]):
            if value_length[row] < 0:
                out[batch] = True
                break


@kernel
def _count_survivors_of_batches(bitmap: Bytes, lowest_row_numbers: Int64s, counts: Int64s, counted: Flags, out_kept: Int32s) -> None:
    """Count the surviving rows of each batch that is marked in ``counted``, and write their number to ``out_kept``.

    :param bitmap: one bit per row number, set if the row survives.
    :param lowest_row_numbers: by batch, its lowest row number. counts: by batch, its number of rows.
    """
    for batch in range(lowest_row_numbers.size):
        if counted[batch]:
            count = 0
            for bit in range(lowest_row_numbers[batch], lowest_row_numbers[batch] + counts[batch]):
                count += (bitmap[bit >> 3] >> (7 - (bit & 7))) & 1
            out_kept[batch] = count


@kernel
def _flag_superseded_rows(bitmap: Bytes, last_row_numbers: Int64s, first_row: Int64s, out: Flags) -> None:
    """Set ``out`` for each row of a chunk whose bit in ``bitmap`` is 0, which means that the row does not survive.

    :param bitmap: one bit per row number.
    :param last_row_numbers: by batch, the row number of its last record; the records before it have the next higher numbers. A batch with a
        negative number is left out.
    :param first_row: index of each batch's first row in the chunk, and the number of all.
    """
    for batch in range(last_row_numbers.size):
        if last_row_numbers[batch] >= 0:
            for row in range(first_row[batch], first_row[batch + 1]):
                bit = last_row_numbers[batch] + first_row[batch + 1] - 1 - row
                out[row] = (bitmap[bit >> 3] >> (7 - (bit & 7))) & 1 == 0
