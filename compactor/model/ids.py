"""Names of things: topic partitions and remote segment ids."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

from compactor.errors import UsageError

COMPACTOR_BROKER_ID = 2_000_000_000
"""Where a broker would write its own id: a number that none can have."""

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class TopicPartition(NamedTuple):
    """Kafka's TopicPartition; prints as ``topic-partition``."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @staticmethod
    def of(topic: str, partition: int) -> TopicPartition:
        """Checked as Kafka's ``Topic.validate`` does. Raises UsageError."""
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
        """``orders-0`` -> ("orders", 0). Raises UsageError."""
        topic, dash, number = text.rpartition("-")
        if not dash or not (number.isascii() and number.isdigit()):
            raise UsageError(f"{text!r} is not a partition", hint="Write TOPIC-PARTITION, for example orders-0")
        return TopicPartition.of(topic, int(number))


def segment_id(raw: bytes) -> str:
    """16 random bytes as Kafka's Uuid prints them: 22 characters of URL-safe base64.

    Ids made from the same plan and counter are made once, by the driver, and frozen in the plan (I7).
    """
    if len(raw) != 16:
        raise ValueError("a segment id has 16 bytes")
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
