"""The rules, each dropped in turn: what the simulation must notice. Only tests can drop them, by patching small functions.

``python -m tests.simulation --drop all`` shows which seeds notice what. Of fencing in the fold, the check at append and
the open intent each covers for the others; what they cover is seen only where several are dropped together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from inspect import getsource
from textwrap import dedent
from typing import Any
from unittest.mock import patch

from checkpoint import offsets
from compactor.constants import TopicId
from compactor.control import (
    control_log,
    fold,
    identity,
    importing,
    leadership,
    log_start,
    log_start as grace,
    logs,
    ordering,
    publication,
    publication as deletion,
    publication as undoing,
    records as r,
)
from compactor.control.control_log import ControlLog
from compactor.control.identity import DataRootOwnershipCheckByTierId
from compactor.control.leadership import Leadership, RecordRefused
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts, ObjectRetention
from compactor.control.state import OpenImport, PartitionState
from compactor.control.summary import GroupAwaitingDeletionSummary
from compactor.errors import CompactorError
from compactor.features.imports import staged_files as intake
from compactor.tier.ports import SegmentIdAndStartOffset
from compactor.upkeep import retire
from tests.simulation.schedule import run_schedule
from tests.support.keys import object_key

Mutation = Callable[[], AbstractContextManager[Any]]


def without(*requirements: fold.RuleCheck, of: type | None = None) -> Mutation:
    """Drops requirements from the table, for one kind of record or for all: in the fold and before the append."""

    def mutate() -> AbstractContextManager[Any]:
        changed = {
            kind: tuple(rule for rule in rules if rule not in requirements or (of is not None and kind is not of))
            for kind, rules in ordering.REQUIREMENTS.items()
        }
        return patch.dict(ordering.REQUIREMENTS, changed)

    return mutate


def edited(function: Callable[..., Any], old: str, new: str) -> Mutation:
    """Replaces a part of a function's text, for everybody who has imported it. The part occurs once."""

    @contextmanager
    def mutate() -> Iterator[None]:
        text, made, code = dedent(getsource(function)), dict[str, Any](), function.__code__
        assert text.count(old) == 1, f"{function.__qualname__} has {text.count(old)} times: {old}"
        exec(compile("from __future__ import annotations\n" + text.replace(old, new), code.co_filename, "exec"), function.__globals__, made)
        function.__code__ = made[function.__name__].__code__
        try:
            yield
        finally:
            function.__code__ = code

    return mutate


def nowhere(check: str) -> Mutation:
    """Drops a check of the plan's conditions wherever it is asked: announcing, resuming, publishing, folding."""
    return lambda: patch.object(ordering, check, lambda state, plan: "")


def together(*mutations: Mutation) -> Mutation:
    @contextmanager
    def mutate() -> Iterator[None]:
        with ExitStack() as stack:
            for mutation in mutations:
                stack.enter_context(mutation())
            yield

    return mutate


@contextmanager
def vector_advanced_inside_the_round() -> Iterator[None]:
    """The cleaner offset moves with a receipt instead of with the end of the round."""
    effect = fold.EFFECTS[r.ReceiptsAdded]

    def early(state: PartitionState, record: Any, body: Any) -> dict[str, Any]:
        changes = effect(state, record, body)
        plan = changes["intent"].plan.model_copy(
            update={"vector": offsets.advance_cleaner_vector(state.vector, body.leader_epoch, state.end_offset + 1)}
        )
        return changes | {"vector": plan.vector, "intent": changes["intent"].model_copy(update={"plan": plan})}

    with patch.dict(fold.EFFECTS, {r.ReceiptsAdded: early}):
        yield


@contextmanager
def boundary_not_read_again() -> Iterator[None]:
    """A fold, or a successful create, is believed without a look at the boundary."""

    def settle(self: ControlLog[Any], appended: Any) -> Any:
        state = self._form.apply(self.state, appended) if appended else self.state
        while not appended and (record := self._read_record_at_slot(state.slot + 1)) is not None:
            state = self._form.apply(state, record)
        self._state = state
        return state

    with patch.object(ControlLog, "_fold_to_end", settle):
        yield


