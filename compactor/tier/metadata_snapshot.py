"""Metadata snapshots: a broker tier's metadata in the control store, for readers who have the bucket and no broker.

``metadata-snapshots/<time>.json``, numbered by the time at which they were taken; the highest counts, and none is changed.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ValidationError

from checkpoint.lineage import EpochEntry
from compactor.errors import AlreadyExists, BadData, UsageError
from compactor.metadata_topic.codec import TopicIdPartition, uuid_bytes
from compactor.metadata_topic.kept import FoldedPartition
from compactor.metadata_topic.packed import FORMAT, pack, unpack
from compactor.model.base import Value
from compactor.model.ids import TopicPartition
from compactor.storage.port import ObjectStore
from compactor.tier.brokers import FRESH_S, BrokersMetadata, Standing, TopicNow, effective, matching

PREFIX = "metadata-snapshots/"
_LEVEL = 6


class PartitionSnapshot(Value):
    """``folded``: every segment in every state, as compactor.metadata_topic.packed has it, as base64. -1: not known.

    ``lineage``, ``start_offset`` and ``end_offset`` (inclusive) are what it comes to, for whoever reads this without this program.
    """

    partition: int
    folded: str
    lineage: tuple[EpochEntry, ...]
    start_offset: int
    end_offset: int
    log_start: int = -1
    last_stable: int = -1


class TopicSnapshot(Value):
    """``chosen``: which of the settings are set on the topic itself, and are policy."""

    topic: str
    topic_id: str
    settings: dict[str, str]
    partitions: tuple[PartitionSnapshot, ...]
    chosen: tuple[str, ...] = ()


class MetadataSnapshot(Value):
    """``url`` and ``layout``: of the tier that it describes."""

    type: Literal["metadata_snapshot"] = "metadata_snapshot"
    format: int
    taken_ms: int
    cluster_id: str
    url: str
    layout: str
    topics: tuple[TopicSnapshot, ...]

    @property
    def segments(self) -> int:
        """Readable ones and others."""
        return sum(len(_folded(topic, one).cache.segments) for topic in self.topics for one in topic.partitions)


def taken(brokers: BrokersMetadata, *, url: str, layout: str, now_ms: int) -> MetadataSnapshot:
    """Of the partitions that the source names, as they are now."""
    names = brokers.names()
    topics = []
    for topic in sorted({name.topic for name in names}):
        now = brokers.topic(topic)
        partitions = tuple(_partition(brokers, name, now) for name in names if name.topic == topic)
        topic_id = brokers.topic_ids()[topic]
        chosen = tuple(name for name in now.settings if name in now.chosen)
        topics.append(TopicSnapshot(topic=topic, topic_id=topic_id, settings=dict(now.settings), partitions=partitions, chosen=chosen))
    return MetadataSnapshot(format=FORMAT, taken_ms=now_ms, cluster_id=brokers.cluster_id(), url=url, layout=layout, topics=tuple(topics))


def _partition(brokers: BrokersMetadata, name: TopicPartition, now: TopicNow) -> PartitionSnapshot:
    folded = brokers.folded(name)
    view = effective(folded.cache, name)
    return PartitionSnapshot(
        partition=name.partition,
        folded=base64.b64encode(pack(folded.cache, folded.findings)).decode(),
        lineage=view.lineage,
        start_offset=view.links[0].first if view.links else 0,
        end_offset=view.links[-1].last if view.links else -1,
        log_start=now.log_starts.get(name.partition, -1),
        last_stable=now.last_stable.get(name.partition, -1),
    )


def keep(store: ObjectStore, snapshot: MetadataSnapshot) -> str:
    """Creates it; returns its key. Raises StoreError."""
    data = zlib.compress(snapshot.model_dump_json().encode(), _LEVEL)
    key = f"{PREFIX}{snapshot.taken_ms:020d}.json.z"
    try:
        store.create(key, data)
    except AlreadyExists:
        if store.get(key) != data:
            raise UsageError(f"{store.url}/{key} exists already", hint="Run the command again") from None
    return key


def latest(store: ObjectStore) -> MetadataSnapshot:
    """Raises UsageError where there is none, BadData for one that cannot be read."""
    key = max((info.key for info in store.list(PREFIX)), default="")
    if not key:
        raise UsageError(
            f"no broker is named, and there is no metadata snapshot in {store.url}",
            hint="Set bootstrap_servers under [kafka], or let `topics snapshot` run where brokers can be reached",
        )
    where = f"{store.url}/{key}"
    try:
        snapshot = MetadataSnapshot.model_validate_json(zlib.decompress(store.get(key)))
    except (zlib.error, ValidationError) as error:
        raise BadData("it is no metadata snapshot, or it is damaged", segment=where, hint="Run `topics snapshot` again") from error
    if snapshot.format != FORMAT:
        said = f"it is of format {snapshot.format}, this program knows {FORMAT}"
        raise BadData(said, segment=where, hint="Run `topics snapshot` again, with this version")
    return snapshot


class SnapshotBrokers:
    """BrokersMetadata of a snapshot: it never changes."""

    def __init__(self, snapshot: MetadataSnapshot, patterns: Sequence[str], where: str) -> None:
        """Raises UsageError where no topic is named."""
        self.where = where
        self.taken_ms = snapshot.taken_ms
        self._snapshot = snapshot
        wanted = set(matching(patterns, [topic.topic for topic in snapshot.topics]))
        self._topics = {topic.topic: topic for topic in snapshot.topics if topic.topic in wanted}
        self._partitions = {
            TopicPartition(topic.topic, one.partition): (topic, one) for topic in self._topics.values() for one in topic.partitions
        }

    def cluster_id(self) -> str:
        return self._snapshot.cluster_id

    def refresh(self, *, within_s: float = FRESH_S, topics_within_s: float | None = None) -> None:
        """Nothing can have changed."""

    def standings(self) -> Mapping[TopicPartition, Standing]:
        return {
            name: Standing(uuid_bytes(topic.topic_id), self.folded(name).cache.applied) for name, (topic, _) in self._partitions.items()
        }

    def names(self) -> list[TopicPartition]:
        return sorted(self._partitions)

    def topic_ids(self) -> Mapping[str, str]:
        return {name: topic.topic_id for name, topic in self._topics.items()}

    def topic(self, name: str) -> TopicNow:
        topic = self._topics[name]
        starts = {one.partition: one.log_start for one in topic.partitions if one.log_start >= 0}
        stable = {one.partition: one.last_stable for one in topic.partitions if one.last_stable >= 0}
        chosen = {name: topic.settings[name] for name in topic.chosen if name in topic.settings}
        return TopicNow(uuid_bytes(topic.topic_id), starts, stable, topic.settings, chosen)

    def folded(self, name: TopicPartition) -> FoldedPartition:
        if name not in self._partitions:
            raise UsageError(f"the tier holds no partition {name}", hint="`topics` lists what it holds")
        return _folded(*self._partitions[name])

    def incomplete(self) -> bool:
        """What it lacks, nobody can tell any more."""
        return False

    def elsewhere(self) -> list[TopicIdPartition]:
        """A snapshot has the topics as they were."""
        return []

    def problem(self) -> str:
        """Nobody compacts by a snapshot."""
        return ""


def _folded(topic: TopicSnapshot, one: PartitionSnapshot) -> FoldedPartition:
    name = TopicIdPartition(uuid_bytes(topic.topic_id), topic.topic, one.partition)
    cache, findings = unpack(base64.b64decode(one.folded), name)
    return FoldedPartition(cache, findings, len(findings))
