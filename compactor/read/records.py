"""Records as columns (RecordBlock), and as messages of a consumer with the methods of confluent_kafka.Message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, repeat
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from compactor.kernels.common import Flags
from compactor.kernels.jit import kernel
from compactor.kernels.memory import copy_bytes, read_varint
from compactor.model.ids import TopicPartition
from compactor.records.batches import LOG_APPEND, BatchTable, Bytes, Int64s
from compactor.records.rows import HAS_HEADERS, BatchChunk, Int32s, RecordRows

# ---- copies of keys, values and headers from a parsed chunk: no Python object per record ---------------------------------------


@dataclass(frozen=True)
class SelectedRecords:
    """Records selected from one parsed chunk.
    first_row: of each batch; one more entry for the end of the last.
    picked: selected rows, ascending.
    """

    table: BatchTable
    chunk: BatchChunk
    rows: RecordRows
    first_row: Int64s
    picked: Int64s

    def __len__(self) -> int:
        return len(self.picked)

    def repeat_per_record(self, values_by_batch: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """For each selected row the value of its batch."""
        return values_by_batch[np.searchsorted(self.first_row, self.picked, side="right") - 1]


@dataclass(frozen=True, slots=True)
class ConcatenatedByteStrings:
    """Byte string number i is ``data[begins[i]:begins[i + 1]]``, or null unless ``valid[i]``."""

    begins: Int32s
    valid: Flags
    data: Bytes

    def __len__(self) -> int:
        return len(self.valid)


@dataclass(frozen=True, slots=True)
class RecordHeaderArrays:
    """Headers: those of record i have the indexes ``begins[i]`` to ``begins[i + 1]`` (exclusive)."""

    begins: Int32s
    names: ConcatenatedByteStrings
    values: ConcatenatedByteStrings


def copy_byte_strings(buf: Bytes, start: Int64s, length: Int32s, selected_rows: Int64s) -> ConcatenatedByteStrings:
    """A negative length is null."""
    begins = np.empty(len(selected_rows) + 1, np.int32)
    valid = np.empty(len(selected_rows), np.bool_)
    data = np.empty(_compute_byte_string_offsets(length, selected_rows, begins, valid), np.uint8)
    _copy_selected_byte_strings(buf, start, selected_rows, begins, data)
    return ConcatenatedByteStrings(begins, valid, data)


def copy_record_headers(selection: SelectedRecords) -> RecordHeaderArrays:
    rows, picked, buf = selection.rows, selection.picked, selection.chunk.buf
    begins = np.empty(len(picked) + 1, np.int32)
    total = _count_headers_of_rows(buf, rows.value_start, rows.value_length, rows.end, rows.flags, picked, begins)
    places = np.empty((4, total), np.int64)
    _locate_headers_of_rows(buf, rows.value_start, rows.value_length, rows.end, picked, begins, places)
    every = np.arange(total)
    name_start, name_length, value_start, value_length = places
    names = copy_byte_strings(buf, name_start, name_length.astype(np.int32), every)
    return RecordHeaderArrays(begins, names, copy_byte_strings(buf, value_start, value_length.astype(np.int32), every))


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _compute_byte_string_offsets(length: Int32s, selected_rows: Int64s, out_offsets: Int32s, out_valid: Flags) -> int:
    """Offsets: starts, and the end of the last string. Return their total length. A negative
    length is null.
    """
    at = 0
    for i in range(selected_rows.size):
        out_offsets[i] = at
        size = length[selected_rows[i]]
        out_valid[i] = size >= 0
        if size > 0:
            at += size
    out_offsets[selected_rows.size] = at
    return at


@kernel
def _copy_selected_byte_strings(buf: Bytes, start: Int64s, selected_rows: Int64s, offsets: Int32s, out_data: Bytes) -> None:
    for i in range(selected_rows.size):
        copy_bytes(out_data, np.int64(offsets[i]), buf, start[selected_rows[i]], np.int64(offsets[i + 1]) - np.int64(offsets[i]))


@kernel
def _count_headers_of_rows(
    buf: Bytes,
    value_start: Int64s,
    value_length: Int32s,
    end: Int64s,
    flags: npt.NDArray[np.uint8],
    selected_rows: Int64s,
    out_first_header: Int32s,
) -> int:
    """Headers follow the value, in rows with HAS_HEADERS.
    :param out_first_header: per selected row the number of headers before it, at last of all.
    """
    total = 0
    for i in range(selected_rows.size):
        out_first_header[i] = total
        row = selected_rows[i]
        if flags[row] & HAS_HEADERS:
            count, _ = read_varint(buf, value_start[row] + max(value_length[row], 0), end[row])
            total += count
    out_first_header[selected_rows.size] = total
    return total


@kernel
def _locate_headers_of_rows(
    buf: Bytes, value_start: Int64s, value_length: Int32s, end: Int64s, selected_rows: Int64s, first_header: Int32s, out_positions: Int64s
) -> None:
    """Fill ``out_positions`` with four lines: name start, name length, value start and value length of each header. Lengths below 0 mean
    null.
    """
    for i in range(selected_rows.size):
        if first_header[i] == first_header[i + 1]:
            continue
        row = selected_rows[i]
        _, at = read_varint(buf, value_start[row] + max(value_length[row], 0), end[row])
        for header in range(first_header[i], first_header[i + 1]):
            for part in range(0, 4, 2):
                length, at = read_varint(buf, at, end[row])
                out_positions[part, header] = at
                out_positions[part + 1, header] = length
                at += max(length, 0)


OFFSET_BEGINNING: Final = -2
OFFSET_END: Final = -1
OFFSET_INVALID: Final = -1001
"""Logical offsets, as confluent_kafka has them."""

TIMESTAMP_NOT_AVAILABLE: Final = 0
TIMESTAMP_CREATE_TIME: Final = 1
TIMESTAMP_LOG_APPEND_TIME: Final = 2
"""Types of timestamps, as confluent_kafka has them."""

REPR_BYTES: Final = 60
"""Largest number of bytes of a key or value in the text of a message."""

TimestampTypeAndMs = tuple[int, int]
"""One of the TIMESTAMP_ constants, and milliseconds since 1970."""
MessageHeaders = list[tuple[str, bytes | None]]
ConfluentClient = Any
"""A confluent_kafka.Consumer. The package ships no types."""
ConfluentPosition = Any
"""A confluent_kafka.TopicPartition."""
ConfluentError = Any
"""A confluent_kafka.KafkaError."""
ConfluentMessage = Any
"""A confluent_kafka.Message."""
Text = str
"""The type ``str``, where a class has a method of that name."""


class _TopicPartitionOffsetTuple(NamedTuple):
    topic: str
    partition: int
    offset: int


class Place(_TopicPartitionOffsetTuple):
    """Position in a partition: a tuple of topic, partition and offset.
    leader_epoch: of the record before ``offset``; None if unknown.
    topic_id: empty if unknown.
    Epoch and topic id are no part of the tuple: positions are equal if topic, partition and offset are.
    """

    leader_epoch: int | None = None
    topic_id: str = ""

    def __new__(cls, topic: str, partition: int, offset: int = OFFSET_INVALID, leader_epoch: int | None = None, topic_id: str = "") -> Self:
        place = super().__new__(cls, topic, partition, offset)
        place.leader_epoch, place.topic_id = leader_epoch, topic_id
        return place

    @override
    def __repr__(self) -> str:
        return f"Place({self.topic!r}, {self.partition}, {self.offset}, leader_epoch={self.leader_epoch}, topic_id={self.topic_id!r})"

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class HasTopicPartitionAndOffset(Protocol):
    """A position in a partition: this module's Place, or a confluent_kafka.TopicPartition."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int:
        """A logical offset such as OFFSET_END is possible."""


