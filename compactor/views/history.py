"""What ran: the rounds that control logs remember, and finding one among the partitions. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checkpoint.offsets import CleanerOffset
from compactor.bootstrap import Tier
from compactor.control.state import PartitionState, Run
from compactor.errors import CompactorError, UsageError
from compactor.model.balance import Balance, Sum
from compactor.model.ids import TopicPartition
from compactor.round.restoring import restored_groups, unrestorable


@dataclass(frozen=True)
class RunReport:
    """``status``: running (also: interrupted, until somebody goes on), published (its end was not written down), cleaned, resumed,
    undone (given up before anybody saw it), reverted (by `undo`), reverted_in_part (``reason`` says what stays), restored (it took another
    one back), quarantined. ``undoable``: `undo` would take it.

    ``balance``: what the round took and gave; ``content``: what readers had after it. None where that was not recorded.
    """

    run_id: str
    topic: str
    partition: int
    status: str
    leader_epoch: int
    holder: str
    started_ms: int
    ended_ms: int | None
    slot: int
    published_slot: int | None
    first_dirty_offset: int | None
    next_dirty_offset: int | None
    cleaner_offsets_before: tuple[CleanerOffset, ...]
    cleaner_offsets: tuple[CleanerOffset, ...]
    segments_in: int
    segments_out: int
    reason: str
    segment: str
    undoable: bool
    stats: dict[str, int | float | str]
    balance: Balance | None
    content: Sum | None


def runs_of(state: PartitionState) -> list[RunReport]:
    """Newest last, as many as the log remembers."""
    return [_report(state, run) for run in state.runs]


def find_run(
    opened: Tier, run_id: str, names: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None
) -> tuple[PartitionState, str]:
    """The state of the partition that remembers this run, and its whole id.

    :param run_id: or the first characters of one.
    :raises UsageError: none is remembered, or several begin so; or why a partition could not be asked.
    """
    logs = opened.read_logs(names, on_partition)
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
    raise UsageError(f"no partition remembers a run {run_id}", hint="`runs list` shows those that are remembered")


def _report(state: PartitionState, run: Run) -> RunReport:
    return RunReport(
        run_id=run.run_id,
        topic=state.topic,
        partition=state.partition,
        status=run.status,
        leader_epoch=run.leader_epoch,
        holder=run.holder,
        started_ms=run.started_ms,
        ended_ms=run.ended_ms if run.ended_ms >= 0 else None,
        slot=run.slot,
        published_slot=run.published_slot or None,
        first_dirty_offset=run.first_dirty_offset if run.first_dirty_offset >= 0 else None,
        next_dirty_offset=run.next_dirty_offset if run.next_dirty_offset >= 0 else None,
        cleaner_offsets_before=run.vector_before,
        cleaner_offsets=run.vector,
        segments_in=run.sources,
        segments_out=run.outputs,
        reason=run.reason,
        segment=run.segment,
        undoable=undo_problem(state, run.run_id) == "",
        stats=run.stats,
        balance=run.balance,
        content=run.content,
    )


def undo_problem(state: PartitionState, run_id: str) -> str:
    """Why `undo` would be refused now, or nothing. The rules in ordering.py decide; this only tells people beforehand."""
    if state.intent:
        return f"run {state.intent.plan.run_id} is open"
    if not state.published or state.published[-1] != run_id:
        return "it is not the latest round that readers have"
    if not any(group.run_id == run_id and not group.undone for group in state.waiting):
        return "what it replaced is deleted, or about to be"
    return unrestorable(restored_groups(state, run_id)) if state.mirrored else ""
