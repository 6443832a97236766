"""Runner (``round.compaction``) that spreads one round over Spark executors: ``map_engine = "spark"``.

1. Pass 1: headers and keys of bundles of segments -> transactions folded on the driver -> keys of segments with transactions.
2. Offset map: survivors found for each hash range -> survivors written for each bundle.
3. Pass 2: groups rewritten and uploaded, one receipt each.

Key rows (16 bytes a record) and survivors are exchanged through scratch objects, answers of ranges through Spark's shuffle. The driver only
receives the batch headers that decide about transactions. The output equals the local engine's, byte for byte (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Final

from bloom.sidecar import Sidecar
from compactor.access.tier import Tier
from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.cleaner.gate.parser import GATE_KEY_BYTES
from compactor.config.settings import CleanerSettings
from compactor.config.units import format_size
from compactor.control.records import ScratchObject
from compactor.control.state import PartitionState
from compactor.errors import CompactorError, Fenced, OutOfBudget, StoreError
from compactor.features.spark.exchange import (
    ScratchObjectPart,
    StoredSurvivorLocations,
    is_scratch_kind,
    read_tail,
)
from compactor.features.spark.jobs import (
    BloomFilterSettings,
    JobListener,
    RoundJobRunner,
    RoundTaskSettings,
    SparkCluster,
    TaskOutcome,
    VersionMismatch,
    pack_bins,
    run_task,
)
from compactor.features.spark.pass_one import (
    GATE_SUMS_NAME,
    SURVIVORS_PREFIX,
    BloomFilterQuery,
    GateInputOfAllHashRanges,
    InputOfAllHashRangeTasks,
    SurvivorBundle,
    WrittenSurvivors,
    encode_expected_sums,
    find_survivors,
    query_bloom_filters,
    write_expected_record_sums,
    write_survivors,
)
from compactor.features.spark.rewrite import (
    PassOneSegmentResults,
    SegmentGroupRewriteWork,
    adopt_leftover_bundles,
    draft_scratch_prefix,
    list_stored_results,
    resumable_plan_time_ms,
    rewrite_group,
    take_leftover_bundles,
)
from compactor.kernels.common import KEY_BYTES
from compactor.local.staging import rewrite_disk_bytes
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask, raise_if_keyless
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.producers import reason_to_read_markers
from compactor.round.plan import PlanInputs, RoundAssessment, draft_plan
from compactor.round.ports import (
    BloomFilterUsageStatistics,
    CleanSegmentVerdicts,
    Costs,
    SegmentReadDecisionFromSidecar,
    Session,
    build_clean_segment_verdicts,
    decide_by_sidecar,
    delete_horizon_passed_reason,
    estimate_distinct_keys,
    estimate_record_count,
    expected_dirty_keys,
    filter_stats,
    filter_usage_of_runs,
)
from compactor.storage.port import ObjectInfo
from compactor.tier.sidecars import SidecarHead, SidecarStore

MAX_KEY_SET_BYTES: Final = 128 << 20
MAX_RANGES: Final = 4096
RANGE_TASKS_PER_SLOT: Final = 3
"""Range tasks per slot. A task reads the directory of every bundle once, whatever its number of ranges."""
TargetAndAnswer = tuple[int, bytes]
SurvivorLocations = dict[str, ScratchObjectPart | ScratchObject]
"""Where the survivors of each segment are stored, by segment id."""


@dataclass
class SparkRunner:
    """The plan that follows ``scan`` uses its results if they match.

    open_cluster: starts Spark if necessary.
    cost: sum over all rounds.
    """

    map_engine: ClassVar[str] = "spark"
    announces_segments: ClassVar[bool] = False

    open_cluster: Callable[[], SparkCluster]
    tier: Tier
    cleaner: CleanerSettings
    cost: Costs = field(default_factory=Costs)
    job_listener: JobListener = field(default_factory=JobListener)
    _prepared: KeptPassOneResults | None = field(default=None, init=False)

    @cached_property
    def cluster(self) -> SparkCluster:
        return self.open_cluster()

    def plan_time_ms(self, state: PartitionState, now_ms: int, draft_at: Callable[[int], CompactionPlan | None]) -> int:
        """See ``resumable_plan_time_ms``."""
        return resumable_plan_time_ms(
            self.tier.ports.control, self.tier.open_partition_log(state.topic_partition), state.live, now_ms, draft_at
        )

    @contextmanager
    def scan(self, facts: PlanInputs, session: Session) -> Iterator[PlanInputs]:
        """Raises Fenced, BadData, StoreError, OutOfBudget; KeylessRecordsRefused if there are records without a key and the policy refuses
        them.
        """
        self._delete_unused_scan_results()
        used = Costs()
        try:
            yield replace(facts, clean=self._find_skippable(facts, session, used))
        finally:
            self._delete_unused_scan_results()

    def require_fits(self, plan: CompactionPlan, state: PartitionState) -> None:
        """Executors ask for it when they rewrite."""

    def _find_skippable(self, plan_inputs: PlanInputs, session: Session, used: Costs) -> CleanSegmentVerdicts:
        state, plan = plan_inputs.state, draft_plan(plan_inputs)
        place = self.draft_scratch_prefix(plan, state)
        jobs = self.create_job_runner(plan, state, f"{place}{self.tier.ports.new_id()}/", session, used)
        left = take_leftover_bundles(jobs, self.tier.open_partition_log(state.topic_partition), place)
        sidecars = self.open_sidecars(state)
        if not _refuses_keyless_records(plan, plan_inputs.assessment) and (sidecars is None or not plan_inputs.assessment.clean):
            jobs.delete_scratch_objects([info.key for info in left])
            return CleanSegmentVerdicts()
        try:
            self._prepared = find_skippable_segments(jobs, state, plan_inputs.assessment, sidecars, filter_usage_of_runs(state.runs), left)
        except VersionMismatch:
            return CleanSegmentVerdicts()  # the round meets it again, and then there is a plan that can be given up for it
        finally:
            self._add_cost(session, used)
        return self._prepared.verdicts if self._prepared else CleanSegmentVerdicts()

    def _add_cost(self, session: Session, used: Costs) -> None:
        session.run.costs.add(used)
        self.cost.add(used)

    def _delete_unused_scan_results(self) -> None:
        """Nothing is deleted if another compactor leads now, which may use the results."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            with suppress(CompactorError):
                prepared.jobs.check()
                prepared.jobs.delete_scratch_objects(prepared.scratch_keys)

    def work(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: Session, *, is_resumed: bool
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        prepared, used = None, Costs()
        if self._prepared is not None and self._prepared.matches_plan(plan):
            prepared, self._prepared = self._prepared, None
        try:
            yield from _RecordedPlanExecution(self, plan, tasks, session, prepared, used).run_unfinished_tasks()
        except VersionMismatch as error:
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=error.message)
        except GateFailed as refused:
            yield CompactionFailure(run_id=plan.run_id, group=-1, kind="gate", message=refused.message)
        finally:
            self._add_cost(session, used)

    def create_job_runner(
        self, plan: CompactionPlan, state: PartitionState, scratch_prefix: str, session: Session, used: Costs
    ) -> RoundJobRunner:
        shared = create_round_task_settings(self.cluster, self.tier, self.cleaner, plan, scratch_prefix, state)
        return RoundJobRunner(self.cluster, self.tier.ports.control, shared, used, self.job_listener, session.check)

    def draft_scratch_prefix(self, plan: CompactionPlan, state: PartitionState) -> str:
        return draft_scratch_prefix(self.tier.open_partition_log(state.topic_partition), plan, state.live)

    def open_sidecars(self, state: PartitionState) -> SidecarStore | None:
        return self.tier.open_sidecar_store(state.topic_partition) if self.cleaner.bloom else None


