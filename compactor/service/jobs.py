"""What a thread of the daemon does with one partition: a round, retire, a generation. What to do is scheduling's business."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from compactor.bootstrap import Tier
from compactor.config import Cleaner, Settings
from compactor.control.leadership import lease_of
from compactor.control.logs import PartitionLog, open_catalog
from compactor.control.ordering import Stage
from compactor.control.state import CatalogState
from compactor.errors import CompactorError, Fenced, Leased, OutOfBudget
from compactor.local.budget import Budget
from compactor.model.plan import CompactionPlan
from compactor.round.compaction import OnStage, RoundReport
from compactor.service.scheduling import Action, Job
from compactor.storage.port import ObjectInfo, ObjectStore, Piece, RangeCopies, Unfinished
from compactor.transfer.generation_upkeep import GenerationUpkeep, keep_generation
from compactor.transfer.generations import Target, Writing
from compactor.upkeep.retire import RetireReport, retire


class Stopped(CompactorError):
    """The daemon is asked to end. A round that ends with this is one that a crash ended: the next run resumes it."""


@dataclass(frozen=True)
class Stop:
    """Set once, looked at wherever work may be left."""

    event: threading.Event

    def check(self) -> None:
        """Raises Stopped."""
        if self.event.is_set():
            raise Stopped("the daemon is stopping")

    def sleep(self, seconds: float) -> None:
        """Sleeps, but not through a stop. Raises Stopped."""
        if self.event.wait(seconds):
            self.check()

    def stage(self, stage: Stage) -> None:
        """Between two steps of a round, but not behind its publication: what is left then is only to write down what it cost."""
        if stage is not Stage.PUBLISHED:
            self.check()


class Interruptible:
    """A store of segments whose next request fails once the daemon is asked to end: work on a large partition stops within one request.

    ``moved`` is told of bytes as they come and go, for progress.
    """

    def __init__(self, store: ObjectStore, stop: Stop, moved: Callable[[int], None] = lambda size: None) -> None:
        self._store = store
        self._stop = stop
        self._moved = moved

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._stop.check()
        data = self._store.get(key, start, length)
        self._moved(len(data))
        return data

    def head(self, key: str) -> ObjectInfo:
        self._stop.check()
        return self._store.head(key)

    def create(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        self._stop.check()
        return self._store.create(key, data, metadata)

    def create_from_file(self, key: str, path: Path, metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        self._stop.check()
        return self._store.create_from_file(key, path, metadata)

    @property
    def copies(self) -> RangeCopies | None:
        return self._store.copies

    def compose(self, key: str, pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        self._stop.check()
        return self._store.compose(key, pieces, metadata)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        self._stop.check()
        return self._store.put(key, data)

    def download(self, key: str, path: Path, start: int = 0, length: int | None = None) -> int:
        self._stop.check()
        size = self._store.download(key, path, start, length)
        self._moved(size)
        return size

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._stop.check()
        return self._store.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        self._stop.check()
        self._store.delete(keys)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        self._stop.check()
        return self._store.unfinished(prefix)

    def abort(self, uploads: Iterable[Unfinished]) -> None:
        self._stop.check()
        self._store.abort(uploads)

    def clock_ms(self) -> int:
        return self._store.clock_ms()


@dataclass(frozen=True)
class Done:
    """A job's end. ``status``: one of `run`'s or `generations write`'s, or retired, failed, out_of_budget, stopped.

    ``log``: as folded after it, if it was. ``phases``: seconds of each (progress.AtWork).
    """

    job: Job
    status: str
    reason: str = ""
    log: PartitionLog | None = None
    report: RoundReport | RetireReport | GenerationUpkeep | None = None
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)


class Report(Protocol):
    """What is told of a job while it goes on."""

    def moved(self, size: int) -> None:
        """Bytes of segments that came from the store."""

    def reached(self, stage: Stage, plan: CompactionPlan) -> None:
        """Each stage of a round."""


@dataclass(frozen=True)
class Means:
    """What jobs share besides the tier. ``target``: where generations go, None where nobody wants any."""

    disk: Budget
    stop: Stop
    target: Target | None = None


def perform(opened: Tier, catalog: CatalogState, job: Job, means: Means, now_ms: int, report: Report, *, slot: int = -1) -> Done:
    """Does the job under an incarnation of its own. Nothing is raised: whatever happens is an outcome.

    :param slot: of the partition's log, up to which it was read when the job was chosen. Who has deleted something meanwhile has deleted
        everything that was due: where several daemons see the same time come, one of them looks into the store and the others at the log.
    """

    def on_stage(stage: Stage, plan: CompactionPlan) -> None:
        report.reached(stage, plan)
        means.stop.stage(stage)

    opened = opened.over(data=Interruptible(opened.ports.data, means.stop, report.moved))
    opened = replace(opened, catalog=open_catalog(opened.ports))
    opened.catalog.load(catalog)
    log = opened.open(job.name, leads=True)
    try:
        if job.action is Action.GENERATION and means.target is not None:
            done = keep_generation(opened, means.target, job.name, Writing(disk=means.disk, yields=True))
            return Done(job, done.report.status, report=done)
        log.refresh()
        lease = lease_of(opened.ports, log)
        left_ms = lease.expires_ms - opened.ports.control.clock_ms() if lease else 0
        if lease is not None and 0 < left_ms <= 2 * opened.lease.ttl_ms:  # beyond that the store's clock was set back, or its ttl is longer
            return Done(job, "leased", f"{lease.holder} is at work", log)
        if job.action is Action.RETIRE and 0 <= slot < log.state.slot:
            return Done(job, "nothing_to_do", "somebody else has written meanwhile", log)
        if job.action is Action.ROUND:
            found, status, reason = _round(opened, log, means.disk, now_ms, on_stage, force=job.force)
        else:
            found, status, reason = _retire(opened, log, means.disk, now_ms, on_stage)
        log.refresh()
        return Done(job, status, reason, log, found)
    except Stopped as error:
        return Done(job, "stopped", error.message)
    except Leased as error:
        return Done(job, "leased", error.message)
    except Fenced as error:
        return Done(job, "fenced", error.message)
    except OutOfBudget as error:
        return Done(job, "out_of_budget", str(error))
    except CompactorError as error:
        return Done(job, "failed", str(error))
    except Exception as error:  # noqa: BLE001 - one partition's bug must not end the service for the others (I9)
        return Done(job, "failed", f"a bug: {type(error).__name__}: {error}")


def try_stores(opened: Tier) -> None:
    """Writes a few bytes into each store and deletes them, where `config check` does it too. Raises StoreError, OutOfBudget."""
    ports, tier = opened.ports, opened.settings.tier
    places = [(ports.control, "probe/daemon")]
    if tier.control_url and opened.ownership.ours:
        places.append((ports.data, ".tiered-compactor/probe/daemon"))
    for store, key in places:
        store.put(key, b"may a round write here?")
        store.delete([key])


def _round(
    opened: Tier, log: PartitionLog, disk: Budget, now_ms: int, on_stage: OnStage, *, force: bool
) -> tuple[RoundReport | RetireReport, str, str]:
    name = log.state.name
    report = opened.round(name, now_ms, force=force, on_stage=on_stage, disk=disk).run(log)
    if report.status in ("cleaned", "resumed"):
        opened.note_change(log)
    return report, report.status, report.reason


def _retire(opened: Tier, log: PartitionLog, disk: Budget, now_ms: int, on_stage: OnStage) -> tuple[RoundReport | RetireReport, str, str]:
    work = opened.round(log.state.name, now_ms, on_stage=on_stage, disk=disk)
    report = retire(opened.ports, log, opened.lease, opened.retention, work=work)
    opened.note_slots([log])
    return report, "retired", ""


def shared_settings(settings: Settings, jobs: int, lanes: int) -> Settings:
    """Settings for one of ``jobs`` rounds at once: each gets its share of the memory, ``lanes`` threads of its own."""

    def share(cleaner: Cleaner) -> Cleaner:
        return cleaner.model_copy(update={"map_budget_bytes": max(1, cleaner.map_budget_bytes // jobs)})

    return settings.model_copy(
        update={
            "cleaner": share(settings.cleaner),
            "topics": {pattern: share(cleaner) for pattern, cleaner in settings.topics.items()},
            "daemon": settings.daemon.model_copy(update={"threads": lanes}),
        }
    )
