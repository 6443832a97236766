"""Records of a range of offsets as the tier holds them now, last values of all keys, and an estimate of what compaction would save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from bloom.filter import hash_keys, siphash_key_halves
from compactor.access.tier import Tier
from compactor.cleaner.keys import count_keyless_rows
from compactor.config.units import format_size
from compactor.constants import MAX_OFFSET, Offset
from compactor.control.state import PartitionState
from compactor.errors import OutOfBudget
from compactor.kernels.common import Flags
from compactor.kernels.jit import kernel
from compactor.model.ids import TopicPartition
from compactor.model.plan import KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.read.outcomes import DamagedOffsetRange, LogIdentity, log_damage, log_identity
from compactor.read.reading import LastRecordOfEachKeyRequest, OffsetRangeReader, OffsetRangeToRead, ReadOptions, last_stable_offset
from compactor.read.records import Place, RecordBlock, SelectedRecords, copy_to_record_block
from compactor.records.batches import Bytes, Int64s
from compactor.records.rows import Int32s

if TYPE_CHECKING:
    import pyarrow as pa


# ---- last values of all keys of a partition ------------------------------------------------------------------------------------
# The log is read backwards, so that the first record found of a key is its last one. If the set of key hashes is full, the remaining keys
# are read in two halves of the hash range, each from the end again, without those that were returned already.


PREFETCHED_PIECES = 3
"""Number of pieces of 16 MiB that are fetched in advance: a bucket serves several requests at once faster than one after the other."""

MAX_HALVINGS = 20
"""Number of times that the hash range may be halved: more would be a million times the memory budget."""


@dataclass(frozen=True)
class LastValueOfEachKey:
    """Last records of all keys, without tombstones, when this object was made. Each iteration reads the tier. A reader that continues at
    ``next_offset`` misses no change.
    """

    tier: Tier
    extent: OffsetRangeToRead
    committed: bool
    hash_key: bytes

    @property
    def next_offset(self) -> int:
        return self.extent.last + 1

    @property
    def next_place(self) -> Place:
        """Place of ``next_offset``, with the log's identity."""
        read = self.log_identity.consumed_history_below_offset(self.next_offset)
        return Place(*self.extent.partition, self.next_offset, read.last_read_leader_epoch, read.topic_id)

    @property
    def log_identity(self) -> LogIdentity:
        return self.extent.log or LogIdentity()

    def __iter__(self) -> Iterator[RecordBlock]:
        """Blocks come in no particular order; each key occurs once. Raises StoreError, BadData."""
        for selection in self.read_selected_records():
            yield copy_to_record_block(self.extent.partition, selection, self.log_identity.topic_id)

    def arrow(self, *columns: str) -> Iterator[pa.RecordBatch]:
        """:param columns: of ``compactor.read.columns.MESSAGE_COLUMNS``; all by default."""
        from compactor.read.columns import arrow_schema_of_columns, to_arrow_batch

        schema = arrow_schema_of_columns(columns)
        for selection in self.read_selected_records():
            yield to_arrow_batch(selection, *self.extent.partition, schema)

    def offsets(self) -> Int64s:
        """Ascending; eight bytes per key."""
        found = [selection.rows.offset[selection.picked] for selection in self.read_selected_records()]
        return np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)

    def read_selected_records(self) -> Iterator[SelectedRecords]:
        """Each selection is valid until the next one is requested."""
        cleaner = self.tier.cleaner_settings_for_topic(self.extent.partition.topic)
        left = [(0, 1, MAX_OFFSET)]
        while left:
            number, ranges, below = left.pop()
            latest = LastRecordOfEachKeyRequest(number, ranges, max(cleaner.map_budget_bytes, 1 << 16), self.hash_key)
            wanted = ReadOptions(self.committed, cleaner.max_decompressed_batch_bytes, latest, PREFETCHED_PIECES)
            try:
                for selection in OffsetRangeReader(self.tier, self.extent, wanted).read_selected_records():
                    picked = selection.picked[selection.rows.offset[selection.picked] < below]
                    if len(picked):
                        yield replace(selection, picked=picked)
                        below = Offset(int(selection.rows.offset[picked[0]]))
            except OutOfBudget:
                if ranges >> MAX_HALVINGS:
                    raise
                left += [(2 * number + half, 2 * ranges, below) for half in (0, 1)]


