"""Encoder of cleaned batches: writes what Kafka's cleaner writes (MemoryRecords.filterTo, MemoryRecordsBuilder; docs/kafka-rules.md 4.4 to
4.7).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import crc32c as checksums
import numpy as np
import numpy.typing as npt

from bloom.filter import siphash_key_halves
from compactor.constants import NO_TIMESTAMP
from compactor.errors import BadData
from compactor.kernels.common import (
    NO_HORIZON,
    FirstRowByBatch,
    Flags,
    HashKeyHalf,
    HashKeyHalves,
    ProblemAndBatch,
)
from compactor.kernels.crc import crc32c
from compactor.kernels.jit import inline_kernel, kernel
from compactor.kernels.memory import (
    copy_bytes,
    load_i32,
    load_u64,
    read_varint,
    store_i16,
    store_i32,
    store_i64,
    varint_size_bytes,
    write_varint,
)
from compactor.model.segment import CountAndDigestSum
from compactor.profiling import SegmentWorkStage, measure_stage
from compactor.records import codecs
from compactor.records.batches import (
    CODEC_MASK,
    CONTROL,
    HEADER,
    HORIZON,
    LOG_APPEND,
    NOT_CONTROL,
    TRANSACTIONAL,
    BatchTable,
    Bytes,
    Int64s,
    read_only_view,
)
from compactor.records.bulk import compress_bodies_into
from compactor.records.codecs import NONE, compress_body
from compactor.records.rows import HEAD_LOOSE, LEGACY, TAIL_LOOSE, BatchChunk, RecordRows

Actions = npt.NDArray[np.uint8]

DROP: Final = 0
COPY: Final = 1
REWRITE: Final = 2
EMPTY: Final = 3
FILTER: Final = 4  # not decided yet: it depends on the records

MAX_SEGMENT: Final = 2**31 - 1
_LONGEST_HEAD: Final = 32  # of a record that is written anew: length, attributes, timestamp and offset deltas

_PROBLEMS: Final = (
    "",
    "a record that stays has a negative timestamp, which Kafka's cleaner refuses to write",
    "a transactional batch without a producer id cannot be written again",
    "a batch with a producer id but epoch -1 cannot be written again",
    "a batch with a producer id but a negative sequence cannot be written again",
)


KeptRowBounds = tuple[int, int, int, int, int]
"""First row, last row, number of rows, lowest timestamp, highest timestamp (-1 for none) of the rows that stay."""


@dataclass(frozen=True, slots=True)
class EncodedBatches:
    """Encoded batches of a chunk, one row per batch that is not dropped. ``anew``: encoded, not copied."""

    data: memoryview
    size: Int64s
    last_offset: Int64s
    max_timestamp: Int64s
    anew: Flags


class CleaningDecisions(NamedTuple):
    """Decisions on a chunk: per batch an action and a delete horizon (or NO_HORIZON), and per row whether the record stays."""

    action: Actions
    horizon: Int64s
    keep_flags: Flags


class EncodedBatchBuffer:
    """Reused memory for the encoded batches of one chunk. Not thread-safe."""

    def __init__(self) -> None:
        self.plain = codecs.GrowingByteBuffer()
        self.slots = codecs.GrowingByteBuffer(0)
        self.packed = codecs.GrowingByteBuffer(0)


@measure_stage(SegmentWorkStage.ENCODE, lambda segment_bytes, table, chunk, *_: chunk.body_size_bytes)
def encode_cleaned_chunk(
    segment_bytes: Bytes,
    table: BatchTable,
    chunk: BatchChunk,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    decisions: CleaningDecisions,
    output: EncodedBatchBuffer,
    segment_name: str,
) -> EncodedBatches:
    """Results in ``output`` are valid until the next call.
    :param decisions: DROP, COPY, REWRITE or EMPTY per batch; delete horizons and flags of rows are only used for REWRITE.
    :raises BadData: if Kafka's MemoryRecordsBuilder would refuse a batch.
    """
    some, action_by_batch = slice(chunk.first, chunk.last), decisions.action
    if np.all(action_by_batch == COPY):
        start, end = int(table.position[chunk.first]), int(table.position[chunk.last - 1] + table.size[chunk.last - 1])
        data, anew = memoryview(segment_bytes)[start:end], np.zeros(len(action_by_batch), np.bool_)
        return EncodedBatches(data, table.size[some], table.last_offset[some], table.max_timestamp[some], anew)
    buf = chunk.buf
    compressed = bool(table.codec_ids[some].any())
    bound = HEADER * len(action_by_batch) + chunk.body_size_bytes + _LONGEST_HEAD * len(rows)
    if not compressed:
        bound += int(table.size[some][action_by_batch == COPY].sum())
    if np.any(rows.flags & TAIL_LOOSE):
        is_rewritten = np.repeat(action_by_batch == REWRITE, np.diff(first_row))
        loose = np.flatnonzero(is_rewritten & decisions.keep_flags & ((rows.flags & TAIL_LOOSE) != 0))
        if len(loose):
            buf, rows = _reencode_rows(buf, rows, loose)
            bound += len(buf)
    output.plain.reserve_space(bound)
    start, size = np.empty((2, len(action_by_batch)), np.int64)
    batches = table.select_rows(some)
    batches = batches.replace_columns(last_offset=batches.last_offset.copy(), max_timestamp=batches.max_timestamp.copy())
    problem, batch = _encode_batches(segment_bytes, buf, batches, first_row, rows, decisions, compressed, output.plain.array, start, size)
    if problem:
        at = chunk.first + batch
        raise BadData(
            _PROBLEMS[problem],
            segment=segment_name,
            position=int(table.position[at]),
            offset=int(max(table.base_offset[at], 0) or table.last_offset[at]),
            hint="Kafka's cleaner marks such a partition uncleanable; it stays as it is",
        )
    kept = action_by_batch != DROP
    if compressed:
        written = _compress_and_join(segment_bytes, table, chunk, action_by_batch, start, size, output)
    else:
        written = memoryview(output.plain.array)[: int(size.sum())]
        _write_lengths_and_crcs(output.plain.array, read_only_view(output.plain.array), action_by_batch, size)
    return EncodedBatches(written, size[kept], batches.last_offset[kept], batches.max_timestamp[kept], action_by_batch[kept] != COPY)


def _compress_and_join(
    segment_bytes: Bytes,
    table: BatchTable,
    chunk: BatchChunk,
    action_by_batch: Actions,
    start: Int64s,
    size: Int64s,
    output: EncodedBatchBuffer,
) -> memoryview:
    """Sizes in ``size`` are changed in place to those after compression."""
    some = slice(chunk.first, chunk.last)
    body = np.where(action_by_batch == REWRITE, size - HEADER, 0)
    bound = codecs.max_compressed_size(body)
    slot = np.cumsum(bound) - bound  # where each compressed body begins; its room is what it may need
    output.slots.reserve_space(int(bound.sum()))
    output.packed.reserve_space(int(bound.sum()) + HEADER * len(action_by_batch) + int(table.size[some][action_by_batch == COPY].sum()))
    rewritten = np.flatnonzero(action_by_batch == REWRITE)
    codec = table.attributes[some][rewritten] & np.int16(CODEC_MASK)
    size[rewritten] = HEADER + compress_bodies_into(
        read_only_view(output.plain.array), codec, start[rewritten] + HEADER, body[rewritten], output.slots.array, slot[rewritten],
        bound[rewritten],
    )  # fmt: skip
    _write_batches_in_order(
        segment_bytes, table.position[some], output.plain.array, start, output.slots.array, slot, action_by_batch, size, output.packed.array
    )
    _write_lengths_and_crcs(output.packed.array, read_only_view(output.packed.array), action_by_batch, size)
    return memoryview(output.packed.array)[: int(size.sum())]


def encode_filler_batch(base_offset: int, last_offset: int, leader_epoch: int, max_timestamp_ms: int = -1) -> bytes:
    """An empty v2 batch, so that a segment whose last records were removed still ends at the last offset of its sources (coverage, I1)."""
    after = struct.pack(">hiqqqhii", 0, last_offset - base_offset, -1, max_timestamp_ms, -1, -1, -1, 0)
    return struct.pack(">qiibI", base_offset, HEADER - 12, leader_epoch, 2, checksums.crc32c(after)) + after


# ---- tails that Kafka would write differently -------------------------------------------------------------------------------


def _reencode_rows(buf: Bytes, rows: RecordRows, row_numbers: Int64s) -> tuple[Bytes, RecordRows]:
    """Copy the chunk's bytes with these rows as Kafka encodes them."""
    low, high = int(rows.start[0]), int(rows.end[-1])
    parts = [buf[low:high].tobytes()]
    moved = RecordRows(
        offset=rows.offset,
        timestamp=rows.timestamp,
        start=rows.start - low,
        tail=rows.tail - low,
        end=rows.end - low,
        key_start=rows.key_start - low,
        value_start=rows.value_start - low,
        key_length=rows.key_length,
        value_length=rows.value_length,
        flags=rows.flags | np.uint8(HEAD_LOOSE),
    )
    at = high - low
    for row in row_numbers.tolist():
        tail = _reencode_tail(buf[int(rows.tail[row]) : int(rows.end[row])])
        parts.append(tail)
        moved.tail[row] = at
        at += len(tail)
        moved.end[row] = at
    return read_only_view(np.frombuffer(b"".join(parts), np.uint8)), moved


