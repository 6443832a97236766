"""Conditions under which readers of a broker-managed tier may be switched: rule R10 of docs/broker-protocol.md, topic settings, versions.

A setting that this user may not read counts as invalid.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from compactor.brokers.metadata_topic.admin import ClusterDescription, TopicDescription, metadata_topic_write_refusal_reason
from compactor.brokers.metadata_topic.codec import uuid_text
from compactor.errors import NotFound, Refused
from compactor.model.base import ReasonOrEmpty
from compactor.model.ids import TopicPartition

CONDITIONS_MAX_AGE_S = 15.0
"""Seconds for which a passed check stays valid. A round checks at each of its steps."""
OLDEST_BROKER_VERSION = (3, 8)
"""Before, consumers get no more records if the offsets at the end of a segment were removed (KAFKA-15388)."""
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


class ClusterDescriptionQueries(Protocol):
    """Requests about the cluster that the checks make. Implemented by metadata_topic.admin.KafkaAdmin."""

    def describe_cluster(self) -> ClusterDescription:
        """Return the cluster id and the brokers."""

    def describe_metadata_topic(self, *, reports_missing_append_permission: bool = False) -> TopicDescription:
        """Describe ``__remote_log_metadata``.

        :param reports_missing_append_permission: whether the description lists a missing permission to append to the topic, too.
        """

    def describe_topics(self, topics: Sequence[str]) -> Mapping[str, TopicDescription]:
        """Describe these topics, and return the descriptions by topic name. Raises NotFound if one does not exist."""


class ClusterSettingsCheckBeforePublication:
    """Check, called before each publication step, that the settings of cluster and topic permit the step. Thread-safe.

    If a topic was deleted and created again, the first check afterwards fails, so that work on the deleted topic ends. Later checks are
    about the new topic.

    :param cleanup_policy_of: returns ``cleanup_policy`` of this program's settings for a topic.
    :param max_age_s: how long a passed check stays valid, in seconds.
    """

    def __init__(
        self,
        admin: ClusterDescriptionQueries,
        *,
        cleanup_policy_of: Callable[[str], str] = lambda topic: "compact",
        max_age_s: float = CONDITIONS_MAX_AGE_S,
    ) -> None:
        self._admin = admin
        self._cleanup_policy_of = cleanup_policy_of
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._checked_at: dict[str, float] = {}
        self._topic_ids: dict[str, bytes] = {}

    def require_publishing_allowed(self, partition: TopicPartition) -> None:
        """Check the settings of the cluster and of the partition's topic, unless both have passed the check in the last ``max_age_s``
        seconds.

        Raises Refused if nothing may be written about this partition, and Unavailable if the brokers do not answer.
        """
        with self._lock:
            if self._is_compaction_permission_check_due(_CLUSTER_KEY):
                problem = metadata_topic_write_refusal_reason(
                    self._admin.describe_metadata_topic(reports_missing_append_permission=True)
                ) or too_old_broker_reason(self._admin.describe_cluster())
                if problem:
                    raise Refused(f"nothing is compacted under these brokers: {problem}", hint="Readers are not affected")
                self._checked_at[_CLUSTER_KEY] = time.monotonic()
            if self._is_compaction_permission_check_due(partition.topic):
                self._check_topic_permits_compaction(partition.topic)
                self._checked_at[partition.topic] = time.monotonic()

    def _is_compaction_permission_check_due(self, topic: str) -> bool:
        """Return whether the last passed check of this topic is older than ``max_age_s``, or there was none.

        :param topic: name of the topic; an empty string stands for the check of the cluster.
        """
        return time.monotonic() - self._checked_at.get(topic, float("-inf")) >= self._max_age_s

    def _check_topic_permits_compaction(self, topic: str) -> None:
        """Raise Refused if the topic is gone, was created again, or has a setting that rules out compaction."""
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
            raise Refused(problem, hint="Set it with kafka-configs --alter, or take the topic out of topics under [kafka]")


def topic_settings_refusal_reason(topic: str, settings: Mapping[str, str], cleanup_policy: str) -> ReasonOrEmpty:
    """Return a message about the first required setting that is missing or has another value than the required one, or an empty string.

    :param cleanup_policy: ``cleanup_policy`` of this program's settings for the topic. Under "compact,delete", retention.ms may be finite.
    """
    return next(
        filter(None, (topic_setting_refusal_reason(topic, each, settings.get(each), cleanup_policy) for each in REQUIRED_TOPIC_SETTINGS)),
        "",
    )


def topic_setting_refusal_reason(topic: str, setting: str, value: str | None, cleanup_policy: str) -> ReasonOrEmpty:
    """Return why the value of a required topic setting rules out compaction, as a message, or an empty string.

    :param value: the value of the setting; None if it is unknown.
    """
    wanted, why = REQUIRED_TOPIC_SETTINGS[setting]
    if value is None:
        return f"{setting} of {topic} is unknown: it must be {wanted}"
    if value == wanted or (setting == RETENTION_SETTING and cleanup_policy == EXPIRING_POLICY):
        return ""
    return f"{setting} of {topic} is {value}, it must be {wanted}: {why}"


def too_old_broker_reason(cluster: ClusterDescription) -> ReasonOrEmpty:
    """Return a message that names a broker older than 3.8, or an empty string. Brokers of unknown version pass.

    Consumers of older brokers get stuck at a segment whose last records compaction has removed (KAFKA-15388).
    """
    for broker in cluster.brokers:
        if not is_supported_broker_version(broker.version):
            return f"broker {broker.id} is of version {broker.version}, it must be 3.8 or newer"
    return ""


def is_supported_broker_version(version: str) -> bool:
    """Return whether a broker version, like ``3.9``, is OLDEST_BROKER_VERSION or newer. Text that is not a version counts as supported."""
    major, _, minor = version.partition(".")
    minor = minor.split(".")[0]
    return not major.isdigit() or (int(major), int(minor) if minor.isdigit() else 99) >= OLDEST_BROKER_VERSION
