"""Effects of records on the folded state: one function per record type, which returns the changed fields.

Whether a record counts is decided by ``find_violation``, the rules of compactor/control/ordering.py, which are passed in because imports
point down. A refused record changes nothing but the list of fenced appends: the sources of a void publication, for example, stay live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from checkpoint import lineage, offsets
from compactor.constants import NO_COMPACTOR_EPOCH
from compactor.control import incarnations, mirror, records as r
from compactor.control.records import ControlRecord
from compactor.control.state import (
    HISTORY,
    CatalogState,
    ClosedImport,
    CompactorEpochAndEnding,
    CompactorLeader,
    FencedAppend,
    GroupAwaitingDeletion,
    OpenImport,
    PartitionState,
    Quarantine,
    RequestedRound,
    RoundIntent,
    RoundPause,
    RunHistoryEntry,
)
from compactor.model.ids import RunHistoryStatus
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata

TAIL = 16
"""Number of last imported batches that a state remembers."""

VOIDED = 1000
"""Number of last void ids that a state remembers."""

RuleCheck = Callable[[PartitionState, ControlRecord[Any]], str]
StateDelta = dict[str, Any]
EntryWithTime = TypeVar("EntryWithTime", CompactorLeader, GroupAwaitingDeletion, OpenImport)


def apply_partition_record(state: PartitionState, record: ControlRecord[Any], find_violation: RuleCheck) -> PartitionState:
    reason = find_violation(state, record)
    changes = _changes_by_refusal(state, record, reason) if reason else EFFECTS[type(record.body)](state, record, record.body)
    changes["slot"] = record.slot
    return state.model_copy(update=changes)


def apply_catalog_record(state: CatalogState, record: ControlRecord[Any]) -> CatalogState:
    """Only the first record that creates a tier identity takes effect."""
    return state.model_copy(update={"slot": record.slot, **_catalog_changes_by_record(state, record, record.body)})


def _catalog_changes_by_record(state: CatalogState, record: ControlRecord[Any], body: Any) -> StateDelta:
    if isinstance(body, r.PartitionChanged):
        return _changes_by_hints(state, record, {str(body.topic_partition): body.slot})
    if isinstance(body, r.PartitionsChanged):
        return _changes_by_hints(state, record, body.slots)
    if isinstance(body, r.SlotsReached):
        return {"reached": _merge_slots_by_maximum(state.reached, body.slots)}
    if isinstance(body, r.PartitionsInspected):
        # A look that was overtaken says nothing of what came after it.
        return {
            "looks": state.looks
            | {name: inspection for name, inspection in body.looks.items() if inspection.slot >= state.reached.get(name, 0)}
        }
    if isinstance(body, r.RoundsPaused):
        return {"paused": state.paused | {body.pattern: RoundPause(by=body.by, reason=body.reason, at_ms=record.at_ms)}}
    if isinstance(body, r.RoundsResumed):
        return {"paused": {pattern: pause for pattern, pause in state.paused.items() if pattern != body.pattern}}
    if isinstance(body, r.RoundRequested):
        name = str(body.topic_partition)
        others = [(other, wanted) for other, wanted in state.wanted.items() if other != name]
        return {"wanted": dict([*others, (name, RequestedRound(record.slot, record.at_ms))][-HISTORY:])}
    if isinstance(body, (r.TopicsConfirmed, r.TopicRecreated, r.TopicsInspected)):
        return incarnations.changes_by_topic_record(state, body)
    return {} if state.tier_id else body.model_dump(exclude={"type", "created_by"})


def _changes_by_hints(state: CatalogState, record: ControlRecord[Any], slots: Mapping[str, int]) -> StateDelta:
    """A hint without a slot discards the result of the partition's last retirement check."""
    changes: StateDelta = {
        "partitions": state.partitions | dict.fromkeys(slots, record.slot),
        "reached": _merge_slots_by_maximum(state.reached, slots),
    }
    unsaid = {name for name, slot in slots.items() if not slot} & state.looks.keys()
    return changes | {"looks": {name: inspection for name, inspection in state.looks.items() if name not in unsaid}} if unsaid else changes


