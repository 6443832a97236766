"""Segment metadata of one partition, folded as brokers do (Kafka's RemoteLogMetadataCache and RemoteLogLeaderEpochState, 3.7 to 4.x).

Records are applied in order, each once (``applied`` is the offset of the last one). A record that brokers drop with a log line results in a
finding; a record at which a broker's consumer stops raises BadData.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from typing_extensions import override

from compactor.adapters.brokers.codec import TOPIC, decode_unframed_segment_metadata, encode_unframed_segment_metadata
from compactor.adapters.brokers.topic import LocalKeyValueStore, RecordCountsByMinute, TopicIdentity
from compactor.constants import LeaderEpoch
from compactor.errors import BadData
from compactor.model.ids import encode_segment_id
from compactor.model.remote_log import (
    MetadataRecord,
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    RemotePartitionDeleteMetadataRecord,
    TopicIdPartition,
    epoch_start_offsets,
)
from compactor.model.segment import TRANSITIONS, SegmentState

MAX_FINISHED_IDS = 4096
"""How many finished ids a partition remembers, newest last: a zombie's late records come within its delivery timeout, not years later."""


class SuspiciousRecordFindingKind(StrEnum):
    DROPPED_TRANSITION = "dropped-transition"
    """An ERROR line in every broker's log, again at every replay."""
    UNKNOWN_SEGMENT = "unknown-segment"
    """An update of an id that nobody introduced, or that is finished."""
    REVIVED = "revived"
    """A finished id was introduced again: its objects are gone or about to be."""


class SuspiciousRecordFinding(NamedTuple):
    """Metadata record that brokers ignored or that should not have been written. ``offset`` is in the metadata topic."""

    kind: SuspiciousRecordFindingKind
    partition: TopicIdPartition
    segment_id: bytes
    offset: int
    detail: str

    @override
    def __str__(self) -> str:
        return f"{self.partition}, segment {encode_segment_id(self.segment_id)}, record at {self.offset}: {self.detail}"


class LeaderEpochSegments:
    """Segments of one leader epoch (Kafka's RemoteLogLeaderEpochState).

    starts, ids: of readable segments, ascending by start offset within this epoch.
    unreferenced: ids of segments that no lookup finds.
    highest: largest offset tiered in this epoch.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ids: list[bytes] = []
        self.unreferenced: dict[bytes, None] = {}
        self.highest: int | None = None

    def segment_at(self, offset: int) -> bytes | None:
        """Readable segment with the largest start at or below ``offset``."""
        at = bisect_right(self.starts, offset) - 1
        return self.ids[at] if at >= 0 else None

    def apply_copy_started(self, raw_id: bytes) -> None:
        self.unreferenced[raw_id] = None

    def apply_copy_finished(self, start_offset_in_epoch: int, raw_id: bytes, last_offset_in_epoch: int) -> None:
        """Make a segment readable. If it reaches the epoch's highest offset, all that begin at or after its start become unreferenced."""
        while (
            self.starts and self.starts[-1] >= start_offset_in_epoch and self.highest is not None and self.highest <= last_offset_in_epoch
        ):
            self.starts.pop()
            self.unreferenced[self.ids.pop()] = None
        at = bisect_left(self.starts, start_offset_in_epoch)
        if at < len(self.starts) and self.starts[at] == start_offset_in_epoch:
            self.ids[at] = raw_id  # whoever was there is in no list of this epoch from here
        else:
            self.starts.insert(at, start_offset_in_epoch)
            self.ids.insert(at, raw_id)
        self.unreferenced.pop(raw_id, None)
        if self.highest is None or last_offset_in_epoch > self.highest:
            self.highest = last_offset_in_epoch

    def apply_delete_started(self, start_offset_in_epoch: int, raw_id: bytes) -> None:
        at = bisect_left(self.starts, start_offset_in_epoch)
        if at < len(self.starts) and self.starts[at] == start_offset_in_epoch and self.ids[at] == raw_id:
            del self.starts[at], self.ids[at]
        self.unreferenced[raw_id] = None

    def apply_delete_finished(self, raw_id: bytes) -> None:
        self.unreferenced.pop(raw_id, None)

    def copy(self) -> LeaderEpochSegments:
        other = LeaderEpochSegments()
        other.starts, other.ids, other.unreferenced = list(self.starts), list(self.ids), dict(self.unreferenced)
        other.highest = self.highest
        return other


