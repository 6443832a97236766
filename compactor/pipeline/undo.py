"""Going back to what a round replaced, for as long as its objects are kept: a publication of its own, under a new epoch."""

from __future__ import annotations

from compactor.errors import UsageError
from compactor.metadata.records import RoundUndone
from compactor.metadata.state import PartitionState
from compactor.pipeline.leadership import RequirementFailed, lead
from compactor.pipeline.logs import PartitionLog
from compactor.pipeline.ports import Lease, Ports


def undo(ports: Ports, log: PartitionLog, lease: Lease, run_id: str) -> PartitionState:
    """Readers go back to the sources of this run, the cleaner offsets to their earlier value.

    Raises UsageError where the rules refuse it: an open intent, a later round, sources whose retiring has begun; Leased and
    Fenced as every publication. The run's outputs wait for grace and are then deleted by ``retire``.
    """
    known = log.refresh().run(run_id)
    if known is None:
        raise UsageError(f"{log.state.name} has no run {run_id} that is remembered", hint="`runs list` shows those that are")
    with lead(ports, log, lease) as leadership:
        try:
            return leadership.append(RoundUndone(leader_epoch=leadership.epoch, run_id=run_id), lambda state: was_reverted(state, run_id))
        except RequirementFailed as refused:
            raise UsageError(f"run {run_id} of {log.state.name} cannot be undone: {refused}", hint="Nothing was changed") from refused


def was_reverted(state: PartitionState, run_id: str) -> bool:
    """Whether the undoing has counted, by the folded state alone."""
    run = state.run(run_id)
    return run is not None and run.status == "reverted"
