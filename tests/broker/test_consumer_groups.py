"""Members of a group on a real broker: rebalances while the tier changes, what is committed, what the group's client fetches, and modes."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkpoint.offsets import first_dirty_offset_in
from compactor.access.rounds import compact
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.consumer import Place, TieredConsumer, open_consumer
from compactor.control.ports import ObjectRetention
from compactor.errors import UsageError
from compactor.features.imports.import_ import ImportOptions, import_directory
from compactor.model.ids import TopicPartition
from compactor.read.records import MessageLike, TierMessage
from compactor.upkeep.orphans import delete_records
from compactor.upkeep.retire import GraceClock, retire_partition
from tests.support.kafka_admin import ClusterAdmin, wait_until
from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_traffic import BrokerRecord, DraftRecord, Writer, WrittenPartition

PARTITIONS = 4
QUICK_MEMBERS = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 300}
"""Settings of the classic protocol; with the protocol of KIP-848 they are the broker's."""
NOW_MS = 10_000_000_000_000
FIRST_MS = 1_700_000_000_000


@dataclass
class TieredTopic:
    """A topic of four partitions on a broker, and a compactor-managed tier that takes its sealed segments."""

    cluster: KafkaCluster
    admin: ClusterAdmin
    folder: Path
    topic: str = field(default_factory=lambda: f"grouped-{uuid.uuid4()}")
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        nodes = list(self.cluster.node_ids)
        self.admin.create_topic(self.topic, replicas=[nodes] * PARTITIONS, segment_bytes=4096, settings={"remote.storage.enable": "false"})
        self.models = [WrittenPartition() for _ in range(PARTITIONS)]
        self.writers = [Writer(self.cluster, self.topic, model, partition=number) for number, model in enumerate(self.models)]
        self.config = self.folder / "tier.toml"
        self.folder.mkdir(exist_ok=True)
        lines = (
            f'[tier]\nurl = "{(self.folder / "tier").as_uri()}"\nstate_dir = "{self.folder / "state"}"\n[cleaner]\nsegment_bytes = 8192\n'
        )
        self.config.write_text(lines)
        self.tier = open_tier(load_settings(str(self.config), {}))

    @property
    def names(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, number) for number in range(PARTITIONS)]

    def write(self, count: int) -> None:
        for writer in self.writers:
            writer.write([DraftRecord(f"k{self.dice.randrange(40)}".encode(), self.dice.randbytes(50), FIRST_MS) for _ in range(count)])

    def bring(self) -> None:
        """Import all segments that the broker does not write any more."""
        for name in self.names:
            policy = self.tier.settings.cleaner.cleaner_policy()
            import_directory(self.tier, self.cluster.nodes[1].log_dir / str(name), name, policy, options=ImportOptions(live=True))

    def compact(self, name: TopicPartition) -> None:
        """Run a round and delete at once what it replaced."""
        compact(self.tier, name, NOW_MS, force=True)
        retire_partition(
            self.tier.ports,
            self.tier.open_partition_log(name),
            self.tier.lease,
            ObjectRetention(grace_ms=0),
            clock=GraceClock(NOW_MS * 2, forced=True),
        )

    def delete_tiered_from_broker(self, name: TopicPartition) -> None:
        self.admin.delete_records(*name, self.tier_end(name))

    def tier_end(self, name: TopicPartition) -> int:
        return self.tier.open_partition_log(name).refresh().end_offset + 1

    def removed(self, name: TopicPartition) -> set[int]:
        """Return the offsets that a round or retention may have removed."""
        state = self.tier.open_partition_log(name).refresh()
        start, clean, last = self.tier.first_readable_offset(state), first_dirty_offset_in(state.vector), {}
        every = self.models[name.partition].uncommitted()
        for record in every:
            if record.offset < clean:
                last[record.key] = record.offset
        return {r.offset for r in every if r.offset < start or (r.offset < clean and last[r.key] > r.offset)}

    def truth(self, name: TopicPartition) -> dict[int, BrokerRecord]:
        return {record.offset: record for record in self.models[name.partition].uncommitted()}

    def open(self, **settings: Any) -> TieredConsumer:
        common = {
            "group.id": self.topic,
            "bootstrap.servers": self.cluster.bootstrap,
            "tier.config": str(self.config),
            "tier.refresh.ms": 100,
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 500,
        }
        return open_consumer(common | settings)


