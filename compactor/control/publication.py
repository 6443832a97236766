"""Records of a round in the control log, and the deletion of objects, each checked by the ordering rules.

Every function appends at most one record and returns the state in which it counts; it raises RecordRefused if an ordering rule refuses the
record, and Fenced if this process no longer leads the partition. A function that deletes does so only after such a state says that the ids
are unusable for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from compactor.constants import EMPTY_TOPIC_ID, TopicId
from compactor.control import ordering
from compactor.control.leadership import (
    BrokerExpiredSegmentCache,
    Leadership,
    RecordRefused,
    hold_leadership,
    require_effective,
)
from compactor.control.log_start import build_log_start_record, segments_removable_below
from compactor.control.logs import PartitionLog, write_snapshot_if_due
from compactor.control.ports import EnvironmentPorts, LeaseDurations
from compactor.control.records import (
    IntentUndone,
    LogStartRaised,
    PartitionDeleted,
    PlanAnnounced,
    PublicationBegun,
    ReceiptsAdded,
    RoundPublished,
    RoundUndone,
    RunEnded,
    ScratchObject,
    SurvivorsStored,
)
from compactor.control.state import PartitionState, RoundIntent, RoundStage, RoundStageTracker, sum_batch_digests
from compactor.errors import BadData, NotFound, UsageError
from compactor.model.ids import RunHistoryStatus, TopicPartition
from compactor.model.plan import CompactionPlan, CompactionReceipt, Replacement
from compactor.model.segment import Balance, CountAndDigestSum, RemoteLogSegmentMetadata
from compactor.tier.ports import AnnouncedSegment, SegmentRef
from compactor.tier.sidecars import sidecar_object_keys


def receipt_balance_problem(state: PartitionState, intent: RoundIntent) -> str:
    """Receipts of earlier versions state no balance and are accepted."""
    live = state.live_segments_by_id()
    tasks = {task.group: task for task in intent.plan.tasks}
    for receipt in intent.receipts:
        balance = receipt.balance
        if balance is None:
            continue
        found = balance.imbalance_problem()
        sources = tasks[receipt.group].sources
        recorded = sum_batch_digests(live[source] for source in sources) if live.keys() >= set(sources) else None
        if not found and recorded not in (None, balance.sources):
            found = f"the sources hold {balance.sources} batches, and {recorded} were recorded when they were written"
        if not found and receipt.segment.content != balance.result:
            found = f"the new segment holds {balance.result} batches, and its metadata says {receipt.segment.content}"
        if found:
            return f"group {receipt.group}: {found}"
    return ""


def sum_published_balances(intent: RoundIntent, replacements: Sequence[Replacement]) -> Balance | None:
    """Return None if a published group has no balance."""
    ids = {new.segment.id for new in replacements}
    found = [receipt.balance for receipt in intent.receipts if receipt.segment.id in ids]
    return None if not found or None in found else reduce(Balance.plus, (balance for balance in found if balance))


def content_digest_after_round(state: PartitionState, replacements: Sequence[Replacement]) -> CountAndDigestSum | None:
    """Return the sum of all batches that readers have; None if one segment has no recorded sum."""
    gone = {source for new in replacements for source in new.sources}
    return sum_batch_digests([*(segment for segment in state.live if segment.id not in gone), *(new.segment for new in replacements)])


POLL_INTERVAL_MS = 1000


def announce_plan(leadership: Leadership, plan: CompactionPlan) -> PartitionState:
    """Record the round's intent, after which its objects may be created."""
    body = PlanAnnounced(leader_epoch=leadership.epoch, plan=plan)
    return leadership.append_record(body, lambda state: _is_open_run(state, plan.run_id))


def record_receipts(leadership: Leadership, receipts: Sequence[CompactionReceipt]) -> PartitionState:
    run_id = receipts[0].run_id
    groups = {receipt.group for receipt in receipts}

    def has_record_taken_effect(state: PartitionState) -> bool:
        intent = state.intent
        return intent is not None and intent.plan.run_id == run_id and groups.issubset(receipt.group for receipt in intent.receipts)

    return leadership.append_record(ReceiptsAdded(leader_epoch=leadership.epoch, receipts=tuple(receipts)), has_record_taken_effect)


def record_scan_results(leadership: Leadership, run_id: str, objects: Sequence[ScratchObject]) -> PartitionState:
    body = SurvivorsStored(leader_epoch=leadership.epoch, run_id=run_id, objects=tuple(objects))
    return leadership.append_record(body, lambda state: _is_open_run(state, run_id) and state.intent.survivors == body.objects)  # type: ignore[union-attr]


