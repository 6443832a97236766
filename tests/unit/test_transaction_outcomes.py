"""What became of transactions, for a log that is read from its end in pieces."""

from __future__ import annotations

import numpy as np

from compactor.cleaner.retention import UNDECIDED, find_txn_outcomes
from compactor.records.batches import ABORT, COMMIT, BatchTable, parse_batch_headers
from tests.builders import LogBuilder, log_of


def table_of(log: LogBuilder) -> BatchTable:
    return parse_batch_headers(np.frombuffer(b"".join(log.segments[0][1]), np.uint8), "test")


def transactions() -> LogBuilder:
    log = LogBuilder()
    log.put("1=a", pid=1, txn=True)  # batch 0: aborted by batch 3
    log.put("2=b", pid=2, txn=True)  # 1: committed by 5
    log.put("3=c")  # 2: in no transaction
    log.abort(1)  # 3
    log.put("1=d", pid=1, txn=True)  # 4: committed by 6
    log.commit(2)  # 5
    log.commit(1)  # 6
    log.put("2=e", pid=2, txn=True)  # 7: open
    return log


EXPECTED = [ABORT, COMMIT, UNDECIDED, UNDECIDED, COMMIT, UNDECIDED, UNDECIDED, UNDECIDED]


def test_the_first_marker_behind_decides() -> None:
    known: dict[int, int] = {}
    assert find_txn_outcomes(table_of(transactions()), known).tolist() == EXPECTED
    assert known == {1: ABORT, 2: COMMIT}


def test_in_pieces_it_is_the_same() -> None:
    log = transactions()
    known: dict[int, int] = {}
    found: list[int] = []
    for one in reversed(log.segments[0][1]):
        piece = parse_batch_headers(np.frombuffer(one, np.uint8), "test")
        found = [*find_txn_outcomes(piece, known).tolist(), *found]
    assert found == EXPECTED


def test_a_producer_without_a_marker_stays_unknown() -> None:
    log = log_of("1t: 1=a")
    known: dict[int, int] = {}
    assert find_txn_outcomes(table_of(log), known).tolist() == [UNDECIDED]
    assert known == {}
