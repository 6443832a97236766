"""A topic with something of everything in it, written by real producers through real brokers, and what has to come out of it.

Keys are few and come again and again, so that there is something to compact; all codecs; tombstones; headers; transactions that are
committed, aborted, mixed with plain records, longer than a segment; several leader epochs, by moved leaders (two brokers) or restarts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.support.kafka_admin import ClusterAdmin, ListedOffsets, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_traffic import CODECS, DraftRecord, Writer, WrittenPartition

# Of the first record; each further one is some milliseconds later. Control records carry the broker's clock, which is later than all.
FIRST_MS = 1_700_000_000_000


@dataclass
class TopicStory:
    """One topic, its model per partition, and how to go on with it. The same seed gives the same records."""

    cluster: KafkaCluster
    admin: ClusterAdmin
    topic: str
    seed: int = 1
    keys: int = 60
    value_bytes: int = 120
    segment_bytes: int = 16_384
    first_ms: int = FIRST_MS
    partitions: dict[int, WrittenPartition] = field(default_factory=lambda: {0: WrittenPartition()})
    epochs: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._clock = self.first_ms
        self._writers: dict[tuple[int, str, str], Writer] = {}

    def create(self, settings: Mapping[str, str] | None = None) -> TopicStory:
        """The topic, its replicas on all brokers."""
        replicas = [list(self.cluster.node_ids) for _ in self.partitions]
        self.admin.create_topic(self.topic, replicas=replicas, segment_bytes=self.segment_bytes, settings=settings)
        return self

    def tell(self, chapters: int = 1, *, calm: bool = True) -> TopicStory:
        """A chapter: every codec, both ends of a transaction, one that spans segments; between chapters the leader epoch grows.

        Not ``calm``: in the midst of tiering, so that a copy may be cut short and begun again under another id.
        """
        for chapter in range(chapters):
            if chapter:
                if calm:
                    self.tiered()
                self.new_epoch()
            for partition in self.partitions:
                self.plain(partition)
                self.transactions(partition)
            self.epochs |= {self.admin.leadership(self.topic, partition).leader_epoch for partition in self.partitions}
        return self

    def plain(self, partition: int = 0, count: int = 60) -> None:
        """``count`` records with each codec."""
        for codec in CODECS:
            self._writer(partition, codec).write(self._drafts(count), per_batch=self._random.randint(5, 25))

    def transactions(self, partition: int = 0) -> None:
        """Committed, aborted, two at a time with plain records in between, and an aborted one longer than a segment."""
        one, other = self._writer(partition, "lz4", "one"), self._writer(partition, "none", "other")
        with one.transaction(commit=True):
            one.write(self._drafts(30))
        with one.transaction(commit=False):
            one.write(self._drafts(30))
        one.begin()
        other.begin()
        for _ in range(3):
            one.write(self._drafts(7))
            self._writer(partition, "snappy").write(self._drafts(5))
            other.write(self._drafts(7))
        one.end(commit=False)
        other.end(commit=True)
        with other.transaction(commit=False):
            other.write(self._drafts(2 * self.segment_bytes // self.value_bytes), per_batch=10)

    def new_epoch(self) -> None:
        """Another broker leads; where there is but one, it is restarted."""
        if len(self.cluster.node_ids) > 1:
            for partition in self.partitions:
                now = self.admin.leadership(self.topic, partition)
                self.admin.move_leader(self.topic, partition, next(node for node in now.replicas if node != now.leader))
        else:
            self.cluster.restart()
            wait_until(
                lambda: all(self.admin.leadership(self.topic, each).leader > 0 for each in self.partitions), f"{self.topic} to be led again"
            )

    def tiered(self) -> dict[int, ListedOffsets]:
        """Waits until all but the active segments is in the tier. A last small batch closes no segment."""
        return {partition: self.admin.wait_tiered(self.topic, partition) for partition in self.partitions}

    def later(self, milliseconds: int) -> None:
        """The timestamps of what follows are so much later."""
        self._clock += milliseconds

    def forget_writers(self) -> None:
        """Producers that knew what was discarded."""
        self._writers.clear()

    def _writer(self, partition: int, codec: str, transactional_id: str = "") -> Writer:
        name = (partition, codec, transactional_id)
        if name not in self._writers:
            model = self.partitions[partition]
            called = f"{self.topic}-{partition}-{transactional_id}" if transactional_id else ""
            self._writers[name] = Writer(self.cluster, self.topic, model, partition=partition, codec=codec, transactional_id=called)
        return self._writers[name]

    def _drafts(self, count: int) -> Iterator[DraftRecord]:
        for _ in range(count):
            self._clock += self._random.randint(0, 20)
            key = f"key-{self._random.randrange(self.keys):05}".encode()
            value = None if self._random.random() < 0.08 else self._value()
            headers = (("trace", self._random.randbytes(4)), ("empty", None)) if self._random.random() < 0.1 else ()
            yield DraftRecord(key, value, self._clock, headers)

    def _value(self) -> bytes:
        """Half of it compresses."""
        return self._random.randbytes(self.value_bytes // 2) + b"-" * (self.value_bytes // 2)
