"""Keys, values and headers copied out of a parsed chunk: offsets and bytes, no Python object per record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from compactor.kernels.memory import copy_bytes, read_varint
from compactor.records.batches import BatchTable, Bytes, Int64s
from compactor.records.rows import HAS_HEADERS, Chunk, Int32s, Rows

Flags = npt.NDArray[np.bool_]


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


@dataclass(frozen=True, slots=True)
class Slices:
    """Byte strings one behind the other: number i is ``data[begins[i]:begins[i + 1]]``, null where not ``valid[i]``."""

    begins: Int32s
    valid: Flags
    data: Bytes

    def __len__(self) -> int:
        return len(self.valid)


@dataclass(frozen=True, slots=True)
class HeaderSlices:
    """The headers of record i are those from ``begins[i]`` to ``begins[i + 1]``."""

    begins: Int32s
    names: Slices
    values: Slices


def slices(buf: Bytes, start: Int64s, length: Int32s, picked: Int64s) -> Slices:
    """Slices of ``buf``; a negative length is null."""
    begins = np.empty(len(picked) + 1, np.int32)
    valid = np.empty(len(picked), np.bool_)
    data = np.empty(_offsets(length, picked, begins, valid), np.uint8)
    _gather(buf, start, picked, begins, data)
    return Slices(begins, valid, data)


def header_slices(selection: Selection) -> HeaderSlices:
    rows, picked, buf = selection.rows, selection.picked, selection.chunk.buf
    begins = np.empty(len(picked) + 1, np.int32)
    total = _count_headers(buf, rows.value_start, rows.value_length, rows.end, rows.flags, picked, begins)
    places = np.empty((4, total), np.int64)
    _find_headers(buf, rows.value_start, rows.value_length, rows.end, picked, begins, places)
    every = np.arange(total)
    name_start, name_length, value_start, value_length = places
    names = slices(buf, name_start, name_length.astype(np.int32), every)
    return HeaderSlices(begins, names, slices(buf, value_start, value_length.astype(np.int32), every))


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
