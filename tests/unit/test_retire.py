"""Retiring and sweeping: what is deleted, when, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from compactor.constants import NEVER_MS
from compactor.control.leadership import hold_leadership
from compactor.control.ports import ObjectRetention
from compactor.control.publication import undo_round
from compactor.errors import StoreError, UsageError
from compactor.round.drive import settle_intent
from compactor.round.ports import Withdrawal
from compactor.upkeep.retire import GraceClock, retire_partition
from tests.simulation.actors import LEASE
from tests.simulation.play import Play, playing, uploaded
from tests.simulation.symbolic import NAME
from tests.simulation.world import GRACE_MS, ORPHAN_AGE_MS, TTL_MS, UNDO_WINDOW_MS, Crash
from tests.support.keys import object_key

FOREVER = 10**9


@pytest.fixture
def play() -> Iterator[Play]:
    with playing(segments=7, seed=3) as made:
        made.importing(3)
        yield made


def live_keys(play: Play) -> set[str]:
    return {object_key(NAME, segment) for segment in play.oracle.state.live}


def test_replaced_objects_wait_for_grace_and_the_undo_window(play: Play) -> None:
    sources = live_keys(play)
    play.process("a").run()
    for wait in (0, GRACE_MS, UNDO_WINDOW_MS - GRACE_MS - 200):
        play.pass_time(wait)
        report = play.process("b").retire()
        assert report.deleted == ()
        assert set(report.waiting) == sources
    play.pass_time(400)
    report = play.process("b").retire()
    assert set(report.deleted) == sources
    assert report.waiting == ()
    assert set(play.world.data.objects) == live_keys(play)


def test_bytes_are_those_of_all_that_is_gone(play: Play) -> None:
    size = sum(len(stored.data) for stored in play.world.data.objects.values())
    play.process("a").run()
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    stray = f"{NAME}/{5:020d}-{'s' * 22}.log"
    play.process("z").ports.data.create(stray, b"[]   ")
    assert play.process("b").retire(dry_run=True).swept == (), "the log never knew it, and it is new"
    play.pass_time(ORPHAN_AGE_MS)
    report = play.process("b").retire()
    assert report.deleted_bytes == size + 5
    assert report.swept == (stray,)


def test_a_dry_run_changes_nothing_and_leads_nothing(play: Play) -> None:
    play.process("a").run()
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    play.requests.clear()
    dry = play.process("b").retire(dry_run=True)
    assert not [what for what in play.requests if what.startswith(("create", "put", "delete"))]
    assert replace(play.process("b").retire(), next_ms=dry.next_ms) == dry
    assert 0 < dry.next_ms < NEVER_MS


def test_nothing_to_do_leads_nothing(play: Play) -> None:
    play.requests.clear()
    assert play.process("a").retire().deleted == ()
    assert not [what for what in play.requests if what.startswith(("create", "put", "delete"))]


def test_grace_zero_deletes_at_once(play: Play) -> None:
    actor = play.process("a")
    actor.run()
    play.oracle.times = dict.fromkeys(play.oracle.times, 0)  # this test's own grace is not the judge's
    assert retire_partition(actor.ports, actor.log, LEASE, ObjectRetention(grace_ms=0)).deleted


def test_now_stands_in_for_the_stores_clock(play: Play) -> None:
    actor = play.process("a")
    actor.run()
    now = actor.ports.control.clock_ms()
    assert not actor.retire(clock=GraceClock(now + FOREVER), dry_run=True).deleted, "who looked up the wrong number deletes nothing"
    assert actor.retire(clock=GraceClock(now + FOREVER, forced=True), dry_run=True).deleted
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    assert actor.retire(dry_run=True).deleted
    assert not actor.retire(clock=GraceClock(now), dry_run=True).deleted


def test_the_publishers_clock_does_not_matter(play: Play) -> None:
    actor = play.process("a")
    object.__setattr__(actor.ports, "clock_ms", lambda: 5)  # 1970
    actor.run()
    assert play.process("b").retire().deleted == ()


@pytest.mark.parametrize("request_kind", [f"delete {NAME}/", "create partitions/t-0/log/"])
def test_what_was_begun_is_completed_by_the_next(play: Play, request_kind: str) -> None:
    sources = live_keys(play)
    play.process("a").run()
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    play.die(request_kind, skip=0 if "delete" in request_kind else 2)  # before deleting, or before "retired"
    with pytest.raises(Crash):
        play.process("b").retire()
    assert {object_key(NAME, segment) for segment in play.oracle.state.retiring} == sources
    play.pass_time(TTL_MS * 2)
    assert set(play.process("c").retire().deleted) == sources
    assert play.oracle.state.retiring == ()


def test_times_of_slots_that_were_cut_are_in_the_snapshot(play: Play) -> None:
    sleeper = play.process("b")
    play.process("a").run()
    sleeper.state()
    assert play.process("c").log.snapshot_and_cut(1)
    assert sleeper.retire().deleted == ()
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    assert sleeper.retire().deleted


def test_retire_resolves_the_open_intent_first(play: Play) -> None:
    play.die(f"create {NAME}/", skip=1)
    with pytest.raises(Crash):
        play.process("a").run()
    play.pass_time(TTL_MS * 2)
    assert play.process("b").retire().deleted == ()
    assert play.oracle.state.intent is None
    assert [run.status for run in play.oracle.state.runs] == ["undone"]
    assert set(play.world.data.objects) == live_keys(play)


def test_a_process_that_deletes_no_segments_leaves_an_abandoned_round_to_the_next_retire(play: Play) -> None:
    play.die(f"create {NAME}/", skip=1)
    with pytest.raises(Crash):
        play.process("a").run()
    play.pass_time(TTL_MS * 2)
    before = set(play.world.data.objects)
    lacking = play.process("b")
    ports = replace(lacking.ports, retention=ObjectRetention(deletes_segments=False))
    play.requests.clear()
    with hold_leadership(ports, lacking.log, LEASE) as leads:
        settle_intent(leads, Withdrawal())
    assert [run.status for run in play.oracle.state.runs] == ["undone"]
    assert set(play.world.data.objects) == before > live_keys(play)
    assert not [what for what in play.requests if what.startswith(f"delete {NAME}/")]
    with pytest.raises(UsageError, match="deletes no segments"):
        retire_partition(ports, lacking.log, LEASE, ObjectRetention(deletes_segments=False))
    assert play.process("c").retire().swept
    assert set(play.world.data.objects) == live_keys(play)


def test_retire_with_work_resumes_it(play: Play) -> None:
    play.die(f"create {NAME}/", skip=1)
    with pytest.raises(Crash):
        play.process("a").run()
    play.pass_time(TTL_MS * 2)
    actor = play.process("b")
    actor.retire(job=actor.work())
    assert [run.status for run in play.oracle.state.runs] == ["resumed"]


def test_scratch_and_heartbeats_of_the_dead_are_swept(play: Play) -> None:
    play.die(f"create {NAME}/")
    with pytest.raises(Crash):
        play.process("a").run(keeps_survivors=True)
    control = play.world.control
    play.dead = False
    control.put("partitions/t-0/heartbeat/00000000000000000000.json", b"{}")
    play.pass_time(TTL_MS * 2)
    play.process("b").retire()
    assert not [key for key in control.objects if "/scratch/" in key or "/heartbeat/" in key]


def test_strange_objects_beside_heartbeats(play: Play) -> None:
    play.process("a").run()
    control = play.world.control
    strange = "partitions/t-0/heartbeat/README"
    control.objects[strange] = control.objects["partitions/t-0/log/00000000000000000001.json"]
    play.process("b").retire()
    assert strange in control.objects


def test_what_is_none_of_ours_is_left_alone(play: Play) -> None:
    ports = play.process("a").ports
    strange = [f"{NAME}/README.txt", f"{NAME}/{7:020d}.log", "other-0/00000000000000000000-xxxxxxxxxxxxxxxxxxxxxx.log"]
    for key in strange:
        play.world.data.objects[key] = play.world.data.objects[next(iter(play.world.data.objects))]
    assert play.process("a").retire().swept == ()
    for key in strange:
        ports.data.head(key)
        del play.world.data.objects[key]


def test_a_delete_without_an_answer_is_an_error_and_done_again(play: Play) -> None:
    play.process("a").run()
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    play.lose(f"delete {NAME}/")
    with pytest.raises(StoreError):
        play.process("b").retire()
    assert play.process("b").retire().deleted
    assert set(play.world.data.objects) == live_keys(play)


def test_sources_of_an_undone_round_are_never_retired(play: Play) -> None:
    run = play.process("a").run()
    assert run.plan
    other = play.process("b")
    undo_round(other.ports, other.log, LEASE, run.plan.run_id)
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    report = play.process("c").retire()
    assert {key[-26:-4] for key in report.deleted} == {task.new_segment_id for task in run.plan.tasks}
    play.sound()


def test_a_forced_clock_may_spare_what_is_young(play: Play) -> None:
    """Erasure shortens grace; an upload that is at work is none of its business."""
    sources = live_keys(play)
    play.process("a").run()
    play.pass_time(GRACE_MS + UNDO_WINDOW_MS)
    uploader = play.process("uploader")
    import_id, _ = uploaded(play, uploader, 3)
    stray = f"{NAME}/{5:020d}-{'s' * 22}.log"
    uploader.ports.data.create(stray, b"[]")
    actor = play.process("b")
    report = actor.retire(clock=GraceClock(FOREVER, forced=True, spares_young=True))
    assert (set(report.deleted), report.swept) == (sources, ())
    assert stray in play.world.data.objects
    assert import_id in actor.log.state.registrations
