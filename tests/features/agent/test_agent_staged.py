"""The agent and segments that its broker stages for deletion: they come in, also after they were unlinked, or it is said why not."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from compactor.adapters.brokers.chain import LeaderReportedLogEnd
from compactor.constants import LeaderEpoch
from compactor.features.agent.agent import UploadAgent
from compactor.features.agent.plan import UploadFailureReason, upload_lag
from tests.support.side_broker import ORDERS, SideScene, metric, settle, stands, watch_of


class Usage(NamedTuple):
    """What ``shutil.disk_usage`` returns."""

    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def space(monkeypatch: pytest.MonkeyPatch) -> None:
    """How full the disk of this machine is does not matter."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(100 << 30, 89 << 30, 11 << 30))


@pytest.fixture
def scene(tmp_path: Path) -> SideScene:
    """Offsets 0 to 9 in segments from 0, 4 and 8."""
    return SideScene.in_folder(tmp_path)


@pytest.fixture
def agent(scene: SideScene) -> UploadAgent:
    """It has uploaded 0 to 7."""
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    return agent


def expire_all(scene: SideScene) -> None:
    """Retention rolls the active segment and stages everything in one pass."""
    time.sleep(0.02)  # change times have the resolution of the kernel's clock: some milliseconds
    scene.replica.roll()
    scene.replica.stage_until(scene.replica.end)


def confirm(scene: SideScene, agent: UploadAgent) -> None:
    """The leader is asked again, long enough after files were renamed."""
    settle(agent)
    scene.tier.hurry(3_000)
    settle(agent)


def test_a_segment_that_was_rolled_and_staged_in_one_pass_is_uploaded(scene: SideScene, agent: UploadAgent) -> None:
    scene.cluster.delete_delays["orders"] = 5_000
    expire_all(scene)
    assert settle(agent) is not None
    watch = watch_of(agent)
    assert watch is not None
    lag = upload_lag(watch)
    assert (lag.segments, lag.staged, lag.deadline_ms) == (1, 1, watch.uploadable_staged_files[0].changed_ms + 5_000)
    assert metric(agent, "tiered_compactor_agent_staged_segments") == 1
    assert stands(watch) == (8, None), "the leader's epoch was not seen since the file was renamed"
    confirm(scene, agent)
    assert stands(watch_of(agent)) == (10, None)
    assert scene.tier.held() == scene.story.written
    assert metric(agent, "tiered_compactor_agent_total_lag_segments") == 0
    assert any("are staged for deletion and not in the tier" in line for line in scene.tier.told)
    assert any("were taken from files that the broker has staged" in line for line in scene.tier.told)


def test_a_file_that_was_unlinked_before_its_upload_is_read_from_what_is_held_open(scene: SideScene, agent: UploadAgent) -> None:
    expire_all(scene)
    settle(agent)
    scene.replica.unlink_staged()
    confirm(scene, agent)
    assert stands(watch_of(agent)) == (10, None)
    assert scene.tier.held() == scene.story.written
    scene.story.write(scene.replica, 6)
    assert stands(settle(agent)) == (14, None)
    assert scene.tier.held() == scene.story.written[:14]


def test_a_partition_whose_first_segment_is_staged_at_once_is_uploaded(tmp_path: Path) -> None:
    scene = SideScene.in_folder(tmp_path)
    scene.replica.bases = [0]
    scene.replica.write()
    agent = scene.agent()
    assert stands(settle(agent)) == (0, None)
    expire_all(scene)
    confirm(scene, agent)
    assert scene.tier.held() == scene.story.written


def test_a_file_that_was_staged_before_the_agent_began_is_not_taken_and_told(scene: SideScene, agent: UploadAgent) -> None:
    expire_all(scene)
    later = scene.agent()
    settle(later)
    confirm(scene, later)
    assert stands(watch_of(later)) == (8, None)
    assert scene.tier.held() == scene.story.written[:8]
    assert metric(later, "tiered_compactor_agent_staged_not_taken_total") == 1
    assert any("is staged for deletion and is not taken: it is not known" in line for line in scene.tier.told)
    scene.tier.cli.do("import", scene.replica.folder, "--live")
    assert scene.tier.held() == scene.story.written, "a person may take it by hand"


def test_a_file_that_was_staged_while_leaders_changed_is_not_taken(scene: SideScene, agent: UploadAgent) -> None:
    scene.cluster.ends_of[ORDERS] = LeaderReportedLogEnd(LeaderEpoch(2), 10)
    expire_all(scene)
    confirm(scene, agent)
    assert stands(watch_of(agent)) == (8, UploadFailureReason.EPOCH)
    assert metric(agent, "tiered_compactor_agent_staged_not_taken_total") == 1


def test_a_gap_is_not_accepted_while_a_staged_file_is_undecided(scene: SideScene) -> None:
    agent = scene.agent(allow_gaps=True)
    settle(agent)
    expire_all(scene)
    scene.story.write(scene.replica, 6)
    assert stands(settle(agent)) == (8, None)
    confirm(scene, agent)
    assert stands(watch_of(agent)) == (14, None)
    assert scene.tier.held() == scene.story.written[:14]


def test_deleted_files_are_let_go_when_the_brokers_disk_is_almost_full(
    scene: SideScene, agent: UploadAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_all(scene)
    settle(agent)
    scene.replica.unlink_staged()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(100 << 30, 91 << 30, 9 << 30))
    confirm(scene, agent)
    assert stands(watch_of(agent)) == (8, None)
    assert metric(agent, "tiered_compactor_agent_staged_segments") == 0
    assert any("is not held open any longer" in line for line in scene.tier.told)


def test_what_the_tier_has_is_not_held_when_it_is_staged(scene: SideScene, agent: UploadAgent) -> None:
    scene.replica.stage_until(8)
    watch = settle(agent)
    assert watch is not None
    assert len(watch.seen.staged) == 2
    assert not watch.uploadable_staged_files
    assert agent._staged.held_files(ORDERS) is None
