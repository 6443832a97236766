"""The gate: a second, simpler implementation compares what went into a group with what came out, before it is uploaded.
1. ``Gate(terms, table)``, once per round.
2. Pass 1, from the log's end: ``collect_later_outcomes``, ``extract_key_rows``, ...: the last record of
   every key.
3. ``compute_txn_outcomes``: the transactions, computed once more from the log's beginning; both must agree.
4. ``check_cleaned_group``, each group: CleanedSegmentCheckReport, or GateFailed with key, offset and segment.
Of each source segment the gate knows how many records must be left and the sum of their fingerprints, by keys under its own hash; the
output must have the same. Batches are compared by their headers: order, offsets, producers, transactions, horizons, checksums, coverage.
Keys that exceed the gate's memory are checked for one range of its hash, all other checks stay complete. The range depends on the first
dirty offset: it moves from round to round, and a round that was refused is checked for the same keys when it is retried.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from bloom.filter import siphash_key_halves
from compactor.cleaner.gate import batch_checks as failures, parser as col
from compactor.cleaner.gate.batch_checks import (
    BatchTransactionOutcomes,
    GateFailed,
    SourceAndOutputBatches,
    SourceBatchesLeftInOutput,
    SourceBatchHeaders,
    fields_of_table,
    find_batch_table_mismatch,
    find_copy_changes,
    find_header_problems,
    find_index_problems,
    find_record_mismatches,
    flag_newly_dated_markers,
    flag_removable_markers,
    flag_required_headers,
    fold_txn_outcomes,
    lacks_last_offset,
    match_batches,
    may_be_filler,
    transaction_outcomes_by_source,
)
from compactor.cleaner.gate.parser import (
    COUNT,
    DUE,
    KEYLESS_RECORD,
    MAGIC,
    NULL_VALUE,
    POSITION,
    FingerprintSumsBySegment,
    GateRecordParser,
    GateRecords,
    HeaderFields,
    InflatedTooLargeError,
    LatestRecordTable,
    UnreadableBatchesError,
    Words,
    allocate_zero_fingerprint_sums,
    find_crc_mismatch,
    iterate_batch_header_blocks,
    key_hashes_of_offsets,
    pack_latest_record_rows,
    parse_varint,
    read_all_batch_headers,
    split_into_chunks,
    sum_fingerprints_by_batch,
)
from compactor.cleaner.retention import RetentionRules
from compactor.cleaner.rewrite import CleanedSegment
from compactor.cleaner.source import KeyTableRowsAndBatchCount, SourceSegment
from compactor.cleaner.worker_threads import ReusableJobBuffers
from compactor.errors import BadData, CompactorError
from compactor.kernels.common import FirstRowByBatch, Flags, HashKeyHalf
from compactor.kernels.jit import kernel
from compactor.model.segment import Balance
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.batches import ABORT, COMMIT, HORIZON, NOT_CONTROL, TRANSACTIONAL, BatchTable, Bytes, Int64s, memory_map_file
from compactor.records.encode import (
    BATCHES_DROPPED,
    OPENED,
    RECORDS,
    RECORDS_DROPPED,
    BalanceDigestKey,
    DigestSumRows,
    add_batch_digest,
    digest_sum_from_row,
    record_digest_half,
    second_half_of_digest,
)
from compactor.records.rows import BatchChunk

_STRIDE: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: multiples of it, modulo 2^64, are spread evenly."""


@dataclass(frozen=True, slots=True)
class CleanedSegmentCheckReport:
    """Summary of the check of a group.
    keys: of the dirty range, that were looked up.
    coverage: share of the dirty range's keys that were looked up, 1.0 for all.
    """

    batches: int
    records: int
    keys: int
    coverage: float


@dataclass(frozen=True, slots=True)
class CleanedSegmentCheckParameters:
    """Parameters of a round's check.
    first_dirty: keys are checked for the offsets from it to rules.latest_offset, both inclusive.
    hash_key: the cleaner's, 16 bytes.
    inflate_limit: of one batch.
    opened: first offsets of open transactions at the start of the first source, by producer id.
    """

    rules: RetentionRules
    first_dirty: int
    hash_key: bytes
    inflate_limit: int
    opened: Mapping[int, int] = field(default_factory=dict)

    @property
    def gate_hash_key_halves(self) -> tuple[HashKeyHalf, HashKeyHalf]:
        """The gate's own hash key: keys that collide in the cleaner's map do not collide under it."""
        return siphash_key_halves(hashlib.sha256(b"gate" + self.hash_key).digest()[:16])

    @property
    def checked_hash_value(self) -> int:
        """A hash value, from 0 to 2^64 - 1, in the range that is checked if memory does not suffice for all keys."""
        return self.first_dirty * _STRIDE % 2**64

    def has_dirty_offsets(self, source: SourceSegment) -> bool:
        return self.first_dirty <= self.rules.latest_offset and source.end > self.first_dirty and source.base <= self.rules.latest_offset


