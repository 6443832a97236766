"""Records of the tier-wide log: one type of body per event. ``compactor.control.records`` has their encoding."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from compactor.constants import TopicId
from compactor.model.base import StrictFrozenModel
from compactor.model.ids import TopicPartition, partition_of_incarnation


class TierCreated(StrictFrozenModel):
    """Record: the tier's identity, created once. ``hash_key``: 32 hex digits, the SipHash key with which all record keys are hashed.

    key_entropy_bits: setting [tier] key_entropy_bits. Versions of the program without this setting refuse a record that has the field.
    url, cluster_id: location and cluster of a broker-managed tier; empty for other tiers. They identify the tier, because no object that
        would identify it may be stored among brokers' objects.
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


class _RecordAboutPartition(StrictFrozenModel):
    """Base of the records of the tier-wide log that concern one partition."""

    topic: str
    partition: int
    incarnation: int = Field(default=1, exclude_if=lambda value: value == 1)

    @property
    def topic_partition(self) -> TopicPartition:
        """Return the topic, the partition number and the incarnation (one life of the topic name)."""
        return partition_of_incarnation(self.topic, self.partition, self.incarnation)


class PartitionChanged(_RecordAboutPartition):
    """Record: this partition exists, and its control log has new records.

    slot: a position that its log has reached; 0 if not stated.
    """

    type: Literal["partition_changed"] = "partition_changed"
    slot: int = 0


class SlotsReached(StrictFrozenModel):
    """Record: for each control log, a position (slot) that it has reached, confirmed by reading it back. A log that ends before its
    position was damaged.
    """

    type: Literal["slots_reached"] = "slots_reached"
    slots: dict[str, int]


class PartitionsChanged(StrictFrozenModel):
    """Record: these partitions exist, and their control logs have new records (PartitionChanged for many partitions). Written from change
    hints that were stored as separate objects.
    """

    type: Literal["partitions_changed"] = "partitions_changed"
    slots: dict[str, int]


class DeletionCheckResult(NamedTuple):
    """Result of checking which objects of a partition can be deleted: its control log ended at ``slot``, and no object can be deleted
    before ``next_ms``.

    at_ms: time of the check, in milliseconds since the epoch.
    """

    slot: int
    next_ms: int
    at_ms: int


class PartitionsInspected(StrictFrozenModel):
    """Record: for each partition, the time before which ``retire`` has nothing to delete, unless the log changes. It saves
    ``retire`` from checking again; no decision depends on it.
    """

    type: Literal["partitions_looked"] = "partitions_looked"
    looks: dict[str, DeletionCheckResult]


class RoundsPaused(StrictFrozenModel):
    """Record: no compactor begins a round over partitions that ``pattern`` matches (control.pauses). Open rounds and deletions continue."""

    type: Literal["rounds_paused"] = "rounds_paused"
    pattern: str
    by: str
    reason: str = ""


class RoundsResumed(StrictFrozenModel):
    """Record: the pause with this pattern has ended, so that compactors may begin rounds again."""

    type: Literal["rounds_resumed"] = "rounds_resumed"
    pattern: str
    by: str


class RoundRequested(_RecordAboutPartition):
    """Record: a person or program requests a round over this partition whatever its dirty ratio; a daemon starts it at its next scan."""

    type: Literal["round_wanted"] = "round_wanted"
    by: str


class TopicsConfirmed(StrictFrozenModel):
    """Record: a cluster has reported these topic names with their ids. From then on only this cluster can report whether these topics
    exist.

    topic_ids: topic name -> topic id.
    settings: topic name -> what applies to its compaction and is set on the topic itself, by Kafka's names; empty for a topic that the
        cluster does not compact. A topic that is not named keeps what is recorded. Versions of the program without this field refuse a
        record that has it.
    """

    type: Literal["topics_confirmed"] = "topics_confirmed"
    cluster_id: str
    topic_ids: dict[str, TopicId]
    settings: dict[str, dict[str, str]] = Field(default_factory=dict, exclude_if=lambda value: not value)


class TopicRecreated(StrictFrozenModel):
    """Record: the topic of ``superseded_id`` was deleted and created again as ``topic_id``. The former id does not become current again,
    unless a person takes back what a person has said.

    cluster_id: the cluster that reported this; empty if a person did (``import --new-incarnation``).
    by: the process that wrote the record.
    withdrawn: given if a person takes back that ``topic_id`` was superseded: the incarnations that the name does not mean any more. None
        otherwise. Versions of the program without this field refuse a record that has it.
    """

    type: Literal["topic_recreated"] = "topic_recreated"
    topic: str
    superseded_id: TopicId
    topic_id: TopicId
    cluster_id: str = ""
    by: str = ""
    withdrawn: tuple[str, ...] | None = Field(default=None, exclude_if=lambda value: value is None)


class TopicsInspected(StrictFrozenModel):
    """Record: the answers of a cluster that was asked about topics by their ids.

    missing: ids for which the cluster answered UNKNOWN_TOPIC_ID.
    present: ids of topics that exist.
    asked_ms: when the cluster was asked, by the earlier of the process's clock and the store's.
    """

    type: Literal["topics_inspected"] = "topics_inspected"
    cluster_id: str
    missing: tuple[TopicId, ...] = ()
    present: tuple[TopicId, ...] = ()
    asked_ms: int


CatalogBody = Annotated[
    TierCreated
    | PartitionChanged
    | SlotsReached
    | PartitionsChanged
    | PartitionsInspected
    | RoundsPaused
    | RoundsResumed
    | RoundRequested
    | TopicsConfirmed
    | TopicRecreated
    | TopicsInspected,
    Field(discriminator="type"),
]
