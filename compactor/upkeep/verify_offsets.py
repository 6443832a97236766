"""Verification of cleaner offsets and control logs (``checkpoints verify``): against the rules, the live segments and each other. Reads
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from checkpoint import offsets
from compactor.access.tier import READER_THREADS, Tier
from compactor.control import ordering
from compactor.control.logs import PartitionLog
from compactor.control.records import BadControlRecord
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.upkeep.segment_check import SegmentProblem

ProblemKindTextAndObject = tuple[str, str, str]
"""Kind of a problem in one word, its description, and the key of the object that has it."""


def verify_control_logs(
    tier: Tier, partitions: Sequence[TopicPartition], on_partition: Callable[[], None] = lambda: None
) -> list[SegmentProblem]:
    """Return the problems of the control logs and cleaner offsets of several partitions, in the order of the partitions.

    :param on_partition: called when a partition is done.
    """

    def verify_control_log_of_partition(partition: TopicPartition) -> list[SegmentProblem]:
        found = verify_control_log(tier, partition)
        on_partition()
        return found

    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="verify") as pool:
        return [finding for found in pool.map(verify_control_log_of_partition, partitions) for finding in found]


def verify_control_log(tier: Tier, partition: TopicPartition) -> list[SegmentProblem]:
    """Return all problems and notes about one partition's control log and the cleaner offsets in it. Raises StoreError."""
    log = tier.open_control_log_of_partition(partition)
    found: list[SegmentProblem] = []

    def add_finding(kind: str, detail: str, object_key: str = "", severity: str = "error") -> None:
        found.append(SegmentProblem(severity, kind, partition.topic, partition.partition, object_key, detail))

    # LIST before the fold, as in ``retire``: a listed object that a later fold does not know belongs to no writer.
    slots = _list_slot_numbers_in_object_keys(tier, f"{log.prefix}/log/")
    snapshots = _list_slot_numbers_in_object_keys(tier, f"{log.prefix}/snapshot/")
    try:
        base, steps = log.read_records_with_resulting_states()
    except BadControlRecord as error:
        add_finding("control-log", error.cause, error.segment)
        return found
    for detail in cleaner_offset_problems(log.state):
        add_finding("cleaner-offsets", detail)
    for detail in live_segment_problems(log.state):
        add_finding("segments", detail)
    for detail in segment_beyond_cleaner_offset_problems(log.state):
        add_finding("not-granted", detail, severity="note")
    for detail in reasons_open_round_cannot_be_resumed(log.state):
        add_finding("intent", detail, severity="note")
    for entry in log.state.fenced:
        add_finding(
            "fenced",
            f"{entry.type} of epoch {entry.leader_epoch} by {entry.by}: {entry.reason}",
            log.control_record_object_key(entry.slot),
            "note",
        )
    for slot in slots:
        if slot > log.state.slot:
            add_finding("gap", f"slot {slot} comes after a gap: the log ends at slot {log.state.slot}", log.control_record_object_key(slot))
        elif slot <= base.slot:
            add_finding("left-over", "a boundary has passed it; the next cut deletes it", log.control_record_object_key(slot), "note")
    for kind, detail, where in _control_log_snapshot_problems(
        log, base, {base.slot: base} | {state.slot: state for _, state in steps}, snapshots
    ):
        add_finding(kind, detail, where, "error" if kind == "snapshot" else "note")
    return found


def cleaner_offset_problems(state: PartitionState) -> Iterator[str]:
    """Yield a message for each rule that the cleaner offsets of a state violate. The rules concern their order, the log's end, and the
    compactor epochs that were acquired.
    """
    problem = offsets.cleaner_vector_problem(state.vector)
    if problem:
        yield problem
    clean = offsets.first_dirty_offset_of_vector(state.vector)
    if state.has_segments and clean > state.end_offset + 1:
        yield f"they state clean data up to {clean}, the log ends at {state.end_offset}"
    if state.vector and state.vector[-1].leader_epoch > state.last_compactor_epoch:
        yield f"they name epoch {state.vector[-1].leader_epoch}, the last that was acquired is {state.last_compactor_epoch}"


