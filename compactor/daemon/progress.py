"""Progress of a job: reported by the round and the store while it runs, read by whoever shows it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from compactor.config.units import count_noun
from compactor.control.stages import RoundStage
from compactor.daemon.scheduling import DaemonAction, PartitionJob, PartitionStatus
from compactor.model.plan import CompactionPlan
from compactor.service.journal import EventLogger

LEAST_SHARE = 0.05
"""Below this share of the work no expected end is shown."""


@dataclass(frozen=True)
class RunningJobSnapshot:
    """A running job at one moment. Times are in milliseconds.

    begun_ms: when it began.
    phase: resume, index (pass 1), rewrite (pass 2 and upload), verify, publish or close; retire for a deletion, output for an output.
    done, total: amounts of work in ``unit``; the total is 0 if unknown.
    share: share of the whole job that is done, from 0 to 1.
    expected_end_ms: 0 while less than LEAST_SHARE is done.
    """

    job: PartitionJob
    begun_ms: int
    phase: str
    run_id: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    share: float = 0.0
    expected_end_ms: int = 0


class JobProgressRecorder:
    """Recorder of one job's progress, which the job reports to it (a ``JobProgressObserver``). Thread-safe.

    Pass 2 of a round is shown as the second half of the work, because both passes read about the same number of bytes.
    """

    def __init__(self, job: PartitionJob, status: PartitionStatus | None, begun_ms: int, log: EventLogger) -> None:
        self._job = job
        self._begun_ms = begun_ms
        self._log = log
        self._lock = threading.Lock()
        self._dirty_bytes = status.dirty_bytes if status else 0
        whole = {DaemonAction.RETIRE: "retire", DaemonAction.OUTPUT: "output"}
        self._phase = whole.get(job.action) or ("resume" if status is not None and status.open_run else "index")
        self._entered = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._bytes = 0
        self._groups = 0
        self._plan: CompactionPlan | None = None

    def record_transferred_bytes(self, size: int) -> None:
        """Record a number of segment bytes that were read from the store or written to it."""
        with self._lock:
            self._bytes += size

    def record_round_stage(self, stage: RoundStage, plan: CompactionPlan) -> None:
        """Record that the round has reached this stage, and log it."""
        groups = len(plan.tasks)
        with self._lock:
            self._plan = plan
            self._groups += stage is RoundStage.UPLOADED
            done = self._groups
            if stage is RoundStage.ANNOUNCED:
                self._enter_phase("rewrite")
            elif stage is RoundStage.UPLOADED and done == groups:
                self._enter_phase("verify")
            elif stage is RoundStage.VERIFIED:
                self._enter_phase("publish")
            elif stage is RoundStage.PUBLISHED:
                self._enter_phase("close")
        name, run = str(self._job.partition), plan.run_id
        if stage is RoundStage.ANNOUNCED:
            segments = count_noun(len(plan.source_segment_ids), "segment")
            what = f"{segments} to rewrite in {count_noun(groups, 'group')}, {len(plan.skipped)} skipped"
            self._log(f"announced, {what}, to be clean up to offset {plan.next_dirty_offset}", partition=name, run=run)
            for left in plan.skipped:
                self._log(f"skipped: {left.reason}", level=logging.DEBUG, segment=left.id, partition=name, run=run)
            for read in plan.read:
                self._log(f"to rewrite: {read.reason}", level=logging.DEBUG, segment=read.id, partition=name, run=run)
        elif stage is RoundStage.UPLOADED:
            self._log(f"uploaded, group {done} of {groups}", level=logging.DEBUG, partition=name, run=run)
        elif stage in (RoundStage.VERIFIED, RoundStage.PUBLISH_BEGUN, RoundStage.PUBLISHED):
            self._log(stage.value, partition=name, run=run)

    @property
    def run_id(self) -> str:
        """Return the id of the job's round; empty if it has none, or none yet."""
        return self._plan.run_id if self._plan else ""

    def running_job(self, now_ms: int) -> RunningJobSnapshot:
        """Return the job's phase, amounts and expected end at this moment."""
        with self._lock:
            phase, moved, plan, groups = self._phase, self._bytes, self._plan, self._groups
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
        return RunningJobSnapshot(self._job, self._begun_ms, phase, self.run_id, done, total, unit, share, max(ends, now_ms) if ends else 0)

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds that each phase has taken, in order; the last one up to now."""
        with self._lock:
            return self._seconds | {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._entered}

    def _enter_phase(self, phase: str) -> None:
        """Begin a phase, and add the time of the one before to its total."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._entered
        self._phase, self._entered = phase, now
