"""Layout of compactor-managed tiers: each file of a segment is one object, such as ``orders-0/00000000000000000042-<id>.log``.

With ``[tier] key_entropy_bits`` binary digits of a hash of the partition's name come first: ``0110/orders-0/...``.
"""

from __future__ import annotations

import re
from typing import Final

from typing_extensions import override

from compactor.model.ids import INCARNATION_SUFFIX, TopicPartition
from compactor.model.segment import FILE_KINDS
from compactor.storage.port import ObjectStore
from compactor.tier.names import md5_prefix_bits, segment_object_name_stem
from compactor.tier.plain import ComposableLogLayout, ParsedFileName
from compactor.tier.ports import SegmentRef

_OBJECT: Final = re.compile(rf"(\d{{20}})-([A-Za-z0-9_-]{{22}})\.({'|'.join(FILE_KINDS)})")
_FOLDER: Final = re.compile(rf"([^/]+-\d+(?:{INCARNATION_SUFFIX})?)/[^/]+")


class NativeLayout(ComposableLogLayout):
    """SegmentLayout of compactor-managed tiers: each file of a segment is one object, such as ``orders-0/00000000000000000042-<id>.log``.

    entropy_bits: number of binary digits in front of each partition's folder; 0 for none.
    """

    def __init__(self, store: ObjectStore, entropy_bits: int = 0) -> None:
        super().__init__(store)
        self._entropy_bits = entropy_bits

    @override
    def partition_folder(self, partition: TopicPartition) -> str:
        return f"{md5_prefix_bits(str(partition), self._entropy_bits)}/{partition}/" if self._entropy_bits else f"{partition}/"

    @override
    def file_name(self, segment: SegmentRef, file_kind: str) -> str:
        return f"{segment_object_name_stem(segment)}.{file_kind}"

    @override
    def parse_file_name(self, file: str) -> ParsedFileName | None:
        match = _OBJECT.fullmatch(file)
        return ParsedFileName(match[2], int(match[1]), match[3]) if match else None

    @override
    def partition_name_in_object_key(self, key: str) -> str:
        digits, _, rest = key.partition("/") if self._entropy_bits else ("", "", key)
        match = _FOLDER.fullmatch(rest)
        return match[1] if match and digits == md5_prefix_bits(match[1], self._entropy_bits) else ""
