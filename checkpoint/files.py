"""Kafka's own checkpoint files as text: ``cleaner-offset-checkpoint`` and ``leader-epoch-checkpoint`` (CheckpointFile).

    0                       version
    2                       number of entries
    orders 0 1234           topic partition offset           (cleaner-offset-checkpoint)
    5 1200                  epoch startOffset                (leader-epoch-checkpoint)

Kafka writes single spaces and reads any white space; an empty file, or one without the line of the count, has no entries.
What Kafka refuses (and marks the log directory offline for) is BadData here. ``where`` names the file in messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkpoint.lineage import EpochEntry
from compactor.errors import BadData

CURRENT_VERSION = 0

INT32, INT64 = 32, 64
MOST_DIGITS = 19
"""Of a number of 64 bits."""

TopicPartitionName = tuple[str, int]


def parse_cleaner_offset_checkpoint(text: str, where: str = "cleaner-offset-checkpoint") -> dict[TopicPartitionName, int]:
    """(topic, partition) -> first offset that is not clean. Raises BadData."""
    offsets: dict[TopicPartitionName, int] = {}
    for number, (topic, partition, offset) in _entries(text, 3, where):
        offsets[topic, _number(partition, number, where, INT32)] = _number(offset, number, where)
    return offsets


def format_cleaner_offset_checkpoint(offsets: Mapping[TopicPartitionName, int]) -> str:
    """As Kafka writes it, sorted by topic and partition."""
    return _format([f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())])


def parse_leader_epoch_checkpoint(text: str, where: str = "leader-epoch-checkpoint") -> tuple[EpochEntry, ...]:
    """The lineage, ascending. Raises BadData, also where epochs or offsets go back."""
    entries: list[EpochEntry] = []
    for number, (epoch, start) in _entries(text, 2, where):
        entry = EpochEntry(_number(epoch, number, where, INT32), _number(start, number, where))
        if entry.epoch < 0 or entry.start_offset < 0:
            raise _bad(where, f"line {number}: epoch {entry.epoch} at {entry.start_offset} is negative")
        if entries and not (entries[-1].epoch < entry.epoch and entries[-1].start_offset <= entry.start_offset):
            raise _bad(where, f"line {number}: epoch {entry.epoch} at {entry.start_offset} does not follow the line before it")
        entries.append(entry)
    return tuple(entries)


def format_leader_epoch_checkpoint(lineage: Sequence[EpochEntry]) -> str:
    """As Kafka writes it."""
    return _format([f"{entry.epoch} {entry.start_offset}" for entry in lineage])


def _format(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in (CURRENT_VERSION, len(lines), *lines))


def _entries(text: str, fields: int, where: str) -> list[tuple[int, list[str]]]:
    """(line number, fields) of each entry."""
    lines = text.splitlines()
    if not lines:
        return []
    version = _number(lines[0].strip(), 1, where)
    if version != CURRENT_VERSION:
        raise _bad(where, f"line 1: version {version} is unknown, only {CURRENT_VERSION} is")
    if len(lines) < 2:
        return []
    expected = _number(lines[1].strip(), 2, where)
    found = [(number, line.split()) for number, line in enumerate(lines[2:], 3)]
    wrong = next((number for number, parts in found if len(parts) != fields), None)
    if wrong is not None:
        raise _bad(where, f"line {wrong}: {fields} fields were expected: {lines[wrong - 1]!r}")
    if len(found) != expected:
        raise _bad(where, f"line 2 promises {expected} entries, {len(found)} follow")
    return found


def _number(text: str, line: int, where: str, bits: int = INT64) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise _bad(where, f"line {line}: {text!r} is not a number")
    if len(digits) > MOST_DIGITS or not -(1 << bits - 1) <= int(text) < 1 << bits - 1:
        raise _bad(where, f"line {line}: {text[:40]} is out of range for {bits} bits")
    return int(text)


def _bad(where: str, cause: str) -> BadData:
    return BadData(cause, segment=where, hint="Compare with the broker's file; Kafka would not read it either")
