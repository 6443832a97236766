"""The driver's side of a round's jobs: each is a step with a name, whose first error ends it, and whose cost is added up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from compactor.errors import CompactorError
from compactor.round.ports import Check
from compactor.spark.cluster.executor import Cost, Shared
from compactor.spark.cluster.jobs import Cluster, JobWatch, Work
from compactor.storage.deleting import delete_keys
from compactor.storage.port import ObjectStore

if TYPE_CHECKING:
    from pyspark import RDD


@dataclass(frozen=True)
class TaskSteps:
    """:param control: the driver's own. :param check: called while a step runs; raises Fenced where somebody else leads."""

    cluster: Cluster
    control: ObjectStore
    shared: Shared
    cost: Cost
    watch: JobWatch
    check: Check

    def each(self, step: str, work: Callable[..., Any], items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """One task per item: ``work(shared, item, cost)``; (place of the item, result) as they come. Raises the first error of an item."""
        if items:
            yield from self.run(step, self.cluster.items(items), Bound(work, self.shared), len(items))

    def forget(self, keys: Sequence[str]) -> None:
        """Deletes scratch objects that nobody needs now; what stays is swept by `retire`. They are this attempt's own, whoever leads."""
        try:
            delete_keys(self.control, keys)
        except CompactorError as error:
            logging.getLogger(__name__).info("scratch objects stay until `retire`: %s", error)

    def run(self, step: str, rdd: RDD[tuple[int, Any]], work: Work, count: int) -> Iterator[tuple[int, Any]]:
        what = f"{self.shared.partition}: {step}"
        waits = partial(self.check, waiting=True)
        for outcome in self.cluster.outcomes(what, rdd, work, count, plan=self.shared.plan, check=waits, watch=self.watch):
            self.check()
            self.cost.add(outcome.cost)
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, outcome.value


@dataclass(frozen=True)
class Bound:
    """A task's function with what all tasks share."""

    work: Callable[..., Any]
    shared: Shared

    def __call__(self, place: int, item: Any, cost: Cost) -> Any:
        return self.work(self.shared, item, cost)
