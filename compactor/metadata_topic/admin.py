"""Facts about a cluster that commands need: brokers, topic ids, leaders, offsets, settings with their source, rights.

A cluster's administrator decides what may be asked. What may not is a Finding of the answer, and the fact is missing: never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compactor.errors import Refused, Unavailable
from compactor.metadata_topic.codec import TOPIC, TopicIdPartition
from compactor.metadata_topic.confluent_topic import raw_uuid
from compactor.metadata_topic.connection import AdminSession, KafkaConnection, load

TOPIC_SETTINGS = (
    "cleanup.policy", "retention.ms", "retention.bytes", "local.retention.ms", "local.retention.bytes", "remote.storage.enable",
    "remote.log.copy.disable", "min.cleanable.dirty.ratio", "delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms",
    "segment.bytes", "segment.index.bytes", "index.interval.bytes", "message.timestamp.type", "min.insync.replicas",
)  # fmt: skip
_SOURCES = {1: "topic", 2: "broker", 3: "cluster", 4: "static", 5: "default", 6: "group", 0: "unknown"}
"""Of librdkafka's ConfigSource. ``topic``: set on the topic itself (Kafka's DYNAMIC_TOPIC_CONFIG)."""
_OLD_VERSION = "inter.broker.protocol.version"


@dataclass(frozen=True)
class Setting:
    """``source``: topic, broker, cluster, static (server.properties) or default."""

    value: str
    source: str


@dataclass(frozen=True)
class MissingRight:
    """What this user may not do, and what that keeps this program from."""

    resource: str
    operation: str
    needed_for: str

    def __str__(self) -> str:
        return f"{self.operation} on {self.resource} is not allowed: {self.needed_for}"


@dataclass(frozen=True)
class BrokerFacts:
    """``version``: major and minor as far as brokers tell it, empty where they may not be asked.

    Kafka 3 names it as the default of inter.broker.protocol.version, which Kafka 4 has no more: there it is "4".
    """

    id: int
    address: str
    version: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    cluster_id: str
    brokers: tuple[BrokerFacts, ...]
    missing_rights: tuple[MissingRight, ...] = ()


@dataclass(frozen=True)
class LeaderFacts:
    """``leader``: -1 where there is none. ``leader_epoch``: -1 where the leader does not say it."""

    leader: int
    leader_epoch: int
    log_start: int
    log_end: int
    last_stable: int


@dataclass(frozen=True)
class TopicFacts:
    """``settings`` is empty where they may not be asked for. ``log_end`` of a partition is its high watermark."""

    topic: str
    topic_id: bytes
    partitions: Mapping[int, LeaderFacts]
    settings: Mapping[str, Setting]
    missing_rights: tuple[MissingRight, ...] = ()

    def of(self, partition: int) -> TopicIdPartition:
        return TopicIdPartition(self.topic_id, self.topic, partition)

    def set_on_topic(self) -> Mapping[str, str]:
        """Those that the topic's owner has chosen: policy that goes before this program's own."""
        return {name: setting.value for name, setting in self.settings.items() if setting.source == "topic"}


class KafkaAdmin:
    """Connects on first use. All methods raise Unavailable, Refused (TLS, login, no such topic, no right to describe it)."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._timeout_s = connection.timeout_s
        self._session = AdminSession(connection)
        self._versions: dict[int, str] = {}

    def cluster(self) -> ClusterFacts:
        admin = self._session.client
        timeout = self._timeout_s
        described = self._session.answers("describe the cluster", lambda: {"": admin.describe_cluster(request_timeout=timeout)})[""]
        versions: dict[int, str] = {}
        missing = []
        for node in described.nodes:
            try:
                versions[node.id] = _version(self._settings("BROKER", [str(node.id)])[str(node.id)])
            except Refused as error:
                missing = [MissingRight("the cluster", "DESCRIBE_CONFIGS", f"versions of brokers are unknown ({error.message})")]
            except Unavailable:
                if node.id not in self._versions:
                    raise
                versions[node.id] = self._versions[node.id]  # it has just died, and is still listed
        self._versions |= versions
        brokers = tuple(BrokerFacts(node.id, f"{node.host}:{node.port}", versions.get(node.id, "")) for node in described.nodes)
        return ClusterFacts(described.cluster_id, tuple(sorted(brokers, key=lambda one: one.id)), tuple(missing))

    def topic_names(self) -> list[str]:
        """All that this user may describe."""
        return sorted(self._session.listed("list topics").topics)

    def topics(self, names: Sequence[str], *, write: bool = False) -> dict[str, TopicFacts]:
        """``write``: whether the right to append is needed too, as it is on the metadata topic of whoever compacts."""
        if not names:
            return {}
        kafka = load()
        admin = self._session.client
        wanted = kafka.TopicCollection(list(names))
        timeout = self._timeout_s
        described = self._session.answers(
            f"describe {', '.join(names)}",
            lambda: admin.describe_topics(wanted, include_authorized_operations=True, request_timeout=timeout),
        )
        offsets = self._offsets({name: [one.id for one in topic.partitions if one.leader is not None] for name, topic in described.items()})
        settings = self._topic_settings(list(described))
        return {name: self._facts(name, topic, offsets, settings[name], write=write) for name, topic in described.items()}

    def metadata_topic(self, *, write: bool = False) -> TopicFacts:
        """Where brokers write what is tiered. Raises Refused where it does not exist: nothing was ever tiered there."""
        return self.topics([TOPIC], write=write)[TOPIC]

    def close(self) -> None:
        self._session.close()

    def _facts(
        self,
        name: str,
        topic: Any,
        offsets: Mapping[tuple[str, int], LeaderFacts],
        found: Mapping[str, Setting] | Refused,
        *,
        write: bool,
    ) -> TopicFacts:
        allowed = {operation.name for operation in topic.authorized_operations or ()}
        needed = {"READ": "its records cannot be read"} | ({"WRITE": "nothing can be published"} if write else {})
        missing = [MissingRight(f"topic {name}", right, why) for right, why in needed.items() if allowed and right not in allowed]
        settings: Mapping[str, Setting] = {}
        if isinstance(found, Refused):
            missing.append(MissingRight(f"topic {name}", "DESCRIBE_CONFIGS", f"its settings are unknown ({found.message})"))
        else:
            settings = found
        partitions = {}
        for one in topic.partitions:
            at = offsets.get((name, one.id), LeaderFacts(-1, -1, -1, -1, -1))
            leader = -1 if one.leader is None else one.leader.id
            partitions[one.id] = LeaderFacts(leader, at.leader_epoch, at.log_start, at.log_end, at.last_stable)
        return TopicFacts(name, raw_uuid(topic.topic_id), partitions, settings, tuple(missing))

    def _offsets(self, partitions: Mapping[str, Iterable[int]]) -> dict[tuple[str, int], LeaderFacts]:
        """Of those that have a leader who answers. A leader's answer to "latest" names its epoch."""
        kafka = load()
        spec, isolation = kafka.admin.OffsetSpec, kafka.IsolationLevel
        wanted = [kafka.TopicPartition(name, number) for name, numbers in partitions.items() for number in numbers]
        if not wanted:
            return {}
        asked = (
            self._list(wanted, spec.earliest(), isolation.READ_UNCOMMITTED),
            self._list(wanted, spec.latest(), isolation.READ_UNCOMMITTED),
            self._list(wanted, spec.latest(), isolation.READ_COMMITTED),
        )
        found = {}
        for where in wanted:
            start, end, stable = (answers[where.topic, where.partition] for answers in asked)
            if min(start.offset, end.offset, stable.offset) < 0:
                continue  # librdkafka's own number beside the answers of others: this leader has given none
            epoch = end.leader_epoch if end.leader_epoch is not None else -1
            found[where.topic, where.partition] = LeaderFacts(-1, epoch, start.offset, end.offset, stable.offset)
        return found

    def _list(self, wanted: Sequence[Any], spec: Any, isolation: Any) -> dict[tuple[str, int], Any]:
        admin = self._session.client
        requests = dict.fromkeys(wanted, spec)
        timeout = self._timeout_s
        found = self._session.answers(
            "list offsets", lambda: admin.list_offsets(requests, isolation_level=isolation, request_timeout=timeout)
        )
        return {(at.topic, at.partition): answer for at, answer in found.items()}

    def _topic_settings(self, names: Sequence[str]) -> dict[str, dict[str, Setting] | Refused]:
        """One request for all of them; each by itself where one of them may not be asked for."""
        try:
            return dict(self._settings("TOPIC", names))
        except Refused as error:
            if len(names) == 1:
                return {names[0]: error}
        return {name: found for one in names for name, found in self._topic_settings([one]).items()}

    def _settings(self, kind: str, names: Sequence[str]) -> dict[str, dict[str, Setting]]:
        """Of topics those that this program looks at; of a broker all."""
        kafka = load()
        resources = [kafka.admin.ConfigResource(kafka.admin.ResourceType[kind], name) for name in names]
        admin = self._session.client
        timeout = self._timeout_s
        what = f"settings of {kind.lower()} {', '.join(names)}"
        found = self._session.answers(what, lambda: admin.describe_configs(resources, request_timeout=timeout))
        return {resource.name: _chosen(entries, kind) for resource, entries in found.items()}


