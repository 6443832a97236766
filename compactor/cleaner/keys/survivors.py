"""Pass 1: which records have a later record of the same key in the mapped range?

Two implementations of ``SurvivorLookup``. ``find_survivors_backwards``: the first record seen of a key survives, so a set of key hashes is
enough, and the answer for the dirty range is a bitmap. ``find_survivors_with_bounded_map``: Kafka's own ascending map that stops when it
holds N keys (kafka-rules 2.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bloom.siphash import siphash128, siphash_key_halves
from compactor.cleaner.keys.key_set import BoundedOffsetMap, KeySet
from compactor.cleaner.passes.chunks import CleanedChunkCache, clean_batches_of_chunk
from compactor.cleaner.passes.retention import BatchRetentionDecisions, RetentionRules, decide_batches_by_headers
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import TransactionVerdicts
from compactor.cleaner.passes.worker_threads import ThreadBuffers, WorkerThreads
from compactor.cleaner.second_reader import SecondReader, SecondReaderRows
from compactor.config.units import format_size
from compactor.errors import OutOfBudget
from compactor.kernels.common import Flags, Hashes
from compactor.kernels.jit import kernel
from compactor.profiling import WorkStage, measure_stage
from compactor.records.batches import NOT_CONTROL, Bytes, Int64s
from compactor.records.encode import FILTER
from compactor.records.rows import BatchChunk, Int32s, RecordRows, parse_records

_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SurvivorCounts:
    """Counts of pass 1 for each batch of a segment.

    kept: number of survivors, -1 if unknown.
    tombstones: whether there are tombstones among them.
    """

    kept: Int32s
    tombstones: Flags


class SurvivorLookup(Protocol):
    """Result of pass 1 in the form that pass 2 uses: shows which records have a later record of the same key."""

    @property
    def last_mapped_offset(self) -> int:
        """Return the last offset that the offset map covers. Records after it stay."""

    @property
    def key_count(self) -> int:
        """Return the number of distinct keys in the map."""

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the map at its largest, in bytes."""

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCounts | None:
        """Return the number of surviving records per batch, as far as it is known without reading records, or None."""

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: Int64s) -> Flags:
        """Return a flag per row of a chunk: whether the mapped range has a later record of its key."""


@dataclass(frozen=True, slots=True)
class KeyScanParameters:
    """Parameters of the scan for keys in pass 1: segments, outcomes of their transactions (verdicts), offset range [first_dirty, end), hash
    key and limits.

    rules: if given, the scan backwards cleans compressed chunks at once when everything about them is known, and stores them in
        ``finished``.
    second_reader: second reader, which receives the chunks that were decompressed.
    """

    sources: Sequence[SourceSegment]
    verdicts: Sequence[TransactionVerdicts]
    first_dirty: int
    end: int
    hash_key: bytes
    inflate_limit: int
    finished: CleanedChunkCache
    rules: RetentionRules | None = None
    second_reader: SecondReader | None = None

    def dirty_segments_with_batches(self) -> list[tuple[SourceSegment, Flags]]:
        """Return the segments that pass 1 reads, with the batches whose records may enter the map."""
        dirty = [source for source in self.sources if source.end > self.first_dirty and source.base < self.end]
        return [(source, self.flag_batches_for_offset_map(source)) for source in dirty]

    def flag_batches_for_offset_map(self, source: SourceSegment) -> Flags:
        """Return a flag per batch of a segment: whether it may have records that enter the offset map."""
        table = source.table
        return (table.control == NOT_CONTROL) & ~self.verdicts[source.ordinal].aborted & (table.last_offset >= self.first_dirty)

    def flag_batches_below_dirty_range(self, source: SourceSegment) -> Flags:
        """Return a flag per batch of a segment: whether it may have records below the dirty range that have a later record of their key."""
        table = source.table
        return (table.control == NOT_CONTROL) & ~self.verdicts[source.ordinal].aborted & (table.base_offset < self.first_dirty)

    def hash_chunks(
        self,
        buffers: ThreadBuffers,
        source: SourceSegment,
        first_batch: int,
        end_batch: int,
        wanted: Flags,
        *,
        backwards: bool,
        below_dirty_range: bool = False,
    ) -> list[HashedChunkKeys]:
        """Hash the keys of a range of batches, chunk by chunk. The results use the thread's buffers.

        :param backwards: rows in descending order.
        :param below_dirty_range: rows below the dirty range, which are only looked up, instead of those that may enter the map.
        """
        low, high = (-1, self.first_dirty) if below_dirty_range else (self.first_dirty, _END)
        found = []
        for chunk in source.read_chunks(first_batch, end_batch, wanted, self.inflate_limit, buffers.bodies, backwards=backwards):
            rows, first_row = parse_records(source.table, chunk, buffers.rows, source.name)
            hashes, picked = _hash_keyed_rows_of_chunk(buffers, chunk, rows, low, high, self.hash_key, backwards)
            shown = self.second_reader is not None and backwards and not below_dirty_range
            second_reader_rows = (
                self.second_reader.read_pass_one_chunk(buffers, source, chunk) if self.second_reader is not None and shown else None
            )
            piece = HashedChunkKeys(chunk, first_row, hashes, picked, rows.offset, rows.value_length, rows, second_reader_rows)
            found.append(piece if chunk.last - chunk.first == end_batch - first_batch else piece.copy_from_buffers())
        return found


