"""The daemon beside a real broker: partitions of several topics, killed in mid-round, finished by the next one, ended by SIGTERM."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.broker.test_compaction import KILLED, ROOT, BrokerTierCli, Onlooker, assert_compacted
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import WrittenPartition

START = "from compactor.cli.main import entry\nimport sys\nsys.exit(entry(sys.argv[1:]))"


@dataclass
class RunningDaemon:
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text()

    def get(self, path: str = "") -> str:
        address = re.search(r"status at (http://[^ ]+/)", self.said())
        if address is None:
            return ""
        with urllib.request.urlopen(address[1] + path, timeout=10) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum over its labels; -1 before there is one."""
        found = re.findall(rf"^{name}(?:{{.*}})? (.+)$", self.get("metrics"), re.MULTILINE)
        return sum(map(float, found)) if found else -1


@contextmanager
def daemon(cli: BrokerTierCli, *, before: str = "") -> Iterator[RunningDaemon]:
    """A process, ended by SIGTERM where it has not ended by then."""
    cli.folder.mkdir(exist_ok=True)
    log = cli.folder / f"daemon-{len(list(cli.folder.glob('daemon-*')))}.log"
    words = [sys.executable, "-c", f"{before}\n{START}", "daemon", "--config", str(cli.configuration())]
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
    try:
        yield RunningDaemon(process, log)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(300)
def test_a_daemon_compacts_topics_of_a_running_broker_and_another_one_finishes_its_rounds(
    broker: KafkaCluster, broker_admin: ClusterAdmin, tmp_path: Path
) -> None:
    stories = [
        TopicStory(broker, broker_admin, "watched", partitions={number: WrittenPartition() for number in range(2)}).create().tell(),
        TopicStory(broker, broker_admin, "watched-too", seed=3).create().tell(),
    ]
    for story in stories:
        story.tiered()
    errors = len(broker.errors())
    cli = BrokerTierCli(
        broker,
        tmp_path / "compactor",
        ["watched.*"],
        {
            "daemon": {"interval_ms": 300, "listen": "127.0.0.1:0"},
            "cleaner": {"delete_retention_ms": 86_400_000},
            "lease": {"ttl_ms": 1000},
        },
    )
    names = ("watched-0", "watched-1", "watched-too-0")

    with Onlooker(stories[1]):
        with daemon(cli, before=KILLED.format(after=2)) as killed:
            assert killed.process.wait(120) == -signal.SIGKILL, killed.said()
        with daemon(cli) as running:
            stand = lambda: running.said()[-2000:]  # noqa: E731
            wait_until(
                lambda: len(re.findall("(?:cleaned|resumed), ", running.said())) >= 3 and "resumed, " in running.said(),
                "three rounds",
                stand=stand,
            )
            assert running.metric("tiered_compactor_partitions") == 3
            broker_admin.set_config("watched", {"retention.ms": "315360000000"})
            wait_until(
                lambda: "no round begins for topic watched: retention.ms of watched is" in running.said(), "topic watched to be left"
            )
            broker_admin.set_config("watched", {"retention.ms": "-1"})
            wait_until(lambda: "topic watched is compacted again" in running.said(), "topic watched to be taken up")
            wait_until(lambda: running.metric("tiered_compactor_waiting_bytes") == 0, "what was replaced to be deleted", stand=stand)
            for name in names:
                assert name in running.get()
        assert "stopped" in running.said()
    rows = cli.process("checkpoints", "list")["partitions"]
    offsets = {f"{row['topic']}-{row['partition']}": row["cleaner_offsets"][-1]["offset"] for row in rows}
    assert_compacted(broker, "watched-too", stories[1].partitions[0], offsets["watched-too-0"])
    assert_compacted(broker, "watched", stories[0].partitions[0], offsets["watched-0"])
    assert cli.process("verify")["ok"]
    assert all(row["lease"] is None for row in rows)
    assert broker.errors()[errors:] == []


@pytest.mark.slow_broker
@pytest.mark.timeout(300)
def test_recompact_over_a_running_brokers_tier(broker: KafkaCluster, broker_admin: ClusterAdmin, tmp_path: Path) -> None:
    story = TopicStory(broker, broker_admin, "recompacted").create().tell()
    story.tiered()
    errors = len(broker.errors())
    cli = BrokerTierCli(broker, tmp_path / "compactor", ["recompacted"], {"cleaner": {"segment_bytes": 40_000}})
    [done] = cli.process("run")["partitions"]
    with Onlooker(story):
        again = cli.process("recompact")
    assert [(row["status"], row["next_dirty_offset"]) for row in again["partitions"]] == [("cleaned", done["next_dirty_offset"])]
    assert_compacted(broker, "recompacted", story.partitions[0], done["next_dirty_offset"])
    cli.process("retire")
    assert cli.process("verify")["ok"]
    assert broker.errors()[errors:] == []


BROKER_DIES = """
import os, signal
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
from compactor.daemon import scheduling
plain, left, backoff = ConfluentKafkaMetadataTopicClient.append, [2], scheduling.backoff_ms
def append(topic, partition, value):
    left[0] -= 1
    if left[0] == 0:
        os.kill({pid}, signal.SIGKILL)
    return plain(topic, partition, value)
ConfluentKafkaMetadataTopicClient.append = append
scheduling.backoff_ms = lambda failures, first_ms=1000, most_ms=3000: backoff(failures, first_ms, most_ms)
"""


@pytest.mark.slow_broker
@pytest.mark.timeout(300)
def test_a_broker_that_dies_in_mid_protocol_is_waited_for(new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    with new_cluster() as cluster:
        with ClusterAdmin(cluster) as admin:
            story = TopicStory(cluster, admin, "waited-for").create().tell()
            story.tiered()
        cli = BrokerTierCli(
            cluster,
            tmp_path / "compactor",
            ["waited-for"],
            {
                "daemon": {"interval_ms": 500, "listen": "127.0.0.1:0"},
                "cleaner": {"delete_retention_ms": 86_400_000},
                "lease": {"ttl_ms": 1000},
            },
        )
        with daemon(cli, before=BROKER_DIES.format(pid=cluster.nodes[1].pid)) as running:
            wait_until(lambda: not cluster.nodes[1].running, "the broker to die", stand=lambda: running.said()[-2000:])
            wait_until(lambda: "round failed" in running.said(), "the round to be left", seconds=90, stand=lambda: running.said()[-2000:])
            cluster.start()
            wait_until(lambda: "resumed, " in running.said(), "it to be finished", seconds=90, stand=lambda: running.said()[-2000:])
        [row] = cli.process("checkpoints", "list")["partitions"]
        assert_compacted(cluster, "waited-for", story.partitions[0], row["cleaner_offsets"][-1]["offset"])
        assert [line for line in cluster.errors() if "RemoteLogMetadata" in line] == []
