"""The driver's side of one round: it runs each step as a Spark job, stops at the first error, and adds up the cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from compactor.errors import CompactorError
from compactor.round.ports import LeadershipCheck
from compactor.spark.cluster.executor import RoundTaskSettings, TaskCost
from compactor.spark.cluster.jobs import JobListener, SparkCluster, TaskWork
from compactor.storage.port import ObjectStore

if TYPE_CHECKING:
    from pyspark import RDD

ItemIndexAndResult = tuple[int, Any]


@dataclass(frozen=True)
class RoundJobRunner:
    """Runner of the Spark jobs of one round.

    control: the driver's control store.
    shared: settings that every task of the round receives.
    cost: the cost of every task is added to it.
    check: called while a step runs; raises Fenced if another compactor leads the partition.
    """

    cluster: SparkCluster
    control: ObjectStore
    shared: RoundTaskSettings
    cost: TaskCost
    job_listener: JobListener
    check: LeadershipCheck

    def run_task_per_item(self, step: str, work: Callable[..., Any], items: Sequence[Any]) -> Iterator[ItemIndexAndResult]:
        """Run one task per item and yield (item index, result) as the tasks finish. Raises the first error of a task.

        :param work: function that each task calls as ``work(shared, item, cost)``.
        """
        if items:
            yield from self.run_tasks_over_rdd(
                step, self.cluster.create_rdd_with_task_per_item(items), TaskWithSettings(work, self.shared), len(items)
            )

    def delete_scratch_objects(self, object_keys: Sequence[str]) -> None:
        """Delete scratch objects of this attempt. An error is only logged, because the command ``retire`` deletes what remains."""
        try:
            self.control.delete(object_keys)
        except CompactorError as error:
            logging.getLogger(__name__).info("scratch objects stay until `retire`: %s", error)

    def run_tasks_over_rdd(self, step: str, rdd: RDD[tuple[int, Any]], work: TaskWork, item_count: int) -> Iterator[ItemIndexAndResult]:
        """Run ``work`` over an RDD of (index, item) with ``item_count`` items and yield (index, result) as the tasks finish. Raises the
        first error of a task.
        """
        what = f"{self.shared.partition}: {step}"
        waits = partial(self.check, caller_only_waits=True)
        for outcome in self.cluster.run_job(
            what, rdd, work, item_count, plan=self.shared.plan, raise_if_leadership_lost=waits, job_listener=self.job_listener
        ):
            self.check()
            self.cost.add_cost(outcome.cost)
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, outcome.value


@dataclass(frozen=True)
class TaskWithSettings:
    """Picklable function of a task, with the settings that all tasks share already applied."""

    work: Callable[..., Any]
    shared: RoundTaskSettings

    def __call__(self, index: int, item: Any, cost: TaskCost) -> Any:
        return self.work(self.shared, item, cost)
