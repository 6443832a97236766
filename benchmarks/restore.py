"""A state of many keys restored: ``latest`` from a tier beside confluent-kafka and a Java consumer that read the topic from a broker.

    python -m benchmarks.restore [--keys 10000000] [--value-bytes 100]          (needs Java and Maven; a broker of its own is filled)

Each key of the topic occurs once (lz4), as compaction leaves it, and the tier has the same segments in a directory. The readers from the
broker only add up lengths of keys and values; ``latest`` makes Arrow batches of them. Each way runs alone. Seconds and CPU seconds are
those of the reading process, without the broker's. Memory: the most anonymous memory while ``latest`` runs, beyond that
before it, per key; the batch that is handed out is in it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.consumer import NAME, VERSION, by_broker, fill_topic, import_topic, measure, state_of
from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.consumer import Place, TieredConsumer
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import broker_jars


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


def by_java(cluster: KafkaCluster, end: int) -> tuple[float, float, int]:
    """Return seconds, CPU seconds of the reading and bytes of keys and values, as Java's own consumer counts them."""
    program = Path(__file__).with_name("RestoreState.java")
    words = ["java", "-cp", broker_jars(VERSION).class_path, str(program), cluster.bootstrap, NAME.topic, str(end)]
    answer = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.split()
    return float(answer[0]), float(answer[1]), int(answer[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    prepare(VERSION)
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch, KafkaCluster(VERSION, Path(scratch) / "cluster") as cluster:
        order = (number * 7_919 % 1_000_000_007 for number in range(args.keys))  # each key once, in an order of its own
        fill_topic(cluster, order, args.value_bytes, "lz4", segment_bytes=8 << 20)
        tier, end = import_topic(cluster, Path(scratch))
        next(iter(TieredConsumer(tier).latest(Place(*NAME)).arrow("key", "value")))  # compiles
        memory = AnonymousMemory()
        with memory.watched():
            (ours,) = measure(1, {"latest": lambda: state_of(tier)})["latest"]
        (confluent,) = measure(1, {"broker": lambda: by_broker(cluster, end)})["broker"]
        java = by_java(cluster, end)
    if ours[2] != end:
        raise SystemExit(f"{end} keys are in the tier, and {ours[2]} were restored")
    if java[2] != confluent[2]:
        raise SystemExit(f"the readers disagree: {java}, {confluent}")
    rows = []
    for name, (seconds, cpu, _) in (("`latest`, from the tier", ours), ("confluent-kafka", confluent), ("Java consumer", java)):
        held = f"{memory.peak_bytes / end:.0f}" if name.startswith("`latest`") else ""
        rows.append((name, f"{seconds:.1f}", f"{cpu:.1f}", f"{cpu / ours[1]:.1f}", f"{end / cpu / 1e6:.2f}", held))
    print(f"load {os.getloadavg()[0]:.1f}")
    columns = ("", "seconds", "CPU s", "times `latest`", "million keys per CPU s", "memory, bytes a key")
    report_table(BenchmarkTable("restore", columns, rows, compared=("times `latest`",)))


if __name__ == "__main__":
    main()
