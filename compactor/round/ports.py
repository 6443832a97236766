"""What a round is driven with: its parts in their order, the worker among them, and what the worker may ask of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from compactor.control.ordering import Stage
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask


class Check(Protocol):
    """Folds on; raises Fenced. Each call is a step that keeps the lease alive, unless one is ``waiting`` for others and only looks."""

    def __call__(self, *, waiting: bool = False) -> object: ...


class Postponed(Exception):
    """A round has to wait: it would say more to readers than [publish] metadata_records_per_hour leaves. Nothing was announced.

    ``until_ms``: by this machine's clock.
    """

    def __init__(self, reason: str, until_ms: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.until_ms = until_ms


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

    def check(self, *, waiting: bool = False) -> None:
        """Folds on. Raises Fenced when another compactor has taken over; for tasks that take long (``Check``)."""


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
    """What a round cost, beyond what the receipts say. Bytes; ``gate_keys``: whose last records the gate looked up; ``gate_disk_bytes``:
    what it had on the disk at once, 0 where its keys fit the memory; ``bytes_copied``: by the store, within itself."""

    bytes_fetched: int = 0
    bytes_copied: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    map_entries: int = 0
    gate_keys: int = 0
    gate_disk_bytes: int = 0
    sidecar_bytes_written: int = 0
    filters: dict[str, int | float | str] = field(default_factory=dict)
    """What filters did, for run history (round.skip)."""
    expected: dict[str, int] = field(default_factory=dict)
    """What was expected of it when its sources were known (control.savings)."""
    left_alone: str = ""
    """Segments that it did not read, and why (control.left_alone)."""


Stats = dict[str, int | float | str]
FactsT = TypeVar("FactsT")


class RoundWork(Protocol[FactsT]):
    """One way through: facts -> plan -> work. Each part is given what the one before came to; drive calls them in this order."""

    def due(self, state: PartitionState) -> bool:
        """Whether there is anything to do, cheaply and before leadership is taken. Raises BadData."""

    def resume_problem(self, plan: CompactionPlan) -> str:
        """Why this process cannot go on with a plan that it finds open (other settings, other versions), or an empty string."""

    def gathered(self, state: PartitionState, check: Check) -> AbstractContextManager[FactsT | None]:
        """All that the plan is made of, pass 1 included, as one value; None where nothing is due. Gives back what it holds at the end.

        Asked under leadership, of a fresh fold; may take long: ``check`` folds on and raises Fenced, to be called between segments.
        Raises BadData, NotFound, GateFailed, StoreError, OutOfBudget, Postponed: nothing was announced yet.
        """

    def plan(self, facts: FactsT, leader_epoch: int, new_id: Callable[[], str]) -> CompactionPlan | None:
        """Pure: the same arguments give the same plan. None where the facts call for none. Raises OutOfBudget where it cannot be done."""

    def admit(self, plan: CompactionPlan) -> None:
        """Asked before the plan is announced. Raises Postponed."""

    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession, facts: FactsT | None
    ) -> Iterable[CompactionReceipt | CompactionFailure]:
        """As Worker. ``facts``: None where the plan was made by an earlier process."""

    def stats(self, plan: CompactionPlan, receipts: Sequence[CompactionReceipt]) -> Stats:
        """What goes into run history."""

    def reached(self, stage: Stage, plan: CompactionPlan) -> None:
        """Told of each stage; may raise to leave the round where it is."""
