"""Tasks of pass 2: one rewrites a group of a spread round, another cleans a whole small partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from compactor.cleaner.gate.gate import Gate
from compactor.cleaner.keys.survivors import count_keyless_records_of_rows
from compactor.cleaner.passes.chunks import CleanedChunkCache
from compactor.cleaner.passes.outcomes import find_txn_outcomes_and_update_next_outcomes
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import TransactionVerdicts
from compactor.cleaner.passes.worker_threads import ReusableJobBuffers, WorkerThreads
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.local.budget import DiskSpaceReservation
from compactor.model.keyless import KeylessRecords
from compactor.model.plan import CompactionFailure, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, NOT_CONTROL
from compactor.records.rows import parse_records
from compactor.round.pass_two import PlanExecution
from compactor.round.ports import RoundCosts
from compactor.round.sources import StagedSegmentReader
from compactor.spark.cluster.executor import RoundTaskSettings, TaskCost, create_local_worker, open_staging_folder_of_task, open_task_tier
from compactor.spark.round.exchange import ScratchObjectPart, StoredSurvivors, decode_transaction_verdicts, read_scratch_arrays
from compactor.spark.round.gate_rows import ExpectedRecordSums, create_gate_checking_rewritten_groups, decode_transaction_outcomes


@dataclass(frozen=True)
class SegmentGroupRewriteWork:
    """Work of pass 2 on one group (neighbouring segments that become one).

    sources, survivors: metadata and stored survivors of the group's segments, in the same order.
    judged: location of the sums that the gate, an independent check, expects of the output; None if nothing is dirty.
    """

    task: CompactionTask
    sources: tuple[RemoteLogSegmentMetadata, ...]
    survivors: tuple[ScratchObjectPart | ScratchObject, ...]
    judged: ScratchObjectPart | ScratchObject | None = None


@dataclass(frozen=True)
class StoredPassOneResults:
    """Results of pass 1 for the source segments of one group, read from scratch objects for pass 2. Implements
    round.pass_two.SurvivorScanResultsForRewrite.
    """

    reading: StagedSegmentReader
    sources: Sequence[SourceSegment]
    verdicts: Sequence[TransactionVerdicts]
    survivors: StoredSurvivors
    gate: Gate | None
    cleaned_chunk_cache: CleanedChunkCache = field(default_factory=lambda: CleanedChunkCache(0))
    second_reader: None = None

    @contextmanager
    def open_segment(self, ordinal: int, reservation: DiskSpaceReservation | None) -> Iterator[tuple[SourceSegment, TransactionVerdicts]]:
        """Provide one source segment with its log mapped into memory, and its transaction verdicts (which batches are aborted, which may be
        discarded).

        :param ordinal: position of the segment in the group.
        """
        with self.reading.memory_map_segment(self.sources[ordinal], reservation):
            yield self.sources[ordinal], self.verdicts[ordinal]

    def part_to_read_of_segment(self, ordinal: int) -> None:
        """Return None, which means that ``open_segment`` opens the whole segment: Spark never reads only a part of one.

        :param ordinal: position of the segment in the group.
        """


def rewrite_group(shared: RoundTaskSettings, item: SegmentGroupRewriteWork, cost: TaskCost) -> CompactionReceipt | CompactionFailure:
    """Rewrite one group of segments into one segment, upload it under the id that the task names, and return the receipt or the failure.
    Raises BadData, StoreError, OutOfBudget; GateFailed if the independent check rejects the output.
    """
    with open_staging_folder_of_task(shared, cost) as staging, WorkerThreads(1) as workers:
        stats, reading = RoundCosts(), shared.open_segments(staging, item.sources)
        answers = _read_stored_pass_one_results(shared, item, reading)
        receipt = PlanExecution(create_local_worker(shared, staging, stats), shared.plan, reading, workers, answers).rewrite_and_upload(
            item.task
        )
        cost.sidecar_bytes = stats.sidecar_bytes_written
        return receipt


def _read_stored_pass_one_results(
    shared: RoundTaskSettings, item: SegmentGroupRewriteWork, reader: StagedSegmentReader
) -> StoredPassOneResults:
    """Read the batch headers of the group's source segments, and their stored survivors and transaction verdicts."""
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
        judged = ExpectedRecordSums.decode_expected_sums_from_arrays(read_scratch_arrays(store, item.judged)) if item.judged else None
        gate = create_gate_checking_rewritten_groups(shared.plan, shared.hash_key, sources, outcomes, judged)
    return StoredPassOneResults(reader, sources, verdicts, survivors, gate)


