"""Pass 1, before anything is announced: which records survive, and which clean segments need not be read at all.

    behind the range   sidecar, else headers          outcomes of transactions are told by markers anywhere behind the data
    dirty              fetched, newest first          each is read once: headers, outcomes known so far, keys
    fold               over segments and stand-ins    the verdict on every batch; what the fold makes due
    clean              sidecar heads, then filters    what must be read is read in pass 2 (on disk: its rows are looked up here, too)

The offset map is a set of keys while ``map_budget_bytes`` allows, rows on local disk otherwise, or from the moment on when an estimate
turns out wrong; with several parts of the keys, one scan a part, where the disk has no room for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from bloom.filter import Hashes
from bloom.runs import due_by_fold
from compactor.cleaner.gate.ahead import GateAhead
from compactor.cleaner.gate.judge import Gate, GateTerms, gate_seed
from compactor.cleaner.gate.table import KeyTable
from compactor.cleaner.keys.buckets import ROW_BYTES, KeyBuckets, passes_needed
from compactor.cleaner.keys.keysets import LEAST_BYTES, KeySet
from compactor.cleaner.keys.spilling import SpillingSurvivors
from compactor.cleaner.keys.survivors import PassOne
from compactor.cleaner.passes.chunks import FinishedChunks
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.outcomes import outcomes_backwards
from compactor.cleaner.passes.portraits import NOTHING, stand_in, verdicts_for
from compactor.cleaner.passes.retention import RoundRules
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts, fold
from compactor.errors import OutOfBudget
from compactor.local.budget import Grant, Overrun, blocks
from compactor.records.batches import ABORT, NOT_CONTROL, BatchTable
from compactor.records.indexes import TXN_ENTRY
from compactor.round.skip import (
    KEY_BYTES,
    CleanVerdicts,
    FilterRecord,
    Look,
    clean_verdicts,
    engine_for,
    horizon_passed,
    keys_expected,
    look_at,
    records_about,
)
from compactor.round.sources import Reading
from compactor.tier.sidecars import Head, Sidecars

MOST_PASSES = 64

GATE_KEY_BYTES = 54
"""What a key takes in the gate's table, which is fuller than it should be beyond."""

LEAST_GATE_SHARE = 8
"""The gate gets at least this part of the map budget, on top where the keys need all of it."""

PLANNED = "the plan says so"


@dataclass(frozen=True)
class Range:
    """What a round is about. Offsets; [first_dirty, end) is empty where only horizons are due."""

    first_dirty: int
    end: int
    rules: RoundRules


@dataclass(frozen=True)
class Means:
    """What pass 1 may use. ``engine``: auto, memory or partitioned; bytes. ``gate``: it is looked at by the gate, within the map budget."""

    engine: str
    map_budget_bytes: int
    hash_key: bytes
    lanes: Lanes
    gate: bool = True
    check: Callable[[], object] = lambda: None


@dataclass
class Found:
    """What pass 1 came to. Lists by ordinal: a segment that was not opened has a stand-in there, or nothing."""

    sources: list[SourceSegment]
    verdicts: list[Verdicts]
    survivors: SpillingSurvivors
    finished: FinishedChunks
    opened: set[int]
    engine: str = "memory"
    passes: int = 1
    clean: CleanVerdicts = field(default_factory=CleanVerdicts)
    gate: Gate | None = None

    @contextmanager
    def source(self, reading: Reading, ordinal: int, grant: Grant | None) -> Iterator[tuple[SourceSegment, Verdicts]]:
        """A segment with its bytes and the verdicts on its batches. Raises BadData, StoreError, OutOfBudget."""
        if ordinal in self.opened:
            with reading.mapped(self.sources[ordinal], grant):
                yield self.sources[ordinal], self.verdicts[ordinal]
            return
        with reading.opened(ordinal, grant) as source:
            self.verdicts[ordinal] = verdicts_for(source, self.sources[ordinal], self.verdicts[ordinal])
            self.sources[ordinal] = source
            self.opened.add(ordinal)
            if self.gate is not None:
                self.gate.refold(self.sources)
            yield source, self.verdicts[ordinal]


