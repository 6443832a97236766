"""Sidecars made from segments, and stand-ins made from sidecars.

In the transaction fold, a stand-in replaces a segment that is not read: its batches are the sidecar's producer runs and markers. If the
segment is read later, ``txn_verdicts_from_substitute_segment`` converts the verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bloom.directory import HAS_KEYLESS_RECORD, HAS_TOMBSTONE, KeyDirectory, key_hash_prefixes
from bloom.sidecar import RemovableRecordCounts, Sidecar, SidecarKeyHashCollector
from bloom.siphash import hash_keys, siphash_key_halves
from bloom.sizing import FilterDesign
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import TransactionVerdicts, replace_computed_by_existing_txn_entries
from compactor.cleaner.passes.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.constants import NEVER_MS
from compactor.kernels.common import FirstAndEndBatch, FirstRowByBatch, SegmentOrdinal
from compactor.records.batches import HORIZON, NOT_CONTROL, BatchTable, Int64s, read_only_view
from compactor.records.headers import copy_batch_headers
from compactor.records.producer_runs import batch_table_from_runs_and_markers, extract_producer_runs_and_markers
from compactor.records.rows import BatchChunk, RecordRows, parse_records

NO_BYTES = read_only_view(np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True)
class ChunkSummaryForSidecar:
    """Facts about the batches of a chunk that a sidecar needs.

    hashes: key hashes of the records, shape (n, 2).
    first: number of the first of these batches.
    keys, flags: per batch, its number of keys and its flags in the segment's key directory; empty if no directory is wanted.
    undated: number of tombstones without a delete horizon.
    earliest_ms: earliest delete horizon of a tombstone, in milliseconds; NEVER_MS if there is none.
    """

    hashes: npt.NDArray[np.uint64]
    first: int
    keys: npt.NDArray[np.int32]
    flags: npt.NDArray[np.uint8]
    tombstones: int = 0
    undated: int = 0
    earliest_ms: int = NEVER_MS
    keyless: int = 0


class SidecarBuilder:
    """Builder of a segment's sidecar (Bloom filter, delete horizons, producer runs) that is filled while the segment is read or written.
    Batches come in any order, each once.
    """

    def __init__(
        self,
        source: SourceSegment,
        filter_design: FilterDesign | None,
        hash_key: bytes,
        *,
        counts_distinct_keys: bool,
        collects_key_directory: bool = False,
    ) -> None:
        """Create an empty builder. Keys are hashed only if a filter, the number of distinct keys or a key directory is wanted.

        :param filter_design: parameters of the Bloom filter, for at least as many keys as the segment has records; None for no filter.
        :param counts_distinct_keys: whether the number of distinct keys is wanted.
        :param collects_key_directory: whether ``build_key_directory`` will be called; all batches must be of v2 then.
        """
        self._source = source
        self._table = source.table
        self._data = source.table.control == NOT_CONTROL
        self._hashing = counts_distinct_keys or collects_key_directory or filter_design is not None
        self._summaries: list[ChunkSummaryForSidecar] | None = [] if collects_key_directory else None
        self._sidecar = SidecarKeyHashCollector(filter_design)
        self.hash_key = hash_key
        self._halves = siphash_key_halves(hash_key)
        self.due = RemovableRecordCounts()

    def summarize_chunk(self, chunk: BatchChunk, rows: RecordRows, first_row: FirstRowByBatch) -> ChunkSummaryForSidecar:
        """Summarize a chunk while its rows are valid, leaving out control records. May be called in any thread."""
        table = self._table
        keyed = rows.key_length >= 0
        records = len(rows)
        if not self._data[chunk.first : chunk.last].all():
            data = np.repeat(self._data[chunk.first : chunk.last], np.diff(first_row))
            keyed &= data
            records = int(np.count_nonzero(data))
        hashes = np.empty((len(rows) if self._hashing else 0, 2), np.uint64)
        if self._hashing:
            hash_keys(chunk.buf, rows.key_start, rows.key_length, *self._halves, hashes)
            hashes = hashes if keyed.all() else hashes[keyed]
        tombstones = np.flatnonzero(keyed & (rows.value_length < 0))
        batches = np.searchsorted(first_row, tombstones, side="right") - 1 + chunk.first
        dated = ((table.attributes[batches] & np.int16(HORIZON)) != 0) & (table.magic[batches] == 2)
        earliest = int(table.base_timestamp[batches][dated].min(initial=NEVER_MS))
        keyless = records - int(np.count_nonzero(keyed))
        keys, flags = (
            self._key_counts_and_directory_flags_by_batch(rows, first_row, chunk, keyed) if self._summaries is not None else _NO_DIRECTORY
        )
        return ChunkSummaryForSidecar(
            hashes, chunk.first, keys, flags, len(tombstones), len(tombstones) - int(np.count_nonzero(dated)), earliest, keyless
        )

    def _key_counts_and_directory_flags_by_batch(
        self, rows: RecordRows, first_row: FirstRowByBatch, chunk: BatchChunk, has_key_flags: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return two arrays for the key directory: the number of records with a key in each batch, and flags for batches that have
        tombstones or records without a key.

        :param has_key_flags: a flag per row: whether it is a data record with a key.
        """
        keys = _count_flagged_rows_by_batch(has_key_flags, first_row)
        keyless = self._data[chunk.first : chunk.last] & (keys < np.diff(first_row))
        buried = _count_flagged_rows_by_batch(has_key_flags & (rows.value_length < 0), first_row) > 0
        return keys.astype(np.int32), (keyless * np.uint8(HAS_KEYLESS_RECORD) | buried * np.uint8(HAS_TOMBSTONE)).astype(np.uint8)

    def add_chunk_summary(self, summary: ChunkSummaryForSidecar) -> None:
        """Add the summary of a chunk. Must be called by one thread at a time."""
        self._sidecar.add_record_key_hashes(summary.hashes)
        if self._summaries is not None:
            self._summaries.append(summary)
        self.due = RemovableRecordCounts(
            self.due.tombstones + summary.tombstones,
            self.due.tombstones_without_horizon + summary.undated,
            min(self.due.earliest_tombstone_horizon_ms, summary.earliest_ms),
            self.due.keyless_records + summary.keyless,
        )

    def build_sidecar(self, segment_id: str) -> Sidecar:
        """Return the sidecar of the segment. Called after all batches with records were added."""
        runs, markers = extract_producer_runs_and_markers(self._table)
        return self._sidecar.build_sidecar(segment_id, int(self._table.count[self._data].sum()), self.due, runs, markers)

    def build_key_directory(self, segment_id: str) -> KeyDirectory:
        """Return the segment's key directory, which tells which batches may hold a key. Called after all batches with records were added,
        and while the segment's bytes can still be read.
        """
        table, summary = self._table, sorted(self._summaries or (), key=lambda one: one.first)
        keys, flags = np.zeros(len(table), np.int32), np.zeros(len(table), np.uint8)
        for one in summary:
            keys[one.first : one.first + len(one.keys)] = one.keys
            flags[one.first : one.first + len(one.flags)] = one.flags
        pieces = [key_hash_prefixes(one.hashes) for one in summary]
        return KeyDirectory(
            segment_id, copy_batch_headers(self._source.buf, table.position), table.control, table.coordinator_epoch, flags, keys,
            np.concatenate(pieces) if pieces else np.empty(0, np.uint32),
        )  # fmt: skip


