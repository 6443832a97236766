"""One sealed segment as the cleaner reads it: its mapped bytes, its batch table, and its batches in chunks, verified and decompressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bloom.sidecar import RemovableRecordCounts
from checkpoint.lineage import EpochEntry
from compactor.cleaner.worker_threads import ReusableJobBuffers
from compactor.constants import NEVER_MS, NO_TIMESTAMP, LeaderEpoch, Offset
from compactor.errors import BadData
from compactor.kernels.common import NO_HORIZON, FirstAndEndBatch, Flags
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records import codecs
from compactor.records.batches import (
    HEADER,
    HORIZON,
    MALFORMED,
    NOT_CONTROL,
    PACKED,
    BatchTable,
    Bytes,
    Int64s,
    memory_map_file,
    parse_batch_headers,
    read_only_view,
    verify_crcs_of_batches,
)
from compactor.records.bulk import BatchUnreadableError, decompress_batch_bodies
from compactor.records.encode import DROP, REWRITE, CleaningDecisions, EncodedBatchBuffer, encode_cleaned_chunk
from compactor.records.indexes import TXN_ENTRY, TxnEntries
from compactor.records.rows import BatchChunk, RecordRowBuffers, chunk_of_uncompressed_batches, parse_records


@dataclass(frozen=True, slots=True)
class KeyTableRowsAndBatchCount:
    batches: int
    rows: npt.NDArray[np.uint64]


class SecondReader(Protocol):
    """Second reader of a round's batches, so that nothing is decompressed twice; the gate. ``extract_key_rows`` and ``add_rewrite_chunk``
    run in worker threads, the other methods in the order of the log.
    """

    def begin_segment(self, source: SourceSegment) -> None: ...

    def extract_key_rows(self, buffers: ReusableJobBuffers, source: SourceSegment, chunk: BatchChunk) -> KeyTableRowsAndBatchCount:
        """Read a chunk of pass 1, in which every batch that may enter the offset map is decompressed."""

    def add_key_rows(self, source: SourceSegment, chunk_rows: KeyTableRowsAndBatchCount) -> None: ...

    def add_rewrite_chunk(self, buffers: ReusableJobBuffers, source: SourceSegment, chunk: BatchChunk) -> None:
        """Read a chunk of pass 2, in which the batches that may lose some of their records are decompressed."""


@dataclass(frozen=True, slots=True)
class TimestampSummary:
    """Timestamps of a segment.
    max_timestamp_ms: without control records, whose timestamps come from the broker's clock; -1 for none.
    first_timestamp_ms: maximum timestamp of the first batch; -1 for none.
    """

    max_timestamp_ms: int
    first_timestamp_ms: int
    records: int


def summarize_timestamps(table: BatchTable, log_start: int = 0) -> TimestampSummary:
    """:param log_start: batches that end below it do not count for the largest timestamp. Brokers search only the first segment whose
    largest timestamp is late enough: if such records lie below the log start, the answer is too late.
    """
    data = table.max_timestamp[(table.control == NOT_CONTROL) & ((table.count > 0) | (table.magic < 2)) & (table.last_offset >= log_start)]
    return TimestampSummary(
        max_timestamp_ms=int(data.max(initial=-1)),
        first_timestamp_ms=int(table.max_timestamp[0]) if len(table) else -1,
        records=int(table.count.sum()),
    )


def read_earliest_horizon_ms(source: SourceSegment, inflate_limit: int) -> int:
    """Earliest delete horizon of markers and tombstones, or -1; reads records. Raises BadData."""
    table = source.table
    due = _earliest_marker_horizon_ms(table)
    maybe = _flag_dated_batches(table) & (table.control == NOT_CONTROL) & (table.base_timestamp < due)
    buffers = RecordRowBuffers()
    for first, last in source.split_by_kind():
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
    """Earliest delete horizon of markers and tombstones, or -1, without reading records."""
    due = min(_earliest_marker_horizon_ms(table), removable_counts.earliest_tombstone_horizon_ms)
    return due if due != NEVER_MS else NO_TIMESTAMP


def _flag_dated_batches(table: BatchTable) -> npt.NDArray[np.bool_]:
    dated: npt.NDArray[np.bool_] = ((table.attributes & np.int16(HORIZON)) != 0) & (table.magic == 2) & (table.count > 0)
    return dated


def _earliest_marker_horizon_ms(table: BatchTable) -> int:
    return int(table.base_timestamp[_flag_dated_batches(table) & (table.control != NOT_CONTROL)].min(initial=NEVER_MS))


def read_last_record_offset(source: SourceSegment, inflate_limit: int) -> int:
    """Last offset, control records included, or -1. A batch may end after its last record, so records are read. Raises BadData."""
    table, buffers = source.table, RecordRowBuffers()
    for batch in np.flatnonzero((table.count > 0) | (table.magic < 2))[::-1].tolist():
        for chunk in source.read_chunks(batch, batch + 1, np.ones(1, np.bool_), inflate_limit):
            rows, _ = parse_records(table, chunk, buffers, source.name)
            if len(rows):
                return int(rows.offset.max())
    return -1


def count_negative_timestamps(source: SourceSegment, inflate_limit: int) -> int:
    """Count the negative timestamps other than -1 (none). Cleaners refuse to rewrite a batch in which such a record stays."""
    return count_implausible_timestamps(source, inflate_limit, NEVER_MS).negative


class ImplausibleTimestamps(NamedTuple):
    negative: int
    late: int
    latest_ms: int


def count_implausible_timestamps(source: SourceSegment, inflate_limit: int, limit_ms: int) -> ImplausibleTimestamps:
    """Count negative timestamps other than -1, and those after ``limit_ms``."""
    buffers, negative, late, latest_ms = RecordRowBuffers(), 0, 0, NO_TIMESTAMP
    for first, last in source.split_by_kind():
        for chunk in source.read_chunks(first, last, np.ones(last - first, np.bool_), inflate_limit, None):
            rows, _ = parse_records(source.table, chunk, buffers, source.name)
            negative += int(np.count_nonzero(rows.timestamp < NO_TIMESTAMP))
            late += int(np.count_nonzero(rows.timestamp > limit_ms))
            latest_ms = max(latest_ms, int(rows.timestamp.max(initial=NO_TIMESTAMP)))
    return ImplausibleTimestamps(negative, late, latest_ms)


def lineage_of_tables(tables: list[BatchTable]) -> tuple[EpochEntry, ...]:
    """Leader epochs with their first offsets; 0 for v0/v1."""
    found: list[EpochEntry] = []
    for table in tables:
        epochs = np.maximum(table.leader_epoch, 0)
        changes = np.concatenate((np.zeros(min(1, len(epochs)), np.int64), np.flatnonzero(np.diff(epochs)) + 1))
        for batch in changes.tolist():
            if not found or epochs[batch] > found[-1].epoch:
                offset = int(table.base_offset[batch] if table.base_offset[batch] >= 0 else table.last_offset[batch])
                found.append(EpochEntry(LeaderEpoch(int(epochs[batch])), Offset(offset)))
    return tuple(found)


def lineage_of_range(lineage: tuple[EpochEntry, ...], start_offset: int, end_offset: int) -> tuple[EpochEntry, ...]:
    """Leader epochs of the offsets (both inclusive): at least one, the first of which begins at ``start_offset``."""
    inside = [entry for entry in lineage if start_offset < entry.start_offset <= end_offset]
    before = [entry for entry in lineage if entry.start_offset <= start_offset]
    first = before[-1].epoch if before else max(0, inside[0].epoch - 1 if inside else 0)
    return (EpochEntry(LeaderEpoch(first), Offset(start_offset)), *inside)


PLAIN_CHUNK: Final = 1 << 22
"""Bytes of uncompressed batches handled at once: small enough to stay in the processor's cache, large enough to hide Python."""

