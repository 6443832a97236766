"""Kafka's group coordinator in memory: GroupClient for tests. Members take turns, and a rebalance happens when all have polled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compactor.features.consumer.group import OffsetWithLeaderEpoch, RebalanceListener
from compactor.model.ids import TopicPartition


@dataclass
class MemoryCoordinator:
    """A group of which members get equal parts of ``partitions``. With ``is_cooperative`` they keep what stays theirs."""

    partitions: list[TopicPartition]
    is_cooperative: bool = False
    committed: dict[TopicPartition, OffsetWithLeaderEpoch] = field(default_factory=dict)
    members: list[MemoryGroup] = field(default_factory=list)

    def open(self) -> MemoryGroup:
        return MemoryGroup(self)

    def share_of(self, member: MemoryGroup) -> set[TopicPartition]:
        if member not in self.members:
            return set()
        at = self.members.index(member)
        return set(self.partitions[at :: len(self.members)])

    def free(self) -> set[TopicPartition]:
        return set(self.partitions) - {name for member in self.members for name in member.held}


@dataclass(eq=False)
class MemoryGroup:
    """GroupClient of one member."""

    coordinator: MemoryCoordinator
    listener: RebalanceListener | None = None
    held: set[TopicPartition] = field(default_factory=set)

    def subscribe(self, topics: Sequence[str], listener: RebalanceListener) -> None:
        self.listener = listener
        self.coordinator.members.append(self)

    def unsubscribe(self) -> None:
        self._give_up(self.held)
        self.coordinator.members.remove(self)

    def lose(self) -> None:
        """Leave the group as a member does whose session has ended: the partitions belong to others before it learns of it."""
        lost, self.held = self.held, set()
        self.coordinator.members.remove(self)
        if self.listener is not None:
            self.listener.on_partitions_lost(sorted(lost))

    def poll_rebalances(self) -> Sequence[Any]:
        wanted = self.coordinator.share_of(self)
        if self.held != wanted:
            self._give_up(self.held - wanted if self.coordinator.is_cooperative else self.held)
            added = (wanted - self.held) & self.coordinator.free()
            self.held |= added
            if added and self.listener is not None:
                self.listener.on_partitions_assigned(sorted(added))
        return []

    def commit(self, offsets: Mapping[TopicPartition, OffsetWithLeaderEpoch], *, wait: bool) -> None:
        self.coordinator.committed.update(offsets)

    def committed_offsets(self, names: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetWithLeaderEpoch]:
        return {name: self.coordinator.committed[name] for name in names if name in self.coordinator.committed}

    def close(self) -> None:
        if self in self.coordinator.members:
            self.unsubscribe()

    def _give_up(self, names: set[TopicPartition]) -> None:
        if names and self.listener is not None:
            given = sorted(names)
            try:
                self.listener.on_partitions_revoked(given)
            finally:
                self.held -= set(given)
