"""Retention rules: which batches and records stay (Kafka: Cleaner.cleanInto, MemoryRecords.filterTo; docs/kafka-rules.md 4.2, 4.4)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.source import SourceSegment
from compactor.cleaner.worker_threads import ReusableJobBuffers
from compactor.errors import BadData
from compactor.kernels.common import NO_HORIZON, FirstRowByBatch, Flags
from compactor.kernels.jit import kernel
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.batches import ABORT, COMMIT, EMPTIED, HORIZON, MALFORMED, NOT_CONTROL, TRANSACTIONAL, BatchTable, Int64s
from compactor.records.encode import (
    COPY,
    DROP,
    EMPTY,
    FILTER,
    REWRITE,
    Actions,
    BalanceDigestKey,
    CleaningDecisions,
    DigestSumRows,
    EncodedBatches,
    encode_cleaned_chunk,
    uncopied_digest_sums,
)
from compactor.records.indexes import TXN_ENTRY, TxnEntries
from compactor.records.producers import ProducerStates
from compactor.records.rows import BatchChunk, RecordRows

# ---- outcomes of transactions: the next marker of its producer decides whether data is committed (CleanedTransactionMetadata) --
# One fold from the end of the log is used by the cleaner, by pass 1 of a long log, by readers and by searches. The gate has a rule of its
# own, because a check must not share the mistakes of what it checks.


TxnOutcomes = npt.NDArray[np.int8]

UNDECIDED: Final = -1
"""Beside ABORT and COMMIT: no marker of the producer was seen yet, or the batch is not data of a transaction."""


def find_txn_outcomes(table: BatchTable, next_outcome_by_producer: dict[int, int]) -> TxnOutcomes:
    """ABORT, COMMIT or UNDECIDED of each batch. Segments are passed from the last to the first, because a later marker decides about
    earlier data.
    :param next_outcome_by_producer: of the producer's first marker after this segment. Updated in place for the previous segment.
    """
    kinds = np.full(len(table), UNDECIDED, np.int8)
    transactional = table.transactional_flags
    some = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT) | ((table.control == NOT_CONTROL) & transactional))
    if len(some):
        ids, producer = np.unique(table.producer_id[some], return_inverse=True)
        outcome = np.array([next_outcome_by_producer.get(each, UNDECIDED) for each in ids.tolist()], np.int64)
        kinds[some] = find_outcomes_in_columns(table.control[some], transactional[some], producer.astype(np.int64), outcome)
        next_outcome_by_producer.update(
            (each, kind) for each, kind in zip(ids.tolist(), outcome.tolist(), strict=True) if kind != UNDECIDED
        )
    return kinds


def find_outcomes_in_columns(
    control_kind: TxnOutcomes, transactional_flags: Flags, producer: Int64s, next_outcome_by_producer: Int64s
) -> TxnOutcomes:
    """ABORT, COMMIT or UNDECIDED of each batch of transactional data; UNDECIDED for others.
    :param next_outcome_by_producer: by producer index, of the first marker after these batches. Updated in place.
    """
    kinds = np.full(len(control_kind), UNDECIDED, np.int8)
    _set_outcomes(control_kind, transactional_flags, producer, next_outcome_by_producer, kinds)
    return kinds


@kernel
def _set_outcomes(
    control_kind: TxnOutcomes, transactional_flags: Flags, producer: Int64s, next_outcome_by_producer: Int64s, out_kinds: TxnOutcomes
) -> None:
    for i in range(control_kind.size - 1, -1, -1):
        if control_kind[i] == ABORT or control_kind[i] == COMMIT:
            next_outcome_by_producer[producer[i]] = control_kind[i]
        elif control_kind[i] == NOT_CONTROL and transactional_flags[i]:
            out_kinds[i] = next_outcome_by_producer[producer[i]]


# ---- verdicts of all batches, as one ordered fold over batch headers (docs/kafka-rules.md 2.5 and 4.3) -------------------------
# The fold runs once, before the passes. With its verdicts, everything after it can process segments in any order. Outcomes come from the
# control records; the transaction index is only carried along.


@dataclass(frozen=True, slots=True)
class TransactionVerdicts:
    """Per batch of one segment.
    aborted: data of an aborted transaction.
    discardable: aborted data, or a marker whose transaction has no data left in the log.
    indexed: an ABORT marker that stays in the transaction index.
    """

    aborted: Flags
    discardable: Flags
    indexed: Flags
    txn_entries: TxnEntries


def transaction_verdicts_by_source(
    sources: list[SourceSegment], open_txn_offset_by_producer: Mapping[int, int] | None = None
) -> list[TransactionVerdicts]:
    """Verdicts per segment. Segments after the round's range are given only because later markers decide about earlier data.
    :param open_txn_offset_by_producer: where these segments begin.
    """
    before = open_txn_offset_by_producer or {}
    # Batches without a part in a transaction need no verdict: most logs have no others.
    tables = [source.table for source in sources]
    transactional = [(table.attributes & np.int16(TRANSACTIONAL)) != 0 for table in tables]
    involved = [np.flatnonzero((table.control != NOT_CONTROL) | flags) for table, flags in zip(tables, transactional, strict=True)]
    picked = list(zip(tables, involved, strict=True))
    pid = _concatenate_columns([table.producer_id[some] for table, some in picked], np.int64)
    ids = np.union1d(pid, np.array(list(before), np.int64))
    open_since = np.array([before.get(each, -1) for each in ids.tolist()], np.int64)
    control = _concatenate_columns([table.control[some] for table, some in picked], np.int8)
    in_transaction = _concatenate_columns([flags[some] for flags, some in zip(transactional, involved, strict=True)], np.bool_)
    producer = np.searchsorted(ids, pid)
    outcome = np.full(len(ids), UNDECIDED, np.int64)
    aborted = find_outcomes_in_columns(control, in_transaction, producer, outcome) == ABORT
    discardable, indexed = np.zeros((2, len(control)), np.bool_)
    first_offset, stable = np.full((2, len(control)), -1, np.int64)
    _set_transaction_state(
        control,
        in_transaction,
        aborted,
        producer,
        outcome,
        open_since,
        np.argsort(open_since)[np.count_nonzero(open_since < 0) :],
        _concatenate_columns([table.base_offset[some] for table, some in picked], np.int64),
        _concatenate_columns([table.last_offset[some] for table, some in picked], np.int64),
        np.zeros((2, len(ids)), np.bool_),
        np.empty((2, len(ids) + len(control)), np.int64),
        discardable,
        indexed,
        first_offset,
        stable,
    )
    verdicts = []
    at = 0
    for source, some in zip(sources, involved, strict=True):
        mine = slice(at, at + len(some))
        at = mine.stop
        marks = np.flatnonzero(indexed[mine])
        entries = _marker_index_entries(source, some[marks], first_offset[mine][marks], stable[mine][marks])
        spread = [_expand_flags(len(source.table), some, flags[mine]) for flags in (aborted, discardable, indexed)]
        verdicts.append(TransactionVerdicts(spread[0], spread[1], spread[2], entries))
    return verdicts


def _concatenate_columns(columns: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(columns) if columns else np.empty(0, dtype)


def _expand_flags(batch_count: int, batch_numbers: Int64s, flags_of_numbers: Flags) -> Flags:
    whole = np.zeros(batch_count, np.bool_)
    whole[batch_numbers] = flags_of_numbers
    return whole


def _marker_index_entries(source: SourceSegment, marker_numbers: Int64s, first_offset: Int64s, last_stable_offset: Int64s) -> TxnEntries:
    """The segment's own entries if they cover their transactions, else entries made from the batch headers."""
    entries = np.zeros(len(marker_numbers), TXN_ENTRY)
    entries["producer_id"] = source.table.producer_id[marker_numbers]
    entries["first_offset"] = first_offset
    entries["last_offset"] = source.table.last_offset[marker_numbers]
    entries["last_stable_offset"] = last_stable_offset
    return prefer_existing_entries(entries, source.txn_entries)


