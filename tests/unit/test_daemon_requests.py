"""What looking for work costs: an idle tier of 2,000 partitions, a clock that is moved by hand, a store that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from compactor.access.tier import Tier
from compactor.config.settings import CleanerSettings, Settings
from compactor.control.leadership import acquire_leadership, hold_leadership
from compactor.control.ports import LeaseDurations
from compactor.daemon.daemon import Daemon
from compactor.daemon.metrics import daemon_metrics
from compactor.model.ids import TopicPartition
from compactor.service_metrics import render_metrics
from tests.support.idle_tier import HOUR, INTERVAL, Idle
from tests.support.told import Told


def end_offset(daemon: Daemon, name: TopicPartition) -> int:
    (found,) = (schedule for schedule in daemon.status().schedules if schedule.partition == name)
    assert found.due is not None
    return found.due.summary.end_offset


@pytest.mark.timeout(600)
def test_an_idle_tier_of_2000_partitions_costs_less_than_4000_requests_an_hour_and_a_list_a_minute(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 2_000)
    daemon = Daemon(idle.tier(), seed=1)
    daemon.scan()
    assert daemon.status().ready
    assert len(daemon.status().schedules) == 2_000
    first = idle.pass_time(daemon, HOUR)
    for hour in (first, idle.pass_time(daemon, HOUR)):
        assert set(hour.requests) == {"get", "list", "put"}
        assert hour.requests["put"] == 1  # the hour's figures for the pages
        assert hour.requests["list"] <= 60
        assert hour.total_requests < 4_000
    told = render_metrics(daemon_metrics(daemon.status())).decode()
    assert f'tiered_compactor_requests_total{{kind="get"}} {float(idle.counters.usage().requests["get"])}' in told


def test_what_is_hinted_at_is_seen_at_the_next_scan(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 20)
    daemon = Daemon(idle.tier(), seed=1)
    daemon.scan()
    idle.grow(idle.tier(), idle.names[7])
    usage = idle.pass_time(daemon, INTERVAL)
    assert end_offset(daemon, idle.names[7]) == 19
    assert usage.total_requests < 20


def test_what_nobody_hinted_at_is_seen_within_the_hour(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 20)
    daemon = Daemon(idle.tier(), seed=1)
    daemon.scan()
    idle.grow(idle.tier(), idle.names[7], hint=False)
    idle.pass_time(daemon, HOUR)
    assert end_offset(daemon, idle.names[7]) == 19


def test_a_new_partition_is_found(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 3)
    daemon = Daemon(idle.tier(), seed=1)
    daemon.scan()
    new = TopicPartition("payments", 0)
    idle.grow(idle.tier(), new)
    idle.pass_time(daemon, INTERVAL)
    assert end_offset(daemon, new) == 9


def test_with_local_state_a_new_process_asks_for_the_catalog_only(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 50)
    tier = idle.tier(local=True)
    Daemon(tier, seed=1).scan()
    assert tier.local is not None
    tier.local.close()
    idle.grow(idle.tier(), idle.names[3])
    before = idle.counters.usage()
    again = Daemon(idle.tier(local=True), seed=2)
    again.scan()
    assert len(again.status().schedules) == 50
    assert end_offset(again, idle.names[3]) == 19
    assert idle.counters.usage().usage_since(before).total_requests < 30


def test_a_store_that_is_down_makes_it_unready_and_it_comes_back(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 5)
    told = Told()
    daemon = Daemon(idle.tier(), seed=1, log=told)
    daemon.scan()
    idle.store.down = True
    daemon.scan()
    daemon.scan()
    assert not daemon.status().ready
    assert "does not answer" in daemon.status().problem
    idle.store.down = False
    daemon.scan()
    assert daemon.status().ready
    assert len(told) == 2  # once that it went, once that it is back


def test_a_partition_that_another_leads_is_left_to_it(tmp_path: Path) -> None:
    idle = Idle(tmp_path, 1)
    tier = idle.tier()
    eager = Settings(**{**dict(tier.settings), "cleaner": CleanerSettings(min_cleanable_dirty_ratio=0.0)})
    daemon = Daemon(Tier(eager, tier.ports, tier.catalog, tier.counters), seed=1)
    with hold_leadership(tier.ports, tier.open_partition_log(idle.names[0]), LeaseDurations(30_000)):
        daemon.scan()
        (job,) = daemon.start_due_jobs()
        daemon.process_ended_jobs(30)
        assert job.partition == idle.names[0]
        assert daemon.status().totals.jobs == {("round", "leased"): 1}
        assert daemon.start_due_jobs() == []


def test_a_dead_leader_is_replaced_although_the_stores_clock_was_set_back(tmp_path: Path) -> None:
    """The round itself cannot be: its one segment has no object. That it was begun is what counts."""
    idle = Idle(tmp_path, 1)
    tier = idle.tier()
    eager = Settings(**{**dict(tier.settings), "cleaner": CleanerSettings(min_cleanable_dirty_ratio=0.0)})
    acquire_leadership(tier.ports, tier.open_partition_log(idle.names[0]), LeaseDurations(30_000))
    idle.clock.now_ms -= 24 * HOUR
    daemon = Daemon(Tier(eager, tier.ports, tier.catalog, tier.counters), seed=1)
    daemon.scan()
    daemon.start_due_jobs()
    daemon.process_ended_jobs(30)
    assert tier.open_partition_log(idle.names[0]).refresh().last_compactor_epoch == 1
