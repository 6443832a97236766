"""The agent at one moment, as a frozen value, and what it has done so far: what metrics, health and pages are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from compactor.model.ids import TopicPartition
from compactor.service.agent_plan import Trouble, UploadOutcome, UploadWatch
from compactor.service.service_status import ServiceStatus

SHARED = ("tier", "store", "generations", "broker")
"""Where things may be wrong for more than one partition, besides the log directories."""


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
        so_far = replace(so_far, refusals=refusals)
    return replace(
        so_far,
        uploads=so_far.uploads + (outcome.segments > 0),
        segments=so_far.segments + outcome.segments,
        bytes=so_far.bytes + outcome.bytes,
    )


@dataclass(frozen=True)
class AgentStatus(ServiceStatus):
    """``ready``: directories, brokers and tier could be read last time; ``problems``: why not, by where it is (SHARED, or a log directory).

    ``running``: uploads at work, and when each began.
    """

    problems: Mapping[str, str]
    watches: tuple[UploadWatch, ...]
    running: Mapping[TopicPartition, int]
    tallies: AgentTallies
