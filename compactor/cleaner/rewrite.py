"""Pass 2: one group of source segments becomes one new segment with its indexes (Kafka: Cleaner.cleanSegments)."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from bloom.directory import HAS_KEYLESS_RECORD, HAS_TOMBSTONE, KeyDirectory, key_hash_prefixes
from bloom.filter import hash_keys, siphash_key_halves
from bloom.sidecar import RemovableRecordCounts, Sidecar, SidecarKeyHashCollector
from bloom.sizing import FilterDesign
from compactor.cleaner.disk_map import NO_LIMIT, DiskReservation
from compactor.cleaner.keys import SurvivorCountsByBatch, SurvivorLookup
from compactor.cleaner.retention import (
    BatchRetentionDecisions,
    CleanedChunk,
    CleanedChunkCache,
    RetentionRules,
    TransactionVerdicts,
    clean_batches_of_chunk,
    decide_by_headers,
    prefer_existing_entries,
)
from compactor.cleaner.source import SecondReader, SourceSegment
from compactor.cleaner.worker_threads import BARRIER, JobBarrier, ReusableJobBuffers, WorkerThreads
from compactor.constants import NEVER_MS
from compactor.errors import BadData
from compactor.kernels.common import FirstAndEndBatch, FirstRowByBatch, Flags
from compactor.model.plan import MAX32
from compactor.model.segment import CountAndDigestSum
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.batches import HEADER, HORIZON, NOT_CONTROL, BatchTable, Int64s, copy_batch_headers, read_only_view
from compactor.records.encode import (
    COPY,
    DROP,
    EMPTY,
    FILTER,
    MAX_SEGMENT,
    DigestSumRows,
    EncodedBatches,
    encode_filler_batch,
    segment_digest_sum,
    zero_digest_sums,
)
from compactor.records.indexes import encode_indexes
from compactor.records.producers import batches_from_runs, extract_runs_and_markers
from compactor.records.rows import BatchChunk, RecordRows, parse_records

# ---- grouping of neighbouring segments into one new segment (Kafka: Cleaner.groupSegmentsBySize; docs/kafka-rules.md 3) ---------


class GroupableSegment(Protocol):
    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    @property
    def timeindex_bytes(self) -> int: ...


S = TypeVar("S", bound=GroupableSegment)


def _allow_every_segment(group: list[S], segment: S) -> bool:
    return True


def group_segments(
    segments: Sequence[S],
    segment_bytes: int,
    segment_index_bytes: int,
    end_offset: int,
    may_join_group: Callable[[list[S], S], bool] = _allow_every_segment,
) -> list[list[S]]:
    """Each group is filled in order until the next segment does not fit. A segment larger than ``segment_bytes`` is a group of its own. An
    empty segment is not subject to the limit of offsets per segment.
    :param end_offset: exclusive.
    """
    groups: list[list[S]] = []
    for i, segment in enumerate(segments):
        last = (segments[i + 1].base if i + 1 < len(segments) else end_offset) - 1
        if (
            groups
            and _fits_group_limits(groups[-1], segment, last, segment_bytes, segment_index_bytes)
            and may_join_group(groups[-1], segment)
        ):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _fits_group_limits(group: list[S], segment: S, last_offset: int, segment_bytes: int, segment_index_bytes: int) -> bool:
    return (
        sum(s.size for s in group) + segment.size <= segment_bytes
        and sum(s.index_bytes for s in group) + segment.index_bytes <= segment_index_bytes
        and sum(s.timeindex_bytes for s in group) + segment.timeindex_bytes <= segment_index_bytes
        and (segment.size == 0 or last_offset - group[0].base <= MAX32)
    )


# ---- sidecars made from segments, and substitutes made from sidecars -----------------------------------------------------------
# In the transaction fold, a substitute replaces a segment that is not read: its batches are the sidecar's producer runs and markers. If the
# segment is read later, ``verdicts_from_substitute`` converts the verdicts.


NO_BYTES = read_only_view(np.empty(0, np.uint8))


@dataclass(frozen=True, slots=True)
class ChunkSummaryForSidecar:
    """Facts about a chunk for a sidecar.
    hashes: key hashes, shape (n, 2).
    keys, flags: per batch, for the key directory; empty if none is wanted.
    undated: tombstones without a delete horizon.
    earliest_ms: earliest delete horizon of a tombstone, or NEVER_MS.
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
    """Batches come in any order, each once."""

    def __init__(
        self,
        source: SourceSegment,
        filter_design: FilterDesign | None,
        hash_key: bytes,
        *,
        counts_distinct_keys: bool,
        collects_key_directory: bool = False,
    ) -> None:
        """:param filter_design: for at least as many keys as the segment has records.
        :param collects_key_directory: all batches must be of v2 then.
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
        """Summarize a chunk without control records while its rows are valid. Runs in any thread."""
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
        keys, flags = self._directory_columns(rows, first_row, chunk, keyed) if self._summaries is not None else _NO_DIRECTORY
        return ChunkSummaryForSidecar(
            hashes, chunk.first, keys, flags, len(tombstones), len(tombstones) - int(np.count_nonzero(dated)), earliest, keyless
        )

    def _directory_columns(
        self, rows: RecordRows, first_row: FirstRowByBatch, chunk: BatchChunk, has_key_flags: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        keys = _count_flagged_rows(has_key_flags, first_row)
        keyless = self._data[chunk.first : chunk.last] & (keys < np.diff(first_row))
        buried = _count_flagged_rows(has_key_flags & (rows.value_length < 0), first_row) > 0
        return keys.astype(np.int32), (keyless * np.uint8(HAS_KEYLESS_RECORD) | buried * np.uint8(HAS_TOMBSTONE)).astype(np.uint8)

    def add_chunk_summary(self, summary: ChunkSummaryForSidecar) -> None:
        """Must be called by one thread at a time."""
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
        runs, markers = extract_runs_and_markers(self._table)
        return self._sidecar.build_sidecar(segment_id, int(self._table.count[self._data].sum()), self.due, runs, markers)

    def build_key_directory(self, segment_id: str) -> KeyDirectory:
        """Called while the segment's bytes can be read."""
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


