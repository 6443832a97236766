"""Full re-compaction against what one would do without it: a PySpark job over the topic, and producing it anew through a broker.

    python -m benchmarks.spark_plain [--records N] [--keys N] [--value-bytes N] [--broker-part N] [--dir D]      (needs Java and Maven)

The first two are on local[2], over tiers of the same objects behind an S3 server on this machine (versitygw), in processes of their own.

    recompact       with the gate and without it
    max_by job      `max_by(value, offset)` by key over our own data source, written as Parquet: less than compaction does (headers, times,
                    transactions and offsets are lost; nobody can consume it from Kafka before it was produced anew)
    through broker  the topic is consumed with confluent-kafka and produced into a compacted topic of the same broker, until that broker's
                    cleaner has been through: a ``broker-part``-th of the records and keys. That the topic is on the broker is not counted

Prints seconds without Spark's start and the broker's, and CPU seconds of the whole process tree, the JVM included (of the broker: what it
used meanwhile); the S3 server is not counted. ``requests``: what the S3 server has logged, and what librdkafka has sent. ``exchanged_mb``:
what went through Spark's shuffle or, with `recompact`, from executor to executor, and with a broker what it received.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.process_tree import below
from benchmarks.spark import NAME, NOW_MS, write_log
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory

KAFKA = "4.4.0"
SEGMENT_BYTES = 16 << 20
BROKER = {"log.cleaner.dedupe.buffer.size": str(128 << 20), "log.cleaner.io.buffer.size": str(1 << 20), "log.cleaner.backoff.ms": "500"}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Server:
    """An S3 server that writes down each request."""

    endpoint: str
    log: Path
    pid: int

    @property
    def requests(self) -> int:
        return self.log.read_bytes().count(b"\n")


@contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    from tests.support.s3_server import S3Server, versitygw_binary

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = S3Server(f"http://127.0.0.1:{port}")
    os.environ.update(server.environment())
    (folder / "buckets" / "bench").mkdir(parents=True)
    words = [str(versitygw_binary()), "--access", server.access_key, "--secret", server.secret_key, "--region", server.region, "--port"]
    words += [f"127.0.0.1:{port}", "--quiet", "--keep-alive", "--access-log", str(folder / "requests"), "posix", str(folder / "buckets")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
            yield Server(server.endpoint, folder / "requests", process.pid)
        finally:
            process.kill()


def plain(url: str, endpoint: str, out: str) -> dict[str, Any]:
    """The job, in this process."""
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import max as highest, max_by

    from compactor.spark import register

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    spark = builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "2g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    spark.range(10).count()
    begin = time.monotonic()
    options = {"url": url, "endpointUrl": endpoint, "region": "us-east-1", "topic": NAME.topic, "columns": "key,value,offset"}
    df = spark.read.format("kafka-tiered").options(**options).load()
    last = df.groupBy("key").agg(max_by("value", "offset").alias("value"), highest("offset").alias("offset")).where("value is not null")
    last.write.parquet(out)
    seconds = time.monotonic() - begin
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(False)
    shuffled = sum(int(executors.apply(number).totalShuffleWrite()) for number in range(executors.size()))
    kept = spark.read.parquet(out).count()
    spark.stop()
    return {"what": "max_by job", "seconds": round(seconds, 1), "exchanged_mb": shuffled // 1_000_000, "kept": kept}


def watched(words: list[str], server: Server) -> dict[str, Any]:
    """The document that a command ends with, CPU seconds of it and of all below it, and what it asked of the store."""
    before, ticks = server.requests, dict[int, int]()
    with tempfile.TemporaryFile() as out, subprocess.Popen(words, stdout=out, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for pid, used in below(process.pid, ended=False).items():
                ticks[pid] = max(used, ticks.get(pid, 0))
            time.sleep(0.2)
        out.seek(0)
        text = out.read().decode()
    if process.returncode:
        raise SystemExit(f"{words[2]} failed: {text[-2000:]}")
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found | {"cpu_seconds": round(sum(ticks.values()) / TICKS, 1), "requests": server.requests - before}


@dataclass(frozen=True)
class Tiers:
    """Tiers of the same log. ``segment_bytes``: as large as the log's own segments, so that groups are rewritten beside each other."""

    folder: Path
    server: Server
    segment_bytes: int

    def url(self, name: str) -> str:
        return f"s3://bench/{name}"

    def config(self, name: str, gate: bool) -> Path:
        file = self.folder / f"{name}.toml"
        file.write_text(
            f'[tier]\nurl = "{self.url(name)}"\nstate_dir = "{self.folder / name}"\n[s3]\nendpoint_url = "{self.server.endpoint}"\n'
            f'[cleaner]\nmap_engine = "spark"\nsegment_bytes = {self.segment_bytes}\nverify_before_publish = {str(gate).lower()}\n'
            f'map_budget_bytes = {2 << 30}\n[spark]\nmaster = "local[2]"\n'
        )
        return file

    def bring(self, name: str, log_dir: Path) -> None:
        tier = open_tier(load_settings(str(self.config(name, gate=True)), {}))
        import_directory(tier, log_dir, NAME, tier.settings.cleaner.cleaner_policy())

    def recompact(self, name: str, *, gate: bool) -> dict[str, Any]:
        words = [sys.executable, "-m", "compactor", "recompact", "--now", str(NOW_MS), "--config", str(self.config(name, gate))]
        document = watched([*words, "--output", "json"], self.server)
        (row,), spark = document["partitions"], document["spark"]
        return {
            "what": "recompact" if gate else "recompact, no gate", "seconds": row["seconds"], "kept": row["records_kept"],
            "exchanged_mb": spark["exchanged_bytes"] // 1_000_000, "worker_cpu_seconds": round(spark["worker_cpu_seconds"], 1),
            "cpu_seconds": document["cpu_seconds"], "requests": document["requests"],
        }  # fmt: skip

    def job(self, name: str) -> dict[str, Any]:
        words = [sys.executable, "-m", "benchmarks.spark_plain", "--job", self.url(name), self.server.endpoint, str(self.folder / "out")]
        return watched(words, self.server)


