"""The rare ones, one by one: each is a hole that the search has found in some wording of the rules."""

from __future__ import annotations

import pytest

from compactor.control import importing, publication
from compactor.control.leadership import acquire_leadership
from compactor.control.publication import undo_round
from compactor.errors import Fenced, StoreError, UsageError
from compactor.model.plan import CompactionPlan
from tests.simulation.actors import LEASE
from tests.simulation.play import Play
from tests.simulation.symbolic import NAME, SymbolicPlanner, describe, encode, upload
from tests.simulation.world import GRACE_MS, ORPHAN_AGE_MS, TTL_MS, UNDO_WINDOW_MS, Crash
from tests.support.keys import object_key

OBJECT = f"create {NAME}/"
SLOT = f"create partitions/{NAME}/log/"
DELETE = f"delete {NAME}/"


def slot(number: int) -> str:
    return f"{SLOT}{number:020d}"


def end_well(play: Play) -> None:
    """One process, no faults: everything finishes and nothing is left over."""
    last = play.process("last")
    while last.run().status != "nothing_to_do":
        play.pass_time(2000)
    play.pass_time(ORPHAN_AGE_MS * 2)
    last.retire(job=last.work())
    play.oracle.check_end()


class TestLateDeletes:
    def test_a_delete_that_lands_after_an_undo_was_refused(self, play: Play) -> None:
        play.importing(2)
        run = play.process("a").run()
        play.pass_time(UNDO_WINDOW_MS + GRACE_MS)
        play.hold(DELETE, dies=True)
        with pytest.raises(Crash):
            play.process("a").retire()
        play.pass_time(TTL_MS * 2)
        other = play.process("b")
        assert run.plan
        with pytest.raises(UsageError, match="retiring"):
            undo_round(other.ports, other.log, LEASE, run.plan.run_id)
        play.land()
        end_well(play)

    def test_a_retire_that_sleeps_before_its_record_deletes_nothing_after_an_undo(self, play: Play) -> None:
        play.importing(2)
        run = play.process("a").run()
        assert run.plan
        play.pass_time(UNDO_WINDOW_MS + GRACE_MS)
        sleeper = play.process("a")
        run_id = run.plan.run_id

        def meanwhile() -> None:
            play.pass_time(TTL_MS * 2)
            other = play.process("b")
            undo_round(other.ports, other.log, LEASE, run_id)

        play.before(SLOT, meanwhile, skip=1)  # behind its acquisition: the record "retire begun"
        with pytest.raises(Fenced):
            sleeper.retire()
        assert not [what for what in play.requests if what.startswith("delete t-0/")]
        end_well(play)

    def test_a_delete_that_lands_after_a_resume(self, play: Play) -> None:
        """A gives its plan up and dies while deleting; B plans anew; what lands late are ids that nobody uses."""
        play.importing(2)
        play.hold(DELETE, dies=True)
        with pytest.raises(Crash):
            play.process("a").run(fails=lambda: True)
        play.pass_time(TTL_MS * 2)
        assert play.process("b").run().status == "cleaned"
        play.land()
        end_well(play)

    def test_who_gives_up_a_plan_deletes_nothing_before_the_record_counts(self, play: Play) -> None:
        """A's record "undone" is under way when A dies; B resumes the plan; the late record finds its slot taken."""
        play.importing(2)
        play.die(SLOT, skip=3)
        with pytest.raises(Crash):  # acquired, announced, one receipt, and no more
            play.process("a").run()
        play.pass_time(TTL_MS * 2)
        giving_up = play.process("b")
        play.hold(SLOT, skip=1, dies=True)
        with pytest.raises(Crash):
            giving_up.run(fails=lambda: True)
        assert not [what for what in play.requests if what.startswith("delete t-0/")]
        play.pass_time(TTL_MS * 2)
        assert play.process("c").run().status == "resumed"
        play.land()
        end_well(play)


