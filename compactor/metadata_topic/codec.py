"""The values of ``__remote_log_metadata``: bytes to frozen records and back (Kafka's RemoteLogMetadataSerde and its message schemas).

A value is three unsigned varints (frame version 1, api key, version 0), then one message in Kafka's flexible encoding; nothing follows.
Tagged fields that are not known here are carried through, so what was decoded encodes to the same bytes (Kafka writes the shortest
varints, and TxnIndexEmpty only where it is true). What a broker's consumer would stop at raises BadData: it names the topic's offset,
the position within the value, and the bytes.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from checkpoint.lineage import EpochEntry
from compactor.errors import BadData
from compactor.model.ids import TopicPartition, segment_id
from compactor.model.segment import SegmentState

TOPIC = "__remote_log_metadata"
SEGMENT_METADATA, SEGMENT_UPDATE, PARTITION_DELETE, SEGMENT_SNAPSHOT = 0, 1, 2, 3
_FRAME_VERSION, _VERSION = 1, 0
_TXN_INDEX_EMPTY = 0
_SHOWN_BYTES = 64
_STATES = tuple(SegmentState)
_STATE_IDS = {state: number for number, state in enumerate(_STATES)}
_WHERE = struct.Struct(">qqiqq")
_EPOCH = struct.Struct(">iq")
_UPDATE = struct.Struct(">iq")

Tags = tuple[tuple[int, bytes], ...]
"""Tagged fields in their order: number and bytes."""


class PartitionDeleteState(StrEnum):
    """Kafka's RemotePartitionDeleteState."""

    DELETE_PARTITION_MARKED = "DELETE_PARTITION_MARKED"
    DELETE_PARTITION_STARTED = "DELETE_PARTITION_STARTED"
    DELETE_PARTITION_FINISHED = "DELETE_PARTITION_FINISHED"


_DELETE_STATES = tuple(PartitionDeleteState)
_DELETE_STATE_IDS = {state: number for number, state in enumerate(_DELETE_STATES)}


