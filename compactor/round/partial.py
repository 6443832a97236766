"""Partial rewrite of clean segments: only some batches are read, and the new segment is composed of new bytes and ranges that the store
copies.

    key directory + fold + dirty keys -> touched batches -> stretches (read, copied, read, ...) -> pieces of the new object

1. A batch that is not *touched* stays byte for byte the same, however the segment is cleaned: none of its records is superseded, and
   nothing in its header requires a change. Some of these are read all the same, because a store copies only long ranges.
2. WholeSegmentReadNeededError is raised if anything does not match. The segment is then read whole. Both ways give the same objects (I7).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from bloom.directory import (
    HAS_KEYLESS_RECORD,
    HAS_TOMBSTONE,
    HashPrefixes,
    KeyDirectory,
    concatenate_key_directories,
    estimate_key_directory_bytes,
)
from bloom.sidecar import RemovableRecordCounts, Sidecar
from compactor.cleaner.retention import BatchRetentionDecisions, RetentionRules, TransactionVerdicts, decide_by_headers
from compactor.cleaner.rewrite import NO_BYTES, SidecarBuilder, add_segment, verdicts_from_substitute
from compactor.cleaner.source import SourceSegment
from compactor.cleaner.worker_threads import WorkerThreads
from compactor.constants import NEVER_MS
from compactor.errors import BadData, NotFound
from compactor.kernels.common import FirstAndEndBatch, Flags
from compactor.model.segment import Balance, CountAndDigestSum, RemoteLogSegmentMetadata
from compactor.records.batches import (
    EMPTIED,
    HORIZON,
    NOT_CONTROL,
    BatchTable,
    Int64s,
    batch_table_from_headers,
    copy_batch_headers,
    crc32c_from_headers,
    select_batches_of_table,
    sha256_of_batch_headers,
)
from compactor.records.encode import COPY, FILTER, MAX_SEGMENT, BalanceDigestKey, digest_sum_of_headers
from compactor.records.producers import extract_runs_and_markers
from compactor.round.sources import StagedSegmentReader
from compactor.storage.port import ComposeSource, CopyLimits, FileRange, ObjectRangeToCopy
from compactor.tier.sidecars import SidecarStore

LEAST_COPY: Final = 256 << 10
"""Smallest range in bytes that is worth a server-side copy of its own."""
LEAST_COPIES: Final = 4
"""A segment smaller than this many of the shortest ranges that the store copies is read whole."""
MOST_READ: Final = 2
"""A segment of which more than one part in this many must be read is read whole."""
MOST_SHARE: Final = 16
"""Segment bytes for each byte of its key directory, at least; with fewer there is no directory."""
FEWER_KEYS: Final = 4
"""Records of the segment for each key of the round, at least; with fewer the directory is not asked, as hardly a batch would be
untouched.
"""


PositionAndLength = tuple[int, int]
"""Byte position in a log, and number of bytes."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Consecutive batches of a segment, from ``first`` to ``last`` (exclusive)."""

    first: int
    last: int
    copied_batch_flags: bool


@dataclass(frozen=True, eq=False)
class PartialRewritePlan:
    """Plan of a partial rewrite.

    directory: loads the segment's key directory, which is too large to be held in memory during a round.
    stretches: by turns read and copied; together they are the whole segment.
    version: of the segment's object, which must not change meanwhile.
    """

    directory: Callable[[], KeyDirectory]
    table: BatchTable
    stretches: tuple[BatchRange, ...]
    version: str

    @property
    def read_batch_indexes(self) -> Int64s:
        return np.concatenate([np.arange(stretch.first, stretch.last) for stretch in self.stretches if not stretch.copied_batch_flags])

    @property
    def byte_ranges_to_read(self) -> tuple[PositionAndLength, ...]:
        return tuple(byte_range_of_batches(self.table, stretch) for stretch in self.stretches if not stretch.copied_batch_flags)

    @property
    def copied_batch_flags(self) -> Flags:
        stays = np.ones(len(self.table), np.bool_)
        stays[self.read_batch_indexes] = False
        return stays

    @property
    def bytes_copied(self) -> int:
        return int(self.table.size[self.copied_batch_flags].sum())


