"""Seam of an import: what of a log directory is new to the tier, and whether both hold the same log.

Replicas roll segments at different offsets, and a compacted tier holds other bytes than any broker. Not names or digests of segments, but
the last imported batches (the tail, in the control log) and the leader epochs show what the tier has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from checkpoint.lineage import Lineage, first_contradicting_offset, leader_epoch_at, truncate_lineage_at
from checkpoint.offsets import first_dirty_offset_in
from compactor.cleaner.offline import list_segment_base_offsets, open_segments_of_directory
from compactor.cleaner.source import SourceSegment, segment_of_batch_range
from compactor.constants import Offset
from compactor.control.fold import TAIL
from compactor.control.state import PartitionState
from compactor.errors import BadData
from compactor.features.imports.log_directory import (
    CHECKPOINT,
    SegmentFilePart,
    SegmentToImport,
    describe_batch,
    lineage_from_batches,
    segment_log_path,
    staged_segment_path,
)
from compactor.features.imports.staged_files import (
    BrokerLiveLog,
    FileStagedForDeletion,
    HeldFileStagedForDeletion,
    OpenFilesStagedForDeletion,
    TierEnd,
    choose_staged_files,
    first_live_epoch,
    list_staged_files,
)
from compactor.model.plan import CleanerPolicy
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata
from compactor.records.batches import INCOMPLETE_BATCH_CAUSES, NOT_CONTROL, Bytes, memory_map_file, read_only_view
from compactor.records.rows import BatchChunk, RecordRowBuffers, RecordRows, parse_records


@dataclass(frozen=True)
class SegmentListing:
    """Segments of a log directory, by file names alone.

    bases: base offsets, ascending.
    end: base offset of the next segment; None if there is none.
    staged: by base offset.
    """

    log_dir: Path
    bases: tuple[int, ...]
    end: int | None = None
    staged: Mapping[int, HeldFileStagedForDeletion] = field(default_factory=dict)

    @property
    def total_size_bytes(self) -> int:
        return sum(self.segment_size(base) for base in self.bases)

    def segment_size(self, base_offset: int) -> int:
        return (
            self.staged[base_offset].file.size if base_offset in self.staged else segment_log_path(self.log_dir, base_offset).stat().st_size
        )

    def segments_from_offset(self, offset: int) -> SegmentListing:
        """Without the segments that end below ``offset``, by the base offset of the next segment."""
        behind = [*self.bases[1:], self.end] if self.bases else []
        kept = [base for base, following in zip(self.bases, behind, strict=True) if following is None or following > offset]
        return replace(self, bases=tuple(kept))

    def segments_before_offset(self, offset: int) -> SegmentListing:
        kept = tuple(base for base in self.bases if base < offset)
        end = self.bases[len(kept)] if len(kept) < len(self.bases) else self.end
        return replace(self, bases=kept, end=end)

    def split_by_size(self, max_bytes: int) -> Iterator[SegmentListing]:
        """Consecutive parts of at most ``max_bytes``. A larger segment is a part of its own."""
        rest = self
        while rest.bases:
            part = rest.first_segments_within_size(max_bytes)
            yield part
            rest = replace(rest, bases=rest.bases[len(part.bases) :])

    def first_segments_within_size(self, max_bytes: int) -> SegmentListing:
        """At least one segment."""
        total, count = 0, 0
        for base in self.bases:
            total += self.segment_size(base)
            if count and total > max_bytes:
                break
            count += 1
        end = self.bases[count] if count < len(self.bases) else self.end
        return replace(self, bases=self.bases[:count], end=end)


def list_log_segments(log_dir: Path, *, is_written_by_broker: bool) -> SegmentListing:
    """Without the newest if a broker still writes it. Raises UsageError if it is not a log directory, BadData for impossible names."""
    bases = list_segment_base_offsets(log_dir, is_written_by_broker=is_written_by_broker)
    return (
        SegmentListing(log_dir, tuple(bases[:-1]), bases[-1]) if is_written_by_broker and bases else SegmentListing(log_dir, tuple(bases))
    )


def read_file_into_memory(path: Path) -> Bytes:
    """Raises BadData if the file became shorter."""
    # Mapping the file would crash this process if a broker truncated it meanwhile.
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(0)
        data = np.empty(size, np.uint8)
        view, done = memoryview(data.data), 0
        while done < size and (count := file.readinto(view[done:])):
            done += count
    if done < size:
        raise BadData("it became shorter while it was read", segment=path.name, hint="The broker truncates its log; import again")
    return read_only_view(data)


def open_listed_segments(listing: SegmentListing, policy: CleanerPolicy, *, is_written_by_broker: bool) -> list[SourceSegment]:
    """Files to which a broker writes are read into memory, except staged ones; all others are memory-mapped. Raises BadData, OSError."""
    following = zip(listing.bases, (*listing.bases, listing.end)[1:], strict=True)
    staged = [listing.staged[base].open_segment(listing.log_dir, end, policy) for base, end in following if base in listing.staged]
    bases = listing.bases[len(staged) :]  # what is staged lies below the live log
    if not bases:
        return staged
    read: Callable[[Path], Bytes] = read_file_into_memory if is_written_by_broker else memory_map_file
    try:
        opened_live = open_segments_of_directory(
            listing.log_dir, bases, listing.end, policy.index_interval_bytes, policy.max_decompressed_batch_bytes, read
        )
    except BadData as error:
        if is_written_by_broker or error.cause not in INCOMPLETE_BATCH_CAUSES or not error.segment.startswith(f"{bases[-1]:020}"):
            raise
        hint = "If a broker is writing there, use --live, which leaves out the newest segment; else restore it from a replica"
        raise BadData(error.cause, segment=error.segment, position=error.position, offset=error.offset, hint=hint) from None
    return [*staged, *opened_live]


def listing_with_staged_files(
    listing: SegmentListing,
    held_files: OpenFilesStagedForDeletion,
    refusal_reason_of: Callable[[FileStagedForDeletion], str],
    policy: CleanerPolicy,
    tier_end: TierEnd,
    first_uncleaned_offset: Callable[[], int],
) -> SegmentListing:
    """Listing of a live log with the staged files that connect the tier's end with it.

    :param refusal_reason_of: returns why a file with missing offsets is refused; empty: it is not.

    :raises OSError: if a file of the log vanished meanwhile.
    """
    held_files.refusals.clear()
    live = listing.bases if listing.end is None else (*listing.bases, listing.end)
    if not live or (tier_end.position is not None and live[0] <= tier_end.position):
        return listing
    listed = list_staged_files(listing.log_dir, live)
    held_files.close_outdated_files(listed)
    held_files.open_files(listed)
    files, segments = held_files.held_files, []
    for each in files:
        try:
            segment = each.describe_segment(listing.log_dir, policy)
        except BadData as error:
            held_files.refusals[each.file.base] = str(error)
            continue
        if segment.last_offset < max(segment.base, tier_end.position or 0):
            continue
        reason = refusal_reason_of(each.file)
        if reason:
            held_files.refusals[segment.base] = reason
        else:
            segments.append(segment)
    if list_log_segments(listing.log_dir, is_written_by_broker=True) != listing:
        raise FileNotFoundError(f"{listing.log_dir}: a segment was rolled or staged while files were listed")
    cleaned = first_uncleaned_offset() if segments else 0
    choice = choose_staged_files(segments, BrokerLiveLog(live, first_live_epoch(listing.log_dir, live), cleaned), tier_end)
    held_files.refusals.update(choice.refusals)
    staged = {each.file.base: each for each in files if each.file.base in choice.taken}
    return replace(listing, bases=(*choice.taken, *listing.bases), staged=staged)


def describe_refused_staged_files(reason_by_base_offset: Mapping[int, str]) -> list[str]:
    named = {staged_segment_path(Path(), base): reason for base, reason in sorted(reason_by_base_offset.items())}
    return [f"{path} is staged for deletion and is not taken: {reason}" for path, reason in named.items()]


# ---- what is new ------------------------------------------------------------------------------------------------------------


def file_parts_after_offset(log_dir: Path, sources: Sequence[SourceSegment], last_offset: int) -> list[SegmentFilePart]:
    """A segment that contains it is cut between batches. Raises BadData."""
    return [
        piece for source in sources if (piece := _segment_part_between_offsets(log_dir, source, last_offset + 1, source.end)) is not None
    ]


def file_parts_before_offset(log_dir: Path, sources: Sequence[SourceSegment], start_offset: int) -> list[SegmentFilePart]:
    return [piece for source in sources if (piece := _segment_part_between_offsets(log_dir, source, source.base, start_offset)) is not None]


def _segment_part_between_offsets(log_dir: Path, source: SourceSegment, start_offset: int, end_offset: int) -> SegmentFilePart | None:
    """Batches of [start_offset, end_offset). Raises BadData for a batch across a bound."""
    path = log_dir / source.name
    if source.base >= start_offset and source.end <= end_offset:
        return SegmentFilePart(source, path, 0, source.size)
    table = source.table
    first = int(np.searchsorted(table.last_offset, start_offset))
    last = int(np.searchsorted(table.last_offset, end_offset))
    if last < len(table) and 0 <= int(table.base_offset[last]) < end_offset <= int(table.last_offset[last]):
        raise _batch_across_offset_error(source, last, end_offset)
    if first == last:
        return None
    if 0 <= int(table.base_offset[first]) < start_offset:
        raise _batch_across_offset_error(source, first, start_offset)
    part = segment_of_batch_range(source, first, last, max(start_offset, source.base), min(end_offset, source.end))
    return SegmentFilePart(part, path, int(table.position[first]), source.size)


def require_no_gap(
    state: PartitionState,
    end_offset: int,
    first_segment: SourceSegment,
    first_fetched_offset: int,
    refusal_reason_by_base_offset: Mapping[int, str],
    *,
    allow_gaps: bool,
) -> None:
    """Raise BadData for the gap after the tier's end, unless gaps are allowed.

    :param end_offset: last offset of the tier, or of what a truncation leaves.
    :param first_fetched_offset: a tier that ends before the first fetched offset is refused even if gaps are allowed.
    """
    if end_offset + 1 < first_fetched_offset:
        raise BadData(
            f"{state.topic_partition} ends at {end_offset} by now, and segments were fetched from offset {first_fetched_offset} on",
            segment=first_segment.name,
            hint="Another process was faster. Run the import again",
        )
    if not allow_gaps:
        name = state.topic_partition
        gap = f"the directory begins at offset {first_segment.base}, and {name} ends at {end_offset} in the tier: it leaves a gap"
        raise BadData(
            ". ".join([gap, *describe_refused_staged_files(refusal_reason_by_base_offset)]),
            segment=first_segment.name,
            hint=f"Give a directory that begins at {end_offset + 1} or before; if the missing offsets are lost, use --allow-gaps",
        )


def _batch_across_offset_error(source: SourceSegment, batch: int, offset: int) -> BadData:
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
class Divergence:
    """Offset from which a later leader has discarded the tier's data.

    offset: first discarded offset. It may lie after the tier's end if the tier expects an epoch there that the log does not have.
    known, given: of the tier, of the log.
    newer: the log has seen a later leader than the tier.
    """

    offset: int
    known: Lineage
    given: Lineage
    newer: bool

    def require_equal_records(
        self, state: PartitionState, log_dir: Path, count_equal_records: Callable[[], int], *, accept_loss: bool
    ) -> list[str]:
        """Raise BadData if the logs may differ before the divergence, and return notes for people. If the broker's lineage begins at the
        divergence, because retention moves the first entry up to the log start, at least one record below it must be equal
        (``count_equal_records``), unless ``accept_loss``.
        """
        if self.offset > self.given[0].start_offset or count_equal_records():
            return []
        if accept_loss:
            problem = f"offsets before {self.offset} may belong to the discarded log, too: no leader epoch shows where it diverged"
            return [f"{state.topic_partition}: {problem}"]
        raise BadData(
            f"leader epoch {self.given[0].epoch} disowns what the tier has of {state.topic_partition} from offset {self.offset} on,"
            " where this log begins. It is no longer known where that epoch began: records of the tier before that offset may be discarded,"
            " too",
            segment=str(log_dir / CHECKPOINT),
            hint=f"`topics delete {state.topic_partition}` and import this log; or `import --accept-truncation --accept-loss`, which keeps"
            f" what the tier has before offset {self.offset}",
        )

    def divergent_import_error(self, state: PartitionState, log_dir: Path) -> BadData:
        both = f"the tier has the leader epochs {_lineage_text(self.known)}, this log has {_lineage_text(self.given)}"
        if self.newer:
            name = state.topic_partition
            what = f"what the tier has of {name} from offset {self.offset} on, up to {state.end_offset}, was discarded: {both}"
            hint = (
                "The broker's log was truncated, by an unclean election or by hand. Use --accept-truncation to discard the same in "
                "the tier; if this is another cluster's log, import it under another name"
            )
            if self.offset <= state.log_start:
                hint = (
                    "This log has no record of the tier: `topics delete` the partition and import this log; if it is another "
                    "cluster's log, import it under another name"
                )
        else:
            what = f"it parts from what the tier has of {state.topic_partition} at offset {self.offset}: {both}"
            hint = "This is another cluster's log, or a replica that has missed a truncation. Import from the partition's leader"
        return BadData(what, segment=str(log_dir / CHECKPOINT), hint=hint)


def find_divergence(state: PartitionState, lineage: Lineage, end_offset: int) -> Divergence | None:
    """Find where a broker's log has discarded data of the tier, as after an unclean leader election. ``end_offset``: exclusive."""
    offset = first_contradicting_offset(state.lineage, state.end_offset + 1, lineage, end_offset) if state.has_segments else None
    if offset is None:
        return None
    return Divergence(offset, state.lineage, lineage, lineage[-1].epoch > state.lineage[-1].epoch)


