"""The agent beside brokers that are directories: what it uploads, what it refuses, and that nothing makes a hole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from compactor.adapters.brokers.chain import LeaderReportedLogEnd
from compactor.constants import LeaderEpoch
from compactor.errors import Refused
from compactor.features.agent.agent import UploadAgent
from compactor.features.agent.plan import UploadFailureReason
from compactor.features.imports import import_
from compactor.features.imports.log_directory import CheckedFilePart, check_file_parts
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectInfo
from compactor.web.console import RequestRouter
from compactor.web.pages import AgentPages
from tests.support.side_broker import (
    ORDERS,
    PartitionStory,
    SideBroker,
    SideCluster,
    SideScene,
    leaders_that_roll_elsewhere,
    metric,
    settle,
    stands,
    two_agents_at_once,
    watch_of,
)


@pytest.fixture
def scene(tmp_path: Path) -> SideScene:
    return SideScene.in_folder(tmp_path)


def test_sealed_segments_go_up_and_the_newest_stays(scene: SideScene) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.check(8)
    assert metric(agent, "tiered_compactor_agent_segments_total") == 2
    scene.story.write(scene.replica, 5)
    assert stands(settle(agent)) == (12, None)
    scene.check(12)
    assert agent.status().ready
    assert metric(agent, "tiered_compactor_agent_total_lag_bytes") == 0


def test_nothing_above_the_high_watermark_goes_up(scene: SideScene) -> None:
    scene.cluster.ends_of[ORDERS] = LeaderReportedLogEnd(LeaderEpoch(1), 7)
    agent = scene.agent()
    assert stands(settle(agent)) == (4, None)
    assert metric(agent, "tiered_compactor_agent_lag_segments") == 1
    scene.story.commit()
    assert stands(settle(agent)) == (8, None)


def test_what_this_broker_does_not_lead_is_left_alone(scene: SideScene) -> None:
    scene.cluster.leaders_of[ORDERS] = 2
    agent = scene.agent()
    assert stands(settle(agent)) == (None, None)
    assert scene.tier.opened().catalog.refresh().topic_partitions == []
    assert metric(agent, "tiered_compactor_agent_partitions_led") == 0


def test_idle_it_asks_the_tier_for_nothing_and_brokers_once_a_minute(scene: SideScene) -> None:
    for number in range(1, 20):
        story = PartitionStory(scene.cluster, TopicPartition("orders", number))
        story.lead(1)
        story.write(scene.one.replica(story.name))
    opened = scene.tier.opened()
    agent = scene.tier.agent(scene.one, scene.cluster, opened)
    settle(agent)
    assert all(stands(watch) == (8, None) for watch in agent.status().upload_states)
    before, asked = opened.counters.usage(), scene.cluster.asked
    for _ in range(12):  # two minutes
        scene.tier.hurry(10_000)
        settle(agent)
    assert opened.counters.usage().usage_since(before).total_requests == 0
    assert 2 <= scene.cluster.asked - asked <= 6


def test_brokers_are_asked_about_many_partitions_at_once(scene: SideScene) -> None:
    for number in range(1, 30):
        story = PartitionStory(scene.cluster, TopicPartition("orders", number))
        story.lead(1)
        story.write(scene.one.replica(story.name))
    agent = scene.agent()
    settle(agent)
    assert [stands(watch) for watch in agent.status().upload_states] == [(8, None)] * 30
    assert scene.cluster.asked <= 8


def test_two_agents_on_one_partition(scene: SideScene) -> None:
    two_agents_at_once(scene)
    assert scene.tier.cli.do("verify")["ok"]


def test_a_new_leader_whose_segments_roll_elsewhere(scene: SideScene) -> None:
    leaders_that_roll_elsewhere(scene)


def test_an_agent_that_sleeps_through_a_leader_change(scene: SideScene, tmp_path: Path) -> None:
    """It still believes that it leads, and its replica has what no other has: above the old high watermark, below the new one."""
    two = SideBroker(tmp_path / "broker two", 2)
    other = two.replica()
    scene.story.follow(other)
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    lonely = PartitionStory(scene.cluster, log=scene.story.log, epochs=scene.story.epochs)
    scene.replica.append([(offset, raw) for offset, raw in _never_committed(scene.story, 10)], lonely.epochs)
    scene.story.lead(2)
    scene.story.write(other, 20)
    scene.cluster.leaders_of[ORDERS] = 1  # what it has not heard of yet
    assert stands(settle(agent)) == (8, UploadFailureReason.EPOCH)
    scene.cluster.leaders_of[ORDERS] = 2
    assert stands(settle(scene.tier.agent(two, scene.cluster))) == (28, None)
    scene.tier.hurry()
    settle(agent)
    scene.check(28)


def _never_committed(story: PartitionStory, count: int) -> list[tuple[int, bytes]]:
    branch = PartitionStory(SideCluster())
    branch.log.leader_epoch = story.log.leader_epoch
    branch.log.next_offset = story.log.next_offset
    branch.log.segments = [(story.log.next_offset, [])]
    for _ in range(count):
        branch.log.put(f"key={branch.log.next_offset} lonely")
    return [(int.from_bytes(raw[:8], "big"), raw) for raw in branch.written]


def test_a_log_that_an_unclean_election_truncated(scene: SideScene) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.story.truncate(6)
    scene.replica.truncate(6)
    scene.story.lead(1)
    scene.story.write(scene.replica, 1)
    scene.tier.hurry(70_000)
    assert stands(settle(agent)) == (8, UploadFailureReason.LINEAGE)
    assert metric(agent, "tiered_compactor_agent_partitions_refused") == 1
    scene.story.write(scene.replica, 12)
    scene.tier.hurry()
    assert stands(settle(agent)) == (8, UploadFailureReason.LINEAGE)
    assert any("discarded" in text for text in scene.tier.told)
    accepting = scene.agent(accept_truncation=True)
    watch = settle(accepting)
    assert stands(watch) == (scene.replica.bases[-1], None)
    scene.check(scene.replica.bases[-1])


def test_a_truncated_log_that_has_not_grown_again(scene: SideScene) -> None:
    agent = scene.agent(accept_truncation=True)
    assert stands(settle(agent)) == (8, None)
    scene.story.truncate(6)
    scene.replica.truncate(6)
    scene.story.lead(1)
    scene.story.write(scene.replica, 1)
    scene.tier.hurry(70_000)
    assert stands(settle(agent)) == (6, None)
    scene.check(6)


def test_a_topic_that_was_made_anew_under_its_old_name(scene: SideScene) -> None:
    """Its log ends below the tier's, and no leader epoch says that anything was discarded: nothing is taken, nothing is thrown away."""
    before = settle(scene.agent())
    assert stands(before) == (8, None)
    held = scene.tier.held()
    scene.replica.truncate(0)
    story = PartitionStory(scene.cluster)
    story.log.time = 99_000
    story.lead(1)
    story.write(scene.replica, 3)
    agent = scene.agent(accept_truncation=True)
    settle(agent)
    scene.tier.hurry(70_000)
    assert stands(settle(agent)) == (8, UploadFailureReason.BEHIND)
    story.write(scene.replica, 12)
    scene.tier.hurry()
    assert stands(settle(agent)) == (8, UploadFailureReason.CONTENT)
    assert scene.tier.held() == held


