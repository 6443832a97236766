"""Cleaner-offset vector of KIP-1272: for each compactor epoch that has published, the first offset that it left dirty.

An entry ``epoch -> offset`` also *ends* that epoch: its claims beyond the offset are void, in whatever order claims arrive. So a new leader
fences an old one without a clock: its vector states how far the old epoch was valid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from compactor.constants import CompactorEpoch, Offset


@dataclass(frozen=True, slots=True, order=True)
class CleanerOffset:
    """A compactor epoch and the offset up to which it has cleaned, exclusive."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    leader_epoch: CompactorEpoch
    offset: Offset


CleanerOffsetVector = tuple[CleanerOffset, ...]


def cleaner_vector_problem(vector: Sequence[CleanerOffset]) -> str:
    """Reason why a vector is invalid, or empty: epochs ascend strictly, offsets do not descend, nothing is negative."""
    for entry in vector:
        if entry.leader_epoch < 0 or entry.offset < 0:
            return f"entry {entry.leader_epoch}:{entry.offset} is negative"
    for earlier, later in pairwise(vector):
        if earlier.leader_epoch >= later.leader_epoch or earlier.offset > later.offset:
            return f"entry {later.leader_epoch}:{later.offset} does not follow {earlier.leader_epoch}:{earlier.offset}"
    return ""


def first_dirty_offset_in(vector: Sequence[CleanerOffset]) -> int:
    """Offset of the last entry; 0 if the vector is empty."""
    return vector[-1].offset if vector else 0


def advance_cleaner_vector(vector: Sequence[CleanerOffset], compactor_epoch: CompactorEpoch, offset: int) -> CleanerOffsetVector:
    """Add a round that cleaned up to ``offset`` (exclusive). An earlier entry of the same epoch is replaced. Raises ValueError if the epoch
    or the offset is less than in the last entry.
    """
    if vector and (vector[-1].leader_epoch > compactor_epoch or vector[-1].offset > offset):
        raise ValueError(f"{compactor_epoch}:{offset} does not follow {vector[-1].leader_epoch}:{vector[-1].offset}")
    kept = tuple(entry for entry in vector if entry.leader_epoch < compactor_epoch)
    return (*kept, CleanerOffset(compactor_epoch, Offset(offset)))


def has_epoch_cleaned_below(vector: Sequence[CleanerOffset], compactor_epoch: CompactorEpoch, offset: int) -> bool:
    """True if the vector records that an epoch has cleaned all offsets less than ``offset``."""
    return any(entry.leader_epoch == compactor_epoch and offset <= entry.offset for entry in vector)


def drop_unreferenced_epochs(vector: Sequence[CleanerOffset], referenced_epochs: Collection[CompactorEpoch]) -> CleanerOffsetVector:
    """Drop the epochs to which no segment refers. The last entry always stays: it says where the dirty part begins."""
    return tuple(entry for entry in vector[:-1] if entry.leader_epoch in referenced_epochs) + tuple(vector[-1:])


def cap_cleaner_offsets(vector: Sequence[CleanerOffset], max_offset: int) -> CleanerOffsetVector:
    return tuple(CleanerOffset(entry.leader_epoch, Offset(min(entry.offset, max_offset))) for entry in vector)
