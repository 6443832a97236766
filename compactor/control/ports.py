"""What everything that reads or writes control logs is given: stores, a clock, randomness, a way to wait.

Nothing below the composition root reads a clock or makes an id by itself, so that the simulation runs the very same code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from compactor.control.mirror import BrokersView
from compactor.model.ids import TopicPartition, segment_id
from compactor.storage.port import ObjectStore
from compactor.tier.ports import SegmentLayout, SegmentPublisher


class KeepAlive(Protocol):
    """Calls ``beat`` every ``interval_s`` in the background while the block runs; errors of ``beat`` do not end the block."""

    def __call__(self, beat: Callable[[], None], interval_s: float) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Retention:
    """``[publish]``: how long replaced objects and unfinished imports are kept. Milliseconds by the store's clock."""

    grace_ms: int = 600_000
    undo_window_ms: int = 0
    orphan_age_ms: int = 86_400_000


class Owner(Protocol):
    """Whose the data is: control.identity."""

    def require(self, ports: Ports, *, anew: bool = False) -> None: ...


@dataclass(frozen=True)
class Ports:
    """One process's view of the world.

    ``control`` holds control logs, sidecars and scratch. ``layout`` knows where segments lie and ``publisher`` who is told of them;
    ``data`` is the store below, for probing what it can do. ``clock_ms`` is this machine's clock and is
    used for what people read, never for a decision about deletion or leadership. ``holder`` names this process to people.
    ``retention`` is recorded with what this process publishes (None: nothing is), so that nobody deletes earlier.
    ``ownership`` says whose the data root is (None: nobody asks).
    ``brokers``: what brokers' readers find of a partition now (None: the control log alone says what is live).
    ``urgent`` is the control store without [limits], for heartbeats: behind gigabytes that wait for their turn a leader would seem dead.
    """

    control: ObjectStore
    data: ObjectStore
    layout: SegmentLayout
    publisher: SegmentPublisher
    clock_ms: Callable[[], int]
    sleep: Callable[[float], None]
    random_bytes: Callable[[int], bytes]
    holder: str
    keep_alive: KeepAlive
    urgent: ObjectStore | None = None
    ownership: Owner | None = None
    retention: Retention | None = None
    brokers: Callable[[TopicPartition], BrokersView] | None = None

    def own(self, *, anew: bool = False) -> None:
        """Raises UsageError where the data root is not this tier's: asked before anything is written or swept (control.identity)."""
        if self.ownership is not None:
            self.ownership.require(self, anew=anew)

    @property
    def grace_ms(self) -> int | None:
        """What is recorded with everything that leaves the view."""
        return self.retention.grace_ms if self.retention else None

    def new_id(self) -> str:
        """16 random bytes as Kafka's Uuid prints them; for segments, runs, imports and incarnations.

        Never with a dash in front (Kafka's ``Uuid.randomUuid`` avoids it too): on a command line that would be an option.
        """
        while (made := segment_id(self.random_bytes(16))).startswith("-"):
            pass
        return made


@dataclass(frozen=True)
class Lease:
    """``[lease]``: how long a silent leader counts as alive, and after how long without a step it falls silent. Liveness only."""

    ttl_ms: int = 30_000
    stall_ms: int = 3_600_000
