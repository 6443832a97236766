"""Going back to what a round replaced, for as long as its objects are kept: a publication of its own, under a new epoch."""

from __future__ import annotations

from collections.abc import Sequence

from compactor.control import publication
from compactor.control.leadership import RequirementFailed, lead
from compactor.control.logs import PartitionLog
from compactor.control.ordering import Stage, Steps
from compactor.control.ports import Lease, Ports
from compactor.control.records import RoundUndone
from compactor.control.state import PartitionState
from compactor.errors import BadData, UsageError
from compactor.model.segment import RemoteLogSegmentMetadata


def undo(ports: Ports, log: PartitionLog, lease: Lease, run_id: str) -> PartitionState:
    """Readers go back to the sources of this run, the cleaner offsets to their earlier value.

    Raises UsageError where the rules refuse it: an open intent, a later round, sources whose retiring has begun; BadData where one of
    the sources was lost meanwhile; Leased and Fenced as every publication. The run's outputs wait for grace and are then deleted by
    ``retire``.
    """
    known = log.refresh().run(run_id)
    if known is None:
        raise UsageError(f"{log.state.name} has no run {run_id} that is remembered", hint="`runs list` shows those that are")
    with lead(ports, log, lease) as leadership:
        sources = _sources(leadership.state, run_id)
        _check_sources(ports, leadership.state, run_id, sources)

        body = RoundUndone(leader_epoch=leadership.epoch, run_id=run_id, grace_ms=ports.grace_ms)

        def record() -> None:
            leadership.append(body, lambda state: was_reverted(state, run_id))

        try:
            leadership.foresee(body)
            ports.publisher.restore(log.state.name, sources, _outputs(leadership.state, run_id), record)
        except RequirementFailed as refused:
            raise UsageError(f"run {run_id} of {log.state.name} cannot be undone: {refused}", hint="Nothing was changed") from refused
        Steps(Stage.PUBLISHED).to(Stage.REVERTED)
        return leadership.state


def _sources(state: PartitionState, run_id: str) -> list[RemoteLogSegmentMetadata]:
    return [segment for group in state.waiting if group.run_id == run_id and not group.undone for segment in group.segments]


def _outputs(state: PartitionState, run_id: str) -> list[RemoteLogSegmentMetadata]:
    """Those of the run's segments that readers have now."""
    made = {name for group in state.waiting if group.run_id == run_id and not group.undone for name in group.replaced_by.values()}
    return [segment for segment in state.live if segment.id in made]


def _check_sources(ports: Ports, state: PartitionState, run_id: str, sources: Sequence[RemoteLogSegmentMetadata]) -> None:
    """Nobody reads what waits, so nobody would have noticed."""
    problem = publication.verify(ports, state, sources)
    if problem:
        hint = "Nothing was changed, readers have what the run made. Restore the object from the store's versions, then undo"
        raise BadData(f"what run {run_id} replaced is damaged: {problem}", segment=str(state.name), hint=hint)


def was_reverted(state: PartitionState, run_id: str) -> bool:
    """Whether the undoing has counted, by the folded state alone."""
    run = state.run(run_id)
    return run is not None and run.status == "reverted"
