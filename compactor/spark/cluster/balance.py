"""Which work goes together so that all tasks end at about the same time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(weights: Sequence[int], bins: int) -> list[list[int]]:
    """Which of the given go together so that the bins weigh about the same; heaviest bin first, no empty ones."""
    heap = [(0, number) for number in range(min(bins, len(weights)))]
    members: list[list[int]] = [[] for _ in heap]
    loads = [0] * len(heap)
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        load, number = heapq.heappop(heap)
        members[number].append(place)
        loads[number] = load + weights[place]
        heapq.heappush(heap, (loads[number], number))
    return [members[number] for number in sorted(range(len(members)), key=lambda number: -loads[number])]
