"""SegmentLayout for Pinterest's tiered storage: three files per segment, named by the base offset.

It has no producer snapshots, transaction indexes, leader epochs or segment ids. Objects are named by offset only, so a segment cannot be
replaced while readers use it; nothing is ever overwritten. Files are created in any order: consumers wait until a segment has all three.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from typing_extensions import override

from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.port import ObjectStore
from compactor.tier.layouts.pinterest.keys import (
    METADATA_FILE,
    OBJECT_KINDS,
    WATERMARK,
    PinterestObjectKeys,
    file_name,
    parse_file_name,
    segment_id_from_base_offset,
)
from compactor.tier.plain import OneObjectPerFileLayout, ParsedFileName
from compactor.tier.ports import ListedObject, SegmentRef


class PinterestLayout(OneObjectPerFileLayout):
    """SegmentLayout of Pinterest's tiered storage: three files per segment, named by its base offset, since segments have no ids."""

    kinds = OBJECT_KINDS

    def __init__(self, store: ObjectStore, keys: PinterestObjectKeys) -> None:
        super().__init__(store)
        self._keys = keys

    @override
    def partition_folder(self, partition: TopicPartition) -> str:
        return self._keys.partition_folder(partition)

    @override
    def file_name(self, segment: SegmentRef, file_kind: str) -> str:
        return file_name(segment.start_offset, file_kind)

    @override
    def parse_file_name(self, file: str) -> ParsedFileName | None:
        parsed = parse_file_name(file)
        return ParsedFileName(segment_id_from_base_offset(parsed[0]), *parsed) if parsed else None

    @override
    def partition_name_in_object_key(self, key: str) -> str:
        return str(self._keys.partition_of_object_key(key) or "")

    @override
    def list_objects(self, partition: TopicPartition) -> Iterator[ListedObject]:
        """Yield the partition's objects, except the ``_metadata`` file and the watermark."""
        return (item for item in super().list_objects(partition) if item.key.rpartition("/")[2] not in (METADATA_FILE, WATERMARK))

    @override
    def _expected_file_kinds(self, segment: RemoteLogSegmentMetadata) -> Collection[str]:
        """Return all kinds of files, because consumers skip a segment that lacks one."""
        return OBJECT_KINDS
