"""Share groups (KIP-932) read a tier before and after it is compacted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker.test_compaction import BrokerTierCli, cli
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, READ_UNCOMMITTED, consume

__all__ = ["cli"]
pytestmark = [pytest.mark.slow_broker, pytest.mark.timeout(900)]
MODES = ("batch_optimized", "record_limit")


def read_by_share_group(cluster: KafkaCluster, topic: str, mode: str, count: int, isolation: str, name: str) -> list[int]:
    """Return the offsets that a new share group gets, until it has so many."""
    program = cluster.jars.command(str(Path(__file__).with_name("ReadByShareGroup.java")))
    done = subprocess.run(
        [*program, cluster.bootstrap, topic, mode, str(count), isolation, f"{name}-{mode}-{isolation}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted({int(offset) for offset in done.stdout.split()})


def test_share_groups_read_each_record_of_a_tier_before_and_after_its_compaction(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    replicas = {"share.coordinator.state.topic.replication.factor": "1", "share.coordinator.state.topic.min.isr": "1"}
    with new_cluster("4.4.0", settings=replicas) as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "orders").create().tell()
        story.tiered()
        ours = cli(cluster, "orders")
        for is_compacted in (False, True):
            if is_compacted:
                [done] = ours.process("run")["partitions"]
                assert done["status"] == "cleaned"
                ours.process("retire")
            for isolation in (READ_UNCOMMITTED, READ_COMMITTED):
                expected = [record.offset for record in consume(cluster, "orders", isolation=isolation)]
                for mode in MODES:
                    found = read_by_share_group(cluster, "orders", mode, len(expected), isolation, f"{is_compacted}")
                    assert found == expected
