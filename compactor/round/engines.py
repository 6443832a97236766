"""The seam to work outside of this process: what such an engine is told of a round, before and after it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from compactor.round.plan import RoundFacts
from compactor.round.ports import Check, Worker, WorkStats
from compactor.round.skip import CleanVerdicts


class RemoteWorker(Worker, Protocol):
    """A Worker outside of this process, with a pass 1 of its own."""

    def scout(self, facts: RoundFacts, check: Check) -> CleanVerdicts:
        """What the plan can leave out, of a round that is due. ``check``: raises Fenced. Raises BadData, StoreError, OutOfBudget."""

    def close(self) -> None:
        """Forgets what ``scout`` keeps for a plan that did not come. Raises nothing."""


@dataclass(frozen=True)
class Engine:
    """Who works on a round where it is not this process: ``worker_of`` is given where to note what it cost."""

    map_engine: str
    worker_of: Callable[[WorkStats], RemoteWorker]
