"""What may be written into the metadata topic: the hard rules of docs/broker-protocol.md as code that refuses.

Pure questions about a fold of the topic and a record that is about to follow it. Each refusal begins with the name of its rule. A broker
applies records in their order and never asks back, so nothing is appended that was not asked about here, against a fold of all before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

from checkpoint.lineage import EpochEntry, divergence, union
from compactor.errors import BadData
from compactor.metadata_topic.cache import LeaderEpochState, RemoteLogMetadataCache, epoch_end, epoch_starts
from compactor.metadata_topic.chain import Link, chain, epoch_for_offset, one_chain
from compactor.metadata_topic.codec import (
    MetadataRecord,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    RemotePartitionDeleteMetadataRecord,
    decode,
    encode,
)
from compactor.model.ids import COMPACTOR_BROKER_ID
from compactor.model.segment import TRANSITIONS, SegmentState

_S = SegmentState
_FOREVER = 2**63 - 1
READABLE = (_S.COPY_SEGMENT_FINISHED,)
OPEN = (_S.COPY_SEGMENT_STARTED, _S.COPY_SEGMENT_FINISHED)


def refusal(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], record: MetadataRecord) -> str:
    """Why this record must not follow what ``cache`` has folded, or nothing. ``lineage``: by which brokers look offsets up."""
    return _malformed(cache, record) or _out_of_turn(cache, record) or _reader_notices(cache, lineage, record)


def _malformed(cache: RemoteLogMetadataCache, record: MetadataRecord) -> str:
    """R1, R6: what brokers stop at, and what they could not serve."""
    if isinstance(record, RemotePartitionDeleteMetadataRecord):
        return "R1: a partition's tier is deleted by brokers alone"
    if record.partition.topic_id != cache.partition.topic_id or record.partition.partition != cache.partition.partition:
        return f"R1: the record is of {record.partition}, not of {cache.partition}"
    if record.broker_id != COMPACTOR_BROKER_ID:
        return f"R1: the record says that broker {record.broker_id} wrote it"
    try:
        if decode(encode(record)) != record:
            return "R1: what the record says is not what is read from its bytes"
    except (BadData, ValueError) as error:
        return f"R1: {error}"
    if isinstance(record, RemoteLogSegmentMetadataRecord):
        starts = [entry.start_offset for entry in record.leader_epochs]
        if record.size_bytes <= 0:
            return f"R6: segment {record.id} has {record.size_bytes} bytes"
        if starts != sorted(starts) or starts[0] < record.start_offset or starts[-1] > record.end_offset:
            return f"R4: the leader epochs of segment {record.id} do not fit its offsets"
    return ""


def _out_of_turn(cache: RemoteLogMetadataCache, record: MetadataRecord) -> str:
    """R1, R3: Kafka's state machine, strictly, and custom metadata that is repeated."""
    if isinstance(record, RemotePartitionDeleteMetadataRecord):
        return ""
    existing = cache.segments.get(record.segment_id)
    if isinstance(record, RemoteLogSegmentMetadataRecord):
        if existing is not None or record.segment_id in cache.finished:
            return f"R1: segment {record.id} was introduced before"
        return ""
    if existing is None:
        return f"R3: segment {record.id} was not introduced, or is finished"
    again = record.state is existing.state is _S.COPY_SEGMENT_FINISHED and not effective(cache, existing)
    if record.state not in TRANSITIONS[existing.state] and not again:
        return f"R1: segment {record.id} cannot go from {existing.state} to {record.state}"
    if record.custom_metadata != existing.custom_metadata:
        return f"R1: custom metadata of segment {record.id} would be lost"
    return ""


def _reader_notices(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], record: MetadataRecord) -> str:
    """R3, R3b, R4, R8: no offset that has a segment may be without one, afterwards or between two steps of a broker."""
    after = Trial(cache)
    said = after.apply(record)
    if said:
        return f"R1: {said}"
    lost = _uncovered(chain(cache, lineage), chain(after.cache, lineage))
    if lost is not None:
        rule = "R3b" if isinstance(record, RemoteLogSegmentMetadataUpdateRecord) and record.state is _S.DELETE_SEGMENT_STARTED else "R4"
        return f"{rule}: offset {lost} would have no segment"
    if isinstance(record, RemoteLogSegmentMetadataUpdateRecord) and record.state is _S.COPY_SEGMENT_FINISHED:
        segment = cache.segments[record.segment_id]
        for epoch in window(cache, segment):
            if any(entry.epoch == epoch for entry in lineage):
                return f"R8: while segment {record.id} supersedes the end of leader epoch {epoch}, readers find nothing there"
    return ""


