"""The gate beside a pass 1 that reads the dirty range from its end, once: before the fold of all transactions is known.

GateAhead(terms, keys)    before the first segment
behind(source)            what lies behind the range, newest first: its markers tell outcomes
begin, look, note         each dirty segment, newest first (``Witness``); what it needs of the fold is told by what lies behind it
settle(sources)           the fold over everything, which must say the same; then ``check`` as ever
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compactor.cleaner.gate.batches import Fates, Flags, resolve
from compactor.cleaner.gate.judge import Gate, GateFailed, GateTerms, KeysSeen
from compactor.cleaner.gate.ranges import LastRecords
from compactor.cleaner.passes.lanes import Lane
from compactor.cleaner.passes.source import SourceSegment
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, TRANSACTIONAL, BatchTable
from compactor.records.rows import Chunk


class GateAhead:
    """Witness of pass 1. ``gate``: what ``check`` is asked of, once the fold over everything is settled."""

    def __init__(self, terms: GateTerms, keys: LastRecords) -> None:
        self.gate = Gate(terms, keys)
        self._ahead: dict[int, tuple[SourceSegment, Flags]] = {}
        self._outcomes: dict[int, int] = {}
        """Each producer's next marker behind what was read so far."""
        self._settled = False

    def behind(self, source: SourceSegment) -> None:
        if not self._settled:
            self._aborted(source.table)

    def begin(self, source: SourceSegment) -> None:
        if not self._settled and source.ordinal not in self._ahead:
            none, aborted = np.zeros(len(source.table), np.bool_), self._aborted(source.table)
            self._ahead[source.ordinal] = source, aborted
            self.gate.admit(source, Fates(aborted, none, np.full(len(none), -1, np.int64)))
        self.gate.begin(source)

    def read(self, source: SourceSegment) -> None:
        """Where the cleaner's pass 1 does not show it."""
        self.begin(source)
        self.gate.read(source)

    @property
    def on_disk(self) -> bool:
        return self.gate.on_disk

    @property
    def sees_again(self) -> bool:
        return self.gate.sees_again

    def look(self, lane: Lane, source: SourceSegment, chunk: Chunk, *, below: bool = False) -> KeysSeen:
        return self.gate.look(lane, source, chunk, below=below)

    def note(self, source: SourceSegment, looked: KeysSeen) -> None:
        self.gate.note(source, looked)

    def expect(self, lane: Lane, source: SourceSegment, chunk: Chunk) -> None:
        self.gate.expect(lane, source, chunk)

    def settle(self, sources: Sequence[SourceSegment]) -> None:
        """Raises GateFailed where the fold says something else. The first call counts.

        :param sources: all live segments, or what stands in for their transactions.
        """
        if self._settled:
            return
        self.gate.refold(sources)
        for source, aborted in self._ahead.values():
            if not np.array_equal(aborted, self.gate.aborted(source)):
                raise GateFailed("read from its end and from its beginning the log has other aborted batches", segment=source.name)
        self._settled = True

    def _aborted(self, table: BatchTable) -> Flags:
        """Data of aborted transactions in the segment before all those that were asked about so far."""
        flags = np.zeros(len(table), np.bool_)
        some = np.flatnonzero((table.control != NOT_CONTROL) | ((table.attributes & np.int16(TRANSACTIONAL)) != 0))
        known = list(self._outcomes)
        producer = np.concatenate((table.producer_id[some].astype(np.int64), np.array(known, np.int64)))
        kind = np.concatenate((table.control[some].astype(np.int64), np.array([self._outcomes[each] for each in known], np.int64)))
        base = np.concatenate((table.base_offset[some].astype(np.int64), np.zeros(len(known), np.int64)))
        ids, places = np.unique(producer, return_inverse=True)
        # As if the next marker of each producer stood right behind the segment.
        flags[some] = resolve(kind, places.astype(np.int64), base, np.full(len(ids), -1, np.int64))[0][: len(some)]
        markers = some[(table.control[some] == ABORT) | (table.control[some] == COMMIT)]
        for at in markers[::-1].tolist():
            self._outcomes[int(table.producer_id[at])] = int(table.control[at])
        return flags
