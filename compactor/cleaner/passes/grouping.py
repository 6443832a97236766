"""Grouping of neighbouring segments into one new segment (Kafka: Cleaner.groupSegmentsBySize; docs/kafka-rules.md 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from compactor.constants import ByteCount
from compactor.model.policy import MAX32

BaseOffset = int


class GroupableSegment(Protocol):
    """A segment that can be grouped: its base offset, and its size and the sizes of its indexes in bytes."""

    @property
    def base(self) -> BaseOffset: ...
    @property
    def size(self) -> ByteCount: ...
    @property
    def index_bytes(self) -> ByteCount: ...
    @property
    def timeindex_bytes(self) -> ByteCount: ...


S = TypeVar("S", bound=GroupableSegment)


def _allow_every_segment_to_join(group: list[S], segment: S) -> bool:
    """Return True, so that only size limits decide whether a segment joins a group."""
    return True


def group_segments(
    segments: Sequence[S],
    segment_bytes: int,
    segment_index_bytes: int,
    end_offset: int,
    may_join_group: Callable[[list[S], S], bool] = _allow_every_segment_to_join,
) -> list[list[S]]:
    """Return groups of neighbouring segments, each filled in order until the next segment does not fit. A segment larger than
    ``segment_bytes`` is a group of its own. An empty segment is not subject to the limit of offsets per segment.

    :param segment_bytes, segment_index_bytes: most bytes of a group's segments, and of each kind of their indexes.
    :param end_offset: offset after the last one of the last segment.
    :param may_join_group: returns whether a segment may join a group, in addition to these limits.
    """
    groups: list[list[S]] = []
    for i, segment in enumerate(segments):
        last = (segments[i + 1].base if i + 1 < len(segments) else end_offset) - 1
        if (
            groups
            and _fits_group_limits(groups[-1], segment, last, segment_bytes, segment_index_bytes)
            and may_join_group(groups[-1], segment)
        ):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _fits_group_limits(group: list[S], segment: S, last_offset: int, segment_bytes: int, segment_index_bytes: int) -> bool:
    """Return whether a group with one more segment stays within the limits of size, index size and offset range. ``last_offset``: last
    offset of that segment.
    """
    return (
        sum(s.size for s in group) + segment.size <= segment_bytes
        and sum(s.index_bytes for s in group) + segment.index_bytes <= segment_index_bytes
        and sum(s.timeindex_bytes for s in group) + segment.timeindex_bytes <= segment_index_bytes
        and (segment.size == 0 or last_offset - group[0].base <= MAX32)
    )
