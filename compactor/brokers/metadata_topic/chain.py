"""Lookups of a broker in the segment metadata: which segment it reads for each offset, given a leader epoch lineage.

Follows Kafka's RemoteLogManager (4.x). ``lineage`` is the partition's leader epoch cache, ascending.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from checkpoint.lineage import EpochEntry, first_divergent_offset
from compactor.brokers.metadata_topic.cache import EpochAndStartOffset, RemoteLogMetadataCache, epoch_start_offsets, last_offset_of_epoch
from compactor.brokers.metadata_topic.codec import RemoteLogSegmentMetadataRecord
from compactor.constants import MAX_OFFSET, LeaderEpoch, Offset
from compactor.errors import BadData
from compactor.model.ids import TopicPartition

FirstAndLastOffset = tuple[int, int]
EpochWithFirstAndLastOffset = tuple[int, int, int]


class SegmentReadRange(NamedTuple):
    """Segment, and the offsets that a broker reads from it: ``first`` to ``last``, both inclusive."""

    segment: RemoteLogSegmentMetadataRecord
    first: int
    last: int


@dataclass(frozen=True)
class BrokerView:
    """Segments that readers of one partition find according to the brokers' metadata.

    links: the segments with the offsets that are read from each, ascending.
    lineage: the leader epochs with which the segments were looked up.
    metadata_offset: offset in the metadata topic of the last record that was applied; -1 if there is none.
    """

    links: Sequence[SegmentReadRange]
    lineage: tuple[EpochEntry, ...]
    metadata_offset: int = -1


def broker_view(cache: RemoteLogMetadataCache, partition: TopicPartition) -> BrokerView:
    """Return the segments that readers of a partition find, looked up with the lineage that is derived from the tiered segments.

    Raises BadData if a segment has a negative size.
    """
    lineage = lineage_from_segments(cache)
    links = tuple(read_ranges_with_each_segment_once(segment_read_ranges(cache, lineage), lineage))
    if any(link.segment.size_bytes < 0 for link in links):
        raise BadData(f"{partition}: metadata has a segment of a negative size")
    return BrokerView(links, lineage, cache.applied)


def epoch_for_offset(lineage: Sequence[EpochEntry], offset: int) -> LeaderEpoch | None:
    """Return the leader epoch of an offset, or None if the lineage begins later (Kafka's LeaderEpochFileCache.epochForOffset)."""
    previous = None
    for entry in lineage:
        if entry.start_offset == offset:
            return entry.epoch
        if entry.start_offset > offset:
            return previous
        previous = entry.epoch
    return previous


def segment_read_ranges(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry]) -> list[SegmentReadRange]:
    """Return the segment that a broker reads for each range of offsets, ascending. Offsets between two ranges have no segment."""
    links: list[SegmentReadRange] = []
    for epoch, first, last in _epoch_offset_ranges(lineage):
        state = cache.epochs.get(epoch)
        if state is None:
            continue
        ends = [*(start - 1 for start in state.starts[1:]), MAX_OFFSET][: len(state.starts)]
        for start, raw_id, end in zip(state.starts, state.ids, ends, strict=True):
            segment = cache.segments.get(raw_id)
            if segment is None:
                continue
            begin, until = max(start, first), min(end, last, last_offset_of_epoch(segment, LeaderEpoch(epoch)))
            if begin > until:
                continue
            if links and links[-1].segment.segment_id == raw_id and links[-1].last == begin - 1:
                begin = links.pop().first
            links.append(SegmentReadRange(segment, begin, until))
    return links


def read_ranges_with_each_segment_once(ranges: Sequence[SegmentReadRange], lineage: Sequence[EpochEntry]) -> list[SegmentReadRange]:
    """Return read ranges in which each segment occurs once and is read from its own start, for compaction and readers of whole segments.

    Brokers look up each leader epoch separately. Therefore they may read a segment, then another one, and then the first one again in the
    next epoch. A segment that continues the previous range, and also holds that range's offsets in the same log, replaces the previous
    range, because both contain the same records.
    """
    chained: list[SegmentReadRange] = []
    for link in ranges:
        begin = link.segment.start_offset
        if chained and chained[-1].last == link.first - 1 and begin <= chained[-1].last and _has_same_epochs_as_lineage(link, lineage):
            while chained and chained[-1].first >= begin:
                chained.pop()
            if chained and chained[-1].last >= begin:
                chained[-1] = chained[-1]._replace(last=begin - 1)
            chained.append(link._replace(first=begin))
        else:
            chained.append(link)
    return chained


