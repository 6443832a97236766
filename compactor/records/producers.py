"""Producer state of a log, and the ``.snapshot`` file that stores it.
(Kafka: ProducerStateManager, ProducerStateEntry, ProducerAppendInfo with origin REPLICATION; docs/kafka-rules.md 5.11.)
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt

from bloom.sidecar import BATCH_RUNS, MARKERS, ProducerRunOrMarkerTable
from compactor.errors import BadData
from compactor.kernels.common import NO_HORIZON, Flags, Int32s
from compactor.kernels.jit import kernel
from compactor.records.batches import ABORT, COMMIT, CONTROL, HORIZON, NOT_CONTROL, TRANSACTIONAL, BatchTable, Int64s

ENTRY: Final = np.dtype(
    [
        ("producer_id", ">i8"),
        ("epoch", ">i2"),
        ("last_sequence", ">i4"),
        ("last_offset", ">i8"),
        ("offset_delta", ">i4"),
        ("timestamp", ">i8"),
        ("coordinator_epoch", ">i4"),
        ("txn_first_offset", ">i8"),
    ]
)
_HEADER: Final = struct.Struct(">hIi")


class _ProducerStateColumns(NamedTuple):
    """Fields of ENTRY as columns, one row per producer."""

    epoch: npt.NDArray[np.int16]
    last_sequence: Int32s
    last_offset: Int64s
    offset_delta: Int32s
    timestamp: Int64s
    coordinator_epoch: Int32s
    txn_first_offset: Int64s


@dataclass(frozen=True, slots=True)
class ProducerStates:
    """Producers at one offset: entries of Kafka's producer snapshots (ENTRY), ascending by producer id.
    ``last_offset`` and ``last_sequence`` are -1 if only markers were seen since the epoch began; ``txn_first_offset`` is -1 outside a
    transaction.
    """

    entries: npt.NDArray[Any]

    @staticmethod
    def empty_producer_states() -> ProducerStates:
        return ProducerStates(np.empty(0, ENTRY))

    def first_open_offset(self) -> int | None:
        opened = self.entries["txn_first_offset"]
        opened = opened[opened >= 0]
        return int(opened.min()) if len(opened) else None

    def is_consistent_with(self, offset: int, replayed_states: ProducerStates) -> bool:
        """True if nothing in these states lies at or after ``offset``, and the log has no later batch of a producer.
        :param replayed_states: from the batches that the log still has before ``offset``. Producers may be missing, because cleaning may
        have removed their batches.
        """
        if np.any(self.entries["last_offset"] >= offset) or np.any(self.entries["txn_first_offset"] >= offset):
            return False
        _, mine, its = np.intersect1d(self.entries["producer_id"], replayed_states.entries["producer_id"], return_indices=True)
        known, reported = self.entries[mine], replayed_states.entries[its]
        behind = (known["last_offset"] >= 0) & (known["last_offset"] < reported["last_offset"])
        return not np.any(behind & (known["epoch"] == reported["epoch"]))

    def states_at(self, end_offset: int, known_states: ProducerStates | None = None) -> ProducerStates:
        """States at an earlier offset (inclusive), as far as known: those of producers that have written after it
        only from ``known_states``, which take precedence; the others have not changed since.
        """
        mine = self.entries[(self.entries["last_offset"] <= end_offset) & (self.entries["txn_first_offset"] <= end_offset)]
        if known_states is None:
            return ProducerStates(mine)
        mine = mine[~np.isin(mine["producer_id"], known_states.entries["producer_id"])]
        both = np.concatenate([known_states.entries, mine])
        return ProducerStates(both[np.argsort(both["producer_id"], kind="stable")])

    def replay_batches(self, table: BatchTable, from_offset: int = 0) -> ProducerStates:
        """Batches that end before ``from_offset`` are skipped, because the states include them."""
        mine = np.flatnonzero((table.producer_id >= 0) & (table.last_offset >= from_offset))
        if not len(mine):
            return self
        known = self.entries["producer_id"].astype(np.int64)
        ids = np.union1d(known, table.producer_id[mine])
        state = np.zeros(len(ids), ENTRY.newbyteorder("="))
        state["producer_id"] = ids
        for field in _ProducerStateColumns._fields:
            state[field] = 0 if field == "offset_delta" else -1
        state[np.searchsorted(ids, known)] = self.entries
        seen = np.isin(ids, known)
        columns = _ProducerStateColumns(*(state[name].copy() for name in _ProducerStateColumns._fields))
        _apply_batches(np.searchsorted(ids, table.producer_id[mine]), table.select_rows(mine), seen, columns)
        for name, column in columns._asdict().items():
            state[name] = column
        return ProducerStates(state[seen].astype(ENTRY))


@kernel
def _apply_batches(producer: Int64s, batches: BatchTable, seen: npt.NDArray[np.bool_], states: _ProducerStateColumns) -> None:
    """:param producer: for each batch, the row of its producer in ``seen`` and ``states``, both changed in place."""
    for i in range(producer.size):
        p = producer[i]
        kind = batches.control[i]
        if kind != NOT_CONTROL and kind != ABORT and kind != COMMIT:
            continue
        seen[p] = True
        if states.epoch[p] != batches.producer_epoch[i]:
            states.epoch[p] = batches.producer_epoch[i]
            states.last_offset[p] = -1
            states.last_sequence[p] = -1
            states.offset_delta[p] = 0
        states.timestamp[p] = batches.max_timestamp[i]
        if kind == NOT_CONTROL:
            delta = batches.last_offset[i] - batches.base_offset[i]
            states.last_offset[p] = batches.last_offset[i]
            states.offset_delta[p] = delta
            if batches.base_sequence[i] < 0:
                states.last_sequence[p] = batches.base_sequence[i]
            else:
                states.last_sequence[p] = (np.int64(batches.base_sequence[i]) + delta) & np.int64(0x7FFFFFFF)
            if batches.attributes[i] & TRANSACTIONAL and states.txn_first_offset[p] < 0:
                states.txn_first_offset[p] = batches.base_offset[i]
        else:
            states.coordinator_epoch[p] = batches.coordinator_epoch[i]
            states.txn_first_offset[p] = -1


def parse_producer_snapshot_file(snapshot_bytes: bytes, file_name: str) -> ProducerStates:
    """Raises BadData; the caller then continues from an older snapshot or from the log, as Kafka does."""
    if len(snapshot_bytes) < _HEADER.size:
        raise BadData("a producer snapshot ends in its header", segment=file_name, hint="It can be rebuilt from the log")
    version, crc, count = _HEADER.unpack_from(snapshot_bytes)
    if version != 1:
        raise BadData(f"unknown version {version} of a producer snapshot", segment=file_name, hint="It can be rebuilt from the log")
    if crc != crc32c.crc32c(snapshot_bytes[6:]) or len(snapshot_bytes) != _HEADER.size + count * ENTRY.itemsize:
        raise BadData("the CRC or the length of a producer snapshot is invalid", segment=file_name, hint="It can be rebuilt from the log")
    entries = np.frombuffer(snapshot_bytes, ENTRY, offset=_HEADER.size)
    return ProducerStates(entries[np.argsort(entries["producer_id"].astype(np.int64))])


def format_producer_snapshot(states: ProducerStates) -> bytes:
    """Format version 1."""
    body = struct.pack(">i", len(states.entries)) + states.entries.tobytes()
    return struct.pack(">hI", 1, crc32c.crc32c(body)) + body


# ---- summary of a segment's producers and transaction markers, used in place of the segment ------------------------------------
# A *run* is all data batches of one producer, epoch and kind between two markers of that producer. Within a run it does not matter how its
# batches interleave with those of other producers: the transaction fold (Kafka's CleanedTransactionMetadata) only needs to know whether
# there was transactional data since the last marker, and the producer state (ProducerStateManager) only where the transaction began and
# which batch was the last. Therefore a table of runs and a table of markers can replace the segment. ``batches_from_runs``
# converts both to a batch table.


def extract_runs_and_markers(batches: BatchTable) -> tuple[ProducerRunOrMarkerTable, ProducerRunOrMarkerTable]:
    owned = np.flatnonzero(batches.producer_id >= 0)
    return _producer_run_table(batches, owned), _marker_table(batches, owned[batches.control[owned] != NOT_CONTROL])


def _producer_run_table(batches: BatchTable, data_batch_numbers: Int64s) -> ProducerRunOrMarkerTable:
    rows = data_batch_numbers[np.argsort(batches.producer_id[data_batch_numbers], kind="stable")]
    is_control = batches.control[rows] != NOT_CONTROL
    transactional = batches.transactional_flags[rows]
    changes = is_control[1:] | is_control[:-1]
    for column in (batches.producer_id[rows], batches.producer_epoch[rows], transactional):
        changes |= column[1:] != column[:-1]
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(rows)), dtype=np.bool_), changes]))
    ends = np.append(begins[1:], len(rows))[: len(begins)]
    has_records = np.maximum.reduceat(batches.count[rows], begins) > 0 if len(rows) else np.zeros(0, dtype=np.bool_)
    data = ~is_control[begins]
    begins, ends, has_records = begins[data], ends[data], has_records[data]
    first, last = rows[begins], rows[ends - 1]
    columns = {
        "first_offset": batches.base_offset[first],
        "last_offset": batches.last_offset[last],
        "producer_id": batches.producer_id[first],
        "max_timestamp": batches.max_timestamp[last],
        "base_sequence": batches.base_sequence[last],
        "last_offset_delta": batches.last_offset[last] - batches.base_offset[last],
        "batches": ends - begins,
        "epoch": batches.producer_epoch[first],
        "transactional": transactional[begins],
        "has_records": has_records,
    }
    return _structured_array(BATCH_RUNS, len(first), columns)[np.argsort(columns["first_offset"], kind="stable")]


def _marker_table(batches: BatchTable, marker_batch_numbers: Int64s) -> ProducerRunOrMarkerTable:
    dated = (batches.attributes[marker_batch_numbers] & HORIZON) != 0
    columns = {
        "offset": batches.base_offset[marker_batch_numbers],
        "producer_id": batches.producer_id[marker_batch_numbers],
        "horizon": np.where(dated, batches.base_timestamp[marker_batch_numbers], NO_HORIZON),
        "max_timestamp": batches.max_timestamp[marker_batch_numbers],
        "coordinator_epoch": batches.coordinator_epoch[marker_batch_numbers],
        "epoch": batches.producer_epoch[marker_batch_numbers],
        "control": batches.control[marker_batch_numbers],
    }
    return _structured_array(MARKERS, len(marker_batch_numbers), columns)


def _structured_array(dtype: np.dtype[np.void], rows: int, columns: Mapping[str, npt.ArrayLike]) -> ProducerRunOrMarkerTable:
    table = np.zeros(rows, dtype)
    for name, column in columns.items():
        table[name] = column
    return table


def batches_from_runs(runs: ProducerRunOrMarkerTable, markers: ProducerRunOrMarkerTable) -> BatchTable:
    """A batch table, ascending by base offset, for transaction outcomes. Of the first batch of a run of several, only the base offset is
    exact. Positions and sizes are 0.
    """
    begun = runs[runs["batches"] > 1]
    rows = np.concatenate((begun, runs))
    offset = np.concatenate((begun["first_offset"], runs["last_offset"] - runs["last_offset_delta"]))
    last_offset = np.concatenate((begun["first_offset"], runs["last_offset"]))
    dated = markers["horizon"] != NO_HORIZON
    marker_timestamp = np.where(dated, markers["horizon"], markers["max_timestamp"])
    marker_attributes = np.where(dated, CONTROL | TRANSACTIONAL | HORIZON, CONTROL | TRANSACTIONAL)
    data, control, zeros = len(rows), len(markers), np.zeros(len(rows) + len(markers), np.int64)
    order = np.argsort(np.concatenate((offset, markers["offset"])), kind="stable")

    def join_columns(data_column: npt.ArrayLike, marker_column: npt.ArrayLike, dtype: type[np.generic] = np.int64) -> npt.NDArray[Any]:
        columns = (np.broadcast_to(data_column, data), np.broadcast_to(marker_column, control))
        return np.concatenate(columns).astype(dtype)[order]

    return BatchTable(
        position=zeros,
        size=zeros,
        base_offset=join_columns(offset, markers["offset"]),
        last_offset=join_columns(last_offset, markers["offset"]),
        base_timestamp=join_columns(rows["max_timestamp"], marker_timestamp),
        max_timestamp=join_columns(rows["max_timestamp"], markers["max_timestamp"]),
        producer_id=join_columns(rows["producer_id"], markers["producer_id"]),
        magic=join_columns(2, 2, np.int8),
        attributes=join_columns(np.where(rows["transactional"], TRANSACTIONAL, 0), marker_attributes, np.int16),
        leader_epoch=join_columns(0, 0, np.int32),
        producer_epoch=join_columns(rows["epoch"], markers["epoch"], np.int16),
        base_sequence=join_columns(rows["base_sequence"], -1, np.int32),
        count=join_columns(rows["has_records"], 1, np.int32),
        control=join_columns(NOT_CONTROL, markers["control"], np.int8),
        coordinator_epoch=join_columns(-1, markers["coordinator_epoch"], np.int32),
    )


def reason_to_read_markers(batches: BatchTable, aborted_flags: Flags, discardable_flags: Flags, now_ms: int) -> str:
    """Reason to read a segment because of its markers, or empty. A discardable marker is due without a delete horizon, and after its
    horizon.
    """
    if np.any(aborted_flags & (batches.control == NOT_CONTROL) & (batches.count > 0)):
        return "it holds records of an aborted transaction"
    marker = discardable_flags & ((batches.control == ABORT) | (batches.control == COMMIT))
    waits = ((batches.attributes & HORIZON) != 0) & (batches.base_timestamp > now_ms)
    return "a transaction marker is due" if np.any(marker & ~waits) else ""
