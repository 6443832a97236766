"""Segment manifest ``.rsm-manifest``: one JSON object (SegmentManifestV1). Manifests that the plug-in would refuse are refused here,
too.

``remoteLogSegmentMetadata`` is informational: the plug-in writes it and never reads it. If it identifies a segment, that must match.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from compactor.constants import TopicId
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.layouts.aiven.chunk_index import (
    MAX_INT32,
    ChunkIndex,
    InvalidAivenDataError,
    StoredBytePosition,
    StoredBytes,
    decode_strict_base64,
    decode_transformed_chunks_field,
)
from compactor.tier.layouts.aiven.transform import ENCRYPTION_OVERHEAD

MAX_MANIFEST_BYTES: Final = 64 << 20
JsonPath = tuple[str, ...]
"""Names of nested fields, from the outermost to the innermost."""

_INDEX_NAMES: Final = {
    "index": "offset",
    "timeindex": "timestamp",
    "snapshot": "producerSnapshot",
    "leader-epoch-checkpoint": "leaderEpoch",
    "txnindex": "transaction",
}
"""Our kind of file -> its name in the manifest, in the order in which they lie in the ``.indexes`` object."""
INDEX_KINDS: Final = tuple(_INDEX_NAMES)
OPTIONAL_KIND: Final = "txnindex"


class IndexFileRange(NamedTuple):
    """Position of an index file in the ``.indexes`` object, and its size there in bytes, encryption included."""

    position: int
    size: int

    @property
    def end(self) -> StoredBytePosition:
        """Return the exclusive end of the file: the position after its last byte."""
        return self.position + self.size


class WrappedSegmentKey(NamedTuple):
    """Wrapped data key of a segment. data_key: key pair id, a colon, base64. aad: associated data as base64."""

    data_key: str
    aad: str


@dataclass(frozen=True)
class SegmentManifest:
    """Decoded manifest of a segment. about: the manifest's ``remoteLogSegmentMetadata``, which no reader needs."""

    chunks: ChunkIndex
    indexes: Mapping[str, IndexFileRange]
    compressed: bool
    key: WrappedSegmentKey | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def encryption_overhead_bytes(self) -> int:
        """Return the number of bytes that encryption adds to a chunk; 0 without encryption."""
        return ENCRYPTION_OVERHEAD if self.key else 0

    @property
    def indexes_size(self) -> StoredBytes:
        """Return the size of the ``.indexes`` object."""
        return max((span.end for span in self.indexes.values()), default=0)

    def plain_file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file before compression and encryption, by kind of file."""
        plain = {kind: span.size and span.size - self.encryption_overhead_bytes for kind, span in self.indexes.items()}
        return {"log": self.chunks.file_size, **plain}

    def encode(self) -> bytes:
        """Encode the manifest as JSON, byte for byte as the plug-in does."""
        document: dict[str, Any] = {
            "version": "1",
            "chunkIndex": self.chunks.to_json(),
            "segmentIndexes": {name: self.indexes[kind]._asdict() if kind in self.indexes else None for kind, name in _INDEX_NAMES.items()},
            "compression": self.compressed,
        }
        if self.key:
            document["encryption"] = {"dataKey": self.key.data_key, "aad": self.key.aad}
        if self.about:
            document["remoteLogSegmentMetadata"] = self.about
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()

    @staticmethod
    def decode(data: bytes) -> SegmentManifest:
        """Decode a manifest from JSON. Raises InvalidAivenDataError for everything that the plug-in refuses or that is inconsistent."""
        document = _parse_manifest_json(data)
        if document.get("version") not in ("1", 1) or isinstance(document.get("version"), bool):
            raise InvalidAivenDataError(f"it has layout version {document.get('version')!r}; this program knows version 1")
        required = ("version", "chunkIndex", "segmentIndexes", "compression")
        _require_exact_fields("the manifest", document, required, ("encryption", "remoteLogSegmentMetadata"))
        key = _read_wrapped_segment_key(document["encryption"]) if document.get("encryption") is not None else None
        chunks = _read_chunk_index(_read_json_object_field(document, "chunkIndex"))
        compressed = document["compression"]
        if not isinstance(compressed, bool):
            raise InvalidAivenDataError("compression is neither true nor false")
        overhead = ENCRYPTION_OVERHEAD if key else 0
        if not compressed:
            chunks.require_uncompressed_chunks(overhead)
        about = document.get("remoteLogSegmentMetadata")
        spans = _read_index_file_ranges(_read_json_object_field(document, "segmentIndexes"), overhead)
        return SegmentManifest(chunks, spans, compressed, key, about if isinstance(about, dict) else {})

    def require_manifest_of_segment(self, partition: TopicPartition, topic_id: TopicId, segment: RemoteLogSegmentMetadata) -> None:
        """Raise InvalidAivenDataError if the manifest is not that of ``segment``. The manifest's end offset may be
        greater than the segment's, because brokers read a segment only up to the offset at which the next one takes over.
        """
        if segment.size_bytes != self.chunks.file_size:
            raise InvalidAivenDataError(f"it describes a log of {self.chunks.file_size} bytes, recorded are {segment.size_bytes}")
        own = segment_metadata_for_manifest(partition, topic_id, segment)
        ours = dict(_flatten_json_fields(own))
        for path, value in _flatten_json_fields(self.about):
            if path in _IDENTIFYING and value != ours[path] and not _is_greater_end_offset_field(path, value, segment.end_offset):
                raise InvalidAivenDataError(f"it is another segment's: {'.'.join(path)} is {value!r}, not {ours[path]!r}")


_ID = "remoteLogSegmentId"
_IDENTIFYING: Final = frozenset(
    {
        (_ID, "topicIdPartition", "topicId"),
        (_ID, "topicIdPartition", "topicPartition", "topic"),
        (_ID, "topicIdPartition", "topicPartition", "partition"),
        (_ID, "id"),
        ("startOffset",),
        ("endOffset",),
    }
)


def _is_greater_end_offset_field(path: JsonPath, value: Any, end_offset: int) -> bool:
    return path == ("endOffset",) and isinstance(value, int) and value > end_offset


def segment_metadata_for_manifest(
    name: TopicPartition, topic_id: TopicId, segment: RemoteLogSegmentMetadata, *, has_transactions: bool = False
) -> dict[str, Any]:
    """Return the manifest's part ``remoteLogSegmentMetadata``, with its fields in the plug-in's order.

    Each attempt to upload a segment gives the same result, because ``eventTimestampMs`` is the modification time of the segment's log.

    :param has_transactions: whether the segment has a transaction index that is not empty (``txnIdxEmpty`` is the opposite).
    """
    partition = {"topicId": topic_id, "topicPartition": {"topic": name.topic, "partition": name.partition}}
    return {
        "remoteLogSegmentId": {"topicIdPartition": partition, "id": segment.id},
        "startOffset": segment.start_offset,
        "endOffset": segment.end_offset,
        "maxTimestampMs": segment.max_timestamp_ms,
        "brokerId": COMPACTOR_BROKER_ID,
        "eventTimestampMs": segment.mtime_ms,
        "segmentLeaderEpochs": {str(entry.epoch): entry.start_offset for entry in segment.leader_epochs},
        "txnIdxEmpty": not has_transactions,
    }


def _flatten_json_fields(table: Mapping[str, Any], path: JsonPath = ()) -> list[tuple[JsonPath, Any]]:
    """Return all fields of nested JSON objects, each as a pair: the path of names that leads to it, and its value."""
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in table.items():
        found += _flatten_json_fields(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)]
    return found


def _parse_manifest_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object without duplicate fields. Raises InvalidAivenDataError."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidAivenDataError(f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_reject_duplicate_fields)
    except (ValueError, RecursionError) as error:
        raise InvalidAivenDataError(f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidAivenDataError("it is not a JSON object")
    return document


def _reject_duplicate_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise InvalidAivenDataError("a field occurs twice")
    return table


def _require_exact_fields(object_name: str, table: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in required:
        if name not in table:
            raise InvalidAivenDataError(f"{object_name} lacks {name}")
    for name in table:
        if name not in required and name not in optional:
            raise InvalidAivenDataError(f"{object_name} has an unknown field {name!r}")


def _read_json_object_field(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document[name]
    if not isinstance(value, dict):
        raise InvalidAivenDataError(f"{name} is no object")
    return value


def _read_int32_field(table: Mapping[str, Any], name: str) -> int:
    value = table[name]
    if type(value) is not int or not 0 <= value <= MAX_INT32:
        raise InvalidAivenDataError(f"{name} is {value!r}, not a number from 0 to {MAX_INT32}")
    return value


def _read_text_field(table: Mapping[str, Any], name: str) -> str:
    value = table[name]
    if not isinstance(value, str):
        raise InvalidAivenDataError(f"{name} is no text")
    return value


def _read_chunk_index(table: Mapping[str, Any]) -> ChunkIndex:
    common = ("type", "originalChunkSize", "originalFileSize")
    if table.get("type") == "fixed":
        _require_exact_fields("chunkIndex", table, (*common, "transformedChunkSize", "finalTransformedChunkSize"))
        lengths = (_read_int32_field(table, "transformedChunkSize"), _read_int32_field(table, "finalTransformedChunkSize"))
    elif table.get("type") == "variable":
        _require_exact_fields("chunkIndex", table, (*common, "transformedChunks"))
        lengths = decode_transformed_chunks_field(_read_text_field(table, "transformedChunks"))  # type: ignore[assignment]
    else:
        raise InvalidAivenDataError(f"the chunk index is of an unknown type {table.get('type')!r}")
    return ChunkIndex(
        _read_int32_field(table, "originalChunkSize"), _read_int32_field(table, "originalFileSize"), lengths, table["type"] == "fixed"
    )


def _read_index_file_ranges(table: Mapping[str, Any], encryption_overhead_bytes: int) -> dict[str, IndexFileRange]:
    _require_exact_fields("segmentIndexes", table, tuple(_INDEX_NAMES.values()))
    found: dict[str, IndexFileRange] = {}
    for kind, name in _INDEX_NAMES.items():
        if table[name] is None and kind == OPTIONAL_KIND:
            continue
        entry = _read_json_object_field(table, name)
        _require_exact_fields(name, entry, ("position", "size"))
        found[kind] = IndexFileRange(_read_int32_field(entry, "position"), _read_int32_field(entry, "size"))
        if 0 < found[kind].size <= encryption_overhead_bytes:
            raise InvalidAivenDataError(f"the {kind} is too short to be encrypted")
    if any(behind.position != before.end for before, behind in pairwise([IndexFileRange(0, 0), *found.values()])):
        raise InvalidAivenDataError("the index files do not follow each other")
    return found


def _read_wrapped_segment_key(table: object) -> WrappedSegmentKey:
    if not isinstance(table, dict):
        raise InvalidAivenDataError("encryption is not an object")
    _require_exact_fields("encryption", table, ("dataKey", "aad"))
    key = WrappedSegmentKey(_read_text_field(table, "dataKey"), _read_text_field(table, "aad"))
    pair, colon, wrapped = key.data_key.partition(":")
    if not pair or not colon:
        raise InvalidAivenDataError("the data key does not say which key pair it is for")
    decode_strict_base64(wrapped, "dataKey")
    decode_strict_base64(key.aad, "aad")
    return key