@dataclass(frozen=True)
class RunOutcome:
    status: RunHistoryStatus
    stats: dict[str, int | float | str]


def publish_round(
    leadership: Leadership, intent: RoundIntent, outcome: RunOutcome, on_begun: Callable[[], None] = lambda: None
) -> PartitionState:
    """On broker-managed tiers readers change over in several steps, before the record.

    :param on_begun: called once *publish begun* is in the log (broker-managed tiers only).
    """
    run_id = intent.plan.run_id
    receipts = {receipt.group: receipt for receipt in intent.receipts}
    expired = BrokerExpiredSegmentCache(leadership)
    done = [task for task in intent.plan.tasks if task.group in receipts]
    replacements = [Replacement(sources=task.sources, segment=receipts[task.group].segment) for task in done]

    def append_publication_begun_record() -> None:
        leadership.append_record(
            PublicationBegun(leader_epoch=leadership.epoch, run_id=run_id), lambda state: _has_publication_begun(state, run_id)
        )
        _wait_for_late_deliveries(leadership)
        on_begun()

    def append_round_published_record(unpublished_segment_ids: Collection[str]) -> None:
        body = _build_round_published_record(leadership, intent, replacements, unpublished_segment_ids, expired, outcome)
        leadership.append_record(body, lambda state: was_round_published(state, run_id))

    if len(done) == len(intent.plan.tasks):  # a round with expired groups can be recorded only once its publication has begun
        leadership.require_record_appendable(_build_round_published_record(leadership, intent, replacements, (), expired, outcome))
    leadership.ports.publisher.publish_replacements(
        leadership.state.topic_partition,
        replacements,
        append_publication_begun_record,
        append_round_published_record,
        select_expired=expired.select_expired,
        last_group_first=bool(intent.plan.restores),
        is_begun_recorded=intent.begun_slot > 0,
    )
    return leadership.state


def _build_round_published_record(
    leadership: Leadership,
    intent: RoundIntent,
    replacements: Sequence[Replacement],
    unpublished_segment_ids: Collection[str],
    expired: BrokerExpiredSegmentCache,
    outcome: RunOutcome,
) -> RoundPublished:
    state, ports = leadership.state, leadership.ports
    kept = tuple(new for new in replacements if new.segment.id not in unpublished_segment_ids)
    published = {new.segment.id for new in kept}
    left = [task for task in intent.plan.tasks if task.new_segment_id not in published]
    # A group without a new segment was not rewritten because it had expired (control.ordering refuses anything else).
    gone = tuple(task.group for task in left if expired.is_task_expired(task) or task.new_segment_id not in unpublished_segment_ids)
    cut_off = tuple(task.group for task in left if task.group not in gone)
    return RoundPublished(
        leader_epoch=leadership.epoch,
        run_id=intent.plan.run_id,
        replacements=kept,
        vector_before=state.vector,
        vector=ordering.cleaner_offsets_after_round(state, intent.plan, leadership.epoch, has_withdrawn_groups=bool(cut_off)),
        cut_off=cut_off,
        expired=gone,
        grace_ms=ports.grace_ms,
        undo_window_ms=ports.retention.undo_window_ms if ports.retention else None,
        balance=sum_published_balances(intent, kept),
        content=content_digest_after_round(state, kept),
        status=outcome.status,
        stats=outcome.stats,
    )


def _wait_for_late_deliveries(leadership: Leadership) -> None:
    """Wait until metadata messages of replaced leaders can no longer reach readers: from the last take-over, by the store's clock, for the
    longest delivery timeout of all replaced leaders that are recorded. Raises Fenced.
    """
    ports, log, state = leadership.ports, leadership.log, leadership.state
    taken = state.latest_takeover
    # Records of earlier versions state no timeout; this process's own is used for them.
    timeouts = [epoch.delivery_timeout_ms or ports.publisher.max_delivery_delay_ms for epoch in state.epochs if epoch.ended == "replaced"]
    max_delivery_delay_ms = max(timeouts, default=0)
    if not max_delivery_delay_ms or taken is None:
        return
    try:
        since = ports.control.head(log.control_record_object_key(taken.slot)).modified_ms
    except NotFound:
        since = taken.at_ms  # the slot was cut, which takes longer than what is waited for
    while (left := since + max_delivery_delay_ms - ports.control.clock_ms()) > 0:
        ports.sleep(min(left, POLL_INTERVAL_MS) / 1000)
        leadership.refresh_and_require_leadership()


