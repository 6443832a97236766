"""Facts about a segment's content for its metadata, read from its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bloom.sidecar import RemovableRecordCounts
from checkpoint.lineage import EpochEntry
from compactor.cleaner.passes.source import SourceSegment
from compactor.constants import NEVER_MS, NO_TIMESTAMP, LeaderEpoch, Offset
from compactor.records.batches import HORIZON, NOT_CONTROL, BatchTable
from compactor.records.rows import RecordRowBuffers, parse_records


@dataclass(frozen=True, slots=True)
class SegmentTimestampsAndRecordCount:
    """Timestamps and number of records of a segment.

    max_timestamp_ms: largest timestamp, without control records, whose timestamps come from the broker's clock; -1 for none.
    first_timestamp_ms: maximum timestamp of the first batch; -1 for none.
    """

    max_timestamp_ms: int
    first_timestamp_ms: int
    records: int


def summarize_timestamps_and_record_count(table: BatchTable, log_start: int = 0) -> SegmentTimestampsAndRecordCount:
    """Return the timestamps and the number of records of a segment, computed from its batch table.

    :param log_start: batches that end below it do not count for the largest timestamp. Brokers search one segment only, the first whose
        largest timestamp is late enough: if all such records lie below the log start, they answer with a later offset than the right one.
    """
    data = table.max_timestamp[(table.control == NOT_CONTROL) & ((table.count > 0) | (table.magic < 2)) & (table.last_offset >= log_start)]
    return SegmentTimestampsAndRecordCount(
        max_timestamp_ms=int(data.max(initial=-1)),
        first_timestamp_ms=int(table.max_timestamp[0]) if len(table) else -1,
        records=int(table.count.sum()),
    )


def read_earliest_delete_horizon_ms(source: SourceSegment, inflate_limit: int) -> int:
    """Return the earliest delete horizon of the markers and tombstones of a segment, in milliseconds, or -1 if none has one. Reads the
    records of batches that have a horizon. Raises BadData.
    """
    table = source.table
    due = _earliest_delete_horizon_of_markers_ms(table)
    maybe = _flag_batches_with_delete_horizon(table) & (table.control == NOT_CONTROL) & (table.base_timestamp < due)
    buffers = RecordRowBuffers()
    for first, last in source.split_batches_by_magic_and_compression():
        wanted = maybe[first:last]
        if not wanted.any():
            continue
        for chunk in source.read_chunks(first, last, wanted, inflate_limit, None):
            rows, first_row = parse_records(table, chunk, buffers, source.name)
            tombstones = np.flatnonzero(rows.value_length < 0)
            if len(tombstones):
                batches = np.unique(np.searchsorted(first_row, tombstones, side="right") - 1) + chunk.first
                due = min(due, int(np.min(table.base_timestamp[batches])))
    return due if due != NEVER_MS else NO_TIMESTAMP


def earliest_delete_horizon_ms(table: BatchTable, removable_counts: RemovableRecordCounts) -> int:
    """Return the earliest delete horizon of the markers and tombstones of a segment, in milliseconds, or -1 if none has one. Reads no
    record.

    :param removable_counts: summary of the segment's tombstones, as it is stored in the sidecar.
    """
    due = min(_earliest_delete_horizon_of_markers_ms(table), removable_counts.earliest_tombstone_horizon_ms)
    return due if due != NEVER_MS else NO_TIMESTAMP


def _flag_batches_with_delete_horizon(table: BatchTable) -> npt.NDArray[np.bool_]:
    """Return a flag per batch: whether it has a delete horizon."""
    dated: npt.NDArray[np.bool_] = ((table.attributes & np.int16(HORIZON)) != 0) & (table.magic == 2) & (table.count > 0)
    return dated


def _earliest_delete_horizon_of_markers_ms(table: BatchTable) -> int:
    """Return the earliest delete horizon of a transaction marker, in milliseconds, or NEVER_MS if no marker has one."""
    return int(table.base_timestamp[_flag_batches_with_delete_horizon(table) & (table.control != NOT_CONTROL)].min(initial=NEVER_MS))


def read_offset_of_last_record(source: SourceSegment, inflate_limit: int) -> int:
    """Return the offset of a segment's last record, including control records, or -1 if it has no record. Records must be read, because a
    batch may end after its last record. Raises BadData.
    """
    table, buffers = source.table, RecordRowBuffers()
    for batch in np.flatnonzero((table.count > 0) | (table.magic < 2))[::-1].tolist():
        for chunk in source.read_chunks(batch, batch + 1, np.ones(1, np.bool_), inflate_limit):
            rows, _ = parse_records(table, chunk, buffers, source.name)
            if len(rows):
                return int(rows.offset.max())
    return -1


def count_negative_timestamps(source: SourceSegment, inflate_limit: int) -> int:
    """Return the number of records with a negative timestamp other than -1, which means no timestamp. Cleaners refuse to rewrite a batch in
    which such a record stays.
    """
    return count_implausible_timestamps(source, inflate_limit, NEVER_MS).negative


class ImplausibleTimestamps(NamedTuple):
    """Number of records with a negative timestamp other than -1, number of records that are later than a limit, and the latest timestamp
    in milliseconds.
    """

    negative: int
    late: int
    latest_ms: int


def count_implausible_timestamps(source: SourceSegment, inflate_limit: int, limit_ms: int) -> ImplausibleTimestamps:
    """Count the records of a segment whose timestamps cannot be times: negative ones other than -1, and those after ``limit_ms``."""
    buffers, negative, late, latest_ms = RecordRowBuffers(), 0, 0, NO_TIMESTAMP
    for first, last in source.split_batches_by_magic_and_compression():
        for chunk in source.read_chunks(first, last, np.ones(last - first, np.bool_), inflate_limit, None):
            rows, _ = parse_records(source.table, chunk, buffers, source.name)
            negative += int(np.count_nonzero(rows.timestamp < NO_TIMESTAMP))
            late += int(np.count_nonzero(rows.timestamp > limit_ms))
            latest_ms = max(latest_ms, int(rows.timestamp.max(initial=NO_TIMESTAMP)))
    return ImplausibleTimestamps(negative, late, latest_ms)


def leader_epoch_lineage_from_batch_tables(tables: list[BatchTable]) -> tuple[EpochEntry, ...]:
    """Return the leader epochs of the batches, each with its first offset. v0/v1 batches have no leader epoch and count as epoch 0."""
    found: list[EpochEntry] = []
    for table in tables:
        epochs = np.maximum(table.leader_epoch, 0)
        changes = np.concatenate((np.zeros(min(1, len(epochs)), np.int64), np.flatnonzero(np.diff(epochs)) + 1))
        for batch in changes.tolist():
            if not found or epochs[batch] > found[-1].epoch:
                offset = int(table.base_offset[batch] if table.base_offset[batch] >= 0 else table.last_offset[batch])
                found.append(EpochEntry(LeaderEpoch(int(epochs[batch])), Offset(offset)))
    return tuple(found)


def leader_epoch_lineage_of_offset_range(lineage: tuple[EpochEntry, ...], start_offset: int, end_offset: int) -> tuple[EpochEntry, ...]:
    """Return the leader epochs of the offsets from ``start_offset`` to ``end_offset``, both inclusive. The result has at least one entry,
    and the first one begins at ``start_offset``.
    """
    inside = [entry for entry in lineage if start_offset < entry.start_offset <= end_offset]
    before = [entry for entry in lineage if entry.start_offset <= start_offset]
    first = before[-1].epoch if before else max(0, inside[0].epoch - 1 if inside else 0)
    return (EpochEntry(LeaderEpoch(first), Offset(start_offset)), *inside)
