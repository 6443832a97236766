"""Scratch objects through which executors exchange key rows and survivors, never a key or a value.

    keys of a bundle         [range 0 | range 1 | ..] its dirty rows   [range 0 | ..] its clean rows   [directory]   [tail]
    row, 16 bytes            tag:4 hash:8 ordinal:4   (96 bits of a key's hash, see bloom.filter)
    directory                for each range and for the end: the numbers of the first dirty row and the first clean row, 8 bytes each
    answer of one range      for one bundle: the gaps between the ordinals of its survivors, ascending, as varints
    survivors of a bundle    for each segment: a bitmap, the verdicts of its batches, and other facts that pass 2 needs   [tail]
    tail                     arrays that describe what precedes them, then their size and CRC

A *bundle* is a set of segments that one task reads, newest first. An *ordinal* numbers a bundle's records backwards: the segment's first
ordinal (a multiple of 8) plus the number of later records in the segment. Rows of a range are stored in scan order, so their ordinals
ascend.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, NoReturn

import numpy as np
import numpy.typing as npt

from bloom.filter import key_hash_tag, siphash128
from compactor.cleaner.disk_map import KEY_ROW_BYTES, HashRangeRowFile, stored_hashes, view_as_bytes
from compactor.cleaner.gate.batch_checks import BatchTransactionOutcomes
from compactor.cleaner.gate.gate import CleanedSegmentCheckParameters, Gate
from compactor.cleaner.gate.parser import GATE_ROW_BYTES, WORDS, FingerprintSumsBySegment, LatestRecordRows, LatestRecordTable, Words
from compactor.cleaner.keys import SurvivorCountsByBatch
from compactor.cleaner.retention import TransactionVerdicts
from compactor.cleaner.source import SourceSegment
from compactor.control.records import ScratchObject
from compactor.errors import AlreadyExists, BadData, CompactorError, NotFound, StoreError
from compactor.kernels.common import Flags, Hashes, HashKeyHalves
from compactor.kernels.jit import kernel
from compactor.model.plan import CompactionPlan, KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import NOT_CONTROL, BatchTable, Bytes, Int64s
from compactor.records.indexes import TXN_ENTRY, TxnEntries
from compactor.records.rows import BatchChunk, Int32s, RecordRows
from compactor.round.pass_two import retention_rules_of_plan
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
    """Location of one bundle's key rows.

    ordinals: upper bound (exclusive) of the row numbers, some of which have no row.
    dirty_rows, clean_rows: rows of offsets in the dirty range, and below it.
    """

    key: str
    size: int
    ranges: int
    ordinals: int
    dirty_rows: int
    clean_rows: int

    row_bytes: ClassVar[int] = KEY_ROW_BYTES

    def read_range_starts(self, store: ObjectStore, first_range: int, end_range: int) -> npt.NDArray[np.int64]:
        """Raises BadData if the numbers are inconsistent."""
        position = (self.dirty_rows + self.clean_rows) * KEY_ROW_BYTES + first_range * ROW_DIRECTORY_ENTRY_BYTES
        found = np.frombuffer(
            self._read_exactly(store, position, (end_range - first_range + 1) * ROW_DIRECTORY_ENTRY_BYTES), np.int64
        ).reshape(-1, 2)
        if (np.diff(found, axis=0) < 0).any() or found[-1, 0] > self.dirty_rows or found[-1, 1] > self.dirty_rows + self.clean_rows:
            raise BadData("the directory of a scratch object is damaged", segment=self.key, hint="Run it again")
        return found

    def read_stored_rows(self, store: ObjectStore, first_row: int, end_row: int) -> ExchangeRows:
        """Rows up to ``end_row`` (exclusive) as (tag, low, high, ordinal): three parts of the key's hash, and the row's number."""
        return np.frombuffer(
            self._read_exactly(store, first_row * KEY_ROW_BYTES, (end_row - first_row) * KEY_ROW_BYTES), np.uint32
        ).reshape(-1, 4)

    def read_dirty_key_hashes(self, store: ObjectStore) -> Iterator[Hashes]:
        """Repeated ones included."""
        for begin in range(0, self.dirty_rows, BLOCK_ROWS):
            yield stored_hashes(self.read_stored_rows(store, begin, min(begin + BLOCK_ROWS, self.dirty_rows)))

    def read_results(self, store: ObjectStore) -> Arrays:
        return read_tail(store, self.key, self.size)

    def _read_exactly(self, store: ObjectStore, position: int, size: int) -> bytes:
        data = read_scratch_bytes(store, self.key, position, size)
        if len(data) != size:
            raise BadData("a scratch object is shorter than when it was written", segment=self.key, hint="Run it again")
        return data


@dataclass(frozen=True)
class ScratchObjectPart:
    """Byte range [position, position + size) of a scratch object."""

    key: str
    position: int
    size: int
    sha256: str


def write_sorted_rows(spool: HashRangeRowFile, file: BinaryIO) -> tuple[Int64s, npt.NDArray[np.uint32]]:
    """By section (dirty, then clean) and hash range.

    :return: row numbers at which ranges and the end begin, shape (ranges + 1, 2 sections), and CRC-32 of each range, shape (ranges, 2).
    """
    ranges, first = spool.ranges.count, 0
    begins, crcs = np.zeros((ranges + 1, 2), np.int64), np.zeros((ranges, 2), np.uint32)
    for section in range(2):
        for number in range(ranges):
            begins[number, section] = first
            crc = 0
            for rows in spool.read_range_rows(section, number):
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
    """Key rows of the records with a key and an offset from ``first_offset`` to ``end_offset`` (exclusive), last record first.

    :param first_row: index in ``rows`` of each batch's first record, and their number.
    :param last_row_numbers: row number of each batch's last record; earlier records have the next higher numbers.
    """
    out = np.empty((len(rows), 4), np.uint32)
    return out[
        : _write_key_rows(
            chunk.buf, rows.offset, rows.key_start, rows.key_length, first_row, last_row_numbers, *key_halves, first_offset, end_offset, out
        )
    ]


def flag_unaborted_data_batches(source: SourceSegment, aborted: Flags) -> Flags:
    """Only the keys of these batches enter the offset map or are looked up in it."""
    wanted: Flags = (source.table.control == NOT_CONTROL) & ~aborted
    return wanted


def number_last_rows(row_counts: Int64s) -> Int64s:
    """Numbered backwards: the last record of all has number 0."""
    return np.concatenate((np.cumsum(row_counts[::-1])[::-1][1:], np.zeros(min(1, len(row_counts)), np.int64)))


class StoredSurvivors:
    """Surviving records of one group's segments, read from scratch objects."""

    def __init__(self, latest_offset: int) -> None:
        self.last_mapped_offset = latest_offset
        self.key_count = 0
        self.peak_bytes = 0
        self._segments: dict[int, tuple[Bytes, Int64s, SurvivorCountsByBatch]] = {}

    def add_survivors_of_segment(self, source: SourceSegment, verdicts: TransactionVerdicts, arrays: Arrays) -> None:
        """Without a bitmap, all its records survive."""
        if "bitmap" not in arrays:
            return
        table = source.table
        wanted = flag_unaborted_data_batches(source, verdicts.aborted)
        counts = table.count.astype(np.int64) if not len(arrays["counts"]) else arrays["counts"].astype(np.int64)
        counts[~wanted] = 0
        begin = number_last_rows(counts)
        kept = np.full(len(table), -1, np.int32)
        known = wanted & (table.magic == 2)
        _count_survivors_of_batches(arrays["bitmap"], begin, counts, known, kept)
        begin[~wanted] = -1
        keyless = arrays["keyless"] if len(arrays["keyless"]) else np.zeros(len(table), np.int64)
        found = SurvivorCountsByBatch(kept, arrays["tombstones"].astype(np.bool_), keyless.astype(np.int32))
        self._segments[source.ordinal] = (arrays["bitmap"], begin, found)

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCountsByBatch | None:
        """Return None if nothing is superseded."""
        stored = self._segments.get(source.ordinal)
        return stored[2] if stored else None

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: Int64s) -> Flags:
        out = np.zeros(len(rows), np.bool_)
        stored = self._segments.get(source.ordinal)
        if stored:
            _flag_superseded_rows(stored[0], stored[1][chunk.first : chunk.last], first_row, out)
        return out


