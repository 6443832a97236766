"""Consumers that read partitions from their first offset to their end, again and again, and have every pass judged."""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from tests.broker_soak.broker_holes import MetadataReplay
from tests.broker_soak.cluster import AGING, DELETE_RETENTION_MS, REBORN, RISKY, SoakCluster
from tests.broker_soak.traffic import SERIAL, WrittenPartition
from tests.read_checker import FoundRecord, Read, SentRecord, judge_read
from tests.support.kafka_jars import BrokerJars
from tests.support.kafka_traffic import READ_COMMITTED, READ_UNCOMMITTED, SILENT

STALLED_S = 240.0
REBORN_STALLED_S = 60.0
TOLERATED = {"not committed": "aborted", "discarded": "discarded by an unclean election"}
"""Kinds of violations of Kafka itself, seen without any compaction. Brokers lose entries of transaction indexes, so that read_committed
consumers get aborted records (docs/broker-protocol.md, R11). And a remote segment that spans the end of the surviving log is read to its
own end, so that consumers get what an unclean election discarded. Compacted segments have neither: at the end of a run both are
violations there."""
OUT_OF_RANGE = ("_AUTO_OFFSET_RESET", "OffsetOutOfRangeException")
STARTS_LATER = (AGING, RISKY)
"""Topics whose log start brokers raise: records expire, and a leader that an unclean election or an empty disk has cost the older leader
epochs deletes the segments of these epochs. Control runs show the same."""
EPOCHS_LOST = "not judged: the leader has lost the leader epochs of the offset"
"""A replica that an unclean election truncates below its local log forgets all earlier leader epochs. If it is killed before it has written
its new log start down, it starts with the old one, and as the leader takes the start of the first remote segment of its earliest epoch for
the log start. Consumers that begin there are out of range, because no epoch is known for the offset (Kafka's UnifiedLog.truncateTo and
RemoteLogManager.findLogStartOffset)."""
START_ROSE = "any: the log start rose though nothing was deleted"
NEEDED_NEW_CONSUMER = "stalled until a new consumer read on"
"""librdkafka ignores what brokers say of a leader while the leader epoch is lower than the one it knows (rd_kafka_toppar_leader_update).
A topic that was deleted and created again begins with leader epoch 0, so that a consumer that knew it before may ask the wrong broker."""
PROGRAM = Path(__file__).with_name("ReadLog.java")


class ReadFailed(Exception):
    """A pass that did not come to its end.

    kind: the client's name of the error. position: offset of the fetch that failed, -1 if not known.
    broker: node id of the broker that refused the fetch, as the client's text names it, -1 if it does not.
    """

    def __init__(self, kind: str, text: str, position: int = -1) -> None:
        super().__init__(text)
        self.kind = kind
        self.position = position
        named = re.search(r"\((?:broker|id:) (\d+)", text)
        self.broker = int(named[1]) if named else -1


@dataclass(frozen=True)
class Pass:
    """start inclusive, end exclusive; for read_committed the end is the last stable offset."""

    start: int
    end: int
    found: Sequence[FoundRecord]


class LogReader(Protocol):
    """A client that reads whole partitions at one isolation level."""

    name: str
    is_committed: bool

    def read(self, topic: str, partition: int) -> Pass:
        """Read from the first offset to the end as it is when the pass begins. Raises ReadFailed."""

    def close(self) -> None: ...


class ClientAddress(Protocol):
    """Where clients connect, and the jars of Kafka's own."""

    @property
    def bootstrap(self) -> str: ...

    @property
    def jars(self) -> BrokerJars: ...

    def client_settings(self) -> dict[str, str]: ...


