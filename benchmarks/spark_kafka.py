"""Read a topic with Spark: our data source from a tier beside Spark's own Kafka source from a broker.

    python -m benchmarks.spark_kafka [--records 2000000] [--value-bytes 200 1000] [--keys 200000] [--rounds 2]     (needs Java and Maven)

A broker of its own is filled with a topic of two partitions (lz4), whose log directories are imported into a directory and into a bucket of
versitygw. Each way reads the topic on local[2] in one Spark session: into a count, an aggregate by key, a Parquet file, and the last value
of each key (``view = latest`` beside a window over the Kafka source). The ways take turns; the best round counts.

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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.process_tree import below, cpu_seconds
from benchmarks.spark_plain import TICKS
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.model.ids import TopicPartition
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster, prepare
from tests.support.kafka_jars import maven_jars
from tests.support.s3_server import S3Server, running_versitygw, versitygw_binary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "orders"
VERSION = "4.4.0"
PARTITIONS = 2
WORK = {"count": "count", "aggregate": "aggregate by key", "parquet": "Parquet", "latest": "last value of each key"}
READ_COLUMNS = {"count": "offset", "aggregate": "key,offset", "parquet": "key,value,offset,timestamp", "latest": "key,value,offset"}


def fill_topic(cluster: KafkaCluster, records: int, value_bytes: int, keys: int) -> None:
    """Produce records with random keys, half of each value compressible."""
    from confluent_kafka import Producer

    with ClusterAdmin(cluster) as admin:
        settings = {"remote.storage.enable": "false"}
        admin.create_topic(TOPIC, replicas=[[1]] * PARTITIONS, segment_bytes=8 << 20, settings=settings)
    dice = random.Random(1)
    noise = dice.randbytes(16 << 20)  # more than a codec looks back
    producer = Producer({**cluster.client_settings(), "compression.type": "lz4", "linger.ms": 50, "batch.size": 262_144})
    for number in range(records):
        at = dice.randrange(len(noise) - value_bytes)
        value = noise[at : at + value_bytes // 2] + b"-" * (value_bytes - value_bytes // 2)
        key = dice.randrange(keys)
        producer.produce(TOPIC, value, b"key-%012d" % key, key % PARTITIONS)
        if number % 10_000 == 0:  # the client queues at most 100,000 records
            producer.flush(120)
    producer.flush(120)


def import_topic(cluster: KafkaCluster, url: str, folder: Path, server: S3Server) -> dict[str, int]:
    """Import the topic's log directories into a new tier. Return the end offset (exclusive) of each partition: the broker's newest segment
    is not in the tier.
    """
    config = folder / "tier.toml"
    config.write_text(f'[tier]\nurl = "{url}"\nstate_dir = "{folder / "state"}"\n[s3]\nendpoint_url = "{server.endpoint}"\n')
    tier = open_tier(load_settings(str(config), {}))
    ends = {}
    for partition in range(PARTITIONS):
        name = TopicPartition(TOPIC, partition)
        log_dir = cluster.nodes[1].log_dir / str(name)
        import_directory(tier, log_dir, name, tier.settings.cleaner.cleaner_policy(), options=ImportOptions(live=True))
        ends[str(partition)] = tier.open_partition_log(name).refresh().end_offset + 1
    return ends


def start_spark() -> SparkSession:
    """Start Spark with Kafka's source and ours."""
    from pyspark.sql import SparkSession

    from compactor.spark import register

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    jars = maven_jars("spark-kafka-4.2.0", Path(__file__).with_suffix(".xml")).class_path.split(os.pathsep)
    wanted = [jar for jar in jars if "kafka" in jar or "commons-pool2" in jar]  # Spark has the others
    builder: Any = SparkSession.builder
    builder = builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "3g")
    spark: SparkSession = builder.config("spark.sql.shuffle.partitions", "4").config("spark.jars", ",".join(wanted)).getOrCreate()
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


def consume(work: str, frame: DataFrame, out: Path) -> int:
    """Do one kind of work with a topic. Return the number of rows that it gave."""
    if work == "count":
        return frame.count()
    if work == "aggregate":
        return frame.groupBy("key").agg({"*": "count", "offset": "max"}).count()
    if work == "parquet":
        frame.select("key", "value", "offset", "timestamp").write.mode("overwrite").parquet(str(out))
        return sum(1 for _ in out.glob("*.parquet"))
    return int(frame.selectExpr("count(value)", "sum(length(value))").collect()[0][0])


def measure(args: argparse.Namespace, value_bytes: int) -> list[tuple[str, ...]]:
    """Return a row of the documents' table for each kind of work with values of this size."""
    measured: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch, KafkaCluster(VERSION, Path(scratch) / "cluster") as cluster:
        folder = Path(scratch)
        (folder / "served").mkdir()
        fill_topic(cluster, args.records, value_bytes, args.keys)
        with running_versitygw(versitygw_binary(), folder / "served") as server:
            os.environ.update(server.environment())
            bucket = server.make_bucket()
            urls = {"directory": (folder / "tier").as_uri(), "S3": bucket.url}
            for name, url in urls.items():
                (folder / name).mkdir()
                ends = import_topic(cluster, url, folder / name, server)
            spark = start_spark()

            def from_tier(url: str, work: str) -> DataFrame:
                view = "latest" if work == "latest" else "all"
                options = {"url": url, "endpointUrl": server.endpoint, "region": server.region, "topic": TOPIC}
                return spark.read.format("kafka-tiered").options(**options, columns=READ_COLUMNS[work], view=view).load()

            def from_broker(work: str) -> DataFrame:
                options = {"kafka.bootstrap.servers": cluster.bootstrap, "subscribe": TOPIC, "kafka.isolation.level": "read_committed"}
                frame = spark.read.format("kafka").options(**options, endingOffsets=json.dumps({TOPIC: ends})).load()
                return last_values_by_window(frame) if work == "latest" else frame

            ways: dict[str, Callable[[str], DataFrame]] = {
                "broker": from_broker,
                **{name: (lambda work, url=url: from_tier(url, work)) for name, url in urls.items()},
            }
            peers = {"broker": cluster.nodes[1].pid}
            for work, title in WORK.items():
                best: dict[str, float] = {}
                rows: dict[str, int] = {}
                for _ in range(args.rounds):
                    for way, read in ways.items():
                        pid = peers.get(way)
                        before, served = cpu_seconds(), below(pid)[pid] if pid else 0
                        rows[way] = consume(work, read(work), folder / "out")
                        used = cpu_seconds() - before + ((below(pid)[pid] - served) / TICKS if pid else 0)
                        best[way] = min(best.get(way, used), used)
                if work != "parquet" and len(set(rows.values())) > 1:
                    raise SystemExit(f"{work}: the ways disagree: {rows}")
                figures = {way: round(seconds, 2) for way, seconds in best.items()}
                ratios = {way: round(best["broker"] / best[way], 1) for way in urls}
                row = {"value_bytes": value_bytes, "work": work, "rows": rows["broker"], "cpu_seconds": figures, "ratio": ratios}
                print(json.dumps(row | {"load": round(os.getloadavg()[0], 1)}), flush=True)
                told = "1 KB" if value_bytes == 1000 else f"{value_bytes} B"
                measured.append(
                    (told, title, *(f"{best[way]:.1f}" for way in ("broker", *urls)), ", ".join(f"{ratios[way]:.1f}" for way in urls))
                )
                shutil.rmtree(folder / "out", ignore_errors=True)
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
