"""Metadata of a broker-managed tier, read from the metadata topic, or from a snapshot of it in the control store for readers that reach no
broker. A topic that was created again has another topic id; only the cluster knows the current one.
"""

from __future__ import annotations

import base64
import logging
import re
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from pydantic import ValidationError

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers.cache import (
    STATE_FORMAT,
    FoldedPartitionMetadata,
    TieredPartitionSegmentCounts,
    decode_folded_partition,
    encode_folded_partition,
)
from compactor.adapters.brokers.chain import broker_view
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.kafka_client import NoSuchTopic
from compactor.constants import TopicId
from compactor.errors import AlreadyExists, BadData, Unavailable, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import TopicIdPartition, uuid_bytes, uuid_text
from compactor.model.segment import StrictFrozenModel
from compactor.storage.port import ObjectStore

if TYPE_CHECKING:
    from compactor.adapters.brokers.cluster import ClusterProblem


CATCH_UP_TIMEOUT_S = 30.0
METADATA_MAX_AGE_S = 1.0
"""A fold that is no older is not read on: one command asks about many partitions."""
TOPICS_MAX_AGE_S = 15.0
"""What the cluster says of topics may be so old where a round over one of thousands of partitions asks: it is asked about all of them."""
_MAX_TOPICS_SHOWN = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TopicStatus:
    """A topic as the cluster describes it now.

    log_starts, last_stable: offsets by partition, for partitions that have a leader.
    settings: those that this user may read. chosen: those set on the topic itself, which precede this program's configuration.
    """

    topic_id: bytes
    log_starts: Mapping[int, int] = field(default_factory=dict)
    last_stable: Mapping[int, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)


class PartitionMetadataVersion(NamedTuple):
    """Version of a partition's metadata. applied: offset of its last record."""

    topic_id: bytes
    applied: int


class ClusterQueries(Protocol):
    """Queries to the Kafka cluster. All methods raise Unavailable or Refused."""

    def cluster_id(self) -> str: ...

    def topic_statuses(self, topics: Sequence[str]) -> Mapping[str, TopicStatus]: ...

    def cluster_problem(self) -> ClusterProblem | None: ...


class BrokerMetadata(Protocol):
    """Metadata of a broker-managed tier. All methods raise Unavailable, Refused or UsageError."""

    @property
    def source_name(self) -> str: ...

    @property
    def taken_ms(self) -> int:
        """Time of the snapshot, -1 if the metadata is read live."""

    def cluster_id(self) -> str: ...

    def refresh(self, *, max_age_s: float = METADATA_MAX_AGE_S, topics_max_age_s: float | None = None) -> None:
        """Read what is older than these ages. topics_max_age_s: None for ``max_age_s``."""

    def partition_metadata_versions(self) -> Mapping[TopicPartition, PartitionMetadataVersion]:
        """Versions as of the last read. Makes no request."""

    def list_topic_partitions(self) -> list[TopicPartition]: ...

    def topic_ids(self) -> Mapping[str, TopicId]:
        """Ids as text (Kafka's Uuid.toString)."""

    def topic_status(self, name: str) -> TopicStatus:
        """Raises UsageError if the cluster has no such topic."""

    def partition_metadata_from_records(self, partition: TopicPartition) -> FoldedPartitionMetadata:
        """Segments in all states. Raises UsageError if the tier has no such partition, BadData if a record is corrupt."""

    def is_metadata_incomplete(self) -> bool:
        """Return whether records are known to be missing, so that an object without metadata may still belong to a segment."""

    def deleted_partitions(self) -> list[TopicIdPartition]:
        """Partitions of deleted topics whose tiered segments still exist."""

    def cluster_problem(self) -> ClusterProblem | None:
        """Return why nothing may be compacted, or None. Cached for TOPICS_MAX_AGE_S."""


def matching_topics(patterns: Sequence[str], topics: Iterable[str]) -> list[str]:
    """Topics that a regular expression matches in full, sorted. Raises UsageError if there is no pattern."""
    there = sorted(set(topics))
    found = {topic for topic in there for pattern in patterns if re.fullmatch(pattern, topic)}
    hint = (
        f"tiered are {', '.join(there[:_MAX_TOPICS_SHOWN])}{' and others' * (len(there) > _MAX_TOPICS_SHOWN)}"
        if there
        else "no topic is tiered there"
    )
    if not patterns:
        raise UsageError("topics under [kafka] is empty, so that no topic is read", hint=f"Name whole regular expressions; {hint}")
    for pattern in patterns:
        if not any(re.fullmatch(pattern, topic) for topic in there):
            _log.warning("topics under [kafka]: %s matches no tiered topic; %s", pattern, hint)
    return sorted(found)


