"""Full re-compaction against what one would do without it: a PySpark job over the topic, and producing it anew through a broker.

    python -m benchmarks.spark_plain [--records N] [--keys N] [--value-bytes N] [--beside CHECKOUT] [--rounds N] [--larger N]
        [--broker-part N] [--dir D]      (needs Java and Maven)

The first two are on local[2], over tiers of the same objects behind an S3 server on this machine (versitygw), in processes of their own.

    recompact       as a person runs it, with an archive of the JVM's classes that was made before, without the gate, and in CHECKOUT
    max_by job      `max_by(value, offset)` by key over our own data source, written as Parquet: less than compaction does (headers, times,
                    transactions and offsets are lost; nobody can consume it from Kafka before it was produced anew)
    through broker  the topic is consumed with confluent-kafka and produced into a compacted topic of the same broker, until that broker's
                    cleaner has been through: a ``broker-part``-th of the records and keys. That the topic is on the broker is not counted

Of each the run with the median of CPU seconds. Prints seconds without Spark's start and the broker's, and CPU seconds of the process tree,
the JVM included (of the broker: what it used meanwhile), without the S3 server's. ``requests``: what the S3 server has logged, and what
librdkafka has sent. ``exchanged_mb``: what went through Spark's shuffle or, with `recompact`, from executor to executor, and with a broker
what it received.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.doc_tables import ROOT, BenchmarkTable, report_table
from benchmarks.process_tree import below
from benchmarks.spark import NAME, NOW_MS, write_log

KAFKA = "4.4.0"
SEGMENT_BYTES = 16 << 20
BROKER = {"log.cleaner.dedupe.buffer.size": str(128 << 20), "log.cleaner.io.buffer.size": str(1 << 20), "log.cleaner.backoff.ms": "500"}
TICKS = os.sysconf("SC_CLK_TCK")
Ways = dict[str, dict[str, Any]]
"""What was measured, by the first cell of its row."""
ROLES = {"JVM": ("java",), "workers": ("daemon", "worker"), "driver": ("driver",)}


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


def watched(words: list[str], server: Server, checkout: Path = ROOT) -> dict[str, Any]:
    """The document that a command ends with, CPU seconds of it and of all below it, and what it asked of the store.

    cpu_by_process: of the JVM, of PySpark's daemon with its workers, and of the driver, their start included.
    worker_mb: most memory of a Python worker, with its share of the pages that workers have in common (PSS).
    """
    before, ticks, roles, worker_kb = server.requests, dict[int, int](), dict[int, str](), 0
    with tempfile.TemporaryFile() as out, subprocess.Popen(words, stdout=out, stderr=subprocess.DEVNULL, cwd=checkout) as process:
        while process.poll() is None:
            for pid, used in below(process.pid, ended=False).items():
                ticks[pid] = max(used, ticks.get(pid, 0))
                roles[pid] = _role(pid) or roles.get(pid, "driver")
                worker_kb = max(worker_kb, _pss_kb(pid) if roles[pid] == "worker" else 0)
            time.sleep(0.2)
        out.seek(0)
        text = out.read().decode()
    if process.returncode:
        raise SystemExit(f"{words[2:4]} failed: {text[-2000:]}")
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    used_s = {role: sum(used for pid, used in ticks.items() if roles[pid] in names) / TICKS for role, names in ROLES.items()}
    return found | {
        "cpu_seconds": round(sum(used_s.values()), 1), "cpu_by_process": {role: round(used, 1) for role, used in used_s.items()},
        "requests": server.requests - before, "worker_mb": worker_kb // 1000,
    }  # fmt: skip


def _role(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]
        command, above = (Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0") for each in (pid, parent))
    except OSError:
        return ""
    if command[0].endswith(b"java"):
        return "java"
    if any(word.endswith(b".daemon") for word in command):
        return "worker" if command == above else "daemon"
    return "driver" if command[0] else ""


def _pss_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


@dataclass(frozen=True)
class Tiers:
    """Copies of one tier. ``segment_bytes``: as large as the log's own segments, so that groups are rewritten beside each other.

    checkout: the older of those that work on the tier, which imports it.
    """

    folder: Path
    server: Server
    segment_bytes: int
    checkout: Path

    def url(self, name: str) -> str:
        return f"s3://bench/{name}"

    def config(self, name: str, *, gate: bool = True) -> Path:
        file = self.folder / f"{name}.toml"
        file.write_text(
            f'[tier]\nurl = "{self.url(name)}"\nstate_dir = "{self.folder / "state" / name}"\n'
            f'[s3]\nendpoint_url = "{self.server.endpoint}"\n'
            f'[cleaner]\nmap_engine = "spark"\nsegment_bytes = {self.segment_bytes}\nverify_before_publish = {str(gate).lower()}\n'
            f'map_budget_bytes = {2 << 30}\n[spark]\nmaster = "local[2]"\n'
        )
        return file

    def bring(self, log_dir: Path) -> None:
        words = [_python(self.checkout), "-m", "compactor", "import", str(log_dir), "--topic", NAME.topic, "--partition", "0"]
        subprocess.run([*words, "--config", str(self.config("source"))], check=True, cwd=self.checkout, stdout=subprocess.DEVNULL)

    def make_archive(self) -> dict[str, Any]:
        words = [sys.executable, "-m", "compactor", "recompact", "--class-archive", "--config", str(self.config("archive"))]
        document = watched([*words, "--output", "json"], self.server)
        return {"cpu_seconds": document["cpu_seconds"], "requests": 0, "exchanged_mb": 0, "bytes": document["class_archive"]["bytes"]}

    def recompact(self, *, gate: bool = True, archive: bool = False, checkout: Path = ROOT) -> dict[str, Any]:
        """On a copy: the server replaces files, and never writes into them."""
        buckets, config = self.folder / "buckets" / "bench", self.config("copy", gate=gate)
        subprocess.run(["cp", "-al", buckets / "source", buckets / "copy"], check=True)
        spark_dir = self.folder / "state" / "copy" / "spark"
        if archive:
            spark_dir.mkdir(parents=True)
            for made in (self.folder / "state" / "archive" / "spark").glob("*.jsa"):
                (spark_dir / made.name).hardlink_to(made)
        words = [_python(checkout), "-m", "compactor", "recompact", "--now", str(NOW_MS), "--config", str(config), "--output", "json"]
        document = watched(words, self.server, checkout)
        shutil.rmtree(buckets / "copy")
        shutil.rmtree(self.folder / "state" / "copy")
        (row,), spark = document["partitions"], document["spark"]
        return {
            "seconds": row["seconds"], "kept": row["records_kept"], "startup_seconds": spark["startup_seconds"],
            "exchanged_mb": spark["exchanged_bytes"] // 1_000_000, "worker_cpu_seconds": round(spark["worker_cpu_seconds"], 1),
            **{name: document[name] for name in ("cpu_seconds", "cpu_by_process", "requests", "worker_mb")},
        }  # fmt: skip

    def job(self) -> dict[str, Any]:
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        words = [sys.executable, "-m", "benchmarks.spark_plain", "--job", self.url("source"), self.server.endpoint, str(out)]
        return watched(words, self.server)


def _python(checkout: Path) -> str:
    return sys.executable if checkout == ROOT else str(checkout / ".venv/bin/python")


def measure(tiers: Tiers, beside: Path | None, rounds: int) -> Ways:
    """Each way once a round, in turns; of each the run with the median of CPU seconds."""
    tried: dict[str, list[dict[str, Any]]] = {"`recompact --class-archive`, once": [tiers.make_archive()]}
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "the PySpark job": tiers.job,
        "`recompact`, spread": tiers.recompact,
        "with an archive of classes": partial(tiers.recompact, archive=True),
        "with an archive, without the gate": partial(tiers.recompact, archive=True, gate=False),
    }
    if beside is not None:
        ways["`recompact` of 16b32b0b"] = partial(tiers.recompact, checkout=beside)
    for _ in range(rounds):
        for name, way in ways.items():
            tried.setdefault(name, []).append(way())
            print(name, json.dumps(tried[name][-1]), flush=True)
    return {name: sorted(runs, key=lambda run: float(run["cpu_seconds"]))[len(runs) // 2] for name, runs in tried.items()}


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
    parser.add_argument("--beside", type=Path, help="another checkout with its .venv (make setup), whose `recompact` is measured, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--larger", type=int, default=4, help="so many times the records and keys, once; 0: not")
    parser.add_argument("--dir", default=None)
    parser.add_argument("--job", nargs=3, metavar=("URL", "ENDPOINT", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(plain(*args.job)))
        return
    beside, rows = args.beside and args.beside.resolve(), list[tuple[str, ...]]()

    def report(ways: Ways, job: dict[str, Any], records: int, suffix: str = "") -> None:
        for name, found in ways.items():
            ratio = found["cpu_seconds"] / found.get("records", records) * records / job["cpu_seconds"]
            memory = str(found["worker_mb"]) if found.get("worker_mb") else ""
            cells = (f"{found['cpu_seconds']:.1f}", f"{ratio:.2f}", str(found["requests"]), str(found["exchanged_mb"]), memory)
            rows.append((name + suffix, *cells))

    for times in (1, args.larger) if args.larger else (1,):
        records, keys = args.records * times, args.keys * times
        with tempfile.TemporaryDirectory(dir=args.dir) as folder, s3_server(Path(folder)) as server:
            log_dir = write_log(Path(folder) / "log", records=records, keys=keys, segments=20 * times, value_bytes=args.value_bytes)
            largest = max(file.stat().st_size for file in log_dir.iterdir())
            tiers = Tiers(Path(folder), server, largest, beside or ROOT)
            tiers.bring(log_dir)
            shutil.rmtree(log_dir)
            if times == 1:
                ways = measure(tiers, beside, args.rounds)
                job = ways["the PySpark job"]
                if part := args.broker_part:
                    name = f"through a broker, 1/{part} of the records"
                    ways[name] = through_broker(Path(folder), records // part, keys // part, args.value_bytes)
                report(ways, job, records)
            else:
                tiers.make_archive()
                ways = {"the PySpark job": tiers.job(), "with an archive of classes": tiers.recompact(archive=True)}
                report(ways, ways["the PySpark job"], records, f", {records // 1_000_000} million records")
    columns = ("", "CPU s", "of the job's, per record", "requests", "moved, MB", "a worker's memory, MB")
    report_table(BenchmarkTable("spark_plain", columns, rows, compared=columns[2:5]))


if __name__ == "__main__":
    main()
