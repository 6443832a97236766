"""Token bucket of metadata records: every round is admitted in the end, and no hour exceeds the cap unless one round does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given, strategies as st

from compactor.adapters.brokers.topic import (
    _HOUR_MS,
    COUNTED_MINUTES,
    MAX_SILENCE_MS,
    MAX_WAITING_MS,
    MINUTE_MS,
    MINUTES_PER_HOUR,
    MetadataTokenBucket,
    counts_of_last_hour,
    with_timestamps_added,
)
from compactor.model.ids import TopicPartition
from tests.support.depth import examples

NOW = 30_000_000 * MINUTE_MS
MINUTE = NOW // MINUTE_MS
A, B, C = (TopicPartition("orders", number) for number in range(3))


def until(bucket: MetadataTokenBucket, written: dict[int, int], name: TopicPartition, records: int, now_ms: int = NOW) -> int:
    """Return until when a round has to wait under a cap of 10 records, 0 if it is admitted."""
    wait = bucket.after_admission(written, name, records, 10, now_ms)[1]
    return wait.until_ms if wait else 0


def after(
    bucket: MetadataTokenBucket, written: dict[int, int], name: TopicPartition, records: int, now_ms: int = NOW
) -> MetadataTokenBucket:
    return bucket.after_admission(written, name, records, 10, now_ms)[0]


class TestAdmission:
    def test_a_round_larger_than_the_cap_is_admitted_in_an_hour_without_records(self) -> None:
        assert until(MetadataTokenBucket(), {}, A, 1000) == 0
        assert until(MetadataTokenBucket(), {MINUTE: 1}, A, 1000) == NOW + _HOUR_MS
        assert until(after(MetadataTokenBucket(), {MINUTE: 1}, A, 1000), {MINUTE: 1}, A, 1000, NOW + _HOUR_MS) == 0

    def test_smaller_rounds_that_come_later_do_not_overtake_a_large_one(self) -> None:
        written = {MINUTE: 1}
        bucket = after(MetadataTokenBucket(), written, A, 1000)
        assert until(bucket, written, B, 1, NOW + 1) == NOW + _HOUR_MS
        bucket = after(after(bucket, written, B, 1, NOW + 1), written, A, 1000, NOW + _HOUR_MS)
        assert until(bucket, written, B, 1, NOW + _HOUR_MS) == NOW + _HOUR_MS + MINUTE_MS, "the large round is under way"

    def test_rounds_are_admitted_in_the_order_of_arrival(self) -> None:
        bucket = after(after(MetadataTokenBucket(), {MINUTE: 10}, B, 5), {MINUTE: 10}, A, 5)
        assert until(bucket, {}, A, 5), "B came first"
        assert until(after(bucket, {}, B, 5), {}, A, 5) == 0

    def test_a_silent_round_holds_up_no_other_and_keeps_its_place_for_a_day(self) -> None:
        bucket = after(MetadataTokenBucket(), {MINUTE: 9}, A, 5)
        asks = bucket.waiting[A].retry_at_ms
        assert until(bucket, {}, B, 5, asks + MAX_SILENCE_MS)
        assert until(bucket, {}, B, 5, asks + MAX_SILENCE_MS + 1) == 0
        assert until(bucket, {}, A, 5, asks + MAX_SILENCE_MS + 1) == 0
        assert A not in after(bucket, {}, C, 5, asks + MAX_WAITING_MS).waiting

    def test_a_round_that_is_not_due_any_more_holds_up_no_other(self) -> None:
        bucket = after(MetadataTokenBucket(), {MINUTE: 9}, A, 5)
        assert until(bucket, {MINUTE: 9}, B, 1)
        assert until(bucket.after_round_ended(A), {MINUTE: 9}, B, 1) == 0

    def test_the_size_that_the_plan_showed_counts_while_the_round_waits(self) -> None:
        """Otherwise each attempt would run pass 1 again to learn that the round does not fit."""
        bucket = after(after(MetadataTokenBucket(), {MINUTE: 4}, A, 6), {MINUTE: 4}, A, 8)
        assert bucket.waiting[A].records == 8
        assert until(bucket, {MINUTE: 4}, A, 6, NOW + MINUTE_MS) == NOW + _HOUR_MS


class TestReservations:
    def test_what_an_admitted_round_still_has_to_write_is_reserved(self) -> None:
        bucket = after(MetadataTokenBucket(), {}, A, 6)
        assert until(bucket, {}, B, 5) == NOW + MINUTE_MS
        assert until(bucket, {}, B, 4) == 0
        assert until(bucket.after_append(A, 2, 0, NOW), {}, B, 6) == 0
        assert until(bucket.after_round_ended(A), {}, B, 10) == 0

    def test_deletions_stay_reserved_when_the_round_has_ended(self) -> None:
        bucket = after(MetadataTokenBucket(), {}, A, 6).after_append(A, 4, 0, NOW).after_publication(A, 2, NOW).after_round_ended(A)
        assert until(bucket, {}, B, 9)
        assert until(bucket.after_append(A, 0, 2, NOW), {}, B, 9) == 0

    def test_a_reservation_ends_an_hour_after_the_last_record(self) -> None:
        bucket = after(MetadataTokenBucket(), {}, A, 6)
        assert until(bucket, {}, B, 10, NOW + _HOUR_MS - 1)
        assert until(bucket, {}, B, 10, NOW + _HOUR_MS) == 0


class TestCounting:
    def test_records_are_counted_by_minute_for_two_hours(self) -> None:
        written = with_timestamps_added((), [NOW, NOW + 1, NOW - MINUTE_MS], NOW)
        assert written == ((MINUTE - 1, 1), (MINUTE, 2))
        assert with_timestamps_added(written, [], NOW) == written
        later = NOW + COUNTED_MINUTES * MINUTE_MS
        assert with_timestamps_added(written, [later], later) == ((MINUTE + COUNTED_MINUTES, 1),)

    @pytest.mark.parametrize(("minutes", "left"), [(0, {MINUTE - 1: 1, MINUTE: 2}), (59, {MINUTE: 2}), (60, {})])
    def test_the_last_hour_has_sixty_minutes(self, minutes: int, left: dict[int, int]) -> None:
        assert counts_of_last_hour({MINUTE - 1: 1, MINUTE: 2}, NOW + minutes * MINUTE_MS) == left

    def test_a_timestamp_in_the_future_counts_as_the_time_of_reading(self) -> None:
        written = with_timestamps_added(((MINUTE - 1, 3),), [NOW + 1000 * _HOUR_MS], NOW)
        assert written == ((MINUTE - 1, 3), (MINUTE, 1))
        assert counts_of_last_hour(dict(written), NOW + _HOUR_MS) == {}

    def test_a_clock_that_was_set_back_neither_frees_the_hour_nor_blocks_it_for_long(self) -> None:
        assert counts_of_last_hour({MINUTE: 4}, NOW - 30 * MINUTE_MS) == {MINUTE: 4}
        assert counts_of_last_hour({MINUTE: 4}, NOW - _HOUR_MS) == {}


@dataclass(frozen=True)
class Arrival:
    """A round of its own partition. Times in minutes; ``first``: estimate before the plan is known; ``fails``: it writes nothing."""

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
@examples(150)
def test_every_round_is_admitted_and_no_hour_exceeds_the_cap_unless_one_round_does(arrivals: list[Arrival], per_hour: int) -> None:
    names = [TopicPartition("t", number) for number in range(len(arrivals))]
    bucket, written = MetadataTokenBucket(), Counter[int]()
    by_round: list[Counter[int]] = [Counter() for _ in arrivals]
    asks = {number: one.at for number, one in enumerate(arrivals)}
    speaks: dict[int, list[tuple[int, bool]]] = {}
    begun: list[int] = []
    minute = 0
    while asks or speaks:
        now_ms = (NOW // MINUTE_MS + minute) * MINUTE_MS
        for number, last in speaks.pop(minute, []):
            one = arrivals[number]
            ends = one.records // 3
            count = ends if last else one.records - ends
            if not one.fails:
                written[now_ms // MINUTE_MS] += count
                by_round[number][now_ms // MINUTE_MS] += count
            if one.fails:
                bucket = bucket.after_round_ended(names[number])
            elif last:
                bucket = bucket.after_append(names[number], 0, count, now_ms)
            else:
                bucket = bucket.after_append(names[number], count, 0, now_ms).after_publication(names[number], ends, now_ms)
                bucket = bucket.after_round_ended(names[number])
                speaks.setdefault(minute + one.grace, []).append((number, True))
        for number in sorted(number for number, at in asks.items() if at <= minute):
            one = arrivals[number]
            bucket, wait = bucket.after_admission(written, names[number], one.first, per_hour, now_ms)
            if wait is None:
                bucket, wait = bucket.after_admission(written, names[number], one.records, per_hour, now_ms)
            if wait is not None:
                assert wait.until_ms > now_ms
                asks[number] = minute + -(-(wait.until_ms - now_ms) // MINUTE_MS)
            else:
                del asks[number]
                begun.append(number)
                speaks.setdefault(minute + 1 + one.takes, []).append((number, False))
        minute += 1
        assert minute < 200 + (len(arrivals) + 1) * 4 * MINUTES_PER_HOUR, f"{sorted(asks)} starve"
    assert sorted(begun) == list(range(len(arrivals)))
    for start in written:
        hour = range(start, start + MINUTES_PER_HOUR)
        rounds = [found for one in by_round if (found := sum(one[at] for at in hour))]
        assert sum(rounds) <= per_hour or len(rounds) == 1, (start, rounds)
