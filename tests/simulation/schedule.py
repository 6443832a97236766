"""One schedule: a seed, the processes and faults that it draws, and an end phase in which everything must come right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from compactor.access.tier import Tier
from compactor.config.settings import Settings
from compactor.control import leadership as leading, records
from compactor.control.control_log import ControlLog
from compactor.control.identity import DataRootOwnershipCheckByTierId
from compactor.control.leadership import Leadership
from compactor.control.logs import PartitionLog, create_tier, open_catalog, open_partition_log
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.state import PartitionState
from compactor.errors import Leased
from compactor.round.drive import run_round
from compactor.storage.wrappers import RequestCounters
from compactor.upkeep import retire as upkeep
from compactor.upkeep.retire import retire_partition
from compactor.upkeep.verify import verify_control_log
from tests.simulation.actors import LEASE, RETENTION, Actors
from tests.simulation.losses import Losses
from tests.simulation.oracle import Oracle
from tests.simulation.store_kinds import CLOUD_KINDS, KindOfWorld, without_threads
from tests.simulation.symbolic import NAME, NEIGHBOUR, broker_log
from tests.simulation.world import NO_FAULTS, ORPHAN_AGE_MS, Faults, Process, World

END_ROUNDS = 12
ZOMBIES = replace(NO_FAULTS, stop=0.12)
PROFILES = (Faults(), Faults(), NO_FAULTS, ZOMBIES, ZOMBIES, replace(NO_FAULTS, stop=0.05), replace(Faults(), crash=0.02, stop=0.04))
"""What a schedule's processes meet: everything, nothing but each other, or being stopped for so long that others take over."""


@dataclass(frozen=True)
class Outcome:
    seed: int
    violations: tuple[str, ...]
    steps: int
    counts: dict[str, int]
    trace: tuple[str, ...] = ()


def run_schedule(seed: int, *, steps: int = 420, trace: bool = False, scheme: str = "s3") -> Outcome:
    """Runs one schedule to its end, on a kind of store. Deterministic in ``seed``."""
    world = KindOfWorld(seed, CLOUD_KINDS[scheme]) if scheme in CLOUD_KINDS else World(seed)
    rng = world.rng
    world.faults = rng.choice(PROFILES)
    hazardous, losing, neighbours = seed % 3 == 2, seed % 6 == 1, seed % 6 == 3
    expiring = seed % 6 == 4 or seed % 12 == 11
    if losing:  # a request that lands late could land where something was lost
        world.faults = replace(world.faults, delay=0, duplicate=0)
    if hazardous:
        world.faults = replace(world.faults, delay=0, duplicate=0, vanish=0.05, full=0.01, hang=0.01)
    if trace:
        world.trace = []
    broker = broker_log(rng, rng.randint(4, 9))
    oracle = Oracle(world, broker)
    actors = Actors(world, oracle, broker)
    all_actors = [actors]
    if losing or neighbours:
        world.retention = RETENTION
    if neighbours:
        dice = random.Random(f"neighbour of {seed}")
        neighbour = broker_log(dice, dice.randint(3, 6))
        all_actors.append(Actors(world, Oracle(world, neighbour, NEIGHBOUR), neighbour))
    with watched(world, *(each.oracle for each in all_actors)):
        first = world.ports(Process("first", "first"))
        if hazardous:
            _add_hazards(world, oracle, actors, first, steps)
        actors.importer(first, open_partition_log(first, NAME))
        actors.elections = rng.choice((0, 1, 3))
        cast: list[tuple[str, str, Callable[[EnvironmentPorts, PartitionLog], None]]] = [
            ("compactor-1", "host-a", actors.compactor),
            ("compactor-2", "host-a", actors.compactor),  # two processes of one host write alike
            ("importer-1", "host-b", actors.importer),
            ("reader", "host-d", actors.reader),
        ]
        extras = [
            ("compactor-3", "host-c", actors.compactor),
            ("importer-2", "host-c", actors.importer),
            ("collector", "host-e", actors.collector),
            ("sweeper", "host-f", actors.sweeper),
        ]
        cast += extras[:1] if world.faults is ZOMBIES else rng.sample(extras, rng.randint(0, 3))
        if expiring:
            actors.retention_bytes = world.hazards.choice(((0,), (20, 60), (60,), (40, 200), (10**6,)))
            cast.append(("deleter", "host-g", actors.deleter))
        if losing:
            actors.losses = Losses(world, oracle)
            for _ in range(12):
                world.push(world.now_ms + world.hazards.random() * 20 * steps, actors.losses.lose)
        for name, holder, body in cast:
            world.spawn(name, actors.restarting(name, holder, body), holder)
        for other in all_actors[1:]:
            for name, holder, body in (("compactor-n", "host-a", other.compactor), ("importer-n", "host-b", other.importer)):
                world.spawn(name, other.restarting(name, holder, body), holder)
        world.run(steps * len(all_actors))
        if not world.violations:
            end_phase(world, all_actors)
        else:
            world.stop()
    return Outcome(seed, tuple(world.violations), world.steps, dict(oracle.counts), tuple(world.trace or ()))