def segment_beyond_cleaner_offset_problems(state: PartitionState) -> Iterator[str]:
    """Yield a message for each live segment that ends after the offset up to which the compactor epoch that published it has cleaned. The
    cleaner offset of that epoch was lowered later, when the broker's log was truncated.
    """
    for segment in state.live:
        epoch = state.published_by.get(segment.id)
        if epoch is not None and not offsets.has_epoch_cleaned_below(state.vector, epoch, segment.end_offset + 1):
            yield f"segment {segment.id} up to {segment.end_offset} was published by epoch {epoch}, whose cleaner offset is lower by now"


def live_segment_problems(state: PartitionState) -> Iterator[str]:
    """Yield a message for each gap or overlap between live segments. Yield one more if a segment is live twice, and one if the deletion of
    a live segment has begun.
    """
    for before, after in pairwise(state.live):
        if after.start_offset != before.end_offset + 1:
            yield f"segment {after.id} begins at {after.start_offset}, the one before it ends at {before.end_offset}"
    ids = [segment.id for segment in state.live]
    if len(set(ids)) != len(ids):
        yield "a segment is live twice"
    both = set(ids).intersection(segment.id for segment in state.retiring)
    if both:
        yield f"segment {min(both)} is live, and its deletion has begun"


def reasons_open_round_cannot_be_resumed(state: PartitionState) -> Iterator[str]:
    """Yield the reason why the open round cannot be resumed, such as a truncation of its sources, or nothing if it can. The next `run`
    undoes a round that cannot be resumed.
    """
    if state.intent and (reason := ordering.round_resumption_problem(state, state.intent)):
        yield f"the open round {state.intent.plan.run_id} can only be undone: {reason}"


def _control_log_snapshot_problems(
    log: PartitionLog, base_state: PartitionState, state_by_slot: dict[int, PartitionState], snapshot_slots: list[int]
) -> Iterator[ProblemKindTextAndObject]:
    """Yield (kind, description, object key) for each stored snapshot with a problem. Kind ``snapshot`` is an error: the snapshot differs
    from the state that results from the log's records. Kind ``left-over`` is a note: a newer snapshot has replaced it.

    :param base_state: state from which the records were replayed.
    :param state_by_slot: resulting states by position (slot).
    :param snapshot_slots: positions of the stored snapshots.
    """
    for slot in snapshot_slots:
        key = f"{log.prefix}/snapshot/{slot:020d}.json"
        try:
            stored = log.read_snapshot(slot)
        except BadData as error:
            yield "snapshot", error.message, key
            continue
        if stored is None:
            continue  # deleted since the LIST
        problem = next(iter((*cleaner_offset_problems(stored), *live_segment_problems(stored))), "")
        if problem:
            yield "snapshot", problem, key
        elif slot < base_state.slot:
            yield "left-over", "a newer snapshot has replaced it; the next cut deletes it", key
        elif slot not in state_by_slot:
            yield "snapshot", f"it is ahead of the log, which ends at slot {log.state.slot}", key
        elif slot > base_state.slot and (field := name_of_first_differing_field(stored, state_by_slot[slot])):
            yield "snapshot", f"its {field} is not what slots {base_state.slot + 1} to {slot} fold to", key


def name_of_first_differing_field(stored: PartitionState, folded: PartitionState) -> str:
    """Return the name of the first field in which two states differ, or an empty string if they are equal. Store times are not compared,
    because only a state from a snapshot has them.
    """
    one, two = (_state_without_store_times(state) for state in (stored, folded))
    return next((field for field in PartitionState.model_fields if getattr(one, field) != getattr(two, field)), "")


def _state_without_store_times(state: PartitionState) -> PartitionState:
    def entry_without_store_time(entry: Any) -> Any:
        return entry.model_copy(update={"since_ms": None})

    return state.model_copy(
        update={
            "leader": entry_without_store_time(state.leader) if state.leader else None,
            "waiting": tuple(entry_without_store_time(group) for group in state.waiting),
            "registrations": {name: entry_without_store_time(entry) for name, entry in state.registrations.items()},
        }
    )


def _list_slot_numbers_in_object_keys(tier: Tier, key_prefix: str) -> list[int]:
    """Return the positions (slots) in the names of the objects under a prefix. Objects whose names are not a number are left out."""
    names = (info.key.removeprefix(key_prefix).removesuffix(".json") for info in tier.ports.control.list(key_prefix))
    return [int(name) for name in names if name.isascii() and name.isdigit()]
