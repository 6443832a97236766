"""The driver's index of pass 1, reuse of bundles that interrupted attempts left, and the tasks of pass 2.

    <scratch>/<run>/<epoch>-keys-..                    bundles of an announced plan
    <scratch>/scouted-<now>-<kin>/<attempt>/keys-..    bundles of a plan that was not announced yet; no record names them

*kin* is a digest of everything that determines rows and verdicts, except *now*. The time of the interrupted attempt is reused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Final

import numpy as np

from bloom.sidecar import Sidecar
from compactor.cleaner.disk_map import KEY_ROW_BYTES
from compactor.cleaner.gate.batch_checks import BatchTransactionOutcomes, transaction_outcomes_by_source
from compactor.cleaner.gate.gate import Gate
from compactor.cleaner.gate.parser import GATE_ROW_BYTES
from compactor.cleaner.keys import count_keyless_rows
from compactor.cleaner.retention import (
    CleanedChunkCache,
    TransactionVerdicts,
    find_txn_outcomes,
    transaction_verdicts_by_source,
)
from compactor.cleaner.rewrite import NO_BYTES, substitute_segment
from compactor.cleaner.source import SourceSegment
from compactor.cleaner.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.control.logs import PartitionLog
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.errors import BadData, StoreError
from compactor.features.spark.exchange import (
    ExpectedRecordSums,
    PassOneResultOfSegment,
    PassOneResultOfSegmentBundle,
    ScratchObjectPart,
    SparseTransactionOutcomes,
    StoredGateRows,
    StoredKeyRows,
    StoredSurvivors,
    create_checking_gate,
    decode_bundle_result,
    decode_transaction_outcomes,
    decode_transaction_verdicts,
    is_scratch_kind,
    merge_row_number_ranges,
    plan_segment_bundles,
    read_scratch_arrays,
    read_tail,
)
from compactor.features.spark.jobs import RoundJobRunner, RoundTaskSettings, create_local_worker, open_task_staging, open_task_tier
from compactor.features.spark.pass_one import (
    GATE_PREFIX,
    KEYS_PREFIX,
    GateInputOfAllHashRanges,
    InputOfAllHashRangeTasks,
    SegmentForWritingSurvivors,
    SegmentToReadInPassOne,
    SparseTransactionVerdicts,
    SurvivorBundle,
    read_bundle,
)
from compactor.local.budget import DiskSpaceReservation
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask, KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, NOT_CONTROL
from compactor.records.rows import parse_records
from compactor.round.drive import SCOUTED, scratch_key_prefix
from compactor.round.pass_two import PlanExecution
from compactor.round.ports import Costs, Run, Session
from compactor.round.sources import StagedSegmentReader
from compactor.storage.port import ObjectInfo, ObjectStore

# ---- pass 2: one task rewrites a group of a spread round, another cleans a whole small partition -------------------------------


@dataclass(frozen=True)
class SegmentGroupRewriteWork:
    """Pass 2 of one group (neighbouring segments that become one).

    survivors: in the order of ``sources``.
    judged: location of the gate's sums; None if nothing is dirty.
    """

    task: CompactionTask
    sources: tuple[RemoteLogSegmentMetadata, ...]
    survivors: tuple[ScratchObjectPart | ScratchObject, ...]
    judged: ScratchObjectPart | ScratchObject | None = None


@dataclass(frozen=True)
class StoredPassOneResults:
    """Results of pass 1 for one group, read from scratch objects."""

    reading: StagedSegmentReader
    sources: Sequence[SourceSegment]
    verdicts: Sequence[TransactionVerdicts]
    survivors: StoredSurvivors
    gate: Gate | None
    cleaned_chunk_cache: CleanedChunkCache = field(default_factory=lambda: CleanedChunkCache(0))
    second_reader: None = None

    @contextmanager
    def open_segment(self, ordinal: int, reservation: DiskSpaceReservation | None) -> Iterator[tuple[SourceSegment, TransactionVerdicts]]:
        with self.reading.memory_map_segment(self.sources[ordinal], reservation):
            yield self.sources[ordinal], self.verdicts[ordinal]

    def part_of_segment(self, ordinal: int) -> None:
        """Return None: ``open_segment`` opens the whole segment."""


def rewrite_group(shared: RoundTaskSettings, item: SegmentGroupRewriteWork, cost: Costs) -> CompactionReceipt | CompactionFailure:
    """Rewrite one group and upload it under the task's id. Raises BadData, StoreError, OutOfBudget; GateFailed if the gate rejects the
    output.
    """
    with open_task_staging(shared, cost) as staging, WorkerThreads(1) as workers:
        used, reading = Costs(), shared.open_segments(staging, item.sources)
        answers = _read_group_results(shared, item, reading)
        execution = PlanExecution(create_local_worker(shared, staging), shared.plan, reading, workers, answers, used)
        receipt = execution.rewrite_and_upload(item.task)
        cost.sidecar_bytes = used.sidecar_bytes
        return receipt


def _read_group_results(shared: RoundTaskSettings, item: SegmentGroupRewriteWork, reader: StagedSegmentReader) -> StoredPassOneResults:
    survivors = StoredSurvivors(shared.plan.next_dirty_offset - 1)
    store = open_task_tier(shared).ports.control
    sources, verdicts, outcomes = [], [], []
    for ordinal, stored in enumerate(item.survivors):
        with reader.open_segment(ordinal) as source:
            sources.append(source)
        arrays = read_scratch_arrays(store, stored)
        verdicts.append(decode_transaction_verdicts(arrays, len(source.table)))
        survivors.add_survivors_of_segment(source, verdicts[-1], arrays)
        if shared.gate:
            outcomes.append(decode_transaction_outcomes(arrays, len(source.table)))
    gate = None
    if shared.gate:
        judged = ExpectedRecordSums.from_arrays(read_scratch_arrays(store, item.judged)) if item.judged else None
        gate = create_checking_gate(shared.plan, shared.hash_key, sources, outcomes, judged)
    return StoredPassOneResults(reader, sources, verdicts, survivors, gate)


@dataclass(frozen=True)
class PartitionCleaningWork:
    """Unfinished tasks of a small partition. snapshot: producer snapshot of the last segment, if the driver has read it."""

    shared: RoundTaskSettings
    tasks: tuple[CompactionTask, ...]
    live: tuple[RemoteLogSegmentMetadata, ...]
    snapshot: bytes = b""


@dataclass(frozen=True)
class KeylessCountWork:
    """Count of a small partition's dirty records without a key, for a draft plan."""

    shared: RoundTaskSettings
    live: tuple[RemoteLogSegmentMetadata, ...]


