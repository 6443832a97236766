"""What compaction of a brokers' tier is worth to consumers: size of the remote part, and time to read the topic, before and after.

    python -m benchmarks.brokers_tier [--records N] [--keys N] [--value-bytes N]        (needs Java and Maven)

A real broker with LocalTieredStorage tiers a topic; librdkafka reads it from the start, read_committed, three times; `run` and `retire`
compact it under the running broker; it is read again. The median counts, with the processor time of the reader and of the broker.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer

from benchmarks.doc_tables import BenchmarkTable, report_table
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_demo import ROOT, TOPIC, settings_for
from tests.support.kafka_traffic import READ_COMMITTED, consume

SEGMENT_BYTES = 4 << 20
TIMES = 3


@dataclass(frozen=True)
class Reading:
    """Seconds of the wall and of processors; ``last``: the value that each key has at the end."""

    seconds: float
    reader: float
    broker: float
    records: int
    last: dict[bytes, bytes | None]


def broker_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read(cluster: KafkaCluster, end: int) -> Reading:
    """The tiered part, from the start."""
    readings = []
    for _ in range(TIMES):
        pid = cluster.nodes[1].pid
        began, own, broker = time.monotonic(), own_seconds(), broker_seconds(pid)
        found = consume(cluster, TOPIC, isolation=READ_COMMITTED)
        spent = (time.monotonic() - began, own_seconds() - own, broker_seconds(pid) - broker)
        mine = [record for record in found if record.offset <= end]
        last = {record.key: record.value for record in found if record.key is not None}
        readings.append(Reading(*spent, len(mine), last))
    return sorted(readings, key=lambda reading: reading.seconds)[TIMES // 2]


def write(cluster: KafkaCluster, records: int, keys: int, value_bytes: int) -> None:
    dice = random.Random(1)
    producer = Producer(
        {**cluster.client_settings(), "linger.ms": 50, "enable.idempotence": True, "queue.buffering.max.messages": 1_000_000}
    )
    for number in range(records):
        key = b"key-%08d" % dice.randrange(keys)
        value = None if dice.random() < 0.05 else dice.randbytes(value_bytes)
        producer.produce(TOPIC, value, key, 0)
        if number % 10_000 == 0:
            producer.poll(0)
    producer.flush(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--value-bytes", type=int, default=200)
    arguments = parser.parse_args()
    version = "4.4.0"
    prepare(version)
    with tempfile.TemporaryDirectory(prefix="brokers-tier-") as directory, KafkaCluster(version, Path(directory) / "cluster") as cluster:
        with ClusterAdmin(cluster) as admin:
            admin.create_topic(TOPIC, segment_bytes=SEGMENT_BYTES, settings={"index.interval.bytes": "4096"})
            write(cluster, arguments.records, arguments.keys, arguments.value_bytes)
            end = admin.wait_tiered(TOPIC).latest_tiered
        sizes, readings = [size(cluster)], [read(cluster, end)]
        settings = {**os.environ, **settings_for(cluster, Path(directory)), "TIERED_COMPACTOR__CLEANER__DELETE_RETENTION_MS": "0"}
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        for command in ("run", "run", "retire"):  # tombstones go in the second round
            subprocess.run([sys.executable, "-m", "compactor", command], cwd=ROOT, env=settings, check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        sizes.append(size(cluster))
        readings.append(read(cluster, end))
    spent = used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime
    print(f"{arguments.records} records of {arguments.keys} keys, values of {arguments.value_bytes} bytes; Kafka {version}")
    (before, after), (bytes_before, bytes_after) = readings, sizes
    figures = [
        ("remote log, bytes", "{:,.0f}", bytes_before, bytes_after),
        ("remote records", "{:,.0f}", before.records, after.records),
        ("topic read from the start", "{:.2f} s", before.seconds, after.seconds),
        ("CPU time of the reader", "{:.2f} s", before.reader, after.reader),
        ("CPU time of the broker", "{:.2f} s", before.broker, after.broker),
    ]
    rows = [(what, unit.format(old), unit.format(new), f"{old / max(new, 0.01):.1f}") for what, unit, old, new in figures]
    print(f"compaction: {spent:.1f} CPU s")
    same = all({key: value for key, value in reading.last.items() if value is not None} == left(readings[0]) for reading in readings)
    print(f"each key has the same last value: {'yes' if same else 'NO'}")
    report_table(BenchmarkTable("brokers_tier", ("", "before", "after `run`, `run`, `retire`", "ratio"), rows, compared=("ratio",)))
    return 0 if same and sizes[1] < sizes[0] else 1


def left(reading: Reading) -> dict[bytes, bytes | None]:
    return {key: value for key, value in reading.last.items() if value is not None}


def size(cluster: KafkaCluster) -> int:
    return sum(path.stat().st_size for path in cluster.tier.rglob("*.log"))


if __name__ == "__main__":
    sys.exit(main())
