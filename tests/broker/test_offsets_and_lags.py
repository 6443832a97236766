"""What brokers answer when a tier is asked for by kind of offset, and when they upload (KIP-1005, KIP-1023, KIP-1241)."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource as LibrdkafkaResource
from confluent_kafka.admin._resource import ResourceType
from kafka import TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.protocol.consumer import OffsetSpec

from tests.broker.test_compaction import BrokerTierCli, cli
from tests.broker.test_holes_and_policies import HOUR_MS, write
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_jars import TOOLS, broker_jars

__all__ = ["cli"]
pytestmark = pytest.mark.timeout(900)
KEPT = {"local.retention.bytes": "-2"}
"""Local retention is that of the topic, without end."""
RELEASES = ["4.4.0", *(pytest.param(release, marks=pytest.mark.slow_broker) for release in ("4.3.1", "3.9.2"))]


def write_records(cluster: KafkaCluster, topic: str, count: int, newest: int = -1) -> None:
    """Write records that are an hour old, ten in a segment, each a millisecond younger than the one before. ``newest``: the one of now."""
    now = int(time.time() * 1000)
    keys = [f"k{number}" for number in range(count)]
    write(cluster, topic, keys, lambda number: now if number == newest else now - HOUR_MS + number)


def listed(admin: ClusterAdmin, topic: str) -> tuple[int, int, int, int]:
    """Return earliest, latest, earliest local and latest tiered offset."""
    return astuple(admin.offsets(topic))


def offset_of_newest(admin: ClusterAdmin, topic: str) -> int:
    where = TopicPartition(topic, 0)
    return int(admin._client.list_partition_offsets({where: OffsetSpec.MAX_TIMESTAMP})[where].offset)


def last_tiered_offset(ours: BrokerTierCli) -> int:
    """Return the end of the tier of ``bare-0`` as this program reads it."""
    return max(int(one["end_offset"]) for one in ours.process("segments", "list", "bare-0")["segments"])


def pending_upload(cluster: KafkaCluster, topic: str) -> int:
    """Return the EARLIEST_PENDING_UPLOAD offset by Kafka's own tool, which prints nothing for -1."""
    tool = broker_jars(TOOLS).command("org.apache.kafka.tools.GetOffsetShell")
    command = [*tool, "--bootstrap-server", cluster.bootstrap, "--topic", topic, "--time", "earliest-pending-upload"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.rpartition(":")[2] or -1)


def restart(cluster: KafkaCluster, admin: ClusterAdmin, topic: str) -> None:
    cluster.restart()
    wait_until(lambda: admin.leadership(topic).leader > 0 and admin.offsets(topic).latest >= 0, f"{topic} to be led again")


def set_default_policy(admin: ClusterAdmin, policy: str) -> None:
    setting = ConfigResource(ConfigResourceType.BROKER, "1", {"log.cleanup.policy": policy})
    admin._client.alter_configs([setting], raise_on_unknown=False)


@pytest.mark.parametrize("release", RELEASES)
def test_the_newest_record_is_looked_for_among_local_ones_only_and_also_below_the_log_start(
    new_cluster: Callable[..., KafkaCluster], release: str
) -> None:
    with new_cluster(release) as cluster, ClusterAdmin(cluster) as admin:
        admin.create_topic("local", settings=KEPT)
        write_records(cluster, "local", 8, newest=3)
        admin.delete_records("local", 0, 5)
        assert listed(admin, "local")[0] == 5
        assert offset_of_newest(admin, "local") == 3

        admin.create_topic("tiered")
        write_records(cluster, "tiered", 40, newest=3)
        assert offset_of_newest(admin, "tiered") == 3
        admin.wait_tiered("tiered")
        assert offset_of_newest(admin, "tiered") == 39


@pytest.mark.parametrize("release", RELEASES)
def test_the_latest_tiered_offset_stays_behind_after_a_policy_was_compact_for_a_while(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], release: str
) -> None:
    """Uploads go on meanwhile. What this program reads of the tier's end comes from the metadata topic, and is right throughout."""
    with new_cluster(release) as cluster, ClusterAdmin(cluster) as admin:
        small = "internal.segment.bytes" if release.startswith("4") else "segment.bytes"
        own = {"remote.storage.enable": "true", "retention.ms": "-1", "local.retention.bytes": "1", "file.delete.delay.ms": "100"}
        admin._client.create_topics({"bare": {"num_partitions": 1, "replication_factor": 1, "configs": {**own, small: "16384"}}})
        write_records(cluster, "bare", 40)
        admin.wait_tiered("bare")
        assert listed(admin, "bare") == (0, 40, 30, 29)

        set_default_policy(admin, "compact")
        wait_until(lambda: listed(admin, "bare") == (0, 40, 0, -1), "the tier to be left out of the answers")
        write_records(cluster, "bare", 40)
        ours = cli(cluster, "bare")
        wait_until(lambda: last_tiered_offset(ours) == 69, "uploads to go on")
        time.sleep(1)  # a broker notes what it has uploaded after it has recorded it
        set_default_policy(admin, "delete")
        wait_until(lambda: admin.offsets("bare").latest_tiered != -1, "the tier to be back in the answers")
        time.sleep(3)  # in which brokers would look for copies a few times
        assert listed(admin, "bare") == (0, 80, 30, 29)

        restart(cluster, admin, "bare")
        wait_until(lambda: listed(admin, "bare") == (0, 80, 70, 69), "a restart to mend it")


