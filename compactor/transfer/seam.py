"""Where a log directory and the tier meet: what of the directory is new, and whether both are the same log.

Replicas roll at different offsets, and a tier that was compacted holds other bytes than any broker. So neither names nor digests of
segments say what is known: it is the last batches as they were imported, which the control log remembers, and the leader epochs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from checkpoint.lineage import Lineage, disowned
from compactor.cleaner.offline import bases_in, open_segments
from compactor.cleaner.passes.source import SourceSegment, cut_source
from compactor.control.fold import TAIL
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata
from compactor.records.batches import NOT_CONTROL, Bytes, map_file, read_only
from compactor.records.rows import RowBuffers, parse
from compactor.transfer.log_directory import CHECKPOINT, LogPiece, batch_of, log_path, told_lineage


@dataclass(frozen=True)
class Listing:
    """A log directory by the names in it. ``end``: base of the segment behind the last one, None where that is the log's newest."""

    log_dir: Path
    bases: tuple[int, ...]
    end: int | None = None

    @property
    def size(self) -> int:
        """Bytes of its segments."""
        return sum(log_path(self.log_dir, base).stat().st_size for base in self.bases)

    def from_offset(self, offset: int) -> Listing:
        """Without the segments that end below an offset, as far as the next one's name says so."""
        behind = [*self.bases[1:], self.end] if self.bases else []
        kept = [base for base, following in zip(self.bases, behind, strict=True) if following is None or following > offset]
        return replace(self, bases=tuple(kept))

    def until(self, offset: int) -> Listing:
        """Without the segments that begin at an offset or later."""
        kept = tuple(base for base in self.bases if base < offset)
        end = self.bases[len(kept)] if len(kept) < len(self.bases) else self.end
        return replace(self, bases=kept, end=end)

    def first(self, most_bytes: int) -> Listing:
        """The first segments, together no larger than this unless the first one is."""
        total, count = 0, 0
        for base in self.bases:
            total += log_path(self.log_dir, base).stat().st_size
            if count and total > most_bytes:
                break
            count += 1
        end = self.bases[count] if count < len(self.bases) else self.end
        return replace(self, bases=self.bases[:count], end=end)


def listing(log_dir: Path, *, live: bool) -> Listing:
    """``live``: without the newest segment, which a broker still writes. Raises UsageError, BadData."""
    bases = bases_in(log_dir, live=live)
    return Listing(log_dir, tuple(bases[:-1]), bases[-1]) if live and bases else Listing(log_dir, tuple(bases))


def read_file(path: Path) -> Bytes:
    """A file's bytes in memory: one that a broker truncates while it is mapped would end this process. Raises BadData."""
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        data = np.empty(size, np.uint8)
        view, done = memoryview(data.data), 0
        while done < size and (count := file.readinto(view[done:])):
            done += count
    if done < size:
        raise BadData("it became shorter while it was read", segment=path.name, hint="The broker truncates its log; import again")
    return read_only(data)


def opened(found: Listing, policy: CleanerPolicy, *, live: bool) -> list[SourceSegment]:
    """The batch tables of the listed segments. Raises BadData, OSError."""
    if not found.bases:
        return []
    read: Callable[[Path], Bytes] = read_file if live else map_file
    return open_segments(found.log_dir, found.bases, found.end, policy.index_interval_bytes, policy.max_decompressed_batch_bytes, read)


# ---- what is new ------------------------------------------------------------------------------------------------------------


def above(log_dir: Path, sources: Sequence[SourceSegment], end: int) -> list[LogPiece]:
    """What lies above the tier's last offset ``end``; a segment that reaches across is cut at a batch. Raises BadData."""
    return [piece for source in sources if (piece := _part(log_dir, source, end + 1, source.end)) is not None]


def below(log_dir: Path, sources: Sequence[SourceSegment], start: int) -> list[LogPiece]:
    """What lies below the tier's first offset ``start``. Raises BadData."""
    return [piece for source in sources if (piece := _part(log_dir, source, source.base, start)) is not None]


def _part(log_dir: Path, source: SourceSegment, start: int, end: int) -> LogPiece | None:
    """The batches of a segment within [start, end); None where it has no part there. A segment within is taken as it is."""
    path = log_dir / source.name
    if source.base >= start and source.end <= end:
        return LogPiece(source, path, 0, source.size)
    table = source.table
    first = int(np.searchsorted(table.last_offset, start))
    last = int(np.searchsorted(table.last_offset, end))
    if last < len(table) and 0 <= int(table.base_offset[last]) < end <= int(table.last_offset[last]):
        raise _straddling(source, last, end)
    if first == last:
        return None
    if 0 <= int(table.base_offset[first]) < start:
        raise _straddling(source, first, start)
    part = cut_source(source, first, last, max(start, source.base), min(end, source.end))
    return LogPiece(part, path, int(table.position[first]), source.size)


def _straddling(source: SourceSegment, batch: int, offset: int) -> BadData:
    table = source.table
    return BadData(
        f"a batch from {int(table.base_offset[batch])} to {int(table.last_offset[batch])} lies across offset {offset}, where no batch of "
        "the log that the tier holds does: this is another log",
        segment=source.name,
        position=int(table.position[batch]),
        hint="Import it under another name, or `topics delete` what the tier holds",
    )


