"""Which segments a round left alone, and why, as one line of its run history: pages of any process show it, and `runs show`.

0-1199: its filter meets none of 812 keys; 4800-5999: nothing is due in it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from compactor.model.segment import RemoteLogSegmentMetadata

STAT = "left_alone"
"""Its name in run history."""
MOST = 40
"""Ranges; run history is read with every look at a partition."""


class LeftAlone(NamedTuple):
    """Neighbouring segments. Offsets inclusive."""

    start_offset: int
    end_offset: int
    why: str


def ranges(live: Iterable[RemoteLogSegmentMetadata], why: Mapping[str, str]) -> list[LeftAlone]:
    """:param live: ascending. :param why: segment id -> the reason; others were not left alone."""
    found: list[LeftAlone] = []
    joins = False
    for segment in live:
        reason = why.get(segment.id, "")
        if reason and joins and found[-1].why == reason:
            found[-1] = found[-1]._replace(end_offset=segment.end_offset)
        elif reason:
            found.append(LeftAlone(segment.start_offset, segment.end_offset, reason))
        joins = bool(reason)
    return found


def told(found: Iterable[LeftAlone]) -> str:
    """The longest MOST of them, in their order."""
    kept = sorted(sorted(found, key=lambda one: one.start_offset - one.end_offset)[:MOST])
    return "; ".join(f"{one.start_offset}-{one.end_offset}: {one.why.replace(';', ',')}" for one in kept)


def read(text: str) -> list[LeftAlone]:
    """What ``told`` has written."""
    return [LeftAlone(int(low), int(high), why) for low, high, why in re.findall(r"(\d+)-(\d+): ([^;]*)", text)]
