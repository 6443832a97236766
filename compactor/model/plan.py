"""Values of a round: plan -> task -> receipt | failure -> replacement. A task names bytes and never holds them.

Everything that could make two executions differ (time, ids, settings, producers, versions) is frozen in the plan (determinism, I7).
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

from pydantic import Field
from typing_extensions import override

from checkpoint.offsets import CleanerOffset as CleanerOffset
from compactor.constants import CompactorEpoch, Offset, TimestampMs
from compactor.errors import BadData
from compactor.model.ids import TopicPartition, partition_of_incarnation
from compactor.model.segment import Balance, EpochEntry, RemoteLogSegmentMetadata, StrictFrozenModel

MAX32 = 2**31 - 1


class CleanerPolicy(StrictFrozenModel):
    """Topic settings of Kafka's cleaner that decide the bytes of a round (I7), in milliseconds and bytes.

    keyless_records: the default is what plans of versions without this setting did.
    """

    delete_retention_ms: int = 86_400_000
    segment_bytes: int = 1 << 30
    segment_index_bytes: int = 10 * 1024 * 1024
    index_interval_bytes: int = 4096
    max_decompressed_batch_bytes: int = 1 << 30
    keyless_records: KeylessPolicy = Field(default="drop", exclude_if=lambda value: value == "drop")


# Brokers refuse records without a key only where they compact a topic themselves (LogValidator). Here the topic's policy is ``delete``.
KeylessPolicy = Literal["refuse", "drop", "keep"]
"""refuse: no round is made over them; drop: removed, as Kafka's cleaner does; keep: each stays as if it had a key of its own."""


class KeylessRecords(StrictFrozenModel):
    """Committed, readable records without a key in a dirty range. Control records, data of aborted transactions and records below the log
    start do not count.

    records: with or without a key.
    last_offset: offset of the newest one without a key; -1 if there is none.
    """

    count: int = 0
    records: int = 0
    last_offset: int = -1

    def plus(self, other: KeylessRecords) -> KeylessRecords:
        return KeylessRecords(
            count=self.count + other.count, records=self.records + other.records, last_offset=max(self.last_offset, other.last_offset)
        )

    @property
    def share(self) -> float:
        """From 0 to 1; 0 if there are no records."""
        return self.count / max(self.records, 1)

    @override
    def __str__(self) -> str:
        return f"{self.count:,} of {self.records:,} records ({100 * self.share:.3g} %)"


class KeylessRecordsRefused(BadData):
    """Raised before a round is planned if its range has records without a key and the topic's ``keyless_records`` is ``refuse``."""

    def __init__(self, topic: str, keyless: KeylessRecords) -> None:
        super().__init__("records without a key")
        self.message = (
            f'{keyless} have no key, up to offset {keyless.last_offset}, and keyless_records is "refuse": '
            f'set it to "keep" or "drop" under [topics.{json.dumps(re.escape(topic))}]'
        )
        self.keyless = keyless


def raise_if_keyless(topic: str, keyless: KeylessRecords) -> None:
    if keyless.count:
        raise KeylessRecordsRefused(topic, keyless)


REPAIR: Final = "repair"
"""Engine and fingerprint of a plan that replaces damaged segments one to one. No other executor has it, so that none resumes the plan."""


class ActiveProducer(StrictFrozenModel):
    """Last state of an active producer (Kafka's ``lastRecordsOfActiveProducers``).

    last_offset: offset of its last record; -1 if it has written only transaction markers in its current epoch.
    """

    producer_id: int
    epoch: int
    last_offset: int


class CompactionTask(StrictFrozenModel):
    """Order to rewrite one group of adjacent segments as one new segment.

    sources: ids, ascending by offset.
    start_offset, end_offset: inclusive. mtime_ms: modification time for the new segment's log.
    most_bytes: upper bound of the new log; 0 for the size of all sources.
    in_part: whether only some byte ranges of the single source have to be read.
    """

    group: int
    sources: tuple[str, ...]
    new_segment_id: str
    start_offset: Offset
    end_offset: Offset
    leader_epochs: tuple[EpochEntry, ...]
    mtime_ms: int
    most_bytes: int = Field(default=0, exclude_if=lambda value: not value)
    in_part: bool = Field(default=False, exclude_if=lambda value: not value)


class SkippedSegment(StrictFrozenModel):
    id: str
    reason: str


class SegmentToRead(StrictFrozenModel):
    id: str
    reason: str


class CompactionPlan(StrictFrozenModel):
    """Plan of one round.

    now_ms: the cleaner's clock.
    end_offset: exclusive. next_dirty_offset: the first dirty offset after this round.
    high_watermark: end of the log, exclusive.
    legacy_horizon_ms: tombstones of v0/v1 stay in segments that were modified after this time.
    vector: cleaner offsets. Publication is refused if they have changed since (I6).
    fingerprint: hash key, codec libraries and cleaner version; an executor that has others refuses the tasks.
    restores: id of the run that this plan undoes; empty for a plan that compacts.
    broker_log_start: 0 if no broker writes the tier. Records below it do not count for the largest timestamps of new segments.
    """

    run_id: str
    topic: str
    partition: int
    leader_epoch: CompactorEpoch
    now_ms: TimestampMs
    first_dirty_offset: Offset
    end_offset: Offset
    next_dirty_offset: Offset
    high_watermark: int
    legacy_horizon_ms: int
    vector: tuple[CleanerOffset, ...]
    policy: CleanerPolicy
    map_engine: str
    fingerprint: str
    producers: tuple[ActiveProducer, ...]
    tasks: tuple[CompactionTask, ...]
    skipped: tuple[SkippedSegment, ...] = ()
    read: tuple[SegmentToRead, ...] = ()
    restores: str = Field(default="", exclude_if=lambda value: not value)
    incarnation: int = Field(default=1, exclude_if=lambda value: value == 1)
    broker_log_start: Offset = Field(default=Offset(0), exclude_if=lambda value: not value)

    @property
    def topic_partition(self) -> TopicPartition:
        return partition_of_incarnation(self.topic, self.partition, self.incarnation)

    @property
    def source_segment_ids(self) -> tuple[str, ...]:
        return tuple(source for task in self.tasks for source in task.sources)


class CompactionReceipt(StrictFrozenModel):
    """Proof that a task is done: the new segment was uploaded and read back. ``balance``: None in receipts of earlier versions."""

    run_id: str
    group: int
    segment: RemoteLogSegmentMetadata
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_written: int
    balance: Balance | None = Field(default=None, exclude_if=lambda value: value is None)


class CompactionFailure(StrictFrozenModel):
    run_id: str
    group: int
    kind: str
    message: str


class Replacement(StrictFrozenModel):
    """A new segment that spans exactly the offsets of its sources (coverage, I1)."""

    sources: tuple[str, ...]
    segment: RemoteLogSegmentMetadata
