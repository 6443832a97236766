"""Of each key its last value, from the tier alone: how an application gets its state back without reading what it was before.

Read backwards, the first record seen of a key is its last one. The keys seen are a set of hashes; where the set is full, the keys that
are left are done in two halves, each read from the end again, and neither gives what was given already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from compactor.bootstrap import Tier
from compactor.consumer.gather import Selection
from compactor.consumer.messages import RecordBlock, block_of
from compactor.consumer.reading import Extent, Latest, Reader, WantedRecords, first_offset, last_stable_offset
from compactor.errors import OutOfBudget
from compactor.model.ids import TopicPartition
from compactor.records.batches import MAX_OFFSET, Int64s

if TYPE_CHECKING:
    import pyarrow as pa

PIECES_AHEAD = 3
"""A bucket gives several at once faster than one after the other; each is 16 MiB."""

MOST_HALVINGS = 20
"""More than a million times the budget is a mistake."""


@dataclass(frozen=True)
class LastValues:
    """The last records of keys whose value is not null, from one partition of the tier as it was when it was asked.

    ``next_offset``: whoever reads everything from there on (at the broker, or as the tier grows) has the whole state. Iterating reads;
    each pass reads again.
    """

    tier: Tier
    extent: Extent
    committed: bool
    hash_key: bytes

    @property
    def next_offset(self) -> int:
        return self.extent.last + 1

    def __iter__(self) -> Iterator[RecordBlock]:
        """A key is in one of the blocks, once; blocks come in no particular order. Raises StoreError, BadData."""
        for selection in self.selections():
            yield block_of(self.extent.name, selection)

    def arrow(self, *columns: str) -> Iterator[pa.RecordBatch]:
        """The same as Arrow batches. ``columns`` are some of compactor.consumer.columns.COLUMNS; all of them by default."""
        from compactor.consumer.columns import batch_of, schema_of

        schema = schema_of(columns)
        for selection in self.selections():
            yield batch_of(selection, *self.extent.name, schema)

    def offsets(self) -> Int64s:
        """Of these records, ascending. Takes eight bytes a key."""
        found = [selection.rows.offset[selection.picked] for selection in self.selections()]
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def selections(self) -> Iterator[Selection]:
        """Each is valid until the next one is asked for."""
        cleaner = self.tier.cleaner_for(self.extent.name.topic)
        left = [(0, 1, MAX_OFFSET)]
        while left:
            number, ranges, below = left.pop()
            latest = Latest(number, ranges, max(cleaner.map_budget_bytes, 1 << 16), self.hash_key)
            wanted = WantedRecords(self.committed, cleaner.max_decompressed_batch_bytes, latest, PIECES_AHEAD)
            try:
                for selection in Reader(self.tier, self.extent, wanted).selections():
                    picked = selection.picked[selection.rows.offset[selection.picked] < below]
                    if len(picked):
                        yield replace(selection, picked=picked)
                        below = int(selection.rows.offset[picked[0]])
            except OutOfBudget:
                if ranges >> MOST_HALVINGS:
                    raise
                left += [(2 * number + half, 2 * ranges, below) for half in (0, 1)]


def latest(
    tier: Tier, name: TopicPartition, *, first: int = 0, last: int = MAX_OFFSET, committed: bool = True, hash_key: bytes = b""
) -> LastValues:
    """Of what the tier has now, between these offsets (inclusive). ``committed`` as Kafka's read_committed.

    :param hash_key: what keys are hashed with, for threads that must not ask the tier at once; by default it is asked.
    :raises BadData, StoreError:
    """
    state = tier.open(name).refresh()
    end = last_stable_offset(tier, state) if committed else state.end_offset + 1
    extent = Extent(name, max(first, first_offset(tier, state)), min(last, end - 1), state.live)
    return LastValues(tier, extent, committed, hash_key or tier.reading_key())


def among(selection: Selection, wanted: Int64s) -> Selection:
    """The picked rows whose offset is one of ``wanted``, which ascend."""
    offsets = selection.rows.offset[selection.picked]
    at = np.searchsorted(wanted, offsets)
    found = at < len(wanted)
    found[found] = wanted[at[found]] == offsets[found]
    return replace(selection, picked=selection.picked[found])
