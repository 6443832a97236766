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
from typing import NamedTuple, Protocol

from checkpoint.lineage import EpochEntry
from compactor.errors import BadData, Unavailable, UsageError
from compactor.metadata_topic.cache import RemoteLogMetadataCache
from compactor.metadata_topic.chain import Link, chain, one_chain, told_lineage
from compactor.metadata_topic.codec import TopicIdPartition, uuid_text
from compactor.metadata_topic.follow import FollowedTopic
from compactor.metadata_topic.kept import FoldedPartition, TieredPartition
from compactor.model.ids import TopicPartition

CATCH_UP_S = 30.0
FRESH_S = 1.0
"""A fold that is no older is not read on: one command asks about many partitions."""
TOPICS_FRESH_S = 15.0
"""What the cluster says of topics may be so old where a round over one of thousands of partitions asks: it is asked about all of them."""
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


class Standing(NamedTuple):
    """Tells whether anything was said of a partition since: its topic's id, and the offset of the last record about it."""

    topic_id: bytes
    applied: int


class ClusterNow(Protocol):
    """Asked when the fold was read on; raises Unavailable, Refused."""

    def cluster_id(self) -> str: ...

    def topics(self, names: Sequence[str]) -> Mapping[str, TopicNow]:
        """Those that exist, and that this user may describe."""

    def problem(self) -> str:
        """Why nothing may be compacted under these brokers, or nothing: versions, settings of the metadata topic."""


class BrokersMetadata(Protocol):
    """All methods raise Unavailable, Refused, UsageError; ``folded`` BadData where a record stops brokers, too."""

    @property
    def where(self) -> str:
        """Which source it is, for messages."""

    @property
    def taken_ms(self) -> int:
        """When it was taken, for a snapshot; -1 where it is read as it is now."""

    def cluster_id(self) -> str: ...

    def refresh(self, *, within_s: float = FRESH_S, topics_within_s: float | None = None) -> None:
        """Reads on, where the last look is older than that. ``topics_within_s``: what the cluster says of topics; None: the same."""

    def standings(self) -> Mapping[TopicPartition, Standing]:
        """Of all ``names``, as last read. Costs nothing for each of them."""

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

    def problem(self) -> str:
        """As ClusterNow, asked at most every TOPICS_FRESH_S."""


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
        self._read_at = self._asked_at = float("-inf")
        self._folds = -1
        self._tiered: set[str] | None = None
        self._wanted: list[str] = []
        self._topics: dict[str, TopicNow] = {}
        self._topic_ids: dict[str, str] = {}
        self._standings: dict[TopicPartition, Standing] = {}
        self._elsewhere: list[TopicIdPartition] = []
        self._told: set[int] = set()
        self._problem = ""
        self._problem_at = float("-inf")
        self._leaderless: frozenset[int] = frozenset()

    def cluster_id(self) -> str:
        return self._cluster.cluster_id()

    def refresh(self, *, within_s: float = FRESH_S, topics_within_s: float | None = None) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._read_at <= within_s:
                return
            self._follow()
            folds = self.followed.folds
            anew = now - self._asked_at > (within_s if topics_within_s is None else topics_within_s)
            if anew or folds != self._folds:
                tiered = self.followed.partitions()
                self._ask({one.partition.topic for one in tiered}, anew=anew)
                self._sort(tiered)
                self._folds = folds
            self._read_at = time.monotonic()

    def _ask(self, tiered: set[str], *, anew: bool) -> None:
        other = tiered != self._tiered
        if other or anew:
            wanted = matching(self._patterns, tiered) if other else self._wanted
            self._topics = dict(self._cluster.topics(wanted))
            self._topic_ids = {topic: uuid_text(found.topic_id) for topic, found in self._topics.items()}
            self._tiered, self._wanted, self._asked_at = tiered, wanted, time.monotonic()

    def _sort(self, tiered: Sequence[TieredPartition]) -> None:
        """Whose topic the cluster has under the same id, and whose it has not any more."""
        wanted = set(self._wanted)
        now = {topic: found.topic_id for topic, found in self._topics.items()}
        ours = [one for one in tiered if one.partition.topic in wanted]
        here = [one for one in ours if now.get(one.partition.topic) == one.partition.topic_id]
        self._standings = {one.partition.name: Standing(one.partition.topic_id, one.applied) for one in here}
        self._elsewhere = [one.partition for one in ours if now.get(one.partition.topic) != one.partition.topic_id]

    def names(self) -> list[TopicPartition]:
        return sorted(self.standings())

    def standings(self) -> Mapping[TopicPartition, Standing]:
        with self._lock:
            self._be_read()
            return self._standings

    def topic_ids(self) -> Mapping[str, str]:
        with self._lock:
            self._be_read()
            return self._topic_ids

    def topic(self, name: str) -> TopicNow:
        with self._lock:
            self._be_read()
            found = self._topics.get(name)
        if found is None:
            raise UsageError(f"the cluster has no topic {name} that topics under [kafka] names", hint="`topics` lists what the tier holds")
        return found

    def folded(self, name: TopicPartition) -> FoldedPartition:
        with self._lock:
            self._be_read()
            standing = self._standings.get(name)
            if standing is None:
                raise _unknown(name)
            found = self.followed.partition(standing.topic_id, name.partition)
        if found is None:
            raise _unknown(name)
        return found

    def incomplete(self) -> bool:
        with self._lock:
            self._be_read()
            holes = any(reached.missing or reached.stopped for reached in self.followed.reached().values())
            return holes or bool(self.followed.leaderless)

    def elsewhere(self) -> list[TopicIdPartition]:
        with self._lock:
            self._be_read()
            return list(self._elsewhere)

    def problem(self) -> str:
        with self._lock:
            if time.monotonic() - self._problem_at > TOPICS_FRESH_S or self._problem:
                self._problem, self._problem_at = self._cluster.problem(), time.monotonic()
            return self._problem

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
        leaderless = self.followed.leaderless
        for number in sorted(leaderless - self._leaderless):
            said = "partition %d of %s cannot be read, as no broker leads it: what it tells of is held up, the rest goes on"
            _log.warning(said, number, self.where)
        self._leaderless = leaderless
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
    links = tuple(one_chain(chain(cache, lineage), lineage))
    if any(link.segment.size_bytes < 0 for link in links):
        raise BadData(f"{name}: metadata has a segment of a negative size")
    return EffectiveView(links, lineage)


def _unknown(name: TopicPartition) -> UsageError:
    return UsageError(f"the tier holds no partition {name}", hint="`topics` lists what it holds")
