"""Opens control logs with the rules of ordering.py. Keys in the control store:

catalog/{log,snapshot,boundary}/...                     the tier-wide log: identity, partitions, hints
partitions/<topic-partition>/{log,snapshot,boundary}/... one partition's log
partitions/<topic-partition>/heartbeat/<epoch>.json      liveness of a leader
partitions/<topic-partition>/scratch/<run>/<name>        what a run keeps between its passes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from compactor.control import ordering
from compactor.control.control_log import ControlLog, LogFormat, Snapshot
from compactor.control.fold import fold_catalog, fold_partition, with_times
from compactor.control.ports import Ports
from compactor.control.records import CatalogRecord, PartitionChanged, PartitionRecord, Record, SlotsReached, TierCreated
from compactor.control.state import CatalogState, PartitionState
from compactor.errors import OutOfBudget, StoreError, Unavailable, UsageError
from compactor.model.ids import TopicPartition

PartitionLog = ControlLog[PartitionState]
CatalogLog = ControlLog[CatalogState]

HASH_KEY_BYTES = 16


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


def create_tier(ports: Ports, *, kind: str, layout: str, url: str = "", cluster_id: str = "") -> CatalogState:
    """Makes the tier's identity and its secret hash key, or returns those that it has. Raises UsageError for another kind.

    Of a native tier the caller asks first whether the data root is free (control.identity).
    """
    log = open_catalog(ports)
    if not log.refresh().tier_id:
        log.check_whole()  # a second identity, with another hash key, would be the end of the first
    made = TierCreated(
        tier_id=ports.new_id(),
        hash_key=ports.random_bytes(HASH_KEY_BYTES).hex(),
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
    """Lists the partition and tells other processes to look at it. A partition that is listed already is only hinted at.

    ``slot``: what its own log has had (``ControlLog.reached``); from now on a log that ends below it is refused.
    """
    seen = catalog.refresh().partitions.get(str(name), 0)
    hint = PartitionChanged(topic=name.topic, partition=name.partition, slot=slot)

    def decide(state: CatalogState) -> PartitionChanged | None:
        told = state.partitions.get(str(name), 0) > seen and state.reached.get(str(name), 0) >= slot
        return None if told else hint

    try:
        catalog.transact(decide)
    except StoreError:
        # A hint that is lost costs the others time; a partition that nobody has listed would be lost to them.
        if not seen:
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

    catalog.transact(decide)
    tidy(catalog)


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
