"""One disk budget and one memory budget for all rounds of a daemon, and what becomes of a partition that does not fit."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from compactor.config.settings import Settings, TierSettings
from compactor.daemon.daemon import Daemon
from compactor.daemon.scheduling import DaemonAction, settings_for_parallel_job
from compactor.errors import UsageError
from tests.support.deployment import Deployment, GrowingLog
from tests.support.told import Told


@pytest.fixture
def logs(tmp_path: Path) -> list[GrowingLog]:
    return [GrowingLog("orders", number, tmp_path, random.Random(number)) for number in range(3)]


@pytest.fixture
def deployment(tmp_path: Path, logs: list[GrowingLog]) -> Deployment:
    made = Deployment(tmp_path, {"cleaner": {"segment_bytes": 16_384}, "daemon": {"threads": 3}})
    for log in logs:
        made.do("import", log.write_part(segments=6), "--topic", log.topic, "--partition", log.partition)
    return made


def work(daemon: Daemon, rounds: int) -> None:
    """Until so many jobs have ended."""
    until = time.monotonic() + 120
    while sum(daemon.status().totals.jobs.values()) < rounds:
        daemon.scan()
        daemon.start_due_jobs()
        daemon.process_ended_jobs(1)
        assert time.monotonic() < until, daemon.status()


def test_rounds_at_once_stay_under_one_disk_budget(deployment: Deployment, logs: list[GrowingLog]) -> None:
    deployment.set(cleaner={"segment_bytes": 16_384, "disk_budget_bytes": 300_000})
    daemon = Daemon(deployment.opened(), seed=1)
    work(daemon, rounds=3)
    status = daemon.status()
    assert status.totals.jobs == {("round", "cleaned"): 3}
    assert 0 < status.disk_peak <= status.disk_total == 300_000
    assert status.disk_used == 0
    for log in logs:
        target = deployment.folder / f"exported-{log.name}"
        deployment.do("export", log.name, target)
        assert log.wrong_in(target, clean=True) == []


def test_a_partition_that_fits_only_by_itself_is_done_alone_and_one_that_never_fits_is_reported(deployment: Deployment) -> None:
    deployment.set(cleaner={"segment_bytes": 16_384, "disk_budget_bytes": 10_000})
    told = Told()
    daemon = Daemon(deployment.opened(), seed=1, log=told)
    work(daemon, rounds=6)  # each of three: beside the others, then alone
    status = daemon.status()
    assert status.totals.jobs == {("round", "out_of_budget"): 6}
    assert len(status.schedules_with_blocked_rounds) == 3
    assert all("disk budget" in schedule.blocked_reason for schedule in status.schedules_with_blocked_rounds)
    assert daemon.start_due_jobs() == []
    assert any("disk_budget_bytes" in line for line in told)


def test_memory_is_split_among_the_threads_and_whole_for_one_that_is_alone() -> None:
    settings = Settings(tier=TierSettings(url="file:///nowhere"))
    shared = settings_for_parallel_job(settings, 4, 2)
    assert shared.cleaner.map_budget_bytes * 4 == settings.cleaner.map_budget_bytes
    assert shared.daemon.threads == 2
    assert settings_for_parallel_job(settings, 1, 4).cleaner == settings.cleaner


def test_nothing_begins_after_the_end(deployment: Deployment) -> None:
    daemon = Daemon(deployment.opened(), seed=1)
    daemon.scan()
    daemon.request_stop()
    assert daemon.start_due_jobs() == []
    daemon.run()  # returns at once
    assert not daemon.status().ready
    assert all(schedule.due is not None and schedule.due.is_due for schedule in daemon.status().schedules)
    assert DaemonAction.ROUND.value not in [action for action, _ in daemon.status().totals.jobs]


def test_a_directory_that_takes_nothing_any_more_is_noticed_by_an_idle_daemon(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, later = deployment.opened(), 0
    begun = opened.ports.clock_ms()
    daemon = Daemon(replace(opened, ports=replace(opened.ports, clock_ms=lambda: begun + later)), seed=1, log=Told())
    daemon.scan()
    assert daemon.status().ready

    def refuse(folder: Path) -> None:
        raise UsageError(f"state_dir cannot be written: {folder}: Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr("compactor.daemon.daemon.check_spool_writable", refuse)
        later = 30_000
        daemon.scan()
        assert (daemon.status().ready, "Read-only file system" in daemon.status().problem, daemon.start_due_jobs()) == (False, True, [])
    daemon.scan()
    assert daemon.status().ready
