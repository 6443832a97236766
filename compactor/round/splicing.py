"""Clean segments that are read in part: how one is found out about, read, and put together from what the store copies and new bytes.

Whatever does not fit on the way (a directory that is gone, bytes that are not what it says, a store that does not copy after all) raises
NotInPart, and the segment is read whole: the same objects come of it (I7).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bloom.directory import KeyDirectory, Pieces
from bloom.sidecar import Due
from compactor.cleaner.passes.lanes import Lanes
from compactor.cleaner.passes.portraits import NOTHING, Sitting, sat, verdicts_for
from compactor.cleaner.passes.retention import RoundRules, decide_batches
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import Flags, Verdicts
from compactor.errors import BadData, NotFound
from compactor.model.balance import Balance, Sum
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceKey, sum_of_headers
from compactor.records.batches import BatchTable, Int64s
from compactor.records.encode import MAX_SEGMENT
from compactor.records.header_table import part_of, table_of
from compactor.records.headers import digest_of_headers, headers_of
from compactor.round.sources import Reading
from compactor.round.splice import Splice, due_together, merged, stretches_of, touched
from compactor.tier.sidecars import Sidecars

KEPT = 3
"""Key directories that are in memory at a time: of the segment that is read, of the one that is uploaded, and of one that comes next."""


class NotInPart(Exception):
    """A segment that was to be read in part has to be read whole; nothing is wrong with it as far as is known."""


@dataclass(frozen=True, eq=False)
class SegmentPart:
    """A segment that is read in part. ``whole``: all its batches without their bytes, for the folds; ``rows``: which of them are read.

    ``source``, ``verdicts``: of those, as a segment of its own.
    """

    splice: Splice
    whole: SourceSegment
    whole_verdicts: Verdicts
    rows: Int64s
    source: SourceSegment
    verdicts: Verdicts

    def require_same(self) -> None:
        """That what was read is what the directory says, and sound. Raises NotInPart."""
        source = self.source
        length = int(source.table.size.sum())
        wanted = self.splice.directory().headers[self.rows]
        if len(source.buf) != length or not np.array_equal(headers_of(source.buf, source.table.position), wanted):
            raise NotInPart(f"{source.name}: its batches are not what its key directory says")
        try:
            source.verify(0, len(source.table))
        except BadData as wrong:
            raise NotInPart(str(wrong)) from None


class Directories:
    """Key directories that are what was recorded of their segments' batches. They are large: the last few that were used stay in memory.

    Usable by several threads.
    """

    def __init__(self, sidecars: Sidecars) -> None:
        self._sidecars = sidecars
        self._kept: dict[str, KeyDirectory] = {}
        self._lock = threading.Lock()

    def each(self, segments: Sequence[RemoteLogSegmentMetadata]) -> Iterator[tuple[KeyDirectory | None, int]]:
        """Of each segment, None where it has none that can be used, and the bytes that were fetched. Raises StoreError."""
        found = self._sidecars.directories([segment.id for segment in segments])
        for segment, (directory, fetched) in zip(segments, found, strict=True):
            is_its = directory is not None and digest_of_headers(directory.headers) == segment.file("log").batches
            yield directory if is_its else None, fetched

    def keep(self, directory: KeyDirectory) -> None:
        with self._lock:
            self._kept[directory.segment_id] = directory
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]

    def load(self, segment: RemoteLogSegmentMetadata) -> KeyDirectory:
        """One that was there before. Raises NotInPart where it is gone, StoreError."""
        with self._lock:
            kept = self._kept.get(segment.id)
        if kept is not None:
            return kept
        ((directory, _),) = self.each([segment])
        if directory is None:
            raise NotInPart(f"the key directory of segment {segment.id} is gone")
        self.keep(directory)
        return directory


@dataclass(frozen=True)
class PartFound:
    """What a key directory says. ``part``: None where the segment is read whole.

    ``meets_none``: it has none of the dirty range's keys: for their sake nothing of it need be read.
    """

    part: SegmentPart | None = None
    meets_none: bool = False


@dataclass(frozen=True)
class PartSearch:
    """What it takes to find out whether clean segments of a partition can be read in part.

    ``pieces``: of the keys of the dirty range (bloom.directory).
    """

    reading: Reading
    rules: RoundRules
    pieces: Pieces
    directories: Directories

    def part(self, directory: KeyDirectory, stood_in: SourceSegment, verdicts: Verdicts) -> PartFound:
        """A segment by its directory, what stands in for it and the verdicts on that. Raises StoreError."""
        holding = directory.holding(self.pieces)
        return PartFound(self._of(directory, holding, stood_in, verdicts), meets_none=not holding.any())

    def _of(self, directory: KeyDirectory, holding: Flags, stood_in: SourceSegment, verdicts: Verdicts) -> SegmentPart | None:
        layout = self.reading.staging.layout
        copies = layout.copies
        if copies is None:
            return None
        table = table_of(directory.headers, directory.control, directory.coordinator_epoch)
        whole = replace(stood_in, table=table, buf=NOTHING)
        of_all = verdicts_for(whole, stood_in, verdicts)
        if of_all.indexed.any() or len(of_all.txn_entries):
            return None
        fates = decide_batches(table, of_all, self.rules, whole.name)
        marked = touched(table, fates, directory, holding, self.rules.now_ms)
        stretches = stretches_of(table, marked, copies)
        if not any(stretch.is_copied for stretch in stretches):
            return None
        try:
            segment = self.reading.live[stood_in.ordinal]
            version = layout.version(self.reading.partition, segment)
        except (NotFound, BadData):
            return None  # who reads it says what is wrong
        self.directories.keep(directory)
        splice = Splice(partial(self.directories.load, segment), table, stretches, version)
        rows = splice.rows
        flags = (of_all.aborted[rows], of_all.discardable[rows], of_all.indexed[rows])
        source = replace(whole, table=part_of(table, rows))
        return SegmentPart(splice, whole, of_all, rows, source, Verdicts(*flags, of_all.txn_entries))


# ---- the new segment


@dataclass(frozen=True, eq=False)
class PutTogether:
    """All that is known of a new segment most of whose bytes nobody has read."""

    directory: KeyDirectory
    table: BatchTable
    due: Due


def put_together(part: SegmentPart, segment_id: str, output: SourceSegment, hash_key: bytes, inflate_limit: int) -> PutTogether:
    """``output``: what the cleaner made of what was read. Raises NotInPart."""
    splice = part.splice
    sitting = Sitting(output, None, hash_key, sketch=False, directory=True)
    with Lanes(1) as lanes:
        sat(sitting, output, inflate_limit, lanes)
    directory = merged(splice, segment_id, output.table, sitting.directory(segment_id))
    table = table_of(directory.headers, directory.control, directory.coordinator_epoch)
    if int(table.size.sum()) > MAX_SEGMENT or np.any(table.base_offset[1:] <= table.last_offset[:-1]):
        raise NotInPart(f"{output.name}: what it would be put together from does not fit")
    return PutTogether(directory, table, due_together(splice, sitting.due))


def whole_balance(part: SegmentPart, read: Balance, recorded: Sum | None, key: BalanceKey) -> Balance:
    """The group's balance: what the store copies is left as it is. Raises NotInPart where it does not come to what was recorded."""
    rest = sum_of_headers(part.splice.directory().headers[part.splice.stays], key)
    sources = read.sources.plus(rest)
    if sources != recorded:
        raise NotInPart(f"{part.source.name}: its batches do not come to the sum that was recorded of them")
    return read.model_copy(update={"sources": sources, "left": read.left.plus(rest), "result": read.result.plus(rest)})
