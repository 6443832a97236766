"""Worse than the everyday: compactors that wake up after they were replaced, topics that go, come anew or grow, older brokers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.broker import test_compaction
from tests.broker.test_compaction import ROOT, STATES, BrokerTierCli, Onlooker, assert_compacted, cli
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import WrittenPartition
from tests.support.waiting import wait_for

__all__ = ["cli"]
pytestmark = [pytest.mark.slow_broker, pytest.mark.timeout(300)]

STOPPED_BEFORE = """
import os, signal, threading
from compactor.adapters.brokers.codec import decode_record
from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
from compactor.adapters.brokers.cluster import ClusterSettingsCheckBeforePublication
ClusterSettingsCheckBeforePublication.__init__.__kwdefaults__["max_age_s"] = 0.0
plain, left = ConfluentKafkaMetadataTopicClient.append, [1]
def append(topic, partition, value):
    if left and decode_record(value).state.name == "{state}":
        left.clear()
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return plain(topic, partition, value)
ConfluentKafkaMetadataTopicClient.append = append
"""
"""A process that is past all of its checks, and sleeps: SIGCONT, and its record is late."""


@contextmanager
def stopped(cli: BrokerTierCli, *arguments: str, state: str) -> Iterator[subprocess.Popen[str]]:
    """A command that stands still before its first record of this state."""
    words = cli.words(*arguments, before=STOPPED_BEFORE.format(state=state))
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: process.poll() is not None or _state(process.pid) == "T")
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def goes_on(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, its answer, and what else it said."""
    process.send_signal(signal.SIGCONT)
    answer, said = process.communicate(timeout=120)
    return process.returncode, answer, said


def test_an_older_broker_whose_tier_is_compacted(new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli]) -> None:
    with new_cluster("3.9.2") as cluster, ClusterAdmin(cluster) as admin:
        test_compaction.test_a_tier_is_compacted_under_a_running_broker(cluster, admin, cli)
        assert cluster.errors() == []


def elsewhere(ours: BrokerTierCli, name: str) -> BrokerTierCli:
    """The same compactor on another machine: of what is shared it has the control log alone."""
    tier = {"control_url": f"file://{ours.folder / 'control'}"}
    return replace(ours, folder=ours.folder.with_name(name), settings={**ours.settings, "tier": tier})


def dropped(ours: BrokerTierCli) -> list[tuple[str, str]]:
    """The transitions that brokers drop with an ERROR line, as verify counts them."""
    details = [one["detail"] for one in ours.process("verify")["problems"] if one["kind"] == "dropped-record"]
    return [(found[1], found[2]) for each in details if (found := re.match("([A-Z_]+) cannot become ([A-Z_]+);", each))]


def transition(line: str) -> tuple[str, str] | str:
    """Of a broker's ERROR line that says so; any other as it is."""
    found = re.search("Current state: ([A-Z_]+) can not be transitioned to target state: ([A-Z_]+),.* Dropping the event", line)
    return (found[1], found[2]) if found else line


@pytest.mark.parametrize("version", ["4.4.0", "3.9.2"])
def test_late_records_of_zombies_are_dropped_by_brokers_and_change_nothing(
    new_cluster: Callable[..., KafkaCluster], cli: Callable[..., BrokerTierCli], version: str
) -> None:
    with new_cluster(version) as cluster, ClusterAdmin(cluster) as admin:
        story = TopicStory(cluster, admin, "haunted", keys=600).create().tell()
        story.tiered()
        ours = cli(cluster, "haunted", cleaner={"segment_bytes": 20_000}, lease={"ttl_ms": 500})

        def round_beside(state: str, meanwhile: Callable[[], object] = lambda: None) -> None:
            """A compactor falls asleep, another one does its work and more, the first one wakes up with a record in its hand."""
            with stopped(elsewhere(ours, state), "run", state=state) as zombie:
                with Onlooker(story):
                    ours.process("run")
                meanwhile()
                with Onlooker(story):
                    code, _, said = goes_on(zombie)
            assert code == 4, said

        def another_round() -> None:
            story.plain()
            story.tiered()
            [done] = replace(ours, settings={**ours.settings, "cleaner": {"segment_bytes": 1_000_000}}).process("run")["partitions"]
            assert done["status"] == "cleaned"

        round_beside("COPY_SEGMENT_STARTED")
        story.plain()
        story.tiered()
        round_beside("COPY_SEGMENT_FINISHED", another_round)
        story.plain()
        story.tiered()
        round_beside("DELETE_SEGMENT_STARTED", lambda: ours.process("retire"))
        [done] = ours.process("run")["partitions"]
        ours.process("retire")
        assert_compacted(cluster, "haunted", story.partitions[0], done["next_dirty_offset"])
        counted = dropped(ours)
        assert counted == [
            ("COPY_SEGMENT_FINISHED", "COPY_SEGMENT_STARTED"),
            ("DELETE_SEGMENT_STARTED", "COPY_SEGMENT_FINISHED"),
        ]  # the third one's segment is finished, its record no transition
        assert [transition(line) for line in cluster.errors()] == counted
        cluster.restart()
        assert_compacted(cluster, "haunted", story.partitions[0], done["next_dirty_offset"])
        # Once per replay. A broker that starts also calls it an ERROR that it is asked before it has replayed.
        replayed = [line for line in cluster.errors()[len(counted) :] if "[RLMMConsumerTask]" in line]
        assert [transition(line) for line in replayed] == counted
        assert ours.process("verify")["ok"]
        with ClusterAdmin(cluster) as anew:
            mine = [line for line in anew.metadata_events() if ":haunted-0" in line]
        assert [state for state in STATES if not any(state in line and "brokerId=2000000000" in line for line in mine)] == []


