"""Which segments a tier of Pinterest's layout has: there is no log of them, only LIST and ``_metadata``.

A segment reaches to where the next one begins. Where a broker's replicas roll at different offsets, segments overlap after a change of
leader; both have the same records there, and the later one's are read. Only where the newest one ends is read from its log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from compactor.errors import BadData, NotFound
from compactor.model.ids import TopicPartition
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.tier.layouts.pinterest.keys import KINDS, METADATA, WATERMARK, PartitionKeys, id_of, parsed
from compactor.tier.layouts.pinterest.metadata import SegmentTime, parse_metadata, parse_watermark

T = TypeVar("T")

_HEAD: Final = struct.Struct(">qi4xb6xi")
"""Of a batch: base offset, length, magic, and of v2 the distance of the last offset. (DefaultRecordBatch)"""
_FRAMING: Final = 12
_WINDOW: Final = 1 << 16


@dataclass(frozen=True)
class ListedSegment:
    """Files of one base offset, by kind. ``modified_ms``: of its log, by the store's clock."""

    base: int
    files: Mapping[str, ObjectInfo]

    @property
    def whole(self) -> bool:
        """Whether the consumer takes it for a segment."""
        return len(self.files) == len(KINDS)

    @property
    def modified_ms(self) -> int:
        return max(info.modified_ms for info in self.files.values())


@dataclass(frozen=True)
class PartitionListing:
    """What lies in a partition's folder. ``times``: the rows of ``_metadata``, None where there is none; ``watermark`` likewise.

    ``problems``: why one of the two cannot be read. ``strangers``: keys of everything else.
    """

    segments: tuple[ListedSegment, ...]
    times: tuple[SegmentTime, ...] | None = None
    watermark: int | None = None
    problems: tuple[BadData, ...] = ()
    strangers: tuple[str, ...] = ()

    @property
    def readable(self) -> tuple[ListedSegment, ...]:
        """Those with a log. What lies below the first one that ``_metadata`` names is being deleted: names go first, objects follow."""
        first = min((time.base_offset for time in self.times or ()), default=0)
        return tuple(segment for segment in self.segments if "log" in segment.files and segment.base >= first)

    @property
    def consumed(self) -> tuple[ListedSegment, ...]:
        """Those that the consumer finds: three files each, and named in ``_metadata`` where there is one."""
        named = None if self.times is None else {time.base_offset for time in self.times}
        return tuple(segment for segment in self.segments if segment.whole and (named is None or segment.base in named))


@dataclass(frozen=True)
class OpenTransactions:
    """What is open behind a segment, by its base offset and size: producer -> first offset of its transaction."""

    base: int
    size: int
    first_offsets: Mapping[int, int]

    def is_through(self, segment: RemoteLogSegmentMetadata) -> bool:
        return (segment.start_offset, segment.size_bytes) == (self.base, self.size)