class TopicIdPartition(NamedTuple):
    """Kafka's TopicIdPartition. ``topic_id``: 16 bytes."""

    topic_id: bytes
    topic: str
    partition: int

    @property
    def name(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{uuid_text(self.topic_id)}:{self.topic}-{self.partition}"


class RemoteLogSegmentMetadataRecord(NamedTuple):
    """Introduces a segment (api 0); the fold keeps its later states in the same form.

    ``segment_id``: 16 bytes. ``end_offset`` is inclusive. ``leader_epochs`` as written: one entry at least. ``nested``: unknown tagged
    fields of TopicIdPartition, RemoteLogSegmentId and every epoch, in this order; empty where none has any.
    """

    partition: TopicIdPartition
    segment_id: bytes
    start_offset: int
    end_offset: int
    broker_id: int
    max_timestamp_ms: int
    event_timestamp_ms: int
    leader_epochs: tuple[EpochEntry, ...]
    size_bytes: int
    custom_metadata: bytes | None = None
    state: SegmentState = SegmentState.COPY_SEGMENT_STARTED
    txn_index_empty: bool = False
    tags: Tags = ()
    nested: tuple[Tags, ...] = ()

    @property
    def id(self) -> str:
        """As Kafka prints it: 22 characters of URL-safe base64."""
        return segment_id(self.segment_id)

    def updated(self, update: RemoteLogSegmentMetadataUpdateRecord) -> RemoteLogSegmentMetadataRecord:
        """RemoteLogSegmentMetadata.createWithUpdates: custom metadata is replaced, by nothing too."""
        return self._replace(
            broker_id=update.broker_id,
            event_timestamp_ms=update.event_timestamp_ms,
            custom_metadata=update.custom_metadata,
            state=update.state,
        )


class RemoteLogSegmentMetadataUpdateRecord(NamedTuple):
    """A segment's next state (api 1)."""

    partition: TopicIdPartition
    segment_id: bytes
    broker_id: int
    event_timestamp_ms: int
    state: SegmentState
    custom_metadata: bytes | None = None
    tags: Tags = ()
    nested: tuple[Tags, ...] = ()

    @property
    def id(self) -> str:
        return segment_id(self.segment_id)


class RemotePartitionDeleteMetadataRecord(NamedTuple):
    """A partition's tier is being deleted (api 2)."""

    partition: TopicIdPartition
    broker_id: int
    event_timestamp_ms: int
    state: PartitionDeleteState
    tags: Tags = ()
    nested: tuple[Tags, ...] = ()


MetadataRecord = RemoteLogSegmentMetadataRecord | RemoteLogSegmentMetadataUpdateRecord | RemotePartitionDeleteMetadataRecord


def uuid_text(raw: bytes) -> str:
    """Kafka's Uuid.toString."""
    return segment_id(raw)


def uuid_bytes(text: str) -> bytes:
    """Kafka's Uuid.fromString. Raises ValueError."""
    raw = base64.urlsafe_b64decode(text + "==")
    if len(raw) != 16:
        raise ValueError(f"{text!r} is not an id")
    return raw


def decode(value: bytes | None, *, offset: int = -1, topic: str = TOPIC) -> MetadataRecord:
    """One record's value. ``offset`` and ``topic`` are for messages. Raises BadData."""
    try:
        return _decode(value)
    except _Unfit as error:
        cause, position = error.cause, error.position
    except (IndexError, struct.error):
        cause, position = "it is cut short", len(value or b"")
    raise BadData(
        f"{cause} ({_shown(value)})",
        segment=topic,
        position=position,
        offset=offset,
        hint="Brokers stop reading the topic at such a record, and again at every restart",
    )


def encode(record: MetadataRecord) -> bytes:
    """The value to write. Raises ValueError for what decode would refuse."""
    if isinstance(record, RemoteLogSegmentMetadataRecord):
        if record.state is not SegmentState.COPY_SEGMENT_STARTED:
            raise ValueError("a segment is introduced in COPY_SEGMENT_STARTED")
        if problem := _problem(record):
            raise ValueError(problem)
        return bytes((_FRAME_VERSION, SEGMENT_METADATA, _VERSION)) + pack_segment(record)
    nested = iter(record.nested)
    out = bytearray((_FRAME_VERSION, SEGMENT_UPDATE, _VERSION))
    if isinstance(record, RemoteLogSegmentMetadataUpdateRecord):
        _put_segment_id(out, record.partition, record.segment_id, next(nested, ()), next(nested, ()))
        out += _UPDATE.pack(record.broker_id, record.event_timestamp_ms)
        _put_bytes(out, record.custom_metadata)
        out.append(_STATE_IDS[record.state])
    else:
        out[1] = PARTITION_DELETE
        _put_partition(out, record.partition, next(nested, ()))
        out += _UPDATE.pack(record.broker_id, record.event_timestamp_ms)
        out.append(_DELETE_STATE_IDS[record.state])
    _put_tags(out, record.tags)
    return bytes(out)


def pack_segment(record: RemoteLogSegmentMetadataRecord) -> bytes:
    """A segment in any state, without the frame: for what is kept elsewhere, never for the topic."""
    nested = iter(record.nested)
    out = bytearray()
    _put_segment_id(out, record.partition, record.segment_id, next(nested, ()), next(nested, ()))
    out += _WHERE.pack(record.start_offset, record.end_offset, record.broker_id, record.max_timestamp_ms, record.event_timestamp_ms)
    _put_varint(out, len(record.leader_epochs) + 1)
    for entry in record.leader_epochs:
        out += _EPOCH.pack(entry.epoch, entry.start_offset)
        _put_tags(out, next(nested, ()))
    out += struct.pack(">i", record.size_bytes)
    _put_bytes(out, record.custom_metadata)
    out.append(_STATE_IDS[record.state])
    tags = ((_TXN_INDEX_EMPTY, b"\x01"), *record.tags) if record.txn_index_empty else record.tags
    _put_tags(out, tags)
    return bytes(out)


def unpack_segment(data: bytes, position: int = 0) -> tuple[RemoteLogSegmentMetadataRecord, int]:
    """What pack_segment wrote at this position, and where it ends. Raises ValueError, IndexError or struct.error."""
    partition, position, partition_tags = _partition(data, position)
    raw_id = _take(data, position, 16)
    id_tags, position = _tags(data, position + 16)
    start, end, broker, largest, event = _WHERE.unpack_from(data, position)
    count, position = _varint(data, position + _WHERE.size)
    epochs, nested = [], [partition_tags, id_tags]
    for _ in range(count - 1):
        epochs.append(EpochEntry(*_EPOCH.unpack_from(data, position)))
        tags, position = _tags(data, position + _EPOCH.size)
        nested.append(tags)
    (size,) = struct.unpack_from(">i", data, position)
    custom, position = _bytes(data, position + 4)
    state = _state(data, position)
    tags, position = _tags(data, position + 1)
    empty = False
    if tags and tags[0][0] == _TXN_INDEX_EMPTY:
        if len(tags[0][1]) != 1:
            raise _Unfit("TxnIndexEmpty is not one byte", position)
        empty, tags = tags[0][1] != b"\0", tags[1:]
    kept = tuple(nested) if any(nested) else ()
    record = RemoteLogSegmentMetadataRecord(
        partition, raw_id, start, end, broker, largest, event, tuple(epochs), size, custom, state, empty, tags, kept
    )
    return record, position


class _Unfit(ValueError):
    def __init__(self, cause: str, position: int) -> None:
        super().__init__(cause)
        self.cause = cause
        self.position = position


def _decode(value: bytes | None) -> MetadataRecord:
    if value is None:
        raise _Unfit("the value is null", 0)
    frame, position = _varint(value, 0)
    if frame != _FRAME_VERSION:
        raise _Unfit(f"the frame's version is {frame}, not {_FRAME_VERSION}", 0)
    kind_at = position
    kind, position = _varint(value, position)
    if kind == SEGMENT_SNAPSHOT:
        raise _Unfit("a snapshot record (api 3) has no place in the topic", kind_at)
    if kind not in (SEGMENT_METADATA, SEGMENT_UPDATE, PARTITION_DELETE):
        raise _Unfit(f"unknown kind of record: api {kind}", kind_at)
    version, position = _varint(value, position)
    if version != _VERSION:
        raise _Unfit(f"api {kind} has version {version}, not {_VERSION}", position - 1)
    record: MetadataRecord
    if kind == SEGMENT_METADATA:
        record, position = unpack_segment(value, position)
        problem = _problem(record)
        if record.state is not SegmentState.COPY_SEGMENT_STARTED:
            problem = f"a segment is introduced in state {record.state}, not COPY_SEGMENT_STARTED"
        if problem:
            raise _Unfit(problem, position)
    elif kind == SEGMENT_UPDATE:
        record, position = _decode_update(value, position)
    else:
        record, position = _decode_delete(value, position)
    if position != len(value):
        raise _Unfit(f"{len(value) - position} bytes follow the message", position)
    return record


def _decode_update(data: bytes, position: int) -> tuple[RemoteLogSegmentMetadataUpdateRecord, int]:
    partition, position, partition_tags = _partition(data, position)
    raw_id = _take(data, position, 16)
    id_tags, position = _tags(data, position + 16)
    broker, event = _UPDATE.unpack_from(data, position)
    custom, position = _bytes(data, position + _UPDATE.size)
    state = _state(data, position)
    tags, position = _tags(data, position + 1)
    nested = (partition_tags, id_tags) if partition_tags or id_tags else ()
    return RemoteLogSegmentMetadataUpdateRecord(partition, raw_id, broker, event, state, custom, tags, nested), position


def _decode_delete(data: bytes, position: int) -> tuple[RemotePartitionDeleteMetadataRecord, int]:
    partition, position, partition_tags = _partition(data, position)
    broker, event = _UPDATE.unpack_from(data, position)
    position += _UPDATE.size
    number = data[position]
    if number >= len(_DELETE_STATES):
        raise _Unfit(f"unknown state {number} of a partition's deletion", position)
    tags, end = _tags(data, position + 1)
    nested = (partition_tags,) if partition_tags else ()
    return RemotePartitionDeleteMetadataRecord(partition, broker, event, _DELETE_STATES[number], tags, nested), end


def _problem(record: RemoteLogSegmentMetadataRecord) -> str:
    """What RemoteLogSegmentMetadata's constructor throws at."""
    if record.start_offset < 0:
        return f"the start offset is {record.start_offset}"
    if record.end_offset < record.start_offset:
        return f"the segment ends at {record.end_offset}, before it starts at {record.start_offset}"
    return "" if record.leader_epochs else "the segment has no leader epochs"


def _state(data: bytes, position: int) -> SegmentState:
    number = data[position]
    if number >= len(_STATES):
        raise _Unfit(f"unknown state {number} of a segment", position)
    return _STATES[number]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value, shift, start = byte & 0x7F, 7, position
    while byte & 0x80:
        position += 1
        if shift > 28:
            raise _Unfit("a varint is longer than five bytes", start)
        byte = data[position]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, position + 1


def _take(data: bytes, position: int, length: int) -> bytes:
    found = data[position : position + length]
    if len(found) != length:
        raise IndexError
    return found


def _bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    length, position = _varint(data, position)
    if not length:
        return None, position
    return _take(data, position, length - 1), position + length - 1


def _tags(data: bytes, position: int) -> tuple[Tags, int]:
    count, position = _varint(data, position)
    if not count:
        return (), position
    tags: list[tuple[int, bytes]] = []
    for _ in range(count):
        start = position
        tag, position = _varint(data, position)
        if tags and tag <= tags[-1][0]:
            raise _Unfit("tagged fields do not ascend", start)
        length, position = _varint(data, position)
        tags.append((tag, _take(data, position, length)))
        position += length
    return tuple(tags), position


def _partition(data: bytes, position: int) -> tuple[TopicIdPartition, int, Tags]:
    length, after = _varint(data, position)
    if length < 2:
        raise _Unfit("the topic has no name", position)
    end = after + length - 1 + 20
    try:
        partition = _named(_take(data, after, length - 1 + 20))
    except UnicodeDecodeError:
        raise _Unfit("the topic's name is not UTF-8", after) from None
    tags, end = _tags(data, end)
    return partition, end, tags


@lru_cache(maxsize=1 << 14)
def _named(raw: bytes) -> TopicIdPartition:
    """Shared by the records of a partition: there are many."""
    return TopicIdPartition(raw[-20:-4], raw[:-20].decode(), int.from_bytes(raw[-4:], "big", signed=True))


def _put_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_bytes(out: bytearray, data: bytes | None) -> None:
    if data is None:
        out.append(0)
        return
    _put_varint(out, len(data) + 1)
    out += data


def _put_tags(out: bytearray, tags: Iterable[tuple[int, bytes]]) -> None:
    listed = tuple(tags)
    _put_varint(out, len(listed))
    for tag, data in listed:
        _put_varint(out, tag)
        _put_varint(out, len(data))
        out += data


def _put_partition(out: bytearray, partition: TopicIdPartition, tags: Tags) -> None:
    _put_bytes(out, partition.topic.encode())
    out += partition.topic_id
    out += struct.pack(">i", partition.partition)
    _put_tags(out, tags)


def _put_segment_id(out: bytearray, partition: TopicIdPartition, raw_id: bytes, partition_tags: Tags, id_tags: Tags) -> None:
    _put_partition(out, partition, partition_tags)
    out += raw_id
    _put_tags(out, id_tags)


def _shown(value: bytes | None) -> str:
    if value is None:
        return "no bytes"
    more = "..." if len(value) > _SHOWN_BYTES else ""
    return f"{len(value)} bytes: {value[:_SHOWN_BYTES].hex()}{more}"
