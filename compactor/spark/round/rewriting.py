"""Pass 2 on the executors: a task rewrites a group. And a small partition as a whole, which one task does from its beginning to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compactor.cleaner.passes.lanes import Lanes
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.local.budget import Grant
from compactor.local.staging import Staging
from compactor.model.plan import CompactionFailure, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.ports import WorkStats
from compactor.round.rewrite import Execution, Written
from compactor.spark.cluster.executor import Cost, Shared, gate_of, local_worker, tier_of, workplace
from compactor.spark.round.exchange import StoredSurvivors, decode_verdicts, read_scratch
from compactor.spark.round.gate import Sample, decode_fates, seed_of


@dataclass(frozen=True)
class ToRewrite:
    """A group for pass 2, with the metadata and the survivors of its sources, in order. ``sample``: the gate's keys, if any are dirty."""

    task: CompactionTask
    sources: tuple[RemoteLogSegmentMetadata, ...]
    survivors: tuple[ScratchObject, ...]
    sample: ScratchObject | None = None


def rewrite_group(shared: Shared, item: ToRewrite, cost: Cost) -> CompactionReceipt | CompactionFailure:
    """One group's new segment, uploaded under the announced id. Raises BadData, StoreError, OutOfBudget, GateFailed."""
    with workplace(shared, cost) as staging, Lanes(1) as lanes:
        stats = WorkStats()
        receipt = _Group(shared, item, staging, lanes, stats).work_on(item.task)
        cost.gate_coverage, cost.sidecar_bytes = stats.gate_coverage, stats.sidecar_bytes_written
        return receipt


class _Group(Execution):
    """An execution that knows the sources of one group only, and their survivors from the scratch prefix."""

    def __init__(self, shared: Shared, item: ToRewrite, staging: Staging, lanes: Lanes, stats: WorkStats) -> None:
        super().__init__(local_worker(shared, staging, stats), shared.plan, item.sources, lanes)
        survivors = StoredSurvivors(shared.plan.next_dirty_offset - 1)
        store = tier_of(shared.settings).ports.control
        fates = []
        for ordinal, (metadata, stored) in enumerate(zip(item.sources, item.survivors, strict=True)):
            source = self.opened(ordinal, metadata)
            arrays = read_scratch(store, stored)
            verdicts = decode_verdicts(arrays, len(source.table))
            survivors.add(source, verdicts, arrays)
            self._sources.append(source)
            self._verdicts.append(verdicts)
            if shared.gate_bits:
                fates.append(decode_fates(arrays, len(source.table)))
        self._survivors = survivors
        parts = [read_scratch(store, item.sample)] if shared.gate_bits and item.sample else []
        self._judge = gate_of(shared, self._sources, fates, Sample.of(parts, seed_of(shared.plan), max(1, shared.gate_bits)), full=True)

    def _rewrite(self, task: CompactionTask, members: tuple[int, ...], grant: Grant, folder: Path) -> Written:
        written = super()._rewrite(task, members, grant, folder)
        if self._judge is not None:
            try:
                report = self._judge.check(
                    self._sources,
                    written.cleaned.paths,
                    end_offset=task.end_offset,
                    mapped=lambda source: self.mapped(source, written.grant),
                )
            except BaseException:
                written.grant.release()
                raise
            self._worker.stats.gate_coverage = report.coverage
        return written


@dataclass(frozen=True)
class ToClean:
    """All that is left to do of one partition's plan, for one executor."""

    shared: Shared
    tasks: tuple[CompactionTask, ...]
    live: tuple[RemoteLogSegmentMetadata, ...]


def clean_partition(item: ToClean, cost: Cost) -> list[CompactionReceipt | CompactionFailure]:
    """What a local worker would do, on an executor. Raises BadData, StoreError, OutOfBudget."""
    shared, stats = item.shared, WorkStats()
    with workplace(shared, cost) as staging:
        outcomes = list(local_worker(shared, staging, stats)(shared.plan, item.tasks, _Detached(shared, item.live)))
    cost.map_entries += stats.map_entries
    cost.peak_map_bytes = max(cost.peak_map_bytes, stats.peak_map_bytes)
    cost.gate_coverage, cost.sidecar_bytes = stats.gate_coverage, stats.sidecar_bytes_written
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

    def check(self) -> None:
        """The driver folds on while it waits for this task."""
