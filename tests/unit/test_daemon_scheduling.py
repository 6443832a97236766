"""What the daemon does next, decided without store, clock or threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from checkpoint.lineage import EpochEntry
from compactor.config.settings import CleanerSettings
from compactor.constants import NEVER_MS, CompactorEpoch, LeaderEpoch, Offset, TimestampMs
from compactor.control.ports import ObjectRetention
from compactor.control.state import (
    CompactorLeader,
    GroupAwaitingDeletion,
    OpenImport,
    PartitionState,
    Quarantine,
    RoundIntent,
    RunHistoryEntry,
)
from compactor.control.summary import summarize_state
from compactor.daemon.scheduling import (
    CLOCK_RESOLUTION_MS,
    FIRST_POLL_MS,
    POLL_MS,
    DaemonAction,
    Due,
    JobOutcome,
    PartitionJob,
    PartitionSchedule,
    action_to_take_now,
    choose_jobs,
    due,
    needs_poll,
    new_partition_schedule,
    next_due_time_ms,
    planned_action,
    schedule_restored_after_restart,
    with_change_hint,
    with_failed_poll,
    with_job_outcome,
    with_poll_result,
    with_suspension,
)
from compactor.errors import BlockedCause
from compactor.model.ids import RunHistoryStatus, TopicPartition
from compactor.model.plan import CleanerPolicy, CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.round.plan import assess_round
from compactor.service import MAX_RETRY_MS, RETRY_MS, backoff_ms
from compactor.views.verdict import Block, PartitionVerdict
from tests.support.dues import changed, due_of, quarantine

NOW = 1_770_000_000_000
A, B, C = (TopicPartition("orders", number) for number in range(3))
RETENTION = ObjectRetention(grace_ms=1_000, undo_window_ms=5_000, orphan_age_ms=100_000)
TTL = 30_000


def segment(number: int = 0, **changes: Any) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        id=f"segment-{number}",
        start_offset=Offset(number * 10),
        end_offset=Offset(number * 10 + 9),
        size_bytes=100,
        max_timestamp_ms=TimestampMs(NOW),
        mtime_ms=NOW,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),),
        files={"log": SegmentFile(size=100, sha256="")},
    ).model_copy(update=changes)


def state(*segments: RemoteLogSegmentMetadata, **changes: Any) -> PartitionState:
    return PartitionState(topic=A.topic, partition=A.partition, slot=7, live=segments).model_copy(update=changes)


def seen(known: PartitionState, cleaner: CleanerSettings | None = None, since: dict[int, int] | None = None) -> Due:
    return due(summarize_state(known), cleaner or CleanerSettings(), RETENTION, since or {}, NOW)


def verdict_on(judged: Due) -> PartitionVerdict:
    found = PartitionSchedule(A, due=judged).verdict
    assert found is not None
    return found


def schedule(name: TopicPartition = A, **of_sight: Any) -> PartitionSchedule:
    return PartitionSchedule(partition=name, due=due_of(name, 7, **of_sight), next_poll_ms=NOW + POLL_MS, swept_slot=0)


class TestSight:
    def test_of_a_partition_that_is_dirty(self) -> None:
        found = seen(state(segment(0), segment(1)))
        assert (found.is_due, found.dirty_bytes, found.dirty_ratio, found.summary.end_offset) == (True, 200, 1.0, 19)

    def test_an_open_round_is_due_whatever_the_ratio_says(self) -> None:
        plan = CompactionPlan(
            run_id="r", topic="orders", partition=0, leader_epoch=CompactorEpoch(0), now_ms=TimestampMs(NOW),
            first_dirty_offset=Offset(0), end_offset=Offset(0),
            next_dirty_offset=Offset(0), high_watermark=0, legacy_horizon_ms=0, vector=(), policy=CleanerPolicy(), map_engine="memory",
            fingerprint="", producers=(), tasks=(),
        )  # fmt: skip
        found = seen(state(intent=RoundIntent(plan=plan, slot=3, at_ms=NOW)))
        assert (found.is_due, found.summary.open_run) == (True, "r")

    def test_a_leader_who_released_is_none(self) -> None:
        leader = CompactorLeader(epoch=CompactorEpoch(4), incarnation="i", holder="h", slot=1, at_ms=NOW, ttl_ms=TTL)
        assert seen(state(leader=leader)).summary.current_leader == leader
        assert seen(state(leader=leader.model_copy(update={"released": True}))).summary.current_leader is None

    def test_when_something_may_be_deleted(self) -> None:
        group = GroupAwaitingDeletion(
            slot=5, run_id="r", leader_epoch=CompactorEpoch(0), segments=(segment(0),), vector_before=(), vector=()
        )
        undone = group.model_copy(update={"slot": 6, "undone": True})
        registered = OpenImport(import_id="i", ids=("x",), holder="h", slot=4)
        since = {4: NOW, 5: NOW, 6: NOW}
        assert seen(state(), since=since).retire_at_ms == NEVER_MS
        assert seen(state(waiting=(group,)), since=since).retire_at_ms == NOW + RETENTION.undo_window_ms + CLOCK_RESOLUTION_MS
        assert seen(state(waiting=(group, undone)), since=since).retire_at_ms == NOW + RETENTION.grace_ms + CLOCK_RESOLUTION_MS
        assert seen(state(registrations={"i": registered}), since=since).retire_at_ms == NOW + RETENTION.orphan_age_ms + CLOCK_RESOLUTION_MS
        assert seen(state(retiring=(segment(0),)), since=since).retire_at_ms == NOW

    def test_how_late_a_compaction_is(self) -> None:
        late = seen(state(segment(0, first_timestamp_ms=NOW - 5_000)), CleanerSettings(max_compaction_lag_ms=1_000))
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
        cleaner = CleanerSettings(min_compaction_lag_ms=min_lag, max_compaction_lag_ms=max_lag, min_cleanable_dirty_ratio=0.6)
        live = tuple(
            segment(number, max_timestamp_ms=most, first_timestamp_ms=first, due_ms=due) for number, (most, first, due) in enumerate(times)
        )
        known = state(*live, vector=())
        wake = next_due_time_ms(live, cleaner, NOW)
        later = data.draw(st.integers(NOW, min(wake - 1, NOW + 1_000)))
        now, then = (assess_round(known, cleaner, at) for at in (NOW, later))
        assert (now.due, now.end, now.horizon_due) == (then.due, then.end, then.horizon_due)

    def test_nothing_to_wait_for(self) -> None:
        assert next_due_time_ms((segment(0),), CleanerSettings(), NOW) == NEVER_MS

    def test_a_horizon_a_lag_and_a_longest_lag(self) -> None:
        assert next_due_time_ms((segment(0, due_ms=NOW + 5),), CleanerSettings(), NOW) == NOW + 5
        assert next_due_time_ms((segment(0),), CleanerSettings(min_compaction_lag_ms=50), NOW) == NOW + 50
        assert next_due_time_ms((segment(0, first_timestamp_ms=NOW),), CleanerSettings(max_compaction_lag_ms=70), NOW) == NOW + 71


class TestLooking:
    def test_a_new_partition_is_looked_at_at_once_and_then_within_the_hour(self) -> None:
        found = new_partition_schedule(A, 3, NOW)
        assert needs_poll(found, NOW)
        for spread in (0.0, 0.5, 1.0):
            after = with_poll_result(found, due_of(A, 7), NOW, spread)
            assert NOW + POLL_MS // 8 <= after.next_poll_ms <= NOW + POLL_MS

    def test_the_first_looks_of_many_partitions_are_spread(self) -> None:
        first = {with_poll_result(new_partition_schedule(A, 3, NOW), due_of(A, 7), NOW, step / 100).next_poll_ms for step in range(100)}
        assert len(first) == 100

    def test_looks_back_off_while_nothing_happens(self) -> None:
        current = with_poll_result(replace(schedule(), idle_polls=0), due_of(A, 8), NOW, 0)
        pauses = []
        for _ in range(9):
            pauses.append(current.next_poll_ms - NOW)
            current = with_poll_result(current, due_of(A, 8), NOW, 0)
        assert pauses == [min(POLL_MS, FIRST_POLL_MS << n) for n in range(9)]

    def test_what_another_process_deletes_is_looked_at_within_the_hour_however_many_partitions_there_are(self) -> None:
        left = due_of(A, 8, retire_at_ms=NOW, deletes_segments=False)
        for idle_polls in (0, 64):
            before = replace(schedule(), idle_polls=idle_polls, due=left)
            assert with_poll_result(before, left, NOW, 1, 8 * POLL_MS).next_poll_ms <= NOW + POLL_MS
        assert with_poll_result(new_partition_schedule(A, 3, NOW), left, NOW, 1, 8 * POLL_MS).next_poll_ms <= NOW + POLL_MS

    def test_a_hint_is_followed_at_once_and_looks_are_close_again_after_it(self) -> None:
        after = with_change_hint(with_poll_result(new_partition_schedule(A, 3, NOW), due_of(A, 7), NOW, 1), 9, NOW + 10)
        assert needs_poll(after, NOW + 10)
        assert after.hint == 9
        assert with_poll_result(after, due_of(A, 8), NOW + 10, 0).next_poll_ms == NOW + 10 + FIRST_POLL_MS

    def test_time_alone_may_call_for_a_look(self) -> None:
        assert not needs_poll(schedule(wake_ms=NOW + 10), NOW + 9)
        assert needs_poll(schedule(wake_ms=NOW + 10), NOW + 10)

    def test_what_an_earlier_process_saw_is_good_until_its_hour_is_over(self) -> None:
        known = schedule_restored_after_restart(A, 3, due_of(A, 7), NOW - 600_000)
        assert not needs_poll(known, NOW)
        assert needs_poll(known, NOW - 600_000 + POLL_MS)

    def test_a_log_that_cannot_be_read_is_looked_at_less_and_less_often_until_it_can(self) -> None:
        once = with_failed_poll(new_partition_schedule(A, 3, NOW), "garbled", NOW)
        twice = with_failed_poll(once, "garbled", NOW)
        assert (once.next_poll_ms, twice.next_poll_ms) == (NOW + RETRY_MS, NOW + 2 * RETRY_MS)
        assert twice.blocked_reason == "garbled"
        assert with_poll_result(twice, due_of(A, 7), NOW, 0).blocked_reason == ""


class TestWanted:
    def test_nothing(self) -> None:
        assert action_to_take_now(schedule(), NOW) is None

    def test_a_round_that_is_due(self) -> None:
        assert action_to_take_now(schedule(is_due=True), NOW) is DaemonAction.ROUND

    def test_a_quarantined_partition_waits_longer_with_every_failure(self) -> None:
        for failures, pause in ((1, RETRY_MS), (2, 2 * RETRY_MS), (40, MAX_RETRY_MS)):
            waits = replace(schedule(is_due=True, quarantine=quarantine(NOW, failures)), next_poll_ms=NEVER_MS)
            assert action_to_take_now(waits, NOW + pause - 1) is None
            assert action_to_take_now(waits, NOW + pause) is DaemonAction.ROUND

    def test_what_waits_is_retired_when_it_is_due(self) -> None:
        assert action_to_take_now(schedule(retire_at_ms=NOW + 5), NOW + 4) is None
        assert action_to_take_now(schedule(retire_at_ms=NOW + 5), NOW + 5) is DaemonAction.RETIRE

    def test_deletion_goes_before_a_round_so_that_a_partition_that_is_always_due_gets_it(self) -> None:
        due = schedule(is_due=True, retire_at_ms=NOW)
        assert action_to_take_now(due, NOW) is DaemonAction.RETIRE
        assert action_to_take_now(replace(due, retire_at_ms=NOW + RETRY_MS), NOW) is DaemonAction.ROUND

    def test_nothing_is_retired_by_a_process_that_deletes_no_segments(self) -> None:
        left = schedule(retire_at_ms=NOW, undone_slot=6, deletes_segments=False)
        assert action_to_take_now(left, NOW) is None
        assert planned_action(left, NOW).action is DaemonAction.POLL
        due = schedule(is_due=True, retire_at_ms=NOW, deletes_segments=False)
        assert action_to_take_now(due, NOW) is DaemonAction.ROUND

    def test_a_round_goes_before_a_deletion_that_fails(self) -> None:
        assert action_to_take_now(replace(schedule(is_due=True, retire_at_ms=NOW), failures=1), NOW) is DaemonAction.ROUND

    def test_an_interrupted_round_goes_before_deletion(self) -> None:
        assert action_to_take_now(schedule(is_due=True, open_run="run", retire_at_ms=NOW), NOW) is DaemonAction.ROUND

    def test_what_an_undone_round_left_is_swept_once(self) -> None:
        left = schedule(undone_slot=6)
        assert action_to_take_now(left, NOW) is DaemonAction.RETIRE
        assert (
            action_to_take_now(
                with_job_outcome(left, PartitionJob(A, DaemonAction.RETIRE), JobOutcome("retired", due=left.due), NOW, TTL), NOW
            )
            is None
        )


class TestFinished:
    ROUND = PartitionJob(A, DaemonAction.ROUND)

    def end(self, before: PartitionSchedule, status: str, job: PartitionJob = ROUND, **of_sight: Any) -> PartitionSchedule:
        return with_job_outcome(before, job, JobOutcome(status, "why", due_of(A, 8, **of_sight)), NOW, TTL)

    def test_a_partition_that_somebody_else_leads_is_left_alone_for_one_ttl(self) -> None:
        for status in ("leased", "fenced"):
            after = self.end(schedule(is_due=True), status, is_due=True)
            assert action_to_take_now(after, NOW + TTL - 1) is None
            assert needs_poll(after, NOW + TTL)

    def test_failures_of_this_process_back_off_and_are_forgotten_after_a_success(self) -> None:
        once = self.end(schedule(is_due=True), "failed", is_due=True)
        twice = self.end(once, "failed", is_due=True)
        assert (once.next_round_ms, twice.next_round_ms) == (NOW + RETRY_MS, NOW + 2 * RETRY_MS)
        assert twice.blocked_reason == "why"
        after = self.end(twice, "cleaned")
        assert (after.failures, after.blocked_reason) == (0, "")

    def test_what_does_not_fit_beside_others_is_done_alone_and_fails_only_then(self) -> None:
        after = self.end(schedule(is_due=True), "out_of_budget", is_due=True)
        assert (after.exclusive, after.failures) == (True, 0)
        assert action_to_take_now(after, NOW) is DaemonAction.ROUND
        again = self.end(after, "out_of_budget", PartitionJob(A, DaemonAction.ROUND, exclusive=True), is_due=True)
        assert (again.exclusive, again.failures) == (False, 1)

    def test_what_waits_is_still_wanted_when_its_time_has_come(self) -> None:
        asked, large = replace(schedule(), requested=True), schedule(is_due=True)
        asked = with_job_outcome(
            asked, PartitionJob(A, DaemonAction.ROUND, force=True), JobOutcome("waiting", "why", asked.due, NOW + 1_000_000), NOW, TTL
        )
        assert action_to_take_now(asked, NOW + 999_999) is None
        assert choose_jobs([asked], {}, 1, NOW + 1_000_000) == [PartitionJob(A, DaemonAction.ROUND, force=True)]
        large = with_job_outcome(
            large,
            PartitionJob(A, DaemonAction.ROUND, exclusive=True),
            JobOutcome("waiting", "why", large.due, NOW + 1_000_000),
            NOW,
            TTL,
        )
        assert choose_jobs([large], {}, 1, NOW + 1_000_000) == [PartitionJob(A, DaemonAction.ROUND, exclusive=True)]

    def test_rounds_that_find_nothing_new_and_leave_it_due_do_not_turn_into_a_loop(self) -> None:
        current, pauses = schedule(is_due=True, end_offset=9), []
        for _ in range(4):
            current = self.end(current, "cleaned", is_due=True, end_offset=9)
            pauses.append(current.next_repeat_ms - NOW)
        assert action_to_take_now(current, NOW + 4 * RETRY_MS - 1) is None
        assert pauses == [0, RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS]
        grown = due_of(A, 9, is_due=True, end_offset=19)
        assert action_to_take_now(with_poll_result(current, grown, NOW, 0), NOW) is DaemonAction.ROUND
        assert self.end(current, "cleaned", is_due=True, end_offset=19).repeats == 0

    def test_what_the_store_does_not_take_as_due_yet_is_tried_again_later(self) -> None:
        job = PartitionJob(A, DaemonAction.RETIRE)
        after = self.end(schedule(retire_at_ms=NOW), "retired", job, retire_at_ms=NOW)
        assert after.retire_at_ms == NOW + RETRY_MS

    def test_without_a_sight_the_partition_is_looked_at(self) -> None:
        after = with_job_outcome(schedule(is_due=True), self.ROUND, JobOutcome("stopped"), NOW, TTL)
        assert needs_poll(after, NOW)


class TestChoosing:
    def test_as_many_as_there_are_threads_one_a_partition_in_the_order_given(self) -> None:
        schedules = [schedule(name, is_due=True) for name in (C, A, B)]
        assert choose_jobs(schedules, {}, 2, NOW) == [PartitionJob(C, DaemonAction.ROUND), PartitionJob(A, DaemonAction.ROUND)]
        assert choose_jobs(schedules, {C: PartitionJob(C, DaemonAction.ROUND)}, 2, NOW) == [PartitionJob(A, DaemonAction.ROUND)]
        assert choose_jobs(schedules, {A: PartitionJob(A, DaemonAction.ROUND), B: PartitionJob(B, DaemonAction.RETIRE)}, 2, NOW) == []

    def test_one_that_needs_the_budgets_for_itself_waits_for_the_others_and_keeps_them_waiting(self) -> None:
        schedules = [schedule(A, is_due=True), replace(schedule(B, is_due=True), exclusive=True)]
        assert choose_jobs(schedules, {C: PartitionJob(C, DaemonAction.ROUND)}, 4, NOW) == []
        assert choose_jobs(schedules, {}, 4, NOW) == [PartitionJob(B, DaemonAction.ROUND, exclusive=True)]
        assert choose_jobs(schedules, {B: PartitionJob(B, DaemonAction.ROUND, exclusive=True)}, 4, NOW) == []

    def test_partitions_that_want_a_look_first_get_no_job(self) -> None:
        assert choose_jobs([replace(schedule(A, is_due=True), next_poll_ms=NOW)], {}, 2, NOW) == []


def test_a_failing_partition_is_tried_again_within_bounds() -> None:
    assert [backoff_ms(failures) for failures in (-1, 0, 1, 2, 3)] == [0, 0, RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS]
    assert backoff_ms(10_000) == MAX_RETRY_MS


@pytest.mark.parametrize("failures", [1, 5])
def test_quarantine_in_the_log_is_what_the_status_page_says(failures: int) -> None:
    why = Quarantine(reason="bad data", segment="s", failures=failures, slot=3, at_ms=NOW)
    found = seen(state(segment(0), quarantine=why))
    assert PartitionSchedule(A, due=found).blocked_reason == "bad data"


def test_what_is_suspended_begins_no_round_and_what_failed_meanwhile_is_tried_at_once_after_it() -> None:
    seen = due_of(A, is_due=True, retire_at_ms=NOW)
    failing = PartitionSchedule(
        A, due=seen, next_poll_ms=NEVER_MS, next_round_ms=NOW + RETRY_MS, failures=1, problem="refused", retire_at_ms=NEVER_MS
    )
    waits = with_suspension(failing, Block(BlockedCause.SETTINGS, "retention.ms is wrong"), NOW)
    assert (action_to_take_now(waits, NOW + MAX_RETRY_MS), waits.blocked_reason) == (None, "retention.ms is wrong")
    again = with_suspension(waits, None, NOW)
    assert (action_to_take_now(again, NOW), again.blocked_reason) == (DaemonAction.ROUND, "")
    assert with_suspension(failing, None, NOW) is failing
    assert action_to_take_now(replace(waits, retire_at_ms=NOW), NOW) is DaemonAction.RETIRE


def test_where_no_round_may_begin_open_ones_are_finished_and_the_rest_goes_on() -> None:
    seen = due_of(A, is_due=True, retire_at_ms=NOW)
    due = PartitionSchedule(A, due=seen, next_poll_ms=NEVER_MS, retire_at_ms=NEVER_MS)
    begun = replace(due, partition=B, due=changed(seen, open_run="run"))
    old = replace(due, partition=C, due=seen, retire_at_ms=NOW)
    assert choose_jobs([due, begun, old], {}, 3, NOW, may_begin_rounds=False) == [
        PartitionJob(B, DaemonAction.ROUND),
        PartitionJob(C, DaemonAction.RETIRE),
    ]
    begins = [job.action for job in choose_jobs([due, begun, old], {}, 3, NOW)]
    assert begins == [DaemonAction.ROUND, DaemonAction.ROUND, DaemonAction.RETIRE]


def test_a_partition_is_quarantined_since_its_first_failure_although_it_was_retried() -> None:
    statuses = (
        RunHistoryStatus.QUARANTINED,
        RunHistoryStatus.CLEANED,
        RunHistoryStatus.QUARANTINED,
        RunHistoryStatus.UNDONE,
        RunHistoryStatus.QUARANTINED,
    )
    runs = tuple(
        RunHistoryEntry(
            run_id=str(n), leader_epoch=CompactorEpoch(n), holder="h", slot=n, started_ms=NOW + n, ended_ms=NOW + 10 * n, status=status
        )
        for n, status in enumerate(statuses)
    )
    why = Quarantine(reason="bad data", segment="s", failures=2, slot=9, at_ms=NOW + 40)
    found = seen(state(segment(0), quarantine=why, runs=runs))
    assert verdict_on(found).since_ms == NOW + 20
    assert verdict_on(seen(state(segment(0), quarantine=why))).since_ms == NOW + 40
    assert verdict_on(seen(state(segment(0), runs=runs))).since_ms == 0


def test_a_paused_or_failing_partition_does_not_count_as_due() -> None:
    due = with_poll_result(new_partition_schedule(A, 0, NOW), due_of(A, 7, is_due=True), NOW, 0.0)
    assert due.startable is not None
    held = (
        replace(due, paused="p"),
        replace(due, suspended=Block(BlockedCause.SETTINGS, "s")),
        replace(due, problem="no disk"),
        replace(due, unreadable="no store"),
    )
    assert [one for one in held if one.startable is not None] == []
