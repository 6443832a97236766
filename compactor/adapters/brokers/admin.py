"""Facts about a Kafka cluster. If the user lacks a permission, the answer contains a MissingPermission and the fact is absent; it is never
guessed.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from compactor.adapters.brokers.codec import TOPIC
from compactor.adapters.brokers.topic import uuid_to_bytes
from compactor.adapters.kafka_client import KafkaConnection, LazyKafkaAdminClient, load_confluent_kafka
from compactor.constants import LeaderEpoch
from compactor.errors import NotFound, Refused, StoreError, Unavailable, UsageError

# Minor versions, by the levels of the features that brokers report (KIP-584). Settings cannot tell them: one of a later minor is unknown.


METADATA_VERSION_FEATURE = "metadata.version"
REMOTE_METADATA_FEATURE = "remote.log.metadata.version"
"""Feature of KIP-1266. From level 1 on, the metadata topic is keyed and compacted."""
TESTED_MINORS: Mapping[str, int] = {"3.8": 20, "3.9": 21, "4.0": 25, "4.1": 27, "4.2": 29, "4.3": 30, "4.4": 33}
"""Minor versions under which rounds were tested (tests/broker/test_other_brokers.py) -> the highest level of ``metadata.version`` that
their releases support (``MetadataVersion.LATEST_PRODUCTION``), ascending. Patch releases have the level of their minor.
"""
OLDEST_TESTED, *_, NEWEST_TESTED = TESTED_MINORS
OLDER = "3.7"
"""Stands for every version before OLDEST_TESTED."""


def minor_version(level: int) -> str:
    """Minor version whose releases support this level of ``metadata.version`` at most; OLDER before 3.8, NEWEST_TESTED for later ones."""
    if level < TESTED_MINORS[OLDEST_TESTED]:
        return OLDER
    return next((minor for minor, highest in TESTED_MINORS.items() if level <= highest), NEWEST_TESTED)


def is_newer_than_tested(level: int) -> bool:
    return level > TESTED_MINORS[NEWEST_TESTED]


# librdkafka asks for features and does not pass them on; kafka-python encodes the request.


_log = logging.getLogger(__name__)
_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1 << 20
_REQUEST_VERSIONS = (4, 3)
"""Version 3 leaves out features whose lowest level is 0 (KAFKA-17011). Kafka 3.8 has no version 4."""


@dataclass(frozen=True)
class BrokerFeatures:
    """Levels of a broker's features (KIP-584) by name: the highest supported, and those in force in the cluster."""

    supported: Mapping[str, int] = field(default_factory=dict)
    finalized: Mapping[str, int] = field(default_factory=dict)


def query_broker_features(connection: KafkaConnection, host: str, port: int) -> BrokerFeatures:
    """Ask one broker for its features by ApiVersions, before any login (KIP-152); none if it does not answer, or if TLS needs properties
    that only librdkafka reads.
    """
    try:
        with socket.create_connection((host, port), min(_TIMEOUT_S, connection.timeout_s)) as plain:
            context = _tls_context(connection.properties)
            with context.wrap_socket(plain, server_hostname=host) if context is not None else plain as open_socket:
                return _request_features(open_socket)
    except (OSError, ValueError, ImportError) as error:
        _log.debug("features of the broker at %s:%d are unknown: %s", host, port, error)
        return BrokerFeatures()


def _request_features(open_socket: socket.socket) -> BrokerFeatures:
    from kafka.protocol.metadata.api_versions import ApiVersionsRequest, ApiVersionsResponse

    for version in _REQUEST_VERSIONS:
        request = ApiVersionsRequest(client_software_name="tiered-compactor", client_software_version="0", version=version)
        request.with_header(version, "tiered-compactor")
        open_socket.sendall(request.encode(version=version, header=True, framed=True))
        [size] = struct.unpack(">i", _read_exactly(open_socket, 4))
        if not 0 < size <= _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {size} bytes")
        body = _read_exactly(open_socket, size)
        try:
            answer: Any = ApiVersionsResponse.decode(body, version=version, header=True)
        except Exception as error:  # kafka-python's decoder raises whatever the bytes lead it to
            raise ValueError(f"an answer that is not one to ApiVersions: {error}") from error
        if not answer.error_code:
            return BrokerFeatures(
                {one.name: one.max_version for one in answer.supported_features or ()},
                {one.name: one.max_version_level for one in answer.finalized_features or ()},
            )
    return BrokerFeatures()


