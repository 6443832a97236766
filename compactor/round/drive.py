"""One round over one partition: recover, gather, plan, announce, work, verify, publish, note what it cost.

due? -> acquire -> open intent? -> resume it or record it undone
                -> facts -> plan -> announce -> work -> receipts -> verify -> publish (with run history) -> release
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from compactor.cleaner.gate.judge import GateFailed
from compactor.control import balancing, ordering, publication
from compactor.control.leadership import Leadership, RequirementFailed, lead
from compactor.control.logs import PartitionLog, tidy
from compactor.control.ordering import Stage, Steps
from compactor.control.ports import Lease, Ports
from compactor.control.records import RunEnded, ScratchObject
from compactor.control.state import Intent, PartitionState
from compactor.errors import BadData, CompactorError, NotFound, OutOfBudget
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt
from compactor.round import mirroring
from compactor.round.ports import FactsT, Postponed, RoundWork

PLANS = 3
"""How often a round is begun anew when something outside moves between its facts and its announcement."""


@dataclass(frozen=True)
class RoundResult:
    """``status``: cleaned, resumed, nothing_to_do, waiting (until ``until_ms``, for ``reason``) or quarantined (then with ``reason`` and,
    where known, ``segment``).

    ``undone`` is the reason why an intent that was found open had to be given up first. ``receipts`` are all receipts of the
    plan, also those of earlier attempts.
    """

    status: str
    state: PartitionState
    plan: CompactionPlan | None = None
    receipts: tuple[CompactionReceipt, ...] = ()
    reason: str = ""
    segment: str = ""
    undone: str = ""
    until_ms: int = 0


@dataclass(frozen=True)
class _Session:
    """WorkSession for one plan."""

    leadership: Leadership
    run_id: str

    @property
    def state(self) -> PartitionState:
        return self.leadership.state

    @property
    def survivors(self) -> tuple[ScratchObject, ...]:
        intent = self.state.intent
        return intent.survivors if intent else ()

    def scratch_key(self, name: str) -> str:
        return f"{scratch_prefix(self.leadership.log)}{self.run_id}/{name}"

    def store_survivors(self, objects: Sequence[ScratchObject]) -> None:
        publication.store_survivors(self.leadership, self.run_id, objects)

    def check(self, *, waiting: bool = False) -> None:
        self.leadership.check(waiting=waiting)


def run_round(ports: Ports, log: PartitionLog, lease: Lease, work: RoundWork[FactsT]) -> RoundResult:
    """One round, or the rest of one that a crash left open.

    Raises Leased where another compactor is alive and stays so for one ttl, Fenced where one takes over meanwhile (this
    process then leaves everything as it is), StoreError and OutOfBudget where trying again may help (the intent stays open
    for the next run). Bad data is no exception here: the partition is left as it was, and its run history says why.
    """
    # Without leadership: a partition with nothing to do is not worth a record. Who leads sees what came since the log was folded.
    if not _is_due(ports, log.state, work) and not _is_due(ports, log.refresh(), work):
        return RoundResult("nothing_to_do", log.state)
    with lead(ports, log, lease) as leadership:
        result = led_round(leadership, work)
        tidy(log)
        return result


def _is_due(ports: Ports, state: PartitionState, work: RoundWork[FactsT]) -> bool:
    try:
        return state.intent is not None or work.due(mirroring.seen(ports, state))
    except BadData:
        return True  # met again under leadership, where it can be written down


def led_round(leadership: Leadership, work: RoundWork[FactsT]) -> RoundResult:
    """The same under a leadership that is held already."""
    settled = settle(leadership, work)
    if settled is not None and not settled.undone:
        return settled
    undone = settled.undone if settled else ""
    leadership.ports.publisher.permit(leadership.state.name)
    for _ in range(PLANS):
        with ExitStack() as gathering:
            try:
                mirroring.mirror(leadership)
                facts = gathering.enter_context(work.gathered(leadership.state, leadership.check))
                plan = None if facts is None else work.plan(facts, leadership.epoch, leadership.ports.new_id)
                if plan is not None:
                    work.admit(plan)
            except BadData as error:
                return _quarantined(leadership, leadership.ports.new_id(), None, error.message, error.segment)
            except NotFound as error:
                return _quarantined(leadership, leadership.ports.new_id(), None, f"missing object: {error.message}", "")
            except GateFailed as error:
                return _quarantined(leadership, leadership.ports.new_id(), None, f"gate: {error.message}", "")
            except Postponed as wait:
                return RoundResult("waiting", leadership.state, reason=wait.reason, undone=undone, until_ms=wait.until_ms)
            if plan is None:
                break
            try:
                publication.announce(leadership, plan)
            except RequirementFailed as refused:
                undone = str(refused)  # the broker's lineage moved since the facts were gathered: gather anew
                continue
            steps = Steps()
            steps.to(Stage.ANNOUNCED)
            work.reached(Stage.ANNOUNCED, plan)
            return _finish(leadership, work, facts, steps, undone)
    return RoundResult("nothing_to_do", leadership.state, undone=undone)


def settle(leadership: Leadership, work: RoundWork[FactsT] | None) -> RoundResult | None:
    """Resolves the open intent, if there is one: resumes it, or records it undone and removes its objects (``undone`` says why).

    ``work`` None: this process cannot work on it (``retire`` on its own), so that it is recorded undone.
    """
    publication.cut_off_strays(leadership)
    intent = leadership.state.intent
    if intent is None:
        return None
    steps = Steps(ordering.stage_of(intent))
    if intent.begun_slot:
        return _published(leadership, work, None, steps, intent, "")
    reason = ordering.resume_problem(leadership.state, intent) or mirroring.round_problem(leadership.ports, leadership.state)
    if not reason:
        reason = work.resume_problem(intent.plan) if work else "nobody resumed it"
    if reason or work is None:
        return RoundResult("nothing_to_do", _undone(leadership, steps, intent, reason), intent.plan, undone=reason)
    try:
        return _finish(leadership, work, None, steps, "")
    except OutOfBudget as error:
        # Whoever takes it up next would fail in the same way, and meanwhile nothing of the partition could be swept.
        still = leadership.check().intent
        if still is None or still.plan.run_id != intent.plan.run_id:
            raise
        reason = f"it could not be resumed: {error.message}"
        return RoundResult("nothing_to_do", _undone(leadership, Steps(ordering.stage_of(still)), still, reason), intent.plan, undone=reason)


def _finish(leadership: Leadership, work: RoundWork[FactsT], facts: FactsT | None, steps: Steps, undone: str) -> RoundResult:
    """Works on what the open intent still needs, then verifies and publishes. ``facts``: None for a plan that was found open.

    Raises Fenced where somebody has taken the plan over since it was announced, and may have added receipts to it.
    """
    leadership.require(leadership.state)
    intent = _intent(leadership.state)
    plan = intent.plan
    try:
        failure = _work(leadership, work, facts, intent) if intent.pending else None
    except BadData as error:
        failure = CompactionFailure(run_id=plan.run_id, group=-1, kind="bad data", message=error.message)
        return _given_up(leadership, steps, failure, error.segment)
    except NotFound as error:
        failure = CompactionFailure(run_id=plan.run_id, group=-1, kind="missing object", message=error.message)
        return _given_up(leadership, steps, failure, "")
    except (CompactorError, RequirementFailed):
        raise
    except Exception as bug:
        # The same plan would meet it each time it is resumed, and no retiring is possible while it is open.
        _undone(leadership, steps, intent, f"a bug: {type(bug).__name__}: {bug}")
        raise
    if failure is not None:
        return _given_up(leadership, steps, failure, "")
    if intent.pending:
        steps.to(Stage.UPLOADED)
        intent = _intent(leadership.state)
    problem = balancing.problem(leadership.state, intent)
    if problem:
        return _given_up(leadership, steps, CompactionFailure(run_id=plan.run_id, group=-1, kind="balance", message=problem), "")
    problem = publication.verify(leadership.ports, leadership.state, [receipt.segment for receipt in intent.receipts])
    if problem:
        failure = CompactionFailure(run_id=plan.run_id, group=-1, kind="verify", message=problem)
        return _given_up(leadership, steps, failure, "")
    steps.to(Stage.VERIFIED)
    work.reached(Stage.VERIFIED, plan)
    return _published(leadership, work, facts, steps, intent, undone)


def _published(
    leadership: Leadership, work: RoundWork[FactsT] | None, facts: FactsT | None, steps: Steps, intent: Intent, undone: str
) -> RoundResult:
    """Switches readers. From *publish begun* on, where there is that, only forward: with nobody to work (``work``), too."""
    plan = intent.plan

    def begun() -> None:
        if steps.stage is not Stage.PUBLISH_BEGUN:
            steps.to(Stage.PUBLISH_BEGUN)
        if work is not None:
            work.reached(Stage.PUBLISH_BEGUN, plan)

    gone = mirroring.round_problem(leadership.ports, leadership.state) if not intent.begun_slot else ""
    if gone:
        return RoundResult("nothing_to_do", _undone(leadership, steps, intent, gone), plan, undone=gone)
    status = "resumed" if facts is None else "cleaned"
    stats = work.stats(plan, intent.receipts) if work is not None else {}
    try:
        publication.publish(leadership, intent, publication.Told("restored" if plan.restores else status, stats), begun)
    except RequirementFailed as refused:
        if steps.stage is Stage.PUBLISH_BEGUN:
            raise CompactorError(f"a round that has to go on cannot: {refused}", hint="This is a bug; please report it") from refused
        return RoundResult("nothing_to_do", _undone(leadership, steps, intent, str(refused)), plan, undone=str(refused))
    steps.to(Stage.PUBLISHED)
    if work is not None:
        work.reached(Stage.PUBLISHED, plan)
    publication.forget_scratch(leadership, intent)
    return RoundResult(status, leadership.state, plan, intent.receipts, undone=undone)


def _work(leadership: Leadership, work: RoundWork[FactsT], facts: FactsT | None, intent: Intent) -> CompactionFailure | None:
    """Drives the worker; receipts are durable as they come. Returns the first failure."""
    for outcome in work.work(intent.plan, intent.pending, _Session(leadership, intent.plan.run_id), facts):
        if isinstance(outcome, CompactionFailure):
            return outcome
        publication.add_receipts(leadership, [outcome])
        work.reached(Stage.UPLOADED, intent.plan)
    missing = _intent(leadership.state).pending
    if missing:
        message = "the worker left this task undone"
        return CompactionFailure(run_id=intent.plan.run_id, group=missing[0].group, kind="worker", message=message)
    return None


def _undone(leadership: Leadership, steps: Steps, intent: Intent, reason: str) -> PartitionState:
    """The open intent is given up: the only way back, and only before anything was published."""
    steps.to(Stage.UNDONE)
    state = publication.undo_intent(leadership, intent, reason)
    steps.to(Stage.DELETED)
    return state


def _given_up(leadership: Leadership, steps: Steps, failure: CompactionFailure, segment: str) -> RoundResult:
    intent = _intent(leadership.state)
    # BadData begins with its kind already.
    reason = failure.message if failure.message.startswith(failure.kind) else f"{failure.kind}: {failure.message}"
    _undone(leadership, steps, intent, reason)
    return _quarantined(leadership, intent.plan.run_id, intent.plan, reason, segment)


def _quarantined(leadership: Leadership, run_id: str, plan: CompactionPlan | None, reason: str, segment: str) -> RoundResult:
    ended = RunEnded(leader_epoch=leadership.epoch, run_id=run_id, status="quarantined", reason=reason, segment=segment)
    state = publication.end_run(leadership, ended)
    return RoundResult("quarantined", state, plan, reason=reason, segment=segment)


SCOUTED: Final = "scouted-"
"""Begins the names of what was read before a plan, for whoever takes it up: swept when it is as old as an orphan."""


def scratch_prefix(log: PartitionLog) -> str:
    """Where runs of this partition keep what they need between their passes, in the control store."""
    return f"{log.prefix}/scratch/"


def _intent(state: PartitionState) -> Intent:
    if state.intent is None:
        raise RequirementFailed("the intent is not open any more")
    return state.intent
