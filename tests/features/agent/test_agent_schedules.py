"""Random lives of two brokers with an agent each: whatever happens, the tier is what was committed, from the beginning, without a hole."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from compactor.features.agent.agent import UploadAgent
from compactor.features.agent.plan import UploadFailureReason
from tests.support.side_broker import ORDERS, PartitionStory, Replica, SideBroker, SideCluster, SideTier, settle, watch_of

pytestmark = pytest.mark.quick

TOPIC_ID = "Zm9yLWFsbC1icm9rZXJzIQ"
PASSING = (None, UploadFailureReason.EPOCH, UploadFailureReason.CONTENT, UploadFailureReason.BEHIND)
"""What agents may say while leaders move: they try again."""


@dataclass
class TwoBrokers:
    """One partition, two replicas that roll at different offsets, and what each agent has heard of who leads."""

    tier: SideTier
    dice: random.Random
    story: PartitionStory
    brokers: dict[int, SideBroker]
    replicas: dict[int, Replica]
    heard: dict[int, SideCluster]
    agents: dict[int, UploadAgent] = field(default_factory=dict)
    leader: int = 1
    moves: int = 0
    alone: bool = False

    def write(self) -> None:
        if self.alone:
            return
        self.story.write(self.replicas[self.leader], self.dice.randint(1, 9), per_segment=2 + self.leader, commit=False)
        if self.dice.random() < 0.8:
            self.replicate()

    def replicate(self) -> None:
        """The follower has everything: it is committed, and the leader says so to whoever asks, whoever he believes to lead."""
        if self.alone:
            return
        other = self.replicas[3 - self.leader]
        known = {int.from_bytes(raw[:8], "big"): raw for raw in self.story.written}
        parted = next((offset for offset, raw in other.batches if known.get(offset) != raw), None)
        if parted is not None:
            other.truncate(parted)
        self.story.follow(other, per_segment=2 + 3 - self.leader)
        self.story.commit()
        for each in self.heard.values():
            each.ends_of = dict(self.story.cluster.ends_of)

    def hear(self) -> None:
        """One agent learns who leads."""
        self.dice.choice(list(self.heard.values())).leaders_of = {ORDERS: self.leader}

    def write_alone(self) -> None:
        """The leader writes what nobody replicates any more: it will not have been."""
        if self.alone:
            return
        self.replicate()
        self.alone = True
        lonely = PartitionStory(SideCluster(), epochs=list(self.story.epochs))
        lonely.log.next_offset, lonely.log.leader_epoch = self.story.log.next_offset, self.story.log.leader_epoch
        lonely.log.segments = [(self.story.log.next_offset, [])]
        lonely.log.time = 900_000 + self.moves
        lonely.write(self.replicas[self.leader], self.dice.randint(1, 12), per_segment=2 + self.leader)

    def move_leader(self) -> None:
        """The old leader keeps what nobody else has, until it follows; the new one goes on where the committed log ends."""
        self.write_alone()
        self.alone = False
        self.leader = 3 - self.leader
        self.moves += 1
        self.story.lead(self.leader)
        self.replicas[self.leader].append([], self.story.epochs)
        # The new leader commits without the old one, which is out of sync for now.
        self.story.write(self.replicas[self.leader], self.dice.randint(1, 12), per_segment=2 + self.leader)
        for each in self.heard.values():
            each.ends_of = dict(self.story.cluster.ends_of)

    def retain(self) -> None:
        """Retention takes what is in the tier already."""
        position = self.tier.opened().open_partition_log(ORDERS).refresh().end_offset + 1
        for replica in self.replicas.values():
            kept = max((base for base in replica.bases if base <= position), default=replica.bases[0])
            replica.delete_until(kept)

    def look(self) -> None:
        number = self.dice.choice((1, 2))
        if number not in self.agents or self.dice.random() < 0.2:  # a new process
            self.agents[number] = self.tier.agent(self.brokers[number], self.heard[number])
        self.tier.hurry(self.dice.choice((1_000, 70_000, 700_000)))
        settle(self.agents[number])
        watch = watch_of(self.agents[number])
        assert watch is None or watch.trouble in PASSING, watch
        self.check()

    def check(self) -> None:
        if self.tier.opened().open_partition_log(ORDERS).refresh().live:
            held = self.tier.held()
            assert held == self.story.written[: len(held)]

    def come_to_rest(self) -> None:
        self.move_leader()
        self.replicate()
        for number, each in self.heard.items():
            each.leaders_of = {ORDERS: self.leader}
            self.tier.hurry()
            settle(self.agents.setdefault(number, self.tier.agent(self.brokers[number], each)))
        self.check()
        # More than this leader has sealed, where the one before it rolled later.
        assert self.tier.opened().open_partition_log(ORDERS).refresh().end_offset + 1 >= self.replicas[self.leader].bases[-1]


def two_brokers(folder: Path, seed: int) -> TwoBrokers:
    brokers = {number: SideBroker(folder / f"broker {number}", number) for number in (1, 2)}
    story = PartitionStory(SideCluster())
    replicas = {number: broker.replica() for number, broker in brokers.items()}
    for replica in replicas.values():
        replica.topic_id = TOPIC_ID  # Else a log whose records have all expired could not be told from another topic's.
    made = TwoBrokers(SideTier(folder), random.Random(seed), story, brokers, replicas, {1: SideCluster(), 2: SideCluster()})
    story.lead(1)
    made.write()
    made.replicate()
    made.hear()
    return made


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_the_tier_is_what_was_committed(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    life = two_brokers(tmp_path, seed)
    steps = (
        [life.write] * 4
        + [life.look] * 4
        + [life.hear] * 2
        + [life.write_alone, life.move_leader, life.move_leader, life.replicate, life.retain]
    )
    for _ in range(30):
        life.dice.choice(steps)()
    life.come_to_rest()
