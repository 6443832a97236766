"""Layout of compactor-managed tiers: each file of a segment is one object, such as ``orders-0/00000000000000000042-<id>.log``."""

from __future__ import annotations

import re
from typing import Final

from compactor.model.ids import INCARNATION_SUFFIX, TopicPartition
from compactor.model.segment import FILE_KINDS
from compactor.tier.names import object_stem
from compactor.tier.plain import ComposableLayout, FileName
from compactor.tier.ports import SegmentRef

_OBJECT: Final = re.compile(rf"(\d{{20}})-([A-Za-z0-9_-]{{22}})\.({'|'.join(FILE_KINDS)})")
_FOLDER: Final = re.compile(rf"([^/]+-\d+(?:{INCARNATION_SUFFIX})?)/[^/]+")


class NativeLayout(ComposableLayout):
    """SegmentLayout of compactor-managed tiers."""

    def partition_folder(self, name: TopicPartition) -> str:
        return f"{name}/"

    def file_name(self, segment: SegmentRef, kind: str) -> str:
        return f"{object_stem(segment)}.{kind}"

    def parse_file_name(self, file: str) -> FileName | None:
        match = _OBJECT.fullmatch(file)
        return FileName(match[2], int(match[1]), match[3]) if match else None

    def partition_of(self, key: str) -> str:
        match = _FOLDER.fullmatch(key)
        return match[1] if match else ""