class TestLatePublications:
    @pytest.mark.parametrize("lands", ["before the successor looks", "after the successor took the slot"])
    def test_a_publish_that_lands_after_its_sender_has_died(self, play: Play, lands: str) -> None:
        play.importing(2)
        first = play.process("a")
        tail = first.state().slot
        groups = len(_plan_of(play).tasks)
        publish_slot = tail + 3 + groups  # acquired, announced, a receipt per group
        play.hold(slot(publish_slot))
        play.die(slot(publish_slot))  # at its second try
        with pytest.raises(Crash):
            first.run()
        assert [item.what for item in play.held] == [f"{slot(publish_slot)}.json"]
        play.pass_time(TTL_MS * 2)
        if lands == "before the successor looks":
            play.land()
            assert play.process("b").run().status != "resumed"
            assert play.oracle.state.runs[0].published_slot == publish_slot
        else:
            assert play.process("b").run().status == "resumed"
            play.land()
        end_well(play)

    def test_a_lost_answer_is_found_again_by_incarnation_and_attempt(self, play: Play) -> None:
        play.importing(2)
        first = play.process("a")
        tail = first.state().slot
        play.lose(slot(tail + 2))
        assert first.run().status == "cleaned"
        tried = [entry for entry in play.requests if entry.startswith(slot(tail + 2))]
        assert len(tried) == 2  # the second meets what the first has left
        assert [run.status for run in play.process("b").state().runs] == ["cleaned"]

    def test_two_processes_of_one_host_never_share_an_epoch(self, play: Play) -> None:
        """B wins the slot with the very record that A wanted to write, but for its incarnation."""
        play.importing(1)
        first, second = play.process("host:1"), play.process("host:1")
        tail = first.state().slot
        second.state()

        def other() -> None:
            assert acquire_leadership(second.ports, second.log, LEASE).epoch == 0

        play.before(slot(tail + 1), other)
        leadership = acquire_leadership(first.ports, first.log, LEASE)
        assert leadership.epoch == 1
        assert first.log.state.epochs[0].incarnation == second.log.incarnation


class TestBoundaries:
    def test_a_late_boundary_behind_a_higher_one(self, play: Play) -> None:
        play.importing(2)
        play.hold(f"create partitions/{NAME}/boundary/", dies=True)
        with pytest.raises(Crash):
            play.process("a").log.snapshot_and_cut(1)
        play.process("b").run()
        assert play.process("b").log.snapshot_and_cut(1)
        play.land()
        assert play.process("c").state() == play.process("d").state()
        end_well(play)

    def test_a_late_boundary_before_a_higher_one(self, play: Play) -> None:
        play.importing(2)
        play.hold(f"create partitions/{NAME}/boundary/", dies=True)
        with pytest.raises(Crash):
            play.process("a").log.snapshot_and_cut(1)
        other = play.process("b")
        other.run()
        play.before(f"create partitions/{NAME}/boundary/", play.land)
        other.log.snapshot_and_cut(1)
        assert play.process("c").log.snapshot_and_cut(1)
        assert play.process("d").state().live == other.state().live
        end_well(play)

    def test_a_deleted_slot_can_never_be_won_again(self, play: Play) -> None:
        """A sleeps before its append; the log goes on and is cut; A's create succeeds in an empty slot and does not count."""
        play.importing(1)
        sleeper = play.process("a")
        tail = sleeper.state().slot

        def meanwhile() -> None:
            other = play.process("b")
            other.run()
            other.log.snapshot_and_cut(1)

        play.before(slot(tail + 1), meanwhile)
        leadership = acquire_leadership(sleeper.ports, sleeper.log, LEASE)
        assert leadership.epoch == 1
        assert sleeper.log.state.slot > tail + 1
        assert sleeper.log.snapshot_and_cut(1)
        assert f"partitions/{NAME}/log/{tail + 1:020d}.json" not in play.world.control.objects

    def test_nothing_is_deleted_before_the_boundary_reads_back(self, play: Play) -> None:
        play.importing(1)
        for _ in range(6):  # as often as it is tried
            play.hold(f"create partitions/{NAME}/boundary/")
        cutter = play.process("a")
        cutter.log.snapshot_and_cut(1)
        assert [what for what in play.requests if what.startswith(f"delete partitions/{NAME}/log")] == []
        play.land()
        assert play.process("b").state().live == cutter.state().live


