"""A state of many keys restored: ``latest`` from a tier beside confluent-kafka and a Java consumer that read the topic from a broker.

    python -m benchmarks.restore [--keys 10000000] [--value-bytes 100]          (needs Java and Maven; a broker of its own is filled)

Each key of the topic occurs once (lz4), as compaction leaves it, and the tier has the same segments in a directory. The readers from the
broker only add up lengths of keys and values; ``latest`` makes Arrow batches of them. Each way runs alone. Seconds and CPU seconds are
those of the reading process, without the broker's. Memory: the most anonymous memory while
``latest`` runs, beyond that before it, per key; the batch that is handed out is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.consumer import NAME, VERSION, by_broker
from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.consumer import Place, TieredConsumer
from compactor.transfer.import_ import import_directory
from compactor.transfer.import_options import ImportOptions
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import broker_jars


@dataclass(frozen=True)
class Restored:
    """``payload_bytes``: of all keys and values."""

    seconds: float
    cpu_seconds: float
    payload_bytes: int


@dataclass
class AnonymousMemory:
    """The most bytes of anonymous memory that this process had meanwhile, beyond those at the beginning."""

    peak_bytes: int = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        before, done = anonymous_bytes(), threading.Event()

        def watch() -> None:
            while not done.wait(0.02):
                self.peak_bytes = max(self.peak_bytes, anonymous_bytes() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def fill_with_keys(cluster: KafkaCluster, keys: int, value_bytes: int) -> None:
    """Produce each key once, in an order of its own; half of each value is compressible."""
    from confluent_kafka import Producer

    dice = random.Random(1)
    noise = dice.randbytes(1 << 20)
    producer = Producer({**cluster.client_settings(), "compression.type": "lz4", "linger.ms": 50, "batch.size": 262_144})
    for number in range(keys):
        at = dice.randrange(len(noise) - value_bytes)
        value = noise[at : at + value_bytes // 2] + b"-" * (value_bytes - value_bytes // 2)
        producer.produce(NAME.topic, value, b"key-%09d" % (number * 7_919 % 1_000_000_007), NAME.partition)
        if number % 50_000 == 0:  # the client queues at most 100,000 records
            producer.flush(120)
    producer.flush(120)


def by_latest(tier: Tier) -> tuple[int, int]:
    """Return the number of keys, and bytes of keys and values."""
    keys = size = 0
    with TieredConsumer(tier) as consumer:
        for batch in consumer.latest(Place(*NAME)).arrow("key", "value"):
            keys += batch.num_rows
            size += sum(int(column.nbytes) for column in batch.columns)
    return keys, size


def by_java(cluster: KafkaCluster, end: int) -> Restored:
    program = Path(__file__).with_name("RestoreState.java")
    words = ["java", "-cp", broker_jars(VERSION).class_path, str(program), cluster.bootstrap, NAME.topic, str(end)]
    answer = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.split()
    return Restored(float(answer[0]), float(answer[1]), int(answer[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    prepare(VERSION)
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch, KafkaCluster(VERSION, Path(scratch) / "cluster") as cluster:
        with ClusterAdmin(cluster) as admin:
            admin.create_topic(NAME.topic, segment_bytes=8 << 20, settings={"remote.storage.enable": "false"})
        fill_with_keys(cluster, args.keys, args.value_bytes)
        config = Path(scratch) / "tier.toml"
        config.write_text(f'[tier]\nurl = "{(Path(scratch) / "tier").as_uri()}"\nstate_dir = "{Path(scratch) / "state"}"\n')
        tier = open_tier(load_settings(str(config), {}))
        log_dir = cluster.nodes[1].log_dir / str(NAME)
        import_directory(tier, log_dir, NAME, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(live=True))
        end = tier.open(NAME).refresh().end_offset + 1
        next(iter(TieredConsumer(tier).latest(Place(*NAME)).arrow("key", "value")))  # compiles
        memory = AnonymousMemory()
        began, used = time.perf_counter(), time.process_time()
        with memory.watched():
            keys, _ = by_latest(tier)
        ours = Restored(time.perf_counter() - began, time.process_time() - used, 0)
        if keys != end:
            raise SystemExit(f"{end} keys are in the tier, and {keys} were restored")
        began, used = time.perf_counter(), time.process_time()
        read = by_broker(cluster, end)
        confluent = Restored(time.perf_counter() - began, time.process_time() - used, read)
        java = by_java(cluster, end)
    if java.payload_bytes != confluent.payload_bytes:
        raise SystemExit(f"the readers disagree: {java}, {confluent}")
    rows = []
    for name, found in (("`latest`, from the tier", ours), ("confluent-kafka", confluent), ("Java consumer", java)):
        print(json.dumps({"way": name, "keys": end, "seconds": round(found.seconds, 2), "cpu_seconds": round(found.cpu_seconds, 2)}))
        held = f"{memory.peak_bytes / end:.0f}" if found is ours else ""
        ratio = found.cpu_seconds / ours.cpu_seconds
        rows.append(
            (name, f"{found.seconds:.1f}", f"{found.cpu_seconds:.1f}", f"{ratio:.1f}", f"{end / found.cpu_seconds / 1e6:.2f}", held)
        )
    print(f"load {os.getloadavg()[0]:.1f}")
    columns = ("", "seconds", "CPU s", "times `latest`", "million keys per CPU s", "memory, bytes a key")
    report_table(BenchmarkTable("restore", columns, rows, compared=("times `latest`",)))


if __name__ == "__main__":
    main()
