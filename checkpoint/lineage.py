"""Leader-epoch lineage of a log: which epoch wrote which offsets, and where two lineages diverge (KIP-101).

A lineage is the content of Kafka's ``leader-epoch-checkpoint``: entries ascending in epoch and in start offset. Each epoch ends where the
next one begins; the end of the log is not part of the lineage and passed separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from compactor.constants import NO_LEADER_EPOCH, LeaderEpoch, Offset


@dataclass(frozen=True, slots=True, order=True)
class EpochEntry:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    epoch: LeaderEpoch
    start_offset: Offset


Lineage = tuple[EpochEntry, ...]


def merge_segment_lineages(lineages: Sequence[Sequence[EpochEntry]]) -> Lineage:
    """Each epoch of neighbouring segments, with its smallest start offset. The segment that replaces them must have it (coverage, I1)."""
    starts: dict[LeaderEpoch, int] = {}
    for lineage in lineages:
        for entry in lineage:
            starts[entry.epoch] = min(entry.start_offset, starts.get(entry.epoch, entry.start_offset))
    return tuple(EpochEntry(epoch, Offset(start)) for epoch, start in sorted(starts.items()))


def extend_lineage(lineage: Sequence[EpochEntry], newer: Sequence[EpochEntry]) -> Lineage:
    """Append the entries of ``newer`` whose epochs are greater than the last one of ``lineage``."""
    last = lineage[-1].epoch if lineage else -1
    return (*lineage, *(entry for entry in newer if entry.epoch > last))


def restore_truncated_front(known_lineage: Sequence[EpochEntry], given_lineage: Sequence[EpochEntry]) -> Lineage:
    """Restore the entries that retention removed from the start, from the known lineage of the same log.

    When the log start rises, Kafka (LeaderEpochFileCache.truncateFromStart) drops the epochs below it and moves the start of the first
    remaining epoch up to it.
    """
    if not given_lineage:
        return tuple(known_lineage)
    first = given_lineage[0]
    before = tuple(entry for entry in known_lineage if entry.epoch < first.epoch and entry.start_offset < first.start_offset)
    start = min((entry.start_offset for entry in known_lineage if entry.epoch == first.epoch), default=first.start_offset)
    return (*before, EpochEntry(first.epoch, min(start, first.start_offset)), *given_lineage[1:])


def truncate_lineage_at(lineage: Sequence[EpochEntry], end_offset: int) -> Lineage:
    """Drop the epochs that begin at or after ``end_offset``."""
    return tuple(entry for entry in lineage if entry.start_offset < end_offset)


def first_contradicting_offset(
    known_lineage: Sequence[EpochEntry], known_end_offset: int, given_lineage: Sequence[EpochEntry], given_end_offset: int
) -> int | None:
    """First offset at which two lineages contradict each other; None if one log continues the other, or if a lineage is empty. End offsets
    are exclusive.

    Only offsets that both logs contain are compared, because retention removes the front of a log, and an earlier copy of a log is shorter.
    Exceptions: A newer epoch in the given lineage counts even if the given log has no records of it yet, because a leader writes the
    epoch's entry before its first batch. A newer epoch in the known lineage that begins at or after ``known_end_offset`` counts if the
    given log has an older epoch there.
    """
    if not known_lineage or not given_lineage:
        return None
    begin = max(known_lineage[0].start_offset, given_lineage[0].start_offset)
    for offset in sorted({begin, *(e.start_offset for e in (*known_lineage, *given_lineage) if e.start_offset > begin)}):
        if offset >= known_end_offset:
            break
        ours, theirs = leader_epoch_at(known_lineage, offset), leader_epoch_at(given_lineage, offset)
        if theirs > ours or (theirs < ours and offset < given_end_offset):
            return offset
    # A known epoch may begin at the known end or after it: a log that has an older one there has missed what cut it.
    begun = (entry.start_offset for entry in known_lineage if known_end_offset <= entry.start_offset < given_end_offset)
    return next((offset for offset in begun if 0 <= leader_epoch_at(given_lineage, offset) < leader_epoch_at(known_lineage, offset)), None)


def first_divergent_offset(
    old_lineage: Sequence[EpochEntry], old_end_offset: int, new_lineage: Sequence[EpochEntry], new_end_offset: int
) -> int | None:
    """First offset before ``old_end_offset`` that has another leader epoch in the new lineage, or that is at or after the new log's end;
    None if there is no such offset, or if a lineage is empty. End offsets are exclusive.

    Offsets before the later of the two lineages' starts are not compared: retention and DeleteRecords remove the front of a lineage only.
    """
    if not old_lineage or not new_lineage:
        return None
    begin = max(old_lineage[0].start_offset, new_lineage[0].start_offset)
    for offset in sorted({begin, *(e.start_offset for e in (*old_lineage, *new_lineage) if e.start_offset > begin)}):
        if offset >= old_end_offset or offset >= new_end_offset:
            break
        if leader_epoch_at(old_lineage, offset) != leader_epoch_at(new_lineage, offset):
            return offset
    return new_end_offset if begin <= new_end_offset < old_end_offset else None


def leader_epoch_at(lineage: Sequence[EpochEntry], offset: int) -> LeaderEpoch:
    """Epoch of the last entry that begins at or before ``offset``; -1 before the first entry."""
    epoch = NO_LEADER_EPOCH
    for entry in lineage:
        if entry.start_offset > offset:
            break
        epoch = entry.epoch
    return epoch