class RemoteLogMetadataCache:
    """Segments of one partition by id (16 bytes) and by leader epoch."""

    def __init__(self, partition: TopicIdPartition, segments: MutableMapping[bytes, RemoteLogSegmentMetadataRecord] | None = None) -> None:
        self.partition = partition
        self.applied = -1
        self.segments: MutableMapping[bytes, RemoteLogSegmentMetadataRecord] = {} if segments is None else segments
        self.epochs: dict[int, LeaderEpochSegments] = {}
        self.finished: dict[bytes, None] = {}
        self.deletion: PartitionDeleteState | None = None

    def copy(self) -> RemoteLogMetadataCache:
        other = RemoteLogMetadataCache(self.partition)
        other.applied, other.deletion = self.applied, self.deletion
        other.segments, other.finished = dict(self.segments), dict(self.finished)
        other.epochs = {epoch: state.copy() for epoch, state in self.epochs.items()}
        return other

    def apply_record(self, record: MetadataRecord, record_offset: int, *, topic: str = TOPIC) -> SuspiciousRecordFinding | None:
        """Apply one record above ``applied``, and return a finding if brokers would ignore it. Raises BadData if they would stop at it,
        ValueError if it is another partition's.
        """
        if record.partition.topic_id != self.partition.topic_id or record.partition.partition != self.partition.partition:
            raise ValueError(f"a record of {record.partition} for {self.partition}")
        if record_offset <= self.applied:
            return None
        finding = None
        if isinstance(record, RemoteLogSegmentMetadataRecord):
            finding = self._add_segment(record, record_offset)
        elif isinstance(record, RemoteLogSegmentMetadataUpdateRecord):
            finding = self._update_segment(record, record_offset, topic)
        else:
            self.deletion = record.state
            if record.state is PartitionDeleteState.DELETE_PARTITION_FINISHED:
                self.segments.clear()
                self.epochs.clear()
        self.applied = record_offset
        return finding

    def find_segment(self, epoch: int, offset: int) -> RemoteLogSegmentMetadataRecord | None:
        """Readable segment that holds an offset of this epoch (Kafka's remoteLogSegmentMetadata)."""
        state = self.epochs.get(epoch)
        raw_id = state.segment_at(offset) if state else None
        found = self.segments.get(raw_id) if raw_id else None
        return found if found is not None and offset <= last_offset_of_epoch(found, LeaderEpoch(epoch)) else None

    def list_segments(self) -> list[RemoteLogSegmentMetadataRecord]:
        """Segments in the order of introduction (Kafka's listAllRemoteLogSegments)."""
        return list(self.segments.values())

    def _add_segment(self, record: RemoteLogSegmentMetadataRecord, record_offset: int) -> SuspiciousRecordFinding | None:
        existing = self.segments.get(record.segment_id)
        if existing is not None and existing.state is not record.state:
            return self._dropped_transition_finding(existing.state, record.state, record.segment_id, record_offset)
        for epoch, _ in epoch_start_offsets(record):
            self.epochs.setdefault(epoch, LeaderEpochSegments()).apply_copy_started(record.segment_id)
        self.segments[record.segment_id] = record
        if record.segment_id in self.finished:
            message = "a segment whose deletion was finished is introduced again"
            return SuspiciousRecordFinding(SuspiciousRecordFindingKind.REVIVED, self.partition, record.segment_id, record_offset, message)
        return None

    def _update_segment(
        self, update: RemoteLogSegmentMetadataUpdateRecord, record_offset: int, topic: str
    ) -> SuspiciousRecordFinding | None:
        existing = self.segments.get(update.segment_id)
        if existing is None:
            what = "is finished" if update.segment_id in self.finished else "was never introduced"
            message = f"{update.state} of a segment that {what}"
            return SuspiciousRecordFinding(
                SuspiciousRecordFindingKind.UNKNOWN_SEGMENT, self.partition, update.segment_id, record_offset, message
            )
        if update.state is not existing.state and update.state not in TRANSITIONS[existing.state]:
            return self._dropped_transition_finding(existing.state, update.state, update.segment_id, record_offset)
        if update.state is SegmentState.COPY_SEGMENT_STARTED:
            raise BadData(
                f"segment {update.id} of {self.partition} is updated to COPY_SEGMENT_STARTED",
                segment=topic,
                offset=record_offset,
                hint="Brokers stop reading the topic at such a record, and again at every restart",
            )
        found = existing.with_update(update)
        for epoch, start in epoch_start_offsets(found):
            state = self.epochs.setdefault(epoch, LeaderEpochSegments())
            if update.state is SegmentState.COPY_SEGMENT_FINISHED:
                state.apply_copy_finished(start, update.segment_id, last_offset_of_epoch(found, LeaderEpoch(epoch)))
            elif update.state is SegmentState.DELETE_SEGMENT_STARTED:
                state.apply_delete_started(start, update.segment_id)
            else:
                state.apply_delete_finished(update.segment_id)
        if update.state is SegmentState.DELETE_SEGMENT_FINISHED:
            del self.segments[update.segment_id]
            self._remember_deleted_id(update.segment_id)
        else:
            self.segments[update.segment_id] = found
        return None

    def _dropped_transition_finding(
        self, before: SegmentState, after: SegmentState, raw_id: bytes, record_offset: int
    ) -> SuspiciousRecordFinding:
        message = f"{before} cannot become {after}; brokers drop the record with an ERROR line"
        return SuspiciousRecordFinding(SuspiciousRecordFindingKind.DROPPED_TRANSITION, self.partition, raw_id, record_offset, message)

    def _remember_deleted_id(self, raw_id: bytes) -> None:
        self.finished.pop(raw_id, None)
        self.finished[raw_id] = None
        while len(self.finished) > MAX_FINISHED_IDS:
            del self.finished[next(iter(self.finished))]

    @override
    def __str__(self) -> str:
        return f"{self.partition}: {len(self.segments)} segments"


