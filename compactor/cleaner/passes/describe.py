"""What metadata says of a segment's content, read off its batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloom.sidecar import NEVER_MS, Due
from checkpoint.lineage import EpochEntry
from compactor.cleaner.passes.source import SourceSegment
from compactor.records.batches import HORIZON, NOT_CONTROL, BatchTable
from compactor.records.rows import RowBuffers, parse

NEVER = -1
NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True)
class Content:
    """Milliseconds and counts. ``max_timestamp_ms`` without control records, whose clock is the broker's; -1 for none."""

    max_timestamp_ms: int
    first_timestamp_ms: int
    records: int


def content_of(table: BatchTable) -> Content:
    data = table.max_timestamp[(table.control == NOT_CONTROL) & ((table.count > 0) | (table.magic < 2))]
    return Content(
        max_timestamp_ms=int(data.max(initial=-1)),
        first_timestamp_ms=int(table.max_timestamp[0]) if len(table) else -1,
        records=int(table.count.sum()),
    )


def due_ms(source: SourceSegment, inflate_limit: int) -> int:
    """When the first delete horizon passes that something waits for: a marker, or a tombstone (not every dated batch has one left)."""
    table = source.table
    due = _first_marker_ms(table)
    maybe = _dated(table) & (table.control == NOT_CONTROL) & (table.base_timestamp < due)
    buffers = RowBuffers()
    for first, last in source.ranges():
        wanted = maybe[first:last]
        if not wanted.any():
            continue
        for chunk in source.chunks(first, last, wanted, inflate_limit, None):
            rows, first_row = parse(table, chunk, buffers, source.name)
            tombstones = np.flatnonzero(rows.value_length < 0)
            if len(tombstones):
                batches = np.unique(np.searchsorted(first_row, tombstones, side="right") - 1) + chunk.first
                due = min(due, int(np.min(table.base_timestamp[batches])))
    return due if due != NEVER_MS else NEVER


def due_as_seen(table: BatchTable, seen: Due) -> int:
    """The same where a sidecar's maker has seen the tombstones."""
    due = min(_first_marker_ms(table), seen.earliest_tombstone_horizon_ms)
    return due if due != NEVER_MS else NEVER


def _dated(table: BatchTable) -> npt.NDArray[np.bool_]:
    dated: npt.NDArray[np.bool_] = ((table.attributes & np.int16(HORIZON)) != 0) & (table.magic == 2) & (table.count > 0)
    return dated


def _first_marker_ms(table: BatchTable) -> int:
    return int(table.base_timestamp[_dated(table) & (table.control != NOT_CONTROL)].min(initial=NEVER_MS))


def last_record(source: SourceSegment, inflate_limit: int) -> int:
    """The offset of its last record, control records included; NEVER for none. A batch may reach beyond its last record. Raises BadData."""
    table, buffers = source.table, RowBuffers()
    for batch in np.flatnonzero((table.count > 0) | (table.magic < 2))[::-1].tolist():
        for chunk in source.chunks(batch, batch + 1, np.ones(1, np.bool_), inflate_limit):
            rows, _ = parse(table, chunk, buffers, source.name)
            if len(rows):
                return int(rows.offset.max())
    return NEVER


def negative_timestamps(source: SourceSegment, inflate_limit: int) -> int:
    """Records with a negative timestamp that is not -1, Kafka's word for none: no cleaner writes a batch anew that keeps one."""
    buffers, found = RowBuffers(), 0
    for first, last in source.ranges():
        for chunk in source.chunks(first, last, np.ones(last - first, np.bool_), inflate_limit, None):
            rows, _ = parse(source.table, chunk, buffers, source.name)
            found += int(np.count_nonzero(rows.timestamp < NO_TIMESTAMP))
    return found


def lineage_of(tables: list[BatchTable]) -> tuple[EpochEntry, ...]:
    """The leader epochs that the batches name, each with its first offset; v0/v1 batches name none and count as epoch 0."""
    found: list[EpochEntry] = []
    for table in tables:
        epochs = np.maximum(table.leader_epoch, 0)
        changes = np.concatenate((np.zeros(min(1, len(epochs)), np.int64), np.flatnonzero(np.diff(epochs)) + 1))
        for batch in changes.tolist():
            if not found or epochs[batch] > found[-1].epoch:
                offset = int(table.base_offset[batch] if table.base_offset[batch] >= 0 else table.last_offset[batch])
                found.append(EpochEntry(int(epochs[batch]), offset))
    return tuple(found)


def epochs_within(lineage: tuple[EpochEntry, ...], start_offset: int, end_offset: int) -> tuple[EpochEntry, ...]:
    """A segment's part of the lineage; its first epoch begins where the segment does. At least one entry."""
    inside = [entry for entry in lineage if start_offset < entry.start_offset <= end_offset]
    before = [entry for entry in lineage if entry.start_offset <= start_offset]
    first = before[-1].epoch if before else max(0, inside[0].epoch - 1 if inside else 0)
    return (EpochEntry(first, start_offset), *inside)
