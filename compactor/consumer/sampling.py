"""What compaction would save, from a sample: so many bytes are read of a partition, and the error is said.

Half of them are the newest that a round could clean, read as a whole: what is superseded in there is counted. The other half are windows
spread evenly over everything older: of each the share is counted that the newest half alone supersedes. Keys that are superseded by records
that were not read do not count, so the answer is a lower bound; the windows differ, and how much says how far off it may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from bloom.siphash import hash_keys, key_halves
from compactor.bootstrap import Tier
from compactor.consumer.reading import Extent, Reader, WantedRecords
from compactor.control.state import PartitionState
from compactor.model.segment import RemoteLogSegmentMetadata

WINDOWS: Final = 32
LEAST_WINDOW: Final = 32 << 10
_NORMAL_95: Final = 1.96
_OVERHEAD: Final = 8
"""Bytes of a record besides key and value, about."""

Hashes64 = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampledSaving:
    """``at_least_bytes``: what goes at least, give or take ``error_bytes`` (95 %; 0 where all was read). ``read_bytes``: of the logs."""

    at_least_bytes: int
    error_bytes: int
    read_bytes: int
    of_bytes: int

    @property
    def exact(self) -> bool:
        return self.read_bytes >= self.of_bytes

    def __str__(self) -> str:
        if self.exact:
            return "all that a round could clean was read"
        share = 100 * self.read_bytes / max(1, self.of_bytes)
        return f"at least, from {self.read_bytes} bytes read ({share:.2g} %), give or take {self.error_bytes} (95 %)"


def sample_saving(opened: Tier, state: PartitionState, sample_bytes: int) -> SampledSaving:
    """Raises BadData, StoreError."""
    # Of a tier that brokers write the newest segment is never cleaned, and its keys clean nothing.
    live = state.live[:-1] if opened.brokers is not None else state.live
    total = sum(segment.size_bytes for segment in live)
    if not total:
        return SampledSaving(0, 0, 0, 0)
    sample = _Sample(opened, state, live)
    if sample_bytes >= total:
        hashes, sizes = sample.records(live[0].start_offset, live[-1].end_offset)
        return SampledSaving(round(_superseded_share(hashes, sizes) * total), 0, total, total)
    first, newest_bytes = _newest(live, max(sample_bytes // 2, 1))
    hashes, sizes = sample.records(first, live[-1].end_offset)
    saved = _superseded_share(hashes, sizes) * newest_bytes
    older_bytes = total - newest_bytes
    known = np.unique(hashes)
    shares, read = [], newest_bytes
    for begin, end, size in _windows(live, first, older_bytes, sample_bytes - newest_bytes):
        old, old_sizes = sample.records(begin, end)
        if old_sizes.sum():
            gone = (old == 0) | np.isin(old, known, assume_unique=False)
            shares.append(float(old_sizes[gone].sum() / old_sizes.sum()))
        read += size
    error = 0.0
    if shares:
        saved += float(np.mean(shares)) * older_bytes
        deviation = float(np.std(shares, ddof=1)) if len(shares) > 1 else 1.0
        error = _NORMAL_95 * deviation / math.sqrt(len(shares)) * older_bytes
    return SampledSaving(round(saved), math.ceil(error), min(read, total), total)


class _Sample:
    """Committed records by ranges of offsets."""

    def __init__(self, opened: Tier, state: PartitionState, live: Sequence[RemoteLogSegmentMetadata]) -> None:
        self._opened = opened
        self._state = state
        self._live = tuple(live)
        self._wanted = WantedRecords(True, opened.settings.cleaner_for(state.topic).max_decompressed_batch_bytes)
        self._halves = key_halves(opened.reading_key())

    def records(self, first: int, last: int) -> tuple[Hashes64, Sizes]:
        """Of each record in offset order the hash of its key (0: it has none, and does not survive) and about its size."""
        parts = list(self._parts(first, last))
        if not parts:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        hashes, sizes = zip(*parts, strict=True)
        return np.concatenate(hashes), np.concatenate(sizes)

    def _parts(self, first: int, last: int) -> Iterator[tuple[Hashes64, Sizes]]:
        segments = tuple(segment for segment in self._live if segment.end_offset >= first and segment.start_offset <= last)
        for selection in Reader(self._opened, Extent(self._state.name, first, last, segments), self._wanted).selections():
            rows, picked = selection.rows, selection.picked
            out = np.empty((len(picked), 2), np.uint64)
            hash_keys(selection.chunk.buf, rows.key_start[picked], rows.key_length[picked], *self._halves, out)
            lengths = np.maximum(rows.key_length[picked], 0).astype(np.int64) + np.maximum(rows.value_length[picked], 0)
            yield out[:, 0].copy(), lengths + _OVERHEAD


def _superseded_share(hashes: Hashes64, sizes: Sizes) -> float:
    """By size, of records of which all are known: those that have a later one of their key, and those without a key."""
    if not len(hashes):
        return 0.0
    _, from_end = np.unique(hashes[::-1], return_index=True)
    survives = np.zeros(len(hashes), np.bool_)
    survives[len(hashes) - 1 - from_end] = True
    survives &= hashes != 0
    return float(sizes[~survives].sum() / sizes.sum())


def _newest(live: Sequence[RemoteLogSegmentMetadata], wanted: int) -> tuple[int, int]:
    """(first offset, bytes) of about so many bytes at the end."""
    taken = 0
    for segment in reversed(live):
        if taken + segment.size_bytes >= wanted:
            part = (wanted - taken) / segment.size_bytes
            span = segment.end_offset - segment.start_offset + 1
            return segment.end_offset + 1 - max(1, round(span * part)), wanted
        taken += segment.size_bytes
    return live[0].start_offset, taken


def _windows(live: Sequence[RemoteLogSegmentMetadata], before: int, older_bytes: int, sample_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first offset, last offset, about how many bytes), evenly spread over what lies before an offset; none of them overlap."""
    count = max(1, min(WINDOWS, sample_bytes // LEAST_WINDOW))
    size = max(1, sample_bytes // count)
    starts = [(number + 0.5) * older_bytes / count for number in range(count)]
    at = 0
    for segment in live:
        for start in starts:
            if at <= start < at + segment.size_bytes:
                per_byte = (segment.end_offset - segment.start_offset + 1) / segment.size_bytes
                first = segment.start_offset + int((start - at) * per_byte)
                last = min(segment.end_offset, before - 1, first + max(0, round(size * per_byte) - 1))
                if first <= last:
                    yield first, last, min(size, segment.size_bytes)
        at += segment.size_bytes
