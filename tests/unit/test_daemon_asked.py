"""What people ask of the daemon: to begin no rounds, to begin one now; and who takes in the hints that found no place."""

from __future__ import annotations

from pathlib import Path

from compactor.config import Cleaner, Settings
from compactor.control.logs import note_change, open_catalog
from compactor.control.pauses import pause, resume, want
from compactor.model.ids import TopicPartition
from compactor.service.daemon import Daemon
from compactor.service.scheduling import Action, Job, PartitionWatch, Sight, asked_for, choose, poll_ms
from tests.support.idle_tier import HOUR, INTERVAL, Idle

NOW = 1_000_000


def eager(idle: Idle) -> Settings:
    return Settings(**{**dict(idle.tier().settings), "cleaner": Cleaner(min_cleanable_dirty_ratio=0.0)})


def jobs(idle: Idle, daemon: Daemon) -> list[Job]:
    idle.clock.now_ms += INTERVAL
    daemon.scan()
    found = daemon.dispatch()
    for _ in found:
        daemon.collect(30)
    return found


def test_a_pause_keeps_rounds_from_being_begun_until_it_is_over(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 1)
    tier = idle.tier()
    told: list[str] = []
    daemon = Daemon(type(tier)(eager(idle), tier.ports, tier.catalog, tier.counters), seed=1, tell=lambda text, **_: told.append(text))
    catalog = open_catalog(tier.ports)
    pause(catalog, "orders", "ann", "a migration")
    assert jobs(idle, daemon) == []
    (watch,) = daemon.status().watches
    assert (watch.paused, watch.uncleanable) == ("paused by ann: a migration (orders)", "")
    assert told == ["no round is begun over 1 partition: paused by ann: a migration (orders)"]
    resume(catalog, "orders", "ann")
    assert jobs(idle, daemon) == [Job(idle.names[0], Action.ROUND)]
    assert "nothing is paused any more" in told


def test_a_wish_is_fulfilled_once_whatever_the_dirty_ratio_says(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 3)
    daemon = Daemon(idle.tier(), seed=1)
    assert jobs(idle, daemon) == []
    want(open_catalog(idle.tier().ports), idle.names[2], "ann")
    assert jobs(idle, daemon) == [Job(idle.names[2], Action.ROUND, force=True)]
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
        note_change(busy, idle.names[number % 39])
    log = idle.tier().open(idle.names[39])
    idle.grow(idle.tier(), idle.names[39], hint=False)
    note_change(late, idle.names[39], log.refresh().slot)
    assert list(idle.store.list("catalog/inbox/"))
    idle.pass_time(daemon, 60_000 + INTERVAL)
    (watch,) = (one for one in daemon.status().watches if one.name == idle.names[39])
    assert watch.sight is not None
    assert watch.sight.end_offset == 19


def sighted(number: int, *, due: bool = False, open_run: str = "") -> PartitionWatch:
    name = TopicPartition("t", number)
    seen = Sight(name, 1, due=due or bool(open_run), open_run=open_run)
    return PartitionWatch(name, sight=seen, look_at_ms=NOW + HOUR)


def test_an_open_round_goes_on_under_a_pause() -> None:
    paused = [asked_for(watch, "paused", 0, NOW) for watch in (sighted(0, due=True), sighted(1, open_run="r"))]
    assert [job.name.partition for job in choose(paused, {}, 4, NOW)] == [1]


def test_what_is_wanted_goes_first_and_waits_for_a_pause_to_end() -> None:
    wanted = asked_for(sighted(1), "", 7, NOW - 1)
    assert wanted.urgent
    ready = [sighted(0, due=True), PartitionWatch(wanted.name, sight=wanted.sight, look_at_ms=NOW + 1, urgent=True)]
    assert [(job.name.partition, job.force) for job in choose(ready, {}, 1, NOW)] == [(1, True)]
    assert choose([asked_for(ready[1], "paused", 0, NOW)], {}, 1, NOW) == []
    assert asked_for(wanted, "", 7, NOW) == wanted


def test_turns_come_less_often_where_there_are_many() -> None:
    assert poll_ms(100) == poll_ms(1_250) == HOUR
    assert poll_ms(10_000) == 8 * HOUR
