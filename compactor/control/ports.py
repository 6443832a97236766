"""The environment of code that reads or writes control logs: stores, clock, randomness and waiting, passed in as one value.

Code below the composition root never reads a clock or creates an id by itself, so that the simulation runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.remote_log import BrokerView
from compactor.storage.port import ObjectStore
from compactor.tier.ports import SegmentLayout, SegmentPublisher


class HeartbeatRunner(Protocol):
    """Call ``send_heartbeat`` every ``interval_s`` seconds in the background. Errors do not end the ``with`` block."""

    def __call__(self, send_heartbeat: Callable[[], None], interval_s: float) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class ObjectRetention:
    """Settings ``[publish]``: how long replaced objects and unfinished imports are kept, by the store's clock.

    deletes_segments: False if this process leaves all objects of segments to a `retire` with other credentials.
    """

    grace_ms: int = 600_000
    undo_window_ms: int = 0
    orphan_age_ms: int = 86_400_000
    deletes_segments: bool = True


class DataRootOwnershipCheck(Protocol):
    def require_own_root(self, ports: EnvironmentPorts, *, repeat_if_passed_before: bool = False) -> None: ...


class TopicOwnershipCheck(Protocol):
    def require_own_topic(self, ports: EnvironmentPorts, partition: TopicPartition) -> None: ...

    def take_over(self, ports: EnvironmentPorts, partition: TopicPartition) -> str: ...


@dataclass(frozen=True)
class EnvironmentPorts:
    """Access of one process to its environment.

    control: store of control logs, sidecars and scratch objects.
    data: store of the segments below ``layout``; used directly only to probe what the store can do.
    clock_ms: this machine's clock. For display only, never for a decision about deletion or leadership.
    sleep: in seconds.
    holder: name of this process for people.
    urgent: the control store without the rate limits of [limits], for heartbeats, which would otherwise wait behind large transfers until
        the leader seems dead. None for ``control``.
    retention: recorded with every publication, so that no process deletes earlier. None to record nothing.
    brokers: the segments that brokers' readers find now; None if the control log alone decides.
    broker_log_start: raises Unavailable. None if brokers cannot be asked.
    """

    control: ObjectStore
    data: ObjectStore
    layout: SegmentLayout
    publisher: SegmentPublisher
    clock_ms: Callable[[], int]
    sleep: Callable[[float], None]
    random_bytes: Callable[[int], bytes]
    holder: str
    keep_alive: HeartbeatRunner
    urgent: ObjectStore | None = None
    ownership: DataRootOwnershipCheck | None = None
    topic_ownership: TopicOwnershipCheck | None = None
    retention: ObjectRetention | None = None
    brokers: Callable[[TopicPartition], BrokerView] | None = None
    broker_log_start: Callable[[TopicPartition], int] | None = None

    def require_data_root_ownership(self, *, repeat_if_passed_before: bool = False) -> None:
        """Raise UsageError if the data root belongs to another tier."""
        if self.ownership is not None:
            self.ownership.require_own_root(self, repeat_if_passed_before=repeat_if_passed_before)

    def require_topic_ownership(self, partition: TopicPartition) -> None:
        """Raise UsageError if another control store compacts the partition's topic."""
        if self.topic_ownership is not None:
            self.topic_ownership.require_own_topic(self, partition)

    @property
    def grace_ms(self) -> int | None:
        return self.retention.grace_ms if self.retention else None

    def new_id(self) -> str:
        """Return a random id, 16 bytes as Kafka's Uuid prints them. It never begins with a dash (as Kafka's ``Uuid.randomUuid``), because a
        command line would take it for an option.
        """
        while (made := encode_segment_id(self.random_bytes(16))).startswith("-"):
            pass
        return made


@dataclass(frozen=True)
class LeaseDurations:
    """Settings ``[lease]``, which affect liveness only.

    ttl_ms: how long a leader without heartbeats counts as alive.
    stall_ms: time without a step of work after which a leader stops its heartbeats.
    """

    ttl_ms: int = 30_000
    stall_ms: int = 3_600_000
