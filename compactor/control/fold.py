"""What each record does to a partition's state, given that it counts. Whether it counts is asked of ``refusal``.

``refusal`` is the rules of compactor/control/ordering.py, handed in because imports point down. A record that is refused
leaves everything as it was but for an entry in ``fenced``: the sources of a void publication simply stay live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from checkpoint import lineage, offsets
from compactor.control import mirror
from compactor.control import records as r
from compactor.control.records import Record
from compactor.control.state import (
    HISTORY,
    CatalogState,
    ClosedImport,
    EpochHistory,
    FencedAppend,
    Intent,
    Leader,
    PartitionState,
    Pause,
    Quarantine,
    Registration,
    Run,
    Waiting,
    WantedRound,
)
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata

TAIL = 16
"""How many of the last batches a state remembers."""

VOIDED = 1000
"""How many of the last void ids a state remembers."""

Refusal = Callable[[PartitionState, Record[Any]], str]
Changes = dict[str, Any]


def fold_partition(state: PartitionState, record: Record[Any], refusal: Refusal) -> PartitionState:
    """The state after one more slot. ``refusal`` says why the record does not count, or nothing."""
    reason = refusal(state, record)
    changes = _fenced(state, record, reason) if reason else EFFECTS[type(record.body)](state, record, record.body)
    changes["slot"] = record.slot
    return state.model_copy(update=changes)


def fold_catalog(state: CatalogState, record: Record[Any]) -> CatalogState:
    """The state after one more slot of the tier-wide log. The first identity counts; later ones are another creator's lost race."""
    return state.model_copy(update={"slot": record.slot, **_catalog_changes(state, record, record.body)})


def _catalog_changes(state: CatalogState, record: Record[Any], body: Any) -> Changes:
    if isinstance(body, r.PartitionChanged):
        return _hinted(state, record, {f"{body.topic}-{body.partition}": body.slot})
    if isinstance(body, r.PartitionsChanged):
        return _hinted(state, record, body.slots)
    if isinstance(body, r.SlotsReached):
        return {"reached": _higher(state.reached, body.slots)}
    if isinstance(body, r.PartitionsLooked):
        # A look that was overtaken says nothing of what came after it.
        return {"looks": state.looks | {name: look for name, look in body.looks.items() if look.slot >= state.reached.get(name, 0)}}
    if isinstance(body, r.RoundsPaused):
        return {"paused": state.paused | {body.pattern: Pause(by=body.by, reason=body.reason, at_ms=record.at_ms)}}
    if isinstance(body, r.RoundsResumed):
        return {"paused": {pattern: pause for pattern, pause in state.paused.items() if pattern != body.pattern}}
    if isinstance(body, r.RoundWanted):
        name = f"{body.topic}-{body.partition}"
        others = [(other, wanted) for other, wanted in state.wanted.items() if other != name]
        return {"wanted": dict([*others, (name, WantedRound(record.slot, record.at_ms))][-HISTORY:])}
    return {} if state.tier_id else body.model_dump(include={"tier_id", "hash_key", "kind", "layout", "url", "cluster_id"})


def _hinted(state: CatalogState, record: Record[Any], slots: Mapping[str, int]) -> Changes:
    """A hint that does not say how far the log has come undoes a look; one that does is compared with it (``reached``)."""
    changes: Changes = {"partitions": state.partitions | dict.fromkeys(slots, record.slot), "reached": _higher(state.reached, slots)}
    unsaid = {name for name, slot in slots.items() if not slot} & state.looks.keys()
    return changes | {"looks": {name: look for name, look in state.looks.items() if name not in unsaid}} if unsaid else changes


def _higher(known: dict[str, int], new: Mapping[str, int]) -> dict[str, int]:
    """Bounds only grow, in whatever order they arrive."""
    return known | {name: slot for name, slot in new.items() if slot > known.get(name, 0)}


