"""`erasure --expedite` under an unmodified broker: the key is gone from what it serves and from every byte of the tier."""

from __future__ import annotations

from pathlib import Path

from tests.broker.test_compaction import BrokerTierCli, assert_compacted
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import DraftRecord, Writer, consume

KEY, SECRET = b"person-4711", b"the-name-that-must-go"
TOPIC = "erased"


def holding(tier: Path) -> list[str]:
    """Objects in which the value can be read. It was written without compression."""
    return [path.name for path in tier.rglob("*") if path.is_file() and SECRET in path.read_bytes()]


def test_a_key_is_gone_from_brokers_and_from_the_tier(broker: KafkaCluster, broker_admin: ClusterAdmin, tmp_path: Path) -> None:
    story = TopicStory(broker, broker_admin, TOPIC).create()
    writer = Writer(broker, TOPIC, story.partitions[0])
    writer.write([DraftRecord(KEY, SECRET, 1_699_999_999_000)])
    story.plain()
    writer.write([DraftRecord(KEY, None, 1_699_999_999_500)])
    story.plain()
    story.tiered()
    assert holding(broker.tier)
    cli = BrokerTierCli(broker, tmp_path / "compactor", [TOPIC])
    before = cli.process("erasure", TOPIC, "--key", KEY.decode(), code=3)
    assert {(one["state"], one["what"]) for one in before["holders"]} == {("live", "superseded"), ("live", "tombstone")}
    done = cli.process("erasure", TOPIC, "--key", KEY.decode(), "--expedite")
    assert (done["erased"], done["holders"]) == (True, [])
    assert any("uploaded" in one["what"] for one in done["not_covered"]), "what the broker has not tiered is named"
    assert holding(broker.tier) == []
    assert not [record for record in consume(broker, TOPIC, 0) if record.key == KEY]
    assert_compacted(broker, TOPIC, story.partitions[0], cli.process("checkpoints", "list")["partitions"][0]["first_dirty_offset"])
    assert cli.process("erasure", TOPIC, "--key", KEY.decode())["erased"]
