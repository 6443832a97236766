"""Lookups of a broker in the segment metadata (Kafka's RemoteLogManager, 4.x), and the rules for records that change them
(docs/broker-protocol.md).

``lineage`` is the partition's leader epoch cache, ascending. Brokers cannot reject a record, so each is checked against the fold of all
earlier ones before it is appended. A refusal begins with the name of its rule.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from typing_extensions import override

from checkpoint.lineage import EpochEntry, first_divergent_offset, merge_segment_lineages
from compactor.adapters.brokers.admin import KafkaAdmin, KafkaSetting
from compactor.adapters.brokers.cache import LeaderEpochSegments, RemoteLogMetadataCache, last_offset_of_epoch
from compactor.adapters.brokers.codec import decode_record, encode_record
from compactor.adapters.brokers.topic import uuid_to_bytes
from compactor.adapters.kafka_client import KafkaConnection, LazyKafkaAdminClient, load_confluent_kafka, translate_kafka_error
from compactor.constants import MAX_OFFSET, LeaderEpoch, Offset, TopicId
from compactor.errors import BadData, Refused, StoreError
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.remote_log import (
    BrokerView,
    ClusterTopicIds,
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    RemotePartitionDeleteMetadataRecord,
    SegmentReadRange,
    epoch_start_offsets,
    uuid_text,
)
from compactor.model.segment import TRANSITIONS, SegmentState

_S = SegmentState
READABLE_STATES = (_S.COPY_SEGMENT_FINISHED,)
UNDELETED_STATES = (_S.COPY_SEGMENT_STARTED, _S.COPY_SEGMENT_FINISHED)


def record_refusal(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], record: MetadataRecord) -> str:
    """Return why this record must not follow the records in ``cache``, or an empty string."""
    return (
        _content_rule_violation(cache, record)
        or _transition_rule_violation(cache, record)
        or _lookup_rule_violation(cache, lineage, record)
    )


def _content_rule_violation(cache: RemoteLogMetadataCache, record: MetadataRecord) -> str:
    # Rules R1 (brokers would stop at the record), R4 (leader epochs do not match the offsets) and R6 (empty segment).
    if isinstance(record, RemotePartitionDeleteMetadataRecord):
        return "R1: only brokers delete a partition's tier"
    if record.partition.topic_id != cache.partition.topic_id or record.partition.partition != cache.partition.partition:
        return f"R1: the record is of {record.partition}, not of {cache.partition}"
    if record.broker_id != COMPACTOR_BROKER_ID:
        return f"R1: the record says that broker {record.broker_id} wrote it"
    try:
        if decode_record(encode_record(record)) != record:
            return "R1: the record differs from its decoded bytes"
    except (BadData, ValueError) as error:
        return f"R1: {error}"
    if isinstance(record, RemoteLogSegmentMetadataRecord):
        starts = [entry.start_offset for entry in record.leader_epochs]
        if record.size_bytes <= 0:
            return f"R6: segment {record.id} has {record.size_bytes} bytes"
        if starts != sorted(starts) or starts[0] < record.start_offset or starts[-1] > record.end_offset:
            return f"R4: the leader epochs of segment {record.id} do not match its offsets"
    return ""


def _transition_rule_violation(cache: RemoteLogMetadataCache, record: MetadataRecord) -> str:
    # Rules R1 (Kafka's state machine forbids it, or custom metadata would be lost) and R3 (not introduced, or deleted already).
    if isinstance(record, RemotePartitionDeleteMetadataRecord):
        return ""
    existing = cache.segments.get(record.segment_id)
    if isinstance(record, RemoteLogSegmentMetadataRecord):
        if existing is not None or record.segment_id in cache.finished:
            return f"R1: segment {record.id} was introduced before"
        return ""
    if existing is None:
        return f"R3: segment {record.id} was not introduced, or is finished"
    again = record.state is existing.state is _S.COPY_SEGMENT_FINISHED and not is_found_by_lookups(cache, existing)
    if record.state not in TRANSITIONS[existing.state] and not again:
        return f"R1: segment {record.id} cannot go from {existing.state} to {record.state}"
    if record.custom_metadata != existing.custom_metadata:
        return f"R1: custom metadata of segment {record.id} would be lost"
    return ""


def _lookup_rule_violation(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], record: MetadataRecord) -> str:
    # Rules R3b, R4 and R8: a readable offset would become unreadable, even briefly.
    after = CopyOnWriteMetadataCache(cache)
    message = after.apply_record(record)
    if message:
        return f"R1: {message}"
    lost = _first_lost_offset(segment_read_ranges(cache, lineage), segment_read_ranges(after.cache, lineage))
    if lost is not None:
        rule = "R3b" if isinstance(record, RemoteLogSegmentMetadataUpdateRecord) and record.state is _S.DELETE_SEGMENT_STARTED else "R4"
        return f"{rule}: offset {lost} would have no segment"
    if isinstance(record, RemoteLogSegmentMetadataUpdateRecord) and record.state is _S.COPY_SEGMENT_FINISHED:
        segment = cache.segments[record.segment_id]
        for epoch in epochs_with_lookup_gap(cache, segment):
            if any(entry.epoch == epoch for entry in lineage):
                return f"R8: while segment {record.id} supersedes the end of leader epoch {epoch}, readers find nothing there"
    return ""


class CopyOnWriteMetadataCache:
    def __init__(self, cache: RemoteLogMetadataCache) -> None:
        self.cache = RemoteLogMetadataCache(cache.partition, _CopyOnWriteSegmentMap(cache.segments))
        self.cache.applied, self.cache.deletion = cache.applied, cache.deletion
        self.cache.finished = dict(cache.finished)
        self.cache.epochs = {epoch: state.copy() for epoch, state in cache.epochs.items()}

    def apply_record(self, record: MetadataRecord) -> str:
        """Apply a record to the copy. Return why brokers would ignore it or stop at it, or an empty string."""
        try:
            finding = self.cache.apply_record(record, self.cache.applied + 1)
        except BadData as error:
            return error.cause
        return finding.detail if finding else ""


class _CopyOnWriteSegmentMap(MutableMapping[bytes, RemoteLogSegmentMetadataRecord]):
    def __init__(self, base: MutableMapping[bytes, RemoteLogSegmentMetadataRecord]) -> None:
        self._below = base
        self._over: dict[bytes, RemoteLogSegmentMetadataRecord | None] = {}

    @override
    def __getitem__(self, raw_id: bytes) -> RemoteLogSegmentMetadataRecord:
        found = self._over[raw_id] if raw_id in self._over else self._below[raw_id]
        if found is None:
            raise KeyError(raw_id)
        return found

    @override
    def __setitem__(self, raw_id: bytes, segment: RemoteLogSegmentMetadataRecord) -> None:
        self._over[raw_id] = segment

    @override
    def __delitem__(self, raw_id: bytes) -> None:
        self._over[raw_id] = None

    @override
    def __iter__(self) -> Iterator[bytes]:
        yield from (raw_id for raw_id in self._below if raw_id not in self._over)
        yield from (raw_id for raw_id, found in self._over.items() if found is not None)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_found_by_lookups(cache: RemoteLogMetadataCache, segment: RemoteLogSegmentMetadataRecord, last_offset: int = MAX_OFFSET) -> bool:
    """Return whether lookups of the segment's start, and of each leader epoch's start in it up to ``last_offset`` (inclusive), find it."""
    known = cache.segments.get(segment.segment_id)
    if known is None or known.state not in READABLE_STATES:
        return False
    parts = [
        (epoch, start)
        for epoch, start in epoch_start_offsets(known)
        if start <= min(last_offset_of_epoch(known, LeaderEpoch(epoch)), last_offset)
    ]
    return all(epoch in cache.epochs and cache.epochs[epoch].segment_at(start) == segment.segment_id for epoch, start in parts)


def epochs_with_lookup_gap(cache: RemoteLogMetadataCache, segment: RemoteLogSegmentMetadataRecord) -> list[int]:
    """Leader epochs in which lookups would briefly fail if this segment was finished (R8): brokers remove older entries first."""
    return [
        epoch
        for epoch, start in epoch_start_offsets(segment)
        if _would_supersede(cache.epochs.get(epoch), start, last_offset_of_epoch(segment, LeaderEpoch(epoch)))
    ]


def _would_supersede(epoch_segments: LeaderEpochSegments | None, start_offset: int, end_offset: int) -> bool:
    # Return whether brokers would remove entries of an epoch. Offsets are inclusive.
    if epoch_segments is None or not epoch_segments.starts or epoch_segments.highest is None:
        return False
    return epoch_segments.starts[-1] >= start_offset and epoch_segments.highest <= end_offset


@dataclass(frozen=True)
class HighestOffsetMarker:
    """Segment without an object that raises a finished leader epoch's highest tiered offset by one.

    Brokers drop older segments of an epoch as soon as a new one reaches its highest offset. The marker keeps a replacement below it, so
    that readers are switched in one step.
    """

    segment: RemoteLogSegmentMetadataRecord

    def marker_records(self, event_timestamp_ms: int) -> list[MetadataRecord]:
        begun = self.segment
        states = (_S.COPY_SEGMENT_FINISHED, _S.DELETE_SEGMENT_STARTED, _S.DELETE_SEGMENT_FINISHED)
        updates = [
            RemoteLogSegmentMetadataUpdateRecord(begun.partition, begun.segment_id, COMPACTOR_BROKER_ID, event_timestamp_ms, state)
            for state in states
        ]
        return [begun, *updates]


def markers_before_finish(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord, event_timestamp_ms: int
) -> list[HighestOffsetMarker]:
    """Permitted markers that must precede COPY_SEGMENT_FINISHED of this segment: the offset after the epoch must be tiered in a later epoch
    of the lineage, otherwise brokers would count offsets as tiered that are not.
    """
    made = []
    for epoch in epochs_with_lookup_gap(cache, segment):
        at = last_offset_of_epoch(segment, LeaderEpoch(epoch)) + 1
        following = epoch_for_offset(lineage, at)
        if following is None or following <= epoch:
            continue
        behind = cache.find_segment(following, at)
        if at > segment.end_offset and (behind is None or behind.state not in READABLE_STATES):
            continue
        raw_id = hashlib.sha256(segment.segment_id + epoch.to_bytes(4, "big")).digest()[:16]
        if raw_id in cache.finished or raw_id in cache.segments:
            # An earlier attempt ended half-way; what is left of it is cut off by its own id.
            raw_id = hashlib.sha256(raw_id + cache.applied.to_bytes(8, "big")).digest()[:16]
        marker = RemoteLogSegmentMetadataRecord(
            segment.partition, raw_id, at, at, COMPACTOR_BROKER_ID, -1, event_timestamp_ms, (EpochEntry(LeaderEpoch(epoch), Offset(at)),), 1
        )
        made.append(HighestOffsetMarker(marker))
    return made


def replacement_refusal(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord) -> str:
    """Return why a segment must not replace those that readers find in its offset range, or an empty string.

    It must have their offsets and leader epochs (R4), all of which begin in the first of them, no later timestamp (R7), and must not
    replace the newest segment (R8).
    """
    links = chained_read_ranges(segment_read_ranges(cache, lineage), lineage)
    covered = [link for link in links if link.last >= segment.start_offset and link.first <= segment.end_offset]
    if not covered or covered[0].first != segment.start_offset or covered[-1].last != segment.end_offset:
        return f"R4: segment {segment.id} does not begin and end where what readers find between its offsets does"
    if covered[-1] is links[-1]:
        return f"R8: segment {segment.id} would replace the newest one, {links[-1].segment.id}"
    reported = merge_segment_lineages([_epochs_read_by_consumers(link) for link in covered])
    if tuple(segment.leader_epochs) != reported:
        return f"R4: segment {segment.id} has other leader epochs than its sources"
    if reported[-1].start_offset > covered[0].last:
        return f"ascending: leader epoch {reported[-1].epoch} begins behind the first source of segment {segment.id}"
    between = (one for one in cache.segments.values() if segment.start_offset <= one.start_offset and one.end_offset <= segment.end_offset)
    known = [*(link.segment for link in covered), *between]  # those that were replaced, too: they may come back
    if segment.max_timestamp_ms > max(one.max_timestamp_ms for one in known):
        return f"R7: segment {segment.id} has a larger timestamp than its sources"
    return ""


def _epochs_read_by_consumers(read_range: SegmentReadRange) -> tuple[EpochEntry, ...]:
    return tuple(
        EpochEntry(LeaderEpoch(epoch), Offset(start))
        for epoch, start in epoch_start_offsets(read_range.segment)
        if start <= read_range.last
    )


def source_deletion_refusal(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord, sources: Iterable[bytes]
) -> str:
    """Return why the sources (16-byte ids) of a new segment cannot all be deleted once it is finished, or an empty string."""
    after = CopyOnWriteMetadataCache(cache)
    trial = after.cache
    rest = [_state_change_record(segment, _S.COPY_SEGMENT_FINISHED)]
    rest += [_state_change_record(trial.segments[raw_id], _S.DELETE_SEGMENT_STARTED) for raw_id in sources if raw_id in trial.segments]
    for record in rest:
        message = after.apply_record(record)
        if message:
            return f"R1: {message}"
    lost = _first_lost_offset(segment_read_ranges(cache, lineage), segment_read_ranges(trial, lineage))
    return "" if lost is None else f"R4: offset {lost} would have no segment"


def segments_within(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord
) -> list[RemoteLogSegmentMetadataRecord]:
    """Other finished segments of the same log within a compacted segment's offsets: copies of a second leader, deleted with its sources.
    Segments that an unclean election discarded belong to another log.
    """
    inside = (
        one
        for raw_id, one in cache.segments.items()
        if one.state in READABLE_STATES
        and raw_id != segment.segment_id
        and segment.start_offset <= one.start_offset
        and one.end_offset <= segment.end_offset
    )
    return [one for one in inside if is_segment_of_log(one, lineage)]


def is_segment_of_log(segment: RemoteLogSegmentMetadataRecord, lineage: Sequence[EpochEntry]) -> bool:
    own = [EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in epoch_start_offsets(segment)]
    end = segment.end_offset + 1
    return first_divergent_offset(own, end, [entry for entry in lineage if entry.start_offset < end], end) is None


def unfinished_broker_copies(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], end_offset: int
) -> list[RemoteLogSegmentMetadataRecord]:
    """Brokers' unfinished copies that end at or below ``end_offset`` and whose offsets readers find elsewhere. Finished after a round, they
    would bring back values whose tombstones are gone.
    """
    links = chained_read_ranges(segment_read_ranges(cache, lineage), lineage)
    begun = (one for one in cache.segments.values() if one.state is _S.COPY_SEGMENT_STARTED and one.broker_id != COMPACTOR_BROKER_ID)
    return [one for one in begun if one.end_offset <= end_offset and _is_covered(links, one)]


def finish_refusal(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord, event_timestamp_ms: int
) -> str:
    """Return why COPY_SEGMENT_FINISHED must not follow this segment's markers, or an empty string."""
    trial = CopyOnWriteMetadataCache(cache)
    wanted = [
        record
        for marker in markers_before_finish(cache, lineage, segment, event_timestamp_ms)
        for record in marker.marker_records(event_timestamp_ms)
    ]
    for record in (*wanted, _state_change_record(segment, _S.COPY_SEGMENT_FINISHED)):
        why = record_refusal(trial.cache, lineage, record)
        if why:
            return why
        trial.apply_record(record)
    return ""


