"""Reading a range of offsets of one partition from the tier.
If an object has been replaced since the read was planned, the reader reads the control log again and continues after the last offset that
it has returned.
read_committed has the meaning of Kafka's consumer: no records of aborted transactions, and none at or above the last stable offset.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bloom.filter import key_hash_tag, siphash128, siphash_key_halves
from compactor.access.tier import Tier
from compactor.cleaner.disk_map import SEEN, DiskOffsetMap, hash_range_of_word
from compactor.cleaner.keys import KeyHashSet
from compactor.config.units import format_size
from compactor.control.logs import retry_if_object_missing
from compactor.control.state import PartitionState
from compactor.errors import BadData, OutOfBudget
from compactor.kernels.common import Flags, Hashes, HashKeyHalves
from compactor.kernels.jit import kernel
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.read.outcomes import (
    CRC_MISMATCH,
    UNDECIDABLE,
    UNKNOWN,
    DamagedOffsetRange,
    LogIdentity,
    TransactionOutcomeFinder,
    damaged_offset_ranges,
    find_readable_after,
    first_diverging_offset,
    flag_damaged_batches,
    log_damage,
    log_identity,
    read_before_damage,
)
from compactor.read.pieces import (
    PieceLocation,
    PiecePrefetcher,
    SegmentGone,
    SegmentPiece,
    SegmentReader,
    larger_piece_bytes,
    listed_stable_offset,
    prefetch_results,
)
from compactor.read.records import SelectedRecords
from compactor.records.batches import ABORT, NOT_CONTROL, Bytes, Int64s
from compactor.records.codecs import GrowingByteBuffer
from compactor.records.rows import Int32s, RecordRowBuffers, parse_records
from compactor.round.mirroring import complete_metadata

MAX_SPILL_SPAN: Final = SEEN - 1
"""Largest number of offsets in a range whose keys are sorted on disk: an offset takes 32 bits there."""

FIRST_PIECE_BYTES: Final = 1 << 20
"""Size of the first piece: with a limit, Spark pulls no more. Later pieces are larger."""

MAX_RETRIES: Final = 5
"""Number of times that the control log is read again without progress before a missing object counts as damage."""
KeyHashesAndRows = tuple[Hashes, Int64s]
"""Hash of the key of each row, and the number of the row."""
SelectionAndLastOffset = tuple[SelectedRecords, int]
"""Rows of a chunk, and the last offset (inclusive) that is still wanted."""
BatchesToCopy = tuple[SegmentPiece, Flags]
"""Batches of a segment, with a flag for each: whether it may be copied."""


class _PieceToRead(NamedTuple):
    """Offsets ``first`` to ``last`` are inclusive; flags per batch: to be read; left out because of damage."""

    piece: SegmentPiece
    wanted: Flags
    left_out: Flags
    first: int
    last: int


@dataclass(frozen=True)
class OffsetRangeToRead:
    """Offsets of one partition to read.
    first, last: both inclusive.
    segments: live segments when the read was planned.
    log: identity at that time; None if changes of it need not be noticed.
    """

    partition: TopicPartition
    first: int
    last: int
    segments: tuple[RemoteLogSegmentMetadata, ...]
    log: LogIdentity | None = None


class LogChanged(BadData):
    """Raised if the log was truncated, or its topic created again."""

    def __init__(self, read_range: OffsetRangeToRead, offset: int) -> None:
        where = f"{read_range.partition}: offsets from {offset} on were replaced while {read_range.first} to {read_range.last} were read"
        super().__init__(where, segment="the tier", hint="Read them again")


class LogBeginningDeleted(LogChanged):
    """Raised if records that were still to be read were deleted."""

    def __init__(self, read_range: OffsetRangeToRead, offset: int) -> None:
        where = f"{read_range.partition}: offsets below {offset} were deleted while {read_range.first} to {read_range.last} were read"
        BadData.__init__(self, where, segment="the tier", hint=f"Read them again from offset {offset} on")


@dataclass(frozen=True)
class DiskKeySortRequest:
    """Sort key hashes on the local disk, 16 bytes for each record; a second pass reads values.
    records: most records that the range can hold.
    disk_bytes: 0 for no limit.
    """

    records: int
    disk_bytes: int


@dataclass(frozen=True)
class LastRecordOfEachKeyRequest:
    """The last record of each key in a range, without tombstones.
    key_ranges: number of equal ranges of key hashes.
    key_range: number of the wanted range, from 0.
    hash_key: empty to read it from the tier.
    spill: for at most MAX_SPILL_SPAN offsets and with ``key_ranges`` 1; None to hold keys in memory.
    """

    key_range: int
    key_ranges: int
    map_budget_bytes: int
    hash_key: bytes = b""
    spill: DiskKeySortRequest | None = None


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a range.
    inflate_limit: of a batch, in bytes.
    requests_in_advance: of 16 MiB each.
    skip_damaged: whether offsets that cannot be read are reported and skipped. Not allowed with ``last_records_only``, because an older
    value of a key would take the place of one that cannot be read.
    """

    read_committed: bool
    inflate_limit: int
    last_records_only: LastRecordOfEachKeyRequest | None = None
    requests_in_advance: int = 0
    skip_damaged: bool = False