def count_partition_keyless(item: KeylessCountWork, cost: Costs) -> KeylessRecords:
    """Raises BadData, StoreError, OutOfBudget."""
    plan = item.shared.plan
    with open_task_staging(item.shared, cost) as staging:
        return _count_keyless_records(item.shared.open_segments(staging, item.live), plan.first_dirty_offset, plan.end_offset)


def _count_keyless_records(reader: StagedSegmentReader, first_dirty: int, end: int) -> KeylessRecords:
    """Committed records up to ``end`` (exclusive)."""
    found, outcomes, buffers = KeylessRecords(), dict[int, int](), ReusableJobBuffers()
    for ordinal in reversed([n for n, segment in enumerate(reader.live) if segment.end_offset >= first_dirty]):
        with reader.open_segment(ordinal) as source:
            table = source.table
            aborted = find_txn_outcomes(table, outcomes) == ABORT
            wanted = (table.control == NOT_CONTROL) & ~aborted & (table.last_offset >= first_dirty)
            if source.base >= end:
                continue
            for first, last in source.split_by_kind():
                for chunk in source.read_chunks(first, last, wanted[first:last], reader.inflate_limit, buffers.bodies):
                    rows, _ = parse_records(table, chunk, buffers.rows, source.name)
                    found = found.plus(count_keyless_rows(rows.offset, rows.key_length, first_dirty))
        reader.staging.delete_cached_copies([reader.log_file_to_stage(ordinal)])
    return found


