"""Where `retire` has to look, by the tier-wide log alone: most of ten thousand partitions have nothing to retire, and were found so before.

Whatever it says is a hint for where to look. A look counts until its time comes or something is written after it; hints can be lost, so
that every run also looks fully at some of the others, those first that have waited longest: none is left out for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compactor.control.state import CatalogState
from compactor.model.ids import TopicPartition

FULL_LOOKS = 64
"""Partitions an hour that are looked at although nothing says so. In a tier that has no more all of them are, every time."""
LOOK_REQUESTS = 14
"""What a full look at an idle partition costs, about: as many LIST as GET."""
HOUR_MS = 3_600_000


def to_look_at(
    state: CatalogState, names: Sequence[TopicPartition], now_ms: int, key_of: Callable[[TopicPartition], str] = str
) -> list[TopicPartition]:
    """In their order. ``key_of``: what a partition's log is called there. ``now_ms``: by the store's clock, as the looks are."""
    if len(names) <= FULL_LOOKS:
        return list(names)
    chosen: set[TopicPartition] = set()
    idle: list[tuple[int, TopicPartition]] = []
    for name in names:
        look = state.looks.get(key_of(name))
        if look is None or look.slot < state.reached.get(key_of(name), 0) or look.next_ms <= now_ms:
            chosen.add(name)
        else:
            idle.append((look.at_ms, name))
    # Looks that hints asked for count for that hour, too: there may always be enough. They do not put off what has waited a whole turn.
    lately = sum(now_ms - HOUR_MS < at_ms <= now_ms for at_ms, _ in idle)
    overdue = sum(at_ms <= now_ms - HOUR_MS * len(names) // FULL_LOOKS for at_ms, _ in idle)
    idle.sort()
    chosen.update(name for _, name in idle[: max(FULL_LOOKS - lately, min(FULL_LOOKS, overdue))])
    return [name for name in names if name in chosen]
