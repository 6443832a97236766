"""A life: brokers' directories on a real disk, and everything by which their logs come into a tier, with crashes and broken stores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from checkpoint.offsets import first_dirty_offset_in
from compactor.access.tier import Tier
from compactor.config.settings import Settings
from compactor.errors import CompactorError
from compactor.features.imports import staged_files
from compactor.features.imports.import_ import ImportOptions
from tests.simulation.actors import RETENTION
from tests.simulation.directories import Directories
from tests.simulation.schedule import ZOMBIES, Outcome, watched
from tests.simulation.symbolic import NAME
from tests.simulation.way_in_actors import PASSING, Reading, Side, WayIn, in_one_thread, said
from tests.simulation.way_in_oracle import WayInOracle, number
from tests.simulation.world import NO_FAULTS, RETENTION_MS, TTL_MS, Faults, Process, SimStore, World

STEPS = 800
ATTEMPTS = 4
CALM = Faults(0.002, 0.003, 0.003, 0.003, 0.003, 0.01, 0.002)
MEMORY = Path("/dev/shm")


def settings() -> Settings:
    """Of every process: one thread, rounds whenever there is something dirty, and tombstones that do not stay long."""
    made = Settings()
    publish = {"grace_ms": RETENTION.grace_ms, "undo_window_ms": RETENTION.undo_window_ms, "orphan_age_ms": RETENTION.orphan_age_ms}
    cleaner = {"bloom": False, "min_cleanable_dirty_ratio": 0.0, "delete_retention_ms": RETENTION_MS}
    return made.model_copy(
        update={
            "daemon": made.daemon.model_copy(update={"threads": 1}),
            "publish": made.publish.model_copy(update=publish),
            "cleaner": made.cleaner.model_copy(update=cleaner),
            "lease": made.lease.model_copy(update={"ttl_ms": TTL_MS, "stall_ms": 3 * TTL_MS}),
        }
    )


SETTINGS = settings()


def run_way_in(seed: int, *, steps: int = STEPS, trace: bool = False) -> Outcome:
    """Run one life to its end. Deterministic in ``seed``."""
    world = World(seed)
    if trace:
        world.trace = []
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder, patch.object(os, "fsync", lambda _: None):
        way = made(world, Path(folder))
        with (
            in_one_thread(world),
            watched(world, way.mine.oracle),
            patch.object(staged_files, "inode_change_ms", way.brokers.inode_change_ms),
        ):
            play(way, steps)
        for holder in way.holders:
            holder.close_partition(NAME)
    told = tuple(line.replace(folder, "") for line in world.trace or ())
    return Outcome(seed, tuple(text.replace(folder, "") for text in world.violations), world.steps, dict(way.mine.oracle.counts), told)


def made(world: World, folder: Path) -> WayIn:
    """Brokers and two tiers."""
    rng = world.rng
    world.faults = rng.choice((NO_FAULTS, CALM, CALM, Faults(), ZOMBIES))
    brokers = Directories(rng, folder / "brokers", cleaned=rng.random() < 0.35)
    brokers.clock = lambda: world.now_ms
    brokers.write()
    sides = []
    for control, data in ((world.control, world.data), (SimStore(world, "other-control"), SimStore(world, "other-data"))):
        sides.append(Side(world, control, data, WayInOracle(world, control, data, brokers), folder, SETTINGS))
    return WayIn(world, brokers, *sides)


def play(way: WayIn, steps: int) -> None:
    """Some of the processes for a while, then the end phase."""
    world, rng = way.world, way.world.rng
    transfers = rng.random() < 0.35
    filled = way.other if transfers else way.mine
    cast: list[tuple[str, Side, Callable[[Tier], Callable[[], None]]]] = [("importer", filled, way.importer(filled))]
    if transfers:
        cast += [("transfer", way.mine, way.transfer), ("other-compactor", way.other, way.compactor)]
    elif rng.random() < 0.7:
        cast += [(f"agent-{number}", way.mine, way.agent(number)) for number in range(rng.choice((1, 3)))]
    if rng.random() < 0.6:
        cast.append(("compactor", way.mine, way.compactor))
    if rng.random() < 0.5:
        cast += [(f"operator-{side.control.name}", side, way.operator(side)) for side in {id(s): s for s in (way.mine, filled)}.values()]
    if rng.random() < 0.5:
        cast.append(("consumer", way.mine, way.consumer))
    for name, side, body in cast:
        world.spawn(name, way.restarting(name, f"host-{name}", side, body), f"host-{name}")
    world.push(world.now_ms + 100, way.event)
    world.run(steps)
    world.queue = [entry for entry in world.queue if entry[2] != way.event]
    world.stop()
    if not world.violations:
        end_phase(way)


def end_phase(way: WayIn) -> None:
    """No faults: the leader's log goes on, and comes into the tier but for stated reasons."""
    world, brokers = way.world, way.brokers
    for disk in brokers.disks:
        disk.damaged = -1
    if world.rng.random() < 0.5:
        brokers.elect()
    brokers.produce(25)
    led = brokers.led
    led.bases.append(len(led.log))
    brokers.produce(1)
    brokers.write()
    process = Process("last", "last")
    transfers = bool(way.other.oracle.state.live)
    filled = way.other if transfers else way.mine
    options = ImportOptions(live=world.rng.random() < 0.5, gaps=world.rng.random() < 0.7, accept_truncation=True)
    world.wait(10_000)
    finish(way, filled, lambda: way.take(filled, filled.tier(process), led, options), options)
    if transfers and not world.violations:
        bring(way, process)
    tier = way.mine.tier(process)
    if way.readings and not world.violations and way.mine.oracle.state.live:
        check_reading(way, way.readings[0], tier)


