"""Mirror of a broker-managed tier: ``__remote_log_metadata`` decides what readers find, and the control log follows it.

Readers apply the difference in memory (``state_with_broker_view``). A compactor appends it (*segments mirrored*), so that the fold, the
rules and all decisions work as on a tier without brokers.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from checkpoint import offsets
from checkpoint.lineage import first_divergent_offset
from compactor.constants import NO_COMPACTOR_EPOCH, CompactorEpoch, Offset, TimestampMs
from compactor.control.records import SegmentsMirrored
from compactor.control.state import PartitionState
from compactor.model.remote_log import BrokerView, RemoteLogSegmentMetadataRecord, segment_lineage
from compactor.model.segment import RemoteLogSegmentMetadata


def segment_from_broker_record(record: RemoteLogSegmentMetadataRecord, last_offset: int | None = None) -> RemoteLogSegmentMetadata:
    """Convert a broker's record.

    :param last_offset: last offset that readers read, inclusive; None for the segment's end offset.

    Brokers do not state modification times or content. The largest timestamp (or the event's, if there is none) replaces the modification
    time and the first batch's timestamp, so that max.compaction.lag.ms may act late by the time span of a segment.
    """
    known = record.max_timestamp_ms >= 0
    return RemoteLogSegmentMetadata(
        id=record.id,
        start_offset=Offset(record.start_offset),
        end_offset=Offset(record.end_offset if last_offset is None else last_offset),
        size_bytes=record.size_bytes,
        max_timestamp_ms=TimestampMs(record.max_timestamp_ms),
        mtime_ms=record.max_timestamp_ms if known else record.event_timestamp_ms,
        leader_epochs=tuple(entry for entry in segment_lineage(record) if last_offset is None or entry.start_offset <= last_offset),
        files={},
        first_timestamp_ms=record.max_timestamp_ms,
        custom_metadata=base64.b64encode(record.custom_metadata).decode() if record.custom_metadata else "",
        copied_end_offset=record.end_offset if last_offset is not None and last_offset < record.end_offset else -1,
    )


def build_broker_changes_record(
    state: PartitionState, view: BrokerView, leader_epoch: CompactorEpoch = NO_COMPACTOR_EPOCH
) -> SegmentsMirrored | None:
    """Return None if nothing has changed. Fields of known segments that brokers do not report are taken from the state."""
    known = state.live_segments_by_id()
    there = {(segment.id, segment.end_offset) for segment in state.live}
    wanted = {(link.segment.id, link.last) for link in view.links}
    added = tuple(
        known[link.segment.id].model_copy(
            update=_end_dependent_fields(segment_from_broker_record(link.segment, link.last)) | {"content": None}
        )
        if link.segment.id in known
        else segment_from_broker_record(link.segment, link.last)
        for link in view.links
        if (link.segment.id, link.last) not in there
    )
    gone = tuple(segment.id for segment in state.live if (segment.id, segment.end_offset) not in wanted)
    if not added and not gone and view.lineage == state.lineage:
        return None
    return SegmentsMirrored(
        leader_epoch=leader_epoch,
        added=added,
        gone=gone,
        lineage=view.lineage,
        end_offset=view.links[-1].last + 1 if view.links else 0,
        metadata_offset=view.metadata_offset,
    )


def _end_dependent_fields(segment: RemoteLogSegmentMetadata) -> dict[str, Any]:
    return {name: getattr(segment, name) for name in ("end_offset", "copied_end_offset", "leader_epochs")}


def changes_by_broker_record(state: PartitionState, body: SegmentsMirrored) -> dict[str, Any]:
    changes: dict[str, Any] = {"live": live_after_broker_changes(state, body), "mirrored": True}
    parted = first_divergent_offset(state.lineage, state.end_offset + 1, body.lineage, body.end_offset) if body.lineage else None
    # Data from the first divergence on, or from the first offset that is read from another segment, was not cleaned: cleaner offsets are
    # lowered to the lower of the two.
    begins = [begin for begin in (parted, _first_rerouted_offset(state, body)) if begin is not None]
    parted = min(begins, default=None)
    if parted is not None and parted < offsets.first_dirty_offset_in(state.vector):
        changes["vector"] = offsets.cap_cleaner_offsets(state.vector, parted)
        both = ("vector_before", "vector")
        changes["waiting"] = tuple(
            group.model_copy(update={name: offsets.cap_cleaner_offsets(getattr(group, name), parted) for name in both})
            for group in state.waiting
        )
    return changes | {"lineage": body.lineage, "lineage_end": body.end_offset}


def _first_rerouted_offset(state: PartitionState, body: SegmentsMirrored) -> int | None:
    """First offset that readers now read from another segment than before. Segments that the open round writes do not count."""
    ends = {segment.id: segment.end_offset for segment in state.live}
    planned = {task.new_segment_id for task in state.intent.plan.tasks} if state.intent else set()
    new = (segment for segment in body.added if segment.id not in planned)
    begins = [ends.get(each.id, each.start_offset - 1) + 1 for each in new if each.end_offset > ends.get(each.id, -1)]
    return min(begins, default=None)


def live_after_broker_changes(state: PartitionState, body: SegmentsMirrored) -> tuple[RemoteLogSegmentMetadata, ...]:
    gone = set(body.gone)
    kept = (segment for segment in state.live if segment.id not in gone)
    return tuple(sorted((*kept, *body.added), key=lambda segment: segment.end_offset))


def state_with_broker_view(state: PartitionState, view: BrokerView) -> PartitionState:
    body = build_broker_changes_record(state, view)
    return state if body is None else state.model_copy(update=changes_by_broker_record(state, body))


def open_round_segment_ids(state: PartitionState) -> Iterable[str]:
    """Return segments that may not leave the live segments while the round is open."""
    plan = state.intent.plan if state.intent else None
    return (*plan.source_segment_ids, *(skipped.id for skipped in plan.skipped)) if plan else ()
