"""What the main job costs on each emulator of an object store, beside the bare transfers of the same bytes by the same client.

    python -m benchmarks.stores [--mb 200] [--server versitygw fake-gcs-server Azurite HDFS moto]

A log of this size, whose keys all come twice, is imported, cleaned, verified and retired. Each row has the seconds (wall clock, and of this
process's own processor time), the requests by kind, and the bytes of one command. ``bare``: the bytes that `run` read are fetched and those
that it wrote are sent once more, object by object, and nothing else is done. The servers are on the same machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from compactor import bootstrap
from compactor.storage.wrappers import RequestCounters, StoreUsage
from tests.support.bucket_cli import BucketCli
from tests.support.cloud_servers import (
    AnyBucket,
    new_azure_container,
    new_gcs_bucket,
    new_hdfs_directory,
    running_azurite,
    running_fake_gcs,
    running_hdfs,
)
from tests.support.s3_server import running_moto, running_versitygw, versitygw_binary

VALUE_BYTES, PER_BATCH, SEGMENTS = 1_000, 100, 8
RECORD_BYTES = VALUE_BYTES + 20


@contextmanager
def bucket_on_new_server(server: str, folder: Path) -> Iterator[AnyBucket]:
    """Start a server and yield a bucket on it."""
    if server == "fake-gcs-server":
        with running_fake_gcs() as endpoint:
            yield new_gcs_bucket(endpoint)
    elif server == "Azurite":
        with running_azurite() as endpoint:
            yield new_azure_container(endpoint, folder)
    elif server == "HDFS":
        with running_hdfs(folder / "hdfs") as endpoint:
            yield new_hdfs_directory(endpoint)
    else:
        (folder / "served").mkdir()
        start = running_moto() if server == "moto" else running_versitygw(versitygw_binary(), folder / "served")
        with start as running, pytest.MonkeyPatch.context() as patch:
            for name, value in running.environment().items():
                patch.setenv(name, value)
            yield running.make_bucket()


@dataclass(frozen=True)
class Cost:
    """What one command took, in seconds."""

    seconds: float
    cpu_seconds: float
    requests: int


def timed(name: str, command: Callable[[], StoreUsage]) -> Cost:
    """Run a command and print its row."""
    cpu, wall = time.process_time(), time.perf_counter()
    usage = command()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    requests = " ".join(f"{kind} {count}" for kind, count in usage.requests.items())
    read, written = usage.bytes_read / 1e6, usage.bytes_written / 1e6
    print(f"{name:10}{wall:9.2f} s{cpu:9.2f} s CPU{read:10.1f} MB read{written:10.1f} MB written   {requests}", flush=True)
    return Cost(wall, cpu, usage.total_requests)


def measure(bucket: AnyBucket, log: Path, folder: Path) -> dict[str, Cost]:
    """Return the cost of each command, and of the bare transfers."""
    cli = BucketCli(folder / "cli", bucket, publish={"grace_ms": 0}, cleaner={"segment_bytes": 1 << 28})

    def used(*words: object) -> StoreUsage:
        counters = RequestCounters()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bootstrap, "RequestCounters", lambda: counters)
            cli.do(*words)
        return counters.usage()

    costs = {"import": timed("import", lambda: used("import", log, "--topic", "orders", "--partition", 0))}
    sources = segments(cli)
    costs["run"] = timed("run", lambda: used("run"))
    made = sorted(set(segments(cli)) - set(sources))
    costs["bare"] = timed("bare", lambda: bare(bucket, sources, made, folder))
    costs["verify"] = timed("verify", lambda: used("verify"))
    time.sleep(2)
    costs["retire"] = timed("retire", lambda: used("retire"))
    return costs


def segments(cli: BucketCli) -> list[str]:
    return [info.key for info in cli.store.list("orders-0/") if info.key.endswith(".log")]


def bare(bucket: AnyBucket, sources: list[str], made: list[str], folder: Path) -> StoreUsage:
    """Fetch what the round read, and send what it wrote."""
    files = [folder / f"made-{number}" for number in range(len(made))]
    store = bucket.open()
    for key, path in zip(made, files, strict=True):
        store.download(key, path)
    counters = RequestCounters()
    store = bucket.open(counters=counters)
    for key in sources:
        store.download(key, folder / "fetched")
    for number, path in enumerate(files):
        store.create_from_file(f"bare/{number}", path)
    return counters.usage()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=200, help="size of the log")
    parser.add_argument("--server", nargs="+", default=["versitygw", "fake-gcs-server", "Azurite", "HDFS"])
    arguments = parser.parse_args()
    keys = arguments.mb * 1_000_000 // RECORD_BYTES // (2 * SEGMENTS * PER_BATCH) * SEGMENTS * PER_BATCH
    rows = []
    for server in arguments.server:
        with tempfile.TemporaryDirectory(prefix="stores-") as scratch, bucket_on_new_server(server, Path(scratch)) as bucket:
            folder = Path(scratch)
            size = keys // (SEGMENTS // 2)
            parts = [np.arange(start, start + size) for start in range(0, keys, size)] * 2
            write_log(folder / "log", parts, value_bytes=VALUE_BYTES, per_batch=PER_BATCH)
            print(f"{server}: {sum(path.stat().st_size for path in (folder / 'log').glob('*.log')) / 1e6:.1f} MB")
            costs = measure(bucket, folder / "log", folder)
        run, bare_transfers = costs["run"], costs["bare"]
        rows.append(
            (
                server, f"{run.seconds:.1f} s", f"{bare_transfers.seconds:.1f} s", f"{run.seconds / bare_transfers.seconds:.2f}",
                f"{run.cpu_seconds:.1f} s, {bare_transfers.cpu_seconds:.1f} s",
                *(str(costs[name].requests) for name in ("import", "run", "bare", "verify", "retire")),
            )
        )  # fmt: skip
    columns = ("", "`run`", "bare transfers", "ratio", "CPU of `run`, of bare", "requests: import", "run", "bare", "verify", "retire")
    report_table(BenchmarkTable("stores", columns, rows, compared=columns[5:]))


if __name__ == "__main__":
    main()
