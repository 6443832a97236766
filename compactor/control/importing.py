"""How segments come into the tier: register ids < upload < tiered. Needs no leadership.

An importer that sleeps between its upload and its last record may find its import void: its objects were taken for orphans
once its registration was ``orphan_age_ms`` old. Nothing is lost but its time.
"""

from __future__ import annotations

from collections.abc import Sequence

from compactor.control.leadership import check_before_append
from compactor.control.logs import PartitionLog, tidy
from compactor.control.ports import Ports
from compactor.control.records import IdsRegistered, LineageRecorded, SegmentsPrepended, SegmentsTiered, TailBatch, TailTruncated
from compactor.control.state import HISTORY, PartitionState
from compactor.errors import BadData, Fenced, Unavailable
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata


def register(ports: Ports, log: PartitionLog, import_id: str, ids: Sequence[str]) -> PartitionState:
    """These ids may be uploaded from now on. Both are fresh (``ports.new_id``)."""
    ports.own()
    began = log.check_whole().slot
    body = IdsRegistered(import_id=import_id, ids=tuple(ids), holder=ports.holder)

    def decide(state: PartitionState) -> IdsRegistered | None:
        if import_id in state.registrations or _closed(state, import_id):
            return None
        if state.slot - began >= HISTORY:  # it may have been registered, voided and forgotten: such ids must not come back
            raise Unavailable(f"{state.name}: the log went on while this import was being registered", hint="Import again")
        problem = check_before_append(log, state, body)
        if problem:
            raise BadData(problem, segment=str(state.name), hint="Nothing was changed")
        return body

    return log.transact(decide)


def tier(
    ports: Ports,
    log: PartitionLog,
    import_id: str,
    segments: Sequence[RemoteLogSegmentMetadata],
    lineage: Sequence[EpochEntry] = (),
    tail: Sequence[TailBatch] = (),
) -> PartitionState:
    """The uploaded segments become readable, all or none. ``lineage``: the broker's leader-epoch-checkpoint, if known.

    Raises Fenced where the import was voided meanwhile, BadData where the segments no longer continue the log.
    """
    body = SegmentsTiered(import_id=import_id, segments=tuple(segments), lineage=tuple(lineage), tail=tuple(tail))
    return _tiered(log, body)


def prepend(
    ports: Ports, log: PartitionLog, import_id: str, segments: Sequence[RemoteLogSegmentMetadata], lineage: Sequence[EpochEntry] = ()
) -> PartitionState:
    """The same for segments that end where the log begins, while nothing of it is compacted."""
    return _tiered(log, SegmentsPrepended(import_id=import_id, segments=tuple(segments), lineage=tuple(lineage)))


def _tiered(log: PartitionLog, body: SegmentsTiered | SegmentsPrepended) -> PartitionState:
    log.refresh()
    import_id, end = body.import_id, body.segments[-1].end_offset

    def decide(state: PartitionState) -> SegmentsTiered | SegmentsPrepended | None:
        entry = state.registrations.get(import_id)
        closed = next((closed for closed in state.closed_imports if closed.import_id == import_id), None)
        known = entry or closed
        if known is not None and known.tiered_end >= end:
            return None
        if entry is None:
            raise Fenced(
                f"{state.name}: import {import_id} was voided: {closed.voided if closed else 'it took too long to come back'}",
                hint="Import again; the objects that it had uploaded are swept by `retire`",
            )
        problem = check_before_append(log, state, body)
        if problem:
            raise BadData(problem, segment=str(state.name), hint="Another process was faster. Import again what is still missing")
        return body

    state = log.transact(decide)
    tidy(log)
    return state


def truncate(ports: Ports, log: PartitionLog, body: TailTruncated) -> PartitionState:
    """What the tier has from an offset on leaves the view: the broker has discarded it. Raises BadData where a round was faster.

    What is discarded is kept at least for as long as this process is told to keep things (``ports.retention``), whoever retires it.
    """
    log.refresh()
    body = body.model_copy(update={"grace_ms": ports.grace_ms})

    def decide(state: PartitionState) -> TailTruncated | None:
        if any(group.run_id == body.cut_id for group in state.waiting):
            return None
        problem = check_before_append(log, state, body)
        if problem:
            raise BadData(problem, segment=str(state.name), hint="Another process was faster. Import again")
        return body

    return log.transact(decide)


def record_lineage(ports: Ports, log: PartitionLog, lineage: Sequence[EpochEntry], end_offset: int) -> PartitionState:
    """The broker's lineage now, with its log end (exclusive). Where it was truncated, the cleaner offsets are clamped to it."""
    log.refresh()
    body = LineageRecorded(lineage=tuple(lineage), end_offset=end_offset)

    def decide(state: PartitionState) -> LineageRecorded | None:
        if (state.lineage, state.lineage_end) == (body.lineage, body.end_offset):
            return None
        problem = check_before_append(log, state, body)
        if problem:
            raise BadData(problem, segment=str(state.name), hint="Nothing was changed")
        return body

    return log.transact(decide)


def _closed(state: PartitionState, import_id: str) -> bool:
    return any(closed.import_id == import_id for closed in state.closed_imports)