# ---- balance of a new segment, summed by the gate's parser and not by the cleaner that wrote the segment -----------------------


class NewSegmentBalanceBuilder:
    """Builder of one segment's balance: ``compute_balance`` parses the records that the gate does not add."""

    def __init__(self, cleaned: CleanedSegment, balance_key: BalanceDigestKey, max_inflated_bytes: int) -> None:
        self._cleaned = cleaned
        self._key = balance_key
        self._limit = max_inflated_bytes
        self._begun: tuple[Bytes, HeaderFields] | None = None
        self._anew = self._wanted = cleaned.anew
        self._records = np.zeros(3, np.uint64)

    def set_segment(self, buf: Bytes, headers: HeaderFields) -> None:
        """Checksums were verified before."""
        if headers.shape[1] != len(self._anew):
            self._anew = np.zeros(headers.shape[1], np.bool_)  # nobody knows which is which, and nothing will add up
        self._begun = buf, headers
        self._wanted = self._anew & (headers[COUNT] > 0)

    def add_parsed_records(self, headers: HeaderFields, records: GateRecords) -> None:
        """Batches that were added before are ignored."""
        batches = np.searchsorted(self._segment()[1][POSITION], headers[POSITION])
        _add_record_digests(
            batches, self._wanted, records.buf, records.first_row, records.offset, records.key_start,
            records.key_length, *self._key.halves, self._records,
        )  # fmt: skip

    @measure_stage(SegmentWorkStage.GATE)
    def compute_balance(self) -> Balance:
        """Called once. Raises BadData if the segment cannot be parsed."""
        buf, headers = self._segment()
        self._add_remaining_records(buf, headers)
        self._begun = None  # whoever still knows this tally must not keep the file's room on the disk
        cleaned, sums = self._cleaned, self._cleaned.sums
        left, result = np.zeros(3, np.uint64), np.zeros(3, np.uint64)
        _sum_batch_digests(buf, headers[POSITION], headers[MAGIC], self._anew, *self._key.halves, left, result)
        return Balance(
            sources=cleaned.sources,
            left=digest_sum_from_row(left),
            opened=digest_sum_from_row(sums[OPENED]),
            dropped={reason: digest_sum_from_row(sums[row]) for reason, row in BATCHES_DROPPED.items() if sums[row, 0]},
            result=digest_sum_from_row(result),
            records=digest_sum_from_row(sums[RECORDS]),
            written=digest_sum_from_row(self._records),
            records_dropped={reason: digest_sum_from_row(sums[row]) for reason, row in RECORDS_DROPPED.items() if sums[row, 0]},
        )

    def _segment(self) -> tuple[Bytes, HeaderFields]:
        if self._begun is None:
            buf = memory_map_file(self._cleaned.paths["log"])
            try:
                headers = read_all_batch_headers(buf)
            except UnreadableBatchesError as problem:
                raise self._unparsable_segment_error(f"cannot be read: {problem}") from None
            if find_crc_mismatch(buf, headers) >= 0:
                raise self._unparsable_segment_error("has a batch with an invalid CRC")
            self.set_segment(buf, headers)
            return buf, headers
        return self._begun

    def _add_remaining_records(self, buf: Bytes, headers: HeaderFields) -> None:
        waiting = list(split_into_chunks(headers, self._wanted))[::-1]
        if not waiting:
            return
        reader = GateRecordParser(np.uint64(0), np.uint64(0), self._limit)
        reader.on_records = self.add_parsed_records
        while waiting:
            some = waiting.pop()
            try:
                reader.parse_records_of_batches(buf, headers[:, some])
            except InflatedTooLargeError:
                waiting += np.array_split(some, 2)[::-1]
            except UnreadableBatchesError as problem:
                raise self._unparsable_segment_error(f"cannot be read: {problem}") from None

    def _unparsable_segment_error(self, cause: str) -> BadData:
        return BadData(f"the new segment {cause}", segment=self._cleaned.paths["log"].name, hint="This is a bug; please report it")


@kernel
def _add_record_digests(
    batch_numbers: Int64s,
    wanted_flags: Flags,
    buf: Bytes,
    first_row: FirstRowByBatch,
    offset: Int64s,
    key_start: Int64s,
    key_length: Int64s,
    k0: HashKeyHalf,
    k1: HashKeyHalf,
    out_sums: DigestSumRows,
) -> None:
    """Add the records (v2) of the wanted batches, and clear their flags."""
    for i in range(batch_numbers.size):
        if not wanted_flags[batch_numbers[i]]:
            continue
        wanted_flags[batch_numbers[i]] = False
        for row in range(first_row[i], first_row[i + 1]):
            value_length, value_start = parse_varint(buf, key_start[row] + max(key_length[row], 0), buf.size)
            one = record_digest_half(buf, offset[row], key_start[row], key_length[row], value_start, max(value_length, -1), k0)
            out_sums[0] += np.uint64(1)
            out_sums[1] += one
            out_sums[2] += second_half_of_digest(one, k1)


