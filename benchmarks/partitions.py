"""Many partitions: ``import LOG_ROOT`` and one agent: ``python -m benchmarks.partitions [--partitions N]``.

A broker's log directory with so many partitions, each of two sealed segments of 16 records and a newest one, goes into a tier in a
directory on the same disk: time, requests by kind, memory. Then all is up to date, and goes again. Then an agent beside it, whose brokers
are stood in for: its start, and looks while nothing happens.
"""

from __future__ import annotations

import argparse
import functools
import gc
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.access.tier import Tier
from compactor.adapters.brokers.chain import ClusterPartitionLeaders, LeaderReportedLogEnd
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.errors import StoreError
from compactor.features.agent.agent import UploadAgent
from compactor.features.imports.from_tier import import_partition_directories, list_partition_directories
from compactor.features.imports.import_ import ImportOptions
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import ClusterTopicIds
from compactor.records.codecs import LZ4
from compactor.records.encode import RecordToEncode as Row, encode_batch

RECORDS = 16
SEALED = 2
CLUSTER = "a-cluster"
COLUMNS = ("", "seconds", "CPU s", "GET per partition", "PUT per partition", "LIST per partition", "peak memory, MB")


@dataclass
class AllLed:
    """Brokers that report this one as the leader of every partition."""

    names: Sequence[TopicPartition]
    asked: int = 0

    def leaders(self) -> ClusterPartitionLeaders:
        self.asked += 1
        return ClusterPartitionLeaders(CLUSTER, dict.fromkeys(self.names, 1))

    def log_ends(self, names: Sequence[TopicPartition]) -> Mapping[TopicPartition, LeaderReportedLogEnd | StoreError]:
        self.asked += 1
        return dict.fromkeys(names, LeaderReportedLogEnd(0, RECORDS * (SEALED + 1)))

    def topic_ids(self, names: Sequence[str]) -> ClusterTopicIds:
        self.asked += 1
        return ClusterTopicIds(CLUSTER, {})

    def retention_ms(self, topic: str) -> int | None:
        return None

    def delete_delay_ms(self, topic: str) -> int | None:
        return None


def write_root(root: Path, partitions: int) -> list[TopicPartition]:
    root.mkdir()
    (root / "meta.properties").write_text(f"version=1\nnode.id=1\ncluster.id={CLUSTER}\n")
    names = [TopicPartition("orders", number) for number in range(partitions)]
    for name in names:
        (root / str(name)).mkdir()
        (root / str(name) / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
        for base in range(0, RECORDS * (SEALED + 1), RECORDS):
            rows = [Row(base + n, 1000 + n, b"key-%d" % n, b"value of %d in %d" % (base + n, name.partition), ()) for n in range(RECORDS)]
            data = encode_batch(rows, codec=LZ4, base_offset=base, last_offset=base + RECORDS - 1)
            (root / str(name) / f"{base:020}.log").write_bytes(data)
    return names


def peak_memory_mb() -> float:
    """The most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(what: str, tier: Tier, partitions: int, work: Callable[[], object]) -> tuple[str, ...]:
    before, wall, cpu = tier.counters.usage(), time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    requests = tier.counters.usage().usage_since(before).requests
    each = (f"{requests.get(kind, 0) / partitions:.1f}" for kind in ("get", "put", "list"))
    return what, f"{wall:.1f}", f"{cpu:.1f}", *each, f"{peak_memory_mb():.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=2000)
    count = parser.parse_args().partitions
    gc.set_threshold(100_000)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = write_root(folder / "root", count)
        config = folder / "config.toml"
        settings = f'[agent]\nlog_dirs = ["{folder}/root"]\ntopics = [".*"]\n'
        config.write_text(f'[tier]\nurl = "file://{folder}/tier"\nstate_dir = "{folder}/state"\n{settings}')
        for what in ("`import LOG_ROOT --live`", "the same with nothing new"):
            tier = open_tier(load_settings(str(config), {}))
            directories = list_partition_directories(folder / "root")
            work = functools.partial(import_partition_directories, tier, directories, ImportOptions(live=True))
            rows.append(measured(what, tier, count, work))
        tier = open_tier(load_settings(str(config), {}), local_state=True)
        brokers = AllLed(names)
        agent = UploadAgent(tier, brokers, log=lambda text, **_: None)

        def scan() -> None:
            agent.scan()
            while agent.start_due_jobs() or agent.status().running:
                agent.process_ended_jobs(5)

        rows.append(measured("start of an agent", tier, count, scan))
        rows.append(measured("a scan of the agent", tier, count, scan))
        print(f"brokers were asked {brokers.asked} times")
    report_table(BenchmarkTable("partitions", COLUMNS, rows, compared=COLUMNS[3:]))


if __name__ == "__main__":
    main()
