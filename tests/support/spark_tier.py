"""Two tiers of the same log, one for the local engine and one for Spark's; and a stand-in for a cluster that runs its tasks here."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from checkpoint.offsets import first_dirty_offset_in
from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.bootstrap import open_tier
from compactor.config.settings import CleanerSettings, Settings, load_settings
from compactor.control.state import PartitionState
from compactor.features.imports.import_ import import_directory
from compactor.features.spark.jobs import JobListener, SparkCluster, TaskOutcome, TaskWork, run_task
from compactor.features.spark.worker import SparkRunner
from compactor.model.ids import TopicPartition
from compactor.model.plan import CompactionPlan, KeylessPolicy
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round.compaction import RoundReport
from compactor.round.plan import RoundAssessment, assess_round
from compactor.round.ports import Costs
from tests.support.tier_cli import MADE, typed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = TopicPartition("orders", 0)
NOW_MS = 10_000_000_000_000


class HereCluster:
    """Does what Cluster does, in this process and one task after the other; everything that would travel is pickled."""

    task_slots = 2
    task_slots_per_executor = 1

    def cancel_jobs(self) -> None:
        """Nothing runs in the background."""

    def require_not_cancelled(self) -> None:
        """Never over."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def rdd_of_items(self, items: Sequence[Any]) -> list[tuple[int, Any]]:
        return list(enumerate(items))

    def shuffle_answers_to_targets(
        self, what: str, items: Sequence[Any], answer: Callable[[Any], Iterator[tuple[int, Any]]], beside: Sequence[Any]
    ) -> list[tuple[int, Any]]:
        grouped: dict[int, list[Any]] = {place: [pickle.loads(pickle.dumps(one))] for place, one in enumerate(beside)}
        travelled = pickle.loads(pickle.dumps(answer))
        for item in items:
            for place, one in travelled(item):
                grouped[place].append(pickle.loads(pickle.dumps(one)))
        return list(grouped.items())

    def run_job(
        self,
        description: str,
        rdd: list[tuple[int, Any]],
        work: TaskWork,
        item_count: int,
        *,
        plan: CompactionPlan | None = None,
        raise_if_leadership_lost: Callable[[], object] = lambda: None,
        job_listener: JobListener | None = None,
    ) -> Iterator[TaskOutcome]:
        self.said.append(description)
        assert len(rdd) == item_count
        for index, item in rdd:
            raise_if_leadership_lost()
            function, travelled = pickle.loads(pickle.dumps((work, item)))
            yield pickle.loads(pickle.dumps(run_task(index, partial(function, index, travelled), plan)))


@dataclass
class Twins:
    """The same log in two tiers. ``toml``: sections besides [tier]. ``keyless``: what happens to records without a key."""

    folder: Path
    toml: str = ""
    keyless: KeylessPolicy = "drop"

    def __post_init__(self) -> None:
        self.local, self.remote = self._tier("local"), self._tier("spark")

    def settings(self, which: str) -> Settings:
        folder = self.folder / which
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "settings.toml"
        cleaner = f'[cleaner]\nkeyless_records = "{self.keyless}"'
        toml = self.toml.replace("[cleaner]", cleaner) if "[cleaner]" in self.toml else f"{cleaner}\n{self.toml}"
        file.write_text(f'[tier]\nurl = "{(folder / "a tier").as_uri()}"\nstate_dir = "{folder / "state"}"\n{toml}\n')
        MADE.append(partial(typed, file, "verify"))
        return load_settings(str(file), {})

    def _tier(self, which: str) -> Tier:
        return open_tier(self.settings(which))

    def bring(self, log_dir: Path) -> None:
        for tier in (self.local, self.remote):
            import_directory(tier, log_dir, NAME, tier.settings.cleaner.cleaner_policy())

    def round(self, cluster: Any, *, first_dirty: int | None = None, now_ms: int = NOW_MS) -> tuple[RoundReport, RoundReport]:
        """The same round by both engines, with what they report."""
        look = partial(from_offset, first_dirty) if first_dirty is not None else None
        here = create_round(self.local, NAME, now_ms, force=True, assess_with=look).run(self.local.open_partition_log(NAME))
        runner = spark_runner(cluster, self.remote, Costs())
        there = create_round(self.remote, NAME, now_ms, force=True, assess_with=look, runner=runner).run(
            self.remote.open_partition_log(NAME)
        )
        return here, there

    def difference(self) -> str:
        """Where the two tiers hold other segments, file by file; empty where only ids and what depends on the key differ."""
        one, other = (state_of(tier) for tier in (self.local, self.remote))
        if len(one.live) != len(other.live) or first_dirty_offset_in(one.vector) != first_dirty_offset_in(other.vector):
            return f"{len(one.live)} segments, {one.vector} and {len(other.live)} segments, {other.vector}"
        for mine, theirs in zip(one.live, other.live, strict=True):
            counts = [segment.content.count if segment.content else None for segment in (mine, theirs)]
            if (
                mine.model_copy(update={"id": theirs.id, "content": theirs.content}) != theirs
                or counts[0] is None
                or counts[0] != counts[1]
            ):
                return f"{mine} and {theirs}"
        return ""


def state_of(tier: Tier) -> PartitionState:
    return tier.open_partition_log(NAME).refresh()


def spark_runner(cluster: Any, tier: Tier, cost: Costs) -> SparkRunner:
    return SparkRunner(lambda: cast(SparkCluster, cluster), tier, tier.settings.cleaner_settings_for_topic(NAME.topic), cost)


def from_offset(
    first_dirty: int, state: PartitionState, cleaner: CleanerSettings, now_ms: int
) -> RoundAssessment[RemoteLogSegmentMetadata]:
    """A round from any offset on, as `clean --first-dirty-offset` would have it."""
    found = assess_round(state, cleaner, now_ms, force=True)
    dirty = tuple(segment for segment in found.covered_segments if segment.end_offset >= first_dirty)
    clean = tuple(segment for segment in found.covered_segments if segment.end_offset < first_dirty)
    return replace(found, due=bool(found.covered_segments), first_dirty=first_dirty, dirty=dirty, clean=clean)


def scratch_of(tier: Tier) -> list[str]:
    """Scratch objects that are still there."""
    return [info.key for info in tier.ports.control.list("partitions/") if "/scratch/" in info.key]


def session_of(cluster: SparkCluster) -> SparkSession:
    """A session over the cluster's context, for what needs Spark SQL."""
    from pyspark.sql import SparkSession

    return SparkSession(cluster.context)
