"""Cluster queries through the Kafka admin client (implements ClusterQueries of compactor.brokers.view)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from compactor.brokers.conditions import NOTHING_CONFIRMED, ClusterConfirmations, ClusterProblem, find_cluster_problem
from compactor.brokers.metadata_topic.admin import KafkaAdmin, TopicDescription
from compactor.brokers.view import TopicStatus
from compactor.errors import NotFound, Refused

_log = logging.getLogger(__name__)


class AdminClusterQueries:
    """Implementation of ``ClusterQueries`` with a Kafka admin client.

    Topics that may not be described are left out, with one warning each.

    :param bootstrap_servers: the brokers' addresses, for the commands in messages.
    """

    def __init__(self, admin: KafkaAdmin, confirmed: ClusterConfirmations = NOTHING_CONFIRMED, bootstrap_servers: str = "") -> None:
        self._admin = admin
        self._confirmed = confirmed
        self._servers = bootstrap_servers
        self._cluster_id = ""
        self._reported: set[str] = set()

    def cluster_id(self) -> str:
        """Return the Kafka cluster id. Cached after the first request."""
        if not self._cluster_id:
            self._cluster_id = self._admin.cluster_id()
        return self._cluster_id

    def topic_statuses(self, topics: Sequence[str]) -> Mapping[str, TopicStatus]:
        """Return the status of each topic by name. Asks in one request, or one per topic if the cluster refuses the joint request."""
        try:
            facts = self._admin.describe_topics(topics)
        except (Refused, NotFound):
            facts = self._describe_topics_one_by_one(topics)
        return {name: _topic_status_from_description(found) for name, found in facts.items()}

    def cluster_problem(self) -> ClusterProblem | None:
        """Return why compaction is ruled out, or None. If the cluster refuses to answer, the refusal is the problem."""
        try:
            return find_cluster_problem(self._admin, self._confirmed, bootstrap_servers=self._servers)
        except (Refused, NotFound) as error:
            return ClusterProblem("metadata-topic", error.message, error.hint)

    def _describe_topics_one_by_one(self, topics: Sequence[str]) -> dict[str, TopicDescription]:
        """Describe each topic in a request of its own, and leave out those that the cluster refuses."""
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
    """Convert an admin client's description to a TopicStatus."""
    led = {number: one for number, one in topic.partitions.items() if one.log_start >= 0}
    return TopicStatus(
        topic.topic_id,
        log_starts={number: one.log_start for number, one in led.items()},
        last_stable={number: one.last_stable for number, one in led.items()},
        settings={name: setting.value for name, setting in topic.settings.items()},
        chosen=topic.topic_level_settings(),
    )
