"""What 10,000 idle partitions cost: requests of daemon and `retire` in a day, seconds of a scan, memory of the process.

    python -m benchmarks.ten_thousand [--partitions N] [--hours H] [--every M]

A tier in memory whose store counts: stand-in segments (no bytes of theirs are read by either), nothing due. A daemon at its usual interval
on a clock that is moved by hand, and every M minutes what `retire` does. The first look at everything is told apart from the hours after
it. Beside them: a thousand writers that hint at once, each in a thread of its own.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from pathlib import Path

from compactor.access.tier import Tier
from compactor.control.logs import collect_queued_hints, open_catalog, publish_hints, record_inspections
from compactor.control.records import RetireInspection
from compactor.daemon.daemon import Daemon
from compactor.model.ids import TopicPartition
from compactor.storage.counting import StoreUsage
from compactor.upkeep.retire import MAX_UNHINTED_INSPECTIONS, partitions_to_inspect, retire_partition
from tests.support.idle_tier import HOUR, INTERVAL, Idle

WRITERS = 1_000


def retire_once(tier: Tier) -> int:
    """As the command does it; how many partitions it looked at."""
    collect_queued_hints(tier.catalog)
    every = tier.list_partitions()
    names = partitions_to_inspect(tier.catalog.state, every, tier.ports.clock_ms())
    looks: dict[str, RetireInspection] = {}
    for name in names:
        log = tier.open_partition_log(name)
        report = retire_partition(tier.ports, log, tier.lease, tier.retention)
        looks[str(name)] = RetireInspection(log.state.slot, report.next_ms, tier.ports.clock_ms())
        if len(looks) == 100:
            record_inspections(tier.catalog, looks)
            looks.clear()
    if looks and len(every) > MAX_UNHINTED_INSPECTIONS:
        record_inspections(tier.catalog, looks)
    return len(names)


def told(usage: StoreUsage) -> str:
    kinds = ", ".join(f"{count:,} {kind.upper()}" for kind, count in sorted(usage.requests.items()))
    return f"{usage.total_requests:,} requests ({kinds})"


def crowd(idle: Idle) -> None:
    """Each of a thousand processes has folded the catalog once, and then all have something to say."""
    ports = idle.tier().ports
    logs = [open_catalog(ports) for _ in range(WRITERS)]
    base = open_catalog(ports).refresh()
    for log in logs:
        log.adopt_state(base)
    before, begun = idle.counters.usage(), time.monotonic()
    changed = [{TopicPartition("orders", number): 99} for number in range(len(logs))]
    threads = [threading.Thread(target=publish_hints, args=each) for each in zip(logs, changed, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = idle.counters.usage().usage_since(before)
    inbox, catalog = 0, open_catalog(ports)
    while taken := collect_queued_hints(catalog):
        inbox += taken
    heard = sum(catalog.refresh().reached.get(f"orders-{number}") == 99 for number in range(WRITERS))
    each = used.total_requests / WRITERS
    print(f"{WRITERS:,} writers at once: {each:.1f} requests each, {inbox} of their hints by way of the inbox, {heard} heard; "
          f"{time.monotonic() - begun:.1f} s")  # fmt: skip


def measure(folder: Path, partitions: int, hours: int, every: int) -> None:
    idle = Idle(folder, partitions)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    tier = idle.tier(local=True)
    daemon = Daemon(tier, seed=1)
    before, begun = idle.counters.usage(), time.process_time()
    while not daemon.status().ready:
        daemon.scan()
    print(f"{partitions:,} partitions; the daemon's first look at all: {told(idle.counters.usage().usage_since(before))}, "
          f"{time.process_time() - begun:.1f} CPU seconds")  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak memory of the process: {peak} MiB, of which {held} MiB are the store that stands in and the program")
    retiring = idle.tier()
    before = idle.counters.usage()
    looked_at = retire_once(retiring)
    print(f"the first `retire` looks at {looked_at:,} of them: {told(idle.counters.usage().usage_since(before))}")
    for hour in range(1, hours + 1):
        before, slowest = idle.counters.usage(), 0.0
        for step in range(HOUR // INTERVAL):
            idle.clock.now_ms += INTERVAL
            begun = time.process_time()
            daemon.scan()
            assert daemon.start_due_jobs() == []
            slowest = max(slowest, time.process_time() - begun)
            if every and step % (every * 60_000 // INTERVAL) == 0:
                looked_at = retire_once(retiring)
        used = idle.counters.usage().usage_since(before)
        print(f"hour {hour:2}: {told(used)}; the slowest scan took {slowest:.2f} CPU seconds; `retire` looked at {looked_at}")
    crowd(idle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--hours", type=int, default=4)
    parser.add_argument("--every", type=int, default=60, metavar="MINUTES", help="between two `retire`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args.partitions, args.hours, args.every)


if __name__ == "__main__":
    main()
