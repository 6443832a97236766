"""The steps of one round that are written to the control log, and the deletion of objects, each behind its rule.

Every function appends at most one record and returns the state in which it counts. A function that deletes does so only
after such a state says that the ids are unusable for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from compactor.control import balancing, ordering
from compactor.control.leadership import Leadership
from compactor.control.ports import Ports
from compactor.control.records import (
    IntentUndone,
    PlanAnnounced,
    PublishBegun,
    ReceiptsAdded,
    RoundPublished,
    RunEnded,
    ScratchObject,
    SurvivorsStored,
)
from compactor.control.state import Intent, PartitionState
from compactor.errors import NotFound
from compactor.model.plan import CompactionPlan, CompactionReceipt, Replacement
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.storage.deleting import delete_keys
from compactor.tier.ports import Announced, SegmentRef
from compactor.tier.sidecars import sidecar_keys

LOOK_EVERY_MS = 1000


def announce(leadership: Leadership, plan: CompactionPlan) -> PartitionState:
    """The intent becomes durable; from here on the plan's objects may be created. Raises RequirementFailed, Fenced."""
    body = PlanAnnounced(leader_epoch=leadership.epoch, plan=plan)
    return leadership.append(body, lambda state: _is_open(state, plan.run_id))


def add_receipts(leadership: Leadership, receipts: Sequence[CompactionReceipt]) -> PartitionState:
    """These tasks need never be done again, whoever goes on."""
    run_id = receipts[0].run_id
    groups = {receipt.group for receipt in receipts}

    def counted(state: PartitionState) -> bool:
        intent = state.intent
        return intent is not None and intent.plan.run_id == run_id and groups.issubset(receipt.group for receipt in intent.receipts)

    return leadership.append(ReceiptsAdded(leader_epoch=leadership.epoch, receipts=tuple(receipts)), counted)


def store_survivors(leadership: Leadership, run_id: str, objects: Sequence[ScratchObject]) -> PartitionState:
    """Pass 1 need not be done again."""
    body = SurvivorsStored(leader_epoch=leadership.epoch, run_id=run_id, objects=tuple(objects))
    return leadership.append(body, lambda state: _is_open(state, run_id) and state.intent.survivors == body.objects)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Told:
    """What run history says of a round that is published."""

    status: str
    stats: dict[str, int | float | str]


def publish(leadership: Leadership, intent: Intent, told: Told, on_begun: Callable[[], None] = lambda: None) -> PartitionState:
    """Switches readers, then one record: all replacements of the round, its cleaner offsets, and what run history has of it.

    Raises RequirementFailed where a rule stands against it. ``on_begun``: called once *publish begun* stands (not without a broker).
    """
    run_id = intent.plan.run_id
    receipts = {receipt.group: receipt for receipt in intent.receipts}
    replacements = [Replacement(sources=task.sources, segment=receipts[task.group].segment) for task in intent.plan.tasks]

    def begun() -> None:
        leadership.append(PublishBegun(leader_epoch=leadership.epoch, run_id=run_id), lambda state: _has_begun(state, run_id))
        _outlast_predecessors(leadership)
        on_begun()

    def record(cut_off: Collection[str]) -> None:
        leadership.append(_published(leadership, intent, replacements, cut_off, told), lambda state: was_published(state, run_id))

    leadership.foresee(_published(leadership, intent, replacements, (), told))
    way = {"backwards": bool(intent.plan.restores), "resumed": intent.begun_slot > 0}
    leadership.ports.publisher.publish(leadership.state.name, replacements, begun, record, **way)
    return leadership.state


def _published(
    leadership: Leadership, intent: Intent, replacements: Sequence[Replacement], cut_off: Collection[str], told: Told
) -> RoundPublished:
    state, ports = leadership.state, leadership.ports
    kept = tuple(new for new in replacements if new.segment.id not in cut_off)
    return RoundPublished(
        leader_epoch=leadership.epoch,
        run_id=intent.plan.run_id,
        replacements=kept,
        vector_before=state.vector,
        vector=ordering.vector_after(state, intent.plan, leadership.epoch, cut_off=bool(cut_off)),
        cut_off=tuple(task.group for task in intent.plan.tasks if task.new_segment_id in cut_off),
        grace_ms=ports.grace_ms,
        undo_window_ms=ports.retention.undo_window_ms if ports.retention else None,
        balance=balancing.of_round(intent, kept),
        content=balancing.content_after(state, kept),
        status=told.status,
        stats=told.stats,
    )