@dataclass(frozen=True, slots=True)
class HashedChunkKeys:
    """Key hashes of the records of one chunk (consecutive batches). hashes: shape (n, 2).
    picked: the rows of the hashes among all rows of the chunk.
    rows: None if a range of batches came in several chunks, because only the other arrays outlive the next chunk.
    """

    chunk: BatchChunk
    first_row: Int64s
    hashes: Hashes
    picked: Int64s
    offset: Int64s
    value_length: Int32s
    rows: RecordRows | None
    second_reader_rows: SecondReaderRows | None

    def copy_from_buffers(self) -> HashedChunkKeys:
        """Return a copy that stays valid when the thread's buffers are reused."""
        hashes, picked, offset, value_length = self.hashes.copy(), self.picked.copy(), self.offset.copy(), self.value_length.copy()
        return HashedChunkKeys(self.chunk, self.first_row, hashes, picked, offset, value_length, None, self.second_reader_rows)


class SurvivorBitmap:
    """Bitmap of the surviving records of one dirty segment, with the position of each batch's first bit (-1: not in the map)."""

    def __init__(self, batch_count: int) -> None:
        self.begin = np.full(batch_count, -1, np.int64)
        self.kept = np.full(batch_count, -1, np.int32)
        self.tombstones = np.zeros(batch_count, np.bool_)
        self._parts: list[npt.NDArray[np.uint8]] = []
        self._size = 0
        self.packed: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        """The bits of all chunks, complete after ``finish``."""

    @measure_stage(WorkStage.DECIDE)
    def add_chunk(
        self, hashed: HashedChunkKeys, survives_flags: Flags, first_dirty_offset: int, source: SourceSegment, *, is_final: bool
    ) -> None:
        """Add which rows of a chunk survive.
        :param survives_flags: a flag per row.
        :param first_dirty_offset: first offset that is cleaned in this round.
        :param is_final: whether the flags will not change, so that the survivors of whole batches can be counted now.
        """
        chunk, first_row = hashed.chunk, hashed.first_row
        some = slice(chunk.first, chunk.last)
        self.begin[some] = np.where(chunk.wanted, 8 * self._size + first_row[:-1], -1)
        # Only where the map speaks for every record of the batch; legacy batches are always written anew.
        whole = chunk.wanted & (source.table.base_offset[some] >= first_dirty_offset) & (source.table.magic[some] == 2) & is_final
        _count_survivors_by_batch(first_row, survives_flags, hashed.value_length, whole, self.kept[some], self.tombstones[some])
        self._parts.append(np.packbits(survives_flags))
        self._size += len(self._parts[-1])

    def join_chunk_flags(self) -> None:
        """Join the flags of all chunks to the segment's bitmap. Called after the last chunk was added."""
        if self._parts:
            self.packed = np.concatenate(self._parts)
        self._parts = []

    @measure_stage(WorkStage.DECIDE)
    def flag_superseded_rows_of_chunk(self, chunk: BatchChunk, first_row: Int64s) -> Flags:
        """Return a flag per row of the chunk: whether a later record has its key."""
        out = np.zeros(int(first_row[-1]), np.bool_)
        _unpack_superseded(self.packed, self.begin[chunk.first : chunk.last], first_row, out)
        return out


