"""Run history: the rounds that control logs remember, and search for one round among the partitions. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compactor.access.tier import Tier
from compactor.control.state import PartitionState, RuleViolationOrEmpty, RunHistoryEntry
from compactor.errors import CompactorError, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.status import RunHistoryStatus

StateAndRunId = tuple[PartitionState, str]
"""State of the partition that a run cleaned, and the complete id of the run."""


def run_history_entry_document(state: PartitionState, run: RunHistoryEntry) -> dict[str, object]:
    """Return a round of a partition's history as the fields of its JSON document. What is not known is None.

    status: one of

    - running: not finished; `runs` shows it as interrupted until another process continues it;
    - published: published, but its end was not recorded;
    - cleaned: finished by the process that began it;
    - resumed: finished by another process;
    - undone: abandoned before it was published;
    - reverted: undone by `undo`;
    - reverted_in_part: ``reason`` says what could not be undone;
    - restored: it undid another round;
    - repaired: it replaced damaged segments one to one;
    - quarantined: it failed on corrupt data.

    undoable: whether `undo` would accept it.
    balance: batches and records that the round read, removed and wrote.
    content: number and digest sum of the batches that readers had after the round.
    """
    return {
        "run_id": run.run_id,
        "topic": state.topic,
        "partition": state.partition,
        "incarnation": state.incarnation,
        "status": run.status,
        "leader_epoch": run.leader_epoch,
        "holder": run.holder,
        "started_ms": run.started_ms,
        "ended_ms": run.ended_ms if run.ended_ms >= 0 else None,
        "slot": run.slot,
        "published_slot": run.published_slot or None,
        "first_dirty_offset": run.first_dirty_offset if run.first_dirty_offset >= 0 else None,
        "next_dirty_offset": run.next_dirty_offset if run.next_dirty_offset >= 0 else None,
        "cleaner_offsets_before": run.vector_before,
        "cleaner_offsets": run.vector,
        "segments_in": run.sources,
        "segments_out": run.outputs,
        "reason": run.reason,
        "segment": run.segment,
        "undoable": reason_run_cannot_be_undone(state, run.run_id) == "",
        "stats": run.stats,
        "balance": run.balance,
        "content": run.content,
    }


def find_partition_state_and_full_run_id(
    tier: Tier, run_id: str, partitions: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None
) -> StateAndRunId | None:
    """Search the partitions' run histories for a run. Return the state of the partition that has it, and the run's complete id; None if
    none has.

    :param run_id: the id, or its first characters.
    :param on_partition: called after each partition.
    :raises UsageError: if several runs have ids that begin so.
    :raises CompactorError: if no run was found and a partition could not be read.
    """
    logs = tier.read_control_logs_or_errors(partitions, on_partition)
    states = [log.state for log in logs if not isinstance(log, CompactorError)]
    found = [(state, run.run_id) for state in states for run in state.runs if run.run_id.startswith(run_id)]
    exactly = [one for one in found if one[1] == run_id]
    if len(exactly or found) == 1:
        return (exactly or found)[0]
    if found:
        shown = ", ".join(sorted(each for _, each in found)[:4])
        raise UsageError(f"{len(found)} runs begin with {run_id!r}: {shown}", hint="Name more of it")
    for log in logs:
        if isinstance(log, CompactorError):
            raise log
    return None


def reason_run_cannot_be_undone(state: PartitionState, run_id: str) -> RuleViolationOrEmpty:
    """Return the reason why `undo` would refuse this run now, or an empty string.

    For information only: when the run is undone, the rules in ``control.ordering`` decide again.
    """
    if state.intent:
        return f"run {state.intent.plan.run_id} is open"
    if not state.published or state.published[-1] != run_id:
        return "it is not the latest published round"
    if not any(group.run_id == run_id and not group.undone for group in state.waiting):
        return "the segments that it replaced are deleted, or being deleted"
    if any(run.run_id == run_id and run.status == RunHistoryStatus.REPAIRED for run in state.runs):
        return "it replaced damaged segments"
    if not state.mirrored:
        return ""
    from compactor.round.restoring import groups_to_restore, problem_that_prevents_restoring  # loads numba

    return problem_that_prevents_restoring(groups_to_restore(state, run_id))
