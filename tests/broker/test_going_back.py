"""From a compacted tier back to plain Kafka: a broker takes the exported directory, reads it, tiers it, and restarts with it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.files import parse_cleaner_offset_checkpoint
from compactor.constants import TopicId
from compactor.upkeep.export import write_topic_id
from tests.builders import LogBuilder
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_story import TopicStory
from tests.support.kafka_traffic import READ_COMMITTED, DraftRecord, Writer, WrittenPartition, consume
from tests.support.tier_cli import TierCli

TIERED = {
    "remote.storage.enable": "true",
    "local.retention.bytes": "1",
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
}


def compacted_tier(folder: Path) -> TierCli:
    """Of a log with high leader epochs, producers with high numbers, tombstones, an aborted transaction and one that nobody has ended."""
    log = LogBuilder(time=1_700_000_000_000)
    log.leader_epoch = 6
    for round_ in range(6):
        log.put(*(f"k{key}={round_}" for key in range(round_, 30)), pid=round_)
        log.add("90t: aborted=1; 90 aborts; k0; /")
    log.add("91t: open=1; behind=1")
    cli = TierCli(folder / "cli", {"cleaner": {"segment_bytes": 1500}})
    cli.named = "back-0"
    cli.bring(log.write(folder / "back-0"))
    cli.do("run", "--force")
    return cli


def put_in_place(cli: TierCli, cluster: KafkaCluster, *options: str) -> Any:
    """Create the topic, and let the broker start with the export of its first partition. Return the report of `export`."""
    topic, node = cli.named.removesuffix("-0"), cluster.nodes[1]
    with ClusterAdmin(cluster) as admin:
        admin.create_topic(topic, settings={"remote.storage.enable": "false", "local.retention.bytes": "-2"})
    node.stop()
    place = node.log_dir / cli.named
    topic_id = re.findall(r"topic_id: (\S+)", (place / "partition.metadata").read_text())[0]
    shutil.rmtree(place)
    report = cli.do("export", cli.named, place, *options, "--leader-epoch-zero", "--new-topic-id", topic_id)
    node.launch()
    node.wait_started()
    return report


def test_a_broker_reads_tiers_and_restarts_with_an_exported_log(new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    cli, cluster = compacted_tier(tmp_path), new_cluster()
    report = put_in_place(cli, cluster)
    read = consume(cluster, "back", isolation=READ_COMMITTED)
    assert {record.key: record.value for record in read} == LAST
    assert max(record.offset for record in read) <= report["end_offset"]
    assert {record.leader_epoch for record in read} == {0}
    with ClusterAdmin(cluster) as admin:
        assert admin.offsets("back").latest == report["end_offset"] + 1
        admin.set_config("back", TIERED)
        new = WrittenPartition()
        Writer(cluster, "back", new).write(
            [DraftRecord(b"new-%d" % number, b"x" * 1000, 1_700_000_900_000) for number in range(40)], per_batch=5
        )
        tiered = admin.wait_tiered("back")
        assert tiered.latest_tiered > report["end_offset"], "every segment of the export was tiered"
        everything = consume(cluster, "back", isolation=READ_COMMITTED)
        assert everything == [*read, *new.committed()]
        cluster.restart()
        assert consume(cluster, "back", isolation=READ_COMMITTED) == everything
        cluster.restart(kill=True)
        assert consume(cluster, "back", isolation=READ_COMMITTED) == everything
    copying = [line for line in cluster.errors() if "back" in line and "RemoteLogReader" not in line]  # a restart cuts off reads
    assert copying == []


LAST = {b"k0": None, b"behind": b"1"} | {b"k%d" % key: b"%d" % min(key, 5) for key in range(1, 30)}
"""Last committed value of each key. Round n writes the keys from n on."""


def tier_with_overlapping_transactions(folder: Path) -> tuple[TierCli, list[str]]:
    """One transaction hangs, and begins before the data and the markers of twenty others, of which half are aborted. Returns the keys
    that are committed, too.
    """
    log = LogBuilder(time=1_700_000_000_000)
    producers = range(100, 120)
    for number in producers:
        log.put(f"first-{number}=1", pid=number, txn=True)
    log.add("/; 7t: hangs=1; /")
    for number in producers:
        log.put(f"second-{number}=1", pid=number, txn=True)
        log.end(number, commit=number % 2 == 0)
    log.add("7t: hangs=2; /; end=1")
    cli = TierCli(folder / "overlapping", named="overlapping-0")
    cli.bring(log.write(folder / "logs" / "overlapping-0"))
    committed = [f"{word}-{number}" for word in ("first", "second") for number in producers if number % 2 == 0]
    return cli, [*committed, "end"]


def tier_with_a_damaged_marker(folder: Path, topic: str) -> tuple[TierCli, list[str]]:
    """Returns the keys that can be read and decided, too."""
    log = LogBuilder(time=1700000000000).add("7t: aborted=1; before=1; /; between=1; /; 7 aborts; behind=1; /; 7t: committed=1; 7 commits")
    log.put("later aborted=1", pid=8, txn=True)
    log.add("8 aborts; end=1")
    cli = TierCli(folder / topic, named=f"{topic}-0")
    cli.bring(log.write(folder / "logs" / f"{topic}-0"))
    (path,) = cli.tier.glob(f"{topic}-0/{3:020}-*.log")
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(bytes(data))
    return cli, ["before", "between", "behind", "committed", "end"]


@pytest.mark.damages
@pytest.mark.parametrize("ended", ["stopped", "killed"])
def test_a_broker_loads_each_export(ended: str, new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    """Also where an earlier log has left lines, and a killed export its directory. A broker that was killed reads all segments again."""
    cluster = new_cluster()
    node = cluster.nodes[1]
    exports: dict[str, tuple[TierCli, list[str], tuple[str, ...]]] = {
        "overlapping": (*tier_with_overlapping_transactions(tmp_path), ("--leader-epoch-zero",)),
        "rescued": (*tier_with_a_damaged_marker(tmp_path, "rescued"), ("--skip-damaged", "--leader-epoch-zero")),
        "plain": (*tier_with_a_damaged_marker(tmp_path, "plain"), ("--skip-damaged",)),
    }
    with ClusterAdmin(cluster) as admin:
        for topic in exports:
            admin.create_topic(topic, settings={"remote.storage.enable": "false", "local.retention.bytes": "-2"})
        described = {topic: node.log_dir / f"{topic}-0" / "partition.metadata" for topic in exports}
        wait_until(lambda: all(path.exists() for path in described.values()), "the directories of the topics")
        ids = {topic: re.findall(r"topic_id: (\S+)", path.read_text())[0] for topic, path in described.items()}
    if ended == "stopped":
        node.stop()
    else:
        node.kill()
    (node.log_dir / "log-start-offset-checkpoint").write_text("0\n3\noverlapping 0 30\nplain 0 3\nrescued 0 9999\n")
    for topic, (cli, _, options) in exports.items():
        place = node.log_dir / cli.named
        shutil.rmtree(place)
        answer = cli.ask("export", cli.named, place, *options)
        assert answer.code == (3 if "--skip-damaged" in options else 0), answer
        write_topic_id(place, TopicId(ids[topic]))
    killed = node.log_dir / "overlapping-0.unfinished-killed-delete"
    shutil.copytree(node.log_dir / "overlapping-0", killed)
    next(killed.glob("*.log")).write_bytes(b"half a ba")
    node.launch()
    node.wait_started()
    for topic, (_, keys, _) in exports.items():
        assert committed_keys(cluster, topic) == keys, topic
        Writer(cluster, topic, WrittenPartition()).write([DraftRecord(b"new", b"1", 1_700_000_900_000)])
    for kill in (False, True):
        cluster.restart(kill=kill)
        for topic, (_, keys, _) in exports.items():
            assert committed_keys(cluster, topic) == [*keys, "new"], (topic, kill)
    wait_until(lambda: not killed.exists(), "the broker to delete what the killed export left")


def committed_keys(cluster: KafkaCluster, topic: str) -> list[str]:
    return [(record.key or b"").decode() for record in consume(cluster, topic, isolation=READ_COMMITTED)]


@pytest.mark.slow
def test_a_tier_whose_cluster_is_gone_goes_back_by_its_metadata_snapshot(new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    lost = new_cluster()
    with ClusterAdmin(lost) as admin:
        story = TopicStory(lost, admin, "lost").create().tell(2)
        written = story.partitions[0]
        tiered = story.tiered()[0].latest_tiered
        topic_id = admin.topic_id("lost")
    cli = TierCli(tmp_path / "cli", named="lost-0")
    cli.tier = lost.tier.parent
    where = {"kind": "kafka", "layout": "kafka-local", "url": cli.tier.as_uri(), "control_url": (tmp_path / "control").as_uri()}
    cli.set(tier=where, kafka={"bootstrap_servers": lost.bootstrap, "topics": ["lost"]}, publish={"grace_ms": 0})
    assert cli.run()["status"] == "cleaned"
    assert cli.do("retire")["deleted"]
    assert cli.do("topics", "snapshot")["topics"] == 1
    lost.close()
    shutil.rmtree(lost.nodes[1].log_dir)
    cli.set(kafka={"bootstrap_servers": ""})

    found = new_cluster(settings={"log.cleaner.backoff.ms": "500"})
    report = put_in_place(cli, found, "--topic-id", topic_id)
    assert report["end_offset"] < tiered, "only the lost cluster had the outcome of the last transaction in the tier"
    written.forget_from(report["end_offset"] + 1)
    read = consume(found, "lost", isolation=READ_COMMITTED)
    committed = {record.offset: record for record in written.committed()}
    assert [committed[record.offset].value for record in read] == [record.value for record in read]
    assert len(read) < len(committed)
    last = {record.key: record for record in read}
    assert {key: record.offset for key, record in last.items() if record.value is not None} == {
        key: record.offset for key, record in written.latest().items()
    }
    cleaned = parse_cleaner_offset_checkpoint((found.nodes[1].log_dir / "cleaner-offset-checkpoint").read_text())["lost", 0]
    assert 0 < cleaned == cli.do("checkpoints", "show", "lost-0")["cleaner_offsets"][-1]["offset"]
    with ClusterAdmin(found) as admin:
        admin.set_config("lost", {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
        drafts = [DraftRecord(b"new", b"x" * 1000, 1_700_001_000_000) for _ in range(40)]
        Writer(found, "lost", WrittenPartition()).write(drafts, per_batch=5)  # more than a segment: the cleaner leaves the active one alone
        first_line = re.compile(r"Building offset map for log lost-0 .* in offset range \[(\d+),")
        wait_until(lambda: first_line.search(found.nodes[1].text()) is not None, "the broker's cleaner to begin")
        assert int(first_line.findall(found.nodes[1].text())[0]) == cleaned, "it does not read again what is clean"