def _count_flagged_rows(row_flags: npt.NDArray[np.bool_], first_row: FirstRowByBatch) -> Int64s:
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
    """Raises BadData if the segment cannot be read.
    :param filter_design: for at least as many keys as the segment has records.
    """
    return add_segment(
        SidecarBuilder(source, filter_design, hash_key, counts_distinct_keys=counts_distinct_keys), source, max_inflated_bytes, workers
    ).build_sidecar(segment_id)


def add_segment(builder: SidecarBuilder, source: SourceSegment, inflate_limit: int, workers: WorkerThreads) -> SidecarBuilder:
    """Add every data batch. Raises BadData."""
    wanted = source.table.control == NOT_CONTROL

    def summarize_batch_range(buffers: ReusableJobBuffers, batch_range: FirstAndEndBatch) -> list[ChunkSummaryForSidecar]:
        first, last = batch_range
        chunks = source.read_chunks(first, last, wanted[first:last], inflate_limit, buffers.bodies)
        return [builder.summarize_chunk(chunk, *parse_records(source.table, chunk, buffers.rows, source.name)) for chunk in chunks]

    for found in workers.run_jobs(
        summarize_batch_range,
        [(first, last) for first, last in source.split_by_kind() if wanted[first:last].any()],
    ):
        for summary in found:
            builder.add_chunk_summary(summary)
    return builder


def substitute_segment(ordinal: int, name: str, base_offset: int, end_offset: int, mtime_ms: int, sidecar: Sidecar) -> SourceSegment:
    """A segment without bytes for the outcomes of transactions; its batches are the sidecar's runs and markers."""
    table = batches_from_runs(sidecar.producer_runs, sidecar.markers)
    return SourceSegment(ordinal, name, base_offset, end_offset, mtime_ms, NO_BYTES, table)


