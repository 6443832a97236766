"""The daemon's scheduler: decides what is done next, as pure functions over frozen values.

1. ``due`` judges a partition's summary by settings and time; ``PartitionSchedule`` adds what only this daemon remembers of the partition.
2. A partition is polled when the change feed reports a change, when time alone changes the answer (``next_due_time_ms``), and every
   ``idle_poll_interval_ms``, because change hints can be lost.
3. ``choose_jobs`` returns the jobs to start now, ``execute_job`` performs one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from compactor.access.rounds import create_round, execute_round
from compactor.access.tier import Tier
from compactor.config.settings import CleanerSettings, Settings
from compactor.constants import NEVER_MS
from compactor.control.leadership import current_lease
from compactor.control.log_start import earliest_deletion_time_ms, import_abandoned_at_ms
from compactor.control.logs import PartitionLog, open_catalog
from compactor.control.ports import ObjectRetention
from compactor.control.state import CatalogState, RoundStage
from compactor.control.summary import PartitionSummary, SegmentMetadataOrSummary
from compactor.errors import BlockedCause, CompactorError, Fenced, Leased, OutOfBudget, bug_reason
from compactor.local.budget import DiskBudget
from compactor.model.ids import CHANGING, PUBLISHING, RoundStatus, TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.outputs import OutputReport, OutputWriter, PartitionOutputExtent
from compactor.round.compaction import RoundReport
from compactor.round.plan import assess_round, find_expired_segments, next_expiry_ms
from compactor.service import RETRY_MS, InterruptibleStore, Stopped, StopRequest, backoff_ms
from compactor.upkeep.retire import RetireReport, retire_partition
from compactor.views.verdict import (
    Block,
    PartitionVerdict,
    TransactionAtEnd,
    bytes_not_cleaned,
    held_until_ms,
    partition_verdict,
    quarantine_cause,
    stored_block,
    with_recorded_time,
)

POLL_MS = 3_600_000
"""Longest time between two polls of an idle partition, in milliseconds. One poll costs two requests."""
IDLE_POLLS_PER_HOUR = 1_250
"""Most polls per hour of all idle partitions together. In a large tier each one is polled less often."""
FIRST_POLL_MS = 60_000
"""Delay of the first poll after a change. It doubles with every poll up to POLL_MS."""
SLOWEST_AFTER_POLLS = 64
"""Number of consecutive polls without news after which the delay is POLL_MS."""
CLOCK_RESOLUTION_MS = 1_000
"""Stores report times in whole seconds, so a deletion is tried one second late rather than too early."""
ROUND_HOLD_MS = 60_000
"""How long all rounds wait when one round found the tier-wide record budget exhausted."""


class DaemonAction(StrEnum):
    """Actions of the daemon on one partition. A poll is done by the scan; the others are jobs."""

    POLL = "poll"
    ROUND = "round"
    RETIRE = "retire"
    OUTPUT = "output"


@dataclass(frozen=True)
class Due:
    """Work that a partition's summary asks for under settings and at a time, and what stands in its way.

    is_due: also for an interrupted round.
    first_uncleanable_offset: exclusive upper bound of what a round may clean now.
    max_delay_ms: by how much max.compaction.lag.ms is exceeded.
    wake_ms: until this time only a new record can make a round due; NEVER_MS if time does not matter.
    deletes_segments: False if another process deletes what waits.
    block: what prevents rounds by the stored state and this program's settings.
    held_until_ms: when the last dirty segment that a round may not clean yet may be cleaned; 0 if there is none, NEVER_MS if unknown.
    uncleaned_bytes: size of all segments with dirty offsets.
    retire_at_ms: when something may be deleted; NEVER_MS if nothing waits.
    freed: bytes that deletions by any compactor freed, with the hour.
    """

    summary: PartitionSummary
    is_due: bool = False
    reason: str = ""
    first_uncleanable_offset: int = 0
    dirty_bytes: int = 0
    dirty_ratio: float = 0.0
    max_delay_ms: int = 0
    wake_ms: int = NEVER_MS
    block: Block | None = None
    held_until_ms: int = 0
    uncleaned_bytes: int = 0
    retire_at_ms: int = NEVER_MS
    deletes_segments: bool = True
    freed: tuple[tuple[int, int], ...] = ()


def due(
    summary: PartitionSummary,
    cleaner: CleanerSettings,
    retention: ObjectRetention,
    slot_times_ms: Mapping[int, int],
    now_ms: int,
    *,
    transaction: TransactionAtEnd | None = None,
    bootstrap_servers: str = "",
) -> Due:
    """:param slot_times_ms: as in ``CachedPartitionSummary``.
    :param bootstrap_servers: for the command that ends a transaction.
    """
    # Of a copy, because a summary caches its decoded segments: 200,000 of them in a large tier.
    judged, summary = summary, summary.model_copy()
    found = assess_round(summary, cleaner, now_ms)
    expired, expires_ms = find_expired_segments(summary, cleaner, now_ms), next_expiry_ms(summary, cleaner)
    reason = f"retention: {expired.reason}" if expired and not found.due else found.reason
    late = [s.first_timestamp_ms + cleaner.max_compaction_lag_ms for s in found.dirty if s.first_timestamp_ms > 0]
    return Due(
        summary=judged,
        is_due=found.due or summary.open_run != "" or expired is not None,
        reason="a round was begun and not finished" if summary.open_run else reason,
        first_uncleanable_offset=found.end,
        dirty_bytes=sum(segment.size_bytes for segment in found.dirty),
        dirty_ratio=found.dirty_ratio,
        max_delay_ms=max(0, now_ms - min(late)) if late else 0,
        wake_ms=min(next_due_time_ms(summary.live, cleaner, now_ms), expires_ms if expires_ms > now_ms else NEVER_MS),
        block=stored_block(summary, found, cleaner, transaction, now_ms, bootstrap_servers),
        held_until_ms=held_until_ms(summary, found, cleaner, transaction, now_ms),
        uncleaned_bytes=bytes_not_cleaned(summary),
        retire_at_ms=_next_segment_deletion_ms(summary, retention, slot_times_ms, now_ms),
        deletes_segments=retention.deletes_segments,
        freed=tuple((at_ms + max(retention.grace_ms, retention.undo_window_ms), size) for at_ms, size in summary.freed),
    )


def next_due_time_ms(live: Iterable[SegmentMetadataOrSummary], cleaner: CleanerSettings, now_ms: int) -> int:
    """Next time at which a round may become due although nothing is written; NEVER_MS if none."""
    moments = []
    for segment in live:
        moments.append(segment.due_ms)
        if cleaner.min_compaction_lag_ms > 0:
            stamp = segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.mtime_ms
            moments.append(stamp + cleaner.min_compaction_lag_ms)
        if segment.first_timestamp_ms > 0:
            moments.append(segment.first_timestamp_ms + cleaner.max_compaction_lag_ms + 1)
    return min((moment for moment in moments if now_ms < moment < NEVER_MS), default=NEVER_MS)


def _next_segment_deletion_ms(summary: PartitionSummary, retention: ObjectRetention, slot_times_ms: Mapping[int, int], now_ms: int) -> int:
    if summary.retiring:
        return now_ms
    moments = [earliest_deletion_time_ms(group, retention, slot_times_ms, now_ms) for group in summary.waiting]
    moments += [import_abandoned_at_ms(entry, retention, slot_times_ms, now_ms) for entry in summary.imports]
    return min(min(moments, default=NEVER_MS) + CLOCK_RESOLUTION_MS, NEVER_MS)


@dataclass(frozen=True)
class OutputSchedule:
    """Time and reason of the next update of a partition's output.

    written_slot: of the last control log record that the output shows; -1 if unknown.
    next_deletion_ms: when an old version may be deleted; NEVER_MS if none waits.
    rounds: rounds published since the output was written.
    """

    written_slot: int = -1
    next_deletion_ms: int = NEVER_MS
    content: PartitionOutputExtent | None = None
    rounds: int = 0
    failures: int = 0
    problem: str = ""
    retry_at_ms: int = 0

    def is_output_due(self, slot: int, now_ms: int) -> bool:
        """Return whether the output lacks records up to ``slot`` or an old version may be deleted, and no failed attempt delays it."""
        return now_ms >= self.retry_at_ms and (slot > self.written_slot or now_ms >= self.next_deletion_ms)


@dataclass(frozen=True)
class PartitionSchedule:
    """Schedule of one partition: its summary as last judged, failures and requests, and when this daemon may act on it next.

    idle_polls: polls in a row that found nothing new.
    suspended: why brokers or the topic's settings forbid rounds. paused: who paused them.
    waiting_reason: why the latest round was not begun although nothing is wrong.
    request_slot: slot of the latest request's catalog record, still to be begun if ``requested``.
    exclusive: whether the next round needs the budgets for itself.
    failures: failed jobs in a row for reasons of this process; ``problem`` is the latest.
    unreadable: reason of the latest of ``poll_failures`` in a row.
    failing_since_ms: since when jobs or polls fail; 0 if neither does.
    repeats: rounds in a row that found nothing new to clean and left the partition due.
    swept_slot: slot up to which the objects of undone rounds were deleted.
    """

    partition: TopicPartition
    hint: int = 0
    due: Due | None = None
    next_poll_ms: int = 0
    idle_polls: int = 0
    next_round_ms: int = 0
    retire_at_ms: int = 0
    swept_slot: int = 2**63 - 1
    exclusive: bool = False
    failures: int = 0
    problem: str = ""
    problem_cause: BlockedCause = BlockedCause.FAILING
    poll_failures: int = 0
    unreadable: str = ""
    failing_since_ms: int = 0
    repeats: int = 0
    next_repeat_ms: int = 0
    suspended: Block | None = None
    waiting_reason: str = ""
    output: OutputSchedule | None = None
    paused: str = ""
    request_slot: int = 0
    requested: bool = False

    @property
    def verdict(self) -> PartitionVerdict | None:
        """Verdict, or None if the partition was not polled yet and nothing is known to fail."""
        seen = self.due
        if seen is None and not (self.suspended or self.unreadable or self.problem):
            return None
        is_due = seen is not None and seen.is_due
        return partition_verdict(
            due=is_due,
            reason=seen.reason if seen else "",
            blocks=(
                with_recorded_time(self.suspended, seen.summary) if self.suspended and seen else self.suspended,
                Block(BlockedCause.FAILING, self.unreadable, self.failing_since_ms) if self.unreadable else None,
                Block(self.problem_cause, self.problem, self.failing_since_ms) if self.problem else None,
                seen.block if seen else None,
            ),
            paused=self.paused,
            held_until_ms=self.next_round_ms if is_due and self.waiting_reason else seen.held_until_ms if seen else 0,
            postponed=self.waiting_reason,
            waiting_bytes=seen.uncleaned_bytes if seen else 0,
        )

    @property
    def blocked_reason(self) -> str:
        """Return why no round can clean this partition until a person acts."""
        verdict = self.verdict
        return verdict.reason if verdict is not None and verdict.is_blocked else ""

    @property
    def startable(self) -> Due | None:
        """Return ``due`` if a round is due, and neither paused nor blocked."""
        return self.due if self.due and self.due.is_due and not self.paused and not self.blocked_reason else None


@dataclass(frozen=True)
class JobOutcome:
    """Result of a job, for scheduling.

    status: a status of `run`, or retired, failed, out_of_budget, stopped.
    until_ms: when a round that waits may be tried again.
    cause: why each further attempt fails, too; FAILING if a later one may succeed.
    """

    status: str
    reason: str = ""
    due: Due | None = None
    until_ms: int = 0
    written_slot: int = -1
    next_deletion_ms: int = NEVER_MS
    content: PartitionOutputExtent | None = None
    cause: BlockedCause = BlockedCause.FAILING


@dataclass(frozen=True)
class PartitionJob:
    """One action on one partition. exclusive: no other job may run at the same time. force: even if the dirty ratio is too low."""

    partition: TopicPartition
    action: DaemonAction
    exclusive: bool = False
    force: bool = False


def with_change_hint(schedule: PartitionSchedule, hint: int, now_ms: int) -> PartitionSchedule:
    return replace(schedule, hint=hint, next_poll_ms=now_ms, idle_polls=0)


def new_partition_schedule(partition: TopicPartition, hint: int, now_ms: int) -> PartitionSchedule:
    return PartitionSchedule(partition=partition, hint=hint, next_poll_ms=now_ms)


def idle_poll_interval_ms(partition_count: int) -> int:
    return max(POLL_MS, partition_count * POLL_MS // IDLE_POLLS_PER_HOUR)


def schedule_restored_after_restart(
    partition: TopicPartition, hint: int, due: Due, polled_ms: int, interval_ms: int = POLL_MS
) -> PartitionSchedule:
    """Schedule of a partition that an earlier process polled and that has not changed since."""
    return PartitionSchedule(
        partition=partition,
        hint=hint,
        due=due,
        next_poll_ms=polled_ms + interval_ms,
        idle_polls=SLOWEST_AFTER_POLLS,
        swept_slot=due.summary.undone_slot,
    )


def with_suspension(schedule: PartitionSchedule, block: Block | None, now_ms: int) -> PartitionSchedule:
    """Schedule with rounds suspended. None ends the suspension; failed rounds are then retried at once."""
    before = schedule.suspended
    if block is not None:
        return replace(schedule, suspended=replace(block, since_ms=before.since_ms if before is not None else now_ms))
    if before is None:
        return schedule
    since_ms = schedule.failing_since_ms if schedule.unreadable else 0
    return replace(schedule, suspended=None, failures=0, problem="", next_round_ms=0, failing_since_ms=since_ms)


def with_pause_and_request(schedule: PartitionSchedule, pause_reason: str, request_slot: int, now_ms: int) -> PartitionSchedule:
    """Schedule after a person has paused or resumed rounds (empty reason), or requested one (0: none)."""
    if request_slot > schedule.request_slot:
        return replace(
            schedule, paused=pause_reason, request_slot=request_slot, requested=True, next_poll_ms=now_ms, next_round_ms=0, next_repeat_ms=0
        )
    return schedule if pause_reason == schedule.paused else replace(schedule, paused=pause_reason)


def needs_poll(schedule: PartitionSchedule, now_ms: int) -> bool:
    return now_ms >= schedule.next_poll_ms or (schedule.due is not None and now_ms >= schedule.due.wake_ms)


def with_poll_result(
    schedule: PartitionSchedule, due: Due, now_ms: int, spread_fraction: float, interval_ms: int = POLL_MS
) -> PartitionSchedule:
    """Schedule after a successful poll.

    :param spread_fraction: from 0 to 1, decides when, within ``interval_ms``, the second poll takes place.
    """
    before, summary = schedule.due.summary if schedule.due else None, due.summary
    changed = before is not None and before.slot != summary.slot
    grown = before is not None and before.end_offset != summary.end_offset
    output = schedule.output
    if output is not None and before is not None and summary.slot < before.slot:
        output = replace(output, written_slot=-1)  # the partition was deleted and its log begun anew
    if before is None:
        delay_ms = interval_ms // 8 + int(spread_fraction * interval_ms * 7 / 8)
        idle_polls = SLOWEST_AFTER_POLLS
    else:
        idle_polls = 0 if changed else schedule.idle_polls + 1
        delay_ms = min(interval_ms, FIRST_POLL_MS << min(idle_polls, 40))
    if not due.deletes_segments and due.retire_at_ms < NEVER_MS:
        delay_ms = min(delay_ms, POLL_MS)  # deletions send no hint: what another process has deleted would seem overdue for hours
    return replace(
        schedule,
        due=due,
        next_poll_ms=now_ms + delay_ms,
        idle_polls=idle_polls,
        poll_failures=0,
        unreadable="",
        failing_since_ms=schedule.failing_since_ms if schedule.problem else 0,
        repeats=0 if grown else schedule.repeats,
        next_repeat_ms=0 if grown else schedule.next_repeat_ms,
        swept_slot=summary.undone_slot if before is None else schedule.swept_slot,
        output=output,
    )


def with_failed_poll(schedule: PartitionSchedule, reason: str, now_ms: int) -> PartitionSchedule:
    failures = schedule.poll_failures + 1
    since_ms = schedule.failing_since_ms or now_ms
    retry_ms = now_ms + backoff_ms(failures)
    return replace(schedule, poll_failures=failures, unreadable=reason, failing_since_ms=since_ms, next_poll_ms=retry_ms)


def action_to_take_now(schedule: PartitionSchedule, now_ms: int, *, may_begin_rounds: bool = True) -> DaemonAction | None:
    """Interrupted rounds are finished even if ``may_begin_rounds`` is False."""
    if needs_poll(schedule, now_ms):
        return DaemonAction.POLL
    due = schedule.due
    if due is None:
        return None
    summary = due.summary
    may_begin = not schedule.suspended and ((may_begin_rounds and not schedule.paused) or bool(summary.open_run))
    if may_begin and schedule.requested and now_ms >= schedule.next_round_ms:
        return DaemonAction.ROUND
    output_due = schedule.output is not None and schedule.output.is_output_due(summary.slot, now_ms)
    if output_due and schedule.output is not None and schedule.output.rounds:
        return DaemonAction.OUTPUT  # it goes before the next round, or a partition that is always due would never have its output written
    retire_due = now_ms >= schedule.retire_at_ms and (now_ms >= due.retire_at_ms or summary.undone_slot > schedule.swept_slot)
    retire_due = retire_due and due.deletes_segments
    if retire_due and not schedule.failures and not summary.open_run:
        return DaemonAction.RETIRE  # likewise: what a partition that is always due has replaced would never be deleted
    if due.is_due and may_begin and now_ms >= max(schedule.next_round_ms, schedule.next_repeat_ms, _quarantine_ends_ms(summary)):
        return DaemonAction.ROUND
    if output_due:
        return DaemonAction.OUTPUT
    return DaemonAction.RETIRE if retire_due else None


def _quarantine_ends_ms(summary: PartitionSummary) -> int:
    # A block by settings or brokers is not counted: ``suspended`` says whether it still exists.
    why = summary.quarantine
    is_asked = quarantine_cause(summary) in (BlockedCause.SETTINGS, BlockedCause.BROKERS)
    return 0 if why is None or is_asked else why.at_ms + backoff_ms(why.failures)


def with_job_outcome(schedule: PartitionSchedule, job: PartitionJob, outcome: JobOutcome, now_ms: int, ttl_ms: int) -> PartitionSchedule:
    """Schedule after a job. ttl_ms: lease time, for which none begins after another compactor was found at work."""
    output = schedule.output
    if job.action is DaemonAction.OUTPUT:
        return replace(schedule, output=_with_output_job_outcome(output or OutputSchedule(), outcome, now_ms, ttl_ms))
    if outcome.status in PUBLISHING and output is not None:
        schedule = replace(schedule, output=replace(output, rounds=output.rounds + 1))
    before, due = schedule.due, outcome.due or schedule.due
    changed = replace(
        schedule,
        due=due,
        exclusive=False,
        requested=schedule.requested and job.action is not DaemonAction.ROUND,
        next_poll_ms=now_ms if outcome.due is None else schedule.next_poll_ms,
    )
    if outcome.status in (RoundStatus.LEASED, RoundStatus.FENCED):
        return replace(changed, next_round_ms=now_ms + ttl_ms, retire_at_ms=now_ms + ttl_ms, next_poll_ms=now_ms + ttl_ms)
    if outcome.status == RoundStatus.OUT_OF_BUDGET and not job.exclusive:
        return replace(changed, exclusive=True, requested=schedule.requested)
    if outcome.status in (RoundStatus.FAILED, RoundStatus.OUT_OF_BUDGET):
        failures = schedule.failures + 1
        retry_ms = now_ms + backoff_ms(failures)
        since_ms = schedule.failing_since_ms or now_ms
        return replace(
            changed,
            failures=failures,
            problem=outcome.reason,
            problem_cause=outcome.cause,
            failing_since_ms=since_ms,
            next_round_ms=retry_ms,
            retire_at_ms=retry_ms,
        )
    since_ms = schedule.failing_since_ms if schedule.unreadable else 0
    changed = replace(changed, failures=0, problem="", waiting_reason="", failing_since_ms=since_ms)
    if outcome.status == RoundStatus.WAITING:
        # The round was not begun, so a request for it is still open.
        retry_ms = max(outcome.until_ms, now_ms + CLOCK_RESOLUTION_MS)
        return replace(
            changed, waiting_reason=outcome.reason, next_round_ms=retry_ms, exclusive=job.exclusive, requested=schedule.requested
        )
    if job.action is DaemonAction.RETIRE and outcome.status == RoundStatus.NOTHING_TO_DO:
        return changed  # another daemon was faster: what is due is decided anew from what it has written
    if job.action is DaemonAction.RETIRE:
        # By the store's clock it was not due yet: try again later, not every second.
        delay_ms = RETRY_MS if due is not None and now_ms >= due.retire_at_ms else 0
        return replace(changed, retire_at_ms=now_ms + delay_ms, swept_slot=due.summary.undone_slot if due else schedule.swept_slot)
    still_due = due is not None and due.is_due and before is not None and before.summary.end_offset == due.summary.end_offset
    repeats = schedule.repeats + 1 if still_due else 0
    return replace(changed, repeats=repeats, next_repeat_ms=now_ms + backoff_ms(repeats - 1))


def _with_output_job_outcome(schedule: OutputSchedule, outcome: JobOutcome, now_ms: int, lease_ttl_ms: int) -> OutputSchedule:
    # A failed output never delays rounds.
    if outcome.status == RoundStatus.STOPPED:
        return schedule
    if outcome.status in (RoundStatus.LEASED, RoundStatus.FENCED):
        return replace(schedule, retry_at_ms=now_ms + lease_ttl_ms)
    if outcome.status in (RoundStatus.FAILED, RoundStatus.OUT_OF_BUDGET):
        failures = schedule.failures + 1
        return replace(schedule, rounds=0, failures=failures, problem=outcome.reason, retry_at_ms=now_ms + backoff_ms(failures))
    return OutputSchedule(outcome.written_slot, min(outcome.next_deletion_ms + CLOCK_RESOLUTION_MS, NEVER_MS), outcome.content)


def choose_jobs(
    schedules: Iterable[PartitionSchedule],
    running: Mapping[TopicPartition, PartitionJob],
    max_jobs: int,
    now_ms: int,
    *,
    may_begin_rounds: bool = True,
) -> list[PartitionJob]:
    """Jobs to start now, at most one per partition and, with the running ones, ``max_jobs``.

    Requested rounds go first, then the order of ``schedules`` decides. An exclusive round starts only when no job runs, and none starts
    before it.
    """
    if any(job.exclusive for job in running.values()):
        return []
    candidates: list[tuple[PartitionSchedule, DaemonAction]] = []
    for schedule in schedules:
        action = action_to_take_now(schedule, now_ms, may_begin_rounds=may_begin_rounds)
        if schedule.partition not in running and action is not None and action is not DaemonAction.POLL:
            candidates.append((schedule, action))
    exclusive = next((schedule for schedule, action in candidates if schedule.exclusive and action is DaemonAction.ROUND), None)
    if exclusive is not None:
        return [] if running else [PartitionJob(exclusive.partition, DaemonAction.ROUND, exclusive=True, force=exclusive.requested)]
    candidates.sort(key=lambda candidate: not candidate[0].requested)
    free = max(0, max_jobs - len(running))
    return [PartitionJob(one.partition, action, force=one.requested and action is DaemonAction.ROUND) for one, action in candidates[:free]]


class PartitionCondition(StrEnum):
    """A partition's condition, most urgent first.

    ATTENTION: no round can clean it until a person acts.
    WAITING: replaced segments wait for deletion.
    UNSEEN: not polled yet.
    """

    ATTENTION = "attention"
    WORKING = "working"
    DUE = "due"
    WAITING = "waiting"
    PAUSED = "paused"
    UNSEEN = "unseen"
    QUIET = "quiet"


@dataclass(frozen=True)
class PlannedAction:
    action: DaemonAction
    at_ms: int
    why: str


def partition_condition(schedule: PartitionSchedule, *, is_job_running: bool) -> PartitionCondition:
    if schedule.blocked_reason:
        return PartitionCondition.ATTENTION
    if is_job_running:
        return PartitionCondition.WORKING
    if schedule.paused:
        return PartitionCondition.PAUSED
    seen = schedule.due
    if seen is None:
        return PartitionCondition.UNSEEN
    if seen.is_due:
        return PartitionCondition.DUE
    return PartitionCondition.WAITING if seen.retire_at_ms < NEVER_MS else PartitionCondition.QUIET


def planned_action(schedule: PartitionSchedule, now_ms: int) -> PlannedAction:
    seen = schedule.due
    if seen is None or schedule.unreadable:
        return PlannedAction(
            DaemonAction.POLL, max(now_ms, schedule.next_poll_ms), "it cannot be read" if schedule.unreadable else "it was not polled yet"
        )
    steps = []
    may_begin = not schedule.suspended and (not schedule.paused or bool(seen.summary.open_run))
    if schedule.requested and may_begin:
        steps.append(PlannedAction(DaemonAction.ROUND, max(now_ms, schedule.next_round_ms), "a round was requested"))
    if seen.is_due and may_begin:
        waits = _quarantine_ends_ms(seen.summary)
        why = "it failed before" if waits > now_ms or schedule.problem else schedule.waiting_reason or seen.reason
        steps.append(PlannedAction(DaemonAction.ROUND, max(now_ms, schedule.next_round_ms, schedule.next_repeat_ms, waits), why))
    if seen.retire_at_ms < NEVER_MS and seen.deletes_segments:
        step = PlannedAction(DaemonAction.RETIRE, max(now_ms, schedule.retire_at_ms, seen.retire_at_ms), "replaced segments may be deleted")
        goes_first = not schedule.failures and not seen.summary.open_run  # of steps at the same time; see ``action_to_take_now``
        steps.insert(int(schedule.requested and may_begin) if goes_first else len(steps), step)
    output = schedule.output
    if output is not None and output.is_output_due(seen.summary.slot, max(now_ms, output.retry_at_ms)):
        steps.append(PlannedAction(DaemonAction.OUTPUT, max(now_ms, output.retry_at_ms), "the output lacks the latest changes"))
    if steps:
        return min(steps, key=lambda step: step.at_ms)
    why = "a delete horizon or a lag may make a round due" if seen.wake_ms < schedule.next_poll_ms else "nothing is due"
    if not may_begin:
        why = schedule.suspended.reason if schedule.suspended is not None else schedule.paused
    return PlannedAction(DaemonAction.POLL, max(now_ms, min(seen.wake_ms, schedule.next_poll_ms)), why)


@dataclass(frozen=True)
class JobResult:
    """Result of a job of the daemon.

    status: as in JobOutcome.
    log: as read after the job.
    report: None if the job failed.
    phases: seconds per phase (``RunningJobSnapshot``).
    """

    job: PartitionJob
    status: str
    reason: str = ""
    log: PartitionLog | None = None
    report: RoundReport | RetireReport | OutputReport | None = None
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    run_id: str = ""
    cause: BlockedCause = BlockedCause.FAILING


class JobProgressObserver(Protocol):
    def record_transferred_bytes(self, size: int) -> None:
        """Bytes of segments only."""

    def record_round_stage(self, stage: RoundStage, plan: CompactionPlan) -> None: ...


@dataclass(frozen=True)
class JobResources:
    disk: DiskBudget
    stop: StopRequest
    output: OutputWriter | None = None


def execute_job(
    tier: Tier,
    catalog: CatalogState,
    job: PartitionJob,
    resources: JobResources,
    now_ms: int,
    observer: JobProgressObserver,
    *,
    log_slot_when_chosen: int = -1,
) -> JobResult:
    """Perform a job; raises nothing. Its records have a random id of their own (writer incarnation).

    :param log_slot_when_chosen: last slot read when the job was chosen. A deletion is skipped if the log has grown since: another daemon
        has then deleted what was due.
    """

    def on_stage(stage: RoundStage, plan: CompactionPlan) -> None:
        observer.record_round_stage(stage, plan)
        resources.stop.check_stage(stage)

    tier = tier.with_stores(data=InterruptibleStore(tier.ports.data, resources.stop, observer.record_transferred_bytes))
    tier = replace(tier, catalog=open_catalog(tier.ports))
    tier.catalog.continue_from_cached_state(catalog)
    log = tier.open_partition_log(job.partition, caller_runs_round=True)
    try:
        if job.action is DaemonAction.OUTPUT and resources.output is not None:
            written = resources.output.update_output(tier, job.partition, resources.disk)
            return JobResult(job, written.status, report=written)
        log.refresh()
        lease = current_lease(tier.ports, log)
        left_ms = lease.expires_ms - tier.ports.control.clock_ms() if lease else 0
        # A lease that seems to last longer than two of ours is ignored: the store's clock was set back, or the holder's ttl is longer.
        if lease is not None and 0 < left_ms <= 2 * tier.lease.ttl_ms:
            return JobResult(job, RoundStatus.LEASED, f"{lease.holder} is at work", log)
        if job.action is DaemonAction.RETIRE and 0 <= log_slot_when_chosen < log.state.slot:
            return JobResult(job, RoundStatus.NOTHING_TO_DO, "another process has written meanwhile", log)
        if job.action is DaemonAction.ROUND:
            stop = resources.stop.raise_if_stopped
            round_report = execute_round(
                tier,
                job.partition,
                log,
                now_ms,
                force=job.force,
                on_stage=on_stage,
                disk=resources.disk,
                check_stop=stop,
                shares_budgets=not job.exclusive,
            )
            if round_report.status in CHANGING:
                tier.change_notifier.announce_changed_control_logs([log])
            result = JobResult(job, round_report.status, round_report.reason, log, round_report)
        else:
            unfinished = create_round(tier, job.partition, now_ms, on_stage=on_stage, disk=resources.disk)
            result = JobResult(
                job,
                RoundStatus.RETIRED,
                "",
                log,
                retire_partition(tier.ports, log, tier.lease, tier.retention, job=unfinished),
            )
            tier.change_notifier.record_lengths([log])
        log.refresh()
    except CompactorError as error:
        known = {
            Stopped: RoundStatus.STOPPED,
            Leased: RoundStatus.LEASED,
            Fenced: RoundStatus.FENCED,
            OutOfBudget: RoundStatus.OUT_OF_BUDGET,
        }
        status = known.get(type(error), RoundStatus.FAILED)
        text = error.message if status in (RoundStatus.STOPPED, RoundStatus.LEASED, RoundStatus.FENCED) else str(error)
        return JobResult(job, status, text, cause=error.blocks_by)
    except Exception as error:  # noqa: BLE001 - one partition's bug must not end the service for the others (I9)
        return JobResult(job, RoundStatus.FAILED, bug_reason(error))
    return result


def check_stores_writable(tier: Tier) -> None:
    """Raise StoreError or OutOfBudget if a store that rounds write to cannot be written."""
    ports = tier.ports
    places = [(ports.control, "probe/daemon")]
    if tier.settings.tier.control_url and tier.ownership.ours:
        places.append((ports.data, ".tiered-compactor/probe/daemon"))
    for store, key in places:
        store.put(key, b"may a round write here?")
        store.delete([key])


def settings_for_parallel_job(settings: Settings, parallel_jobs: int, worker_threads: int) -> Settings:
    """Settings for one of ``parallel_jobs`` jobs: an equal share of the map budget."""

    def with_map_share(cleaner: CleanerSettings) -> CleanerSettings:
        return cleaner.model_copy(update={"map_budget_bytes": max(1, cleaner.map_budget_bytes // parallel_jobs)})

    return settings.model_copy(
        update={
            "cleaner": with_map_share(settings.cleaner),
            "topics": {pattern: with_map_share(cleaner) for pattern, cleaner in settings.topics.items()},
            "daemon": settings.daemon.model_copy(update={"threads": worker_threads}),
        }
    )
