"""When the daemon brings a generation up to the view, decided without store, clock or threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compactor.constants import NEVER_MS
from compactor.daemon.scheduling import (
    CLOCK_RESOLUTION_MS,
    DaemonAction,
    JobOutcome,
    OutputSchedule,
    PartitionJob,
    PartitionSchedule,
    action_to_take_now,
    with_job_outcome,
    with_poll_result,
)
from compactor.model.ids import TopicPartition
from compactor.service import RETRY_MS
from tests.support.dues import due_of

NOW = 1_770_000_000_000
TTL = 30_000
A = TopicPartition("orders", 0)


def schedule(slot: int = 7, output: OutputSchedule | None = None, **status: Any) -> PartitionSchedule:
    seen = due_of(A, slot, segments=2, **status)
    return PartitionSchedule(partition=A, due=seen, next_poll_ms=NEVER_MS, output=output or OutputSchedule())


def end(before: PartitionSchedule, status: str, **outcome: Any) -> PartitionSchedule:
    return with_job_outcome(before, PartitionJob(A, DaemonAction.OUTPUT), JobOutcome(status, "why", **outcome), NOW, TTL)


def test_nobody_wants_any() -> None:
    assert action_to_take_now(replace(schedule(), output=None), NOW) is None


def test_whatever_the_log_has_beyond_what_was_shown() -> None:
    assert action_to_take_now(schedule(), NOW) is DaemonAction.OUTPUT
    assert action_to_take_now(schedule(output=OutputSchedule(written_slot=7)), NOW) is None
    assert action_to_take_now(end(schedule(), "written", written_slot=7), NOW) is None
    assert action_to_take_now(schedule(output=OutputSchedule(written_slot=6)), NOW) is DaemonAction.OUTPUT


def test_an_empty_partition_is_looked_at_as_what_it_had_may_have_been_deleted() -> None:
    empty = replace(schedule(), due=due_of(A, 7))
    assert action_to_take_now(empty, NOW) is DaemonAction.OUTPUT
    assert action_to_take_now(end(empty, "removed", written_slot=7), NOW) is None


def test_a_round_goes_first_but_not_two() -> None:
    due = schedule(is_due=True)
    assert action_to_take_now(due, NOW) is DaemonAction.ROUND
    after = with_job_outcome(
        due,
        PartitionJob(A, DaemonAction.ROUND),
        JobOutcome("cleaned", due=due_of(A, 9, segments=2, is_due=True, end_offset=9)),
        NOW,
        TTL,
    )
    assert action_to_take_now(after, NOW) is DaemonAction.OUTPUT
    assert action_to_take_now(end(after, "written", written_slot=9), NOW + RETRY_MS) is DaemonAction.ROUND


def test_a_target_that_fails_holds_no_round_up() -> None:
    once = end(replace(schedule(is_due=True), output=OutputSchedule(rounds=3)), "failed")
    assert action_to_take_now(once, NOW) is DaemonAction.ROUND
    assert once.blocked_reason == ""
    assert once.output is not None
    assert (once.output.failures, once.output.problem) == (1, "why")
    twice = end(schedule(output=once.output), "failed")
    assert twice.output is not None
    assert twice.output.retry_at_ms == NOW + 2 * RETRY_MS
    assert action_to_take_now(twice, NOW + 2 * RETRY_MS - 1) is None
    assert action_to_take_now(twice, NOW + 2 * RETRY_MS) is DaemonAction.OUTPUT
    assert end(twice, "appended", written_slot=7).output == OutputSchedule(7)


def test_somebody_else_who_writes_it_is_waited_for() -> None:
    assert action_to_take_now(end(schedule(), "leased"), NOW + TTL - 1) is None
    assert action_to_take_now(end(schedule(), "leased"), NOW + TTL) is DaemonAction.OUTPUT


def test_the_next_deletion_has_its_time() -> None:
    waits = end(schedule(), "written", written_slot=7, next_deletion_ms=NOW + 10_000)
    assert action_to_take_now(waits, NOW + 10_000 + CLOCK_RESOLUTION_MS - 1) is None
    assert action_to_take_now(waits, NOW + 10_000 + CLOCK_RESOLUTION_MS) is DaemonAction.OUTPUT


def test_a_log_that_was_begun_anew_is_shown_anew() -> None:
    shown = schedule(20, OutputSchedule(20))
    assert (
        action_to_take_now(replace(with_poll_result(shown, due_of(A, 3, segments=1), NOW, 0.5), next_poll_ms=NEVER_MS), NOW)
        is DaemonAction.OUTPUT
    )


def test_what_was_stopped_is_done_by_the_next_start() -> None:
    assert end(schedule(), "stopped").output == OutputSchedule()