def last_stable_offset(tier: Tier, state: PartitionState) -> int:
    """First offset of the oldest transaction open at the tier's end, or the end offset (exclusive): from the metadata of the last segment;
    in a broker-managed tier from its producer snapshot, in a listed tier from the batches. Raises StoreError, BadData.
    """
    if not state.has_segments:
        return state.end_offset + 1
    if not tier.kind.describes_segments:
        return listed_stable_offset(tier, tier.listed_tier, state)
    last = state.live[-1]
    if not last.files:
        last = complete_metadata(tier.ports.layout, state.topic_partition, last)
    return state.end_offset + 1 if last.open_txn_offset < 0 else last.open_txn_offset


class RecordAtTime(NamedTuple):
    offset: int
    timestamp_ms: int


def find_record_for_time(
    tier: Tier,
    partition: TopicPartition,
    live_segments: Sequence[RemoteLogSegmentMetadata],
    timestamp_ms: int,
    max_batch_bytes: int,
    first_offset: int = 0,
) -> RecordAtTime | None:
    """First record at ``timestamp_ms`` or later, or None (Kafka: offsetsForTimes).
    :param first_offset: inclusive.
    :raises SegmentGone: if a segment was replaced meanwhile.
    """
    scratch = _ParseBuffers()
    for metadata in live_segments:
        if metadata.max_timestamp_ms < timestamp_ms or metadata.end_offset < first_offset:
            continue
        reader = SegmentReader(tier.ports.layout, partition, metadata, max_batch_bytes)
        for piece in reader.read_pieces(reader.floor_position(reader.min_offset_for_time(timestamp_ms)), piece_bytes=1 << 20):
            table = piece.source.table
            late = (table.control == NOT_CONTROL) & ((table.max_timestamp >= timestamp_ms) | (table.magic < 2))
            for selection in scratch.parse_flagged_batches(piece, late, max_batch_bytes):
                rows = selection.rows
                young = np.flatnonzero((rows.timestamp >= timestamp_ms) & (rows.offset >= first_offset))
                if len(young):
                    return RecordAtTime(int(rows.offset[young[0]]), int(rows.timestamp[young[0]]))
    return None