def _merge_slots_by_maximum(slots: dict[str, int], newer_slots: Mapping[str, int]) -> dict[str, int]:
    return slots | {name: slot for name, slot in newer_slots.items() if slot > slots.get(name, 0)}


def with_store_times(state: PartitionState, slot_time_ms: Callable[[int], int]) -> PartitionState:
    """Return the state with the store's times of the records from which grace, leases and the age of imports are measured. Called before
    those records are deleted.
    """

    def with_store_time(entry: EntryWithTime) -> EntryWithTime:
        return entry if entry.since_ms is not None else entry.model_copy(update={"since_ms": slot_time_ms(entry.slot)})

    return state.model_copy(
        update={
            "leader": state.leader if state.leader is None or state.leader.released else with_store_time(state.leader),
            "waiting": tuple(with_store_time(group) for group in state.waiting),
            "registrations": {name: with_store_time(entry) for name, entry in state.registrations.items()},
        }
    )


def _changes_by_refusal(state: PartitionState, record: ControlRecord[Any], reason: str) -> StateDelta:
    body = record.body
    entry = FencedAppend(
        slot=record.slot,
        type=body.type,
        leader_epoch=getattr(body, "leader_epoch", NO_COMPACTOR_EPOCH),
        offset=offsets.first_dirty_offset_in(body.vector) if isinstance(body, r.RoundPublished) else -1,
        by=getattr(body, "holder", "") or _writer_name(state, record),
        reason=reason,
        at_ms=record.at_ms,
    )
    return {"fenced": (*state.fenced, entry)[-HISTORY:]}


def _writer_name(state: PartitionState, record: ControlRecord[Any]) -> str:
    known = (epoch.holder for epoch in reversed(state.epochs) if epoch.incarnation == record.incarnation)
    return next(known, record.incarnation)


def _apply_leadership_acquired(state: PartitionState, record: ControlRecord[Any], body: r.LeadershipAcquired) -> StateDelta:
    leader = CompactorLeader(
        epoch=body.leader_epoch,
        incarnation=record.incarnation,
        holder=body.holder,
        slot=record.slot,
        at_ms=record.at_ms,
        ttl_ms=body.ttl_ms,
    )
    entry = CompactorEpochAndEnding(
        epoch=leader.epoch,
        holder=leader.holder,
        incarnation=leader.incarnation,
        slot=leader.slot,
        at_ms=leader.at_ms,
        delivery_timeout_ms=body.delivery_timeout_ms,
    )
    return {"leader": leader, "epochs": (*_epochs_with_ending(state, record, "replaced"), entry)[-HISTORY:]}


def _apply_leadership_released(state: PartitionState, record: ControlRecord[Any], body: r.LeadershipReleased) -> StateDelta:
    leader = state.leader.model_copy(update={"released": True}) if state.leader else None
    return {"leader": leader, "epochs": _epochs_with_ending(state, record, "released")}


def _epochs_with_ending(state: PartitionState, record: ControlRecord[Any], ending: str) -> tuple[CompactorEpochAndEnding, ...]:
    if not state.epochs or state.epochs[-1].ended:
        return state.epochs
    return (*state.epochs[:-1], state.epochs[-1].model_copy(update={"ended": ending, "ended_ms": record.at_ms}))


def _apply_segment_ids_registered(state: PartitionState, record: ControlRecord[Any], body: r.SegmentIdsRegistered) -> StateDelta:
    entry = OpenImport(import_id=body.import_id, ids=body.ids, holder=body.holder, slot=record.slot)
    return {"registrations": state.registrations | {body.import_id: entry}}


