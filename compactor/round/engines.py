"""Port for engines that do a round's work outside of this process, such as Spark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from compactor.control.state import PartitionState
from compactor.model.plan import CompactionPlan
from compactor.round.plan import PlanInputs
from compactor.round.ports import LeadershipCheck, PlanWorker, RoundCosts
from compactor.round.skip import CleanSegmentVerdicts

DraftPlanAtTimeFunction = Callable[[int], CompactionPlan | None]
"""Returns the plan that would be made at a time in milliseconds, or None if no round would be due then."""


class RemoteWorker(PlanWorker, Protocol):
    """Worker that runs outside of this process and finds the surviving records (pass 1) itself."""

    def choose_plan_time_ms(self, state: PartitionState, now_ms: int, draft_plan_at_time: DraftPlanAtTimeFunction) -> int:
        """Return the cleaner's time for a new plan: the start of an interrupted pass 1 that can be resumed, else ``now_ms``.

        :param draft_plan_at_time: returns the plan that would be made at a given time, to find out whether pass 1 was run for an equal
            plan.
        """
        return now_ms

    def find_skippable_clean_segments(self, plan_inputs: PlanInputs, check: LeadershipCheck) -> CleanSegmentVerdicts:
        """Run pass 1 and return which clean segments the plan can skip. Raises BadData, StoreError, OutOfBudget.

        :param check: called from time to time; raises Fenced if leadership is lost.
        """

    def delete_unused_scan_results(self) -> None:
        """Delete results of ``find_skippable_clean_segments`` that no plan used, if there are any. Raises nothing."""


@dataclass(frozen=True)
class RemoteEngine:
    """Engine that runs a round's work outside of this process.

    create_remote_worker: creates the worker, and receives the statistics that the worker fills in.
    """

    map_engine: str
    create_remote_worker: Callable[[RoundCosts], RemoteWorker]