def prefer_existing_entries(computed_entries: TxnEntries, existing_entries: TxnEntries) -> TxnEntries:
    """Replace computed entries, in place, by existing ones. One that begins after remaining data of its transaction is not used: a broker
    without the producer's state wrote it, and readers would take that data for committed.
    """
    existing_entries = existing_entries[np.argsort(existing_entries["last_offset"], kind="stable")]
    if len(existing_entries):
        at = np.minimum(np.searchsorted(existing_entries["last_offset"], computed_entries["last_offset"]), len(existing_entries) - 1)
        same = existing_entries[at]
        known = (same["last_offset"] == computed_entries["last_offset"]) & (same["producer_id"] == computed_entries["producer_id"])
        known &= same["first_offset"] <= computed_entries["first_offset"]
        computed_entries[known] = same[known]
    return computed_entries


def txn_index_problem(index_entries: TxnEntries, source: SourceSegment) -> str:
    """Reason why the entries cannot be a segment's transaction index, or empty. An entry must cover the remaining data of its transaction,
    and no data of the transaction before: otherwise readers would hide committed records or return aborted ones.
    """
    if not len(index_entries):
        return ""
    first, last, stable = (index_entries[name].astype(np.int64) for name in ("first_offset", "last_offset", "last_stable_offset"))
    if np.any((first < 0) | (first > last)) or np.any(np.diff(last) <= 0) or np.any((last < source.base) | (last >= source.end)):
        return "an entry is not a transaction that ended in this segment"
    table = source.table
    aborts = np.flatnonzero(table.control == ABORT)
    place = np.searchsorted(table.base_offset[aborts], last)
    marker = aborts[place[place < len(aborts)]]
    if len(marker) < len(last) or np.any((table.base_offset[marker] != last) | (table.producer_id[marker] != index_entries["producer_id"])):
        return "an entry names no abort marker of this segment"
    if np.any(stable > last + 1):
        return "an entry's last stable offset is after its marker"
    (reported,) = transaction_verdicts_by_source([replace(source, ordinal=0, txn_entries=index_entries[:0])])
    begun = table.base_offset.copy()
    begun[reported.indexed] = reported.txn_entries["first_offset"]
    if np.any(first > begun[marker]) or np.any(first <= _previous_marker_offsets(table)[marker]):
        return "an entry does not cover its transaction, or covers another one"
    return ""


