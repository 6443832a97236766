"""Replicas of one partition that tier it, as brokers do: each rolls segments of its own, elections are clean or unclean, copies are slow.

A record is its offset, its leader epoch and a number that no other record has: two replicas have the same record, or another one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.constants import LeaderEpoch, Offset
from compactor.model.remote_log import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
)
from compactor.model.segment import SegmentState
from tests.support.broker_lookups import latest_tiered

Record = tuple[int, int, int]
"""(offset, leader epoch, which one it is)."""


@dataclass
class Replica:
    """Its log, and where its segments begin, the active one last."""

    number: int
    log: list[Record] = field(default_factory=list)
    bases: list[int] = field(default_factory=lambda: [0])

    def lineage(self, end: int | None = None) -> tuple[EpochEntry, ...]:
        starts: dict[int, int] = {}
        for offset, epoch, _ in self.log[: end if end is not None else len(self.log)]:
            starts.setdefault(epoch, offset)
        return tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in starts.items())

    def append(self, record: Record, rng: random.Random) -> None:
        if len(self.log) > self.bases[-1] and rng.random() < 0.25:
            self.bases.append(len(self.log))
        self.log.append(record)

    def follow(self, leader: Replica, count: int, rng: random.Random) -> None:
        """KIP-101: what the leader does not have goes, then its records come."""
        same = 0
        while same < min(len(self.log), len(leader.log)) and self.log[same] == leader.log[same]:
            same += 1
        if same < len(self.log):
            del self.log[same:]
            self.bases = [base for base in self.bases if base < same] or [0]
        for record in leader.log[same : same + count]:
            self.append(record, rng)


@dataclass
class Copy:
    """Of one segment, begun by a leader. ``lineage``: that of the log it was copied from, up to its end."""

    start: RemoteLogSegmentMetadataRecord
    lineage: tuple[EpochEntry, ...]


class Replicas:
    """:param zombies: how often a copy is slow, so that its leader may be replaced meanwhile. ``follows``: how often a follower fetches."""

    def __init__(
        self, rng: random.Random, where: TopicIdPartition, *, unclean: float = 0.2, zombies: float = 0.3, follows: float = 0.8
    ) -> None:
        self.rng = rng
        self.where = where
        self.unclean = unclean
        self.zombies = zombies
        self.follows = follows
        self.replicas = [Replica(number) for number in range(3)]
        self.leader = self.replicas[0]
        self.epoch = 0
        self.cache = RemoteLogMetadataCache(where)
        self.events: list[MetadataRecord] = []
        self.contents: dict[bytes, tuple[Record, ...]] = {}
        self.copies: list[Copy] = []
        self.lineages: dict[bytes, tuple[EpochEntry, ...]] = {}
        self.made = 0
        self.tiered_by: Replica | None = None

    def play(self, steps: int) -> None:
        for _ in range(steps):
            dice = self.rng.random()
            if dice < 0.45:
                self.produce(self.rng.randint(1, 6))
            elif dice < 0.75:
                self.tier(slow=self.rng.random() < self.zombies)
            elif dice < 0.9:
                self.elect()
            elif self.copies:
                self.finish(self.copies.pop(self.rng.randrange(len(self.copies))))

    def settle(self) -> None:
        """The leader goes on until it has tiered something of its own epoch; copies of others come to their ends before, or never."""
        while self.copies and self.rng.random() < 0.7:
            self.finish(self.copies.pop())
        self.copies = []
        while not any(record[1] == self.epoch for record in self.newest()):
            self.produce(3)
            self.tier(slow=False)

    def newest(self) -> tuple[Record, ...]:
        held = [self.contents[raw_id] for state in self.cache.epochs.values() for raw_id in state.ids if raw_id in self.contents]
        return max(held, key=lambda rows: rows[-1][1:], default=())

    def produce(self, count: int) -> None:
        for _ in range(count):
            self.made += 1
            self.leader.append((len(self.leader.log), self.epoch, self.made), self.rng)
        for replica in self.replicas:
            if replica is not self.leader and self.rng.random() < self.follows:
                replica.follow(self.leader, self.rng.choice((1, 3, 1000)), self.rng)

    def elect(self) -> None:
        """A clean one has all that is tiered: a leader tiers what is committed."""
        others = [replica for replica in self.replicas if replica is not self.leader]
        chosen = self.rng.choice(others)
        if self.rng.random() >= self.unclean:
            chosen.follow(self.leader, 1000, self.rng)
        self.leader = chosen
        self.epoch += 1
        self.produce(1)

    def tier(self, *, slow: bool) -> None:
        """RLMCopyTask: the rolled segments behind what its own lineage says is tiered."""
        log = self.leader
        highest, _ = latest_tiered(self.cache, log.lineage(), len(log.log))
        for base, end in zip(log.bases, log.bases[1:], strict=False):
            if end - 1 > highest:
                copy = self.begin(log, base, end)
                if slow:
                    self.copies.append(copy)
                else:
                    self.finish(copy)
                break

    def begin(self, log: Replica, base: int, end: int) -> Copy:
        raw_id = (len(self.contents) + 1).to_bytes(16, "big")
        rows = tuple(log.log[base:end])
        self.contents[raw_id] = rows
        starts: dict[int, int] = {}
        for offset, epoch, _ in rows:
            starts.setdefault(epoch, offset)
        epochs = tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in starts.items())
        start = RemoteLogSegmentMetadataRecord(self.where, raw_id, base, end - 1, log.number, 1000, 5, epochs, 100)
        self.say(start)
        self.lineages[raw_id] = log.lineage(end)
        return Copy(start, self.lineages[raw_id])

    def finish(self, copy: Copy) -> None:
        state = SegmentState.COPY_SEGMENT_FINISHED
        self.say(RemoteLogSegmentMetadataUpdateRecord(self.where, copy.start.segment_id, copy.start.broker_id, 6, state))

    def say(self, record: MetadataRecord) -> None:
        assert self.cache.apply_record(record, len(self.events)) is None
        self.events.append(record)
