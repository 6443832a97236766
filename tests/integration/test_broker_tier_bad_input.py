"""What a compactor of a brokers' tier must not work with: each refused or left for later in clear words, nothing half done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from typing_extensions import override

from checkpoint.files import format_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers import publisher as kafka
from compactor.adapters.brokers.chain import lineage_from_segments, segment_read_ranges
from compactor.adapters.brokers.kafka_local import KafkaLocalLayout
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
from compactor.adapters.brokers.topic import PollResult
from compactor.constants import LeaderEpoch, Offset, TopicId
from compactor.control.state import PartitionState
from compactor.errors import BadData, Refused, Unavailable
from compactor.model.ids import TopicPartition
from compactor.model.plan import Replacement
from compactor.model.remote_log import BrokerView
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile
from compactor.round import mirroring
from compactor.round.mirroring import complete_metadata, require_consistent_lineage
from compactor.storage.factory import open_store
from tests.simulation.memory_topic import MemoryMetadataTopic
from tests.support.kafka_publishing import NAME, BrokerWorld, described, named


class PartitionVersion(MemoryMetadataTopic):
    """A consumer that gets nothing any more."""

    stands = False

    @override
    def poll(self, limit: int, timeout_s: float) -> PollResult:
        return PollResult([], {}) if self.stands else super().poll(limit, timeout_s)


def behind(world: BrokerWorld, monkeypatch: pytest.MonkeyPatch) -> tuple[MetadataTopicSegmentPublisher, PartitionVersion]:
    reading = PartitionVersion(world.log)
    monkeypatch.setattr(kafka, "READ_BACK_TIMEOUT_S", 1.0)
    monkeypatch.setattr("tests.support.kafka_publishing.MemoryMetadataTopic", lambda log: reading)
    return world.publisher(appending=MemoryMetadataTopic(world.log)), reading


def test_a_consumer_of_the_metadata_topic_that_falls_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    world = BrokerWorld()
    world.tier(0, 0, 9)
    world.tier(1, 10, 19)
    before = len(list(world.steps()))
    publisher, reading = behind(world, monkeypatch)
    reading.stands = True
    with pytest.raises(Unavailable, match="__remote_log_metadata is not read to its end within 1 s"):
        publisher.announce_segment(NAME, described(50, 0, 9, max_ms=900))
    assert len(list(world.steps())) == before


def test_a_record_that_was_appended_and_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = BrokerWorld()
    world.tier(0, 0, 9)
    world.tier(1, 10, 19)
    publisher, reading = behind(world, monkeypatch)
    plain = reading.log.put

    def put(partition: int, value: bytes | None, key: bytes | None = None) -> int:
        reading.stands = True
        return plain(partition, value, key)

    monkeypatch.setattr(reading.log, "put", put)
    with pytest.raises(Unavailable, match="is not read"):
        publisher.announce_segment(NAME, described(50, 0, 9, max_ms=900))
    reading.stands = False
    monkeypatch.setattr(kafka, "READ_BACK_TIMEOUT_S", 30.0)
    publisher.announce_segment(NAME, described(50, 0, 9, max_ms=900))  # what stands is not said twice
    assert [record.state.name for record, _ in list(world.steps())[4:]] == ["COPY_SEGMENT_STARTED"]


def test_a_round_that_a_rule_stands_against_is_refused_before_it_begins() -> None:
    """A source that reaches beyond its group."""
    world = BrokerWorld()
    first, second = world.tier(0, 0, 99), world.tier(1, 100, 199)
    world.tier(2, 200, 260)
    publisher = world.publisher()
    new = described(50, 0, 99, max_ms=900)
    publisher.announce_segment(NAME, new)
    begun: list[str] = []
    with pytest.raises(Refused, match="nothing more is written into the metadata topic: R3b: offset 100 would have no segment"):
        publisher.publish_replacements(
            NAME, [Replacement(sources=(first.id, second.id), segment=new)], lambda: begun.append("begun"), lambda _: None
        )
    assert begun == []
    assert world.states()[named(50)].name == "COPY_SEGMENT_STARTED"


class TestObjects:
    def test_those_of_another_layout(self, tmp_path: Path) -> None:
        folder = tmp_path / "0000000000000000000"
        folder.mkdir()
        (folder / "a chunk").write_bytes(b"not Kafka's")
        layout = KafkaLocalLayout(open_store(str(tmp_path)), lambda name: TopicId("topic-id"))
        with pytest.raises(Refused, match="nothing of orders-0 lies at"):
            complete_metadata(layout, NAME, described(0, 0, 9).model_copy(update={"files": {}}))

    def test_a_newest_segment_whose_lineage_is_another_one(self) -> None:
        class Checkpoint:
            def object_name(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str) -> str:
                return f"{segment.id}.{kind}"

            def read_file(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, kind: str, *place: int) -> bytes:
                return text.encode()

        text = format_leader_epoch_checkpoint((EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(2), Offset(150))))
        files: Mapping[str, SegmentFile] = {"leader-epoch-checkpoint": SegmentFile(size=len(text))}
        newest = described(4, 150, 199, {2: 150}).model_copy(update={"files": dict(files)})
        told = (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(1), Offset(100)), EpochEntry(LeaderEpoch(2), Offset(150)))
        with pytest.raises(BadData, match="gives offset 100 to leader epoch 0, the segments' metadata to 1"):
            require_consistent_lineage(Checkpoint(), NAME, newest, told)  # type: ignore[arg-type]
        require_consistent_lineage(Checkpoint(), NAME, newest, (told[0], told[2]))  # type: ignore[arg-type]

    def test_nothing_is_mirrored_where_the_newest_segments_lineage_is_another_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world, appended = BrokerWorld(), []
        for number, (start, end) in enumerate([(0, 99), (100, 149), (150, 199)]):
            world.tier(number, start, end, {number: start})
        cache = world.cache()
        view = BrokerView(segment_read_ranges(cache, lineage_from_segments(cache)), lineage_from_segments(cache), cache.applied)
        text = format_leader_epoch_checkpoint((EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(2), Offset(150))))
        kinds = {"leader-epoch-checkpoint": SegmentFile(size=len(text))}
        monkeypatch.setattr(mirroring, "complete_metadata", lambda layout, name, one: one.model_copy(update={"files": kinds}))
        monkeypatch.setattr(mirroring, "read_verified_file", lambda *_: text.encode())
        layout = SimpleNamespace(object_name=lambda name, one, kind: f"{one.id}.{kind}")
        leadership = SimpleNamespace(
            ports=SimpleNamespace(brokers=lambda name: view, layout=layout),
            state=PartitionState(topic=NAME.topic, partition=NAME.partition),
            epoch=0,
            append_record=lambda body, counted: appended.append(body),
        )
        with pytest.raises(BadData, match="gives offset 100 to leader epoch 0, the segments' metadata to 1"):
            mirroring.record_broker_segments(leadership)  # type: ignore[arg-type]
        assert appended == []
        text = format_leader_epoch_checkpoint(
            (EpochEntry(LeaderEpoch(0), Offset(0)), EpochEntry(LeaderEpoch(1), Offset(100)), EpochEntry(LeaderEpoch(2), Offset(150)))
        )
        mirroring.record_broker_segments(leadership)  # type: ignore[arg-type]
        assert len(appended) == 1
