"""Port to the metadata topic: read from given offsets, and append one record with acknowledgement.

Every implementation passes tests/contract/test_metadata_topic.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from compactor.constants import TopicId

AppendedOffset = int
"""Offset that a leader gave to an appended record."""


class RawMetadataTopicRecord(NamedTuple):
    """An undecoded record of the metadata topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


class FirstAndEndOffsets(NamedTuple):
    """First existing offset and next offset to be written (exclusive end) of a metadata topic partition."""

    start: int
    end: int


@dataclass(frozen=True)
class TopicIdentity:
    """Identity of a topic. A topic of another cluster, and a topic created again under the same name, have different identities.

    partitions: number of partitions.
    """

    cluster_id: str
    topic_id: TopicId
    partitions: int


@dataclass(frozen=True)
class PollResult:
    """Records from one poll, ascending within each partition.

    reached: next offset of each partition that was read to its end. It also counts control records, which are not returned.
    """

    records: Sequence[RawMetadataTopicRecord]
    reached: Mapping[int, int]


class MetadataTopic(Protocol):
    """Client for the metadata topic. Reads include records of aborted transactions, as brokers do; no offset is committed.

    All methods raise Unavailable (no broker, leader election) and Refused (TLS, SASL, authorization, no such topic).
    """

    @property
    def name(self) -> str:
        """Return the topic's name, for messages."""

    def identity(self) -> TopicIdentity:
        """Ask the cluster for the topic's identity. Never cached."""

    def bounds(self) -> Mapping[int, FirstAndEndOffsets]:
        """Return the first existing offset and the end offset (exclusive) by partition number. Partitions without a leader are missing."""

    def seek(self, positions: Mapping[int, int]) -> None:
        """Set the offset of each partition at which later polls begin. Later polls read these partitions only."""

    def poll(self, limit: int, timeout_s: float) -> PollResult:
        """Return at most ``limit`` records, waiting up to ``timeout_s`` seconds. Raises NotFound if an offset no longer exists."""

    def append(self, partition: int, value: bytes) -> AppendedOffset:
        """Append a record without a key, and return its offset once all in-sync replicas have it.

        After Unavailable the record may or may not be in the topic; it is there at most once.
        """

    def close(self) -> None:
        """Close all connections."""


class LocalKeyValueStore(Protocol):
    """Local key-value store whose data may be lost at any time. Methods raise nothing. Implemented by compactor.local.rocks."""

    @property
    def is_writable(self) -> bool:
        """Return whether the store accepts writes now."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of these keys, None for absent ones."""

    def entries_with_prefix(self, prefix: bytes) -> dict[bytes, bytes]:
        """Return all values whose key has this prefix, by key. The prefix is removed from the returned keys."""

    def write(self, values: Mapping[bytes, bytes], deleted: Sequence[bytes] = ()) -> None:
        """Write ``values`` and delete the keys in ``deleted`` in one batch."""

    def delete_all_entries(self, reason: str) -> None:
        """Delete all keys and values. reason: why, for the log message."""