def finish(
    way: WayIn,
    side: Side,
    act: Callable[[], None],
    options: ImportOptions,
    excuse: Callable[[WayIn, Side, ImportOptions], str] | None = None,
) -> None:
    """The import succeeds in the end, and nothing is missing. ``excuse``: returns why the import may be refused, or an empty string."""
    excuse = excuse or excuse_of
    world, oracle, led = way.world, side.oracle, way.brokers.led
    reason = ""
    for number_ in range(ATTEMPTS):
        reason = excuse(way, side, options)
        try:
            act()
        except PASSING as error:
            if reason or number_ < ATTEMPTS - 1:
                world.note(f"at the end: {said(error)}")
                if reason:
                    return
                continue
            world.violate(f"the leader's log does not come in: {said(error)}")
            return
        except Exception as error:  # noqa: BLE001 - whatever the code does not foresee is a finding
            world.violate(f"import: {type(error).__name__}: {error}")
            return
        break
    if world.violations:
        return
    oracle = side.oracle
    end = led.bases[-1] if options.live else len(led.log)
    if oracle.state.end_offset + 1 < end and not reason:
        world.violate(f"the tier ends at {oracle.state.end_offset}, and the leader's log at {end - 1}")
        return
    present = led.present()
    held = {row[0]: number(row) for row in oracle.rows}
    first = oracle.state.start_offset
    for offset, number_ in present.items():
        if first <= offset <= oracle.state.end_offset and held.get(offset) != number_ and offset not in oracle.absent and not reason:
            world.violate(f"offset {offset} of the leader's log is missing, or another one's")
            return


def bring(way: WayIn, process: Process) -> None:
    """The other tier's log comes into this one."""
    options = ImportOptions(gaps=True, accept_truncation=True)
    for _ in range(ATTEMPTS):
        try:
            way.bring(way.other.tier(process), way.mine.tier(process), options)
        except PASSING as error:
            way.world.note(f"at the end: {said(error)}")
        except Exception as error:  # noqa: BLE001 - whatever the code does not foresee is a finding
            way.world.violate(f"import --from-tier: {type(error).__name__}: {error}")
            return


def excuse_of(way: WayIn, side: Side, options: ImportOptions) -> str:
    """Why the import may be refused, by what really is; an empty string where it may not."""
    led, oracle, state = way.brokers.led, side.oracle, side.oracle.state
    if any(each.damaged for each in led.staged.values()):
        return "what is staged is damaged"
    if not state.live or not oracle.rows:
        return "" if not state.live and (options.gaps or not led.removed) else "nothing is held"
    chain = way.brokers.chain(led.log[-1][2])
    present = led.present()
    if number(oracle.rows[0]) not in chain.values():
        return "another topic, or all of it was discarded"
    parted = next((row[0] for row in oracle.rows if chain.get(row[0]) != number(row)), None)
    seam = parted if parted is not None else state.end_offset + 1
    if parted is not None and parted <= state.start_offset:
        return "all of it was discarded"
    if (
        led.start > seam
        and (parted is not None or not options.gaps)
        and not (options.live and seam in led.takeable(lambda changed_ms: True))
    ):
        return "a gap"
    if led.removed:
        return "cleaned"
    held = {row[0] for segment in state.live for row in oracle.contents[segment.id] if row[0] < seam}
    if not held & present.keys():
        return "nothing comparable"
    if parted is not None and (state.published or first_dirty_offset_in(state.vector) > parted):
        return "cleaned beyond the cut"
    return ""


def check_reading(way: WayIn, reading: Reading, tier: Tier) -> None:
    """What a consumer was given is the tier's log, or it was told that it is not."""
    world, oracle = way.world, way.mine.oracle
    consumer = way.consumer(tier)
    for _ in range(6):
        world.wait(10)
        try:
            consumer()
        except CompactorError as error:
            world.note(said(error))
    if not oracle.rows or oracle.deletions:
        return
    chain = way.brokers.chain(number(oracle.rows[-1]))
    wrong = next((at for at, got in sorted(reading.received.items()) if at <= oracle.rows[-1][0] and chain.get(at) != got), None)
    if wrong is not None:
        world.violate(f"a consumer has offset {wrong} of a log that was discarded, and was not told: {reading.told}")
        return
    if reading.told and int(reading.told[-1].partition(":")[0]) < reading.place.offset:
        return  # it was told, and stays where it is
    first = min(reading.received, default=0)
    live = {row[1]: row for segment in oracle.state.live for row in oracle.contents[segment.id] if row[0] < reading.place.offset}
    missed = sorted(row[0] for row in live.values() if first <= row[0] and row[0] not in reading.received and row[2] is not None)
    if missed:
        world.violate(f"a consumer at {reading.place.offset} was never given offset {missed[0]}: {reading.told}")