@contextmanager
def ours_by_content() -> Iterator[None]:
    """A slot is called ours where its body is what we wanted to write."""
    with patch.object(control_log, "is_same_attempt", lambda stored, attempted: stored.body == attempted.body):
        yield


def objects_of(leads: Leadership, intent: Any) -> list[str]:
    return [
        object_key(leads.log.state.topic_partition, SegmentIdAndStartOffset(task.new_segment_id, task.start_offset))
        for task in intent.plan.tasks
    ]


@contextmanager
def delete_before_undone() -> Iterator[None]:
    """A given-up plan's objects are deleted, and then the record is written."""
    abandon_announced_plan = publication.abandon_announced_plan

    def early(leads: Leadership, intent: Any, reason: str) -> PartitionState:
        leads.ports.data.delete(objects_of(leads, intent))
        return abandon_announced_plan(leads, intent, reason)

    with patch.object(publication, "abandon_announced_plan", early):
        yield


@contextmanager
def delete_before_retire_begun() -> Iterator[None]:
    """What is due is deleted, and then the record is written."""
    append = Leadership.append_record

    def early(self: Leadership, body: Any, counted: Any) -> PartitionState:
        if isinstance(body, r.SegmentDeletionBegun):
            ids = set(body.ids)
            segments = [segment for group in self.state.waiting for segment in group.segments if segment.id in ids]
            self.ports.data.delete(
                [object_key(self.state.topic_partition, segment, kind) for segment in segments for kind in segment.files]
            )
        return append(self, body, counted)

    with patch.object(Leadership, "append_record", early):
        yield


@contextmanager
def grace_by_the_publishers_clock() -> Iterator[None]:
    """Grace is counted from the time that the publisher wrote into its record."""

    def since(ports: EnvironmentPorts, log: PartitionLog) -> dict[int, int]:
        return real(ports, log) | {run.published_slot: run.ended_ms for run in log.state.runs}

    real = retire.grace_starts_ms
    with patch.object(retire, "grace_starts_ms", since):
        yield


@contextmanager
def fold_before_list() -> Iterator[None]:
    """The sweep folds, and then lists."""
    survey = retire.find_deletions

    def early(
        ports: EnvironmentPorts, log: PartitionLog, retention: ObjectRetention, clock: retire.GraceClock = retire.STORES_OWN
    ) -> retire.PendingDeletions:
        log.refresh()
        with patch.object(log, "refresh", lambda: log.state):
            return survey(ports, log, retention, clock)

    with patch.object(retire, "find_deletions", early):
        yield


@contextmanager
def no_check_at_append() -> Iterator[None]:
    """Records are appended without asking the rules; the fold is left to drop them."""
    with (
        patch.object(leadership, "reason_to_refuse_append", lambda log, state, body: ""),
        patch.object(Leadership, "require_leadership_in_state", lambda *_: None),
    ):
        yield


@contextmanager
def fenced_process_cleans_up() -> Iterator[None]:
    """Whoever gives up a plan deletes its objects, whether its record counted or not."""
    abandon_announced_plan = publication.abandon_announced_plan

    def careless(leads: Leadership, intent: Any, reason: str) -> PartitionState:
        try:
            return abandon_announced_plan(leads, intent, reason)
        except Exception:
            leads.ports.data.delete(objects_of(leads, intent))
            raise

    with patch.object(publication, "abandon_announced_plan", careless):
        yield


@contextmanager
def slots_deleted_before_the_boundary() -> Iterator[None]:
    """Old slots go as soon as the snapshot stands."""
    create = ControlLog._create_boundary

    def late(self: ControlLog[Any], slot: int) -> None:
        self.store.delete([self.control_record_object_key(number) for number in range(self._boundary.slot + 1, slot + 1)])
        create(self, slot)

    with patch.object(ControlLog, "_create_boundary", late):
        yield


