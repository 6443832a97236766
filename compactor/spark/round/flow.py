"""Many small partitions in one job: each is led and published by a thread of the driver, the work of several is done by one task.

    threads:  lead, plan, announce -> submit ------------------------> receipts, verify, publish
                                         |                                ^
    flow:             those that wait -> bins of about equal bytes -> a job

Nobody waits for the slowest: whenever a slot would be idle, a job begins with those partitions that are there. A partition that fails gets
its error and the others go on. Where Spark itself gives up (a partition that kills every executor it comes to), what is left of the job is
done again, one partition a job, so that only the culprit fails.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Self

from compactor.bootstrap import Tier
from compactor.config import Cleaner
from compactor.control.state import PartitionState
from compactor.errors import CompactorError
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.round.engines import DraftAt
from compactor.round.plan import RoundFacts
from compactor.round.ports import Check, WorkSession, WorkStats
from compactor.round.skip import CleanVerdicts
from compactor.spark.cluster.balance import balanced
from compactor.spark.cluster.executor import Cost
from compactor.spark.cluster.jobs import LOOK_S, Cluster, JobWatch, TaskOutcome, VersionDiffers, attempt
from compactor.spark.round.rewriting import ToClean, clean_partition
from compactor.spark.round.worker import note, shared_by

GATHER_S: Final = 0.2
"""How long the first that is ready waits for company: a job costs more than a small partition."""

MOST_SNAPSHOT: Final = 64 << 10
"""Bytes of a producer snapshot that travel with the work; a larger one is read again."""

BINS_PER_SLOT: Final = 2
"""More bins than slots: sizes in bytes only estimate the work."""


@dataclass(frozen=True)
class _Ticket:
    item: ToClean
    bytes: int
    answer: SimpleQueue[TaskOutcome] = field(default_factory=SimpleQueue)


class Flow:
    """Runs jobs in the background, from ``with`` to its end, for whoever submits."""

    def __init__(self, cluster: Cluster, tier: Tier, cost: Cost, watch: JobWatch) -> None:
        self.cluster = cluster
        self.tier = tier
        self._over = False
        self._cost = cost
        self._watch = watch
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []
        self._running = 0
        self._pump = threading.Thread(target=self._run, name="flow", daemon=True)

    def worker(self, cleaner: Cleaner, stats: WorkStats) -> FlowWorker:
        return FlowWorker(self, cleaner, stats)

    def submit(self, ticket: _Ticket) -> None:
        with self._changed:
            self._waiting.append(ticket)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        self._pump.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._pump.join()

    def _run(self) -> None:
        jobs: list[threading.Thread] = []
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or (self._waiting and self._has_room()), timeout=LOOK_S)
                if self._over:
                    break
                if not self._waiting or not self._has_room():
                    continue  # slots may have come meanwhile
                self._changed.wait_for(lambda: self._over or len(self._waiting) >= self.cluster.slots, timeout=GATHER_S)
                tickets, self._waiting = self._waiting, []
                bins = balanced([ticket.bytes for ticket in tickets], self.cluster.slots * BINS_PER_SLOT)
                self._running += len(bins)
            jobs = [job for job in jobs if job.is_alive()]
            jobs.append(threading.Thread(target=self._work, args=(tickets, bins), name="flow-job", daemon=True))
            jobs[-1].start()
        for job in jobs:
            job.join()

    def _has_room(self) -> bool:
        return self._running < self.cluster.slots

    def _ended(self, bins: int) -> None:
        with self._changed:
            self._running -= bins
            self._changed.notify_all()

    def _work(self, tickets: list[_Ticket], bins: list[list[int]]) -> None:
        done: set[int] = set()
        left = len(bins)
        try:
            for _ in self._job(f"{len(tickets)} partitions in {len(bins)} tasks", tickets, bins, done):
                left -= 1
                self._ended(1)
        except Exception:  # noqa: BLE001 - met again below, by whoever is the cause of it
            for number, ticket in enumerate(tickets):
                if number not in done:
                    self._alone(tickets, number, ticket)
        finally:
            self._ended(left)

    def _alone(self, tickets: list[_Ticket], number: int, ticket: _Ticket) -> None:
        try:
            deque(self._job(f"{ticket.item.shared.partition}: by itself, after its job was given up", tickets, [[number]], set()), maxlen=0)
        except CompactorError as error:
            ticket.answer.put(TaskOutcome(number, None, error, Cost()))
        except Exception as error:  # noqa: BLE001 - somebody waits for this answer
            ticket.answer.put(TaskOutcome(number, None, CompactorError(f"a bug: {type(error).__name__}: {error}"), Cost()))

    def _job(self, what: str, tickets: list[_Ticket], bins: list[list[int]], done: set[int]) -> Iterator[None]:
        """Yields when a task has ended."""
        items = [[(number, tickets[number].item) for number in members] for members in bins]
        for outcome in self.cluster.outcomes(what, self.cluster.items(items), clean_bin, len(items), watch=self._watch):
            if outcome.error is not None:
                raise outcome.error
            for one in outcome.value:
                done.add(one.index)
                self._cost.add(one.cost)
                tickets[one.index].answer.put(one)
            yield


def clean_bin(place: int, items: Sequence[tuple[int, ToClean]], cost: Cost) -> list[TaskOutcome]:
    """One task: its partitions one after the other, each with its own outcome."""
    return [attempt(number, partial(clean_partition, item), item.shared.plan) for number, item in items]


@dataclass
class FlowWorker:
    """RemoteWorker (round.engines) of one participant."""

    flow: Flow
    cleaner: Cleaner
    stats: WorkStats
    _snapshot: bytes = field(default=b"", init=False)

    def begun_ms(self, state: PartitionState, now_ms: int, draft_at: DraftAt) -> int:
        """Nothing is read before a plan."""
        return now_ms

    def scout(self, facts: RoundFacts, check: Check) -> CleanVerdicts:
        """The executor that gets the partition reads all of it, but for what was read to plan it."""
        self._snapshot = facts.snapshot if len(facts.snapshot) <= MOST_SNAPSHOT else b""
        return CleanVerdicts()

    def close(self) -> None:
        """Nothing is kept."""

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        flow, live = self.flow, session.state.live
        shared = shared_by(flow.cluster, flow.tier, self.cleaner, plan, session.scratch_key(""), session.state)
        ticket = _Ticket(ToClean(shared, tuple(tasks), live, self._snapshot), sum(segment.size_bytes for segment in live))
        flow.submit(ticket)
        outcome = self._answer(ticket, session)
        note(self.stats, outcome.cost)
        if isinstance(outcome.error, VersionDiffers):
            yield CompactionFailure(run_id=plan.run_id, group=tasks[0].group, kind="version", message=outcome.error.message)
        elif outcome.error is not None:
            raise outcome.error
        else:
            yield from outcome.value

    def _answer(self, ticket: _Ticket, session: WorkSession) -> TaskOutcome:
        while True:
            try:
                return ticket.answer.get(timeout=LOOK_S)
            except Empty:
                self.flow.cluster.require()
                session.check(waiting=True)
