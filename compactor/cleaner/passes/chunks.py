"""One chunk cleaned: parsed rows and their survivors in, the bytes of new batches out.

Pass 2 does this for every chunk. Pass 1 does it at once where it already knows what survives and inflated the chunk to know it: such
results are kept for pass 2, so that nothing is inflated, parsed or looked up twice (see FinishedChunks).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from compactor.cleaner.passes.lanes import Lane
from compactor.cleaner.passes.retention import BatchFates, RoundRules, filter_rows
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Flags
from compactor.errors import BadData
from compactor.records.balance import Sums, chunk_sums
from compactor.records.batches import NOT_CONTROL, Int64s
from compactor.records.encode import COPY, Encoded, encode
from compactor.records.rows import Chunk, Rows
from compactor.stages import WorkStage, measured


@dataclass(frozen=True, slots=True)
class CleanChunk:
    """What is to be written for a chunk, how many records it had and has, and its part of the balance (None: nobody asks)."""

    encoded: Encoded
    records_read: int
    records_kept: int
    sums: Sums | None = None

    def moved(self, data: memoryview) -> CleanChunk:
        """The same with its bytes elsewhere: the lane may go on."""
        old = self.encoded
        if len(data):  # numpy lets other threads run meanwhile: memory that was never touched is slow
            np.copyto(np.frombuffer(data, np.uint8), np.frombuffer(old.data, np.uint8))
        moved = Encoded(data, old.size, old.last_offset, old.max_timestamp, old.anew)
        return CleanChunk(moved, self.records_read, self.records_kept, self.sums)

    def detached(self) -> CleanChunk:
        return self.moved(memoryview(bytearray(len(self.encoded.data))))


def clean_chunk(
    lane: Lane,
    source: SourceSegment,
    chunk: Chunk,
    rows: Rows,
    first_row: Int64s,
    superseded: Flags,
    fates: BatchFates,
    rules: RoundRules,
) -> CleanChunk:
    """Decides and writes a chunk's batches. ``fates``: of the chunk, from ``decide_batches``.

    The result lives in the lane. Raises BadData where Kafka's builder would refuse a batch.
    """
    if chunk.wanted.any() and int(source.table.magic[chunk.first]) < 2:
        _check_wrapper_order(source, chunk, rows, first_row)
    _check_marker_values(source, chunk, rows, first_row)
    copied = fates.action == COPY
    action = fates.action.copy()
    keep, horizon = filter_rows(source.table, chunk, rows, first_row, superseded, action, fates.retain_empty, rules, source.mtime_ms)
    encoded = encode(source.buf, source.table, chunk, rows, first_row, keep, action, horizon, lane.output, source.name)
    counts = np.maximum(source.table.count[chunk.first : chunk.last].astype(np.int64), np.diff(first_row))
    sums = None
    if rules.balance_key is not None:
        sums = chunk_sums(
            rules.balance_key, source.buf, source.table, chunk, rows, first_row, fates.action, action, keep, superseded, fates.discarded
        )
    return CleanChunk(encoded, int(counts.sum()), int(np.count_nonzero(keep)) + int(counts[copied].sum()), sums)


def _check_marker_values(source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s) -> None:
    """Kafka's cleaner would take a control record without a value for a tombstone; its brokers cannot load such a log."""
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


def _check_wrapper_order(source: SourceSegment, chunk: Chunk, rows: Rows, first_row: Int64s) -> None:
    """A v0/v1 wrapper tells its base offset only when inflated."""
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


class FinishedChunks:
    """Cleaned chunks that pass 1 leaves for pass 2, up to a budget in bytes. A chunk is known by its segment and first batch.

    Chunks are kept by many threads, each in its lane.
    """

    _BLOCK: Final = 1 << 25  # large pages are cheaper to get; the memory goes back when the last chunk in a block is written

    def __init__(self, budget_bytes: int) -> None:
        self._left = budget_bytes
        self._block = memoryview(bytearray())
        self._dealing = threading.Lock()
        self._chunks: dict[tuple[int, int], CleanChunk] = {}

    @property
    def has_room(self) -> bool:
        return self._left > 0

    @measured(WorkStage.KEEP, lambda self, source, chunk, clean: len(clean.encoded.data))
    def keep(self, source: SourceSegment, chunk: Chunk, clean: CleanChunk) -> None:
        """Keeps a copy if there is room for it; the first chunk that finds none is the last to be made ahead."""
        size = len(clean.encoded.data)
        with self._dealing:
            self._left -= size
            if self._left < 0:
                return
            if size > len(self._block):
                self._block = np.empty(max(size, self._BLOCK), np.uint8).data
            mine, self._block = self._block[:size], self._block[size:]
        self._chunks[source.ordinal, chunk.first] = clean.moved(mine)

    def forget(self) -> None:
        """Nobody takes them any more."""
        self._left = 0
        self._block = memoryview(bytearray())
        self._chunks.clear()

    def take(self, source: SourceSegment, first: int) -> CleanChunk | None:
        return self._chunks.pop((source.ordinal, first), None)
