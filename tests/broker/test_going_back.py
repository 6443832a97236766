"""From a compacted tier back to plain Kafka: a broker takes the exported directory, reads it, tiers it, and restarts with it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.builders import LogBuilder
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
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
        log.put("aborted=1", pid=90, txn=True)
        log.abort(90)
        log.put("k0")
        log.roll()
    log.put("open=1", pid=91, txn=True)
    log.put("behind=1")
    cli = TierCli(folder / "cli", {"cleaner": {"segment_bytes": 1500}})
    cli.named = "back-0"
    cli.bring(log.write(folder / "back-0"))
    cli.do("run", "--force")
    return cli


def test_a_broker_reads_tiers_and_restarts_with_an_exported_log(new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    cli, cluster = compacted_tier(tmp_path), new_cluster()
    node = cluster.nodes[1]
    with ClusterAdmin(cluster) as admin:
        admin.create_topic("back", settings={"remote.storage.enable": "false", "local.retention.bytes": "-2"})
    node.stop()
    place = node.log_dir / "back-0"
    topic_id = re.findall(r"topic_id: (\S+)", (place / "partition.metadata").read_text())[0]
    shutil.rmtree(place)
    report = cli.do("export", "back-0", place, "--leader-epoch-zero", "--new-topic-id", topic_id)
    node.launch()
    node.wait_started()
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


LAST = {b"k0": None} | {b"k%d" % key: b"%d" % min(key, 5) for key in range(1, 30)}
"""Last committed value of each key. Round n writes the keys from n on."""
