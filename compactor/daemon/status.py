"""The daemon's status at one moment: the source of metrics, health and pages."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, NamedTuple

from pydantic import ValidationError

from compactor.access.tier import Tier
from compactor.config.units import count_noun
from compactor.constants import HOUR_MS
from compactor.control.logs import pause_reason
from compactor.control.state import RoundStage
from compactor.control.summary import SegmentSummary
from compactor.daemon.partition_cache import PartitionHistory, PartitionSummaryCache
from compactor.daemon.scheduling import (
    DaemonAction,
    Due,
    JobResult,
    PartitionJob,
    PartitionSchedule,
    new_partition_schedule,
    with_failed_poll,
    with_pause_and_request,
    with_poll_result,
)
from compactor.errors import CompactorError, NotFound
from compactor.model.ids import PUBLISHING, RoundStatus, TopicPartition
from compactor.model.plan import CompactionPlan
from compactor.model.segment import StrictFrozenModel
from compactor.round.compaction import RoundReport
from compactor.service import EventLogger, ServiceStatus
from compactor.storage.port import ObjectStore
from compactor.upkeep.retire import RetireReport
from compactor.views.verdict import blocks_of_topics

LEAST_SHARE = 0.05
"""Below this share of the work no expected end is shown."""


@dataclass(frozen=True)
class RunningJobSnapshot:
    """A running job at one moment.

    phase: resume, index (pass 1), rewrite (pass 2 and upload), verify, publish or close; retire for a deletion, output for an output.
    done, total: in ``unit``; the total is 0 if unknown.
    share: share of the whole job that is done, from 0 to 1; below LEAST_SHARE, ``expected_end_ms`` is 0.
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
    """Recorder of one job's progress. Thread-safe. Pass 2 of a round is the second half of the work, because both passes read about as many
    bytes.
    """

    def __init__(self, job: PartitionJob, due: Due | None, begun_ms: int, log: EventLogger) -> None:
        self._job = job
        self._begun_ms = begun_ms
        self._log = log
        self._lock = threading.Lock()
        self._dirty_bytes = due.dirty_bytes if due else 0
        whole = {DaemonAction.RETIRE: "retire", DaemonAction.OUTPUT: "output"}
        self._phase = whole.get(job.action) or ("resume" if due is not None and due.summary.open_run else "index")
        self._entered = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._bytes = 0
        self._groups = 0
        self._plan: CompactionPlan | None = None

    def record_transferred_bytes(self, size: int) -> None:
        with self._lock:
            self._bytes += size

    def record_round_stage(self, stage: RoundStage, plan: CompactionPlan) -> None:
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
        return self._plan.run_id if self._plan else ""

    def running_job(self, now_ms: int) -> RunningJobSnapshot:
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
        """Seconds of each phase; the last one up to now."""
        with self._lock:
            return self._seconds | {self._phase: self._seconds.get(self._phase, 0.0) + time.monotonic() - self._entered}

    def _enter_phase(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._entered
        self._phase, self._entered = phase, now


# Seven days of figures: one object of the control store, which any daemon overwrites once an hour. Daemons that write at the same time may
# lose each other's latest hour.


TREND_KEY: Final = "trend/week.json.z"
MOST_HOURS: Final = 7 * 24
MOST_TOPICS: Final = 100
"""Largest number of topics with figures of their own, so that the object stays below a few hundred KiB."""
RECLAIMED_KNOWN_MS: Final = 24 * HOUR_MS
"""How far back partitions report what deletions have freed."""


class HourlyStorageFigures(NamedTuple):
    """Bytes in one hour: stored (also replaced segments that wait for deletion), not clean, and deleted."""

    hour_ms: int
    stored: int
    dirty: int
    reclaimed: int


class TierStorageTrend(StrictFrozenModel):
    hours: tuple[HourlyStorageFigures, ...] = ()
    topics: dict[str, tuple[HourlyStorageFigures, ...]] = {}

    @property
    def latest_hour_ms(self) -> int:
        return self.hours[-1].hour_ms if self.hours else -1


NO_TREND: Final = TierStorageTrend()
"""Trend of a tier of which no hour is known."""


def with_current_hour_figures(trend: TierStorageTrend, partitions: Iterable[Due], now_ms: int) -> TierStorageTrend:
    """Trend with the current hour, and figures of the largest MOST_TOPICS topics."""
    hour_ms = now_ms - now_ms % HOUR_MS
    by_topic: dict[str, list[Due]] = defaultdict(list)
    for due in partitions:
        by_topic[due.summary.topic].append(due)
    figures = {topic: _storage_figures_of_hour(found, hour_ms) for topic, found in by_topic.items()}
    largest = sorted(figures, key=lambda topic: (-figures[topic].stored, topic))[:MOST_TOPICS]
    everything = [due for found in by_topic.values() for due in found]
    return TierStorageTrend(
        hours=_with_current_hour_added(trend.hours, _storage_figures_of_hour(everything, hour_ms), everything),
        topics={topic: _with_current_hour_added(trend.topics.get(topic, ()), figures[topic], by_topic[topic]) for topic in largest},
    )


def merged_storage_trend(older: TierStorageTrend, newer: TierStorageTrend) -> TierStorageTrend:
    """Hours of two trends; ``newer`` counts for an hour of both, and for the topics if it has any."""
    topics = {topic: _merged_hourly_figures(older.topics.get(topic, ()), hours) for topic, hours in newer.topics.items()}
    return TierStorageTrend(hours=_merged_hourly_figures(older.hours, newer.hours), topics=topics or older.topics)


def read_storage_trend(control: ObjectStore) -> TierStorageTrend:
    """Stored trend, empty if there is none or it is damaged. Raises StoreError."""
    try:
        return TierStorageTrend.model_validate_json(zlib.decompress(control.get(TREND_KEY)))
    except (NotFound, ValidationError, zlib.error):
        return TierStorageTrend()


def write_storage_trend(control: ObjectStore, trend: TierStorageTrend) -> None:
    control.put(TREND_KEY, zlib.compress(trend.model_dump_json().encode()))


def _storage_figures_of_hour(partitions: Sequence[Due], hour_ms: int) -> HourlyStorageFigures:
    stored = sum(due.summary.bytes + due.summary.waiting_bytes for due in partitions)
    dirty = sum(due.dirty_bytes for due in partitions)
    return HourlyStorageFigures(hour_ms, stored, dirty, 0)


def _with_current_hour_added(
    hours: tuple[HourlyStorageFigures, ...], current: HourlyStorageFigures, partitions: Iterable[Due]
) -> tuple[HourlyStorageFigures, ...]:
    reclaimed = _reclaimed_bytes_by_hour(partitions)
    known_ms = current.hour_ms - RECLAIMED_KNOWN_MS
    return tuple(
        each if each.hour_ms <= known_ms else each._replace(reclaimed=reclaimed.get(each.hour_ms, 0))
        for each in _merged_hourly_figures(hours, (current,))
    )


def _reclaimed_bytes_by_hour(partitions: Iterable[Due]) -> Mapping[int, int]:
    found: dict[int, int] = defaultdict(int)
    for due in partitions:
        for at_ms, size in due.freed:
            found[at_ms - at_ms % HOUR_MS] += size
    return found


def _merged_hourly_figures(
    older: tuple[HourlyStorageFigures, ...], newer: tuple[HourlyStorageFigures, ...]
) -> tuple[HourlyStorageFigures, ...]:
    found = {each.hour_ms: each for each in (*older, *newer)}
    latest = max(found, default=0)
    return tuple(found[hour] for hour in sorted(found) if hour > latest - MOST_HOURS * HOUR_MS)


BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Upper bounds of durations in seconds: rounds of small partitions take half a second, those of large ones hours."""


@dataclass(frozen=True)
class DurationHistogram:
    """Histogram of durations. counts: above the previous and up to each bound in BOUNDS_S; last, those above all. total: in seconds."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    total: float = 0.0

    def with_duration(self, seconds: float) -> DurationHistogram:
        place = bisect_left(BOUNDS_S, seconds)
        counts = tuple(count + (at == place) for at, count in enumerate(self.counts))
        return DurationHistogram(counts, self.total + seconds)

    @property
    def prometheus_buckets(self) -> list[tuple[str, float]]:
        bounds = [str(bound) for bound in BOUNDS_S] + ["+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


@dataclass(frozen=True)
class JobTotals:
    """Sums over all jobs that have ended. durations: by action and status, in seconds. phases: of published rounds."""

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
    """map_budget_bytes: what the job's round could use for its offset map."""
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
    """Status of a daemon. ready: whether the latest scan succeeded and the whole tier was scanned at least once."""

    schedules: tuple[PartitionSchedule, ...]
    running_jobs: tuple[RunningJobSnapshot, ...]
    totals: JobTotals
    disk_used: int
    disk_peak: int
    disk_total: int
    trend: TierStorageTrend = NO_TREND

    @property
    def schedules_with_blocked_rounds(self) -> tuple[PartitionSchedule, ...]:
        return tuple(schedule for schedule in self.schedules if schedule.blocked_reason)


@dataclass(frozen=True)
class PartitionDetails:
    now_ms: int
    schedule: PartitionSchedule
    segments: tuple[SegmentSummary, ...]
    history: PartitionHistory | None
    running_job: RunningJobSnapshot | None


def read_daemon_status(tier: Tier, on_partition: Callable[[], None] = lambda: None) -> DaemonStatus:
    """Status of a tier as a daemon that has just started would see it. Reads every control log and writes nothing. Raises StoreError."""
    names = tier.list_latest_incarnations()
    cache, schedules = PartitionSummaryCache(tier), []
    blocks = blocks_of_topics(tier, sorted({name.topic for name in names}))
    for name, log in zip(names, tier.read_logs(names, on_partition), strict=True):
        now_ms = tier.ports.clock_ms()
        schedule = with_pause_and_request(new_partition_schedule(name, 0, now_ms), pause_reason(tier.catalog.state, name), 0, now_ms)
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
    """Progress of running jobs and totals of finished ones. Updated by one thread; may be read by any."""

    def __init__(self, log: EventLogger, map_budget_bytes: Callable[[TopicPartition], int]) -> None:
        self.totals = JobTotals()
        self._log = log
        self._map_budget = map_budget_bytes
        self._at_work: dict[TopicPartition, JobProgressRecorder] = {}

    def record_job_start(self, job: PartitionJob, schedule: PartitionSchedule, now_ms: int) -> JobProgressRecorder:
        progress = JobProgressRecorder(job, schedule.due, now_ms, self._log)
        self._at_work[job.partition] = progress
        return progress

    def record_job_end(self, result: JobResult) -> None:
        self._at_work.pop(result.job.partition, None)
        self.totals = with_job_counted(self.totals, result, self._map_budget(result.job.partition))

    def running_jobs(self, now_ms: int) -> tuple[RunningJobSnapshot, ...]:
        return tuple(progress.running_job(now_ms) for progress in self._at_work.copy().values())
