"""Checks of the equivalence gate on whole batches: outcomes of transactions, headers that must stay, permitted forms of cleaned batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.gate import parser as col
from compactor.cleaner.gate.parser import GateRecords, HeaderFields, record_fingerprints
from compactor.cleaner.retention import RetentionRules
from compactor.cleaner.source import SourceSegment
from compactor.errors import CompactorError
from compactor.kernels.common import Flags
from compactor.kernels.jit import kernel
from compactor.records.batches import (
    ABORT,
    CODEC_MASK,
    COMMIT,
    CONTROL,
    EMPTIED,
    HORIZON,
    LOG_APPEND,
    MALFORMED,
    NOT_CONTROL,
    TRANSACTIONAL,
    BatchTable,
    Int64s,
)
from compactor.records.indexes import OFFSET_ENTRY, TIME_ENTRY, TXN_ENTRY

# ---- errors, and the search for the record that explains why a segment's records differ from those that must be left -----------


LOST: Final = "the last record of a key is missing"
EXPIRED: Final = "a tombstone whose horizon has passed"


class GateFailed(CompactorError):
    """Raised for a bug in the cleaner or in the gate. Nothing was uploaded."""

    def __init__(self, cause: str, *, segment: str, offset: int = -1, key: bytes | None = None) -> None:
        where = segment + (f", offset {offset}" if offset >= 0 else "") + (f", key {key[:100]!r}" if key is not None else "")
        super().__init__(
            f"the gate refuses the cleaned segment of {where}: {cause}",
            hint="Nothing was published and the sources are untouched. This is a bug; please report it with this message",
        )
        self.cause = cause
        self.segment = segment
        self.offset = offset
        self.key = key


@dataclass(frozen=True, slots=True)
class FingerprintSumMismatch:
    """Difference between a cleaned segment's records and those that must remain.
    excess: fingerprint sum found minus expected, modulo 2^64.
    """

    segment: str
    expected: int
    found: int
    excess: int

    def unexplained_error(self) -> GateFailed:
        """The error if no single missing or surplus record explains the difference."""
        what = LOST if self.found < self.expected else "records are left that must not be"
        return GateFailed(f"{what}, and not only one: {self.expected} must be left of it, {self.found} are", segment=self.segment)


def rows_of_written(segment_name: str, source: GateRecords, written: GateRecords) -> Int64s:
    """Raises GateFailed for a record that the source lacks, or has with another content."""
    if not len(source.offset) and len(written.offset):
        invented = np.ones(len(written.offset), np.bool_)
        raise first_invalid_record_error("a record that no source has", segment_name, written, invented)
    at = np.minimum(np.searchsorted(source.offset, written.offset), len(source.offset) - 1)
    invented = source.offset[at] != written.offset
    if invented.any():
        raise first_invalid_record_error("a record that no source has", segment_name, written, invented)
    changed = source.digest[at] != written.digest
    if changed.any():
        raise first_invalid_record_error("key, timestamp, value or headers are not the source's", segment_name, written, changed)
    return at


def raise_for_invalid_record(
    segment_name: str,
    source: GateRecords,
    in_output_flags: Flags,
    latest_offset_of_key: Int64s,
    must_be_removed_flags: Flags,
    checked_flags: Flags,
) -> None:
    """Raise GateFailed for the first missing or surplus record.
    :param latest_offset_of_key: of the newest record with the key of each source record.
    """
    invalid = checked_flags & (in_output_flags == must_be_removed_flags)
    for row in np.flatnonzero(invalid)[:1].tolist():
        raise first_invalid_record_error(
            f"superseded by the record at offset {latest_offset_of_key[row]}" if in_output_flags[row] else LOST,
            segment_name,
            source,
            invalid,
        )


def raise_for_single_record(
    segment_name: str, source: GateRecords, in_output_flags: Flags, may_stay_flags: Flags, mismatch: FingerprintSumMismatch
) -> None:
    """Raise GateFailed if the fingerprint of one source record is the difference of the sums."""
    fingerprints = record_fingerprints(source.offset, source.digest)
    for cause, invalid in (
        (LOST, ~in_output_flags & may_stay_flags & (fingerprints == np.uint64(-mismatch.excess % 2**64))),
        ("superseded by a later record of its key", in_output_flags & (fingerprints == np.uint64(mismatch.excess))),
    ):
        if invalid.any():
            raise first_invalid_record_error(cause, segment_name, source, invalid)


def first_invalid_record_error(cause: str, segment_name: str, records: GateRecords, invalid_flags: Flags) -> GateFailed:
    row = int(np.flatnonzero(invalid_flags)[0])
    return GateFailed(cause, segment=segment_name, offset=int(records.offset[row]), key=records.key_of_row(row))


BatchProblem = tuple[str, int]
"""What is wrong, and the offset of the batch that has it."""

TxnOutcomeColumns = tuple[Flags, Flags, Int64s]
"""Per batch: whether it is aborted data (aborted); whether it is a marker without remaining data (idle); first remaining offset (began)."""
SourceBatchNumbersAndProblem = tuple[Int64s, BatchProblem | None]
"""Number of the source batch of each output batch, and the first problem."""

FROM_TABLE = {
    col.POSITION: "position", col.SIZE: "size", col.BASE: "base_offset", col.LAST: "last_offset", col.BASE_TIMESTAMP: "base_timestamp",
    col.MAX_TIMESTAMP: "max_timestamp", col.PRODUCER_ID: "producer_id", col.MAGIC: "magic", col.ATTRIBUTES: "attributes",
    col.LEADER_EPOCH: "leader_epoch", col.PRODUCER_EPOCH: "producer_epoch", col.BASE_SEQUENCE: "base_sequence", col.COUNT: "count",
    col.CONTROL_KIND: "control", col.COORDINATOR_EPOCH: "coordinator_epoch",
}  # fmt: skip
_UNCHANGED_FIELDS = {
    col.PRODUCER_ID: "producer id", col.PRODUCER_EPOCH: "producer epoch", col.BASE_SEQUENCE: "sequence", col.LEADER_EPOCH: "leader epoch",
}  # fmt: skip


def fields_of_table(table: BatchTable, batch_range: slice = slice(None)) -> HeaderFields:
    """CRCs are 0, because a batch table does not contain them."""
    headers = np.zeros((len(col.FIELDS), len(table.position[batch_range])), np.int64)
    for field, name in FROM_TABLE.items():
        headers[field] = getattr(table, name)[batch_range]
    return headers


def find_batch_table_mismatch(headers: HeaderFields, table: BatchTable, first_batch: int) -> BatchProblem | None:
    """First difference from the cleaner's table, with the batch's last offset.
    :param first_batch: in ``table``.
    """
    some = slice(first_batch, first_batch + headers.shape[1])
    if len(table) < some.stop:
        return f"more batches than the {len(table)} that the cleaner saw", int(headers[col.LAST, len(table) - first_batch])
    # Compressed markers tell their kind by their records; those that make no sense the cleaner refuses.
    inside = (headers[col.ATTRIBUTES] & CODEC_MASK != 0) & (headers[col.CONTROL_KIND] != NOT_CONTROL)
    inside |= table.control[some] == MALFORMED
    for field, name in FROM_TABLE.items():
        seen = getattr(table, name)[some]
        wrong = headers[field] != seen
        if field in (col.CONTROL_KIND, col.COORDINATOR_EPOCH):
            wrong &= ~inside
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            return f"the cleaner read {name} {seen[at]} where {headers[field, at]} stands", int(headers[col.LAST, at])
    return None


class SourceBatchHeaders:
    """Batch headers of a group's sources. ``headers[field]`` must not be changed, because it may be a column of a segment's batch table."""

    def __init__(self, tables: Sequence[BatchTable]) -> None:
        self._tables = tables
        self.crc = np.zeros(sum(len(table) for table in tables), np.uint32)
        """To be filled in by who has read them."""

    def __len__(self) -> int:
        return len(self.crc)

    def __getitem__(self, header_field_number: int) -> npt.NDArray[Any]:
        if header_field_number == col.STORED_CRC:
            return self.crc
        columns = [getattr(table, FROM_TABLE[header_field_number]) for table in self._tables]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def fields_of_batches(self, batch_numbers: Int64s) -> HeaderFields:
        headers = np.empty((len(col.FIELDS), len(batch_numbers)), np.int64)
        for field in col.FIELDS:
            headers[field] = self[field][batch_numbers]
        return headers


# ---- transactions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchTransactionOutcomes:
    """Outcomes per batch.
    aborted: data of an aborted transaction.
    idle: a marker whose transaction has no data left.
    began: for another marker, the offset of the first data that is left; -1 for other batches.
    """

    aborted: Flags
    idle: Flags
    began: Int64s

    def select_batches(self, batch_numbers: Int64s) -> BatchTransactionOutcomes:
        return BatchTransactionOutcomes(self.aborted[batch_numbers], self.idle[batch_numbers], self.began[batch_numbers])


def transaction_outcomes_by_source(
    sources: Sequence[SourceSegment], open_txn_offset_by_producer: Mapping[int, int]
) -> list[BatchTransactionOutcomes]:
    """Outcomes per source segment.
    :param sources: all segments of the log, ascending.
    :param open_txn_offset_by_producer: at the start of the first source.
    """
    tables = [source.table for source in sources]
    lengths = np.cumsum([0, *(len(table) for table in tables)])
    part = [(table.control != NOT_CONTROL) | ((table.attributes & np.int16(TRANSACTIONAL)) != 0) for table in tables]
    chosen = [np.flatnonzero(flags) for flags in part]
    producer = _concatenate_columns([table.producer_id[some] for table, some in zip(tables, chosen, strict=True)])
    ids = np.unique(np.concatenate((producer, np.array(list(open_txn_offset_by_producer), np.int64))))
    pending_since = np.array([open_txn_offset_by_producer.get(each, -1) for each in ids.tolist()], np.int64)
    aborted, idle, began = fold_txn_outcomes(
        _concatenate_columns([table.control[some] for table, some in zip(tables, chosen, strict=True)]),
        np.searchsorted(ids, producer),
        _concatenate_columns([table.base_offset[some] for table, some in zip(tables, chosen, strict=True)]),
        pending_since,
    )
    where = _concatenate_columns([some + begin for some, begin in zip(chosen, lengths.tolist(), strict=False)])
    whole = BatchTransactionOutcomes(np.zeros(lengths[-1], np.bool_), np.zeros(lengths[-1], np.bool_), np.full(lengths[-1], -1, np.int64))
    whole.aborted[where], whole.idle[where], whole.began[where] = aborted, idle, began
    return [BatchTransactionOutcomes(whole.aborted[a:b], whole.idle[a:b], whole.began[a:b]) for a, b in pairwise(lengths.tolist())]


def _concatenate_columns(columns: list[npt.NDArray[np.generic]]) -> Int64s:
    return np.concatenate([column.astype(np.int64) for column in columns]) if columns else np.empty(0, np.int64)


def fold_txn_outcomes(
    control_kind: Int64s, producer_index: Int64s, base_offset: Int64s, open_txn_offset_by_producer: Int64s
) -> TxnOutcomeColumns:
    """Compute the columns of BatchTransactionOutcomes. A transaction consists of a producer's data batches since its last marker; its next
    marker decides about all of them.
    :param open_txn_offset_by_producer: of transactions that are open before the first batch, or -1. Updated in place to those open after
    the last batch.
    """
    count = len(control_kind)
    aborted, idle, began = np.zeros(count, np.bool_), np.zeros(count, np.bool_), np.full(count, -1, np.int64)
    links = np.full(len(open_txn_offset_by_producer), -1, np.int64), np.full(count, -1, np.int64)
    _set_txn_outcomes(control_kind, producer_index, base_offset, open_txn_offset_by_producer, *links, aborted, idle, began)
    return aborted, idle, began


@kernel
def _set_txn_outcomes(
    control_kind: Int64s,
    producer_index: Int64s,
    base_offset: Int64s,
    open_txn_offset_by_producer: Int64s,
    newest: Int64s,
    before: Int64s,
    aborted: Flags,
    idle: Flags,
    began: Int64s,
) -> None:
    """:param newest, before: -1 per producer and per batch: the links from a transaction's last batch to its first."""
    for i in range(control_kind.size):
        p = producer_index[i]
        if control_kind[i] == NOT_CONTROL:
            before[i] = newest[p]
            newest[p] = i
            if open_txn_offset_by_producer[p] < 0:
                open_txn_offset_by_producer[p] = base_offset[i]
        elif control_kind[i] in (ABORT, COMMIT):
            idle[i] = open_txn_offset_by_producer[p] < 0
            began[i] = open_txn_offset_by_producer[p]
            link = newest[p] if control_kind[i] == ABORT else -1
            while link >= 0:
                aborted[link] = True
                link = before[link]
            newest[p] = -1
            open_txn_offset_by_producer[p] = -1