def verdicts_from_substitute(source: SourceSegment, substitute: SourceSegment, verdicts: TransactionVerdicts) -> TransactionVerdicts:
    """Each marker of the substitute has a batch of its own, and the next batch of the producer stands for a data batch."""
    producers = np.unique(substitute.table.producer_id)
    offsets = np.unique(np.concatenate((substitute.table.base_offset, source.table.base_offset)))

    def sort_values(table: BatchTable) -> npt.NDArray[np.int64]:
        return np.searchsorted(producers, table.producer_id) * len(offsets) + np.searchsorted(offsets, table.base_offset)

    events_at = sort_values(substitute.table)
    order = np.argsort(events_at, kind="stable")
    following = np.searchsorted(events_at[order], sort_values(source.table))
    known = np.isin(source.table.producer_id, producers) & (following < len(order))
    event = order[following[known]]
    flags = {}
    for name in ("aborted", "discardable", "indexed"):
        flags[name] = np.zeros(len(source.table), np.bool_)
        flags[name][known] = getattr(verdicts, name)[event]
    return replace(verdicts, **flags, txn_entries=prefer_existing_entries(verdicts.txn_entries.copy(), source.txn_entries))


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A new segment: files ``<20 digits>.log``, ``.index``, ``.timeindex`` and, unless empty, ``.txnindex``.
    anew: per batch: whether it is not a copy of a source batch.
    sources: number and digest sum of all source batches.
    sums: of all not copied, one row per account.
    """

    base: int
    paths: dict[str, Path]
    size: int
    batches: int
    max_timestamp: int
    records_read: int
    records_kept: int
    anew: Flags
    sources: CountAndDigestSum
    sums: DigestSumRows


@dataclass(slots=True)
class _NewSegmentProgress:
    sizes: list[Int64s] = field(default_factory=list)
    last_offsets: list[Int64s] = field(default_factory=list)
    max_timestamps: list[Int64s] = field(default_factory=list)
    anew: list[Flags] = field(default_factory=lambda: [np.empty(0, np.bool_)])
    written: int = 0
    records_read: int = 0
    records_kept: int = 0
    sources: CountAndDigestSum = field(default_factory=CountAndDigestSum)
    sums: DigestSumRows = field(default_factory=zero_digest_sums)
    leader_epoch: int = -1
    end_epoch: int = -1
    mtime_ms: int = 0
    txnindex: bytes = b""

    def add_written_batches(self, encoded: EncodedBatches) -> None:
        self.anew.append(encoded.anew)
        self.sizes.append(encoded.size)
        self.last_offsets.append(encoded.last_offset)
        self.max_timestamps.append(encoded.max_timestamp)
        self.written += int(encoded.size.sum())


GroupMember = Callable[[], AbstractContextManager[tuple[SourceSegment, TransactionVerdicts]]]


@dataclass(frozen=True, slots=True)
class GroupSourceOpener:
    """Opener of a source, whose bytes stay available until its last chunk is written."""

    source: SourceSegment
    verdicts: TransactionVerdicts

    def __call__(self) -> AbstractContextManager[tuple[SourceSegment, TransactionVerdicts]]:
        return nullcontext((self.source, self.verdicts))


@dataclass(frozen=True, slots=True)
class _BatchRangeWithDecisions:
    source: SourceSegment
    first: int
    last: int
    decisions: BatchRetentionDecisions


@dataclass(frozen=True, slots=True)
class GroupRewriter:
    survivors: SurvivorLookup
    rules: RetentionRules
    index_interval_bytes: int
    inflate_limit: int
    finished: CleanedChunkCache
    second_reader: SecondReader | None = None

    def rewrite_group(
        self,
        base_offset: int,
        group: Sequence[GroupMember],
        folder: Path,
        workers: WorkerThreads,
        *,
        end_offset: int | None = None,
        filler_epoch: int = -1,
        disk_reservation: DiskReservation = NO_LIMIT,
    ) -> CleanedSegment:
        """Write the new segment; files stay in ``folder`` after an error.
        :param end_offset: last offset of a published segment, inclusive (coverage, I1): a filler is added if the last batch would end
        before it. None if the segment may end earlier, or be empty, as with Kafka's cleaner.
        :param filler_epoch: leader epoch of the filler if no batch of the last source shows it.
        :raises BadData: if a source cannot be cleaned.
        """
        done = _NewSegmentProgress(end_epoch=filler_epoch)
        log = folder / f"{base_offset:020d}.log"
        with log.open("xb") as file:

            def append_chunks_of_source(source_and_chunks: tuple[SourceSegment, list[CleanedChunk]]) -> None:
                source, pieces = source_and_chunks
                for piece in pieces:
                    _append_cleaned_chunk(file, piece, source, done, disk_reservation)

            # Whatever happens, no buffers is at work any more when a source loses its bytes.
            with (
                closing(self._batch_ranges(group, done)) as ranges,
                closing(
                    workers.run_ordered_jobs(self._clean_batch_range, append_chunks_of_source, lambda buffers, _: None, ranges)
                ) as written,
            ):
                for _ in written:
                    pass
            if end_offset is not None:
                _append_filler(file, done, base_offset, end_offset, disk_reservation)
        sizes, lasts, maxima = (
            np.concatenate(c) if c else np.empty(0, np.int64) for c in (done.sizes, done.last_offsets, done.max_timestamps)
        )
        index, timeindex = encode_indexes(base_offset, sizes, lasts, maxima, self.index_interval_bytes)
        paths = {"log": log}
        for kind, data in (("index", index), ("timeindex", timeindex), ("txnindex", done.txnindex)):
            if data or kind != "txnindex":
                paths[kind] = folder / f"{base_offset:020d}.{kind}"
                disk_reservation.reserve_bytes_on_disk(len(data))
                paths[kind].write_bytes(data)
        for path in paths.values():
            os.utime(path, ns=(done.mtime_ms * 1_000_000,) * 2)
        return CleanedSegment(
            base_offset, paths, done.written, len(sizes), int(np.max(maxima, initial=-1)), done.records_read, done.records_kept,
            np.concatenate(done.anew), done.sources, done.sums,
        )  # fmt: skip

    def _batch_ranges(
        self, group: Sequence[GroupMember], progress: _NewSegmentProgress
    ) -> Generator[_BatchRangeWithDecisions | JobBarrier, None, None]:
        """Yield all ranges, and a barrier after a source that cannot stay open while the next one is read."""
        for member in group:
            with member() as (source, verdicts):
                if self.second_reader is not None:
                    self.second_reader.begin_segment(source)
                decisions = decide_by_headers(source.table, verdicts, self.rules, source.name)
                counts = self.survivors.survivor_counts_by_batch(source)
                if counts is not None:
                    _decide_by_survivors(source.table, decisions, counts, self.rules.now_ms)
                if self.rules.balance_key is not None:
                    progress.sources = progress.sources.plus(segment_digest_sum(source.buf, self.rules.balance_key))
                progress.leader_epoch = int(source.table.leader_epoch[-1]) if len(source.table) else progress.end_epoch
                progress.mtime_ms = source.mtime_ms
                progress.txnindex += verdicts.txn_entries.tobytes()
                for first, last in source.split_by_kind():
                    yield _BatchRangeWithDecisions(source, first, last, decisions.decisions_of_batch_slice(slice(first, last)))
                if not isinstance(member, GroupSourceOpener):
                    yield BARRIER

    def _clean_batch_range(
        self, buffers: ReusableJobBuffers, batch_range: _BatchRangeWithDecisions
    ) -> tuple[SourceSegment, list[CleanedChunk]]:
        return batch_range.source, self._clean_chunks_of_range(
            buffers, batch_range.source, batch_range.first, batch_range.last, batch_range.decisions
        )

    def _clean_chunks_of_range(
        self, buffers: ReusableJobBuffers, source: SourceSegment, first_batch: int, end_batch: int, decisions: BatchRetentionDecisions
    ) -> list[CleanedChunk]:
        """Chunks come from pass 1's cache, from batch headers alone, or from the records."""
        action = decisions.action
        finished = self.finished.pop_cleaned_chunk(source, first_batch)
        if finished is not None:
            return [finished]
        # Markers are copied, but Kafka reads them all the same, and refuses one that does not parse.
        wanted = (action == FILTER) | ((action == COPY) & (source.table.control[first_batch:end_batch] != NOT_CONTROL))
        if not wanted.any():
            source.verify_batches(first_batch, end_batch)
            nowhere = np.zeros(end_batch - first_batch, np.int64)
            chunk = BatchChunk(first_batch, end_batch, source.buf[:0], nowhere, nowhere, wanted)
            none = np.empty(0, np.bool_)
            return [
                clean_batches_of_chunk(
                    buffers,
                    source,
                    chunk,
                    buffers.rows.allocate_rows(0),
                    np.zeros(end_batch - first_batch + 1, np.int64),
                    none,
                    decisions,
                    self.rules,
                )
            ]
        found = []
        for chunk in source.read_chunks(first_batch, end_batch, wanted, self.inflate_limit, buffers.bodies):
            some = slice(chunk.first - first_batch, chunk.last - first_batch)
            rows, first_row = parse_records(source.table, chunk, buffers.rows, source.name)
            if self.second_reader is not None:
                self.second_reader.add_rewrite_chunk(buffers, source, chunk)
            superseded = self.survivors.flag_superseded_rows(source, chunk, rows, first_row)
            clean = clean_batches_of_chunk(
                buffers, source, chunk, rows, first_row, superseded, decisions.decisions_of_batch_slice(some), self.rules
            )
            # The buffers is used again for the next chunk of this range.
            found.append(clean if chunk.last == end_batch else clean.copy_chunk())
        return found