class Trial:
    """A fold to try records on; the one that it is made of stays as it is."""

    def __init__(self, cache: RemoteLogMetadataCache) -> None:
        self.cache = RemoteLogMetadataCache(cache.partition, _Overlay(cache.segments))
        self.cache.applied, self.cache.deletion = cache.applied, cache.deletion
        self.cache.finished = dict(cache.finished)
        self.cache.epochs = {epoch: state.copy() for epoch, state in cache.epochs.items()}

    def apply(self, record: MetadataRecord) -> str:
        """What a broker would complain about, or nothing."""
        try:
            finding = self.cache.apply(record, self.cache.applied + 1)
        except BadData as error:
            return error.cause
        return finding.said if finding else ""


class _Overlay(MutableMapping[bytes, RemoteLogSegmentMetadataRecord]):
    """Segments over those of another fold, which it leaves alone."""

    def __init__(self, below: MutableMapping[bytes, RemoteLogSegmentMetadataRecord]) -> None:
        self._below = below
        self._over: dict[bytes, RemoteLogSegmentMetadataRecord | None] = {}

    def __getitem__(self, raw_id: bytes) -> RemoteLogSegmentMetadataRecord:
        found = self._over[raw_id] if raw_id in self._over else self._below[raw_id]
        if found is None:
            raise KeyError(raw_id)
        return found

    def __setitem__(self, raw_id: bytes, segment: RemoteLogSegmentMetadataRecord) -> None:
        self._over[raw_id] = segment

    def __delitem__(self, raw_id: bytes) -> None:
        self._over[raw_id] = None

    def __iter__(self) -> Iterator[bytes]:
        yield from (raw_id for raw_id in self._below if raw_id not in self._over)
        yield from (raw_id for raw_id, found in self._over.items() if found is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def effective(cache: RemoteLogMetadataCache, segment: RemoteLogSegmentMetadataRecord, last: int = _FOREVER) -> bool:
    """Look: whether a broker that asks for where the segment, and each leader epoch in it, begins is answered with this very segment.

    ``last``: up to where it is read.
    """
    known = cache.segments.get(segment.segment_id)
    if known is None or known.state not in READABLE:
        return False
    parts = [(epoch, start) for epoch, start in epoch_starts(known) if start <= min(epoch_end(known, epoch), last)]
    return all(epoch in cache.epochs and cache.epochs[epoch].floor(start) == segment.segment_id for epoch, start in parts)


def window(cache: RemoteLogMetadataCache, segment: RemoteLogSegmentMetadataRecord) -> list[int]:
    """Leader epochs in which a broker would take older entries away before it puts the segment: readers look in between (R8)."""
    return [epoch for epoch, start in epoch_starts(segment) if _supersedes(cache.epochs.get(epoch), start, epoch_end(segment, epoch))]


def _supersedes(state: LeaderEpochState | None, start: int, end: int) -> bool:
    if state is None or not state.starts or state.highest is None:
        return False
    return state.starts[-1] >= start and state.highest <= end


@dataclass(frozen=True)
class CeilingMarker:
    """Raises the highest offset of a finished epoch by one, so that a replacement that reaches the epoch's end is one step for brokers."""

    segment: RemoteLogSegmentMetadataRecord

    def records(self, event_timestamp_ms: int) -> list[MetadataRecord]:
        """No object belongs to it: it is deleted before anybody could ask for one."""
        begun = self.segment
        states = (_S.COPY_SEGMENT_FINISHED, _S.DELETE_SEGMENT_STARTED, _S.DELETE_SEGMENT_FINISHED)
        updates = [
            RemoteLogSegmentMetadataUpdateRecord(begun.partition, begun.segment_id, COMPACTOR_BROKER_ID, event_timestamp_ms, state)
            for state in states
        ]
        return [begun, *updates]


def markers(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord, event_timestamp_ms: int
) -> list[CeilingMarker]:
    """Those that have to come before COPY_SEGMENT_FINISHED of this segment, where they are permitted.

    Permitted is a marker where the offset behind the epoch belongs to a later epoch of the lineage and is tiered: else brokers would
    take offsets for copied that are not. ``refusal`` stands against the replacement where one is needed and not permitted.
    """
    made = []
    for epoch in window(cache, segment):
        at = epoch_end(segment, epoch) + 1
        following = epoch_for_offset(lineage, at)
        if following is None or following <= epoch:
            continue
        behind = cache.segment(following, at)
        if at > segment.end_offset and (behind is None or behind.state not in READABLE):
            continue
        raw_id = hashlib.sha256(segment.segment_id + epoch.to_bytes(4, "big")).digest()[:16]
        if raw_id in cache.finished or raw_id in cache.segments:
            # An earlier attempt ended half-way; what is left of it is cut off by its own id.
            raw_id = hashlib.sha256(raw_id + cache.applied.to_bytes(8, "big")).digest()[:16]
        marker = RemoteLogSegmentMetadataRecord(
            segment.partition, raw_id, at, at, COMPACTOR_BROKER_ID, -1, event_timestamp_ms, (EpochEntry(epoch, at),), 1
        )
        made.append(CeilingMarker(marker))
    return made


def replacement_refusal(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord) -> str:
    """Why this segment cannot stand for what readers find between its offsets: R4, R7, R8, ascending. Asked before it is introduced."""
    links = one_chain(chain(cache, lineage), lineage)
    covered = [link for link in links if link.last >= segment.start_offset and link.first <= segment.end_offset]
    if not covered or covered[0].first != segment.start_offset or covered[-1].last != segment.end_offset:
        return f"R4: segment {segment.id} does not begin and end where what readers find between its offsets does"
    if covered[-1] is links[-1]:
        return f"R8: segment {segment.id} would replace the newest one, {links[-1].segment.id}"
    told = union([_told(link) for link in covered])
    if tuple(segment.leader_epochs) != told:
        return f"R4: segment {segment.id} has other leader epochs than its sources"
    if told[-1].start_offset > covered[0].last:
        return (
            f"ascending: leader epoch {told[-1].epoch} begins behind the first source of segment {segment.id}: it would be switched first"
        )
    between = (one for one in cache.segments.values() if segment.start_offset <= one.start_offset and one.end_offset <= segment.end_offset)
    known = [*(link.segment for link in covered), *between]  # those that were replaced, too: they may come back
    if segment.max_timestamp_ms > max(one.max_timestamp_ms for one in known):
        return f"R7: segment {segment.id} has a larger timestamp than its sources"
    return ""


def _told(link: Link) -> tuple[EpochEntry, ...]:
    """A source's leader epochs, as far as readers read it."""
    return tuple(EpochEntry(epoch, start) for epoch, start in epoch_starts(link.segment) if start <= link.last)


def sources_refusal(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord, sources: Iterable[bytes]
) -> str:
    """Whether all of the sources can go once the segment counts (asked before it does): tries the whole switch."""
    after = Trial(cache)
    trial = after.cache
    rest = [_update(segment, _S.COPY_SEGMENT_FINISHED)]
    rest += [_update(trial.segments[raw_id], _S.DELETE_SEGMENT_STARTED) for raw_id in sources if raw_id in trial.segments]
    for record in rest:
        said = after.apply(record)
        if said:
            return f"R1: {said}"
    lost = _uncovered(chain(cache, lineage), chain(trial, lineage))
    return "" if lost is None else f"R4: offset {lost} would have no segment"


def redundant(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord
) -> list[RemoteLogSegmentMetadataRecord]:
    """Other finished segments of the same log between this one's offsets: two leaders tiered them. They go with its sources.

    What an unclean election has discarded is none of this log, and stays.
    """
    inside = (
        one
        for raw_id, one in cache.segments.items()
        if one.state in READABLE
        and raw_id != segment.segment_id
        and segment.start_offset <= one.start_offset
        and one.end_offset <= segment.end_offset
    )
    return [one for one in inside if of_this_log(one, lineage)]


def of_this_log(segment: RemoteLogSegmentMetadataRecord, lineage: Sequence[EpochEntry]) -> bool:
    """Whether all of a segment's records are in the log that has this lineage."""
    own = [EpochEntry(epoch, start) for epoch, start in epoch_starts(segment)]
    end = segment.end_offset + 1
    return divergence(own, end, [entry for entry in lineage if entry.start_offset < end], end) is None


def in_flight(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], end_offset: int) -> list[RemoteLogSegmentMetadataRecord]:
    """Copies that brokers have begun and that lie wholly at or below ``end_offset``, where readers find everything already.

    An earlier leader is still at it, or has died. If one of them came to its end after a round, values would be read again whose
    tombstones the round has dropped. One that reaches to the tier's end brings all that follows, too.
    """
    links = one_chain(chain(cache, lineage), lineage)
    begun = (one for one in cache.segments.values() if one.state is _S.COPY_SEGMENT_STARTED and one.broker_id != COMPACTOR_BROKER_ID)
    return [one for one in begun if one.end_offset <= end_offset and _covered(links, one)]