@pytest.mark.parametrize("release", RELEASES[:-1])
def test_a_tier_of_which_everything_has_expired_has_no_offset_that_waits_for_its_upload(
    new_cluster: Callable[..., KafkaCluster], release: str
) -> None:
    with new_cluster(release) as cluster, ClusterAdmin(cluster) as admin:
        admin.create_topic("gone")
        write_records(cluster, "gone", 40)
        admin.wait_tiered("gone")
        assert pending_upload(cluster, "gone") == 30
        admin.set_config("gone", {"remote.storage.enable": "true", "retention.ms": "1000", "local.retention.ms": "1000"})
        wait_until(lambda: admin.offsets("gone").earliest == 40 and not admin.tier_files("gone"), "all of it to expire", seconds=90)
        assert admin.offsets("gone").latest == 40
        assert pending_upload(cluster, "gone") == -1
        restart(cluster, admin, "gone")
        admin.set_config("gone", {"remote.storage.enable": "true", "retention.ms": "-1", "local.retention.ms": "-2"})
        write_records(cluster, "gone", 3)
        assert listed(admin, "gone") == (40, 43, 40, -1)
        assert pending_upload(cluster, "gone") == 40


def alter(cluster: KafkaCluster, topic: str, setting: str, value: str) -> str:
    """Set one setting of a topic. Returns why it was refused, or the empty text."""
    change = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    client = AdminClient({**cluster.client_settings()})
    [done] = client.incremental_alter_configs([LibrdkafkaResource(ResourceType.TOPIC, topic, incremental_configs=[change])]).values()
    try:
        done.result(20)
    except KafkaException as error:
        return str(error.args[0].str())
    return ""


LAGS = ("remote.copy.lag.ms", "remote.copy.lag.bytes")


def test_lags_of_uploads_are_as_this_program_understands_them(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    broker_admin.create_topic("lags", settings=KEPT)
    client = AdminClient({**broker.client_settings()})
    [found] = client.describe_configs([LibrdkafkaResource(ResourceType.TOPIC, "lags")]).values()
    assert [found.result(20)[name].value for name in LAGS] == ["0", "-1"]
    for name in LAGS:
        assert "Value must be at least -1" in alter(broker, "lags", name, "-2")
    assert alter(broker, "lags", "local.retention.ms", "60000") == ""
    assert "Value must not exceed local.retention.ms (effective value: 60000)" in alter(broker, "lags", LAGS[0], "60001")

    uploads: dict[str, tuple[dict[str, str], int]] = {
        "never": ({LAGS[0]: "-1"}, -1),
        "by-local-size": ({LAGS[0]: "-1", "local.retention.bytes": "40000"}, 29),
        "by-size": ({LAGS[0]: "-1", LAGS[1]: "40000"}, 29),
        "by-either": ({LAGS[0]: str(2 * HOUR_MS), LAGS[1]: "40000"}, 29),
        "at-once": ({LAGS[0]: str(2 * HOUR_MS), LAGS[1]: "0"}, 49),
    }
    for topic, (settings, _) in uploads.items():
        broker_admin.create_topic(topic, settings={**KEPT, **settings})
        write_records(broker, topic, 60)
    for topic, (_, tiered) in uploads.items():
        wait_until(lambda: broker_admin.offsets(topic).latest_tiered == tiered, f"{topic} to be tiered up to {tiered}")  # noqa: B023
    time.sleep(3)  # in which brokers would look for copies a few times
    assert {topic: broker_admin.offsets(topic).latest_tiered for topic in uploads} == {name: one for name, (_, one) in uploads.items()}

    def told(problems: Sequence[dict[str, Any]]) -> dict[str, str]:
        return {one.get("topic") or one["object"]: one["severity"] for one in problems if one["kind"] == "copy-lag"}

    expected = {"never": "warning", "by-local-size": "note", "by-size": "note", "by-either": "note"}
    ours = cli(broker, *uploads)
    assert told(ours.process("doctor")["problems"]) == expected
    tiered_topics = {name: severity for name, severity in expected.items() if severity == "note"}
    assert told(ours.process("config", "check", code=None)["problems"]) == tiered_topics