class PartitionReadError:
    """Error inside a message. Codes and names are Kafka's."""

    __slots__ = ("_code", "_name", "_text")

    def __init__(self, code: int, name: Text, text: Text) -> None:
        self._code, self._name, self._text = code, name, text

    def code(self) -> int:
        return self._code

    def name(self) -> Text:
        return self._name

    def str(self) -> Text:
        return self._text

    def retriable(self) -> bool:
        return True

    def fatal(self) -> bool:
        return False

    @override
    def __str__(self) -> Text:
        return f"{self._name}: {self._text}"


def out_of_range_error(reason: str) -> PartitionReadError:
    """For a position that neither tier nor broker holds, or of another topic."""
    return PartitionReadError(1, "OFFSET_OUT_OF_RANGE", reason)


def log_truncation_error(reason: str) -> PartitionReadError:
    """For a log whose end was discarded after it had been read."""
    return PartitionReadError(-139, "_LOG_TRUNCATION", reason)


def no_committed_offset_error(reason: str) -> PartitionReadError:
    """For a partition without committed offset while ``auto.offset.reset`` is ``error``."""
    return PartitionReadError(-168, "_NO_OFFSET", reason)


class TierMessage(tuple[Any, ...]):
    """Message of a consumer: a record of the tier, or an error of a partition."""

    __slots__ = ()

    # A tuple can be made by the thousand without calling Python code: see RecordBlock.messages.
    def __new__(
        cls,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None = None,
        value: bytes | None = None,
        headers: MessageHeaders | None = None,
        timestamp: tuple[int, int] = (TIMESTAMP_NOT_AVAILABLE, 0),
        epoch: int | None = None,
        error: PartitionReadError | None = None,
        topic_id: str = "",
    ) -> Self:
        return super().__new__(cls, (topic, partition, offset, key, value, headers, timestamp, epoch, error, topic_id))

    @override
    def __repr__(self) -> str:
        return _describe_message(self)

    def error(self) -> PartitionReadError | None:
        """Error without key and value; None for a record."""
        return self[8]  # type: ignore[no-any-return]

    def topic(self) -> str:
        return self[0]  # type: ignore[no-any-return]

    def partition(self) -> int:
        return self[1]  # type: ignore[no-any-return]

    def offset(self) -> int:
        return self[2]  # type: ignore[no-any-return]

    def key(self) -> bytes | None:
        return self[3]  # type: ignore[no-any-return]

    def value(self) -> bytes | None:
        """Value; None for a tombstone."""
        return self[4]  # type: ignore[no-any-return]

    def headers(self) -> MessageHeaders | None:
        """Headers; None if the record has none."""
        return self[5]  # type: ignore[no-any-return]

    def timestamp(self) -> TimestampTypeAndMs:
        """A TIMESTAMP_ constant and milliseconds."""
        return self[6]  # type: ignore[no-any-return]

    def leader_epoch(self) -> int | None:
        return self[7]  # type: ignore[no-any-return]

    def topic_id(self) -> str:
        """Empty if unknown."""
        return self[9]  # type: ignore[no-any-return]


