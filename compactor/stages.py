"""What each stage of the work costs. A function that is a stage's work says so where it stands (``measured``); one recorder adds up.

While nobody records, a stage costs a look at one variable. Stages are called for chunks of megabytes, never for a batch or a record.
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
    """In the order in which bytes meet them."""

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
    """Seconds of processor and of clock, summed over threads, and the bytes that were worked on."""

    cpu: float = 0.0
    wall: float = 0.0
    bytes: int = 0


class _Here(threading.local):
    """Where a thread is: its stages, the innermost last, and its clocks when that began."""

    def __init__(self) -> None:
        self.stages: list[WorkStage] = []
        self.cpu = self.wall = 0.0


class Recorder:
    """Adds up from all threads. A stage inside another one counts for itself only.

    :param cpu: seconds that the calling thread has used; ``wall``: seconds of the clock.
    """

    def __init__(self, cpu: Callable[[], float], wall: Callable[[], float]) -> None:
        self.costs = {stage: StageCost() for stage in WorkStage}
        self._cpu, self._wall = cpu, wall
        self._here = _Here()
        self._adding = threading.Lock()

    def enter(self, stage: WorkStage) -> None:
        self._charge()
        self._here.stages.append(stage)

    def leave(self, nbytes: int) -> None:
        self._charge()
        with self._adding:
            self.costs[self._here.stages.pop()].bytes += nbytes

    def _charge(self) -> None:
        here, cpu, wall = self._here, self._cpu(), self._wall()
        if here.stages:
            with self._adding:
                cost = self.costs[here.stages[-1]]
                cost.cpu += cpu - here.cpu
                cost.wall += wall - here.wall
        here.cpu, here.wall = cpu, wall


_recorder: Recorder | None = None


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """All threads of this process are recorded while the block runs."""
    global _recorder  # noqa: PLW0603 - the threads of a round are started in many places
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


def measured(stage: WorkStage, size: Callable[..., int] = lambda *_, **__: 0) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """This function is the work of a stage. ``size``: of its arguments, once it is done: the bytes that it worked on."""

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
