"""Cleaner-offset vector of KIP-1272: for each compactor epoch that has published, the first offset that it left dirty.

An entry ``epoch -> offset`` also *ends* that epoch: its claims beyond the offset are void, in whatever order claims arrive. In this way a
new leader fences an old one without a clock: the vector it writes under its higher epoch states how far the old epoch was valid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from compactor.constants import CompactorEpoch, Offset


@dataclass(frozen=True, slots=True, order=True)
class CleanerOffset:
    """Entry of the cleaner-offset vector (KIP-1272): a compactor epoch and the offset up to which it has cleaned, exclusive."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    leader_epoch: CompactorEpoch
    offset: Offset


Vector = tuple[CleanerOffset, ...]


def cleaner_vector_problem(vector: Sequence[CleanerOffset]) -> str:
    """Return why a cleaner-offset vector is invalid, or an empty string. Epochs must ascend strictly, offsets must not descend, and nothing
    may be negative.
    """
    for entry in vector:
        if entry.leader_epoch < 0 or entry.offset < 0:
            return f"entry {entry.leader_epoch}:{entry.offset} is negative"
    for earlier, later in pairwise(vector):
        if earlier.leader_epoch >= later.leader_epoch or earlier.offset > later.offset:
            return f"entry {later.leader_epoch}:{later.offset} does not follow {earlier.leader_epoch}:{earlier.offset}"
    return ""


def first_dirty_offset_of_vector(vector: Sequence[CleanerOffset]) -> int:
    """Return the first dirty offset of a cleaner-offset vector: the offset of its last entry, or 0 if it is empty."""
    return vector[-1].offset if vector else 0


def advance_cleaner_vector(vector: Sequence[CleanerOffset], compactor_epoch: CompactorEpoch, offset: int) -> Vector:
    """Return the cleaner-offset vector after a round of ``compactor_epoch`` that cleaned up to ``offset`` (exclusive). Raises ValueError
    for a lower offset or an older epoch.
    """
    if vector and (vector[-1].leader_epoch > compactor_epoch or vector[-1].offset > offset):
        raise ValueError(f"{compactor_epoch}:{offset} does not follow {vector[-1].leader_epoch}:{vector[-1].offset}")
    kept = tuple(entry for entry in vector if entry.leader_epoch < compactor_epoch)
    return (*kept, CleanerOffset(compactor_epoch, Offset(offset)))


def has_epoch_cleaned_below(vector: Sequence[CleanerOffset], compactor_epoch: CompactorEpoch, offset: int) -> bool:
    """Return whether a compactor epoch has cleaned everything below ``offset``, as the vector records it. An epoch without an entry
    has no valid claim.
    """
    return any(entry.leader_epoch == compactor_epoch and offset <= entry.offset for entry in vector)


def drop_unreferenced_epochs(vector: Sequence[CleanerOffset], referenced_epochs: Collection[CompactorEpoch]) -> Vector:
    """Return the vector without entries whose epoch occurs in no segment. The last entry stays, because it states where the dirty part
    begins.

    :param referenced_epochs: the epochs that occur in segments.
    """
    return tuple(entry for entry in vector[:-1] if entry.leader_epoch in referenced_epochs) + tuple(vector[-1:])


def cap_cleaner_offsets(vector: Sequence[CleanerOffset], max_offset: int) -> Vector:
    """Return the vector with all offsets limited to ``max_offset``, because the broker's log was truncated or diverges there."""
    return tuple(CleanerOffset(entry.leader_epoch, Offset(min(entry.offset, max_offset))) for entry in vector)