def _previous_marker_offsets(table: BatchTable) -> Int64s:
    """-1 for batches that are no markers."""
    markers = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT))
    by_producer = markers[np.argsort(table.producer_id[markers], kind="stable")]
    same = table.producer_id[by_producer[1:]] == table.producer_id[by_producer[:-1]]
    before = np.full(len(table), -1, np.int64)
    before[by_producer[1:][same]] = table.base_offset[by_producer[:-1][same]]
    return before


@kernel
def _set_transaction_state(
    control_kind: npt.NDArray[np.int8],
    is_transactional: Flags,
    is_aborted: Flags,
    producer_index: Int64s,
    next_outcome_by_producer: Int64s,
    open_txn_offset_by_producer: Int64s,
    producers_with_open_txn: Int64s,
    base_offset: Int64s,
    last_offset: Int64s,
    seen: npt.NDArray[np.bool_],
    begun_txns: Int64s,
    discardable: Flags,
    indexed: Flags,
    first_offset: Int64s,
    stable: Int64s,
) -> None:
    """Set the last four per batch: see TransactionVerdicts; first offset and last stable offset of the index entry.
    :param open_txn_offset_by_producer: of transactions open before these batches, or -1.
    :param seen: two rows of False, an element for each producer.
    :param begun_txns: memory for two rows, with space for all transactions.
    """
    batches = control_kind.size
    committed_seen, aborted_seen = seen[0], seen[1]
    # Transactions in the order they began, by whom and where. Those before ``oldest`` have ended, so each is passed once.
    began_by, began_at = begun_txns[0], begun_txns[1]
    begun = 0
    oldest = 0
    for p in producers_with_open_txn:
        aborted_seen[p] = next_outcome_by_producer[p] == ABORT
        committed_seen[p] = next_outcome_by_producer[p] != ABORT
        began_by[begun], began_at[begun] = p, open_txn_offset_by_producer[p]
        begun += 1
    for i in range(batches):
        p = producer_index[i]
        kind = control_kind[i]
        if kind == NOT_CONTROL:
            if is_transactional[i]:
                discardable[i] = is_aborted[i]
                if is_aborted[i]:
                    aborted_seen[p] = True
                else:
                    committed_seen[p] = True
                if open_txn_offset_by_producer[p] < 0:
                    open_txn_offset_by_producer[p] = base_offset[i]
                    began_by[begun], began_at[begun] = p, base_offset[i]
                    begun += 1
        elif kind == EMPTIED:
            discardable[i] = True
        elif kind in (ABORT, COMMIT):
            if kind == ABORT:
                indexed[i] = aborted_seen[p]
                discardable[i] = not aborted_seen[p]
                aborted_seen[p] = False
                first_offset[i] = open_txn_offset_by_producer[p]
            else:
                discardable[i] = not committed_seen[p]
                committed_seen[p] = False
            open_txn_offset_by_producer[p] = -1
            if indexed[i]:
                while oldest < begun and open_txn_offset_by_producer[began_by[oldest]] != began_at[oldest]:
                    oldest += 1
                stable[i] = began_at[oldest] if oldest < begun else last_offset[i] + 1


