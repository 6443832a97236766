"""A tier that brokers write: what a partition's readers find is in ``__remote_log_metadata``, and the control log mirrors it.

Who only reads applies the difference in memory (``mirrored``); who compacts appends it (*segments mirrored*), so that the fold, the
rules and everything that decides from the state work as they do without a broker.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoint import offsets
from checkpoint.lineage import EpochEntry, divergence
from compactor.control.records import SegmentsMirrored
from compactor.control.state import PartitionState
from compactor.metadata_topic.cache import lineage_of
from compactor.metadata_topic.chain import Link
from compactor.metadata_topic.codec import RemoteLogSegmentMetadataRecord
from compactor.model.segment import RemoteLogSegmentMetadata


@dataclass(frozen=True)
class BrokersView:
    """What readers find, in order, and the lineage that it was found by. ``metadata_offset``: of the last record that was folded."""

    links: Sequence[Link]
    lineage: tuple[EpochEntry, ...]
    metadata_offset: int = -1


def described(record: RemoteLogSegmentMetadataRecord, last: int | None = None) -> RemoteLogSegmentMetadata:
    """A broker's segment as this program has segments. ``last``: the last offset that readers read of it.

    Brokers say nothing of modification times and of what is in it: the largest timestamp stands in for the former (the event's, where
    no record has one), for the first batch's as well until a round has looked (max.compaction.lag.ms is late by a segment's time, then),
    and the rest is unknown until a sidecar says it. Files are not recorded: the layout knows them.
    """
    known = record.max_timestamp_ms >= 0
    return RemoteLogSegmentMetadata(
        id=record.id,
        start_offset=record.start_offset,
        end_offset=record.end_offset if last is None else last,
        size_bytes=record.size_bytes,
        max_timestamp_ms=record.max_timestamp_ms,
        mtime_ms=record.max_timestamp_ms if known else record.event_timestamp_ms,
        leader_epochs=tuple(entry for entry in lineage_of(record) if last is None or entry.start_offset <= last),
        files={},
        first_timestamp_ms=record.max_timestamp_ms,
        custom_metadata=base64.b64encode(record.custom_metadata).decode() if record.custom_metadata else "",
        copied_end_offset=record.end_offset if last is not None and last < record.end_offset else -1,
    )


def difference(state: PartitionState, view: BrokersView, leader_epoch: int = -1) -> SegmentsMirrored | None:
    """What the log lacks of what brokers say; None where it has it all. What the log knows of a segment already is kept."""
    known = state.live_by_id()
    there = {(segment.id, segment.end_offset) for segment in state.live}
    wanted = {(link.segment.id, link.last) for link in view.links}
    added = tuple(
        known[link.segment.id].model_copy(update=_read_to(described(link.segment, link.last)) | {"content": None})
        if link.segment.id in known
        else described(link.segment, link.last)
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


def _read_to(segment: RemoteLogSegmentMetadata) -> dict[str, Any]:
    """What depends on how far a segment is read."""
    return {name: getattr(segment, name) for name in ("end_offset", "copied_end_offset", "leader_epochs")}


def after(state: PartitionState, body: SegmentsMirrored) -> dict[str, Any]:
    """What of the state changes.

    Where the brokers' lineage parts from the one that was known, nothing above counts as clean any more; nor where a segment of theirs
    has come that reaches below the cleaner offset: a later leader has tiered again what compaction had gone through.
    """
    changes: dict[str, Any] = {"live": live_after(state, body), "mirrored": True}
    parted = divergence(state.lineage, state.end_offset + 1, body.lineage, body.end_offset) if body.lineage else None
    begins = [begin for begin in (parted, _again_from(state, body)) if begin is not None]
    parted = min(begins, default=None)
    if parted is not None and parted < offsets.clean_up_to(state.vector):
        changes["vector"] = offsets.clamp(state.vector, parted)
        both = ("vector_before", "vector")
        changes["waiting"] = tuple(
            group.model_copy(update={name: offsets.clamp(getattr(group, name), parted) for name in both}) for group in state.waiting
        )
    return changes | {"lineage": body.lineage, "lineage_end": body.end_offset}


def _again_from(state: PartitionState, body: SegmentsMirrored) -> int | None:
    """The first offset that readers read in another segment than before, which no round of ours has made."""
    ends = {segment.id: segment.end_offset for segment in state.live}
    planned = {task.new_segment_id for task in state.intent.plan.tasks} if state.intent else set()
    new = (segment for segment in body.added if segment.id not in planned)
    begins = [ends.get(each.id, each.start_offset - 1) + 1 for each in new if each.end_offset > ends.get(each.id, -1)]
    return min(begins, default=None)


def live_after(state: PartitionState, body: SegmentsMirrored) -> tuple[RemoteLogSegmentMetadata, ...]:
    gone = set(body.gone)
    kept = (segment for segment in state.live if segment.id not in gone)
    return tuple(sorted((*kept, *body.added), key=lambda segment: segment.end_offset))


def mirrored(state: PartitionState, view: BrokersView) -> PartitionState:
    """The state with what brokers say, for whoever only reads."""
    body = difference(state, view)
    return state if body is None else state.model_copy(update=after(state, body))


def named_by_round(state: PartitionState) -> Iterable[str]:
    """Segments that the open round reads or leaves alone: none of them may leave the view while it is open."""
    plan = state.intent.plan if state.intent else None
    return (*plan.sources, *(skipped.id for skipped in plan.skipped)) if plan else ()
