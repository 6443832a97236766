"""``config check`` of a tier that brokers write: the cluster, its metadata topic, the topics, what this user may do. Reads only.

What is unsafe comes with the command that mends it. Nothing is tried out in the tier itself: brokers keep their segments there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from compactor.bootstrap import Tier
from compactor.errors import BadData, CompactorError, StoreError
from compactor.metadata_topic.admin import ClusterFacts, MissingRight, TopicFacts, metadata_topic_problem
from compactor.model.ids import TopicPartition

LEAST = (3, 8)
"""Brokers before that let consumers hang where an offset was compacted away (KAFKA-15388)."""
WANTED: Mapping[str, tuple[str, str]] = {
    "remote.storage.enable": ("true", "nothing of the topic is tiered any more"),
    "cleanup.policy": ("delete", "brokers tier no compacted topic"),
    "retention.bytes": ("-1", "while a round publishes, brokers count segments twice and may delete too much of the log's beginning"),
    "retention.ms": ("-1", "brokers delete what is older, compacted or not: the latest value of a key, too"),
}
_ERRORS = ("remote.storage.enable", "cleanup.policy")


class CheckFinding(NamedTuple):
    """``severity``: error (it does not work like this), warning (unsafe for who compacts), note."""

    severity: str
    kind: str
    object: str
    detail: str
    hint: str


class ClusterAnswers(Protocol):
    """KafkaAdmin is one."""

    def cluster(self) -> ClusterFacts: ...

    def metadata_topic(self, *, write: bool = False) -> TopicFacts: ...

    def topics(self, names: Sequence[str], *, write: bool = False) -> dict[str, TopicFacts]: ...


def check_cluster(admin: ClusterAnswers, servers: str, *, write: bool) -> list[CheckFinding]:
    """Brokers and the metadata topic. ``write``: whether rounds are meant to be published there."""
    found: list[CheckFinding] = []
    try:
        cluster = admin.cluster()
        found += _of_brokers(cluster)
        topic = admin.metadata_topic(write=write)
    except StoreError as error:
        return [*found, CheckFinding("error", "brokers", servers, error.message, error.hint)]
    found += _of_rights(topic.missing_rights)
    if problem := metadata_topic_problem(topic):
        found.append(
            CheckFinding("error", "metadata-topic", topic.topic, problem, "Segments whose records are lost are lost to brokers, too")
        )
    return found


def check_topics(admin: ClusterAnswers, names: Sequence[str]) -> list[CheckFinding]:
    """The settings of the topics that are read."""
    found: list[CheckFinding] = []
    for name in names:
        try:
            topic = admin.topics([name])[name]
        except StoreError as error:
            found.append(CheckFinding("error", "topic", name, error.message, error.hint))
            continue
        found += _of_rights(topic.missing_rights)
        for setting, (wanted, why) in WANTED.items():
            value = topic.settings.get(setting)
            if value is not None and value.value != wanted:
                mend = f"kafka-configs --alter --topic {name} --add-config {setting}={wanted}"
                severity = "error" if setting in _ERRORS else "warning"
                found.append(CheckFinding(severity, "topic", name, f"{setting} is {value.value}, not {wanted}: {why}", mend))
        led = [number for number, one in topic.partitions.items() if one.leader < 0]
        if led:
            found.append(CheckFinding("warning", "topic", name, f"partitions {led} have no leader", "Look at the brokers"))
    return found


def check_reading(opened: Tier, names: Sequence[TopicPartition]) -> list[CheckFinding]:
    """Whether objects of the tier can be listed and read: of the first partition that has a segment."""
    layout = opened.ports.layout
    url = opened.settings.tier_url
    for name in names:
        try:
            live = opened.open(name).refresh().live
            if not live:
                continue
            if not any(one.segment_id for one in layout.list(name)):
                detail = f"{name} has {len(live)} segments by its metadata, and nothing is listed in {layout.folder(name)}"
                return [CheckFinding("error", "tier", url, detail, "Correct url, layout or key_prefix under [tier]")]
            layout.read(name, live[-1], "log", 0, 1)
        except (StoreError, BadData) as error:
            return [CheckFinding("error", "tier", url, error.message, error.hint)]
        return []
    return [CheckFinding("note", "tier", url, "no partition has a segment yet, so that reading could not be tried", "")]


def check_names(opened: Tier) -> tuple[list[TopicPartition], list[CheckFinding]]:
    """The partitions, or why there are none to be named."""
    try:
        opened.metadata.refresh(within_s=0.0)
        names = opened.metadata.names()
    except CompactorError as error:
        return [], [CheckFinding("error", "metadata", opened.metadata.where, error.message, error.hint)]
    if opened.metadata.incomplete():
        said = "records are missing: segments that they named cannot be seen"
        return names, [CheckFinding("warning", "metadata", opened.metadata.where, said, "`orphans purge` refuses to work with it")]
    return names, []


def check_budget(opened: Tier, names: Sequence[TopicPartition]) -> list[CheckFinding]:
    """Whether a round over each partition, all of its segments, has room in [publish] metadata_records_per_hour."""
    per_hour = opened.settings.publish.metadata_records_per_hour
    if not per_hour:
        return []
    sizes = []
    for name in names:
        try:
            sizes.append((len(opened.metadata.folded(name).cache.segments), name))
        except CompactorError:
            continue  # `check_reading` meets it
    tight = sorted(((count, name) for count, name in sizes if 2 * (count + 1) > per_hour), reverse=True)
    if not tight:
        return []
    count, name = tight[0]
    said = (
        f"it is {per_hour}, and a first round over {name} with its {count} segments says about {2 * (count + 1)} records: "
        f"it is begun in an hour that has none ({len(tight)} partitions are like that)"
    )
    hint = "Raise it, or leave it: later rounds are smaller"
    return [CheckFinding("warning", "budget", "publish.metadata_records_per_hour", said, hint)]


def _of_brokers(cluster: ClusterFacts) -> Iterator[CheckFinding]:
    for broker in cluster.brokers:
        where = f"broker {broker.id} ({broker.address})"
        if not broker.version:
            yield CheckFinding("note", "version", where, "its version is not told", "Allow DescribeConfigs on the cluster")
        elif _number(broker.version) < LEAST:
            said = f"it is of version {broker.version}: consumers hang where an offset was compacted away before 3.8"
            yield CheckFinding("warning", "version", where, said, "Upgrade before compacting; reading works")
    yield from _of_rights(cluster.missing_rights)


def _of_rights(rights: Sequence[MissingRight]) -> Iterator[CheckFinding]:
    for right in rights:
        where = "--cluster" if "cluster" in right.resource else f"--topic {right.resource.removeprefix('topic ')}"
        operation = "".join(part.capitalize() for part in right.operation.split("_"))
        mend = f"kafka-acls --add --allow-principal User:... --operation {operation} {where}"
        severity = "error" if right.operation == "READ" else "warning"
        yield CheckFinding(severity, "acl", right.resource, str(right), mend)


def _number(version: str) -> tuple[int, int]:
    parts = [int(part) if part.isdigit() else 0 for part in (*version.split("."), "99")[:2]]
    return parts[0], parts[1]