def clean_partition(item: PartitionCleaningWork, cost: Costs) -> list[CompactionReceipt | CompactionFailure]:
    """Run all tasks with a local worker. Raises BadData, StoreError, OutOfBudget."""
    shared, plan = item.shared, item.shared.plan
    known = {(item.live[-1].id, "snapshot"): item.snapshot} if item.snapshot else {}
    run = Run(PartitionState(topic=plan.topic, partition=plan.partition, incarnation=plan.incarnation, live=item.live))
    with open_task_staging(shared, cost) as staging, WorkerThreads(1) as threads:
        outcomes = list(create_local_worker(shared, staging, known).work(plan, item.tasks, Session(run, shared.scratch), threads))
    # The staging folder adds what was fetched itself.
    cost.add(replace(run.costs, bytes_fetched=0, peak_disk_bytes=0))
    return outcomes


# ---- the driver's index of live segments during pass 1 --------------------------------------------------------------------------
#
# rows wanted     keys of dirty segments and of all sources, as scratch objects
# headers only    other segments, because the end of a transaction may be in any of them
# sidecars        replace segments that are not read
# bundles         of an earlier attempt at the same plan replace their segments


SEGMENTS_PER_GATHER_TASK = 256
"""Number of segments without keys whose verdicts one task writes."""