def byte_range_of_batches(table: BatchTable, batch_range: BatchRange) -> PositionAndLength:
    start = int(table.position[batch_range.first])
    return start, int(table.position[batch_range.last - 1] + table.size[batch_range.last - 1]) - start


# ---- whether a segment is read in part


def is_key_directory_worthwhile(segment: RemoteLogSegmentMetadata, batch_count: int, copy_limits: CopyLimits | None) -> bool:
    """:param copy_limits: None if the store cannot copy ranges."""
    size = segment.size_bytes
    if copy_limits is None or size < LEAST_COPIES * min_copy_bytes(copy_limits) or not segment.recorded_size_and_digests("log").batches:
        return False
    return MOST_SHARE * estimate_key_directory_bytes(batch_count, segment.records) <= size


def min_copy_bytes(copy_limits: CopyLimits) -> int:
    """Return the store's limit, and at least LEAST_COPY."""
    return max(copy_limits.min_run_bytes, LEAST_COPY)


def whole_read_reason(
    segment: RemoteLogSegmentMetadata, sidecar: Sidecar | None, dirty_key_count: int, copy_limits: CopyLimits | None
) -> str:
    """Judged without the key directory; empty: a part may be enough.

    :param copy_limits: None if the store cannot copy ranges.
    """
    if copy_limits is None:
        return "its store does not copy ranges"
    if segment.size_bytes < LEAST_COPIES * min_copy_bytes(copy_limits):
        return "it is short"
    if sidecar is None:
        return "it has no sidecar"
    if segment.has_unread_tail or segment.negative_timestamps or "txnindex" in segment.files:
        return "its end, its timestamps or its aborted transactions require reading all of it"
    if segment.content is None or not segment.recorded_size_and_digests("log").batches:
        return "an earlier program wrote it"
    if dirty_key_count > sidecar.records // FEWER_KEYS:
        return f"the round brings {dirty_key_count} keys, it has {sidecar.records} records"
    return ""


def flag_touched_batches(
    table: BatchTable,
    decisions: BatchRetentionDecisions,
    directory: KeyDirectory,
    may_hold_dirty_key: Flags,
    now_ms: int,
    *,
    drops_keyless: bool = True,
) -> Flags:
    """Return for each batch whether cleaning may change it, so that it cannot be copied. ``decisions``: by the headers alone."""
    waiting = ((table.attributes & np.int16(HORIZON)) != 0) & (table.base_timestamp > now_ms)
    due = ((directory.flags & HAS_TOMBSTONE) != 0) & ~waiting
    if drops_keyless:
        due |= (directory.flags & HAS_KEYLESS_RECORD) != 0
    by_header = (decisions.action != FILTER) & (decisions.action != COPY)
    undated = (table.control != NOT_CONTROL) & (decisions.action == FILTER)
    # An empty batch that an earlier round retained is removed by the next round that reads it.
    found: Flags = may_hold_dirty_key | due | by_header | undated | (table.count == 0) | (table.control < EMPTIED)
    # A filler may be needed after the last batch (coverage, I1).
    found[-1:] = True
    return found


def divide_into_stretches(table: BatchTable, may_change_flags: Flags, copy_limits: CopyLimits) -> tuple[BatchRange, ...]:
    """Return an empty tuple if too many bytes would have to be read.

    A range that is read between two copied ones includes batches of at least ``copy_limits.min_run_bytes`` that will not change, so that
    the new part of the object is large enough for the store.
    """
    if MOST_READ * int(table.size[may_change_flags].sum()) > int(table.size.sum()):
        return ()
    end = np.concatenate((table.position, table.position[-1:] + table.size[-1:]))
    least, shortest_copy, total = copy_limits.min_run_bytes, min_copy_bytes(copy_limits), len(table)
    places = [*np.flatnonzero(may_change_flags).tolist(), total]
    found: list[BatchRange] = []
    at = number = 0
    while at < total:
        if int(end[places[number]] - end[at]) >= shortest_copy:
            found.append(BatchRange(at, places[number], copied_batch_flags=True))
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
            found.append(BatchRange(first, at, copied_batch_flags=False))
    read = sum(byte_range_of_batches(table, stretch)[1] for stretch in found if not stretch.copied_batch_flags)
    return tuple(found) if MOST_READ * read <= int(end[-1]) else ()


