"""Reader of the metadata topic that folds it and continues where the last run ended.

At a start, the last folded record of each metadata partition is read again. If it is absent or different, the topic was truncated or
created again, and everything is folded from the beginning, as after a loss of local state.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from compactor.adapters.brokers.cache import (
    FoldedMetadataStore,
    FoldedPartitionMetadata,
    FoldPosition,
    LazilyDecodedSegments,
    PersistedStateLost,
    RemoteLogMetadataCache,
    TieredPartitionSegmentCounts,
)
from compactor.adapters.brokers.codec import decode_record
from compactor.adapters.brokers.topic import (
    FirstAndEndOffsets,
    MetadataTopic,
    RawMetadataTopicRecord,
    TopicIdentity,
    with_timestamps_added,
)
from compactor.errors import BadData, NotFound, Unavailable
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.remote_log import MetadataRecord, TopicIdPartition

_UINT32_MASK = 0xFFFFFFFF


def metadata_partition(topic_id: bytes, partition: int, metadata_partition_count: int) -> int:
    """Metadata topic partition that holds a user partition's records. topic_id: 16 bytes."""
    hashed = java_objects_hash_code((_java_long_hash_code(topic_id[8:]), _java_long_hash_code(topic_id[:8]), partition))
    return (murmur2(hashed.to_bytes(4, "big")) & 0x7FFFFFFF) % metadata_partition_count


