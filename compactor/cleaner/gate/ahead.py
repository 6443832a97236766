"""The gate beside a pass 1 that reads the dirty range from its end, once: before the fold of all transactions is known.

GateAhead(rules)          before the first segment
behind(source)            what lies behind the range, newest first: its markers tell outcomes
begin, look, note         each dirty segment, newest first (``Witness``); what it needs of the fold is told by what lies behind it
settle(sources)           the fold over everything, which must say the same; then ``check`` as ever
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compactor.cleaner.gate.batches import Fates, Flags, resolve
from compactor.cleaner.gate.judge import Gate, GateFailed
from compactor.cleaner.gate.table import KeyTable
from compactor.cleaner.passes.retention import RoundRules
from compactor.cleaner.passes.source import SourceSegment
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL, TRANSACTIONAL, BatchTable


class GateAhead(Gate):
    def __init__(
        self, rules: RoundRules, *, first_dirty: int, hash_key: bytes, seed: int, budget_bytes: int, inflate_limit: int, records: int
    ) -> None:
        """``records``: about how many there are in the dirty range; the others as for Gate."""
        super().__init__(
            (), rules, first_dirty=first_dirty, hash_key=hash_key, seed=seed, budget_bytes=budget_bytes, inflate_limit=inflate_limit
        )
        self._table = KeyTable(budget_bytes, records, seed)
        self._outcomes: dict[int, int] = {}
        """Each producer's next marker behind what was read so far."""
        self._settled = False

    def behind(self, source: SourceSegment) -> None:
        self._aborted(source.table)

    def begin(self, source: SourceSegment) -> None:
        if not self._settled and source.ordinal not in self._wanted:
            none = np.zeros(len(source.table), np.bool_)
            self._fates[source.ordinal] = Fates(self._aborted(source.table), none, np.full(len(none), -1, np.int64))
            self._wanted[source.ordinal] = self._may_be_last(source)
            self._unread[source.ordinal] = int(np.count_nonzero(self._wanted[source.ordinal]))
        super().begin(source)

    def settle(self, sources: Sequence[SourceSegment]) -> None:
        """Raises GateFailed where the fold says something else. The first call counts.

        :param sources: all live segments, or what stands in for their transactions.
        """
        if self._settled:
            return
        before = self._fates
        self.refold(sources)
        self.dirty = tuple(source for source in sources if source.ordinal in self._wanted)
        for source in self.dirty:
            if not np.array_equal(before[source.ordinal].aborted, self._fates[source.ordinal].aborted):
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
