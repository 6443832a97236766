"""The readable batches of a damaged segment (``export --skip-damaged``)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compactor.access.tier import Tier
from compactor.errors import BadData, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import Bytes, memory_map_file, parse_batch_headers_of_segment, verify_crcs_of_batches
from compactor.records.indexes import OFFSET_ENTRY

FirstAndEndByte = tuple[int, int]
"""Position of the first byte of a range, and the position after its last byte."""


@dataclass(frozen=True)
class SkippedOffsets:
    """Range of offsets, first and last inclusive, that an export left out because they cannot be read. reason: why they cannot be read."""

    first_offset: int
    last_offset: int
    reason: str


def salvage_segment(
    tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata, path: Path, first_offset: int
) -> list[SkippedOffsets]:
    """Write the readable batches of a damaged segment to ``path``, and return the offsets that are missing in the file. Nothing is written
    if no batch can be read.

    :param first_offset: offset from which the segment is read.
    :raises StoreError: if the store fails.
    """
    layout = tier.ports.layout
    try:
        layout.download_file(partition, segment, "log", path)
    except (NotFound, BadData):
        path.unlink(missing_ok=True)
        return [SkippedOffsets(first_offset, segment.end_offset, "the object is missing, or cannot be unpacked")]
    buf = memory_map_file(path)
    spans, skipped = _readable_byte_ranges(
        buf, layout.object_name(partition, segment, "log"), _offset_index_positions(tier, partition, segment), segment, first_offset
    )
    data = b"".join(buf[begin:end].tobytes() for begin, end in spans)
    del buf
    path.unlink()
    if data:
        path.write_bytes(data)
    return skipped


def _offset_index_positions(tier: Tier, partition: TopicPartition, segment: RemoteLogSegmentMetadata) -> list[int]:
    """Return the byte positions that the segment's offset index contains, ascending; an empty list if the index is missing."""
    try:
        data = tier.ports.layout.read_file(partition, segment, "index")
    except (NotFound, BadData):
        return []
    entries = np.frombuffer(data[: len(data) // OFFSET_ENTRY.itemsize * OFFSET_ENTRY.itemsize], OFFSET_ENTRY)
    return sorted({int(position) for position in entries["position"].tolist()})


def _readable_byte_ranges(
    buf: Bytes, source_name: str, restart_positions: Sequence[int], segment: RemoteLogSegmentMetadata, first_offset: int
) -> tuple[list[FirstAndEndByte], list[SkippedOffsets]]:
    """Return the byte ranges of readable batches, and the offsets between them that cannot be read.

    :param restart_positions: byte positions where batches should begin, ascending, at which parsing goes on after damage.
    :param first_offset: offset from which the batches are wanted.
    """
    spans: list[FirstAndEndByte] = []
    skipped: list[SkippedOffsets] = []
    at, expected, reason = 0, first_offset, ""
    while at < len(buf):
        stop = len(buf)
        try:
            table = parse_batch_headers_of_segment(buf[at:], source_name, expected - 1 if spans else -1)
        except BadData as error:
            stop = at + max(error.position, 0)
            table = (
                parse_batch_headers_of_segment(buf[at:stop], source_name)
                if stop > at
                else parse_batch_headers_of_segment(buf[:0], source_name)
            )
            structure = error.cause
        else:
            structure = ""
        for batch in range(len(table)):
            base, last = int(table.base_offset[batch]), int(table.last_offset[batch])
            if last < expected or last > segment.end_offset:
                continue
            begin = at + int(table.position[batch])
            try:
                verify_crcs_of_batches(buf[at:stop], table, batch, batch + 1, source_name)
            except BadData:
                reason = reason or "the CRC does not match"
                continue
            if reason and base > expected:
                skipped.append(SkippedOffsets(expected, base - 1, reason))
            reason, expected = "", last + 1
            spans.append((begin, begin + int(table.size[batch])))
        reason = structure or reason
        after = bisect_right(restart_positions, stop)
        at = len(buf) if stop == len(buf) else restart_positions[after] if after < len(restart_positions) else len(buf)
    if len(buf) < segment.size_bytes:
        reason = reason or f"the object ends {segment.size_bytes - len(buf)} bytes early"
    if reason and expected <= segment.end_offset:
        skipped.append(SkippedOffsets(expected, segment.end_offset, reason))
    return spans, skipped