class LibrdkafkaReader:
    """librdkafka, as Python, Go, .NET and Node.js clients use it."""

    def __init__(self, cluster: ClientAddress, *, is_committed: bool) -> None:
        self.is_committed = is_committed
        isolation = READ_COMMITTED if is_committed else READ_UNCOMMITTED
        self.name = f"librdkafka, {isolation}"
        self._settings: dict[str, Any] = {
            **cluster.client_settings(),
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": isolation,
            "fetch.wait.max.ms": 100,
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.refresh.interval.ms": 3000,
            "error_cb": lambda error: None,
        }
        self._consumer = Consumer(self._settings, logger=SILENT)

    def read(self, topic: str, partition: int) -> Pass:
        if topic != REBORN:
            return self._read(topic, partition, STALLED_S)
        try:
            return self._read(topic, partition, REBORN_STALLED_S)
        except ReadFailed as error:
            if error.kind != "stalled":
                raise
            self._consumer.close()
            self._consumer = Consumer(self._settings, logger=SILENT)
            self._read(topic, partition, STALLED_S)
            raise ReadFailed(NEEDED_NEW_CONSUMER, str(error)) from error

    def _read(self, topic: str, partition: int, stalled_s: float) -> Pass:
        where = TopicPartition(topic, partition)
        try:
            start, end = self._consumer.get_watermark_offsets(where, timeout=10)
        except KafkaException as error:
            raise ReadFailed(error.args[0].name(), str(error)) from error
        found: list[FoundRecord] = []
        self._consumer.assign([TopicPartition(topic, partition, start)])
        quiet_since = time.monotonic()
        while True:
            messages = self._consumer.consume(1000, 0.5)
            if messages:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > stalled_s:
                raise ReadFailed("stalled", f"{topic}-{partition}: nothing came after {len(found)} records of [{start}, {end})")
            for message in messages:
                refused, offset = message.error(), message.offset()
                if message.topic() is not None and (message.topic(), message.partition()) != (topic, partition):
                    continue  # about what was read before, such as a truncation by an unclean election
                if refused is not None:
                    if refused.code() == KafkaError._PARTITION_EOF:
                        return Pass(start, end, found)
                    if refused.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                        continue  # of segments without records; reading goes on (docs/clients.md, Fetches without a record)
                    after = found[-1].offset if found else start - 1
                    raise ReadFailed(refused.name(), f"{topic}-{partition} of [{start}, {end}) after {after}: {refused}", after + 1)
                if offset is not None and offset < end:
                    headers = dict(message.headers() or [])
                    found.append(FoundRecord(offset, SentRecord(message.key(), message.value(), headers.get(SERIAL))))
                if offset is not None and offset + 1 >= end:
                    return Pass(start, end, found)

    def close(self) -> None:
        self._consumer.close()


