"""The agent: beside a broker, uploads sealed segments of the partitions that this broker leads, until it is asked to end.

    scan       what lies in the log directories, who leads, where the leaders' logs end
    dispatch   begins uploads, a few at once
    collect    takes in those that have ended

Agents do not talk to each other: two on one partition bring the same segments under the same id, and one of them finds it done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from compactor.bootstrap import Tier
from compactor.config import Settings
from compactor.errors import CompactorError, StoreError, UsageError
from compactor.metadata_topic.leaders import ClusterLeaders, LogEnd
from compactor.model.ids import TopicPartition
from compactor.service.agent_files import BrokerIdentity, identity_of, partitions_in
from compactor.service.agent_jobs import Uploads
from compactor.service.agent_plan import (
    CHECK_MS,
    SeenDirectory,
    Trouble,
    UploadOutcome,
    UploadWatch,
    answered,
    choose,
    finished,
    found,
    is_due,
    is_fresh,
    lag,
    led,
    wants_end,
)
from compactor.service.agent_status import SHARED, AgentStatus, AgentTallies, counted
from compactor.service.jobs import Interruptible, Stop, Stopped
from compactor.service.journal import Journal, Tell
from compactor.service.scheduling import backoff_ms
from compactor.service.waiting import ended_in

AT_ONCE = 4
"""Uploads per thread of ``daemon.threads``: those of small segments mostly wait for the store."""
ASKED_AT_ONCE = 1_000
"""Of so many uploads that are next it is asked in one go where their logs end."""
PAUSE_S = 1.0
"""However many segments are rolled at once, directories are not looked at more often."""
BROKER_RETRY_MS = 2_000
MOST_BROKER_RETRY_MS = 60_000

JOURNAL = Journal(logging.getLogger(__name__))


class Brokers(Protocol):
    """What the agent asks of the cluster (metadata_topic.leaders). Both raise StoreError."""

    def leaders(self) -> ClusterLeaders: ...

    def ends(self, names: Sequence[TopicPartition]) -> Mapping[TopicPartition, LogEnd | StoreError]: ...


@dataclass(frozen=True)
class _Ended:
    name: TopicPartition
    outcome: UploadOutcome
    seconds: float


class Agent:
    """``scan`` and ``dispatch`` are the steps, ``run`` repeats them. One thread calls them; ``status`` may be asked from any.

    :param tell: is told in a line whatever happens.
    """

    def __init__(self, opened: Tier, brokers: Brokers, *, tell: Tell = JOURNAL) -> None:
        self.stop = Stop(threading.Event())
        opened = opened.over(data=Interruptible(opened.ports.data, self.stop))
        self._opened = replace(opened, ports=replace(opened.ports, sleep=self.stop.sleep))
        self._brokers = brokers
        self._tell = tell
        self._uploads = Uploads(self._opened, self.stop)
        self._watches: dict[TopicPartition, UploadWatch] = {}
        self._running: dict[TopicPartition, int] = {}
        self._ended: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._tallies = AgentTallies()
        self._problems: dict[str, str] = {}
        self._tier_ready = False
        self._asked_ms = 0
        self._started_ms = opened.ports.clock_ms()
        self._broker_failures = 0
        self._broker_retry_ms = 0
        self._scans = 0
        self._scan_ms = 0
        self._coming: Settings | None = None
        self._woken = threading.Event()
        self._heard = time.monotonic()

    # --- the loop ---

    def run(self) -> None:
        """Until ``end`` is called; uploads at work are left within a request or two."""
        last_scan = next_scan = time.monotonic()
        while not self.stop.event.is_set():
            self._heard = time.monotonic()
            self._adopt()
            if self._heard >= next_scan:
                self._woken.clear()
                self.scan()
                last_scan = time.monotonic()
                next_scan = last_scan + self._opened.settings.agent.interval_ms / 1000
            elif self._woken.is_set():
                next_scan = min(next_scan, last_scan + PAUSE_S)
            self.dispatch()
            self.collect(max(0.0, next_scan - time.monotonic()))
        while self._running:
            self.collect(None)

    def end(self) -> None:
        """Asks it to end; returns at once."""
        self.stop.event.set()
        self._ended.put(None)

    def wake(self) -> None:
        """Somebody has seen that a directory changed; returns at once."""
        self._woken.set()
        self._ended.put(None)

    def reread(self, settings: Settings) -> None:
        """Asks it to go on with these settings (reloading.reread), from the next upload on; returns at once."""
        self._coming = settings
        self.wake()

    def _adopt(self) -> None:
        settings, self._coming = self._coming, None
        if settings is not None:
            self._opened = replace(self._opened, settings=settings)
            self._uploads = Uploads(self._opened, self.stop)

    def scan(self) -> None:
        """One look at the log directories and, where that is due, at the cluster."""
        now = self._opened.ports.clock_ms()
        identity = self._look_at_directories(now)
        if not self._prepare_tier() or identity is None:
            return
        self._ask_leaders(identity, now)
        self._ask_ends([watch.name for watch in self._watches.values() if wants_end(watch, now)], now)
        self._scans += 1
        self._scan_ms = now

    def dispatch(self) -> list[TopicPartition]:
        """Begins what is due and has a thread. It must be fresh where a log ends: what comes next is asked about with it."""
        if self.stop.event.is_set() or not self._tier_ready or self._problems.get("broker"):
            return []
        now = self._opened.ports.clock_ms()
        most = AT_ONCE * self._opened.settings.daemon.threads
        accept = self._opened.settings.agent.accept_truncation
        due = choose(self._watches.values(), self._running, len(self._running) + ASKED_AT_ONCE, now, accept_truncation=accept)
        names = [watch.name for watch in due[: max(0, most - len(self._running))]]
        if not names:
            return []
        if not all(is_fresh(self._watches[name], now) for name in names):
            self._ask_ends([watch.name for watch in due], now)
        names = [name for name in names if is_due(self._watches[name], now, accept_truncation=accept)]
        for name in names:
            self._begin(self._watches[name], now)
        return names

    def collect(self, wait_s: float | None) -> None:
        """Waits for one upload to end, or for ``wait_s`` (None: as long as it takes), and takes in all that have ended."""
        for ended in ended_in(self._ended, wait_s):
            self._take_in(ended)

    # --- looking ---

    def _look_at_directories(self, now_ms: int) -> BrokerIdentity | None:
        """Whose they are, where they agree. A directory that cannot be read does not stop the others."""
        rules = self._opened.settings.agent
        known = {name: watch.seen for name, watch in self._watches.items()}
        seen: dict[TopicPartition, SeenDirectory] = {}
        whose: BrokerIdentity | None = None
        lost = False
        for text in rules.log_dirs:
            try:
                identity = identity_of(Path(text))
                if whose is not None and identity != whose:
                    raise UsageError(
                        f"{text} belongs to {_named(identity)}, and other log_dirs to {_named(whose)}", hint="One agent, one broker"
                    )
                whose = identity
                seen |= {each.name: each for each in partitions_in(Path(text), rules.topics, known, now_ms)}
            except CompactorError as error:
                self._problem(text, str(error))
                lost = True
            else:
                self._problem(text, "")
        for text in [key for key in self._problems if key not in (*rules.log_dirs, *SHARED)]:
            del self._problems[text]
        for name, each in seen.items():
            self._watches[name] = found(self._watches.get(name), each)
            if each.problem:
                self._failed(name, Trouble.UNREADABLE, each.problem, now_ms)
        # What a directory that cannot be read holds is not gone.
        for name in [] if lost else [name for name in self._watches if name not in seen and name not in self._running]:
            del self._watches[name]
        return whose

    def _prepare_tier(self) -> bool:
        if self._tier_ready:
            return True
        try:
            self._opened.create()
            self._opened.identity()
        except Stopped:
            return False
        except CompactorError as error:
            self._problem("tier", str(error))
            return False
        self._problem("tier", "")
        self._tier_ready = True
        return True

    def _ask_leaders(self, identity: BrokerIdentity, now_ms: int) -> None:
        """When something is pending, and every CHECK_MS."""
        pending = any(lag(watch).segments or watch.position is None for watch in self._watches.values())
        if now_ms < self._broker_retry_ms or (not pending and not self._broker_failures and now_ms < self._asked_ms + CHECK_MS):
            return
        try:
            told = self._brokers.leaders()
        except CompactorError as error:
            self._no_broker(str(error), now_ms)
            return
        if told.cluster_id != identity.cluster_id:
            what = f"the brokers are those of cluster {told.cluster_id}, and the log directories belong to {_named(identity)}"
            self._no_broker(f"{what}. Correct kafka.bootstrap_servers or agent.log_dirs", now_ms)
            return
        self._asked_ms, self._broker_failures, self._broker_retry_ms = now_ms, 0, 0
        self._problem("broker", "")
        for name, watch in self._watches.items():
            self._watches[name] = led(watch, told.leaders.get(name) == identity.broker_id)

    def _no_broker(self, reason: str, now_ms: int) -> None:
        self._broker_failures += 1
        self._broker_retry_ms = now_ms + backoff_ms(self._broker_failures, BROKER_RETRY_MS, MOST_BROKER_RETRY_MS)
        self._tallies = replace(self._tallies, broker_failures=self._tallies.broker_failures + 1)
        self._problem("broker", reason)

    def _ask_ends(self, names: Sequence[TopicPartition], now_ms: int) -> None:
        if not names or self._problems.get("broker"):
            return
        try:
            told = self._brokers.ends(names)
        except CompactorError as error:
            self._no_broker(str(error), now_ms)
            return
        for name in names:
            end = told.get(name)
            if isinstance(end, LogEnd):
                before = self._watches[name]
                after = answered(before, end, now_ms)
                self._watches[name] = after
                if after.trouble is Trouble.BEHIND is not before.trouble:
                    self._count(name, UploadOutcome(None, trouble=Trouble.BEHIND, reason=after.reason))
            else:
                self._failed(name, Trouble.BROKER, str(end) if end else "no leader has answered", now_ms)

    # --- working ---

    def _begin(self, watch: UploadWatch, now_ms: int) -> None:
        self._running[watch.name] = now_ms

        def work() -> None:
            begun = time.monotonic()
            outcome = self._uploads.upload(watch)
            self._ended.put(_Ended(watch.name, outcome, time.monotonic() - begun))

        threading.Thread(target=work, name=f"upload {watch.name}", daemon=True).start()

    def _take_in(self, ended: _Ended) -> None:
        del self._running[ended.name]
        outcome, name = ended.outcome, ended.name
        if outcome.trouble is Trouble.STORE:
            self._problem("store", outcome.reason)
        elif outcome.trouble is Trouble.GENERATION:
            self._problem("generations", outcome.reason)
        elif outcome.trouble is None and not outcome.stopped:
            self._problem("store", "")
            self._problem("generations", "")
        if name in self._watches:
            before = self._watches[name]
            self._watches[name] = finished(before, outcome, self._opened.ports.clock_ms())
            if outcome.trouble is not None and (before.trouble is not outcome.trouble or outcome.trouble is Trouble.GAP):
                self._tell(outcome.reason, level=logging.WARNING, partition=str(name), trouble=outcome.trouble or "")
            if outcome.trouble is None and before.trouble is not None and not outcome.stopped:
                self._tell("it goes on again", partition=str(name))
        self._tallies = counted(self._tallies, outcome)
        for note in outcome.notes:
            self._tell(note, partition=str(name))
        if outcome.segments:
            plural = "s" * (outcome.segments != 1)
            what = f"{outcome.segments} segment{plural}, {outcome.bytes} bytes, up to offset {(outcome.position or 0) - 1}"
            self._tell(f"uploaded {what}, {ended.seconds:.1f} s", partition=str(name))

    def _failed(self, name: TopicPartition, trouble: Trouble, reason: str, now_ms: int) -> None:
        """For what goes wrong before an upload is begun."""
        watch = self._watches[name]
        if now_ms < watch.retry_at_ms:
            return
        outcome = UploadOutcome(None, trouble=trouble, reason=reason)
        self._watches[name] = finished(watch, outcome, now_ms)
        if watch.trouble is not trouble:
            self._count(name, outcome)
        else:
            self._tallies = counted(self._tallies, outcome)

    def _count(self, name: TopicPartition, outcome: UploadOutcome) -> None:
        self._tallies = counted(self._tallies, outcome)
        self._tell(outcome.reason, level=logging.WARNING, partition=str(name), trouble=outcome.trouble or "")

    def _problem(self, where: str, reason: str) -> None:
        """What stops more than one partition. Told when it comes and when it goes."""
        before = self._problems.get(where, "")
        if reason:
            self._problems[where] = reason
        else:
            self._problems.pop(where, None)
        if reason and not before:
            self._tell(reason, level=logging.ERROR)
        elif before and not reason:
            self._tell(f"{where}: it works again")

    # --- being looked at ---

    def status(self) -> AgentStatus:
        opened, stopping = self._opened, self.stop.event.is_set()
        problems = self._problems.copy()
        return AgentStatus(
            holder=opened.ports.holder,
            tier=opened.ports.layout.url,
            now_ms=opened.ports.clock_ms(),
            started_ms=self._started_ms,
            scans=self._scans,
            scan_ms=self._scan_ms,
            interval_ms=opened.settings.agent.interval_ms,
            ready=self._scans > 0 and not problems and not stopping,
            stopping=stopping,
            problem="; ".join(problems.values()),
            problems=problems,
            watches=tuple(self._watches.copy().values()),
            running=self._running.copy(),
            usage=opened.counters.usage(),
            tallies=self._tallies,
        )

    def silent_ms(self) -> int:
        """Since it last came round."""
        return int((time.monotonic() - self._heard) * 1000)


def _named(identity: BrokerIdentity) -> str:
    return f"broker {identity.broker_id} of cluster {identity.cluster_id}"