LAST_MS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Parameters of the retention rules.
    latest_offset: last offset that the offset map covers.
    legacy_horizon_ms: tombstones of v0/v1 stay in segments that were modified after this time.
    drops_keyless: whether records without a key are removed, as by Kafka's cleaner.
    """

    now_ms: int
    delete_retention_ms: int
    legacy_horizon_ms: int
    high_watermark: int
    latest_offset: int
    producers: ProducerStates
    balance_key: BalanceDigestKey | None = None
    drops_keyless: bool = True

    @property
    def new_delete_horizon_ms(self) -> int:
        """Now plus delete.retention.ms, limited to LAST_MS because a larger sum would overflow."""
        return min(self.now_ms + self.delete_retention_ms, LAST_MS)


@dataclass(frozen=True, slots=True)
class BatchRetentionDecisions:
    """Decisions by headers alone, one row per batch.
    action: DROP, COPY or EMPTY, or FILTER if the records decide.
    retain_empty: whether the header stays, because the batch is the last of a live producer or ends at the high watermark (KAFKA-8335,
    KAFKA-20452).
    discarded: whether the transaction was aborted or has no data left.
    """

    action: Actions
    retain_empty: Flags
    discarded: Flags

    def decisions_of_batch_slice(self, batch_slice: slice) -> BatchRetentionDecisions:
        return BatchRetentionDecisions(self.action[batch_slice], self.retain_empty[batch_slice], self.discarded[batch_slice])


@measure_stage(SegmentWorkStage.DECIDE)
def decide_by_headers(
    table: BatchTable, verdicts: TransactionVerdicts, retention_rules: RetentionRules, segment_name: str
) -> BatchRetentionDecisions:
    """Raises BadData for a marker that cannot be read."""
    malformed = np.flatnonzero(table.control == MALFORMED)
    if len(malformed):
        at = int(malformed[0])
        raise BadData(
            "a control record whose key cannot be read",
            segment=segment_name,
            position=int(table.position[at]),
            offset=int(table.base_offset[at]),
            hint="Kafka refuses it too; restore the segment from a replica",
        )
    entries = retention_rules.producers.entries
    ids = entries["producer_id"].astype(np.int64)
    where = np.searchsorted(ids, table.producer_id)
    known = np.zeros(len(table), np.bool_)
    inside = where < len(ids)
    known[inside] = ids[where[inside]] == table.producer_id[inside]
    known &= table.producer_id >= 0
    where[~known] = 0
    last_data = entries["last_offset"].astype(np.int64)[where] if len(ids) else np.full(len(table), -1, np.int64)
    epoch = entries["epoch"].astype(np.int16)[where] if len(ids) else np.full(len(table), -1, np.int16)
    is_last = known & np.where(
        last_data >= 0, table.last_offset == last_data, (table.control != NOT_CONTROL) & (table.producer_epoch == epoch)
    )
    retain_empty = is_last | (table.last_offset + 1 == retention_rules.high_watermark)
    action = np.empty(len(table), np.uint8)
    _decide_by_headers(
        table.control, table.attributes, table.base_timestamp, verdicts.discardable, retain_empty, retention_rules.now_ms, action
    )
    return BatchRetentionDecisions(action, retain_empty, verdicts.discardable)


@kernel
def _decide_by_headers(
    control_kind: npt.NDArray[np.int8],
    attributes: npt.NDArray[np.int16],
    delete_horizon_ms: Int64s,
    discardable_flags: Flags,
    retain_empty_flags: Flags,
    now_ms: int,
    action: Actions,
) -> None:
    for i in range(control_kind.size):
        if control_kind[i] == NOT_CONTROL:
            discard = discardable_flags[i]
            action[i] = FILTER
        else:
            has_horizon = (attributes[i] & HORIZON) != 0
            discard = control_kind[i] == EMPTIED or (discardable_flags[i] and has_horizon and delete_horizon_ms[i] <= now_ms)
            # A marker whose data is gone gets its horizon now, which is a rewrite.
            action[i] = FILTER if discardable_flags[i] and not has_horizon else COPY
        if discard:
            action[i] = EMPTY if retain_empty_flags[i] else DROP


@measure_stage(SegmentWorkStage.DECIDE, lambda table, chunk, *_: chunk.body_size_bytes)
def decide_by_records(
    table: BatchTable,
    chunk: BatchChunk,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    superseded_flags: Flags,
    header_decisions: BatchRetentionDecisions,
    retention_rules: RetentionRules,
    segment_mtime_ms: int,
) -> CleaningDecisions:
    """Decide the FILTER batches of a chunk; the result has all its batches.
    :param superseded_flags: per row: whether a later record of the key exists in the mapped range.
    :param segment_mtime_ms: v0/v1 tombstones stay only if it is later than the legacy horizon.
    """
    batches = table.select_rows(slice(chunk.first, chunk.last))
    horizon = np.full(len(batches), NO_HORIZON, np.int64)
    decisions = CleaningDecisions(header_decisions.action.copy(), horizon, np.zeros(len(rows), np.bool_))
    _decide_records(
        batches,
        first_row,
        rows,
        superseded_flags,
        header_decisions.retain_empty,
        retention_rules.latest_offset,
        retention_rules.now_ms,
        retention_rules.new_delete_horizon_ms,
        segment_mtime_ms > retention_rules.legacy_horizon_ms,
        retention_rules.drops_keyless,
        decisions,
    )
    return decisions


@kernel
def _decide_records(
    batches: BatchTable,
    first_row: FirstRowByBatch,
    rows: RecordRows,
    superseded_flags: Flags,
    retain_empty_flags: Flags,
    latest_offset: int,
    now_ms: int,
    new_horizon_ms: int,
    retain_legacy_tombstones: bool,
    drops_keyless: bool,
    decisions: CleaningDecisions,
) -> None:
    for batch in range(decisions.action.size):
        is_v2 = batches.magic[batch] == 2
        has_horizon = is_v2 and (batches.attributes[batch] & HORIZON) != 0
        if has_horizon:
            decisions.horizon[batch] = batches.base_timestamp[batch]
        if decisions.action[batch] != FILTER:
            continue
        kept = 0
        tombstones = False
        for row in range(first_row[batch], first_row[batch + 1]):
            stays = True
            if batches.control[batch] == NOT_CONTROL and rows.offset[row] <= latest_offset:
                if rows.key_length[row] < 0:
                    stays = not drops_keyless
                elif superseded_flags[row]:
                    stays = False
                elif rows.value_length[row] < 0:
                    is_not_due = not has_horizon or now_ms < batches.base_timestamp[batch]
                    stays = is_not_due if is_v2 else retain_legacy_tombstones
            decisions.keep_flags[row] = stays
            if stays:
                kept += 1
                # To Kafka a record with neither key nor value that its map does not cover is a tombstone; one that stays for good is none.
                tombstones = tombstones or (rows.value_length[row] < 0 and (drops_keyless or rows.key_length[row] >= 0))
        needs_horizon = (tombstones or batches.control[batch] != NOT_CONTROL) and not has_horizon
        if kept == 0:
            # Kafka fails where a v0/v1 batch would have to stay without records; there is nothing to keep of it.
            decisions.action[batch] = EMPTY if retain_empty_flags[batch] and is_v2 else DROP
        elif kept == first_row[batch + 1] - first_row[batch] and is_v2 and not needs_horizon:
            decisions.action[batch] = COPY
        else:
            decisions.action[batch] = REWRITE
            if needs_horizon:
                decisions.horizon[batch] = new_horizon_ms


# ---- cleaning of one chunk: parsed rows with their survivor flags become the bytes of new batches ------------------------------
# Pass 2 does this for every chunk. Pass 1 does it for a compressed chunk whose survivors it knows already, and stores the result
# (``CleanedChunkCache``), so that nothing is decompressed, parsed or looked up twice.


@dataclass(frozen=True, slots=True)
class CleanedChunk:
    """Cleaned batches of a chunk. ``sums``: digest sums for the round's balance; None if none is computed."""

    encoded: EncodedBatches
    records_read: int
    records_kept: int
    sums: DigestSumRows | None = None

    def copy_chunk_into(self, out_buffer: memoryview) -> CleanedChunk:
        """Copy out of the thread's buffers."""
        old = self.encoded
        if len(out_buffer):  # numpy lets other threads run meanwhile: memory that was never touched is slow
            np.copyto(np.frombuffer(out_buffer, np.uint8), np.frombuffer(old.data, np.uint8))
        moved = EncodedBatches(out_buffer, old.size, old.last_offset, old.max_timestamp, old.anew)
        return CleanedChunk(moved, self.records_read, self.records_kept, self.sums)

    def copy_chunk(self) -> CleanedChunk:
        return self.copy_chunk_into(memoryview(bytearray(len(self.encoded.data))))