def last_offset_of_epoch(segment: RemoteLogSegmentMetadataRecord, epoch: LeaderEpoch) -> int:
    """Last offset, inclusive, of this leader epoch in the segment."""
    for later, start in epoch_start_offsets(segment):
        if later > epoch:
            return start - 1
    return segment.end_offset


STATE_FORMAT = 1
"""Counts up when these bytes, or what a fold makes of the topic, change their meaning."""

_DELETE_STATES = (None, *PartitionDeleteState)
_HEAD = struct.Struct(">qbIIII")
"""Last applied offset, deletion, number of epochs, of segments, of finished ids, length of the findings."""
_EPOCH = struct.Struct(">i?qII")
_REFERENCE = struct.Struct(">q16s")
_SEGMENT_ENTRY = struct.Struct(">16sI")


class LazilyDecodedSegments(MutableMapping[bytes, RemoteLogSegmentMetadataRecord]):
    """Segments by id, in the order of introduction, each decoded at its first access."""

    def __init__(self) -> None:
        self._segments: dict[bytes, bytes | RemoteLogSegmentMetadataRecord] = {}

    @override
    def __getitem__(self, raw_id: bytes) -> RemoteLogSegmentMetadataRecord:
        held = self._segments[raw_id]
        if isinstance(held, bytes):
            held = self._segments[raw_id] = decode_unframed_segment_metadata(held)[0]
        return held

    @override
    def __setitem__(self, raw_id: bytes, segment: RemoteLogSegmentMetadataRecord) -> None:
        self._segments[raw_id] = segment

    @override
    def __delitem__(self, raw_id: bytes) -> None:
        del self._segments[raw_id]

    @override
    def __iter__(self) -> Iterator[bytes]:
        return iter(self._segments)

    @override
    def __len__(self) -> int:
        return len(self._segments)

    def encoded_segments(self) -> dict[bytes, bytes]:
        return {
            raw_id: held if isinstance(held, bytes) else encode_unframed_segment_metadata(held) for raw_id, held in self._segments.items()
        }

    def store_encoded_segment(self, raw_id: bytes, data: bytes) -> None:
        self._segments[raw_id] = data


