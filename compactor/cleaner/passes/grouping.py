"""Which neighbouring segments become one (Kafka: Cleaner.groupSegmentsBySize; docs/kafka-rules.md 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from compactor.model.policy import MAX32


class Groupable(Protocol):
    """Sizes in bytes; ``base`` is the segment's base offset. The sums are those of the inputs."""

    @property
    def base(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def index_bytes(self) -> int: ...
    @property
    def timeindex_bytes(self) -> int: ...


S = TypeVar("S", bound=Groupable)


def _always(current: list[S], segment: S) -> bool:
    return True


def group(
    segments: Sequence[S],
    segment_bytes: int,
    segment_index_bytes: int,
    first_uncleanable: int,
    joins: Callable[[list[S], S], bool] = _always,
) -> list[list[S]]:
    """Greedy, in order. A segment larger than ``segment_bytes`` is a group of its own; an empty one joins whatever its offsets.

    ``joins``: asked besides whether a segment may join a group.
    """
    groups: list[list[S]] = []
    for i, segment in enumerate(segments):
        last = (segments[i + 1].base if i + 1 < len(segments) else first_uncleanable) - 1
        if groups and _fits(groups[-1], segment, last, segment_bytes, segment_index_bytes) and joins(groups[-1], segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _fits(current: list[S], segment: S, last: int, segment_bytes: int, segment_index_bytes: int) -> bool:
    return (
        sum(s.size for s in current) + segment.size <= segment_bytes
        and sum(s.index_bytes for s in current) + segment.index_bytes <= segment_index_bytes
        and sum(s.timeindex_bytes for s in current) + segment.timeindex_bytes <= segment_index_bytes
        and (segment.size == 0 or last - current[0].base <= MAX32)
    )
