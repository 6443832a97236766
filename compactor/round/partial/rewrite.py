"""Partial rewrite of clean segments: only some batches are read, and the new segment is composed of new bytes and ranges that the store
copies.

WholeSegmentReadNeededError is raised if anything does not match: a key directory is gone, bytes differ from it, or the store refuses to
copy. The segment is then read whole. Both ways give the same objects (I7).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bloom.directory import HashPrefixes, KeyDirectory
from bloom.sidecar import RemovableRecordCounts
from compactor.cleaner.passes.retention import RetentionRules, decide_batch_retention_by_headers
from compactor.cleaner.passes.sidecar_builder import (
    NO_BYTES,
    SidecarBuilder,
    add_segment_to_sidecar_builder,
    txn_verdicts_from_substitute_segment,
)
from compactor.cleaner.passes.source import SourceSegment
from compactor.cleaner.passes.transactions import TransactionVerdicts
from compactor.cleaner.passes.worker_threads import WorkerThreads
from compactor.errors import BadData, NotFound
from compactor.kernels.common import Flags
from compactor.model.balance import Balance, CountAndDigestSum
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.records.balance import BalanceDigestKey, digest_sum_of_headers
from compactor.records.batches import BatchTable, Int64s, batch_table_from_headers, select_batches_of_table
from compactor.records.encode import MAX_SEGMENT
from compactor.records.headers import copy_batch_headers, sha256_of_batch_headers
from compactor.round.partial.plan import (
    PartialRewritePlan,
    divide_into_read_and_copied_ranges,
    flag_batches_that_may_change,
    key_directory_of_composed_segment,
    removable_counts_of_composed_segment,
)
from compactor.round.sources import StagedSegmentReader
from compactor.tier.sidecars import SidecarStore

KeyDirectoryAndFetchedByteCount = tuple[KeyDirectory | None, int]
"""Key directory of a segment, and the number of bytes that were fetched for it."""
KEPT = 3
"""Number of key directories held in memory: of the segment being read, of the one being uploaded, and of the next one."""


class WholeSegmentReadNeededError(Exception):
    """Raised if a segment of which only a part was to be read must be read completely. It does not mean that the segment is corrupt."""


@dataclass(frozen=True, eq=False)
class SegmentPartToRead:
    """The part of a segment that is read when the store copies the rest.

    splice: plan that states which batches are read and which the store copies.
    whole: all batches of the segment without their bytes, from which transaction outcomes are computed.
    rows: indexes of the batches that are read.
    source: the batches that are read, as a segment of their own.
    verdicts: transaction outcomes of the batches that are read.
    """

    splice: PartialRewritePlan
    whole: SourceSegment
    whole_verdicts: TransactionVerdicts
    rows: Int64s
    source: SourceSegment
    verdicts: TransactionVerdicts

    def raise_unless_batches_match_key_directory(self) -> None:
        """Raise WholeSegmentReadNeededError if the batches that were read are corrupt or do not match the key directory."""
        source = self.source
        length = int(source.table.size.sum())
        wanted = self.splice.directory().headers[self.rows]
        if len(source.buf) != length or not np.array_equal(copy_batch_headers(source.buf, source.table.position), wanted):
            raise WholeSegmentReadNeededError(f"{source.name}: its batches do not match its key directory")
        try:
            source.verify_batch_crcs_unless_verified(0, len(source.table))
        except BadData as wrong:
            raise WholeSegmentReadNeededError(str(wrong)) from None


class KeyDirectoryCache:
    """Cache of the latest few key directories (indexes of the keys in a segment's batches). A directory is used only if it matches the
    recorded digest of its segment. Thread-safe.
    """

    def __init__(self, sidecars: SidecarStore) -> None:
        self._sidecars = sidecars
        self._kept: dict[str, KeyDirectory] = {}
        self._lock = threading.Lock()

    def load_key_directories(self, segments: Sequence[RemoteLogSegmentMetadata]) -> Iterator[KeyDirectoryAndFetchedByteCount]:
        """Yield, for each segment, its key directory and the number of bytes fetched for it. The directory is None if the segment has none,
        or none that matches it. Raises StoreError.
        """
        found = self._sidecars.load_key_directories([segment.id for segment in segments])
        for segment, (directory, fetched) in zip(segments, found, strict=True):
            is_its = (
                directory is not None and sha256_of_batch_headers(directory.headers) == segment.recorded_size_and_digests("log").batches
            )
            yield directory if is_its else None, fetched

    def add_key_directory(self, directory: KeyDirectory) -> None:
        """Add a segment's key directory to the cache."""
        with self._lock:
            self._kept[directory.segment_id] = directory
            while len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]

    def load_key_directory(self, segment: RemoteLogSegmentMetadata) -> KeyDirectory:
        """Return the key directory of a segment that has one, from the cache or the store. Raises StoreError, and
        WholeSegmentReadNeededError if the directory no longer exists or does not match the segment.
        """
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
    """Result of looking up the dirty keys in one segment's key directory.

    part: the part of the segment to read; None if the segment must be read completely.
    meets_none: whether the segment has none of the dirty keys, so that no batch must be read because of a key.
    """

    part: SegmentPartToRead | None = None
    meets_none: bool = False


