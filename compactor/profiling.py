"""Cost of each stage of the work, in CPU time, wall-clock time and bytes. ``measure_stage`` marks the work of a stage.

Without an active recorder a call costs the check of one variable. Measured functions handle chunks of megabytes, never single batches or
records.
"""

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


class WorkStage(StrEnum):
    """Stages of the work on a segment, in the order in which its bytes pass them."""

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
    """Cost of one stage: CPU and wall-clock seconds, summed over threads, and the bytes that were processed."""

    cpu: float = 0.0
    wall: float = 0.0
    bytes: int = 0


class _ThreadStages(threading.local):
    """Stages that a thread is in, innermost last, and its clocks when the innermost began or resumed."""

    def __init__(self) -> None:
        self.stages: list[WorkStage] = []
        self.cpu = self.wall = 0.0


class Recorder:
    """Adds up the cost of stages over all threads. The time of a nested stage counts only for the nested one.

    :param cpu: returns the CPU seconds that the calling thread has used.
    :param wall: returns the seconds of a wall clock.
    """

    def __init__(self, cpu: Callable[[], float], wall: Callable[[], float]) -> None:
        self.costs = {stage: StageCost() for stage in WorkStage}
        self._cpu, self._wall = cpu, wall
        self._here = _ThreadStages()
        self._adding = threading.Lock()

    def enter(self, stage: WorkStage) -> None:
        """Begin a stage in this thread."""
        self._charge()
        self._here.stages.append(stage)

    def leave(self, nbytes: int) -> None:
        """End the innermost stage of this thread, which processed ``nbytes`` bytes."""
        self._charge()
        with self._adding:
            self.costs[self._here.stages.pop()].bytes += nbytes

    def _charge(self) -> None:
        """Add the time since the last call to this thread's innermost stage."""
        here, cpu, wall = self._here, self._cpu(), self._wall()
        if here.stages:
            with self._adding:
                cost = self.costs[here.stages[-1]]
                cost.cpu += cpu - here.cpu
                cost.wall += wall - here.wall
        here.cpu, here.wall = cpu, wall


_recorder: Recorder | None = None


@contextmanager
def record_costs(recorder: Recorder) -> Iterator[None]:
    """Record all threads of this process while the block runs."""
    global _recorder  # noqa: PLW0603 - the threads of a round are started in many places
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def measure_stage(stage: WorkStage, size: Callable[..., int] = lambda *_, **__: 0) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as work of a stage. ``size``: returns the bytes processed, from the arguments after the call."""

    def around(work: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(work)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            recorder = _recorder
            if recorder is None:
                return work(*args, **kwargs)
            nbytes = 0
            recorder.enter(stage)
            try:
                result = work(*args, **kwargs)
                nbytes = size(*args, **kwargs)
            finally:
                recorder.leave(nbytes)
            return result

        return counted

    return around
