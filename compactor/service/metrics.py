"""What a daemon tells Prometheus: one prefix, base units; beside that, where it is asked for, the names of Kafka's LogCleaner."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from compactor import __version__
from compactor.model.ids import TopicPartition
from compactor.service.scheduling import NEVER, PartitionWatch
from compactor.service.status import Status
from compactor.storage.counting import Usage

OWN = "tiered_compactor"
MOST_LABELLED = 500
"""Partitions with series of their own: those that matter most. The totals are about all."""
REQUESTS = ("get", "head", "put", "copy", "list", "delete", "multipart")


def exposed(families: Iterable[Metric]) -> bytes:
    """Those, and what the process itself takes, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Given(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        return []  # asked at registration, and none of them comes twice

    def collect(self) -> Iterable[Metric]:
        return self._families


def gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{OWN}_{name}", help_text, value=value)


def counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{OWN}_{name}", help_text, value=value)


def by_partition(described: Mapping[str, str], values: Iterable[tuple[TopicPartition, Sequence[float]]]) -> list[GaugeMetricFamily]:
    """Gauges with a series for each partition. ``described``: name -> what it says; ``values``: of a partition one for each of them."""
    labels = ["topic", "partition"]
    families = [GaugeMetricFamily(f"{OWN}_{name}", text, labels=labels) for name, text in described.items()]
    for partition, row in values:
        for family, value in zip(families, row, strict=True):
            family.add_metric([partition.topic, str(partition.partition)], value)
    return families


def by_label(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    """The family with a series for each of these."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def store_families(usage: Usage) -> Iterator[Metric]:
    """What going to the store has come to, and which program this is: the same for every service."""
    build = {"version": __version__, "python": platform.python_version()}
    yield InfoMetricFamily(f"{OWN}_build", "The program that is running", value=build)
    requests = CounterMetricFamily(f"{OWN}_requests", "Requests to the tier", labels=["kind"])
    yield by_label(requests, {kind: usage.requests.get(kind, 0) for kind in REQUESTS})
    yield counter("repeated_requests", "Those that were made again: the store was busy or silent, or broke off", usage.repeats)
    yield counter("read_bytes", "Bytes read from the tier", usage.bytes_read)
    yield counter("written_bytes", "Bytes written to the tier", usage.bytes_written)


def daemon_families(status: Status, *, aliases: bool = True) -> Iterator[Metric]:
    """``aliases``: with Kafka's own names."""
    if aliases:
        yield from _kafka(status)
    yield from _health(status)
    yield from _partitions(status)
    yield from _tier(status)
    yield from _work(status)
    yield from store_families(status.usage)


def _kafka(status: Status) -> Iterator[Metric]:
    """kafka.log:type=LogCleaner and LogCleanerManager: names and units are theirs."""
    values = _cleaner_values(status)
    for name, (kafkas, help_text, factor) in ALIASES.items():
        yield GaugeMetricFamily(kafkas, f"{help_text} (alias of {OWN}_{name})", value=values[name] * factor)
    since = status.now_ms - status.scan_ms if status.scan_ms else 0
    yield GaugeMetricFamily("time_since_last_run_ms", "Since the daemon last looked for work", value=since)


ALIASES = {
    "uncleanable_partitions": ("uncleanable_partitions_count", "Partitions that nothing cleans at present: quarantined or failing", 1),
    "uncleanable_bytes": ("uncleanable_bytes", "Dirty bytes of those partitions", 1),
    "max_dirty_ratio": ("max_dirty_percent", "Dirty ratio of the dirtiest partition", 100),
    "max_compaction_delay_seconds": ("max_compaction_delay_secs", "By how much max_compaction_lag_ms is exceeded, at most", 1),
    "last_round_seconds": ("max_clean_time_secs", "Duration of the last round", 1),
    "last_round_recopy_ratio": ("cleaner_recopy_percent", "Bytes written per bytes read in the last round", 100),
    "last_round_map_ratio": ("max_buffer_utilization_percent", "Share of the map budget that the last round used", 100),
}
"""Our name -> Kafka's, what it says, and Kafka's unit in ours."""


def _cleaner_values(status: Status) -> dict[str, float]:
    seen = [watch.sight for watch in status.watches if watch.sight is not None]
    bad = [watch.sight for watch in status.uncleanable if watch.sight is not None]
    tallies = status.tallies
    return {
        "uncleanable_partitions": len(status.uncleanable),
        "uncleanable_bytes": sum(sight.dirty_bytes for sight in bad),
        "max_dirty_ratio": max((sight.dirty_ratio for sight in seen), default=0),
        "max_compaction_delay_seconds": max((sight.max_delay_ms for sight in seen), default=0) / 1000,
        "last_round_seconds": tallies.last_round_seconds,
        "last_round_recopy_ratio": tallies.last_recopy_percent / 100,
        "last_round_map_ratio": tallies.last_map_percent / 100,
    }


def _health(status: Status) -> Iterator[Metric]:
    for name, value in _cleaner_values(status).items():
        yield gauge(name, ALIASES[name][1], value)
    yield gauge("last_scan_timestamp_seconds", "When the daemon last looked for work; 0 before the first time", status.scan_ms / 1000)
    yield gauge("ready", "1 once the whole tier was looked at and the last look went well", status.ready)
    yield counter("scans", "Looks for work", status.scans)


def _weight(watch: PartitionWatch) -> tuple[bool, int, str]:
    dirty = watch.sight.dirty_bytes if watch.sight else 0
    return (not watch.uncleanable, -dirty, str(watch.name))


def _partitions(status: Status) -> Iterator[Metric]:
    shown = sorted((watch for watch in status.watches if watch.sight is not None), key=_weight)[:MOST_LABELLED]
    described = {
        "first_dirty_offset": f"The first offset that is not clean; of the {MOST_LABELLED} that are uncleanable or have most to clean",
        "end_offset": "Last offset in the tier, of the same",
        "dirty_bytes": "Bytes of segments that are dirty, of the same",
        "live_bytes": "Bytes of segments that readers see, of the same",
    }
    sights = [watch.sight for watch in shown if watch.sight is not None]
    yield from by_partition(described, ((s.name, (s.first_dirty_offset, s.end_offset, s.dirty_bytes, s.bytes)) for s in sights))
    yield gauge("partitions_labelled", "Partitions that have series of their own", len(shown))


def _tier(status: Status) -> Iterator[Metric]:
    seen = [watch.sight for watch in status.watches if watch.sight is not None]
    yield gauge("partitions", "Partitions of the tier", len(status.watches))
    yield gauge("segments", "Segments that readers see", sum(sight.segments for sight in seen))
    yield gauge("partitions_due", "Partitions that a round is due for", sum(sight.due for sight in seen))
    yield gauge("due_bytes", "Dirty bytes of those partitions", sum(sight.dirty_bytes for sight in seen if sight.due))
    yield gauge("total_live_bytes", "Bytes of segments that readers see, all partitions", sum(sight.bytes for sight in seen))
    yield gauge("total_dirty_bytes", "Bytes of segments that are dirty, all partitions", sum(sight.dirty_bytes for sight in seen))
    moments = [sight.retire_at_ms for sight in seen if sight.retire_at_ms < NEVER]
    overdue = max(0, status.now_ms - min(moments)) / 1000 if moments else 0
    yield gauge("partitions_to_retire", "Partitions with objects that wait for deletion", len(moments))
    yield gauge("waiting_bytes", "Replaced bytes that wait for deletion", sum(sight.waiting_bytes for sight in seen))
    lagging = sum(watch.generation is not None and watch.generation.failures > 0 for watch in status.watches)
    yield gauge("generations_failing", "Partitions whose generation could not be brought up to date", lagging)
    yield gauge("retire_overdue_seconds", "Since the first of them could have been deleted", overdue)


def _work(status: Status) -> Iterator[Metric]:
    tallies = status.tallies
    yield gauge("jobs_running", "Rounds and deletions at work now", len(status.running))
    yield gauge("disk_bytes", "Local disk in use", status.disk_used)
    yield gauge("disk_peak_bytes", "The most that ever was in use", status.disk_peak)
    yield gauge("disk_budget_bytes", "Local disk that may be in use", status.disk_total)
    jobs = CounterMetricFamily(f"{OWN}_jobs", "Rounds and deletions, and how they ended", labels=["action", "status"])
    for (action, outcome), count in sorted(tallies.jobs.items()):
        jobs.add_metric([action, outcome], count)
    yield jobs
    rounds = HistogramMetricFamily(f"{OWN}_round_duration_seconds", "Rounds, by how they ended", labels=["status"])
    deletions = HistogramMetricFamily(f"{OWN}_retire_duration_seconds", "Deletions that deleted something", labels=["status"])
    for (action, outcome), taken in sorted(tallies.durations.items()):
        (rounds if action == "round" else deletions).add_metric([outcome], taken.buckets, taken.total)
    phases = HistogramMetricFamily(f"{OWN}_round_phase_duration_seconds", "Phases of rounds that were published", labels=["phase"])
    for phase, taken in tallies.phases.items():
        phases.add_metric([phase], taken.buckets, taken.total)
    yield from (rounds, deletions, phases)
    yield counter("records_read", "Records that rounds have read", tallies.records_read)
    yield counter("records_kept", "Records that rounds have kept", tallies.records_kept)
    yield counter("segments_read", "Segments that rounds have replaced", tallies.segments_read)
    yield counter("segments_written", "Segments that rounds have written", tallies.segments_written)
    yield counter("segments_skipped", "Segments that rounds have left alone", tallies.segments_skipped)
    yield counter("filters_asked", "Bloom filters that alone decided about their segment", tallies.filters_asked)
    yield counter("filters_useless", "Segments that were read for a filter's wrong answer", tallies.filters_useless)
    yield counter("objects_deleted", "Objects deleted or swept", tallies.objects_deleted)
    yield counter("bytes_deleted", "Bytes deleted or swept", tallies.bytes_deleted)
    saved = "By which rounds made segments smaller, of those of which a saving was expected"
    yield counter("saved_bytes", saved, tallies.saved_bytes)
    yield counter("expected_saving_bytes", "By which these rounds were expected to", tallies.expected_saving_bytes)
