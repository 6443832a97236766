"""Coverage (I1): a replacement spans exactly the offsets and leader epochs of its sources, and a chain of segments has no gap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from checkpoint import lineage
from compactor.control.state import RuleViolationOrEmpty
from compactor.model.plan import CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata


def coverage_problem(sources: Sequence[RemoteLogSegmentMetadata], new_segment: RemoteLogSegmentMetadata) -> RuleViolationOrEmpty:
    """Return why a new segment does not cover its sources exactly (coverage, I1), or an empty string.

    The new segment must have the sources' start offset, end offset and all their leader epochs, and a size of at least one byte.
    """
    if not sources:
        return f"segment {new_segment.id} replaces nothing that is live"
    gap = offset_gap_problem(sources)
    if gap:
        return gap
    if (new_segment.start_offset, new_segment.end_offset) != (sources[0].start_offset, sources[-1].end_offset):
        covered = f"{new_segment.start_offset}..{new_segment.end_offset}"
        return f"segment {new_segment.id} covers {covered}, its sources {sources[0].start_offset}..{sources[-1].end_offset}"
    if new_segment.leader_epochs != lineage.merge_segment_lineages([source.leader_epochs for source in sources]):
        return f"segment {new_segment.id} does not carry the leader epochs of its sources"
    log = new_segment.files.get("log")
    if new_segment.size_bytes <= 0 or log is None or log.size != new_segment.size_bytes:
        return f"segment {new_segment.id} has no bytes"
    return ""


def task_coverage_problem(task: CompactionTask, sources: Sequence[RemoteLogSegmentMetadata]) -> RuleViolationOrEmpty:
    """Return why the future segment of a task would not cover its sources exactly (coverage, I1), or an empty string."""
    if tuple(source.id for source in sources) != task.sources or not sources:
        return f"group {task.group} does not list live sources"
    epochs = lineage.merge_segment_lineages([source.leader_epochs for source in sources])
    if (task.start_offset, task.end_offset, task.leader_epochs) != (sources[0].start_offset, sources[-1].end_offset, epochs):
        return f"group {task.group} does not cover its sources exactly"
    return offset_gap_problem(sources)


def new_segment_differs_from_task_problem(task: CompactionTask, segment: RemoteLogSegmentMetadata) -> RuleViolationOrEmpty:
    """Return how the new segment in a receipt differs from the one that its task announced, or an empty string."""
    announced = (task.new_segment_id, task.start_offset, task.end_offset, task.leader_epochs)
    if (segment.id, segment.start_offset, segment.end_offset, segment.leader_epochs) != announced:
        return f"group {task.group} made another segment than it announced"
    return "" if segment.size_bytes > 0 and "log" in segment.files else f"segment {segment.id} has no bytes"


def invalid_segment_problem(segments: Sequence[RemoteLogSegmentMetadata]) -> RuleViolationOrEmpty:
    """Return a message that names the first segment which is empty or lacks leader epochs; an empty string if all are valid."""
    for segment in segments:
        if segment.end_offset < segment.start_offset or segment.size_bytes <= 0 or not segment.leader_epochs:
            return f"segment {segment.id} is empty or has no leader epoch"
    return ""


def offset_gap_problem(segments: Sequence[RemoteLogSegmentMetadata]) -> RuleViolationOrEmpty:
    """Return a message about the first segment that does not start directly after the one before it; an empty string if there is none."""
    for before, after in pairwise(segments):
        if after.start_offset != before.end_offset + 1:
            return f"segment {after.id} starts at {after.start_offset}, the one before it ends at {before.end_offset}"
    return ""
