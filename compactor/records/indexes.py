"""Offset index, time index and transaction index of one segment (Kafka: OffsetIndex, TimeIndex, TransactionIndex; KAFKA-806)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compactor.errors import BadData
from compactor.kernels.jit import kernel
from compactor.model.plan import MAX32
from compactor.records.batches import BatchTable, Int64s

OFFSET_ENTRY: Final = np.dtype([("offset", ">i4"), ("position", ">i4")])
TIME_ENTRY: Final = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])
TXN_ENTRY: Final = np.dtype(
    [("version", ">i2"), ("producer_id", ">i8"), ("first_offset", ">i8"), ("last_offset", ">i8"), ("last_stable_offset", ">i8")]
)
TxnEntries = npt.NDArray[Any]


def encode_indexes(
    base_offset: int, size: Int64s, last_offset: Int64s, max_timestamp: Int64s, index_interval_bytes: int
) -> tuple[bytes, bytes]:
    """Offset index and time index. The former has one entry for each batch that begins more than ``index_interval_bytes`` after that of the
    previous entry; the time index has one more at the end. A filler further from the base offset than an entry can express gets none.
    """
    entries = np.empty((4, len(size) + 1), np.int64)
    n, m = _select_index_entries(base_offset, size, last_offset, max_timestamp, index_interval_bytes, entries)
    index = np.empty(n, OFFSET_ENTRY)
    index["offset"], index["position"] = entries[:2, :n]
    timeindex = np.empty(m, TIME_ENTRY)
    timeindex["timestamp"], timeindex["offset"] = entries[2:, :m]
    return index.tobytes(), timeindex.tobytes()


@kernel
def _select_index_entries(
    base_offset: int, size: Int64s, last_offset: Int64s, max_timestamp: Int64s, index_interval_bytes: int, out_entries: Int64s
) -> tuple[int, int]:
    """Return the number of entries of the offset index and of the time index.
    :param out_entries: shape (4, number of batches + 1): offsets and positions of the former, timestamps and offsets of the latter.
    """
    n = 0
    m = 0
    position = np.int64(0)
    since = np.int64(0)
    highest = np.int64(-1)
    highest_offset = np.int64(0)
    for batch in range(size.size + 1):
        closing = batch == size.size
        if not closing and max_timestamp[batch] > highest:
            highest = max_timestamp[batch]
            highest_offset = last_offset[batch]
        if closing or since > index_interval_bytes:
            if not closing and last_offset[batch] - base_offset <= MAX32:
                out_entries[0, n] = last_offset[batch] - base_offset
                out_entries[1, n] = position
                n += 1
                since = np.int64(0)
            if highest > (out_entries[2, m - 1] if m else np.int64(-1)):
                out_entries[2, m] = highest
                out_entries[3, m] = highest_offset - base_offset
                m += 1
        if not closing:
            position += size[batch]
            since += size[batch]
    return n, m


def offset_index_problem(index_bytes: bytes, base_offset: int, table: BatchTable) -> str:
    """Reason why the bytes cannot be the offset index of these batches, or empty."""
    if len(index_bytes) % OFFSET_ENTRY.itemsize:
        return "it holds no whole number of entries"
    entries = np.frombuffer(index_bytes, OFFSET_ENTRY)
    positions, offsets = entries["position"].astype(np.int64), entries["offset"].astype(np.int64) + base_offset
    batch = np.searchsorted(table.position, positions)
    if np.any(batch >= len(table)) or np.any(table.position[batch] != positions):
        return "an entry does not point at a batch"
    if np.any(offsets > table.last_offset[batch]):
        return "an entry points at a batch below its offset"
    if np.any(np.diff(positions) <= 0) or np.any(np.diff(offsets) <= 0):
        return "its entries do not ascend"
    return ""


def time_index_problem(index_bytes: bytes, base_offset: int, table: BatchTable) -> str:
    """Reason why the bytes cannot be the time index of these batches, or empty. With an invalid index, a reader that seeks a timestamp
    would begin after the first matching record.
    """
    if len(index_bytes) % TIME_ENTRY.itemsize:
        return "it holds no whole number of entries"
    entries = np.frombuffer(index_bytes, TIME_ENTRY)
    times, offsets = entries["timestamp"].astype(np.int64), entries["offset"].astype(np.int64) + base_offset
    if np.any(np.diff(times) <= 0):
        return "its timestamps do not ascend"
    batch = np.searchsorted(table.last_offset, offsets)
    if np.any(offsets < base_offset) or np.any(batch >= len(table)):
        return "an entry lies outside the segment"
    if np.any(np.maximum.accumulate(table.max_timestamp)[batch] != times):
        return "an entry is not the latest timestamp up to its offset"
    return ""


def read_txn_index(path: Path) -> TxnEntries:
    """Empty if the file does not exist. Raises BadData."""
    if not path.exists():
        return np.empty(0, TXN_ENTRY)
    return parse_txn_index(path.read_bytes(), path.name)


def parse_txn_index(index_bytes: bytes, file_name: str) -> TxnEntries:
    """Raises BadData; ``file_name`` is for messages."""
    if len(index_bytes) % TXN_ENTRY.itemsize:
        raise BadData(
            f"a transaction index of {len(index_bytes)} bytes is not a whole number of {TXN_ENTRY.itemsize}-byte entries",
            segment=file_name,
            hint="Delete this index file: it is rebuilt from the control records",
        )
    entries = np.frombuffer(index_bytes, TXN_ENTRY)
    if np.any(entries["version"] != 0):
        raise BadData("unknown version of a transaction index entry", segment=file_name, hint="Delete this index file: it is rebuilt")
    return entries
