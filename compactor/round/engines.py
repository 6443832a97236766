"""The seam to work outside of this process: what such an engine is told of a round, before and after it is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from compactor.control.state import PartitionState
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.plan import Assessment
from compactor.round.ports import Worker, WorkStats
from compactor.round.skip import Scouted


@dataclass(frozen=True)
class Prospect:
    """A round that is due, before it is planned. ``draft``: the plan that leaves out nothing; ``check``: raises Fenced."""

    state: PartitionState
    found: Assessment[RemoteLogSegmentMetadata]
    draft: Callable[[], CompactionPlan]
    check: Callable[[], object]


class RemoteWorker(Worker, Protocol):
    """A Worker outside of this process, with a pass 1 of its own."""

    def scout(self, prospect: Prospect) -> Scouted:
        """What the plan can leave out. Raises BadData, StoreError, OutOfBudget."""

    def close(self) -> None:
        """Forgets what ``scout`` keeps for a plan that did not come. Raises nothing."""


@dataclass(frozen=True)
class Engine:
    """Who works on a round where it is not this process: ``worker_of`` is given where to note what it cost."""

    map_engine: str
    worker_of: Callable[[WorkStats], RemoteWorker]
