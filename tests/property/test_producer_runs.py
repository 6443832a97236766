"""Runs and markers stand for a segment in both ordered folds: verdicts and producer states are what its batches would have given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from compactor.cleaner.retention import TransactionVerdicts, transaction_verdicts_by_source
from compactor.records import batches as kafka
from compactor.records.batches import BatchTable
from compactor.records.indexes import TXN_ENTRY
from compactor.records.producers import (
    ProducerStates,
    batches_from_runs,
    extract_runs_and_markers,
    reason_to_read_markers,
)
from tests.support.depth import examples

DATA, PLAIN, EMPTY, ABORT, COMMIT, EMPTIED = range(6)
batch = st.tuples(
    st.sampled_from([DATA, DATA, DATA, PLAIN, EMPTY, ABORT, COMMIT, COMMIT, EMPTIED]),
    st.sampled_from([-1, 5, 5, 5, 6, 7]),  # producer
    st.integers(0, 1),  # epoch
    st.integers(1, 4),  # records in the batch, by offsets
    st.booleans(),  # a horizon, on markers
)
segments = st.lists(st.lists(batch, max_size=14), min_size=1, max_size=5)


def table_of(rows: list[tuple[int, int, int, int, bool]], offset: int) -> tuple[BatchTable, int]:
    table = BatchTable.allocate_rows(len(rows))
    for i, (wanted, producer, epoch, width, horizon) in enumerate(rows):
        kind = wanted if producer >= 0 else PLAIN
        marker = kind in (ABORT, COMMIT, EMPTIED)
        table.base_offset[i] = offset
        offset += 1 if marker else width
        table.last_offset[i] = offset - 1
        table.producer_id[i] = producer
        table.producer_epoch[i] = epoch
        table.base_sequence[i] = -1 if marker or producer < 0 else offset % 1000
        table.count[i] = 0 if kind in (EMPTY, EMPTIED) else width
        table.control[i] = {ABORT: kafka.ABORT, COMMIT: kafka.COMMIT, EMPTIED: kafka.EMPTIED}.get(kind, kafka.NOT_CONTROL)
        table.attributes[i] = (0 if kind == PLAIN else kafka.TRANSACTIONAL) | (kafka.CONTROL if marker else 0)
        table.attributes[i] |= kafka.HORIZON if marker and horizon else 0
        table.base_timestamp[i] = 1_000 + i
        table.max_timestamp[i] = 2_000 + offset
        table.coordinator_epoch[i] = 3 if marker else -1
        table.magic[i] = 2
    return table, offset


def source(table: BatchTable) -> Any:
    return SimpleNamespace(table=table, txn_entries=np.empty(0, TXN_ENTRY))


def marker_verdicts(table: Any, verdicts: TransactionVerdicts) -> list[tuple[int, bool, bool]]:
    rows = np.flatnonzero((table.control != kafka.NOT_CONTROL) & (table.producer_id >= 0))
    return [(int(table.base_offset[i]), bool(verdicts.discardable[i]), bool(verdicts.indexed[i])) for i in rows]


@examples(300)
@given(log=segments, skipped=st.lists(st.booleans(), min_size=5, max_size=5))
def test_stand_ins_give_the_verdicts_of_their_segments(log: list[list[tuple[int, int, int, int, bool]]], skipped: list[bool]) -> None:
    tables, offset = [], 0
    for rows in log:
        table, offset = table_of(rows, offset)
        tables.append(table)
    stand_ins = [
        batches_from_runs(*extract_runs_and_markers(table)) if skip else table for table, skip in zip(tables, skipped, strict=False)
    ]
    expected, got = (
        transaction_verdicts_by_source([source(t) for t in tables]),
        transaction_verdicts_by_source([source(t) for t in stand_ins]),
    )
    states, other_states = ProducerStates.empty_producer_states(), ProducerStates.empty_producer_states()
    for table, stand_in, verdict, other in zip(tables, stand_ins, expected, got, strict=True):
        assert marker_verdicts(stand_in, other) == marker_verdicts(table, verdict)
        if stand_in is table:
            assert other.aborted.tolist() == verdict.aborted.tolist()
            assert other.txn_entries.tolist() == verdict.txn_entries.tolist()
        else:
            aborted = {int(o) for o in table.base_offset[verdict.aborted]}
            assert {int(o) for o in stand_in.base_offset[other.aborted]} <= aborted
            lost = bool(np.any(verdict.aborted & (table.count > 0)))
            assert bool(np.any(other.aborted & (stand_in.count > 0))) == lost
        states, other_states = states.replay_batches(table), other_states.replay_batches(stand_in)
        assert other_states.entries.tolist() == states.entries.tolist()


@examples(200)
@given(log=segments, now=st.sampled_from([0, 1_002, 1_005, 5_000]))
def test_a_segment_is_due_exactly_when_its_batches_say_so(log: list[list[tuple[int, int, int, int, bool]]], now: int) -> None:
    tables, offset = [], 0
    for rows in log:
        table, offset = table_of(rows, offset)
        tables.append(table)
    stand_ins = [batches_from_runs(*extract_runs_and_markers(table)) for table in tables]
    for table, verdict, stand_in, other in zip(
        tables,
        transaction_verdicts_by_source([source(t) for t in tables]),
        stand_ins,
        transaction_verdicts_by_source([source(t) for t in stand_ins]),
        strict=True,
    ):
        wanted = False
        for i in range(len(table)):
            if table.control[i] == kafka.NOT_CONTROL:
                wanted |= bool(verdict.aborted[i]) and table.count[i] > 0
            elif table.control[i] in (kafka.ABORT, kafka.COMMIT) and verdict.discardable[i]:
                wanted |= not table.attributes[i] & kafka.HORIZON or table.base_timestamp[i] <= now
        assert bool(reason_to_read_markers(stand_in, other.aborted, other.discardable, now)) == wanted
