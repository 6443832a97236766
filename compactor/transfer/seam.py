"""Where a log directory and the tier meet: what of the directory is new, and whether both are the same log.

Replicas roll at different offsets, and a tier that was compacted holds other bytes than any broker. So neither names nor digests of
segments say what is known: it is the last batches as they were imported, which the control log remembers, and the leader epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from checkpoint.lineage import Lineage, disowned
from compactor.cleaner.offline import bases_in, open_segments
from compactor.cleaner.passes.source import SourceSegment, cut_source
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.model.policy import CleanerPolicy
from compactor.model.segment import EpochEntry
from compactor.records.batches import Bytes, map_file, read_only
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
            raise BadData(
                f"what it has at offset {known.base_offset} is not what was imported as {state.name}: other content under known offsets",
                segment=holder.name,
                hint="This is another log, or one that its broker has compacted since. Import it under another name; `topics delete` "
                "frees this one",
            )
        seen = True
    return seen


def _told(lineage: Sequence[EpochEntry]) -> str:
    return ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in lineage) or "none"
