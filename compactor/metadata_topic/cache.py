"""One user partition's segments as every broker folds them (Kafka's RemoteLogMetadataCache and RemoteLogLeaderEpochState, 3.7 to 4.x).

The order of the records decides, so one that was applied already is not applied again (``applied`` is the topic's offset of the last).
What a broker drops with a line in its log is a Finding here; what stops a broker's consumer is BadData.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, MutableMapping
from enum import StrEnum
from typing import NamedTuple

from checkpoint.lineage import EpochEntry
from compactor.errors import BadData, NotFound
from compactor.metadata_topic.codec import (
    TOPIC,
    MetadataRecord,
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
    uuid_text,
)
from compactor.model.ids import segment_id
from compactor.model.segment import TRANSITIONS, SegmentState

FINISHED_KEPT = 4096
"""How many finished ids a partition remembers, newest last: a zombie's late records come within its delivery timeout, not years later."""


class FindingKind(StrEnum):
    DROPPED_TRANSITION = "dropped-transition"
    """An ERROR line in every broker's log, again at every replay."""
    UNKNOWN_SEGMENT = "unknown-segment"
    """An update of an id that nobody introduced, or that is finished."""
    REVIVED = "revived"
    """A finished id was introduced again: its objects are gone or about to be."""


class Finding(NamedTuple):
    """What a record did not do, or should not have done. ``offset``: in the metadata topic."""

    kind: FindingKind
    partition: TopicIdPartition
    segment_id: bytes
    offset: int
    said: str

    def __str__(self) -> str:
        return f"{self.partition}, segment {segment_id(self.segment_id)}, record at {self.offset}: {self.said}"


class Hole(NamedTuple):
    """Offsets [first, last] of an epoch that were tiered and that a broker would not find: OFFSET_OUT_OF_RANGE for consumers."""

    epoch: int
    first: int
    last: int


class LeaderEpochState:
    """Kafka's RemoteLogLeaderEpochState: where each readable segment's part of this epoch begins, ascending, and the other ids."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ids: list[bytes] = []
        self.unreferenced: dict[bytes, None] = {}
        self.highest: int | None = None

    def floor(self, offset: int) -> bytes | None:
        at = bisect_right(self.starts, offset) - 1
        return self.ids[at] if at >= 0 else None

    def copy_started(self, raw_id: bytes) -> None:
        self.unreferenced[raw_id] = None

    def copy_finished(self, start: int, raw_id: bytes, epoch_end: int) -> None:
        """One that reaches the epoch's highest offset supersedes all that begin at or after its own start; any other is put."""
        while self.starts and self.starts[-1] >= start and self.highest is not None and self.highest <= epoch_end:
            self.starts.pop()
            self.unreferenced[self.ids.pop()] = None
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and self.starts[at] == start:
            self.ids[at] = raw_id  # whoever was there is in no list of this epoch from here
        else:
            self.starts.insert(at, start)
            self.ids.insert(at, raw_id)
        self.unreferenced.pop(raw_id, None)
        if self.highest is None or epoch_end > self.highest:
            self.highest = epoch_end

    def delete_started(self, start: int, raw_id: bytes) -> None:
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and self.starts[at] == start and self.ids[at] == raw_id:
            del self.starts[at], self.ids[at]
        self.unreferenced[raw_id] = None

    def delete_finished(self, raw_id: bytes) -> None:
        self.unreferenced.pop(raw_id, None)

    def copy(self) -> LeaderEpochState:
        other = LeaderEpochState()
        other.starts, other.ids, other.unreferenced = list(self.starts), list(self.ids), dict(self.unreferenced)
        other.highest = self.highest
        return other


