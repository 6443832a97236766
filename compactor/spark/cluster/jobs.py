"""Spark jobs whose results arrive as their tasks end, and whose errors are values.

An error inside a task is no business of Spark's scheduler: bad data stays bad, a store was tried for minutes already, and a job that Spark
gives up takes its other tasks with it. So tasks return what happened. What is left to Spark is what it is good at: executors that die.

Results travel in an accumulator: Spark applies each task's updates once, when the task has ended well, and long before its job ends.
"""

from __future__ import annotations

import errno
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from pyspark import InheritableThread
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.traceback_utils import SCCallSiteSync

from compactor.errors import CompactorError, OutOfBudget, StoreError, Unavailable
from compactor.model.plan import CompactionPlan
from compactor.round.rewrite import fingerprint
from compactor.spark.cluster.executor import Cost

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import SparkSession

Work = Callable[[int, Any, Cost], Any]
"""(place of the item, item, where to note the cost) -> result. Pickled: a function of a module, or a value with ``__call__``."""

PARTS_PER_SLOT: Final = 3
"""Parts of the shuffle; some are larger than others."""

LOOK_S: Final = 2.0
"""How often a driver that waits looks whether it still leads."""


def _nothing(*_: object) -> None:
    return None


@dataclass(frozen=True)
class JobWatch:
    """Who wants to know how it goes. ``on_step``: what is done now, and in how many tasks; ``on_task``: one of them has ended."""

    on_step: Callable[[str, int], None] = _nothing
    on_task: Callable[[], None] = _nothing


@dataclass(frozen=True)
class TaskOutcome:
    """What became of one item. ``index``: its place in the job; -1 for work that belongs to no single item."""

    index: int
    value: Any
    error: CompactorError | None
    cost: Cost


class VersionDiffers(CompactorError):
    """An executor would not make the same bytes (I7)."""


def attempt(index: int, work: Callable[[Cost], Any], plan: CompactionPlan | None = None) -> TaskOutcome:
    """Runs in a task. Every error becomes a value that says in one line what is wrong."""
    cost, begin = Cost(), time.process_time()
    outcome = _attempt(index, work, plan, cost)
    cost.cpu_seconds += time.process_time() - begin
    return outcome


def _attempt(index: int, work: Callable[[Cost], Any], plan: CompactionPlan | None, cost: Cost) -> TaskOutcome:
    try:
        _same_version(plan)
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


def _same_version(plan: CompactionPlan | None) -> None:
    if plan is not None and plan.fingerprint != fingerprint():
        raise VersionDiffers(f"the plan is for {plan.fingerprint}, an executor is {fingerprint()}")


class _Funnel(AccumulatorParam[list[tuple[int, TaskOutcome]]]):
    """On an executor a list; on the driver the inboxes of its jobs."""

    def __init__(self) -> None:
        self.inboxes: dict[int, queue.SimpleQueue[TaskOutcome]] = {}
        self.on_driver = True

    def __getstate__(self) -> dict[str, Any]:
        return {"inboxes": {}, "on_driver": False}

    def zero(self, value: list[tuple[int, TaskOutcome]]) -> list[tuple[int, TaskOutcome]]:
        return []

    def addInPlace(  # noqa: N802, Spark's name
        self, value1: list[tuple[int, TaskOutcome]], value2: list[tuple[int, TaskOutcome]]
    ) -> list[tuple[int, TaskOutcome]]:
        if not self.on_driver:
            return [*value1, *value2]
        for job, outcome in value2:
            inbox = self.inboxes.get(job)
            if inbox is not None:
                inbox.put(outcome)
        return value1


@dataclass(frozen=True)
class Task:
    """What runs on the executors: each item of a partition in turn."""

    job: int
    work: Work
    plan: CompactionPlan | None
    funnel: Accumulator[list[tuple[int, TaskOutcome]]]

    def __call__(self, items: Iterable[tuple[int, Any]]) -> None:
        for index, item in items:
            self.deliver(attempt(index, partial(self.work, index, item), self.plan))

    def deliver(self, outcome: TaskOutcome) -> None:
        self.funnel.add([(self.job, outcome)])