# ---- one group --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceAndOutputBatches:
    """Batches of a group, without the filler. ``origin``: per output batch, the number of its source batch."""

    source: SourceBatchHeaders
    outcomes: BatchTransactionOutcomes
    output: HeaderFields
    origin: Int64s
    rules: RetentionRules


@dataclass(frozen=True, slots=True)
class SourceBatchesLeftInOutput:
    """Batches of one source that are in the output: their source batch numbers (``origin``) and output headers."""

    source: SourceSegment
    origin: Int64s
    output: HeaderFields

    @staticmethod
    def select_left(
        group: SourceAndOutputBatches, source: SourceSegment, first_batch_in_group: int, wanted_flags: Flags
    ) -> SourceBatchesLeftInOutput:
        """:param first_batch_in_group: of this source among all source batches of the group."""
        mine = np.flatnonzero(
            (group.origin >= first_batch_in_group) & (group.origin < first_batch_in_group + len(source.table)) & wanted_flags[group.origin]
        )
        return SourceBatchesLeftInOutput(source, group.origin[mine] - first_batch_in_group, group.output[:, mine])


def flag_unchanged_batches(sources: HeaderFields, outputs: HeaderFields) -> Flags:
    """Flag the output batches that are copies: equal in size, CRC (which covers all later bytes and was verified), magic, base offset and
    leader epoch.
    :param sources: for each output batch, the header of its source batch.
    """
    same = [sources[c] == outputs[c] for c in (col.SIZE, col.STORED_CRC, col.MAGIC, col.BASE, col.LEADER_EPOCH)]
    return np.logical_and.reduce(same)


