"""Which partitions there are and which of them have something new: how the daemon knows where to look without asking each of them.

A tier of this program's own says it in the tier-wide log (hints). Of one that brokers write the one reader of their metadata topic knows
it for all partitions at once; topics whose settings do not allow compaction are suspended until they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from compactor.bootstrap import Tier
from compactor.control.pauses import pause_of
from compactor.control.state import CatalogState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.tier.brokers import BrokersMetadata, Standing
from compactor.tier.conditions import topic_problem

INBOX_MS = 60_000
"""So often hints are taken in that found no slot in the tier-wide log: a LIST."""
WISH_MS = 600_000
POLICY = 1 << 48
"""More than any offset: what local state keeps is never the number of later records under a policy that changed less often since."""


@dataclass(frozen=True)
class Heard:
    """``hints``: all partitions, each with a number; another one than before, and there is something new about it.

    ``anew``: partitions that are others than those of the same name before. ``suspended``: topic -> why no round is begun for it.
    ``paused``: partition -> who does not want rounds to be begun, ``wanted``: who wants one now, and in which slot it was said.
    """

    hints: Mapping[TopicPartition, int]
    anew: frozenset[TopicPartition] = frozenset()
    suspended: Mapping[str, str] = field(default_factory=dict)
    paused: Mapping[TopicPartition, str] = field(default_factory=dict)
    wanted: Mapping[TopicPartition, int] = field(default_factory=dict)


class Hearing(Protocol):
    def listen(self, opened: Tier) -> Heard | None:
        """None: nothing has changed. Raises StoreError, UsageError."""


class CatalogHints:
    """A tier of this program's own."""

    def __init__(self) -> None:
        self._heard = False
        self._inbox_ms = 0

    def listen(self, opened: Tier) -> Heard | None:
        now = opened.ports.clock_ms()
        taken = 0
        if self._heard and now - self._inbox_ms >= INBOX_MS:
            self._inbox_ms = now
            taken = opened.take_in_inbox()
        if self._heard and not taken and not opened.catalog.poll():
            return None
        state = opened.identity()
        hints = {TopicPartition.parse(text): slot for text, slot in state.partitions.items()}
        self._heard = True
        return Heard(hints, paused=paused_in(state, hints), wanted=wanted_in(state, now))


def paused_in(state: CatalogState, names: Iterable[TopicPartition]) -> dict[TopicPartition, str]:
    """Those over which somebody has paused rounds, and why."""
    if not state.paused:
        return {}
    return {name: why for name in names if (why := pause_of(state, name))}


def wanted_in(state: CatalogState, now_ms: int) -> dict[TopicPartition, int]:
    """Those for which a round was asked for lately: an old wish is not fulfilled by a process that has just begun."""
    wishes = state.wanted.items()
    return {TopicPartition.parse(text): wish.slot for text, wish in wishes if now_ms - wish.at_ms < WISH_MS}


class MetadataHints:
    """A tier that brokers write. A hint is the offset of the last record about the partition, POLICY more for each change of policy."""

    def __init__(self, brokers: BrokersMetadata) -> None:
        self._brokers = brokers
        self._standings: Mapping[TopicPartition, Standing] = {}
        self._chosen: dict[str, Mapping[str, str]] = {}
        self._policies: dict[str, int] = {}

    def listen(self, opened: Tier) -> Heard | None:
        if not self._standings or opened.catalog.poll():
            opened.identity()
        brokers = self._brokers
        brokers.refresh(within_s=0.0)
        before, self._standings = self._standings, brokers.standings()
        suspended = {}
        wrong = brokers.problem()
        for topic in {name.topic for name in self._standings}:
            try:
                now = brokers.topic(topic)
            except UsageError:
                continue  # it has just been deleted
            if why := wrong or topic_problem(topic, now.settings):
                suspended[topic] = why
            if self._chosen.setdefault(topic, now.chosen) != now.chosen:
                self._chosen[topic] = now.chosen
                self._policies[topic] = self._policies.get(topic, 0) + 1
        anew = {name for name, one in self._standings.items() if name in before and before[name].topic_id != one.topic_id}
        hints = {name: self._hint(name, one) for name, one in self._standings.items()}
        state = opened.catalog.state
        wanted = wanted_in(state, opened.ports.clock_ms())
        return Heard(hints, frozenset(anew), suspended, paused_in(state, hints), wanted)

    def _hint(self, name: TopicPartition, standing: Standing) -> int:
        return standing.applied + self._policies.get(name.topic, 0) * POLICY


def hearing_of(opened: Tier) -> Hearing:
    return CatalogHints() if opened.brokers is None else MetadataHints(opened.brokers)
