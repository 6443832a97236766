"""What goes wrong in the soak: weather at the store, processes that are killed or stand still, disks that are full."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.soak.stage import SETTINGS, Machine, Stage
from tests.support.fault_proxy import Fault

TTL_S = SETTINGS["lease"]["ttl_ms"] / 1000
DAMAGE_S = 60.0


def drizzle() -> list[Fault]:
    """Always: a few of every kind."""
    return [
        Fault("slow_down", rate=0.01),
        Fault("internal", rate=0.003),
        Fault("reset", rate=0.005),
        Fault("lost", ("put", "delete"), rate=0.01),
        Fault("cut", ("get",), rate=0.005),
        Fault("short", ("get",), rate=0.002),
        Fault("flip", ("get",), match=r"\.log", rate=0.002),
        Fault("delay", rate=0.02, seconds=0.5),
    ]


def storms() -> dict[str, list[Fault]]:
    """For a while, each instead of the drizzle."""
    return {
        "slow down": [Fault("slow_down", rate=0.6)],
        "outage": [Fault("slow_down")],
        "resets": [Fault("reset", rate=0.4)],
        "slow": [Fault("delay", seconds=0.8)],
        "truncated": [Fault("cut", ("get",), rate=0.3), Fault("short", ("get",), rate=0.1)],
        "lost answers": [Fault("lost", ("put", "delete", "multipart"), rate=0.4)],
        "denied": [Fault("denied", rate=0.5)],
    }


@dataclass
class Trouble:
    """One thing after the other until ``over``. The first machine is never killed: what it uses is watched for the whole time."""

    stage: Stage
    dice: random.Random
    over: threading.Event
    partitions: int
    happened: Counter[str] = field(default_factory=Counter)
    when: list[tuple[float, str]] = field(default_factory=list)
    clock: Callable[[], float] = lambda: 0.0

    def run(self) -> None:
        self.stage.proxy.faults = drizzle()
        while not self.over.wait(self.dice.uniform(5, 20)):
            what = self.dice.choices((self.kill, self.stand_still, self.full_disk, self.storm, self.damage), (4, 6, 4, 7, 3))[0]
            what()
        self.stage.proxy.faults = []

    def note(self, what: str) -> None:
        self.happened[what] += 1
        self.when.append((self.clock(), what))

    def kill(self) -> None:
        machine = self.dice.choice(self.stage.machines[1:])
        self.note("daemons killed")
        machine.kill()
        self.over.wait(self.dice.uniform(0, 2 * TTL_S))
        machine.restart()

    def stand_still(self) -> None:
        """Half of the time longer than a lease."""
        machine = self.dice.choice(self.stage.machines)
        seconds = self.dice.choice((0.5, 2, 4)) * TTL_S
        self.note(f"daemons stopped for {seconds:.0f} s")
        machine.stop()
        self.over.wait(seconds)
        machine.go_on()

    def full_disk(self) -> None:
        machine: Machine = self.dice.choice(self.stage.machines)
        self.note("disks full")
        machine.fill_disk()
        self.over.wait(self.dice.uniform(10, 30))
        machine.free_disk()

    def storm(self) -> None:
        name, faults = self.dice.choice(list(storms().items()))
        self.note(f"storm: {name}")
        self.stage.proxy.faults = faults
        self.over.wait(self.dice.uniform(10, 30))
        self.stage.proxy.faults = drizzle()

    def damage(self) -> None:
        """Nothing that is read of one partition's logs is what was written, until a round has found it or none was due for long."""
        opened = self.stage.beside.opened()
        place = f"orders-{self.dice.randrange(self.partitions)}"
        log = next((opened.open_partition_log(name) for name in opened.list_partitions() if str(name) == place), None)
        if log is None:
            return
        self.note("damage")
        self.stage.proxy.faults = [*drizzle(), Fault("flip", ("get",), match=rf"/{place}/.*\.log")]
        until = self.clock() + DAMAGE_S
        while log.refresh().quarantine is None and self.clock() < until and not self.over.wait(1):
            pass
        self.stage.proxy.faults = drizzle()
