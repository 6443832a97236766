"""Records as Arrow columns, made from offsets and buffers: no Python object per record.

``select`` keeps rows of a parsed chunk; each column is gathered from the chunk's byte array by one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bloom.jit import kernel
from compactor.kernels.memory import copy_bytes, read_varint
from compactor.records.batches import LOG_APPEND, BatchTable, Bytes, Int64s
from compactor.records.rows import HAS_HEADERS, Chunk, Int32s, Rows

Flags = npt.NDArray[np.bool_]

NO_TIMESTAMP: Final = -1
LATEST_MS: Final = (2**63 - 1) // 1000
"""Spark counts microseconds: what lies beyond year 294247 is shown as that (clients have been seen to write such times)."""

COLUMNS: Final = ("key", "value", "headers", "topic", "partition", "offset", "timestamp", "timestampType", "leaderEpoch")
DDL: Final = {
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "leaderEpoch": "int",
}
"""The columns of Spark's own Kafka source, and the leader epoch."""


@dataclass(frozen=True)
class Selection:
    """Rows ``picked`` (ascending) of one parsed chunk; ``first_row`` as ``parse`` gives it."""

    table: BatchTable
    chunk: Chunk
    rows: Rows
    first_row: Int64s
    picked: Int64s

    def __len__(self) -> int:
        return len(self.picked)

    def per_batch(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A column of the batch table (already cut to the chunk), one value for each picked row."""
        return values[np.searchsorted(self.first_row, self.picked, side="right") - 1]


def batch_of(selection: Selection, topic: str, partition: int, schema: pa.Schema) -> pa.RecordBatch:
    """The selection as an Arrow batch with exactly the columns of ``schema``."""
    return pa.RecordBatch.from_arrays([_column(selection, field, topic, partition) for field in schema], schema=schema)


def _column(selection: Selection, field: pa.Field, topic: str, partition: int) -> pa.Array:
    rows, picked, table = selection.rows, selection.picked, selection.table
    some = slice(selection.chunk.first, selection.chunk.last)
    match field.name:
        case "key":
            return binary(selection.chunk.buf, rows.key_start, rows.key_length, picked)
        case "value":
            return binary(selection.chunk.buf, rows.value_start, rows.value_length, picked)
        case "headers":
            return _headers(selection, field.type)
        case "topic":
            return pa.repeat(pa.scalar(topic, pa.string()), len(picked))
        case "partition":
            return pa.array(np.full(len(picked), partition, np.int32))
        case "offset":
            return pa.array(rows.offset[picked])
        case "timestamp":
            given = rows.timestamp[picked]
            micros = np.clip(given, -LATEST_MS, LATEST_MS) * 1000
            return pa.array(micros, mask=given == NO_TIMESTAMP).cast(field.type)
        case "timestampType":
            kinds = ((table.attributes[some] & np.int16(LOG_APPEND)) != 0).astype(np.int32)
            kinds[table.magic[some] == 0] = -1
            return pa.array(selection.per_batch(kinds))
        case "leaderEpoch":
            epochs = selection.per_batch(table.leader_epoch[some])
            return pa.array(epochs, mask=epochs < 0)
    raise ValueError(f"no column {field.name}")


def binary(buf: Bytes, start: Int64s, length: Int32s, picked: Int64s) -> pa.Array:
    """Slices of ``buf`` as a binary column; a negative length is null."""
    offsets = np.empty(len(picked) + 1, np.int32)
    valid = np.empty(len(picked), np.bool_)
    size = _offsets(length, picked, offsets, valid)
    data = np.empty(size, np.uint8)
    _gather(buf, start, picked, offsets, data)
    return _from_parts(pa.binary(), offsets, valid, pa.py_buffer(data))


def _from_parts(kind: pa.DataType, offsets: Int32s, valid: Flags, data: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(kind, len(valid), [_validity(valid), pa.py_buffer(offsets), data])


def _validity(valid: Flags) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _headers(selection: Selection, kind: pa.DataType) -> pa.Array:
    """As in Spark's own Kafka source: null where a record has none."""
    rows, picked, buf = selection.rows, selection.picked, selection.chunk.buf
    begins = np.empty(len(picked) + 1, np.int32)
    total = _count_headers(buf, rows.value_start, rows.value_length, rows.end, rows.flags, picked, begins)
    places = np.empty((4, total), np.int64)
    _find_headers(buf, rows.value_start, rows.value_length, rows.end, picked, begins, places)
    every = np.arange(total)
    key_start, key_length, value_start, value_length = places
    names = binary(buf, key_start, key_length.astype(np.int32), every)
    values = binary(buf, value_start, value_length.astype(np.int32), every)
    struct_type = kind.value_type
    entries = pa.StructArray.from_arrays([_text(names), values], fields=list(struct_type))
    return pa.Array.from_buffers(kind, len(picked), [_validity(np.diff(begins) > 0), pa.py_buffer(begins)], children=[entries])


def _text(names: pa.Array) -> pa.Array:
    """Kafka reads header names as UTF-8 with replacement characters; Arrow takes nothing that is not UTF-8."""
    try:
        text = names.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([name.decode("utf-8", "replace") for name in names.to_pylist()], pa.string())
    return text


# ---- kernels ----------------------------------------------------------------------------------------------------------------


@kernel
def _offsets(length: Int32s, picked: Int64s, offsets: Int32s, valid: Flags) -> int:
    at = 0
    for i in range(picked.size):
        offsets[i] = at
        size = length[picked[i]]
        valid[i] = size >= 0
        if size > 0:
            at += size
    offsets[picked.size] = at
    return at


@kernel
def _gather(buf: Bytes, start: Int64s, picked: Int64s, offsets: Int32s, data: Bytes) -> None:
    for i in range(picked.size):
        copy_bytes(data, np.int64(offsets[i]), buf, start[picked[i]], np.int64(offsets[i + 1]) - np.int64(offsets[i]))


@kernel
def _count_headers(
    buf: Bytes, value_start: Int64s, value_length: Int32s, end: Int64s, flags: npt.NDArray[np.uint8], picked: Int64s, begins: Int32s
) -> int:
    total = 0
    for i in range(picked.size):
        begins[i] = total
        row = picked[i]
        if flags[row] & HAS_HEADERS:
            count, _ = read_varint(buf, value_start[row] + max(value_length[row], 0), end[row])
            total += count
    begins[picked.size] = total
    return total


@kernel
def _find_headers(
    buf: Bytes, value_start: Int64s, value_length: Int32s, end: Int64s, picked: Int64s, begins: Int32s, places: Int64s
) -> None:
    """``places``: rows of key start, key length, value start, value length; ``parse`` has checked all of them."""
    for i in range(picked.size):
        if begins[i] == begins[i + 1]:
            continue
        row = picked[i]
        _, at = read_varint(buf, value_start[row] + max(value_length[row], 0), end[row])
        for header in range(begins[i], begins[i + 1]):
            for part in range(0, 4, 2):
                length, at = read_varint(buf, at, end[row])
                places[part, header] = at
                places[part + 1, header] = length
                at += max(length, 0)
