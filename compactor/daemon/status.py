"""The daemon's status at one moment, as frozen values: the source of metrics, health and pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from compactor.access.tier import Tier
from compactor.control.pauses import round_pause_reason_or_empty
from compactor.control.summary import SegmentSummary
from compactor.daemon.jobs import JobResult
from compactor.daemon.partition_cache import PartitionSummaryCache
from compactor.daemon.partition_history import PartitionHistory
from compactor.daemon.progress import JobProgressRecorder, RunningJobSnapshot
from compactor.daemon.scheduling import (
    DaemonAction,
    PartitionJob,
    PartitionSchedule,
    new_partition_schedule,
    with_failed_poll,
    with_poll_result,
    with_round_pause_and_round_request,
)
from compactor.daemon.trend import NO_TREND, TierStorageTrend
from compactor.errors import CompactorError
from compactor.model.ids import TopicPartition
from compactor.model.status import PUBLISHING, RoundStatus
from compactor.round.compaction import RoundReport
from compactor.service.journal import EventLogger
from compactor.service.service_status import ServiceStatus
from compactor.upkeep.retire import RetireReport
from compactor.views.verdict import blocks_of_topics

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Upper bounds of durations in seconds: rounds of small partitions take half a second, those of large ones hours."""


@dataclass(frozen=True)
class DurationHistogram:
    """Histogram of durations.

    counts: for each bound in BOUNDS_S, the number of durations up to this bound and above the previous one; last, the number above all
        bounds.
    total: sum of all durations, in seconds.
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    total: float = 0.0

    def with_duration(self, seconds: float) -> DurationHistogram:
        """Return a new histogram that contains one more duration."""
        place = bisect_left(BOUNDS_S, seconds)
        counts = tuple(count + (at == place) for at, count in enumerate(self.counts))
        return DurationHistogram(counts, self.total + seconds)

    @property
    def prometheus_buckets(self) -> list[tuple[str, float]]:
        """Return cumulative buckets as Prometheus expects them: each upper bound with the number of durations that are not longer."""
        bounds = [str(bound) for bound in BOUNDS_S] + ["+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


@dataclass(frozen=True)
class JobTotals:
    """Sums over all jobs that have ended since the process started. Times are in seconds, sizes in bytes.

    durations: of jobs, by action and status.
    phases: of published rounds, by phase (see ``progress.RunningJobSnapshot``).
    """

    jobs: dict[tuple[str, str], int] = field(default_factory=dict)
    records_read: int = 0
    records_kept: int = 0
    segments_read: int = 0
    segments_written: int = 0
    segments_skipped: int = 0
    filters_asked: int = 0
    filters_useless: int = 0
    round_bytes_read: int = 0
    round_bytes_written: int = 0
    saved_bytes: int = 0
    objects_deleted: int = 0
    bytes_deleted: int = 0
    last_round_seconds: float = 0.0
    last_recopy_percent: float = 0.0
    last_map_percent: float = 0.0
    durations: dict[tuple[str, str], DurationHistogram] = field(default_factory=dict)
    phases: dict[str, DurationHistogram] = field(default_factory=dict)


def with_job_counted(totals: JobTotals, result: JobResult, map_budget_bytes: int) -> JobTotals:
    """Return the totals with the result of one more job added.

    :param map_budget_bytes: bytes that the job's round could use for its offset map.
    """
    report = result.report
    key = (result.job.action.value, result.status)
    values = totals.__dict__ | {"jobs": totals.jobs | {key: totals.jobs.get(key, 0) + 1}}
    worked = result.job.action is DaemonAction.ROUND and result.status not in (
        RoundStatus.NOTHING_TO_DO,
        RoundStatus.LEASED,
        RoundStatus.STOPPED,
    )
    if worked or (isinstance(report, RetireReport) and (report.deleted or report.swept)):
        values |= {"durations": totals.durations | {key: totals.durations.get(key, DurationHistogram()).with_duration(result.seconds)}}
    if isinstance(report, RoundReport) and report.status in PUBLISHING:
        taken = {phase: totals.phases.get(phase, DurationHistogram()).with_duration(seconds) for phase, seconds in result.phases.items()}
        values |= {
            "records_read": totals.records_read + report.records_read,
            "records_kept": totals.records_kept + report.records_kept,
            "segments_read": totals.segments_read + report.segments_in - report.segments_skipped,
            "segments_written": totals.segments_written + report.segments_out,
            "segments_skipped": totals.segments_skipped + report.segments_skipped,
            "filters_asked": totals.filters_asked + report.filters.asked,
            "filters_useless": totals.filters_useless + report.filters.useless,
            "round_bytes_read": totals.round_bytes_read + report.bytes_read,
            "round_bytes_written": totals.round_bytes_written + report.bytes_written,
            "saved_bytes": totals.saved_bytes + max(0, report.saved_bytes),
            "last_round_seconds": result.seconds,
            "last_recopy_percent": 100 * report.bytes_written / before if (before := report.bytes_written + report.saved_bytes) else 0.0,
            "last_map_percent": 100 * report.peak_map_bytes / map_budget_bytes if map_budget_bytes else 0.0,
            "phases": totals.phases | taken,
        }
    if isinstance(report, RetireReport):
        values |= {
            "objects_deleted": totals.objects_deleted + len(report.deleted) + len(report.swept),
            "bytes_deleted": totals.bytes_deleted + report.deleted_bytes,
        }
    return JobTotals(**values)


@dataclass(frozen=True)
class DaemonStatus(ServiceStatus):
    """Status of a daemon. Disk sizes are in bytes.

    ready: whether the latest scan succeeded and the whole tier was scanned at least once.
    trend: figures of the last seven days.
    """

    schedules: tuple[PartitionSchedule, ...]
    running_jobs: tuple[RunningJobSnapshot, ...]
    totals: JobTotals
    disk_used: int
    disk_peak: int
    disk_total: int
    trend: TierStorageTrend = NO_TREND

    @property
    def schedules_with_blocked_rounds(self) -> tuple[PartitionSchedule, ...]:
        """Return the schedules of blocked partitions: no round can clean them until a person acts."""
        return tuple(schedule for schedule in self.schedules if schedule.blocked_reason)


@dataclass(frozen=True)
class PartitionDetails:
    """Everything that a partition's web page shows: schedule, history and running job at one moment.

    history: None if only a summary of its control log is known. running_job: None if no job runs.
    """

    now_ms: int
    schedule: PartitionSchedule
    segments: tuple[SegmentSummary, ...]
    history: PartitionHistory | None
    running_job: RunningJobSnapshot | None


def read_daemon_status_from_control_logs(tier: Tier, on_partition: Callable[[], None] = lambda: None) -> DaemonStatus:
    """Return the status of a tier as a daemon that has just started would see it. Reads every control log and writes nothing.

    :param on_partition: called after each partition was read.
    :raises StoreError: if the tier cannot be reached.
    """
    names = tier.list_partitions_in_latest_incarnation()
    cache, schedules = PartitionSummaryCache(tier), []
    blocks = blocks_of_topics(tier, sorted({name.topic for name in names}))
    for name, log in zip(names, tier.read_control_logs_or_errors(names, on_partition), strict=True):
        now_ms = tier.ports.clock_ms()
        schedule = with_round_pause_and_round_request(
            new_partition_schedule(name, 0, now_ms), round_pause_reason_or_empty(tier.catalog.state, name), 0, now_ms
        )
        schedule = replace(schedule, suspended=blocks.get(name.topic))
        if isinstance(log, CompactorError):
            schedules.append(with_failed_poll(schedule, str(log), now_ms))
        else:
            schedules.append(with_poll_result(schedule, cache.cache_summary_of_log(log, 0, now_ms), now_ms, 0.0))
    now_ms = tier.ports.clock_ms()
    return DaemonStatus(
        holder=tier.ports.holder,
        tier=tier.ports.layout.url,
        now_ms=now_ms,
        started_ms=now_ms,
        scans=1,
        scan_ms=now_ms,
        interval_ms=tier.settings.daemon.interval_ms,
        ready=True,
        stopping=False,
        problem="",
        usage=tier.counters.usage(),
        schedules=tuple(schedules),
        running_jobs=(),
        totals=JobTotals(),
        disk_used=0,
        disk_peak=0,
        disk_total=0,
    )


class JobMonitor:
    """Progress of running jobs and totals of finished jobs. Updated by one thread; may be read by any."""

    def __init__(self, log: EventLogger, map_budget_bytes: Callable[[TopicPartition], int]) -> None:
        self.totals = JobTotals()
        self._log = log
        self._map_budget = map_budget_bytes
        self._at_work: dict[TopicPartition, JobProgressRecorder] = {}

    def record_job_start(self, job: PartitionJob, schedule: PartitionSchedule, now_ms: int) -> JobProgressRecorder:
        """Create and return the progress recorder of a job that starts now."""
        progress = JobProgressRecorder(job, schedule.status, now_ms, self._log)
        self._at_work[job.partition] = progress
        return progress

    def record_job_end(self, result: JobResult) -> None:
        """Add a job that has ended to the totals, and remove it from the running jobs."""
        self._at_work.pop(result.job.partition, None)
        self.totals = with_job_counted(self.totals, result, self._map_budget(result.job.partition))

    def running_jobs(self, now_ms: int) -> tuple[RunningJobSnapshot, ...]:
        """Return every job that runs now, with its progress."""
        return tuple(progress.running_job(now_ms) for progress in self._at_work.copy().values())
