"""One suite for every GroupClient: the one in memory, and the one over confluent-kafka against a real broker."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from compactor.adapters.kafka_client import KafkaConnection
from compactor.features.consumer.group import ConfluentGroupClient, GroupClient, OffsetWithLeaderEpoch
from compactor.model.ids import TopicPartition
from tests.support.memory_group import MemoryCoordinator
from tests.support.waiting import wait_for


@dataclass
class Held:
    """RebalanceListener that notes what a member holds, and does something when partitions are revoked."""

    names: set[TopicPartition] = field(default_factory=set)
    on_revoke: Callable[[Sequence[TopicPartition]], None] = lambda names: None
    revoked: list[TopicPartition] = field(default_factory=list)

    def on_partitions_assigned(self, names: Sequence[TopicPartition]) -> None:
        assert not self.names & set(names)
        self.names |= set(names)

    def on_partitions_revoked(self, names: Sequence[TopicPartition]) -> None:
        self.revoked += names
        self.names -= set(names)
        self.on_revoke(names)

    def on_partitions_lost(self, names: Sequence[TopicPartition]) -> None:
        self.names -= set(names)


@dataclass
class GroupRig:
    topic: str
    names: set[TopicPartition]
    open: Callable[[], GroupClient]
    is_cooperative: bool


BY_PROTOCOL: dict[str, dict[str, Any]] = {
    "range": {"partition.assignment.strategy": "range", "heartbeat.interval.ms": 300},
    "cooperative-sticky": {"partition.assignment.strategy": "cooperative-sticky", "heartbeat.interval.ms": 300},
    "consumer": {"group.protocol": "consumer"},
}
"""Settings by the way in which members agree: two of the classic protocol, and the protocol of KIP-848."""


@pytest.fixture(params=["memory eager", "memory cooperative", *(pytest.param(name, marks=pytest.mark.broker) for name in BY_PROTOCOL)])
def rig(request: pytest.FixtureRequest) -> Iterator[GroupRig]:
    topic = f"group-{uuid.uuid4()}"
    names = {TopicPartition(topic, number) for number in range(4)}
    opened: list[GroupClient] = []
    is_cooperative = request.param not in ("memory eager", "range")
    if request.param.startswith("memory"):
        make: Callable[[], GroupClient] = MemoryCoordinator(sorted(names), is_cooperative).open
    else:
        cluster, admin = request.getfixturevalue("broker"), request.getfixturevalue("broker_admin")
        admin.create_topic(topic, replicas=[[1]] * 4, settings={"remote.storage.enable": "false"})

        def make() -> GroupClient:
            return ConfluentGroupClient(KafkaConnection(cluster.bootstrap), topic, BY_PROTOCOL[request.param])

    def open_client() -> GroupClient:
        opened.append(make())
        return opened[-1]

    yield GroupRig(topic, names, open_client, is_cooperative)
    for client in opened:
        client.close()


def poll_until(clients: Sequence[GroupClient], condition: Callable[[], bool]) -> None:
    def is_met() -> bool:
        for client in clients:
            assert client.poll_rebalances() == []
        return condition()

    wait_for(is_met, seconds=40)


def test_a_member_commits_and_reads_offsets_with_leader_epochs(rig: GroupRig) -> None:
    client, held = rig.open(), Held()
    client.subscribe([rig.topic], held)
    poll_until([client], lambda: held.names == rig.names)
    first, second = sorted(rig.names)[:2]
    assert client.committed_offsets(rig.names) == {}
    client.commit({first: OffsetWithLeaderEpoch(7, 3), second: OffsetWithLeaderEpoch(9)}, wait=True)
    assert client.committed_offsets(rig.names) == {first: OffsetWithLeaderEpoch(7, 3), second: OffsetWithLeaderEpoch(9)}


def test_members_share_partitions_and_commit_before_they_give_one_up(rig: GroupRig) -> None:
    client, other = rig.open(), rig.open()
    held, others = Held(), Held()
    held.on_revoke = lambda names: client.commit({name: OffsetWithLeaderEpoch(5, 0) for name in names}, wait=True)
    client.subscribe([rig.topic], held)
    poll_until([client], lambda: held.names == rig.names)
    other.subscribe([rig.topic], others)
    poll_until([client, other], lambda: len(held.names) == len(others.names) == 2)
    assert held.names | others.names == rig.names
    assert len(held.revoked) == (2 if rig.is_cooperative else 4)
    assert set(other.committed_offsets(others.names).values()) == {OffsetWithLeaderEpoch(5, 0)}
    client.close()
    poll_until([other], lambda: others.names == rig.names)


def test_an_error_of_the_listener_is_raised_after_the_partitions_were_given_up(rig: GroupRig) -> None:
    def fail(names: Sequence[TopicPartition]) -> None:
        raise ValueError("not now")

    client, other = rig.open(), rig.open()
    held, others = Held(on_revoke=fail), Held()
    client.subscribe([rig.topic], held)
    poll_until([client], lambda: held.names == rig.names)
    other.subscribe([rig.topic], others)
    with pytest.raises(ValueError, match="not now"):
        poll_until([client, other], lambda: False)
    held.on_revoke = lambda names: None
    poll_until([client, other], lambda: len(held.names) == len(others.names) == 2)
