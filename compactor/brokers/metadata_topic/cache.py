"""Segment metadata of one partition, folded as brokers do (Kafka's RemoteLogMetadataCache and RemoteLogLeaderEpochState, 3.7 to 4.x).

Records are applied in order, each once (``applied`` is the metadata topic offset of the last one). A record that brokers drop with a
log line results in a Finding; a record at which a broker's consumer stops raises BadData.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import MutableMapping
from enum import StrEnum
from typing import NamedTuple

from typing_extensions import override

from checkpoint.lineage import EpochEntry
from compactor.brokers.metadata_topic.codec import (
    TOPIC,
    MetadataRecord,
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    RemoteLogSegmentMetadataUpdateRecord,
    TopicIdPartition,
)
from compactor.constants import LeaderEpoch, Offset
from compactor.errors import BadData
from compactor.model.ids import encode_segment_id
from compactor.model.segment import TRANSITIONS, SegmentState

EpochAndStartOffset = tuple[int, int]
MAX_FINISHED_IDS = 4096
"""How many finished ids a partition remembers, newest last: a zombie's late records come within its delivery timeout, not years later."""


class SuspiciousRecordFindingKind(StrEnum):
    """Kinds of metadata records that brokers ignore or should not have received."""

    DROPPED_TRANSITION = "dropped-transition"
    """An ERROR line in every broker's log, again at every replay."""
    UNKNOWN_SEGMENT = "unknown-segment"
    """An update of an id that nobody introduced, or that is finished."""
    REVIVED = "revived"
    """A finished id was introduced again: its objects are gone or about to be."""


class SuspiciousRecordFinding(NamedTuple):
    """Metadata record that brokers ignored or that should not have been written.

    offset: offset of the record in the metadata topic.
    segment_id: 16 bytes.
    """

    kind: SuspiciousRecordFindingKind
    partition: TopicIdPartition
    segment_id: bytes
    offset: int
    detail: str

    @override
    def __str__(self) -> str:
        return f"{self.partition}, segment {encode_segment_id(self.segment_id)}, record at {self.offset}: {self.detail}"


class LeaderEpochSegments:
    """Segments of one leader epoch (Kafka's RemoteLogLeaderEpochState).

    starts, ids: start offsets within this epoch, ascending, and segment ids (16 bytes) of readable segments.
    unreferenced: ids of segments that no lookup finds.
    highest: largest offset that was tiered in this epoch, or None.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ids: list[bytes] = []
        self.unreferenced: dict[bytes, None] = {}
        self.highest: int | None = None

    def segment_id_at_or_before(self, offset: int) -> bytes | None:
        """Return the id of the readable segment with the largest start at or below ``offset``, or None."""
        at = bisect_right(self.starts, offset) - 1
        return self.ids[at] if at >= 0 else None

    def apply_copy_started(self, raw_id: bytes) -> None:
        """Record that the copy of a segment has started, so that no lookup finds it yet."""
        self.unreferenced[raw_id] = None

    def apply_copy_finished(self, start_offset_in_epoch: int, raw_id: bytes, last_offset_in_epoch: int) -> None:
        """Make a segment readable.

        If the segment reaches the epoch's highest offset, all segments that begin at or after its start become unreferenced (no lookup
        finds them).

        :param start_offset_in_epoch: the segment's first offset in this epoch.
        :param raw_id: id of the segment, 16 bytes.
        :param last_offset_in_epoch: the segment's last offset in this epoch, inclusive.
        """
        while (
            self.starts and self.starts[-1] >= start_offset_in_epoch and self.highest is not None and self.highest <= last_offset_in_epoch
        ):
            self.starts.pop()
            self.unreferenced[self.ids.pop()] = None
        at = bisect_left(self.starts, start_offset_in_epoch)
        if at < len(self.starts) and self.starts[at] == start_offset_in_epoch:
            self.ids[at] = raw_id  # whoever was there is in no list of this epoch from here
        else:
            self.starts.insert(at, start_offset_in_epoch)
            self.ids.insert(at, raw_id)
        self.unreferenced.pop(raw_id, None)
        if self.highest is None or last_offset_in_epoch > self.highest:
            self.highest = last_offset_in_epoch

    def apply_delete_started(self, start_offset_in_epoch: int, raw_id: bytes) -> None:
        """Make a segment unreadable: lookups no longer find it."""
        at = bisect_left(self.starts, start_offset_in_epoch)
        if at < len(self.starts) and self.starts[at] == start_offset_in_epoch and self.ids[at] == raw_id:
            del self.starts[at], self.ids[at]
        self.unreferenced[raw_id] = None

    def apply_delete_finished(self, raw_id: bytes) -> None:
        """Remove a segment whose deletion is finished."""
        self.unreferenced.pop(raw_id, None)

    def copy(self) -> LeaderEpochSegments:
        """Return a copy of this leader epoch's segments. Changes to the copy do not affect the original, and vice versa."""
        other = LeaderEpochSegments()
        other.starts, other.ids, other.unreferenced = list(self.starts), list(self.ids), dict(self.unreferenced)
        other.highest = self.highest
        return other