def is_hiding_other_segments(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord) -> bool:
    """Return whether lookups would find more without this finished segment: a broker has tiered one that begins below its end and continues
    after it.
    """
    after = CopyOnWriteMetadataCache(cache)
    message = after.apply_record(_state_change_record(segment, _S.DELETE_SEGMENT_STARTED))
    return not message and _first_lost_offset(segment_read_ranges(after.cache, lineage), segment_read_ranges(cache, lineage)) is not None


def hidden_segments(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], end_offset: int) -> list[RemoteLogSegmentMetadataRecord]:
    """Segments from ``end_offset`` + 1 or below that lookups do not find at their start. Repeating COPY_SEGMENT_FINISHED makes them
    readable.
    """
    links = chained_read_ranges(segment_read_ranges(cache, lineage), lineage)
    return [link.segment for link in links if link.first <= end_offset + 1 and not is_found_by_lookups(cache, link.segment, link.last)]


def unrecorded_broker_copies(
    cache: RemoteLogMetadataCache,
    lineage: Sequence[EpochEntry],
    compacted: Iterable[RemoteLogSegmentMetadataRecord],
    recorded_ids: Collection[str],
) -> list[RemoteLogSegmentMetadataRecord]:
    """Brokers' finished copies within the offsets of ``compacted`` that the control log (``recorded_ids``) lacks. Readers would find values
    in them that compaction has removed.
    """
    spans: list[tuple[int, int]] = []
    for one in sorted(compacted, key=lambda one: one.start_offset):
        if spans and spans[-1][1] + 1 >= one.start_offset:
            spans[-1] = (spans[-1][0], max(spans[-1][1], one.end_offset))
        else:
            spans.append((one.start_offset, one.end_offset))
    late = (
        one
        for one in cache.segments.values()
        if one.state in READABLE_STATES
        and one.broker_id != COMPACTOR_BROKER_ID
        and one.id not in recorded_ids
        and is_segment_of_log(one, lineage)
    )
    return [one for one in late if any(first <= one.start_offset and one.end_offset <= last for first, last in spans)]


