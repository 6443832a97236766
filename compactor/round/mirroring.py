"""Mirroring of a broker-managed tier: before planning, the control log is brought up to date with the segments that brokers serve.

The brokers' metadata lacks three things that a round needs, which are read here once per segment: the kinds of its files, the first open
transaction at its end (from the producer snapshot), and the timestamp of its first batch (for Kafka's max.compaction.lag.ms).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from checkpoint.files import parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, first_divergent_offset, leader_epoch_at
from compactor.control.leadership import BrokerExpiredSegmentCache, Leadership, RecordRefused, record_broker_log_start
from compactor.control.mirror import build_broker_changes_record, open_round_segment_ids, state_with_broker_view
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import PartitionState
from compactor.errors import BadData, BlockedCause, NotFound, Refused
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import BrokerView
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producers import parse_producer_snapshot_file
from compactor.tier.contents import read_verified_file
from compactor.tier.ports import SegmentLayout

_BATCH_HEADER: Final = 61
_MAGIC_AT: Final = 16
_MAX_TIMESTAMP_AT: Final = 35


def state_with_broker_segments(ports: EnvironmentPorts, state: PartitionState) -> PartitionState:
    return state if ports.brokers is None else state_with_broker_view(state, ports.brokers(state.topic_partition))


def broker_log_start_offset(ports: EnvironmentPorts, partition: TopicPartition) -> int:
    """Return 0 if no broker writes the tier."""
    return max(0, ports.broker_log_start(partition)) if ports.broker_log_start is not None else 0


def open_round_problem(leadership: Leadership, expired: BrokerExpiredSegmentCache) -> str:
    """Return why brokers no longer serve a source of the open round with the same offsets; empty: they do. Expired sources do not stop the
    round, unless a pending group has lost only some of its sources.
    """
    ports, state = leadership.ports, leadership.state
    if ports.brokers is None or state.intent is None:
        return ""
    there = {(link.segment.id, link.last) for link in ports.brokers(state.topic_partition).links}
    ends = {segment.id: segment.end_offset for segment in state.live}
    missing = [name for name in open_round_segment_ids(state) if (name, ends.get(name)) not in there]
    explained = expired.select_expired(missing)
    gone = next((name for name in missing if name not in explained), "")
    if gone:
        return f"segment {gone} is not what brokers read any more"
    parted = expired.find_partly_expired_task(state.intent.pending_tasks)
    return f"brokers have expired a part of what group {parted.group} replaces" if parted else ""


def record_broker_segments(leadership: Leadership) -> PartitionState:
    """Raises BadData if the brokers' segments leave a gap, or if an object of a new segment is missing."""
    ports = leadership.ports
    if ports.brokers is None:
        return leadership.state
    name = leadership.state.topic_partition
    view = _without_expired_front(leadership, ports.brokers(name))
    body = build_broker_changes_record(leadership.state, view, leadership.epoch)
    if body is None:
        return leadership.state
    if body.gone:
        record_broker_log_start(leadership)  # it explains later what has become of a round's segments
    try:
        added = tuple(segment if segment.files else complete_metadata(ports.layout, name, segment) for segment in body.added)
    except BadData:
        if _without_expired_front(leadership, ports.brokers(name)).links == view.links:
            raise
        return record_broker_segments(leadership)  # brokers have deleted a segment since the view was taken
    if added and added[-1].id == view.links[-1].segment.id:
        require_consistent_lineage(ports.layout, name, added[-1], view.lineage)
    try:
        return leadership.append_record(
            body.model_copy(update={"added": added}), lambda state: build_broker_changes_record(state, view) is None
        )
    except RecordRefused as refused:
        raise BadData(f"the segments that brokers read are not a complete log: {refused}", segment=str(name)) from refused


def _without_expired_front(leadership: Leadership, view: BrokerView) -> BrokerView:
    """Remove late copies of expired data: segments that end below the brokers' log start and that a gap separates from the segments after
    them.
    """
    after_gap = [number for number, (one, two) in enumerate(pairwise(view.links), start=1) if two.first > one.last + 1]
    if not after_gap:
        return view
    start = record_broker_log_start(leadership)
    front = max((number for number in after_gap if view.links[number - 1].last < start), default=0)
    return replace(view, links=view.links[front:])


def require_consistent_lineage(
    layout: SegmentLayout, partition: TopicPartition, newest_segment: RemoteLogSegmentMetadata, lineage_from_metadata: Sequence[EpochEntry]
) -> None:
    """Raise BadData if the newest segment's leader-epoch-checkpoint contradicts the lineage from the metadata of all segments.

    This happens after an unclean election discarded tiered data, while no newer segment extends past the discarded ones. Metadata alone
    then does not show which of two segments belongs to the log.
    """
    kind = "leader-epoch-checkpoint"
    if kind not in newest_segment.files:
        return
    where, end = layout.object_name(partition, newest_segment, kind), newest_segment.end_offset + 1
    known = parse_leader_epoch_checkpoint(read_verified_file(layout, partition, newest_segment, kind).decode(errors="replace"), where)
    parted = first_divergent_offset(lineage_from_metadata, end, known, end)
    if parted is not None:
        epochs = f"{leader_epoch_at(known, parted)}, the segments' metadata to {leader_epoch_at(lineage_from_metadata, parted)}"
        raise BadData(
            f"the newest segment's lineage gives offset {parted} to leader epoch {epochs}",
            segment=where,
            hint="An unclean election has discarded tiered records. It is unknown which of two logs is valid, so neither is compacted",
        )


def complete_metadata(layout: SegmentLayout, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
    """Read from the segment's objects what brokers do not record. Raises StoreError, and BadData if an object is missing."""
    try:
        segment = segment.model_copy(update={"files": dict(layout.segment_files(partition, segment))})
        head = layout.read_file(partition, segment, "log", 0, _BATCH_HEADER)
        entries = parse_producer_snapshot_file(
            read_verified_file(layout, partition, segment, "snapshot"), layout.object_name(partition, segment, "snapshot")
        ).entries
    except (NotFound, KeyError) as error:
        if isinstance(error, NotFound) and not any(found.segment_id for found in layout.list_objects(partition)):
            raise Refused(
                f"nothing of {partition} lies at {layout.url}, where its metadata says that it has segments",
                hint="Correct url, layout or key_prefix under [tier]: they are those of the brokers' storage plug-in",
                cause=BlockedCause.LOCATION,
            ) from error
        detail = error.message if isinstance(error, NotFound) else "it has no producer snapshot"
        raise BadData(
            detail,
            segment=layout.object_name(partition, segment, "log"),
            hint="Run `verify`; restore the object. If prefix, layout or encryption of the plug-in changed, set them under [tier]",
        ) from error
    undecided = entries["txn_first_offset"][entries["txn_first_offset"] >= 0]
    update = {
        "open_txn_offset": int(undecided.min()) if len(undecided) else -1,
        "first_timestamp_ms": _batch_max_timestamp_ms(head),
    }
    return segment.model_copy(update=update)


def _batch_max_timestamp_ms(header: bytes) -> int:
    if len(header) < _BATCH_HEADER or header[_MAGIC_AT] < 2:
        return -1
    return int(struct.unpack_from(">q", header, _MAX_TIMESTAMP_AT)[0])
