"""Answers to requests, with Kafka's error codes.

Group requests are refused as not authorised, never answered with "no offset": an application would begin again at ``auto.offset.reset``.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from kafka.protocol import admin, consumer, metadata, producer

from compactor.access.tier import Tier
from compactor.errors import BadData, CompactorError
from compactor.features.serve.access import User
from compactor.features.serve.fetch import Read, TierReader
from compactor.features.serve.partitions import UNDEFINED, Node, Partitions, RecordSource, View, leader_of
from compactor.features.serve.protocol import ErrorCode, Request, api_versions
from compactor.model.ids import TopicPartition
from compactor.read.pieces import SegmentGone
from compactor.read.reading import find_newest_record, find_record_for_time

T = TypeVar("T")
LATEST, EARLIEST, _MAX_TIMESTAMP = -1, -2, -3
TOPIC_RESOURCE = 2
_READ_ONLY = "this endpoint only reads a tier: write to the cluster itself"

_MAX_WAIT_MS = 60_000
ROWS_AT_ONCE = 100
"""Number of topics or partitions of a request after which other clients get a turn."""
NEXT_POLL_S = 0.25
"""Shortest time between two looks for new records while a fetch waits."""
CONFIGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "cleanup_policy",
    "retention.ms": "retention_ms",
    "retention.bytes": "retention_bytes",
    "delete.retention.ms": "delete_retention_ms",
    "min.compaction.lag.ms": "min_compaction_lag_ms",
    "max.compaction.lag.ms": "max_compaction_lag_ms",
    "min.cleanable.dirty.ratio": "min_cleanable_dirty_ratio",
    "segment.bytes": "segment_bytes",
}
"""Topic settings that DescribeConfigs reports -> their names in [cleaner]."""


@dataclass
class Counts:
    """by_api, errors: by name of request type and of error code."""

    by_api: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    at_end: dict[TopicPartition, float] = field(default_factory=dict)
    """Partition -> monotonic time at which a client last waited at its end."""

    def error(self, code: ErrorCode) -> ErrorCode:
        if code is not ErrorCode.NONE:
            self.errors[code.name] = self.errors.get(code.name, 0) + 1
        return code


class Requests:
    """Handler of requests of authenticated clients.

    me: this replica. nodes: all replicas, this one included.
    reserve: takes bytes for a response's records (a larger first batch aside), and returns how many are available.
    """

    def __init__(
        self,
        partitions: Partitions,
        reader: TierReader,
        me: Node,
        nodes: Sequence[Node],
        cluster_id: str,
        reserve: Callable[[int], AbstractContextManager[int]],
    ) -> None:
        self._partitions = partitions
        self._reader = reader
        self._me, self._nodes, self._cluster_id = me, tuple(nodes), cluster_id
        self._reserve = reserve
        self.counts = Counts()
        self._handlers: dict[int, Callable[[Request, User], Awaitable[Any]]] = {
            metadata.MetadataRequest.API_KEY: self._metadata,
            consumer.ListOffsetsRequest.API_KEY: self._list_offsets,
            consumer.OffsetForLeaderEpochRequest.API_KEY: self._offsets_for_epochs,
            consumer.FetchRequest.API_KEY: self._fetch,
            admin.DescribeClusterRequest.API_KEY: self._describe_cluster,
            metadata.FindCoordinatorRequest.API_KEY: self._find_coordinator,
            admin.DescribeConfigsRequest.API_KEY: self._describe_configs,
        }

    @property
    def tier(self) -> Tier:
        return self._partitions.tier

    async def answer(self, request: Request, user: User) -> Any:
        """Return None if the client expects no response. Raises CompactorError if the tier cannot be read."""
        if request.key == metadata.ApiVersionsRequest.API_KEY:
            return api_versions(request)
        refuse = REFUSALS.get(request.key)
        if refuse is not None:
            code, response = refuse(request.body)
            self.counts.error(code)
            return response
        return await self._handlers[request.key](request, user)

    # --- metadata ---

    def _leads(self, partition: TopicPartition) -> bool:
        return len(self._nodes) == 1 or leader_of(partition, self._nodes) == self._me

    async def _metadata(self, request: Request, user: User) -> Any:
        topics = await self._partitions.topics()
        response = metadata.MetadataResponse
        wanted = request.body.topics
        if wanted is None or (request.version == 0 and not wanted):
            wanted = [name for name in sorted(topics) if user.may_read(name)]
        found = [await self._wanted_topic(topic, topics, user) async for topic in _interleaved(wanted)]
        # A control log that cannot be read leaves its partition without a leader epoch: what is wrong is the answer to a fetch, and the
        # other partitions are not affected.
        names = {name for name, _, code in found if name is not None and code is ErrorCode.NONE}
        await self._partitions.refresh([partition for name in names for partition in topics[name].values()])
        shared = await self._shared_ids(topics[name] for name in names)
        return response(
            throttle_time_ms=0,
            brokers=[response.MetadataResponseBroker(node_id=node.id, host=node.host, port=node.port, rack=None) for node in self._nodes],
            cluster_id=self._cluster_id,
            controller_id=min(node.id for node in self._nodes),
            topics=[self._topic_metadata(name, topic_id, code, topics, shared) for name, topic_id, code in found],
        )

    async def _wanted_topic(self, topic: Any, topics: Collection[str], user: User) -> tuple[str | None, Any, ErrorCode]:
        name = topic if isinstance(topic, str) else topic.name
        topic_id = None if isinstance(topic, str) else topic.topic_id
        if name is None:
            name = await self._partitions.topic_name(topic_id) if topic_id is not None else None
            if name is None or not user.may_read(name):
                return None, topic_id, self.counts.error(ErrorCode.UNKNOWN_TOPIC_ID)
        if not user.may_read(name):
            return name, None, self.counts.error(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        return name, None, ErrorCode.NONE if name in topics else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    async def _shared_ids(self, topics: Iterable[Mapping[int, TopicPartition]]) -> frozenset[uuid.UUID]:
        """Ids of more than one topic. A client that fetched by such an id could be given the other topic's records."""
        views = (self._partitions.last_view(partition) for partitions in topics for partition in partitions.values())
        ids = {view.topic_id for view in views if view is not None and view.topic_id.int}
        return frozenset([one async for one in _interleaved(ids) if len(await self._partitions.names_of_id(one)) > 1])

    def _topic_metadata(
        self, name: str | None, topic_id: Any, code: ErrorCode, topics: Mapping[str, Mapping[int, TopicPartition]],
        shared: frozenset[uuid.UUID],
    ) -> Any:  # fmt: skip
        response = metadata.MetadataResponse
        partitions: list[TopicPartition] = []
        if code is ErrorCode.NONE and name is not None:
            partitions = [partition for _, partition in sorted(topics[name].items())]
        views = [self._partitions.last_view(partition) for partition in partitions]
        known = next((view.topic_id for view in views if view is not None), topic_id)
        return response.MetadataResponseTopic(
            error_code=code,
            name=name,
            topic_id=uuid.UUID(int=0) if known in shared else known,
            is_internal=False,
            partitions=[self._partition_metadata(partition, view) for partition, view in zip(partitions, views, strict=True)],
        )

    def _partition_metadata(self, partition: TopicPartition, view: View | None) -> Any:
        leader = leader_of(partition, self._nodes).id
        return metadata.MetadataResponse.MetadataResponseTopic.MetadataResponsePartition(
            error_code=ErrorCode.NONE,
            partition_index=partition.partition,
            leader_id=leader,
            leader_epoch=view.epoch if view is not None else UNDEFINED,
            replica_nodes=[leader],
            isr_nodes=[leader],
            offline_replicas=[],
        )

    async def _describe_cluster(self, request: Request, user: User) -> Any:
        response = admin.DescribeClusterResponse
        return response(
            throttle_time_ms=0,
            error_code=ErrorCode.NONE,
            error_message=None,
            endpoint_type=1,
            cluster_id=self._cluster_id,
            controller_id=min(node.id for node in self._nodes),
            brokers=[response.DescribeClusterBroker(broker_id=node.id, host=node.host, port=node.port, rack=None) for node in self._nodes],
        )

    async def _find_coordinator(self, request: Request, user: User) -> Any:
        """Name this replica, which refuses a coordinator's requests: librdkafka, which requires a group.id, also looks for a coordinator
        where partitions are assigned, and would report an error.
        """
        response, me = metadata.FindCoordinatorResponse, self._me
        rows = [
            response.Coordinator(key=key, node_id=me.id, host=me.host, port=me.port, error_code=ErrorCode.NONE, error_message=None)
            for key in request.body.coordinator_keys or ()
        ]
        return response(
            throttle_time_ms=0, error_code=ErrorCode.NONE, error_message=None, node_id=me.id, host=me.host, port=me.port, coordinators=rows
        )  # fmt: skip

    async def _describe_configs(self, request: Request, user: User) -> Any:
        topics = await self._partitions.topics()
        results = [self._topic_configs(resource, topics, user) for resource in request.body.resources]
        return admin.DescribeConfigsResponse(throttle_time_ms=0, results=results)

    def _topic_configs(self, resource: Any, topics: Collection[str], user: User) -> Any:
        result = admin.DescribeConfigsResponse.DescribeConfigsResult
        name, code, why, rows = resource.resource_name, ErrorCode.NONE, None, []
        if resource.resource_type != TOPIC_RESOURCE:
            code, why = ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "only topics are described: this endpoint only reads a tier"
        elif not user.may_read(name):
            code, why = ErrorCode.TOPIC_AUTHORIZATION_FAILED, "this user may not read the topic"
        elif name not in topics:
            code, why = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the tier does not hold this topic"
        else:
            settings = self.tier.cleaner_settings_for_topic(name)
            keys = resource.configuration_keys
            rows = [
                result.DescribeConfigsResourceResult(
                    name=key, value=str(getattr(settings, ours)), read_only=True, config_source=1, is_sensitive=False, synonyms=[],
                    config_type=0, documentation=None,
                )
                for key, ours in CONFIGS.items()
                if keys is None or key in keys
            ]  # fmt: skip
        return result(
            error_code=self.counts.error(code), error_message=why, resource_type=resource.resource_type, resource_name=name, configs=rows
        )

    # --- offsets ---

    async def _partition_view(self, topic: str, number: int, epoch: int, user: User) -> tuple[ErrorCode, View | None]:
        """View, or the error. ``epoch``: the leader epoch that the client knows, -1 for none."""
        if not user.may_read(topic):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED, None
        try:
            partition = await self._partitions.find(topic, number)
        except CompactorError as error:
            return _code_of(error), None
        if partition is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None
        if not self._leads(partition):
            return ErrorCode.NOT_LEADER_OR_FOLLOWER, None
        try:
            view = await self._partitions.view(partition)
            if epoch > view.epoch >= 0:
                view = await self._partitions.view(partition, 0)
        except CompactorError as error:
            return _code_of(error), None
        if epoch >= 0 and view.epoch >= 0 and epoch != view.epoch:
            return (ErrorCode.FENCED_LEADER_EPOCH if epoch < view.epoch else ErrorCode.UNKNOWN_LEADER_EPOCH), view
        return ErrorCode.NONE, view

    async def _refresh(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Read control logs at the same time. Errors are reported when a view is read."""
        with suppress(CompactorError):
            topics = await self._partitions.topics()
            found = [topics.get(topic, {}).get(number) for topic, number in wanted]
            await self._partitions.refresh([partition for partition in found if partition is not None and self._leads(partition)])

    async def _list_offsets(self, request: Request, user: User) -> Any:
        response = consumer.ListOffsetsResponse
        topic_response = response.ListOffsetsTopicResponse
        committed = request.version >= 2 and request.body.isolation_level == 1
        await self._refresh((topic.name, wanted.partition_index) for topic in request.body.topics for wanted in topic.partitions)
        topics = []
        async for topic in _interleaved(request.body.topics):
            rows = []
            async for wanted in _interleaved(topic.partitions):
                code, view = await self._partition_view(topic.name, wanted.partition_index, wanted.current_leader_epoch, user)
                timestamp, offset = UNDEFINED, UNDEFINED
                if code is ErrorCode.NONE and view is not None:
                    code, timestamp, offset = await self._find_offset(view, wanted.timestamp, committed=committed)
                rows.append(
                    topic_response.ListOffsetsPartitionResponse(
                        partition_index=wanted.partition_index,
                        error_code=self.counts.error(code),
                        timestamp=timestamp,
                        offset=offset,
                        leader_epoch=view.epoch_at(offset) if view is not None and offset >= 0 else UNDEFINED,
                    )
                )
            topics.append(topic_response(name=topic.name, partitions=rows))
        return response(throttle_time_ms=0, topics=topics)

    async def _find_offset(self, view: View, timestamp: int, *, committed: bool) -> tuple[ErrorCode, int, int]:
        """Error, timestamp and offset for ListOffsets; -1 and -1 if there is no record."""
        if timestamp == LATEST:
            return ErrorCode.NONE, UNDEFINED, view.bound(committed=committed)
        if timestamp == EARLIEST:
            return ErrorCode.NONE, UNDEFINED, view.start
        if timestamp < 0 and timestamp != _MAX_TIMESTAMP:
            return ErrorCode.NONE, UNDEFINED, UNDEFINED
        limit = self.tier.settings.cleaner.max_decompressed_batch_bytes
        try:
            for _ in range(5):
                where = self.tier, view.partition, view.segments
                try:
                    found = await self._partitions.run(
                        partial(find_newest_record, *where, limit, view.start)
                        if timestamp == _MAX_TIMESTAMP
                        else partial(find_record_for_time, *where, timestamp, limit, view.start)
                    )
                except SegmentGone:
                    view = await self._partitions.view(view.partition, 0)
                    continue
                if found is None or found.offset >= view.bound(committed=committed):
                    return ErrorCode.NONE, UNDEFINED, UNDEFINED
                return ErrorCode.NONE, found.timestamp_ms, found.offset
        except CompactorError as error:
            return _code_of(error), UNDEFINED, UNDEFINED
        return ErrorCode.KAFKA_STORAGE_ERROR, UNDEFINED, UNDEFINED

    async def _offsets_for_epochs(self, request: Request, user: User) -> Any:
        response = consumer.OffsetForLeaderEpochResponse
        topic_response = response.OffsetForLeaderTopicResult
        topics = []
        async for topic in _interleaved(request.body.topics):
            rows = []
            async for wanted in _interleaved(topic.partitions):
                code, view = await self._partition_view(topic.topic, wanted.partition, wanted.current_leader_epoch, user)
                epoch, end = (
                    view.end_of_epoch(wanted.leader_epoch) if code is ErrorCode.NONE and view is not None else (UNDEFINED, UNDEFINED)
                )
                rows.append(
                    topic_response.EpochEndOffset(
                        error_code=self.counts.error(code), partition=wanted.partition, leader_epoch=epoch, end_offset=end
                    )
                )
            topics.append(topic_response(topic=topic.topic, partitions=rows))
        return response(throttle_time_ms=0, topics=topics)

    # --- fetch ---

    async def _fetch(self, request: Request, user: User) -> Any:
        body = request.body
        committed = body.isolation_level == 1
        deadline = time.monotonic() + longest_wait_s(request)
        wanted = sum(partition.partition_max_bytes for topic in body.topics for partition in topic.partitions)
        while True:
            with self._reserve(max(0, min(body.max_bytes, wanted))) as budget:
                topics, size, is_urgent = await self._read_topics(request, user, budget, committed=committed)
            left = deadline - time.monotonic()
            if size >= min(body.min_bytes, budget) or is_urgent or left <= 0:
                break
            await asyncio.sleep(min(left, max(NEXT_POLL_S, self._partitions.max_age_s)))
        self.counts.bytes += size
        return consumer.FetchResponse(throttle_time_ms=0, error_code=ErrorCode.NONE, session_id=0, responses=topics)

    async def _read_topics(self, request: Request, user: User, budget: int, *, committed: bool) -> tuple[list[Any], int, bool]:
        """Topics of a Fetch response, the bytes of their records, and whether it must not wait for more."""
        topics, size, is_urgent = [], 0, False
        names = [await self._topic_of_fetch(topic, request.version) async for topic in _interleaved(request.body.topics)]
        asked = zip(names, request.body.topics, strict=True)
        await self._refresh((name, wanted.partition) for name, topic in asked if isinstance(name, str) for wanted in topic.partitions)
        async for name, topic in _interleaved(zip(names, request.body.topics, strict=True)):
            rows = []
            async for wanted in _interleaved(topic.partitions):
                if isinstance(name, ErrorCode):
                    read = Read(name, None, [], [])
                elif request.version >= 13 and not user.may_read(name):
                    read = Read(ErrorCode.UNKNOWN_TOPIC_ID, None, [], [])
                else:
                    read = await self._read_partition(name, wanted, user, budget - size, committed=committed, is_first=not size)
                size += read.size
                is_urgent |= read.is_loading or self.counts.error(read.error) is not ErrorCode.NONE
                rows.append(self._partition_data(wanted.partition, read))
            response = consumer.FetchResponse.FetchableTopicResponse
            topics.append(
                response(
                    topic=name if isinstance(name, str) else "", topic_id=topic.topic_id if request.version >= 13 else None, partitions=rows
                )
            )
        return topics, size, is_urgent

    async def _topic_of_fetch(self, topic: Any, version: int) -> str | ErrorCode:
        """Newer versions name topics by id."""
        if version < 13:
            return str(topic.topic)
        try:
            name = await self._partitions.topic_name(topic.topic_id) if topic.topic_id is not None else None
        except CompactorError as error:
            return _code_of(error)
        return ErrorCode.UNKNOWN_TOPIC_ID if name is None else name

    async def _read_partition(self, topic: str, wanted: Any, user: User, left: int, *, committed: bool, is_first: bool) -> Read:
        code, view = await self._partition_view(topic, wanted.partition, wanted.current_leader_epoch, user)
        if code is not ErrorCode.NONE or view is None:
            return Read(code, view, [], [])
        most = min(left, wanted.partition_max_bytes)
        read = await self._reader.read(view.partition, wanted.fetch_offset, most, committed=committed, at_least_one=is_first)
        if read.view is not None and read.view.source(wanted.fetch_offset, committed=committed) is RecordSource.END:
            self.counts.at_end[view.partition] = time.monotonic()
        return read

    def _partition_data(self, number: int, read: Read) -> Any:
        row = consumer.FetchResponse.FetchableTopicResponse.PartitionData
        view = read.view
        return row(
            partition_index=number,
            error_code=read.error,
            high_watermark=view.end if view is not None else UNDEFINED,
            last_stable_offset=view.bound(committed=True) if view is not None else UNDEFINED,
            log_start_offset=view.start if view is not None else UNDEFINED,
            aborted_transactions=[
                row.AbortedTransaction(producer_id=one.producer_id, first_offset=one.first_offset) for one in read.aborted
            ],
            preferred_read_replica=-1,
            records=read.chunks or b"",
        )


async def _interleaved(rows: Iterable[T]) -> AsyncIterator[T]:
    """Yield rows, and let other clients be answered in between."""
    for number, row in enumerate(rows, 1):
        yield row
        if not number % ROWS_AT_ONCE:
            await asyncio.sleep(0)


def longest_wait_s(request: Request) -> float:
    return min(max(request.body.max_wait_ms, 0), _MAX_WAIT_MS) / 1000 if request.key == consumer.FetchRequest.API_KEY else 0


def _code_of(error: CompactorError) -> ErrorCode:
    """Damage stays; a store that does not answer is asked again."""
    return ErrorCode.CORRUPT_MESSAGE if isinstance(error, BadData) else ErrorCode.KAFKA_STORAGE_ERROR


# --- refusals ---------------------------------------------------------------------------------------------------------------------


def _refuse_produce(body: Any) -> tuple[ErrorCode, Any]:
    code, response = ErrorCode.TOPIC_AUTHORIZATION_FAILED, producer.ProduceResponse
    if body.acks == 0:
        return code, None
    topics = [
        response.TopicProduceResponse(
            name=topic.name,
            partition_responses=[
                response.TopicProduceResponse.PartitionProduceResponse(
                    index=data.index, error_code=code, base_offset=-1, log_append_time_ms=-1, log_start_offset=-1, record_errors=[],
                    error_message=_READ_ONLY,
                )
                for data in topic.partition_data
            ],
        )
        for topic in body.topic_data
    ]  # fmt: skip
    return code, response(responses=topics, throttle_time_ms=0)


def _refuse_committed_offsets(body: Any) -> tuple[ErrorCode, Any]:
    code, response = ErrorCode.GROUP_AUTHORIZATION_FAILED, consumer.OffsetFetchResponse
    groups = [response.OffsetFetchResponseGroup(group_id=group.group_id, topics=[], error_code=code) for group in body.groups or ()]
    topics = [
        response.OffsetFetchResponseTopic(
            name=topic.name,
            partitions=[
                response.OffsetFetchResponseTopic.OffsetFetchResponsePartition(
                    partition_index=number, committed_offset=-1, committed_leader_epoch=-1, metadata="", error_code=code
                )
                for number in topic.partition_indexes
            ],
        )
        for topic in body.topics or ()
    ]
    return code, response(throttle_time_ms=0, topics=topics, error_code=code, groups=groups)


def _refuse_commit(body: Any) -> tuple[ErrorCode, Any]:
    code, response = ErrorCode.GROUP_AUTHORIZATION_FAILED, consumer.OffsetCommitResponse
    row = response.OffsetCommitResponseTopic
    topics = [
        row(
            name=topic.name,
            partitions=[
                row.OffsetCommitResponsePartition(partition_index=one.partition_index, error_code=code) for one in topic.partitions
            ],
        )
        for topic in body.topics
    ]
    return code, response(throttle_time_ms=0, topics=topics)


def _refuse_join(body: Any) -> tuple[ErrorCode, Any]:
    code = ErrorCode.GROUP_AUTHORIZATION_FAILED
    return code, consumer.JoinGroupResponse(
        throttle_time_ms=0, error_code=code, generation_id=-1, protocol_type=None, protocol_name="", leader="", skip_assignment=False,
        member_id="", members=[],
    )  # fmt: skip


def _refuse_topics(body: Any) -> tuple[ErrorCode, Any]:
    code, response = ErrorCode.TOPIC_AUTHORIZATION_FAILED, admin.CreateTopicsResponse
    rows = [
        response.CreatableTopicResult(
            name=topic.name, topic_id=None, error_code=code, error_message=_READ_ONLY, topic_config_error_code=0, num_partitions=-1,
            replication_factor=-1, configs=None,
        )
        for topic in body.topics
    ]  # fmt: skip
    return code, response(throttle_time_ms=0, topics=rows)


def _refuse_producer_id(body: Any) -> tuple[ErrorCode, Any]:
    code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    return code, producer.InitProducerIdResponse(throttle_time_ms=0, error_code=code, producer_id=-1, producer_epoch=-1)


REFUSALS: Final[Mapping[int, Callable[[Any], tuple[ErrorCode, Any]]]] = {
    producer.ProduceRequest.API_KEY: _refuse_produce,
    consumer.OffsetFetchRequest.API_KEY: _refuse_committed_offsets,
    consumer.OffsetCommitRequest.API_KEY: _refuse_commit,
    consumer.JoinGroupRequest.API_KEY: _refuse_join,
    admin.CreateTopicsRequest.API_KEY: _refuse_topics,
    producer.InitProducerIdRequest.API_KEY: _refuse_producer_id,
}
"""Requests that are offered and refused: clients ask for them before they read, or show the error to their users."""
