"""How much of a topic the Spark data source reads from the store: under a limit, filters, options and streams, beside a whole read.

    python -m benchmarks.spark_bytes [--segments 8] [--segment-records 300000] [--dir D]      (needs Java)

One partition in a bucket of versitygw, with values of 200 bytes, no codec, and a record a millisecond. Bytes are those that the server's
process has written (``/proc/PID/io``), requests the GET requests in its access log. ``readStream`` runs with ``availableNow``, once from
the start and once after a further segment was imported.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import BASE_MS, write_log
from benchmarks.spark import NAME
from benchmarks.spark_kafka import start_spark
from benchmarks.spark_plain import Server, s3_server
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.features.imports.import_ import import_directory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

VALUE_BYTES, SETTLE_SECONDS = 200, 1


def requests_and_bytes(server: Server) -> tuple[int, int]:
    """GET requests for objects, and the bytes that the server has written, answers to other requests among them. A request that is under
    way is waited for.
    """
    time.sleep(SETTLE_SECONDS)
    written = dict(line.split(": ") for line in Path(f"/proc/{server.pid}/io").read_text().splitlines())["wchar"]
    return server.log.read_text().count(" s3_GetObject "), int(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--segment-records", type=int, default=300_000)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch, s3_server(Path(scratch)) as server:
        folder = Path(scratch)
        config = folder / "tier.toml"
        config.write_text(f'[tier]\nurl = "s3://bench/tier"\nstate_dir = "{folder / "state"}"\n[s3]\nendpoint_url = "{server.endpoint}"\n')
        tier = open_tier(load_settings(str(config), {}))
        dice = np.random.default_rng(1)

        def import_segments(name: str, count: int, first_offset: int) -> int:
            keys = [dice.integers(0, 1_000_000, args.segment_records) for _ in range(count)]
            end = write_log(folder / name, keys, value_bytes=VALUE_BYTES, first_offset=first_offset)
            import_directory(tier, folder / name, NAME, tier.settings.cleaner.cleaner_policy())
            return end

        end = import_segments("log", args.segments, 0)
        first, last = end * 8 // 10, end * 9 // 10
        since, until = BASE_MS + first, BASE_MS + last
        spark = start_spark()

        def frame(**options: int) -> DataFrame:
            given = {"config": str(config), "topic": NAME.topic, **options}
            return spark.read.format("kafka-tiered").options(**given).load()

        def stream() -> int:
            source = spark.readStream.format("kafka-tiered").options(config=str(config), topic=NAME.topic).load()
            sink = source.writeStream.format("noop").option("checkpointLocation", str(folder / "at")).trigger(availableNow=True)
            query = sink.start()
            query.awaitTermination()
            return sum(progress["numInputRows"] for progress in query.recentProgress)

        def appended() -> int:
            import_segments("more", 1, end)
            return end

        tenth = f"timestamp >= timestamp_millis({since}) and timestamp < timestamp_millis({until})"
        reads: dict[str, Callable[[], int]] = {
            "everything": lambda: frame().count(),
            "`limit(10)`": lambda: len(frame().limit(10).collect()),
            "`where` with a key": lambda: frame().where("key = cast('key-000000000007' as binary)").count(),
            "`where` with the timestamps of a tenth": lambda: frame().where(tenth).count(),
            "that, with `startingTimestamp` and `endingTimestamp`": lambda: (
                frame(startingTimestamp=since, endingTimestamp=until).where(tenth).count()
            ),
            "`startingOffset`, `endingOffset`: the same tenth": lambda: frame(startingOffset=first, endingOffset=last).count(),
            "`readStream`, first pass": stream,
            "`readStream`, next pass, after one more segment": stream,
        }
        whole = 0
        for what, read in reads.items():
            if "next pass" in what:
                appended()
            before = requests_and_bytes(server)
            count = read()
            after = requests_and_bytes(server)
            sent = after[1] - before[1]
            whole = whole or sent
            rows.append((what, f"{count:,}", f"{sent / 1e6:,.1f}", f"{sent / whole:.3f}", str(after[0] - before[0])))
        spark.stop()
    columns = ("", "rows", "MB read", "of everything", "requests")
    report_table(BenchmarkTable("spark_bytes", columns, rows, compared=columns[1:]))


if __name__ == "__main__":
    main()
