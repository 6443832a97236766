"""Choice of the partitions that `retire` inspects, from the tier-wide log alone: most of ten thousand partitions have nothing to retire.

An inspection result stays valid until its time comes or until something is written after it. These results are hints and can be lost, so
every run also inspects some of the other partitions, those that have waited longest first: none is left out for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compactor.constants import HOUR_MS
from compactor.control.state import CatalogState
from compactor.model.ids import TopicPartition

FULL_LOOKS = 64
"""Partitions inspected per hour although no hint asks for it. In a tier with at most this many partitions, all are inspected every time."""


def partitions_to_inspect(
    state: CatalogState, names: Sequence[TopicPartition], now_ms: int, key_of: Callable[[TopicPartition], str] = str
) -> list[TopicPartition]:
    """Return the partitions to inspect, in the given order.

    :param now_ms: the store's clock, as in the recorded inspections.
    :param key_of: returns the name of a partition's log in the tier-wide state.
    """
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
    # Inspections that hints asked for count for that hour, too, but they do not delay partitions that have waited a whole cycle.
    lately = sum(now_ms - HOUR_MS < at_ms <= now_ms for at_ms, _ in idle)
    overdue = sum(at_ms <= now_ms - HOUR_MS * len(names) // FULL_LOOKS for at_ms, _ in idle)
    idle.sort()
    chosen.update(name for _, name in idle[: max(FULL_LOOKS - lately, min(FULL_LOOKS, overdue))])
    return [name for name in names if name in chosen]
