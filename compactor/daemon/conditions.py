"""A partition's condition in one word, and the daemon's next action on it, for pages. Pure. Must agree with ``scheduling.next_action``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from compactor.constants import NEVER_MS
from compactor.daemon.scheduling import DaemonAction, PartitionSchedule
from compactor.service.retry_delay import backoff_ms


class PartitionCondition(StrEnum):
    """A partition's condition, most urgent first.

    ATTENTION: its rounds fail, and it may need help. WORKING: a job runs. DUE: a round is due.
    WAITING: replaced segments wait for deletion. PAUSED: rounds are paused or not allowed for the topic.
    UNSEEN: not polled yet. QUIET: clean.
    """

    ATTENTION = "attention"
    WORKING = "working"
    DUE = "due"
    WAITING = "waiting"
    PAUSED = "paused"
    UNSEEN = "unseen"
    QUIET = "quiet"


@dataclass(frozen=True)
class NextStep:
    """The daemon's next action on a partition. at_ms: earliest time, by the daemon's clock. why: reason for people."""

    action: DaemonAction
    at_ms: int
    why: str


def failure_reason(schedule: PartitionSchedule) -> str:
    """Return the reason why rounds of this partition fail, or an empty string."""
    return schedule.unreadable or schedule.problem or (schedule.status.quarantine if schedule.status else "")


def partition_condition(schedule: PartitionSchedule, *, working: bool) -> PartitionCondition:
    """Return the partition's condition.

    :param working: whether one of its jobs runs now.
    """
    if failure_reason(schedule):
        return PartitionCondition.ATTENTION
    if working:
        return PartitionCondition.WORKING
    if schedule.suspended or schedule.paused:
        return PartitionCondition.PAUSED
    seen = schedule.status
    if seen is None:
        return PartitionCondition.UNSEEN
    if seen.due:
        return PartitionCondition.DUE
    return PartitionCondition.WAITING if seen.retire_at_ms < NEVER_MS else PartitionCondition.QUIET


def next_step(schedule: PartitionSchedule, now_ms: int) -> NextStep:
    """Return the action that comes first, with its time and reason."""
    seen = schedule.status
    if seen is None or schedule.unreadable:
        return NextStep(
            DaemonAction.POLL, max(now_ms, schedule.next_poll_ms), "it cannot be read" if schedule.unreadable else "it was not polled yet"
        )
    steps = []
    may_begin = not schedule.suspended and (not schedule.paused or bool(seen.open_run))
    if schedule.requested and may_begin:
        steps.append(NextStep(DaemonAction.ROUND, max(now_ms, schedule.next_round_ms), "a round was requested"))
    if seen.due and may_begin:
        waits = seen.quarantine_ms + backoff_ms(seen.quarantine_failures)
        why = "it failed before" if waits > now_ms or schedule.problem else schedule.waiting_reason or seen.reason
        steps.append(NextStep(DaemonAction.ROUND, max(now_ms, schedule.next_round_ms, schedule.next_repeat_ms, waits), why))
    if seen.retire_at_ms < NEVER_MS:
        steps.append(
            NextStep(DaemonAction.RETIRE, max(now_ms, schedule.retire_at_ms, seen.retire_at_ms), "replaced segments may be deleted")
        )
    output = schedule.output
    if output is not None and output.is_due(seen, max(now_ms, output.retry_at_ms)):
        steps.append(NextStep(DaemonAction.OUTPUT, max(now_ms, output.retry_at_ms), "the output lacks the latest changes"))
    if steps:
        return min(steps, key=lambda step: step.at_ms)
    why = "a delete horizon or a lag may make a round due" if seen.wake_ms < schedule.next_poll_ms else "nothing is due"
    if not may_begin:
        why = schedule.suspended or schedule.paused
    return NextStep(DaemonAction.POLL, max(now_ms, min(seen.wake_ms, schedule.next_poll_ms)), why)


def failing_since_ms(schedule: PartitionSchedule) -> int:
    """Return since when rounds of this partition fail, in milliseconds; 0 if unknown."""
    if schedule.unreadable or schedule.problem:
        return schedule.failing_since_ms
    return schedule.status.quarantine_ms if schedule.status else 0