def encode_folded_partition(cache: RemoteLogMetadataCache, findings: list[SuspiciousRecordFinding]) -> bytes:
    segments = cache.segments
    held = (
        segments.encoded_segments()
        if isinstance(segments, LazilyDecodedSegments)
        else {raw: encode_unframed_segment_metadata(one) for raw, one in segments.items()}
    )
    reported = json.dumps([[one.kind, one.segment_id.hex(), one.offset, one.detail] for one in findings]).encode()
    deletion = _DELETE_STATES.index(cache.deletion)
    parts = [_HEAD.pack(cache.applied, deletion, len(cache.epochs), len(held), len(cache.finished), len(reported))]
    for epoch, state in cache.epochs.items():
        highest = state.highest
        parts.append(_EPOCH.pack(epoch, highest is not None, highest or 0, len(state.starts), len(state.unreferenced)))
        parts.extend(map(_REFERENCE.pack, state.starts, state.ids))
        parts.extend(state.unreferenced)
    parts.extend(_SEGMENT_ENTRY.pack(raw_id, len(data)) for raw_id, data in held.items())
    parts.extend(cache.finished)
    parts.append(reported)
    parts.extend(held.values())
    return b"".join(parts)


def decode_folded_partition(data: bytes, partition: TopicIdPartition) -> tuple[RemoteLogMetadataCache, list[SuspiciousRecordFinding]]:
    cache = RemoteLogMetadataCache(partition, LazilyDecodedSegments())
    cache.applied, deletion, epochs, segments, finished, reported_length = _HEAD.unpack_from(data)
    cache.deletion = _DELETE_STATES[deletion]
    at = _HEAD.size
    for _ in range(epochs):
        epoch, known, highest, referenced, unreferenced = _EPOCH.unpack_from(data, at)
        at += _EPOCH.size
        state = cache.epochs[epoch] = LeaderEpochSegments()
        state.highest = highest if known else None
        for start, raw_id in _REFERENCE.iter_unpack(data[at : at + referenced * _REFERENCE.size]):
            state.starts.append(start)
            state.ids.append(raw_id)
        at += referenced * _REFERENCE.size
        state.unreferenced = dict.fromkeys(_decode_segment_ids(data, at, unreferenced))
        at += unreferenced * 16
    listed = list(_SEGMENT_ENTRY.iter_unpack(data[at : at + segments * _SEGMENT_ENTRY.size]))
    at += segments * _SEGMENT_ENTRY.size
    cache.finished = dict.fromkeys(_decode_segment_ids(data, at, finished))
    at += finished * 16
    reported = json.loads(data[at : at + reported_length])
    at += reported_length
    held = cache.segments
    if isinstance(held, LazilyDecodedSegments):
        for raw_id, length in listed:
            held.store_encoded_segment(raw_id, data[at : at + length])
            at += length
    if at != len(data):
        raise ValueError(f"{len(data)} bytes, {at} expected")
    return cache, [
        SuspiciousRecordFinding(SuspiciousRecordFindingKind(kind), partition, bytes.fromhex(raw), offset, message)
        for kind, raw, offset, message in reported
    ]


def _decode_segment_ids(data: bytes, position: int, count: int) -> list[bytes]:
    return [data[start : start + 16] for start in range(position, position + 16 * count, 16)]