def _reencode_tail(record_tail: Bytes) -> bytes:
    out = bytearray()
    at = 0

    def copy_varint() -> int:
        nonlocal at
        value, at = read_varint(record_tail, at, len(record_tail))
        return int(value)

    def copy_byte_string(is_header_name: bool) -> None:
        nonlocal at
        length = copy_varint()
        data = record_tail[at : at + max(length, 0)].tobytes()
        at += max(length, 0)
        if is_header_name:
            data = reencode_as_java_utf8(data)
        out.extend(encode_varint(len(data) if length >= 0 else -1) + data)

    with np.errstate(over="ignore"):
        copy_byte_string(False)
        copy_byte_string(False)
        headers = copy_varint()
        out.extend(encode_varint(headers))
        for _ in range(headers):
            copy_byte_string(True)
            copy_byte_string(False)
    return bytes(out)


def reencode_as_java_utf8(header_name: bytes) -> bytes:
    """Java's ``new String(name, UTF_8).getBytes(UTF_8)``: each invalid UTF-8 sequence and each encoded surrogate becomes U+FFFD."""
    parts = []
    rest = header_name
    while True:
        at = next((i for i in range(len(rest) - 1) if rest[i] == 0xED and 0xA0 <= rest[i + 1] <= 0xBF), -1)
        if at < 0:
            parts.append(rest.decode("utf-8", "replace"))
            return "".join(parts).encode("utf-8")
        parts.append(rest[:at].decode("utf-8", "replace") + "\ufffd")
        third = rest[at + 2 : at + 3]
        rest = rest[at + 3 :] if third and 0x80 <= third[0] <= 0xBF else rest[at + 2 :]


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _write_lengths_and_crcs(out: Bytes, read_only_out: Bytes, action_by_batch: Actions, size: Int64s) -> None:
    """:param read_only_out: a view of ``out``, because the CRC kernel is compiled for read-only arrays."""
    at = np.int64(0)
    for batch in range(action_by_batch.size):
        if action_by_batch[batch] == DROP:
            continue
        if action_by_batch[batch] != COPY:
            store_i32(out, at + 8, size[batch] - 12)
            store_i32(out, at + 17, crc32c(read_only_out, at + 21, at + size[batch]))
        at += size[batch]


