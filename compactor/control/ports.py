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
    """Function whose context manager calls ``send_heartbeat`` every ``interval_s`` seconds in the background. Errors of ``send_heartbeat``
    do not end the ``with`` block.
    """

    def __call__(self, send_heartbeat: Callable[[], None], interval_s: float) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class ObjectRetention:
    """Settings ``[publish]``: how long replaced objects and unfinished imports are kept, by the store's clock."""

    grace_ms: int = 600_000
    undo_window_ms: int = 0
    orphan_age_ms: int = 86_400_000


class DataRootOwnershipCheck(Protocol):
    """Check that the data root belongs to this tier (control.identity)."""

    def require_own_root(self, ports: EnvironmentPorts, *, repeat_if_passed_before: bool = False) -> None: ...


class TopicOwnershipCheck(Protocol):
    """Check that this process's control store compacts a topic (control.identity)."""

    def require_own_topic(self, ports: EnvironmentPorts, partition: TopicPartition) -> None: ...

    def take_over(self, ports: EnvironmentPorts, partition: TopicPartition) -> str: ...


@dataclass(frozen=True)
class EnvironmentPorts:
    """Access of one process to its environment: stores, layout, publisher, clock and brokers.

    control: store of control logs, sidecars and scratch objects.
    data: store of the segments below ``layout``; used directly only to probe what the store can do.
    clock_ms: this machine's clock. For display only, never for a decision about deletion or leadership.
    sleep: waits for a number of seconds.
    holder: name of this process for people.
    urgent: the control store without the rate limits of [limits], for heartbeats, which would otherwise wait behind large transfers until
        the leader seems dead. None for ``control``.
    retention: recorded with every publication, so that no process deletes earlier. None to record nothing.
    brokers: partition -> the segments that its brokers' readers find now; None if the control log alone decides.
    broker_log_start: partition -> its leader's log start offset; raises Unavailable. None if brokers cannot be asked.
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
        """Raise UsageError if the data root belongs to another tier. Called before anything is written or swept."""
        if self.ownership is not None:
            self.ownership.require_own_root(self, repeat_if_passed_before=repeat_if_passed_before)

    def require_topic_ownership(self, partition: TopicPartition) -> None:
        """Raise UsageError if another control store compacts the partition's topic. Called before the partition is led."""
        if self.topic_ownership is not None:
            self.topic_ownership.require_own_topic(self, partition)

    @property
    def grace_ms(self) -> int | None:
        """Time for which segments are kept after readers stopped using them, to be recorded with them."""
        return self.retention.grace_ms if self.retention else None

    def new_id(self) -> str:
        """Return a random id, 16 bytes as Kafka's Uuid prints them. It never begins with a dash, which a command line would take for an
        option (Kafka's ``Uuid.randomUuid`` avoids it too).
        """
        while (made := encode_segment_id(self.random_bytes(16))).startswith("-"):
            pass
        return made


@dataclass(frozen=True)
class LeaseDurations:
    """Times of the settings ``[lease]``, which affect liveness only.

    ttl_ms: how long a leader without heartbeats counts as alive.
    stall_ms: time without a step of work after which a leader stops its heartbeats.
    """

    ttl_ms: int = 30_000
    stall_ms: int = 3_600_000
