"""What the agent tells Prometheus, and its pages: ``/metrics``, ``/healthz``, ``/readyz`` and a plain status page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from html import escape
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from compactor.model.ids import TopicPartition
from compactor.service.agent_plan import Trouble, UploadOutcome, UploadWatch, lag
from compactor.service.metrics import OWN
from compactor.service.pages import HTML, SILENT_MS, STYLE, Answer, plain
from compactor.storage.counting import Usage

MOST_LABELLED = 500
"""Partitions with series of their own: those that lag most. The totals are about all."""


@dataclass(frozen=True)
class AgentTallies:
    """What this process has done so far. ``refusals``: uploads that did not come to be, by their reason."""

    uploads: int = 0
    segments: int = 0
    bytes: int = 0
    broker_failures: int = 0
    refusals: dict[Trouble, int] = field(default_factory=dict)


def counted(so_far: AgentTallies, outcome: UploadOutcome) -> AgentTallies:
    """With one more upload."""
    if outcome.stopped:
        return so_far
    if outcome.trouble is not None:
        refusals = so_far.refusals | {outcome.trouble: so_far.refusals.get(outcome.trouble, 0) + 1}
        return replace(so_far, refusals=refusals)
    return replace(
        so_far,
        uploads=so_far.uploads + (outcome.segments > 0),
        segments=so_far.segments + outcome.segments,
        bytes=so_far.bytes + outcome.bytes,
    )


@dataclass(frozen=True)
class AgentStatus:
    """The agent at one moment. ``ready``: directories, brokers and tier could be read last time; ``problem``: why not."""

    holder: str
    tier: str
    now_ms: int
    scans: int
    scan_ms: int
    ready: bool
    stopping: bool
    problem: str
    watches: tuple[UploadWatch, ...]
    running: tuple[TopicPartition, ...]
    usage: Usage
    tallies: AgentTallies


class AgentPages:
    """Answers by path. ``silent_ms``: since when the agent has not come round."""

    def __init__(self, status: Callable[[], AgentStatus], silent_ms: Callable[[], int], interval_ms: int) -> None:
        self._status = status
        self._silent_ms = silent_ms
        self._limit_ms = interval_ms + SILENT_MS
        self._registry = CollectorRegistry()
        self._registry.register(_AgentFamilies(status))
        ProcessCollector(registry=self._registry)

    def answer(self, path: str) -> Answer:
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/healthz":
            silent = self._silent_ms()
            if silent > self._limit_ms:
                return plain(HTTPStatus.SERVICE_UNAVAILABLE, f"it has not looked for segments since {silent // 1000} s")
            return plain(HTTPStatus.OK, "ok")
        if path == "/readyz":
            status = self._status()
            if status.ready:
                return plain(HTTPStatus.OK, "ok")
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, status.problem or ("it is stopping" if status.stopping else "it is starting"))
        if path == "/":
            return HTTPStatus.OK, HTML, agent_page(self._status()).encode()
        return plain(HTTPStatus.NOT_FOUND, "there are /, /metrics, /healthz and /readyz")


class _AgentFamilies(Collector):
    def __init__(self, status: Callable[[], AgentStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # asked at registration: there is no status yet

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _lags(status)
        yield from _totals(status)


def _lags(status: AgentStatus) -> Iterator[Metric]:
    led = [(watch, lag(watch)) for watch in status.watches if watch.leads]
    led.sort(key=lambda entry: (-entry[1].bytes, entry[0].name))
    labels = ["topic", "partition"]
    size = GaugeMetricFamily(f"{OWN}_agent_lag_bytes", f"Sealed and not in the tier; of the {MOST_LABELLED} that lag most", labels=labels)
    count = GaugeMetricFamily(f"{OWN}_agent_lag_segments", "The same in segments", labels=labels)
    age = GaugeMetricFamily(f"{OWN}_agent_lag_seconds", "Since the oldest of them was sealed", labels=labels)
    end = GaugeMetricFamily(f"{OWN}_agent_end_offset", "Last offset in the tier, as last seen", labels=labels)
    for watch, found in led[:MOST_LABELLED]:
        if watch.position is not None:
            names = [watch.name.topic, str(watch.name.partition)]
            size.add_metric(names, found.bytes)
            count.add_metric(names, found.segments)
            age.add_metric(names, _age(found.since_ms, status.now_ms))
            end.add_metric(names, watch.position - 1)
    yield from (size, count, age, end)
    yield _gauge("agent_total_lag_bytes", "Sealed and not in the tier, all partitions", sum(found.bytes for _, found in led))
    yield _gauge("agent_total_lag_segments", "The same in segments", sum(found.segments for _, found in led))
    oldest = max((_age(found.since_ms, status.now_ms) for _, found in led), default=0)
    yield _gauge("agent_max_lag_seconds", "Since the oldest of them was sealed: the broker's retention must be longer", oldest)


def _age(since_ms: int, now_ms: int) -> float:
    return max(0, now_ms - since_ms) / 1000 if since_ms else 0


def _totals(status: AgentStatus) -> Iterator[Metric]:
    tallies = status.tallies
    yield _gauge("agent_partitions", "Partitions in the log directories whose topics match", len(status.watches))
    yield _gauge("agent_partitions_led", "Those that this broker leads", sum(watch.leads for watch in status.watches))
    refused = GaugeMetricFamily(f"{OWN}_agent_partitions_refused", "Those that are not uploaded at present, by reason", labels=["reason"])
    now = Counter(watch.trouble for watch in status.watches if watch.leads and watch.trouble is not None)
    refusals = CounterMetricFamily(f"{OWN}_agent_refusals", "Uploads that did not come to be, by reason", labels=["reason"])
    for trouble in Trouble:
        refused.add_metric([trouble.value], now[trouble])
        refusals.add_metric([trouble.value], tallies.refusals.get(trouble, 0))
    yield from (refused, refusals)
    yield _gauge("agent_uploads_running", "Uploads at work now", len(status.running))
    yield _gauge("agent_ready", "1 while directories, brokers and tier can be read", status.ready)
    yield _counter("agent_scans", "Looks at the log directories", status.scans)
    yield _counter("agent_uploads", "Uploads that brought something", tallies.uploads)
    yield _counter("agent_segments", "Segments uploaded", tallies.segments)
    yield _counter("agent_bytes", "Their bytes", tallies.bytes)
    yield _counter("agent_broker_failures", "Times that no broker answered", tallies.broker_failures)
    requests = CounterMetricFamily(f"{OWN}_requests", "Requests to the tier", labels=["kind"])
    for kind in ("get", "head", "put", "list", "delete", "multipart"):
        requests.add_metric([kind], status.usage.requests.get(kind, 0))
    yield requests
    yield _counter("read_bytes", "Bytes read from the tier", status.usage.bytes_read)
    yield _counter("written_bytes", "Bytes written to the tier", status.usage.bytes_written)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{OWN}_{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{OWN}_{name}", help_text, value=value)


def agent_page(status: AgentStatus) -> str:
    """Partitions that this broker leads: where the tier ends, what is pending, what is wrong. No script, nothing from elsewhere."""
    state = "stopping" if status.stopping else "ready" if status.ready else "not ready"
    led = sorted((watch for watch in status.watches if watch.leads), key=lambda watch: (watch.trouble is None, watch.name))
    facts = [
        ("tier", status.tier),
        ("agent", status.holder),
        ("state", state + (f": {status.problem}" if status.problem else "")),
        ("at work", ", ".join(map(str, status.running)) or "nothing"),
        ("requests", f"{status.usage.total_requests:,}"),
    ]
    head = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    columns = ("partition", "leader epoch", "tier ends", "high watermark", "segments to upload", "bytes", "state")
    heading = "".join(f"<th>{name}</th>" for name in columns)
    rows = "".join(_row(watch) for watch in led)
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>tiered-compactor agent</title><style>{STYLE}</style></head>"
        f"<body><h1>tiered-compactor agent</h1><table>{head}</table>"
        f"<h2>{len(led)} of {len(status.watches)} partitions led here</h2><table><tr>{heading}</tr>{rows}</table></body></html>\n"
    )


def _row(watch: UploadWatch) -> str:
    found, end = lag(watch), watch.end
    numbers = (
        end.leader_epoch if end else "",
        "" if watch.position is None else watch.position - 1,
        end.high_watermark if end else "",
        found.segments,
        f"{found.bytes:,}",
    )
    bad = " class=bad" if watch.trouble else ""
    told = f"{watch.trouble.value}: {watch.reason}" if watch.trouble else "not looked at yet" if watch.position is None else "ok"
    cells = "".join(f"<td class=n>{number}</td>" for number in numbers)
    return f"<tr><td>{escape(str(watch.name))}</td>{cells}<td{bad}>{escape(told)}</td></tr>"
