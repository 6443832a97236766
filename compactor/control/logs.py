"""Opens control logs with the rules of ordering.py. Keys in the control store:

catalog/{log,snapshot,boundary}/...                     the tier-wide log: identity, partitions, hints
catalog/inbox/<incarnation>-<slot>-<crc>.json            hints that found no slot there, until somebody takes them in
partitions/<topic-partition>/{log,snapshot,boundary}/... one partition's log
partitions/<topic-partition>/heartbeat/<epoch>.json      liveness of a leader
partitions/<topic-partition>/scratch/<run>/<name>        what a run keeps between its passes
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from compactor.control import ordering
from compactor.control.control_log import ControlLog, Crowded, LogFormat, Snapshot
from compactor.control.fold import fold_catalog, fold_partition, with_times
from compactor.control.ports import Ports
from compactor.control.records import (
    BadControlRecord,
    CatalogRecord,
    LookedAt,
    PartitionChanged,
    PartitionRecord,
    PartitionsChanged,
    PartitionsLooked,
    Record,
    SlotsReached,
    TierCreated,
    decode,
    seal,
)
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import NotFound, OutOfBudget, StoreError, Unavailable, UsageError
from compactor.model.ids import TopicPartition

PartitionLog = ControlLog[PartitionState]
CatalogLog = ControlLog[CatalogState]

HASH_KEY_BYTES = 16
MOST_LOST = 3
"""Slots of the tier-wide log that a hint may lose to others."""
FAR_BEHIND = 32
"""Slots that a writer folds to append a hint, at most."""
INBOX = 1000
"""Hints that are taken in at once."""


def apply_partition(state: PartitionState, record: Record[Any]) -> PartitionState:
    """The fold with the ordering rules in it."""
    return fold_partition(state, record, ordering.refusal)


PARTITION = LogFormat(record=PartitionRecord, snapshot=Snapshot[PartitionState], apply=apply_partition, with_times=with_times)
CATALOG = LogFormat(record=CatalogRecord, snapshot=Snapshot[CatalogState], apply=fold_catalog, with_times=lambda state, _: state)


def open_partition(
    ports: Ports, name: TopicPartition, floor: int = 0, *, key: str = "", view: Callable[[PartitionState], PartitionState] | None = None
) -> PartitionLog:
    """A partition's control log under a new incarnation. Makes no request yet; a partition that nobody wrote to is empty.

    ``floor``: a slot that the log has had, as the tier-wide log has it (``CatalogState.reached``). ``key``: what the log is called
    where a partition's name is not enough: brokers' topics come again under another id. ``view``: as ControlLog takes it.
    """
    empty = PartitionState(topic=name.topic, partition=name.partition)
    called = key or str(name)
    return _open(ports, f"partitions/{called}", called, empty, PARTITION, floor, view)


def open_catalog(ports: Ports) -> CatalogLog:
    """The tier-wide log. ``state.tier_id`` is empty where no tier was created."""
    return _open(ports, "catalog", "catalog", CatalogState(), CATALOG)


def create_tier(ports: Ports, *, kind: str, layout: str, url: str = "", cluster_id: str = "", hash_key: bytes = b"") -> CatalogState:
    """Makes the tier's identity and its secret hash key, or returns those that it has. Raises UsageError for another kind.

    Of a native tier the caller asks first whether the data root is free (control.identity). ``hash_key``: one that was drawn already,
    as keys were hashed before there was a tier.
    """
    log = open_catalog(ports)
    if not log.refresh().tier_id:
        log.check_whole()  # a second identity, with another hash key, would be the end of the first
    made = TierCreated(
        tier_id=ports.new_id(),
        hash_key=(hash_key or ports.random_bytes(HASH_KEY_BYTES)).hex(),
        kind=kind,
        layout=layout,
        created_by=ports.holder,
        url=url,
        cluster_id=cluster_id,
    )
    state = log.transact(lambda state: None if state.tier_id else made)
    if (state.kind, state.layout) != (kind, layout):
        raise UsageError(
            f"the tier at {ports.layout.url} is of kind {state.kind} and layout {state.layout}, not {kind} and {layout}",
            hint="Correct tier.kind and tier.layout in the configuration",
        )
    return state


def note_change(catalog: CatalogLog, name: TopicPartition, slot: int = 0) -> None:
    """``note_partitions`` of one partition."""
    note_partitions(catalog, {name: slot})


def note_partitions(catalog: CatalogLog, slots: Mapping[TopicPartition, int]) -> None:
    """Lists partitions and tells other processes to look at them, in one record. Those that are listed already are only hinted at.

    ``slots``: what each one's own log has had (``ControlLog.reached``); from now on a log that ends below it is refused.
    """
    if all(str(name) in catalog.state.partitions for name in slots) and catalog.is_far_behind(FAR_BEHIND):
        _leave_in_inbox(catalog, slots)
        return
    known = catalog.refresh().partitions
    seen = {str(name): known.get(str(name), 0) for name in slots}

    def decide(state: CatalogState) -> PartitionChanged | PartitionsChanged | None:
        new = {name: slot for name, slot in slots.items() if not _is_told(state, str(name), slot, seen[str(name)])}
        if len(new) == 1:
            ((name, slot),) = new.items()
            return PartitionChanged(topic=name.topic, partition=name.partition, slot=slot)
        return PartitionsChanged(slots={str(name): slot for name, slot in new.items()}) if new else None

    listed = all(seen.values())
    try:
        # A thousand writers do not wait for each other: where slots are taken away, what is known already is left in the inbox.
        catalog.transact(decide, most_lost=MOST_LOST if listed else 0)
    except Crowded:
        _leave_in_inbox(catalog, slots)
        return
    except StoreError:
        # A hint that is lost costs the others time; a partition that nobody has listed would be lost to them.
        if not listed:
            raise
    tidy(catalog)


def note_slots(catalog: CatalogLog, logs: Iterable[PartitionLog]) -> None:
    """The lower bounds of many partitions in one record; none where all of them are known. One request for each that is not."""
    known = catalog.refresh().reached
    behind = [log for log in logs if log.state.slot > known.get(log.name, 0)]
    slots = {log.name: log.reached() for log in behind}

    def decide(state: CatalogState) -> SlotsReached | None:
        new = {name: slot for name, slot in slots.items() if slot > state.reached.get(name, 0)}
        return SlotsReached(slots=new) if new else None

    try:
        catalog.transact(decide, most_lost=MOST_LOST)
    except Crowded:
        return  # bounds are told again with the next change
    tidy(catalog)


def note_looks(catalog: CatalogLog, looks: Mapping[str, LookedAt]) -> None:
    """Where there is nothing to retire, and until when. One record; a store that is crowded costs another look, later."""
    left = dict(looks)

    def decide(state: CatalogState) -> PartitionsLooked | None:
        new = {name: look for name, look in left.items() if state.looks.get(name) != look and look.slot >= state.reached.get(name, 0)}
        return PartitionsLooked(looks=new) if new else None

    try:
        catalog.transact(decide, most_lost=MOST_LOST)
    except Crowded:
        return
    tidy(catalog)


def take_in_inbox(catalog: CatalogLog) -> int:
    """Hints that others have left become one record; returns how many there were. One LIST where there are none. Raises StoreError."""
    found: dict[str, int] = {}
    keys: list[str] = []
    for info in islice(catalog.store.list(f"{catalog.prefix}/inbox/"), INBOX):
        try:
            hint = decode(PartitionChanged, catalog.store.get(info.key), f"{catalog.store.url}/{info.key}")
        except NotFound:
            continue  # somebody else was faster
        except BadControlRecord:
            keys.append(info.key)  # nothing depends on a hint
            continue
        keys.append(info.key)
        name = f"{hint.topic}-{hint.partition}"
        found[name] = max(found.get(name, 0), hint.slot)
    if not keys:
        return 0
    seen = catalog.refresh().slot

    def decide(state: CatalogState) -> PartitionsChanged | None:
        new = {name: slot for name, slot in found.items() if not _is_told(state, name, slot, seen)}
        return PartitionsChanged(slots=new) if new else None

    catalog.transact(decide)
    catalog.store.delete(keys)
    tidy(catalog)
    return len(keys)


def _is_told(state: CatalogState, name: str, slot: int, seen: int) -> bool:
    """Whether there is a hint later than ``seen`` that says as much: somebody else's may know less of the partition's log."""
    return state.partitions.get(name, 0) > seen and state.reached.get(name, 0) >= slot


def _leave_in_inbox(catalog: CatalogLog, slots: Mapping[TopicPartition, int]) -> None:
    """No slot, so that nobody is in anybody's way. Lost where the store fails: hints may be."""
    for name, slot in slots.items():
        key = f"{catalog.prefix}/inbox/{catalog.incarnation}-{slot}-{zlib.crc32(str(name).encode()):08x}.json"
        hint = PartitionChanged(topic=name.topic, partition=name.partition, slot=slot)
        with suppress(StoreError):
            catalog.store.put(key, seal(hint.model_dump_json().encode()))


def tidy(log: ControlLog[Any]) -> None:
    """Cuts the log where that pays, after whatever has made it longer. A store that is busy is asked again the next time."""
    try:
        log.cut()
    except (Unavailable, OutOfBudget):
        pass


def _open(ports: Ports, prefix: str, name: str, empty: Any, form: LogFormat[Any], floor: int = 0, view: Any = None) -> ControlLog[Any]:
    return ControlLog(
        ports.control,
        prefix,
        name,
        empty,
        form,
        incarnation=ports.new_id(),
        clock_ms=ports.clock_ms,
        floor=floor,
        view=view,
    )