def create_round_task_settings(
    cluster: SparkCluster, tier: Tier, cleaner: CleanerSettings, plan: CompactionPlan, scratch_prefix: str, state: PartitionState
) -> RoundTaskSettings:
    """Budgets are divided by the number of tasks that run on one executor at a time."""
    each = cluster.task_slots_per_executor
    records = sum(max(segment.records, 1) for segment in _dirty_segments(state.live, plan))
    disk = 3 * cleaner.segment_bytes if cleaner.disk_budget_bytes == "auto" else cleaner.disk_budget_bytes // each
    budget = max(cleaner.map_budget_bytes // each, 1 << 16)
    gate = cleaner.verify_before_publish
    # The dirty keys of a range fit in memory; clean records are only looked up among them.
    sets = -(-records * max(KEY_BYTES, GATE_KEY_BYTES * gate) // min(budget, MAX_KEY_SET_BYTES))
    even = -(-sets // cluster.task_slots) * cluster.task_slots
    ranges = tier.settings.spark.partitions or min(MAX_RANGES, max(cluster.task_slots, even))
    # What grows with the log travels with the task that needs it, not with all of them.
    lean = plan.model_copy(update={"tasks": (), "skipped": (), "read": ()})
    filters = None
    if cleaner.bloom:
        filters = BloomFilterSettings(
            tier.open_partition_log(state.topic_partition).prefix,
            filter_usage_of_runs(state.runs),
            expected_dirty_keys(cleaner, state.runs, 0),
        )
    hash_key, topic_id = tier.identity.hash_key(), tier.metadata.topic_id(state.topic_partition)
    return RoundTaskSettings(tier.settings, hash_key, lean, scratch_prefix, ranges, budget, disk, gate, filters, topic_id)


def _dirty_segments(live_segments: Sequence[RemoteLogSegmentMetadata], plan: CompactionPlan) -> list[RemoteLogSegmentMetadata]:
    return [
        segment for segment in live_segments if segment.end_offset >= plan.first_dirty_offset and segment.start_offset < plan.end_offset
    ]


class _RecordedPlanExecution:
    def __init__(
        self,
        worker: SparkRunner,
        plan: CompactionPlan,
        tasks: Sequence[CompactionTask],
        session: Session,
        prepared: KeptPassOneResults | None,
        used: Costs,
    ) -> None:
        self._worker = worker
        self._plan = plan
        self._tasks = tasks
        self._session = session
        self._prepared = prepared
        self._live = session.state.live
        epoch = session.state.leader.epoch if session.state.leader else plan.leader_epoch
        # An attempt's objects have its epoch in their names: a zombie's deletions are its own affair.
        jobs = worker.create_job_runner(plan, session.state, session.scratch_object_key(f"{epoch}-"), session, used)
        if prepared is not None:
            # The log may have grown since, and other sizes would be cut into other ranges.
            jobs = replace(jobs, shared=replace(prepared.jobs.shared, plan=jobs.shared.plan, scratch=jobs.shared.scratch))
        self._jobs = jobs

    @property
    def _has_dirty_range(self) -> bool:
        return self._plan.first_dirty_offset < self._plan.end_offset

    def run_unfinished_tasks(self) -> Iterator[CompactionReceipt | CompactionFailure]:
        self._require_group_disk()
        stored = self._read_stored_survivor_locations()
        by_id = {segment.id: segment for segment in self._live}
        sources = [by_id[name] for task in self._tasks for name in task.sources]
        wanted = {source.id for source in sources} | ({GATE_SUMS_NAME} if self._has_dirty_range and self._jobs.shared.gate else set())
        if not wanted <= stored.keys():
            stored = self._run_pass_one(sources)
        else:
            self._delete_scratch_objects(
                [info.key for info in self._list_earlier_bundles()]
            )  # bundles whose survivors were recorded by one that died then
        items = [
            SegmentGroupRewriteWork(
                task, tuple(by_id[name] for name in task.sources), tuple(stored[name] for name in task.sources), stored.get(GATE_SUMS_NAME)
            )
            # Newest first: of them the most is kept, and tasks that take long are not to be the last.
            for task in sorted(self._tasks, key=lambda task: -task.end_offset)
        ]
        yield from (result for _, result in self._jobs.run_task_per_item(f"pass 2, {len(items)} groups rewritten", rewrite_group, items))
        if self._prepared is not None:
            run = self._session.run
            run.filters = filter_stats(self._prepared.verdicts, self._plan, self._session.state, run.superseded)

    def _read_stored_survivor_locations(self) -> SurvivorLocations:
        store = self._worker.tier.ports.control
        found: SurvivorLocations = {}
        for item in self._session.earlier_scan_results:
            if is_scratch_kind(SURVIVORS_PREFIX, item.key):
                found |= locate_survivors(
                    item.key, StoredSurvivorLocations.decode_locations_from_arrays(read_tail(store, item.key, item.size))
                )
            elif is_scratch_kind(GATE_SUMS_NAME, item.key):  # else another version's, which says nothing here
                found[GATE_SUMS_NAME] = item
        return found

    def _require_group_disk(self) -> None:
        """Raise OutOfBudget if one task's disk is too small for a group of segments."""
        by_id, share = {segment.id: segment for segment in self._live}, self._jobs.shared.disk_budget_bytes
        interval = self._plan.policy.index_interval_bytes
        need = max(
            rewrite_disk_bytes([by_id[name] for name in task.sources], interval, max_output_bytes=task.most_bytes) for task in self._tasks
        )
        if need > share:
            each = self._worker.cluster.task_slots_per_executor
            raise OutOfBudget(
                f"a group of {self._session.state.topic_partition} needs {format_size(need)} of local disk;"
                f" of the disk budget each of {each} tasks "
                f"at a time has {format_size(share)}",
                hint=f"Set disk_budget_bytes to at least {need * each}, lower segment_bytes, or run fewer tasks at a time",
            )

    def _run_pass_one(self, sources: Sequence[RemoteLogSegmentMetadata]) -> SurvivorLocations:
        """Record the written survivors, so that later attempts skip this step.

        If store or Spark fails, results of finished tasks (whose object exists) are kept for the next attempt.
        """
        index = self._prepared.index if self._prepared else PassOneSegmentResults(self._live, self._load_sidecars())
        adopted = list(self._prepared.leftover_keys) if self._prepared else self._reuse_earlier_bundles(index)
        written: list[ScratchObject] = []
        found: SurvivorLocations = {}
        stay: Collection[str] = ()
        try:
            index.read_segments(self._jobs, self._ids_needing_keys(sources), {source.id for source in sources})
            self._session.run.keyless = index.count_keyless_records()
            for gathered in self._find_and_write_survivors(sources, index):
                written.append(gathered.written)
                found |= locate_survivors(gathered.written.key, gathered.parts) if gathered.parts else {GATE_SUMS_NAME: gathered.written}
                self._session.run.superseded.update(gathered.superseded)
            stay = [stored.key for stored in written]  # the log may have them from here on, also where an error says that nobody knows
            self._session.record_scan_results(written)
        except (StoreError, OutOfBudget):
            stay = {*stay, *index.scratch_keys, *adopted}
            raise
        finally:
            self._delete_scratch_objects(
                [key for key in dict.fromkeys((*adopted, *index.scratch_keys, *(stored.key for stored in written))) if key not in stay]
            )
        return found

    def _reuse_earlier_bundles(self, index: PassOneSegmentResults) -> list[str]:
        """Return the keys of all objects of earlier attempts, used or not."""
        left = self._list_earlier_bundles()
        self._jobs = adopt_leftover_bundles(self._jobs, index, left)
        return [info.key for info in left]

    def _list_earlier_bundles(self) -> list[ObjectInfo]:
        """From before and after the plan was recorded."""
        store = self._worker.tier.ports.control
        places = (self._session.scratch_object_key(""), self._worker.draft_scratch_prefix(self._plan, self._session.state))
        return [info for place in places for info in list_stored_results(store, place)]

    def _load_sidecars(self) -> dict[str, Sidecar]:
        plan = self._plan
        skipped = {segment.id for segment in plan.skipped}
        names = [segment.id for segment in self._live if segment.id in skipped or segment.start_offset >= plan.end_offset]
        heads = self._worker.open_sidecars(self._session.state)
        return {name: head.sidecar for name, head in heads.load_sidecar_heads(names).items() if head.sidecar} if heads else {}

    def _ids_needing_keys(self, sources: Sequence[RemoteLogSegmentMetadata]) -> set[str]:
        if not self._has_dirty_range:
            return set()
        return {segment.id for segment in (*_dirty_segments(self._live, self._plan), *sources)}

    def _find_and_write_survivors(
        self, sources: Sequence[RemoteLogSegmentMetadata], index: PassOneSegmentResults
    ) -> Iterator[WrittenSurvivors]:
        ids, shared, cluster = {source.id for source in sources}, self._jobs.shared, self._worker.cluster
        range_input = index.hash_range_input(ids)
        beside: list[SurvivorBundle | GateInputOfAllHashRanges] = list(index.plan_survivor_bundles(ids))
        targets = {place: number for number, place in enumerate(sorted(range_input.wanted_bundles))}
        gate_input = index.gate_input() if index.gate_bundles else None
        if gate_input is not None:
            beside.append(gate_input)
        ranges = shared.ranges if range_input.wanted_bundles else 0
        tasks = min(ranges, cluster.task_slots * RANGE_TASKS_PER_SLOT)
        runs = [range(ranges * task // tasks, ranges * (task + 1) // tasks) for task in range(tasks)]
        step = f"offset map, {ranges} ranges of keys in {len(range_input.bundles)} bundles{', and for the gate' if gate_input else ''}"
        answers = cluster.shuffle_answers_to_targets(
            f"{shared.partition}: {ranges} ranges answered",
            runs,
            HashRangeTask(shared, range_input, targets, gate_input, len(beside) - 1),
            beside,
        )
        yield from (gathered for _, gathered in self._jobs.run_tasks_over_rdd(step, answers, _WriteSurvivorsTask(shared), len(beside)))

    def _delete_scratch_objects(self, object_keys: Sequence[str]) -> None:
        """Only if this process still leads. A StoreError is ignored: it could hide an earlier error."""
        if object_keys:
            with suppress(StoreError):
                self._session.check()
                self._jobs.delete_scratch_objects(object_keys)


def locate_survivors(object_key: str, parts: StoredSurvivorLocations) -> SurvivorLocations:
    return {name: ScratchObjectPart(object_key, *part) for name, part in parts.parts.items()}


@dataclass(frozen=True)
class HashRangeTask:
    """Yields (target index, answer) pairs: survivors for a bundle, checksums for the gate. An error is sent to every target.

    gate_place: target index of the gate's answers.
    """

    shared: RoundTaskSettings
    range_input: InputOfAllHashRangeTasks
    targets: Mapping[int, int]
    gate_input: GateInputOfAllHashRanges | None
    gate_place: int

    def __call__(self, ranges: range) -> Iterator[tuple[int, bytes | TaskOutcome]]:
        pairs: list[tuple[int, bytes]] = []
        outcome = run_task(-1, lambda cost: pairs.extend(self._answers(ranges, cost)), self.shared.plan)
        places = [*sorted(self.targets.values()), *([self.gate_place] if self.gate_input is not None else [])]
        if outcome.error is not None:
            yield from ((place, outcome) for place in places)
            return
        yield places[0], outcome
        yield from pairs

    def _answers(self, ranges: range, cost: Costs) -> Iterator[TargetAndAnswer]:
        yield from ((self.targets[place], answer) for place, answer in find_survivors(self.shared, ranges, self.range_input, cost))
        if self.gate_input is not None:
            yield self.gate_place, encode_expected_sums(self.shared, ranges, self.gate_input, cost)


@dataclass(frozen=True)
class _WriteSurvivorsTask:
    shared: RoundTaskSettings

    def __call__(
        self, target: int, answers: Iterable[bytes | TaskOutcome | SurvivorBundle | GateInputOfAllHashRanges], cost: Costs
    ) -> WrittenSurvivors:
        what: SurvivorBundle | GateInputOfAllHashRanges | None = None
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
        if isinstance(what, GateInputOfAllHashRanges):
            return WrittenSurvivors(write_expected_record_sums(self.shared, what, some, cost))
        if what is None:
            raise CompactorError("answers came for nobody", hint="This is a bug; please report it")
        return write_survivors(self.shared, what, some, cost)


# ---- before the plan: which clean segments need not be read -----------------------------------------------------------------
#
# dirty segments    executors index their keys; the round reuses the resulting scratch objects
# transactions      folded on the driver, with sidecars in place of clean segments, to find deletions that are due
# clean segments    the driver reads the sidecar headers; tasks compare the Bloom filters with all dirty keys


@dataclass(frozen=True)
class KeptPassOneResults:
    """Pass 1 results of the dirty segments, kept for the plan that follows.

    leftover_keys: of all objects of earlier attempts, used or not.
    """

    jobs: RoundJobRunner
    index: PassOneSegmentResults
    verdicts: CleanSegmentVerdicts
    leftover_keys: tuple[str, ...]

    def matches_plan(self, plan: CompactionPlan) -> bool:
        """Compares dirty range, policy and time; the plan may skip only segments that these results include."""
        same = ("topic", "partition", "now_ms", "first_dirty_offset", "end_offset", "vector", "policy")
        return all(getattr(plan, name) == getattr(self.jobs.shared.plan, name) for name in same) and all(
            segment.id in self.index.stand_ins or segment.id in self.index.segments for segment in plan.skipped
        )

    @property
    def scratch_keys(self) -> list[str]:
        return list(dict.fromkeys((*self.leftover_keys, *self.index.scratch_keys)))


def find_skippable_segments(
    jobs: RoundJobRunner,
    state: PartitionState,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    sidecars: SidecarStore | None,
    statistics: BloomFilterUsageStatistics,
    leftovers: Sequence[ObjectInfo],
) -> KeptPassOneResults | None:
    """Return None if no clean segment has a sidecar, unless records without a key are refused, which must be known before there is a plan.


    :raises BadData, StoreError, OutOfBudget: if a segment is corrupt, the store fails or disk is short. After the last two the results are
        kept for the next attempt.
    """
    ids = [segment.id for segment in state.live]
    heads = sidecars.load_sidecar_heads(ids) if sidecars else dict.fromkeys(ids, SidecarHead(None, "bloom = false", 0))
    refuses_keyless = _refuses_keyless_records(jobs.shared.plan, assessment)
    if not refuses_keyless and all(heads[segment.id].sidecar is None for segment in assessment.clean):
        return None
    index = PassOneSegmentResults(state.live, {name: head.sidecar for name, head in heads.items() if head.sidecar is not None})
    jobs = adopt_leftover_bundles(jobs, index, leftovers)
    keys = tuple(info.key for info in leftovers)
    try:
        # Where something is dirty, a clean segment without a sidecar is read in any case: its keys now, and not once more for them.
        blind = {segment.id for segment in assessment.clean if segment.id not in index.stand_ins} if assessment.dirty else set()
        index.read_segments(jobs, blind | {segment.id for segment in assessment.dirty})
        if refuses_keyless:
            raise_if_keyless(state.topic, index.count_keyless_records())
        return KeptPassOneResults(jobs, index, _find_skippable_clean_segments(jobs, index, assessment, heads, statistics), keys)
    except (StoreError, OutOfBudget, Fenced):
        raise
    except BaseException:
        jobs.delete_scratch_objects([*keys, *index.scratch_keys])
        raise


def _refuses_keyless_records(plan: CompactionPlan, assessment: RoundAssessment[RemoteLogSegmentMetadata]) -> bool:
    """If so, there must be no plan with such records in the dirty range."""
    return plan.policy.keyless_records == "refuse" and bool(assessment.dirty)


def _find_skippable_clean_segments(
    jobs: RoundJobRunner,
    index: PassOneSegmentResults,
    assessment: RoundAssessment[RemoteLogSegmentMetadata],
    heads: dict[str, SidecarHead],
    statistics: BloomFilterUsageStatistics,
) -> CleanSegmentVerdicts:
    now_ms = jobs.shared.plan.now_ms
    bundles = tuple(bundle for bundle in index.bundles if bundle.dirty_rows)
    rows = sum(bundle.dirty_rows for bundle in bundles)
    estimate = estimate_distinct_keys([heads[s.id] for s in assessment.dirty], [estimate_record_count(s) for s in assessment.dirty])
    # Without a key every clean segment may be skipped, so 0 is said only where there is none.
    keys = max(1, min(rows, estimate)) if rows else 0
    due: dict[str, str] = {}
    inspections: dict[str, SegmentReadDecisionFromSidecar] = {}
    for segment in assessment.clean:
        source, verdicts, _ = index.folded[segment.id]
        why = reason_to_read_markers(source.table, verdicts.aborted, verdicts.discardable, now_ms)
        if why:
            due[segment.id] = why
        inspections[segment.id] = decide_by_sidecar(
            heads[segment.id],
            why or delete_horizon_passed_reason(segment, now_ms),
            dirty_key_count=keys,
            filter_usage=statistics,
            now_ms=now_ms,
            drops_keyless=jobs.shared.plan.policy.keyless_records == "drop",
        )
    asked = [name for name, decision in inspections.items() if decision.askable and not decision.must and not decision.may]
    sizes = {segment.id: segment.size_bytes for segment in assessment.clean}
    bunches = pack_bins([sizes[name] for name in asked], jobs.cluster.task_slots)
    items = [BloomFilterQuery(tuple(asked[n] for n in bunch), bundles) for bunch in bunches]
    met: dict[str, str] = {}
    size = sum(head.bytes for head in heads.values())
    for _, (why_of, fetched) in jobs.run_task_per_item(f"filters of {len(asked)} clean segments", query_bloom_filters, items):
        met |= why_of
        size += fetched
    return build_clean_segment_verdicts(inspections, met, due, asked_segments=asked, dirty_key_count=keys, sidecar_bytes=size)
