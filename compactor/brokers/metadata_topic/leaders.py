"""Leaders of partitions and the end offsets of their logs, asked in few requests. The upload agent needs them.

Brokers with ZooKeeper and with KRaft answer the same requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compactor.brokers.metadata_topic.admin import KafkaAdmin, KafkaSetting
from compactor.brokers.metadata_topic.codec import uuid_text
from compactor.brokers.metadata_topic.confluent_topic import uuid_to_bytes
from compactor.brokers.metadata_topic.connection import (
    KafkaConnection,
    LazyKafkaAdminClient,
    load_confluent_kafka,
    store_error_from_kafka_error,
)
from compactor.constants import LeaderEpoch, TopicId
from compactor.errors import Refused, StoreError
from compactor.model.ids import TopicPartition

RECORDED_SETTINGS = ("delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms")
"""Settings of topics by which their users decide how long records stay readable. The others only say how a broker works."""


@dataclass(frozen=True)
class ClusterPartitionLeaders:
    """Cluster id and the leader's broker id of every partition that this user may describe and that has a leader."""

    cluster_id: str
    leaders: Mapping[TopicPartition, int]


@dataclass(frozen=True)
class LeaderReportedLogEnd:
    """A leader's answer to ListOffsets. high_watermark: exclusive. leader_epoch: -1 if the leader does not return it."""

    leader_epoch: LeaderEpoch
    high_watermark: int


@dataclass(frozen=True)
class ClusterTopicIds:
    """A cluster's id, and the topic ids that it has now, by topic name. Topics that it did not describe are left out."""

    cluster_id: str
    topic_ids: Mapping[str, TopicId]


class AgentClusterQueriesOverKafka:
    """Client that asks a cluster for partition leaders, end offsets, topic ids and topic settings. Connects on first use."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._admin = LazyKafkaAdminClient(connection)

    def leaders(self) -> ClusterPartitionLeaders:
        """Return the leaders of all partitions, in one request. Raises Unavailable or Refused."""
        reported = self._admin.request_cluster_metadata("ask who leads")
        leaders = {
            TopicPartition(topic.topic, number): partition.leader
            for topic in reported.topics.values()
            for number, partition in topic.partitions.items()
            if partition.leader >= 0
        }
        return ClusterPartitionLeaders(reported.cluster_id or "", leaders)

    def topic_ids(self, topics: Sequence[str]) -> ClusterTopicIds:
        """Return the ids of these topics, without those that do not exist or may not be described. Raises Unavailable or Refused."""
        admin, timeout = self._admin.client, self._connection.timeout_s
        cluster = self._admin.send_request("describe the cluster", lambda: {"": admin.describe_cluster(request_timeout=timeout)})[""]
        return ClusterTopicIds(cluster.cluster_id or "", self._request_topic_ids_jointly_or_singly(topics))

    def _request_topic_ids_jointly_or_singly(self, topics: Sequence[str]) -> dict[str, TopicId]:
        """Return topic ids by topic name, in one request, or in one request per topic if the cluster refuses the joint request."""
        admin, timeout = self._admin.client, self._connection.timeout_s
        wanted = load_confluent_kafka().TopicCollection(list(topics))
        try:
            found = self._admin.send_request(
                f"describe {', '.join(topics)}", lambda: admin.describe_topics(wanted, request_timeout=timeout)
            )
        except Refused:
            return (
                {name: topic_id for one in topics for name, topic_id in self._request_topic_ids_jointly_or_singly([one]).items()}
                if len(topics) > 1
                else {}
            )
        return {name: uuid_text(uuid_to_bytes(topic.topic_id)) for name, topic in found.items()}

    def retention_ms(self, topic: str) -> int | None:
        """Return the topic's ``retention.ms``, -1 if unlimited, or None if this user may not read it. Raises StoreError."""
        return self._read_topic_setting_ms(topic, "retention.ms")

    def delete_delay_ms(self, topic: str) -> int | None:
        """Return the topic's ``file.delete.delay.ms``, or None if this user may not read it. Raises StoreError."""
        return self._read_topic_setting_ms(topic, "file.delete.delay.ms")

    def compaction_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str] | None]:
        """Return by topic name which of RECORDED_SETTINGS are set on the topic itself: none if its cleanup policy has no ``compact``, None
        if this user may not read them. Raises StoreError.
        """
        admin = KafkaAdmin(self._connection)
        try:
            found = admin.read_topic_settings(topics) if topics else {}
        finally:
            admin.close()
        return {topic: None if isinstance(settings, Refused) else _chosen_for_compaction(settings) for topic, settings in found.items()}

    def _read_topic_setting_ms(self, topic: str, name: str) -> int | None:
        """Return a setting of a topic, or None if this user may not read it. Raises StoreError."""
        setting = KafkaAdmin(self._connection).describe_topics([topic])[topic].settings.get(name)
        return int(setting.value) if setting is not None else None

    def query_log_ends_from_leaders(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, LeaderReportedLogEnd | StoreError]:
        """Return the log end of each partition, in one request per broker; an error for partitions whose leader does not answer.

        Raises Refused if no client can be created.
        """
        if not partitions:
            return {}
        kafka = load_confluent_kafka()
        admin = self._admin.client
        admin.poll(0)
        wanted = {kafka.TopicPartition(name.topic, name.partition): kafka.admin.OffsetSpec.latest() for name in partitions}
        uncommitted = kafka.IsolationLevel.READ_UNCOMMITTED
        timeout = self._connection.timeout_s
        asked = admin.list_offsets(wanted, isolation_level=uncommitted, request_timeout=timeout)
        deadline = time.monotonic() + timeout + 1
        found: dict[TopicPartition, LeaderReportedLogEnd | StoreError] = {}
        for where, future in asked.items():
            name = TopicPartition(where.topic, where.partition)
            try:
                answer = future.result(max(0.0, deadline - time.monotonic()))
            except kafka.KafkaException as error:
                found[name] = store_error_from_kafka_error(error.args[0], self._connection.bootstrap_servers, f"ask where {name} ends")
                continue
            except TimeoutError:
                answer = None
            if answer is None or answer.offset < 0:  # librdkafka's own number beside the answers of other leaders
                found[name] = StoreError(f"no broker told in {timeout:g} s where {name} ends", hint="It is retried")
            else:
                found[name] = LeaderReportedLogEnd(LeaderEpoch(-1 if answer.leader_epoch is None else answer.leader_epoch), answer.offset)
        return found


def _chosen_for_compaction(settings: Mapping[str, KafkaSetting]) -> dict[str, str]:
    """Return which of RECORDED_SETTINGS are set on a topic itself; none if its brokers do not compact it."""
    if "compact" not in settings["cleanup.policy"].value:
        return {}
    return {name: settings[name].value for name in RECORDED_SETTINGS if name in settings and settings[name].source == "topic"}
