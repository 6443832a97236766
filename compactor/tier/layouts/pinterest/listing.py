"""Segments of a listed tier with Pinterest's layout, found by LIST and ``_metadata``, because no log records them.

A segment ends where the next one begins. After a change of leader segments may overlap; their records are equal, and the later segment is
read. Only the end of the newest segment is read from its log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.errors import BadData, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.tier.layouts.pinterest.keys import (
    METADATA_FILE,
    OBJECT_KINDS,
    WATERMARK,
    PinterestObjectKeys,
    parse_file_name,
    segment_id_from_base_offset,
)
from compactor.tier.layouts.pinterest.metadata import SegmentTimestampBound, parse_metadata_file, parse_watermark_base_offset

T = TypeVar("T")

_BATCH_HEADER: Final = struct.Struct(">qi4xb6xi")
"""Of a batch: base offset, length, magic, and of v2 the distance of the last offset. (DefaultRecordBatch)"""
_FRAMING_BYTES: Final = 12
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class ListedSegment:
    """A segment found by listing: its base offset, and the object of each kind of file."""

    base: int
    files: Mapping[str, ObjectInfo]

    @property
    def has_all_three_files(self) -> bool:
        """Return whether all three files exist, so that consumers use the segment."""
        return len(self.files) == len(OBJECT_KINDS)

    @property
    def modified_ms(self) -> int:
        """Return the latest modification time of the segment's files, in milliseconds by the store's clock."""
        return max(info.modified_ms for info in self.files.values())


@dataclass(frozen=True)
class PartitionListing:
    """Contents of a partition's folder.

    times: the rows of ``_metadata``, or None if it does not exist or cannot be read.
    watermark: the uploader's watermark, or None if it does not exist or cannot be read.
    problems: an error for each of the two files (``_metadata``, watermark) that exists but cannot be read; its field is then None.
    other_keys: keys of all other objects.
    """

    segments: tuple[ListedSegment, ...]
    times: tuple[SegmentTimestampBound, ...] | None = None
    watermark: int | None = None
    problems: tuple[BadData, ...] = ()
    other_keys: tuple[str, ...] = ()

    @property
    def readable_segments(self) -> tuple[ListedSegment, ...]:
        """Return the segments that can be read: all that have a log, except those below the first segment in ``_metadata``, whose deletion
        has begun.
        """
        first = min((time.base_offset for time in self.times or ()), default=0)
        return tuple(segment for segment in self.segments if "log" in segment.files and segment.base >= first)

    @property
    def segments_for_consumers(self) -> tuple[ListedSegment, ...]:
        """Return the segments that consumers use: complete, and named in ``_metadata`` if that exists."""
        named = None if self.times is None else {time.base_offset for time in self.times}
        return tuple(segment for segment in self.segments if segment.has_all_three_files and (named is None or segment.base in named))


@dataclass(frozen=True)
class OpenTransactionsAtSegmentEnd:
    """Transactions that are open at the end of a segment: producer id -> first offset of its transaction.

    base, size: base offset and size in bytes of the segment.
    """

    base: int
    size: int
    first_offsets: Mapping[int, int]

    def is_transaction_state_of_segment_end(self, segment: RemoteLogSegmentMetadata) -> bool:
        """Return whether these are the open transactions at the end of the given segment."""
        return (segment.start_offset, segment.size_bytes) == (self.base, self.size)


@dataclass
class ListedTier:
    """Reader of a listed tier, whose partitions and live segments are found by listing the objects of one cluster. Every method makes LIST
    requests.

    transactions: cache of the transactions open at a segment's end, for code that reads batches; uploaded segments never change.
    """

    store: ObjectStore
    keys: PinterestObjectKeys
    transactions: dict[TopicPartition, OpenTransactionsAtSegmentEnd] = field(default_factory=dict)
    _ends: dict[tuple[str, int], int] = field(default_factory=dict)

    def list_topic_partitions(self) -> list[TopicPartition]:
        """Return the partitions that have a log, by topic and number. Lists all objects of the cluster."""
        prefix = "" if self.keys.entropy_bits else f"{self.keys.cluster}/"
        found: set[TopicPartition] = set()
        folder, named = "", None
        for info in self.store.list(prefix):
            at, _, file = info.key.rpartition("/")
            if at != folder:
                folder, named = at, self.keys.partition_of_object_key(info.key)
            if named and (known := parse_file_name(file)) and known[1] == "log":
                found.add(named)
        return sorted(found)

    def list_partition(self, partition: TopicPartition) -> PartitionListing:
        """List a partition's folder and read ``_metadata`` and the watermark. Raises StoreError."""
        folder = self.keys.partition_folder(partition)
        files: dict[int, dict[str, ObjectInfo]] = {}
        strangers = []
        beside: set[str] = set()
        for info in self.store.list(folder):
            file = info.key.removeprefix(folder)
            if known := parse_file_name(file):
                files.setdefault(known[0], {})[known[1]] = info
            elif file in (METADATA_FILE, WATERMARK):
                beside.add(file)
            else:
                strangers.append(info.key)
        problems: list[BadData] = []
        times = (
            self._read_optional_file(folder + METADATA_FILE, partition, parse_metadata_file, problems) if METADATA_FILE in beside else None
        )
        watermark = (
            self._read_optional_file(folder + WATERMARK, partition, parse_watermark_base_offset, problems) if WATERMARK in beside else None
        )
        segments = tuple(ListedSegment(base, files[base]) for base in sorted(files))
        return PartitionListing(segments, times, watermark, tuple(problems), tuple(strangers))

    def live_segments(self, partition: TopicPartition) -> tuple[RemoteLogSegmentMetadata, ...]:
        """Return a partition's readable segments, ascending. Raises StoreError, or BadData if the end of the newest cannot be read."""
        segments = [segment for segment in self.list_partition(partition).readable_segments if segment.files["log"].size]
        if not segments:
            return ()
        ends = [following.base - 1 for _, following in pairwise(segments)]
        return tuple(
            segment_metadata(segment, end) for segment, end in zip(segments, [*ends, self._inclusive_end_offset(segments[-1])], strict=True)
        )

    def _read_optional_file(
        self, key: str, partition: TopicPartition, parse: Callable[[bytes, TopicPartition], T], problems: list[BadData]
    ) -> T | None:
        """Read and parse the file under this key. Return None if the file is missing, or if it is invalid; the error is then appended to
        ``problems``.
        """
        try:
            return parse(self.store.get(key), partition)
        except NotFound:
            return None
        except BadData as error:
            problems.append(error)
            return None

    def _inclusive_end_offset(self, segment: ListedSegment) -> int:
        """Return the last offset of a segment, from the cache if it was read before."""
        log = segment.files["log"]
        key = (log.key, log.size)
        if key not in self._ends:
            self._ends[key] = read_last_offset(self.store, segment)
        return self._ends[key]


