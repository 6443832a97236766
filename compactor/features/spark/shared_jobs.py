"""Shared Spark jobs that clean many small partitions.

A thread of the driver leads and publishes each partition; one task cleans several. If Spark aborts a job, for example because one partition
kills every executor, each unfinished partition is retried in a job of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import ClassVar, Final, Self

from compactor.access.tier import Tier
from compactor.config.settings import CleanerSettings
from compactor.control.state import PartitionState
from compactor.errors import CompactorError, bug_reason
from compactor.features.spark.jobs import (
    FENCING_CHECK_SECONDS,
    JobListener,
    SparkCluster,
    TaskOutcome,
    VersionMismatch,
    pack_bins,
    run_task,
)
from compactor.features.spark.rewrite import KeylessCountWork, PartitionCleaningWork, clean_partition, count_partition_keyless
from compactor.features.spark.worker import create_round_task_settings
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask, KeylessRecords, raise_if_keyless
from compactor.round.plan import PlanInputs, draft_plan
from compactor.round.ports import Costs, Session

GATHER_SECONDS: Final = 0.2
"""Time for which the first ready partition waits for others, because a job costs more than a small partition."""

MAX_SNAPSHOT_BYTES: Final = 64 << 10
"""Largest producer snapshot that is sent to the executor; the executor fetches a larger one itself."""

BINS_PER_SLOT: Final = 2
"""Bins per slot. More than one, because sizes in bytes only estimate the work."""


@dataclass(frozen=True)
class _QueuedPartition:
    item: PartitionCleaningWork | KeylessCountWork
    bytes: int
    answer: SimpleQueue[TaskOutcome] = field(default_factory=SimpleQueue)


class SharedJobs:
    """A context manager, which starts and ends its thread."""

    def __init__(self, cluster: SparkCluster, tier: Tier, cost: Costs, job_listener: JobListener) -> None:
        self.cluster = cluster
        self.tier = tier
        self._over = False
        self._cost = cost
        self._job_listener = job_listener
        self._changed = threading.Condition()
        self._waiting: list[_QueuedPartition] = []
        self._running = 0
        self._starter = threading.Thread(target=self._start_jobs_until_closed, name="flow", daemon=True)

    def submit_partition(self, partition: _QueuedPartition) -> None:
        with self._changed:
            self._waiting.append(partition)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._starter.join()

    def _start_jobs_until_closed(self) -> None:
        jobs: list[threading.Thread] = []
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or (self._waiting and self._has_free_task_slot()), timeout=FENCING_CHECK_SECONDS)
                if self._over:
                    break
                if not self._waiting or not self._has_free_task_slot():
                    continue  # slots may have come meanwhile
                self._changed.wait_for(lambda: self._over or len(self._waiting) >= self.cluster.task_slots, timeout=GATHER_SECONDS)
                tickets, self._waiting = self._waiting, []
                bins = pack_bins([ticket.bytes for ticket in tickets], self.cluster.task_slots * BINS_PER_SLOT)
                self._running += len(bins)
            jobs = [job for job in jobs if job.is_alive()]
            jobs.append(threading.Thread(target=self._run_job_or_retry, args=(tickets, bins), name="flow-job", daemon=True))
            jobs[-1].start()
        for job in jobs:
            job.join()

    def _has_free_task_slot(self) -> bool:
        return self._running < self.cluster.task_slots

    def _release_task_slots(self, task_count: int) -> None:
        with self._changed:
            self._running -= task_count
            self._changed.notify_all()

    def _run_job_or_retry(self, partitions: list[_QueuedPartition], bins: list[list[int]]) -> None:
        """If the job fails, each partition without an outcome is retried alone."""
        done: set[int] = set()
        left = len(bins)
        try:
            for _ in self._run_partition_bins(f"{len(partitions)} partitions in {len(bins)} tasks", partitions, bins, done):
                left -= 1
                self._release_task_slots(1)
        except Exception:  # noqa: BLE001 - met again below, by whoever is the cause of it
            for number, ticket in enumerate(partitions):
                if number not in done:
                    self._retry_partition_alone(partitions, number, ticket)
        finally:
            self._release_task_slots(left)

    def _retry_partition_alone(self, partitions: list[_QueuedPartition], index: int, partition: _QueuedPartition) -> None:
        try:
            deque(
                self._run_partition_bins(
                    f"{partition.item.shared.partition}: by itself, after its job was given up", partitions, [[index]], set()
                ),
                maxlen=0,
            )
        except CompactorError as error:
            partition.answer.put(TaskOutcome(index, None, error, Costs()))
        except Exception as error:  # noqa: BLE001 - somebody waits for this answer
            partition.answer.put(TaskOutcome(index, None, CompactorError(bug_reason(error)), Costs()))

    def _run_partition_bins(
        self, description: str, partitions: list[_QueuedPartition], bins: list[list[int]], done_indexes: set[int]
    ) -> Iterator[None]:
        """One task per bin (indexes in ``partitions``). Yield at the end of each task."""
        items = [[(number, partitions[number].item) for number in members] for members in bins]
        for outcome in self.cluster.run_job(
            description, self.cluster.rdd_of_items(items), clean_partition_bin, len(items), job_listener=self._job_listener
        ):
            if outcome.error is not None:
                raise outcome.error
            for partition in outcome.value:
                done_indexes.add(partition.index)
                self._cost.add(partition.cost)
                partitions[partition.index].answer.put(partition)
            yield


PartitionWork = PartitionCleaningWork | KeylessCountWork


def clean_partition_bin(bin_number: int, items: Sequence[tuple[int, PartitionWork]], cost: Costs) -> list[TaskOutcome]:
    return [run_task(number, partial(_work_on_partition, item), item.shared.plan) for number, item in items]


def _work_on_partition(item: PartitionWork, cost: Costs) -> list[CompactionReceipt | CompactionFailure] | KeylessRecords:
    if isinstance(item, KeylessCountWork):
        return count_partition_keyless(item, cost)
    return clean_partition(item, cost)


@dataclass
class SharedRunner:
    """Runner (``round.compaction``) of one small partition."""

    jobs: SharedJobs
    cleaner: CleanerSettings
    map_engine: str
    announces_segments: ClassVar[bool] = False
    _snapshot: bytes = field(default=b"", init=False)

    def plan_time_ms(self, state: PartitionState, now_ms: int, draft_at: Callable[[int], CompactionPlan | None]) -> int:
        return now_ms

    def require_fits(self, plan: CompactionPlan, state: PartitionState) -> None:
        """The executor asks for it when it rewrites."""

    @contextmanager
    def scan(self, facts: PlanInputs, session: Session) -> Iterator[PlanInputs]:
        """No segment is skipped, because the executor reads the whole partition.

        If records without a key are refused, an executor counts them first, since there must be no plan if there are any.
        """
        # A small producer snapshot, read for the plan already, is sent to the executor with the tasks.
        self._snapshot = facts.snapshot if len(facts.snapshot) <= MAX_SNAPSHOT_BYTES else b""
        state, plan, dirty = facts.state, draft_plan(facts), facts.assessment.dirty
        if plan.policy.keyless_records == "refuse" and dirty:
            shared = create_round_task_settings(self.jobs.cluster, self.jobs.tier, self.cleaner, plan, "", state)
            ticket = _QueuedPartition(KeylessCountWork(shared, state.live), sum(segment.size_bytes for segment in dirty))
            self.jobs.submit_partition(ticket)
            outcome = self._wait_for_outcome(ticket, session.check)
            if outcome.error is not None and not isinstance(outcome.error, VersionMismatch):  # the round meets that one again
                raise outcome.error
            if outcome.error is None:
                raise_if_keyless(state.topic, outcome.value)
        yield facts

    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, *, is_resumed: bool
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        jobs, live = self.jobs, session.state.live
        shared = create_round_task_settings(jobs.cluster, jobs.tier, self.cleaner, plan, session.scratch_object_key(""), session.state)
        ticket = _QueuedPartition(
            PartitionCleaningWork(shared, tuple(tasks), live, self._snapshot), sum(segment.size_bytes for segment in live)
        )
        jobs.submit_partition(ticket)
        outcome = self._wait_for_outcome(ticket, partial(session.check, caller_only_waits=True))
        session.run.costs.add(outcome.cost)
        if isinstance(outcome.error, VersionMismatch):
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=outcome.error.message)
        elif outcome.error is not None:
            raise outcome.error
        else:
            yield from outcome.value

    def _wait_for_outcome(self, partition: _QueuedPartition, check: Callable[[], object]) -> TaskOutcome:
        while True:
            try:
                return partition.answer.get(timeout=FENCING_CHECK_SECONDS)
            except Empty:
                self.jobs.cluster.require_not_cancelled()
                check()
