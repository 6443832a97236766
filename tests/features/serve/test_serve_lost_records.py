"""A log is truncated, and topics are created again, while clients are attached: leader epochs and topic ids tell them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition as At

from tests.builders import LogBuilder
from tests.features.imports.test_import_truncated import Log
from tests.support.endpoint import served
from tests.support.kafka_traffic import SILENT
from tests.support.tier_cli import TierCli
from tests.support.waiting import wait_for

SHORTER, LONGER = "shorter", "longer"
IDS = tuple(f"AAAAAAAAAAAAAAAAAAAA{end}" for end in ("AQ", "Ag", "Aw", "BA"))
BETWEEN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_ID)
"""Errors while a topic does not exist: at a broker there is a time between its deletion and the next topic of that name."""


class Event(NamedTuple):
    """text: value of a record, or name of an error, with the offset from which on the log is another one."""

    offset: int
    text: str


class Attachment(NamedTuple):
    """address: of the endpoint, or of a broker. reset: auto.offset.reset, in Java's words."""

    address: str
    reset: str
    topic: str


Seen = dict[Attachment, list[Event]]


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
