"""Checkpoint views: cleaner offsets, compactor epochs, Kafka's checkpoint files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from checkpoint.files import parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.access.tier import Tier
from compactor.control.leadership import current_lease
from compactor.control.logs import PartitionLog
from compactor.control.ports import EnvironmentPorts
from compactor.control.state import CompactorEpochAndEnding, FencedAppend, PartitionState, RunHistoryEntry
from compactor.errors import UsageError
from compactor.storage.wrappers import ReadOnlyStore
from compactor.tier.ports import ReadOnlyPublisher


def read_only_copy(tier: Tier) -> Tier:
    """Stores and publisher of the copy refuse every write."""
    viewed = tier.with_stores(control=ReadOnlyStore(tier.ports.control), data=ReadOnlyStore(tier.ports.data))
    if not tier.kind.is_broker_managed:
        return viewed  # what readers see is in the control store, which refuses
    return replace(viewed, ports=replace(viewed.ports, publisher=ReadOnlyPublisher()))


Document = dict[str, Any]
"""Fields of a JSON document."""


def partition_checkpoint_document(ports: EnvironmentPorts, log: PartitionLog) -> Document:
    """Progress of a partition. ``end_offset`` is inclusive; -1 for an empty partition."""
    state = log.state
    return _partition_state_document(ports, log) | {
        "start_offset": state.start_offset,
        "end_offset": state.end_offset,
        "first_dirty_offset": state.first_dirty_offset,
        "compactor_epoch": state.last_compactor_epoch,
        "open_run": state.intent.plan.run_id if state.intent else None,
        "quarantine": state.quarantine.reason if state.quarantine else None,
        "leader_epochs": state.lineage,
    }


def epoch_history_document(ports: EnvironmentPorts, log: PartitionLog) -> Document:
    """Compactor epochs, oldest first.

    unowned: control records without effect whose writer was an import, or an epoch that is no longer in the state.
    """
    state = log.state
    known = {entry.epoch for entry in state.epochs}
    return _partition_state_document(ports, log) | {
        "epochs": [_epoch_document(state, entry, after) for entry, after in zip_longest(state.epochs, state.epochs[1:])],
        "unowned": [_fenced_document(entry) for entry in state.fenced if entry.leader_epoch not in known],
    }


def _partition_state_document(ports: EnvironmentPorts, log: PartitionLog) -> Document:
    state = log.state
    return {
        "topic": state.topic,
        "partition": state.partition,
        "incarnation": state.incarnation,
        "slot": state.slot,
        "cleaner_offsets": state.vector,
        "lease": current_lease(ports, log),
        "fenced": [_fenced_document(entry) for entry in state.fenced],
    }


def _fenced_document(entry: FencedAppend) -> Document:
    return entry.model_dump() | {"offset": _none_if_negative(entry.offset)}


def _epoch_document(state: PartitionState, epoch: CompactorEpochAndEnding, next_epoch: CompactorEpochAndEnding | None) -> Document:
    """Fields: granted: cleaner offset of this epoch among the present ones.
    cut_off: the epoch that replaced this one before it was released. Records that this epoch wrote at or after that epoch's ``slot``
        have no effect.
    undid: runs that this epoch undid and whose outputs are not deleted yet.
    """
    cut_off = None
    if epoch.ended == "replaced" and next_epoch is not None:
        cut_off = {"leader_epoch": next_epoch.epoch, "holder": next_epoch.holder, "slot": next_epoch.slot, "at_ms": next_epoch.at_ms}
    return {
        "leader_epoch": epoch.epoch,
        "holder": epoch.holder,
        "incarnation": epoch.incarnation,
        "slot": epoch.slot,
        "at_ms": epoch.at_ms,
        "ended": epoch.ended or "leading",
        "ended_ms": epoch.ended_ms if epoch.ended else None,
        "granted": next((granted.offset for granted in state.vector if granted.leader_epoch == epoch.epoch), None),
        "cut_off": cut_off,
        "runs": [_round_document(run) for run in state.runs if run.leader_epoch == epoch.epoch],
        "undid": [group.run_id for group in state.waiting if group.undone and group.leader_epoch == epoch.epoch],
        "fenced": [_fenced_document(void) for void in state.fenced if void.leader_epoch == epoch.epoch],
    }


def _round_document(run: RunHistoryEntry) -> Document:
    return {
        "run_id": run.run_id,
        "status": run.status,
        "announced_by": run.holder,
        "slot": run.slot,
        "published_slot": run.published_slot or None,
        "first_dirty_offset": _none_if_negative(run.first_dirty_offset),
        "next_dirty_offset": _none_if_negative(run.next_dirty_offset),
        "cleaner_offsets": run.vector,
        "sources": run.sources,
        "outputs": run.outputs,
        "reason": run.reason,
    }


def _none_if_negative(offset: int) -> int | None:
    return offset if offset >= 0 else None


CLEANER_OFFSETS = "cleaner-offset-checkpoint"
LEADER_EPOCHS = "leader-epoch-checkpoint"
MOST_BYTES = 64 << 20
"""Larger files are refused: no broker has so many partitions."""


@dataclass(frozen=True)
class KafkaCleanerOffset:
    """The ``offset`` is the first that is not clean."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True)