class RemoteLogMetadataCache:
    """Segments of one partition by id and by leader epoch, computed from metadata records.

    :param partition: records of other partitions raise ValueError.
    :param segments: mapping that stores the segments by id (16 bytes).
    """

    def __init__(self, partition: TopicIdPartition, segments: MutableMapping[bytes, RemoteLogSegmentMetadataRecord] | None = None) -> None:
        self.partition = partition
        self.applied = -1
        self.segments: MutableMapping[bytes, RemoteLogSegmentMetadataRecord] = {} if segments is None else segments
        self.epochs: dict[int, LeaderEpochSegments] = {}
        self.finished: dict[bytes, None] = {}
        self.deletion: PartitionDeleteState | None = None

    def copy(self) -> RemoteLogMetadataCache:
        """Return a copy. Records that are applied to it do not change the original."""
        other = RemoteLogMetadataCache(self.partition)
        other.applied, other.deletion = self.applied, self.deletion
        other.segments, other.finished = dict(self.segments), dict(self.finished)
        other.epochs = {epoch: state.copy() for epoch, state in self.epochs.items()}
        return other

    def apply_record(self, record: MetadataRecord, record_offset: int, *, topic: str = TOPIC) -> SuspiciousRecordFinding | None:
        """Apply one record, and return a SuspiciousRecordFinding if brokers would ignore it, else None. Raises BadData if brokers would
        stop consuming at it.

        :param record_offset: offset of the record in the metadata topic. A record at or below ``applied`` is ignored.
        :param topic: name of the metadata topic partition, for messages.
        """
        if record.partition.topic_id != self.partition.topic_id or record.partition.partition != self.partition.partition:
            raise ValueError(f"a record of {record.partition} for {self.partition}")
        if record_offset <= self.applied:
            return None
        finding = None
        if isinstance(record, RemoteLogSegmentMetadataRecord):
            finding = self._add_segment(record, record_offset)
        elif isinstance(record, RemoteLogSegmentMetadataUpdateRecord):
            finding = self._update_segment(record, record_offset, topic)
        else:
            self.deletion = record.state
            if record.state is PartitionDeleteState.DELETE_PARTITION_FINISHED:
                self.segments.clear()
                self.epochs.clear()
        self.applied = record_offset
        return finding

    def find_segment(self, epoch: int, offset: int) -> RemoteLogSegmentMetadataRecord | None:
        """Return the readable segment that holds an offset of this epoch (Kafka's remoteLogSegmentMetadata), or None if there is none."""
        state = self.epochs.get(epoch)
        raw_id = state.segment_id_at_or_before(offset) if state else None
        found = self.segments.get(raw_id) if raw_id else None
        return found if found is not None and offset <= last_offset_of_epoch(found, LeaderEpoch(epoch)) else None

    def list_segments(self) -> list[RemoteLogSegmentMetadataRecord]:
        """Return all segments that are not deleted, in the order of introduction (Kafka's listAllRemoteLogSegments)."""
        return list(self.segments.values())

    def _add_segment(self, record: RemoteLogSegmentMetadataRecord, record_offset: int) -> SuspiciousRecordFinding | None:
        """Apply a record that introduces a segment. Return a finding if brokers would ignore the record or the segment was deleted before,
        else None.
        """
        existing = self.segments.get(record.segment_id)
        if existing is not None and existing.state is not record.state:
            return self._dropped_transition_finding(existing.state, record.state, record.segment_id, record_offset)
        for epoch, _ in epoch_start_offsets(record):
            self.epochs.setdefault(epoch, LeaderEpochSegments()).apply_copy_started(record.segment_id)
        self.segments[record.segment_id] = record
        if record.segment_id in self.finished:
            message = "a segment whose deletion was finished is introduced again"
            return SuspiciousRecordFinding(SuspiciousRecordFindingKind.REVIVED, self.partition, record.segment_id, record_offset, message)
        return None

    def _update_segment(
        self, update: RemoteLogSegmentMetadataUpdateRecord, record_offset: int, topic: str
    ) -> SuspiciousRecordFinding | None:
        """Apply a record that changes a segment's state. Return a finding if brokers would ignore the record, else None. Raises BadData if
        brokers would stop at it.
        """
        existing = self.segments.get(update.segment_id)
        if existing is None:
            what = "is finished" if update.segment_id in self.finished else "was never introduced"
            message = f"{update.state} of a segment that {what}"
            return SuspiciousRecordFinding(
                SuspiciousRecordFindingKind.UNKNOWN_SEGMENT, self.partition, update.segment_id, record_offset, message
            )
        if update.state is not existing.state and update.state not in TRANSITIONS[existing.state]:
            return self._dropped_transition_finding(existing.state, update.state, update.segment_id, record_offset)
        if update.state is SegmentState.COPY_SEGMENT_STARTED:
            raise BadData(
                f"segment {update.id} of {self.partition} is updated to COPY_SEGMENT_STARTED",
                segment=topic,
                offset=record_offset,
                hint="Brokers stop reading the topic at such a record, and again at every restart",
            )
        found = existing.with_update(update)
        for epoch, start in epoch_start_offsets(found):
            state = self.epochs.setdefault(epoch, LeaderEpochSegments())
            if update.state is SegmentState.COPY_SEGMENT_FINISHED:
                state.apply_copy_finished(start, update.segment_id, last_offset_of_epoch(found, LeaderEpoch(epoch)))
            elif update.state is SegmentState.DELETE_SEGMENT_STARTED:
                state.apply_delete_started(start, update.segment_id)
            else:
                state.apply_delete_finished(update.segment_id)
        if update.state is SegmentState.DELETE_SEGMENT_FINISHED:
            del self.segments[update.segment_id]
            self._remember_deleted_id(update.segment_id)
        else:
            self.segments[update.segment_id] = found
        return None

    def _dropped_transition_finding(
        self, before: SegmentState, after: SegmentState, raw_id: bytes, record_offset: int
    ) -> SuspiciousRecordFinding:
        """Return the finding for a record that brokers drop because the state transition from ``before`` to ``after`` is invalid.

        :param raw_id: id of the segment, 16 bytes.
        :param record_offset: offset of the record in the metadata topic.
        """
        message = f"{before} cannot become {after}; brokers drop the record with an ERROR line"
        return SuspiciousRecordFinding(SuspiciousRecordFindingKind.DROPPED_TRANSITION, self.partition, raw_id, record_offset, message)

    def _remember_deleted_id(self, raw_id: bytes) -> None:
        """Remember the id of a deleted segment; only the newest MAX_FINISHED_IDS are remembered."""
        self.finished.pop(raw_id, None)
        self.finished[raw_id] = None
        while len(self.finished) > MAX_FINISHED_IDS:
            del self.finished[next(iter(self.finished))]

    @override
    def __str__(self) -> str:
        return f"{self.partition}: {len(self.segments)} segments"


def epoch_start_offsets(segment: RemoteLogSegmentMetadataRecord) -> list[EpochAndStartOffset]:
    """Return the segment's leader epochs and their first offsets in it, sorted by epoch."""
    entries = segment.leader_epochs
    if len(entries) == 1:
        return [(entries[0].epoch, entries[0].start_offset)]
    return sorted({entry.epoch: entry.start_offset for entry in entries}.items())


def last_offset_of_epoch(segment: RemoteLogSegmentMetadataRecord, epoch: LeaderEpoch) -> int:
    """Return the last offset, inclusive, that the segment has of this leader epoch."""
    for later, start in epoch_start_offsets(segment):
        if later > epoch:
            return start - 1
    return segment.end_offset


def segment_lineage(segment: RemoteLogSegmentMetadataRecord) -> tuple[EpochEntry, ...]:
    """Return the leader epochs of a segment with the first offset of each."""
    return tuple(EpochEntry(LeaderEpoch(epoch), Offset(start)) for epoch, start in epoch_start_offsets(segment))
