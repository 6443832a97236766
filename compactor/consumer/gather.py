"""Copies of keys, values and headers from a parsed chunk, as offsets and bytes: no Python object per record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from compactor.constants import ByteCount
from compactor.kernels.common import Flags
from compactor.kernels.jit import kernel
from compactor.kernels.memory import copy_bytes, read_varint
from compactor.records.batches import BatchTable, Bytes, Int64s
from compactor.records.rows import HAS_HEADERS, BatchChunk, Int32s, RecordRows


@dataclass(frozen=True)
class SelectedRecords:
    """Records selected from one chunk of parsed batches, in which each record is a numbered row.

    table: batches of the piece of a segment (some MiB of whole batches) to which the chunk belongs.
    rows: all records of the chunk.
    first_row: number of each batch's first row; one more entry for the end of the last batch.
    picked: numbers of the selected rows, ascending.
    """

    table: BatchTable
    chunk: BatchChunk
    rows: RecordRows
    first_row: Int64s
    picked: Int64s

    def __len__(self) -> int:
        return len(self.picked)

    def repeat_batch_values_per_record(self, values_by_batch: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return for each selected row the value of its batch. ``values_by_batch`` has one value for each batch of the chunk."""
        return values_by_batch[np.searchsorted(self.first_row, self.picked, side="right") - 1]


@dataclass(frozen=True, slots=True)
class ConcatenatedByteStrings:
    """Byte strings stored one after the other in one array: number i is ``data[begins[i]:begins[i + 1]]``, or null unless ``valid[i]``."""

    begins: Int32s
    valid: Flags
    data: Bytes

    def __len__(self) -> int:
        return len(self.valid)


@dataclass(frozen=True, slots=True)
class RecordHeaderArrays:
    """Headers of several records, as an array of names and an array of values: the headers of record i have the indexes ``begins[i]`` to
    ``begins[i + 1]`` (exclusive).
    """

    begins: Int32s
    names: ConcatenatedByteStrings
    values: ConcatenatedByteStrings


def copy_byte_strings(buf: Bytes, start: Int64s, length: Int32s, selected_rows: Int64s) -> ConcatenatedByteStrings:
    """Copy the byte strings of the selected rows out of ``buf``. ``start`` and ``length``: position and length in bytes per row of the
    chunk; a negative length is null.
    """
    begins = np.empty(len(selected_rows) + 1, np.int32)
    valid = np.empty(len(selected_rows), np.bool_)
    data = np.empty(_compute_byte_string_offsets(length, selected_rows, begins, valid), np.uint8)
    _copy_selected_byte_strings(buf, start, selected_rows, begins, data)
    return ConcatenatedByteStrings(begins, valid, data)


def copy_record_headers(selection: SelectedRecords) -> RecordHeaderArrays:
    """Return copies of the record headers (names and values) of the selected rows."""
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
def _compute_byte_string_offsets(length: Int32s, selected_rows: Int64s, out_offsets: Int32s, out_valid: Flags) -> ByteCount:
    """Compute where the byte strings of the selected rows lie in a copy that holds them one after the other. Return their total length in
    bytes.

    :param length: length in bytes of each row's byte string; negative for null.
    :param out_offsets: receives the start of each selected row's string in the copy, and the end of the last one.
    :param out_valid: receives for each selected row whether its string is not null.
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
    """Copy the byte strings of the selected rows from ``buf`` to ``out_data``.

    :param start: position in ``buf`` of each row's byte string.
    :param offsets: position in ``out_data`` of each selected row's byte string, and the end of the last one.
    """
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
    """Count the record headers of each selected row, and return their total number.

    :param buf: bytes of the parsed records.
    :param value_start, value_length: by row, position and length of the value in ``buf``, in bytes; the headers follow the value.
    :param end: by row, position after the record in ``buf``.
    :param flags: by row, flags of the record; HAS_HEADERS tells whether it has headers.
    :param out_first_header: receives for each selected row the number of headers of the selected rows before it, and at last the number of
        all.
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
    """Fill ``out_positions`` with four lines: name start, name length, value start and value length of each header, in bytes. Lengths below
    0 mean null.

    :param buf: bytes of the parsed records, whose headers ``parse_records`` has checked.
    :param value_start, value_length: by row, position and length of the value in ``buf``, in bytes; the headers follow the value.
    :param end: by row, position after the record in ``buf``.
    :param first_header: number of each selected row's first header, and the number of all headers.
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
