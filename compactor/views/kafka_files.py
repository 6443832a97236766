"""Kafka's own ``cleaner-offset-checkpoint`` and ``leader-epoch-checkpoint`` files, told apart by what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoint.files import parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.errors import UsageError

CLEANER_OFFSETS = "cleaner-offset-checkpoint"
LEADER_EPOCHS = "leader-epoch-checkpoint"
MOST_BYTES = 64 << 20
"""No broker has so many partitions; whatever is larger is something else."""


@dataclass(frozen=True)
class KafkaOffset:
    """One line of a cleaner-offset-checkpoint: the first offset that the broker's cleaner has not cleaned."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True)
class KafkaFile:
    """``kind`` is the name that Kafka gives such a file; the list that belongs to the other kind is empty."""

    path: str
    kind: str
    offsets: tuple[KafkaOffset, ...] = ()
    leader_epochs: tuple[EpochEntry, ...] = ()


@dataclass(frozen=True)
class FileChange:
    """``what`` is a partition or a leader epoch; None: it is not in that file."""

    what: str
    before: int | None
    after: int | None


def read_kafka_file(path: Path) -> KafkaFile:
    """Raises UsageError where there is no such file or it is of neither kind, BadData where Kafka would not read it."""
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
        raise UsageError(f"{path} is neither a {CLEANER_OFFSETS} nor a {LEADER_EPOCHS}", hint="They lie in a broker's log directory")
    if kind == LEADER_EPOCHS:
        return KafkaFile(str(path), kind, leader_epochs=parse_leader_epoch_checkpoint(text, str(path)))
    found = parse_cleaner_offset_checkpoint(text, str(path))
    return KafkaFile(str(path), kind, tuple(KafkaOffset(topic, number, offset) for (topic, number), offset in sorted(found.items())))


def compare(before: KafkaFile, after: KafkaFile) -> tuple[FileChange, ...]:
    """Raises UsageError for files of two kinds."""
    if before.kind != after.kind:
        raise UsageError(f"{after.path} is a {after.kind}, {before.path} a {before.kind}", hint="Compare two of one kind")
    old, new = _values(before), _values(after)
    names = [*old, *(name for name in new if name not in old)]
    return tuple(FileChange(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def _values(file: KafkaFile) -> dict[str, int]:
    if file.kind == LEADER_EPOCHS:
        return {f"leader epoch {entry.epoch}": entry.start_offset for entry in file.leader_epochs}
    return {f"{entry.topic}-{entry.partition}": entry.offset for entry in file.offsets}
