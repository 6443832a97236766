"""Opening of control logs with the ordering rules, and the hints between processes. Keys in the control store:

  catalog/{log,snapshot,boundary}/...                     the tier-wide log: identity, partitions, hints
  catalog/inbox/<incarnation>-<slot>-<crc>.json           hints that found no slot there, until a process moves them into the log
  partitions/<topic-partition>/{log,snapshot,boundary}/...  one partition's log
  partitions/<topic-partition>/heartbeat/<epoch>.json     liveness of a leader
  partitions/<topic-partition>/scratch/<run>/<name>       what a run stores between its passes

A later incarnation of a topic has ``<topic-partition>~<number>`` in place of ``<topic-partition>`` (compactor.model.ids).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

from compactor.control import ordering
from compactor.control.control_log import ControlLog, ControlLogFormat, SlotContention, StateSnapshot
from compactor.control.fold import apply_catalog_record, apply_partition_record, with_store_times
from compactor.control.ports import EnvironmentPorts
from compactor.control.records import (
    BadControlRecord,
    CatalogRecord,
    ControlRecord,
    DeletionCheckResult,
    PartitionChanged,
    PartitionRecord,
    PartitionsChanged,
    PartitionsInspected,
    RoundRequested,
    RoundsPaused,
    RoundsResumed,
    SlotsReached,
    TierCreated,
    append_checksum,
    decode_checksummed_json,
)
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import BadData, NotFound, OutOfBudget, StoreError, Unavailable, UsageError
from compactor.model.ids import TopicPartition

# Pauses and requested rounds


def pattern_matches(pattern: str, partition: TopicPartition) -> bool:
    """Match the whole topic name, or the whole ``topic-partition`` with or without the suffix of the incarnation."""
    return any(re.fullmatch(pattern, text) for text in (partition.topic, str(partition.first_incarnation), str(partition)))


def pause_reason(state: CatalogState, partition: TopicPartition) -> str:
    for pattern, pause in state.paused.items():
        if pattern_matches(pattern, partition):
            return (
                f"paused by {pause.by}"
                + (f": {pause.reason}" if pause.reason else "")
                + (f" ({pattern})" if pattern != str(partition) else "")
            )
    return ""


def pause_rounds(catalog: CatalogLog, pattern: str, operator: str, reason: str) -> bool:
    """Return whether the pattern was not paused before. Raises UsageError if it is not a valid regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is not a valid regular expression: {error}", hint="Name a topic, a TOPIC-PARTITION or a whole regular expression"
        ) from error
    before = pattern in catalog.refresh().paused
    catalog.append_due_records(lambda state: None if pattern in state.paused else RoundsPaused(pattern=pattern, by=operator, reason=reason))
    write_snapshot_if_due(catalog)
    return not before


def resume_rounds(catalog: CatalogLog, pattern: str, operator: str) -> None:
    """Raises UsageError if there is no such pause."""
    known = catalog.refresh().paused
    if pattern not in known:
        hint = f"Paused are: {', '.join(known)}" if known else "Nothing is paused"
        raise UsageError(f"nothing was paused by {pattern!r}", hint=hint)
    catalog.append_due_records(lambda state: RoundsResumed(pattern=pattern, by=operator) if pattern in state.paused else None)
    write_snapshot_if_due(catalog)


def request_round(catalog: CatalogLog, partition: TopicPartition, operator: str) -> None:
    since = catalog.refresh().slot
    body = RoundRequested(topic=partition.topic, partition=partition.partition, incarnation=partition.incarnation, by=operator)
    catalog.append_due_records(lambda state: None if str(partition) in state.wanted and state.wanted[str(partition)].slot > since else body)
    write_snapshot_if_due(catalog)


PartitionLog = ControlLog[PartitionState]
CatalogLog = ControlLog[CatalogState]
T = TypeVar("T")

READ_ATTEMPTS = 3

HASH_KEY_BYTES = 16
MOST_LOST = 3
"""Number of slots of the tier-wide log that a hint may lose to other writers before it goes to the inbox."""
FAR_BEHIND = 32
"""Number of slots that a writer reads at most before it appends a hint."""
INBOX = 1000
"""Number of hints that are taken from the inbox at once."""


def fold_partition_record(state: PartitionState, record: ControlRecord[Any]) -> PartitionState:
    return apply_partition_record(state, record, ordering.find_rule_violation)


PARTITION = ControlLogFormat(
    record=PartitionRecord,
    snapshot=StateSnapshot[PartitionState],
    apply=fold_partition_record,
    with_store_times=with_store_times,
)
CATALOG = ControlLogFormat(
    record=CatalogRecord,
    snapshot=StateSnapshot[CatalogState],
    apply=apply_catalog_record,
    with_store_times=lambda state, _: state,
)