class LiveBrokerMetadata:
    """Broker metadata read from the metadata topic. Thread-safe."""

    taken_ms = -1

    def __init__(self, followed: FoldingMetadataTopicReader, cluster: ClusterQueries, patterns: Sequence[str], source_name: str) -> None:
        self.source_name = source_name
        self.followed = followed
        self._cluster = cluster
        self._patterns = patterns
        self._lock = threading.RLock()
        self._read_at = self._asked_at = float("-inf")
        self._folds = -1
        self._tiered: set[str] | None = None
        self._wanted: list[str] = []
        self._topics: dict[str, TopicStatus] = {}
        self._topic_ids: dict[str, TopicId] = {}
        self._versions: dict[TopicPartition, PartitionMetadataVersion] = {}
        self._deleted_topic_partitions: list[TopicIdPartition] = []
        self._reported_losses: set[int] = set()
        self._problem: ClusterProblem | None = None
        self._problem_at = float("-inf")
        self._leaderless: frozenset[int] = frozenset()

    def cluster_id(self) -> str:
        return self._cluster.cluster_id()

    def refresh(self, *, max_age_s: float = METADATA_MAX_AGE_S, topics_max_age_s: float | None = None) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._read_at <= max_age_s:
                return
            self._read_to_end()
            folds = self.followed.folded_state_version
            anew = now - self._asked_at > (max_age_s if topics_max_age_s is None else topics_max_age_s)
            if anew or folds != self._folds:
                tiered = self.followed.tiered_partitions()
                self._refresh_topic_descriptions({one.partition.topic for one in tiered}, force=anew)
                self._separate_deleted(tiered)
                self._folds = folds
            self._read_at = time.monotonic()

    def _refresh_topic_descriptions(self, topic_names: set[str], *, force: bool) -> None:
        # Makes no request if the set of tiered topics is that of the last request, unless ``force`` is set.
        other = topic_names != self._tiered
        if other or force:
            wanted = matching_topics(self._patterns, topic_names) if other else self._wanted
            self._topics = dict(self._cluster.topic_statuses(wanted))
            self._topic_ids = {topic: uuid_text(found.topic_id) for topic, found in self._topics.items()}
            self._tiered, self._wanted, self._asked_at = topic_names, wanted, time.monotonic()

    def _separate_deleted(self, partitions: Sequence[TieredPartitionSegmentCounts]) -> None:
        wanted = set(self._wanted)
        now = {topic: found.topic_id for topic, found in self._topics.items()}
        ours = [one for one in partitions if one.partition.topic in wanted]
        here = [one for one in ours if now.get(one.partition.topic) == one.partition.topic_id]
        self._versions = {one.partition.topic_partition: PartitionMetadataVersion(one.partition.topic_id, one.applied) for one in here}
        self._deleted_topic_partitions = [one.partition for one in ours if now.get(one.partition.topic) != one.partition.topic_id]

    def list_topic_partitions(self) -> list[TopicPartition]:
        return sorted(self.partition_metadata_versions())

    def partition_metadata_versions(self) -> Mapping[TopicPartition, PartitionMetadataVersion]:
        with self._lock:
            self._ensure_read()
            return self._versions

    def topic_ids(self) -> Mapping[str, TopicId]:
        with self._lock:
            self._ensure_read()
            return self._topic_ids

    def topic_status(self, name: str) -> TopicStatus:
        with self._lock:
            self._ensure_read()
            found = self._topics.get(name)
        if found is None:
            raise UsageError(f"the cluster has no topic {name} that topics under [kafka] names", hint="`topics` lists what the tier holds")
        return found

    def partition_metadata_from_records(self, partition: TopicPartition) -> FoldedPartitionMetadata:
        with self._lock:
            self._ensure_read()
            status = self._versions.get(partition)
            if status is None:
                raise _unknown_partition_error(partition)
            found = self.followed.partition_metadata_from_records(status.topic_id, partition.partition)
        if found is None:
            raise _unknown_partition_error(partition)
        return found

    def is_metadata_incomplete(self) -> bool:
        with self._lock:
            self._ensure_read()
            holes = any(reached.missing or reached.stopped for reached in self.followed.fold_positions().values())
            return holes or bool(self.followed.leaderless_metadata_partitions)

    def deleted_partitions(self) -> list[TopicIdPartition]:
        with self._lock:
            self._ensure_read()
            return list(self._deleted_topic_partitions)

    def cluster_problem(self) -> ClusterProblem | None:
        with self._lock:
            if time.monotonic() - self._problem_at > TOPICS_MAX_AGE_S or self._problem:
                self._problem, self._problem_at = self._cluster.cluster_problem(), time.monotonic()
            return self._problem

    def _ensure_read(self) -> None:
        if self._read_at == float("-inf"):
            self.refresh()

    def _read_to_end(self) -> None:
        while True:
            try:
                progress = self.followed.fold_to_end(CATCH_UP_TIMEOUT_S)
            except NoSuchTopic as error:
                problem = self._cluster.cluster_problem()
                if problem is not None and problem.cause == "metadata-manager":  # its brokers never create the topic
                    raise NoSuchTopic(f"there is no {self.source_name}: {problem.message}", hint=problem.hint) from error
                raise
            if not any(left > 0 for left in progress.unread.values()):
                break
            if not progress.records:
                raise Unavailable(f"{self.source_name} is not read to its end within {CATCH_UP_TIMEOUT_S:g} s", hint="Try again")
        leaderless = self.followed.leaderless_metadata_partitions
        for number in sorted(leaderless - self._leaderless):
            message = "partition %d of %s has no leader: the partitions that it describes are delayed, the others continue"
            _log.warning(message, number, self.source_name)
        self._leaderless = leaderless
        for number, reached in self.followed.fold_positions().items():
            if reached.missing and number not in self._reported_losses:
                self._reported_losses.add(number)
                message = "%s has lost what was before offset %d of its partition %d: segments may be missing"
                _log.warning(message, self.source_name, reached.missing, number)


