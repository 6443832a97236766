"""The ordering rules: the tables are whole, the documentation shows them, and each rule refuses what it is for."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from checkpoint.offsets import CleanerOffset, first_dirty_offset_in
from compactor.constants import EMPTY_TOPIC_ID, CompactorEpoch, Offset, TimestampMs, TopicId
from compactor.control import fold, incarnations, ordering, records
from compactor.control.leadership import Leadership, acquire_leadership
from compactor.control.log_start import coverage_problem
from compactor.control.records import PartitionBody
from compactor.control.state import STAGES, PartitionState, RoundStage, RoundStageTracker
from compactor.errors import CompactorError, Fenced
from compactor.model.plan import CleanerPolicy, CompactionPlan, CompactionTask, SkippedSegment
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentFile, StrictFrozenModel
from tests.simulation.actors import LEASE
from tests.simulation.play import Actor, Play
from tests.simulation.symbolic import SymbolicPlanner
from tests.simulation.world import Crash
from tests.support.segments import make_segment

DOCUMENT = (Path(__file__).parents[2] / "docs/reference/control-records.md").read_text(encoding="utf-8")
BODIES = get_args(get_args(PartitionBody)[0])
SHARED = {
    ordering.check_writer_leads: "leads",
    ordering.check_segment_ids_registered: "registered",
    incarnations.check_topic_id_unchanged: "same topic",
    ordering.check_no_open_intent: "no intent",
    ordering.check_cleaner_offsets_unchanged: "same vector",
    ordering.check_plan_sources_live: "live sources",
    ordering.check_intent_is_open: "intent",
    ordering.check_publication_not_begun: "not begun",
    ordering.check_receipts_complete: "receipts",
}
"""Names that the page gives to conditions of several records."""


class TestTables:
    def test_every_record_has_its_conditions_and_its_effect(self) -> None:
        assert set(ordering.REQUIREMENTS) == set(BODIES) == set(fold.EFFECTS)

    def test_whoever_writes_without_leadership_is_an_importer_or_acquires_it(self) -> None:
        free = {kind for kind, rules in ordering.REQUIREMENTS.items() if ordering.check_writer_leads not in rules}
        importers = {
            records.SegmentIdsRegistered,
            records.SegmentsTiered,
            records.SegmentsPrepended,
            records.TailTruncated,
            records.TopicAdopted,
            records.IncarnationOpened,
            records.LineageRecorded,
        }
        assert free == {records.LeadershipAcquired, *importers}

    def test_the_documentation_names_the_conditions_that_several_records_share(self) -> None:
        uses = Counter(rule for rules in ordering.REQUIREMENTS.values() for rule in rules)
        assert {rule for rule, count in uses.items() if count > 1} == set(SHARED)
        rows = [f"| *{name}* | {_condition(rule)} |" for rule, name in SHARED.items()]
        assert [re.sub(r" [^|]+ \|$", "", row) for row in _table("shared", DOCUMENT)] == rows

    def test_the_documentation_shows_the_conditions(self) -> None:
        rows = [f"| `{_name(kind)}` | {'; '.join(map(_named_condition, rules))} |" for kind, rules in ordering.REQUIREMENTS.items()]
        assert _table("record", DOCUMENT) == rows

    def test_the_documentation_shows_the_stages(self) -> None:
        rows = [f"| {stage or '-'} | {', '.join(sorted(following)) or '-'} |" for stage, following in STAGES.items()]
        assert _table("stage", DOCUMENT) == rows

    def test_every_stage_can_be_reached_and_is_in_the_table(self) -> None:
        reached = {stage for following in STAGES.values() for stage in following}
        assert reached == set(RoundStage) == {stage for stage in STAGES if stage}

    @pytest.mark.parametrize("stage", list(STAGES))
    @pytest.mark.parametrize("following", list(RoundStage))
    def test_a_step_out_of_turn_is_refused(self, stage: RoundStage | None, following: RoundStage) -> None:
        steps = RoundStageTracker(stage)
        if following in STAGES[stage]:
            steps.advance_to_stage(following)
            assert steps.stage == following
        else:
            with pytest.raises(CompactorError, match="cannot go"):
                steps.advance_to_stage(following)

    def test_before_publish_only_back_and_after_it_only_forward(self) -> None:
        before = [RoundStage.ANNOUNCED, RoundStage.UPLOADED, RoundStage.VERIFIED]
        assert all(RoundStage.UNDONE in STAGES[stage] for stage in before)
        assert RoundStage.UNDONE not in _reachable(RoundStage.PUBLISHED)
        assert RoundStage.PUBLISHED not in _reachable(RoundStage.UNDONE)


def _name(kind: type) -> str:
    assert issubclass(kind, StrictFrozenModel)
    name: str = kind.model_fields["type"].default
    return name


def _named_condition(rule: fold.RuleCheck) -> str:
    return f"*{SHARED[rule]}*" if rule in SHARED else _condition(rule)


def _condition(rule: fold.RuleCheck) -> str:
    """Return the condition that a rule's docstring states."""
    _reason, condition = " ".join((rule.__doc__ or "").split()).split("Requires", 1)
    return condition.lstrip(" ,").removesuffix(".")


