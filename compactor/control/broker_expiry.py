"""Segments that brokers expire while a round is open, on a broker-managed tier (docs/broker-expiry.md).

A broker raises its log start in memory, and writes DELETE_SEGMENT_STARTED afterwards. Its successor may start lower again. A missing
segment is therefore explained in this order: the metadata topic is read to its end, then the leader is asked for its log start, and the
highest log start ever reported is recorded in the control log before anything is concluded from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from compactor.constants import Offset
from compactor.control.leadership import Leadership
from compactor.control.records import BrokerLogStartSeen
from compactor.control.state import PartitionState, RoundIntent
from compactor.model.plan import CompactionTask


def find_expired_segments(leadership: Leadership, segment_ids: Collection[str]) -> frozenset[str]:
    """Return the ids of the segments that brokers have expired: they are deleted, and lie wholly below the highest log start that
    brokers ever reported.

    :param segment_ids: ids of live segments, or of the open round's new ones. Other ids are ignored.

    Raises Unavailable if the partition's leader or the metadata topic cannot be reached,
    and Fenced if this process no longer leads the partition.
    """
    ports, state = leadership.ports, leadership.state
    tasks = state.intent.plan.tasks if state.intent else ()
    ends = {segment.id: segment.end_offset for segment in state.live} | {task.new_segment_id: task.end_offset for task in tasks}
    ends = {name: end for name, end in ends.items() if name in segment_ids}
    deleted = ports.publisher.find_segments_deleted_by_brokers(state.topic_partition, list(ends)) if ends else frozenset()
    start = record_and_get_highest_broker_log_start(leadership) if deleted else 0
    return frozenset(name for name in deleted if ends[name] < start)


def record_and_get_highest_broker_log_start(leadership: Leadership) -> int:
    """Ask the partition's leader for its log start, record it if it is the highest so far, and return the highest one recorded.

    Raises Unavailable if no leader answers, and Fenced if this process no longer leads the partition.
    """
    ports, state = leadership.ports, leadership.state
    seen = ports.broker_log_start(state.topic_partition) if ports.broker_log_start is not None else 0
    if seen > state.broker_log_start:
        body = BrokerLogStartSeen(leader_epoch=leadership.epoch, offset=Offset(seen))
        state = leadership.append_record(body, lambda state: state.broker_log_start >= seen)
        leadership.require_leadership_in_state(state)  # it may be another leader that has recorded it
    return state.broker_log_start


@dataclass
class BrokerExpiredSegmentCache:
    """Cache of the segments of one open round that brokers have expired (deleted by retention). Expired segments never return.

    ids: segment ids.
    """

    leadership: Leadership
    ids: set[str] = field(default_factory=set)

    def find_segments_expired_by_brokers(self, segment_ids: Iterable[str]) -> frozenset[str]:
        """Return which of these segments brokers have expired. Brokers are asked only about segments that are not cached as expired."""
        names = frozenset(segment_ids)
        self.ids |= find_expired_segments(self.leadership, names - self.ids)
        return names & self.ids

    def have_sources_expired_since_last_call(self, intent: RoundIntent) -> bool:
        """Ask brokers which source segments of the round have expired by now. Return whether any of them expired since the last call."""
        before = len(self.ids)
        self.find_segments_expired_by_brokers(intent.plan.source_segment_ids)
        return len(self.ids) > before

    def have_task_segments_expired_at_brokers(self, task: CompactionTask) -> bool:
        """Return whether brokers have expired a task's data: either all of its source segments, or its new segment after it had replaced
        them.
        """
        return self.ids.issuperset(task.sources) or task.new_segment_id in self.ids

    def find_task_with_some_sources_expired(self, tasks: Iterable[CompactionTask]) -> CompactionTask | None:
        """Return the first task of whose source segments brokers have expired some, but not all; None if there is no such task."""
        return next(
            (task for task in tasks if self.ids.intersection(task.sources) and not self.have_task_segments_expired_at_brokers(task)), None
        )

    def state_without_expired_segments(self, state: PartitionState) -> PartitionState:
        """Return the partition's state without the live segments that are known to have expired, because their objects can no longer be
        read.
        """
        return state.model_copy(update={"live": tuple(segment for segment in state.live if segment.id not in self.ids)})
