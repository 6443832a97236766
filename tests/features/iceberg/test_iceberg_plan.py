"""Which files of an Iceberg table replace which, and when its snapshots expire."""

from __future__ import annotations

import pytest

from checkpoint.offsets import CleanerOffset
from compactor.constants import CompactorEpoch, Offset
from compactor.control.state import PartitionState, RunHistoryEntry
from compactor.errors import BadData
from compactor.features.iceberg.plan import (
    DataFileName,
    PartitionEntryInSnapshot,
    SnapshotCommitTime,
    ViewSlice,
    parse_snapshot_entry,
    plan_snapshot_expiry,
    plan_table_update,
    unfinished_round_end,
    view_slices,
    view_snapshot_entry,
)
from compactor.model.ids import RunHistoryStatus
from compactor.model.segment import RemoteLogSegmentMetadata
from tests.support.segments import make_segment

pytestmark = pytest.mark.quick

NONCE = "0" * 32
A, B, C = ("A" * 22, "B" * 22, "c_-" * 7 + "c")


def segment(name: str, first: int, last: int) -> RemoteLogSegmentMetadata:
    return make_segment(name, first, last, size=1)


def state(
    cleaner_offset: int, *live: RemoteLogSegmentMetadata, runs: tuple[RunHistoryEntry, ...] = (), log_start: int | None = None
) -> PartitionState:
    vector = (CleanerOffset(CompactorEpoch(0), Offset(cleaner_offset)),) if cleaner_offset else ()
    return PartitionState(slot=9, topic="t", partition=3, live=live, vector=vector, runs=runs, log_start_offset=log_start)


def run(slot: int, status: RunHistoryStatus, next_dirty: int, cut_off: int = -1) -> RunHistoryEntry:
    return RunHistoryEntry(
        run_id=f"r{slot}", leader_epoch=CompactorEpoch(0), holder="h", slot=slot, started_ms=0, status=status,
        published_slot=slot if status != RunHistoryStatus.UNDONE else 0, next_dirty_offset=next_dirty, cut_off_offset=cut_off,
    )  # fmt: skip


def entry(**changes: object) -> PartitionEntryInSnapshot:
    values = {"topic_id": "", "incarnation": 1, "log_start": 0, "cleaner_offset": 10, "leader_epochs": (), "slot": 9, "run": ""}
    return PartitionEntryInSnapshot.model_validate(values | changes)


def path(name: str, first: int, last: int, incarnation: int = 1) -> str:
    return "s3://bucket/t/data/" + DataFileName(3, incarnation, ViewSlice(name, first, last)).file_name_with_nonce(NONCE)


def test_a_file_name_states_partition_incarnation_and_slice() -> None:
    assert DataFileName.from_data_file_path(path(C, 5, 17, 2)) == DataFileName(3, 2, ViewSlice(C, 5, 17))
    for foreign in ("s3://bucket/t/data/00000-0-x.parquet", path(A, 1, 2) + ".crc", path(A, 1, 2).replace(NONCE, "1")):
        assert DataFileName.from_data_file_path(foreign) is None


def test_a_view_is_cut_by_log_start_and_cleaner_offset() -> None:
    live = (segment(A, 0, 9), segment(B, 10, 19), segment(C, 20, 29))
    assert view_slices(state(20, *live), 0) == (ViewSlice(A, 0, 9), ViewSlice(B, 10, 19))
    assert view_slices(state(25, *live), 5) == (ViewSlice(A, 5, 9), ViewSlice(B, 10, 19), ViewSlice(C, 20, 24))
    assert view_slices(state(25, *live), 10) == (ViewSlice(B, 10, 19), ViewSlice(C, 20, 24))
    assert view_slices(state(0, *live), 0) == ()
    assert view_slices(state(5, *live), 7) == ()


def test_only_files_of_replaced_segments_change() -> None:
    present = [path(A, 0, 9), path(B, 10, 19)]
    plan = plan_table_update(3, entry(), (ViewSlice(A, 0, 9), ViewSlice(C, 10, 29)), present, entry())
    assert (plan.keep, plan.remove, plan.write) == ((path(A, 0, 9),), (path(B, 10, 19),), (ViewSlice(C, 10, 29),))


def test_a_slice_that_is_cut_elsewhere_is_written_anew() -> None:
    plan = plan_table_update(3, entry(), (ViewSlice(A, 4, 9),), [path(A, 0, 9)], entry())
    assert (plan.keep, plan.remove, plan.write) == ((), (path(A, 0, 9),), (ViewSlice(A, 4, 9),))