def _table(first: str, text: str) -> list[str]:
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if re.match(rf"\| {first} \|", line))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(line)
    return rows


def _reachable(stage: RoundStage) -> set[RoundStage]:
    found: set[RoundStage] = set()
    open_stages = [stage]
    while open_stages:
        for following in STAGES[open_stages.pop()] - found:
            found.add(following)
            open_stages.append(following)
    return found


def segment(name: str, start: int, end: int, *epochs: tuple[int, int], size: int = 9) -> RemoteLogSegmentMetadata:
    return make_segment(name, start, end, size=size, at_ms=-1, epochs=epochs, files={"log": SegmentFile(size=size, sha256="0" * 64)})


SOURCES = [segment("a", 0, 9, (0, 0)), segment("b", 10, 19, (0, 10), (1, 15))]


class TestCoverage:
    def test_exactly_what_the_sources_cover(self) -> None:
        assert coverage_problem(SOURCES, segment("n", 0, 19, (0, 0), (1, 15))) == ""

    @pytest.mark.parametrize(
        ("new", "cause"),
        [
            pytest.param(segment("n", 1, 19, (0, 0), (1, 15)), "covers 1..19", id="starts late"),
            pytest.param(segment("n", 0, 18, (0, 0), (1, 15)), "covers 0..18", id="ends at the last record that survived"),
            pytest.param(segment("n", 0, 19, (0, 0)), "leader epochs", id="an epoch without a record left"),
            pytest.param(segment("n", 0, 19, (0, 3), (1, 15)), "leader epochs", id="an epoch that begins late"),
            pytest.param(segment("n", 0, 19, (0, 0), (1, 15), size=0), "no bytes", id="zero bytes"),
        ],
    )
    def test_anything_else_is_refused(self, new: RemoteLogSegmentMetadata, cause: str) -> None:
        assert cause in coverage_problem(SOURCES, new)

    def test_sources_that_are_not_neighbours(self) -> None:
        assert "starts at 20" in coverage_problem([SOURCES[0], segment("c", 20, 29)], segment("n", 0, 29))
        assert "nothing" in coverage_problem([], segment("n", 0, 29))


class Led:
    """A partition with three live segments, led by one process; ``announced`` opens an intent with receipts."""

    def __init__(self, play: Play) -> None:
        self.play = play
        play.importing(3)
        self.actor: Actor = play.process("leader")
        self.leadership: Leadership = acquire_leadership(self.actor.ports, self.actor.log, LEASE)

    @property
    def state(self) -> PartitionState:
        return self.actor.log.state

    @property
    def epoch(self) -> int:
        return self.leadership.epoch

    def plan(self, **changes: Any) -> CompactionPlan:
        plan = SymbolicPlanner(self.play.oracle.contents)(self.state, 0, self.epoch, self.actor.ports.new_id)
        assert plan
        return plan.model_copy(update=changes)

    def refusal(self, body: Any) -> str:
        return ordering.find_rule_violation(self.state, self.actor.log.build_record_to_append(body))

    def announce(self, **changes: Any) -> str:
        return self.refusal(records.PlanAnnounced(leader_epoch=CompactorEpoch(self.epoch), plan=self.plan(**changes)))


@pytest.fixture
def led(play: Play) -> Led:
    return Led(play)


