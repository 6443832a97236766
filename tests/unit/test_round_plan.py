"""When a partition is due, up to where a round goes, and what it does: pure decisions over the folded state."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from checkpoint.lineage import EpochEntry
from checkpoint.offsets import CleanerOffset
from compactor.config.settings import CleanerSettings
from compactor.constants import CompactorEpoch, LeaderEpoch, Offset
from compactor.control.state import PartitionState, RunHistoryEntry
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.round.plan import PlanInputs, RemainingSizeBound, assess_round, expected_metadata_record_count, plan_round

NOW = 1_000_000


def segment(start: int, end: int, size: int = 100, **facts: Any) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        id=f"s{start}",
        start_offset=Offset(start),
        end_offset=Offset(end),
        size_bytes=size,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(start)),),
        files={
            "log": SegmentFile(size=size, sha256=""),
            "index": SegmentFile(size=8, sha256=""),
            "timeindex": SegmentFile(size=12, sha256=""),
        },
        **{"max_timestamp_ms": 500_000, "mtime_ms": 600_000, "first_timestamp_ms": 400_000, **facts},
    )


def state(*live: RemoteLogSegmentMetadata, clean: int = 0) -> PartitionState:
    vector = (CleanerOffset(CompactorEpoch(0), Offset(clean)),) if clean else ()
    return PartitionState(topic="orders", partition=0, live=live, vector=vector)


def cleaner(**settings: float) -> CleanerSettings:
    return CleanerSettings.model_validate(settings)


FOUR = (segment(0, 9), segment(10, 19), segment(20, 29), segment(30, 39))


def planned(given: PartitionState, settings: CleanerSettings, *, force: bool = True, left: dict[str, int] | None = None) -> CompactionPlan:
    numbers = count()
    found = assess_round(given, settings, NOW, force=force)
    known = {name: RemainingSizeBound(size, records=size) for name, size in (left or {}).items()}
    return plan_round(
        PlanInputs(given, found, settings, NOW, (), "here", "memory", left=known), CompactorEpoch(3), lambda: f"new{next(numbers)}"
    )


# ---- due or not -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clean", "ratio", "due"), [(0, 1.0, True), (10, 0.75, True), (20, 0.5, False), (30, 0.25, False), (40, 0.0, False)]
)
def test_the_dirty_ratio_must_be_above_the_bound(clean: int, ratio: float, due: bool) -> None:
    found = assess_round(state(*FOUR, clean=clean), cleaner(min_cleanable_dirty_ratio=0.5), NOW)
    assert (found.dirty_ratio, found.due, found.first_dirty, found.end) == (ratio, due, clean, 40)


def test_force_needs_something_dirty() -> None:
    assert assess_round(state(*FOUR, clean=30), cleaner(), NOW, force=True).due
    clean = assess_round(state(*FOUR, clean=40), cleaner(), NOW, force=True)
    assert (clean.due, clean.reason) == (False, "nothing is dirty")
    assert not assess_round(state(), cleaner(), NOW, force=True).due


def test_an_old_record_makes_a_round_due_whatever_the_ratio() -> None:
    settings = cleaner(min_cleanable_dirty_ratio=1, max_compaction_lag_ms=NOW - 400_001)
    assert "max_compaction_lag_ms" in assess_round(state(*FOUR, clean=30), settings, NOW).reason
    assert not assess_round(state(*FOUR, clean=30), settings, NOW - 1).due
    assert not assess_round(state(*FOUR, clean=40), settings, NOW).due


def test_a_delete_horizon_makes_a_round_due() -> None:
    given = state(segment(0, 9, due_ms=NOW), *FOUR[1:], clean=40)
    found = assess_round(given, cleaner(), NOW)
    assert (found.due, found.horizon_due) == (True, ("s0",))
    assert not assess_round(given, cleaner(), NOW - 1).due


# ---- up to where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("undecided", "end"), [(30, 30), (39, 30), (25, 20), (5, 0), (0, 0), (-1, 40)])
def test_a_round_ends_before_the_segment_of_an_open_transaction(undecided: int, end: int) -> None:
    given = state(*FOUR[:3], segment(30, 39, open_txn_offset=undecided))
    found = assess_round(given, cleaner(), NOW, force=True)
    assert (found.end, len(found.dirty), found.due) == (end, end // 10, end > 0)
    if end == 0:
        assert "transaction is open" in found.reason


def test_a_transaction_that_was_open_before_the_log_holds_everything() -> None:
    given = state(segment(100, 109), segment(110, 119, open_txn_offset=50))
    found = assess_round(given, cleaner(), NOW, force=True)
    assert (found.end, found.due) == (100, False)


def test_a_transaction_below_what_is_clean_takes_nothing_back() -> None:
    found = assess_round(state(*FOUR[:3], segment(30, 39, open_txn_offset=15), clean=30), cleaner(), NOW, force=True)
    assert (found.end, found.dirty, found.due) == (30, (), False)


def test_young_segments_are_left_alone() -> None:
    live = (*FOUR[:2], segment(20, 29, max_timestamp_ms=NOW - 5), segment(30, 39))
    assert assess_round(state(*live), cleaner(min_compaction_lag_ms=10), NOW).end == 20
    assert assess_round(state(*live), cleaner(min_compaction_lag_ms=5), NOW).end == 40
    assert assess_round(state(*live, clean=30), cleaner(min_compaction_lag_ms=10), NOW).end == 40


def test_without_timestamps_the_modification_time_counts() -> None:
    live = (*FOUR[:3], segment(30, 39, max_timestamp_ms=-1, mtime_ms=NOW))
    assert assess_round(state(*live), cleaner(min_compaction_lag_ms=10), NOW).end == 30


# ---- what a round does ------------------------------------------------------------------------------------------------------


def test_clean_and_dirty_segments_are_grouped_by_size() -> None:
    plan = planned(state(*FOUR, clean=30), cleaner(segment_bytes=250))
    assert [task.sources for task in plan.tasks] == [("s0", "s10"), ("s20", "s30")]
    assert [(task.start_offset, task.end_offset, task.new_segment_id) for task in plan.tasks] == [(0, 19, "new1"), (20, 39, "new2")]
    assert (plan.run_id, plan.leader_epoch, plan.first_dirty_offset, plan.next_dirty_offset) == ("new0", 3, 30, 40)
    assert (plan.high_watermark, plan.legacy_horizon_ms) == (40, 600_000 - 86_400_000)
    assert plan.skipped == ()


def test_indexes_bound_a_group_too() -> None:
    assert len(planned(state(*FOUR), cleaner(segment_index_bytes=24)).tasks) == 2
    assert len(planned(state(*FOUR), cleaner(segment_index_bytes=11)).tasks) == 4


def test_a_round_for_horizons_alone_keeps_the_cleaner_offset() -> None:
    given = state(FOUR[0], segment(10, 19, due_ms=NOW - 1), segment(20, 29, due_ms=NOW + 1), clean=30)
    plan = planned(given, cleaner(), force=False)
    assert [task.sources for task in plan.tasks] == [("s10",)]
    assert [skipped.id for skipped in plan.skipped] == ["s0", "s20"]
    assert (plan.first_dirty_offset, plan.next_dirty_offset) == (30, 30)


def test_the_same_facts_give_the_same_plan() -> None:
    given = state(*FOUR, clean=20)
    assert planned(given, cleaner()) == planned(given, cleaner())
    assert planned(given, cleaner()) != planned(given, cleaner(delete_retention_ms=1))


# ---- on a tier that brokers write -------------------------------------------------------------------------------------------


def under_brokers(*live: RemoteLogSegmentMetadata, clean: int = 0) -> PartitionState:
    return state(*live, segment(40, 49), clean=clean).model_copy(update={"mirrored": True})


def sources(plan: CompactionPlan) -> list[tuple[str, ...]]:
    return [task.sources for task in plan.tasks]


def test_groups_go_by_what_is_left_so_that_none_is_empty_that_need_not_be() -> None:
    nothing = {"s10": 0, "s20": 0}
    assert sources(planned(under_brokers(*FOUR), cleaner(segment_bytes=150))) == [("s0",), ("s10",), ("s20",), ("s30",)]
    plan = planned(under_brokers(*FOUR), cleaner(segment_bytes=150), left=nothing)
    assert sources(plan) == [("s0", "s10", "s20"), ("s30",)]
    assert [task.most_bytes for task in plan.tasks] == [100, 0]
    assert sources(planned(under_brokers(*FOUR), cleaner(segment_bytes=150), left={"s0": 0, "s30": 0})) == [("s0", "s10"), ("s20", "s30")]
    assert sources(planned(state(*FOUR), cleaner(segment_bytes=150))) == [("s0",), ("s10",), ("s20",), ("s30",)]  # as Kafka groups them


def test_what_is_left_of_a_group_never_comes_of_more_than_two_segments_bytes() -> None:
    """Whoever takes the round back needs one segment for all of its sources."""
    plan = planned(under_brokers(*FOUR), cleaner(segment_bytes=100), left=dict.fromkeys(("s0", "s10", "s20", "s30"), 10))
    assert sources(plan) == [("s0", "s10"), ("s20", "s30")]
    plan = planned(under_brokers(*FOUR), cleaner(segment_bytes=100), left={"s0": 0, "s10": 0, "s20": 0, "s30": 10})
    assert sources(plan) == [("s0", "s10", "s20", "s30")]  # but one without a record would be worse


AGED = tuple(segment(start, start + 9, max_timestamp_ms=100 * (n + 1)) for n, start in enumerate((0, 10, 20, 30)))
ONE_TO_ONE = [("s0",), ("s10",), ("s20", "s30")]
TOGETHER = [("s0", "s10", "s20", "s30")]
HOUR_MS = 3_600_000


def expiring(retention_ms: int) -> CleanerSettings:
    return CleanerSettings(cleanup_policy="compact,delete", retention_ms=retention_ms)


def test_segments_that_brokers_expire_within_an_hour_are_rewritten_one_to_one() -> None:
    given = under_brokers(*AGED)
    assert sources(planned(given, expiring(NOW + HOUR_MS - 200))) == ONE_TO_ONE
    assert sources(planned(given, expiring(NOW + HOUR_MS - 199))) == [("s0",), ("s10", "s20", "s30")]
    assert sources(planned(given, expiring(NOW + HOUR_MS))) == TOGETHER
    assert sources(planned(given, expiring(NOW - 200))) == [(s.id,) for s in AGED], "what has expired already is not joined either"
    assert sources(planned(given, cleaner())) == TOGETHER, "nothing expires"
    assert sources(planned(state(*AGED), expiring(NOW + HOUR_MS - 200))) == TOGETHER, "no brokers"


def test_segments_that_brokers_expire_within_twice_the_last_round_are_rewritten_one_to_one() -> None:
    round_ = RunHistoryEntry(
        run_id="r", leader_epoch=CompactorEpoch(0), holder="me", slot=1, started_ms=0, ended_ms=HOUR_MS, status="cleaned", published_slot=2
    )
    given = under_brokers(*AGED).model_copy(update={"runs": (round_,)})
    assert sources(planned(given, expiring(NOW + 2 * HOUR_MS - 200))) == ONE_TO_ONE
    unpublished = given.model_copy(update={"runs": (round_.model_copy(update={"published_slot": 0}),)})
    assert sources(planned(unpublished, expiring(NOW + 2 * HOUR_MS - 200))) == TOGETHER


def test_segments_that_expire_are_not_joined_although_nothing_is_left_of_them() -> None:
    plan = planned(under_brokers(*AGED), expiring(NOW + HOUR_MS - 200), left=dict.fromkeys(("s0", "s10", "s20", "s30"), 0))
    assert sources(plan) == ONE_TO_ONE


def test_segments_without_a_timestamp_expire_at_once() -> None:
    given = under_brokers(segment(0, 9, max_timestamp_ms=-1), *AGED[1:])
    assert sources(planned(given, expiring(NOW + HOUR_MS))) == [("s0",), ("s10", "s20", "s30")]


def test_neighbours_in_which_something_is_due_go_together_where_brokers_keep_files_of_each() -> None:
    due = [segment(start, start + 9, due_ms=NOW - 1) for start in (0, 10, 30)]
    given = under_brokers(due[0], due[1], segment(20, 29), due[2], clean=40)
    assert sources(planned(given, cleaner(), force=False)) == [("s0", "s10"), ("s30",)]
    own = given.model_copy(update={"mirrored": False, "live": given.live[:-1]})
    assert sources(planned(own, cleaner(), force=False)) == [("s0",), ("s10",), ("s30",)]


def test_records_for_brokers_are_counted() -> None:
    plan = planned(under_brokers(*FOUR), cleaner(segment_bytes=250))
    assert expected_metadata_record_count(plan.tasks) == 2 * (4 + 2)
    later = [one.model_copy(update={"leader_epochs": (EpochEntry(LeaderEpoch(1), one.start_offset),)}) for one in FOUR[2:]]
    assert expected_metadata_record_count(planned(under_brokers(*FOUR[:2], *later), cleaner()).tasks) == 2 * (4 + 2) + 4
