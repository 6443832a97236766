"""The files ``_metadata`` and ``offset.wm`` of a partition.

Consumers use only segments that are listed and named in ``_metadata``, and search by its timestamps. The uploader continues above the base
offset in ``offset.wm`` (TopicPartitionMetadata, TimeIndex, WatermarkFileHandler).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.tier.layouts.pinterest.keys import METADATA_FILE, WATERMARK

TIME_INDEX_TYPE: Final = "TOPIC_PARTITION"


@dataclass(frozen=True, order=True)
class SegmentTimestampBound:
    """Row of the ``_metadata`` file: a segment, and an upper bound (timestamp_ms) for the timestamps of all records up to the segment's
    end.

    Rows compare in the order that consumers use.
    """

    timestamp_ms: int
    base_offset: int


def encode_metadata_file(partition: TopicPartition, entries: Sequence[SegmentTimestampBound]) -> bytes:
    """Encode ``_metadata`` as Gson writes TopicPartitionMetadata, without the process-specific ``loadHash``."""
    rows = [{"timestamp": e.timestamp_ms, "relativeOffset": 0, "baseOffset": e.base_offset} for e in sorted(entries)]
    timeindex = {"entries": rows, "timeIndexType": TIME_INDEX_TYPE, "size": len(rows)}
    document = {"topicPartition": {"partition": partition.partition, "topic": partition.topic}, "metadata": {"timeindex": timeindex}}
    return json.dumps(document, separators=(",", ":")).encode()


def parse_metadata_file(data: bytes, partition: TopicPartition) -> tuple[SegmentTimestampBound, ...]:
    """Parse a ``_metadata`` file and return its rows, ascending.

    Raises BadData if consumers could not read the file or it belongs to another partition.
    """
    try:
        document: Any = json.loads(data)
        reported = TopicPartition(document["topicPartition"]["topic"], document["topicPartition"]["partition"])
        rows = document["metadata"]["timeindex"]["entries"]
        entries = tuple(
            sorted(SegmentTimestampBound(_require_integer(row["timestamp"]), _require_integer(row["baseOffset"])) for row in rows)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _invalid_metadata_file_error(
            partition, METADATA_FILE, f"it is not a partition's metadata: {type(error).__name__} {error}"
        ) from None
    if reported != partition:
        raise _invalid_metadata_file_error(partition, METADATA_FILE, f"it is of {reported}")
    return entries


def format_watermark_file(base_offset: int) -> bytes:
    """Return the content of the watermark file. base_offset: first offset of the last segment whose log was uploaded."""
    return f"{base_offset:020d}".encode()


def parse_watermark_base_offset(data: bytes, partition: TopicPartition) -> int:
    """Return the base offset of the last segment whose log was uploaded. Raises BadData."""
    text = data.decode("ascii", "replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) == 20):
        raise _invalid_metadata_file_error(partition, WATERMARK, f"it says {text[:40]!r}, which is not a base offset of 20 digits")
    return int(text)


def _require_integer(value: object) -> int:
    """Return a JSON value that must be an integer. Raises TypeError for anything else, booleans included."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _invalid_metadata_file_error(partition: TopicPartition, file: str, cause: str) -> BadData:
    """Return the error for a corrupt ``_metadata`` or watermark file of a partition."""
    return BadData(cause, segment=f"{partition}/{file}", hint="The uploader rewrites it with its next segment")