@kernel
def _write_batches_in_order(
    segment_bytes: Bytes,
    position: Int64s,
    plain_batches: Bytes,
    start: Int64s,
    compressed_slots: Bytes,
    slot_position: Int64s,
    action_by_batch: Actions,
    size: Int64s,
    out: Bytes,
) -> None:
    at = np.int64(0)
    for batch in range(action_by_batch.size):
        if action_by_batch[batch] == DROP:
            continue
        if action_by_batch[batch] == COPY:
            copy_bytes(out, at, segment_bytes, position[batch], size[batch])
        else:
            copy_bytes(out, at, plain_batches, start[batch], HEADER)
            copy_bytes(out, at + HEADER, compressed_slots, slot_position[batch], size[batch] - HEADER)
        at += size[batch]


@inline_kernel
def _write_v2_batch_header(
    out: Bytes,
    position: int,
    base_offset: int,
    leader_epoch: int,
    attributes: int,
    last_offset: int,
    base_timestamp: int,
    max_timestamp: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    record_count: int,
) -> None:
    store_i64(out, position, base_offset)
    store_i32(out, position + 12, leader_epoch)
    out[position + 16] = 2
    store_i16(out, position + 21, attributes)
    store_i32(out, position + 23, last_offset - base_offset)
    store_i64(out, position + 27, base_timestamp)
    store_i64(out, position + 35, max_timestamp)
    store_i64(out, position + 43, producer_id)
    store_i16(out, position + 51, producer_epoch)
    store_i32(out, position + 53, base_sequence)
    store_i32(out, position + 57, record_count)


