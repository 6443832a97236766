"""The daemon's status at one moment, as frozen values: the source of metrics, health and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compactor.control.summary import SegmentSummary
from compactor.daemon.job_totals import JobTotals, add_job
from compactor.daemon.jobs import JobResult
from compactor.daemon.partition_history import PartitionHistory
from compactor.daemon.progress import JobProgress, RunningJob
from compactor.daemon.scheduling import Job, PartitionSchedule
from compactor.model.ids import TopicPartition
from compactor.service.journal import EventLogger
from compactor.service.service_status import ServiceStatus


@dataclass(frozen=True)
class DaemonStatus(ServiceStatus):
    """Status of a daemon. Disk sizes are in bytes. ready also means that the whole tier was scanned once."""

    schedules: tuple[PartitionSchedule, ...]
    running_jobs: tuple[RunningJob, ...]
    totals: JobTotals
    disk_used: int
    disk_peak: int
    disk_total: int

    @property
    def blocked_schedules(self) -> tuple[PartitionSchedule, ...]:
        """Partitions whose rounds fail or are forbidden."""
        return tuple(schedule for schedule in self.schedules if schedule.blocked_reason)

    @property
    def running(self) -> tuple[Job, ...]:
        """Jobs that run now."""
        return tuple(work.job for work in self.running_jobs)


@dataclass(frozen=True)
class PartitionDetails:
    """Details of one partition at one moment, for its page.

    history: None if only a summary of its control log is known. running_job: None if no job runs.
    """

    now_ms: int
    schedule: PartitionSchedule
    segments: tuple[SegmentSummary, ...]
    history: PartitionHistory | None
    running_job: RunningJob | None


class JobMonitor:
    """Progress of running jobs and totals of finished ones. Written by one thread, read by any."""

    def __init__(self, log: EventLogger, map_budget: Callable[[TopicPartition], int]) -> None:
        self.totals = JobTotals()
        self._log = log
        self._map_budget = map_budget
        self._at_work: dict[TopicPartition, JobProgress] = {}

    def record_job_start(self, job: Job, schedule: PartitionSchedule, now_ms: int) -> JobProgress:
        """Begin to record a job's progress."""
        progress = JobProgress(job, schedule.status, now_ms, self._log)
        self._at_work[job.name] = progress
        return progress

    def record_job_end(self, done: JobResult, now_ms: int) -> str:
        """Add the job to the totals and return the id of its run, or an empty string."""
        name = done.job.name
        progress = self._at_work.pop(name, None)
        self.totals = add_job(self.totals, done, self._map_budget(name))
        return progress.snapshot(now_ms).run_id if progress else ""

    def running_jobs(self, now_ms: int) -> tuple[RunningJob, ...]:
        """Return the progress of each running job."""
        return tuple(progress.snapshot(now_ms) for progress in self._at_work.copy().values())
