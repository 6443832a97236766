"""Brokers that expire segments of a topic while it is compacted, and afterwards: what a round, retire and undo make of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compactor.access.rounds import compact
from compactor.access.tier import Tier
from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.control.leadership import find_expired_segments
from compactor.control.records import RoundPublished
from compactor.control.state import PartitionState, RoundStage
from compactor.errors import CompactorError, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata
from compactor.round import compaction
from compactor.round.compaction import RoundReport
from compactor.upkeep.export import export_partition
from compactor.upkeep.orphans import undo_by_copies
from compactor.upkeep.retire import retire_partition
from compactor.views.difference import ControlLogHistory
from compactor.views.explain import ExplanationFact, explain_partition
from compactor.views.forecast import forecast_next_round
from tests.builders import read
from tests.simulation.kafka_schedule import RARE_EXPIRY_MUTATIONS
from tests.support.deployment import GrowingLog
from tests.support.memory_brokers import MemoryBrokers

NAME = TopicPartition("orders", 0)
TEN_YEARS_MS = 3650 * 86_400_000


class Expiring:
    """One partition of a topic with finite retention, before its first round."""

    def __init__(self, folder: Path) -> None:
        cleaner = {"segment_bytes": 12_000, "min_cleanable_dirty_ratio": 0.0, "cleanup_policy": "compact,delete"}
        self.brokers = MemoryBrokers(folder / "brokers", {"cleaner": cleaner, "publish": {"grace_ms": 0}, "lease": {"ttl_ms": 300}})
        self.brokers.topic("orders", {"retention.ms": str(TEN_YEARS_MS)})
        self.folder = folder
        self.log = GrowingLog(*NAME, folder, random.Random(4))
        self.brokers.tier(NAME, self.log.write_part(8))
        self.plans: list[CompactionPlan] = []

    def opened(self) -> Tier:
        return self.brokers.opened()

    def state(self) -> PartitionState:
        return self.opened().open_partition_log(NAME, caller_runs_round=True).refresh()

    def readers_state(self) -> PartitionState:
        return self.opened().open_partition_log(NAME).refresh()

    def round(self, stage: RoundStage | None = None, happens: Callable[[CompactionPlan], object] = lambda plan: None) -> RoundReport:
        """A round during which something happens once, when it reaches a stage."""
        opened = self.opened()

        def reached(now: RoundStage, plan: Any) -> None:
            if now is RoundStage.ANNOUNCED:
                self.plans.append(plan)
            if now is stage and len(self.plans) == 1:
                happens(plan)

        return compact(opened, NAME, opened.ports.clock_ms(), on_stage=reached)

    def records(self) -> dict[int, bytes | None]:
        """What readers find, by offset."""
        out = self.folder / f"out-{random.randrange(1 << 40)}"
        export_partition(self.opened(), NAME, out)
        batches = [batch for found in read(out).values() for batch in found if not batch.control]
        return {record.offset: record.key for batch in batches for record in batch.records}

    def check_last_values(self, start: int) -> None:
        """From the log start on, the last value of each key that was written there is read."""
        wanted = {offset for offset, value in self.log.truth.values() if value is not None and offset >= start}
        assert wanted <= set(self.records())

    def retire(self) -> None:
        tier = self.opened()
        retire_partition(tier.ports, tier.open_partition_log(NAME, caller_runs_round=True), tier.lease, tier.retention)

    def undo(self) -> PartitionState:
        tier = self.opened()
        return undo_by_copies(tier, tier.open_partition_log(NAME, caller_runs_round=True), self.state().published[-1])

    def published(self) -> RoundPublished:
        records = ControlLogHistory(self.opened().open_partition_log(NAME, caller_runs_round=True)).records
        return [record.body for record in records if isinstance(record.body, RoundPublished)][-1]


@pytest.fixture
def expiring(tmp_path: Path) -> Expiring:
    return Expiring(tmp_path)


@pytest.mark.parametrize("stage", [RoundStage.ANNOUNCED, RoundStage.UPLOADED, RoundStage.VERIFIED, RoundStage.PUBLISH_BEGUN])
def test_a_group_that_expires_in_mid_round_is_left_out_and_the_offset_advances(expiring: Expiring, stage: RoundStage) -> None:
    report = expiring.round(stage, lambda plan: expiring.brokers.expire(NAME, plan.tasks[0].end_offset + 1))
    [plan] = expiring.plans
    start = plan.tasks[0].end_offset + 1
    assert (report.status, report.reason) == ("cleaned", "")
    assert (expiring.published().expired, expiring.published().cut_off) == ((0,), ())
    state = expiring.state()
    assert (state.broker_log_start, state.first_dirty_offset, state.quarantine) == (start, plan.next_dirty_offset, None)
    assert min(expiring.records()) >= start
    expiring.check_last_values(start)


@pytest.mark.parametrize(("log_start", "expired"), [(9, set()), (10, {"a"}), (11, {"a"})])
def test_a_deleted_segment_has_expired_only_if_it_lies_wholly_below_the_log_start(log_start: int, expired: set[str]) -> None:
    """Its last offset is 9: with a log start of 9 one of its records is still to be read, so that its absence is a loss."""
    segment = RemoteLogSegmentMetadata(
        id="a", start_offset=Offset(0), end_offset=Offset(9), size_bytes=9, max_timestamp_ms=TimestampMs(-1), mtime_ms=0,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(0)),), files={},
    )  # fmt: skip
    publisher = SimpleNamespace(find_deleted_segments=lambda partition, ids: frozenset(ids))
    leadership: Any = SimpleNamespace(
        ports=SimpleNamespace(publisher=publisher, broker_log_start=None),
        state=PartitionState(topic="orders", partition=0, live=(segment,), broker_log_start=log_start),
    )
    assert find_expired_segments(leadership, ["a"]) == expired


@pytest.mark.parametrize("stage", [RoundStage.UPLOADED, RoundStage.VERIFIED, RoundStage.PUBLISH_BEGUN])
def test_a_rewritten_group_of_which_a_part_expires_is_published_as_if_it_were_there(expiring: Expiring, stage: RoundStage) -> None:
    def expire_first_source(plan: CompactionPlan) -> None:
        ends = {segment.id: segment.end_offset for segment in expiring.state().live}
        assert len(plan.tasks[0].sources) > 1
        expiring.brokers.expire(NAME, ends[plan.tasks[0].sources[0]] + 1)

    report = expiring.round(stage, expire_first_source)
    assert (report.status, report.reason) == ("cleaned", "")
    assert (expiring.published().expired, len(expiring.published().replacements)) == ((), len(expiring.plans[0].tasks))
    expiring.check_last_values(expiring.state().broker_log_start)


def test_a_group_of_which_a_part_expires_before_it_is_rewritten_undoes_the_round_without_a_failure(expiring: Expiring) -> None:
    def expire_first_source(plan: CompactionPlan) -> None:
        ends = {segment.id: segment.end_offset for segment in expiring.state().live}
        expiring.brokers.expire(NAME, ends[plan.tasks[0].sources[0]] + 1)

    report = expiring.round(RoundStage.ANNOUNCED, expire_first_source)
    assert (report.status, report.reason) == ("nothing_to_do", "brokers have expired a part of what group 0 replaces")
    assert (expiring.state().quarantine, expiring.state().intent) == (None, None)
    assert expiring.round().status == "cleaned"
    expiring.check_last_values(expiring.state().broker_log_start)


@pytest.mark.parametrize("stage", [RoundStage.ANNOUNCED, RoundStage.PUBLISH_BEGUN])
def test_a_source_below_the_log_start_that_readers_still_find_is_switched_as_usual(expiring: Expiring, stage: RoundStage) -> None:
    def only_rise(plan: CompactionPlan) -> None:
        known = expiring.brokers.cluster.known
        known[NAME.topic] = known[NAME.topic].__class__(**{**vars(known[NAME.topic]), "log_starts": {0: plan.tasks[0].end_offset + 1}})

    assert expiring.round(stage, only_rise).status == "cleaned"
    assert (expiring.published().expired, expiring.published().cut_off) == ((), ())
    assert len(expiring.published().replacements) == len(expiring.plans[0].tasks)


def test_deletions_that_no_log_start_explains_cut_the_rest_off(expiring: Expiring) -> None:
    report = expiring.round(RoundStage.PUBLISH_BEGUN, lambda plan: expiring.brokers.expire(NAME, plan.tasks[0].end_offset + 1, rises=False))
    assert report.reason.startswith("brokers had deleted what")
    assert expiring.published().expired == ()
    assert expiring.state().first_dirty_offset == 0


@pytest.mark.parametrize(
    ("rule", "noticed_by"),
    [
        (
            "expired by the log start alone",
            partial(test_a_source_below_the_log_start_that_readers_still_find_is_switched_as_usual, stage=RoundStage.ANNOUNCED),
        ),
        ("expired without log start", test_deletions_that_no_log_start_explains_cut_the_rest_off),
    ],
)
def test_missing_rule_about_expired_segments_is_noticed(rule: str, noticed_by: Callable[[Expiring], None], expiring: Expiring) -> None:
    with RARE_EXPIRY_MUTATIONS[rule](), pytest.raises((AssertionError, CompactorError)):
        noticed_by(expiring)


def test_the_highest_log_start_counts_after_a_new_leader_starts_lower(expiring: Expiring) -> None:
    expiring.round(RoundStage.PUBLISH_BEGUN, lambda plan: expiring.brokers.expire(NAME, plan.tasks[0].end_offset + 1))
    start = expiring.state().broker_log_start
    expiring.brokers.topic("orders", {"retention.ms": str(TEN_YEARS_MS)})
    expiring.brokers.tier(NAME, expiring.log.write_part(2))
    assert expiring.round().status == "cleaned"
    assert expiring.state().broker_log_start == start > 0


def test_undo_takes_back_what_has_not_expired(expiring: Expiring) -> None:
    before = expiring.records()
    assert expiring.round().status == "cleaned"
    made = [segment for segment in expiring.state().live if segment.id in expiring.state().published_by]
    start = made[0].end_offset + 1
    gone = expiring.brokers.expire(NAME, start)
    assert set(expiring.plans[0].tasks[0].sources) < set(gone), "brokers delete the replaced segments with the one that replaced them"
    expiring.undo()
    assert expiring.records() == {offset: key for offset, key in before.items() if offset >= start}


def test_undo_of_a_round_that_has_expired_is_refused(expiring: Expiring) -> None:
    assert expiring.round().status == "cleaned"
    made = [segment for segment in expiring.state().live if segment.id in expiring.state().published_by]
    expiring.brokers.expire(NAME, made[-1].end_offset + 1)
    with pytest.raises(UsageError, match="has expired"):
        expiring.undo()


def test_retire_accepts_that_brokers_have_deleted_replaced_segments_themselves(expiring: Expiring) -> None:
    assert expiring.round().status == "cleaned"
    made = [segment for segment in expiring.state().live if segment.id in expiring.state().published_by]
    expiring.brokers.expire(NAME, made[0].end_offset + 1)
    expiring.retire()
    state, cache = expiring.state(), expiring.opened().broker_metadata.partition_metadata_from_records(NAME).cache
    assert (state.waiting, state.retiring) == ((), ())
    assert {one.id for one in cache.list_segments()} == {segment.id for segment in state.live} - {made[0].id}
    expiring.check_last_values(made[0].end_offset + 1)
    assert expiring.round().status == "nothing_to_do"


def test_a_round_that_is_open_for_too_long_is_given_up(expiring: Expiring, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(compaction, "OPEN_ROUND_MAX_MS", -1)
        report = expiring.round()
    assert report.status == "quarantined"
    assert "overdue: it was open for more than a day, with 1 of" in report.reason
    cache = expiring.opened().broker_metadata.partition_metadata_from_records(NAME).cache
    assert {one.state.name for one in cache.list_segments()} == {"COPY_SEGMENT_FINISHED"}
    assert expiring.round().status == "cleaned"


def test_a_round_without_retention_may_take_longer(expiring: Expiring, monkeypatch: pytest.MonkeyPatch) -> None:
    expiring.brokers.topic("orders")
    monkeypatch.setattr(compaction, "OPEN_ROUND_MAX_MS", -1)
    assert expiring.round().status == "cleaned"


def test_plan_and_explain_say_what_brokers_expire_soon_and_why_it_is_rewritten_one_to_one(expiring: Expiring) -> None:
    tier, live = expiring.opened(), expiring.readers_state().live
    now_ms = tier.ports.clock_ms()
    told = forecast_next_round(tier, NAME, now_ms)
    assert "brokers expire segments by retention.ms of the topic (3650 d), the first at 203" in told.retention
    assert (told.one_to_one, told.segments_expired, told.next_expiry_ms) == (0, 0, live[0].max_timestamp_ms + TEN_YEARS_MS)
    soon_ms = live[2].max_timestamp_ms + TEN_YEARS_MS - 1_800_000
    told = forecast_next_round(tier, NAME, soon_ms)
    alone = [segment.why.endswith("; alone, because brokers expire it soon") for segment in told.segments]
    assert told.one_to_one == sum(alone) >= 3
    assert alone == sorted(alone, reverse=True)
    (fact,) = [fact for fact in explain_partition(tier, NAME, soon_ms).facts if fact.kind == "retention"]
    assert f"{told.one_to_one} segments expire within 1 h and are rewritten one to one, so that each" in fact.text


def test_explain_says_that_an_open_round_holds_up_expiry(expiring: Expiring) -> None:
    def explain(plan: CompactionPlan) -> None:
        tier = expiring.opened()
        facts.update({fact.kind: fact for fact in explain_partition(tier, NAME, tier.ports.clock_ms()).facts})

    facts: dict[str, ExplanationFact] = {}
    expiring.round(RoundStage.UPLOADED, explain)
    count = len(expiring.plans[0].tasks)
    assert facts["expiry_held_up"].text.startswith(f"brokers expire nothing behind the {count} new segments of the open round")
    assert "expiry_held_up" not in {fact.kind for fact in explain_partition(expiring.opened(), NAME, 0).facts}


def test_the_groups_of_a_plan_stay_as_they_are_when_the_time_of_expiry_comes_nearer(expiring: Expiring) -> None:
    newest_ms = max(segment.max_timestamp_ms for segment in expiring.readers_state().live)
    retention_ms = expiring.opened().ports.clock_ms() - newest_ms + 2 * 3_600_000
    expiring.brokers.topic("orders", {"retention.ms": str(retention_ms)})
    with pytest.raises(Stopped):
        expiring.round(RoundStage.ANNOUNCED, stop)
    [plan] = expiring.plans
    assert any(len(task.sources) > 1 for task in plan.tasks)
    expiring.brokers.hurried_ms = 5_400_000
    assert forecast_next_round(expiring.opened(), NAME, expiring.brokers.clock_ms()).one_to_one > len(plan.tasks)
    assert expiring.round().status == "resumed"
    assert [one.sources for one in expiring.published().replacements] == [task.sources for task in plan.tasks]


class Stopped(Exception):
    """The process ends here."""


def stop(plan: CompactionPlan) -> None:
    raise Stopped


def test_an_interrupted_round_that_is_too_old_is_undone_and_planned_anew(expiring: Expiring) -> None:
    with pytest.raises(Stopped):
        expiring.round(RoundStage.UPLOADED, stop)
    expiring.brokers.hurried_ms = compaction.OPEN_ROUND_MAX_MS + 1_000
    assert expiring.round().status == "cleaned"
    first, second = expiring.plans
    assert first.run_id != second.run_id
    run = expiring.state().find_run(first.run_id)
    assert run is not None
    assert run.status == "undone"