class TestAnnouncing:
    def test_a_sound_plan_counts(self, led: Led) -> None:
        assert led.announce() == ""

    @pytest.mark.parametrize(
        ("changes", "cause"),
        [
            ({"topic": "other"}, "another partition"),
            ({"leader_epoch": 7}, "another epoch"),
            ({"tasks": ()}, "no tasks"),
            ({"next_dirty_offset": -1}, "goes back"),
        ],
    )
    def test_an_unsound_plan_does_not(self, led: Led, changes: dict[str, Any], cause: str) -> None:
        assert cause in led.announce(**changes)

    def test_from_another_vector(self, led: Led) -> None:
        state = led.state.model_copy(update={"vector": (*led.plan().vector, (5, 5))})
        body = records.PlanAnnounced(leader_epoch=CompactorEpoch(led.epoch), plan=led.plan())
        assert "cleaner offsets" in ordering.find_rule_violation(state, led.actor.log.build_record_to_append(body))

    def test_with_a_source_that_is_not_live(self, led: Led) -> None:
        task = led.plan().tasks[0]
        assert "not live" in led.announce(tasks=(task.model_copy(update={"sources": ("gone",)}),))

    def test_with_a_skipped_segment_that_is_not_live(self, led: Led) -> None:
        assert "segment gone is not live" in led.announce(skipped=(SkippedSegment(id="gone", reason="no key in common"),))
        assert led.announce(skipped=(SkippedSegment(id=led.state.live[0].id, reason="no key in common"),)) == ""

    def test_with_a_task_that_does_not_cover_its_sources(self, led: Led) -> None:
        tasks = list(led.plan().tasks)
        tasks[0] = tasks[0].model_copy(update={"start_offset": 99})
        assert "does not cover" in led.announce(tasks=tuple(tasks))

    def test_with_ids_that_are_in_use(self, led: Led) -> None:
        tasks = list(led.plan().tasks)
        tasks[0] = tasks[0].model_copy(update={"new_segment_id": led.state.live[-1].id})
        assert "in use" in led.announce(tasks=tuple(tasks))

    def test_while_another_intent_is_open(self, led: Led) -> None:
        led.leadership.release_leadership()
        led.play.die("create t-0/")
        with pytest.raises(Crash):
            led.actor.run()
        led.play.dead = False
        led.actor.log.refresh()
        assert led.state.intent
        body = records.PlanAnnounced(
            leader_epoch=led.state.last_compactor_epoch, plan=led.plan(leader_epoch=led.state.last_compactor_epoch)
        )
        assert "still open" in led.refusal(body)


class TestLeaders:
    def test_an_epoch_that_does_not_follow(self, led: Led) -> None:
        for epoch in (led.epoch, led.epoch + 2):
            assert "does not follow" in led.refusal(records.LeadershipAcquired(leader_epoch=CompactorEpoch(epoch), holder="x", ttl_ms=1))

    def test_nobody_but_the_leaders_own_incarnation(self, led: Led) -> None:
        stranger = led.play.process("leader")  # the same name, another process
        stranger.state()
        body = records.LeadershipReleased(leader_epoch=CompactorEpoch(led.epoch))
        assert "fenced" in ordering.find_rule_violation(led.state, stranger.log.build_record_to_append(body))
        assert led.refusal(body) == ""

    def test_a_released_epoch_is_over(self, led: Led) -> None:
        led.leadership.release_leadership()
        assert "released" in led.announce()
        with pytest.raises(Fenced):
            led.leadership.require_leadership_in_state(led.state)


class TestDeleting:
    def test_only_the_current_leader_deletes_and_nothing_that_is_protected(self, led: Led) -> None:
        incarnation = led.actor.log.incarnation
        ordering.require_segments_deletable(led.state, incarnation, CompactorEpoch(led.epoch), ["nobody knows it"])
        with pytest.raises(CompactorError, match="must not be deleted"):
            ordering.require_segments_deletable(led.state, incarnation, CompactorEpoch(led.epoch), [led.state.live[0].id])
        with pytest.raises(Fenced):
            ordering.require_segments_deletable(led.state, "another", CompactorEpoch(led.epoch), [])

    def test_only_what_waits_and_whole_groups_and_what_the_vector_grants(self, led: Led) -> None:
        led.leadership.release_leadership()
        acquire_leadership(led.actor.ports, led.actor.log, LEASE).release_leadership()
        assert led.actor.run().status == "cleaned"  # epoch 2: this planner makes one group of all
        led.leadership = acquire_leadership(led.actor.ports, led.actor.log, LEASE)
        waiting = tuple(segment.id for group in led.state.waiting for segment in group.segments)
        assert len(waiting) > 1
        begin = records.SegmentDeletionBegun(leader_epoch=CompactorEpoch(led.epoch), ids=waiting)
        assert led.refusal(begin) == ""
        assert "only a part" in led.refusal(begin.model_copy(update={"ids": waiting[:1]}))
        assert "does not wait" in led.refusal(begin.model_copy(update={"ids": (led.state.live[0].id,)}))
        assert "not begun" in led.refusal(records.SegmentDeletionEnded(leader_epoch=CompactorEpoch(led.epoch), ids=waiting))
        voided = led.state.model_copy(update={"vector": ()})
        assert "do not grant" in ordering.find_rule_violation(voided, led.actor.log.build_record_to_append(begin))


