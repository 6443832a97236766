"""The daemon's loop: finds partitions that need work, and runs jobs in a few threads under common budgets.

Several daemons can share a tier without talking to each other: leases keep them apart, and a random order makes collisions rare.
"""

from __future__ import annotations

import logging
import random
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from heapq import nsmallest

from typing_extensions import override

from compactor.access.tier import Tier, configured_object_retention
from compactor.adapters.brokers.cluster import query_topic_ids
from compactor.bootstrap import kafka_connection_settings
from compactor.config.settings import CleanerSettings, Settings
from compactor.config.units import count_noun, format_size
from compactor.constants import HOUR_MS
from compactor.daemon.partition_cache import PartitionSummaryCache, create_change_feed
from compactor.daemon.scheduling import (
    ROUND_HOLD_MS,
    DaemonAction,
    Due,
    JobOutcome,
    JobResources,
    JobResult,
    OutputSchedule,
    PartitionJob,
    PartitionSchedule,
    check_stores_writable,
    choose_jobs,
    execute_job,
    idle_poll_interval_ms,
    needs_poll,
    new_partition_schedule,
    schedule_restored_after_restart,
    settings_for_parallel_job,
    with_change_hint,
    with_failed_poll,
    with_job_outcome,
    with_pause_and_request,
    with_poll_result,
    with_suspension,
)
from compactor.daemon.status import (
    DaemonStatus,
    JobMonitor,
    PartitionDetails,
    TierStorageTrend,
    merged_storage_trend,
    read_storage_trend,
    with_current_hour_figures,
    write_storage_trend,
)
from compactor.errors import CompactorError, StoreError, bug_reason
from compactor.local.budget import DiskBudget, check_spool_writable
from compactor.model.ids import PUBLISHING, RoundStatus, TopicPartition
from compactor.outputs import OutputReport, configured_output_writer
from compactor.round.compaction import RoundReport, disk_budget_bytes
from compactor.service import EventLogger, InterruptibleStore, PollingLoop, ServiceEventLogger, Stopped
from compactor.upkeep.retire import LEAST_AGE_MS, RetireReport, abort_stale_uploads, delete_missing_topics
from compactor.views.verdict import Block

ASK_TOPICS_MS = 1_200_000
"""How often the cluster is asked whether topics were deleted, more often than answers count, so that it can contradict itself."""
WRITE_CHECK_MS = 30_000
"""How often the daemon checks that it can write into state_dir while everything works."""
POLL_THREADS = 16
"""Partitions polled at the same time. A poll is a few small requests, one after the other."""
MOST_POLLS_PER_SCAN = 2_000
"""Largest number of partitions polled in one scan. The others wait for the next scan, which follows at once."""

DAEMON_JOURNAL = ServiceEventLogger(logging.getLogger(__name__))


