"""State of one partition that a consumer reads: its position, and what it was read from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compactor.constants import EMPTY_TOPIC_ID, LeaderEpoch, TopicId
from compactor.consumer.history import EpochEnd, LogIdentity, ReadHistory
from compactor.consumer.serving import Source
from compactor.model.ids import TopicPartition


@dataclass
class AssignedPartition:
    """State of a partition that a consumer reads: its position, and whether the tier or the broker serves its next records.

    position: offset after the last message that was returned.
    topic_id: id of the topic that was read; empty if unknown.
    epochs: leader epochs that were read, if ``log`` is None; the last one reaches to the position.
    log: the log of the tier that is being read.
    source: what the next records come from; with ``none`` the partition starts again at ``wake_s``, in seconds of the monotonic clock.
    broker_start: the broker's first offset, if it is above the position; else -1.
    is_reported: whether an error was returned since the last record.
    is_view_done: whether the view ``latest`` was read.
    """

    name: TopicPartition
    position: int
    topic_id: TopicId = EMPTY_TOPIC_ID
    epochs: tuple[EpochEnd, ...] = ()
    log: LogIdentity | None = None
    source: Source = "none"
    wake_s: float = 0.0
    broker_start: int = -1
    is_reported: bool = False
    is_view_done: bool = False

    @property
    def read(self) -> ReadHistory:
        """Return topic id, leader epochs and end of the records that were read up to the position, by which the next log is checked."""
        if self.log is not None:
            return replace(self.log.history_below(self.position), topic_id=self.topic_id)
        epochs = (*self.epochs[:-1], EpochEnd(self.epochs[-1].epoch, self.position)) if self.epochs else ()
        return ReadHistory(self.topic_id, epochs, self.position)

    def note_log(self, log: LogIdentity | None) -> None:
        """Set the log of the tier from which the next records are read; None for the broker."""
        self.epochs = self.read.epochs
        if log is not None:
            self.topic_id = log.topic_id or self.topic_id
        self.log = log

    def note_record(self, offset: int, epoch: LeaderEpoch | None) -> None:
        """Advance the position to the offset after a record that was returned. ``epoch`` is its leader epoch, if the broker returned it."""
        if epoch is not None and (not self.epochs or epoch > self.epochs[-1].epoch):
            self.epochs = (*self.read.epochs, EpochEnd(epoch, offset + 1))
        self.position, self.is_reported = offset + 1, False

    def go_to(self, read: ReadHistory) -> None:
        """Move the position to the end of another history."""
        self.position, self.topic_id, self.epochs, self.log = read.end, read.topic_id, read.epochs, None
        self.is_view_done, self.is_reported, self.broker_start = True, False, -1
