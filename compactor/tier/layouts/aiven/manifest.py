"""``.rsm-manifest``: one JSON object (SegmentManifestV1). What the plug-in would refuse we refuse, and what does not fit together, too.

``remoteLogSegmentMetadata`` is for people: the plug-in writes it and never reads it, and anything may stand in it. Where it names the
segment, it has to be the right one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.layouts.aiven.chunk_index import INT32, ChunkIndex, Misfit, read_lengths, strict_base64
from compactor.tier.layouts.aiven.transform import OVERHEAD

MAX_BYTES: Final = 64 << 20

_INDEXES: Final = {
    "index": "offset",
    "timeindex": "timestamp",
    "snapshot": "producerSnapshot",
    "leader-epoch-checkpoint": "leaderEpoch",
    "txnindex": "transaction",
}
"""Our kind of file -> its name in the manifest, in the order in which they lie in the ``.indexes`` object."""
INDEX_KINDS: Final = tuple(_INDEXES)
OPTIONAL_KIND: Final = "txnindex"


class IndexSpan(NamedTuple):
    """Bytes of the ``.indexes`` object: what is stored, encryption included."""

    position: int
    size: int

    @property
    def end(self) -> int:
        return self.position + self.size


class SegmentKey(NamedTuple):
    """``data_key``: id of the key pair, a colon, base64 of what its public key made of the data key. ``aad``: base64."""

    data_key: str
    aad: str


@dataclass(frozen=True)
class Manifest:
    chunks: ChunkIndex
    indexes: Mapping[str, IndexSpan]
    compressed: bool
    key: SegmentKey | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def overhead(self) -> int:
        """Bytes that encryption adds to a chunk."""
        return OVERHEAD if self.key else 0

    @property
    def indexes_size(self) -> int:
        """Of the ``.indexes`` object."""
        return max((span.end for span in self.indexes.values()), default=0)

    def sizes(self) -> dict[str, int]:
        """Kind -> bytes of the plain file."""
        plain = {kind: span.size and span.size - self.overhead for kind, span in self.indexes.items()}
        return {"log": self.chunks.file_size, **plain}

    def encode(self) -> bytes:
        """As the plug-in writes it, to the byte."""
        document: dict[str, Any] = {
            "version": "1",
            "chunkIndex": self.chunks.to_json(),
            "segmentIndexes": {name: self.indexes[kind]._asdict() if kind in self.indexes else None for kind, name in _INDEXES.items()},
            "compression": self.compressed,
        }
        if self.key:
            document["encryption"] = {"dataKey": self.key.data_key, "aad": self.key.aad}
        if self.about:
            document["remoteLogSegmentMetadata"] = self.about
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Raises Misfit."""
        document = _parsed(data)
        if document.get("version") not in ("1", 1) or isinstance(document.get("version"), bool):
            raise Misfit(f"it has layout version {document.get('version')!r}; this program knows version 1")
        required = ("version", "chunkIndex", "segmentIndexes", "compression")
        _check_fields("the manifest", document, required, ("encryption", "remoteLogSegmentMetadata"))
        key = _key(document["encryption"]) if document.get("encryption") is not None else None
        chunks = _chunk_index(_table(document, "chunkIndex"))
        compressed = document["compression"]
        if not isinstance(compressed, bool):
            raise Misfit("compression is neither true nor false")
        overhead = OVERHEAD if key else 0
        if not compressed:
            chunks.check_unpacked(overhead)
        about = document.get("remoteLogSegmentMetadata")
        spans = _spans(_table(document, "segmentIndexes"), overhead)
        return Manifest(chunks, spans, compressed, key, about if isinstance(about, dict) else {})

    def check_is_of(self, name: TopicPartition, topic_id: str, segment: RemoteLogSegmentMetadata) -> None:
        """Whether it is this segment's. Raises Misfit."""
        if segment.size_bytes != self.chunks.file_size:
            raise Misfit(f"it describes a log of {self.chunks.file_size} bytes, recorded are {segment.size_bytes}")
        own = about_segment(name, topic_id, segment)
        ours = dict(_leaves(own))
        for path, value in _leaves(self.about):
            if path in _IDENTIFYING and value != ours[path]:
                raise Misfit(f"it is another segment's: {'.'.join(path)} is {value!r}, not {ours[path]!r}")


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