@inline_kernel
def _write_legacy_tail(
    buf: Bytes, out: Bytes, out_position: int, key_start: int, key_length: int, value_start: int, value_length: int
) -> int:
    """Write a v0/v1 record in format v2, without headers."""
    out_position = write_varint(out, out_position, key_length)
    if key_length > 0:
        copy_bytes(out, out_position, buf, key_start, key_length)
        out_position += key_length
    out_position = write_varint(out, out_position, value_length)
    if value_length > 0:
        copy_bytes(out, out_position, buf, value_start, value_length)
        out_position += value_length
    out[out_position] = 0
    return out_position + 1


@inline_kernel
def _problem_of_producer_fields(batch_attributes: int, producer_id: int, producer_epoch: int, base_sequence: int) -> int:
    """Problem for which Kafka's builder refuses the batch (MemoryRecordsBuilder.validateProducerState), 0 for none."""
    if batch_attributes & TRANSACTIONAL and producer_id == -1:
        return 2
    if producer_id != -1 and producer_epoch == -1:
        return 3
    if producer_id != -1 and base_sequence < 0 and not batch_attributes & CONTROL:
        return 4
    return 0


@inline_kernel
def _bounds_of_kept_rows(keep_flags: Flags, timestamp: Int64s, first_row: int, end_row: int) -> KeptRowBounds:
    """First row, last row and highest timestamp are -1 if no row of [first_row, end_row) stays."""
    first = np.int64(-1)
    last = np.int64(-1)
    count = 0
    lowest = np.int64(0)
    highest = np.int64(-1)
    for row in range(first_row, end_row):
        if keep_flags[row]:
            if first < 0:
                first = np.int64(row)
            last = np.int64(row)
            count += 1
            lowest = min(lowest, timestamp[row])
            highest = max(highest, timestamp[row])
    return first, last, count, lowest, highest


@inline_kernel
def _write_records_that_stay(
    buf: Bytes,
    out: Bytes,
    out_position: int,
    first_row: int,
    last_row: int,
    base_offset: int,
    base_timestamp: int,
    are_records_copied: bool,
    rows: RecordRows,
    keep_flags: Flags,
) -> int:
    """Write rows [first, last].
    :param are_records_copied: because base offset and base timestamp are unchanged.
    """
    row = first_row
    while row <= last_row:
        if not keep_flags[row]:
            row += 1
            continue
        if are_records_copied and not rows.flags[row] & (HEAD_LOOSE | TAIL_LOOSE):
            run = row
            while run < last_row and keep_flags[run + 1] and not rows.flags[run + 1] & (HEAD_LOOSE | TAIL_LOOSE):
                run += 1
            copy_bytes(out, out_position, buf, rows.start[row], rows.end[run] - rows.start[row])
            out_position += rows.end[run] - rows.start[row]
            row = run + 1
            continue
        tail_size = rows.end[row] - rows.tail[row]
        if rows.flags[row] & LEGACY:
            key, value = np.int64(rows.key_length[row]), np.int64(rows.value_length[row])
            tail_size = varint_size_bytes(key) + max(key, np.int64(0)) + varint_size_bytes(value) + max(value, np.int64(0)) + 1
        stamp = rows.timestamp[row] - base_timestamp
        delta = rows.offset[row] - base_offset
        length = 1 + varint_size_bytes(stamp) + varint_size_bytes(delta) + tail_size
        out_position = write_varint(out, out_position, length)
        out[out_position] = 0
        out_position = write_varint(out, out_position + 1, stamp)
        out_position = write_varint(out, out_position, delta)
        if rows.flags[row] & LEGACY:
            out_position = _write_legacy_tail(
                buf,
                out,
                out_position,
                rows.key_start[row],
                np.int64(rows.key_length[row]),
                rows.value_start[row],
                np.int64(rows.value_length[row]),
            )
        else:
            copy_bytes(out, out_position, buf, rows.tail[row], tail_size)
            out_position += tail_size
        row += 1
    return out_position


