"""What a consumer gets: messages with the methods of confluent_kafka.Message, made when they are handed out and not before.

Inside, records travel as a RecordBlock: columns of numbers, and keys and values one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np

from compactor.consumer.gather import HeaderSlices, Selection, Slices, header_slices, slices
from compactor.model.ids import TopicPartition
from compactor.records.batches import LOG_APPEND, Int64s
from compactor.records.rows import HAS_HEADERS, Int32s

OFFSET_BEGINNING: Final = -2
OFFSET_END: Final = -1
OFFSET_INVALID: Final = -1001
"""Logical offsets, as confluent_kafka has them."""

TIMESTAMP_NOT_AVAILABLE: Final = 0
TIMESTAMP_CREATE_TIME: Final = 1
TIMESTAMP_LOG_APPEND_TIME: Final = 2
"""Types of timestamps, as confluent_kafka has them."""

Headers = list[tuple[str, bytes | None]]
Text = str
"""What an error's method ``str`` gives."""


class Place(NamedTuple):
    """An offset in a partition: what is assigned, sought and asked for. confluent_kafka.TopicPartition is taken in its stead."""

    topic: str
    partition: int
    offset: int = OFFSET_INVALID

    @property
    def name(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class PlaceLike(Protocol):
    """Place, or confluent_kafka.TopicPartition."""

    @property
    def topic(self) -> str: ...

    @property
    def partition(self) -> int: ...

    @property
    def offset(self) -> int: ...


class ErrorLike(Protocol):
    """LogError, or confluent_kafka.KafkaError."""

    def code(self) -> int: ...

    def name(self) -> Text: ...

    def str(self) -> Text: ...

    def retriable(self) -> bool: ...

    def fatal(self) -> bool: ...


class MessageLike(Protocol):
    """What ``poll`` gives: TierMessage for what comes from the tier, confluent_kafka.Message for what comes from a broker."""

    def error(self) -> ErrorLike | None: ...

    def topic(self) -> str | None: ...

    def partition(self) -> int | None: ...

    def offset(self) -> int | None: ...

    def key(self) -> bytes | None: ...

    def value(self) -> bytes | None: ...

    def headers(self) -> Headers | None: ...

    def timestamp(self) -> tuple[int, int]: ...

    def leader_epoch(self) -> int | None: ...


class LogError:
    """Why a partition does not go on at present; it is tried again. Codes and names are Kafka's."""

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

    def __str__(self) -> Text:
        return f"{self._name}: {self._text}"


def out_of_range(text: str) -> LogError:
    return LogError(1, "OFFSET_OUT_OF_RANGE", text)


class TierMessage:
    """One record, or an error of one partition."""

    __slots__ = ("_epoch", "_error", "_headers", "_key", "_offset", "_partition", "_timestamp", "_topic", "_value")

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None = None,
        value: bytes | None = None,
        headers: Headers | None = None,
        timestamp: tuple[int, int] = (TIMESTAMP_NOT_AVAILABLE, 0),
        epoch: int | None = None,
        error: LogError | None = None,
    ) -> None:
        self._topic, self._partition, self._offset = topic, partition, offset
        self._key, self._value, self._headers = key, value, headers
        self._timestamp, self._epoch, self._error = timestamp, epoch, error

    def error(self) -> LogError | None:
        """None for a record. With an error, there is no key and no value."""
        return self._error

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        """None: a tombstone."""
        return self._value

    def headers(self) -> Headers | None:
        """None where the record has none."""
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        """Its type (TIMESTAMP_CREATE_TIME ...) and milliseconds."""
        return self._timestamp

    def leader_epoch(self) -> int | None:
        return self._epoch


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Records of one partition, ascending by offset, copied out of what was read. All columns have one length.

    ``timestamp_type`` as above; ``leader_epoch`` is -1 where it is not known; ``headers`` None: no record has any.
    """

    name: TopicPartition
    offset: Int64s
    timestamp: Int64s
    timestamp_type: Int32s
    leader_epoch: Int32s
    keys: Slices
    values: Slices
    headers: HeaderSlices | None

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def nbytes(self) -> int:
        """What it takes in memory, about."""
        inside = len(self.headers.names.data) + len(self.headers.values.data) if self.headers else 0
        return len(self.keys.data) + len(self.values.data) + inside + 40 * len(self.offset)

    def messages(self) -> Iterator[TierMessage]:
        topic, partition = self.name
        kinds, times = self.timestamp_type.tolist(), self.timestamp.tolist()
        headers = _headers(self.headers) if self.headers else None
        rows = zip(self.offset.tolist(), strings(self.keys), strings(self.values), kinds, times, self.leader_epoch.tolist(), strict=True)
        for row, (offset, key, value, kind, time, epoch) in enumerate(rows):
            yield TierMessage(
                topic, partition, offset, key, value, headers[row] if headers else None, (kind, time), None if epoch < 0 else epoch
            )


def block_of(name: TopicPartition, selection: Selection) -> RecordBlock:
    """Copies the picked rows: what they were parsed from may be used again."""
    rows, picked, table, buf = selection.rows, selection.picked, selection.table, selection.chunk.buf
    some = slice(selection.chunk.first, selection.chunk.last)
    kinds = np.where(table.attributes[some] & np.int16(LOG_APPEND), TIMESTAMP_LOG_APPEND_TIME, TIMESTAMP_CREATE_TIME)
    kinds[table.magic[some] == 0] = TIMESTAMP_NOT_AVAILABLE
    return RecordBlock(
        name,
        rows.offset[picked],
        rows.timestamp[picked],
        selection.per_batch(kinds.astype(np.int32)),
        selection.per_batch(table.leader_epoch[some]),
        slices(buf, rows.key_start, rows.key_length, picked),
        slices(buf, rows.value_start, rows.value_length, picked),
        header_slices(selection) if (rows.flags[picked] & HAS_HEADERS).any() else None,
    )


def strings(found: Slices) -> Iterator[bytes | None]:
    """Each of them as an object of its own."""
    data, places = found.data.tobytes(), pairwise(found.begins.tolist())
    if found.valid.all():
        for begin, end in places:
            yield data[begin:end]
    else:
        for (begin, end), valid in zip(places, found.valid.tolist(), strict=True):
            yield data[begin:end] if valid else None


def _headers(found: HeaderSlices) -> list[Headers | None]:
    """Kafka reads their names as UTF-8, with replacement characters."""
    pairs = [
        ((name or b"").decode("utf-8", "replace"), value) for name, value in zip(strings(found.names), strings(found.values), strict=True)
    ]
    return [pairs[begin:end] or None for begin, end in pairwise(found.begins.tolist())]
