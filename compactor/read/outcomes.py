"""Outcomes of transactions for readers that see only a part of the log, and damage and changes of the log.
The outcome of a batch is that of its producer's first marker after it. For transactions that are open at the end of the piece, later pieces
are read until the markers are found.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from checkpoint.lineage import Lineage, first_divergent_offset, truncate_lineage_at
from compactor.access.tier import Tier
from compactor.cleaner.retention import UNDECIDED, find_outcomes_in_columns
from compactor.cleaner.source import SourceSegment
from compactor.constants import EMPTY_TOPIC_ID, MAX_OFFSET, LeaderEpoch, TopicId
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.kernels.common import Flags
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.read.pieces import PiecePrefetcher, SegmentGone, SegmentPiece, SegmentReader
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL

# ---- damage in a live segment: which offsets cannot be read, and where reading can go on ---------------------------------------


_LOG = logging.getLogger(__name__)
_PROBE_BYTES = 1 << 16
CRC_MISMATCH = "the CRC does not match"
UNDECIDABLE = "the outcome of their transactions cannot be read, because what follows is damaged"


class BatchPositionAndFirstOffset(NamedTuple):
    """Byte position of a batch in a segment's log, with the batch's first offset."""

    byte_position: int
    offset: int


class DamagedOffsetRange(NamedTuple):
    """Range of offsets that cannot be read.
    first, last: both inclusive.
    position: in bytes; -1 if unknown.
    """

    first: int
    last: int
    reason: str
    segment: str
    position: int = -1

    def to_bad_data_error(self, partition: TopicPartition) -> BadData:
        """The error to raise if damage is not skipped."""
        hint = (
            f"`verify {partition}` names all damage, `explain {partition}` what helps. The other records are read with --skip-damaged "
            "(cat, export), skip_damaged (consumer) or skipDamaged (Spark)"
        )
        cause = f"{self.reason}, so that offsets {self.first} to {self.last} cannot be read"
        offset = self.first if self.position >= 0 else -1
        return BadData(cause, segment=self.segment, position=self.position, offset=offset, hint=hint)


def log_damage(damage: DamagedOffsetRange) -> None:
    _LOG.warning("offsets %d to %d of %s are skipped: %s", *damage[:2], damage.segment, damage.reason)


def flag_damaged_batches(piece: SegmentPiece, wanted_batches: Flags) -> Flags:
    """The CRCs of the wanted batches, and of batches between them, are checked unless they were checked before."""
    source, found = piece.source, piece.damaged
    for first, last in source.split_by_kind():
        if wanted_batches[first:last].any() and not _has_valid_crcs(source, first, last):
            found[first:last] |= [not _has_valid_crcs(source, batch, batch + 1) for batch in range(first, last)]
            source.verified[first:last] = True
    return found


def _has_valid_crcs(source: SourceSegment, first_batch: int, end_batch: int) -> bool:
    try:
        source.verify_batches(first_batch, end_batch)
    except BadData:
        return False
    return True


def damaged_offset_ranges(
    piece: SegmentPiece, damaged_batches: Flags, reason: str, first_offset: int, last_offset: int
) -> Iterator[DamagedOffsetRange]:
    """Neighbours are one range; bounds are inclusive."""
    table = piece.source.table
    places = np.flatnonzero(damaged_batches)
    for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        if len(run):
            # The base offset of a compressed v0/v1 wrapper is not known, so that the damage begins after the batch before it.
            begin = int(table.last_offset[run[0] - 1]) + 1 if run[0] else int(max(table.base_offset[0], piece.metadata.start_offset))
            position = piece.position + int(table.position[run[0]])
            yield DamagedOffsetRange(
                max(first_offset, begin), min(last_offset, int(table.last_offset[run[-1]])), reason, piece.source.name, position
            )


def read_before_damage(reader: SegmentReader, position: int, error: BadData) -> SegmentPiece | None:
    """Whole batches from byte ``position`` up to the damage, or None.
    If the damaged batch's base offset is not greater than the offsets of the batch before it, that batch is left out, too: no CRC covers
    base offsets, so either may be the damaged one.
    """
    if error.position <= position:
        return None
    try:
        piece = reader.read_piece(position, error.position - position)
        table = piece.source.table
        if 0 <= error.offset <= table.last_offset[-1]:
            piece = reader.read_piece(position, int(table.position[-1]))
    except BadData:
        return None
    return piece if piece.end_byte_position <= error.position else None


def find_readable_after(reader: SegmentReader, damaged_position: int, first_unread_offset: int) -> BatchPositionAndFirstOffset:
    """Next readable batch by the offset index, or the segment's end."""
    metadata = reader.metadata
    for at in reader.offset_index_positions_after(damaged_position):
        try:
            piece = reader.read_piece(at, _PROBE_BYTES)
        except (BadData, SegmentGone):
            continue
        table = piece.source.table
        if len(table) and first_unread_offset <= table.base_offset[0] <= metadata.end_offset and _has_valid_crcs(piece.source, 0, 1):
            return BatchPositionAndFirstOffset(at, int(table.base_offset[0]))
    return BatchPositionAndFirstOffset(metadata.size_bytes, metadata.end_offset + 1)