class JavaReader:
    """Kafka's own client, in a process of its own."""

    def __init__(self, cluster: ClientAddress, *, is_committed: bool) -> None:
        self.is_committed = is_committed
        isolation = READ_COMMITTED if is_committed else READ_UNCOMMITTED
        self.name = f"Java, {isolation}"
        jars = cluster.jars
        command = ["java", "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", jars.class_path, str(PROGRAM)]
        self._process = subprocess.Popen(
            [*command, cluster.bootstrap, isolation], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def read(self, topic: str, partition: int) -> Pass:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{topic} {partition}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ReadFailed("ended", f"the Java client ended with {self._process.poll()}") from error
        start, found = 0, []
        for line in self._process.stdout:
            words = line.split()
            if words[0] == "start":
                start = int(words[1])
            elif words[0] == "record":
                found.append(FoundRecord(int(words[1]), SentRecord(*map(_bytes, words[2:5]))))
            elif words[0] == "end":
                return Pass(start, int(words[1]), found)
            else:
                fetched = re.search(r"FetchPosition\{offset=(\d+)", line)
                raise ReadFailed(words[1], f"{topic}-{partition}: {' '.join(words[1:])}", int(fetched[1]) if fetched else -1)
        raise ReadFailed("ended", f"the Java client ended with {self._process.poll()}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes, too


def _bytes(text: str) -> bytes | None:
    return None if text == "-" else bytes.fromhex(text[1:])


@dataclass(frozen=True)
class OutOfRange:
    """A pass that ended because a broker did not find an offset at or after the log start. Whose fault it is, the metadata topic shows.

    kind: client and kind of error.
    """

    where: str
    position: int
    kind: str
    text: str
    at_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)


@dataclass
class Findings:
    """What all readers found. Thread-safe where it is only appended to.

    out_of_range: what ``judge_out_of_range`` has not judged yet.
    holes: passes that ended at offsets that brokers themselves had made unreadable, by hole.
    errors: passes that failed, and log starts that rose, by client and kind of error.
    error_log: all of them, each with its time and text.
    tolerated: offsets of records that brokers hand out from uncompacted segments against their own rules, by kind and partition.
    """

    passes: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    error_texts: dict[str, str] = field(default_factory=dict)
    error_log: list[str] = field(default_factory=list)
    tolerated: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    out_of_range: list[OutOfRange] = field(default_factory=list)
    holes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    longest_pass_s: float = 0.0

    def failed(self, kind: str, text: str, at_ms: int | None = None) -> None:
        """Count an error; the first text of each kind is kept. at_ms: when it happened, None for now."""
        when = time.localtime(None if at_ms is None else at_ms / 1000)
        dated = f"{time.strftime('%H:%M:%S', when)} {text}"
        self.errors[kind] += 1
        self.error_texts.setdefault(kind, dated)
        self.error_log.append(f"{dated} ({kind})")

    def judge_out_of_range(self, metadata: Iterable[str]) -> bool:
        """Judge the passes that were out of range. Returns whether there were any, and all of them met holes that brokers had made.

        metadata: the metadata topic as Kafka's formatter prints it. What it does not excuse is counted as an error.
        """
        replay, judged, self.out_of_range = MetadataReplay(metadata), self.out_of_range, []
        excused = 0
        for each in judged:
            hole = replay.broker_hole(each.where, each.position, each.at_ms)
            if hole is None:
                self.failed(each.kind, each.text, each.at_ms)
            else:
                self.holes[str(hole)] += 1
                excused += 1
        return 0 < excused == len(judged)


class LogStartAndEndOffset(Protocol):
    """What is known of a partition beside its reads."""

    def tiered_end(self, written: WrittenPartition) -> int:
        """Return an exclusive upper bound of what is in the tier."""

    def first_offset(self, written: WrittenPartition) -> int:
        """Return the log start, -1 if it is not known."""

    def first_known_epoch(self, written: WrittenPartition, broker: int) -> int:
        """Return the offset at which the leader epochs begin that a broker knows, -1 if it is not known."""


def read_and_judge(reader: LogReader, written: WrittenPartition, findings: Findings, bounds: LogStartAndEndOffset) -> bool:
    """Read one partition once and judge what was found. Returns whether the pass came to its end.

    bounds: asked after the pass.
    """
    began, generation = time.monotonic(), written.generation
    try:
        done = reader.read(written.topic, written.partition)
    except ReadFailed as error:
        if written.generation != generation or generation % 2:
            return False
        may_start_later = written.topic in STARTS_LATER and error.kind in OUT_OF_RANGE
        if may_start_later and 0 <= error.position < bounds.first_offset(written):
            findings.passes["not judged: the log start rose beyond the reader"] += 1
            return False
        is_risky = written.topic == RISKY and error.kind in OUT_OF_RANGE
        if is_risky and 0 <= error.position < bounds.first_known_epoch(written, error.broker):
            findings.passes[EPOCHS_LOST] += 1
            return False
        kind = f"{reader.name.partition(',')[0]}: {error.kind}"
        if error.kind in OUT_OF_RANGE:
            findings.out_of_range.append(OutOfRange(str(written), error.position, kind, str(error)))
        else:
            findings.failed(kind, str(error))
        return False
    seconds = time.monotonic() - began
    bound = bounds.tiered_end(written)
    with written.lock:
        if written.generation != generation or generation % 2:
            findings.passes["not judged: the log changed under the reader"] += 1
            return True
        is_slow = seconds * 1000 > DELETE_RETENTION_MS
        read = Read(done.start, done.end, done.found, reader.is_committed, bound, is_slow)
        wrong = judge_read(written.history, read)
        log_start = written.history.log_start
    if done.start > log_start and written.topic not in STARTS_LATER:
        findings.failed(START_ROSE, f"{written} begins at {done.start}, and records were deleted up to {log_start}")
    findings.passes[reader.name] += 1
    findings.records[reader.name] += len(done.found)
    findings.passes["slower than tombstones are retained"] += is_slow
    findings.longest_pass_s = max(findings.longest_pass_s, seconds)
    for one in wrong:
        if one.kind in TOLERATED:
            findings.tolerated.setdefault(one.kind, {}).setdefault(str(written), set()).add(one.offset)
    for one in [one for one in wrong if one.kind not in TOLERATED][:5]:
        findings.violations.append(f"{reader.name} of {written} [{done.start}, {done.end}): {one.kind}: {one.text}")
    return True


def read_until(
    stop: threading.Event,
    reader: LogReader,
    choose: Callable[[], WrittenPartition],
    findings: Findings,
    bounds: LogStartAndEndOffset,
    pause_s: Callable[[], float],
) -> None:
    """Read one partition after the other until told to stop."""
    while not stop.wait(pause_s()):
        read_and_judge(reader, choose(), findings, bounds)


def all_readers(cluster: SoakCluster) -> list[LogReader]:
    """Both clients at both isolation levels."""
    return [kind(cluster, is_committed=committed) for kind in (LibrdkafkaReader, JavaReader) for committed in (True, False)]


def pause(dice: random.Random, least: float, most: float) -> Callable[[], float]:
    return lambda: dice.uniform(least, most)