def _apply_segments_tiered(state: PartitionState, record: ControlRecord[Any], body: r.SegmentsTiered) -> StateDelta:
    entry = state.registrations[body.import_id]
    tiered = {segment.id for segment in body.segments}
    end = body.segments[-1].end_offset
    entry = entry.model_copy(update={"ids": tuple(name for name in entry.ids if name not in tiered), "tiered_end": end})
    changes = _changes_by_updated_import(state, record, entry) | {"live": state.live + body.segments}
    reported = lineage.extend_lineage(state.lineage, lineage.merge_segment_lineages([segment.leader_epochs for segment in body.segments]))
    newer = lineage.restore_truncated_front(state.lineage, body.lineage) if body.lineage else reported
    changes |= {"tail": (*state.tail, *body.tail)[-TAIL:] if body.tail else (), "deleted_slot": 0}
    changes |= {"topic_id": state.topic_id or body.topic_id, "adopted_seam": -1}
    changes |= {"source_cleaned_to": max(state.source_cleaned_to, body.source_cleaned_to)}
    changes |= {} if state.has_segments or state.topic_id else {"opened_slot": record.slot}
    if body.log_start_offset is not None:
        changes |= {"log_start_offset": body.log_start_offset, "log_start_slot": record.slot}
    return changes | _changes_by_broker_lineage(state, newer, end + 1)


def _apply_segments_prepended(state: PartitionState, record: ControlRecord[Any], body: r.SegmentsPrepended) -> StateDelta:
    entry = state.registrations[body.import_id]
    entry = entry.model_copy(update={"ids": (), "tiered_end": body.segments[-1].end_offset})
    older = body.lineage or lineage.merge_segment_lineages([segment.leader_epochs for segment in body.segments])
    return _changes_by_updated_import(state, record, entry) | {
        "live": body.segments + state.live,
        "lineage": lineage.restore_truncated_front(older, state.lineage),
    }


def _apply_tail_truncated(state: PartitionState, record: ControlRecord[Any], body: r.TailTruncated) -> StateDelta:
    gone = set(body.voided)
    kept = tuple(segment for segment in state.live if segment.id not in gone)
    changes = _changes_by_capped_offsets(state, body.offset)
    group = GroupAwaitingDeletion(
        slot=record.slot,
        run_id=body.cut_id,
        leader_epoch=state.last_compactor_epoch,
        undone=True,
        segments=tuple(segment for segment in state.live if segment.id in gone),
        vector_before=changes["vector"],
        vector=changes["vector"],
        why=f"the broker's log was truncated at offset {body.offset}",
        grace_ms=body.grace_ms,
    )
    live = kept + body.new_segments
    known = lineage.truncate_lineage_at(state.lineage, body.offset)
    reported = lineage.merge_segment_lineages([segment.leader_epochs for segment in body.segments])
    if body.epoch is not None:
        reported = (lineage.EpochEntry(body.epoch, body.offset),)
    tail = tuple(batch for batch in state.tail if batch.last_offset < body.offset)
    if body.new_segments:
        entry = state.registrations[body.cut_id]
        changes |= _changes_by_updated_import(state, record, entry.model_copy(update={"ids": (), "tiered_end": live[-1].end_offset}))
    # Open imports were checked against the discarded branch.
    if record.version >= 5:  # what an earlier version has let in stays in
        changes |= _changes_by_voided_imports(state.model_copy(update=changes), record, group.why)
    return changes | {
        "live": live,
        "waiting": (*changes["waiting"], group),
        "lineage": lineage.restore_truncated_front(known, body.lineage) if body.lineage else lineage.extend_lineage(known, reported),
        "lineage_end": live[-1].end_offset + 1 if live else body.offset,
        "tail": (*tail, *body.tail)[-TAIL:],
        "source_cleaned_to": min(state.source_cleaned_to, body.offset),
        "adopted_seam": -1,
        "quarantine": None,
    }


def _changes_by_voided_imports(state: PartitionState, record: ControlRecord[Any], reason: str) -> StateDelta:
    """Close all open imports; the ids that they have registered become unusable for ever."""
    entries = state.registrations.values()
    closed = (ClosedImport(import_id=entry.import_id, slot=record.slot, tiered_end=entry.tiered_end, voided=reason) for entry in entries)
    changes: StateDelta = {"registrations": {}, "closed_imports": (*state.closed_imports, *closed)[-HISTORY:]}
    return changes | _changes_by_voided_ids(state, (name for entry in entries for name in entry.ids))


