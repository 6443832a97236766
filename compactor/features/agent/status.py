"""The agent's status and totals at one moment: the source of its metrics, health and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from compactor.features.agent.plan import PartitionUploadState, UploadFailureReason, UploadOutcome, upload_lag
from compactor.model.ids import TopicPartition
from compactor.service import ServiceStatus
from compactor.service_metrics import (
    MOST_LABELLED,
    OWN,
    add_labelled_values,
    common_metrics,
    make_counters,
    make_gauges,
    partition_gauges,
)

SHARED = ("tier", "store", "generations", "broker")
"""Places where a problem concerns more than one partition, besides the log directories."""


@dataclass(frozen=True)
class AgentCounters:
    """Totals of an agent since it started. uploads: those that added segments. untaken: staged files of which it is unknown whether this
    broker led at their renaming.
    """

    uploads: int = 0
    segments: int = 0
    bytes: int = 0
    broker_failures: int = 0
    refusals: dict[UploadFailureReason, int] = field(default_factory=dict)
    untaken: int = 0


def with_upload_counted(counters: AgentCounters, outcome: UploadOutcome) -> AgentCounters:
    """A stopped upload is not counted."""
    if outcome.stopped:
        return counters
    if outcome.trouble is not None:
        refusals = counters.refusals | {outcome.trouble: counters.refusals.get(outcome.trouble, 0) + 1}
        counters = replace(counters, refusals=refusals)
    return replace(
        counters,
        uploads=counters.uploads + (outcome.segments > 0),
        segments=counters.segments + outcome.segments,
        bytes=counters.bytes + outcome.bytes,
    )


@dataclass(frozen=True)
class AgentStatus(ServiceStatus):
    """Status at one moment.

    ready: whether directories, brokers and tier could be read at the last attempt.
    problems: by a name in SHARED or a log directory.
    """

    problems: Mapping[str, str]
    upload_states: tuple[PartitionUploadState, ...]
    running: Mapping[TopicPartition, int]
    tallies: AgentCounters


def agent_metrics(status: AgentStatus) -> Iterator[Metric]:
    yield from _upload_lag_metrics(status)
    yield from _agent_total_metrics(status)


def _upload_lag_metrics(status: AgentStatus) -> Iterator[Metric]:
    led = [(upload_state, upload_lag(upload_state)) for upload_state in status.upload_states if upload_state.leads]
    led.sort(key=lambda entry: (-entry[1].bytes, entry[0].partition))
    described = {
        "agent_lag_bytes": f"Bytes of sealed segments that are not in the tier, for the {MOST_LABELLED} partitions that lag most",
        "agent_lag_segments": "Sealed segments that are not in the tier, for the same partitions",
        "agent_lag_seconds": "Seconds since the oldest of these segments was sealed, for the same partitions",
        "agent_end_offset": "Last offset in the tier at the latest check, for the same partitions",
    }
    yield from partition_gauges(
        described,
        (
            (upload_state.partition, (found.bytes, found.segments, _age_seconds(found.since_ms, status.now_ms), upload_state.position - 1))
            for upload_state, found in led[:MOST_LABELLED]
            if upload_state.position is not None
        ),
    )
    staged = sum(found.staged for _, found in led)
    oldest = max((_age_seconds(found.since_ms, status.now_ms) for _, found in led), default=0)
    yield from make_gauges(
        (
            (
                "agent_total_lag_bytes",
                "Bytes of sealed segments that are not in the tier, all partitions",
                sum(found.bytes for _, found in led),
            ),
            (
                "agent_total_lag_segments",
                "Sealed segments that are not in the tier, all partitions",
                sum(found.segments for _, found in led),
            ),
            ("agent_staged_segments", "Those of them that the broker has staged for deletion; they are held open", staged),
            (
                "agent_max_lag_seconds",
                "Seconds since the oldest segment outside the tier was sealed; the broker's retention must be longer",
                oldest,
            ),
        )
    )


def _age_seconds(since_ms: int, now_ms: int) -> float:
    """A ``since_ms`` of 0 stands for an unknown time."""
    return max(0, now_ms - since_ms) / 1000 if since_ms else 0


def _agent_total_metrics(status: AgentStatus) -> Iterator[Metric]:
    tallies = status.tallies
    yield from make_gauges(
        (
            ("agent_partitions", "Partitions in the log directories whose topics match", len(status.upload_states)),
            (
                "agent_partitions_led",
                "Partitions in the log directories that this broker leads",
                sum(upload_state.leads for upload_state in status.upload_states),
            ),
        )
    )
    now = Counter(upload_state.trouble for upload_state in status.upload_states if upload_state.leads and upload_state.trouble is not None)
    refused = GaugeMetricFamily(
        f"{OWN}_agent_partitions_refused", "Partitions that are not uploaded at present, by reason", labels=["reason"]
    )
    yield add_labelled_values(refused, {trouble.value: now[trouble] for trouble in UploadFailureReason})
    refusals = CounterMetricFamily(f"{OWN}_agent_refusals", "Failed uploads, by reason", labels=["reason"])
    yield add_labelled_values(refusals, {trouble.value: tallies.refusals.get(trouble, 0) for trouble in UploadFailureReason})
    wrong = GaugeMetricFamily(f"{OWN}_agent_problems", "Problems that concern more than one partition, by place", labels=["where"])
    places = {where: float(where in status.problems) for where in SHARED}
    yield add_labelled_values(wrong, places | {"directory": len(status.problems.keys() - set(SHARED))})
    yield from make_gauges(
        (
            ("agent_uploads_running", "Uploads that run now", len(status.running)),
            ("agent_ready", "1 while directories, brokers and tier can be read", status.ready),
        )
    )
    yield from make_counters(
        (
            ("agent_scans", "Scans of the log directories", status.scans),
            ("agent_uploads", "Uploads that added segments", tallies.uploads),
            ("agent_segments", "Segments uploaded", tallies.segments),
            ("agent_bytes", "Bytes uploaded", tallies.bytes),
            ("agent_staged_not_taken", "Files staged for deletion that were not taken: the leadership is unknown", tallies.untaken),
            ("agent_broker_failures", "Failed requests to the brokers", tallies.broker_failures),
        )
    )
    yield from common_metrics(status.usage)