class KafkaCheckpointFile:
    """Checkpoint file of a broker; its kind decides which list has entries."""

    path: str
    kind: str
    offsets: tuple[KafkaCleanerOffset, ...] = ()
    leader_epochs: tuple[EpochEntry, ...] = ()


@dataclass(frozen=True)
class CheckpointEntryChange:
    """Change of one entry; None in a file without it."""

    what: str
    before: int | None
    after: int | None


def read_checkpoint_file(path: Path) -> KafkaCheckpointFile:
    """Parse a cleaner-offset-checkpoint or leader-epoch-checkpoint.

    :raises UsageError: if the file cannot be read, or is neither.
    :raises BadData: if Kafka would not read it.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MOST_BYTES else b""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=f"Name a {CLEANER_OFFSETS} or {LEADER_EPOCHS} file") from error
    text = data.decode("utf-8", errors="replace")
    fields = {len(line.split()) for line in text.splitlines()[2:]}
    named = next((kind for kind in (CLEANER_OFFSETS, LEADER_EPOCHS) if path.name.startswith(kind)), "")
    kind = {3: CLEANER_OFFSETS, 2: LEADER_EPOCHS}.get(fields.pop(), named) if len(fields) == 1 else named
    if size > MOST_BYTES or not kind:
        raise UsageError(f"{path} is neither a {CLEANER_OFFSETS} nor a {LEADER_EPOCHS}", hint="They are in a broker's log directory")
    if kind == LEADER_EPOCHS:
        return KafkaCheckpointFile(str(path), kind, leader_epochs=parse_leader_epoch_checkpoint(text, str(path)))
    found = parse_cleaner_offset_checkpoint(text, str(path))
    return KafkaCheckpointFile(
        str(path), kind, tuple(KafkaCleanerOffset(topic, number, offset) for (topic, number), offset in sorted(found.items()))
    )


def compare_checkpoint_files(before: KafkaCheckpointFile, after: KafkaCheckpointFile) -> tuple[CheckpointEntryChange, ...]:
    """Raises UsageError if the files are of different kinds."""
    if before.kind != after.kind:
        raise UsageError(f"{after.path} is a {after.kind}, {before.path} a {before.kind}", hint="Compare two of one kind")
    old, new = _offsets_by_entry_name(before), _offsets_by_entry_name(after)
    names = [*old, *(name for name in new if name not in old)]
    return tuple(CheckpointEntryChange(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def select_checkpoint_entries(file: KafkaCheckpointFile, names: Sequence[str]) -> KafkaCheckpointFile:
    """Raises UsageError if a name has no entry, or if the file is a leader-epoch-checkpoint."""
    if file.kind == LEADER_EPOCHS:
        raise UsageError(f"{file.path} is a {file.kind} of one partition", hint="Name the file alone")
    chosen = [entry for entry in file.offsets if {f"{entry.topic}-{entry.partition}", entry.topic} & set(names)]
    there = {text for entry in chosen for text in (f"{entry.topic}-{entry.partition}", entry.topic)}
    lacking = [name for name in names if name not in there]
    if lacking:
        raise UsageError(f"{file.path} has no entry of {lacking[0]}", hint=f"`checkpoints show {file.path}` prints all of them")
    return replace(file, offsets=tuple(chosen))


def checkpoint_file_of_partition(state: PartitionState, kind: str) -> KafkaCheckpointFile:
    """A file of CLEANER_OFFSETS or LEADER_EPOCHS."""
    name = state.topic_partition
    if kind == LEADER_EPOCHS:
        return KafkaCheckpointFile(str(name), kind, leader_epochs=state.lineage)
    return KafkaCheckpointFile(str(name), kind, (KafkaCleanerOffset(name.topic, name.partition, state.first_dirty_offset),))


def _offsets_by_entry_name(file: KafkaCheckpointFile) -> dict[str, int]:
    """Names are such as ``leader epoch 3`` or ``orders-0``."""
    if file.kind == LEADER_EPOCHS:
        return {f"leader epoch {entry.epoch}": entry.start_offset for entry in file.leader_epochs}
    return {f"{entry.topic}-{entry.partition}": entry.offset for entry in file.offsets}