@dataclass
class Sent:
    """What librdkafka's statistics say: requests to brokers."""

    requests: int = 0

    def __call__(self, text: str) -> None:
        self.requests = sum(broker["tx"] for broker in json.loads(text)["brokers"].values())


def through_broker(folder: Path, records: int, keys: int, value_bytes: int) -> dict[str, Any]:
    """Topic -> client -> compacted topic, until the broker's cleaner has been through all that it may clean."""
    from confluent_kafka import Consumer, Producer, TopicPartition

    from tests.support.kafka_admin import ClusterAdmin
    from tests.support.kafka_broker import KafkaCluster, prepare

    prepare(KAFKA)
    with KafkaCluster(KAFKA, folder / "cluster", settings=BROKER) as cluster, ClusterAdmin(cluster) as admin:
        compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "remote.storage.enable": "false"}
        admin.create_topic("orders", segment_bytes=SEGMENT_BYTES, settings={"remote.storage.enable": "false"})
        admin.create_topic("latest", segment_bytes=SEGMENT_BYTES, settings=compacted)
        fast = {**cluster.client_settings(), "linger.ms": 50, "enable.idempotence": True, "queue.buffering.max.messages": 500_000}
        dice, value = random.Random(1), random.Random(2).randbytes(value_bytes)
        loading = Producer(fast)
        for number in range(records):
            _produce(loading, "orders", value, b"key-%012d" % dice.randrange(keys), number)
        loading.flush(300)
        pid = cluster.nodes[1].pid
        begin, own, broker = time.monotonic(), time.process_time(), below(pid)[pid]
        read, wrote = Sent(), Sent()
        counted = {"statistics.interval.ms": 200}
        consumer = Consumer({**cluster.client_settings(), **counted, "group.id": "anew", "enable.auto.commit": False, "stats_cb": read})
        producer = Producer({**fast, **counted, "stats_cb": wrote})
        consumer.assign([TopicPartition("orders", 0, 0)])
        done = 0
        while done < records:
            for message in consumer.consume(1000, 1.0):
                _produce(producer, "latest", message.value(), message.key(), done)
                done += 1
        if producer.flush(300):
            raise SystemExit("the broker did not take all records")
        consumer.poll(0.5)
        producer.poll(0.5)
        client = time.process_time() - own
        consumer.close()
        received = sum(file.stat().st_size for file in (cluster.nodes[1].log_dir / "orders-0").glob("*.log"))
        checkpoint = cluster.nodes[1].log_dir / "cleaner-offset-checkpoint"
        while _cleaned(checkpoint) < admin.active_base("latest"):
            time.sleep(0.1)
        seconds, used = time.monotonic() - begin, (below(pid)[pid] - broker) / TICKS
        left = sum(file.stat().st_size for file in (cluster.nodes[1].log_dir / "latest-0").glob("*.log"))
    return {
        "what": "through broker", "records": records, "keys": keys, "seconds": round(seconds, 1), "exchanged_mb": received // 1_000_000,
        "left_mb": left // 1_000_000, "cpu_seconds": round(client + used, 1), "client": round(client, 1), "broker": round(used, 1),
        "requests": read.requests + wrote.requests,
    }  # fmt: skip