# Folded user partitions in local state. Only partitions in use are in memory.
#
#     topic              identity of the topic, and format version
#     at/<p>             fold position of metadata partition p
#     name/<id><n>       topic name and counts of user partition n of the topic with this id
#     part/<id><n>       its folded state, which may be newer than ``at``: it stores the last offset applied, so that no record counts twice
#
# Local state may disappear at any time: every read checks ``at`` and raises PersistedStateLost. If nothing can be written, all is in
# memory.


MAX_FINDINGS = 32
PERSISTED_FORMAT = 2
"""Of what is kept beside the packed states; another one is folded anew."""
_TOPIC_KEY, _POSITION_PREFIX, _SUMMARY_PREFIX, _STATE_PREFIX = b"topic", b"at/", b"name/", b"part/"
_NUMBER = struct.Struct(">i")


class PersistedStateLost(Exception):
    """Raised if local state was lost, so that everything has to be folded again."""


@dataclass(frozen=True)
class FoldPosition:
    """Progress of folding one metadata partition.

    position: next offset to read.
    last, digest: offset and SHA-256 of the last folded record.
    missing: first existing offset if the topic has lost its beginning, otherwise 0.
    stopped: why the record at ``position`` cannot be folded (brokers stop there, too), or an empty string.
    compactor_records: records written by compactors, by minute since 1970.
    """

    position: int = 0
    last: int = -1
    digest: str = ""
    missing: int = 0
    stopped: str = ""
    compactor_records: RecordCountsByMinute = ()

    def to_json(self) -> bytes:
        return json.dumps([self.position, self.last, self.digest, self.missing, self.stopped, self.compactor_records]).encode()

    @staticmethod
    def from_json(data: bytes) -> FoldPosition:
        """Raises ValueError or TypeError if the position is corrupt."""
        position, last, digest, missing, stopped, ours = json.loads(data)
        return FoldPosition(position, last, digest, missing, stopped, tuple((minute, count) for minute, count in ours))


class TieredPartitionSegmentCounts(NamedTuple):
    """Numbers of segments. applied: offset of the partition's last record."""

    partition: TopicIdPartition
    finished: int
    other: int
    finished_bytes: int
    findings: int
    applied: int


@dataclass
class FoldedPartitionMetadata:
    """A user partition's folded metadata. findings: the newest ones."""

    cache: RemoteLogMetadataCache
    findings: list[SuspiciousRecordFinding] = field(default_factory=list)
    finding_count: int = 0
    finished: int = 0
    other: int = 0
    finished_bytes: int = 0

    def apply_record(self, record: MetadataRecord, offset: int, topic: str) -> None:
        """Raises BadData if brokers stop at the record."""
        if offset <= self.cache.applied:
            return
        segments = self.cache.segments
        raw_id = b"" if isinstance(record, RemotePartitionDeleteMetadataRecord) else record.segment_id
        before = segments.get(raw_id)
        finding = self.cache.apply_record(record, offset, topic=topic)
        self._adjust_counts(before, -1)
        self._adjust_counts(segments.get(raw_id), 1)
        if not segments:
            self.finished = self.other = self.finished_bytes = 0
        if finding is not None:
            self.finding_count += 1
            self.findings = [*self.findings, finding][-MAX_FINDINGS:]

    def _adjust_counts(self, segment: RemoteLogSegmentMetadataRecord | None, difference: int) -> None:
        if segment is None:
            return
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED:
            self.finished += difference
            self.finished_bytes += difference * segment.size_bytes
        else:
            self.other += difference