@kernel
def _encode_batches(
    segment_bytes: Bytes,
    buf: Bytes,
    batches: BatchTable,
    first_row: FirstRowByBatch,
    rows: RecordRows,
    decisions: CleaningDecisions,
    has_compressed_bodies: bool,
    out: Bytes,
    out_start: Int64s,
    out_size: Int64s,
) -> ProblemAndBatch:
    """Return a problem (an index of _PROBLEMS, 0 for none) and its batch.
    :param batches: last offsets and maximum timestamps are changed in place to those of the encoded batches.
    :param has_compressed_bodies: then copied batches are not written to ``out``.
    """
    at = np.int64(0)
    for batch in range(decisions.action.size):
        out_start[batch] = at
        out_size[batch] = 0
        if decisions.action[batch] == DROP:
            continue
        if decisions.action[batch] == COPY:
            out_size[batch] = batches.size[batch]
            if not has_compressed_bodies:
                copy_bytes(out, at, segment_bytes, batches.position[batch], batches.size[batch])
                at += batches.size[batch]
            continue
        type_bits = np.int64(batches.attributes[batch]) & (LOG_APPEND | TRANSACTIONAL | CONTROL)
        pid = batches.producer_id[batch]
        epoch = np.int64(batches.producer_epoch[batch])
        sequence = np.int64(batches.base_sequence[batch])
        if decisions.action[batch] == EMPTY:
            _write_v2_batch_header(
                out, at, batches.base_offset[batch], np.int64(batches.leader_epoch[batch]), type_bits, batches.last_offset[batch],
                np.int64(-1), batches.max_timestamp[batch], pid, epoch, sequence, 0,
            )  # fmt: skip
            out_size[batch] = HEADER
            at += HEADER
            continue
        problem = _problem_of_producer_fields(type_bits, pid, epoch, sequence)
        if problem:
            return problem, batch
        # What stays decides base and maximum timestamp; of legacy batches the offsets as well.
        first, last, count, lowest, highest = _bounds_of_kept_rows(
            decisions.keep_flags, rows.timestamp, first_row[batch], first_row[batch + 1]
        )
        if lowest < -1:
            return 1, batch
        dated = decisions.horizon[batch] != NO_HORIZON
        base_timestamp = decisions.horizon[batch] if dated else rows.timestamp[first]
        bits = type_bits | (np.int64(batches.attributes[batch]) & CODEC_MASK) | (HORIZON if dated else 0)
        base = batches.base_offset[batch]
        if batches.magic[batch] < 2:
            base = rows.offset[first]
            batches.last_offset[batch] = rows.offset[last]
        if not type_bits & LOG_APPEND:
            batches.max_timestamp[batch] = highest
        # Where the base timestamp stays, a record keeps all its bytes; runs of such records are copied at once.
        whole = batches.magic[batch] == 2 and base_timestamp == batches.base_timestamp[batch] and not type_bits & LOG_APPEND
        write = _write_records_that_stay(buf, out, at + HEADER, first, last, base, base_timestamp, whole, rows, decisions.keep_flags)
        _write_v2_batch_header(
            out, at, base, np.int64(batches.leader_epoch[batch]), bits, batches.last_offset[batch],
            base_timestamp, batches.max_timestamp[batch], pid, epoch, sequence, count,
        )  # fmt: skip
        out_size[batch] = write - at
        at = write
    return 0, 0


# ---- encoder of v2 batches for ``demo`` and tests: simple rather than fast (about 3 microseconds per record) -------------------


NO_PRODUCER_ID = -1
NO_SEQUENCE = -1


_TO_CRC = struct.Struct(">qiibI")
_AFTER_CRC = struct.Struct(">hiqqqhii")
_HEADER_BYTES_AFTER_LENGTH = 49


