"""Read a topic with Spark: our data source from a tier beside Spark's own Kafka source from a broker.

    python -m benchmarks.spark_kafka [--records 2000000] [--value-bytes 200 1000] [--keys 200000] [--rounds 2]     (needs Java and Maven)

A broker of its own is filled with a topic of two partitions (lz4), whose log directories are imported into a directory and into a bucket of
versitygw. Each way reads the topic on local[2] in one Spark session: into a count, an aggregate by key, a Parquet file, and the last value
of each key (``view = latest`` beside a window over the Kafka source). The ways take turns; the best round counts.

A second topic has as many records, each with a key of its own, so that its Iceberg table has the rows of its Parquet files (both with
zstd). ``and its round``: with the first round of the topic, once.

CPU seconds are those of the driver's JVM and Python workers; for Kafka's source those of the broker are added, for a bucket those of the S3
server. The ratio divides the CPU seconds of Kafka's source by ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.process_tree import below, cpu_seconds
from benchmarks.spark import NOW_MS
from benchmarks.spark_plain import TICKS
from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.iceberg.output import IcebergOutput, read_table_status
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.local.budget import DiskBudget
from compactor.model.ids import TopicPartition
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import maven_jars
from tests.support.s3_server import S3Server, running_versitygw, versitygw_binary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC, UNIQUE_KEYS = "orders", "events"
VERSION = "4.4.0"
PARTITIONS = 2
WORK = {
    "count": "count", "aggregate": "aggregate by key", "noop": "rows, dropped", "parquet": "Parquet",
    "parquet-plain": "Parquet, values without dictionary", "latest": "last value of each key",
}  # fmt: skip
READ_COLUMNS = {"count": "offset", "aggregate": "key,offset", "latest": "key,value,offset"}
FILE_COLUMNS = "key,value,offset,timestamp"


def fill_topic(cluster: KafkaCluster, topic: str, records: int, value_bytes: int, keys: int) -> None:
    """Produce records with random keys, half of each value compressible. ``keys``: 0 for a key of its own for each."""
    from confluent_kafka import Producer

    with ClusterAdmin(cluster) as admin:
        settings = {"remote.storage.enable": "false"}
        admin.create_topic(topic, replicas=[[1]] * PARTITIONS, segment_bytes=8 << 20, settings=settings)
    dice = random.Random(1)
    noise = dice.randbytes(16 << 20)  # more than a codec looks back
    producer = Producer({**cluster.client_settings(), "compression.type": "lz4", "linger.ms": 50, "batch.size": 262_144})
    for number in range(records):
        at = dice.randrange(len(noise) - value_bytes)
        value = noise[at : at + value_bytes // 2] + b"-" * (value_bytes - value_bytes // 2)
        key = dice.randrange(keys) if keys else number
        producer.produce(topic, value, b"key-%012d" % key, key % PARTITIONS)
        if number % 10_000 == 0:  # the client queues at most 100,000 records
            producer.flush(120)
    producer.flush(120)


def make_tier(url: str, folder: Path, server: S3Server) -> Tier:
    """Open a new tier, with an Iceberg table for UNIQUE_KEYS in ``folder``."""
    config = folder / "tier.toml"
    config.write_text(
        f'[tier]\nurl = "{url}"\nstate_dir = "{folder / "state"}"\n[s3]\nendpoint_url = "{server.endpoint}"\n'
        f'[outputs.iceberg]\nwarehouse = "{(folder / "warehouse").as_uri()}"\n'
        f'catalog = {{ type = "sql", uri = "sqlite:///{folder}/catalog.db" }}\n[outputs.iceberg.topics.{UNIQUE_KEYS}]\n'
    )
    return open_tier(load_settings(str(config), {}))


def import_topic(cluster: KafkaCluster, topic: str, tier: Tier) -> dict[str, int]:
    """Import the topic's log directories into a tier. Return the end offset (exclusive) of each partition: the broker's newest segment
    is not in the tier.
    """
    ends = {}
    for partition in range(PARTITIONS):
        name = TopicPartition(topic, partition)
        log_dir = cluster.nodes[1].log_dir / str(name)
        import_directory(tier, log_dir, name, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(live=True))
        ends[str(partition)] = tier.open_partition_log(name).refresh().end_offset + 1
    return ends


def kafka_jars() -> list[str]:
    """Jars of Spark's Kafka source that Spark itself does not have."""
    jars = maven_jars("spark-kafka-4.2.0", Path(__file__).with_suffix(".xml")).class_path.split(os.pathsep)
    return [jar for jar in jars if "kafka" in jar or "commons-pool2" in jar]