def _is_covered(read_ranges: Sequence[SegmentReadRange], segment: RemoteLogSegmentMetadataRecord) -> bool:
    wanted = segment.start_offset
    for link in read_ranges:
        if link.first <= wanted <= link.last:
            wanted = link.last + 1
    return wanted > segment.end_offset


def _state_change_record(segment: RemoteLogSegmentMetadataRecord, state: SegmentState) -> RemoteLogSegmentMetadataUpdateRecord:
    return RemoteLogSegmentMetadataUpdateRecord(
        segment.partition, segment.segment_id, COMPACTOR_BROKER_ID, segment.event_timestamp_ms, state, segment.custom_metadata
    )


def _first_lost_offset(old_ranges: Sequence[SegmentReadRange], new_ranges: Sequence[SegmentReadRange]) -> int | None:
    at = 0
    for link in old_ranges:
        wanted = link.first
        while at < len(new_ranges) and new_ranges[at].last < wanted:
            at += 1
        place = at
        while wanted <= link.last:
            if place >= len(new_ranges) or new_ranges[place].first > wanted:
                return wanted
            wanted = new_ranges[place].last + 1
            place += 1
    return None


FirstAndLastOffset = tuple[int, int]
EpochWithFirstAndLastOffset = tuple[int, int, int]