class RemoteLogMetadataCache:
    """:param partition: whose records it takes; others raise ValueError. ``segments``: where they are held, by id."""

    def __init__(self, partition: TopicIdPartition, segments: MutableMapping[bytes, RemoteLogSegmentMetadataRecord] | None = None) -> None:
        self.partition = partition
        self.applied = -1
        self.segments: MutableMapping[bytes, RemoteLogSegmentMetadataRecord] = {} if segments is None else segments
        self.epochs: dict[int, LeaderEpochState] = {}
        self.finished: dict[bytes, None] = {}
        self.deletion: PartitionDeleteState | None = None

    def copy(self) -> RemoteLogMetadataCache:
        """To try on what one means to write."""
        other = RemoteLogMetadataCache(self.partition)
        other.applied, other.deletion = self.applied, self.deletion
        other.segments, other.finished = dict(self.segments), dict(self.finished)
        other.epochs = {epoch: state.copy() for epoch, state in self.epochs.items()}
        return other

    def apply(self, record: MetadataRecord, offset: int, *, topic: str = TOPIC) -> Finding | None:
        """Folds one record; ``offset`` and ``topic`` say where it stands. Raises BadData where brokers stop."""
        if record.partition.topic_id != self.partition.topic_id or record.partition.partition != self.partition.partition:
            raise ValueError(f"a record of {record.partition} for {self.partition}")
        if offset <= self.applied:
            return None
        finding = None
        if isinstance(record, RemoteLogSegmentMetadataRecord):
            finding = self._start(record, offset)
        elif isinstance(record, RemoteLogSegmentMetadataUpdateRecord):
            finding = self._update(record, offset, topic)
        else:
            self.deletion = record.state
            if record.state is PartitionDeleteState.DELETE_PARTITION_FINISHED:
                self.segments.clear()
                self.epochs.clear()
        self.applied = offset
        return finding

    def segment(self, epoch: int, offset: int) -> RemoteLogSegmentMetadataRecord | None:
        """Kafka's remoteLogSegmentMetadata: the readable segment for an offset of this epoch. There is no fallback to an earlier one."""
        state = self.epochs.get(epoch)
        raw_id = state.floor(offset) if state else None
        found = self.segments.get(raw_id) if raw_id else None
        return found if found is not None and offset <= epoch_end(found, epoch) else None

    def list_epoch(self, epoch: int) -> list[RemoteLogSegmentMetadataRecord]:
        """Kafka's listRemoteLogSegments(epoch): by start offset, readable ones first. Raises NotFound where Kafka's throws."""
        state = self.epochs.get(epoch)
        if state is None:
            return []
        listed = []
        for raw_id in (*state.ids, *state.unreferenced):
            found = self.segments.get(raw_id)
            if found is None:
                raise NotFound(f"{self.partition}: leader epoch {epoch} names segment {segment_id(raw_id)}, which has no metadata")
            listed.append(found)
        listed.sort(key=_start_offset)
        return listed

    def list_all(self) -> list[RemoteLogSegmentMetadataRecord]:
        """Kafka's listAllRemoteLogSegments: every id in every state but DELETE_SEGMENT_FINISHED, in the order of their introduction."""
        return list(self.segments.values())

    def highest_offset(self, epoch: int) -> int | None:
        """Kafka's highestOffsetForEpoch: it never goes down, whatever is deleted."""
        state = self.epochs.get(epoch)
        return state.highest if state else None

    def referenced(self) -> dict[bytes, RemoteLogSegmentMetadataRecord]:
        """The segments that some lookup can find."""
        ids = {raw_id for state in self.epochs.values() for raw_id in state.ids}
        return {raw_id: found for raw_id, found in self.segments.items() if raw_id in ids}

    def holes(self) -> Iterator[Hole]:
        """Where the invariant fails: each readable segment reaches the next one's start, the last one the epoch's highest offset.

        Deletions by retention leave none: what is before an epoch's first readable segment is no hole.
        """
        for epoch, state in sorted(self.epochs.items()):
            for at, (start, raw_id) in enumerate(zip(state.starts, state.ids, strict=True)):
                last = at + 1 == len(state.starts)
                needed = state.highest if last else state.starts[at + 1] - 1
                reached = epoch_end(self.segments[raw_id], epoch) if raw_id in self.segments else start - 1
                if needed is not None and reached < needed:
                    yield Hole(epoch, max(start, reached + 1), needed)

    def _start(self, record: RemoteLogSegmentMetadataRecord, offset: int) -> Finding | None:
        existing = self.segments.get(record.segment_id)
        if existing is not None and existing.state is not record.state:
            return self._dropped(existing.state, record.state, record.segment_id, offset)
        for epoch, _ in epoch_starts(record):
            self.epochs.setdefault(epoch, LeaderEpochState()).copy_started(record.segment_id)
        self.segments[record.segment_id] = record
        if record.segment_id in self.finished:
            said = "a segment whose deletion was finished is introduced again"
            return Finding(FindingKind.REVIVED, self.partition, record.segment_id, offset, said)
        return None

    def _update(self, update: RemoteLogSegmentMetadataUpdateRecord, offset: int, topic: str) -> Finding | None:
        existing = self.segments.get(update.segment_id)
        if existing is None:
            what = "is finished" if update.segment_id in self.finished else "was never introduced"
            said = f"{update.state} of a segment that {what}"
            return Finding(FindingKind.UNKNOWN_SEGMENT, self.partition, update.segment_id, offset, said)
        if update.state is not existing.state and update.state not in TRANSITIONS[existing.state]:
            return self._dropped(existing.state, update.state, update.segment_id, offset)
        if update.state is SegmentState.COPY_SEGMENT_STARTED:
            raise BadData(
                f"segment {update.id} of {self.partition} is updated to COPY_SEGMENT_STARTED",
                segment=topic,
                offset=offset,
                hint="Brokers stop reading the topic at such a record, and again at every restart",
            )
        found = existing.updated(update)
        for epoch, start in epoch_starts(found):
            state = self.epochs.setdefault(epoch, LeaderEpochState())
            if update.state is SegmentState.COPY_SEGMENT_FINISHED:
                state.copy_finished(start, update.segment_id, epoch_end(found, epoch))
            elif update.state is SegmentState.DELETE_SEGMENT_STARTED:
                state.delete_started(start, update.segment_id)
            else:
                state.delete_finished(update.segment_id)
        if update.state is SegmentState.DELETE_SEGMENT_FINISHED:
            del self.segments[update.segment_id]
            self._remember(update.segment_id)
        else:
            self.segments[update.segment_id] = found
        return None

    def _dropped(self, before: SegmentState, after: SegmentState, raw_id: bytes, offset: int) -> Finding:
        said = f"{before} cannot become {after}; brokers drop the record with an ERROR line"
        return Finding(FindingKind.DROPPED_TRANSITION, self.partition, raw_id, offset, said)

    def _remember(self, raw_id: bytes) -> None:
        self.finished.pop(raw_id, None)
        self.finished[raw_id] = None
        while len(self.finished) > FINISHED_KEPT:
            del self.finished[next(iter(self.finished))]

    def __str__(self) -> str:
        return f"{self.partition}: {len(self.segments)} segments"