def _unknown_partition_error(partition: TopicPartition) -> UsageError:
    return UsageError(f"the tier holds no partition {partition}", hint="`topics` lists what it holds")


# Metadata snapshots: ``metadata-snapshots/<time>.json.z`` in the control store. The one with the latest time is used; none is ever changed.


PREFIX = "metadata-snapshots/"
_ZLIB_LEVEL = 6


class PartitionSnapshot(StrictFrozenModel):
    """Segments of one partition in a metadata snapshot.

    folded: ``encode_folded_partition`` as base64.
    lineage, start_offset, end_offset (inclusive): derived from it, for readers without this program.
    log_start, last_stable: -1 if unknown.
    """

    partition: int
    folded: str
    lineage: tuple[EpochEntry, ...]
    start_offset: int
    end_offset: int
    log_start: int = -1
    last_stable: int = -1


class TopicSnapshot(StrictFrozenModel):
    """A topic in a metadata snapshot. chosen: settings that are set on the topic itself."""

    topic: str
    topic_id: TopicId
    settings: dict[str, str]
    partitions: tuple[PartitionSnapshot, ...]
    chosen: tuple[str, ...] = ()


class TierMetadataSnapshot(StrictFrozenModel):
    """Metadata of a whole tier at one time."""

    type: Literal["metadata_snapshot"] = "metadata_snapshot"
    format: int
    taken_ms: int
    cluster_id: str
    url: str
    layout: str
    topics: tuple[TopicSnapshot, ...]

    @property
    def segment_count(self) -> int:
        return sum(len(_decode_partition_snapshot(topic, one).cache.segments) for topic in self.topics for one in topic.partitions)


def take_metadata_snapshot(brokers: BrokerMetadata, *, url: str, layout: str, now_ms: int) -> TierMetadataSnapshot:
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


def save_metadata_snapshot(store: ObjectStore, snapshot: TierMetadataSnapshot) -> str:
    """Create the snapshot's object and return its key. Raises UsageError if the key holds another snapshot."""
    data = zlib.compress(snapshot.model_dump_json().encode(), _ZLIB_LEVEL)
    key = f"{PREFIX}{snapshot.taken_ms:020d}.json.z"
    try:
        store.create(key, data)
    except AlreadyExists:
        if store.get(key) != data:
            raise UsageError(f"{store.url}/{key} exists already", hint="Run the command again") from None
    return key


def read_latest_metadata_snapshot(store: ObjectStore) -> TierMetadataSnapshot:
    """Raises UsageError if there is no snapshot, BadData if it cannot be read."""
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
    def __init__(self, snapshot: TierMetadataSnapshot, patterns: Sequence[str], source_name: str) -> None:
        """Raise UsageError if ``patterns`` (regular expressions) match no topic."""
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

    def refresh(self, *, max_age_s: float = METADATA_MAX_AGE_S, topics_max_age_s: float | None = None) -> None: ...

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
        """A snapshot is taken from complete metadata only."""
        return False

    def deleted_partitions(self) -> list[TopicIdPartition]:
        return []

    def cluster_problem(self) -> None: ...


def _decode_partition_snapshot(topic: TopicSnapshot, snapshot: PartitionSnapshot) -> FoldedPartitionMetadata:
    name = TopicIdPartition(uuid_bytes(topic.topic_id), topic.topic, snapshot.partition)
    cache, findings = decode_folded_partition(base64.b64decode(snapshot.folded), name)
    return FoldedPartitionMetadata(cache, findings, len(findings))
