"""Appends and start-up of the control log at 100,000 records; folding a whole tier of 200,000 segments.

    python benchmarks/control_log.py [--records N] [--directory DIR]

On a directory store, with the real log, rules and fold. Requests are counted as well: on S3 they are what costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from checkpoint.lineage import EpochEntry
from compactor.control.importing import record_tiered_segments, register_import
from compactor.control.leadership import acquire_leadership
from compactor.control.logs import PartitionLog, open_partition_log
from compactor.control.ports import Lease, Ports
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.counting import RequestCounters
from compactor.storage.local import LocalStore
from compactor.tier.layouts.native import NativeLayout
from compactor.tier.publishers import ObjectLogPublisher

NAME = TopicPartition("orders", 0)
LEASE = Lease(30_000)


def no_beats(beat: Callable[[], None], interval_s: float) -> AbstractContextManager[None]:
    return nullcontext()


def ports_at(root: Path, counters: RequestCounters) -> Ports:
    store = LocalStore(root, counters)
    return Ports(
        store,
        store,
        NativeLayout(store),
        ObjectLogPublisher(),
        lambda: int(time.time() * 1000),
        time.sleep,
        os.urandom,
        "benchmark",
        no_beats,
    )


def segments(first: int, count: int) -> list[RemoteLogSegmentMetadata]:
    """Neighbours of 1000 offsets with all their files."""
    files = {kind: SegmentFile(size=1 << 20, sha256=f"{first:064x}") for kind in FILE_KINDS}
    return [
        RemoteLogSegmentMetadata(
            id=f"{number:022d}",
            start_offset=number * 1000,
            end_offset=number * 1000 + 999,
            size_bytes=1 << 20,
            max_timestamp_ms=1,
            mtime_ms=1,
            leader_epochs=(EpochEntry(0, 0),),
            files=files,
        )
        for number in range(first, first + count)
    ]


def filled(ports: Ports, name: TopicPartition, count: int) -> PartitionLog:
    """A partition with this many live segments, by one import."""
    log = open_partition_log(ports, name)
    made = segments(0, count)
    register_import(ports, log, "import", [segment.id for segment in made])
    record_tiered_segments(ports, log, "import", made)
    return log


def appends(root: Path, records: int) -> dict[str, float]:
    """Leadership taken and given back, again and again, with cuts as they come in production."""
    counters = RequestCounters()
    ports = ports_at(root, counters)
    log = filled(ports, NAME, 100)
    began, requests = time.perf_counter(), counters.usage().total_requests
    while log.state.slot < records:
        acquire_leadership(ports, log, LEASE).release_leadership()
        log.write_snapshot_and_delete_records()
    seconds = time.perf_counter() - began
    count = log.state.slot
    per_record = (counters.usage().total_requests - requests) / count
    return {"records": count, "seconds": seconds, "records_per_s": count / seconds, "requests_per_record": per_record}


def start_up(root: Path) -> dict[str, float]:
    counters = RequestCounters()
    log = open_partition_log(ports_at(root, counters), NAME)
    began = time.perf_counter()
    state = log.refresh()
    return {"slot": state.slot, "seconds": time.perf_counter() - began, "requests": counters.usage().total_requests}


def whole_tier(partitions: int, per_partition: int) -> dict[str, float]:
    """Decoding and folding alone: every partition's import and snapshot, in this process; CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ports = ports_at(Path(folder), RequestCounters())
        log = filled(ports, NAME, per_partition)
        data = log.state.model_dump_json()
        began = time.process_time()
        for _ in range(partitions):
            PartitionState.model_validate_json(data)
        snapshots = time.process_time() - began
        began = time.process_time()
        for _ in range(partitions // 20):
            open_partition_log(ports, NAME).refresh()
        folds = (time.process_time() - began) * 20
    return {"segments": partitions * per_partition, "from_snapshots_cpu_s": snapshots, "from_records_cpu_s": folds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, help="where the store is made (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        results = {
            "appends": appends(Path(folder), arguments.records),
            "start_up": start_up(Path(folder)),
            "whole_tier": whole_tier(2_000, 100),
        }
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
