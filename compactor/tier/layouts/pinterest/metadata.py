"""``_metadata`` and ``offset.wm`` of one partition.

The consumer intersects what it lists with the base offsets in ``_metadata``; by the timestamps it finds where to begin for a time. The
uploader goes on above the base offset in ``offset.wm``. (TopicPartitionMetadata, TimeIndex, WatermarkFileHandler)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.tier.layouts.pinterest.keys import METADATA, WATERMARK

TYPE: Final = "TOPIC_PARTITION"


@dataclass(frozen=True, order=True)
class SegmentTime:
    """A segment's row in ``_metadata``: no record at or before it is younger. Ordered as the consumer orders them."""

    timestamp_ms: int
    base_offset: int


def format_metadata(name: TopicPartition, entries: Sequence[SegmentTime]) -> bytes:
    """As Gson writes TopicPartitionMetadata. What it was loaded from (``loadHash``) is left out: it is a process's own note."""
    rows = [{"timestamp": e.timestamp_ms, "relativeOffset": 0, "baseOffset": e.base_offset} for e in sorted(entries)]
    timeindex = {"entries": rows, "timeIndexType": TYPE, "size": len(rows)}
    document = {"topicPartition": {"partition": name.partition, "topic": name.topic}, "metadata": {"timeindex": timeindex}}
    return json.dumps(document, separators=(",", ":")).encode()


def parse_metadata(data: bytes, name: TopicPartition) -> tuple[SegmentTime, ...]:
    """Its rows, ascending. Raises BadData where the consumer could not read it, and where it is another partition's."""
    try:
        document: Any = json.loads(data)
        told = TopicPartition(document["topicPartition"]["topic"], document["topicPartition"]["partition"])
        rows = document["metadata"]["timeindex"]["entries"]
        entries = tuple(sorted(SegmentTime(_whole(row["timestamp"]), _whole(row["baseOffset"])) for row in rows))
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(name, METADATA, f"it is no partition's metadata: {type(error).__name__} {error}") from None
    if told != name:
        raise _bad(name, METADATA, f"it is of {told}")
    return entries


def format_watermark(base_offset: int) -> bytes:
    return f"{base_offset:020d}".encode()


def parse_watermark(data: bytes, name: TopicPartition) -> int:
    """The base offset of the last segment whose .log was uploaded. Raises BadData."""
    text = data.decode("ascii", "replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) == 20):
        raise _bad(name, WATERMARK, f"it says {text[:40]!r}, which is no base offset of 20 digits")
    return int(text)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _bad(name: TopicPartition, file: str, cause: str) -> BadData:
    return BadData(cause, segment=f"{name}/{file}", hint="The uploader writes it anew with its next segment")