@dataclass(frozen=True, slots=True)
class _SegmentScan:
    """State of the scan of one segment. ``decisions`` is None if none of its chunks may be cleaned at once."""

    source: SourceSegment
    bits: SurvivorBitmap
    decisions: BatchRetentionDecisions | None


@dataclass(frozen=True, slots=True)
class _ScanJob:
    """A range of batches of one dirty segment, to be hashed by a worker thread."""

    scanned: _SegmentScan
    first: int
    last: int
    wanted: Flags


class BackwardKeyScan:
    """Scan of a log from its end to its beginning for the newest record of each key. Afterwards a bitmap tells which records of the dirty
    range survive, and the key set tells which records before it.
    """

    def __init__(self, key_scan: KeyScanParameters, key_set: KeySet) -> None:
        self._scan = key_scan
        self._set = key_set
        self._bits: dict[int, SurvivorBitmap] = {}

    @property
    def last_mapped_offset(self) -> int:
        """Return the last offset that the offset map covers."""
        return self._scan.end - 1

    @property
    def key_count(self) -> int:
        return self._set.key_count

    @property
    def peak_bytes(self) -> int:
        return self._set.peak_bytes

    def scan_dirty_segment(self, source: SourceSegment, wanted: Flags, workers: WorkerThreads, *, clean_at_once: bool = True) -> None:
        """Read the keys of one dirty segment and find its surviving records. Segments are passed in descending order. Raises BadData;
        OutOfBudget if the set is full.

        :param clean_at_once: compressed chunks may be cleaned at once, because the outcomes of their transactions are known.
        """
        self.scan_dirty_segments([(source, wanted)], workers, clean_at_once=clean_at_once)

    def scan_dirty_segments(
        self, segments: Iterable[tuple[SourceSegment, Flags]], workers: WorkerThreads, *, clean_at_once: bool = True
    ) -> None:
        """Read the keys of several dirty segments, in descending order, and find the surviving records. Workers begin the next segment
        while the last chunks of one are being processed.

        :param clean_at_once: whether chunks whose records are all decided are cleaned in the same pass.
        """
        key_scan = self._scan
        begun: list[_SegmentScan] = []

        def scan_jobs() -> Iterator[_ScanJob]:
            for source, wanted in segments:
                begun.append(self._prepare_segment_scan(source, clean_at_once))
                for first, last in reversed(source.uniform_batch_ranges()):
                    if wanted[first:last].any():
                        yield _ScanJob(begun[-1], first, last, wanted[first:last])

        def hash_batch_range(buffers: ThreadBuffers, job: _ScanJob) -> tuple[_SegmentScan, list[HashedChunkKeys]]:
            return job.scanned, key_scan.hash_chunks(buffers, job.scanned.source, job.first, job.last, job.wanted, backwards=True)

        def mark_survivors(prepared: tuple[_SegmentScan, list[HashedChunkKeys]]) -> tuple[_SegmentScan, HashedChunkKeys, Flags] | None:
            scanned, pieces = prepared
            marked = [(piece, *self._flag_first_rows_of_keys(piece)) for piece in pieces]
            for piece in pieces:
                if key_scan.second_reader is not None and piece.second_reader_rows is not None:
                    key_scan.second_reader.add_chunk_rows(scanned.source, piece.second_reader_rows)
            for piece, survives, final in marked:
                scanned.bits.add_chunk(piece, survives, key_scan.first_dirty, scanned.source, is_final=final)
            return (scanned, *marked[0][:2]) if len(marked) == 1 and marked[0][2] else None

        for _ in workers.run_three_step_jobs(hash_batch_range, mark_survivors, self._clean_decided_chunk, scan_jobs()):
            pass
        for scanned in begun:
            scanned.bits.join_chunk_flags()

    def _prepare_segment_scan(self, source: SourceSegment, clean_at_once: bool) -> _SegmentScan:
        """Prepare the scan of a segment: an empty bitmap, and the decisions on its batches if chunks may be cleaned at once."""
        key_scan = self._scan
        if key_scan.second_reader is not None:
            key_scan.second_reader.begin_segment(source)
        bits = self._bits.setdefault(source.ordinal, SurvivorBitmap(len(source.table)))
        decisions = (
            decide_batches_by_headers(source.table, key_scan.verdicts[source.ordinal], key_scan.rules, source.name)
            if key_scan.rules and clean_at_once
            else None
        )
        return _SegmentScan(source, bits, decisions)

    def _clean_decided_chunk(self, buffers: ThreadBuffers, decided: tuple[_SegmentScan, HashedChunkKeys, Flags] | None) -> None:
        """Clean a compressed chunk now, while its records are decompressed, and store the result for pass 2. Nothing is done if
        ``decided`` is None, because then it is not known yet which of its records survive.
        """
        key_scan = self._scan
        if decided is None or key_scan.rules is None or decided[0].decisions is None or not key_scan.finished.has_space:
            return
        scanned, piece, survives = decided
        source, decisions, chunk, rows = scanned.source, decided[0].decisions, piece.chunk, piece.rows
        some = slice(chunk.first, chunk.last)
        if rows is None or not source.table.codec_ids[some].any() or np.any(source.table.control[some] != NOT_CONTROL):
            return
        if np.any((decisions.action[some] == FILTER) != chunk.wanted):
            return
        if rows.offset.min(initial=key_scan.end) < key_scan.first_dirty:
            return  # older records are looked up when all keys are known
        clean = clean_batches_of_chunk(
            buffers, source, chunk, rows, piece.first_row, ~survives, decisions.decisions_of_rows(some), key_scan.rules
        )
        key_scan.finished.store_chunk_within_budget(source, chunk, clean)

    def _flag_first_rows_of_keys(self, hashed: HashedChunkKeys) -> tuple[Flags, bool]:
        """Return a flag per row of the chunk, set if the row is the first one with its key (the newest, because the log is read backwards),
        and whether the flags are final.
        """
        seen = np.empty(len(hashed.hashes), np.bool_)
        if self._set.insert_if_absent(hashed.hashes, seen) < len(seen):
            raise OutOfBudget(
                f"the offset map is full at {self._set.key_count} keys ({format_size(self._set.peak_bytes)})",
                hint='Raise map_budget_bytes, or let map_engine = "auto" choose an engine that needs less memory',
            )
        survives = np.zeros(int(hashed.first_row[-1]), np.bool_)
        survives[hashed.picked] = seen
        return survives, True

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCounts | None:
        bits = self._bits.get(source.ordinal)
        return None if bits is None else SurvivorCounts(bits.kept, bits.tombstones)

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: Int64s) -> Flags:
        bits = self._bits.get(source.ordinal)
        superseded = bits.flag_superseded_rows_of_chunk(chunk, first_row) if bits is not None else np.zeros(len(rows), np.bool_)
        if source.base < self._scan.first_dirty:
            below = _keyed_rows_below(rows.offset, rows.key_length, self._scan.first_dirty)
            if len(below):
                superseded[below] = self._flag_superseded_clean_rows(source, chunk, rows, first_row, below)
        return superseded

    def _flag_superseded_clean_rows(
        self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: Int64s, below: Int64s
    ) -> Flags:
        """Return a flag per row: whether it lies below the dirty range and the dirty range has its key."""
        found = np.empty(len(below), np.bool_)
        self._set.flag_contained_keys(_hash_picked_rows(chunk, rows, below, self._scan.hash_key), found)
        return found


