"""``import --live`` of a log whose broker has staged segments for deletion: what is on disk comes in, or it is said why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from compactor.features.imports import seam
from compactor.features.imports.import_ import _DirectoryImport
from compactor.features.imports.staged_files import HeldFileStagedForDeletion, list_staged_files
from tests.support.side_broker import SideScene


@pytest.fixture
def scene(tmp_path: Path) -> SideScene:
    """Offsets 0 to 9 in segments from 0, 4 and 8; the tier has 0 to 7."""
    scene = SideScene.in_folder(tmp_path)
    imported(scene)
    return scene


def imported(scene: SideScene, *options: str) -> Any:
    return scene.tier.cli.do("import", scene.replica.folder, "--live", *options)


def expire_all(scene: SideScene) -> None:
    """Retention rolls the active segment and stages everything in one pass."""
    scene.replica.roll()
    scene.replica.stage_until(scene.replica.end)


def test_a_segment_that_was_rolled_and_staged_in_one_pass_is_taken(scene: SideScene) -> None:
    expire_all(scene)
    assert imported(scene)["segments"] == 1
    assert scene.tier.held() == scene.story.written
    assert scene.tier.cli.do("verify")["ok"]
    scene.replica.unlink_staged()
    scene.story.write(scene.replica, 5)
    assert imported(scene)["start_offset"] == 10
    assert scene.tier.held() == scene.story.written[: scene.replica.bases[-1]]


def test_staged_segments_of_several_leader_epochs_keep_their_epochs(scene: SideScene) -> None:
    scene.story.lead(1)
    scene.story.write(scene.replica, 6)
    expire_all(scene)
    assert (scene.replica.folder / "leader-epoch-checkpoint").read_text() == "0\n1\n2 16\n"
    assert imported(scene)["end_offset"] == 15
    assert scene.tier.held() == scene.story.written
    state = scene.tier.opened().open_partition_log(scene.story.name).refresh()
    assert [(entry.epoch, entry.start_offset) for entry in state.lineage] == [(1, 0), (2, 10)]


def test_an_empty_tier_takes_what_is_staged_before_the_live_log(tmp_path: Path) -> None:
    scene = SideScene.in_folder(tmp_path)
    expire_all(scene)
    assert imported(scene)["segments"] == 3
    assert scene.tier.held() == scene.story.written


def test_nothing_staged_is_read_that_the_tier_has(scene: SideScene) -> None:
    scene.replica.stage_until(8)
    with patch.object(HeldFileStagedForDeletion, "describe_segment", side_effect=AssertionError("it was read")):
        assert imported(scene)["segments"] == 0


def test_a_file_that_leaves_a_gap_is_refused_and_named(scene: SideScene) -> None:
    scene.story.write(scene.replica, 8)  # segments from 8, 12 and 16
    scene.replica.stage_until(16)
    (scene.replica.folder / f"{8:020}.log.deleted").unlink()
    scene.story.write(scene.replica, 4)
    asked = scene.tier.cli.ask("import", scene.replica.folder, "--live")
    assert asked.code == 3
    assert "it leaves a gap" in asked.stderr
    assert f"{12:020}.log.deleted is staged for deletion and is not taken" in asked.stderr
    assert "begins at 12" in asked.stderr
    imported(scene, "--allow-gaps")
    assert scene.tier.held() == [*scene.story.written[:8], *scene.story.written[16:20]]


def test_a_staged_file_of_a_later_epoch_than_the_live_log_was_truncated(scene: SideScene) -> None:
    scene.story.lead(1)
    scene.story.write(scene.replica, 6)
    expire_all(scene)
    scene.replica.epochs = [(1, 16)]
    scene.replica.write()
    report = scene.tier.cli.ask("import", scene.replica.folder, "--live", output="table")
    assert "the live log begins with epoch 1" in report.stderr
    assert scene.tier.opened().open_partition_log(scene.story.name).refresh().end_offset == 7


def test_a_file_that_is_rolled_while_files_are_listed_is_looked_for_again(scene: SideScene) -> None:
    """Neither name of a file is seen while it is renamed: the listing is made anew."""
    seen: list[Any] = []

    def renamed_meanwhile(log_dir: Path, live: Any) -> Any:
        found = list_staged_files(log_dir, live) if seen else []
        if not seen:
            scene.story.write(scene.replica, 5)
        seen.append(live)
        return found

    expire_all(scene)
    with patch.object(seam, "list_staged_files", renamed_meanwhile):
        assert imported(scene, "--allow-gaps")["start_offset"] == 8
    assert scene.tier.held() == scene.story.written[: scene.replica.bases[-1]]


def test_a_cut_that_another_import_was_faster_with_is_refused(scene: SideScene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.story.truncate(6)
    scene.replica.truncate(6)
    scene.story.lead(1)
    scene.story.write(scene.replica, 9)
    checks = _DirectoryImport._check_branch

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        imported(scene, "--accept-truncation")
        return checks(*arguments)

    monkeypatch.setattr(_DirectoryImport, "_check_branch", late)
    scene.tier.cli.refused("import", scene.replica.folder, "--live", "--accept-truncation", says="by now")
    assert scene.tier.held() == scene.story.written[: scene.replica.bases[-1]]


def test_offsets_of_the_active_segment_are_not_passed_over_before_the_tiers_start(tmp_path: Path) -> None:
    scene = SideScene.in_folder(tmp_path)
    whole = tmp_path / "whole" / "orders-0"
    shutil.copytree(scene.replica.folder, whole)
    (whole / f"{8:020}.log").unlink()
    scene.replica.delete_until(8)
    scene.replica.roll()
    imported(scene)
    scene.tier.cli.do("import", whole, "--live", "--allow-gaps")
    assert scene.tier.held() == scene.story.written[8:], "offsets 4 to 7 are still to be sealed"
