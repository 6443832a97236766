"""Cost of each stage of the work. Measured functions handle chunks of megabytes, never single batches or records."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class SegmentWorkStage(StrEnum):
    """Stages of the work on a segment, in the order of the data flow."""

    FETCH = "fetch"  # from the store to this machine
    CHECK = "check"  # batch headers and CRCs; the first touch of every byte
    INFLATE = "inflate"
    PARSE = "parse"
    HASH = "hash"
    MAP = "map"
    DECIDE = "decide"
    ENCODE = "encode"  # what stays is put together, with headers and CRCs
    DEFLATE = "deflate"
    KEEP = "keep"  # what pass 1 finished is set aside for pass 2
    WRITE = "write"
    GATE = "gate"
    UPLOAD = "upload"


@dataclass(slots=True)
class StageCost:
    cpu: float = 0.0
    wall: float = 0.0
    bytes: int = 0


class LoadingCost:
    """Cost of loading and compiling kernels in this process since ``clocks`` were set: CPU seconds of the calling thread, and seconds of
    the wall clock.
    """

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self.clocks: tuple[Callable[[], float], Callable[[], float]] | None = None
        self._adding = threading.Lock()

    def begin(self) -> tuple[float, float]:
        """Return the times that ``add_since`` takes."""
        return (self.clocks[0](), self.clocks[1]()) if self.clocks else (0.0, 0.0)

    def add_since(self, begun: tuple[float, float]) -> None:
        now = self.begin()
        with self._adding:
            self.cpu += now[0] - begun[0]
            self.wall += now[1] - begun[1]


loading_cost = LoadingCost()


class _ActiveStagesOfThread(threading.local):
    def __init__(self) -> None:
        self.stages: list[SegmentWorkStage] = []
        self.cpu = self.wall = 0.0


class StageCostRecorder:
    """Cost of each stage over all threads. While a stage runs inside another one, time counts only for the inner stage.

    :param cpu: returns the CPU seconds of the calling thread.
    """

    def __init__(self, cpu: Callable[[], float], wall: Callable[[], float]) -> None:
        self.costs = {stage: StageCost() for stage in SegmentWorkStage}
        self._cpu, self._wall = cpu, wall
        self._here = _ActiveStagesOfThread()
        self._adding = threading.Lock()

    def enter_stage(self, stage: SegmentWorkStage) -> None:
        self._add_elapsed()
        self._here.stages.append(stage)

    def leave_stage(self, nbytes: int) -> None:
        self._add_elapsed()
        with self._adding:
            self.costs[self._here.stages.pop()].bytes += nbytes

    def _add_elapsed(self) -> None:
        here, cpu, wall = self._here, self._cpu(), self._wall()
        if here.stages:
            with self._adding:
                cost = self.costs[here.stages[-1]]
                cost.cpu += cpu - here.cpu
                cost.wall += wall - here.wall
        here.cpu, here.wall = cpu, wall


_recorder: StageCostRecorder | None = None


@contextmanager
def record_stage_costs(recorder: StageCostRecorder) -> Iterator[None]:
    global _recorder  # noqa: PLW0603 - the threads of a round are started in many places
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def measure_stage(stage: SegmentWorkStage, size: Callable[..., int] = lambda *_, **__: 0) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that counts a function's time and bytes as cost of a stage.

    :param size: returns the bytes processed; called after the function, with its arguments.
    """

    def decorate(work: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(work)
        def measured(*args: P.args, **kwargs: P.kwargs) -> R:
            recorder = _recorder
            if recorder is None:
                return work(*args, **kwargs)
            nbytes = 0
            recorder.enter_stage(stage)
            try:
                result = work(*args, **kwargs)
                nbytes = size(*args, **kwargs)
            finally:
                recorder.leave_stage(nbytes)
            return result

        return measured

    return decorate
