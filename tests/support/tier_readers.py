"""A topic that is written while it is tiered and compacted, and readers of tier and broker that know what has to come out."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from compactor.consumer import OFFSET_BEGINNING, Place, TieredConsumer, open_consumer
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_traffic import DraftRecord, TrafficFailed, Writer, WrittenPartition


@dataclass
class WrittenTopic:
    """One partition that a thread may write while others compare. ``lock``: while it is held, what was written is acknowledged."""

    cluster: KafkaCluster
    topic: str
    dice: random.Random
    keys: int = 400
    model: WrittenPartition = field(default_factory=WrittenPartition)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failures: int = 0

    def __post_init__(self) -> None:
        self._plain = Writer(self.cluster, self.topic, self.model, codec="lz4")
        self._transactional = Writer(self.cluster, self.topic, self.model, transactional_id=f"{self.topic}-writer")

    def write(self, count: int = 60) -> None:
        """Some records: plain, or a transaction of either end; a tenth are tombstones."""
        with self.lock:
            if self.dice.random() < 0.3:
                with self._transactional.transaction(commit=self.dice.random() < 0.7):
                    self._transactional.write(self._drafts(count))
            else:
                self._plain.write(self._drafts(count))

    def write_until(self, stop: threading.Event, pause_s: float) -> None:
        """Goes on until it is told to stop; a write that fails while a leader moves ends it, and is counted."""
        while not stop.wait(pause_s):
            try:
                self.write()
            except TrafficFailed:
                self.failures += 1
                return

    def last_offset(self) -> int:
        """Of the last committed record."""
        with self.lock:
            return max((record.offset for record in self.model.committed()), default=-1)

    def wrong_in(self, state: dict[bytes, bytes], position: int) -> list[str]:
        """What is wrong with the state of a reader who has read everything below ``position``."""
        with self.lock:
            last = {record.key: record.value for record in self.model.committed() if record.key is not None and record.offset < position}
        expected = {key: value for key, value in last.items() if value is not None}
        wrong = [f"{key!r} is {state.get(key)!r}, not {value!r}" for key, value in expected.items() if state.get(key) != value]
        return wrong + [f"{key!r} was deleted and is still there" for key in state if key not in expected]

    def _drafts(self, count: int) -> list[DraftRecord]:
        now = int(time.time() * 1000)
        drafts = []
        for number in range(count):
            key = f"key-{self.dice.randrange(self.keys):04}".encode()
            value = None if self.dice.random() < 0.1 else self.dice.randbytes(60).hex().encode()
            drafts.append(DraftRecord(key, value, now + number))
        return drafts


@dataclass
class StateReader:
    """Reads tier and broker from the beginning on, and keeps each key's last value. ``errors``: what is wrong with what it got."""

    consumer: TieredConsumer
    place: Place
    state: dict[bytes, bytes] = field(default_factory=dict)
    records: int = 0
    last: int = -1
    errors: list[str] = field(default_factory=list)

    @staticmethod
    def over(config: Path, written: WrittenTopic) -> StateReader:
        consumer = open_consumer(str(config), bootstrap_servers=written.cluster.bootstrap)
        place = Place(written.topic, 0, OFFSET_BEGINNING)
        consumer.assign([place])
        return StateReader(consumer, place)

    def read(self, seconds: float) -> None:
        """What comes at once, and no longer than this."""
        for message in self.consumer.consume(2_000, seconds):
            error = message.error()
            if error is not None:
                self.errors.append(f"{error.name()}: {error.str()}")
                continue
            offset, key, value = message.offset() or 0, message.key() or b"", message.value()
            if offset <= self.last:
                self.errors.append(f"offset {offset} behind {self.last}")
            self.last = offset
            self.records += 1
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value

    def read_to(self, offset: int, seconds: float) -> bool:
        """Until it has passed this offset; False where it has not come so far in time."""
        until = time.monotonic() + seconds
        while self.position <= offset:
            if time.monotonic() > until:
                return False
            self.read(0.5)
        return True

    @property
    def position(self) -> int:
        (at,) = self.consumer.position([self.place])
        return at.offset

    def close(self) -> None:
        self.consumer.close()