def find_newest_record(
    tier: Tier,
    partition: TopicPartition,
    live_segments: Sequence[RemoteLogSegmentMetadata],
    max_batch_bytes: int,
    first_offset: int = 0,
) -> RecordAtTime | None:
    """First of the records with the largest timestamp, or None (Kafka: OffsetSpec.maxTimestamp).

    A segment's own largest timestamp may be a control record's, or one before ``first_offset`` (inclusive).

    :raises SegmentGone: if a segment was replaced meanwhile.
    """
    scratch, best = _ParseBuffers(), RecordAtTime(-1, -1)
    for metadata in sorted(live_segments, key=lambda segment: -segment.max_timestamp_ms):
        if metadata.max_timestamp_ms <= best.timestamp_ms:
            break
        if metadata.end_offset < first_offset:
            continue
        for piece in SegmentReader(tier.ports.layout, partition, metadata, max_batch_bytes).read_pieces(0, piece_bytes=1 << 20):
            table = piece.source.table
            late = (table.control == NOT_CONTROL) & ((table.max_timestamp > best.timestamp_ms) | (table.magic < 2))
            for selection in scratch.parse_flagged_batches(piece, late, max_batch_bytes):
                rows = selection.rows
                times = np.where(rows.offset >= first_offset, rows.timestamp, -1)
                if len(times) and times.max() > best.timestamp_ms:
                    newest = int(times.argmax())
                    best = RecordAtTime(int(rows.offset[newest]), int(times[newest]))
    return best if best.offset >= 0 else None


def offset_for_time(tier: Tier, partition: TopicPartition, timestamp_ms: int) -> int | None:
    """Offset of the first live record at ``timestamp_ms`` or later, or None. Raises BadData, StoreError."""
    limit = tier.cleaner_settings_for_topic(partition.topic).max_decompressed_batch_bytes

    def find_live_offset() -> int | None:
        state = tier.open_partition_log(partition).refresh()
        found = find_record_for_time(tier, partition, state.live, timestamp_ms, limit, tier.first_readable_offset(state))
        return None if found is None else found.offset

    return retry_if_object_missing(partition, find_live_offset, MAX_RETRIES)


def time_offset_or_end(tier: Tier, partition: TopicPartition, timestamp_ms: int) -> int:
    """The end offset (exclusive) without such a record. Raises BadData, StoreError."""
    found = offset_for_time(tier, partition, timestamp_ms)
    return tier.open_partition_log(partition).refresh().end_offset + 1 if found is None else found


class _ParseBuffers:
    def __init__(self) -> None:
        self._rows = RecordRowBuffers()
        self._bodies = GrowingByteBuffer()

    def parse_flagged_batches(
        self, piece: SegmentPiece, batch_flags: Flags, max_batch_bytes: int, *, backwards: bool = False
    ) -> Iterator[SelectedRecords]:
        """Yield chunks that hold a flagged batch, with all their rows selected."""
        source = piece.source
        ranges = source.split_by_kind()
        for first, last in reversed(ranges) if backwards else ranges:
            if not batch_flags[first:last].any():
                continue
            with piece.shift_damage_positions():
                for chunk in source.read_chunks(
                    first, last, batch_flags[first:last], max_batch_bytes, self._bodies, is_backwards=backwards
                ):
                    rows, first_row = parse_records(source.table, chunk, self._rows, source.name)
                    yield SelectedRecords(source.table, chunk, rows, first_row, np.arange(len(rows)))