def with_times(state: PartitionState, modified_ms: Callable[[int], int]) -> PartitionState:
    """The state with the store's times of the slots that grace and orphan age count from, before those slots go."""

    def timed(entry: Any) -> Any:
        return entry if entry.since_ms is not None else entry.model_copy(update={"since_ms": modified_ms(entry.slot)})

    return state.model_copy(
        update={
            "leader": state.leader if state.leader is None or state.leader.released else timed(state.leader),
            "waiting": tuple(timed(group) for group in state.waiting),
            "registrations": {name: timed(entry) for name, entry in state.registrations.items()},
        }
    )


def _fenced(state: PartitionState, record: Record[Any], reason: str) -> Changes:
    body = record.body
    entry = FencedAppend(
        slot=record.slot,
        type=body.type,
        leader_epoch=getattr(body, "leader_epoch", -1),
        offset=offsets.clean_up_to(body.vector) if isinstance(body, r.RoundPublished) else -1,
        by=getattr(body, "holder", "") or _holder(state, record),
        reason=reason,
        at_ms=record.at_ms,
    )
    return {"fenced": (*state.fenced, entry)[-HISTORY:]}


def _holder(state: PartitionState, record: Record[Any]) -> str:
    known = (epoch.holder for epoch in reversed(state.epochs) if epoch.incarnation == record.incarnation)
    return next(known, record.incarnation)


def _leadership_acquired(state: PartitionState, record: Record[Any], body: r.LeadershipAcquired) -> Changes:
    leader = Leader(
        epoch=body.leader_epoch,
        incarnation=record.incarnation,
        holder=body.holder,
        slot=record.slot,
        at_ms=record.at_ms,
        ttl_ms=body.ttl_ms,
    )
    entry = EpochHistory(epoch=leader.epoch, holder=leader.holder, incarnation=leader.incarnation, slot=leader.slot, at_ms=leader.at_ms)
    return {"leader": leader, "epochs": (*_epoch_ended(state, record, "replaced"), entry)[-HISTORY:]}


def _leadership_released(state: PartitionState, record: Record[Any], body: r.LeadershipReleased) -> Changes:
    leader = state.leader.model_copy(update={"released": True}) if state.leader else None
    return {"leader": leader, "epochs": _epoch_ended(state, record, "released")}


def _epoch_ended(state: PartitionState, record: Record[Any], how: str) -> tuple[EpochHistory, ...]:
    if not state.epochs or state.epochs[-1].ended:
        return state.epochs
    return (*state.epochs[:-1], state.epochs[-1].model_copy(update={"ended": how, "ended_ms": record.at_ms}))


def _ids_registered(state: PartitionState, record: Record[Any], body: r.IdsRegistered) -> Changes:
    entry = Registration(import_id=body.import_id, ids=body.ids, holder=body.holder, slot=record.slot)
    return {"registrations": state.registrations | {body.import_id: entry}}


def _segments_tiered(state: PartitionState, record: Record[Any], body: r.SegmentsTiered) -> Changes:
    entry = state.registrations[body.import_id]
    tiered = {segment.id for segment in body.segments}
    end = body.segments[-1].end_offset
    entry = entry.model_copy(update={"ids": tuple(name for name in entry.ids if name not in tiered), "tiered_end": end})
    changes = _registered(state, record, entry) | {"live": state.live + body.segments}
    told = lineage.extend(state.lineage, lineage.union([segment.leader_epochs for segment in body.segments]))
    newer = lineage.merge(state.lineage, body.lineage) if body.lineage else told
    changes |= {"tail": (*state.tail, *body.tail)[-TAIL:] if body.tail else (), "deleted_slot": 0}
    return changes | _lineage_moved(state, newer, end + 1)


def _segments_prepended(state: PartitionState, record: Record[Any], body: r.SegmentsPrepended) -> Changes:
    entry = state.registrations[body.import_id]
    entry = entry.model_copy(update={"ids": (), "tiered_end": body.segments[-1].end_offset})
    older = body.lineage or lineage.union([segment.leader_epochs for segment in body.segments])
    return _registered(state, record, entry) | {"live": body.segments + state.live, "lineage": lineage.merge(older, state.lineage)}


