"""The daemon: looks for work, does what is due with a few threads under common budgets, tells how it goes, ends when it is asked to.

Several daemons share a tier without talking to each other: leases keep them apart, a random order keeps them from meeting.
"""

from __future__ import annotations

import logging
import queue
import random
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from heapq import nsmallest

from compactor.bootstrap import Tier
from compactor.config import Settings
from compactor.errors import CompactorError, StoreError
from compactor.local.budget import Budget
from compactor.local.spool import try_folder
from compactor.model.ids import TopicPartition
from compactor.round.compaction import RoundReport, disk_budget
from compactor.service.hearing import hearing_of
from compactor.service.jobs import Done, Interruptible, Means, Stop, Stopped, perform, shared_settings, try_stores
from compactor.service.journal import Journal, Tell
from compactor.service.scheduling import (
    HOLD_MS,
    Action,
    GenerationWatch,
    Job,
    JobOutcome,
    PartitionWatch,
    Sight,
    asked_for,
    choose,
    discovered,
    finished,
    hinted,
    look_failed,
    looked,
    needs_look,
    poll_ms,
    remembered,
    suspended,
)
from compactor.service.status import Board, PartitionPicture, Status
from compactor.service.waiting import ended_in
from compactor.service.watching import Watching
from compactor.transfer.generation_upkeep import GenerationUpkeep
from compactor.transfer.generations import Target, target_of
from compactor.upkeep.retire import RetireReport
from compactor.upkeep.uploads import LEAST_AGE_MS, sweep_uploads

PROBE_MS = 30_000
"""So often it tries whether it may write into state_dir, where nothing says otherwise."""
LOOKERS = 16
"""Partitions that are looked at at once: a look is a handful of small requests, one after the other."""
LOOKS_A_SCAN = 2_000
"""More are left to the next scan, which follows at once."""

JOURNAL = Journal(logging.getLogger(__name__))


