"""Removal of data from the view: a whole partition (``topics delete``), or its beginning (retention and ``topics delete-records``).

The objects wait for grace, because readers may still be reading them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.control.leadership import Leadership, RecordRefused, hold_leadership, require_record_would_take_effect
from compactor.control.log_start import build_log_start_record, segments_removable_below
from compactor.control.logs import PartitionLog, write_snapshot_if_due
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.records import LogStartRaised, PartitionDeleted
from compactor.control.state import PartitionState
from compactor.errors import UsageError
from compactor.model.ids import TopicPartition


def restart_unrecoverable_log_as_empty(log: PartitionLog) -> PartitionState:
    """Restart, as an empty log, a control log that cannot be recovered, and return its state. The tier then no longer knows which objects
    belong to the partition's segments.
    """
    name = TopicPartition.parse_partition_store_prefix(log.name)
    empty = PartitionState(topic=name.topic, partition=name.partition, incarnation=name.incarnation)
    return log.restart_as_empty_log(lambda slot: empty.model_copy(update={"slot": slot, "deleted_slot": slot}))


class PartitionStatesAroundDeletion(NamedTuple):
    """States of a partition directly before its deletion (``before``) and directly after it."""

    before: PartitionState
    after: PartitionState


def delete_partition(
    ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations, deleted_topic_id: TopicId = EMPTY_TOPIC_ID
) -> PartitionStatesAroundDeletion:
    """Delete a partition, and return its states before and after. An open round is undone, and open imports become void.

    :param deleted_topic_id: the topic that the cluster has deleted; empty if a person deletes the partition.

    Raises UsageError if the partition holds nothing, Leased if another compactor leads it, and Fenced if another one takes over meanwhile.
    """
    with hold_leadership(ports, log, lease) as leadership:
        before = leadership.state
        try:
            body = PartitionDeleted(leader_epoch=leadership.epoch, grace_ms=ports.grace_ms, deleted_topic_id=deleted_topic_id)
            state = leadership.append_record(body, lambda state: state.deleted_slot > before.slot and not state.has_segments)
        except RecordRefused as refused:
            raise UsageError(
                f"{log.state.topic_partition} cannot be deleted: {refused}", hint="`topics` lists what the tier holds"
            ) from refused
        write_snapshot_if_due(log)
        return PartitionStatesAroundDeletion(before, state)


def raise_log_start(leadership: Leadership, choose_offset: Callable[[PartitionState], int | None]) -> PartitionState:
    """Raise the log start to the offset that ``choose_offset`` returns, remove the segments wholly below it, and return the new state.

    :param choose_offset: called with the latest state, and again after each change. Returns the new log start, or None to leave it where it
        is.

    Nothing is written if the log start is there already and no segment can be removed. Raises Fenced, RecordRefused if an ordering rule
    refuses the record, and StoreError if it is unknown whether the record was written.
    """

    def decide_record_to_append(state: PartitionState) -> LogStartRaised | None:
        offset = choose_offset(state)
        if offset is None or (offset == state.log_start and not segments_removable_below(state.live, offset)):
            return None
        leadership.require_leadership_in_state(state)
        body = build_log_start_record(state, offset, leadership.epoch, leadership.ports.grace_ms)
        require_record_would_take_effect(leadership.log, state, body)
        return body

    leadership.pulse.steps += 1
    return leadership.log.append_due_records(decide_record_to_append)
