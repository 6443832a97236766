"""``__remote_log_metadata`` in memory: one log, any number of readers with a lag of their own, appends whose answer gets lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from compactor.adapters.brokers.codec import TOPIC, encode_record
from compactor.adapters.brokers.follow import metadata_partition
from compactor.adapters.brokers.topic import FirstAndEndOffsets, PollResult, RawMetadataTopicRecord, TopicIdentity
from compactor.constants import TopicId
from compactor.errors import NotFound, Refused, Unavailable
from compactor.model.remote_log import MetadataRecord


class MemoryTopicLog:
    """What the brokers hold. ``None`` in a log is a control record: it has an offset and nobody is given it."""

    def __init__(self, partitions: int = 5, *, cluster_id: str = "cluster", topic_id: str = "topic") -> None:
        self.identity = TopicIdentity(cluster_id, TopicId(topic_id), partitions)
        self.logs: list[list[RawMetadataTopicRecord | None]] = [[] for _ in range(partitions)]
        self.starts = [0] * partitions
        self.leaderless: set[int] = set()

    def put(self, partition: int, value: bytes | None, key: bytes | None = None) -> int:
        log = self.logs[partition]
        log.append(RawMetadataTopicRecord(partition, len(log), key, value))
        return len(log) - 1

    def write(self, records: Iterable[MetadataRecord]) -> None:
        """As brokers do: each record into the partition of its user partition."""
        for record in records:
            self.put(metadata_partition(record.partition.topic_id, record.partition.partition, len(self.logs)), encode_record(record))

    def control_record(self, partition: int) -> None:
        self.logs[partition].append(None)

    def delete_records(self, partition: int, before: int) -> None:
        self.starts[partition] = before

    def truncate(self, partition: int, end: int) -> None:
        """An unclean election."""
        del self.logs[partition][end:]


@dataclass
class Loss:
    """What becomes of the next append: ``before`` the log has it, or after it, when the answer is ``lost``."""

    before: bool = False
    lost: bool = False


class MemoryMetadataTopic:
    """:param lag: how many of a partition's newest records this reader does not see yet. ``fate``: asked at each append."""

    def __init__(self, log: MemoryTopicLog, *, lag: Callable[[int], int] = lambda _: 0, fate: Callable[[], Loss] = Loss) -> None:
        self.log = log
        self.lag = lag
        self.fate = fate
        self.polls = 0
        self._positions: dict[int, int] = {}
        self._closed = False

    @property
    def name(self) -> str:
        return TOPIC

    def identity(self) -> TopicIdentity:
        return self.log.identity

    def bounds(self) -> Mapping[int, FirstAndEndOffsets]:
        led = ((number, start) for number, start in enumerate(self.log.starts) if number not in self.log.leaderless)
        return {number: FirstAndEndOffsets(start, self._end(number)) for number, start in led}

    def seek(self, positions: Mapping[int, int]) -> None:
        self._positions = dict(positions)

    def poll(self, limit: int, timeout_s: float) -> PollResult:
        """Never waits. Takes from each partition in turn."""
        self.polls += 1
        records: list[RawMetadataTopicRecord] = []
        reached: dict[int, int] = {}
        for number, position in self._positions.items():
            if not self.log.starts[number] <= position <= len(self.log.logs[number]):
                raise NotFound(f"{self.name}-{number} has no offset {position}")
            end = min(self._end(number), position + limit - len(records))
            records += [record for record in self.log.logs[number][position:end] if record is not None]
            self._positions[number] = max(position, end)
            if end == self._end(number):
                reached[number] = end
        return PollResult(records, reached)

    def append(self, partition: int, value: bytes) -> int:
        if not 0 <= partition < len(self.log.logs):
            raise Refused(f"{self.name} has no partition {partition}")
        fate = self.fate()
        if fate.before or partition in self.log.leaderless:
            raise Unavailable(f"{self.name}-{partition}: no broker answers")
        offset = self.log.put(partition, value)
        if fate.lost:
            raise Unavailable(f"{self.name}-{partition}: the answer to an append was lost")
        return offset

    def close(self) -> None:
        self._closed = True

    def _end(self, number: int) -> int:
        return max(self.log.starts[number], len(self.log.logs[number]) - self.lag(number))
