"""Brokers as an agent sees them, without Kafka: directories whose logs grow, roll, are truncated and deleted, and who leads what."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from compactor.access.tier import Tier
from compactor.adapters.brokers.chain import ClusterPartitionLeaders, LeaderReportedLogEnd
from compactor.constants import LeaderEpoch, TopicId
from compactor.errors import StoreError, Unavailable
from compactor.features.agent.agent import UploadAgent
from compactor.features.agent.plan import PartitionUploadState, UploadFailureReason
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import ClusterTopicIds
from compactor.web.console import RequestRouter
from compactor.web.pages import AgentPages
from tests.builders import LogBuilder
from tests.support.deployment import Deployment
from tests.support.tier_cli import batches_of
from tests.support.told import Told

ORDERS = TopicPartition("orders", 0)
CLUSTER = "a-cluster"


@dataclass
class SideBroker:
    """One broker's log directory."""

    root: Path
    number: int = 1

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True)
        (self.root / "meta.properties").write_text(f"#made\nnode.id={self.number}\nversion=1\ncluster.id={CLUSTER}\n")

    def replica(self, name: TopicPartition = ORDERS) -> Replica:
        return Replica(self.root / str(name))

    def cleaned(self, name: TopicPartition, offset: int) -> None:
        (self.root / "cleaner-offset-checkpoint").write_text(f"0\n1\n{name.topic} {name.partition} {offset}\n")


@dataclass
class Replica:
    """A partition's directory on one broker. ``batches``: what it holds, each with its base offset.

    ``topic_id``: empty before Kafka 2.8.
    """

    folder: Path
    batches: list[tuple[int, bytes]] = field(default_factory=list)
    bases: list[int] = field(default_factory=lambda: [0])
    epochs: list[tuple[int, int]] = field(default_factory=list)
    topic_id: str = ""

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.write()

    @property
    def end(self) -> int:
        return self.batches[-1][0] + 1 if self.batches else self.bases[0]

    def append(self, batches: Sequence[tuple[int, bytes]], epochs: Sequence[tuple[int, int]], *, per_segment: int = 4) -> None:
        """One record a batch; a new segment begins when the newest one has ``per_segment``."""
        self.epochs = list(epochs)
        for offset, raw in batches:
            if sum(base >= self.bases[-1] for base, _ in self.batches) >= per_segment:
                self.bases.append(offset)
            self.batches.append((offset, raw))
        self.write()

    def delete_until(self, base: int) -> None:
        """Retention: segments below are gone."""
        self.bases = [known for known in self.bases if known >= base]
        self.batches = [(offset, raw) for offset, raw in self.batches if offset >= base]
        self.write()

    def roll(self) -> None:
        """A new, empty segment begins at the log's end."""
        self.bases.append(self.end)
        self.write()

    def stage_until(self, base: int) -> None:
        """Retention: segments below are staged for deletion, and the checkpoint forgets the epochs that ended before."""
        for known in self.bases:
            if known < base:
                path = self.folder / f"{known:020}.log"
                path.rename(path.with_name(f"{path.name}.deleted"))
        later = [(epoch, start) for epoch, start in self.epochs if start > base]
        earlier = [(epoch, base) for epoch, start in self.epochs if start <= base]
        self.epochs = [*earlier[-1:], *later]
        self.delete_until(base)

    def unlink_staged(self) -> None:
        """The files staged for deletion are deleted."""
        for path in self.folder.glob("*.deleted"):
            path.unlink()

    def truncate(self, offset: int) -> None:
        self.batches = [(known, raw) for known, raw in self.batches if known < offset]
        self.bases = [base for base in self.bases if base < offset] or [offset]
        self.epochs = [(epoch, start) for epoch, start in self.epochs if start < offset]
        self.write()

    def write(self) -> None:
        """The directory as it is to be; files that have not changed are not touched."""
        wanted = {f"{base:020}.log": b"" for base in self.bases}
        for offset, raw in self.batches:
            wanted[f"{max(base for base in self.bases if base <= offset):020}.log"] += raw
        wanted["leader-epoch-checkpoint"] = "".join(
            ["0\n", f"{len(self.epochs)}\n", *(f"{epoch} {start}\n" for epoch, start in self.epochs)]
        ).encode()
        if self.topic_id:
            wanted["partition.metadata"] = f"version: 0\ntopic_id: {self.topic_id}".encode()
        for path in self.folder.iterdir():
            if path.name not in wanted and not path.name.endswith(".deleted"):
                path.unlink()
        for name, data in wanted.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)


