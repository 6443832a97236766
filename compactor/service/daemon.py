"""The daemon: looks for work, does what is due with a few threads under common budgets, tells how it goes, ends when it is asked to.

Several daemons share a tier without talking to each other: leases keep them apart, a random order keeps them from meeting.
"""

from __future__ import annotations

import queue
import random
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from compactor.bootstrap import Tier
from compactor.config import Settings
from compactor.errors import CompactorError, StoreError
from compactor.local.budget import Budget
from compactor.local.spool import try_folder
from compactor.model.ids import TopicPartition
from compactor.round.compaction import RoundReport, disk_budget
from compactor.service.jobs import Done, Interruptible, Stop, Stopped, perform, shared_settings, try_stores
from compactor.service.metrics import Status, Tallies, tally
from compactor.service.scheduling import (
    POLL_MS,
    Job,
    JobOutcome,
    PartitionWatch,
    Sight,
    choose,
    discovered,
    finished,
    hinted,
    look_failed,
    looked,
    needs_look,
    remembered,
)
from compactor.service.waiting import ended_in
from compactor.service.watching import Watching
from compactor.upkeep.retire import RetireReport
from compactor.upkeep.uploads import LEAST_AGE_MS, sweep_uploads

PROBE_MS = 300_000
"""So often it tries whether it may write into state_dir, where nothing says otherwise."""
LOOKERS = 8
"""Partitions that are looked at at once: a look is a handful of small requests, one after the other."""

Tell = Callable[[str], None]


