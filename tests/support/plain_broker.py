"""A broker's log in memory, read the plain way: what BrokerClient's suite is held against, and a broker that a test can bend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from compactor.constants import MAX_OFFSET, TopicId
from compactor.features.consumer.group import FetchResult, LogStartAndEndOffset
from compactor.model.ids import TopicPartition
from compactor.read.records import TierMessage
from tests.plain_format import Batch, Record
from tests.plain_log import control_type


def consumed(batches: Iterable[Batch], *, committed: bool) -> tuple[list[tuple[Record, int]], int]:
    """The records that a consumer gets, each with its leader epoch, and the offset where its view ends (the last stable one)."""
    found: list[tuple[Record, int, bool]] = []
    running: dict[int, list[int]] = {}
    end = 0
    for batch in batches:
        end = batch.last_offset + 1
        if batch.control:
            mine = running.pop(batch.producer_id, [])
            if control_type(batch) == 0:
                for number in mine:
                    found[number] = (*found[number][:2], True)
            continue
        for record in batch.records:
            if batch.transactional:
                running.setdefault(batch.producer_id, []).append(len(found))
            found.append((record, batch.leader_epoch, False))
    if not committed:
        return [(record, epoch) for record, epoch, _ in found], end
    stable = min((found[numbers[0]][0].offset for numbers in running.values()), default=end)
    return [(record, epoch) for record, epoch, aborted in found if not aborted and record.offset < stable], stable


def message_of(name: TopicPartition, record: Record, epoch: int) -> TierMessage:
    headers = [(key.decode(), value) for key, value in record.headers] or None
    return TierMessage(*name, record.offset, record.key, record.value, headers, (1, record.timestamp), epoch)


@dataclass
class PlainBroker:
    """BrokerClient over ``batches``; those of one partition, all that were ever appended. ``start`` is its log start."""

    name: TopicPartition
    batches: list[Batch] = field(default_factory=list)
    committed: bool = True
    start: int = 0
    id_of_topic: str = ""
    reading: dict[TopicPartition, int] = field(default_factory=dict)
    handed_out: int = 0
    closed: bool = False
    parted: dict[TopicPartition, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.batches[-1].last_offset + 1 if self.batches else self.start

    def start_reading_from(
        self, offsets: Mapping[TopicPartition, int], previous_epochs: Mapping[TopicPartition, int] | None = None
    ) -> None:
        self.reading.update(offsets)
        self.parted = {name: end for name, epoch in (previous_epochs or {}).items() if (end := self._end_of(epoch)) < offsets[name]}

    def _end_of(self, epoch: int) -> int:
        """OffsetsForLeaderEpoch; a broker that knows no such epoch and no earlier one cannot tell."""
        if not any(batch.leader_epoch <= epoch for batch in self.batches):
            return MAX_OFFSET
        return next((batch.base_offset for batch in self.batches if batch.leader_epoch > epoch), self.end)

    def stop_reading(self, names: Iterable[TopicPartition]) -> None:
        for name in names:
            self.reading.pop(name, None)

    def fetch_messages(self, limit: int, timeout_s: float) -> FetchResult:
        at = self.reading.get(self.name)
        if at is None:
            return FetchResult()
        if self.parted and self.start <= at:
            parted, self.parted = self.parted, {}
            self.stop_reading(parted)
            return FetchResult(truncated=parted)
        if not self.start <= at <= self.end:
            self.stop_reading([self.name])
            return FetchResult(out_of_range=[self.name])
        records, _ = consumed(self.batches, committed=self.committed)
        mine = [message_of(self.name, record, epoch) for record, epoch in records if record.offset >= at][:limit]
        if mine:
            self.reading[self.name] = mine[-1].offset() + 1
        self.handed_out += len(mine)
        return FetchResult(mine)

    def offset_bounds(self, name: TopicPartition) -> LogStartAndEndOffset:
        return LogStartAndEndOffset(self.start, consumed(self.batches, committed=self.committed)[1] if self.batches else self.start)

    def topic_id(self, name: TopicPartition) -> TopicId:
        return TopicId(self.id_of_topic)

    def offset_for_time(self, name: TopicPartition, timestamp_ms: int) -> int | None:
        records, _ = consumed(self.batches, committed=False)
        return next((r.offset for r, _ in records if r.offset >= self.start and r.timestamp >= timestamp_ms), None)

    def close(self) -> None:
        self.closed = True