def _append_cleaned_chunk(
    file: BinaryIO, cleaned: CleanedChunk, source: SourceSegment, progress: _NewSegmentProgress, disk_reservation: DiskReservation
) -> None:
    """Raises BadData if the segment would exceed 2 GiB."""
    if progress.written + len(cleaned.encoded.data) > MAX_SEGMENT:
        raise BadData(
            "the cleaned segment would exceed 2 GiB",
            segment=source.name,
            hint="Lower segment_bytes; recompression at the default level can make batches larger",
        )
    disk_reservation.reserve_bytes_on_disk(len(cleaned.encoded.data))
    _write_unbuffered(file, cleaned.encoded.data)
    progress.add_written_batches(cleaned.encoded)
    progress.records_read += cleaned.records_read
    progress.records_kept += cleaned.records_kept
    if cleaned.sums is not None:
        progress.sums += cleaned.sums


def _append_filler(
    file: BinaryIO, progress: _NewSegmentProgress, base_offset: int, end_offset: int, disk_reservation: DiskReservation
) -> None:
    last = max((int(lasts[-1]) for lasts in reversed(progress.last_offsets) if len(lasts)), default=base_offset - 1)
    if last >= end_offset:
        return
    filler = encode_filler_batch(end_offset, end_offset, progress.leader_epoch)
    disk_reservation.reserve_bytes_on_disk(len(filler))
    _write_unbuffered(file, memoryview(filler))
    size, last_offset, max_timestamp = (np.array([number], np.int64) for number in (HEADER, end_offset, -1))
    progress.add_written_batches(EncodedBatches(memoryview(filler), size, last_offset, max_timestamp, np.ones(1, np.bool_)))


def _decide_by_survivors(
    table: BatchTable, decisions: BatchRetentionDecisions, survivor_counts: SurvivorCountsByBatch, now_ms: int
) -> None:
    """Decide batches by survivor counts: one without survivors is dropped or emptied, one whose records all survive is copied, unless it
    has tombstones that are due or have no delete horizon yet. A batch with records without a key is read, so that the balance counts them
    as such.
    """
    action, retain_empty = decisions.action, decisions.retain_empty
    open_ = (action == FILTER) & (survivor_counts.kept >= 0) & (survivor_counts.keyless == 0)
    nothing = open_ & (survivor_counts.kept == 0)
    action[nothing & retain_empty] = EMPTY
    action[nothing & ~retain_empty] = DROP
    waiting = ((table.attributes & np.int16(HORIZON)) != 0) & (now_ms < table.base_timestamp)
    action[open_ & (survivor_counts.kept > 0) & (survivor_counts.kept == table.count) & (~survivor_counts.tombstones | waiting)] = COPY


@measure_stage(SegmentWorkStage.WRITE, lambda file, data: len(data))
def _write_unbuffered(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[os.write(file.fileno(), data) :]