class TestTakingBack:
    """A plan that takes a round back, as brokers' tiers have it."""

    @pytest.fixture
    def compacted(self, led: Led) -> Led:
        led.leadership.release_leadership()
        acquire_leadership(led.actor.ports, led.actor.log, LEASE).release_leadership()
        assert led.actor.run().status == "cleaned"
        led.leadership = acquire_leadership(led.actor.ports, led.actor.log, LEASE)
        return led

    def plan(self, led: Led) -> CompactionPlan:
        state = led.state
        made = [segment for segment in state.live if segment.id in set(state.waiting[-1].replaced_by.values())]
        tasks = tuple(
            CompactionTask(
                group=number, sources=(one.id,), new_segment_id=f"copy-{number}", start_offset=one.start_offset,
                end_offset=one.end_offset, leader_epochs=one.leader_epochs, mtime_ms=0,
            )
            for number, one in enumerate(made)
        )  # fmt: skip
        earlier = state.find_run(state.published[-1])
        assert earlier
        return CompactionPlan(
            run_id="back", topic=state.topic, partition=state.partition, leader_epoch=CompactorEpoch(led.epoch), now_ms=TimestampMs(0),
            first_dirty_offset=Offset(0),
            end_offset=Offset(made[-1].end_offset + 1), next_dirty_offset=Offset(0),
            high_watermark=made[-1].end_offset + 1, legacy_horizon_ms=0,
            vector=state.vector, policy=CleanerPolicy(), map_engine="memory", fingerprint="", producers=(), tasks=tasks,
            restores=earlier.run_id,
        )  # fmt: skip

    def refusal(self, led: Led, **changes: Any) -> str:
        plan = self.plan(led).model_copy(update=changes)
        return led.refusal(records.PlanAnnounced(leader_epoch=CompactorEpoch(led.epoch), plan=plan))

    def test_the_latest_round_may_be_and_the_offset_goes_back_with_it(self, compacted: Led) -> None:
        assert self.refusal(compacted) == ""
        assert "goes back" in self.refusal(compacted, restores="")
        plan = self.plan(compacted)
        assert {
            entry.offset
            for entry in ordering.cleaner_offsets_after_round(
                compacted.state, plan, CompactorEpoch(compacted.epoch), has_withdrawn_groups=True
            )
        } == {0}
        stays = ordering.cleaner_offsets_after_round(
            compacted.state, plan.model_copy(update={"restores": ""}), CompactorEpoch(9), has_withdrawn_groups=True
        )
        assert stays == (
            *compacted.state.vector,
            CleanerOffset(leader_epoch=CompactorEpoch(9), offset=Offset(first_dirty_offset_in(compacted.state.vector))),
        )

    def test_no_other_round_and_no_part_of_it(self, compacted: Led) -> None:
        assert "not the latest" in self.refusal(compacted, restores="another")
        task = self.plan(compacted).tasks[0]
        other = compacted.state.live[0].model_copy(update={"id": "untouched", "start_offset": 99, "end_offset": 99})
        state = compacted.state.model_copy(update={"live": (*compacted.state.live, other)})
        more = task.model_copy(update={"group": 7, "sources": ("untouched",), "start_offset": 99, "end_offset": 99, "new_segment_id": "x"})
        plan = self.plan(compacted).model_copy(update={"tasks": (task, more)})
        body = records.PlanAnnounced(leader_epoch=CompactorEpoch(compacted.epoch), plan=plan)
        assert "a part of run" in ordering.find_rule_violation(state, compacted.actor.log.build_record_to_append(body))

    def test_not_once_its_sources_go(self, compacted: Led) -> None:
        plan = self.plan(compacted)
        state = compacted.state.model_copy(update={"waiting": ()})
        body = records.PlanAnnounced(leader_epoch=CompactorEpoch(compacted.epoch), plan=plan)
        assert "has begun" in ordering.find_rule_violation(state, compacted.actor.log.build_record_to_append(body))

    def test_not_by_the_epoch_that_published_it(self, compacted: Led) -> None:
        group = compacted.state.waiting[-1].model_copy(update={"leader_epoch": compacted.epoch})
        state = compacted.state.model_copy(update={"waiting": (group,)})
        body = records.PlanAnnounced(leader_epoch=CompactorEpoch(compacted.epoch), plan=self.plan(compacted))
        assert "is not above the epoch" in ordering.find_rule_violation(state, compacted.actor.log.build_record_to_append(body))