def _read_exactly(open_socket: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = open_socket.recv(size - len(received))
        if not part:
            raise OSError("the broker closed the connection")
        received += part
    return bytes(received)


def _tls_context(properties: Mapping[str, str]) -> ssl.SSLContext | None:
    if properties.get("security.protocol", "plaintext").lower() not in ("ssl", "sasl_ssl"):
        return None
    context = ssl.create_default_context(cafile=properties.get("ssl.ca.location"), cadata=properties.get("ssl.ca.pem"))
    if properties.get("ssl.endpoint.identification.algorithm") == "none":
        context.check_hostname = False
    if properties.get("enable.ssl.certificate.verification") == "false":
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate := properties.get("ssl.certificate.location"):
        context.load_cert_chain(certificate, properties.get("ssl.key.location"), properties.get("ssl.key.password"))
    return context


TOPIC_SETTINGS = (
    "cleanup.policy", "retention.ms", "retention.bytes", "local.retention.ms", "local.retention.bytes", "remote.storage.enable",
    "remote.log.copy.disable", "min.cleanable.dirty.ratio", "delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms",
    "segment.bytes", "segment.index.bytes", "index.interval.bytes", "message.timestamp.type", "min.insync.replicas",
    "file.delete.delay.ms", "segment.ms", "remote.copy.lag.ms", "remote.copy.lag.bytes",
)  # fmt: skip
_SETTING_SOURCES = {1: "topic", 2: "broker", 3: "cluster", 4: "static", 5: "default", 6: "group", 0: "unknown"}
"""Of librdkafka's ConfigSource. ``topic``: set on the topic itself (Kafka's DYNAMIC_TOPIC_CONFIG)."""
METADATA_MANAGER_SETTING = "remote.log.metadata.manager.class.name"
_VERSION_SETTING = "inter.broker.protocol.version"
_LAST_TIERED_SETTING = "follower.fetch.last.tiered.offset.enable"
_VERSION_BY_SETTING = {"log.remote.copy.lag.ms": "4.4", _LAST_TIERED_SETTING: "4.3"}
"""Broker settings -> the version that brought them (KIP-1241, KIP-1023), the newest first."""
TopicAndNumber = tuple[str, int]
"""Topic name and partition number."""
OffsetAndTimestampMs = tuple[int, int]
"""Offset of a record, and its timestamp in milliseconds; both -1 if there is no such record."""


@dataclass(frozen=True)
class KafkaSetting:
    value: str
    source: str


@dataclass(frozen=True)
class MissingPermission:
    resource: str
    operation: str
    needed_for: str

    @override
    def __str__(self) -> str:
        return f"{self.operation} on {self.resource} is not allowed: {self.needed_for}"


@dataclass(frozen=True)
class BrokerDescription:
    """Identity, version and tiering features of a broker.

    version: major and minor by the level of ``metadata.version``, empty if unknown. If the broker reports none, by its settings: Kafka 3
        has inter.broker.protocol.version, Kafka 4 is the version of the newest known setting ("4", "4.3" or "4.4").
    takes_last_tiered: whether new replicas begin at the newest tiered segment (KIP-1023).
    metadata_version: highest supported level, -1 if unknown.
    metadata_topic_version: level of ``remote.log.metadata.version`` in force (KIP-1266), 0 if there is none.
    metadata_manager: class that keeps the metadata of remote segments; empty if unknown.
    """

    id: int
    address: str
    version: str = ""
    takes_last_tiered: bool = False
    metadata_version: int = -1
    metadata_topic_version: int = 0
    metadata_manager: str = ""


@dataclass(frozen=True)
class ClusterDescription:
    cluster_id: str
    brokers: tuple[BrokerDescription, ...]
    missing_rights: tuple[MissingPermission, ...] = ()


@dataclass(frozen=True)
class PartitionLeaderAndOffsets:
    """Leader and offsets of a partition, each -1 if unknown."""

    leader: int
    leader_epoch: LeaderEpoch
    log_start: int
    log_end: int
    last_stable: int


@dataclass(frozen=True)
class TopicDescription:
    """Description of a topic. settings: empty if this user may not read them. A log end is the high watermark."""

    topic: str
    topic_id: bytes
    partitions: Mapping[int, PartitionLeaderAndOffsets]
    settings: Mapping[str, KafkaSetting]
    missing_rights: tuple[MissingPermission, ...] = ()

    def topic_level_settings(self) -> Mapping[str, str]:
        """Settings of the topic itself. They take precedence over this program's configuration."""
        return {name: setting.value for name, setting in self.settings.items() if setting.source == "topic"}


class KafkaAdmin:
    """Kafka admin client. All requests but ``delete_records`` only read. All methods raise Unavailable, and Refused (TLS, login, no such
    topic, no permission).
    """

    def __init__(self, connection: KafkaConnection) -> None:
        self._timeout_s = connection.timeout_s
        self._connection = connection
        self._session = LazyKafkaAdminClient(connection)
        self._broker_answers: dict[int, tuple[Mapping[str, KafkaSetting], BrokerFeatures]] = {}

    def cluster_id(self) -> str:
        """Cluster id. One broker's answer suffices, even if another has just died."""
        return self._session.request_cluster_metadata("ask for the cluster id").cluster_id or self.describe_cluster().cluster_id

    def describe_cluster(self) -> ClusterDescription:
        admin = self._session.client
        timeout = self._timeout_s
        described = self._session.send_request("describe the cluster", lambda: {"": admin.describe_cluster(request_timeout=timeout)})[""]
        missing = []
        for node in described.nodes:
            settings: Mapping[str, KafkaSetting] = {}
            try:
                settings = self._request_settings_of_resources("BROKER", [str(node.id)])[str(node.id)]
            except Refused as error:
                wanted_for = f"class of the metadata manager and versions of brokers are unknown ({error.message})"
                missing = [MissingPermission("the cluster", "DESCRIBE_CONFIGS", wanted_for)]
            except Unavailable:
                if node.id not in self._broker_answers:  # else it has just died, and is still listed
                    raise
                continue
            self._broker_answers[node.id] = settings, query_broker_features(self._connection, node.host, node.port)
        brokers = tuple(_describe_broker(node.id, f"{node.host}:{node.port}", *self._broker_answers[node.id]) for node in described.nodes)
        return ClusterDescription(described.cluster_id, tuple(sorted(brokers, key=lambda one: one.id)), tuple(missing))

    def describe_topics(self, topics: Sequence[str], *, reports_missing_append_permission: bool = False) -> dict[str, TopicDescription]:
        if not topics:
            return {}
        kafka = load_confluent_kafka()
        admin = self._session.client
        wanted = kafka.TopicCollection(list(topics))
        timeout = self._timeout_s
        described = self._session.send_request(
            f"describe {', '.join(topics)}",
            lambda: admin.describe_topics(wanted, include_authorized_operations=True, request_timeout=timeout),
        )
        offsets = self._request_leader_offsets(
            {name: [one.id for one in topic.partitions if one.leader is not None] for name, topic in described.items()}
        )
        settings = self.read_topic_settings(list(described))
        return {
            name: self._describe_topic(
                name, topic, offsets, settings[name], reports_missing_append_permission=reports_missing_append_permission
            )
            for name, topic in described.items()
        }

    def read_topic_settings(self, topics: Sequence[str]) -> dict[str, dict[str, KafkaSetting] | Refused]:
        """Settings by topic name, or Refused for a topic whose settings may not be read."""
        try:
            return dict(self._request_settings_of_resources("TOPIC", topics))
        except Refused as error:
            if len(topics) == 1:
                return {topics[0]: error}
        return {name: found for one in topics for name, found in self.read_topic_settings([one]).items()}

    def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription:
        """Describe ``__remote_log_metadata``. Raises Refused if it does not exist: nothing was ever tiered."""
        return self.describe_topics([TOPIC], reports_missing_append_permission=reports_missing_append_permission)[TOPIC]

    def log_start_offset(self, topic: str, partition: int) -> int:
        """Leader's log start offset; 0 if the topic is gone. Raises Unavailable if it exists and no leader answers."""
        kafka = load_confluent_kafka()
        wanted = kafka.TopicPartition(topic, partition)
        try:
            found = self._request_offsets_of_partitions([wanted], kafka.admin.OffsetSpec.earliest(), kafka.IsolationLevel.READ_UNCOMMITTED)
        except StoreError:
            if topic in self._session.request_cluster_metadata("ask for the topics").topics:
                raise
            return 0  # Nothing of a deleted topic counts as expired; the round finds that its sources are gone.
        offset = int(found[topic, partition].offset)
        if offset < 0:
            raise Unavailable(f"the leader of {topic}-{partition} gives no log start offset", hint="Run the command again to continue")
        return offset

    def offsets_at_times(self, timestamps_ms: Mapping[TopicAndNumber, int]) -> dict[TopicAndNumber, OffsetAndTimestampMs]:
        """First record at or after each timestamp, if there is one and the leader answers."""
        if not timestamps_ms:
            return {}
        kafka, admin, timeout = load_confluent_kafka(), self._session.client, self._timeout_s
        requests = {kafka.TopicPartition(*name): kafka.admin.OffsetSpec.for_timestamp(at_ms) for name, at_ms in timestamps_ms.items()}
        found = self._session.send_request("list offsets by time", lambda: admin.list_offsets(requests, request_timeout=timeout))
        return {(at.topic, at.partition): (answer.offset, answer.timestamp) for at, answer in found.items() if answer.offset >= 0}

    def delete_records(self, topic: str, partition: int, before_offset: int) -> int:
        """Delete the records below an offset, and return the new log start offset. Raises UsageError if the offset lies beyond the log's
        end.
        """
        admin, timeout = self._session.client, self._timeout_s
        wanted = load_confluent_kafka().TopicPartition(topic, partition, before_offset)
        what = f"delete the records of {topic}-{partition} below offset {before_offset}"
        try:
            found = self._session.send_request(what, lambda: admin.delete_records([wanted], request_timeout=timeout))
        except NotFound as error:
            problem = f"offset {before_offset} lies beyond {topic}-{partition}: it is above the high watermark"
            raise UsageError(problem, hint="Nothing was changed") from error
        return int(next(iter(found.values())).low_watermark)

    def close(self) -> None:
        self._session.close()

    def _describe_topic(
        self,
        name: str,
        topic: Any,
        leaders: Mapping[TopicAndNumber, PartitionLeaderAndOffsets],
        settings: Mapping[str, KafkaSetting] | Refused,
        *,
        reports_missing_append_permission: bool,
    ) -> TopicDescription:
        allowed = {operation.name for operation in topic.authorized_operations or ()}
        needed = {"READ": "its records cannot be read"} | (
            {"WRITE": "nothing can be published"} if reports_missing_append_permission else {}
        )
        missing = [MissingPermission(f"topic {name}", right, why) for right, why in needed.items() if allowed and right not in allowed]
        if isinstance(settings, Refused):
            missing.append(MissingPermission(f"topic {name}", "DESCRIBE_CONFIGS", f"its settings are unknown ({settings.message})"))
            settings = {}
        partitions = {}
        for one in topic.partitions:
            at = leaders.get((name, one.id), PartitionLeaderAndOffsets(-1, LeaderEpoch(-1), -1, -1, -1))
            leader = -1 if one.leader is None else one.leader.id
            partitions[one.id] = PartitionLeaderAndOffsets(leader, at.leader_epoch, at.log_start, at.log_end, at.last_stable)
        return TopicDescription(name, uuid_to_bytes(topic.topic_id), partitions, settings, tuple(missing))

    def _request_leader_offsets(self, partitions: Mapping[str, Iterable[int]]) -> dict[TopicAndNumber, PartitionLeaderAndOffsets]:
        """Partitions whose leader does not answer are left out; ``leader`` is not set."""
        kafka = load_confluent_kafka()
        spec, isolation = kafka.admin.OffsetSpec, kafka.IsolationLevel
        wanted = [kafka.TopicPartition(name, number) for name, numbers in partitions.items() for number in numbers]
        if not wanted:
            return {}
        asked = (
            self._request_offsets_of_partitions(wanted, spec.earliest(), isolation.READ_UNCOMMITTED),
            self._request_offsets_of_partitions(wanted, spec.latest(), isolation.READ_UNCOMMITTED),
            self._request_offsets_of_partitions(wanted, spec.latest(), isolation.READ_COMMITTED),
        )
        found = {}
        for where in wanted:
            start, end, stable = (answers[where.topic, where.partition] for answers in asked)
            if min(start.offset, end.offset, stable.offset) < 0:
                continue  # librdkafka's own number beside the answers of others: this leader has given none
            epoch = end.leader_epoch if end.leader_epoch is not None else -1
            found[where.topic, where.partition] = PartitionLeaderAndOffsets(-1, LeaderEpoch(epoch), start.offset, end.offset, stable.offset)
        return found

    def _request_offsets_of_partitions(self, partitions: Sequence[Any], spec: Any, isolation: Any) -> dict[TopicAndNumber, Any]:
        admin = self._session.client
        requests = dict.fromkeys(partitions, spec)
        timeout = self._timeout_s
        found = self._session.send_request(
            "list offsets", lambda: admin.list_offsets(requests, isolation_level=isolation, request_timeout=timeout)
        )
        return {(at.topic, at.partition): answer for at, answer in found.items()}

    def _request_settings_of_resources(self, resource_type: str, resource_names: Sequence[str]) -> dict[str, dict[str, KafkaSetting]]:
        kafka = load_confluent_kafka()
        resources = [kafka.admin.ConfigResource(kafka.admin.ResourceType[resource_type], name) for name in resource_names]
        admin = self._session.client
        timeout = self._timeout_s
        what = f"settings of {resource_type.lower()} {', '.join(resource_names)}"
        found = self._session.send_request(what, lambda: admin.describe_configs(resources, request_timeout=timeout))
        return {resource.name: _parse_settings(entries, resource_type) for resource, entries in found.items()}


def kafka_tool_command(tool: str, arguments: str, bootstrap_servers: str = "") -> str:
    """Command line of one of Kafka's tools, for people to copy."""
    return f"{tool} --bootstrap-server {bootstrap_servers or 'HOST:PORT'} {arguments}"


def topic_settings_command(topic: str, values: Mapping[str, str], bootstrap_servers: str = "") -> str:
    changes = ",".join(f"{name}={value}" for name, value in values.items())
    return kafka_tool_command("kafka-configs", f"--alter --topic {topic} --add-config {changes}", bootstrap_servers)


def metadata_topic_problem(topic: TopicDescription, bootstrap_servers: str = "") -> str:
    """Return why nothing may be written to this metadata topic, or an empty string. An unknown setting counts as a problem."""
    wanted = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
    unknown = [f"{name} of {topic.topic} is unknown: it must be {value}" for name, value in wanted.items() if name not in topic.settings]
    wrong = {name: value for name, value in wanted.items() if name in topic.settings and topic.settings[name].value != value}
    if "compact" in (policy := topic.settings["cleanup.policy"].value if "cleanup.policy" in topic.settings else ""):
        # No command is offered: under KIP-1266, the policy "delete" would let brokers forget segments whose records have been compacted.
        return (
            f"cleanup.policy of {topic.topic} is {policy}, it must be delete: a topic that brokers compact by keys (KIP-1266,"
            f" {REMOTE_METADATA_FEATURE} 1 and 2) is not supported. Where no broker has that feature, the policy is a mistake, and brokers"
            " cannot tier until it is delete again"
        )
    problems = unknown + [f"{name} of {topic.topic} is {topic.settings[name].value}, it must be {value}" for name, value in wrong.items()]
    if wrong:
        return f"{'; '.join(problems)}, or segments get lost in it ({topic_settings_command(topic.topic, wrong, bootstrap_servers)})"
    if unknown:
        return "; ".join(unknown)
    lost = [number for number, one in topic.partitions.items() if one.log_start > 0]
    return f"{topic.topic} has lost its beginning in partitions {lost}" if lost else ""


def _parse_settings(entries: Mapping[str, Any], resource_type: str) -> dict[str, KafkaSetting]:
    wanted = entries if resource_type == "BROKER" else [entry for entry in TOPIC_SETTINGS if entry in entries]
    return {entry: KafkaSetting(entries[entry].value or "", _SETTING_SOURCES.get(entries[entry].source, "unknown")) for entry in wanted}


def _describe_broker(broker_id: int, address: str, settings: Mapping[str, KafkaSetting], features: BrokerFeatures) -> BrokerDescription:
    takes_last, manager = settings.get(_LAST_TIERED_SETTING), settings.get(METADATA_MANAGER_SETTING)
    level = features.supported.get(METADATA_VERSION_FEATURE, -1)
    return BrokerDescription(
        broker_id,
        address,
        minor_version(level) if level >= 0 else _version_from_broker_settings(settings),
        takes_last is not None and takes_last.value == "true",
        level,
        features.finalized.get(REMOTE_METADATA_FEATURE, 0),
        manager.value if manager is not None else "",
    )


def _version_from_broker_settings(settings: Mapping[str, KafkaSetting]) -> str:
    # Return the version from a broker's settings, like 3.9 for "3.9-IV0". The broker may be newer if the setting pins an older protocol
    # version.
    if not settings:
        return ""
    message = settings.get(_VERSION_SETTING)
    if message is not None and message.value:
        return message.value.split("-")[0]
    return next((version for name, version in _VERSION_BY_SETTING.items() if name in settings), "4")
