"""Undo of the latest round, as long as the replaced objects exist: a publication of its own under a new compactor epoch."""

from __future__ import annotations

from collections.abc import Sequence

from compactor.control import publication
from compactor.control.leadership import RecordRefused, hold_leadership
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.records import RoundUndone
from compactor.control.stages import RoundStage, RoundStageTracker
from compactor.control.state import PartitionState
from compactor.errors import BadData, UsageError
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.model.status import RunHistoryStatus


def undo_round(ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations, run_id: str) -> PartitionState:
    """Direct readers back to the segments that a run replaced, and return the new state. The cleaner offsets return to their earlier
    value.

    The run's outputs wait for grace, a period before ``retire`` deletes them. Raises UsageError if a rule refuses the undo, because a
    round is open, a later round exists, or the deletion of the sources has begun. Raises BadData if a source is missing or damaged,
    Leased if another compactor leads the partition, and Fenced if another one takes over meanwhile.
    """
    if log.refresh().find_run(run_id) is None:
        raise UsageError(f"{log.state.topic_partition} has no run {run_id} that is remembered", hint="`runs list` shows those that are")
    with hold_leadership(ports, log, lease) as leadership:
        body = RoundUndone(leader_epoch=leadership.epoch, run_id=run_id, grace_ms=ports.grace_ms)

        def append_round_undone_record() -> None:
            """Append *round undone* unless the state shows that it has taken effect."""
            leadership.append_record(body, lambda state: was_round_undone(state, run_id))

        try:
            leadership.require_record_appendable(body)
            sources = _replaced_segments(leadership.state, run_id)
            _require_intact_segments(ports, leadership.state, run_id, sources)
            ports.publisher.restore_segments(
                log.state.topic_partition, sources, _live_outputs(leadership.state, run_id), append_round_undone_record
            )
        except RecordRefused as refused:
            raise UsageError(
                f"run {run_id} of {log.state.topic_partition} cannot be undone: {refused}", hint="Nothing was changed"
            ) from refused
        RoundStageTracker(RoundStage.PUBLISHED).advance_to_stage(RoundStage.REVERTED)
        return leadership.state


def _replaced_segments(state: PartitionState, run_id: str) -> list[RemoteLogSegmentMetadata]:
    """Return the segments that a run replaced and that still wait for grace."""
    return [segment for group in state.waiting if group.run_id == run_id and not group.undone for segment in group.segments]


def _live_outputs(state: PartitionState, run_id: str) -> list[RemoteLogSegmentMetadata]:
    """Return the new segments of a run that readers still use."""
    made = {name for group in state.waiting if group.run_id == run_id and not group.undone for name in group.replaced_by.values()}
    return [segment for segment in state.live if segment.id in made]


def _require_intact_segments(
    ports: EnvironmentPorts, state: PartitionState, run_id: str, sources: Sequence[RemoteLogSegmentMetadata]
) -> None:
    """Raise BadData if a replaced segment is missing or damaged. Readers do not use replaced segments, so damage to them may not have been
    noticed before.
    """
    problem = publication.stored_segments_problem(ports, state, sources)
    if problem:
        hint = "Nothing was changed, readers have what the run made. Restore the object from the store's versions, then undo"
        raise BadData(f"what run {run_id} replaced is damaged: {problem}", segment=str(state.topic_partition), hint=hint)


def was_round_undone(state: PartitionState, run_id: str) -> bool:
    """Return whether the control log shows that the run was undone, judged by the replayed state alone."""
    run = state.find_run(run_id)
    return run is not None and run.status == RunHistoryStatus.REVERTED
