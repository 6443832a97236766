"""How many records there were, by minute."""

from __future__ import annotations

from compactor.metadata_topic.spending import HOUR, KEPT, MINUTE_MS, counted, last_hour

NOW = 30_000_000 * MINUTE_MS
MINUTE = NOW // MINUTE_MS


def test_records_are_counted_by_minute_and_forgotten_after_two_hours() -> None:
    said = counted((), [NOW, NOW + 1, NOW - MINUTE_MS], NOW)
    assert said == ((MINUTE - 1, 1), (MINUTE, 2))
    assert counted(said, [], NOW) == said
    later = NOW + KEPT * MINUTE_MS
    assert counted(said, [later], later) == ((MINUTE + KEPT, 1),)
    assert last_hour(dict(said), NOW) == {MINUTE - 1: 1, MINUTE: 2}
    assert last_hour(dict(said), NOW + 59 * MINUTE_MS) == {MINUTE: 2}
    assert last_hour(dict(said), NOW + 60 * MINUTE_MS) == {}


def test_what_is_stamped_in_the_future_counts_when_it_is_read_and_no_longer() -> None:
    said = counted(((MINUTE - 1, 3),), [NOW + 1000 * HOUR * MINUTE_MS], NOW)
    assert said == ((MINUTE - 1, 3), (MINUTE, 1))
    assert last_hour(dict(said), NOW + HOUR * MINUTE_MS) == {}


def test_a_clock_that_was_set_back_is_no_way_around_the_budget_nor_an_end_of_it() -> None:
    said = {MINUTE: 4}
    assert last_hour(said, NOW - 30 * MINUTE_MS) == said
    assert last_hour(said, NOW - HOUR * MINUTE_MS) == {}
