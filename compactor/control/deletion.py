"""``topics delete``: a partition leaves the tier. Its objects wait for grace like everything that readers may still be at."""

from __future__ import annotations

from compactor.control.leadership import RequirementFailed, lead
from compactor.control.logs import PartitionLog, tidy
from compactor.control.ports import Lease, Ports
from compactor.control.records import PartitionDeleted
from compactor.control.state import PartitionState
from compactor.errors import UsageError


def give_up_log(log: PartitionLog) -> PartitionState:
    """The way out where a control log is lost for good: it begins anew, empty. The objects of its segments are then unknown to the tier."""
    name = log.name
    topic, _, partition = name.rpartition("-")
    return log.start_over(lambda slot: PartitionState(topic=topic, partition=int(partition), slot=slot, deleted_slot=slot))


def delete_partition(ports: Ports, log: PartitionLog, lease: Lease) -> tuple[PartitionState, PartitionState]:
    """(state before, state in which it counts). A round that is open is given up, an import that is under way is void.

    Raises UsageError for a partition that holds nothing, Leased and Fenced as everything that needs leadership.
    """
    with lead(ports, log, lease) as leadership:
        before = leadership.state
        try:
            body = PartitionDeleted(leader_epoch=leadership.epoch, grace_ms=ports.grace_ms)
            state = leadership.append(body, lambda state: state.deleted_slot > before.slot and not state.live)
        except RequirementFailed as refused:
            raise UsageError(f"{log.state.name} cannot be deleted: {refused}", hint="`topics` lists what the tier holds") from refused
        tidy(log)
        return before, state
