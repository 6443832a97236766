"""Kafka Streams restores what suppress had held back from a changelog, before and after the changelog was compacted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from compactor.cleaner.offline import OfflineCleanOptions, clean_log_directory
from tests.golden_cases import client_rounds, unpack
from tests.plain_format import Record, read_batches
from tests.plain_log import control_type
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_jars import BrokerUnavailable, maven_jars
from tests.support.kafka_traffic import DraftRecord, Writer, WrittenPartition
from tests.support.streams_table import FOLDER, VERSION

pytestmark = [pytest.mark.slow_broker, pytest.mark.timeout(600)]
DAY_MS = 86_400_000
ANY_TIME = {"log.retention.ms": "-1", "log.message.timestamp.after.max.ms": str(2**63 - 1)}
"""Settings of brokers. Golden logs have the times of the day on which they were made."""


def committed(log_dir: Path) -> list[Record]:
    """Return the records of a log whose transactions of version 2 have an epoch each, without those of aborted ones."""
    batches = [batch for path in sorted(log_dir.glob("*.log")) for batch in read_batches(path.read_bytes())]
    aborted = {(batch.producer_id, batch.producer_epoch - 1) for batch in batches if batch.control and control_type(batch) == 0}
    kept = (batch for batch in batches if not batch.control and (batch.producer_id, batch.producer_epoch) not in aborted)
    return [record for batch in kept for record in batch.records]


def released(cluster: KafkaCluster, folder: Path, logs: dict[str, list[Record]]) -> dict[str, list[list[str]]]:
    """Return what an application of each name releases that has these records as its changelog: time, key and value, in order."""
    try:
        jars = maven_jars(f"streams-{VERSION}", FOLDER / "pom.xml")
    except BrokerUnavailable as error:
        pytest.skip(str(error))
    with ClusterAdmin(cluster) as admin:
        for name, records in logs.items():
            changelog = f"{name}-final-store-changelog"
            policies = {f"{name}-in": "delete", f"{name}-out": "delete", changelog: "compact"}
            each = {"num_partitions": 1, "replication_factor": 1}
            admin._client.create_topics({topic: each | {"configs": {"cleanup.policy": policy}} for topic, policy in policies.items()})
            drafts = [
                DraftRecord(one.key, one.value, one.timestamp, tuple((name.decode(), value) for name, value in one.headers))
                for one in records
            ]
            Writer(cluster, changelog, WrittenPartition()).write(drafts)
    time_ms = max(record.timestamp for records in logs.values() for record in records) + DAY_MS
    program = [*jars.command(str(Path(__file__).with_name("ReleaseSuppressed.java"))), cluster.bootstrap, str(folder), str(time_ms), *logs]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[list[str]]] = {name: [] for name in logs}
    for line in done.stdout.splitlines():
        name, *rest = line.split()
        found[name].append(rest)
    return found


def held_back(records: Iterable[Record]) -> dict[bytes, bytes]:
    last = {record.key or b"": record.value for record in records}
    return {key: value for key, value in last.items() if value is not None}


def test_suppress_releases_the_same_from_a_changelog_before_and_after_each_round(
    new_cluster: Callable[..., KafkaCluster], tmp_path: Path
) -> None:
    rounds = client_rounds(unpack("clients", tmp_path / "golden") / "streams-suppress", "drop", tmp_path)
    logs = {"before": committed(rounds[0].log_dir)}
    for number, each in enumerate(rounds, start=1):
        clean_log_directory(each.log_dir, tmp_path / f"out{number}", OfflineCleanOptions(**each.request()))
        logs[f"ours{number}"], logs[f"kafka{number}"] = committed(tmp_path / f"out{number}"), committed(each.expected_dir)
    assert len(logs["before"]) > 10 * len(logs["ours3"])
    with new_cluster(VERSION, settings=ANY_TIME) as cluster:
        found = released(cluster, tmp_path / "state", logs)
    assert len(found["before"]) == len(held_back(logs["before"])) > 40
    assert found == dict.fromkeys(logs, found["before"])
