"""Leadership of a partition: acquiring and releasing it, heartbeats, and appends that only the leader may make.

Safety comes from the log alone: acquiring is a record with the next compactor epoch, and the fold drops whatever a lower epoch appends
after it. Time only decides when a take-over is attempted. Heartbeats and acquisitions are dated by the store and compared with the store's
own clock, so that the clocks of two machines need not agree.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from compactor.constants import CompactorEpoch, Offset
from compactor.control import ordering
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.records import BrokerLogStartSeen, LeadershipAcquired, LeadershipReleased
from compactor.control.state import CompactorLeader, PartitionState, RoundIntent
from compactor.errors import Fenced, Leased, NotFound, OutOfBudget, StoreError, Unavailable
from compactor.model.plan import CompactionTask

HEARTBEATS_PER_TTL = 3
POLLS_PER_TTL = 10


class RecordRefused(Exception):
    """Raised if an ordering rule refuses a record although its writer leads the partition. The caller then records its plan as undone."""


@dataclass(frozen=True)
class LeaseInfo:
    """Leader of a partition, for display. ``expires_ms``: by the store's clock."""

    holder: str
    epoch: CompactorEpoch
    expires_ms: int


@dataclass
class LeaderStepCounter:
    """Count of the leader's steps. Heartbeats end if the work hangs."""

    steps: int = 0
    steps_at_last_heartbeat: int = 0
    heartbeats_without_step: int = 0
    beaten: bool = False
    """Whether a heartbeat object may exist. A short round writes none."""

    def should_send_heartbeat(self, max_heartbeats_without_step: int) -> bool:
        """Return False after more than ``max_heartbeats_without_step`` heartbeats without a step. Called once per heartbeat."""
        self.heartbeats_without_step = 0 if self.steps != self.steps_at_last_heartbeat else self.heartbeats_without_step + 1
        self.steps_at_last_heartbeat = self.steps
        return self.heartbeats_without_step <= max_heartbeats_without_step


@dataclass(frozen=True)
class Leadership:
    """Leadership under one compactor epoch, as far as this process knows. Every append checks that it still holds."""

    ports: EnvironmentPorts
    log: PartitionLog
    epoch: CompactorEpoch
    pulse: LeaderStepCounter = field(default_factory=LeaderStepCounter, compare=False)

    @property
    def state(self) -> PartitionState:
        return self.log.state

    def append_record(self, body: Any, has_record_taken_effect: Callable[[PartitionState], bool]) -> PartitionState:
        """Append a record unless the state shows its effect already, and return the state in which it has taken effect.

        Raises Fenced if this process no longer leads, RecordRefused if an ordering rule refuses the record, and StoreError if it is unknown
        whether the record is in the log.
        """

        def decide_record_to_append(state: PartitionState) -> Any:
            if has_record_taken_effect(state):
                return None
            self.require_leadership_in_state(state)
            require_effective(self.log, state, body)
            return body

        self.pulse.steps += 1
        return self.log.append_due_records(decide_record_to_append)

    def require_record_appendable(self, body: Any) -> None:
        """Raise Fenced or RecordRefused if ``append_record`` would raise it now. Called before readers learn of the change."""
        self.require_leadership_in_state(self.state)
        require_effective(self.log, self.state, body)

    def require_leadership_in_state(self, state: PartitionState) -> None:
        ordering.require_leadership(state, self.log.incarnation, self.epoch)

    def refresh_and_require_leadership(self, *, caller_only_waits: bool = False) -> PartitionState:
        """Raises Fenced if another process has taken over.

        :param caller_only_waits: whether the call does not count as a step of work.
        """
        self.pulse.steps += not caller_only_waits
        state = self.log.refresh()
        self.require_leadership_in_state(state)
        return state

    def send_heartbeat(self) -> None:
        """Write the heartbeat object. Without it others may take over, but leadership does not end by itself."""
        self.pulse.beaten = True
        body = {"epoch": self.epoch, "holder": self.ports.holder, "incarnation": self.log.incarnation}
        (self.ports.urgent or self.ports.control).put(_heartbeat_object_key(self.log, self.epoch), json.dumps(body).encode())

    def release_leadership(self) -> None:
        """Raise Fenced if the leadership was lost already."""

        def has_record_taken_effect(state: PartitionState) -> bool:
            leader = state.leader
            return leader is not None and leader.released and (leader.epoch, leader.incarnation) == (self.epoch, self.log.incarnation)

        self.append_record(LeadershipReleased(leader_epoch=self.epoch), has_record_taken_effect)
        if self.pulse.beaten:
            self.ports.control.delete([_heartbeat_object_key(self.log, self.epoch)])