@contextmanager
def times_not_kept() -> Iterator[None]:
    """A snapshot forgets the times of the slots that it stands in for."""
    kept = logs.PARTITION.with_store_times
    object.__setattr__(logs.PARTITION, "with_store_times", lambda state, modified: state)
    try:
        yield
    finally:
        object.__setattr__(logs.PARTITION, "with_store_times", kept)


@contextmanager
def tolerant_fold() -> Iterator[None]:
    """The effects do what they can where the rules let pass what they rely on being refused."""

    def receipts(state: PartitionState, record: Any, body: Any) -> dict[str, Any]:
        return add(state, record, body) if state.intent else {}

    def survivors(state: PartitionState, record: Any, body: Any) -> dict[str, Any]:
        return store(state, record, body) if state.intent else {}

    def published(state: PartitionState, record: Any, body: Any) -> dict[str, Any]:
        live = {segment.id for segment in state.live}
        kept = [new.model_copy(update={"sources": tuple(name for name in new.sources if name in live)}) for new in body.replacements]
        changes = publish(state, record, body.model_copy(update={"replacements": tuple(new for new in kept if new.sources)}))
        return changes | {"live": tuple(sorted(changes["live"], key=lambda segment: segment.start_offset))}

    def undone(state: PartitionState, record: Any, body: Any) -> dict[str, Any]:
        return undo(state, record, body) if any(g.run_id == body.run_id and not g.undone for g in state.waiting) else {}

    add, store, publish, undo = (fold.EFFECTS[kind] for kind in (r.ReceiptsAdded, r.SurvivorsStored, r.RoundPublished, r.RoundUndone))
    changed = {r.ReceiptsAdded: receipts, r.SurvivorsStored: survivors, r.RoundPublished: published, r.RoundUndone: undone}
    with patch.dict(fold.EFFECTS, changed):
        yield


@contextmanager
def blind_acquisition() -> Iterator[None]:
    """The epoch is chosen once, and not again when the log has grown."""

    def unless(log: PartitionLog, before: Any, body: Any, state: PartitionState) -> Any:
        leader = state.leader
        return None if leader and (leader.incarnation, leader.epoch) == (log.incarnation, body.leader_epoch) else body

    with patch.object(leadership, "_acquisition_unless_overtaken", unless):
        yield


@contextmanager
def blind_import() -> Iterator[None]:
    """An importer does not look whether its registration still stands."""

    def tier(
        ports: EnvironmentPorts,
        log: PartitionLog,
        import_id: str,
        segments: Any,
        lineage: Any = (),
        tail: Any = (),
        topic_id: str = "",
        *_: Any,
    ) -> PartitionState:
        body = r.SegmentsTiered(
            import_id=import_id, segments=tuple(segments), lineage=tuple(lineage), tail=tuple(tail), topic_id=TopicId(topic_id)
        )
        start = log.refresh().slot
        return log.append_due_records(lambda state: None if state.slot > start else body)

    with patch.object(intake, "record_tiered_segments", tier), patch.object(importing, "record_tiered_segments", tier):
        yield


@contextmanager
def tiered_unregistered() -> Iterator[None]:
    """The fold takes segments of an import that it does not know (any more)."""
    effect = fold.EFFECTS[r.SegmentsTiered]

    def tiered(state: PartitionState, record: Any, body: Any) -> dict[str, Any]:
        if body.import_id not in state.registrations:
            entry = OpenImport(import_id=body.import_id, ids=tuple(segment.id for segment in body.segments), holder="", slot=0)
            state = state.model_copy(update={"registrations": state.registrations | {body.import_id: entry}})
        return effect(state, record, body)

    with patch.dict(fold.EFFECTS, {r.SegmentsTiered: tiered}), without(ordering.check_segment_ids_registered)():
        yield


