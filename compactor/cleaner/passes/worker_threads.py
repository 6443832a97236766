"""Worker threads for chunks: several threads work in parallel, and results are returned in order. Kernels and codecs release the GIL."""

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

from compactor.records.codecs import ByteBuffer
from compactor.records.encode import OutputBuffer
from compactor.records.rows import RowBuffers

J = TypeVar("J")
A = TypeVar("A")
D = TypeVar("D")
R = TypeVar("R")


class HashBuffers:
    """Buffers for key hashes, shape (n, 2), and the numbers of their rows; reused from chunk to chunk."""

    def __init__(self) -> None:
        self._hashes = np.empty((1 << 14, 2), np.uint64)
        self._rows = np.empty(1 << 14, np.int64)

    def buffers_for_rows(self, row_count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return buffers for ``row_count`` rows, valid until the next call."""
        if row_count > len(self._rows):
            count_new = max(row_count, 2 * len(self._rows))
            self._hashes, self._rows = np.empty((count_new, 2), np.uint64), np.empty(count_new, np.int64)
        return self._hashes[:row_count], self._rows[:row_count]


class ThreadBuffers:
    """Memory that one job at a time may use. It can be used again after the consumer has taken the job's result."""

    def __init__(self) -> None:
        self.bodies = ByteBuffer()
        self.rows = RowBuffers()
        self.hashes = HashBuffers()
        self.output = OutputBuffer()
        self.second_reader: Any = None  # what the gate keeps here


class Barrier:
    """Separator between jobs: jobs after it start only when the results of all jobs before it were taken."""


BARRIER: Final = Barrier()


class _JobQueue(Generic[J]):
    """Iterator over jobs that runs in the caller's thread and stops at barriers."""

    def __init__(self, jobs: Iterable[J | Barrier]) -> None:
        self._jobs = iter(jobs)
        self._draining = False

    def next_job_unless_blocked(self, *, is_idle: bool) -> J | None:
        """Return the next job, or None if there is none or a barrier blocks it. ``is_idle``: whether all results so far were taken."""
        if self._draining and not is_idle:
            return None
        for job in self._jobs:
            self._draining = isinstance(job, Barrier)
            if not isinstance(job, Barrier):
                return job
            if not is_idle:
                return None
        return None


@dataclass(frozen=True, slots=True)
class _PreparedJob(Generic[A, R]):
    """A job whose first step is done; ``prepared`` is None if the job was cancelled."""

    buffers: ThreadBuffers
    prepared: A | None
    result: Future[R]


class _OrderedDecisions(Generic[A, D, R]):
    """Runner of the second step of jobs in their order. The step runs in the thread that completes the earliest undecided job, so that no
    thread waits for another one.
    """

    def __init__(self, decide: Callable[[A], D]) -> None:
        self._decide = decide
        self._lock = threading.Lock()
        self._waiting: dict[int, _PreparedJob[A, R]] = {}
        self._next = 0
        self._deciding = False
        self.stopped = False

    def add_prepared_job(self, job_number: int, job: _PreparedJob[A, R]) -> list[tuple[_PreparedJob[A, R], D]]:
        """Add a prepared job; return the jobs that this thread has decided, in order: none if an earlier job is missing."""
        with self._lock:
            self._waiting[job_number] = job
            if self._deciding:
                return []
            self._deciding = True
        decided: list[tuple[_PreparedJob[A, R], D]] = []
        while (waiting := self._next_prepared_job()) is not None:
            try:
                decided.append((waiting, self._decide(waiting.prepared)))  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
                waiting.result.set_exception(error)
                self.cancel_undecided_jobs()
        return decided

    def cancel_undecided_jobs(self) -> None:
        """Cancel all jobs that are not decided yet."""
        with self._lock:
            self.stopped = True
            self._cancel_waiting_jobs()

    def _next_prepared_job(self) -> _PreparedJob[A, R] | None:
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
    """A pool of ``threads`` workers. With one, everything runs in the caller's thread."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "buffers") if threads > 1 else None
        self._free: SimpleQueue[ThreadBuffers] = SimpleQueue()
        for _ in range(2 * threads if threads > 1 else 1):
            self._free.put(ThreadBuffers())

    def run_jobs_in_order(self, work: Callable[[ThreadBuffers, J], R], jobs: Iterable[J | Barrier]) -> Generator[R, None, None]:
        """Yield the results of ``work`` in the order of the jobs. A result is valid until the next one is requested."""
        if self._pool is None:
            yield from self._run_in_caller_thread(work, jobs)
            return
        queue = _JobQueue(jobs)
        running: deque[tuple[ThreadBuffers, Future[R]]] = deque()
        try:
            while True:
                while not self._free.empty() and (job := queue.next_job_unless_blocked(is_idle=not running)) is not None:
                    buffers = self._free.get()
                    running.append((buffers, self._pool.submit(work, buffers, job)))
                if not running:
                    return
                buffers, done = running[0]
                yield done.result()
                running.popleft()
                self._free.put(buffers)
        finally:
            self._wait_and_release_buffers(running)

    def run_three_step_jobs(
        self,
        prepare: Callable[[ThreadBuffers, J], A],
        decide: Callable[[A], D],
        finish: Callable[[ThreadBuffers, D], R],
        jobs: Iterable[J | Barrier],
    ) -> Generator[R, None, None]:
        """Yield the results of jobs that consist of three steps, in the order of the jobs.

        Workers run ``prepare`` and ``finish`` at any time, and ``decide`` for one job after the other, in order.
        """
        if self._pool is None:
            yield from self._run_in_caller_thread(lambda buffers, job: finish(buffers, decide(prepare(buffers, job))), jobs)
            return
        pool, queue, order, numbers = self._pool, _JobQueue(jobs), _OrderedDecisions[A, D, R](decide), count()
        running: deque[tuple[ThreadBuffers, Future[R]]] = deque()

        def start_job(job_number: int, buffers: ThreadBuffers, result: Future[R], job: J) -> None:
            try:
                prepared = None if order.stopped else prepare(buffers, job)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
                result.set_exception(error)
                return
            decided = order.add_prepared_job(job_number, _PreparedJob(buffers, prepared, result))
            for decided_job, decision in decided[:-1]:
                pool.submit(finish_job, decided_job, decision)
            for decided_job, decision in decided[-1:]:
                finish_job(decided_job, decision)

        def finish_job(decided_job: _PreparedJob[A, R], decision: D) -> None:
            try:
                decided_job.result.set_result(finish(decided_job.buffers, decision))
            except BaseException as error:  # noqa: BLE001 - likewise
                decided_job.result.set_exception(error)

        try:
            while True:
                while not self._free.empty() and (job := queue.next_job_unless_blocked(is_idle=not running)) is not None:
                    buffers, result = self._free.get(), Future[R]()
                    result.set_running_or_notify_cancel()
                    running.append((buffers, result))
                    pool.submit(start_job, next(numbers), buffers, result, job)
                if not running:
                    return
                yield running[0][1].result()
                self._free.put(running.popleft()[0])
        finally:
            order.cancel_undecided_jobs()
            self._wait_and_release_buffers(running)

    def _run_in_caller_thread(self, work: Callable[[ThreadBuffers, J], R], jobs: Iterable[J | Barrier]) -> Generator[R, None, None]:
        """Run the jobs in the caller's thread."""
        buffers = self._free.get()
        try:
            for job in jobs:
                if not isinstance(job, Barrier):
                    yield work(buffers, job)
        finally:
            self._free.put(buffers)

    def _wait_and_release_buffers(self, running: Iterable[tuple[ThreadBuffers, Future[Any]]]) -> None:
        """Wait for the jobs that are still running, and free their buffers."""
        for buffers, future in running:
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
