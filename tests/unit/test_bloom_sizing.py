"""The promise is made per segment, and a filter that costs more than it saves is not made."""

from __future__ import annotations

import numpy as np
import pytest
from pybloom_live import BloomFilter

from bloom import sizing
from bloom.sidecar import (
    REGISTERS,
    add_to_sketch,
    empty_sketch,
    estimate_distinct_keys,
    merge_sketches,
)


@pytest.mark.parametrize("probes", [1, 100, 10_000, 5_000_000, 10**9])
def test_the_rate_per_key_keeps_the_promise_per_segment(probes: int) -> None:
    assert sizing.useless_probability(sizing.rate_per_key(probes), probes) == pytest.approx(0.01)


def test_one_per_cent_at_five_million_keys_is_two_in_a_thousand_million() -> None:
    rate = sizing.rate_per_key(5_000_000)
    assert rate == pytest.approx(2.01e-9, rel=1e-3)
    assert sizing.filter_size_bytes(1_000_000, rate) * 8 / 1_000_000 == pytest.approx(41.7, abs=0.1)


def test_one_per_cent_per_key_hardly_ever_lets_458_keys_skip() -> None:
    assert sizing.useless_probability(0.01, 458) == pytest.approx(0.99, abs=1e-3)


@pytest.mark.parametrize("keys", [1, 7, 1_000, 123_456])
@pytest.mark.parametrize("probes", [1, 5_000, 5_000_000])
def test_the_size_is_the_librarys(keys: int, probes: int) -> None:
    rate = sizing.rate_per_key(probes)
    assert sizing.filter_size_bytes(keys, rate) == (BloomFilter(keys, rate).num_bits + 7) // 8


def test_a_filter_is_designed_where_it_pays() -> None:
    made = sizing.design_filter(1_000_000, 5_000_000, segment_bytes=1 << 30)
    assert made is not None
    assert (made.keys, made.probes, made.rate) == (1_000_000, 5_000_000, sizing.rate_per_key(5_000_000))
    assert made.bytes == sizing.filter_size_bytes(made.keys, made.rate)


def test_no_filter_where_none_pays() -> None:
    size = sizing.filter_size_bytes(1_000, sizing.rate_per_key(1_000_000))
    assert sizing.design_filter(1_000, 1_000_000, segment_bytes=4 * size) is None  # half skipped, twice the filter: no gain
    assert sizing.design_filter(1_000, 1_000_000, segment_bytes=5 * size) is not None
    assert sizing.design_filter(1_000, 1_000_000, segment_bytes=5 * size, segment_skip_rate=0.1) is None
    assert sizing.design_filter(1_000, 1_000_000, segment_bytes=1 << 30, segment_skip_rate=0.0) is None
    assert sizing.design_filter(0, 1_000_000, segment_bytes=1 << 30) is None


def test_a_filter_follows_the_configured_rate_of_useless_reads() -> None:
    made = sizing.design_filter(1_000_000, 10_000, segment_bytes=1 << 30, max_useless_read_rate=0.1)
    assert made is not None
    assert sizing.useless_probability(made.rate, 10_000) == pytest.approx(0.1)


def test_a_filter_above_the_largest_size_is_not_made() -> None:
    size = sizing.filter_size_bytes(1_000_000, sizing.rate_per_key(10_000))
    assert sizing.design_filter(1_000_000, 10_000, segment_bytes=1 << 30, max_bytes=size) is not None
    assert sizing.design_filter(1_000_000, 10_000, segment_bytes=1 << 30, max_bytes=size - 1) is None


def test_a_filter_asked_for_far_more_keys_than_it_was_made_for_does_not_pay() -> None:
    made = sizing.design_filter(100_000, 1_000, segment_bytes=1 << 28)
    assert made is not None
    assert sizing.is_filter_worthwhile(made.bytes, made.rate, 1_000, 1 << 28)
    assert not sizing.is_filter_worthwhile(made.bytes, made.rate, 10_000_000, 1 << 28)


def test_a_partitions_own_figures_decide_after_the_trial() -> None:
    assert sizing.are_filters_worthwhile(sizing.TRIAL - 1, 10**9, 0)
    assert not sizing.are_filters_worthwhile(sizing.TRIAL, 10**9, 10**9)
    assert sizing.are_filters_worthwhile(sizing.TRIAL, 10**9, 10**9 + 1)


def hashes(rows: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.random.default_rng(seed).integers(0, 2**64, size=(rows, 2), dtype=np.uint64)


@pytest.mark.parametrize("keys", [0, 1, 2, 50, 3_000, 12_000, 200_000])
def test_distinct_keys_are_estimated_within_five_standard_errors(keys: int) -> None:
    some = hashes(keys, seed=keys + 1)
    sketch = empty_sketch()
    for _ in range(3):  # repeated keys change nothing
        add_to_sketch(sketch, some)
    assert abs(estimate_distinct_keys(sketch) - keys) <= 5 * 1.04 / REGISTERS**0.5 * keys


def test_segments_that_share_keys_are_not_counted_twice() -> None:
    some = hashes(100_000, seed=3)
    sketches = []
    for begin in (0, 20_000, 40_000):
        sketch = empty_sketch()
        add_to_sketch(sketch, some[begin : begin + 60_000])
        sketches.append(sketch)
    assert estimate_distinct_keys(merge_sketches(sketches)) == pytest.approx(100_000, rel=0.08)
    assert estimate_distinct_keys(merge_sketches([])) == 0


def test_a_sketch_at_its_very_end_still_answers() -> None:
    assert estimate_distinct_keys(np.full(REGISTERS, 52, dtype=np.uint8)) > 2**60
    saturated = np.full(REGISTERS, 53, dtype=np.uint8)
    saturated[0] = 52
    assert estimate_distinct_keys(saturated) > 2**60
