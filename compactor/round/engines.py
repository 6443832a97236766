"""The seam to work outside of this process: what such an engine is told of a round, before and after it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from compactor.control.state import PartitionState
from compactor.model.plan import CompactionPlan
from compactor.round.plan import RoundFacts
from compactor.round.ports import Check, Worker, WorkStats
from compactor.round.skip import CleanVerdicts

DraftAt = Callable[[int], CompactionPlan | None]
"""What would be planned if it were this late (ms); None where nothing were due."""


class RemoteWorker(Worker, Protocol):
    """A Worker outside of this process, with a pass 1 of its own."""

    def begun_ms(self, state: PartitionState, now_ms: int, draft_at: DraftAt) -> int:
        """The cleaner's time for a new plan: that of a pass 1 that broke off, if there is one to go on with, else ``now_ms``."""

    def scout(self, facts: RoundFacts, check: Check) -> CleanVerdicts:
        """What the plan can leave out, of a round that is due. ``check``: raises Fenced. Raises BadData, StoreError, OutOfBudget."""

    def close(self) -> None:
        """Forgets what ``scout`` keeps for a plan that did not come. Raises nothing."""


@dataclass(frozen=True)
class Engine:
    """Who works on a round where it is not this process: ``worker_of`` is given where to note what it cost."""

    map_engine: str
    worker_of: Callable[[WorkStats], RemoteWorker]
