"""Leader-epoch lineages: which epoch wrote what, and where two lineages part."""

from __future__ import annotations

import pytest

from checkpoint.lineage import EpochEntry, Lineage, extend_lineage, first_divergent_offset, leader_epoch_at, merge_segment_lineages
from compactor.constants import LeaderEpoch, Offset


def lineage(*pairs: tuple[int, int]) -> Lineage:
    return tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in pairs)


def test_union_keeps_the_smallest_offset_of_each_epoch() -> None:
    assert merge_segment_lineages([lineage((0, 0), (1, 10)), lineage((1, 20), (3, 25))]) == lineage((0, 0), (1, 10), (3, 25))


def test_extend_adds_only_later_epochs() -> None:
    assert extend_lineage(lineage((0, 0), (1, 10)), lineage((1, 20), (3, 25))) == lineage((0, 0), (1, 10), (3, 25))
    assert extend_lineage((), lineage((2, 5))) == lineage((2, 5))


def test_epoch_at() -> None:
    entries = lineage((0, 5), (2, 10))
    assert [leader_epoch_at(entries, offset) for offset in (4, 5, 9, 10, 99)] == [-1, 0, 0, 2, 2]


OLD = lineage((0, 0), (1, 100), (2, 200))


@pytest.mark.parametrize(
    ("new", "new_end", "parted"),
    [
        pytest.param(OLD, 300, None, id="the same"),
        pytest.param((*OLD, EpochEntry(LeaderEpoch(5), Offset(300))), 400, None, id="goes on"),
        pytest.param((*OLD, EpochEntry(LeaderEpoch(5), Offset(250))), 400, 250, id="a later epoch overwrote the end"),
        pytest.param(lineage((0, 0), (1, 100), (3, 150)), 400, 150, id="diverges inside an epoch"),
        pytest.param(lineage((0, 0), (1, 100)), 180, 180, id="truncated inside an epoch"),
        pytest.param(lineage((0, 0), (1, 100)), 500, 200, id="the last epoch never happened"),
        pytest.param(lineage((4, 0)), 500, 0, id="another log altogether"),
        pytest.param(lineage((1, 120), (2, 200)), 300, None, id="retention cut its front"),
        pytest.param(lineage((7, 900)), 950, None, id="begins beyond the end"),
        pytest.param((), 0, None, id="unknown"),
    ],
)
def test_divergence(new: Lineage, new_end: int, parted: int | None) -> None:
    assert first_divergent_offset(OLD, 300, new, new_end) == parted