def metadata_topic_problem(facts: TopicFacts) -> str:
    """Why nothing may be written into this metadata topic, or nothing. An unknown setting is a problem, too."""
    wanted = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
    for name, value in wanted.items():
        setting = facts.settings.get(name)
        if setting is None:
            return f"{name} of {facts.topic} is unknown: it must be {value}"
        if setting.value != value:
            mend = f"kafka-configs --alter --topic {facts.topic} --add-config {name}={value}"
            return f"{name} of {facts.topic} is {setting.value}, it must be {value} or segments get lost in it ({mend})"
    lost = [number for number, one in facts.partitions.items() if one.log_start > 0]
    return f"{facts.topic} has lost its beginning in partitions {lost}" if lost else ""


def _chosen(entries: Mapping[str, Any], kind: str) -> dict[str, Setting]:
    wanted = entries if kind == "BROKER" else [entry for entry in TOPIC_SETTINGS if entry in entries]
    return {entry: Setting(entries[entry].value or "", _SOURCES.get(entries[entry].source, "unknown")) for entry in wanted}


def _version(settings: Mapping[str, Setting]) -> str:
    """3.9 of "3.9-IV0"; an older one that somebody has pinned is the least that the broker is."""
    if not settings:
        return ""
    said = settings.get(_OLD_VERSION)
    return said.value.split("-")[0] if said is not None and said.value else "4"
