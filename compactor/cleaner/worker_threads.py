"""Worker threads for chunks: several work in parallel, and results are returned in order. Kernels and codecs release the GIL."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from compactor.records.codecs import GrowingByteBuffer
from compactor.records.encode import EncodedBatchBuffer
from compactor.records.rows import RecordRowBuffers

J = TypeVar("J")
A = TypeVar("A")
D = TypeVar("D")
R = TypeVar("R")


class KeyHashBuffers:
    def __init__(self) -> None:
        self._hashes = np.empty((1 << 14, 2), np.uint64)
        self._rows = np.empty(1 << 14, np.int64)

    def take_buffers(self, row_count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Buffers are valid until the next call."""
        if row_count > len(self._rows):
            count_new = max(row_count, 2 * len(self._rows))
            self._hashes, self._rows = np.empty((count_new, 2), np.uint64), np.empty(count_new, np.int64)
        return self._hashes[:row_count], self._rows[:row_count]


class ReusableJobBuffers:
    def __init__(self) -> None:
        self.bodies = GrowingByteBuffer()
        self.rows = RecordRowBuffers()
        self.hashes = KeyHashBuffers()
        self.output = EncodedBatchBuffer()
        self.second_reader: Any = None  # what the gate keeps here


class JobBarrier:
    """Jobs after it start only when all results before it were taken."""


BARRIER: Final = JobBarrier()


class _JobQueueWithBarriers(Generic[J]):
    def __init__(self, jobs: Iterable[J | JobBarrier]) -> None:
        self._jobs = iter(jobs)
        self._draining = False

    def next_startable_job(self, *, are_all_results_taken: bool) -> J | None:
        """Returns None if a barrier blocks the next job until all earlier results were taken."""
        if self._draining and not are_all_results_taken:
            return None
        for job in self._jobs:
            self._draining = isinstance(job, JobBarrier)
            if not isinstance(job, JobBarrier):
                return job
            if not are_all_results_taken:
                return None
        return None


@dataclass(frozen=True, slots=True)
class _JobAwaitingDecision(Generic[A, R]):
    buffers: ReusableJobBuffers
    prepared: A | None
    result: Future[R]


class _OrderedDecisionRunner(Generic[A, D, R]):
    """The thread that prepares the earliest undecided job runs its decision, so that no thread waits for another one."""

    def __init__(self, decide_job: Callable[[A], D]) -> None:
        self._decide = decide_job
        self._lock = threading.Lock()
        self._waiting: dict[int, _JobAwaitingDecision[A, R]] = {}
        self._next = 0
        self._deciding = False
        self.stopped = False

    def add_and_decide(self, job_number: int, job: _JobAwaitingDecision[A, R]) -> list[tuple[_JobAwaitingDecision[A, R], D]]:
        """Decide and return all jobs that are next in order: none if an earlier one is not prepared yet, or if another thread is
        deciding, which then decides this job, too.
        """
        with self._lock:
            self._waiting[job_number] = job
            if self._deciding:
                return []
            self._deciding = True
        decided: list[tuple[_JobAwaitingDecision[A, R], D]] = []
        while (waiting := self._pop_next_prepared_job()) is not None:
            try:
                decided.append((waiting, self._decide(waiting.prepared)))  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
                waiting.result.set_exception(error)
                self.cancel_undecided_jobs()
        return decided

    def cancel_undecided_jobs(self) -> None:
        with self._lock:
            self.stopped = True
            self._cancel_waiting_jobs()

    def _pop_next_prepared_job(self) -> _JobAwaitingDecision[A, R] | None:
        with self._lock:
            if self.stopped:
                self._cancel_waiting_jobs()
            if self._next not in self._waiting:
                self._deciding = False
                return None
            self._next += 1
            return self._waiting.pop(self._next - 1)

    def _cancel_waiting_jobs(self) -> None:
        for waiting in self._waiting.values():
            waiting.result.set_exception(CancelledError())
        self._waiting.clear()


