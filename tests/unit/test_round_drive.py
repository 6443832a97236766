"""Rounds: what a run leaves in the log and in the store, when it goes well and when it does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from typing_extensions import override

from checkpoint.offsets import CleanerOffset, first_dirty_offset_in
from compactor.constants import CompactorEpoch, Offset
from compactor.control import publication
from compactor.control.fold import apply_partition_record
from compactor.control.leadership import BrokerExpiredSegmentCache, RecordRefused, acquire_leadership, hold_leadership
from compactor.control.ordering import find_rule_violation
from compactor.control.publication import raise_log_start, undo_round
from compactor.control.records import PartitionRecord, RoundPublished, RunEnded, decode_checksummed_json
from compactor.control.state import PartitionState, RoundStage, RoundStageTracker
from compactor.errors import BadData, Fenced, StoreError, UsageError
from compactor.model.ids import RunHistoryStatus
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask, Replacement
from compactor.round.drive import READING_CHECK_MS, _LeaderSession, run_round
from compactor.round.ports import Run, Session
from tests.simulation.actors import LEASE
from tests.simulation.play import Actor, Play, playing
from tests.simulation.symbolic import NAME, SymbolicJob, SymbolicPlanner, SymbolicWorker
from tests.simulation.world import TTL_MS, UNDO_WINDOW_MS, Crash
from tests.support.keys import object_key
from tests.support.lineages import record_lineage

OBJECT = f"create {NAME}/"


@pytest.fixture
def play() -> Iterator[Play]:
    with playing(segments=7, seed=3) as made:
        made.importing(3)
        yield made


def crashed_at(play: Play, pattern: str, skip: int = 0, **changes: object) -> Actor:
    actor = play.process("crashed")
    play.die(pattern, skip)
    with pytest.raises(Crash):
        actor.run(**changes)
    play.pass_time(TTL_MS * 2)
    return actor


class TestTheTable:
    """KIP-1272's fencing table, with the real log between A and B."""

    def test_a_late_claim_of_a_that_arrives_after_b_is_void_and_so_are_its_segments(self, play: Play) -> None:
        a, b = play.process("a"), play.process("b")
        first = a.run()
        assert [entry.leader_epoch for entry in first.state.vector] == [0]
        play.importing(1)
        late = acquire_leadership(a.ports, a.log, LEASE)
        plan = SymbolicPlanner(play.oracle.contents)(a.log.state, 0, late.epoch, a.ports.new_id)
        assert plan
        publication.announce_plan(late, plan)
        intent = a.log.state.intent
        assert intent
        session = type("Session", (), {"state": a.log.state, "earlier_scan_results": ()})()
        outcomes = [outcome for outcome in SymbolicWorker(a.ports)(plan, plan.tasks, session) if not isinstance(outcome, CompactionFailure)]
        publication.record_receipts(late, outcomes)
        play.pass_time(TTL_MS * 2)
        work = SymbolicJob(
            b.ports, 0, SymbolicPlanner(play.oracle.contents), SymbolicWorker(b.ports), resumable=lambda plan: "other settings"
        )
        assert run_round(b.ports, b.log, LEASE, work).status == "cleaned"
        published = b.log.state
        received = intent.model_copy(update={"receipts": tuple(outcomes)})
        with pytest.raises(Fenced):
            publication.publish_round(late, received, publication.RunOutcome(RunHistoryStatus.CLEANED, {}))
        state = play.process("reader").state()
        assert (state.live, state.vector) == (published.live, published.vector)

    def test_in_every_order_of_arrival_the_claim_of_a_counts_only_before_b_has_acquired(self, play: Play) -> None:
        """A's publication, folded at each place between B's records, from before B acquires to after B has published."""
        a, b = play.process("a"), play.process("b")
        a.run()
        play.importing(1)
        late = acquire_leadership(a.ports, a.log, LEASE)
        plan = SymbolicPlanner(play.oracle.contents)(a.log.state, 0, late.epoch, a.ports.new_id)
        assert plan
        publication.announce_plan(late, plan)
        session = type("Session", (), {"state": a.log.state, "earlier_scan_results": ()})()
        outcomes = [outcome for outcome in SymbolicWorker(a.ports)(plan, plan.tasks, session) if not isinstance(outcome, CompactionFailure)]
        publication.record_receipts(late, outcomes)
        shared, intent = a.log.state, a.log.state.intent
        assert intent
        replacements = [Replacement(sources=task.sources, segment=one.segment) for task, one in zip(plan.tasks, outcomes, strict=True)]
        outcome = publication.RunOutcome(RunHistoryStatus.CLEANED, {})
        claim = a.log.build_record_to_append(
            publication._build_round_published_record(late, intent, replacements, (), BrokerExpiredSegmentCache(late), outcome)
        )
        play.pass_time(TTL_MS * 2)
        planner, worker = SymbolicPlanner(play.oracle.contents), SymbolicWorker(b.ports)
        run_round(b.ports, b.log, LEASE, SymbolicJob(b.ports, 0, planner, worker, resumable=lambda plan: "other settings"))
        slots = range(shared.slot + 1, b.log.state.slot + 1)
        theirs = [decode_checksummed_json(PartitionRecord, b.log.store.get(b.log.control_record_object_key(slot)), "") for slot in slots]
        assert theirs[0].body.type == "leadership_acquired"
        assert "round_published" in [record.body.type for record in theirs]
        for place in range(len(theirs) + 1):
            state = shared
            for record in (*theirs[:place], claim, *theirs[place:]):
                state = apply_partition_record(state, record.model_copy(update={"slot": state.slot + 1}), find_rule_violation)
            by_a = [segment.id for segment in state.live if segment.id in {new.segment.id for new in replacements}]
            if place == 0:
                assert by_a == [new.segment.id for new in replacements]
                assert state.vector == claim.body.vector
            else:
                assert by_a == []
                assert (state.live, state.vector) == (b.log.state.live, b.log.state.vector)
                assert ("round_published", late.epoch) in [(fenced.type, fenced.leader_epoch) for fenced in state.fenced]

    def test_what_a_published_before_b_acquired_is_granted_whole(self, play: Play) -> None:
        a, b = play.process("a"), play.process("b")
        granted = a.run().state.vector
        play.importing(1)
        after = b.run().state.vector
        assert after[-1].leader_epoch == 1
        assert first_dirty_offset_in(after) >= first_dirty_offset_in(granted)

    def test_a_void_record_is_in_the_log_and_listed_with_its_reason(self, play: Play) -> None:
        a, b = play.process("a"), play.process("b")
        leadership = acquire_leadership(a.ports, a.log, LEASE)
        play.pass_time(TTL_MS * 2)
        acquire_leadership(b.ports, b.log, LEASE)
        body = RunEnded(leader_epoch=leadership.epoch, run_id="x", status="cleaned")
        a.log.refresh()
        a.log.append_due_records(lambda state: None if state.fenced else body)
        [fenced] = play.process("c").state().fenced
        assert (fenced.leader_epoch, fenced.by, fenced.type) == (0, "a", "run_ended")
        assert "epoch 1" in fenced.reason