StoredSegments = Callable[[RemoteLogSegmentMetadata], AbstractContextManager[SourceSegment]]
"""Opens a segment of the tier."""


def first_stored_offset(state: PartitionState, offset: int, stored_segments: StoredSegments) -> int:
    """Offset of the tier's first batch from ``offset`` on; the tier's end offset + 1 if it has none; ``offset`` itself if it is greater
    than that, or if rounds have cleaned beyond it and may have removed the batch. Raises StoreError, BadData.
    """
    if offset < first_dirty_offset_in(state.vector):
        return offset
    for segment in state.live:
        if segment.end_offset < offset:
            continue
        with stored_segments(segment) as source:
            place = int(np.searchsorted(source.table.last_offset, offset))
            if place < len(source.table):
                return max(int(source.table.base_offset[place]), offset)
    return max(offset, state.end_offset + 1)


def fill_lineage_gap(lineage: Lineage, tier_lineage: Lineage, gap_start: int, gap_end: int) -> Lineage:
    """Lineage of a log with the tier's epochs in [gap_start, gap_end), where the tier has no batch. Kafka moves the first epoch of a
    directory up to its log start.
    """
    before = (*truncate_lineage_at(lineage, gap_start), *(entry for entry in tier_lineage if gap_start <= entry.start_offset < gap_end))
    epoch = leader_epoch_at(lineage, gap_end)
    here = (EpochEntry(epoch, Offset(gap_end)),) if epoch >= 0 and epoch != leader_epoch_at(before, gap_end) else ()
    return (*before, *here, *(entry for entry in lineage if entry.start_offset > gap_end))