@dataclass
class SideCluster:
    """What brokers answer (service.agent.Brokers), and the one truth of each log."""

    leaders_of: dict[TopicPartition, int] = field(default_factory=dict)
    ends_of: dict[TopicPartition, LeaderReportedLogEnd] = field(default_factory=dict)
    retentions: dict[str, int] = field(default_factory=dict)
    delete_delays: dict[str, int] = field(default_factory=dict)
    topic_ids_of: dict[str, str] = field(default_factory=dict)
    compaction_settings_of: dict[str, dict[str, str] | None] = field(default_factory=dict)
    down: bool = False
    cluster_id: str = CLUSTER
    asked: int = 0

    def leaders(self) -> ClusterPartitionLeaders:
        self.asked += 1
        if self.down:
            raise Unavailable("no broker answers")
        return ClusterPartitionLeaders(self.cluster_id, dict(self.leaders_of))

    def log_ends(self, names: Sequence[TopicPartition]) -> Mapping[TopicPartition, LeaderReportedLogEnd | StoreError]:
        self.asked += 1
        if self.down:
            raise Unavailable("no broker answers")
        return {name: self.ends_of.get(name) or Unavailable(f"nobody leads {name}") for name in names}

    def topic_ids(self, names: Sequence[str]) -> ClusterTopicIds:
        self.asked += 1
        if self.down:
            raise Unavailable("no broker answers")
        return ClusterTopicIds(self.cluster_id, {name: TopicId(self.topic_ids_of[name]) for name in names if name in self.topic_ids_of})

    def compaction_settings(self, topics: Sequence[str]) -> Mapping[str, Mapping[str, str] | None]:
        self.asked += 1
        return {topic: self.compaction_settings_of.get(topic, {}) for topic in topics}

    def retention_ms(self, topic: str) -> int | None:
        return self.retentions.get(topic)

    def delete_delay_ms(self, topic: str) -> int | None:
        return self.delete_delays.get(topic)


@dataclass
class PartitionStory:
    """One partition that is written through its leader. ``written``: everything that was ever committed and not truncated."""

    cluster: SideCluster
    name: TopicPartition = ORDERS
    log: LogBuilder = field(default_factory=LogBuilder)
    epochs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def written(self) -> list[bytes]:
        return [batch for _, parts in self.log.segments for batch in parts]

    def lead(self, number: int, *, epoch: int | None = None) -> None:
        self.cluster.leaders_of[self.name] = number
        self.log.leader_epoch = self.log.leader_epoch + 1 if epoch is None else epoch
        self.epochs.append((self.log.leader_epoch, self.log.next_offset))
        self.commit()

    def write(self, replica: Replica, count: int = 10, *, per_segment: int = 4, commit: bool = True) -> None:
        """Into this replica, which leads."""
        made = [(self.log.next_offset, self._batch()) for _ in range(count)]
        replica.append(made, self.epochs, per_segment=per_segment)
        if commit:
            self.commit()

    def follow(self, replica: Replica, *, per_segment: int = 4) -> None:
        """A replica takes what it does not have."""
        known = [(int.from_bytes(raw[:8], "big"), raw) for raw in self.written]
        replica.append([(offset, raw) for offset, raw in known if offset >= replica.end], self.epochs, per_segment=per_segment)

    def commit(self) -> None:
        self.cluster.ends_of[self.name] = LeaderReportedLogEnd(LeaderEpoch(self.log.leader_epoch), self.log.next_offset)

    def truncate(self, offset: int) -> None:
        """An unclean election: what was written from here on never was."""
        parts = [batch for batch in self.written if int.from_bytes(batch[:8], "big") < offset]
        self.log.segments = [(self.log.segments[0][0], parts)]
        self.log.next_offset = offset
        self.epochs = [(epoch, start) for epoch, start in self.epochs if start < offset]

    def _batch(self) -> bytes:
        offset = self.log.next_offset
        self.log.put(f"key-{offset % 7}={offset} in epoch {self.log.leader_epoch}")
        return self.log.segments[-1][1][-1]