def open_partition_log(
    ports: EnvironmentPorts,
    partition: TopicPartition,
    min_slot: int = 0,
    *,
    control_log_name: str = "",
    convert_to_reader_state: Callable[[PartitionState], PartitionState] | None = None,
) -> PartitionLog:
    """Makes no request.

    :param min_slot: a slot that the log has had according to the tier-wide log (``CatalogState.reached``); a log that ends below it is
    refused.
    :param control_log_name: name of the log if the partition's name is not unique: on broker-managed tiers it contains the topic id.
    """
    empty = PartitionState(topic=partition.topic, partition=partition.partition, incarnation=partition.incarnation)
    called = control_log_name or str(partition)
    return _open_control_log(ports, f"partitions/{called}", called, empty, PARTITION, min_slot, convert_to_reader_state)


def retry_if_object_missing(partition: TopicPartition, read_once: Callable[[], T], attempts: int = READ_ATTEMPTS) -> T:
    """Call ``read_once`` again if it raises NotFound, because an object was deleted meanwhile. Raises BadData if an object is missing in
    the last attempt, too.
    """
    for _ in range(attempts - 1):
        with suppress(NotFound):
            return read_once()
    try:
        return read_once()
    except NotFound as error:
        raise BadData(f"an object of the view is missing: {error.message}", segment=str(partition), hint="Run `verify`") from error


def open_catalog(ports: EnvironmentPorts) -> CatalogLog:
    return _open_control_log(ports, "catalog", "catalog", CatalogState(), CATALOG)


def create_tier(
    ports: EnvironmentPorts,
    *,
    kind: str,
    layout: str,
    key_entropy_bits: int = 0,
    url: str = "",
    cluster_id: str = "",
    hash_key: bytes = b"",
) -> CatalogState:
    """Create the tier's identity and secret hash key, or return the existing ones. Raises UsageError if the tier is of another kind or
    layout, or has another number of key entropy bits.

    For a compactor-managed tier the caller first checks that no other tier owns the data root (control.identity).

    :param hash_key: key with which keys were hashed already; empty to create a random one.
    :param url, cluster_id: of a broker-managed tier; empty for other tiers, or if unknown.
    """
    log = open_catalog(ports)
    if not log.refresh().tier_id:
        log.refresh_and_check_gaps()  # a second identity, with another hash key, would be the end of the first
    made = TierCreated(
        tier_id=ports.new_id(),
        hash_key=(hash_key or ports.random_bytes(HASH_KEY_BYTES)).hex(),
        kind=kind,
        layout=layout,
        created_by=ports.holder,
        key_entropy_bits=key_entropy_bits,
        url=url,
        cluster_id=cluster_id,
    )
    state = log.append_due_records(lambda state: None if state.tier_id else made)
    require_matching_tier_settings(state, ports.layout.url, kind, layout, key_entropy_bits)
    return state


def require_matching_tier_settings(state: CatalogState, url: str, kind: str, layout: str, key_entropy_bits: int) -> None:
    if (state.kind, state.layout) != (kind, layout):
        raise UsageError(
            f"the tier at {url} is of kind {state.kind} and layout {state.layout}, not {kind} and {layout}",
            hint="Nothing was changed. Correct tier.kind and tier.layout in the configuration",
        )
    if state.key_entropy_bits != key_entropy_bits:
        raise UsageError(
            f"the keys of the tier at {url} begin with {state.key_entropy_bits} binary digits, not with {key_entropy_bits}",
            hint="Nothing was changed. Set tier.key_entropy_bits to what the tier was made with; `import --from-tier` fills another tier",
        )


def publish_hints(catalog: CatalogLog, slots: Mapping[TopicPartition, int]) -> None:
    """Record in the tier-wide log, in one record, that these partitions exist and have new records. A log that ends below its slot in
    ``slots`` is refused from now on.

    Raises StoreError only if a partition is new; a lost hint about a known partition merely delays other processes.
    """
    if all(str(name) in catalog.state.partitions for name in slots) and catalog.has_min_new_records(FAR_BEHIND):
        _queue_hints(catalog, slots)
        return
    known = catalog.refresh().partitions
    seen = {str(name): known.get(str(name), 0) for name in slots}

    def decide_record_to_append(state: CatalogState) -> PartitionChanged | PartitionsChanged | None:
        new = {name: slot for name, slot in slots.items() if not _has_newer_hint(state, str(name), slot, seen[str(name)])}
        if len(new) == 1:
            ((name, slot),) = new.items()
            return PartitionChanged(topic=name.topic, partition=name.partition, incarnation=name.incarnation, slot=slot)
        return PartitionsChanged(slots={str(name): slot for name, slot in new.items()}) if new else None

    listed = all(seen.values())
    try:
        # A thousand writers do not wait for each other: where slots are taken away, what is known already is left in the inbox.
        catalog.append_due_records(decide_record_to_append, max_lost_slots=MOST_LOST if listed else 0)
    except SlotContention:
        _queue_hints(catalog, slots)
        return
    except StoreError:
        # A hint that is lost costs the others time; a partition that nobody has listed would be lost to them.
        if not listed:
            raise
    write_snapshot_if_due(catalog)