PACKED_CHUNK: Final = 1 << 21
_CRUMB: Final = 1 << 18
INFLATED_CHUNK: Final = 1 << 26
"""More inflated bytes than this are not held at once, unless a single batch has them."""


@dataclass(slots=True)
class SourceSegment:
    """Segment to be cleaned. end: base offset of the next segment, the exclusive end of its offsets.
    index_bytes, timeindex_bytes: 8 and 12 bytes per entry.
    is_last: whether no other segment determines where it ends.
    """

    ordinal: int
    name: str
    base: int
    end: int
    mtime_ms: int
    buf: Bytes
    table: BatchTable
    index_bytes: int = 0
    timeindex_bytes: int = 0
    txn_entries: TxnEntries = field(default_factory=lambda: np.empty(0, TXN_ENTRY))
    is_last: bool = False
    verified: Flags = field(init=False)

    def __post_init__(self) -> None:
        self.verified = np.zeros(len(self.table), np.bool_)

    @property
    def size(self) -> int:
        return len(self.buf)

    def split_by_kind(self) -> list[FirstAndEndBatch]:
        """Ranges of batches of one kind (magic, compressed or not) and bounded size, in file order. Markers join compressed batches around
        them.
        """
        table = self.table
        if not len(table):
            return []
        kind = table.magic.astype(np.int16) * 2 + (table.codec_ids > 0)
        if self.size < _CRUMB * np.count_nonzero(np.diff(kind)):
            after = (
                np.flatnonzero(
                    (table.control[1:] != NOT_CONTROL) & (table.codec_ids[1:] == 0) & (table.magic[1:] == 2) & (table.magic[:-1] == 2)
                )
                + 1
            )
            where = np.arange(len(table))
            where[after] = 0
            kind = kind[np.maximum.accumulate(where)]
        cuts = np.flatnonzero(np.diff(kind)) + 1
        found: list[tuple[int, int]] = []
        for begin, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(table)], strict=True):
            limit = PACKED_CHUNK if table.codec_ids[begin] else PLAIN_CHUNK
            first = begin
            while first < last:
                stop = int(np.searchsorted(table.position, table.position[first] + limit, side="left"))
                stop = min(max(stop, first + 1), last)
                found.append((first, stop))
                first = stop
        return found

    @property
    def record_count_bound(self) -> int:
        """The numbers in the batch headers, but at most two records per byte; one per byte of a v0/v1 wrapper,
        whose header states no number.
        """
        table = self.table
        return int(np.where(table.count > 0, np.minimum(table.count, 2 * table.size), table.size).sum())

    def verify_batches(self, first_batch: int, end_batch: int) -> None:
        """Bounds are [first_batch, end_batch). Raises BadData."""
        if not self.verified[first_batch:end_batch].all():
            verify_crcs_of_batches(self.buf, self.table, first_batch, end_batch, self.name)
            self.verified[first_batch:end_batch] = True

    def read_chunks(
        self,
        first_batch: int,
        end_batch: int,
        wanted_flags: Flags,
        max_body_bytes: int,
        inflate_buffer: codecs.GrowingByteBuffer | None = None,
        *,
        is_backwards: bool = False,
    ) -> Iterator[BatchChunk]:
        """Yield the batches [first_batch, end_batch), with the bodies of the wanted ones.
        :param inflate_buffer: a chunk in it is valid until the next one is requested.
        :raises BadData: if a CRC does not match, or a body cannot be inflated or exceeds ``max_body_bytes``.
        """
        self.verify_batches(first_batch, end_batch)
        if not self.table.codec_ids[first_batch:end_batch].any():
            yield chunk_of_uncompressed_batches(self.buf, self.table, first_batch, end_batch, wanted_flags)
            return
        if inflate_buffer is None:
            inflate_buffer = codecs.GrowingByteBuffer()
        ends = self._inflate_bodies(first_batch, end_batch, wanted_flags, max_body_bytes, inflate_buffer)
        if ends is not None:
            starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
            yield BatchChunk(
                first_batch, end_batch, read_only_view(inflate_buffer.array[: inflate_buffer.size]), starts, ends, wanted_flags
            )
            return
        middle = (first_batch + end_batch) // 2
        for one, two in [(middle, end_batch), (first_batch, middle)] if is_backwards else [(first_batch, middle), (middle, end_batch)]:
            yield from self.read_chunks(
                one, two, wanted_flags[one - first_batch : two - first_batch], max_body_bytes, inflate_buffer, is_backwards=is_backwards
            )

    @measure_stage(
        SegmentWorkStage.INFLATE, lambda self, first_batch, end_batch, wanted_flags, max_body_bytes, inflate_buffer: inflate_buffer.size
    )
    def _inflate_bodies(
        self, first_batch: int, end_batch: int, wanted_flags: Flags, max_body_bytes: int, inflate_buffer: codecs.GrowingByteBuffer
    ) -> Int64s | None:
        """The ends, or None if all together are too large."""
        inflate_buffer.clear()
        table, some = self.table, slice(first_batch, end_batch)
        start, end = table.position[some] + HEADER, table.position[some] + table.size[some]
        if table.magic[first_batch] < 2:
            for batch in np.flatnonzero(wanted_flags).tolist():
                start[batch], end[batch] = self._wrapper_body_bounds(first_batch + batch)
        most = INFLATED_CHUNK if end_batch - first_batch > 1 else np.iinfo(np.int64).max
        try:
            ends = decompress_batch_bodies(
                self.buf, table.codec_ids[some], start, end, wanted_flags, inflate_buffer, max_body_bytes, most, table.magic[some]
            )
        except BatchUnreadableError as error:
            raise self._unreadable_batch_error(
                first_batch + error.batch, str(error), hint="Kafka cannot read this batch either, or the limit is too low"
            ) from None
        return ends if inflate_buffer.size <= most else None

    def _wrapper_body_bounds(self, batch_number: int) -> tuple[int, int]:
        """The value of a v0/v1 wrapper holds its messages; the end is exclusive."""
        position, size, magic = (
            int(self.table.position[batch_number]),
            int(self.table.size[batch_number]),
            int(self.table.magic[batch_number]),
        )
        at = position + 18 + 8 * magic
        key = int.from_bytes(self.buf[at : at + 4].tobytes(), "big", signed=True)
        start = at + 8 + max(key, 0)
        length = int.from_bytes(self.buf[start - 4 : start].tobytes(), "big", signed=True) if start <= position + size else -1
        if length < 0 or start + length > position + size:
            raise self._unreadable_batch_error(batch_number, "a compressed message without a value")
        return start, start + length

    def _unreadable_batch_error(self, batch_number: int, cause: str, *, hint: str = "") -> BadData:
        offset = self.table.last_offset[batch_number] if self.table.magic[batch_number] < 2 else self.table.base_offset[batch_number]
        return BadData(cause, segment=self.name, position=int(self.table.position[batch_number]), offset=int(offset), hint=hint)