def broker_view(cache: RemoteLogMetadataCache, partition: TopicPartition) -> BrokerView:
    """Segments that readers find, with the lineage of the tier. Raises BadData if a segment has a negative size."""
    lineage = lineage_from_segments(cache)
    links = tuple(chained_read_ranges(segment_read_ranges(cache, lineage), lineage))
    if any(link.segment.size_bytes < 0 for link in links):
        raise BadData(f"{partition}: metadata has a segment of a negative size")
    return BrokerView(links, lineage, cache.applied)


def epoch_for_offset(lineage: Sequence[EpochEntry], offset: int) -> LeaderEpoch | None:
    """Leader epoch of an offset, None if the lineage begins later (Kafka's LeaderEpochFileCache.epochForOffset)."""
    previous = None
    for entry in lineage:
        if entry.start_offset == offset:
            return entry.epoch
        if entry.start_offset > offset:
            return previous
        previous = entry.epoch
    return previous


def segment_read_ranges(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry]) -> list[SegmentReadRange]:
    """Segment that a broker reads for each range of offsets, ascending; there may be gaps."""
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


def chained_read_ranges(ranges: Sequence[SegmentReadRange], lineage: Sequence[EpochEntry]) -> list[SegmentReadRange]:
    """Read ranges in which each segment occurs once and is read from its own start.

    Brokers look up each leader epoch separately: they may read a segment, another one, and the first one again. A segment that continues
    the previous range, and holds its offsets in the same log, replaces it.
    """
    chained: list[SegmentReadRange] = []
    for link in ranges:
        begin = link.segment.start_offset
        if chained and chained[-1].last == link.first - 1 and begin <= chained[-1].last and _matches_lineage(link, lineage):
            while chained and chained[-1].first >= begin:
                chained.pop()
            if chained and chained[-1].last >= begin:
                chained[-1] = chained[-1]._replace(last=begin - 1)
            chained.append(link._replace(first=begin))
        else:
            chained.append(link)
    return chained