def encode_transaction_verdicts(verdicts: TransactionVerdicts) -> Arrays:
    return {
        "aborted": np.packbits(verdicts.aborted),
        "discardable": np.packbits(verdicts.discardable),
        "indexed": np.packbits(verdicts.indexed),
        "txn_entries": np.frombuffer(verdicts.txn_entries.tobytes(), np.uint8),
    }


def decode_transaction_verdicts(arrays: Arrays, batch_count: int) -> TransactionVerdicts:
    flags = {name: np.unpackbits(arrays[name], count=batch_count).astype(np.bool_) for name in ("aborted", "discardable", "indexed")}
    return TransactionVerdicts(**flags, txn_entries=np.frombuffer(arrays["txn_entries"].tobytes(), TXN_ENTRY))


def encode_surviving_row_numbers(rows: ExchangeRows, survival_bitmap: Bytes) -> bytes:
    """Row numbers ascend; ``survival_bitmap`` has one bit per row."""
    chosen = rows[np.unpackbits(survival_bitmap, count=len(rows)).astype(np.bool_), 3]
    out = np.empty(MAX_GAP_BYTES * len(chosen), np.uint8)
    return out[: encode_row_number_gaps(chosen, out)].tobytes()


def pack_arrays(arrays: Arrays, *, skip_compression: bool = False) -> bytes:
    """Equal arrays give equal bytes."""
    out = io.BytesIO()
    save: Any = np.savez if skip_compression else np.savez_compressed
    save(out, **arrays)
    return out.getvalue()