# ---- comparison of a log with what a reader has read before, by topic ids and leader epochs (KIP-320) --------------------------
# After an unclean election, or after a topic was deleted and created again, other records can have the same offsets.


class LeaderEpochEnd(NamedTuple):
    """A leader epoch with its exclusive end offset."""

    epoch: LeaderEpoch
    end: int


@dataclass(frozen=True)
class ConsumedLogHistory:
    """Records that a reader has read of a log.
    topic_id: empty if unknown.
    epochs: ascending; empty if unknown. After a restart, only the last one is known.
    end: everything below this offset was read.
    """

    topic_id: TopicId
    epochs: tuple[LeaderEpochEnd, ...]
    end: int

    @property
    def last_read_leader_epoch(self) -> LeaderEpoch | None:
        return self.epochs[-1].epoch if self.epochs else None

    def consumed_history_below_offset(self, offset: int) -> ConsumedLogHistory:
        """The part of this history below ``offset`` (exclusive)."""
        begun = sum(known.end < offset for known in self.epochs) + 1
        return ConsumedLogHistory(
            self.topic_id, tuple(LeaderEpochEnd(epoch, min(end, offset)) for epoch, end in self.epochs[:begun]), offset
        )


@dataclass(frozen=True)
class LogIdentity:
    """Identity by which logs are compared without reading their records.
    topic_id, lineage: empty if unknown.
    end: exclusive.
    """

    topic_id: TopicId = EMPTY_TOPIC_ID
    lineage: Lineage = ()
    end: int = 0

    def consumed_history_below_offset(self, offset: int) -> ConsumedLogHistory:
        """History of a reader of this log up to ``offset`` (exclusive)."""
        begun = truncate_lineage_at(self.lineage, offset)
        ends = [*(entry.start_offset for entry in begun[1:]), offset]
        return ConsumedLogHistory(
            self.topic_id, tuple(LeaderEpochEnd(entry.epoch, end) for entry, end in zip(begun, ends, strict=False)), offset
        )


@dataclass(frozen=True)
class HistoryMismatchReason:
    """Reason why a log does not continue what was read.
    reason: ``topic``: it is another topic's; ``older``: it ends in an earlier leader epoch than what was read; ``truncated``: a later
    leader has discarded records that were read.
    agreed_offset: for ``truncated``: the log holds what was read up to this offset (exclusive); otherwise -1.
    """

    reason: Literal["topic", "older", "truncated"]
    agreed_offset: int = -1


def log_identity(tier: Tier, state: PartitionState) -> LogIdentity:
    return LogIdentity(state.topic_id or tier.metadata.topic_id(state.topic_partition), state.lineage, state.end_offset + 1)


def consumed_history_before_position(offset: int, leader_epoch: int | None, topic_id: str) -> ConsumedLogHistory:
    """History of a reader of which only a position is known, as after a restart.
    :param leader_epoch: of the record before ``offset``; None or negative if unknown.
    """
    known = leader_epoch is not None and leader_epoch >= 0 and offset > 0
    return ConsumedLogHistory(TopicId(topic_id), (LeaderEpochEnd(LeaderEpoch(leader_epoch or 0), offset),) if known else (), offset)


def topic_ids_differ(first_id: TopicId, second_id: TopicId) -> bool:
    """True if topic ids are known to differ; an empty id is unknown."""
    return bool(first_id and second_id and first_id != second_id)