class OffsetRangeReader:
    """Reader of one range of offsets, for one thread."""

    def __init__(
        self,
        tier: Tier,
        read_range: OffsetRangeToRead,
        options: ReadOptions,
        folder: str | None = None,
        on_damage: Callable[[DamagedOffsetRange], None] = log_damage,
    ) -> None:
        """:param folder: for sorted keys; None for the system's folder of temporary files.
        :param on_damage: called with skipped offsets.
        """
        self._tier = tier
        self._on_damage = on_damage
        self._folder = folder
        self._extent = read_range
        self._wanted = options
        self._segments = read_range.segments
        self._live_ids: frozenset[str] | None = None
        self._log_start = 0
        self._next_piece_bytes = FIRST_PIECE_BYTES
        self._pieces = PiecePrefetcher(0 if options.last_records_only else options.requests_in_advance)
        self._outcomes = TransactionOutcomeFinder(self._reread_live_segments_from, self._open_segment_reader, self._pieces)
        self._scratch = _ParseBuffers()

    def read_selected_records(self) -> Iterator[SelectedRecords]:
        """Each selection has a row or more, and is valid until the next one is requested.
        Raises BadData, StoreError, OutOfBudget; LogChanged if the range was truncated, or its beginning deleted.
        """
        latest = self._wanted.last_records_only
        if latest is None:
            return self._read_forwards()
        return self._read_last_records(latest) if latest.spill is None else self._read_last_on_disk(latest, latest.spill)

    def _read_forwards(self) -> Iterator[SelectedRecords]:
        try:
            yield from self._read_records_forwards()
        finally:
            self._pieces.close()

    def _read_records_forwards(self) -> Iterator[SelectedRecords]:
        for piece, wanted, _, first, last in self._read_pieces_forwards():
            for selection in self._scratch.parse_flagged_batches(piece, wanted, self._wanted.inflate_limit):
                inside = _rows_with_offsets_between(selection.rows.offset, first, last)
                if len(inside):
                    yield replace(selection, picked=inside)

    def read_intact_batches(self) -> Iterator[BatchesToCopy]:
        """Pieces ascend, with a flag for each batch: whether a copy of the log may have it. It may not if damage keeps its records from
        readers with these options, or its CRC does not match. Intact markers and aborted batches are flagged. Damage is reported to
        ``on_damage``, in no certain order.
        """
        for piece, _, left_out, first, last in self._read_pieces_forwards():
            inside = (piece.source.table.last_offset >= first) & (piece.source.table.base_offset <= last)
            damaged = flag_damaged_batches(piece, inside) & inside
            for one in damaged_offset_ranges(piece, damaged & ~left_out, CRC_MISMATCH, first, last):
                self._report_damage_or_raise(one)
            yield piece, inside & ~damaged & ~left_out

    def _read_pieces_forwards(self) -> Iterator[_PieceToRead]:
        """After a replacement of a segment, re-read the control log and continue
        with its replacement.
        """
        extent = self._extent
        first, retries = extent.first, 0
        readers: dict[str, SegmentReader] = {}
        while first <= extent.last:
            segments = [segment for segment in self._segments if segment.end_offset >= first and segment.start_offset <= extent.last]
            if not segments:
                return
            metadata = segments[0]
            readers = {segment.id: readers.get(segment.id) or self._open_segment_reader(segment) for segment in segments}
            last = min(extent.last, metadata.end_offset)  # beyond it another leader's segment is the one that is read
            try:
                reader = readers[metadata.id]
                position = reader.floor_position(first)
                while position < metadata.size_bytes and first <= last:
                    try:
                        piece = self._outcomes.read_piece(reader, position, self._size_of_next_piece(reader, position, last))
                    except BadData as error:
                        if reader.trusts_index and position:
                            reader.trusts_index, position = False, 0  # the index may be what is damaged
                            continue
                        before = read_before_damage(reader, position, error)
                        if before is None:
                            position, after = find_readable_after(reader, position, first)
                            self._report_damage_or_raise(
                                DamagedOffsetRange(first, min(last, after - 1), error.cause, error.segment, error.position)
                            )
                            first, retries = after, 0
                            continue
                        piece = before
                    self._pieces.prefetch_pieces(self._positions_of_next_pieces(list(readers.values()), piece.end_byte_position))
                    wanted, left_out, damage = self._find_piece_damage(piece, first, last)
                    yield _PieceToRead(piece, wanted, left_out, first, last)
                    for one in damage:
                        self._report_damage_or_raise(one)
                    first, retries = max(first, min(last, int(piece.source.table.last_offset[-1])) + 1), 0
                    position = piece.end_byte_position
                first = max(first, metadata.end_offset + 1)
            except SegmentGone as error:
                try:
                    retries = self._reread_log(error, retries)
                except BadData as damage_error:
                    first = self._report_lost_segment(error, damage_error, readers, first, last)
                    retries = 0
                if first < self._log_start:
                    raise LogBeginningDeleted(extent, self._log_start) from None

    def _size_of_next_piece(self, reader: SegmentReader, position: int, last_offset: int) -> int:
        """In bytes: up to the end of the wanted offsets, as far as the offset index shows."""
        size, self._next_piece_bytes = self._next_piece_bytes, larger_piece_bytes(self._next_piece_bytes)
        if last_offset >= reader.metadata.end_offset or reader.metadata.size_bytes - position <= FIRST_PIECE_BYTES:
            return size
        needed = reader.byte_position_after_offset(last_offset) - position
        return min(size, needed) if needed > 0 else size  # an index that is not true ends before

    def _find_piece_damage(self, piece: SegmentPiece, first_offset: int, last_offset: int) -> tuple[Flags, Flags, list[DamagedOffsetRange]]:
        """Per batch: to be read; left out because of damage; and the damaged ranges. Unless damage is skipped, reading ends at the first
        damaged batch.
        """
        wanted, unknown = self._flag_wanted_batches(piece, first_offset, last_offset)
        bad = flag_damaged_batches(piece, wanted) & wanted
        damage = [
            *damaged_offset_ranges(piece, bad, CRC_MISMATCH, first_offset, last_offset),
            *damaged_offset_ranges(piece, unknown & ~bad, UNDECIDABLE, first_offset, last_offset),
        ]
        left_out = bad | unknown
        wanted &= ~left_out
        if damage and not self._wanted.skip_damaged:
            wanted[np.flatnonzero(left_out)[0] :] = False
        return wanted, left_out, sorted(damage)

    def _report_damage_or_raise(self, damage: DamagedOffsetRange) -> None:
        """Raises BadData unless damage is skipped."""
        if not self._wanted.skip_damaged:
            raise damage.to_bad_data_error(self._extent.partition)
        self._on_damage(damage)

    def _report_lost_segment(
        self, gone: SegmentGone, error: BadData, readers: dict[str, SegmentReader], first_offset: int, last_offset: int
    ) -> int:
        """Reading continues after the segment if the log is lost; a lost index is ignored. Raises BadData if damage is not skipped."""
        if isinstance(error, LogChanged):
            raise error
        if gone.metadata.start_offset > last_offset:  # it was to be read for transaction markers only
            self._outcomes.record_lost_segment()
            return first_offset
        reader = readers.get(gone.metadata.id)
        if reader is not None and not reader.is_segment_log_key(gone.key):
            if not self._wanted.skip_damaged:
                raise error
            reader.ignore_offset_index()
            return first_offset
        self._report_damage_or_raise(DamagedOffsetRange(first_offset, last_offset, error.cause, gone.key))
        return last_offset + 1

    def _positions_of_next_pieces(self, readers: Sequence[SegmentReader], position: int) -> Iterator[PieceLocation]:
        """Pieces that will be read next, as far as the offset indexes show."""
        for reader in readers:
            at: int | None = position
            inside = reader.metadata.end_offset <= self._extent.last
            end = reader.metadata.size_bytes if inside else reader.byte_position_after_offset(self._extent.last)
            while at is not None and at < end:
                if not self._outcomes.is_segment_piece_loaded(reader, at):
                    yield reader, at
                at = reader.find_piece_end(at)
            position = 0

    def _read_last_records(self, request: LastRecordOfEachKeyRequest) -> Iterator[SelectedRecords]:
        """Read backwards: the first record found of a key is its last one."""
        keys, halves = (
            KeyHashSet(request.map_budget_bytes),
            siphash_key_halves(request.hash_key or self._tier.identity.temporary_hash_key()),
        )
        for selection, last in self._read_chunks_backwards():
            picked = _select_new_rows(selection, self._extent.first, last, request, keys, halves)
            if len(picked):
                yield replace(selection, picked=picked)

    def _read_last_on_disk(self, request: LastRecordOfEachKeyRequest, spill: DiskKeySortRequest) -> Iterator[SelectedRecords]:
        """Find offsets with key hashes on disk, then read the records."""
        extent, halves = self._extent, siphash_key_halves(request.hash_key or self._tier.identity.temporary_hash_key())
        space = _KeySortDiskBudget(spill.disk_bytes)
        with tempfile.TemporaryDirectory(prefix="tiered-compactor-", dir=self._folder) as folder:
            path, budget = Path(folder, "keys"), request.map_budget_bytes
            with DiskOffsetMap(path, space, map_budget_bytes=budget, expected_row_count=spill.records) as buckets:
                for selection, last in self._read_chunks_backwards():
                    hashes, picked = hash_keys_of_rows(selection, extent.first, last, request, halves)
                    buckets.add_dirty_rows(hashes, (extent.last - selection.rows.offset[picked]).astype(np.uint32))
                bitmap = buckets.survivor_bitmap(extent.last - extent.first + 1)
        for selection in OffsetRangeReader(self._tier, extent, replace(self._wanted, last_records_only=None)).read_selected_records():
            rows, picked = selection.rows, selection.picked
            back = extent.last - rows.offset[picked]
            is_last = (bitmap[back >> 3] >> (7 - (back & 7)).astype(np.uint8)) & 1 == 1
            found = picked[is_last & (rows.key_length[picked] >= 0) & (rows.value_length[picked] >= 0)]
            if len(found):
                yield replace(selection, picked=found)

    def _read_chunks_backwards(self) -> Iterator[SelectionAndLastOffset]:
        """Newest first, each with the last offset that is still wanted."""
        extent = self._extent
        last, retries = extent.last, 0
        while last >= extent.first:
            segments = [segment for segment in reversed(self._segments) if segment.start_offset <= last]
            try:
                for piece in self._read_pieces_backwards([segment for segment in segments if segment.end_offset >= extent.first]):
                    mine, _, damage = self._find_piece_damage(piece, extent.first, last)
                    for one in damage:
                        raise one.to_bad_data_error(extent.partition)
                    self._outcomes.drop_unneeded_markers(piece)
                    for selection in self._scratch.parse_flagged_batches(piece, mine, self._wanted.inflate_limit, backwards=True):
                        yield selection, last
                    last, retries = min(last, int(piece.source.table.last_offset[0]) - 1), 0
                    if last < extent.first:
                        return
            except SegmentGone as error:
                retries = self._reread_log(error, retries)
            else:
                return

    def _read_pieces_backwards(self, segments: Sequence[RemoteLogSegmentMetadata]) -> Iterator[SegmentPiece]:
        readers = map(self._open_segment_reader, segments)
        fetches = (partial(it.read_exact_piece, *cut) for it in readers for cut in it.piece_spans_backwards())
        return prefetch_results(fetches, self._wanted.requests_in_advance)

    def _flag_wanted_batches(self, piece: SegmentPiece, first_offset: int, last_offset: int) -> tuple[Flags, Flags]:
        """Flag wanted batches, and those with an outcome that cannot be read. Offsets are inclusive; aborted batches are not wanted."""
        table = piece.source.table
        # The base offset of a compressed v0/v1 wrapper is not known before it is inflated; it is -1 here.
        mine: Flags = (table.control == NOT_CONTROL) & (table.last_offset >= first_offset) & (table.base_offset <= last_offset)
        unknown = np.zeros(len(table), np.bool_)
        if self._wanted.read_committed and (table.transactional_flags & mine).any():
            outcomes = self._outcomes.find_outcomes(piece)
            mine &= outcomes != ABORT
            unknown = mine & (outcomes == UNKNOWN)
            if self._live_ids is not None and piece.metadata.id not in self._live_ids:
                # A round has replaced it before its markers were looked for: later rounds may have removed them.
                raise SegmentGone(piece.source.name, piece.metadata)
        return mine, unknown

    def _reread_log(self, error: SegmentGone, retries: int) -> int:
        """Raises BadData if the segment is still live, or if ``retries`` has reached MAX_RETRIES."""
        self._segments = tuple(self._reread_live_segments_from(self._extent.first))
        self._outcomes.drop_prefetched_pieces()
        if retries >= MAX_RETRIES or any(segment.id == error.metadata.id for segment in self._segments):
            raise error.to_bad_data_error() from None
        return retries + 1

    def _open_segment_reader(self, metadata: RemoteLogSegmentMetadata) -> SegmentReader:
        return SegmentReader(self._tier.ports.layout, self._extent.partition, metadata, self._wanted.inflate_limit)

    def _reread_live_segments_from(self, offset: int) -> Sequence[RemoteLogSegmentMetadata]:
        """Raises LogChanged if the log was truncated meanwhile, or the topic created again."""
        extent, state = self._extent, self._tier.open_partition_log(self._extent.partition).refresh()
        changed = (
            first_diverging_offset(extent.log, log_identity(self._tier, state), extent.last + 1)
            if extent.log and state.has_segments
            else None
        )
        if changed is not None:
            raise LogChanged(extent, changed)
        self._live_ids = frozenset(segment.id for segment in state.live)
        self._log_start = state.log_start
        return [segment for segment in state.live if segment.end_offset >= offset]


