"""The readable batches of a partition with damaged segments (``export --skip-damaged``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compactor.access.tier import Tier
from compactor.consumer.damage import DamagedOffsetRange
from compactor.consumer.reading import OffsetRangeReader, OffsetRangeToRead, ReadOptions
from compactor.control.state import PartitionState
from compactor.errors import NotFound


@dataclass(frozen=True)
class SkippedOffsets:
    """Range of offsets, first and last inclusive, that an export left out because they cannot be read. reason: why they cannot be read."""

    first_offset: int
    last_offset: int
    reason: str


def write_readable_batches(tier: Tier, state: PartitionState, logs: Mapping[str, Path]) -> list[SkippedOffsets]:
    """Write the readable batches of a partition's live segments, without other files, and return the offsets that are missing, ascending.
    A segment of which nothing can be read gets no file.

    What readers with ``skip_damaged`` do not get is left out: also records of a transaction whose marker may be damaged.

    :param logs: segment id -> the file to write.
    :raises StoreError: if the store fails; NotFound if a segment was replaced meanwhile.
    """
    limit = tier.cleaner_settings_for_topic(state.topic).max_decompressed_batch_bytes
    extent = OffsetRangeToRead(state.topic_partition, state.start_offset, state.end_offset, tuple(state.live))
    damage: list[DamagedOffsetRange] = []
    reader = OffsetRangeReader(
        tier, extent, ReadOptions(read_committed=True, inflate_limit=limit, skip_damaged=True), on_damage=damage.append
    )
    for piece, copied in reader.read_intact_batches():
        if piece.metadata.id not in logs:
            raise NotFound(f"{state.topic_partition} was changed while it was read")
        table, buf = piece.source.table, piece.source.buf
        batches = np.flatnonzero(copied)
        with logs[piece.metadata.id].open("ab") as file:
            for run in np.split(batches, np.flatnonzero(np.diff(batches) > 1) + 1):
                if len(run):
                    file.write(buf[int(table.position[run[0]]) : int(table.position[run[-1]] + table.size[run[-1]])].tobytes())
    for segment in state.live:
        path = logs[segment.id]
        if path.exists() and not path.stat().st_size:
            path.unlink()
        if path.exists():
            os.utime(path, ns=(max(segment.mtime_ms, 0) * 1_000_000,) * 2)
    return [SkippedOffsets(one.first, one.last, one.reason) for one in sorted(damage)]
