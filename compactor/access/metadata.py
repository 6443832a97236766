"""Source of a tier's segment metadata, with one implementation per row of ``MetadataSource`` (compactor.tier.kinds). A control log mirrors
the metadata on a broker-managed tier, and is empty on a listed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.control.mirror import state_with_broker_view
from compactor.control.state import CatalogState, PartitionState
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.contents import TopicIdLookup

if TYPE_CHECKING:
    from compactor.adapters.brokers.view import BrokerMetadata
    from compactor.model.remote_log import BrokerView, RemoteLogSegmentMetadataRecord, TopicIdPartition
    from compactor.tier.ports import ListedTier

ControlLogStateToReaderState = Callable[[PartitionState], PartitionState]
"""Takes the state that a control log folds to, and returns the state that readers see."""


class TierMetadataSource:
    """Source for compactor-managed tiers, whose control logs record everything; base class of the others.

    exists_elsewhere: whether the tier can exist although its catalog records no identity yet.
    """

    exists_elsewhere = False

    def catalog_from_object_listing(self) -> CatalogState | None:
        """Return None if the catalog is read from the tier-wide log."""
        return None

    def refresh(self) -> None: ...

    def list_topic_partitions(self, read_catalog: Callable[[], CatalogState]) -> list[TopicPartition]:
        """Ascending. ``read_catalog``: called only if the catalog records the partitions."""
        return read_catalog().topic_partitions

    def cluster_id(self) -> str:
        """Empty if no broker writes the tier."""
        return ""

    def topic_id(self, partition: TopicPartition) -> TopicId:
        """Empty if no broker writes the tier."""
        return EMPTY_TOPIC_ID

    def broker_log_start_offset(self, partition: TopicPartition) -> int:
        """Return 0 if brokers report no log start, or if no broker writes the tier."""
        return 0

    def topic_settings_in_kafka(self, topic: str, read_catalog: Callable[[], CatalogState]) -> Mapping[str, str] | None:
        """By Kafka's names; on a compactor-managed tier, those that an agent or import has recorded. None if brokers write the tier and
        have no such topic.
        """
        return read_catalog().topic_settings.get(topic, {})

    def broker_retention_ms(self, topic: str) -> int | None:
        """Return -1 if unlimited; None if brokers do not report it, so that the program's own setting applies."""
        return None

    def reader_view(self, partition: TopicPartition) -> ControlLogStateToReaderState | None:
        """Return None if readers see the control log's state."""
        return None

    def broker_segment_records(self, partition: TopicPartition) -> Iterable[RemoteLogSegmentMetadataRecord]:
        """Segments in any state except deleted."""
        return ()

    def deleted_partitions(self) -> Sequence[TopicIdPartition]:
        """Partitions of deleted topics of which the brokers have not yet deleted all segments."""
        return ()


class BrokerManagedTierMetadataSource(TierMetadataSource):
    exists_elsewhere = True

    def __init__(self, brokers: BrokerMetadata) -> None:
        self.brokers = brokers

    @override
    def refresh(self) -> None:
        from compactor.adapters.brokers.view import TOPICS_MAX_AGE_S

        self.brokers.refresh(max_age_s=0.0, topics_max_age_s=TOPICS_MAX_AGE_S)

    @override
    def list_topic_partitions(self, read_catalog: Callable[[], CatalogState]) -> list[TopicPartition]:
        return self.brokers.list_topic_partitions()

    @override
    def cluster_id(self) -> str:
        return self.brokers.cluster_id()

    @override
    def topic_id(self, partition: TopicPartition) -> TopicId:
        return TopicIdLookup(self.brokers.topic_ids())(partition)

    @override
    def broker_log_start_offset(self, partition: TopicPartition) -> int:
        return max(0, self.brokers.topic_status(partition.topic).log_starts.get(partition.partition, 0))

    @override
    def topic_settings_in_kafka(self, topic: str, read_catalog: Callable[[], CatalogState]) -> Mapping[str, str] | None:
        return self.brokers.topic_status(topic).chosen if topic in self.brokers.topic_ids() else None

    @override
    def broker_retention_ms(self, topic: str) -> int | None:
        value = self.brokers.topic_status(topic).settings.get("retention.ms") if topic in self.brokers.topic_ids() else None
        return None if value is None else int(value)

    def broker_view(self, partition: TopicPartition, max_age_s: float = 0.0) -> BrokerView:
        """New records are read first if the metadata topic was last read more than ``max_age_s`` seconds ago."""
        from compactor.adapters.brokers.chain import broker_view
        from compactor.adapters.brokers.view import TOPICS_MAX_AGE_S

        self.brokers.refresh(max_age_s=max_age_s, topics_max_age_s=TOPICS_MAX_AGE_S)
        return broker_view(self.brokers.partition_metadata_from_records(partition).cache, partition)

    @override
    def reader_view(self, partition: TopicPartition) -> ControlLogStateToReaderState:
        """A call with the same state object as the call before returns the same result."""
        computed: list[tuple[PartitionState, PartitionState]] = []

        def use_broker_segments(state: PartitionState) -> PartitionState:
            if not computed or computed[0][0] is not state:
                computed[:] = [(state, self._with_broker_segments(state))]
            return computed[0][1]

        return use_broker_segments

    def _with_broker_segments(self, state: PartitionState) -> PartitionState:
        from compactor.adapters.brokers.view import METADATA_MAX_AGE_S

        # One command asks about many partitions.
        seen = state_with_broker_view(state, self.broker_view(state.topic_partition, METADATA_MAX_AGE_S))
        return seen.model_copy(update={"topic_id": self.topic_id(state.topic_partition)})

    @override
    def broker_segment_records(self, partition: TopicPartition) -> Iterable[RemoteLogSegmentMetadataRecord]:
        return self.brokers.partition_metadata_from_records(partition).cache.list_segments()

    @override
    def deleted_partitions(self) -> Sequence[TopicIdPartition]:
        return self.brokers.deleted_partitions()


class ListedTierMetadataSource(TierMetadataSource):
    """Metadata of a listed tier. ``layout``: the value of tier.layout."""

    exists_elsewhere = True

    def __init__(self, listed: ListedTier, layout: str) -> None:
        self.listed = listed
        self._layout = layout

    @override
    def catalog_from_object_listing(self) -> CatalogState:
        return CatalogState(layout=self._layout, partitions=dict.fromkeys(map(str, self.listed.list_topic_partitions()), 0))

    @override
    def topic_settings_in_kafka(self, topic: str, read_catalog: Callable[[], CatalogState]) -> Mapping[str, str] | None:
        return {}

    @override
    def reader_view(self, partition: TopicPartition) -> ControlLogStateToReaderState:
        """The listing is made at the function's first call and reused, so that a reader keeps seeing the same segments."""
        live: list[tuple[RemoteLogSegmentMetadata, ...]] = []

        def use_listed_segments(state: PartitionState) -> PartitionState:
            if not live:
                live.append(self.listed.live_segments(partition))
            return state.model_copy(update={"live": live[0]})

        return use_listed_segments
