"""Cleaning of one chunk: takes parsed rows with their survivor flags, and returns the bytes of new batches.

Pass 2 does this for every chunk. Pass 1 does it for a compressed chunk whose survivors it knows already, and stores the result
(``CleanedChunkCache``), so that nothing is decompressed, parsed or looked up twice.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from compactor.cleaner.passes.retention import BatchRetentionDecisions, RetentionRules, decide_batch_retention_by_records
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.worker_threads import ReusableJobBuffers
from compactor.errors import BadData
from compactor.kernels.common import FirstRowByBatch, Flags
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.balance import DigestSumRows, digest_sums_of_uncopied_data_by_reason
from compactor.records.batches import NOT_CONTROL
from compactor.records.encode import COPY, EncodedBatches, encode_cleaned_chunk
from compactor.records.rows import BatchChunk, RecordRows


@dataclass(frozen=True, slots=True)
class CleanedChunk:
    """Cleaned batches of a chunk, ready to be written, with its number of records before and after cleaning.

    sums: digest sums of the chunk's batches and records for the round's balance; None if no balance is computed.
    """

    encoded: EncodedBatches
    records_read: int
    records_kept: int
    sums: DigestSumRows | None = None

    def copy_chunk_into(self, out_buffer: memoryview) -> CleanedChunk:
        """Return the chunk with its bytes copied into ``out_buffer``, so that the thread's buffers can be reused."""
        old = self.encoded
        if len(out_buffer):  # numpy lets other threads run meanwhile: memory that was never touched is slow
            np.copyto(np.frombuffer(out_buffer, np.uint8), np.frombuffer(old.data, np.uint8))
        moved = EncodedBatches(out_buffer, old.size, old.last_offset, old.max_timestamp, old.anew)
        return CleanedChunk(moved, self.records_read, self.records_kept, self.sums)

    def copy_chunk(self) -> CleanedChunk:
        """Return the chunk with a copy of its bytes."""
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
    """Clean the batches of a chunk: decide which records stay, and encode the batches. The result uses the thread's buffers. Raises BadData
    if Kafka would refuse a batch.

    :param superseded_flags: a flag per row: whether a later record has its key.
    :param decisions: decisions that the batch headers alone allow, one row per batch of the chunk.
    """
    if chunk.wanted.any() and int(source.table.magic[chunk.first]) < 2:
        _reject_overlapping_v0_v1_wrappers(source, chunk, rows, first_row)
    _reject_markers_without_value(source, chunk, rows, first_row)
    copied = decisions.action == COPY
    final = decide_batch_retention_by_records(
        source.table, chunk, rows, first_row, superseded_flags, decisions, retention_rules, source.mtime_ms
    )
    encoded = encode_cleaned_chunk(source.buf, source.table, chunk, rows, first_row, final, buffers.output, source.name)
    counts = np.maximum(source.table.count[chunk.first : chunk.last].astype(np.int64), np.diff(first_row))
    sums = None
    if retention_rules.balance_key is not None:
        sums = digest_sums_of_uncopied_data_by_reason(
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
    """Raise BadData for a control record without a value: Kafka's cleaner would take it for a tombstone, and brokers cannot load such a
    log.
    """
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


def _reject_overlapping_v0_v1_wrappers(source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch) -> None:
    """Raise BadData if the records of a v0/v1 wrapper overlap the offsets of the batches before or after it. The wrapper's header does not
    state its first offset, so that this shows only now.
    """
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
    """Chunks that pass 1 has cleaned for pass 2, within a budget in bytes. A chunk is identified by segment and first
    batch. Thread-safe.
    """

    _BLOCK: Final = 1 << 25  # large pages are cheaper to get; the memory goes back when the last chunk in a block is written

    def __init__(self, budget_bytes: int) -> None:
        self._left = budget_bytes
        self._block = memoryview(bytearray())
        self._dealing = threading.Lock()
        self._chunks: dict[tuple[int, int], CleanedChunk] = {}

    @property
    def has_cache_space_left(self) -> bool:
        """Return whether the budget has bytes left for another chunk."""
        return self._left > 0

    @measure_stage(SegmentWorkStage.KEEP, lambda self, source, chunk, cleaned: len(cleaned.encoded.data))
    def store_chunk_within_budget(self, source: SourceSegment, chunk: BatchChunk, cleaned: CleanedChunk) -> None:
        """Store a copy of a cleaned chunk if the budget allows it."""
        size = len(cleaned.encoded.data)
        with self._dealing:
            self._left -= size
            if self._left < 0:
                return
            if size > len(self._block):
                self._block = np.empty(max(size, self._BLOCK), np.uint8).data
            mine, self._block = self._block[:size], self._block[size:]
        self._chunks[source.ordinal, chunk.first] = cleaned.copy_chunk_into(mine)

    def clear_cache_and_stop_storing(self) -> None:
        """Drop all chunks, and store none from now on."""
        self._left = 0
        self._block = memoryview(bytearray())
        self._chunks.clear()

    def pop_cleaned_chunk(self, source: SourceSegment, first_batch: int) -> CleanedChunk | None:
        """Remove and return the cleaned chunk that begins at batch ``first_batch``, or return None if it was not stored."""
        return self._chunks.pop((source.ordinal, first_batch), None)