@dataclass
class ListedTier:
    """LiveView of one cluster's partitions below a base prefix. Every question is a LIST.

    ``transactions``: a memory of whoever reads the batches; what was uploaded does not change.
    """

    store: ObjectStore
    keys: PartitionKeys
    transactions: dict[TopicPartition, OpenTransactions] = field(default_factory=dict)
    _ends: dict[tuple[str, int], int] = field(default_factory=dict)

    def names(self) -> list[TopicPartition]:
        """Partitions of which there is a segment's log, by topic and number. Lists all objects of the cluster."""
        prefix = "" if self.keys.entropy_bits else f"{self.keys.cluster}/"
        found: set[TopicPartition] = set()
        folder, named = "", None
        for info in self.store.list(prefix):
            at, _, file = info.key.rpartition("/")
            if at != folder:
                folder, named = at, self.keys.named(info.key)
            if named and (known := parsed(file)) and known[1] == "log":
                found.add(named)
        return sorted(found)

    def listing(self, name: TopicPartition) -> PartitionListing:
        """Raises StoreError."""
        folder = self.keys.folder(name)
        files: dict[int, dict[str, ObjectInfo]] = {}
        strangers = []
        beside: set[str] = set()
        for info in self.store.list(folder):
            file = info.key.removeprefix(folder)
            if known := parsed(file):
                files.setdefault(known[0], {})[known[1]] = info
            elif file in (METADATA, WATERMARK):
                beside.add(file)
            else:
                strangers.append(info.key)
        problems: list[BadData] = []
        times = self._told(folder + METADATA, name, parse_metadata, problems) if METADATA in beside else None
        watermark = self._told(folder + WATERMARK, name, parse_watermark, problems) if WATERMARK in beside else None
        segments = tuple(ListedSegment(base, files[base]) for base in sorted(files))
        return PartitionListing(segments, times, watermark, tuple(problems), tuple(strangers))

    def live(self, name: TopicPartition) -> tuple[RemoteLogSegmentMetadata, ...]:
        """A partition's readable segments, ascending. One request more than the LIST and ``_metadata``: the end of the newest.

        Raises BadData where that cannot be read; StoreError.
        """
        segments = [segment for segment in self.listing(name).readable if segment.files["log"].size]
        if not segments:
            return ()
        ends = [following.base - 1 for _, following in pairwise(segments)]
        return tuple(described(segment, end) for segment, end in zip(segments, [*ends, self._end(segments[-1])], strict=True))

    def _told(self, key: str, name: TopicPartition, parse: Callable[[bytes, TopicPartition], T], problems: list[BadData]) -> T | None:
        try:
            return parse(self.store.get(key), name)
        except NotFound:
            return None
        except BadData as error:
            problems.append(error)
            return None

    def _end(self, segment: ListedSegment) -> int:
        log = segment.files["log"]
        key = (log.key, log.size)
        if key not in self._ends:
            self._ends[key] = last_offset(self.store, segment)
        return self._ends[key]


def described(segment: ListedSegment, end: int) -> RemoteLogSegmentMetadata:
    """As this program has segments. It is of epoch 0, as the layout knows of none: imports and exports ask the batches.

    No record is known to be younger than its upload.
    """
    log = segment.files["log"]
    return RemoteLogSegmentMetadata(
        id=id_of(segment.base),
        start_offset=segment.base,
        end_offset=end,
        size_bytes=log.size,
        max_timestamp_ms=segment.modified_ms,
        mtime_ms=log.modified_ms,
        leader_epochs=(EpochEntry(0, segment.base),),
        files={kind: SegmentFile(size=segment.files[kind].size) for kind in KINDS if kind in segment.files},
    )


def last_offset(store: ObjectStore, segment: ListedSegment) -> int:
    """Of a segment's last batch, by its headers from the last index entry on. Raises BadData where they do not lead to the log's end."""
    log = segment.files["log"]
    position, last = _position(store, segment, log.size), segment.base - 1
    window, begin = b"", position
    while position < log.size:
        if position - begin + _HEAD.size > len(window):
            window, begin = store.get(log.key, position, _WINDOW), position
        if len(window) - (position - begin) < _HEAD.size:
            break
        base, length, magic, delta = _HEAD.unpack_from(window, position - begin)
        if length < _HEAD.size - _FRAMING - 10 or base < last:
            break
        last = base + delta if magic >= 2 else base
        position += _FRAMING + length
    if position != log.size:
        raise BadData(
            "its batches do not lead to its end: it is cut short, or its index is another segment's",
            segment=log.key,
            position=position,
            hint="See `verify`",
        )
    return last


def _position(store: ObjectStore, segment: ListedSegment, log_bytes: int) -> int:
    """Of a batch near the log's end: what the last entry of its index says, 0 where there is none."""
    from compactor.records.indexes import OFFSET_ENTRY

    index = segment.files.get("index")
    if index is None or index.size < OFFSET_ENTRY.itemsize:
        return 0
    begin = (index.size // OFFSET_ENTRY.itemsize - 1) * OFFSET_ENTRY.itemsize
    entry = np.frombuffer(store.get(index.key, begin, OFFSET_ENTRY.itemsize), OFFSET_ENTRY)[0]
    position = int(entry["position"])
    return position if 0 <= position < log_bytes else 0
