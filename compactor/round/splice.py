"""Which batches of a clean segment a round reads, and which the store may copy: pure, over the segment's key directory.

    directory + fold + dirty keys -> touched batches -> stretches (read, copied, read, ...) -> where the new object's bytes come from

A batch that is not *touched* stays byte for byte what it is, whoever cleans the segment: none of its records is superseded, and its header
asks for nothing. Some of those are read all the same, where a store copies only long ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bloom.directory import KEYLESS, TOMBSTONE, KeyDirectory, joined, size_of
from bloom.producer_runs import runs_and_markers
from bloom.sidecar import NEVER_MS, Due, Sidecar
from compactor.cleaner.passes.retention import BatchFates
from compactor.cleaner.passes.transactions import Flags
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.batches import EMPTIED, HORIZON, NOT_CONTROL, BatchTable, Int64s
from compactor.records.encode import COPY, FILTER
from compactor.records.headers import range_crc32c
from compactor.storage.port import CopiedRange, FileRange, Piece, RangeCopies

LEAST_COPY: Final = 256 << 10
"""Bytes of a range that is worth a copy of its own."""
LEAST_COPIES: Final = 4
"""A segment is smaller than so many of the shortest ranges that its store copies: it is read whole."""
MOST_READ: Final = 2
"""At most one part in so many of a segment is read: of others nothing much is saved."""
MOST_SHARE: Final = 16
"""A directory has at most one byte for so many of its segment, or there is none."""
FEWER_KEYS: Final = 4
"""A directory is not asked about more keys than one for so many records of its segment: hardly a batch would be left alone."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Batches [first, last) of a segment."""

    first: int
    last: int
    is_copied: bool


@dataclass(frozen=True, eq=False)
class Splice:
    """How one segment is read in part. ``table``: of all its batches; ``version``: of the object, which may not change meanwhile.

    ``directory``: gives the segment's, which is large and nothing to keep for a whole round; raises what its caller understands.
    """

    directory: Callable[[], KeyDirectory]
    table: BatchTable
    stretches: tuple[Stretch, ...]
    version: str

    @property
    def rows(self) -> Int64s:
        """The batches that are read, ascending."""
        return np.concatenate([np.arange(stretch.first, stretch.last) for stretch in self.stretches if not stretch.is_copied])

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Position and length of what is read of the log."""
        return tuple(span_of(self.table, stretch) for stretch in self.stretches if not stretch.is_copied)

    @property
    def stays(self) -> Flags:
        """Of each batch, whether it is copied."""
        stays = np.ones(len(self.table), np.bool_)
        stays[self.rows] = False
        return stays

    @property
    def bytes_copied(self) -> int:
        return int(self.table.size[self.stays].sum())


def span_of(table: BatchTable, stretch: Stretch) -> tuple[int, int]:
    """Position and length in the log."""
    start = int(table.position[stretch.first])
    return start, int(table.position[stretch.last - 1] + table.size[stretch.last - 1]) - start


# ---- whether a segment is read in part


def worth_a_directory(segment: RemoteLogSegmentMetadata, batches: int, copies: RangeCopies | None) -> bool:
    """Whether a later round may read a segment in part, for what its directory costs."""
    size = segment.size_bytes
    if copies is None or size < LEAST_COPIES * shortest(copies) or not segment.file("log").batches:
        return False
    return MOST_SHARE * size_of(batches, segment.records) <= size


def shortest(copies: RangeCopies) -> int:
    return max(copies.least_bytes, LEAST_COPY)


def objection(segment: RemoteLogSegmentMetadata, sidecar: Sidecar | None, keys: int, copies: RangeCopies | None) -> str:
    """Why a clean segment is read whole, by what is known without its directory; or nothing. ``keys``: of the dirty range."""
    if copies is None:
        return "its store does not copy ranges"
    if segment.size_bytes < LEAST_COPIES * shortest(copies):
        return "it is short"
    if sidecar is None:
        return "it has no sidecar"
    if segment.is_cut or segment.negative_timestamps or "txnindex" in segment.files:
        return "its end, its timestamps or its aborted transactions want a look at all of it"
    if segment.content is None or not segment.file("log").batches:
        return "an earlier program wrote it"
    if keys > sidecar.records // FEWER_KEYS:
        return f"the round brings {keys} keys, it has {sidecar.records} records"
    return ""


def touched(table: BatchTable, fates: BatchFates, directory: KeyDirectory, holding: Flags, now_ms: int) -> Flags:
    """Batches of which not every byte is sure to stay. ``holding``: those that may hold a dirty key.

    The last one is taken for one of them: behind it a filler may be needed (I1).
    """
    waiting = ((table.attributes & np.int16(HORIZON)) != 0) & (table.base_timestamp > now_ms)
    due = ((directory.flags & KEYLESS) != 0) | (((directory.flags & TOMBSTONE) != 0) & ~waiting)
    by_header = (fates.action != FILTER) & (fates.action != COPY)
    undated = (table.control != NOT_CONTROL) & (fates.action == FILTER)
    # A header that an earlier round has left of a batch goes with the next one that reads it.
    found: Flags = holding | due | by_header | undated | (table.count == 0) | (table.control < EMPTIED)
    found[-1:] = True
    return found


def stretches_of(table: BatchTable, marked: Flags, copies: RangeCopies) -> tuple[Stretch, ...]:
    """The whole segment, as what is read and what is copied by turns; nothing where too much would have to be read.

    What is read between two copied ranges has at least ``copies.least_bytes`` that are sure to stay: so the new object's part has, too.
    """
    if MOST_READ * int(table.size[marked].sum()) > int(table.size.sum()):
        return ()
    end = np.concatenate((table.position, table.position[-1:] + table.size[-1:]))
    least, shortest_copy, total = copies.least_bytes, shortest(copies), len(table)
    places = [*np.flatnonzero(marked).tolist(), total]
    found: list[Stretch] = []
    at = number = 0
    while at < total:
        if int(end[places[number]] - end[at]) >= shortest_copy:
            found.append(Stretch(at, places[number], is_copied=True))
            at = places[number]
        first, spare = at, 0
        while at < total:
            gap = int(end[places[number]] - end[at])
            need = max(0, least - spare)
            if gap >= need + shortest_copy:
                stop = int(np.searchsorted(end, end[at] + need))
                if int(end[places[number]] - end[stop]) >= shortest_copy:
                    at = stop
                    break
            spare += gap
            at = min(places[number] + 1, total)
            number = min(number + 1, len(places) - 1)
        if at > first:
            found.append(Stretch(first, at, is_copied=False))
    read = sum(span_of(table, stretch)[1] for stretch in found if not stretch.is_copied)
    return tuple(found) if MOST_READ * read <= int(end[-1]) else ()


# ---- the new segment


def pieces(splice: Splice, key: str, log: Path, cleaned: BatchTable) -> list[Piece]:
    """Where the bytes of the new log come from. ``key``: of the source's object; ``log``: what the cleaner made of what was read."""
    made: list[Piece] = []
    headers = splice.directory().headers
    for stretch, (first, last) in zip(splice.stretches, _shares(splice, cleaned), strict=True):
        if stretch.is_copied:
            start, length = span_of(splice.table, stretch)
            crc = range_crc32c(headers[stretch.first : stretch.last])
            made.append(CopiedRange(key, start, length, splice.version, crc))
        elif last > first:
            made.append(FileRange(log, *span_of(cleaned, Stretch(first, last, is_copied=False))))
    return made


