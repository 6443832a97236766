"""A transaction index that lies would hide committed records from readers, or show aborted ones: which entries fit a segment."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from compactor.cleaner.retention import txn_index_problem
from compactor.cleaner.source import SourceSegment, open_source_segment
from compactor.records.indexes import TXN_ENTRY
from tests.builders import LogBuilder, log_of

Entry = tuple[int, int, int, int]
"""Producer id, first offset, last offset, last stable offset."""

SOUND: tuple[Entry, ...] = ((7, 12, 14, 13), (8, 13, 15, 16), (7, 18, 19, 20))


@pytest.fixture
def source(tmp_path: Path) -> SourceSegment:
    log = LogBuilder(10)
    log.put("a=1", pid=7, txn=True)  # 10
    log.commit(7)  # 11
    log.put("b=1", pid=7, txn=True)  # 12
    log.put("c=1", pid=8, txn=True)  # 13
    log.abort(7)  # 14
    log.abort(8)  # 15
    log.put("a=2", pid=9, txn=True)  # 16
    log.commit(9)  # 17
    log.put("a=3", pid=7, txn=True)  # 18
    log.abort(7)  # 19
    log.abort(6)  # 20: of a transaction that began in an earlier segment
    (path,) = log.write(tmp_path).glob("*.log")
    return open_source_segment(3, path, 10, 30, 0, -1, 1 << 20)


def told(source: SourceSegment, *entries: Entry) -> str:
    return txn_index_problem(np.frombuffer(b"".join(struct.pack(">hqqqq", 0, *entry) for entry in entries), TXN_ENTRY), source)


@pytest.mark.parametrize(
    "entries",
    [
        (),
        SOUND,
        SOUND[1:2],  # what brokers lose, control records tell
        ((6, 4, 20, 5),),  # its data lies in an earlier segment
        ((7, 12, 14, 0),),  # an earlier transaction of somebody else was open
    ],
)
def test_entries_that_a_broker_writes_fit(entries: tuple[Entry, ...], source: SourceSegment) -> None:
    assert told(source, *entries) == ""


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ((7, -1, 14, 13), "ended in this segment"),
        ((7, 15, 14, 13), "ended in this segment"),
        ((7, 4, 9, 5), "ended in this segment"),
        ((7, 12, 30, 13), "ended in this segment"),
        ((8, 12, 14, 13), "no abort marker"),
        ((7, 10, 11, 12), "no abort marker"),  # it was committed
        ((7, 12, 13, 13), "no abort marker"),
        ((7, 12, 25, 13), "no abort marker"),
        ((7, 12, 14, 16), "stable offset"),
        ((7, 13, 14, 13), "does not cover"),  # the batch at 12 would be shown
        ((7, 11, 14, 13), "covers another"),
        ((7, 10, 14, 10), "covers another"),  # the committed batch at 10 would be hidden
        ((7, 14, 19, 20), "covers another"),
    ],
)
def test_others_do_not(entry: Entry, problem: str, source: SourceSegment) -> None:
    assert problem in told(source, entry)


def test_entries_ascend(source: SourceSegment) -> None:
    assert "ended in this segment" in told(source, SOUND[1], SOUND[0])
    assert "ended in this segment" in told(source, SOUND[0], SOUND[0])


def test_a_segment_without_transactions_has_none(tmp_path: Path) -> None:
    log = log_of("a=1 b=1")
    (path,) = log.write(tmp_path).glob("*.log")
    assert "no abort marker" in told(open_source_segment(0, path, 0, None, 0, -1, 1 << 20), (7, 0, 1, 2))
