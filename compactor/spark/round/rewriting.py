"""Pass 2 on the executors: a task rewrites a group. And a small partition as a whole, which one task does from its beginning to its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from compactor.cleaner.gate.judge import Gate
from compactor.cleaner.passes.chunks import FinishedChunks
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.local.budget import Grant
from compactor.model.plan import CompactionFailure, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.ports import WorkStats
from compactor.round.rewrite import Execution
from compactor.round.sources import Reading
from compactor.spark.cluster.executor import Cost, Shared, local_worker, tier_of, workplace
from compactor.spark.round.exchange import ScratchPart, StoredSurvivors, decode_verdicts, read_scratch
from compactor.spark.round.gate import Judged, decode_fates, judging


@dataclass(frozen=True)
class ToRewrite:
    """A group for pass 2, with the metadata and the survivors of its sources, in order.

    ``judged``: what the gate says must be left, if anything is dirty.
    """

    task: CompactionTask
    sources: tuple[RemoteLogSegmentMetadata, ...]
    survivors: tuple[ScratchPart | ScratchObject, ...]
    judged: ScratchPart | ScratchObject | None = None


@dataclass(frozen=True)
class StoredAnswers:
    """Pass 1 as the second stage wrote it down, of the sources of one group (Answers of round.rewrite)."""

    reading: Reading
    sources: Sequence[SourceSegment]
    verdicts: Sequence[Verdicts]
    survivors: StoredSurvivors
    gate: Gate | None
    finished: FinishedChunks = field(default_factory=lambda: FinishedChunks(0))
    witness: None = None

    @contextmanager
    def source(self, ordinal: int, grant: Grant | None) -> Iterator[tuple[SourceSegment, Verdicts]]:
        with self.reading.mapped(self.sources[ordinal], grant):
            yield self.sources[ordinal], self.verdicts[ordinal]

    def part(self, ordinal: int) -> None:
        """Segments are read whole."""


def rewrite_group(shared: Shared, item: ToRewrite, cost: Cost) -> CompactionReceipt | CompactionFailure:
    """One group's new segment, uploaded under the announced id. Raises BadData, StoreError, OutOfBudget, GateFailed."""
    with workplace(shared, cost) as staging, Lanes(1) as lanes:
        stats, reading = WorkStats(), shared.reading(staging, item.sources)
        answers = _stored_answers(shared, item, reading)
        receipt = Execution(local_worker(shared, staging, stats), shared.plan, reading, lanes, answers).work_on(item.task)
        cost.sidecar_bytes = stats.sidecar_bytes_written
        return receipt


def _stored_answers(shared: Shared, item: ToRewrite, reading: Reading) -> StoredAnswers:
    survivors = StoredSurvivors(shared.plan.next_dirty_offset - 1)
    store = tier_of(shared).ports.control
    sources, verdicts, fates = [], [], []
    for ordinal, stored in enumerate(item.survivors):
        with reading.opened(ordinal) as source:
            sources.append(source)
        arrays = read_scratch(store, stored)
        verdicts.append(decode_verdicts(arrays, len(source.table)))
        survivors.add(source, verdicts[-1], arrays)
        if shared.gate:
            fates.append(decode_fates(arrays, len(source.table)))
    gate = None
    if shared.gate:
        judged = Judged.of(read_scratch(store, item.judged)) if item.judged else None
        gate = judging(shared.plan, shared.hash_key, sources, fates, judged)
    return StoredAnswers(reading, sources, verdicts, survivors, gate)


@dataclass(frozen=True)
class ToClean:
    """All that is left to do of one partition's plan, for one executor. ``snapshot``: of the last segment, where the driver has it."""

    shared: Shared
    tasks: tuple[CompactionTask, ...]
    live: tuple[RemoteLogSegmentMetadata, ...]
    snapshot: bytes = b""


def clean_partition(item: ToClean, cost: Cost) -> list[CompactionReceipt | CompactionFailure]:
    """What a local worker would do, on an executor. Raises BadData, StoreError, OutOfBudget."""
    shared, stats = item.shared, WorkStats()
    known = {(item.live[-1].id, "snapshot"): item.snapshot} if item.snapshot else {}
    with workplace(shared, cost) as staging:
        outcomes = list(local_worker(shared, staging, stats, known)(shared.plan, item.tasks, _Detached(shared, item.live)))
    cost.map_entries += stats.map_entries
    cost.peak_map_bytes = max(cost.peak_map_bytes, stats.peak_map_bytes)
    cost.gate_keys, cost.gate_disk_bytes, cost.sidecar_bytes = stats.gate_keys, stats.gate_disk_bytes, stats.sidecar_bytes_written
    return outcomes


class _Detached:
    """WorkSession of an executor: it knows what it was told, and the driver looks after the rest."""

    survivors: tuple[ScratchObject, ...] = ()

    def __init__(self, shared: Shared, live: tuple[RemoteLogSegmentMetadata, ...]) -> None:
        self.state = PartitionState(topic=shared.plan.topic, partition=shared.plan.partition, live=live)
        self._scratch = shared.scratch

    def scratch_key(self, name: str) -> str:
        return f"{self._scratch}{name}"

    def store_survivors(self, objects: Sequence[ScratchObject]) -> None:
        """Nothing to store: who takes this plan up again begins it again."""

    def check(self, *, waiting: bool = False) -> None:
        """The driver folds on while it waits for this task."""
