"""Encoder of record batches for ``demo`` and tests. It is simple rather than fast (about 3 microseconds per record); the cleaner has its
own.

It writes only the current message format, v2 (Kafka: DefaultRecordBatch, DefaultRecord, EndTransactionMarker).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import crc32c

from compactor.constants import NO_TIMESTAMP
from compactor.kernels.common import CodecId
from compactor.records.codecs import NONE, compress_body

NO_PRODUCER_ID = -1
NO_SEQUENCE = -1

LOG_APPEND_TIME_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
HORIZON_BIT = 0x40

_TO_CRC = struct.Struct(">qiibI")
_AFTER_CRC = struct.Struct(">hiqqqhii")
_HEADER_BYTES_AFTER_LENGTH = 49


class RecordToEncode(NamedTuple):
    """A record to encode. ``timestamp`` is in milliseconds; ``key`` and ``value`` may be null; a header name may be bytes that are not
    valid UTF-8.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str | bytes, bytes | None]] = ()
    attributes: int = 0


class ProducerFields(NamedTuple):
    """Producer fields of a batch header. ``sequence`` is that of the batch's first record."""

    id: int = NO_PRODUCER_ID
    epoch: int = -1
    sequence: int = NO_SEQUENCE
    transactional: bool = False


NO_PRODUCER = ProducerFields()


def encode_batch(
    records: Sequence[RecordToEncode],
    *,
    codec: CodecId = NONE,
    producer: ProducerFields = NO_PRODUCER,
    leader_epoch: int = 0,
    base_offset: int | None = None,
    last_offset: int | None = None,
    max_timestamp: int | None = None,
    append_time_ms: int | None = None,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """Encode a data batch as brokers store it. Without records, encode the bare header that the cleaner leaves of an emptied batch.

    :param base_offset, last_offset: by default those of the first and last record. A compacted batch may span more offsets than its
        records.
    :param max_timestamp: by default the highest timestamp of the records. An emptied batch keeps its former value.
    :param append_time_ms: time of a LogAppendTime batch, in milliseconds, which is the timestamp of all its records; None for a CreateTime
        batch. As brokers do, the records are written with timestamp deltas nevertheless.
    :param delete_horizon_ms: time in milliseconds, stored in place of the base timestamp (KIP-534); None for no delete horizon.
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
        | (LOG_APPEND_TIME_BIT if append_time_ms is not None else 0)
        | (TRANSACTIONAL_BIT if producer.transactional else 0)
        | (HORIZON_BIT if delete_horizon_ms is not None else 0)
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
    """Encode the control batch that ends a transaction with COMMIT or ABORT (Kafka: EndTransactionMarker).

    :param is_log_append_time: whether the batch has the attribute of LogAppendTime.
    :param delete_horizon_ms: time in milliseconds, stored in place of the base timestamp (KIP-534); None for no delete horizon.
    """
    base_timestamp = timestamp_ms if delete_horizon_ms is None else delete_horizon_ms
    row = RecordToEncode(offset, timestamp_ms, struct.pack(">hh", 0, int(is_commit)), struct.pack(">hi", 0, coordinator_epoch))
    attributes = TRANSACTIONAL_BIT | CONTROL_BIT
    attributes |= LOG_APPEND_TIME_BIT if is_log_append_time else 0
    attributes |= HORIZON_BIT if delete_horizon_ms is not None else 0
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
    """Prepend a batch header with its CRC-32C to a body that is compressed already. Accepts invalid values, so that tests can write corrupt
    batches.
    """
    after = _AFTER_CRC.pack(
        attributes, last_offset_delta, base_timestamp, max_timestamp, producer.id, producer.epoch, producer.sequence, record_count
    )
    crc = crc32c.crc32c(body, crc32c.crc32c(after))
    return _TO_CRC.pack(base_offset, _HEADER_BYTES_AFTER_LENGTH + len(body), leader_epoch, 2, crc) + after + body


def encode_varint(value: int) -> bytes:
    """Encode a signed number as Kafka's varint or varlong: zigzag, then seven bits per byte, lowest first (Kafka: ByteUtils)."""
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
    """Encode one record of a v2 batch."""
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
    """Return the varint length and the bytes of a field; null has the length -1."""
    return (_NULL, b"") if field_bytes is None else (encode_varint(len(field_bytes)), field_bytes)


def _encode_record_headers(headers: Sequence[tuple[str | bytes, bytes | None]]) -> Iterable[bytes]:
    """Yield the encoded parts of a record's headers."""
    for name, value in headers:
        yield from _encode_length_and_bytes(name.encode() if isinstance(name, str) else name)
        yield from _encode_length_and_bytes(value)
