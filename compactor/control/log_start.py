"""The log start: the first offset that readers may read, once retention or a person has deleted the records below it.

One record (*log start raised*) moves it. Segments that lie wholly below it leave the view and wait for grace. The newest segment never
leaves the view: the end of the log, its tail, its producers and its cleaner offsets are taken from it. A segment in which the log start
lies stays as it is, and rounds treat all of its records alike, as Kafka's cleaner does.

On a broker-managed tier the brokers raise the log start; what they have reported is recorded (*broker log start seen*).

The functions from ``check_log_start_rises`` on are rows of the table in compactor/control/ordering.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from checkpoint import lineage
from compactor.constants import CompactorEpoch, Offset
from compactor.control.ports import ObjectRetention
from compactor.control.records import ControlRecord, LogStartRaised, SegmentsTiered
from compactor.control.state import GroupAwaitingDeletion, OpenImport, PartitionState, sum_batch_digests
from compactor.control.summary import GroupAwaitingDeletionSummary, ImportSummary, SegmentMetadataOrSummary
from compactor.model.plan import CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata

# Rules of coverage (I1).


def coverage_problem(sources: Sequence[RemoteLogSegmentMetadata], new_segment: RemoteLogSegmentMetadata) -> str:
    """Return why a new segment does not have the start offset, end offset and all leader epochs of its sources, and a size of at least one
    byte (coverage, I1).
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


def task_coverage_problem(task: CompactionTask, sources: Sequence[RemoteLogSegmentMetadata]) -> str:
    if tuple(source.id for source in sources) != task.sources or not sources:
        return f"group {task.group} does not list live sources"
    epochs = lineage.merge_segment_lineages([source.leader_epochs for source in sources])
    if (task.start_offset, task.end_offset, task.leader_epochs) != (sources[0].start_offset, sources[-1].end_offset, epochs):
        return f"group {task.group} does not cover its sources exactly"
    return offset_gap_problem(sources)


def task_output_problem(task: CompactionTask, segment: RemoteLogSegmentMetadata) -> str:
    announced = (task.new_segment_id, task.start_offset, task.end_offset, task.leader_epochs)
    if (segment.id, segment.start_offset, segment.end_offset, segment.leader_epochs) != announced:
        return f"group {task.group} made another segment than it announced"
    return "" if segment.size_bytes > 0 and "log" in segment.files else f"segment {segment.id} has no bytes"


