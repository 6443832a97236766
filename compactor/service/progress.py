"""How far a job is: told by the round and by the store while it works, asked by whoever shows it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from compactor.control.ordering import Stage
from compactor.model.plan import CompactionPlan
from compactor.service.journal import Tell
from compactor.service.scheduling import Action, Job, Sight

LEAST_SHARE = 0.05
"""Before so much is done, nobody is told when it will end."""


@dataclass(frozen=True)
class AtWork:
    """A job at one moment. ``done`` of ``total`` in ``unit``; ``total`` 0 where nobody knows. Times in milliseconds.

    ``phase``: resume, index (pass 1), rewrite (pass 2 and upload), verify, publish, close; of a deletion retire,
    of a generation generation. ``share``: of the whole
    job, 0 to 1; ``expected_end_ms``: 0 as long as too little is done to say.
    """

    job: Job
    begun_ms: int
    phase: str
    run_id: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    share: float = 0.0
    expected_end_ms: int = 0


class JobProgress:
    """Of one job. ``reached`` and ``moved`` are called by its threads, ``shown`` by any.

    Halfway is where pass 2 begins: each pass reads about the same, the first what is dirty, the second what it rewrites.
    """

    def __init__(self, job: Job, sight: Sight | None, begun_ms: int, tell: Tell) -> None:
        self._job = job
        self._begun_ms = begun_ms
        self._tell = tell
        self._lock = threading.Lock()
        self._dirty_bytes = sight.dirty_bytes if sight else 0
        whole = {Action.RETIRE: "retire", Action.GENERATION: "generation"}
        self._phase = whole.get(job.action) or ("resume" if sight is not None and sight.open_run else "index")
        self._entered = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._bytes = 0
        self._groups = 0
        self._plan: CompactionPlan | None = None

    def moved(self, size: int) -> None:
        """Bytes of segments that came from the store, or went there."""
        with self._lock:
            self._bytes += size

    def reached(self, stage: Stage, plan: CompactionPlan) -> None:
        """Told of each stage of the round."""
        groups = len(plan.tasks)
        with self._lock:
            self._plan = plan
            self._groups += stage is Stage.UPLOADED
            done = self._groups
            if stage is Stage.ANNOUNCED:
                self._enter("rewrite")
            elif stage is Stage.UPLOADED and done == groups:
                self._enter("verify")
            elif stage is Stage.VERIFIED:
                self._enter("publish")
            elif stage is Stage.PUBLISHED:
                self._enter("close")
        name, run = str(self._job.name), plan.run_id
        if stage is Stage.ANNOUNCED:
            what = f"{len(plan.sources)} segments to rewrite in {groups} groups, {len(plan.skipped)} left alone"
            self._tell(f"announced, {what}, to be clean up to offset {plan.next_dirty_offset}", partition=name, run=run)
            for left in plan.skipped:
                self._tell(f"left alone: {left.reason}", level=logging.DEBUG, segment=left.id, partition=name, run=run)
            for read in plan.read:
                self._tell(f"to rewrite: {read.reason}", level=logging.DEBUG, segment=read.id, partition=name, run=run)
        elif stage is Stage.UPLOADED:
            self._tell(f"uploaded, group {done} of {groups}", level=logging.DEBUG, partition=name, run=run)
        elif stage in (Stage.VERIFIED, Stage.PUBLISH_BEGUN, Stage.PUBLISHED):
            self._tell(stage.value, partition=name, run=run)

    def shown(self, now_ms: int) -> AtWork:
        with self._lock:
            phase, moved, plan, groups = self._phase, self._bytes, self._plan, self._groups
        run_id = plan.run_id if plan else ""
        if phase in ("index", "resume") and plan is None:
            done, total, unit = (min(moved, self._dirty_bytes), self._dirty_bytes, "bytes") if phase == "index" else (moved, 0, "bytes")
            share = done / total / 2 if total else 0.0
        elif plan is not None and phase != "close":
            done, total, unit = min(groups, len(plan.tasks)), len(plan.tasks), "groups"
            share = 0.5 + done / total / 2 if total else 0.5
        else:
            done, total, unit, share = 0, 0, "", 1.0 if phase == "close" else 0.0
        spent = max(0, now_ms - self._begun_ms)
        ends = self._begun_ms + round(spent / share) if share >= LEAST_SHARE else 0
        return AtWork(self._job, self._begun_ms, phase, run_id, done, total, unit, share, max(ends, now_ms) if ends else 0)

    def phases(self) -> dict[str, float]:
        """Seconds that each phase has taken, in their order; the last one until now."""
        with self._lock:
            return self._seconds | {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._entered}

    def _enter(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._entered
        self._phase, self._entered = phase, now