def open_source_segment(
    ordinal: int,
    path: Path,
    base_offset: int,
    end_offset: int | None,
    mtime_ms: int,
    previous_last_offset: int,
    max_body_bytes: int,
    *,
    txn_entries: TxnEntries | None = None,
    read_bytes: Callable[[Path], Bytes] = memory_map_file,
) -> SourceSegment:
    """Raises BadData.
    :param end_offset: None for the last segment.
    :param max_body_bytes: of a compressed control batch, whose body must be read.
    :param read_bytes: given if the file may shrink, so that it must not be mapped.
    """
    buf = read_bytes(path)
    table = parse_batch_headers(buf, path.name, max(previous_last_offset, base_offset - 1))
    last = int(table.last_offset[-1]) if len(table) else base_offset - 1
    if end_offset is not None and last >= end_offset:
        raise BadData(
            f"its last offset {last} reaches into the next segment, which begins at {end_offset}",
            segment=path.name,
            position=int(table.position[-1]),
            offset=last,
            hint="The segments overlap; restore the directory from a replica",
        )
    source = SourceSegment(
        ordinal, path.name, base_offset, end_offset if end_offset is not None else max(last + 1, base_offset + 1), mtime_ms, buf, table,
        txn_entries=txn_entries if txn_entries is not None else np.empty(0, TXN_ENTRY), is_last=end_offset is None,
    )  # fmt: skip
    set_compressed_control_types(source, max_body_bytes)
    return source


