"""Pass 1, before anything is announced: which records survive, and which clean segments need not be read at all.

    behind the range   sidecar, else headers          outcomes of transactions are told by markers anywhere behind the data
    dirty              fetched, newest first          each is read once: headers, outcomes known so far, keys
    fold               over segments and stand-ins    the verdict on every batch; what the fold makes due
    clean              sidecar heads, then filters    what must be read is read in pass 2 (on disk: its rows are looked up here, too)
                       key directories                where one says so, a part of it is enough (splice.py), or nothing

The offset map is a set of keys while ``map_budget_bytes`` allows, rows on local disk otherwise, or from the moment on when an estimate
turns out wrong; with several parts of the keys, one scan a part, where the disk has no room for all rows. The gate's keys are kept in
the same way, within memory of their own; where they are on the disk, it is shown everything in pass 1 that the round will rewrite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from bloom.directory import distinct_pieces
from bloom.filter import Hashes
from bloom.producer_runs import due_by_fold
from compactor.cleaner.gate.ahead import GateAhead
from compactor.cleaner.gate.judge import Gate, GateTerms
from compactor.cleaner.gate.ranges import LastRecords
from compactor.cleaner.gate.spool import RowSpool
from compactor.cleaner.gate.table import KEY_BYTES as GATE_KEY_BYTES
from compactor.cleaner.gate.table import ROW_BYTES as GATE_ROW_BYTES
from compactor.cleaner.keys.buckets import ROW_BYTES, KeyBuckets, passes_needed
from compactor.cleaner.keys.keysets import LEAST_BYTES, KeySet
from compactor.cleaner.keys.spilling import SpillingSurvivors
from compactor.cleaner.keys.survivors import PassOne
from compactor.cleaner.passes.chunks import FinishedChunks
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.outcomes import outcomes_backwards
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts
from compactor.control.state import PartitionState
from compactor.errors import OutOfBudget
from compactor.local.budget import Grant, Overrun, blocks
from compactor.records.batches import ABORT, NOT_CONTROL
from compactor.records.indexes import TXN_ENTRY
from compactor.round.plan import Left
from compactor.round.roles import RoundExtent, SegmentRoles, SourceTable
from compactor.round.skip import (
    KEY_BYTES,
    CleanVerdicts,
    FilterRecord,
    SidecarLook,
    clean_verdicts,
    engine_for,
    horizon_passed,
    look_at,
)
from compactor.round.sources import Reading
from compactor.round.splice import objection
from compactor.round.splicing import Directories, PartSearch, SegmentPart
from compactor.tier.sidecars import Sidecars

_log = logging.getLogger(__name__)

MOST_PASSES = 64

HEADER_BYTES = 61
"""Of a batch that has no record left."""

LEAST_GATE_SHARE = 8
"""The gate gets at least this part of the map budget, on top where the keys need all of it: for one range of its keys at a time."""

PLANNED = "the plan says so"

MEETS_NONE = "its key directory has none of the keys"


@dataclass(frozen=True)
class PassOneSettings:
    """What pass 1 may use. ``engine``: auto, memory or partitioned; bytes. ``gate``: it is looked at by the gate, within the map budget.

    ``check``: called between segments; may raise Fenced.
    """

    engine: str
    map_budget_bytes: int
    hash_key: bytes
    lanes: Lanes
    gate: bool = True
    check: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class CleanInquiry:
    """How pass 1 learns which clean segments must be read.

    :param sidecars: None: there are none to be used (``bloom = false``).
    :param record: what filters have brought on this partition.
    :param only: ids of those that will be read, where that is settled (a resumed plan); None: to be found out.
    :param in_part: ids of those that may be read in part; None: whichever can.
    """

    sidecars: Sidecars | None
    record: FilterRecord
    only: frozenset[str] | None = None
    in_part: frozenset[str] | None = frozenset()


@dataclass(frozen=True)
class PassOneFound:
    """What pass 1 came to. ``opened``: sources and verdicts; a segment that was not opened has a stand-in there, or nothing."""

    opened: SourceTable
    survivors: SpillingSurvivors
    finished: FinishedChunks
    engine: str
    passes: int
    clean: CleanVerdicts
    gate: Gate | None

    @property
    def sources(self) -> Sequence[SourceSegment]:
        return self.opened.sources

    @property
    def witness(self) -> Gate | None:
        return self.gate

    @contextmanager
    def source(self, ordinal: int, grant: Grant | None) -> Iterator[tuple[SourceSegment, Verdicts]]:
        """A segment with its bytes and the verdicts on its batches. Raises BadData, StoreError, OutOfBudget, NotInPart."""
        known, part = self.opened.is_open(ordinal), self.part(ordinal)
        with self.opened.mapped(ordinal, grant) as source:
            if not known and self.gate is not None:
                self.gate.refold(self.sources)
            if part is not None and self.gate is not None:
                self.gate.narrow(source, part.rows)
            yield source, self.opened.verdicts[ordinal] if part is None else part.verdicts

    def forget(self) -> None:
        """Gives its memory back: keys and chunks are needed no more. What it has counted stays."""
        self.survivors.forget()
        self.finished.forget()
        if self.gate is not None:
            self.gate.forget()

    def part(self, ordinal: int) -> SegmentPart | None:
        """What is read of a segment; None: all of it."""
        return self.opened.parts.get(ordinal)


@dataclass(frozen=True)
class _PassOneJob:
    """What all attempts at one pass 1 have in common. Segments that one of them has opened stay open for the next."""

    reading: Reading
    extent: RoundExtent
    settings: PassOneSettings
    inquiry: CleanInquiry
    roles: SegmentRoles
    opened: SourceTable
    cost: _SidecarCost


@dataclass
class _SidecarCost:
    """Bytes fetched, by attempts that were given up, too."""

    bytes: int


@dataclass
class _Room:
    """On the disk; ``grant`` is None for as long as nothing is needed. KeyBuckets takes its part of it."""

    grant: Grant | None = None

    def reserve(self, nbytes: int) -> None:
        if self.grant is not None:
            self.grant.take(nbytes)

    def release(self, nbytes: int) -> None:
        if self.grant is not None:
            self.grant.give(nbytes)


@dataclass(frozen=True)
class _Scan:
    """One attempt: where dirty keys go, who looks on, and what room there is."""

    job: _PassOneJob
    survivors: SpillingSurvivors
    gate: GateAhead | None
    finished: FinishedChunks
    room: _Room


@dataclass(frozen=True)
class _FilterAnswers:
    """Of clean segments by ordinal: whose filters were asked alone, and why those that met a key must be read."""

    asked: frozenset[int] = frozenset()
    met: Mapping[int, str] = field(default_factory=dict)


def run_pass_one(reading: Reading, extent: RoundExtent, settings: PassOneSettings, inquiry: CleanInquiry) -> PassOneFound:
    """One pass 1. Holds no room on the disk when it is done; what it has read stays staged while nobody needs the room.

    Raises BadData, StoreError, OutOfBudget, GateFailed, and what ``check`` raises.
    """
    roles = SegmentRoles.of(reading.live, extent, inquiry.sidecars)
    cost = _SidecarCost(sum(head.bytes for head in roles.heads.values()))
    job = _PassOneJob(reading, extent, settings, inquiry, roles, SourceTable(reading, roles), cost)
    expected, rows = roles.dirty_keys, roles.dirty_records
    if engine_for(settings.engine, expected, settings.map_budget_bytes) == "memory":
        try:
            return _in_memory(job, expected, rows)
        except Overrun:
            pass  # the keys do not fit, and just now there was no room on the disk to go over to
    parts = _parts(job, rows)
    while True:
        try:
            return _on_disk(job, rows, parts)
        except Overrun as overrun:
            if parts >= MOST_PASSES:
                raise OutOfBudget(overrun.message, hint=overrun.hint) from overrun
            parts = min(2 * parts, MOST_PASSES)


# ---- the engines ------------------------------------------------------------------------------------------------------------


def _in_memory(job: _PassOneJob, expected: int, rows: int) -> PassOneFound:
    """Goes over to the disk in the middle where the keys turn out not to fit. Raises Overrun where the disk has no room at once."""
    settings, staging, room = job.settings, job.reading.staging, _Room()
    spare = max(0, settings.map_budget_bytes - expected * KEY_BYTES * 5 // 4 - LEAST_BYTES)
    most = max(spare, settings.map_budget_bytes // LEAST_GATE_SHARE) if settings.gate else 0
    gate_needs = expected * GATE_KEY_BYTES
    gate_share = min(most, gate_needs + LEAST_BYTES)

    def open_room() -> _Room:
        if room.grant is None:
            # From here on this thread holds room on the disk, and must not wait for more.
            room.grant = Grant(staging.budget, staging.account, 0)
        return room

    finished = FinishedChunks(max(0, spare - gate_share))
    gate = _gate(job, gate_share, open_room, rows, on_disk=gate_needs > most)

    def spill(part: int, parts: int) -> KeyBuckets:
        if settings.engine == "memory":
            raise OutOfBudget(
                f"the offset map is full: a map budget of {settings.map_budget_bytes} bytes holds about "
                f"{settings.map_budget_bytes // KEY_BYTES} keys",
                hint='Raise map_budget_bytes, or set map_engine = "auto"',
            )
        return KeyBuckets(staging.folder / "buckets", open_room(), map_budget_bytes=settings.map_budget_bytes, expected_rows=rows)

    budget = settings.map_budget_bytes - (0 if settings.engine == "memory" else spare)
    survivors = SpillingSurvivors(_rules_of_scan(job, finished, gate), KeySet(budget, expected_keys=expected), spill)
    scan = _Scan(job, survivors, gate, finished, room)
    try:
        _scan_dirty(scan)
        _fold(scan)
        looks = _looks(job, _keys_on_disk(job, rows) if survivors.on_disk else survivors.keys)
        answers = _look_up(scan, looks, _FilterAnswers())
        answers = _take_parts(scan, looks, answers)
        _finish(scan)
    finally:
        _close(scan)
        if room.grant is not None:
            room.grant.release()
    return _found(scan, looks, answers, 1)


def _on_disk(job: _PassOneJob, rows: int, parts: int) -> PassOneFound:
    settings, staging = job.settings, job.reading.staging
    gate_share = _gate_share(settings)
    map_budget = settings.map_budget_bytes - gate_share
    size = min(job.roles.largest + blocks(rows * _row_bytes(job) * 11 // (10 * parts)), staging.budget.total)
    finished = FinishedChunks(0)
    with staging.room(size, f"the offset map of {job.reading.partition}") as grant:
        room = _Room(grant)
        gate = _gate(job, gate_share, lambda: room, rows, on_disk=_gate_on_disk(job), parts=parts)

        def open_buckets(part: int, parts: int) -> KeyBuckets:
            path = staging.folder / "buckets"
            return KeyBuckets(path, room, map_budget_bytes=map_budget, expected_rows=rows, part=part, parts=parts)

        survivors = SpillingSurvivors(_rules_of_scan(job, finished, gate), None, open_buckets, parts)
        scan = _Scan(job, survivors, gate, finished, room)
        looks: Mapping[int, SidecarLook] | None = None
        answers = _FilterAnswers()
        try:
            for _ in range(parts):
                _scan_dirty(scan)
                _fold(scan)
                looks = looks if looks is not None else _looks(job, _keys_on_disk(job, rows))
                answers = _look_up(scan, looks, answers, parts)
                _finish(scan)
        finally:
            _close(scan)
    return _found(scan, looks or {}, answers, parts)


def _keys_on_disk(job: _PassOneJob, rows: int) -> int:
    """Rows on the disk are not told apart before ``finish``, and ``rows`` is an estimate.

    Without a key every clean segment may be skipped, so 0 is said only where nothing was scanned.
    """
    return max(1, rows) if job.roles.dirty else 0


def _parts(job: _PassOneJob, rows: int) -> int:
    """How many scans, so that a part's rows and the segment that is read fit the budget."""
    budget, largest, row_bytes = job.reading.staging.budget.total, job.roles.largest, _row_bytes(job)
    parts = passes_needed(rows, budget - largest, row_bytes)
    if parts > MOST_PASSES or budget <= largest:
        need = largest + blocks(rows * row_bytes * 11 // (10 * MOST_PASSES))
        raise OutOfBudget(
            f"the keys of {rows} records need {rows * row_bytes} bytes of local disk in at most {MOST_PASSES} parts, next to a "
            f"segment of {largest} bytes; the disk budget is {budget}",
            hint=f"Set disk_budget_bytes to at least {need}, or map_budget_bytes to {rows * KEY_BYTES}. Nothing was changed",
        )
    return parts


def _gate_share(settings: PassOneSettings) -> int:
    """Of the map budget, where the cleaner's keys are on the disk."""
    return max(0, min(settings.map_budget_bytes // 2, settings.map_budget_bytes - LEAST_BYTES)) if settings.gate else 0


def _gate_on_disk(job: _PassOneJob) -> bool:
    """Then, too."""
    return job.settings.gate and job.roles.dirty_keys * GATE_KEY_BYTES > _gate_share(job.settings)


def _row_bytes(job: _PassOneJob) -> int:
    """Of local disk for each record, where the cleaner's keys are there."""
    return ROW_BYTES + (GATE_ROW_BYTES if _gate_on_disk(job) else 0)


def _gate(
    job: _PassOneJob, budget_bytes: int, open_room: Callable[[], _Room], rows: int, *, on_disk: bool, parts: int = 1
) -> GateAhead | None:
    if not job.settings.gate:
        return None

    def open_spool(ranges: int, part: int, parts: int) -> RowSpool:
        return RowSpool(job.reading.staging.folder / "gate", open_room(), ranges=ranges, part=part, parts=parts)

    extent = job.extent
    terms = GateTerms(extent.rules, extent.first_dirty, job.settings.hash_key, job.reading.inflate_limit)
    return GateAhead(terms, LastRecords(budget_bytes, rows, open_spool, on_disk=on_disk, parts=parts if on_disk else 1))


def _rules_of_scan(job: _PassOneJob, finished: FinishedChunks, gate: GateAhead | None) -> PassOne:
    extent, opened = job.extent, job.opened
    return PassOne(
        opened.sources, opened.verdicts, extent.first_dirty, extent.end, job.settings.hash_key, job.reading.inflate_limit,
        finished, extent.rules, gate,
    )  # fmt: skip


# ---- the phases, in their order ---------------------------------------------------------------------------------------------


def _scan_dirty(scan: _Scan) -> None:
    """Newest first; what lies behind the range is asked for the outcomes of transactions only."""
    job, opened, survivors = scan.job, scan.job.opened, scan.survivors
    outcomes: dict[int, int] = {}
    for ordinal in reversed(job.roles.behind):
        if job.roles.head(ordinal).sidecar is None:
            opened.open(ordinal, scan.room.grant)
        outcomes_backwards(opened.sources[ordinal].table, outcomes)
        if survivors.one.witness is not None and scan.gate is not None:
            scan.gate.behind(opened.sources[ordinal])
    coming = list(job.roles.dirty)
    while coming:
        ordinal = coming.pop()
        with opened.mapped(ordinal, scan.room.grant) as source:
            if coming:
                job.reading.staging.fetch_ahead(job.reading.log(coming[-1]))
            job.settings.check()
            aborted = outcomes_backwards(source.table, outcomes) == ABORT
            if not opened.folded:
                opened.verdicts[ordinal] = Verdicts(aborted, aborted, np.zeros(len(aborted), np.bool_), np.empty(0, TXN_ENTRY))
            # Of markers nothing but the outcome is known yet: chunks that hold some are not cleaned ahead.
            ahead = not np.any((source.table.control != NOT_CONTROL) & (source.table.codec > 0))
            survivors.scan(source, survivors.one.wanted(source), job.settings.lanes, ahead=ahead)


def _fold(scan: _Scan) -> None:
    """The verdict on every batch, once: of clean segments without a sidecar the headers are needed for it."""
    job = scan.job
    if not job.opened.folded:
        for ordinal in job.roles.clean:
            if job.roles.head(ordinal).sidecar is None:
                job.opened.open(ordinal, scan.room.grant)
                job.settings.check()
        job.opened.fold()
    if scan.gate is not None:
        scan.gate.settle(job.opened.sources)


def _looks(job: _PassOneJob, keys: int) -> dict[int, SidecarLook]:
    """What the sidecars of clean segments say. ``keys``: of the dirty range, or as many records as it has."""
    live, inquiry = job.roles.live, job.inquiry
    if inquiry.only is not None:
        return {n: SidecarLook(None, must=PLANNED) for n in job.roles.clean if live[n].id in inquiry.only}
    now_ms = job.extent.rules.now_ms
    found = {}
    for ordinal in job.roles.clean:
        due = _due(job, ordinal) or horizon_passed(live[ordinal], now_ms)
        found[ordinal] = look_at(job.roles.head(ordinal), due, keys=keys, record=inquiry.record, now_ms=now_ms)
    return found


def _due(job: _PassOneJob, ordinal: int) -> str:
    """What the fold finds to do in a segment: the same whether it was opened or something stands in for it."""
    verdicts = job.opened.verdicts[ordinal]
    return due_by_fold(job.opened.sources[ordinal].table, verdicts.aborted, verdicts.discardable, job.extent.rules.now_ms)


def _look_up(scan: _Scan, looks: Mapping[int, SidecarLook], before: _FilterAnswers, parts: int = 1) -> _FilterAnswers:
    """Asks filters about this part's keys; on disk the rows of segments that may have one of them are read now.

    Where the gate's keys are on the disk, all that the round will read is. The gate has parts of its own: with several it is shown whatever
    a filter may bring in for a part that is still to come.
    """
    job, survivors, on_disk = scan.job, scan.survivors, scan.survivors.on_disk
    gate = scan.gate.gate if scan.gate is not None and scan.gate.on_disk and not scan.gate.gate.is_told else None
    asked = [n for n, look in looks.items() if look.askable and not look.may and (on_disk or not look.must)]
    met = _ask(scan, asked)
    if on_disk or gate is not None:
        straddling = [
            n
            for n in job.roles.dirty
            if job.roles.live[n].start_offset < job.extent.first_dirty or (gate is not None and gate.outside(job.opened.sources[n]).any())
        ]
        may_meet = {n for n, look in looks.items() if look.askable and not look.may} if gate is not None and parts > 1 else set()
        below = [n for n, look in looks.items() if n in met or n in may_meet or (look.must and (gate is not None or not look.askable))]
        for ordinal in (*below, *straddling):
            known = job.opened.is_open(ordinal)
            with job.opened.mapped(ordinal, scan.room.grant) as source:
                job.settings.check()
                if gate is not None and not known:
                    gate.refold(job.opened.sources)
                wanted = survivors.one.below(source)
                survivors.scan_clean(source, wanted if gate is None else wanted | gate.outside(source), job.settings.lanes)
    return replace(
        before,
        asked=before.asked | {n for n in asked if not looks[n].must},
        met={**before.met, **{n: why for n, why in met.items() if not looks[n].must}},
    )


def _take_parts(scan: _Scan, looks: dict[int, SidecarLook], answers: _FilterAnswers) -> _FilterAnswers:
    """Of clean segments that must be read, those of which a part is enough. Never where keys are on the disk: these need all rows now.

    Those of which nothing is due, and whose directory has none of the keys, need not be read, whatever their filters say: that of a segment
    that was put together has keys that are gone, which would come up round after round.
    """
    job, survivors, inquiry = scan.job, scan.survivors, scan.job.inquiry
    if inquiry.sidecars is None or inquiry.in_part == frozenset() or survivors.on_disk or (scan.gate is not None and scan.gate.on_disk):
        return answers
    copies, opened = job.reading.staging.layout.copies, job.opened

    def may_be(ordinal: int, look: SidecarLook) -> bool:
        segment = job.roles.live[ordinal]
        is_read = (look.must or ordinal in answers.met) and (inquiry.in_part is None or segment.id in inquiry.in_part)
        if not is_read or opened.is_open(ordinal):
            return False
        why = objection(segment, job.roles.head(ordinal).sidecar, survivors.keys, copies)
        if why:
            _log.debug("%s is read whole: %s", job.reading.name(ordinal), why)
        return not why

    asked = [ordinal for ordinal, look in looks.items() if may_be(ordinal, look)]
    if not asked:
        return answers
    met = dict(answers.met)
    directories = Directories(inquiry.sidecars)
    search = PartSearch(job.reading, job.extent.rules, distinct_pieces(survivors.dirty_keys()), directories)
    for ordinal, (directory, fetched) in zip(asked, directories.each([job.roles.live[n] for n in asked]), strict=True):
        job.cost.bytes += fetched
        job.settings.check()
        if directory is None:
            continue
        found, look = search.part(directory, opened.sources[ordinal], opened.verdicts[ordinal]), looks[ordinal]
        if found.meets_none and (look.for_keys or not look.must):
            looks[ordinal] = replace(look, must="", may=MEETS_NONE, for_keys=False)
            met.pop(ordinal, None)
        elif found.part is not None:
            opened.take_part(ordinal, found.part)
    return replace(answers, met=met)


def _finish(scan: _Scan) -> None:
    """Ends a part of the keys."""
    if scan.gate is not None and scan.gate.sees_again:
        scan.gate.gate.finish()
    scan.survivors.finish()


def _close(scan: _Scan) -> None:
    """Gives the disk back where a part was not finished."""
    scan.survivors.close()
    if scan.gate is not None:
        scan.gate.gate.close()


def _ask(scan: _Scan, ordinals: Sequence[int]) -> dict[int, str]:
    """Those whose filter meets a key, or cannot be asked, with the reason."""
    job, live = scan.job, scan.job.roles.live
    if job.inquiry.sidecars is None:
        return {}

    def keys() -> Iterator[Hashes]:
        job.settings.check()
        return scan.survivors.dirty_keys()

    met, size = job.inquiry.sidecars.meeting([live[n].id for n in ordinals], keys)
    job.cost.bytes += size
    return {n: met[live[n].id] for n in ordinals if live[n].id in met}


def _found(scan: _Scan, looks: Mapping[int, SidecarLook], answers: _FilterAnswers, passes: int) -> PassOneFound:
    job, live, survivors = scan.job, scan.job.roles.live, scan.survivors
    if scan.gate is not None:
        scan.gate.gate.refold(job.opened.sources)  # some were opened since
    return PassOneFound(
        job.opened,
        survivors,
        scan.finished,
        engine="partitioned" if survivors.spilled else "memory",
        passes=passes,
        clean=clean_verdicts(
            {live[n].id: look for n, look in looks.items()},
            {live[n].id: why for n, why in answers.met.items()},
            {live[n].id: why for n in job.roles.clean if (why := _due(job, n))},
            asked=(live[n].id for n in answers.asked),
            keys=survivors.keys,
            sidecar_bytes=job.cost.bytes,
            settled=scan.gate is not None and scan.gate.on_disk,
            in_part=(live[n].id for n in job.opened.parts),
        ),
        gate=scan.gate.gate if scan.gate else None,
    )


def what_is_left(found: PassOneFound, state: PartitionState) -> dict[str, Left]:
    """Of each segment that pass 1 has looked into, at most: of batches that keep a record, or of which it cannot say, and a header for
    each producer."""
    left = {}
    for ordinal, segment in enumerate(state.live):
        source = found.sources[ordinal]
        counts = found.survivors.counts(source) if found.opened.is_open(ordinal) else None
        if counts is None or len(counts.kept) != len(source.table):
            continue
        data = source.table.control == NOT_CONTROL
        size = int(source.table.size[~data | (counts.kept != 0)].sum()) + HEADER_BYTES * len(np.unique(source.table.producer_id))
        left[segment.id] = Left(size, records=int(np.abs(counts.kept[data]).sum()))
    return left