def last_values(
    tier: Tier,
    partition: TopicPartition,
    *,
    first_offset: int = 0,
    last_offset: int = MAX_OFFSET,
    read_committed: bool = True,
    hash_key: bytes = b"",
) -> LastValueOfEachKey:
    """:param first_offset, last_offset: both inclusive.
    :param hash_key: empty to read it from the tier, which only one thread at a time may do.
    :raises BadData: if the tier's data is damaged.
    :raises StoreError: if the tier cannot be read.
    """
    state = tier.open_partition_log(partition).refresh()
    end = last_stable_offset(tier, state) if read_committed else state.end_offset + 1
    extent = OffsetRangeToRead(
        partition, max(first_offset, tier.first_readable_offset(state)), min(last_offset, end - 1), state.live, log_identity(tier, state)
    )
    return LastValueOfEachKey(tier, extent, read_committed, hash_key or tier.identity.temporary_hash_key())


def select_records_at_offsets(selection: SelectedRecords, wanted_offsets: Int64s) -> SelectedRecords:
    """The ``wanted_offsets`` ascend."""
    offsets = selection.rows.offset[selection.picked]
    at = np.searchsorted(wanted_offsets, offsets)
    found = at < len(wanted_offsets)
    found[found] = wanted_offsets[at[found]] == offsets[found]
    return replace(selection, picked=selection.picked[found])


def read_record_blocks(
    tier: Tier,
    partition: TopicPartition,
    *,
    first_offset: int = 0,
    last_offset: int = MAX_OFFSET,
    read_committed: bool = True,
    latest_only: bool = False,
    key: bytes | None = None,
    on_damage: Callable[[DamagedOffsetRange], None] | None = None,
) -> Iterator[RecordBlock]:
    """Bounds are inclusive; records ascend. Raises StoreError, BadData.
    :param latest_only: only the last record of each key in the range, without tombstones.
    :param key: only records with this key; a segment whose Bloom filter excludes the key is not read.
    :param on_damage: called with unreadable offsets, which are left out; None to raise BadData.
    """
    view = last_values(tier, partition, first_offset=first_offset, last_offset=last_offset, read_committed=read_committed)
    if key is not None:
        view = replace(view, extent=_exclude_segments_without_key(tier, view.extent, key))
    only = view.offsets() if latest_only else None
    wanted = None if key is None else np.frombuffer(key, np.uint8)
    limit = tier.settings.cleaner_settings_for_topic(partition.topic).max_decompressed_batch_bytes
    options = ReadOptions(read_committed, limit, skip_damaged=on_damage is not None)
    for selection in OffsetRangeReader(tier, view.extent, options, on_damage=on_damage or log_damage).read_selected_records():
        found = selection if only is None else select_records_at_offsets(selection, only)
        found = found if wanted is None else _select_records_with_key(found, wanted)
        if len(found):
            yield copy_to_record_block(partition, found, view.log_identity.topic_id)


def _exclude_segments_without_key(tier: Tier, read_range: OffsetRangeToRead, key: bytes) -> OffsetRangeToRead:
    if not tier.kind.compacts:
        return read_range
    inside = [
        segment for segment in read_range.segments if segment.end_offset >= read_range.first and segment.start_offset <= read_range.last
    ]
    sidecars = tier.open_sidecar_store(read_range.partition)
    hashes = np.empty((1, 2), np.uint64)
    hash_keys(
        np.frombuffer(key, np.uint8), np.zeros(1, np.int64), np.array([len(key)], np.int32), *siphash_key_halves(sidecars.hash_key), hashes
    )
    met, _ = sidecars.find_possible_segments([segment.id for segment in inside], lambda: [hashes])
    return replace(read_range, segments=tuple(segment for segment in inside if segment.id in met))


def _select_records_with_key(selection: SelectedRecords, key: Bytes) -> SelectedRecords:
    rows = selection.rows
    same = np.empty(len(selection), np.bool_)
    _flag_rows_with_key(selection.chunk.buf, rows.key_start, rows.key_length, selection.picked, key, same)
    return replace(selection, picked=selection.picked[same])


