"""A Worker (round.ports) whose work is done by Spark's executors: map_engine = "spark".

    headers and keys of each segment -> transactions folded here -> keys of the rest -> ranges answered, survivors gathered
        -> groups rewritten and uploaded, a receipt each

The exchange (16 bytes a record, the answers in Spark's shuffle, the survivors) lies in the partition's scratch prefix. The driver sees
headers that decide about transactions, and otherwise kilobytes. Every result is the same as the local engine's, byte for byte (I7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from bloom.sidecar import Sidecar
from compactor.bootstrap import Tier
from compactor.cleaner.gate.judge import GateFailed
from compactor.config import Cleaner
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.errors import OutOfBudget, StoreError
from compactor.local.staging import group_room
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.drive import scratch_prefix
from compactor.round.plan import RoundFacts, draft
from compactor.round.ports import Check, WorkSession, WorkStats
from compactor.round.skip import CleanVerdicts, filter_record, filter_stats, keys_to_come
from compactor.spark.cluster.executor import Cost, Filters, Shared
from compactor.spark.cluster.jobs import Cluster, JobWatch, TaskOutcome, VersionDiffers, attempt
from compactor.spark.cluster.steps import TaskSteps
from compactor.spark.round.gate import sample_bits
from compactor.spark.round.indexing import Index
from compactor.spark.round.mapping import SAMPLE, Gathered, ToGather, answer_range, gather_sample, gather_survivors
from compactor.spark.round.rewriting import ToRewrite, rewrite_group
from compactor.spark.round.scouting import Scouting, scout
from compactor.tier.sidecars import Sidecars

ROW_KEY_BYTES: Final = 20
MOST_SET_BYTES: Final = 128 << 20
MOST_RANGES: Final = 4096


@dataclass
class SparkWorker:
    """``stats`` is filled in with what the round cost, which is added to ``cost``."""

    cluster: Cluster
    tier: Tier
    cleaner: Cleaner
    stats: WorkStats = field(default_factory=WorkStats)
    cost: Cost = field(default_factory=Cost)
    watch: JobWatch = field(default_factory=JobWatch)
    _used: Cost = field(default_factory=Cost, init=False)
    _scouting: Scouting | None = field(default=None, init=False)

    def scout(self, facts: RoundFacts, check: Check) -> CleanVerdicts:
        """As RemoteWorker (round.engines)."""
        self.close()
        state = facts.state
        sidecars = self.sidecars(state)
        if sidecars is None or not facts.assessment.clean:
            return CleanVerdicts()
        scratch = f"{scratch_prefix(self.tier.open(state.name))}{self.tier.ports.new_id()}/"
        steps = self.steps(draft(facts), state, scratch, check)
        try:
            self._scouting = scout(steps, state, facts.assessment, sidecars, filter_record(state.runs))
        except VersionDiffers:
            return CleanVerdicts()  # the round meets it again, and then there is a plan that can be given up for it
        finally:
            note(self.stats, self._used)
        return self._scouting.scouted if self._scouting else CleanVerdicts()

    def close(self) -> None:
        if self._scouting is not None:
            self._scouting.steps.forget(self._scouting.index.scratch)
        self._scouting = None

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        scouting = self._scouting if self._scouting is not None and self._scouting.is_for(plan) else None
        try:
            yield from _Round(self, plan, tasks, session, scouting).run()
        except VersionDiffers as error:
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=error.message)
        except GateFailed as refused:
            yield CompactionFailure(run_id=plan.run_id, group=-1, kind="gate", message=refused.message)
        finally:
            note(self.stats, self._used)
            self.cost.add(self._used)
            self._used = Cost()

    def steps(self, plan: CompactionPlan, state: PartitionState, scratch: str, check: Check) -> TaskSteps:
        shared = shared_by(self.cluster, self.tier, self.cleaner, plan, scratch, state)
        return TaskSteps(self.cluster, self.tier.ports.control, shared, self._used, self.watch, check)

    def sidecars(self, state: PartitionState) -> Sidecars | None:
        return self.tier.sidecars(state.name) if self.cleaner.bloom else None


def note(stats: WorkStats, cost: Cost) -> None:
    """What executors used, as a round reports it."""
    stats.bytes_fetched = cost.bytes_fetched
    stats.peak_disk_bytes = cost.peak_disk_bytes
    stats.peak_map_bytes = cost.peak_map_bytes
    stats.map_entries = cost.map_entries
    stats.gate_coverage = cost.gate_coverage
    stats.sidecar_bytes_written = cost.sidecar_bytes


def shared_by(cluster: Cluster, tier: Tier, cleaner: Cleaner, plan: CompactionPlan, scratch: str, state: PartitionState) -> Shared:
    """A round's settings as its tasks get them; budgets are shared out among the tasks that run on one executor at a time.

    Only dirty keys are kept in memory, by the map and by the gate: clean records are looked up there.
    """
    each = cluster.slots_per_executor
    records = sum(max(segment.records, 1) for segment in _dirty(state.live, plan))
    disk = 3 * cleaner.segment_bytes if cleaner.disk_budget_bytes == "auto" else cleaner.disk_budget_bytes // each
    budget = max(cleaner.map_budget_bytes // each, 1 << 16)
    sets = -(-records * ROW_KEY_BYTES // min(budget, MOST_SET_BYTES))
    even = -(-sets // cluster.slots) * cluster.slots
    ranges = tier.settings.spark.partitions or min(MOST_RANGES, max(cluster.slots, even))
    bits = sample_bits(records, budget) if cleaner.verify_before_publish else 0
    filters = None
    if cleaner.bloom:
        filters = Filters(tier.open(state.name).prefix, filter_record(state.runs), keys_to_come(cleaner, state.runs, 0))
    return Shared(tier.settings, tier.hash_key(), plan, scratch, ranges, budget, disk, bits, filters)


def _dirty(live: Sequence[RemoteLogSegmentMetadata], plan: CompactionPlan) -> list[RemoteLogSegmentMetadata]:
    """Those that have a part in the dirty range."""
    return [segment for segment in live if segment.end_offset >= plan.first_dirty_offset and segment.start_offset < plan.end_offset]


class _Round:
    """The rest of one announced plan. ``scouting``: its pass 1 so far, if this process has it."""

    def __init__(
        self, worker: SparkWorker, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession, scouting: Scouting | None
    ) -> None:
        self._worker = worker
        self._plan = plan
        self._tasks = tasks
        self._session = session
        self._scouting = scouting
        self._live = session.state.live
        self._superseded: set[str] = set()
        epoch = session.state.leader.epoch if session.state.leader else plan.leader_epoch
        # An attempt's objects have its epoch in their names: a zombie's deletions are its own affair.
        steps = worker.steps(plan, session.state, session.scratch_key(f"{epoch}-"), session.check)
        if scouting is not None:
            # The log may have grown since, and other sizes would be cut into other ranges.
            steps = replace(steps, shared=replace(scouting.steps.shared, plan=plan, scratch=steps.shared.scratch))
        self._steps = steps
        self._shared = steps.shared

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
            # Newest first: of them the most is kept, and tasks that take long are not to be the last.
            for task in sorted(self._tasks, key=lambda task: -task.end_offset)
        ]
        yield from (result for _, result in self._steps.each(f"pass 2, {len(items)} groups rewritten", rewrite_group, items))
        if self._scouting is not None:
            self._worker.stats.filters = filter_stats(self._scouting.scouted, self._plan, self._session.state, self._superseded)

    def _check_disk(self) -> None:
        """Raises OutOfBudget before anything is done where one task's share of the disk is too small for it."""
        by_id, share = {segment.id: segment for segment in self._live}, self._shared.disk_budget_bytes
        interval = self._plan.policy.index_interval_bytes
        need = max(group_room([by_id[name] for name in task.sources], interval) for task in self._tasks)
        if need > share:
            each = self._worker.cluster.slots_per_executor
            raise OutOfBudget(
                f"a group of {self._session.state.name} needs {need} bytes of local disk; of the disk budget each of {each} tasks at a "
                f"time has {share}",
                hint=f"Set disk_budget_bytes to at least {need * each}, lower segment_bytes, or run fewer tasks at a time",
            )

    def _map(self, sources: Sequence[RemoteLogSegmentMetadata]) -> dict[str, ScratchObject]:
        """Pass 1 and the second stage; recorded, so that nobody has to do it again."""
        index = self._scouting.index if self._scouting else Index(self._live, self._stand_ins())
        survivors: dict[str, ScratchObject] = {}
        told = False
        try:
            index.read(self._steps, self._rows_wanted(sources), {source.id for source in sources})
            survivors.update(self._gathered(sources, index))
            told = True  # the log may have them from here on, also where an error says that nobody knows
            self._session.store_survivors(list(survivors.values()))
            return survivors
        finally:
            self._forget(index.scratch if told else [*index.scratch, *(stored.key for stored in survivors.values())])

    def _stand_ins(self) -> dict[str, Sidecar]:
        """Of what is not read: what the plan leaves out, and what lies behind its range."""
        plan = self._plan
        skipped = {segment.id for segment in plan.skipped}
        names = [segment.id for segment in self._live if segment.id in skipped or segment.start_offset >= plan.end_offset]
        heads = self._worker.sidecars(self._session.state)
        return {name: head.sidecar for name, head in heads.heads(names).items() if head.sidecar} if heads else {}

    def _rows_wanted(self, sources: Sequence[RemoteLogSegmentMetadata]) -> set[str]:
        """Segments whose keys are wanted: sources, and everything dirty."""
        if not self._is_mapped:
            return set()
        return {segment.id for segment in (*_dirty(self._live, self._plan), *sources)}

    def _gathered(self, sources: Sequence[RemoteLogSegmentMetadata], index: Index) -> Iterator[tuple[str, ScratchObject]]:
        """The second stage: ranges are answered newest first, and each segment's answers come together through Spark's shuffle.

        And the keys that the gate looks up, in one object.
        """
        ids = {source.id for source in sources}
        with_rows = [segment for segment in self._live if segment.id in index.found and index.found[segment.id].buckets is not None]
        without = [source for source in sources if index.found[source.id].buckets is None]
        segments = tuple(index.known(segment.id).to_gather(segment) for segment in (*with_rows, *without))
        samples = tuple(found.sample for _, found in sorted(index.found.items()) if found.sample)
        places = {place for place, segment in enumerate(segments) if segment.metadata.id in ids} | ({len(segments)} if samples else set())
        ranges = self._shared.ranges if with_rows else 1
        step = f"offset map, {ranges} ranges of keys over {len(segments)} segments{', and a sample for the gate' if samples else ''}"
        answers = self._worker.cluster.exchanged(ranges, _Answer(self._shared, segments, frozenset(places)), len(segments) + 1)
        for place, gathered in self._steps.run(step, answers, _Gather(self._shared, segments, samples), len(places)):
            name = segments[place].metadata.id if place < len(segments) else SAMPLE
            if gathered.superseded:
                self._superseded.add(name)
            yield name, gathered.written

    def _forget(self, keys: Sequence[str]) -> None:
        """What this attempt wrote and nobody needs now goes, if it still leads. A store that does not answer hides no earlier error."""
        if keys:
            with suppress(StoreError):
                self._session.check()
                self._steps.forget(keys)


