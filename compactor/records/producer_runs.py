"""Summary of a segment's producers and transaction markers, used in place of the segment by computations that go through the log in order.

A *run* is all data batches of one producer, epoch and kind between two markers of that producer. Within a run it does not matter how its
batches interleave with those of other producers: the transaction fold (Kafka's CleanedTransactionMetadata) only needs to know whether there
was transactional data since the last marker, and the producer state (ProducerStateManager) only where the transaction began and which batch
was the last. Therefore a table of runs and a table of markers can replace the segment. ``batch_table_from_runs_and_markers`` converts both
to a batch table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bloom.sidecar import BATCH_RUNS, MARKERS, ProducerRunOrMarkerTable
from compactor.kernels.common import NO_HORIZON, Flags
from compactor.model.base import ReasonOrEmpty
from compactor.records.batches import ABORT, COMMIT, CONTROL, HORIZON, NOT_CONTROL, TRANSACTIONAL, BatchTable, Int64s


def extract_producer_runs_and_markers(batches: BatchTable) -> tuple[ProducerRunOrMarkerTable, ProducerRunOrMarkerTable]:
    """Return two tables of a segment: its producer runs, and its transaction markers. A run is all data batches of one producer between two
    of its markers, as long as producer epoch and transactional flag stay the same.
    """
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
    """Return a structured array of type ``dtype`` with these columns."""
    table = np.zeros(rows, dtype)
    for name, column in columns.items():
        table[name] = column
    return table


def batch_table_from_runs_and_markers(runs: ProducerRunOrMarkerTable, markers: ProducerRunOrMarkerTable) -> BatchTable:
    """Return a batch table, ascending by base offset, from which transaction outcomes can be computed in place of a segment's own batches.
    It has the last batch of each run, each marker, and the first batch of each run of several batches. In a row for a first batch only the
    base offset is exact, because another batch of the run follows. Positions and sizes are 0.
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

    def join_data_and_marker_columns(
        data_column: npt.ArrayLike, marker_column: npt.ArrayLike, dtype: type[np.generic] = np.int64
    ) -> npt.NDArray[Any]:
        columns = (np.broadcast_to(data_column, data), np.broadcast_to(marker_column, control))
        return np.concatenate(columns).astype(dtype)[order]

    return BatchTable(
        position=zeros,
        size=zeros,
        base_offset=join_data_and_marker_columns(offset, markers["offset"]),
        last_offset=join_data_and_marker_columns(last_offset, markers["offset"]),
        base_timestamp=join_data_and_marker_columns(rows["max_timestamp"], marker_timestamp),
        max_timestamp=join_data_and_marker_columns(rows["max_timestamp"], markers["max_timestamp"]),
        producer_id=join_data_and_marker_columns(rows["producer_id"], markers["producer_id"]),
        magic=join_data_and_marker_columns(2, 2, np.int8),
        attributes=join_data_and_marker_columns(np.where(rows["transactional"], TRANSACTIONAL, 0), marker_attributes, np.int16),
        leader_epoch=join_data_and_marker_columns(0, 0, np.int32),
        producer_epoch=join_data_and_marker_columns(rows["epoch"], markers["epoch"], np.int16),
        base_sequence=join_data_and_marker_columns(rows["base_sequence"], -1, np.int32),
        count=join_data_and_marker_columns(rows["has_records"], 1, np.int32),
        control=join_data_and_marker_columns(NOT_CONTROL, markers["control"], np.int8),
        coordinator_epoch=join_data_and_marker_columns(-1, markers["coordinator_epoch"], np.int32),
    )


def reason_to_read_segment_for_its_markers(
    batches: BatchTable, aborted_flags: Flags, discardable_flags: Flags, now_ms: int
) -> ReasonOrEmpty:
    """Return why a segment must be read because of its transaction markers, or an empty string. A marker that may be discarded makes its
    segment due if it has no delete horizon, because it gets one, or if its horizon has passed, because then it is removed.

    :param batches: the segment's batches, or those rebuilt from its sidecar.
    :param aborted_flags, discardable_flags: a flag per batch: whether it is data of an aborted transaction; whether it may be removed.
    :param now_ms: the round's time in milliseconds.
    """
    if np.any(aborted_flags & (batches.control == NOT_CONTROL) & (batches.count > 0)):
        return "it holds records of an aborted transaction"
    marker = discardable_flags & ((batches.control == ABORT) | (batches.control == COMMIT))
    waits = ((batches.attributes & HORIZON) != 0) & (batches.base_timestamp > now_ms)
    return "a transaction marker is due" if np.any(marker & ~waits) else ""