def may_be_filler(batch_header: Int64s, end_offset: int) -> bool:
    """True if a header looks like a filler that ends at ``end_offset``; an emptied batch that must stay can look the same."""
    plain = {col.BASE: end_offset, col.LAST: end_offset, col.SIZE: 61, col.MAGIC: 2, col.COUNT: 0, col.ATTRIBUTES: 0,
             col.PRODUCER_ID: -1, col.PRODUCER_EPOCH: -1, col.BASE_SEQUENCE: -1}  # fmt: skip
    return all(int(batch_header[name]) == value for name, value in plain.items())


def lacks_last_offset(table: BatchTable) -> bool:
    """True if the first header does not state its last offset: a v0/v1 wrapper whose own offset was never set (old librdkafka)."""
    return len(table) > 0 and int(table.magic[0]) < 2 and int(table.codec_ids[0]) > 0 and int(table.last_offset[0]) == 0


def match_batches(source: SourceBatchHeaders, output: HeaderFields, end_offset_of_first_batch: int) -> SourceBatchNumbersAndProblem:
    """Source batch of each output batch, valid only without a problem, and the first problem. The cleaner never merges, splits or reorders
    batches.
    :param end_offset_of_first_batch: last offset of the first source batch if its header lacks it, else -1.
    """
    lasts, bases = source[col.LAST], source[col.BASE]
    if end_offset_of_first_batch >= 0:
        lasts = np.concatenate((np.array([end_offset_of_first_batch]), lasts[1:]))
    origin = np.searchsorted(lasts, output[col.LAST])
    if not len(source):
        return origin, ("a batch that no source has", int(output[col.LAST, 0])) if len(origin) else None
    inside = np.minimum(origin, len(source) - 1)
    # A v0/v1 wrapper does not say where it begins: behind the batch before it.
    begin = np.where(bases[inside] >= 0, bases[inside], np.where(inside > 0, lasts[inside - 1] + 1, 0))
    wrong = (origin == len(source)) | (output[col.BASE] < begin)
    if wrong.any():
        return origin, ("a batch that no source has", int(output[col.LAST, wrong][0]))
    again = np.diff(origin) <= 0
    if again.any():
        return origin, ("a source batch comes twice or out of order", int(output[col.LAST, 1:][again][0]))
    return origin, None


