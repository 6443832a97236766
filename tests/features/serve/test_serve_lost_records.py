"""A log is truncated, and topics are created again, while clients are attached: they see at the endpoint what they see at a broker."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition as At

from tests.builders import LogBuilder
from tests.features.imports.test_import_truncated import Log
from tests.plain_format import read_batches
from tests.support.endpoint import served
from tests.support.kafka_admin import ClusterAdmin
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_jars import broker_jars
from tests.support.kafka_traffic import SILENT
from tests.support.tier_cli import TierCli
from tests.support.waiting import wait_for

PROGRAM = Path(__file__).with_name("Attached.java")
CUT, SHORTER, LONGER = "cut", "shorter", "longer"
LAST = {CUT: 199, SHORTER: 49}
"""Last offset of the second log."""
IDS = tuple(f"AAAAAAAAAAAAAAAAAAAA{end}" for end in ("AQ", "Ag", "Aw", "BA"))
VERSIONS = ("4.4.0", "3.8.1")
BETWEEN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_ID)
"""Errors while a topic does not exist: at a broker there is a time between its deletion and the next topic of that name."""


class Event(NamedTuple):
    """text: value of a record, or name of an error, with the offset from which on the log is another one."""

    offset: int
    text: str


class Attachment(NamedTuple):
    """address: of the endpoint, or of a broker. reset: auto.offset.reset of Java's clients."""

    address: str
    reset: str
    topic: str


Seen = dict[Attachment, list[Event]]


@contextmanager
def java(version: str, attachments: Sequence[Attachment]) -> Iterator[Seen]:
    """Attach clients of one version, in one process. Yield what they have seen, which grows."""
    seen: Seen = {each: [] for each in attachments}
    command = broker_jars(version).command(str(PROGRAM))
    with subprocess.Popen(
        [*command, *(word for each in attachments for word in each)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:

        def collect() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                number, kind, first, second = line.split()
                event = Event(int(first), second) if kind == "record" else Event(int(second), first)
                seen[attachments[int(number)]].append(event)

        threading.Thread(target=collect, daemon=True).start()
        try:
            yield seen
        finally:
            process.kill()


@contextmanager
def librdkafka(attachments: Sequence[Attachment]) -> Iterator[Seen]:
    """Attach clients. Yield what they have seen, which grows."""
    seen: Seen = {each: [] for each in attachments}
    stop = threading.Event()

    def read(each: Attachment) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": each.address, "group.id": "unused", "enable.auto.commit": False,
                "auto.offset.reset": {"none": "error"}.get(each.reset, each.reset), "reconnect.backoff.max.ms": 1000,
                "topic.metadata.refresh.interval.ms": 1000, "metadata.max.age.ms": 3000, "error_cb": lambda error: None,
            },
            logger=SILENT,
        )  # fmt: skip
        consumer.assign([At(each.topic, 0, 0)])
        while not stop.is_set():
            for message in consumer.consume(100, 0.2):
                error, value, offset = message.error(), message.value(), message.offset()
                if error is None:
                    assert offset is not None
                    assert value is not None
                    seen[each].append(Event(offset, value.decode()))
                elif error.code() not in BETWEEN:
                    seen[each].append(Event(-1, error.name()))
        consumer.close()

    threads = [threading.Thread(target=read, args=(each,)) for each in attachments]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


