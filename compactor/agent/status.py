"""The agent's status and totals at one moment, as frozen values: the source of its metrics, health and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from compactor.agent.plan import PartitionUploadState, UploadFailureReason, UploadOutcome
from compactor.model.ids import TopicPartition
from compactor.service.service_status import ServiceStatus

SHARED = ("tier", "store", "generations", "broker")
"""Places where a problem concerns more than one partition, besides the log directories."""


@dataclass(frozen=True)
class AgentCounters:
    """Totals of an agent since it started.

    uploads: number of uploads that added segments to the tier.
    segments, bytes: number and size of the added segments.
    refusals: number of failed uploads by reason.
    untaken: number of files staged for deletion that were not uploaded, because it is unknown whether this broker led the partition when it
        renamed them for deletion.
    """

    uploads: int = 0
    segments: int = 0
    bytes: int = 0
    broker_failures: int = 0
    refusals: dict[UploadFailureReason, int] = field(default_factory=dict)
    untaken: int = 0


def with_upload_counted(counters: AgentCounters, outcome: UploadOutcome) -> AgentCounters:
    """Return the agent's totals with one more upload, which had this outcome. An upload that was stopped is not counted."""
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
    """Status of an agent.

    ready: whether directories, brokers and tier could be read at the last attempt.
    problems: reason of each present problem, by the thing that failed: a name in SHARED ("tier", "broker" ...) or a log directory.
    running: the partitions being uploaded, with the time at which each upload began, in milliseconds.
    """

    problems: Mapping[str, str]
    upload_states: tuple[PartitionUploadState, ...]
    running: Mapping[TopicPartition, int]
    tallies: AgentCounters
