"""What the brokers say of a tier that they write: which partitions it has, under which topic ids, and every segment's state.

Two sources: the metadata topic itself (``FollowedBrokers``), or a snapshot of it (compactor.tier.metadata_snapshot). A topic that was
deleted and made anew has the same name and another id; only the cluster knows which id a name has now.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkpoint.lineage import EpochEntry
from compactor.errors import BadData, Unavailable, UsageError
from compactor.metadata_topic.cache import RemoteLogMetadataCache
from compactor.metadata_topic.chain import Link, chain, told_lineage
from compactor.metadata_topic.codec import TopicIdPartition, uuid_text
from compactor.metadata_topic.follow import FollowedTopic
from compactor.metadata_topic.kept import FoldedPartition
from compactor.model.ids import TopicPartition

CATCH_UP_S = 30.0
FRESH_S = 1.0
"""A fold that is no older is not read on: one command asks about many partitions."""
_SHOWN = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TopicNow:
    """A topic as the cluster has it. ``log_starts``: by partition, of those that have a leader. ``settings``: those that may be asked.

    ``chosen``: those of them that are set on the topic itself; they go before this program's own.
    """

    topic_id: bytes
    log_starts: Mapping[int, int] = field(default_factory=dict)
    last_stable: Mapping[int, int] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)


class ClusterNow(Protocol):
    """Asked when the fold was read on; raises Unavailable, Refused."""

    def cluster_id(self) -> str: ...

    def topics(self, names: Sequence[str]) -> Mapping[str, TopicNow]:
        """Those that exist, and that this user may describe."""


class BrokersMetadata(Protocol):
    """All methods raise Unavailable, Refused, UsageError; ``folded`` BadData where a record stops brokers, too."""

    @property
    def where(self) -> str:
        """Which source it is, for messages."""

    @property
    def taken_ms(self) -> int:
        """When it was taken, for a snapshot; -1 where it is read as it is now."""

    def cluster_id(self) -> str: ...

    def refresh(self, *, within_s: float = FRESH_S) -> None:
        """Reads on, where the last look is older than that."""

    def names(self) -> list[TopicPartition]:
        """The tiered partitions of the topics that the settings name, ascending."""

    def topic_ids(self) -> Mapping[str, str]:
        """Of those topics: name -> id, as Kafka's Uuid prints it."""

    def topic(self, name: str) -> TopicNow: ...

    def folded(self, name: TopicPartition) -> FoldedPartition:
        """Raises UsageError for a partition that is none of ``names``."""

    def incomplete(self) -> bool:
        """Whether records are known to be missing: what is not named may be a segment all the same."""

    def elsewhere(self) -> list[TopicIdPartition]:
        """Partitions of these names under other ids: of topics that were deleted and whose tier is not gone yet."""


def matching(patterns: Sequence[str], topics: Iterable[str]) -> list[str]:
    """Topics that one of these expressions matches as a whole. A pattern that matches none is told."""
    there = sorted(set(topics))
    found = {topic for topic in there for pattern in patterns if re.fullmatch(pattern, topic)}
    hint = f"tiered are {', '.join(there[:_SHOWN])}{' and others' * (len(there) > _SHOWN)}" if there else "no topic is tiered there"
    if not patterns:
        raise UsageError("topics under [kafka] is empty, so that no topic is read", hint=f"Name whole regular expressions; {hint}")
    for pattern in patterns:
        if not any(re.fullmatch(pattern, topic) for topic in there):
            _log.warning("topics under [kafka]: %s matches no tiered topic; %s", pattern, hint)
    return sorted(found)


class FollowedBrokers:
    """BrokersMetadata of the topic itself. Usable by several threads.

    :param patterns: [kafka] topics.
    """

    taken_ms = -1

    def __init__(self, followed: FollowedTopic, cluster: ClusterNow, patterns: Sequence[str], where: str) -> None:
        self.where = where
        self.followed = followed
        self._cluster = cluster
        self._patterns = patterns
        self._lock = threading.RLock()
        self._read_at = float("-inf")
        self._topics: dict[str, TopicNow] = {}
        self._names: list[TopicPartition] = []
        self._elsewhere: list[TopicIdPartition] = []
        self._told: set[int] = set()

    def cluster_id(self) -> str:
        return self._cluster.cluster_id()

    def refresh(self, *, within_s: float = FRESH_S) -> None:
        with self._lock:
            if time.monotonic() - self._read_at <= within_s:
                return
            self._follow()
            tiered = self.followed.partitions()
            wanted = matching(self._patterns, (one.partition.topic for one in tiered))
            self._topics = dict(self._cluster.topics(wanted))
            ours = [one.partition for one in tiered if one.partition.topic in set(wanted)]
            now = {topic: found.topic_id for topic, found in self._topics.items()}
            self._names = sorted(one.name for one in ours if now.get(one.topic) == one.topic_id)
            self._elsewhere = [one for one in ours if now.get(one.topic) != one.topic_id]
            self._read_at = time.monotonic()

    def names(self) -> list[TopicPartition]:
        with self._lock:
            self._be_read()
            return list(self._names)

    def topic_ids(self) -> Mapping[str, str]:
        with self._lock:
            self._be_read()
            return {topic: uuid_text(found.topic_id) for topic, found in self._topics.items()}

    def topic(self, name: str) -> TopicNow:
        with self._lock:
            self._be_read()
            return self._topics[name]

    def folded(self, name: TopicPartition) -> FoldedPartition:
        with self._lock:
            self._be_read()
            if name not in self._names:
                raise _unknown(name)
            found = self.followed.partition(self._topics[name.topic].topic_id, name.partition)
        if found is None:
            raise _unknown(name)
        return found

    def incomplete(self) -> bool:
        with self._lock:
            self._be_read()
            return any(reached.missing or reached.stopped for reached in self.followed.reached().values())

    def elsewhere(self) -> list[TopicIdPartition]:
        with self._lock:
            self._be_read()
            return list(self._elsewhere)

    def _be_read(self) -> None:
        if self._read_at == float("-inf"):
            self.refresh()

    def _follow(self) -> None:
        """To the end that the topic had when this began."""
        while True:
            progress = self.followed.catch_up(CATCH_UP_S)
            if not any(left > 0 for left in progress.behind.values()):
                break
            if not progress.records:
                raise Unavailable(f"{self.where} is not read to its end within {CATCH_UP_S:g} s", hint="Try again")
        for number, reached in self.followed.reached().items():
            if reached.missing and number not in self._told:
                self._told.add(number)
                said = "%s has lost what was before offset %d of its partition %d: segments may be missing"
                _log.warning(said, self.where, reached.missing, number)


@dataclass(frozen=True)
class EffectiveView:
    """What a partition's readers find, and the lineage that it was found by."""

    links: tuple[Link, ...]
    lineage: tuple[EpochEntry, ...]


def effective(cache: RemoteLogMetadataCache, name: TopicPartition) -> EffectiveView:
    """By the lineage that the tier tells. Raises BadData where that cannot be."""
    lineage = told_lineage(cache)
    links = tuple(chain(cache, lineage))
    if any(link.segment.size_bytes < 0 for link in links):
        raise BadData(f"{name}: metadata has a segment of a negative size")
    return EffectiveView(links, lineage)


def _unknown(name: TopicPartition) -> UsageError:
    return UsageError(f"the tier holds no partition {name}", hint="`topics` lists what it holds")
