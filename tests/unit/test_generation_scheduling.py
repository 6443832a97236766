"""When the daemon brings a generation up to the view, decided without store, clock or threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compactor.model.ids import TopicPartition
from compactor.service.scheduling import (
    CLOCK_MS,
    NEVER,
    RETRY_MS,
    Action,
    GenerationWatch,
    Job,
    JobOutcome,
    PartitionWatch,
    Sight,
    finished,
    looked,
    wanted,
)

NOW = 1_770_000_000_000
TTL = 30_000
A = TopicPartition("orders", 0)


def watch(slot: int = 7, generation: GenerationWatch | None = None, **of_sight: Any) -> PartitionWatch:
    seen = Sight(A, slot, segments=2, **of_sight)
    return PartitionWatch(name=A, sight=seen, look_at_ms=NEVER, generation=generation or GenerationWatch())


def end(before: PartitionWatch, status: str, **outcome: Any) -> PartitionWatch:
    return finished(before, Job(A, Action.GENERATION), JobOutcome(status, "why", **outcome), NOW, TTL)


def test_nobody_wants_any() -> None:
    assert wanted(replace(watch(), generation=None), NOW) is None


def test_whatever_the_log_has_beyond_what_was_shown() -> None:
    assert wanted(watch(), NOW) is Action.GENERATION
    assert wanted(watch(generation=GenerationWatch(shown_slot=7)), NOW) is None
    assert wanted(end(watch(), "written", shown_slot=7), NOW) is None
    assert wanted(watch(generation=GenerationWatch(shown_slot=6)), NOW) is Action.GENERATION


def test_an_empty_partition_is_looked_at_as_what_it_had_may_have_been_deleted() -> None:
    empty = replace(watch(), sight=Sight(A, 7))
    assert wanted(empty, NOW) is Action.GENERATION
    assert wanted(end(empty, "removed", shown_slot=7), NOW) is None


def test_a_round_goes_first_but_not_two() -> None:
    due = watch(due=True)
    assert wanted(due, NOW) is Action.ROUND
    after = finished(due, Job(A, Action.ROUND), JobOutcome("cleaned", sight=Sight(A, 9, segments=2, due=True, end_offset=9)), NOW, TTL)
    assert wanted(after, NOW) is Action.GENERATION
    assert wanted(end(after, "written", shown_slot=9), NOW + RETRY_MS) is Action.ROUND


def test_a_target_that_fails_holds_no_round_up() -> None:
    once = end(replace(watch(due=True), generation=GenerationWatch(rounds=3)), "failed")
    assert wanted(once, NOW) is Action.ROUND
    assert once.uncleanable == ""
    assert once.generation is not None
    assert (once.generation.failures, once.generation.problem) == (1, "why")
    twice = end(watch(generation=once.generation), "failed")
    assert twice.generation is not None
    assert twice.generation.retry_at_ms == NOW + 2 * RETRY_MS
    assert wanted(twice, NOW + 2 * RETRY_MS - 1) is None
    assert wanted(twice, NOW + 2 * RETRY_MS) is Action.GENERATION
    assert end(twice, "appended", shown_slot=7).generation == GenerationWatch(7)


def test_somebody_else_who_writes_it_is_waited_for() -> None:
    assert wanted(end(watch(), "leased"), NOW + TTL - 1) is None
    assert wanted(end(watch(), "leased"), NOW + TTL) is Action.GENERATION


def test_the_next_deletion_has_its_time() -> None:
    waits = end(watch(), "written", shown_slot=7, again_ms=NOW + 10_000)
    assert wanted(waits, NOW + 10_000 + CLOCK_MS - 1) is None
    assert wanted(waits, NOW + 10_000 + CLOCK_MS) is Action.GENERATION


def test_a_log_that_was_begun_anew_is_shown_anew() -> None:
    shown = watch(20, GenerationWatch(20))
    assert wanted(replace(looked(shown, Sight(A, 3, segments=1), NOW, 0.5), look_at_ms=NEVER), NOW) is Action.GENERATION


def test_what_was_stopped_is_done_by_the_next_start() -> None:
    assert end(watch(), "stopped").generation == GenerationWatch()