def finish_refusal(
    cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord, event_timestamp_ms: int
) -> str:
    """Why COPY_SEGMENT_FINISHED must not follow, after the ceiling markers that it needs: tries all of them."""
    trial = Trial(cache)
    wanted = [record for marker in markers(cache, lineage, segment, event_timestamp_ms) for record in marker.records(event_timestamp_ms)]
    for record in (*wanted, _update(segment, _S.COPY_SEGMENT_FINISHED)):
        why = refusal(trial.cache, lineage, record)
        if why:
            return why
        trial.apply(record)
    return ""


def hides(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], segment: RemoteLogSegmentMetadataRecord) -> bool:
    """Whether brokers find offsets without this finished segment that they do not find with it.

    A broker has tiered across its end between the last look and its COPY_SEGMENT_FINISHED: whoever looks behind that end meets this
    segment first, and it does not hold what he looks for.
    """
    after = Trial(cache)
    said = after.apply(_update(segment, _S.DELETE_SEGMENT_STARTED))
    return not said and _uncovered(chain(after.cache, lineage), chain(cache, lineage)) is not None


def hidden(cache: RemoteLogMetadataCache, lineage: Sequence[EpochEntry], end_offset: int) -> list[RemoteLogSegmentMetadataRecord]:
    """Segments of the chain, up to the one behind ``end_offset``, that brokers find only behind their start: COPY_FINISHED again helps."""
    links = one_chain(chain(cache, lineage), lineage)
    return [link.segment for link in links if link.first <= end_offset + 1 and not effective(cache, link.segment, link.last)]


