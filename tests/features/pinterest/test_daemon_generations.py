"""The daemon keeps generations: a round brings a new one, what has had its time goes, and a target that fails harms nobody."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compactor.daemon.daemon import Daemon
from compactor.daemon.metrics import daemon_metrics
from compactor.errors import Refused
from compactor.features.pinterest import generations, output as upkeep
from compactor.features.pinterest.generations import GenerationTarget, configured_generation_target
from compactor.service_metrics import render_metrics
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.tier.contents import FileContent, create_or_match
from tests.features.pinterest.test_pinterest_generations import ORDERS, House
from tests.support.plain_pinterest import PlainConsumer
from tests.support.told import Told


@pytest.fixture
def house(tmp_path: Path) -> House:
    made = House(tmp_path)
    made.cli.set(cleaner={"min_cleanable_dirty_ratio": 0.6})
    for number in range(4):
        made.segment(f"a={number}", f"b{number}=1")
    made.bring()
    return made


def work(daemon: Daemon, until: dict[tuple[str, str], int]) -> None:
    """Until the jobs that have ended are at least these."""
    deadline = time.monotonic() + 120
    while any(daemon.status().totals.jobs.get(key, 0) < count for key, count in until.items()):
        daemon.scan()
        daemon.start_due_jobs()
        daemon.process_ended_jobs(0.2)
        assert time.monotonic() < deadline, daemon.status().totals.jobs


def idle(daemon: Daemon) -> None:
    """Does all that there is to do."""
    for _ in range(100):
        daemon.scan()
        if not daemon.start_due_jobs() and not daemon.status().running_jobs:
            return
        daemon.process_ended_jobs(5)
    raise AssertionError(daemon.status().totals.jobs)


def test_a_round_and_its_generation_then_what_is_appended(house: House) -> None:
    told = Told()
    daemon = Daemon(house.opened()[0], seed=1, log=told)
    idle(daemon)
    assert daemon.status().totals.jobs[("round", "cleaned")] == 1
    assert daemon.status().totals.jobs[("output", "written")] == 1
    house.check()
    first = house.folder_now()
    house.segment("c=1")
    house.bring()
    work(daemon, {("output", "appended"): 1})
    assert house.folder_now() == first
    house.check()
    assert any("generation" in line and "appended, 1 segment," in line for line in told)
    before = daemon.status().usage.total_requests
    daemon.scan()
    assert daemon.start_due_jobs() == []
    assert daemon.status().usage.total_requests - before <= 4


def test_what_was_superseded_goes_when_its_time_has_come(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    first = house.write()["generation"]
    monkeypatch.setattr(upkeep, "configured_generation_target", lambda tier: replace(configured_generation_target(tier), keep_ms=1_500))
    daemon = Daemon(house.opened()[0], seed=1)
    work(daemon, {("output", "written"): 1})
    assert (house.target / first).exists()
    deadline = time.monotonic() + 60
    while list((house.target / first).rglob("*.log")):
        idle(daemon)
        time.sleep(0.1)
        assert time.monotonic() < deadline
    house.check()


def test_the_generation_of_a_deleted_partition_goes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    first = house.write()["generation"]
    monkeypatch.setattr(upkeep, "configured_generation_target", lambda tier: replace(configured_generation_target(tier), keep_ms=0))
    house.cli.do("topics", "delete", "orders-0")
    daemon = Daemon(house.opened()[0], seed=1)
    work(daemon, {("output", "removed"): 1})
    assert not (house.target / ".generations" / "prod" / "orders-0" / "current.json").exists()
    deadline = time.monotonic() + 60
    while list((house.target / first).rglob("*.log")):
        idle(daemon)
        time.sleep(0.1)
        assert time.monotonic() < deadline
    before = daemon.status().usage.total_requests
    daemon.scan()
    assert daemon.start_due_jobs() == []
    assert daemon.status().usage.total_requests - before <= 4


class Refusing:
    """A store that takes nothing."""

    def __init__(self, target: GenerationTarget) -> None:
        self._store = target.store
        self.refuses = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, data: bytes, metadata: Any = None) -> ObjectInfo:
        if self.refuses:
            raise Refused(f"{key}: access denied")
        return self._store.create(key, data, metadata)


def test_a_target_that_refuses_is_tried_again_and_holds_no_round_up(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, target = house.opened()
    store: Any = Refusing(target)
    monkeypatch.setattr(upkeep, "configured_generation_target", lambda tier: replace(target, store=store))
    hurried = [0]
    clock = tier.ports.clock_ms
    tier = replace(tier, ports=replace(tier.ports, clock_ms=lambda: clock() + hurried[0]))
    told = Told()
    daemon = Daemon(tier, seed=1, log=told)
    idle(daemon)
    assert daemon.status().totals.jobs[("round", "cleaned")] == 1
    assert daemon.status().totals.jobs[("output", "failed")] == 1
    assert daemon.status().schedules_with_blocked_rounds == ()
    assert b"tiered_compactor_generations_failing 1.0" in render_metrics(daemon_metrics(daemon.status()))
    assert any("access denied" in line for line in told)
    idle(daemon)
    assert daemon.status().totals.jobs[("output", "failed")] == 1  # not before its time
    store.refuses = False
    hurried[0] = 10**6
    idle(daemon)
    assert b"tiered_compactor_generations_failing 0.0" in render_metrics(daemon_metrics(daemon.status()))
    house.check()


def test_a_generation_that_another_daemon_writes_is_left_to_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is at work; once it was silent for long, somebody else takes it up."""
    tier, target = house.opened()
    log = target.generation_step_log(ORDERS)
    target.store.put(log.generation_announcement_key(f"g{1:020d}"), b"another:1")
    daemon = Daemon(tier, seed=1)
    idle(daemon)
    assert daemon.status().totals.jobs[("output", "leased")] == 1
    assert log.read_generations().current is None
    monkeypatch.setattr(generations, "AT_WORK_MS", -(10**6))
    again = Daemon(house.opened()[0], seed=1)
    idle(again)
    assert again.status().totals.jobs[("output", "written")] == 1
    house.check()


def test_a_daemon_that_is_stopped_leaves_something_to_go_on_with(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, target = house.opened()
    daemon = Daemon(tier, seed=1)

    def stopped(store: ObjectStore, key: str, content: FileContent) -> bool:
        made: bool = create_or_match(store, key, content)
        if key.endswith(".log"):
            daemon.request_stop()
        return made

    monkeypatch.setattr(generations, "create_or_match", stopped)
    while not daemon.stop.event.is_set():
        daemon.scan()
        daemon.start_due_jobs()
        daemon.process_ended_jobs(5)
    daemon.run()
    assert target.generation_step_log(ORDERS).read_generations().current is None
    monkeypatch.undo()
    idle(Daemon(house.opened()[0], seed=1))
    house.check()
    assert list(PlainConsumer(house.folder_now()).read_all(1))