@dataclass
class SideTier:
    """A tier and the agents that fill it; ``hurry`` is time that passes for them."""

    folder: Path
    hurried_ms: int = 0
    told: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self.cli = Deployment(self.folder / "a tier", {"publish": {"grace_ms": 0}, "agent": {"topics": ["orders"]}})

    def opened(self) -> Tier:
        opened = self.cli.open()
        clock = opened.ports.clock_ms
        return replace(opened, ports=replace(opened.ports, clock_ms=lambda: clock() + self.hurried_ms))

    def agent(self, broker: SideBroker, cluster: SideCluster, opened: Tier | None = None, **rules: Any) -> UploadAgent:
        """``rules``: of [agent]."""
        opened = opened or self.opened()
        agent = opened.settings.agent.model_copy(update={"log_dirs": (str(broker.root),), **rules})
        settings = opened.settings.model_copy(update={"agent": agent})
        return UploadAgent(replace(opened, settings=settings), cluster, log=self.told)

    def hurry(self, milliseconds: int = 700_000) -> None:
        self.hurried_ms += milliseconds

    def held(self, name: TopicPartition | str = ORDERS) -> list[bytes]:
        """The batches of a partition, as a reader finds them."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        self.cli.do("export", str(name), out)
        return [batch.raw for batch in batches_of(out)]


def settle(agent: UploadAgent) -> PartitionUploadState | None:
    """Looks and uploads until there is nothing more to do; how the partition ``orders-0`` stands then."""
    for _ in range(20):
        agent.scan()
        if not agent.start_due_jobs():
            break
        while agent.status().running:
            agent.process_ended_jobs(30)
    return watch_of(agent)


def watch_of(agent: UploadAgent, name: TopicPartition = ORDERS) -> PartitionUploadState | None:
    return next((watch for watch in agent.status().upload_states if watch.partition == name), None)


def stands(watch: PartitionUploadState | None) -> tuple[int | None, UploadFailureReason | None]:
    assert watch is not None
    return watch.position, watch.trouble


def metric(agent: UploadAgent, name: str) -> float:
    """With ``name``'s labels, or the sum over all."""
    text = RequestRouter(AgentPages(agent.status), agent.loop_age_ms, 1000).respond_to_request("/metrics")[2].decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))


@dataclass
class SideScene:
    """Broker 1 leads ``orders-0`` and has written ten records: segments of four, the newest with two."""

    tier: SideTier
    cluster: SideCluster
    one: SideBroker
    story: PartitionStory
    replica: Replica

    @classmethod
    def in_folder(cls, folder: Path, **more: Any) -> Self:
        """``more``: of those that have more."""
        cluster = SideCluster()
        one = SideBroker(folder / "broker one", 1)
        story = PartitionStory(cluster)
        story.lead(1)
        replica = one.replica()
        story.write(replica)
        return cls(SideTier(folder), cluster, one, story, replica, **more)

    def agent(self, broker: SideBroker | None = None, **rules: Any) -> UploadAgent:
        """``rules``: of [agent]."""
        return self.tier.agent(broker or self.one, self.cluster, self.opened(), **rules)

    def opened(self) -> Tier:
        return self.tier.opened()

    def check(self, end: int) -> None:
        """The tier holds what was written up to ``end``."""
        assert self.tier.held() == self.story.written[:end]


# ---- plays for every layout --------------------------------------------------------------------------------------------------


def two_agents_at_once(scene: SideScene) -> None:
    """Both believe that they lead: one finds it done, whatever the order, and nothing is there twice."""
    agents = [scene.agent(), scene.agent()]
    for _ in range(4):
        for agent in agents:
            agent.scan()
        assert sum(len(agent.start_due_jobs()) for agent in agents)
        for agent in agents:
            while agent.status().running:
                agent.process_ended_jobs(30)
        scene.tier.hurry()
        for agent in agents:
            assert stands(settle(agent))[1] is None
        scene.check(scene.replica.bases[-1])
        scene.story.write(scene.replica, 7)


def leaders_that_roll_elsewhere(scene: SideScene) -> None:
    two = SideBroker(scene.tier.folder / "broker two", 2)
    agents = [scene.agent(), scene.agent(two)]
    replicas = {1: (scene.replica, 4), 2: (two.replica(), 3)}
    for leader in (1, 2, 1, 2, 2, 1):
        replica, rolls = replicas[leader]
        for follower, size in replicas.values():
            scene.story.follow(follower, per_segment=size)
        scene.story.lead(leader)
        scene.story.write(replica, 9, per_segment=rolls)
        for agent in agents:
            scene.tier.hurry(70_000)
            assert stands(settle(agent))[1] is None
        scene.check(replica.bases[-1])