@contextmanager
def undo_does_not_ask() -> Iterator[None]:
    """``undo`` takes the latest round whatever stands against it."""
    with without(ordering.check_no_open_intent, of=r.RoundUndone)():
        yield


@contextmanager
def truncation_does_not_clamp() -> Iterator[None]:
    """The cleaner offsets stay where they were when the broker's log was truncated below them."""
    with patch.object(fold, "_changes_by_capped_offsets", lambda state, parted: {"vector": state.vector, "waiting": state.waiting}):
        yield


@contextmanager
def swept_though_announced() -> Iterator[None]:
    """The sweep does not know what the open intent has announced."""
    protected = ordering.protected_segment_ids

    def without_intent(state: PartitionState) -> set[str]:
        return protected(state.model_copy(update={"intent": None}))

    with patch.object(ordering, "protected_segment_ids", without_intent):
        yield


@contextmanager
def clamp_leaves_waiting_groups() -> Iterator[None]:
    """What waits keeps the cleaner offsets from before the truncation."""
    with patch.object(
        fold,
        "_changes_by_capped_offsets",
        lambda state, parted: {"vector": offsets.cap_cleaner_offsets(state.vector, parted), "waiting": state.waiting},
    ):
        yield


@contextmanager
def imports_voided_at_once() -> Iterator[None]:
    """Whatever is registered is taken for abandoned."""
    with patch.object(retire, "_stale_import_ids", lambda ports, log, retention, clock: tuple(log.state.registrations)):
        yield


@contextmanager
def changed_sources_are_taken() -> Iterator[None]:
    """An importer does not look whether the file is still what it has checked."""
    with patch.object(intake, "require_source_unchanged", lambda one: None):
        yield


@contextmanager
def whoever_has_the_data() -> Iterator[None]:
    """Nobody asks whose the data root is."""
    with (
        patch.object(DataRootOwnershipCheckByTierId, "_require_same_tier_id", lambda *_: None),
        patch.object(identity, "_find_unknown_object", lambda *_: ""),
    ):
        yield


@contextmanager
def grace_by_whoever_retires() -> Iterator[None]:
    """What was recorded with a publication is not asked."""
    keep_ms = grace.grace_period_ms

    def configured(group: grace.ReplacedGroup, retention: ObjectRetention) -> int:
        return keep_ms(
            GroupAwaitingDeletionSummary(slot=group.slot, since_ms=None, run_id="", undone=group.undone, segments=0, size_bytes=0),
            retention,
        )

    with patch.object(grace, "grace_period_ms", configured):
        yield


@contextmanager
def newest_segment_expires() -> Iterator[None]:
    """Whatever lies below the new log start is removed, the newest segment, too."""

    def below(live: Any, offset: int) -> tuple[Any, ...]:
        return tuple(segment for segment in live if segment.end_offset < offset)

    with patch.object(log_start, "segments_removable_below", below), patch.object(deletion, "segments_removable_below", below):
        yield


def always(where: Any, name: str, answer: Any) -> Mutation:
    """A check that always says the same."""
    return lambda: patch.object(where, name, lambda *_, **__: answer)


FENCING: Mutation = without(ordering.check_writer_leads)
OPEN_INTENT: Mutation = together(without(ordering.check_intent_is_open, ordering.check_replacements_match_receipts), tolerant_fold)
LIVE: Mutation = together(without(ordering.check_replacements_cover_sources), nowhere("_plan_sources_problem"), tolerant_fold)
VECTOR: Mutation = together(without(ordering.check_published_cleaner_offsets), nowhere("_cleaner_offsets_changed_problem"))

