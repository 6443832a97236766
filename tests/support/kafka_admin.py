"""What tests ask of a cluster and do to it: topics, offsets, leaders, settings, rights, the metadata topic in Kafka's own words."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ConfigResource, ConfigResourceType, ResourcePattern, ResourceType
from kafka.errors import KafkaError, RequestTimedOutError, UnknownBrokerIdError
from kafka.protocol.consumer import OffsetSpec

from tests.support.kafka_broker import KafkaCluster
from tests.support.kafka_jars import TOOLS, broker_jars

METADATA_TOPIC = "__remote_log_metadata"
FORMATTER = "org.apache.kafka.server.log.remote.metadata.storage.serialization.RemoteLogMetadataSerde$RemoteLogMetadataFormatter"


class NotYet(Exception):
    """What was waited for did not come; says what it was and how things stood."""


@dataclass(frozen=True)
class ListedOffsets:
    """What a broker answers to ListOffsets. ``latest_tiered`` is -1 where nothing is tiered."""

    earliest: int
    latest: int
    earliest_local: int
    latest_tiered: int


@dataclass(frozen=True)
class FoundOffset:
    """ListOffsets by timestamp: the first record at or after it; all -1 where there is none."""

    offset: int
    timestamp: int
    leader_epoch: int


@dataclass(frozen=True)
class Leadership:
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


class ClusterAdmin:
    """One connection, for one thread. Errors are kafka-python's KafkaError."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self.cluster = cluster
        self._client: Any = self._connected()

    def _connected(self) -> Any:
        return KafkaAdminClient(bootstrap_servers=self.cluster.bootstrap.split(","), request_timeout_ms=20_000)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._client.close()

    def create_topic(
        self,
        topic: str,
        *,
        replicas: list[list[int]] | None = None,
        segment_bytes: int = 16_384,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """A tiered topic that a broker never cleans. ``replicas``: per partition the brokers, the preferred leader first.

        Segments are as small as wanted, and what is tiered leaves the brokers at once. ``settings``: a topic's, in Kafka's names.
        """
        small = "internal.segment.bytes" if self.cluster.version.startswith("4") else "segment.bytes"  # Kafka 4: 1 MiB or more
        chosen = {
            "remote.storage.enable": "true",
            "cleanup.policy": "delete",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "local.retention.bytes": "1",
            "file.delete.delay.ms": "100",
            "index.interval.bytes": "512",
            small: str(segment_bytes),
        }
        chosen |= settings or {}
        assignments = dict(enumerate(replicas or [list(self.cluster.node_ids)]))
        wanted = {topic: {"assignments": assignments, "configs": chosen}}
        try:
            self._client.create_topics(wanted, wait_for_metadata=True)
        except UnknownBrokerIdError:  # nothing was sent: the broker that it asked first did not know of one that had just started
            wait_until(self._knows_all_brokers, "all brokers to be known")
            self._client.create_topics(wanted, wait_for_metadata=True)

    def _knows_all_brokers(self) -> bool:
        self._client.close()
        self._client = self._connected()
        known = {each["broker_id"] for each in self._client.describe_cluster()["brokers"] if not each.get("is_fenced")}
        return known >= set(self.cluster.node_ids)

    def delete_topic(self, topic: str) -> None:
        """Returns when its name is gone; the brokers then delete what it had in the tier, one segment after the other."""
        self._client.delete_topics([topic])
        wait_until(lambda: topic not in self._client.list_topics(), f"{topic} to be deleted")

    def add_partitions(self, topic: str, count: int) -> None:
        """Until it has ``count``, all led."""
        self._client.create_partitions({topic: count})
        wait_until(lambda: all(self.leadership(topic, each).leader > 0 for each in range(count)), f"{topic} to have {count} partitions")

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._client.delete_records({TopicPartition(topic, partition): before})

    def set_config(self, topic: str, settings: Mapping[str, str]) -> None:
        self._client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, dict(settings))], raise_on_unknown=False)

    def offsets(self, topic: str, partition: int = 0) -> ListedOffsets:
        where = TopicPartition(topic, partition)

        def ask(spec: int) -> int:
            return int(self._client.list_partition_offsets({where: spec})[where].offset)

        return ListedOffsets(
            ask(OffsetSpec.EARLIEST), ask(OffsetSpec.LATEST), ask(OffsetSpec.EARLIEST_LOCAL), ask(OffsetSpec.LATEST_TIERED)
        )

    def offset_by_timestamp(self, topic: str, partition: int, timestamp: int) -> FoundOffset:
        where = TopicPartition(topic, partition)
        until = time.monotonic() + 120
        while True:
            try:
                found = self._client.list_partition_offsets({where: timestamp})[where]
            except RequestTimedOutError:  # the leader looks into the tier for it, and gives up after a while
                if time.monotonic() > until:
                    raise
                continue
            return FoundOffset(found.offset, found.timestamp, -1 if found.leader_epoch is None else found.leader_epoch)

    def leadership(self, topic: str, partition: int = 0) -> Leadership:
        [described] = self._client.describe_topics([topic])
        [one] = [item for item in described["partitions"] if item["partition_index"] == partition]
        return Leadership(one["leader_id"], one["leader_epoch"], tuple(one["replica_nodes"]), tuple(one["isr_nodes"]))

    def topic_id(self, topic: str) -> str:
        """As in directory names of the tier: URL-safe base64 without padding."""
        [found] = {path.name[-22:] for path in self.cluster.tier.glob(f"{topic}-*") if path.name[: -22 - 1].rsplit("-", 1)[0] == topic}
        return found

    def move_leader(self, topic: str, partition: int, to: int) -> Leadership:
        """Another replica leads, cleanly. Returns how it stands then; the leader epoch has grown."""
        now = self.leadership(topic, partition)
        wait_until(lambda: to in self.leadership(topic, partition).in_sync, f"{topic}-{partition} to be in sync on {to}")
        where = TopicPartition(topic, partition)
        self._client.alter_partition_reassignments({where: [to, *(node for node in now.replicas if node != to)]})
        wait_until(lambda: not self._client.list_partition_reassignments([where]), f"{topic}-{partition} to be reassigned")
        self._client.elect_leaders(0, {topic: [partition]})
        wait_until(lambda: self.leadership(topic, partition).leader == to, f"{topic}-{partition} to be led by {to}")
        return self.leadership(topic, partition)

    def active_base(self, topic: str, partition: int = 0) -> int:
        """Base offset of the segment that the leader writes."""
        log_dir = self.cluster.nodes[self.leadership(topic, partition).leader].log_dir / f"{topic}-{partition}"
        return max(int(path.stem) for path in log_dir.glob("*.log"))

    def wait_tiered(self, topic: str, partition: int = 0, *, seconds: float = 60.0) -> ListedOffsets:
        """Until all but the active segment is in the tier, and nothing else is left of it on the leader but what it shall keep."""

        def done() -> bool:
            active = self.active_base(topic, partition)
            now = self.offsets(topic, partition)
            return now.latest_tiered == active - 1 and now.earliest_local == active

        wait_until(done, f"{topic}-{partition} to be tiered", seconds=seconds, stand=lambda: str(self.offsets(topic, partition)))
        return self.offsets(topic, partition)

    def allow(self, user: str, *rights: tuple[str, str, str]) -> None:
        """ACLs: ("TOPIC" | "CLUSTER" | "GROUP", name, "READ" | "DESCRIBE" | ...). A cluster's name is ``kafka-cluster``."""
        made = [
            ACL(f"User:{user}", "*", ACLOperation[operation], ACLPermissionType.ALLOW, ResourcePattern(ResourceType[kind], name))
            for kind, name, operation in rights
        ]
        failed = self._client.create_acls(made)["failed"]
        if failed:
            raise KafkaError(str(failed))

    def tier_files(self, topic: str, partition: int = 0) -> list[Path]:
        """What lies in the tier of one partition, whatever its topic id."""
        return sorted(path for path in self.cluster.tier.glob(f"{topic}-{partition}-{'?' * 22}/*") if path.is_file())

    def metadata_events(self) -> list[str]:
        """All of ``__remote_log_metadata`` as Kafka's own formatter prints it, a line each, partition by partition."""
        [described] = self._client.describe_topics([METADATA_TOPIC])
        offsets = [self.offsets(METADATA_TOPIC, one["partition_index"]) for one in described["partitions"]]
        count = sum(one.latest - one.earliest for one in offsets)
        command = [
            *broker_jars(TOOLS).command("org.apache.kafka.tools.consumer.ConsoleConsumer"),
            "--bootstrap-server", self.cluster.bootstrap, "--topic", METADATA_TOPIC, "--from-beginning", "--timeout-ms", "60000",
            "--max-messages", str(count),
            "--formatter", FORMATTER,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("partition: ")]
        if len(lines) != count:
            raise NotYet(f"the console consumer printed {len(lines)} of {count} records: {done.stderr[-1000:]}")
        return lines


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 60.0, stand: Callable[[], str] = lambda: "not so") -> None:
    """Asks again and again; a broker that is not ready to answer counts as "no". Raises NotYet."""
    deadline = time.monotonic() + seconds
    while True:
        last = ""
        try:
            if condition():
                return
        except KafkaError as error:
            last = f" ({error!r})"
        if time.monotonic() > deadline:
            raise NotYet(f"waited {seconds:.0f} s for {what}: {stand()}{last}")
        time.sleep(0.1)