class TestFenced:
    def test_a_fenced_process_that_cleans_up_deletes_nothing(self, play: Play) -> None:
        """A's worker fails after B took over and published the same plan: A must not remove what B published."""
        play.importing(2)
        first = play.process("a")

        def fails() -> bool:
            play.pass_time(TTL_MS * 2)
            assert play.process("b").run().status == "resumed"
            play.dead = False
            return True

        with pytest.raises(Fenced):
            first.run(fails=fails)
        assert not [what for what in play.requests if what.startswith("delete t-0/")]
        end_well(play)

    def test_a_late_holder_that_nobody_replaced_goes_on(self, play: Play) -> None:
        play.importing(2)
        play.before(OBJECT, lambda: play.pass_time(TTL_MS * 50))
        assert play.process("a").run().status == "cleaned"

    def test_a_stopped_process_that_was_replaced_changes_nothing(self, play: Play) -> None:
        play.importing(2)
        first = play.process("a")
        tail = first.state().slot

        def meanwhile() -> None:
            play.pass_time(TTL_MS * 2)
            play.process("b").run()

        play.before(slot(tail + 4), meanwhile)
        with pytest.raises(Fenced):
            first.run()
        state = play.process("c").state()
        assert [run.holder for run in state.runs] == ["a"]
        assert state.published
        end_well(play)


class TestImports:
    def test_an_importer_that_sleeps_between_upload_and_append(self, play: Play) -> None:
        play.importing(1)
        sleeper = play.process("importer")
        rows = next(rows for rows in play.broker if rows[0][0] > sleeper.state().end_offset)
        name, import_id = sleeper.ports.new_id(), sleeper.ports.new_id()
        importing.register_import(sleeper.ports, sleeper.log, import_id, [name])
        segment = describe(name, rows[0][0], rows[-1][0], encode(rows), [play.actors.live.lineage(1)[0]])
        assert upload(sleeper.ports, segment, encode(rows))
        play.pass_time(ORPHAN_AGE_MS * 2)
        swept = play.process("sweeper").retire().swept
        assert swept == (object_key(NAME, segment),)
        with pytest.raises(Fenced, match="voided"):
            importing.record_tiered_segments(sleeper.ports, sleeper.log, import_id, [segment])
        upload(sleeper.ports, segment, encode(rows))  # and even when it uploads once more, it is swept every time
        assert play.process("sweeper").retire().swept == swept
        end_well(play)

    def test_a_young_import_is_left_alone(self, play: Play) -> None:
        importer = play.process("importer")
        name, import_id = importer.ports.new_id(), importer.ports.new_id()
        importing.register_import(importer.ports, importer.log, import_id, [name])
        rows = play.broker[0]
        segment = describe(name, rows[0][0], rows[-1][0], encode(rows), [play.actors.live.lineage(1)[0]])
        upload(importer.ports, segment, encode(rows))
        play.pass_time(ORPHAN_AGE_MS / 2)
        assert play.process("sweeper").retire().swept == ()
        assert importing.record_tiered_segments(importer.ports, importer.log, import_id, [segment]).end_offset == rows[-1][0]

    def test_the_sweep_lists_before_it_folds(self, play: Play) -> None:
        """An import that is tiered between the sweep's LIST and its fold is known to the fold."""
        play.importing(1)
        sweeper = play.process("sweeper")
        sweeper.state()
        play.before(f"list partitions/{NAME}/scratch", lambda: play.importing(1))
        assert sweeper.retire().swept == ()


