"""Spark jobs that return each task's result as soon as the task ends, and that return errors as values.

Spark should not retry our errors: corrupt data stays corrupt, stores were retried already, and an aborted job loses its other tasks.
    Results travel in an accumulator, whose updates Spark applies exactly once, when the task succeeds.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import os
import queue
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pyspark import InheritableThread
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.traceback_utils import SCCallSiteSync
from typing_extensions import override

from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import Settings
from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.errors import CompactorError, OutOfBudget, StoreError, Unavailable
from compactor.local.staging import DiskBudget, StagingFolder
from compactor.model.plan import CompactionPlan
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.pass_two import LocalWorker, versions_fingerprint
from compactor.round.ports import BloomFilterUsageStatistics, Costs, design_bloom_filter
from compactor.round.sources import StagedSegmentReader
from compactor.storage.port import ObjectStore
from compactor.tier.ports import ControlLogPublisher
from compactor.tier.sidecars import SidecarStore

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext


def pack_bins(weights: Sequence[int], bin_count: int) -> list[list[int]]:
    """Item indexes in bins of about equal weight, heaviest first; no bin is empty."""
    heap = [(0, number) for number in range(min(bin_count, len(weights)))]
    members: list[list[int]] = [[] for _ in heap]
    loads = [0] * len(heap)
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        load, number = heapq.heappop(heap)
        members[number].append(place)
        loads[number] = load + weights[place]
        heapq.heappush(heap, (loads[number], number))
    return [members[number] for number in sorted(range(len(members)), key=lambda number: -loads[number])]


# ---- environment of a task: settings are sent to executors, and each Python worker opens the stores once ----------------------


@dataclass(frozen=True)
class BloomFilterSettings:
    """probes: number of keys that a later round is expected to look up."""

    log_prefix: str
    record: BloomFilterUsageStatistics
    probes: int


@dataclass(frozen=True)
class RoundTaskSettings:
    """Settings of all tasks of a round.

    scratch: key prefix of this attempt's scratch objects.
    map_budget_bytes, disk_budget_bytes: for one task.
    filters: None if no Bloom filters are written.
    topic_id: empty unless the tier is broker-managed.
    """

    settings: Settings
    hash_key: bytes
    plan: CompactionPlan
    scratch: str
    ranges: int
    map_budget_bytes: int
    disk_budget_bytes: int
    gate: bool
    filters: BloomFilterSettings | None
    topic_id: TopicId = EMPTY_TOPIC_ID

    @property
    def partition(self) -> str:
        return str(self.plan.topic_partition)

    def open_segments(self, staging: StagingFolder, segments: Sequence[RemoteLogSegmentMetadata]) -> StagedSegmentReader:
        name = self.plan.topic_partition
        return StagedSegmentReader(staging, name, segments, self.plan.policy.max_decompressed_batch_bytes)


@cache
def load_tasks() -> None:
    """Once per process and its forks."""
    import pyspark.worker  # noqa: F401 - what each worker imports first

    import compactor.features.spark.shared_jobs
    import compactor.features.spark.worker  # noqa: F401 - tasks of all kinds
    from compactor.cleaner.precompile import precompile_kernels
    from compactor.features.spark.pass_one import load_survivor_kernels

    precompile_kernels()
    load_survivor_kernels()


@lru_cache(maxsize=4)
def open_tier_on_executor(settings_json: str, topic: str, topic_id: TopicId) -> Tier:
    return open_tier(Settings.model_validate_json(settings_json), topics={topic: topic_id} if topic_id else None)


def open_task_tier(shared: RoundTaskSettings) -> Tier:
    """Clients for the tier, which never contact the brokers."""
    return open_tier_on_executor(shared.settings.model_dump_json(), shared.plan.topic * bool(shared.topic_id), shared.topic_id)


@contextmanager
def open_task_staging(shared: RoundTaskSettings, cost: Costs) -> Iterator[StagingFolder]:
    """A folder limited to the task's budget. Fetched bytes and peaks are added to ``cost``."""
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or shared.settings.tier.state_dir
    os.makedirs(local, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"tiered-compactor-{os.getpid()}-", dir=local))
    staging = StagingFolder(folder / "staged", open_task_tier(shared).ports.layout, DiskBudget(shared.disk_budget_bytes))
    try:
        yield staging
    finally:
        cost.bytes_fetched += staging.bytes_fetched
        cost.peak_disk_bytes = max(cost.peak_disk_bytes, staging.peak_bytes)
        record_peak_memory(cost)
        staging.close()
        shutil.rmtree(folder, ignore_errors=True)


