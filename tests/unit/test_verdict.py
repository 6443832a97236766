"""The verdict on a partition: every cause of a block, what ends by itself, and what is no block."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.offsets import CleanerOffset
from compactor.config.settings import CleanerSettings
from compactor.config.times import format_iso_time, format_utc_time
from compactor.constants import DAY_MS, NEVER_MS, CompactorEpoch, Offset
from compactor.control.ports import ObjectRetention
from compactor.control.records import BLOCKED_BY_STAT, NEXT_STEP_STAT
from compactor.control.state import PartitionState, Quarantine, RunHistoryEntry
from compactor.control.summary import decode_summary, encode_summary, summarize_state
from compactor.daemon.scheduling import PartitionCondition, PartitionSchedule, due, partition_condition
from compactor.errors import BlockedCause
from compactor.model.ids import RunHistoryStatus, TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.views.verdict import (
    TRANSACTION_TIMEOUT_MS,
    Block,
    PartitionVerdict,
    TransactionAtEnd,
    VerdictKind,
    future_timestamps_text,
    partition_verdict,
)
from tests.support.segments import make_segment

NOW = 1_795_900_229_511
A = TopicPartition("orders", 0)
MINUTE = 60_000
RETENTION = ObjectRetention(grace_ms=1_000, undo_window_ms=5_000, orphan_age_ms=100_000)
MICROSECONDS = 1_795_900_229_511_001


def segment(number: int, at_ms: int = NOW - 5 * DAY_MS, **changes: Any) -> RemoteLogSegmentMetadata:
    return make_segment(f"segment-{number}", number * 10, number * 10 + 9, size=1 << 20, at_ms=at_ms, **changes)


def state(*segments: RemoteLogSegmentMetadata, cleaned_to: int = 0, **changes: Any) -> PartitionState:
    vector = (CleanerOffset(CompactorEpoch(0), Offset(cleaned_to)),) if cleaned_to else ()
    return PartitionState(topic=A.topic, partition=A.partition, slot=7, live=segments, vector=vector).model_copy(update=changes)


def schedule(
    known: PartitionState, cleaner: CleanerSettings | None = None, transaction: TransactionAtEnd | None = None, **changes: Any
) -> PartitionSchedule:
    summary = decode_summary(encode_summary(summarize_state(known)))  # as another process reads it from local state
    judged = due(summary, cleaner or CleanerSettings(), RETENTION, {}, NOW, transaction=transaction, bootstrap_servers="kafka-1:9092")
    return PartitionSchedule(A, due=judged, **changes)


def verdict(
    known: PartitionState, cleaner: CleanerSettings | None = None, transaction: TransactionAtEnd | None = None, **changes: Any
) -> PartitionVerdict:
    found = schedule(known, cleaner, transaction, **changes).verdict
    assert found is not None
    return found


def failed(cause: BlockedCause | None, reason: str = "it failed") -> dict[str, Any]:
    """As `run` records it: the quarantine, and the run that caused it."""
    stats: dict[str, int | float | str] = {BLOCKED_BY_STAT: cause.value, NEXT_STEP_STAT: "do this"} if cause is not None else {}
    run = RunHistoryEntry(
        run_id="r", leader_epoch=CompactorEpoch(0), holder="h", slot=5, started_ms=NOW - 9, ended_ms=NOW - 7,
        status=RunHistoryStatus.QUARANTINED, reason=reason, stats=stats,
    )  # fmt: skip
    return {"runs": (run,), "quarantine": Quarantine(reason=reason, segment="", failures=1, slot=5, at_ms=NOW - 7)}


LAG, HANGING = CleanerSettings(min_compaction_lag_ms=6 * DAY_MS), TransactionAtEnd(13, 7, 2, NOW - DAY_MS)
MIDWAY = state(segment(0), segment(1, NOW - MINUTE, open_txn_offset=13), cleaned_to=10)
AGED = state(segment(0), segment(1, NOW - 29 * DAY_MS, open_txn_offset=13), segment(2, NOW, open_txn_offset=13), cleaned_to=10)
POSTPONED = {"waiting_reason": "metadata_records_per_hour is 10", "next_round_ms": NOW + 5}
CLEAN, DUE, WAITING = VerdictKind.CLEAN, VerdictKind.DUE, VerdictKind.WAITING
VERDICTS: dict[str, tuple[PartitionState, dict[str, Any], VerdictKind, dict[str, int]]] = {
    "cleaned to its end": (state(segment(0), segment(1), cleaned_to=20), {}, CLEAN, {"waiting_bytes": 0}),
    "dirty": (state(segment(0), segment(1)), {}, DUE, {"waiting_bytes": 2 << 20}),
    "the newest segment is the brokers'": (state(segment(0), segment(1), cleaned_to=10, mirrored=True), {}, CLEAN, {"waiting_bytes": 0}),
    "a person pauses": (state(segment(0)), {"paused": "paused by ann"}, VerdictKind.PAUSED, {}),
    "a lag says when": (
        state(segment(0), segment(1, NOW - 4 * DAY_MS)),
        {"cleaner": LAG}, WAITING, {"until_ms": NOW + 2 * DAY_MS, "waiting_bytes": 2 << 20},
    ),
    "a postponed round waits until its time": (state(segment(0)), POSTPONED, WAITING, {"until_ms": NOW + 5}),
    "due before an open transaction": (state(segment(0), segment(1, NOW, open_txn_offset=13)), {"transaction": HANGING}, DUE, {}),
    "a time beyond now does not prove that a transaction hangs": (
        state(segment(0), segment(1, MICROSECONDS, open_txn_offset=13), cleaned_to=10), {"transaction": HANGING}, WAITING, {},
    ),
    "nor does an unknown producer or time": (AGED, {"transaction": TransactionAtEnd(13)}, WAITING, {"until_ms": 0}),
}  # fmt: skip


@pytest.mark.parametrize(("known", "given", "kind", "more"), VERDICTS.values(), ids=VERDICTS)
def test_what_is_no_block(known: PartitionState, given: dict[str, Any], kind: VerdictKind, more: dict[str, int]) -> None:
    found = verdict(known, **given)
    assert (found.kind, {name: getattr(found, name) for name in more}) == (kind, more)


def test_a_transaction_that_may_still_end_says_when() -> None:
    at_ms = NOW - 10 * MINUTE
    found = verdict(MIDWAY, transaction=TransactionAtEnd(13, 7, 2, at_ms))
    assert (found.kind, found.until_ms) == (WAITING, at_ms + TRANSACTION_TIMEOUT_MS)
    assert "open since offset 13" in found.reason


class TestHangingTransactions:
    def test_it_is_told_with_producer_epoch_offset_age_and_the_command_that_ends_it(self) -> None:
        began_ms = NOW - 30 * DAY_MS
        found = verdict(AGED, transaction=TransactionAtEnd(13, 4711, 3, began_ms))
        assert (found.kind, found.cause, found.waiting_bytes) == (VerdictKind.BLOCKED, "transaction", 2 << 20)
        assert found.since_ms == began_ms + TRANSACTION_TIMEOUT_MS
        assert "producer 4711, epoch 3" in found.reason
        assert "offset 13" in found.reason
        assert "30 d ago" in found.reason
        step = "kafka-transactions.sh --bootstrap-server kafka-1:9092 abort --topic orders --partition 0 --start-offset 13"
        assert found.next_step == f"End it: {step}"

    @pytest.mark.parametrize(
        ("later_ms", "kind"), [(TRANSACTION_TIMEOUT_MS, VerdictKind.WAITING), (TRANSACTION_TIMEOUT_MS + 1, VerdictKind.BLOCKED)]
    )
    def test_the_newest_record_of_the_tier_decides_and_not_the_clock(self, later_ms: int, kind: VerdictKind) -> None:
        """With daily imports, a marker may simply not have arrived."""
        began_ms = NOW - 30 * DAY_MS
        known = state(segment(0, began_ms), segment(1, began_ms + later_ms, open_txn_offset=13), cleaned_to=10)
        assert verdict(known, transaction=TransactionAtEnd(13, 7, 2, began_ms)).kind is kind


class TestBlocks:
    def test_a_disk_budget_that_one_segment_exceeds_is_told_before_any_round(self) -> None:
        found = verdict(state(segment(0)), CleanerSettings(disk_budget_bytes=1 << 20))
        assert (found.kind, found.cause) == (VerdictKind.BLOCKED, "budget")
        need = int(found.next_step.rpartition(" ")[2])
        assert verdict(state(segment(0)), CleanerSettings(disk_budget_bytes=need)).kind is VerdictKind.DUE
        assert verdict(state(segment(0)), CleanerSettings(disk_budget_bytes=need - 1)).kind is VerdictKind.BLOCKED

    @pytest.mark.parametrize("budget", ["auto", 1 << 20])
    def test_a_budget_blocks_nothing_where_nothing_is_due_or_it_is_chosen_here(self, budget: Any) -> None:
        cleaned_to = 10 if budget != "auto" else 0
        assert verdict(state(segment(0), cleaned_to=cleaned_to), CleanerSettings(disk_budget_bytes=budget)).kind is not VerdictKind.BLOCKED

    @pytest.mark.parametrize("cause", [BlockedCause.BUDGET, BlockedCause.RIGHTS, BlockedCause.KEYLESS])
    def test_what_a_run_has_recorded_is_told_by_every_process_until_a_round_succeeds(self, cause: BlockedCause) -> None:
        found = verdict(state(segment(0), **failed(cause)))
        assert (found.kind, found.cause, found.since_ms, found.next_step) == (VerdictKind.BLOCKED, cause.value, NOW - 7, "do this")
        assert verdict(state(segment(0), cleaned_to=10, **failed(cause))).kind is VerdictKind.CLEAN

    def test_damaged_data_blocks_also_if_nothing_is_due_and_if_an_earlier_version_recorded_it(self) -> None:
        found = verdict(state(segment(0), cleaned_to=10, **failed(None, "bad data in x")))
        assert (found.kind, found.cause, found.reason) == (VerdictKind.BLOCKED, "damage", "bad data in x")

    def test_settings_are_told_since_the_first_failed_round_and_end_at_once_when_they_are_corrected(self) -> None:
        known = state(segment(0), **failed(BlockedCause.SETTINGS, "retention.ms of orders is 604800000"))
        block = Block(BlockedCause.SETTINGS, "retention.ms of orders is 604800000", NOW, "kafka-configs ...")
        found = verdict(known, suspended=block)
        assert (found.kind, found.cause, found.since_ms, found.next_step) == (VerdictKind.BLOCKED, "settings", NOW - 7, "kafka-configs ...")
        assert verdict(known).kind is VerdictKind.DUE

    def test_a_lag_that_counts_from_a_time_beyond_now_never_ends(self) -> None:
        lag = CleanerSettings(min_compaction_lag_ms=1)
        found = verdict(state(segment(0), segment(1, MICROSECONDS), cleaned_to=10), lag)
        assert (found.kind, found.cause) == (VerdictKind.BLOCKED, "timestamps")
        assert "58879-10-24T06:51:51Z" in found.reason

    def test_a_block_comes_before_a_pause_and_before_work(self) -> None:
        blocked = schedule(state(segment(0), **failed(None)), paused="paused by ann")
        assert partition_condition(blocked, is_job_running=True) is PartitionCondition.ATTENTION

    @pytest.mark.parametrize("cause", list(BlockedCause))
    def test_no_cause_is_shown_as_well(self, cause: BlockedCause) -> None:
        found = partition_verdict(due=False, reason="", blocks=(None, Block(cause, "why")))
        assert (found.kind, found.cause, found.is_blocked) == (VerdictKind.BLOCKED, cause.value, True)

    def test_a_partition_that_was_never_polled_has_no_verdict_unless_it_fails(self) -> None:
        assert PartitionSchedule(A).verdict is None
        unreadable = PartitionSchedule(A, unreadable="no store", failing_since_ms=NOW).verdict
        assert unreadable is not None
        assert (unreadable.kind, unreadable.cause, unreadable.since_ms) == (VerdictKind.BLOCKED, "failing", NOW)


def test_times_beyond_the_calendar_are_dates() -> None:
    assert format_iso_time(MICROSECONDS) == "58879-10-24T06:51:51Z"
    assert format_iso_time(NOW, "milliseconds") == "2026-11-28T21:10:29.511Z"
    assert format_iso_time(-1, "milliseconds") == "1969-12-31T23:59:59.999Z"
    assert format_utc_time(NEVER_MS - 1).endswith(" UTC")


def test_segments_with_times_beyond_now_are_counted_with_the_latest_date() -> None:
    live = (segment(0), segment(1, NOW + DAY_MS), segment(2, MICROSECONDS))
    found = future_timestamps_text(live, NOW)
    assert found.startswith("1 segment has records of times more than a day ahead, the latest 58879-10-24T06:51:51Z")
    assert future_timestamps_text(live[:2], NOW) == ""
