"""One round over one partition: recover, plan, announce, work, verify, publish, note what it cost.

refresh -> acquire -> open intent? -> resume it or record it undone
                   -> plan -> announce -> work -> receipts -> verify -> publish -> run history -> release
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from compactor.cleaner.gate.judge import GateFailed
from compactor.control import ordering, publication
from compactor.control.leadership import Leadership, RequirementFailed, lead
from compactor.control.logs import PartitionLog, tidy
from compactor.control.ordering import Stage, Steps
from compactor.control.ports import Lease, Ports
from compactor.control.records import RunEnded, ScratchObject
from compactor.control.state import Intent, PartitionState
from compactor.errors import BadData, CompactorError, NotFound
from compactor.model.plan import CompactionFailure, CompactionPlan, CompactionReceipt
from compactor.round.ports import Planner, Prepare, Resumable, Worker

PLANS = 3
"""How often a round is planned anew when something outside moves between its plan and its announcement."""

Stats = dict[str, int | float | str]
StatsOf = Callable[[CompactionPlan, Sequence[CompactionReceipt]], Stats]
OnEvent = Callable[[Stage, CompactionPlan], None]
Due = Callable[[PartitionState], bool]


@dataclass(frozen=True)
class RoundResult:
    """``status``: cleaned, resumed, nothing_to_do or quarantined (then with ``reason`` and, where known, ``segment``).

    ``undone`` is the reason why an intent that was found open had to be given up first. ``receipts`` are all receipts of the
    plan, also those of earlier attempts; ``resumed_groups`` names the latter.
    """

    status: str
    state: PartitionState
    plan: CompactionPlan | None = None
    receipts: tuple[CompactionReceipt, ...] = ()
    resumed_groups: frozenset[int] = frozenset()
    reason: str = ""
    segment: str = ""
    undone: str = ""


def _nothing(state: PartitionState, now_ms: int, check: Callable[[], object]) -> None:
    return None


def _no_problem(plan: CompactionPlan) -> str:
    return ""


def _no_stats(plan: CompactionPlan, receipts: Sequence[CompactionReceipt]) -> Stats:
    return {}


def _no_event(stage: Stage, plan: CompactionPlan) -> None:
    return None


@dataclass(frozen=True)
class RoundWork:
    """What a round is driven with. ``now_ms`` is the cleaner's clock for a new plan; a resumed plan keeps its own.

    ``due`` says cheaply whether there is anything to do, before leadership is taken (None: the planner is asked);
    ``resumable`` says why this process cannot go on with a plan that it finds open (other settings, other versions);
    ``stats_of`` what goes into run history; ``on_event`` is told each stage as it is reached.
    """

    now_ms: int
    planner: Planner
    worker: Worker
    due: Due | None = None
    prepare: Prepare = _nothing
    resumable: Resumable = _no_problem
    stats_of: StatsOf = _no_stats
    on_event: OnEvent = _no_event


@dataclass
class _Session:
    """WorkSession for one plan."""

    leadership: Leadership
    run_id: str
    steps: Steps = field(default_factory=lambda: Steps(Stage.ANNOUNCED))

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

    def check(self) -> None:
        self.leadership.check()


def run_round(ports: Ports, log: PartitionLog, lease: Lease, work: RoundWork) -> RoundResult:
    """One round, or the rest of one that a crash left open.

    Raises Leased where another compactor is alive and stays so for one ttl, Fenced where one takes over meanwhile (this
    process then leaves everything as it is), StoreError and OutOfBudget where trying again may help (the intent stays open
    for the next run). Bad data is no exception here: the partition is left as it was, and its run history says why.
    """
    state = log.refresh()
    if state.intent is None:
        try:
            # Without leadership: a partition with nothing to do is not worth a record.
            due = work.due(state) if work.due else work.planner(state, work.now_ms, state.last_epoch + 1, ports.new_id) is not None
            if not due:
                return RoundResult("nothing_to_do", state)
        except BadData:
            pass  # met again below, where it can be written down
    with lead(ports, log, lease) as leadership:
        result = led_round(leadership, work)
        tidy(log)
        return result


def led_round(leadership: Leadership, work: RoundWork) -> RoundResult:
    """The same under a leadership that is held already."""
    settled = settle(leadership, work)
    if settled is not None and not settled.undone:
        return settled
    undone = settled.undone if settled else ""
    for _ in range(PLANS):
        state = leadership.state
        try:
            work.prepare(state, work.now_ms, leadership.check)
            plan = work.planner(state, work.now_ms, leadership.epoch, leadership.ports.new_id)
        except BadData as error:
            return _quarantined(leadership, leadership.ports.new_id(), None, error.message, error.segment)
        except NotFound as error:
            return _quarantined(leadership, leadership.ports.new_id(), None, f"missing object: {error.message}", "")
        except GateFailed as error:
            return _quarantined(leadership, leadership.ports.new_id(), None, f"gate: {error.message}", "")
        if plan is None:
            break
        try:
            publication.announce(leadership, plan)
        except RequirementFailed as refused:
            undone = str(refused)  # the broker's lineage moved since the plan was made: plan again
            continue
        work.on_event(Stage.ANNOUNCED, plan)
        return _finish(leadership, work, "cleaned", undone)
    return RoundResult("nothing_to_do", leadership.state, undone=undone)


def settle(leadership: Leadership, work: RoundWork | None) -> RoundResult | None:
    """Resolves the open intent, if there is one: resumes it, or records it undone and removes its objects (``undone`` says why).

    ``work`` None: this process cannot work on it (``retire`` on its own), so that it is recorded undone.
    """
    intent = leadership.state.intent
    if intent is None:
        return None
    reason = ordering.resume_problem(leadership.state, intent)
    if not reason:
        reason = work.resumable(intent.plan) if work else "nobody resumed it"
    if reason or work is None:
        return RoundResult("nothing_to_do", publication.undo_intent(leadership, intent, reason), intent.plan, undone=reason)
    return _finish(leadership, work, "resumed", "")


def _finish(leadership: Leadership, work: RoundWork, status: str, undone: str) -> RoundResult:
    """Works on what the open intent still needs, then verifies and publishes."""
    intent = _intent(leadership.state)
    session = _Session(leadership, intent.plan.run_id)
    resumed = frozenset(receipt.group for receipt in intent.receipts)
    try:
        failure = _work(session, work, intent) if intent.pending else None
    except BadData as error:
        failure = CompactionFailure(run_id=intent.plan.run_id, group=-1, kind="bad data", message=error.message)
        return _given_up(leadership, failure, error.segment)
    except NotFound as error:
        failure = CompactionFailure(run_id=intent.plan.run_id, group=-1, kind="missing object", message=error.message)
        return _given_up(leadership, failure, "")
    except (CompactorError, RequirementFailed):
        raise
    except Exception as bug:
        # The same plan would meet it each time it is resumed, and no retiring is possible while it is open.
        publication.undo_intent(leadership, intent, f"a bug: {type(bug).__name__}: {bug}")
        raise
    if failure is not None:
        return _given_up(leadership, failure, "")
    session.steps.to(Stage.REWRITTEN, Stage.GATED, Stage.UPLOADED)  # a receipt vouches for all three
    intent = _intent(leadership.state)
    problem = publication.verify(leadership.ports, leadership.state, [receipt.segment for receipt in intent.receipts])
    if problem:
        return _given_up(leadership, CompactionFailure(run_id=intent.plan.run_id, group=-1, kind="verify", message=problem), "")
    session.steps.to(Stage.VERIFIED)
    work.on_event(Stage.VERIFIED, intent.plan)
    try:
        session.steps.to(Stage.PUBLISHED)
        publication.publish(leadership, intent)
    except RequirementFailed as refused:
        state = publication.undo_intent(leadership, intent, str(refused))
        return RoundResult("nothing_to_do", state, intent.plan, undone=str(refused))
    work.on_event(Stage.PUBLISHED, intent.plan)
    stats = work.stats_of(intent.plan, intent.receipts)
    publication.end_run(leadership, RunEnded(leader_epoch=leadership.epoch, run_id=intent.plan.run_id, status=status, stats=stats))
    publication.forget_scratch(leadership, intent)
    return RoundResult(status, leadership.state, intent.plan, intent.receipts, resumed, undone=undone)


def _work(session: _Session, work: RoundWork, intent: Intent) -> CompactionFailure | None:
    """Drives the worker; receipts are durable as they come. Returns the first failure."""
    for outcome in work.worker(intent.plan, intent.pending, session):
        if isinstance(outcome, CompactionFailure):
            return outcome
        publication.add_receipts(session.leadership, [outcome])
        work.on_event(Stage.UPLOADED, intent.plan)
    missing = _intent(session.leadership.state).pending
    if missing:
        return CompactionFailure(run_id=session.run_id, group=missing[0].group, kind="worker", message="the worker left this task undone")
    return None


def _given_up(leadership: Leadership, failure: CompactionFailure, segment: str) -> RoundResult:
    intent = _intent(leadership.state)
    # BadData begins with its kind already.
    reason = failure.message if failure.message.startswith(failure.kind) else f"{failure.kind}: {failure.message}"
    publication.undo_intent(leadership, intent, reason)
    return _quarantined(leadership, intent.plan.run_id, intent.plan, reason, segment)


def _quarantined(leadership: Leadership, run_id: str, plan: CompactionPlan | None, reason: str, segment: str) -> RoundResult:
    ended = RunEnded(leader_epoch=leadership.epoch, run_id=run_id, status="quarantined", reason=reason, segment=segment)
    state = publication.end_run(leadership, ended)
    return RoundResult("quarantined", state, plan, reason=reason, segment=segment)


def scratch_prefix(log: PartitionLog) -> str:
    """Where runs of this partition keep what they need between their passes, in the control store."""
    return f"{log.prefix}/scratch/"


def _intent(state: PartitionState) -> Intent:
    if state.intent is None:
        raise RequirementFailed("the intent is not open any more")
    return state.intent