# ---- the new segment


def log_pieces(plan: PartialRewritePlan, source_key: str, rewritten_log: Path, rewritten_batches: BatchTable) -> list[ComposeSource]:
    made: list[ComposeSource] = []
    headers = plan.directory().headers
    for stretch, (first, last) in zip(plan.stretches, _rewritten_batch_ranges(plan, rewritten_batches), strict=True):
        if stretch.copied_batch_flags:
            start, length = byte_range_of_batches(plan.table, stretch)
            crc = crc32c_from_headers(headers[stretch.first : stretch.last])
            made.append(ObjectRangeToCopy(source_key, start, length, plan.version, crc))
        elif last > first:
            made.append(
                FileRange(rewritten_log, *byte_range_of_batches(rewritten_batches, BatchRange(first, last, copied_batch_flags=False)))
            )
    return made


def composed_key_directory(
    plan: PartialRewritePlan, segment_id: str, rewritten_batches: BatchTable, directory_of_rewritten: KeyDirectory
) -> KeyDirectory:
    source = plan.directory()
    return concatenate_key_directories(
        segment_id,
        [
            source.key_directory_of_batches(stretch.first, stretch.last)
            if stretch.copied_batch_flags
            else directory_of_rewritten.key_directory_of_batches(first, last)
            for stretch, (first, last) in zip(plan.stretches, _rewritten_batch_ranges(plan, rewritten_batches), strict=True)
        ],
    )


def _rewritten_batch_ranges(plan: PartialRewritePlan, rewritten_batches: BatchTable) -> Iterator[FirstAndEndBatch]:
    """Yield, for each range of source batches, the first and the end index (exclusive) of the batches that the cleaner wrote in its place;
    (0, 0) if the store copies the range. A filler batch belongs to the last range.
    """
    done = 0
    for number, stretch in enumerate(plan.stretches):
        if stretch.copied_batch_flags:
            yield 0, 0
            continue
        end = plan.table.last_offset[stretch.last - 1]
        is_last = number == len(plan.stretches) - 1
        upto = len(rewritten_batches) if is_last else int(np.searchsorted(rewritten_batches.last_offset, end, side="right"))
        yield done, upto
        done = upto


def composed_removable_counts(plan: PartialRewritePlan, counts_of_rewritten: RemovableRecordCounts) -> RemovableRecordCounts:
    """A copied batch with tombstones counts as one tombstone with the batch's delete horizon, and one with records without a key as one
    such record.
    """
    flags = plan.directory().flags
    buried = plan.copied_batch_flags & ((flags & HAS_TOMBSTONE) != 0)
    keyless = plan.copied_batch_flags & ((flags & HAS_KEYLESS_RECORD) != 0)
    return RemovableRecordCounts(
        counts_of_rewritten.tombstones + int(np.count_nonzero(buried)),
        counts_of_rewritten.tombstones_without_horizon,
        min(counts_of_rewritten.earliest_tombstone_horizon_ms, int(plan.table.base_timestamp[buried].min(initial=NEVER_MS))),
        counts_of_rewritten.keyless_records + int(np.count_nonzero(keyless)),
    )


def composed_sidecar(source_sidecar: Sidecar, segment_id: str, removable_counts: RemovableRecordCounts, table: BatchTable) -> Sidecar:
    """Keep the filter and the key sketch of the source. Both may contain keys that are gone; this may cause a needless read, but loses no
    record.
    """
    runs, markers = extract_runs_and_markers(table)
    records = int(table.count[table.control == NOT_CONTROL].sum())
    return Sidecar(
        segment_id,
        records,
        source_sidecar.distinct_keys,
        removable_counts,
        runs,
        markers,
        source_sidecar.sketch,
        source_sidecar.made_for,
        source_sidecar.filter,
        inherited=True,
    )


