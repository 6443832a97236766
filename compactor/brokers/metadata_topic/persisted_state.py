"""Folded user partitions in local state. Only partitions in use are in memory.

    topic              identity of the topic, and format version
    at/<p>             fold position of metadata partition p
    name/<id><n>       topic name and counts of user partition n of the topic with this id
    part/<id><n>       its folded state

A partition's state may be newer than ``at``; it stores the last offset applied, so that no record is applied twice. Local state may
disappear at any time (compactor.local.rocks): every read checks ``at`` and raises PersistedStateLost. If nothing can be written, all
is in memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compactor.brokers.metadata_topic import state_serde as packed
from compactor.brokers.metadata_topic.cache import RemoteLogMetadataCache, SuspiciousRecordFinding
from compactor.brokers.metadata_topic.codec import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemotePartitionDeleteMetadataRecord,
    TopicIdPartition,
)
from compactor.brokers.metadata_topic.ports import LocalKeyValueStore, TopicIdentity
from compactor.brokers.metadata_topic.token_bucket import RecordCountsByMinute
from compactor.model.segment import SegmentState

MAX_FINDINGS = 32
PERSISTED_FORMAT = 2
"""Of what is kept beside the packed states; another one is folded anew."""
_TOPIC_KEY, _POSITION_PREFIX, _SUMMARY_PREFIX, _STATE_PREFIX = b"topic", b"at/", b"name/", b"part/"
_NUMBER = struct.Struct(">i")


class PersistedStateLost(Exception):
    """Raised if local state was deleted or replaced, so that all records of the metadata topic have to be folded again."""


@dataclass(frozen=True)
class FoldPosition:
    """Progress of folding one metadata partition.

    position: next offset to read.
    last, digest: offset and SHA-256 of the last folded record.
    missing: first existing offset if the topic has lost its beginning, otherwise 0.
    stopped: why the record at ``position`` cannot be folded (brokers stop there, too), or an empty string.
    compactor_records: number of records written by compactors, as pairs of minute since 1970 and count.
    """

    position: int = 0
    last: int = -1
    digest: str = ""
    missing: int = 0
    stopped: str = ""
    compactor_records: RecordCountsByMinute = ()

    def to_json(self) -> bytes:
        """Return the fold position as JSON in UTF-8."""
        return json.dumps([self.position, self.last, self.digest, self.missing, self.stopped, self.compactor_records]).encode()

    @staticmethod
    def from_json(data: bytes) -> FoldPosition:
        """Parse the JSON of a fold position. Raises ValueError or TypeError if it is corrupt."""
        position, last, digest, missing, stopped, ours = json.loads(data)
        return FoldPosition(position, last, digest, missing, stopped, tuple((minute, count) for minute, count in ours))


class TieredPartitionSegmentCounts(NamedTuple):
    """A user partition with tiered segments, and the number of its segments by state.

    finished: number of segments in COPY_SEGMENT_FINISHED.
    other: number of segments in other states.
    applied: metadata topic offset of the last record about the partition.
    """

    partition: TopicIdPartition
    finished: int
    other: int
    finished_bytes: int
    findings: int
    applied: int


@dataclass
class FoldedPartitionMetadata:
    """A user partition's folded metadata: its segments, the newest findings about its metadata records, and the total number of
    findings.
    """

    cache: RemoteLogMetadataCache
    findings: list[SuspiciousRecordFinding] = field(default_factory=list)
    finding_count: int = 0
    finished: int = 0
    other: int = 0
    finished_bytes: int = 0

    def apply_record(self, record: MetadataRecord, offset: int, topic: str) -> None:
        """Apply one record and update the counts. Raises BadData if brokers stop at it."""
        if offset <= self.cache.applied:
            return
        segments = self.cache.segments
        raw_id = b"" if isinstance(record, RemotePartitionDeleteMetadataRecord) else record.segment_id
        before = segments.get(raw_id)
        finding = self.cache.apply_record(record, offset, topic=topic)
        self._adjust_segment_counts_by_state(before, -1)
        self._adjust_segment_counts_by_state(segments.get(raw_id), 1)
        if not segments:
            self.finished = self.other = self.finished_bytes = 0
        if finding is not None:
            self.finding_count += 1
            self.findings = [*self.findings, finding][-MAX_FINDINGS:]

    def _adjust_segment_counts_by_state(self, segment: RemoteLogSegmentMetadataRecord | None, difference: int) -> None:
        """Add ``difference`` to the counts of segments in this segment's state. Does nothing if ``segment`` is None.

        :param difference: 1 for a segment that enters the state, -1 for one that leaves it.
        """
        if segment is None:
            return
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED:
            self.finished += difference
            self.finished_bytes += difference * segment.size_bytes
        else:
            self.other += difference


class FoldedMetadataStore:
    """Store of folded user partitions and fold positions. Not thread-safe.

    :param store: local state of this topic only.
    """

    def __init__(self, store: LocalKeyValueStore) -> None:
        self._store = store
        self._memory: dict[bytes, bytes] = {}
        self._reached: dict[int, FoldPosition] = {}
        self._writable = False
        self._stored: bytes | None = None

    def load_fold_positions(self, identity: TopicIdentity) -> dict[int, FoldPosition]:
        """Return the fold position of each metadata partition. If the stored positions belong to another topic or format, all stored states
        are deleted and folding starts from the beginning.
        """
        message = json.dumps([packed.STATE_FORMAT, PERSISTED_FORMAT, identity.cluster_id, identity.topic_id, identity.partitions]).encode()
        keys = [_TOPIC_KEY, *map(_fold_position_key, range(identity.partitions))]
        self._writable = self._store.is_writable
        values = [self._memory.get(key, data) for key, data in zip(keys, self._store.get(keys), strict=True)]
        self._reached = _parse_fold_positions(values[1:]) if values[0] == message else {}
        if len(self._reached) != identity.partitions:
            if values[0] is not None:
                self._store.delete_all_entries("it is of another metadata topic, or of another version of this program")
            self._memory.clear()
            self._reached = dict.fromkeys(range(identity.partitions), FoldPosition())
            self._writable = self._store.is_writable
            self._write_local_values_or_keep_in_memory(
                {_TOPIC_KEY: message, **{_fold_position_key(number): reached.to_json() for number, reached in self._reached.items()}}
            )
        self._stored = self._store.get([_TOPIC_KEY])[0]
        return dict(self._reached)

    def discard_all_folded_states(self, reason: str) -> None:
        """Delete all stored states, so that load_fold_positions starts from the beginning of the topic. reason: for the log."""
        self._store.delete_all_entries(reason)
        self._memory.clear()
        self._reached = {}

    def load_folded_partitions(
        self, metadata_partition: int, partitions: Sequence[TopicIdPartition]
    ) -> list[FoldedPartitionMetadata | None]:
        """Return the states of user partitions, None for unknown ones. Raises PersistedStateLost."""
        keys = [_fold_position_key(metadata_partition)]
        for name in partitions:
            keys += [_partition_state_key(_SUMMARY_PREFIX, name), _partition_state_key(_STATE_PREFIX, name)]
        at, *values = self._read_local_values(keys)
        if at != self._reached[metadata_partition].to_json():
            raise PersistedStateLost(f"metadata partition {metadata_partition}")
        return [
            _decode_folded_partition(name, message, data) for name, message, data in zip(partitions, values[::2], values[1::2], strict=True)
        ]

    def save_folded_partitions(self, partitions: Mapping[TopicIdPartition, FoldedPartitionMetadata]) -> None:
        """Save the states of user partitions."""
        values = {}
        for name, folded in partitions.items():
            values[_partition_state_key(_SUMMARY_PREFIX, name)] = _encode_partition_counts(folded)
            values[_partition_state_key(_STATE_PREFIX, name)] = packed.encode_folded_partition(folded.cache, folded.findings)
        self._write_local_values_or_keep_in_memory(values)

    def save_fold_position(self, metadata_partition: int, position: FoldPosition) -> None:
        """Save a fold position. Called after the states of all records below it are saved."""
        self._reached[metadata_partition] = position
        self._write_local_values_or_keep_in_memory({_fold_position_key(metadata_partition): position.to_json()})

    def tiered_partitions(self) -> Iterator[TieredPartitionSegmentCounts]:
        """Yield all user partitions with records, in order of topic id and partition number."""
        found = self._store.entries_with_prefix(_SUMMARY_PREFIX) | {
            key[len(_SUMMARY_PREFIX) :]: data for key, data in self._memory.items() if key.startswith(_SUMMARY_PREFIX)
        }
        for key, data in sorted(found.items()):
            topic, *figures = json.loads(data)
            yield TieredPartitionSegmentCounts(TopicIdPartition(key[:16], topic, _NUMBER.unpack(key[16:])[0]), *figures)

    def _read_local_values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the stored values of these keys, None for absent ones. Raises PersistedStateLost if the store was emptied since
        load_fold_positions.
        """
        topic, *stored = self._store.get([_TOPIC_KEY, *keys])
        if topic != self._stored:
            raise PersistedStateLost("local state was deleted")
        if not self._memory:
            return stored
        return [self._memory.get(key, data) for key, data in zip(keys, stored, strict=True)]

    def _write_local_values_or_keep_in_memory(self, values: dict[bytes, bytes]) -> None:
        """Write values to the store; if the store was not writable when folding began, keep them in memory instead. Raises
        PersistedStateLost if the store stops accepting writes.
        """
        if not self._writable:
            self._memory.update(values)
            return
        self._store.write(values)
        if not self._store.is_writable:
            raise PersistedStateLost("local state cannot be written any more")