class FoldedMetadataStore:
    """Store of folded user partitions and fold positions. Not thread-safe."""

    def __init__(self, store: LocalKeyValueStore) -> None:
        self._store = store
        self._memory: dict[bytes, bytes] = {}
        self._reached: dict[int, FoldPosition] = {}
        self._writable = False
        self._stored: bytes | None = None

    def load_fold_positions(self, identity: TopicIdentity) -> dict[int, FoldPosition]:
        """Fold positions; none if those stored belong to another topic or format."""
        message = json.dumps([STATE_FORMAT, PERSISTED_FORMAT, identity.cluster_id, identity.topic_id, identity.partitions]).encode()
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
            self._write_values(
                {_TOPIC_KEY: message, **{_fold_position_key(number): reached.to_json() for number, reached in self._reached.items()}}
            )
        self._stored = self._store.get([_TOPIC_KEY])[0]
        return dict(self._reached)

    def discard_all_folded_states(self, reason: str) -> None:
        self._store.delete_all_entries(reason)
        self._memory.clear()
        self._reached = {}

    def load_folded_partitions(
        self, metadata_partition: int, partitions: Sequence[TopicIdPartition]
    ) -> list[FoldedPartitionMetadata | None]:
        """States, None for unknown partitions. Raises PersistedStateLost."""
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
        values = {}
        for name, folded in partitions.items():
            values[_partition_state_key(_SUMMARY_PREFIX, name)] = _encode_partition_counts(folded)
            values[_partition_state_key(_STATE_PREFIX, name)] = encode_folded_partition(folded.cache, folded.findings)
        self._write_values(values)

    def save_fold_position(self, metadata_partition: int, position: FoldPosition) -> None:
        """Called after the states of all records below it are saved."""
        self._reached[metadata_partition] = position
        self._write_values({_fold_position_key(metadata_partition): position.to_json()})

    def tiered_partitions(self) -> Iterator[TieredPartitionSegmentCounts]:
        found = self._store.entries_with_prefix(_SUMMARY_PREFIX) | {
            key[len(_SUMMARY_PREFIX) :]: data for key, data in self._memory.items() if key.startswith(_SUMMARY_PREFIX)
        }
        for key, data in sorted(found.items()):
            topic, *figures = json.loads(data)
            yield TieredPartitionSegmentCounts(TopicIdPartition(key[:16], topic, _NUMBER.unpack(key[16:])[0]), *figures)

    def _read_local_values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        topic, *stored = self._store.get([_TOPIC_KEY, *keys])
        if topic != self._stored:
            raise PersistedStateLost("local state was deleted")
        if not self._memory:
            return stored
        return [self._memory.get(key, data) for key, data in zip(keys, stored, strict=True)]

    def _write_values(self, values: dict[bytes, bytes]) -> None:
        # Keep values in memory if the store was not writable when folding began. Raises PersistedStateLost if it stops accepting writes.
        if not self._writable:
            self._memory.update(values)
            return
        self._store.write(values)
        if not self._store.is_writable:
            raise PersistedStateLost("local state cannot be written any more")


def _parse_fold_positions(values: Sequence[bytes | None]) -> dict[int, FoldPosition]:
    try:
        return {number: FoldPosition.from_json(data) for number, data in enumerate(values) if data is not None}
    except (ValueError, TypeError):
        return {}


def _fold_position_key(metadata_partition: int) -> bytes:
    return _POSITION_PREFIX + _NUMBER.pack(metadata_partition)


def _partition_state_key(kind: bytes, partition: TopicIdPartition) -> bytes:
    return kind + partition.topic_id + _NUMBER.pack(partition.partition)


def _encode_partition_counts(folded: FoldedPartitionMetadata) -> bytes:
    topic = folded.cache.partition.topic
    return json.dumps([topic, folded.finished, folded.other, folded.finished_bytes, folded.finding_count, folded.cache.applied]).encode()


def _decode_folded_partition(name: TopicIdPartition, counts: bytes | None, segments: bytes | None) -> FoldedPartitionMetadata | None:
    if counts is None or segments is None:
        return None
    try:
        topic, finished, other, size, count, _ = json.loads(counts)
        cache, findings = decode_folded_partition(segments, name._replace(topic=topic))
    except (ValueError, struct.error, TypeError) as error:
        raise PersistedStateLost(f"{name}: {error}") from error
    return FoldedPartitionMetadata(cache, findings, count, finished, other, size)