class Daemon:
    """``scan`` and ``dispatch`` are the steps, ``run`` repeats them. One thread calls them; ``status`` may be asked from any.

    :param tell: is told in a line whatever happens.
    :param seed: of the order in which partitions are taken up; None: another one each time, so that daemons do not run into each other.
    """

    def __init__(self, opened: Tier, *, tell: Tell = JOURNAL, seed: int | None = None) -> None:
        self.stop = Stop(threading.Event())
        opened = opened.over(data=Interruptible(opened.ports.data, self.stop))
        self._opened = replace(opened, ports=replace(opened.ports, sleep=self.stop.sleep))
        self._tell = tell
        self._random = random.Random(seed)  # noqa: S311 - only the order of partitions depends on it
        self._watching = Watching(self._opened)
        self._hearing = hearing_of(self._opened)
        self._suspended: dict[str, str] = {}
        self._hold_ms = 0
        self._paused: dict[TopicPartition, str] = {}
        self._watches: dict[TopicPartition, PartitionWatch] = {}
        self._running: dict[TopicPartition, Job] = {}
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()
        self._board = Board(tell, lambda name: self._opened.cleaner_for(name.topic).map_budget_bytes)
        self._started_ms = opened.ports.clock_ms()
        self._scans = 0
        self._scan_ms = 0
        self._problem = ""
        self._unwritable = ""
        self._tried_ms = 0
        self._doubtful = True
        self._behind = False
        self._swept_ms = self._started_ms
        self._coming: Settings | None = None
        self._heard = time.monotonic()
        threads = opened.settings.daemon.threads
        self._disk = Budget(_disk_total(opened, threads))
        self._means = Means(self._disk, self.stop, _target(opened, self.stop))

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
                # Daemons that began together do not stay together.
                next_scan = time.monotonic() + (0.0 if self._behind else interval_s * (0.9 + 0.2 * self._random.random()))
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
        """One look for work over the tier: what is said to have changed, and what is due for a look."""
        now = self._opened.ports.clock_ms()
        try:
            self._listen(now)
            self._look_at(now)
        except Stopped:
            return
        except CompactorError as error:
            if not self._problem:
                self._tell(f"the tier cannot be read: {error}", level=logging.ERROR)
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
            self._tell(f"unfinished uploads are left where they are: {error}", level=logging.WARNING)
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
                self._tell(f"{self._unwritable}. No round is begun until it can be", level=logging.ERROR)
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
        now = self._opened.ports.clock_ms()
        jobs = choose(watches, self._running, threads, now, rounds=now >= self._hold_ms)
        lanes = threads if jobs and jobs[0].alone else max(1, threads // max(1, len(jobs) + len(self._running)))
        for job in jobs:
            self._begin(job, 1 if job.alone else threads, lanes)
        return jobs

    def collect(self, wait_s: float | None) -> None:
        """Waits for one job to end, or for ``wait_s`` (None: as long as it takes), and takes in all that have ended."""
        for ended in ended_in(self._done, wait_s):
            self._take_in(ended)

    # --- looking ---

    def _listen(self, now_ms: int) -> None:
        heard = self._hearing.listen(self._opened)
        if heard is None:
            return
        if not self._watches:
            hints = {str(name): hint for name, hint in heard.hints.items()}
            poll = poll_ms(len(hints))
            for name, (seen, checked_ms) in self._watching.remember(hints, poll, now_ms).items():
                self._watches[name] = self._wanting(remembered(name, heard.hints[name], seen, checked_ms, poll))
        watches = {}
        for name, hint in heard.hints.items():
            watch = self._watches.get(name)
            if watch is None or name in heard.anew:
                self._watching.forget(name)
                watch = self._wanting(discovered(name, hint, now_ms))
            elif hint != watch.hint:
                watch = hinted(watch, hint, now_ms)
            watch = suspended(watch, heard.suspended.get(name.topic, ""))
            watches[name] = asked_for(watch, heard.paused.get(name, ""), heard.wanted.get(name, 0), now_ms)
        self._watches = watches
        self._tell_suspended(heard.suspended)
        for why in sorted(set(heard.paused.values()) - set(self._paused.values())):
            count = sum(one == why for one in heard.paused.values())
            self._tell(f"no round is begun over {count} partition{'s' * (count != 1)}: {why}")
        if self._paused and not heard.paused:
            self._tell("nothing is paused any more")
        self._paused = dict(heard.paused)

    def _tell_suspended(self, now: Mapping[str, str]) -> None:
        """Topics with the same reason in one line: what is wrong with the cluster is so for all of them."""
        before, self._suspended = self._suspended, dict(now)
        new: dict[str, list[str]] = {}
        for topic, why in sorted(now.items()):
            if before.get(topic) != why:
                new.setdefault(why, []).append(topic)
        for why, topics in new.items():
            self._tell(f"no round is begun for {_topics(topics)}: {why}", level=logging.WARNING)
        if again := sorted(before.keys() - now.keys()):
            self._tell(f"{_topics(again)} {'is' if len(again) == 1 else 'are'} compacted again")

    def _wanting(self, watch: PartitionWatch) -> PartitionWatch:
        return watch if self._means.target is None else replace(watch, generation=GenerationWatch())

    def _look_at(self, now_ms: int) -> None:
        names = [name for name, watch in self._watches.items() if name not in self._running and needs_look(watch, now_ms)]
        self._behind = len(names) > LOOKS_A_SCAN
        if self._behind:  # what somebody has hinted at goes first
            names = nsmallest(LOOKS_A_SCAN, names, key=lambda name: (self._watches[name].quiet != 0, self._watches[name].look_at_ms))
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
                self._watches[name] = looked(watch, look.result(), now_ms, self._random.random(), poll_ms(len(self._watches)))
            except Stopped:
                raise
            except Exception as error:
                if isinstance(error, StoreError) and len(looks) > 1 and all(_unreachable(other) for other in looks.values()):
                    raise  # it is not this partition that is wrong
                reason = str(error) if isinstance(error, CompactorError) else f"a bug: {type(error).__name__}: {error}"
                self._watches[name] = look_failed(watch, reason, now_ms)
                if not watch.unreadable:
                    self._tell(reason, level=logging.ERROR, partition=str(name))

    def _look(self, watch: PartitionWatch, now_ms: int) -> Sight:
        self.stop.check()
        return self._watching.look(watch.name, watch.hint, watch.sight, now_ms)

    # --- working ---

    def _begin(self, job: Job, jobs: int, lanes: int) -> None:
        opened = replace(self._opened, settings=shared_settings(self._opened.settings, jobs, lanes))
        catalog = self._opened.catalog.state
        self._running[job.name] = job
        watch, now = self._watches[job.name], self._opened.ports.clock_ms()
        slot = watch.sight.slot if watch.sight is not None else -1
        progress = self._board.begun(job, watch, now)
        why = f": {watch.sight.reason}" if watch.sight is not None and job.action is Action.ROUND else ""
        self._tell(f"{job.action.value} begins{why}", level=logging.DEBUG, partition=str(job.name))

        def work() -> None:
            begun = time.monotonic()
            done = perform(opened, catalog, job, self._means, now, progress, slot=slot)
            self._done.put(replace(done, seconds=time.monotonic() - begun, phases=progress.phases()))

        threading.Thread(target=work, name=f"{job.action.value} {job.name}", daemon=True).start()

    def _take_in(self, done: Done) -> None:
        job, now = done.job, self._opened.ports.clock_ms()
        del self._running[job.name]
        watch = self._watches.get(job.name) or discovered(job.name, 0, now)  # its topic was deleted meanwhile
        try:
            same = done.log is not None and done.log.name == self._opened.log_key(job.name)  # it may have been made anew meanwhile
            seen = self._watching.take(done.log, watch.hint, now) if done.log is not None and same else None
        except CompactorError:
            seen = None
        until = done.report.until_ms if isinstance(done.report, RoundReport) else 0
        if done.status == "waiting":
            self._hold_ms = min(until, now + HOLD_MS)
        outcome = JobOutcome(done.status, done.reason, seen, until)
        if isinstance(done.report, GenerationUpkeep):
            outcome = replace(outcome, shown_slot=done.report.report.slot, again_ms=done.report.again_ms)
        self._doubtful = self._doubtful or done.status in ("failed", "out_of_budget")
        if job.name in self._watches:
            self._watches[job.name] = finished(watch, job, outcome, now, self._opened.lease.ttl_ms)
        run = self._board.ended(done, now)
        if line := told(done):
            segment = done.report.segment if isinstance(done.report, RoundReport) else ""
            self._tell(line, level=gravity(done), partition=str(job.name), run=run, segment=segment)

    # --- being looked at ---

    def status(self) -> Status:
        opened, now = self._opened, self._opened.ports.clock_ms()
        stopping = self.stop.event.is_set()
        return Status(
            holder=opened.ports.holder,
            tier=opened.ports.layout.url,
            now_ms=now,
            started_ms=self._started_ms,
            scans=self._scans,
            scan_ms=self._scan_ms,
            interval_ms=opened.settings.daemon.interval_ms,
            ready=self._scans > 0 and not self._behind and not self._problem and not self._unwritable and not stopping,
            stopping=stopping,
            problem=self._problem or self._unwritable,
            watches=tuple(self._watches.copy().values()),
            at_work=self._board.at_work(now),
            usage=opened.counters.usage(),
            tallies=self._board.tallies,
            disk_used=self._disk.used,
            disk_peak=self._disk.peak,
            disk_total=self._disk.total,
        )

    def picture(self, name: TopicPartition) -> PartitionPicture | None:
        """What is known of one partition; None for one that the tier does not hold. Makes no request."""
        watch, now = self._watches.get(name), self._opened.ports.clock_ms()
        if watch is None:
            return None
        work = next((work for work in self._board.at_work(now) if work.job.name == name), None)
        segments, story = self._watching.segments(name), self._watching.story(name)
        return PartitionPicture(now, watch, segments, story, work)

    def silent_ms(self) -> int:
        """Since it last came round."""
        return int((time.monotonic() - self._heard) * 1000)


def _topics(names: Sequence[str]) -> str:
    return f"topic {names[0]}" if len(names) == 1 else f"{len(names)} topics ({names[0]} among them)"


def told(done: Done) -> str:
    """One line about a job, for people; empty where nothing came of it."""
    report = done.report
    if isinstance(report, RoundReport) and done.status in ("cleaned", "resumed"):
        segments = f"{report.segments_in - report.segments_skipped} segments -> {report.segments_out}"
        records = f"{report.records_read} records -> {report.records_kept}"
        line = f"{done.status}, {segments}, {records}, clean up to {report.next_dirty_offset}, {done.seconds:.1f} s"
        return line + (f"; {report.reason}" if report.reason else "")
    if isinstance(report, RetireReport):
        count = len(report.deleted) + len(report.swept)
        return f"deleted {count} objects, {report.bytes} bytes" if count else ""
    if isinstance(report, GenerationUpkeep):
        made, gone = report.report, [one for one in report.retired if one.deleted]
        parts = [f"generation {made.generation} {made.status}, {made.objects} segments, {made.bytes} bytes"] if made.objects else []
        parts += [f"deleted generation {one.generation}, {one.objects} objects, {one.bytes} bytes" for one in gone]
        return "; ".join(parts)
    if done.status in ("nothing_to_do", "stopped"):
        return ""
    return f"{done.job.action.value} {done.status}" + (f": {done.reason}" if done.reason else "")


def gravity(done: Done) -> int:
    """The level of that line."""
    if done.status in ("failed", "quarantined"):
        return logging.ERROR
    return logging.WARNING if done.status in ("out_of_budget", "fenced") else logging.INFO


def _unreachable(look: Future[Sight]) -> bool:
    return isinstance(look.exception(), StoreError)


def _target(opened: Tier, stop: Stop) -> Target | None:
    """Where consumers of Pinterest's layout look, if there are any. Raises UsageError."""
    if not opened.settings.tier.pinterest.target:
        return None
    target = target_of(opened)
    return replace(target, store=Interruptible(target.store, stop))


def _disk_total(opened: Tier, threads: int) -> int:
    """``disk_budget_bytes`` of [cleaner], for all rounds together; ``auto`` means a chunk for each thread, within what is free."""
    cleaner = opened.settings.cleaner
    one = disk_budget(cleaner, opened.state_dir)
    if cleaner.disk_budget_bytes != "auto":
        return one
    return min(one * threads, shutil.disk_usage(opened.state_dir).free)