def unpack_arrays(data: bytes, object_key: str) -> Arrays:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, KeyError, EOFError) as error:
        raise BadData(f"a scratch object cannot be read: {error}", segment=object_key, hint="Run it again") from error


def create_scratch_object_idempotently(store: ObjectStore, object_key: str, data: bytes | Path) -> ScratchObject:
    """An object with the same digest, by a retried or speculative task, is no error. Raises StoreError if two executors produced different
    results.
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
    """Raises StoreError, also if another compactor has taken over and deleted the object."""
    try:
        return store.get(object_key, position, size)
    except NotFound:
        raise StoreError(f"the scratch object {store.url}/{object_key} is gone", hint=_GONE_HINT) from None


def is_scratch_kind(kind: str, object_key: str) -> bool:
    # The rest of the key contains the topic, which may have any name.
    return kind in object_key.rpartition("/")[2]


def read_scratch_arrays(store: ObjectStore, scratch: ScratchObject | ScratchObjectPart) -> Arrays:
    """Raises BadData if size or digest is not the recorded one."""
    position = scratch.position if isinstance(scratch, ScratchObjectPart) else 0
    data = read_scratch_bytes(store, scratch.key, position, scratch.size)
    if len(data) != scratch.size or hashlib.sha256(data).hexdigest() != scratch.sha256:
        raise BadData("a scratch object is not what was recorded", segment=scratch.key, hint="Run it again")
    return unpack_arrays(data, scratch.key)


def pack_tail(arrays: Arrays) -> bytes:
    data = pack_arrays(arrays)
    return data + _TAIL_FOOTER.pack(len(data), zlib.crc32(data))


def read_tail(store: ObjectStore, object_key: str, size: int) -> Arrays:
    """Raises BadData if it is damaged, StoreError if the object no longer exists."""
    end = read_scratch_bytes(store, object_key, max(0, size - _TAIL_FOOTER.size), _TAIL_FOOTER.size)
    length, crc = _TAIL_FOOTER.unpack(end) if len(end) == _TAIL_FOOTER.size else (size + 1, 0)
    data = read_scratch_bytes(store, object_key, size - _TAIL_FOOTER.size - length, length) if length + _TAIL_FOOTER.size <= size else b""
    if not data or zlib.crc32(data) != crc:
        raise BadData("the end of a scratch object is damaged", segment=object_key, hint="Run it again")
    return unpack_arrays(data, object_key)


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _write_key_rows(
    buf: Bytes, offset: Int64s, key_start: Int64s, key_length: Int32s, first_row: Int64s, last_row_numbers: Int64s, k0: np.uint64,
    k1: np.uint64, first_offset: int, end_offset: int, out: ExchangeRows,
) -> int:  # fmt: skip
    """Records with a key (length not negative) and an offset in [first_offset, end_offset), last record first."""
    count = 0
    for batch in range(last_row_numbers.size - 1, -1, -1):
        for row in range(first_row[batch + 1] - 1, first_row[batch] - 1, -1):
            if key_length[row] >= 0 and first_offset <= offset[row] < end_offset:
                h0, h1 = siphash128(buf, key_start[row], key_length[row], k0, k1)
                out[count, 0] = key_hash_tag(h0)
                out[count, 1] = np.uint32(h1 & np.uint64(0xFFFFFFFF))
                out[count, 2] = np.uint32(h1 >> np.uint64(32))
                out[count, 3] = np.uint32(last_row_numbers[batch] + first_row[batch + 1] - 1 - row)
                count += 1
    return count


@kernel
def encode_row_number_gaps(ordinals: npt.NDArray[np.uint32], out: Bytes) -> int:
    """Write varints: how many numbers lie between each row number and the one before. Return the number of bytes."""
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
def set_row_bits(data: Bytes, bitmap: Bytes) -> bool:
    """Set the bit of each row number. Return False if one lies beyond the bitmap or the data is malformed."""
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
    """Parameter ``first_row``: number of each batch's first row, and of all rows. ``value_length``: by row; negative for a tombstone."""
    for batch in range(out.size):
        for row in range(first_row[batch], first_row[batch + 1]):
            if value_length[row] < 0:
                out[batch] = True
                break