def _rows_with_offsets_between(offsets: Int64s, first_offset: int, last_offset: int) -> Int64s:
    return np.flatnonzero((offsets >= first_offset) & (offsets <= last_offset))


def hash_keys_of_rows(
    selection: SelectedRecords,
    first_offset: int,
    last_offset: int,
    request: LastRecordOfEachKeyRequest,
    hash_key_halves: HashKeyHalves,
) -> KeyHashesAndRows:
    """Rows with a key in the requested range, last row first; offsets are inclusive."""
    rows = selection.rows
    hashes, picked = np.empty((len(rows), 2), np.uint64), np.empty(len(rows), np.int64)
    count = _hash_keys_backwards(
        selection.chunk.buf, rows.offset, rows.key_start, rows.key_length, first_offset, last_offset, *hash_key_halves,
        request.key_ranges, request.key_range, hashes, picked,
    )  # fmt: skip
    return hashes[:count], picked[:count]


def _select_new_rows(
    selection: SelectedRecords,
    first_offset: int,
    last_offset: int,
    request: LastRecordOfEachKeyRequest,
    keys: KeyHashSet,
    hash_key_halves: HashKeyHalves,
) -> Int64s:
    """Rows, ascending, whose key was new and whose value is not null. Raises OutOfBudget
    if ``keys`` is full.
    """
    hashes, picked = hash_keys_of_rows(selection, first_offset, last_offset, request, hash_key_halves)
    seen = np.empty(len(hashes), np.bool_)
    if keys.insert_keys_until_full(hashes, seen) < len(hashes):
        raise OutOfBudget(
            f"view = latest: {keys.key_count:,} keys fill the {format_size(request.map_budget_bytes)} that one task may use for them",
            hint="Leave out keyRanges, or give it a higher number (each task then reads everything and keeps its share of the keys)",
        )
    found = picked[seen]
    return found[selection.rows.value_length[found] >= 0][::-1].copy()


