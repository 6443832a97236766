"""Cluster queries through the Kafka admin client, and the conditions under which readers may be switched."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from compactor.adapters.brokers.admin import (
    METADATA_MANAGER_SETTING,
    NEWEST_TESTED,
    OLDEST_TESTED,
    REMOTE_METADATA_FEATURE,
    TESTED_MINORS,
    BrokerDescription,
    ClusterDescription,
    KafkaAdmin,
    TopicDescription,
    is_newer_than_tested,
    kafka_tool_command,
    metadata_topic_problem,
    topic_settings_command,
)
from compactor.adapters.brokers.codec import TOPIC
from compactor.adapters.brokers.view import TopicStatus
from compactor.adapters.kafka_client import KafkaConnection
from compactor.constants import TopicId
from compactor.errors import BlockedCause, NotFound, Refused, Unavailable, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import ExistingAndMissingTopicIds, uuid_bytes, uuid_text

# librdkafka asks for topics by name only. kafka-python asks by id; it is a part of the extra ``kafka``, and is imported on first use.


UNKNOWN_TOPIC_ID_CODE = 100
"""Kafka's error code for an id that no topic of the cluster has."""
TIMEOUT_MS = 10_000
IDS_PER_REQUEST = 1_000

_PROPERTIES = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
}
"""Properties of librdkafka and what kafka-python calls them."""


def query_topic_ids(connection: KafkaConnection, topic_ids: Sequence[TopicId]) -> ExistingAndMissingTopicIds:
    """Ask a cluster whether topics with these ids exist (Metadata request, version 12: KIP-516). Only UNKNOWN_TOPIC_ID for the id itself
    counts as missing.

    :raises Unavailable: or Refused, if the cluster cannot be asked.
    :raises UsageError: for connection properties that kafka-python does not have.
    """
    missing: list[TopicId] = []
    present: list[TopicId] = []
    with _open_kafka_python_client(connection) as client:
        cluster_id = client.describe_cluster()["cluster_id"]
        for start in range(0, len(topic_ids), IDS_PER_REQUEST):
            asked = {uuid.UUID(bytes=uuid_bytes(text)): text for text in topic_ids[start : start + IDS_PER_REQUEST]}
            for topic in client.describe_topics(list(asked)):
                text = asked.get(uuid.UUID(str(topic["topic_id"])))
                if text and topic["error_code"] in (0, UNKNOWN_TOPIC_ID_CODE):
                    (missing if topic["error_code"] else present).append(text)
        if client.describe_cluster()["cluster_id"] != cluster_id:
            raise Unavailable("another cluster answers by now", hint="It is retried")
    return ExistingAndMissingTopicIds(cluster_id or "", tuple(missing), tuple(present))


@contextmanager
def _open_kafka_python_client(connection: KafkaConnection) -> Iterator[Any]:
    try:
        from kafka import KafkaAdminClient
        from kafka.errors import AuthorizationError, KafkaError, SaslAuthenticationFailedError
    except ImportError as error:
        raise UsageError(f"a Kafka client is missing ({error})", hint="pip install 'tiered-compactor[kafka]'") from error
    try:
        client = KafkaAdminClient(**kafka_python_options(connection))
        try:
            yield client
        finally:
            client.close()
    except (AuthorizationError, SaslAuthenticationFailedError) as error:
        raise Refused(f"ask about topic ids: {error}") from None
    except (KafkaError, OSError) as error:
        raise Unavailable(f"ask about topic ids: {error}", hint="It is retried") from None


def kafka_python_options(connection: KafkaConnection) -> dict[str, Any]:
    """Raises UsageError for a TLS or login property that kafka-python does not have."""
    options: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in connection.bootstrap_servers.split(",")],
        "client_id": "tiered-compactor",
        "request_timeout_ms": TIMEOUT_MS,
        "bootstrap_timeout_ms": TIMEOUT_MS,
    }
    for name, value in connection.properties.items():
        if name in _PROPERTIES:
            options[_PROPERTIES[name]] = value.upper() if name == "security.protocol" else value
        elif name == "ssl.endpoint.identification.algorithm":
            options["ssl_check_hostname"] = value != "none"
        elif name.startswith(("ssl.", "sasl.", "enable.ssl", "https.", "oauth")):
            raise UsageError(
                f"topics cannot be asked about by id with the property {name}", hint='Keep on_topic_deletion = "keep" under [tier]'
            )
    return options


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterConfirmations:
    """Statements of the configuration about a cluster. metadata_manager: a class that uses ``__remote_log_metadata`` as Kafka's does; may
    be empty.
    """

    metadata_manager: str = ""
    untested_brokers: bool = False


