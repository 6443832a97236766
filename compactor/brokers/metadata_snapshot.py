"""Metadata snapshots: metadata of a broker-managed tier in the control store, for readers that reach the bucket but no broker.

Keys are ``metadata-snapshots/<time>.json.z``. The snapshot with the latest time is used; snapshots are never changed.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ValidationError

from checkpoint.lineage import EpochEntry
from compactor.brokers.metadata_topic.chain import broker_view
from compactor.brokers.metadata_topic.codec import TopicIdPartition, uuid_bytes
from compactor.brokers.metadata_topic.persisted_state import FoldedPartitionMetadata
from compactor.brokers.metadata_topic.state_serde import STATE_FORMAT, decode_folded_partition, encode_folded_partition
from compactor.brokers.view import METADATA_MAX_AGE_S, BrokerMetadata, PartitionMetadataVersion, TopicStatus, matching_topics
from compactor.constants import TopicId
from compactor.errors import AlreadyExists, BadData, UsageError
from compactor.model.base import StrictFrozenModel
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectStore

PREFIX = "metadata-snapshots/"
_ZLIB_LEVEL = 6
SnapshotObjectKey = str
"""Key of the object, in the control store, that holds a metadata snapshot."""


class PartitionSnapshot(StrictFrozenModel):
    """Segments of one partition in a metadata snapshot.

    folded: all segments in all states, packed by metadata_topic.state_serde and encoded as base64.
    lineage, start_offset, end_offset (inclusive): derived from ``folded``, for readers without this program.
    log_start, last_stable: log start offset and last stable offset; -1 if unknown.
    """

    partition: int
    folded: str
    lineage: tuple[EpochEntry, ...]
    start_offset: int
    end_offset: int
    log_start: int = -1
    last_stable: int = -1


class TopicSnapshot(StrictFrozenModel):
    """A topic in a metadata snapshot. chosen: names of the settings that are set on the topic itself instead of the broker's defaults."""

    topic: str
    topic_id: TopicId
    settings: dict[str, str]
    partitions: tuple[PartitionSnapshot, ...]
    chosen: tuple[str, ...] = ()


class TierMetadataSnapshot(StrictFrozenModel):
    """Metadata of a whole tier at one time.

    url, layout: URL and layout of the tier.
    taken_ms: when the snapshot was taken, in milliseconds since 1970.
    """

    type: Literal["metadata_snapshot"] = "metadata_snapshot"
    format: int
    taken_ms: int
    cluster_id: str
    url: str
    layout: str
    topics: tuple[TopicSnapshot, ...]

    @property
    def segment_count(self) -> int:
        """Return the number of segments of all partitions, in all states."""
        return sum(len(_decode_partition_snapshot(topic, one).cache.segments) for topic in self.topics for one in topic.partitions)


def take_metadata_snapshot(brokers: BrokerMetadata, *, url: str, layout: str, now_ms: int) -> TierMetadataSnapshot:
    """Return a snapshot of all tiered partitions as they are now."""
    names = brokers.list_topic_partitions()
    topics = []
    for topic in sorted({name.topic for name in names}):
        now = brokers.topic_status(topic)
        partitions = tuple(_take_partition_snapshot(brokers, name, now) for name in names if name.topic == topic)
        topic_id = brokers.topic_ids()[topic]
        chosen = tuple(name for name in now.settings if name in now.chosen)
        topics.append(TopicSnapshot(topic=topic, topic_id=topic_id, settings=dict(now.settings), partitions=partitions, chosen=chosen))
    return TierMetadataSnapshot(
        format=STATE_FORMAT, taken_ms=now_ms, cluster_id=brokers.cluster_id(), url=url, layout=layout, topics=tuple(topics)
    )


def _take_partition_snapshot(brokers: BrokerMetadata, partition: TopicPartition, topic_status: TopicStatus) -> PartitionSnapshot:
    """Return the snapshot of one partition."""
    folded = brokers.partition_metadata_from_records(partition)
    view = broker_view(folded.cache, partition)
    return PartitionSnapshot(
        partition=partition.partition,
        folded=base64.b64encode(encode_folded_partition(folded.cache, folded.findings)).decode(),
        lineage=view.lineage,
        start_offset=view.links[0].first if view.links else 0,
        end_offset=view.links[-1].last if view.links else -1,
        log_start=topic_status.log_starts.get(partition.partition, -1),
        last_stable=topic_status.last_stable.get(partition.partition, -1),
    )


