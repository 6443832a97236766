"""Comparison of a log with what a reader has read before, by topic ids and leader epochs (KIP-320).

A position says more than an offset: the topic id, and the leader epoch of the record before the offset. After an unclean election, or after
a topic was deleted and created again, other records can have the same offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from checkpoint.lineage import Lineage, first_divergent_offset, truncate_lineage_at
from compactor.access.tier import Tier
from compactor.constants import EMPTY_TOPIC_ID, MAX_OFFSET, LeaderEpoch, TopicId
from compactor.control.state import PartitionState


class LeaderEpochEnd(NamedTuple):
    """A leader epoch, and the offset after its last record (exclusive)."""

    epoch: LeaderEpoch
    end: int


@dataclass(frozen=True)
class ConsumedLogHistory:
    """Description of the records that a reader has read of a log.

    topic_id: id of the topic; empty if unknown.
    epochs: leader epochs of records that were read, ascending; empty if unknown. Of a position restored after a restart, only the last
        epoch is known.
    end: position of the reader: everything below this offset was read.
    """

    topic_id: TopicId
    epochs: tuple[LeaderEpochEnd, ...]
    end: int

    @property
    def last_read_leader_epoch(self) -> LeaderEpoch | None:
        """Return the leader epoch of the last record that was read; None if unknown."""
        return self.epochs[-1].epoch if self.epochs else None

    def consumed_history_below_offset(self, offset: int) -> ConsumedLogHistory:
        """Return the part of this history below ``offset`` (exclusive)."""
        begun = sum(known.end < offset for known in self.epochs) + 1
        return ConsumedLogHistory(
            self.topic_id, tuple(LeaderEpochEnd(epoch, min(end, offset)) for epoch, end in self.epochs[:begun]), offset
        )


@dataclass(frozen=True)
class LogIdentity:
    """Topic id, leader epochs and end of a log, by which two logs can be compared without reading their records.

    topic_id: id of the topic; empty if unknown.
    lineage: leader epochs with their first offsets; empty if unknown.
    end: end offset, exclusive.
    """

    topic_id: TopicId = EMPTY_TOPIC_ID
    lineage: Lineage = ()
    end: int = 0

    def consumed_history_below_offset(self, offset: int) -> ConsumedLogHistory:
        """Return the history that a reader has after reading this log up to ``offset`` (exclusive)."""
        begun = truncate_lineage_at(self.lineage, offset)
        ends = [*(entry.start_offset for entry in begun[1:]), offset]
        return ConsumedLogHistory(
            self.topic_id, tuple(LeaderEpochEnd(entry.epoch, end) for entry, end in zip(begun, ends, strict=False)), offset
        )


@dataclass(frozen=True)
class HistoryMismatchReason:
    """Reason why a log does not continue what was read.

    reason: ``topic``: the log is another topic's; ``older``: the log ends in an earlier leader epoch than what was read, so that a later
        leader has replaced its end; ``truncated``: a later leader has discarded records that were read.
    agreed_offset: for ``truncated``: the log holds what was read up to this offset (exclusive); -1 for other reasons.
    """

    reason: Literal["topic", "older", "truncated"]
    agreed_offset: int = -1


def log_identity(tier: Tier, state: PartitionState) -> LogIdentity:
    """Return topic id, leader epochs and end offset of a partition's log in the tier."""
    return LogIdentity(state.topic_id or tier.metadata.topic_id(state.topic_partition), state.lineage, state.end_offset + 1)


def consumed_history_before_position(offset: int, leader_epoch: int | None, topic_id: str) -> ConsumedLogHistory:
    """Return the history of a reader of which only a position is known, as after a restart.

    :param leader_epoch: epoch of the record before ``offset``; None or negative if unknown.
    """
    known = leader_epoch is not None and leader_epoch >= 0 and offset > 0
    return ConsumedLogHistory(TopicId(topic_id), (LeaderEpochEnd(LeaderEpoch(leader_epoch or 0), offset),) if known else (), offset)


def are_topic_ids_known_to_differ(first_id: TopicId, second_id: TopicId) -> bool:
    """Return whether two topic ids are known to differ. An empty id is unknown and differs from none."""
    return bool(first_id and second_id and first_id != second_id)


def find_log_mismatch(consumed_history: ConsumedLogHistory, log: LogIdentity) -> HistoryMismatchReason | None:
    """Compare a reader's history with a log. Return why ``log`` does not continue the records that were read, or None if ``log`` does, or
    if too little is known to compare them.

    Records of one leader epoch are the same in all logs of a partition, and so are all records before them. Therefore two logs agree up to
    the end of the largest epoch that both have. In ``log``, an epoch ends where the next one begins (OffsetsForLeaderEpoch). The last epoch
    has no known end, because the tier ends earlier than the broker's log from which it is uploaded.
    """
    if are_topic_ids_known_to_differ(consumed_history.topic_id, log.topic_id):
        return HistoryMismatchReason("topic")
    if not consumed_history.epochs or not log.lineage:
        return None
    starts = [entry.start_offset for entry in log.lineage]
    ends = dict(zip((entry.epoch for entry in log.lineage), [*starts[1:], MAX_OFFSET], strict=True))
    if log.lineage[-1].epoch < consumed_history.epochs[-1].epoch:
        return HistoryMismatchReason("older") if log.end >= consumed_history.end else None
    common = next((known for known in reversed(consumed_history.epochs) if known.epoch in ends), None)
    if common is not None:
        agreed = min(common.end, ends[common.epoch])
    else:
        # A restored position whose epoch the log does not have: as in Kafka, assume that they agree up to the log's next epoch.
        agreed = next(entry.start_offset for entry in log.lineage if entry.epoch > consumed_history.epochs[0].epoch)
        agreed = agreed if agreed < consumed_history.end else starts[0]
    return HistoryMismatchReason("truncated", agreed) if agreed < consumed_history.end else None


def first_diverging_offset(old_log: LogIdentity, new_log: LogIdentity, end_offset: int) -> int | None:
    """Return the first offset below ``end_offset`` (exclusive) at which ``new_log`` holds other records than ``old_log``, or None if there
    is none.
    """
    if are_topic_ids_known_to_differ(old_log.topic_id, new_log.topic_id):
        return 0
    return first_divergent_offset(old_log.lineage, end_offset, new_log.lineage, new_log.end)
