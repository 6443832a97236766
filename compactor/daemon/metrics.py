"""The daemon's Prometheus metrics, on request also under the names of Kafka's LogCleaner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from compactor.constants import NEVER_MS
from compactor.daemon.scheduling import PartitionSchedule
from compactor.daemon.status import DaemonStatus
from compactor.errors import BlockedCause
from compactor.service_metrics import (
    MOST_LABELLED,
    OWN,
    common_metrics,
    make_counter,
    make_counters,
    make_gauge,
    make_gauges,
    partition_gauges,
)


def daemon_metrics(status: DaemonStatus, *, include_kafka_names: bool = True) -> Iterator[Metric]:
    if include_kafka_names:
        yield from _metrics_under_kafka_names(status)
    yield from _health_metrics(status)
    yield from _partition_metrics(status)
    yield from _tier_metrics(status)
    yield from _job_metrics(status)
    yield from common_metrics(status.usage)


def _metrics_under_kafka_names(status: DaemonStatus) -> Iterator[Metric]:
    """Metrics of kafka.log:type=LogCleaner and LogCleanerManager, in Kafka's units."""
    values = _log_cleaner_values(status)
    for name, (kafkas, help_text, factor) in ALIASES.items():
        yield GaugeMetricFamily(kafkas, f"{help_text} (alias of {OWN}_{name})", value=values[name] * factor)
    since = status.now_ms - status.scan_ms if status.scan_ms else 0
    yield GaugeMetricFamily("time_since_last_run_ms", "Milliseconds since the latest scan for work", value=since)


ALIASES = {
    "uncleanable_partitions": (
        "uncleanable_partitions_count",
        "Partitions that no round can clean until a person acts",
        1,
    ),
    "uncleanable_bytes": ("uncleanable_bytes", "Bytes that wait in partitions that no round can clean until a person acts", 1),
    "max_dirty_ratio": ("max_dirty_percent", "Dirty ratio of the dirtiest partition", 100),
    "max_compaction_delay_seconds": ("max_compaction_delay_secs", "By how much max_compaction_lag_ms is exceeded, at most", 1),
    "last_round_seconds": ("max_clean_time_secs", "Duration of the last round", 1),
    "last_round_recopy_ratio": ("cleaner_recopy_percent", "Bytes written per bytes read in the last round", 100),
    "last_round_map_ratio": ("max_buffer_utilization_percent", "Share of the map budget that the last round used", 100),
}
"""Name of a metric -> Kafka's name for it, its help text, and the factor from its unit to Kafka's."""


def _log_cleaner_values(status: DaemonStatus) -> dict[str, float]:
    """Times are in seconds, shares from 0 to 1."""
    seen = [schedule.due for schedule in status.schedules if schedule.due is not None]
    bad = [schedule.verdict for schedule in status.schedules_with_blocked_rounds if schedule.verdict is not None]
    totals = status.totals
    return {
        "uncleanable_partitions": len(status.schedules_with_blocked_rounds),
        "uncleanable_bytes": sum(one.waiting_bytes for one in bad),
        "max_dirty_ratio": max((one.dirty_ratio for one in seen), default=0),
        "max_compaction_delay_seconds": max((one.max_delay_ms for one in seen), default=0) / 1000,
        "last_round_seconds": totals.last_round_seconds,
        "last_round_recopy_ratio": totals.last_recopy_percent / 100,
        "last_round_map_ratio": totals.last_map_percent / 100,
    }


def _health_metrics(status: DaemonStatus) -> Iterator[Metric]:
    for name, value in _log_cleaner_values(status).items():
        yield make_gauge(name, ALIASES[name][1], value)
    yield from make_gauges(
        (
            ("last_scan_timestamp_seconds", "Time of the latest scan for work; 0 before the first", status.scan_ms / 1000),
            ("ready", "1 once the whole tier was scanned and the latest scan succeeded", status.ready),
        )
    )
    yield make_counter("scans", "Scans for work", status.scans)
    causes = Counter(one.verdict.cause for one in status.schedules_with_blocked_rounds if one.verdict is not None)
    blocked = GaugeMetricFamily(f"{OWN}_blocked_partitions", "Partitions that no round can clean, by cause", labels=["cause"])
    for cause in BlockedCause:
        blocked.add_metric([cause.value], causes[cause.value])
    yield blocked


def _sort_key_by_importance(schedule: PartitionSchedule) -> tuple[bool, int, str]:
    dirty = schedule.due.dirty_bytes if schedule.due else 0
    return (not schedule.blocked_reason, -dirty, str(schedule.partition))


