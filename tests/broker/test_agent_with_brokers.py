"""A stock topic with short retention, an agent beside each of two brokers, leaders that move: nothing is lost between broker and tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.agents import AgentBeside, beside
from tests.support.deployment import Deployment
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import consume
from tests.support.tier_cli import latest, visible

STOCK = {"remote.storage.enable": "false", "cleanup.policy": "delete", "local.retention.bytes": "-2", "retention.bytes": "131072"}


@pytest.fixture
def cluster(new_cluster: Callable[..., KafkaCluster]) -> KafkaCluster:
    return new_cluster(brokers=2, settings={"remote.log.storage.system.enable": "false"})


@pytest.fixture
def admin(cluster: KafkaCluster) -> Iterator[ClusterAdmin]:
    with ClusterAdmin(cluster) as made:
        yield made


@pytest.mark.timeout(300)
def test_leaders_move_and_retention_deletes_behind_the_agents(cluster: KafkaCluster, admin: ClusterAdmin, tmp_path: Path) -> None:
    tier = Deployment(tmp_path / "the tier", {"publish": {"grace_ms": 0}, "cleaner": {"delete_retention_ms": 0}})
    story = TopicStory(cluster, admin, "orders").create(STOCK)
    with ExitStack() as stack:
        agents: dict[int, AgentBeside] = {node: stack.enter_context(beside(cluster, node, tier, ["orders"])) for node in cluster.node_ids}

        def tier_end() -> int:
            found = tier.ask("checkpoints", "show", "orders-0").document
            return int(found["end_offset"]) if found else -1

        def caught_up() -> bool:
            return tier_end() == admin.active_base("orders") - 1

        for chapter in range(4):
            if chapter == 3:
                agents[admin.leadership("orders").leader].restart()  # killed; it leads no more when it is back
            if chapter:
                story.new_epoch()
            story.tell(1)
            wait_until(
                caught_up,
                f"chapter {chapter} to be in the tier",
                stand=lambda: f"{tier_end()}\n" + "\n".join(a.process.said()[-900:] for a in agents.values()),
            )
        wait_until(lambda: admin.offsets("orders").earliest > 0, "retention to delete")
        assert all(agent.process.poll() is None for agent in agents.values())
    end, broker_start = tier_end(), admin.offsets("orders").earliest
    assert 0 < broker_start <= end + 1
    model = story.partitions[0]
    held = visible(tier.export(tmp_path / "as uploaded"))
    # read_committed of the tier ends before the first transaction that is open at its end; what follows is the broker's.
    stable = held[-1][0]
    assert [(offset, key, value) for offset, _, key, value, _ in held] == [
        (record.offset, record.key, record.value) for record in model.committed() if record.offset <= stable
    ]
    assert consume(cluster, "orders", start=end + 1) == [record for record in model.uncommitted() if record.offset > end]
    assert tier.do("verify")["ok"]
    row = tier.do("run", "--force", "orders-0")["partitions"][0]
    assert row["status"] == "cleaned"
    expected = {r.key: r.value for r in model.committed() if r.offset <= stable and r.key is not None}
    assert latest(tier.export(tmp_path / "compacted")) == {key: value for key, value in expected.items() if value is not None}
