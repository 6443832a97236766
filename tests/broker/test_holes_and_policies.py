"""What brokers leave in a tier: holes of topics that they compacted before, policies that Kafka lets pass, lookups by time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType

from tests.broker.test_compaction import BrokerTierCli, cli
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_traffic import SILENT, consume

__all__ = ["cli"]
pytestmark = pytest.mark.timeout(900)
VALUE = b"v" * 1500
"""Ten of them fill a segment."""
HOUR_MS = 3_600_000
COMPACTED = {
    "cleanup.policy": "compact",
    "remote.storage.enable": "false",
    "local.retention.bytes": "-2",
    "min.cleanable.dirty.ratio": "0.01",
}


def write(cluster: KafkaCluster, topic: str, keys: Sequence[str], timestamp_ms: Callable[[int], int]) -> None:
    """Write one batch for each key. Not idempotent, as brokers keep the last batch of such a producer."""
    producer = Producer({**cluster.client_settings(), "enable.idempotence": False}, logger=SILENT)
    for number, key in enumerate(keys):
        producer.produce(topic, VALUE, key.encode(), 0, timestamp=timestamp_ms(number))
        assert producer.flush(60) == 0


def offsets_from_start(cluster: KafkaCluster, topic: str, seconds: float) -> list[int]:
    """Return the offsets that a consumer gets within so many seconds, no matter whether it reaches the end. It meets no error."""
    consumer = Consumer({**cluster.client_settings(), "group.id": "holes", "enable.auto.commit": False}, logger=SILENT)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[int] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (message := consumer.poll(0.2)) is not None:
            assert message.error() is None
            found.append(message.offset() or 0)
    consumer.close()
    return found


def kinds(problems: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(one["severity"], one["kind"]) for one in problems}


def test_a_hole_at_the_end_of_the_newest_tiered_segment_is_named_and_its_way_out_helps(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    now = int(time.time() * 1000)
    broker_admin.create_topic("holes", settings=COMPACTED)
    write(broker, "holes", [f"k{number}" for number in range(20)], lambda number: now - 5 * HOUR_MS + number)
    write(broker, "holes", ["k19", "k18", *(f"n{number}" for number in range(12))], lambda number: now)
    wait_until(lambda: not {18, 19} & {one.offset for one in consume(broker, "holes")}, "brokers to compact the topic", seconds=120)
    broker_admin.set_config("holes", {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"})
    later = {"remote.copy.lag.ms": str(2 * HOUR_MS), "remote.copy.lag.bytes": "1000000000"}
    local = {"local.retention.ms": str(2 * HOUR_MS), "local.retention.bytes": "1000000000"}
    broker_admin.set_config("holes", {"remote.storage.enable": "true", **local, **later})
    wait_until(lambda: broker_admin.offsets("holes").earliest_local == 20, "the old segments to be tiered")
    assert broker_admin.offsets("holes").latest_tiered == 19
    assert offsets_from_start(broker, "holes", 8) == list(range(18))

    ours = cli(broker, "holes")
    verified = ours.process("verify", code=None)["problems"]
    assert kinds(verified) == {("warning", "end-hole")}
    assert "offsets 18 to 19 were compacted away" in verified[0]["detail"]
    [hole] = [one for one in ours.process("doctor")["problems"] if one["kind"] == "end-hole"]
    assert "18 to 19 were compacted away" in hole["detail"]
    assert "seek to offset 20" in hole["todo"]

    broker_admin.set_config("holes", {"remote.copy.lag.ms": "0"})
    wait_until(lambda: broker_admin.offsets("holes").latest_tiered == 29, "the next segment to be tiered")
    wait_until(lambda: offsets_from_start(broker, "holes", 4) == [*range(18), *range(20, 34)], "consumers to pass the hole")
    assert ours.process("verify")["problems"] == []
    assert "end-hole" not in {one["kind"] for one in ours.process("doctor")["problems"]}
    [done] = ours.process("run")["partitions"]
    assert done["status"] == "cleaned"
    assert ours.process("verify")["problems"] == []


def test_segments_of_which_brokers_kept_nothing_are_no_damage(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    broker_admin.create_topic("emptied", settings=COMPACTED)
    write(broker, "emptied", [f"k{number % 10}" for number in range(35)], lambda number: int(time.time() * 1000) - HOUR_MS + number)
    wait_until(lambda: min(one.offset for one in consume(broker, "emptied")) == 20, "brokers to compact the topic", seconds=120)
    broker_admin.set_config("emptied", {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"})
    broker_admin.set_config("emptied", {"remote.storage.enable": "true", "local.retention.bytes": "1"})
    broker_admin.wait_tiered("emptied")
    assert 0 in {path.stat().st_size for path in broker_admin.tier_files("emptied") if path.suffix == ".log"}
    ours = cli(broker, "emptied")
    assert ours.process("verify")["problems"] == []


def test_policies_that_kafka_lets_pass_are_named_with_their_value(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    now = int(time.time() * 1000) - HOUR_MS
    with new_cluster() as cluster, ClusterAdmin(cluster) as admin:
        admin.create_topic("empty")
        own = {"remote.storage.enable": "true", "retention.ms": "-1", "local.retention.bytes": "1", "internal.segment.bytes": "16384"}
        admin._client.create_topics(
            {"bare": {"num_partitions": 1, "replication_factor": 1, "configs": {**own, "file.delete.delay.ms": "100"}}}
        )
        for topic in ("empty", "bare"):
            write(cluster, topic, [f"k{number}" for number in range(40)], lambda number: now + number)
            admin.wait_tiered(topic)
        ours = cli(cluster, "empty", "bare")
        assert ours.process("config", "check")["problems"] == []  # a topic may inherit delete
        assert "cleanup-policy" not in {one["kind"] for one in ours.process("doctor")["problems"]}

        admin.set_config("empty", {"cleanup.policy": "", "retention.ms": "-1"})
        policy = ConfigResource(ConfigResourceType.BROKER, "1", {"log.cleanup.policy": "compact"})
        admin._client.alter_configs([policy], raise_on_unknown=False)

        def told() -> dict[str, str]:
            return {one["topic"]: one["detail"] for one in ours.process("doctor", code=3)["problems"] if one["kind"] == "cleanup-policy"}

        wait_until(lambda: len(told()) == 2, "doctor to tell of both policies", seconds=30)
        assert told()["empty"].startswith('cleanup.policy is "", set on the topic')
        assert told()["bare"].startswith('cleanup.policy is "compact", set on the brokers (log.cleanup.policy)')
        checked = {
            one["object"]: one["detail"] for one in ours.process("config", "check", code=5)["problems"] if one["severity"] == "error"
        }
        assert checked["empty"].startswith('cleanup.policy is ""')
        assert checked["bare"].startswith('cleanup.policy is "compact"')

        admin.set_config("empty", {"cleanup.policy": "", "retention.ms": "1000", "local.retention.ms": "1000"})
        wait_until(lambda: admin.offsets("empty").earliest == 40, "brokers to expire what an empty policy should keep")


def test_a_rewritten_segment_leads_lookups_by_time_past_records_below_the_log_start(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    """Brokers search one remote segment only. Where its newest record lies below the log start, they answer with a local offset."""
    first = int(time.time() * 1000) - 5 * HOUR_MS
    broker_admin.create_topic("times")
    keys = [f"k{number}" for number in range(40)]
    keys[10:12] = ["k8", "k9"]  # the first segment is rewritten
    write(broker, "times", keys, lambda number: first + (1000 if number == 5 else 500 * (number >= 10) + number))
    broker_admin.wait_tiered("times")
    broker_admin.delete_records("times", 0, 7)
    assert broker_admin.offset_by_timestamp("times", 0, first + 400).offset == 30  # 10 is right
    ours = cli(broker, "times", cleaner={"segment_bytes": 16_384})
    [done] = ours.process("run")["partitions"]
    assert (done["status"], done["segments_out"]) == ("cleaned", 2)
    assert broker_admin.offset_by_timestamp("times", 0, first + 400).offset == 10
    assert ours.process("verify")["problems"] == []
