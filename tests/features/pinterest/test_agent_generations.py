"""The agent writes Pinterest's layout: what the broker has sealed is what that layout's consumers read, and nothing makes a hole.

Three of the ways in which upstream's uploader leaves one are among the tests: an index that is never uploaded after its log was, a later
segment that comes before an earlier one and then a crash, a new leader whose segments roll elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from compactor.access.tier import Tier
from compactor.errors import Refused
from compactor.features.agent.plan import UploadFailureReason
from compactor.features.pinterest import generations
from compactor.features.pinterest.generations import configured_generation_target
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectInfo
from tests.plain_format import read_batches
from tests.support.plain_pinterest import PlainConsumer, folder_of
from tests.support.side_broker import (
    ORDERS,
    PartitionStory,
    SideBroker,
    SideScene,
    leaders_that_roll_elsewhere,
    metric,
    settle,
    stands,
    two_agents_at_once,
)


@dataclass
class Breakable:
    """Any store: whatever creates or replaces fails after ``left`` changes, and what names one of ``broken`` is refused."""

    store: Any
    scene: Scene

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        return self._counted(found) if name in ("create", "create_from_file", "compose", "put") else found

    def _counted(self, change: Callable[..., ObjectInfo]) -> Callable[..., ObjectInfo]:
        def call(key: str, *arguments: Any, **named: Any) -> ObjectInfo:
            if any(key.endswith(end) for end in self.scene.broken):
                raise Refused(f"{key}: access denied", hint="Look at the bucket's policy")
            self.scene.left -= 1
            if self.scene.left < 0:
                raise Refused(f"{key}: the process is no more")
            return change(key, *arguments, **named)

        return call


@dataclass
class Scene(SideScene):
    """All of its stores can be broken."""

    broken: tuple[str, ...] = ()
    left: int = 1 << 30

    @property
    def root(self) -> Path:
        return self.tier.folder / "layout"

    @override
    def opened(self) -> Tier:
        opened = self.tier.opened()
        return opened.with_stores(control=self._breakable(opened.ports.control), data=self._breakable(opened.ports.data))

    def _breakable(self, store: Any) -> Any:
        return Breakable(store, self)

    def folder(self) -> Path:
        """Where the pointer sends consumers."""
        pointer = json.loads((self.root / ".generations" / "prod" / "orders-0" / "current.json").read_text())
        return folder_of(self.root / pointer["basePrefix"], "prod", "orders-0", 3)

    @override
    def check(self, end: int) -> None:
        """Up to ``end`` consumers get every record from every position, and metadata and watermark say what is there."""
        folder = self.folder()
        expected = [(r.offset, r.key, r.value) for raw in self.story.written[:end] for b in read_batches(raw) for r in b.records]
        for position in range(end):
            assert list(PlainConsumer(folder, position).read_all(end)) == expected[position:]
        assert b"".join(path.read_bytes() for path in PlainConsumer(folder).offsets().values()) == b"".join(self.story.written[:end])
        assert max(PlainConsumer(folder).offsets()) == int((folder / "offset.wm").read_text())


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene.in_folder(tmp_path)
    made.tier.cli.set(**{"tier.pinterest": {"cluster": "prod", "entropy_bits": 3, "target": made.root.as_uri()}})

    def breakable(opened: Tier) -> Any:
        target = configured_generation_target(opened)
        return replace(target, store=made._breakable(target.store))

    monkeypatch.setattr(generations, "configured_generation_target", breakable)
    return made


def test_what_is_sealed_is_read_by_consumers_of_the_layout(scene: Scene) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.check(8)
    first = scene.folder()
    for end in (12, 20):
        scene.story.write(scene.replica, end - 8 if end == 12 else 8)
        assert stands(settle(agent)) == (scene.replica.bases[-1], None)
        scene.check(scene.replica.bases[-1])
    assert scene.folder() == first
    assert {path.suffix for path in first.iterdir()} == {".log", ".index", ".timeindex", ".wm", ""}


def test_logs_come_from_the_brokers_directory_and_not_by_way_of_the_tier(scene: Scene) -> None:
    opened = scene.opened()
    fetched: list[str] = []
    store: Any = opened.ports.data
    download = store.store.download

    def noted(key: str, *arguments: Any) -> int:
        fetched.append(key)
        size: int = download(key, *arguments)
        return size

    store.store.download = noted
    assert stands(settle(scene.tier.agent(scene.one, scene.cluster, opened))) == (8, None)
    scene.check(8)
    assert fetched == []


def test_an_index_that_cannot_be_uploaded_after_the_log_was(scene: Scene) -> None:
    """Nothing of the segment counts, nor of what follows, until it can."""
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.story.write(scene.replica, 4)
    scene.broken = (f"{8:020d}.index",)
    assert stands(settle(agent)) == (12, UploadFailureReason.GENERATION)
    assert "access denied" in agent.status().problem
    assert not agent.status().ready
    assert metric(agent, 'tiered_compactor_agent_partitions_refused{reason="generation"}') == 1
    scene.check(8)
    scene.story.write(scene.replica, 4)
    scene.tier.hurry()
    assert stands(settle(agent)) == (16, UploadFailureReason.GENERATION)
    scene.check(8)
    assert metric(agent, "tiered_compactor_agent_segments_total") == 4
    scene.broken = ()
    scene.tier.hurry()
    assert stands(settle(agent)) == (16, None)
    assert agent.status().ready
    scene.check(16)


@pytest.mark.parametrize("before", range(0, 25, 2))
def test_a_crash_between_any_two_changes(scene: Scene, before: int) -> None:
    """Of tier, control log or layout; a later segment may have come up by then, and the next agent rolls elsewhere."""
    assert stands(settle(scene.agent())) == (8, None)
    scene.story.write(scene.replica, 9)
    scene.left = before
    settle(scene.agent())
    assert scene.left < 0
    held = PlainConsumer(scene.folder())
    assert [offset for offset, _, _ in held.read_all(8)] == list(range(8))
    scene.left = 1 << 30
    two = SideBroker(scene.tier.folder / "broker two", 2)
    other = two.replica()
    scene.story.follow(other, per_segment=3)
    scene.story.lead(2)
    scene.story.write(other, 5, per_segment=3)
    scene.tier.hurry(90_000_000)
    assert stands(settle(scene.agent(two))) == (other.bases[-1], None)
    scene.check(other.bases[-1])
    assert scene.tier.cli.do("verify")["ok"]


def test_a_new_leader_whose_segments_roll_elsewhere(scene: Scene) -> None:
    leaders_that_roll_elsewhere(scene)


def test_two_agents_on_one_partition(scene: Scene) -> None:
    two_agents_at_once(scene)


def test_a_restart_brings_what_an_earlier_agent_left_behind(scene: Scene) -> None:
    scene.broken = ("_metadata",)
    assert stands(settle(scene.agent())) == (8, UploadFailureReason.GENERATION)
    scene.broken = ()
    assert stands(settle(scene.agent())) == (8, None)
    scene.check(8)


def test_what_a_round_has_superseded_is_left_to_others(scene: Scene) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    before = scene.folder()
    assert scene.tier.cli.run("--force")["status"] == "cleaned"
    scene.story.write(scene.replica, 4)
    assert stands(settle(agent)) == (12, None)
    assert any("has rewritten segments of the current generation" in line for line in scene.tier.told)
    assert scene.folder() == before
    assert scene.tier.cli.do("generations", "write")["partitions"][0]["status"] == "written"
    scene.story.write(scene.replica, 4)
    assert stands(settle(agent)) == (16, None)
    offsets = [offset for offset, _, _ in PlainConsumer(scene.folder(), 0).read_all(16)]
    assert offsets[-4:] == [12, 13, 14, 15]
    assert scene.folder() != before


def test_other_partitions_go_on(scene: Scene) -> None:
    other = TopicPartition("orders", 1)
    story = PartitionStory(scene.cluster, other)
    story.lead(1)
    story.write(scene.one.replica(other))
    scene.broken = (f"{other}/{0:020d}.log",)
    agent = scene.agent()
    settle(agent)
    found = {watch.partition: (watch.position, watch.trouble) for watch in agent.status().upload_states}
    assert found == {ORDERS: (8, None), other: (8, UploadFailureReason.GENERATION)}
    scene.check(8)