class TestUndo:
    def test_undo_is_refused_while_a_plan_is_open_that_skips_what_the_round_had_cleaned(self, play: Play) -> None:
        play.importing(2)
        first = play.process("a").run()
        play.importing(1)
        play.die(OBJECT)
        with pytest.raises(Crash):
            play.process("a").run()
        play.pass_time(TTL_MS * 2)
        assert first.plan
        other = play.process("b")
        with pytest.raises(UsageError, match="still open"):
            undo_round(other.ports, other.log, LEASE, first.plan.run_id)
        end_well(play)

    def test_a_plan_made_before_an_undo_is_never_announced(self, play: Play) -> None:
        play.importing(2)
        first = play.process("a").run()
        play.importing(1)
        assert first.plan
        run_id = first.plan.run_id
        sleeper = play.process("a")
        tail = sleeper.state().slot

        def meanwhile() -> None:
            play.pass_time(TTL_MS * 2)
            other = play.process("b")
            undo_round(other.ports, other.log, LEASE, run_id)

        play.before(slot(tail + 2), meanwhile)  # between acquiring and announcing
        with pytest.raises(Fenced):
            sleeper.run()
        end_well(play)

    def test_undo_gives_readers_and_cleaner_offsets_their_earlier_value(self, play: Play) -> None:
        play.importing(2)
        before = play.process("reader").state()
        run = play.process("a").run()
        assert run.plan
        assert run.state.vector != before.vector
        other = play.process("b")
        after = undo_round(other.ports, other.log, LEASE, run.plan.run_id)
        assert (after.live, after.vector) == (before.live, before.vector)
        assert after.last_compactor_epoch > run.plan.leader_epoch
        end_well(play)

    def test_outputs_of_an_undone_round_wait_for_grace_too(self, play: Play) -> None:
        play.importing(2)
        run = play.process("a").run()
        assert run.plan
        other = play.process("b")
        undo_round(other.ports, other.log, LEASE, run.plan.run_id)
        assert play.process("c").retire().deleted == ()
        play.pass_time(GRACE_MS * 2)
        assert len(play.process("c").retire().deleted) == len(run.plan.tasks)

    def test_only_the_latest_round_can_be_undone(self, play: Play) -> None:
        play.importing(2)
        first = play.process("a").run()
        play.importing(1)
        second = play.process("a").run()
        assert first.plan
        assert second.plan
        other = play.process("b")
        with pytest.raises(UsageError, match="latest"):
            undo_round(other.ports, other.log, LEASE, first.plan.run_id)
        undo_round(other.ports, other.log, LEASE, second.plan.run_id)
        undo_round(other.ports, other.log, LEASE, first.plan.run_id)
        assert other.log.state.vector == ()
        end_well(play)


def test_a_store_that_fails_leaves_the_intent_to_the_next_run_and_no_segment_is_paid_for_twice(play: Play) -> None:
    play.importing(3)
    first = play.process("a")
    planned = _plan_of(play)
    play.hold(OBJECT, skip=len(planned.tasks) - 1)
    with pytest.raises(StoreError):
        first.run()
    assert first.state().intent is not None
    play.land()
    created = [what for what in play.requests if what.startswith(OBJECT)]
    assert play.process("b").run().status == "resumed"
    again = [what for what in play.requests if what.startswith(OBJECT)][len(created) :]
    assert again == created[-1:]  # only the one without a receipt, and it is found to be there
    assert publication.was_round_published(play.process("c").state(), play.oracle.state.published[-1])


def _plan_of(play: Play) -> CompactionPlan:
    """What the next round will look like."""
    state = play.process("peek").state()
    plan = SymbolicPlanner(play.oracle.contents)(state, 0, state.next_compactor_epoch, lambda: "x" * 22)
    assert plan is not None
    return plan