def merged(splice: Splice, segment_id: str, cleaned: BatchTable, fresh: KeyDirectory) -> KeyDirectory:
    """The new segment's directory. ``fresh``: of what the cleaner made."""
    source = splice.directory()
    return joined(
        segment_id,
        [
            source.part(stretch.first, stretch.last) if stretch.is_copied else fresh.part(first, last)
            for stretch, (first, last) in zip(splice.stretches, _shares(splice, cleaned), strict=True)
        ],
    )


def _shares(splice: Splice, cleaned: BatchTable) -> Iterator[tuple[int, int]]:
    """Of each stretch, which batches became of it; (0, 0) for those that are copied. A filler belongs to the last one."""
    done = 0
    for number, stretch in enumerate(splice.stretches):
        if stretch.is_copied:
            yield 0, 0
            continue
        end = splice.table.last_offset[stretch.last - 1]
        is_last = number == len(splice.stretches) - 1
        upto = len(cleaned) if is_last else int(np.searchsorted(cleaned.last_offset, end, side="right"))
        yield done, upto
        done = upto


def due_together(splice: Splice, fresh: Due) -> Due:
    """Of the new segment. ``fresh``: of what the cleaner made. A copied batch with tombstones counts as one, and has its horizon."""
    buried = splice.stays & ((splice.directory().flags & TOMBSTONE) != 0)
    return Due(
        fresh.tombstones + int(np.count_nonzero(buried)),
        fresh.tombstones_without_horizon,
        min(fresh.earliest_tombstone_horizon_ms, int(splice.table.base_timestamp[buried].min(initial=NEVER_MS))),
        fresh.keyless_records,
    )


def succeeded(old: Sidecar, segment_id: str, due: Due, table: BatchTable) -> Sidecar:
    """The new segment's sidecar. ``old``: its source's, with the filter; ``table``: of all its batches.

    The old filter stays, and so does the sketch: of keys that are gone they say that they may be there, which costs a look, never a record.
    """
    runs, markers = runs_and_markers(table)
    records = int(table.count[table.control == NOT_CONTROL].sum())
    return Sidecar(segment_id, records, old.distinct_keys, due, runs, markers, old.sketch, old.made_for, old.filter, inherited=True)
