"""Who may decide and publish: acquiring and releasing a partition's leadership, heartbeats, and appends that only a leader makes.

Safety comes from the log alone: acquiring is a record with the next compactor epoch, and the fold drops whatever a lower
epoch appends after it. Time only says when it is polite to take over. Heartbeats and the slot of the acquisition are dated
by the store, and compared with the store's own clock, so that the clocks of two machines need not agree.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from compactor.control import ordering
from compactor.control.logs import PartitionLog
from compactor.control.ports import Lease, Ports
from compactor.control.records import LeadershipAcquired, LeadershipReleased
from compactor.control.state import Leader, PartitionState
from compactor.errors import Fenced, Leased, NotFound, OutOfBudget, StoreError, Unavailable

BEATS_PER_TTL = 3
LOOKS_PER_TTL = 10


class RequirementFailed(Exception):
    """The record would not count, though its writer leads: for the caller to turn into "undone" (I6)."""


@dataclass(frozen=True)
class LeaseInfo:
    """For people: who holds the lease and until when it counts as alive, by the store's clock."""

    holder: str
    epoch: int
    expires_ms: int


@dataclass
class Pulse:
    """Whether the work goes on. Heartbeats come from a thread of their own, which would beat for a worker that hangs, too."""

    steps: int = 0
    heard: int = 0
    silent_beats: int = 0
    beaten: bool = False
    """Whether there may be an object of heartbeats: a short round has none."""

    def beats_on(self, most: int) -> bool:
        """Asked once per heartbeat: False once there was no step for more than ``most`` of them. A step brings it back."""
        self.silent_beats = 0 if self.steps != self.heard else self.silent_beats + 1
        self.heard = self.steps
        return self.silent_beats <= most


@dataclass(frozen=True)
class Leadership:
    """This process leads the partition with this epoch, as far as it knows; every append finds out."""

    ports: Ports
    log: PartitionLog
    epoch: int
    pulse: Pulse = field(default_factory=Pulse, compare=False)

    @property
    def state(self) -> PartitionState:
        return self.log.state

    def append(self, body: Any, counted: Callable[[PartitionState], bool]) -> PartitionState:
        """Appends unless ``counted`` says that the state shows it already; returns the state in which it counts.

        Raises Fenced where this process no longer leads, RequirementFailed where a rule of ordering.py stands against it,
        StoreError where it is unknown whether the record is in the log.
        """

        def decide(state: PartitionState) -> Any:
            if counted(state):
                return None
            self.require(state)
            problem = check_before_append(self.log, state, body)
            if problem:
                raise RequirementFailed(problem)
            return body

        self.pulse.steps += 1
        return self.log.transact(decide)

    def foresee(self, body: Any) -> None:
        """Raises what ``append`` would, by the state as last folded: asked before others are told what the record is going to say."""
        self.require(self.state)
        problem = check_before_append(self.log, self.state, body)
        if problem:
            raise RequirementFailed(problem)

    def require(self, state: PartitionState) -> None:
        """Raises Fenced unless this process leads in ``state``."""
        ordering.require_leadership(state, self.log.incarnation, self.epoch)

    def check(self, *, waiting: bool = False) -> PartitionState:
        """Folds on; raises Fenced when somebody has taken over. A step of the work, unless it is only ``waiting``."""
        self.pulse.steps += not waiting
        state = self.log.refresh()
        self.require(state)
        return state

    def beat(self) -> None:
        """Says "alive" to those who wait. Nothing depends on it."""
        self.pulse.beaten = True
        body = {"epoch": self.epoch, "holder": self.ports.holder, "incarnation": self.log.incarnation}
        (self.ports.urgent or self.ports.control).put(_heartbeat_key(self.log, self.epoch), json.dumps(body).encode())

    def release(self) -> None:
        """Raises Fenced where it was lost already."""

        def counted(state: PartitionState) -> bool:
            leader = state.leader
            return leader is not None and leader.released and (leader.epoch, leader.incarnation) == (self.epoch, self.log.incarnation)

        self.append(LeadershipReleased(leader_epoch=self.epoch), counted)
        if self.pulse.beaten:
            self.ports.control.delete([_heartbeat_key(self.log, self.epoch)])


def check_before_append(log: PartitionLog, state: PartitionState, body: Any) -> str:
    """The rules' answer about a record before it is appended: its writer learns why, and the log is spared the record."""
    return ordering.refusal(state, log.candidate(body))


