"""Deletion of records by hand (``topics delete-records``): raises a partition's log start, as Kafka's DeleteRecords does."""

from __future__ import annotations

from compactor.access.rounds import new_round
from compactor.access.tier import Tier
from compactor.control.deletion import raise_log_start
from compactor.control.leadership import RequirementFailed, hold_leadership
from compactor.control.logs import cut_if_due
from compactor.control.state import PartitionState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition
from compactor.round.drive import settle_open_intent


def delete_records(opened: Tier, name: TopicPartition, offset: int) -> tuple[PartitionState, PartitionState]:
    """Delete the records below an offset; return the states before and after it.

    An interrupted round is finished or undone first. Segments wholly below the offset wait for grace. Raises UsageError if the offset lies
    outside the log, Leased if another compactor is at work, Fenced and StoreError.
    """
    log = opened.open(name, leads=True)

    def choose(state: PartitionState) -> int | None:
        return None if offset < state.log_start else offset

    with hold_leadership(opened.ports, log, opened.lease) as leadership:
        before = leadership.state
        if leadership.state.intent is not None:
            settle_open_intent(leadership, new_round(opened, name, opened.ports.clock_ms()))
        if not before.live or offset > before.end_offset + 1:
            end = f"it ends at {before.end_offset}" if before.live else "it holds nothing"
            raise UsageError(f"offset {offset} lies beyond {name}: {end}", hint="Nothing was changed. `topics` lists what the tier holds")
        try:
            after = raise_log_start(leadership, choose)
        except RequirementFailed as refused:
            raise UsageError(f"the log start of {name} cannot be raised: {refused}", hint="Nothing was changed") from refused
        cut_if_due(log)
    opened.changes.publish([log])
    return before, after
