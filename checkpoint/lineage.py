"""Leader-epoch lineage of a log: which epoch wrote which offsets, and where two lineages diverge (KIP-101).

A lineage is the content of Kafka's ``leader-epoch-checkpoint``: entries ascending in epoch and in start offset. Each epoch ends where the
next one begins; the last one ends at the end of the log, which the entries do not contain, so that callers pass it separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, order=True)
class EpochEntry:
    """A line of a leader-epoch-checkpoint: a leader epoch and its first offset."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    epoch: int
    start_offset: int


Lineage = tuple[EpochEntry, ...]


def merge_segment_lineages(lineages: Sequence[Sequence[EpochEntry]]) -> Lineage:
    """Return all leader epochs of neighbouring segments, each with its smallest offset. The segment that replaces them must have these
    epochs (coverage, I1).
    """
    starts: dict[int, int] = {}
    for lineage in lineages:
        for entry in lineage:
            starts[entry.epoch] = min(entry.start_offset, starts.get(entry.epoch, entry.start_offset))
    return tuple(EpochEntry(epoch, start) for epoch, start in sorted(starts.items()))


def extend_lineage(lineage: Sequence[EpochEntry], newer: Sequence[EpochEntry]) -> Lineage:
    """Return a lineage extended by the newer epochs that begin after its last one, as when a segment is added at the end of the log."""
    last = lineage[-1].epoch if lineage else -1
    return (*lineage, *(entry for entry in newer if entry.epoch > last))


def restore_removed_epochs(known: Sequence[EpochEntry], given: Sequence[EpochEntry]) -> Lineage:
    """Return the given entries, preceded by known entries that the broker's retention has removed. Both lineages must be of one log.

    Kafka's LeaderEpochFileCache.truncateFromStart drops the epochs below the log start and moves the first remaining epoch up to it. Here
    that epoch keeps its known start.
    """
    if not given:
        return tuple(known)
    first = given[0]
    before = tuple(entry for entry in known if entry.epoch < first.epoch and entry.start_offset < first.start_offset)
    start = min((entry.start_offset for entry in known if entry.epoch == first.epoch), default=first.start_offset)
    return (*before, EpochEntry(first.epoch, min(start, first.start_offset)), *given[1:])


def truncate_lineage(lineage: Sequence[EpochEntry], end: int) -> Lineage:
    """Return the entries of a lineage whose epochs begin before offset ``end``."""
    return tuple(entry for entry in lineage if entry.start_offset < end)


def first_disowned_offset(known: Sequence[EpochEntry], known_end: int, given: Sequence[EpochEntry], given_end: int) -> int | None:
    """Return the first offset before ``known_end`` that the given lineage assigns to another leader epoch, or None if one log continues the
    other.

    Offsets that only one log holds are not compared: retention removes the front of a log, and a copy that ends earlier is just older. A
    newer epoch in the given lineage counts even if the given log has no records of it yet, because a leader writes its epoch's entry before
    its first batch.

    :param known_end, given_end: end offsets of the two logs, exclusive.
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
    # A known epoch may begin at the known end or after it: a log that has an older one there has missed what cut it.
    begun = (entry.start_offset for entry in known if known_end <= entry.start_offset < given_end)
    return next((offset for offset in begun if 0 <= epoch_at(given, offset) < epoch_at(known, offset)), None)


def first_divergent_offset(old: Sequence[EpochEntry], old_end: int, new: Sequence[EpochEntry], new_end: int) -> int | None:
    """Return the first offset before ``old_end`` that the new lineage assigns to another leader epoch or no longer holds, or None.

    Offsets before the later of the two starts are not compared: retention and DeleteRecords remove the front of a lineage without changing
    the rest.

    :param old_end, new_end: end offsets of the two logs, exclusive.
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
    """Return the leader epoch that wrote an offset, or -1 if the offset is before the first entry."""
    epoch = -1
    for entry in lineage:
        if entry.start_offset > offset:
            break
        epoch = entry.epoch
    return epoch
