"""Where the native layout keeps a segment's objects, spelled out: for tests that look for them in the store, or damage them."""

from __future__ import annotations

from compactor.model.ids import TopicPartition
from compactor.tier.ports import SegmentRef


def object_key(name: TopicPartition, segment: SegmentRef, kind: str = "log") -> str:
    return f"{name}/{segment.start_offset:020d}-{segment.id}.{kind}"