@pytest.mark.parametrize("state", ["COPY_SEGMENT_STARTED", "COPY_SEGMENT_FINISHED"])
@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "made anew"])
def test_a_topic_that_goes_in_mid_round(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli], state: str, *, anew: bool
) -> None:
    """Before anything is published, and after that has begun."""
    name = f"goes-{state[13:].lower()}-{anew}".lower()
    story = TopicStory(broker, broker_admin, name).create().tell()
    story.tiered()
    gone_id = broker_admin.topic_id(name)
    ours = cli(broker, name, cleaner={"segment_bytes": 40_000}, lease={"ttl_ms": 500}, publish={"grace_ms": 600_000})
    errors = len(broker.errors())
    again = TopicStory(broker, broker_admin, name, seed=2)
    with stopped(ours, "run", state=state) as running:
        broker_admin.delete_topic(name)
        wait_until(lambda: not [path for path in broker_admin.tier_files(name) if gone_id in str(path)], "the topic to leave the tier")
        if anew:
            again.create().tell().tiered()
        code, answer, said = goes_on(running)
    assert code == 0, said
    [ended] = json.loads(answer)["partitions"]
    if state == "COPY_SEGMENT_STARTED":
        assert (ended["status"], "is not what brokers read any more" in ended["reason"]) == ("nothing_to_do", True)
    else:
        assert (ended["status"], ended["segments_out"], ended["next_dirty_offset"]) == ("cleaned", 0, 0)
        assert "the cleaner offset stays" in ended["reason"]
    if not anew:
        assert ours.process("run")["partitions"] == []
        again.create().tell().tiered()
    [done] = ours.process("run")["partitions"]
    assert (done["status"], done["first_dirty_offset"]) == ("cleaned", 0)
    ours.process("retire")
    assert_compacted(broker, name, again.partitions[0], done["next_dirty_offset"])
    assert ours.process("verify")["ok"]
    assert not [path for path in broker_admin.tier_files(name) if gone_id in str(path)]
    assert broker.errors()[errors:] == []
    assert broker_admin.metadata_events()


def test_partitions_that_are_added_are_compacted_by_the_next_run(
    broker: KafkaCluster, broker_admin: ClusterAdmin, cli: Callable[..., BrokerTierCli]
) -> None:
    story = TopicStory(broker, broker_admin, "grown").create().tell()
    story.tiered()
    errors = len(broker.errors())
    ours = cli(broker, "grown")
    [first] = ours.process("run")["partitions"]
    assert broker.errors()[errors:] == []
    broker_admin.add_partitions("grown", 3)
    story.partitions |= {1: WrittenPartition(), 2: WrittenPartition()}  # nothing is written to the third one's tier
    for partition in (0, 1):
        story.plain(partition)
        story.transactions(partition)
    for partition in (0, 1):
        broker_admin.wait_tiered("grown", partition)
    errors = len(broker.errors())  # brokers call it an ERROR that an added partition was not there before
    done = {row["partition"]: row for row in ours.process("run")["partitions"]}
    assert {partition: row["status"] for partition, row in done.items()} == {0: "cleaned", 1: "cleaned"}
    assert (done[0]["first_dirty_offset"], done[1]["first_dirty_offset"]) == (first["next_dirty_offset"], 0)
    ours.process("retire")
    for partition in (0, 1):
        assert_compacted(broker, "grown", story.partitions[partition], done[partition]["next_dirty_offset"], partition)
    assert ours.process("verify")["ok"]
    assert broker.errors()[errors:] == []