def find_log_mismatch(consumed_history: ConsumedLogHistory, log: LogIdentity) -> HistoryMismatchReason | None:
    """Reason why ``log`` does not continue the records that were read; None also if too little is known.
    Records of one leader epoch are the same in all logs of a partition, and so are all records before them. Therefore two logs agree up to
    the end of the largest epoch that both have. An epoch of ``log`` ends where the next one begins (OffsetsForLeaderEpoch). The last one
    has no known end, because the tier ends earlier than the broker's log.
    """
    if topic_ids_differ(consumed_history.topic_id, log.topic_id):
        return HistoryMismatchReason("topic")
    if not consumed_history.epochs or not log.lineage:
        return None
    starts = [entry.start_offset for entry in log.lineage]
    ends = dict(zip((entry.epoch for entry in log.lineage), [*starts[1:], MAX_OFFSET], strict=True))
    if log.lineage[-1].epoch < consumed_history.epochs[-1].epoch:
        return HistoryMismatchReason("older") if log.end >= consumed_history.end else None
    common = next((known for known in reversed(consumed_history.epochs) if known.epoch in ends), None)
    if common is not None:
        agreed = min(common.end, ends[common.epoch])
    else:
        # A restored position whose epoch the log does not have: as in Kafka, assume that they agree up to the log's next epoch.
        agreed = next(entry.start_offset for entry in log.lineage if entry.epoch > consumed_history.epochs[0].epoch)
        agreed = agreed if agreed < consumed_history.end else starts[0]
    return HistoryMismatchReason("truncated", agreed) if agreed < consumed_history.end else None


def first_diverging_offset(old_log: LogIdentity, new_log: LogIdentity, end_offset: int) -> int | None:
    """First offset below ``end_offset`` at which the logs differ, or None."""
    if topic_ids_differ(old_log.topic_id, new_log.topic_id):
        return 0
    return first_divergent_offset(old_log.lineage, end_offset, new_log.lineage, new_log.end)


UNKNOWN: Final = -2
"""Outcome of a transaction whose marker may lie in damaged bytes, beside ABORT, COMMIT and UNDECIDED."""
MAX_HELD_PIECES: Final = 4
"""Number of pieces, read to find markers, that are held for the reader, which needs them next."""
BatchOutcomes = npt.NDArray[np.int8]
"""For each batch of a piece: ABORT, COMMIT, UNDECIDED or UNKNOWN."""