def find_divergence_outside_gaps(
    state: PartitionState, lineage: Callable[[], Lineage], end_offset: int, stored_segments: StoredSegments, gaps: list[tuple[int, int]]
) -> Divergence | None:
    """Divergence at batches that the tier still has.

    :param lineage: of the log, with ``fill_lineage_gap`` applied for ``gaps``.
    :param end_offset: exclusive.
    :param gaps: extended by the ranges [first offset, end) in which the tier has no batch and the log has other epochs.
    """
    while found := find_divergence(state, lineage(), end_offset):
        held = first_stored_offset(state, found.offset, stored_segments)
        if held == found.offset:
            break
        gaps.append((found.offset, held))
    return found


def require_segments_precede_tier(state: PartitionState, segments: Sequence[SegmentToImport], log_lineage: Lineage, log_dir: Path) -> None:
    """Raise BadData if the segments belong to another log, or a transaction is open at their end."""
    last = (log_lineage or lineage_from_batches([segments[-1].source]))[-1].epoch
    if not log_lineage and state.lineage and last > state.lineage[0].epoch:
        raise BadData(
            f"it was written in leader epoch {last}, and {state.topic_partition} begins with epoch {state.lineage[0].epoch} in the tier",
            segment=segments[-1].source.name,
            hint="This is another log",
        )
    undecided = segments[-1].states.first_open_offset()
    if undecided is not None:
        raise BadData(
            f"a transaction that begins at offset {undecided} is open where the tier begins, whose indexes do not tell how it ended",
            segment=segments[-1].source.name,
            hint="`topics delete` the partition and import the whole directory again",
        )
    if log_lineage:
        diverged = find_divergence(state, log_lineage, segments[-1].end + 1)
        if diverged is not None and diverged.offset < state.start_offset:
            raise diverged.divergent_import_error(state, log_dir)


