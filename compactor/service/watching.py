"""The partitions' logs as the daemon keeps them: folded states of those that were at work lately, slots of all."""

from __future__ import annotations

import threading
from collections import OrderedDict

from compactor.metadata.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.pipeline.logs import PartitionLog
from compactor.pipeline.tier import Tier
from compactor.service.jobs import look
from compactor.service.scheduling import Sight

KEPT_SEGMENTS = 20_000
"""Folded states are kept up to so many live segments together (about 5 kB each); the rest are folded again when they change."""


class Watching:
    """Different partitions may be looked at by different threads, one partition by one thread at a time."""

    def __init__(self, opened: Tier, kept_segments: int = KEPT_SEGMENTS) -> None:
        self._opened = opened
        self._limit = kept_segments
        self._logs: dict[TopicPartition, PartitionLog] = {}
        self._kept: OrderedDict[TopicPartition, int] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, name: TopicPartition, seen: Sight | None, now_ms: int) -> Sight:
        """A fresh sight; two requests where nothing was written since ``seen``. Raises StoreError, BadControlRecord."""
        log = self._log(name)
        kept = name in self._kept
        changed = seen is None or log.poll()
        if not changed and not kept and seen is not None and now_ms < seen.wake_ms:
            return seen
        if seen is None or (changed and kept):
            log.refresh()
        elif not kept:
            log.reload()
        if changed or not kept:
            self._keep(name, log)
        return look(self._opened, log, now_ms)

    def take(self, name: TopicPartition, state: PartitionState) -> None:
        """Goes on from the state that a job has folded."""
        log = self._log(name)
        log.load(state)
        self._keep(name, log)

    def state(self, name: TopicPartition) -> PartitionState | None:
        """The state as last folded; None where it is not kept."""
        return self._log(name).state if name in self._kept else None

    def _keep(self, name: TopicPartition, log: PartitionLog) -> None:
        """Forgets those that were not needed for longest."""
        with self._lock:
            self._kept[name] = len(log.state.live)
            self._kept.move_to_end(name)
            while sum(self._kept.values()) > self._limit and len(self._kept) > 1:
                oldest, _ = self._kept.popitem(last=False)
                self._forget(self._log(oldest))

    def _forget(self, log: PartitionLog) -> None:
        # The slot is enough to ask whether anything is new; ``reload`` folds again where it is.
        log.load(PartitionState(topic=log.state.topic, partition=log.state.partition, slot=log.state.slot))

    def _log(self, name: TopicPartition) -> PartitionLog:
        return self._logs.setdefault(name, self._opened.open(name))
