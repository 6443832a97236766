"""Cleaner offsets by leader epoch: KIP-1272's table in every order of arrival, and what vectors never do."""

from __future__ import annotations

from itertools import permutations

import pytest

from checkpoint.offsets import Claim, CleanerOffset, Vector, advance, clamp, clean_up_to, fold_unnamed, granted, problem, resolve


def vector(**entries: int) -> Vector:
    """``vector(e0=100, e1=155)``"""
    return tuple(CleanerOffset(int(name[1:]), offset) for name, offset in entries.items())


A_PUBLISHES = Claim(0, vector(e0=100))
B_PUBLISHES = Claim(1, vector(e0=100, e1=155))
A_LATE = Claim(0, vector(e0=123))


@pytest.mark.parametrize("arrival", list(permutations([A_PUBLISHES, B_PUBLISHES, A_LATE])))
def test_the_table_of_the_kip_in_every_order_of_arrival(arrival: tuple[Claim, ...]) -> None:
    decided, void = resolve(arrival)
    assert decided == vector(e0=100, e1=155)
    assert void == (A_LATE,)


def test_before_the_new_leader_publishes_the_old_ones_furthest_claim_counts() -> None:
    assert resolve([A_LATE, A_PUBLISHES]) == (vector(e0=123), ())


def test_a_claim_of_an_epoch_that_the_decider_never_granted_is_void() -> None:
    late = Claim(1, vector(e0=100, e1=155))
    assert resolve([Claim(2, vector(e0=100, e2=180)), late]) == (vector(e0=100, e2=180), (late,))


def test_no_claims_no_vector() -> None:
    assert resolve([]) == ((), ())
    assert clean_up_to(()) == 0


def test_granted_only_up_to_the_entry_of_its_own_epoch() -> None:
    decided = vector(e0=100, e1=155)
    assert granted(decided, 0, 100)
    assert not granted(decided, 0, 101)
    assert granted(decided, 1, 155)
    assert not granted(decided, 2, 1)


def test_advance_adds_an_entry_or_moves_the_last_one() -> None:
    assert advance((), 3, 10) == vector(e3=10)
    assert advance(vector(e3=10), 3, 20) == vector(e3=20)
    assert advance(vector(e3=10), 5, 20) == vector(e3=10, e5=20)


@pytest.mark.parametrize(("epoch", "offset"), [(2, 20), (3, 9)])
def test_advance_never_goes_back(epoch: int, offset: int) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        advance(vector(e3=10), epoch, offset)


def test_entries_that_nobody_names_are_folded_into_their_successor_but_never_the_last() -> None:
    full = vector(e0=100, e1=155, e4=200)
    assert fold_unnamed(full, {1}) == vector(e1=155, e4=200)
    assert fold_unnamed(full, set()) == vector(e4=200)
    assert clean_up_to(fold_unnamed(full, set())) == clean_up_to(full)


def test_a_truncated_lineage_clamps_every_entry() -> None:
    assert clamp(vector(e0=100, e1=155), 120) == vector(e0=100, e1=120)
    assert clamp(vector(e0=100, e1=155), 50) == vector(e0=50, e1=50)
    assert problem(clamp(vector(e0=100, e1=155), 50)) == ""


@pytest.mark.parametrize(
    "bad", [vector(e1=5, e0=9), vector(e0=9, e1=5), (CleanerOffset(0, -1),), (CleanerOffset(1, 1), CleanerOffset(1, 2))]
)
def test_what_is_no_vector(bad: Vector) -> None:
    assert problem(bad)
