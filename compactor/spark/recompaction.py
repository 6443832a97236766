"""Full re-compaction: partitions from the log's start, whatever the checkpoint says, as Spark jobs.

Small partitions share jobs, a large one is spread over the whole cluster, and both go on at a time: a window of partitions is led, and
whenever one is done with the next comes in. Each is published by itself, so that nothing finished is lost; a run that was killed is taken
up where it was. Who leads, and who is fenced, is as everywhere else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from compactor.bootstrap import Tier
from compactor.config import Cleaner
from compactor.control.logs import PartitionLog, note_partitions
from compactor.control.state import PartitionState
from compactor.errors import CompactorError, Fenced, Leased
from compactor.local.budget import Budget
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import Assessment, assess
from compactor.round.ports import WorkStats
from compactor.spark.benefit import left_alone

if TYPE_CHECKING:
    from compactor.round.compaction import RoundReport
    from compactor.round.engines import Engine
    from compactor.spark.cluster.executor import Cost
    from compactor.spark.cluster.jobs import Cluster, JobWatch
    from compactor.spark.round.flow import Flow

LED_PER_SLOT: Final = 4
LED: Final = (16, 256)
"""Partitions led at a time, at least and at most: each has a lease to keep alive, and its thread waits most of the time."""

LOOKERS: Final = 16
SMALL_BYTES: Final = 32 << 20
"""Below this a partition is not worth being spread out."""

KEY_BYTES: Final = 20
KEPT_LOGS: Final = 5_000
"""Of so many partitions the folded logs are kept from the first look on; of more they are folded again, when it is their turn."""

TOLD_TOGETHER: Final = 64
"""Partitions whose change other processes are told in one record."""


@dataclass(frozen=True)
class Finished:
    """What became of one partition: a report (also of quarantine), the error that left it as it was, or why it was left alone.

    ``segments``, ``bytes_before``: what it had when it was looked at.
    """

    name: TopicPartition
    report: RoundReport | None
    error: CompactorError | None
    seconds: float
    left: str = ""
    segments: int = 0
    bytes_before: int = 0


def row_of(finished: Finished) -> dict[str, Any]:
    """What became of a partition, as JSON and data frames have it: our names, and those of Iceberg's ``rewrite_data_files``."""
    report, error = finished.report, finished.error
    row: dict[str, Any] = {"topic": finished.name.topic, "partition": finished.name.partition}
    if report is not None:
        row = asdict(report)
    elif error is not None:
        row |= {
            "status": "leased" if isinstance(error, Leased) else "fenced" if isinstance(error, Fenced) else "failed",
            "reason": error.message,
        }
    else:
        row |= {"status": "left_alone", "reason": finished.left}
    done = report is not None and report.segments_out > 0
    failed = error is not None or (report is not None and report.status == "quarantined")
    return row | {
        "seconds": round(finished.seconds, 3),
        "rewritten_data_files_count": report.segments_in - report.segments_skipped if report is not None and done else 0,
        "added_data_files_count": report.segments_out if report is not None else 0,
        "rewritten_bytes_count": finished.bytes_before if done else 0,
        "failed_data_files_count": finished.segments if failed else 0,
    }


@dataclass(frozen=True)
class Listener:
    """``watch``: of the work on the cluster; ``on_done``: a partition is done with. Called from several threads."""

    watch: JobWatch
    on_done: Callable[[Finished], None]


@dataclass(frozen=True)
class Look:
    """A partition before the work begins. ``left``: why it is left alone; ``log``: as it was folded, where that is kept."""

    name: TopicPartition
    bytes: int = 0
    records: int = 0
    segments: int = 0
    left: str = ""
    error: CompactorError | None = None
    log: PartitionLog | None = None


def whole_log(state: PartitionState, cleaner: Cleaner, now_ms: int) -> Assessment[RemoteLogSegmentMetadata]:
    """Everything below the end that an ordinary round would have now is dirty; the cleaner offset never goes back for it."""
    found = assess(state, cleaner, now_ms, force=True)
    return replace(
        found, due=bool(found.segments), reason="full re-compaction", first_dirty=state.start_offset, dirty_ratio=1.0,
        dirty=found.segments, clean=(),
    )  # fmt: skip


def looks(tier: Tier, names: Sequence[TopicPartition], now_ms: int, min_benefit: int) -> list[Look]:
    """What is there to be done; changes nothing. ``min_benefit``: in bytes; 0: every partition is worth it."""
    keeps = len(names) <= KEPT_LOGS and tier.brokers is None  # a round on a tier of brokers goes by the control log alone

    def look(name: TopicPartition) -> Look:
        try:
            log = tier.open(name)
            state = log.refresh()
            left = left_alone(tier, state, now_ms, min_benefit)
        except CompactorError as error:
            return Look(name, error=error)
        records = sum(segment.records for segment in state.live)
        return Look(name, state.bytes, records, len(state.live), left, log=log if keeps else None)

    with ThreadPoolExecutor(LOOKERS, "look") as pool:
        return list(pool.map(look, names))