def _apply_topic_id_adopted(state: PartitionState, record: ControlRecord[Any], body: r.TopicAdopted) -> StateDelta:
    changes: StateDelta = {"topic_id": body.topic_id or state.topic_id, "adopted_seam": body.seam}
    # The recorded leader epochs and last batches are those of the other topic.
    other = body.topic_id and body.previous_id and body.topic_id != body.previous_id
    return changes | {"lineage": (), "lineage_end": -1, "tail": ()} if other else changes


def _apply_partition_deleted(state: PartitionState, record: ControlRecord[Any], body: r.PartitionDeleted) -> StateDelta:
    why = "the partition was deleted"
    group = GroupAwaitingDeletion(
        slot=record.slot,
        run_id="",
        leader_epoch=body.leader_epoch,
        undone=True,
        segments=state.live,
        vector_before=(),
        vector=(),
        why=why,
        grace_ms=body.grace_ms,
    )
    earlier = tuple(other.model_copy(update={"undone": True, "replaced_by": {}, "why": other.why or why}) for other in state.waiting)
    known = tuple(closed.model_copy(update={"voided": closed.voided or why}) for closed in state.closed_imports)
    open_run = state.intent.plan.run_id if state.intent else ""
    return {
        "live": (),
        "vector": (),
        "intent": None,
        "waiting": (*earlier, group) if state.has_segments else earlier,
        "lineage": (),
        "lineage_end": -1,
        "tail": (),
        "topic_id": body.deleted_topic_id,
        "adopted_seam": -1,
        "source_cleaned_to": 0,
        "opened_slot": 0,
        "log_start_offset": None,
        "log_start_slot": 0,
        "quarantine": None,
        "published": (),
        "runs": _change_run(state, open_run, status=RunHistoryStatus.UNDONE, reason=why, ended_ms=record.at_ms) if open_run else state.runs,
        "deleted_slot": record.slot,
    } | _changes_by_voided_imports(
        state.model_copy(update={"closed_imports": known, "voided": (*state.voided, *_announced_segment_ids(state))}), record, why
    )


def _apply_log_start_raised(state: PartitionState, record: ControlRecord[Any], body: r.LogStartRaised) -> StateDelta:
    gone = set(body.ids)
    changes: StateDelta = {"log_start_offset": body.offset, "log_start_slot": record.slot}
    if not gone:
        return changes
    group = GroupAwaitingDeletion(
        slot=record.slot,
        run_id="",
        leader_epoch=body.leader_epoch,
        undone=True,
        segments=tuple(segment for segment in state.live if segment.id in gone),
        vector_before=(),
        vector=(),
        why=f"records below offset {body.offset} were deleted",
        grace_ms=body.grace_ms,
    )
    return changes | {"live": tuple(segment for segment in state.live if segment.id not in gone), "waiting": (*state.waiting, group)}


def _changes_by_updated_import(
    state: PartitionState, record: ControlRecord[Any], registration: OpenImport, void_reason: str = ""
) -> StateDelta:
    """An import stays open until each of its ids is tiered or void (``void_reason``)."""
    if registration.ids and not void_reason:
        return {"registrations": state.registrations | {registration.import_id: registration}}
    closed = ClosedImport(import_id=registration.import_id, slot=record.slot, tiered_end=registration.tiered_end, voided=void_reason)
    others = {name: other for name, other in state.registrations.items() if name != registration.import_id}
    return {"registrations": others, "closed_imports": (*state.closed_imports, closed)[-HISTORY:]}


def _apply_import_voided(state: PartitionState, record: ControlRecord[Any], body: r.ImportVoided) -> StateDelta:
    entry = state.registrations[body.import_id]
    return _changes_by_updated_import(state, record, entry, void_reason=body.reason or "void") | _changes_by_voided_ids(state, entry.ids)


