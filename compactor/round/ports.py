"""Ports of a round: the steps that the driver calls, the worker among them, and what the worker can ask of the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from compactor.constants import CompactorEpoch
from compactor.control.records import ScratchObject
from compactor.control.stages import RoundStage
from compactor.control.state import PartitionState, RoundIntent
from compactor.model.base import ReasonOrEmpty
from compactor.model.keyless import KeylessRecords
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask

OVERDUE: Final = "overdue"
"""Kind of the failure of a round that was open for too long. It is not tried again at once."""


class LeadershipCheck(Protocol):
    """Function that replays new control records and raises Fenced if another compactor has taken over.

    Each call counts as progress, unless ``caller_only_waits`` is set. The lease is renewed only while there is progress.
    """

    def __call__(self, *, caller_only_waits: bool = False) -> object:
        """Raise Fenced if another compactor leads.

        :param caller_only_waits: the caller only waits for others, so that the call does not count as progress.
        """


class RoundPostponedError(Exception):
    """Raised if a round must wait because it would exceed [publish] metadata_records_per_hour. No plan was announced.

    until_ms: when to try again, by this machine's clock.
    """

    def __init__(self, reason: str, until_ms: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.until_ms = until_ms


class RoundDriverServicesForWorker(Protocol):
    """Interface through which a worker reaches the round's driver while it works on a plan: the partition's state, scratch objects and the
    check for leadership.
    """

    @property
    def state(self) -> PartitionState:
        """Return the partition's state, in which the plan is the open intent. ``state.live`` has the metadata of the plan's sources."""

    @property
    def scratch_objects_of_earlier_survivor_scan(self) -> tuple[ScratchObject, ...]:
        """Return the scratch objects with the result of pass 1 that an earlier attempt at this plan stored; empty if there are none."""

    def scratch_object_key(self, object_name: str) -> str:
        """Return the control store key for a scratch object of this run. The object is deleted after the run has ended."""

    def record_scratch_objects_of_survivor_scan(self, objects: Sequence[ScratchObject]) -> None:
        """Record in the control log that these existing scratch objects are the result of pass 1. Raises Fenced."""

    def raise_if_leadership_lost(self, *, caller_only_waits: bool = False) -> None:
        """Replay new control records; raise Fenced if another compactor has taken over.

        :param caller_only_waits: the caller only waits for others, so that the call does not count as progress that renews the lease.
        """


class PlanWorker(Protocol):
    """Executor of a plan that is recorded in the control log. It fetches the source segments, cleans them in two passes, has the output
    checked independently, uploads the new segments under the ids that the plan names, and reads them back.

    It yields one outcome per task, in any order. The driver records receipts as they come and stops at the first failure.

    Objects are created, never overwritten: an existing object with an equal digest means that the task is done, another digest is a
    failure. Raises StoreError or OutOfBudget if a retry may help; the plan then stays open in the control log, to be resumed.
    """

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: RoundDriverServicesForWorker
    ) -> Iterable[CompactionReceipt | CompactionFailure]: ...


@dataclass
class RoundCosts:
    """Costs of a round that the receipts do not contain. Sizes are in bytes.

    gate_keys: number of keys whose latest record the gate checked.
    gate_coverage: share of all keys that the gate checked: 1.0 for all, 0.0 without a gate.
    bytes_copied: bytes that the store copied within itself.
    """

    bytes_fetched: int = 0
    bytes_copied: int = 0
    peak_disk_bytes: int = 0
    peak_map_bytes: int = 0
    map_entries: int = 0
    gate_keys: int = 0
    gate_coverage: float = 0.0
    sidecar_bytes_written: int = 0
    filters: dict[str, int | float | str] = field(default_factory=dict)
    """What Bloom filters did, for run history (round.skip)."""
    keyless: KeylessRecords = field(default_factory=KeylessRecords)
    """Records of the dirty range without a key."""
    bytes_dirty: int = 0
    """Size of the dirty segments that the round rewrites."""
    left_alone: str = ""
    """Segments that the round skipped, and why, as text (control.skipped_ranges)."""


Stats = dict[str, int | float | str]
RoundInputsT = TypeVar("RoundInputsT")


class RoundSteps(Protocol[RoundInputsT]):
    """Steps of a round that the driver calls, in this order: gather inputs (``gather_round_inputs``), make the plan, run its tasks. Each
    step gets the result of the previous one.
    """

    def is_round_due(self, state: PartitionState) -> bool:
        """Return whether a round is due. The check is cheap and needs no leadership. Raises BadData."""

    def round_resumption_problem(self, intent: RoundIntent) -> ReasonOrEmpty:
        """Return why this process cannot resume an open round (other settings, other versions, too old), or an empty string."""

    def log_start_offset_raised_by_retention(self, state: PartitionState) -> int | None:
        """Return the offset to which retention raises the log start before the round is planned, or None if nothing expires. Raises
        StoreError.
        """

    def gather_round_inputs(self, state: PartitionState, check: LeadershipCheck) -> AbstractContextManager[RoundInputsT | None]:
        """Return a context manager that provides the values from which the plan is made, including the result of pass 1; None if no round
        is due. It runs under leadership, on a fresh state, and may take long. When the context ends, the resources of these values are
        released.

        :param check: to be called between segments; it raises Fenced if leadership is lost.
        :raises BadData: or NotFound, GateFailed, StoreError, OutOfBudget, RoundPostponedError. No plan was announced yet.
        """

    def make_plan(self, inputs: RoundInputsT, leader_epoch: CompactorEpoch, new_id: Callable[[], str]) -> CompactionPlan | None:
        """Return the plan for the inputs that ``gather_round_inputs`` provided, or None if they require no round. Pure: the same arguments
        give the same plan.

        Raises OutOfBudget if a group does not fit the disk budget.
        """

    def raise_if_plan_exceeds_record_rate_limit(self, plan: CompactionPlan) -> None:
        """Raise RoundPostponedError if the rate limit on metadata records does not admit the plan now.

        Called before the plan is announced.
        """

    def run_compaction_tasks(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: RoundDriverServicesForWorker, inputs: RoundInputsT | None
    ) -> Iterable[CompactionReceipt | CompactionFailure]:
        """Run the tasks of a plan and yield one receipt or failure per task, in any order.

        :param inputs: None if an earlier process made the plan.
        """

    def stats_for_run_history(self, plan: CompactionPlan, receipts: Sequence[CompactionReceipt]) -> Stats:
        """Return the figures of a round for the run history."""

    def on_stage(self, stage: RoundStage, plan: CompactionPlan) -> None:
        """Handle the event that the round has reached a stage, for example to log it. An exception stops the round, which stays in that
        stage.
        """
