"""Transactions that are open where a tier ends of which nobody has written that down: no producer snapshots, no transaction indexes.

The batches say it. They are read once: what was found is remembered with the tier, and goes on with the segments that come.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compactor.bootstrap import Tier
from compactor.consumer.pieces import Gone, SegmentReader
from compactor.control.state import PartitionState
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, COMMIT, MAX_OFFSET, NOT_CONTROL, BatchTable
from compactor.tier.layouts.pinterest.listing import ListedTier, OpenTransactions


def first_open_offset(tier: Tier, listed: ListedTier, state: PartitionState) -> int:
    """Of the oldest transaction that is open at the tier's end; the offset behind that end where there is none. Raises BadData, StoreError.

    A transaction that is open for longer than ``producer_id_expiration_ms`` counts as abandoned, as in a round: nothing of a segment that
    was uploaded so long before the newest one is read for this.
    """
    cleaner = tier.cleaner_for(state.topic)
    recent = _recent(state.live, cleaner.producer_id_expiration_ms)
    if not recent:
        return state.end_offset + 1
    known = listed.transactions.get(state.name)
    place = -1 if known is None else next((at for at, segment in enumerate(recent) if known.is_through(segment)), -1)
    opened = dict(known.first_offsets) if known is not None and place >= 0 else {}
    for segment in recent[place + 1 :]:
        reader = SegmentReader(tier.ports.layout, state.name, segment, cleaner.max_decompressed_batch_bytes)
        try:
            for piece in reader.pieces():
                go_on(opened, piece.source.table, segment.end_offset)
        except Gone:
            if segment is recent[-1]:
                raise
            opened.clear()  # it has expired meanwhile, and so has everything before it
    opened = {producer: offset for producer, offset in opened.items() if offset >= recent[0].start_offset}
    listed.transactions[state.name] = OpenTransactions(recent[-1].start_offset, recent[-1].size_bytes, opened)
    return min(opened.values(), default=state.end_offset + 1)


def _recent(live: Sequence[RemoteLogSegmentMetadata], within_ms: int) -> Sequence[RemoteLogSegmentMetadata]:
    """From the first one on that was uploaded no longer than that before the newest."""
    if not live:
        return ()
    begin = next(at for at, segment in enumerate(live) if segment.mtime_ms >= live[-1].mtime_ms - within_ms)
    return live[begin:]


def go_on(opened: dict[int, int], table: BatchTable, last: int) -> None:
    """Brings ``opened`` (producer -> first offset of its open transaction) behind these batches, as far as offset ``last``."""
    inside = (table.producer_id >= 0) & (table.last_offset <= last)
    ends = ((table.control == ABORT) | (table.control == COMMIT)) & inside
    data = (table.control == NOT_CONTROL) & table.is_transactional & inside
    at = np.flatnonzero(ends | data)
    producers, whose = np.unique(table.producer_id[at], return_inverse=True)
    places, is_end = np.arange(len(at)), ends[at]
    ended = np.full(len(producers), -1, np.int64)
    np.maximum.at(ended, whose[is_end], places[is_end])
    for index in np.flatnonzero(ended >= 0).tolist():
        opened.pop(int(producers[index]), None)
    still = ~is_end & (places > ended[whose])
    begun = np.full(len(producers), MAX_OFFSET, np.int64)
    np.minimum.at(begun, whose[still], table.base_offset[at][still])
    for index in np.flatnonzero(begun < MAX_OFFSET).tolist():
        opened.setdefault(int(producers[index]), int(begun[index]))