TOPIC, ANOTHER = "Xy3Jr0mXSGaBcbTsZBZfJA", "Qm9CQm9CQm9CQm9CQm9CQg"


class TestTopicIdentity:
    def folded(self, state: PartitionState, *bodies: Any) -> PartitionState:
        for body in bodies:
            slot = state.slot + 1
            record = records.PartitionRecord(
                version=records.VERSION, log="orders-0", slot=slot, incarnation="me", attempt=slot, at_ms=0, body=body
            )
            state = fold.apply_partition_record(state, record, ordering.find_rule_violation)
        return state

    def tiered(self, number: int, topic_id: str) -> tuple[Any, Any]:
        """Two records: an import of the offsets 10 * number and nine more."""
        made = segment(f"s{number}", 10 * number, 10 * number + 9, (0, 0))
        registered = records.SegmentIdsRegistered(import_id=f"i{number}", ids=(made.id,), holder="me")
        return registered, records.SegmentsTiered(import_id=f"i{number}", segments=(made,), topic_id=TopicId(topic_id))

    def state(self, topic_id: str) -> PartitionState:
        return self.folded(PartitionState(topic="orders", partition=0), *self.tiered(0, topic_id))

    def test_the_first_segments_bring_the_topic_id(self) -> None:
        assert self.state(TOPIC).topic_id == TOPIC
        assert self.state(TOPIC).opened_slot == 2

    @pytest.mark.parametrize(
        ("recorded", "given", "reason"),
        [(TOPIC, TOPIC, ""), (TOPIC, "", ""), ("", "", ""), (TOPIC, ANOTHER, ANOTHER), ("", TOPIC, "does not know")],
    )
    def test_segments_of_another_topic_do_not_count(self, recorded: str, given: str, reason: str) -> None:
        state = self.folded(self.state(recorded), *self.tiered(1, given))
        assert (state.end_offset, state.topic_id) == ((9, recorded) if reason else (19, recorded))
        assert not reason or reason in state.fenced[-1].reason

    def test_a_truncation_of_another_topic_does_not_count(self) -> None:
        state = self.state(TOPIC)
        cut = records.TailTruncated(cut_id="c", offset=Offset(0), voided=("s0",), topic_id=TopicId(ANOTHER))
        assert self.folded(state, cut).live == state.live
        assert self.folded(state, cut.model_copy(update={"topic_id": TOPIC})).live == ()

    def test_an_emptied_partition_stays_its_topics(self) -> None:
        empty = self.folded(self.state(TOPIC), records.TailTruncated(cut_id="c", offset=Offset(0), voided=("s0",)))
        assert self.folded(empty, *self.tiered(0, ANOTHER)).live == ()
        assert self.folded(empty, records.TopicAdopted(topic_id=TopicId(ANOTHER), previous_id=TopicId(TOPIC))).topic_id == ANOTHER

    def test_adoption_names_the_id_that_it_replaces(self) -> None:
        adopted = records.TopicAdopted(topic_id=TopicId(ANOTHER), previous_id=EMPTY_TOPIC_ID)
        assert self.folded(self.state(TOPIC), adopted).topic_id == TOPIC
        assert self.folded(self.state(""), adopted).topic_id == ANOTHER

    def test_a_seam_is_where_the_tier_ends_and_counts_once(self) -> None:
        state = self.state("")
        assert self.folded(state, records.TopicAdopted(seam=9)).adopted_seam == -1
        adopted = self.folded(state, records.TopicAdopted(seam=10))
        assert adopted.adopted_seam == 10
        assert self.folded(adopted, *self.tiered(1, "")).adopted_seam == -1

    def test_adoption_declares_something_of_a_partition_that_holds_something(self) -> None:
        assert "neither" in self.folded(self.state(""), records.TopicAdopted()).fenced[-1].reason
        empty = PartitionState(topic="orders", partition=0)
        assert "empty" in self.folded(empty, records.TopicAdopted(topic_id=TopicId(TOPIC))).fenced[-1].reason

    def test_programs_without_topic_ids_read_what_has_none(self) -> None:
        """Empty fields are not written; a record of this version with an id is refused by its version."""
        assert "topic_id" not in self.tiered(0, "")[1].model_dump_json()
        assert "topic_id" in self.tiered(0, TOPIC)[1].model_dump_json()
        empty = PartitionState(topic="orders", partition=0).model_dump_json()
        assert not {field for field in ("topic_id", "adopted_seam", "opened_slot", "log_start_offset") if field in empty}
