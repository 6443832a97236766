"""Kafka's own checkpoint files: ``cleaner-offset-checkpoint`` and ``leader-epoch-checkpoint`` (CheckpointFile; version 0).

    0                     format version
    2                     number of entries
    orders 0 1234         one entry a line
    orders 1 99
"""

from __future__ import annotations

from checkpoint.lineage import EpochEntry, Lineage
from compactor.errors import BadData

VERSION = "0"


def parse_leader_epoch_checkpoint(text: str, name: str) -> Lineage:
    """``epoch startOffset`` lines; an empty file holds no entries. Raises BadData."""
    entries = tuple(EpochEntry(epoch, offset) for epoch, offset in _numbers(_entries(text, name, 2), name))
    for before, after in zip(entries, entries[1:], strict=False):
        if after.epoch <= before.epoch or after.start_offset < before.start_offset:
            raise _bad(name, f"epoch {after.epoch} from {after.start_offset} comes after epoch {before.epoch} from {before.start_offset}")
    return entries


def format_leader_epoch_checkpoint(entries: Lineage) -> str:
    return _format([f"{entry.epoch} {entry.start_offset}" for entry in entries])


def parse_cleaner_offset_checkpoint(text: str, name: str) -> dict[tuple[str, int], int]:
    """(topic, partition) -> first dirty offset, from ``topic partition offset`` lines. Raises BadData."""
    found: dict[tuple[str, int], int] = {}
    for topic, partition, offset in _entries(text, name, 3):
        ((number, first_dirty),) = _numbers([(partition, offset)], name)
        found[topic, number] = first_dirty
    return found


def _format(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in (VERSION, str(len(lines)), *lines))


def _entries(text: str, name: str, fields: int) -> list[tuple[str, ...]]:
    lines = text.splitlines()
    if not lines or len(lines) == 1 and lines[0].strip() == VERSION:
        return []
    if lines[0].strip() != VERSION:
        raise _bad(name, f"unknown version {lines[0].strip()!r}")
    found = [tuple(line.split()) for line in lines[2:] if line.strip()]
    if lines[1].strip() != str(len(found)):
        raise _bad(name, f"it announces {lines[1].strip()} entries and holds {len(found)}")
    for entry in found:
        if len(entry) != fields:
            raise _bad(name, f"the line {' '.join(entry)!r} has {len(entry)} fields instead of {fields}")
    return found


def _numbers(entries: list[tuple[str, ...]], name: str) -> list[tuple[int, ...]]:
    try:
        numbers = [tuple(int(field) for field in entry) for entry in entries]
    except ValueError as error:
        raise _bad(name, str(error)) from None
    if any(number < 0 for entry in numbers for number in entry):
        raise _bad(name, "a negative number")
    return numbers


def _bad(name: str, cause: str) -> BadData:
    return BadData(cause, segment=name, hint="Kafka refuses this file too; restore or remove it")