def _add_hazards(world: World, oracle: Oracle, actors: Actors, ports: EnvironmentPorts, steps: int) -> None:
    """Objects that get lost, disks that are full, workers that hang, and somebody with a mistyped control store."""
    owner = DataRootOwnershipCheckByTierId()
    owner.tier_id = create_tier(ports, kind="object-log", layout="native").tier_id
    owner.require_own_root(ports)

    def may_vanish(key: str) -> bool:
        intent = oracle.state.intent
        return intent is not None and any(task.new_segment_id in key for task in intent.plan.tasks)

    world.may_vanish = may_vanish
    world.spawn("stranger", actors.restarting("stranger", "host-x", actors.stranger), "host-x")
    for _ in range(6):
        world.push(world.now_ms + world.hazards.random() * 20 * steps, actors.lose)


def end_phase(world: World, all_actors: Sequence[Actors]) -> None:
    """One compactor, no faults: every run finishes, everything is clean, no orphan stays, and `verify` finds nothing."""
    for actors in all_actors:
        if actors.losses:
            actors.losses.end()
    world.stop()
    ports = world.ports(Process("last", "last"))
    for actors in all_actors:
        _finish(world, actors, ports)
    opened = Tier(Settings(), ports, open_catalog(ports), RequestCounters())
    for actors in all_actors:
        for finding in verify_control_log(opened, actors.name):
            if finding.severity == "error":
                world.violate(f"verify: {finding.object}: {finding.detail}")


def _finish(world: World, actors: Actors, ports: EnvironmentPorts) -> None:
    oracle, log = actors.oracle, open_partition_log(ports, actors.name)
    for _ in range(END_ROUNDS):
        try:
            if run_round(ports, log, LEASE, actors.work(ports)).status == "nothing_to_do":
                break
        except Leased:
            world.note("waits for one that hangs")
        world.wait(2000)
    for _ in range(40):  # whatever beats is heard meanwhile
        world.wait(ORPHAN_AGE_MS / 20)
    retire_partition(ports, log, LEASE, RETENTION, job=actors.work(ports))
    oracle.check_view()
    oracle.check_end()


@contextmanager
def watched(world: World, *oracles: Oracle) -> Iterator[None]:
    """Shows each partition's oracle what every process comes to believe, and decodes each object once (values are frozen)."""
    judges = {str(oracle.name): oracle for oracle in oracles}
    settle, acquire, decode, survey = (
        ControlLog._fold_to_end,
        leading.acquire_leadership,
        records.decode_checksummed_json,
        upkeep.find_deletions,
    )

    def watched_survey(ports: EnvironmentPorts, log: PartitionLog, *means: Any) -> upkeep.PendingDeletions:
        found = survey(ports, log, *means)
        if ports.control.url == world.control.url:
            judges[log.name].surveyed(found, log.state)
        return found

    def watched_settle(log: ControlLog[Any], appended: Any) -> Any:
        judge = judges.get(log.name) if log.store.url == world.control.url else None
        tail = judge.state.slot if judge and not appended else 0
        state = settle(log, appended)
        if judge and isinstance(state, PartitionState):
            judge.believed(state, tail)
        return state

    def watched_acquire(ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations) -> Leadership:
        if ports.control.url == world.control.url:
            judges[log.name].asked[log.incarnation] = world.now_ms
        leadership = acquire(ports, log, lease)
        if ports.control.url == world.control.url:
            judges[log.name].led(leadership.epoch, log.incarnation)
        return leadership

    with (
        without_threads(),
        patch.object(ControlLog, "_fold_to_end", watched_settle),
        patch.object(leading, "acquire_leadership", watched_acquire),
        patch.object(upkeep, "find_deletions", watched_survey),
        patch.object(records, "decode_checksummed_json", lru_cache(maxsize=2000)(decode)),
    ):
        yield
