"""Records of a range of offsets as the tier holds them now, in blocks, in order. Used for output and for scans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from bloom.siphash import hash_keys, siphash_key_halves
from compactor.access.tier import Tier
from compactor.constants import MAX_OFFSET
from compactor.consumer.damage import DamagedOffsetRange, write_damage_warning_to_log
from compactor.consumer.gather import SelectedRecords
from compactor.consumer.last_values import last_value_of_each_key_in_partition, select_records_at_offsets
from compactor.consumer.messages import RecordBlock, copy_to_record_block
from compactor.consumer.reading import OffsetRangeReader, OffsetRangeToRead, ReadOptions
from compactor.kernels.common import Flags
from compactor.kernels.jit import kernel
from compactor.model.ids import TopicPartition
from compactor.records.batches import Bytes, Int64s
from compactor.records.rows import Int32s


def read_record_blocks(
    tier: Tier,
    partition: TopicPartition,
    *,
    first_offset: int = 0,
    last_offset: int = MAX_OFFSET,
    read_committed: bool = True,
    latest_only: bool = False,
    key: bytes | None = None,
    on_damage: Callable[[DamagedOffsetRange], None] | None = None,
) -> Iterator[RecordBlock]:
    """Yield the records with offsets from ``first_offset`` to ``last_offset`` (inclusive), ascending. Raises StoreError, BadData.

    :param read_committed: use the isolation level read_committed.
    :param latest_only: only the last record of each key in the range, without keys whose last record is a tombstone.
    :param key: only records with this key; a segment whose Bloom filter excludes the key is not read.
    :param on_damage: called with offsets that cannot be read, which are then left out; None to raise BadData.
    """
    view = last_value_of_each_key_in_partition(
        tier, partition, first_offset=first_offset, last_offset=last_offset, read_committed=read_committed
    )
    if key is not None:
        view = replace(view, extent=_exclude_segments_without_key(tier, view.extent, key))
    only = view.offsets() if latest_only else None
    wanted = None if key is None else np.frombuffer(key, np.uint8)
    limit = tier.settings.cleaner_settings_for_topic(partition.topic).max_decompressed_batch_bytes
    options = ReadOptions(read_committed, limit, skip_damaged=on_damage is not None)
    for selection in OffsetRangeReader(
        tier, view.extent, options, on_damage=on_damage or write_damage_warning_to_log
    ).read_selected_records():
        found = selection if only is None else select_records_at_offsets(selection, only)
        found = found if wanted is None else _select_records_with_key(found, wanted)
        if len(found):
            yield copy_to_record_block(partition, found, view.log_identity.topic_id)


def _exclude_segments_without_key(tier: Tier, read_range: OffsetRangeToRead, key: bytes) -> OffsetRangeToRead:
    """Return the range without those segments whose Bloom filter shows that they do not contain the key. Segments without a filter stay."""
    if not tier.kind.compacts:
        return read_range
    inside = [
        segment for segment in read_range.segments if segment.end_offset >= read_range.first and segment.start_offset <= read_range.last
    ]
    sidecars = tier.open_sidecar_store(read_range.partition)
    hashes = np.empty((1, 2), np.uint64)
    hash_keys(
        np.frombuffer(key, np.uint8), np.zeros(1, np.int64), np.array([len(key)], np.int32), *siphash_key_halves(sidecars.hash_key), hashes
    )
    met, _ = sidecars.find_segments_that_may_hold_keys([segment.id for segment in inside], lambda: [hashes])
    return replace(read_range, segments=tuple(segment for segment in inside if segment.id in met))


def _select_records_with_key(selection: SelectedRecords, key: Bytes) -> SelectedRecords:
    """Return those selected rows whose key equals ``key``."""
    rows = selection.rows
    same = np.empty(len(selection), np.bool_)
    _flag_rows_with_key(selection.chunk.buf, rows.key_start, rows.key_length, selection.picked, key, same)
    return replace(selection, picked=selection.picked[same])


@kernel
def _flag_rows_with_key(buf: Bytes, start: Int64s, length: Int32s, selected_rows: Int64s, key: Bytes, out_is_equal: Flags) -> None:
    """Fill ``out_is_equal`` with a flag for each selected row: whether its key equals ``key``."""
    for i in range(selected_rows.size):
        row = selected_rows[i]
        out_is_equal[i] = length[row] == key.size
        at = start[row]
        for byte in range(key.size):
            if not out_is_equal[i]:
                break
            out_is_equal[i] = buf[at + byte] == key[byte]