def start_spark(jars: Sequence[str] = ()) -> SparkSession:
    """Start Spark with our source, and those of ``jars``."""
    from pyspark.sql import SparkSession

    from compactor.spark import register

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    builder = builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "3g")
    spark: SparkSession = builder.config("spark.sql.shuffle.partitions", "4").config("spark.jars", ",".join(jars)).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    spark.range(10).count()
    return spark


def last_values_by_window(frame: DataFrame) -> DataFrame:
    """Return the last record of each key, unless it is a tombstone, as one writes it without ``view = latest``."""
    from pyspark.sql import Window
    from pyspark.sql.functions import row_number

    newest_first = Window.partitionBy("partition", "key").orderBy(frame["offset"].desc())
    return (
        frame.withColumn("rank", row_number().over(newest_first)).where("rank = 1 and value is not null").select("key", "value", "offset")
    )


def write_parquet(frame: DataFrame, out: Path, **options: str) -> int:
    """Return the number of files. With snappy, Spark's default, unless ``options`` say otherwise."""
    frame.select(*FILE_COLUMNS.split(",")).write.mode("overwrite").options(**options).parquet(str(out))
    return sum(1 for _ in out.glob("*.parquet"))


def clean(tier: Tier) -> int:
    return sum(compact(tier, TopicPartition(UNIQUE_KEYS, number), NOW_MS, force=True).bytes_written for number in range(PARTITIONS))


def write_table(tier: Tier, folder: Path) -> int:
    """Write the Iceberg table anew. Return its rows."""
    (folder / "catalog.db").unlink(missing_ok=True)
    shutil.rmtree(folder / "warehouse", ignore_errors=True)
    output, rows = IcebergOutput(), 0
    for partition in range(PARTITIONS):
        name = TopicPartition(UNIQUE_KEYS, partition)
        done = output.update_output(tier, name, DiskBudget(1 << 40))
        status = read_table_status(tier, name)
        if done.status != "written" or status is None:
            raise SystemExit(f"{name}: the table was not written: {done}")
        rows += status.rows
    return rows


def consume(work: str, frame: DataFrame, out: Path) -> int:
    """Do one kind of work with a topic. Return the number of rows that it gave."""
    if work == "count":
        return frame.count()
    if work == "aggregate":
        return frame.groupBy("key").agg({"*": "count", "offset": "max"}).count()
    if work == "noop":
        frame.select(*FILE_COLUMNS.split(",")).write.format("noop").mode("overwrite").save()
        return 0
    if work == "parquet":
        return write_parquet(frame, out)
    if work == "parquet-plain":
        return write_parquet(frame, out, **{"parquet.enable.dictionary#value": "false"})
    return int(frame.selectExpr("count(value)", "sum(length(value))").collect()[0][0])


