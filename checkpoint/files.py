"""Kafka's own checkpoint files as text: ``cleaner-offset-checkpoint`` and ``leader-epoch-checkpoint`` (CheckpointFile).

    0                       version
    2                       number of entries
    orders 0 1234           topic partition offset           (cleaner-offset-checkpoint)
    5 1200                  epoch startOffset                (leader-epoch-checkpoint)

Kafka writes single spaces and reads any white space; an empty file, or one without the line of the count, has no entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkpoint.lineage import EpochEntry

CURRENT_VERSION = 0

TopicPartitionName = tuple[str, int]


class CheckpointError(ValueError):
    """The text is not such a file. Kafka would mark the log directory offline."""


def parse_cleaner_offset_checkpoint(text: str) -> dict[TopicPartitionName, int]:
    """(topic, partition) -> first offset that is not clean. Raises CheckpointError."""
    offsets: dict[TopicPartitionName, int] = {}
    for number, (topic, partition, offset) in _entries(text, 3):
        offsets[topic, _number(partition, number)] = _number(offset, number)
    return offsets


def format_cleaner_offset_checkpoint(offsets: Mapping[TopicPartitionName, int]) -> str:
    """As Kafka writes it, sorted by topic and partition."""
    return _format([f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())])


def parse_leader_epoch_checkpoint(text: str) -> tuple[EpochEntry, ...]:
    """The lineage, ascending. Raises CheckpointError, also where epochs or offsets go back."""
    entries: list[EpochEntry] = []
    for number, (epoch, start) in _entries(text, 2):
        entry = EpochEntry(_number(epoch, number), _number(start, number))
        if entries and not (entries[-1].epoch < entry.epoch and entries[-1].start_offset <= entry.start_offset):
            raise CheckpointError(f"line {number}: epoch {entry.epoch} at {entry.start_offset} does not follow the line before it")
        entries.append(entry)
    return tuple(entries)


def format_leader_epoch_checkpoint(lineage: Sequence[EpochEntry]) -> str:
    """As Kafka writes it."""
    return _format([f"{entry.epoch} {entry.start_offset}" for entry in lineage])


def _format(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in (CURRENT_VERSION, len(lines), *lines))


def _entries(text: str, fields: int) -> list[tuple[int, list[str]]]:
    """(line number, fields) of each entry."""
    lines = text.splitlines()
    if not lines:
        return []
    version = _number(lines[0].strip(), 1)
    if version != CURRENT_VERSION:
        raise CheckpointError(f"line 1: version {version} is unknown, only {CURRENT_VERSION} is")
    if len(lines) < 2:
        return []
    expected = _number(lines[1].strip(), 2)
    found = [(number, line.split()) for number, line in enumerate(lines[2:], 3)]
    wrong = next((number for number, parts in found if len(parts) != fields), None)
    if wrong is not None:
        raise CheckpointError(f"line {wrong}: {fields} fields were expected: {lines[wrong - 1]!r}")
    if len(found) != expected:
        raise CheckpointError(f"line 2 promises {expected} entries, {len(found)} follow")
    return found


def _number(text: str, line: int) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise CheckpointError(f"line {line}: {text!r} is not a number")
    return int(text)
