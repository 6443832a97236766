"""A Worker (round.ports) whose work is done by Spark's executors: map_engine = "spark".

    headers and keys of bundles of segments -> transactions folded here -> keys of the rest -> ranges answered, survivors gathered
        -> groups rewritten and uploaded, a receipt each

The exchange (16 bytes a record, the answers in Spark's shuffle, the survivors) lies in the partition's scratch prefix. The driver sees
headers that decide about transactions, and otherwise kilobytes. Every result is the same as the local engine's, byte for byte (I7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from bloom.sidecar import Sidecar
from compactor.bootstrap import Tier
from compactor.cleaner.gate.judge import GateFailed
from compactor.cleaner.gate.table import KEY_BYTES as GATE_KEY_BYTES
from compactor.config import Cleaner
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.errors import CompactorError, OutOfBudget, StoreError
from compactor.local.staging import group_room
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.engines import DraftAt
from compactor.round.plan import RoundFacts, draft
from compactor.round.ports import Check, WorkSession, WorkStats
from compactor.round.skip import CleanVerdicts, filter_record, filter_stats, keys_to_come
from compactor.spark.cluster.executor import Cost, Filters, Shared
from compactor.spark.cluster.jobs import Cluster, JobWatch, TaskOutcome, VersionDiffers, attempt
from compactor.spark.cluster.steps import TaskSteps
from compactor.spark.round.bundles import PartsOf
from compactor.spark.round.exchange import ScratchPart, is_a, read_tail
from compactor.spark.round.indexing import Index
from compactor.spark.round.judging import JUDGED, ToJudge, gather_judged, judge
from compactor.spark.round.leftovers import adopt, begun_ms, kin_of, left_behind, scouted_place
from compactor.spark.round.mapping import (
    SURVIVORS,
    Exchange,
    GatherBundle,
    Gathered,
    answer_ranges,
    gather_survivors,
)
from compactor.spark.round.rewriting import ToRewrite, rewrite_group
from compactor.spark.round.scouting import Scouting, scout
from compactor.storage.port import ObjectInfo
from compactor.tier.sidecars import Sidecars

ROW_KEY_BYTES: Final = 20
MOST_SET_BYTES: Final = 128 << 20
MOST_RANGES: Final = 4096
RANGE_TASKS_PER_SLOT: Final = 3
"""A task looks into the directory of every bundle once, whatever the number of its ranges."""


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

    def begun_ms(self, state: PartitionState, now_ms: int, draft_at: DraftAt) -> int:
        """As RemoteWorker (round.engines)."""
        return begun_ms(self.tier.ports.control, self.tier.open(state.name), state.live, now_ms, draft_at)

    def scout(self, facts: RoundFacts, check: Check) -> CleanVerdicts:
        """As RemoteWorker (round.engines)."""
        self.close()
        state, plan = facts.state, draft(facts)
        place = self.place(plan, state)
        steps = self.steps(plan, state, f"{place}{self.tier.ports.new_id()}/", check)
        left = kin_of(steps, self.tier.open(state.name), place)
        sidecars = self.sidecars(state)
        if sidecars is None or not facts.assessment.clean:
            steps.forget([info.key for info in left])
            return CleanVerdicts()
        try:
            self._scouting = scout(steps, state, facts.assessment, sidecars, filter_record(state.runs), left)
        except VersionDiffers:
            return CleanVerdicts()  # the round meets it again, and then there is a plan that can be given up for it
        finally:
            note(self.stats, self._used)
        return self._scouting.scouted if self._scouting else CleanVerdicts()

    def close(self) -> None:
        """Of a plan that did not come. Where somebody else leads by now, it is his to take up."""
        scouting, self._scouting = self._scouting, None
        if scouting is not None:
            with suppress(CompactorError):
                scouting.steps.check()
                scouting.steps.forget(scouting.scratch)

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        scouting = None
        if self._scouting is not None and self._scouting.is_for(plan):
            scouting, self._scouting = self._scouting, None
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

    def place(self, plan: CompactionPlan, state: PartitionState) -> str:
        """Where what is read before this plan lies."""
        return scouted_place(self.tier.open(state.name), plan, state.live)

    def sidecars(self, state: PartitionState) -> Sidecars | None:
        return self.tier.sidecars(state.name) if self.cleaner.bloom else None


def note(stats: WorkStats, cost: Cost) -> None:
    """What executors used, as a round reports it."""
    stats.bytes_fetched = cost.bytes_fetched
    stats.peak_disk_bytes = cost.peak_disk_bytes
    stats.peak_map_bytes = cost.peak_map_bytes
    stats.map_entries = cost.map_entries
    stats.gate_keys = cost.gate_keys
    stats.gate_disk_bytes = cost.gate_disk_bytes
    stats.sidecar_bytes_written = cost.sidecar_bytes


def shared_by(cluster: Cluster, tier: Tier, cleaner: Cleaner, plan: CompactionPlan, scratch: str, state: PartitionState) -> Shared:
    """A round's settings as its tasks get them; budgets are shared out among the tasks that run on one executor at a time.

    Only dirty keys are kept in memory, by the map and by the gate: clean records are looked up there.
    """
    each = cluster.slots_per_executor
    records = sum(max(segment.records, 1) for segment in _dirty(state.live, plan))
    disk = 3 * cleaner.segment_bytes if cleaner.disk_budget_bytes == "auto" else cleaner.disk_budget_bytes // each
    budget = max(cleaner.map_budget_bytes // each, 1 << 16)
    gate = cleaner.verify_before_publish
    sets = -(-records * max(ROW_KEY_BYTES, GATE_KEY_BYTES * gate) // min(budget, MOST_SET_BYTES))
    even = -(-sets // cluster.slots) * cluster.slots
    ranges = tier.settings.spark.partitions or min(MOST_RANGES, max(cluster.slots, even))
    # What grows with the log travels with the task that needs it, not with all of them.
    lean = plan.model_copy(update={"tasks": (), "skipped": (), "read": ()})
    filters = None
    if cleaner.bloom:
        filters = Filters(tier.open(state.name).prefix, filter_record(state.runs), keys_to_come(cleaner, state.runs, 0))
    return Shared(tier.settings, tier.hash_key(), lean, scratch, ranges, budget, disk, gate, filters, tier.topic_id(state.name))


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
            steps = replace(steps, shared=replace(scouting.steps.shared, plan=steps.shared.plan, scratch=steps.shared.scratch))
        self._steps = steps

    @property
    def _is_mapped(self) -> bool:
        """Whether there is a dirty range at all."""
        return self._plan.first_dirty_offset < self._plan.end_offset

    def run(self) -> Iterator[CompactionReceipt | CompactionFailure]:
        self._check_disk()
        stored = self._stored()
        by_id = {segment.id: segment for segment in self._live}
        sources = [by_id[name] for task in self._tasks for name in task.sources]
        wanted = {source.id for source in sources} | ({JUDGED} if self._is_mapped and self._steps.shared.gate else set())
        if not wanted <= stored.keys():
            stored = self._map(sources)
        else:
            self._forget([info.key for info in self._left_behind()])  # bundles whose survivors were recorded by one that died then
        items = [
            ToRewrite(task, tuple(by_id[name] for name in task.sources), tuple(stored[name] for name in task.sources), stored.get(JUDGED))
            # Newest first: of them the most is kept, and tasks that take long are not to be the last.
            for task in sorted(self._tasks, key=lambda task: -task.end_offset)
        ]
        yield from (result for _, result in self._steps.each(f"pass 2, {len(items)} groups rewritten", rewrite_group, items))
        if self._scouting is not None:
            self._worker.stats.filters = filter_stats(self._scouting.scouted, self._plan, self._session.state, self._superseded)

    def _stored(self) -> dict[str, ScratchPart | ScratchObject]:
        """What an earlier attempt recorded: the survivors of each segment, by id, and what the gate says must be left."""
        store = self._worker.tier.ports.control
        found: dict[str, ScratchPart | ScratchObject] = {}
        for item in self._session.survivors:
            if is_a(SURVIVORS, item.key):
                found |= parts_in(item.key, PartsOf.of(read_tail(store, item.key, item.size)))
            elif is_a(JUDGED, item.key):  # else another version's, which says nothing here
                found[JUDGED] = item
        return found

    def _check_disk(self) -> None:
        """Raises OutOfBudget before anything is done where one task's share of the disk is too small for it."""
        by_id, share = {segment.id: segment for segment in self._live}, self._steps.shared.disk_budget_bytes
        interval = self._plan.policy.index_interval_bytes
        need = max(group_room([by_id[name] for name in task.sources], interval, most_bytes=task.most_bytes) for task in self._tasks)
        if need > share:
            each = self._worker.cluster.slots_per_executor
            raise OutOfBudget(
                f"a group of {self._session.state.name} needs {need} bytes of local disk; of the disk budget each of {each} tasks at a "
                f"time has {share}",
                hint=f"Set disk_budget_bytes to at least {need * each}, lower segment_bytes, or run fewer tasks at a time",
            )

    def _map(self, sources: Sequence[RemoteLogSegmentMetadata]) -> dict[str, ScratchPart | ScratchObject]:
        """Pass 1 and the second stage; recorded, so that nobody has to do it again.

        A bundle is done when its object is there: where the store or Spark fails, bundles stay for the next attempt.
        """
        index = self._scouting.index if self._scouting else Index(self._live, self._stand_ins())
        adopted = list(self._scouting.left) if self._scouting else self._adopt(index)
        written: list[ScratchObject] = []
        found: dict[str, ScratchPart | ScratchObject] = {}
        stay: Collection[str] = ()
        try:
            index.read(self._steps, self._rows_wanted(sources), {source.id for source in sources})
            for gathered in self._gathered(sources, index):
                written.append(gathered.written)
                found |= parts_in(gathered.written.key, gathered.parts) if gathered.parts else {JUDGED: gathered.written}
                self._superseded.update(gathered.superseded)
            stay = [stored.key for stored in written]  # the log may have them from here on, also where an error says that nobody knows
            self._session.store_survivors(written)
        except (StoreError, OutOfBudget):
            stay = {*stay, *index.scratch, *adopted}
            raise
        finally:
            self._forget([key for key in dict.fromkeys((*adopted, *index.scratch, *(stored.key for stored in written))) if key not in stay])
        return found

    def _adopt(self, index: Index) -> list[str]:
        """Takes up the bundles that earlier attempts at this plan left behind; keys of all such objects."""
        left = self._left_behind()
        self._steps = adopt(self._steps, index, left)
        return [info.key for info in left]

    def _left_behind(self) -> list[ObjectInfo]:
        """Of whatever attempt at this plan, before it was announced and after."""
        store = self._worker.tier.ports.control
        places = (self._session.scratch_key(""), self._worker.place(self._plan, self._session.state))
        return [info for place in places for info in left_behind(store, place)]

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

    def _gathered(self, sources: Sequence[RemoteLogSegmentMetadata], index: Index) -> Iterator[Gathered]:
        """The second stage: ranges are answered newest first, and each bundle's answers come together through Spark's shuffle.

        And what the gate says must be left, in one object.
        """
        ids, shared, cluster = {source.id for source in sources}, self._steps.shared, self._worker.cluster
        exchange = index.exchange(ids)
        beside: list[GatherBundle | ToJudge] = list(index.to_gather(ids))
        targets = {place: number for number, place in enumerate(sorted(exchange.asked))}
        to_judge = index.to_judge() if index.gate_bundles else None
        if to_judge is not None:
            beside.append(to_judge)
        ranges = shared.ranges if exchange.asked else 0
        tasks = min(ranges, cluster.slots * RANGE_TASKS_PER_SLOT)
        runs = [range(ranges * task // tasks, ranges * (task + 1) // tasks) for task in range(tasks)]
        step = f"offset map, {ranges} ranges of keys in {len(exchange.bundles)} bundles{', and for the gate' if to_judge else ''}"
        answers = cluster.exchanged(
            f"{shared.partition}: {ranges} ranges answered",
            runs,
            RangeAnswers(shared, exchange, targets, to_judge, len(beside) - 1),
            beside,
        )
        yield from (gathered for _, gathered in self._steps.run(step, answers, _Gather(shared), len(beside)))

    def _forget(self, keys: Sequence[str]) -> None:
        """What this attempt wrote and nobody needs now goes, if it still leads. A store that does not answer hides no earlier error."""
        if keys:
            with suppress(StoreError):
                self._session.check()
                self._steps.forget(keys)


def parts_in(key: str, found: PartsOf) -> dict[str, ScratchPart | ScratchObject]:
    """The survivors of each segment, by id."""
    return {name: ScratchPart(key, *part) for name, part in found.parts.items()}


@dataclass(frozen=True)
class RangeAnswers:
    """Some ranges -> (place of what is gathered, an answer). ``targets``: by bundle. An error goes to all of them.

    ``to_judge``: the gate's place is behind those of all others (``gate_place``).
    """

    shared: Shared
    exchange: Exchange
    targets: Mapping[int, int]
    to_judge: ToJudge | None
    gate_place: int

    def __call__(self, ranges: range) -> Iterator[tuple[int, bytes | TaskOutcome]]:
        pairs: list[tuple[int, bytes]] = []
        outcome = attempt(-1, lambda cost: pairs.extend(self._answers(ranges, cost)), self.shared.plan)
        places = [*sorted(self.targets.values()), *([self.gate_place] if self.to_judge is not None else [])]
        if outcome.error is not None:
            yield from ((place, outcome) for place in places)
            return
        yield places[0], outcome
        yield from pairs

    def _answers(self, ranges: range, cost: Cost) -> Iterator[tuple[int, bytes]]:
        yield from ((self.targets[place], answer) for place, answer in answer_ranges(self.shared, ranges, self.exchange, cost))
        if self.to_judge is not None:
            yield self.gate_place, judge(self.shared, ranges, self.to_judge, cost)


@dataclass(frozen=True)
class _Gather:
    """What is to be gathered at a place, and all answers for it -> what was written down."""

    shared: Shared

    def __call__(self, place: int, answers: Iterable[bytes | TaskOutcome | GatherBundle | ToJudge], cost: Cost) -> Gathered:
        what: GatherBundle | ToJudge | None = None
        some: list[bytes] = []
        for answer in answers:
            if isinstance(answer, bytes):
                some.append(answer)
            elif isinstance(answer, TaskOutcome):
                cost.add(answer.cost)
                if answer.error is not None:
                    raise answer.error
            else:
                what = answer
        if isinstance(what, ToJudge):
            return Gathered(gather_judged(self.shared, what, some, cost))
        if what is None:
            raise CompactorError("answers came for nobody", hint="This is a bug; please report it")
        return gather_survivors(self.shared, what, some, cost)
