"""Vectors of cleaner offsets: how they advance, and what they never do."""

from __future__ import annotations

import pytest

from checkpoint.offsets import (
    CleanerOffset,
    CleanerOffsetVector,
    advance_cleaner_vector,
    cap_cleaner_offsets,
    cleaner_vector_problem,
    drop_unreferenced_epochs,
    first_dirty_offset_in,
    has_epoch_cleaned_below,
)
from compactor.constants import CompactorEpoch, Offset


def vector(**entries: int) -> CleanerOffsetVector:
    """``vector(e0=100, e1=155)``"""
    return tuple(CleanerOffset(CompactorEpoch(int(name[1:])), Offset(offset)) for name, offset in entries.items())


def test_an_empty_vector_has_cleaned_nothing() -> None:
    assert first_dirty_offset_in(()) == 0


def test_granted_only_up_to_the_entry_of_its_own_epoch() -> None:
    decided = vector(e0=100, e1=155)
    assert has_epoch_cleaned_below(decided, CompactorEpoch(0), 100)
    assert not has_epoch_cleaned_below(decided, CompactorEpoch(0), 101)
    assert has_epoch_cleaned_below(decided, CompactorEpoch(1), 155)
    assert not has_epoch_cleaned_below(decided, CompactorEpoch(2), 1)


def test_advance_adds_an_entry_or_moves_the_last_one() -> None:
    assert advance_cleaner_vector((), CompactorEpoch(3), 10) == vector(e3=10)
    assert advance_cleaner_vector(vector(e3=10), CompactorEpoch(3), 20) == vector(e3=20)
    assert advance_cleaner_vector(vector(e3=10), CompactorEpoch(5), 20) == vector(e3=10, e5=20)


@pytest.mark.parametrize(("epoch", "offset"), [(2, 20), (3, 9)])
def test_advance_never_goes_back(epoch: int, offset: int) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        advance_cleaner_vector(vector(e3=10), CompactorEpoch(epoch), offset)


def test_entries_that_nobody_names_are_folded_into_their_successor_but_never_the_last() -> None:
    full = vector(e0=100, e1=155, e4=200)
    assert drop_unreferenced_epochs(full, {CompactorEpoch(1)}) == vector(e1=155, e4=200)
    assert drop_unreferenced_epochs(full, set()) == vector(e4=200)
    assert first_dirty_offset_in(drop_unreferenced_epochs(full, set())) == first_dirty_offset_in(full)


def test_a_truncated_lineage_clamps_every_entry() -> None:
    assert cap_cleaner_offsets(vector(e0=100, e1=155), 120) == vector(e0=100, e1=120)
    assert cap_cleaner_offsets(vector(e0=100, e1=155), 50) == vector(e0=50, e1=50)
    assert cleaner_vector_problem(cap_cleaner_offsets(vector(e0=100, e1=155), 50)) == ""


@pytest.mark.parametrize(
    "bad",
    [
        vector(e1=5, e0=9),
        vector(e0=9, e1=5),
        (CleanerOffset(CompactorEpoch(0), Offset(-1)),),
        (CleanerOffset(CompactorEpoch(1), Offset(1)), CleanerOffset(CompactorEpoch(1), Offset(2))),
    ],
)
def test_what_is_no_vector(bad: CleanerOffsetVector) -> None:
    assert cleaner_vector_problem(bad)
