"""MirrorMaker 2 copies a compacted tier to another topic, and GetOffsetShell answers for the tier."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.broker.test_compaction import BrokerTierCli, cli
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_jars import TOOLS, broker_jars, maven_jars
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, READ_UNCOMMITTED, BrokerRecord, TrafficFailed, consume

__all__ = ["cli"]
pytestmark = [pytest.mark.slow_broker, pytest.mark.timeout(600)]
VERSION = "4.3.1"
STORED = ("checkpoints.topic", "heartbeats.topic", "offset-syncs.topic", "offset.storage", "status.storage", "config.storage")


@contextmanager
def mirroring(cluster: KafkaCluster, topic: str, file: Path, isolation: str) -> Iterator[None]:
    """Copy a topic of the cluster ``from`` to the cluster ``to``, which are the same one, as ``from.TOPIC``."""
    settings = {
        "clusters": "from, to",
        "from.bootstrap.servers": cluster.bootstrap,
        "to.bootstrap.servers": cluster.bootstrap,
        "from->to.enabled": "true",
        "from->to.topics": topic,
        "to->from.enabled": "false",
        "from.consumer.isolation.level": isolation,
        **{f"{name}replication.factor": "1" for name in ("", *(f"{each}." for each in STORED))},
    }
    file.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
    program = maven_jars(f"mirror-{VERSION}", Path(__file__).with_name("mirror.xml")).command(
        "org.apache.kafka.connect.mirror.MirrorMaker", heap_mb=400
    )
    with file.with_suffix(".log").open("wb") as log, subprocess.Popen([*program, str(file)], stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.kill()


def contents(records: list[BrokerRecord]) -> list[tuple[Any, ...]]:
    """Records without their offsets, which a copy numbers anew."""
    return [(record.timestamp, record.key, record.value, record.headers) for record in records]


def copied(cluster: KafkaCluster, topic: str) -> list[tuple[Any, ...]]:
    try:
        return contents(consume(cluster, topic))
    except TrafficFailed:  # the topic is not there yet
        return []


def offsets(cluster: KafkaCluster, topic: str) -> dict[str, int]:
    """Return what GetOffsetShell prints for each kind of offset."""
    tool = broker_jars(TOOLS).command("org.apache.kafka.tools.GetOffsetShell")
    found = {}
    for kind in ("earliest", "latest", "max-timestamp", "earliest-local", "latest-tiered", "earliest-pending-upload"):
        done = subprocess.run(
            [*tool, "--bootstrap-server", cluster.bootstrap, "--topic", topic, "--time", kind], capture_output=True, text=True, check=True
        )
        found[kind] = int(done.stdout.rpartition(":")[2])
    return found


@pytest.mark.parametrize("isolation", [READ_COMMITTED, READ_UNCOMMITTED])
def test_a_copy_of_a_compacted_tier_has_the_records_that_consumers_of_its_isolation_read(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], tmp_path: Path, isolation: str
) -> None:
    with new_cluster("4.4.0") as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "orders").create().tell()
        story.tiered()
        before = offsets(cluster, "orders")
        ours = cli(cluster, "orders")
        [done] = ours.process("run")["partitions"]
        assert done["status"] == "cleaned"
        ours.process("retire")
        assert offsets(cluster, "orders") == before
        expected = contents(consume(cluster, "orders", isolation=isolation))
        with mirroring(cluster, "orders", tmp_path / "mirror.properties", isolation):
            wait_until(lambda: len(copied(cluster, "from.orders")) >= len(expected), "all records to be copied", seconds=90)
        assert copied(cluster, "from.orders") == expected
