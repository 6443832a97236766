"""The live segments of a partition by their part in a round, and the table of those that pass 1 and pass 2 have opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from compactor.cleaner.passes.portraits import NOTHING, stand_in, verdicts_for
from compactor.cleaner.passes.retention import RoundRules
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Verdicts, fold
from compactor.errors import BadData
from compactor.local.budget import Grant, blocks
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import BatchTable
from compactor.records.indexes import TXN_ENTRY
from compactor.round.skip import keys_expected, records_about
from compactor.round.sources import Reading
from compactor.round.splicing import NotInPart, SegmentPart
from compactor.tier.sidecars import Head, Sidecars


@dataclass(frozen=True)
class RoundExtent:
    """What a round is about. Offsets; [first_dirty, end) is empty where only horizons are due."""

    first_dirty: int
    end: int
    rules: RoundRules


@dataclass(frozen=True)
class SegmentRoles:
    """Ordinals (places in ``live``), ascending; ``behind``: of those behind the round's end. ``heads``: of sidecars, by segment id."""

    live: Sequence[RemoteLogSegmentMetadata]
    dirty: tuple[int, ...]
    clean: tuple[int, ...]
    behind: tuple[int, ...]
    heads: Mapping[str, Head]

    @staticmethod
    def of(live: Sequence[RemoteLogSegmentMetadata], extent: RoundExtent, sidecars: Sidecars | None) -> SegmentRoles:
        """``sidecars``: None: there are none to be used (``bloom = false``). Raises StoreError."""
        ids = [segment.id for segment in live]
        return SegmentRoles(
            live,
            dirty=tuple(n for n, s in enumerate(live) if s.end_offset >= extent.first_dirty and s.start_offset < extent.end),
            clean=tuple(n for n, s in enumerate(live) if s.end_offset < extent.first_dirty and s.start_offset < extent.end),
            behind=tuple(n for n, s in enumerate(live) if s.start_offset >= extent.end),
            heads=sidecars.heads(ids) if sidecars else dict.fromkeys(ids, Head(None, "bloom = false", 0)),
        )

    def head(self, ordinal: int) -> Head:
        return self.heads[self.live[ordinal].id]

    @property
    def dirty_records(self) -> int:
        """Of the dirty range, about."""
        return sum(records_about(self.live[n]) for n in self.dirty)

    @property
    def dirty_keys(self) -> int:
        """Distinct keys of the dirty range, about."""
        return keys_expected([self.head(n) for n in self.dirty], [records_about(self.live[n]) for n in self.dirty])

    @property
    def largest(self) -> int:
        """Room for any segment that may have to be read while rows lie on the disk."""
        return max((blocks(segment.size_bytes) for segment in self.live), default=0)


class SourceTable:
    """Sources and verdicts by ordinal: what was opened, else what stands in for it, or nothing. Batch tables stay, bytes do not."""

    def __init__(self, reading: Reading, roles: SegmentRoles) -> None:
        self.reading = reading
        self.sources = [_stand_in(reading, roles, ordinal) for ordinal in range(len(roles.live))]
        self.verdicts = [_no_verdicts() for _ in roles.live]
        self.folded = False
        self.parts: dict[int, SegmentPart] = {}
        self._opened: set[int] = set()

    @contextmanager
    def mapped(self, ordinal: int, grant: Grant | None) -> Iterator[SourceSegment]:
        """A segment with its headers, and its bytes while the block runs; with verdicts once they are folded.

        Of one that is taken in part: what is read of it. Raises BadData, StoreError, OutOfBudget, NotInPart.
        """
        part = self.parts.get(ordinal)
        if part is not None:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self.reading.mapped(part.source, grant))
                except BadData as wrong:
                    raise NotInPart(str(wrong)) from None
                part.require_same()
                yield part.source
            return
        if ordinal in self._opened:
            with self.reading.mapped(self.sources[ordinal], grant):
                yield self.sources[ordinal]
            return
        with self.reading.opened(ordinal, grant) as source:
            if self.folded:
                self.verdicts[ordinal] = verdicts_for(source, self.sources[ordinal], self.verdicts[ordinal])
            self.sources[ordinal] = source
            self._opened.add(ordinal)
            yield source

    def take_part(self, ordinal: int, part: SegmentPart) -> None:
        """Once verdicts are folded: no more than this is read of a segment from here on."""
        self.parts[ordinal] = part
        self.sources[ordinal], self.verdicts[ordinal] = part.whole, part.whole_verdicts
        self.reading.ranges[ordinal] = part.splice.ranges
        self._opened.add(ordinal)

    def is_open(self, ordinal: int) -> bool:
        return ordinal in self._opened

    def open(self, ordinal: int, grant: Grant | None) -> None:
        """Its headers."""
        if ordinal not in self._opened:
            with self.mapped(ordinal, grant):
                pass

    def fold(self) -> None:
        """The verdict on every batch, in the lists that others hold."""
        self.verdicts[:] = fold(self.sources)
        self.folded = True


def _stand_in(reading: Reading, roles: SegmentRoles, ordinal: int) -> SourceSegment:
    segment, sidecar = roles.live[ordinal], roles.head(ordinal).sidecar
    place = (ordinal, reading.name(ordinal), segment.start_offset, segment.end_offset + 1, segment.mtime_ms)
    return stand_in(*place, sidecar) if sidecar else SourceSegment(*place, NOTHING, BatchTable.empty(0))


def _no_verdicts() -> Verdicts:
    nothing = np.zeros(0, np.bool_)
    return Verdicts(nothing, nothing, nothing, np.empty(0, TXN_ENTRY))
