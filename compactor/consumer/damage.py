"""Damage that a reader meets in a live segment: which offsets cannot be read, and where reading can go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from compactor.cleaner.passes.source import SourceSegment
from compactor.consumer.pieces import SegmentGone, SegmentPiece, SegmentReader
from compactor.errors import BadData
from compactor.kernels.common import Flags
from compactor.model.ids import TopicPartition

_LOG = logging.getLogger(__name__)
_PROBE_BYTES = 1 << 16
CRC_MISMATCH = "the CRC does not match"
UNDECIDABLE = "the outcome of their transactions cannot be read, because what follows is damaged"


class BatchPositionAndFirstOffset(NamedTuple):
    """Byte position in a segment's log where a batch begins, with the first offset of that batch."""

    byte_position: int
    offset: int


class DamagedOffsetRange(NamedTuple):
    """Range of offsets that cannot be read, with the reason.

    first, last: both inclusive.
    segment: name of the object.
    position: byte position of the damage in the object; -1 if unknown.
    """

    first: int
    last: int
    reason: str
    segment: str
    position: int = -1

    def to_bad_data_error(self, partition: TopicPartition) -> BadData:
        """Return the BadData to raise for this range if damage is not skipped."""
        hint = (
            f"`verify {partition}` names all damage, `explain {partition}` what helps. The other records are read with --skip-damaged "
            "(cat, export), skip_damaged (consumer) or skipDamaged (Spark)"
        )
        cause = f"{self.reason}, so that offsets {self.first} to {self.last} cannot be read"
        offset = self.first if self.position >= 0 else -1
        return BadData(cause, segment=self.segment, position=self.position, offset=offset, hint=hint)


def write_damage_warning_to_log(damage: DamagedOffsetRange) -> None:
    """Write a warning to the log about offsets that are skipped because they cannot be read."""
    _LOG.warning("offsets %d to %d of %s are skipped: %s", *damage[:2], damage.segment, damage.reason)


def flag_damaged_batches(piece: SegmentPiece, wanted_batches: Flags) -> Flags:
    """Return a flag for each batch of a piece (whole batches of a segment): whether its CRC is known not to match its bytes.

    The CRCs of the wanted batches, and of batches between them, are checked unless they were checked before. Other batches are not flagged.
    """
    source, found = piece.source, piece.damaged
    for first, last in source.split_batches_by_magic_and_compression():
        if wanted_batches[first:last].any() and not _has_valid_crcs(source, first, last):
            found[first:last] |= [not _has_valid_crcs(source, batch, batch + 1) for batch in range(first, last)]
            source.verified[first:last] = True
    return found


def _has_valid_crcs(source: SourceSegment, first_batch: int, end_batch: int) -> bool:
    """Return whether the CRCs of all batches from ``first_batch`` up to ``end_batch`` (exclusive) match."""
    try:
        source.verify_batch_crcs_unless_verified(first_batch, end_batch)
    except BadData:
        return False
    return True


def damaged_offset_ranges(
    piece: SegmentPiece, damaged_batches: Flags, reason: str, first_offset: int, last_offset: int
) -> Iterator[DamagedOffsetRange]:
    """Yield the offset ranges of the flagged batches, neighbours as one range, limited to ``first_offset`` to ``last_offset``
    (inclusive).
    """
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


def read_whole_batches_before_damage(reader: SegmentReader, position: int, error: BadData) -> SegmentPiece | None:
    """Return the whole batches from byte ``position`` up to the damage that ``error`` reports, or None if there are none.

    If the damaged batch's base offset is not greater than the offsets of the batch before it, the batch before it is left out, too: no CRC
    covers base offsets, so either of the two may be the damaged one.
    """
    if error.position <= position:
        return None
    try:
        piece = reader.read_piece_at_byte_position(position, error.position - position)
        table = piece.source.table
        if 0 <= error.offset <= table.last_offset[-1]:
            piece = reader.read_piece_at_byte_position(position, int(table.position[-1]))
    except BadData:
        return None
    return piece if piece.end_byte_position <= error.position else None


def find_next_readable_batch_after_damage(
    reader: SegmentReader, damaged_position: int, first_unread_offset: int
) -> BatchPositionAndFirstOffset:
    """Return byte position and first offset of the next readable batch after a damaged one, found through the offset index. If no later
    batch can be read, return the segment's end.

    :param damaged_position: byte position of the damaged batch.
    :param first_unread_offset: first offset that was not read yet.
    """
    metadata = reader.metadata
    for at in reader.offset_index_positions_after(damaged_position):
        try:
            piece = reader.read_piece_at_byte_position(at, _PROBE_BYTES)
        except (BadData, SegmentGone):
            continue
        table = piece.source.table
        if len(table) and first_unread_offset <= table.base_offset[0] <= metadata.end_offset and _has_valid_crcs(piece.source, 0, 1):
            return BatchPositionAndFirstOffset(at, int(table.base_offset[0]))
    return BatchPositionAndFirstOffset(metadata.size_bytes, metadata.end_offset + 1)