def _changes_by_voided_ids(state: PartitionState, ids: Iterable[str]) -> StateDelta:
    return {"voided": (*state.voided, *ids)[-VOIDED:]}


def _announced_segment_ids(state: PartitionState) -> Iterator[str]:
    return (task.new_segment_id for task in state.intent.plan.tasks) if state.intent else iter(())


def _changes_by_broker_lineage(state: PartitionState, newer: tuple[EpochEntry, ...], end_offset: int) -> StateDelta:
    # Data from a divergence on was not cleaned, so cleaner offsets above it are lowered to it.
    parted = lineage.first_divergent_offset(state.lineage, state.end_offset + 1, newer, end_offset)
    moved: StateDelta = {"lineage": newer, "lineage_end": end_offset}
    return (
        moved
        if parted is None or parted >= offsets.first_dirty_offset_in(state.vector)
        else moved | _changes_by_capped_offsets(state, parted)
    )


def _changes_by_capped_offsets(state: PartitionState, divergence_offset: int) -> StateDelta:
    """Lower all cleaner offsets above ``divergence_offset`` to it, also those stored for undo and for deletions."""

    def with_lowered_cleaner_offset(group: GroupAwaitingDeletion) -> GroupAwaitingDeletion:
        both = {name: offsets.cap_cleaner_offsets(getattr(group, name), divergence_offset) for name in ("vector_before", "vector")}
        return group.model_copy(update=both)

    return {
        "vector": offsets.cap_cleaner_offsets(state.vector, divergence_offset),
        "waiting": tuple(with_lowered_cleaner_offset(group) for group in state.waiting),
    }


def _apply_plan_announced(state: PartitionState, record: ControlRecord[Any], body: r.PlanAnnounced) -> StateDelta:
    plan = body.plan
    run = RunHistoryEntry(
        run_id=plan.run_id,
        leader_epoch=body.leader_epoch,
        holder=state.leader.holder if state.leader else "",
        slot=record.slot,
        started_ms=record.at_ms,
        first_dirty_offset=plan.first_dirty_offset,
        vector_before=plan.vector,
        sources=len(plan.source_segment_ids),
        outputs=len(plan.tasks),
    )
    return {"intent": RoundIntent(plan=plan, slot=record.slot, at_ms=record.at_ms), "runs": (*state.runs, run)[-HISTORY:]}


def _apply_receipts_added(state: PartitionState, record: ControlRecord[Any], body: r.ReceiptsAdded) -> StateDelta:
    intent = _require_open_intent(state)
    return {"intent": intent.model_copy(update={"receipts": intent.receipts + body.receipts})}


def _require_open_intent(state: PartitionState) -> RoundIntent:
    if state.intent is None:
        raise AssertionError("the rules let a record pass that needs an open intent")
    return state.intent


def _apply_intent_undone(state: PartitionState, record: ControlRecord[Any], body: r.IntentUndone) -> StateDelta:
    runs = _change_run(state, body.run_id, status=RunHistoryStatus.UNDONE, reason=body.reason, ended_ms=record.at_ms)
    return {"intent": None, "runs": runs} | _changes_by_voided_ids(state, _announced_segment_ids(state))