def withdraw_leftover_segments(leadership: Leadership) -> int:
    """Remove segments that dead compactors left among readers' segments, and return their number. Raises Fenced."""
    if leadership.ports.brokers is None:
        return 0  # readers go by the control log: there are no others to be told of anything
    state = leadership.refresh_and_require_leadership()
    live = [segment for segment in state.live if segment.id in state.published_by]
    return leadership.ports.publisher.withdraw_unknown_segments(state.topic_partition, live, ordering.possible_segment_ids(state))


def abandon_announced_plan(leadership: Leadership, intent: RoundIntent, reason: str) -> PartitionState:
    """Withdraw the plan's segments from readers, and delete its objects. Raises Fenced if this process no longer leads; then nothing is
    deleted.
    """
    run_id = intent.plan.run_id
    state = leadership.append_record(
        IntentUndone(leader_epoch=leadership.epoch, run_id=run_id, reason=reason),
        lambda state: not _is_open_run(state, run_id) and not was_round_published(state, run_id),
    )
    announced = [
        AnnouncedSegment(task.new_segment_id, task.start_offset, task.end_offset, task.leader_epochs) for task in intent.plan.tasks
    ]
    leadership.ports.publisher.withdraw_segments(
        state.topic_partition, announced, include_unannounced=intent.plan.leader_epoch != leadership.epoch
    )
    delete_segment_objects(leadership, state, announced)
    delete_scratch_objects(leadership, intent)
    return state


def record_unpublished_run_end(leadership: Leadership, ended: RunEnded) -> PartitionState:
    def has_record_taken_effect(state: PartitionState) -> bool:
        run = state.find_run(ended.run_id)
        return run is not None and run.status == ended.status and run.stats == ended.stats

    return leadership.append_record(ended, has_record_taken_effect)


def delete_scratch_objects(leadership: Leadership, intent: RoundIntent) -> None:
    """Do nothing if the run is still open. Raises Fenced."""
    leadership.require_leadership_in_state(leadership.state)
    keys = [item.key for item in intent.survivors]
    if keys and not _is_open_run(leadership.state, intent.plan.run_id):
        leadership.ports.control.delete(keys)


def delete_segment_objects(leadership: Leadership, state: PartitionState, segments: Sequence[SegmentRef]) -> None:
    """Delete objects and sidecars. Raises Fenced if this process no longer leads, and CompactorError if ``state`` uses a segment.

    A process that deletes no segments leaves all of this to the next `retire`, as if it had died here.
    """
    ordering.require_segments_deletable(state, leadership.log.incarnation, leadership.epoch, [segment.id for segment in segments])
    ports = leadership.ports
    if ports.retention is not None and not ports.retention.deletes_segments:
        return
    ports.layout.delete_segments(state.topic_partition, segments)
    ports.control.delete([key for segment in segments for key in sidecar_object_keys(leadership.log.prefix, segment.id)])
    ports.publisher.record_finished_segment_deletion(state.topic_partition, segments)