KEPT = 3
"""Number of key directories held in memory: of the segment being read, of the one being uploaded, and of the next one."""


class WholeSegmentReadNeededError(Exception):
    """Raised if a segment must be read completely after all. The segment is not corrupt."""


@dataclass(frozen=True, eq=False)
class SegmentPartToRead:
    """The part of a segment that is read when the store copies the rest.

    whole: all batches of the segment without their bytes, for transaction outcomes.
    rows: batches that are read.
    source, verdicts: these batches as a segment, and their transaction outcomes.
    """

    splice: PartialRewritePlan
    whole: SourceSegment
    whole_verdicts: TransactionVerdicts
    rows: Int64s
    source: SourceSegment
    verdicts: TransactionVerdicts

    def require_matching_batches(self) -> None:
        """Raise WholeSegmentReadNeededError if the batches are corrupt or do not match the key directory."""
        source = self.source
        length = int(source.table.size.sum())
        wanted = self.splice.directory().headers[self.rows]
        if len(source.buf) != length or not np.array_equal(copy_batch_headers(source.buf, source.table.position), wanted):
            raise WholeSegmentReadNeededError(f"{source.name}: its batches do not match its key directory")
        try:
            source.verify_batches(0, len(source.table))
        except BadData as wrong:
            raise WholeSegmentReadNeededError(str(wrong)) from None


class KeyDirectoryCache:
    """Cache of the latest few key directories, used only if they match the recorded digest of their segments. Thread-safe."""

    def __init__(self, sidecars: SidecarStore) -> None:
        self._sidecars = sidecars
        self._kept: dict[str, KeyDirectory] = {}
        self._lock = threading.Lock()

    def load_key_directories(self, segments: Sequence[RemoteLogSegmentMetadata]) -> Iterator[tuple[KeyDirectory | None, int]]:
        """Yield for each segment its key directory (None if none matches it) and the fetched bytes. Raises StoreError."""
        found = self._sidecars.load_key_directories([segment.id for segment in segments])
        for segment, (directory, fetched) in zip(segments, found, strict=True):
            is_its = (
                directory is not None and sha256_of_batch_headers(directory.headers) == segment.recorded_size_and_digests("log").batches
            )
            yield directory if is_its else None, fetched

    def add_key_directory(self, directory: KeyDirectory) -> None:
        with self._lock:
            self._kept[directory.segment_id] = directory
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]

    def load_key_directory(self, segment: RemoteLogSegmentMetadata) -> KeyDirectory:
        """Raises StoreError, and WholeSegmentReadNeededError if the key directory no longer exists or does not match."""
        with self._lock:
            kept = self._kept.get(segment.id)
        if kept is not None:
            return kept
        ((directory, _),) = self.load_key_directories([segment])
        if directory is None:
            raise WholeSegmentReadNeededError(f"the key directory of segment {segment.id} is gone")
        self.add_key_directory(directory)
        return directory


@dataclass(frozen=True)
class KeyDirectoryLookupResult:
    """Result of one lookup.

    part: None if the segment must be read completely.
    meets_none: whether no batch must be read because of a key.
    """

    part: SegmentPartToRead | None = None
    meets_none: bool = False