@kernel
def _flag_rows_with_key(buf: Bytes, start: Int64s, length: Int32s, selected_rows: Int64s, key: Bytes, out_is_equal: Flags) -> None:
    for i in range(selected_rows.size):
        row = selected_rows[i]
        out_is_equal[i] = length[row] == key.size
        at = start[row]
        for byte in range(key.size):
            if not out_is_equal[i]:
                break
            out_is_equal[i] = buf[at + byte] == key[byte]


# ---- estimate of what compaction would save, from a sample of a partition's bytes ----------------------------------------------
# Half of the sample are the newest bytes that a round could clean: superseded records in them are counted. The other half are windows
# spread evenly over all older bytes: in each, the records that the newest half supersedes are counted. Records superseded by others that
# were not read do not count, so the estimate is a lower bound. Its error comes from the differences between the windows.


WINDOWS: Final = 32
LEAST_WINDOW: Final = 512 << 10
"""Smallest window in bytes. Readers fetch about so much at once, so that smaller windows would read more than they use."""
_NORMAL_95: Final = 1.96
_OVERHEAD: Final = 8
"""Approximate size of a record besides key and value, in bytes."""

FirstOffsetAndBytes = tuple[int, int]
Hashes64 = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]
KeyHashesAndSizes = tuple[Hashes64, Sizes]
"""For each record, in offset order: hash of its key (0 without a key), and its size in bytes."""


@dataclass(frozen=True)
class CompactionSavingEstimate:
    """Bytes that a round would save.
    at_least_bytes: estimated lower bound.
    error_bytes: half width of its 95 % confidence interval; 0 if all bytes were read.
    of_bytes: all segments that a round could clean.
    keyless: of the records that were read.
    """

    at_least_bytes: int
    error_bytes: int
    read_bytes: int
    of_bytes: int
    keyless: KeylessRecords = KeylessRecords()  # noqa: RUF009 - frozen

    @property
    def is_saving_exact(self) -> bool:
        return self.read_bytes >= self.of_bytes

    @override
    def __str__(self) -> str:
        if self.is_saving_exact:
            return "all that a round could clean was read"
        share = 100 * self.read_bytes / max(1, self.of_bytes)
        return f"at least, from {format_size(self.read_bytes)} read ({share:.2g} %), give or take {format_size(self.error_bytes)} (95 %)"