def _produce(producer: Any, topic: str, value: bytes, key: bytes, number: int) -> None:
    while True:
        try:
            producer.produce(topic, value, key, 0)
            break
        except BufferError:
            producer.poll(0.1)
    if number % 1000 == 0:
        producer.poll(0)


def _cleaned(checkpoint: Path) -> int:
    lines = checkpoint.read_text().splitlines() if checkpoint.exists() else []
    return max((int(line.split()[2]) for line in lines if line.startswith("latest 0 ")), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--keys", type=int, default=750_000)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--broker-part", type=int, default=2, help="0: without a broker")
    parser.add_argument("--dir", default=None)
    parser.add_argument("--job", nargs=3, metavar=("URL", "ENDPOINT", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(plain(*args.job)))
        return
    sizes = {"records": args.records, "keys": args.keys, "value_bytes": args.value_bytes}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, s3_server(Path(folder)) as server:
        log_dir = write_log(Path(folder) / "log", segments=20, **sizes)
        tiers = Tiers(Path(folder), server, max(file.stat().st_size for file in log_dir.iterdir()))
        for name in ("one", "two"):
            tiers.bring(name, log_dir)
        shutil.rmtree(log_dir)
        print(json.dumps(sizes | {"load": os.getloadavg()[0]}), flush=True)
        job = tiers.job("one")
        ways = {
            "the PySpark job": job,
            "`recompact`, spread": tiers.recompact("one", gate=True),
            "without the gate": tiers.recompact("two", gate=False),
        }
        if part := args.broker_part:
            through = through_broker(Path(folder), args.records // part, args.keys // part, args.value_bytes)
            ways[f"through a broker, 1/{part} of the records"] = through
    rows = []
    for name, found in ways.items():
        print(json.dumps(found), flush=True)
        per_record = found["cpu_seconds"] / found.get("records", args.records)
        ratio = per_record * args.records / job["cpu_seconds"]
        rows.append((name, f"{found['cpu_seconds']:.1f}", f"{ratio:.2f}", str(found["requests"]), str(found["exchanged_mb"])))
    columns = ("", "CPU s", "of the job's, per record", "requests", "moved, MB")
    report_table(BenchmarkTable("spark_plain", columns, rows, compared=columns[2:]))


if __name__ == "__main__":
    main()
