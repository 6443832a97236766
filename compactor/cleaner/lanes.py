"""Threads that pay: work on chunks runs ahead in a few lanes, results come back in order. Kernels and codecs release the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

from compactor.records.encode import OutputBuffer
from compactor.records.rows import RowBuffers

J = TypeVar("J")
R = TypeVar("R")


class Lane:
    """What one job may scribble on. A lane is free again once the result of its job was consumed."""

    def __init__(self) -> None:
        self.rows = RowBuffers()
        self.output = OutputBuffer()


class Lanes:
    """``threads`` workers; with one, everything runs in the caller's thread."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "lane") if threads > 1 else None
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for _ in range(2 * threads if threads > 1 else 1):
            self._free.put(Lane())

    def run(self, work: Callable[[Lane, J], R], jobs: Sequence[J]) -> Iterator[R]:
        """Results in the order of the jobs. One consumer at a time; a result is valid until the next one is asked for."""
        if self._pool is None:
            lane = self._free.get()
            try:
                for job in jobs:
                    yield work(lane, job)
            finally:
                self._free.put(lane)
            return
        running: deque[tuple[Lane, Future[R]]] = deque()
        waiting = iter(jobs)
        try:
            while True:
                while not self._free.empty():
                    try:
                        job = next(waiting)
                    except StopIteration:
                        break
                    lane = self._free.get()
                    running.append((lane, self._pool.submit(work, lane, job)))
                if not running:
                    return
                lane, future = running.popleft()
                try:
                    yield future.result()
                finally:
                    self._free.put(lane)
        finally:
            for lane, future in running:
                future.cancel()
                if not future.cancelled():
                    future.exception()
                self._free.put(lane)

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown()
