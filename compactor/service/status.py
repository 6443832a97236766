"""The daemon at one moment, as a frozen value: what metrics, health and pages are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compactor.control.summary import SegmentSummary
from compactor.model.ids import TopicPartition
from compactor.service.jobs import Done
from compactor.service.journal import Tell
from compactor.service.progress import AtWork, JobProgress
from compactor.service.scheduling import Job, PartitionWatch
from compactor.service.service_status import ServiceStatus
from compactor.service.story import PartitionStory
from compactor.service.tallies import Tallies, tally


@dataclass(frozen=True)
class Status(ServiceStatus):
    """Bytes. ``ready``: it has looked at the whole tier, too."""

    watches: tuple[PartitionWatch, ...]
    at_work: tuple[AtWork, ...]
    tallies: Tallies
    disk_used: int
    disk_peak: int
    disk_total: int

    @property
    def uncleanable(self) -> tuple[PartitionWatch, ...]:
        return tuple(watch for watch in self.watches if watch.uncleanable)

    @property
    def running(self) -> tuple[Job, ...]:
        return tuple(work.job for work in self.at_work)


@dataclass(frozen=True)
class PartitionPicture:
    """One partition at one moment, for its page. ``story``: None where only a summary of its log is known."""

    now_ms: int
    watch: PartitionWatch
    segments: tuple[SegmentSummary, ...]
    story: PartitionStory | None
    at_work: AtWork | None


class Board:
    """What a daemon remembers of its jobs, to be shown. One thread writes, any may read."""

    def __init__(self, tell: Tell, map_budget: Callable[[TopicPartition], int]) -> None:
        """``map_budget``: bytes for the offset map of a partition's round."""
        self.tallies = Tallies()
        self._tell = tell
        self._map_budget = map_budget
        self._at_work: dict[TopicPartition, JobProgress] = {}

    def begun(self, job: Job, watch: PartitionWatch, now_ms: int) -> JobProgress:
        progress = JobProgress(job, watch.sight, now_ms, self._tell)
        self._at_work[job.name] = progress
        return progress

    def ended(self, done: Done, now_ms: int) -> str:
        """Gives the id of the run, as far as there was one."""
        name = done.job.name
        progress = self._at_work.pop(name, None)
        self.tallies = tally(self.tallies, done, self._map_budget(name))
        return progress.shown(now_ms).run_id if progress else ""

    def at_work(self, now_ms: int) -> tuple[AtWork, ...]:
        return tuple(progress.shown(now_ms) for progress in self._at_work.copy().values())