def flag_required_headers(headers: SourceBatchHeaders, retention_rules: RetentionRules) -> Flags:
    """Flag the batches whose header must stay even without records: the last of each live producer, and the one that ends at the high
    watermark.
    """
    entries = retention_rules.producers.entries
    stays = headers[col.LAST] + 1 == retention_rules.high_watermark
    if len(entries):
        ids = entries["producer_id"].astype(np.int64)
        at = np.minimum(np.searchsorted(ids, headers[col.PRODUCER_ID]), len(ids) - 1)
        live = (ids[at] == headers[col.PRODUCER_ID]) & (headers[col.PRODUCER_ID] >= 0)
        last = entries["last_offset"].astype(np.int64)[at]
        only_markers = (headers[col.CONTROL_KIND] != NOT_CONTROL) & (headers[col.PRODUCER_EPOCH] == entries["epoch"].astype(np.int64)[at])
        stays |= live & np.where(last >= 0, headers[col.LAST] == last, only_markers)
    return stays & (headers[col.MAGIC] == 2)


def flag_removable_markers(headers: SourceBatchHeaders, outcomes: BatchTransactionOutcomes, now_ms: int) -> Flags:
    """Flag the control batches whose transaction has no data left and whose delete horizon has passed."""
    due = outcomes.idle & (headers[col.ATTRIBUTES] & HORIZON != 0) & (headers[col.BASE_TIMESTAMP] <= now_ms)
    return (headers[col.CONTROL_KIND] == EMPTIED) | ((headers[col.CONTROL_KIND] != NOT_CONTROL) & due)


