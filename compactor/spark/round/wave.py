"""Many small partitions as one job: each is led and published by a thread of the driver, all of their work is done by one wave of tasks.

    threads:  lead, plan, announce -> submit ----------------------------------> receipts, verify, publish
                                         |                                       ^
    wave:            all have arrived -> bins of about equal bytes -> one job ---+

A partition that fails gets its error and the others go on. Where Spark itself gives up (a partition that kills every executor it comes to),
what is left of the wave is done again, one partition a job, so that only the culprit fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from compactor.bootstrap import Tier
from compactor.config import Cleaner
from compactor.errors import CompactorError, Unavailable
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt, CompactionTask
from compactor.round.plan import RoundFacts
from compactor.round.ports import Check, WorkSession, WorkStats
from compactor.round.skip import CleanVerdicts
from compactor.spark.cluster.balance import balanced
from compactor.spark.cluster.executor import Cost
from compactor.spark.cluster.jobs import LOOK_S, Cluster, JobWatch, TaskOutcome, VersionDiffers, attempt
from compactor.spark.round.rewriting import ToClean, clean_partition
from compactor.spark.round.worker import note, shared_by

PATIENCE_S: Final = 2.0
"""How long those that are ready wait for the others, of whom one may wait for a foreign lease."""

BINS_PER_SLOT: Final = 3
"""More bins than slots: sizes in bytes only estimate the work."""


@dataclass(frozen=True)
class _Ticket:
    item: ToClean
    bytes: int
    answer: SimpleQueue[TaskOutcome] = field(default_factory=SimpleQueue)


class Wave:
    """``participants``: threads that will submit, or leave without having done so."""

    def __init__(self, cluster: Cluster, tier: Tier, participants: int, cost: Cost, watch: JobWatch) -> None:
        self.cluster = cluster
        self.tier = tier
        self.over = False
        self._cost = cost
        self._watch = watch
        self._changed = threading.Condition()
        self._coming = participants
        self._staying = participants
        self._waiting: list[_Ticket] = []

    def worker(self, cleaner: Cleaner, stats: WorkStats) -> WaveWorker:
        return WaveWorker(self, cleaner, stats)

    def submit(self, ticket: _Ticket) -> None:
        with self._changed:
            self._waiting.append(ticket)
            self._coming -= 1
            self._changed.notify_all()

    def answered(self) -> None:
        """A participant goes on: it may submit again (a second round) or leave."""
        with self._changed:
            self._coming += 1
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._coming -= 1
            self._staying -= 1
            self._changed.notify_all()

    def run(self) -> None:
        """Works until the last participant has left. Every error is some participant's; an interruption is everybody's."""
        try:
            self._run()
        finally:
            self.over = True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or not self._staying)
                self._changed.wait_for(lambda: not self._coming or not self._staying, timeout=PATIENCE_S)
                tickets, self._waiting = self._waiting, []
                if not tickets and not self._staying:
                    return
            if tickets:
                self._work(tickets)

    def _work(self, tickets: list[_Ticket]) -> None:
        bins = balanced([ticket.bytes for ticket in tickets], self.cluster.slots * BINS_PER_SLOT)
        done: set[int] = set()
        try:
            self._job(f"{len(tickets)} partitions in {len(bins)} tasks", tickets, bins, done)
        except Exception:  # noqa: BLE001 - met again below, by whoever is the cause of it
            for number, ticket in enumerate(tickets):
                if number not in done:
                    self._alone(tickets, number, ticket)

    def _alone(self, tickets: list[_Ticket], number: int, ticket: _Ticket) -> None:
        try:
            self._job(f"{ticket.item.shared.partition}: by itself, after its wave was given up", tickets, [[number]], set())
        except CompactorError as error:
            ticket.answer.put(TaskOutcome(number, None, error, Cost()))
        except Exception as error:  # noqa: BLE001 - somebody waits for this answer
            ticket.answer.put(TaskOutcome(number, None, CompactorError(f"a bug: {type(error).__name__}: {error}"), Cost()))

    def _job(self, what: str, tickets: list[_Ticket], bins: list[list[int]], done: set[int]) -> None:
        items = [[(number, tickets[number].item) for number in members] for members in bins]
        for outcome in self.cluster.outcomes(what, self.cluster.items(items), clean_bin, len(items), watch=self._watch):
            if outcome.error is not None:
                raise outcome.error
            for one in outcome.value:
                done.add(one.index)
                self._cost.add(one.cost)
                tickets[one.index].answer.put(one)


def clean_bin(place: int, items: Sequence[tuple[int, ToClean]], cost: Cost) -> list[TaskOutcome]:
    """One task: its partitions one after the other, each with its own outcome."""
    return [attempt(number, partial(clean_partition, item), item.shared.plan) for number, item in items]


@dataclass(frozen=True)
class WaveWorker:
    """RemoteWorker (round.engines) of one participant."""

    wave: Wave
    cleaner: Cleaner
    stats: WorkStats

    def scout(self, facts: RoundFacts, check: Check) -> CleanVerdicts:
        """The executor that gets the partition reads all of it."""
        return CleanVerdicts()

    def close(self) -> None:
        """Nothing is kept."""

    def __call__(
        self, plan: CompactionPlan, tasks: Sequence[CompactionTask], session: WorkSession
    ) -> Iterator[CompactionReceipt | CompactionFailure]:
        wave, live = self.wave, session.state.live
        shared = shared_by(wave.cluster, wave.tier, self.cleaner, plan, session.scratch_key(""), session.state)
        ticket = _Ticket(ToClean(shared, tuple(tasks), live), sum(segment.size_bytes for segment in live))
        wave.submit(ticket)
        try:
            outcome = self._answer(ticket, session)
        finally:
            wave.answered()
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
                if self.wave.over:
                    raise Unavailable("the job was broken off", hint="Run it again: what is open is taken up") from None
                session.check(waiting=True)