def _matches_lineage(read_range: SegmentReadRange, lineage: Sequence[EpochEntry]) -> bool:
    # Compare the segment's leader epochs with the lineage up to the offset from which it is read.
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
    """Derive the lineage from the tier's readable segments.

    As in Kafka's LeaderEpochFileCache, an epoch that begins at or above the start of a later one is not part of the log. An epoch's
    predecessor comes from a segment that holds both, otherwise it is the next lower epoch.
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
    found: dict[int, set[int]] = {}
    # Whoever has the end of one epoch and the beginning of the next is the last of the one or the first of the other.
    edges = {raw_id for state in cache.epochs.values() for raw_id in (*state.ids[:1], *state.ids[-1:])}
    for segment in (cache.segments[raw_id] for raw_id in edges if raw_id in cache.segments):
        for (lower, _), (epoch, _) in pairwise(without_empty_epochs(epoch_start_offsets(segment))):
            found.setdefault(epoch, set()).add(lower)
    return found


def offset_gaps(ranges: Sequence[SegmentReadRange]) -> list[FirstAndLastOffset]:
    """Offset ranges, both ends inclusive, between read ranges. Consumers that request them are reset."""
    return [(one.last + 1, two.first - 1) for one, two in pairwise(ranges) if two.first > one.last + 1]


def without_empty_epochs(lineage: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Lineage without epochs that have no records (Kafka's buildFilteredLeaderEpochMap): of epochs with one start, the last
    stays.
    """
    return [entry for at, entry in enumerate(lineage) if at + 1 == len(lineage) or lineage[at + 1][1] != entry[1]]


