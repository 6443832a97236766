"""A topic of low volume beside an agent: retention rolls each segment and stages it for deletion in one pass, and nothing is missed."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka
from compactor.adapters.kafka_client import KafkaConnection
from tests.support.agents import beside
from tests.support.deployment import Deployment
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.tier_cli import visible

# Records of the past: they expire with the next look of retention, every 500 ms, long before their segment is full.
LOW_VOLUME = {
    "remote.storage.enable": "false",
    "cleanup.policy": "delete",
    "local.retention.bytes": "-2",
    "retention.ms": "1000",
    "file.delete.delay.ms": "5000",
}


@pytest.mark.timeout(300)
def test_segments_that_are_rolled_and_staged_in_one_pass_are_not_missed(new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    # A first upload begins at the log start of the broker's checkpoint, which is written every minute: here, not while the test runs.
    settings = {"remote.log.storage.system.enable": "false", "log.flush.start.offset.checkpoint.interval.ms": "3600000"}
    cluster = new_cluster(brokers=1, settings=settings)
    tier = Deployment(tmp_path / "the tier", {"publish": {"grace_ms": 0}})
    with ClusterAdmin(cluster) as admin, beside(cluster, cluster.node_ids[0], tier, ["orders"]) as agent:
        story = TopicStory(cluster, admin, "orders", segment_bytes=1 << 20).create(LOW_VOLUME)

        def partition() -> dict[str, object]:
            with urllib.request.urlopen(f"{agent.address}api/partitions/orders-0") as answer:
                document: dict[str, object] = json.load(answer)
            return document

        def is_led() -> bool:
            try:
                return bool(partition()["leads"]) and "leader_epoch" in str(partition()["row"]) and partition()["checked_ms"] is not None
            except OSError:
                return False

        def tier_end() -> int:
            found = tier.ask("checkpoints", "show", "orders-0").document
            return int(found["end_offset"]) if found else -1

        def expired_and_held() -> bool:
            offsets = admin.offsets("orders")
            return offsets.earliest == offsets.latest == tier_end() + 1

        assert AgentClusterQueriesOverKafka(KafkaConnection(cluster.bootstrap)).delete_delay_ms("orders") == 5000
        wait_until(is_led, "the agent to know the leader", stand=agent.process.said)
        for _ in range(4):
            story.plain(count=3)
            wait_until(
                expired_and_held, "what has expired to be in the tier", stand=lambda: f"{tier_end()}\n{agent.process.said()[-3000:]}"
            )
            folder = cluster.nodes[cluster.node_ids[0]].log_dir / "orders-0"
            assert [path.stat().st_size for path in folder.glob("*.log")] == [0], "no sealed segment has ever been there"
        said = agent.process.said()
        assert "were taken from files that the broker has staged for deletion" in said
        assert "is not taken" not in said
    held = visible(tier.export(tmp_path / "as uploaded"))
    model = story.partitions[0]
    assert [(offset, key, value) for offset, _, key, value, _ in held] == [(r.offset, r.key, r.value) for r in model.committed()]
    assert tier.do("verify")["ok"]