class Daemon:
    """``scan`` and ``dispatch`` are the steps, ``run`` repeats them. One thread calls them; ``status`` may be asked from any.

    :param tell: is told in a line whatever happens.
    :param seed: of the order in which partitions are taken up; None: another one each time, so that daemons do not run into each other.
    """

    def __init__(self, opened: Tier, *, tell: Tell = lambda text: None, seed: int | None = None) -> None:
        self.stop = Stop(threading.Event())
        opened = opened.over(data=Interruptible(opened.ports.data, self.stop))
        self._opened = replace(opened, ports=replace(opened.ports, sleep=self.stop.sleep))
        self._tell = tell
        self._random = random.Random(seed)  # noqa: S311 - only the order of partitions depends on it
        self._watching = Watching(self._opened)
        self._watches: dict[TopicPartition, PartitionWatch] = {}
        self._running: dict[TopicPartition, Job] = {}
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self._tallies = Tallies()
        self._started_ms = opened.ports.clock_ms()
        self._scans = 0
        self._scan_ms = 0
        self._problem = ""
        self._unwritable = ""
        self._tried_ms = 0
        self._doubtful = True
        self._swept_ms = self._started_ms
        self._coming: Settings | None = None
        self._heard = time.monotonic()
        threads = opened.settings.daemon.threads
        self._disk = Budget(_disk_total(opened, threads))

    # --- the loop ---

    def run(self) -> None:
        """Until ``end`` is called; jobs at work are left within a request or two, and their leadership is given back."""
        interval_s = self._opened.settings.daemon.interval_ms / 1000
        next_scan = time.monotonic()
        while not self.stop.event.is_set():
            self._heard = time.monotonic()
            self._adopt()
            if self._heard >= next_scan:
                self.scan()
                next_scan = time.monotonic() + interval_s
            self.dispatch()
            self.collect(max(0.0, next_scan - time.monotonic()))
        while self._running:
            self.collect(None)

    def end(self) -> None:
        """Asks it to end; returns at once."""
        self.stop.event.set()
        self._done.put(None)

    def reread(self, settings: Settings) -> None:
        """Asks it to go on with these settings (reloading.reread), from the next job on; returns at once."""
        self._coming = settings
        self._done.put(None)

    def _adopt(self) -> None:
        settings, self._coming = self._coming, None
        if settings is None:
            return
        self._opened = replace(self._opened, settings=settings)
        self._watching.adopt(self._opened)
        now = self._opened.ports.clock_ms()
        for name, watch in self._watches.items():
            self._watches[name] = replace(watch, sight=self._watching.again(name, now) or watch.sight)

    def scan(self) -> None:
        """One look for work over the tier: what the catalog says has changed, and what is due for a look."""
        now = self._opened.ports.clock_ms()
        try:
            self._read_catalog(now)
            self._look_at(now)
        except Stopped:
            return
        except CompactorError as error:
            if not self._problem:
                self._tell(f"the tier cannot be read: {error}")
            self._problem = str(error)
            return
        if self._problem:
            self._tell("the tier can be read again")
        self._problem = ""
        self._scans += 1
        self._scan_ms = now
        self._try_to_write(now)
        self._sweep(now)

    def _sweep(self, now_ms: int) -> None:
        """What writers that died have begun, once in the age that makes it old."""
        if now_ms - self._swept_ms < max(self._opened.retention.orphan_age_ms, LEAST_AGE_MS):
            return
        self._swept_ms = now_ms
        try:
            swept = sweep_uploads(self._opened, now_ms)
        except CompactorError as error:
            self._tell(f"unfinished uploads are left where they are: {error}")
            return
        if swept:
            self._tell(f"swept {len(swept)} uploads that nobody had finished, {swept[0]} among them")

    def _try_to_write(self, now_ms: int) -> None:
        """Whether rounds would have where to write: at the start, after a job that failed, and at each scan while they have not.

        The directory now and then as well; an idle tier's store is not written to.
        """
        if not self._unwritable and not self._doubtful and now_ms - self._tried_ms < PROBE_MS:
            return
        stores = bool(self._unwritable) or self._doubtful
        self._tried_ms, self._doubtful = now_ms, False
        before, self._unwritable = self._unwritable, ""
        try:
            try_folder(self._opened.state_dir)
            if stores:
                try_stores(self._opened)
        except Stopped:
            return
        except CompactorError as error:
            self._unwritable = f"nothing can be written: {error}"
            if not before:
                self._tell(f"{self._unwritable}. No round is begun until it can be")
            return
        if before:
            self._tell("it can be written again")

    def dispatch(self) -> list[Job]:
        """Begins what is due and has a thread."""
        if self.stop.event.is_set() or self._unwritable:
            return []
        watches = list(self._watches.values())
        self._random.shuffle(watches)
        threads = self._opened.settings.daemon.threads
        jobs = choose(watches, self._running, threads, self._opened.ports.clock_ms())
        lanes = threads if jobs and jobs[0].alone else max(1, threads // max(1, len(jobs) + len(self._running)))
        for job in jobs:
            self._begin(job, 1 if job.alone else threads, lanes)
        return jobs

    def collect(self, wait_s: float | None) -> None:
        """Waits for one job to end, or for ``wait_s`` (None: as long as it takes), and takes in all that have ended."""
        for ended in ended_in(self._done, wait_s):
            self._take_in(ended)

    # --- looking ---

    def _read_catalog(self, now_ms: int) -> None:
        catalog = self._opened.catalog
        if self._scans == 0 or catalog.poll():
            state = self._opened.identity()
            if not self._watches:
                for name, (seen, checked_ms) in self._watching.remember(state.partitions, POLL_MS, now_ms).items():
                    self._watches[name] = remembered(name, state.partitions[str(name)], seen, checked_ms)
            for text, slot in state.partitions.items():
                name = TopicPartition.parse(text)
                known = self._watches.get(name)
                if known is None:
                    self._watches[name] = discovered(name, slot, now_ms)
                elif slot > known.hint:
                    self._watches[name] = hinted(known, slot, now_ms)

    def _look_at(self, now_ms: int) -> None:
        names = [name for name, watch in self._watches.items() if name not in self._running and needs_look(watch, now_ms)]
        if not names:
            return
        with ThreadPoolExecutor(min(LOOKERS, len(names)), thread_name_prefix="look") as pool:
            looks = {name: pool.submit(self._look, self._watches[name], now_ms) for name in names}
            self._take_looks(looks, now_ms)
        self._watching.write_down()

    def _take_looks(self, looks: dict[TopicPartition, Future[Sight]], now_ms: int) -> None:
        for name, look in looks.items():
            watch = self._watches[name]
            try:
                self._watches[name] = looked(watch, look.result(), now_ms, self._random.random())
            except Stopped:
                raise
            except Exception as error:
                if isinstance(error, StoreError) and len(looks) > 1 and all(_unreachable(other) for other in looks.values()):
                    raise  # it is not this partition that is wrong
                reason = str(error) if isinstance(error, CompactorError) else f"a bug: {type(error).__name__}: {error}"
                self._watches[name] = look_failed(watch, reason, now_ms)
                if not watch.unreadable:
                    self._tell(f"{name}: {reason}")

    def _look(self, watch: PartitionWatch, now_ms: int) -> Sight:
        self.stop.check()
        return self._watching.look(watch.name, watch.hint, watch.sight, now_ms)

    # --- working ---

    def _begin(self, job: Job, jobs: int, lanes: int) -> None:
        opened = replace(self._opened, settings=shared_settings(self._opened.settings, jobs, lanes))
        catalog = self._opened.catalog.state
        self._running[job.name] = job

        def work() -> None:
            begun = time.monotonic()
            done = perform(opened, catalog, job, self._disk, self._opened.ports.clock_ms(), self.stop)
            self._done.put(replace(done, seconds=time.monotonic() - begun))

        threading.Thread(target=work, name=f"{job.action.value} {job.name}", daemon=True).start()

    def _take_in(self, done: Done) -> None:
        job, now = done.job, self._opened.ports.clock_ms()
        del self._running[job.name]
        watch = self._watches[job.name]
        try:
            seen = self._watching.take(done.log, watch.hint, now) if done.log is not None else None
        except CompactorError:
            seen = None
        outcome = JobOutcome(done.status, done.reason, seen)
        self._doubtful = self._doubtful or done.status in ("failed", "out_of_budget")
        self._watches[job.name] = finished(watch, job, outcome, now, self._opened.lease.ttl_ms)
        self._tallies = tally(self._tallies, done, self._opened.cleaner_for(job.name.topic).map_budget_bytes)
        if line := told(done):
            self._tell(f"{job.name}: {line}")

    # --- being looked at ---

    def status(self) -> Status:
        opened = self._opened
        stopping = self.stop.event.is_set()
        return Status(
            holder=opened.ports.holder,
            tier=opened.ports.layout.url,
            now_ms=opened.ports.clock_ms(),
            started_ms=self._started_ms,
            scans=self._scans,
            scan_ms=self._scan_ms,
            ready=self._scans > 0 and not self._problem and not self._unwritable and not stopping,
            stopping=stopping,
            problem=self._problem or self._unwritable,
            watches=tuple(self._watches.copy().values()),
            running=tuple(self._running.copy().values()),
            usage=opened.counters.usage(),
            tallies=self._tallies,
            disk_used=self._disk.used,
            disk_peak=self._disk.peak,
            disk_total=self._disk.total,
        )

    def silent_ms(self) -> int:
        """Since it last came round."""
        return int((time.monotonic() - self._heard) * 1000)


def told(done: Done) -> str:
    """One line about a job, for people; empty where nothing came of it."""
    report = done.report
    if isinstance(report, RoundReport) and done.status in ("cleaned", "resumed"):
        segments = f"{report.segments_in - report.segments_skipped} segments -> {report.segments_out}"
        records = f"{report.records_read} records -> {report.records_kept}"
        return f"{done.status}, {segments}, {records}, clean up to {report.next_dirty_offset}, {done.seconds:.1f} s"
    if isinstance(report, RetireReport):
        count = len(report.deleted) + len(report.swept)
        return f"deleted {count} objects, {report.bytes} bytes" if count else ""
    if done.status in ("nothing_to_do", "stopped"):
        return ""
    return f"{done.job.action.value} {done.status}" + (f": {done.reason}" if done.reason else "")


def _unreachable(look: Future[Sight]) -> bool:
    return isinstance(look.exception(), StoreError)


def _disk_total(opened: Tier, threads: int) -> int:
    """``disk_budget_bytes`` of [cleaner], for all rounds together; ``auto`` means a chunk for each thread, within what is free."""
    cleaner = opened.settings.cleaner
    one = disk_budget(cleaner, opened.state_dir)
    if cleaner.disk_budget_bytes != "auto":
        return one
    return min(one * threads, shutil.disk_usage(opened.state_dir).free)
