"""An unmodified broker whose tier is compacted: consumers notice nothing but what compaction promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import pytest
from kafka.errors import RequestTimedOutError

from compactor.control.identity import OWNER_PREFIX
from tests.support.kafka_admin import METADATA_TOPIC, ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_jars import DISTRIBUTION
from tests.support.kafka_story import FIRST_MS, TopicStory
from tests.support.kafka_traffic import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    BrokerRecord,
    WrittenPartition,
    consume,
)

ROOT = Path(__file__).parents[2]
STATES = ("COPY_SEGMENT_STARTED", "COPY_SEGMENT_FINISHED", "DELETE_SEGMENT_STARTED", "DELETE_SEGMENT_FINISHED")


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
            "kafka": {
                "bootstrap_servers": self.cluster.bootstrap,
                "topics": list(self.topics),
                "allow_untested_brokers": DISTRIBUTION in os.environ,  # whether rounds may run under it is what the kit finds out
            },
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

    def words(self, *arguments: str, before: str = "") -> list[str]:
        """Of a command. ``before``: Python that runs in the process before it."""
        self.folder.mkdir(exist_ok=True)
        start = [sys.executable, "-c", f"{before}\nfrom compactor.cli.main import entry\nimport sys\nsys.exit(entry(sys.argv[1:]))"]
        return [*start, *arguments, "--config", str(self.configuration()), "--output", "json"]

    def process(self, *arguments: str, code: int | None = 0, before: str = "") -> Any:
        """A command; its JSON, None where it was killed. ``before``: as of ``words``. ``code`` None: any."""
        environment = {**os.environ, "TIERED_COMPACTOR_DEBUG": "1"}
        done = subprocess.run(
            self.words(*arguments, before=before), cwd=ROOT, capture_output=True, text=True, timeout=180, check=False, env=environment
        )
        assert done.returncode in ((0, -9, 3) if code is None else (code,)), (done.returncode, done.stdout[-2000:], done.stderr[-6000:])
        return json.loads(done.stdout) if done.stdout else None

    def refused(self, *arguments: str, code: int) -> str:
        """A command that must fail with this exit code; what it said."""
        self.folder.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "compactor", *arguments, "--config", str(self.configuration()), "--output", "json"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stderr


def assert_compacted(cluster: KafkaCluster, topic: str, model: WrittenPartition, clean_below: int, partition: int = 0) -> None:
    """What consumers get is a part of what was written, with the last value of each key, in both isolation levels."""
    for isolation, written in ((READ_UNCOMMITTED, model.uncommitted()), (READ_COMMITTED, model.committed())):
        found = consume(cluster, topic, partition, isolation=isolation)
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


KILLED = """
import os
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
plain, left = ConfluentKafkaMetadataTopicClient.append, [{after}]
def append(topic, partition, value):
    if not left[0]:
        os.kill(os.getpid(), 9)
    left[0] -= 1
    return plain(topic, partition, value)
