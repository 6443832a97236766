"""The agent's status and totals at one moment, as frozen values: the source of its metrics, health and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from compactor.agent.plan import UploadFailure, UploadOutcome, UploadWatch
from compactor.model.ids import TopicPartition
from compactor.service.service_status import ServiceStatus

SHARED = ("tier", "store", "generations", "broker")
"""Places where a problem concerns more than one partition, besides the log directories."""


@dataclass(frozen=True)
class AgentCounters:
    """Totals of an agent since it started. refusals: failed uploads by reason. untaken: files staged for deletion that were not taken."""

    uploads: int = 0
    segments: int = 0
    bytes: int = 0
    broker_failures: int = 0
    refusals: dict[UploadFailure, int] = field(default_factory=dict)
    untaken: int = 0


def add_upload(so_far: AgentCounters, outcome: UploadOutcome) -> AgentCounters:
    """Return the agent's totals with the outcome of one more upload."""
    if outcome.stopped:
        return so_far
    if outcome.trouble is not None:
        refusals = so_far.refusals | {outcome.trouble: so_far.refusals.get(outcome.trouble, 0) + 1}
        so_far = replace(so_far, refusals=refusals)
    return replace(
        so_far,
        uploads=so_far.uploads + (outcome.segments > 0),
        segments=so_far.segments + outcome.segments,
        bytes=so_far.bytes + outcome.bytes,
    )


@dataclass(frozen=True)
class AgentStatus(ServiceStatus):
    """Status of an agent.

    ready: whether directories, brokers and tier could be read at the last attempt. problems: why not, by place (SHARED, or a log
    directory).
    running: the partitions being uploaded, with the time at which each upload began, in milliseconds.
    """

    problems: Mapping[str, str]
    watches: tuple[UploadWatch, ...]
    running: Mapping[TopicPartition, int]
    tallies: AgentCounters
