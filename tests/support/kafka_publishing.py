"""A publisher over a metadata topic in memory, on which brokers and compactors write, and what brokers make of each record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compactor.adapters.brokers.cache import FoldedMetadataStore, RemoteLogMetadataCache
from compactor.adapters.brokers.chain import lineage_from_segments, segment_read_ranges
from compactor.adapters.brokers.codec import decode_record
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader, metadata_partition
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.remote_log import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
    uuid_bytes,
    uuid_text,
)
from compactor.model.segment import RemoteLogSegmentMetadata, SegmentState
from tests.simulation.memory_topic import Loss, MemoryMetadataTopic, MemoryTopicLog
from tests.support.segments import make_segment

TOPIC_ID = b"topic-id-of-16-b"
NAME = TopicPartition("orders", 0)
WHERE = TopicIdPartition(TOPIC_ID, NAME.topic, NAME.partition)
S = SegmentState


class KeptNowhere:
    """LocalKeyValueStore of a machine without a disk."""

    is_writable = False

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [None for _ in keys]

    def entries_with_prefix(self, prefix: bytes) -> dict[bytes, bytes]:
        return {}

    def write(self, values: Mapping[bytes, bytes], deleted: Sequence[bytes] = ()) -> None:
        raise AssertionError("it is not writable")

    def delete_all_entries(self, reason: str) -> None:
        """There is nothing."""


@dataclass
class BrokerWorld:
    """One partition under brokers that tier it."""

    log: MemoryTopicLog = field(default_factory=MemoryTopicLog)
    broker_id: int = 1
    time_ms: int = 1_000

    def publisher(
        self, fate: Callable[[], Loss] = Loss, *, max_delivery_delay_ms: int = 0, appending: MemoryMetadataTopic | None = None
    ) -> MetadataTopicSegmentPublisher:
        """Of one process: its own consumer, its own fold. ``appending``: through which it appends."""
        topic = appending or MemoryMetadataTopic(self.log, fate=fate)
        followed = FoldingMetadataTopicReader(
            MemoryMetadataTopic(self.log), FoldedMetadataStore(KeptNowhere()), clock_ms=lambda: self.time_ms
        )
        return MetadataTopicSegmentPublisher(
            followed,
            topic,
            lambda name: uuid_text(TOPIC_ID),
            clock_ms=lambda: self.time_ms,
            max_delivery_delay_ms=max_delivery_delay_ms,
        )

    def tier(self, number: int, start: int, end: int, epochs: Mapping[int, int] | None = None) -> RemoteLogSegmentMetadata:
        """A broker copies a segment."""
        made = described(number, start, end, epochs)
        self.write(introduced(made, self.broker_id), self.said(made.id, S.COPY_SEGMENT_FINISHED))
        return made

    def delete(self, *ids: str) -> None:
        """A broker does, by retention or because it was told to."""
        for each in ids:
            self.write(self.said(each, S.DELETE_SEGMENT_STARTED), self.said(each, S.DELETE_SEGMENT_FINISHED))

    def said(self, name: str, state: SegmentState, broker_id: int | None = None) -> RemoteLogSegmentMetadataUpdateRecord:
        return RemoteLogSegmentMetadataUpdateRecord(
            WHERE, raw(name), self.broker_id if broker_id is None else broker_id, self.time_ms, state
        )

    def write(self, *records: MetadataRecord) -> None:
        self.log.write(records)

    def steps(self) -> Iterator[tuple[MetadataRecord, RemoteLogMetadataCache]]:
        """What a broker has after each record of the partition; raises what would stop it."""
        cache = RemoteLogMetadataCache(WHERE)
        for record in self.log.logs[metadata_partition(TOPIC_ID, NAME.partition, len(self.log.logs))]:
            assert record is not None
            decoded = decode_record(record.value)
            cache.apply_record(decoded, record.offset)
            yield decoded, cache

    def cache(self) -> RemoteLogMetadataCache:
        cache = RemoteLogMetadataCache(WHERE)
        for _, after in self.steps():
            cache = after
        return cache

    def served(self) -> list[tuple[str, int, int]]:
        cache = self.cache()
        return [(link.segment.id, link.first, link.last) for link in segment_read_ranges(cache, lineage_from_segments(cache))]

    def states(self) -> dict[str, SegmentState]:
        return {one.id: one.state for one in self.cache().segments.values()}


def raw(name: str) -> bytes:
    return uuid_bytes(name)


def named(number: int) -> str:
    return encode_segment_id(number.to_bytes(16, "big"))


def described(
    number: int, start: int, end: int, epochs: Mapping[int, int] | None = None, *, max_ms: int = 1000
) -> RemoteLogSegmentMetadata:
    return make_segment(named(number), start, end, at_ms=max_ms, epochs=tuple((epochs or {0: start}).items()))


def introduced(segment: RemoteLogSegmentMetadata, broker_id: int) -> RemoteLogSegmentMetadataRecord:
    return RemoteLogSegmentMetadataRecord(
        WHERE, raw(segment.id), segment.start_offset, segment.end_offset, broker_id, segment.max_timestamp_ms, 5, segment.leader_epochs, 100
    )