NOTHING_CONFIRMED = ClusterConfirmations()


class AdminClusterQueries:
    """ClusterQueries with a Kafka admin client. Topics that may not be described are left out, with one warning each."""

    def __init__(self, admin: KafkaAdmin, confirmed: ClusterConfirmations = NOTHING_CONFIRMED, bootstrap_servers: str = "") -> None:
        self._admin = admin
        self._confirmed = confirmed
        self._servers = bootstrap_servers
        self._cluster_id = ""
        self._reported: set[str] = set()

    def cluster_id(self) -> str:
        if not self._cluster_id:
            self._cluster_id = self._admin.cluster_id()
        return self._cluster_id

    def topic_statuses(self, topics: Sequence[str]) -> Mapping[str, TopicStatus]:
        """Ask in one request, or one per topic if the joint request is refused."""
        try:
            facts = self._admin.describe_topics(topics)
        except (Refused, NotFound):
            facts = self._describe_singly(topics)
        return {name: _topic_status_from_description(found) for name, found in facts.items()}

    def cluster_problem(self) -> ClusterProblem | None:
        """Return why compaction is ruled out. A refusal to answer is a problem, too."""
        try:
            return find_cluster_problem(self._admin, self._confirmed, bootstrap_servers=self._servers)
        except (Refused, NotFound) as error:
            return ClusterProblem("metadata-topic", error.message, error.hint)

    def _describe_singly(self, topics: Sequence[str]) -> dict[str, TopicDescription]:
        facts: dict[str, TopicDescription] = {}
        for name in topics:
            try:
                facts |= self._admin.describe_topics([name])
            except (Refused, NotFound) as error:
                if name not in self._reported:
                    _log.warning("topic %s is left out: %s", name, error.message)
                self._reported.add(name)
        return facts


def _topic_status_from_description(topic: TopicDescription) -> TopicStatus:
    led = {number: one for number, one in topic.partitions.items() if one.log_start >= 0}
    return TopicStatus(
        topic.topic_id,
        log_starts={number: one.log_start for number, one in led.items()},
        last_stable={number: one.last_stable for number, one in led.items()},
        settings={name: setting.value for name, setting in topic.settings.items()},
        chosen=topic.topic_level_settings(),
    )


# Conditions under which readers may be switched (docs/broker-protocol.md). A setting that this user may not read counts as invalid.


CONDITIONS_MAX_AGE_S = 15.0
"""Seconds for which a passed check stays valid. A round checks at each of its steps."""
KAFKA_METADATA_MANAGER = "org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager"
"""Class by which brokers read and write ``__remote_log_metadata``: the default of METADATA_MANAGER_SETTING."""
_CLUSTER_KEY = ""
RETENTION_SETTING = "retention.ms"
EXPIRING_POLICY = "compact,delete"
REQUIRED_TOPIC_SETTINGS: Mapping[str, tuple[str, str]] = {
    "remote.storage.enable": ("true", "nothing of the topic is tiered any more"),
    "cleanup.policy": ("delete", "brokers that compact or delete by themselves would work on the same segments"),
    "retention.bytes": (
        "-1",
        "brokers count replaced segments, too (3.9 until they are deleted), and would delete too much of the beginning",
    ),
    RETENTION_SETTING: (
        "-1",
        f'brokers delete older records, even the latest value of a key (if that is intended, set cleanup_policy = "{EXPIRING_POLICY}")',
    ),
}
"""KafkaSetting name -> (required value, why it is required)."""
ClusterProblemCause = Literal["metadata-manager", "metadata-topic", "old-brokers", "untested-brokers"]


@dataclass(frozen=True)
class ClusterProblem:
    cause: ClusterProblemCause
    message: str
    hint: str


class UnsuitableCluster(Refused):
    """Raised if this program may not, or no longer, write under a cluster. Nothing was written."""

    def __init__(self, message: str, *, hint: str = "", cause: str = "") -> None:
        super().__init__(message, hint=hint, cause=BlockedCause.BROKERS)
        self.cause = cause


class ClusterDescriptionQueries(Protocol):
    """Requests of the checks about the cluster (``admin.KafkaAdmin``)."""

    def describe_cluster(self) -> ClusterDescription: ...

    def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription: ...

    def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicDescription]: ...


