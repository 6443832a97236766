"""How soon a tier of 2,000 partitions and 200,000 segments answers: `topics`, `plan`, `run` and a daemon, without and with local state.

    python -m benchmarks.start_up [--partitions N] [--segments N] [--url URL] [--s3-endpoint URL]

Makes the tier's control logs (there are no segment objects: neither command looks at them), then runs the commands as a person
would, each in a process of its own, and prints seconds of wall clock and of CPU. ``cold``: nothing is kept on this machine.
``run`` finds nothing due and asks the tier about every partition; the daemon is ready when /readyz says so after its first scan.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.doc_tables import BenchmarkTable, report_table
from benchmarks.logs import write_log
from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.control.importing import record_tiered_segments, register_import
from compactor.control.logs import PartitionLog
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile

PER_TOPIC = 20
NOTHING_DUE = {"TIERED_COMPACTOR__CLEANER__MIN_CLEANABLE_DIRTY_RATIO": "1"}


def neighbours(count: int) -> list[RemoteLogSegmentMetadata]:
    """Segments of 1000 offsets, one after the other, with all their files."""
    files = {kind: SegmentFile(size=1 << 20, sha256="0" * 64) for kind in FILE_KINDS}
    epochs = (EpochEntry(LeaderEpoch(0), Offset(0)),)
    return [
        RemoteLogSegmentMetadata(
            id=f"{number:022d}", start_offset=Offset(number * 1000), end_offset=Offset(number * 1000 + 999), size_bytes=1 << 20,
            max_timestamp_ms=TimestampMs(1), mtime_ms=1, leader_epochs=epochs, files=files,
        )
        for number in range(count)
    ]  # fmt: skip


def make(opened: Tier, partitions: int, per_partition: int) -> None:
    """One import of each partition, and a hint about it."""
    opened.identity.read_or_create_catalog()

    def one(number: int) -> PartitionLog:
        name = TopicPartition(f"topic-{number // PER_TOPIC:04d}", number % PER_TOPIC)
        log = opened.open_partition_log(name)
        made = neighbours(per_partition)
        register_import(opened.ports, log, "import", [segment.id for segment in made])
        record_tiered_segments(opened.ports, log, "import", made)
        return log

    with ThreadPoolExecutor(8) as pool:
        for log in pool.map(one, range(partitions)):
            opened.change_notifier.announce_changed_control_logs([log])


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(config: Path, *command: str, **environment: str) -> dict[str, float]:
    before = cpu_of_children()
    began = time.perf_counter()
    full = [sys.executable, "-m", "compactor", *command, "--config", str(config)]
    subprocess.run(full, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment})
    seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 2), "cpu": round(cpu_of_children() - before, 2)}


def daemon_ready(config: Path) -> dict[str, float]:
    """From the start of the process to the first 200 of /readyz; CPU time with its orderly end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, **NOTHING_DUE, "TIERED_COMPACTOR__DAEMON__LISTEN": listen}
    before, began = cpu_of_children(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "compactor", "daemon", "--config", str(config)], stderr=subprocess.DEVNULL, env=environment
    )
    try:
        while not is_ready(listen):
            if process.poll() is not None:
                raise RuntimeError("the daemon ended")
            time.sleep(0.01)
        seconds = time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()
    return {"seconds": round(seconds, 2), "cpu": round(cpu_of_children() - before, 2)}


def small_run(folder: Path) -> tuple[float, float]:
    """Return the median of CPU seconds of a ``run`` over four segments with 4,000 records, and of an import of numba alone."""
    write_log(folder / "log", [np.arange(1_000)] * 4, value_bytes=100)
    config, runs, imports = folder / "small.toml", [], []
    for number in range(6):
        url, state = (folder / f"small-{number}").as_uri(), folder / f"small-state-{number}"
        config.write_text(f'[tier]\nurl = "{url}"\nstate_dir = "{state}"\n')
        timed(config, "import", str(folder / "log"), "--topic", "orders", "--partition", "0")
        runs.append(timed(config, "run")["cpu"])
        before = cpu_of_children()
        subprocess.run([sys.executable, "-c", "import numba"], check=True)
        imports.append(cpu_of_children() - before)
    return statistics.median(runs[1:]), statistics.median(imports[1:])  # the first run may compile


def is_ready(listen: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{listen}/readyz", timeout=5).close()
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=2_000)
    parser.add_argument("--segments", type=int, default=100, help="of each partition")
    parser.add_argument("--url", help="where the tier is made (default: a temporary directory)")
    parser.add_argument("--s3-endpoint", default="", help="for --url s3://...")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config, state = Path(folder) / "tier.toml", Path(folder) / "state"
        url = arguments.url or (Path(folder) / "tier").as_uri()
        config.write_text(f'[tier]\nurl = "{url}"\nstate_dir = "{state}"\n[s3]\nendpoint_url = "{arguments.s3_endpoint}"\n')
        began = time.perf_counter()
        make(open_tier(load_settings(str(config), {})), arguments.partitions, arguments.segments)
        results: dict[str, Any] = {
            "partitions": arguments.partitions,
            "segments": arguments.partitions * arguments.segments,
            "made_in_s": round(time.perf_counter() - began, 1),
            "topics_cold": timed(config, "topics"),
            "topics": timed(config, "topics"),
            "plan": timed(config, "plan"),
            "plan_json": timed(config, "plan", "--output", "json"),
            "run_nothing_due": timed(config, "run", **NOTHING_DUE),
            "daemon_ready": daemon_ready(config),
            "small_run": small_run(Path(folder)),
            "local_state_bytes": sum(path.stat().st_size for path in state.rglob("*") if path.is_file()),
        }
    results["load"] = os.getloadavg()[0]
    print(json.dumps(results, indent=2))
    small, numba_alone = results["small_run"]
    row = ("`run` of 4,000 records", f"{small:.2f}", f"{numba_alone:.2f}", f"{small / numba_alone:.1f}")
    report_table(BenchmarkTable("start_up", ("", "CPU s", "importing numba alone", "ratio"), [row], compared=("ratio",)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