class Daemon(PollingLoop[PartitionJob, JobResult]):
    """Scheduler loop over one tier. ``status`` and ``partition_details`` may be called from any thread and make no request.

    :param seed: of the order of partitions; None for a different order in each process.
    """

    def __init__(self, tier: Tier, *, log: EventLogger = DAEMON_JOURNAL, seed: int | None = None) -> None:
        super().__init__(tier, log)
        tier = self._tier
        self._random = random.Random(seed)  # noqa: S311 - only the order of partitions depends on it
        self._cache = PartitionSummaryCache(self._tier)
        self._changes = create_change_feed(self._tier)
        self._suspended: dict[str, Block] = {}
        self._hold_ms = 0
        self._paused: dict[TopicPartition, str] = {}
        self._schedules: dict[TopicPartition, PartitionSchedule] = {}
        self._monitor = JobMonitor(log, lambda name: self._tier.cleaner_settings_for_topic(name.topic).map_budget_bytes)
        self._problem = ""
        self._unwritable = ""
        self._write_check_ms = 0
        self._check_stores = True
        self._scan_incomplete = False
        self._swept_ms = self._started_ms
        self._asked_topics_ms = 0
        self._trend = TierStorageTrend()
        threads = tier.settings.daemon.threads
        self._disk = DiskBudget(_total_disk_budget_bytes(tier, threads))
        self._resources = JobResources(
            self._disk, self.stop, configured_output_writer(tier, lambda store: InterruptibleStore(store, self.stop))
        )

        self._report_deletion_elsewhere()

    def _report_deletion_elsewhere(self) -> None:
        if not self._tier.retention.deletes_segments:
            self._log(
                "this process deletes no segments (retire = false under [publish]):"
                " another one with the right to delete has to run `tiered-compactor retire`"
            )

    # --- the loop ---

    @override
    def _apply_settings(self, settings: Settings) -> None:
        deleted_before = self._tier.retention.deletes_segments
        ports = replace(self._tier.ports, retention=configured_object_retention(settings))
        self._tier = replace(self._tier, settings=settings, ports=ports)
        if deleted_before:
            self._report_deletion_elsewhere()
        self._cache.use_settings_of_tier(self._tier)
        now = self._tier.ports.clock_ms()
        for name, schedule in self._schedules.items():
            self._schedules[name] = replace(schedule, due=self._cache.judge(name, now) or schedule.due)

    @override
    def _scan_interval_s(self) -> float:
        # Return the seconds until the next scan. A random share keeps daemons that started together from scanning together.
        interval_s = self._tier.settings.daemon.interval_ms / 1000
        return 0.0 if self._scan_incomplete else interval_s * (0.9 + 0.2 * self._random.random())

    @override
    def scan(self) -> None:
        now = self._tier.ports.clock_ms()
        try:
            self._poll_change_feed(now)
            self._poll_control_logs(now)
        except Stopped:
            return
        except CompactorError as error:
            if not self._problem:
                self._log(f"the tier cannot be read: {error}", level=logging.ERROR)
            self._problem = str(error)
            return
        if self._problem:
            self._log("the tier can be read again")
        self._problem = ""
        self._scans += 1
        self._scan_ms = now
        self._check_stores_are_writable(now)
        self._abort_abandoned_uploads(now)
        self._delete_removed_topics(now)
        self._record_hourly_storage_figures(now)

    def _record_hourly_storage_figures(self, now_ms: int) -> None:
        # Store this hour's sizes once, if the latest scan polled every partition that needed it.
        if self._scan_incomplete or now_ms - now_ms % HOUR_MS <= self._trend.latest_hour_ms:
            return
        control = self._tier.ports.control
        judged = [schedule.due for schedule in self._schedules.values() if schedule.due is not None]
        try:
            trend = with_current_hour_figures(merged_storage_trend(read_storage_trend(control), self._trend), judged, now_ms)
            write_storage_trend(control, trend)
        except Stopped:
            return
        except CompactorError as error:
            self._log(f"the figures of this hour are not stored: {error}", level=logging.WARNING)
            trend = with_current_hour_figures(self._trend, judged, now_ms)
        self._trend = trend

    def _abort_abandoned_uploads(self, now_ms: int) -> None:
        # Abort uploads of dead writers, at most once per ``orphan_age_ms``.
        if now_ms - self._swept_ms < max(self._tier.retention.orphan_age_ms, LEAST_AGE_MS):
            return
        self._swept_ms = now_ms
        try:
            swept = abort_stale_uploads(self._tier, now_ms)
        except CompactorError as error:
            self._log(f"unfinished uploads were not swept: {error}", level=logging.WARNING)
            return
        if swept:
            self._log(f"swept {len(swept)} unfinished uploads, {swept[0]} among them")

    def _delete_removed_topics(self, now_ms: int) -> None:
        # Ask the cluster at most once per ASK_TOPICS_MS, and only if the settings say so.
        if self._tier.settings.tier.on_topic_deletion == "keep" or now_ms - self._asked_topics_ms < ASK_TOPICS_MS:
            return
        self._asked_topics_ms = now_ms
        try:
            deleted = delete_missing_topics(self._tier, partial(query_topic_ids, kafka_connection_settings(self._tier.settings)))
        except CompactorError as error:
            self._log(f"topics that were deleted are not deleted from the tier for now: {error}", level=logging.WARNING)
            return
        for name in deleted:
            self._log("its topic was deleted, and so is the partition; its objects wait for grace", partition=str(name))

    def _check_stores_are_writable(self, now_ms: int) -> None:
        # Check at the start, after a failed job, and at each scan while writing fails, but not while the tier is idle. No job starts until
        # a check succeeds.
        if not self._unwritable and not self._check_stores and now_ms - self._write_check_ms < WRITE_CHECK_MS:
            return
        stores = bool(self._unwritable) or self._check_stores
        self._write_check_ms, self._check_stores = now_ms, False
        before, self._unwritable = self._unwritable, ""
        try:
            check_spool_writable(self._tier.state_dir)
            if stores:
                check_stores_writable(self._tier)
        except Stopped:
            return
        except CompactorError as error:
            self._unwritable = f"nothing can be written: {error}"
            if not before:
                self._log(f"{self._unwritable}. No round begins until this is solved", level=logging.ERROR)
            return
        if before:
            self._log("writing works again")

    @override
    def start_due_jobs(self) -> list[PartitionJob]:
        if self.stop.event.is_set() or self._unwritable:
            return []
        schedules = list(self._schedules.values())
        self._random.shuffle(schedules)
        threads = self._tier.settings.daemon.threads
        now = self._tier.ports.clock_ms()
        jobs = choose_jobs(schedules, self._running, threads, now, may_begin_rounds=now >= self._hold_ms)
        workers = threads if jobs and jobs[0].exclusive else max(1, threads // max(1, len(jobs) + len(self._running)))
        for job in jobs:
            self._start_job(job, 1 if job.exclusive else threads, workers)
        return jobs

    # --- polling ---

    def _poll_change_feed(self, now_ms: int) -> None:
        report = self._changes.poll_changes(self._tier)
        if report is None:
            return
        if not self._schedules:
            hints = {str(name): hint for name, hint in report.hints.items()}
            poll = idle_poll_interval_ms(len(hints))
            for name, (seen, polled_ms) in self._cache.load_unchanged(hints, poll, now_ms).items():
                self._schedules[name] = self._with_output_schedule(
                    schedule_restored_after_restart(name, report.hints[name], seen, polled_ms, poll)
                )
        schedules = {}
        for name, hint in report.hints.items():
            schedule = self._schedules.get(name)
            if schedule is None or name in report.recreated:
                self._cache.forget_partition(name)
                schedule = self._with_output_schedule(new_partition_schedule(name, hint, now_ms))
            elif hint != schedule.hint:
                schedule = with_change_hint(schedule, hint, now_ms)
            schedule = with_suspension(schedule, report.suspended.get(name.topic), now_ms)
            schedules[name] = with_pause_and_request(schedule, report.paused.get(name, ""), report.requested.get(name, 0), now_ms)
        self._schedules = schedules
        self._report_changed_round_suspensions(report.suspended)
        for why in sorted(set(report.paused.values()) - set(self._paused.values())):
            count = sum(one == why for one in report.paused.values())
            self._log(f"no round begins for {count} partition{'s' * (count != 1)}: {why}")
        if self._paused and not report.paused:
            self._log("no partition is paused any more")
        self._paused = dict(report.paused)

    def _report_changed_round_suspensions(self, suspended_topics: Mapping[str, Block]) -> None:
        before, self._suspended = self._suspended, dict(suspended_topics)
        new: dict[str, list[str]] = {}
        for topic, block in sorted(suspended_topics.items()):
            if topic not in before or before[topic].reason != block.reason:
                new.setdefault(block.reason, []).append(topic)
        for why, topics in new.items():
            self._log(f"no round begins for {_topics_text(topics)}: {why}", level=logging.WARNING)
        if again := sorted(before.keys() - suspended_topics.keys()):
            self._log(f"{_topics_text(again)} {'is' if len(again) == 1 else 'are'} compacted again")

    def _with_output_schedule(self, schedule: PartitionSchedule) -> PartitionSchedule:
        return schedule if self._resources.output is None else replace(schedule, output=OutputSchedule())

    def _poll_control_logs(self, now_ms: int) -> None:
        names = [name for name, schedule in self._schedules.items() if name not in self._running and needs_poll(schedule, now_ms)]
        self._scan_incomplete = len(names) > MOST_POLLS_PER_SCAN
        if self._scan_incomplete:  # partitions that the change feed has reported go first
            names = nsmallest(
                MOST_POLLS_PER_SCAN, names, key=lambda name: (self._schedules[name].idle_polls != 0, self._schedules[name].next_poll_ms)
            )
        if not names:
            return
        with ThreadPoolExecutor(min(POLL_THREADS, len(names)), thread_name_prefix="poll") as pool:
            polls = {name: pool.submit(self._poll_partition, self._schedules[name], now_ms) for name in names}
            self._record_poll_results(polls, now_ms)
        self._cache.save_poll_times()

    def _record_poll_results(self, polls: dict[TopicPartition, Future[Due]], now_ms: int) -> None:
        for name, poll in polls.items():
            schedule = self._schedules[name]
            try:
                self._schedules[name] = with_poll_result(
                    schedule, poll.result(), now_ms, self._random.random(), idle_poll_interval_ms(len(self._schedules))
                )
            except Stopped:
                raise
            except Exception as error:
                if isinstance(error, StoreError) and len(polls) > 1 and all(_failed_by_store(other) for other in polls.values()):
                    raise  # the store is unreachable, not this partition
                reason = str(error) if isinstance(error, CompactorError) else bug_reason(error)
                self._schedules[name] = with_failed_poll(schedule, reason, now_ms)
                if not schedule.unreadable:
                    self._log(reason, level=logging.ERROR, partition=str(name))

    def _poll_partition(self, schedule: PartitionSchedule, now_ms: int) -> Due:
        self.stop.raise_if_stopped()
        return self._cache.poll_partition(schedule.partition, schedule.hint, schedule.due, now_ms)

    # --- jobs ---

    def _start_job(self, job: PartitionJob, parallel_jobs: int, worker_threads: int) -> None:
        tier = replace(self._tier, settings=settings_for_parallel_job(self._tier.settings, parallel_jobs, worker_threads))
        catalog = self._tier.catalog.state
        self._running[job.partition] = job
        schedule, now = self._schedules[job.partition], self._tier.ports.clock_ms()
        slot = schedule.due.summary.slot if schedule.due is not None else -1
        progress = self._monitor.record_job_start(job, schedule, now)
        why = f": {schedule.due.reason}" if schedule.due is not None and job.action is DaemonAction.ROUND else ""
        self._log(f"{job.action.value} begins{why}", level=logging.DEBUG, partition=str(job.partition))

        def run_job() -> None:
            begun = time.monotonic()
            done = execute_job(tier, catalog, job, self._resources, now, progress, log_slot_when_chosen=slot)
            self._done.put(replace(done, seconds=time.monotonic() - begun, phases=progress.phase_seconds(), run_id=progress.run_id))

        threading.Thread(target=run_job, name=f"{job.action.value} {job.partition}", daemon=True).start()

    @override
    def _process_job_result(self, result: JobResult) -> None:
        job, now = result.job, self._tier.ports.clock_ms()
        del self._running[job.partition]
        schedule = self._schedules.get(job.partition) or new_partition_schedule(job.partition, 0, now)  # its topic was deleted meanwhile
        try:
            same = result.log is not None and result.log.name == self._tier.control_log_name(
                job.partition
            )  # the topic may have been recreated meanwhile
            seen = self._cache.cache_summary_of_log(result.log, schedule.hint, now) if result.log is not None and same else None
        except CompactorError:
            seen = None
        until = result.report.until_ms if isinstance(result.report, RoundReport) else 0
        if result.status == RoundStatus.WAITING:
            self._hold_ms = min(until, now + ROUND_HOLD_MS)
        outcome = JobOutcome(result.status, result.reason, seen, until, cause=result.cause)
        if isinstance(result.report, OutputReport):
            report = result.report
            outcome = replace(outcome, written_slot=report.written_slot, next_deletion_ms=report.next_deletion_ms, content=report.content)
        self._check_stores = self._check_stores or result.status in (RoundStatus.FAILED, RoundStatus.OUT_OF_BUDGET)
        if job.partition in self._schedules:
            self._schedules[job.partition] = with_job_outcome(schedule, job, outcome, now, self._tier.lease.ttl_ms)
        self._monitor.record_job_end(result)
        if line := describe_job_result(result):
            segment = result.report.segment if isinstance(result.report, RoundReport) else ""
            self._log(line, level=job_result_log_level(result), partition=str(job.partition), run=result.run_id, segment=segment)

    # --- status ---

    def status(self) -> DaemonStatus:
        tier, now = self._tier, self._tier.ports.clock_ms()
        stopping = self.stop.event.is_set()
        return DaemonStatus(
            holder=tier.ports.holder,
            tier=tier.ports.layout.url,
            now_ms=now,
            started_ms=self._started_ms,
            scans=self._scans,
            scan_ms=self._scan_ms,
            interval_ms=tier.settings.daemon.interval_ms,
            ready=self._scans > 0 and not self._scan_incomplete and not self._problem and not self._unwritable and not stopping,
            stopping=stopping,
            problem=self._problem or self._unwritable,
            schedules=tuple(self._schedules.copy().values()),
            running_jobs=self._monitor.running_jobs(now),
            usage=tier.counters.usage(),
            totals=self._monitor.totals,
            disk_used=self._disk.used,
            disk_peak=self._disk.peak,
            disk_total=self._disk.total,
            trend=self._trend,
        )

    def cleaner_settings_for_topic(self, topic: str) -> CleanerSettings:
        return self._tier.cleaner_settings_for_topic(topic)

    def partition_details(self, partition: TopicPartition) -> PartitionDetails | None:
        schedule, now = self._schedules.get(partition), self._tier.ports.clock_ms()
        if schedule is None:
            return None
        work = next((work for work in self._monitor.running_jobs(now) if work.job.partition == partition), None)
        segments, history = self._cache.live_segments(partition), self._cache.cached_history(partition)
        return PartitionDetails(now, schedule, segments, history, work)


def _topics_text(topics: Sequence[str]) -> str:
    return f"topic {topics[0]}" if len(topics) == 1 else f"{len(topics)} topics ({topics[0]} among them)"


def describe_job_result(result: JobResult) -> str:
    """Line for people, or an empty string if the job did nothing."""
    report = result.report
    if isinstance(report, RoundReport) and result.status in PUBLISHING:
        segments = f"{count_noun(report.segments_in - report.segments_skipped, 'segment')} -> {report.segments_out}"
        records = f"{count_noun(report.records_read, 'record')} -> {report.records_kept:,}"
        line = f"{result.status}, {segments}, {records}, clean up to {report.next_dirty_offset}, {result.seconds:.1f} s"
        return line + (f"; {report.reason}" if report.reason else "")
    if isinstance(report, RoundReport) and result.status == RoundStatus.EXPIRED:
        removed = f"{count_noun(report.segments_expired, 'segment')}, {format_size(report.bytes_expired)}"
        return f"retention removed {removed}; the log starts at {report.log_start_offset}"
    if isinstance(report, RetireReport):
        count = len(report.deleted) + len(report.swept)
        return f"deleted {count_noun(count, 'object')}, {format_size(report.deleted_bytes)}" if count else ""
    if isinstance(report, OutputReport):
        return report.summary
    if result.status in (RoundStatus.NOTHING_TO_DO, RoundStatus.STOPPED):
        return ""
    return f"{result.job.action.value} {result.status}" + (f": {result.reason}" if result.reason else "")


def job_result_log_level(result: JobResult) -> int:
    if result.status in (RoundStatus.FAILED, RoundStatus.QUARANTINED):
        return logging.ERROR
    return logging.WARNING if result.status in (RoundStatus.OUT_OF_BUDGET, RoundStatus.FENCED) else logging.INFO


def _failed_by_store(poll_result: Future[Due]) -> bool:
    return isinstance(poll_result.exception(), StoreError)


def _total_disk_budget_bytes(tier: Tier, threads: int) -> int:
    # "auto": one job's budget times the number of threads, at most the free space.
    cleaner = tier.settings.cleaner
    one = disk_budget_bytes(cleaner, tier.state_dir)
    if cleaner.disk_budget_bytes != "auto":
        return one
    return min(one * threads, shutil.disk_usage(tier.state_dir).free)
