"""What is set for compaction on a topic in its cluster: agents and imports record it, processes without brokers clean the tier by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compactor.adapters.brokers.admin import KafkaAdmin, KafkaSetting
from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka
from compactor.adapters.kafka_client import KafkaConnection
from compactor.cli.commands import import_ as import_command
from compactor.constants import TopicId
from compactor.control.incarnations import changes_by_topic_record
from compactor.control.records import TopicsConfirmed
from compactor.control.state import CatalogState
from compactor.errors import Refused
from compactor.features.agent.agent import TOPIC_SETTINGS_MS
from compactor.model.remote_log import ClusterTopicIds
from tests.builders import LogBuilder
from tests.support.deployment import Deployment
from tests.support.side_broker import SideScene, settle

ID, OTHER = TopicId("AAAAAAAAAAAAAAAAAAAAAQ"), TopicId("AAAAAAAAAAAAAAAAAAAAAg")
LAG = {"min.compaction.lag.ms": "9000000000000"}
HELD = "It is not due: min_compaction_lag_ms has not passed."


@pytest.fixture
def scene(tmp_path: Path) -> SideScene:
    scene = SideScene.in_folder(tmp_path)
    scene.replica.topic_id = ID
    scene.replica.write()
    scene.cluster.topic_ids_of["orders"] = ID
    return scene


def recorded(scene: SideScene) -> dict[str, dict[str, str]]:
    return scene.tier.opened().catalog.refresh().topic_settings


def explained(cli: Deployment) -> tuple[str, dict[str, Any]]:
    """The answer, and the settings with their sources."""
    found = cli.do("explain", "orders-0")
    (fact,) = [fact for fact in found["facts"] if fact["kind"] == "settings"]
    return found["answer"], fact["settings"]


def test_a_round_without_brokers_holds_back_what_the_topics_lag_protects(scene: SideScene) -> None:
    scene.cluster.compaction_settings_of["orders"] = LAG
    settle(scene.agent())
    cli = scene.tier.cli
    answer, settings = explained(cli)
    assert answer == HELD
    assert settings["min_compaction_lag_ms"] == {"value": 9_000_000_000_000, "source": "topic orders"}
    assert settings["delete_retention_ms"] == {"value": 86_400_000, "source": "default"}
    shown = {row["key"]: row for row in cli.do("config", "show", "--topic", "orders")["settings"]}
    assert shown["cleaner.min_compaction_lag_ms"]["source"] == "topic orders"
    held = scene.tier.held()
    cli.do("run", "--force")
    assert scene.tier.held() == held
    cli.set(**{'topics."orders"': {"min_compaction_lag_ms": 0}})
    assert "topics" in explained(cli)[1]["min_compaction_lag_ms"]["source"], "our file wins"
    cli.do("run", "--force")
    assert scene.tier.held() != held


def test_changes_are_recorded_and_a_topic_that_is_compacted_no_more_has_no_settings(scene: SideScene) -> None:
    agent = scene.agent()
    settle(agent)
    assert recorded(scene) == {}
    for reported in (LAG, LAG | {"delete.retention.ms": "5"}, {}):
        scene.cluster.compaction_settings_of["orders"] = reported
        settle(agent)
        scene.tier.hurry(TOPIC_SETTINGS_MS)
        settle(agent)
        assert recorded(scene) == ({"orders": reported} if reported else {})


def test_settings_that_may_not_be_read_leave_what_is_recorded_and_are_told_once(scene: SideScene) -> None:
    scene.cluster.compaction_settings_of["orders"] = LAG
    agent = scene.agent()
    settle(agent)
    scene.cluster.compaction_settings_of["orders"] = None
    for _ in range(2):
        scene.tier.hurry(TOPIC_SETTINGS_MS)
        settle(agent)
    assert recorded(scene) == {"orders": LAG}
    assert len([line for line in scene.tier.told if "compaction on orders is unknown: DESCRIBE_CONFIGS" in line]) == 1


def test_a_topic_with_another_id_in_the_cluster_is_not_the_tiers(scene: SideScene) -> None:
    scene.cluster.topic_ids_of["orders"] = OTHER
    scene.cluster.compaction_settings_of["orders"] = LAG
    settle(scene.agent())
    assert recorded(scene) == {}


def test_topics_that_begin_with_two_underscores_are_named_once_as_left_out(scene: SideScene) -> None:
    for number in (0, 1):
        (scene.one.root / f"__consumer_offsets-{number}").mkdir()
    agent = scene.agent(topics=("orders", ".*offsets"))
    settle(agent)
    settle(agent)
    assert len([line for line in scene.tier.told if line.startswith("__consumer_offsets is left out")]) == 1


@pytest.mark.parametrize("allowed", [True, False])
def test_an_import_records_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    monkeypatch.setattr(import_command, "create_topic_ids_query", lambda _: lambda topics: ClusterTopicIds("cluster", {"orders": ID}))
    monkeypatch.setattr(import_command, "create_topic_settings_query", lambda _: lambda topics: {"orders": LAG if allowed else None})
    log = LogBuilder(topic_id=ID).add("a=1 a=2")
    cli = Deployment(tmp_path)
    answer = cli.ask("import", log.write(tmp_path / "log"), "--topic", "orders", "--partition", 0)
    assert answer.code == 0
    assert ("compaction on orders is unknown" in answer.stderr) is not allowed
    assert (explained(cli)[0] == HELD) is allowed


def test_a_topics_least_lag_holds_against_a_greatest_lag_of_the_file_that_is_shorter(scene: SideScene) -> None:
    """Kafka refuses such a pair. Here it may not stop the tier's other topics, and what protects records counts."""
    scene.cluster.compaction_settings_of["orders"] = LAG
    settle(scene.agent())
    scene.tier.cli.set(cleaner={"max_compaction_lag_ms": 1_000})
    answer, settings = explained(scene.tier.cli)
    assert answer == HELD
    assert settings["max_compaction_lag_ms"] == {"value": 9_000_000_000_000, "source": "min_compaction_lag_ms"}
    assert scene.tier.cli.ask("run", "--force").code == 0


@pytest.mark.parametrize(
    ("cluster", "topic_id"), [("another", ID), ("cluster", OTHER)], ids=["another cluster's", "of a topic that was superseded"]
)
def test_nobody_elses_settings_apply(cluster: str, topic_id: TopicId) -> None:
    state = CatalogState(topic_clusters={ID: "cluster"}, topic_settings={"orders": LAG}, superseded={"orders": {OTHER: ID}})
    body = TopicsConfirmed(cluster_id=cluster, topic_ids={"orders": topic_id}, settings={"orders": {"delete.retention.ms": "0"}})
    state = state.model_copy(update=changes_by_topic_record(state, body))
    assert state.topic_settings == {"orders": LAG}


@pytest.mark.parametrize(("policy", "chosen"), [("compact", LAG), ("compact,delete", LAG), ("delete", {}), ("", {})])
def test_only_what_is_set_on_a_topic_that_brokers_compact_counts(
    policy: str, chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {name: KafkaSetting(value, "topic") for name, value in (LAG | {"segment.bytes": "1048576"}).items()}
    settings |= {"cleanup.policy": KafkaSetting(policy, "topic"), "delete.retention.ms": KafkaSetting("7", "static")}
    monkeypatch.setattr(KafkaAdmin, "read_topic_settings", lambda *_: {"orders": settings, "secret": Refused("no right")})
    queries = AgentClusterQueriesOverKafka(KafkaConnection("127.0.0.1:1"))
    assert queries.compaction_settings(["orders", "secret"]) == {"orders": chosen, "secret": None}
