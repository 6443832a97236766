"""``undo`` on a tier that brokers write: a round of its own (compactor.round.restoring), led and published as every other."""

from __future__ import annotations

from compactor.bootstrap import Tier
from compactor.control import publication
from compactor.control.leadership import lead
from compactor.control.logs import PartitionLog, tidy
from compactor.control.ordering import restorable_problem
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Unavailable, UsageError
from compactor.round.drive import led_round
from compactor.round.restoring import Restoring, restored_groups


def take_back(opened: Tier, log: PartitionLog, run_id: str) -> PartitionState:
    """Readers go back to what this run replaced, as copies under new ids, and the cleaner offsets to their earlier value.

    Where it was begun before and broken off, it is finished. Raises UsageError where the rules refuse it, BadData where one of the replaced
    segments was lost, Leased, Fenced, StoreError, OutOfBudget as a round, CompactorError where groups were cut off.
    """
    name = log.refresh().name
    work = Restoring(opened.ports, opened.cleaner_for(name.topic), opened.hash_key(), opened.state_dir, run_id, opened.ports.clock_ms())
    _require(log.state, run_id)
    with lead(opened.ports, log, opened.lease) as leadership:
        _require(leadership.state, run_id)
        sources = [source for one in restored_groups(leadership.state, run_id) for source in one.sources]
        damage = publication.verify(opened.ports, leadership.state, sources)
        if damage:
            hint = "Nothing was changed, readers have what the run made. Restore the object from the store's versions, then undo"
            raise BadData(f"what run {run_id} replaced is damaged: {damage}", segment=str(name), hint=hint)
        result = led_round(leadership, work)
        tidy(log)
    if result.status == "quarantined":
        raise BadData(result.reason, segment=result.segment or str(name), hint="Readers have what the run made")
    if result.status not in ("cleaned", "resumed"):
        raise Unavailable(f"run {run_id} of {name} was not undone: {result.undone}", hint="Readers have what the run made; try again")
    made = set(result.plan.sources) if result.plan else set()
    left = [segment for segment in log.state.live if segment.id in made]
    if left:
        raise CompactorError(
            f"run {run_id} of {name} is undone in part: brokers have deleted some of its segments meanwhile, and up to offset "
            f"{left[-1].end_offset} readers keep what the run made",
            hint="Nothing more of it can be taken back",
        )
    return log.state


def _require(state: PartitionState, run_id: str) -> None:
    run = state.run(run_id)
    if run is None:
        raise UsageError(f"{state.name} has no run {run_id} that is remembered", hint="`runs list` shows those that are")
    if state.intent is not None and state.intent.plan.restores == run_id:
        return
    if run.status == "reverted_in_part":
        raise UsageError(f"run {run_id} of {state.name} was undone in part: {run.reason}", hint="Nothing more of it can be taken back")
    problem = f"run {state.intent.plan.run_id} is still open" if state.intent else restorable_problem(state, run_id, state.last_epoch + 1)
    if problem:
        raise UsageError(f"run {run_id} of {state.name} cannot be undone: {problem}", hint="Nothing was changed")
