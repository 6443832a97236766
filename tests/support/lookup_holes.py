"""Holes in what the lookups of a folded partition find: an oracle for the fold, independent of the chain that readers get."""

from collections.abc import Iterator
from typing import NamedTuple

from compactor.adapters.brokers.cache import RemoteLogMetadataCache, last_offset_of_epoch
from compactor.constants import LeaderEpoch


class Hole(NamedTuple):
    """Offsets [first, last] of a leader epoch that were tiered and that no lookup finds: consumers get OFFSET_OUT_OF_RANGE."""

    epoch: int
    first: int
    last: int


def lookup_holes(cache: RemoteLogMetadataCache) -> Iterator[Hole]:
    """Yield tiered offsets that lookups do not find because a readable segment ends before the next one begins.

    Offsets before an epoch's first readable segment are not reported, because retention has deleted them.
    """
    for epoch, state in sorted(cache.epochs.items()):
        for at, (start, raw_id) in enumerate(zip(state.starts, state.ids, strict=True)):
            last = at + 1 == len(state.starts)
            needed = state.highest if last else state.starts[at + 1] - 1
            reached = last_offset_of_epoch(cache.segments[raw_id], LeaderEpoch(epoch)) if raw_id in cache.segments else start - 1
            if needed is not None and reached < needed:
                yield Hole(epoch, max(start, reached + 1), needed)