@kernel
def _sum_batch_digests(
    buf: Bytes,
    position: Int64s,
    magic: Int64s,
    rewritten_flags: Flags,
    k0: HashKeyHalf,
    k1: HashKeyHalf,
    unchanged_sums: DigestSumRows,
    new_sums: DigestSumRows,
) -> None:
    for i in range(position.size):
        add_batch_digest(buf, position[i], magic[i], k0, k1, new_sums)
        if not rewritten_flags[i]:
            add_batch_digest(buf, position[i], magic[i], k0, k1, unchanged_sums)


MapSourceBytes = Callable[[SourceSegment], AbstractContextManager[None]]

CountAndFingerprintSum = Words
"""Two numbers: how many records, and the sum of their fingerprints."""
BatchNumbersAndRecords = tuple[Int64s, GateRecords]
"""Numbers of some batches of a segment, and their records."""


@dataclass(frozen=True, slots=True)
class _FingerprintSumsOutsideDirtyRange:
    """Per batch, of the records that must remain outside the dirty range; valid where ``known`` is set."""

    known: Flags
    sums: FingerprintSumsBySegment


class Gate:
    """Second, independent check of one round. Used by one thread at a time, except ``extract_key_rows`` and ``add_rewrite_chunk``."""

    def __init__(
        self,
        parameters: CleanedSegmentCheckParameters,
        latest_record_table: LatestRecordTable,
        txn_outcomes_by_ordinal: Mapping[int, BatchTransactionOutcomes] | None = None,
        expected_fingerprint_sums_by_ordinal: Mapping[int, CountAndFingerprintSum] | None = None,
    ) -> None:
        """:param latest_record_table: empty."""
        self._terms = parameters
        self._rules = parameters.rules
        self._first_dirty = parameters.first_dirty
        self._table = latest_record_table
        self._outcomes_of = dict(txn_outcomes_by_ordinal or {})
        self._whole: dict[int, BatchTransactionOutcomes] = {}
        self._left: dict[int, CountAndFingerprintSum] = dict(expected_fingerprint_sums_by_ordinal or {})
        self._dirty: dict[int, SourceSegment] = {}
        self._outcomes: dict[int, int] = {}
        """By producer id, its first marker behind all that was read so far."""
        self._settled = False
        self._batches_read: Counter[int] = Counter()
        self._crcs: dict[int, npt.NDArray[np.uint32]] = {}
        self._outside: dict[int, _FingerprintSumsOutsideDirtyRange] = {}
        self._key = (*parameters.gate_hash_key_halves, parameters.inflate_limit)
        self._reader = GateRecordParser(*self._key)
        self._output_reader = GateRecordParser(*self._key)

    @property
    def checked_key_share(self) -> float:
        return 1 / self._table.hash_range_count

    def free_latest_record_table(self) -> None:
        self._table = LatestRecordTable(0, 0)

    # ---- transactions

    def collect_later_outcomes(self, source: SourceSegment) -> None:
        """Segments are passed newest first."""
        if not self._settled:
            self._flag_aborted_batches(source.table)

    def compute_txn_outcomes(self, sources: Sequence[SourceSegment]) -> None:
        """May be called again when more segments are known.
        :param sources: all live segments, or their ``substitute_segment``.
        :raises GateFailed: if an outcome differs from the one found when the dirty range was read from its end.
        """
        before = {} if self._settled else {ordinal: self._outcomes_of[ordinal].aborted for ordinal in self._dirty}
        ordinals = (source.ordinal for source in sources)
        self._outcomes_of = dict(zip(ordinals, transaction_outcomes_by_source(sources, self._terms.opened), strict=True))
        self._whole.clear()
        for ordinal, aborted in before.items():
            if not np.array_equal(aborted, self._outcomes_of[ordinal].aborted):
                raise GateFailed(
                    "read from its end and from its beginning the log has other aborted batches", segment=self._dirty[ordinal].name
                )
        self._settled = True

    def narrow_txn_outcomes(self, source: SourceSegment, batch_numbers: Int64s) -> None:
        """Keep only the outcomes of the batches that will be rewritten, all that ``source`` contains."""
        whole = self._whole.setdefault(source.ordinal, self._outcomes_of[source.ordinal])
        self._outcomes_of[source.ordinal] = whole.select_batches(batch_numbers)

    def _flag_aborted_batches(self, table: BatchTable) -> Flags:
        """Segments must be passed from the last to the first."""
        flags = np.zeros(len(table), np.bool_)
        some = np.flatnonzero((table.control != NOT_CONTROL) | ((table.attributes & np.int16(TRANSACTIONAL)) != 0))
        known = list(self._outcomes)
        producer = np.concatenate((table.producer_id[some].astype(np.int64), np.array(known, np.int64)))
        kind = np.concatenate((table.control[some].astype(np.int64), np.array([self._outcomes[each] for each in known], np.int64)))
        base = np.concatenate((table.base_offset[some].astype(np.int64), np.zeros(len(known), np.int64)))
        ids, places = np.unique(producer, return_inverse=True)
        # As if the next marker of each producer stood right behind the segment.
        never_opened = np.full(len(ids), -1, np.int64)
        flags[some] = fold_txn_outcomes(kind, places.astype(np.int64), base, never_opened)[0][: len(some)]
        markers = some[(table.control[some] == ABORT) | (table.control[some] == COMMIT)]
        for at in markers[::-1].tolist():
            self._outcomes[int(table.producer_id[at])] = int(table.control[at])
        return flags

    # ---- what must be left

    def read_dirty_range(self, sources: Sequence[SourceSegment]) -> None:
        """Read the dirty range, if pass 1 does not pass its chunks to the gate. Raises GateFailed."""
        for source in reversed(sources):
            if self._terms.has_dirty_offsets(source):
                self.read_dirty_segment(source)
            elif source.base > self._rules.latest_offset:
                self.collect_later_outcomes(source)
        self.compute_txn_outcomes(sources)

    @measure_stage(SegmentWorkStage.GATE, lambda self, source: source.size)
    def read_dirty_segment(self, source: SourceSegment) -> None:
        """Raises GateFailed if the cleaner's batch table does not match the bytes."""
        self.begin_segment(source)
        headers = fields_of_table(source.table)
        wanted = self._flag_batches_to_read(source, selects_non_dirty=False)
        for some, records in self._parse_batch_records(self._reader, source.buf, headers, wanted, source.name):
            self.add_key_rows(source, self._key_rows(records, headers[:, some], source, selects_non_dirty=False))

    def _flag_batches_to_read(self, source: SourceSegment, selects_non_dirty: bool) -> Flags:
        table = source.table
        data = (table.control == NOT_CONTROL) & ~self._outcomes_of[source.ordinal].aborted
        if not selects_non_dirty:
            return data & (table.last_offset >= self._first_dirty) & self._terms.has_dirty_offsets(source)
        # A wrapper whose own offset was never set (old librdkafka) reaches beyond the range, and its header does not say so.
        outside = (table.last_offset > self._rules.latest_offset) | ((table.magic < 2) & (table.last_offset == 0))
        if source.base < self._first_dirty:
            outside |= table.base_offset < self._first_dirty
        return data & outside

    @measure_stage(SegmentWorkStage.GATE)
    def begin_segment(self, source: SourceSegment) -> None:
        if not self._settled and source.ordinal not in self._outcomes_of:
            none, aborted = np.zeros(len(source.table), np.bool_), self._flag_aborted_batches(source.table)
            self._outcomes_of[source.ordinal] = BatchTransactionOutcomes(aborted, none, np.full(len(none), -1, np.int64))
            self._dirty[source.ordinal] = source
        if source.ordinal in self._crcs:
            return
        table, read = source.table, 0
        crcs = np.empty(len(table), np.uint32)
        try:
            for headers in iterate_batch_header_blocks(source.buf):
                problem = find_batch_table_mismatch(headers, table, read)
                if problem:
                    raise GateFailed(problem[0], segment=source.name, offset=problem[1])
                crcs[read : read + headers.shape[1]] = headers[col.STORED_CRC]
                read += headers.shape[1]
        except UnreadableBatchesError as unreadable:
            raise GateFailed(f"the gate cannot read it: {unreadable}", segment=source.name) from None
        if read != len(table):
            raise GateFailed(f"the cleaner saw {len(table)} batches, there are {read}", segment=source.name)
        self._crcs[source.ordinal] = crcs
        self._outside[source.ordinal] = _FingerprintSumsOutsideDirtyRange(
            ~self._flag_batches_to_read(source, selects_non_dirty=True), allocate_zero_fingerprint_sums(len(table))
        )

    @measure_stage(SegmentWorkStage.GATE, lambda self, buffers, source, chunk, selects_non_dirty=False: chunk.body_size_bytes)
    def extract_key_rows(
        self, buffers: ReusableJobBuffers, source: SourceSegment, chunk: BatchChunk, *, selects_non_dirty: bool = False
    ) -> KeyTableRowsAndBatchCount:
        """Rows of records with a key in the dirty range, or, if ``selects_non_dirty``, below it."""
        some = slice(chunk.first, chunk.last)
        data = (source.table.control[some] == NOT_CONTROL) & ~self._outcomes_of[source.ordinal].aborted[some]
        mine = self._flag_batches_to_read(source, selects_non_dirty)[some]
        if np.any(chunk.wanted & ~data) or np.any(mine & ~chunk.wanted):
            offset = int(source.table.last_offset[chunk.first])
            raise GateFailed("gate and cleaner do not agree which batches were aborted", segment=source.name, offset=offset)
        headers, records = self._parse_chunk(buffers, source, chunk, mine)
        return self._key_rows(records, headers, source, selects_non_dirty)

    @measure_stage(SegmentWorkStage.GATE)
    def add_key_rows(self, source: SourceSegment, chunk_rows: KeyTableRowsAndBatchCount) -> None:
        """While the table is full, halve the range of key hashes that is checked. Raises OutOfBudget."""
        done = self._table.put_rows_until_full(chunk_rows.rows)
        while done < len(chunk_rows.rows):
            self._table.halve_hash_range(self._terms.checked_hash_value)
            done += self._table.put_rows_until_full(chunk_rows.rows[done:])
        self._batches_read[source.ordinal] += chunk_rows.batches

    @measure_stage(SegmentWorkStage.GATE, lambda self, buffers, source, chunk: chunk.body_size_bytes)
    def add_rewrite_chunk(self, buffers: ReusableJobBuffers, source: SourceSegment, chunk: BatchChunk) -> None:
        """Sum the records of a chunk of pass 2 that lie outside the dirty range and must remain."""
        if source.ordinal in self._left:
            return
        some = slice(chunk.first, chunk.last)
        mine = chunk.wanted & self._flag_batches_to_read(source, selects_non_dirty=True)[some]
        if mine.any():
            headers, records = self._parse_chunk(buffers, source, chunk, mine)
            self._add_outside_fingerprints(source, chunk.first + np.flatnonzero(mine), headers, records)

    def _parse_chunk(
        self, buffers: ReusableJobBuffers, source: SourceSegment, chunk: BatchChunk, selected_flags: Flags
    ) -> tuple[HeaderFields, GateRecords]:
        if buffers.second_reader is None:
            buffers.second_reader = GateRecordParser(*self._key)
        headers = fields_of_table(source.table, slice(chunk.first, chunk.last))[:, selected_flags]
        body = np.stack((chunk.body_start[selected_flags], chunk.body_end[selected_flags]))
        try:
            records = buffers.second_reader.parse_inflated_bodies(chunk.buf, headers, body)
        except UnreadableBatchesError as problem:
            raise GateFailed(f"unreadable: {problem}", segment=source.name) from None
        self._assign_keyless_keys(records)
        return headers, records

    def _parse_batch_records(
        self, reader: GateRecordParser, buf: Bytes, headers: HeaderFields, wanted_flags: Flags, segment_name: str
    ) -> Iterator[BatchNumbersAndRecords]:
        waiting = list(split_into_chunks(headers, wanted_flags))[::-1]
        while waiting:
            some = waiting.pop()
            try:
                records = reader.parse_records_of_batches(buf, headers[:, some])
            except InflatedTooLargeError:
                waiting += np.array_split(some, 2)[::-1]
                continue
            except UnreadableBatchesError as problem:
                raise GateFailed(f"unreadable: {problem}", segment=segment_name) from None
            self._assign_keyless_keys(records)
            yield some, records

    def _assign_keyless_keys(self, records: GateRecords) -> None:
        """Unless the rules drop them, each record without a key gets a key of its own and is no tombstone."""
        if self._rules.drops_keyless:
            return
        keyless = np.flatnonzero(records.flags & KEYLESS_RECORD)
        if len(keyless):
            records.hashes[keyless] = key_hashes_of_offsets(records.offset[keyless], self._key[0], self._key[1])
            records.flags[keyless] &= np.uint8(~NULL_VALUE & 0xFF)

    def _flag_mappable(self, records: GateRecords) -> Flags:
        return np.ones(len(records.offset), np.bool_) if not self._rules.drops_keyless else records.flags & KEYLESS_RECORD == 0

    def _key_rows(
        self, records: GateRecords, headers: HeaderFields, source: SourceSegment, selects_non_dirty: bool
    ) -> KeyTableRowsAndBatchCount:
        due = self._flag_due_tombstones(records, headers, source)
        digests, keyed = records.digest, self._flag_mappable(records)
        picked = keyed & ((records.offset < self._first_dirty) == selects_non_dirty) & (records.offset <= self._rules.latest_offset)
        if selects_non_dirty:
            picked &= ~due
        elif due.any():
            digests = np.where(due, digests | DUE, digests)
        if picked.all():
            return KeyTableRowsAndBatchCount(headers.shape[1], pack_latest_record_rows(records.hashes, records.offset, digests))
        return KeyTableRowsAndBatchCount(
            headers.shape[1], pack_latest_record_rows(records.hashes[picked], records.offset[picked], digests[picked])
        )

    def _flag_due_tombstones(self, records: GateRecords, headers: HeaderFields, source: SourceSegment) -> Flags:
        tombstones = records.flags & NULL_VALUE != 0
        if not tombstones.any():
            return tombstones
        v2 = headers[col.MAGIC] == 2
        dated = v2 & (headers[col.ATTRIBUTES] & HORIZON != 0) & (headers[col.BASE_TIMESTAMP] <= self._rules.now_ms)
        due = dated | (~v2 & (source.mtime_ms <= self._rules.legacy_horizon_ms))
        return tombstones & np.repeat(due, np.diff(records.first_row))

    def _add_outside_fingerprints(self, source: SourceSegment, batch_numbers: Int64s, headers: HeaderFields, records: GateRecords) -> None:
        reported, latest = self._outside[source.ordinal], self._table.latest_offsets(records.hashes)
        stays = ~self._flag_records_to_remove(records, headers, source, latest) & (
            (records.offset < self._first_dirty) | (records.offset > self._rules.latest_offset)
        )
        reported.sums[batch_numbers] = sum_fingerprints_by_batch(records, stays & self._flag_checked_records(records))
        reported.known[batch_numbers] = True

    def _flag_checked_records(self, records: GateRecords) -> Flags:
        """Flag the records in the checked hash range, or after the mapped range."""
        if self._table.hash_range_count == 1:
            return np.ones(len(records.offset), np.bool_)
        return self._table.flag_keys_in_range(records.hashes) | (records.offset > self._rules.latest_offset)

    def _flag_records_to_remove(
        self, records: GateRecords, headers: HeaderFields, source: SourceSegment, latest_offset_of_key: Int64s
    ) -> Flags:
        gone = (latest_offset_of_key > records.offset) | ~self._flag_mappable(records) | self._flag_due_tombstones(records, headers, source)
        return gone & (records.offset <= self._rules.latest_offset)

    def _expected_sum(self, source: SourceSegment, map_bytes: MapSourceBytes) -> CountAndFingerprintSum:
        if source.ordinal in self._left:
            return self._left[source.ordinal]
        reported = self._outside[source.ordinal]
        if not reported.known.all():
            headers = fields_of_table(source.table)
            with map_bytes(source):
                for some, records in self._parse_batch_records(self._reader, source.buf, headers, ~reported.known, source.name):
                    self._add_outside_fingerprints(source, some, headers[:, some], records)
        below = reported.sums.sum(axis=0, dtype=np.uint64)
        dirty = self._expected_sums.get(source.ordinal)
        return below if dirty is None else below + dirty

    @cached_property
    def _expected_sums(self) -> dict[int, CountAndFingerprintSum]:
        dirty = [self._dirty[ordinal] for ordinal in sorted(self._dirty)]
        sums = allocate_zero_fingerprint_sums(len(dirty))
        if dirty:
            bounds = np.array([*(source.base for source in dirty), dirty[-1].end], np.int64)
            self._table.add_remaining_sums(bounds, sums)
        return {source.ordinal: sums[number] for number, source in enumerate(dirty)}

    # ---- one group

    @measure_stage(SegmentWorkStage.GATE, lambda self, sources, path_by_kind, **_: path_by_kind["log"].stat().st_size)
    def check_cleaned_group(
        self,
        sources: Sequence[SourceSegment],
        path_by_kind: Mapping[str, Path],
        *,
        end_offset: int | None,
        map_bytes: MapSourceBytes = lambda source: nullcontext(),
        new_segment_balance: NewSegmentBalanceBuilder | None = None,
    ) -> CleanedSegmentCheckReport:
        """:param end_offset: last offset of the new segment, inclusive; None if it may end earlier, as with Kafka's cleaner.
        :raises GateFailed: if a record or batch is missing, surplus or different.
        """
        for source in self._dirty.values():
            read = self._batches_read[source.ordinal]
            if not self._settled or read != np.count_nonzero(self._flag_batches_to_read(source, selects_non_dirty=False)):
                raise CompactorError("the gate was asked before it had read the dirty range", hint="This is a bug; please report it")
        name, self._output_reader.on_records = sources[0].name, new_segment_balance.add_parsed_records if new_segment_balance else None
        output = memory_map_file(path_by_kind["log"])
        headers = self._check_output(output, sources[0].base, end_offset, name)
        if new_segment_balance:
            new_segment_balance.set_segment(output, headers)
        for cause in find_index_problems(headers, sources[0].base, path_by_kind):
            raise GateFailed(cause, segment=name)
        group = self._match_output_to_sources(sources, headers, end_offset, self._unstated_last_offset(sources[0], map_bytes), name)
        for cause, offset in find_header_problems(group, path_by_kind):
            raise GateFailed(cause, segment=name, offset=offset)
        data = group.source[col.CONTROL_KIND] == NOT_CONTROL
        may_go = flag_removable_markers(group.source, group.outcomes, self._rules.now_ms)
        dated = flag_newly_dated_markers(group.source, group.outcomes.idle, may_go)
        begin = records = 0
        for source in sources:
            if source.ordinal not in self._crcs:
                with map_bytes(source):
                    self.begin_segment(source)
            group.source.crc[begin : begin + len(source.table)] = self._crcs[source.ordinal]
            self._require_unchanged_marker_records(SourceBatchesLeftInOutput.select_left(group, source, begin, dated), output, map_bytes)
            records += self._check_records(SourceBatchesLeftInOutput.select_left(group, source, begin, data), output, map_bytes)
            begin += len(source.table)
        for cause, offset in find_copy_changes(group):
            raise GateFailed(cause, segment=name, offset=offset)
        return CleanedSegmentCheckReport(headers.shape[1], records, self._table.key_count, self.checked_key_share)

    def _check_output(self, output: Bytes, base_offset: int, end_offset: int | None, segment_name: str) -> HeaderFields:
        try:
            headers = read_all_batch_headers(output)
        except UnreadableBatchesError as problem:
            raise GateFailed(f"unreadable: {problem}", segment=segment_name) from None
        wrong = find_crc_mismatch(output, headers)
        if wrong >= 0:
            raise GateFailed("a wrong CRC", segment=segment_name, offset=int(headers[col.BASE, wrong]))
        batches = headers.shape[1]
        descends = headers[col.BASE] <= np.concatenate((np.array([base_offset - 1]), headers[col.LAST]))[:batches]
        if descends.any():
            raise GateFailed("offsets do not ascend", segment=segment_name, offset=int(headers[col.BASE, descends][0]))
        if end_offset is not None and (not batches or int(headers[col.LAST, -1]) != end_offset):
            found = f"ends at offset {headers[col.LAST, -1]}" if batches else "is empty"
            raise GateFailed(f"it {found} and must end at {end_offset}", segment=segment_name, offset=end_offset)
        return headers

    def _unstated_last_offset(self, source: SourceSegment, map_bytes: MapSourceBytes) -> int:
        if not lacks_last_offset(source.table):
            return -1
        with map_bytes(source):
            headers = fields_of_table(source.table, slice(1))
            _, records = next(self._parse_batch_records(self._reader, source.buf, headers, np.ones(1, np.bool_), source.name))
            return int(records.offset[-1])

    def _match_output_to_sources(
        self,
        sources: Sequence[SourceSegment],
        output: HeaderFields,
        end_offset: int | None,
        end_offset_of_first_batch: int,
        segment_name: str,
    ) -> SourceAndOutputBatches:
        source = SourceBatchHeaders([s.table for s in sources])
        parts = [self._outcomes_of[s.ordinal] for s in sources]
        columns = (np.concatenate([getattr(part, field) for part in parts]) for field in ("aborted", "idle", "began"))
        outcomes = BatchTransactionOutcomes(*columns)
        filler = False
        if end_offset is not None and may_be_filler(output[:, -1], end_offset):
            # The header of a batch that must stay can look just like one.
            filler = not np.any(flag_required_headers(source, self._rules) & (source[col.LAST] == end_offset))
            if filler and len(source) and output[col.LEADER_EPOCH, -1] != source[col.LEADER_EPOCH][-1]:
                raise GateFailed("a filler of another leader epoch than the last source batch", segment=segment_name, offset=end_offset)
        output = output[:, : output.shape[1] - int(filler)]
        origin, problem = match_batches(source, output, end_offset_of_first_batch)
        if problem:
            raise GateFailed(problem[0], segment=segment_name, offset=problem[1])
        return SourceAndOutputBatches(source, outcomes, output, origin, self._rules)

    def _check_records(self, pairs: SourceBatchesLeftInOutput, output: Bytes, map_bytes: MapSourceBytes) -> int:
        found = np.zeros(2, np.uint64)
        for _, records in self._parse_output_records(pairs, output):
            found += sum_fingerprints_by_batch(records, self._flag_checked_records(records)).sum(axis=0, dtype=np.uint64)
        left = self._expected_sum(pairs.source, map_bytes)
        if np.any(found != left):
            with map_bytes(pairs.source):
                excess = (int(found[1]) - int(left[1])) % 2**64
                self._raise_for_differing_record(
                    pairs, output, failures.FingerprintSumMismatch(pairs.source.name, int(left[0]), int(found[0]), excess)
                )
        return int(found[0])

    def _require_unchanged_marker_records(self, pairs: SourceBatchesLeftInOutput, output: Bytes, map_bytes: MapSourceBytes) -> None:
        """Markers that got their delete horizon in this round must have the same record."""
        if not len(pairs.origin):
            return
        with map_bytes(pairs.source):
            headers = SourceBatchHeaders([pairs.source.table]).fields_of_batches(pairs.origin)
            was, _ = self._summarize_batches(self._reader, pairs.source.buf, headers, pairs.source.name)
        became, highest = self._summarize_batches(self._output_reader, output, pairs.output, pairs.source.name)
        was[2] = 0  # what is written anew has none
        wrong = np.any(was != became, axis=0) | (pairs.output[col.MAX_TIMESTAMP] != highest)
        if wrong.any():
            offset = int(pairs.output[col.LAST, wrong][0])
            raise GateFailed("a marker that differs from its source", segment=pairs.source.name, offset=offset)

    def _summarize_batches(
        self, reader: GateRecordParser, buf: Bytes, headers: HeaderFields, segment_name: str
    ) -> tuple[npt.NDArray[np.uint64], Int64s]:
        """By batch: record count, sum of fingerprints and attribute bits (shape (3, n)); maximum timestamp (shape n)."""
        sums, highest = np.zeros((3, headers.shape[1]), np.uint64), np.zeros(headers.shape[1], np.int64)
        for some, records in self._parse_batch_records(reader, buf, headers, headers[col.COUNT] > 0, segment_name):
            sums[:2, some] = sum_fingerprints_by_batch(records, np.ones(len(records.offset), np.bool_)).T
            sums[2, some] = np.bitwise_or.reduceat(records.flags & col.ODD_ATTRIBUTES, records.first_row[:-1])
            highest[some] = np.maximum.reduceat(records.timestamp, records.first_row[:-1])
        return sums, highest

    def _parse_output_records(self, pairs: SourceBatchesLeftInOutput, output: Bytes) -> Iterator[BatchNumbersAndRecords]:
        """Raises GateFailed if records differ from their batch header."""
        name, sources = pairs.source.name, SourceBatchHeaders([pairs.source.table])
        sources.crc = self._crcs[pairs.source.ordinal]
        for some, records in self._parse_batch_records(self._output_reader, output, pairs.output, pairs.output[col.COUNT] > 0, name):
            out, of = pairs.output[:, some], sources.fields_of_batches(pairs.origin[some])
            begin, end = records.first_row[:-1], records.first_row[1:] - 1
            for cause, offset in find_record_mismatches(of, out, records, self._rules):
                raise GateFailed(cause, segment=name, offset=offset)
            inside = (records.offset[begin] >= out[col.BASE]) & (records.offset[end] <= out[col.LAST])
            if not inside.all() or np.any(np.diff(records.offset) <= 0):
                raise GateFailed("records whose offsets do not ascend within their batches", segment=name, offset=int(out[col.BASE, 0]))
            keyless = ~self._flag_mappable(records) & (records.offset <= self._rules.latest_offset)
            if keyless.any():
                offset = int(records.offset[keyless][0])
                raise GateFailed("a record without a key, which compaction removes", segment=name, offset=offset)
            due = self._flag_due_tombstones(records, of, pairs.source) & (records.offset <= self._rules.latest_offset)
            if due.any():
                raise failures.first_invalid_record_error(failures.EXPIRED, name, records, due)
            yield pairs.origin[some], records

    def _raise_for_differing_record(
        self, pairs: SourceBatchesLeftInOutput, output: Bytes, mismatch: failures.FingerprintSumMismatch
    ) -> NoReturn:
        """Raise GateFailed for a record that explains the difference, or for the sums if none is found."""
        source, name = pairs.source, pairs.source.name
        headers = fields_of_table(source.table)
        data = (source.table.control == NOT_CONTROL) & ~self._outcomes_of[source.ordinal].aborted
        filled = pairs.output[col.COUNT] > 0
        for some, records in self._parse_batch_records(self._reader, source.buf, headers, data, name):
            there = np.zeros(len(records.offset), np.bool_)
            for _, written in self._parse_batch_records(
                self._output_reader, output, pairs.output, filled & np.isin(pairs.origin, some), name
            ):
                there[failures.rows_of_written(name, records, written)] = True
            if source.ordinal in self._left:
                failures.raise_for_single_record(name, records, there, self._flag_mappable(records), mismatch)
            else:
                latest = self._table.latest_offsets(records.hashes)
                must_go = self._flag_records_to_remove(records, headers[:, some], source, latest)
                failures.raise_for_invalid_record(name, records, there, latest, must_go, self._flag_checked_records(records))
        raise mismatch.unexplained_error()
