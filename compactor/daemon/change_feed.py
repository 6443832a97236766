"""Change feed: reports which partitions a tier has and which of them have new records, without a request for each partition.

On a compactor-managed tier the catalog holds change hints. On a broker-managed tier one reader of the metadata topic knows every partition;
topics whose settings forbid compaction are suspended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from compactor.access.tier import Tier
from compactor.brokers.view import BrokerMetadata, PartitionMetadataVersion
from compactor.control.logs import move_queued_change_hints_into_catalog
from compactor.control.pauses import round_pause_reason_or_empty
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.views.verdict import Block, blocks_of_topics

INBOX_POLL_MS = 60_000
"""How often change hints are collected that could not be appended to the catalog. Costs one LIST."""
REQUEST_EXPIRY_MS = 600_000
"""Requests for a round that are older are ignored by a daemon that has just started."""
POLICY_STEP = 1 << 48
"""Added to a hint for each change of the topic's settings. Larger than any offset, so that no hint repeats an earlier one."""
CatalogSlot = int
"""Number of a record in the catalog's log."""


@dataclass(frozen=True)
class PartitionChangeReport:
    """Report of the change feed about all partitions of a tier at one moment.

    hints: change hint of every partition: a number that changes whenever the partition's log has new records.
    recreated: partitions whose topic was deleted and created again.
    suspended: why rounds of a topic are forbidden, by topic.
    paused: who paused a partition and why, by partition.
    requested: number of the catalog record (slot) in which a person last requested a round, by partition.
    """

    hints: Mapping[TopicPartition, int]
    recreated: frozenset[TopicPartition] = frozenset()
    suspended: Mapping[str, Block] = field(default_factory=dict)
    paused: Mapping[TopicPartition, str] = field(default_factory=dict)
    requested: Mapping[TopicPartition, CatalogSlot] = field(default_factory=dict)


class ChangeFeed(Protocol):
    """Source from which the daemon learns which partitions of a tier have changed."""

    def poll_changes(self, tier: Tier) -> PartitionChangeReport | None:
        """Return a report about all partitions, or None if nothing has changed since the last report. Raises StoreError, UsageError."""


class CatalogChangeFeed:
    """Change feed of a compactor-managed tier. Reads from the tier's catalog which partitions have changed."""

    def __init__(self) -> None:
        self._reported = False
        self._inbox_ms = 0

    def poll_changes(self, tier: Tier) -> PartitionChangeReport | None:
        now = tier.ports.clock_ms()
        taken = 0
        if self._reported and now - self._inbox_ms >= INBOX_POLL_MS:
            self._inbox_ms = now
            taken = move_queued_change_hints_into_catalog(tier.catalog)
        if self._reported and not taken and not tier.catalog.has_new_records():
            return None
        state = tier.identity.read_catalog()
        hints = {name: state.partitions[str(name)] for name in state.topic_partitions}
        self._reported = True
        return PartitionChangeReport(
            hints, paused=pause_reasons_by_partition(state, hints), requested=round_request_slots_by_partition(state, now)
        )


def pause_reasons_by_partition(catalog: CatalogState, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, str]:
    """Return the paused partitions among ``partitions``, each with who paused it and why."""
    if not catalog.paused:
        return {}
    return {name: reason for name in partitions if (reason := round_pause_reason_or_empty(catalog, name))}


def round_request_slots_by_partition(catalog: CatalogState, now_ms: int) -> dict[TopicPartition, CatalogSlot]:
    """Return the partitions for which a person requested a round in the last REQUEST_EXPIRY_MS, each with the number of the catalog record
    (slot) of the request.
    """
    requests = catalog.wanted.items()
    return {
        TopicPartition.parse_partition_store_prefix(text): request.slot
        for text, request in requests
        if now_ms - request.at_ms < REQUEST_EXPIRY_MS
    }


class BrokerChangeFeed:
    """Change feed of a broker-managed tier. Reads from the brokers' metadata which partitions have changed.

    The change hint of a partition (a number that changes with every change) is the offset of the last metadata record about it, plus
    POLICY_STEP for each change of its topic's settings.
    """

    def __init__(self, brokers: BrokerMetadata) -> None:
        self._brokers = brokers
        self._versions: Mapping[TopicPartition, PartitionMetadataVersion] = {}
        self._chosen: dict[str, Mapping[str, str]] = {}
        self._policies: dict[str, int] = {}

    def poll_changes(self, tier: Tier) -> PartitionChangeReport | None:
        if not self._versions or tier.catalog.has_new_records():
            tier.identity.read_catalog()
        brokers = self._brokers
        brokers.refresh(max_age_s=0.0)
        before, self._versions = self._versions, brokers.partition_metadata_versions()
        topics = {name.topic for name in self._versions}
        suspended = blocks_of_topics(tier, topics)
        for topic in topics:
            try:
                now = brokers.topic_status(topic)
            except UsageError:
                continue  # the topic was deleted a moment ago
            if self._chosen.setdefault(topic, now.chosen) != now.chosen:
                self._chosen[topic] = now.chosen
                self._policies[topic] = self._policies.get(topic, 0) + 1
        recreated = {name for name, one in self._versions.items() if name in before and before[name].topic_id != one.topic_id}
        hints = {name: self._compute_change_hint(name, one) for name, one in self._versions.items()}
        state = tier.catalog.state
        requested = round_request_slots_by_partition(state, tier.ports.clock_ms())
        return PartitionChangeReport(hints, frozenset(recreated), suspended, pause_reasons_by_partition(state, hints), requested)

    def _compute_change_hint(self, partition: TopicPartition, version: PartitionMetadataVersion) -> int:
        return version.applied + self._policies.get(partition.topic, 0) * POLICY_STEP


def create_change_feed(tier: Tier) -> ChangeFeed:
    """Return a new change feed of the kind that this tier needs."""
    return BrokerChangeFeed(tier.broker_metadata) if tier.kind.is_broker_managed else CatalogChangeFeed()
