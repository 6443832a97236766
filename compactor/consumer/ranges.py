"""The records of a range of offsets as the tier has them now, block by block, in order: what is printed or scanned once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from bloom.jit import kernel
from bloom.siphash import hash_keys, key_halves
from compactor.bootstrap import Tier
from compactor.consumer.gather import Flags, Selection
from compactor.consumer.last_values import among, latest
from compactor.consumer.messages import RecordBlock, block_of
from compactor.consumer.reading import Extent, Reader, WantedRecords
from compactor.model.ids import TopicPartition
from compactor.records.batches import MAX_OFFSET, Bytes, Int64s
from compactor.records.rows import Int32s


def read_blocks(
    tier: Tier,
    name: TopicPartition,
    *,
    first: int = 0,
    last: int = MAX_OFFSET,
    committed: bool = True,
    latest_only: bool = False,
    key: bytes | None = None,
) -> Iterator[RecordBlock]:
    """Records first..last (inclusive), ascending. Raises StoreError, BadData.

    :param latest_only: of each key only the last one in the range, and none where that is a tombstone.
    :param key: only records that have it; a segment whose filter says that it has none of them is not read.
    """
    view = latest(tier, name, first=first, last=last, committed=committed)
    if key is not None:
        view = replace(view, extent=_that_may_have(tier, view.extent, key))
    only = view.offsets() if latest_only else None
    wanted = None if key is None else np.frombuffer(key, np.uint8)
    limit = tier.settings.cleaner_for(name.topic).max_decompressed_batch_bytes
    for selection in Reader(tier, view.extent, WantedRecords(committed, limit)).selections():
        found = selection if only is None else among(selection, only)
        found = found if wanted is None else _with_key(found, wanted)
        if len(found):
            yield block_of(name, found)


def _that_may_have(tier: Tier, extent: Extent, key: bytes) -> Extent:
    """Without the segments whose filter does not know the key. Imported ones have no filter, rounds make them. Raises StoreError."""
    if tier.listed is not None:
        return extent
    inside = [segment for segment in extent.segments if segment.end_offset >= extent.first and segment.start_offset <= extent.last]
    sidecars = tier.sidecars(extent.name)
    hashes = np.empty((1, 2), np.uint64)
    hash_keys(np.frombuffer(key, np.uint8), np.zeros(1, np.int64), np.array([len(key)], np.int32), *key_halves(sidecars.hash_key), hashes)
    met, _ = sidecars.meeting([segment.id for segment in inside], lambda: [hashes])
    return replace(extent, segments=tuple(segment for segment in inside if segment.id in met))


def _with_key(selection: Selection, key: Bytes) -> Selection:
    rows = selection.rows
    same = np.empty(len(selection), np.bool_)
    _same_key(selection.chunk.buf, rows.key_start, rows.key_length, selection.picked, key, same)
    return replace(selection, picked=selection.picked[same])


@kernel
def _same_key(buf: Bytes, start: Int64s, length: Int32s, picked: Int64s, key: Bytes, same: Flags) -> None:
    for i in range(picked.size):
        row = picked[i]
        same[i] = length[row] == key.size
        at = start[row]
        for byte in range(key.size):
            if not same[i]:
                break
            same[i] = buf[at + byte] == key[byte]