def _name(stored: ScratchObject) -> str:
    """The segment whose survivors these are, or SAMPLE."""
    return stored.key.rpartition("survivors-")[2] if "survivors-" in stored.key else SAMPLE


@dataclass(frozen=True)
class _Answer:
    """One range -> (place of a segment, its answer). Every wanted place gets one, be it empty; an error goes to all of them."""

    shared: Shared
    segments: tuple[ToGather, ...]
    places: frozenset[int]

    def __call__(self, number: int) -> Iterator[tuple[int, bytes | TaskOutcome]]:
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
    """All answers for one segment -> its survivors, written down. The place behind all segments is that of the gate's keys."""

    shared: Shared
    segments: tuple[ToGather, ...]
    samples: tuple[ScratchObject, ...]

    def __call__(self, place: int, answers: Iterable[bytes | TaskOutcome], cost: Cost) -> Gathered:
        some = _bytes_of(answers, cost)
        if place < len(self.segments):
            return gather_survivors(self.shared, self.segments[place], some, cost)
        deque(some, maxlen=0)  # nothing but what may have gone wrong
        return gather_sample(self.shared, self.samples, cost)


def _bytes_of(answers: Iterable[bytes | TaskOutcome], cost: Cost) -> Iterator[bytes]:
    for answer in answers:
        if isinstance(answer, bytes):
            yield answer
        else:
            cost.add(answer.cost)
            if answer.error is not None:
                raise answer.error
