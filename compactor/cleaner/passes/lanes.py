"""Threads that pay: work on chunks runs ahead in a few lanes, results come back in order. Kernels and codecs release the GIL."""

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
    """Key hashes, shape (n, 2), and the rows they belong to, reused from chunk to chunk."""

    def __init__(self) -> None:
        self._hashes = np.empty((1 << 14, 2), np.uint64)
        self._rows = np.empty(1 << 14, np.int64)

    def take(self, count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        if count > len(self._rows):
            count_new = max(count, 2 * len(self._rows))
            self._hashes, self._rows = np.empty((count_new, 2), np.uint64), np.empty(count_new, np.int64)
        return self._hashes[:count], self._rows[:count]


class Lane:
    """What one job may scribble on. A lane is free again once the result of its job was consumed."""

    def __init__(self) -> None:
        self.bodies = ByteBuffer()
        self.rows = RowBuffers()
        self.hashes = HashBuffers()
        self.output = OutputBuffer()
        self.second_reader: Any = None  # what the gate keeps here


class Drain:
    """Stands between jobs: those behind it are asked for once the results of those before it were consumed."""


DRAINED: Final = Drain()


class _Coming(Generic[J]):
    """Jobs, asked for one by one in the caller's thread."""

    def __init__(self, jobs: Iterable[J | Drain]) -> None:
        self._jobs = iter(jobs)
        self._draining = False

    def next(self, *, idle: bool) -> J | None:
        """``idle``: nothing is under way any more. None: there is no job, or none yet."""
        if self._draining and not idle:
            return None
        for job in self._jobs:
            self._draining = isinstance(job, Drain)
            if not isinstance(job, Drain):
                return job
            if not idle:
                return None
        return None


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[A, R]):
    """A job that is prepared. ``prepared``: None where nobody wants it any more."""

    lane: Lane
    prepared: A | None
    result: Future[R]


class _Line(Generic[A, D, R]):
    """Decides on jobs in their order, in whichever thread brings what the others wait for: no thread waits for another one, and none more
    is at work than there are workers."""

    def __init__(self, decide: Callable[[A], D]) -> None:
        self._decide = decide
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting[A, R]] = {}
        self._next = 0
        self._deciding = False
        self.stopped = False

    def bring(self, number: int, job: _Waiting[A, R]) -> list[tuple[_Waiting[A, R], D]]:
        """Jobs that were decided on here, in their order: none where an earlier one is still missing, or another thread is at it."""
        with self._lock:
            self._waiting[number] = job
            if self._deciding:
                return []
            self._deciding = True
        decided: list[tuple[_Waiting[A, R], D]] = []
        while (waiting := self._following()) is not None:
            try:
                decided.append((waiting, self._decide(waiting.prepared)))  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
                waiting.result.set_exception(error)
                self.stop()
        return decided

    def stop(self) -> None:
        """No more is decided: whoever still waits is told."""
        with self._lock:
            self.stopped = True
            self._tell()

    def _following(self) -> _Waiting[A, R] | None:
        with self._lock:
            if self.stopped:
                self._tell()
            if self._next not in self._waiting:
                self._deciding = False
                return None
            self._next += 1
            return self._waiting.pop(self._next - 1)

    def _tell(self) -> None:
        for waiting in self._waiting.values():
            waiting.result.set_exception(CancelledError())
        self._waiting.clear()


class Lanes:
    """``threads`` workers; with one, everything runs in the caller's thread."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "lane") if threads > 1 else None
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for _ in range(2 * threads if threads > 1 else 1):
            self._free.put(Lane())

    def run(self, work: Callable[[Lane, J], R], jobs: Iterable[J | Drain]) -> Generator[R, None, None]:
        """Results in the order of the jobs. One consumer at a time; a result is valid until the next one is asked for."""
        if self._pool is None:
            yield from self._one_by_one(work, jobs)
            return
        coming = _Coming(jobs)
        running: deque[tuple[Lane, Future[R]]] = deque()
        try:
            while True:
                while not self._free.empty() and (job := coming.next(idle=not running)) is not None:
                    lane = self._free.get()
                    running.append((lane, self._pool.submit(work, lane, job)))
                if not running:
                    return
                lane, done = running[0]
                yield done.result()
                running.popleft()
                self._free.put(lane)
        finally:
            self._give_back(running)

    def run_in_steps(
        self, prepare: Callable[[Lane, J], A], decide: Callable[[A], D], finish: Callable[[Lane, D], R], jobs: Iterable[J | Drain]
    ) -> Generator[R, None, None]:
        """The same for jobs in three steps, all done by the workers: ``prepare`` and ``finish`` at any time, ``decide`` one job after the
        other in their order."""
        if self._pool is None:
            yield from self._one_by_one(lambda lane, job: finish(lane, decide(prepare(lane, job))), jobs)
            return
        pool, coming, line, numbers = self._pool, _Coming(jobs), _Line[A, D, R](decide), count()
        running: deque[tuple[Lane, Future[R]]] = deque()

        def begin(number: int, lane: Lane, result: Future[R], job: J) -> None:
            try:
                prepared = None if line.stopped else prepare(lane, job)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result raises it
                result.set_exception(error)
                return
            decided = line.bring(number, _Waiting(lane, prepared, result))
            for waiting, what in decided[:-1]:
                pool.submit(end, waiting, what)
            for waiting, what in decided[-1:]:
                end(waiting, what)

        def end(waiting: _Waiting[A, R], decided: D) -> None:
            try:
                waiting.result.set_result(finish(waiting.lane, decided))
            except BaseException as error:  # noqa: BLE001 - likewise
                waiting.result.set_exception(error)

        try:
            while True:
                while not self._free.empty() and (job := coming.next(idle=not running)) is not None:
                    lane, result = self._free.get(), Future[R]()
                    result.set_running_or_notify_cancel()
                    running.append((lane, result))
                    pool.submit(begin, next(numbers), lane, result, job)
                if not running:
                    return
                yield running[0][1].result()
                self._free.put(running.popleft()[0])
        finally:
            line.stop()
            self._give_back(running)

    def _one_by_one(self, work: Callable[[Lane, J], R], jobs: Iterable[J | Drain]) -> Generator[R, None, None]:
        lane = self._free.get()
        try:
            for job in jobs:
                if not isinstance(job, Drain):
                    yield work(lane, job)
        finally:
            self._free.put(lane)

    def _give_back(self, running: Iterable[tuple[Lane, Future[Any]]]) -> None:
        """The lanes of what is still under way, when it has ended."""
        for lane, future in running:
            future.cancel()
            if not future.cancelled():
                future.exception()
            self._free.put(lane)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
