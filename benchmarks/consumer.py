"""The same topic read by confluent-kafka from a broker, by TieredConsumer from a tier in a directory, and as a state, on one machine.

    python -m benchmarks.consumer [--megabytes 64] [--value-bytes 1000 100] [--keys 20000] [--codec lz4] [--rounds 3]

``broker_poll`` and ``tier_poll`` read message by message with ``poll``, as most applications do; their medians are compared.

Starts a broker of its own (Java and Maven are needed), fills a topic, imports its log directory while the broker runs, and reads each
way ``--rounds`` times, in turn; the best counts, and of the polls the medians of seconds and of CPU seconds too, because other work on the
machine makes single rounds several times longer. Megabytes are of keys and values. Everything is in the page cache: it is the machine's
processors that are compared, neither a network nor a bucket. CPU seconds are those of the reading process; a broker's are not counted.
``restored`` is what an application waits for that wants the last values; with confluent-kafka it has to read everything for that.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.consumer import Place, TieredConsumer
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.model.ids import TopicPartition
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster, prepare

NAME = TopicPartition("bench", 0)
VERSION = "4.4.0"


def fill_topic(cluster: KafkaCluster, key_numbers: Iterable[int], value_bytes: int, codec: str, segment_bytes: int) -> None:
    """Make the topic and produce one record for each key number; half of each value is compressible."""
    from confluent_kafka import Producer

    with ClusterAdmin(cluster) as admin:
        admin.create_topic(NAME.topic, segment_bytes=segment_bytes, settings={"remote.storage.enable": "false"})
    dice = random.Random(1)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "compression.type": codec, "linger.ms": 50, "batch.size": 262_144})
    noise = dice.randbytes(value_bytes * 64)
    for number, key in enumerate(key_numbers):
        at = dice.randrange(len(noise) - value_bytes)
        value = noise[at : at + value_bytes // 2] + b"-" * (value_bytes - value_bytes // 2)
        producer.produce(NAME.topic, value, b"key-%09d" % key, NAME.partition)
        if number % 10_000 == 0:  # the client queues at most 100,000 records
            producer.flush(120)
    producer.flush(120)


def import_topic(cluster: KafkaCluster, folder: Path) -> tuple[Tier, int]:
    """Import the topic's log directory into a new tier in a directory. Return the tier and its end offset (exclusive)."""
    config = folder / "tier.toml"
    config.write_text(f'[tier]\nurl = "{(folder / "tier").as_uri()}"\nstate_dir = "{folder / "state"}"\n')
    tier = open_tier(load_settings(str(config), {}))
    log_dir = cluster.nodes[1].log_dir / str(NAME)
    import_directory(tier, log_dir, NAME, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(live=True))
    return tier, tier.open_partition_log(NAME).refresh().end_offset + 1


def _reader_settings(cluster: KafkaCluster) -> dict[str, Any]:
    """Return settings of confluent-kafka. By default, its client stops fetching for a second whenever 100,000 records are queued."""
    common = {"bootstrap.servers": cluster.bootstrap, "group.id": "bench", "isolation.level": "read_committed"}
    return common | {"fetch.queue.backoff.ms": 1}


def by_broker(cluster: KafkaCluster, end: int) -> int:
    from confluent_kafka import Consumer, TopicPartition as Assigned

    consumer = Consumer(_reader_settings(cluster))
    consumer.assign([Assigned(*NAME, 0)])
    size, at = 0, 0
    while at < end:
        for message in consumer.consume(1000, 0.05):
            at = (message.offset() or 0) + 1
            if at <= end:  # the broker has records that the tier does not have
                size += len(message.value() or b"") + len(message.key() or b"")
    consumer.close()
    return size


def by_tier(tier: Tier, end: int) -> int:
    size, at = 0, 0
    with TieredConsumer(tier) as consumer:
        consumer.assign([Place(*NAME, 0)])
        while at < end:
            for message in consumer.consume(1000, 0.05):
                size += len(message.value() or b"") + len(message.key() or b"")
                at = (message.offset() or 0) + 1
    return size


