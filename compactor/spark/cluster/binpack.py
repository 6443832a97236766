"""Bin packing: distributes work over tasks so that all of them take about the same time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack_item_indexes_into_bins(weights: Sequence[int], bin_count: int) -> list[list[int]]:
    """Distribute items over at most ``bin_count`` bins of about equal total weight. Return the item indexes of each bin, heaviest bin
    first; no bin is empty.

    :param weights: weight of each item.
    """
    heap = [(0, number) for number in range(min(bin_count, len(weights)))]
    members: list[list[int]] = [[] for _ in heap]
    loads = [0] * len(heap)
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        load, number = heapq.heappop(heap)
        members[number].append(place)
        loads[number] = load + weights[place]
        heapq.heappush(heap, (loads[number], number))
    return [members[number] for number in sorted(range(len(members)), key=lambda number: -loads[number])]
