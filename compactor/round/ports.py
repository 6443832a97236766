"""What a round is driven with: a planner, what is gathered for it, a worker, and what the worker may ask of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask


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
    """What filters did, for run history (round.skip)."""


Resumable = Callable[[CompactionPlan], str]
"""Why this process cannot resume that plan (other settings, other versions), or an empty string."""