# ---- whether it is the same log -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parting:
    """The directory's leader epochs disown what the tier has from ``offset`` on. ``newer``: they are those of a later leader."""

    offset: int
    known: Lineage
    given: Lineage
    newer: bool

    def error(self, state: PartitionState, log_dir: Path) -> BadData:
        """For people, with both lineages."""
        both = f"the tier has the leader epochs {_told(self.known)}, this log has {_told(self.given)}"
        if self.newer:
            what = f"what the tier has of {state.name} from offset {self.offset} on, up to {state.end_offset}, was discarded: {both}"
            hint = (
                "The broker's log was truncated, by an unclean election or by hand. Say --accept-truncation to discard the same in "
                "the tier; where this is another cluster's log, import it under another name"
            )
        else:
            what = f"it parts from what the tier has of {state.name} at offset {self.offset}: {both}"
            hint = "This is another cluster's log, or a replica that has missed a truncation. Import from the partition's leader"
        return BadData(what, segment=str(log_dir / CHECKPOINT), hint=hint)


def parting(state: PartitionState, sources: Sequence[SourceSegment], given: Lineage) -> Parting | None:
    """Where lineages part. Without a ``leader-epoch-checkpoint`` the batches that were opened speak for themselves."""
    filled = [source for source in sources if source.size]
    lineage = given or told_lineage(filled)
    end = int(filled[-1].table.last_offset[-1]) + 1 if filled else 0
    offset = disowned(state.lineage, state.end_offset + 1, lineage, end) if state.live else None
    if offset is None:
        return None
    return Parting(offset, state.lineage, lineage, lineage[-1].epoch > state.lineage[-1].epoch)


def check_tail(state: PartitionState, sources: Sequence[SourceSegment], limit: int | None = None) -> bool:
    """Whether the directory has any of the batches that are remembered; those that it has must be the same. Raises BadData.

    :param limit: only batches below this offset.
    """
    filled = [source for source in sources if source.size]
    end = int(filled[-1].table.last_offset[-1]) if filled else -1
    seen = False
    for known in state.tail:
        holder = next((source for source in reversed(filled) if source.base <= known.base_offset), None)
        if holder is None or known.last_offset > end or (limit is not None and known.last_offset >= limit):
            continue  # cut by retention, an older copy, or discarded
        place = int(np.searchsorted(holder.table.last_offset, known.last_offset))
        if place >= len(holder.table) or batch_of(holder, place) != known:
            raise _other_content(state, known.base_offset, holder)
        seen = True
    return seen


def check_within(
    state: PartitionState,
    sources: Sequence[SourceSegment],
    opening: Callable[[RemoteLogSegmentMetadata], AbstractContextManager[SourceSegment]],
    limit: int,
) -> None:
    """A directory that ends before the batches that are remembered: its last records must be those that the tier has there. Raises BadData.

    What the tier has may be compacted: what is left of it is compared, if anything is.

    :param limit: of a decompressed batch.
    """
    given = next((source for source in reversed(sources) if source.size), None)
    if given is None or (end := int(given.table.last_offset[-1])) > state.end_offset:
        return
    for segment in reversed([one for one in state.live if one.end_offset >= given.base and one.start_offset <= end]):
        with opening(segment) as source:
            known = _records(source, given.base, end, limit, TAIL)
        if not known:
            continue
        found = _records(given, min(known), max(known), limit)
        other = next((offset for offset, record in known.items() if found.get(offset) != record), None)
        if other is not None:
            raise _other_content(state, other, given)
        return


_Record = tuple[int, bytes | None, bytes | None]


def _records(source: SourceSegment, start: int, end: int, limit: int, batches: int = sys.maxsize) -> dict[int, _Record]:
    """Timestamp, key and value by offset, of records within [start, end], or of those in the last batches with any."""
    table, buffers = source.table, RowBuffers()
    within = (table.last_offset >= start) & (table.base_offset <= end) & (table.control == NOT_CONTROL) & (table.count != 0)
    chosen = np.flatnonzero(within)[-batches:]
    wanted = np.zeros(len(table), np.bool_)
    wanted[chosen] = True
    records: dict[int, _Record] = {}
    for first, last in source.ranges():
        if not wanted[first:last].any():
            continue
        for chunk in source.chunks(first, last, wanted[first:last], limit, None):
            rows, _ = parse(table, chunk, buffers, source.name)
            for row in np.flatnonzero((rows.offset >= start) & (rows.offset <= end)).tolist():
                key, value = (
                    chunk.buf[int(begin) : int(begin) + int(size)].tobytes() if size >= 0 else None
                    for begin, size in ((rows.key_start[row], rows.key_length[row]), (rows.value_start[row], rows.value_length[row]))
                )
                records[int(rows.offset[row])] = (int(rows.timestamp[row]), key, value)
    return records


def _other_content(state: PartitionState, offset: int, holder: SourceSegment) -> BadData:
    return BadData(
        f"what it has at offset {offset} is not what was imported as {state.name}: other content under known offsets",
        segment=holder.name,
        hint="This is another log, or one that its broker has compacted since. Import it under another name; `topics delete` "
        "frees this one",
    )


def _told(lineage: Sequence[EpochEntry]) -> str:
    return ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in lineage) or "none"