def _apply_round_published(state: PartitionState, record: ControlRecord[Any], body: r.RoundPublished) -> StateDelta:
    by_id = state.live_segments_by_id()
    replaced_by = {source: new.segment.id for new in body.replacements for source in new.sources}
    outputs = {new.sources[0]: new.segment for new in body.replacements}
    live: list[RemoteLogSegmentMetadata] = []
    for segment in state.live:
        if segment.id in outputs:
            live.append(outputs[segment.id])
        elif segment.id not in replaced_by:
            live.append(segment)
    published_by = state.published_by | {new.segment.id: body.leader_epoch for new in body.replacements}
    named = {*published_by.values(), *(group.leader_epoch for group in state.waiting)}
    vector = offsets.drop_unreferenced_epochs(body.vector, named)
    group = GroupAwaitingDeletion(
        slot=record.slot,
        run_id=body.run_id,
        leader_epoch=body.leader_epoch,
        segments=tuple(by_id[source] for source in replaced_by),
        replaced_by=replaced_by,
        vector_before=state.vector,
        vector=vector,
        grace_ms=body.grace_ms,
        undo_window_ms=body.undo_window_ms,
    )
    runs = _change_run(
        state,
        body.run_id,
        status=body.status or RunHistoryStatus.PUBLISHED,
        stats=body.stats,
        leader_epoch=body.leader_epoch,
        ended_ms=record.at_ms,
        published_slot=record.slot,
        next_dirty_offset=offsets.first_dirty_offset_in(vector),
        vector=vector,
        balance=body.balance,
        content=body.content,
        cut_off_offset=_require_open_intent(state).plan.next_dirty_offset if body.cut_off else -1,
    )
    changes = {
        "live": tuple(live),
        "published_by": published_by,
        "vector": vector,
        "intent": None,
        "waiting": (*state.waiting, group) if group.segments else state.waiting,
        "published": (*state.published, body.run_id)[-HISTORY:],
        "quarantine": None,
        "runs": runs,
    }
    restores = _require_open_intent(state).plan.restores
    if not restores:
        return changes
    return changes | _changes_by_restored_round(
        state.model_copy(update={"runs": runs}), restores, group, unrestored_groups=len(body.cut_off)
    )


def _changes_by_restored_round(state: PartitionState, run_id: str, outputs: GroupAwaitingDeletion, *, unrestored_groups: int) -> StateDelta:
    """The sources of ``run_id`` are restored as copies; the original sources are deleted at the end of their grace.

    :param outputs: the run's outputs that readers no longer use.
    """
    why = f"run {run_id} was taken back"
    reason = (
        f"{unrestored_groups} of {unrestored_groups + len(outputs.segments)} groups stay: brokers had deleted segments of them"
        if unrestored_groups
        else ""
    )
    left = outputs.model_copy(update={"run_id": run_id, "undone": True, "replaced_by": {}, "undo_window_ms": None, "why": why})
    earlier = (
        group.model_copy(update={"undone": True, "replaced_by": {}, "why": why}) if group.run_id == run_id and not group.undone else group
        for group in state.waiting
    )
    return {
        "waiting": (*earlier, left),
        "published": tuple(other for other in state.published if other != run_id),
        "runs": _change_run(
            state, run_id, status=RunHistoryStatus.REVERTED_IN_PART if unrestored_groups else RunHistoryStatus.REVERTED, reason=reason
        ),
    }


def _apply_segment_deletion_begun(state: PartitionState, record: ControlRecord[Any], body: r.SegmentDeletionBegun) -> StateDelta:
    ids = set(body.ids)
    gone = [segment for group in state.waiting for segment in group.segments if segment.id in ids]
    return {
        "waiting": tuple(group for group in state.waiting if not ids.issuperset(segment.id for segment in group.segments)),
        "retiring": (*state.retiring, *gone),
        "published_by": {name: epoch for name, epoch in state.published_by.items() if name not in ids},
    }


def _apply_segment_deletion_ended(state: PartitionState, record: ControlRecord[Any], body: r.SegmentDeletionEnded) -> StateDelta:
    ids = set(body.ids)
    return {"retiring": tuple(segment for segment in state.retiring if segment.id not in ids)} | _changes_by_voided_ids(state, body.ids)


