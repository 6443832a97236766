"""Serialization of ``__remote_log_metadata`` values (Kafka's RemoteLogMetadataSerde and its message schemas).

A value is three unsigned varints (frame version 1, api key, version 0) and one message in Kafka's flexible encoding. Unknown tagged fields
are preserved, so that a decoded value encodes to the same bytes. A value at which a broker's consumer would stop raises BadData.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

from checkpoint.lineage import EpochEntry
from compactor.errors import BadData
from compactor.model.remote_log import (
    MetadataRecord,
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    RemotePartitionDeleteMetadataRecord,
    TaggedFields,
    TopicIdPartition,
)
from compactor.model.segment import SegmentState

TOPIC = "__remote_log_metadata"
SEGMENT_METADATA, SEGMENT_UPDATE, PARTITION_DELETE, SEGMENT_SNAPSHOT = 0, 1, 2, 3
_FRAME_VERSION, _VERSION = 1, 0
_TXN_INDEX_EMPTY = 0
_MAX_BYTES_SHOWN = 64
_STATES = tuple(SegmentState)
_STATE_IDS = {state: number for number, state in enumerate(_STATES)}
_SEGMENT_FIELDS = struct.Struct(">qqiqq")
_EPOCH = struct.Struct(">iq")
_BROKER_AND_TIME = struct.Struct(">iq")


_DELETE_STATES = tuple(PartitionDeleteState)
_DELETE_STATE_IDS = {state: number for number, state in enumerate(_DELETE_STATES)}


def decode_record(value: bytes | None, *, offset: int = -1, topic: str = TOPIC) -> MetadataRecord:
    """Raises BadData if the value is corrupt; ``offset`` and ``topic`` are for its message."""
    try:
        return _decode_record_value(value)
    except _InvalidRecordValueError as error:
        cause, position = error.cause, error.position
    except (IndexError, struct.error):
        cause, position = "it is cut short", len(value or b"")
    raise BadData(
        f"{cause} ({_hex_summary(value)})",
        segment=topic,
        position=position,
        offset=offset,
        hint="Brokers stop reading the topic at such a record, and again at every restart",
    )


def encode_record(record: MetadataRecord) -> bytes:
    """Raises ValueError if ``decode_record`` would refuse the record."""
    if isinstance(record, RemoteLogSegmentMetadataRecord):
        if record.state is not SegmentState.COPY_SEGMENT_STARTED:
            raise ValueError("a segment is introduced in COPY_SEGMENT_STARTED")
        if problem := _kafka_constructor_refusal_reason(record):
            raise ValueError(problem)
        return bytes((_FRAME_VERSION, SEGMENT_METADATA, _VERSION)) + encode_unframed_segment_metadata(record)
    nested = iter(record.nested)
    out = bytearray((_FRAME_VERSION, SEGMENT_UPDATE, _VERSION))
    if isinstance(record, RemoteLogSegmentMetadataUpdateRecord):
        _append_segment_id(out, record.partition, record.segment_id, next(nested, ()), next(nested, ()))
        out += _BROKER_AND_TIME.pack(record.broker_id, record.event_timestamp_ms)
        _append_compact_bytes(out, record.custom_metadata)
        out.append(_STATE_IDS[record.state])
    else:
        out[1] = PARTITION_DELETE
        _append_partition(out, record.partition, next(nested, ()))
        out += _BROKER_AND_TIME.pack(record.broker_id, record.event_timestamp_ms)
        out.append(_DELETE_STATE_IDS[record.state])
    _append_tagged_fields(out, record.tags)
    return bytes(out)


def encode_unframed_segment_metadata(record: RemoteLogSegmentMetadataRecord) -> bytes:
    """Encode a segment without the metadata topic's frame: for local storage only."""
    nested = iter(record.nested)
    out = bytearray()
    _append_segment_id(out, record.partition, record.segment_id, next(nested, ()), next(nested, ()))
    out += _SEGMENT_FIELDS.pack(
        record.start_offset, record.end_offset, record.broker_id, record.max_timestamp_ms, record.event_timestamp_ms
    )
    _append_varint(out, len(record.leader_epochs) + 1)
    for entry in record.leader_epochs:
        out += _EPOCH.pack(entry.epoch, entry.start_offset)
        _append_tagged_fields(out, next(nested, ()))
    out += struct.pack(">i", record.size_bytes)
    _append_compact_bytes(out, record.custom_metadata)
    out.append(_STATE_IDS[record.state])
    tags = ((_TXN_INDEX_EMPTY, b"\x01"), *record.tags) if record.txn_index_empty else record.tags
    _append_tagged_fields(out, tags)
    return bytes(out)