def find_survivors_backwards(key_scan: KeyScanParameters, key_set: KeySet, workers: WorkerThreads) -> BackwardKeyScan:
    """Read the dirty range from its end to its beginning, and return the survivors. Raises BadData; OutOfBudget if the key set is full."""
    found = BackwardKeyScan(key_scan, key_set)
    found.scan_dirty_segments(reversed(key_scan.dirty_segments_with_batches()), workers)
    return found


class BoundedMapSurvivors:
    """Survivors found with Kafka's own offset map: a table from key to latest offset, limited to a number of keys."""

    def __init__(self, key_scan: KeyScanParameters, bounded_map: BoundedOffsetMap) -> None:
        self._scan = key_scan
        self._table = bounded_map
        self.last_mapped_offset = -1

    @property
    def key_count(self) -> int:
        return self._table.key_count

    @property
    def peak_bytes(self) -> int:
        return self._table.peak_bytes

    def survivor_counts_by_batch(self, source: SourceSegment) -> SurvivorCounts | None:
        return None

    def flag_superseded_rows(self, source: SourceSegment, chunk: BatchChunk, rows: RecordRows, first_row: Int64s) -> Flags:
        keyed = np.flatnonzero((rows.key_length >= 0) & (rows.offset <= self.last_mapped_offset))
        latest = np.empty(len(keyed), np.int64)
        self._table.find_latest_offsets(_hash_picked_rows(chunk, rows, keyed, self._scan.hash_key), latest)
        superseded = np.zeros(len(rows), np.bool_)
        superseded[keyed] = rows.offset[keyed] < latest
        return superseded

    def add_chunk_unless_full(self, source: SourceSegment, hashed: HashedChunkKeys) -> bool:
        """Add the rows of a chunk to the map. Return False if the map was full when another record with a key came."""
        offsets = hashed.offset[hashed.picked]
        taken = self._table.put_rows_until_full(hashed.hashes, offsets)
        chunk = hashed.chunk
        if taken == len(offsets):
            self._move_end_of_mapped_range(int(source.table.last_offset[chunk.last - 1]))
            return True
        # Batches before the one that holds the first row without room were read completely.
        batch = int(np.searchsorted(hashed.first_row, hashed.picked[taken], side="right")) - 1
        if chunk.first + batch:
            self._move_end_of_mapped_range(int(source.table.last_offset[chunk.first + batch - 1]))
        if taken and hashed.picked[taken - 1] >= hashed.first_row[batch]:
            self.last_mapped_offset = int(offsets[taken - 1])
        return False

    def _move_end_of_mapped_range(self, last_offset: int) -> None:
        """Move the end of the mapped range. Kafka sets it even backwards: an old wrapper at offset 0 ends below its own records."""
        if last_offset >= self._scan.first_dirty:
            self.last_mapped_offset = last_offset

    def move_end_to_next_segment(self, source: SourceSegment) -> None:
        """Move the end of the mapped range to the next segment's base: gaps between offsets are skipped (KAFKA-8764)."""
        self._move_end_of_mapped_range(min(source.end, self._scan.end) - 1)