class TransactionOutcomeFinder:
    """Finder of transaction outcomes for a reader of pieces, in one direction.
    :param list_segments_from: live segments that end at or after an offset, by a new read.
    """

    def __init__(
        self,
        list_segments_from: Callable[[int], Sequence[RemoteLogSegmentMetadata]],
        open_segment: Callable[[RemoteLogSegmentMetadata], SegmentReader],
        pieces: PiecePrefetcher,
    ) -> None:
        self._list_segments_from = list_segments_from
        self._open_segment_reader = open_segment
        self._pieces = pieces
        self._markers: dict[int, deque[tuple[int, int]]] = {}
        """Producer id -> (offset, kind) of its markers after the reader's position, ascending."""
        self._frontier = -1
        self._ahead: Iterator[SegmentPiece] | None = None
        self._held: dict[tuple[str, int], SegmentPiece] = {}
        self._is_damaged_ahead = False

    def read_piece(self, reader: SegmentReader, position: int, piece_bytes: int) -> SegmentPiece:
        """A piece that was read for its markers is not fetched again, and may have more bytes."""
        held = self._held.pop((reader.metadata.id, position), None)
        return held or self._pieces.take_piece(reader, position, piece_bytes)

    def is_segment_piece_loaded(self, reader: SegmentReader, position: int) -> bool:
        return (reader.metadata.id, position) in self._held

    def find_outcomes(self, piece: SegmentPiece) -> BatchOutcomes:
        """For each batch ABORT, COMMIT, UNDECIDED (open, or no transaction), or UNKNOWN (the marker is damaged or lost). Raises NotFound if
        a needed segment was deleted meanwhile.
        """
        table = piece.source.table
        if not len(table):
            return np.zeros(0, np.int8)
        ids, producer = np.unique(table.producer_id, return_inverse=True)
        producer = producer.astype(np.int64)
        transactional = table.transactional_flags & (table.producer_id >= 0)
        kinds = find_outcomes_in_columns(table.control, transactional, producer, np.full(len(ids), UNDECIDED, np.int64))
        still = transactional & (table.control == NOT_CONTROL) & (kinds == UNDECIDED)
        later = np.full(len(ids), UNDECIDED, np.int8)
        for index in np.unique(producer[still]).tolist():
            later[index] = self._find_open_outcome(piece, int(ids[index]))
        kinds[still] = later[producer[still]]
        markers = table.control != NOT_CONTROL
        for batch in np.flatnonzero(markers & flag_damaged_batches(piece, markers)).tolist():
            # The kind of a marker whose checksum does not match is not known.
            same = np.flatnonzero(table.producer_id[:batch] == table.producer_id[batch])
            ends = same[markers[same]]
            kinds[same[same > ends[-1]] if len(ends) else same] = UNKNOWN
        kinds[~(transactional & ~markers)] = UNDECIDED
        return kinds

    def drop_unneeded_markers(self, piece: SegmentPiece) -> None:
        """A backward reader needs only the first marker of each producer in the piece."""
        table = piece.source.table
        markers = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT))
        if self._frontier < 0 and len(table):
            self._start_reading_markers_after(piece)
        for batch in reversed(markers.tolist()):
            self._markers[int(table.producer_id[batch])] = deque([(int(table.last_offset[batch]), int(table.control[batch]))])

    def drop_prefetched_pieces(self) -> None:
        """Called when a segment was replaced."""
        self._ahead = None
        self._held.clear()

    def _find_open_outcome(self, piece: SegmentPiece, producer_id: int) -> int:
        """UNDECIDED if no marker comes up to the log's end; UNKNOWN if a damaged segment may hold it."""
        last_offset = int(piece.source.table.last_offset[-1])
        if self._frontier <= last_offset:
            self._start_reading_markers_after(piece)
        while True:
            known = self._markers.get(producer_id)
            while known and known[0][0] <= last_offset:
                known.popleft()
            if known:
                return known[0][1]
            try:
                if not self._is_damaged_ahead and not self._try_read_next_markers():
                    return UNDECIDED
            except BadData:
                self._is_damaged_ahead = True
            if self._is_damaged_ahead:
                return UNKNOWN

    def record_lost_segment(self) -> None:
        """Outcomes that depend on markers in or after a lost segment are UNKNOWN until the reader has passed it."""
        self._is_damaged_ahead = True

    def _start_reading_markers_after(self, piece: SegmentPiece) -> None:
        self._is_damaged_ahead = False
        self._frontier = int(piece.source.table.last_offset[-1]) + 1
        self._ahead = self._unsearched_pieces(piece.metadata.id, piece.end_byte_position)

    def _try_read_next_markers(self) -> bool:
        if self._ahead is None:
            self._ahead = self._unsearched_pieces("", 0)
        piece = next(self._ahead, None)
        if piece is None:
            return False
        table = piece.source.table
        for batch in np.flatnonzero((table.control != NOT_CONTROL) & (table.last_offset >= self._frontier)).tolist():
            piece.source.verify_batches(batch, batch + 1)  # the kind of a damaged marker is not known
        markers = np.flatnonzero(((table.control == ABORT) | (table.control == COMMIT)) & (table.last_offset >= self._frontier))
        for batch in markers.tolist():
            mine = self._markers.setdefault(int(table.producer_id[batch]), deque())
            mine.append((int(table.last_offset[batch]), int(table.control[batch])))
        if len(table):
            self._frontier = max(self._frontier, int(table.last_offset[-1]) + 1)
        if len(self._held) < MAX_HELD_PIECES:
            self._held[piece.metadata.id, piece.position] = piece
        return True

    def _unsearched_pieces(self, segment_id: str, position: int) -> Iterator[SegmentPiece]:
        """Pieces ascend from the first offset whose markers have not been read."""
        for metadata in self._list_segments_from(self._frontier):
            reader = self._open_segment_reader(metadata)
            at = position if metadata.id == segment_id else reader.floor_position(self._frontier)
            while at < metadata.size_bytes:
                piece = self._pieces.peek_piece(reader, at)
                yield piece
                at = piece.end_byte_position