def reason_to_refuse_append(log: PartitionLog, state: PartitionState, body: Any) -> str:
    return ordering.find_rule_violation(state, log.build_record_to_append(body))


def require_effective(log: PartitionLog, state: PartitionState, body: Any) -> None:
    problem = reason_to_refuse_append(log, state, body)
    if problem:
        raise RecordRefused(problem)


@contextmanager
def hold_leadership(ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations) -> Iterator[Leadership]:
    """Acquire leadership with a new epoch, send heartbeats while the block runs and makes progress (``lease.stall_ms``), then release it.

    Raises Leased if another compactor stays alive for ``lease.ttl_ms``. Appends within the block raise Fenced once another one has taken
    over.
    """
    leadership = acquire_leadership(ports, log, lease)
    most = lease.stall_ms * HEARTBEATS_PER_TTL // lease.ttl_ms

    def send_heartbeat() -> None:
        if leadership.pulse.should_send_heartbeat(most):
            leadership.send_heartbeat()

    try:
        with ports.keep_alive(send_heartbeat, lease.ttl_ms / 1000 / HEARTBEATS_PER_TTL):
            yield leadership
    finally:
        try:
            leadership.release_leadership()
        except (Fenced, StoreError, RecordRefused):
            pass  # lost already, or it ends with its ttl: neither is worth hiding how the block ended


def acquire_leadership(ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations) -> Leadership:
    """Acquire the next compactor epoch as soon as no other leader is alive.

    Raises Leased after waiting one ttl for another leader, UsageError if the data belongs to another tier or control store, and
    BadControlRecord if the log has a gap.
    """
    ports.require_data_root_ownership()
    # A leader that took a gap for the end of the log would decide from an old state and write its records into the gap.
    state = log.refresh_and_check_gaps()
    ports.require_topic_ownership(state.topic_partition)
    waited_ms = 0.0
    while True:
        holder = _other_living_leader(ports, log, state)
        if holder is None:
            before = state.leader
            epoch = state.next_compactor_epoch
            max_delivery_delay_ms = ports.publisher.max_delivery_delay_ms
            body = LeadershipAcquired(
                leader_epoch=epoch, holder=ports.holder, ttl_ms=lease.ttl_ms, delivery_timeout_ms=max_delivery_delay_ms
            )
            state = log.append_due_records(partial(_acquisition_unless_overtaken, log, before, body))
            leader = state.leader
            if leader is not None and leader.incarnation == log.incarnation and leader.epoch == epoch:
                _delete_heartbeat(ports, log, before)
                return Leadership(ports, log, epoch)
            continue  # somebody was faster
        if waited_ms >= lease.ttl_ms:
            raise Leased(
                f"{state.topic_partition}: {holder.holder} holds the lease with epoch {holder.epoch}",
                hint="It is at work; try again later. Nothing was changed",
            )
        pause_ms = max(1.0, min(lease.ttl_ms / POLLS_PER_TTL, lease.ttl_ms - waited_ms))
        ports.sleep(pause_ms / 1000)
        waited_ms += pause_ms
        state = log.refresh()


def current_lease(ports: EnvironmentPorts, log: PartitionLog) -> LeaseInfo | None:
    """Return None if there is no leader. Writes nothing."""
    leader = log.state.leader
    if leader is None or leader.released:
        return None
    return LeaseInfo(leader.holder, leader.epoch, _last_heartbeat_ms(ports, log, leader) + leader.ttl_ms)