def test_agent_opens_a_new_incarnation_only_if_the_recorded_cluster_has_the_new_topic(scene: SideScene) -> None:
    first, second = "Zmlyc3QtdG9waWMtaWQhIQ", "c2Vjb25kLXRvcGljLWlkIQ"
    scene.replica.topic_id = scene.cluster.topic_ids_of["orders"] = first
    scene.replica.write()
    assert stands(settle(scene.agent())) == (8, None)
    held = scene.tier.held()
    assert scene.tier.opened().catalog.refresh().topic_clusters == {first: scene.cluster.cluster_id}
    scene.replica.truncate(0)
    scene.replica.topic_id = second
    story = PartitionStory(scene.cluster)
    story.log.time = 99_000
    story.lead(1)
    story.write(scene.replica, 6)
    agent = scene.agent()
    assert stands(settle(agent)) == (8, UploadFailureReason.IDENTITY), "the cluster still has the first topic"
    scene.cluster.topic_ids_of["orders"], ours = second, scene.cluster.cluster_id
    scene.cluster.cluster_id = "another"
    scene.tier.hurry()
    settle(agent)
    assert scene.tier.opened().catalog.refresh().superseded == {}
    scene.cluster.cluster_id = ours
    scene.tier.hurry(70_000)
    assert stands(settle(agent)) == (4, None)
    assert scene.tier.held() == story.written[:4]
    assert scene.tier.held("orders-0~1") == held
    tier = scene.tier.opened()
    assert tier.catalog.refresh().superseded == {"orders": {first: second}}
    state = tier.open_partition_log(tier.latest_incarnation(ORDERS)).refresh()
    assert (state.topic_partition.incarnation, state.topic_id, state.end_offset) == (2, second, 3)


def test_retention_that_has_overtaken_the_upload(scene: SideScene) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.story.write(scene.replica, 12)
    scene.replica.delete_until(12)
    assert stands(settle(agent)) == (8, UploadFailureReason.GAP)
    said = len([text for text in scene.tier.told if "leaves a gap" in text])
    scene.tier.hurry()
    settle(agent)
    assert len([text for text in scene.tier.told if "leaves a gap" in text]) == said + 1
    assert metric(agent, "tiered_compactor_agent_refusals_total") == 2
    allowing = scene.agent(allow_gaps=True)
    assert stands(settle(allowing)) == (20, None)
    assert any("are missing" in text for text in scene.tier.told)
    assert scene.tier.held() == [*scene.story.written[:8], *scene.story.written[12:20]]