@dataclass(frozen=True)
class PartToReadFinder:
    reading: StagedSegmentReader
    rules: RetentionRules
    pieces: HashPrefixes
    directories: KeyDirectoryCache

    def find_part(self, directory: KeyDirectory, header_source: SourceSegment, verdicts: TransactionVerdicts) -> KeyDirectoryLookupResult:
        """Raises StoreError.

        :param header_source: the segment's batch headers, taken from its sidecar.
        """
        may_hold_dirty_key = directory.flag_matching_batches(self.pieces)
        return KeyDirectoryLookupResult(
            self._find_part(directory, may_hold_dirty_key, header_source, verdicts), meets_none=not may_hold_dirty_key.any()
        )

    def _find_part(
        self, directory: KeyDirectory, may_hold_dirty_key: Flags, header_source: SourceSegment, verdicts: TransactionVerdicts
    ) -> SegmentPartToRead | None:
        layout = self.reading.staging.layout
        copies = layout.log_file_copy_limits
        if copies is None:
            return None
        table = batch_table_from_headers(directory.headers, directory.control, directory.coordinator_epoch)
        whole = replace(header_source, table=table, buf=NO_BYTES)
        of_all = verdicts_from_substitute(whole, header_source, verdicts)
        if of_all.indexed.any() or len(of_all.txn_entries):
            return None
        decisions = decide_by_headers(table, of_all, self.rules, whole.name)
        marked = flag_touched_batches(
            table, decisions, directory, may_hold_dirty_key, self.rules.now_ms, drops_keyless=self.rules.drops_keyless
        )
        stretches = divide_into_stretches(table, marked, copies)
        if not any(stretch.copied_batch_flags for stretch in stretches):
            return None
        try:
            segment = self.reading.live[header_source.ordinal]
            version = layout.log_object_version(self.reading.partition, segment)
        except (NotFound, BadData):
            return None  # reading the whole segment reports the error
        self.directories.add_key_directory(directory)
        splice = PartialRewritePlan(partial(self.directories.load_key_directory, segment), table, stretches, version)
        rows = splice.read_batch_indexes
        flags = (of_all.aborted[rows], of_all.discardable[rows], of_all.indexed[rows])
        source = replace(whole, table=select_batches_of_table(table, rows))
        return SegmentPartToRead(splice, whole, of_all, rows, source, TransactionVerdicts(*flags, of_all.txn_entries))


@dataclass(frozen=True, eq=False)
class ComposedSegment:
    """Segment that the store composes. ``due``: records that later rounds will remove."""

    directory: KeyDirectory
    table: BatchTable
    due: RemovableRecordCounts


def describe_composed_segment(
    segment_part: SegmentPartToRead, segment_id: str, output: SourceSegment, hash_key: bytes, inflate_limit: int
) -> ComposedSegment:
    """Raises WholeSegmentReadNeededError if the segment would be too large or the offsets of its batches would not ascend."""
    splice = segment_part.splice
    builder = SidecarBuilder(output, None, hash_key, counts_distinct_keys=False, collects_key_directory=True)
    with WorkerThreads(1) as workers:
        add_segment(builder, output, inflate_limit, workers)
    directory = composed_key_directory(splice, segment_id, output.table, builder.build_key_directory(segment_id))
    table = batch_table_from_headers(directory.headers, directory.control, directory.coordinator_epoch)
    if int(table.size.sum()) > MAX_SEGMENT or np.any(table.base_offset[1:] <= table.last_offset[:-1]):
        raise WholeSegmentReadNeededError(f"{output.name}: the parts of the composed object do not match")
    return ComposedSegment(directory, table, composed_removable_counts(splice, builder.due))


def balance_with_copies(
    segment_part: SegmentPartToRead,
    balance_of_read_batches: Balance,
    recorded_source_sum: CountAndDigestSum | None,
    balance_key: BalanceDigestKey,
) -> Balance:
    """Return the group's balance with the copied batches added as unchanged. Raises WholeSegmentReadNeededError if the read and the copied
    batches do not add up to ``recorded_source_sum``.
    """
    rest = digest_sum_of_headers(segment_part.splice.directory().headers[segment_part.splice.copied_batch_flags], balance_key)
    sources = balance_of_read_batches.sources.plus(rest)
    if sources != recorded_source_sum:
        raise WholeSegmentReadNeededError(f"{segment_part.source.name}: its batches do not come to the sum that was recorded of them")
    return balance_of_read_batches.model_copy(
        update={"sources": sources, "left": balance_of_read_batches.left.plus(rest), "result": balance_of_read_batches.result.plus(rest)}
    )