def _epoch_offset_ranges(lineage: Sequence[EpochEntry]) -> Iterator[EpochWithFirstAndLastOffset]:
    for at, entry in enumerate(lineage):
        last = lineage[at + 1].start_offset - 1 if at + 1 < len(lineage) else MAX_OFFSET
        if last < entry.start_offset and at + 1 < len(lineage) and (at == 0 or lineage[at - 1].start_offset < entry.start_offset):
            last = entry.start_offset  # an exact match is the first epoch that begins there
        first = entry.start_offset
        if at and lineage[at - 1].start_offset == first:
            first = Offset(first + 1)
        if first <= last:
            yield entry.epoch, first, last


# Leaders, log ends and topic ids for the agent. Brokers with ZooKeeper and with KRaft answer the same requests.


RECORDED_SETTINGS = ("delete.retention.ms", "min.compaction.lag.ms", "max.compaction.lag.ms")
"""Settings of topics by which their users decide how long records stay readable. The others only say how a broker works."""


@dataclass(frozen=True)
class ClusterPartitionLeaders:
    cluster_id: str
    leaders: Mapping[TopicPartition, int]


@dataclass(frozen=True)
class LeaderReportedLogEnd:
    """Leader's answer to ListOffsets. high_watermark: exclusive. leader_epoch: -1 if not returned."""

    leader_epoch: LeaderEpoch
    high_watermark: int