@dataclass
class Cluster:
    """One Spark application, for jobs from several threads."""

    spark: SparkSession
    funnel: _Funnel = field(default_factory=_Funnel)

    def __post_init__(self) -> None:
        self._context = self.spark.sparkContext
        self._accumulator = self._context.accumulator([], self.funnel)
        self._numbers = itertools.count()
        self._over = threading.Event()

    @property
    def slots(self) -> int:
        """Tasks that run at a time, now: executors come and go."""
        return max(1, self._context.defaultParallelism)

    @property
    def slots_per_executor(self) -> int:
        executors = max(1, int(self._context._jsc.sc().getExecutorMemoryStatus().size()) - 1)
        return -(-self.slots // executors)

    def break_off(self) -> None:
        """Whoever waits for a job is told that it is over, and the jobs are cancelled."""
        self._over.set()

    def require(self) -> None:
        """Raises Unavailable where that was said."""
        if self._over.is_set():
            raise Unavailable("the job was broken off", hint="Run it again: what is open is taken up")

    def items(self, items: Sequence[Any]) -> RDD[tuple[int, Any]]:
        """Each item with its place, and each for a task of its own."""
        return self._context.parallelize(list(enumerate(items)), len(items))

    def exchanged(
        self, what: str, items: Sequence[Any], answer: Callable[[Any], Iterator[tuple[int, Any]]], beside: Sequence[Any]
    ) -> RDD[tuple[int, Any]]:
        """Each item's answers, (place, answer), brought together by place through the shuffle, with what lies ``beside``: one per place.

        ``what``: what the stage that answers is called.
        """
        parts = min(len(beside), self.slots * PARTS_PER_SLOT)
        with stages_called(self._context, what):
            given = self._context.parallelize(list(enumerate(beside)), parts)
            answers = self._context.parallelize(list(items), max(1, len(items))).flatMap(answer)
            return answers.union(given).groupByKey(parts, _same)

    def outcomes(
        self,
        what: str,
        rdd: RDD[tuple[int, Any]],
        work: Work,
        count: int,
        *,
        plan: CompactionPlan | None = None,
        check: Callable[[], object] = _nothing,
        watch: JobWatch | None = None,
    ) -> Iterator[TaskOutcome]:
        """Runs ``work`` over an RDD of (place, item) with ``count`` different places; an outcome for each as its task ends.

        :param what: what the Spark UI says of it: which partition, and what is done.
        :param plan: an executor whose code would make other bytes of it refuses (VersionDiffers).
        :param check: called every few seconds; raises Fenced.
        :raises Unavailable: Spark gives up. The outcomes that came before were right.
        """
        self.require()
        watch = watch or JobWatch()
        watch.on_step(what, count)
        with _Running(self, what, rdd, work, plan) as running:
            seen: set[int] = set()
            while len(seen) < count:
                outcome = running.next(check)
                if outcome.index not in seen:
                    seen.add(outcome.index)
                    watch.on_task()
                    yield outcome


def _same(place: int) -> int:
    return place


@contextmanager
def stages_called(context: SparkContext, what: str) -> Iterator[None]:
    """Names the stages of this thread's jobs, which PySpark would call by the line of its own that started them."""
    with _naming:
        SCCallSiteSync._spark_stack_depth += 1
    context.setLocalProperty("callSite.short", what)
    try:
        yield
    finally:
        context.setLocalProperty("callSite.short", None)  # type: ignore[arg-type]
        with _naming:
            SCCallSiteSync._spark_stack_depth -= 1


_naming = threading.Lock()


class _Running:
    """One job in a thread of its own; cancelled where its consumer leaves early."""

    def __init__(self, cluster: Cluster, what: str, rdd: RDD[tuple[int, Any]], work: Work, plan: CompactionPlan | None) -> None:
        self._cluster = cluster
        self._context = rdd.context
        self._number = next(cluster._numbers)
        self._group = f"tiered-compactor-{self._number}"
        self._inbox: queue.SimpleQueue[TaskOutcome] = queue.SimpleQueue()
        self._error: BaseException | None = None
        task = Task(self._number, work, plan, cluster._accumulator)

        def run() -> None:
            try:
                self._context.setJobGroup(self._group, what, interruptOnCancel=True)
                with stages_called(self._context, what):
                    rdd.setName(what).foreachPartition(task)
            except BaseException as error:  # noqa: BLE001 - raised again where the results are awaited
                self._error = error

        self._thread: threading.Thread = InheritableThread(target=run, name=what, daemon=True)

    def __enter__(self) -> Self:
        self._cluster.funnel.inboxes[self._number] = self._inbox
        self._thread.start()
        return self

    def next(self, check: Callable[[], object]) -> TaskOutcome:
        while True:
            over = not self._thread.is_alive()
            try:
                return self._inbox.get(timeout=0 if over else LOOK_S)
            except queue.Empty:
                if over:
                    raise given_up(self._error) from None
            self._cluster.require()
            check()

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._group)
        self._thread.join()
        del self._cluster.funnel.inboxes[self._number]


def given_up(error: BaseException | None) -> CompactorError:
    """What Spark says when it aborts a job, as one line without its stack traces."""
    lines = [line.strip() for line in str(error or "the job ended without a result").splitlines() if line.strip()]
    cause = next((line for line in lines if "aborted" in line or "cancelled" in line), lines[0])
    return Unavailable(
        f"Spark gave up: {cause[:400]}",
        hint="Were executors killed for want of memory? Give them more, or lower map_budget_bytes, and run it again",
    )
