"""What people ask of the daemon: to begin no rounds, to begin one now; and who takes in the hints that found no place."""

from __future__ import annotations

from pathlib import Path

from compactor.config.settings import CleanerSettings, Settings
from compactor.control.logs import (
    open_catalog,
    pause_rounds,
    publish_hints,
    request_round,
    resume_rounds,
)
from compactor.daemon.daemon import Daemon
from compactor.daemon.scheduling import (
    DaemonAction,
    PartitionJob,
    PartitionSchedule,
    choose_jobs,
    idle_poll_interval_ms,
    with_pause_and_request,
)
from compactor.model.ids import TopicPartition
from tests.support.dues import due_of
from tests.support.idle_tier import HOUR, INTERVAL, Idle

NOW = 1_000_000


def eager(idle: Idle) -> Settings:
    return Settings(**{**dict(idle.tier().settings), "cleaner": CleanerSettings(min_cleanable_dirty_ratio=0.0)})


def jobs(idle: Idle, daemon: Daemon) -> list[PartitionJob]:
    idle.clock.now_ms += INTERVAL
    daemon.scan()
    found = daemon.start_due_jobs()
    for _ in found:
        daemon.process_ended_jobs(30)
    return found


def test_a_pause_keeps_rounds_from_being_begun_until_it_is_over(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 1)
    tier = idle.tier()
    told: list[str] = []
    daemon = Daemon(type(tier)(eager(idle), tier.ports, tier.catalog, tier.counters), seed=1, log=lambda text, **_: told.append(text))
    catalog = open_catalog(tier.ports)
    pause_rounds(catalog, "orders", "ann", "a migration")
    assert jobs(idle, daemon) == []
    (schedule,) = daemon.status().schedules
    assert (schedule.paused, schedule.blocked_reason) == ("paused by ann: a migration (orders)", "")
    assert told == ["no round begins for 1 partition: paused by ann: a migration (orders)"]
    resume_rounds(catalog, "orders", "ann")
    assert jobs(idle, daemon) == [PartitionJob(idle.names[0], DaemonAction.ROUND)]
    assert "no partition is paused any more" in told


def test_a_wish_is_fulfilled_once_whatever_the_dirty_ratio_says(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 3)
    daemon = Daemon(idle.tier(), seed=1)
    assert jobs(idle, daemon) == []
    request_round(open_catalog(idle.tier().ports), idle.names[2], "ann")
    assert jobs(idle, daemon) == [PartitionJob(idle.names[2], DaemonAction.ROUND, force=True)]
    assert jobs(idle, daemon) == []
    # A daemon that begins later does not take up what was asked for long ago.
    idle.clock.now_ms += HOUR
    assert jobs(idle, Daemon(idle.tier(), seed=2)) == []


def test_hints_in_the_inbox_are_taken_in_within_a_minute(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 40)
    daemon = Daemon(idle.tier(), seed=1)
    daemon.scan()
    late = open_catalog(idle.tier().ports)
    late.refresh()
    busy = open_catalog(idle.tier().ports)
    for number in range(40):
        publish_hints(busy, {idle.names[number % 39]: 0})
    log = idle.tier().open_partition_log(idle.names[39])
    idle.grow(idle.tier(), idle.names[39], hint=False)
    publish_hints(late, {idle.names[39]: log.refresh().slot})
    assert list(idle.store.list("catalog/inbox/"))
    idle.pass_time(daemon, 60_000 + INTERVAL)
    (schedule,) = (one for one in daemon.status().schedules if one.partition == idle.names[39])
    assert schedule.due is not None
    assert schedule.due.summary.end_offset == 19


def sighted(number: int, *, due: bool = False, open_run: str = "") -> PartitionSchedule:
    name = TopicPartition("t", number)
    seen = due_of(name, is_due=due or bool(open_run), open_run=open_run)
    return PartitionSchedule(name, due=seen, next_poll_ms=NOW + HOUR)


def test_an_open_round_goes_on_under_a_pause() -> None:
    paused = [with_pause_and_request(schedule, "paused", 0, NOW) for schedule in (sighted(0, due=True), sighted(1, open_run="r"))]
    assert [job.partition.partition for job in choose_jobs(paused, {}, 4, NOW)] == [1]


def test_what_is_wanted_goes_first_and_waits_for_a_pause_to_end() -> None:
    wanted = with_pause_and_request(sighted(1), "", 7, NOW - 1)
    assert wanted.requested
    ready = [sighted(0, due=True), PartitionSchedule(wanted.partition, due=wanted.due, next_poll_ms=NOW + 1, requested=True)]
    assert [(job.partition.partition, job.force) for job in choose_jobs(ready, {}, 1, NOW)] == [(1, True)]
    assert choose_jobs([with_pause_and_request(ready[1], "paused", 0, NOW)], {}, 1, NOW) == []
    assert with_pause_and_request(wanted, "", 7, NOW) == wanted


def test_turns_come_less_often_where_there_are_many() -> None:
    assert idle_poll_interval_ms(100) == idle_poll_interval_ms(1_250) == HOUR
    assert idle_poll_interval_ms(10_000) == 8 * HOUR
