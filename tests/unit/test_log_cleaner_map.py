"""LogCleanerTest's behaviours on the offset map: what a round covers, and where the next one begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import Life, log_of, tell

STORIES = {
    "testPartialSegmentClean: a map of one key; the tail stays as it is until its turn comes": """
        0=a
        1=a
        0=b
        1=b
        0=c
        /
        clean map_entries=1: next 1 | live 0:0=a 1:1=a 2:0=b 3:1=b 4:0=c
        clean map_entries=1: next 2 | live 0:0=a 1:1=a 2:0=b 3:1=b 4:0=c
        clean map_entries=1: next 3 | live 1:1=a 2:0=b 3:1=b 4:0=c
        clean map_entries=1: next 4 | live 2:0=b 3:1=b 4:0=c
        clean map_entries=1: next 6 | live 3:1=b 4:0=c""",
    "testCleaningWithUncleanableSection: an uncleanable offset inside a segment leaves the segment": """
        1=a 2=a; /; 1=a 2=a; /; 1=a 2=a; /; 1=a 2=a; /
        clean until=5: next 4 | live 2:1=a 3:2=a 4:1=a 5:2=a 6:1=a 7:2=a""",
    "testBuildOffsetMapFakeLarge (KAFKA-3587): a huge gap takes no room in the map: 4 keys, 2 to the 31 offsets apart, in a map of 4": """
        0=a 1=a
        / 2147483658
        2=a 0=b
        clean map_entries=4: next 2147483660 | mapped 3 | live 1:1=a 2147483658:2=a 2147483659:0=b""",
    "testBuildPartialOffsetMap: the map stops in mid-batch: two of three keys fit": """
        0=a 1=a
        2=b 3=b 4=b
        clean first=2 map_entries=2: next 4 | mapped 2""",
    "testCleaningBeyondMissingOffsets (KAFKA-8764): a segment whose tail offsets are missing is clean up to its end": """
        0=a 1=a
        / 100
        2=a
        clean until=100: next 100""",
    "testCleaningBeyondMissingOffsets: dirty offset, next segments' first batches and the end far apart": """
        0=a
        / 50
        +20
        1=a
        / 200
        +5
        0=b
        clean first=10 until=200: next 200
        clean: next 206 | live 70:1=a 205:0=b""",
    "records below the first dirty offset do not enter the map, though their segment is read": """
        1=a 2=a 3=a 1=b
        2=c
        clean first=3: mapped 2 | live 2:3=a 3:1=b 4:2=c""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_the_map(story: str, tmp_path: Path) -> None:
    tell(tmp_path, story)


@pytest.mark.parametrize(("first", "upper", "keys"), [(0, 1, 1), (1, 3, 2), (2, 6, 4), (0, 6, 6)])
def test_ranges_by_segment(tmp_path: Path, first: int, upper: int, keys: int) -> None:
    """testBuildOffsetMap: a range [first dirty, uncleanable) of whole segments enters the map."""
    log = log_of("".join(f"k{number}=a; /;" for number in range(6)))
    summary = Life(tmp_path, log).round(first_dirty_offset=first, first_uncleanable_offset=upper)
    assert (summary.map_entries, summary.next_dirty_offset) == (keys, upper)
