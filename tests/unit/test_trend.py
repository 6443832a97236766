"""The seven days of figures that the pages show."""

from __future__ import annotations

import zlib
from pathlib import Path

from compactor.constants import HOUR_MS
from compactor.daemon import status as trend
from compactor.daemon.scheduling import Due
from compactor.daemon.status import (
    MOST_HOURS,
    MOST_TOPICS,
    HourlyStorageFigures,
    TierStorageTrend,
    merged_storage_trend,
    with_current_hour_figures,
)
from compactor.model.ids import TopicPartition
from compactor.storage.factory import open_store
from tests.support.dues import due_of, waiting

NOW = 480_000 * HOUR_MS + 1234


def status(topic: str, size: int, dirty: int = 0, freed: tuple[tuple[int, int], ...] = ()) -> Due:
    return due_of(TopicPartition(topic, 0), bytes=size, dirty_bytes=dirty, waiting=waiting(5), freed=freed)


def test_an_hour_is_the_sum_of_all_partitions_and_of_each_topic() -> None:
    found = with_current_hour_figures(TierStorageTrend(), [status("a", 10, 3), status("b", 20, 4, ((NOW, 7),))], NOW)
    hour = NOW - NOW % HOUR_MS
    assert found.hours == (HourlyStorageFigures(hour, 40, 7, 7),)
    assert found.topics == {"a": (HourlyStorageFigures(hour, 15, 3, 0),), "b": (HourlyStorageFigures(hour, 25, 4, 7),)}


def test_what_was_reclaimed_is_completed_for_the_hours_of_the_last_day() -> None:
    before = tuple(HourlyStorageFigures((480_000 - back) * HOUR_MS, 1, 1, 2) for back in (30, 3))
    found = with_current_hour_figures(TierStorageTrend(hours=before), [status("a", 10, freed=((NOW - 3 * HOUR_MS, 9),))], NOW)
    assert [each.reclaimed for each in found.hours] == [2, 9, 0]


def test_the_trend_is_bounded_by_hours_and_topics() -> None:
    found = TierStorageTrend()
    for back in range(MOST_HOURS + 20, -1, -1):
        found = with_current_hour_figures(found, [status("a", 1)], NOW - back * HOUR_MS)
    assert len(found.hours) == len(found.topics["a"]) == MOST_HOURS
    many = with_current_hour_figures(found, [status(f"t{at:03}", at) for at in range(MOST_TOPICS + 50)], NOW)
    assert len(many.topics) == MOST_TOPICS
    assert "t149" in many.topics
    assert "t049" not in many.topics
    hours = [tuple(HourlyStorageFigures(NOW, 2**50 + at * 7919, 2**45 + at, 2**40) for _ in range(MOST_HOURS)) for at in range(MOST_TOPICS)]
    week = {f"a-topic-with-a-long-name-{at}": figures for at, figures in enumerate(hours)}
    assert len(zlib.compress(TierStorageTrend(topics=week).model_dump_json().encode())) < 1 << 20


def test_trends_of_two_daemons_are_merged_by_hour() -> None:
    ours_by_hour = (HourlyStorageFigures(2 * HOUR_MS, 1, 1, 1),)
    theirs_by_hour = (HourlyStorageFigures(HOUR_MS, 9, 9, 9), HourlyStorageFigures(2 * HOUR_MS, 8, 8, 8))
    ours = TierStorageTrend(hours=ours_by_hour, topics={"a": ours_by_hour})
    theirs = TierStorageTrend(hours=theirs_by_hour, topics={"a": theirs_by_hour[:1]})
    found = merged_storage_trend(theirs, ours)
    assert [(each.hour_ms, each.stored) for each in found.hours] == [(HOUR_MS, 9), (2 * HOUR_MS, 1)]
    assert [each.stored for each in found.topics["a"]] == [9, 1]


def test_a_damaged_trend_is_begun_anew(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put(trend.TREND_KEY, b"not a trend")
    assert trend.read_storage_trend(store) == TierStorageTrend()
    made = with_current_hour_figures(TierStorageTrend(), [status("a", 10)], NOW)
    trend.write_storage_trend(store, made)
    assert trend.read_storage_trend(store) == made
