"""The checkpoint viewer: cleaner offsets by leader epoch, who led when, who published what, where a zombie was cut off and why.

Everything here only reads. ``read_only`` makes sure of it, so that a live tier is looked at without being disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

from checkpoint.lineage import EpochEntry
from checkpoint.offsets import CleanerOffset
from compactor.bootstrap import Tier
from compactor.control.leadership import LeaseInfo, lease_of
from compactor.control.logs import PartitionLog
from compactor.control.ports import Ports
from compactor.control.state import EpochHistory, FencedAppend, PartitionState, Run
from compactor.storage.readonly import ReadOnly
from compactor.tier.publishers.nobody import NobodyPublisher


def read_only(opened: Tier) -> Tier:
    """The same tier through stores that refuse every write."""
    viewed = opened.over(control=ReadOnly(opened.ports.control), data=ReadOnly(opened.ports.data))
    return viewed if opened.brokers is None else replace(viewed, ports=replace(viewed.ports, publisher=NobodyPublisher()))


@dataclass(frozen=True)
class FencedView:
    """A record that is in the log and does not count. ``offset``: the cleaner offset that it claimed, None for none; ``by``: its writer."""

    leader_epoch: int
    offset: int | None
    by: str
    reason: str
    type: str
    slot: int
    at_ms: int


@dataclass(frozen=True)
class CheckpointView:
    """One partition as its control log has it at ``slot``. ``end_offset`` is inclusive, -1 for an empty partition.

    ``first_dirty_offset``: the first offset that nobody has cleaned yet. ``open_run``: a round that was begun and not finished.
    """

    topic: str
    partition: int
    slot: int
    cleaner_offsets: tuple[CleanerOffset, ...]
    lease: LeaseInfo | None
    fenced: tuple[FencedView, ...]
    start_offset: int
    end_offset: int
    first_dirty_offset: int
    compactor_epoch: int
    open_run: str | None
    quarantine: str | None
    leader_epochs: tuple[EpochEntry, ...]


def view(ports: Ports, log: PartitionLog) -> CheckpointView:
    """Of a log that was refreshed."""
    state = log.state
    return CheckpointView(
        topic=state.topic,
        partition=state.partition,
        slot=state.slot,
        cleaner_offsets=state.vector,
        lease=lease_of(ports, log),
        fenced=tuple(_fenced(entry) for entry in state.fenced),
        start_offset=state.start_offset,
        end_offset=state.end_offset,
        first_dirty_offset=state.first_dirty_offset,
        compactor_epoch=state.last_epoch,
        open_run=state.intent.plan.run_id if state.intent else None,
        quarantine=state.quarantine.reason if state.quarantine else None,
        leader_epochs=state.lineage,
    )


def _fenced(entry: FencedAppend) -> FencedView:
    offset = entry.offset if entry.offset >= 0 else None
    return FencedView(entry.leader_epoch, offset, entry.by, entry.reason, entry.type, entry.slot, entry.at_ms)


@dataclass(frozen=True)
class RunView:
    """A round within an epoch. ``status`` as in `runs`; offsets are None where the round never got so far."""

    run_id: str
    status: str
    announced_by: str
    slot: int
    published_slot: int | None
    first_dirty_offset: int | None
    next_dirty_offset: int | None
    cleaner_offsets: tuple[CleanerOffset, ...]
    sources: int
    outputs: int
    reason: str


@dataclass(frozen=True)
class CutOff:
    """Who took over from an epoch that had not released its leadership: from ``slot`` on nothing that it writes counts."""

    leader_epoch: int
    holder: str
    slot: int
    at_ms: int


@dataclass(frozen=True)
class EpochView:
    """One compactor epoch. ``ended``: released, replaced, or leading. ``granted``: up to where the present vector grants it, None: nothing.

    ``cut_off``: set where it was replaced. ``undid``: runs that it took back (`undo`), for as long as their outputs are kept. A round
    stands under the epoch that published it; ``announced_by`` says who had begun it.
    """

    leader_epoch: int
    holder: str
    incarnation: str
    slot: int
    at_ms: int
    ended: str
    ended_ms: int | None
    granted: int | None
    cut_off: CutOff | None
    runs: tuple[RunView, ...]
    undid: tuple[str, ...]
    fenced: tuple[FencedView, ...]


@dataclass(frozen=True)
class LineageView:
    """All epochs that are remembered, oldest first. ``unowned``: void records that no remembered epoch wrote (imports, older epochs)."""

    topic: str
    partition: int
    slot: int
    cleaner_offsets: tuple[CleanerOffset, ...]
    lease: LeaseInfo | None
    fenced: tuple[FencedView, ...]
    epochs: tuple[EpochView, ...]
    unowned: tuple[FencedView, ...]


def lineage(ports: Ports, log: PartitionLog) -> LineageView:
    """The tree of compactor epochs, of a log that was refreshed."""
    state = log.state
    known = {entry.epoch for entry in state.epochs}
    return LineageView(
        topic=state.topic,
        partition=state.partition,
        slot=state.slot,
        cleaner_offsets=state.vector,
        lease=lease_of(ports, log),
        fenced=tuple(_fenced(entry) for entry in state.fenced),
        epochs=epochs(state),
        unowned=tuple(_fenced(entry) for entry in state.fenced if entry.leader_epoch not in known),
    )


def epochs(state: PartitionState) -> tuple[EpochView, ...]:
    """Each remembered epoch with what it published, what of it was void, and who cut it off."""
    return tuple(_epoch(state, entry, after) for entry, after in zip_longest(state.epochs, state.epochs[1:]))


def _epoch(state: PartitionState, entry: EpochHistory, after: EpochHistory | None) -> EpochView:
    cut_off = None
    if entry.ended == "replaced" and after is not None:
        cut_off = CutOff(after.epoch, after.holder, after.slot, after.at_ms)
    return EpochView(
        leader_epoch=entry.epoch,
        holder=entry.holder,
        incarnation=entry.incarnation,
        slot=entry.slot,
        at_ms=entry.at_ms,
        ended=entry.ended or "leading",
        ended_ms=entry.ended_ms if entry.ended else None,
        granted=next((granted.offset for granted in state.vector if granted.leader_epoch == entry.epoch), None),
        cut_off=cut_off,
        runs=tuple(_run(run) for run in state.runs if run.leader_epoch == entry.epoch),
        undid=tuple(group.run_id for group in state.waiting if group.undone and group.leader_epoch == entry.epoch),
        fenced=tuple(_fenced(void) for void in state.fenced if void.leader_epoch == entry.epoch),
    )


def _run(run: Run) -> RunView:
    return RunView(
        run_id=run.run_id,
        status=run.status,
        announced_by=run.holder,
        slot=run.slot,
        published_slot=run.published_slot or None,
        first_dirty_offset=run.first_dirty_offset if run.first_dirty_offset >= 0 else None,
        next_dirty_offset=run.next_dirty_offset if run.next_dirty_offset >= 0 else None,
        cleaner_offsets=run.vector,
        sources=run.sources,
        outputs=run.outputs,
        reason=run.reason,
    )
