"""Pass 2: one group of source segments becomes one new segment with its indexes (Kafka: Cleaner.cleanSegments)."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from compactor.cleaner.keys.survivors import SurvivorCountsByBatch, SurvivorLookup
from compactor.cleaner.passes.chunks import CleanedChunk, CleanedChunkCache, clean_batches_of_chunk
from compactor.cleaner.passes.retention import BatchRetentionDecisions, RetentionRules, decide_batch_retention_by_headers
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import TransactionVerdicts
from compactor.cleaner.passes.worker_threads import BARRIER, JobBarrier, ReusableJobBuffers, WorkerThreads
from compactor.cleaner.row_spool import NO_LIMIT, DiskReservation
from compactor.cleaner.second_reader import SecondReader
from compactor.errors import BadData
from compactor.kernels.common import Flags
from compactor.model.balance import CountAndDigestSum
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.balance import DigestSumRows, allocate_zero_digest_sums_by_reason, batch_digest_sum_of_segment
from compactor.records.batches import HEADER, HORIZON, NOT_CONTROL, BatchTable, Int64s
from compactor.records.encode import COPY, DROP, EMPTY, FILTER, MAX_SEGMENT, EncodedBatches, encode_filler_batch
from compactor.records.indexes import encode_offset_and_time_index
from compactor.records.rows import BatchChunk, parse_records


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A new segment: files ``<20 digits>.log``, ``.index``, ``.timeindex`` and, unless empty, ``.txnindex``.

    anew: a flag per batch: whether it is not a copy of a source batch.
    sources: number and digest sum of all source batches, for the balance.
    sums: number and digest sum of the batches and records that are not copied, one row per account (reason for which they are counted).
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
    """Progress of writing a group's new segment: the batches and sums written so far."""

    sizes: list[Int64s] = field(default_factory=list)
    last_offsets: list[Int64s] = field(default_factory=list)
    max_timestamps: list[Int64s] = field(default_factory=list)
    anew: list[Flags] = field(default_factory=lambda: [np.empty(0, np.bool_)])
    written: int = 0
    records_read: int = 0
    records_kept: int = 0
    sources: CountAndDigestSum = field(default_factory=CountAndDigestSum)
    sums: DigestSumRows = field(default_factory=allocate_zero_digest_sums_by_reason)
    leader_epoch: int = -1
    end_epoch: int = -1
    mtime_ms: int = 0
    txnindex: bytes = b""

    def add_written_batches_to_progress(self, encoded: EncodedBatches) -> None:
        self.anew.append(encoded.anew)
        self.sizes.append(encoded.size)
        self.last_offsets.append(encoded.last_offset)
        self.max_timestamps.append(encoded.max_timestamp)
        self.written += int(encoded.size.sum())


GroupMember = Callable[[], AbstractContextManager[tuple[SourceSegment, TransactionVerdicts]]]


@dataclass(frozen=True, slots=True)
class GroupSourceOpener:
    """Callable that opens one source segment of a group (segments that are rewritten together). The segment's bytes stay available until
    its last chunk is written, although the next source may be opened before.
    """

    source: SourceSegment
    verdicts: TransactionVerdicts

    def __call__(self) -> AbstractContextManager[tuple[SourceSegment, TransactionVerdicts]]:
        return nullcontext((self.source, self.verdicts))


@dataclass(frozen=True, slots=True)
class _BatchRangeWithDecisions:
    """Range of batches of a source segment, from ``first`` up to ``last`` (exclusive), with the decisions on them."""

    source: SourceSegment
    first: int
    last: int
    decisions: BatchRetentionDecisions