def _tail_truncated(state: PartitionState, record: Record[Any], body: r.TailTruncated) -> Changes:
    """The discarded branch leaves the view and waits for grace; nothing from ``offset`` on counts as clean, nor as known."""
    gone = set(body.voided)
    kept = tuple(segment for segment in state.live if segment.id not in gone)
    changes = _clamped(state, body.offset)
    group = Waiting(
        slot=record.slot,
        run_id=body.cut_id,
        leader_epoch=state.last_epoch,
        undone=True,
        segments=tuple(segment for segment in state.live if segment.id in gone),
        vector_before=changes["vector"],
        vector=changes["vector"],
        why=f"the broker's log was truncated at offset {body.offset}",
        grace_ms=body.grace_ms,
    )
    if body.head is not None:
        entry = state.registrations[body.cut_id]
        changes |= _registered(state, record, entry.model_copy(update={"ids": (), "tiered_end": body.head.end_offset}))
        kept += (body.head,)
    following = () if body.epoch is None else (lineage.EpochEntry(body.epoch, body.offset),)
    return changes | {
        "live": kept,
        "waiting": (*changes["waiting"], group),
        "lineage": lineage.extend(lineage.cut(state.lineage, body.offset), following),
        "lineage_end": body.offset,
        "tail": tuple(batch for batch in state.tail if batch.last_offset < body.offset),
        "quarantine": None,
    }


