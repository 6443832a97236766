"""Parser and formatter of Kafka's checkpoint files ``cleaner-offset-checkpoint`` and ``leader-epoch-checkpoint`` (Kafka: CheckpointFile).

    0                          version
    2                          number of entries
    orders 0 1234              topic partition offset   (cleaner-offset-checkpoint)
    5 1200                     epoch startOffset        (leader-epoch-checkpoint)

Kafka writes single spaces and reads any white space. An empty file, or one without the line with the count, has no entries. A file for
which Kafka takes the log directory offline raises BadData. ``source_name`` names the file in messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkpoint.lineage import EpochEntry
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import BadData

CURRENT_VERSION = 0

INT32, INT64 = 32, 64
MOST_DIGITS = 19
"""Of a number of 64 bits."""

TopicPartitionName = tuple[str, int]


def parse_cleaner_offset_checkpoint(text: str, source_name: str = "cleaner-offset-checkpoint") -> dict[TopicPartitionName, int]:
    """Raises BadData if the text is not valid."""
    offsets: dict[TopicPartitionName, int] = {}
    for number, (topic, partition, offset) in _parse_checkpoint_entries(text, 3, source_name):
        offsets[topic, _parse_signed_integer(partition, number, source_name, INT32)] = _parse_signed_integer(offset, number, source_name)
    return offsets


def parse_leader_epoch_checkpoint(text: str, source_name: str = "leader-epoch-checkpoint") -> tuple[EpochEntry, ...]:
    """Raises BadData if the text is not valid, which includes epochs that do not ascend and offsets that descend."""
    entries: list[EpochEntry] = []
    for number, (epoch, start) in _parse_checkpoint_entries(text, 2, source_name):
        entry = EpochEntry(
            LeaderEpoch(_parse_signed_integer(epoch, number, source_name, INT32)), Offset(_parse_signed_integer(start, number, source_name))
        )
        if entry.epoch < 0 or entry.start_offset < 0:
            raise _invalid_checkpoint_file_error(source_name, f"line {number}: epoch {entry.epoch} at {entry.start_offset} is negative")
        if entries and not (entries[-1].epoch < entry.epoch and entries[-1].start_offset <= entry.start_offset):
            raise _invalid_checkpoint_file_error(
                source_name, f"line {number}: epoch {entry.epoch} at {entry.start_offset} does not follow the line before it"
            )
        entries.append(entry)
    return tuple(entries)


def format_leader_epoch_checkpoint(lineage: Sequence[EpochEntry]) -> str:
    return _format_checkpoint([f"{entry.epoch} {entry.start_offset}" for entry in lineage])


def format_offsets_as_checkpoint(offsets: Mapping[TopicPartitionName, int]) -> str:
    """Text of an offset checkpoint, such as ``log-start-offset-checkpoint``, as Kafka writes it."""
    return _format_checkpoint([f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())])


def _format_checkpoint(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in (CURRENT_VERSION, len(lines), *lines))


def _parse_checkpoint_entries(text: str, fields_per_entry: int, source_name: str) -> list[tuple[int, list[str]]]:
    """The (line number, fields) of each entry."""
    lines = text.splitlines()
    if not lines:
        return []
    version = _parse_signed_integer(lines[0].strip(), 1, source_name)
    if version != CURRENT_VERSION:
        raise _invalid_checkpoint_file_error(source_name, f"line 1: version {version} is unknown, only {CURRENT_VERSION} is")
    if len(lines) < 2:
        return []
    expected = _parse_signed_integer(lines[1].strip(), 2, source_name)
    found = [(number, line.split()) for number, line in enumerate(lines[2:], 3)]
    wrong = next((number for number, parts in found if len(parts) != fields_per_entry), None)
    if wrong is not None:
        raise _invalid_checkpoint_file_error(source_name, f"line {wrong}: {fields_per_entry} fields were expected: {lines[wrong - 1]!r}")
    if len(found) != expected:
        raise _invalid_checkpoint_file_error(source_name, f"line 2 promises {expected} entries, {len(found)} follow")
    return found


def _parse_signed_integer(text: str, line_number: int, source_name: str, bits: int = INT64) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise _invalid_checkpoint_file_error(source_name, f"line {line_number}: {text!r} is not a number")
    if len(digits) > MOST_DIGITS or not -(1 << bits - 1) <= int(text) < 1 << bits - 1:
        raise _invalid_checkpoint_file_error(source_name, f"line {line_number}: {text[:40]} is out of range for {bits} bits")
    return int(text)


def _invalid_checkpoint_file_error(source_name: str, cause: str) -> BadData:
    return BadData(cause, segment=source_name, hint="Compare with the broker's file; Kafka would not read it either")