def decode_unframed_segment_metadata(data: bytes, position: int = 0) -> tuple[RemoteLogSegmentMetadataRecord, int]:
    """Segment, and the position after it. Raises ValueError, IndexError or struct.error if the bytes are corrupt."""
    partition, position, partition_tags = _decode_topic_id_partition(data, position)
    raw_id = _read_exactly(data, position, 16)
    id_tags, position = _decode_tagged_fields(data, position + 16)
    start, end, broker, largest, event = _SEGMENT_FIELDS.unpack_from(data, position)
    count, position = _decode_uvarint_at(data, position + _SEGMENT_FIELDS.size)
    epochs, nested = [], [partition_tags, id_tags]
    for _ in range(count - 1):
        epochs.append(EpochEntry(*_EPOCH.unpack_from(data, position)))
        tags, position = _decode_tagged_fields(data, position + _EPOCH.size)
        nested.append(tags)
    (size,) = struct.unpack_from(">i", data, position)
    custom, position = _decode_compact_bytes(data, position + 4)
    state = _decode_segment_state_byte(data, position)
    tags, position = _decode_tagged_fields(data, position + 1)
    empty = False
    if tags and tags[0][0] == _TXN_INDEX_EMPTY:
        if len(tags[0][1]) != 1:
            raise _InvalidRecordValueError("TxnIndexEmpty is not one byte", position)
        empty, tags = tags[0][1] != b"\0", tags[1:]
    kept = tuple(nested) if any(nested) else ()
    record = RemoteLogSegmentMetadataRecord(
        partition, raw_id, start, end, broker, largest, event, tuple(epochs), size, custom, state, empty, tags, kept
    )
    return record, position