def measure(args: argparse.Namespace, value_bytes: int) -> list[tuple[str, ...]]:
    """Return a row of the documents' table for each kind of work with values of this size."""
    measured: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch, KafkaCluster(VERSION, Path(scratch) / "cluster") as cluster:
        folder = Path(scratch)
        (folder / "served").mkdir()
        fill_topic(cluster, TOPIC, args.records, value_bytes, args.keys)
        fill_topic(cluster, UNIQUE_KEYS, args.records, value_bytes, 0)
        with running_versitygw(versitygw_binary(), folder / "served") as server:
            os.environ.update(server.environment())
            bucket = server.make_bucket()
            urls = {"directory": (folder / "tier").as_uri(), "S3": bucket.url}
            ends: dict[str, dict[str, int]] = {}
            tiers: dict[str, Tier] = {}
            for name, url in urls.items():
                (folder / name).mkdir()
                tiers[name] = make_tier(url, folder / name, server)
                ends |= {topic: import_topic(cluster, topic, tiers[name]) for topic in (TOPIC, UNIQUE_KEYS)}
            spark = start_spark(kafka_jars())

            def from_tier(url: str, work: str, topic: str = TOPIC) -> DataFrame:
                view = "latest" if work == "latest" else "all"
                options = {"url": url, "endpointUrl": server.endpoint, "region": server.region, "topic": topic}
                return spark.read.format("kafka-tiered").options(**options, columns=READ_COLUMNS.get(work, FILE_COLUMNS), view=view).load()

            def from_broker(work: str, topic: str = TOPIC) -> DataFrame:
                options = {"kafka.bootstrap.servers": cluster.bootstrap, "subscribe": topic, "kafka.isolation.level": "read_committed"}
                frame = spark.read.format("kafka").options(**options, endingOffsets=json.dumps({topic: ends[topic]})).load()
                return last_values_by_window(frame) if work == "latest" else frame

            def cpu_of(way: str, work: Callable[[], int]) -> tuple[float, int]:
                pid = cluster.nodes[1].pid if way == "broker" else None
                before, served = cpu_seconds(), below(pid)[pid] if pid else 0
                rows = work()
                return cpu_seconds() - before + ((below(pid)[pid] - served) / TICKS if pid else 0), rows

            def compare(title: str, ways: dict[str, Callable[[], int]], known: dict[str, float] | None = None) -> dict[str, float]:
                """Add a row. ``known``: CPU seconds of ways that were measured before."""
                best, rows = dict(known or {}), dict[str, int]()
                for _ in range(args.rounds):
                    for way, work in ways.items():
                        used, rows[way] = cpu_of(way, work)
                        best[way] = min(best.get(way, used), used)
                    shutil.rmtree(folder / "out", ignore_errors=True)
                add_row(title, best, rows)
                return best

            def add_row(title: str, used: dict[str, float], rows: dict[str, int]) -> None:
                figures = {way: round(seconds, 2) for way, seconds in used.items()}
                ratios = {way: round(used["broker"] / used[way], 1) for way in urls}
                row = {"value_bytes": value_bytes, "work": title, "rows": rows, "cpu_seconds": figures, "ratio": ratios}
                print(json.dumps(row | {"load": round(os.getloadavg()[0], 1)}), flush=True)
                told = "1 KB" if value_bytes == 1000 else f"{value_bytes} B"
                cells = [f"{used[way]:.1f}" for way in ("broker", *urls)]
                measured.append((told, title, *cells, ", ".join(f"{ratios[way]:.1f}" for way in urls)))
                if "Parquet" not in title and len(set(rows.values())) > 1:
                    raise SystemExit(f"{title}: the ways disagree: {rows}")

            out = folder / "out"
            frames: dict[str, Callable[..., DataFrame]] = {"broker": from_broker} | {
                way: partial(from_tier, url) for way, url in urls.items()
            }
            ways: dict[str, Callable[[], int]]
            for work, title in WORK.items():
                ways = {way: lambda work=work, read=read: consume(work, read(work), out) for way, read in frames.items()}
                compare(title, ways)
            ways = {
                way: lambda read=read: write_parquet(read("parquet", UNIQUE_KEYS), out, compression="zstd") for way, read in frames.items()
            }
            parquet = {"broker": compare("Parquet, zstd", ways)["broker"]}
            rounds = {way: cpu_of(way, lambda tier=tier: clean(tier))[0] for way, tier in tiers.items()}
            tables = {way: lambda way=way: write_table(tiers[way], folder / way) for way in urls}
            written = compare("Iceberg table", tables, parquet)
            add_row("Iceberg table and its round", parquet | {way: written[way] + rounds[way] for way in urls}, {})
            spark.stop()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--value-bytes", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    prepare(VERSION)
    rows = [row for value_bytes in args.value_bytes for row in measure(args, value_bytes)]
    columns = ("values", "work", "Kafka source, CPU s", "directory", "S3", "ratio")
    report_table(BenchmarkTable("spark_kafka", columns, rows, compared=("ratio",), label_columns=2))


if __name__ == "__main__":
    main()