def stored_segments_problem(ports: EnvironmentPorts, state: PartitionState, segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    """Return how the first damaged segment differs from its record; empty: all match."""
    problems = (ports.layout.stored_segment_problem(state.topic_partition, segment) for segment in segments)
    return next((problem for problem in problems if problem), "")


def was_round_published(state: PartitionState, run_id: str) -> bool:
    run = state.find_run(run_id)
    return run is not None and run.published_slot > 0


def _has_publication_begun(state: PartitionState, run_id: str) -> bool:
    return _is_open_run(state, run_id) and state.intent is not None and state.intent.begun_slot > 0


def _is_open_run(state: PartitionState, run_id: str) -> bool:
    return state.intent is not None and state.intent.plan.run_id == run_id


# Removal of data from the view. The objects wait for grace, because readers may still be reading them.


def restart_lost_log(log: PartitionLog) -> PartitionState:
    """Restart a log that cannot be recovered, as an empty log. The tier then no longer knows which objects belong to the partition's
    segments.
    """
    name = TopicPartition.parse_partition_store_prefix(log.name)
    empty = PartitionState(topic=name.topic, partition=name.partition, incarnation=name.incarnation)
    return log.restart_as_empty_log(lambda slot: empty.model_copy(update={"slot": slot, "deleted_slot": slot}))


class PartitionStatesAroundDeletion(NamedTuple):
    before: PartitionState
    after: PartitionState


def delete_partition(
    ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations, deleted_topic_id: TopicId = EMPTY_TOPIC_ID
) -> PartitionStatesAroundDeletion:
    """An open round is undone, and open imports become void.

    :param deleted_topic_id: the topic that the cluster has deleted; empty if a person deletes the partition.

    Raises UsageError if the partition holds nothing, Leased if another compactor leads it, and Fenced if another one takes over meanwhile.
    """
    with hold_leadership(ports, log, lease) as leadership:
        before = leadership.state
        try:
            body = PartitionDeleted(leader_epoch=leadership.epoch, grace_ms=ports.grace_ms, deleted_topic_id=deleted_topic_id)
            state = leadership.append_record(body, lambda state: state.deleted_slot > before.slot and not state.has_segments)
        except RecordRefused as refused:
            raise UsageError(
                f"{log.state.topic_partition} cannot be deleted: {refused}", hint="`topics` lists what the tier holds"
            ) from refused
        write_snapshot_if_due(log)
        return PartitionStatesAroundDeletion(before, state)


def raise_log_start(leadership: Leadership, choose_offset: Callable[[PartitionState], int | None]) -> PartitionState:
    """Remove the segments wholly below the new log start. Nothing is written if the log start is there already and no segment can be
    removed.

    :param choose_offset: called again after each change. Returns None to leave the log start.

    Raises StoreError if it is unknown whether the record was written.
    """

    def decide_record_to_append(state: PartitionState) -> LogStartRaised | None:
        offset = choose_offset(state)
        if offset is None or (offset == state.log_start and not segments_removable_below(state.live, offset)):
            return None
        leadership.require_leadership_in_state(state)
        body = build_log_start_record(state, offset, leadership.epoch, leadership.ports.grace_ms)
        require_effective(leadership.log, state, body)
        return body

    leadership.pulse.steps += 1
    return leadership.log.append_due_records(decide_record_to_append)


def undo_round(ports: EnvironmentPorts, log: PartitionLog, lease: LeaseDurations, run_id: str) -> PartitionState:
    """Direct readers back to the segments that a run replaced, under a new compactor epoch. The cleaner offsets return to their earlier
    value, and the run's outputs wait for grace.

    Raises UsageError if a rule refuses the undo, because a round is open, a later round exists, or the deletion of the sources has begun.
    Raises BadData if a source is missing or damaged, Leased if another compactor leads the partition, and Fenced if another one takes over
    meanwhile.
    """
    if log.refresh().find_run(run_id) is None:
        raise UsageError(f"{log.state.topic_partition} has no run {run_id} that is remembered", hint="`runs list` shows those that are")
    with hold_leadership(ports, log, lease) as leadership:
        body = RoundUndone(leader_epoch=leadership.epoch, run_id=run_id, grace_ms=ports.grace_ms)

        def append_round_undone_record() -> None:
            leadership.append_record(body, lambda state: was_round_undone(state, run_id))

        try:
            leadership.require_record_appendable(body)
            sources = _replaced_segments(leadership.state, run_id)
            _require_intact_segments(ports, leadership.state, run_id, sources)
            ports.publisher.restore_segments(
                log.state.topic_partition, sources, _live_outputs(leadership.state, run_id), append_round_undone_record
            )
        except RecordRefused as refused:
            raise UsageError(
                f"run {run_id} of {log.state.topic_partition} cannot be undone: {refused}", hint="Nothing was changed"
            ) from refused
        RoundStageTracker(RoundStage.PUBLISHED).advance_to_stage(RoundStage.REVERTED)
        return leadership.state


def _replaced_segments(state: PartitionState, run_id: str) -> list[RemoteLogSegmentMetadata]:
    return [segment for group in state.waiting if group.run_id == run_id and not group.undone for segment in group.segments]


def _live_outputs(state: PartitionState, run_id: str) -> list[RemoteLogSegmentMetadata]:
    made = {name for group in state.waiting if group.run_id == run_id and not group.undone for name in group.replaced_by.values()}
    return [segment for segment in state.live if segment.id in made]


def _require_intact_segments(
    ports: EnvironmentPorts, state: PartitionState, run_id: str, sources: Sequence[RemoteLogSegmentMetadata]
) -> None:
    # Readers do not use replaced segments, so damage to them may not have been noticed before.
    problem = stored_segments_problem(ports, state, sources)
    if problem:
        hint = "Nothing was changed, readers have what the run made. Restore the object from the store's versions, then undo"
        raise BadData(f"what run {run_id} replaced is damaged: {problem}", segment=str(state.topic_partition), hint=hint)


def was_round_undone(state: PartitionState, run_id: str) -> bool:
    run = state.find_run(run_id)
    return run is not None and run.status == RunHistoryStatus.REVERTED