def record_peak_memory(cost: Costs) -> None:
    cost.peak_memory_bytes = max(cost.peak_memory_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def open_sidecars(shared: RoundTaskSettings) -> SidecarStore | None:
    """Return None if filters are switched off."""
    filters = shared.filters
    return SidecarStore(open_task_tier(shared).ports.control, filters.log_prefix, shared.hash_key) if filters else None


def create_local_worker(
    shared: RoundTaskSettings,
    staging: StagingFolder,
    sent_files: Mapping[tuple[str, str], bytes] | None = None,
) -> LocalWorker:
    """Budgets are one task's. ``sent_files``: by segment id and file kind, content that need not be fetched."""
    filters = shared.filters
    cleaner = shared.settings.cleaner_settings_for_topic(shared.plan.topic)
    ports = open_task_tier(shared).ports
    return LocalWorker(
        layout=ports.layout,
        publisher=ControlLogPublisher(),  # the driver introduces what a receipt names
        staging=staging,
        hash_key=shared.hash_key,
        map_budget_bytes=shared.map_budget_bytes,
        engine="auto" if cleaner.map_engine == "spark" else cleaner.map_engine,
        verify_before_publish=shared.gate,
        sidecars=open_sidecars(shared),
        filter_for=partial(design_bloom_filter, cleaner, filters.record, filters.probes) if filters else _design_no_bloom_filter,
        splices=cleaner.splice,
        known=sent_files or {},
    )


def _design_no_bloom_filter(record_count: int, segment_bytes: int) -> None:
    return


IndexAndItem = tuple[int, Any]
TaskWork = Callable[[int, Any, Costs], Any]
"""Function that a task calls for each item: (item index, item, cost to add to) -> result. It is pickled."""

SHUFFLE_PARTS_PER_SLOT: Final = 3
"""Shuffle partitions per slot. Several, because their sizes differ."""

FENCING_CHECK_SECONDS: Final = 2.0
"""Interval at which a waiting driver checks that it still leads."""


def _do_nothing(*_: object) -> None:
    return


@dataclass(frozen=True)
class JobListener:
    """Callbacks: on_step receives a new step with its number of tasks, on_task is called at the end of a task."""

    on_step: Callable[[str, int], None] = _do_nothing
    on_task: Callable[[], None] = _do_nothing


@dataclass(frozen=True)
class TaskOutcome:
    """index: -1 for work that belongs to no single item."""

    index: int
    value: Any
    error: CompactorError | None
    cost: Costs


class VersionMismatch(CompactorError):
    """Error of an executor whose code or codec libraries could write other bytes than the plan's (I7)."""


def run_task(index: int, work: Callable[[Costs], Any], plan: CompactionPlan | None = None) -> TaskOutcome:
    """Every exception becomes an error with a one-line message; another version than that of ``plan`` a VersionMismatch."""
    cost, begin = Costs(), time.process_time()
    outcome = _catch_errors(index, work, plan, cost)
    cost.cpu_seconds += time.process_time() - begin
    return outcome


def _catch_errors(index: int, work: Callable[[Costs], Any], plan: CompactionPlan | None, cost: Costs) -> TaskOutcome:
    try:
        _require_plan_version(plan)
        return TaskOutcome(index, work(cost), None, cost)
    except CompactorError as error:
        return TaskOutcome(index, None, error, cost)
    except MemoryError:
        return TaskOutcome(index, None, OutOfBudget("an executor ran out of memory", hint="Lower map_budget_bytes or give it more"), cost)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return TaskOutcome(index, None, OutOfBudget("an executor's local disk is full", hint="Lower disk_budget_bytes"), cost)
        return TaskOutcome(index, None, StoreError(f"{error.strerror or error} ({error.filename or 'on an executor'})"), cost)
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver has to hear of it
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f" ({where.tb_frame.f_code.co_filename}:{where.tb_lineno})" if where else ""
        return TaskOutcome(index, None, CompactorError(f"a bug on an executor: {type(error).__name__}: {error}{place}"), cost)


def _require_plan_version(plan: CompactionPlan | None) -> None:
    if plan is not None and plan.fingerprint != versions_fingerprint():
        raise VersionMismatch(f"the plan is for {plan.fingerprint}, an executor is {versions_fingerprint()}")


class _TaskOutcomeAccumulator(AccumulatorParam[list[tuple[int, TaskOutcome]]]):
    """Delivers outcomes of executors to the queue of their job."""

    def __init__(self) -> None:
        self.inboxes: dict[int, queue.SimpleQueue[TaskOutcome]] = {}
        self.on_driver = True

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {"inboxes": {}, "on_driver": False}

    @override
    def zero(self, value: list[tuple[int, TaskOutcome]]) -> list[tuple[int, TaskOutcome]]:
        return []

    @override
    def addInPlace(self, value1: list[tuple[int, TaskOutcome]], value2: list[tuple[int, TaskOutcome]]) -> list[tuple[int, TaskOutcome]]:
        if not self.on_driver:
            return [*value1, *value2]
        for job, outcome in value2:
            inbox = self.inboxes.get(job)
            if inbox is not None:
                inbox.put(outcome)
        return value1


@dataclass(frozen=True)
class RddPartitionTask:
    """Sends each item's outcome to the driver."""

    job: int
    work: TaskWork
    plan: CompactionPlan | None
    accumulator: Accumulator[list[tuple[int, TaskOutcome]]]

    def __call__(self, items: Iterable[tuple[int, Any]]) -> None:
        for index, item in items:
            self.send_outcome(run_task(index, partial(self.work, index, item), self.plan))

    def send_outcome(self, outcome: TaskOutcome) -> None:
        self.accumulator.add([(self.job, outcome)])


@dataclass
class SparkCluster:
    context: SparkContext
    router: _TaskOutcomeAccumulator = field(default_factory=_TaskOutcomeAccumulator)

    def __post_init__(self) -> None:
        self._accumulator = self.context.accumulator([], self.router)
        self._numbers = itertools.count()
        self._over = threading.Event()

    @property
    def task_slots(self) -> int:
        """Changes as executors come and go."""
        return max(1, self.context.defaultParallelism)

    @property
    def task_slots_per_executor(self) -> int:
        """Rounded up."""
        executors = max(1, int(self.context._jsc.sc().getExecutorMemoryStatus().size()) - 1)
        return -(-self.task_slots // executors)

    def cancel_jobs(self) -> None:
        """Threads that wait for a job get Unavailable."""
        self._over.set()

    def require_not_cancelled(self) -> None:
        if self._over.is_set():
            raise Unavailable("the job was broken off", hint="Run it again: open rounds are resumed")

    def rdd_of_items(self, items: Sequence[Any]) -> RDD[IndexAndItem]:
        """One task per item."""
        return self.context.parallelize(list(enumerate(items)), len(items))

    def shuffle_answers_to_targets(
        self, description: str, items: Sequence[Any], make_answers: Callable[[Any], Iterator[tuple[int, Any]]], targets: Sequence[Any]
    ) -> RDD[tuple[int, Any]]:
        """RDD of (target index, group): the target and all its answers. ``make_answers`` returns (target index, answer) pairs, one task per
        item.
        """
        parts = min(len(targets), self.task_slots * SHUFFLE_PARTS_PER_SLOT)
        tasks = max(1, len(items))
        pairs = list(enumerate(targets))
        # Targets travel with the items: as an RDD of their own they would need a second Python worker beside each task's.
        inputs = [(items[place : place + 1], pairs[place::tasks]) for place in range(tasks)]
        with name_started_stages(self.context, description):
            answers = self.context.parallelize(inputs, tasks).flatMap(partial(_answers_and_targets, make_answers))
            return answers.groupByKey(parts, shuffle_partition_of_target)

    def run_job(
        self,
        description: str,
        rdd: RDD[tuple[int, Any]],
        work: TaskWork,
        item_count: int,
        *,
        plan: CompactionPlan | None = None,
        raise_if_leadership_lost: Callable[[], object] = _do_nothing,
        job_listener: JobListener | None = None,
    ) -> Iterator[TaskOutcome]:
        """Run ``work`` over an RDD of (index, item), and yield outcomes as tasks end.

        :param plan: executors that would write other bytes for it return VersionMismatch.
        :param raise_if_leadership_lost: called every few seconds while waiting; raises Fenced.
        :raises Unavailable: if Spark aborts the job; outcomes yielded before are valid.
        """
        self.require_not_cancelled()
        job_listener = job_listener or JobListener()
        job_listener.on_step(description, item_count)
        with _RunningJob(self, description, rdd, work, plan) as running:
            seen: set[int] = set()
            while len(seen) < item_count:
                outcome = running.next_outcome(raise_if_leadership_lost)
                if outcome.index not in seen:
                    seen.add(outcome.index)
                    job_listener.on_task()
                    yield outcome


def _answers_and_targets(
    make_answers: Callable[[Any], Iterator[IndexAndItem]], item_and_targets: tuple[Sequence[Any], Sequence[IndexAndItem]]
) -> Iterator[IndexAndItem]:
    items, targets = item_and_targets
    yield from targets
    for item in items:
        yield from make_answers(item)


def shuffle_partition_of_target(target: int) -> int:
    """By its own index, which Spark takes modulo the number of partitions."""
    return target


@contextmanager
def name_started_stages(context: SparkContext, description: str) -> Iterator[None]:
    """PySpark would name them after its own source lines."""
    with _naming_lock:
        SCCallSiteSync._spark_stack_depth += 1
    context.setLocalProperty("callSite.short", description)
    try:
        yield
    finally:
        context.setLocalProperty("callSite.short", None)  # type: ignore[arg-type]
        with _naming_lock:
            SCCallSiteSync._spark_stack_depth -= 1


_naming_lock = threading.Lock()


class _RunningJob:
    """Runs in its own thread; cancelled if its consumer stops early."""

    def __init__(
        self, cluster: SparkCluster, description: str, rdd: RDD[tuple[int, Any]], work: TaskWork, plan: CompactionPlan | None
    ) -> None:
        self._cluster = cluster
        self._context = rdd.context
        self._number = next(cluster._numbers)
        self._group = f"tiered-compactor-{self._number}"
        self._inbox: queue.SimpleQueue[TaskOutcome] = queue.SimpleQueue()
        self._error: BaseException | None = None
        task = RddPartitionTask(self._number, work, plan, cluster._accumulator)

        def run_job_keeping_error() -> None:
            try:
                self._context.setJobGroup(self._group, description, interruptOnCancel=True)
                with name_started_stages(self._context, description):
                    rdd.setName(description).foreachPartition(task)
            except BaseException as error:  # noqa: BLE001 - raised again where the results are awaited
                self._error = error

        self._thread: threading.Thread = InheritableThread(target=run_job_keeping_error, name=description, daemon=True)

    def __enter__(self) -> Self:
        self._cluster.router.inboxes[self._number] = self._inbox
        self._thread.start()
        return self

    def next_outcome(self, raise_if_leadership_lost: Callable[[], object]) -> TaskOutcome:
        """Raises Unavailable if the job ended without one."""
        while True:
            over = not self._thread.is_alive()
            try:
                return self._inbox.get(timeout=0 if over else FENCING_CHECK_SECONDS)
            except queue.Empty:
                if over:
                    raise job_aborted_error(self._error) from None
            self._cluster.require_not_cancelled()
            raise_if_leadership_lost()

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
        self._thread.join()
        del self._cluster.router.inboxes[self._number]


def job_aborted_error(error: BaseException | None) -> CompactorError:
    """On one line, without stack traces."""
    lines = [line.strip() for line in str(error or "the job ended without a result").splitlines() if line.strip()]
    cause = next((line for line in lines if "aborted" in line or "cancelled" in line), lines[0])
    return Unavailable(
        f"Spark gave up: {cause[:400]}",
        hint="Were executors killed for want of memory? Give them more, or lower map_budget_bytes, and run it again",
    )


# ---- the driver's side of one round -------------------------------------------------------------------------------------------


ItemIndexAndResult = tuple[int, Any]


@dataclass(frozen=True)
class RoundJobRunner:
    """Each step is a job, stops at the first error, and adds its cost to ``cost``. check: raises Fenced if another compactor leads the
    partition.
    """

    cluster: SparkCluster
    control: ObjectStore
    shared: RoundTaskSettings
    cost: Costs
    job_listener: JobListener
    check: Callable[..., object]

    def run_task_per_item(self, step: str, work: Callable[..., Any], items: Sequence[Any]) -> Iterator[ItemIndexAndResult]:
        """Yield (item index, result) of ``work(shared, item, cost)`` as tasks finish. Raises the first error."""
        if items:
            yield from self.run_tasks_over_rdd(step, self.cluster.rdd_of_items(items), TaskWithSettings(work, self.shared), len(items))

    def delete_scratch_objects(self, object_keys: Sequence[str]) -> None:
        """Errors are only logged, because ``retire`` deletes what remains."""
        try:
            self.control.delete(object_keys)
        except CompactorError as error:
            logging.getLogger(__name__).info("scratch objects stay until `retire`: %s", error)

    def run_tasks_over_rdd(self, step: str, rdd: RDD[tuple[int, Any]], work: TaskWork, item_count: int) -> Iterator[ItemIndexAndResult]:
        """Yield (index, result) as tasks finish. Raises the first error."""
        what = f"{self.shared.partition}: {step}"
        waits = partial(self.check, caller_only_waits=True)
        for outcome in self.cluster.run_job(
            what, rdd, work, item_count, plan=self.shared.plan, raise_if_leadership_lost=waits, job_listener=self.job_listener
        ):
            self.check()
            self.cost.add(outcome.cost)
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, outcome.value


@dataclass(frozen=True)
class TaskWithSettings:
    work: Callable[..., Any]
    shared: RoundTaskSettings

    def __call__(self, index: int, item: Any, cost: Costs) -> Any:
        return self.work(self.shared, item, cost)
