"""Metric helpers of daemon and agent: name prefix, base units, Prometheus text format."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from compactor import __version__
from compactor.config.settings import RateLimitSettings
from compactor.model.ids import TopicPartition
from compactor.storage.wrappers import STORE, StoreUsage

OWN = "tiered_compactor"
MOST_LABELLED = 500
"""Number of partitions with time series of their own. Totals cover all partitions."""
MetricNameHelpAndValue = tuple[str, str, float]
"""Name without the common prefix, help text, and value."""
REQUESTS = ("get", "head", "put", "copy", "list", "delete", "multipart")


def render_metrics(families: Iterable[Metric]) -> bytes:
    """Metrics, and those of the process itself, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_ComputedMetricsCollector(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _ComputedMetricsCollector(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        return []  # requested at registration to find duplicates, and there are none

    @override
    def collect(self) -> Iterable[Metric]:
        return self._families


def make_gauge(name: str, help_text: str, value: float) -> Metric:
    """Gauge with one value. ``name`` lacks the program's prefix."""
    return GaugeMetricFamily(f"{OWN}_{name}", help_text, value=value)


def make_counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{OWN}_{name}", help_text, value=value)


def make_gauges(rows: Iterable[MetricNameHelpAndValue]) -> Iterator[Metric]:
    return (make_gauge(*row) for row in rows)


def make_counters(rows: Iterable[MetricNameHelpAndValue]) -> Iterator[Metric]:
    return (make_counter(*row) for row in rows)


def partition_gauges(help_by_name: Mapping[str, str], values: Iterable[tuple[TopicPartition, Sequence[float]]]) -> list[GaugeMetricFamily]:
    """Gauges with one time series per partition of the latest topic of each name.

    :param values: for each partition one value per gauge, in the order of ``help_by_name``.
    """
    labels = ["topic", "partition"]
    families = [GaugeMetricFamily(f"{OWN}_{name}", text, labels=labels) for name, text in help_by_name.items()]
    latest = {name.first_incarnation: row for name, row in sorted(values, key=lambda value: value[0].incarnation)}
    for partition, row in latest.items():
        for family, value in zip(families, row, strict=True):
            family.add_metric([partition.topic, str(partition.partition)], value)
    return families


def add_labelled_values(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def common_metrics(usage: StoreUsage) -> Iterator[Metric]:
    build = {"version": __version__, "python": platform.python_version()}
    yield InfoMetricFamily(f"{OWN}_build", "The program that is running", value=build)
    requests = CounterMetricFamily(f"{OWN}_requests", "Requests to the tier", labels=["kind"])
    yield add_labelled_values(requests, {kind: usage.requests.get(kind, 0) for kind in REQUESTS})
    yield make_counter(
        "repeated_requests", "Requests that were retried because the store was busy, did not answer or broke off", usage.repeats
    )
    waited = CounterMetricFamily(
        f"{OWN}_waited_seconds", "Time for which requests to the tier were delayed, all threads together, by reason", labels=["reason"]
    )
    yield add_labelled_values(waited, {reason: usage.waited_s.get(reason, 0.0) for reason in (*RateLimitSettings.model_fields, STORE)})
    yield from make_counters(
        (
            ("read_bytes", "Bytes read from the tier", usage.bytes_read),
            ("written_bytes", "Bytes written to the tier", usage.bytes_written),
        )
    )
