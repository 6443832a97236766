"""Records of an import: register segment ids < upload the segments < make them readable. Needs no leadership.

An importer that sleeps between upload and last record may find its import void, because its objects were swept as orphans once its
registration was ``orphan_age_ms`` old. It has to import again; nothing else is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.control.leadership import reason_to_refuse_append
from compactor.control.logs import PartitionLog, write_snapshot_if_due
from compactor.control.ports import EnvironmentPorts
from compactor.control.records import (
    IncarnationOpened,
    LastImportedBatch,
    SegmentIdsRegistered,
    SegmentsPrepended,
    SegmentsTiered,
    TailTruncated,
    TopicAdopted,
)
from compactor.control.state import HISTORY, ClosedImport, PartitionState
from compactor.errors import BadData, Fenced, Unavailable
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata

BodyT = TypeVar("BodyT")


def register_import(
    ports: EnvironmentPorts,
    log: PartitionLog,
    import_id: str,
    ids: Sequence[str],
    require_state_matches_import: Callable[[PartitionState], None] = lambda state: None,
) -> PartitionState:
    """Register an import and its segment ids, under which objects may be uploaded from then on. All ids must be new (``ports.new_id``).

    :param require_state_matches_import: raises if the import does not match the state.

    Raises BadData if an ordering rule refuses the registration, and Unavailable if the log grew so much that the import may have been
    voided already.
    """
    ports.require_data_root_ownership()
    began = log.refresh_and_check_gaps().slot
    body = SegmentIdsRegistered(import_id=import_id, ids=tuple(ids), holder=ports.holder)

    def decide_record_to_append(state: PartitionState) -> SegmentIdsRegistered | None:
        if import_id in state.registrations or find_closed_import(state, import_id):
            return None
        if state.slot - began >= HISTORY:  # it may have been registered, voided and forgotten: such ids must not come back
            raise Unavailable(f"{state.topic_partition}: the log went on while this import was being registered", hint="Import again")
        require_state_matches_import(state)
        return _require_record_accepted(log, state, body, "Nothing was changed")

    return log.append_due_records(decide_record_to_append)


def record_tiered_segments(
    ports: EnvironmentPorts,
    log: PartitionLog,
    import_id: str,
    segments: Sequence[RemoteLogSegmentMetadata],
    lineage: Sequence[EpochEntry] = (),
    tail: Sequence[LastImportedBatch] = (),
    topic_id: TopicId = EMPTY_TOPIC_ID,
    log_start_offset: int | None = None,
    source_cleaned_to: int = 0,
    accept_loss: bool = False,
) -> PartitionState:
    """Make the uploaded segments of an import readable at the end of the log, all or none.

    Raises Fenced if the import was voided meanwhile, and BadData if the segments no longer continue the log.
    """
    body = SegmentsTiered(
        import_id=import_id,
        segments=tuple(segments),
        lineage=tuple(lineage),
        tail=tuple(tail),
        topic_id=topic_id,
        log_start_offset=log_start_offset,
        source_cleaned_to=source_cleaned_to,
        accept_loss=accept_loss,
    )
    return _append_import_record(log, body)


def record_prepended_segments(
    ports: EnvironmentPorts,
    log: PartitionLog,
    import_id: str,
    segments: Sequence[RemoteLogSegmentMetadata],
    lineage: Sequence[EpochEntry] = (),
    topic_id: TopicId = EMPTY_TOPIC_ID,
) -> PartitionState:
    """Make the uploaded segments of an import readable before the first segment of the log.

    Raises Fenced if the import was voided meanwhile, and BadData if the segments do not precede the log, or the log was compacted.
    """
    return _append_import_record(
        log, SegmentsPrepended(import_id=import_id, segments=tuple(segments), lineage=tuple(lineage), topic_id=topic_id)
    )


def _append_import_record(log: PartitionLog, body: SegmentsTiered | SegmentsPrepended) -> PartitionState:
    log.refresh()
    import_id, end = body.import_id, body.segments[-1].end_offset

    def decide_record_to_append(state: PartitionState) -> SegmentsTiered | SegmentsPrepended | None:
        entry = state.registrations.get(import_id)
        known = entry or find_closed_import(state, import_id)
        if known is not None and known.tiered_end >= end and state.end_offset >= end:
            return None
        if entry is None:
            raise _voided_import_error(state, import_id)
        return _require_record_accepted(log, state, body, "Another process was faster. Run the import again")

    state = log.append_due_records(decide_record_to_append)
    write_snapshot_if_due(log)
    return state


def record_tail_truncation(ports: EnvironmentPorts, log: PartitionLog, body: TailTruncated) -> PartitionState:
    """Replace the end of the log by the first segments of the broker's new branch, in one record.

    Discarded segments wait for grace, at least as long as ``ports.retention`` says, whichever process deletes them. Raises BadData if the
    live segments are no longer those for which ``body`` was built, and Fenced if the new segments' ids were voided meanwhile.
    """
    log.refresh()
    body = body.model_copy(update={"grace_ms": ports.grace_ms})

    def decide_record_to_append(state: PartitionState) -> TailTruncated | None:
        if any(group.run_id == body.cut_id for group in state.waiting):
            return None
        if body.new_segments and body.cut_id not in state.registrations:
            raise _voided_import_error(state, body.cut_id)
        return _require_record_accepted(log, state, body, "Another process was faster. Import again")

    state = log.append_due_records(decide_record_to_append)
    write_snapshot_if_due(log)
    return state


def record_topic_id_adoption(log: PartitionLog, body: TopicAdopted) -> PartitionState:
    """Raises BadData if an ordering rule refuses the record."""
    log.refresh()

    def decide_record_to_append(state: PartitionState) -> TopicAdopted | None:
        seam = body.seam if body.seam >= 0 else state.adopted_seam
        if (state.topic_id, state.adopted_seam) == (body.topic_id or state.topic_id, seam):
            return None
        return _require_record_accepted(log, state, body, "Nothing was changed")

    return log.append_due_records(decide_record_to_append)


def record_topic_incarnation_opening(log: PartitionLog, topic_id: TopicId, operator: str) -> PartitionState:
    """Raises BadData if the log is in use for another topic id."""
    log.refresh_and_check_gaps()
    body = IncarnationOpened(topic_id=topic_id, by=operator)

    def decide_record_to_append(state: PartitionState) -> IncarnationOpened | None:
        if state.topic_id == topic_id:
            return None
        return _require_record_accepted(log, state, body, "Import again: another process was faster")

    return log.append_due_records(decide_record_to_append)


def _require_record_accepted(log: PartitionLog, state: PartitionState, body: BodyT, hint: str) -> BodyT:
    problem = reason_to_refuse_append(log, state, body)
    if problem:
        raise BadData(problem, segment=str(state.topic_partition), hint=hint)
    return body


def find_closed_import(state: PartitionState, import_id: str) -> ClosedImport | None:
    """Return None if the import is open or not known."""
    return next((entry for entry in state.closed_imports if entry.import_id == import_id), None)


def _voided_import_error(state: PartitionState, import_id: str) -> Fenced:
    closed = find_closed_import(state, import_id)
    return Fenced(
        f"{state.topic_partition}: import {import_id} was voided: {closed.voided if closed else 'it took too long to come back'}",
        hint="Import again; the objects that it had uploaded are swept by `retire`",
    )
