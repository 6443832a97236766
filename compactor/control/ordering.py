"""The ordering rules that keep data safe (I1 - I6), as code that refuses. All of them are in this module and in ``log_start``.

* ``REQUIREMENTS``: the conditions under which a control record counts. The **fold** checks them before it applies a record, so that a
  record which raced past its writer's check changes nothing; the **writer** checks them before it appends, so that it learns the reason.
* ``protected_segment_ids``: the segment ids whose objects must not be deleted in a given state. Every deletion checks it.

Rules and ``..._problem`` functions return the reason for a refusal, for people; empty: none. docs/reference/control-records.md shows the
table (tests/unit/test_control_ordering.py compares them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from checkpoint import lineage, offsets
from compactor.constants import CompactorEpoch
from compactor.control import incarnations, log_start, mirror, records as r
from compactor.control.fold import RuleCheck
from compactor.control.log_start import (
    coverage_problem,
    invalid_segment_problem,
    offset_gap_problem,
    task_coverage_problem,
    task_output_problem,
)
from compactor.control.records import ControlRecord
from compactor.control.state import GroupAwaitingDeletion, PartitionState, RoundIntent
from compactor.errors import CompactorError, Fenced
from compactor.model.ids import RunHistoryStatus
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata

# --- who may write -----------------------------------------------------------------------------------------------------------


def check_epoch_follows(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a compactor epoch one higher than the last."""
    if record.body.leader_epoch != state.next_compactor_epoch:
        return f"epoch {record.body.leader_epoch} does not follow epoch {state.last_compactor_epoch}"
    return ""


