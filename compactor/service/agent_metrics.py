"""What an agent tells Prometheus: all of it begins with ``tiered_compactor_agent_``, but for what every service has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from compactor.service.agent_plan import Trouble, lag
from compactor.service.agent_status import SHARED, AgentStatus
from compactor.service.metrics import MOST_LABELLED, OWN, by_label, by_partition, counter, gauge, store_families


def agent_families(status: AgentStatus) -> Iterator[Metric]:
    yield from _lags(status)
    yield from _totals(status)


def _lags(status: AgentStatus) -> Iterator[Metric]:
    led = [(watch, lag(watch)) for watch in status.watches if watch.leads]
    led.sort(key=lambda entry: (-entry[1].bytes, entry[0].name))
    described = {
        "agent_lag_bytes": f"Sealed and not in the tier; of the {MOST_LABELLED} that lag most",
        "agent_lag_segments": "The same in segments",
        "agent_lag_seconds": "Since the oldest of them was sealed",
        "agent_end_offset": "Last offset in the tier, as last seen",
    }
    yield from by_partition(
        described,
        (
            (watch.name, (found.bytes, found.segments, _age(found.since_ms, status.now_ms), watch.position - 1))
            for watch, found in led[:MOST_LABELLED]
            if watch.position is not None
        ),
    )
    yield gauge("agent_total_lag_bytes", "Sealed and not in the tier, all partitions", sum(found.bytes for _, found in led))
    yield gauge("agent_total_lag_segments", "The same in segments", sum(found.segments for _, found in led))
    oldest = max((_age(found.since_ms, status.now_ms) for _, found in led), default=0)
    yield gauge("agent_max_lag_seconds", "Since the oldest of them was sealed: the broker's retention must be longer", oldest)


def _age(since_ms: int, now_ms: int) -> float:
    return max(0, now_ms - since_ms) / 1000 if since_ms else 0


def _totals(status: AgentStatus) -> Iterator[Metric]:
    tallies = status.tallies
    yield gauge("agent_partitions", "Partitions in the log directories whose topics match", len(status.watches))
    yield gauge("agent_partitions_led", "Those that this broker leads", sum(watch.leads for watch in status.watches))
    now = Counter(watch.trouble for watch in status.watches if watch.leads and watch.trouble is not None)
    refused = GaugeMetricFamily(f"{OWN}_agent_partitions_refused", "Those that are not uploaded at present, by reason", labels=["reason"])
    yield by_label(refused, {trouble.value: now[trouble] for trouble in Trouble})
    refusals = CounterMetricFamily(f"{OWN}_agent_refusals", "Uploads that did not come to be, by reason", labels=["reason"])
    yield by_label(refusals, {trouble.value: tallies.refusals.get(trouble, 0) for trouble in Trouble})
    wrong = GaugeMetricFamily(f"{OWN}_agent_problems", "What is wrong for more than one partition, by where it is", labels=["where"])
    places = {where: float(where in status.problems) for where in SHARED}
    yield by_label(wrong, places | {"directory": len(status.problems.keys() - set(SHARED))})
    yield gauge("agent_uploads_running", "Uploads at work now", len(status.running))
    yield gauge("agent_ready", "1 while directories, brokers and tier can be read", status.ready)
    yield counter("agent_scans", "Looks at the log directories", status.scans)
    yield counter("agent_uploads", "Uploads that brought something", tallies.uploads)
    yield counter("agent_segments", "Segments uploaded", tallies.segments)
    yield counter("agent_bytes", "Their bytes", tallies.bytes)
    yield counter("agent_broker_failures", "Times that no broker answered", tallies.broker_failures)
    yield from store_families(status.usage)
