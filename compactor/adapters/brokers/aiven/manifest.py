"""Segment manifest ``.rsm-manifest`` of Aiven's plug-in (SegmentManifestV1), with its chunk index, custom metadata, ciphers and keys.

Manifests that the plug-in would refuse are refused here, too. The plug-in writes ``remoteLogSegmentMetadata`` and never reads it; if it
identifies a segment, that must match.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import zstandard

from compactor.constants import TopicId
from compactor.errors import Refused, UsageError
from compactor.extras import require_pip_extra
from compactor.model.ids import COMPACTOR_BROKER_ID, TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata

if TYPE_CHECKING:
    from Crypto.PublicKey.RSA import RsaKey


MAX_INT32: Final = 2**31 - 1
_MAX_CODEC_BYTES: Final = 10 << 20  # VariableSizeChunkIndex reads no more


class InvalidAivenDataError(ValueError):
    """Raised if data of Aiven's plug-in is corrupt or inconsistent. Callers convert it to BadData."""


class StoredChunk(NamedTuple):
    """Bytes [start, start + size) of the log, stored as ``stored_size`` bytes of the object."""

    start: int
    size: int
    stored_start: int
    stored_size: int


@dataclass(frozen=True)
class ChunkIndex:
    """Sizes of the equal chunks of one log (FixedSizeChunkIndex, VariableSizeChunkIndex), in bytes before encoding.

    lengths: stored bytes of each chunk; if ``fixed``, of every chunk but the last, and of the last.
    """

    chunk_size: int
    file_size: int
    lengths: tuple[int, ...]
    fixed: bool

    def __post_init__(self) -> None:
        if not 0 < self.chunk_size <= MAX_INT32 or not 0 <= self.file_size <= MAX_INT32:
            raise InvalidAivenDataError(f"chunks of {self.chunk_size} bytes and a file of {self.file_size}")
        if not self.fixed and len(self.lengths) != self.chunk_count:
            raise InvalidAivenDataError(f"{len(self.lengths)} chunks are listed, {self.file_size} bytes have {self.chunk_count}")
        if any(not 0 <= length <= MAX_INT32 for length in self.lengths):
            raise InvalidAivenDataError("a chunk has an impossible length")

    @property
    def chunk_count(self) -> int:
        return -(-self.file_size // self.chunk_size)

    @property
    def stored_size(self) -> int:
        return self._stored_chunk_start_byte(self.chunk_count)

    def stored_chunk(self, chunk_number: int) -> StoredChunk:
        """Position of a chunk, counted from 0."""
        start = chunk_number * self.chunk_size
        last = chunk_number == self.chunk_count - 1
        size = self.file_size - start if last else self.chunk_size
        stored = self.lengths[1 if last else 0] if self.fixed else self.lengths[chunk_number]
        return StoredChunk(start, size, self._stored_chunk_start_byte(chunk_number), stored)

    def chunk_numbers(self, start_byte: int, end_byte: int) -> range:
        """Chunks that hold bytes [start_byte, end_byte) of the log, which must not be empty."""
        return range(start_byte // self.chunk_size, -(-end_byte // self.chunk_size))

    def require_uncompressed_chunks(self, encryption_overhead_bytes: int) -> None:
        """Raise InvalidAivenDataError unless each chunk has its size plus that of encryption."""
        full = self.chunk_size + encryption_overhead_bytes
        last = self.file_size - (self.chunk_count - 1) * self.chunk_size + encryption_overhead_bytes
        expected = (full, last) if self.fixed else (full,) * (self.chunk_count - 1) + (last,)
        if self.chunk_count and self.lengths != expected:
            raise InvalidAivenDataError("the lengths of chunks do not fit a log that is not compressed")

    def _stored_chunk_start_byte(self, chunk_number: int) -> int:
        if not self.fixed:
            return self._chunk_starts[chunk_number]
        full, last = self.lengths
        return chunk_number * full if chunk_number < self.chunk_count or not chunk_number else (chunk_number - 1) * full + last

    @cached_property
    def _chunk_starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths, initial=0))

    def to_json(self) -> dict[str, Any]:
        common = {"originalChunkSize": self.chunk_size, "originalFileSize": self.file_size}
        if self.fixed:
            full, last = self.lengths
            return {"type": "fixed", **common, "transformedChunkSize": full, "finalTransformedChunkSize": last}
        packed = zstandard.ZstdCompressor(write_content_size=True).compress(encode_chunk_sizes(self.lengths))
        return {"type": "variable", **common, "transformedChunks": base64.b64encode(packed).decode()}


