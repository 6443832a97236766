"""Which segments a round left alone: as ranges, as a line of run history, and back."""

from __future__ import annotations

from compactor.control.summary import MAX_SKIPPED_RANGES, SkippedSegmentRange, format_skipped_ranges, parse_skipped_ranges, skipped_ranges
from compactor.model.segment import RemoteLogSegmentMetadata
from tests.support.segments import make_segment


def segment(start: int, end: int) -> RemoteLogSegmentMetadata:
    return make_segment(f"s{start}", start, end)


def test_neighbours_with_one_reason_are_one_range() -> None:
    live = [segment(0, 9), segment(10, 19), segment(20, 29), segment(30, 39), segment(40, 49)]
    found = skipped_ranges(live, {"s0": "a", "s10": "a", "s20": "b", "s40": "b"})
    assert found == [SkippedSegmentRange(0, 19, "a"), SkippedSegmentRange(20, 29, "b"), SkippedSegmentRange(40, 49, "b")]
    assert format_skipped_ranges(found) == "0-19: a; 20-29: b; 40-49: b"
    assert parse_skipped_ranges(format_skipped_ranges(found)) == found
    assert parse_skipped_ranges("") == [] == skipped_ranges(live, {})


def test_a_reason_cannot_end_a_range() -> None:
    assert parse_skipped_ranges(format_skipped_ranges([SkippedSegmentRange(1, 2, "x; 3-4: y")])) == [SkippedSegmentRange(1, 2, "x, 3-4: y")]


def test_the_longest_ranges_are_kept() -> None:
    many = [SkippedSegmentRange(100 * at, 100 * at + at, "why") for at in range(MAX_SKIPPED_RANGES + 5)]
    assert parse_skipped_ranges(format_skipped_ranges(many)) == many[5:]
