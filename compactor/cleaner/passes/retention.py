"""Retention rules: which batches and records stay (Kafka: Cleaner.cleanInto, MemoryRecords.filterTo; docs/kafka-rules.md 4.2, 4.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compactor.cleaner.passes.transactions import TransactionVerdicts
from compactor.errors import BadData
from compactor.kernels.common import NO_HORIZON, FirstRowByBatch, Flags
from compactor.kernels.jit import kernel
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.balance import BalanceDigestKey
from compactor.records.batches import EMPTIED, HORIZON, MALFORMED, NOT_CONTROL, BatchTable, Int64s
from compactor.records.encode import COPY, DROP, EMPTY, FILTER, REWRITE, Actions, CleaningDecisions
from compactor.records.producers import ProducerStates
from compactor.records.rows import BatchChunk, RecordRows

LAST_MS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Values on which the retention rules depend, besides batches and records. Times are in milliseconds.

    latest_offset: last offset that the offset map covers.
    legacy_horizon_ms: tombstones of v0/v1 stay in segments that were modified after this time.
    balance_key: key of the balance's sums; None for no balance.
    drops_keyless: whether records without a key are removed, as by Kafka's cleaner. If not, each of them stays.
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
        """Return the delete horizon, in milliseconds, of tombstones and markers that get one in this round: now plus
        delete.retention.ms, limited to LAST_MS because a larger sum would overflow.
        """
        return min(self.now_ms + self.delete_retention_ms, LAST_MS)


@dataclass(frozen=True, slots=True)
class BatchRetentionDecisions:
    """Decisions about batches as far as their headers allow them, one row per batch.

    action: DROP, COPY or EMPTY if the header is enough, FILTER if the records decide.
    retain_empty: whether the header stays, because the batch is the last of a live producer or ends at the high watermark (KAFKA-8335,
        KAFKA-20452).
    discarded: whether the batch must be removed, because its transaction was aborted or has no data left.
    """

    action: Actions
    retain_empty: Flags
    discarded: Flags

    def decisions_of_batch_slice(self, batch_slice: slice) -> BatchRetentionDecisions:
        """Return the decisions on the batches in a slice of rows."""
        return BatchRetentionDecisions(self.action[batch_slice], self.retain_empty[batch_slice], self.discarded[batch_slice])


@measure_stage(SegmentWorkStage.DECIDE)
def decide_batch_retention_by_headers(
    table: BatchTable, verdicts: TransactionVerdicts, retention_rules: RetentionRules, segment_name: str
) -> BatchRetentionDecisions:
    """Return the decision on each batch of a segment, as far as its header allows one. Raises BadData for a marker that cannot be read."""
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
    action = _actions_decided_by_headers(
        table.control, table.attributes, table.base_timestamp, verdicts.discardable, retain_empty, retention_rules.now_ms
    )
    return BatchRetentionDecisions(action, retain_empty, verdicts.discardable)


@kernel
def _actions_decided_by_headers(
    control_kind: npt.NDArray[np.int8],
    attributes: npt.NDArray[np.int16],
    delete_horizon_ms: Int64s,
    discardable_flags: Flags,
    retain_empty_flags: Flags,
    now_ms: int,
) -> Actions:
    action = np.empty(control_kind.size, np.uint8)
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
    return action


@measure_stage(SegmentWorkStage.DECIDE, lambda table, chunk, *_: chunk.body_size_bytes)
def decide_batch_retention_by_records(
    table: BatchTable,
    chunk: BatchChunk,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    superseded_flags: Flags,
    header_decisions: BatchRetentionDecisions,
    retention_rules: RetentionRules,
    segment_mtime_ms: int,
) -> CleaningDecisions:
    """Decide the FILTER batches of a chunk by their records. Return the decisions on all batches and records of the chunk.

    :param superseded_flags: a flag per row: whether a later record of the key exists in the mapped range.
    :param header_decisions: decisions on the chunk's batches by their headers.
    :param segment_mtime_ms: modification time of the segment; v0/v1 tombstones stay only if it is later than the legacy horizon.
    """
    batches = table.select_rows(slice(chunk.first, chunk.last))
    horizon = np.full(len(batches), NO_HORIZON, np.int64)
    decisions = CleaningDecisions(header_decisions.action.copy(), horizon, np.zeros(len(rows), np.bool_))
    _decide_kept_records_and_delete_horizons(
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
def _decide_kept_records_and_delete_horizons(
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