ConfluentKafkaMetadataTopicClient.append = append
"""

KILLED_ONCE_BEGUN = """
import os
from compactor.control import publication
publication._wait_for_late_deliveries = lambda leadership: os.kill(os.getpid(), 9)
"""


class Onlooker:
    """A consumer that reads a topic from the start to the end, again and again, in both isolation levels: it must never notice anything."""

    def __init__(self, story: TopicStory) -> None:
        self.passes = 0
        self._story = story
        self._over = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._read, name="onlooker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        assert not self._failed, self._failed
        assert self.passes

    def _read(self) -> None:
        model = self._story.partitions[0]
        try:
            while not self._over.is_set():
                isolation = (READ_COMMITTED, READ_UNCOMMITTED)[self.passes % 2]
                found = consume(self._story.cluster, self._story.topic, isolation=isolation)
                assert latest(found, model) == model.latest()
                self.passes += 1
        except BaseException as error:  # noqa: BLE001 - told when the block ends
            self._failed.append(error)


def test_a_tier_is_compacted_under_a_running_broker(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    story = TopicStory(broker, broker_admin, "compacted").create().tell()
    before = story.tiered()[0]
    errors = len(broker.errors())
    bytes_before = log_bytes(broker_admin, "compacted")
    ours = cli(broker, "compacted")
    with Onlooker(story):
        [done] = ours.process("run")["partitions"]
        assert done["status"] == "cleaned"
        model = story.partitions[0]
        assert_compacted(broker, "compacted", model, done["next_dirty_offset"])
        assert broker_admin.offsets("compacted") == before
        assert ours.process("retire")["deleted"]
    assert_compacted(broker, "compacted", model, done["next_dirty_offset"])
    assert_found_by_time(broker_admin, "compacted", consume(broker, "compacted"))
    left = {record.offset for record in consume(broker, "compacted")}
    for gone in [record for record in model.uncommitted() if record.offset not in left][::40]:
        following = min(offset for offset in left if offset > gone.offset)
        assert [record.offset for record in consume(broker, "compacted", start=gone.offset, limit=1)] == [following]
    assert log_bytes(broker_admin, "compacted") < 0.8 * bytes_before
    [again] = ours.process("run")["partitions"]  # tombstones have no time to wait, so that there is something to do at once
    assert again["next_dirty_offset"] == done["next_dirty_offset"]
    assert_compacted(broker, "compacted", model, done["next_dirty_offset"])
    assert ours.process("verify")["ok"]
    topic_id = broker_admin.topic_id("compacted")
    assert [path.name for path in (broker.tier.parent / OWNER_PREFIX / topic_id).iterdir()] == ["000001.json"]
    assert ours.process("orphans", "find")["orphans"] == []
    assert broker.errors()[errors:] == []
    mine = [line for line in broker_admin.metadata_events() if f"{topic_id}:compacted-0" in line]
    assert {name for name in STATES if any(name in line and "brokerId=2000000000" in line for line in mine)} == set(STATES)


@pytest.mark.slow
def test_over_leader_epochs_and_restarts_and_again_in_bigger_groups(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    with new_cluster() as cluster, ClusterAdmin(cluster) as admin, ExitStack() as stack:
        story = TopicStory(cluster, admin, "again").create().tell(2)
        story.tiered()
        ours = cli(cluster, "again", cleaner={"segment_bytes": 9_000})
        with Onlooker(story):
            [done] = ours.process("run")["partitions"]
        assert (done["status"], done["segments_out"] > 1) == ("cleaned", True)
        assert_compacted(cluster, "again", story.partitions[0], done["next_dirty_offset"])
        ours.process("retire")
        for kill in (False, True):
            cluster.restart(kill=kill)
            assert_compacted(cluster, "again", story.partitions[0], done["next_dirty_offset"])
        story.admin = stack.enter_context(ClusterAdmin(cluster))  # the one before has seen a broker die
        story.tell()
        story.tiered()
        bigger = cli(cluster, "again", cleaner={"segment_bytes": 1_000_000})
        few, [done] = done["segments_out"], bigger.process("run")["partitions"]
        assert (done["status"], done["segments_out"] < few < done["segments_in"]) == ("cleaned", True)
        assert_compacted(cluster, "again", story.partitions[0], done["next_dirty_offset"])
        bigger.process("retire")
        cluster.restart()
        assert_compacted(cluster, "again", story.partitions[0], done["next_dirty_offset"])
        assert [line for line in cluster.errors() if "RemoteLogMetadata" in line] == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rounds_stay_below_a_tail_that_brokers_upload_late(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]
) -> None:
    """KIP-1241: with ``remote.copy.lag.ms`` sealed segments stay on the leader's disk alone until their records are old enough."""
    topic = "lagging"
    with new_cluster("4.4.0") as cluster, ClusterAdmin(cluster) as admin:
        lag = {"remote.copy.lag.ms": "3600000", "local.retention.ms": "7200000", "local.retention.bytes": "-2"}
        story = TopicStory(cluster, admin, topic).create(lag)
        for _ in range(3):
            story.plain()
        tiered = admin.offsets(topic).latest - 1
        story.later(int(time.time() * 1000) - FIRST_MS - 60_000)  # brokers upload segments from the future at once
        for _ in range(2):
            story.plain()
        wait_until(lambda: admin.offsets(topic).latest_tiered == tiered, "the old records to be tiered, and no others")
        assert admin.active_base(topic) > tiered + 1, "no sealed segment waits for its upload"
        ours = cli(cluster, topic)
        [done] = ours.process("run")["partitions"]
        assert done["status"] == "cleaned"
        assert done["next_dirty_offset"] <= tiered
        assert admin.offsets(topic).latest_tiered == tiered
        ours.process("retire")
        assert_compacted(cluster, topic, story.partitions[0], done["next_dirty_offset"])
        admin.set_config(topic, {"remote.copy.lag.ms": "0"})
        wait_until(lambda: admin.offsets(topic).latest_tiered == admin.active_base(topic) - 1, "the tail to be tiered")
        [again] = ours.process("run", "--force")["partitions"]
        assert again["next_dirty_offset"] > tiered
        assert_compacted(cluster, topic, story.partitions[0], again["next_dirty_offset"])