@kernel
def _count_survivors_of_batches(bitmap: Bytes, lowest_row_numbers: Int64s, counts: Int64s, counted: Flags, out_kept: Int32s) -> None:
    """Only for batches in ``counted``."""
    for batch in range(lowest_row_numbers.size):
        if counted[batch]:
            count = 0
            for bit in range(lowest_row_numbers[batch], lowest_row_numbers[batch] + counts[batch]):
                count += (bitmap[bit >> 3] >> (7 - (bit & 7))) & 1
            out_kept[batch] = count


@kernel
def _flag_superseded_rows(bitmap: Bytes, last_row_numbers: Int64s, first_row: Int64s, out: Flags) -> None:
    """Superseded rows have the bit 0. A batch with a negative number is left out."""
    for batch in range(last_row_numbers.size):
        if last_row_numbers[batch] >= 0:
            for row in range(first_row[batch], first_row[batch + 1]):
                bit = last_row_numbers[batch] + first_row[batch + 1] - 1 - row
                out[row] = (bitmap[bit >> 3] >> (7 - (bit & 7))) & 1 == 0


# ---- gate (the independent check of the output) of a spread round, in which no process sees all keys --------------------------
#
#     pass 1      each task also writes the gate's rows of its segments, sorted by range, as one object per bundle
#     ranges      range tasks find the last record of each key and compute what must be left of each segment: a count and a sum of checksums
#     gathering   one task adds up the sums of all range tasks, 16 bytes a segment
#     pass 2      each group is compared with its sources and these sums before it is uploaded
#
# The gate shares only the transport of bytes with the cleaner's exchange.
#
#     object      [range 0 | range 1 | ..] dirty rows   [range 0 | ..] rows outside the dirty range   [directory]
#     directory   for each range and for the end: the first row number of both sections, 8 bytes each; CRCs of both sections, 4 bytes each


DIRECTORY_ENTRY_BYTES: Final = 24
DIRTY_ROWS, OUTSIDE = range(2)
"""Sections of a bundle: rows of the dirty range, and rows outside it that are looked up."""

SegmentFirstOffsetsAndEnd = Int64s
"""First offset of each segment that the gate covers, ascending, and the end offset (exclusive) of the last one."""