class AgentClusterQueriesOverKafka:
    """Client that asks a cluster for leaders, end offsets, topic ids and settings. All methods raise StoreError."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._admin = LazyKafkaAdminClient(connection)

    def leaders(self) -> ClusterPartitionLeaders:
        reported = self._admin.request_cluster_metadata("ask who leads")
        leaders = {
            TopicPartition(topic.topic, number): partition.leader
            for topic in reported.topics.values()
            for number, partition in topic.partitions.items()
            if partition.leader >= 0
        }
        return ClusterPartitionLeaders(reported.cluster_id or "", leaders)

    def topic_ids(self, topics: Sequence[str]) -> ClusterTopicIds:
        admin, timeout = self._admin.client, self._connection.timeout_s
        cluster = self._admin.send_request("describe the cluster", lambda: {"": admin.describe_cluster(request_timeout=timeout)})[""]
        return ClusterTopicIds(cluster.cluster_id or "", self._request_topic_ids(topics))

    def _request_topic_ids(self, topics: Sequence[str]) -> dict[str, TopicId]:
        # Send one request, or one per topic if the cluster refuses the joint one.
        admin, timeout = self._admin.client, self._connection.timeout_s
        wanted = load_confluent_kafka().TopicCollection(list(topics))
        try:
            found = self._admin.send_request(
                f"describe {', '.join(topics)}", lambda: admin.describe_topics(wanted, request_timeout=timeout)
            )
        except Refused:
            return (
                {name: topic_id for one in topics for name, topic_id in self._request_topic_ids([one]).items()} if len(topics) > 1 else {}
            )
        return {name: uuid_text(uuid_to_bytes(topic.topic_id)) for name, topic in found.items()}

    def retention_ms(self, topic: str) -> int | None:
        """Retention, -1 if unlimited, None if this user may not read it."""
        return self._read_topic_setting_ms(topic, "retention.ms")

    def delete_delay_ms(self, topic: str) -> int | None:
        """Value of ``file.delete.delay.ms``, None if it may not be read."""
        return self._read_topic_setting_ms(topic, "file.delete.delay.ms")

    def compaction_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str] | None]:
        """RECORDED_SETTINGS that are set on each topic itself: none without ``compact``, None if they may not be read."""
        admin = KafkaAdmin(self._connection)
        try:
            found = admin.read_topic_settings(topics) if topics else {}
        finally:
            admin.close()
        return {topic: None if isinstance(settings, Refused) else _chosen_for_compaction(settings) for topic, settings in found.items()}

    def _read_topic_setting_ms(self, topic: str, name: str) -> int | None:
        setting = KafkaAdmin(self._connection).describe_topics([topic])[topic].settings.get(name)
        return int(setting.value) if setting is not None else None

    def log_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, LeaderReportedLogEnd | StoreError]:
        """Log ends, in one request per broker; an error if the leader does not answer."""
        if not partitions:
            return {}
        kafka = load_confluent_kafka()
        admin = self._admin.client
        admin.poll(0)
        wanted = {kafka.TopicPartition(name.topic, name.partition): kafka.admin.OffsetSpec.latest() for name in partitions}
        uncommitted = kafka.IsolationLevel.READ_UNCOMMITTED
        timeout = self._connection.timeout_s
        asked = admin.list_offsets(wanted, isolation_level=uncommitted, request_timeout=timeout)
        deadline = time.monotonic() + timeout + 1
        found: dict[TopicPartition, LeaderReportedLogEnd | StoreError] = {}
        for where, future in asked.items():
            name = TopicPartition(where.topic, where.partition)
            try:
                answer = future.result(max(0.0, deadline - time.monotonic()))
            except kafka.KafkaException as error:
                found[name] = translate_kafka_error(error.args[0], self._connection.bootstrap_servers, f"ask where {name} ends")
                continue
            except TimeoutError:
                answer = None
            if answer is None or answer.offset < 0:  # librdkafka's own number beside the answers of other leaders
                found[name] = StoreError(f"no broker told in {timeout:g} s where {name} ends", hint="It is retried")
            else:
                found[name] = LeaderReportedLogEnd(LeaderEpoch(-1 if answer.leader_epoch is None else answer.leader_epoch), answer.offset)
        return found


def _chosen_for_compaction(settings: Mapping[str, KafkaSetting]) -> dict[str, str]:
    if "compact" not in settings["cleanup.policy"].value:
        return {}
    return {name: settings[name].value for name in RECORDED_SETTINGS if name in settings and settings[name].source == "topic"}
