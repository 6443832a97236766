"""Changes of a partition that a person asks for: ``topics delete-records``, and ``undo`` of a round on a broker-managed tier."""

from __future__ import annotations

from compactor.access.rounds import create_round
from compactor.access.tier import Tier
from compactor.control import publication
from compactor.control.deletion import raise_log_start
from compactor.control.leadership import RecordRefused, hold_leadership
from compactor.control.logs import PartitionLog, write_snapshot_if_due
from compactor.control.ordering import round_restoration_problem
from compactor.control.state import PartitionState
from compactor.errors import BadData, CompactorError, Unavailable, UsageError
from compactor.model.ids import TopicPartition
from compactor.model.status import PUBLISHING, RoundStatus, RunHistoryStatus
from compactor.round.drive import finish_or_undo_open_intent, run_round_as_leader
from compactor.round.mirroring import record_broker_segments_in_control_log
from compactor.round.restoring import RoundUndoingEarlierRun, groups_to_restore

StatesBeforeAndAfter = tuple[PartitionState, PartitionState]
"""State of a partition before a change, and after it."""


def delete_records(tier: Tier, partition: TopicPartition, new_log_start: int) -> StatesBeforeAndAfter:
    """Raise a partition's log start to ``new_log_start``, as Kafka's DeleteRecords does. Return the partition's states before and after the
    change. A log start that is higher already stays. An interrupted round is finished or undone first.

    Segments wholly below the new log start are deleted after their grace (the time in which readers may still use them). Raises UsageError
    if ``new_log_start`` lies beyond the log's end or a rule forbids it, Leased if another compactor is at work, Fenced if one takes over,
    and StoreError.
    """
    log = tier.open_control_log_of_partition(partition, caller_runs_round=True)

    def choose_log_start(state: PartitionState) -> int | None:
        return None if new_log_start < state.log_start else new_log_start

    with hold_leadership(tier.ports, log, tier.lease) as leadership:
        before = leadership.state
        if leadership.state.intent is not None:
            finish_or_undo_open_intent(leadership, create_round(tier, partition, tier.ports.clock_ms()))
        if not before.has_segments or new_log_start > before.end_offset + 1:
            end = f"it ends at {before.end_offset}" if before.has_segments else "it holds nothing"
            raise UsageError(
                f"offset {new_log_start} lies beyond {partition}: {end}", hint="Nothing was changed. `topics` lists what the tier holds"
            )
        try:
            after = raise_log_start(leadership, choose_log_start)
        except RecordRefused as refused:
            raise UsageError(f"the log start of {partition} cannot be raised: {refused}", hint="Nothing was changed") from refused
        write_snapshot_if_due(log)
    tier.change_notifier.announce_changed_control_logs([log])
    return before, after


def undo_compaction_run_by_publishing_copies(tier: Tier, log: PartitionLog, run_id: str) -> PartitionState:
    """Undo a run. Copies of the segments that it replaced are published in place of the segments that it wrote, and the cleaner offsets get
    their values from before the run again. An interrupted undo is completed. Return the resulting state.

    :raises UsageError: if the rules do not allow it.
    :raises BadData: if a replaced segment was lost.
    :raises CompactorError: if brokers deleted some of the run's segments meanwhile, so that the run is undone in part.
    :raises Leased: if another compactor is at work.
    :raises Fenced: if another compactor takes over.
    :raises OutOfBudget: if the copies do not fit on disk.
    :raises StoreError: if the store fails.
    """
    name = log.refresh().topic_partition
    cleaner, hash_key = tier.cleaner_settings_for_topic(name.topic), tier.identity.hash_key()
    work = RoundUndoingEarlierRun(tier.ports, cleaner, hash_key, tier.state_dir, run_id, tier.ports.clock_ms())
    _require_run_can_be_undone(log.state, run_id)
    with hold_leadership(tier.ports, log, tier.lease) as leadership:
        if leadership.state.intent is None:
            record_broker_segments_in_control_log(leadership)  # what brokers have expired since is not taken back
        _require_run_can_be_undone(leadership.state, run_id)
        sources = [source for one in groups_to_restore(leadership.state, run_id) for source in one.sources]
        damage = publication.stored_segments_problem(tier.ports, leadership.state, sources)
        if damage:
            hint = "Nothing was changed, readers have what the run made. Restore the object from the store's versions, then undo"
            raise BadData(f"what run {run_id} replaced is damaged: {damage}", segment=str(name), hint=hint)
        result = run_round_as_leader(leadership, work)
        write_snapshot_if_due(log)
    if result.status == RoundStatus.QUARANTINED:
        raise BadData(result.reason, segment=result.segment or str(name), hint="Readers have what the run made")
    if result.status not in PUBLISHING:
        raise Unavailable(f"run {run_id} of {name} was not undone: {result.undone}", hint="Readers have what the run made; try again")
    made = set(result.plan.source_segment_ids) if result.plan else set()
    left = [segment for segment in log.state.live if segment.id in made]
    if left:
        raise CompactorError(
            f"run {run_id} of {name} is undone in part: brokers have deleted some of its segments meanwhile, and up to offset "
            f"{left[-1].end_offset} readers keep what the run made",
            hint="Nothing more of it can be taken back",
        )
    return log.state


def _require_run_can_be_undone(state: PartitionState, run_id: str) -> None:
    run = state.find_run(run_id)
    if run is None:
        raise UsageError(f"{state.topic_partition} has no run {run_id} that is remembered", hint="`runs list` shows those that are")
    if state.intent is not None and state.intent.plan.restores == run_id:
        return
    if run.status == RunHistoryStatus.REVERTED_IN_PART:
        raise UsageError(
            f"run {run_id} of {state.topic_partition} was undone in part: {run.reason}", hint="Nothing more of it can be taken back"
        )
    problem = (
        f"run {state.intent.plan.run_id} is still open"
        if state.intent
        else round_restoration_problem(state, run_id, state.next_compactor_epoch)
    )
    if problem:
        raise UsageError(f"run {run_id} of {state.topic_partition} cannot be undone: {problem}", hint="Nothing was changed")