def clean_batches_of_chunk(
    buffers: ReusableJobBuffers,
    source: SourceSegment,
    chunk: BatchChunk,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    superseded_flags: Flags,
    decisions: BatchRetentionDecisions,
    retention_rules: RetentionRules,
) -> CleanedChunk:
    """Encode the batches into the thread's buffers. Raises BadData if Kafka would refuse a batch.
    :param superseded_flags: per row: whether a later record has its key.
    """
    if chunk.wanted.any() and int(source.table.magic[chunk.first]) < 2:
        _reject_overlapping_wrappers(source, chunk, rows, first_row)
    _reject_markers_without_value(source, chunk, rows, first_row)
    copied = decisions.action == COPY
    final = decide_by_records(source.table, chunk, rows, first_row, superseded_flags, decisions, retention_rules, source.mtime_ms)
    encoded = encode_cleaned_chunk(source.buf, source.table, chunk, rows, first_row, final, buffers.output, source.name)
    counts = np.maximum(source.table.count[chunk.first : chunk.last].astype(np.int64), np.diff(first_row))
    sums = None
    if retention_rules.balance_key is not None:
        sums = uncopied_digest_sums(
            retention_rules.balance_key,
            source.buf,
            source.table,
            chunk,
            rows,
            first_row,
            decisions.action,
            final,
            superseded_flags,
            decisions.discarded,
        )
    return CleanedChunk(encoded, int(counts.sum()), int(np.count_nonzero(final.keep_flags)) + int(counts[copied].sum()), sums)


