"""Records as Arrow columns, made from offsets and buffers: no Python object per record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from compactor.constants import NO_TIMESTAMP
from compactor.errors import UsageError
from compactor.kernels.common import Flags
from compactor.read.records import ConcatenatedByteStrings, SelectedRecords, copy_byte_strings, copy_record_headers, iterate_byte_strings
from compactor.records.batches import LOG_APPEND

LATEST_MS: Final = (2**63 - 1) // 1000
"""Largest timestamp in a column, in milliseconds (year 294247): Spark counts microseconds, and some clients write larger ones."""

MESSAGE_COLUMNS: Final = ("key", "value", "headers", "topic", "partition", "offset", "timestamp", "timestampType", "leaderEpoch")
"""Column names: those of Spark's own Kafka source, and the leader epoch."""


TextFunction = Callable[[str, int, bytes | None], str | None]
"""Returns a decoded field: receives ``key`` or ``value``, the offset of the record and the bytes."""


def to_arrow_batch(
    selection: SelectedRecords, topic: str, partition: int, schema: pa.Schema, decode_text: TextFunction | None = None
) -> pa.RecordBatch:
    """Columns are exactly those of ``schema``.
    :param decode_text: needed only if ``schema`` has ``keyText`` or ``valueText``.
    """
    return pa.RecordBatch.from_arrays([_arrow_column(selection, field, topic, partition, decode_text) for field in schema], schema=schema)


def _arrow_column(selection: SelectedRecords, field: pa.Field, topic: str, partition: int, decode_text: TextFunction | None) -> pa.Array:
    rows, picked, table = selection.rows, selection.picked, selection.table
    some = slice(selection.chunk.first, selection.chunk.last)
    match field.name:
        case "key":
            return to_arrow_binary_column(copy_byte_strings(selection.chunk.buf, rows.key_start, rows.key_length, picked))
        case "value":
            return to_arrow_binary_column(copy_byte_strings(selection.chunk.buf, rows.value_start, rows.value_length, picked))
        case "headers":
            return _record_header_column(selection, field.type)
        case "topic":
            return pa.repeat(pa.scalar(topic, pa.string()), len(picked))
        case "partition":
            return pa.array(np.full(len(picked), partition, np.int32))
        case "offset":
            return pa.array(rows.offset[picked])
        case "timestamp":
            given = rows.timestamp[picked]
            micros = np.clip(given, -LATEST_MS, LATEST_MS) * 1000
            return pa.array(micros, pa.timestamp("us", "UTC"), mask=given == NO_TIMESTAMP).cast(field.type, safe=False)
        case "timestampType":
            kinds = ((table.attributes[some] & np.int16(LOG_APPEND)) != 0).astype(np.int32)
            kinds[table.magic[some] == 0] = -1
            return pa.array(selection.repeat_per_record(kinds))
        case "leaderEpoch":
            epochs = selection.repeat_per_record(table.leader_epoch[some])
            return pa.array(epochs, mask=epochs < 0)
        case "keyText" | "valueText" if decode_text is not None:
            is_key = field.name == "keyText"
            start, length = (rows.key_start, rows.key_length) if is_key else (rows.value_start, rows.value_length)
            fields = iterate_byte_strings(copy_byte_strings(selection.chunk.buf, start, length, picked))
            name = field.name.removesuffix("Text")
            return pa.array([decode_text(name, *row) for row in zip(rows.offset[picked].tolist(), fields, strict=True)], pa.string())
    raise ValueError(f"no column {field.name}")


def to_arrow_binary_column(strings: ConcatenatedByteStrings) -> pa.Array:
    """Absent strings are null."""
    parts = [_arrow_validity_bitmap(strings.valid), pa.py_buffer(strings.begins), pa.py_buffer(strings.data)]
    return pa.Array.from_buffers(pa.binary(), len(strings), parts)


def _arrow_validity_bitmap(is_valid: Flags) -> pa.Buffer | None:
    return None if is_valid.all() else pa.py_buffer(np.packbits(is_valid, bitorder="little"))


def _record_header_column(selection: SelectedRecords, column_type: pa.DataType) -> pa.Array:
    """Null for records without headers, as in Spark's own Kafka source."""
    found = copy_record_headers(selection)
    entries = pa.StructArray.from_arrays(
        [_decode_header_names(to_arrow_binary_column(found.names)), to_arrow_binary_column(found.values)],
        fields=list(column_type.value_type),
    )
    some = np.diff(found.begins) > 0
    return pa.Array.from_buffers(column_type, len(some), [_arrow_validity_bitmap(some), pa.py_buffer(found.begins)], children=[entries])


def _decode_header_names(binary_names: pa.Array) -> pa.Array:
    """Replace bytes that are not valid UTF-8, as Kafka does."""
    try:
        text = binary_names.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([name.decode("utf-8", "replace") for name in binary_names.to_pylist()], pa.string())
    return text


def arrow_schema_of_columns(column_names: Sequence[str]) -> pa.Schema:
    """All columns if none is named. Raises UsageError if one is unknown."""
    kinds = {
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])), "key": pa.binary(), "leaderEpoch": pa.int32(),
        "offset": pa.int64(), "partition": pa.int32(), "timestamp": pa.timestamp("ms", "UTC"), "timestampType": pa.int32(),
        "topic": pa.string(), "value": pa.binary(),
    }  # fmt: skip
    for name in column_names:
        if name not in kinds:
            raise UsageError(f"there is no column {name!r}", hint=f"The columns are {', '.join(MESSAGE_COLUMNS)}")
    return pa.schema([(name, kinds[name]) for name in column_names or MESSAGE_COLUMNS])
