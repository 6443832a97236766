"""Full re-compaction against what one would write without it: a PySpark job that reads a topic and writes the last value of each key.

    python -m benchmarks.spark_plain [--records N] [--keys N] [--value-bytes N] [--dir D]

Both on local[2] over tiers of the same objects, in processes of their own. The job is `max_by(value, offset)` by key over our own data
source, written as Parquet: less than compaction does (headers, times, transactions and offsets are lost; nobody can consume it from Kafka
before it was produced anew) and all that such a job needs. Prints seconds without Spark's start, CPU seconds of the whole process tree with
it, the JVM included, and the bytes that went through Spark's shuffle or, with `recompact`, from executor to executor.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.exchange import below
from benchmarks.spark import NOW_MS, Bench, write_log


def plain(url: str, out: str) -> dict[str, Any]:
    """The job, in this process."""
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import max as highest
    from pyspark.sql.functions import max_by

    from compactor.spark import register

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    spark = builder.master("local[2]").config("spark.ui.showConsoleProgress", "false").config("spark.driver.memory", "2g").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    spark.range(10).count()
    begin = time.monotonic()
    df = spark.read.format("kafka-tiered").options(url=url, topic="orders", columns="key,value,offset").load()
    last = df.groupBy("key").agg(max_by("value", "offset").alias("value"), highest("offset").alias("offset")).where("value is not null")
    last.write.parquet(out)
    seconds = time.monotonic() - begin
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(False)
    shuffled = sum(int(executors.apply(number).totalShuffleWrite()) for number in range(executors.size()))
    kept = spark.read.parquet(out).count()
    spark.stop()
    return {"what": "max_by job", "seconds": round(seconds, 1), "exchanged_mb": shuffled // 1_000_000, "kept": kept}


def watched(words: list[str]) -> tuple[dict[str, Any], float]:
    """(the document that a command ends with, CPU seconds of it and of all below it)."""
    ticks: dict[int, int] = {}
    with tempfile.TemporaryFile() as out, subprocess.Popen(words, stdout=out, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for pid, used in below(process.pid, ended=False).items():
                ticks[pid] = max(used, ticks.get(pid, 0))
            time.sleep(0.2)
        out.seek(0)
        text = out.read().decode()
    if process.returncode:
        raise SystemExit(f"{words[2]} failed: {text[-2000:]}")
    return json.loads(text[text.index("{") :]), sum(ticks.values()) / os.sysconf("SC_CLK_TCK")


def ours(config: Path) -> dict[str, Any]:
    document, cpu = watched(
        [sys.executable, "-m", "compactor", "recompact", "--now", str(NOW_MS), "--config", str(config), "--output", "json"]
    )
    (row,), spark = document["partitions"], document["spark"]
    exchanged = spark["exchanged_bytes"] // 1_000_000
    return {
        "what": f"recompact, {row['map_engine']}", "seconds": row["seconds"], "exchanged_mb": exchanged, "kept": row["records_kept"],
        "cpu_seconds": round(cpu, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--keys", type=int, default=4_000_000)
    parser.add_argument("--value-bytes", type=int, default=200)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--job", nargs=2, metavar=("URL", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(plain(*args.job)))
        return
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        log_dir = write_log(Path(folder) / "log", records=args.records, keys=args.keys, segments=20, value_bytes=args.value_bytes)
        bench = Bench(Path(folder), max(file.stat().st_size for file in log_dir.iterdir()), gate=True)
        tier = bench.bring(log_dir)
        shutil.rmtree(log_dir)
        print(
            json.dumps({"records": args.records, "keys": args.keys, "value_bytes": args.value_bytes, "load": os.getloadavg()[0]}),
            flush=True,
        )
        words = [sys.executable, "-m", "benchmarks.spark_plain", "--job", tier.as_uri(), str(Path(folder) / "out")]
        document, cpu = watched(words)
        print(json.dumps(document | {"cpu_seconds": round(cpu, 1)}), flush=True)
        print(json.dumps(ours(bench.config(tier, "local[2]"))), flush=True)


if __name__ == "__main__":
    main()