def has_equal_tail_batches(
    state: PartitionState, sources: Sequence[SourceSegment], end_offset: int | None = None, compacted_below: int = 0
) -> bool:
    """Return whether the directory has a batch of the tail below ``end_offset`` (None: all) and not below ``compacted_below``, where they
    may have been compacted. Raises BadData if one differs.
    """
    filled = [source for source in sources if source.size]
    end = int(filled[-1].table.last_offset[-1]) if filled else -1
    seen = False
    for known in state.tail:
        holder = next((source for source in reversed(filled) if source.base <= known.base_offset), None)
        if holder is None or known.last_offset > end or known.last_offset < compacted_below:
            continue  # the directory lacks it: expired, an older copy, or compacted
        if end_offset is not None and known.last_offset >= end_offset:
            continue  # the batch is to be discarded
        place = int(np.searchsorted(holder.table.last_offset, known.last_offset))
        if place >= len(holder.table) or describe_batch(holder, place) != known:
            raise _unequal_content_error(state, known.base_offset, holder.name)
        seen = True
    return seen


def file_parts_below_offset(file_parts: list[SegmentFilePart], end_offset: int | None) -> list[SegmentFilePart]:
    """Parts before the first one with a batch at or after ``end_offset``."""
    if end_offset is None:
        return file_parts
    reaching = (
        place for place, piece in enumerate(file_parts) if piece.source.size and int(piece.source.table.last_offset[-1]) >= end_offset
    )
    return file_parts[: next(reaching, len(file_parts))]


