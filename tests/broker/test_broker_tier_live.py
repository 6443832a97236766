"""The commands on the tier of a broker that runs, by its metadata topic, and again from a snapshot when nothing but the tier is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.tier_cli import TierCli, batches_of


@pytest.fixture
def cli(broker: KafkaCluster, told: TopicStory, tmp_path: Path) -> TierCli:
    made = TierCli(tmp_path / "cli", named="told-0")
    made.tier = broker.tier.parent
    made.set(
        tier={
            "kind": "kafka",
            "layout": "kafka-local",
            "url": broker.tier.parent.as_uri(),
            "control_url": (tmp_path / "control").as_uri(),
        },
        kafka={"bootstrap_servers": broker.bootstrap, "topics": ["told"]},
    )
    return made


def test_commands_that_read_agree_with_the_broker(cli: TierCli, told: TopicStory, tmp_path: Path) -> None:
    offsets = told.tiered()[0]
    before = cli.digest()
    [row] = [one for one in cli.do("topics")["partitions"] if one["partition"] == 0]
    assert (row["start_offset"], row["end_offset"]) == (0, offsets.latest_tiered)
    states = {one["state"] for one in cli.do("segments", "list", "told-0")["segments"]}
    assert states == {"COPY_SEGMENT_FINISHED"}
    verified = cli.do("verify")
    assert [one for one in verified["problems"] if one["severity"] == "error"] == []
    [planned, *_] = cli.do("plan", "--sample", 10**9)["partitions"]
    assert planned["expected_saving_bytes"] > 0
    assert cli.do("orphans", "find")["orphans"] == []
    assert read(cli.export(tmp_path / "log")) == written(told, offsets.latest_tiered)
    assert cli.digest() == before
    assert not (tmp_path / "control").exists()
    checked = cli.ask("config", "check").document  # tries the control store, and only that
    assert {one["kind"] for one in checked["problems"] if one["severity"] == "error"} <= {"metadata-topic"}
    assert cli.digest() == before


def test_a_snapshot_is_enough_to_read_the_tier(cli: TierCli, told: TopicStory, tmp_path: Path) -> None:
    taken = cli.do("topics", "snapshot")
    assert taken["topics"] == 1
    topics = cli.do("topics")
    cli.set(kafka={"bootstrap_servers": ""})
    assert cli.do("topics") == topics
    offsets = told.tiered()[0]
    assert read(cli.export(tmp_path / "log")) == written(told, offsets.latest_tiered)


def read(folder: Path) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for batch in batches_of(folder) if not batch.control for record in batch.records]


def written(told: TopicStory, last: int) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(one.offset, one.key, one.value) for one in told.partitions[0].uncommitted() if one.offset <= last]


def test_a_topic_that_is_not_named_is_not_there(cli: TierCli) -> None:
    cli.set(kafka={"topics": ["untold"]})
    cli.refused("verify", "untold-0", code=2, says="the tier holds no partition untold-0")
