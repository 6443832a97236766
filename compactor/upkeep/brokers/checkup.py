"""Collects what ``doctor`` judges: settings and offsets from the cluster, segments from the metadata topic, objects from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from compactor.access.tier import Tier
from compactor.brokers.conditions import NOTHING_CONFIRMED, ClusterConfirmations, ClusterDescriptionQueries
from compactor.brokers.metadata_topic.admin import (
    OffsetAndTimestampMs,
    TopicAndNumber,
    TopicDescription,
    metadata_topic_write_refusal_reason,
)
from compactor.brokers.metadata_topic.chain import broker_view, offset_gaps
from compactor.brokers.metadata_topic.codec import RemoteLogSegmentMetadataRecord
from compactor.control.mirror import segment_from_broker_record
from compactor.errors import BadData, NotFound, Refused
from compactor.model.ids import TopicPartition
from compactor.records.batches import parse_batch_headers_of_segment
from compactor.records.indexes import OFFSET_ENTRY
from compactor.upkeep.brokers.doctor import FirstUntieredRecord, PartitionHealthFacts, partition_health_findings
from compactor.upkeep.brokers.known_problems import (
    TierHealthFinding,
    describe_topics,
    known_kafka_problem_findings,
    metadata_growth_findings,
    unsuitable_broker_findings,
)
from compactor.upkeep.brokers.objects import list_partition_objects_and_metadata
from compactor.upkeep.brokers.verify import end_hole
from compactor.views.prices import PriceTable

MAX_END_BYTES = 64 << 20
"""A log whose offset index says so little of its end that more would have to be read is not examined for a hole at its end."""
UntieredRecordAndLookupProblem = tuple[FirstUntieredRecord | None, str]
"""First record that is not tiered, if it was found; and the leader's answer if it could not look for the record, else empty."""


class ClusterHealthQueries(ClusterDescriptionQueries, Protocol):
    """Requests about the cluster that ``doctor`` makes. Implemented by metadata_topic.admin.KafkaAdmin."""

    def first_offsets_at_or_after_timestamps(
        self, timestamps_ms: Mapping[TopicAndNumber, int]
    ) -> Mapping[TopicAndNumber, OffsetAndTimestampMs]:
        """Return, by topic and partition, offset and timestamp of the first record at or after the given timestamp. Both are -1 if there
        is none.
        """


def find_tier_health_problems(
    tier: Tier,
    admin: ClusterHealthQueries,
    partitions: Sequence[TopicPartition],
    prices: PriceTable,
    on_partition: Callable[[], None] = lambda: None,
    expected_topics: Sequence[str] = (),
    confirmed: ClusterConfirmations = NOTHING_CONFIRMED,
) -> list[TierHealthFinding]:
    """Return all findings about these partitions and the cluster. Read-only.

    :param expected_topics: topics that should be tiered. Their uploads are examined even if the metadata topic names no segment of theirs.
    :param on_partition: called after each partition.
    :param confirmed: what the configuration confirms about the cluster.
    :raises StoreError: if the store or the brokers do not answer.
    """
    topics = describe_topics(admin, sorted({name.topic for name in partitions} | set(expected_topics)))
    brokers = admin.describe_cluster().brokers
    found = unsuitable_broker_findings(brokers, confirmed)
    metadata_topic = admin.describe_metadata_topic()
    if problem := metadata_topic_write_refusal_reason(metadata_topic, brokers[0].address if brokers else ""):
        means = "brokers forget segments when they start; consumers are reset, and the objects stay for ever"
        todo = "Set it before a broker starts again; `orphans find` lists what is lost already"
        found.append(TierHealthFinding("error", "metadata-topic", "", -1, metadata_topic.topic, problem, means, todo))
    found += known_kafka_problem_findings(brokers, topics)
    segments = 0
    for name in partitions:
        try:
            facts = _gather_partition_health_facts(tier, admin, name, topics)
            segments += len(facts.segments)
            found += partition_health_findings(facts, tier.ports.clock_ms(), prices)
        except BadData as error:
            means = "brokers stop reading the metadata topic there, too: the partition's tiered part cannot be read"
            todo = "Ask who wrote it; see docs/broker-tiers.md"
            where = f"{error.segment} at offset {error.offset}"
            found.append(TierHealthFinding("error", "unreadable-metadata", name.topic, name.partition, where, error.cause, means, todo))
        on_partition()
    for name in _tiered_partitions_without_segments([topics[topic] for topic in expected_topics if topic in topics], partitions):
        examined = PartitionHealthFacts(
            name, [], _setting_values(topics[name.topic]), *_first_untiered_record_or_problem(admin, name, [], topics)
        )
        found += partition_health_findings(examined, tier.ports.clock_ms(), prices)
    return [*found, *metadata_growth_findings(metadata_topic, segments)]


