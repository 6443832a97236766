"""A round that is taken back while a real broker serves its tier: consumers get again exactly what they had before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broker.test_compaction import KILLED, BrokerTierCli, Onlooker, assert_compacted
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, READ_UNCOMMITTED, consume


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_round_is_taken_back_under_a_running_broker_killed_in_between(
    broker: KafkaCluster, broker_admin: ClusterAdmin, tmp_path: Path
) -> None:
    story = TopicStory(broker, broker_admin, "undone", keys=600).create().tell()
    offsets = story.tiered()[0]
    model = story.partitions[0]
    errors = len(broker.errors())
    cli = BrokerTierCli(broker, tmp_path / "compactor", ["undone"], {"cleaner": {"segment_bytes": 9_000}, "lease": {"ttl_ms": 500}})
    [done] = cli.process("run")["partitions"]
    assert done["segments_out"] > 1
    [run] = cli.process("runs", "list", "undone-0")["runs"]
    assert run["undoable"]
    with Onlooker(story):
        killed = 0
        while cli.process("undo", run["run_id"], code=None, before=KILLED.format(after=1)) is None:
            killed += 1
            assert killed < 30
        assert killed > 1
    for isolation, written in ((READ_UNCOMMITTED, model.uncommitted()), (READ_COMMITTED, model.committed())):
        assert consume(broker, "undone", isolation=isolation) == written
    assert broker_admin.offsets("undone") == offsets
    assert cli.process("checkpoints", "list")["partitions"][0]["first_dirty_offset"] == 0
    cli.process("retire")
    assert consume(broker, "undone") == model.uncommitted()
    assert cli.process("verify")["ok"]
    [again] = cli.process("run")["partitions"]
    assert (again["status"], again["next_dirty_offset"]) == ("cleaned", done["next_dirty_offset"])
    assert_compacted(broker, "undone", model, again["next_dirty_offset"])
    cli.process("retire")
    assert "retiring what run" in cli.refused("undo", cli.process("runs", "list", "undone-0")["runs"][-1]["run_id"], code=2)
    assert broker.errors()[errors:] == []