# ---- rows of a bundle -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredGateRows:
    """Location of one bundle's gate rows. rows_below: at offsets below the dirty range."""

    key: str
    size: int
    ranges: int
    dirty_rows: int
    rows_below: int

    row_bytes: ClassVar[int] = GATE_ROW_BYTES

    def read_range_starts(self, store: ObjectStore, first_range: int, end_range: int) -> npt.NDArray[np.int64]:
        """Column 2 holds the CRCs of both sections. Raises BadData if the numbers are inconsistent."""
        total = self.dirty_rows + self.rows_below
        size = (end_range - first_range + 1) * DIRECTORY_ENTRY_BYTES
        data = read_scratch_bytes(store, self.key, total * GATE_ROW_BYTES + first_range * DIRECTORY_ENTRY_BYTES, size)
        found = np.frombuffer(data, np.int64).reshape(-1, 3) if len(data) == size else np.empty((0, 3), np.int64)
        if not len(found) or (np.diff(found[:, :2], axis=0) < 0).any() or found[-1, 0] > self.dirty_rows or found[-1, 1] > total:
            self.raise_damaged_rows_error()
        return found

    def read_stored_rows(self, store: ObjectStore, first_row: int, end_row: int) -> LatestRecordRows:
        """Raises BadData if the object is too short."""
        data = read_scratch_bytes(store, self.key, first_row * GATE_ROW_BYTES, (end_row - first_row) * GATE_ROW_BYTES)
        if len(data) != (end_row - first_row) * GATE_ROW_BYTES:
            self.raise_damaged_rows_error()
        return np.frombuffer(data, np.uint64).reshape(-1, WORDS)

    def raise_damaged_rows_error(self) -> NoReturn:
        raise BadData("the gate's rows in a scratch object are not what was written", segment=self.key, hint="Run it again")


def write_gate_object(spool: HashRangeRowFile, path: Path, object_key: str) -> StoredGateRows:
    """Write rows and directory to ``path``, which the caller uploads. Raises StoreError if the disk fails."""
    with path.open("wb") as file:
        begins, crcs = write_sorted_rows(spool, file)
        file.write(np.column_stack((begins, np.append(crcs.view(np.int64), 0))).tobytes())
        dirty, total = begins[-1].tolist()
        return StoredGateRows(object_key, file.tell(), spool.ranges.count, dirty, total - dirty)


# ---- transactions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseTransactionOutcomes:
    """Only for batches of transactions. places: their batch numbers. batches: number of all."""

    batches: int
    places: Int64s
    outcomes: BatchTransactionOutcomes

    def expand_to_all_batches(self) -> BatchTransactionOutcomes:
        aborted, idle = np.zeros(self.batches, np.bool_), np.zeros(self.batches, np.bool_)
        began = np.full(self.batches, -1, np.int64)
        aborted[self.places], idle[self.places], began[self.places] = self.outcomes.aborted, self.outcomes.idle, self.outcomes.began
        return BatchTransactionOutcomes(aborted, idle, began)


def non_transactional_outcomes(batch_count: int) -> BatchTransactionOutcomes:
    return BatchTransactionOutcomes(np.zeros(batch_count, np.bool_), np.zeros(batch_count, np.bool_), np.full(batch_count, -1, np.int64))


def encode_transaction_outcomes(outcomes: BatchTransactionOutcomes) -> Arrays:
    return {"gate_aborted": np.packbits(outcomes.aborted), "gate_idle": np.packbits(outcomes.idle), "gate_began": outcomes.began}


def decode_transaction_outcomes(arrays: Arrays, batch_count: int) -> BatchTransactionOutcomes:
    aborted, idle = (np.unpackbits(arrays[name], count=batch_count).astype(np.bool_) for name in ("gate_aborted", "gate_idle"))
    return BatchTransactionOutcomes(aborted, idle, arrays["gate_began"].astype(np.int64))


# ---- gates over some segments of a log --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedRecordSums:
    """For each segment, number and checksum sum of the records that must remain. keys: number of distinct keys in the dirty range."""

    bounds: SegmentFirstOffsetsAndEnd
    sums: FingerprintSumsBySegment
    keys: int

    def as_arrays(self) -> Arrays:
        return {"gate_bounds": self.bounds, "gate_sums": self.sums, "gate_keys": np.array([self.keys], np.int64)}

    @staticmethod
    def from_arrays(arrays: Arrays) -> ExpectedRecordSums:
        return ExpectedRecordSums(arrays["gate_bounds"], arrays["gate_sums"], int(arrays["gate_keys"][0]))

    def sums_of_segment(self, source: SourceSegment) -> Words:
        """Raises CompactorError if the segment's sums were not computed."""
        place = int(np.searchsorted(self.bounds[:-1], source.base))
        if place >= len(self.sums) or int(self.bounds[place]) != source.base:
            raise CompactorError(f"the gate was not shown {source.name}", hint="This is a bug; please report it")
        return np.asarray(self.sums[place])