def test_another_incarnation_replaces_all_files() -> None:
    wanted = (ViewSlice(A, 0, 9),)
    known = entry(empty=(str(ViewSlice(A, 0, 9)),))
    plan = plan_table_update(3, entry(incarnation=2), wanted, [path(A, 0, 9)], known)
    assert (plan.keep, plan.remove, plan.write, plan.empty) == ((), (path(A, 0, 9),), wanted, ())


def test_slices_without_rows_are_not_read_again() -> None:
    wanted = (ViewSlice(A, 0, 9), ViewSlice(B, 10, 19))
    plan = plan_table_update(3, entry(), wanted, [], entry(empty=(str(wanted[0]),)))
    assert (plan.write, plan.empty) == (wanted[1:], wanted[:1])


@pytest.mark.parametrize("extra", ["s3://bucket/t/data/of-somebody.parquet", path(A, 0, 9) + "", path(A, 0, 9).replace(NONCE, "1" * 32)])
def test_files_of_others_and_rows_twice_are_refused(extra: str) -> None:
    with pytest.raises(BadData, match="not written by this program, or its rows are there twice"):
        plan_table_update(3, entry(), (ViewSlice(A, 0, 9),), [path(A, 0, 9), extra], entry())


def test_a_view_is_incomplete_until_a_round_cleans_as_far_as_the_one_that_was_cut_off() -> None:
    complete, cut_off = run(1, RunHistoryStatus.CLEANED, 20), run(2, RunHistoryStatus.CLEANED, 20, cut_off=40)
    assert unfinished_round_end(state(20, runs=(complete,))) == -1
    assert unfinished_round_end(state(20, runs=(complete, cut_off))) == 40
    assert unfinished_round_end(state(20, runs=(complete, cut_off, run(3, RunHistoryStatus.CLEANED, 20)))) == 40
    assert unfinished_round_end(state(40, runs=(complete, cut_off, run(3, RunHistoryStatus.CLEANED, 40)))) == -1


def test_a_round_undone_in_part_leaves_an_incomplete_view_and_one_undone_wholly_does_not() -> None:
    complete = run(1, RunHistoryStatus.CLEANED, 20)
    assert unfinished_round_end(state(20, runs=(complete, run(2, RunHistoryStatus.REVERTED_IN_PART, 40)))) == 40
    assert unfinished_round_end(state(20, runs=(complete, run(2, RunHistoryStatus.REVERTED, 40, cut_off=60)))) == -1
    assert unfinished_round_end(state(20, runs=(complete, run(2, RunHistoryStatus.UNDONE, 40)))) == -1


def test_an_entry_names_the_round_that_is_shown() -> None:
    runs = (run(1, RunHistoryStatus.CLEANED, 20), run(2, RunHistoryStatus.REVERTED, 40), run(3, RunHistoryStatus.UNDONE, 40))
    shown = view_snapshot_entry(state(20, runs=runs), 5)
    assert (shown.run, shown.log_start, shown.cleaner_offset, shown.snapshot_ordering_key) == ("r1", 5, 20, (1, 9, 5))
    assert view_snapshot_entry(state(3), 5).cleaner_offset == 5
    assert parse_snapshot_entry(shown.model_dump_json(), "t") == shown


def test_an_entry_of_a_newer_version_is_refused() -> None:
    assert parse_snapshot_entry(None, "t") is None
    with pytest.raises(BadData, match="its summary is not valid"):
        parse_snapshot_entry('{"other": 1}', "t")


def test_records_that_change_no_row_leave_the_view_as_it_is() -> None:
    assert entry().describes_same_rows(entry(slot=12, run="r", checked=0.5))
    assert not entry().describes_same_rows(entry(cleaner_offset=11))
    assert not entry().describes_same_rows(entry(empty=("x",)))


def test_snapshots_expire_when_they_were_superseded_long_enough_ago() -> None:
    snapshots = [
        SnapshotCommitTime(1, 100, False),
        SnapshotCommitTime(2, 200, True),
        SnapshotCommitTime(3, 300, False),
        SnapshotCommitTime(4, 400, True),
    ]
    assert plan_snapshot_expiry(snapshots, 50, 249) == ([], 250)
    assert plan_snapshot_expiry(snapshots, 50, 250) == ([1], 450)
    assert plan_snapshot_expiry(snapshots, 50, 450) == ([1, 3], None)
    assert plan_snapshot_expiry(snapshots[-1:], 50, 10_000) == ([], None)