def _apply_round_undone(state: PartitionState, record: ControlRecord[Any], body: r.RoundUndone) -> StateDelta:
    group = next(group for group in state.waiting if group.run_id == body.run_id and not group.undone)
    outputs = set(group.replaced_by.values())
    left = tuple(segment for segment in state.live if segment.id in outputs)
    live = sorted((*(s for s in state.live if s.id not in outputs), *group.segments), key=lambda segment: segment.start_offset)
    waits = GroupAwaitingDeletion(
        slot=record.slot,
        run_id=body.run_id,
        leader_epoch=body.leader_epoch,
        undone=True,
        segments=left,
        vector_before=group.vector_before,
        vector=group.vector,
        grace_ms=body.grace_ms,
    )
    others = tuple(other for other in state.waiting if other is not group)
    return {
        "live": tuple(live),
        "waiting": (*others, waits),
        "vector": group.vector_before,
        "published": tuple(run_id for run_id in state.published if run_id != body.run_id),
        "runs": _change_run(state, body.run_id, status=RunHistoryStatus.REVERTED),
    }


def _apply_run_ended(state: PartitionState, record: ControlRecord[Any], body: r.RunEnded) -> StateDelta:
    reported = {"status": body.status, "reason": body.reason, "segment": body.segment, "stats": body.stats}
    runs = _change_run(state, body.run_id, **reported)
    if state.find_run(body.run_id) is None:  # it failed before there was a plan
        holder = state.leader.holder if state.leader else ""
        run = RunHistoryEntry(run_id=body.run_id, leader_epoch=body.leader_epoch, holder=holder, slot=record.slot, started_ms=record.at_ms)
        runs = (*runs, run.model_copy(update=reported | {"ended_ms": record.at_ms}))[-HISTORY:]
    if body.status != RunHistoryStatus.QUARANTINED:
        return {"runs": runs}
    failures = state.quarantine.failures + 1 if state.quarantine else 1
    why = Quarantine(
        reason=body.reason, segment=body.segment, failures=failures, slot=record.slot, at_ms=record.at_ms, keyless=body.keyless
    )
    return {"runs": runs, "quarantine": why}


def _change_run(state: PartitionState, run_id: str, **changes: Any) -> tuple[RunHistoryEntry, ...]:
    return tuple(run.model_copy(update=changes) if run.run_id == run_id else run for run in state.runs)


EFFECTS: dict[type, Callable[[PartitionState, ControlRecord[Any], Any], StateDelta]] = {
    r.LeadershipAcquired: _apply_leadership_acquired,
    r.LeadershipReleased: _apply_leadership_released,
    r.SegmentIdsRegistered: _apply_segment_ids_registered,
    r.SegmentsTiered: _apply_segments_tiered,
    r.SegmentsPrepended: _apply_segments_prepended,
    r.TailTruncated: _apply_tail_truncated,
    r.TopicAdopted: _apply_topic_id_adopted,
    r.IncarnationOpened: lambda state, record, body: {"topic_id": body.topic_id, "deleted_slot": 0},
    r.PartitionDeleted: _apply_partition_deleted,
    r.LogStartRaised: _apply_log_start_raised,
    r.LineageRecorded: lambda state, record, body: _changes_by_broker_lineage(state, body.lineage, body.end_offset),
    r.SegmentsMirrored: lambda state, record, body: mirror.changes_by_broker_record(state, body),
    r.BrokerLogStartSeen: lambda state, record, body: {"broker_log_start": body.offset},
    r.ImportVoided: _apply_import_voided,
    r.PlanAnnounced: _apply_plan_announced,
    r.ReceiptsAdded: _apply_receipts_added,
    r.SurvivorsStored: lambda state, record, body: {"intent": _require_open_intent(state).model_copy(update={"survivors": body.objects})},
    r.IntentUndone: _apply_intent_undone,
    r.PublicationBegun: lambda state, record, body: {"intent": _require_open_intent(state).model_copy(update={"begun_slot": record.slot})},
    r.RoundPublished: _apply_round_published,
    r.SegmentDeletionBegun: _apply_segment_deletion_begun,
    r.SegmentDeletionEnded: _apply_segment_deletion_ended,
    r.RoundUndone: _apply_round_undone,
    r.RunEnded: _apply_run_ended,
}
"""One effect per record type. tests/unit/test_control_ordering.py checks that none is missing."""
