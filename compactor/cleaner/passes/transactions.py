"""Transaction verdicts of all batches, as one ordered fold over batch headers (Kafka: CleanedTransactionMetadata; docs/kafka-rules.md 2.5
and 4.3).

The fold runs once, before the passes. With its verdicts, everything after it can process segments in any order. Outcomes come from the
control records; the transaction index is only carried along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from compactor.cleaner.passes.outcomes import UNDECIDED, find_txn_outcomes_in_columns_and_update_next
from compactor.cleaner.passes.source import SourceSegment
from compactor.kernels.common import Flags
from compactor.kernels.jit import kernel
from compactor.model.base import ReasonOrEmpty
from compactor.records.batches import ABORT, COMMIT, EMPTIED, NOT_CONTROL, TRANSACTIONAL, BatchTable, Int64s
from compactor.records.indexes import TXN_ENTRY, TxnEntries

TransactionStateByBatch = tuple[Flags, Flags, Int64s, Int64s]
"""Per batch: discardable, indexed (see TransactionVerdicts), first offset of its transaction, last stable offset."""


@dataclass(frozen=True, slots=True)
class TransactionVerdicts:
    """Outcomes of transactions for the batches of one segment, as flags per batch.

    aborted: data of a transaction whose marker is ABORT.
    discardable: aborted data, or a marker whose transaction has no data left in the log.
    indexed: an ABORT marker that stays in the transaction index because data of its transaction is left.
    txn_entries: entries of the new transaction index.
    """

    aborted: Flags
    discardable: Flags
    indexed: Flags
    txn_entries: TxnEntries


def transaction_verdicts_by_source(
    sources: list[SourceSegment], open_txn_offset_by_producer: Mapping[int, int] | None = None
) -> list[TransactionVerdicts]:
    """Return the outcomes of all transactions of a log, from its first segment on, one TransactionVerdicts per segment. Segments after the
    round's range are given only because later markers decide about earlier data.

    :param open_txn_offset_by_producer: by producer id, the first offset of the transaction that was open where these segments begin; None
        if there is none.
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
    aborted = find_txn_outcomes_in_columns_and_update_next(control, in_transaction, producer, outcome) == ABORT
    discardable, indexed, first_offset, stable = _transaction_state_by_batch(
        control,
        in_transaction,
        aborted,
        producer,
        outcome,
        open_since,
        np.argsort(open_since)[np.count_nonzero(open_since < 0) :],
        _concatenate_columns([table.base_offset[some] for table, some in picked], np.int64),
        _concatenate_columns([table.last_offset[some] for table, some in picked], np.int64),
    )
    verdicts = []
    at = 0
    for source, some in zip(sources, involved, strict=True):
        mine = slice(at, at + len(some))
        at = mine.stop
        marks = np.flatnonzero(indexed[mine])
        entries = _txn_index_entries_of_markers(source, some[marks], first_offset[mine][marks], stable[mine][marks])
        spread = [_expand_flags_to_all_batches(len(source.table), some, flags[mine]) for flags in (aborted, discardable, indexed)]
        verdicts.append(TransactionVerdicts(spread[0], spread[1], spread[2], entries))
    return verdicts


