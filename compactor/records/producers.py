"""Producer state of a log: sequence numbers and open transactions of its producers, and the ``.snapshot`` file that stores it.

(Kafka: ProducerStateManager, ProducerStateEntry, ProducerAppendInfo with origin REPLICATION; docs/kafka-rules.md 5.11.)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import crc32c
import numpy as np
import numpy.typing as npt

from compactor.errors import BadData
from compactor.kernels.common import Int32s
from compactor.kernels.jit import kernel
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, TRANSACTIONAL, BatchTable, Int64s

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
    """Fields of an entry of Kafka's producer snapshots (ENTRY) as columns, one row per producer."""

    epoch: npt.NDArray[np.int16]
    last_sequence: Int32s
    last_offset: Int64s
    offset_delta: Int32s
    timestamp: Int64s
    coordinator_epoch: Int32s
    txn_first_offset: Int64s


@dataclass(frozen=True, slots=True)
class ProducerStates:
    """State of all known producers at one offset: an array of entries of Kafka's producer snapshots (ENTRY), one per producer, ascending by
    producer id.

    ``last_offset`` and ``last_sequence`` are -1 if only markers were seen since the epoch began; ``txn_first_offset`` is -1 outside a
    transaction.
    """

    entries: npt.NDArray[Any]

    @staticmethod
    def empty_producer_states() -> ProducerStates:
        """Return the states of a log in which no producer is known."""
        return ProducerStates(np.empty(0, ENTRY))

    def first_offset_of_open_transaction(self) -> int | None:
        """Return the first offset of the oldest open transaction, or None if none is open."""
        opened = self.entries["txn_first_offset"]
        opened = opened[opened >= 0]
        return int(opened.min()) if len(opened) else None

    def is_snapshot_consistent_with_replay(self, offset: int, replayed_states: ProducerStates) -> bool:
        """Return whether these states, read from a snapshot, can be the producer states at ``offset`` of a log. They can if nothing in them
        lies at or after ``offset``, and the log has no batch of a producer that is later than the producer's state.

        :param replayed_states: states computed from the batches that the log still has before ``offset``. Producers may be missing in them,
            because cleaning may have removed their batches.
        """
        if np.any(self.entries["last_offset"] >= offset) or np.any(self.entries["txn_first_offset"] >= offset):
            return False
        _, mine, its = np.intersect1d(self.entries["producer_id"], replayed_states.entries["producer_id"], return_indices=True)
        known, reported = self.entries[mine], replayed_states.entries[its]
        behind = (known["last_offset"] >= 0) & (known["last_offset"] < reported["last_offset"])
        return not np.any(behind & (known["epoch"] == reported["epoch"]))

    def producer_states_at_earlier_offset(self, end_offset: int, known_states: ProducerStates | None = None) -> ProducerStates:
        """Return the producer states at an earlier offset, as far as they are known. States of producers that have written after
        ``end_offset`` are known only from ``known_states``; the states of the others have not changed since.

        :param end_offset: the earlier offset, inclusive.
        :param known_states: states at that offset that are known already. They take precedence.
        """
        mine = self.entries[(self.entries["last_offset"] <= end_offset) & (self.entries["txn_first_offset"] <= end_offset)]
        if known_states is None:
            return ProducerStates(mine)
        mine = mine[~np.isin(mine["producer_id"], known_states.entries["producer_id"])]
        both = np.concatenate([known_states.entries, mine])
        return ProducerStates(both[np.argsort(both["producer_id"], kind="stable")])

    def replay_batches(self, table: BatchTable, from_offset: int = 0) -> ProducerStates:
        """Return the states that result if these batches follow. Batches that end before ``from_offset`` are skipped, because the present
        states include them already.
        """
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
        columns = _ProducerStateColumns(*(np.ascontiguousarray(state[name]) for name in _ProducerStateColumns._fields))
        _apply_batches_to_producer_columns(np.searchsorted(ids, table.producer_id[mine]), table.select_rows(mine), seen, columns)
        for name, column in columns._asdict().items():
            state[name] = column
        return ProducerStates(state[seen].astype(ENTRY))


@kernel
def _apply_batches_to_producer_columns(
    producer: Int64s, batches: BatchTable, seen: npt.NDArray[np.bool_], states: _ProducerStateColumns
) -> None:
    """Apply batches to producer states, in order.

    :param producer: for each batch, the row of its producer in ``seen`` and ``states``.
    :param seen: a flag per producer: whether it has a state. Set in place for the producers of these batches.
    :param states: changed in place.
    """
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
    """Parse a ``.snapshot`` file. Raises BadData; the caller then continues from an older snapshot or from the log, as Kafka does."""
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
    """Return the bytes of a ``.snapshot`` file, format version 1."""
    body = struct.pack(">i", len(states.entries)) + states.entries.tobytes()
    return struct.pack(">hI", 1, crc32c.crc32c(body)) + body
