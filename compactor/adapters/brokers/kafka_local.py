"""Layout of Kafka's LocalTieredStorage: ``kafka-tiered-storage/<topic>-<partition>-<topic id>/<offset>-<segment id><suffix>``.

LocalTieredStorage refuses to delete a directory with other than Kafka's six kinds of files (RemoteLogSegmentFileset,
RemoteTopicPartitionDirectory).
"""

from __future__ import annotations

import re
from typing import Final

from typing_extensions import override

from compactor.config.settings import Settings
from compactor.model.ids import TopicPartition
from compactor.model.segment import FILE_KINDS
from compactor.storage.port import ObjectStore
from compactor.tier.contents import SegmentObjectNameStem, TopicIdOfPartition, segment_object_name_stem
from compactor.tier.plain import OneObjectPerFileLayout, ParsedFileName
from compactor.tier.ports import SegmentRef

LOCAL_TIER_FOLDER: Final = "kafka-tiered-storage"

_SUFFIXES: Final = {kind: kind.replace("-", "_") for kind in FILE_KINDS}
_KINDS: Final = {suffix: kind for kind, suffix in _SUFFIXES.items()}
_FOLDER: Final = re.compile(rf"{LOCAL_TIER_FOLDER}/(.+-\d+)-[A-Za-z0-9_-]{{22}}/[^/]+")


class KafkaLocalLayout(OneObjectPerFileLayout):
    """SegmentLayout of Kafka's LocalTieredStorage."""

    required_kinds = frozenset(FILE_KINDS) - {"txnindex"}

    def __init__(self, store: ObjectStore, topic_id: TopicIdOfPartition) -> None:
        super().__init__(store)
        self._topic_id = topic_id

    @override
    def partition_folder(self, partition: TopicPartition) -> str:
        return f"{LOCAL_TIER_FOLDER}/{partition}-{self._topic_id(partition)}/"

    @override
    def file_name(self, segment: SegmentRef, file_kind: str) -> str:
        return f"{segment_object_name_stem(segment)}.{_SUFFIXES[file_kind]}"

    @override
    def parse_file_name(self, file: str) -> ParsedFileName | None:
        first, _, suffix = file.partition(".")
        parsed, kind = SegmentObjectNameStem.parse(first), _KINDS.get(suffix)
        return ParsedFileName(parsed.segment_id, parsed.start_offset, kind) if parsed and kind else None

    @override
    def partition_in_key(self, key: str) -> str:
        match = _FOLDER.fullmatch(key)
        return match[1] if match else ""


def open_layout(settings: Settings, store: ObjectStore, topic_id: TopicIdOfPartition) -> KafkaLocalLayout:
    return KafkaLocalLayout(store, topic_id)