_NO_DIRECTORY = np.empty(0, np.int32), np.empty(0, np.uint8)


def _count_flagged_rows_by_batch(row_flags: npt.NDArray[np.bool_], first_row: FirstRowByBatch) -> Int64s:
    """Return for each batch the number of its rows whose flag in ``row_flags`` is set."""
    before: Int64s = np.concatenate((np.zeros(1, np.int64), np.cumsum(row_flags, dtype=np.int64)))
    counted: Int64s = before[first_row[1:]] - before[first_row[:-1]]
    return counted


def build_sidecar(
    segment_id: str,
    source: SourceSegment,
    filter_design: FilterDesign | None,
    hash_key: bytes,
    max_inflated_bytes: int,
    workers: WorkerThreads,
    *,
    counts_distinct_keys: bool,
) -> Sidecar:
    """Read a whole segment and return its sidecar. Raises BadData if the segment cannot be read.

    :param filter_design: parameters of the Bloom filter, for at least as many keys as the segment has records; None for no filter.
    :param hash_key: secret key of the key hashes, 16 bytes.
    :param counts_distinct_keys: whether the number of distinct keys is estimated, too.
    """
    return add_segment_to_sidecar_builder(
        SidecarBuilder(source, filter_design, hash_key, counts_distinct_keys=counts_distinct_keys), source, max_inflated_bytes, workers
    ).build_sidecar(segment_id)


