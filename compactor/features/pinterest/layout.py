"""SegmentLayout for Pinterest's tiered storage: three files per segment, named by the base offset.

It has no producer snapshots, transaction indexes, leader epochs or segment ids. Objects are named by offset only, so nothing is ever
overwritten. Files are created in any order: consumers wait until a segment has all three.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from compactor.config.settings import Settings
from compactor.constants import LeaderEpoch, Offset, TimestampMs
from compactor.errors import BadData, NotFound, UsageError
from compactor.model.ids import TopicPartition, encode_segment_id
from compactor.model.segment import EpochEntry, RemoteLogSegmentMetadata, SegmentFile
from compactor.storage.port import ObjectInfo, ObjectStore
from compactor.tier.contents import TopicIdOfPartition, md5_prefix_bits
from compactor.tier.plain import OneObjectPerFileLayout, ParsedFileName
from compactor.tier.ports import ListedObject, OpenTransactionsAtSegmentEnd, SegmentRef

# ---- object keys: ``[<bits>/]<cluster>/<topic>-<partition>/<20 digits>.{log,index,timeindex}`` below the base prefix ----------
#
# Source: S3StorageServiceEndpoint, Utils.getBinaryHashForClusterTopicPartition, SegmentUtils.


OBJECT_KINDS: Final = ("log", "index", "timeindex")
METADATA_FILE: Final = "_metadata"
WATERMARK: Final = "offset.wm"
ENDLESS_SEARCH_ENTRIES: Final = 2
"""Number of index entries with which the consumer's search finds no end below the first one (S3OffsetIndexHandler)."""

_OBJECT: Final = re.compile(rf"(\d{{20}})\.({'|'.join(OBJECT_KINDS)})")
_PART: Final = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class PinterestObjectKeys:
    """entropy_bits: binary digits in front of each partition's folder."""

    cluster: str
    entropy_bits: int = 0

    def __post_init__(self) -> None:
        if not _PART.fullmatch(self.cluster):
            raise UsageError(
                f"{self.cluster!r} names no cluster of a tier of Pinterest's layout",
                hint="Set cluster under [tier.pinterest] to the id that the uploader runs with",
            )

    def partition_folder(self, partition: TopicPartition) -> str:
        """With a slash at its end."""
        bits = f"{entropy_prefix(self.cluster, partition, self.entropy_bits)}/" if self.entropy_bits else ""
        return f"{bits}{self.cluster}/{partition}/"

    def file_key(self, partition: TopicPartition, base_offset: int, file_kind: str) -> str:
        return self.partition_folder(partition) + file_name(base_offset, file_kind)

    def partition_of_object_key(self, key: str) -> TopicPartition | None:
        """Return None for an object of another cluster."""
        folder, _, _ = key.rpartition("/")
        try:
            name = TopicPartition.parse(folder.rpartition("/")[2])
        except UsageError:
            return None
        return name if self.partition_folder(name) == f"{folder}/" else None


def entropy_prefix(cluster: str, partition: TopicPartition, bits: int) -> str:
    """First binary digits of the MD5 of ``<cluster>-<topic>-<partition>``."""
    return md5_prefix_bits(f"{cluster}-{partition}", bits)


def file_name(base_offset: int, file_kind: str) -> str:
    return f"{base_offset:020d}.{file_kind}"


class PinterestFileName(NamedTuple):
    base_offset: int
    file_kind: str


def parse_file_name(name: str) -> PinterestFileName | None:
    match = _OBJECT.fullmatch(name)
    return PinterestFileName(int(match[1]), match[2]) if match else None


def derive_segment_id(base_offset: int) -> str:
    """Never begins with a dash."""
    tries = 0
    while (made := encode_segment_id(hashlib.sha256(f"{base_offset}/{tries}".encode()).digest()[:16])).startswith("-"):
        tries += 1
    return made


# ---- the files ``_metadata`` and ``offset.wm`` of a partition -----------------------------------------------------------------
#
# Consumers use only segments that are listed and named in ``_metadata``, and search by its timestamps. The uploader continues above the
# base offset in ``offset.wm`` (TopicPartitionMetadata, TimeIndex, WatermarkFileHandler).


TIME_INDEX_TYPE: Final = "TOPIC_PARTITION"


@dataclass(frozen=True, order=True)
class SegmentTimestampBound:
    """Row of ``_metadata``: an upper bound for all timestamps up to a segment's end. Rows compare in the order of consumers."""

    timestamp_ms: int
    base_offset: int