def _outlast_predecessors(leadership: Leadership) -> None:
    """Whoever was replaced without having released may have said something that is still on its way to readers: it must land before."""
    ports, log = leadership.ports, leadership.log
    late_ms, taken = ports.publisher.late_ms, leadership.state.last_take_over
    if not late_ms or taken is None:
        return
    try:
        since = ports.control.head(log.record_key(taken.slot)).modified_ms
    except NotFound:
        since = taken.at_ms  # the slot was cut, which takes longer than what is waited for
    while (left := since + late_ms - ports.control.clock_ms()) > 0:
        ports.sleep(min(left, LOOK_EVERY_MS) / 1000)
        leadership.check()


def cut_off_strays(leadership: Leadership) -> int:
    """What dead compactors have left among readers is taken from them. Raises Fenced."""
    if leadership.ports.brokers is None:
        return 0  # readers go by the control log: there are no others to be told of anything
    state = leadership.check()
    live = [segment for segment in state.live if segment.id in state.published_by]
    return leadership.ports.publisher.cut_off(state.name, live, ordering.known(state))


def undo_intent(leadership: Leadership, intent: Intent, reason: str) -> PartitionState:
    """The plan is given up: first the record, then whoever was told of its objects, then these. Raises Fenced, and then deletes nothing."""
    run_id = intent.plan.run_id
    state = leadership.append(
        IntentUndone(leader_epoch=leadership.epoch, run_id=run_id, reason=reason),
        lambda state: not _is_open(state, run_id) and not was_published(state, run_id),
    )
    announced = [Announced(task.new_segment_id, task.start_offset, task.end_offset, task.leader_epochs) for task in intent.plan.tasks]
    leadership.ports.publisher.withdraw(state.name, announced, late=intent.plan.leader_epoch != leadership.epoch)
    delete_objects(leadership, state, announced)
    forget_scratch(leadership, intent)
    return state


def end_run(leadership: Leadership, ended: RunEnded) -> PartitionState:
    """Run history of a run that published nothing."""

    def counted(state: PartitionState) -> bool:
        run = state.run(ended.run_id)
        return run is not None and run.status == ended.status and run.stats == ended.stats

    return leadership.append(ended, counted)


def forget_scratch(leadership: Leadership, intent: Intent) -> None:
    """Deletes what a closed run kept between its passes. Raises Fenced."""
    leadership.require(leadership.state)
    keys = [item.key for item in intent.survivors]
    if keys and not _is_open(leadership.state, intent.plan.run_id):
        leadership.ports.control.delete(keys)


def delete_objects(leadership: Leadership, state: PartitionState, segments: Sequence[SegmentRef]) -> None:
    """Deletes the objects and the sidecars of these segments, which ``state`` must not protect. Raises Fenced."""
    ordering.require_deletable(state, leadership.log.incarnation, leadership.epoch, [segment.id for segment in segments])
    ports = leadership.ports
    ports.layout.delete(state.name, segments)
    delete_keys(ports.control, [key for segment in segments for key in sidecar_keys(leadership.log.prefix, segment.id)])
    ports.publisher.deleted(state.name, segments)


def verify(ports: Ports, state: PartitionState, segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    """Whether every object of these segments is there as recorded; says what is wrong, or nothing."""
    problems = (ports.layout.problem(state.name, segment) for segment in segments)
    return next((problem for problem in problems if problem), "")


def was_published(state: PartitionState, run_id: str) -> bool:
    """Whether the round's publication has counted, by the folded state alone."""
    run = state.run(run_id)
    return run is not None and run.published_slot > 0


def _has_begun(state: PartitionState, run_id: str) -> bool:
    return _is_open(state, run_id) and state.intent is not None and state.intent.begun_slot > 0


def _is_open(state: PartitionState, run_id: str) -> bool:
    return state.intent is not None and state.intent.plan.run_id == run_id