def uncompressed_chunk_index(chunk_size: int, file_size: int, encryption_overhead_bytes: int) -> ChunkIndex:
    count = -(-file_size // chunk_size)
    last = file_size - (count - 1) * chunk_size if count else 0
    return ChunkIndex(chunk_size, file_size, (chunk_size + encryption_overhead_bytes, last + encryption_overhead_bytes), fixed=True)


def compressed_chunk_index(chunk_size: int, file_size: int, lengths: Sequence[int]) -> ChunkIndex:
    return ChunkIndex(chunk_size, file_size, tuple(lengths), fixed=False)


def encode_chunk_sizes(values: Sequence[int]) -> bytes:
    """Encode every value but the last as difference from the smallest, in as few bytes as needed (ChunkSizesBinaryCodec)."""
    if len(values) < 2:
        return struct.pack(f">{1 + len(values)}i", len(values), *values)
    *most, last = values
    base = min(most)
    width = max(1, -(-max(value - base for value in most).bit_length() // 8))
    distances = b"".join((value - base).to_bytes(width, "big") for value in most)
    return struct.pack(">iib", len(values), base, width) + distances + struct.pack(">i", last)


def decode_chunk_sizes(data: bytes) -> tuple[int, ...]:
    """Raises InvalidAivenDataError if the bytes are not exactly one list."""
    try:
        (count,) = struct.unpack_from(">i", data)
        if count < 2:
            if count < 0 or len(data) != 4 + 4 * count:
                raise InvalidAivenDataError("the list of chunks has another length than it says")
            return struct.unpack_from(f">{count}i", data, 4)
        base, width = struct.unpack_from(">ib", data, 4)
        if not 1 <= width <= 4 or len(data) != 13 + (count - 1) * width:
            raise InvalidAivenDataError("the list of chunks has another length than it says")
        most = (base + int.from_bytes(data[at : at + width], "big") for at in range(9, 9 + (count - 1) * width, width))
        return (*most, *struct.unpack_from(">i", data, len(data) - 4))
    except struct.error:
        raise InvalidAivenDataError("the list of chunks is cut off") from None


def decode_transformed_chunks(encoded_lengths: str) -> tuple[int, ...]:
    """Decode base64 of a zstd frame of ``encode_chunk_sizes``. Raises InvalidAivenDataError."""
    packed = decode_strict_base64(encoded_lengths, "transformedChunks")
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= _MAX_CODEC_BYTES:
            raise InvalidAivenDataError("the list of chunks does not say its size, or is larger than the plug-in reads")
        unpacked = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidAivenDataError(f"the list of chunks cannot be decompressed: {error}") from None
    if len(unpacked) != size:
        raise InvalidAivenDataError("the list of chunks is cut off")
    return decode_chunk_sizes(unpacked)


def decode_strict_base64(encoded: str, field_name: str) -> bytes:
    """Decode standard, padded base64 without unused bits. Raises InvalidAivenDataError."""
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidAivenDataError(f"{field_name} is not base64") from None
    if base64.b64encode(data).decode() != encoded:
        raise InvalidAivenDataError(f"{field_name} is not base64 as it is written")
    return data


_REMOTE_SIZE, _OBJECT_PREFIX, _OBJECT_KEY = range(3)


@dataclass(frozen=True)
class CustomMetadata:
    """Custom metadata of a segment: tagged fields as in Kafka's protocol (SegmentCustomMetadataSerde).

    remote_size: total bytes of the three objects.
    object_prefix, object_key: key without suffix of ``.log`` and ``.indexes``, before the configuration's. The manifest's key always comes
        from the configuration.
    unknown: fields with other tags, which are preserved.
    """

    remote_size: int | None = None
    object_prefix: str | None = None
    object_key: str | None = None
    unknown: tuple[tuple[int, bytes], ...] = field(default=())

    def encode(self) -> str:
        """Base64, or an empty string if there are no fields."""
        fields = dict(self.unknown)
        if self.remote_size is not None:
            fields[_REMOTE_SIZE] = _encode_uvarint(self.remote_size << 1 if self.remote_size >= 0 else (-self.remote_size << 1) - 1)
        for tag, text in ((_OBJECT_PREFIX, self.object_prefix), (_OBJECT_KEY, self.object_key)):
            if text is not None:
                fields[tag] = _encode_uvarint(len(text.encode()) + 1) + text.encode()
        if not fields:
            return ""
        parts = (_encode_uvarint(tag) + _encode_uvarint(len(data)) + data for tag, data in sorted(fields.items()))
        return base64.b64encode(_encode_uvarint(len(fields)) + b"".join(parts)).decode()

    @staticmethod
    def decode(encoded_metadata: str) -> CustomMetadata:
        """Raises InvalidAivenDataError if the bytes are corrupt."""
        if not encoded_metadata:
            return CustomMetadata()
        try:
            data = base64.b64decode(encoded_metadata, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidAivenDataError("the custom metadata is not base64") from None
        fields: dict[int, bytes] = {}
        count, at = _decode_uvarint(data, 0)
        last = -1
        for _ in range(count):
            tag, at = _decode_uvarint(data, at)
            size, at = _decode_uvarint(data, at)
            if tag <= last or at + size > len(data):
                raise InvalidAivenDataError("the custom metadata is cut off or out of order")
            fields[tag], at, last = data[at : at + size], at + size, tag
        if at != len(data):
            raise InvalidAivenDataError("the custom metadata continues after its last field")
        known = (_REMOTE_SIZE, _OBJECT_PREFIX, _OBJECT_KEY)
        return CustomMetadata(
            _decode_varlong(fields[_REMOTE_SIZE]) if _REMOTE_SIZE in fields else None,
            _decode_string(fields[_OBJECT_PREFIX]) if _OBJECT_PREFIX in fields else None,
            _decode_string(fields[_OBJECT_KEY]) if _OBJECT_KEY in fields else None,
            tuple((tag, data) for tag, data in fields.items() if tag not in known),
        )


def _encode_uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _decode_uvarint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte, position = data[position], position + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise InvalidAivenDataError("the custom metadata is cut off")


def _decode_varlong(data: bytes) -> int:
    value, at = _decode_uvarint(data, 0)
    if at != len(data):
        raise InvalidAivenDataError("the custom metadata's remote size is not one number")
    return value >> 1 ^ -(value & 1)


def _decode_string(data: bytes) -> str:
    length, at = _decode_uvarint(data, 0)
    try:
        text = data[at:].decode()
    except UnicodeDecodeError:
        raise InvalidAivenDataError("the custom metadata holds no text where a key is due") from None
    if length - 1 != len(data) - at:
        raise InvalidAivenDataError("the custom metadata holds a text of another length than it says")
    return text


# A chunk is a zstd frame that states its size, encrypted ``iv (12) || ciphertext || tag (16)`` (CompressionChunkEnumeration,
# EncryptionChunkEnumeration). An index file is a single chunk and never compressed.


IV_BYTES: Final = 12
TAG_BYTES: Final = 16
ENCRYPTION_OVERHEAD: Final = IV_BYTES + TAG_BYTES


class ChunkCipher(Protocol):
    def encrypt(self, iv: bytes, plain: bytes) -> bytes:
        """Initialization vector, ciphertext and authentication tag, joined."""

    def decrypt(self, stored: bytes) -> bytes:
        """Raises InvalidAivenDataError if the chunk is not authentic."""


def compress_chunk(chunk: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=True).compress(chunk)


def decode_chunk(stored: bytes, plain_bytes: int, cipher: ChunkCipher | None, *, is_compressed: bool) -> bytes:
    """Raises InvalidAivenDataError if the result does not have ``plain_bytes`` bytes."""
    data = cipher.decrypt(stored) if cipher else stored
    if is_compressed:
        data = _decompress_chunk(data, plain_bytes)
    if len(data) != plain_bytes:
        raise InvalidAivenDataError(f"a chunk holds {len(data)} bytes, {plain_bytes} were expected")
    return data


def _decompress_chunk(data: bytes, plain_bytes: int) -> bytes:
    try:
        # A frame that lies about its size would be a bomb.
        if zstandard.frame_content_size(data) != plain_bytes:
            raise InvalidAivenDataError(f"a compressed chunk does not hold {plain_bytes} bytes")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=plain_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidAivenDataError(f"a chunk cannot be decompressed: {error}") from None


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
    position: int
    size: int

    @property
    def end(self) -> int:
        return self.position + self.size


class WrappedSegmentKey(NamedTuple):
    """Wrapped data key: key pair id, a colon, base64. aad: associated data as base64."""

    data_key: str
    aad: str


@dataclass(frozen=True)
class SegmentManifest:
    """Decoded manifest. about: ``remoteLogSegmentMetadata``, which no reader needs."""

    chunks: ChunkIndex
    indexes: Mapping[str, IndexFileRange]
    compressed: bool
    key: WrappedSegmentKey | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def encryption_overhead_bytes(self) -> int:
        return ENCRYPTION_OVERHEAD if self.key else 0

    @property
    def indexes_size(self) -> int:
        return max((span.end for span in self.indexes.values()), default=0)

    def plain_file_sizes(self) -> dict[str, int]:
        plain = {kind: span.size and span.size - self.encryption_overhead_bytes for kind, span in self.indexes.items()}
        return {"log": self.chunks.file_size, **plain}

    def encode(self) -> bytes:
        """JSON, byte for byte as the plug-in writes it."""
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
        """Raises InvalidAivenDataError if the plug-in would refuse the manifest or it is inconsistent."""
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
        """Raise InvalidAivenDataError if the manifest is another segment's. Its end offset may be greater: brokers read a segment up to the
        next one.
        """
        if segment.size_bytes != self.chunks.file_size:
            raise InvalidAivenDataError(f"it describes a log of {self.chunks.file_size} bytes, recorded are {segment.size_bytes}")
        own = segment_metadata_for_manifest(partition, topic_id, segment)
        ours = dict(_flatten_json_fields(own))
        for path, value in _flatten_json_fields(self.about):
            if path in _IDENTIFYING and value != ours[path] and not _is_later_end_offset(path, value, segment.end_offset):
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


def _is_later_end_offset(path: JsonPath, value: Any, end_offset: int) -> bool:
    return path == ("endOffset",) and isinstance(value, int) and value > end_offset


def segment_metadata_for_manifest(
    name: TopicPartition, topic_id: TopicId, segment: RemoteLogSegmentMetadata, *, has_transactions: bool = False
) -> dict[str, Any]:
    """Return ``remoteLogSegmentMetadata`` in the plug-in's order, equal at each attempt: ``eventTimestampMs`` is the log's modification
    time.
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
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in table.items():
        found += _flatten_json_fields(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)]
    return found


def _parse_manifest_json(data: bytes) -> dict[str, Any]:
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
        lengths = decode_transformed_chunks(_read_text_field(table, "transformedChunks"))  # type: ignore[assignment]
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


# Data keys: one per segment, wrapped with the operator's RSA key pair, compatible with RsaEncryptionProvider and AesEncryptionProvider.
# OAEP with SHA3-512 comes from pycryptodome, because ``cryptography`` refuses that hash.


DATA_KEY_BYTES: Final = 32
AAD_BYTES: Final = 32
_SEED_BYTES: Final = 64
_HKDF_PURPOSE: Final = b"tiered-compactor segment key 1"


class SegmentCipher:
    def __init__(self, data_key: bytes, aad: bytes) -> None:
        require_pip_extra("aiven", "an encrypted segment")
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aes = AESGCM(data_key)
        self._aad = aad

    def encrypt(self, iv: bytes, plain: bytes) -> bytes:
        return iv + self._aes.encrypt(iv, plain, self._aad)

    def decrypt(self, stored: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        if len(stored) < ENCRYPTION_OVERHEAD:
            raise InvalidAivenDataError("an encrypted chunk is cut off")
        try:
            return self._aes.decrypt(stored[:IV_BYTES], stored[IV_BYTES:], self._aad)
        except InvalidTag:
            raise InvalidAivenDataError("a chunk is not what was encrypted under the manifest's data key") from None


@dataclass(frozen=True)
class SegmentCipherAndWrappedKey:
    cipher: SegmentCipher
    key: WrappedSegmentKey


class PrivateKeyRing:
    """Private keys by key pair id, read from PEM files (PKCS#8) on first use. Thread-safe."""

    def __init__(self, pem_file_by_key_pair_id: Mapping[str, str]) -> None:
        self._files = pem_file_by_key_pair_id
        self._keys: dict[str, RsaKey] = {}
        self._lock = threading.Lock()

    def unwrap_segment_key(self, key: WrappedSegmentKey) -> SegmentCipher:
        """Raise Refused if the private key is missing or does not match, UsageError if the file holds no private key."""
        pair, _, wrapped = key.data_key.partition(":")
        if pair not in self._files:
            known = ", ".join(sorted(self._files)) or "none"
            raise Refused(
                f"it is encrypted for key pair {pair!r}, whose private key is not configured (there: {known})",
                hint=f'Add {pair} = "/path/to/its/private.pem" to key_pairs under [tier.aiven]',
            )
        private = self._private_key(pair)
        from Crypto.Cipher import PKCS1_OAEP
        from Crypto.Hash import SHA3_512

        try:
            data_key = PKCS1_OAEP.new(private, SHA3_512).decrypt(base64.b64decode(wrapped))
        except ValueError as error:
            raise _private_key_mismatch_error(pair, self._files[pair]) from error
        if len(data_key) != DATA_KEY_BYTES:
            raise _private_key_mismatch_error(pair, self._files[pair])
        return SegmentCipher(data_key, base64.b64decode(key.aad))

    def derive_segment_key(self, key_pair_id: str, segment_id: str, chunks_digest: bytes) -> SegmentCipherAndWrappedKey:
        """Derive cipher and data key from the digest of all chunks to be encrypted: no key is ever used for other content. Raises
        UsageError if the key pair is missing.
        """
        private = self._private_key(key_pair_id)
        from Crypto.Cipher import PKCS1_OAEP
        from Crypto.Hash import SHA3_512
        from cryptography.hazmat.primitives.hashes import SHA512
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        # The plug-in draws these at random. Derived, a segment that is uploaded again after a crash has the same bytes (determinism, I7):
        # HKDF-SHA512(private exponent, purpose || pair || segment id || digest) gives data key (32), associated data (32), OAEP seed (64).
        # The digest is of *every byte that is encrypted*, in its chunks. Different contents therefore never share a data key, and under one
        # data key no initialization vector (4 bytes for the object, 8 for the chunk number: SP 800-38D, 8.2.1) is used for two plaintexts.
        # Without the private key the derived keys cannot be told from random ones.
        secret = private.d.to_bytes((int(private.n).bit_length() + 7) // 8, "big")
        info = b"\0".join((_HKDF_PURPOSE, key_pair_id.encode(), segment_id.encode(), chunks_digest))
        derived = HKDF(SHA512(), DATA_KEY_BYTES + AAD_BYTES + _SEED_BYTES, salt=None, info=info).derive(secret)
        data_key, aad, seed = derived[:DATA_KEY_BYTES], derived[DATA_KEY_BYTES : DATA_KEY_BYTES + AAD_BYTES], derived[-_SEED_BYTES:]
        wrapped = PKCS1_OAEP.new(private.public_key(), SHA3_512, randfunc=lambda size: seed[:size]).encrypt(data_key)
        return SegmentCipherAndWrappedKey(
            SegmentCipher(data_key, aad),
            WrappedSegmentKey(f"{key_pair_id}:{base64.b64encode(wrapped).decode()}", base64.b64encode(aad).decode()),
        )

    def placeholder_segment_key(self, key_pair_id: str) -> WrappedSegmentKey:
        """Dummy key of a real one's length, for the manifest's size."""
        wrapped = bytes((int(self._private_key(key_pair_id).n).bit_length() + 7) // 8)
        return WrappedSegmentKey(f"{key_pair_id}:{base64.b64encode(wrapped).decode()}", base64.b64encode(bytes(AAD_BYTES)).decode())

    def _private_key(self, key_pair_id: str) -> RsaKey:
        with self._lock:
            if key_pair_id not in self._keys:
                self._keys[key_pair_id] = _load_private_key(key_pair_id, self._files[key_pair_id])
            return self._keys[key_pair_id]


def derive_chunk_iv(stream_number: int, chunk_number: int) -> bytes:
    """Initialization vector, unique within a segment. stream_number: 0 for the log, 1 for the index files. Chunks count from 0."""
    return stream_number.to_bytes(4, "big") + chunk_number.to_bytes(8, "big")


def _load_private_key(key_pair_id: str, pem_file: str) -> RsaKey:
    require_pip_extra("aiven", "an encrypted segment")
    from Crypto.PublicKey import RSA

    hint = "key_pairs under [tier.aiven] names, for each id, a PEM file with an RSA private key (PKCS#8)"
    try:
        key = RSA.import_key(Path(pem_file).read_bytes())
    except OSError as error:
        raise UsageError(
            f"the private key of key pair {key_pair_id!r} cannot be read from {pem_file}: {error.strerror}", hint=hint
        ) from error
    except (ValueError, IndexError, TypeError) as error:
        raise UsageError(f"{pem_file}, for key pair {key_pair_id!r}, is not a private key: {error}", hint=hint) from error
    if not key.has_private():
        raise UsageError(f"{pem_file}, for key pair {key_pair_id!r}, is a public key; the private one is needed", hint=hint)
    return key


def _private_key_mismatch_error(key_pair_id: str, pem_file: str) -> Refused:
    return Refused(
        f"its data key cannot be unwrapped with {pem_file}, which is configured for key pair {key_pair_id!r}: another key, or the manifest "
        "is damaged",
        hint="Compare key_pairs under [tier.aiven] with the brokers' rsm.config.encryption.key.pairs",
    )