def test_agent_lists_once_at_its_start_what_waits_for_adoption(scene: SideScene) -> None:
    """The topic was made anew: its directory has another topic id, and retention will take what the tier refuses."""
    scene.replica.topic_id = "Zmlyc3QtdG9waWMtaWQhIQ"
    scene.replica.write()
    assert stands(settle(scene.agent())) == (8, None)
    scene.replica.topic_id = "c2Vjb25kLXRvcGljLWlkIQ"
    scene.story.write(scene.replica, 8)
    agent = scene.agent()
    scene.cluster.retentions["orders"] = 60_000
    assert stands(settle(agent)) == (8, UploadFailureReason.IDENTITY)
    scene.tier.hurry()
    settle(agent)
    (listed,) = [text for text in scene.tier.told if text.startswith("waiting for `topics adopt`")]
    assert "orders-0 (until " in listed


def test_a_topic_that_the_broker_compacts_itself(scene: SideScene) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.story.write(scene.replica, 8)
    scene.one.cleaned(ORDERS, 8)
    assert stands(settle(agent)) == (16, None)
    scene.story.write(scene.replica, 8)
    scene.one.cleaned(ORDERS, 20)
    assert stands(settle(agent)) == (16, UploadFailureReason.COMPACTED)
    assert any("cleanup.policy=delete" in text for text in scene.tier.told)


