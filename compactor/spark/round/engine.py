"""Engine for ``map_engine = "spark"``. Spark is started when the first round needs it and stopped when the process ends."""

from __future__ import annotations

import atexit
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from compactor.access.tier import Tier
from compactor.model.ids import TopicPartition
from compactor.round.engines import RemoteEngine
from compactor.spark.cluster.versions import require_supported_java, require_supported_pyspark

if TYPE_CHECKING:
    from compactor.spark.cluster.jobs import SparkCluster


class SparkEngineFactory:
    """Factory of Spark engines for rounds, which share one Spark application per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked = False
        self._cluster: SparkCluster | None = None
        self._stack = ExitStack()

    def __call__(self, tier: Tier, partition: TopicPartition) -> RemoteEngine | None:
        """Return the Spark engine if the partition's settings ask for it, else None. Raises UsageError if Java or PySpark is missing or
        not supported.
        """
        cleaner = tier.cleaner_settings_for_topic(partition.topic)
        if cleaner.map_engine != "spark":
            return None
        with self._lock:
            if not self._checked:
                require_supported_pyspark()
                require_supported_java()
                self._checked = True
        from compactor.spark.round.worker import SparkRoundWorker

        return RemoteEngine("spark", lambda stats: SparkRoundWorker(lambda: self.get_or_start_cluster(tier), tier, cleaner, stats))

    def get_or_start_cluster(self, tier: Tier) -> SparkCluster:
        """Return the cluster, starting Spark on the first call. Raises UsageError if Spark does not start."""
        from compactor.spark.cluster.session import start_cluster

        with self._lock:
            if self._cluster is None:
                atexit.register(self._stack.close)
                self._cluster = self._stack.enter_context(start_cluster(tier.settings)).cluster
            return self._cluster
