"""What the daemon tells Prometheus. Names are those of Kafka's LogCleaner and LogCleanerManager where there is one, else ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compactor.round.compaction import RoundReport
from compactor.service.jobs import Done
from compactor.service.scheduling import NEVER, Job, PartitionWatch
from compactor.storage.counting import Usage
from compactor.upkeep.retire import RetireReport

OWN = "tiered_compactor"


@dataclass(frozen=True)
class Tallies:
    """What this process has done so far. Times in seconds, sizes in bytes."""

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
    objects_deleted: int = 0
    bytes_deleted: int = 0
    last_round_seconds: float = 0.0
    last_recopy_percent: float = 0.0
    last_map_percent: float = 0.0


def tally(so_far: Tallies, done: Done, map_budget: int) -> Tallies:
    """With one more job."""
    report = done.report
    key = (done.job.action.value, done.status)
    values = so_far.__dict__ | {"jobs": so_far.jobs | {key: so_far.jobs.get(key, 0) + 1}}
    if isinstance(report, RoundReport) and report.status in ("cleaned", "resumed"):
        values |= {
            "records_read": so_far.records_read + report.records_read,
            "records_kept": so_far.records_kept + report.records_kept,
            "segments_read": so_far.segments_read + report.segments_in - report.segments_skipped,
            "segments_written": so_far.segments_written + report.segments_out,
            "segments_skipped": so_far.segments_skipped + report.segments_skipped,
            "filters_asked": so_far.filters_asked + report.filters.asked,
            "filters_useless": so_far.filters_useless + report.filters.useless,
            "round_bytes_read": so_far.round_bytes_read + report.bytes_read,
            "round_bytes_written": so_far.round_bytes_written + report.bytes_written,
            "last_round_seconds": done.seconds,
            "last_recopy_percent": 100 * report.bytes_written / report.bytes_read if report.bytes_read else 0.0,
            "last_map_percent": 100 * report.peak_map_bytes / map_budget if map_budget else 0.0,
        }
    if isinstance(report, RetireReport):
        values |= {
            "objects_deleted": so_far.objects_deleted + len(report.deleted) + len(report.swept),
            "bytes_deleted": so_far.bytes_deleted + report.bytes,
        }
    return Tallies(**values)


@dataclass(frozen=True)
class Status:
    """The daemon at one moment, for metrics, health and the status page. Milliseconds and bytes.

    ``ready``: it has looked at the whole tier and the last scan went well; ``problem``: why not. ``scan_ms``: of the last scan, 0 before
    the first.
    """

    holder: str
    tier: str
    now_ms: int
    started_ms: int
    scans: int
    scan_ms: int
    ready: bool
    stopping: bool
    problem: str
    watches: tuple[PartitionWatch, ...]
    running: tuple[Job, ...]
    usage: Usage
    tallies: Tallies
    disk_used: int
    disk_peak: int
    disk_total: int

    @property
    def uncleanable(self) -> tuple[PartitionWatch, ...]:
        return tuple(watch for watch in self.watches if watch.uncleanable)


class Exporter:
    """Metrics from a status that is taken when somebody asks."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Families(status))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Families(Collector):
    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # asked at registration: there is no status yet

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _kafka(status)
        yield from _partitions(status)
        yield from _own(status)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{OWN}_{name}", help_text, value=value)


def _kafka(status: Status) -> Iterator[Metric]:
    seen = [watch.sight for watch in status.watches if watch.sight is not None]
    bad = [watch.sight for watch in status.uncleanable if watch.sight is not None]
    tallies = status.tallies
    yield _gauge(
        "uncleanable_partitions_count", "Partitions that nothing cleans at present: quarantined or failing", len(status.uncleanable)
    )
    yield _gauge("uncleanable_bytes", "Dirty bytes of those partitions", sum(sight.dirty_bytes for sight in bad))
    yield _gauge(
        "max_dirty_percent", "Dirty ratio of the dirtiest partition, in percent", max((100 * s.dirty_ratio for s in seen), default=0)
    )
    delays = (sight.max_delay_ms for sight in seen)
    yield _gauge("max_compaction_delay_secs", "By how much max_compaction_lag_ms is exceeded, at most", max(delays, default=0) / 1000)
    since = status.now_ms - status.scan_ms if status.scan_ms else 0
    yield _gauge("time_since_last_run_ms", "Since the daemon last looked for work", since)
    yield _gauge("max_clean_time_secs", "Of the last round", tallies.last_round_seconds)
    yield _gauge("cleaner_recopy_percent", "Bytes written per bytes read in the last round", tallies.last_recopy_percent)
    yield _gauge("max_buffer_utilization_percent", "Of the map budget, in the last round", tallies.last_map_percent)


