"""Who leads which partition, and where the leaders' logs end: what an upload beside a broker rests on, in few requests.

Brokers that keep their metadata in ZooKeeper answer the same requests as those with KRaft.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compactor.errors import StoreError
from compactor.metadata_topic.connection import AdminSession, KafkaConnection, load, mapped
from compactor.model.ids import TopicPartition


@dataclass(frozen=True)
class ClusterLeaders:
    """``leaders``: of the partitions that this user may describe and that have one."""

    cluster_id: str
    leaders: Mapping[TopicPartition, int]


@dataclass(frozen=True)
class LogEnd:
    """A leader's answer to ListOffsets. ``high_watermark``: exclusive. ``leader_epoch``: -1 where it does not say it."""

    leader_epoch: int
    high_watermark: int


class KafkaLeaders:
    """Connects on first use; for one thread."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._admin = AdminSession(connection)

    def leaders(self) -> ClusterLeaders:
        """One request. Raises Unavailable, Refused."""
        told = self._admin.listed("ask who leads")
        leaders = {
            TopicPartition(topic.topic, number): partition.leader
            for topic in told.topics.values()
            for number, partition in topic.partitions.items()
            if partition.leader >= 0
        }
        return ClusterLeaders(told.cluster_id or "", leaders)

    def ends(self, names: Sequence[TopicPartition]) -> dict[TopicPartition, LogEnd | StoreError]:
        """One request a broker. Of a partition whose leader does not answer, why. Raises Refused where no client can be made."""
        if not names:
            return {}
        kafka = load()
        admin = self._admin.client
        admin.poll(0)
        wanted = {kafka.TopicPartition(name.topic, name.partition): kafka.admin.OffsetSpec.latest() for name in names}
        uncommitted = kafka.IsolationLevel.READ_UNCOMMITTED
        timeout = self._connection.timeout_s
        asked = admin.list_offsets(wanted, isolation_level=uncommitted, request_timeout=timeout)
        deadline = time.monotonic() + timeout + 1
        found: dict[TopicPartition, LogEnd | StoreError] = {}
        for where, future in asked.items():
            name = TopicPartition(where.topic, where.partition)
            try:
                answer = future.result(max(0.0, deadline - time.monotonic()))
            except kafka.KafkaException as error:
                found[name] = mapped(error.args[0], self._connection.bootstrap_servers, f"ask where {name} ends")
                continue
            except TimeoutError:
                answer = None
            if answer is None or answer.offset < 0:  # librdkafka's own number beside the answers of other leaders
                found[name] = StoreError(f"no broker told in {timeout:g} s where {name} ends", hint="It is asked again")
            else:
                found[name] = LogEnd(-1 if answer.leader_epoch is None else answer.leader_epoch, answer.offset)
        return found