class ClusterSettingsCheckBeforePublication:
    """Check, before each publication step, that the settings of cluster and topic permit it. Thread-safe.

    The first check after a topic was created again fails, so that work on the deleted topic ends.

    :param max_age_s: seconds for which a passed check stays valid.
    """

    def __init__(
        self,
        admin: ClusterDescriptionQueries,
        *,
        cleanup_policy_of: Callable[[str], str] = lambda topic: "compact",
        confirmed: ClusterConfirmations = NOTHING_CONFIRMED,
        max_age_s: float = CONDITIONS_MAX_AGE_S,
        bootstrap_servers: str = "",
    ) -> None:
        self._admin = admin
        self._cleanup_policy_of = cleanup_policy_of
        self._confirmed = confirmed
        self._max_age_s = max_age_s
        self._servers = bootstrap_servers
        self._lock = threading.Lock()
        self._checked_at: dict[str, float] = {}
        self._topic_ids: dict[str, bytes] = {}

    def require_suitable_cluster(self) -> None:
        """Raise UnsuitableCluster, or Unavailable if the brokers do not answer. Called before each record and each deletion of objects."""
        with self._lock:
            if self._is_check_due(_CLUSTER_KEY):
                problem = find_cluster_problem(
                    self._admin, self._confirmed, reports_missing_append_permission=True, bootstrap_servers=self._servers
                )
                if problem is not None:
                    message = f"nothing is compacted under these brokers: {problem.message}"
                    raise UnsuitableCluster(message, hint=problem.hint, cause=problem.cause)
                self._checked_at[_CLUSTER_KEY] = time.monotonic()

    def require_publishing_allowed(self, partition: TopicPartition) -> None:
        """Raise Refused if nothing may be written about this partition, Unavailable if the brokers do not answer."""
        self.require_suitable_cluster()
        with self._lock:
            if self._is_check_due(partition.topic):
                self._require_topic_settings(partition.topic)
                self._checked_at[partition.topic] = time.monotonic()

    def _is_check_due(self, topic: str) -> bool:
        # An empty topic stands for the check of the cluster.
        return time.monotonic() - self._checked_at.get(topic, float("-inf")) >= self._max_age_s

    def _require_topic_settings(self, topic: str) -> None:
        try:
            facts = self._admin.describe_topics([topic])[topic]
        except NotFound as error:
            raise Refused(f"topic {topic} no longer exists", hint="Its tier is deleted with it") from error
        known = self._topic_ids.get(topic, facts.topic_id)
        self._topic_ids[topic] = facts.topic_id
        if known != facts.topic_id:
            message = f"topic {topic} was deleted and created again: it was {uuid_text(known)} and is {uuid_text(facts.topic_id)}"
            raise Refused(message, hint="Run again: the new topic is another one")
        settings = {setting: found.value for setting, found in facts.settings.items()}
        problem = topic_settings_refusal_reason(topic, settings, self._cleanup_policy_of(topic))
        if problem:
            step = topic_settings_correction(topic, settings, self._cleanup_policy_of(topic), self._servers)
            raise Refused(problem, hint=f"{step}, or take the topic out of topics under [kafka]", cause=BlockedCause.SETTINGS)


def topic_settings_refusal_reason(topic: str, settings: Mapping[str, str], cleanup_policy: str) -> str:
    """Message about required settings that are missing or wrong, or an empty string. Under "compact,delete", retention.ms may be finite."""
    reasons = (topic_setting_refusal_reason(topic, each, settings.get(each), cleanup_policy) for each in REQUIRED_TOPIC_SETTINGS)
    return "; ".join(filter(None, reasons))


def topic_settings_correction(topic: str, settings: Mapping[str, str], cleanup_policy: str, bootstrap_servers: str = "") -> str:
    """Command that corrects all known settings of a topic at once; empty if none is wrong. Between two commands the topic could have
    ``delete`` and the default retention, and brokers would delete data.
    """
    wrong = {
        setting: wanted
        for setting, (wanted, _) in REQUIRED_TOPIC_SETTINGS.items()
        if setting in settings and topic_setting_refusal_reason(topic, setting, settings[setting], cleanup_policy)
    }
    if not wrong:
        return ""
    step = topic_settings_command(topic, wrong, bootstrap_servers)
    careful = ", in one command; check first what docs/migrating.md lists"
    return step + (careful if "compact" in settings.get("cleanup.policy", "") else "")


def topic_setting_refusal_reason(topic: str, setting: str, value: str | None, cleanup_policy: str) -> str:
    """Return why a topic setting's value (None: unknown) rules out compaction, or an empty string."""
    wanted, why = REQUIRED_TOPIC_SETTINGS[setting]
    if value is None:
        return f"{setting} of {topic} is unknown: it must be {wanted}"
    if value == wanted or (setting == RETENTION_SETTING and cleanup_policy == EXPIRING_POLICY):
        return ""
    return f"{setting} of {topic} is {value or repr('')}, it must be {wanted}: {why}"


