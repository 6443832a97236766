"""Views of the tier's partitions, refreshed from control logs on request if old.

A view is one consistent state of a partition. ``View.source`` is the one place that decides where the records at an offset come from.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from checkpoint.lineage import Lineage
from compactor.access.tier import Tier
from compactor.control.logs import PartitionLog
from compactor.errors import BadData, CompactorError
from compactor.features.serve.protocol import uuid_of_topic_id
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.read.outcomes import log_identity
from compactor.read.reading import last_stable_offset
from compactor.tier.kinds import MetadataSource

T = TypeVar("T")
UNDEFINED = -1
"""Kafka's UNDEFINED_EPOCH and UNDEFINED_EPOCH_OFFSET."""
UNHINTED_S = 60.0
"""Age in seconds at which a view is refreshed although no hint says that its control log has grown: hints may be lost."""


class RecordSource(Enum):
    TIER = auto()
    END = auto()
    """Nowhere yet: the offset is the end of what this isolation level may read."""
    OUT_OF_RANGE = auto()


@dataclass(frozen=True)
class View:
    """State of a partition.

    start: first readable offset. end: exclusive. stable: the last stable offset, from which on read_committed does not read.
    epoch: the last leader epoch; -1 if unknown. hint: latest hint when it was read. taken_s: by the monotonic clock.
    """

    partition: TopicPartition
    segments: tuple[RemoteLogSegmentMetadata, ...]
    start: int
    end: int
    stable: int
    topic_id: uuid.UUID
    lineage: Lineage
    hint: int
    taken_s: float

    @property
    def epoch(self) -> int:
        return self.lineage[-1].epoch if self.lineage else UNDEFINED

    def bound(self, *, committed: bool) -> int:
        """First offset that this isolation level may not read."""
        return min(self.stable, self.end) if committed else self.end

    def source(self, offset: int, *, committed: bool) -> RecordSource:
        if not self.start <= offset <= self.end:
            return RecordSource.OUT_OF_RANGE
        return RecordSource.TIER if offset < self.bound(committed=committed) else RecordSource.END

    def segments_from(self, offset: int) -> tuple[RemoteLogSegmentMetadata, ...]:
        """Segments that end at or after an offset, ascending."""
        return self.segments[bisect_left(self.segments, offset, key=lambda segment: segment.end_offset) :]

    def epoch_at(self, offset: int) -> int:
        """Epoch, -1 if unknown."""
        number = bisect_right(self.lineage, offset, key=lambda entry: entry.start_offset)
        return self.lineage[number - 1].epoch if number else UNDEFINED

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Largest known epoch up to ``epoch``, and its end (exclusive), as Kafka's ``LeaderEpochFileCache.endOffsetFor``; (-1, -1) if the
        epoch is not known.
        """
        if not self.lineage or epoch > self.epoch or epoch < 0:
            return UNDEFINED, UNDEFINED
        if epoch == self.epoch:
            return epoch, self.end
        above = bisect_right(self.lineage, epoch, key=lambda entry: entry.epoch)
        return (self.lineage[above - 1].epoch if above else epoch), self.lineage[above].start_offset


class Node(NamedTuple):
    """A replica's address for clients."""

    id: int
    host: str
    port: int


def leader_of(partition: TopicPartition, nodes: Iterable[Node]) -> Node:
    """By rendezvous hashing: when a replica is added or removed, only its partitions move."""

    def weight(node: Node) -> bytes:
        return hashlib.sha256(f"{node.id}/{partition.topic}/{partition.partition}".encode()).digest()

    return max(nodes, key=weight)


