"""Summary of a segment's producers and transaction markers, used in place of the segment by computations that go through the log in order.

A *run* is all data batches of one producer, epoch and kind between two markers of that producer. Within a run it does not matter how its
batches interleave with those of other producers: the transaction fold (Kafka's CleanedTransactionMetadata) only needs to know whether there
was transactional data since the last marker, and the producer state (ProducerStateManager) only where the transaction began and which batch
was the last. Therefore a table of runs and a table of markers can replace the segment. ``batch_events`` converts both to rows that look
like batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from compactor.kernels.common import NO_HORIZON

RunTable = npt.NDArray[np.void]

BATCH_RUNS = np.dtype(
    [
        ("first_offset", "<i8"),  # base offset of the first batch
        ("last_offset", "<i8"),  # last offset of the last batch
        ("producer_id", "<i8"),
        ("max_timestamp", "<i8"),  # of the last batch
        ("base_sequence", "<i4"),  # of the last batch
        ("last_offset_delta", "<i4"),  # of the last batch
        ("batches", "<i4"),
        ("epoch", "<i2"),
        ("transactional", "?"),
        ("has_records", "?"),  # False where all its batches have been emptied: nothing left to remove, should the transaction be aborted
    ]
)
"""Ascending by first offset. Batches without a producer id are in none."""

MARKERS = np.dtype(
    [
        ("offset", "<i8"),
        ("producer_id", "<i8"),
        ("horizon", "<i8"),  # NO_HORIZON where the batch has none
        ("max_timestamp", "<i8"),
        ("coordinator_epoch", "<i4"),
        ("epoch", "<i2"),
        ("control", "<i2"),  # what kind of control batch, in the caller's own numbers
    ]
)
"""Every control batch of a producer, ascending by offset."""

NOT_CONTROL, ABORT, COMMIT = -1, 0, 1
_TRANSACTIONAL, _HORIZON = 0x10, 0x40


class BatchColumns(Protocol):
    """Columns with one row per batch, in offset order, as numpy arrays. Implemented by ``compactor.records.batches.BatchTable``."""

    @property
    def base_offset(self) -> Any:
        """Return each batch's first offset."""

    @property
    def last_offset(self) -> Any:
        """Return each batch's last offset."""

    @property
    def base_timestamp(self) -> Any:
        """Return each batch's base timestamp, or delete horizon."""

    @property
    def max_timestamp(self) -> Any:
        """Return each batch's latest timestamp."""

    @property
    def producer_id(self) -> Any:
        """Return each batch's producer id."""

    @property
    def attributes(self) -> Any:
        """Return each batch's attributes as in the header."""

    @property
    def producer_epoch(self) -> Any:
        """Return each batch's producer epoch."""

    @property
    def base_sequence(self) -> Any:
        """Return each batch's first sequence."""

    @property
    def count(self) -> Any:
        """Return each batch's number of records."""

    @property
    def control(self) -> Any:
        """Return each batch's kind of control batch."""

    @property
    def coordinator_epoch(self) -> Any:
        """Return each batch's coordinator epoch of a marker."""


@dataclass(frozen=True, slots=True)
class BatchEvents:
    """Rows that stand for a segment's batches: the first and the last batch of each producer run, and each marker. The columns are those of
    Batches.
    """

    base_offset: npt.NDArray[np.int64]
    last_offset: npt.NDArray[np.int64]
    base_timestamp: npt.NDArray[np.int64]
    max_timestamp: npt.NDArray[np.int64]
    producer_id: npt.NDArray[np.int64]
    attributes: npt.NDArray[np.int16]
    producer_epoch: npt.NDArray[np.int16]
    base_sequence: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    control: npt.NDArray[np.int8]
    coordinator_epoch: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.base_offset)


def runs_and_markers(batches: BatchColumns) -> tuple[RunTable, RunTable]:
    """Return two tables of a segment: its producer runs and its transaction markers."""
    owned = np.flatnonzero(batches.producer_id >= 0)
    return _run_table(batches, owned), _marker_table(batches, owned[batches.control[owned] != NOT_CONTROL])


def _run_table(batches: BatchColumns, owned: npt.NDArray[np.int64]) -> RunTable:
    rows = owned[np.argsort(batches.producer_id[owned], kind="stable")]
    is_control = batches.control[rows] != NOT_CONTROL
    transactional = (batches.attributes[rows] & _TRANSACTIONAL) != 0
    changes = is_control[1:] | is_control[:-1]
    for column in (batches.producer_id[rows], batches.producer_epoch[rows], transactional):
        changes |= column[1:] != column[:-1]
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(rows)), dtype=np.bool_), changes]))
    ends = np.append(begins[1:], len(rows))[: len(begins)]
    has_records = np.maximum.reduceat(batches.count[rows], begins) > 0 if len(rows) else np.zeros(0, dtype=np.bool_)
    data = ~is_control[begins]
    begins, ends, has_records = begins[data], ends[data], has_records[data]
    first, last = rows[begins], rows[ends - 1]
    runs = np.zeros(len(first), dtype=BATCH_RUNS)
    runs["first_offset"] = batches.base_offset[first]
    runs["last_offset"] = batches.last_offset[last]
    runs["producer_id"] = batches.producer_id[first]
    runs["max_timestamp"] = batches.max_timestamp[last]
    runs["base_sequence"] = batches.base_sequence[last]
    runs["last_offset_delta"] = batches.last_offset[last] - batches.base_offset[last]
    runs["batches"] = ends - begins
    runs["epoch"] = batches.producer_epoch[first]
    runs["transactional"] = transactional[begins]
    runs["has_records"] = has_records
    return runs[np.argsort(runs["first_offset"], kind="stable")]