class _InvalidRecordValueError(ValueError):
    def __init__(self, cause: str, position: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.position = position


def _decode_record_value(value: bytes | None) -> MetadataRecord:
    if value is None:
        raise _InvalidRecordValueError("the value is null", 0)
    frame, position = _decode_uvarint_at(value, 0)
    if frame != _FRAME_VERSION:
        raise _InvalidRecordValueError(f"the frame's version is {frame}, not {_FRAME_VERSION}", 0)
    kind_at = position
    kind, position = _decode_uvarint_at(value, position)
    if kind == SEGMENT_SNAPSHOT:
        raise _InvalidRecordValueError("a snapshot record (api 3) has no place in the topic", kind_at)
    if kind not in (SEGMENT_METADATA, SEGMENT_UPDATE, PARTITION_DELETE):
        raise _InvalidRecordValueError(f"unknown kind of record: api {kind}", kind_at)
    version, position = _decode_uvarint_at(value, position)
    if version != _VERSION:
        raise _InvalidRecordValueError(f"api {kind} has version {version}, not {_VERSION}", position - 1)
    record: MetadataRecord
    if kind == SEGMENT_METADATA:
        record, position = decode_unframed_segment_metadata(value, position)
        problem = _kafka_constructor_refusal_reason(record)
        if record.state is not SegmentState.COPY_SEGMENT_STARTED:
            problem = f"a segment is introduced in state {record.state}, not COPY_SEGMENT_STARTED"
        if problem:
            raise _InvalidRecordValueError(problem, position)
    elif kind == SEGMENT_UPDATE:
        record, position = _decode_update_record(value, position)
    else:
        record, position = _decode_partition_delete_record(value, position)
    if position != len(value):
        raise _InvalidRecordValueError(f"{len(value) - position} bytes follow the message", position)
    return record


def _decode_update_record(data: bytes, position: int) -> tuple[RemoteLogSegmentMetadataUpdateRecord, int]:
    partition, position, partition_tags = _decode_topic_id_partition(data, position)
    raw_id = _read_exactly(data, position, 16)
    id_tags, position = _decode_tagged_fields(data, position + 16)
    broker, event = _BROKER_AND_TIME.unpack_from(data, position)
    custom, position = _decode_compact_bytes(data, position + _BROKER_AND_TIME.size)
    state = _decode_segment_state_byte(data, position)
    tags, position = _decode_tagged_fields(data, position + 1)
    nested = (partition_tags, id_tags) if partition_tags or id_tags else ()
    return RemoteLogSegmentMetadataUpdateRecord(partition, raw_id, broker, event, state, custom, tags, nested), position


def _decode_partition_delete_record(data: bytes, position: int) -> tuple[RemotePartitionDeleteMetadataRecord, int]:
    partition, position, partition_tags = _decode_topic_id_partition(data, position)
    broker, event = _BROKER_AND_TIME.unpack_from(data, position)
    position += _BROKER_AND_TIME.size
    number = data[position]
    if number >= len(_DELETE_STATES):
        raise _InvalidRecordValueError(f"unknown state {number} of a partition's deletion", position)
    tags, end = _decode_tagged_fields(data, position + 1)
    nested = (partition_tags,) if partition_tags else ()
    return RemotePartitionDeleteMetadataRecord(partition, broker, event, _DELETE_STATES[number], tags, nested), end


def _kafka_constructor_refusal_reason(record: RemoteLogSegmentMetadataRecord) -> str:
    if record.start_offset < 0:
        return f"the start offset is {record.start_offset}"
    if record.end_offset < record.start_offset:
        return f"the segment ends at {record.end_offset}, before it starts at {record.start_offset}"
    return "" if record.leader_epochs else "the segment has no leader epochs"


def _decode_segment_state_byte(data: bytes, position: int) -> SegmentState:
    number = data[position]
    if number >= len(_STATES):
        raise _InvalidRecordValueError(f"unknown state {number} of a segment", position)
    return _STATES[number]


def _decode_uvarint_at(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value, shift, start = byte & 0x7F, 7, position
    while byte & 0x80:
        position += 1
        if shift > 28:
            raise _InvalidRecordValueError("a varint is longer than five bytes", start)
        byte = data[position]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, position + 1


def _read_exactly(data: bytes, position: int, length: int) -> bytes:
    found = data[position : position + length]
    if len(found) != length:
        raise IndexError
    return found


def _decode_compact_bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    length, position = _decode_uvarint_at(data, position)
    if not length:
        return None, position
    return _read_exactly(data, position, length - 1), position + length - 1


def _decode_tagged_fields(data: bytes, position: int) -> tuple[TaggedFields, int]:
    count, position = _decode_uvarint_at(data, position)
    if not count:
        return (), position
    tags: list[tuple[int, bytes]] = []
    for _ in range(count):
        start = position
        tag, position = _decode_uvarint_at(data, position)
        if tags and tag <= tags[-1][0]:
            raise _InvalidRecordValueError("tagged fields do not ascend", start)
        length, position = _decode_uvarint_at(data, position)
        tags.append((tag, _read_exactly(data, position, length)))
        position += length
    return tuple(tags), position


def _decode_topic_id_partition(data: bytes, position: int) -> tuple[TopicIdPartition, int, TaggedFields]:
    length, after = _decode_uvarint_at(data, position)
    if length < 2:
        raise _InvalidRecordValueError("the topic has no name", position)
    end = after + length - 1 + 20
    try:
        partition = _parse_topic_id_partition(_read_exactly(data, after, length - 1 + 20))
    except UnicodeDecodeError:
        raise _InvalidRecordValueError("the topic's name is not UTF-8", after) from None
    tags, end = _decode_tagged_fields(data, end)
    return partition, end, tags


@lru_cache(maxsize=1 << 14)
def _parse_topic_id_partition(raw: bytes) -> TopicIdPartition:
    # Cached, because many records share a partition.
    return TopicIdPartition(raw[-20:-4], raw[:-20].decode(), int.from_bytes(raw[-4:], "big", signed=True))


def _append_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _append_compact_bytes(out: bytearray, data: bytes | None) -> None:
    if data is None:
        out.append(0)
        return
    _append_varint(out, len(data) + 1)
    out += data


def _append_tagged_fields(out: bytearray, tags: Iterable[tuple[int, bytes]]) -> None:
    listed = tuple(tags)
    _append_varint(out, len(listed))
    for tag, data in listed:
        _append_varint(out, tag)
        _append_varint(out, len(data))
        out += data


def _append_partition(out: bytearray, partition: TopicIdPartition, tags: TaggedFields) -> None:
    _append_compact_bytes(out, partition.topic.encode())
    out += partition.topic_id
    out += struct.pack(">i", partition.partition)
    _append_tagged_fields(out, tags)


def _append_segment_id(
    out: bytearray, partition: TopicIdPartition, raw_id: bytes, partition_tags: TaggedFields, id_tags: TaggedFields
) -> None:
    _append_partition(out, partition, partition_tags)
    out += raw_id
    _append_tagged_fields(out, id_tags)


def _hex_summary(value: bytes | None) -> str:
    if value is None:
        return "no bytes"
    more = "..." if len(value) > _MAX_BYTES_SHOWN else ""
    return f"{len(value)} bytes: {value[:_MAX_BYTES_SHOWN].hex()}{more}"
