"""Offset axis of a partition's page: which offset ranges are clean, dirty or replaced, and their positions in percent of the width.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from checkpoint.lineage import EpochEntry
from compactor.control.skipped_ranges import SKIPPED_RANGES_STAT, SkippedSegmentRange, parse_skipped_ranges
from compactor.control.state import RunHistoryEntry
from compactor.control.summary import SegmentSummary
from compactor.daemon.partition_history import PartitionHistory
from compactor.daemon.scheduling import PartitionStatus
from compactor.web.documents import LeaderEpochSpan, OffsetAxis, OffsetAxisSegmentSpan, OffsetStateBand, ReplacedSegmentsSpan

MOST_SPANS = 240
"""Largest number of segments drawn one by one. More would be thinner than a pixel, so that similar neighbours are drawn as one."""


def offset_axis(status: PartitionStatus, segments: Sequence[SegmentSummary], history: PartitionHistory | None) -> OffsetAxis:
    """Return the data for the drawing of a partition's offset range, with its segments and their states.

    :param segments: live segments, ascending.
    :param history: None if only a summary of the control log is known; replaced segments and leader epochs are missing then.
    """
    replaced = history.replaced if history else ()
    end = max(status.end_offset + 1, status.start_offset, *(each.end_offset + 1 for each in replaced), 0)
    start = min([status.start_offset, *(each.start_offset for each in replaced)])
    dirty = min(max(status.first_dirty_offset, status.start_offset), status.end_offset + 1)
    uncleanable = min(max(status.first_uncleanable_offset, dirty), status.end_offset + 1)
    cuts = (
        ("cleaned", status.start_offset, dirty),
        ("dirty", dirty, uncleanable),
        ("uncleanable", uncleanable, status.end_offset + 1),
    )
    spared = offset_ranges_skipped_by_latest_round(history.runs) if history else []
    return OffsetAxis(
        start_offset=start,
        end_offset=end,
        first_dirty_offset=dirty,
        first_uncleanable_offset=uncleanable,
        bands=tuple(OffsetStateBand(state=state, start_offset=low, end_offset=high) for state, low, high in cuts if low < high),
        segments=tuple(_segment_spans_on_offset_axis(segments, dirty, uncleanable, spared)),
        replaced=tuple(ReplacedSegmentsSpan(run=each.run_id, **each.model_dump(exclude={"run_id"})) for each in replaced),
        leader_epochs=tuple(_leader_epoch_spans(history.lineage if history else (), start, end)),
    )


def _segment_spans_on_offset_axis(
    segments: Sequence[SegmentSummary],
    first_dirty_offset: int,
    first_uncleanable_offset: int,
    skipped_ranges: Sequence[SkippedSegmentRange],
) -> Iterable[OffsetAxisSegmentSpan]:
    """Yield a span (drawn part of the axis) for each segment. If there are more than MOST_SPANS segments, draw neighbours with the same
    state and the same reason as one.

    :param segments: live segments, ascending.
    :param first_uncleanable_offset: first offset that no round may clean yet.
    :param skipped_ranges: offset ranges that the latest published round skipped, with the reasons.
    """
    step = -(-len(segments) // MOST_SPANS) if segments else 1
    found: list[OffsetAxisSegmentSpan] = []
    for segment in segments:
        state = (
            "cleaned"
            if segment.end_offset < first_dirty_offset
            else "dirty"
            if segment.start_offset < first_uncleanable_offset
            else "uncleanable"
        )
        reason = next((each.why for each in skipped_ranges if each.start_offset <= segment.start_offset <= each.end_offset), "")
        decision = "left alone" if reason else ""
        last = found[-1] if found else None
        if last is not None and last.segments < step and (last.state, last.decision, last.why) == (state, decision, reason):
            grown = {"end_offset": segment.end_offset, "segments": last.segments + 1, "bytes": last.bytes + segment.size_bytes}
            found[-1] = last.model_copy(update=grown)
        else:
            found.append(
                OffsetAxisSegmentSpan(
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


def offset_ranges_skipped_by_latest_round(runs: Sequence[RunHistoryEntry]) -> list[SkippedSegmentRange]:
    """Return the offset ranges that the latest published round skipped, with the reasons. Rounds that were undone do not count.

    :param runs: oldest first.
    """
    last = next((run for run in reversed(runs) if run.is_published_and_not_reverted), None)
    return parse_skipped_ranges(str(last.stats.get(SKIPPED_RANGES_STAT, ""))) if last else []


def _leader_epoch_spans(lineage: Sequence[EpochEntry], start: int, end: int) -> Iterable[LeaderEpochSpan]:
    """Yield the leader epochs that overlap the axis, each cut to the axis.

    :param lineage: leader epochs with their start offsets, ascending.
    :param start: first offset of the axis.
    :param end: end offset of the axis, exclusive.
    """
    bounds = [(entry.epoch, entry.start_offset) for entry in lineage]
    for (epoch, low), (_, high) in pairwise([*bounds, (-1, end)]):
        if max(low, start) < min(high, end):
            yield LeaderEpochSpan(epoch=epoch, start_offset=max(low, start), end_offset=min(high, end))


def offset_position_percent(axis: OffsetAxis, offset: int) -> float:
    """Return the position of an offset on the axis in percent of its width: 0 at the start offset, 100 at the end offset."""
    width = axis.end_offset - axis.start_offset
    return round(100 * (offset - axis.start_offset) / width, 4) if width > 0 else 0.0


def offset_axis_ticks(axis: OffsetAxis) -> list[int]:
    """Return a few round offsets as labels below the drawn axis. None is within 4 percent of an end. An empty axis has none."""
    width = axis.end_offset - axis.start_offset
    if width <= 0:
        return []
    step = 10 ** (len(str(width)) - 1)
    while width / step > 5:
        step *= 2
    while width / step < 2 and step > 1:
        step = max(1, step // 2)
    first = -(-axis.start_offset // step) * step
    return [offset for offset in range(first, axis.end_offset + 1, step) if 4 <= offset_position_percent(axis, offset) <= 96]