def segment_metadata(segment: ListedSegment, last_offset: int) -> RemoteLogSegmentMetadata:
    """Return the metadata of a segment found in a listing. The leader epoch is 0, because the layout records none; imports and exports take
    epochs from the batches. The largest timestamp is the upload time, in milliseconds.

    :param last_offset: last offset of the segment, inclusive.
    """
    log = segment.files["log"]
    return RemoteLogSegmentMetadata(
        id=segment_id_from_base_offset(segment.base),
        start_offset=Offset(segment.base),
        end_offset=Offset(last_offset),
        size_bytes=log.size,
        max_timestamp_ms=TimestampMs(segment.modified_ms),
        mtime_ms=log.modified_ms,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(segment.base)),),
        files={kind: SegmentFile(size=segment.files[kind].size) for kind in OBJECT_KINDS if kind in segment.files},
    )


def read_last_offset(store: ObjectStore, segment: ListedSegment) -> int:
    """Return the offset of a log's last record, found by reading the batch headers after the last index entry. Raises BadData if the
    headers do not lead to the log's end.
    """
    log = segment.files["log"]
    position, last = _last_indexed_position(store, segment, log.size), segment.base - 1
    window, begin = b"", position
    while position < log.size:
        if position - begin + _BATCH_HEADER.size > len(window):
            window, begin = store.get(log.key, position, _READ_BYTES), position
        if len(window) - (position - begin) < _BATCH_HEADER.size:
            break
        base, length, magic, delta = _BATCH_HEADER.unpack_from(window, position - begin)
        if length < _BATCH_HEADER.size - _FRAMING_BYTES - 10 or base < last:
            break
        last = base + delta if magic >= 2 else base
        position += _FRAMING_BYTES + length
    if position != log.size:
        raise BadData(
            "its batches do not lead to its end: it is cut short, or its index is another segment's",
            segment=log.key,
            position=position,
            hint="See `verify`",
        )
    return last


def _last_indexed_position(store: ObjectStore, segment: ListedSegment, log_bytes: int) -> int:
    """Return the position in the log that the last entry of the segment's offset index names, or 0 if the index has no entry."""
    from compactor.records.indexes import OFFSET_ENTRY

    index = segment.files.get("index")
    if index is None or index.size < OFFSET_ENTRY.itemsize:
        return 0
    begin = (index.size // OFFSET_ENTRY.itemsize - 1) * OFFSET_ENTRY.itemsize
    entry = np.frombuffer(store.get(index.key, begin, OFFSET_ENTRY.itemsize), OFFSET_ENTRY)[0]
    position = int(entry["position"])
    return position if 0 <= position < log_bytes else 0
