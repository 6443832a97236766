"""What a round is: plan -> task -> receipt | failure -> replacement. A task names bytes and never holds them.

Everything that could make two executions differ (time, ids, settings, producers, versions) is frozen in the plan (I7).
"""

from __future__ import annotations

from pydantic import Field

from checkpoint.offsets import CleanerOffset as CleanerOffset
from compactor.model.balance import Balance
from compactor.model.base import Value
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata


class ActiveProducer(Value):
    """What Kafka's ``lastRecordsOfActiveProducers`` knows of one producer; ``last_offset`` -1: only markers since the epoch began."""

    producer_id: int
    epoch: int
    last_offset: int


class CompactionTask(Value):
    """One group of neighbouring segments that becomes one new segment. ``most_bytes``: no more is left of it; 0: all of its sources.

    ``in_part``: a part of its one source is enough to make it; whoever reads all of it makes the same.
    """

    group: int
    sources: tuple[str, ...]
    new_segment_id: str
    start_offset: int
    end_offset: int
    leader_epochs: tuple[EpochEntry, ...]
    mtime_ms: int
    most_bytes: int = Field(default=0, exclude_if=lambda value: not value)
    in_part: bool = Field(default=False, exclude_if=lambda value: not value)


class SkippedSegment(Value):
    """A clean segment that this round does not read, and why."""

    id: str
    reason: str


class ReadSegment(Value):
    """A clean segment that this round reads, and why."""

    id: str
    reason: str


class CompactionPlan(Value):
    """One round over one partition.

    ``leader_epoch`` is the compactor's epoch, ``vector`` the cleaner offsets that the plan started from (I6),
    ``end_offset`` the first offset that this round does not clean (exclusive), ``next_dirty_offset`` what the vector says
    after it. ``fingerprint`` names hash key, codec libraries and cleaner version; an executor that differs refuses. ``restores``: the run
    that this one takes back (compactor.round.restoring).
    """

    run_id: str
    topic: str
    partition: int
    leader_epoch: int
    now_ms: int
    first_dirty_offset: int
    end_offset: int
    next_dirty_offset: int
    high_watermark: int
    legacy_horizon_ms: int
    vector: tuple[CleanerOffset, ...]
    policy: CleanerPolicy
    map_engine: str
    fingerprint: str
    producers: tuple[ActiveProducer, ...]
    tasks: tuple[CompactionTask, ...]
    skipped: tuple[SkippedSegment, ...] = ()
    read: tuple[ReadSegment, ...] = ()
    restores: str = Field(default="", exclude_if=lambda value: not value)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for task in self.tasks for source in task.sources)


class CompactionReceipt(Value):
    """A task is done: the new segment is uploaded and read back. About 2 KB. ``balance``: None where an earlier program did it."""

    run_id: str
    group: int
    segment: RemoteLogSegmentMetadata
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_written: int
    balance: Balance | None = Field(default=None, exclude_if=lambda value: value is None)


class CompactionFailure(Value):
    run_id: str
    group: int
    kind: str
    message: str


class Replacement(Value):
    """``sources`` leave the view, ``segment`` stands in their place; it covers exactly what they covered (I1)."""

    sources: tuple[str, ...]
    segment: RemoteLogSegmentMetadata
