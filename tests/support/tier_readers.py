"""A topic that is written while it is tiered and compacted, and readers of tier and broker that know what has to come out."""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from compactor.consumer import OFFSET_BEGINNING, Place, TieredConsumer, open_consumer
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_traffic import BrokerRecord, DraftRecord, TrafficFailed, Writer, WrittenPartition


@dataclass
class WrittenTopic:
    """One partition that a thread may write while others compare. ``lock``: while it is held, what was written is acknowledged.

    ``history``: the committed records, ascending; ``places``: of each key, where in it.
    """

    cluster: KafkaCluster
    topic: str
    dice: random.Random
    keys: int = 400
    model: WrittenPartition = field(default_factory=WrittenPartition)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failures: int = 0
    history: list[BrokerRecord] = field(default_factory=list)
    places: dict[bytes, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plain = Writer(self.cluster, self.topic, self.model, codec="lz4")
        self._transactional = Writer(self.cluster, self.topic, self.model, transactional_id=f"{self.topic}-writer")

    def write(self, count: int = 60) -> None:
        """Some records: plain, or a transaction of either end; a tenth are tombstones."""
        with self.lock:
            if self.dice.random() < 0.3:
                with self._transactional.transaction(commit=self.dice.random() < 0.7):
                    offsets = self._transactional.write(self._drafts(count))
            else:
                offsets = self._plain.write(self._drafts(count))
            for offset in sorted(offset for offset in offsets if offset not in self.model.aborted):
                record = self.model.records[offset]
                self.places.setdefault(record.key or b"", []).append(len(self.history))
                self.history.append(record)

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
            return self.history[-1].offset if self.history else -1

    def end(self) -> int:
        """The offset behind the last committed record, without waiting for a writer."""
        return self.history[-1].offset + 1 if self.history else 0

    def until(self, offset: int) -> int:
        """How many committed records lie below an offset."""
        return bisect_left(self.history, offset, key=lambda record: record.offset)

    def wrong_in(self, state: dict[bytes, bytes], position: int, cleaned: int = 0) -> list[str]:
        """What is wrong with the state of a reader who has read everything below ``position``.

        Of a key that is written again between there and ``cleaned``, up to which rounds may have been, nothing is sure: as with any
        compacted topic, such a reader is in the middle of what was compacted.
        """
        wrong = []
        with self.lock:
            count, sure = self.until(position), self.until(cleaned)
            for key, places in self.places.items():
                behind = bisect_left(places, count)
                value = self.history[places[behind - 1]].value if behind else None
                if state.get(key) != value and not (behind < len(places) and places[behind] < sure):
                    wrong.append(f"{key!r} is {state.get(key)!r}, not {value!r}")
        return wrong + [f"{key!r} was never written" for key in state if key not in self.places]

    def wrong_between(self, got: dict[int, BrokerRecord], start: int, position: int, cleaned: int) -> list[str]:
        """What is wrong with what a reader got in [start, position): a record that was not committed so; one that is missing although no
        round can have removed it, as rounds have not been beyond ``cleaned``."""
        with self.lock:
            records = self.history[self.until(start) : self.until(position)]
            found = [f"offset {offset} is not what was committed" for offset, record in got.items() if not self._is_committed(record)]
            missing = [record for record in records if record.offset not in got and not self._may_be_gone(record, cleaned)]
        return found + [f"offset {record.offset} of {record.key!r} is missing" for record in missing]

    def _may_be_gone(self, record: BrokerRecord, cleaned: int) -> bool:
        """Superseded below that offset, or a tombstone there."""
        places = self.places[record.key or b""]
        behind = bisect_right(places, self.until(record.offset))
        superseded = behind < len(places) and self.history[places[behind]].offset < cleaned
        return superseded or (record.value is None and record.offset < cleaned)

    def _is_committed(self, record: BrokerRecord) -> bool:
        place = self.until(record.offset)
        return place < len(self.history) and self.history[place] == record

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
    """Reads tier and broker from the beginning on, and keeps each key's last value. ``errors``: what is wrong with what it got.

    ``got``: the records since ``compared``, up to which what it got was found to be right.
    """

    consumer: TieredConsumer
    place: Place
    state: dict[bytes, bytes] = field(default_factory=dict)
    records: int = 0
    last: int = -1
    errors: list[str] = field(default_factory=list)
    got: dict[int, BrokerRecord] = field(default_factory=dict)
    compared: int = 0

    @staticmethod
    def over(config: Path, written: WrittenTopic) -> StateReader:
        consumer = open_consumer(str(config), bootstrap_servers=written.cluster.bootstrap)
        place = Place(written.topic, 0, OFFSET_BEGINNING)
        consumer.assign([place])
        return StateReader(consumer, place)

    @staticmethod
    def restored(config: Path, written: WrittenTopic) -> StateReader:
        """Begins with the state as the tier has it, and reads everything from there on."""
        consumer = open_consumer(str(config), bootstrap_servers=written.cluster.bootstrap)
        values = consumer.latest(Place(written.topic, 0))
        state = {message.key() or b"": message.value() or b"" for block in values for message in block.messages()}
        place = Place(written.topic, 0, values.next_offset)
        consumer.assign([place])
        return StateReader(consumer, place, state, last=values.next_offset - 1, compared=values.next_offset)

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
            self.got[offset] = BrokerRecord(offset, message.timestamp()[1], key, value)
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value

    def wrong(self, written: WrittenTopic, cleaned: int) -> list[str]:
        """Everything that is wrong by now; ``cleaned``: no round has been beyond this offset."""
        position = self.position
        found = written.wrong_in(self.state, position, cleaned) + written.wrong_between(self.got, self.compared, position, cleaned)
        self.got, self.compared = {}, position
        told, self.errors = self.errors, []
        return found + told

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