def find_header_problems(group: SourceAndOutputBatches, path_by_kind: Mapping[str, Path]) -> Iterator[BatchProblem]:
    of, out, rules = group.source.fields_of_batches(group.origin), group.output, group.rules
    aborted, idle = group.outcomes.aborted[group.origin], group.outcomes.idle[group.origin]
    v2, empty = of[col.MAGIC] == 2, out[col.COUNT] == 0
    stays, gone = (
        flag_required_headers(group.source, rules),
        flag_removable_markers(group.source, group.outcomes, rules.now_ms),
    )
    yield from _first_problem(out, "not of message format 2", out[col.MAGIC] != 2)
    elsewhere = (out[col.BASE] != of[col.BASE]) | (out[col.LAST] != of[col.LAST])
    yield from _first_problem(out, "other offsets than its source batch", v2 & elsewhere)
    for column, name in _UNCHANGED_FIELDS.items():
        yield from _first_problem(out, f"another {name} than its source batch", out[column] != of[column])
    changed = out[col.ATTRIBUTES] ^ of[col.ATTRIBUTES]
    yield from _first_problem(out, "other attributes than its source batch", changed & (LOG_APPEND | TRANSACTIONAL | CONTROL) != 0)
    yield from _first_problem(out, "another codec than its source batch", ~empty & (changed & CODEC_MASK != 0))
    odd = (out[col.SIZE] != 61) | (out[col.ATTRIBUTES] & (CODEC_MASK | HORIZON) != 0) | (out[col.BASE_TIMESTAMP] != -1)
    odd |= out[col.MAX_TIMESTAMP] != of[col.MAX_TIMESTAMP]
    yield from _first_problem(out, "an emptied batch whose header is not what Kafka leaves", empty & odd)
    yield from _first_problem(out, "an empty batch that nothing keeps", empty & ~stays[group.origin])
    yield from _first_problem(out, "records of an aborted transaction", ~empty & aborted)
    yield from _first_problem(out, "a marker whose horizon has passed", ~empty & gone[group.origin])
    yield from _first_problem(
        out,
        "a marker without data that did not just get its horizon",
        flag_newly_dated_markers(of, idle, gone[group.origin]) & ~_flag_newly_dated_batches(of, out, rules),
    )
    lost = np.ones(len(group.source), np.bool_)
    lost[group.origin] = False
    cause = "the header of a producer's last batch, or of the batch at the high watermark, is missing"
    yield from _first_problem(group.source, cause, lost & stays)
    control = group.source[col.CONTROL_KIND] != NOT_CONTROL
    yield from _first_problem(group.source, "a control batch is missing that must stay", lost & control & ~gone)
    yield from _find_txn_index_problems(of, idle, group.outcomes.began[group.origin], path_by_kind)


