"""Folded user partitions in local state: thousands of them, of which only those in use are in memory.

    topic              which topic this is, and in which format it is kept
    at/<p>             how far metadata partition p is folded, and the last record there (a topic that lost it is another one)
    name/<id><n>       name and figures of user partition n of the topic with this id
    part/<id><n>       its folded state

A state may be ahead of ``at``: it knows the last offset that it applied, so nothing counts twice. What is kept may vanish at any
moment (compactor.local.rocks); every read looks at ``at`` too and raises StateLost. Where nothing can be written, memory has it all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compactor.metadata_topic import packed
from compactor.metadata_topic.cache import Finding, RemoteLogMetadataCache
from compactor.metadata_topic.codec import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemotePartitionDeleteMetadataRecord,
    TopicIdPartition,
)
from compactor.metadata_topic.ports import KeptBytes, TopicIdentity
from compactor.metadata_topic.spending import ByMinute
from compactor.model.segment import SegmentState

FINDINGS_KEPT = 32
FORMAT = 2
"""Of what is kept beside the packed states; another one is folded anew."""
_TOPIC, _AT, _NAME, _PART = b"topic", b"at/", b"name/", b"part/"
_NUMBER = struct.Struct(">i")


class StateLost(Exception):
    """What was kept is gone, or is not what it was: everything has to be folded anew."""


@dataclass(frozen=True)
class Reached:
    """How far a metadata partition is folded: ``position`` is read next; ``last`` and ``digest`` are the last record's offset and SHA-256.

    ``missing``: first offset that was there when reading began, where that is not 0: the topic has lost its beginning.
    ``stopped``: why nothing beyond ``position`` is folded: the record there is one that stops brokers, too. ``ours``: how many records
    of this program's own there were, by minute (spending).
    """

    position: int = 0
    last: int = -1
    digest: str = ""
    missing: int = 0
    stopped: str = ""
    ours: ByMinute = ()

    def encoded(self) -> bytes:
        return json.dumps([self.position, self.last, self.digest, self.missing, self.stopped, self.ours]).encode()

    @staticmethod
    def decoded(data: bytes) -> Reached:
        position, last, digest, missing, stopped, ours = json.loads(data)
        return Reached(position, last, digest, missing, stopped, tuple((minute, count) for minute, count in ours))


class TieredPartition(NamedTuple):
    """What lists show of a user partition. ``finished``: segments in COPY_SEGMENT_FINISHED, ``other``: in any other state that is kept.

    ``applied``: offset of the last record about it.
    """

    partition: TopicIdPartition
    finished: int
    other: int
    finished_bytes: int
    findings: int
    applied: int


@dataclass
class FoldedPartition:
    """A user partition's state, and what its records did wrong: the newest of ``finding_count`` findings."""

    cache: RemoteLogMetadataCache
    findings: list[Finding] = field(default_factory=list)
    finding_count: int = 0
    finished: int = 0
    other: int = 0
    finished_bytes: int = 0

    def apply(self, record: MetadataRecord, offset: int, topic: str) -> None:
        """Raises BadData where brokers stop."""
        if offset <= self.cache.applied:
            return
        segments = self.cache.segments
        raw_id = b"" if isinstance(record, RemotePartitionDeleteMetadataRecord) else record.segment_id
        before = segments.get(raw_id)
        finding = self.cache.apply(record, offset, topic=topic)
        self._count(before, -1)
        self._count(segments.get(raw_id), 1)
        if not segments:
            self.finished = self.other = self.finished_bytes = 0
        if finding is not None:
            self.finding_count += 1
            self.findings = [*self.findings, finding][-FINDINGS_KEPT:]

    def _count(self, segment: RemoteLogSegmentMetadataRecord | None, by: int) -> None:
        if segment is None:
            return
        if segment.state is SegmentState.COPY_SEGMENT_FINISHED:
            self.finished += by
            self.finished_bytes += by * segment.size_bytes
        else:
            self.other += by