def create_collecting_gate(plan: CompactionPlan, hash_key: bytes, source: SourceSegment, outcomes: BatchTransactionOutcomes) -> Gate:
    gate = Gate(_gate_parameters_of_plan(plan, hash_key), LatestRecordTable(0, 0), {source.ordinal: outcomes})
    gate.begin_segment(source)
    return gate


def create_checking_gate(
    plan: CompactionPlan,
    hash_key: bytes,
    sources: Sequence[SourceSegment],
    outcomes: Sequence[BatchTransactionOutcomes],
    expected_sums: ExpectedRecordSums | None,
) -> Gate:
    """Gate of pass 2. ``expected_sums``: None if nothing is dirty."""
    known = {source.ordinal: fate for source, fate in zip(sources, outcomes, strict=True)}
    left = {} if expected_sums is None else {source.ordinal: expected_sums.sums_of_segment(source) for source in sources}
    return Gate(_gate_parameters_of_plan(plan, hash_key), LatestRecordTable(0, 0), known, left)


def _gate_parameters_of_plan(plan: CompactionPlan, hash_key: bytes) -> CleanedSegmentCheckParameters:
    return CleanedSegmentCheckParameters(
        retention_rules_of_plan(plan), plan.first_dirty_offset, hash_key, plan.policy.max_decompressed_batch_bytes
    )


# ---- bundles: a task returns its result and stores it in the tail of its object, which a resumed round reads instead of the segments ---


BUNDLES_PER_SLOT: Final = 2
MAX_BUNDLE_BYTES: Final = 16 << 30
"""Largest bundle. A killed executor loses one bundle; larger bundles need fewer requests per range."""

MAX_BUNDLE_RECORDS: Final = 1 << 31
"""Most records in a bundle, because ordinals have 32 bits."""

MIN_RECORD_BYTES: Final = 7
"""Smallest size of a record in a v2 batch."""
IndexRange = tuple[int, int]
"""Range of indexes [begin, end)."""


@dataclass(frozen=True)
class PassOneResultOfSegment:
    """Result of pass 1 for one segment.

    table: headers of transactional and control batches only, with their numbers (places) among all (batches).
    undecided: keys can be indexed only once it is known which transactions were aborted.
    first, ordinals: row numbers [first, first + ordinals) in the bundle; ``first`` is -1 if no keys were indexed.
    rows: smaller than ``ordinals`` if some records have no key.
    keyless: only in the dirty range.
    """

    id: str
    batches: int
    places: npt.NDArray[np.int64]
    table: BatchTable
    txn_entries: TxnEntries
    undecided: bool
    first: int = -1
    ordinals: int = 0
    rows: int = 0
    keyless: KeylessRecords = KeylessRecords()  # noqa: RUF009 - frozen

    @property
    def has_key_rows(self) -> bool:
        return self.first >= 0


@dataclass(frozen=True)
class BatchScanSummary:
    """Facts by batch.

    counts: of records; empty if the batch headers state it.
    keyless: records without a key; empty if all have one.
    """

    tombstones: npt.NDArray[np.bool_]
    counts: Int64s
    keyless: Int64s


@dataclass(frozen=True)
class PassOneResultOfSegmentBundle:
    """keys: None if no keys were wanted. gate: None without a gate."""

    segments: tuple[PassOneResultOfSegment, ...]
    keys: StoredKeyRows | None
    gate: StoredGateRows | None = None


@dataclass(frozen=True)
class RowNumberRange:
    """Row numbers [first, end). place: index of the bundle."""

    place: int
    first: int
    end: int