class RecordToEncode(NamedTuple):
    """A record with ``timestamp`` in milliseconds; a header name may be bytes that are not valid UTF-8."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str | bytes, bytes | None]] = ()
    attributes: int = 0


class ProducerFields(NamedTuple):
    """Fields of a batch header; ``sequence`` is that of its first record."""

    id: int = NO_PRODUCER_ID
    epoch: int = -1
    sequence: int = NO_SEQUENCE
    transactional: bool = False


NO_PRODUCER = ProducerFields()


def encode_batch(
    records: Sequence[RecordToEncode],
    *,
    codec: int = NONE,
    producer: ProducerFields = NO_PRODUCER,
    leader_epoch: int = 0,
    base_offset: int | None = None,
    last_offset: int | None = None,
    max_timestamp: int | None = None,
    append_time_ms: int | None = None,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """Encode a data batch as brokers store it (Kafka: DefaultRecordBatch, DefaultRecord). Without records, encode the bare header of an
    emptied batch.
    :param base_offset, last_offset: by default those of the records. A compacted batch may span more.
    :param max_timestamp: by default the highest of the records. An emptied batch keeps its former value.
    :param append_time_ms: of a LogAppendTime batch; None for CreateTime.
    :param delete_horizon_ms: in place of the base timestamp (KIP-534).
    """
    if not records and (base_offset is None or last_offset is None):
        raise ValueError("a batch without records needs its base and last offset")
    base = records[0].offset if base_offset is None else base_offset
    last = records[-1].offset if last_offset is None else last_offset
    base_timestamp = records[0].timestamp if records else NO_TIMESTAMP
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
    if append_time_ms is not None:
        max_timestamp = append_time_ms
    elif max_timestamp is None:
        max_timestamp = max((row.timestamp for row in records), default=NO_TIMESTAMP)
    body = b"".join(_encode_record(row, base, base_timestamp) for row in records)
    if codec != NONE and records:
        body = compress_body(codec, body)
    attributes = (
        (codec if records else NONE)
        | (LOG_APPEND if append_time_ms is not None else 0)
        | (TRANSACTIONAL if producer.transactional else 0)
        | (HORIZON if delete_horizon_ms is not None else 0)
    )
    return prepend_batch_header(base, last - base, leader_epoch, attributes, base_timestamp, max_timestamp, producer, len(records), body)


def encode_txn_marker(
    offset: int,
    timestamp_ms: int,
    producer_id: int,
    producer_epoch: int,
    *,
    is_commit: bool,
    coordinator_epoch: int = 0,
    leader_epoch: int = 0,
    is_log_append_time: bool = False,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """Encode a COMMIT or ABORT control batch (Kafka: EndTransactionMarker).
    :param delete_horizon_ms: in place of the base timestamp (KIP-534).
    """
    base_timestamp = timestamp_ms if delete_horizon_ms is None else delete_horizon_ms
    row = RecordToEncode(offset, timestamp_ms, struct.pack(">hh", 0, int(is_commit)), struct.pack(">hi", 0, coordinator_epoch))
    attributes = TRANSACTIONAL | CONTROL
    attributes |= LOG_APPEND if is_log_append_time else 0
    attributes |= HORIZON if delete_horizon_ms is not None else 0
    producer = ProducerFields(producer_id, producer_epoch, NO_SEQUENCE, True)
    return prepend_batch_header(
        offset, 0, leader_epoch, attributes, base_timestamp, timestamp_ms, producer, 1, _encode_record(row, offset, base_timestamp)
    )


def prepend_batch_header(
    base_offset: int,
    last_offset_delta: int,
    leader_epoch: int,
    attributes: int,
    base_timestamp: int,
    max_timestamp: int,
    producer: ProducerFields,
    record_count: int,
    body: bytes,
) -> bytes:
    """Prepend a header with its CRC-32C to a compressed body; invalid values are accepted."""
    after = _AFTER_CRC.pack(
        attributes, last_offset_delta, base_timestamp, max_timestamp, producer.id, producer.epoch, producer.sequence, record_count
    )
    crc = checksums.crc32c(body, checksums.crc32c(after))
    return _TO_CRC.pack(base_offset, _HEADER_BYTES_AFTER_LENGTH + len(body), leader_epoch, 2, crc) + after + body


def encode_varint(value: int) -> bytes:
    """Zigzag, then seven bits per byte, lowest first (Kafka: ByteUtils)."""
    zigzag = (value << 1) ^ (value >> 63)
    if zigzag < 0x80:
        return _ONE_BYTE[zigzag]
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


_ONE_BYTE = tuple(bytes([n]) for n in range(128))
_NULL = encode_varint(-1)


def _encode_record(record: RecordToEncode, base_offset: int, base_timestamp: int) -> bytes:
    offset, timestamp, key, value, headers, attributes = record
    parts = [
        _ONE_BYTE[attributes],
        encode_varint(timestamp - base_timestamp),
        encode_varint(offset - base_offset),
        *_encode_length_and_bytes(key),
        *_encode_length_and_bytes(value),
        encode_varint(len(headers)),
    ]
    if headers:
        parts.extend(_encode_record_headers(headers))
    content = b"".join(parts)
    return encode_varint(len(content)) + content


def _encode_length_and_bytes(field_bytes: bytes | None) -> tuple[bytes, bytes]:
    return (_NULL, b"") if field_bytes is None else (encode_varint(len(field_bytes)), field_bytes)


def _encode_record_headers(headers: Sequence[tuple[str | bytes, bytes | None]]) -> Iterable[bytes]:
    for name, value in headers:
        yield from _encode_length_and_bytes(name.encode() if isinstance(name, str) else name)
        yield from _encode_length_and_bytes(value)


# ---- sums over batches and records for the balance of a round (compactor.model.segment): no record was lost or added -----------
# Each record contributes a digest of its offset, of the lengths of its key and value, and of the first and last eight bytes of both, mixed
# with a key of the tier. That is enough to distinguish records, and takes a few nanoseconds. The bytes between are covered by the gate and
# by checksums. The sums of new segments are computed by other code (compactor.cleaner.gate.gate), so that both sides cannot share a
# mistake.


DigestSumRows = npt.NDArray[np.uint64]
"""One row per account: how many, and the two halves of their digests' sum."""