def find_copy_changes(group: SourceAndOutputBatches) -> Iterator[BatchProblem]:
    of, out = group.source.fields_of_batches(group.origin), group.output
    copied, idle = flag_unchanged_batches(of, out), group.outcomes.idle[group.origin]
    gone = flag_removable_markers(group.source, group.outcomes, group.rules.now_ms)[group.origin]
    known = CODEC_MASK | LOG_APPEND | TRANSACTIONAL | CONTROL | HORIZON
    yield from _first_problem(out, "unknown attributes", ~copied & (out[col.ATTRIBUTES] & ~known != 0))
    control = of[col.CONTROL_KIND] != NOT_CONTROL
    yield from _first_problem(out, "a control batch was changed", control & ~gone & ~flag_newly_dated_markers(of, idle, gone) & ~copied)


def flag_newly_dated_markers(sources: HeaderFields, markers_without_data_flags: Flags, removed_marker_flags: Flags) -> Flags:
    """Flag the markers that get their delete horizon, because their transaction has no data left. A marker that is removed gets none."""
    return markers_without_data_flags & ~removed_marker_flags & (sources[col.ATTRIBUTES] & HORIZON == 0)


def _flag_newly_dated_batches(sources: HeaderFields, outputs: HeaderFields, retention_rules: RetentionRules) -> Flags:
    """Flag the output batches that got their delete horizon and kept all their records."""
    dated = (outputs[col.ATTRIBUTES] & HORIZON != 0) & (outputs[col.BASE_TIMESTAMP] == retention_rules.new_delete_horizon_ms)
    return dated & (outputs[col.COUNT] == sources[col.COUNT])