def _concatenate_columns(columns: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(columns) if columns else np.empty(0, dtype)


def _expand_flags_to_all_batches(batch_count: int, batch_numbers: Int64s, flags_of_numbers: Flags) -> Flags:
    """Return flags of ``batch_count`` batches, given the flags of those with the numbers ``batch_numbers``; the others are False."""
    whole = np.zeros(batch_count, np.bool_)
    whole[batch_numbers] = flags_of_numbers
    return whole


def _txn_index_entries_of_markers(
    source: SourceSegment, marker_numbers: Int64s, first_offset: Int64s, last_stable_offset: Int64s
) -> TxnEntries:
    """Return the transaction index entries of the markers that stay. The segment's own entries are used if they cover their transactions;
    other entries are made from the batch headers.
    """
    entries = np.zeros(len(marker_numbers), TXN_ENTRY)
    entries["producer_id"] = source.table.producer_id[marker_numbers]
    entries["first_offset"] = first_offset
    entries["last_offset"] = source.table.last_offset[marker_numbers]
    entries["last_stable_offset"] = last_stable_offset
    return replace_computed_by_existing_txn_entries(entries, source.txn_entries)


def replace_computed_by_existing_txn_entries(computed_entries: TxnEntries, existing_entries: TxnEntries) -> TxnEntries:
    """Replace computed entries of a transaction index, in place, by the segment's existing entries for the same transactions, and return
    the result. An existing entry that begins after remaining data of its transaction is not used: a broker without the producer's state
    wrote it, and readers would take that data for committed.
    """
    existing_entries = existing_entries[np.argsort(existing_entries["last_offset"], kind="stable")]
    if len(existing_entries):
        at = np.minimum(np.searchsorted(existing_entries["last_offset"], computed_entries["last_offset"]), len(existing_entries) - 1)
        same = existing_entries[at]
        known = (same["last_offset"] == computed_entries["last_offset"]) & (same["producer_id"] == computed_entries["producer_id"])
        known &= same["first_offset"] <= computed_entries["first_offset"]
        computed_entries[known] = same[known]
    return computed_entries


def reason_txn_index_is_invalid(index_entries: TxnEntries, source: SourceSegment) -> ReasonOrEmpty:
    """Return why ``index_entries`` cannot be the transaction index of a segment, or an empty string. An entry must cover the remaining
    data of its
    transaction, and no data of the transaction before. With an invalid index, readers would hide committed records or return aborted ones.
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
    if np.any(first > begun[marker]) or np.any(first <= _previous_marker_offset_by_batch(table)[marker]):
        return "an entry does not cover its transaction, or covers another one"
    return ""


def _previous_marker_offset_by_batch(table: BatchTable) -> Int64s:
    """Return a value per batch: for a transaction marker, the offset of the previous marker of its producer; -1 if there is none, and for
    other batches.
    """
    markers = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT))
    by_producer = markers[np.argsort(table.producer_id[markers], kind="stable")]
    same = table.producer_id[by_producer[1:]] == table.producer_id[by_producer[:-1]]
    before = np.full(len(table), -1, np.int64)
    before[by_producer[1:][same]] = table.base_offset[by_producer[:-1][same]]
    return before


@kernel
def _transaction_state_by_batch(
    control_kind: npt.NDArray[np.int8],
    is_transactional: Flags,
    is_aborted: Flags,
    producer_index: Int64s,
    next_outcome_by_producer: Int64s,
    open_txn_offset_by_producer: Int64s,
    producers_with_open_txn: Int64s,
    base_offset: Int64s,
    last_offset: Int64s,
) -> TransactionStateByBatch:
    """Return four columns, one row per batch: whether it may be discarded, whether it is a marker that stays in the transaction index, and,
    for such markers, first offset and last stable offset of the index entry.

    :param is_aborted: a flag per batch: whether its transaction was aborted.
    :param producer_index: number of each batch's producer.
    :param next_outcome_by_producer: outcome of each producer's first marker in these batches.
    :param open_txn_offset_by_producer: first offset of each producer's transaction that was open before these batches, or -1.
    :param producers_with_open_txn: producers with such a transaction, in the order in which the transactions began.
    """
    batches = control_kind.size
    producers = open_txn_offset_by_producer.size
    discardable = np.zeros(batches, np.bool_)
    indexed = np.zeros(batches, np.bool_)
    first_offset = np.full(batches, -1, np.int64)
    stable = np.full(batches, -1, np.int64)
    committed_seen = np.zeros(producers, np.bool_)
    aborted_seen = np.zeros(producers, np.bool_)
    # Transactions in the order they began, by whom and where. Those before ``oldest`` have ended, so each is passed once.
    began_by = np.empty(producers_with_open_txn.size + batches, np.int64)
    began_at = np.empty(producers_with_open_txn.size + batches, np.int64)
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
    return discardable, indexed, first_offset, stable