def make_tier_unchanged_check(checked: PartitionState, log_dir: Path) -> Callable[[PartitionState], None]:
    """Return a function that raises BadData if the tier's end or leader epochs have changed."""

    def require_tier_unchanged(state: PartitionState) -> None:
        if (state.end_offset, state.lineage) != (checked.end_offset, checked.lineage):
            raise BadData(
                f"{checked.topic_partition} ends at {state.end_offset} by now, and the import continues it at {checked.end_offset}",
                segment=str(log_dir),
                hint="Another import was faster. Run the import again",
            )

    return require_tier_unchanged


def count_equal_last_records(
    state: PartitionState,
    listing: SegmentListing,
    stored_segments: StoredSegments,
    open_listed: Callable[[SegmentListing], Sequence[SourceSegment]],
    inflate_limit: int,
    *,
    end_offset: int,
    compacted_below: int = 0,
) -> int:
    """Number of the tier's last records below ``end_offset`` (exclusive) that a log directory has; 0 only if it has none.

    Records that only the directory has are skipped, and those below ``compacted_below`` that only the tier has, because of compaction.

    :param inflate_limit: bytes that one batch may inflate to.
    :raises BadData: if a record differs or is missing.
    """
    first = listing.bases[0] if listing.bases else end_offset
    for segment in reversed([one for one in state.live if one.end_offset >= first and one.start_offset < end_offset]):
        with stored_segments(segment) as source:
            known = _read_records_by_offset(source, first, end_offset - 1, inflate_limit, TAIL)
        if not known:
            continue
        sources = open_listed(listing.segments_from_offset(min(known)).segments_before_offset(max(known) + 1))
        given: dict[int, _Record] = {}
        for source in sources:
            given |= _read_records_by_offset(source, min(known), max(known), inflate_limit)
        for offset, record in known.items():
            if given.get(offset, None if offset >= compacted_below else record) != record:
                raise _unequal_content_error(state, offset, sources[-1].name if sources else str(listing.log_dir))
        if compared := len(given.keys() & known.keys()):
            return compared
    return 0