class Logs:
    """Topics of a broker, and of a tier into which they are imported."""

    def __init__(self, cluster: KafkaCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.cli = TierCli(folder / "cli", {"publish": {"grace_ms": 0, "orphan_age_ms": 0}})
        self._imports = 0

    def write(self, topic: str, word: str, count: int) -> None:
        """Write batches of ten records, whose values are ``word`` and a number."""
        producer = Producer({"bootstrap.servers": self._cluster.bootstrap, "linger.ms": 500, "topic.metadata.refresh.interval.ms": 1000})
        for number in range(count):
            producer.produce(topic, f"{word}{number}".encode(), partition=0)
            if number % 10 == 9:
                producer.flush()

    def folder(self, topic: str) -> Path:
        return self._cluster.nodes[1].log_dir / f"{topic}-0"

    def bring(self, topic: str, *options: str) -> None:
        """Import the log as it is now."""
        self._imports += 1
        copy = shutil.copytree(self.folder(topic), self._folder / f"import {self._imports}" / f"{topic}-0")
        self.cli.do("import", copy, "--topic", topic, "--partition", 0, *options)

    def cut(self, topic: str, offset: int) -> None:
        """Take the records from an offset on, as an unclean election does, while the broker is stopped."""
        folder = self.folder(topic)
        log = folder / f"{0:020d}.log"
        kept = [batch.raw for batch in read_batches(log.read_bytes()) if batch.last_offset < offset]
        for path in (*folder.glob("*.index"), *folder.glob("*.timeindex"), *folder.glob("*.snapshot")):
            path.unlink()
        log.write_bytes(b"".join(kept))
        (folder.parent / ".kafka_cleanshutdown").unlink()


def is_over(topic: str, events: Sequence[Event]) -> bool:
    """Whether a client that had read the first log has met an error, or the last record of the second one."""
    return len(events) > 100 and (not events[-1].text.startswith("new") or events[-1].offset == LAST[topic])


def small_log(count: int, word: str, topic_id: str) -> LogBuilder:
    log = LogBuilder(topic_id=topic_id)
    for number in range(count):
        log.put(f"k={word}{number}")
    return log


def records(word: str, first: int, end: int) -> list[Event]:
    return [Event(offset, f"{word}{offset}") for offset in range(first, end)]


def test_librdkafka_is_told_where_a_log_was_cut_and_reads_a_new_topic(tmp_path: Path) -> None:
    cli = TierCli(tmp_path / "cli", {"publish": {"grace_ms": 0, "orphan_age_ms": 0}})
    first = Log(tmp_path / "first").lead(0, 100)
    cli.do("import", first.path)
    for number, topic in enumerate((SHORTER, LONGER)):
        cli.do("import", small_log(100, "old", IDS[number]).write(tmp_path / topic), "--topic", topic, "--partition", 0)
    with served(cli.config) as endpoint:
        topics = ("orders", SHORTER, LONGER)
        each = [Attachment(endpoint.address, reset, topic) for reset in ("none", "earliest") for topic in topics]
        with librdkafka(each) as seen:
            wait_for(lambda: all(len(events) == 100 for events in seen.values()))
            for number, (topic, count) in enumerate(((SHORTER, 50), (LONGER, 150)), 2):
                folder = small_log(count, "new", IDS[number]).write(tmp_path / f"new {topic}")
                cli.do("import", folder, "--topic", topic, "--partition", 0, "--new-incarnation")
            cli.do("import", first.replica_until(40, "second").lead(2, 160).path, "--accept-truncation")
            wait_for(lambda: all(len(events) > 100 for events in seen.values()))
            error = [Event(-1, "_AUTO_OFFSET_RESET")]
            expected = {
                ("none", "orders"): error,
                ("none", SHORTER): error,
                ("none", LONGER): records("new", 100, 150),
                ("earliest", "orders"): [Event(offset, f"{offset} in epoch 2") for offset in range(40, 200)],
                ("earliest", SHORTER): records("new", 0, 50),
                ("earliest", LONGER): records("new", 100, 150),  # as at a broker: its position is one of the new topic, too
            }
            for one, events in seen.items():
                wait_for(lambda one=one, events=events: events[100:] == expected[one.reset, one.topic])  # type: ignore[misc]


@pytest.mark.slow  # in some runs librdkafka fetches the new topic and hands nothing to the application, at a broker, too
@pytest.mark.timeout(600)
def test_attached_clients_see_truncations_and_new_topics_as_at_a_broker(new_cluster: Callable[..., KafkaCluster], tmp_path: Path) -> None:
    cluster = new_cluster()
    logs = Logs(cluster, tmp_path)
    with ClusterAdmin(cluster) as admin, ExitStack() as stack:
        for topic in (CUT, SHORTER):
            admin.create_topic(topic, settings={"remote.storage.enable": "false"})
            logs.write(topic, "old", 100)
            logs.bring(topic)
        endpoint = stack.enter_context(served(logs.cli.config))
        ours, theirs = endpoint.address, cluster.bootstrap
        each = [Attachment(*place) for place in itertools.product((ours, theirs), ("none", "earliest"), (CUT, SHORTER))]
        clients = {f"Java {version}": stack.enter_context(java(version, each)) for version in VERSIONS}
        clients["librdkafka"] = stack.enter_context(librdkafka(each))
        for seen in clients.values():
            wait_for(lambda seen=seen: all(len(events) == 100 for events in seen.values()))  # type: ignore[misc]

        admin.delete_topic(SHORTER)
        admin.create_topic(SHORTER, settings={"remote.storage.enable": "false"})
        logs.write(SHORTER, "new", 50)
        logs.bring(SHORTER, "--new-incarnation")
        cluster.nodes[1].stop()
        logs.cut(CUT, 40)
        cluster.start()
        logs.write(CUT, "new", 160)
        logs.bring(CUT, "--accept-truncation")
        for name, seen in clients.items():
            for one in each:
                wait_for(lambda seen=seen, one=one: is_over(one.topic, seen[one]), seconds=120)  # type: ignore[misc]
            for _, reset, topic in each[len(each) // 2 :]:
                # An error ends a reading with "none"; a broker's restart is a further one.
                mine, others = (seen[Attachment(where, reset, topic)][: 101 if reset == "none" else None] for where in (ours, theirs))
                assert mine == others, (name, reset, topic)
