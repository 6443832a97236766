"""Conversion of a segment's files to the three objects of the plug-in. Equal files and settings always give equal bytes.

An encrypted log is read twice, because its keys depend on its content. Compressed or encrypted data is staged beside the log, which needs
as much disk; a log that is stored as it is needs none.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from compactor.config.settings import AivenSettings
from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.contents import FileContent, content_size, open_content, read_pieces
from compactor.tier.layouts.aiven.chunk_index import ChunkIndex, fixed_chunk_index, variable_chunk_index
from compactor.tier.layouts.aiven.custom_metadata import CustomMetadata
from compactor.tier.layouts.aiven.encryption import KeyRing, SealedSegmentKey, chunk_iv
from compactor.tier.layouts.aiven.manifest import INDEX_KINDS, OPTIONAL_KIND, IndexSpan, Manifest, SegmentKey, segment_description
from compactor.tier.layouts.aiven.transform import ENCRYPTION_OVERHEAD, IV_BYTES, TAG_BYTES, compress_chunk
from compactor.tier.names import ObjectStem, TopicIdOf, object_stem
from compactor.tier.ports import SegmentRef

LOG: Final = "log"
INDEXES: Final = "indexes"
MANIFEST: Final = "rsm-manifest"
SUFFIXES: Final = (LOG, INDEXES, MANIFEST)
_FOLDER: Final = re.compile(r"([^/]+)-[A-Za-z0-9_-]{22}/(\d+)/[^/]+")
"""In the order of upload."""


@dataclass(frozen=True)
class ObjectKeys:
    """Builds and parses the object keys of segments under one prefix."""

    prefix: str
    topic_id: TopicIdOf

    def partition_folder(self, name: TopicPartition) -> str:
        """Return the key prefix of a partition's objects. It ends in a slash, so that partition 1 is not a prefix of partition 10."""
        return f"{self.prefix}{name.topic}-{self.topic_id(name)}/{name.partition}/"

    def main_path(self, name: TopicPartition, segment: SegmentRef) -> str:
        """Return a segment's object key without prefix and suffix."""
        return f"{name.topic}-{self.topic_id(name)}/{name.partition}/{object_stem(segment)}"

    def object_key(self, name: TopicPartition, segment: SegmentRef, suffix: str) -> str:
        """Return the key of a segment's object. suffix: one of SUFFIXES."""
        return f"{self.prefix}{self.main_path(name, segment)}.{suffix}"

    def partition_of(self, key: str) -> str:
        """Return the partition of a key as ``topic-partition``, whatever its topic id is, or an empty string."""
        match = _FOLDER.fullmatch(key.removeprefix(self.prefix)) if key.startswith(self.prefix) else None
        return f"{match[1]}-{match[2]}" if match else ""

    def parse_object_key(self, name: TopicPartition, key: str) -> tuple[ObjectStem, str] | None:
        """Return the offset and segment id in a key of the partition's folder, and its suffix; None for a foreign object."""
        first, _, suffix = key.removeprefix(self.partition_folder(name)).partition(".")
        found = ObjectStem.parse(first)
        return (found, suffix) if found and suffix in SUFFIXES else None


_BATCH_HEADER_BYTES: Final = 23
_ZSTD_BOUND: Final = 512
_LOG, _INDEX_FILES = 0, 1  # streams of encryption.iv


@dataclass(frozen=True)
class PackedSegment:
    """The stored form of a segment: the content of its objects by suffix, in the order of upload."""

    objects: Mapping[str, FileContent]