def _partition_metrics(status: DaemonStatus) -> Iterator[Metric]:
    shown = sorted((schedule for schedule in status.schedules if schedule.due is not None), key=_sort_key_by_importance)[:MOST_LABELLED]
    described = {
        "first_dirty_offset": f"First offset that is not clean, for the {MOST_LABELLED} partitions that are blocked or have most to clean",
        "end_offset": "Last offset in the tier, for the same partitions",
        "dirty_bytes": "Bytes of dirty segments, for the same partitions",
        "live_bytes": "Bytes of live segments, for the same partitions",
    }
    found = [(schedule.due.summary, schedule.due.dirty_bytes) for schedule in shown if schedule.due is not None]
    yield from partition_gauges(
        described, ((s.topic_partition, (s.first_dirty_offset, s.end_offset, dirty, s.bytes)) for s, dirty in found)
    )
    yield make_gauge("partitions_labelled", "Partitions that have time series of their own", len(shown))


def _tier_metrics(status: DaemonStatus) -> Iterator[Metric]:
    seen = [schedule.due for schedule in status.schedules if schedule.due is not None]
    due = [startable for schedule in status.schedules if (startable := schedule.startable) is not None]
    moments = [one.retire_at_ms for one in seen if one.retire_at_ms < NEVER_MS]
    overdue = max(0, status.now_ms - min(moments)) / 1000 if moments else 0
    contents = [one.output.content for one in status.schedules if one.output is not None and one.output.content is not None]
    lagging = sum(schedule.output is not None and schedule.output.failures > 0 for schedule in status.schedules)
    yield from make_gauges(
        (
            ("partitions", "Partitions of the tier", len(status.schedules)),
            ("segments", "Live segments", sum(one.summary.segments for one in seen)),
            ("partitions_due", "Partitions for which a round is due, without paused and blocked ones", len(due)),
            (
                "due_bytes",
                "Dirty bytes of partitions for which a round is due, without paused and blocked ones",
                sum(one.dirty_bytes for one in due),
            ),
            ("total_live_bytes", "Bytes of live segments of all partitions", sum(one.summary.bytes for one in seen)),
            ("total_dirty_bytes", "Bytes of dirty segments of all partitions", sum(one.dirty_bytes for one in seen)),
            ("partitions_to_retire", "Partitions with objects that wait for deletion", len(moments)),
            ("waiting_bytes", "Replaced bytes that wait for deletion", sum(one.summary.waiting_bytes for one in seen)),
            ("generations_failing", "Partitions whose output could not be updated", lagging),
            ("rows_not_decoded", "Rows of tables whose key or value has no typed columns", sum(one.undecoded for one in contents)),
            ("retire_overdue_seconds", "Seconds since the first replaced object could have been deleted", overdue),
        )
    )


def _job_metrics(status: DaemonStatus) -> Iterator[Metric]:
    totals = status.totals
    yield from make_gauges(
        (
            ("jobs_running", "Jobs that run now", len(status.running_jobs)),
            ("disk_bytes", "Bytes of local disk in use", status.disk_used),
            ("disk_peak_bytes", "Largest number of bytes of local disk that were in use", status.disk_peak),
            ("disk_budget_bytes", "Bytes of local disk that may be in use", status.disk_total),
        )
    )
    jobs = CounterMetricFamily(f"{OWN}_jobs", "Finished jobs by action and status", labels=["action", "status"])
    for (action, outcome), count in sorted(totals.jobs.items()):
        jobs.add_metric([action, outcome], count)
    yield jobs
    rounds = HistogramMetricFamily(f"{OWN}_round_duration_seconds", "Duration of rounds by status", labels=["status"])
    deletions = HistogramMetricFamily(f"{OWN}_retire_duration_seconds", "Duration of deletions that deleted something", labels=["status"])
    for (action, outcome), taken in sorted(totals.durations.items()):
        (rounds if action == "round" else deletions).add_metric([outcome], taken.prometheus_buckets, taken.total)
    phases = HistogramMetricFamily(f"{OWN}_round_phase_duration_seconds", "Duration of the phases of published rounds", labels=["phase"])
    for phase, taken in totals.phases.items():
        phases.add_metric([phase], taken.prometheus_buckets, taken.total)
    yield from (rounds, deletions, phases)
    yield from make_counters(
        (
            ("records_read", "Records read by rounds", totals.records_read),
            ("records_kept", "Records kept by rounds", totals.records_kept),
            ("segments_read", "Segments replaced by rounds", totals.segments_read),
            ("segments_written", "Segments written by rounds", totals.segments_written),
            ("segments_skipped", "Segments skipped by rounds", totals.segments_skipped),
            ("filters_asked", "Segments for which the Bloom filter alone decided whether to read them", totals.filters_asked),
            ("filters_useless", "Segments read because of a false positive of their Bloom filter", totals.filters_useless),
            ("objects_deleted", "Objects deleted or swept", totals.objects_deleted),
            ("bytes_deleted", "Bytes deleted or swept", totals.bytes_deleted),
            ("saved_bytes", "Bytes by which rounds made segments smaller", totals.saved_bytes),
        )
    )
