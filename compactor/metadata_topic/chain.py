"""What a broker with a given leader-epoch lineage makes of the cache: what it serves for each offset, finds by time, would retain.

After Kafka's RemoteLogManager (4.x). ``lineage`` is the partition's leader-epoch cache, ascending; ``log_end`` is exclusive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from checkpoint.lineage import EpochEntry, divergence
from compactor.metadata_topic.cache import RemoteLogMetadataCache, epoch_end, epoch_starts
from compactor.metadata_topic.codec import RemoteLogSegmentMetadataRecord
from compactor.model.segment import SegmentState

_FOREVER = 2**63 - 1


class Link(NamedTuple):
    """For offsets [first, last] a broker reads this segment."""

    segment: RemoteLogSegmentMetadataRecord
    first: int
    last: int


def epoch_for_offset(lineage: Sequence[EpochEntry], offset: int) -> int | None:
    """Kafka's LeaderEpochFileCache.epochForOffset."""
    previous = None
    for entry in lineage:
        if entry.start_offset == offset:
            return entry.epoch
        if entry.start_offset > offset:
            return previous
        previous = entry.epoch
    return previous


def segment_for(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], offset: int) -> RemoteLogSegmentMetadataRecord | None:
    """Where a fetch from this offset begins; None is OFFSET_OUT_OF_RANGE for the consumer."""
    epoch = epoch_for_offset(lineage, offset)
    return None if epoch is None else cache.segment(epoch, offset)


def next_segment(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord
) -> RemoteLogSegmentMetadataRecord | None:
    """Kafka's findNextSegmentMetadata."""
    return segment_for(cache, lineage, segment.end_offset + 1)


def chain(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry]) -> list[Link]:
    """The effective view: what segment_for answers for every offset, ascending, one link per stretch. Between links is nothing."""
    links: list[Link] = []
    for epoch, first, last in _stretches(lineage):
        state = cache.epochs.get(epoch)
        if state is None:
            continue
        ends = [*(start - 1 for start in state.starts[1:]), _FOREVER][: len(state.starts)]
        for start, raw_id, end in zip(state.starts, state.ids, ends, strict=True):
            segment = cache.segments.get(raw_id)
            if segment is None:
                continue
            begin, until = max(start, first), min(end, last, epoch_end(segment, epoch))
            if begin > until:
                continue
            if links and links[-1].segment.segment_id == raw_id and links[-1].last == begin - 1:
                begin = links.pop().first
            links.append(Link(segment, begin, until))
    return links


def one_chain(links: Sequence[Link], lineage: Sequence[EpochEntry]) -> list[Link]:
    """The same offsets, each segment once and read from its own start: what readers of whole segments, and compaction, go by.

    Brokers look up each leader epoch for itself, so a segment can be left for another one and come back where the next epoch begins.
    Where a segment continues the one before, but holds what precedes, too, it is taken for that as well: it is of the same log (a
    record's offset and epoch say which one it is), so its records there are the same.
    """
    chained: list[Link] = []
    for link in links:
        begin = link.segment.start_offset
        if chained and chained[-1].last == link.first - 1 and begin <= chained[-1].last and _agrees(link, lineage):
            while chained and chained[-1].first >= begin:
                chained.pop()
            if chained and chained[-1].last >= begin:
                chained[-1] = chained[-1]._replace(last=begin - 1)
            chained.append(link._replace(first=begin))
        else:
            chained.append(link)
    return chained


def _agrees(link: Link, lineage: Sequence[EpochEntry]) -> bool:
    """Whether the segment has the lineage's epochs up to where it is read from."""
    own = [EpochEntry(epoch, start) for epoch, start in epoch_starts(link.segment) if start <= link.first]
    known = [entry for entry in lineage if entry.start_offset <= link.first]
    begin = max(own[0].start_offset, known[0].start_offset) if own and known else link.first
    return divergence(own, link.first + 1, known, link.first + 1) is None and begin == link.segment.start_offset


def told_lineage(cache: RemoteLogMetadataCache) -> tuple[EpochEntry, ...]:
    """The lineage that the tier's readable segments tell, where no broker is asked: later leaders truncate what earlier ones wrote.

    As Kafka's LeaderEpochFileCache does it: an epoch that begins at or above the start of a later one is no part of the log. What came
    before an epoch says a segment that has both: epochs between the two were discarded by an unclean election. Where no segment does,
    it is the next lower epoch. Epochs without a record in the tier are missing; no lookup depends on them.
    """
    begins = {epoch: state.starts[0] for epoch, state in cache.epochs.items() if state.starts}
    before = _predecessors(cache)
    entries: list[EpochEntry] = []
    epoch = max(begins, default=None)
    while epoch is not None:
        entries.append(EpochEntry(epoch, begins[epoch]))
        lower = [each for each in begins if each < epoch and begins[each] < begins[epoch]]
        epoch = max((each for each in before.get(epoch, ()) if each in lower), default=max(lower, default=None))
    return tuple(reversed(entries))