@dataclass
class Readers:
    """Members of a group in one thread, and everything that they have returned."""

    topic: TieredTopic
    open: Callable[[], TieredConsumer]
    members: list[TieredConsumer] = field(default_factory=list)
    found: list[MessageLike] = field(default_factory=list)
    rebalances: int = 0

    def join(self) -> None:
        member = self.open()

        def count(consumer: TieredConsumer, places: list[Place]) -> None:
            self.rebalances += 1

        member.subscribe([self.topic.topic], on_assign=count)
        self.members.append(member)

    def leave(self) -> None:
        self.members.pop(0).close()

    def read(self, times: int = 1, timeout: float = 0.05) -> None:
        for _ in range(times):
            for member in self.members:
                for message in member.consume(20, timeout):
                    assert message.error() is None, message
                    self.found.append(message)

    def read_to_the_end(self) -> None:
        """Read until the last record of every partition was returned, and nothing more comes."""
        last = {(*name, max(self.topic.truth(name))) for name in self.topic.names}
        for _ in range(400):
            self.read()
            if last <= {(message.topic(), message.partition(), message.offset()) for message in self.found}:
                break
        else:
            raise AssertionError(f"{last} are not all among {len(self.found)} messages")
        self.read(10)

    def owners(self) -> list[int]:
        return [len(member.assignment()) for member in self.members]


