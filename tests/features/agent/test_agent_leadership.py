"""Files staged for deletion as the agent judges them: by values alone, and that no rule can be dropped unnoticed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from compactor.adapters.brokers.chain import LeaderReportedLogEnd
from compactor.constants import LeaderEpoch
from compactor.errors import BadData
from compactor.features.agent import plan
from compactor.features.agent.agent import OpenStagedFiles
from compactor.features.agent.plan import (
    MAX_INTERVALS,
    TICK_MS,
    LeadershipAtDeletionRename,
    LeadershipInterval,
    PartitionDirectoryListing,
    PartitionUploadState,
    SealedSegmentFile,
    UploadLag,
    choose_uploads,
    is_upload_due,
    leadership_at_deletion_rename,
    leadership_check,
    needs_log_end_query,
    upload_lag,
    with_answer_added,
    with_leadership,
    with_log_end,
)
from compactor.features.imports.staged_files import FileStagedForDeletion, OpenFilesStagedForDeletion, list_staged_files
from compactor.model.ids import TopicPartition

pytestmark = pytest.mark.quick

NOW = 1_000_000
ORDERS = TopicPartition("orders", 0)
RENAMED = NOW - 10_000
LED = (LeadershipInterval(LeaderEpoch(5), NOW - 60_000, NOW),)
FILE = FileStagedForDeletion(20, 300, NOW - 50_000, RENAMED, (1, 7))
SEEN = PartitionDirectoryListing(ORDERS, "/somewhere", NOW - 5_000, NOW, active_base=40, staged=(FILE,))
WATCH = PartitionUploadState(SEEN, leads=True, position=20, end=LeaderReportedLogEnd(LeaderEpoch(5), 40), checked_ms=NOW, leadership=LED)
UNDECIDED = replace(WATCH, leadership=(LeadershipInterval(LeaderEpoch(5), NOW - 60_000, RENAMED + TICK_MS - 1),))
UNKNOWN = replace(WATCH, leadership=(LeadershipInterval(LeaderEpoch(5), RENAMED + 1, NOW),))


@pytest.mark.parametrize(
    ("intervals", "evidence"),
    [
        pytest.param(LED, LeadershipAtDeletionRename.SAME_EPOCH, id="before and after"),
        pytest.param(
            (LeadershipInterval(LeaderEpoch(5), RENAMED - 1, RENAMED + TICK_MS),), LeadershipAtDeletionRename.SAME_EPOCH, id="just"
        ),
        pytest.param((LeadershipInterval(LeaderEpoch(5), RENAMED, NOW),), LeadershipAtDeletionRename.UNKNOWN, id="perhaps not seen before"),
        pytest.param(
            (*LED, LeadershipInterval(LeaderEpoch(6), NOW, NOW)),
            LeadershipAtDeletionRename.SAME_EPOCH,
            id="a later epoch of the same leader",
        ),
        pytest.param(UNDECIDED.leadership, LeadershipAtDeletionRename.UNDECIDED, id="nobody has answered since"),
        pytest.param(UNKNOWN.leadership, LeadershipAtDeletionRename.UNKNOWN, id="not seen before"),
        pytest.param(
            (LeadershipInterval(LeaderEpoch(5), 0, RENAMED - 1), LeadershipInterval(LeaderEpoch(6), RENAMED + 1, NOW)),
            LeadershipAtDeletionRename.UNKNOWN,
            id="another epoch after",
        ),
        pytest.param((), LeadershipAtDeletionRename.UNKNOWN, id="nothing known"),
    ],
)
def test_a_file_was_renamed_within_one_leader_epoch_of_this_broker(
    intervals: Sequence[LeadershipInterval], evidence: LeadershipAtDeletionRename
) -> None:
    assert leadership_at_deletion_rename(intervals, RENAMED) is evidence


def test_answers_of_one_epoch_extend_its_interval_from_the_first_answer_to_the_latest_question() -> None:
    known = with_answer_added((), LeaderReportedLogEnd(LeaderEpoch(5), 40), 100, 110)
    assert known == (LeadershipInterval(LeaderEpoch(5), 110, 100),)
    known = with_answer_added(known, LeaderReportedLogEnd(LeaderEpoch(5), 50), 200, 210)
    assert known == (LeadershipInterval(LeaderEpoch(5), 110, 200),)
    assert with_answer_added(known, LeaderReportedLogEnd(LeaderEpoch(6), 50), 300, 310) == (
        *known,
        LeadershipInterval(LeaderEpoch(6), 310, 300),
    )
    assert with_answer_added(known, LeaderReportedLogEnd(LeaderEpoch(5), 50), 150, 160) == (
        *known,
        LeadershipInterval(LeaderEpoch(5), 160, 150),
    ), "the clock was set back"
    assert with_answer_added(known, LeaderReportedLogEnd(LeaderEpoch(-1), 50), 300, 310) == ()
    for epoch in range(6, 40):
        known = with_answer_added(known, LeaderReportedLogEnd(LeaderEpoch(epoch), 50), 300, 310)
    assert len(known) == MAX_INTERVALS


def test_what_is_known_of_the_leadership_ends_with_it() -> None:
    assert with_log_end(WATCH, LeaderReportedLogEnd(LeaderEpoch(5), 40), NOW + 1).leadership == (replace(LED[0], until_ms=NOW + 1),)
    assert with_log_end(replace(WATCH, leads=False), LeaderReportedLogEnd(LeaderEpoch(5), 40), NOW + 1).leadership == ()
    assert with_leadership(with_leadership(WATCH, is_leader=False), is_leader=True).leadership == ()
    unreadable = replace(WATCH, seen=replace(SEEN, problem="it cannot be read"))
    assert with_leadership(unreadable, is_leader=False).leadership == ()


def test_a_staged_file_counts_as_lag_with_its_deadline() -> None:
    assert upload_lag(WATCH) == UploadLag(1, 300, NOW - 50_000, 1, RENAMED + 60_000)
    assert upload_lag(replace(WATCH, delete_delay_ms=1_000)).deadline_ms == RENAMED + 1_000
    assert upload_lag(UNDECIDED).staged == 1
    assert upload_lag(replace(WATCH, position=40)) == upload_lag(UNKNOWN) == UploadLag(0, 0, 0)
    two = replace(WATCH, seen=replace(SEEN, staged=(FILE, replace(FILE, base=30, inode=(1, 8)))))
    assert [(file.base, file.end) for file in two.segments_pending_upload] == [(20, 30), (30, 40)]
    assert [file.base for file in replace(two, position=30).segments_pending_upload] == [30]


def test_an_upload_waits_until_the_leaders_next_answer_decides_about_a_staged_file() -> None:
    assert is_upload_due(WATCH, NOW)
    assert not needs_log_end_query(WATCH, NOW)
    for watch in (UNDECIDED, replace(UNDECIDED, position=None), replace(UNDECIDED, anew=True)):
        assert not is_upload_due(watch, NOW)
    assert needs_log_end_query(UNDECIDED, NOW)
    assert is_upload_due(with_log_end(UNDECIDED, LeaderReportedLogEnd(LeaderEpoch(5), 40), NOW), NOW)


def test_staged_files_go_before_sealed_segments_that_wait_longer() -> None:
    other = PartitionDirectoryListing(
        TopicPartition("orders", 1), "/elsewhere", 0, NOW, (SealedSegmentFile(20, 40, 300, 1),), active_base=40
    )
    waits_longer = replace(WATCH, seen=other)
    assert [watch.partition.partition for watch in choose_uploads([waits_longer, WATCH], {}, 2, NOW)] == [0, 1]


def test_a_file_of_unknown_leadership_is_untaken_while_offsets_are_missing() -> None:
    assert UNKNOWN.unproven_staged_files == (FILE,)
    assert not WATCH.unproven_staged_files
    assert not replace(UNKNOWN, position=None).unproven_staged_files, "nobody knows yet whether anything is missing"
    assert not replace(UNKNOWN, leads=False).unproven_staged_files
    assert not replace(UNKNOWN, position=40).unproven_staged_files


def test_the_upload_asks_for_the_same_leadership() -> None:
    assert leadership_check(LED)(FILE) == ""
    assert "in one leader epoch" in leadership_check(UNKNOWN.leadership)(FILE)
    with pytest.raises(BadData, match="a moment ago"):
        leadership_check(UNDECIDED.leadership)(FILE)


def test_a_dropped_leadership_rule_is_noticed() -> None:
    with patch.object(plan, "leadership_at_deletion_rename", lambda *_: LeadershipAtDeletionRename.SAME_EPOCH):
        assert UNKNOWN.uploadable_staged_files != ()
        assert not UNKNOWN.unproven_staged_files


# ---- files that are held open -------------------------------------------------------------------------------------------------


def stage(folder: Path, base: int, data: bytes) -> FileStagedForDeletion:
    folder.mkdir(exist_ok=True)
    path = folder / f"{base:020}.log.deleted"
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)
    return next(file for file in list_staged_files(folder, [100]) if file.base == base)


def test_a_file_that_is_held_stays_readable_after_it_was_unlinked(tmp_path: Path) -> None:
    holder, folder = OpenStagedFiles(), tmp_path / "orders-0"
    file = stage(folder, 20, b"its bytes")
    holder.open_wanted(ORDERS, folder, [file], is_upload_running=False)
    (folder / f"{20:020}.log.deleted").unlink()
    assert holder.close_reused(ORDERS, [], is_upload_running=False) == (file,)
    held = holder.held_files(ORDERS)
    assert held is not None
    assert held.held_files[0].is_unlinked
    assert held.held_files[0].map_bytes().tobytes() == b"its bytes"
    held.refusals[20] = "it leaves a gap"
    holder.open_wanted(ORDERS, folder, [file], is_upload_running=True)
    assert holder.held_files(ORDERS) is held, "an upload reads it"
    holder.open_wanted(ORDERS, folder, [file], is_upload_running=False)
    assert holder.held_files(ORDERS) is None, "refused and deleted"


def test_deleted_files_are_closed_while_the_disk_has_no_room(tmp_path: Path) -> None:
    holder, folder = OpenStagedFiles(), tmp_path / "orders-0"
    files = [stage(folder, 20, b"deleted"), stage(folder, 30, b"on the disk")]
    holder.open_wanted(ORDERS, folder, files, is_upload_running=False)
    (folder / f"{20:020}.log.deleted").unlink()
    assert holder.open_wanted(ORDERS, folder, files, is_upload_running=False) == tuple(files)
    assert holder.open_wanted(ORDERS, folder, files, is_upload_running=False, has_free_space=False) == (files[1],)
    holder.close_partition(ORDERS)


def test_a_file_that_is_no_longer_wanted_is_closed(tmp_path: Path) -> None:
    before, holder = os.listdir("/proc/self/fd"), OpenStagedFiles()
    file = stage(tmp_path / "orders-0", 20, b"its bytes")
    holder.open_wanted(ORDERS, tmp_path / "orders-0", [file], is_upload_running=False)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2, "the file and its directory"
    holder.open_wanted(ORDERS, tmp_path / "orders-0", [], is_upload_running=False)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_files_of_a_topic_that_was_created_again_are_closed(tmp_path: Path) -> None:
    holder, folder = OpenStagedFiles(), tmp_path / "orders-0"
    holder.open_wanted(ORDERS, folder, [stage(folder, 20, b"of the old topic")], is_upload_running=False)
    folder.rename(tmp_path / "orders-0.0123abc-delete")
    folder.mkdir()
    assert holder.close_reused(ORDERS, [], is_upload_running=False) == ()


def test_a_file_whose_name_another_one_has_taken_is_closed(tmp_path: Path) -> None:
    held = OpenFilesStagedForDeletion(tmp_path / "orders-0")
    held.open_files([stage(held.log_dir, 20, b"truncated")])
    later = stage(held.log_dir, 20, b"expired")
    held.close_outdated_files([later])
    held.open_files([later])
    assert [each.map_bytes().tobytes() for each in held.held_files] == [b"expired"]
    held.close()


def test_a_file_that_is_not_the_listed_one_any_more_is_not_opened(tmp_path: Path) -> None:
    held = OpenFilesStagedForDeletion(tmp_path / "orders-0")
    file = stage(held.log_dir, 20, b"truncated")
    stage(held.log_dir, 20, b"expired")
    held.open_files([file])
    assert held.held_files == ()
