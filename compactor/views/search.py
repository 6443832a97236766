"""Search for records by key or offset in a partition's segments, newest first. Used by `explain` and erasure. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from compactor.access.rounds import open_reader_of_given_segments
from compactor.access.tier import Tier
from compactor.cleaner.passes.outcomes import find_txn_outcomes_and_update_next_outcomes
from compactor.cleaner.passes.source import SourceSegment
from compactor.kernels.common import Flags
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, COMMIT, HORIZON, NOT_CONTROL
from compactor.records.rows import BatchChunk, RecordRowBuffers, RecordRows, parse_records

_OUTCOMES = {ABORT: "abort", COMMIT: "commit"}


@dataclass(frozen=True)
class FoundRecord:
    """A record that a search has found.

    value_bytes: size of its value; -1 for a null value.
    horizon_ms: delete horizon of its batch in milliseconds; None if not set yet.
    outcome: outcome of its transaction (commit, abort or open); empty outside a transaction.
    control: abort, commit or control for a control record, else empty.
    """

    offset: int
    timestamp: int
    key: bytes | None
    value_bytes: int
    segment: RemoteLogSegmentMetadata
    producer_id: int
    horizon_ms: int | None
    outcome: str
    control: str

    @property
    def is_tombstone(self) -> bool:
        """Return whether the record has a null value and is not a control record."""
        return self.value_bytes < 0 and not self.control

    @property
    def sets_value_of_key(self) -> bool:
        """Return whether the record sets the value of its key: it has a key, is not a control record, and its transaction, if any, is
        committed.
        """
        return not self.control and self.key is not None and self.outcome in ("", "commit")


class RecordSearch:
    """Search for records in a partition's segments, from the log's end to its beginning.

    The outcome of a transaction is known from its marker, a control record. If the search has not read the marker, the transaction counts
    as open.

    :param on_bytes: receives the size of each segment that was read.
    :param staging_purpose: word by which the staged files of this search are named.
    """

    def __init__(self, tier: Tier, partition: TopicPartition, on_bytes: Callable[[int], None], staging_purpose: str = "explain") -> None:
        self._tier = tier
        self._name = partition
        self._purpose = staging_purpose
        self._limit = tier.cleaner_settings_for_topic(partition.topic).max_decompressed_batch_bytes
        self._on_bytes = on_bytes
        self._known: dict[int, int] = {}

    def find_records_by_key_or_offset(
        self, segments: Sequence[RemoteLogSegmentMetadata], *, key: bytes | None = None, keys: Collection[bytes] = (), offset: int = -1
    ) -> Iterator[FoundRecord]:
        """Yield the records with one of the keys (``key`` and ``keys``) and the record at ``offset``, latest first.

        :param segments: in ascending order.
        :param offset: -1 to search for keys only.
        :raises NotFound: if an object is gone.
        :raises BadData: if an object differs from what was recorded.
        :raises OutOfBudget: if an object is too large.
        """
        wanted = frozenset(keys) if key is None else frozenset((*keys, key))
        with open_reader_of_given_segments(self._tier, self._name, segments, self._purpose) as reading:
            for ordinal, segment in reversed(list(enumerate(segments))):
                with reading.open_segment(ordinal, include_txn_index=False) as source:
                    found = list(
                        self._search_segment_by_key_or_offset(
                            source, segment, self._transaction_outcome_by_batch_number(source), wanted, offset
                        )
                    )
                yield from reversed(found)
                self._on_bytes(segment.size_bytes)

    def _transaction_outcome_by_batch_number(self, source: SourceSegment) -> dict[int, str]:
        """Return the transaction outcome (commit, abort or open) of each transactional data batch, by number of the batch in the
        segment.
        """
        table = source.table
        kinds = find_txn_outcomes_and_update_next_outcomes(table, self._known)
        data = np.flatnonzero((table.control == NOT_CONTROL) & table.transactional_flags)
        return {batch: _OUTCOMES.get(int(kinds[batch]), "open") for batch in data.tolist()}

    def _search_segment_by_key_or_offset(
        self,
        source: SourceSegment,
        segment: RemoteLogSegmentMetadata,
        outcome_by_batch: dict[int, str],
        keys: frozenset[bytes],
        offset: int,
    ) -> Iterator[FoundRecord]:
        """Yield a segment's records with one of the keys and the record at ``offset``, in log order.

        :param outcome_by_batch: transaction outcome by batch number.
        """
        table = source.table
        wanted = table.control == NOT_CONTROL if keys else np.zeros(len(table), np.bool_)
        if segment.start_offset <= offset <= segment.end_offset:
            at = int(np.searchsorted(table.last_offset, offset))
            wanted[at : at + 1] = True
        buffers = RecordRowBuffers()
        for first, last in source.split_batches_by_magic_and_compression():
            if not wanted[first:last].any():
                continue
            for chunk in source.read_chunks(first, last, wanted[first:last], self._limit, None):
                rows, first_row = parse_records(table, chunk, buffers, source.name)
                batch_of = np.repeat(np.arange(chunk.first, chunk.last), np.diff(first_row))
                for row in np.flatnonzero(_flag_rows_with_keys(chunk, rows, keys) | (rows.offset == offset)).tolist():
                    batch = int(batch_of[row])
                    yield _found_record_of_row(source, segment, chunk, rows, row, batch, outcome_by_batch.get(batch, ""))


def _flag_rows_with_keys(chunk: BatchChunk, rows: RecordRows, keys: frozenset[bytes]) -> Flags:
    """Return a flag for each row of a chunk: whether its key is one of these."""
    matches = np.zeros(len(rows), np.bool_)
    for length in {len(key) for key in keys}:
        same = np.flatnonzero(rows.key_length == length)
        found = chunk.buf[rows.key_start[same][:, None] + np.arange(length)]
        wanted = [key for key in keys if len(key) == length]
        if len(wanted) == 1:
            matches[same] = np.all(found == np.frombuffer(wanted[0], np.uint8), axis=1)
        else:
            data = found.tobytes()
            matches[same] = [data[at : at + length] in keys for at in range(0, len(data), length)]
    return matches


def _found_record_of_row(
    source: SourceSegment,
    segment: RemoteLogSegmentMetadata,
    chunk: BatchChunk,
    rows: RecordRows,
    row_index: int,
    batch_number: int,
    transaction_outcome: str,
) -> FoundRecord:
    """Return the record in one row of a chunk.

    :param batch_number: number of the row's batch in the segment.
    :param transaction_outcome: outcome of the record's transaction; empty outside a transaction.
    """
    table = source.table
    control = int(table.control[batch_number])
    start, length = int(rows.key_start[row_index]), int(rows.key_length[row_index])
    return FoundRecord(
        offset=int(rows.offset[row_index]),
        timestamp=int(rows.timestamp[row_index]),
        key=chunk.buf[start : start + length].tobytes() if length >= 0 else None,
        value_bytes=int(rows.value_length[row_index]),
        segment=segment,
        producer_id=int(table.producer_id[batch_number]),
        horizon_ms=int(table.base_timestamp[batch_number]) if int(table.attributes[batch_number]) & HORIZON else None,
        outcome=transaction_outcome,
        control="" if control == NOT_CONTROL else _OUTCOMES.get(control, "control"),
    )
