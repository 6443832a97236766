"""Last values of all keys of a partition, from the tier alone: an application restores its state without reading superseded values.

The log is read backwards, so that the first record met of a key is its last one. The hashes of keys met are kept in a set. If the set is
full, the remaining keys are read in two halves of the hash range, each from the end again, without those that were returned already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from compactor.access.tier import Tier
from compactor.constants import MAX_OFFSET, Offset
from compactor.consumer.gather import SelectedRecords
from compactor.consumer.history import LogIdentity, log_identity
from compactor.consumer.messages import Place, RecordBlock, copy_to_record_block
from compactor.consumer.reading import LastRecordOfEachKeyRequest, OffsetRangeReader, OffsetRangeToRead, ReadOptions, last_stable_offset
from compactor.errors import OutOfBudget
from compactor.model.ids import TopicPartition
from compactor.records.batches import Int64s

if TYPE_CHECKING:
    import pyarrow as pa

PREFETCHED_PIECES = 3
"""Number of pieces of 16 MiB that are fetched in advance: a bucket serves several requests at once faster than one after the other."""

MAX_HALVINGS = 20
"""Number of times that the hash range may be halved: more would be a million times the memory budget."""


@dataclass(frozen=True)
class LastValueOfEachKey:
    """Last records of all keys of a partition, without tombstones, as the tier held them when this object was made. Each iteration reads
    the records from the tier. A reader that continues at ``next_offset`` misses no change.
    """

    tier: Tier
    extent: OffsetRangeToRead
    committed: bool
    hash_key: bytes

    @property
    def next_offset(self) -> int:
        """Return the offset after the last record that was taken into account. An application continues to read there."""
        return self.extent.last + 1

    @property
    def next_place(self) -> Place:
        """Return ``next_offset`` as a Place, which also holds the log's topic id and the leader epoch of the record before it."""
        read = self.log_identity.consumed_history_below_offset(self.next_offset)
        return Place(*self.extent.partition, self.next_offset, read.last_read_leader_epoch, read.topic_id)

    @property
    def log_identity(self) -> LogIdentity:
        """Return topic id, leader epochs and end offset of the log that is read."""
        return self.extent.log or LogIdentity()

    def __iter__(self) -> Iterator[RecordBlock]:
        """Yield the last records of all keys in blocks, in no particular order. Each key occurs once. Raises StoreError, BadData."""
        for selection in self.read_selected_records():
            yield copy_to_record_block(self.extent.partition, selection, self.log_identity.topic_id)

    def arrow(self, *columns: str) -> Iterator[pa.RecordBatch]:
        """Yield the last record of each key, in Arrow batches.

        :param columns: names from ``compactor.consumer.columns.COLUMNS``; all of them by default.
        """
        from compactor.consumer.columns import arrow_schema_of_columns, to_arrow_batch

        schema = arrow_schema_of_columns(columns)
        for selection in self.read_selected_records():
            yield to_arrow_batch(selection, *self.extent.partition, schema)

    def offsets(self) -> Int64s:
        """Return the offsets of the last records of all keys, ascending. Takes eight bytes per key."""
        found = [selection.rows.offset[selection.picked] for selection in self.read_selected_records()]
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def read_selected_records(self) -> Iterator[SelectedRecords]:
        """Yield the last record of each key as selected rows of parsed chunks. Each selection is valid until the next one is requested."""
        cleaner = self.tier.cleaner_settings_for_topic(self.extent.partition.topic)
        left = [(0, 1, MAX_OFFSET)]
        while left:
            number, ranges, below = left.pop()
            latest = LastRecordOfEachKeyRequest(number, ranges, max(cleaner.map_budget_bytes, 1 << 16), self.hash_key)
            wanted = ReadOptions(self.committed, cleaner.max_decompressed_batch_bytes, latest, PREFETCHED_PIECES)
            try:
                for selection in OffsetRangeReader(self.tier, self.extent, wanted).read_selected_records():
                    picked = selection.picked[selection.rows.offset[selection.picked] < below]
                    if len(picked):
                        yield replace(selection, picked=picked)
                        below = Offset(int(selection.rows.offset[picked[0]]))
            except OutOfBudget:
                if ranges >> MAX_HALVINGS:
                    raise
                left += [(2 * number + half, 2 * ranges, below) for half in (0, 1)]


def last_value_of_each_key_in_partition(
    tier: Tier,
    partition: TopicPartition,
    *,
    first_offset: int = 0,
    last_offset: int = MAX_OFFSET,
    read_committed: bool = True,
    hash_key: bytes = b"",
) -> LastValueOfEachKey:
    """Return the last values of a partition's keys, as the tier holds them now.

    :param first_offset: first offset to read, inclusive.
    :param last_offset: last offset to read, inclusive.
    :param read_committed: use the isolation level read_committed.
    :param hash_key: the tier's hash key; empty to read it from the tier, which only one thread at a time may do.
    :raises BadData: if the tier's data is damaged.
    :raises StoreError: if the tier cannot be read.
    """
    state = tier.open_control_log_of_partition(partition).refresh()
    end = last_stable_offset(tier, state) if read_committed else state.end_offset + 1
    extent = OffsetRangeToRead(
        partition, max(first_offset, tier.first_readable_offset(state)), min(last_offset, end - 1), state.live, log_identity(tier, state)
    )
    return LastValueOfEachKey(tier, extent, read_committed, hash_key or tier.identity.hash_key_for_unstored_hashes())


def select_records_at_offsets(selection: SelectedRecords, wanted_offsets: Int64s) -> SelectedRecords:
    """Return those selected rows whose offset is in ``wanted_offsets``, an ascending array."""
    offsets = selection.rows.offset[selection.picked]
    at = np.searchsorted(wanted_offsets, offsets)
    found = at < len(wanted_offsets)
    found[found] = wanted_offsets[at[found]] == offsets[found]
    return replace(selection, picked=selection.picked[found])
