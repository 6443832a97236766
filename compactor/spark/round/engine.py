"""``map_engine = "spark"`` for whoever runs rounds: Spark is started when the first round has work for it, and ends with the process."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compactor.bootstrap import Tier
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.round.engines import DraftAt, Engine
from compactor.round.plan import RoundFacts
from compactor.round.ports import Check, WorkSession, WorkStats
from compactor.round.skip import CleanVerdicts
from compactor.spark.cluster.versions import check_java, check_pyspark

if TYPE_CHECKING:
    from compactor.spark.cluster.jobs import Cluster
    from compactor.spark.round.worker import SparkWorker


class SparkEngines:
    """One Spark application for all rounds of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked = False
        self._cluster: Cluster | None = None
        self._stack = ExitStack()

    def __call__(self, tier: Tier, name: TopicPartition) -> Engine | None:
        """The engine where the partition's settings ask for Spark. Raises UsageError where Spark cannot run on this machine."""
        if tier.cleaner_for(name.topic).map_engine != "spark":
            return None
        with self._lock:
            if not self._checked:
                check_pyspark()
                check_java()
                self._checked = True
        return Engine("spark", lambda stats: _Worker(self, tier, name, stats))

    def cluster(self, tier: Tier) -> Cluster:
        """Raises UsageError where Spark does not start."""
        from compactor.spark.cluster.session import cluster

        with self._lock:
            if self._cluster is None:
                atexit.register(self._stack.close)
                self._cluster = self._stack.enter_context(cluster(tier.settings)).cluster
            return self._cluster


@dataclass
class _Worker:
    """RemoteWorker (round.engines): a SparkWorker, once there is something to do."""

    engines: SparkEngines
    tier: Tier
    name: TopicPartition
    stats: WorkStats
    _started: SparkWorker | None = field(default=None, init=False)

    def begun_ms(self, state: PartitionState, now_ms: int, draft_at: DraftAt) -> int:
        from compactor.spark.round.leftovers import begun_ms

        return begun_ms(self.tier.ports.control, self.tier.open(self.name), state.live, now_ms, draft_at)

    def scout(self, facts: RoundFacts, check: Check) -> CleanVerdicts:
        return self._worker().scout(facts, check)

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        return self._worker()(plan, tasks, session)

    def close(self) -> None:
        if self._started is not None:
            self._started.close()

    def _worker(self) -> SparkWorker:
        from compactor.spark.round.worker import SparkWorker

        if self._started is None:
            cleaner = self.tier.cleaner_for(self.name.topic)
            self._started = SparkWorker(self.engines.cluster(self.tier), self.tier, cleaner, self.stats)
        return self._started