def read_until(read: Callable[[], object], condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Call ``read`` again and again until a condition holds."""

    def is_met() -> bool:
        read()
        return condition()

    wait_until(is_met, what, seconds=seconds)


@pytest.fixture
def tiered(broker: KafkaCluster, broker_admin: ClusterAdmin, tmp_path: Path) -> TieredTopic:
    return TieredTopic(broker, broker_admin, tmp_path / "a tier")


@pytest.fixture
def readers(tiered: TieredTopic) -> Iterator[Readers]:
    group = Readers(tiered, tiered.open)
    yield group
    while group.members:
        group.leave()


def check_found(tiered: TieredTopic, found: list[MessageLike], *, repeats: bool) -> None:
    """Every record that was not removed was returned, as it was written; where there was no failure, once."""
    for name in tiered.names:
        mine = [message for message in found if message.partition() == name.partition]
        truth = tiered.truth(name)
        times = Counter(message.offset() for message in mine)
        assert set(truth) - set(times) <= tiered.removed(name)
        assert repeats or max(times.values()) == 1
        for message in mine:
            record = truth[message.offset()]
            assert (message.key(), message.value()) == (record.key, record.value)


def test_two_members_share_the_partitions_and_a_later_one_continues_after_what_they_committed(
    tiered: TieredTopic, readers: Readers
) -> None:
    # Offsets are committed when the test asks, and when a member leaves.
    readers.open = lambda: tiered.open(**{"auto.commit.interval.ms": 600_000})
    tiered.write(200)
    tiered.bring()
    for name in tiered.names:
        tiered.delete_tiered_from_broker(name)
    readers.join()
    readers.join()
    read_until(readers.read, lambda: readers.owners() == [2, 2], "both members to have two partitions")
    readers.read_to_the_end()
    check_found(tiered, readers.found, repeats=False)
    assert {type(message) is TierMessage for message in readers.found} == {True, False}
    member, places = readers.members[0], readers.members[0].assignment()
    assert member.commit(asynchronous=False) == [Place(tiered.topic, place.partition, 200) for place in places]
    assert [(at.offset, at.leader_epoch) for at in member.committed(places)] == [(200, 0)] * 2
    readers.leave()
    readers.leave()
    tiered.write(5)
    readers.found.clear()
    readers.join()
    readers.read_to_the_end()
    assert {message.offset() for message in readers.found} == {*range(200, 205)}


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky", "consumer protocol"])
def test_three_members_that_rebalance_while_the_tier_changes_read_every_record_once(
    strategy: str, tiered: TieredTopic, readers: Readers
) -> None:
    classic = QUICK_MEMBERS | {"partition.assignment.strategy": strategy}
    readers.open = lambda: tiered.open(**({"group.protocol": "consumer"} if strategy == "consumer protocol" else classic))
    dice = random.Random(strategy)
    tiered.write(120)
    tiered.bring()
    for step in range(14):
        tiered.write(25)
        name = dice.choice(tiered.names)
        if step % 2:
            tiered.bring()
            tiered.compact(name)
        if step % 4 == 3:
            tiered.delete_tiered_from_broker(dice.choice(tiered.names))
        if step == 9:
            start = tiered.tier_end(name) // 3
            delete_records(tiered.tier, name, start)
            tiered.compact(name)
        if len(readers.members) < 3:
            readers.join()
        elif step in (6, 10):
            readers.leave()
        readers.read(dice.randrange(1, 5))
    read_until(readers.read, lambda: sorted(readers.owners()) == [1, 1, 2], "three members to share four partitions")
    readers.read_to_the_end()
    check_found(tiered, readers.found, repeats=False)
    assert readers.rebalances >= 4  # on a busy machine one rebalance of the new protocol serves a member that joins and one that leaves
    assert any(isinstance(message, TierMessage) for message in readers.found)


class EnoughRead(Exception):
    """Ends the example, which reads for ever."""


def test_the_example_of_the_documentation_reads_the_topic(tiered: TieredTopic) -> None:
    tiered.write(100)
    tiered.bring()
    text = (Path(__file__).parents[2] / "docs" / "consumer.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line]) == 15
    for word, ours in (
        ("127.0.0.1:9092", tiered.cluster.bootstrap),
        ("tiered-compactor.toml", str(tiered.config)),
        ("orders", tiered.topic),
    ):
        assert word in example
        example = example.replace(word, ours)
    printed: list[tuple[int, int]] = []

    def take(topic: str, partition: int, offset: int, key: bytes, value: bytes) -> None:
        record = tiered.truth(TopicPartition(topic, partition))[offset]
        assert (key, value) == (record.key, record.value)
        printed.append((partition, offset))
        if len(printed) == PARTITIONS * 100:
            raise EnoughRead

    with pytest.raises(EnoughRead):
        exec(compile(example, "docs/consumer.md", "exec"), {"print": take})
    assert sorted(printed) == [(partition, offset) for partition in range(PARTITIONS) for offset in range(100)]


@pytest.mark.slow_broker
def test_a_member_that_stalls_loses_its_partitions_and_no_record_is_lost(tiered: TieredTopic, readers: Readers) -> None:
    given_up: list[Place] = []
    tiered.write(150)
    tiered.bring()
    readers.open = lambda: tiered.open(**QUICK_MEMBERS)
    stalled = tiered.open(**QUICK_MEMBERS, **{"max.poll.interval.ms": 6000})
    stalled.subscribe([tiered.topic], on_revoke=lambda consumer, places: given_up.extend(places))
    read_until(lambda: readers.found.extend(stalled.consume(5, 0.2)), lambda: bool(readers.found), "the first records")
    readers.join()
    readers.join()
    read_until(readers.read, lambda: sum(readers.owners()) == PARTITIONS, "the others to take over")
    readers.read_to_the_end()
    (message,) = stalled.consume(1, 5)
    assert "_MAX_POLL_EXCEEDED" in repr(message) or "max.poll" in repr(message)
    assert len(given_up) == PARTITIONS
    stalled.close()
    check_found(tiered, readers.found, repeats=True)


def test_the_client_of_the_group_never_fetches_a_record(tiered: TieredTopic) -> None:
    tiered.write(100)
    tiered.bring()
    reports: list[dict[str, Any]] = []
    settings = {"statistics.interval.ms": 200, "stats_cb": lambda text: reports.append(json.loads(text)), "tier.mode": "remote_only"}
    end = min(map(tiered.tier_end, tiered.names))
    with tiered.open(**settings) as member:
        member.subscribe([tiered.topic])
        found: list[MessageLike] = []
        read_until(lambda: found.extend(member.consume(50, 0.1)), lambda: len(found) >= PARTITIONS * end, "the records of the tier")
        read_until(lambda: member.poll(0.1), lambda: len(reports) > 3, "statistics")
    assert all(isinstance(message, TierMessage) for message in found)
    partitions = [part for report in reports for part in report["topics"].get(tiered.topic, {"partitions": {}})["partitions"].values()]
    assert len([part for part in partitions if part["partition"] >= 0]) >= PARTITIONS
    assert {(part["rxmsgs"], part["rxbytes"]) for part in partitions} == {(0, 0)}


def test_modes_choose_between_tier_and_broker(tiered: TieredTopic) -> None:
    tiered.write(200)
    tiered.bring()
    name = tiered.names[0]
    end = tiered.tier_end(name)
    tiered.admin.delete_records(*name, 60)
    start = tiered.admin.offsets(*name).earliest
    assert 0 < start == 60 < end < 200

    def sources(mode: str, until: int, group: str = "") -> list[tuple[int, str]]:
        """Return the offsets at which the source changes."""
        with tiered.open(**{"tier.mode": mode, "group.id": group}) as consumer:
            consumer.assign([Place(*name, 0)])
            found: list[MessageLike] = []
            read_until(lambda: found.extend(consumer.consume(50, 0.1)), lambda: found[-1:] != [] and found[-1].offset() == until - 1, mode)
        offsets = [message.offset() for message in found]
        assert offsets == [*range(offsets[0], until)]
        kinds = ["tier" if isinstance(message, TierMessage) else "broker" for message in found]
        return [(offsets[at], kind) for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]

    assert sources("remote_only", end) == [(0, "tier")]
    assert sources("kafka_only", 200) == [(60, "broker")]
    assert sources("remote_preferred", 200) == [(0, "tier"), (end, "broker")]
    assert sources("kafka_preferred", 200) == [(0, "tier"), (60, "broker")]
    with pytest.raises(UsageError, match="a group needs brokers, even with tier.mode remote_only"):
        tiered.open(**{"tier.mode": "remote_only", "bootstrap.servers": ""})
