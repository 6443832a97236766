"""In a word, how a partition stands, and what the daemon will do about it next. Pure, and in step with ``scheduling.wanted``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from compactor.service.scheduling import NEVER, Action, PartitionWatch, backoff_ms


class Condition(StrEnum):
    """In the order in which people want to see them.

    ATTENTION: nothing cleans it at present, and by itself it may not get well. PAUSED: no round is begun because somebody wants it so.
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
    """``at_ms``: the earliest moment, by the daemon's clock."""

    action: Action
    at_ms: int
    why: str


def trouble(watch: PartitionWatch) -> str:
    """What is wrong with it; empty where nothing is."""
    return watch.unreadable or watch.problem or (watch.sight.quarantine if watch.sight else "")


def condition(watch: PartitionWatch, *, working: bool) -> Condition:
    """``working``: a job is at it now."""
    if trouble(watch):
        return Condition.ATTENTION
    if working:
        return Condition.WORKING
    if watch.suspended or watch.paused:
        return Condition.PAUSED
    seen = watch.sight
    if seen is None:
        return Condition.UNSEEN
    if seen.due:
        return Condition.DUE
    return Condition.WAITING if seen.retire_at_ms < NEVER else Condition.QUIET


def next_step(watch: PartitionWatch, now_ms: int) -> NextStep:
    """What comes first of a round, a deletion and a look."""
    seen = watch.sight
    if seen is None or watch.unreadable:
        return NextStep(Action.LOOK, max(now_ms, watch.look_at_ms), "it cannot be read" if watch.unreadable else "nobody has looked yet")
    steps = []
    may_begin = not watch.suspended and (not watch.paused or bool(seen.open_run))
    if watch.urgent and may_begin:
        steps.append(NextStep(Action.ROUND, max(now_ms, watch.round_at_ms), "somebody has asked for it"))
    if seen.due and may_begin:
        waits = seen.quarantine_ms + backoff_ms(seen.quarantine_failures)
        why = "it failed before" if waits > now_ms or watch.problem else watch.waits or seen.reason
        steps.append(NextStep(Action.ROUND, max(now_ms, watch.round_at_ms, watch.repeat_at_ms, waits), why))
    if seen.retire_at_ms < NEVER:
        steps.append(NextStep(Action.RETIRE, max(now_ms, watch.retire_at_ms, seen.retire_at_ms), "what was replaced may be deleted"))
    shown = watch.generation
    if shown is not None and shown.is_due(seen, max(now_ms, shown.retry_at_ms)):
        steps.append(NextStep(Action.GENERATION, max(now_ms, shown.retry_at_ms), "consumers of Pinterest's layout do not have it yet"))
    if steps:
        return min(steps, key=lambda step: step.at_ms)
    why = "time alone may make it due" if seen.wake_ms < watch.look_at_ms else "nothing is due"
    if not may_begin:
        why = watch.suspended or watch.paused
    return NextStep(Action.LOOK, max(now_ms, min(seen.wake_ms, watch.look_at_ms)), why)


def since_ms(watch: PartitionWatch) -> int:
    """Since when nothing cleans it; 0 where that is not known."""
    if watch.unreadable or watch.problem:
        return watch.troubled_ms
    return watch.sight.quarantine_ms if watch.sight else 0