def segment_of_batch_range(source: SourceSegment, first_batch: int, end_batch: int, base_offset: int, end_offset: int) -> SourceSegment:
    """Bounds are [first_batch, end_batch) and [base_offset, end_offset)."""
    table = source.table
    begin = int(table.position[first_batch]) if first_batch < len(table) else source.size
    stop = int(table.position[end_batch - 1] + table.size[end_batch - 1]) if end_batch > first_batch else begin
    batches = table.select_rows(slice(first_batch, end_batch))
    batches = batches.replace_columns(position=batches.position - begin)
    marks = source.txn_entries["last_offset"].astype(np.int64)
    return SourceSegment(
        source.ordinal, source.name, base_offset, end_offset, source.mtime_ms, source.buf[begin:stop], batches,
        txn_entries=source.txn_entries[(marks >= base_offset) & (marks < end_offset)], is_last=source.is_last and end_batch == len(table),
    )  # fmt: skip


def segment_cut_after_offset(source: SourceSegment, end_offset: int) -> SourceSegment:
    """Drop the batches after ``end_offset``, which is before the last one. A batch on both sides of the cut is left
    out if it has no records. Raises BadData if it has some.
    """
    table = source.table
    last = int(np.searchsorted(table.last_offset, end_offset, side="right"))
    if last < len(table) and 0 <= int(table.base_offset[last]) <= end_offset and int(table.count[last]):
        raise BadData(
            f"a batch from {int(table.base_offset[last])} to {int(table.last_offset[last])} lies across offset {end_offset}, "
            "after which brokers continue in another segment",
            segment=source.name,
            position=int(table.position[last]),
            hint="No two replicas of one log have other batches: check the leader epochs of the segments",
        )
    return segment_of_batch_range(source, 0, last, source.base, end_offset + 1)


