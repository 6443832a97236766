"""Which clean segments are read, what filters have brought, which engine is taken: decisions without a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bloom.sidecar import BATCH_RUNS, MARKERS, RemovableRecordCounts, Sidecar, SidecarKeyHashCollector
from bloom.sizing import FilterDesign, design_filter, useless_probability
from compactor.config.settings import CleanerSettings
from compactor.constants import CompactorEpoch
from compactor.control.state import RunHistoryEntry
from compactor.round.ports import (
    BloomFilterUsageStatistics,
    choose_key_engine,
    decide_by_sidecar,
    design_bloom_filter,
    estimate_distinct_keys,
    expected_dirty_keys,
    filter_usage_of_run,
    filter_usage_of_runs,
)
from compactor.tier.sidecars import NO_SIDECAR, SidecarHead

NOTHING_REMOVABLE = RemovableRecordCounts()


def sidecar(keys: int, *, made_for: FilterDesign | None = None, due: RemovableRecordCounts = NOTHING_REMOVABLE, seed: int = 1) -> Sidecar:
    portrait = SidecarKeyHashCollector(made_for)
    portrait.add_record_key_hashes(np.random.default_rng(seed).integers(0, 2**64, (keys, 2), np.uint64))
    return portrait.build_sidecar("id", keys, due, np.zeros(0, BATCH_RUNS), np.zeros(0, MARKERS))


def look(head: SidecarHead, *, keys: int = 100, due: str = "", record: BloomFilterUsageStatistics | None = None) -> Any:
    return decide_by_sidecar(head, due, dirty_key_count=keys, filter_usage=record or BloomFilterUsageStatistics(), now_ms=1_000)


def with_filter(probes: int = 1_000, due: RemovableRecordCounts = RemovableRecordCounts()) -> SidecarHead:  # noqa: B008
    made_for = design_filter(50, probes, 100_000)
    assert made_for is not None
    return SidecarHead(sidecar(50, made_for=made_for, due=due), "", 0)


def test_a_filter_is_asked_where_nothing_else_decides() -> None:
    found = look(with_filter())
    assert (found.must, found.may, found.askable) == ("", "", True)


@pytest.mark.parametrize(
    ("due", "why"),
    [
        (RemovableRecordCounts(tombstones=2, tombstones_without_horizon=2), "2 tombstones have no delete horizon yet"),
        (RemovableRecordCounts(tombstones=1, earliest_tombstone_horizon_ms=1_000), "a tombstone's delete horizon has passed"),
        (RemovableRecordCounts(keyless_records=3), "3 records have no key"),
    ],
)
def test_what_is_due_is_read(due: RemovableRecordCounts, why: str) -> None:
    assert look(with_filter(due=due)).must == why
    assert look(with_filter(due=due), keys=0).must == why


def test_a_horizon_that_is_still_to_come_waits() -> None:
    assert look(with_filter(due=RemovableRecordCounts(tombstones=1, earliest_tombstone_horizon_ms=1_001))).must == ""


def test_the_fold_s_reason_comes_first() -> None:
    assert look(with_filter(), due="a transaction marker is due").must == "a transaction marker is due"
    assert look(SidecarHead(None, NO_SIDECAR, 0), due="a transaction marker is due").must == "a transaction marker is due"


def test_without_a_sidecar_or_a_filter_it_is_read() -> None:
    assert look(SidecarHead(None, NO_SIDECAR, 0)).must == "it has no sidecar"
    assert look(SidecarHead(sidecar(50), "", 0)).must == "no filter pays for it"


def test_without_dirty_keys_nothing_needs_to_be_asked() -> None:
    assert look(with_filter(), keys=0).may == "nothing is due in it"
    assert look(SidecarHead(sidecar(0), "", 0)).may == "it has no key"


def test_a_filter_for_far_fewer_keys_is_not_fetched() -> None:
    assert look(with_filter(probes=100), keys=1_000_000).must == "its filter is made for 100 keys, and this round brings up to 1000000"
    assert look(with_filter(probes=1_000_000), keys=1_000_000).askable


def test_filters_that_cost_more_than_they_spare_are_off_and_it_is_said() -> None:
    costly = BloomFilterUsageStatistics(asked=60, skipped=3, useless=1, bytes_read=10_000, bytes_saved=9_000)
    assert not costly.are_bloom_filters_worthwhile
    why = look(with_filter(), record=costly).must
    assert why.startswith(
        "filters do not pay on this partition and are off: of 60 filters asked, 3 saved a read, 1 was a false positive (25 %)"
    )
    assert design_bloom_filter(CleanerSettings(), costly, 1_000, 50, 100_000) is None
    assert BloomFilterUsageStatistics(asked=49, bytes_read=10_000).are_bloom_filters_worthwhile, "too few were asked to tell"
    assert BloomFilterUsageStatistics(asked=60, skipped=30, bytes_read=10_000, bytes_saved=10_001).are_bloom_filters_worthwhile


def test_the_settings_say_how_often_a_filter_may_be_wrong_and_how_large_it_may_be() -> None:
    def designed(**settings: Any) -> FilterDesign | None:
        return design_bloom_filter(CleanerSettings(**settings), BloomFilterUsageStatistics(), 1_000, 10_000, 100_000_000)

    usual, rare = designed(), designed(bloom_false_positive_rate=0.001)
    assert usual is not None
    assert rare is not None
    assert [useless_probability(each.rate, 1_000) for each in (usual, rare)] == pytest.approx([0.01, 0.001])
    assert designed(bloom_max_bytes=usual.bytes) == usual
    assert designed(bloom_max_bytes=usual.bytes - 1) is None


def run(**stats: int) -> RunHistoryEntry:
    return RunHistoryEntry(
        run_id="r", leader_epoch=CompactorEpoch(0), holder="h", started_ms=0, slot=1, status="cleaned", stats=dict(stats)
    )


def test_what_is_remembered_counts() -> None:
    runs = [
        run(filter_asked=10, filter_skipped=6, filter_useless=2, filter_bytes_read=5, filter_bytes_written=7, bytes_skipped=100),
        run(filter_asked=1, filter_skipped=1, bytes_skipped=11),
    ]
    record = filter_usage_of_runs(runs)
    assert record == BloomFilterUsageStatistics(asked=11, skipped=7, useless=2, bytes_read=12, bytes_saved=111)
    assert record.false_positive_rate == 2 / 9
    assert filter_usage_of_run({}) == BloomFilterUsageStatistics()


def test_filters_are_made_for_the_keys_that_rounds_bring() -> None:
    assert expected_dirty_keys(CleanerSettings(), [], 0) == 100_000
    assert expected_dirty_keys(CleanerSettings(), [run(map_entries=70), run(map_entries=900), run()], 30) == 900
    assert expected_dirty_keys(CleanerSettings(), [run(map_entries=900), *[run(map_entries=5)] * 5], 30) == 30
    assert expected_dirty_keys(CleanerSettings(bloom_design_keys=7), [run(map_entries=900)], 30) == 7


def test_keys_are_estimated_from_sketches_and_never_beyond_the_records() -> None:
    one, same, other = sidecar(5_000, seed=1), sidecar(5_000, seed=1), sidecar(5_000, seed=2)
    both = estimate_distinct_keys([SidecarHead(one, "", 0), SidecarHead(same, "", 0)], [5_000, 5_000])
    assert 4_900 <= both <= 5_500
    assert 9_700 <= estimate_distinct_keys([SidecarHead(one, "", 0), SidecarHead(other, "", 0)], [5_000, 5_000]) <= 10_000
    assert estimate_distinct_keys([SidecarHead(None, NO_SIDECAR, 0)], [123]) == 123


def test_the_engine_follows_from_the_estimate() -> None:
    assert choose_key_engine("auto", 1_000, 20_000) == "memory"
    assert choose_key_engine("auto", 1_001, 20_000) == "partitioned"
    assert choose_key_engine("memory", 10**9, 1) == "memory"
    assert choose_key_engine("partitioned", 1, 10**9) == "partitioned"