@dataclass(frozen=True)
class PartToReadFinder:
    """Search for the part of a clean segment that must be read, by the segment's key directory.

    pieces: the dirty keys' hashes, shortened to 32 bits as in key directories (bloom.directory).
    """

    reading: StagedSegmentReader
    rules: RetentionRules
    pieces: HashPrefixes
    directories: KeyDirectoryCache

    def find_segment_part_to_read(
        self, directory: KeyDirectory, header_source: SourceSegment, verdicts: TransactionVerdicts
    ) -> KeyDirectoryLookupResult:
        """Return which part of a segment must be read, according to its key directory. Raises StoreError.

        :param header_source: the segment's batch headers, taken from its sidecar.
        :param verdicts: outcomes of transactions for these batches.
        """
        may_hold_dirty_key = directory.flag_batches_possibly_with_keys(self.pieces)
        return KeyDirectoryLookupResult(
            self._part_to_read_or_none(directory, may_hold_dirty_key, header_source, verdicts), meets_none=not may_hold_dirty_key.any()
        )

    def _part_to_read_or_none(
        self, directory: KeyDirectory, may_hold_dirty_key: Flags, header_source: SourceSegment, verdicts: TransactionVerdicts
    ) -> SegmentPartToRead | None:
        """Return the part of a segment to read, or None if the segment must be read completely.

        :param may_hold_dirty_key: flag for each batch of the segment: whether it may hold a dirty key.
        :param header_source: the segment's batch headers, taken from its sidecar.
        :param verdicts: outcomes of transactions for these batches.
        """
        layout = self.reading.staging.layout
        copies = layout.log_file_copy_limits
        if copies is None:
            return None
        table = batch_table_from_headers(directory.headers, directory.control, directory.coordinator_epoch)
        whole = replace(header_source, table=table, buf=NO_BYTES)
        of_all = txn_verdicts_from_substitute_segment(whole, header_source, verdicts)
        if of_all.indexed.any() or len(of_all.txn_entries):
            return None
        decisions = decide_batch_retention_by_headers(table, of_all, self.rules, whole.name)
        marked = flag_batches_that_may_change(
            table, decisions, directory, may_hold_dirty_key, self.rules.now_ms, drops_keyless=self.rules.drops_keyless
        )
        stretches = divide_into_read_and_copied_ranges(table, marked, copies)
        if not any(stretch.copied_batch_flags for stretch in stretches):
            return None
        try:
            segment = self.reading.live[header_source.ordinal]
            version = layout.log_object_version(self.reading.partition, segment)
        except (NotFound, BadData):
            return None  # reading the whole segment reports the error
        self.directories.add_key_directory(directory)
        splice = PartialRewritePlan(partial(self.directories.load_key_directory, segment), table, stretches, version)
        rows = splice.indexes_of_batches_to_read
        flags = (of_all.aborted[rows], of_all.discardable[rows], of_all.indexed[rows])
        source = replace(whole, table=select_batches_of_table(table, rows))
        return SegmentPartToRead(splice, whole, of_all, rows, source, TransactionVerdicts(*flags, of_all.txn_entries))


# ---- the new segment


@dataclass(frozen=True, eq=False)
class ComposedSegment:
    """New segment whose bytes the store copies for the most part.

    directory: key directory of the segment.
    table: its batches.
    due: numbers of its records that later rounds will remove.
    """

    directory: KeyDirectory
    table: BatchTable
    due: RemovableRecordCounts


def describe_composed_segment(
    segment_part: SegmentPartToRead, segment_id: str, output: SourceSegment, hash_key: bytes, inflate_limit: int
) -> ComposedSegment:
    """Return the key directory, batches and removable records of a composed segment (most of whose bytes the store copies). Raises
    WholeSegmentReadNeededError if the segment would be too large or the offsets of its batches would not ascend.

    :param segment_id: id of the composed segment.
    :param output: the cleaner's output for the batches that were read.
    :param inflate_limit: bytes that one batch may inflate to.
    """
    splice = segment_part.splice
    builder = SidecarBuilder(output, None, hash_key, counts_distinct_keys=False, collects_key_directory=True)
    with WorkerThreads(1) as workers:
        add_segment_to_sidecar_builder(builder, output, inflate_limit, workers)
    directory = key_directory_of_composed_segment(splice, segment_id, output.table, builder.build_key_directory(segment_id))
    table = batch_table_from_headers(directory.headers, directory.control, directory.coordinator_epoch)
    if int(table.size.sum()) > MAX_SEGMENT or np.any(table.base_offset[1:] <= table.last_offset[:-1]):
        raise WholeSegmentReadNeededError(f"{output.name}: the parts of the composed object do not match")
    return ComposedSegment(directory, table, removable_counts_of_composed_segment(splice, builder.due))


def balance_including_copied_batches(
    segment_part: SegmentPartToRead,
    balance_of_read_batches: Balance,
    recorded_source_sum: CountAndDigestSum | None,
    balance_key: BalanceDigestKey,
) -> Balance:
    """Return the group's balance (sums which show that every batch was kept or dropped for a reason), with the copied batches added as
    unchanged.

    :param balance_of_read_batches: balance of the batches that were read.
    :param recorded_source_sum: sum over all batches of the source, from its metadata; WholeSegmentReadNeededError is raised if the read and
        the copied batches do not add up to it.
    """
    rest = digest_sum_of_headers(segment_part.splice.directory().headers[segment_part.splice.copied_batch_flags], balance_key)
    sources = balance_of_read_batches.sources.plus(rest)
    if sources != recorded_source_sum:
        raise WholeSegmentReadNeededError(f"{segment_part.source.name}: its batches do not come to the sum that was recorded of them")
    return balance_of_read_batches.model_copy(
        update={"sources": sources, "left": balance_of_read_batches.left.plus(rest), "result": balance_of_read_batches.result.plus(rest)}
    )
