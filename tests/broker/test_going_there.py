"""From a topic that brokers compact to a tiered topic that is compacted here, by the alterations of docs/migrating.md."""

from __future__ import annotations

from pathlib import Path

from tests.broker.test_compaction import BrokerTierCli, assert_compacted
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_traffic import DraftRecord, Writer, WrittenPartition, consume

COMPACTED = {
    "cleanup.policy": "compact",
    "remote.storage.enable": "false",
    "local.retention.bytes": "-2",
    "min.cleanable.dirty.ratio": "0.01",
}
LONG_AGO_MS = 1_700_000_000_000
"""Older than the default retention of seven days: a topic with ``delete`` and that retention would lose these records."""


def test_a_topic_that_brokers_compacted_is_tiered_and_compacted_here(
    broker: KafkaCluster,
    broker_admin: ClusterAdmin,
    tmp_path: Path,
) -> None:
    model = WrittenPartition()
    broker_admin.create_topic("going", settings=COMPACTED)
    writer = Writer(broker, "going", model)

    def write_rounds(first: int, last: int) -> None:
        for number in range(first, last):
            records = [DraftRecord(b"key-%d" % key, b"%d " % number * 50, LONG_AGO_MS + number) for key in range(number, 60)]
            writer.write([*records, DraftRecord(b"key-0", None, LONG_AGO_MS + number)])

    write_rounds(0, 20)
    wait_until(lambda: len(consume(broker, "going")) < len(model.records) / 2, "the brokers to compact the topic", seconds=120)
    broker_admin.set_config("going", {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"})
    broker_admin.set_config("going", {"remote.storage.enable": "true", "local.retention.bytes": "1"})
    write_rounds(20, 30)
    broker_admin.wait_tiered("going")

    ours = BrokerTierCli(broker, tmp_path / "compactor", ["going"])
    assert ours.process("config", "check")["problems"] == []
    [done] = ours.process("run")["partitions"]
    assert done["status"] == "cleaned"
    assert_compacted(broker, "going", model, done["next_dirty_offset"])
    assert ours.process("retire")["deleted"]
    assert ours.process("verify")["ok"]
    assert_compacted(broker, "going", model, done["next_dirty_offset"])