def estimate_saving_from_samples(tier: Tier, state: PartitionState, sample_bytes: int) -> CompactionSavingEstimate:
    """Raises BadData, StoreError."""
    # In a broker-managed tier the newest segment is never cleaned, and its keys clean nothing.
    live = state.live[:-1] if state.mirrored else state.live
    total = sum(segment.size_bytes for segment in live)
    if not total:
        return CompactionSavingEstimate(0, 0, 0, 0)
    sample = _SampleReader(tier, state, live)
    drops = sample.drops_keyless
    if sample_bytes >= total:
        hashes, sizes = sample.read_key_hashes(live[0].start_offset, live[-1].end_offset)
        saved = _superseded_share_of_bytes(hashes, sizes, drops_keyless=drops) * total
        return CompactionSavingEstimate(round(saved), 0, total, total, sample.keyless)
    first, newest_bytes = _locate_log_tail(live, max(sample_bytes // 2, 1))
    hashes, sizes = sample.read_key_hashes(first, live[-1].end_offset)
    saved = _superseded_share_of_bytes(hashes, sizes, drops_keyless=drops) * newest_bytes
    older_bytes = total - newest_bytes
    known = np.unique(hashes)
    shares, read = [], newest_bytes
    for begin, end, size in _sample_windows(live, first, older_bytes, sample_bytes - newest_bytes):
        old, old_sizes = sample.read_key_hashes(begin, end)
        if old_sizes.sum():
            gone = np.where(old == 0, drops, np.isin(old, known, assume_unique=False))
            shares.append(float(old_sizes[gone].sum() / old_sizes.sum()))
        read += size
    error = 0.0
    if shares:
        saved += float(np.mean(shares)) * older_bytes
        deviation = float(np.std(shares, ddof=1)) if len(shares) > 1 else 1.0
        error = _NORMAL_95 * deviation / math.sqrt(len(shares)) * older_bytes
    return CompactionSavingEstimate(round(saved), math.ceil(error), min(read, total), total, sample.keyless)


class _SampleWindow(NamedTuple):
    """Range of offsets (both inclusive) with its approximate size."""

    first: int
    last: int
    size_bytes: int


class _SampleReader:
    def __init__(self, tier: Tier, state: PartitionState, live_segments: Sequence[RemoteLogSegmentMetadata]) -> None:
        self._tier = tier
        self._state = state
        self._live = tuple(live_segments)
        self._wanted = ReadOptions(True, tier.settings.cleaner_settings_for_topic(state.topic).max_decompressed_batch_bytes)
        self._halves = siphash_key_halves(tier.identity.temporary_hash_key())
        self.drops_keyless = tier.cleaner_settings_for_topic(state.topic).keyless_records == "drop"
        self.keyless = KeylessRecords()
        """Of the records read so far from the first dirty offset on, those without a key."""

    def read_key_hashes(self, first_offset: int, last_offset: int) -> KeyHashesAndSizes:
        """Key hash (0 without a key) and approximate size of each record; bounds are inclusive."""
        parts = list(self._read_key_hash_blocks(first_offset, last_offset))
        if not parts:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        hashes, sizes = zip(*parts, strict=True)
        return np.concatenate(hashes), np.concatenate(sizes)

    def _read_key_hash_blocks(self, first_offset: int, last_offset: int) -> Iterator[KeyHashesAndSizes]:
        segments = tuple(segment for segment in self._live if segment.end_offset >= first_offset and segment.start_offset <= last_offset)
        for selection in OffsetRangeReader(
            self._tier, OffsetRangeToRead(self._state.topic_partition, first_offset, last_offset, segments), self._wanted
        ).read_selected_records():
            rows, picked = selection.rows, selection.picked
            out = np.empty((len(picked), 2), np.uint64)
            hash_keys(selection.chunk.buf, rows.key_start[picked], rows.key_length[picked], *self._halves, out)
            lengths = np.maximum(rows.key_length[picked], 0).astype(np.int64) + np.maximum(rows.value_length[picked], 0)
            self.keyless = self.keyless.plus(
                count_keyless_rows(rows.offset[picked], rows.key_length[picked], self._state.first_dirty_offset)
            )
            yield out[:, 0].copy(), lengths + _OVERHEAD


def _superseded_share_of_bytes(hashes: Hashes64, sizes: Sizes, *, drops_keyless: bool) -> float:
    """By size; records without a key count if ``drops_keyless``."""
    if not len(hashes):
        return 0.0
    _, from_end = np.unique(hashes[::-1], return_index=True)
    survives = np.zeros(len(hashes), np.bool_)
    survives[len(hashes) - 1 - from_end] = True
    survives[hashes == 0] = not drops_keyless
    return float(sizes[~survives].sum() / sizes.sum())


def _locate_log_tail(live_segments: Sequence[RemoteLogSegmentMetadata], wanted_bytes: int) -> FirstOffsetAndBytes:
    taken = 0
    for segment in reversed(live_segments):
        if taken + segment.size_bytes >= wanted_bytes:
            part = (wanted_bytes - taken) / segment.size_bytes
            span = segment.end_offset - segment.start_offset + 1
            return segment.end_offset + 1 - max(1, round(span * part)), wanted_bytes
        taken += segment.size_bytes
    return live_segments[0].start_offset, taken


def _sample_windows(
    live_segments: Sequence[RemoteLogSegmentMetadata], end_offset: int, older_bytes: int, sample_bytes: int
) -> Iterator[_SampleWindow]:
    """Windowsof ``sample_bytes`` in all are evenly spread below ``end_offset`` (exclusive) and do not overlap."""
    count = max(1, min(WINDOWS, sample_bytes // LEAST_WINDOW))
    size = max(1, sample_bytes // count)
    starts = [(number + 0.5) * older_bytes / count for number in range(count)]
    at = 0
    for segment in live_segments:
        for start in starts:
            if at <= start < at + segment.size_bytes:
                per_byte = (segment.end_offset - segment.start_offset + 1) / segment.size_bytes
                first = segment.start_offset + int((start - at) * per_byte)
                last = min(segment.end_offset, end_offset - 1, first + max(0, round(size * per_byte) - 1))
                if first <= last:
                    yield _SampleWindow(first, last, min(size, segment.size_bytes))
        at += segment.size_bytes