def save_metadata_snapshot(store: ObjectStore, snapshot: TierMetadataSnapshot) -> SnapshotObjectKey:
    """Create the snapshot's object and return its key. Raises StoreError, or UsageError if the key holds another snapshot."""
    data = zlib.compress(snapshot.model_dump_json().encode(), _ZLIB_LEVEL)
    key = f"{PREFIX}{snapshot.taken_ms:020d}.json.z"
    try:
        store.create(key, data)
    except AlreadyExists:
        if store.get(key) != data:
            raise UsageError(f"{store.url}/{key} exists already", hint="Run the command again") from None
    return key


def read_latest_metadata_snapshot(store: ObjectStore) -> TierMetadataSnapshot:
    """Read the latest snapshot. Raises UsageError if there is none, and BadData if it cannot be read."""
    key = max((info.key for info in store.list(PREFIX)), default="")
    if not key:
        raise UsageError(
            f"no broker is named, and there is no metadata snapshot in {store.url}",
            hint="Set bootstrap_servers under [kafka], or let `topics snapshot` run where brokers can be reached",
        )
    where = f"{store.url}/{key}"
    try:
        snapshot = TierMetadataSnapshot.model_validate_json(zlib.decompress(store.get(key)))
    except (zlib.error, ValidationError) as error:
        raise BadData("it is not a metadata snapshot, or it is damaged", segment=where, hint="Run `topics snapshot` again") from error
    if snapshot.format != STATE_FORMAT:
        message = f"it is of format {snapshot.format}, this program knows {STATE_FORMAT}"
        raise BadData(message, segment=where, hint="Run `topics snapshot` again, with this version")
    return snapshot


class SnapshotBrokerMetadata:
    """Broker metadata from a snapshot. Implements BrokerMetadata and never changes."""

    def __init__(self, snapshot: TierMetadataSnapshot, patterns: Sequence[str], source_name: str) -> None:
        """Select the topics of the snapshot whose names ``patterns`` (regular expressions) match. Raises UsageError if there are no
        patterns.

        :param source_name: name of the metadata source, for messages.
        """
        self.source_name = source_name
        self.taken_ms = snapshot.taken_ms
        self._snapshot = snapshot
        wanted = set(matching_topics(patterns, [topic.topic for topic in snapshot.topics]))
        self._topics = {topic.topic: topic for topic in snapshot.topics if topic.topic in wanted}
        self._partitions = {
            TopicPartition(topic.topic, one.partition): (topic, one) for topic in self._topics.values() for one in topic.partitions
        }

    def cluster_id(self) -> str:
        return self._snapshot.cluster_id

    def refresh(self, *, max_age_s: float = METADATA_MAX_AGE_S, topics_max_age_s: float | None = None) -> None:
        """Do nothing: a snapshot never changes."""

    def partition_metadata_versions(self) -> Mapping[TopicPartition, PartitionMetadataVersion]:
        return {
            name: PartitionMetadataVersion(uuid_bytes(topic.topic_id), self.partition_metadata_from_records(name).cache.applied)
            for name, (topic, _) in self._partitions.items()
        }

    def list_topic_partitions(self) -> list[TopicPartition]:
        return sorted(self._partitions)

    def topic_ids(self) -> Mapping[str, TopicId]:
        return {name: topic.topic_id for name, topic in self._topics.items()}

    def topic_status(self, name: str) -> TopicStatus:
        topic = self._topics[name]
        starts = {one.partition: one.log_start for one in topic.partitions if one.log_start >= 0}
        stable = {one.partition: one.last_stable for one in topic.partitions if one.last_stable >= 0}
        chosen = {name: topic.settings[name] for name in topic.chosen if name in topic.settings}
        return TopicStatus(uuid_bytes(topic.topic_id), starts, stable, topic.settings, chosen)

    def partition_metadata_from_records(self, partition: TopicPartition) -> FoldedPartitionMetadata:
        if partition not in self._partitions:
            raise UsageError(f"the tier holds no partition {partition}", hint="`topics` lists what it holds")
        return _decode_partition_snapshot(*self._partitions[partition])

    def is_metadata_incomplete(self) -> bool:
        """Return False: a snapshot is taken from complete metadata only."""
        return False

    def deleted_topic_partitions_with_segments(self) -> list[TopicIdPartition]:
        """Return an empty list: a snapshot holds only topics that existed when it was taken."""
        return []

    def cluster_problem(self) -> None:
        """Return None: nothing is compacted from a snapshot."""


def _decode_partition_snapshot(topic: TopicSnapshot, snapshot: PartitionSnapshot) -> FoldedPartitionMetadata:
    """Decode the segments of a partition snapshot."""
    name = TopicIdPartition(uuid_bytes(topic.topic_id), topic.topic, snapshot.partition)
    cache, findings = decode_folded_partition(base64.b64decode(snapshot.folded), name)
    return FoldedPartitionMetadata(cache, findings, len(findings))
