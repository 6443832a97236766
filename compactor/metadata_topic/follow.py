"""The metadata topic followed: one reader for all partitions, folded user partition by user partition, from where the last run ended.

A start reads again the last record that was folded of each metadata partition. If it is not there any more, or another one is, the
topic was truncated or made anew and everything is folded from its beginning; the same where local state is lost in mid-work.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from compactor.errors import BadData, NotFound, Unavailable
from compactor.metadata_topic.cache import RemoteLogMetadataCache
from compactor.metadata_topic.codec import MetadataRecord, TopicIdPartition, decode
from compactor.metadata_topic.kept import FoldedPartition, KeptStates, Reached, StateLost, TieredPartition
from compactor.metadata_topic.packed import PackedSegments
from compactor.metadata_topic.partitioner import metadata_partition
from compactor.metadata_topic.ports import Bounds, MetadataTopic, TopicIdentity, TopicRecord
from compactor.metadata_topic.spending import counted
from compactor.model.ids import COMPACTOR_BROKER_ID

CHUNK_RECORDS = 100_000
CHUNK_BYTES = 32 << 20
"""How much is read before it is folded: each user partition that it touches is taken from local state and put back once."""
_POLL_RECORDS = 10_000
_POLL_S = 0.5
_ATTEMPTS = 3
_FOLDED_AT_ONCE = 256


class FollowProgress(NamedTuple):
    """``records``: folded by this call. ``behind``: how many records are still unread, by metadata partition. ``anew``: why all was.

    Partitions that cannot be read at all are not ``behind``: whoever asks for what lies in one of them is told.
    """

    records: int
    behind: Mapping[int, int]
    anew: str = ""


@dataclass
class _Read:
    """What of one metadata partition has arrived and is not folded yet."""

    records: list[TopicRecord]
    reached: int


class _Changed(Exception):
    """The topic no longer has what was folded of it."""


class FollowedTopic:
    """May be used by several threads, one at a time.

    :param topic: read by nobody else. :param kept: of this topic alone. :param clock_ms: what is stamped later than now was written now.
    """

    def __init__(self, topic: MetadataTopic, kept: KeptStates, *, clock_ms: Callable[[], int], chunk_records: int = CHUNK_RECORDS) -> None:
        self._topic = topic
        self._kept = kept
        self._chunk_records = chunk_records
        self._clock_ms = clock_ms
        self._lock = threading.RLock()
        self._partitions = 0
        self._reading: dict[int, int] = {}
        self._reached: dict[int, Reached] = {}
        self._checked: set[int] = set()
        self._leaderless: frozenset[int] = frozenset()
        self._identity: TopicIdentity | None = None
        self._folds = 0

    @property
    def folds(self) -> int:
        """Another number once anything was folded since: whoever has listed the partitions need not do so again."""
        return self._folds

    def catch_up(self, timeout_s: float) -> FollowProgress:
        """Folds all that stood in the topic when this was called, as far as the time allows. Raises Unavailable, Refused, NotFound."""
        deadline = time.monotonic() + timeout_s
        why = ""
        with self._lock:
            for _ in range(_ATTEMPTS):
                try:
                    return self._follow(deadline)._replace(anew=why)
                except (StateLost, _Changed) as error:
                    why = str(error)
                    self._kept.forget(why)
                    self._identity, self._reading = None, {}
                except BaseException:
                    self._reading = {}  # the reader may be ahead of what was folded
                    raise
        raise Unavailable(f"{self._topic.name} cannot be folded: {why}", hint="It changed each time it was read; try again")

    def partition(self, topic_id: bytes, partition: int) -> FoldedPartition | None:
        """A user partition as folded so far; None where no record names it.

        Raises BadData where a record before it stops brokers, Unavailable where its metadata partition cannot be read.
        """
        name = TopicIdPartition(topic_id, "", partition)
        with self._lock:
            number = self.number(topic_id, partition)
            if number in self._leaderless:
                said = f"partition {number} of {self._topic.name} cannot be read: no broker leads it"
                raise Unavailable(said, hint="Only what it tells of is held up. Bring a broker back that has a replica of it")
            if self._reached[number].stopped:
                reached = self._reached[number]
                raise BadData(reached.stopped, segment=f"{self._topic.name}-{number}", offset=reached.position)
            try:
                return self._kept.load(number, [name])[0]
            except StateLost as error:
                raise Unavailable(f"local state of {self._topic.name} is lost", hint="The topic is folded anew by the next look") from error

    def number(self, topic_id: bytes, partition: int) -> int:
        """The metadata partition that tells of this user partition."""
        with self._lock:
            if not self._reached:
                raise Unavailable(f"{self._topic.name} has not been read yet")
            return metadata_partition(topic_id, partition, self._partitions)

    def partitions(self) -> list[TieredPartition]:
        """All user partitions that the topic names, by topic id and number."""
        with self._lock:
            return list(self._kept.partitions())

    def reached(self) -> Mapping[int, Reached]:
        """How far each metadata partition is folded, where the topic has lost its beginning, and what stopped it."""
        with self._lock:
            return dict(self._reached)

    @property
    def leaderless(self) -> frozenset[int]:
        """Metadata partitions that could not be read at the last look."""
        return self._leaderless

    def ours(self) -> Mapping[int, int]:
        """How many records of this program's own were folded, by minute (spending)."""
        with self._lock:
            total: Counter[int] = Counter()
            for reached in self._reached.values():
                total.update(dict(reached.ours))
            return total

    def _follow(self, deadline: float) -> FollowProgress:
        identity = self._topic.identity()
        if identity != self._identity:
            self._reached = self._kept.begin(identity)
            self._folds += 1
            self._partitions, self._identity, self._checked = identity.partitions, identity, set()
        bounds = self._topic.bounds()
        self._leaderless = frozenset(range(self._partitions)) - bounds.keys()
        self._begin(bounds)
        folded = 0
        while self._behind(bounds) and time.monotonic() < deadline:
            read = self._chunk(bounds, deadline)
            for number in sorted(read):
                folded += self._fold(number, read[number])
        return FollowProgress(folded, self._behind(bounds))

    def _begin(self, bounds: Mapping[int, Bounds]) -> None:
        """Reads on where each partition ended, from its last record where that was not looked at yet by this process."""
        positions = {}
        for number, (start, end) in bounds.items():
            reached = self._reached[number]
            if reached.position > end:
                raise _Changed(f"partition {number} ends at {end}, {reached.position} was folded already: it was truncated")
            if start > reached.position:
                # What is gone cannot be folded: whoever asks is told.
                reached = self._reached[number] = Reached(start, missing=start, ours=reached.ours)
                self._kept.reach(number, reached)
            if reached.stopped:
                continue
            if reached.last < start:
                self._checked.add(number)
            positions[number] = reached.position if number in self._checked else reached.last
        if positions != self._reading:
            self._topic.seek(positions)
            self._reading = positions

    def _behind(self, bounds: Mapping[int, Bounds]) -> dict[int, int]:
        behind = {}
        for number, (_, end) in bounds.items():
            reached = self._reached[number]
            if not reached.stopped and (reached.position < end or number not in self._checked):
                behind[number] = end - reached.position
        return behind

    def _chunk(self, bounds: Mapping[int, Bounds], deadline: float) -> dict[int, _Read]:
        read: dict[int, _Read] = {}
        count = size = 0
        wanted = self._behind(bounds)
        while count < self._chunk_records and size < CHUNK_BYTES and time.monotonic() < deadline:
            try:
                polled = self._topic.poll(min(_POLL_RECORDS, self._chunk_records), min(_POLL_S, max(0.0, deadline - time.monotonic())))
            except NotFound as error:
                raise _Changed(str(error)) from error
            for record in polled.records:
                known = read.setdefault(record.partition, _Read([], 0))
                known.records.append(record)
                known.reached = record.offset + 1
                size += len(record.value or b"")
            count += len(polled.records)
            for number, position in polled.reached.items():
                known = read.setdefault(number, _Read([], 0))
                known.reached = max(known.reached, position)
            self._reading |= {number: known.reached for number, known in read.items()}
            if all(number in read and read[number].reached >= bounds[number].end for number in wanted):
                break
        return read

    def _fold(self, number: int, read: _Read) -> int:
        """Folds what was read of one metadata partition; the number of records."""
        reached = self._reached[number]
        records = self._check(number, reached, read)
        self._checked.add(number)
        by_partition: dict[TopicIdPartition, list[tuple[int, MetadataRecord]]] = {}
        ours: list[tuple[int, int]] = []
        stopped, position = "", max(reached.position, read.reached)
        for record in records:
            try:
                decoded = self._decode(record)
            except BadData as error:
                stopped, position = error.cause, record.offset
                break
            by_partition.setdefault(decoded.partition, []).append((record.offset, decoded))
            if decoded.broker_id == COMPACTOR_BROKER_ID:
                ours.append((record.offset, decoded.event_timestamp_ms))
        names = list(by_partition)
        at = 0
        while at < len(names):
            try:
                self._apply(number, {name: by_partition[name] for name in names[at : at + _FOLDED_AT_ONCE]}, position)
                at += _FOLDED_AT_ONCE
            except BadData as error:
                # All that stands before it counts, nothing after it: once more from the first, what is applied stays so.
                stopped, position, at = error.cause, error.offset, 0
        done = [record for record in records if record.offset < position]
        stamps = [stamp for offset, stamp in ours if offset < position]
        said = counted(reached.ours, stamps, self._clock_ms()) if stamps else reached.ours
        last = Reached(position, reached.last, reached.digest, reached.missing, stopped, said)
        if done:
            last = replace(last, last=done[-1].offset, digest=_digest(done[-1]))
        if last != reached:
            self._kept.reach(number, last)
            self._reached[number] = last
            self._folds += 1
        return len(done)

    def _check(self, number: int, reached: Reached, read: _Read) -> list[TopicRecord]:
        """What follows the last record that was folded, which comes first where it was asked for."""
        if number not in self._checked:
            first = read.records[0] if read.records else None
            if first is None or first.offset != reached.last or _digest(first) != reached.digest:
                raise _Changed(f"partition {number} has another record at {reached.last} than was folded: it was truncated or made anew")
        return [record for record in read.records if record.offset >= reached.position]

    def _apply(self, number: int, events: Mapping[TopicIdPartition, Iterable[tuple[int, MetadataRecord]]], end: int) -> None:
        names = list(events)
        held = dict(zip(names, self._kept.load(number, names), strict=True))
        done = {}
        topic = f"{self._topic.name}-{number}"
        try:
            for name in names:
                folded = done[name] = held[name] or FoldedPartition(RemoteLogMetadataCache(name, PackedSegments()))
                for offset, record in events[name]:
                    if offset >= end:
                        break
                    folded.apply(record, offset, topic)
        finally:
            self._kept.save(done)

    def _decode(self, record: TopicRecord) -> MetadataRecord:
        topic = f"{self._topic.name}-{record.partition}"
        if record.key is not None:
            said = "the record has a key: a compacted metadata topic (KIP-1266) is not understood"
            raise BadData(said, segment=topic, offset=record.offset)
        decoded = decode(record.value, offset=record.offset, topic=topic)
        name = decoded.partition
        if (right := metadata_partition(name.topic_id, name.partition, self._partitions)) != record.partition:
            raise BadData(f"a record of {name} belongs into partition {right}", segment=topic, offset=record.offset)
        return decoded


def _digest(record: TopicRecord) -> str:
    return hashlib.sha256(record.value or b"").hexdigest()