def find_survivors_with_bounded_map(key_scan: KeyScanParameters, table: BoundedOffsetMap, workers: WorkerThreads) -> BoundedMapSurvivors:
    """Read the dirty range in order until Kafka's bounded offset map is full, and return the survivors. Raises BadData."""
    found = BoundedMapSurvivors(key_scan, table)
    for source, wanted in key_scan.dirty_segments_with_batches():
        # Chunks without a record that may enter count as read too, so they are not left out.
        jobs = [(source, first, last, wanted[first:last]) for first, last in source.uniform_batch_ranges()]
        for pieces in workers.run_jobs_in_order(lambda buffers, job: key_scan.hash_chunks(buffers, *job, backwards=False), jobs):
            for piece in pieces:
                if not found.add_chunk_unless_full(source, piece):
                    return found
        found.move_end_to_next_segment(source)
    return found


@measure_stage(WorkStage.HASH, lambda buffers, chunk, rows, *_: int(np.maximum(rows.key_length, 0).sum()))
def _hash_keyed_rows_of_chunk(
    buffers: ThreadBuffers, chunk: BatchChunk, rows: RecordRows, first_offset: int, end_offset: int, hash_key: bytes, backwards: bool
) -> tuple[Hashes, Int64s]:
    """Return the key hashes of the rows with offsets from ``first_offset`` up to ``end_offset`` (exclusive) that have a key, and the
    numbers of these rows.
    """
    hashes, picked = buffers.hashes.buffers_for_rows(_count_keyed_rows(rows.offset, rows.key_length, first_offset, end_offset))
    _hash_keyed_rows(
        chunk.buf,
        rows.offset,
        rows.key_start,
        rows.key_length,
        first_offset,
        end_offset,
        *siphash_key_halves(hash_key),
        backwards,
        hashes,
        picked,
    )
    return hashes, picked


