"""Engine for ``map_engine = "spark"``. Spark is started when the first round needs it and stopped when the process ends."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compactor.access.tier import Tier
from compactor.control.state import PartitionState
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.round.engines import DraftAt, Engine
from compactor.round.plan import RoundFacts
from compactor.round.ports import LeadershipCheck, WorkSession, WorkStats
from compactor.round.skip import CleanVerdicts
from compactor.spark.cluster.versions import check_java, check_pyspark

if TYPE_CHECKING:
    from compactor.spark.cluster.jobs import Cluster
    from compactor.spark.round.worker import SparkWorker


class SparkEngines:
    """Factory of engines that share one Spark application per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked = False
        self._cluster: Cluster | None = None
        self._stack = ExitStack()

    def __call__(self, tier: Tier, name: TopicPartition) -> Engine | None:
        """Return the Spark engine if the partition's settings ask for it, else None. Raises UsageError if Java or PySpark is missing or
        not supported.
        """
        if tier.cleaner_for(name.topic).map_engine != "spark":
            return None
        with self._lock:
            if not self._checked:
                check_pyspark()
                check_java()
                self._checked = True
        return Engine("spark", lambda stats: _LazySparkWorker(self, tier, name, stats))

    def start_cluster(self, tier: Tier) -> Cluster:
        """Return the cluster, starting Spark on the first call. Raises UsageError if Spark does not start."""
        from compactor.spark.cluster.session import start_cluster

        with self._lock:
            if self._cluster is None:
                atexit.register(self._stack.close)
                self._cluster = self._stack.enter_context(start_cluster(tier.settings)).cluster
            return self._cluster


@dataclass
class _LazySparkWorker:
    """RemoteWorker (round.engines) that creates a SparkWorker when there is work for it."""

    engines: SparkEngines
    tier: Tier
    name: TopicPartition
    stats: WorkStats
    _started: SparkWorker | None = field(default=None, init=False)

    def plan_time_ms(self, state: PartitionState, now_ms: int, draft_at: DraftAt) -> int:
        """Return the start time of an interrupted pass 1 whose results can be reused, or ``now_ms``. Does not start Spark."""
        from compactor.spark.round.leftover_bundles import resumed_time_ms

        return resumed_time_ms(self.tier.ports.control, self.tier.open(self.name), state.live, now_ms, draft_at)

    def check_clean_segments(self, facts: RoundFacts, check: LeadershipCheck) -> CleanVerdicts:
        """Return which clean segments the plan can skip."""
        return self._start_worker().check_clean_segments(facts, check)

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        """Run the tasks of an announced plan."""
        return self._start_worker()(plan, tasks, session)

    def delete_unused_results(self) -> None:
        """Delete results that no plan used."""
        if self._started is not None:
            self._started.delete_unused_results()

    def _start_worker(self) -> SparkWorker:
        """Return the SparkWorker, starting Spark if necessary."""
        from compactor.spark.round.worker import SparkWorker

        if self._started is None:
            cleaner = self.tier.cleaner_for(self.name.topic)
            self._started = SparkWorker(self.engines.start_cluster(self.tier), self.tier, cleaner, self.stats)
        return self._started
