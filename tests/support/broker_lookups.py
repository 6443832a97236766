"""What Kafka's RemoteLogMetadataCache and RemoteLogManager answer, asked of our fold: tests hold it against Kafka's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from checkpoint.lineage import EpochEntry
from compactor.adapters.brokers.cache import RemoteLogMetadataCache
from compactor.adapters.brokers.chain import epoch_for_offset, without_empty_epochs
from compactor.errors import NotFound
from compactor.model.remote_log import RemoteLogSegmentMetadataRecord, epoch_start_offsets
from compactor.model.segment import SegmentState


def segment_for(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], offset: int) -> RemoteLogSegmentMetadataRecord | None:
    """Return the segment in which a fetch from this offset begins; None is OFFSET_OUT_OF_RANGE for the consumer."""
    epoch = epoch_for_offset(lineage, offset)
    return None if epoch is None else cache.find_segment(epoch, offset)


def list_epoch(cache: RemoteLogMetadataCache, epoch: int) -> list[RemoteLogSegmentMetadataRecord]:
    """Kafka's listRemoteLogSegments(epoch): by start offset, readable ones first. Raises NotFound where Kafka's throws."""
    state = cache.epochs.get(epoch)
    ids = (*state.ids, *state.unreferenced) if state else ()
    if any(raw_id not in cache.segments for raw_id in ids):
        raise NotFound(f"{cache.partition}: leader epoch {epoch} names a segment without metadata")
    return sorted((cache.segments[raw_id] for raw_id in ids), key=lambda segment: segment.start_offset)


def highest_offset(cache: RemoteLogMetadataCache, epoch: int) -> int | None:
    """Kafka's highestOffsetForEpoch."""
    state = cache.epochs.get(epoch)
    return state.highest if state else None


def earliest_offset(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry]) -> int | None:
    """Kafka's findLogStartOffset: where a new leader lets the log begin, whatever the segment's state."""
    for entry in lineage:
        listed = list_epoch(cache, entry.epoch)
        if listed:
            return listed[0].start_offset
    return None


def latest_tiered(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], log_end: int) -> tuple[int, int]:
    """Kafka's findHighestRemoteOffset, what ListOffsets LATEST_TIERED says: last tiered offset and its epoch; (-1, -1) for none."""
    end = log_end
    for entry in reversed(lineage):
        highest = highest_offset(cache, entry.epoch)
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
        for segment in list_epoch(cache, entry.epoch):
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
    own = without_empty_epochs(epoch_start_offsets(segment))
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
