"""What became of transactions, for readers that see only a part of the log.

The outcome of a batch is told by the first marker of its producer behind it, as the cleaner's own fold has it. Within a piece of the log
that fold finds it; what is still open at the piece's end is looked up in the markers behind it, which are read only as far as needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from compactor.cleaner.passes.outcomes import UNDECIDED, Flags, fold_outcomes
from compactor.consumer.pieces import Piece, PiecesAhead, SegmentReader
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import ABORT, COMMIT, NOT_CONTROL

MOST_HELD: Final = 4
"""Pieces that were read ahead and are kept for the reader, which will come to them."""


class TransactionOutcomes:
    """Verdicts for pieces that are read in one direction.

    :param behind: live segments that end at or above an offset, by a fresh fold.
    :param open_segment: how to read one; ``pieces``: where its pieces come from.
    """

    def __init__(
        self,
        behind: Callable[[int], Sequence[RemoteLogSegmentMetadata]],
        open_segment: Callable[[RemoteLogSegmentMetadata], SegmentReader],
        pieces: PiecesAhead,
    ) -> None:
        self._behind = behind
        self._open_segment = open_segment
        self._pieces = pieces
        self._markers: dict[int, deque[tuple[int, int]]] = {}
        """Producer -> (offset, kind) of markers behind where the reader is, ascending."""
        self._frontier = -1
        self._ahead: Iterator[Piece] | None = None
        self._held: dict[tuple[str, int], Piece] = {}

    def piece(self, reader: SegmentReader, position: int) -> Piece:
        """The piece at that position: what was read ahead is not fetched again."""
        held = self._held.pop((reader.metadata.id, position), None)
        return held or self._pieces.take(reader, position)

    def holds(self, reader: SegmentReader, position: int) -> bool:
        """Whether ``piece`` would not have to wait."""
        return (reader.metadata.id, position) in self._held

    def aborted(self, piece: Piece) -> Flags:
        """One flag per batch: data of a transaction whose marker is ABORT. Raises NotFound where a segment went while it was needed."""
        table = piece.source.table
        if not len(table):
            return np.zeros(0, np.bool_)
        ids, producer = np.unique(table.producer_id, return_inverse=True)
        producer = producer.astype(np.int64)
        transactional = table.is_transactional & (table.producer_id >= 0)
        kinds = fold_outcomes(table.control, transactional, producer, np.full(len(ids), UNDECIDED, np.int64))
        last = int(table.last_offset[-1])
        still = transactional & (table.control == NOT_CONTROL) & (kinds == UNDECIDED)
        behind = np.full(len(ids), UNDECIDED, np.int8)
        for index in np.unique(producer[still]).tolist():
            behind[index] = self._first_marker(int(ids[index]), last, piece)
        kinds[still] = behind[producer[still]]
        aborted: Flags = kinds == ABORT
        return aborted

    def passed_backwards(self, piece: Piece) -> None:
        """The reader goes on before this piece: of each producer only its first marker counts from now on."""
        table = piece.source.table
        markers = np.flatnonzero((table.control == ABORT) | (table.control == COMMIT))
        if self._frontier < 0 and len(table):
            self._start_behind(piece)
        for batch in reversed(markers.tolist()):
            self._markers[int(table.producer_id[batch])] = deque([(int(table.last_offset[batch]), int(table.control[batch]))])

    def fold_again(self) -> None:
        """A segment went: what is read ahead from now on comes from a fresh fold."""
        self._ahead = None
        self._held.clear()

    def _first_marker(self, producer_id: int, last: int, piece: Piece) -> int:
        if self._frontier <= last:
            self._start_behind(piece)
        while True:
            known = self._markers.get(producer_id)
            while known and known[0][0] <= last:
                known.popleft()
            if known:
                return known[0][1]
            if not self._read_on():
                return UNDECIDED

    def _start_behind(self, piece: Piece) -> None:
        self._frontier = int(piece.source.table.last_offset[-1]) + 1
        self._ahead = self._pieces_from(piece.metadata.id, piece.end)

    def _read_on(self) -> bool:
        """Takes up the markers of the next piece ahead; False at the log's end."""
        if self._ahead is None:
            self._ahead = self._pieces_from("", 0)
        piece = next(self._ahead, None)
        if piece is None:
            return False
        table = piece.source.table
        markers = np.flatnonzero(((table.control == ABORT) | (table.control == COMMIT)) & (table.last_offset >= self._frontier))
        for batch in markers.tolist():
            mine = self._markers.setdefault(int(table.producer_id[batch]), deque())
            mine.append((int(table.last_offset[batch]), int(table.control[batch])))
        if len(table):
            self._frontier = max(self._frontier, int(table.last_offset[-1]) + 1)
        if len(self._held) < MOST_HELD:
            self._held[piece.metadata.id, piece.position] = piece
        return True

    def _pieces_from(self, segment_id: str, position: int) -> Iterator[Piece]:
        """Pieces that reach to the frontier or beyond; the named segment from the given position on."""
        for metadata in self._behind(self._frontier):
            reader = self._open_segment(metadata)
            at = position if metadata.id == segment_id else reader.position_of(self._frontier)
            while at < metadata.size_bytes:
                piece = self._pieces.look(reader, at)
                yield piece
                at = piece.end
