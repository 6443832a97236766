"""An unmodified broker whose tier is compacted: consumers notice nothing but what compaction promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, READ_UNCOMMITTED, BrokerRecord, WrittenPartition, consume

ROOT = Path(__file__).parents[2]


@dataclass
class BrokerTierCli:
    """The command line on a cluster's tier."""

    cluster: KafkaCluster
    folder: Path
    topics: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def configuration(self) -> Path:
        sections: dict[str, dict[str, Any]] = {
            "tier": {
                "kind": "kafka",
                "layout": "kafka-local",
                "url": f"file://{self.cluster.tier.parent}",
                "control_url": f"file://{self.folder / 'control'}",
                "state_dir": str(self.folder / "state"),
            },
            "kafka": {"bootstrap_servers": self.cluster.bootstrap, "topics": list(self.topics)},
            "kafka.properties": {"message.timeout.ms": 3000},
            "cleaner": {"min_cleanable_dirty_ratio": 0.0, "delete_retention_ms": 0},
            "publish": {"grace_ms": 0},
            "lease": {"ttl_ms": 2000},
        }
        for section, values in self.settings.items():
            sections.setdefault(section, {}).update(values)
        text = "".join(
            f"[{section}]\n" + "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in values.items())
            for section, values in sections.items()
        )
        path = self.folder / "tiered compactor.toml"
        path.write_text(text)
        return path

    def process(self, *arguments: str, code: int = 0, before: str = "") -> Any:
        """A command; its JSON. ``before``: Python that runs in the process before it."""
        self.folder.mkdir(exist_ok=True)
        start = [sys.executable, "-c", f"{before}\nfrom compactor.cli.main import entry\nimport sys\nsys.exit(entry(sys.argv[1:]))"]
        words = [*start, *arguments, "--config", str(self.configuration()), "--output", "json"]
        environment = {**os.environ, "TIERED_COMPACTOR_DEBUG": "1"}
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False, env=environment)
        assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-6000:])
        return json.loads(done.stdout) if done.stdout else None


def assert_compacted(cluster: KafkaCluster, topic: str, model: WrittenPartition, clean_below: int) -> None:
    """What consumers get is a part of what was written, with the last value of each key, in both isolation levels."""
    for isolation, written in ((READ_UNCOMMITTED, model.uncommitted()), (READ_COMMITTED, model.committed())):
        found = consume(cluster, topic, isolation=isolation)
        by_offset = {record.offset: record for record in written}
        assert [by_offset.get(record.offset) for record in found] == found
        assert [record for record in found if record.offset >= clean_below] == [r for r in written if r.offset >= clean_below]
        assert latest(found, model) == model.latest()
        below = [record.key for record in found if record.offset < clean_below]
        assert len(below) == len(set(below))


def latest(found: Sequence[BrokerRecord], model: WrittenPartition) -> dict[bytes, BrokerRecord]:
    last = {record.key: record for record in found if record.key is not None and record.offset not in model.aborted}
    return {key: record for key, record in last.items() if record.value is not None}


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., BrokerTierCli]:
    def make(cluster: KafkaCluster, *topics: str, **settings: Mapping[str, Any]) -> BrokerTierCli:
        return BrokerTierCli(cluster, tmp_path / "compactor", topics, settings)

    return make


def test_a_tier_is_compacted_under_a_running_broker(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    story = TopicStory(broker, broker_admin, "compacted").create().tell()
    before = story.tiered()[0]
    errors = len(broker.errors())
    bytes_before = sum(path.stat().st_size for path in broker_admin.tier_files("compacted") if path.suffix == ".log")
    ours = cli(broker, "compacted")
    [done] = ours.process("run")["partitions"]
    assert done["status"] == "cleaned"
    model = story.partitions[0]
    assert_compacted(broker, "compacted", model, done["next_dirty_offset"])
    assert broker_admin.offsets("compacted") == before
    retired = ours.process("retire")
    assert retired["deleted"]
    assert_compacted(broker, "compacted", model, done["next_dirty_offset"])
    bytes_after = sum(path.stat().st_size for path in broker_admin.tier_files("compacted") if path.suffix == ".log")
    assert bytes_after < 0.8 * bytes_before
    assert broker.errors()[errors:] == []
    assert [line for line in broker_admin.metadata_events() if "brokerId=2000000000" in line]
