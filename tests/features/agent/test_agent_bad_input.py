"""What an agent may meet: each is named, holds up no other partition, is tried again after longer and longer pauses, and shows in metrics.

Buckets that refuse are in test_agent_on_s3.py and test_agent_generations.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compactor.features.agent.agent import BROKER_RETRY_MS
from compactor.features.agent.plan import UPLOAD_RETRY_MS, UploadFailureReason
from compactor.features.imports import import_
from compactor.features.imports.log_directory import CheckedFilePart, check_file_parts
from compactor.model.ids import TopicPartition
from compactor.web.console import RequestRouter
from compactor.web.pages import AgentPages
from tests.support.side_broker import (
    PartitionStory,
    SideBroker,
    SideCluster,
    SideScene,
    metric,
    settle,
    watch_of,
)

SOUND = TopicPartition("orders", 1)


@dataclass
class Scene(SideScene):
    """The same with a second partition. Something is wrong with ``orders-0``."""

    monkeypatch: pytest.MonkeyPatch

    def file(self, base: int = 4) -> Path:
        return self.replica.folder / f"{base:020}.log"


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene.in_folder(tmp_path, monkeypatch=monkeypatch)
    sound = PartitionStory(made.cluster, SOUND)
    sound.lead(1)
    sound.write(made.one.replica(SOUND))
    return made


Mend = Callable[[], object]


def shrinking(scene: Scene) -> Mend:
    """A file that loses its end while it is read, each time."""
    whole = scene.file().read_bytes()

    def read_and_cut(*arguments: Any) -> list[CheckedFilePart]:
        found = check_file_parts(*arguments)
        scene.file().write_bytes(whole[:-1])
        return found

    scene.monkeypatch.setattr(import_, "check_file_parts", read_and_cut)

    def mend() -> None:
        scene.monkeypatch.setattr(import_, "check_file_parts", check_file_parts)
        scene.file().write_bytes(whole)

    return mend


def cut(scene: Scene) -> Mend:
    whole = scene.file().read_bytes()
    scene.file().write_bytes(whole[:-5])
    return lambda: scene.file().write_bytes(whole)


def damaged(scene: Scene) -> Mend:
    whole = scene.file().read_bytes()
    scene.file().write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return lambda: scene.file().write_bytes(whole)


def no_file(scene: Scene) -> Mend:
    """Something that cannot be read as a file, whoever asks."""
    whole = scene.file().read_bytes()
    scene.file().unlink()
    scene.file().mkdir()

    def mend() -> None:
        scene.file().rmdir()
        scene.file().write_bytes(whole)

    return mend


def unreadable_epochs(scene: Scene) -> Mend:
    path = scene.replica.folder / "leader-epoch-checkpoint"
    text = path.read_text()
    path.unlink()
    path.mkdir()

    def mend() -> None:
        path.rmdir()
        path.write_text(text)

    return mend


def garbled_epochs(scene: Scene) -> Mend:
    path = scene.replica.folder / "leader-epoch-checkpoint"
    text = path.read_text()
    path.write_text("0\n7\nx\n")
    return lambda: path.write_text(text)


def refused_listing(scene: Scene) -> Mend:
    scan = os.scandir

    def refused(path: Any) -> Any:
        if str(path) == str(scene.replica.folder):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    scene.monkeypatch.setattr(os, "scandir", refused)
    return lambda: scene.monkeypatch.setattr(os, "scandir", scan)


BAD: list[tuple[Callable[[Scene], Mend], UploadFailureReason, str]] = [
    (shrinking, UploadFailureReason.CONTENT, f"{4:020}.log"),
    (cut, UploadFailureReason.CONTENT, f"{4:020}.log"),
    (damaged, UploadFailureReason.CONTENT, f"{4:020}.log"),
    (no_file, UploadFailureReason.UNREADABLE, f"{4:020}.log"),
    (unreadable_epochs, UploadFailureReason.UNREADABLE, "leader-epoch-checkpoint"),
    (garbled_epochs, UploadFailureReason.LINEAGE, "leader-epoch-checkpoint"),
    (refused_listing, UploadFailureReason.UNREADABLE, "Permission denied"),
]


@pytest.mark.parametrize(("harm", "trouble", "named"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_one_partition_is_bad(scene: Scene, harm: Callable[[Scene], Mend], trouble: UploadFailureReason, named: str) -> None:
    mend = harm(scene)
    agent = scene.tier.agent(scene.one, scene.cluster)
    pauses = []
    for failures in (1, 2, 3):
        watch = settle(agent)
        assert watch is not None
        assert (watch.position, watch.trouble, watch.failures) == (None, trouble, failures), watch.reason
        assert named in watch.reason
        pauses.append(round((watch.retry_at_ms - agent.status().now_ms) / UPLOAD_RETRY_MS))
        again = settle(agent)
        assert again is not None
        assert (again.failures, again.retry_at_ms) == (failures, watch.retry_at_ms)  # not before its time
        scene.tier.hurry(pauses[-1] * UPLOAD_RETRY_MS + 1)
    assert pauses == [1, 2, 4]
    other = watch_of(agent, SOUND)
    assert other is not None
    assert (other.position, other.trouble) == (8, None)
    assert metric(agent, f'tiered_compactor_agent_partitions_refused{{reason="{trouble.value}"}}') == 1
    assert metric(agent, f'tiered_compactor_agent_refusals_total{{reason="{trouble.value}"}}') == 3
    assert len([line for line in scene.tier.told if named in line]) == 1  # once, not at each attempt
    mend()
    watch = settle(agent)
    assert watch is not None
    assert (watch.position, watch.trouble, watch.failures) == (8, None, 0)
    assert metric(agent, f'tiered_compactor_agent_partitions_refused{{reason="{trouble.value}"}}') == 0
    assert any("uploads succeed again" in line for line in scene.tier.told)
    assert scene.tier.held() == scene.story.written[:8]


def test_another_clusters_logs_under_the_same_names(scene: Scene, tmp_path: Path) -> None:
    """Of its partitions the one that the tier has is refused, the one that it does not have goes up; nothing is lost of what was there."""
    assert settle(scene.tier.agent(scene.one, scene.cluster)) is not None
    held = scene.tier.held()
    cluster = SideCluster()
    stranger = SideBroker(tmp_path / "stranger", 1)
    for number in (0, 2):
        story = PartitionStory(cluster, TopicPartition("orders", number))
        story.log.time = 99_000
        story.lead(1)
        story.write(stranger.replica(story.name), 17)
    agent = scene.tier.agent(stranger, cluster)
    settle(agent)
    found = {watch.partition.partition: (watch.position, watch.trouble) for watch in agent.status().upload_states}
    assert found == {0: (8, UploadFailureReason.CONTENT), 2: (16, None)}
    assert metric(agent, 'tiered_compactor_agent_partitions_refused{reason="content"}') == 1
    assert scene.tier.held() == held


@pytest.mark.parametrize("what", ["nowhere", "no broker's", "two brokers'"])
def test_log_directories_that_are_no_brokers(scene: Scene, tmp_path: Path, what: str) -> None:
    bad = tmp_path / "bad"
    if what == "no broker's":
        bad.mkdir()
        (bad / "orders-0").mkdir()
    elif what == "two brokers'":
        SideBroker(bad, 2)
    agent = scene.tier.agent(scene.one, scene.cluster, log_dirs=(str(scene.one.root), str(bad)))
    watch = settle(agent)
    assert watch is not None
    assert (watch.position, watch.trouble) == (8, None)
    assert metric(agent, 'tiered_compactor_agent_problems{where="directory"}') == 1
    assert metric(agent, "tiered_compactor_agent_ready") == 0
    assert str(bad) in RequestRouter(AgentPages(agent.status), agent.loop_age_ms, 1000).respond_to_request("/readyz")[2].decode()
    assert len([line for line in scene.tier.told if str(bad) in line]) == 1
    if what == "two brokers'":
        (bad / "meta.properties").write_text((scene.one.root / "meta.properties").read_text())
    else:
        bad.mkdir(exist_ok=True)
        (bad / "meta.properties").write_text((scene.one.root / "meta.properties").read_text())
        for path in bad.glob("orders-*"):
            path.rmdir()
    settle(agent)
    assert metric(agent, 'tiered_compactor_agent_problems{where="directory"}') == 0
    assert metric(agent, "tiered_compactor_agent_ready") == 1


def test_no_broker(scene: Scene) -> None:
    """Asked again after two seconds, doubled up to a minute; uploads begin only with a leader's word."""
    scene.cluster.down = True
    agent = scene.tier.agent(scene.one, scene.cluster)
    for failures, pause in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 16), (6, 30), (7, 30)):
        settle(agent)
        assert metric(agent, "tiered_compactor_agent_broker_failures_total") == failures
        assert metric(agent, 'tiered_compactor_agent_problems{where="broker"}') == 1
        scene.tier.hurry(pause * BROKER_RETRY_MS - 1_500)
        settle(agent)
        assert metric(agent, "tiered_compactor_agent_broker_failures_total") == failures
        scene.tier.hurry(1_501)
    assert "no broker answers" in agent.status().problem
    assert len([line for line in scene.tier.told if "no broker answers" in line]) == 1
    scene.cluster.down = False
    assert settle(agent) is not None
    assert metric(agent, "tiered_compactor_agent_ready") == 1
    assert metric(agent, "tiered_compactor_agent_segments_total") == 4
    scene.cluster.down = True  # in the middle of its work
    scene.story.write(scene.replica, 4)
    settle(agent)
    watch = watch_of(agent)
    assert watch is not None
    assert watch.position == 8
    scene.cluster.down = False
    scene.tier.hurry()
    watch = settle(agent)
    assert watch is not None
    assert watch.position == 12
