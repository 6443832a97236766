"""Names of topic partitions and remote segments."""

from __future__ import annotations

import base64
import re
from enum import StrEnum
from typing import Final, NamedTuple, Self

from typing_extensions import override

from compactor.errors import UsageError

COMPACTOR_BROKER_ID = 2_000_000_000
"""Broker id that the compactor writes into metadata; no broker can have it."""

INCARNATION_SUFFIX = r"~(?:[2-9]|[1-9][0-9]+)"
"""Regular expression of the suffix in the control and data prefixes of later incarnations. No topic name has a ``~``."""

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


class TopicPartition(NamedTuple):
    """Topic name and partition number, as Kafka's TopicPartition; prints as ``topic-partition``.

    A plain TopicPartition is of the first topic of its name, PartitionOfLaterIncarnation of a later one.
    """

    topic: str
    partition: int

    @override
    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def incarnation(self) -> int:
        """Number among all topics of the name, from 1 in the order of creation. Key prefixes in the stores contain it unless it is 1."""
        return 1

    @property
    def first_incarnation(self) -> TopicPartition:
        """Partition as brokers and people name it."""
        return TopicPartition(self.topic, self.partition)

    @staticmethod
    def create_validated(topic: str, partition: int) -> TopicPartition:
        """Raises UsageError if Kafka's ``Topic.validate`` refuses the topic, or no partition can have the number."""
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
        """Raise UsageError if the text is not like ``orders-0``."""
        topic, dash, number = text.rpartition("-")
        if not dash or not (number.isascii() and number.isdigit()):
            raise UsageError(f"{text!r} is not a partition", hint="Write TOPIC-PARTITION, for example orders-0")
        return TopicPartition.create_validated(topic, int(number))

    @staticmethod
    def parse_partition_store_prefix(text: str) -> TopicPartition:
        """Raise UsageError if the text is not like ``orders-0`` or ``orders-0~2`` (second topic of the name)."""
        name, mark, number = text.partition("~")
        if not re.fullmatch(f"({INCARNATION_SUFFIX})?", mark + number):
            raise UsageError(
                f"{text!r} is not an incarnation of a partition", hint="Write orders-0 for the first, orders-0~2 for the second"
            )
        return partition_of_incarnation(*TopicPartition.parse(name), int(number) if mark else 1)


class PartitionOfLaterIncarnation(TopicPartition):
    """Partition of a topic that was created again under its name. Prints as ``orders-0~2``, and has key prefixes of its own.

    Unpacks to topic and partition. Does not equal a plain tuple, nor the partition of another topic of the same name.
    """

    def __new__(cls, topic: str, partition: int, incarnation_number: int) -> Self:
        self = super().__new__(cls, topic, partition)
        self._number = incarnation_number
        return self

    _number: int

    @property
    @override
    def incarnation(self) -> int:
        return self._number

    @override
    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}~{self._number}"

    @override
    def __repr__(self) -> str:
        return f"PartitionOfLaterIncarnation({self.topic!r}, {self.partition}, {self._number})"

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionOfLaterIncarnation) and (*self, self._number) == (*other, other._number)

    @override
    def __ne__(self, other: object) -> bool:
        return not self == other

    @override
    def __hash__(self) -> int:
        return hash((*self, self._number))

    def __getnewargs__(self) -> tuple[str, int, int]:
        return (*self, self._number)


def partition_of_incarnation(topic: str, partition: int, incarnation_number: int) -> TopicPartition:
    """:param incarnation_number: counted from 1."""
    return (
        TopicPartition(topic, partition) if incarnation_number == 1 else PartitionOfLaterIncarnation(topic, partition, incarnation_number)
    )


def encode_segment_id(random_bytes: bytes) -> str:
    """Return 22 characters of URL-safe base64, as Kafka's Uuid. Raises ValueError unless there are 16 bytes."""
    if len(random_bytes) != 16:
        raise ValueError("a segment id has 16 bytes")
    return base64.urlsafe_b64encode(random_bytes).rstrip(b"=").decode()


class RoundStatus(StrEnum):
    """Outcome of a round, or of another job for a partition."""

    CLEANED = "cleaned"
    RESUMED = "resumed"
    EXPIRED = "expired"
    """Only retention had something to do."""
    NOTHING_TO_DO = "nothing_to_do"
    WAITING = "waiting"
    PAUSED = "paused"
    QUARANTINED = "quarantined"
    LEASED = "leased"
    FENCED = "fenced"
    RETIRED = "retired"
    OUT_OF_BUDGET = "out_of_budget"
    STOPPED = "stopped"
    FAILED = "failed"


PUBLISHING: Final = (RoundStatus.CLEANED, RoundStatus.RESUMED)
"""Statuses of rounds that published new segments."""
CHANGING: Final = (*PUBLISHING, RoundStatus.EXPIRED)
"""Statuses of rounds that changed what readers read."""


class RunHistoryStatus(StrEnum):
    """Status in the run history. Other versions may have further values."""

    RUNNING = "running"
    PUBLISHED = "published"
    CLEANED = "cleaned"
    RESUMED = "resumed"
    RESTORED = "restored"
    REPAIRED = "repaired"
    UNDONE = "undone"
    REVERTED = "reverted"
    REVERTED_IN_PART = "reverted_in_part"
    QUARANTINED = "quarantined"