def find_record_mismatches(
    sources: HeaderFields, outputs: HeaderFields, records: GateRecords, retention_rules: RetentionRules
) -> Iterator[BatchProblem]:
    """Yield data batches whose headers do not match their records. Each batch must have a record."""
    begin, end = records.first_row[:-1], records.first_row[1:] - 1
    flags = np.bitwise_or.reduceat(records.flags, begin)
    tombstones = flags & col.NULL_VALUE != 0
    copied = flag_unchanged_batches(sources, outputs)
    yield from _first_problem(outputs, "record attributes, which Kafka does not write", ~copied & (flags & col.ODD_ATTRIBUTES != 0))
    had, has = sources[col.ATTRIBUTES] & HORIZON != 0, outputs[col.ATTRIBUTES] & HORIZON != 0
    yield from _first_problem(outputs, "a delete horizon is missing, or has no reason", has != (had | tombstones))
    horizon = np.where(had, sources[col.BASE_TIMESTAMP], retention_rules.new_delete_horizon_ms)
    yield from _first_problem(outputs, "another delete horizon than the cleaner sets", has & (outputs[col.BASE_TIMESTAMP] != horizon))
    other = outputs[col.BASE_TIMESTAMP] != records.timestamp[begin]
    appended = sources[col.ATTRIBUTES] & LOG_APPEND != 0
    # Magic 0 inside such a wrapper of magic 1 has no timestamp of its own.
    other &= ~(appended & (sources[col.MAGIC] == 1) & (outputs[col.BASE_TIMESTAMP] == -1))
    yield from _first_problem(outputs, "a base timestamp that is not the first record's", ~has & ~copied & other)
    highest = np.where(appended | copied, sources[col.MAX_TIMESTAMP], np.maximum.reduceat(records.timestamp, begin))
    yield from _first_problem(outputs, "another maximum timestamp than its records have", outputs[col.MAX_TIMESTAMP] != highest)
    elsewhere = (outputs[col.BASE] != records.offset[begin]) | (outputs[col.LAST] != records.offset[end])
    yield from _first_problem(outputs, "offsets that are not its records'", (sources[col.MAGIC] < 2) & elsewhere)


def _first_problem(headers: HeaderFields | SourceBatchHeaders, cause: str, invalid_flags: Flags) -> Iterator[BatchProblem]:
    if invalid_flags.any():
        yield cause, int(headers[col.LAST][invalid_flags][0])


# ---- indexes ----------------------------------------------------------------------------------------------------------------


def _find_txn_index_problems(
    sources: HeaderFields, has_no_data_left: Flags, first_data_offset: Int64s, path_by_kind: Mapping[str, Path]
) -> Iterator[BatchProblem]:
    kept = (sources[col.CONTROL_KIND] == ABORT) & ~has_no_data_left
    entries = np.frombuffer(path_by_kind["txnindex"].read_bytes() if "txnindex" in path_by_kind else b"", TXN_ENTRY)
    same = len(entries) == np.count_nonzero(kept)
    same = (
        same
        and np.array_equal(entries["last_offset"], sources[col.LAST, kept])
        and np.array_equal(entries["producer_id"], sources[col.PRODUCER_ID, kept])
    )
    if not same or np.any(entries["first_offset"] > first_data_offset[kept]):
        yield "the transaction index does not name the aborted transactions whose markers stay", -1


def find_index_problems(headers: HeaderFields, base_offset: int, path_by_kind: Mapping[str, Path]) -> Iterator[str]:
    positions, lasts = headers[col.POSITION], headers[col.LAST]
    entries = np.frombuffer(path_by_kind["index"].read_bytes(), OFFSET_ENTRY)
    where = entries["position"].astype(np.int64)
    found = np.isin(where, positions)
    if (
        not found.all()
        or np.any(np.diff(where) <= 0)
        or np.any(lasts[np.searchsorted(positions, where)] - base_offset != entries["offset"])
    ):
        yield "the offset index does not lead to the batches that it names"
    entries = np.frombuffer(path_by_kind["timeindex"].read_bytes(), TIME_ENTRY)
    named = entries["offset"].astype(np.int64) + base_offset
    stamps = entries["timestamp"].astype(np.int64)
    highest = np.maximum.accumulate(headers[col.MAX_TIMESTAMP]) if len(positions) else np.empty(0, np.int64)
    fine = np.isin(named, lasts).all() and not np.any(np.diff(stamps) <= 0)
    fine = fine and np.array_equal(highest[np.searchsorted(lasts, named)], stamps)
    if not fine or stamps.max(initial=-1) != highest.max(initial=-1):
        yield "the time index does not match the batches' timestamps"
