"""Roles of a partition's live segments in a round, and the table of segments that the passes have opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from compactor.cleaner.retention import RetentionRules, TransactionVerdicts, transaction_verdicts_by_source
from compactor.cleaner.rewrite import NO_BYTES, substitute_segment, verdicts_from_substitute
from compactor.cleaner.source import SourceSegment
from compactor.errors import BadData
from compactor.local.budget import DiskSpaceReservation, round_up_to_blocks
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import BatchTable
from compactor.records.indexes import TXN_ENTRY
from compactor.round.partial import SegmentPartToRead, WholeSegmentReadNeededError
from compactor.round.ports import estimate_distinct_keys, estimate_record_count
from compactor.round.sources import StagedSegmentReader
from compactor.tier.sidecars import SidecarHead, SidecarStore


@dataclass(frozen=True)
class RoundRange:
    """Offsets from ``first_dirty`` to ``end`` (exclusive) are dirty: none if the round is due only for delete horizons."""

    first_dirty: int
    end: int
    rules: RetentionRules


@dataclass(frozen=True)
class SegmentRoles:
    """Positions (indexes into ``live``) of segments by their role in the round, ascending.

    behind: segments that begin after the round's end.
    heads: by segment id.
    """

    live: Sequence[RemoteLogSegmentMetadata]
    dirty: tuple[int, ...]
    clean: tuple[int, ...]
    behind: tuple[int, ...]
    heads: Mapping[str, SidecarHead]

    @staticmethod
    def assign_segment_roles(
        live_segments: Sequence[RemoteLogSegmentMetadata], round_range: RoundRange, sidecars: SidecarStore | None
    ) -> SegmentRoles:
        """Raises StoreError. ``sidecars``: None if they are switched off."""
        ids = [segment.id for segment in live_segments]
        return SegmentRoles(
            live_segments,
            dirty=tuple(
                n for n, s in enumerate(live_segments) if s.end_offset >= round_range.first_dirty and s.start_offset < round_range.end
            ),
            clean=tuple(
                n for n, s in enumerate(live_segments) if s.end_offset < round_range.first_dirty and s.start_offset < round_range.end
            ),
            behind=tuple(n for n, s in enumerate(live_segments) if s.start_offset >= round_range.end),
            heads=sidecars.load_sidecar_heads(ids) if sidecars else dict.fromkeys(ids, SidecarHead(None, "bloom = false", 0)),
        )

    def sidecar_head(self, ordinal: int) -> SidecarHead:
        return self.heads[self.live[ordinal].id]

    @property
    def expected_dirty_record_count(self) -> int:
        return sum(estimate_record_count(self.live[n]) for n in self.dirty)

    @property
    def expected_dirty_key_count(self) -> int:
        return estimate_distinct_keys([self.sidecar_head(n) for n in self.dirty], [estimate_record_count(self.live[n]) for n in self.dirty])

    @property
    def largest_segment_disk_bytes(self) -> int:
        """Needed in addition to the rows of the offset map."""
        return max((round_up_to_blocks(segment.size_bytes) for segment in self.live), default=0)


class RoundSourceSegments:
    """Source segments of a round and the transaction verdicts on their batches, by position of the segment.

    A segment that was not opened is represented by the batch headers in its sidecar, or is empty. Headers stay in memory; record bytes do
    not.
    """

    def __init__(self, reader: StagedSegmentReader, roles: SegmentRoles) -> None:
        self.reading = reader
        self.sources = [_substitute_segment(reader, roles, ordinal) for ordinal in range(len(roles.live))]
        self.verdicts = [_no_verdicts() for _ in roles.live]
        self.folded = False
        self.parts: dict[int, SegmentPartToRead] = {}
        self._opened: set[int] = set()

    @contextmanager
    def memory_map_segment(self, ordinal: int, reservation: DiskSpaceReservation | None) -> Iterator[SourceSegment]:
        """Provide only a part if the segment is read in part. Raises BadData, StoreError, OutOfBudget, WholeSegmentReadNeededError."""
        part = self.parts.get(ordinal)
        if part is not None:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self.reading.memory_map_segment(part.source, reservation))
                except BadData as wrong:
                    raise WholeSegmentReadNeededError(str(wrong)) from None
                part.require_matching_batches()
                yield part.source
            return
        if ordinal in self._opened:
            with self.reading.memory_map_segment(self.sources[ordinal], reservation):
                yield self.sources[ordinal]
            return
        with self.reading.open_segment(ordinal, reservation) as source:
            if self.folded:
                self.verdicts[ordinal] = verdicts_from_substitute(source, self.sources[ordinal], self.verdicts[ordinal])
            self.sources[ordinal] = source
            self._opened.add(ordinal)
            yield source

    def restrict_segment_to_part(self, ordinal: int, part_to_read: SegmentPartToRead) -> None:
        """The transaction verdicts must be computed before."""
        self.parts[ordinal] = part_to_read
        self.sources[ordinal], self.verdicts[ordinal] = part_to_read.whole, part_to_read.whole_verdicts
        self.reading.ranges[ordinal] = part_to_read.splice.byte_ranges_to_read
        self._opened.add(ordinal)

    def is_segment_open(self, ordinal: int) -> bool:
        return ordinal in self._opened

    def load_batch_headers(self, ordinal: int, reservation: DiskSpaceReservation | None) -> None:
        if ordinal not in self._opened:
            with self.memory_map_segment(ordinal, reservation):
                pass

    def compute_transaction_verdicts(self) -> None:
        """Change ``verdicts`` in place, because other objects refer to it."""
        self.verdicts[:] = transaction_verdicts_by_source(self.sources)
        self.folded = True


def _substitute_segment(reader: StagedSegmentReader, roles: SegmentRoles, ordinal: int) -> SourceSegment:
    """Return the batch headers in the sidecar; an empty segment if no sidecar is usable."""
    segment, sidecar = roles.live[ordinal], roles.sidecar_head(ordinal).sidecar
    place = (ordinal, reader.object_key_of_log(ordinal), segment.start_offset, segment.end_offset + 1, segment.mtime_ms)
    return substitute_segment(*place, sidecar) if sidecar else SourceSegment(*place, NO_BYTES, BatchTable.allocate_rows(0))


def _no_verdicts() -> TransactionVerdicts:
    nothing = np.zeros(0, np.bool_)
    return TransactionVerdicts(nothing, nothing, nothing, np.empty(0, TXN_ENTRY))
