"""Looking at all partitions: what is fresh costs nothing, what changed is found, and a lost hint is behind by a bounded time only."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import Settings, TierSettings
from compactor.control.importing import record_tiered_segments, register_import
from compactor.control.leadership import acquire_leadership
from compactor.control.logs import open_partition_log
from compactor.control.records import RoundPublished
from compactor.control.summary import PartitionSummary, summarize_state
from compactor.model.ids import TopicPartition
from compactor.storage.wrappers import StoreUsage
from compactor.views import overview as overview_module
from compactor.views.overview import MAX_AGE_MS, read_summaries
from tests.unit.test_local_cache import segment

NAMES = [TopicPartition("orders", number) for number in range(4)]
OTHER = NAMES[2]


class World:
    """A tier with four partitions; machines with local state of their own, and a clock that is moved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ms = int(time.time() * 1000)
        self.writer = self.machine("")
        self.writer.identity.read_or_create_catalog()
        for name in NAMES:
            self.write(name)

    def machine(self, state: str) -> Tier:
        """A new process on a machine (empty: one without local state)."""
        where = TierSettings(url=(self.folder / "tier").as_uri(), state_dir=str(self.folder / state))
        opened = open_tier(Settings(tier=where), local_state=bool(state))
        return replace(opened, ports=replace(opened.ports, clock_ms=lambda: self.now_ms))

    def write(self, name: TopicPartition, *, hint: bool = True) -> None:
        """One segment more."""
        log = self.writer.open_partition_log(name)
        next_step_number = (log.refresh().end_offset + 1) // 10
        made = segment(next_step_number, random.Random(next_step_number)).model_copy(update={"id": self.writer.ports.new_id()})
        import_id = self.writer.ports.new_id()
        register_import(self.writer.ports, log, import_id, [made.id])
        record_tiered_segments(self.writer.ports, log, import_id, [made])
        if hint:
            self.writer.change_notifier.announce_changed_control_logs([log])

    def truth(self) -> list[PartitionSummary]:
        return [summarize_state(open_partition_log(self.writer.ports, name).refresh()) for name in NAMES]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def shown(opened: Tier, max_age_ms: int = MAX_AGE_MS) -> list[PartitionSummary]:
    looks = read_summaries(opened, NAMES, max_age_ms=max_age_ms)
    assert [look.partition for look in looks] == NAMES
    return [look.summary for look in looks if look.summary is not None]


def close(opened: Tier) -> None:
    assert opened.local is not None
    opened.local.close()


def asked(opened: Tier, act: Callable[[], object]) -> StoreUsage:
    before = opened.counters.usage()
    act()
    return opened.counters.usage().usage_since(before)


def same(found: list[PartitionSummary], truth: list[PartitionSummary]) -> bool:
    return [(s.slot, s.live, s.bytes) for s in found] == [(s.slot, s.live, s.bytes) for s in truth]


def test_without_local_state_everything_is_read(world: World) -> None:
    assert same(shown(world.machine("")), world.truth())


def test_a_second_process_read_summarys_for_the_catalog_only(world: World) -> None:
    first = world.machine("a")
    assert same(shown(first), world.truth())
    close(first)
    second = world.machine("a")
    usage = asked(second, lambda: shown(second))
    assert usage.requests == {"get": 3}, "the record that the catalog ended with, the next one, the boundary"
    assert same(shown(second), world.truth())


def test_only_what_was_hinted_at_is_read_again(world: World) -> None:
    first = world.machine("a")
    shown(first)
    close(first)
    world.write(OTHER)
    second = world.machine("a")
    usage = asked(second, lambda: shown(second))
    # The catalog: 3 and one hint. The partition: two to see that there is news, then the record that it ended with, two new ones, the end
    # and the boundary.
    assert usage.requests["get"] <= 4 + 2 + 5
    assert same(shown(second), world.truth())


def test_a_hint_that_brought_nothing_is_not_followed_twice(world: World) -> None:
    first = world.machine("a")
    shown(first)
    world.writer.change_notifier.announce_changed_control_logs([world.writer.open_partition_log(OTHER)])
    assert asked(first, lambda: shown(first)).total_requests == 2 + 1 + 2
    assert asked(first, lambda: shown(first)).total_requests == 2