def cluster_settings_acl_command(bootstrap_servers: str) -> str:
    return kafka_tool_command("kafka-acls", "--add --allow-principal User:... --operation DescribeConfigs --cluster", bootstrap_servers)


def find_cluster_problem(
    admin: ClusterDescriptionQueries,
    confirmed: ClusterConfirmations,
    *,
    reports_missing_append_permission: bool = False,
    bootstrap_servers: str = "",
) -> ClusterProblem | None:
    """Return why the cluster is unsuitable. Brokers come first: with another metadata manager there need not be a metadata topic."""
    if problem := broker_problem(admin.describe_cluster().brokers, confirmed):
        return problem
    topic = admin.describe_metadata_topic(reports_missing_append_permission=reports_missing_append_permission)
    if reason := metadata_topic_problem(topic, bootstrap_servers):
        return ClusterProblem("metadata-topic", reason, "Readers are not affected")
    return None


def broker_problem(brokers: Sequence[BrokerDescription], confirmed: ClusterConfirmations) -> ClusterProblem | None:
    """First problem: metadata manager, then too old versions, then untested ones."""
    checks = (_metadata_manager_problem, _metadata_topic_version_problem, _old_broker_problem, _untested_broker_problem)
    return next((found for check in checks for one in brokers if (found := check(one, confirmed))), None)


def _metadata_manager_problem(broker: BrokerDescription, confirmed: ClusterConfirmations) -> ClusterProblem | None:
    # Readers under another metadata manager would never see what a round publishes, and go on using segments that this program deletes.
    if not broker.metadata_manager:
        if confirmed.metadata_manager:
            return None
        hint = f"{cluster_settings_acl_command(broker.address)}; or confirm the class with metadata_manager_class under [kafka]"
        return ClusterProblem("metadata-manager", f"{METADATA_MANAGER_SETTING} of broker {broker.id} is unknown", hint)
    if broker.metadata_manager in (KAFKA_METADATA_MANAGER, confirmed.metadata_manager):
        return None
    message = (
        f"broker {broker.id} keeps its metadata by {broker.metadata_manager}, and not by {KAFKA_METADATA_MANAGER}:"
        f" it reads nothing that is written into {TOPIC}"
    )
    return ClusterProblem("metadata-manager", message, f"{METADATA_MANAGER_SETTING} must name Kafka's class on every broker")


def _metadata_topic_version_problem(broker: BrokerDescription, confirmed: ClusterConfirmations) -> ClusterProblem | None:
    # KIP-1266: this program does not write a keyed and compacted metadata topic.
    if broker.metadata_topic_version == 0:
        return None
    message = (
        f"the feature {REMOTE_METADATA_FEATURE} is at level {broker.metadata_topic_version}, it must be 0: from level 1 on, {TOPIC} is"
        " compacted by keys, and this program writes records without a key (KIP-1266)"
    )
    return ClusterProblem("metadata-topic", message, f"Readers are not affected. Leave {TOPIC} as it is; a later release may support it")


def _old_broker_problem(broker: BrokerDescription, confirmed: ClusterConfirmations) -> ClusterProblem | None:
    # Consumers of brokers before 3.8 get stuck at a segment whose last records compaction has removed (KAFKA-15388).
    if not is_too_old(broker.version):
        return None
    message = f"broker {broker.id} is of version {broker.version}, it must be {OLDEST_TESTED} or newer"
    return ClusterProblem("old-brokers", message, "Readers are not affected. Upgrade before compacting")


def _untested_broker_problem(broker: BrokerDescription, confirmed: ClusterConfirmations) -> ClusterProblem | None:
    # The order of records on which rounds rely is no interface of Kafka.
    if confirmed.untested_brokers:
        return None
    if is_newer_than_tested(broker.metadata_version):
        which = f"newer than {NEWEST_TESTED}, the newest tested version (metadata.version {broker.metadata_version})"
    elif broker.metadata_version >= 0 or (broker.version in TESTED_MINORS and broker.version < "4"):
        return None
    else:
        which = "unknown: it reports no metadata.version"
    hint = (
        "Readers are not affected. Use a release of this program that was tested with these brokers, or set allow_untested_brokers = true"
        " under [kafka]"
    )
    return ClusterProblem("untested-brokers", f"the version of broker {broker.id} is {which}", hint)


def is_too_old(version: str) -> bool:
    """Return whether a version like ``3.9`` is older than all tested ones; False for other text."""
    return bool(version) and version.replace(".", "").isdigit() and _numbers(version) < _numbers(OLDEST_TESTED)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
