"""Outcomes of transactions for readers that see only a part of the log.

The outcome of a batch is that of its producer's first marker after it. Within a piece, the cleaner's own rule finds it. For transactions
that are open at the end of the piece, later pieces are read until the markers are found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from compactor.cleaner.passes.outcomes import UNDECIDED, find_txn_outcomes_in_columns_and_update_next
from compactor.consumer.damage import flag_damaged_batches
from compactor.consumer.pieces import PiecePrefetcher, SegmentPiece, SegmentReader
from compactor.errors import BadData
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL

UNKNOWN: Final = -2
"""Outcome of a transaction whose marker may lie in damaged bytes, beside ABORT, COMMIT and UNDECIDED."""
MAX_HELD_PIECES: Final = 4
"""Number of pieces, read to find markers, that are held for the reader, which needs them next."""
TransactionOutcome = int
"""ABORT, COMMIT, UNDECIDED or UNKNOWN."""
BatchOutcomes = npt.NDArray[np.int8]
"""For each batch of a piece: ABORT, COMMIT, UNDECIDED or UNKNOWN."""


class TransactionOutcomeFinder:
    """Finder of transaction outcomes for a reader that reads a log piece by piece (some MiB of whole batches), in one direction. Reads
    transaction markers after the current piece where they are needed.

    :param list_segments_from: reads the control log again and returns the live segments that end at or after an offset.
    :param open_segment: returns a reader of a segment.
    :param pieces: source of pieces, which may prefetch them.
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

    def read_piece_at_byte_position(self, reader: SegmentReader, position: int) -> SegmentPiece:
        """Return the piece (whole batches) at a byte position of a segment. A piece that was read to find transaction markers is not
        fetched again.
        """
        held = self._held.pop((reader.metadata.id, position), None)
        return held or self._pieces.take_prefetched_or_fetch_piece(reader, position)

    def is_segment_piece_loaded(self, reader: SegmentReader, position: int) -> bool:
        """Return whether the batches (piece) at a position of a segment are in memory already."""
        return (reader.metadata.id, position) in self._held

    def find_transaction_outcomes_of_batches(self, piece: SegmentPiece) -> BatchOutcomes:
        """Return for each batch the outcome of its transaction: ABORT, COMMIT, UNDECIDED (open, or no transaction), or UNKNOWN (the marker
        is damaged or lost).

        Raises NotFound if a needed segment was deleted meanwhile.
        """
        table = piece.source.table
        if not len(table):
            return np.zeros(0, np.int8)
        ids, producer = np.unique(table.producer_id, return_inverse=True)
        producer = producer.astype(np.int64)
        transactional = table.transactional_flags & (table.producer_id >= 0)
        kinds = find_txn_outcomes_in_columns_and_update_next(table.control, transactional, producer, np.full(len(ids), UNDECIDED, np.int64))
        still = transactional & (table.control == NOT_CONTROL) & (kinds == UNDECIDED)
        later = np.full(len(ids), UNDECIDED, np.int8)
        for index in np.unique(producer[still]).tolist():
            later[index] = self._find_outcome_of_open_transaction(piece, int(ids[index]))
        kinds[still] = later[producer[still]]
        markers = table.control != NOT_CONTROL
        for batch in np.flatnonzero(markers & flag_damaged_batches(piece, markers)).tolist():
            # The kind of a marker whose checksum does not match is not known.
            same = np.flatnonzero(table.producer_id[:batch] == table.producer_id[batch])
            ends = same[markers[same]]
            kinds[same[same > ends[-1]] if len(ends) else same] = UNKNOWN
        kinds[~(transactional & ~markers)] = UNDECIDED
        return kinds

    def drop_markers_unneeded_before_piece(self, piece: SegmentPiece) -> None:
        """Drop transaction markers that a backward reader no longer needs when it goes on from this piece to the data before it. Of each
        producer that has markers in the piece, only its first marker there is kept.
        """
        table = piece.source.table
        markers = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT))
        if self._frontier < 0 and len(table):
            self._start_reading_markers_after(piece)
        for batch in reversed(markers.tolist()):
            self._markers[int(table.producer_id[batch])] = deque([(int(table.last_offset[batch]), int(table.control[batch]))])

    def drop_pieces_prefetched_to_find_markers(self) -> None:
        """Drop the batches that were read in advance to find transaction markers, because a segment was replaced."""
        self._ahead = None
        self._held.clear()

    def _find_outcome_of_open_transaction(self, piece: SegmentPiece, producer_id: int) -> TransactionOutcome:
        """Return the outcome of the transaction that a producer has open at the end of a piece, from its next marker: ABORT or COMMIT;
        UNDECIDED if there is none up to the log's end; UNKNOWN if a damaged segment may hold it.
        """
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

    def record_that_some_later_segment_is_lost(self) -> None:
        """Record that a segment after the current position is lost. Outcomes that depend on transaction markers in or after that segment
        are UNKNOWN until the reader has passed it.
        """
        self._is_damaged_ahead = True

    def _start_reading_markers_after(self, piece: SegmentPiece) -> None:
        """Begin to search for transaction markers at the first batch after this piece; markers that were found before stay known."""
        self._is_damaged_ahead = False
        self._frontier = int(piece.source.table.last_offset[-1]) + 1
        self._ahead = self._pieces_not_yet_searched_for_markers(piece.metadata.id, piece.end_byte_position)

    def _try_read_next_markers(self) -> bool:
        """Read the transaction markers of the next batches of the log and return True, or return False at the end of the log."""
        if self._ahead is None:
            self._ahead = self._pieces_not_yet_searched_for_markers("", 0)
        piece = next(self._ahead, None)
        if piece is None:
            return False
        table = piece.source.table
        for batch in np.flatnonzero((table.control != NOT_CONTROL) & (table.last_offset >= self._frontier)).tolist():
            piece.source.verify_batch_crcs_unless_verified(batch, batch + 1)  # the kind of a damaged marker is not known
        markers = np.flatnonzero(((table.control == ABORT) | (table.control == COMMIT)) & (table.last_offset >= self._frontier))
        for batch in markers.tolist():
            mine = self._markers.setdefault(int(table.producer_id[batch]), deque())
            mine.append((int(table.last_offset[batch]), int(table.control[batch])))
        if len(table):
            self._frontier = max(self._frontier, int(table.last_offset[-1]) + 1)
        if len(self._held) < MAX_HELD_PIECES:
            self._held[piece.metadata.id, piece.position] = piece
        return True

    def _pieces_not_yet_searched_for_markers(self, segment_id: str, position: int) -> Iterator[SegmentPiece]:
        """Yield the pieces of the log, ascending, from the first offset whose transaction markers have not been read yet.

        :param segment_id: id of the segment that is read from byte ``position`` on; later segments are read from the first offset that is
            needed.
        """
        for metadata in self._list_segments_from(self._frontier):
            reader = self._open_segment_reader(metadata)
            at = position if metadata.id == segment_id else reader.byte_position_at_or_before_offset(self._frontier)
            while at < metadata.size_bytes:
                piece = self._pieces.peek_prefetched_or_fetch_piece(reader, at)
                yield piece
                at = piece.end_byte_position