def recompact(
    tier: Tier,
    cluster: Cluster,
    names: Sequence[TopicPartition],
    now_ms: int,
    cost: Cost,
    listener: Listener,
    min_benefit: int = 0,
) -> list[Finished]:
    """One full round over each of these partitions; what became of them, in their order. Every error is one partition's."""
    from compactor.spark.round.flow import Flow

    job = _Job(tier, cluster, now_ms, cost, listener)
    todo = job.begun(looks(tier, names, now_ms, min_benefit))
    total = sum(look.bytes for look in todo)
    large = [look for look in todo if job.is_large(look, total)]
    small = sorted((look for look in todo if look not in large), key=lambda look: -look.bytes)
    with ExitStack() as stack:
        flow = stack.enter_context(Flow(cluster, tier, cost, listener.watch))
        spread = stack.enter_context(ThreadPoolExecutor(tier.settings.spark.large_at_once, "large"))
        pool = stack.enter_context(ThreadPoolExecutor(job.led(), "partition"))
        try:
            futures = [spread.submit(job.finish, look, job.spread_out) for look in large]
            futures += [pool.submit(job.finish, look, partial(job.together, flow)) for look in small]
            for future in futures:
                future.result()
        except BaseException:
            cluster.break_off()
            for workers in (spread, pool):
                workers.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            job.tell_others()
    return [job.finished[name] for name in names]


class _Job:
    def __init__(self, tier: Tier, cluster: Cluster, now_ms: int, cost: Cost, listener: Listener) -> None:
        self._tier = tier
        self._cluster = cluster
        self._now_ms = now_ms
        self._cost = cost
        self._listener = listener
        self._lock = threading.Lock()
        self._changed: list[PartitionLog] = []
        self.finished: dict[TopicPartition, Finished] = {}

    def begun(self, found: Sequence[Look]) -> list[Look]:
        """What is to be done; the others are finished."""
        for look in found:
            if look.error is not None or look.left:
                self._done(Finished(look.name, None, look.error, 0.0, look.left, look.segments, look.bytes))
        return [look for look in found if look.error is None and not look.left]

    def led(self) -> int:
        return self._tier.settings.spark.led_at_once or min(max(LED[0], self._cluster.slots * LED_PER_SLOT), LED[1])

    def is_large(self, look: Look, total: int) -> bool:
        """Whether it would be the last one at work for long, or is too much for one executor. ``map_engine`` decides where it is set."""
        cleaner = self._tier.cleaner_for(look.name.topic)
        if cleaner.map_engine != "auto":
            return cleaner.map_engine == "spark"
        if look.records * KEY_BYTES > cleaner.map_budget_bytes // self._cluster.slots_per_executor:
            return True
        return self._cluster.slots > 1 and look.bytes > max(SMALL_BYTES, total // self._cluster.slots)

    def finish(self, look: Look, rounds: Callable[[Look], RoundReport]) -> None:
        begin = time.monotonic()
        report, problem = None, None
        try:
            report = rounds(look)
        except CompactorError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - a bug of ours in one partition is no reason to lose the others (I9)
            problem = CompactorError(f"a bug: {type(error).__name__}: {error}")
        self._done(Finished(look.name, report, problem, time.monotonic() - begin, "", look.segments, look.bytes))

    def spread_out(self, look: Look) -> RoundReport:
        from compactor.round.engines import Engine
        from compactor.spark.round.worker import SparkWorker

        cleaner = self._tier.cleaner_for(look.name.topic)

        def worker_of(stats: WorkStats) -> SparkWorker:
            return SparkWorker(self._cluster, self._tier, cleaner, stats, self._cost, self._listener.watch)

        return self._rounds(look, Engine("spark", worker_of))

    def together(self, flow: Flow, look: Look) -> RoundReport:
        """In a job with others."""
        from compactor.round.engines import Engine

        cleaner = self._tier.cleaner_for(look.name.topic)
        engine = "partitioned" if cleaner.map_engine == "partitioned" else "memory"
        return self._rounds(look, Engine(engine, lambda stats: flow.worker(cleaner, stats)))

    def tell_others(self, at_least: int = 1) -> None:
        """Other processes hear of what has changed: of many partitions in one record."""
        with self._lock:
            if len(self._changed) < at_least:
                return
            changed, self._changed = self._changed, []
            if self._tier.brokers is None:
                note_partitions(self._tier.catalog, {log.state.name: log.reached() for log in changed})
            else:
                self._tier.note_slots(changed)

    def _rounds(self, look: Look, engine: Engine) -> RoundReport:
        """One round over the whole log, after what a crash may have left open of another range."""
        cleaner = self._tier.cleaner_for(look.name.topic)
        share = cleaner.disk_budget_bytes
        disk = Budget(share // self._cluster.slots_per_executor) if isinstance(share, int) else Budget(3 * cleaner.segment_bytes)
        log = look.log
        while True:
            log = log or self._tier.open(look.name, leads=True)
            report = self._tier.round(look.name, self._now_ms, engine=engine, assess_with=whole_log, disk=disk).run(log)
            if report.status in ("cleaned", "resumed"):
                with self._lock:
                    self._changed.append(log)
                self.tell_others(TOLD_TOGETHER)
            if report.status != "resumed" or report.first_dirty_offset <= log.state.start_offset:
                return report
            log = None

    def _done(self, finished: Finished) -> None:
        with self._lock:
            self.finished[finished.name] = finished
            self._listener.on_done(finished)
