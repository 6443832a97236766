"""A consumer over a tier that was filled from a broker's log directory, and that broker: hand-over, open transactions, falling back."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from compactor.access.tier import Tier
from compactor.adapters.kafka_client import KafkaConnection
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.consumer import ConsumerOptions, Place, TieredConsumer
from compactor.features.consumer.group import ConfluentBrokerClient
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.model.ids import TopicPartition
from compactor.read.records import MessageLike, TierMessage
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import BrokerRecord, DraftRecord, Writer


def tier_in(folder: Path) -> Tier:
    folder.mkdir()
    config = folder / "tier.toml"
    config.write_text(f'[tier]\nurl = "{(folder / "tier").as_uri()}"\nstate_dir = "{folder / "state"}"\n')
    return open_tier(load_settings(str(config), {}))


def copied(cluster: KafkaCluster, name: TopicPartition, to: Path) -> Path:
    return Path(shutil.copytree(cluster.nodes[1].log_dir / str(name), to))


def bring(tier: Tier, folder: Path, name: TopicPartition) -> int:
    """All but the newest segment; where the tier ends now."""
    import_directory(tier, folder, name, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(live=True))
    return tier.open_partition_log(name).refresh().end_offset + 1


def record_of(message: MessageLike) -> BrokerRecord:
    headers = tuple((key, value) for key, value in message.headers() or ())
    return BrokerRecord(message.offset() or 0, message.timestamp()[1], message.key(), message.value(), headers)


def take(consumer: TieredConsumer, until: int) -> list[MessageLike]:
    """Up to the record at ``until``; errors that pass are left in."""
    found: list[MessageLike] = []
    for _ in range(600):
        found += consumer.consume(500, timeout=0.1)
        if found and not found[-1].error() and found[-1].offset() == until:
            return found
    raise AssertionError(f"no record at {until}, {len(found)} came")


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_tier_and_broker_are_one_log(isolation: str, broker: KafkaCluster, broker_admin: ClusterAdmin, tmp_path: Path) -> None:
    name = TopicPartition(f"consumed-{uuid.uuid4()}", 0)
    story = TopicStory(broker, broker_admin, name.topic).create({"remote.storage.enable": "false"})
    model = story.partitions[0]
    committed = isolation == "read_committed"

    def truth() -> list[BrokerRecord]:
        return model.committed() if committed else model.uncommitted()

    def consumer() -> TieredConsumer:
        connection = KafkaConnection(broker.bootstrap)
        options = ConsumerOptions(isolation="read_committed" if committed else "read_uncommitted", refresh_s=0.1)
        return TieredConsumer(tier, ConfluentBrokerClient(connection, read_committed=committed), options)

    story.plain()
    story.transactions()
    slow = Writer(broker, name.topic, model, transactional_id=f"{name}-slow")
    slow.begin()
    (opened,) = slow.write([DraftRecord(b"slow", b"1", story.first_ms)])
    story.plain()
    tier = tier_in(tmp_path / "a tier")
    end = bring(tier, copied(broker, name, tmp_path / "early"), name)
    assert end > opened
    with consumer() as reading:
        reading.assign([Place(*name, 0)])
        before = take(reading, truth()[-1].offset)
        slow.end(commit=True)
        story.plain(count=5)
        every = before + take(reading, truth()[-1].offset)
    assert [record_of(message) for message in every] == truth()
    from_tier = [message for message in every if isinstance(message, TierMessage)]
    # Nothing from the first open transaction on came from the tier where outcomes matter.
    assert max(message.offset() for message in from_tier) == max(
        record.offset for record in truth() if record.offset < (opened if committed else end)
    )

    story.plain()
    late = copied(broker, name, tmp_path / "late")
    gone = broker_admin.active_base(name.topic)
    assert gone > end
    broker_admin.delete_records(*name, gone)
    with consumer() as reading:
        reading.assign([Place(*name, end)])
        told = reading.poll(30)
        assert told is not None
        assert "OFFSET_OUT_OF_RANGE" in str(told.error())
        assert bring(tier, late, name) == gone
        behind = take(reading, truth()[-1].offset)
    assert [record_of(message) for message in behind] == [record for record in truth() if record.offset >= end]