@pytest.mark.slow
def test_killed_before_each_record_the_next_run_goes_on(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    story = TopicStory(broker, broker_admin, "killed", segment_bytes=30_000).create().tell()
    story.tiered()
    errors = len(broker.errors())
    ours = cli(broker, "killed", **{"lease": {"ttl_ms": 300}, "kafka.properties": {"message.timeout.ms": 10_000}})
    kills = 0
    with Onlooker(story):
        while ours.process("run", code=None, before=KILLED.format(after=1)) is None:
            kills += 1
            assert kills < 30
    assert kills > 2
    [done] = ours.process("run")["partitions"]
    assert_compacted(broker, "killed", story.partitions[0], done["next_dirty_offset"])
    while ours.process("retire", code=None, before=KILLED.format(after=1)) is None:
        kills += 1
        assert kills < 40
    ours.process("retire")
    assert_compacted(broker, "killed", story.partitions[0], done["next_dirty_offset"])
    logs = [path for path in broker_admin.tier_files("killed") if path.suffix == ".log"]
    live = [one for one in ours.process("segments", "list", "killed-0")["segments"] if one["state"] == "COPY_SEGMENT_FINISHED"]
    assert len(logs) == len(live)
    assert broker.errors()[errors:] == []


def test_a_topics_own_settings_are_the_policy_and_wrong_ones_are_refused(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    chosen = {"min.cleanable.dirty.ratio": "0.999999", "delete.retention.ms": "1234", "max.compaction.lag.ms": "3600000000"}
    story = TopicStory(broker, broker_admin, "chosen").create(chosen).tell()
    story.tiered()
    ours = cli(broker, "chosen", **{'topics."chosen"': {"delete_retention_ms": 99}})
    shown = {row["key"]: (row["value"], row["source"]) for row in ours.process("config", "show", "--topic", "chosen")["settings"]}
    assert shown["cleaner.min_cleanable_dirty_ratio"] == (0.999999, "topic chosen")
    assert shown["cleaner.max_compaction_lag_ms"] == (3_600_000_000, "topic chosen")
    assert (shown["cleaner.delete_retention_ms"][0], '[topics."chosen"]' in shown["cleaner.delete_retention_ms"][1]) == (99, True)
    assert shown["cleaner.bloom"] == (True, "default")
    broker_admin.set_config("chosen", {"retention.ms": "315360000000"})
    before = broker_admin.metadata_events()
    assert "retention.ms of chosen is 315360000000, it must be -1" in ours.refused("run", code=5)
    broker_admin.set_config("chosen", {"retention.ms": "-1"})
    broker_admin.set_config(METADATA_TOPIC, {"retention.ms": "315360000000"})
    try:
        assert f"retention.ms of {METADATA_TOPIC} is 315360000000, it must be -1" in ours.refused("run", code=5)
    finally:
        broker_admin.set_config(METADATA_TOPIC, {"retention.ms": "-1"})
    assert broker_admin.metadata_events() == before
    [done] = ours.process("run")["partitions"]
    assert done["status"] == "cleaned"


def test_a_topic_that_was_deleted_and_made_anew_is_another_one(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    story = TopicStory(broker, broker_admin, "anew").create().tell()
    story.tiered()
    ours = cli(broker, "anew")
    assert ours.process("run")["partitions"][0]["status"] == "cleaned"
    broker_admin.delete_topic("anew")
    wait_until(lambda: not broker_admin.tier_files("anew"), "the topic to leave the tier, with what compaction had made of it")
    again = TopicStory(broker, broker_admin, "anew", seed=2).create().tell()
    again.tiered()
    [done] = ours.process("run")["partitions"]
    assert (done["status"], done["first_dirty_offset"]) == ("cleaned", 0)
    assert_compacted(broker, "anew", again.partitions[0], done["next_dirty_offset"])


def test_a_round_goes_on_without_the_group_whose_records_were_deleted(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    """The first group's source lies below the log start by the time the round is resumed: the other groups and the cleaner offset go on."""
    story = TopicStory(broker, broker_admin, "cut", keys=3_000).create().tell(1)  # something is left of each segment
    story.plain()
    story.tiered()
    ours = cli(broker, "cut", cleaner={"segment_bytes": 9_000})
    assert ours.process("run", code=None, before=KILLED_ONCE_BEGUN) is None
    second = sorted({int(path.name[:20]) for path in broker_admin.tier_files("cut")})[1]
    asked = ours.process("topics", "delete-records", "cut-0", "--before", str(second))
    assert (asked["log_start_offset"], asked["segments"]) == (second, 0)
    wait_until(lambda: min(int(path.name[:20]) for path in broker_admin.tier_files("cut")) > 0, "the broker to delete the first segment")
    [done] = ours.process("run")["partitions"]
    assert (done["status"], done["next_dirty_offset"] > second) == ("resumed", True)
    left = story.partitions[0].from_offset(second)
    found = consume(broker, "cut", start=second, isolation=READ_COMMITTED)
    assert latest(found, left) == left.latest()
    [state] = ours.process("checkpoints", "list")["partitions"]
    assert [entry["offset"] for entry in state["cleaner_offsets"]] == [done["next_dirty_offset"]]
    young = next(record for record in found if record.offset > done["next_dirty_offset"])
    at = datetime.fromtimestamp(young.timestamp / 1000, UTC).isoformat()
    asked = ours.process("topics", "delete-records", "cut-0", "--before", at)
    assert second < asked["log_start_offset"] <= young.offset
    assert broker_admin.offsets("cut").earliest == asked["log_start_offset"]
    assert "offset 99999999 lies beyond cut-0" in ours.refused("topics", "delete-records", "cut-0", "--before", "99999999", code=2)


def log_bytes(admin: ClusterAdmin, topic: str) -> int:
    return sum(path.stat().st_size for path in admin.tier_files(topic) if path.suffix == ".log")


def assert_found_by_time(admin: ClusterAdmin, topic: str, records: Sequence[BrokerRecord]) -> None:
    """Of what is left the first record at or after a time; a control record has the broker's clock and may come before."""
    for record in records[:: max(1, len(records) // 20)]:
        try:
            found = admin.offset_by_timestamp(topic, 0, record.timestamp)
        except RequestTimedOutError:  # a broker that has little time does that for what is in the tier
            found = admin.offset_by_timestamp(topic, 0, record.timestamp)
        at_or_after = next(each for each in records if each.timestamp >= record.timestamp)
        assert found.offset <= at_or_after.offset
        assert found.offset == at_or_after.offset or found.timestamp > records[-1].timestamp