def record_control_log_lengths(catalog: CatalogLog, logs: Iterable[PartitionLog]) -> None:
    """Use one record for all logs. A log that loses records later is then noticed."""
    known = catalog.refresh().reached
    behind = [log for log in logs if log.state.slot > known.get(log.name, 0)]
    slots = {log.name: log.confirmed_slot() for log in behind}

    def decide_record_to_append(state: CatalogState) -> SlotsReached | None:
        new = {name: slot for name, slot in slots.items() if slot > state.reached.get(name, 0)}
        return SlotsReached(slots=new) if new else None

    try:
        catalog.append_due_records(decide_record_to_append, max_lost_slots=MOST_LOST)
    except SlotContention:
        return  # bounds are told again with the next change
    write_snapshot_if_due(catalog)


def record_deletion_checks(catalog: CatalogLog, inspections: Mapping[str, DeletionCheckResult]) -> None:
    """If other processes keep appending to the log, nothing is recorded."""
    left = dict(inspections)

    def decide_record_to_append(state: CatalogState) -> PartitionsInspected | None:
        new = {
            name: inspection
            for name, inspection in left.items()
            if state.looks.get(name) != inspection and inspection.slot >= state.reached.get(name, 0)
        }
        return PartitionsInspected(looks=new) if new else None

    try:
        catalog.append_due_records(decide_record_to_append, max_lost_slots=MOST_LOST)
    except SlotContention:
        return
    write_snapshot_if_due(catalog)


def collect_queued_hints(catalog: CatalogLog) -> int:
    """Move queued hints into the tier-wide log, as one record. Return their number. Raises StoreError."""
    found: dict[str, int] = {}
    keys: list[str] = []
    for info in islice(catalog.store.list(f"{catalog.prefix}/inbox/"), INBOX):
        try:
            hint = decode_checksummed_json(PartitionChanged, catalog.store.get(info.key), f"{catalog.store.url}/{info.key}")
        except NotFound:
            continue  # somebody else was faster
        except BadControlRecord:
            keys.append(info.key)  # nothing depends on a hint
            continue
        keys.append(info.key)
        name = str(hint.topic_partition)
        found[name] = max(found.get(name, 0), hint.slot)
    if not keys:
        return 0
    seen = catalog.refresh().slot

    def decide_record_to_append(state: CatalogState) -> PartitionsChanged | None:
        new = {name: slot for name, slot in found.items() if not _has_newer_hint(state, name, slot, seen)}
        return PartitionsChanged(slots=new) if new else None

    catalog.append_due_records(decide_record_to_append)
    catalog.store.delete(keys)
    write_snapshot_if_due(catalog)
    return len(keys)


def _has_newer_hint(state: CatalogState, name: str, partition_log_slot: int, after_catalog_slot: int) -> bool:
    return state.partitions.get(name, 0) > after_catalog_slot and state.reached.get(name, 0) >= partition_log_slot


def _queue_hints(catalog: CatalogLog, slots: Mapping[TopicPartition, int]) -> None:
    """Hints are separate objects, so that writers do not compete for the next slot. Store errors are ignored."""
    for name, slot in slots.items():
        key = f"{catalog.prefix}/inbox/{catalog.incarnation}-{slot}-{zlib.crc32(str(name).encode()):08x}.json"
        hint = PartitionChanged(topic=name.topic, partition=name.partition, incarnation=name.incarnation, slot=slot)
        with suppress(StoreError):
            catalog.store.put(key, append_checksum(hint.model_dump_json().encode()))


def write_snapshot_if_due(log: ControlLog[Any]) -> None:
    """If the store is busy, a later call tries again."""
    try:
        log.snapshot_and_cut()
    except (Unavailable, OutOfBudget):
        pass


def _open_control_log(
    ports: EnvironmentPorts,
    prefix: str,
    name: str,
    empty_state: Any,
    log_format: ControlLogFormat[Any],
    min_slot: int = 0,
    convert_to_reader_state: Any = None,
) -> ControlLog[Any]:
    return ControlLog(
        ports.control,
        prefix,
        name,
        empty_state,
        log_format,
        incarnation=ports.new_id(),
        clock_ms=ports.clock_ms,
        min_slot=min_slot,
        convert_to_reader_state=convert_to_reader_state,
    )