def test_a_round_is_one_publication(play: Play) -> None:
    actor = play.process("a")
    result = actor.run()
    assert result.status == "cleaned"
    assert play.oracle.counts["round_published"] == 1
    assert result.plan
    assert [segment.id for segment in result.state.live][: len(result.plan.tasks)] == [task.new_segment_id for task in result.plan.tasks]
    [run] = result.state.runs
    assert (run.status, run.run_id, run.holder, run.outputs) == ("cleaned", result.plan.run_id, "a", len(result.plan.tasks))


def test_every_stage_of_the_table_is_entered_somewhere(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[RoundStage] = []
    to = RoundStageTracker.advance_to_stage

    def noted(steps: RoundStageTracker, stage: RoundStage) -> None:
        to(steps, stage)
        entered.append(stage)

    monkeypatch.setattr(RoundStageTracker, "advance_to_stage", noted)
    actor = play.process("a")
    result = actor.run()
    assert entered == [RoundStage.ANNOUNCED, RoundStage.UPLOADED, RoundStage.VERIFIED, RoundStage.PUBLISHED]
    assert result.plan
    undo_round(actor.ports, actor.log, LEASE, result.plan.run_id)
    play.pass_time(UNDO_WINDOW_MS * 2)
    actor.retire()
    assert entered[4:] == [RoundStage.REVERTED, RoundStage.RETIRE_BEGUN, RoundStage.DELETED, RoundStage.RETIRED]
    crashed_at(play, OBJECT)
    play.process("b").retire()
    assert entered[8:] == [RoundStage.ANNOUNCED, RoundStage.UNDONE, RoundStage.DELETED]
    assert set(entered) == set(RoundStage) - {RoundStage.PUBLISH_BEGUN}  # of tiers that brokers write: test_kafka_rounds.py


def test_leading_without_publishing_leaves_the_vector(play: Play) -> None:
    before = play.process("a").state().vector
    for _ in range(3):
        actor = play.process("a")
        with hold_leadership(actor.ports, actor.log, LEASE):
            pass
    assert play.process("a").state().vector == before


def test_nothing_to_do_writes_nothing(play: Play) -> None:
    actor = play.process("a")
    work = SymbolicJob(actor.ports, 0, lambda *_: None, SymbolicWorker(actor.ports))
    play.requests.clear()
    assert run_round(actor.ports, actor.log, LEASE, work).status == "nothing_to_do"
    assert not [what for what in play.requests if not what.startswith("get")]


class TestResume:
    def test_a_resumed_plan_keeps_its_now_and_its_ids_and_redoes_only_what_has_no_receipt(self, play: Play) -> None:
        play.importing(1)
        crashed_at(play, OBJECT, skip=1)
        intent = play.oracle.state.intent
        assert intent
        assert len(intent.receipts) == 1
        before = intent.plan
        worked: list[int] = []
        actor = play.process("b")

        class Watching(SymbolicWorker):
            @override
            def __call__(self, plan, tasks, session):  # type: ignore[no-untyped-def]
                worked.extend(task.group for task in tasks)
                assert plan.now_ms == before.now_ms
                return super().__call__(plan, tasks, session)

        work = SymbolicJob(actor.ports, 10**12, SymbolicPlanner(play.oracle.contents), Watching(actor.ports))
        result = run_round(actor.ports, actor.log, LEASE, work)
        assert result.status == "resumed"
        assert intent.receipts[0] in result.receipts
        assert intent.receipts[0].group not in worked
        assert worked == [task.group for task in intent.pending_tasks]
        assert result.plan == intent.plan
        assert result.state.vector[-1].leader_epoch == 1  # published by the epoch that finished it

    def test_pass_one_is_taken_up_where_its_answer_was_stored(self, play: Play) -> None:
        crashed_at(play, OBJECT, keeps_survivors=True)
        [survivors] = play.oracle.state.intent.survivors  # type: ignore[union-attr]
        play.requests.clear()
        assert play.process("b").run(keeps_survivors=True).status == "resumed"
        assert f"get {survivors.key}" in play.requests
        assert f"create {survivors.key}" not in play.requests
        assert survivors.key not in play.world.control.objects

    def test_other_settings_undo_it_first_and_then_plan_anew(self, play: Play) -> None:
        crashed_at(play, OBJECT, skip=1)
        actor = play.process("b")
        work = SymbolicJob(
            actor.ports, 0, SymbolicPlanner(play.oracle.contents), SymbolicWorker(actor.ports), resumable=lambda plan: "other settings"
        )
        result = run_round(actor.ports, actor.log, LEASE, work)
        assert (result.status, result.undone) == ("cleaned", "other settings")
        assert [run.status for run in result.state.runs] == ["undone", "cleaned"]

    def test_a_moved_lineage_undoes_it(self, play: Play) -> None:
        play.process("a").run()
        play.importing(1)
        crashed_at(play, OBJECT)
        actor = play.process("b")
        state = actor.state()
        record_lineage(actor.log, state.lineage, 1)
        assert actor.log.state.vector == (CleanerOffset(CompactorEpoch(0), Offset(1)),)
        result = actor.run()
        assert (result.status, "cleaner offsets" in result.undone) == ("cleaned", True)

    def test_a_lineage_that_moves_between_plan_and_announcement_means_a_new_plan(self, play: Play) -> None:
        play.process("a").run()
        play.importing(1)
        actor, other = play.process("b"), play.process("importer")
        lineage, tail = other.state().lineage, other.log.state.slot
        play.before(f"create partitions/{NAME}/log/{tail + 2:020d}", lambda: record_lineage(other.log, lineage, 1))
        result = actor.run()
        assert result.status == "cleaned"
        assert result.plan
        assert result.plan.first_dirty_offset == 1


class TestFailures:
    def test_a_failing_task_quarantines_and_leaves_the_last_good_state(self, play: Play) -> None:
        before = play.process("a").state()
        for failures in (1, 2):
            result = play.process("a").run(fails=lambda: True)
            assert (result.status, result.reason) == ("quarantined", "bad data: made up")
            assert result.state.live == before.live
            assert result.state.quarantine
            assert result.state.quarantine.failures == failures
            assert result.state.intent is None
        assert set(play.world.data.objects) == {object_key(NAME, segment) for segment in before.live}
        assert play.process("a").run().state.quarantine is None

    def test_a_missing_source_quarantines(self, play: Play) -> None:
        state = play.process("a").state()
        key = object_key(NAME, state.live[0])
        kept: list[Any] = []
        play.before(f"get {key}", lambda: kept.append(play.world.data.objects.pop(key)))
        result = play.process("a").run()
        assert result.status == "quarantined"
        assert "missing object" in result.reason
        assert result.state.live == state.live
        play.world.data.objects[key] = kept[0]
        play.world.violations.clear()  # the judge has missed it as well

    def test_bad_data_while_planning_is_written_down_too(self, play: Play) -> None:
        actor = play.process("a")

        def planner(state: PartitionState, now_ms: int, leader_epoch: int, new_id: object) -> None:
            raise BadData("made up", segment="t-0/x.log")

        result = run_round(actor.ports, actor.log, LEASE, SymbolicJob(actor.ports, 0, planner, SymbolicWorker(actor.ports)))
        assert (result.status, result.segment) == ("quarantined", "t-0/x.log")
        assert [run.status for run in result.state.runs] == ["quarantined"]

    @pytest.mark.parametrize("damage", ["missing", "short", "changed"])
    def test_an_output_that_is_not_as_its_receipt_says_is_never_published(self, play: Play, damage: str) -> None:
        objects = play.world.data.objects
        spoiled: list[str] = []

        def spoil() -> None:
            key = next(key for key in objects if key not in before)
            spoiled.append(key)
            if damage == "missing":
                del objects[key]
            else:
                data = objects[key].data
                objects[key].data = data[:-1] if damage == "short" else data[:-1] + b"x"
                objects[key].metadata = {}

        before = set(objects)
        play.before(f"head {NAME}/", spoil)
        result = play.process("a").run()
        assert result.status == "quarantined"
        assert spoiled[0] in result.reason
        assert "round_published" not in play.oracle.counts

    def test_a_store_that_fails_leaves_the_intent_open_and_gives_the_lease_back(self, play: Play) -> None:
        play.hold(OBJECT)
        with pytest.raises(StoreError):
            play.process("a").run()
        state = play.oracle.state
        assert state.intent
        assert state.leader
        assert state.leader.released
        assert play.process("b").run().status == "resumed"

    def test_a_bug_gives_the_plan_up(self, play: Play) -> None:
        """It would fail again each time it is resumed, and hold up `retire` with it."""

        def buggy(
            plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session
        ) -> Iterator[CompactionReceipt | CompactionFailure]:
            yield from islice(SymbolicWorker(actor.ports)(plan, tasks, session), 1)
            raise OverflowError("too large")

        actor = play.process("a")
        objects = set(play.world.data.objects)
        with pytest.raises(OverflowError):
            run_round(actor.ports, actor.log, LEASE, SymbolicJob(actor.ports, 0, SymbolicPlanner(play.oracle.contents), buggy))
        state = play.oracle.state
        assert state.intent is None
        assert state.leader is not None
        assert state.leader.released
        assert set(play.world.data.objects) == objects
        assert play.process("b").run().status == "cleaned"

    def test_a_worker_that_forgets_a_task_is_no_success(self, play: Play) -> None:
        actor = play.process("a")
        work = SymbolicJob(actor.ports, 0, SymbolicPlanner(play.oracle.contents), lambda plan, tasks, session: ())
        assert run_round(actor.ports, actor.log, LEASE, work).reason == "worker: the worker left this task undone"

    def test_publishing_what_has_no_receipt_is_refused(self, play: Play) -> None:
        actor = crashed_at(play, OBJECT)
        play.dead = False
        leadership = acquire_leadership(actor.ports, actor.log, LEASE)
        intent = actor.log.state.intent
        assert intent
        body = RoundPublished(leader_epoch=leadership.epoch, run_id=intent.plan.run_id, replacements=(), vector_before=(), vector=())
        with pytest.raises(RecordRefused, match="no receipt"):
            leadership.append_record(body, lambda state: False)


class TestRetention:
    """Retention raises the log start under the leadership of a round, before the round is planned."""

    def test_what_has_expired_is_not_rewritten(self, play: Play) -> None:
        actor = play.process("a")
        first, *rest = actor.state().live
        result = actor.run(expires=lambda state: first.end_offset + 1)
        assert (result.status, result.expired) == ("cleaned", (first,))
        assert result.plan
        assert first.id not in result.plan.source_segment_ids
        assert result.plan.first_dirty_offset == rest[0].start_offset == result.state.log_start

    def test_retention_alone_is_no_round(self, play: Play) -> None:
        actor = play.process("a")
        actor.run()
        plans = len(actor.log.state.runs)
        end = actor.log.state.end_offset
        result = actor.run(expires=lambda state: end + 1)
        assert (result.status, len(result.state.runs)) == ("expired", plans)
        assert actor.run(expires=lambda state: end + 1).status == "nothing_to_do"

    def test_an_open_round_is_resumed_first_and_the_next_run_raises(self, play: Play) -> None:
        crashed_at(play, OBJECT)
        actor = play.process("b")
        first = actor.state().live[0]
        assert actor.run(expires=lambda state: first.end_offset + 1).status == "resumed"
        assert actor.log.state.log_start_offset is None
        assert actor.run(expires=lambda state: first.end_offset + 1).state.log_start == first.end_offset + 1

    def test_segments_that_arrive_meanwhile_are_taken_into_account(self, play: Play) -> None:
        actor = play.process("a")
        live = actor.state().live
        end = live[-1].end_offset + 1

        def expires(state: PartitionState) -> int | None:
            return end if state.log_start < end else None

        with hold_leadership(actor.ports, actor.log, LEASE) as leadership:
            play.before(f"create partitions/{NAME}/log/", lambda: play.importing(1))
            state = raise_log_start(leadership, expires)
        assert state.log_start == end
        assert not {segment.id for segment in live} & {segment.id for segment in state.live}, "the newest segment is another one by now"

    def test_a_round_that_was_published_before_cannot_be_undone_below_it(self, play: Play) -> None:
        actor = play.process("a")
        for _ in range(2):
            acquire_leadership(actor.ports, actor.log, LEASE).release_leadership()  # epoch 2: this planner makes one group of all
        published = actor.run()
        assert published.plan
        made = [receipt.segment for receipt in published.receipts]
        source = published.plan.source_segment_ids[0]
        below = next(s for group in actor.log.state.waiting for s in group.segments if s.id == source).end_offset + 1
        assert made[0].end_offset >= below, "the log start lies within the segment that the round made"
        with hold_leadership(actor.ports, actor.log, LEASE) as leadership:
            raise_log_start(leadership, lambda state: below if state.log_start < below else None)
        with pytest.raises(UsageError, match="ends below the log start"):
            undo_round(actor.ports, actor.log, LEASE, published.plan.run_id)


def test_a_process_that_only_reads_sources_learns_within_a_second_that_another_one_leads(play: Play) -> None:
    a, b = play.process("a"), play.process("b")
    late = acquire_leadership(a.ports, a.log, LEASE)
    session = _LeaderSession(late, Run(late.state))
    play.pass_time(TTL_MS * 2)
    session.check()
    acquire_leadership(b.ports, b.log, LEASE)
    before, steps = a.log.state.slot, late.pulse.steps
    for _ in range(5):
        session.check_while_reading()
    assert (a.log.state.slot, late.pulse.steps - steps) == (before, 5), "the log was not read, and the lease goes on"
    play.pass_time(READING_CHECK_MS)
    with pytest.raises(Fenced):
        session.check_while_reading()