def about_segment(
    name: TopicPartition, topic_id: str, segment: RemoteLogSegmentMetadata, *, has_transactions: bool = False
) -> dict[str, Any]:
    """``remoteLogSegmentMetadata``, in the plug-in's order.

    The same for each attempt to write a segment: as its time stands that of the last append.
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


def _leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in table.items():
        found += _leaves(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)]
    return found


def _parsed(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise Misfit(f"it is larger than {MAX_BYTES} bytes")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        raise Misfit(f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Misfit("it is no JSON object")
    return document


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise Misfit("a field stands there twice")
    return table


def _check_fields(what: str, table: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for name in required:
        if name not in table:
            raise Misfit(f"{what} lacks {name}")
    for name in table:
        if name not in required and name not in optional:
            raise Misfit(f"{what} has an unknown field {name!r}")


def _table(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = document[name]
    if not isinstance(value, dict):
        raise Misfit(f"{name} is no object")
    return value


def _number(table: Mapping[str, Any], name: str) -> int:
    value = table[name]
    if type(value) is not int or not 0 <= value <= INT32:
        raise Misfit(f"{name} is {value!r}, not a number from 0 to {INT32}")
    return value


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table[name]
    if not isinstance(value, str):
        raise Misfit(f"{name} is no text")
    return value


def _chunk_index(table: Mapping[str, Any]) -> ChunkIndex:
    common = ("type", "originalChunkSize", "originalFileSize")
    if table.get("type") == "fixed":
        _check_fields("chunkIndex", table, (*common, "transformedChunkSize", "finalTransformedChunkSize"))
        lengths = (_number(table, "transformedChunkSize"), _number(table, "finalTransformedChunkSize"))
    elif table.get("type") == "variable":
        _check_fields("chunkIndex", table, (*common, "transformedChunks"))
        lengths = read_lengths(_text(table, "transformedChunks"))  # type: ignore[assignment]
    else:
        raise Misfit(f"the chunk index is of an unknown type {table.get('type')!r}")
    return ChunkIndex(_number(table, "originalChunkSize"), _number(table, "originalFileSize"), lengths, table["type"] == "fixed")


def _spans(table: Mapping[str, Any], overhead: int) -> dict[str, IndexSpan]:
    _check_fields("segmentIndexes", table, tuple(_INDEXES.values()))
    found: dict[str, IndexSpan] = {}
    for kind, name in _INDEXES.items():
        if table[name] is None and kind == OPTIONAL_KIND:
            continue
        entry = _table(table, name)
        _check_fields(name, entry, ("position", "size"))
        found[kind] = IndexSpan(_number(entry, "position"), _number(entry, "size"))
        if 0 < found[kind].size <= overhead:
            raise Misfit(f"the {kind} is too short to be encrypted")
    if any(behind.position != before.end for before, behind in pairwise([IndexSpan(0, 0), *found.values()])):
        raise Misfit("the index files do not lie one behind the other")
    return found


def _key(table: object) -> SegmentKey:
    if not isinstance(table, dict):
        raise Misfit("encryption is no object")
    _check_fields("encryption", table, ("dataKey", "aad"))
    key = SegmentKey(_text(table, "dataKey"), _text(table, "aad"))
    pair, colon, wrapped = key.data_key.partition(":")
    if not pair or not colon:
        raise Misfit("the data key does not say which key pair it is for")
    strict_base64(wrapped, "dataKey")
    strict_base64(key.aad, "aad")
    return key
