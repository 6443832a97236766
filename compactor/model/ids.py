"""Names of topic partitions and remote segments."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import NamedTuple

from compactor.errors import UsageError

COMPACTOR_BROKER_ID = 2_000_000_000
"""Broker id that the compactor writes into metadata; no broker can have it."""

LATER_INCARNATION = r"~(?:[2-9]|[1-9][0-9]+)"
"""Regular expression of the suffix in the prefixes of later incarnations of a topic."""

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class TopicPartition(NamedTuple):
    """Kafka's TopicPartition. Prints as ``topic-partition``."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @staticmethod
    def of(topic: str, partition: int) -> TopicPartition:
        """Return a partition after checking its topic as Kafka's ``Topic.validate`` does. Raises UsageError."""
        if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            raise UsageError(f"{topic!r} is not a topic name", hint="Kafka allows letters, digits, '.', '_' and '-', at most 249 of them")
        if not 0 <= partition < 2**31:
            raise UsageError(f"{partition} is not a partition number", hint="Partitions count from 0")
        name = TopicPartition(topic, partition)
        if len(str(name)) > 255:
            raise UsageError(f"{name} is longer than 255 characters", hint="Brokers cannot have such a partition: it names a directory")
        return name

    @staticmethod
    def parse(text: str) -> TopicPartition:
        """Parse ``orders-0`` to ("orders", 0). Raises UsageError."""
        if "~" in text:
            later = Incarnation.parse(text)
            raise UsageError(f"{later} is a later incarnation of {later.name}", hint="This version opens first incarnations only: upgrade")
        topic, dash, number = text.rpartition("-")
        if not dash or not (number.isascii() and number.isdigit()):
            raise UsageError(f"{text!r} is not a partition", hint="Write TOPIC-PARTITION, for example orders-0")
        return TopicPartition.of(topic, int(number))


class Incarnation(NamedTuple):
    """Partition of one of the topics that have had the same name. It names the control and data prefixes.

    Prints as ``orders-0`` for the first and ``orders-0~2`` for the second; no topic name has a ``~``. This version opens only first ones.
    """

    name: TopicPartition
    number: int = 1

    def __str__(self) -> str:
        return str(self.name) if self.number == 1 else f"{self.name}~{self.number}"

    @staticmethod
    def parse(text: str) -> Incarnation:
        """Parse ``orders-0~2`` to (orders-0, 2). Raises UsageError."""
        name, mark, number = text.partition("~")
        if not re.fullmatch(f"({LATER_INCARNATION})?", mark + number):
            raise UsageError(
                f"{text!r} is not an incarnation of a partition", hint="Write orders-0 for the first, orders-0~2 for the second"
            )
        return Incarnation(TopicPartition.parse(name), int(number) if mark else 1)


def first_incarnations(names: Iterable[str]) -> list[TopicPartition]:
    """Return the partitions whose first incarnation is among these names, sorted.

    Later incarnations are left out, because this version neither opens nor sweeps them. The log of a first incarnation that was superseded
    says so by a record of a later version.
    """
    return sorted(each.name for each in map(Incarnation.parse, names) if each.number == 1)


def segment_id(raw: bytes) -> str:
    """Encode 16 random bytes as Kafka's Uuid prints them: 22 characters of URL-safe base64. Raises ValueError for another length."""
    if len(raw) != 16:
        raise ValueError("a segment id has 16 bytes")
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
