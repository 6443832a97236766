"""An agent beside each of two older brokers, with KRaft and with ZooKeeper: who leads, in which epoch, and how far, is asked in one way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka, LeaderReportedLogEnd
from compactor.adapters.kafka_client import KafkaConnection
from compactor.constants import LeaderEpoch
from compactor.model.ids import TopicPartition
from tests.support.agents import AgentBeside, beside
from tests.support.deployment import Deployment
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import BrokerUnavailable
from tests.support.kafka_story import TopicStory
from tests.support.tier_cli import visible
from tests.support.zookeeper_cluster import VERSION, ZooKeeperCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow_broker]

ORDERS = TopicPartition("orders", 0)
STOCK = {"remote.storage.enable": "false", "cleanup.policy": "delete", "local.retention.bytes": "-2"}


@contextmanager
def _with_zookeeper(folder: Path) -> Iterator[KafkaCluster]:
    try:
        prepare(VERSION)
    except BrokerUnavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI has to run the tests with a real broker: {error}", pytrace=False)
        pytest.skip(str(error))
    with ZooKeeperCluster(folder, brokers=2) as made:
        yield made


@pytest.fixture(params=["KRaft", "ZooKeeper"])
def cluster(request: pytest.FixtureRequest, new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> Iterator[KafkaCluster]:
    if request.param == "KRaft":
        yield new_cluster(VERSION, brokers=2, settings={"remote.log.storage.system.enable": "false"})
    else:
        with _with_zookeeper(tmp_path / "with ZooKeeper") as made:
            yield made


@pytest.mark.timeout(300)
def test_leaders_move_between_older_brokers(cluster: KafkaCluster, tmp_path: Path) -> None:
    tier = Deployment(tmp_path / "the tier", {"publish": {"grace_ms": 0}})
    with ExitStack() as stack:
        admin = stack.enter_context(ClusterAdmin(cluster))
        story = TopicStory(cluster, admin, "orders").create(STOCK)
        asked = AgentClusterQueriesOverKafka(KafkaConnection(cluster.bootstrap))
        agents: list[AgentBeside] = [stack.enter_context(beside(cluster, node, tier, ["orders"])) for node in cluster.node_ids]

        def caught_up() -> bool:
            found = tier.ask("checkpoints", "show", "orders-0").document
            return bool(found) and int(found["end_offset"]) == admin.active_base("orders") - 1

        for chapter in range(3):
            if chapter:
                story.new_epoch()
            story.tell(1)
            wait_until(caught_up, f"chapter {chapter} to be in the tier", stand=lambda: "\n".join(a.process.said()[-900:] for a in agents))
            now = admin.leadership("orders")
            assert asked.leaders().leaders[ORDERS] == now.leader
            assert asked.log_ends([ORDERS]) == {ORDERS: LeaderReportedLogEnd(LeaderEpoch(now.leader_epoch), admin.offsets("orders").latest)}
        assert all(agent.process.poll() is None for agent in agents)
    assert len(story.epochs) == 3
    state = tier.opened().open_partition_log(ORDERS).refresh()
    assert {entry.epoch for entry in state.lineage} == story.epochs
    held = visible(tier.export(tmp_path / "as uploaded"))
    stable = held[-1][0]
    assert [(offset, key, value) for offset, _, key, value, _ in held] == [
        (record.offset, record.key, record.value) for record in story.partitions[0].committed() if record.offset <= stable
    ]
    assert tier.do("verify")["ok"]