@dataclass(frozen=True)
class PartitionCleaningWork:
    """Tasks of a small partition's plan that are still to be run, for one executor. snapshot: producer snapshot of the last segment, if the
    driver has read it.
    """

    shared: RoundTaskSettings
    tasks: tuple[CompactionTask, ...]
    live: tuple[RemoteLogSegmentMetadata, ...]
    snapshot: bytes = b""


@dataclass(frozen=True)
class KeylessCountWork:
    """Small partition of whose dirty range an executor counts the records without a key. shared: its plan is a draft."""

    shared: RoundTaskSettings
    live: tuple[RemoteLogSegmentMetadata, ...]


def count_keyless_records_of_partition(item: KeylessCountWork, cost: TaskCost) -> KeylessRecords:
    """Return how many records of the draft plan's dirty range have no key. Raises BadData, StoreError, OutOfBudget."""
    plan = item.shared.plan
    with open_staging_folder_of_task(item.shared, cost) as staging:
        return _count_keyless_records(item.shared.open_segments(staging, item.live), plan.first_dirty_offset, plan.end_offset)


def _count_keyless_records(reader: StagedSegmentReader, first_dirty: int, end: int) -> KeylessRecords:
    """Read the segments from the newest to that of ``first_dirty``, and return how many of the committed records from ``first_dirty`` up to
    ``end`` (exclusive) have no key.  Raises BadData, StoreError, OutOfBudget.
    """
    found, outcomes, buffers = KeylessRecords(), dict[int, int](), ReusableJobBuffers()
    for ordinal in reversed([n for n, segment in enumerate(reader.live) if segment.end_offset >= first_dirty]):
        with reader.open_segment(ordinal) as source:
            table = source.table
            aborted = find_txn_outcomes_and_update_next_outcomes(table, outcomes) == ABORT
            wanted = (table.control == NOT_CONTROL) & ~aborted & (table.last_offset >= first_dirty)
            if source.base >= end:
                continue
            for first, last in source.split_batches_by_magic_and_compression():
                for chunk in source.read_chunks(first, last, wanted[first:last], reader.inflate_limit, buffers.bodies):
                    rows, _ = parse_records(table, chunk, buffers.rows, source.name)
                    found = found.plus(count_keyless_records_of_rows(rows.offset, rows.key_length, first_dirty))
        reader.staging.delete_cached_copies([reader.log_file_to_stage(ordinal)])
    return found


def clean_partition(item: PartitionCleaningWork, cost: TaskCost) -> list[CompactionReceipt | CompactionFailure]:
    """Run all tasks of a plan with a local worker on this executor, and return a receipt or failure for each. Raises BadData, StoreError,
    OutOfBudget.
    """
    shared, stats = item.shared, RoundCosts()
    known = {(item.live[-1].id, "snapshot"): item.snapshot} if item.snapshot else {}
    with open_staging_folder_of_task(shared, cost) as staging:
        outcomes = list(
            create_local_worker(shared, staging, stats, known)(shared.plan, item.tasks, _ExecutorRoundWorkerSession(shared, item.live))
        )
    cost.map_entries += stats.map_entries
    cost.peak_map_bytes = max(cost.peak_map_bytes, stats.peak_map_bytes)
    cost.gate_keys, cost.gate_coverage, cost.sidecar_bytes = stats.gate_keys, stats.gate_coverage, stats.sidecar_bytes_written
    return outcomes


class _ExecutorRoundWorkerSession:
    """Session that a worker on an executor gets in place of the driver's (RoundDriverServicesForWorker). It holds the partition's state as
    the driver has sent it, and never checks the leadership, because the driver does.
    """

    scratch_objects_of_earlier_survivor_scan: tuple[ScratchObject, ...] = ()

    def __init__(self, shared: RoundTaskSettings, live_segments: tuple[RemoteLogSegmentMetadata, ...]) -> None:
        plan = shared.plan
        self.state = PartitionState(topic=plan.topic, partition=plan.partition, incarnation=plan.incarnation, live=live_segments)
        self._scratch = shared.scratch

    def scratch_object_key(self, name: str) -> str:
        """Return the key of a scratch object of this attempt."""
        return f"{self._scratch}{name}"

    def record_scratch_objects_of_survivor_scan(self, objects: Sequence[ScratchObject]) -> None:
        """Do nothing: the survivors of a small partition are not stored, because an interrupted plan starts again from the beginning."""

    def raise_if_leadership_lost(self, *, caller_only_waits: bool = False) -> None:
        """Do nothing: the driver checks its leadership while it waits for this task."""