@dataclass
class PassOneSegmentResults:
    """Results of pass 1 for the live segments.

    stand_ins: sidecars in place of reading a segment. Else at least the headers are read.
    bundles, gate_bundles: key rows and gate rows; one entry for each task.
    bundle_places: index in ``bundles`` of a segment's keys.
    """

    live: Sequence[RemoteLogSegmentMetadata]
    stand_ins: Mapping[str, Sidecar]
    segments: dict[str, PassOneResultOfSegment] = field(default_factory=dict)
    folded: dict[str, tuple[SourceSegment, TransactionVerdicts, BatchTransactionOutcomes]] = field(default_factory=dict)
    bundles: list[StoredKeyRows] = field(default_factory=list)
    gate_bundles: list[StoredGateRows] = field(default_factory=list)
    bundle_places: dict[str, int] = field(default_factory=dict)

    def read_segments(self, jobs: RoundJobRunner, ids_with_keys: AbstractSet[str], source_ids: AbstractSet[str] = frozenset()) -> None:
        """Read the missing keys of ``ids_with_keys``, and headers of ``source_ids`` (to be rewritten) and of all segments without a
        sidecar. A segment may be read again for its keys. Raises BadData, StoreError, OutOfBudget.
        """
        items = []
        for segment in self.live:
            name = segment.id
            if name not in self.segments:
                if name in ids_with_keys or name in source_ids or name not in self.stand_ins:
                    items.append(SegmentToReadInPassOne(segment, name in ids_with_keys))
            elif name in ids_with_keys and not self.segments[name].has_key_rows and not self.segments[name].undecided:
                items.append(self._keyed_segment(segment))
        self._read_bundles(jobs, items, "")
        self._determine_transaction_outcomes()
        undecided = [segment for segment in self.live if segment.id in self.segments and self.segments[segment.id].undecided]
        self._read_bundles(jobs, [self._keyed_segment(segment) for segment in undecided], " with transactions")

    def add_bundle_unless_known(self, bundle: PassOneResultOfSegmentBundle) -> bool:
        """Return False, without adding it, if the index has the keys of one of its segments."""
        if any(segment.has_key_rows and segment.id in self.bundle_places for segment in bundle.segments):
            return False
        for segment in bundle.segments:
            if segment.has_key_rows:
                self.bundle_places[segment.id] = len(self.bundles)
            if segment.has_key_rows or segment.id not in self.bundle_places:
                self.segments[segment.id] = segment
        if bundle.keys is not None:
            self.bundles.append(bundle.keys)
        if bundle.gate is not None:
            self.gate_bundles.append(bundle.gate)
        return True

    def hash_range_input(self, source_ids: AbstractSet[str]) -> InputOfAllHashRangeTasks:
        """For survivors of ``source_ids``."""
        with_rows = [self.segments[segment.id] for segment in reversed(self.live) if segment.id in self.bundle_places]
        dirty = [
            (self.bundle_places[segment.id], segment) for segment in with_rows if self.bundles[self.bundle_places[segment.id]].dirty_rows
        ]
        return InputOfAllHashRangeTasks(
            tuple(self.bundles),
            merge_row_number_ranges(dirty),
            frozenset(self.bundle_places[name] for name in source_ids if name in self.bundle_places),
        )

    def gate_input(self) -> GateInputOfAllHashRanges:
        shown = [segment for segment in self.live if segment.id in self.bundle_places]
        bounds = [*(segment.start_offset for segment in shown), *(segment.end_offset + 1 for segment in shown[-1:])]
        return GateInputOfAllHashRanges(tuple(self.gate_bundles), np.array(bounds, np.int64))

    def plan_survivor_bundles(self, source_ids: AbstractSet[str]) -> list[SurvivorBundle]:
        """Bundles that have keys come first, then segments without keys."""
        of_bundle: dict[int, list[SegmentForWritingSurvivors]] = {}
        without: list[SegmentForWritingSurvivors] = []
        for segment in self.live:
            if segment.id in source_ids:
                place = self.bundle_places.get(segment.id)
                (without if place is None else of_bundle.setdefault(place, [])).append(self._segment_for_writing_survivors(segment.id))
        found = [SurvivorBundle(f"{place}", tuple(of_bundle[place]), self.bundles[place]) for place in sorted(of_bundle)]
        together = range(0, len(without), SEGMENTS_PER_GATHER_TASK)
        return found + [SurvivorBundle(f"headers-{n}", tuple(without[n : n + SEGMENTS_PER_GATHER_TASK]), None) for n in together]

    def count_keyless_records(self) -> KeylessRecords:
        return reduce(KeylessRecords.plus, (segment.keyless for segment in self.segments.values()), KeylessRecords())

    @property
    def scratch_keys(self) -> list[str]:
        return [bundle.key for bundle in self.bundles] + [bundle.key for bundle in self.gate_bundles]

    def _segment_for_writing_survivors(self, segment_id: str) -> SegmentForWritingSurvivors:
        indexed = self.segments[segment_id]
        _, verdicts, outcomes = self.folded[segment_id]
        places = indexed.batches, indexed.places
        return SegmentForWritingSurvivors(
            indexed, SparseTransactionVerdicts(*places, verdicts), SparseTransactionOutcomes(*places, outcomes)
        )

    def _keyed_segment(self, segment: RemoteLogSegmentMetadata) -> SegmentToReadInPassOne:
        if segment.id not in self.folded:
            return SegmentToReadInPassOne(segment, True)
        known = self._segment_for_writing_survivors(segment.id)
        return SegmentToReadInPassOne(segment, True, known.verdicts, known.outcomes)

    def _read_bundles(self, jobs: RoundJobRunner, items: Sequence[SegmentToReadInPassOne], description: str) -> None:
        row_bytes = KEY_ROW_BYTES + (GATE_ROW_BYTES if jobs.shared.gate else 0)
        runs = plan_segment_bundles([item.metadata for item in items], jobs.cluster.task_slots, jobs.shared.disk_budget_bytes, row_bytes)
        what = f"pass 1, keys of {len(items)} segments{description}, in {len(runs)} bundles"
        for result in jobs.run_task_per_item(what, read_bundle, [tuple(reversed(items[begin:end])) for begin, end in runs]):
            self.add_bundle_unless_known(result[1])

    def _determine_transaction_outcomes(self) -> None:
        sources = list(self._live_segment_headers())
        both = zip(sources, transaction_verdicts_by_source(sources), transaction_outcomes_by_source(sources, {}), strict=True)
        self.folded = {source.name: (source, verdicts, outcomes) for source, verdicts, outcomes in both}

    def _live_segment_headers(self) -> Iterator[SourceSegment]:
        for ordinal, segment in enumerate(self.live):
            place = (ordinal, segment.id, segment.start_offset, segment.end_offset + 1, segment.mtime_ms)
            found = self.segments.get(segment.id)
            if found is None:
                yield substitute_segment(*place, self.stand_ins[segment.id])
            else:
                yield SourceSegment(*place, NO_BYTES, found.table, txn_entries=found.txn_entries)


