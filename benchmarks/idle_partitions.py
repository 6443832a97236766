"""What idle partitions cost a daemon and `retire`: requests, CPU time and memory.

    python -m benchmarks.idle_partitions [--partitions 10000] [--hours 2]

A tier in memory whose store counts: stand-in segments (no bytes of theirs are read by either), nothing due. A daemon at its usual interval
on a clock that is moved by hand, and `retire` once an hour. The first inspection of all partitions is told apart from the hours after it.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.doc_tables import BenchmarkTable, report_table
from compactor.access.tier import Tier
from compactor.control.logs import collect_queued_hints, record_deletion_checks
from compactor.control.records import DeletionCheckResult
from compactor.daemon.daemon import Daemon
from compactor.upkeep.retire import MAX_UNHINTED_INSPECTIONS, partitions_to_inspect, retire_partition
from tests.support.idle_tier import HOUR, INTERVAL, Idle

COLUMNS = ("", "requests", "CPU seconds", "of one core")


def retire_once(tier: Tier) -> None:
    """Inspect the partitions that are due, and record it, as the command does."""
    collect_queued_hints(tier.catalog)
    every = tier.list_partitions()
    inspected: dict[str, DeletionCheckResult] = {}
    for name in partitions_to_inspect(tier.catalog.state, every, tier.ports.clock_ms()):
        log = tier.open_partition_log(name)
        report = retire_partition(tier.ports, log, tier.lease, tier.retention)
        inspected[str(name)] = DeletionCheckResult(log.state.slot, report.next_ms, tier.ports.clock_ms())
        if len(inspected) == 100:
            record_deletion_checks(tier.catalog, inspected)
            inspected.clear()
    if inspected and len(every) > MAX_UNHINTED_INSPECTIONS:
        record_deletion_checks(tier.catalog, inspected)


class RequestMeter:
    """Requests and CPU seconds since it was made."""

    def __init__(self, idle: Idle) -> None:
        self._idle, self._before, self._begun = idle, idle.counters.usage(), time.process_time()

    def row(self, what: str, seconds: float = 0.0) -> tuple[str, ...]:
        cpu = time.process_time() - self._begun
        requests = self._idle.counters.usage().usage_since(self._before).total_requests
        return what, f"{requests:,}", f"{cpu:.1f}", f"{100 * cpu / seconds:.2f} %" if seconds else ""


def measure(folder: Path, partitions: int, hours: int) -> None:
    idle = Idle(folder, partitions)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    daemon = Daemon(idle.tier(local=True), seed=1)
    meter = RequestMeter(idle)
    while not daemon.status().ready:
        daemon.scan()
    rows = [meter.row(f"a daemon's first inspection of {partitions:,} partitions")]
    print(f"memory: {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) / 1024:.0f} MiB more than the store that stands in")
    retiring, meter = idle.tier(), RequestMeter(idle)
    retire_once(retiring)
    rows.append(meter.row("the first `retire`"))
    hour = again = rows[0]
    for _ in range(hours):
        meter = RequestMeter(idle)
        for _ in range(HOUR // INTERVAL):
            idle.clock.now_ms += INTERVAL
            daemon.scan()
            if daemon.start_due_jobs():
                raise SystemExit("something was due")
        hour = meter.row("an hour of the daemon", 3600)
        meter = RequestMeter(idle)
        retire_once(retiring)
        again = meter.row("`retire` after an hour")
    report_table(BenchmarkTable("idle_partitions", COLUMNS, [*rows, hour, again], compared=COLUMNS[1:2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--hours", type=int, default=2, help="of which the last one is shown")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args.partitions, args.hours)


if __name__ == "__main__":
    main()