class Partitions:
    """The tier's partitions. For the event loop; threads read.

    max_age_s: age at which a requested view is refreshed.
    """

    def __init__(self, tier: Tier, max_age_s: float, pool: ThreadPoolExecutor, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.tier = tier
        self.max_age_s = max_age_s
        self._pool = pool
        self._clock_s = clock_s
        self._topics: dict[str, dict[int, TopicPartition]] = {}
        self._names: dict[uuid.UUID, list[str]] = {}
        self._named: Mapping[str, Mapping[int, TopicPartition]] = {}
        """Topics for which ``_names`` was made."""
        self._listed_s = -UNHINTED_S
        self._listing = asyncio.Lock()
        self._logs: dict[TopicPartition, PartitionLog] = {}
        self._views: dict[TopicPartition, View] = {}
        self._confirmed_s: dict[TopicPartition, float] = {}
        """Time at which the listing last showed no change since a view was taken."""
        self._reading: dict[TopicPartition, asyncio.Lock] = {}
        self._tasks: set[asyncio.Future[View]] = set()
        self._failures: dict[TopicPartition | None, tuple[float, CompactorError]] = {}
        """Last failure to read a partition, or the listing (None), and the time at which it was known."""

    async def topics(self, max_age_s: float | None = None) -> Mapping[str, Mapping[int, TopicPartition]]:
        """Partitions of the topic that was created last under each name. Raises UsageError, StoreError."""
        limit, asked_s = self.max_age_s if max_age_s is None else max_age_s, self._clock_s()
        if self.tier.kind.metadata is MetadataSource.LISTING:
            limit = max(limit, UNHINTED_S)  # it lists every object
        if asked_s - self._listed_s < limit:
            return self._topics
        async with self._listing:
            if self._clock_s() - self._listed_s >= limit and self._listed_s < asked_s:
                self._raise_failure(None, asked_s, limit)
                names = await self._attempt(None, self._list)
                topics: dict[str, dict[int, TopicPartition]] = {}
                for name in names:
                    topics.setdefault(name.topic, {})[name.partition] = name
                self._topics, self._listed_s = topics, self._clock_s()
                for gone in self._views.keys() - set(names):
                    for kept in (self._views, self._logs, self._confirmed_s, self._reading, self._failures):
                        kept.pop(gone, None)
        return self._topics

    async def find(self, topic: str, number: int) -> TopicPartition | None:
        return (await self.topics()).get(topic, {}).get(number)

    async def topic_name(self, topic_id: uuid.UUID) -> str | None:
        """Return None if the topic was created again, is not in the tier, or is one of several with this id."""
        names = await self.names_of_id(topic_id)
        # The name may be another topic's by now.
        return names[0] if len(names) == 1 and await self.topic_id(names[0]) == topic_id else None

    async def names_of_id(self, topic_id: uuid.UUID) -> Sequence[str]:
        """Topics with an id. They are several if one log was imported under several names.

        Raises UsageError, StoreError.
        """
        topics = await self.topics()
        if topic_id in self._names and topics is self._named:
            return self._names[topic_id]
        first = [next(iter(partitions.values())) for partitions in topics.values()]
        await self.refresh(first if topic_id not in self._names else [name for name in first if name not in self._views])
        names: dict[uuid.UUID, list[str]] = {}
        for topic, partitions in topics.items():
            known = {self._views[name].topic_id for name in partitions.values() if name in self._views}
            for one in known:
                if one.int:
                    names.setdefault(one, []).append(topic)
        self._names, self._named = names, topics
        return names.get(topic_id, ())

    async def topic_id(self, topic: str) -> uuid.UUID | None:
        """Zero if the topic has no id; None if the tier does not hold it, or all its control logs are damaged.

        Raises StoreError.
        """
        for partition in (await self.topics()).get(topic, {}).values():
            with suppress(BadData):
                return (await self.view(partition)).topic_id
        return None

    def views(self) -> list[View]:
        """May be called from any thread."""
        return list(self._views.copy().values())

    def last_view(self, partition: TopicPartition) -> View | None:
        return self._views.get(partition)

    async def refresh(self, partitions: Iterable[TopicPartition]) -> None:
        """Read old views at the same time. Their errors come from ``view``."""
        now = self._clock_s()
        old = [name for name in partitions if self._age_s(name, now) >= self.max_age_s]
        for done in old and await asyncio.gather(*map(self.view, old), return_exceptions=True):
            if isinstance(done, BaseException) and not isinstance(done, CompactorError):
                raise done

    async def view(self, partition: TopicPartition, max_age_s: float | None = None) -> View:
        """View that is at most ``max_age_s`` old (None: the usual age; 0: now).

        Raises StoreError; BadData if the control log is damaged.
        """
        limit, asked_s = self.max_age_s if max_age_s is None else max_age_s, self._clock_s()
        found = self._views.get(partition)
        if found is not None and self._age_s(partition, asked_s) < limit:
            return found
        # A request that is given up must not end the read that others wait for, nor let a second one begin beside it.
        task = asyncio.ensure_future(self._refresh_view(partition, limit, asked_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _age_s(self, partition: TopicPartition, now_s: float) -> float:
        """Seconds for which a partition may have changed unnoticed; infinite if it was not read yet."""
        view = self._views.get(partition)
        return now_s - max(view.taken_s, self._confirmed_s.get(partition, view.taken_s)) if view is not None else math.inf

    async def _refresh_view(self, partition: TopicPartition, limit: float, asked_s: float) -> View:
        async with self._reading.setdefault(partition, asyncio.Lock()):
            found = self._views.get(partition)
            # Clients that ask at the same time share one read, also where the view must be new.
            if found is not None and (self._clock_s() - found.taken_s < limit or found.taken_s > asked_s):
                return found
            self._raise_failure(partition, asked_s, limit)
            if limit and found is not None and await self._is_unchanged(partition, found):
                self._confirmed_s[partition] = self._listed_s
                return found
            view = await self._attempt(partition, lambda: self._read(partition, found, now=not limit))
            self._views[partition] = view
            return view

    def _raise_failure(self, subject: TopicPartition | None, asked_s: float, limit: float) -> None:
        """Raise the last failure if it is newer than the request, or no older than ``limit``: requests must not wait for an unresponsive
        store one after the other.
        """
        failed_s, error = self._failures.get(subject, (-UNHINTED_S, None))
        if error is not None and (failed_s > asked_s or self._clock_s() - failed_s < limit):
            raise error.with_traceback(None)

    async def _attempt(self, subject: TopicPartition | None, work: Callable[[], T]) -> T:
        self._failures.pop(subject, None)
        try:
            return await self.run(work)
        except CompactorError as error:
            self._failures[subject] = self._clock_s(), error
            raise

    async def _is_unchanged(self, partition: TopicPartition, view: View) -> bool:
        if not self.tier.kind.is_compactor_managed or self._clock_s() - view.taken_s > UNHINTED_S:
            return False
        await self.topics()
        return self.tier.change_notifier.latest_hint(partition) == view.hint

    def _list(self) -> list[TopicPartition]:
        self.tier.metadata.refresh()
        return self.tier.list_latest_incarnations()

    def _read(self, partition: TopicPartition, before: View | None, *, now: bool) -> View:
        """Read the control log to its end. Runs in a thread, one for each partition.


        :param now: what brokers report must not be a second old either.
        """
        tier, taken = self.tier, self._clock_s()
        hint = tier.change_notifier.latest_hint(partition)
        if now:
            tier.metadata.refresh()
        log = self._logs.get(partition)
        if log is None or log.name != tier.control_log_name(partition):
            # As for a round: what brokers or another program write is not fixed with the log, but asked for each view.
            log = self._logs[partition] = tier.open_partition_log(partition, caller_runs_round=True)
        state = tier.reader_state(log.refresh())
        identity = log_identity(tier, state)
        topic_id = uuid_of_topic_id(identity.topic_id)
        start = tier.first_readable_offset(state)
        # A segment never changes, nor does what is open at its end: only a new last one is asked.
        is_same_end = before is not None and before.segments[-1:] == state.live[-1:] and before.topic_id.bytes == topic_id.bytes
        stable = before.stable if before is not None and is_same_end else last_stable_offset(tier, state)
        return View(
            partition=partition,
            segments=state.live,
            start=start,
            end=max(start, state.end_offset + 1),
            stable=max(start, stable),
            topic_id=topic_id,
            lineage=identity.lineage,
            hint=hint,
            taken_s=taken,
        )

    async def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` in a thread that may wait for the store."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