_SCOUTED: Final = re.compile(rf"({SCOUTED}(\d+)-[0-9a-f]+/).+")


def draft_scratch_prefix(log: PartitionLog, plan: CompactionPlan, live_segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    """Before the plan is recorded. Attempts at the same plan share it."""
    below = " ".join(segment.id for segment in live_segments if segment.start_offset < plan.end_offset)
    facts = (plan.fingerprint, plan.policy.model_dump_json(), plan.vector, plan.first_dirty_offset, plan.end_offset, below)
    kin = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]
    return f"{scratch_key_prefix(log)}{SCOUTED}{plan.now_ms}-{kin}/"


def resumable_plan_time_ms(
    store: ObjectStore,
    log: PartitionLog,
    live_segments: Sequence[RemoteLogSegmentMetadata],
    now_ms: int,
    draft_at: Callable[[int], CompactionPlan | None],
) -> int:
    """Newest time whose plan would read exactly the same as an interrupted pass 1, whose results can then be reused; else ``now_ms``.

    :param draft_at: returns the plan that would be made at a time, or None.
    """
    prefix = scratch_key_prefix(log)
    found = (
        _SCOUTED.fullmatch(info.key.removeprefix(prefix))
        for info in store.list(f"{prefix}{SCOUTED}")
        if is_scratch_kind(KEYS_PREFIX, info.key)
    )
    places = sorted({(int(match[2]), f"{prefix}{match[1]}") for match in found if match and int(match[2]) <= now_ms}, reverse=True)
    for at_ms, place in places:
        plan = draft_at(at_ms)
        # With other segments or settings, deletions could be due at that time that are not due now.
        if plan is not None and draft_scratch_prefix(log, plan, live_segments) == place:
            return at_ms
    return now_ms


def list_stored_results(store: ObjectStore, prefix: str) -> list[ObjectInfo]:
    return [info for info in store.list(prefix) if is_scratch_kind(KEYS_PREFIX, info.key) or is_scratch_kind(GATE_PREFIX, info.key)]


def take_leftover_bundles(jobs: RoundJobRunner, log: PartitionLog, round_prefix: str) -> list[ObjectInfo]:
    """Results of the same round (below ``round_prefix``) are returned, those of other rounds deleted. Only the leader may call it."""
    found = list(jobs.control.list(f"{scratch_key_prefix(log)}{SCOUTED}"))
    jobs.delete_scratch_objects([info.key for info in found if not info.key.startswith(round_prefix)])
    return [info for info in found if info.key.startswith(round_prefix)]


def adopt_leftover_bundles(jobs: RoundJobRunner, index: PassOneSegmentResults, leftovers: Sequence[ObjectInfo]) -> RoundJobRunner:
    """Add matching results to ``index``. Return a job runner with as many hash ranges as they have."""
    for info in leftovers:
        if not is_scratch_kind(KEYS_PREFIX, info.key):
            continue
        try:
            bundle = decode_bundle_result(read_tail(jobs.control, info.key, info.size), info.key, info.size)
        except (BadData, StoreError):
            continue  # damaged, or its writer lives and has deleted it
        shared = jobs.shared
        if bundle.keys is None or (bundle.gate is not None) != shared.gate or (index.bundles and bundle.keys.ranges != shared.ranges):
            continue
        if index.add_bundle_unless_known(bundle):
            jobs = replace(jobs, shared=replace(shared, ranges=bundle.keys.ranges))
    return jobs