(OPENED, RECORDS, BATCH_SUPERSEDED, BATCH_ABORTED, BATCH_MARKER, SUPERSEDED, TOMBSTONE, KEYLESS) = ACCOUNTS = range(8)
BATCHES_DROPPED: Final = {"superseded": BATCH_SUPERSEDED, "aborted": BATCH_ABORTED, "marker": BATCH_MARKER}
RECORDS_DROPPED: Final = {"superseded": SUPERSEDED, "tombstone": TOMBSTONE, "keyless": KEYLESS}

_LEGACY_HEADER: Final = 26  # what every message of v0 and v1 has, its CRC included


class BalanceDigestKey:
    """Secret key of a tier's record digests."""

    def __init__(self, hash_key: bytes) -> None:
        """Derived from the hash key, so that records that collide in an offset map differ here."""
        self.halves = siphash_key_halves(hashlib.sha256(b"balance" + hash_key).digest()[:16])


def zero_digest_sums() -> DigestSumRows:
    """One row for each account: the reason for which batches or records are counted, such as a dropped tombstone."""
    return np.zeros((len(ACCOUNTS), 3), np.uint64)


def digest_sum_from_row(row_of_sums: DigestSumRows) -> CountAndDigestSum:
    """Number of items, and both halves of the sum of their digests."""
    return CountAndDigestSum.from_digest_halves(int(row_of_sums[0]), int(row_of_sums[1]), int(row_of_sums[2]))


@measure_stage(SegmentWorkStage.GATE, lambda buf, _: len(buf))
def segment_digest_sum(buf: Bytes, key: BalanceDigestKey) -> CountAndDigestSum:
    """Number and digest sum of a segment's valid batches."""
    out = np.zeros(3, np.uint64)
    _add_segment_digests(buf, *key.halves, out)
    return digest_sum_from_row(out)


def digest_sum_of_headers(headers: Bytes, key: BalanceDigestKey) -> CountAndDigestSum:
    """Headers are of v2, shape (batches, 61)."""
    out = np.zeros(3, np.uint64)
    _add_header_digests(read_only_view(np.ascontiguousarray(headers).reshape(-1)), *key.halves, out)
    return digest_sum_from_row(out)


@measure_stage(SegmentWorkStage.GATE)
def uncopied_digest_sums(
    key: BalanceDigestKey,
    segment_bytes: Bytes,
    table: BatchTable,
    chunk: BatchChunk,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    action_by_header: Actions,
    decisions: CleaningDecisions,
    superseded_flags: Flags,
    aborted_flags: Flags,
) -> DigestSumRows:
    """Batches and records that are not copied, one row for each account.
    A batch whose records were filtered counts in OPENED, and all its records in RECORDS. Dropped batches and records count in the account
    of their reason. A record dropped for no valid reason is in no such account.
    """
    sums = zero_digest_sums()
    if np.all(decisions.action == COPY):
        return sums
    batches = table.select_rows(slice(chunk.first, chunk.last))
    _add_uncopied_digests(
        segment_bytes, chunk.buf, batches, rows, first_row, action_by_header, decisions, superseded_flags, aborted_flags, key.halves, sums
    )
    return sums


