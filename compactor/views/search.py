"""Finding records by key or offset in the segments of a partition, newest first: what `explain` looks with. Reads only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from compactor.bootstrap import Tier
from compactor.cleaner.passes.outcomes import outcomes_backwards
from compactor.cleaner.passes.source import SourceSegment
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, COMMIT, HORIZON, NOT_CONTROL
from compactor.records.rows import Chunk, RowBuffers, Rows, parse

_OUTCOMES = {ABORT: "abort", COMMIT: "commit"}


@dataclass(frozen=True)
class Sighting:
    """One record. ``value_bytes`` -1: a tombstone; ``horizon_ms``: when its batch lets go of tombstones and markers, None for not set yet.

    ``outcome``: of its transaction: commit, abort or open; empty for a record outside of any. ``control``: abort, commit or control
    for a marker, else empty.
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
        return self.value_bytes < 0 and not self.control

    @property
    def counts(self) -> bool:
        """Whether it is the word of somebody about its key: neither a marker nor aborted or undecided."""
        return not self.control and self.key is not None and self.outcome in ("", "commit")


class Searcher:
    """Looks through segments from the log's end to its beginning; transactions are decided by the markers that it has passed."""

    def __init__(self, opened: Tier, name: TopicPartition, on_bytes: Callable[[int], None], purpose: str = "explain") -> None:
        self._opened = opened
        self._name = name
        self._purpose = purpose
        self._limit = opened.cleaner_for(name.topic).max_decompressed_batch_bytes
        self._on_bytes = on_bytes
        self._known: dict[int, int] = {}

    def search(
        self, segments: Sequence[RemoteLogSegmentMetadata], *, key: bytes | None = None, keys: Collection[bytes] = (), offset: int = -1
    ) -> Iterator[Sighting]:
        """Records with that key or one of those, and the one at that offset; latest first. ``segments`` ascend.

        Raises NotFound for an object that is gone, BadData for one that is not what was recorded, OutOfBudget for one that is too large.
        """
        wanted = frozenset(keys) if key is None else frozenset((*keys, key))
        with self._opened.opening(self._name, segments, self._purpose) as reading:
            for ordinal, segment in reversed(list(enumerate(segments))):
                with reading.opened(ordinal, txn_index=False) as source:
                    found = list(self._found(source, segment, self._outcomes(source), wanted, offset))
                yield from reversed(found)
                self._on_bytes(segment.size_bytes)

    def _outcomes(self, source: SourceSegment) -> dict[int, str]:
        """Batch -> outcome of the transaction that it belongs to, for those that belong to one."""
        table = source.table
        kinds = outcomes_backwards(table, self._known)
        data = np.flatnonzero((table.control == NOT_CONTROL) & table.is_transactional)
        return {batch: _OUTCOMES.get(int(kinds[batch]), "open") for batch in data.tolist()}

    def _found(
        self, source: SourceSegment, segment: RemoteLogSegmentMetadata, outcomes: dict[int, str], keys: frozenset[bytes], offset: int
    ) -> Iterator[Sighting]:
        table = source.table
        wanted = table.control == NOT_CONTROL if keys else np.zeros(len(table), np.bool_)
        if segment.start_offset <= offset <= segment.end_offset:
            at = int(np.searchsorted(table.last_offset, offset))
            wanted[at : at + 1] = True
        buffers = RowBuffers()
        for first, last in source.ranges():
            if not wanted[first:last].any():
                continue
            for chunk in source.chunks(first, last, wanted[first:last], self._limit, None):
                rows, first_row = parse(table, chunk, buffers, source.name)
                batch_of = np.repeat(np.arange(chunk.first, chunk.last), np.diff(first_row))
                for row in np.flatnonzero(_matching(chunk, rows, keys) | (rows.offset == offset)).tolist():
                    batch = int(batch_of[row])
                    yield _sighting(source, segment, chunk, rows, row, batch, outcomes.get(batch, ""))


def _matching(chunk: Chunk, rows: Rows, keys: frozenset[bytes]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
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


def _sighting(
    source: SourceSegment, segment: RemoteLogSegmentMetadata, chunk: Chunk, rows: Rows, row: int, batch: int, outcome: str
) -> Sighting:
    table = source.table
    control = int(table.control[batch])
    start, length = int(rows.key_start[row]), int(rows.key_length[row])
    return Sighting(
        offset=int(rows.offset[row]),
        timestamp=int(rows.timestamp[row]),
        key=chunk.buf[start : start + length].tobytes() if length >= 0 else None,
        value_bytes=int(rows.value_length[row]),
        segment=segment,
        producer_id=int(table.producer_id[batch]),
        horizon_ms=int(table.base_timestamp[batch]) if int(table.attributes[batch]) & HORIZON else None,
        outcome=outcome,
        control="" if control == NOT_CONTROL else _OUTCOMES.get(control, "control"),
    )