def poll_all(consumer: Any, end: int) -> int:
    """Read message by message, and use key, value and offset of each."""
    size, at = 0, 0
    while at < end:
        message = consumer.poll(1.0)
        if message is not None:
            size += len(message.value() or b"") + len(message.key() or b"")
            at = message.offset() + 1
    return size


def by_broker_poll(cluster: KafkaCluster, end: int) -> int:
    from confluent_kafka import Consumer, TopicPartition as Assigned

    consumer = Consumer(_reader_settings(cluster))
    consumer.assign([Assigned(*NAME, 0)])
    size = poll_all(consumer, end)
    consumer.close()
    return size


def by_tier_poll(tier: Tier, end: int) -> int:
    with TieredConsumer(tier) as consumer:
        consumer.assign([Place(*NAME, 0)])
        return poll_all(consumer, end)


def state_of(tier: Tier) -> int:
    with TieredConsumer(tier) as consumer:
        return sum(batch.num_rows for batch in consumer.latest(Place(*NAME)).arrow("key", "value"))


def measure(rounds: int, ways: dict[str, Callable[[], int]]) -> dict[str, list[tuple[float, float, int]]]:
    """Return for each way and round: seconds, CPU seconds of this process, and what the work came to. The ways take turns."""
    found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, work in ways.items():
            began, used = time.perf_counter(), time.process_time()
            made = work()
            found[way].append((time.perf_counter() - began, time.process_time() - used, made))
    return found


def measure_size(args: argparse.Namespace, value_bytes: int) -> list[tuple[str, ...]]:
    """Return the rows of the documents' table for values of this size, on a broker and a tier of their own."""
    figures: dict[str, Any] = {"value_bytes": value_bytes, "codec": args.codec}
    with tempfile.TemporaryDirectory() as scratch, KafkaCluster(VERSION, Path(scratch) / "cluster") as cluster:
        dice, records = random.Random(1), args.megabytes * 1_000_000 // (value_bytes + 13)
        fill_topic(cluster, (dice.randrange(args.keys) for _ in range(records)), value_bytes, args.codec, segment_bytes=4 << 20)
        tier, end = import_topic(cluster, Path(scratch))
        by_tier(tier, end)  # compiles
        ways: dict[str, Callable[[], int]] = {
            "broker": lambda: by_broker(cluster, end),
            "tier": lambda: by_tier(tier, end),
            "broker_poll": lambda: by_broker_poll(cluster, end),
            "tier_poll": lambda: by_tier_poll(tier, end),
            "restored": lambda: state_of(tier),
        }
        measured = measure(args.rounds, ways)
    for who, rounds in measured.items():
        seconds, cpu, made = min(rounds)
        figures[who] = {"seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3), "records_per_s": round(end / seconds)}
        figures[who] |= {"keys": made} if who == "restored" else {"mb_per_s": round(made / seconds / 1e6)}
    print(json.dumps(figures | {"records": end}))
    return [
        row
        for what, theirs, ours in (
            ("message by message", "broker_poll", "tier_poll"),
            ("many at a time", "broker", "tier"),
            ("last value of each key", "broker", "restored"),
        )
        for row in _compare(f"{value_bytes} B", what, measured[theirs], measured[ours])
    ]


def _compare(
    size: str, what: str, theirs: list[tuple[float, float, int]], ours: list[tuple[float, float, int]]
) -> Iterator[tuple[str, ...]]:
    for index, unit in enumerate(("median seconds", "median CPU seconds")):
        before, after = (statistics.median(taken[index] for taken in rounds) for rounds in (theirs, ours))
        yield size, what, unit, f"{before:.3f}", f"{after:.3f}", f"{after / before:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--value-bytes", type=int, nargs="+", default=[1000, 100])
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--codec", default="lz4")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    prepare(VERSION)
    rows = [row for value_bytes in args.value_bytes for row in measure_size(args, value_bytes)]
    columns = ("values", "read", "", "confluent-kafka from a broker", "TieredConsumer from the tier", "ratio")
    report_table(BenchmarkTable("consumer", columns, rows, compared=("ratio",), label_columns=3))


if __name__ == "__main__":
    main()
