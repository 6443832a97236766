"""The cleaner-offset vector of KIP-1272: for each leader epoch that has published, the first offset it left uncleaned.

An entry ``e -> o`` also *ends* epoch e: whatever e claims beyond o is void, in whatever order the claims arrive. That is
how a new leader cuts off an old one without a clock: its own vector, under a higher epoch, says what the old one was
granted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar


@dataclass(frozen=True, slots=True, order=True)
class CleanerOffset:
    """One entry of the cleaner-offset vector (KIP-1272): what this leader epoch has cleaned up to, exclusive."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    leader_epoch: int
    offset: int


Vector = tuple[CleanerOffset, ...]


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """What one publication says: by this leader epoch, with this whole vector (its own entry is the last one)."""

    leader_epoch: int
    vector: Vector


def problem(vector: Sequence[CleanerOffset]) -> str:
    """Why this is not a vector (epochs strictly ascending, offsets not descending, nothing negative); empty where it is one."""
    for entry in vector:
        if entry.leader_epoch < 0 or entry.offset < 0:
            return f"entry {entry.leader_epoch}:{entry.offset} is negative"
    for earlier, later in pairwise(vector):
        if earlier.leader_epoch >= later.leader_epoch or earlier.offset > later.offset:
            return f"entry {later.leader_epoch}:{later.offset} does not follow {earlier.leader_epoch}:{earlier.offset}"
    return ""


def clean_up_to(vector: Sequence[CleanerOffset]) -> int:
    """First offset that nobody has cleaned yet: the last entry's; 0 for an empty vector."""
    return vector[-1].offset if vector else 0


def advance(vector: Sequence[CleanerOffset], leader_epoch: int, offset: int) -> Vector:
    """The vector at the end of a round of ``leader_epoch``. Raises ValueError for a step backwards or from an old epoch."""
    if vector and (vector[-1].leader_epoch > leader_epoch or vector[-1].offset > offset):
        raise ValueError(f"{leader_epoch}:{offset} does not follow {vector[-1].leader_epoch}:{vector[-1].offset}")
    kept = tuple(entry for entry in vector if entry.leader_epoch < leader_epoch)
    return (*kept, CleanerOffset(leader_epoch, offset))


def granted(vector: Sequence[CleanerOffset], leader_epoch: int, offset: int) -> bool:
    """Whether this epoch's claim up to ``offset`` stands. An epoch without an entry was granted nothing."""
    return any(entry.leader_epoch == leader_epoch and offset <= entry.offset for entry in vector)


def resolve(claims: Iterable[Claim]) -> tuple[Vector, tuple[Claim, ...]]:
    """The vector that a set of claims establishes, and the claims that it voids; independent of their order.

    The highest epoch's furthest claim decides; it carries what it granted to each epoch before it (KIP-1272, the table
    under "Fencing off zombie broker").
    """
    everything = sorted(set(claims), key=lambda claim: (claim.leader_epoch, clean_up_to(claim.vector), claim.vector))
    if not everything:
        return (), ()
    vector = everything[-1].vector
    void = tuple(claim for claim in everything if not granted(vector, claim.leader_epoch, clean_up_to(claim.vector)))
    return vector, void


def fold_unnamed(vector: Sequence[CleanerOffset], named: Collection[int]) -> Vector:
    """Drops entries whose epoch no segment names; the last entry stays, as it says where the dirty part begins."""
    return tuple(entry for entry in vector[:-1] if entry.leader_epoch in named) + tuple(vector[-1:])


def clamp(vector: Sequence[CleanerOffset], offset: int) -> Vector:
    """Nothing at or above ``offset`` counts as clean any more: the broker's lineage was truncated or parts there."""
    return tuple(CleanerOffset(entry.leader_epoch, min(entry.offset, offset)) for entry in vector)
