"""Expiry of segments by retention: decides which segments are deleted from the front of a log, by Kafka's rules. Pure functions.

Whole segments expire, in order, from the first one on (``UnifiedLog.deleteRetentionMsBreachedSegments`` and
``deleteRetentionSizeBreachedSegments``): while a segment's largest timestamp is older than ``retention_ms``, then while at least
``retention_bytes`` would remain without it. A segment without timestamps has its modification time instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from compactor.config.settings import CleanerSettings
from compactor.config.units import count_noun
from compactor.constants import NEVER_MS
from compactor.control.log_start import segments_removable_below
from compactor.control.summary import PartitionStateOrSummary, SegmentMetadataOrSummary

S = TypeVar("S", bound=SegmentMetadataOrSummary)


@dataclass(frozen=True)
class ExpiredSegments:
    """Segments that retention removes now. The newest segment is never among them, even if its records expire.

    log_start_offset: first offset that readers may read afterwards. It is unchanged if all removed segments were below it already.
    segments, bytes: number and size of the removed segments.
    reason: retention limits that the segments exceed, as text for people.
    """

    log_start_offset: int
    segments: int
    bytes: int
    reason: str


def is_retention_enabled(cleaner: CleanerSettings) -> bool:
    """Return whether ``retention_ms`` and ``retention_bytes`` apply. As in Kafka, they do not under the cleanup policy "compact" alone."""
    return cleaner.cleanup_policy != "compact"


def find_expired_segments(state: PartitionStateOrSummary[S], cleaner: CleanerSettings, now_ms: int) -> ExpiredSegments | None:
    """Return the segments that retention deletes at this time, or None if none expires.

    Segments that lie below the log start but could not be removed earlier are included, whatever the cleanup policy is.

    :param state: the folded state, or its summary. For a broker-managed tier None is returned, because brokers expire its segments.
    :param now_ms: the earlier of this machine's clock and the store's, so that a clock that is ahead deletes nothing.
    """
    if state.mirrored or not state.has_segments:
        return None
    readable = [segment for segment in state.live if segment.end_offset >= state.log_start]
    aged = _count_segments_past_retention_time(readable, cleaner, now_ms)
    surplus = _count_segments_past_retention_size(readable[aged:], cleaner)
    count = aged + surplus
    offset = readable[count - 1].end_offset + 1 if count else state.log_start
    gone = segments_removable_below(state.live, offset)
    if offset == state.log_start and not gone:
        return None
    why = [f"{count_noun(aged, 'segment is', 'segments are')} older than retention_ms"] if aged else []
    why += [f"{surplus} {'exceeds' if surplus == 1 else 'exceed'} retention_bytes"] if surplus else []
    return ExpiredSegments(
        offset, len(gone), sum(segment.size_bytes for segment in gone), " and ".join(why) or "they lie below the log start"
    )


def next_retention_expiry_time_ms(state: PartitionStateOrSummary[S], cleaner: CleanerSettings) -> int:
    """Return the first time, in milliseconds, at which a segment exceeds ``retention_ms`` by its timestamps; NEVER_MS if that never
    happens.
    """
    if state.mirrored or not is_retention_enabled(cleaner) or cleaner.retention_ms < 0:
        return NEVER_MS
    first = next((segment for segment in state.live if segment.end_offset >= state.log_start), None)
    return NEVER_MS if first is None else min(NEVER_MS, largest_or_modification_timestamp_ms(first) + cleaner.retention_ms + 1)


def largest_or_modification_timestamp_ms(segment: SegmentMetadataOrSummary) -> int:
    """Return the segment's largest timestamp, or its modification time if none of its records has one (Kafka's LogSegment)."""
    return segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.mtime_ms


def _count_segments_past_retention_time(readable_segments: Sequence[S], cleaner: CleanerSettings, now_ms: int) -> int:
    """Return how many of the oldest readable segments have no record younger than ``retention_ms``; 0 if this limit does not apply."""
    if not is_retention_enabled(cleaner) or cleaner.retention_ms < 0:
        return 0
    young = (
        n for n, segment in enumerate(readable_segments) if now_ms - largest_or_modification_timestamp_ms(segment) <= cleaner.retention_ms
    )
    return next(young, len(readable_segments))


def _count_segments_past_retention_size(readable_segments: Sequence[S], cleaner: CleanerSettings) -> int:
    """Return how many of the oldest segments can be removed so that at least ``retention_bytes`` remain; 0 if this limit does not apply."""
    if not is_retention_enabled(cleaner) or cleaner.retention_bytes < 0:
        return 0
    remaining = sum(segment.size_bytes for segment in readable_segments)
    for number, segment in enumerate(readable_segments):
        remaining -= segment.size_bytes
        if remaining < cleaner.retention_bytes:
            return number
    return len(readable_segments)
