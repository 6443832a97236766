"""A folded user partition as bytes and back. Segments stay bytes until somebody asks for them: a partition may have thousands."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, MutableMapping

from compactor.metadata_topic.cache import Finding, FindingKind, LeaderEpochState, RemoteLogMetadataCache
from compactor.metadata_topic.codec import (
    PartitionDeleteState,
    RemoteLogSegmentMetadataRecord,
    TopicIdPartition,
    pack_segment,
    unpack_segment,
)

FORMAT = 1
"""Counts up when these bytes, or what a fold makes of the topic, change their meaning."""

_DELETIONS = (None, *PartitionDeleteState)
_HEAD = struct.Struct(">qbIIII")
"""Last applied offset, deletion, number of epochs, of segments, of finished ids, length of the findings."""
_EPOCH = struct.Struct(">i?qII")
_REFERENCE = struct.Struct(">q16s")
_LISTED = struct.Struct(">16sI")


class PackedSegments(MutableMapping[bytes, RemoteLogSegmentMetadataRecord]):
    """By id, in the order of introduction."""

    def __init__(self) -> None:
        self._held: dict[bytes, bytes | RemoteLogSegmentMetadataRecord] = {}

    def __getitem__(self, raw_id: bytes) -> RemoteLogSegmentMetadataRecord:
        held = self._held[raw_id]
        if isinstance(held, bytes):
            held = self._held[raw_id] = unpack_segment(held)[0]
        return held

    def __setitem__(self, raw_id: bytes, segment: RemoteLogSegmentMetadataRecord) -> None:
        self._held[raw_id] = segment

    def __delitem__(self, raw_id: bytes) -> None:
        del self._held[raw_id]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def packed(self) -> dict[bytes, bytes]:
        return {raw_id: held if isinstance(held, bytes) else pack_segment(held) for raw_id, held in self._held.items()}

    def hold(self, raw_id: bytes, data: bytes) -> None:
        self._held[raw_id] = data


def pack(cache: RemoteLogMetadataCache, findings: list[Finding]) -> bytes:
    segments = cache.segments
    held = segments.packed() if isinstance(segments, PackedSegments) else {raw: pack_segment(one) for raw, one in segments.items()}
    told = json.dumps([[one.kind, one.segment_id.hex(), one.offset, one.said] for one in findings]).encode()
    deletion = _DELETIONS.index(cache.deletion)
    parts = [_HEAD.pack(cache.applied, deletion, len(cache.epochs), len(held), len(cache.finished), len(told))]
    for epoch, state in cache.epochs.items():
        highest = state.highest
        parts.append(_EPOCH.pack(epoch, highest is not None, highest or 0, len(state.starts), len(state.unreferenced)))
        parts.extend(map(_REFERENCE.pack, state.starts, state.ids))
        parts.extend(state.unreferenced)
    parts.extend(_LISTED.pack(raw_id, len(data)) for raw_id, data in held.items())
    parts.extend(cache.finished)
    parts.append(told)
    parts.extend(held.values())
    return b"".join(parts)


def unpack(data: bytes, partition: TopicIdPartition) -> tuple[RemoteLogMetadataCache, list[Finding]]:
    """Raises ValueError or struct.error for other bytes."""
    cache = RemoteLogMetadataCache(partition, PackedSegments())
    cache.applied, deletion, epochs, segments, finished, told_length = _HEAD.unpack_from(data)
    cache.deletion = _DELETIONS[deletion]
    at = _HEAD.size
    for _ in range(epochs):
        epoch, known, highest, referenced, unreferenced = _EPOCH.unpack_from(data, at)
        at += _EPOCH.size
        state = cache.epochs[epoch] = LeaderEpochState()
        state.highest = highest if known else None
        for start, raw_id in _REFERENCE.iter_unpack(data[at : at + referenced * _REFERENCE.size]):
            state.starts.append(start)
            state.ids.append(raw_id)
        at += referenced * _REFERENCE.size
        state.unreferenced = dict.fromkeys(_ids(data, at, unreferenced))
        at += unreferenced * 16
    listed = list(_LISTED.iter_unpack(data[at : at + segments * _LISTED.size]))
    at += segments * _LISTED.size
    cache.finished = dict.fromkeys(_ids(data, at, finished))
    at += finished * 16
    told = json.loads(data[at : at + told_length])
    at += told_length
    held = cache.segments
    if isinstance(held, PackedSegments):
        for raw_id, length in listed:
            held.hold(raw_id, data[at : at + length])
            at += length
    if at != len(data):
        raise ValueError(f"{len(data)} bytes, {at} expected")
    return cache, [Finding(FindingKind(kind), partition, bytes.fromhex(raw), offset, said) for kind, raw, offset, said in told]


def _ids(data: bytes, at: int, count: int) -> list[bytes]:
    return [data[start : start + 16] for start in range(at, at + 16 * count, 16)]