class Scout:
    """One pass 1. Holds no room on the disk when it is done; what it has read stays staged while nobody needs the room.

    :param sidecars: None: there are none to be used (``bloom = false``).
    :param only: ids of the clean segments that will be read, where that is settled (a resumed plan); None: to be found out.
    """

    def __init__(
        self,
        reading: Reading,
        extent: Range,
        means: Means,
        sidecars: Sidecars | None,
        record: FilterRecord,
        only: frozenset[str] | None = None,
    ) -> None:
        self._reading = reading
        self._range = extent
        self._means = means
        self._sidecars = sidecars
        self._record = record
        self._only = only
        live = reading.live
        self._dirty = [n for n, s in enumerate(live) if s.end_offset >= extent.first_dirty and s.start_offset < extent.end]
        self._clean = [n for n, s in enumerate(live) if s.end_offset < extent.first_dirty and s.start_offset < extent.end]
        self._behind = [n for n, s in enumerate(live) if s.start_offset >= extent.end]
        ids = [segment.id for segment in live]
        self._heads = sidecars.heads(ids) if sidecars else dict.fromkeys(ids, Head(None, "bloom = false", 0))
        self._bytes = sum(head.bytes for head in self._heads.values())
        self._opened: set[int] = set()
        self._folded = False
        self._gate: GateAhead | None = None
        self._grant: Grant | None = None
        self._sources = [self._stand_in(ordinal) for ordinal in range(len(live))]
        self._verdicts = [_none() for _ in live]

    @property
    def keys_expected(self) -> int:
        """Distinct keys of the dirty range, about."""
        return keys_expected([self._head(n) for n in self._dirty], [records_about(self._reading.live[n]) for n in self._dirty])

    def run(self) -> Found:
        """Raises BadData, StoreError, OutOfBudget, GateFailed, and what ``check`` raises."""
        means, expected = self._means, self.keys_expected
        if engine_for(means.engine, expected, means.map_budget_bytes) == "memory":
            try:
                return self._in_memory(expected)
            except Overrun:
                pass  # the keys do not fit, and just now there was no room on the disk to go over to
        rows = sum(records_about(self._reading.live[n]) for n in self._dirty)
        parts = self._parts(rows)
        while True:
            try:
                return self._on_disk(rows, parts)
            except Overrun as overrun:
                if parts >= MOST_PASSES:
                    raise OutOfBudget(overrun.message, hint=overrun.hint) from overrun
                parts = min(2 * parts, MOST_PASSES)

    # ---- the engines --------------------------------------------------------------------------------------------------------

    def _in_memory(self, expected: int) -> Found:
        """Goes over to the disk in the middle where the keys turn out not to fit. Raises Overrun where the disk has no room at once."""
        means, staging = self._means, self._reading.staging
        rows = sum(records_about(self._reading.live[n]) for n in self._dirty)
        spare = max(0, means.map_budget_bytes - expected * KEY_BYTES * 5 // 4 - LEAST_BYTES)
        most = max(spare, means.map_budget_bytes // LEAST_GATE_SHARE) if means.gate else 0
        gate_share = min(most, expected * GATE_KEY_BYTES + LEAST_BYTES)
        finished = FinishedChunks(max(0, spare - gate_share))

        def spill(part: int, parts: int) -> KeyBuckets:
            if means.engine == "memory":
                raise OutOfBudget(
                    f"the offset map is full: a map budget of {means.map_budget_bytes} bytes holds about "
                    f"{means.map_budget_bytes // KEY_BYTES} keys",
                    hint='Raise map_budget_bytes, or set map_engine = "auto"',
                )
            # From here on this thread holds room on the disk, and must not wait for more.
            self._grant = Grant(staging.budget, staging.account, 0)
            return KeyBuckets(staging.folder / "buckets", _Disk(self._grant), map_budget_bytes=means.map_budget_bytes, expected_rows=rows)

        budget = means.map_budget_bytes - (0 if means.engine == "memory" else spare)
        survivors = SpillingSurvivors(self._pass_one(finished, gate_share), KeySet(budget, expected_keys=expected), spill)
        try:
            self._scan_dirty(survivors)
            self._fold()
            clean = _Clean(self._looks(self._keys_on_disk(rows) if survivors.on_disk else survivors.keys))
            self._look_up(clean, survivors)
            survivors.finish()
        finally:
            survivors.close()
            if self._grant is not None:
                self._grant.release()
                self._grant = None
        return self._found(survivors, finished, clean, 1)

    def _keys_on_disk(self, rows: int) -> int:
        """Rows on the disk are not told apart before ``finish``, and ``rows`` is an estimate.

        Without a key every clean segment may be skipped, so 0 is said only where nothing was scanned.
        """
        return max(1, rows) if self._dirty else 0

    def _parts(self, rows: int) -> int:
        """How many scans, so that a part's rows and the segment that is read fit the budget."""
        budget, largest = self._reading.staging.budget.total, self._largest()
        parts = passes_needed(rows, budget - largest)
        if parts > MOST_PASSES or budget <= largest:
            need = largest + blocks(rows * ROW_BYTES * 11 // (10 * MOST_PASSES))
            raise OutOfBudget(
                f"the keys of {rows} records need {rows * ROW_BYTES} bytes of local disk in at most {MOST_PASSES} parts, next to a "
                f"segment of {largest} bytes; the disk budget is {budget}",
                hint=f"Set disk_budget_bytes to at least {need}, or map_budget_bytes to {rows * KEY_BYTES}. Nothing was changed",
            )
        return parts

    def _on_disk(self, rows: int, parts: int) -> Found:
        means, staging = self._means, self._reading.staging
        finished = FinishedChunks(0)
        gate_share = max(0, min(means.map_budget_bytes // 2, means.map_budget_bytes - LEAST_BYTES)) if means.gate else 0
        map_budget = means.map_budget_bytes - gate_share
        size = min(self._largest() + blocks(rows * ROW_BYTES * 11 // (10 * parts)), staging.budget.total)
        with staging.room(size, f"the offset map of {self._reading.partition}") as grant:
            disk, self._grant = _Disk(grant), grant

            def open_buckets(part: int, parts: int) -> KeyBuckets:
                path = staging.folder / "buckets"
                return KeyBuckets(path, disk, map_budget_bytes=map_budget, expected_rows=rows, part=part, parts=parts)

            survivors = SpillingSurvivors(self._pass_one(finished, gate_share), None, open_buckets, parts)
            clean: _Clean | None = None
            try:
                for _ in range(parts):
                    self._scan_dirty(survivors)
                    self._fold()
                    clean = clean or _Clean(self._looks(self._keys_on_disk(rows)))
                    self._look_up(clean, survivors)
                    survivors.finish()
            finally:
                survivors.close()
                self._grant = None
        return self._found(survivors, finished, clean or _Clean({}), parts)

    def _found(self, survivors: SpillingSurvivors, finished: FinishedChunks, clean: _Clean, passes: int) -> Found:
        live = self._reading.live
        if self._gate is not None:
            self._gate.gate.refold(self._sources)  # some were opened since
        return Found(
            self._sources,
            self._verdicts,
            survivors,
            finished,
            self._opened,
            engine="partitioned" if survivors.spilled else "memory",
            passes=passes,
            clean=clean_verdicts(
                {live[n].id: look for n, look in clean.looks.items()},
                {live[n].id: why for n, why in clean.met.items()},
                {live[n].id: why for n in self._clean if (why := self._due(n))},
                asked=(live[n].id for n in clean.asked),
                keys=survivors.keys,
                sidecar_bytes=self._bytes,
            ),
            gate=self._gate.gate if self._gate else None,
        )

    def _pass_one(self, finished: FinishedChunks, gate_share: int) -> PassOne:
        """:param gate_share: bytes for the gate's keys; it has a hash key of its own."""
        extent, limit, hash_key = self._range, self._reading.inflate_limit, self._means.hash_key
        self._gate = None
        if self._means.gate:
            seed = gate_seed(extent.first_dirty, extent.end, extent.rules.now_ms)
            keys = KeyTable(gate_share, sum(records_about(self._reading.live[n]) for n in self._dirty), seed)
            self._gate = GateAhead(GateTerms(extent.rules, extent.first_dirty, hash_key, limit), keys)
        sources = self._sources
        return PassOne(sources, self._verdicts, extent.first_dirty, extent.end, hash_key, limit, finished, extent.rules, self._gate)

    # ---- headers and dirty segments -----------------------------------------------------------------------------------------

    def _scan_dirty(self, survivors: SpillingSurvivors) -> None:
        """Newest first; what lies behind the range is asked for the outcomes of transactions only."""
        outcomes: dict[int, int] = {}
        for ordinal in reversed(self._behind):
            if self._head(ordinal).sidecar is None:
                self._open(ordinal)
            outcomes_backwards(self._sources[ordinal].table, outcomes)
            if survivors.one.witness is not None and self._gate is not None:
                self._gate.behind(self._sources[ordinal])
        coming = list(self._dirty)
        while coming:
            ordinal = coming.pop()
            with self._bytes_of(ordinal) as source:
                if coming:
                    self._reading.staging.fetch_ahead(self._reading.log(coming[-1]))
                self._means.check()
                aborted = outcomes_backwards(source.table, outcomes) == ABORT
                if not self._folded:
                    self._verdicts[ordinal] = Verdicts(aborted, aborted, np.zeros(len(aborted), np.bool_), np.empty(0, TXN_ENTRY))
                # Of markers nothing but the outcome is known yet: chunks that hold some are not cleaned ahead.
                ahead = not np.any((source.table.control != NOT_CONTROL) & (source.table.codec > 0))
                survivors.scan(source, survivors.one.wanted(source), self._means.lanes, ahead=ahead)

    def _fold(self) -> None:
        """The verdict on every batch, once: of clean segments without a sidecar the headers are needed for it."""
        if not self._folded:
            for ordinal in self._clean:
                if self._head(ordinal).sidecar is None:
                    self._open(ordinal)
                    self._means.check()
            self._verdicts[:] = fold(self._sources)
            self._folded = True
        if self._gate is not None:
            self._gate.settle(self._sources)

    @contextmanager
    def _bytes_of(self, ordinal: int) -> Iterator[SourceSegment]:
        """A segment with its headers, and its bytes while the block runs; with verdicts once they are folded."""
        if ordinal in self._opened:
            with self._reading.mapped(self._sources[ordinal], self._grant):
                yield self._sources[ordinal]
            return
        with self._reading.opened(ordinal, self._grant) as source:
            if self._folded:
                self._verdicts[ordinal] = verdicts_for(source, self._sources[ordinal], self._verdicts[ordinal])
            self._sources[ordinal] = source
            self._opened.add(ordinal)
            yield source

    def _open(self, ordinal: int) -> None:
        if ordinal not in self._opened:
            with self._bytes_of(ordinal):
                pass

    def _stand_in(self, ordinal: int) -> SourceSegment:
        segment, sidecar = self._reading.live[ordinal], self._head(ordinal).sidecar
        place = (ordinal, self._reading.name(ordinal), segment.start_offset, segment.end_offset + 1, segment.mtime_ms)
        return stand_in(*place, sidecar) if sidecar else SourceSegment(*place, NOTHING, BatchTable.empty(0))

    # ---- clean segments -----------------------------------------------------------------------------------------------------

    def _looks(self, keys: int) -> dict[int, Look]:
        """What the sidecars of clean segments say. ``keys``: of the dirty range, or as many records as it has."""
        if self._only is not None:
            return {n: Look(None, must=PLANNED) for n in self._clean if self._reading.live[n].id in self._only}
        now_ms = self._range.rules.now_ms
        found = {}
        for ordinal in self._clean:
            head, segment = self._head(ordinal), self._reading.live[ordinal]
            due = self._due(ordinal) or horizon_passed(segment, now_ms)
            found[ordinal] = look_at(head, due, keys=keys, record=self._record, now_ms=now_ms)
        return found

    def _due(self, ordinal: int) -> str:
        """What the fold finds to do in a segment: the same whether it was opened or something stands in for it."""
        verdicts = self._verdicts[ordinal]
        return due_by_fold(self._sources[ordinal].table, verdicts.aborted, verdicts.discardable, self._range.rules.now_ms)

    def _look_up(self, clean: _Clean, survivors: SpillingSurvivors) -> None:
        """Asks filters about this part's keys; on disk the rows of segments that may have one of them are read now."""
        on_disk = survivors.on_disk
        asked = [n for n, look in clean.looks.items() if look.askable and not look.may and (on_disk or not look.must)]
        met = self._ask(asked, survivors)
        clean.asked.update(n for n in asked if not clean.looks[n].must)
        clean.met.update((n, why) for n, why in met.items() if not clean.looks[n].must)
        if not on_disk:
            return
        straddling = [n for n in self._dirty if self._reading.live[n].start_offset < self._range.first_dirty]
        below = [n for n, look in clean.looks.items() if n in met or (look.must and not look.askable)]
        for ordinal in (*below, *straddling):
            with self._bytes_of(ordinal) as source:
                self._means.check()
                survivors.scan_clean(source, survivors.one.below(source), self._means.lanes)

    def _ask(self, ordinals: Sequence[int], survivors: SpillingSurvivors) -> dict[int, str]:
        """Those whose filter meets a key, or cannot be asked, with the reason."""
        if self._sidecars is None:
            return {}

        def keys() -> Iterator[Hashes]:
            self._means.check()
            return survivors.dirty_keys()

        met, size = self._sidecars.meeting([self._reading.live[n].id for n in ordinals], keys)
        self._bytes += size
        return {n: met[self._reading.live[n].id] for n in ordinals if self._reading.live[n].id in met}

    def _head(self, ordinal: int) -> Head:
        return self._heads[self._reading.live[ordinal].id]

    def _largest(self) -> int:
        """Room for any segment that may have to be read while rows lie on the disk."""
        return max((blocks(segment.files["log"].size) for segment in self._reading.live), default=0)


@dataclass
class _Clean:
    """Of clean segments by ordinal: what their sidecars say, whose filters were asked alone, and which of those met a key."""

    looks: dict[int, Look]
    asked: set[int] = field(default_factory=set)
    met: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Disk:
    """KeyBuckets' part of a grant."""

    grant: Grant

    def reserve(self, nbytes: int) -> None:
        self.grant.take(nbytes)

    def release(self, nbytes: int) -> None:
        self.grant.give(nbytes)


def _none() -> Verdicts:
    nothing = np.zeros(0, np.bool_)
    return Verdicts(nothing, nothing, nothing, np.empty(0, TXN_ENTRY))