class WorkerThreads:
    """A pool of one thread runs everything in the thread of the caller."""

    def __init__(self, thread_count: int) -> None:
        self._pool = ThreadPoolExecutor(thread_count, "buffers") if thread_count > 1 else None
        self._free: SimpleQueue[ReusableJobBuffers] = SimpleQueue()
        for _ in range(2 * thread_count if thread_count > 1 else 1):
            self._free.put(ReusableJobBuffers())

    def run_jobs(self, run_job: Callable[[ReusableJobBuffers, J], R], jobs: Iterable[J | JobBarrier]) -> Generator[R, None, None]:
        """Results come in order, each valid until the next one is requested."""
        if self._pool is None:
            yield from self._run_in_caller_thread(run_job, jobs)
            return
        queue = _JobQueueWithBarriers(jobs)
        running: deque[tuple[ReusableJobBuffers, Future[R]]] = deque()
        try:
            while True:
                while not self._free.empty() and (job := queue.next_startable_job(are_all_results_taken=not running)) is not None:
                    buffers = self._free.get()
                    running.append((buffers, self._pool.submit(run_job, buffers, job)))
                if not running:
                    return
                buffers, done = running[0]
                yield done.result()
                running.popleft()
                self._free.put(buffers)
        finally:
            self._release_buffers(running)

    def run_ordered_jobs(
        self,
        prepare_job: Callable[[ReusableJobBuffers, J], A],
        decide_job_in_order: Callable[[A], D],
        complete_job: Callable[[ReusableJobBuffers, D], R],
        jobs: Iterable[J | JobBarrier],
    ) -> Generator[R, None, None]:
        """Results come in order. Several workers prepare and complete at the same time; ``decide_job_in_order`` runs for one job after the
        other, in their order.
        """
        if self._pool is None:
            yield from self._run_in_caller_thread(
                lambda buffers, job: complete_job(buffers, decide_job_in_order(prepare_job(buffers, job))), jobs
            )
            return
        pool, queue, order, numbers = self._pool, _JobQueueWithBarriers(jobs), _OrderedDecisionRunner[A, D, R](decide_job_in_order), count()
        running: deque[tuple[ReusableJobBuffers, Future[R]]] = deque()

        def prepare_and_decide_job(job_number: int, buffers: ReusableJobBuffers, result: Future[R], job: J) -> None:
            try:
                prepared = None if order.stopped else prepare_job(buffers, job)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
                result.set_exception(error)
                return
            decided = order.add_and_decide(job_number, _JobAwaitingDecision(buffers, prepared, result))
            for decided_job, decision in decided[:-1]:
                pool.submit(complete_decided_job, decided_job, decision)
            for decided_job, decision in decided[-1:]:
                complete_decided_job(decided_job, decision)

        def complete_decided_job(decided_job: _JobAwaitingDecision[A, R], decision: D) -> None:
            try:
                decided_job.result.set_result(complete_job(decided_job.buffers, decision))
            except BaseException as error:  # noqa: BLE001 - likewise
                decided_job.result.set_exception(error)

        try:
            while True:
                while not self._free.empty() and (job := queue.next_startable_job(are_all_results_taken=not running)) is not None:
                    buffers, result = self._free.get(), Future[R]()
                    result.set_running_or_notify_cancel()
                    running.append((buffers, result))
                    pool.submit(prepare_and_decide_job, next(numbers), buffers, result, job)
                if not running:
                    return
                yield running[0][1].result()
                self._free.put(running.popleft()[0])
        finally:
            order.cancel_undecided_jobs()
            self._release_buffers(running)

    def _run_in_caller_thread(
        self, run_job: Callable[[ReusableJobBuffers, J], R], jobs: Iterable[J | JobBarrier]
    ) -> Generator[R, None, None]:
        buffers = self._free.get()
        try:
            for job in jobs:
                if not isinstance(job, JobBarrier):
                    yield run_job(buffers, job)
        finally:
            self._free.put(buffers)

    def _release_buffers(self, running_jobs: Iterable[tuple[ReusableJobBuffers, Future[Any]]]) -> None:
        for buffers, future in running_jobs:
            future.cancel()
            if not future.cancelled():
                future.exception()
            self._free.put(buffers)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