@measure_stage(WorkStage.HASH, lambda chunk, rows, picked, _: int(rows.key_length[picked].sum()))
def _hash_picked_rows(chunk: BatchChunk, rows: RecordRows, picked: Int64s, key: bytes) -> Hashes:
    """Return the key hashes of the rows with the numbers ``picked``."""
    return _hash_rows(chunk.buf, picked, rows.key_start, rows.key_length, *siphash_key_halves(key))


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _count_keyed_rows(offset: Int64s, key_length: Int32s, first_offset: int, end_offset: int) -> int:
    """Return the number of rows with a key and an offset from ``first_offset`` up to ``end_offset`` (exclusive)."""
    count = 0
    for row in range(offset.size):
        if key_length[row] >= 0 and first_offset <= offset[row] < end_offset:
            count += 1
    return count


@kernel
def _hash_keyed_rows(
    buf: Bytes,
    offset: Int64s,
    key_start: Int64s,
    key_length: Int32s,
    first_offset: int,
    end_offset: int,
    k0: np.uint64,
    k1: np.uint64,
    backwards: bool,
    hashes: Hashes,
    picked: Int64s,
) -> None:
    at = picked.size - 1 if backwards else 0
    step = -1 if backwards else 1
    for row in range(offset.size):
        if key_length[row] >= 0 and first_offset <= offset[row] < end_offset:
            hashes[at, 0], hashes[at, 1] = siphash128(buf, key_start[row], np.int64(key_length[row]), k0, k1)
            picked[at] = row
            at += step


@kernel
def _hash_rows(buf: Bytes, picked: Int64s, key_start: Int64s, key_length: Int32s, k0: np.uint64, k1: np.uint64) -> Hashes:
    hashes = np.empty((picked.size, 2), np.uint64)
    for i in range(picked.size):
        row = picked[i]
        hashes[i, 0], hashes[i, 1] = siphash128(buf, key_start[row], np.int64(key_length[row]), k0, k1)
    return hashes


@kernel
def _keyed_rows_below(offset: Int64s, key_length: Int32s, first_dirty: int) -> Int64s:
    """Return the numbers of the rows that have a key and lie below the dirty range."""
    found = np.empty(offset.size, np.int64)
    count = 0
    for row in range(offset.size):
        if key_length[row] >= 0 and offset[row] < first_dirty:
            found[count] = row
            count += 1
    return found[:count]


@kernel
def _count_survivors_by_batch(
    first_row: Int64s, survives_flags: Flags, value_length: Int32s, complete_flags: Flags, survivor_counts: Int32s, tombstones: Flags
) -> None:
    """Set in ``survivor_counts`` the number of survivors of each batch flagged in ``complete_flags`` (-1 for the others), and in
    ``tombstones``
    whether there are tombstones among them.
    """
    for batch in range(survivor_counts.size):
        count = 0
        null = False
        for row in range(first_row[batch], first_row[batch + 1]):
            count += survives_flags[row]
            null = null or (survives_flags[row] and value_length[row] < 0)
        survivor_counts[batch] = count if complete_flags[batch] else -1
        tombstones[batch] = null


@kernel
def _unpack_superseded(packed: npt.NDArray[np.uint8], begin: Int64s, first_row: Int64s, superseded: Flags) -> None:
    """Set a flag per row, True if the record is superseded, from the packed bits of its batch; rows of batches that are not in the map stay
    as they are.
    """
    for batch in range(begin.size):
        if begin[batch] >= 0:
            for row in range(first_row[batch], first_row[batch + 1]):
                bit = begin[batch] + row - first_row[batch]
                superseded[row] = ((packed[bit >> 3] >> (7 - (bit & 7))) & 1) == 0