def _parse_fold_positions(values: Sequence[bytes | None]) -> dict[int, FoldPosition]:
    """Return the stored fold positions by metadata partition, or an empty dict if one is corrupt."""
    try:
        return {number: FoldPosition.from_json(data) for number, data in enumerate(values) if data is not None}
    except (ValueError, TypeError):
        return {}


def _fold_position_key(metadata_partition: int) -> bytes:
    return _POSITION_PREFIX + _NUMBER.pack(metadata_partition)


def _partition_state_key(kind: bytes, partition: TopicIdPartition) -> bytes:
    return kind + partition.topic_id + _NUMBER.pack(partition.partition)


def _encode_partition_counts(folded: FoldedPartitionMetadata) -> bytes:
    """Return the topic's name and the partition's numbers of segments, bytes, findings and records as JSON in UTF-8."""
    topic = folded.cache.partition.topic
    return json.dumps([topic, folded.finished, folded.other, folded.finished_bytes, folded.finding_count, folded.cache.applied]).encode()


def _decode_folded_partition(name: TopicIdPartition, counts: bytes | None, segments: bytes | None) -> FoldedPartitionMetadata | None:
    """Decode a user partition, or return None if nothing is stored. Raises PersistedStateLost if it is corrupt."""
    if counts is None or segments is None:
        return None
    try:
        topic, finished, other, size, count, _ = json.loads(counts)
        cache, findings = packed.decode_folded_partition(segments, name._replace(topic=topic))
    except (ValueError, struct.error, TypeError) as error:
        raise PersistedStateLost(f"{name}: {error}") from error
    return FoldedPartitionMetadata(cache, findings, count, finished, other, size)
