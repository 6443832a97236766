"""The order in which segments come into the tier: ids registered < objects created < sources looked at again < tiered.

An import that was cut short is taken up where it stopped: its id is made of what it brings, and the ids of its segments stand in the
control log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from checkpoint.lineage import Lineage
from compactor.control.importing import prepend, register, tier
from compactor.control.logs import PartitionLog
from compactor.control.ports import Ports
from compactor.control.records import TailBatch
from compactor.control.state import ClosedImport, PartitionState
from compactor.errors import StoreError
from compactor.model.ids import segment_id
from compactor.model.segment import RemoteLogSegmentMetadata

MOST_ATTEMPTS = 1000


class Incoming(Protocol):
    """One segment on its way into the tier."""

    @property
    def identity(self) -> str:
        """The same whenever offsets and bytes are the same."""

    def bring(self, registered: str) -> RemoteLogSegmentMetadata | None:
        """Creates its objects under this id; None where other objects have it already."""

    def check_unchanged(self) -> None:
        """Raises BadData where its source is no longer what ``bring`` was told to bring."""


@dataclass(frozen=True)
class Arrival:
    """What goes with the segments. ``before``: the segments stand before the beginning of the log, not at its end.

    ``at_once``: segments that are brought at the same time. ``fits``: raises where the state has gone on so that they no longer fit.
    ``listed``: called before anything is created, so that what a killed import leaves behind is found. ``noted``: called when there is
    something new.
    """

    lineage: Lineage
    tail: tuple[TailBatch, ...] = ()
    before: bool = False
    at_once: int = 1
    fits: Callable[[PartitionState], None] = lambda state: None
    listed: Callable[[], None] = lambda: None
    noted: Callable[[], None] = lambda: None


def take_in(ports: Ports, log: PartitionLog, incoming: Sequence[Incoming], arrival: Arrival) -> bool:
    """All of them become readable, or none. False where this very import was complete before, or a twin of this process was faster.

    :raises BadData: a source changed meanwhile, or another process was faster.
    :raises Fenced: the import was voided because it slept too long.
    :raises StoreError: what was created is found again by the next attempt, or swept.
    """
    for import_id in _import_ids(incoming):
        if _closed(log.state, import_id) is None and _attempt(ports, log, import_id, incoming, arrival):
            return True
        closed = _closed(log.state, import_id)
        if closed is not None and not closed.voided:
            return False
    raise StoreError("this import was voided too often", hint="See why with `explain`, or raise publish.orphan_age_ms")


def _attempt(ports: Ports, log: PartitionLog, import_id: str, incoming: Sequence[Incoming], arrival: Arrival) -> bool:
    """False where it is closed by now, or an earlier attempt with other settings left other objects: the next one takes new ids."""
    arrival.fits(log.state)
    state = register(ports, log, import_id, [ports.new_id() for _ in incoming])
    arrival.listed()
    entry = state.registrations.get(import_id)
    if entry is None or len(entry.ids) != len(incoming):
        return False
    segments = _brought(incoming, entry.ids, arrival.at_once)
    if segments is None:
        return False
    if arrival.before:
        prepend(ports, log, import_id, segments, arrival.lineage)
    else:
        tier(ports, log, import_id, segments, arrival.lineage, arrival.tail)
    arrival.noted()
    return True


def _brought(incoming: Sequence[Incoming], ids: Sequence[str], at_once: int) -> list[RemoteLogSegmentMetadata] | None:
    """Their metadata, in their order; None where one of the ids is taken by other objects. After an error no further one is begun."""

    def bring(one: Incoming, registered: str) -> RemoteLogSegmentMetadata | None:
        metadata = one.bring(registered)
        if metadata is not None:
            look_again(one)
        return metadata

    found = []
    for metadata in _in_order(bring, incoming, ids, at_once):
        if metadata is None:
            return None
        found.append(metadata)
    return found


def _in_order(
    bring: Callable[[Incoming, str], RemoteLogSegmentMetadata | None], incoming: Sequence[Incoming], ids: Sequence[str], at_once: int
) -> Iterator[RemoteLogSegmentMetadata | None]:
    """With one at a time in the caller's thread."""
    if min(at_once, len(incoming)) < 2:
        yield from map(bring, incoming, ids)
        return
    pool = ThreadPoolExecutor(at_once, "upload")
    try:
        yield from pool.map(bring, incoming, ids)
    finally:
        pool.shutdown(cancel_futures=True)


def look_again(one: Incoming) -> None:
    """What was created may be of a file that changed while it was read: it must not become readable."""
    one.check_unchanged()


def _closed(state: PartitionState, import_id: str) -> ClosedImport | None:
    return next((entry for entry in state.closed_imports if entry.import_id == import_id), None)


def _import_ids(incoming: Sequence[Incoming]) -> Iterator[str]:
    """The ids of the first, second, ... attempt at one import: the same whenever offsets and bytes are the same."""
    identity = "\n".join(one.identity for one in incoming).encode()
    for attempt in range(MOST_ATTEMPTS):
        yield segment_id(hashlib.sha256(identity + attempt.to_bytes(4, "big")).digest()[:16])