def _marker_table(batches: BatchColumns, rows: npt.NDArray[np.int64]) -> RunTable:
    markers = np.zeros(len(rows), dtype=MARKERS)
    markers["offset"] = batches.base_offset[rows]
    markers["producer_id"] = batches.producer_id[rows]
    markers["horizon"] = np.where((batches.attributes[rows] & _HORIZON) != 0, batches.base_timestamp[rows], NO_HORIZON)
    markers["max_timestamp"] = batches.max_timestamp[rows]
    markers["coordinator_epoch"] = batches.coordinator_epoch[rows]
    markers["epoch"] = batches.producer_epoch[rows]
    markers["control"] = batches.control[rows]
    return markers


def batch_events(runs: RunTable, markers: RunTable) -> BatchEvents:
    """Return rows that replace a segment's batches in the folds, ascending by base offset, made from its producer runs and markers."""
    begun = runs[runs["batches"] > 1]
    parts = [_first_batches(begun), _last_batches(runs), _marker_batches(markers)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in BatchEvents.__dataclass_fields__}
    order = np.argsort(joined["base_offset"], kind="stable")
    return BatchEvents(**{name: column[order] for name, column in joined.items()})


def _first_batches(runs: RunTable) -> dict[str, Any]:
    """Return the columns of each run's first batch. Only its existence and its base offset are exact, because another batch of the run
    follows.
    """
    return _batches(runs, runs["first_offset"], runs["first_offset"])


def _last_batches(runs: RunTable) -> dict[str, Any]:
    return _batches(runs, runs["last_offset"] - runs["last_offset_delta"], runs["last_offset"])


def _batches(runs: RunTable, base_offset: npt.NDArray[np.int64], last_offset: npt.NDArray[np.int64]) -> dict[str, Any]:
    return {
        "base_offset": base_offset,
        "last_offset": last_offset,
        "base_timestamp": runs["max_timestamp"],
        "max_timestamp": runs["max_timestamp"],
        "producer_id": runs["producer_id"],
        "attributes": np.where(runs["transactional"], _TRANSACTIONAL, 0).astype(np.int16),
        "producer_epoch": runs["epoch"],
        "base_sequence": runs["base_sequence"],
        "count": runs["has_records"].astype(np.int32),
        "control": np.full(len(runs), NOT_CONTROL, dtype=np.int8),
        "coordinator_epoch": np.full(len(runs), -1, dtype=np.int32),
    }


def _marker_batches(markers: RunTable) -> dict[str, Any]:
    has_horizon = markers["horizon"] != NO_HORIZON
    return {
        "base_offset": markers["offset"],
        "last_offset": markers["offset"],
        "base_timestamp": np.where(has_horizon, markers["horizon"], markers["max_timestamp"]),
        "max_timestamp": markers["max_timestamp"],
        "producer_id": markers["producer_id"],
        "attributes": np.where(has_horizon, 0x20 | _TRANSACTIONAL | _HORIZON, 0x20 | _TRANSACTIONAL).astype(np.int16),
        "producer_epoch": markers["epoch"],
        "base_sequence": np.full(len(markers), -1, dtype=np.int32),
        "count": np.ones(len(markers), dtype=np.int32),
        "control": markers["control"].astype(np.int8),
        "coordinator_epoch": markers["coordinator_epoch"],
    }


def reason_markers_are_due(happened: BatchColumns, aborted: npt.NDArray[np.bool_], discardable: npt.NDArray[np.bool_], now_ms: int) -> str:
    """Return why a segment must be read because of its transaction markers, or an empty string.

    A marker that may be discarded makes its segment due if it has no delete horizon, because it gets one, or if its horizon has passed,
    because then it is removed.

    :param happened: batches or events of the segment.
    :param aborted, discardable: verdicts of the transaction fold, one per batch or event.
    :param now_ms: the round's time in milliseconds.
    """
    if np.any(aborted & (happened.control == NOT_CONTROL) & (happened.count > 0)):
        return "it holds records of an aborted transaction"
    marker = discardable & ((happened.control == ABORT) | (happened.control == COMMIT))
    waits = ((happened.attributes & _HORIZON) != 0) & (happened.base_timestamp > now_ms)
    return "a transaction marker is due" if np.any(marker & ~waits) else ""
