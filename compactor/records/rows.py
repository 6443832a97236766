"""Parser of records: one row per record (Kafka: DefaultRecord, LegacyRecord).

    v2 record
    length:varint attributes:1 timestampDelta:varlong offsetDelta:varint | keyLen:varint key valueLen:varint value
                                                    headerCount:varint { keyLen:varint key valueLen:varint value }*
                                                  ^ ``tail``: from here on, a record that moves to a rewritten batch keeps its bytes

A *chunk* is a sequence of neighbouring batches whose records lie in one byte array: the mapped segment itself if nothing is compressed,
otherwise an array of decompressed bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from compactor.errors import BadData
from compactor.kernels.common import FirstRowByBatch, Int32s as Int32s, ProblemAndBatch, ProblemAndPosition
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import load_i32, load_i64, prefetch_read, read_varint
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records.batches import HEADER, LOG_APPEND, BatchTable, Bytes, Int64s

HEAD_LOOSE: Final = 1  # attributes not zero, or a varint before the key is longer than it needs to be
TAIL_LOOSE: Final = 2  # a longer varint, or a header name that is not plain ASCII: Kafka writes these anew
HAS_HEADERS: Final = 4
LEGACY: Final = 8  # a v0/v1 entry: key and value with fixed-size lengths, no headers

_PROBLEMS: Final = (
    "",
    "a record reaches beyond the end of its batch (does the batch claim more records than it has?)",
    "a record is longer or shorter than its length says",
    "a malformed or overlong varint",
    "a negative header count or header name length",
    "bytes are left after the last record",
    "record offsets do not ascend within the batch",
    "a record's offset lies outside its batch",
    "a compressed v0/v1 message holds no message",
    "a compressed message inside a compressed message",
    "a compressed message's offset lies below those of its inner messages",
    "a message claims fewer bytes than a header has",
    "unknown magic byte of an inner message",
)


ProblemPositionAndFlags = tuple[int, int, int]
"""Number of a problem (0 for none), byte position after what was parsed, and flags of the record."""
ProblemLengthPositionAndFlags = tuple[int, int, int, int]
"""Number of a problem (0 for none), length (-1 for null), position of the bytes, and flags of the record."""
CountsAndProblemWithBatch = tuple[Int64s, int, int]
"""Number of entries of each batch, number of a problem (0 for none), and the batch that has it."""


class RecordRows(NamedTuple):
    """Columns of a chunk's records.
    Positions are relative to the chunk's byte array; a length of -1 means null. ``offset`` and ``timestamp`` (milliseconds) are absolute.
    In LogAppendTime batches every timestamp is the batch's maximum.
    In kernels, as with BatchTable, use the size of a column, not ``len``.
    """

    offset: Int64s
    timestamp: Int64s
    start: Int64s
    tail: Int64s
    end: Int64s
    key_start: Int64s
    value_start: Int64s
    key_length: Int32s
    value_length: Int32s
    flags: npt.NDArray[np.uint8]

    @override
    def __len__(self) -> int:
        return len(self.offset)


_ROW_DTYPES: Final = (np.int64,) * 7 + (np.int32, np.int32, np.uint8)


class RecordRowBuffers:
    """Reused memory for the rows of one chunk. Not thread-safe."""

    def __init__(self) -> None:
        self._arrays = _allocate_record_columns(1 << 14)

    def allocate_rows(self, record_count: int) -> RecordRows:
        """Uninitialized; valid until the next call."""
        if record_count > len(self._arrays[0]):
            self._arrays = _allocate_record_columns(max(record_count, 2 * len(self._arrays[0])))
        return RecordRows(*(array[:record_count] for array in self._arrays))


def _allocate_record_columns(record_count: int) -> tuple[npt.NDArray[Any], ...]:
    return tuple(np.empty(record_count, dtype) for dtype in _ROW_DTYPES)


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """Neighbouring batches of one segment, from ``first`` up to ``last`` (exclusive), with their bodies in ``buf`` at [body_start,
    body_end). Batches that are not ``wanted`` have an empty body and give no rows.
    """

    first: int
    last: int
    buf: Bytes
    body_start: Int64s
    body_end: Int64s
    wanted: npt.NDArray[np.bool_]

    @property
    def body_size_bytes(self) -> int:
        return int((self.body_end - self.body_start).sum())


@measure_stage(SegmentWorkStage.PARSE, lambda table, chunk, *_: chunk.body_size_bytes)
def parse_records(table: BatchTable, chunk: BatchChunk, buffers: RecordRowBuffers, segment_name: str) -> tuple[RecordRows, FirstRowByBatch]:
    """Rows, in ``buffers`` and valid until the next call, and each batch's first row (one more entry than batches). Raises BadData, naming
    the batch.
    """
    magic = int(table.magic[chunk.first])
    some = slice(chunk.first, chunk.last)
    if magic == 2:
        counts = table.count[some] * chunk.wanted.astype(np.int64)
        # A record takes seven bytes at least: what claims more is refused before memory is set aside for it.
        too_many = np.flatnonzero(counts * 7 > chunk.body_end - chunk.body_start)
        if len(too_many):
            raise _unparsable_batch_error(table, chunk.first + int(too_many[0]), 1, segment_name)
    elif int(table.codec_ids[chunk.first]):
        counts, problem, batch = _count_legacy_messages(chunk.buf, chunk.body_start, chunk.body_end, chunk.wanted)
        if problem:
            raise _unparsable_batch_error(table, chunk.first + batch, problem, segment_name)
    else:
        counts = chunk.wanted.astype(np.int64)
    first_row = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first_row[1:])
    rows = buffers.allocate_rows(int(first_row[-1]))
    fill = _parse_v2_records if magic == 2 else _parse_legacy_records
    problem, batch = fill(chunk.buf, chunk.body_start, chunk.body_end, first_row, table.select_rows(some), rows)
    if problem:
        raise _unparsable_batch_error(table, chunk.first + batch, problem, segment_name)
    return rows, first_row


def _unparsable_batch_error(table: BatchTable, batch_number: int, problem: int, segment_name: str) -> BadData:
    return BadData(
        _PROBLEMS[problem],
        segment=segment_name,
        position=int(table.position[batch_number]),
        offset=int(table.base_offset[batch_number] if table.base_offset[batch_number] >= 0 else table.last_offset[batch_number]),
        hint="Kafka refuses this batch too; restore the segment from a replica or a backup",
    )


def chunk_of_uncompressed_batches(
    buf: Bytes, table: BatchTable, first_batch: int, end_batch: int, wanted_flags: npt.NDArray[np.bool_]
) -> BatchChunk:
    """Bytes are not copied."""
    position = table.position[first_batch:end_batch]
    start = position + HEADER if table.magic[first_batch] == 2 else position
    return BatchChunk(
        first_batch, end_batch, buf, start, np.where(wanted_flags, position + table.size[first_batch:end_batch], start), wanted_flags
    )


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@inline_kernel
def _is_overlong_varint(buf: Bytes, start: int, end: int) -> bool:
    return end - start > 1 and (buf[end - 1] == 0 or (end - start == 10 and buf[end - 1] > 1))


@inline_kernel
def _skip_record_headers(buf: Bytes, position: int, end: int) -> ProblemPositionAndFlags:
    """A problem (index of _PROBLEMS), the position after the headers, and flags: HAS_HEADERS, TAIL_LOOSE if Kafka would encode
    them differently.
    """
    before = position
    count, position = read_varint(buf, position, end)
    if position < 0:
        return 3, position, 0
    if count < 0 or count > end - position:
        return 4, position, 0
    flags = TAIL_LOOSE if _is_overlong_varint(buf, before, position) else 0
    if count > 0:
        flags |= HAS_HEADERS
    for _ in range(count):
        before = position
        length, position = read_varint(buf, position, end)
        if position < 0:
            return 3, position, flags
        if length < 0:
            return 4, position, flags
        if length > end - position:
            return 1, position, flags
        if _is_overlong_varint(buf, before, position):
            flags |= TAIL_LOOSE
        for i in range(position, position + length):
            if buf[i] >= 128:
                flags |= TAIL_LOOSE
        position += length
        before = position
        length, position = read_varint(buf, position, end)
        if position < 0:
            return 3, position, flags
        if length > end - position:
            return 1, position, flags
        if length < -1 or _is_overlong_varint(buf, before, position):
            flags |= TAIL_LOOSE
        position += max(length, 0)
    return 0, position, flags


@inline_kernel
def _read_key_or_value(buf: Bytes, position: int, end: int) -> ProblemLengthPositionAndFlags:
    """A problem (index of _PROBLEMS), length (-1 for null), position, and TAIL_LOOSE if Kafka would encode the length differently."""
    before = position
    length, position = read_varint(buf, position, end)
    if position < 0:
        return 3, length, position, 0
    if length > end - position:
        return 1, length, position, 0
    loose = TAIL_LOOSE if length < -1 or _is_overlong_varint(buf, before, position) else 0
    return 0, max(length, np.int64(-1)), position, loose


@kernel
def _parse_v2_records(
    buf: Bytes, body_start: Int64s, body_end: Int64s, first_row: FirstRowByBatch, batches: BatchTable, out_rows: RecordRows
) -> ProblemAndBatch:
    for batch in range(body_start.size):
        at = body_start[batch]
        limit = body_end[batch]
        previous = np.int64(-1)
        appended = (batches.attributes[batch] & LOG_APPEND) != 0
        for row in range(first_row[batch], first_row[batch + 1]):
            out_rows.start[row] = at
            length, at = read_varint(buf, at, limit)
            if at < 0:
                return 3 if out_rows.start[row] < limit else 1, batch
            if length < 0 or length > limit - at:
                return 1, batch
            stop = at + length
            # Records of one log are about equally long: the head of the one after next is where this guess says.
            prefetch_read(buf, stop + 2 * (stop - out_rows.start[row]))
            loose = np.int64(0)
            if _is_overlong_varint(buf, out_rows.start[row], at) or length == 0 or buf[at] != 0:
                loose = HEAD_LOOSE
            before = at + 1
            delta, at = read_varint(buf, before, stop)
            if at < 0:
                return 3, batch
            if _is_overlong_varint(buf, before, at):
                loose |= HEAD_LOOSE
            out_rows.timestamp[row] = batches.max_timestamp[batch] if appended else batches.base_timestamp[batch] + delta
            before = at
            delta, at = read_varint(buf, before, stop)
            if at < 0:
                return 3, batch
            if _is_overlong_varint(buf, before, at):
                loose |= HEAD_LOOSE
            out_rows.offset[row] = batches.base_offset[batch] + delta
            if out_rows.offset[row] < batches.base_offset[batch] or out_rows.offset[row] > batches.last_offset[batch]:
                return 7, batch
            if out_rows.offset[row] <= previous:
                return 6, batch
            previous = out_rows.offset[row]
            out_rows.tail[row] = at
            problem, length, at, more = _read_key_or_value(buf, at, stop)
            if problem:
                return problem, batch
            loose |= more
            out_rows.key_start[row] = at
            out_rows.key_length[row] = length
            problem, length, at, more = _read_key_or_value(buf, at + max(length, 0), stop)
            if problem:
                return problem, batch
            loose |= more
            out_rows.value_start[row] = at
            out_rows.value_length[row] = length
            at += max(length, 0)
            problem, at, more = _skip_record_headers(buf, at, stop)
            if problem:
                return problem, batch
            loose |= more
            if at != stop:
                return 2, batch
            out_rows.end[row] = at
            out_rows.flags[row] = loose
        if at != limit:
            return 5, batch
    return 0, 0


@inline_kernel
def _position_after_legacy_message(buf: Bytes, position: int, end: int) -> ProblemAndPosition:
    """A problem (index of _PROBLEMS) and the next position: -1 without a problem for an incomplete last entry, which Kafka ignores."""
    if end - position < 12:
        return 0, -1
    size = np.int64(load_i32(buf, position + 8))
    if size < 14:
        return 11, -1
    if size > end - position - 12:
        return 0, -1
    return 0, position + 12 + size


@kernel
def _count_legacy_messages(
    buf: Bytes, body_start: Int64s, body_end: Int64s, wanted_flags: npt.NDArray[np.bool_]
) -> CountsAndProblemWithBatch:
    counts = np.zeros(body_start.size, np.int64)
    for batch in range(body_start.size):
        if not wanted_flags[batch]:
            continue
        at = body_start[batch]
        while True:
            problem, at = _position_after_legacy_message(buf, at, body_end[batch])
            if problem:
                return counts, problem, batch
            if at < 0:
                break
            counts[batch] += 1
        if counts[batch] == 0:
            return counts, 8, batch
    return counts, 0, 0


@kernel
def _parse_legacy_records(
    buf: Bytes, body_start: Int64s, body_end: Int64s, first_row: FirstRowByBatch, batches: BatchTable, out_rows: RecordRows
) -> ProblemAndBatch:
    """Parse uncompressed batches (one record each) and decompressed wrappers."""
    for batch in range(body_start.size):
        if first_row[batch] == first_row[batch + 1]:
            continue
        at = body_start[batch]
        wrapped = (batches.attributes[batch] & 7) != 0
        appended = (batches.attributes[batch] & LOG_APPEND) != 0
        for row in range(first_row[batch], first_row[batch + 1]):
            out_rows.start[row] = at
            size = np.int64(load_i32(buf, at + 8))
            stop = at + 12 + size
            inner = np.int64(buf[at + 16])
            if inner > 1:
                return 12, batch
            if size < 14 + 8 * inner:
                return 11, batch
            if wrapped and buf[at + 17] & 7:
                return 9, batch
            out_rows.offset[row] = load_i64(buf, at)
            out_rows.timestamp[row] = np.int64(-1)
            if inner == 1:
                out_rows.timestamp[row] = batches.max_timestamp[batch] if appended and batches.magic[batch] == 1 else load_i64(buf, at + 18)
            at += 18 + 8 * inner
            out_rows.tail[row] = at
            length = np.int64(load_i32(buf, at))
            at += 4
            if length > stop - at - 4:
                return 1, batch
            out_rows.key_start[row] = at
            out_rows.key_length[row] = max(length, np.int64(-1))
            at += max(length, 0)
            length = np.int64(load_i32(buf, at))
            at += 4
            if length > stop - at:
                return 1, batch
            out_rows.value_start[row] = at
            out_rows.value_length[row] = max(length, np.int64(-1))
            at = stop
            out_rows.end[row] = stop
            out_rows.flags[row] = LEGACY
        if wrapped and batches.magic[batch] == 1 and batches.last_offset[batch] != 0:
            # Inner offsets of v1 are relative; the wrapper carries the last one's absolute offset.
            shift = batches.last_offset[batch] - out_rows.offset[first_row[batch + 1] - 1]
            if shift < 0:
                return 10, batch
            for row in range(first_row[batch], first_row[batch + 1]):
                out_rows.offset[row] += shift
        for row in range(first_row[batch] + 1, first_row[batch + 1]):
            if out_rows.offset[row] <= out_rows.offset[row - 1]:
                return 6, batch
        # An old librdkafka wrote wrappers whose own offset is 0: their inner offsets count from 0.
        beyond = batches.last_offset[batch] != 0 and out_rows.offset[first_row[batch + 1] - 1] > batches.last_offset[batch]
        if wrapped and (out_rows.offset[first_row[batch]] < 0 or beyond):
            return 7, batch
    return 0, 0