@inline_kernel
def _mix_digest(digest_state: np.uint64) -> np.uint64:
    return (digest_state ^ (digest_state >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)


@inline_kernel
def _finish_digest(digest_state: np.uint64) -> np.uint64:
    """The last step of MurmurHash3, in which each bit changes half of the others."""
    digest_state = (digest_state ^ (digest_state >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    digest_state = (digest_state ^ (digest_state >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return digest_state ^ (digest_state >> np.uint64(33))


@inline_kernel
def add_batch_digest(segment_bytes: Bytes, position: int, magic: int, k0: HashKeyHalf, k1: HashKeyHalf, out_sums: DigestSumRows) -> None:
    """Add a batch to a row of sums: number of batches, both halves of the sum of their digests.
    :param k0, k1: halves of the balance key.
    """
    end = position + (HEADER if magic == 2 else _LEGACY_HEADER)
    state = _mix_digest(k0 ^ load_u64(segment_bytes, end - 8))
    for at in range(position, end - 8, 8):
        state = _mix_digest(state + load_u64(segment_bytes, at))
    one = _finish_digest(state)
    out_sums[0] += np.uint64(1)
    out_sums[1] += one
    out_sums[2] += second_half_of_digest(one, k1)


@inline_kernel
def _digest_key_or_value(buf: Bytes, start: int, length: int) -> np.uint64:
    """Length (-1 for null) and first and last eight bytes count."""
    edges = np.uint64(length) * np.uint64(0x9E3779B97F4A7C15)
    if length >= 8:
        first: np.uint64 = load_u64(buf, start)
        last: np.uint64 = load_u64(buf, start + length - 8)
        return edges + first + ((last << np.uint64(29)) | (last >> np.uint64(35)))
    for at in range(start, start + length):
        edges = (edges ^ np.uint64(buf[at])) * np.uint64(0x100000001B3)
    return edges


@inline_kernel
def record_digest_half(
    buf: Bytes, offset: int, key_start: int, key_length: int, value_start: int, value_length: int, k0: HashKeyHalf
) -> np.uint64:
    """A length of -1 means null.
    The timestamp is not included, because rewriting v0 and v1 batches as v2 changes its encoding; the gate checks timestamps.
    """
    state = k0 + _digest_key_or_value(buf, key_start, key_length)
    state = _mix_digest(state) + _digest_key_or_value(buf, value_start, value_length)
    return _finish_digest(_mix_digest(state) + np.uint64(offset))


@inline_kernel
def second_half_of_digest(first_half: np.uint64, k1: HashKeyHalf) -> np.uint64:
    """The second half of a sum of digests cannot be derived from the sum of
    first halves.
    """
    state = (first_half ^ k1) * np.uint64(0x9FB21C651E98DF25)
    return state ^ (state >> np.uint64(31))


@kernel
def _add_header_digests(headers: Bytes, k0: HashKeyHalf, k1: HashKeyHalf, out_sums: DigestSumRows) -> None:
    for position in range(0, headers.size, HEADER):
        add_batch_digest(headers, position, 2, k0, k1, out_sums)


@kernel
def _add_segment_digests(buf: Bytes, k0: HashKeyHalf, k1: HashKeyHalf, out_sums: DigestSumRows) -> None:
    at = 0
    while at + _LEGACY_HEADER <= buf.size:
        size = 12 + load_i32(buf, at + 8)
        magic = buf[at + 16]
        if at + size > buf.size or size < (HEADER if magic == 2 else _LEGACY_HEADER):
            break
        add_batch_digest(buf, at, magic, k0, k1, out_sums)
        at += size


@kernel
def _add_uncopied_digests(
    segment_bytes: Bytes,
    buf: Bytes,
    batches: BatchTable,
    rows: RecordRows,
    first_row: FirstRowByBatch,
    action_by_header: Actions,
    decisions: CleaningDecisions,
    superseded_flags: Flags,
    aborted_flags: Flags,
    key_halves: HashKeyHalves,
    out_sums: DigestSumRows,
) -> None:
    k0, k1 = key_halves
    records = np.uint64(0)
    first = np.uint64(0)
    second = np.uint64(0)
    for batch in range(decisions.action.size):
        if decisions.action[batch] == COPY:
            continue
        if action_by_header[batch] != FILTER:
            account = BATCH_ABORTED if aborted_flags[batch] else BATCH_SUPERSEDED
            if batches.control[batch] != NOT_CONTROL:
                account = BATCH_MARKER
            add_batch_digest(segment_bytes, batches.position[batch], batches.magic[batch], k0, k1, out_sums[account])
            continue
        add_batch_digest(segment_bytes, batches.position[batch], batches.magic[batch], k0, k1, out_sums[OPENED])
        for row in range(first_row[batch], first_row[batch + 1]):
            one = record_digest_half(
                buf, rows.offset[row], rows.key_start[row], rows.key_length[row], rows.value_start[row], rows.value_length[row], k0
            )
            two = second_half_of_digest(one, k1)
            records += np.uint64(1)
            first += one
            second += two
            if decisions.keep_flags[row]:
                continue
            if rows.key_length[row] < 0:
                account = KEYLESS
            elif superseded_flags[row]:
                account = SUPERSEDED
            elif rows.value_length[row] < 0:
                account = TOMBSTONE
            else:
                continue
            out_sums[account, 0] += np.uint64(1)
            out_sums[account, 1] += one
            out_sums[account, 2] += two
    out_sums[RECORDS, 0] += records
    out_sums[RECORDS, 1] += first
    out_sums[RECORDS, 2] += second
