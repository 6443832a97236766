"""Who leads: waiting for a foreign lease, heartbeats, and clocks that disagree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from compactor.control import publication
from compactor.control.leadership import acquire_leadership, current_lease, hold_leadership, send_heartbeats_in_background
from compactor.control.logs import open_partition_log
from compactor.control.ports import LeaseDurations
from compactor.errors import Fenced, Leased, StoreError
from compactor.tier.ports import ControlLogPublisher
from tests.simulation.actors import LEASE
from tests.simulation.play import Play, playing
from tests.simulation.symbolic import NAME
from tests.simulation.world import TTL_MS


@pytest.fixture
def play() -> Iterator[Play]:
    with playing() as made:
        made.importing(1)
        yield made


def test_epochs_count_up_and_a_release_lets_the_next_one_in_at_once(play: Play) -> None:
    actor = play.process("host")
    for expected in range(3):
        actor = play.process(f"host:{expected}")
        began = play.world.now_ms
        with hold_leadership(actor.ports, actor.log, LEASE) as leadership:
            assert leadership.epoch == expected
            assert current_lease(actor.ports, actor.log) is not None
        assert play.world.now_ms - began < TTL_MS / 2
        assert current_lease(actor.ports, actor.log) is None
    assert [entry.ended for entry in actor.log.state.epochs] == ["released"] * 3


def test_a_foreign_lease_is_waited_for_one_ttl_and_then_leased(play: Play) -> None:
    holder, other = play.process("a"), play.process("b")
    leadership = acquire_leadership(holder.ports, holder.log, LEASE)
    for number in range(40):  # it beats while the other waits
        play.before("get partitions/t-0/boundary", leadership.send_heartbeat, skip=number)
    began = play.world.now_ms
    with pytest.raises(Leased, match="a holds the lease") as error:
        acquire_leadership(other.ports, other.log, LEASE)
    assert error.value.exit_code == 4
    assert TTL_MS <= play.world.now_ms - began < TTL_MS * 2
    play.rules.clear()
    assert other.log.refresh().last_compactor_epoch == leadership.epoch


def test_a_silent_leader_is_replaced_within_one_ttl_and_learns_of_it(play: Play) -> None:
    holder, other = play.process("a"), play.process("b")
    leadership = acquire_leadership(holder.ports, holder.log, LEASE)
    leadership.send_heartbeat()
    taken = acquire_leadership(other.ports, other.log, LEASE)
    assert taken.epoch == leadership.epoch + 1
    with pytest.raises(Fenced, match="b, which acquired epoch 1") as error:
        leadership.refresh_and_require_leadership()
    assert error.value.exit_code == 4
    with pytest.raises(Fenced):
        leadership.release_leadership()


def test_the_clocks_of_the_machines_do_not_matter(play: Play) -> None:
    """The holder's clock is an hour behind: by its own stamps its lease would be over long ago."""
    holder, other = play.process("a"), play.process("b")
    slow = holder.ports.clock_ms() - 3_600_000
    object.__setattr__(holder.ports, "clock_ms", lambda: slow)
    leadership = acquire_leadership(holder.ports, holder.log, LEASE)
    play.pass_time(TTL_MS * 0.9)
    leadership.send_heartbeat()
    other.state()
    info = current_lease(other.ports, other.log)
    assert info is not None
    assert (info.holder, info.epoch) == ("a", leadership.epoch)
    assert 0 < info.expires_ms - other.ports.control.clock_ms() <= TTL_MS


def test_a_dead_leader_is_replaced_although_the_stores_clock_was_set_back(play: Play) -> None:
    """By its last sign it would be alive for a day."""
    holder, other = play.process("a"), play.process("b")
    acquire_leadership(holder.ports, holder.log, LEASE).send_heartbeat()
    play.pass_time(-86_400_000)
    assert acquire_leadership(other.ports, other.log, LEASE).epoch == 1


def test_our_own_earlier_epoch_is_not_waited_for(play: Play) -> None:
    actor = play.process("a")
    first = acquire_leadership(actor.ports, actor.log, LEASE)
    began = play.world.now_ms
    assert acquire_leadership(actor.ports, actor.log, LEASE).epoch == first.epoch + 1
    assert play.world.now_ms - began < TTL_MS / 2


