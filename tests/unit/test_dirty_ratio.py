"""Which dirty ratio ``min_cleanable_dirty_ratio = "auto"`` chooses: the cheapest by write rate, segment sizes and prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.config.sections import SegmentReplacementCosts
from compactor.config.settings import CleanerSettings, Settings
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import CHOICES, DirtyRatioThreshold, assess_round, dirty_ratio_threshold
from compactor.storage.schemes import DIRECTORY, StorePrices, store_kind
from tests.builders import LogBuilder
from tests.support.tier_cli import TierCli
from tests.unit.test_round_plan import NOW, segment, state

S3 = store_kind("s3://bucket/tier").prices
GIB, MIB, DAY_MS = 1 << 30, 1 << 20, 86_400_000


def threshold(
    *,
    clean: int = 100,
    size: int = GIB,
    dirty: int = 20,
    days: int = 7,
    prices: StorePrices = S3,
    replaced_ms: int = 0,
    saved: float | None = None,
) -> DirtyRatioThreshold:
    """Of a partition with so many segments, whose dirty ones were written within ``days``."""
    cleaner = CleanerSettings(min_cleanable_dirty_ratio="auto").with_segment_replacement_costs(SegmentReplacementCosts(prices, replaced_ms))

    def segments(count: int, stamp: int) -> list[RemoteLogSegmentMetadata]:
        return [segment(n * 10, n * 10 + 9, size, first_timestamp_ms=DAY_MS, max_timestamp_ms=DAY_MS + stamp) for n in range(count)]

    return dirty_ratio_threshold(cleaner, segments(clean, 0), segments(dirty, days * DAY_MS), saved)


def test_large_segments_are_cleaned_early_and_small_ones_late() -> None:
    large, small = threshold(), threshold(clean=10_000, size=4 * MIB, dirty=2_000)
    assert large.ratio == 0.1
    assert 0.1 < small.ratio < 0.6
    assert threshold(clean=10_000, size=MIB // 8, dirty=2_000).ratio > small.ratio


def test_a_fast_writer_is_cleaned_later_than_a_slow_one() -> None:
    fast, slow = (threshold(clean=10_000, size=MIB, dirty=2_000, days=days).ratio for days in (1, 60))
    assert fast > slow


def test_a_topic_whose_rounds_save_little_is_cleaned_late() -> None:
    assert threshold(clean=1_000, size=16 * MIB, dirty=200, saved=0.0).ratio == 0.6
    assert threshold(clean=1_000, size=16 * MIB, dirty=200, saved=1.0).ratio < 0.6


def test_a_long_undo_window_makes_rounds_rare() -> None:
    assert threshold(replaced_ms=30 * DAY_MS).ratio > threshold().ratio


def test_the_choice_is_the_cheapest_by_the_written_formula() -> None:
    """100 GiB clean, 20 GiB a week: storage of half the dirty bytes, and per round two reads, five objects and their check per segment."""

    def usd_month(ratio: float) -> float:
        dirty = 100 * ratio / (1 - ratio)
        sources = -(-(100 + dirty) // 1)
        requests = (2 * sources + 500) * 0.4e-6 + (500 + 100 + 5) * 5e-6
        return dirty / 2 * 0.023 + 20 / 7 * 30 / dirty * requests

    chosen = threshold()
    assert usd_month(chosen.ratio) == min(map(usd_month, CHOICES))
    assert chosen.saved_usd_month == pytest.approx(usd_month(0.5) - usd_month(chosen.ratio), abs=1e-3)
    assert "0.9 times" in chosen.why


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (threshold(prices=DIRECTORY.prices), "storage costs nothing here"),
        (threshold(clean=0), "nothing was cleaned yet"),
        (threshold(days=0), "the timestamps do not show how fast it grows"),
    ],
)
def test_kafkas_default_holds_where_nothing_can_be_computed(case: DirtyRatioThreshold, why: str) -> None:
    assert case == DirtyRatioThreshold(0.5, why)


def test_the_choice_decides_whether_a_round_is_due() -> None:
    costs = SegmentReplacementCosts(S3, 0)
    old, new = (segment(n * 10, n * 10 + 9, GIB, first_timestamp_ms=1, max_timestamp_ms=NOW) for n in (0, 1))
    live = (*(segment(n, n, GIB) for n in range(-8, 0)), old, new)
    auto = assess_round(
        state(*live, clean=10), CleanerSettings(min_cleanable_dirty_ratio="auto").with_segment_replacement_costs(costs), NOW
    )
    assert auto.threshold.saved_usd_month is not None
    assert auto.due is (auto.dirty_ratio > auto.threshold.ratio)
    assert f"{auto.threshold.ratio:g} (auto)" in auto.reason
    assert not assess_round(state(*live, clean=10), CleanerSettings(), NOW).due


def test_plan_and_explain_say_what_was_chosen(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"cleaner": {"min_cleanable_dirty_ratio": "auto"}})
    log = LogBuilder()
    log.put("a=1")
    log.roll()
    log.put("a=2")
    cli.bring(log.write(tmp_path / "orders-0"))
    (row,) = cli.do("plan")["partitions"]
    assert (row["min_cleanable_dirty_ratio"], row["min_cleanable_dirty_ratio_why"]) == (0.5, "storage costs nothing here")
    assert "above 0.5 (auto)" in row["reason"]
    (fact,) = [fact for fact in cli.do("explain", "orders-0")["facts"] if fact["kind"] == "automatic_ratio"]
    assert "storage costs nothing here" in fact["text"]


def test_plan_and_explain_say_what_the_choice_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition on a store that costs as much as S3. It is tiny and turns over within minutes: only requests count."""
    monkeypatch.setattr("compactor.access.tier.store_kind", lambda url: store_kind("s3://bucket/tier"))
    cli = TierCli(tmp_path / "cli", {"cleaner": {"min_cleanable_dirty_ratio": "auto"}})
    log = LogBuilder(time=1)
    for _ in range(2):
        log.put("a=1", "b=1")
        log.roll()
    cli.bring(log.write(tmp_path / "orders-0"))
    cli.run()
    log.time += 60_000
    log.put("a=2", pid=1)
    log.time += 60_000
    log.put("a=3", pid=1)
    cli.bring(log.write(tmp_path / "orders-0"))
    (row,) = cli.do("plan")["partitions"]
    assert row["min_cleanable_dirty_ratio"] == 0.6
    assert "times its clean size are written a month" in row["min_cleanable_dirty_ratio_why"]
    saved = row["min_cleanable_dirty_ratio_saves_usd_month"]
    (fact,) = [fact for fact in cli.do("explain", "orders-0")["facts"] if fact["kind"] == "automatic_ratio"]
    assert fact["saves_usd_month"] == saved > 0.01
    assert f"it saves {saved:.2f} USD a month" in fact["text"]
    assert "chose 0.6" in cli.ask("plan", output="table").document


def test_a_topic_can_choose_a_number_beside_auto() -> None:
    settings = Settings(cleaner=CleanerSettings(min_cleanable_dirty_ratio="auto"))
    assert settings.cleaner_settings_for_topic("orders").min_cleanable_dirty_ratio == "auto"
    assert settings.cleaner_settings_for_topic("orders", {"min.cleanable.dirty.ratio": "0.3"}).min_cleanable_dirty_ratio == 0.3
