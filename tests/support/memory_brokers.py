"""Brokers that tier partitions, without a broker: real segments as LocalTieredStorage lays them, their metadata topic in memory.

Each opened tier is a process of its own: it has one consumer and one fold, and appends by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compactor.access.metadata import BrokerManagedTierMetadataSource
from compactor.access.tier import Tier
from compactor.adapters.brokers.cache import FoldedMetadataStore
from compactor.adapters.brokers.cluster import UnsuitableCluster, topic_settings_refusal_reason
from compactor.adapters.brokers.follow import FoldingMetadataTopicReader
from compactor.adapters.brokers.kafka_local import KafkaLocalLayout
from compactor.adapters.brokers.publisher import MetadataTopicSegmentPublisher
from compactor.adapters.brokers.view import LiveBrokerMetadata, TopicStatus
from compactor.bootstrap import open_tier
from compactor.config.settings import load_settings
from compactor.control.identity import TopicOwnershipCheckByObjects
from compactor.errors import BlockedCause, Refused
from compactor.features.imports.import_ import import_directory
from compactor.model.ids import TopicPartition
from compactor.model.remote_log import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
    uuid_bytes,
    uuid_text,
)
from compactor.model.segment import SegmentState
from compactor.tier.ports import SegmentIdAndStartOffset
from tests.simulation.memory_topic import MemoryMetadataTopic, MemoryTopicLog
from tests.support.broker_metadata import MemoryCluster
from tests.support.kafka_publishing import KeptNowhere

RIGHT = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1", "remote.storage.enable": "true"}
BROKER = 1


@dataclass
class MemoryBrokers:
    """``cluster``: what topics are now. ``readers``: all consumers of the metadata topic. ``hurried_ms``: by which processes are ahead."""

    folder: Path
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = MemoryTopicLog()
        self.cluster = MemoryCluster({})
        self.readers: list[MemoryMetadataTopic] = []
        self.hurried_ms = 0
        self._sources = open_tier(load_settings(str(self._toml("source", {})), {}))
        self._tiered: dict[TopicPartition, int] = {}

    def topic(self, name: str, settings: Mapping[str, str] | None = None, *, number: int = 0) -> None:
        """Made, made anew under another ``number``, or with other settings."""
        topic_id = uuid_bytes(uuid_text((name.encode() + bytes([number]) + b"-" * 16)[:16]))
        chosen = dict(settings or {})
        self.cluster.known[name] = TopicStatus(topic_id, settings={**RIGHT, **chosen}, chosen=chosen)

    def tier(self, name: TopicPartition, log_dir: Path) -> None:
        """A broker copies all segments that are new in a log directory."""
        source = self._sources
        import_directory(source, log_dir, name, source.settings.cleaner.cleaner_policy())
        store = self._opened(Path(self.folder / "objects")).ports.data
        layout = KafkaLocalLayout(store, lambda of: uuid_text(self.cluster.known[of.topic].topic_id))
        for segment in source.open_partition_log(name).refresh().live:
            if segment.start_offset <= self._tiered.get(name, -1):
                continue
            contents = {kind: source.ports.layout.read_file(name, segment, kind) for kind in segment.files}
            assert layout.upload_segment(name, segment.model_copy(update={"files": {}}), contents) == ""
            where = TopicIdPartition(self.cluster.known[name.topic].topic_id, name.topic, name.partition)
            raw_id, stamp = uuid_bytes(segment.id), segment.max_timestamp_ms
            self.write(
                RemoteLogSegmentMetadataRecord(
                    where, raw_id, segment.start_offset, segment.end_offset, BROKER, stamp, 5, segment.leader_epochs, segment.size_bytes
                ),
                RemoteLogSegmentMetadataUpdateRecord(where, raw_id, BROKER, 5, SegmentState.COPY_SEGMENT_FINISHED),
            )
            self._tiered[name] = segment.start_offset

    def restart(self, name: TopicPartition) -> None:
        """Its topic was made anew: what is tiered next begins at 0."""
        del self._tiered[name]
        self._sources = open_tier(load_settings(str(self._toml("source", {"tier": self._native(len(self.readers))})), {}))

    def expire(self, name: TopicPartition, offset: int, *, rises: bool = True) -> list[str]:
        """The leader deletes the segments wholly below an offset, ours and theirs, once its log start has risen to it. Their ids.

        ``rises``: False if its successor starts at 0 again by the time that anybody asks.
        """
        status = self.cluster.known[name.topic]
        if rises:
            self.cluster.known[name.topic] = replace(status, log_starts={name.partition: offset})
        opened = self.opened()
        cache = opened.broker_metadata.partition_metadata_from_records(name).cache
        going = sorted((one for one in cache.list_segments() if one.end_offset < offset), key=lambda one: one.start_offset)
        for one in going:
            for state in (SegmentState.DELETE_SEGMENT_STARTED, SegmentState.DELETE_SEGMENT_FINISHED):
                self.write(RemoteLogSegmentMetadataUpdateRecord(cache.partition, one.segment_id, BROKER, 6, state))
            opened.ports.layout.delete_segments(name, [SegmentIdAndStartOffset(one.id, one.start_offset)])
        return [one.id for one in going]

    def write(self, *records: MetadataRecord) -> None:
        self.log.write(records)

    def opened(
        self, *patterns: str, appending: MemoryMetadataTopic | None = None, lag: Callable[[int], int] = lambda _: 0, **settings: Any
    ) -> Tier:
        """A process. ``appending``: through which it appends; ``lag``: how many of a partition's newest records it does not get yet."""
        made = self._opened(self.folder / "objects", **settings)
        reader = MemoryMetadataTopic(self.log, lag=lag)
        self.readers.append(reader)
        followed = FoldingMetadataTopicReader(reader, FoldedMetadataStore(KeptNowhere()), clock_ms=self.clock_ms)
        brokers = LiveBrokerMetadata(followed, self.cluster, patterns or (".*",), "the metadata topic of tests")

        def conditions(name: TopicPartition) -> None:
            policy = made.settings.cleaner_settings_for_topic(name.topic).cleanup_policy
            suitable()
            if why := topic_settings_refusal_reason(name.topic, self.cluster.known[name.topic].settings, policy):
                raise Refused(why, cause=BlockedCause.SETTINGS)

        def suitable() -> None:
            if problem := self.cluster.problem:
                raise UnsuitableCluster(problem.message, hint=problem.hint, cause=problem.cause)

        metadata = BrokerManagedTierMetadataSource(brokers)
        topic = appending or MemoryMetadataTopic(self.log)
        publisher = MetadataTopicSegmentPublisher(
            followed,
            topic,
            metadata.topic_id,
            clock_ms=self.clock_ms,
            max_delivery_delay_ms=0,
            require_allowed=conditions,
            require_suitable_cluster=suitable,
        )
        layout = KafkaLocalLayout(made.ports.data, metadata.topic_id)
        ports = replace(
            made.ports,
            publisher=publisher,
            brokers=metadata.broker_view,
            broker_log_start=lambda name: self.cluster.known[name.topic].log_starts.get(name.partition, 0),
            layout=layout,
            topic_ownership=TopicOwnershipCheckByObjects(metadata.topic_id),
        )
        ports = replace(ports, clock_ms=self.clock_ms)
        tier = replace(made, ports=ports, metadata=metadata)
        tier.identity.read_or_create_catalog()
        return tier

    def clock_ms(self) -> int:
        return int(time.time() * 1000) + self.hurried_ms

    def _opened(self, root: Path, **settings: Any) -> Tier:
        root.mkdir(exist_ok=True)
        sections = {name: dict(values) for name, values in self.settings.items()}
        for name, values in settings.items():
            sections[name] = sections.get(name, {}) | values
        control = {"kind": "kafka", "layout": "kafka-local", "control_url": (self.folder / "control").as_uri()}
        sections["tier"] = control | {"url": root.as_uri(), "state_dir": str(self.folder / "state")}
        return open_tier(load_settings(str(self._toml("tier", sections)), {}))

    def _native(self, number: int) -> dict[str, str]:
        return {"url": (self.folder / f"native-{number}").as_uri(), "state_dir": str(self.folder / "state")}

    def _toml(self, name: str, sections: dict[str, dict[str, Any]]) -> Path:
        lines = []
        for section, values in ({"tier": self._native(0)} | sections).items():
            lines += [f"[{section}]", *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items())]
        path = self.folder / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path