def test_a_block_that_fails_still_gives_the_lease_back(play: Play) -> None:
    actor = play.process("a")
    with pytest.raises(StoreError), hold_leadership(actor.ports, actor.log, LEASE):
        raise StoreError("made up")
    assert current_lease(actor.ports, actor.log) is None


def test_heartbeats_come_in_the_background_and_survive_a_failing_store() -> None:
    beats = threading.Semaphore(0)
    failed = False

    def beat() -> None:
        nonlocal failed
        beats.release()
        if not failed:
            failed = True
            raise StoreError("busy")

    with send_heartbeats_in_background(beat, 0.001):
        for _ in range(3):
            assert beats.acquire(timeout=30)


def test_a_leader_whose_work_takes_no_step_falls_silent(play: Play) -> None:
    """Heartbeats come from a thread of their own: a worker that hangs must not be kept alive by it."""
    ports = play.process("hung").ports
    beats: list[Callable[[], None]] = []

    @contextmanager
    def keep_alive(send_heartbeat: Callable[[], None], interval_s: float) -> Iterator[None]:
        beats.append(send_heartbeat)
        yield

    lease = LeaseDurations(ttl_ms=TTL_MS, stall_ms=2 * TTL_MS)
    hung = replace(ports, keep_alive=keep_alive)
    log = open_partition_log(hung, NAME)
    with hold_leadership(hung, log, lease) as leadership:
        (beat,) = beats

        def heard(times: int) -> int:
            play.requests.clear()
            for _ in range(times):
                beat()
            return len(play.requests)

        assert heard(6) == 6
        leadership.refresh_and_require_leadership()
        assert heard(6) == 6, "a step begins the time anew"
        leadership.refresh_and_require_leadership(caller_only_waits=True)
        assert heard(6) == 1, "looking at others is no step"
        play.pass_time(TTL_MS + 1)
        other = play.process("other")
        assert acquire_leadership(other.ports, other.log, LEASE).epoch == leadership.epoch + 1


class LatePublisher(ControlLogPublisher):
    """One whose messages may reach readers as long as ``max_delivery_delay_ms`` after its process is gone."""

    def __init__(self, max_delivery_delay_ms: int) -> None:
        self.max_delivery_delay_ms = max_delivery_delay_ms


@pytest.mark.parametrize(
    ("earlier", "own", "waits"), [([90_000], 1_000, 90_000), ([0], 40_000, 40_000), ([90_000, 1_000], 2_000, 90_000), ([0], 0, 0)]
)
def test_what_a_replaced_leader_has_said_is_waited_for_by_its_own_timeout(play: Play, earlier: list[int], own: int, waits: int) -> None:
    """Not by this process's, unless the record has none (0)."""
    leaders = []
    for number, max_delivery_delay_ms in enumerate([*earlier, own]):
        actor = play.process(f"host:{number}")
        leaders.append(acquire_leadership(replace(actor.ports, publisher=LatePublisher(max_delivery_delay_ms)), actor.log, LEASE))
    log, control = leaders[-1].log, leaders[-1].ports.control
    taken_ms = control.head(log.control_record_object_key(log.state.slot)).modified_ms
    publication._wait_for_late_deliveries(leaders[-1])
    waited = control.clock_ms() - taken_ms
    assert (waits <= waited <= waits + 2 * publication.POLL_INTERVAL_MS) if waits else waited < publication.POLL_INTERVAL_MS


def test_a_leader_that_released_is_not_waited_for(play: Play) -> None:
    first, second = play.process("a"), play.process("b")
    acquire_leadership(replace(first.ports, publisher=LatePublisher(90_000)), first.log, LEASE).release_leadership()
    leadership = acquire_leadership(replace(second.ports, publisher=LatePublisher(90_000)), second.log, LEASE)
    began = play.world.now_ms
    publication._wait_for_late_deliveries(leadership)
    assert play.world.now_ms == began
    assert [entry.delivery_timeout_ms for entry in second.log.state.epochs] == [90_000, 90_000]
