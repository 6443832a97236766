"""Pass 1, before a plan is announced: which records survive, and which clean segments need not be read.

1. after the range:  sidecar, else headers. A transaction's marker may lie anywhere after its data.
2. dirty:  fetched, newest first. Each segment is read once: headers, outcomes known so far, keys.
3. fold:  segments and stand-ins. The verdict on every batch, and what becomes due by it.
4. clean:  sidecar heads, then filters. What must be read is read in pass 2 (with keys on disk also here). If a key directory allows it,
   only a part is read (round.partial), or nothing.

The offset map is a set of keys while ``map_budget_bytes`` allows, and rows on local disk otherwise. If the disk cannot hold all rows, the
keys are split into parts and each part has its own scan. The gate keeps its keys in its own memory: all keys that fit, else those of one
range of its hash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from bloom.directory import distinct_key_hash_prefixes
from compactor.cleaner.disk_map import KEY_ROW_BYTES, DiskOffsetMap, KeyScanSpillingToDisk, count_log_scans
from compactor.cleaner.gate.gate import CleanedSegmentCheckParameters, Gate
from compactor.cleaner.gate.parser import GATE_KEY_BYTES as GATE_KEY_BYTES, LatestRecordTable
from compactor.cleaner.keys import MIN_MAP_BYTES, KeyHashSet, KeyScanParameters
from compactor.cleaner.retention import CleanedChunkCache, TransactionVerdicts, find_txn_outcomes
from compactor.cleaner.source import SourceSegment
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.config.units import format_size
from compactor.control.state import PartitionState
from compactor.errors import OutOfBudget
from compactor.kernels.common import KEY_BYTES, Hashes
from compactor.local.budget import DiskReservationExceeded, DiskSpaceReservation, round_up_to_blocks
from compactor.model.plan import raise_if_keyless
from compactor.records.batches import ABORT, NOT_CONTROL
from compactor.records.indexes import TXN_ENTRY
from compactor.records.producers import reason_to_read_markers
from compactor.round.partial import KeyDirectoryCache, PartToReadFinder, SegmentPartToRead, whole_read_reason
from compactor.round.plan import RemainingSizeBound
from compactor.round.ports import (
    BloomFilterUsageStatistics,
    CleanSegmentVerdicts,
    SegmentReadDecisionFromSidecar,
    build_clean_segment_verdicts,
    choose_key_engine,
    decide_by_sidecar,
    delete_horizon_passed_reason,
)
from compactor.round.roles import RoundRange, RoundSourceSegments, SegmentRoles
from compactor.round.sources import StagedSegmentReader
from compactor.tier.sidecars import SidecarStore

_log = logging.getLogger(__name__)

MOST_PASSES = 64
"""Most parts into which the keys are split, each with its own scan of the dirty range."""

BATCH_HEADER_BYTES = 61
"""Size of the header that stays of a batch without records."""

LEAST_GATE_SHARE = 8
"""Fraction (one in this many) of the map budget that the gate gets at least, on top of the budget if the offset map needs all of it."""

PLANNED = "the plan says so"

MEETS_NONE = "its key directory contains none of the keys"


@dataclass(frozen=True)
class SurvivorScanSettings:
    """Settings and resources of pass 1.

    engine: auto, memory or partitioned.
    gate: whether the gate reads the records too, within the map budget.
    check: called between segments; may raise Fenced.
    """

    engine: str
    map_budget_bytes: int
    hash_key: bytes
    workers: WorkerThreads
    gate: bool = True
    check: Callable[[], object] = lambda: None
    refuses_keyless: bool = False


@dataclass(frozen=True)
class CleanSegmentSelectionInputs:
    """Inputs of the decision which clean segments must be read.

    only: ids of the segments that a resumed plan reads; None to decide here.
    in_part: ids of segments of which a part may be enough; None for all.
    """

    sidecars: SidecarStore | None
    record: BloomFilterUsageStatistics
    only: frozenset[str] | None = None
    in_part: frozenset[str] | None = frozenset()


@dataclass(frozen=True)
class SurvivorScanResult:
    """Result of pass 1.

    passes: number of scans of the dirty range.
    """

    opened_sources: RoundSourceSegments
    survivors: KeyScanSpillingToDisk
    cleaned_chunk_cache: CleanedChunkCache
    engine: str
    passes: int
    clean: CleanSegmentVerdicts
    gate: Gate | None

    @property
    def sources(self) -> Sequence[SourceSegment]:
        return self.opened_sources.sources

    @property
    def second_reader(self) -> Gate | None:
        return self.gate

    @contextmanager
    def open_segment(self, ordinal: int, reservation: DiskSpaceReservation | None) -> Iterator[tuple[SourceSegment, TransactionVerdicts]]:
        """Yield a segment, or its part to read. Raises BadData, StoreError, OutOfBudget, WholeSegmentReadNeededError."""
        known, part = self.opened_sources.is_segment_open(ordinal), self.part_of_segment(ordinal)
        with self.opened_sources.memory_map_segment(ordinal, reservation) as source:
            if not known and self.gate is not None:
                self.gate.compute_txn_outcomes(self.sources)
            if part is not None and self.gate is not None:
                self.gate.narrow_txn_outcomes(source, part.rows)
            yield source, self.opened_sources.verdicts[ordinal] if part is None else part.verdicts

    def free_key_memory(self) -> None:
        self.survivors.free_key_set()
        self.cleaned_chunk_cache.stop_storing()
        if self.gate is not None:
            self.gate.free_latest_record_table()

    def part_of_segment(self, ordinal: int) -> SegmentPartToRead | None:
        """Return None if all of the segment is read."""
        return self.opened_sources.parts.get(ordinal)


@dataclass(frozen=True)
class _SurvivorScanInputs:
    reading: StagedSegmentReader
    extent: RoundRange
    settings: SurvivorScanSettings
    inquiry: CleanSegmentSelectionInputs
    roles: SegmentRoles
    opened: RoundSourceSegments
    cost: _FetchedSidecarByteCounter


@dataclass
class _FetchedSidecarByteCounter:
    bytes: int


@dataclass
class _HeldDiskReservation:
    reservation: DiskSpaceReservation | None = None


@dataclass(frozen=True)
class _SurvivorScanAttempt:
    job: _SurvivorScanInputs
    survivors: KeyScanSpillingToDisk
    gate: Gate | None
    cleaned_chunk_cache: CleanedChunkCache
    space: _HeldDiskReservation


@dataclass(frozen=True)
class BloomFilterAnswers:
    """Answers by position of the segment.

    asked: where only the filter could decide.
    met: of ``asked``, must be read; with the reason.
    """

    asked: frozenset[int] = frozenset()
    met: Mapping[int, str] = field(default_factory=dict)


def scan_for_survivors(
    reader: StagedSegmentReader, round_range: RoundRange, settings: SurvivorScanSettings, selection_inputs: CleanSegmentSelectionInputs
) -> SurvivorScanResult:
    """Find the last record of each dirty key, and the clean segments that must be read. At the end no disk space is reserved; fetched
    segments stay on disk until the space is needed.

    Raises BadData, StoreError, OutOfBudget, GateFailed, and what ``settings.check`` raises; KeylessRecordsRefused once the dirty range was
    scanned, if it has records without a key and ``settings.refuses_keyless`` is set.
    """
    roles = SegmentRoles.assign_segment_roles(reader.live, round_range, selection_inputs.sidecars)
    cost = _FetchedSidecarByteCounter(sum(head.bytes for head in roles.heads.values()))
    job = _SurvivorScanInputs(reader, round_range, settings, selection_inputs, roles, RoundSourceSegments(reader, roles), cost)
    expected, rows = roles.expected_dirty_key_count, roles.expected_dirty_record_count
    if choose_key_engine(settings.engine, expected, settings.map_budget_bytes) == "memory":
        try:
            return _scan_in_memory(job, expected, rows)
        except DiskReservationExceeded:
            pass  # the keys do not fit in memory, and there was no disk space at that moment to move them to
    parts = _count_key_parts(job, rows)
    while True:
        try:
            return _scan_on_disk(job, rows, parts)
        except DiskReservationExceeded as overrun:
            if parts >= MOST_PASSES:
                raise OutOfBudget(overrun.message, hint=overrun.hint) from overrun
            parts = min(2 * parts, MOST_PASSES)


# ---- the engines ------------------------------------------------------------------------------------------------------------


def _scan_in_memory(scan_inputs: _SurvivorScanInputs, expected_key_count: int, expected_row_count: int) -> SurvivorScanResult:
    """Move the keys to disk if they turn out not to fit. Raises DiskReservationExceeded if there is no disk space for them."""
    settings, staging, space = scan_inputs.settings, scan_inputs.reading.staging, _HeldDiskReservation()
    spare = max(0, settings.map_budget_bytes - expected_key_count * KEY_BYTES * 5 // 4 - MIN_MAP_BYTES)
    most = max(spare, settings.map_budget_bytes // LEAST_GATE_SHARE) if settings.gate else 0
    gate_share = min(most, expected_key_count * GATE_KEY_BYTES * 5 // 4 + MIN_MAP_BYTES)

    cleaned_chunk_cache = CleanedChunkCache(max(0, spare - gate_share))
    gate = _create_gate(scan_inputs, gate_share, expected_row_count)

    def open_spilled_map(part_number: int, part_count: int) -> DiskOffsetMap:
        if settings.engine == "memory":
            raise OutOfBudget(
                f"the offset map is full: a map budget of {format_size(settings.map_budget_bytes)} holds about "
                f"{settings.map_budget_bytes // KEY_BYTES:,} keys",
                hint='Raise map_budget_bytes, or set map_engine = "auto"',
            )
        # From here on this thread holds disk space, so it must not wait for more (two waiting threads could deadlock).
        space.reservation = DiskSpaceReservation(staging.budget, staging.usage, 0)
        return DiskOffsetMap(
            staging.folder / "disk_map",
            space.reservation,
            map_budget_bytes=settings.map_budget_bytes,
            expected_row_count=expected_row_count,
        )

    budget = settings.map_budget_bytes - (0 if settings.engine == "memory" else spare)
    survivors = KeyScanSpillingToDisk(
        _key_scan_parameters(scan_inputs, cleaned_chunk_cache, gate),
        KeyHashSet(budget, expected_key_count=expected_key_count),
        open_spilled_map,
    )
    scan = _SurvivorScanAttempt(scan_inputs, survivors, gate, cleaned_chunk_cache, space)
    try:
        _collect_dirty_keys(scan)
        _compute_transaction_verdicts(scan)
        decisions = _decide_by_sidecars(
            scan_inputs,
            _max_keys_on_disk(scan_inputs, expected_row_count) if survivors.are_rows_on_disk else survivors.key_count,
        )
        answers = _ask_filters(scan, decisions, BloomFilterAnswers())
        answers = _choose_partial_reads(scan, decisions, answers)
        survivors.end_key_part()
    finally:
        survivors.close()
        if space.reservation is not None:
            space.reservation.release_all()
    return _build_survivor_scan_result(scan, decisions, answers, 1)


def _scan_on_disk(scan_inputs: _SurvivorScanInputs, expected_row_count: int, part_count: int) -> SurvivorScanResult:
    settings, staging = scan_inputs.settings, scan_inputs.reading.staging
    gate_share = _gate_budget_bytes(settings)
    map_budget = settings.map_budget_bytes - gate_share
    size = min(
        scan_inputs.roles.largest_segment_disk_bytes + round_up_to_blocks(expected_row_count * KEY_ROW_BYTES * 11 // (10 * part_count)),
        staging.budget.total,
    )
    cleaned_chunk_cache = CleanedChunkCache(0)
    with staging.reserved_disk_space(size, f"the offset map of {scan_inputs.reading.partition}") as reservation:
        space = _HeldDiskReservation(reservation)
        gate = _create_gate(scan_inputs, gate_share, expected_row_count)

        def open_disk_map(part_number: int, part_count: int) -> DiskOffsetMap:
            path = staging.folder / "disk_map"
            return DiskOffsetMap(
                path,
                reservation,
                map_budget_bytes=map_budget,
                expected_row_count=expected_row_count,
                key_part_number=part_number,
                key_part_count=part_count,
            )

        survivors = KeyScanSpillingToDisk(_key_scan_parameters(scan_inputs, cleaned_chunk_cache, gate), None, open_disk_map, part_count)
        scan = _SurvivorScanAttempt(scan_inputs, survivors, gate, cleaned_chunk_cache, space)
        decisions: Mapping[int, SegmentReadDecisionFromSidecar] | None = None
        answers = BloomFilterAnswers()
        try:
            for _ in range(part_count):
                _collect_dirty_keys(scan)
                _compute_transaction_verdicts(scan)
                decisions = (
                    decisions
                    if decisions is not None
                    else _decide_by_sidecars(scan_inputs, _max_keys_on_disk(scan_inputs, expected_row_count))
                )
                answers = _ask_filters(scan, decisions, answers)
                survivors.end_key_part()
        finally:
            survivors.close()
    return _build_survivor_scan_result(scan, decisions or {}, answers, part_count)


def _max_keys_on_disk(scan_inputs: _SurvivorScanInputs, estimated_row_count: int) -> int:
    """Rows on disk may repeat a key. 0 only if there is no dirty segment."""
    return max(1, estimated_row_count) if scan_inputs.roles.dirty else 0


def _count_key_parts(scan_inputs: _SurvivorScanInputs, expected_row_count: int) -> int:
    """The rows of one part and the segment being read must fit the disk budget. Raises OutOfBudget if there would be more than MOST_PASSES
    parts.
    """
    budget, largest = scan_inputs.reading.staging.budget.total, scan_inputs.roles.largest_segment_disk_bytes
    parts = count_log_scans(expected_row_count, budget - largest)
    if parts > MOST_PASSES or budget <= largest:
        need = largest + round_up_to_blocks(expected_row_count * KEY_ROW_BYTES * 11 // (10 * MOST_PASSES))
        raise OutOfBudget(
            f"the keys of {expected_row_count:,} records need {format_size(expected_row_count * KEY_ROW_BYTES)} of local disk in at most "
            f"{MOST_PASSES} parts, next to a segment of {format_size(largest)}; the disk budget is {format_size(budget)}",
            hint=f"Set disk_budget_bytes to at least {need}, or map_budget_bytes to {expected_row_count * KEY_BYTES}. Nothing was changed",
        )
    return parts


def _gate_budget_bytes(settings: SurvivorScanSettings) -> int:
    return max(0, min(settings.map_budget_bytes // 2, settings.map_budget_bytes - MIN_MAP_BYTES)) if settings.gate else 0


def _create_gate(scan_inputs: _SurvivorScanInputs, budget_bytes: int, expected_row_count: int) -> Gate | None:
    if not scan_inputs.settings.gate:
        return None
    extent = scan_inputs.extent
    terms = CleanedSegmentCheckParameters(
        extent.rules, extent.first_dirty, scan_inputs.settings.hash_key, scan_inputs.reading.inflate_limit
    )
    return Gate(terms, LatestRecordTable(budget_bytes, expected_row_count))


def _key_scan_parameters(scan_inputs: _SurvivorScanInputs, cleaned_chunk_cache: CleanedChunkCache, gate: Gate | None) -> KeyScanParameters:
    extent, opened = scan_inputs.extent, scan_inputs.opened
    return KeyScanParameters(
        opened.sources, opened.verdicts, extent.first_dirty, extent.end, scan_inputs.settings.hash_key, scan_inputs.reading.inflate_limit,
        cleaned_chunk_cache, extent.rules, gate,
    )  # fmt: skip


# ---- the phases, in their order ---------------------------------------------------------------------------------------------


def _collect_dirty_keys(scan: _SurvivorScanAttempt) -> None:
    """Newest segment first. Segments after the range only contribute outcomes of transactions."""
    job, opened, survivors = scan.job, scan.job.opened, scan.survivors
    outcomes: dict[int, int] = {}
    for ordinal in reversed(job.roles.behind):
        if job.roles.sidecar_head(ordinal).sidecar is None:
            opened.load_batch_headers(ordinal, scan.space.reservation)
        find_txn_outcomes(opened.sources[ordinal].table, outcomes)
        if survivors.key_scan.second_reader is not None and scan.gate is not None:
            scan.gate.collect_later_outcomes(opened.sources[ordinal])
    coming = list(job.roles.dirty)
    while coming:
        ordinal = coming.pop()
        with opened.memory_map_segment(ordinal, scan.space.reservation) as source:
            if coming:
                job.reading.staging.prefetch_file(job.reading.log_file_to_stage(coming[-1]))
            job.settings.check()
            aborted = find_txn_outcomes(source.table, outcomes) == ABORT
            if not opened.folded:
                opened.verdicts[ordinal] = TransactionVerdicts(aborted, aborted, np.zeros(len(aborted), np.bool_), np.empty(0, TXN_ENTRY))
            # Only the outcomes of markers are known yet, so chunks that contain markers are not cleaned ahead.
            cleans_chunks_while_reading = not np.any((source.table.control != NOT_CONTROL) & (source.table.codec_ids > 0))
            to_map = survivors.key_scan.flag_dirty_batches(source)
            survivors.scan_dirty_segment_keys(source, to_map, job.settings.workers, cleans_chunks_while_reading=cleans_chunks_while_reading)
    if job.settings.refuses_keyless:
        raise_if_keyless(job.reading.partition.topic, survivors.count_keyless_records())


def _compute_transaction_verdicts(scan: _SurvivorScanAttempt) -> None:
    """Clean segments without a sidecar are opened for their headers."""
    job = scan.job
    if not job.opened.folded:
        for ordinal in job.roles.clean:
            if job.roles.sidecar_head(ordinal).sidecar is None:
                job.opened.load_batch_headers(ordinal, scan.space.reservation)
                job.settings.check()
        job.opened.compute_transaction_verdicts()
    if scan.gate is not None:
        scan.gate.compute_txn_outcomes(job.opened.sources)


def _decide_by_sidecars(scan_inputs: _SurvivorScanInputs, dirty_key_count: int) -> dict[int, SegmentReadDecisionFromSidecar]:
    """If a resumed plan states the segments to read, decide only about these. ``dirty_key_count``: or an upper bound on the number."""
    live, inquiry = scan_inputs.roles.live, scan_inputs.inquiry
    if inquiry.only is not None:
        return {n: SegmentReadDecisionFromSidecar(None, must=PLANNED) for n in scan_inputs.roles.clean if live[n].id in inquiry.only}
    rules = scan_inputs.extent.rules
    found = {}
    for ordinal in scan_inputs.roles.clean:
        due = _transaction_reason(scan_inputs, ordinal) or delete_horizon_passed_reason(live[ordinal], rules.now_ms)
        found[ordinal] = decide_by_sidecar(
            scan_inputs.roles.sidecar_head(ordinal),
            due,
            dirty_key_count=dirty_key_count,
            filter_usage=inquiry.record,
            now_ms=rules.now_ms,
            drops_keyless=rules.drops_keyless,
        )
    return found


def _transaction_reason(scan_inputs: _SurvivorScanInputs, ordinal: int) -> str:
    verdicts = scan_inputs.opened.verdicts[ordinal]
    return reason_to_read_markers(
        scan_inputs.opened.sources[ordinal].table, verdicts.aborted, verdicts.discardable, scan_inputs.extent.rules.now_ms
    )


def _ask_filters(
    scan: _SurvivorScanAttempt, decisions: Mapping[int, SegmentReadDecisionFromSidecar], earlier_answers: BloomFilterAnswers
) -> BloomFilterAnswers:
    """Add the filters' answers for this part of the key space. If keys are on disk, also read the clean segments that may contain one of
    these keys.
    """
    job, survivors, on_disk = scan.job, scan.survivors, scan.survivors.are_rows_on_disk
    asked = [n for n, decision in decisions.items() if decision.askable and not decision.may and (on_disk or not decision.must)]
    met = _filter_matches(scan, asked)
    if on_disk:
        straddling = [n for n in job.roles.dirty if job.roles.live[n].start_offset < job.extent.first_dirty]
        below = [n for n, decision in decisions.items() if n in met or (decision.must and not decision.askable)]
        for ordinal in (*below, *straddling):
            with job.opened.memory_map_segment(ordinal, scan.space.reservation) as source:
                job.settings.check()
                survivors.scan_clean_segment_keys(source, survivors.key_scan.flag_clean_batches(source), job.settings.workers)
    return replace(
        earlier_answers,
        asked=earlier_answers.asked | {n for n in asked if not decisions[n].must},
        met={**earlier_answers.met, **{n: why for n, why in met.items() if not decisions[n].must}},
    )


def _choose_partial_reads(
    scan: _SurvivorScanAttempt, decisions: dict[int, SegmentReadDecisionFromSidecar], answers: BloomFilterAnswers
) -> BloomFilterAnswers:
    """Change ``decisions`` in place.

    A segment without a due deletion is skipped if its key directory contains no dirty key, whatever its filter says. The filter of a
    composed segment still contains keys that are gone, and would match them in every round.
    """
    job, survivors, inquiry = scan.job, scan.survivors, scan.job.inquiry
    # If keys are on disk, all rows are needed now.
    if inquiry.sidecars is None or inquiry.in_part == frozenset() or survivors.are_rows_on_disk:
        return answers
    copies, opened = job.reading.staging.layout.log_file_copy_limits, job.opened

    def has_usable_directory(ordinal: int, decision: SegmentReadDecisionFromSidecar) -> bool:
        segment = job.roles.live[ordinal]
        is_read = (decision.must or ordinal in answers.met) and (inquiry.in_part is None or segment.id in inquiry.in_part)
        if not is_read or opened.is_segment_open(ordinal):
            return False
        why = whole_read_reason(segment, job.roles.sidecar_head(ordinal).sidecar, survivors.key_count, copies)
        if why:
            _log.debug("%s is read whole: %s", job.reading.object_key_of_log(ordinal), why)
        return not why

    asked = [ordinal for ordinal, decision in decisions.items() if has_usable_directory(ordinal, decision)]
    if not asked:
        return answers
    met = dict(answers.met)
    directories = KeyDirectoryCache(inquiry.sidecars)
    search = PartToReadFinder(job.reading, job.extent.rules, distinct_key_hash_prefixes(survivors.iterate_dirty_key_hashes()), directories)
    for ordinal, (directory, fetched) in zip(asked, directories.load_key_directories([job.roles.live[n] for n in asked]), strict=True):
        job.cost.bytes += fetched
        job.settings.check()
        if directory is None:
            continue
        found, decision = search.find_part(directory, opened.sources[ordinal], opened.verdicts[ordinal]), decisions[ordinal]
        if found.meets_none and (decision.for_keys or not decision.must):
            decisions[ordinal] = replace(decision, must="", may=MEETS_NONE, for_keys=False)
            met.pop(ordinal, None)
        elif found.part is not None:
            opened.restrict_segment_to_part(ordinal, found.part)
    return replace(answers, met=met)


def _filter_matches(scan: _SurvivorScanAttempt, ordinals: Sequence[int]) -> dict[int, str]:
    job, live = scan.job, scan.job.roles.live
    if job.inquiry.sidecars is None:
        return {}

    def iterate_dirty_keys() -> Iterator[Hashes]:
        job.settings.check()
        return scan.survivors.iterate_dirty_key_hashes()

    met, size = job.inquiry.sidecars.find_possible_segments([live[n].id for n in ordinals], iterate_dirty_keys)
    job.cost.bytes += size
    return {n: met[live[n].id] for n in ordinals if live[n].id in met}


def _build_survivor_scan_result(
    scan: _SurvivorScanAttempt,
    decisions: Mapping[int, SegmentReadDecisionFromSidecar],
    answers: BloomFilterAnswers,
    scan_count: int,
) -> SurvivorScanResult:
    job, live, survivors = scan.job, scan.job.roles.live, scan.survivors
    if scan.gate is not None:
        scan.gate.compute_txn_outcomes(job.opened.sources)  # more sources were opened since the fold
    return SurvivorScanResult(
        job.opened,
        survivors,
        scan.cleaned_chunk_cache,
        engine="partitioned" if survivors.has_spilled else "memory",
        passes=scan_count,
        clean=build_clean_segment_verdicts(
            {live[n].id: decision for n, decision in decisions.items()},
            {live[n].id: why for n, why in answers.met.items()},
            {live[n].id: why for n in job.roles.clean if (why := _transaction_reason(job, n))},
            asked_segments=(live[n].id for n in answers.asked),
            dirty_key_count=survivors.key_count,
            sidecar_bytes=job.cost.bytes,
            partial_segments=(live[n].id for n in job.opened.parts),
        ),
        gate=scan.gate,
    )


def remaining_size_bounds(scan_result: SurvivorScanResult, state: PartitionState) -> dict[str, RemainingSizeBound]:
    """Return upper bounds by id of each segment that pass 1 has read.

    A batch that keeps a record, or whose records are not known, counts in full. One batch header is added for each producer.
    """
    left = {}
    for ordinal, segment in enumerate(state.live):
        source = scan_result.sources[ordinal]
        counts = scan_result.survivors.survivor_counts_by_batch(source) if scan_result.opened_sources.is_segment_open(ordinal) else None
        if counts is None or len(counts.kept) != len(source.table):
            continue
        data = source.table.control == NOT_CONTROL
        size = int(source.table.size[~data | (counts.kept != 0)].sum()) + BATCH_HEADER_BYTES * len(np.unique(source.table.producer_id))
        left[segment.id] = RemainingSizeBound(size, records=int(np.abs(counts.kept[data]).sum()))
    return left