def java_objects_hash_code(hashes: tuple[int, ...]) -> int:
    """Value of java.util.Objects.hash, as 32 unsigned bits."""
    result = 1
    for value in hashes:
        result = (31 * result + value) & _UINT32_MASK
    return result


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 hash (org.apache.kafka.common.utils.Utils.murmur2), as 32 unsigned bits."""
    multiplier, length = 0x5BD1E995, len(data)
    mixed = 0x9747B28C ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(data[at : at + 4], "little") * multiplier & _UINT32_MASK
        word = (word ^ word >> 24) * multiplier & _UINT32_MASK
        mixed = mixed * multiplier & _UINT32_MASK ^ word
    if whole < length:
        mixed = (mixed ^ int.from_bytes(data[whole:], "little")) * multiplier & _UINT32_MASK
    mixed = (mixed ^ mixed >> 13) * multiplier & _UINT32_MASK
    return mixed ^ mixed >> 15


def _java_long_hash_code(eight_bytes: bytes) -> int:
    value = int.from_bytes(eight_bytes, "big")
    return (value ^ value >> 32) & _UINT32_MASK


MAX_CHUNK_RECORDS = 100_000
MAX_CHUNK_BYTES = 32 << 20
"""How much is read before it is folded: each user partition that it touches is taken from local state and put back once."""
_POLL_RECORDS = 10_000
_POLL_TIMEOUT_S = 0.5
_MAX_ATTEMPTS = 3
_PARTITIONS_PER_SAVE = 256


class MetadataFoldResult(NamedTuple):
    """Number of folded records, and of unread ones by metadata partition. refold_reason: why everything was folded again, or an empty
    string.
    """

    records: int
    unread: Mapping[int, int]
    refold_reason: str = ""


@dataclass
class _UnfoldedRecordChunk:
    records: list[RawMetadataTopicRecord]
    reached: int


class _FoldedRecordsLostError(Exception):
    """Raised if folded records are no longer in the topic, as after its re-creation."""


class FoldingMetadataTopicReader:
    """Reader of the metadata topic that keeps the folded state of every user partition. Thread-safe.

    :param chunk_records: maximum number of records read before they are folded.
    """

    def __init__(
        self, topic: MetadataTopic, persisted: FoldedMetadataStore, *, clock_ms: Callable[[], int], chunk_records: int = MAX_CHUNK_RECORDS
    ) -> None:
        self._topic = topic
        self._states = persisted
        self._chunk_records = chunk_records
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._partitions = 0
        self._forward_read: dict[int, int] = {}
        self._reached: dict[int, FoldPosition] = {}
        self._checked: set[int] = set()
        self._leaderless: frozenset[int] = frozenset()
        self._identity: TopicIdentity | None = None
        self._folds = 0

    @property
    def folded_state_version(self) -> int:
        return self._folds

    def fold_to_end(self, timeout_s: float) -> MetadataFoldResult:
        """Fold the records that the topic has when the call begins. Raises Unavailable, Refused or NotFound."""
        deadline = time.monotonic() + timeout_s
        why = ""
        with self._lock:
            for _ in range(_MAX_ATTEMPTS):
                try:
                    return self._fold_until(deadline)._replace(refold_reason=why)
                except (PersistedStateLost, _FoldedRecordsLostError) as error:
                    why = str(error)
                    self._states.discard_all_folded_states(why)
                    self._identity, self._forward_read = None, {}
                except BaseException:
                    self._forward_read = {}  # the reader may be ahead of what was folded
                    raise
        raise Unavailable(f"{self._topic.name} cannot be folded: {why}", hint="It changed each time it was read; try again")

    def partition_metadata_from_records(self, topic_id: bytes, partition: int) -> FoldedPartitionMetadata | None:
        """Folded state; None if no record names the partition. Raises BadData if brokers stop at a record of its metadata partition,
        Unavailable if that cannot be read.
        """
        name = TopicIdPartition(topic_id, "", partition)
        with self._lock:
            number = self.metadata_partition_number(topic_id, partition)
            if number in self._leaderless:
                message = f"partition {number} of {self._topic.name} cannot be read: no broker leads it"
                raise Unavailable(
                    message, hint="Only the partitions that it describes are delayed. Start a broker that has a replica of it"
                )
            if self._reached[number].stopped:
                reached = self._reached[number]
                raise BadData(reached.stopped, segment=f"{self._topic.name}-{number}", offset=reached.position)
            try:
                return self._states.load_folded_partitions(number, [name])[0]
            except PersistedStateLost as error:
                raise Unavailable(
                    f"local state of {self._topic.name} is lost", hint="The topic is folded again by the next scan"
                ) from error

    def metadata_partition_number(self, topic_id: bytes, partition: int) -> int:
        """Raises Unavailable if the topic was not read yet."""
        with self._lock:
            if not self._reached:
                raise Unavailable(f"{self._topic.name} has not been read yet")
            return metadata_partition(topic_id, partition, self._partitions)

    def tiered_partitions(self) -> list[TieredPartitionSegmentCounts]:
        with self._lock:
            return list(self._states.tiered_partitions())

    def fold_positions(self) -> Mapping[int, FoldPosition]:
        with self._lock:
            return dict(self._reached)

    @property
    def leaderless_metadata_partitions(self) -> frozenset[int]:
        return self._leaderless

    def compactor_records_by_minute(self) -> Mapping[int, int]:
        with self._lock:
            total: Counter[int] = Counter()
            for reached in self._reached.values():
                total.update(dict(reached.compactor_records))
            return total

    def _fold_until(self, deadline: float) -> MetadataFoldResult:
        identity = self._topic.identity()
        if identity != self._identity:
            self._reached = self._states.load_fold_positions(identity)
            self._folds += 1
            self._partitions, self._identity, self._checked = identity.partitions, identity, set()
        bounds = self._topic.bounds()
        self._leaderless = frozenset(range(self._partitions)) - bounds.keys()
        self._seek_unread_records(bounds)
        folded = 0
        while self._count_unread_records(bounds) and time.monotonic() < deadline:
            read = self._read_unfolded_record_chunks(bounds, deadline)
            for number in sorted(read):
                folded += self._fold_chunk(number, read[number])
        return MetadataFoldResult(folded, self._count_unread_records(bounds))

    def _seek_unread_records(self, bounds: Mapping[int, FirstAndEndOffsets]) -> None:
        # Seek each metadata partition to its next record to fold, or to the last folded one if it was not yet compared.
        positions = {}
        for number, (start, end) in bounds.items():
            reached = self._reached[number]
            if reached.position > end:
                raise _FoldedRecordsLostError(f"partition {number} ends at {end}, {reached.position} was folded already: it was truncated")
            if start > reached.position:
                # What is gone cannot be folded: whoever asks is told.
                reached = self._reached[number] = FoldPosition(start, missing=start, compactor_records=reached.compactor_records)
                self._states.save_fold_position(number, reached)
            if reached.stopped:
                continue
            if reached.last < start:
                self._checked.add(number)
            positions[number] = reached.position if number in self._checked else reached.last
        if positions != self._forward_read:
            self._topic.seek(positions)
            self._forward_read = positions

    def _count_unread_records(self, bounds: Mapping[int, FirstAndEndOffsets]) -> dict[int, int]:
        # Partitions that are read to their end, or have a record at which brokers stop, are left out.
        behind = {}
        for number, (_, end) in bounds.items():
            reached = self._reached[number]
            if not reached.stopped and (reached.position < end or number not in self._checked):
                behind[number] = end - reached.position
        return behind

    def _read_unfolded_record_chunks(self, bounds: Mapping[int, FirstAndEndOffsets], deadline: float) -> dict[int, _UnfoldedRecordChunk]:
        read: dict[int, _UnfoldedRecordChunk] = {}
        count = size = 0
        wanted = self._count_unread_records(bounds)
        while count < self._chunk_records and size < MAX_CHUNK_BYTES and time.monotonic() < deadline:
            try:
                polled = self._topic.poll(
                    min(_POLL_RECORDS, self._chunk_records), min(_POLL_TIMEOUT_S, max(0.0, deadline - time.monotonic()))
                )
            except NotFound as error:
                raise _FoldedRecordsLostError(str(error)) from error
            for record in polled.records:
                known = read.setdefault(record.partition, _UnfoldedRecordChunk([], 0))
                known.records.append(record)
                known.reached = record.offset + 1
                size += len(record.value or b"")
            count += len(polled.records)
            for number, position in polled.reached.items():
                known = read.setdefault(number, _UnfoldedRecordChunk([], 0))
                known.reached = max(known.reached, position)
            self._forward_read |= {number: known.reached for number, known in read.items()}
            if all(number in read and read[number].reached >= bounds[number].end for number in wanted):
                break
        return read

    def _fold_chunk(self, metadata_partition: int, chunk: _UnfoldedRecordChunk) -> int:
        reached = self._reached[metadata_partition]
        records = self._unfolded_records(metadata_partition, reached, chunk)
        self._checked.add(metadata_partition)
        by_partition: dict[TopicIdPartition, list[tuple[int, MetadataRecord]]] = {}
        ours: list[tuple[int, int]] = []
        stopped, position = "", max(reached.position, chunk.reached)
        for record in records:
            try:
                decoded = self._decode_record(record)
            except BadData as error:
                stopped, position = error.cause, record.offset
                break
            by_partition.setdefault(decoded.partition, []).append((record.offset, decoded))
            if decoded.broker_id == COMPACTOR_BROKER_ID:
                ours.append((record.offset, decoded.event_timestamp_ms))
        names = list(by_partition)
        at = 0
        while at < len(names):
            try:
                self._apply_records_to_partitions(
                    metadata_partition, {name: by_partition[name] for name in names[at : at + _PARTITIONS_PER_SAVE]}, position
                )
                at += _PARTITIONS_PER_SAVE
            except BadData as error:
                # All that stands before it counts, nothing after it: once more from the first, what is applied stays so.
                stopped, position, at = error.cause, error.offset, 0
        done = [record for record in records if record.offset < position]
        stamps = [stamp for offset, stamp in ours if offset < position]
        message = with_timestamps_added(reached.compactor_records, stamps, self._clock_ms()) if stamps else reached.compactor_records
        last = FoldPosition(position, reached.last, reached.digest, reached.missing, stopped, message)
        if done:
            last = replace(last, last=done[-1].offset, digest=_record_value_sha256_hex(done[-1]))
        if last != reached:
            self._states.save_fold_position(metadata_partition, last)
            self._reached[metadata_partition] = last
            self._folds += 1
        return len(done)

    def _unfolded_records(
        self, metadata_partition: int, fold_position: FoldPosition, chunk: _UnfoldedRecordChunk
    ) -> list[RawMetadataTopicRecord]:
        """Raises _FoldedRecordsLostError if the last folded record differs from the stored digest."""
        if metadata_partition not in self._checked:
            first = chunk.records[0] if chunk.records else None
            if first is None or first.offset != fold_position.last or _record_value_sha256_hex(first) != fold_position.digest:
                raise _FoldedRecordsLostError(
                    f"partition {metadata_partition} has another record at {fold_position.last} than was folded: truncated or created again"
                )
        return [record for record in chunk.records if record.offset >= fold_position.position]

    def _apply_records_to_partitions(
        self, metadata_partition: int, records: Mapping[TopicIdPartition, Iterable[tuple[int, MetadataRecord]]], end_offset: int
    ) -> None:
        names = list(records)
        held = dict(zip(names, self._states.load_folded_partitions(metadata_partition, names), strict=True))
        done = {}
        topic = f"{self._topic.name}-{metadata_partition}"
        try:
            for name in names:
                folded = done[name] = held[name] or FoldedPartitionMetadata(RemoteLogMetadataCache(name, LazilyDecodedSegments()))
                for offset, record in records[name]:
                    if offset >= end_offset:
                        break
                    folded.apply_record(record, offset, topic)
        finally:
            self._states.save_folded_partitions(done)

    def _decode_record(self, record: RawMetadataTopicRecord) -> MetadataRecord:
        topic = f"{self._topic.name}-{record.partition}"
        if record.key is not None:
            message = "the record has a key: a compacted metadata topic (KIP-1266) is not understood"
            raise BadData(message, segment=topic, offset=record.offset)
        decoded = decode_record(record.value, offset=record.offset, topic=topic)
        name = decoded.partition
        if (right := metadata_partition(name.topic_id, name.partition, self._partitions)) != record.partition:
            raise BadData(f"a record of {name} belongs into partition {right}", segment=topic, offset=record.offset)
        return decoded


def _record_value_sha256_hex(record: RawMetadataTopicRecord) -> str:
    return hashlib.sha256(record.value or b"").hexdigest()