def intruders(
    cache: RemoteLogMetadataCache,
    lineage: Sequence[EpochEntry],
    compacted: Iterable[RemoteLogSegmentMetadataRecord],
    known: Collection[str],
) -> list[RemoteLogSegmentMetadataRecord]:
    """Finished copies by brokers that the control log does not know, within what was ``compacted``: they came after all.

    Readers find values in them that compaction has taken away, and so, perhaps, their tombstones.
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
        if one.state in READABLE and one.broker_id != COMPACTOR_BROKER_ID and one.id not in known and of_this_log(one, lineage)
    )
    return [one for one in late if any(first <= one.start_offset and one.end_offset <= last for first, last in spans)]


def _covered(links: Sequence[Link], segment: RemoteLogSegmentMetadataRecord) -> bool:
    wanted = segment.start_offset
    for link in links:
        if link.first <= wanted <= link.last:
            wanted = link.last + 1
    return wanted > segment.end_offset


def _update(segment: RemoteLogSegmentMetadataRecord, state: SegmentState) -> RemoteLogSegmentMetadataUpdateRecord:
    return RemoteLogSegmentMetadataUpdateRecord(
        segment.partition, segment.segment_id, COMPACTOR_BROKER_ID, segment.event_timestamp_ms, state, segment.custom_metadata
    )


def _uncovered(before: Sequence[Link], after: Sequence[Link]) -> int | None:
    """The first offset that had a segment and has none."""
    at = 0
    for link in before:
        wanted = link.first
        while at < len(after) and after[at].last < wanted:
            at += 1
        place = at
        while wanted <= link.last:
            if place >= len(after) or after[place].first > wanted:
                return wanted
            wanted = after[place].last + 1
            place += 1
    return None
