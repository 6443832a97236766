"""Estimate of what compaction would save, from a sample of a partition's bytes.

Half of the sample are the newest bytes that a round could clean: superseded records in them are counted. The other half are windows spread
evenly over all older bytes: in each, the records that the newest half supersedes are counted. Records superseded by others that were
not read do not count, so the estimate is a lower bound. Its error comes from the differences between the windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from bloom.siphash import hash_keys, siphash_key_halves
from compactor.access.tier import Tier
from compactor.cleaner.keys.survivors import count_keyless_records_of_rows
from compactor.consumer.reading import OffsetRangeReader, OffsetRangeToRead, ReadOptions
from compactor.control.state import PartitionState
from compactor.model.keyless import KeylessRecords
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.views.time_formats import format_size

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
    """Estimate, from a sample of the log, of the bytes that a round of compaction would save.

    at_least_bytes: estimated lower bound of the bytes that would be saved.
    error_bytes: half width of the 95 % confidence interval of ``at_least_bytes``; 0 if all bytes were read.
    read_bytes: bytes of segments that were read.
    of_bytes: bytes of all segments that a round could clean.
    keyless: of the records that were read, those without a key.
    """

    at_least_bytes: int
    error_bytes: int
    read_bytes: int
    of_bytes: int
    keyless: KeylessRecords = KeylessRecords()  # noqa: RUF009 - frozen

    @property
    def is_saving_exact(self) -> bool:
        """Return whether the saving is exact rather than estimated, because all bytes that a round could clean were read."""
        return self.read_bytes >= self.of_bytes

    @override
    def __str__(self) -> str:
        if self.is_saving_exact:
            return "all that a round could clean was read"
        share = 100 * self.read_bytes / max(1, self.of_bytes)
        return f"at least, from {format_size(self.read_bytes)} read ({share:.2g} %), give or take {format_size(self.error_bytes)} (95 %)"


def estimate_saving_from_samples(tier: Tier, state: PartitionState, sample_bytes: int) -> CompactionSavingEstimate:
    """Return an estimate of the bytes that a round of compaction would save. About ``sample_bytes`` bytes are read.

    Raises BadData, StoreError.
    """
    # In a broker-managed tier the newest segment is never cleaned, and its keys clean nothing.
    live = state.live[:-1] if state.mirrored else state.live
    total = sum(segment.size_bytes for segment in live)
    if not total:
        return CompactionSavingEstimate(0, 0, 0, 0)
    sample = _SampleReader(tier, state, live)
    drops = sample.drops_keyless
    if sample_bytes >= total:
        hashes, sizes = sample.read_key_hashes_and_sizes(live[0].start_offset, live[-1].end_offset)
        saved = _superseded_share_of_bytes(hashes, sizes, drops_keyless=drops) * total
        return CompactionSavingEstimate(round(saved), 0, total, total, sample.keyless)
    first, newest_bytes = _locate_log_tail(live, max(sample_bytes // 2, 1))
    hashes, sizes = sample.read_key_hashes_and_sizes(first, live[-1].end_offset)
    saved = _superseded_share_of_bytes(hashes, sizes, drops_keyless=drops) * newest_bytes
    older_bytes = total - newest_bytes
    known = np.unique(hashes)
    shares, read = [], newest_bytes
    for begin, end, size in _sample_windows(live, first, older_bytes, sample_bytes - newest_bytes):
        old, old_sizes = sample.read_key_hashes_and_sizes(begin, end)
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
    """Range of offsets to read for a sample (both inclusive), with its approximate size in bytes."""

    first: int
    last: int
    size_bytes: int


class _SampleReader:
    """Reader of the committed records in ranges of offsets, by which a saving is estimated."""

    def __init__(self, tier: Tier, state: PartitionState, live_segments: Sequence[RemoteLogSegmentMetadata]) -> None:
        self._tier = tier
        self._state = state
        self._live = tuple(live_segments)
        self._wanted = ReadOptions(True, tier.settings.cleaner_settings_for_topic(state.topic).max_decompressed_batch_bytes)
        self._halves = siphash_key_halves(tier.identity.hash_key_for_unstored_hashes())
        self.drops_keyless = tier.cleaner_settings_for_topic(state.topic).keyless_records == "drop"
        self.keyless = KeylessRecords()
        """Of the records read so far from the first dirty offset on, those without a key."""

    def read_key_hashes_and_sizes(self, first_offset: int, last_offset: int) -> KeyHashesAndSizes:
        """Return the key hash (0 without a key) and the approximate size in bytes of each record from ``first_offset`` to ``last_offset``
        (inclusive), in offset order.
        """
        parts = list(self._read_key_hash_blocks(first_offset, last_offset))
        if not parts:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        hashes, sizes = zip(*parts, strict=True)
        return np.concatenate(hashes), np.concatenate(sizes)

    def _read_key_hash_blocks(self, first_offset: int, last_offset: int) -> Iterator[KeyHashesAndSizes]:
        """Yield key hashes and sizes of the records from ``first_offset`` to ``last_offset`` (inclusive), block by block."""
        segments = tuple(segment for segment in self._live if segment.end_offset >= first_offset and segment.start_offset <= last_offset)
        for selection in OffsetRangeReader(
            self._tier, OffsetRangeToRead(self._state.topic_partition, first_offset, last_offset, segments), self._wanted
        ).read_selected_records():
            rows, picked = selection.rows, selection.picked
            out = np.empty((len(picked), 2), np.uint64)
            hash_keys(selection.chunk.buf, rows.key_start[picked], rows.key_length[picked], *self._halves, out)
            lengths = np.maximum(rows.key_length[picked], 0).astype(np.int64) + np.maximum(rows.value_length[picked], 0)
            self.keyless = self.keyless.plus(
                count_keyless_records_of_rows(rows.offset[picked], rows.key_length[picked], self._state.first_dirty_offset)
            )
            yield out[:, 0].copy(), lengths + _OVERHEAD


def _superseded_share_of_bytes(hashes: Hashes64, sizes: Sizes, *, drops_keyless: bool) -> float:
    """Return the share, by size, of records that are followed by a record with the same key hash, or have no key if ``drops_keyless``.
    ``hashes`` and ``sizes`` are in offset order.
    """
    if not len(hashes):
        return 0.0
    _, from_end = np.unique(hashes[::-1], return_index=True)
    survives = np.zeros(len(hashes), np.bool_)
    survives[len(hashes) - 1 - from_end] = True
    survives[hashes == 0] = not drops_keyless
    return float(sizes[~survives].sum() / sizes.sum())


def _locate_log_tail(live_segments: Sequence[RemoteLogSegmentMetadata], wanted_bytes: int) -> FirstOffsetAndBytes:
    """Return two values for the last part of the log, of about ``wanted_bytes`` bytes: its first offset, and its size in bytes. The size is
    smaller than ``wanted_bytes`` if the whole log is.
    """
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
    """Yield windows of offsets, evenly spread over the ``older_bytes`` bytes below ``end_offset``
    (exclusive), without overlap, with ``sample_bytes`` bytes in all.
    """
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