def epoch_starts(segment: RemoteLogSegmentMetadataRecord) -> list[tuple[int, int]]:
    """Its leader epochs and where they begin in it, as the sorted map that Kafka makes of them."""
    entries = segment.leader_epochs
    if len(entries) == 1:
        return [(entries[0].epoch, entries[0].start_offset)]
    return sorted({entry.epoch: entry.start_offset for entry in entries}.items())


def epoch_end(segment: RemoteLogSegmentMetadataRecord, epoch: int) -> int:
    """The last offset that the segment has of this epoch (inclusive)."""
    for later, start in epoch_starts(segment):
        if later > epoch:
            return start - 1
    return segment.end_offset


def lineage_of(segment: RemoteLogSegmentMetadataRecord) -> tuple[EpochEntry, ...]:
    return tuple(EpochEntry(epoch, start) for epoch, start in epoch_starts(segment))


def described(segment: RemoteLogSegmentMetadataRecord) -> str:
    """For messages and reports."""
    where = f"{segment.start_offset}-{segment.end_offset}"
    return f"segment {segment.id} [{where}] of {segment.partition.name} ({uuid_text(segment.partition.topic_id)}), {segment.state}"


def _start_offset(segment: RemoteLogSegmentMetadataRecord) -> int:
    return segment.start_offset
