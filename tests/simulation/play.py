"""A scripted world for directed scenarios: no scheduler, no random faults, but requests that can be held back, lost or preceded.

Everything runs in the test's own thread. Another process acts at a chosen instant by ``before``; a process dies by ``die``
and is replaced by a new one from ``process``; a request that was held lands with ``land``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.control.importing import register_import
from compactor.control.logs import PartitionLog, open_partition_log
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import PartitionState
from compactor.errors import Unavailable
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.drive import run_round
from compactor.round.ports import Run
from compactor.upkeep.retire import RetireReport, retire_partition
from tests.simulation.actors import LEASE, RETENTION, Actors
from tests.simulation.oracle import Oracle
from tests.simulation.schedule import watched
from tests.simulation.symbolic import NAME, Rows, SymbolicJob, SymbolicPlanner, SymbolicWorker, broker_log, describe, encode, upload
from tests.simulation.world import NO_FAULTS, Crash, Process, World


@dataclass
class Held:
    what: str
    effect: Callable[[], Any]


@dataclass
class Rule:
    """The next request that begins with ``pattern`` (after ``skip`` others) meets ``act``."""

    pattern: str
    act: Callable[[str, Callable[[], Any]], Any]
    skip: int = 0


@dataclass
class Actor:
    """One process: its ports and its view of the log."""

    play: Play
    ports: EnvironmentPorts
    log: PartitionLog

    def run(self, **changes: Any) -> Run:
        return run_round(self.ports, self.log, LEASE, self.work(**changes))

    def work(self, **changes: Any) -> SymbolicJob:
        expires = changes.pop("expires", lambda state: None)
        worker = SymbolicWorker(self.ports, **changes)
        planner = SymbolicPlanner(self.play.oracle.contents)
        return SymbolicJob(self.ports, self.ports.clock_ms(), planner, worker, expires=expires)

    def retire(self, **changes: Any) -> RetireReport:
        return retire_partition(self.ports, self.log, LEASE, RETENTION, **changes)

    def state(self) -> PartitionState:
        return self.log.refresh()


@dataclass
class Play:
    """The world, what the broker wrote, the judge, and the rules for the next requests."""

    broker: list[Rows]
    world: World = field(default_factory=lambda: World(1, NO_FAULTS))
    rules: list[Rule] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    dead: bool = False
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.world, self.broker)
        self.actors = Actors(self.world, self.oracle, self.broker)
        self.world.script = self._request

    def process(self, holder: str = "host:1") -> Actor:
        """A new process; whatever died before stays dead."""
        self.dead = False
        ports = self.world.ports(Process(holder, holder))
        return Actor(self, ports, open_partition_log(ports, NAME))

    def importing(self, times: int = 1) -> None:
        actor = self.process("importer")
        for _ in range(times):
            self.actors.importer(actor.ports, actor.log)

    def pass_time(self, milliseconds: float) -> None:
        self.world.now_ms += milliseconds

    # --- what the next requests meet ---

    def before(self, pattern: str, action: Callable[[], Any], skip: int = 0) -> None:
        """Somebody else acts just before this request arrives."""

        def act(what: str, effect: Callable[[], Any]) -> Any:
            action()
            self.dead = False
            return effect()

        self.rules.append(Rule(pattern, act, skip))

    def hold(self, pattern: str, *, skip: int = 0, dies: bool = False) -> None:
        """The request gets no answer and is still under way; with ``dies`` its sender is killed at that moment."""

        def act(what: str, effect: Callable[[], Any]) -> Any:
            self.held.append(Held(what, effect))
            if dies:
                self.dead = True
                raise Crash
            raise Unavailable(f"{what}: no answer")

        self.rules.append(Rule(pattern, act, skip))

    def lose(self, pattern: str, skip: int = 0) -> None:
        """The request has its effect; its answer is lost."""

        def act(what: str, effect: Callable[[], Any]) -> Any:
            effect()
            raise Unavailable(f"{what}: the answer was lost")

        self.rules.append(Rule(pattern, act, skip))

    def die(self, pattern: str, skip: int = 0) -> None:
        """The process is killed just before this request."""

        def act(what: str, effect: Callable[[], Any]) -> Any:
            self.dead = True
            raise Crash

        self.rules.append(Rule(pattern, act, skip))

    def land(self) -> None:
        """Everything that was held arrives now."""
        for item in self.held:
            self.world._quietly(item.effect)
        self.held.clear()

    def _request(self, what: str, effect: Callable[[], Any]) -> Any:
        if self.dead:
            raise Crash
        self.requests.append(what)
        for rule in self.rules:
            if what.startswith(rule.pattern):
                if rule.skip:
                    rule.skip -= 1
                    continue
                self.rules.remove(rule)
                return rule.act(what, effect)
        return effect()

    def sound(self) -> None:
        """Nothing has happened that must never happen, and readers see what the broker wrote."""
        self.oracle.check_view()
        assert self.world.violations == []


@contextmanager
def playing(segments: int = 4, seed: int = 1) -> Iterator[Play]:
    """A play whose judge watches to the end."""
    play = Play(broker_log(random.Random(seed), segments))
    with watched(play.world, play.oracle):
        yield play
        assert play.rules == [], "a request that the scenario waits for never came"
        play.sound()


@pytest.fixture
def play() -> Iterator[Play]:
    with playing() as made:
        yield made


def uploaded(play: Play, actor: Actor, *numbers: int) -> tuple[str, list[RemoteLogSegmentMetadata]]:
    """Those segments of the broker as an import that is registered and uploaded."""
    import_id = actor.ports.new_id()
    segments = []
    for number in numbers:
        rows = play.broker[number]
        segments.append(describe(actor.ports.new_id(), rows[0][0], rows[-1][0], encode(rows), [EpochEntry(LeaderEpoch(0), Offset(0))]))
    register_import(actor.ports, actor.log, import_id, [segment.id for segment in segments])
    for number, segment in zip(numbers, segments, strict=True):
        upload(actor.ports, segment, encode(play.broker[number]))
    return import_id, segments
