"""Transactions that are open at the end of a listed tier, whose segments are not described by metadata."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compactor.access.tier import Tier
from compactor.constants import MAX_OFFSET
from compactor.consumer.pieces import SegmentGone, SegmentReader
from compactor.control.state import PartitionState
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, BatchTable
from compactor.tier.layouts.pinterest.listing import ListedTier, OpenTransactionsAtSegmentEnd


def first_open_transaction_offset_or_end(tier: Tier, listed: ListedTier, state: PartitionState) -> int:
    """Return the first offset of the oldest transaction that is open at the end of a partition in a listed tier (another program uploads
    its segments), or the end offset (exclusive) if none is open.

    Segments that were uploaded more than ``producer_id_expiration_ms`` before the newest one are not read: a transaction that began there
    counts as abandoned. Raises BadData, StoreError.
    """
    cleaner = tier.cleaner_settings_for_topic(state.topic)
    recent = _segments_uploaded_within_ms_of_newest(state.live, cleaner.producer_id_expiration_ms)
    if not recent:
        return state.end_offset + 1
    known = listed.transactions.get(state.topic_partition)
    place = (
        -1 if known is None else next((at for at, segment in enumerate(recent) if known.is_transaction_state_of_segment_end(segment)), -1)
    )
    opened = dict(known.first_offsets) if known is not None and place >= 0 else {}
    for segment in recent[place + 1 :]:
        reader = SegmentReader(tier.ports.layout, state.topic_partition, segment, cleaner.max_decompressed_batch_bytes)
        try:
            for piece in reader.read_pieces():
                update_open_transactions_with_batches(opened, piece.source.table, segment.end_offset)
        except SegmentGone:
            if segment is recent[-1]:
                raise
            opened.clear()  # it has expired meanwhile, and so has everything before it
    opened = {producer: offset for producer, offset in opened.items() if offset >= recent[0].start_offset}
    listed.transactions[state.topic_partition] = OpenTransactionsAtSegmentEnd(recent[-1].start_offset, recent[-1].size_bytes, opened)
    return min(opened.values(), default=state.end_offset + 1)


def _segments_uploaded_within_ms_of_newest(
    live_segments: Sequence[RemoteLogSegmentMetadata], within_ms: int
) -> Sequence[RemoteLogSegmentMetadata]:
    """Return the first segment that was uploaded at most ``within_ms`` milliseconds before the last one, and all segments after it.
    ``live_segments`` are in offset order.
    """
    if not live_segments:
        return ()
    begin = next(at for at, segment in enumerate(live_segments) if segment.mtime_ms >= live_segments[-1].mtime_ms - within_ms)
    return live_segments[begin:]


def update_open_transactions_with_batches(first_offset_by_producer: dict[int, int], table: BatchTable, last_offset: int) -> None:
    """Update the table of open transactions with the batches up to ``last_offset`` (inclusive).

    :param first_offset_by_producer: first offset of the open transaction of each producer id; entries are added and removed.
    """
    inside = (table.producer_id >= 0) & (table.last_offset <= last_offset)
    ends = ((table.control == ABORT) | (table.control == COMMIT)) & inside
    data = (table.control == NOT_CONTROL) & table.transactional_flags & inside
    at = np.flatnonzero(ends | data)
    producers, whose = np.unique(table.producer_id[at], return_inverse=True)
    places, is_end = np.arange(len(at)), ends[at]
    ended = np.full(len(producers), -1, np.int64)
    np.maximum.at(ended, whose[is_end], places[is_end])
    for index in np.flatnonzero(ended >= 0).tolist():
        first_offset_by_producer.pop(int(producers[index]), None)
    still = ~is_end & (places > ended[whose])
    begun = np.full(len(producers), MAX_OFFSET, np.int64)
    np.minimum.at(begun, whose[still], table.base_offset[at][still])
    for index in np.flatnonzero(begun < MAX_OFFSET).tolist():
        first_offset_by_producer.setdefault(int(producers[index]), int(begun[index]))