MUTATIONS: dict[str, Mutation] = {
    "vector advanced inside a round": vector_advanced_inside_the_round,
    "boundary not read again": boundary_not_read_again,
    "slot called ours by content": ours_by_content,
    "objects deleted before the intent is undone": delete_before_undone,
    "objects deleted before retire begun": delete_before_retire_begun,
    "grace by the publisher's clock": grace_by_the_publishers_clock,
    "sweep by fold before list": fold_before_list,
    "fenced process cleans up": fenced_process_cleans_up,
    "slots deleted before the boundary": slots_deleted_before_the_boundary,
    "times not kept in the snapshot": times_not_kept,
    "epochs may repeat": together(without(ordering.check_epoch_follows), blind_acquisition),
    "voided imports count": together(tiered_unregistered, blind_import),
    "imports need not continue the log": without(ordering.check_segments_continue_log),
    "lineage truncation does not clamp": truncation_does_not_clamp,
    "a clamp leaves waiting groups": clamp_leaves_waiting_groups,
    "import does not check that its file is unchanged": changed_sources_are_taken,
    "undo of any round": together(without(ordering.check_round_is_undoable), tolerant_fold),
    "undo with an open intent": undo_does_not_ask,
    "undo with an open intent, no vector check": together(undo_does_not_ask, VECTOR),
    "undo with an open intent, no vector check, no live check": together(undo_does_not_ask, VECTOR, LIVE),
    "verification before publication skipped": always(publication, "stored_segments_problem", ""),
    "lease never respected": always(leadership, "_other_living_leader", None),
    "leadership never released": always(Leadership, "release_leadership", None),
    "a leader that hangs beats on": always(leadership.LeaderStepCounter, "should_send_heartbeat", True),
    "announced ids unprotected in the sweep": swept_though_announced,
    "undo does not check its sources": always(undoing, "_require_intact_segments", None),
    "imports voided at once": imports_voided_at_once,
    "data of another control store": whoever_has_the_data,
    "lower bounds are not asked": always(ControlLog, "_require_log_not_shortened", None),
    "recorded grace does not count": grace_by_whoever_retires,
    "log start may fall": without(log_start.check_log_start_rises),
    "newest segment may expire": newest_segment_expires,
    "log start raised beside an open round": without(ordering.check_no_open_intent, of=r.LogStartRaised),
    "undo below the log start": always(log_start, "restored_segment_problem", ""),
    "truncation below the log start": without(log_start.check_truncation_above_start),
    "removed ids are not checked": without(log_start.check_removed_below_start),
    "removed balance is not checked": without(log_start.check_removed_digests),
    "imported log start is not checked": without(log_start.check_initial_log_start),
    "segments come before a raised log start": without(log_start.check_log_start_unraised),
    "no fencing": FENCING,
    "no check at append": no_check_at_append,
    "no open intent": OPEN_INTENT,
    "no live check": LIVE,
    "no vector check": VECTOR,
    "no fencing, no check at append": together(FENCING, no_check_at_append),
    "no open intent, no live check": together(OPEN_INTENT, LIVE),
    "no fencing, no open intent": together(FENCING, OPEN_INTENT),
    "no fencing, no live check": together(FENCING, LIVE),
    "no check at append, no open intent": together(no_check_at_append, OPEN_INTENT),
    "no check at append, no live check": together(no_check_at_append, LIVE),
    "no fencing, no check at append, no open intent": together(FENCING, no_check_at_append, OPEN_INTENT),
    "no fencing, no check at append, no live check": together(FENCING, no_check_at_append, LIVE),
    "no fencing, no open intent, no live check": together(FENCING, OPEN_INTENT, LIVE),
    "no check at append, no open intent, no live check": together(no_check_at_append, OPEN_INTENT, LIVE),
    "all four": together(FENCING, no_check_at_append, OPEN_INTENT, LIVE),
    "all five": together(FENCING, no_check_at_append, OPEN_INTENT, LIVE, VECTOR),
}

