"""A segment's files as the three objects that hold them. The same files and settings give the same bytes, whoever packs them.

The log is read twice where it is encrypted: the keys depend on all of it. What is compressed or encrypted is staged beside the log, so
packing needs that much disk; a log that is stored as it is needs none.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from compactor.config import Aiven
from compactor.errors import BadData
from compactor.model.ids import TopicPartition
from compactor.model.segment import RemoteLogSegmentMetadata
from compactor.tier.contents import FileContent, opened, pieces, size_of
from compactor.tier.layouts.aiven.chunk_index import ChunkIndex, fixed_index, variable_index
from compactor.tier.layouts.aiven.custom_metadata import CustomMetadata
from compactor.tier.layouts.aiven.encryption import KeyRing, Sealed, iv
from compactor.tier.layouts.aiven.keys import INDEXES, LOG, MANIFEST, ObjectKeys
from compactor.tier.layouts.aiven.manifest import INDEX_KINDS, OPTIONAL_KIND, IndexSpan, Manifest, SegmentKey, about_segment
from compactor.tier.layouts.aiven.transform import IV_BYTES, OVERHEAD, TAG_BYTES, compress

_HEAD_BYTES: Final = 23
_ZSTD_BOUND: Final = 512
_LOG, _INDEX_FILES = 0, 1  # streams of encryption.iv


@dataclass(frozen=True)
class PackedSegment:
    """``objects``: suffix -> content, in the order of upload."""

    objects: Mapping[str, FileContent]


class Packer:
    def __init__(self, settings: Aiven, keys: ObjectKeys, ring: KeyRing) -> None:
        self._settings = settings
        self._keys = keys
        self._ring = ring

    @contextmanager
    def packed(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> Iterator[PackedSegment]:
        """Inside the block the objects are there to be read. Raises BadData for a segment that the plug-in could not have."""
        log = contents["log"]
        self._check(name, segment, contents)
        if not self._settings.active_key_pair and not self._compresses(log):
            chunks = fixed_index(self._settings.chunk_size, size_of(log), 0)
            yield self._whole(name, segment, log, contents, chunks, None)
            return
        staged = None if isinstance(log, bytes) else log.with_name(f"{log.name}.packed")
        try:
            with io.BytesIO() if staged is None else staged.open("w+b") as file:
                chunks, sealed = self._write(file, segment, contents)
                file.flush()
                body = file.getvalue() if isinstance(file, io.BytesIO) else staged
                assert body is not None  # noqa: S101 - a file has a path
                yield self._whole(name, segment, body, contents, chunks, sealed)
        finally:
            if staged is not None:
                staged.unlink(missing_ok=True)

    def room(self, log_bytes: int) -> int:
        """Bytes of disk that packing a log of this size may stage."""
        if not self._settings.active_key_pair and self._settings.compression == "none":
            return 0
        chunks = -(-log_bytes // self._settings.chunk_size)
        return log_bytes + log_bytes // 255 + chunks * (OVERHEAD + _ZSTD_BOUND)  # ZSTD_compressBound, where nothing can be compressed

    def custom_metadata(
        self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> CustomMetadata:
        """What metadata has to say of the segment, before anything is uploaded. Compresses the log if the size depends on it."""
        fields = self._settings.custom_metadata_fields
        return CustomMetadata(
            self._remote_size(name, segment, contents) if "REMOTE_SIZE" in fields else None,
            self._keys.prefix if "OBJECT_PREFIX" in fields else None,
            self._keys.main_path(name, segment) if "OBJECT_KEY" in fields else None,
        )

    def _remote_size(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> int:
        self._check(name, segment, contents)
        log, pair = contents["log"], self._settings.active_key_pair
        overhead = OVERHEAD if pair else 0
        if self._compresses(log):
            lengths = [len(compress(chunk)) + overhead for chunk in pieces(log, self._settings.chunk_size)]
            chunks = variable_index(self._settings.chunk_size, size_of(log), lengths)
        else:
            chunks = fixed_index(self._settings.chunk_size, size_of(log), overhead)
        manifest = self._manifest(name, segment, contents, chunks, self._ring.placeholder(pair) if pair else None)
        return chunks.stored_size + manifest.indexes_size + len(manifest.encode())

    def _check(self, name: TopicPartition, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]) -> None:
        where = self._keys.key(name, segment, LOG)
        if not size_of(contents["log"]):
            raise BadData("a log without a byte cannot be tiered: brokers never get past it", segment=where)
        missing = [kind for kind in INDEX_KINDS if kind not in contents and kind != OPTIONAL_KIND]
        if missing:
            raise BadData(f"the segment has no {missing[0]}, without which brokers cannot use it", segment=where)

    def _compresses(self, log: FileContent) -> bool:
        how = self._settings.compression
        return how == "zstd" or (how == "heuristic" and not _is_compressed(log))

    def _write(
        self, file: BinaryIO, segment: RemoteLogSegmentMetadata, contents: Mapping[str, FileContent]
    ) -> tuple[ChunkIndex, Sealed | None]:
        """The log's chunks, first as they are before encryption with room around them, then encrypted in place."""
        log, pair, chunk_size = contents["log"], self._settings.active_key_pair, self._settings.chunk_size
        overhead = OVERHEAD if pair else 0
        squeezed: Callable[[bytes], bytes] = compress if self._compresses(log) else bytes
        lengths, digest = [], hashlib.sha256()
        for chunk in pieces(log, chunk_size):
            data = squeezed(chunk)
            _frame(digest.update, data)
            file.write(bytes(IV_BYTES) + data + bytes(TAG_BYTES) if pair else data)
            lengths.append(len(data) + overhead)
        size = size_of(log)
        chunks = variable_index(chunk_size, size, lengths) if squeezed is compress else fixed_index(chunk_size, size, overhead)
        if not pair:
            return chunks, None
        for _, content in _index_files(contents):
            _frame(digest.update, content)
        sealed = self._ring.sealed(pair, segment.id, digest.digest())
        at = 0
        for number, length in enumerate(lengths):
            file.seek(at + IV_BYTES)
            data = file.read(length - OVERHEAD)
            file.seek(at)
            file.write(sealed.cipher.encrypted(iv(_LOG, number), data))
            at += length
        return chunks, sealed

    def _whole(
        self,
        name: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        log: FileContent,
        contents: Mapping[str, FileContent],
        chunks: ChunkIndex,
        sealed: Sealed | None,
    ) -> PackedSegment:
        parts = [
            sealed.cipher.encrypted(iv(_INDEX_FILES, number), content) if sealed and content else content
            for number, (_, content) in enumerate(_index_files(contents))
        ]
        manifest = self._manifest(name, segment, contents, chunks, sealed.key if sealed else None)
        return PackedSegment({LOG: log, INDEXES: b"".join(parts), MANIFEST: manifest.encode()})

    def _manifest(
        self,
        name: TopicPartition,
        segment: RemoteLogSegmentMetadata,
        contents: Mapping[str, FileContent],
        chunks: ChunkIndex,
        key: SegmentKey | None,
    ) -> Manifest:
        spans, at = {}, 0
        for kind, content in _index_files(contents):
            spans[kind] = IndexSpan(at, len(content) + OVERHEAD if key and content else len(content))
            at = spans[kind].end
        about = about_segment(name, self._keys.topic_id(name), segment, has_transactions="txnindex" in contents)
        return Manifest(chunks, spans, not chunks.fixed, key, about)


def _index_files(contents: Mapping[str, FileContent]) -> list[tuple[str, bytes]]:
    """In the order in which they are stored. They are small: index files are bounded by segment.index.bytes."""
    return [(kind, _read(contents[kind])) for kind in INDEX_KINDS if kind in contents]


def _read(content: FileContent) -> bytes:
    return content.read_bytes() if isinstance(content, Path) else content


def _frame(update: Callable[[bytes], None], data: bytes) -> None:
    update(len(data).to_bytes(8, "big"))
    update(data)


def _is_compressed(log: FileContent) -> bool:
    """Whether the first batch is, as the plug-in's heuristic has it (SegmentCompressionChecker)."""
    with opened(log) as file:
        head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES:
        return False
    attributes = head[22] if head[16] == 2 else head[17]  # of a batch, or of a message of magic 0 and 1
    return attributes & 7 != 0
