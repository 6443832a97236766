"""Threads that pay: work on chunks runs ahead in a few lanes, results come back in order. Kernels and codecs release the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

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


class Lanes:
    """``threads`` workers; with one, everything runs in the caller's thread."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "lane") if threads > 1 else None
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for _ in range(2 * threads if threads > 1 else 1):
            self._free.put(Lane())

    def run(self, work: Callable[[Lane, J], R], jobs: Sequence[J]) -> Iterator[R]:
        """Results in the order of the jobs. One consumer at a time; a result is valid until the next one is asked for."""
        return self.run_in_steps(work, lambda result: result, lambda lane, result: result, jobs)

    def run_in_steps(
        self, prepare: Callable[[Lane, J], A], decide: Callable[[A], D], finish: Callable[[Lane, D], R], jobs: Sequence[J]
    ) -> Iterator[R]:
        """The same for jobs in three steps: ``prepare`` and ``finish`` run anywhere, ``decide`` here and in the order of the jobs."""
        if self._pool is None:
            lane = self._free.get()
            try:
                for job in jobs:
                    yield finish(lane, decide(prepare(lane, job)))
            finally:
                self._free.put(lane)
            return
        prepared: deque[tuple[Lane, Future[A]]] = deque()
        finished: deque[tuple[Lane, Future[R]]] = deque()
        waiting = iter(jobs)
        try:
            while True:
                while not self._free.empty() and (more := next(waiting, None)) is not None:
                    lane = self._free.get()
                    prepared.append((lane, self._pool.submit(prepare, lane, more)))
                if prepared:
                    lane, ahead = prepared[0]
                    decided = decide(ahead.result())
                    prepared.popleft()
                    finished.append((lane, self._pool.submit(finish, lane, decided)))
                elif not finished:
                    return
                while finished and (not prepared or finished[0][1].done()):
                    lane, done = finished[0]
                    yield done.result()
                    finished.popleft()
                    self._free.put(lane)
                    if not prepared:
                        break  # a lane is free: there may be a job for it
        finally:
            left: list[tuple[Lane, Future[Any]]] = [*prepared, *finished]
            for lane, future in left:
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
