"""Full re-compaction: partitions from the log's start, whatever the checkpoint says, as Spark jobs.

Small partitions go in waves, one job each wave; a large one is spread over the whole cluster. Each partition is published by itself, so
that nothing finished is lost; a run that was killed is taken up where it was. Who leads, and who is fenced, is as everywhere else.

As a script it is `tiered-compactor recompact` for spark-submit: docs/spark.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from compactor.bootstrap import Tier
from compactor.config import Cleaner
from compactor.control.state import PartitionState
from compactor.errors import CompactorError
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import Assessment, assess
from compactor.round.ports import WorkStats

if TYPE_CHECKING:
    from compactor.round.compaction import RoundReport
    from compactor.round.engines import Engine
    from compactor.spark.cluster.executor import Cost
    from compactor.spark.cluster.jobs import Cluster, JobWatch

WAVE: Final = 64
"""Partitions led at a time: each has a lease to keep alive."""

LOOKERS: Final = 16
SMALL_BYTES: Final = 32 << 20
"""Below this a partition is not worth being spread out."""

KEY_BYTES: Final = 20


@dataclass(frozen=True)
class Finished:
    """What became of one partition: a report (also of quarantine), or the error that left it as it was."""

    name: TopicPartition
    report: RoundReport | None
    error: CompactorError | None
    seconds: float


@dataclass(frozen=True)
class Listener:
    """``watch``: of the work on the cluster; ``on_done``: a partition is done with. Called from several threads."""

    watch: JobWatch
    on_done: Callable[[Finished], None]


def whole_log(state: PartitionState, cleaner: Cleaner, now_ms: int) -> Assessment[RemoteLogSegmentMetadata]:
    """Everything below the end that an ordinary round would have now is dirty; the cleaner offset never goes back for it."""
    found = assess(state, cleaner, now_ms, force=True)
    return replace(
        found, due=bool(found.segments), reason="full re-compaction", first_dirty=state.start_offset, dirty_ratio=1.0,
        dirty=found.segments, clean=(),
    )  # fmt: skip


def recompact(tier: Tier, cluster: Cluster, names: Sequence[TopicPartition], now_ms: int, cost: Cost, listener: Listener) -> list[Finished]:
    """One full round over each of these partitions, in their order. Every error is one partition's."""
    job = _Job(tier, cluster, now_ms, cost, listener)
    states = job.looks(names)
    total = sum(state.bytes for state in states.values())
    large = [name for name in states if job.is_large(states[name], total)]
    for name in large:
        job.finish(name, job.spread_out)
    small = [name for name in states if name not in large]
    small.sort(key=lambda name: -states[name].bytes)
    for begin in range(0, len(small), WAVE):
        job.wave(small[begin : begin + WAVE])
    return [job.finished[name] for name in names]


class _Job:
    def __init__(self, tier: Tier, cluster: Cluster, now_ms: int, cost: Cost, listener: Listener) -> None:
        self._tier = tier
        self._cluster = cluster
        self._now_ms = now_ms
        self._cost = cost
        self._listener = listener
        self._lock = threading.Lock()
        self.finished: dict[TopicPartition, Finished] = {}

    def looks(self, names: Sequence[TopicPartition]) -> dict[TopicPartition, PartitionState]:
        """The partitions that can be read; the others are finished."""

        def look(name: TopicPartition) -> PartitionState | CompactorError:
            try:
                return self._tier.open(name).refresh()
            except CompactorError as error:
                return error

        found = {}
        with ThreadPoolExecutor(LOOKERS, "look") as pool:
            for name, state in zip(names, pool.map(look, names), strict=True):
                if isinstance(state, PartitionState):
                    found[name] = state
                else:
                    self._done(Finished(name, None, state, 0.0))
        return found

    def is_large(self, state: PartitionState, total: int) -> bool:
        """Whether it would be the last one at work for long, or is too much for one executor. ``map_engine`` decides where it is set."""
        cleaner = self._tier.cleaner_for(state.topic)
        if cleaner.map_engine != "auto":
            return cleaner.map_engine == "spark"
        if sum(segment.records for segment in state.live) * KEY_BYTES > cleaner.map_budget_bytes // self._cluster.slots_per_executor:
            return True
        return self._cluster.slots > 1 and state.bytes > max(SMALL_BYTES, total // self._cluster.slots)

    def finish(self, name: TopicPartition, rounds: Callable[[TopicPartition], RoundReport]) -> None:
        begin = time.monotonic()
        report, problem = None, None
        try:
            report = rounds(name)
        except CompactorError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - a bug of ours in one partition is no reason to lose the others (I9)
            problem = CompactorError(f"a bug: {type(error).__name__}: {error}")
        self._done(Finished(name, report, problem, time.monotonic() - begin))

    def spread_out(self, name: TopicPartition) -> RoundReport:
        from compactor.round.engines import Engine
        from compactor.spark.round.worker import SparkWorker

        cleaner = self._tier.cleaner_for(name.topic)

        def worker_of(stats: WorkStats) -> SparkWorker:
            return SparkWorker(self._cluster, self._tier, cleaner, stats, self._cost, self._listener.watch)

        return self._rounds(name, Engine("spark", worker_of))

    def wave(self, names: Sequence[TopicPartition]) -> None:
        """These partitions together. The driver's threads wait most of the time."""
        from compactor.round.engines import Engine
        from compactor.spark.round.wave import Wave

        wave = Wave(self._cluster, self._tier, len(names), self._cost, self._listener.watch)

        def rounds(name: TopicPartition) -> RoundReport:
            cleaner = self._tier.cleaner_for(name.topic)
            engine = "partitioned" if cleaner.map_engine == "partitioned" else "memory"
            return self._rounds(name, Engine(engine, lambda stats: wave.worker(cleaner, stats)))

        def participate(name: TopicPartition) -> None:
            try:
                self.finish(name, rounds)
            finally:
                wave.leave()

        with ThreadPoolExecutor(len(names), "partition") as pool:
            for name in names:
                pool.submit(participate, name)
            wave.run()

    def _rounds(self, name: TopicPartition, engine: Engine) -> RoundReport:
        """One round over the whole log, after what a crash may have left open of another range."""
        cleaner = self._tier.cleaner_for(name.topic)
        share = cleaner.disk_budget_bytes
        disk = Budget(share // self._cluster.slots_per_executor) if isinstance(share, int) else Budget(3 * cleaner.segment_bytes)
        while True:
            log = self._tier.open(name)
            report = self._tier.round(name, self._now_ms, engine=engine, assess_with=whole_log, disk=disk).run(log)
            if report.status in ("cleaned", "resumed"):
                with self._lock:
                    self._tier.note_change(log)
            if report.status != "resumed" or report.first_dirty_offset <= log.state.start_offset:
                return report

    def _done(self, finished: Finished) -> None:
        with self._lock:
            self.finished[finished.name] = finished
            self._listener.on_done(finished)


if __name__ == "__main__":
    import runpy
    import sys

    # spark-submit puts the script's own folder first, where our modules have no business to be found by their short names.
    sys.path.pop(0)
    sys.argv[1:1] = ["recompact"]
    runpy.run_module("compactor", run_name="__main__")
