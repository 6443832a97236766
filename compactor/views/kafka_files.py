"""Reader of Kafka's ``cleaner-offset-checkpoint`` and ``leader-epoch-checkpoint`` files, which are recognised by their content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoint.files import parse_cleaner_offset_checkpoint, parse_leader_epoch_checkpoint
from checkpoint.lineage import EpochEntry
from compactor.errors import UsageError

CLEANER_OFFSETS = "cleaner-offset-checkpoint"
LEADER_EPOCHS = "leader-epoch-checkpoint"
MOST_BYTES = 64 << 20
"""Larger files are refused: no broker has so many partitions."""


@dataclass(frozen=True)
class KafkaCleanerOffset:
    """One line of a cleaner-offset-checkpoint. offset: first offset that the broker's cleaner has not cleaned."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True)
class KafkaFile:
    """A parsed checkpoint file. kind: the name that Kafka gives such files. The list of the other kind is empty."""

    path: str
    kind: str
    offsets: tuple[KafkaCleanerOffset, ...] = ()
    leader_epochs: tuple[EpochEntry, ...] = ()


@dataclass(frozen=True)
class FileChange:
    """Difference in one entry. what: a partition or a leader epoch. before or after is None if that file has no such entry."""

    what: str
    before: int | None
    after: int | None


def read_kafka_file(path: Path) -> KafkaFile:
    """Parse a checkpoint file of Kafka.

    :raises UsageError: if there is no such file, or it is of neither kind. :raises BadData: if Kafka would not read it.
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
        raise UsageError(f"{path} is neither a {CLEANER_OFFSETS} nor a {LEADER_EPOCHS}", hint="They lie in a broker's log directory")
    if kind == LEADER_EPOCHS:
        return KafkaFile(str(path), kind, leader_epochs=parse_leader_epoch_checkpoint(text, str(path)))
    found = parse_cleaner_offset_checkpoint(text, str(path))
    return KafkaFile(str(path), kind, tuple(KafkaCleanerOffset(topic, number, offset) for (topic, number), offset in sorted(found.items())))


def compare_kafka_files(before: KafkaFile, after: KafkaFile) -> tuple[FileChange, ...]:
    """Return the entries that differ. Raises UsageError if the files are of different kinds."""
    if before.kind != after.kind:
        raise UsageError(f"{after.path} is a {after.kind}, {before.path} a {before.kind}", hint="Compare two of one kind")
    old, new = _entries_by_name(before), _entries_by_name(after)
    names = [*old, *(name for name in new if name not in old)]
    return tuple(FileChange(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def _entries_by_name(file: KafkaFile) -> dict[str, int]:
    """Return the entries of a file by name."""
    if file.kind == LEADER_EPOCHS:
        return {f"leader epoch {entry.epoch}": entry.start_offset for entry in file.leader_epochs}
    return {f"{entry.topic}-{entry.partition}": entry.offset for entry in file.offsets}
