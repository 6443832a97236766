"""Metadata against objects, in both directions, while brokers go on: metadata, LIST, metadata again.

What was replaced, tiered or deleted between the two looks is no finding. A broker names a segment in its metadata before it uploads
the first object, so that an object which a later look does not know belongs to nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from compactor.bootstrap import Tier
from compactor.metadata_topic.codec import RemoteLogSegmentMetadataRecord, uuid_bytes
from compactor.metadata_topic.kept import FoldedPartition
from compactor.model.ids import TopicPartition
from compactor.model.segment import SegmentState
from compactor.tier.ports import ListedObject

SNAPSHOT_SLACK_MS = 3_600_000
"""Objects that are not older than a snapshot by so much are not judged by it."""


@dataclass(frozen=True)
class Nobodys:
    """An object that no metadata names. ``finished``: its segment's deletion is recorded as finished; else nothing ever named it."""

    listed: ListedObject
    finished: bool


@dataclass(frozen=True)
class PartitionObjects:
    """``readable``: finished at both looks. ``there``: by segment id, the parts that LIST has. ``folded``: the later look."""

    folded: FoldedPartition
    readable: Sequence[RemoteLogSegmentMetadataRecord]
    there: dict[str, dict[str, ListedObject]]
    orphans: Sequence[Nobodys]
    strangers: Sequence[ListedObject]

    def missing(self, segment: RemoteLogSegmentMetadataRecord, parts: frozenset[str]) -> list[str]:
        """What LIST lacks of a segment."""
        return sorted(parts - self.there.get(segment.id, {}).keys())


def look(opened: Tier, name: TopicPartition) -> PartitionObjects:
    """Reads only. Raises BadData where the metadata topic cannot be understood, StoreError, UsageError for a partition that went."""
    brokers = opened.metadata
    brokers.refresh(within_s=0.0)
    before = brokers.folded(name)
    states = {segment.segment_id: segment.state for segment in before.cache.list_all()}
    gone = set(before.cache.finished)
    listed = list(opened.ports.layout.list(name))
    brokers.refresh(within_s=0.0)
    folded = brokers.folded(name)
    finished = SegmentState.COPY_SEGMENT_FINISHED
    readable = [one for one in folded.cache.list_all() if one.state is finished and states.get(one.segment_id) is finished]
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
            orphans.append(Nobodys(one, raw_id in gone))
    return PartitionObjects(folded, sorted(readable, key=lambda one: one.start_offset), there, orphans, strangers)