def _reject_markers_without_value(source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch) -> None:
    """Kafka's cleaner would take such a record for a tombstone, and brokers cannot load such a log."""
    control = source.table.control[chunk.first : chunk.last] != NOT_CONTROL
    if not control.any():
        return
    for row in np.flatnonzero((rows.value_length < 0) & np.repeat(control, np.diff(first_row))).tolist():
        batch = chunk.first + int(np.searchsorted(first_row, row, side="right")) - 1
        raise BadData(
            "a control record without a value",
            segment=source.name,
            position=int(source.table.position[batch]),
            offset=int(source.table.base_offset[batch]),
            hint="Restore the segment from a replica",
        )


def _reject_overlapping_wrappers(source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch) -> None:
    """A wrapper's header does not state its first offset, so that this shows only now."""
    table = source.table
    for i in np.flatnonzero(np.diff(first_row) > 0).tolist():
        batch = chunk.first + i
        before = int(table.last_offset[batch - 1]) if batch else source.base - 1
        if rows.offset[first_row[i]] <= before:
            raise BadData(
                "the first inner offset is not above the last offset before the message",
                segment=source.name,
                position=int(table.position[batch]),
                offset=int(rows.offset[first_row[i]]),
            )
        # Only a wrapper whose own offset was never set ends elsewhere than its header says.
        if table.last_offset[batch] == 0 and not (source.is_last and batch + 1 == len(table)):
            last, after, what = int(rows.offset[first_row[i + 1] - 1]), source.end, "the end of the segment"
            if batch + 1 < len(table):
                after, what = int(table.base_offset[batch + 1]), "the offset of the batch after the message"
                after = after if after >= 0 else int(table.last_offset[batch + 1])
            if last >= after:
                raise BadData(
                    f"the last inner offset is not below {what}",
                    segment=source.name,
                    position=int(table.position[batch]),
                    offset=last,
                )