def batch_bytes_from_offset(source: SourceSegment, offset: int, inflate_limit: int) -> bytes:
    """Batches from ``offset`` (inclusive) on. One with records on both sides of it is rewritten without the earlier ones, as
    by a round. Raises BadData if a batch cannot be read or written.
    """
    table = source.table
    first = int(np.searchsorted(table.last_offset, offset))
    if first == len(table) or int(table.base_offset[first]) >= offset:
        return source.buf[int(table.position[first]) :].tobytes() if first < len(table) else b""
    head = b""
    for chunk in source.read_chunks(first, first + 1, np.ones(1, np.bool_), inflate_limit):
        rows, first_row = parse_records(table, chunk, RecordRowBuffers(), source.name)
        keep = rows.offset >= offset
        action = np.full(1, REWRITE if keep.any() else DROP, np.uint8)
        horizon = np.where(table.attributes[first : first + 1] & HORIZON, table.base_timestamp[first : first + 1], NO_HORIZON)
        head += encode_cleaned_chunk(
            source.buf, table, chunk, rows, first_row, CleaningDecisions(action, horizon, keep), EncodedBatchBuffer(), source.name
        ).data.tobytes()
    return head + source.buf[int(table.position[first] + table.size[first]) :].tobytes()


def set_compressed_control_types(source: SourceSegment, max_body_bytes: int) -> None:
    """No known client writes compressed control batches, but Kafka reads them."""
    table = source.table
    for batch in np.flatnonzero(table.control == PACKED).tolist():
        wanted = np.ones(1, np.bool_)
        for chunk in source.read_chunks(batch, batch + 1, wanted, max_body_bytes):
            rows, _ = parse_records(table, chunk, RecordRowBuffers(), source.name)
            key = chunk.buf[rows.key_start[0] : rows.key_start[0] + max(rows.key_length[0], 0)].tobytes() if len(rows) else b""
            value = chunk.buf[rows.value_start[0] : rows.value_start[0] + max(rows.value_length[0], 0)].tobytes() if len(rows) else b""
            kind = int.from_bytes(key[2:4], "big")
            table.control[batch] = -2 if not len(rows) else MALFORMED if len(key) < 4 or key[0] & 0x80 else min(2, kind)
            if len(value) >= 6:
                table.coordinator_epoch[batch] = int.from_bytes(value[2:6], "big", signed=True)