@dataclass(frozen=True, slots=True)
class GroupRewriter:
    """Pass 2 of a round: writes the new segment of each of its groups."""

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
        """Write the new segment of a group into ``folder``, and return it.

        :param base_offset: base offset of the first source.
        :param group: functions that open the sources with their verdicts, in order.
        :param end_offset: last offset of a published segment, inclusive (coverage, I1): a filler batch is added if the last batch would end
            before it. None if the segment may end earlier, or be empty, as with Kafka's cleaner.
        :param filler_epoch: leader epoch of the filler if no batch of the last source shows it.
        :param disk_reservation: reserves the bytes of each write before it is done.
        :raises BadData: if a source cannot be cleaned. Files written so far are left to the caller.
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
                closing(self._iterate_batch_ranges_and_barriers(group, done)) as ranges,
                closing(
                    workers.run_jobs_with_ordered_middle_step(
                        self._clean_batch_range, append_chunks_of_source, lambda buffers, _: None, ranges
                    )
                ) as written,
            ):
                for _ in written:
                    pass
            if end_offset is not None:
                _append_filler_batch_if_needed(file, done, base_offset, end_offset, disk_reservation)
        sizes, lasts, maxima = (
            np.concatenate(c) if c else np.empty(0, np.int64) for c in (done.sizes, done.last_offsets, done.max_timestamps)
        )
        index, timeindex = encode_offset_and_time_index(base_offset, sizes, lasts, maxima, self.index_interval_bytes)
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

    def _iterate_batch_ranges_and_barriers(
        self, group: Sequence[GroupMember], progress: _NewSegmentProgress
    ) -> Generator[_BatchRangeWithDecisions | JobBarrier, None, None]:
        """Yield every range of batches of every source, in order. After a source that cannot stay open while the next one is read, yield a
        barrier. There the caller waits until all ranges of that source are written.
        """
        for member in group:
            with member() as (source, verdicts):
                if self.second_reader is not None:
                    self.second_reader.begin_checks_of_segment_chunks(source)
                decisions = decide_batch_retention_by_headers(source.table, verdicts, self.rules, source.name)
                counts = self.survivors.survivor_counts_by_batch(source)
                if counts is not None:
                    _decide_batch_retention_by_survivor_count(source.table, decisions, counts, self.rules.now_ms)
                if self.rules.balance_key is not None:
                    progress.sources = progress.sources.plus(batch_digest_sum_of_segment(source.buf, self.rules.balance_key))
                progress.leader_epoch = int(source.table.leader_epoch[-1]) if len(source.table) else progress.end_epoch
                progress.mtime_ms = source.mtime_ms
                progress.txnindex += verdicts.txn_entries.tobytes()
                for first, last in source.split_batches_by_magic_and_compression():
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
        """Return the cleaned chunks of one range of batches: from the cache if the first pass has cleaned them, from the batch headers
        alone if these decide, else by reading the records now.
        """
        action = decisions.action
        finished = self.finished.pop_cleaned_chunk(source, first_batch)
        if finished is not None:
            return [finished]
        # Markers are copied, but Kafka reads them all the same, and refuses one that does not parse.
        wanted = (action == FILTER) | ((action == COPY) & (source.table.control[first_batch:end_batch] != NOT_CONTROL))
        if not wanted.any():
            source.verify_batch_crcs_unless_verified(first_batch, end_batch)
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
                self.second_reader.add_fingerprints_of_rewrite_chunk(buffers, source, chunk)
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
    """Append a cleaned chunk to the new segment's file, and add it to ``progress``. Raises BadData if the segment would exceed 2 GiB."""
    if progress.written + len(cleaned.encoded.data) > MAX_SEGMENT:
        raise BadData(
            "the cleaned segment would exceed 2 GiB",
            segment=source.name,
            hint="Lower segment_bytes; recompression at the default level can make batches larger",
        )
    disk_reservation.reserve_bytes_on_disk(len(cleaned.encoded.data))
    _write_unbuffered(file, cleaned.encoded.data)
    progress.add_written_batches_to_progress(cleaned.encoded)
    progress.records_read += cleaned.records_read
    progress.records_kept += cleaned.records_kept
    if cleaned.sums is not None:
        progress.sums += cleaned.sums


def _append_filler_batch_if_needed(
    file: BinaryIO, progress: _NewSegmentProgress, base_offset: int, end_offset: int, disk_reservation: DiskReservation
) -> None:
    """Append a filler (an empty batch at ``end_offset``) to the file if the segment would end before that offset, and add it to
    ``progress``.
    """
    last = max((int(lasts[-1]) for lasts in reversed(progress.last_offsets) if len(lasts)), default=base_offset - 1)
    if last >= end_offset:
        return
    filler = encode_filler_batch(end_offset, end_offset, progress.leader_epoch)
    disk_reservation.reserve_bytes_on_disk(len(filler))
    _write_unbuffered(file, memoryview(filler))
    size, last_offset, max_timestamp = (np.array([number], np.int64) for number in (HEADER, end_offset, -1))
    progress.add_written_batches_to_progress(EncodedBatches(memoryview(filler), size, last_offset, max_timestamp, np.ones(1, np.bool_)))


def _decide_batch_retention_by_survivor_count(
    table: BatchTable, decisions: BatchRetentionDecisions, survivor_counts: SurvivorCountsByBatch, now_ms: int
) -> None:
    """Change ``decisions`` for the batches whose survivor count from pass 1 is decisive, so that these batches are not read again. A batch
    without survivors is dropped or emptied. A batch whose records all survive is copied, unless it has tombstones that are due or have no
    delete horizon yet. A batch that has records without a key is read, so that the balance counts them as such.
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
    """Write all of ``data``, past Python's buffer because chunks are large."""
    while data:
        data = data[os.write(file.fileno(), data) :]