class CleanedChunkCache:
    """Chunks that pass 1 has cleaned for pass 2, within a budget in bytes. Thread-safe."""

    _BLOCK: Final = 1 << 25  # large pages are cheaper to get; the memory goes back when the last chunk in a block is written

    def __init__(self, budget_bytes: int) -> None:
        self._left = budget_bytes
        self._block = memoryview(bytearray())
        self._dealing = threading.Lock()
        self._chunks: dict[tuple[int, int], CleanedChunk] = {}

    @property
    def has_cache_space_left(self) -> bool:
        return self._left > 0

    @measure_stage(SegmentWorkStage.KEEP, lambda self, source, chunk, cleaned: len(cleaned.encoded.data))
    def store_chunk_within_budget(self, source: SourceSegment, chunk: BatchChunk, cleaned: CleanedChunk) -> None:
        size = len(cleaned.encoded.data)
        with self._dealing:
            self._left -= size
            if self._left < 0:
                return
            if size > len(self._block):
                self._block = np.empty(max(size, self._BLOCK), np.uint8).data
            mine, self._block = self._block[:size], self._block[size:]
        self._chunks[source.ordinal, chunk.first] = cleaned.copy_chunk_into(mine)

    def stop_storing(self) -> None:
        self._left = 0
        self._block = memoryview(bytearray())
        self._chunks.clear()

    def pop_cleaned_chunk(self, source: SourceSegment, first_batch: int) -> CleanedChunk | None:
        return self._chunks.pop((source.ordinal, first_batch), None)