def check_writer_leads(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the leader as writer: the last epoch, by this incarnation, not released."""
    return writer_not_leading_problem(state, record.incarnation, record.body.leader_epoch)


def writer_not_leading_problem(state: PartitionState, incarnation: str, epoch: CompactorEpoch) -> str:
    """Return why a writer does not lead with this epoch. An expired lease alone does not end leadership."""
    leader = state.leader
    if leader is None:
        return f"epoch {epoch} was never acquired"
    if (leader.epoch, leader.incarnation) != (epoch, incarnation):
        return f"epoch {epoch} was fenced by {leader.holder}, which acquired epoch {leader.epoch} in slot {leader.slot}"
    if leader.released:
        return f"epoch {epoch} was released"
    return ""


def require_leadership(state: PartitionState, incarnation: str, epoch: CompactorEpoch) -> None:
    """Raise Fenced unless this incarnation leads with this epoch. Called before everything that only the leader may do."""
    problem = writer_not_leading_problem(state, incarnation, epoch)
    if problem:
        raise Fenced(f"{state.topic_partition}: {problem}", hint="Nothing was changed since. Run the command again to continue after it")


# --- imports -----------------------------------------------------------------------------------------------------------------


def check_import_ids_unused(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires an import id and segment ids that were never used before."""
    body: r.SegmentIdsRegistered = record.body
    is_known = body.import_id in state.registrations or any(closed.import_id == body.import_id for closed in state.closed_imports)
    if is_known or not body.ids:
        return f"import {body.import_id} is known already, or registers nothing"
    return _used_id_problem(state, body.ids)


def check_segment_ids_registered(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires segment ids that this import has registered and that are not void."""
    body: r.SegmentsTiered = record.body
    entry = state.registrations.get(body.import_id)
    if entry is None:
        return f"import {body.import_id} is not open: it was voided, is complete, or was never registered"
    strange = {segment.id for segment in body.segments} - set(entry.ids)
    return f"import {body.import_id} has not registered {min(strange)}" if strange else ""


def check_segments_continue_log(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires segments that start at the end offset + 1, without gaps between them."""
    segments: tuple[RemoteLogSegmentMetadata, ...] = record.body.segments
    if not segments or len({segment.id for segment in segments}) != len(segments):
        return "no segments, or one of them twice"
    if state.has_segments and segments[0].start_offset != state.end_offset + 1:
        return f"segment {segments[0].id} starts at {segments[0].start_offset}, the log ends at {state.end_offset}"
    return invalid_segment_problem(segments) or offset_gap_problem(segments)


def check_lineage_agrees(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a lineage that gives no live offset to another epoch (checked for records that state their last batches, which early
    versions did not).
    """
    body: r.SegmentsTiered = record.body
    end = state.end_offset + 1
    parted = lineage.first_contradicting_offset(state.lineage, end, body.lineage, end) if body.tail and state.has_segments else None
    return "" if parted is None else f"its lineage gives offset {parted} to another leader epoch than the tier's"


def check_segments_precede_log(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires segments that end at the start offset - 1, without gaps between them."""
    segments: tuple[RemoteLogSegmentMetadata, ...] = record.body.segments
    if not segments or len({segment.id for segment in segments}) != len(segments):
        return "no segments, or one of them twice"
    if not state.has_segments or segments[-1].end_offset != state.start_offset - 1:
        return f"segment {segments[-1].id} ends at {segments[-1].end_offset}, the log starts at {state.start_offset}"
    return invalid_segment_problem(segments) or offset_gap_problem(segments)


def check_import_complete(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires all registered segments of the import at once."""
    entry = state.registrations.get(record.body.import_id)
    return "" if entry and set(entry.ids) == {segment.id for segment in record.body.segments} else "not all that the import has registered"


def check_partition_never_compacted(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a partition of which no part was compacted or is being compacted."""
    return already_compacted_problem(state)


def already_compacted_problem(state: PartitionState) -> str:
    """Return why segments can no longer be prepended to the log."""
    # Compaction drops records that have newer values, and tombstones: older records added after that would appear as current values.
    if state.intent:
        return f"run {state.intent.plan.run_id} is compacting the partition"
    rewritten = any(segment.id in state.published_by for segment in state.live)
    if rewritten or offsets.first_dirty_offset_in(state.vector) > 0:
        return f"the partition was compacted up to offset {offsets.first_dirty_offset_in(state.vector)}"
    if state.source_cleaned_to > state.start_offset:
        return f"a log cleaner had compacted the log up to offset {state.source_cleaned_to} before it was imported"
    return ""


def check_truncation_discards_end(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires as discarded segments all live ones that end at the record's offset or later and, as a new segment, the part of the first of
    them below the offset.
    """
    body: r.TailTruncated = record.body
    voided = tuple(segment for segment in state.live if segment.end_offset >= body.offset)
    if not voided or tuple(segment.id for segment in voided) != body.voided:
        return f"the segments that reach beyond offset {body.offset} are others"
    first, head = voided[0], body.head
    if head is None:
        return "" if first.start_offset == body.offset else f"segment {first.id} begins below offset {body.offset}"
    if (head.start_offset, head.end_offset) != (first.start_offset, body.offset - 1):
        return f"segment {head.id} covers {head.start_offset}..{head.end_offset}, not {first.start_offset}..{body.offset - 1}"
    return ""


def check_truncation_segments(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires all segments that the truncation has registered: the part of the first discarded segment below the offset, and a new branch
    that begins at the offset and has no gap.
    """
    body: r.TailTruncated = record.body
    new = body.new_segments
    entry = state.registrations.get(body.cut_id)
    if {segment.id for segment in new} != set(entry.ids if entry else ()):
        return f"the new segments are not those that cut {body.cut_id} has registered"
    if body.segments and body.segments[0].start_offset != body.offset:
        return f"segment {body.segments[0].id} starts at {body.segments[0].start_offset}, the log is cut at {body.offset}"
    return invalid_segment_problem(new) or offset_gap_problem(new)


def check_truncation_loss_accepted(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires cleaner offsets that do not exceed the offset, or a loss that a person has accepted
    (checked for records from version 5 on).
    """
    body: r.TailTruncated = record.body
    clean = offsets.first_dirty_offset_in(state.vector)
    if record.version < 5 or body.accept_loss or clean <= body.offset:
        return ""
    return f"the partition was compacted up to offset {clean}, and the log is cut at {body.offset}"


def check_partition_not_empty(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a partition with live segments, open imports or an open intent."""
    return "" if state.has_segments or state.registrations or state.intent else "the partition is empty"


def check_lineage_ascends(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a lineage that ascends in epoch and offset."""
    entries = record.body.lineage
    rising = all(a.epoch < b.epoch and a.start_offset <= b.start_offset for a, b in pairwise(entries))
    return "" if entries and rising else "the lineage is empty or does not ascend"


def check_import_is_open(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires an import that is still open."""
    return "" if record.body.import_id in state.registrations else f"import {record.body.import_id} is not open"


def check_sources_stay(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that no segment of the open round is removed."""
    lost = set(mirror.open_round_segment_ids(state)).intersection(record.body.gone)
    return f"run {state.intent.plan.run_id} needs segment {min(lost)}" if lost and state.intent else ""


def check_no_broker_gap(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that the removed segments were live, and that the segments afterwards follow each other without a gap."""
    strange = set(record.body.gone) - {segment.id for segment in state.live}
    if strange:
        return f"segment {min(strange)} is not live"
    after = mirror.live_after_broker_changes(state, record.body)
    ids = [segment.id for segment in after]
    return "a segment is in the view twice" if len(set(ids)) != len(ids) else invalid_segment_problem(after) or offset_gap_problem(after)


# --- a round -----------------------------------------------------------------------------------------------------------------


def check_no_open_intent(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that no intent is open."""
    return f"run {state.intent.plan.run_id} is still open" if state.intent else ""


def check_plan_valid(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a plan of this partition and leader with a new run id, tasks and new ids, whose cleaner offset does not decrease."""
    plan: CompactionPlan = record.body.plan
    if (plan.topic_partition, plan.leader_epoch) != (state.topic_partition, record.body.leader_epoch):
        return "the plan is another partition's or another epoch's"
    if state.find_run(plan.run_id) is not None or not plan.tasks or len(set(plan.source_segment_ids)) != len(plan.source_segment_ids):
        return f"run {plan.run_id} is known already, has no tasks, or names a source twice"
    back = plan.next_dirty_offset < offsets.first_dirty_offset_in(plan.vector) and not plan.restores
    if len({task.group for task in plan.tasks}) != len(plan.tasks) or back:
        return "two tasks are one group, or the cleaner offset goes back"
    return _used_id_problem(state, [task.new_segment_id for task in plan.tasks])


def check_round_is_restorable(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires, if the plan undoes a round, the latest one as a whole, with outputs that no later round has rewritten and sources that wait
    for deletion above the log start.
    """
    plan: CompactionPlan = record.body.plan
    if not plan.restores:
        return ""
    problem = round_restoration_problem(state, plan.restores, plan.leader_epoch)
    if problem:
        return problem
    group = next(group for group in state.waiting if group.run_id == plan.restores and not group.undone)
    live = {segment.id for segment in state.live}
    whole = live.intersection(group.replaced_by.values()) == set(plan.source_segment_ids) and all(
        len(task.sources) == 1 for task in plan.tasks
    )
    return "" if whole else f"the plan takes back a part of run {plan.restores}"


def check_cleaner_offsets_unchanged(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the cleaner offsets from which the plan started."""
    plan = _plan_of_record(state, record)
    return _cleaner_offsets_changed_problem(state, plan) if plan else ""


def check_plan_sources_live(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that all sources and all skipped segments of the plan are live."""
    plan = _plan_of_record(state, record)
    return _plan_sources_problem(state, plan) if plan else ""


def check_tasks_cover_sources(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires tasks that cover exactly their sources (I1), in ascending order."""
    plan = _plan_of_record(state, record)
    if plan is None:
        return ""
    by_id = state.live_segments_by_id()
    for task in plan.tasks:
        problem = task_coverage_problem(task, [by_id[name] for name in task.sources if name in by_id])
        if problem:
            return problem
    return "" if all(a.end_offset < b.start_offset for a, b in pairwise(plan.tasks)) else "the tasks do not ascend"


def check_intent_is_open(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that the run has the open intent."""
    run_id = _run_id_of_record(record)
    return "" if state.intent and state.intent.plan.run_id == run_id else f"run {run_id} is not open: it was undone or published"


def check_receipts_match_tasks(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires at most one receipt per task, for its new id and sources."""
    intent = state.intent
    if intent is None:
        return ""
    tasks = {task.group: task for task in intent.pending_tasks}
    for receipt in record.body.receipts:
        task = tasks.pop(receipt.group, None)
        if task is None or receipt.run_id != intent.plan.run_id:
            return f"group {receipt.group} of run {receipt.run_id} has a receipt already, or is none of the plan"
        problem = task_output_problem(task, receipt.segment)
        if problem:
            return problem
    return ""


def check_single_run(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires receipts of a single run."""
    return "" if len({receipt.run_id for receipt in record.body.receipts}) == 1 else "no receipts, or receipts of several runs"


def check_receipts_complete(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a receipt for each group not wholly below the log start of brokers."""
    pending = [task for task in state.intent.pending_tasks if task.end_offset >= state.broker_log_start] if state.intent else []
    return f"group {pending[0].group} has no receipt" if pending else ""


def check_publication_not_begun(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires a round whose publication has not begun."""
    begun = state.intent is not None and state.intent.begun_slot
    return f"readers are being switched since slot {begun}" if begun else ""


def check_replacements_match_receipts(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires all outputs of the round, as its receipts state them, in ascending order (I5), except groups whose sources brokers deleted
    after publication had begun.
    """
    intent = state.intent
    if intent is None:
        return ""
    cut = {*record.body.cut_off, *record.body.expired}
    if cut and (not intent.begun_slot or cut - {task.group for task in intent.plan.tasks}):
        return "groups are cut off of a publication that has not begun, or that has no such group"
    receipts = {receipt.group: receipt for receipt in intent.receipts}
    left = [task for task in intent.plan.tasks if task.group not in cut]
    if any(task.group not in receipts for task in left):
        return "a group without a receipt is neither cut off nor expired"
    expected = [(task.sources, receipts[task.group].segment) for task in left]
    given = [(new.sources, new.segment) for new in record.body.replacements]
    return "" if given == expected else "the replacements are not what the receipts say"


def check_replacements_cover_sources(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that each replacement covers exactly its sources (I1)."""
    by_id = state.live_segments_by_id()
    for new in record.body.replacements:
        problem = coverage_problem([by_id[name] for name in new.sources if name in by_id], new.segment)
        if problem:
            return problem
    return ""


def check_published_cleaner_offsets(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the cleaner offsets before the round and after it: the plan's end under the leader's epoch (unchanged if brokers deleted
    sources of a group, lowered if the round restores segments).
    """
    body: r.RoundPublished = record.body
    intent = state.intent
    if intent is None:
        return ""
    after = cleaner_offsets_after_round(state, intent.plan, body.leader_epoch, has_withdrawn_groups=bool(body.cut_off))
    if body.vector_before != state.vector or body.vector != after:
        return "the new cleaner offsets are not the end of this round"
    return ""


# --- retire and undo ---------------------------------------------------------------------------------------------------------


def check_whole_groups(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires whole groups of segments that wait for grace."""
    ids = set(record.body.ids)
    for group in _waiting_groups_within(state, ids):
        ids -= {segment.id for segment in group.segments}
    if ids or not record.body.ids:
        return f"segment {min(ids, default='')} does not wait for grace, or only a part of its group"
    return ""


def check_deletion_permitted(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires that the cleaner offsets still reach as far as the round that replaced the segments had advanced them."""
    for group in _waiting_groups_within(state, set(record.body.ids)):
        if not group.undone and not offsets.has_epoch_cleaned_below(
            state.vector, group.leader_epoch, offsets.first_dirty_offset_in(group.vector)
        ):
            return f"the current cleaner offsets do not grant what run {group.run_id} published"
    return ""


def check_segment_deletion_begun(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires segments whose deletion has begun."""
    strange = set(record.body.ids) - {segment.id for segment in state.retiring}
    return f"retiring {min(strange)} was not begun" if strange else ""


def check_round_is_undoable(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Requires the latest round, whose outputs no later round has rewritten, a higher epoch, and that all its sources wait for deletion and
    do not lie below the log start.
    """
    return round_restoration_problem(state, record.body.run_id, record.body.leader_epoch)


def round_restoration_problem(state: PartitionState, run_id: str, leader_epoch: CompactorEpoch) -> str:
    """Return why a compactor with this epoch cannot restore the segments that the run replaced."""
    if not state.published or state.published[-1] != run_id:
        return f"run {run_id} is not the latest round that readers have"
    if (run := state.find_run(run_id)) is not None and run.status == RunHistoryStatus.REPAIRED:
        return "it replaced damaged segments"
    group = next((group for group in state.waiting if group.run_id == run_id and not group.undone), None)
    if group is None:
        return f"retiring what run {run_id} replaced has begun"
    if leader_epoch <= group.leader_epoch:
        return f"epoch {leader_epoch} is not above the epoch that published run {run_id}"
    return log_start.restored_segment_problem(state, group) or log_start.round_outputs_problem(state, group)


# --- the table ---------------------------------------------------------------------------------------------------------------

REQUIREMENTS: dict[type, tuple[RuleCheck, ...]] = {
    r.LeadershipAcquired: (check_epoch_follows,),
    r.LeadershipReleased: (check_writer_leads,),
    r.SegmentIdsRegistered: (incarnations.check_incarnation_opened, check_import_ids_unused),
    r.SegmentsTiered: (
        check_segment_ids_registered,
        incarnations.check_topic_id_unchanged,
        check_segments_continue_log,
        check_lineage_agrees,
        log_start.check_initial_log_start,
    ),
    r.SegmentsPrepended: (
        check_segment_ids_registered,
        incarnations.check_topic_id_unchanged,
        check_import_complete,
        check_segments_precede_log,
        check_partition_never_compacted,
        log_start.check_log_start_unraised,
    ),
    r.TailTruncated: (
        incarnations.check_topic_id_unchanged,
        check_truncation_discards_end,
        check_truncation_segments,
        check_truncation_loss_accepted,
        log_start.check_truncation_above_start,
    ),
    r.TopicAdopted: (incarnations.check_topic_id_adoptable,),
    r.IncarnationOpened: (incarnations.check_incarnation_unused,),
    r.PartitionDeleted: (check_writer_leads, check_partition_not_empty, incarnations.check_deleted_topic),
    r.LogStartRaised: (
        check_writer_leads,
        check_no_open_intent,
        log_start.check_log_start_rises,
        log_start.check_removed_below_start,
        log_start.check_removed_digests,
    ),
    r.LineageRecorded: (check_lineage_ascends,),
    r.SegmentsMirrored: (check_writer_leads, check_sources_stay, check_no_broker_gap),
    r.BrokerLogStartSeen: (check_writer_leads, log_start.check_broker_start_rises),
    r.ImportVoided: (check_writer_leads, check_import_is_open),
    r.PlanAnnounced: (
        check_writer_leads,
        check_no_open_intent,
        check_plan_valid,
        check_round_is_restorable,
        check_cleaner_offsets_unchanged,
        check_plan_sources_live,
        check_tasks_cover_sources,
    ),
    r.ReceiptsAdded: (check_writer_leads, check_single_run, check_intent_is_open, check_receipts_match_tasks),
    r.SurvivorsStored: (check_writer_leads, check_intent_is_open),
    r.IntentUndone: (check_writer_leads, check_intent_is_open, check_publication_not_begun),
    r.PublicationBegun: (
        check_writer_leads,
        check_intent_is_open,
        check_publication_not_begun,
        check_cleaner_offsets_unchanged,
        check_plan_sources_live,
        check_receipts_complete,
    ),
    r.RoundPublished: (
        check_writer_leads,
        check_intent_is_open,
        check_cleaner_offsets_unchanged,
        check_plan_sources_live,
        check_receipts_complete,
        check_replacements_match_receipts,
        log_start.check_expired_groups,
        check_replacements_cover_sources,
        check_published_cleaner_offsets,
    ),
    r.SegmentDeletionBegun: (check_writer_leads, check_whole_groups, check_deletion_permitted),
    r.SegmentDeletionEnded: (check_writer_leads, check_segment_deletion_begun),
    r.RoundUndone: (check_writer_leads, check_no_open_intent, check_round_is_undoable),
    r.RunEnded: (check_writer_leads,),
}
"""Conditions under which a record counts, by its type. The docstring of each function states its condition."""


def find_rule_violation(state: PartitionState, record: ControlRecord[Any]) -> str:
    """Return why a record has no effect in this state."""
    return next(filter(None, (requirement(state, record) for requirement in REQUIREMENTS[type(record.body)])), "")


def cleaner_offsets_after_round(
    state: PartitionState, plan: CompactionPlan, leader_epoch: CompactorEpoch, *, has_withdrawn_groups: bool = False
) -> offsets.CleanerOffsetVector:
    """Return the cleaner offsets after a plan's round under this epoch."""
    if plan.restores:
        return offsets.cap_cleaner_offsets(state.vector, plan.next_dirty_offset)
    # Data of withdrawn groups was not cleaned, so the cleaner offset does not advance.
    return offsets.advance_cleaner_vector(
        state.vector, leader_epoch, offsets.first_dirty_offset_in(state.vector) if has_withdrawn_groups else plan.next_dirty_offset
    )


def round_resumption_problem(state: PartitionState, intent: RoundIntent) -> str:
    """Return why an open intent can no longer be published. No rule applies once its publication has begun."""
    if intent.begun_slot:
        return ""
    return _plan_sources_problem(state, intent.plan) or _cleaner_offsets_changed_problem(state, intent.plan)


def protected_segment_ids(state: PartitionState) -> set[str]:
    """Return the segment ids whose objects must not be deleted: live, waiting for deletion, registered, or announced by the open intent.

    An object that was uploaded before this state was read and is not protected can never be needed again: ids are registered or announced
    before the first upload, and an id that was removed from this set never returns.
    """
    ids = {segment.id for segment in state.live}
    ids.update(segment.id for group in state.waiting for segment in group.segments)
    ids.update(name for entry in state.registrations.values() for name in entry.ids)
    if state.intent:
        ids.update(task.new_segment_id for task in state.intent.plan.tasks)
    return ids


def possible_segment_ids(state: PartitionState) -> set[str]:
    """Return the protected ids and those whose deletion has begun: the ids of segments whose objects may exist."""
    return protected_segment_ids(state).union(segment.id for segment in state.retiring)


def require_segments_deletable(state: PartitionState, incarnation: str, epoch: CompactorEpoch, ids: Iterable[str]) -> None:
    """Raise Fenced if this process does not lead, and CompactorError (a bug) if one of the ids is protected."""
    require_leadership(state, incarnation, epoch)
    wrong = protected_segment_ids(state).intersection(ids)
    if wrong:
        raise CompactorError(f"segment {min(wrong)} of {state.topic_partition} must not be deleted", hint="This is a bug; please report it")


def _plan_of_record(state: PartitionState, record: ControlRecord[Any]) -> CompactionPlan | None:
    """Return the plan that a record announces, or that of the open intent for any other record."""
    if isinstance(record.body, r.PlanAnnounced):
        return record.body.plan
    return state.intent.plan if state.intent else None


def _cleaner_offsets_changed_problem(state: PartitionState, plan: CompactionPlan) -> str:
    return "" if plan.vector == state.vector else "the cleaner offsets are not those that the plan started from"


def _plan_sources_problem(state: PartitionState, plan: CompactionPlan) -> str:
    live = {segment.id for segment in state.live}
    names = (*plan.source_segment_ids, *(skipped.id for skipped in plan.skipped))
    gone = next((name for name in names if name not in live), "")
    return f"segment {gone} is not live any more" if gone else ""


def _run_id_of_record(record: ControlRecord[Any]) -> str:
    body = record.body
    run_id: str = body.receipts[0].run_id if isinstance(body, r.ReceiptsAdded) else body.run_id
    return run_id


def _waiting_groups_within(state: PartitionState, ids: set[str]) -> list[GroupAwaitingDeletion]:
    return [group for group in state.waiting if ids.issuperset(segment.id for segment in group.segments)]


def _used_id_problem(state: PartitionState, ids: Sequence[str]) -> str:
    """Return which id is used already. Ids are never reused."""
    used = protected_segment_ids(state).union(segment.id for segment in state.retiring)
    old = next((name for name in ids if name in used), "")
    if old or len(set(ids)) != len(ids):
        return f"segment id {old or ids[0]} is in use already"
    return ""