def invalid_segment_problem(segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    for segment in segments:
        if segment.end_offset < segment.start_offset or segment.size_bytes <= 0 or not segment.leader_epochs:
            return f"segment {segment.id} is empty or has no leader epoch"
    return ""


def offset_gap_problem(segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    for before, after in pairwise(segments):
        if after.start_offset != before.end_offset + 1:
            return f"segment {after.id} starts at {after.start_offset}, the one before it ends at {before.end_offset}"
    return ""


# Deletion times, in milliseconds by the store's clock. ``slot_times_ms`` has the store's time of each record by slot; an unknown one counts
# from ``now_ms``, so that nothing is deleted too early.


ReplacedGroup = GroupAwaitingDeletion | GroupAwaitingDeletionSummary
"""Segments that left the view and wait for deletion."""


def grace_period_ms(group: ReplacedGroup, retention: ObjectRetention) -> int:
    """Return the recorded time or that of the settings, whichever is longer. The undo window applies only to groups that ``undo`` can
    restore.
    """
    grace = max(retention.grace_ms, group.grace_ms or 0)
    return grace if group.undone else max(grace, retention.undo_window_ms, group.undo_window_ms or 0)


def earliest_deletion_time_ms(group: ReplacedGroup, retention: ObjectRetention, slot_times_ms: Mapping[int, int], now_ms: int) -> int:
    return slot_times_ms.get(group.slot, now_ms) + grace_period_ms(group, retention)


def import_abandoned_at_ms(
    registration: OpenImport | ImportSummary, retention: ObjectRetention, slot_times_ms: Mapping[int, int], now_ms: int
) -> int:
    return slot_times_ms.get(registration.slot, now_ms) + retention.orphan_age_ms


S = TypeVar("S", bound=SegmentMetadataOrSummary)


def segments_removable_below(live: Sequence[S], offset: int) -> tuple[S, ...]:
    """Return the segments wholly below ``offset``, except the newest segment, which always stays."""
    return tuple(segment for segment in live[:-1] if segment.end_offset < offset)


def build_log_start_record(state: PartitionState, offset: int, leader_epoch: CompactorEpoch, grace_ms: int | None) -> LogStartRaised:
    gone = segments_removable_below(state.live, offset)
    return LogStartRaised(
        leader_epoch=leader_epoch,
        offset=Offset(offset),
        ids=tuple(segment.id for segment in gone),
        grace_ms=grace_ms,
        removed=sum_batch_digests(gone),
        content=sum_batch_digests(state.live[len(gone) :]),
    )


def check_log_start_rises(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires an offset between the log start and the end offset + 1 (the present log start only if segments below it remain to be
    removed).
    """
    body: LogStartRaised = record.body
    if not state.has_segments or not state.log_start <= body.offset <= state.end_offset + 1:
        return f"offset {body.offset} does not lie between the log start {state.log_start} and {state.end_offset + 1}"
    return "" if body.ids or body.offset > state.log_start else f"the log starts at {body.offset} already"


def check_removed_below_start(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires exactly the live segments wholly below the offset, never the newest."""
    body: LogStartRaised = record.body
    gone = tuple(segment.id for segment in segments_removable_below(state.live, body.offset))
    return "" if gone == body.ids else f"the live segments below offset {body.offset} are others"


def check_removed_digests(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the recorded sums of the batches that are removed and of those that stay."""
    body: LogStartRaised = record.body
    gone = set(body.ids)
    removed = sum_batch_digests(segment for segment in state.live if segment.id in gone)
    content = sum_batch_digests(segment for segment in state.live if segment.id not in gone)
    return "" if (body.removed, body.content) == (removed, content) else "the batches that it removes are others than were recorded"


def check_initial_log_start(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that a log start is given only with the first segments of a partition, and that it lies within them or directly after
    them.
    """
    body: SegmentsTiered = record.body
    if body.log_start_offset is None:
        return ""
    if state.has_segments or state.log_start_offset is not None:
        return f"the log starts at {state.log_start} already"
    within = body.segments[0].start_offset <= body.log_start_offset <= body.segments[-1].end_offset + 1
    return "" if within else f"the log start {body.log_start_offset} lies outside of its segments"


def check_log_start_unraised(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a log start that was never raised, because records that retention has removed must not come back."""
    return "" if state.log_start_offset is None else f"the log start was raised to {state.log_start_offset}"


def check_truncation_above_start(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires an offset above the log start, if that was ever raised."""
    return truncation_problem(state, record.body.offset)


def check_broker_start_rises(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires an offset above the highest one recorded."""
    known = state.broker_log_start
    return "" if record.body.offset > known else f"brokers have reported the log start {known} already"


def check_expired_groups(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires expired groups that lie wholly below the log start of brokers, and that the record does not also list as withdrawn (cut
    off).
    """
    expired = set(record.body.expired)
    if expired.intersection(record.body.cut_off):
        return "a group is both cut off and expired"
    tasks = state.intent.plan.tasks if state.intent else ()
    above = [task.group for task in tasks if task.group in expired and task.end_offset >= state.broker_log_start]
    return f"group {above[0]} does not lie below the log start {state.broker_log_start} of brokers" if above else ""


def truncation_problem(state: PartitionState, offset: int) -> str:
    if state.log_start_offset is None or offset > state.log_start_offset:
        return ""
    return f"the log is cut at {offset}, and its records below {state.log_start_offset} were deleted"


def restored_segment_problem(state: PartitionState, group: GroupAwaitingDeletion) -> str:
    """Return which replaced segment lies wholly below the log start, so that it must not come back."""
    below = next((segment for segment in group.segments if segment.end_offset < (state.log_start_offset or 0)), None)
    return f"segment {below.id}, which it replaced, ends below the log start {state.log_start_offset}" if below else ""


def round_outputs_problem(state: PartitionState, group: GroupAwaitingDeletion) -> str:
    """Return a message if a later round has rewritten outputs of this round, or if brokers expired all of them."""
    lost = set(group.replaced_by.values()) - {segment.id for segment in state.live}
    if any(segment.end_offset >= state.broker_log_start for segment in group.segments if group.replaced_by[segment.id] in lost):
        return f"something was built on run {group.run_id}"
    return f"all of run {group.run_id} has expired" if lost == set(group.replaced_by.values()) else ""
