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

from compactor.cleaner.source import SourceSegment
from compactor.cleaner.transactions import fold
from compactor.config import Cleaner
from compactor.errors import CompactorError, Fenced, OutOfBudget
from compactor.metadata.records import ScratchObject
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.pipeline.ports import WorkSession
from compactor.pipeline.publication import delete_keys
from compactor.pipeline.staging import group_room
from compactor.pipeline.tier import Tier
from compactor.pipeline.worker import WorkStats
from compactor.records.batches import read_only
from compactor.spark.executor import (
    Cost,
    Indexed,
    Shared,
    SparseVerdicts,
    ToGather,
    ToIndex,
    ToRewrite,
    answer_range,
    gather_survivors,
    index_segment,
    rewrite_group,
)
from compactor.spark.jobs import Cluster, Outcome, VersionDiffers, Watch, Work, attempt

if TYPE_CHECKING:
    from pyspark import RDD

ROW_KEY_BYTES: Final = 20
MOST_SET_BYTES: Final = 128 << 20
MOST_RANGES: Final = 4096


_NOTHING: Final = read_only(np.empty(0, np.uint8))


@dataclass(frozen=True)
class SparkWorker:
    """``stats`` and ``cost`` are filled in as the round goes."""

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
        try:
            yield from _Round(self, plan, tasks, session).run()
        except VersionDiffers as error:
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=error.message)
        finally:
            note(self.stats, self.cost)


def note(stats: WorkStats, cost: Cost) -> None:
    """What executors used, as a round reports it."""
    stats.bytes_fetched = cost.bytes_fetched
    stats.peak_disk_bytes = cost.peak_disk_bytes
    stats.peak_map_bytes = cost.peak_map_bytes
    stats.map_entries = cost.map_entries


def shared_by(cluster: Cluster, tier: Tier, cleaner: Cleaner, hash_key: bytes, plan: CompactionPlan, scratch: str, records: int) -> Shared:
    """A round's settings as its tasks get them; budgets are shared out among the tasks that run on one executor at a time."""
    each = cluster.slots_per_executor
    disk = 3 * cleaner.segment_bytes if cleaner.disk_budget_bytes == "auto" else cleaner.disk_budget_bytes // each
    budget = max(cleaner.map_budget_bytes // each, 1 << 16)
    sets = -(-records * ROW_KEY_BYTES // min(budget, MOST_SET_BYTES))
    ranges = tier.settings.spark.partitions or min(MOST_RANGES, max(1, sets, cluster.slots))
    return Shared(tier.settings, hash_key, plan, scratch, ranges, budget, budget, disk)


class _Round:
    def __init__(self, worker: SparkWorker, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession) -> None:
        self._worker = worker
        self._plan = plan
        self._tasks = tasks
        self._session = session
        self._live = session.state.live
        self._name = str(session.state.name)
        epoch = session.state.leader.epoch if session.state.leader else plan.leader_epoch
        # An attempt's objects have its epoch in their names: a zombie's deletions are its own affair.
        scratch = session.scratch_key(f"{epoch}-")
        records = sum(max(segment.records, 1) for segment in self._live)
        self._shared = shared_by(worker.cluster, worker.tier, worker.cleaner, worker.hash_key, plan, scratch, records)

    def run(self) -> Iterator[CompactionReceipt | CompactionFailure]:
        self._check_disk()
        stored = {item.key.rpartition("survivors-")[2]: item for item in self._session.survivors}
        by_id = {segment.id: segment for segment in self._live}
        sources = [by_id[name] for task in self._tasks for name in task.sources]
        if any(source.id not in stored for source in sources):
            stored = {**stored, **self._map(sources)}
        items = [
            ToRewrite(task, tuple(by_id[name] for name in task.sources), tuple(stored[name] for name in task.sources))
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
            survivors.update(self._gathered(sources, indexed))
            self._session.store_survivors(list(survivors.values()))
            recorded = True
            return survivors
        finally:
            self._forget(keys if recorded else [*keys, *(stored.key for stored in survivors.values())])

    def _indexed(self, wanted: set[str], written: list[str]) -> dict[str, tuple[Indexed, SparseVerdicts]]:
        """Every live segment: outcomes of transactions may be told anywhere. Keys of the sources, and of everything dirty."""
        plan = self._plan
        mapped = plan.first_dirty_offset < plan.end_offset
        items = []
        for segment in self._live:
            dirty = segment.end_offset >= plan.first_dirty_offset and segment.start_offset < plan.end_offset
            items.append(ToIndex(segment, mapped and (dirty or segment.id in wanted)))
        found: dict[int, Indexed] = {}
        for place, result in self._each(f"pass 1, keys of {len(items)} segments", index_segment, items):
            found[place] = result
            if result.buckets:
                written.append(result.buckets.key)
        verdicts = _verdicts(self._live, [found[place] for place in range(len(items))])
        again = [place for place in sorted(found) if found[place].undecided]
        second = [ToIndex(items[place].metadata, True, verdicts[place]) for place in again]
        for place, result in self._each(f"pass 1, keys of {len(again)} segments with transactions", index_segment, second):
            found[again[place]] = result
            written.append(result.buckets.key)
        return {segment.id: (found[place], verdicts[place]) for place, segment in enumerate(self._live)}

    def _gathered(
        self, sources: Sequence[RemoteLogSegmentMetadata], indexed: dict[str, tuple[Indexed, SparseVerdicts]]
    ) -> Iterator[tuple[str, ScratchObject]]:
        """The second stage: ranges are answered newest first, and each segment's answers come together through Spark's shuffle."""
        ids = {source.id for source in sources}
        with_rows = [segment for segment in self._live if indexed[segment.id][0].buckets is not None]
        without = [source for source in sources if indexed[source.id][0].buckets is None]
        segments = tuple(ToGather(s, indexed[s.id][1], indexed[s.id][0].buckets) for s in (*with_rows, *without))
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
            worker.cost.add(outcome.cost)
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


def _verdicts(live: Sequence[RemoteLogSegmentMetadata], indexed: Sequence[Indexed]) -> list[SparseVerdicts]:
    """The cleaner's fold over the batches that decide; batches of no transaction say nothing to it."""
    sources = [
        SourceSegment(
            place, metadata.id, metadata.start_offset, metadata.end_offset + 1, metadata.mtime_ms, _NOTHING, found.table,
            txn_entries=found.txn_entries,
        )
        for place, (metadata, found) in enumerate(zip(live, indexed, strict=True))
    ]  # fmt: skip
    return [SparseVerdicts(found.batches, found.places, verdict) for found, verdict in zip(indexed, fold(sources), strict=True)]