def test_a_lost_hint_is_behind_by_a_bounded_time(world: World) -> None:
    first = world.machine("a")
    shown(first)
    world.write(OTHER, hint=False)
    world.now_ms += MAX_AGE_MS - 1
    assert not same(shown(first), world.truth())
    world.now_ms += 1
    assert asked(first, lambda: shown(first)).total_requests <= 2 + 2 * len(NAMES) + 5
    assert same(shown(first), world.truth())
    assert asked(first, lambda: shown(first)).total_requests == 2


def test_run_read_summarys_every_partition(world: World) -> None:
    first = world.machine("a")
    shown(first)
    assert asked(first, lambda: shown(first, max_age_ms=0)).requests == {"get": 2 + 2 * len(NAMES)}
    world.write(OTHER, hint=False)
    assert same(shown(first, max_age_ms=0), world.truth())


def test_a_clock_that_was_set_back_makes_nothing_fresh_for_ever(world: World) -> None:
    first = world.machine("a")
    shown(first)
    world.write(OTHER, hint=False)
    world.now_ms -= 10 * MAX_AGE_MS
    assert same(shown(first), world.truth())


def test_where_somebody_is_at_work_it_is_read_summaryed_every_time(world: World) -> None:
    """The record that publishes comes before its hint."""
    log = world.writer.open_partition_log(OTHER)
    leadership = acquire_leadership(world.writer.ports, log, world.writer.lease)
    world.writer.change_notifier.announce_changed_control_logs([world.writer.open_partition_log(OTHER)])
    first = world.machine("a")
    shown(first)
    body = RoundPublished(leader_epoch=leadership.epoch, run_id="none", replacements=(), vector_before=(), vector=())
    log.append_due_records(lambda state, slot=log.state.slot: body if state.slot == slot else None)  # type: ignore[misc]
    assert same(shown(first), world.truth())


def test_a_partition_that_cannot_be_read_stands_for_itself(world: World) -> None:
    record = next((world.folder / "tier").rglob(f"partitions/{OTHER}/log/*1.json"))
    record.write_bytes(record.read_bytes()[:-20])
    for machine in ("", "a"):
        looks = read_summaries(world.machine(machine), NAMES)
        assert [look.partition for look in looks if look.error] == [OTHER]
        assert [look.partition for look in looks if look.summary] == [name for name in NAMES if name != OTHER]


def test_partitions_are_read_summaryed_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks meet: neither ends before the other has begun."""
    import threading

    both = threading.Barrier(2, timeout=60)
    original = overview_module._read_summary

    def meeting(*arguments: object) -> object:
        both.wait()
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(overview_module, "_read_summary", meeting)
    assert same(shown(world.machine("")), world.truth())


# ---- what is kept is never the truth -----------------------------------------------------------------------------------------


def test_a_tier_made_anew_at_the_same_place_is_another_tier(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    first = world.machine("a")
    shown(first)
    close(first)
    os.rename(world.folder / "tier", world.folder / "old tier")
    again = World(world.folder)
    again.write(OTHER)
    second = again.machine("a")
    assert same(shown(second), again.truth())
    close(second)


def test_a_tier_set_back_to_a_copy_is_read_anew(world: World) -> None:
    """The catalog tells: it has lost records that were known."""
    import shutil

    shutil.copytree(world.folder / "tier", world.folder / "copy")
    world.write(OTHER)
    world.write(NAMES[0])
    first = world.machine("a")
    shown(first)
    close(first)
    shutil.rmtree(world.folder / "tier")
    os.rename(world.folder / "copy", world.folder / "tier")
    world.writer = world.machine("")
    second = world.machine("a")
    assert same(shown(second), world.truth())


def test_the_log_of_a_partition_goes_on_from_what_is_kept(world: World) -> None:
    first = world.machine("a")
    shown(first)
    close(first)
    world.write(OTHER)
    second = world.machine("a")
    second.identity.read_catalog()
    log = second.open_partition_log(OTHER)
    usage = asked(second, log.refresh)
    assert usage.total_requests == 5, "the record that it ended with, two new ones, the end, the boundary"
    assert summarize_state(log.state).live == world.truth()[2].live