COVERED: Mapping[str, str] = {
    "undo with an open intent": "the checks of vector and live segments refuse the round that goes on",
    "undo with an open intent, no vector check": "the check of live segments refuses the round that goes on",
    "no fencing": "the check at append, and the open intent that a newer leader settles first",
    "no check at append": "fencing when the log is folded",
    "no open intent": "the check of live segments",
    "no vector check": "a round's open intent, whose plan has the vector",
    "no fencing, no check at append": "the open intent, and the check of live segments",
    "no fencing, no open intent": "the check at append, and the check of live segments",
    "voided imports count": "nothing: random schedules meet it too rarely, so a directed schedule shows it (test_simulation_bites.py)",
    "no check at append, no open intent": "fencing when the log is folded, and the check of live segments",
}
"""Rules whose absence alone is noticed rarely or never, and what stands in. Where another rule stands in, ``MUTATIONS`` drops both, too."""

NEAR: Mapping[str, str] = {
    "removed ids are not checked": "unit/test_control_log_start.py",
    "removed balance is not checked": "unit/test_control_log_start.py",
    "imported log start is not checked": "unit/test_control_log_start.py",
    "segments come before a raised log start": "property/test_log_start_model.py",
    "tiered again": "unit/test_overlapping_copies.py",
    "expired without log start": "integration/test_broker_expiry.py",
    "the present log start counts": "integration/test_broker_expiry.py",
    "expired by the log start alone": "integration/test_broker_expiry.py",
    "topic id is not compared": "features/imports/test_log_identity.py",
    "closed imports count": "unit/test_control_truncation.py",
    "the seam is not found again after a truncation": "features/imports/test_import_truncated.py",
    "the tier is cut before checks": "features/imports/test_import_truncated.py",
    "a cut is made where the directory begins in an unknown epoch": "features/imports/test_import_truncated.py",
    "epochs that begin in a gap are compared": "features/imports/test_import_again.py",
    "cleaned logs are accepted": "features/imports/test_import_truncated.py",
    "divergence is not noticed": "features/consumer/test_consumer_divergence.py",
    "staged files are not taken": "features/imports/test_import_staged.py",
    "staged files need not lead to the live log": "unit/test_staged_rules.py",
    "staged files need not lie below the live log": "unit/test_staged_rules.py",
    "staged files need not continue the tier": "unit/test_staged_rules.py",
    "staged files may have any leader epoch": "simulation/test_way_in_staged.py",
    "staged files need no leadership": "simulation/test_way_in_staged.py",
    "staged files go with a cleaned log": "simulation/test_way_in_staged.py",
    "staged files need neither leadership nor epochs": "simulation/test_way_in_staged.py",
    "staged files need nothing": "simulation/test_way_in_staged.py",
    "damage is a difference": "integration/test_incarnations.py",
    "incarnations are listed late": "integration/test_incarnations.py",
    "incarnations are opened twice": "unit/test_control_incarnations.py",
    "incarnations need not be opened": "unit/test_control_incarnations.py",
    "a deletion is any topic's": "unit/test_control_incarnations.py",
    "one answer is enough": "integration/test_deleted_topics.py",
    "answers need not lie apart": "integration/test_deleted_topics.py",
    "contradictions do not count": "integration/test_deleted_topics.py",
    "answers of any cluster count": "integration/test_deleted_topics.py",
    "the earlier clock counts": "integration/test_deleted_topics.py",
}
"""Rules that random schedules need rarely, and the tests near their code, in ``tests``, of which one fails without the rule."""


def noticed(violation: str) -> str:
    """Return the violation. Raises TypeError if it is that of a mutant with another signature than what it stands for: it would be noticed
    whatever its rule is worth.
    """
    if re.search(r"TypeError: .*<(locals|lambda)>.*argument", violation):
        raise TypeError(violation)
    return violation


def bites(mutation: Mutation, seeds: range) -> Iterator[tuple[int, str]]:
    """(seed, first violation) of each schedule that notices the missing rule. What the judge itself trips over counts as noticed."""
    for seed in seeds:
        try:
            with mutation():
                violations = run_schedule(seed).violations
        except (CompactorError, RecordRefused, AssertionError, LookupError, ValueError, StopIteration, RuntimeError) as error:
            violations = (f"{type(error).__name__}: {error}",)
        if violations:
            yield seed, noticed(violations[0])
