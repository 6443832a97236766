"""The steps of one round that are written to the control log, and the deletion of objects, each behind its rule.

Every function appends at most one record and returns the state in which it counts. A function that deletes does so only
after such a state says that the ids are unusable for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from compactor.control import ordering
from compactor.control.leadership import Leadership
from compactor.control.ports import Ports
from compactor.control.records import (
    IntentUndone,
    PlanAnnounced,
    ReceiptsAdded,
    RoundPublished,
    RunEnded,
    ScratchObject,
    SurvivorsStored,
)
from compactor.control.state import Intent, PartitionState
from compactor.errors import NotFound
from compactor.model.plan import CompactionPlan, CompactionReceipt, Replacement
from compactor.model.segment import FILE_KINDS, RemoteLogSegmentMetadata, segment_key
from compactor.storage.port import ObjectStore
from compactor.tier.sidecars import sidecar_key

READ_BYTES = 8 << 20
DELETE_BATCH = 1000


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


def publish(leadership: Leadership, intent: Intent) -> PartitionState:
    """One record: all replacements of the round and its cleaner offsets. Raises RequirementFailed where a rule stands against it."""
    state = leadership.state
    receipts = {receipt.group: receipt for receipt in intent.receipts}
    replacements = tuple(Replacement(sources=task.sources, segment=receipts[task.group].segment) for task in intent.plan.tasks)
    body = RoundPublished(
        leader_epoch=leadership.epoch,
        run_id=intent.plan.run_id,
        replacements=replacements,
        vector_before=state.vector,
        vector=ordering.vector_after(state, intent.plan, leadership.epoch),
    )
    return leadership.append(body, lambda state: was_published(state, intent.plan.run_id))


def undo_intent(leadership: Leadership, intent: Intent, reason: str) -> PartitionState:
    """The plan is given up: first the record, then its objects. Raises Fenced, and then deletes nothing."""
    run_id = intent.plan.run_id
    state = leadership.append(
        IntentUndone(leader_epoch=leadership.epoch, run_id=run_id, reason=reason),
        lambda state: not _is_open(state, run_id) and not was_published(state, run_id),
    )
    delete_objects(leadership, state, [(task.start_offset, task.new_segment_id) for task in intent.plan.tasks], FILE_KINDS)
    forget_scratch(leadership, intent)
    return state


def end_run(leadership: Leadership, ended: RunEnded) -> PartitionState:
    """Run history."""

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


def delete_objects(leadership: Leadership, state: PartitionState, segments: Iterable[tuple[int, str]], kinds: Sequence[str]) -> None:
    """Deletes the objects and the sidecars of these (start offset, id), which ``state`` must not protect. Raises Fenced."""
    segments = list(segments)
    ordering.require_deletable(state, leadership.log.incarnation, leadership.epoch, [name for _, name in segments])
    delete_keys(leadership.ports.data, [segment_key(str(state.name), start, name, kind) for start, name in segments for kind in kinds])
    delete_keys(leadership.ports.control, [sidecar_key(leadership.log.prefix, name) for _, name in segments])


def delete_keys(store: ObjectStore, keys: Sequence[str]) -> None:
    """In batches that every store takes."""
    for start in range(0, len(keys), DELETE_BATCH):
        store.delete(keys[start : start + DELETE_BATCH])


def verify(ports: Ports, state: PartitionState, segments: Sequence[RemoteLogSegmentMetadata]) -> str:
    """Whether every object of these segments is there with the size and digest recorded; says what is wrong, or nothing.

    The digest is taken from the object's metadata (``sha256``), as the store has it from the upload; an object without is read.
    """
    for segment in segments:
        for kind, expected in segment.files.items():
            key = segment.key(str(state.name), kind)
            try:
                info = ports.data.head(key)
            except NotFound:
                return f"{ports.data.url}/{key} is missing"
            if info.size != expected.size:
                return f"{ports.data.url}/{key} has {info.size} bytes, its receipt says {expected.size}"
            if (info.metadata.get("sha256") or _digest(ports.data, key, info.size)) != expected.sha256:
                return f"{ports.data.url}/{key} has another digest than its receipt says"
    return ""


def was_published(state: PartitionState, run_id: str) -> bool:
    """Whether the round's publication has counted, by the folded state alone."""
    run = state.run(run_id)
    return run is not None and run.published_slot > 0


def _is_open(state: PartitionState, run_id: str) -> bool:
    return state.intent is not None and state.intent.plan.run_id == run_id


def _digest(store: ObjectStore, key: str, size: int) -> str:
    digest = hashlib.sha256()
    for start in range(0, size, READ_BYTES):
        digest.update(store.get(key, start, READ_BYTES))
    return digest.hexdigest()