def _partitions(status: Status) -> Iterator[Metric]:
    labels = ["topic", "partition"]
    first_dirty = GaugeMetricFamily(f"{OWN}_first_dirty_offset", "The cleaner offset: the first one that is not clean", labels=labels)
    end = GaugeMetricFamily(f"{OWN}_end_offset", "Last offset in the tier", labels=labels)
    dirty = GaugeMetricFamily(f"{OWN}_dirty_bytes", "Bytes of segments that are dirty", labels=labels)
    live = GaugeMetricFamily(f"{OWN}_live_bytes", "Bytes of segments that readers see", labels=labels)
    for watch in status.watches:
        if watch.sight is not None:
            names = [watch.name.topic, str(watch.name.partition)]
            first_dirty.add_metric(names, watch.sight.first_dirty_offset)
            end.add_metric(names, watch.sight.end_offset)
            dirty.add_metric(names, watch.sight.dirty_bytes)
            live.add_metric(names, watch.sight.bytes)
    yield from (first_dirty, end, dirty, live)


def _own(status: Status) -> Iterator[Metric]:
    seen = [watch.sight for watch in status.watches if watch.sight is not None]
    tallies = status.tallies
    yield _gauge(f"{OWN}_partitions", "Partitions of the tier", len(status.watches))
    yield _gauge(f"{OWN}_partitions_due", "Partitions that a round is due for", sum(sight.due for sight in seen))
    waiting = sum(sight.retire_at_ms < NEVER for sight in seen)
    yield _gauge(f"{OWN}_partitions_to_retire", "Partitions with objects that wait for deletion", waiting)
    yield _gauge(f"{OWN}_waiting_bytes", "Replaced bytes that wait for deletion", sum(sight.waiting_bytes for sight in seen))
    yield _gauge(f"{OWN}_jobs_running", "Rounds and deletions at work now", len(status.running))
    yield _gauge(f"{OWN}_ready", "1 once the whole tier was looked at and the last look went well", status.ready)
    yield _gauge(f"{OWN}_disk_bytes", "Local disk in use", status.disk_used)
    yield _gauge(f"{OWN}_disk_peak_bytes", "The most that ever was in use", status.disk_peak)
    yield _gauge(f"{OWN}_disk_budget_bytes", "Local disk that may be in use", status.disk_total)
    yield _counter("scans", "Looks for work", status.scans)
    requests = CounterMetricFamily(f"{OWN}_requests", "Requests to the tier", labels=["kind"])
    for kind in ("get", "head", "put", "list", "delete", "multipart"):
        requests.add_metric([kind], status.usage.requests.get(kind, 0))
    yield requests
    yield _counter("read_bytes", "Bytes read from the tier", status.usage.bytes_read)
    yield _counter("written_bytes", "Bytes written to the tier", status.usage.bytes_written)
    jobs = CounterMetricFamily(f"{OWN}_jobs", "Rounds and deletions, and how they ended", labels=["action", "status"])
    for (action, outcome), count in sorted(tallies.jobs.items()):
        jobs.add_metric([action, outcome], count)
    yield jobs
    yield _counter("records_read", "Records that rounds have read", tallies.records_read)
    yield _counter("records_kept", "Records that rounds have kept", tallies.records_kept)
    yield _counter("segments_read", "Segments that rounds have replaced", tallies.segments_read)
    yield _counter("segments_written", "Segments that rounds have written", tallies.segments_written)
    yield _counter("segments_skipped", "Segments that rounds have left alone", tallies.segments_skipped)
    yield _counter("filters_asked", "Bloom filters that alone decided about their segment", tallies.filters_asked)
    yield _counter("filters_useless", "Segments that were read for a filter's wrong answer", tallies.filters_useless)
    yield _counter("objects_deleted", "Objects deleted or swept", tallies.objects_deleted)
    yield _counter("bytes_deleted", "Bytes deleted or swept", tallies.bytes_deleted)
