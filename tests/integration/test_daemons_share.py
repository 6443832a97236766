"""Several daemons on one tier: each partition's work is done once, few meet at a partition, and each asks little for what others do."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from compactor.daemon.daemon import Daemon
from tests.builders import log_of
from tests.support.tier_cli import TierCli

PARTITIONS, DAEMONS = 10, 4


def tier(folder: Path) -> TierCli:
    cli = TierCli(folder / "cli", {"publish": {"grace_ms": 0}, "lease": {"ttl_ms": 5_000}, "daemon": {"threads": 2}})
    for number in range(PARTITIONS):
        log = log_of("a=1 b=1; a=2")
        log.write(folder / "logs" / f"orders-{number}")
    cli.do("import", folder / "logs")
    return cli


def daemons(cli: TierCli, count: int) -> list[Daemon]:
    """As many processes as there are machines: nothing connects them but the store."""
    return [Daemon(cli.open(), seed=number) for number in range(count)]


def settle(running_jobs: list[Daemon]) -> tuple[Counter[tuple[str, str]], int]:
    """Until nobody finds anything to do. Jobs by action and status, and requests, of all of them."""
    while True:
        for daemon in running_jobs:
            daemon.scan()
        begun = [job for daemon in running_jobs for job in daemon.start_due_jobs()]
        for daemon in running_jobs:
            while daemon.status().running_jobs:
                daemon.process_ended_jobs(0.01)
        sights = [schedule.due for daemon in running_jobs for schedule in daemon.status().schedules]
        if not begun and all(seen is not None and not seen.is_due and not seen.summary.waiting_bytes for seen in sights):
            break
        time.sleep(0 if begun else 0.2)
    jobs: Counter[tuple[str, str]] = Counter()
    for daemon in running_jobs:
        jobs.update(daemon.status().totals.jobs)
    return jobs, sum(daemon.status().usage.total_requests for daemon in running_jobs)


def test_work_is_done_once_and_few_meet(tmp_path: Path) -> None:
    """All of them see the same time come, at once: the worst that can happen."""
    jobs, one_daemons = settle(daemons(tier(tmp_path / "alone"), 1))
    assert jobs == {("round", "cleaned"): PARTITIONS, ("retire", "retired"): PARTITIONS}
    together = daemons(tier(tmp_path / "together"), DAEMONS)
    jobs, requests = settle(together)
    assert jobs["round", "cleaned"] == PARTITIONS
    assert sum(daemon.status().totals.jobs.get(("round", "cleaned"), 0) > 0 for daemon in together) > 1
    met = sum(count for (_, status), count in jobs.items() if status in ("leased", "fenced"))
    # Without an order of their own, three of four daemons would meet at both jobs of each partition: 60 times. Threads on a busy
    # machine make it vary from run to run, so the bound is once for each job.
    assert met <= 2 * PARTITIONS, jobs
    # A daemon that begins to retire before another has ended finds the same objects; how many do is the machine's choice.
    assert jobs["retire", "retired"] < DAEMONS * PARTITIONS, "each of them deletes what is long gone"
    assert requests < 3 * one_daemons, f"{requests}, and one daemon alone needs {one_daemons}"
