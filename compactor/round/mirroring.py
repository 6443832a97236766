"""A tier that brokers write: before a leader plans, the control log is brought to what the brokers' readers find (*segments mirrored*).

What brokers do not record of a segment, and a round goes by, is looked up here, once: which files there are, whether a transaction is
open at its end (the producer snapshot), the timestamp of its first batch (Kafka's max.compaction.lag.ms).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from checkpoint.files import parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry, divergence, epoch_at
from compactor.control.leadership import Leadership, RequirementFailed
from compactor.control.mirror import difference, mirrored, named_by_round
from compactor.control.ports import Ports
from compactor.control.state import PartitionState
from compactor.errors import BadData, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producers import parse_snapshot
from compactor.tier.ports import SegmentLayout
from compactor.tier.recorded import content

_BATCH_HEADER: Final = 61
_MAGIC_AT: Final = 16
_MAX_TIMESTAMP_AT: Final = 35


def seen(ports: Ports, state: PartitionState) -> PartitionState:
    """The state with what brokers say now; as it is where no broker writes the tier."""
    return state if ports.brokers is None else mirrored(state, ports.brokers(state.name))


def round_problem(ports: Ports, state: PartitionState) -> str:
    """Which segment of the open round readers do not find any more, as far as the round knew it; empty where it can go on."""
    if ports.brokers is None:
        return ""
    there = {(link.segment.id, link.last) for link in ports.brokers(state.name).links}
    ends = {segment.id: segment.end_offset for segment in state.live}
    gone = next((name for name in named_by_round(state) if (name, ends.get(name)) not in there), "")
    return f"segment {gone} is not what brokers read any more" if gone else ""


def mirror(leadership: Leadership) -> PartitionState:
    """Appends what the log lacks. Raises BadData where brokers' segments leave a gap, or what belongs to one of them is missing."""
    ports = leadership.ports
    if ports.brokers is None:
        return leadership.state
    view = ports.brokers(leadership.state.name)
    body = difference(leadership.state, view, leadership.epoch)
    if body is None:
        return leadership.state
    name = leadership.state.name
    added = tuple(segment if segment.files else completed(ports.layout, name, segment) for segment in body.added)
    if added and added[-1].id == view.links[-1].segment.id:
        check_lineage(ports.layout, name, added[-1], view.lineage)
    try:
        return leadership.append(body.model_copy(update={"added": added}), lambda state: difference(state, view) is None)
    except RequirementFailed as refused:
        raise BadData(f"what brokers read is no whole log: {refused}", segment=str(name)) from refused


def check_lineage(layout: SegmentLayout, name: TopicPartition, newest: RemoteLogSegmentMetadata, told: Sequence[EpochEntry]) -> None:
    """That the newest segment's leader-epoch-checkpoint says what all segments' metadata tells. Raises BadData.

    Where an unclean election has discarded what was tiered, and no segment reaches across the end of the older epoch, metadata alone
    does not say which of two segments is the log's.
    """
    kind = "leader-epoch-checkpoint"
    if kind not in newest.files:
        return
    where, end = layout.where(name, newest, kind), newest.end_offset + 1
    known = parse_leader_epoch_checkpoint(content(layout, name, newest, kind).decode(errors="replace"), where)
    parted = divergence(told, end, known, end)
    if parted is not None:
        epochs = f"{epoch_at(known, parted)}, the segments' metadata to {epoch_at(told, parted)}"
        raise BadData(
            f"the newest segment's lineage gives offset {parted} to leader epoch {epochs}",
            segment=where,
            hint="An unclean election has discarded what was tiered; brokers read the one, and nothing is compacted that may be the other",
        )


def completed(layout: SegmentLayout, name: TopicPartition, segment: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
    """With what a round goes by. Raises BadData, StoreError."""
    try:
        segment = segment.model_copy(update={"files": dict(layout.files(name, segment))})
        head = layout.read(name, segment, "log", 0, _BATCH_HEADER)
        entries = parse_snapshot(content(layout, name, segment, "snapshot"), layout.where(name, segment, "snapshot")).entries
    except (NotFound, KeyError) as error:
        said = error.message if isinstance(error, NotFound) else "it has no producer snapshot"
        raise BadData(said, segment=layout.where(name, segment, "log"), hint="Run `verify`; restore the object") from error
    undecided = entries["txn_first_offset"][entries["txn_first_offset"] >= 0]
    update = {"open_txn_offset": int(undecided.min()) if len(undecided) else -1, "first_timestamp_ms": _max_timestamp(head)}
    return segment.model_copy(update=update)


def _max_timestamp(head: bytes) -> int:
    """Of a batch, by its header; -1 for one of an old format."""
    if len(head) < _BATCH_HEADER or head[_MAGIC_AT] < 2:
        return -1
    return int(struct.unpack_from(">q", head, _MAX_TIMESTAMP_AT)[0])