def add_segment_to_sidecar_builder(
    builder: SidecarBuilder, source: SourceSegment, inflate_limit: int, workers: WorkerThreads
) -> SidecarBuilder:
    """Add every data batch of ``source`` to ``builder`` and return the builder. Raises BadData."""
    wanted = source.table.control == NOT_CONTROL

    def summarize_batch_range(buffers: ReusableJobBuffers, batch_range: FirstAndEndBatch) -> list[ChunkSummaryForSidecar]:
        first, last = batch_range
        chunks = source.read_chunks(first, last, wanted[first:last], inflate_limit, buffers.bodies)
        return [builder.summarize_chunk(chunk, *parse_records(source.table, chunk, buffers.rows, source.name)) for chunk in chunks]

    for found in workers.yield_job_results_in_order(
        summarize_batch_range,
        [(first, last) for first, last in source.split_batches_by_magic_and_compression() if wanted[first:last].any()],
    ):
        for summary in found:
            builder.add_chunk_summary(summary)
    return builder


def create_substitute_segment_from_sidecar(
    ordinal: SegmentOrdinal, name: str, base_offset: int, end_offset: int, mtime_ms: int, sidecar: Sidecar
) -> SourceSegment:
    """Return a substitute for a segment, made from its sidecar, to compute outcomes of transactions without reading the segment.

    It has no bytes; its batches are the sidecar's producer runs and markers.
    """
    table = batch_table_from_runs_and_markers(sidecar.producer_runs, sidecar.markers)
    return SourceSegment(ordinal, name, base_offset, end_offset, mtime_ms, NO_BYTES, table)


def txn_verdicts_from_substitute_segment(
    source: SourceSegment, substitute: SourceSegment, verdicts: TransactionVerdicts
) -> TransactionVerdicts:
    """Convert the outcomes of transactions (verdicts) of a segment's substitute, which ``create_substitute_segment_from_sidecar`` made, to
    those of the segment itself.

    In the substitute, each marker has a batch of its own, and the next batch of the same producer stands for a data batch.
    """
    producers = np.unique(substitute.table.producer_id)
    offsets = np.unique(np.concatenate((substitute.table.base_offset, source.table.base_offset)))

    def producer_and_offset_sort_values(table: BatchTable) -> npt.NDArray[np.int64]:
        """Return one number per batch that sorts by producer and base offset."""
        return np.searchsorted(producers, table.producer_id) * len(offsets) + np.searchsorted(offsets, table.base_offset)

    events_at = producer_and_offset_sort_values(substitute.table)
    order = np.argsort(events_at, kind="stable")
    following = np.searchsorted(events_at[order], producer_and_offset_sort_values(source.table))
    known = np.isin(source.table.producer_id, producers) & (following < len(order))
    event = order[following[known]]
    flags = {}
    for name in ("aborted", "discardable", "indexed"):
        flags[name] = np.zeros(len(source.table), np.bool_)
        flags[name][known] = getattr(verdicts, name)[event]
    return replace(verdicts, **flags, txn_entries=replace_computed_by_existing_txn_entries(verdicts.txn_entries.copy(), source.txn_entries))
