"""The offset axis of a partition: what lies where, and from where to where in percent of the width. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from checkpoint.lineage import EpochEntry
from compactor.control.left_alone import STAT, LeftAlone, read
from compactor.control.state import Run
from compactor.control.summary import SegmentSummary
from compactor.service.pages.documents import LeaderEpochSpan, OffsetAxis, OffsetBand, ReplacedSpan, SegmentSpan
from compactor.service.scheduling import Sight
from compactor.service.story import PartitionStory, ReplacedRange

MOST_SPANS = 240
"""More would be thinner than a pixel on a small screen: neighbours of one kind are drawn as one."""


def axis_of(seen: Sight, segments: Sequence[SegmentSummary], story: PartitionStory | None) -> OffsetAxis:
    """``segments``: live ones, ascending."""
    replaced = story.replaced if story else ()
    end = max(seen.end_offset + 1, seen.start_offset, *(each.end_offset + 1 for each in replaced), 0)
    start = min([seen.start_offset, *(each.start_offset for each in replaced)])
    dirty = min(max(seen.first_dirty_offset, seen.start_offset), seen.end_offset + 1)
    uncleanable = min(max(seen.first_uncleanable_offset, dirty), seen.end_offset + 1)
    cuts = (("cleaned", seen.start_offset, dirty), ("dirty", dirty, uncleanable), ("uncleanable", uncleanable, seen.end_offset + 1))
    spared = last_left_alone(story.runs) if story else []
    return OffsetAxis(
        start_offset=start,
        end_offset=end,
        first_dirty_offset=dirty,
        first_uncleanable_offset=uncleanable,
        bands=tuple(OffsetBand(state=state, start_offset=low, end_offset=high) for state, low, high in cuts if low < high),
        segments=tuple(_spans(segments, dirty, uncleanable, spared)),
        replaced=tuple(_replaced(each) for each in replaced),
        leader_epochs=tuple(_epochs(story.lineage if story else (), start, end)),
    )


def _spans(segments: Sequence[SegmentSummary], dirty: int, uncleanable: int, spared: Sequence[LeftAlone]) -> Iterable[SegmentSpan]:
    """One each, or where there are too many, neighbours that look alike together."""
    step = -(-len(segments) // MOST_SPANS) if segments else 1
    found: list[SegmentSpan] = []
    for segment in segments:
        state = "cleaned" if segment.end_offset < dirty else "dirty" if segment.start_offset < uncleanable else "uncleanable"
        reason = next((each.why for each in spared if each.start_offset <= segment.start_offset <= each.end_offset), "")
        decision = "left alone" if reason else ""
        last = found[-1] if found else None
        if last is not None and last.segments < step and (last.state, last.decision, last.why) == (state, decision, reason):
            grown = {"end_offset": segment.end_offset, "segments": last.segments + 1, "bytes": last.bytes + segment.size_bytes}
            found[-1] = last.model_copy(update=grown)
        else:
            found.append(
                SegmentSpan(
                    start_offset=segment.start_offset,
                    end_offset=segment.end_offset,
                    segments=1,
                    bytes=segment.size_bytes,
                    state=state,
                    decision=decision,
                    why=reason,
                )
            )
    return found


def last_left_alone(runs: Sequence[Run]) -> list[LeftAlone]:
    """What the last round that was published did not read, whoever did it. ``runs``: newest last."""
    last = next((run for run in reversed(runs) if run.stands), None)
    return read(str(last.stats.get(STAT, ""))) if last else []


def _replaced(each: ReplacedRange) -> ReplacedSpan:
    return ReplacedSpan(
        start_offset=each.start_offset,
        end_offset=each.end_offset,
        segments=each.segments,
        bytes=each.bytes,
        run=each.run_id,
        undone=each.undone,
    )


def _epochs(lineage: Sequence[EpochEntry], start: int, end: int) -> Iterable[LeaderEpochSpan]:
    bounds = [(entry.epoch, entry.start_offset) for entry in lineage]
    for (epoch, low), (_, high) in pairwise([*bounds, (-1, end)]):
        if max(low, start) < min(high, end):
            yield LeaderEpochSpan(epoch=epoch, start_offset=max(low, start), end_offset=min(high, end))


def percent(axis: OffsetAxis, offset: int) -> float:
    """Where an offset lies, 0 to 100."""
    width = axis.end_offset - axis.start_offset
    return round(100 * (offset - axis.start_offset) / width, 4) if width > 0 else 0.0


def ticks(axis: OffsetAxis) -> list[int]:
    """A few round offsets to be written below the axis, beside its ends."""
    width = axis.end_offset - axis.start_offset
    if width <= 0:
        return []
    step = 10 ** (len(str(width)) - 1)
    while width / step > 5:
        step *= 2
    while width / step < 2 and step > 1:
        step = max(1, step // 2)
    first = -(-axis.start_offset // step) * step
    return [offset for offset in range(first, axis.end_offset + 1, step) if 4 <= percent(axis, offset) <= 96]