def _gather_partition_health_facts(
    tier: Tier, admin: ClusterHealthQueries, partition: TopicPartition, topics: Mapping[str, TopicDescription]
) -> PartitionHealthFacts:
    seen = list_partition_objects_and_metadata(tier, partition)
    segments = list(seen.folded.cache.segments.values())
    missing = [
        tier.ports.layout.object_name(partition, segment_from_broker_record(one), part)
        for one in seen.readable
        for part in seen.missing_file_kinds_of_segment(one, tier.ports.layout.object_kinds_required_for_reading)
    ]
    oldest_ms = tier.ports.clock_ms() - tier.retention.orphan_age_ms
    orphans = [one.listed for one in seen.orphans if one.listed.modified_ms <= oldest_ms]
    return PartitionHealthFacts(
        partition,
        segments,
        _setting_values(topics[partition.topic]) if partition.topic in topics else {},
        *_first_untiered_record_or_problem(admin, partition, seen.readable, topics),
        missing,
        offset_gaps(broker_view(seen.folded.cache, partition).links),
        len(orphans),
        sum(one.size for one in orphans),
        None if missing else _end_hole_of_newest_segment(tier, partition, seen.readable),
    )


def _end_hole_of_newest_segment(
    tier: Tier, partition: TopicPartition, readable: Sequence[RemoteLogSegmentMetadataRecord]
) -> tuple[int, int] | None:
    """Return the offsets that the newest tiered segment lacks at its end (``end_hole``). Reads its offset index, and its log from the last
    indexed batch on. Return None if they cannot be read, which `verify` reports.
    """
    newest = max(readable, key=lambda one: one.end_offset, default=None)
    if newest is None:
        return None
    layout, segment = tier.ports.layout, segment_from_broker_record(newest)
    try:
        segment = segment.model_copy(update={"files": dict(layout.segment_files(partition, segment))})
        entries = np.frombuffer(layout.read_file(partition, segment, "index"), OFFSET_ENTRY)
        position = int(entries["position"][-1]) if len(entries) else 0
        if newest.size_bytes - position > MAX_END_BYTES:
            return None
        end = np.frombuffer(layout.read_file(partition, segment, "log", position), np.uint8)
        return end_hole(newest, parse_batch_headers_of_segment(end, newest.id))
    except (BadData, NotFound, ValueError):
        return None


def _tiered_partitions_without_segments(
    topics: Iterable[TopicDescription], partitions: Sequence[TopicPartition]
) -> Iterator[TopicPartition]:
    """Yield the partitions of topics with remote storage for which the metadata topic names no segment.

    :param partitions: the partitions for which the metadata topic names a segment.
    """
    named = {(name.topic, name.partition) for name in partitions}
    for topic in topics:
        if _setting_values(topic).get("remote.storage.enable") == "true":
            yield from (TopicPartition(topic.topic, number) for number in sorted(topic.partitions) if (topic.topic, number) not in named)


def _setting_values(topic: TopicDescription) -> dict[str, str]:
    return {setting: found.value for setting, found in topic.settings.items()}


def _first_untiered_record_or_problem(
    admin: ClusterHealthQueries,
    partition: TopicPartition,
    tiered: Sequence[RemoteLogSegmentMetadataRecord],
    topics: Mapping[str, TopicDescription],
) -> UntieredRecordAndLookupProblem:
    """Return two values: the earliest record that is not tiered yet, and an error message. If all records are tiered, the first value is
    None and the message is empty. If the leader cannot look up records by their timestamps, the record is not known: the first value is
    None, and the message is the leader's.
    """
    try:
        return _find_first_untiered_record_by_time(admin, partition, tiered, topics), ""
    except Refused as error:
        return None, error.message


def _find_first_untiered_record_by_time(
    admin: ClusterHealthQueries,
    partition: TopicPartition,
    tiered: Sequence[RemoteLogSegmentMetadataRecord],
    topics: Mapping[str, TopicDescription],
) -> FirstUntieredRecord | None:
    """Return the earliest record after all ``tiered`` segments, found by its timestamp; None if there is none, or if the topic is not in
    ``topics``. Raises Refused if the leader cannot look up timestamps.

    Timestamps need not ascend from segment to segment, because control records have the broker's time and other records the producer's.
    """
    if partition.topic not in topics:
        return None
    after_ms = max((one.max_timestamp_ms + 1 for one in tiered), default=0)
    after = max((one.end_offset for one in tiered), default=-1)
    offset, timestamp_ms = _first_offset_and_timestamp_at_or_after(admin, partition, after_ms)
    if offset <= after or timestamp_ms < 0:
        return None
    limit = topics[partition.topic].settings.get("segment.ms")
    later, closed_ms = (
        _first_offset_and_timestamp_at_or_after(admin, partition, timestamp_ms + int(limit.value) + 1) if limit is not None else (-1, -1)
    )
    return FirstUntieredRecord(offset, timestamp_ms, closed_ms if later > offset else None)


def _first_offset_and_timestamp_at_or_after(admin: ClusterHealthQueries, partition: TopicPartition, at_ms: int) -> OffsetAndTimestampMs:
    """Return offset and timestamp of the first record of a partition whose timestamp is ``at_ms`` or later, -1 and -1 if there is none."""
    where = (partition.topic, partition.partition)
    return admin.first_offsets_at_or_after_timestamps({where: at_ms}).get(where, (-1, -1))