def encode_metadata_file(partition: TopicPartition, entries: Sequence[SegmentTimestampBound]) -> bytes:
    """Encode as Gson writes TopicPartitionMetadata, without the process-specific ``loadHash``."""
    rows = [{"timestamp": e.timestamp_ms, "relativeOffset": 0, "baseOffset": e.base_offset} for e in sorted(entries)]
    timeindex = {"entries": rows, "timeIndexType": TIME_INDEX_TYPE, "size": len(rows)}
    document = {"topicPartition": {"partition": partition.partition, "topic": partition.topic}, "metadata": {"timeindex": timeindex}}
    return json.dumps(document, separators=(",", ":")).encode()


def parse_metadata_file(data: bytes, partition: TopicPartition) -> tuple[SegmentTimestampBound, ...]:
    """Ascending. Raises BadData if consumers could not read it or it belongs to another partition."""
    try:
        document: Any = json.loads(data)
        reported = TopicPartition(document["topicPartition"]["topic"], document["topicPartition"]["partition"])
        rows = document["metadata"]["timeindex"]["entries"]
        entries = tuple(
            sorted(SegmentTimestampBound(_require_integer(row["timestamp"]), _require_integer(row["baseOffset"])) for row in rows)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _invalid_metadata_file_error(
            partition, METADATA_FILE, f"it is not a partition's metadata: {type(error).__name__} {error}"
        ) from None
    if reported != partition:
        raise _invalid_metadata_file_error(partition, METADATA_FILE, f"it is of {reported}")
    return entries


def format_watermark_file(base_offset: int) -> bytes:
    """Watermark with the base offset of the last segment whose log was uploaded."""
    return f"{base_offset:020d}".encode()


def parse_watermark_base_offset(data: bytes, partition: TopicPartition) -> int:
    text = data.decode("ascii", "replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) == 20):
        raise _invalid_metadata_file_error(partition, WATERMARK, f"it says {text[:40]!r}, which is not a base offset of 20 digits")
    return int(text)


def _require_integer(value: object) -> int:
    """Raises TypeError for anything else, booleans included."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _invalid_metadata_file_error(partition: TopicPartition, file: str, cause: str) -> BadData:
    return BadData(cause, segment=f"{partition}/{file}", hint="The uploader rewrites it with its next segment")


# ---- segments, found by LIST and ``_metadata``, because no log records them ---------------------------------------------------
#
# A segment ends where the next one begins. After a change of leader segments may overlap; their records are equal, and the later segment is
# read. Only the end of the newest segment is read from its log.


T = TypeVar("T")

_BATCH_HEADER: Final = struct.Struct(">qi4xb6xi")
"""Of a batch: base offset, length, magic, and of v2 the distance of the last offset. (DefaultRecordBatch)"""
_FRAMING_BYTES: Final = 12
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class ListedSegment:
    base: int
    files: Mapping[str, ObjectInfo]

    @property
    def has_all_three_files(self) -> bool:
        """Consumers use no other segment."""
        return len(self.files) == len(OBJECT_KINDS)

    @property
    def modified_ms(self) -> int:
        return max(info.modified_ms for info in self.files.values())


@dataclass(frozen=True)
class PartitionListing:
    """Contents of a partition's folder. times, watermark: None if the file does not exist or cannot be read (``problems``)."""

    segments: tuple[ListedSegment, ...]
    times: tuple[SegmentTimestampBound, ...] | None = None
    watermark: int | None = None
    problems: tuple[BadData, ...] = ()
    other_keys: tuple[str, ...] = ()

    @property
    def readable_segments(self) -> tuple[ListedSegment, ...]:
        """With a log. Those below the first segment in ``_metadata`` are being deleted."""
        first = min((time.base_offset for time in self.times or ()), default=0)
        return tuple(segment for segment in self.segments if "log" in segment.files and segment.base >= first)

    @property
    def segments_for_consumers(self) -> tuple[ListedSegment, ...]:
        """Complete, and named in ``_metadata`` if that exists."""
        named = None if self.times is None else {time.base_offset for time in self.times}
        return tuple(segment for segment in self.segments if segment.has_all_three_files and (named is None or segment.base in named))


@dataclass
class PinterestListing:
    """Objects of one cluster. Every method makes LIST requests."""

    store: ObjectStore
    keys: PinterestObjectKeys
    transactions: dict[TopicPartition, OpenTransactionsAtSegmentEnd] = field(default_factory=dict)
    _ends: dict[tuple[str, int], int] = field(default_factory=dict)

    def list_topic_partitions(self) -> list[TopicPartition]:
        """Partitions with a log, sorted, by listing all objects."""
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
        """Ascending. Raises StoreError, or BadData if the end of the newest cannot be read."""
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
        """Return None if the file is missing or invalid (with an error in ``problems``)."""
        try:
            return parse(self.store.get(key), partition)
        except NotFound:
            return None
        except BadData as error:
            problems.append(error)
            return None

    def _inclusive_end_offset(self, segment: ListedSegment) -> int:
        log = segment.files["log"]
        key = (log.key, log.size)
        if key not in self._ends:
            self._ends[key] = read_last_offset(self.store, segment)
        return self._ends[key]


def segment_metadata(segment: ListedSegment, last_offset: int) -> RemoteLogSegmentMetadata:
    """The leader epoch is 0, because the layout records none; imports and exports take epochs from the batches. The largest timestamp is
    the upload time. ``last_offset``: inclusive.
    """
    log = segment.files["log"]
    return RemoteLogSegmentMetadata(
        id=derive_segment_id(segment.base),
        start_offset=Offset(segment.base),
        end_offset=Offset(last_offset),
        size_bytes=log.size,
        max_timestamp_ms=TimestampMs(segment.modified_ms),
        mtime_ms=log.modified_ms,
        leader_epochs=(EpochEntry(LeaderEpoch(0), Offset(segment.base)),),
        files={kind: SegmentFile(size=segment.files[kind].size) for kind in OBJECT_KINDS if kind in segment.files},
    )


def read_last_offset(store: ObjectStore, segment: ListedSegment) -> int:
    """By the batch headers after the last index entry. Raises BadData if they do not lead to the log's end."""
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
    from compactor.records.indexes import OFFSET_ENTRY

    index = segment.files.get("index")
    if index is None or index.size < OFFSET_ENTRY.itemsize:
        return 0
    begin = (index.size // OFFSET_ENTRY.itemsize - 1) * OFFSET_ENTRY.itemsize
    entry = np.frombuffer(store.get(index.key, begin, OFFSET_ENTRY.itemsize), OFFSET_ENTRY)[0]
    position = int(entry["position"])
    return position if 0 <= position < log_bytes else 0


class PinterestLayout(OneObjectPerFileLayout):
    kinds = OBJECT_KINDS

    def __init__(self, store: ObjectStore, keys: PinterestObjectKeys) -> None:
        super().__init__(store)
        self._keys = keys

    @override
    def partition_folder(self, partition: TopicPartition) -> str:
        return self._keys.partition_folder(partition)

    @override
    def file_name(self, segment: SegmentRef, file_kind: str) -> str:
        return file_name(segment.start_offset, file_kind)

    @override
    def parse_file_name(self, file: str) -> ParsedFileName | None:
        parsed = parse_file_name(file)
        return ParsedFileName(derive_segment_id(parsed[0]), *parsed) if parsed else None

    @override
    def partition_in_key(self, key: str) -> str:
        return str(self._keys.partition_of_object_key(key) or "")

    @override
    def list_objects(self, partition: TopicPartition) -> Iterator[ListedObject]:
        return (item for item in super().list_objects(partition) if item.key.rpartition("/")[2] not in (METADATA_FILE, WATERMARK))

    @override
    def _expected_file_kinds(self, segment: RemoteLogSegmentMetadata) -> Collection[str]:
        """Consumers skip a segment that lacks a file."""
        return OBJECT_KINDS


def open_layout(settings: Settings, store: ObjectStore, topic_id: TopicIdOfPartition) -> PinterestLayout:
    """Raises UsageError if no cluster is set."""
    return PinterestLayout(store, configured_object_keys(settings))


def open_listing(settings: Settings, store: ObjectStore) -> PinterestListing:
    """Makes no request. Raises UsageError if no cluster is set."""
    return PinterestListing(store, configured_object_keys(settings))


def configured_object_keys(settings: Settings) -> PinterestObjectKeys:
    """From [tier.pinterest]. Raises UsageError if no cluster is set."""
    return PinterestObjectKeys(settings.tier.pinterest.cluster, settings.tier.pinterest.entropy_bits)
