"""The metadata topic as this program needs it: read from given offsets, append one record and know that it stands.

Conformance: tests/contract/test_metadata_topic.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TopicRecord(NamedTuple):
    """One record of the topic, undecoded."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class Bounds(NamedTuple):
    """Of one partition: the first offset that is there, and the one that the next record gets."""

    start: int
    end: int


@dataclass(frozen=True)
class TopicIdentity:
    """Which topic it is: another cluster, or a topic made anew under the same name, is another one. ``topic_id``: Kafka's Uuid as text."""

    cluster_id: str
    topic_id: str
    partitions: int


@dataclass(frozen=True)
class Polled:
    """``records`` ascend within each partition. ``reached``: partitions that were read to their end, and the next offset there.

    Control records (a transaction's marker) are not among the records; the position passes them.
    """

    records: Sequence[TopicRecord]
    reached: Mapping[int, int]


class MetadataTopic(Protocol):
    """Reads are of everything that is appended, aborted transactions too, as brokers read. No offset is committed anywhere.

    All methods raise Unavailable (no broker, a leader election: try again), Refused (TLS, SASL, authorization, no such topic).
    """

    @property
    def name(self) -> str:
        """Of the topic, for messages."""

    def identity(self) -> TopicIdentity:
        """Asked anew each time."""

    def bounds(self) -> Mapping[int, Bounds]:
        """Of every partition that has a leader, now. One without does not keep the others from being read."""

    def seek(self, positions: Mapping[int, int]) -> None:
        """Reads these partitions from these offsets on, and no others."""

    def poll(self, limit: int, timeout_s: float) -> Polled:
        """At most ``limit`` records; fewer, or none, when the time is over. Raises NotFound where an offset is no longer there."""

    def append(self, partition: int, value: bytes) -> int:
        """Appends one record without a key and returns its offset, once every in-sync replica has it.

        After Unavailable the record may stand or not; one that stands does so once.
        """

    def close(self) -> None: ...


class KeptBytes(Protocol):
    """Local state that may be lost at any time; nothing here raises (compactor.local.rocks is one)."""

    @property
    def writable(self) -> bool: ...

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def below(self, prefix: bytes) -> dict[bytes, bytes]: ...

    def write(self, values: Mapping[bytes, bytes], gone: Sequence[bytes] = ()) -> None: ...

    def throw_away(self, why: str) -> None: ...
