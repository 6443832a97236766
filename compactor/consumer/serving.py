"""Decisions of a consumer: where a partition's next records come from, and which partitions are held. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, get_args

from compactor.model.ids import TopicPartition

Mode = Literal["remote_only", "kafka_only", "remote_preferred", "kafka_preferred"]
"""Where records are read: from the tier only, from brokers only, or from both; then from the preferred one if both have an offset."""

MODES: Final[tuple[Mode, ...]] = get_args(Mode)

Source = Literal["tier", "broker", "none"]
"""What a partition's records come from. With ``none`` the partition waits, and then starts again."""

ReadSourceEvent = Literal["start", "tier_ended", "broker_deleted"]
"""Reason to decide anew.

start: the partition was assigned or sought, or its waiting time is over.
tier_ended: the tier holds no further record, or (with ``kafka_preferred``) the brokers hold the next one.
broker_deleted: the brokers' log begins above the position.
"""

NEXT_SOURCE: Final[dict[tuple[Mode, ReadSourceEvent], Source]] = {
    ("remote_only", "start"): "tier",
    ("remote_only", "tier_ended"): "none",
    ("remote_only", "broker_deleted"): "none",
    ("kafka_only", "start"): "broker",
    ("kafka_only", "tier_ended"): "broker",
    ("kafka_only", "broker_deleted"): "none",
    ("remote_preferred", "start"): "tier",
    ("remote_preferred", "tier_ended"): "broker",
    ("remote_preferred", "broker_deleted"): "tier",
    ("kafka_preferred", "start"): "broker",
    ("kafka_preferred", "tier_ended"): "broker",
    ("kafka_preferred", "broker_deleted"): "tier",
}

AssignmentStep = Literal["replace", "add", "remove"]
"""Change of an assignment: all of it (``assign``), or a part of it (a cooperative rebalance)."""


@dataclass(frozen=True)
class AssignmentChange:
    """Difference between two assignments: partitions to stop reading first, and partitions to start reading then.

    If an assignment is replaced, a partition may be in both.
    """

    dropped: tuple[TopicPartition, ...]
    added: tuple[TopicPartition, ...]


def compute_assignment_change(
    assigned: Collection[TopicPartition], step: AssignmentStep, partitions: Collection[TopicPartition]
) -> AssignmentChange:
    """Return which partitions to stop and to start reading when ``partitions`` replace an assignment, are added to it or are removed from
    it.

    :param assigned: partitions that are assigned now.
    :param step: whether to replace, add or remove.
    """
    if step == "replace":
        return AssignmentChange(tuple(assigned), tuple(partitions))
    if step == "add":
        return AssignmentChange((), tuple(name for name in partitions if name not in assigned))
    return AssignmentChange(tuple(name for name in partitions if name in assigned), ())
