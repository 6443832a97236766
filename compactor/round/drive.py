"""Driver of one round over one partition. It holds the leadership, keeps the order of stages and writes the control log.

due? -> acquire -> open intent? -> resume it or record it undone
                -> facts -> plan -> announce -> work -> receipts -> verify -> publish (with run history) -> release
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from compactor.cleaner.gate.batch_checks import GateFailed
from compactor.control import ordering, publication
from compactor.control.leadership import BrokerExpiredSegmentCache, Leadership, RecordRefused, find_expired_segments, hold_leadership
from compactor.control.logs import PartitionLog, write_snapshot_if_due
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.publication import raise_log_start
from compactor.control.records import BLOCKED_BY_STAT, NEXT_STEP_STAT, RunEnded, ScratchObject
from compactor.control.state import PartitionState, RoundIntent, RoundStage, RoundStageTracker, stage_of_intent
from compactor.errors import BadData, CompactorError, Fenced, NotFound, OutOfBudget, Refused, StoreError, bug_reason
from compactor.model.ids import RoundStatus, RunHistoryStatus
from compactor.model.plan import REPAIR, CompactionFailure, CompactionPlan, CompactionReceipt, KeylessRecords, KeylessRecordsRefused
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.round import mirroring
from compactor.round.plan import PlanInputs
from compactor.round.ports import (
    OVERDUE,
    CleanSegmentVerdicts,
    LeadershipCheck,
    PlanWorker,
    RoundCosts,
    RoundInputsT,
    RoundPostponedError,
    RoundSteps,
)

DraftPlanAtTimeFunction = Callable[[int], CompactionPlan | None]
"""Returns the plan that would be made at a time in milliseconds, or None if no round would be due then."""


class RemoteWorker(PlanWorker, Protocol):
    """Worker outside of this process, which runs pass 1 itself."""

    def choose_plan_time_ms(self, state: PartitionState, now_ms: int, draft_plan_at_time: DraftPlanAtTimeFunction) -> int:
        """Return the start of an interrupted pass 1 for an equal plan, else ``now_ms``."""
        return now_ms

    def find_skippable_clean_segments(self, plan_inputs: PlanInputs, check: LeadershipCheck) -> CleanSegmentVerdicts:
        """Run pass 1. Raises BadData, StoreError, OutOfBudget. ``check``: called from time to time."""

    def delete_unused_scan_results(self) -> None:
        """Raises nothing."""


@dataclass(frozen=True)
class RemoteEngine:
    map_engine: str
    create_remote_worker: Callable[[RoundCosts], RemoteWorker]


PLANS = 3
"""How many plans a round makes before it gives up, if the log changes between gathering facts and announcing the plan."""


@dataclass(frozen=True)
class RoundResult:
    """Outcome of one round.

    receipts: also those of earlier attempts.
    reason: why the round waits or why the partition is quarantined.
    undone: why an open intent, of an earlier process or of this one, was undone; empty if none was.
    until_ms: for status waiting, the earliest time at which the round can start.
    expired: segments that retention removed before the round was planned.
    """

    status: RoundStatus
    state: PartitionState
    plan: CompactionPlan | None = None
    receipts: tuple[CompactionReceipt, ...] = ()
    reason: str = ""
    segment: str = ""
    undone: str = ""
    until_ms: int = 0
    expired: tuple[RemoteLogSegmentMetadata, ...] = ()


@dataclass(frozen=True)
class _DriverServicesForWorker:
    leadership: Leadership
    run_id: str
    missing: BrokerExpiredSegmentCache | None = None
    """Segments that the worker must not read. None if pass 1 was done already, whose result numbers all live segments."""

    @property
    def state(self) -> PartitionState:
        return self.missing.state_without_expired_segments(self.leadership.state) if self.missing else self.leadership.state

    @property
    def earlier_scan_results(self) -> tuple[ScratchObject, ...]:
        intent = self.state.intent
        return intent.survivors if intent else ()

    def scratch_object_key(self, object_name: str) -> str:
        return f"{scratch_key_prefix(self.leadership.log)}{self.run_id}/{object_name}"

    def record_scan_results(self, objects: Sequence[ScratchObject]) -> None:
        publication.record_scan_results(self.leadership, self.run_id, objects)

    def raise_if_leadership_lost(self, *, caller_only_waits: bool = False) -> None:
        self.leadership.refresh_and_require_leadership(caller_only_waits=caller_only_waits)


def run_round(
    ports: EnvironmentPorts,
    log: PartitionLog,
    lease: LeaseDurations,
    round_steps: RoundSteps[RoundInputsT],
    *,
    shares_budgets: bool = False,
) -> RoundResult:
    """Finish a round that a crash left open, or run a new one. Bad data does not raise: the partition stays as it was, and the run history
    says why.

    :param shares_budgets: whether a round for which the budgets do not suffice may succeed later. If not, the run history says why it
    failed.
    :raises Leased: if another compactor is alive and stays so for one lease ttl.
    :raises Fenced: if another compactor takes over; this process then leaves everything as it is.
    :raises StoreError: or OutOfBudget, if a retry may help. The intent stays open for the next run.
    """
    # Checked before leadership is acquired, so that a partition with nothing to do costs no record; the leader checks again.
    if not _is_round_needed(ports, log.state, round_steps) and not _is_round_needed(ports, log.refresh(), round_steps):
        return RoundResult(RoundStatus.NOTHING_TO_DO, log.state)
    with hold_leadership(ports, log, lease) as leadership:
        try:
            result = run_round_as_leader(leadership, round_steps)
        except (Refused, OutOfBudget) as error:
            if not (shares_budgets and isinstance(error, OutOfBudget)):
                _record_block(leadership, error)
            raise
        write_snapshot_if_due(log)
        return result


def _record_block(leadership: Leadership, error: CompactorError) -> None:
    before = leadership.state.quarantine
    # Retries must not push published rounds out of the run history.
    if before is not None and before.reason == error.message:
        return
    with suppress(StoreError, Fenced, RecordRefused):  # the caller raises the error that caused this
        _record_quarantine(leadership, leadership.ports.new_id(), None, error.message, "", error=error)


def _is_round_needed(ports: EnvironmentPorts, state: PartitionState, round_steps: RoundSteps[RoundInputsT]) -> bool:
    try:
        return state.intent is not None or round_steps.is_round_due(mirroring.state_with_broker_segments(ports, state))
    except BadData:
        return True  # the leader meets the error again and records it


def run_round_as_leader(leadership: Leadership, round_steps: RoundSteps[RoundInputsT]) -> RoundResult:
    """Finish or undo an open round, raise the log start, plan, rewrite, verify, publish.

    :raises Fenced: if another compactor has become the leader.
    :raises BadData: if a source is damaged or the output is refused.
    :raises StoreError: if the store or the brokers fail for longer than the retries last.
    """
    settled = settle_intent(leadership, round_steps)
    if settled is not None and not settled.undone:
        return settled
    leadership.ports.publisher.check_publishing_allowed(leadership.state.topic_partition)
    undone = settled.undone if settled else ""
    before = leadership.state
    if round_steps.retention_log_start(before) is None:
        return _plan_and_run_round(leadership, round_steps, undone)
    # Before anything is planned, so that what has expired is neither read nor rewritten.
    after = raise_log_start(leadership, round_steps.retention_log_start)
    result = _plan_and_run_round(leadership, round_steps, undone)
    if after.log_start_slot == before.log_start_slot:
        return result
    live = after.live_segments_by_id()
    expired = tuple(segment for segment in before.live if segment.id not in live)
    return replace(result, status=RoundStatus.EXPIRED if result.status == RoundStatus.NOTHING_TO_DO else result.status, expired=expired)


def _plan_and_run_round(leadership: Leadership, round_steps: RoundSteps[RoundInputsT], undone_reason: str) -> RoundResult:
    """:param undone_reason: why an earlier intent was undone; empty if none was."""
    for _ in range(PLANS):
        with ExitStack() as gathering:
            mirrored = False
            try:
                mirroring.record_broker_segments(leadership)
                mirrored = True
                gathered = leadership.state.live
                facts = gathering.enter_context(
                    round_steps.gather_round_inputs(leadership.state, leadership.refresh_and_require_leadership)
                )
                plan = None if facts is None else round_steps.make_plan(facts, leadership.epoch, leadership.ports.new_id)
                if plan is not None:
                    round_steps.require_plan_admitted(plan)
            except (BadData, NotFound) as error:
                if mirrored and find_expired_segments(leadership, [segment.id for segment in leadership.state.live]):
                    undone_reason = "brokers have expired segments since the facts were gathered"
                    continue
                message = error.message if isinstance(error, BadData) else f"missing object: {error.message}"
                segment = error.segment if isinstance(error, BadData) else ""
                keyless = error.keyless if isinstance(error, KeylessRecordsRefused) else None
                return _record_quarantine(leadership, leadership.ports.new_id(), None, message, segment, keyless)
            except GateFailed as error:
                return _record_quarantine(leadership, leadership.ports.new_id(), None, f"gate: {error.message}", "")
            except RoundPostponedError as wait:
                return RoundResult(RoundStatus.WAITING, leadership.state, reason=wait.reason, undone=undone_reason, until_ms=wait.until_ms)
            if plan is None:
                break
            try:
                publication.announce_plan(leadership, plan)
            except RecordRefused as refused:
                undone_reason = str(refused)  # the broker's lineage changed since the facts were gathered, so gather them again
                continue
            steps = RoundStageTracker()
            steps.advance_to_stage(RoundStage.ANNOUNCED)
            if leadership.state.live[: len(gathered)] != gathered:
                # Pass 1 identifies segments by their index in the log, which segments added before its beginning have changed.
                undone_reason = "segments were added before the log's beginning since the facts were gathered"
                _undo_intent(leadership, steps, _require_intent_still_open(leadership), undone_reason)
                continue
            round_steps.on_stage(RoundStage.ANNOUNCED, plan)
            return _finish_open_intent(leadership, round_steps, facts, steps, undone_reason)
    return RoundResult(RoundStatus.NOTHING_TO_DO, leadership.state, undone=undone_reason)


def settle_intent(leadership: Leadership, round_steps: RoundSteps[RoundInputsT] | None) -> RoundResult | None:
    """Return None if no intent is open.

    :param round_steps: None if this process cannot do the work; the intent is then undone.
    """
    publication.withdraw_leftover_segments(leadership)
    intent = leadership.state.intent
    if intent is None:
        return None
    steps = RoundStageTracker(stage_of_intent(intent))
    if intent.begun_slot:
        return _publish_intent(leadership, round_steps, None, steps, intent, "")
    reason = ordering.round_resumption_problem(leadership.state, intent) or mirroring.open_round_problem(
        leadership, BrokerExpiredSegmentCache(leadership)
    )
    if not reason:
        reason = round_steps.round_resumption_problem(intent) if round_steps else "no process resumed it"
    if reason or round_steps is None:
        return RoundResult(RoundStatus.NOTHING_TO_DO, _undo_intent(leadership, steps, intent, reason), intent.plan, undone=reason)
    try:
        return _finish_open_intent(leadership, round_steps, None, steps, "")
    except OutOfBudget as error:
        # The next attempt would fail in the same way, and nothing of the partition can be swept while the intent is open.
        still = leadership.refresh_and_require_leadership().intent
        if still is None or still.plan.run_id != intent.plan.run_id:
            raise
        reason = f"it could not be resumed: {error.message}"
        return RoundResult(
            RoundStatus.NOTHING_TO_DO,
            _undo_intent(leadership, RoundStageTracker(stage_of_intent(still)), still, reason),
            intent.plan,
            undone=reason,
        )


def _finish_open_intent(
    leadership: Leadership,
    round_steps: RoundSteps[RoundInputsT],
    inputs: RoundInputsT | None,
    stage_tracker: RoundStageTracker,
    undone_reason: str,
) -> RoundResult:
    """Run the remaining tasks, verify and publish.

    :raises Fenced: if another compactor has taken the plan over, and may have added receipts to it.
    """
    leadership.require_leadership_in_state(leadership.state)
    intent = _require_intent_still_open(leadership)
    plan = intent.plan
    expired = BrokerExpiredSegmentCache(leadership)
    expired.have_more_sources_expired(intent)
    try:
        failed = _run_pending_tasks(leadership, round_steps, inputs, expired)
    except (CompactorError, RecordRefused):
        raise
    except Exception as bug:
        # Each attempt to resume the plan would fail in the same way, and nothing can be retired while the intent is open.
        _undo_intent(leadership, stage_tracker, intent, bug_reason(bug))
        raise
    if failed is not None:
        return _undo_and_quarantine(leadership, stage_tracker, *failed)
    parted = expired.find_partly_expired_task(_require_intent_still_open(leadership).pending_tasks)
    if parted is not None:
        reason = f"brokers have expired a part of what group {parted.group} replaces"
        return RoundResult(RoundStatus.NOTHING_TO_DO, _undo_intent(leadership, stage_tracker, intent, reason), plan, undone=reason)
    if intent.pending_tasks:
        stage_tracker.advance_to_stage(RoundStage.UPLOADED)
        intent = _require_intent_still_open(leadership)
    problem = publication.receipt_balance_problem(leadership.state, intent)
    if problem:
        return _undo_and_quarantine(
            leadership, stage_tracker, CompactionFailure(run_id=plan.run_id, group=-1, kind="balance", message=problem), ""
        )
    problem = _damaged_output_problem(leadership, intent, expired)
    if problem and expired.select_expired([receipt.segment.id for receipt in intent.receipts]):
        reason = "brokers have expired a segment that the round wrote before all that it replaces"
        return RoundResult(RoundStatus.NOTHING_TO_DO, _undo_intent(leadership, stage_tracker, intent, reason), plan, undone=reason)
    if problem:
        failure = CompactionFailure(run_id=plan.run_id, group=-1, kind="verify", message=problem)
        return _undo_and_quarantine(leadership, stage_tracker, failure, "")
    stage_tracker.advance_to_stage(RoundStage.VERIFIED)
    round_steps.on_stage(RoundStage.VERIFIED, plan)
    return _publish_intent(leadership, round_steps, inputs, stage_tracker, intent, undone_reason)


def _publish_intent(
    leadership: Leadership,
    round_steps: RoundSteps[RoundInputsT] | None,
    inputs: RoundInputsT | None,
    stage_tracker: RoundStageTracker,
    intent: RoundIntent,
    undone_reason: str,
) -> RoundResult:
    """Once publishing has begun, the round must be completed. Before that, the intent is undone if readers have lost a source.

    :param inputs: None if an earlier process announced the plan; the status is then ``resumed``.
    """
    plan = intent.plan

    def record_start_of_publication() -> None:
        if stage_tracker.stage is not RoundStage.PUBLISH_BEGUN:
            stage_tracker.advance_to_stage(RoundStage.PUBLISH_BEGUN)
        if round_steps is not None:
            round_steps.on_stage(RoundStage.PUBLISH_BEGUN, plan)

    gone = mirroring.open_round_problem(leadership, BrokerExpiredSegmentCache(leadership)) if not intent.begun_slot else ""
    if gone:
        return RoundResult(RoundStatus.NOTHING_TO_DO, _undo_intent(leadership, stage_tracker, intent, gone), plan, undone=gone)
    status = RoundStatus.RESUMED if inputs is None else RoundStatus.CLEANED
    stats = round_steps.stats_for_run_history(plan, intent.receipts) if round_steps is not None else {}
    try:
        publication.publish_round(
            leadership, intent, publication.RunOutcome(_run_history_status(plan, status), stats), record_start_of_publication
        )
    except RecordRefused as refused:
        if stage_tracker.stage is RoundStage.PUBLISH_BEGUN:
            raise CompactorError(
                f"a round whose publication has begun cannot be completed: {refused}", hint="This is a bug; please report it"
            ) from refused
        return RoundResult(
            RoundStatus.NOTHING_TO_DO, _undo_intent(leadership, stage_tracker, intent, str(refused)), plan, undone=str(refused)
        )
    stage_tracker.advance_to_stage(RoundStage.PUBLISHED)
    if round_steps is not None:
        round_steps.on_stage(RoundStage.PUBLISHED, plan)
    publication.delete_scratch_objects(leadership, intent)
    return RoundResult(status, leadership.state, plan, intent.receipts, undone=undone_reason)


def _run_history_status(plan: CompactionPlan, status: RoundStatus) -> RunHistoryStatus:
    return (
        RunHistoryStatus.RESTORED if plan.restores else RunHistoryStatus.REPAIRED if plan.map_engine == REPAIR else RunHistoryStatus(status)
    )


def _run_pending_tasks(
    leadership: Leadership, round_steps: RoundSteps[RoundInputsT], inputs: RoundInputsT | None, expired_sources: BrokerExpiredSegmentCache
) -> tuple[CompactionFailure, str] | None:
    """Return the first failure with the segment concerned.

    Brokers may expire sources meanwhile. A task is skipped if all its sources have expired. If only some have, None is returned; the caller
    must ask ``expired_sources`` for this case, and undo the intent.
    """
    while True:
        intent = _require_intent_still_open(leadership)
        if expired_sources.find_partly_expired_task(intent.pending_tasks):
            return None
        known = frozenset(expired_sources.ids)
        run_id, failure, segment = intent.plan.run_id, None, ""
        try:
            failure = _run_unexpired_pending_tasks(leadership, round_steps, inputs, intent, expired_sources)
        except BadData as error:
            failure, segment = CompactionFailure(run_id=run_id, group=-1, kind="bad data", message=error.message), error.segment
        except NotFound as error:
            failure = CompactionFailure(run_id=run_id, group=-1, kind="missing object", message=error.message)
        except Refused:
            if not expired_sources.have_more_sources_expired(intent):
                raise
            continue
        if failure is None:
            return None
        if failure.kind == OVERDUE or not expired_sources.have_more_sources_expired(intent):
            if failure.kind == OVERDUE or inputs is None or not known:
                return failure, segment
            inputs = None  # pass 1 had to be repeated, and met a segment that has expired


def _run_unexpired_pending_tasks(
    leadership: Leadership,
    round_steps: RoundSteps[RoundInputsT],
    inputs: RoundInputsT | None,
    intent: RoundIntent,
    expired_sources: BrokerExpiredSegmentCache,
) -> CompactionFailure | None:
    run_id = intent.plan.run_id
    tasks = [task for task in intent.pending_tasks if not expired_sources.is_task_expired(task)]
    session = _DriverServicesForWorker(leadership, run_id, expired_sources if inputs is None else None)
    for outcome in round_steps.run_compaction_tasks(intent.plan, tasks, session, inputs) if tasks else ():
        if isinstance(outcome, CompactionFailure):
            return outcome
        publication.record_receipts(leadership, [outcome])
        round_steps.on_stage(RoundStage.UPLOADED, intent.plan)
    missing = [task for task in _require_intent_still_open(leadership).pending_tasks if not expired_sources.is_task_expired(task)]
    if missing:
        return CompactionFailure(run_id=run_id, group=missing[0].group, kind="worker", message="the worker left this task undone")
    return None


def _damaged_output_problem(leadership: Leadership, intent: RoundIntent, expired_sources: BrokerExpiredSegmentCache) -> str:
    """Groups that brokers have expired are not checked."""

    def first_damaged_output_problem() -> str:
        tasks = {task.group: task for task in intent.plan.tasks}
        outputs = [receipt.segment for receipt in intent.receipts if not expired_sources.is_task_expired(tasks[receipt.group])]
        return publication.stored_segments_problem(leadership.ports, leadership.state, outputs)

    found = first_damaged_output_problem()
    return first_damaged_output_problem() if found and expired_sources.have_more_sources_expired(intent) else found


def _undo_intent(leadership: Leadership, stage_tracker: RoundStageTracker, intent: RoundIntent, reason: str) -> PartitionState:
    """Possible only before anything was published."""
    stage_tracker.advance_to_stage(RoundStage.UNDONE)
    state = publication.abandon_announced_plan(leadership, intent, reason)
    stage_tracker.advance_to_stage(RoundStage.DELETED)
    return state


def _undo_and_quarantine(
    leadership: Leadership, stage_tracker: RoundStageTracker, failure: CompactionFailure, segment_name: str
) -> RoundResult:
    intent = _require_intent_still_open(leadership)
    # The message of BadData already begins with its kind.
    reason = failure.message if failure.message.startswith(failure.kind) else f"{failure.kind}: {failure.message}"
    _undo_intent(leadership, stage_tracker, intent, reason)
    return _record_quarantine(leadership, intent.plan.run_id, intent.plan, reason, segment_name)


def _record_quarantine(
    leadership: Leadership,
    run_id: str,
    plan: CompactionPlan | None,
    reason: str,
    segment_name: str,
    keyless: KeylessRecords | None = None,
    error: CompactorError | None = None,
) -> RoundResult:
    """:param plan: None if the run failed before a plan was announced.
    :param error: for its cause and next step; None if damaged data is the cause.
    """
    ended = RunEnded(
        leader_epoch=leadership.epoch,
        run_id=run_id,
        status=RunHistoryStatus.QUARANTINED,
        reason=reason,
        segment=segment_name,
        keyless=keyless,
        stats={BLOCKED_BY_STAT: error.blocks_by.value, NEXT_STEP_STAT: error.hint} if error is not None else {},
    )
    state = publication.record_unpublished_run_end(leadership, ended)
    return RoundResult(RoundStatus.QUARANTINED, state, plan, reason=reason, segment=segment_name)


SCOUTED: Final = "scouted-"
"""Name prefix of scratch objects that a remote engine writes before there is a plan. They are swept at ``orphan_age_ms``."""


def scratch_key_prefix(log: PartitionLog) -> str:
    return f"{log.prefix}/scratch/"


def _require_intent_still_open(leadership: Leadership) -> RoundIntent:
    """Raises Fenced if another process has taken over, and RecordRefused if no intent is open."""
    leadership.require_leadership_in_state(leadership.state)
    if leadership.state.intent is None:
        raise RecordRefused("the intent is not open any more")
    return leadership.state.intent