def test_a_cleaner_that_passes_while_segments_are_read(scene: SideScene, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.story.write(scene.replica, 8)
    scene.one.cleaned(ORDERS, 4)
    read = check_file_parts

    def read_and_cleaned(*arguments: Any) -> list[CheckedFilePart]:
        scene.one.cleaned(ORDERS, 16)
        return read(*arguments)

    monkeypatch.setattr(import_, "check_file_parts", read_and_cleaned)
    assert stands(settle(agent)) == (8, UploadFailureReason.COMPACTED)


def test_another_clusters_log_under_the_same_name(scene: SideScene, tmp_path: Path) -> None:
    assert stands(settle(scene.agent())) == (8, None)
    cluster = SideCluster()
    stranger = SideBroker(tmp_path / "stranger", 1)
    story = PartitionStory(cluster)
    story.log.time = 99_000
    story.lead(1)
    story.write(stranger.replica(), 17)
    before = scene.tier.held()
    assert stands(settle(scene.tier.agent(stranger, cluster))) == (8, UploadFailureReason.CONTENT)
    assert scene.tier.held() == before


def test_a_partition_that_was_deleted_from_the_tier(scene: SideScene) -> None:
    agent = scene.agent()
    assert stands(settle(agent)) == (8, None)
    scene.tier.cli.do("topics", "delete", "orders-0")
    scene.story.write(scene.replica, 8)
    assert stands(settle(agent))[1] is UploadFailureReason.DELETED
    assert stands(settle(scene.agent()))[1] is UploadFailureReason.DELETED
    scene.tier.cli.do("import", scene.replica.folder, "--live")
    scene.tier.hurry()
    assert stands(settle(agent)) == (16, None)
    scene.check(16)


def test_no_broker_answers(scene: SideScene) -> None:
    scene.cluster.down = True
    agent = scene.agent()
    settle(agent)
    asked = scene.cluster.asked
    settle(agent)
    assert scene.cluster.asked == asked  # not before its time
    assert not agent.status().ready
    assert "no broker answers" in RequestRouter(AgentPages(agent.status), agent.loop_age_ms, 1000).respond_to_request("/readyz")[2].decode()
    assert metric(agent, "tiered_compactor_agent_broker_failures_total") == 1
    scene.cluster.down = False
    scene.tier.hurry()
    assert stands(settle(agent)) == (8, None)
    assert agent.status().ready


def test_a_tier_that_cannot_be_made(scene: SideScene, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("no directory")
    scene.tier.cli.set(tier={"url": (tmp_path / "a file" / "tier").as_uri()})
    agent = scene.agent()
    settle(agent)
    assert not agent.status().ready
    assert str(tmp_path / "a file") in agent.status().problem
    (tmp_path / "a file").unlink()
    assert stands(settle(agent)) == (8, None)
    assert agent.status().ready


def test_brokers_of_another_cluster(scene: SideScene) -> None:
    scene.cluster.cluster_id = "another"
    agent = scene.agent()
    settle(agent)
    assert "belong to broker 1 of cluster a-cluster" in agent.status().problem
    assert scene.tier.opened().catalog.refresh().topic_partitions == []


def test_a_directory_that_is_no_brokers_does_not_stop_the_others(scene: SideScene, tmp_path: Path) -> None:
    agent = scene.agent(log_dirs=(str(tmp_path / "nowhere"), str(scene.one.root)))
    assert stands(settle(agent)) == (8, None)
    assert "not a broker's log directory" in agent.status().problem
    assert not agent.status().ready
    other = SideBroker(tmp_path / "other", 2)
    mixed = scene.agent(log_dirs=(str(scene.one.root), str(other.root)))
    settle(mixed)
    assert "One agent, one broker" in mixed.status().problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read(scene: SideScene) -> None:
    _reads_nothing(scene)


def test_a_directory_that_the_system_refuses_to_list(scene: SideScene, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refused(path: Any) -> Any:
        if str(path) == str(scene.replica.folder):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    other = TopicPartition("orders", 1)
    story = PartitionStory(scene.cluster, other)
    story.lead(1)
    story.write(scene.one.replica(other))
    agent = scene.agent()
    assert stands(settle(agent)) == (None, UploadFailureReason.UNREADABLE)
    assert stands(watch_of(agent, other)) == (8, None)
    monkeypatch.undo()
    scene.tier.hurry()
    assert stands(settle(agent)) == (8, None)


def _reads_nothing(scene: SideScene) -> None:
    scene.replica.folder.chmod(0)
    try:
        assert stands(settle(scene.agent())) == (None, UploadFailureReason.UNREADABLE)
    finally:
        scene.replica.folder.chmod(0o755)


@pytest.mark.parametrize("change", ["shrinks", "vanishes", "is renamed"])
def test_files_that_change_while_they_are_read(scene: SideScene, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, first = check_file_parts, scene.replica.folder / f"{0:020}.log"
    changed: list[bytes] = []

    def read_and_changed(*arguments: Any) -> list[CheckedFilePart]:
        found = read(*arguments)
        if not changed:
            changed.append(first.read_bytes())
            if change == "shrinks":
                first.write_bytes(changed[0][:-1])
            elif change == "vanishes":
                first.unlink()
            else:
                first.rename(first.with_name(first.name + ".deleted"))
        return found

    monkeypatch.setattr(import_, "check_file_parts", read_and_changed)
    agent = scene.agent()
    watch = settle(agent)
    if change == "is renamed":
        assert stands(watch) == (8, None)
    else:
        assert stands(watch) == (None, UploadFailureReason.CONTENT)
        first.write_bytes(changed[0])
        scene.tier.hurry()
        assert stands(settle(agent)) == (8, None)
    scene.check(8)


# ---- three ways in which Pinterest's uploader leaves a hole ---------------------------------------------------------------------


class Faulty:
    """A store in which creating what ``broken`` names fails; all else is done."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.broken: tuple[str, ...] = ()
        self.left = 1 << 30

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None, *, may_link: bool = False) -> ObjectInfo:
        self.left -= 1
        if self.left < 0 or any(key.endswith(end) for end in self.broken):
            raise Refused(f"{key}: access denied", hint="Look at the bucket's policy")
        created: ObjectInfo = self._store.create_from_file(key, path, metadata, may_link=may_link)
        return created


def _faulty(scene: SideScene) -> tuple[UploadAgent, Faulty]:
    opened = scene.tier.opened()
    store = Faulty(opened.ports.data)
    opened = opened.with_stores(data=store)
    return scene.tier.agent(scene.one, scene.cluster, opened), store


def test_an_index_that_cannot_be_uploaded_after_the_log_was(scene: SideScene) -> None:
    agent, store = _faulty(scene)
    store.broken = (".index",)
    assert stands(settle(agent)) == (None, UploadFailureReason.STORE)
    assert "access denied" in agent.status().problem
    scene.story.write(scene.replica, 8)
    scene.tier.hurry()
    settle(agent)
    assert scene.tier.cli.do("topics")["partitions"] in ([], [{**row, "segments": 0} for row in scene.tier.cli.do("topics")["partitions"]])
    store.broken = ()
    scene.tier.hurry()
    assert stands(settle(agent)) == (16, None)
    assert agent.status().ready
    scene.check(16)


@pytest.mark.parametrize("uploaded", range(1, 14, 3))
def test_a_crash_between_any_two_objects(scene: SideScene, uploaded: int) -> None:
    """Whatever was uploaded before the crash, also of a later segment: the next start goes on at the tier's end."""
    agent, store = _faulty(scene)
    store.left = uploaded
    settle(agent)
    scene.story.write(scene.replica, 4)
    scene.tier.hurry(70_000)
    assert stands(settle(scene.agent())) == (12, None)
    scene.check(12)
    assert scene.tier.cli.do("verify")["ok"]