class BrokerMessage(tuple[Any, str]):
    """A confluent-kafka message together with its topic's id."""

    __slots__ = ()

    @override
    def __repr__(self) -> str:
        return _describe_message(self)

    def error(self) -> ConfluentError | None:
        """A confluent_kafka.KafkaError; None for a record."""
        return self[0].error()

    def offset(self) -> int:
        return self[0].offset()  # type: ignore[no-any-return]

    def key(self) -> bytes | None:
        return self[0].key()  # type: ignore[no-any-return]

    def value(self) -> bytes | None:
        """Value; None for a tombstone."""
        return self[0].value()  # type: ignore[no-any-return]

    def topic_id(self) -> str:
        """Empty if unknown."""
        return self[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self[0], name)


MessageLike = TierMessage | BrokerMessage
"""Message returned by ``poll``: a TierMessage for records of the tier, a BrokerMessage for records of a broker."""


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Records of one partition, ascending by offset.
    timestamp_type: TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME or TIMESTAMP_NOT_AVAILABLE.
    leader_epoch: -1 if unknown.
    headers: None if no record has any.
    topic_id: empty if unknown.
    """

    partition: TopicPartition
    offset: Int64s
    timestamp: Int64s
    timestamp_type: Int32s
    leader_epoch: Int32s
    keys: ConcatenatedByteStrings
    values: ConcatenatedByteStrings
    headers: RecordHeaderArrays | None
    topic_id: str = ""

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def nbytes(self) -> int:
        """Approximate size in memory."""
        inside = len(self.headers.names.data) + len(self.headers.values.data) if self.headers else 0
        return len(self.keys.data) + len(self.values.data) + inside + 40 * len(self.offset)

    def messages(self) -> Iterator[TierMessage]:
        topic, partition = self.partition
        epochs = self.leader_epoch.tolist()
        if len(epochs) and self.leader_epoch.min() < 0:
            epochs = [None if epoch < 0 else epoch for epoch in epochs]
        rows = zip(
            repeat(topic),
            repeat(partition),
            self.offset.tolist(),
            iterate_byte_strings(self.keys),
            iterate_byte_strings(self.values),
            _headers_by_record(self.headers) if self.headers else repeat(None),
            zip(self.timestamp_type.tolist(), self.timestamp.tolist(), strict=True),
            epochs,
            repeat(None),
            repeat(self.topic_id),
            strict=False,
        )
        return map(tuple.__new__, repeat(TierMessage), rows)


def to_broker_messages(messages: Iterable[ConfluentMessage], topic_id: str) -> Iterator[BrokerMessage]:
    return map(tuple.__new__, repeat(BrokerMessage), zip(messages, repeat(topic_id), strict=False))


def _describe_message(message: MessageLike) -> str:
    error, where = message.error(), f"{message.topic()}-{message.partition()}@{message.offset()}"
    if error is not None:  # one that concerns the whole group has no topic
        return f"<message {where} error={error}>" if message.topic() else f"<message error={error}>"
    key, value = _shortened_text_of_bytes(message.key()), _shortened_text_of_bytes(message.value())
    return f"<message {where} key={key} value={value} timestamp={message.timestamp()[1]}>"


def _shortened_text_of_bytes(data: bytes | None) -> str:
    if data is None or len(data) <= REPR_BYTES:
        return repr(data)
    return f"{data[:REPR_BYTES]!r}... ({len(data)} bytes)"


def copy_to_record_block(partition: TopicPartition, selection: SelectedRecords, topic_id: str = "") -> RecordBlock:
    """The copy is independent of the buffers that the rows were parsed from."""
    rows, picked, table, buf = selection.rows, selection.picked, selection.table, selection.chunk.buf
    some = slice(selection.chunk.first, selection.chunk.last)
    kinds = np.where(table.attributes[some] & np.int16(LOG_APPEND), TIMESTAMP_LOG_APPEND_TIME, TIMESTAMP_CREATE_TIME)
    kinds[table.magic[some] == 0] = TIMESTAMP_NOT_AVAILABLE
    return RecordBlock(
        partition,
        rows.offset[picked],
        rows.timestamp[picked],
        selection.repeat_per_record(kinds.astype(np.int32)),
        selection.repeat_per_record(table.leader_epoch[some]),
        copy_byte_strings(buf, rows.key_start, rows.key_length, picked),
        copy_byte_strings(buf, rows.value_start, rows.value_length, picked),
        copy_record_headers(selection) if (rows.flags[picked] & HAS_HEADERS).any() else None,
        topic_id,
    )


def iterate_byte_strings(strings: ConcatenatedByteStrings) -> Iterator[bytes | None]:
    """Yield None for null."""
    data, places = strings.data.tobytes(), strings.begins.tolist()
    contents = map(data.__getitem__, map(slice, places, islice(places, 1, None)))
    if strings.valid.all():
        return contents
    return (content if valid else None for content, valid in zip(contents, strings.valid.tolist(), strict=True))


def _headers_by_record(headers: RecordHeaderArrays) -> list[MessageHeaders | None]:
    """Replace bytes of a name that are not valid UTF-8, as Kafka does."""
    pairs = [
        ((name or b"").decode("utf-8", "replace"), value)
        for name, value in zip(iterate_byte_strings(headers.names), iterate_byte_strings(headers.values), strict=True)
    ]
    return [pairs[begin:end] or None for begin, end in pairwise(headers.begins.tolist())]
