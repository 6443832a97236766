"""Serialization of a folded user partition. Segments are decoded only on access, because a partition may have thousands."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, MutableMapping

from typing_extensions import override

from compactor.brokers.metadata_topic.cache import (
    LeaderEpochSegments,
    RemoteLogMetadataCache,
    SuspiciousRecordFinding,
    SuspiciousRecordFindingKind,
)
from compactor.brokers.metadata_topic.codec import (
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    TopicIdPartition,
    decode_unframed_segment_metadata,
    encode_unframed_segment_metadata,
)

STATE_FORMAT = 1
"""Counts up when these bytes, or what a fold makes of the topic, change their meaning."""

_DELETE_STATES = (None, *PartitionDeleteState)
_HEAD = struct.Struct(">qbIIII")
"""Last applied offset, deletion, number of epochs, of segments, of finished ids, length of the findings."""
_EPOCH = struct.Struct(">i?qII")
_REFERENCE = struct.Struct(">q16s")
_SEGMENT_ENTRY = struct.Struct(">16sI")


class LazilyDecodedSegments(MutableMapping[bytes, RemoteLogSegmentMetadataRecord]):
    """Segments by id, in the order of introduction. Each is decoded at its first access."""

    def __init__(self) -> None:
        self._segments: dict[bytes, bytes | RemoteLogSegmentMetadataRecord] = {}

    @override
    def __getitem__(self, raw_id: bytes) -> RemoteLogSegmentMetadataRecord:
        held = self._segments[raw_id]
        if isinstance(held, bytes):
            held = self._segments[raw_id] = decode_unframed_segment_metadata(held)[0]
        return held

    @override
    def __setitem__(self, raw_id: bytes, segment: RemoteLogSegmentMetadataRecord) -> None:
        self._segments[raw_id] = segment

    @override
    def __delitem__(self, raw_id: bytes) -> None:
        del self._segments[raw_id]

    @override
    def __iter__(self) -> Iterator[bytes]:
        return iter(self._segments)

    @override
    def __len__(self) -> int:
        return len(self._segments)

    def encoded_segments(self) -> dict[bytes, bytes]:
        """Return all segments in encoded form, by segment id (16 bytes)."""
        return {
            raw_id: held if isinstance(held, bytes) else encode_unframed_segment_metadata(held) for raw_id, held in self._segments.items()
        }

    def store_encoded_segment(self, raw_id: bytes, data: bytes) -> None:
        """Store an encoded segment, which is decoded at its first access."""
        self._segments[raw_id] = data


def encode_folded_partition(cache: RemoteLogMetadataCache, findings: list[SuspiciousRecordFinding]) -> bytes:
    """Encode the folded segments and findings of a user partition for local storage."""
    segments = cache.segments
    held = (
        segments.encoded_segments()
        if isinstance(segments, LazilyDecodedSegments)
        else {raw: encode_unframed_segment_metadata(one) for raw, one in segments.items()}
    )
    reported = json.dumps([[one.kind, one.segment_id.hex(), one.offset, one.detail] for one in findings]).encode()
    deletion = _DELETE_STATES.index(cache.deletion)
    parts = [_HEAD.pack(cache.applied, deletion, len(cache.epochs), len(held), len(cache.finished), len(reported))]
    for epoch, state in cache.epochs.items():
        highest = state.highest
        parts.append(_EPOCH.pack(epoch, highest is not None, highest or 0, len(state.starts), len(state.unreferenced)))
        parts.extend(map(_REFERENCE.pack, state.starts, state.ids))
        parts.extend(state.unreferenced)
    parts.extend(_SEGMENT_ENTRY.pack(raw_id, len(data)) for raw_id, data in held.items())
    parts.extend(cache.finished)
    parts.append(reported)
    parts.extend(held.values())
    return b"".join(parts)


def decode_folded_partition(data: bytes, partition: TopicIdPartition) -> tuple[RemoteLogMetadataCache, list[SuspiciousRecordFinding]]:
    """Decode the folded segments and findings of a user partition from local storage, and return both. Raises ValueError or struct.error if
    the bytes are corrupt.
    """
    cache = RemoteLogMetadataCache(partition, LazilyDecodedSegments())
    cache.applied, deletion, epochs, segments, finished, reported_length = _HEAD.unpack_from(data)
    cache.deletion = _DELETE_STATES[deletion]
    at = _HEAD.size
    for _ in range(epochs):
        epoch, known, highest, referenced, unreferenced = _EPOCH.unpack_from(data, at)
        at += _EPOCH.size
        state = cache.epochs[epoch] = LeaderEpochSegments()
        state.highest = highest if known else None
        for start, raw_id in _REFERENCE.iter_unpack(data[at : at + referenced * _REFERENCE.size]):
            state.starts.append(start)
            state.ids.append(raw_id)
        at += referenced * _REFERENCE.size
        state.unreferenced = dict.fromkeys(_decode_segment_ids(data, at, unreferenced))
        at += unreferenced * 16
    listed = list(_SEGMENT_ENTRY.iter_unpack(data[at : at + segments * _SEGMENT_ENTRY.size]))
    at += segments * _SEGMENT_ENTRY.size
    cache.finished = dict.fromkeys(_decode_segment_ids(data, at, finished))
    at += finished * 16
    reported = json.loads(data[at : at + reported_length])
    at += reported_length
    held = cache.segments
    if isinstance(held, LazilyDecodedSegments):
        for raw_id, length in listed:
            held.store_encoded_segment(raw_id, data[at : at + length])
            at += length
    if at != len(data):
        raise ValueError(f"{len(data)} bytes, {at} expected")
    return cache, [
        SuspiciousRecordFinding(SuspiciousRecordFindingKind(kind), partition, bytes.fromhex(raw), offset, message)
        for kind, raw, offset, message in reported
    ]


def _decode_segment_ids(data: bytes, position: int, count: int) -> list[bytes]:
    """Return ``count`` ids of 16 bytes each, starting at position ``position``."""
    return [data[start : start + 16] for start in range(position, position + 16 * count, 16)]