class KeptStates:
    """:param store: local state of this topic alone. Not for several threads at once."""

    def __init__(self, store: KeptBytes) -> None:
        self._store = store
        self._memory: dict[bytes, bytes] = {}
        self._reached: dict[int, Reached] = {}
        self._writable = False
        self._stored: bytes | None = None

    def begin(self, identity: TopicIdentity) -> dict[int, Reached]:
        """How far each metadata partition is folded; from the start where nothing is kept, or what is kept is of another topic."""
        said = json.dumps([packed.FORMAT, FORMAT, identity.cluster_id, identity.topic_id, identity.partitions]).encode()
        keys = [_TOPIC, *map(_at, range(identity.partitions))]
        self._writable = self._store.writable
        values = [self._memory.get(key, data) for key, data in zip(keys, self._store.get(keys), strict=True)]
        self._reached = _known(values[1:]) if values[0] == said else {}
        if len(self._reached) != identity.partitions:
            if values[0] is not None:
                self._store.throw_away("it is of another metadata topic, or of another version of this program")
            self._memory.clear()
            self._reached = dict.fromkeys(range(identity.partitions), Reached())
            self._writable = self._store.writable
            self._put({_TOPIC: said, **{_at(number): reached.encoded() for number, reached in self._reached.items()}})
        self._stored = self._store.get([_TOPIC])[0]
        return dict(self._reached)

    def forget(self, why: str) -> None:
        """``begin`` starts anew after it."""
        self._store.throw_away(why)
        self._memory.clear()
        self._reached = {}

    def load(self, metadata_partition: int, names: Sequence[TopicIdPartition]) -> list[FoldedPartition | None]:
        """None for those of which nothing is known. Raises StateLost."""
        keys = [_at(metadata_partition)]
        for name in names:
            keys += [_key(_NAME, name), _key(_PART, name)]
        at, *values = self._get(keys)
        if at != self._reached[metadata_partition].encoded():
            raise StateLost(f"metadata partition {metadata_partition}")
        return [_folded(name, said, data) for name, said, data in zip(names, values[::2], values[1::2], strict=True)]

    def save(self, partitions: Mapping[TopicIdPartition, FoldedPartition]) -> None:
        values = {}
        for name, folded in partitions.items():
            values[_key(_NAME, name)] = _summary(folded)
            values[_key(_PART, name)] = packed.pack(folded.cache, folded.findings)
        self._put(values)

    def reach(self, metadata_partition: int, reached: Reached) -> None:
        """After everything below is saved."""
        self._reached[metadata_partition] = reached
        self._put({_at(metadata_partition): reached.encoded()})

    def partitions(self) -> Iterator[TieredPartition]:
        """All user partitions with records, by topic id and number."""
        found = self._store.below(_NAME) | {key[len(_NAME) :]: data for key, data in self._memory.items() if key.startswith(_NAME)}
        for key, data in sorted(found.items()):
            topic, *figures = json.loads(data)
            yield TieredPartition(TopicIdPartition(key[:16], topic, _NUMBER.unpack(key[16:])[0]), *figures)

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        topic, *stored = self._store.get([_TOPIC, *keys])
        if topic != self._stored:
            raise StateLost("local state is gone")
        if not self._memory:
            return stored
        return [self._memory.get(key, data) for key, data in zip(keys, stored, strict=True)]

    def _put(self, values: dict[bytes, bytes]) -> None:
        if not self._writable:
            self._memory.update(values)
            return
        self._store.write(values)
        if not self._store.writable:
            raise StateLost("local state cannot be written any more")


def _known(values: Sequence[bytes | None]) -> dict[int, Reached]:
    """Those that can be read."""
    try:
        return {number: Reached.decoded(data) for number, data in enumerate(values) if data is not None}
    except (ValueError, TypeError):
        return {}


def _at(number: int) -> bytes:
    return _AT + _NUMBER.pack(number)


def _key(kind: bytes, name: TopicIdPartition) -> bytes:
    return kind + name.topic_id + _NUMBER.pack(name.partition)


def _summary(folded: FoldedPartition) -> bytes:
    topic = folded.cache.partition.topic
    return json.dumps([topic, folded.finished, folded.other, folded.finished_bytes, folded.finding_count, folded.cache.applied]).encode()


def _folded(name: TopicIdPartition, said: bytes | None, data: bytes | None) -> FoldedPartition | None:
    if said is None or data is None:
        return None
    try:
        topic, finished, other, size, count, _ = json.loads(said)
        cache, findings = packed.unpack(data, name._replace(topic=topic))
    except (ValueError, struct.error, TypeError) as error:
        raise StateLost(f"{name}: {error}") from error
    return FoldedPartition(cache, findings, count, finished, other, size)
