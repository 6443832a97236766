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


@dataclass(frozen=True)
class RunReport:
    """``status``: running (also: interrupted, until somebody goes on), published (its end was not written down), cleaned, resumed,
    undone (given up before anybody saw it), reverted (by `undo`), quarantined. ``undoable``: `undo` would take it.

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


def find_run(opened: Tier, run_id: str, names: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None) -> PartitionState:
    """The state of the partition that remembers this run. Raises UsageError where none does, or why a partition could not be asked."""
    logs = opened.read_logs(names, on_partition)
    found = next((log.state for log in logs if not isinstance(log, CompactorError) and log.state.run(run_id)), None)
    if found is not None:
        return found
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
    waits = any(group.run_id == run_id and not group.undone for group in state.waiting)
    return "" if waits else "what it replaced is deleted, or about to be"