def _partition_deleted(state: PartitionState, record: Record[Any], body: r.PartitionDeleted) -> Changes:
    """Everything that was, is or was about to be readable waits for grace or is an orphan; nobody can go back to it."""
    why = "the partition was deleted"
    group = Waiting(
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
    closed = [
        ClosedImport(import_id=entry.import_id, slot=record.slot, tiered_end=entry.tiered_end, voided=why)
        for entry in state.registrations.values()
    ]
    open_run = state.intent.plan.run_id if state.intent else ""
    return {
        "live": (),
        "vector": (),
        "intent": None,
        "registrations": {},
        "closed_imports": (*(c.model_copy(update={"voided": c.voided or why}) for c in state.closed_imports), *closed)[-HISTORY:],
        "waiting": (*earlier, group) if state.live else earlier,
        "lineage": (),
        "lineage_end": -1,
        "tail": (),
        "quarantine": None,
        "published": (),
        "runs": _run_changed(state, open_run, status="undone", reason=why, ended_ms=record.at_ms) if open_run else state.runs,
        "deleted_slot": record.slot,
    } | _void(state, [*_new_ids(state), *(name for entry in state.registrations.values() for name in entry.ids)])


def _registered(state: PartitionState, record: Record[Any], entry: Registration, voided: str = "") -> Changes:
    """An import stays open until each of its ids is tiered or void."""
    if entry.ids and not voided:
        return {"registrations": state.registrations | {entry.import_id: entry}}
    closed = ClosedImport(import_id=entry.import_id, slot=record.slot, tiered_end=entry.tiered_end, voided=voided)
    others = {name: other for name, other in state.registrations.items() if name != entry.import_id}
    return {"registrations": others, "closed_imports": (*state.closed_imports, closed)[-HISTORY:]}


def _import_voided(state: PartitionState, record: Record[Any], body: r.ImportVoided) -> Changes:
    entry = state.registrations[body.import_id]
    return _registered(state, record, entry, voided=body.reason or "void") | _void(state, entry.ids)


def _void(state: PartitionState, ids: Iterable[str]) -> Changes:
    return {"voided": (*state.voided, *ids)[-VOIDED:]}


def _new_ids(state: PartitionState) -> Iterator[str]:
    """Those of the open intent."""
    return (task.new_segment_id for task in state.intent.plan.tasks) if state.intent else iter(())


def _lineage_recorded(state: PartitionState, record: Record[Any], body: r.LineageRecorded) -> Changes:
    return _lineage_moved(state, body.lineage, body.end_offset)


def _segments_mirrored(state: PartitionState, record: Record[Any], body: r.SegmentsMirrored) -> Changes:
    return mirror.after(state, body)


def _lineage_moved(state: PartitionState, newer: tuple[EpochEntry, ...], end: int) -> Changes:
    """Stores the lineage; where the broker's log was truncated or has diverged, nothing above counts as clean any more."""
    parted = lineage.divergence(state.lineage, state.end_offset + 1, newer, end)
    moved: Changes = {"lineage": newer, "lineage_end": end}
    return moved if parted is None or parted >= offsets.clean_up_to(state.vector) else moved | _clamped(state, parted)


def _clamped(state: PartitionState, parted: int) -> Changes:
    """Nothing from here on counts as clean: for who plans, who retires what was replaced, and who undoes."""

    def clamped(entry: Any) -> Any:
        both = {name: offsets.clamp(getattr(entry, name), parted) for name in ("vector_before", "vector")}
        return entry.model_copy(update=both)

    return {"vector": offsets.clamp(state.vector, parted), "waiting": tuple(clamped(group) for group in state.waiting)}


def _plan_announced(state: PartitionState, record: Record[Any], body: r.PlanAnnounced) -> Changes:
    plan = body.plan
    run = Run(
        run_id=plan.run_id,
        leader_epoch=body.leader_epoch,
        holder=state.leader.holder if state.leader else "",
        slot=record.slot,
        started_ms=record.at_ms,
        first_dirty_offset=plan.first_dirty_offset,
        vector_before=plan.vector,
        sources=len(plan.sources),
        outputs=len(plan.tasks),
    )
    return {"intent": Intent(plan=plan, slot=record.slot, at_ms=record.at_ms), "runs": (*state.runs, run)[-HISTORY:]}


def _receipts_added(state: PartitionState, record: Record[Any], body: r.ReceiptsAdded) -> Changes:
    intent = _open(state)
    return {"intent": intent.model_copy(update={"receipts": intent.receipts + body.receipts})}


def _survivors_stored(state: PartitionState, record: Record[Any], body: r.SurvivorsStored) -> Changes:
    return {"intent": _open(state).model_copy(update={"survivors": body.objects})}


def _open(state: PartitionState) -> Intent:
    if state.intent is None:
        raise AssertionError("the rules let a record pass that needs an open intent")
    return state.intent


def _intent_undone(state: PartitionState, record: Record[Any], body: r.IntentUndone) -> Changes:
    runs = _run_changed(state, body.run_id, status="undone", reason=body.reason, ended_ms=record.at_ms)
    return {"intent": None, "runs": runs} | _void(state, _new_ids(state))


def _publish_begun(state: PartitionState, record: Record[Any], body: r.PublishBegun) -> Changes:
    return {"intent": _open(state).model_copy(update={"begun_slot": record.slot})}


def _round_published(state: PartitionState, record: Record[Any], body: r.RoundPublished) -> Changes:
    """Readers switch, all at once. The sources' objects begin to wait for grace."""
    by_id = state.live_by_id()
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
    vector = offsets.fold_unnamed(body.vector, named)
    group = Waiting(
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
    runs = _run_changed(
        state,
        body.run_id,
        status=body.status or "published",
        stats=body.stats,
        leader_epoch=body.leader_epoch,
        ended_ms=record.at_ms,
        published_slot=record.slot,
        next_dirty_offset=offsets.clean_up_to(vector),
        vector=vector,
        balance=body.balance,
        content=body.content,
    )
    changes = {
        "live": tuple(live),
        "published_by": published_by,
        "vector": vector,
        "intent": None,
        "waiting": (*state.waiting, group),
        "published": (*state.published, body.run_id)[-HISTORY:],
        "quarantine": None,
        "runs": runs,
    }
    restores = _open(state).plan.restores
    if not restores:
        return changes
    return changes | _taken_back(state.model_copy(update={"runs": runs}), restores, group, stay=len(body.cut_off))


def _taken_back(state: PartitionState, run_id: str, made: Waiting, *, stay: int) -> Changes:
    """What the run made waits for grace like anything that left the view; what it had replaced goes when its time has come, as copies stand
    for it now. ``stay``: so many groups could not go back, and readers keep what the run made of them."""
    why = f"run {run_id} was taken back"
    reason = f"{stay} of {stay + len(made.segments)} groups stay: brokers had deleted segments of them" if stay else ""
    left = made.model_copy(update={"run_id": run_id, "undone": True, "replaced_by": {}, "undo_window_ms": None, "why": why})
    earlier = (
        group.model_copy(update={"undone": True, "replaced_by": {}, "why": why}) if group.run_id == run_id and not group.undone else group
        for group in state.waiting
    )
    return {
        "waiting": (*earlier, left),
        "published": tuple(other for other in state.published if other != run_id),
        "runs": _run_changed(state, run_id, status="reverted_in_part" if stay else "reverted", reason=reason),
    }


def _retire_begun(state: PartitionState, record: Record[Any], body: r.RetireBegun) -> Changes:
    ids = set(body.ids)
    gone = [segment for group in state.waiting for segment in group.segments if segment.id in ids]
    return {
        "waiting": tuple(group for group in state.waiting if not ids.issuperset(segment.id for segment in group.segments)),
        "retiring": (*state.retiring, *gone),
        "published_by": {name: epoch for name, epoch in state.published_by.items() if name not in ids},
    }


def _retired(state: PartitionState, record: Record[Any], body: r.Retired) -> Changes:
    ids = set(body.ids)
    return {"retiring": tuple(segment for segment in state.retiring if segment.id not in ids)} | _void(state, body.ids)


def _round_undone(state: PartitionState, record: Record[Any], body: r.RoundUndone) -> Changes:
    """Readers go back to the sources; the outputs wait for grace like anything that left the view."""
    group = next(group for group in state.waiting if group.run_id == body.run_id and not group.undone)
    outputs = set(group.replaced_by.values())
    left = tuple(segment for segment in state.live if segment.id in outputs)
    live = sorted((*(s for s in state.live if s.id not in outputs), *group.segments), key=lambda segment: segment.start_offset)
    waits = Waiting(
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
        "runs": _run_changed(state, body.run_id, status="reverted"),
    }


def _run_ended(state: PartitionState, record: Record[Any], body: r.RunEnded) -> Changes:
    told = {"status": body.status, "reason": body.reason, "segment": body.segment, "stats": body.stats}
    runs = _run_changed(state, body.run_id, **told)
    if state.run(body.run_id) is None:  # it failed before there was a plan
        holder = state.leader.holder if state.leader else ""
        run = Run(run_id=body.run_id, leader_epoch=body.leader_epoch, holder=holder, slot=record.slot, started_ms=record.at_ms)
        runs = (*runs, run.model_copy(update=told | {"ended_ms": record.at_ms}))[-HISTORY:]
    if body.status != "quarantined":
        return {"runs": runs}
    failures = state.quarantine.failures + 1 if state.quarantine else 1
    why = Quarantine(reason=body.reason, segment=body.segment, failures=failures, slot=record.slot, at_ms=record.at_ms)
    return {"runs": runs, "quarantine": why}


def _run_changed(state: PartitionState, run_id: str, **changes: Any) -> tuple[Run, ...]:
    return tuple(run.model_copy(update=changes) if run.run_id == run_id else run for run in state.runs)


EFFECTS: dict[type, Callable[[PartitionState, Record[Any], Any], Changes]] = {
    r.LeadershipAcquired: _leadership_acquired,
    r.LeadershipReleased: _leadership_released,
    r.IdsRegistered: _ids_registered,
    r.SegmentsTiered: _segments_tiered,
    r.SegmentsPrepended: _segments_prepended,
    r.TailTruncated: _tail_truncated,
    r.PartitionDeleted: _partition_deleted,
    r.LineageRecorded: _lineage_recorded,
    r.SegmentsMirrored: _segments_mirrored,
    r.ImportVoided: _import_voided,
    r.PlanAnnounced: _plan_announced,
    r.ReceiptsAdded: _receipts_added,
    r.SurvivorsStored: _survivors_stored,
    r.IntentUndone: _intent_undone,
    r.PublishBegun: _publish_begun,
    r.RoundPublished: _round_published,
    r.RetireBegun: _retire_begun,
    r.Retired: _retired,
    r.RoundUndone: _round_undone,
    r.RunEnded: _run_ended,
}
"""One effect per record. tests/unit/test_control_ordering.py checks that none is missing."""