@contextmanager
def send_heartbeats_in_background(send_heartbeat: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Send from a thread while the block runs. Implements HeartbeatRunner."""
    over = threading.Event()

    def send_heartbeats_until_stopped() -> None:
        while not over.wait(interval_s):
            try:
                send_heartbeat()
            except (StoreError, OutOfBudget):
                pass  # the next one may pass; a leader that nobody replaces needs no heartbeat

    thread = threading.Thread(target=send_heartbeats_until_stopped, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _acquisition_unless_overtaken(
    log: PartitionLog, previous_leader: CompactorLeader | None, body: LeadershipAcquired, state: PartitionState
) -> LeadershipAcquired | None:
    """Return None if the leader is no longer the one whose liveness was checked."""
    if state.leader != previous_leader:
        return None
    require_effective(log, state, body)
    return body


def _other_living_leader(ports: EnvironmentPorts, log: PartitionLog, state: PartitionState) -> CompactorLeader | None:
    """An earlier epoch of this process is ignored."""
    leader = state.leader
    if leader is None or leader.released or leader.incarnation == log.incarnation:
        return None
    sign_ms = _last_heartbeat_ms(ports, log, leader)
    # A heartbeat from the future means that the store's clock was set back. A living leader soon sends one by the new clock; a dead one
    # must not lead until then.
    silent = abs(ports.control.clock_ms() - sign_ms) > leader.ttl_ms
    # Read again, because this process may have been suspended between reading the heartbeat and the clock.
    return None if silent and _last_heartbeat_ms(ports, log, leader) == sign_ms else leader


def _last_heartbeat_ms(ports: EnvironmentPorts, log: PartitionLog, leader: CompactorLeader) -> int:
    """Return the store's time; that of the acquisition if the leader has sent no heartbeat, 0 if that record was deleted and the snapshot
    does not state its time.
    """
    try:
        return ports.control.head(_heartbeat_object_key(log, leader.epoch)).modified_ms
    except NotFound:
        pass  # it has not come to its first one yet: what it wrote last is its acquisition
    if leader.since_ms is not None:
        return leader.since_ms
    try:
        return ports.control.head(log.control_record_object_key(leader.slot)).modified_ms
    except NotFound:
        kept = log.reload_from_snapshot().leader  # cut, by somebody who has left its time in the snapshot
        return kept.since_ms or 0 if kept is not None and kept.epoch == leader.epoch else 0


def _delete_heartbeat(ports: EnvironmentPorts, log: PartitionLog, previous_leader: CompactorLeader | None) -> None:
    if previous_leader is not None and not previous_leader.released:
        try:
            ports.control.delete([_heartbeat_object_key(log, previous_leader.epoch)])
        except Unavailable:
            pass  # it is a few bytes that nobody reads again


def _heartbeat_object_key(log: PartitionLog, epoch: CompactorEpoch) -> str:
    return f"{log.prefix}/heartbeat/{epoch:020d}.json"


# Segments that brokers expire while a round is open, on a broker-managed tier (docs/broker-expiry.md).
#
# A broker raises its log start in memory, and writes DELETE_SEGMENT_STARTED afterwards. Its successor may start lower again. A missing
# segment is therefore explained in this order: the metadata topic is read to its end, then the leader is asked for its log start, and the
# highest log start ever reported is recorded in the control log before anything is concluded from it.


def find_expired_segments(leadership: Leadership, segment_ids: Collection[str]) -> frozenset[str]:
    """Return which of these segments brokers have expired: they are deleted, and lie wholly below the highest log start that brokers ever
    reported.

    :param segment_ids: ids of live segments, or of the open round's new ones. Other ids are ignored.

    Raises Unavailable if the partition's leader or the metadata topic cannot be reached, and Fenced if this process no longer leads.
    """
    ports, state = leadership.ports, leadership.state
    tasks = state.intent.plan.tasks if state.intent else ()
    ends = {segment.id: segment.end_offset for segment in state.live} | {task.new_segment_id: task.end_offset for task in tasks}
    ends = {name: end for name, end in ends.items() if name in segment_ids}
    deleted = ports.publisher.find_deleted_segments(state.topic_partition, list(ends)) if ends else frozenset()
    start = record_broker_log_start(leadership) if deleted else 0
    return frozenset(name for name in deleted if ends[name] < start)


def record_broker_log_start(leadership: Leadership) -> int:
    """Return the highest log start that is recorded.

    Raises Unavailable if no leader answers, and Fenced if this process no longer leads.
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
    """Cache for one open round. Expired segments never return."""

    leadership: Leadership
    ids: set[str] = field(default_factory=set)

    def select_expired(self, segment_ids: Iterable[str]) -> frozenset[str]:
        """Brokers are asked only about segments that are not cached as expired."""
        names = frozenset(segment_ids)
        self.ids |= find_expired_segments(self.leadership, names - self.ids)
        return names & self.ids

    def have_more_sources_expired(self, intent: RoundIntent) -> bool:
        """Return whether any source has expired since the last call."""
        before = len(self.ids)
        self.select_expired(intent.plan.source_segment_ids)
        return len(self.ids) > before

    def is_task_expired(self, task: CompactionTask) -> bool:
        """Return whether all sources of a task have expired, or its new segment after it had replaced them."""
        return self.ids.issuperset(task.sources) or task.new_segment_id in self.ids

    def find_partly_expired_task(self, tasks: Iterable[CompactionTask]) -> CompactionTask | None:
        return next((task for task in tasks if self.ids.intersection(task.sources) and not self.is_task_expired(task)), None)

    def state_without_expired_segments(self, state: PartitionState) -> PartitionState:
        """Objects of expired segments can no longer be read."""
        return state.model_copy(update={"live": tuple(segment for segment in state.live if segment.id not in self.ids)})
