"""The broker's leader-epoch lineage: which epoch wrote which offsets, and where two lineages part (KIP-101).

A lineage is what Kafka's ``leader-epoch-checkpoint`` holds: entries ascending in epoch and in start offset. Each epoch
ends where the next begins; the last one ends at the log's end, which the entries do not say and the caller must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, order=True)
class EpochEntry:
    """One line of a leader-epoch-checkpoint: the epoch begins at this offset."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    epoch: int
    start_offset: int


Lineage = tuple[EpochEntry, ...]


def union(lineages: Sequence[Sequence[EpochEntry]]) -> Lineage:
    """All epochs of neighbouring segments, each with its smallest offset: what a replacement must carry (I1)."""
    starts: dict[int, int] = {}
    for lineage in lineages:
        for entry in lineage:
            starts[entry.epoch] = min(entry.start_offset, starts.get(entry.epoch, entry.start_offset))
    return tuple(EpochEntry(epoch, start) for epoch, start in sorted(starts.items()))


def extend(lineage: Sequence[EpochEntry], newer: Sequence[EpochEntry]) -> Lineage:
    """The lineage and the epochs that begin after its last one: what a segment at the log's end adds to it."""
    last = lineage[-1].epoch if lineage else -1
    return (*lineage, *(entry for entry in newer if entry.epoch > last))


def merge(known: Sequence[EpochEntry], given: Sequence[EpochEntry]) -> Lineage:
    """What is known and what a broker says now, of one log: the given entries, and before them those that its retention has cut off.

    Kafka's LeaderEpochFileCache.truncateFromStart drops the epochs below the log's start and moves the first one left up to it; here
    that epoch keeps the start that was known.
    """
    if not given:
        return tuple(known)
    first = given[0]
    before = tuple(entry for entry in known if entry.epoch < first.epoch and entry.start_offset < first.start_offset)
    start = min((entry.start_offset for entry in known if entry.epoch == first.epoch), default=first.start_offset)
    return (*before, EpochEntry(first.epoch, min(start, first.start_offset)), *given[1:])


def cut(lineage: Sequence[EpochEntry], end: int) -> Lineage:
    """The entries of the epochs that begin below ``end``."""
    return tuple(entry for entry in lineage if entry.start_offset < end)


def disowned(known: Sequence[EpochEntry], known_end: int, given: Sequence[EpochEntry], given_end: int) -> int | None:
    """First offset below ``known_end`` that the given lineage has of another epoch; None where one log continues the other.

    Both ends are exclusive. What only one of them holds is not compared: retention cuts a log at its front, and a copy that ends
    earlier is just older. But an epoch that the given lineage has begun before its own end is over disowns what lies above
    (a leader writes its entry before its first batch).
    """
    if not known or not given:
        return None
    begin = max(known[0].start_offset, given[0].start_offset)
    for offset in sorted({begin, *(e.start_offset for e in (*known, *given) if e.start_offset > begin)}):
        if offset >= known_end:
            break
        ours, theirs = epoch_at(known, offset), epoch_at(given, offset)
        if theirs > ours or (theirs < ours and offset < given_end):
            return offset
    # A known epoch may begin where the log ends: who has an older one there has missed what cut the log.
    begun = any(entry.start_offset == known_end for entry in known)
    return known_end if begun and given_end > known_end and 0 <= epoch_at(given, known_end) < epoch_at(known, known_end) else None


def divergence(old: Sequence[EpochEntry], old_end: int, new: Sequence[EpochEntry], new_end: int) -> int | None:
    """First offset below ``old_end`` that the new lineage gives to another epoch or no longer holds; None where there is none.

    Both ends are exclusive. Offsets before the later of the two starts are not compared: retention and DeleteRecords
    cut a lineage at its front without changing what follows.
    """
    if not old or not new:
        return None
    begin = max(old[0].start_offset, new[0].start_offset)
    for offset in sorted({begin, *(e.start_offset for e in (*old, *new) if e.start_offset > begin)}):
        if offset >= old_end or offset >= new_end:
            break
        if epoch_at(old, offset) != epoch_at(new, offset):
            return offset
    return new_end if begin <= new_end < old_end else None


def epoch_at(lineage: Sequence[EpochEntry], offset: int) -> int:
    """The epoch that wrote this offset; -1 before the first entry."""
    epoch = -1
    for entry in lineage:
        if entry.start_offset > offset:
            break
        epoch = entry.epoch
    return epoch
