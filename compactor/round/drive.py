"""Driver of one round over one partition. It leads, keeps the order of the steps and writes the control log.

1. Settle: a round that a crash left open is finished, or undone.
2. Expire: the log start is raised, so that nothing is read or rewritten that retention removes.
3. Gather: what a plan is made from. A compaction runs pass 1 here.
4. Plan: pure, the same facts give the same plan.
5. Announce: the plan is the open intent of the control log. From here on any other process can finish the round.
6. Work: a receipt per task, recorded when it arrives. A compaction rewrites, checks and uploads.
7. Verify: the receipts account for all records, and the store has what they name.
8. Publish: readers change over, and the run history says what the round did.

Before readers begin to change over, a round ends in one place (``_ending``) if it is undone, quarantined or postponed: it leaves the
partition as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from typing_extensions import override

from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.control import ordering, publication
from compactor.control.leadership import BrokerExpiredSegmentCache, Leadership, RecordRefused, find_expired_segments, hold_leadership
from compactor.control.logs import PartitionLog, write_snapshot_if_due
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.records import BLOCKED_BY_STAT, NEXT_STEP_STAT, RunEnded, ScratchObject
from compactor.control.state import PartitionState, RoundIntent, RoundStage, RoundStageTracker, stage_of_intent
from compactor.errors import BadData, CompactorError, Fenced, NotFound, OutOfBudget, Refused, StoreError, bug_reason
from compactor.model.ids import RoundStatus, RunHistoryStatus
from compactor.model.plan import REPAIR, CompactionFailure, CompactionPlan
from compactor.round import mirroring
from compactor.round.ports import FactsT, Job, Quarantined, RoundPostponedError, Run, Session, Undone

PLANS = 3
"""How many plans a round makes before it gives up, if the log changes between gathering facts and announcing the plan."""

READING_CHECK_MS: Final = 1_000

SCOUTED: Final = "scouted-"
"""Name prefix of scratch objects that a remote engine writes before there is a plan. They are swept at ``orphan_age_ms``."""


def scratch_key_prefix(log: PartitionLog) -> str:
    return f"{log.prefix}/scratch/"


class _Replan(Exception):
    """Raised if the log has changed since the facts were gathered. Nothing of the plan stays."""


class _LeaderSession(Session):
    """Session of the process that leads.

    missing: segments that the job must not read; None if its facts number all live segments.
    """

    def __init__(self, leadership: Leadership, run: Run, run_id: str = "", missing: BrokerExpiredSegmentCache | None = None) -> None:
        super().__init__(run, f"{scratch_key_prefix(leadership.log)}{run_id}/")
        self._leadership = leadership
        self._run_id = run_id
        self._missing = missing
        self._checked_ms = leadership.ports.clock_ms()

    @property
    @override
    def state(self) -> PartitionState:
        state = self._leadership.state
        return self._missing.state_without_expired_segments(state) if self._missing else state

    @property
    @override
    def earlier_scan_results(self) -> tuple[ScratchObject, ...]:
        intent = self.state.intent
        return intent.survivors if intent else ()

    @override
    def record_scan_results(self, objects: Sequence[ScratchObject]) -> None:
        publication.record_scan_results(self._leadership, self._run_id, objects)

    @override
    def check(self, *, caller_only_waits: bool = False) -> None:
        self._leadership.refresh_and_require_leadership(caller_only_waits=caller_only_waits)
        self._checked_ms = self._leadership.ports.clock_ms()

    @override
    def check_while_reading(self) -> None:
        if 0 <= self._leadership.ports.clock_ms() - self._checked_ms < READING_CHECK_MS:
            self._leadership.pulse.steps += 1
        else:
            self.check()


def run_round(ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations, job: Job[FactsT], *, shares_budgets: bool = False) -> Run:
    """Finish a round that a crash left open, or run a new one. Bad data does not raise: the partition stays as it was, and the run history
    says why.

    :param shares_budgets: whether a round for which the budgets do not suffice may succeed later. If not, the run history says why it
    failed.
    :raises Leased: if another compactor is alive and stays so for one lease ttl.
    :raises Fenced: if another compactor takes over; this process then leaves everything as it is.
    :raises StoreError: or OutOfBudget, if a retry may help. The intent stays open for the next run.
    """
    # Checked before leadership is acquired, so that a partition with nothing to do costs no record; the leader checks again.
    if not _is_needed(ports, log.state, job) and not _is_needed(ports, log.refresh(), job):
        return Run(log.state)
    with hold_leadership(ports, log, lease) as leadership:
        try:
            run = lead_round(leadership, job)
        except (Refused, OutOfBudget) as error:
            if not (shares_budgets and isinstance(error, OutOfBudget)):
                _record_block(leadership, error)
            raise
        write_snapshot_if_due(log)
        return run


def _is_needed(ports: EnvironmentPorts, state: PartitionState, job: Job[Any]) -> bool:
    try:
        return state.intent is not None or job.is_due(mirroring.state_with_broker_segments(ports, state))
    except BadData:
        return True  # the leader meets the error again and records it


def lead_round(leadership: Leadership, job: Job[FactsT]) -> Run:
    """Run the steps.

    :raises Fenced: if another compactor has become the leader.
    :raises StoreError: if the store or the brokers fail for longer than the retries last.
    """
    settled = settle_intent(leadership, job)
    if settled is not None and not settled.undone:
        return settled
    leadership.ports.publisher.check_publishing_allowed(leadership.state.topic_partition)
    run = Run(leadership.state, undone=settled.undone if settled else "")
    _expire(leadership, job, run)
    for _ in range(PLANS):
        try:
            with _ending(leadership, run), ExitStack() as gathered:
                facts = _gather_and_announce(leadership, job, run, gathered)
                if facts is not None:
                    expired = BrokerExpiredSegmentCache(leadership)
                    _work(leadership, job, run, facts, expired)
                    _verify(leadership, job, run, expired)
                    _publish(leadership, job, run, facts)
        except _Replan as why:
            run.plan, run.undone = None, str(why)
        else:
            break
    return run


def settle_intent(leadership: Leadership, job: Job[FactsT]) -> Run | None:
    """Return None if no round is open."""
    publication.withdraw_leftover_segments(leadership)
    intent = leadership.state.intent
    if intent is None:
        return None
    run = Run(leadership.state, plan=intent.plan, stages=RoundStageTracker(stage_of_intent(intent)))
    with _ending(leadership, run):
        if intent.begun_slot:
            _publish(leadership, job, run, None)
            return run
        problem = ordering.round_resumption_problem(leadership.state, intent) or mirroring.open_round_problem(
            leadership, BrokerExpiredSegmentCache(leadership)
        )
        if problem := problem or job.resumption_problem(intent):
            raise Undone(problem)
        try:
            expired = BrokerExpiredSegmentCache(leadership)
            _work(leadership, job, run, None, expired)
            _verify(leadership, job, run, expired)
            _publish(leadership, job, run, None)
        except OutOfBudget as error:
            # The next attempt would fail in the same way, and nothing of the partition can be swept while the intent is open.
            still = leadership.refresh_and_require_leadership().intent
            if still is None or still.plan.run_id != intent.plan.run_id:
                raise
            raise Undone(f"it could not be resumed: {error.message}") from error
    return run


@contextmanager
def _ending(leadership: Leadership, run: Run) -> Iterator[None]:
    """End a round that does not publish: what it announced is withdrawn, and the run history says why."""
    try:
        yield
    except Undone as why:
        _withdraw(leadership, run, why.reason)
        run.undone, run.receipts = why.reason, ()
    except Quarantined as why:
        _withdraw(leadership, run, why.reason)
        run.status, run.reason, run.segment, run.receipts = RoundStatus.QUARANTINED, why.reason, why.segment, ()
        _record_quarantine(leadership, run.plan.run_id if run.plan else leadership.ports.new_id(), why)
    except RoundPostponedError as why:
        run.status, run.reason, run.until_ms = RoundStatus.WAITING, why.reason, why.until_ms
    run.state = leadership.state


def _expire(leadership: Leadership, job: Job[Any], run: Run) -> None:
    before = leadership.state
    if job.log_start(before) is None:
        return
    after = publication.raise_log_start(leadership, job.log_start)
    if after.log_start_slot != before.log_start_slot:
        live = after.live_segments_by_id()
        run.status, run.expired = RoundStatus.EXPIRED, tuple(segment for segment in before.live if segment.id not in live)


def _gather_and_announce(leadership: Leadership, job: Job[FactsT], run: Run, gathered: ExitStack) -> FactsT | None:
    """Return None if there is nothing to do. ``gathered``: closed when the round has ended."""
    mirrored = False
    try:
        mirroring.record_broker_segments(leadership)
        mirrored = True
        live = leadership.state.live
        facts = gathered.enter_context(job.gather(_LeaderSession(leadership, run)))
        plan = None if facts is None else job.plan(facts, leadership.epoch, leadership.ports.new_id)
    except (BadData, NotFound) as error:
        if mirrored and find_expired_segments(leadership, [segment.id for segment in leadership.state.live]):
            raise _Replan("brokers have expired segments since the facts were gathered") from error
        raise Quarantined.by_data(error) from error
    except GateFailed as error:
        raise Quarantined(f"gate: {error.message}") from error
    if plan is None:
        return None
    try:
        publication.announce_plan(leadership, plan)
    except RecordRefused as refused:
        raise _Replan(str(refused)) from refused  # the broker's lineage changed since the facts were gathered
    run.plan, run.stages = plan, RoundStageTracker()
    run.stages.advance_to_stage(RoundStage.ANNOUNCED)
    if leadership.state.live[: len(live)] != live:
        # Pass 1 identifies segments by their index in the log, which segments added before its beginning have changed.
        reason = "segments were added before the log's beginning since the facts were gathered"
        _withdraw(leadership, run, reason)
        raise _Replan(reason)
    job.on_stage(RoundStage.ANNOUNCED, plan)
    return facts


def _work(leadership: Leadership, job: Job[FactsT], run: Run, facts: FactsT | None, expired: BrokerExpiredSegmentCache) -> None:
    """Brokers may expire sources meanwhile. A task is skipped if all its sources have expired; if only some have, the round is undone.

    :raises Fenced: if another compactor has taken the plan over, and may have added receipts to it.
    """
    intent = _open_intent(leadership)
    had_tasks = bool(intent.pending_tasks)
    expired.have_more_sources_expired(intent)
    while True:
        intent = _open_intent(leadership)
        if parted := expired.find_partly_expired_task(intent.pending_tasks):
            raise Undone(f"brokers have expired a part of what group {parted.group} replaces")
        known = frozenset(expired.ids)
        try:
            tasks = [task for task in intent.pending_tasks if not expired.is_task_expired(task)]
            session = _LeaderSession(leadership, run, intent.plan.run_id, expired if facts is None else None)
            for outcome in job.work(intent.plan, tasks, session, facts) if tasks else ():
                if isinstance(outcome, CompactionFailure):
                    problem = Quarantined.by_failure(outcome)
                    break
                publication.record_receipts(leadership, [outcome])
                job.on_stage(RoundStage.UPLOADED, intent.plan)
            else:
                if all(expired.is_task_expired(task) for task in _open_intent(leadership).pending_tasks):
                    break
                problem = Quarantined("worker: the worker left this task undone")
        except (BadData, NotFound) as error:
            problem = Quarantined.by_data(error)
        except Refused:
            if not expired.have_more_sources_expired(intent):
                raise
            continue
        except (CompactorError, RecordRefused, Undone, Quarantined):
            raise
        except Exception as bug:
            # Each attempt to resume the plan would fail in the same way, and nothing can be retired while the intent is open.
            _withdraw(leadership, run, bug_reason(bug))
            raise
        if not expired.have_more_sources_expired(intent):
            if facts is None or not known:
                raise problem
            facts = None  # pass 1 had to be repeated, and met a segment that has expired
    if had_tasks:
        run.stages.advance_to_stage(RoundStage.UPLOADED)


def _verify(leadership: Leadership, job: Job[Any], run: Run, expired: BrokerExpiredSegmentCache) -> None:
    intent = _open_intent(leadership)
    if problem := publication.receipt_balance_problem(leadership.state, intent):
        raise Quarantined(f"balance: {problem}")
    problem = _damaged_output_problem(leadership, intent, expired)
    if problem and expired.have_more_sources_expired(intent):
        problem = _damaged_output_problem(leadership, intent, expired)
    if problem and expired.select_expired([receipt.segment.id for receipt in intent.receipts]):
        raise Undone("brokers have expired a segment that the round wrote before all that it replaces")
    if problem:
        raise Quarantined(f"verify: {problem}")
    run.stages.advance_to_stage(RoundStage.VERIFIED)
    job.on_stage(RoundStage.VERIFIED, intent.plan)


def _damaged_output_problem(leadership: Leadership, intent: RoundIntent, expired: BrokerExpiredSegmentCache) -> str:
    """Groups that brokers have expired are not checked."""
    tasks = {task.group: task for task in intent.plan.tasks}
    outputs = [receipt.segment for receipt in intent.receipts if not expired.is_task_expired(tasks[receipt.group])]
    return publication.stored_segments_problem(leadership.ports, leadership.state, outputs)


def _publish(leadership: Leadership, job: Job[FactsT], run: Run, facts: FactsT | None) -> None:
    """Once publishing has begun, the round must be completed. Before that, it is undone if readers have lost a source."""
    intent = _open_intent(leadership)
    plan = intent.plan

    def record_start_of_publication() -> None:
        if run.stages.stage is not RoundStage.PUBLISH_BEGUN:
            run.stages.advance_to_stage(RoundStage.PUBLISH_BEGUN)
        job.on_stage(RoundStage.PUBLISH_BEGUN, plan)

    gone = mirroring.open_round_problem(leadership, BrokerExpiredSegmentCache(leadership)) if not intent.begun_slot else ""
    if gone:
        raise Undone(gone)
    status = RoundStatus.RESUMED if facts is None else RoundStatus.CLEANED
    run.receipts = intent.receipts
    outcome = publication.RunOutcome(_history_status(plan, status), job.stats(run))
    try:
        publication.publish_round(leadership, intent, outcome, record_start_of_publication)
    except RecordRefused as refused:
        if run.stages.stage is RoundStage.PUBLISH_BEGUN:
            raise CompactorError(
                f"a round whose publication has begun cannot be completed: {refused}", hint="This is a bug; please report it"
            ) from refused
        raise Undone(str(refused)) from refused
    run.stages.advance_to_stage(RoundStage.PUBLISHED)
    job.on_stage(RoundStage.PUBLISHED, plan)
    publication.delete_scratch_objects(leadership, intent)
    run.status = status


def _history_status(plan: CompactionPlan, status: RoundStatus) -> RunHistoryStatus:
    return (
        RunHistoryStatus.RESTORED if plan.restores else RunHistoryStatus.REPAIRED if plan.map_engine == REPAIR else RunHistoryStatus(status)
    )


def _withdraw(leadership: Leadership, run: Run, reason: str) -> None:
    """Possible only before anything was published. Does nothing if no plan was announced."""
    if run.plan is None:
        return
    intent = _open_intent(leadership)
    run.stages.advance_to_stage(RoundStage.UNDONE)
    publication.abandon_announced_plan(leadership, intent, reason)
    run.stages.advance_to_stage(RoundStage.DELETED)


def _open_intent(leadership: Leadership) -> RoundIntent:
    """Raises Fenced if another process has taken over, and RecordRefused if no intent is open."""
    leadership.require_leadership_in_state(leadership.state)
    if leadership.state.intent is None:
        raise RecordRefused("the intent is not open any more")
    return leadership.state.intent


def _record_block(leadership: Leadership, error: CompactorError) -> None:
    before = leadership.state.quarantine
    # Retries must not push published rounds out of the run history.
    if before is not None and before.reason == error.message:
        return
    with suppress(StoreError, Fenced, RecordRefused):  # the caller raises the error that caused this
        _record_quarantine(
            leadership,
            leadership.ports.new_id(),
            Quarantined(error.message),
            {BLOCKED_BY_STAT: error.blocks_by.value, NEXT_STEP_STAT: error.hint},
        )


def _record_quarantine(leadership: Leadership, run_id: str, why: Quarantined, stats: dict[str, int | float | str] | None = None) -> None:
    """:param stats: cause and next step, if damaged data is not the cause."""
    publication.record_unpublished_run_end(
        leadership,
        RunEnded(
            leader_epoch=leadership.epoch,
            run_id=run_id,
            status=RunHistoryStatus.QUARANTINED,
            reason=why.reason,
            segment=why.segment,
            keyless=why.keyless,
            stats=stats or {},
        ),
    )
