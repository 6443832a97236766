"""What the pipeline is given: stores, a clock, randomness, a way to wait; and the planner and worker that it drives.

Nothing in this package reads a clock or makes an id by itself, so that the simulation runs the very same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from compactor.metadata.records import ScratchObject
from compactor.metadata.state import PartitionState
from compactor.model.ids import segment_id
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.storage.port import ObjectStore


class KeepAlive(Protocol):
    """Calls ``beat`` every ``interval_s`` in the background while the block runs; errors of ``beat`` do not end the block."""

    def __call__(self, beat: Callable[[], None], interval_s: float) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Ports:
    """One process's view of the world.

    ``control`` holds control logs, sidecars and scratch; ``data`` the segments. ``clock_ms`` is this machine's clock and is
    used for what people read, never for a decision about deletion or leadership. ``holder`` names this process to people.
    ``urgent`` is the control store without [limits], for heartbeats: behind gigabytes that wait for their turn a leader would seem dead.
    """

    control: ObjectStore
    data: ObjectStore
    clock_ms: Callable[[], int]
    sleep: Callable[[float], None]
    random_bytes: Callable[[int], bytes]
    holder: str
    keep_alive: KeepAlive
    urgent: ObjectStore | None = None

    def new_id(self) -> str:
        """16 random bytes as Kafka's Uuid prints them; for segments, runs, imports and incarnations.

        Never with a dash in front (Kafka's ``Uuid.randomUuid`` avoids it too): on a command line that would be an option.
        """
        while (made := segment_id(self.random_bytes(16))).startswith("-"):
            pass
        return made


@dataclass(frozen=True)
class Lease:
    """``[lease]``: how long a silent leader counts as alive. Liveness only."""

    ttl_ms: int = 30_000


@dataclass(frozen=True)
class Retention:
    """``[publish]``: how long replaced objects and unfinished imports are kept. Milliseconds by the store's clock."""

    grace_ms: int = 600_000
    undo_window_ms: int = 0
    orphan_age_ms: int = 86_400_000


class Planner(Protocol):
    """Pure: the same arguments give the same plan. None where nothing is due."""

    def __call__(self, state: PartitionState, now_ms: int, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan | None: ...


class Prepare(Protocol):
    """Gathers what the planner needs besides the state: pass 1. Called under leadership before each plan; may take long.

    ``check`` folds on and raises Fenced; to be called between segments. Raises BadData, StoreError, OutOfBudget: nothing was announced yet.
    """

    def __call__(self, state: PartitionState, now_ms: int, check: Callable[[], object]) -> None: ...


class WorkSession(Protocol):
    """What a worker may ask of the driver while it works."""

    @property
    def state(self) -> PartitionState:
        """The folded state in which the plan is the open intent: the metadata of its sources is in ``state.live``."""

    @property
    def survivors(self) -> tuple[ScratchObject, ...]:
        """What an earlier attempt at this very plan stored of pass 1; empty where there is nothing to take up."""

    def scratch_key(self, name: str) -> str:
        """Where in the control store the worker may put a scratch object of this run; swept once the run is closed."""

    def store_survivors(self, objects: Sequence[ScratchObject]) -> None:
        """Records them (the objects exist already). Raises Fenced."""

    def check(self) -> None:
        """Folds on. Raises Fenced when another compactor has taken over; for tasks that take long."""


class Worker(Protocol):
    """Does tasks of an announced plan: fetch, index, rewrite, gate, upload under the announced ids, read back.

    Yields an outcome per task as it is done, in any order; the driver records receipts as they come and stops at the first
    failure. Objects are created, never overwritten; one that exists with equal digest is done, with another one is a
    failure (I7). Raises StoreError or OutOfBudget where trying again later may help: the intent then stays open.
    """

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterable[CompactionReceipt | CompactionFailure]: ...


@dataclass
class WorkStats:
    """What a round cost, beyond what the receipts say. Bytes; ``gate_coverage``: share of the keys that the gate looked up exactly."""

    bytes_fetched: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    map_entries: int = 0
    gate_coverage: float = 0.0
    sidecar_bytes_written: int = 0
    filters: dict[str, int | float | str] = field(default_factory=dict)
    """What filters did, for run history (pipeline.skipping)."""


Resumable = Callable[[CompactionPlan], str]
"""Why this process cannot resume that plan (other settings, other versions), or an empty string."""
