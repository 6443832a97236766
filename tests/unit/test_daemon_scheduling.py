"""What the daemon does next, decided without store, clock or threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.lineage import EpochEntry
from compactor.config import Cleaner
from compactor.control.ports import Retention
from compactor.control.state import Intent, Leader, PartitionState, Quarantine, Registration, Waiting
from compactor.control.summary import summarize
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.round.plan import assess
from compactor.service.scheduling import (
    CLOCK_MS,
    FIRST_POLL_MS,
    MOST_RETRY_MS,
    NEVER,
    POLL_MS,
    RETRY_MS,
    Action,
    Job,
    JobOutcome,
    PartitionWatch,
    Sight,
    backoff_ms,
    choose,
    discovered,
    finished,
    hinted,
    look_failed,
    looked,
    needs_look,
    remembered,
    sight,
    suspended,
    wake_ms,
    wanted,
)

NOW = 1_770_000_000_000
A, B, C = (TopicPartition("orders", number) for number in range(3))
RETENTION = Retention(grace_ms=1_000, undo_window_ms=5_000, orphan_age_ms=100_000)
TTL = 30_000


def segment(number: int = 0, **changes: Any) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        id=f"segment-{number}",
        start_offset=number * 10,
        end_offset=number * 10 + 9,
        size_bytes=100,
        max_timestamp_ms=NOW,
        mtime_ms=NOW,
        leader_epochs=(EpochEntry(0, 0),),
        files={"log": SegmentFile(size=100, sha256="")},
    ).model_copy(update=changes)


def state(*segments: RemoteLogSegmentMetadata, **changes: Any) -> PartitionState:
    return PartitionState(topic=A.topic, partition=A.partition, slot=7, live=segments).model_copy(update=changes)


def seen(known: PartitionState, cleaner: Cleaner | None = None, since: dict[int, int] | None = None) -> Sight:
    return sight(summarize(known), cleaner or Cleaner(), RETENTION, since or {}, NOW)


def watch(name: TopicPartition = A, **of_sight: Any) -> PartitionWatch:
    return PartitionWatch(name=name, sight=Sight(name=name, slot=7, **of_sight), look_at_ms=NOW + POLL_MS, swept_slot=0)


class TestSight:
    def test_of_a_partition_that_is_dirty(self) -> None:
        found = seen(state(segment(0), segment(1)))
        assert (found.due, found.dirty_bytes, found.dirty_ratio, found.end_offset) == (True, 200, 1.0, 19)

    def test_an_open_round_is_due_whatever_the_ratio_says(self) -> None:
        plan = CompactionPlan(
            run_id="r", topic="orders", partition=0, leader_epoch=0, now_ms=NOW, first_dirty_offset=0, end_offset=0,
            next_dirty_offset=0, high_watermark=0, legacy_horizon_ms=0, vector=(), policy=CleanerPolicy(), map_engine="memory",
            fingerprint="", producers=(), tasks=(),
        )  # fmt: skip
        found = seen(state(intent=Intent(plan=plan, slot=3, at_ms=NOW)))
        assert (found.due, found.open_run) == (True, "r")

    def test_a_leader_who_released_is_none(self) -> None:
        leader = Leader(epoch=4, incarnation="i", holder="h", slot=1, at_ms=NOW, ttl_ms=TTL)
        assert seen(state(leader=leader)).leader == "h"
        assert seen(state(leader=leader.model_copy(update={"released": True}))).leader == ""

    def test_when_something_may_be_deleted(self) -> None:
        group = Waiting(slot=5, run_id="r", leader_epoch=0, segments=(segment(0),), vector_before=(), vector=())
        undone = group.model_copy(update={"slot": 6, "undone": True})
        registered = Registration(import_id="i", ids=("x",), holder="h", slot=4)
        since = {4: NOW, 5: NOW, 6: NOW}
        assert seen(state(), since=since).retire_at_ms == NEVER
        assert seen(state(waiting=(group,)), since=since).retire_at_ms == NOW + RETENTION.undo_window_ms + CLOCK_MS
        assert seen(state(waiting=(group, undone)), since=since).retire_at_ms == NOW + RETENTION.grace_ms + CLOCK_MS
        assert seen(state(registrations={"i": registered}), since=since).retire_at_ms == NOW + RETENTION.orphan_age_ms + CLOCK_MS
        assert seen(state(retiring=(segment(0),)), since=since).retire_at_ms == NOW

    def test_how_late_a_compaction_is(self) -> None:
        late = seen(state(segment(0, first_timestamp_ms=NOW - 5_000)), Cleaner(max_compaction_lag_ms=1_000))
        assert late.max_delay_ms == 4_000
        assert seen(state(segment(0, first_timestamp_ms=NOW))).max_delay_ms == 0


moments = st.integers(0, 400).map(lambda step: NOW - 200 + step)


class TestWaking:
    @given(
        st.lists(st.tuples(moments, moments, st.one_of(st.just(-1), moments)), min_size=1, max_size=4),
        st.integers(0, 100),
        st.integers(100, 300),
        st.integers(0, 3),
        st.data(),
    )
    def test_until_it_wakes_nothing_but_a_record_changes_what_is_due(
        self, times: list[tuple[int, int, int]], min_lag: int, max_lag: int, clean: int, data: st.DataObject
    ) -> None:
        cleaner = Cleaner(min_compaction_lag_ms=min_lag, max_compaction_lag_ms=max_lag, min_cleanable_dirty_ratio=0.6)
        live = tuple(
            segment(number, max_timestamp_ms=most, first_timestamp_ms=first, due_ms=due) for number, (most, first, due) in enumerate(times)
        )
        known = state(*live, vector=())
        wake = wake_ms(live, cleaner, NOW)
        later = data.draw(st.integers(NOW, min(wake - 1, NOW + 1_000)))
        now, then = (assess(known, cleaner, at) for at in (NOW, later))
        assert (now.due, now.end, now.horizon_due) == (then.due, then.end, then.horizon_due)

    def test_nothing_to_wait_for(self) -> None:
        assert wake_ms((segment(0),), Cleaner(), NOW) == NEVER

    def test_a_horizon_a_lag_and_a_longest_lag(self) -> None:
        assert wake_ms((segment(0, due_ms=NOW + 5),), Cleaner(), NOW) == NOW + 5
        assert wake_ms((segment(0),), Cleaner(min_compaction_lag_ms=50), NOW) == NOW + 50
        assert wake_ms((segment(0, first_timestamp_ms=NOW),), Cleaner(max_compaction_lag_ms=70), NOW) == NOW + 71


class TestLooking:
    def test_a_new_partition_is_looked_at_at_once_and_then_within_the_hour(self) -> None:
        found = discovered(A, 3, NOW)
        assert needs_look(found, NOW)
        for spread in (0.0, 0.5, 1.0):
            after = looked(found, Sight(A, 7), NOW, spread)
            assert NOW + POLL_MS // 8 <= after.look_at_ms <= NOW + POLL_MS

    def test_the_first_looks_of_many_partitions_are_spread(self) -> None:
        first = {looked(discovered(A, 3, NOW), Sight(A, 7), NOW, step / 100).look_at_ms for step in range(100)}
        assert len(first) == 100

    def test_looks_back_off_while_nothing_happens(self) -> None:
        current = looked(replace(watch(), quiet=0), Sight(A, 8), NOW, 0)
        pauses = []
        for _ in range(9):
            pauses.append(current.look_at_ms - NOW)
            current = looked(current, Sight(A, 8), NOW, 0)
        assert pauses == [min(POLL_MS, FIRST_POLL_MS << n) for n in range(9)]

    def test_a_hint_is_followed_at_once_and_looks_are_close_again_after_it(self) -> None:
        after = hinted(looked(discovered(A, 3, NOW), Sight(A, 7), NOW, 1), 9, NOW + 10)
        assert needs_look(after, NOW + 10)
        assert after.hint == 9
        assert looked(after, Sight(A, 8), NOW + 10, 0).look_at_ms == NOW + 10 + FIRST_POLL_MS

    def test_time_alone_may_call_for_a_look(self) -> None:
        assert not needs_look(watch(wake_ms=NOW + 10), NOW + 9)
        assert needs_look(watch(wake_ms=NOW + 10), NOW + 10)

    def test_what_an_earlier_process_saw_is_good_until_its_hour_is_over(self) -> None:
        known = remembered(A, 3, Sight(A, 7), NOW - 600_000)
        assert not needs_look(known, NOW)
        assert needs_look(known, NOW - 600_000 + POLL_MS)

    def test_a_log_that_cannot_be_read_is_looked_at_less_and_less_often_until_it_can(self) -> None:
        once = look_failed(discovered(A, 3, NOW), "garbled", NOW)
        twice = look_failed(once, "garbled", NOW)
        assert (once.look_at_ms, twice.look_at_ms) == (NOW + RETRY_MS, NOW + 2 * RETRY_MS)
        assert twice.uncleanable == "garbled"
        assert looked(twice, Sight(A, 7), NOW, 0).uncleanable == ""


class TestWanted:
    def test_nothing(self) -> None:
        assert wanted(watch(), NOW) is None

    def test_a_round_that_is_due(self) -> None:
        assert wanted(watch(due=True), NOW) is Action.ROUND

    def test_a_quarantined_partition_waits_longer_with_every_failure(self) -> None:
        for failures, pause in ((1, RETRY_MS), (2, 2 * RETRY_MS), (40, MOST_RETRY_MS)):
            waits = replace(watch(due=True, quarantine="bad", quarantine_ms=NOW, quarantine_failures=failures), look_at_ms=NEVER)
            assert wanted(waits, NOW + pause - 1) is None
            assert wanted(waits, NOW + pause) is Action.ROUND

    def test_what_waits_is_retired_when_it_is_due(self) -> None:
        assert wanted(watch(retire_at_ms=NOW + 5), NOW + 4) is None
        assert wanted(watch(retire_at_ms=NOW + 5), NOW + 5) is Action.RETIRE

    def test_a_round_goes_before_deletion(self) -> None:
        assert wanted(watch(due=True, retire_at_ms=NOW), NOW) is Action.ROUND

    def test_what_an_undone_round_left_is_swept_once(self) -> None:
        left = watch(undone_slot=6)
        assert wanted(left, NOW) is Action.RETIRE
        assert wanted(finished(left, Job(A, Action.RETIRE), JobOutcome("retired", sight=left.sight), NOW, TTL), NOW) is None


class TestFinished:
    ROUND = Job(A, Action.ROUND)

    def end(self, before: PartitionWatch, status: str, job: Job = ROUND, **of_sight: Any) -> PartitionWatch:
        return finished(before, job, JobOutcome(status, "why", Sight(A, 8, **of_sight)), NOW, TTL)

    def test_a_partition_that_somebody_else_leads_is_left_alone_for_one_ttl(self) -> None:
        for status in ("leased", "fenced"):
            after = self.end(watch(due=True), status, due=True)
            assert wanted(after, NOW + TTL - 1) is None
            assert needs_look(after, NOW + TTL)

    def test_failures_of_this_process_back_off_and_are_forgotten_after_a_success(self) -> None:
        once = self.end(watch(due=True), "failed", due=True)
        twice = self.end(once, "failed", due=True)
        assert (once.round_at_ms, twice.round_at_ms) == (NOW + RETRY_MS, NOW + 2 * RETRY_MS)
        assert twice.uncleanable == "why"
        after = self.end(twice, "cleaned")
        assert (after.failures, after.uncleanable) == (0, "")

    def test_what_does_not_fit_beside_others_is_done_alone_and_fails_only_then(self) -> None:
        after = self.end(watch(due=True), "out_of_budget", due=True)
        assert (after.alone, after.failures) == (True, 0)
        assert wanted(after, NOW) is Action.ROUND
        again = self.end(after, "out_of_budget", Job(A, Action.ROUND, alone=True), due=True)
        assert (again.alone, again.failures) == (False, 1)

    def test_what_waits_is_still_wanted_when_its_time_has_come(self) -> None:
        asked, large = replace(watch(), urgent=True), watch(due=True)
        asked = finished(asked, Job(A, Action.ROUND, force=True), JobOutcome("waiting", "why", asked.sight, NOW + 1_000_000), NOW, TTL)
        assert wanted(asked, NOW + 999_999) is None
        assert choose([asked], {}, 1, NOW + 1_000_000) == [Job(A, Action.ROUND, force=True)]
        large = finished(large, Job(A, Action.ROUND, alone=True), JobOutcome("waiting", "why", large.sight, NOW + 1_000_000), NOW, TTL)
        assert choose([large], {}, 1, NOW + 1_000_000) == [Job(A, Action.ROUND, alone=True)]

    def test_rounds_that_find_nothing_new_and_leave_it_due_do_not_turn_into_a_loop(self) -> None:
        current, pauses = watch(due=True, end_offset=9), []
        for _ in range(4):
            current = self.end(current, "cleaned", due=True, end_offset=9)
            pauses.append(current.repeat_at_ms - NOW)
        assert wanted(current, NOW + 4 * RETRY_MS - 1) is None
        assert pauses == [0, RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS]
        grown = Sight(A, 9, due=True, end_offset=19)
        assert wanted(looked(current, grown, NOW, 0), NOW) is Action.ROUND
        assert self.end(current, "cleaned", due=True, end_offset=19).repeats == 0

    def test_what_the_store_does_not_take_as_due_yet_is_tried_again_later(self) -> None:
        job = Job(A, Action.RETIRE)
        after = self.end(watch(retire_at_ms=NOW), "retired", job, retire_at_ms=NOW)
        assert after.retire_at_ms == NOW + RETRY_MS

    def test_without_a_sight_the_partition_is_looked_at(self) -> None:
        after = finished(watch(due=True), self.ROUND, JobOutcome("stopped"), NOW, TTL)
        assert needs_look(after, NOW)


class TestChoosing:
    def test_as_many_as_there_are_threads_one_a_partition_in_the_order_given(self) -> None:
        watches = [watch(name, due=True) for name in (C, A, B)]
        assert choose(watches, {}, 2, NOW) == [Job(C, Action.ROUND), Job(A, Action.ROUND)]
        assert choose(watches, {C: Job(C, Action.ROUND)}, 2, NOW) == [Job(A, Action.ROUND)]
        assert choose(watches, {A: Job(A, Action.ROUND), B: Job(B, Action.RETIRE)}, 2, NOW) == []

    def test_one_that_needs_the_budgets_for_itself_waits_for_the_others_and_keeps_them_waiting(self) -> None:
        watches = [watch(A, due=True), replace(watch(B, due=True), alone=True)]
        assert choose(watches, {C: Job(C, Action.ROUND)}, 4, NOW) == []
        assert choose(watches, {}, 4, NOW) == [Job(B, Action.ROUND, alone=True)]
        assert choose(watches, {B: Job(B, Action.ROUND, alone=True)}, 4, NOW) == []

    def test_partitions_that_want_a_look_first_get_no_job(self) -> None:
        assert choose([replace(watch(A, due=True), look_at_ms=NOW)], {}, 2, NOW) == []


def test_a_failing_partition_is_tried_again_within_bounds() -> None:
    assert [backoff_ms(failures) for failures in (-1, 0, 1, 2, 3)] == [0, 0, RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS]
    assert backoff_ms(10_000) == MOST_RETRY_MS


@pytest.mark.parametrize("failures", [1, 5])
def test_quarantine_in_the_log_is_what_the_status_page_says(failures: int) -> None:
    why = Quarantine(reason="bad data", segment="s", failures=failures, slot=3, at_ms=NOW)
    found = seen(state(segment(0), quarantine=why))
    assert PartitionWatch(A, sight=found).uncleanable == "bad data"


def test_what_is_suspended_begins_no_round_and_what_failed_meanwhile_is_tried_at_once_after_it() -> None:
    seen = Sight(name=A, slot=1, due=True, retire_at_ms=NOW)
    failing = PartitionWatch(A, sight=seen, look_at_ms=NEVER, round_at_ms=NOW + RETRY_MS, failures=1, problem="refused", retire_at_ms=NEVER)
    waits = suspended(failing, "retention.ms is wrong")
    assert (wanted(waits, NOW + MOST_RETRY_MS), waits.uncleanable) == (None, "retention.ms is wrong")
    again = suspended(waits, "")
    assert (wanted(again, NOW), again.uncleanable) == (Action.ROUND, "")
    assert suspended(failing, "") is failing
    assert wanted(replace(waits, retire_at_ms=NOW), NOW) is Action.RETIRE


def test_where_no_round_may_begin_open_ones_are_finished_and_the_rest_goes_on() -> None:
    seen = Sight(name=A, slot=1, due=True, retire_at_ms=NOW)
    due = PartitionWatch(A, sight=seen, look_at_ms=NEVER, retire_at_ms=NEVER)
    begun = replace(due, name=B, sight=replace(seen, name=B, open_run="run"))
    old = replace(due, name=C, sight=replace(seen, name=C), retire_at_ms=NOW)
    assert choose([due, begun, old], {}, 3, NOW, rounds=False) == [Job(B, Action.ROUND), Job(C, Action.RETIRE)]
    assert [job.action for job in choose([due, begun, old], {}, 3, NOW)] == [Action.ROUND] * 3
