"""Whether a producer snapshot is of the log beside it: another's would hold a partition back, or let go of it too early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compactor.cleaner.source import open_source_segment, segment_cut_after_offset
from compactor.errors import BadData
from compactor.records.producers import ENTRY, ProducerStates
from tests.builders import LogBuilder


@pytest.fixture
def replayed(tmp_path: Path) -> ProducerStates:
    """Up to offset 25: producer 1 wrote 20 to 21 and was ended at 22, 2 has written 23 to 24 and is in a transaction."""
    log = LogBuilder(20).add("1t: a=1 b=1; 1 commits; 2t: c=1 d=1")
    (path,) = log.write(tmp_path).glob("*.log")
    return ProducerStates.empty_producer_states().replay_batches(open_source_segment(0, path, 20, 25, 0, -1, 1 << 20).table)


def states(*entries: tuple[int, int, int, int]) -> ProducerStates:
    """Producer id, epoch, last offset, first offset of its transaction."""
    made = np.zeros(len(entries), ENTRY)
    for place, (producer, epoch, last, begun) in enumerate(entries):
        made[place] = (producer, epoch, 0, last, 0, 0, 0, begun)
    return ProducerStates(made)


def test_what_the_log_says_is_of_it(replayed: ProducerStates) -> None:
    assert replayed.is_consistent_with(25, replayed)
    assert replayed.first_open_offset() == 23


@pytest.mark.parametrize(
    "snapshot",
    [
        states(),  # brokers forget who is idle
        states((1, 0, 21, -1)),
        states((1, 0, 21, -1), (2, 0, 24, 23), (3, 0, 7, -1)),  # written before the log begins
        states((2, 0, 24, 4)),  # so was the begin of this transaction
        states((1, 1, 10, -1)),  # of an epoch whose end was cleaned away
        states((1, 0, -1, -1)),  # markers only since its epoch began
    ],
)
def test_a_snapshot_may_know_more(snapshot: ProducerStates, replayed: ProducerStates) -> None:
    assert snapshot.is_consistent_with(25, replayed)


@pytest.mark.parametrize(
    "snapshot",
    [
        states((1, 0, 10, -1)),  # older: producer 1 wrote up to 21
        states((1, 0, 21, -1), (2, 0, 22, -1)),
        states((1, 0, 25, -1)),  # later
        states((9, 0, -1, 25)),
    ],
)
def test_one_of_another_time_is_not(snapshot: ProducerStates, replayed: ProducerStates) -> None:
    assert not snapshot.is_consistent_with(25, replayed)


def test_a_snapshot_is_taken_back_to_where_its_segment_is_read(replayed: ProducerStates) -> None:
    """Producer 3 has written nothing since: its state is the later one's. 1 and 2 have, and what the log says of them counts."""
    later = states((1, 0, 40, -1), (2, 0, 41, 41), (3, 0, 7, -1))
    back = later.states_at(24, replayed)
    assert [(int(e["producer_id"]), int(e["last_offset"]), int(e["txn_first_offset"])) for e in back.entries] == [
        (1, 21, -1),
        (2, 24, 23),
        (3, 7, -1),
    ]
    assert [int(e["producer_id"]) for e in later.states_at(24).entries] == [3]


def test_a_segment_is_cut_where_brokers_go_on_in_another(tmp_path: Path) -> None:
    log = LogBuilder(20).add("1t: a=1 b=1; 1 aborts; c=1 d=1")
    (path,) = log.write(tmp_path).glob("*.log")
    whole = open_source_segment(0, path, 20, 25, 0, -1, 1 << 20)
    cut = segment_cut_after_offset(whole, 22)
    assert (cut.base, cut.end, cut.table.last_offset.tolist()) == (20, 23, [21, 22])
    assert cut.size == int(whole.table.position[2])
    with pytest.raises(BadData, match="a batch from 23 to 24 lies across offset 23"):
        segment_cut_after_offset(whole, 23)
