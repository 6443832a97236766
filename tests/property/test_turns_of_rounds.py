"""Rounds that share a budget of metadata records: whatever comes when, each gets its turn, and no hour gets more than the budget or one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from compactor.metadata_topic.spending import HOUR, MINUTE_MS
from compactor.metadata_topic.turns import ASKED_MS, FORGOTTEN_MS, RESERVED_MS, SILENT_MS, Turns, asked, forgone, published, spoken
from compactor.model.ids import TopicPartition

NOW = 30_000_000 * MINUTE_MS
A, B, C = (TopicPartition("orders", number) for number in range(3))


def test_a_round_that_is_larger_than_the_budget_is_begun_in_an_hour_that_has_none() -> None:
    turns, turn = asked(Turns(), {}, A, 1000, 10, NOW)
    assert turn.until_ms == 0
    turns, turn = asked(Turns(), {NOW // MINUTE_MS: 1}, A, 1000, 10, NOW)
    assert turn.until_ms == NOW + HOUR * MINUTE_MS
    _, turn = asked(turns, {NOW // MINUTE_MS: 1}, A, 1000, 10, turn.until_ms)
    assert turn.until_ms == 0


def test_smaller_ones_that_come_later_wait_behind_it() -> None:
    said = {NOW // MINUTE_MS: 1}
    turns, _ = asked(Turns(), said, A, 1000, 10, NOW)
    turns, turn = asked(turns, said, B, 1, 10, NOW + 1)
    assert (turn.ahead, turn.until_ms) == (1, NOW + 1 + ASKED_MS)
    turns, _ = asked(turns, said, A, 1000, 10, NOW + HOUR * MINUTE_MS)
    _, turn = asked(turns, said, B, 1, 10, NOW + HOUR * MINUTE_MS)
    assert (turn.ahead, turn.until_ms) == (0, NOW + HOUR * MINUTE_MS + MINUTE_MS)


def test_whoever_does_not_come_back_holds_up_nobody_and_keeps_its_place_for_a_day() -> None:
    said = {NOW // MINUTE_MS: 9}
    turns, turn = asked(Turns(), said, A, 5, 10, NOW)
    until = turn.until_ms
    assert asked(turns, said, B, 5, 10, until + SILENT_MS)[1].ahead == 1
    turns, turn = asked(turns, {(until + SILENT_MS) // MINUTE_MS: 9}, B, 5, 10, until + SILENT_MS + 1)
    assert turn.ahead == 0
    assert turn.until_ms
    assert asked(turns, {}, A, 5, 10, until + SILENT_MS + 2)[1].until_ms == 0
    assert A not in asked(turns, {}, C, 5, 10, until + FORGOTTEN_MS)[0].waiting


def test_whoever_is_not_due_any_more_holds_up_nobody_and_whoever_waits_asks_at_least_hourly() -> None:
    """Another daemon has done its round."""
    said = {NOW // MINUTE_MS: 9}
    turns, _ = asked(Turns(), said, A, 5, 10, NOW)
    for large in range(5):
        turns, turn = asked(turns, said, TopicPartition("large", large), 1000, 10, NOW)
        assert turn.until_ms == NOW + ASKED_MS
    turns, turn = asked(forgone(turns, A, due=True), said, B, 1, 10, NOW)
    assert turn.ahead == 6
    assert asked(forgone(turns, A, due=False), said, B, 1, 10, NOW)[1].ahead == 5


def test_what_the_plan_has_shown_is_not_forgotten_while_it_waits() -> None:
    """Else each attempt would read everything again to learn that there is no room."""
    said = {NOW // MINUTE_MS: 4}
    turns, turn = asked(Turns(), said, A, 6, 10, NOW)
    assert turn.until_ms == 0
    turns, turn = asked(turns, said, A, 8, 10, NOW)
    assert (turn.until_ms, turn.records) == (NOW + HOUR * MINUTE_MS, 8)
    _, turn = asked(turns, said, A, 6, 10, NOW + MINUTE_MS)
    assert (turn.until_ms, turn.records) == (NOW + HOUR * MINUTE_MS, 8)


def test_what_a_round_has_still_to_say_is_reserved_until_nothing_was_heard_of_it_for_an_hour() -> None:
    turns, _ = asked(Turns(), {}, A, 6, 10, NOW)
    assert asked(turns, {}, B, 5, 10, NOW)[1].until_ms == NOW + MINUTE_MS
    assert asked(turns, {}, B, 4, 10, NOW)[1].until_ms == 0
    assert asked(spoken(turns, A, 2, 0, NOW), {}, B, 6, 10, NOW)[1].until_ms == 0
    left = published(spoken(turns, A, 4, 0, NOW), A, 2, NOW)
    assert asked(left, {}, B, 9, 10, NOW)[1].until_ms
    assert asked(spoken(left, A, 0, 2, NOW), {}, B, 9, 10, NOW)[1].until_ms == 0
    assert asked(forgone(left, A, due=False), {}, B, 9, 10, NOW)[1].until_ms, "what it replaced is still to be deleted"
    assert asked(forgone(turns, A, due=True), {}, B, 10, 10, NOW)[1].until_ms == 0
    assert asked(turns, {}, B, 10, 10, NOW + RESERVED_MS)[1].until_ms == 0


@dataclass(frozen=True)
class Arrival:
    """A round of a partition of its own. Minutes; ``first``: what it is taken for before its plan is known; ``fails``: it says nothing."""

    at: int
    first: int
    records: int
    takes: int
    grace: int
    fails: bool


ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 200), st.integers(1, 30), st.integers(1, 30), st.integers(0, 50), st.integers(1, 50), st.booleans()),
    min_size=1,
    max_size=14,
)
BIG_AMONG_SMALL = [Arrival(5, 25, 25, 0, 10, False), *(Arrival(at, 3, 3, 0, 10, False) for at in range(0, 60, 5))]


@given(ARRIVALS, st.integers(4, 20))
@example(BIG_AMONG_SMALL, 10)
@settings(max_examples=150)
def test_each_gets_its_turn_and_no_hour_gets_more_than_the_budget_or_one_round(arrivals: list[Arrival], per_hour: int) -> None:
    names = [TopicPartition("t", number) for number in range(len(arrivals))]
    turns, said = Turns(), Counter[int]()
    by_round: list[Counter[int]] = [Counter() for _ in arrivals]
    asks = {number: one.at for number, one in enumerate(arrivals)}
    speaks: dict[int, list[tuple[int, bool]]] = {}
    begun: list[int] = []
    came: list[int] = []
    minute = 0
    while asks or speaks:
        now_ms = (NOW // MINUTE_MS + minute) * MINUTE_MS
        for number, last in speaks.pop(minute, []):
            one = arrivals[number]
            ends = one.records // 3
            count = ends if last else one.records - ends
            if not one.fails:
                said[now_ms // MINUTE_MS] += count
                by_round[number][now_ms // MINUTE_MS] += count
            if one.fails:
                turns = forgone(turns, names[number], due=False)
            elif last:
                turns = spoken(turns, names[number], 0, count, now_ms)
            else:
                turns = published(spoken(turns, names[number], count, 0, now_ms), names[number], ends, now_ms)
                turns = forgone(turns, names[number], due=False)
                speaks.setdefault(minute + one.grace, []).append((number, True))
        for number in sorted(number for number, at in asks.items() if at <= minute):
            one = arrivals[number]
            came += [number] * (number not in came)
            turns, turn = asked(turns, said, names[number], one.first, per_hour, now_ms)
            if not turn.until_ms:
                turns, turn = asked(turns, said, names[number], one.records, per_hour, now_ms)
            if turn.until_ms:
                assert turn.until_ms > now_ms
                asks[number] = minute + -(-(turn.until_ms - now_ms) // MINUTE_MS)
            else:
                del asks[number]
                begun.append(number)
                speaks.setdefault(minute + 1 + one.takes, []).append((number, False))
        minute += 1
        assert minute < 200 + (len(arrivals) + 1) * 4 * HOUR, f"{sorted(asks)} starve"
    assert sorted(begun) == list(range(len(arrivals)))
    for start in said:
        hour = range(start, start + HOUR)
        rounds = [found for one in by_round if (found := sum(one[at] for at in hour))]
        assert sum(rounds) <= per_hour or len(rounds) == 1, (start, rounds)


def test_places_are_given_by_time_and_then_by_name() -> None:
    full = {NOW // MINUTE_MS: 10}
    turns, _ = asked(Turns(), full, B, 5, 10, NOW)
    turns, turn = asked(turns, full, A, 5, 10, NOW)
    assert turn.ahead == 0
    assert asked(turns, full, B, 5, 10, NOW)[1].ahead == 1
    assert asked(replace(turns, waiting={}), full, B, 5, 10, NOW)[1].ahead == 0