class Packer:
    """Compresses and encrypts segments according to [tier.aiven]."""

    def __init__(self, settings: AivenSettings, keys: ObjectKeys, ring: KeyRing) -> None:
        self._settings = settings
        self._keys = keys
        self._ring = ring

    @contextmanager
    def packed_objects(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> Iterator[PackedSegment]:
        """Compress and encrypt a segment into its objects, which can be read within the ``with`` block.

        Raises BadData if the plug-in could not store the segment.
        """
        log = contents["log"]
        self._check_files(name, segment, contents)
        if not self._settings.active_key_pair and not self._is_compression_needed(log):
            chunks = fixed_chunk_index(self._settings.chunk_size, content_size(log), 0)
            yield self._pack_objects(name, segment, log, contents, chunks, None)
            return
        staged = None if isinstance(log, bytes) else log.with_name(f"{log.name}.packed")
        try:
            with io.BytesIO() if staged is None else staged.open("w+b") as file:
                chunks, sealed = self._write_chunks(file, segment, contents)
                file.flush()
                body = file.getvalue() if isinstance(file, io.BytesIO) else staged
                assert body is not None  # noqa: S101 - a file has a path
                yield self._pack_objects(name, segment, body, contents, chunks, sealed)
        finally:
            if staged is not None:
                staged.unlink(missing_ok=True)

    def packing_space_bytes(self, log_bytes: int) -> int:
        """Return the most bytes of disk that compressing and encrypting a log of this size may need."""
        if not self._settings.active_key_pair and self._settings.compression == "none":
            return 0
        chunks = -(-log_bytes // self._settings.chunk_size)
        return (
            log_bytes + log_bytes // 255 + chunks * (ENCRYPTION_OVERHEAD + _ZSTD_BOUND)
        )  # ZSTD_compressBound, where nothing can be compressed

    def custom_metadata(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> CustomMetadata:
        """Return a segment's custom metadata before it is uploaded. Compresses the log if the size depends on it."""
        fields = self._settings.custom_metadata_fields
        return CustomMetadata(
            self._remote_size(name, segment, contents) if "REMOTE_SIZE" in fields else None,
            self._keys.prefix if "OBJECT_PREFIX" in fields else None,
            self._keys.main_path(name, segment) if "OBJECT_KEY" in fields else None,
        )

    def _remote_size(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> int:
        """Return the total size in bytes that a segment's three objects will have."""
        self._check_files(name, segment, contents)
        log, pair = contents["log"], self._settings.active_key_pair
        overhead = ENCRYPTION_OVERHEAD if pair else 0
        if self._is_compression_needed(log):
            lengths = [len(compress_chunk(chunk)) + overhead for chunk in read_pieces(log, self._settings.chunk_size)]
            chunks = variable_chunk_index(self._settings.chunk_size, content_size(log), lengths)
        else:
            chunks = fixed_chunk_index(self._settings.chunk_size, content_size(log), overhead)
        manifest = self._build_manifest(name, segment, contents, chunks, self._ring.placeholder_key(pair) if pair else None)
        return chunks.stored_size + manifest.indexes_size + len(manifest.encode())

    def _check_files(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> None:
        """Raise BadData if the log is empty or a required file is missing."""
        where = self._keys.object_key(name, segment, LOG)
        if not content_size(contents["log"]):
            raise BadData("a log without a byte cannot be tiered: brokers never get past it", segment=where)
        missing = [kind for kind in INDEX_KINDS if kind not in contents and kind != OPTIONAL_KIND]
        if missing:
            raise BadData(f"the segment has no {missing[0]}, without which brokers cannot use it", segment=where)

    def _is_compression_needed(self, log: FileContent) -> bool:
        """Return whether the settings require that this log is compressed before it is stored."""
        how = self._settings.compression
        return how == "zstd" or (how == "heuristic" and not _is_compressed(log))

    def _write_chunks(
        self, file: BinaryIO, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> tuple[ChunkIndex, SealedSegmentKey | None]:
        """Write the log's chunks, leaving space for encryption, then encrypt them in place."""
        log, pair, chunk_size = contents["log"], self._settings.active_key_pair, self._settings.chunk_size
        overhead = ENCRYPTION_OVERHEAD if pair else 0
        squeezed: Callable[[bytes], bytes] = compress_chunk if self._is_compression_needed(log) else bytes
        lengths, digest = [], hashlib.sha256()
        for chunk in read_pieces(log, chunk_size):
            data = squeezed(chunk)
            _update_framed(digest.update, data)
            file.write(bytes(IV_BYTES) + data + bytes(TAG_BYTES) if pair else data)
            lengths.append(len(data) + overhead)
        size = content_size(log)
        chunks = (
            variable_chunk_index(chunk_size, size, lengths) if squeezed is compress_chunk else fixed_chunk_index(chunk_size, size, overhead)
        )
        if not pair:
            return chunks, None
        for _, content in _index_contents(contents):
            _update_framed(digest.update, content)
        sealed = self._ring.derive_segment_key(pair, segment.id, digest.digest())
        at = 0
        for number, length in enumerate(lengths):
            file.seek(at + IV_BYTES)
            data = file.read(length - ENCRYPTION_OVERHEAD)
            file.seek(at)
            file.write(sealed.cipher.encrypt(chunk_iv(_LOG, number), data))
            at += length
        return chunks, sealed

    def _pack_objects(
        self,
        name: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        log: FileContent,
        contents: Mapping[str, FileContent],
        chunks: ChunkIndex,
        sealed: SealedSegmentKey | None,
    ) -> PackedSegment:
        """Return the content of the segment's three objects. Encrypts the index files and builds the manifest."""
        parts = [
            sealed.cipher.encrypt(chunk_iv(_INDEX_FILES, number), content) if sealed and content else content
            for number, (_, content) in enumerate(_index_contents(contents))
        ]
        manifest = self._build_manifest(name, segment, contents, chunks, sealed.key if sealed else None)
        return PackedSegment({LOG: log, INDEXES: b"".join(parts), MANIFEST: manifest.encode()})

    def _build_manifest(
        self,
        name: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        contents: Mapping[str, FileContent],
        chunks: ChunkIndex,
        key: SegmentKey | None,
    ) -> Manifest:
        """Create the manifest of a segment from its chunk index, index files and key."""
        spans, at = {}, 0
        for kind, content in _index_contents(contents):
            spans[kind] = IndexSpan(at, len(content) + ENCRYPTION_OVERHEAD if key and content else len(content))
            at = spans[kind].end
        about = segment_description(name, self._keys.topic_id(name), segment, has_transactions="txnindex" in contents)
        return Manifest(chunks, spans, not chunks.fixed, key, about)


def _index_contents(contents: Mapping[str, FileContent]) -> list[tuple[str, bytes]]:
    """Return the index files in the order in which they are stored. They are small, bounded by segment.index.bytes."""
    return [(kind, _read_content(contents[kind])) for kind in INDEX_KINDS if kind in contents]


def _read_content(content: FileContent) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def _update_framed(update: Callable[[bytes], None], data: bytes) -> None:
    """Add bytes to a digest, preceded by their length, so that no other division of the bytes gives the same digest."""
    update(len(data).to_bytes(8, "big"))
    update(data)


def _is_compressed(log: FileContent) -> bool:
    """Return whether the first batch is compressed, by the plug-in's heuristic (SegmentCompressionChecker)."""
    with open_content(log) as file:
        head = file.read(_BATCH_HEADER_BYTES)
    if len(head) < _BATCH_HEADER_BYTES:
        return False
    attributes = head[22] if head[16] == 2 else head[17]  # of a batch, or of a message of magic 0 and 1
    return attributes & 7 != 0
