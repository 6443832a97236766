"""What has to be so before readers of a brokers' tier are switched: R10 of docs/broker-protocol.md, the topic's own settings, versions.

A setting that may not be asked for counts as a wrong one: what it says is not guessed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from compactor.errors import NotFound, Refused
from compactor.metadata_topic.admin import ClusterFacts, TopicFacts, metadata_topic_problem
from compactor.metadata_topic.codec import uuid_text
from compactor.model.ids import TopicPartition

FRESH_S = 15.0
"""A round asks at each of its steps; what it was told this long ago is told again."""
OLDEST = (3, 8)
_CLUSTER = ""
_WANTED = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "remote.storage.enable": "true"}


class AsksCluster(Protocol):
    """metadata_topic.admin.KafkaAdmin is one."""

    def cluster(self) -> ClusterFacts: ...

    def metadata_topic(self, *, write: bool = False) -> TopicFacts: ...

    def topics(self, names: Sequence[str]) -> Mapping[str, TopicFacts]: ...


class BrokerConditions:
    """Asked by the publisher before each step. Usable by several threads. A topic that was made anew is refused once: what is at work on
    the one before ends with that, and what begins then is about the new one."""

    def __init__(self, admin: AsksCluster, *, fresh_s: float = FRESH_S) -> None:
        self._admin = admin
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}
        self._ids: dict[str, bytes] = {}

    def __call__(self, name: TopicPartition) -> None:
        """Raises Refused where nothing may be written about this partition, Unavailable where brokers do not say."""
        with self._lock:
            if self._is_due(_CLUSTER):
                problem = metadata_topic_problem(self._admin.metadata_topic(write=True)) or version_problem(self._admin.cluster())
                if problem:
                    raise Refused(f"nothing is compacted under these brokers: {problem}", hint="Readers have what they had")
                self._asked[_CLUSTER] = time.monotonic()
            if self._is_due(name.topic):
                self._ask_about(name.topic)
                self._asked[name.topic] = time.monotonic()

    def _is_due(self, what: str) -> bool:
        return time.monotonic() - self._asked.get(what, float("-inf")) >= self._fresh_s

    def _ask_about(self, topic: str) -> None:
        try:
            facts = self._admin.topics([topic])[topic]
        except NotFound as error:
            raise Refused(f"topic {topic} is not there any more", hint="Its tier goes with it") from error
        known = self._ids.get(topic, facts.topic_id)
        self._ids[topic] = facts.topic_id
        if known != facts.topic_id:
            said = f"topic {topic} was deleted and made anew: it was {uuid_text(known)} and is {uuid_text(facts.topic_id)}"
            raise Refused(said, hint="Run again: the new topic is another one")
        problem = topic_problem(topic, {setting: found.value for setting, found in facts.settings.items()})
        if problem:
            raise Refused(problem, hint="Set it with kafka-configs --alter, or take the topic out of topics under [kafka]")


def topic_problem(topic: str, settings: Mapping[str, str]) -> str:
    """Why a topic's tier must not be compacted, or nothing."""
    for setting, wanted in _WANTED.items():
        found = settings.get(setting)
        if found is None:
            return f"{setting} of {topic} is unknown: it must be {wanted}"
        if found != wanted:
            why = _WHY.get(setting, "brokers delete what it does not cover")
            return f"{setting} of {topic} is {found}, it must be {wanted}: {why}"
    return ""


_WHY: Mapping[str, str] = {
    "cleanup.policy": "brokers that compact or delete by themselves would work on the same segments",
    "remote.storage.enable": "nothing of it is tiered any more",
}


def version_problem(facts: ClusterFacts) -> str:
    """Kafka before 3.8 serves nothing more where a segment ends with removed offsets (KAFKA-15388). Unknown versions pass."""
    for broker in facts.brokers:
        parts = broker.version.split(".")
        if not parts[0].isdigit():
            continue
        version = (int(parts[0]), int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 99)
        if version < OLDEST:
            return f"broker {broker.id} is of version {broker.version}, it must be 3.8 or newer"
    return ""
