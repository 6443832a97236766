"""Topics that are written all the time, and what their producers were told, in the judge's words."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from typing_extensions import override

from tests.broker_soak.cluster import SoakCluster
from tests.read_checker import Outcome, PartitionHistory, SentRecord
from tests.support.kafka_traffic import CODECS, SILENT

SERIAL = "serial"
"""Header of every record: a number that no other record of the run has."""
ACK_SECONDS = 240
"""So long a producer tries to deliver a record, longer than any fault lasts."""


@dataclass
class WrittenPartition:
    """One partition of one incarnation of a topic.

    lock: guards ``history``.
    generation: rises whenever the log changes under its readers (truncated, deleted); a read that saw a change is not judged.
    writing: held while a producer writes; a fault that must know what is acknowledged takes it.
    """

    topic: str
    partition: int
    history: PartitionHistory = field(default_factory=PartitionHistory)
    generation: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)

    @override
    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Reads that overlap with the block are not judged, and nothing is written meanwhile."""
        with self.writing:
            with self.lock:
                self.generation += 1
            try:
                yield
            finally:
                with self.lock:
                    self.generation += 1


class PartitionWriter:
    """Writes one partition: plain records with every codec, transactions of both ends, tombstones, keys whose number grows.

    What happens to each record goes into the history: acknowledged, aborted, or unknown.
    """

    def __init__(self, cluster: SoakCluster, written: WrittenPartition, dice: random.Random, happened: Counter[str]) -> None:
        self.written = written
        self._cluster = cluster
        self._dice = dice
        self._happened = happened
        self._name = uuid.uuid4().hex[:8]
        self._serial = 0
        self._number = 0
        self._plain: Producer | None = None
        self._transactional: Producer | None = None
        self._offsets: list[int] = []

    def write_until(self, stop: threading.Event, pause: Callable[[], float]) -> None:
        """Write until told to stop. A producer that can go on no more is replaced by a new one."""
        while not stop.wait(pause()):
            with self.written.writing:
                self.write()

    def write(self, count: int = 20) -> None:
        """Write some records: plain ones, or a transaction."""
        try:
            if self._dice.random() < 0.35:
                self._write_transaction(count)
            else:
                self._plain = self._plain or self._producer(codec=self._dice.choice(CODECS))
                self._send(self._plain, count, Outcome.COMMITTED)
                if self._dice.random() < 0.05:
                    self._plain = None
        except (KafkaException, BufferError) as error:
            self._happened[f"producers replaced: {_name(error)}"] += 1
            self.forget()

    def forget(self) -> None:
        """Drop the producers: the next write begins with new ones."""
        self._plain = self._transactional = None

    def _write_transaction(self, count: int) -> None:
        if self._transactional is None:
            self._transactional = self._producer(transactional=True)
            self._transactional.init_transactions(ACK_SECONDS)
        producer, commit = self._transactional, self._dice.random() < 0.7
        self._offsets = []
        producer.begin_transaction()
        ended = False
        try:
            for _ in range(self._dice.randint(1, 3)):
                self._send(producer, count // 2 + 1, Outcome.UNDECIDED)
            ended = commit
            _retried(producer.commit_transaction if commit else producer.abort_transaction)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                if not ended:  # the coordinator aborts it when a producer with the same name begins anew
                    self._decide(Outcome.ABORTED)
                raise
            _retried(producer.abort_transaction)
            commit = False
            self._happened["transactions that had to be aborted"] += 1
        self._decide(Outcome.COMMITTED if commit else Outcome.ABORTED)
        self._happened["transactions committed" if commit else "transactions aborted"] += 1

    def _decide(self, outcome: Outcome) -> None:
        with self.written.lock:
            self.written.history.decide(self._offsets, outcome)

    def _send(self, producer: Producer, count: int, outcome: Outcome) -> None:
        """Send records and wait until the fate of each is known. Raises KafkaException if the producer is of no more use."""
        failed: list[KafkaError] = []

        def reported(record: SentRecord) -> Callable[[KafkaError | None, Message], None]:
            def report(error: KafkaError | None, message: Message) -> None:
                offset = message.offset()
                if error is not None or offset is None or offset < 0:
                    failed.append(error or KafkaError(KafkaError.UNKNOWN))
                    return
                with self.written.lock:
                    self.written.history.acknowledge(record.identity, offset, outcome)
                if outcome is Outcome.UNDECIDED:
                    self._offsets.append(offset)

            return report

        for record in self._drafts(count):
            with self.written.lock:
                self.written.history.announce(record)
            producer.produce(
                self.written.topic,
                record.value,  # type: ignore[arg-type]
                record.key,  # type: ignore[arg-type]
                self.written.partition,
                on_delivery=reported(record),
                headers=[(SERIAL, record.identity)],  # type: ignore[list-item]
            )
        until = time.monotonic() + ACK_SECONDS + 30
        while producer.flush(5) and time.monotonic() < until:
            pass
        self._happened["records sent"] += count
        if failed:
            self._happened[f"records of unknown fate: {failed[0].name()}"] += len(failed)
            raise KafkaException(failed[0])

    def _drafts(self, count: int) -> Iterator[SentRecord]:
        for _ in range(count):
            self._number += 1
            key = f"key-{self._dice.randrange(60 + self._number // 20):06}".encode()
            value = None if self._dice.random() < 0.1 else self._dice.randbytes(40) + b"-" * self._dice.randint(0, 160)
            self._serial += 1
            yield SentRecord(key, value, f"{self._name}-{self._serial}".encode())

    def _producer(self, *, codec: str = "lz4", transactional: bool = False) -> Producer:
        settings: dict[str, Any] = {
            **self._cluster.client_settings(),
            "compression.type": codec,
            "enable.idempotence": True,
            "linger.ms": 20,
            "message.timeout.ms": ACK_SECONDS * 1000,
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.refresh.interval.ms": 2000,
            "error_cb": lambda error: None,
        }
        if transactional:
            settings |= {"transactional.id": str(self.written), "transaction.timeout.ms": 60_000}
            del settings["message.timeout.ms"]
        return Producer(settings, logger=SILENT)


def _retried(action: Callable[[float], None]) -> None:
    """Call until the action succeeds, or fails with an error that no retry mends."""
    until = time.monotonic() + ACK_SECONDS
    while True:
        try:
            action(30)
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > until:
                raise
        else:
            return


def _name(error: BaseException) -> str:
    inner = error.args[0] if error.args else None
    return inner.name() if isinstance(inner, KafkaError) else type(error).__name__


TOPIC_SETTINGS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "local.retention.bytes": "1",
    "min.insync.replicas": "1",
    "segment.ms": "25000",
    "segment.jitter.ms": "12000",  # replicas roll at different offsets
}


def joined(threads: list[threading.Thread], seconds: float) -> list[str]:
    """Wait for threads. Returns the names of those that have not ended."""
    until = time.monotonic() + seconds
    for thread in threads:
        with suppress(RuntimeError):
            thread.join(max(0.1, until - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]