def _has_same_epochs_as_lineage(read_range: SegmentReadRange, lineage: Sequence[EpochEntry]) -> bool:
    """Return whether the segment has the same leader epochs as the lineage from its start up to the offset from which it is read."""
    own = [
        EpochEntry(LeaderEpoch(epoch), Offset(start))
        for epoch, start in epoch_start_offsets(read_range.segment)
        if start <= read_range.first
    ]
    known = [entry for entry in lineage if entry.start_offset <= read_range.first]
    begin = max(own[0].start_offset, known[0].start_offset) if own and known else read_range.first
    return (
        first_divergent_offset(own, read_range.first + 1, known, read_range.first + 1) is None and begin == read_range.segment.start_offset
    )


def lineage_from_segments(cache: RemoteLogMetadataCache) -> tuple[EpochEntry, ...]:
    """Derive the leader epoch lineage from the tier's readable segments, without asking a broker.

    As in Kafka's LeaderEpochFileCache, an epoch that begins at or above the start of a later one is not part of the log. The predecessor of
    an epoch is taken from a segment that holds both; without such a segment, it is the next lower epoch. Epochs without tiered records are
    missing.
    """
    begins = {epoch: state.starts[0] for epoch, state in cache.epochs.items() if state.starts}
    before = _preceding_epochs(cache)
    entries: list[EpochEntry] = []
    epoch = max(begins, default=None)
    while epoch is not None:
        entries.append(EpochEntry(LeaderEpoch(epoch), Offset(begins[epoch])))
        lower = [each for each in begins if each < epoch and begins[each] < begins[epoch]]
        epoch = max((each for each in before.get(epoch, ()) if each in lower), default=max(lower, default=None))
    return tuple(reversed(entries))


def _preceding_epochs(cache: RemoteLogMetadataCache) -> dict[int, set[int]]:
    """Return, for each leader epoch, the epochs that directly precede it in some readable segment."""
    found: dict[int, set[int]] = {}
    # Whoever has the end of one epoch and the beginning of the next is the last of the one or the first of the other.
    edges = {raw_id for state in cache.epochs.values() for raw_id in (*state.ids[:1], *state.ids[-1:])}
    for segment in (cache.segments[raw_id] for raw_id in edges if raw_id in cache.segments):
        for (lower, _), (epoch, _) in pairwise(without_empty_epochs(epoch_start_offsets(segment))):
            found.setdefault(epoch, set()).add(lower)
    return found


def offset_gaps(ranges: Sequence[SegmentReadRange]) -> list[FirstAndLastOffset]:
    """Return the offset ranges (first, last), both inclusive, that lie between read ranges and have no segment.

    Consumers that request them are reset.
    """
    return [(one.last + 1, two.first - 1) for one, two in pairwise(ranges) if two.first > one.last + 1]


def without_empty_epochs(lineage: Sequence[EpochAndStartOffset]) -> list[EpochAndStartOffset]:
    """Return the lineage without leader epochs that have no records (Kafka's buildFilteredLeaderEpochMap).

    Of epochs that begin at the same offset, only the last one stays.
    """
    return [entry for at, entry in enumerate(lineage) if at + 1 == len(lineage) or lineage[at + 1][1] != entry[1]]


def _epoch_offset_ranges(lineage: Sequence[EpochEntry]) -> Iterator[EpochWithFirstAndLastOffset]:
    """Yield each leader epoch of the lineage with its first and last offset (inclusive), ascending."""
    for at, entry in enumerate(lineage):
        last = lineage[at + 1].start_offset - 1 if at + 1 < len(lineage) else MAX_OFFSET
        if last < entry.start_offset and at + 1 < len(lineage) and (at == 0 or lineage[at - 1].start_offset < entry.start_offset):
            last = entry.start_offset  # an exact match is the first epoch that begins there
        first = entry.start_offset
        if at and lineage[at - 1].start_offset == first:
            first = Offset(first + 1)
        if first <= last:
            yield entry.epoch, first, last
