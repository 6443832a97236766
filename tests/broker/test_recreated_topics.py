"""A topic that is deleted and created again beside an agent: two incarnations, and the cluster's word about the id of the former one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compactor.access.tier import Tier
from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka
from compactor.adapters.brokers.cluster import query_topic_ids
from compactor.adapters.kafka_client import KafkaConnection
from compactor.control.incarnations import CONFIRMATION_MS
from compactor.model.remote_log import ExistingAndMissingTopicIds
from compactor.upkeep.retire import delete_missing_topics
from tests.support.agents import beside
from tests.support.deployment import Deployment
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import WrittenPartition
from tests.support.tier_cli import visible

STOCK = {"remote.storage.enable": "false", "cleanup.policy": "delete", "local.retention.bytes": "-2"}
USERS = {"nobody": "secret"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", ["4.4.0", pytest.param("3.9.2", marks=pytest.mark.slow_broker)])
def test_a_topic_that_is_created_again_has_a_log_of_its_own_and_the_former_one_goes_by_its_id(
    version: str, new_cluster: Callable[..., KafkaCluster], tmp_path: Path
) -> None:
    cluster = new_cluster(version, users=USERS, settings={"remote.log.storage.system.enable": "false"})
    tier = Deployment(tmp_path / "the tier", {"publish": {"grace_ms": 0}})
    broker = cluster.nodes[cluster.node_ids[0]]
    with ClusterAdmin(cluster) as admin:
        first = TopicStory(cluster, admin, "orders").create(STOCK).tell()
        connection = KafkaConnection(cluster.bootstrap, {})
        leaders = AgentClusterQueriesOverKafka(connection)
        first_id = leaders.topic_ids(["orders"]).topic_ids["orders"]

        def in_tier(topic_id: str) -> bool:
            rows = (tier.ask("topics").document or {"partitions": []})["partitions"]
            ends = {row["topic_id"]: row["end_offset"] for row in rows}
            return ends.get(topic_id) == admin.active_base("orders") - 1

        with beside(cluster, cluster.node_ids[0], tier, ["orders"]) as agent:
            wait_until(lambda: in_tier(first_id), "the first topic to be in the tier", stand=agent.process.said)
            wait_until(lambda: first_id in tier.opened().catalog.refresh().topic_clusters, "its cluster to be recorded")
            shutil.copytree(broker.log_dir / "orders-0", tmp_path / "stray")
            assert query_topic_ids(connection, [first_id]).present == (first_id,)
            admin.delete_topic("orders")
            again = TopicStory(cluster, admin, "orders", seed=2).create(STOCK).tell()
            second_id = leaders.topic_ids(["orders"]).topic_ids["orders"]
            wait_until(lambda: in_tier(second_id), "the second topic to be in the tier", stand=agent.process.said)
        cluster_id = query_topic_ids(connection, []).cluster_id
        assert query_topic_ids(connection, [first_id, second_id]) == ExistingAndMissingTopicIds(cluster_id, (first_id,), (second_id,))
        login = cluster.client_settings("nobody")
        nobody = KafkaConnection(login.pop("bootstrap.servers"), login)
        assert query_topic_ids(nobody, [second_id]) == ExistingAndMissingTopicIds(cluster_id, (), ()), (
            "who may not describe a topic hears nothing"
        )
        rows = tier.do("topics")["partitions"]
        assert [(row["incarnation"], row["topic_id"], row["superseded_by"]) for row in rows] == [
            (1, first_id, second_id),
            (2, second_id, ""),
        ]
        assert_exported(tier, tmp_path / "first", first.partitions[0], "--topic-id", first_id)
        assert_exported(tier, tmp_path / "second", again.partitions[0])
        stray = tier.ask("import", tmp_path / "stray", "--topic", "orders", "--partition", 0)
        assert (stray.code, first_id in stray.stderr, second_id in stray.stderr) == (3, True, True)

        def ask_at(later_ms: int) -> list[str]:
            opened = with_clocks(tier, cluster, later_ms)
            return [str(name) for name in delete_missing_topics(opened, lambda ids: query_topic_ids(connection, ids))]

        assert ask_at(0) == ask_at(CONFIRMATION_MS - 1) == ask_at(CONFIRMATION_MS) == []
        assert ask_at(2 * CONFIRMATION_MS) == ["orders-0"]
        tier.do("retire")
        assert [row["topic_id"] for row in tier.do("topics")["partitions"]] == [second_id]
        assert_exported(tier, tmp_path / "still", again.partitions[0])
        assert tier.do("verify")["ok"]


def with_clocks(tier: Deployment, cluster: KafkaCluster, later_ms: int) -> Tier:
    """Open the tier with deletion of removed topics after two hours, at a time that both clocks give."""
    opened = tier.opened()
    now_ms = opened.ports.control.clock_ms() // 3_600_000 * 3_600_000 + later_ms
    control = opened.ports.control

    class Later:
        def __getattr__(self, name: str) -> object:
            return getattr(control, name)

        def clock_ms(self) -> int:
            return now_ms

    removal = {"on_topic_deletion": "delete", "deleted_topic_retention_ms": 2 * CONFIRMATION_MS}
    kafka = opened.settings.kafka.model_copy(update={"bootstrap_servers": cluster.bootstrap})
    settings = opened.settings.model_copy(update={"tier": opened.settings.tier.model_copy(update=removal), "kafka": kafka})
    ports = replace(opened.ports, clock_ms=lambda: now_ms, control=Later())  # type: ignore[arg-type]
    return replace(opened.with_stores(), settings=settings, ports=ports)


def assert_exported(tier: Deployment, target: Path, model: WrittenPartition, *options: str) -> None:
    """What is exported is what producers wrote, up to the last sealed segment."""
    tier.do("export", "orders-0", target, *options)
    held = visible(target)
    stable = held[-1][0]
    assert held
    assert [(offset, key, value) for offset, _, key, value, _ in held] == [
        (record.offset, record.key, record.value) for record in model.committed() if record.offset <= stable
    ]
