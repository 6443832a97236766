"""A Worker (pipeline.ports) whose work is done by Spark's executors: map_engine = "spark".

    headers and keys of each segment -> transactions folded here -> keys of the rest -> ranges answered, survivors gathered
        -> groups rewritten and uploaded, a receipt each

The exchange (16 bytes a record, the answers in Spark's shuffle, the survivors) lies in the partition's scratch prefix. The driver sees
headers that decide about transactions, and otherwise kilobytes. Every result is the same as the local engine's, byte for byte (I7).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from compactor.cleaner.gate import GateFailed
from compactor.cleaner.gate_batches import fates_of
from compactor.cleaner.source import SourceSegment
from compactor.cleaner.transactions import fold
from compactor.config import Cleaner
from compactor.errors import CompactorError, Fenced, OutOfBudget
from compactor.metadata.records import ScratchObject
from compactor.metadata.state import PartitionState
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.pipeline.ports import WorkSession
from compactor.pipeline.publication import delete_keys
from compactor.pipeline.skipping import filter_record, keys_to_come
from compactor.pipeline.staging import group_room
from compactor.pipeline.tier import Tier
from compactor.pipeline.worker import WorkStats
from compactor.records.batches import read_only
from compactor.spark.executor import Cost, Filters, Shared
from compactor.spark.gate import SparseFates, sample_bits
from compactor.spark.jobs import Cluster, Outcome, VersionDiffers, Watch, Work, attempt
from compactor.spark.mapping import (
    SAMPLE,
    Indexed,
    SparseVerdicts,
    ToGather,
    ToIndex,
    answer_range,
    gather_sample,
    gather_survivors,
    index_segment,
)
from compactor.spark.rewriting import ToRewrite, rewrite_group

if TYPE_CHECKING:
    from pyspark import RDD

ROW_KEY_BYTES: Final = 20
MOST_SET_BYTES: Final = 128 << 20
MOST_RANGES: Final = 4096


_NOTHING: Final = read_only(np.empty(0, np.uint8))


@dataclass(frozen=True)
class SparkWorker:
    """``stats`` is filled in with what the round cost, which is added to ``cost``."""

    cluster: Cluster
    tier: Tier
    cleaner: Cleaner
    hash_key: bytes
    stats: WorkStats = field(default_factory=WorkStats)
    cost: Cost = field(default_factory=Cost)
    watch: Watch = field(default_factory=Watch)

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        cost = Cost()
        try:
            yield from _Round(self, plan, tasks, session, cost).run()
        except VersionDiffers as error:
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=error.message)
        except GateFailed as refused:
            yield CompactionFailure(run_id=plan.run_id, group=-1, kind="gate", message=refused.message)
        finally:
            note(self.stats, cost)
            self.cost.add(cost)


def note(stats: WorkStats, cost: Cost) -> None:
    """What executors used, as a round reports it."""
    stats.bytes_fetched = cost.bytes_fetched
    stats.peak_disk_bytes = cost.peak_disk_bytes
    stats.peak_map_bytes = cost.peak_map_bytes
    stats.map_entries = cost.map_entries
    stats.gate_coverage = cost.gate_coverage
    stats.sidecar_bytes_written = cost.sidecar_bytes


def shared_by(
    cluster: Cluster, tier: Tier, cleaner: Cleaner, hash_key: bytes, plan: CompactionPlan, scratch: str, state: PartitionState
) -> Shared:
    """A round's settings as its tasks get them; budgets are shared out among the tasks that run on one executor at a time."""
    each = cluster.slots_per_executor
    records = sum(max(segment.records, 1) for segment in state.live)
    disk = 3 * cleaner.segment_bytes if cleaner.disk_budget_bytes == "auto" else cleaner.disk_budget_bytes // each
    budget = max(cleaner.map_budget_bytes // each, 1 << 16)
    sets = -(-records * ROW_KEY_BYTES // min(budget, MOST_SET_BYTES))
    ranges = tier.settings.spark.partitions or min(MOST_RANGES, max(1, sets, cluster.slots))
    bits = sample_bits(records, budget) if cleaner.verify_before_publish else 0
    filters = None
    if cleaner.bloom:
        filters = Filters(tier.open(state.name).prefix, filter_record(state.runs), keys_to_come(cleaner, state.runs, 0))
    return Shared(tier.settings, hash_key, plan, scratch, ranges, budget, disk, bits, filters)


@dataclass(frozen=True)
class _Known:
    """What pass 1 found out about one segment."""

    indexed: Indexed
    verdicts: SparseVerdicts
    fates: SparseFates

    def to_gather(self, metadata: RemoteLogSegmentMetadata) -> ToGather:
        return ToGather(metadata, self.verdicts, self.indexed.buckets, self.fates)


class _Round:
    def __init__(
        self, worker: SparkWorker, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession, cost: Cost
    ) -> None:
        self._worker = worker
        self._cost = cost
        self._plan = plan
        self._tasks = tasks
        self._session = session
        self._live = session.state.live
        self._name = str(session.state.name)
        epoch = session.state.leader.epoch if session.state.leader else plan.leader_epoch
        # An attempt's objects have its epoch in their names: a zombie's deletions are its own affair.
        scratch = session.scratch_key(f"{epoch}-")
        self._shared = shared_by(worker.cluster, worker.tier, worker.cleaner, worker.hash_key, plan, scratch, session.state)

    @property
    def _is_mapped(self) -> bool:
        """Whether there is a dirty range at all."""
        return self._plan.first_dirty_offset < self._plan.end_offset

    def run(self) -> Iterator[CompactionReceipt | CompactionFailure]:
        self._check_disk()
        stored = {_name(item): item for item in self._session.survivors}
        by_id = {segment.id: segment for segment in self._live}
        sources = [by_id[name] for task in self._tasks for name in task.sources]
        wanted = {source.id for source in sources} | ({SAMPLE} if self._is_mapped and self._shared.gate_bits else set())
        if not wanted <= stored.keys():
            stored = self._map(sources)
        items = [
            ToRewrite(task, tuple(by_id[name] for name in task.sources), tuple(stored[name] for name in task.sources), stored.get(SAMPLE))
            for task in sorted(self._tasks, key=lambda task: -sum(by_id[name].size_bytes for name in task.sources))
        ]
        yield from (result for _, result in self._each(f"pass 2, {len(items)} groups rewritten", rewrite_group, items))

    def _check_disk(self) -> None:
        """Raises OutOfBudget before anything is done where one task's share of the disk is too small for it."""
        by_id, share = {segment.id: segment for segment in self._live}, self._shared.disk_budget_bytes
        interval = self._plan.policy.index_interval_bytes
        need = max(group_room([by_id[name] for name in task.sources], interval) for task in self._tasks)
        if need > share:
            each = self._worker.cluster.slots_per_executor
            raise OutOfBudget(
                f"a group of {self._name} needs {need} bytes of local disk; of the disk budget each of {each} tasks at a time has {share}",
                hint=f"Set disk_budget_bytes to at least {need * each}, lower segment_bytes, or run fewer tasks at a time",
            )

    def _map(self, sources: Sequence[RemoteLogSegmentMetadata]) -> dict[str, ScratchObject]:
        """Pass 1 and the second stage; recorded, so that nobody has to do it again."""
        keys: list[str] = []
        survivors: dict[str, ScratchObject] = {}
        recorded = False
        try:
            indexed = self._indexed({source.id for source in sources}, keys)
            survivors.update(self._sampled(indexed))
            survivors.update(self._gathered(sources, indexed))
            self._session.store_survivors(list(survivors.values()))
            recorded = True
            return survivors
        finally:
            self._forget(keys if recorded else [*keys, *(stored.key for stored in survivors.values())])

    def _indexed(self, wanted: set[str], written: list[str]) -> dict[str, _Known]:
        """Every live segment: outcomes of transactions may be told anywhere. Keys of the sources, and of everything dirty."""
        plan = self._plan
        items = []
        for segment in self._live:
            dirty = segment.end_offset >= plan.first_dirty_offset and segment.start_offset < plan.end_offset
            items.append(ToIndex(segment, self._is_mapped and (dirty or segment.id in wanted)))
        found: dict[int, Indexed] = {}

        def note(place: int, result: Indexed) -> None:
            found[place] = result
            written.extend(part.key for part in (result.buckets, result.sample) if part)

        for place, result in self._each(f"pass 1, keys of {len(items)} segments", index_segment, items):
            note(place, result)
        verdicts, fates = _outcomes(self._live, [found[place] for place in range(len(items))])
        again = [place for place in sorted(found) if found[place].undecided]
        second = [ToIndex(items[place].metadata, True, verdicts[place], fates[place]) for place in again]
        for place, result in self._each(f"pass 1, keys of {len(again)} segments with transactions", index_segment, second):
            note(again[place], result)
        return {segment.id: _Known(found[place], verdicts[place], fates[place]) for place, segment in enumerate(self._live)}

    def _sampled(self, indexed: dict[str, _Known]) -> dict[str, ScratchObject]:
        """The keys that the gate looks up, in one object."""
        parts = tuple(known.indexed.sample for known in indexed.values() if known.indexed.sample)
        if not parts:
            return {}
        step = f"gate, a sample of the keys of {len(parts)} segments"
        ((_, sample),) = self._each(step, gather_sample, [parts])
        return {SAMPLE: sample}

    def _gathered(self, sources: Sequence[RemoteLogSegmentMetadata], indexed: dict[str, _Known]) -> Iterator[tuple[str, ScratchObject]]:
        """The second stage: ranges are answered newest first, and each segment's answers come together through Spark's shuffle."""
        ids = {source.id for source in sources}
        with_rows = [segment for segment in self._live if indexed[segment.id].indexed.buckets is not None]
        without = [source for source in sources if indexed[source.id].indexed.buckets is None]
        segments = tuple(indexed[segment.id].to_gather(segment) for segment in (*with_rows, *without))
        answering = _Answer(self._shared, segments, frozenset(place for place, s in enumerate(segments) if s.metadata.id in ids))
        ranges = self._shared.ranges if with_rows else 1
        step = f"offset map, {ranges} ranges of keys over {len(segments)} segments"
        answers = self._worker.cluster.exchanged(ranges, answering, len(segments))
        for place, stored in self._run(step, answers, _Gather(self._shared, segments), len(answering.places)):
            yield segments[place].metadata.id, stored

    def _each(self, step: str, work: Callable[..., Any], items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """One task per item; (place of the item, result) as they come. Raises the first error that an item met."""
        if items:
            yield from self._run(step, self._worker.cluster.items(items), _Bound(work, self._shared), len(items))

    def _run(self, step: str, rdd: RDD[tuple[int, Any]], work: Work, count: int) -> Iterator[tuple[int, Any]]:
        worker, check = self._worker, self._session.check
        what = f"{self._name}: {step}"
        for outcome in worker.cluster.outcomes(what, rdd, work, count, plan=self._plan, check=check, watch=worker.watch):
            self._cost.add(outcome.cost)
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, outcome.value

    def _forget(self, keys: Sequence[str]) -> None:
        """Deletes what this attempt wrote and nobody needs now, if it still leads; what stays is swept by `retire`."""
        if not keys:
            return
        try:
            self._session.check()
            delete_keys(self._worker.tier.ports.control, keys)
        except Fenced:
            raise
        except CompactorError as error:
            logging.getLogger(__name__).info("scratch objects stay until `retire`: %s", error)


def _name(stored: ScratchObject) -> str:
    """The segment whose survivors these are, or SAMPLE."""
    return stored.key.rpartition("survivors-")[2] if "survivors-" in stored.key else SAMPLE


@dataclass(frozen=True)
class _Bound:
    """A task's function with what all tasks share."""

    work: Callable[..., Any]
    shared: Shared

    def __call__(self, place: int, item: Any, cost: Cost) -> Any:
        return self.work(self.shared, item, cost)


@dataclass(frozen=True)
class _Answer:
    """One range -> (place of a segment, its answer). Every wanted segment gets one, be it empty; an error goes to all of them."""

    shared: Shared
    segments: tuple[ToGather, ...]
    places: frozenset[int]

    def __call__(self, number: int) -> Iterator[tuple[int, bytes | Outcome]]:
        pairs: list[tuple[int, bytes]] = []
        outcome = attempt(-1, lambda cost: pairs.extend(answer_range(self.shared, number, self.segments, cost)), self.shared.plan)
        if outcome.error is not None:
            yield from ((place, outcome) for place in sorted(self.places))
            return
        if self.places:
            yield min(self.places), outcome
        yield from ((place, b"") for place in sorted(self.places))
        yield from ((place, answer) for place, answer in pairs if place in self.places)


@dataclass(frozen=True)
class _Gather:
    """All answers for one segment -> its survivors, written down."""

    shared: Shared
    segments: tuple[ToGather, ...]

    def __call__(self, place: int, answers: Iterable[bytes | Outcome], cost: Cost) -> ScratchObject:
        return gather_survivors(self.shared, self.segments[place], _bytes_of(answers, cost), cost)


def _bytes_of(answers: Iterable[bytes | Outcome], cost: Cost) -> Iterator[bytes]:
    for answer in answers:
        if isinstance(answer, bytes):
            yield answer
        else:
            cost.add(answer.cost)
            if answer.error is not None:
                raise answer.error


def _outcomes(live: Sequence[RemoteLogSegmentMetadata], indexed: Sequence[Indexed]) -> tuple[list[SparseVerdicts], list[SparseFates]]:
    """The cleaner's fold and the gate's, over the batches that decide; batches of no transaction say nothing to either."""
    sources = [
        SourceSegment(
            place, metadata.id, metadata.start_offset, metadata.end_offset + 1, metadata.mtime_ms, _NOTHING, found.table,
            txn_entries=found.txn_entries,
        )
        for place, (metadata, found) in enumerate(zip(live, indexed, strict=True))
    ]  # fmt: skip
    verdicts = [SparseVerdicts(found.batches, found.places, verdict) for found, verdict in zip(indexed, fold(sources), strict=True)]
    fates = [SparseFates(found.batches, found.places, fate) for found, fate in zip(indexed, fates_of(sources, {}), strict=True)]
    return verdicts, fates
