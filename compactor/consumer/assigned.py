"""State of one partition that a consumer reads: its position, and what it was read from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compactor.constants import EMPTY_TOPIC_ID, LeaderEpoch, TopicId
from compactor.consumer.history import ConsumedLogHistory, LeaderEpochEnd, LogIdentity
from compactor.consumer.serving import Source
from compactor.model.ids import TopicPartition


@dataclass
class AssignedPartition:
    """State of a partition that a consumer reads: its position, and whether the tier or the broker serves its next records.

    position: offset after the last message that was returned.
    topic_id: id of the topic that was read; empty if unknown.
    epochs: leader epochs that were read, used only if ``log`` is None. The last one extends up to the position.
    log: identity of the tier's log that is being read; None if the broker is read.
    source: where the next records come from: tier, broker, or ``none`` while the partition waits until ``wake_s``.
    wake_s: time of the next attempt after an error, in seconds of the monotonic clock.
    broker_start: the broker's first offset, if it is greater than the position; else -1.
    is_handed_over: whether the broker continues what was read from the tier.
    is_reported: whether an error was returned after the last record.
    is_view_done: whether the view ``latest`` (last records of all keys) was read completely.
    """

    partition: TopicPartition
    position: int
    topic_id: TopicId = EMPTY_TOPIC_ID
    epochs: tuple[LeaderEpochEnd, ...] = ()
    log: LogIdentity | None = None
    source: Source = "none"
    wake_s: float = 0.0
    broker_start: int = -1
    is_handed_over: bool = False
    is_reported: bool = False
    is_view_done: bool = False

    @property
    def consumed_history(self) -> ConsumedLogHistory:
        """Return topic id, leader epochs and end offset of the records that were read up to the position. Before reading continues in
        another log, that log is compared with this history.
        """
        if self.log is not None:
            return replace(self.log.consumed_history_below_offset(self.position), topic_id=self.topic_id)
        epochs = (*self.epochs[:-1], LeaderEpochEnd(self.epochs[-1].epoch, self.position)) if self.epochs else ()
        return ConsumedLogHistory(self.topic_id, epochs, self.position)

    def set_tier_log_identity(self, identity: LogIdentity | None) -> None:
        """Set the identity of the tier's log that the next records come from; None if they come from the broker."""
        self.epochs = self.consumed_history.epochs
        if identity is not None:
            self.topic_id = identity.topic_id or self.topic_id
        self.log = identity

    def advance_past_record(self, offset: int, epoch: LeaderEpoch | None) -> None:
        """Set the position to the offset after a record that was returned. ``epoch``: the record's leader epoch, if the broker returned it;
        else None.
        """
        if epoch is not None and (not self.epochs or epoch > self.epochs[-1].epoch):
            self.epochs = (*self.consumed_history.epochs, LeaderEpochEnd(epoch, offset + 1))
        self.position, self.is_reported = offset + 1, False

    def move_position_to_end_of_history(self, history: ConsumedLogHistory) -> None:
        """Set position, topic id and leader epochs to those at the end of ``history``."""
        self.position, self.topic_id, self.epochs, self.log = history.end, history.topic_id, history.epochs, None
        self.is_view_done, self.is_reported, self.broker_start = True, False, -1
