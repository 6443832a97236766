"""Segments that a round skipped and why, as one line of the run history, which web pages and ``runs show`` display.

0-1199: its filter matches none of 812 keys; 4800-5999: nothing is due in it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from compactor.model.segment import RemoteLogSegmentMetadata

SKIPPED_RANGES_STAT = "left_alone"
"""Name of the line in the run history's figures."""
MAX_SKIPPED_RANGES = 40
"""Number of ranges that are kept. The run history is read with every check of a partition."""


class SkippedSegmentRange(NamedTuple):
    """Range of neighbouring segments that a round skipped for the same reason. Offsets are inclusive."""

    start_offset: int
    end_offset: int
    why: str


def skipped_ranges(live_segments: Iterable[RemoteLogSegmentMetadata], reasons: Mapping[str, str]) -> list[SkippedSegmentRange]:
    """Return the ranges of neighbouring segments that a round skipped for the same reason.

    :param live_segments: live segments, ascending.
    :param reasons: segment id -> why it was skipped; segments without an entry were not skipped.
    """
    found: list[SkippedSegmentRange] = []
    joins = False
    for segment in live_segments:
        reason = reasons.get(segment.id, "")
        if reason and joins and found[-1].why == reason:
            found[-1] = found[-1]._replace(end_offset=segment.end_offset)
        elif reason:
            found.append(SkippedSegmentRange(segment.start_offset, segment.end_offset, reason))
        joins = bool(reason)
    return found


def format_skipped_ranges(ranges: Iterable[SkippedSegmentRange]) -> str:
    """Return one line for the run history that lists ranges, ascending by offset: at most MAX_SKIPPED_RANGES of them, the longest ones."""
    kept = sorted(sorted(ranges, key=lambda one: one.start_offset - one.end_offset)[:MAX_SKIPPED_RANGES])
    return "; ".join(f"{one.start_offset}-{one.end_offset}: {one.why.replace(';', ',')}" for one in kept)


def parse_skipped_ranges(line: str) -> list[SkippedSegmentRange]:
    """Return the ranges in a line that ``format_skipped_ranges`` returned."""
    return [SkippedSegmentRange(int(low), int(high), why) for low, high, why in re.findall(r"(\d+)-(\d+): ([^;]*)", line)]