@contextmanager
def lead(ports: Ports, log: PartitionLog, lease: Lease) -> Iterator[Leadership]:
    """Acquires a new epoch, keeps it alive while the block runs and takes steps (``Lease.stall_ms``), releases it.

    Raises Leased where another compactor is alive and stays so for one ttl; the block raises Fenced when one takes over.
    """
    leadership = acquire(ports, log, lease)
    most = lease.stall_ms * BEATS_PER_TTL // lease.ttl_ms

    def beat() -> None:
        if leadership.pulse.beats_on(most):
            leadership.beat()

    try:
        with ports.keep_alive(beat, lease.ttl_ms / 1000 / BEATS_PER_TTL):
            yield leadership
    finally:
        try:
            leadership.release()
        except (Fenced, StoreError, RequirementFailed):
            pass  # lost already, or it ends with its ttl: neither is worth hiding how the block ended


def acquire(ports: Ports, log: PartitionLog, lease: Lease) -> Leadership:
    """Takes the next epoch once nobody else is alive. Raises Leased after waiting one ttl for a foreign lease, BadControlRecord for a log
    with a gap: a leader that took it for the tail would decide from the past, and fill it, UsageError where the data is another tier's."""
    ports.own()
    state = log.check_whole()
    waited_ms = 0.0
    while True:
        holder = _alive(ports, log, state)
        if holder is None:
            before = state.leader
            epoch = state.last_epoch + 1
            body = LeadershipAcquired(leader_epoch=epoch, holder=ports.holder, ttl_ms=lease.ttl_ms)
            state = log.transact(partial(_unless_changed, log, before, body))
            leader = state.leader
            if leader is not None and leader.incarnation == log.incarnation and leader.epoch == epoch:
                _forget_heartbeat(ports, log, before)
                return Leadership(ports, log, epoch)
            continue  # somebody was faster
        if waited_ms >= lease.ttl_ms:
            raise Leased(
                f"{state.name}: {holder.holder} holds the lease with epoch {holder.epoch}",
                hint="It is at work; try again later. Nothing was changed",
            )
        pause_ms = max(1.0, min(lease.ttl_ms / LOOKS_PER_TTL, lease.ttl_ms - waited_ms))
        ports.sleep(pause_ms / 1000)
        waited_ms += pause_ms
        state = log.refresh()


def lease_of(ports: Ports, log: PartitionLog) -> LeaseInfo | None:
    """Who leads and until when that lease counts as alive; None where nobody does. Reads only."""
    leader = log.state.leader
    if leader is None or leader.released:
        return None
    return LeaseInfo(leader.holder, leader.epoch, _last_sign_ms(ports, log, leader) + leader.ttl_ms)


@contextmanager
def background_beats(beat: Callable[[], None], interval_s: float) -> Iterator[None]:
    """KeepAlive by a thread."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(interval_s):
            try:
                beat()
            except (StoreError, OutOfBudget):
                pass  # the next one may pass; a leader that nobody replaces needs no heartbeat

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _unless_changed(log: PartitionLog, before: Leader | None, body: LeadershipAcquired, state: PartitionState) -> LeadershipAcquired | None:
    """The acquisition, for as long as nothing about the leadership has changed since its liveness was looked at."""
    if state.leader != before:
        return None
    problem = check_before_append(log, state, body)
    if problem:
        raise RequirementFailed(problem)
    return body


def _alive(ports: Ports, log: PartitionLog, state: PartitionState) -> Leader | None:
    """The foreign leader that stands in the way, if any. Our own earlier epoch does not."""
    leader = state.leader
    if leader is None or leader.released or leader.incarnation == log.incarnation:
        return None
    sign_ms = _last_sign_ms(ports, log, leader)
    # A sign from the future: the store's clock was set back. Who is alive beats by the new one soon, who is dead must not lead until then.
    silent = abs(ports.control.clock_ms() - sign_ms) > leader.ttl_ms
    # Looked at again: we may have been stopped between the two questions, and heard nothing because we did not listen.
    return None if silent and _last_sign_ms(ports, log, leader) == sign_ms else leader


def _last_sign_ms(ports: Ports, log: PartitionLog, leader: Leader) -> int:
    """When the store last heard of this leader; 0 where nobody knows any more."""
    try:
        return ports.control.head(_heartbeat_key(log, leader.epoch)).modified_ms
    except NotFound:
        pass  # it has not come to its first one yet: what it wrote last is its acquisition
    if leader.since_ms is not None:
        return leader.since_ms
    try:
        return ports.control.head(log.record_key(leader.slot)).modified_ms
    except NotFound:
        kept = log.reload().leader  # cut, by somebody who has left its time in the snapshot
        return kept.since_ms or 0 if kept is not None and kept.epoch == leader.epoch else 0


def _forget_heartbeat(ports: Ports, log: PartitionLog, before: Leader | None) -> None:
    if before is not None and not before.released:
        try:
            ports.control.delete([_heartbeat_key(log, before.epoch)])
        except Unavailable:
            pass  # it is a few bytes that nobody reads again


def _heartbeat_key(log: PartitionLog, epoch: int) -> str:
    return f"{log.prefix}/heartbeat/{epoch:020d}.json"
