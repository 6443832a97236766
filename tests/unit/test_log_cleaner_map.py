"""LogCleanerTest's behaviours on the offset map: what a round covers, and where the next one begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import Life, LogBuilder


def test_one_key_a_round(tmp_path: Path) -> None:
    """testPartialSegmentClean: a map of one key; the tail stays as it is until its turn comes."""
    log = LogBuilder()
    log.put("0=a")
    log.put("1=a")
    log.put("0=b")
    log.put("1=b")
    log.put("0=c")
    log.roll()
    life = Life(tmp_path, log)
    life.round(map_entries=1)
    assert (life.next_dirty_offset, life.live()) == (1, ["0:0=a", "1:1=a", "2:0=b", "3:1=b", "4:0=c"])
    life.round(map_entries=1)
    assert (life.next_dirty_offset, life.live()) == (2, ["0:0=a", "1:1=a", "2:0=b", "3:1=b", "4:0=c"])
    life.round(map_entries=1)
    assert (life.next_dirty_offset, life.live()) == (3, ["1:1=a", "2:0=b", "3:1=b", "4:0=c"])
    life.round(map_entries=1)
    assert (life.next_dirty_offset, life.live()) == (4, ["2:0=b", "3:1=b", "4:0=c"])
    life.round(map_entries=1)
    assert (life.next_dirty_offset, life.live()) == (6, ["3:1=b", "4:0=c"])


def test_uncleanable_offset_inside_a_segment_leaves_the_segment(tmp_path: Path) -> None:
    """testCleaningWithUncleanableSection"""
    log = LogBuilder()
    for _ in range(4):
        log.put("1=a", "2=a")
        log.roll()
    life = Life(tmp_path, log)
    life.round(first_uncleanable_offset=5)
    assert life.next_dirty_offset == 4
    assert life.live() == ["2:1=a", "3:2=a", "4:1=a", "5:2=a", "6:1=a", "7:2=a"]


@pytest.mark.parametrize(("first", "upper", "keys"), [(0, 1, 1), (1, 3, 2), (2, 6, 4), (0, 6, 6)])
def test_ranges_by_segment(tmp_path: Path, first: int, upper: int, keys: int) -> None:
    """testBuildOffsetMap: a range [first dirty, uncleanable) of whole segments enters the map."""
    log = LogBuilder()
    for number in range(6):
        log.put(f"k{number}=a")
        log.roll()
    summary = Life(tmp_path, log).round(first_dirty_offset=first, first_uncleanable_offset=upper)
    assert (summary.map_entries, summary.next_dirty_offset) == (keys, upper)


def test_huge_gap_takes_no_room_in_the_map(tmp_path: Path) -> None:
    """testBuildOffsetMapFakeLarge (KAFKA-3587): 4 keys, 2 to the 31 offsets apart, in a map of 4."""
    log = LogBuilder()
    log.put("0=a", "1=a")
    log.roll(2**31 + 10)
    log.put("2=a", "0=b")
    life = Life(tmp_path, log)
    summary = life.round(map_entries=4)
    assert summary.next_dirty_offset == 2**31 + 12
    assert summary.map_entries == 3
    assert life.live() == ["1:1=a", f"{2**31 + 10}:2=a", f"{2**31 + 11}:0=b"]


def test_map_stops_in_mid_batch(tmp_path: Path) -> None:
    """testBuildPartialOffsetMap: two of three keys fit."""
    log = LogBuilder()
    log.put("0=a", "1=a")
    log.put("2=b", "3=b", "4=b")
    life = Life(tmp_path, log)
    summary = life.round(first_dirty_offset=2, map_entries=2)
    assert (summary.map_entries, summary.next_dirty_offset) == (2, 4)


def test_dirty_offset_jumps_gaps_in_one_segment(tmp_path: Path) -> None:
    """testCleaningBeyondMissingOffsets (KAFKA-8764): a segment whose tail offsets are missing is clean up to its end."""
    log = LogBuilder()
    log.put("0=a", "1=a")
    log.roll(100)
    log.put("2=a")
    life = Life(tmp_path, log)
    assert life.round(first_uncleanable_offset=100).next_dirty_offset == 100


def test_dirty_offset_jumps_gaps_over_segments(tmp_path: Path) -> None:
    """testCleaningBeyondMissingOffsets: dirty offset, next segments' first batches and the end far apart."""
    log = LogBuilder()
    log.put("0=a")
    log.roll(50)
    log.skip(20)
    log.put("1=a")
    log.roll(200)
    log.skip(5)
    log.put("0=b")
    life = Life(tmp_path, log)
    assert life.round(first_dirty_offset=10, first_uncleanable_offset=200).next_dirty_offset == 200
    assert life.round().next_dirty_offset == 206
    assert life.live() == ["70:1=a", "205:0=b"]


def test_first_dirty_offset_is_never_aligned(tmp_path: Path) -> None:
    """Records below the first dirty offset do not enter the map, though their segment is read."""
    log = LogBuilder()
    log.put("1=a", "2=a", "3=a", "1=b")
    log.put("2=c")
    life = Life(tmp_path, log)
    summary = life.round(first_dirty_offset=3)
    assert summary.map_entries == 2
    assert life.live() == ["2:3=a", "3:1=b", "4:2=c"]
