"""Records of the tier-wide log: one type of body per event. ``compactor.control.records`` has their encoding."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from compactor.model.base import Value
from compactor.model.ids import TopicPartition, incarnation


class TierCreated(Value):
    """Record: the tier's identity, created once. ``hash_key``: 32 hex digits, the SipHash key for everything that hashes record keys.

    key_entropy_bits: [tier] key_entropy_bits. Programs that do not know it refuse the record if it is set.
    url, cluster_id: location and cluster of a broker-managed tier, in which nothing can be stored that identifies it.
    """

    type: Literal["tier_created"] = "tier_created"
    tier_id: str
    hash_key: str
    kind: str
    layout: str
    created_by: str
    key_entropy_bits: int = Field(default=0, exclude_if=lambda value: value == 0)
    url: str = ""
    cluster_id: str = ""


class _AboutPartition(Value):
    """Base of records of the tier-wide log about one partition."""

    topic: str
    partition: int
    incarnation: int = Field(default=1, exclude_if=lambda value: value == 1)

    @property
    def name(self) -> TopicPartition:
        """Topic, partition number and incarnation."""
        return incarnation(self.topic, self.partition, self.incarnation)


class PartitionChanged(_AboutPartition):
    """Record: this partition exists, and its control log has new records. ``slot``: a slot that its log has had; 0 if not stated."""

    type: Literal["partition_changed"] = "partition_changed"
    slot: int = 0


class SlotsReached(Value):
    """Record: a slot that each control log has had, read back before this was written. A log that ends below its slot was damaged."""

    type: Literal["slots_reached"] = "slots_reached"
    slots: dict[str, int]


class PartitionsChanged(Value):
    """Record: the same as PartitionChanged for many partitions, by name; written from hints that had waited in the inbox."""

    type: Literal["partitions_changed"] = "partitions_changed"
    slots: dict[str, int]


class RetireInspection(NamedTuple):
    """Result of a retirement check of a partition: its log ended at ``slot``, and no object of it can be deleted before ``next_ms``.

    at_ms: time of the check, in milliseconds since the epoch.
    """

    slot: int
    next_ms: int
    at_ms: int


class PartitionsInspected(Value):
    """Record: until when ``retire`` has nothing to do in each partition, unless its log changes. Only saves ``retire`` from checking
    again.
    """

    type: Literal["partitions_looked"] = "partitions_looked"
    looks: dict[str, RetireInspection]


class RoundsPaused(Value):
    """Record: no compactor begins a round over partitions that ``pattern`` matches (control.pauses). Open rounds and deletions continue."""

    type: Literal["rounds_paused"] = "rounds_paused"
    pattern: str
    by: str
    reason: str = ""


class RoundsResumed(Value):
    """Record: the pause of this pattern has ended."""

    type: Literal["rounds_resumed"] = "rounds_resumed"
    pattern: str
    by: str


class RoundWanted(_AboutPartition):
    """Record: a person or program requests a round over this partition whatever its dirty ratio; a daemon starts it at its next scan."""

    type: Literal["round_wanted"] = "round_wanted"
    by: str


class TopicsConfirmed(Value):
    """Record: a cluster has said that these topic names have these ids. ``topic_ids``: by topic name.

    From then on only this cluster can say what becomes of these topics.
    """

    type: Literal["topics_confirmed"] = "topics_confirmed"
    cluster_id: str
    topic_ids: dict[str, str]


class TopicRecreated(Value):
    """Record: the topic of ``superseded_id`` was deleted and created again as ``topic_id``. The former id never becomes current again.

    cluster_id: the cluster that has said so; empty if a person has (``import --new-incarnation``).
    by: the process that wrote the record.
    """

    type: Literal["topic_recreated"] = "topic_recreated"
    topic: str
    superseded_id: str
    topic_id: str
    cluster_id: str = ""
    by: str = ""


class TopicsInspected(Value):
    """Record: the answers of a cluster that was asked about topics by their ids.

    missing: ids of which the cluster has said UNKNOWN_TOPIC_ID.
    present: ids of topics that exist.
    asked_ms: when it was asked, by the earlier of the process's clock and the store's.
    """

    type: Literal["topics_inspected"] = "topics_inspected"
    cluster_id: str
    missing: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    asked_ms: int


CatalogBody = Annotated[
    TierCreated
    | PartitionChanged
    | SlotsReached
    | PartitionsChanged
    | PartitionsInspected
    | RoundsPaused
    | RoundsResumed
    | RoundWanted
    | TopicsConfirmed
    | TopicRecreated
    | TopicsInspected,
    Field(discriminator="type"),
]