def _predecessors(cache: RemoteLogMetadataCache) -> dict[int, set[int]]:
    """Leader epoch -> those that readable segments have right before it."""
    found: dict[int, set[int]] = {}
    # Whoever has the end of one epoch and the beginning of the next is the last of the one or the first of the other.
    edges = {raw_id for state in cache.epochs.values() for raw_id in (*state.ids[:1], *state.ids[-1:])}
    for segment in (cache.segments[raw_id] for raw_id in edges if raw_id in cache.segments):
        for (lower, _), (epoch, _) in pairwise(without_empty_epochs(epoch_starts(segment))):
            found.setdefault(epoch, set()).add(lower)
    return found


def gaps(links: Sequence[Link]) -> list[tuple[int, int]]:
    """Offsets (first, last) between links: consumers that ask for them are reset."""
    return [(one.last + 1, two.first - 1) for one, two in pairwise(links) if two.first > one.last + 1]


def earliest_offset(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry]) -> int | None:
    """Kafka's findLogStartOffset: where a new leader lets the log begin, whatever the segment's state."""
    for entry in lineage:
        listed = cache.list_epoch(entry.epoch)
        if listed:
            return listed[0].start_offset
    return None


def latest_tiered(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], log_end: int) -> tuple[int, int]:
    """Kafka's findHighestRemoteOffset, what ListOffsets LATEST_TIERED says: last tiered offset and its epoch; (-1, -1) for none."""
    end = log_end
    for entry in reversed(lineage):
        highest = cache.highest_offset(entry.epoch)
        if highest is not None:
            return (end - 1 if end <= highest else highest), entry.epoch
        end = entry.start_offset
    return -1, -1


def segment_by_timestamp(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], log_end: int, timestamp_ms: int, starting_offset: int
) -> RemoteLogSegmentMetadataRecord | None:
    """The one segment that Kafka's findOffsetByTimestamp searches: what is not in it is not found, even if a later one has it."""
    filtered = without_empty_epochs([(entry.epoch, entry.start_offset) for entry in lineage])
    begin = epoch_for_offset(lineage, starting_offset)
    for entry in lineage:
        if begin is None or entry.epoch < begin:
            continue
        for segment in cache.list_epoch(entry.epoch):
            if (
                segment.max_timestamp_ms >= timestamp_ms
                and segment.end_offset >= starting_offset
                and within_lineage(segment, log_end, filtered)
                and segment.state is SegmentState.COPY_SEGMENT_FINISHED
            ):
                return segment
    return None


def within_lineage(segment: RemoteLogSegmentMetadataRecord, log_end: int, lineage: Sequence[tuple[int, int]]) -> bool:
    """Kafka's isRemoteSegmentWithinLeaderEpochs (3.7.1 and newer): what retention, sizes and searches by time count.

    ``lineage``: (epoch, start offset), as ``without_empty_epochs`` gives it; at least one.
    """
    epochs = dict(lineage)
    own = without_empty_epochs(epoch_starts(segment))
    first_known, last_known = lineage[0][0], lineage[-1][0]
    last_own = own[-1][0]
    if not first_known <= last_own <= last_known:
        return False
    counted = [(epoch, start) for epoch, start in own if epoch >= first_known]
    following = dict(pairwise(lineage))
    for at, (epoch, start) in enumerate(counted):
        if epoch not in epochs:
            return False
        if at == 0 and epoch != first_known and start < epochs[epoch]:
            return False
        after = following.get((epoch, epochs[epoch]))
        if epoch == last_own:
            if after is not None and segment.end_offset > after[1] - 1:
                return False
        elif after != counted[at + 1]:
            return False
    return segment.end_offset < log_end


def without_empty_epochs(lineage: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Kafka's buildFilteredLeaderEpochMap: of epochs that begin at the same offset the last one has the records."""
    return [entry for at, entry in enumerate(lineage) if at + 1 == len(lineage) or lineage[at + 1][1] != entry[1]]


def _stretches(lineage: Sequence[EpochEntry]) -> Iterator[tuple[int, int, int]]:
    """The offsets (first, last) for which epoch_for_offset says each epoch, ascending."""
    for at, entry in enumerate(lineage):
        last = lineage[at + 1].start_offset - 1 if at + 1 < len(lineage) else _FOREVER
        if last < entry.start_offset and at + 1 < len(lineage) and (at == 0 or lineage[at - 1].start_offset < entry.start_offset):
            last = entry.start_offset  # an exact match is the first epoch that begins there
        first = entry.start_offset
        if at and lineage[at - 1].start_offset == first:
            first += 1
        if first <= last:
            yield entry.epoch, first, last