class _KeySortDiskBudget:
    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes
        self._used = 0

    def reserve_bytes_on_disk(self, nbytes: int) -> None:
        """Raises OutOfBudget above the limit."""
        self._used += nbytes
        if 0 < self._most < self._used:
            hint = f"Set disk_budget_bytes to more than {self._most}, or give keyRanges a number: each task then reads everything"
            raise OutOfBudget(f"view = latest: the keys need more than {format_size(self._most)} of local disk", hint=hint)

    def release_bytes_on_disk(self, nbytes: int) -> None:
        self._used -= nbytes


@kernel
def _hash_keys_backwards(
    buf: Bytes, offsets: Int64s, key_start: Int64s, key_length: Int32s, first_offset: int, last_offset: int, k0: np.uint64, k1: np.uint64,
    range_count: int, wanted_range: int, out_hashes: Hashes, out_rows: Int64s,
) -> int:  # fmt: skip
    """Offsets are inclusive; last row first."""
    count = 0
    for row in range(offsets.size - 1, -1, -1):
        if key_length[row] >= 0 and first_offset <= offsets[row] <= last_offset:
            h0, h1 = siphash128(buf, key_start[row], key_length[row], k0, k1)
            if range_count == 1 or hash_range_of_word(np.uint64(key_hash_tag(h0)), range_count) == wanted_range:
                out_hashes[count, 0], out_hashes[count, 1], out_rows[count] = h0, h1, row
                count += 1
    return count