def max_record_count(segment: RemoteLogSegmentMetadata) -> int:
    return segment.records or min(segment.end_offset - segment.start_offset + 1, segment.size_bytes // MIN_RECORD_BYTES + 1)


def plan_segment_bundles(
    segments: Sequence[RemoteLogSegmentMetadata], task_slots: int, disk_bytes: int, row_bytes_per_record: int = KEY_ROW_BYTES
) -> list[IndexRange]:
    """Bundles of about equal bytes, BUNDLES_PER_SLOT for each task slot, as ranges of indexes [begin, end).

    :param disk_bytes: disk budget of one task; it must hold one segment and the bundle's rows twice, because they are sorted.
    :param row_bytes_per_record: including the gate's rows.
    """
    sizes = np.array([max(1, segment.size_bytes) for segment in segments], np.int64)
    records = np.array([max_record_count(segment) for segment in segments], np.int64)
    if not len(sizes):
        return []
    ideal = min(MAX_BUNDLE_BYTES, -(-int(sizes.sum()) // (task_slots * BUNDLES_PER_SLOT)))
    space = max(1, min(MAX_BUNDLE_RECORDS, (disk_bytes - 2 * int(sizes.max())) // (2 * row_bytes_per_record)))
    runs: list[tuple[int, int]] = []
    begin, size, rows = 0, 0, 0
    for place in range(len(sizes)):
        # A segment goes to the run in which its middle lies.
        if place > begin and (size + int(sizes[place]) // 2 >= ideal or rows + int(records[place]) > space):
            runs.append((begin, place))
            begin, size, rows = place, 0, 0
        size += int(sizes[place])
        rows += int(records[place])
    return [*runs, (begin, len(sizes))]


def merge_row_number_ranges(
    indexed_segments_newest_first: Sequence[tuple[int, PassOneResultOfSegment]],
) -> tuple[RowNumberRange, ...]:
    """Row numbers of (bundle index, segment) pairs, newest first. Neighbours in one bundle are merged."""
    found: list[RowNumberRange] = []
    for place, segment in indexed_segments_newest_first:
        last = found[-1] if found else None
        if last is not None and last.place == place and last.end <= segment.first:
            found[-1] = RowNumberRange(place, last.first, segment.first + segment.ordinals)
        else:
            found.append(RowNumberRange(place, segment.first, segment.first + segment.ordinals))
    return tuple(found)


# ---- the tail of a bundle ---------------------------------------------------------------------------------------------------

_TABLE_COLUMNS: Final = BatchTable._fields


def encode_bundle_result(bundle: PassOneResultOfSegmentBundle, scan_summaries: Mapping[str, BatchScanSummary]) -> Arrays:
    """Parameter ``scan_summaries``: by id, of segments whose keys were indexed."""
    segments, keys, gate = bundle.segments, bundle.keys, bundle.gate
    some = [scan_summaries[segment.id] for segment in segments if segment.has_key_rows]
    numbers = {name: np.array([getattr(segment, name) for segment in segments], np.int64) for name in _NUMBER_FIELDS}
    return {
        "ids": _encode_lines([segment.id for segment in segments]),
        **numbers,
        "lengths": np.array([(len(segment.places), len(segment.txn_entries)) for segment in segments], np.int64).reshape(-1, 2),
        "places": _concatenate_arrays([segment.places for segment in segments], np.int64),
        "txn_entries": _concatenate_arrays([np.frombuffer(segment.txn_entries.tobytes(), np.uint8) for segment in segments], np.uint8),
        **{f"table_{name}": np.concatenate([getattr(segment.table, name) for segment in segments]) for name in _TABLE_COLUMNS},
        "keys": np.array([keys.ranges, keys.ordinals, keys.dirty_rows, keys.clean_rows] if keys else [], np.int64),
        "gate": _encode_lines([gate.key] if gate else []),
        "gate_rows": np.array([gate.size, gate.ranges, gate.dirty_rows, gate.rows_below] if gate else [], np.int64),
        "tombstones": np.packbits(np.concatenate([np.empty(0, np.bool_), *(fact.tombstones for fact in some)])),
        "counted": np.array([len(fact.counts) for fact in some], np.int64),
        "counts": _concatenate_arrays([fact.counts for fact in some], np.int64),
        "keyless_counted": np.array([len(fact.keyless) for fact in some], np.int64),
        "keyless": _concatenate_arrays([fact.keyless for fact in some], np.int64),
        "keyless_records": np.array(
            [(segment.keyless.count, segment.keyless.records, segment.keyless.last_offset) for segment in segments], np.int64
        ).reshape(-1, 3),
    }  # fmt: skip


_NUMBER_FIELDS: Final = ("batches", "undecided", "first", "ordinals", "rows")


def decode_bundle_result(stored_arrays: Arrays, object_key: str, object_bytes: int) -> PassOneResultOfSegmentBundle:
    """Raises BadData if another version wrote it."""
    if "keyless_records" not in stored_arrays:
        raise BadData("the end of a scratch object is of another version", segment=object_key, hint="Run it again")
    places, entries = np.cumsum(stored_arrays["lengths"], axis=0).T if len(stored_arrays["lengths"]) else np.zeros((2, 0), np.int64)
    segments = []
    for at, name in enumerate(_decode_lines(stored_arrays["ids"])):
        begins = (int(places[at - 1]), int(entries[at - 1])) if at else (0, 0)
        some = slice(begins[0], int(places[at]))
        raw = stored_arrays["txn_entries"][begins[1] * TXN_ENTRY.itemsize : int(entries[at]) * TXN_ENTRY.itemsize]
        batches, undecided, first, ordinals, rows = (int(stored_arrays[number][at]) for number in _NUMBER_FIELDS)
        table = BatchTable(**{column: stored_arrays[f"table_{column}"][some] for column in _TABLE_COLUMNS})
        txn = np.frombuffer(raw.tobytes(), TXN_ENTRY)
        count, records, last = (int(number) for number in stored_arrays["keyless_records"][at])
        keyless = KeylessRecords(count=count, records=records, last_offset=last)
        segments.append(
            PassOneResultOfSegment(
                name, batches, stored_arrays["places"][some], table, txn, bool(undecided), first, ordinals, rows, keyless
            )
        )
    ranges, ordinals, dirty, clean = (int(number) for number in stored_arrays["keys"])
    gate = [StoredGateRows(name, *(int(number) for number in stored_arrays["gate_rows"])) for name in _decode_lines(stored_arrays["gate"])]
    return PassOneResultOfSegmentBundle(
        tuple(segments), StoredKeyRows(object_key, object_bytes, ranges, ordinals, dirty, clean), gate[0] if gate else None
    )


def decode_scan_summaries(stored_arrays: Arrays) -> dict[str, BatchScanSummary]:
    names = [name for name, first in zip(_decode_lines(stored_arrays["ids"]), stored_arrays["first"], strict=True) if first >= 0]
    batches = stored_arrays["batches"][stored_arrays["first"] >= 0]
    flags = np.split(np.unpackbits(stored_arrays["tombstones"], count=int(batches.sum())).astype(np.bool_), np.cumsum(batches)[:-1])
    counts = np.split(stored_arrays["counts"], np.cumsum(stored_arrays["counted"])[:-1])
    keyless = np.split(stored_arrays["keyless"], np.cumsum(stored_arrays["keyless_counted"])[:-1])
    return {name: BatchScanSummary(*columns) for name, *columns in zip(names, flags, counts, keyless, strict=False)}


def _concatenate_arrays(parts: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _encode_lines(lines: list[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer("\n".join(lines).encode(), np.uint8)


def _decode_lines(text: npt.NDArray[np.uint8]) -> list[str]:
    return text.tobytes().decode().split("\n") if len(text) else []


# ---- survivors of a bundle --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredSurvivorLocations:
    """Position, size and SHA-256 by segment id."""

    parts: Mapping[str, tuple[int, int, str]]

    def encode_locations_as_arrays(self) -> Arrays:
        places = np.array([part[:2] for part in self.parts.values()], np.int64).reshape(-1, 2)
        digests = b"".join(bytes.fromhex(part[2]) for part in self.parts.values())
        return {"ids": _encode_lines(list(self.parts)), "places": places, "sha256": np.frombuffer(digests, np.uint8)}

    @staticmethod
    def decode_locations_from_arrays(stored_arrays: Arrays) -> StoredSurvivorLocations:
        parts = zip(_decode_lines(stored_arrays["ids"]), stored_arrays["places"], stored_arrays["sha256"].reshape(-1, 32), strict=True)
        return StoredSurvivorLocations({name: (int(place[0]), int(place[1]), digest.tobytes().hex()) for name, place, digest in parts})
