"""Lives that are told on purpose: files staged for deletion that must not be taken, and what the judge notices if their rule is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from compactor.access.tier import Tier
from compactor.constants import TopicId
from compactor.errors import CompactorError
from compactor.features.imports import staged_files
from compactor.features.imports.import_ import ImportOptions
from tests.simulation.directories import DiskReplica
from tests.simulation.symbolic import NAME
from tests.simulation.way_in import made
from tests.simulation.way_in_actors import WayIn, in_one_thread
from tests.simulation.way_in_mutations import WAY_IN_MUTATIONS
from tests.simulation.world import NO_FAULTS, Process, World

LIVE = ImportOptions(live=True)


@dataclass
class ToldLife:
    """A life without chance: brokers that roll and follow when they are told to, and one process that imports."""

    way: WayIn
    tier: Tier

    @property
    def disks(self) -> list[DiskReplica]:
        return self.way.brokers.disks

    def lead(self, number: int) -> DiskReplica:
        """A new leader begins a leader epoch and a segment."""
        brokers = self.way.brokers
        brokers.leader = self.disks[number]
        brokers.epoch += 1
        self.roll(brokers.led)
        return brokers.led

    def write(self, count: int) -> None:
        """The leader writes; nobody follows."""
        self.way.brokers.produce(count)

    def roll(self, disk: DiskReplica) -> None:
        """A new segment begins at the log's end."""
        if disk.bases[-1] < len(disk.log):
            disk.bases.append(len(disk.log))

    def expire(self, disk: DiskReplica) -> None:
        """Retention rolls the active segment and stages the whole log in one pass."""
        self.settle()
        disk.start = len(disk.log)
        disk.bases = [disk.start]
        self.settle()

    def follow(self, disk: DiskReplica) -> None:
        """A follower becomes what its leader is."""
        self.settle()
        disk.follow(self.way.brokers.leader, 1000, self.way.world.rng)
        self.settle()

    def settle(self) -> None:
        """The directories are written, and time passes."""
        self.way.brokers.write()
        self.way.world.wait(5_000)

    def bring(self, disk: DiskReplica) -> None:
        """`import --live`."""
        self.settle()
        try:
            self.way.take(self.way.mine, self.tier, disk, LIVE)
        except CompactorError as error:
            self.way.world.note(str(error))


def another_branch_of_an_earlier_leader(life: ToldLife) -> None:
    """The tier ends in epoch 2; a follower staged its own branch of epoch 1, which leads to the live log by chance."""
    one, two = life.disks[0], life.lead(1)
    life.write(6)
    life.roll(two)
    life.write(14)
    life.lead(0)
    life.write(6)
    life.roll(one)
    life.bring(one)
    life.write(14)
    life.expire(one)
    life.write(3)
    life.roll(one)
    life.write(1)
    life.follow(two)
    life.bring(two)


def branch_of_an_agent_that_was_truncated(life: ToldLife) -> None:
    """A broker stages its branch of epoch 1 as a follower, leads again, and its agent sees the file."""
    one, two = life.disks[0], life.lead(1)
    life.roll(one)
    life.bring(one)
    life.write(20)
    life.lead(0)
    life.write(20)
    life.expire(one)
    life.write(3)
    life.follow(two)
    life.lead(1)
    life.write(3)
    life.roll(two)
    life.write(1)
    life.settle()
    look = life.way.agent(1)(life.tier)
    for _ in range(4):
        life.way.hear()
        life.settle()
        look()


def log_that_was_cleaned_since(life: ToldLife) -> None:
    """Retention stages values whose tombstones the cleaner drops from the live log."""
    (one, *_) = life.disks
    life.way.brokers.leader = one
    life.write(60)
    life.roll(one)
    life.write(120)
    life.roll(one)
    life.write(1)
    life.settle()
    one.start = one.bases[1]
    one.bases = one.bases[1:]
    life.settle()
    life.way.brokers.clean(one, 2)
    life.bring(one)


LIVES: dict[str, Callable[[ToldLife], None]] = {
    "staged files may have any leader epoch": another_branch_of_an_earlier_leader,
    "staged files need no leadership": branch_of_an_agent_that_was_truncated,
    "staged files go with a cleaned log": log_that_was_cleaned_since,
}
"""Mutation -> the life in which the judge notices it."""
NOTICED = LIVES | {
    "staged files need neither leadership nor epochs": branch_of_an_agent_that_was_truncated,
    "staged files need nothing": another_branch_of_an_earlier_leader,
}
"""With mutations that drop several rules."""


def violations(tell: Callable[[ToldLife], None], folder: Path) -> list[str]:
    """Return what the judge noticed in a life."""
    world = World(7)
    way = made(world, folder)
    world.faults = NO_FAULTS
    brokers = way.brokers
    brokers.rolls, brokers.follows = [0.0] * len(brokers.rolls), 0.0
    while True:
        brokers.create()
        brokers.topic_id = brokers.topic_id or TopicId("AAAAAAAAAAAAAAAAAAAAAQ")
        for disk in brokers.disks:
            disk.topic_id, disk.has_epochs = brokers.topic_id, True
        if brokers.leader.number == 0:
            break
    for disk in brokers.disks[1:]:
        disk.follow(brokers.leader, 1000, world.rng)
    with in_one_thread(world), patch.object(staged_files, "inode_change_ms", brokers.inode_change_ms):
        tell(ToldLife(way, way.mine.tier(Process("told", "told"))))
    for holder in way.holders:
        holder.close_partition(NAME)
    return world.violations


@pytest.mark.parametrize("rule", LIVES)
def test_staged_files_that_must_not_be_taken_are_not(rule: str, tmp_path: Path) -> None:
    assert violations(LIVES[rule], tmp_path) == []


@pytest.mark.parametrize("rule", NOTICED)
def test_dropped_rule_of_staged_files_is_noticed(rule: str, tmp_path: Path) -> None:
    with WAY_IN_MUTATIONS[rule]():
        assert violations(NOTICED[rule], tmp_path) != []
