"""Brokers' records about tiered segments, those of ``__remote_log_metadata``, and the view that readers derive from them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from typing_extensions import override

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset, TopicId
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.segment import SegmentState


def uuid_text(raw: bytes) -> TopicId:
    """Kafka's Uuid.toString, of 16 bytes."""
    return TopicId(encode_segment_id(raw))


def uuid_bytes(text: str) -> bytes:
    """Kafka's Uuid.fromString. Raises ValueError if the text is not a UUID."""
    raw = base64.urlsafe_b64decode(text + "==")
    if len(raw) != 16:
        raise ValueError(f"{text!r} is not an id")
    return raw


TaggedFields = tuple[tuple[int, bytes], ...]
"""Tagged fields in their order: number and bytes."""


class PartitionDeleteState(StrEnum):
    """Kafka's RemotePartitionDeleteState."""

    DELETE_PARTITION_MARKED = "DELETE_PARTITION_MARKED"
    DELETE_PARTITION_STARTED = "DELETE_PARTITION_STARTED"
    DELETE_PARTITION_FINISHED = "DELETE_PARTITION_FINISHED"


class TopicIdPartition(NamedTuple):
    """Kafka's TopicIdPartition. topic_id: 16 bytes."""

    topic_id: bytes
    topic: str
    partition: int

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @override
    def __str__(self) -> str:
        return f"{uuid_text(self.topic_id)}:{self.topic}-{self.partition}"


class RemoteLogSegmentMetadataRecord(NamedTuple):
    """Record that introduces a segment (api key 0). Segments in later states are stored in this form, too.

    segment_id: 16 bytes. end_offset: inclusive. leader_epochs: at least one.
    nested: unknown tagged fields of TopicIdPartition, RemoteLogSegmentId and each leader epoch, in this order; empty if there are none.
    """

    partition: TopicIdPartition
    segment_id: bytes
    start_offset: int
    end_offset: int
    broker_id: int
    max_timestamp_ms: int
    event_timestamp_ms: int
    leader_epochs: tuple[EpochEntry, ...]
    size_bytes: int
    custom_metadata: bytes | None = None
    state: SegmentState = SegmentState.COPY_SEGMENT_STARTED
    txn_index_empty: bool = False
    tags: TaggedFields = ()
    nested: tuple[TaggedFields, ...] = ()

    @property
    def id(self) -> str:
        return encode_segment_id(self.segment_id)

    def with_update(self, update: RemoteLogSegmentMetadataUpdateRecord) -> RemoteLogSegmentMetadataRecord:
        """Return the segment after an update (Kafka's createWithUpdates). Custom metadata is replaced, even by None."""
        return self._replace(
            broker_id=update.broker_id,
            event_timestamp_ms=update.event_timestamp_ms,
            custom_metadata=update.custom_metadata,
            state=update.state,
        )


class RemoteLogSegmentMetadataUpdateRecord(NamedTuple):
    """Record that moves a segment to its next state (api key 1)."""

    partition: TopicIdPartition
    segment_id: bytes
    broker_id: int
    event_timestamp_ms: int
    state: SegmentState
    custom_metadata: bytes | None = None
    tags: TaggedFields = ()
    nested: tuple[TaggedFields, ...] = ()

    @property
    def id(self) -> str:
        return encode_segment_id(self.segment_id)


class RemotePartitionDeleteMetadataRecord(NamedTuple):
    """Record that reports the deletion of a partition's tier (api key 2)."""

    partition: TopicIdPartition
    broker_id: int
    event_timestamp_ms: int
    state: PartitionDeleteState
    tags: TaggedFields = ()
    nested: tuple[TaggedFields, ...] = ()


MetadataRecord = RemoteLogSegmentMetadataRecord | RemoteLogSegmentMetadataUpdateRecord | RemotePartitionDeleteMetadataRecord


def epoch_start_offsets(segment: RemoteLogSegmentMetadataRecord) -> list[tuple[int, int]]:
    entries = segment.leader_epochs
    if len(entries) == 1:
        return [(entries[0].epoch, entries[0].start_offset)]
    return sorted({entry.epoch: entry.start_offset for entry in entries}.items())


def segment_lineage(segment: RemoteLogSegmentMetadataRecord) -> tuple[EpochEntry, ...]:
    """With the first offset of each epoch in the segment, ascending."""
    return tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in epoch_start_offsets(segment))


class SegmentReadRange(NamedTuple):
    """A broker reads ``first`` to ``last``, both inclusive."""

    segment: RemoteLogSegmentMetadataRecord
    first: int
    last: int


@dataclass(frozen=True)
class BrokerView:
    """Segments that readers of one partition find according to the brokers' metadata.

    links: ascending.
    lineage: with which the segments were looked up.
    metadata_offset: of the last applied record; -1 if there is none.
    """

    links: Sequence[SegmentReadRange]
    lineage: tuple[EpochEntry, ...]
    metadata_offset: int = -1


@dataclass(frozen=True)
class ExistingAndMissingTopicIds:
    """A cluster's answers. Ids with any other answer are left out."""

    cluster_id: str
    missing: tuple[TopicId, ...]
    present: tuple[TopicId, ...]


@dataclass(frozen=True)
class ClusterTopicIds:
    cluster_id: str
    topic_ids: Mapping[str, TopicId]
