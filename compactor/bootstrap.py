"""Composition root: opens stores and composes a tier."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compactor.access.metadata import BrokerManagedTierMetadataSource, ListedTierMetadataSource, TierMetadataSource
from compactor.access.tier import Tier, configured_object_retention
from compactor.config.settings import RateLimitSettings, Settings
from compactor.constants import TopicId
from compactor.control.identity import DataRootOwnershipCheckByTierId, TopicOwnershipCheckByObjects
from compactor.control.leadership import send_heartbeats_in_background
from compactor.control.logs import open_catalog
from compactor.control.ports import EnvironmentPorts
from compactor.local.cache import LocalState, RocksDatabase
from compactor.model.ids import TopicPartition
from compactor.storage.factory import open_store
from compactor.storage.port import ObjectStore
from compactor.storage.probe import ConditionalCreateCheck
from compactor.storage.settings import RetrySettings, TransferSettings
from compactor.storage.wrappers import FirstAnswerTracker, ReadOnlyStore, RequestCounters, UnconfiguredStore
from compactor.tier.contents import TopicIdLookup
from compactor.tier.kinds import TierKind, control_url, read_only_tier_error, tier_kind
from compactor.tier.ports import ControlLogPublisher, ReadOnlyPublisher, SegmentPublisher

if TYPE_CHECKING:
    from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka
    from compactor.adapters.brokers.cluster import ClusterConfirmations
    from compactor.adapters.brokers.view import BrokerMetadata
    from compactor.adapters.kafka_client import KafkaConnection
    from compactor.features.imports.incarnations import TopicSettingsQuery
    from compactor.model.remote_log import ClusterTopicIds


def open_tier(settings: Settings, *, local_state: bool = False, topics: Mapping[str, TopicId] | None = None) -> Tier:
    """Makes no request to brokers.

    :param local_state: whether to cache control logs in ``state_dir``.
    :param topics: topic ids by topic name; None to look them up in the tier's metadata.
    :raises UsageError: if the settings are invalid.
    :raises StoreError: if a broker-managed tier has neither brokers nor a metadata snapshot.
    """
    counters = RequestCounters()
    contact = FirstAnswerTracker()
    conditions = ConditionalCreateCheck(Path(settings.tier.state_dir) / "stores")

    def open_control_store(limits: RateLimitSettings, retries: RetrySettings | None = None) -> ObjectStore:
        return open_store(
            control_at,
            settings=settings,
            limits=limits,
            retries=retries,
            counters=counters,
            contact=contact,
            holds_control_records=True,
            before_create=partial(conditions.require_conditional_creates, prefix="probe/"),
        )

    control_at, kind = control_url(settings), tier_kind(settings)
    ownership = DataRootOwnershipCheckByTierId(is_exclusive=kind.owns_root)
    data = open_store(
        settings.tier_url,
        settings=settings,
        limits=settings.limits,
        transfers=TransferSettings(storage_class=kind.storage_class(settings)),
        counters=counters,
        contact=contact,
        # Brokers' stores get no objects but those of segments.
        before_create=partial(conditions.require_conditional_creates, prefix=".tiered-compactor/probe/")
        if ownership.ours
        else lambda store: None,
    )
    control: ObjectStore = UnconfiguredStore(
        "control_url under [tier] is not set" if kind.compacts else read_only_tier_error(settings).message
    )
    urgent = control
    if control_at:
        control = open_control_store(settings.limits)
        urgent = open_control_store(RateLimitSettings(), RetrySettings(deadline_s=settings.lease.ttl_ms / 3000))
    data = data if kind.compacts else ReadOnlyStore(data)
    metadata = _create_metadata_source(settings, kind, data, control)
    ports = EnvironmentPorts(
        control=control,
        data=data,
        layout=kind.layout(settings, data, TopicIdLookup(topics) if topics else metadata.topic_id),
        publisher=_create_segment_publisher(settings, metadata),
        brokers=metadata.broker_view if isinstance(metadata, BrokerManagedTierMetadataSource) else None,
        broker_log_start=_log_start_reader(settings, metadata),
        clock_ms=wall_clock_ms,
        sleep=time.sleep,
        random_bytes=secrets.token_bytes,
        holder=f"{socket.gethostname()}:{os.getpid()}",
        keep_alive=send_heartbeats_in_background,
        urgent=urgent,
        ownership=ownership,
        topic_ownership=TopicOwnershipCheckByObjects(metadata.topic_id) if kind.is_broker_managed and control_at else None,
        retention=configured_object_retention(settings),
    )
    place = hashlib.sha256(control_at.encode()).hexdigest()[:16]
    # A cached log of another tier would be believed although its segments may have changed outside of the log.
    local = LocalState(Path(settings.tier.state_dir) / "cache" / place) if local_state and kind.is_compactor_managed else None
    return Tier(settings, ports, open_catalog(ports), counters, local, ownership=ownership, metadata=metadata)


def wall_clock_ms() -> int:
    return int(time.time() * 1000)


def _create_metadata_source(settings: Settings, kind: TierKind, data: ObjectStore, control: ObjectStore) -> TierMetadataSource:
    listed = kind.listing(settings, data)
    if listed is not None:
        return ListedTierMetadataSource(listed, settings.tier.layout)
    return BrokerManagedTierMetadataSource(open_broker_metadata(settings, control)) if kind.is_broker_managed else TierMetadataSource()


def _create_segment_publisher(settings: Settings, metadata: TierMetadataSource) -> SegmentPublisher:
    if not isinstance(metadata, BrokerManagedTierMetadataSource):
        return ReadOnlyPublisher() if metadata.exists_elsewhere else ControlLogPublisher()
    from compactor.adapters.brokers.view import LiveBrokerMetadata

    if not isinstance(metadata.brokers, LiveBrokerMetadata):
        return ReadOnlyPublisher()
    from compactor.adapters.brokers.admin import KafkaAdmin
    from compactor.adapters.brokers.cluster import ClusterSettingsCheckBeforePublication
    from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
    from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient

    connection = kafka_connection_settings(settings)
    check = ClusterSettingsCheckBeforePublication(
        KafkaAdmin(connection),
        cleanup_policy_of=lambda topic: settings.cleaner_settings_for_topic(topic).cleanup_policy,
        confirmed=cluster_confirmations(settings),
        bootstrap_servers=connection.bootstrap_servers,
    )
    return MetadataTopicSegmentPublisher(
        metadata.brokers.followed,
        ConfluentKafkaMetadataTopicClient(connection),
        metadata.topic_id,
        require_allowed=check.require_publishing_allowed,
        require_suitable_cluster=check.require_suitable_cluster,
        clock_ms=wall_clock_ms,
        max_delivery_delay_ms=connection.producer_delivery_timeout_ms,
    )


def _log_start_reader(settings: Settings, metadata: TierMetadataSource) -> Callable[[TopicPartition], int] | None:
    """Reader for a broker-managed tier with configured brokers, otherwise None."""
    if not isinstance(metadata, BrokerManagedTierMetadataSource):
        return None
    from compactor.adapters.brokers.view import LiveBrokerMetadata

    if not isinstance(metadata.brokers, LiveBrokerMetadata):
        return None
    from compactor.adapters.brokers.admin import KafkaAdmin

    admin = KafkaAdmin(kafka_connection_settings(settings))
    return lambda name: admin.log_start_offset(name.topic, name.partition)


def open_broker_metadata(settings: Settings, control: ObjectStore) -> BrokerMetadata:
    """Open the brokers' metadata topic, or its latest snapshot if no broker is configured. Makes no request to brokers yet.

    :raises StoreError: if there is neither broker nor snapshot.
    """
    kafka = settings.kafka
    if not kafka.bootstrap_servers.strip():
        from compactor.adapters.brokers.view import SnapshotBrokerMetadata, read_latest_metadata_snapshot

        return SnapshotBrokerMetadata(read_latest_metadata_snapshot(control), kafka.topics, f"the metadata snapshot in {control.url}")
    from compactor.adapters.brokers.admin import KafkaAdmin
    from compactor.adapters.brokers.cache import FoldedMetadataStore
    from compactor.adapters.brokers.cluster import AdminClusterQueries
    from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
    from compactor.adapters.brokers.topic import ConfluentKafkaMetadataTopicClient
    from compactor.adapters.brokers.view import LiveBrokerMetadata

    connection = kafka_connection_settings(settings)
    place = hashlib.sha256(kafka.bootstrap_servers.encode()).hexdigest()[:16]
    topic = ConfluentKafkaMetadataTopicClient(connection)
    kept = FoldedMetadataStore(RocksDatabase(Path(settings.tier.state_dir) / "metadata" / place))
    followed = FoldingMetadataTopicReader(topic, kept, clock_ms=wall_clock_ms)
    where = f"{topic.name} at {kafka.bootstrap_servers}"
    queries = AdminClusterQueries(KafkaAdmin(connection), cluster_confirmations(settings), connection.bootstrap_servers)
    return LiveBrokerMetadata(followed, queries, kafka.topics, where)


def cluster_confirmations(settings: Settings) -> ClusterConfirmations:
    from compactor.adapters.brokers.cluster import ClusterConfirmations

    return ClusterConfirmations(settings.kafka.metadata_manager_class, settings.kafka.allow_untested_brokers)


def create_topic_ids_query(settings: Settings) -> Callable[[Sequence[str]], ClusterTopicIds] | None:
    queries = _create_cluster_queries(settings)
    return None if queries is None else queries.topic_ids


def create_topic_settings_query(settings: Settings) -> TopicSettingsQuery | None:
    queries = _create_cluster_queries(settings)
    return None if queries is None else queries.compaction_settings


def _create_cluster_queries(settings: Settings) -> AgentClusterQueriesOverKafka | None:
    if not settings.kafka.has_configured_brokers:
        return None
    from compactor.adapters.brokers.chain import AgentClusterQueriesOverKafka

    return AgentClusterQueriesOverKafka(kafka_connection_settings(settings))


def kafka_connection_settings(settings: Settings) -> KafkaConnection:
    """Raises UsageError if [kafka] names no broker, or sets a property that must not be set."""
    from compactor.adapters.kafka_client import KafkaConnection

    properties = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.kafka.properties.items()}
    return KafkaConnection(settings.kafka.bootstrap_servers, properties)
