"""Transactions as one ordered fold over batch headers (Kafka: CleanedTransactionMetadata; spec sections 2.5 and 4.3).

Run once, before the passes: it gives every batch its verdict, so that everything after it is free of order. Outcomes come from
the control records; the transaction index is only carried along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bloom.jit import kernel
from compactor.cleaner.source import SourceSegment
from compactor.records.batches import ABORT, COMMIT, EMPTIED, NOT_CONTROL, TRANSACTIONAL, Int64s
from compactor.records.indexes import TXN_ENTRY, TxnEntries

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One flag per batch of one segment.

    ``aborted``: data of a transaction whose marker is ABORT. ``discardable``: aborted data, or a marker whose transaction has no
    data left in the log. ``indexed``: an ABORT marker that stays in the transaction index because its data was still seen.
    """

    aborted: Flags
    discardable: Flags
    indexed: Flags
    txn_entries: TxnEntries


def fold(sources: list[SourceSegment], opened: Mapping[int, int] | None = None) -> list[Verdicts]:
    """Verdicts for all batches of a log, from its first segment on. Segments behind the round's range tell outcomes only.

    :param opened: producer id -> first offset of a transaction that was open already where these segments begin (for the continuation
        of a log whose earlier segments are not at hand).
    """
    tables = [source.table for source in sources]
    control = _joined([t.control for t in tables], np.int8)
    transactional = _joined([(t.attributes & np.int16(TRANSACTIONAL)) != 0 for t in tables], np.bool_)
    pid = _joined([t.producer_id for t in tables], np.int64)
    base = _joined([t.base_offset for t in tables], np.int64)
    last = _joined([t.last_offset for t in tables], np.int64)
    before = opened or {}
    ids = np.union1d(pid, np.array(list(before), np.int64))
    open_since = np.array([before.get(each, -1) for each in ids.tolist()], np.int64)
    aborted, discardable, indexed, first_offset, stable = _fold(
        control, transactional, np.searchsorted(ids, pid), open_since, base, last
    )
    verdicts = []
    at = 0
    for source in sources:
        some = slice(at, at + len(source.table))
        at = some.stop
        entries = _entries(source, np.flatnonzero(indexed[some]), first_offset[some], stable[some])
        verdicts.append(Verdicts(aborted[some], discardable[some], indexed[some], entries))
    return verdicts


def _joined(columns: list[npt.NDArray[np.generic]], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate(columns) if columns else np.empty(0, dtype)


def _entries(source: SourceSegment, markers: Int64s, first_offset: Int64s, stable: Int64s) -> TxnEntries:
    """Index entries of the markers that stay: the segment's own bytes where it has them, else made from the headers."""
    entries = np.zeros(len(markers), TXN_ENTRY)
    entries["producer_id"] = source.table.producer_id[markers]
    entries["first_offset"] = first_offset[markers]
    entries["last_offset"] = source.table.last_offset[markers]
    entries["last_stable_offset"] = stable[markers]
    given = source.txn_entries
    for i, offset in enumerate(entries["last_offset"].tolist()):
        known = np.flatnonzero((given["last_offset"] == offset) & (given["producer_id"] == entries["producer_id"][i]))
        if len(known):
            entries[i] = given[known[0]]
    return entries


@kernel
def _fold(
    control: npt.NDArray[np.int8], transactional: Flags, producer: Int64s, open_since: Int64s, base: Int64s, last: Int64s
) -> tuple[Flags, Flags, Flags, Int64s, Int64s]:
    batches = control.size
    producers = open_since.size
    aborted = np.zeros(batches, np.bool_)
    discardable = np.zeros(batches, np.bool_)
    indexed = np.zeros(batches, np.bool_)
    first_offset = np.full(batches, -1, np.int64)
    stable = np.full(batches, -1, np.int64)
    outcome = np.full(producers, -1, np.int64)
    for i in range(batches - 1, -1, -1):
        if control[i] == ABORT or control[i] == COMMIT:
            outcome[producer[i]] = control[i]
        elif control[i] == NOT_CONTROL and transactional[i]:
            aborted[i] = outcome[producer[i]] == ABORT
    committed_seen = np.zeros(producers, np.bool_)
    aborted_seen = np.zeros(producers, np.bool_)
    for p in range(producers):
        if open_since[p] >= 0:
            aborted_seen[p] = outcome[p] == ABORT
            committed_seen[p] = outcome[p] != ABORT
    for i in range(batches):
        p = producer[i]
        kind = control[i]
        if kind == NOT_CONTROL:
            if transactional[i]:
                discardable[i] = aborted[i]
                if aborted[i]:
                    aborted_seen[p] = True
                else:
                    committed_seen[p] = True
                if open_since[p] < 0:
                    open_since[p] = base[i]
        elif kind == EMPTIED:
            discardable[i] = True
        elif kind == ABORT or kind == COMMIT:
            if kind == ABORT:
                indexed[i] = aborted_seen[p]
                discardable[i] = not aborted_seen[p]
                aborted_seen[p] = False
                first_offset[i] = open_since[p]
            else:
                discardable[i] = not committed_seen[p]
                committed_seen[p] = False
            open_since[p] = -1
            if indexed[i]:
                stable[i] = last[i] + 1
                for q in range(producers):
                    if open_since[q] >= 0:
                        stable[i] = min(stable[i], open_since[q])
    return aborted, discardable, indexed, first_offset, stable