def has_all_tier_records(
    state: PartitionState,
    listing: SegmentListing,
    stored_segments: StoredSegments,
    open_listed: Callable[[SegmentListing], Sequence[SourceSegment]],
    inflate_limit: int,
) -> bool:
    """By offsets alone. Raises BadData, StoreError."""
    if not listing.bases or listing.bases[0] > state.start_offset:
        return False
    for segment in state.live:
        first, last = segment.start_offset, segment.end_offset
        with stored_segments(segment) as source:
            known = _record_offsets(source, first, last, inflate_limit)
        parts = open_listed(listing.segments_from_offset(first).segments_before_offset(last + 1))
        given = [_record_offsets(part, first, last, inflate_limit) for part in parts]
        if not np.isin(known, np.concatenate(given) if given else ()).all():
            return False
    return True


def _record_offsets(source: SourceSegment, first_offset: int, last_offset: int, max_inflated_bytes: int) -> npt.NDArray[np.int64]:
    """Data records in a range (inclusive), ascending."""
    rows = _rows_in_offset_range(source, first_offset, last_offset, max_inflated_bytes)
    return np.concatenate([np.empty(0, np.int64), *(rows.offset[chosen] for _, rows, chosen in rows)])


_Record = tuple[int, bytes | None, bytes | None]


def _read_records_by_offset(
    source: SourceSegment, first_offset: int, last_offset: int, max_inflated_bytes: int, max_batches: int = sys.maxsize
) -> dict[int, _Record]:
    """From the last ``max_batches`` batches of a range (inclusive)."""
    records: dict[int, _Record] = {}
    for chunk, rows, chosen in _rows_in_offset_range(source, first_offset, last_offset, max_inflated_bytes, max_batches):
        for row in chosen.tolist():
            key, value = (
                chunk.buf[int(begin) : int(begin) + int(size)].tobytes() if size >= 0 else None
                for begin, size in ((rows.key_start[row], rows.key_length[row]), (rows.value_start[row], rows.value_length[row]))
            )
            records[int(rows.offset[row])] = (int(rows.timestamp[row]), key, value)
    return records


def _rows_in_offset_range(
    source: SourceSegment, first_offset: int, last_offset: int, max_inflated_bytes: int, max_batches: int = sys.maxsize
) -> Iterator[tuple[BatchChunk, RecordRows, npt.NDArray[np.int64]]]:
    """Rows are valid until the next chunk."""
    table, buffers = source.table, RecordRowBuffers()
    filled = (table.count != 0) | (table.magic < 2)  # the header of a compressed batch of v0 or v1 states no count
    within = (table.last_offset >= first_offset) & (table.base_offset <= last_offset) & (table.control == NOT_CONTROL) & filled
    chosen = np.flatnonzero(within)[-max_batches:]
    wanted = np.zeros(len(table), np.bool_)
    wanted[chosen] = True
    for first, last in source.split_by_kind():
        if not wanted[first:last].any():
            continue
        for chunk in source.read_chunks(first, last, wanted[first:last], max_inflated_bytes, None):
            rows, _ = parse_records(table, chunk, buffers, source.name)
            yield chunk, rows, np.flatnonzero((rows.offset >= first_offset) & (rows.offset <= last_offset))


def _unequal_content_error(state: PartitionState, offset: int, source_name: str) -> BadData:
    error = BadData(
        f"what it has at offset {offset} is not what was imported as {state.topic_partition}: other content under known offsets",
        segment=source_name,
        hint="This is another log, or one that its broker has compacted since. Import it under another name; `topics delete` "
        "frees this one",
    )
    error.is_other_content = True
    return error


def _lineage_text(lineage: Sequence[EpochEntry]) -> str:
    return ", ".join(f"{entry.epoch} from {entry.start_offset}" for entry in lineage) or "none"
