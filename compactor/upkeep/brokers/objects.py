"""Comparison of metadata and objects of a broker-managed tier, in both directions, while brokers continue to write.

The metadata is read before and after LIST. Segments that were replaced, tiered or deleted in between are ignored. A broker records a
segment before it uploads the first object, so an object that the later metadata does not contain belongs to no segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from compactor.access.tier import Tier
from compactor.brokers.metadata_topic.codec import RemoteLogSegmentMetadataRecord, uuid_bytes
from compactor.brokers.metadata_topic.persisted_state import FoldedPartitionMetadata
from compactor.model.ids import TopicPartition
from compactor.model.segment import SegmentState
from compactor.tier.ports import ListedObject

SNAPSHOT_SLACK_MS = 3_600_000
"""With a metadata snapshot, only objects older than the snapshot by more than this are judged by it."""


@dataclass(frozen=True)
class OrphanObject:
    """An object that no metadata names. finished: whether brokers recorded that the deletion of its segment is finished; if False, no
    metadata ever named the segment.
    """

    listed: ListedObject
    finished: bool


@dataclass(frozen=True)
class PartitionObjectsAndMetadata:
    """Metadata and objects of one partition.

    folded: the partition's folded metadata, read after LIST.
    readable: segments that were complete both before and after LIST.
    there: listed objects by segment id and kind of file.
    orphans: objects of segments that no metadata names.
    strangers: objects whose names are not those of the layout.
    """

    folded: FoldedPartitionMetadata
    readable: Sequence[RemoteLogSegmentMetadataRecord]
    there: dict[str, dict[str, ListedObject]]
    orphans: Sequence[OrphanObject]
    strangers: Sequence[ListedObject]

    def missing_file_kinds_of_segment(self, segment: RemoteLogSegmentMetadataRecord, expected_parts: frozenset[str]) -> list[str]:
        """Return those kinds of file in ``expected_parts`` for which the listing of the store has no file of this segment."""
        return sorted(expected_parts - self.there.get(segment.id, {}).keys())


def list_partition_objects_and_metadata(tier: Tier, partition: TopicPartition) -> PartitionObjectsAndMetadata:
    """Read metadata and list objects of a partition. Read-only.

    Raises StoreError, BadData if the metadata topic is corrupt, and UsageError if the partition no longer exists.
    """
    brokers = tier.broker_metadata
    brokers.refresh(max_age_s=0.0)
    before = brokers.partition_metadata_from_records(partition)
    states = {segment.segment_id: segment.state for segment in before.cache.list_segments()}
    gone = set(before.cache.finished)
    listed = list(tier.ports.layout.list_objects(partition))
    brokers.refresh(max_age_s=0.0)
    folded = brokers.partition_metadata_from_records(partition)
    finished = SegmentState.COPY_SEGMENT_FINISHED
    readable = [one for one in folded.cache.list_segments() if one.state is finished and states.get(one.segment_id) is finished]
    there: dict[str, dict[str, ListedObject]] = defaultdict(dict)
    orphans, strangers = [], []
    latest_ms = brokers.taken_ms - SNAPSHOT_SLACK_MS if brokers.taken_ms >= 0 else None
    for one in listed:
        if not one.segment_id:
            strangers.append(one)
            continue
        there[one.segment_id][one.kind] = one
        raw_id = uuid_bytes(one.segment_id)
        known = raw_id in states or raw_id in folded.cache.segments
        if not known and (latest_ms is None or one.modified_ms < latest_ms):
            orphans.append(OrphanObject(one, raw_id in gone))
    return PartitionObjectsAndMetadata(folded, sorted(readable, key=lambda one: one.start_offset), there, orphans, strangers)
